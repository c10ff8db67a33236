"""What does the twin say of a configuration's objective?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.length_buckets import LENGTH_BUCKETS
from batchtune.batching.parameters import Configuration
from batchtune.errors import TwinError
from batchtune.measure.measurement import Measurement
from batchtune.measure.slo import limits_of, primary_limit
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled, pool, run_noise
from batchtune.tune.evidence.ranking import merit
from batchtune.tune.evidence.rates import locate, rungs_of
from batchtune.tune.guided.posterior import Cell, Measured
from batchtune.tune.trials.ledger import without_superseded
from batchtune.tune.trials.trial import NO_CANDIDATES, Trial
from batchtune.twin.calibration.calibrate import Observation, calibrate, observation_of
from batchtune.twin.model.traffic import Traffic, traffic_of
from batchtune.twin.model.twin import Twin
from batchtune.twin.simulator.replica import Batcher, batcher_of


def calibrated(trials: Sequence[Trial], scenario: Scenario, *, seed: int, test: bool = True) -> Twin | None:
    """The twin that fits these trials; None when none can be fitted."""
    observations: list[Observation] = [
        observation_of(trial.configuration, trial.measurement, scenario)
        for trial in without_superseded(trials)
        if trial.state == "complete"
        and trial.measurement is not None
        and _kept_up(trial.measurement, scenario)
    ]
    try:
        return calibrate(observations, seed=seed, draws=policy.READINGS, test=test)
    except TwinError:
        return None


def predicted_merits(
    twin: Twin,
    scenario: Scenario,
    cells: Sequence[Cell],
    *,
    before: NDArray[np.float64] | None = None,
    stale: Collection[int] = (),
) -> NDArray[np.float64]:
    """Merit of each cell by each reading, shape (cells, readings); -inf where no rate keeps the SLO.

    One reading looks at every cell, all readings at those near the best; the others follow these on the mean. Of those
    that are `stale`, hopeless by all that is known, what was predicted `before` stands.
    """
    rough = np.full(len(cells), -np.inf)
    for at, cell in enumerate(cells):
        if before is not None and at in stale:
            rough[at] = before[at, 0]
        else:
            rough[at] = _merits(twin, scenario, cell.configuration, readings=1)[0]
    order = np.argsort(-rough, kind="stable")[: policy.CLOSE_POINTS_MAX]
    close = [
        int(at)
        for at in order
        if rough[at] >= rough[order[0]] - policy.CLOSE_MERIT and np.isfinite(rough[at])
    ]
    if not close:
        return np.repeat(rough[:, np.newaxis], policy.READINGS, axis=1)
    by_all_readings = {
        at: _merits(twin, scenario, cells[at].configuration, readings=policy.READINGS) for at in close
    }
    shifts = np.mean([by_all_readings[at] - rough[at] for at in close], axis=0)
    merits: NDArray[np.float64] = rough[:, np.newaxis] + shifts
    for at in close:
        merits[at] = by_all_readings[at]
    return merits


def most_merits(twin: Twin, scenario: Scenario, cells: Sequence[Cell]) -> NDArray[np.float64]:
    """The merit that each cell has at most, of a capacity: the rate at which all its batches are full.

    Above that a run keeps a limit only until its queue has grown. Told by the sizes that were seen, where the twin is
    right; one that was not seen takes no less time than the next smaller one. inf where nothing tells.
    """
    traffic = traffic_of(scenario)
    most_rps: dict[Batcher, float] = {}
    batchers = [_unwaiting(batcher_of(cell.configuration, cpus=scenario.target.cpus)) for cell in cells]
    for batcher in batchers:
        if batcher not in most_rps:
            known = not batcher.length_buckets or knows_lengths(twin, traffic)
            most_rps[batcher] = _most_rps(twin, batcher, traffic) if known else math.inf
    return np.asarray(np.log([most_rps[batcher] for batcher in batchers]), dtype=np.float64)


def foresees(twin: Twin, scenario: Scenario, cells: Sequence[Cell]) -> bool:
    """Whether it can tell what the length buckets among these cells bring, if there are any."""
    bucketed = any(LENGTH_BUCKETS in dict(cell.configuration.flags) for cell in cells)
    return not bucketed or knows_lengths(twin, traffic_of(scenario))


def knows_lengths(twin: Twin, traffic: Traffic) -> bool:
    """Whether it can tell what length buckets bring under this traffic."""
    return bool(traffic.lengths) and twin.best_fit.length is not None


def _unwaiting(batcher: Batcher) -> Batcher:
    """The same without timeout and queue, which full batches do not need."""
    return replace(batcher, batch_timeout_s=0.0, max_enqueued_batches=None)


def _most_rps(twin: Twin, batcher: Batcher, traffic: Traffic) -> float:
    size = batcher.max_batch_size
    if size is None or batcher.allowed_batch_sizes or batcher.max_execution_batch_size:
        return math.inf
    sizes = [int(rows) for rows in twin.best_fit.service_time.rows if traffic.rows_most <= rows <= size]
    if not sizes:
        return math.inf
    rates_rps = [twin.saturation_rps(replace(batcher, max_batch_size=rows), traffic) for rows in sizes]
    return max(*rates_rps, rates_rps[-1] * size / sizes[-1])


def _kept_up(measured: Measurement, scenario: Scenario) -> bool:
    """Whether the server kept up: a run that was broken off in overload shows the break, not the server."""
    limit = primary_limit(scenario.slo)
    if measured.concurrency is not None or limit is None:
        return True
    return measured.latency_s[limit.name].value <= policy.MOST_OVER * limit.seconds


def measured_merits(
    trials: Sequence[Trial], scenario: Scenario, cells: Sequence[Cell], *, fresh: bool = False
) -> dict[int, Measured]:
    """What the ledger says of each cell that it holds; unless `fresh` without the fresh runs, which are not for
    choosing. Fresh ones are moved by what the machine drifted since, as the reference points show it."""
    searched = [trial for trial in without_superseded(trials) if fresh or trial.source != "confirm"]
    if scenario.objective == "capacity":
        return _located(searched, scenario, cells)
    pooled = pool(searched, scenario=scenario)
    noise = run_noise(pooled, scenario=scenario)
    drift = _drift(pooled, trials, scenario) if fresh else 0.0
    merits = {}
    places = {cell.configuration: at for at, cell in enumerate(cells)}
    for candidate in pooled:
        at = places.get(candidate.configuration)
        value = merit(candidate.search_value, scenario)
        runs = len(candidate.searched) or 1
        if fresh and candidate.confirmations and candidate.searched:
            later = merit(candidate.value, scenario) - drift
            value = (runs * value + candidate.confirmations * later) / (runs + candidate.confirmations)
            runs += candidate.confirmations
        if at is None or candidate.failures or not math.isfinite(value):
            continue
        breach = max(0.0, math.log1p(max(candidate.violation, -0.5)))
        sd = math.hypot(noise.sd / math.sqrt(runs), 0.5 * breach)
        merits[at] = Measured(merit=value - policy.BREACH_WEIGHT * breach, sd=sd)
    return merits


def _drift(pooled: Sequence[Pooled], trials: Sequence[Trial], scenario: Scenario) -> float:
    """How much faster (in logs) the reference points were when run again: nobody chose them for being lucky."""
    references = {trial.configuration for trial in trials if trial.source in ("no_batching", "defaults")}
    moves = [
        merit(candidate.value, scenario) - merit(candidate.search_value, scenario)
        for candidate in pooled
        if candidate.configuration in references and candidate.confirmations and candidate.searched
    ]
    finite = [move for move in moves if math.isfinite(move)]
    return sum(finite) / len(finite) if finite else 0.0


def _located(trials: Sequence[Trial], scenario: Scenario, cells: Sequence[Cell]) -> dict[int, Measured]:
    by_configuration: dict[Configuration, list[Trial]] = {}
    for trial in trials:
        if trial.state == "complete" and trial.source not in NO_CANDIDATES:
            by_configuration.setdefault(trial.configuration, []).append(trial)
    merits = {}
    for at, cell in enumerate(cells):
        located = locate(rungs_of(by_configuration.get(cell.configuration, ()), scenario.slo))
        if located is not None:
            merits[at] = Measured(
                merit=math.log(located.crossing_rps),
                sd=located.sd,
                says=located.says,
                bound=math.log(located.bound_rps),
            )
    return merits


def _merits(
    twin: Twin, scenario: Scenario, configuration: Configuration, *, readings: int
) -> NDArray[np.float64]:
    batcher, traffic = batcher_of(configuration, cpus=scenario.target.cpus), traffic_of(scenario)
    if scenario.objective == "capacity":
        promised = limits_of(scenario.slo)
        rates = twin.capacity(batcher, traffic.at(1.0), promised, scenario.slo.error_ratio, draws=readings)
        with np.errstate(divide="ignore"):
            return np.log(rates)
    limits = scenario.slo.limits()
    names = tuple(dict.fromkeys((*limits, "p95")))
    figures = twin.predict(batcher, traffic, quantiles=names, only_best=readings == 1)
    objective = (
        figures.throughput_rps if scenario.objective == "throughput" else 1.0 / figures.latency_s["p95"]
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        merits: NDArray[np.float64] = np.log(objective) - policy.BREACH_WEIGHT * _breach(
            figures.latency_s, limits
        )
    merits[(figures.error_ratio > scenario.slo.error_ratio) | np.isnan(merits)] = -np.inf
    return merits[:readings]


def _breach(
    latency_s: Mapping[str, NDArray[np.float64]], limits: Mapping[str, float]
) -> NDArray[np.float64] | float:
    """The worst excess over a limit, in logs; 0 where every limit is kept."""
    if not limits:
        return 0.0
    with np.errstate(divide="ignore"):
        worst = np.max([np.log(latency_s[name] / limit) for name, limit in limits.items()], axis=0)
    breach: NDArray[np.float64] = np.maximum(worst, 0.0)
    return breach
