"""How does a recommendation, or a table of load points, read on a terminal or in a log? Data goes to stdout."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from batchtune.batching import Configuration, to_dict
from batchtune.measure.caveats import Caveat
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.recommend import Alternative, Recommendation
from batchtune.report.tables import console_on, table_of
from batchtune.report.units import duration, interval, milliseconds, number, percent, ratio
from batchtune.scenario.spec import Scenario
from batchtune.tune.trial import Trial

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 200
_HELPS = {
    "yes": "Batching helps here.",
    "no": "Batching does not help here.",
    "not distinguishable": "Whether batching helps here cannot be told from these measurements.",
}
_PROTOCOLS = {
    "grpc": "gRPC",
    "rest": "REST",
    "kserve_grpc": "KServe gRPC",
    "kserve_rest": "KServe REST",
    "kserve_rest_binary": "KServe REST with binary tensors",
}
_REFERENCES = {"no_batching": "no batching", "defaults": "server defaults"}


def print_recommendation(
    chosen: Recommendation,
    *,
    scenario: Scenario,
    trials: Sequence[Trial],
    parameters_file: Path,
    stream: TextIO | None = None,
) -> None:
    """The parameters, what they give, the gain, the reason, how sure, and how to deploy them."""
    console = console_on(stream, wide=_WIDE)
    console.print(f"{_workload(scenario, chosen)}", markup=False)
    console.print()
    console.print(_headline(chosen.configuration), style="bold", markup=False)
    for name, value in _parameters(chosen.configuration):
        console.print(f"  {name:<26} {value}", markup=False)
    console.print()
    console.print(_comparison(chosen, trials))
    console.print()
    for line in _sentences(chosen):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    console.print(_deployment(chosen.configuration, parameters_file), markup=False, soft_wrap=True)


def print_points(points: Sequence[Trial], *, stream: TextIO | None = None) -> None:
    """One row a load point, with the columns that perf_analyzer's users know."""
    measured = [point.measurement for point in points if point.measurement is not None]
    closed = any(one.concurrency for one in measured)
    table = table_of(
        "clients" if closed else "offered /s", "requests/s", "rows/s", "p50 ms", "p90 ms", "p95 ms", "p99 ms"
    )
    for heading in ("errors", "mean batch", "queue ms", "compute ms"):
        table.add_column(heading, justify="right")
    console = console_on(stream, wide=_WIDE)
    for one in measured:
        table.add_row(*_point_cells(one))
    console.print(table)
    for caveat in {
        one.text: one for point in points if point.measurement for one in point.measurement.caveats
    }.values():
        console.print(f"{_weight(caveat)}: {caveat.text} — {caveat.advice}", markup=False, soft_wrap=True)
    for point in points:
        if point.failure is not None:
            console.print(f"failed: {point.failure}", markup=False, soft_wrap=True)


def print_points_csv(points: Sequence[Trial], *, stream: TextIO | None = None) -> None:
    """The same as CSV in plain units: requests and rows per second, milliseconds, ratios."""
    writer = csv.writer(stream or sys.stdout)
    quantiles = ("p50", "p90", "p95", "p99", "p99.9")
    writer.writerow(
        ["concurrency", "offered_rps", "throughput_rps", "throughput_low", "throughput_high", "rows_per_s"]
        + [f"{name}_{part}" for name in quantiles for part in ("ms", "low_ms", "high_ms")]
        + ["error_ratio", "mean_batch_rows", "queue_ms", "compute_ms", "send_lag_p99_ms", "failure"]
    )
    for point in points:
        writer.writerow(_csv_row(point, quantiles))


def _weight(caveat: Caveat) -> str:
    """What the client spoilt is no measurement of the server."""
    return "INVALID, the client was the limit" if caveat.blames_client else "caveat"


def _headline(configuration: Configuration) -> str:
    return "Recommended: no batching" if configuration.batching is None else "Recommended"


def _workload(scenario: Scenario, chosen: Recommendation) -> str:
    rows = f"{chosen.rows_per_request} row{'' if chosen.rows_per_request == 1 else 's'} per request"
    if chosen.concurrency is not None:
        traffic = f"{chosen.concurrency} clients in a closed loop"
    else:
        traffic = f"{scenario.load.arrivals} arrivals"
    protocol = _PROTOCOLS[scenario.request.protocol]
    limits = ", ".join(
        f"{name} ≤ {duration(limit)}" for name, limit in chosen.slo.items() if name != "errors"
    )
    slo = f"; SLO {limits}" if limits else ""
    model = Path(scenario.target.model).name
    return f"{model} by {protocol}, {rows}, {traffic}{slo}; objective {scenario.objective}"


def _parameters(configuration: Configuration) -> list[tuple[str, str]]:
    batching = {} if configuration.batching is None else to_dict(configuration.batching)
    if configuration.batching is not None and not batching:
        return [("(the server's defaults)", "")]
    named = [(name, _shown(value)) for name, value in batching.items()]
    return named + [(f"--{name}", value) for name, value in configuration.flags]


def _comparison(chosen: Recommendation, trials: Sequence[Trial]) -> Table:
    table = table_of("", "requests/s", "p50 ms", "p95 ms", "p99 ms", "mean batch rows")
    table.add_row(
        "recommended",
        interval(chosen.throughput_rps),
        *(milliseconds(chosen.latency_s.get(name)) for name in ("p50", "p95", "p99")),
        number(_mean_batch_rows(chosen.configuration, trials)),
    )
    for reference in chosen.references:
        if reference.configuration != chosen.configuration:
            table.add_row(
                _REFERENCES[reference.name],
                interval(reference.throughput_rps),
                *(milliseconds(reference.latency_s.get(name)) for name in ("p50", "p95", "p99")),
                number(_mean_batch_rows(reference.configuration, trials)),
            )
    return table


def _sentences(chosen: Recommendation) -> list[str]:
    gains = [
        f"{ratio(gain)} over {name}"
        for name, gain in (
            ("no batching", chosen.gain_over_no_batching),
            ("the server's defaults", chosen.gain_over_defaults),
        )
        if gain is not None
    ]
    lines = [_HELPS[chosen.batching_helps]]
    if gains:
        lines.append(f"Gain: {', '.join(gains)}.")
    lines.append(f"Why: {chosen.reason}")
    lines.append(f"How sure: {chosen.trials} trials in {duration(chosen.seconds)}; {_basis(chosen)}.")
    lines += [f"Note: {note}" for note in chosen.notes]
    lines += [f"Instead: {_alternative(one)}" for one in chosen.alternatives[:3]]
    lines += [f"Caveat: {one.text} — {one.advice}" for one in chosen.caveats]
    return lines


def _basis(chosen: Recommendation) -> str:
    if chosen.confirmations == 0:
        return "the figures above are those of the search, not yet confirmed by fresh runs"
    runs = f"{chosen.confirmations} fresh run{'' if chosen.confirmations == 1 else 's'}"
    return f"the figures above rest on {runs}, made after the choice, and hold at 95 % for another fresh run"


def _alternative(other: Alternative) -> str:
    throughput, p95 = other.throughput_ratio - 1, other.p95_ratio - 1
    return (
        f"{other.configuration.label()}: {percent(abs(throughput))} {'more' if throughput > 0 else 'less'} throughput, "
        f"{percent(abs(p95))} {'higher' if p95 > 0 else 'lower'} p95"
    )


def _deployment(configuration: Configuration, parameters_file: Path) -> str:
    if configuration.batching is None:
        return "Deploy: start the server without --enable_batching"
    return f"Deploy: tensorflow_model_server --enable_batching --batching_parameters_file={parameters_file}"


def _point_cells(measured: Measurement) -> list[str]:
    server = measured.server
    return [
        str(measured.concurrency or number(measured.offered_rps)),
        interval(measured.throughput_rps),
        number(measured.throughput_rows_per_s.value),
        *(milliseconds(measured.latency_s.get(name)) for name in ("p50", "p90", "p95", "p99")),
        percent(measured.error_ratio),
        number(server.mean_batch_rows if server else None),
        number(_times_1000(measured.queue_mean_s)),
        number(_times_1000(measured.compute_mean_s)),
    ]


def _csv_row(point: Trial, quantiles: Sequence[str]) -> list[object]:
    measured = point.measurement
    if measured is None:
        return [point.concurrency, point.rate_rps, *[None] * (4 + 3 * len(quantiles) + 5), point.failure]
    latencies: list[object] = []
    for name in quantiles:
        one = measured.latency_s.get(name, Estimate(value=float("nan"), low=float("nan"), high=float("nan")))
        latencies += [one.value * 1e3, one.low * 1e3, one.high * 1e3]
    throughput = measured.throughput_rps
    return [
        measured.concurrency,
        measured.offered_rps,
        throughput.value,
        throughput.low,
        throughput.high,
        measured.throughput_rows_per_s.value,
        *latencies,
        measured.error_ratio,
        measured.server.mean_batch_rows if measured.server else None,
        _times_1000(measured.queue_mean_s),
        _times_1000(measured.compute_mean_s),
        measured.send_lag_p99_s * 1e3,
        point.failure,
    ]


def _mean_batch_rows(configuration: Configuration, trials: Sequence[Trial]) -> float | None:
    for trial in reversed(trials):
        if (
            trial.configuration == configuration
            and trial.measurement is not None
            and trial.measurement.server
        ):
            return trial.measurement.server.mean_batch_rows
    return None


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _times_1000(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
