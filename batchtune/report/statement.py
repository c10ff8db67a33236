"""Prints a recommendation with the whole argument: every contender, reason, confidence, alternatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from batchtune.report.contenders import DISPENSABLE, RECOMMENDED, contenders_table
from batchtune.report.tables import (
    Marks,
    console_on,
    paragraph,
    print_table,
    rows_that_fit,
    table_of,
    text_width,
    width_of,
)
from batchtune.report.words import (
    NAMES,
    REFERENCES,
    bottleneck_sentence,
    capitalised,
    confidence_sentence,
    figures_sentence,
    gain_sentences,
    name_without_parameters,
    named_sentences,
    offer_sentences,
    other_references,
    parameters_of,
    promise_sentence,
    why_sentence,
    workload,
)
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.units import counted, rounded_duration

if TYPE_CHECKING:
    from rich.table import Table


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
