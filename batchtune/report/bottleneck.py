"""How is a bottleneck told: in one word for a table, in a sentence with its evidence and one piece of advice?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.bottleneck_advice import Kind

_TITLES: Final[Mapping[Kind, str]] = {
    "host_noise": "the noisy host",
    "client": "the load generator",
    "queue_limit": "the length of the queue",
    "server_threads": "the server's request threads",
    "batch_timeout": "the batch timeout",
    "concurrency": "the number of requests in flight",
    "batch_threads": "the batch threads",
    "device": "the device",
    "front_end": "the server's front end",
    "errors": "the requests that fail",
    "none": "nothing that was seen",
}


def limit_word(bottleneck: Bottleneck | None) -> str:
    """One word for a table cell; a dash where nothing was measured."""
    return "–" if bottleneck is None else bottleneck.kind.replace("_", " ")


def limit_title(bottleneck: Bottleneck | None) -> str:
    """What limits, as the subject of a sentence."""
    return _TITLES["none" if bottleneck is None else bottleneck.kind]


def limit_sentence(bottleneck: Bottleneck) -> str:
    """What limits, by which figures, and what to do about it: to stand behind `Limit: `."""
    if bottleneck.kind == "none":
        return f"none was seen, {bottleneck.text}. Advice: {bottleneck.advice}."
    return f"{limit_title(bottleneck)}, {bottleneck.text}. Advice: {bottleneck.advice}."
