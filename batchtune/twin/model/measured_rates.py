"""Holds the twin to the rates that a configuration held and missed when it was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.slo import Limit
from batchtune.twin.model.saturation import PRECISION, highest_rates
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.model.twin import Twin
from batchtune.twin.simulator.replica import Batcher


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """The highest rate that one server held within the limits and the lowest that it missed, in requests/s.

    `held_rps` 0: none. `missed_rps` None: none.
    """

    held_rps: float
    missed_rps: float | None

    @property
    def most_rps(self) -> float:
        return math.inf if self.missed_rps is None else self.missed_rps

    def hold(self, rate_rps: float) -> bool:
        """Whether a rate lies between the two, as nearly as the twin knows one."""
        return self.held_rps * (1.0 - PRECISION) <= rate_rps <= self.most_rps * (1.0 + PRECISION)

    def clipped(self, rates_rps: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.clip(rates_rps, self.held_rps, self.most_rps)


def held_to(
    twin: Twin,
    batcher: Batcher,
    traffic: Traffic,
    limits: Sequence[Limit],
    error_ratio: float,
    measured: MeasuredRates,
) -> tuple[Twin, float]:
    """The twin held to what was measured of one server, and the highest rate that it names itself by its best reading.

    A twin whose word lies outside is made as much slower or faster as a whole as brings it to the nearer end.
    """

    def highest(factor: float) -> float:
        reading = twin.slower(factor).best_fit
        return float(highest_rates(batcher, traffic, [reading], limits=limits, error_ratio=error_ratio)[0])

    twin_rps = highest(1.0)
    if measured.hold(twin_rps):
        return twin, twin_rps
    wanted_rps = float(measured.clipped(np.array([twin_rps]))[0])

    most_factor = 30.0  # A twin is made at most so many times slower or faster.

    def off(log_factor: float) -> float:
        rate_rps = highest(math.exp(log_factor))
        return math.log(rate_rps / wanted_rps) if rate_rps > 0.0 else -math.log(most_factor)

    ends = (0.0, math.log(most_factor)) if twin_rps > wanted_rps else (-math.log(most_factor), 0.0)
    if off(ends[0]) < 0.0 or off(ends[1]) > 0.0:
        return twin, twin_rps  # what limits the twin is not its batches
    from scipy.optimize import brentq

    factor = math.exp(brentq(off, *ends, xtol=PRECISION))
    return twin.slower(factor), twin_rps
