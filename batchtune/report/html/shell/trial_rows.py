"""Which trials stand behind a figure, and what did each show: the rows of the page's table?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from batchtune.report.html.shell.drawing import label
from batchtune.report.tables import interval, milliseconds, number, percent
from batchtune.report.words import limit_word, parameters_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import rounded
from batchtune.tune.evidence.best_point import trial_bottleneck
from batchtune.tune.trials.trial import Trial

COLUMNS: Final = (
    "trial",
    "source",
    "configuration",
    "load",
    "requests/s",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "errors",
    "mean batch",
    "limited by",
    "SLO",
    "caveats",
    "why",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """What a click on a point shows: a heading, or parameters instead, and rows of the table by their place."""

    heading: str
    parameters: Sequence[tuple[str, str]] = ()
    rows: Sequence[int]

    def to_dict(self) -> dict[str, Any]:
        return {"heading": self.heading, "parameters": self.parameters, "rows": self.rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """A row of texts a trial, and the details in the order of the numbers that points have as `customdata`."""

    rows: Sequence[Sequence[str]]
    details: Sequence[Detail]


def trial_rows(trials: Sequence[Trial], scenario_of: Callable[[Trial], Scenario]) -> list[list[str]]:
    """The rows of all trials; a scenario tells what limits a trial of it."""
    return [_row(trial, scenario_of(trial)) for trial in trials]


def table_of_single_trials(
    trials: Sequence[Trial], scenario_of: Callable[[Trial], Scenario], heading_of: Callable[[Trial], str]
) -> TrialTable:
    """With a detail for each trial, in their order."""
    details = [
        Detail(
            heading=f"Trial {trial.number}: {heading_of(trial)}",
            parameters=parameters_of(trial.configuration),
            rows=[at],
        )
        for at, trial in enumerate(trials)
    ]
    return TrialTable(rows=trial_rows(trials, scenario_of), details=details)


def _row(trial: Trial, scenario: Scenario) -> list[str]:
    measured = trial.measurement
    configuration, source = trial.configuration, trial.source.replace("_", " ")
    if (company := trial.company) is not None:
        configuration = configuration.of_model(company.model)
        source = f"{company.model}, load {company.load} {company.kind} ×{rounded(company.factor)}"
    head = [str(trial.number), source, label(configuration)]
    if measured is None:
        return [*head, *["–"] * (len(COLUMNS) - len(head) - 1), trial.failure or trial.state]
    load = (
        f"{measured.concurrency} clients"
        if measured.concurrency is not None
        else f"{number(measured.offered_rps)}/s"
    )
    return [
        *head,
        load,
        interval(measured.throughput_rps),
        *(milliseconds(measured.latency_s.get(name)) for name in ("p50", "p95", "p99")),
        percent(measured.error_ratio),
        number(None if measured.server is None else measured.server.mean_batch_rows),
        limit_word(trial_bottleneck(trial, scenario)),
        measured.verdict or "–",
        ", ".join(caveat.code.replace("_", " ") for caveat in measured.caveats) or "–",
        trial.reason,
    ]
