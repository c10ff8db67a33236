"""What does the page of a sweep say: what to deploy, the space, the latencies, the model of the server?"""

from __future__ import annotations

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
from batchtune.report.html.sweep.forecast import Forecast
from batchtune.report.html.sweep.search_figures import history, pareto
from batchtune.report.html.sweep.service_time import service_time
from batchtune.report.html.sweep.space_figures import heat_maps, slices
from batchtune.report.html.sweep.twin_figures import agreement, rates
from batchtune.report.words import PROTOCOLS, parameters_of
from batchtune.scenario.units import counted, rounded_duration
from batchtune.target.model_files import served_name

_INTERVALS: Final = (
    "Intervals are 95 % intervals: of one run from order statistics, widened because requests of one batch finish "
    "together; of the first screen for a fresh run, the spread between runs included. Gains compare runs made side by "
    "side."
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
        open_questions=[] if chosen is None else chosen.open_questions,
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
    forecast = None if account.twin is None else Forecast(twin=account.twin, scenario=account.scenario)
    shown, slo = account.shown, account.scenario.slo
    return [
        pareto(account),
        heat_maps(account, forecast),
        slices(account, forecast),
        distribution(shown, slo, which=LATEST),
        timeline(shown, slo, which=LATEST),
        split(shown, which=LATEST),
        sizes(shown, which=LATEST),
        service_time(account),
        agreement(account, forecast),
        rates(account, forecast),
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


def _caveats_by_role(account: Account) -> dict[str, list[Caveat]]:
    return {
        name: [
            caveat
            for run in pooled.runs
            if run.trial.measurement is not None
            for caveat in run.trial.measurement.caveats
        ]
        for name, pooled in account.roles.items()
    }


def _trials(account: Account) -> TrialTable:
    """A detail for each configuration, in the order of the pool."""
    places = {trial.number: at for at, trial in enumerate(account.trials)}
    details = []
    for pooled in account.choice.pooled:
        numbers = {run.trial.number for run in (*pooled.searched, *pooled.runs)}
        details.append(
            Detail(
                heading=label(pooled.configuration),
                parameters=parameters_of(pooled.configuration),
                rows=[places[number] for number in sorted(numbers) if number in places],
            )
        )
    return TrialTable(rows=trial_rows(account.trials, lambda _: account.scenario), details=details)
