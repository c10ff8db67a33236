"""What does one variant of a comparison show over its blocks, and what limits it?"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from batchtune.batching.parameters import Configuration
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.measurement import Measurement, padding_per_element
from batchtune.measure.statistics.paired import typical
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.measure.validity.caveats import HOST_CODES, Caveat
from batchtune.tune.compare.blocks import Variant, is_noisy
from batchtune.tune.evidence.best_point import rows_per_request, usual_bottleneck
from batchtune.tune.trials.trial import Trial, parts_of

QUANTILES = ("p50", "p95", "p99")

Metric = Literal["throughput", "rows", "p95", "capacity"]
"""What is compared: requests/s, rows/s (where rows per request differ), p95 in seconds, capacity in requests/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFigures:
    """One variant over its blocks: each figure is typical of a run, its interval from the spread between blocks.

    `requests` is the fixed number that `wall_s` is the time of; None: the runs were bounded by time. `noisy` counts
    the runs among `runs` that the host disturbed after all repeats. `failure` is why it was left out; None: it was not.
    `padding_per_element`: what filled up shorter inputs, for each element sent; None: all have one length.
    `device_busy_ratio`: the share of the time in which the device part of the model ran; None: not told.
    """

    name: str
    protocol: str
    rows_per_request: float | None
    configuration: Configuration
    runs: int
    noisy: int
    requests: int | None
    wall_s: Estimate | None
    throughput_rps: Estimate | None
    throughput_rows_per_s: Estimate | None
    latency_s: dict[str, Estimate]
    mean_batch_rows: float | None
    error_ratio: float
    bottleneck: Bottleneck | None
    caveats: tuple[Caveat, ...]
    failure: str | None
    padding_per_element: float | None = None
    device_busy_ratio: float | None = None

    @property
    def client_limited(self) -> bool:
        """Whether its figures are the load generator's."""
        return self.bottleneck is not None and self.bottleneck.kind == "client"

    @property
    def disturbed(self) -> bool:
        """Whether the host disturbed every run that counts."""
        return 0 < self.runs == self.noisy


def figures_of(variant: Variant, trials: Sequence[Trial]) -> VariantFigures:
    """Sum up what the trials say of one variant, failed ones included."""
    runs = runs_of(trials, variant.name)
    counted = list(runs.values())
    measured = [trial.measurement for trial in counted if trial.measurement is not None]
    rows = [count for count in map(rows_per_request, measured) if count is not None]
    batches = [run.server.mean_batch_rows for run in measured if run.server is not None]
    servers = [run.server for run in measured if run.server is not None]
    busy = [server.device_busy_ratio for server in servers]
    known_busy = [ratio for ratio in busy if ratio is not None]
    known_batches = [mean_rows for mean_rows in batches if mean_rows is not None]
    requests = variant.scenario.load.requests
    complete = requests is not None and all(run.requests == requests for run in measured)
    last = next((trial for trial in reversed(parts_of(trials)) if trial.reason == variant.name), None)
    latencies = {name: _typical_latency(map(latency_of(name), counted)) for name in QUANTILES}
    return VariantFigures(
        name=variant.name,
        protocol=variant.scenario.request.protocol,
        rows_per_request=sum(rows) / len(rows) if rows else None,
        configuration=variant.configuration,
        runs=len(counted),
        noisy=sum(is_noisy(trial) for trial in counted),
        requests=requests if complete else None,
        wall_s=typical(run.window_s for run in measured) if complete else None,
        throughput_rps=typical(map(figure_of("throughput"), counted)),
        throughput_rows_per_s=typical(map(figure_of("rows"), counted)),
        latency_s={name: latency for name, latency in latencies.items() if latency is not None},
        mean_batch_rows=sum(known_batches) / len(known_batches) if known_batches else None,
        error_ratio=sum(run.error_ratio for run in measured) / len(measured) if measured else 0.0,
        bottleneck=usual_bottleneck(variant.configuration, measured, scenario=variant.scenario),
        caveats=_caveats(measured),
        failure=None if last is None else last.failure,
        padding_per_element=padding_per_element(run.server for run in measured),
        device_busy_ratio=sum(known_busy) / len(known_busy) if known_busy else None,
    )


def runs_of(trials: Sequence[Trial], name: str) -> dict[int, Trial]:
    """The trial that counts in each block: the variant's last complete attempt."""
    return {
        trial.block: trial
        for trial in parts_of(trials)
        if trial.reason == name
        and trial.block is not None
        and trial.state == "complete"
        and trial.measurement is not None
    }


def noise_repeats(trials: Sequence[Trial]) -> int:
    """Count the attempts made because the host had disturbed the one before."""
    return sum(
        (before.reason, before.block) == (after.reason, after.block)
        and before.state == "complete"
        and is_noisy(before)
        for before, after in pairwise(sorted(parts_of(trials), key=lambda trial: trial.reason))
    )


def figure_of(metric: Metric) -> Callable[[Trial], float]:
    """The figure of a run that a metric compares; NaN without one."""

    def value(trial: Trial) -> float:
        measured = trial.measurement
        if measured is None:
            return math.nan
        match metric:
            case "throughput":
                return measured.throughput_rps.value
            case "rows":
                return measured.throughput_rows_per_s.value
            case "p95":
                return measured.latency_s["p95"].value
            case "capacity":
                return math.nan if trial.objective is None else trial.objective.value

    return value


def latency_of(quantile: str) -> Callable[[Trial], float]:
    """One latency quantile of a run, in seconds."""

    def value(trial: Trial) -> float:
        return math.nan if trial.measurement is None else trial.measurement.latency_s[quantile].value

    return value


def _typical_latency(values: Iterable[float]) -> Estimate | None:
    """As `typical`; with infinite ones among them, of runs with too many errors, the plain median."""
    known = [seconds for seconds in values if not math.isnan(seconds)]
    if all(map(math.isfinite, known)):
        return typical(known)
    return Estimate(value=statistics.median(known), low=math.nan, high=math.nan)


def _caveats(measured: Sequence[Measurement]) -> tuple[Caveat, ...]:
    """One of each kind, as the last run has it, where most runs have it; noise of the host is counted apart."""
    counts = Counter(code for run in measured for code in {caveat.code for caveat in run.caveats})
    latest = {caveat.code: caveat for run in measured for caveat in run.caveats}
    return tuple(
        caveat
        for code, caveat in latest.items()
        if 2 * counts[code] > len(measured) and code not in HOST_CODES
    )
