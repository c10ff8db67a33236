"""Words findings: the codes with figures of other rooms, by the texts of `findings.toml`."""

from __future__ import annotations

import json
import math
import re
import string
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.batching.triton_words import WORDS
from batchtune.measure.caveats import Touches, touches
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded
from batchtune.report.tables import interval
from batchtune.units import percentage, rounded, rounded_duration


@cache
def texts() -> Mapping[str, str]:
    """Return the text of each code from findings.toml, with its figures in braces."""
    return {code: text for code, text in _document().items() if isinstance(text, str)}


def labels(table: str) -> Mapping[str, str]:
    """Return the table `table` of findings.toml: code -> its words. "limits" has the names of bottlenecks, "advice"
    what to do about each caveat."""
    labels: Mapping[str, str] = _document()[table]
    return labels


@cache
def _document() -> Mapping[str, Any]:
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        return tomllib.load(file)


def text_of(finding: Coded) -> str:
    """Return a finding as a clause: the text of its code in findings.toml, with the figures filled in.

    Figures named `…_s` are written as durations, `…_ratio` as percentages, `…_rows` with their unit; an
    interval with its ends, other numbers with three digits. A figure may be another finding, or several. A figure
    `own_NAME` is the server's own name of the parameter NAME, and replaces NAME in the text.
    """
    text = _filled("{text}" if "text" in finding.figures else texts()[finding.code], finding)
    if finding.figures.get("in_tritons_words"):
        in_config = {**WORDS, "max_enqueued_batches": "default_queue_policy.max_queue_size"}
        for name, word in in_config.items():
            text = text.replace(name, word)
    for name, word in finding.figures.items():
        if name.startswith("own_"):
            text = text.replace(name.removeprefix("own_"), word)
    return text


def advice_of(caveat: Coded) -> str:
    """Return what to do about a caveat, as a clause; for a caveat of an older run its own wording."""
    worded_before: str | None = caveat.figures.get("advice")
    return _filled(labels("advice")[caveat.code], caveat) if worded_before is None else worded_before


def _filled(text: str, finding: Coded) -> str:
    """Return the text with each `{name}` replaced by that figure of the finding; a figure of None has none."""
    return text.format(
        **{name: _shown(name, value) for name, value in finding.figures.items() if value is not None}
    )


def _shown(name: str, value: Any) -> str:
    """Return one figure as text, by its type and the end of its name: see `text_of`."""
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
    if isinstance(value, int):
        return f"{value:,}"
    return rounded(value) if isinstance(value, float) else str(value)


def worded(document: Any, *, read_again: bool = False) -> Any:
    """Return a JSON document with every finding in it replaced by its text, a caveat by `{code, text,
    advice}`, and a configuration of kind http as `Configuration.in_its_words` writes it.

    `read_again`: configurations are not changed, so that `Configuration.from_dict` can read them.
    """
    if isinstance(document, dict):
        if document.get("dialect") == "http" and "batching" in document and not read_again:
            return Configuration.from_dict(document).in_its_words()
        if document.keys() == {"code", "figures"}:
            finding = Coded(document["code"], document["figures"])
            text = text_of(finding)
            if "advice" not in finding.figures and finding.code not in labels("advice"):
                return text
            return {"code": finding.code, "text": text, "advice": advice_of(finding)}
        return {name: worded(value, read_again=read_again) for name, value in document.items()}
    if isinstance(document, list):
        return [worded(value, read_again=read_again) for value in document]
    return document


def print_json(document: Any) -> None:
    """Print a JSON document for other programs on stdout: a number that is not finite is null, not a string."""
    sys.stdout.write(f"{json.dumps(_without_infinities(document), indent=2, allow_nan=False)}\n")


def _without_infinities(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: _without_infinities(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [_without_infinities(value) for value in document]
    is_finite = document not in ("nan", "inf", "-inf") if isinstance(document, str) else True
    return (
        document if is_finite and not (isinstance(document, float) and not math.isfinite(document)) else None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Marks such as `(a)` that follow figures in a table and refer to the caveats below it.

    `caveats`: row or column, such as a variant or a load point -> its caveats. Each code of a caveat has one
    letter. A caveat that touches all figures of a row is marked at the row's heading only.
    """

    caveats: Mapping[str, Sequence[Coded]]

    def head(self, whose: str) -> str:
        """Return the name `whose` with the mark of its caveats that touch all figures, or latencies without an upper
        bound."""
        return self.marked(whose, whose, "everything", "bound")

    def marked(self, text: str, whose: str | Sequence[str], *kinds: Touches) -> str:
        """Return the text, then the mark of the caveats that touch figures of these kinds: `2,000 (a, c)`.

        `whose`: the row or column whose caveats count, or several. Without such caveats there is no mark.
        """
        names = [whose] if isinstance(whose, str) else whose
        noted = (caveat for name in names for caveat in self.caveats[name] if touches(caveat) in kinds)
        touching = sorted({self._letters()[caveat.code] for caveat in noted})
        return f"{text} ({', '.join(touching)})" if touching else text

    def lines(self, *, named: str = "", shown: str = "") -> list[str]:
        """Return a line for each caveat: `(a) whose: text — advice`; an advice given before is `as for (a)`.

        `whose` is left out where the caveat concerns all. `named`: the kind of things that have caveats,
        such as "clients". `shown`: the table as it is printed; a letter that it lacks is left out ("": it has all).
        """
        lines: list[str] = []
        first_with: dict[str, str] = {}
        for code, concerned in self.concerned().items():
            letter, caveat = self._letters()[code], list(concerned.values())[-1]
            advice = advice_of(caveat)
            names = f"{named} {', '.join(concerned)}".strip()
            whose = "" if len(concerned) == len(self.caveats) else f"{names}: "
            is_marked = not shown or re.search(rf"\([a-z, ]*\b{letter}\b[a-z, ]*\)", shown)
            earlier = first_with.setdefault(advice, letter) if is_marked else letter
            advised = advice if earlier == letter else f"as for ({earlier})"
            lines.append(f"{f'({letter}) ' if is_marked else ''}{whose}{text_of(caveat)} — {advised}")
        return lines

    def concerned(self) -> dict[str, dict[str, Coded]]:
        """Return code of a caveat -> row or column -> its caveat, in the order in which the codes first occur; those on
        the server's figures last, whose columns need not be shown."""
        by_code: dict[str, dict[str, Coded]] = {}
        for whose, many in self.caveats.items():
            for caveat in many:
                by_code.setdefault(caveat.code, {})[whose] = caveat
        of_server = {code: touches(next(iter(known.values()))) == "server" for code, known in by_code.items()}
        return {code: by_code[code] for code in sorted(by_code, key=of_server.__getitem__)}

    def _letters(self) -> dict[str, str]:
        """Return code of a caveat -> its letter."""
        return dict(zip(self.concerned(), string.ascii_lowercase, strict=False))
