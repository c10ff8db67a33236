"""Which trials stand behind a point, and what did each show: the rows of the page's table?"""

from __future__ import annotations

from typing import Any, Final

from batchtune.report.bottleneck import limit_word
from batchtune.report.html.account import Account
from batchtune.report.html.drawing import label
from batchtune.report.units import interval, milliseconds, number, percent
from batchtune.report.words import parameters_of
from batchtune.tune.evidence.bottleneck_of import trial_bottleneck
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


def trial_rows(account: Account) -> dict[str, Any]:
    """`rows`: a list of texts a trial; `configurations`: in the order of the pool, label, parameters, row numbers."""
    places = {trial.number: at for at, trial in enumerate(account.trials)}
    configurations = []
    for pooled in account.choice.pooled:
        runs = {run.trial.number for run in (*pooled.searched, *pooled.runs)}
        configurations.append(
            {
                "label": label(pooled.configuration),
                "parameters": parameters_of(pooled.configuration),
                "rows": [places[number] for number in sorted(runs) if number in places],
            }
        )
    return {"rows": [_row(trial, account) for trial in account.trials], "configurations": configurations}


def _row(trial: Trial, account: Account) -> list[str]:
    measured = trial.measurement
    head = [str(trial.number), trial.source.replace("_", " "), label(trial.configuration)]
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
        limit_word(trial_bottleneck(trial, account.scenario)),
        measured.verdict or "–",
        ", ".join(caveat.code.replace("_", " ") for caveat in measured.caveats) or "–",
        trial.reason,
    ]
