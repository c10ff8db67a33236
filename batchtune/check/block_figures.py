"""Which figures does a run give to the gates?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from batchtune.check.finding import BlockFigures
from batchtune.check.gate import figure_name
from batchtune.measure.measurement import Measurement
from batchtune.scenario.spec.check import METRICS, Metric
from batchtune.tune.compare.blocks import Variant, paired_arms
from batchtune.tune.compare.variant import runs_of
from batchtune.tune.evidence.bottleneck_of import rows_per_request
from batchtune.tune.trials.trial import Trial

UNTOLD: Final = (math.nan, math.nan)
"""Of a figure that was to be measured and told nothing."""


def paired_figures(
    trials: Sequence[Trial],
    *,
    baseline: str,
    candidate: str,
    cpu: Mapping[int, tuple[float, float]] = MappingProxyType({}),
) -> list[BlockFigures]:
    """The figures of each block that both sides ended, by their last complete attempts, in the order of the blocks.

    `cpu`: CPU seconds a request by block, where they were to be measured apart; nan where that told nothing. Only these
    count where at least half of them are told, else those of the runs: both are never mixed.
    """
    before, after = runs_of(trials, baseline), runs_of(trials, candidate)
    both = sorted(before.keys() & after.keys())
    asked = [cpu[block] for block in both if block in cpu]
    is_apart = bool(asked) and 2 * sum(not math.isnan(pair[0]) for pair in asked) >= len(asked)
    blocks: list[BlockFigures] = []
    for block in both:
        figures = _side_by_side(before[block], after[block])
        blocks.append({**figures, "cpu": cpu.get(block, UNTOLD)} if is_apart else figures)
    return blocks


def variant_figures(
    trials: Sequence[Trial],
    before: Variant,
    after: Variant,
    *,
    cpu: Mapping[int, tuple[float, float]] = MappingProxyType({}),
) -> list[BlockFigures]:
    """The same of two variants; of several models the figures of all of them, of each block that all ended."""
    if not before.scenario.target.models:
        return paired_figures(trials, baseline=before.name, candidate=after.name, cpu=cpu)
    arms = [
        (arm.model, runs_of(trials, left.name), runs_of(trials, arm.name))
        for left, arm in paired_arms(before, after)
    ]
    whole = set.intersection(*({*left} & {*right} for _, left, right in arms))
    blocks: list[BlockFigures] = []
    for block in sorted(whole):
        figures: dict[str, tuple[float, float]] = {}
        for model, left, right in arms:
            figures |= _side_by_side(left[block], right[block], model=model)
        blocks.append(figures)
    return blocks


def _side_by_side(before: Trial, after: Trial, *, model: str = "") -> dict[str, tuple[float, float]]:
    left, right = run_figures(before), run_figures(after)
    return {figure_name(model, metric): (left[metric], right[metric]) for metric in METRICS}


def run_figures(trial: Trial) -> Mapping[Metric, float]:
    """Every figure of one run; nan where it was not measured. The capacity of a run that held no rate is 0."""
    measured = trial.measurement
    if measured is None:
        return dict.fromkeys(METRICS, math.nan)
    held_none = 0.0 if trial.state == "complete" else math.nan
    return {
        "throughput": measured.throughput_rps.value,
        "capacity": held_none if trial.objective is None else trial.objective.value,
        "p50": measured.latency_s["p50"].value,
        "p95": measured.latency_s["p95"].value,
        "p99": measured.latency_s["p99"].value,
        "errors": measured.error_ratio,
        "cpu": _per_request(measured, None if measured.server is None else measured.server.server_cpu_s),
        "gpu": _per_request(measured, _gpu_s(measured)),
        "memory": _told(None if measured.server is None else measured.server.memory_peak_bytes),
        "gpu_memory": _told(None if measured.server is None else measured.server.gpu_memory_used_bytes),
        "startup": _told(trial.startup_s),
    }


def _gpu_s(measured: Measurement) -> float | None:
    server = measured.server
    if server is None or server.gpu_busy_ratio is None:
        return None
    return server.gpu_busy_ratio * server.duration_s


def _told(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _per_request(measured: Measurement, seconds: float | None) -> float:
    """Seconds of the server's account over the requests of the same account, those of the warm-up included."""
    server = measured.server
    if server is None or not seconds:
        return math.nan
    requests = float(sum(server.requests_by_status.values()))
    rows = rows_per_request(measured)
    if not requests and rows:
        requests = server.rows / rows
    return seconds / requests if requests else math.nan
