"""Prints a recommendation: in some fifteen lines, or with the whole argument and the table of all that was tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

from batchtune.batching.parameters import Configuration, to_dict
from batchtune.measure.validity.caveats import CLIENT_CODES, HOST_CODES
from batchtune.report.run_tables import short_label
from batchtune.report.tables import (
    Marks,
    console_on,
    paragraph,
    print_table,
    rows_that_fit,
    span,
    table_of,
    text_width,
    width_of,
)
from batchtune.report.words import (
    NAMES,
    REFERENCES,
    REFERENCES_IN_SENTENCES,
    bottleneck_sentence,
    capitalised,
    confidence_sentence,
    figures_sentence,
    gain_cell,
    gain_sentences,
    limit_word,
    name_without_parameters,
    named_sentences,
    names_text,
    offer_sentences,
    other_references,
    parameters_of,
    promise_sentence,
    why_sentence,
    workload,
)
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommendation import Compared, Recommendation
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.units import counted, rounded, rounded_duration

if TYPE_CHECKING:
    from rich.table import Table


INDENT: Final = " " * len("Recommended ")
"""As wide as the longest label."""

DECISIVE: Final = frozenset({"emulated_device", "errors", "growing_backlog", "not_steady"}) | CLIENT_CODES
"""Caveats that change what one would do; of a noisy host only where nothing is established."""


def print_answer(
    chosen: Recommendation,
    *,
    scenario: Scenario,
    deployment: str | None,
    run: str | None = None,
    next_step: str | None = None,
    offer: str | None = None,
    why: str | None = None,
    stream: TextIO | None = None,
) -> None:
    """Paragraphs at most as wide as the stream; a command, or the name of a run, stands whole.

    `run` names the run and its age where nobody named it. `next_step` is the command that would establish what is
    open, `offer` the options with which a longer search may find more, `deployment` the command that serves it, None
    where another dialect follows, `why` the command that tells more.
    """
    console, width = console_on(stream), text_width(stream)

    def tell(label: str, text: str, style: str = "") -> None:
        shown = paragraph(f"{label:<{len(INDENT)}}{text}", width=width, indent=INDENT)
        console.print(shown, markup=False, soft_wrap=True, style=style)

    for line in filter(None, (run, workload(scenario, chosen, with_slo=False, brief=True))):
        console.print(paragraph(line, width=width), markup=False, soft_wrap=True)
    tell("Recommended", use_text(chosen), "bold")
    gains = " ".join(gain_sentences(chosen))
    if gains:
        tell("Gain", gains, "bold")
    tell("", figures_sentence(chosen))
    for line in _aligned(compared_table(chosen)):
        console.print(f"{INDENT}{line}", markup=False, soft_wrap=True)
    for promise in chosen.promises:
        tell("SLO", promise_sentence(promise, chosen))
    tell("Why", why_sentence(chosen))
    if chosen.bottleneck is not None:
        tell("Bottleneck", capitalised(bottleneck_sentence(chosen.bottleneck)))
    tell("Confidence", " ".join([capitalised(confidence_sentence(chosen)), *offer_sentences(chosen, offer)]))
    warnings = " ".join(_warnings(chosen))
    if warnings:
        tell("Warning", warnings)
    label = "Next"
    for command in filter(None, (next_step, deployment, why)):
        console.print(f"{label:<{len(INDENT)}}{command}", markup=False, soft_wrap=True)
        label = ""


def use_text(chosen: Recommendation) -> str:
    """The parameters in one breath."""
    words = [f"{name} {value}" for name, value in parameters_of(chosen.configuration)]
    return ", ".join(filter(None, (name_without_parameters(chosen.configuration), *words)))


def _aligned(table: list[list[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    return [
        "  ".join(
            f"{cell:<{width}}" if at == 0 else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _warnings(chosen: Recommendation) -> Iterator[str]:
    """What speaks against these figures, and against those that they are compared with."""
    codes = DECISIVE if chosen.established else DECISIVE | HOST_CODES
    said: set[str] = set()
    of_references = (
        (caveat, f" ({REFERENCES_IN_SENTENCES[reference.name]})")
        for reference in chosen.references
        for caveat in reference.caveats
    )
    against = [*((caveat, "") for caveat in chosen.caveats), *of_references]
    for caveat, whose in sorted(against, key=lambda entry: entry[0].code == "emulated_device"):
        if caveat.code in codes and caveat.code not in said:
            said.add(caveat.code)
            advice = "" if caveat.code == "emulated_device" else f": {caveat.advice}"
            yield f"{capitalised(caveat.text)}{whose}{advice}."
    more = len({caveat.code for caveat, _ in against} - said)
    if said and more:
        yield f"{counted(more, 'more warning')}: `--why`."


# With the whole argument: every contender, reason, confidence, alternatives, caveats.


def print_recommendation(
    chosen: Recommendation,
    *,
    scenario: Scenario,
    deployment: str | None,
    run: str | None = None,
    next_step: str | None = None,
    offer: str | None = None,
    stream: TextIO | None = None,
) -> None:
    """The parameters, what they give beside all others, whether batching helps, the confidence, how to deploy them.

    `run` names the run and its age where nobody named it; `next_step` is what would establish what is open, `offer`
    the options with which a longer search may find more; `deployment` is the command line, None where another dialect
    follows.
    """
    console, width = console_on(stream), text_width(stream)

    def tell(text: str, indent: str = "  ", style: str = "") -> None:
        shown = paragraph(text, width=width, indent=indent)
        console.print(shown, markup=False, soft_wrap=True, style=style)

    marks = Marks(
        caveats={
            RECOMMENDED: chosen.caveats,
            **{REFERENCES[reference.name]: reference.caveats for reference in other_references(chosen)},
        }
    )
    if run is not None:
        tell(run)
    tell(workload(scenario, chosen))
    console.print()
    named = name_without_parameters(chosen.configuration)
    tell(f"Recommended: {named}" if named else "Recommended", style="bold")
    for name, value in parameters_of(chosen.configuration):
        console.print(f"  {name:<26} {value}", markup=False, soft_wrap=True)
    gains = " ".join(gain_sentences(chosen))
    if gains:
        tell(f"Gain: {gains}", style="bold")
    tell(figures_sentence(chosen))
    console.print()
    print_table(console, _contenders(chosen, marks, width=width_of(stream)))
    for text in _argument(chosen):
        tell(text)
    console.print()
    for text in (*_search(chosen), *_confidence(chosen, next_step, offer)):
        tell(text)
    console.print()
    for alternative in chosen.alternatives[:3]:
        searched = "" if alternative.confirmations else " (not confirmed)"
        tell(f"Alternative: {alternative.configuration.label()}: {alternative.trade}{searched}.")
    for text in marks.lines():
        tell(text, indent="   ")
    if deployment is not None:
        console.print(f"Deploy: {deployment}", markup=False, soft_wrap=True)


def _contenders(chosen: Recommendation, marks: Marks, *, width: int) -> Table:
    """All that was tried, a row each; the letters of caveats follow the names."""
    rows = contenders_table(chosen)
    dispensable = [rows[0].index(name) for name in DISPENSABLE if name in rows[0]]
    head, *shown = rows_that_fit(rows, width=width, dispensable=dispensable)
    table = table_of(*head)
    table.columns[1].justify = "left"
    for whose, row in zip(marks.caveats, shown, strict=False):
        letters = marks.at(whose, "everything", "throughput", "latency", "server")
        table.add_row(f"{row[0]} {letters}".strip(), *row[1:])
    for row in shown[len(marks.caveats) :]:
        table.add_row(*row)
    return table


def _argument(chosen: Recommendation) -> Iterator[str]:
    """Does batching help and why, how did the rule and the guide fare, is the SLO met, what limits now?"""
    yield why_sentence(chosen)
    yield from named_sentences(chosen)
    known = {reference.name for reference in chosen.references}
    for name in ("no_batching", "defaults"):
        if name not in known:
            why = chosen.failed_references.get(name)
            ending = "not measured" if why is None else f"failed when it was tried ({why})"
            yield f"{capitalised(REFERENCES[name])}: {ending}."
    yield from (f"SLO {promise_sentence(promise, chosen)}" for promise in chosen.promises)
    if chosen.bottleneck is not None:
        yield f"Bottleneck: {bottleneck_sentence(chosen.bottleneck)}"


def _search(chosen: Recommendation) -> Iterator[str]:
    """Trials and time, what the search did, what qualifies the answer."""
    made = f"{counted(chosen.trials, 'trial')} in {rounded_duration(chosen.seconds)}."
    yield " ".join([made, *(() if chosen.search is None else _searched(chosen.search))])
    yield from (f"Note: {note}." for note in chosen.notes)


def _searched(search: SearchSummary) -> Iterator[str]:
    if search.plan:
        yield f"The plan was {search.plan}."
    if search.proposals:
        made = ", ".join(
            f"{NAMES.get(name, 'the space')} {count}"
            for name, count in sorted(search.proposals.items(), key=lambda pair: -pair[1])
        )
        yield f"Runs by source: {made}."
    if search.stop_reason:
        yield f"The search ended: {search.stop_reason}."
    if search.nodes:
        yield f"Trials ran on several nodes at once: {search.nodes}."


def _confidence(chosen: Recommendation, next_step: str | None, offer: str | None) -> Iterator[str]:
    step = "" if next_step is None else f" To establish it: {next_step}"
    yield " ".join([f"Confidence: {confidence_sentence(chosen)}{step}", *offer_sentences(chosen, offer)])


# The tables: who named a configuration, what it held and missed, in how many runs, what is gained over it.


RECOMMENDED = "recommended"

_GAINS = {"throughput": "gain", "capacity": "gain in capacity", "latency": "gain in p95"}


def compared_table(chosen: Recommendation) -> list[list[str]]:
    """What is recommended and each reference, without their parameters."""
    headings = ["", *_rate_headings(chosen), "p95 ms", "runs", _GAINS[chosen.objective]]
    first: list[tuple[str, Recommendation | Compared, str]] = [(RECOMMENDED, chosen, "")]
    others = [(REFERENCES[other.name], other, gain_cell(other)) for other in other_references(chosen)]
    rows = [
        [
            name,
            *_rates(contender, chosen),
            span(contender.latency_s.get("p95"), scale=1e3),
            str(contender.runs),
            gain,
        ]
        for name, contender, gain in (*first, *others)
    ]
    return _without_empty([headings, *rows])


def contenders_table(chosen: Recommendation) -> list[list[str]]:
    """All that was tried, what is recommended first, then the references, then the best."""
    others = (*other_references(chosen), *chosen.contenders)
    common = common_parameters([chosen.configuration, *(other.configuration for other in others)])
    headings = [
        "named by",
        "configuration",
        *_rate_headings(chosen),
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "mean batch",
        "limited by",
        "runs",
        _GAINS[chosen.objective],
    ]
    first = ", ".join(filter(None, (RECOMMENDED, names_text(chosen.names))))
    shown: list[tuple[str, Recommendation | Compared, str]] = [(first, chosen, "")]
    shown += [(_name(other), other, gain_cell(other)) for other in others]
    rows = [
        [
            name,
            brief_label(contender.configuration, common),
            *_rates(contender, chosen),
            *(span(contender.latency_s.get(quantile), scale=1e3) for quantile in ("p50", "p95", "p99")),
            rounded(contender.mean_batch_rows),
            limit_word(contender.bottleneck),
            str(contender.runs),
            gain,
        ]
        for name, contender, gain in shown
    ]
    return _without_empty([headings, *rows])


DISPENSABLE = ("p50 ms", "p99 ms", "mean batch", "limited by")
"""Columns of the table of all contenders that go first where there is little room."""


def common_parameters(configurations: Sequence[Configuration]) -> dict[str, Any]:
    """The parameters that have one value in all of these that batch."""
    batchings = [configuration.batching for configuration in configurations]
    batched = [parameters for batching in batchings if batching and (parameters := to_dict(batching))]
    if len(batched) < 2:
        return {}
    return {
        name: value
        for name, value in batched[0].items()
        if all(parameters.get(name) == value for parameters in batched)
    }


def brief_label(configuration: Configuration, common: Mapping[str, Any]) -> str:
    """A configuration in a few words, without the parameters that all have in `common`."""
    text = short_label(configuration.label())
    for name, value in common.items():
        text = text.replace(f" · {short_label(f'{name}={value}')}", "")
    return text


def _name(other: Compared) -> str:
    return ", ".join(filter(None, (names_text(other.names), "outside the space" if other.outside else "")))


def _rate_headings(chosen: Recommendation) -> list[str]:
    return ["requests/s"] if chosen.capacity is None else ["held /s", "missed /s"]


def _rates(contender: Recommendation | Compared, chosen: Recommendation) -> list[str]:
    if chosen.capacity is None:
        return [span(contender.throughput_rps)]
    if contender.capacity is None:
        return ["–", "–"]
    held = rounded(contender.capacity.held_rps) if contender.capacity.held_rps else "none"
    held += " by loops" if contender.capacity.by_loops else ""
    bound = "≤ " if contender.capacity.is_bound and contender.capacity.missed_rps is not None else ""
    return [held, f"{bound}{rounded(contender.capacity.missed_rps)}"]


def _without_empty(table: list[list[str]]) -> list[list[str]]:
    """Columns in which no row says anything stay away."""
    kept = [at for at in range(len(table[0])) if any(row[at] not in ("", "–") for row in table[1:])]
    return [[row[at] for at in kept] for row in table]
