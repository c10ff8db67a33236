"""Tries the fit on trials that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from batchtune.twin.calibration.least_squares import Solution, simulated, solve_again
from batchtune.twin.calibration.parameters import law_of
from batchtune.twin.calibration.targets import FitRun
from batchtune.twin.model.reading import Fitted
from batchtune.twin.model.twin import NEAR_SATURATION, FitError

FOLDS_MAX: Final = 10
FEWEST: Final = 4
ENOUGH: Final = 0.75


def left_out_error(runs: Sequence[FitRun], full: Solution) -> FitError:
    """Leave one trial out at a time (of many: a tenth of them), fit the rest, predict it.

    Runs of one configuration under one traffic are left out together: a repeat is no test. Neither is one that alone
    shows the smallest or the largest batches or the most threads: without it the rest would have to extrapolate, which
    the fit to all does not.
    """
    groups = [group for group in _groups(runs) if _is_within(group, runs)]
    if len(groups) < FEWEST:
        return FitError(p95_ratio=math.nan, throughput_ratio=math.nan, mape=math.nan, left_out=0)
    pairs_by_target: dict[str, list[tuple[float, float]]] = {"p95": [], "throughput": []}
    folds = [groups[start::FOLDS_MAX] for start in range(min(FOLDS_MAX, len(groups)))]
    for fold in folds:
        away = {id(run) for group in fold for run in group}
        kept = [(run, slopes) for run, slopes in zip(runs, full.slopes, strict=True) if id(run) not in away]
        rest = [run for run, _ in kept]
        law = law_of(rest, serial=full.law.serial, anchors=full.law.anchors)
        reading = solve_again(law, rest, full, [slopes for _, slopes in kept])
        for run in (run for group in fold for run in group):
            shown = simulated(run, [reading])
            for name in pairs_by_target.keys() & run.targets.keys():
                if name == "p95" and _is_overloaded(run, reading):
                    continue
                pairs_by_target[name].append((float(shown[name][0]), run.targets[name]))
    return _error(pairs_by_target, left_out=sum(map(len, groups)))


def _is_within(group: Sequence[FitRun], runs: Sequence[FitRun]) -> bool:
    """Whether the others saw batches as small and as large and as many threads, as nearly as ENOUGH."""
    away = {id(run) for run in group}
    rest = [run for run in runs if id(run) not in away]
    if not rest:
        return False
    least, most, threads = _extent(group)
    least_left, most_left, threads_left = _extent(rest)
    within = ENOUGH * least_left <= least and ENOUGH * most <= most_left
    return within and threads_left >= ENOUGH * threads


def _is_overloaded(run: FitRun, reading: Fitted) -> bool:
    """Whether so near to saturation, by this reading, that a latency is the growth of the queue and no test."""
    return run.rate_rps > NEAR_SATURATION * reading.saturation_rps(run.batcher, run.traffic)


def _extent(runs: Sequence[FitRun]) -> tuple[float, int, int]:
    """The fewest rows of a batch that ran by itself (inf: none did), the most rows of any, and the most threads.

    Beside another batch a small one takes the other's time, and says nothing of its own.
    """
    alone = [size for run in runs if run.threads_seen == 1 for size in run.rows_seen]
    most = max(max(run.rows_seen) for run in runs)
    return min(alone, default=math.inf), most, max(run.threads_seen for run in runs)


def _groups(runs: Sequence[FitRun]) -> list[list[FitRun]]:
    groups: dict[tuple[object, ...], list[FitRun]] = {}
    for run in runs:
        rate = None if run.traffic.rate_rps is None else round(math.log(run.traffic.rate_rps) * 20)
        groups.setdefault((run.batcher, run.traffic.clients, rate), []).append(run)
    return list(groups.values())


def _error(pairs_by_target: dict[str, list[tuple[float, float]]], *, left_out: int) -> FitError:
    errors = {name: [abs(ours - theirs) for ours, theirs in pairs] for name, pairs in pairs_by_target.items()}
    every = [math.expm1(min(error, 5.0)) for values in errors.values() for error in values]
    return FitError(
        p95_ratio=float(np.median(errors["p95"])) if errors["p95"] else math.nan,
        throughput_ratio=float(np.median(errors["throughput"])) if errors["throughput"] else math.nan,
        mape=float(np.mean(every)) if every else math.nan,
        left_out=left_out,
    )
