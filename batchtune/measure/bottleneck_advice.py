"""What is there to do about what limits a run, in its own case: protocol, batching, open or closed loop?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, assert_never

from batchtune.batching.triton_words import WORDS
from batchtune.scenario.spec.request import Protocol

Kind = Literal[
    "host_noise",
    "client",
    "queue_limit",
    "server_threads",
    "batch_timeout",
    "concurrency",
    "batch_threads",
    "device",
    "front_end",
    "errors",
    "none",
]

_MORE_DEVICE: Final = "a faster device, a smaller model or more replicas"
TRY_BATCHING: Final = "batching was off: `batchtune sweep` measures whether it does more in the same time"
"""For a load test of its own: a sweep and a comparison have measured it."""
_THREADS_FLAG: Final[Mapping[Protocol | None, str]] = {
    "grpc": " (grpc_max_threads)",
    "rest": " (rest_api_num_threads)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Under which conditions a run was limited.

    `protocol` is the scenario's, None: not known. `batching` None: nobody says whether the server batches, nor with
    which parameters. `batches_full` says whether fuller batches have nothing left to give: they are full, or hardly
    cheaper a row when they are; None: not known. `met` is whether an open loop was answered as fast as it was offered,
    `disturbed` whether other programs took the machine's time meanwhile.
    """

    protocol: Protocol | None
    batching: bool | None
    closed: bool
    batches_full: bool | None = None
    met: bool = True
    disturbed: bool = False


_TRITONS_WORDS: Final[Mapping[str, str]] = {
    **WORDS,
    "max_enqueued_batches": "default_queue_policy.max_queue_size",
}


def advice_for(kind: Kind, case: Case) -> str:
    """One piece of advice on this configuration under this load; it says nothing of other points of a search space.

    Of a server that speaks KServe v2 it is told in Triton's words.
    """
    advice = _advice(kind, case)
    if case.protocol is not None and case.protocol.startswith("kserve_"):
        for name, word in _TRITONS_WORDS.items():
            advice = advice.replace(name, word)
    return advice


def _advice(kind: Kind, case: Case) -> str:
    match kind:
        case "host_noise":
            return "repeat on a quiet machine: these figures are not the server's"
        case "client":
            return "these figures are the load generator's; give it more cores or processes and measure again"
        case "queue_limit":
            return _longer_queue(case)
        case "server_threads":
            return _more_request_threads(case)
        case "batch_timeout":
            return "lower batch_timeout_micros: the device is idle while batches wait to fill"
        case "concurrency":
            return "measure with more clients, or lower max_batch_size to what comes together"
        case "batch_threads":
            return "raise num_batch_threads: the device has room while all batch threads are taken"
        case "device":
            return _more_device(case)
        case "front_end":
            return _lighter_requests(case)
        case "errors":
            return "find out why they fail, and measure again: what limits the others is not seen meanwhile"
        case "none":
            return _more_load(case)
        case _:
            assert_never(kind)


def _longer_queue(case: Case) -> str:
    if case.batching:
        return "raise max_enqueued_batches, or shed load before the server does"
    return "let the server queue more requests, or shed load before it does"


def _more_request_threads(case: Case) -> str:
    flag = _THREADS_FLAG.get(case.protocol, "")
    goal = "to what should share a batch" if case.batching else "to what keeps the device busy"
    return f"raise the number of the server's request threads{flag} {goal}"


def _more_device(case: Case) -> str:
    if case.batching is None:
        return f"{_MORE_DEVICE}; with which batching parameters this server runs is not known"
    if not case.batching:
        return _MORE_DEVICE
    if case.batches_full:
        return f"{_MORE_DEVICE}: fuller batches would hardly be cheaper than these"
    return f"{_MORE_DEVICE}, or fuller batches if they are cheaper a row"


def _lighter_requests(case: Case) -> str:
    """Binary messages cost less to read than JSON, and no protocol is advised to those who speak it."""
    if case.protocol == "rest":
        return (
            "gRPC instead of REST, more rows in each request, or more server processes: parsing is what costs"
        )
    if case.protocol == "kserve_rest":
        return "binary tensors or gRPC instead of JSON, more rows in each request, or more server processes"
    return (
        "more rows in each request, or more server processes: what each request costs by itself is the limit"
    )


def _more_load(case: Case) -> str:
    if case.disturbed:
        return "repeat on a quiet machine"
    if case.closed:
        return "measure with more clients to find what limits it"
    if case.met:
        return "raise the rate to find what limits it"
    return "lower the rate until it is met: above that, latency depends on how long one measures"
