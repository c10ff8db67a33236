"""Prints the twin's predictions: for other parameters and loads, and for replicas."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchtune.batching.parameters import Configuration
from batchtune.report import tables
from batchtune.report.answer_words import no_miss_text
from batchtune.report.findings import labels, text_of
from batchtune.report.run_tables import brief_labels
from batchtune.twin.traffic import Traffic
from batchtune.units import counted, percentage, rounded, rounded_duration

if TYPE_CHECKING:
    from batchtune.twin.replicas import Failure, MeasuredRates, ReplicaPlan
    from batchtune.twin.twin import Prediction, Twin

PATIENCE_S: Final = 1.0
"""Seconds after which work that still runs says what it is doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One configuration under one load, and what the twin predicts.

    `measured`: the highest rate that runs of this configuration met, and the lowest that they missed; the twin was
    scaled to agree with them. `twin_rps`: the highest rate by the twin before that. Both None: nothing was measured.
    """

    configuration: Configuration
    traffic: Traffic
    prediction: Prediction
    measured: MeasuredRates | None = None
    twin_rps: float | None = None


@contextmanager
def note_when_slow(text: str, *, quiet: bool) -> Iterator[None]:
    """Return a context manager that prints `text` on stderr once its block has taken PATIENCE_S."""
    timer = threading.Timer(PATIENCE_S, lambda: sys.stderr.write(f"{text} …\n"))
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_simulations(
    points: Sequence[Simulated],
    twin: Twin,
    *,
    base: str,
    run: Path,
    notes: Sequence[str] = (),
) -> None:
    """Print whether to doubt the twin, a table with a row for each point, its accuracy, notes and measured rates.

    `base`: what --set starts from. A star marks a row with batches or threads beyond those measured, or with a
    rate above or near saturation; a line below says why.
    """
    tables.print_text(*doubts(twin), bold=True)
    # Configurations of which the measured rates are shown below the table; `--json` has them all.
    measured_most = 8
    load = "clients" if points[0].traffic.closed else "offered /s"
    latencies = ("p50 ms", "p95 ms", "p99 ms")
    headings = ["configuration", load, "requests/s", *latencies, "mean batch", "busy", "refused", ""]
    labels, common = brief_labels([point.configuration.label() for point in points])
    tables.print_rows(
        [headings, *([label, *_cells(point)] for label, point in zip(labels, points, strict=True))],
        dispensable=("p50 ms", "mean batch", "p99 ms", "refused", "busy"),
    )
    tables.print_text(*([f"All configurations: {common}."] if common else []), "")
    lines = [f"Calibrated from {counted(twin.observations, 'trial')} of {run}; --set starts from {base}."]
    lines += [f"Confidence: {accuracy_text(twin)}.", *notes]
    reasons = dict.fromkeys(text_of(reason) for point in points for reason in point.prediction.extrapolations)
    lines += [f"* {reason}" for reason in list(reasons)[:5]]
    known = {point.configuration: point for point in points if point.measured is not None}
    for point in list(known.values())[:measured_most]:
        lines.append(f"{point.configuration.label()}: {measured_text(point.measured, point.twin_rps)}.")
    tables.print_text(*lines)


def doubts(twin: Twin) -> list[str]:
    """Return the sentence that a twin's predictions are too far off; [] where they are not."""
    return [] if twin.reliable else ["The simulator is too inaccurate to rely on for this server."]


def print_plan(plan: ReplicaPlan, twin: Twin, *, configuration: Configuration, run: Path) -> None:
    """Print how many replicas a plan needs, then what each gets, the predicted latencies, and how accurate
    that is."""
    promise = ", ".join(f"{limit.name} ≤ {rounded_duration(limit.seconds)}" for limit in plan.limits)
    latencies = ", ".join(f"{name} {tables.latency(expected)}" for name, expected in plan.latency_s.items())
    label = " (extrapolated)" if plan.extrapolated else ""
    down = "" if plan.failure is None else f" while {plan.failure.down:,} of them may be down"
    said = f"{counted(plan.advised, 'replica')} for {rounded(plan.rate_rps)} requests/s with {promise}{down}{label}"
    tables.print_text(*doubts(twin), said, bold=True)
    replicas = plan.replicas
    spread = (
        "" if replicas.low == replicas.high else f" (they need {replicas.low:,.0f} to {replicas.high:,.0f})"
    )
    lines = [
        (
            f"Confidence: {_left(plan):,} {'is' if _left(plan) == 1 else 'are'} enough in "
            f"{percentage(plan.kept_ratio)} of the simulator's fits to the trials{spread}. Its own error (see "
            f"Accuracy) is not included."
            if twin.reliable
            else f"Confidence: none{spread}, since the simulator is too inaccurate (see Accuracy)."
        ),
        f"Configuration of each replica: {configuration.label()}.",
        (
            f"Capacity of each replica, simulated{_capacity(plan)} requests/s within these limits; saturated at "
            f"{rounded(plan.saturation_rps)} in the best fit. Each gets {rounded(plan.rate_rps / _left(plan))}/s{down}."
        ),
        *([] if plan.measured is None else [_measured_line(plan, plan.measured)]),
        f"Predicted, with requests sent {labels('routes')[plan.routing]}: {latencies}.",
        *([] if plan.failure is None else [_failure_line(plan, plan.failure)]),
        f"Without latency limits: {counted(plan.by_saturation_alone, 'replica')}, each at most at 90 % of saturation.",
        f"Accuracy: {accuracy_text(twin)}. Calibrated from {counted(twin.observations, 'trial')} of {run}.",
        "Brackets are 95 % intervals.",
        *(f"Note: {text_of(note)}." for note in plan.notes),
        *(f"Extrapolated: {text_of(reason)}." for reason in plan.extrapolations),
    ]
    tables.print_text(*lines)


def accuracy_text(twin: Twin) -> str:
    """Return a clause on how far off the twin's predictions were for trials that it was not calibrated from."""
    error = twin.error
    if not error.left_out or math.isnan(error.mape):
        return "too few different trials to test the simulator on trials that it was not calibrated with"
    medians = ", ".join(
        f"{words} {percentage(ratio)}"
        for words, ratio in (("p95", error.p95_ratio), ("throughput", error.throughput_ratio))
        if not math.isnan(ratio)
    )
    trials = counted(error.left_out, "trial")
    return (
        f"the simulator's mean error was {percentage(error.mape)} in {trials} that it was not calibrated with "
        f"(median errors: {medians})"
    )


def measured_text(measured: MeasuredRates | None, twin_rps: float | None) -> str:
    """Return a clause on the highest rate that one replica met and the lowest that it missed, and on `twin_rps`, the
    highest rate by the twin, where that lies outside of them; `not measured` where either argument is None."""
    if measured is None or twin_rps is None:
        return "not measured"
    held, missed = rounded(measured.held_rps), rounded(measured.most_rps)
    met = f"one replica met the SLO at {held}/s"
    if measured.is_share:
        runs = counted(measured.missed_runs, "confirmation run")
        doubt = f": {runs} missed it there or above" if measured.missed_runs else ""
        met = f"one replica is expected to meet the SLO at {held}/s (not confirmed{doubt})"
    ends = f"{held}-{missed}/s"
    text = f"{met}; its capacity is below {'about ' if measured.is_bound else ''}{missed}/s"
    if measured.doubtful_rps is not None:
        text += f"; the lowest rate that a run missed is {rounded(measured.doubtful_rps)}/s"
    if measured.missed_rps is None:
        ends, text = f"{held}/s and more", f"{met}; {no_miss_text(measured.doubtful_rps)}"
    elif not measured.held_rps:
        ends = f"0-{missed}/s"
        text = f"no run at a fixed rate met the SLO; the capacity of one replica is below {missed}/s"
    if measured.hold(twin_rps):
        return text
    says = f"the simulator predicts {rounded(twin_rps)}/s, outside the measured {ends}, so the measured rate counts"
    return f"{text}; {says}"


def _measured_line(plan: ReplicaPlan, measured: MeasuredRates) -> str:
    """Return what was measured of one replica, and how many replicas the highest rate that it met would need, where
    those are more than planned."""
    line = f"Measured: {measured_text(measured, plan.twin_rps)}."
    if not measured.held_rps:
        return line
    needed = math.ceil(plan.rate_rps / measured.held_rps)
    if needed <= _left(plan):
        return line
    return (
        f"{line} {counted(needed, 'replica')} would ask no more of each than {rounded(measured.held_rps)}/s."
    )


def _capacity(plan: ReplicaPlan) -> str:
    """Return the rate that one replica may get, with what brackets do not mean: ends within the measured rates are no
    interval of the simulator."""
    share = plan.per_replica_rps
    if plan.measured is None:
        return f": {tables.interval(share)}"
    ends = "" if share.low == share.high else f" ({rounded(share.low)} to {rounded(share.high)})"
    return f" and limited to the measured rates: {rounded(share.value)}{ends}"


def _left(plan: ReplicaPlan) -> int:
    """Return how many replicas of a plan are up when as many as may fail are down."""
    return plan.advised - (0 if plan.failure is None else plan.failure.down)


def _failure_line(plan: ReplicaPlan, failure: Failure) -> str:
    without = ", ".join(f"{name} {tables.latency(expected)}" for name, expected in failure.latency_s.items())
    return f"With {failure.down:,} down: {_left(plan):,} of {plan.advised:,} are left, with {without}."


def _cells(point: Simulated) -> list[str]:
    prediction, traffic = point.prediction, point.traffic
    offered = prediction.throughput.value if traffic.offered_rps is None else traffic.offered_rps
    return [
        str(traffic.clients) if traffic.closed else rounded(offered),
        tables.interval(prediction.throughput),
        rounded(prediction.latency("p50").value * 1e3),
        tables.milliseconds(prediction.latency("p95")),
        rounded(prediction.latency("p99").value * 1e3),
        rounded(float(sorted(prediction.mean_batch_rows)[len(prediction.mean_batch_rows) // 2])),
        percentage(float(sorted(prediction.busy_ratio)[len(prediction.busy_ratio) // 2])),
        percentage(float(sorted(prediction.error_ratio)[len(prediction.error_ratio) // 2])),
        "*" if prediction.extrapolated else "",
    ]
