"""What does the twin expect of a configuration, within the seconds that a page may take?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchtuneError
from batchtune.measure.slo import limits_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.twin.model.traffic import Traffic, traffic_of
from batchtune.twin.model.twin import Prediction, Twin
from batchtune.twin.simulator.replica import batcher_of

Answer = TypeVar("Answer")

BUDGET_S = 3.0
"""Of all predictions of one page, of the 10 s that one of 2,000 trials may take."""

SHARES = {"heat": 0.45, "slices": 0.65, "trials": 0.85, "rates": 1.0}
"""Up to which part of the budget each figure may go on, so that each gets its turn."""


@dataclass(slots=True, kw_only=True)
class Forecast:
    """The twin under the scenario's own load; `left_out` counts what there was no time for."""

    twin: Twin
    scenario: Scenario
    budget_s: float = BUDGET_S
    now_s: Callable[[], float] = time.monotonic
    left_out: int = 0
    _ends_s: float | None = field(default=None)

    def objective(self, configuration: Configuration, *, turn: str) -> float | None:
        """Requests/s, or p95 in seconds for the objective latency; None where the twin or the time does not reach."""
        traffic = traffic_of(self.scenario)
        if self.scenario.objective == "capacity":
            return self._capacity_rps(configuration, traffic, turn=turn)
        prediction = self.under(configuration, traffic, turn=turn)
        if prediction is None:
            return None
        latency = self.scenario.objective == "latency"
        return prediction.latency("p95").value if latency else prediction.throughput.value

    def under(
        self, configuration: Configuration, traffic: Traffic, *, turn: str, only_best: bool = True
    ) -> Prediction | None:
        """The twin's best reading (or all) under this load."""
        batcher = batcher_of(configuration, cpus=self.scenario.target.cpus)
        return self._timed(
            turn, lambda: self.twin.predict(batcher, traffic, quantiles=("p50", "p95"), only_best=only_best)
        )

    def _capacity_rps(self, configuration: Configuration, traffic: Traffic, *, turn: str) -> float | None:
        limits, errors = limits_of(self.scenario.slo), self.scenario.slo.error_ratio
        batcher = batcher_of(configuration, cpus=self.scenario.target.cpus)
        rates = self._timed(
            turn, lambda: self.twin.capacity(batcher, traffic.at(1.0), limits, errors, draws=1)
        )
        return None if rates is None else float(np.median(rates))

    def _timed(self, turn: str, ask: Callable[[], Answer]) -> Answer | None:
        if self._ends_s is None:
            self._try(ask)  # the first question may compile the simulator: that is no part of the budget
            self._ends_s = self.now_s() + self.budget_s
        if self.now_s() > self._ends_s - (1.0 - SHARES[turn]) * self.budget_s:
            self.left_out += 1
            return None
        return self._try(ask)

    def _try(self, ask: Callable[[], Answer]) -> Answer | None:
        try:
            return ask()
        except (BatchtuneError, ArithmeticError, ValueError, IndexError):
            return None
