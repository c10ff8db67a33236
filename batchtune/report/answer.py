"""How does a recommendation read in a dozen lines? What to use, what it gives, the SLO, why, what limits, how sure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Final, TextIO

from batchtune.measure.validity.caveats import CLIENT_CODES, HOST_CODES, Caveat
from batchtune.recommend.prediction import Promise, Reference
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.report.bottleneck import limit_title
from batchtune.report.statement import capacity_text, rate_text, rate_title, reference_rate_text, workload
from batchtune.report.tables import console_on, paragraph, text_width
from batchtune.report.units import milliseconds, ratio
from batchtune.report.words import (
    REFERENCES,
    REFERENCES_IN_SENTENCES,
    capitalised,
    gains_of,
    likeness_of,
    name_without_parameters,
    other_references,
    parameters_of,
    sure_text,
)
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import counted, rounded_duration

INDENT: Final = " " * 7

DECISIVE: Final = frozenset({"emulated_device", "errors", "growing_backlog", "not_steady"}) | CLIENT_CODES
"""Caveats that change what one would do; of a noisy host only where nothing is established."""

LINES_MAX: Final = 15
GIVES_WAY: Final = (
    "Limit", "Mind", "Sure?", "SLO", "Limit", "Mind", "Why", "Sure?", "Use", "SLO", "Mind", "Why", "Limit",
)  # fmt: skip
"""Which section is told in fewer words next where the answer has more lines than that; `--why` has them all."""

_GAINS = {"throughput": "gain of this", "capacity": "gain in capacity", "latency": "gain in p95"}
_GAPS: Final = (2, 1)
"""Between the columns of the table: wide figures take the room of the indent first, then of the gaps."""


@dataclass(frozen=True, slots=True)
class _Section:
    """A labelled paragraph in several lengths, the fullest first; "" leaves it out."""

    label: str
    texts: tuple[str, ...]

    def lines(self, length: int, width: int) -> list[str]:
        text = self.texts[length]
        if not text:
            return []
        return paragraph(f"{self.label:<{len(INDENT)}}{text}", width=width, indent=INDENT).split("\n")


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
    """At most LINES_MAX lines of 80 columns; a command, or the name of a run, may be longer, and stands whole.

    `run` names the run and its age where nobody named it; `next_step` is the command that would establish what is
    open; `deployment` the one that serves it, None where another dialect follows; `why` the one that tells more.
    """
    console, width = console_on(stream), text_width(stream)
    head = [line for line in (run, _heading(scenario, chosen, width)) if line is not None]
    table = _table(chosen, width)
    commands = [command for command in (deployment, next_step, why) if command is not None]
    room = LINES_MAX - len(head) - len(table) - len(commands)
    use, *others = _fitted(_sections(chosen, width), width=width, lines_max=room)
    for line in head:
        console.print(line, markup=False, soft_wrap=True)
    for line in use:
        console.print(line, markup=False, soft_wrap=True, style="bold")
    for line in [*table, *(line for section in others for line in section)]:
        console.print(line, markup=False, soft_wrap=True)
    for label, command in zip(("Next", *("",) * len(commands)), commands, strict=False):
        console.print(f"{label:<{len(INDENT)}}{command}", markup=False, soft_wrap=True)


def _heading(scenario: Scenario, chosen: Recommendation, width: int) -> str:
    """What was asked, in one line."""
    full, brief = (workload(scenario, chosen, with_slo=False, brief=brief) for brief in (False, True))
    return full if len(full) <= width else shorten(brief, width, placeholder=" …")


def _sections(chosen: Recommendation, width: int) -> list[_Section]:
    """What stands above the table, and what stands below it."""
    sections = [
        _Section("Use", _use(chosen, width)),
        _Section("SLO", _slo(chosen)),
        _Section("Why", _why(chosen)),
        _Section("Limit", _limit(chosen)),
        _Section("Sure?", _sure(chosen)),
        _Section("Mind", _mind(chosen)),
    ]
    in_a_line = width - len(INDENT)
    return [
        replace(section, texts=(*section.texts, shorten(section.texts[-1], in_a_line, placeholder=" …")))
        if section.label not in ("Use", "Limit")
        else section
        for section in sections
    ]


def _fitted(sections: Sequence[_Section], *, width: int, lines_max: int) -> list[list[str]]:
    """The lines of each section, in the fullest words that leave room for the others."""
    lines = {section.label: section.lines(0, width) for section in sections}
    by_label = {section.label: section for section in sections}
    for label in GIVES_WAY:
        if sum(map(len, lines.values())) <= lines_max:
            break
        lengths = (by_label[label].lines(length, width) for length in range(1, len(by_label[label].texts)))
        lines[label] = next((fewer for fewer in lengths if len(fewer) < len(lines[label])), lines[label])
    return list(lines.values())


def _use(chosen: Recommendation, width: int) -> tuple[str, ...]:
    """The parameters in one breath, and from what they cannot be told; then as many as two lines hold."""
    configuration = chosen.configuration
    words = [f"{name} {value}" for name, value in parameters_of(configuration)]
    name = name_without_parameters(configuration)
    words = words if name is None else [name, *words]
    mark, like = likeness_of(chosen) or ("", "")
    likeness = f" ({like})" if mark == ", " else f"{mark}{like}"
    shortened = [
        f"{', '.join(words[:count])} and {len(words) - count} more{likeness}"
        for count in range(len(words) - 1, 0, -1)
    ]
    full = f"{', '.join(words)}{likeness}"
    fitting = (
        text
        for text in shortened
        if len(paragraph(INDENT + text, width=width, indent=INDENT).split("\n")) <= 2
    )
    return full, next(fitting, full)


def _table(chosen: Recommendation, width: int) -> list[str]:
    """One line for the recommended configuration and for each reference point, in columns."""
    quantile = _quantile(chosen)
    rows = [
        ("", rate_title(chosen), f"{quantile} ms", _GAINS[chosen.objective]),
        ("this", rate_text(chosen), milliseconds(chosen.latency_s.get(quantile)), ""),
        *(_reference_row(chosen, reference, quantile) for reference in other_references(chosen)),
    ]
    if not any(row[3] for row in rows[1:]):
        rows = [(*row[:3], "") for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    tables = [[_aligned(row, widths, gap=gap) for row in rows] for gap in _GAPS]
    narrow = next((table for table in tables if max(map(len, table)) <= width), tables[-1])
    indent = min(len(INDENT), max(0, width - max(map(len, narrow))))
    return [f"{'':{indent}}{line}" for line in narrow]


def _reference_row(chosen: Recommendation, other: Reference, quantile: str) -> tuple[str, str, str, str]:
    gain = gains_of(chosen)[other.name]
    name = REFERENCES[other.name].removeprefix("server ")  # the table is narrow
    latency = milliseconds(other.latency_s.get(quantile))
    return name, reference_rate_text(chosen, other), latency, "" if gain is None else ratio(gain)


def _aligned(row: Sequence[str], widths: Sequence[int], *, gap: int) -> str:
    first, *figures = row
    cells = (f"{text:>{width}}" for text, width in zip(figures, widths[1:], strict=True) if width)
    return (" " * gap).join([f"{first:<{widths[0]}}", *cells]).rstrip()


def _quantile(chosen: Recommendation) -> str:
    """The quantile that the SLO limits and that was measured; else p95."""
    limited = (name for name in chosen.slo if name in chosen.latency_s)
    return next(limited, "p95")


def _slo(chosen: Recommendation) -> tuple[str, ...]:
    """Every promise; then the one that has the least to spare."""
    capacity = ""
    if chosen.capacity_rps is not None:
        capacity = f"Capacity {capacity_text(chosen, chosen.capacity_rps)} requests/s. "
    kept = [
        f"{promise.name} ≤ {rounded_duration(promise.limit_s)}: {kept_text(promise, chosen)}."
        for promise in chosen.promises
    ]
    spare = [promise.spare_ratio for promise in chosen.promises]
    tightest = kept[spare.index(min(spare))] if kept else ""
    more = f" And {len(kept) - 1} more." if len(kept) > 1 else ""
    brief = f"{tightest}{more}"  # the table has the capacity
    return f"{capacity}{' '.join(kept)}".strip(), f"{capacity}{brief}".strip(), brief or capacity.strip()


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


def _why(chosen: Recommendation) -> tuple[str, ...]:
    """Whether batching helps, with the first fact of the reason where it does; then without."""
    verdict = {
        "yes": "Batching helps",
        "no": "Batching does not help",
        "not distinguishable": "Whether batching helps is not known",
    }[chosen.batching_helps]
    reason = chosen.reason
    if chosen.batching_helps == "yes":
        reason = reason.split("; ")[0]
    elif chosen.batching_helps == "no" and chosen.cannot_pay:
        reason = chosen.cannot_pay
    return f"{verdict}: {reason}.", f"{verdict}."


def _limit(chosen: Recommendation) -> tuple[str, ...]:
    """What limits, by which evidence, and what to do; then less of it, and nothing."""
    if chosen.bottleneck is None:
        return ("",)
    title, advice = capitalised(limit_title(chosen.bottleneck)), _advice(chosen.bottleneck.advice)
    return f"{title}: {chosen.bottleneck.text}. {advice}.", f"{title}. {advice}.", f"{title}.", ""


def _advice(advice: str) -> str:
    """What to do, without the reason behind the colon."""
    return capitalised(advice.split(": ", maxsplit=1)[0])


def _sure(chosen: Recommendation) -> tuple[str, ...]:
    """Whether it is established, and whether better may exist; then the first alone, with the first open question."""
    head = "Established."
    if not chosen.established:
        head = f"Not established: {'; '.join(chosen.open_questions)}."
    brief = head
    if len(chosen.open_questions) > 1 and not chosen.established:
        others = "another question is"
        if len(chosen.open_questions) > 2:
            others = f"{len(chosen.open_questions) - 1} more questions are"
        brief = f"Not established: {chosen.open_questions[0]}; {others} open."
    return f"{head} {_better(chosen)}".strip(), head, brief


def _better(chosen: Recommendation) -> str:
    near = chosen.near_best
    if near is None:
        return ""
    among = f"{near.count} {'tried' if near.of == 'measured' else 'points judged'}"
    if near.probability >= 0.5:
        return f"None of the {among} is 5 % better ({sure_text(near.probability)} sure)."
    return f"Of the {among} one is likely 5 % better ({sure_text(1.0 - near.probability)})."


def _mind(chosen: Recommendation) -> tuple[str, ...]:
    """What speaks against these figures, and against those that they are compared with; then the first of it."""
    codes = DECISIVE if chosen.established else DECISIVE | HOST_CODES
    said = {caveat.code for caveat in chosen.caveats}
    against = [(caveat, "") for caveat in chosen.caveats if caveat.code in codes]
    for reference in chosen.references:
        whose = f" ({REFERENCES_IN_SENTENCES[reference.name]})"
        against += [
            (caveat, whose)
            for caveat in reference.caveats
            if caveat.code in codes and caveat.code not in said
        ]
    if not against:
        return ("",)
    against.sort(key=lambda entry: entry[0].code == "emulated_device")  # the least that one would do about it
    more = f" And {len(against) - 1} more." if len(against) > 1 else ""
    first, whose = against[0]
    return (
        " ".join(_sentence(caveat, whose) for caveat, whose in against),
        f"{_sentence(first, whose)}{more}",
        f"{capitalised(first.text)}{whose}.{more}",
    )


def _sentence(caveat: Caveat, whose: str) -> str:
    advice = "" if caveat.code == "emulated_device" else f": {caveat.advice}"
    return f"{capitalised(caveat.text)}{whose}{advice}."
