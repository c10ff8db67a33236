"""Prints a recommendation in some fifteen lines: parameters, gain, SLO, reason, bottleneck, confidence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TextIO

from batchtune.measure.validity.caveats import CLIENT_CODES, HOST_CODES, Caveat
from batchtune.report.contenders import compared_table
from batchtune.report.tables import console_on, paragraph, text_width
from batchtune.report.words import (
    REFERENCES_IN_SENTENCES,
    bottleneck_sentence,
    capitalised,
    confidence_sentence,
    figures_sentence,
    gain_sentences,
    name_without_parameters,
    offer_sentences,
    parameters_of,
    promise_sentence,
    why_sentence,
    workload,
)
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.units import counted

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
            yield _sentence(caveat, whose)
    more = len({caveat.code for caveat, _ in against} - said)
    if said and more:
        yield f"{counted(more, 'more warning')}: `--why`."


def _sentence(caveat: Caveat, whose: str) -> str:
    advice = "" if caveat.code == "emulated_device" else f": {caveat.advice}"
    return f"{capitalised(caveat.text)}{whose}{advice}."
