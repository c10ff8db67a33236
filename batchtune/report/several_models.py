"""How does a load of several models read: a row each, beside the others and alone, and what the server did?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from batchtune.measure.measurement import Measurement
from batchtune.plain_values import to_plain
from batchtune.report.marks import Marks
from batchtune.report.tables import console_on, paragraph, print_table, table_of, text_width
from batchtune.report.units import interval, milliseconds, percent
from batchtune.scenario.units import counted, percentage, rounded, rounded_duration
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.trials.trial import Trial

QUANTILES = ("p50", "p95", "p99")

Trials = Mapping[str, Trial]
"""By the name of the model."""


def models_dict(together: Trials, alone: Trials, server: ServerActivity | None) -> dict[str, Any]:
    """For --json: `{"models": {NAME: {"together": trial, "alone": trial or null}}, "server": …}`.

    `server` is what the whole server did while all models were loaded.
    """
    models = {
        name: {
            "together": trial.to_dict(),
            "alone": alone[name].to_dict() if name in alone else None,
        }
        for name, trial in together.items()
    }
    return {"models": models, "server": to_plain(server)}


def print_models(
    together: Trials, alone: Trials, server: ServerActivity | None, *, stream: TextIO | None = None
) -> None:
    """A row for each model, what the others cost it, and what the server did meanwhile."""
    console, width = console_on(stream), text_width(stream)
    measured = {
        name: measurement
        for name, trial in together.items()
        if (measurement := trial.measurement) is not None
    }
    marks = Marks(caveats={name: measurement.caveats for name, measurement in measured.items()})
    if measured:
        table = table_of(
            "model",
            "load",
            "requests/s",
            *(f"{name} ms" for name in QUANTILES),
            "errors",
            "SLO",
            "p95 ms alone",
        )
        for name, measurement in measured.items():
            latencies = (
                marks.marked(milliseconds(measurement.latency_s.get(quantile)), name, "latency")
                for quantile in QUANTILES
            )
            table.add_row(
                marks.head(name),
                _load(measurement),
                marks.marked(interval(measurement.throughput_rps), name, "throughput"),
                *latencies,
                percent(measurement.error_ratio),
                measurement.verdict or "–",
                _alone(alone.get(name)),
            )
        print_table(console, table)
    lines = [*_parameters(together), *_costs(measured, alone), *_server(server)]
    for line in lines:
        console.print(paragraph(line, width=width), markup=False, soft_wrap=True)
    for line in marks.lines():
        console.print(paragraph(line, width=width, indent="   "), markup=False, soft_wrap=True)
    for name, trial in [*together.items(), *alone.items()]:
        if trial.failure is not None:
            console.print(f"failed: {name}: {trial.failure}", markup=False, soft_wrap=True)


def _parameters(together: Trials) -> Iterator[str]:
    """What each is batched with, where they differ."""
    labels = {name: trial.configuration.label() for name, trial in together.items()}
    if len(set(labels.values())) > 1:
        yield from (f"{name} with {label}." for name, label in labels.items())


def _costs(measured: Mapping[str, Measurement], alone: Trials) -> Iterator[str]:
    """What each model pays for the company of the others."""
    for name, measurement in measured.items():
        trial = alone.get(name)
        apart = None if trial is None else trial.measurement
        if apart is None:
            continue
        here, there = measurement.latency_s["p95"], apart.latency_s["p95"]
        text = f"p95 {rounded_duration(here.value)} beside the others, {rounded_duration(there.value)} alone"
        overloaded = math.isinf(here.value) and math.isfinite(there.value)
        if not overloaded and here.low <= there.high and there.low <= here.high:
            text += ", which cannot be told apart"
        elif there.value > 0.0 and not overloaded:
            text += f" (×{rounded(here.value / there.value)})"
        if measurement.concurrency is not None:
            rates = (rounded(run.throughput_rps.value) for run in (measurement, apart))
            text += "; {} requests/s beside them, {} alone".format(*rates)
        yield f"{name}: {text}."


def _server(server: ServerActivity | None) -> Iterator[str]:
    if server is None or not server.batches:
        return
    facts = [f"{server.batches:,} batches"]
    if server.mean_batch_rows is not None:
        facts.append(f"{rounded(server.mean_batch_rows)} rows on average")
    if server.queue_wait_mean_s is not None:
        facts.append(f"{rounded_duration(server.queue_wait_mean_s)} in the queue")
    if server.device_busy_ratio is not None:
        facts.append(f"a batch under way {percentage(min(server.device_busy_ratio, 1.0))} of the time")
    yield f"The server, all models together: {', '.join(facts)}."
    all_micros = sum(server.model_batch_micros.values())
    if all_micros and len(server.model_batches) > 1:
        shares = (
            f"{name} {percentage(server.model_batch_micros.get(name, 0) / all_micros)} in batches of "
            f"{rounded(server.model_batch_rows.get(name, 0) / batches)} rows on average, padding included"
            for name, batches in server.model_batches.items()
        )
        yield f"Of the time of all batches {'; '.join(shares)}."


def _alone(trial: Trial | None) -> str:
    if trial is None or trial.measurement is None:
        return "–"
    return milliseconds(trial.measurement.latency_s.get("p95"))


def _load(measured: Measurement) -> str:
    if measured.concurrency is not None:
        return counted(measured.concurrency, "client")
    return f"{rounded(measured.offered_rps or 0.0)}/s"
