"""Puts the page of a sweep together: what to deploy, all contenders, the space, the latencies, the trials."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from batchtune.measure.validity.caveats import Caveat
from batchtune.report.html.shell.batch_sizes import sizes
from batchtune.report.html.shell.document import (
    Document,
    gathered_caveats,
    provenance_rows,
    slo_text,
    traffic_text,
)
from batchtune.report.html.shell.drawing import Section, label
from batchtune.report.html.shell.latency_figures import distribution, split, timeline
from batchtune.report.html.shell.shown import is_emulated
from batchtune.report.html.shell.trial_rows import Detail, TrialTable, trial_rows
from batchtune.report.html.sweep.account import LATEST, Account
from batchtune.report.html.sweep.answers import answers_of, notes_of
from batchtune.report.html.sweep.contender_figures import brackets, contenders, history, pareto, rates
from batchtune.report.html.sweep.service_time import service_time
from batchtune.report.html.sweep.space_figures import heat_map, slices
from batchtune.report.words import PROTOCOLS, parameters_of
from batchtune.scenario.units import counted, rounded_duration
from batchtune.target.model_files import served_name

_INTERVALS: Final = (
    "A range holds the runs named beside it; from five fresh runs on it holds 95 % of further runs. A gain is the "
    "ratio of two brackets, from the rate held to the rate missed. In the list of trials an interval is the 95 % "
    "interval of one run, from order statistics."
)


def sweep_document(account: Account, *, deployment: str | None = None) -> Document:
    """The page; `deployment` is the command that serves what is recommended."""
    chosen = account.chosen
    return Document(
        title=account.scenario.name,
        subtitle=_subtitle(account),
        emulated=is_emulated(account.trials),
        answers=answers_of(account),
        command=deployment,
        notes=[] if chosen is None else [note for note in notes_of(chosen) if note],
        open_questions=[] if chosen is None else [question.text() for question in chosen.open_questions],
        alternatives=[]
        if chosen is None
        else [(parameters_of(other.configuration), other.trade) for other in chosen.alternatives],
        sections=_sections(account),
        caveats=gathered_caveats(_caveats_by_role(account)),
        provenance=provenance_rows(account.run, account.scenario),
        trials=_trials(account),
        intervals=_INTERVALS,
    )


def _sections(account: Account) -> list[Section]:
    shown, slo = account.shown, account.scenario.slo
    return [
        brackets(account),
        contenders(account),
        rates(account) if account.scenario.objective == "capacity" else pareto(account),
        heat_map(account),
        slices(account),
        distribution(shown, slo, which=LATEST),
        timeline(shown, slo, which=LATEST),
        split(shown, which=LATEST),
        sizes(shown, which=LATEST),
        service_time(account),
        history(account),
    ]


def _subtitle(account: Account) -> str:
    scenario, chosen = account.scenario, account.chosen
    rows = max(kind.rows or 1 for kind in scenario.request.kinds())
    parts = [
        served_name(scenario.target.model),
        PROTOCOLS[scenario.request.protocol],
        f"{counted(rows, 'row')} a request",
        traffic_text(scenario),
        slo_text(scenario),
        f"objective {scenario.objective}",
    ]
    if chosen is not None:
        parts.append(f"{rounded_duration(chosen.seconds)} of measuring")
    return " · ".join(parts)


def _caveats_by_role(account: Account) -> dict[str, tuple[Caveat, ...]]:
    return {name: contender.caveats for name, contender in account.roles.items()}


def _trials(account: Account) -> TrialTable:
    """A detail for each configuration, in the order of the table of contenders."""
    places = defaultdict(list)
    for at, trial in enumerate(account.trials):
        places[trial.configuration].append(at)
    details = [
        Detail(
            heading=label(contender.configuration),
            parameters=parameters_of(contender.configuration),
            rows=places[contender.configuration],
        )
        for contender in account.contenders
    ]
    return TrialTable(rows=trial_rows(account.trials, lambda _: account.scenario), details=details)
