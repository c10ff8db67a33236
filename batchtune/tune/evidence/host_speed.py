"""How far will the host's speed be, minutes from now, from what it was during the trials?

A fixed loop (canary) is timed at every trial. Its log time is taken as an Ornstein-Uhlenbeck process (a speed that
wanders and comes back) plus the reading's own noise. A drift that has come and gone within the sweep was seen whole;
of one that takes minutes the sweep saw a part, and more is allowed for. Which of the two it is, the readings tell only
in part, so every spread and memory of a grid counts by its likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.statistics.distributions import Z_95

SPREADS: Final = np.array([1e-4, *np.geomspace(0.004, 0.4, 16)])
"""Standard deviations of the log speed; the first is that of a host that stays."""

STAYS: Final = 0.3
"""How likely it is beforehand that the host stays; else any spread up to the largest is as likely as another."""

MEMORIES_S: Final = np.array([15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0])
"""Seconds after which a deviation is 1/e of what it was."""

OWN_NOISES: Final = np.array([0.005, 0.01, 0.02, 0.04, 0.08])
"""Standard deviations of a reading's own noise."""

SPIKE_SDS: Final = 3.0
SPIKE_SD_LEAST: Final = 0.02
LASTS: Final = 3
"""Readings in a row that are no spike: a neighbour on the core that computes for a moment slows one or two."""

_SD_PER_MEDIAN_DEVIATION: Final = 1.4826
_RUNS_S: Final = 40.0
"""The runs that a figure rests on were made over about so long before the last trial."""

AHEAD_S: Final = (10.0, 60.0, 150.0, 300.0)
"""When the fresh run is made, after the last trial."""


def ahead_sd(times_s: Sequence[float], log_times: Sequence[float]) -> float:
    """Standard deviation of a normal whose 95 % range is that of the log speed of a later run less that of the runs.

    `times_s`: of the readings, ascending; `log_times`: logarithms of what the loop took.
    """
    spreads, memories, noises = (
        axis.ravel() for axis in np.meshgrid(SPREADS, MEMORIES_S, OWN_NOISES, indexing="ij")
    )
    values = np.asarray(log_times)
    kept = _lasting(values)
    likelihoods = _log_likelihoods(np.asarray(times_s)[kept], values[kept], spreads, memories, noises)
    prior = spreads / SPREADS[1:].sum()  # the grid is even in the logarithm
    prior[spreads == SPREADS[0]] = STAYS / (1.0 - STAYS)
    weights = prior * np.exp(likelihoods - likelihoods.max())
    weights = weights.reshape(-1, len(OWN_NOISES)).sum(axis=1) / weights.sum()
    spreads, memories = spreads[:: len(OWN_NOISES)], memories[:: len(OWN_NOISES)]
    sds = np.concatenate([spreads * np.sqrt(_moved(memories, after_s)) for after_s in AHEAD_S])
    return _half_range(sds, np.tile(weights / len(AHEAD_S), len(AHEAD_S))) / Z_95


def _log_likelihoods(
    times_s: NDArray[np.float64],
    values: NDArray[np.float64],
    spreads: NDArray[np.float64],
    memories_s: NDArray[np.float64],
    noises: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Of the readings about a level that is not known, for each process, by a Kalman filter (de Jong's diffuse one)."""
    variance = spreads**2
    state, level = np.zeros_like(spreads), np.zeros_like(spreads)
    uncertainty = variance.copy()
    log_spreads, squares, crosses, levels = (np.zeros_like(spreads) for _ in range(4))
    before_s = times_s[0]
    for time_s, value in zip(times_s, values, strict=True):
        kept = np.exp(-(time_s - before_s) / memories_s)
        before_s = time_s
        state, level = kept * state, kept * level
        uncertainty = variance + kept**2 * (uncertainty - variance)
        spread = uncertainty + noises**2
        off, off_level = value - state, 1.0 - level
        log_spreads += np.log(spread)
        squares += off**2 / spread
        crosses += off * off_level / spread
        levels += off_level**2 / spread
        gain = uncertainty / spread
        state, level, uncertainty = state + gain * off, level + gain * off_level, uncertainty * (1.0 - gain)
    likelihoods: NDArray[np.float64] = -0.5 * (log_spreads + squares - crosses**2 / levels + np.log(levels))
    return likelihoods


def _lasting(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which readings are no spikes: not far from the median, or with at least two neighbours that are as far."""
    off = np.abs(values - np.median(values))
    far = off > SPIKE_SDS * max(float(np.median(off)) * _SD_PER_MEDIAN_DEVIATION, SPIKE_SD_LEAST)
    alone = np.zeros(len(values), dtype=bool)
    begin = 0
    for at in range(len(values) + 1):
        if at == len(values) or not far[at]:
            alone[begin:at] = at - begin < LASTS
            begin = at + 1
    return ~alone


def _moved(memories_s: NDArray[np.float64], after_s: float) -> NDArray[np.float64]:
    """Variance of the speed then less the mean speed of the runs, in variances of the process."""
    window = _RUNS_S / memories_s
    of_mean = 2.0 * (window - 1.0 + np.exp(-window)) / window**2
    with_mean = np.exp(-after_s / memories_s) * (1.0 - np.exp(-window)) / window
    return np.maximum(1.0 + of_mean - 2.0 * with_mean, 0.0)


def _half_range(sds: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Half the 95 % range of a mixture of normal distributions about 0, to 0.1 %."""
    low, high = 0.0, 5.0 * float(sds.max())
    while high - low > 1e-3 * high:
        half = 0.5 * (low + high)
        outside = float(weights @ np.array([math.erfc(bound) for bound in half / (math.sqrt(2.0) * sds)]))
        low, high = (half, high) if outside > 0.05 else (low, half)
    return high
