"""How much of what was computed only fills up shorter inputs, and how much of that do length buckets save?"""

from __future__ import annotations

from collections.abc import Iterable

from batchtune.scenario.units import percentage
from batchtune.target.telemetry import ServerActivity


def padding_per_element(servers: Iterable[ServerActivity | None]) -> float | None:
    """Elements of padding for each that a request brought, over several runs; None: no server tells of any."""
    known = [server for server in servers if server is not None]
    sent = sum(sum(server.bucket_sent_elements.values()) for server in known)
    padding = sum(sum(server.bucket_padding_elements.values()) for server in known)
    return padding / sent if sent else None


def padding_share(per_element: float) -> str:
    """Of all elements computed, those that are padding, as a percentage."""
    return percentage(per_element / (1.0 + per_element))


def saved_text(per_element: float, *, in_one_queue: float) -> str:
    """`padding saved: 84 %`: how much less padding there is for the same requests; "" where there is none to save."""
    if in_one_queue <= 0.0:
        return ""
    saved = 1.0 - per_element / in_one_queue
    return f"padding saved: {percentage(saved)}" if saved >= 0 else f"padding added: {percentage(-saved)}"


def bucket_text(server: ServerActivity) -> str:
    """The share of padding, in all and by bucket; "" where no input may differ in length."""
    whole = padding_per_element([server])
    if whole is None:
        return ""
    text = f"length padding: {padding_share(whole)} of the elements computed"
    shares = [
        f"{bucket}: {padding_share(server.bucket_padding_elements.get(bucket, 0) / sent)}"
        for bucket, sent in sorted(server.bucket_sent_elements.items(), key=lambda item: _boundary(item[0]))
        if bucket
    ]
    return f"{text} (bucket {', '.join(shares)})" if shares else text


def _boundary(bucket: str) -> float:
    return float(bucket) if bucket.isdecimal() else float("inf")
