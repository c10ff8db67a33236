"""Renders several models: a load, a row each beside the others and alone, and what a sweep recommends for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from batchtune.batching.parameters import Configuration
from batchtune.measure.measurement import Measurement
from batchtune.report.tables import (
    Marks,
    console_on,
    interval,
    milliseconds,
    paragraph,
    print_rows,
    text_width,
)
from batchtune.report.words import question_text
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.joint.answer import JointRecommendation, Latency, ModelShare, Rival
from batchtune.tune.trials.trial import Trial
from batchtune.units import counted, percentage, rounded, rounded_duration

QUANTILES = ("p50", "p95", "p99")

LOAD_HEADINGS = (
    "model",
    "load",
    "requests/s",
    *(f"{name} ms" for name in QUANTILES),
    "errors",
    "SLO",
    "p95 ms alone",
)
DISPENSABLE = ("p50 ms", "errors", "p99 ms")
SHARE_HEADINGS = ("model", "rate", "promise", "measured", "alone")

Trials = Mapping[str, Trial]
"""By the name of the model."""


def print_models(
    together: Trials, alone: Trials, server: ServerActivity | None, *, stream: TextIO | None = None
) -> None:
    """A row for each model, what the others cost it, and what the server did meanwhile."""
    console, width = console_on(stream), text_width(stream)
    measured = measured_of(together)
    marks = Marks(caveats={name: measurement.caveats for name, measurement in measured.items()})
    if measured:
        print_rows(
            [LOAD_HEADINGS, *load_rows(measured, alone, marks)], stream=stream, dispensable=DISPENSABLE
        )
        console.print()
    lines = [*parameter_lines(together), *cost_lines(measured, alone), *_server(server)]
    for line in lines:
        console.print(paragraph(line, width=width), markup=False, soft_wrap=True)
    for line in marks.lines():
        console.print(paragraph(line, width=width, indent="   "), markup=False, soft_wrap=True)
    for name, trial in [*together.items(), *alone.items()]:
        if trial.failure is not None:
            console.print(f"failed: {name}: {trial.failure}", markup=False, soft_wrap=True)


def measured_of(trials: Trials) -> dict[str, Measurement]:
    """Without those that failed."""
    return {name: run for name, trial in trials.items() if (run := trial.measurement) is not None}


def load_rows(measured: Mapping[str, Measurement], alone: Trials, marks: Marks) -> Iterator[list[str]]:
    """A row for each model, as `LOAD_HEADINGS` names its cells."""
    for name, run in measured.items():
        latencies = (milliseconds(run.latency_s.get(quantile)) for quantile in QUANTILES)
        yield [
            marks.head(name),
            _load(run),
            marks.marked(interval(run.throughput_rps), name, "throughput"),
            *(marks.marked(text, name, "latency") for text in latencies),
            percentage(run.error_ratio),
            run.verdict or "–",
            _alone(alone.get(name)),
        ]


def parameter_lines(together: Trials) -> Iterator[str]:
    """What each is batched with, where they differ."""
    labels = {name: trial.configuration.label() for name, trial in together.items()}
    if len(set(labels.values())) > 1:
        yield from (f"{name} with {label}." for name, label in labels.items())


def cost_lines(measured: Mapping[str, Measurement], alone: Trials) -> Iterator[str]:
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
            text += ", with no measurable difference"
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


def print_joint(
    chosen: JointRecommendation, *, deployment: Sequence[str], stream: TextIO | None = None
) -> None:
    """The answer: parameters, a row for each model, and what it rests on."""
    console, width = console_on(stream), text_width(stream)
    for line in (headline(chosen), "Recommended:", *_chosen_parameters(chosen.configuration)):
        console.print(paragraph(line, width=width, indent="  "), markup=False, soft_wrap=True)
    console.print()
    print_rows([SHARE_HEADINGS, *share_rows(chosen)], stream=stream)
    console.print()
    for line in (
        *company_lines(chosen),
        *rival_lines(chosen),
        *open_lines(chosen),
        *(f"Warning: {caveat}" for caveat in chosen.caveats),
    ):
        console.print(paragraph(line, width=width, indent="  "), markup=False, soft_wrap=True)
    console.print("Deploy:", markup=False)
    for line in deployment:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def share_rows(chosen: JointRecommendation) -> list[tuple[str, ...]]:
    """What each model gets, under SHARE_HEADINGS, a row for each of its promises."""
    return [
        _row(share, latency, chosen, first=at == 0)
        for share in chosen.models
        for at, latency in enumerate(share.latencies)
    ]


def headline(chosen: JointRecommendation) -> str:
    fresh = f"in {chosen.held} of {counted(chosen.fresh, 'confirmation run')}"
    how_often = fresh if chosen.fresh else "in the search, and was never measured again"
    if chosen.objective == "capacity":
        missed = (
            "" if chosen.missed_factor is None else f"; more than ×{rounded(chosen.missed_factor)} is missed"
        )
        return (
            f"Every model met its SLO at ×{rounded(chosen.factor)} of the stated rates, {how_often}{missed}."
        )
    return (
        f"Every model met its SLO at the stated rates, {how_often}; the tightest limit was used to "
        f"{percentage(1.0 / chosen.score)}."
    )


def _chosen_parameters(configuration: Configuration) -> Iterator[str]:
    if configuration.batching is None:
        yield f"  all models: {configuration.label()}"
        return
    shared = Configuration(batching=configuration.batching, flags=configuration.flags)
    yield f"  shared: {shared.label()}"
    for name, own in configuration.models:
        yield f"  {name}: {Configuration(batching=own).label()}"


def _row(share: ModelShare, latency: Latency, chosen: JointRecommendation, *, first: bool) -> tuple[str, ...]:
    alone = "–"
    if share.alone is not None:
        alone = (
            f"{rounded(share.alone.rate_rps)}/s"
            if chosen.objective == "capacity"
            else (f"{percentage(1.0 / share.alone.score)} of its limit")
        )
    return (
        share.name if first else "",
        f"{rounded(share.rate_rps)}/s" if first else "",
        f"{latency.name} {rounded_duration(latency.limit_s)}",
        measured_text(latency),
        alone if first else "",
    )


def company_lines(chosen: JointRecommendation) -> Iterator[str]:
    """What company costs each model: the best found for it alone, against what it gets beside the others."""
    for share in chosen.models:
        if share.alone is None:
            continue
        own = share.alone.configuration.label()
        if chosen.objective == "capacity":
            share_of = percentage(share.rate_rps / share.alone.rate_rps)
            held = f"held {rounded(share.alone.rate_rps)}/s within its SLO"
            cost = f": beside the others it gets {share_of} of that"
            if share.rate_rps >= share.alone.rate_rps:
                cost = ": the search was too short to measure what company costs"
        else:
            held, cost = f"used {percentage(1.0 / share.alone.score)} of its tightest limit", ""
        tried = counted(share.alone.tried, "configuration")
        yield f"{share.name} alone {held} (in the search, the best of {tried} tried), with {own}{cost}."


def rival_lines(chosen: JointRecommendation) -> Iterator[str]:
    """Whether what is best for each alone would have done."""
    rates = f"×{rounded(chosen.factor)}" if chosen.objective == "capacity" else "the stated rates"
    for rival in chosen.rivals:
        if rival.kept is None:
            continue
        what = f"What was best for each alone, put together{_threads(rival)}"
        if rival.kept:
            yield f"{what}, met every SLO at {rates} too (one run)."
            continue
        held = (
            "nothing lower was tried that it held"
            if rival.factor is None
            else f"it held ×{rounded(rival.factor)}"
        )
        search = f"; {held}" if chosen.objective == "capacity" else ""
        yield f"{what}, broke the SLO of {' and '.join(rival.misses)} at {rates} (one run){search}."


def _threads(rival: Rival) -> str:
    count = None if rival.configuration.batching is None else rival.configuration.batching.num_batch_threads
    return "" if count is None else f" on {counted(count, 'thread')}"


def open_lines(chosen: JointRecommendation) -> Iterator[str]:
    """Why the answer is not established; nothing where it is."""
    if chosen.open_questions:
        questions = "; ".join(map(question_text, chosen.open_questions))
        yield f"Confidence: not established: {questions}; give the sweep more time (--budget)."


def measured_text(latency: Latency) -> str:
    """`41 ms (39 to 44)`: the median, and the range where several loads were made."""
    measured = latency.measured_s
    median = seconds_text(measured.value)
    if measured.low == measured.high:
        return median
    return f"{median} ({seconds_text(measured.low)} to {seconds_text(measured.high)})"


def seconds_text(seconds: float) -> str:
    return "–" if math.isinf(seconds) else rounded_duration(seconds)
