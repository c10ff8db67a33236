"""Words findings: the codes with figures that other rooms give, by the texts of `findings.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from batchtune.batching.triton_words import WORDS
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded
from batchtune.report.tables import interval
from batchtune.units import percentage, rounded, rounded_duration


@cache
def texts() -> Mapping[str, str]:
    """The text of each code, with its figures in braces."""
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        return tomllib.load(file)


_TRITONS: Final = {**WORDS, "max_enqueued_batches": "default_queue_policy.max_queue_size"}


def text_of(finding: Coded) -> str:
    """A finding as a clause.

    Figures named `_s` are durations, `_ratio` shares, `_rows` rows; an interval has its ends, any other number three
    digits. A figure may be a finding, or several.
    """
    text = texts()[finding.code].format(
        **{name: _shown(name, value) for name, value in finding.figures.items() if value is not None}
    )
    if finding.figures.get("in_tritons_words"):
        for name, word in _TRITONS.items():
            text = text.replace(name, word)
    return text


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Coded):
        return text_of(value)
    if isinstance(value, tuple | list):
        return "; ".join(_shown(name, item) for item in value)
    if isinstance(value, Mapping):
        ends = "code" not in value and {end: float(number) for end, number in value.items()}
        return interval(Estimate(**ends)) if ends else text_of(Coded(value["code"], value["figures"]))
    if isinstance(value, Estimate):
        return interval(value)
    if name == "batch_threads":
        return "the one batch thread executes" if value == 1 else f"{value} batch threads execute"
    if name.endswith("_s"):
        return rounded_duration(float(value))  # JSON has no infinity: it is a word there
    if name.endswith("_ratio"):
        return percentage(float(value))
    if name.endswith("_rows"):
        shown = rounded(float(value))
        return f"{shown} row{'' if shown == '1' else 's'}"
    return rounded(value) if isinstance(value, float) else str(value)


def worded(document: Any) -> Any:
    """A document for JSON in which every finding is the text that it reads as."""
    if isinstance(document, dict):
        if document.keys() == {"code", "figures"}:
            return text_of(Coded(document["code"], document["figures"]))
        return {name: worded(value) for name, value in document.items()}
    return [worded(value) for value in document] if isinstance(document, list) else document
