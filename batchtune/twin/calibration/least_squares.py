"""Fits the parameters of the simulated server to the measurements, by least squares with a prior.

Derivatives are differences between simulations with the same random numbers. Further readings that fit about as well
are drawn from the covariance at the solution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchtune.twin.calibration.twin_parameters import (
    CONTENTION,
    SCALARS,
    THROUGHPUT_BETWEEN_SD,
    WAKE,
    FitRun,
    Law,
    laws,
)
from batchtune.twin.model.fitted import Fitted, rows_needed, timed
from batchtune.twin.model.twin import FitError, enough_requests, play
from batchtune.twin.simulator.replica import Summary

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
    batch times get a random factor, for the spread between runs. The standard deviation of that factor's log is
    THROUGHPUT_BETWEEN_SD, or the error on trials left out if that is larger.
    """
    known = [ratio for ratio in (error.throughput_ratio, 0.7 * error.p95_ratio) if not np.isnan(ratio)]
    run_sd = max([THROUGHPUT_BETWEEN_SD, *known])
    up_to = np.cumsum(_likely(solutions))
    fits = []
    # Multiples of it fill the interval from 0 to 1 evenly, however many there are.
    golden = 0.6180339887498949
    for at in range(count):
        solution = solutions[
            min(int(np.searchsorted(up_to, at * golden % 1.0, side="right")), len(up_to) - 1)
        ]
        root = np.linalg.cholesky(solution.covariance + 1e-12 * np.eye(len(solution.theta)))
        theta = solution.theta + root @ rng.standard_normal(len(solution.theta))
        theta[:CONTENTION] = (
            np.clip(theta[:CONTENTION] - solution.theta[:CONTENTION], -2.0, 2.0)
            + (solution.theta[:CONTENTION])
        )
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
