"""How does a recommendation read in a dozen lines? What to use, what it gives, the SLO, why, what limits, how sure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, TextIO

from batchtune.measure.validity.caveats import CLIENT_CODES, HOST_CODES, Caveat
from batchtune.recommend.prediction import Promise, Reference
from batchtune.recommend.recommendation import Recommendation
from batchtune.report.bottleneck import limit_title
from batchtune.report.statement import capacity_text, workload
from batchtune.report.tables import console_on, paragraph, text_width
from batchtune.report.units import interval, milliseconds, ratio
from batchtune.report.words import (
    REFERENCES,
    REFERENCES_IN_SENTENCES,
    capitalised,
    gains_of,
    name_without_parameters,
    other_references,
    parameters_of,
    sure_text,
)
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import counted, rounded_duration

INDENT: Final = " " * 7
GAP: Final = 2

DECISIVE: Final = frozenset({"emulated_device", "errors", "growing_backlog", "not_steady"}) | CLIENT_CODES
"""Caveats that change what one would do; of a noisy host only where nothing is established."""

_GAINS = {"throughput": "", "capacity": " in capacity", "latency": " in p95"}


def print_answer(
    chosen: Recommendation,
    *,
    scenario: Scenario,
    deployment: str | None,
    run: str | None = None,
    next_step: str | None = None,
    why: str | None = None,
    stream: TextIO | None = None,
) -> None:
    """At most fifteen lines of 80 columns where all is well; each line that may be long stands alone and whole.

    `run` names the run and its age where nobody named it; `next_step` is the command that would establish what is
    open; `deployment` the one that serves it, None where another dialect follows; `why` the one that tells more.
    """
    console, width = console_on(stream), text_width(stream)

    def tell(label: str, text: str, style: str | None = None) -> None:
        filled = paragraph(f"{label:<{len(INDENT)}}{text}", width=width, indent=INDENT)
        console.print(filled, markup=False, soft_wrap=True, style=style)

    if run is not None:
        console.print(run, markup=False, soft_wrap=True)
    tell(workload(scenario, chosen, with_slo=False), "")
    tell("Use", _use(chosen), style="bold")
    for line in _table(chosen):
        console.print(line, markup=False, soft_wrap=True)
    for label, text in (
        ("SLO", " ".join(_slo(chosen))),
        ("Why", _why(chosen)),
        ("Limit", _limit(chosen)),
        ("Sure?", " ".join(_sure(chosen))),
        ("Mind", " ".join(_mind(chosen))),
    ):
        if text:
            tell(label, text)
    commands = [command for command in (deployment, next_step, why) if command is not None]
    for label, command in zip(("Next", *("",) * len(commands)), commands, strict=False):
        console.print(f"{label:<{len(INDENT)}}{command}", markup=False, soft_wrap=True)


def _use(chosen: Recommendation) -> str:
    """The parameters in one breath, and from what they cannot be told."""
    configuration = chosen.configuration
    words = [f"{name} {value}" for name, value in parameters_of(configuration)]
    name = name_without_parameters(configuration)
    named = ", ".join(words if name is None else [name, *words])
    near = chosen.little_better_than or chosen.indistinct_from
    if near is None:
        return named
    if any(one.name == near and one.configuration == configuration for one in chosen.references):
        return f"{named}: nothing that was tuned is worth its parameters"
    told = "hardly better than" if chosen.little_better_than is not None else "so far not to be told from"
    return f"{named} ({told} {REFERENCES_IN_SENTENCES[near]})"


def _table(chosen: Recommendation) -> list[str]:
    """One line for the recommended configuration and for each reference point, in columns."""
    quantile = _quantile(chosen)
    rows = [
        ("", "requests/s", f"{quantile} ms", f"gain of this{_GAINS[chosen.objective]}"),
        ("this", interval(chosen.throughput_rps), milliseconds(chosen.latency_s.get(quantile)), ""),
        *(_reference_row(chosen, one, quantile) for one in other_references(chosen)),
    ]
    if not any(row[3] for row in rows[1:]):
        rows = [(*row[:3], "") for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [_aligned(row, widths) for row in rows]


def _reference_row(chosen: Recommendation, other: Reference, quantile: str) -> tuple[str, str, str, str]:
    gain = gains_of(chosen)[other.name]
    name = REFERENCES[other.name].removeprefix("server ")  # the table is narrow
    latency = milliseconds(other.latency_s.get(quantile))
    return name, interval(other.throughput_rps), latency, "" if gain is None else ratio(gain)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *figures = row
    cells = (f"{text:>{width}}" for text, width in zip(figures, widths[1:], strict=True) if width)
    return (INDENT + (" " * GAP).join([f"{first:<{widths[0]}}", *cells])).rstrip()


def _quantile(chosen: Recommendation) -> str:
    """The quantile that the SLO limits and that was measured; else p95."""
    limited = (name for name in chosen.slo if name in chosen.latency_s)
    return next(limited, "p95")


def _slo(chosen: Recommendation) -> Iterator[str]:
    if chosen.capacity_rps is not None:
        yield f"Capacity {capacity_text(chosen, chosen.capacity_rps)} requests/s."
    for promise in chosen.promises:
        limit = f"{promise.name} ≤ {rounded_duration(promise.limit_s)}"
        yield f"{limit}: {kept_text(promise, chosen)}."


def kept_text(promise: Promise, chosen: Recommendation) -> str:
    """What the fresh runs did, and how high another one may come."""
    if not math.isfinite(promise.upper_bound_s):
        return "how high a fresh run comes is not known"
    highest = rounded_duration(promise.upper_bound_s)
    if not chosen.established:
        below = promise.spare_ratio >= 0.0
        return f"{'a fresh run stays below' if below else 'may be missed, a fresh run may reach'} {highest}"
    kept = f"kept in {counted(chosen.confirmations, 'fresh run')}"
    if promise.spare_ratio >= 0.0:
        return f"{kept}; another stays below {highest}"
    return f"{kept}, as their mean does; a single one may reach {highest}"


def _why(chosen: Recommendation) -> str:
    """Whether batching helps, with the first fact of the reason where it does."""
    if chosen.batching_helps == "yes":
        return f"Batching helps: {chosen.reason.split('; ')[0]}."
    told = {"no": "Batching does not help", "not distinguishable": "Whether batching helps is not known"}
    reason = chosen.cannot_pay if chosen.batching_helps == "no" and chosen.cannot_pay else chosen.reason
    return f"{told[chosen.batching_helps]}: {reason}."


def _limit(chosen: Recommendation) -> str:
    if chosen.bottleneck is None:
        return ""
    title = limit_title(chosen.bottleneck)
    return f"{capitalised(title)}: {chosen.bottleneck.text}. {_advice(chosen.bottleneck.advice)}."


def _advice(advice: str) -> str:
    """What to do, without the reason behind the colon."""
    return capitalised(advice.split(": ", maxsplit=1)[0])


def _sure(chosen: Recommendation) -> Iterator[str]:
    yield "Established." if chosen.established else f"Not established: {'; '.join(chosen.open_questions)}."
    near = chosen.near_best
    if near is None:
        return
    among = f"{near.count} {'tried' if near.of == 'measured' else 'points judged'}"
    if near.probability >= 0.5:
        yield f"None of the {among} is 5 % better ({sure_text(near.probability)} sure)."
    else:
        yield f"Of the {among} one is likely 5 % better ({sure_text(1.0 - near.probability)})."


def _mind(chosen: Recommendation) -> Iterator[str]:
    """What speaks against these figures, and against those that they are compared with."""
    codes = DECISIVE if chosen.established else DECISIVE | HOST_CODES
    said = {caveat.code for caveat in chosen.caveats}
    for caveat in chosen.caveats:
        if caveat.code in codes:
            yield _sentence(caveat, "")
    for reference in chosen.references:
        for caveat in reference.caveats:
            if caveat.code in codes and caveat.code not in said:
                yield _sentence(caveat, f" ({REFERENCES_IN_SENTENCES[reference.name]})")


def _sentence(caveat: Caveat, whose: str) -> str:
    advice = "" if caveat.code == "emulated_device" else f": {caveat.advice}"
    return f"{capitalised(caveat.text)}{whose}{advice}."
