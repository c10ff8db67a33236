"""Calibrates a twin: finds the parameters of a simulated server that would have given these measurements.

Execution times come from the server's own histograms, corrected for several batch threads that slow each other down.
The time outside execution (front end, threads, network) is fitted by simulation, together with small corrections of
the execution times. A server without histograms is fitted to latencies and throughput alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import Configuration
from batchtune.errors import TwinError
from batchtune.measure.measurement import Measurement
from batchtune.scenario.spec.scenario import Scenario
from batchtune.twin.service_time import Fitted, fit_length_cost, rows_needed, timed
from batchtune.twin.simulator.simulate import Batcher, Summary, batcher_of
from batchtune.twin.traffic import Traffic, traffic_of
from batchtune.twin.twin import NEAR_SATURATION, FitError, Twin, enough_requests, play
from batchtune.twin.twin_parameters import (
    CONTENTION,
    SCALARS,
    THROUGHPUT_BETWEEN_SD,
    WAKE,
    FitRun,
    Law,
    fit_run_of,
    law_of,
    laws,
    merged,
    with_load,
)
from batchtune.units import percentage, rounded_duration

MOST_ERRORS_RATIO = 0.01
"""Largest share of failed requests in a measurement that a twin is calibrated by."""

Unusable = Literal["few answers", "errors", "overload", "client", "no load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measurement, with the scheduler and the traffic under which it was made."""

    batcher: Batcher
    measurement: Measurement
    traffic: Traffic


def observation_of(configuration: Configuration, measurement: Measurement, scenario: Scenario) -> Observation:
    """Make an observation of a trial's configuration and measurement; the traffic is the scenario's, with the rate or
    the clients that were measured."""
    clients = measurement.concurrency
    rate_rps = None if clients is not None else measurement.offered_rps
    return Observation(
        batcher=batcher_of(configuration, cpus=scenario.target.cpus),
        measurement=measurement,
        traffic=traffic_of(scenario, rate_rps=rate_rps, concurrency=clients),
    )


def usable(observation: Observation) -> bool:
    """Whether a measurement can be used to calibrate a twin (`unusable_for`)."""
    return unusable_for(observation) is None


def unusable_for(observation: Observation) -> Unusable | None:
    """Return why a measurement cannot be used to calibrate a twin; None: it can.

    A closed loop needs as many requests as clients and at least 3, an open loop 20; some must be answered.
    """
    measured = observation.measurement
    clients = measured.concurrency
    if measured.error_ratio > MOST_ERRORS_RATIO:
        return "errors"
    if any(noted.code == "growing_backlog" for noted in measured.caveats):
        return "overload"
    if any(noted.code in {"client_behind", "client_busy"} for noted in measured.caveats):
        return "client"
    if clients is None and measured.offered_rps is None:
        return "no load"
    fewest_requests_open = 20  # Of an open loop, whose few arrivals say as much of chance as of the server.
    fewest_requests = 3  # Of a lone client; of a closed loop each client must have been answered once.
    fewest = fewest_requests_open if clients is None else max(fewest_requests, clients)
    answered = measured.throughput_rps.value > 0.0 and math.isfinite(measured.latency_s["p50"].value)
    return None if measured.requests >= fewest and answered else "few answers"


def calibrate(observations: Sequence[Observation], *, seed: int = 1) -> Twin:
    """Fit a twin to the observations; with more than 40 usable ones, to the latest 40.

    The twin has the best reading and 30 others, whose spread is the uncertainty of the fit and that
    between runs. `seed`: of the draw of these readings.

    Raises:
        TwinError: no observation can be used; the hint says what to measure.
    """
    runs = _fit_runs(observations)
    fitted = laws_to_try(runs)
    error = left_out_error(runs, fitted[0])
    readings = 30  # The second lowest and the second highest are the ends of a 95 % interval.
    return Twin(
        best_fit=fitted[0].reading,
        fits=readings_around(fitted, error, count=readings, rng=np.random.default_rng(seed)),
        rows_max=max(max(run.rows_seen) for run in runs),
        threads_max=max(run.threads_seen for run in runs),
        error=error,
        observations=sum(usable(observation) for observation in observations),
        reports=any(run.timed or "batch_rows" in run.targets for run in runs),
    )


def _fit_runs(observations: Sequence[Observation]) -> list[FitRun]:
    # Of a longer ledger the latest count: the server that is to be predicted is the one of now.
    most_observations = 40
    used = [observation for observation in observations if usable(observation)][-most_observations:]
    if not used:
        raise _nothing_usable(observations)
    traffics = [observation.traffic for observation in used]
    servers = [observation.measurement.server for observation in used]
    length = fit_length_cost([server for server in servers if server is not None], traffics[-1])
    groups: dict[tuple[Batcher, Traffic], list[FitRun]] = {}
    for observation, traffic in zip(used, traffics, strict=True):
        groups.setdefault((observation.batcher, traffic), []).append(
            fit_run_of(observation.batcher, traffic, observation.measurement, length=length)
        )
    return with_load([merged(runs) for runs in groups.values()])


def _nothing_usable(observations: Sequence[Observation]) -> TwinError:
    words: Mapping[Unusable, str] = {
        "few answers": "ended before every client was answered once",
        "errors": f"had errors in more than {percentage(MOST_ERRORS_RATIO)} of the requests",
        "overload": "were above what the server completes",
        "client": "were limited by the load generator",
        "no load": "name neither clients nor a rate",
    }
    reasons = Counter(
        reason for observation in observations if (reason := unusable_for(observation)) is not None
    )
    counts = ", ".join(f"{count} {words[reason]}" for reason, count in reasons.most_common())
    return TwinError(
        f"no measurement of {len(observations)} can calibrate the simulator: {counts or 'there is none'}",
        hint=_what_would_help(observations, reasons),
    )


def _what_would_help(observations: Sequence[Observation], reasons: Counter[Unusable]) -> str:
    if not reasons:
        return "measure some configurations in closed loops"
    rounds = 4  # A run that is too short needs so many answers of each client.
    match reasons.most_common(1)[0][0]:
        case "few answers":
            means_s = [observation.measurement.latency_mean_s for observation in observations]
            slowest_s = max((seconds for seconds in means_s if math.isfinite(seconds)), default=math.nan)
            if math.isnan(slowest_s):
                return "no request was answered in time: give a longer load.duration and search.budget.time"
            return (
                f"requests took up to {rounded_duration(slowest_s)}: give a load.duration of "
                f"{rounded_duration(rounds * slowest_s)} or more, and a search.budget.time for a dozen of such runs"
            )
        case "errors":
            return "see why the requests failed; if they only took too long, raise request.timeout"
        case "overload":
            return "measure closed loops, or rates below what the server completes"
        case "client":
            return "give the load generator more CPUs or processes"
        case "no load":
            return "measure closed loops, or at a fixed rate"


# The error of the fit, from trials that were left out of it.


def left_out_error(runs: Sequence[FitRun], full: Solution) -> FitError:
    """Compute how well trials are predicted by a fit from which they were left out (cross-validation).

    `full`: the fit to all of `runs`. One configuration under one traffic is left out at a time, with its
    repeats; where there are more than ten, several at a time, in ten folds. Never left out are those with the
    smallest batches, the largest batches or the most threads of all: the fit to the rest would have to extrapolate,
    which the full fit does not. With fewer than four to leave out, all figures are NaN.
    """
    fewest = 4
    groups = [group for group in _groups(runs) if _is_within(group, runs)]
    if len(groups) < fewest:
        return FitError(p95_ratio=math.nan, throughput_ratio=math.nan, mape=math.nan, left_out=0)
    pairs_by_target: dict[str, list[tuple[float, float]]] = {"p95": [], "throughput": []}
    folds_max = 10
    folds = [groups[start::folds_max] for start in range(min(folds_max, len(groups)))]
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
    """Whether the other runs have batches about as small and as large, and about as many threads."""
    enough = 0.75  # Least ratio of sizes, and of threads.
    away = {id(run) for run in group}
    rest = [run for run in runs if id(run) not in away]
    if not rest:
        return False
    least, most, threads = _extent(group)
    least_left, most_left, threads_left = _extent(rest)
    within = enough * least_left <= least and enough * most <= most_left
    return within and threads_left >= enough * threads


def _is_overloaded(run: FitRun, reading: Fitted) -> bool:
    """Whether a run was so near to saturation, by this reading, that its latency depends on how long the queue grew."""
    return run.rate_rps > NEAR_SATURATION * reading.saturation_rps(run.batcher, run.traffic)


def _extent(runs: Sequence[FitRun]) -> tuple[float, int, int]:
    """(fewest rows of a batch in runs with one thread (inf: none), most rows of any batch, most threads).

    Small batches that ran beside others do not count: their time depends on the others.
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


# The fit, by least squares with a prior.
#
# Derivatives are differences between simulations with the same random numbers. Further readings that fit about as well
# are drawn from the covariance at the solution.

_QUANTILES: Final = {"p50": 0.5, "p95": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A fitted law: the vector `theta` of parameters that fits best, shape (parameters,), and its covariance.

    `misfit`: sum of the residuals' squares under the soft-L1 loss, priors included.
    `scale`: misfit over its expectation, at least 1; the covariance is multiplied by it.
    `slopes`: for each run the derivatives of its residuals, shape (targets, parameters).
    """

    law: Law
    theta: NDArray[np.float64]
    misfit: float
    scale: float
    covariance: NDArray[np.float64]
    slopes: tuple[NDArray[np.float64], ...]

    @property
    def reading(self) -> Fitted:
        """The reading of the parameters that fit best."""
        return self.law.reading(self.theta)


def laws_to_try(runs: Sequence[FitRun]) -> list[Solution]:
    """Fit each law that the measurements allow. Returns the solutions, the one with the least misfit first."""
    return sorted((solve(law, runs) for law in laws(runs)), key=lambda solution: solution.misfit)


def solve(law: Law, runs: Sequence[FitRun]) -> Solution:
    """Fit a law's parameters to the runs by least squares, starting from `law.start`."""
    slopes: list[NDArray[np.float64]] = []

    def slopes_at(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        slopes[:] = _slopes(law, theta, runs)
        return np.concatenate(slopes)

    fitted = _least_squares(law, runs, law.start, slopes_at, evaluations=9)
    misfit = 2.0 * float(fitted.cost)
    targets = len(fitted.fun) - len(law.start)
    scale = max(1.0, misfit / max(targets - len(law.start), 0.5 * targets))
    together = np.vstack([*slopes, np.diag(1.0 / law.sd)])
    return Solution(
        law=law,
        theta=_theta(law, fitted.x),
        misfit=misfit,
        scale=scale,
        covariance=np.linalg.inv(together.T @ together) * scale,
        slopes=tuple(slopes),
    )


def solve_again(
    law: Law, runs: Sequence[FitRun], near: Solution, slopes: Sequence[NDArray[np.float64]]
) -> Fitted:
    """Fit a law to some of the runs, starting from `near`, the solution for all of them. Returns the fitted
    reading.

    `slopes`: derivatives of the residuals of these runs at `near`, which are used unchanged: three
    evaluations are then enough.
    """
    together = np.concatenate(slopes)
    # Points at which the sum of squares is computed, at most: of a fit, and of one that starts at the solution
    # of all.
    fitted = _least_squares(law, runs, near.theta, lambda _: together, evaluations=3)
    return law.reading(_theta(law, fitted.x))


def _least_squares(
    law: Law,
    runs: Sequence[FitRun],
    start: NDArray[np.float64],
    slopes_at: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    evaluations: int,
) -> Any:
    """Minimise over (theta - law.start) / law.sd, in which the prior of each parameter is a standard normal one.

    `slopes_at`: the derivatives of the residuals at a theta. Returns scipy's result, whose `x` is that deviation.
    """
    from scipy.optimize import least_squares

    # A step that gains less than this share of the sum of squares is the last.
    # Standard deviations from which a residual's square grows more like its size (`loss="soft_l1"`).
    return least_squares(
        lambda moved: np.concatenate([_residuals(law, _theta(law, moved), runs), moved]),
        (start - law.start) / law.sd,
        jac=lambda moved: np.vstack([slopes_at(_theta(law, moved)) * law.sd, np.eye(len(moved))]),
        loss="soft_l1",
        f_scale=1.5,
        ftol=0.003,
        max_nfev=evaluations,
    )


def _theta(law: Law, moved: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(law.start + moved * law.sd)


def readings_around(
    solutions: Sequence[Solution], error: FitError, *, count: int, rng: np.random.Generator
) -> tuple[Fitted, ...]:
    """Draw `count` readings that fit about as well as the solutions.

    Each is drawn from the normal approximation of a law, chosen in proportion to the law's probability; then all of its
    batch times get a random factor, for the spread between runs. The standard deviation of that factor's log is the
    largest of THROUGHPUT_BETWEEN_SD and, of `error`, `throughput_ratio` and 0.7 · `p95_ratio`.
    """
    known = [ratio for ratio in (error.throughput_ratio, 0.7 * error.p95_ratio) if not np.isnan(ratio)]
    run_sd = max([THROUGHPUT_BETWEEN_SD, *known])
    up_to = np.cumsum(_likely(solutions))
    fits = []
    # Multiples of it fill the interval from 0 to 1 evenly, however many there are.
    golden = 0.6180339887498949
    for at in range(count):
        place = int(np.searchsorted(up_to, at * golden % 1.0, side="right"))
        solution = solutions[min(place, len(up_to) - 1)]
        root = np.linalg.cholesky(solution.covariance + 1e-12 * np.eye(len(solution.theta)))
        theta = solution.theta + root @ rng.standard_normal(len(solution.theta))
        moved = np.clip(theta[:CONTENTION] - solution.theta[:CONTENTION], -2.0, 2.0)
        theta[:CONTENTION] = moved + solution.theta[:CONTENTION]
        fits.append(solution.law.reading(theta).slower(float(np.exp(run_sd * rng.standard_normal()))))
    return tuple(fits)


def _likely(solutions: Sequence[Solution]) -> NDArray[np.float64]:
    """Probability of each law, shape (laws,), with equal priors; misfits are divided by the least scale, so that a poor
    fit of all laws makes their probabilities more equal."""
    off = np.array([solution.misfit for solution in solutions]) / min(
        solution.scale for solution in solutions
    )
    weights = np.exp(-0.5 * (off - off.min()))
    return np.asarray(weights / weights.sum())


def simulated(run: FitRun, readings: Sequence[Fitted]) -> dict[str, NDArray[np.float64]]:
    """Simulate a run under each reading.

    Returns name -> natural logs of "throughput" (requests/s), "p50" and "p95" (seconds) and "batch_rows"
    (rows), each of shape (readings,).
    """
    rows_max = rows_needed(run.batcher, run.traffic)
    played = play(
        timed(run.batcher, readings[0].wake_s, run.traffic),
        run.traffic,
        [reading.device(rows_max, rate_rps=run.rate_rps) for reading in readings],
        quantiles=tuple(_QUANTILES.values()),
        requests=_requests(run),
    )
    return _logs(played)


def _logs(played: Summary) -> dict[str, NDArray[np.float64]]:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = {name: np.log(played.latency_s[:, at]) for at, name in enumerate(_QUANTILES)}
        logs["throughput"] = np.log(played.throughput_rps)
        logs["batch_rows"] = np.log(played.mean_batch_rows)
    return {name: np.nan_to_num(values, nan=5.0, posinf=5.0, neginf=-20.0) for name, values in logs.items()}


def _requests(run: FitRun) -> int:
    fit_requests = (2_000, 8_000)  # Fewest and most requests of a simulation within the fit.
    fewest, most = fit_requests
    return int(min(max(enough_requests(run.batcher, run.traffic) // 2, fewest), most))


def _residuals(law: Law, theta: NDArray[np.float64], runs: Sequence[FitRun]) -> NDArray[np.float64]:
    reading = law.reading(theta)
    return np.concatenate([_of_run(run, simulated(run, [reading]))[0] for run in runs])


def _slopes(law: Law, theta: NDArray[np.float64], runs: Sequence[FitRun]) -> list[NDArray[np.float64]]:
    """Derivatives of each run's residuals by the parameters, from differences; each of shape (targets, parameters)."""
    factor_step = 0.04
    step = 0.12
    sizes = np.where(np.arange(len(theta)) < SCALARS, step, factor_step)
    readings = [law.reading(theta)]
    for at in range(len(theta)):
        moved = theta.copy()
        moved[at] += sizes[at]
        readings.append(law.reading(moved))
    slopes = []
    for run in runs:
        together = [reading for at, reading in enumerate(readings) if at != WAKE + 1]
        rows = _of_run(run, simulated(run, together))
        woken = _of_run(run, simulated(run, [readings[WAKE + 1]]))
        rows = np.insert(rows, WAKE + 1, woken[0], axis=0)
        slopes.append(((rows[1:] - rows[0]) / sizes[:, None]).T)
    return slopes


def _of_run(run: FitRun, shown: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Residuals of a run over their standard deviations, cut at ±40, shape (readings, targets); `shown`: the result of
    `simulated`."""
    columns = [(shown[name] - target) / run.sds[name] for name, target in run.targets.items()]
    return np.clip(np.stack(columns, axis=1), -40.0, 40.0)
