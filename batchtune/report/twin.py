"""Prints what the twin says: of other parameters and loads, of replicas, of each hour, and of replicas that die."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from batchtune.batching.parameters import Configuration
from batchtune.report.tables import console_on, paragraph, print_table, table_of, text_width
from batchtune.report.units import interval, latency, milliseconds, number, percent
from batchtune.scenario.units import counted, rounded_duration
from batchtune.twin.model.traffic import Traffic

if TYPE_CHECKING:
    from batchtune.twin.model.exact import ExactFigures
    from batchtune.twin.model.failures import Failure
    from batchtune.twin.model.hours import DayPlan
    from batchtune.twin.model.measured_rates import MeasuredRates
    from batchtune.twin.model.replicas import ReplicaPlan
    from batchtune.twin.model.twin import Prediction, Twin

PATIENCE_S: Final = 1.0
"""What takes longer says what it is doing."""

LINE_EVERY_S: Final = 3.0

ROWS_MOST: Final = 48
"""A longer profile is summed up; `--json` lists it."""

MEASURED_MOST: Final = 8
"""Configurations of which the measured rates stand below the table; `--json` has them all."""

_ROUTES: Final = {
    "round_robin": "in turn (round robin)",
    "random": "at random",
    "least_loaded": "to the least loaded replica",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One configuration under one load, and what the twin expects of it.

    `measured`: the rates that it held and missed, to which the twin was held; `twin_rps`: what the twin says itself.
    """

    configuration: Configuration
    traffic: Traffic
    prediction: Prediction
    measured: MeasuredRates | None = None
    twin_rps: float | None = None


@contextmanager
def note_when_slow(text: str, *, quiet: bool, stream: TextIO | None = None) -> Iterator[None]:
    """Say on stderr what is being done, once it has taken a second."""
    timer = threading.Timer(PATIENCE_S, _tell, args=(f"{text} …", stream))
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class ProgressLines:
    """Says on stderr every few seconds how many requests are simulated, how fast, and how long it will take."""

    def __init__(self, doing: str, *, quiet: bool, stream: TextIO | None = None) -> None:
        self._doing, self._quiet, self._stream = doing, quiet, stream
        self._began_s = self._last_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if self._quiet or now_s - self._last_s < LINE_EVERY_S or done <= 0:
            return
        self._last_s = now_s
        rate_rps = done / (now_s - self._began_s)
        left_s = max(total - done, 0) / rate_rps
        _tell(
            f"{self._doing}: {percent(done / total)} of {number(total)} requests, {number(rate_rps / 1e6)} million/s, "
            f"{rounded_duration(left_s)} to go",
            self._stream,
        )


def print_simulations(
    points: Sequence[Simulated],
    twin: Twin,
    *,
    base: str,
    run: Path,
    notes: Sequence[str] = (),
    stream: TextIO | None = None,
) -> None:
    """One row a point; a star marks what lies outside the calibrated range, or is overload."""
    load = "clients" if points[0].traffic.closed else "offered /s"
    latencies = ("p50 ms", "p95 ms", "p99 ms")
    table = table_of("configuration", load, "requests/s", *latencies, "mean batch", "busy", "refused", "")
    for point in points:
        table.add_row(*_cells(point))
    console = console_on(stream)
    print_table(console, table)
    lines = [f"Calibrated from {counted(twin.observations, 'trial')} of {run}; --set starts from {base}."]
    lines += [f"How sure: {twin.accuracy()}.", *notes]
    reasons = dict.fromkeys(reason for point in points for reason in point.prediction.extrapolations)
    lines += [f"* {reason}" for reason in list(reasons)[:5]]
    known = {point.configuration: point for point in points if point.measured is not None}
    for point in list(known.values())[:MEASURED_MOST]:
        lines.append(f"{point.configuration.label()}: {measured_text(point.measured, point.twin_rps)}.")
    width = text_width(stream)
    for line in lines:
        console.print(paragraph(line, width=width), markup=False, soft_wrap=True)


def print_day(day: DayPlan, *, source: str, stream: TextIO | None = None) -> None:
    """A row an interval, and what it saves to follow the traffic; the peak's plan comes after it."""
    console, width = console_on(stream), text_width(stream)
    if len(day.intervals) <= ROWS_MOST:
        table = table_of("from", "requests/s", "replicas", "")
        for part in day.intervals:
            table.add_row(part.name, number(part.rate_rps), f"{part.replicas:,}", "peak" if part.peak else "")
        print_table(console, table)
    fewest = min(part.replicas for part in day.intervals)
    hours = sum(part.length_s for part in day.intervals) / 3600.0
    for line in (
        (
            f"{source}: {fewest:,} to {counted(day.peak.advised, 'replica')} in "
            f"{counted(len(day.intervals), 'interval')}; the peak is at {day.peak_interval.name} with "
            f"{number(day.peak.rate_rps)} requests/s."
        ),
        (
            f"{number(day.replica_hours)} replica-hours in {number(hours)} h, if the fleet follows the rate at once; "
            f"{number(day.flat_replica_hours)} with the peak's throughout: {percent(day.saved_ratio)} less. Start "
            "replicas as long before an interval as they take to become ready."
        ),
        "At the peak:",
    ):
        console.print(paragraph(line, width=width), markup=False, soft_wrap=True)


def print_plan(
    plan: ReplicaPlan, twin: Twin, *, configuration: Configuration, run: Path, stream: TextIO | None = None
) -> None:
    """The number of replicas first, then what each gets, what to expect and how sure it is."""
    console, width = console_on(stream), text_width(stream)
    promise = ", ".join(f"{limit.name} ≤ {rounded_duration(limit.seconds)}" for limit in plan.limits)
    latencies = ", ".join(f"{name} {latency(expected)}" for name, expected in plan.latency_s.items())
    label = "extrapolated: " if plan.extrapolated else ""
    down = "" if plan.failure is None else f" while {plan.failure.down:,} of them may be down"
    console.print(
        f"{label}{counted(plan.advised, 'replica')} for {number(plan.rate_rps)} requests/s with {promise}{down}",
        style="bold",
        markup=False,
    )
    replicas = plan.replicas
    lines = [
        (
            f"Median {replicas.value:,.0f}, 95 % interval {replicas.low:,.0f} to {replicas.high:,.0f}; "
            f"{_left(plan):,} are enough with 95 % probability."
        ),
        (
            f"Each: {configuration.label()}; at most {interval(plan.per_replica_rps)} requests/s of the "
            f"{number(plan.saturation_rps)} that saturate it; requests go {_ROUTES[plan.routing]}."
        ),
        (
            f"Then: {latencies}; mean batch {number(plan.mean_batch_rows)} rows; devices "
            f"busy {percent(plan.busy_ratio)} of the time."
        ),
        *([] if plan.measured is None else [f"One replica: {measured_text(plan.measured, plan.twin_rps)}."]),
        *([] if plan.failure is None else _failure_lines(plan, plan.failure)),
        *([] if plan.exact is None else [_exact_line(plan, plan.exact)]),
        f"Cross-check: by 90 % of the saturation alone, {counted(plan.by_saturation_alone, 'replica')}.",
        f"How sure: {twin.accuracy()}. Calibrated from {counted(twin.observations, 'trial')} of {run}.",
        *(f"Note: {note}." for note in plan.notes),
        *(f"Extrapolated: {reason}." for reason in plan.extrapolations),
    ]
    for line in lines:
        console.print(paragraph(line, width=width), markup=False, soft_wrap=True)


def measured_text(measured: MeasuredRates | None, twin_rps: float | None) -> str:
    """`measured to hold 9,340 requests/s, and less than 11,200`, and what the twin says if that lies outside."""
    if measured is None or twin_rps is None:
        return "not measured"
    held, missed = number(measured.held_rps), number(measured.most_rps)
    if measured.missed_rps is None:
        ends, text = f"{held}/s and more", f"measured to hold {held} requests/s or more"
    elif measured.held_rps:
        ends, text = f"{held}-{missed}/s", f"measured to hold {held} requests/s, and less than {missed}"
    else:
        ends, text = f"0-{missed}/s", f"measured to hold less than {missed} requests/s"
    if measured.hold(twin_rps):
        return text
    says = f"the twin says {number(twin_rps)}/s, outside the measured {ends}: the measured rate counts"
    return f"{text}; {says}"


def _left(plan: ReplicaPlan) -> int:
    return plan.advised - (0 if plan.failure is None else plan.failure.down)


def _exact_line(plan: ReplicaPlan, exact: ExactFigures) -> str:
    reached = ", ".join(
        f"{name} {rounded_duration(value_s)} ({_against(value_s, exact.pool_latency_s[name])})"
        for name, value_s in exact.latency_s.items()
    )
    missed = any(exact.latency_s[limit.name] > limit.seconds for limit in plan.limits)
    words = ["a limit is MISSED"] if missed else []
    if exact.error_ratio > plan.error_ratio:
        words.append(f"more is REFUSED than the {percent(plan.error_ratio)} that may be")
    split = (
        "whole"
        if exact.exact
        else f"in {exact.blocks:,} blocks, each with its share: the least loaded is chosen within one"
    )
    return (
        f"Simulated {split}, by the best reading: {counted(exact.replicas, 'replica')}, {number(exact.requests)} "
        f"requests: {reached}; refused {percent(exact.error_ratio)}, devices busy {percent(exact.busy_ratio)}; "
        f"{' and '.join(words) or 'every limit is kept'}. Latencies are known to "
        f"±{percent(exact.relative_error)}; it took {rounded_duration(exact.took_s)} on "
        f"{counted(exact.processes, 'core')}: {number(exact.simulated_rps / 1e6)} million requests/s."
    )


def _against(value_s: float, pool_s: float) -> str:
    """How the pool's figure stands to that of the whole fleet."""
    if not (math.isfinite(value_s) and math.isfinite(pool_s)):
        return f"the pool: {rounded_duration(pool_s)}"
    return f"the pool: {100.0 * (pool_s / value_s - 1.0):+.1f} %"


def _failure_lines(plan: ReplicaPlan, failure: Failure) -> list[str]:
    minute, down = failure.minute, failure.down
    which = "it" if down == 1 else "them"
    without = ", ".join(f"{name} {latency(expected)}" for name, expected in failure.latency_s.items())
    within = ", ".join(f"{name} {latency(reached)}" for name, reached in minute.latency_s.items())
    return [
        (
            f"Down: {_left(plan):,} of {plan.advised:,} keep every limit (N+{down:,}), with {without}; devices busy "
            f"{percent(failure.busy_ratio)} of the time."
        ),
        (
            f"The minute in which {down:,} die{'s' if down == 1 else ''}: {within} of what is answered; "
            f"{interval(minute.error_ratio, scale=100.0)} % of the requests are lost or refused; a limit or the share "
            f"of errors is missed in {minute.seconds_missed} of 60 s. Requests go to {which} for "
            f"{rounded_duration(minute.detect_s)} more (--detect), and nobody sends a lost one again. "
            f"Simulated with {counted(minute.simulated_replicas, 'replica')}."
        ),
    ]


def _cells(point: Simulated) -> list[str]:
    prediction, traffic = point.prediction, point.traffic
    offered = prediction.throughput.value if traffic.offered_rps is None else traffic.offered_rps
    refused = prediction.error_ratio
    return [
        point.configuration.label(),
        str(traffic.clients) if traffic.closed else number(offered),
        interval(prediction.throughput),
        number(prediction.latency("p50").value * 1e3),
        milliseconds(prediction.latency("p95")),
        number(prediction.latency("p99").value * 1e3),
        number(float(sorted(prediction.mean_batch_rows)[len(prediction.mean_batch_rows) // 2])),
        percent(float(sorted(prediction.busy_ratio)[len(prediction.busy_ratio) // 2])),
        percent(float(sorted(refused)[len(refused) // 2])),
        "*" if prediction.extrapolated else "",
    ]


def _tell(text: str, stream: TextIO | None) -> None:
    print(text, file=stream or sys.stderr, flush=True)
