"""How good was a sweep's answer, by the exact truths of its device?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from batchtune.tune.trials.trial import Trial
from tests.benchmarks.noisy import truth
from tests.benchmarks.noisy.devices import SimulatedDevice
from tests.benchmarks.noisy.product import Swept

WRONG_SHARE = 0.9
WRONG_BRACKET = 0.05
"""An established answer is wrong below this share of the best, or where the truth lies so far outside its bracket."""

FAR_TOO_HIGH = 99.0
ANSWERED_RATIO = 0.97
"""Of the rate, that a run which held it answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Which sweep: whose search ("product", or the name of a file that kept it), where, in how long."""

    search: str
    host: str
    device: str
    budget_s: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A sweep and what its answer is worth; ratios are over true capacities.

    error: why there was no answer; all that follows is then 0 or None.
    share: what the chosen configuration holds in truth, over the best of the grid.
    of_defaults, of_no_batching: the same over what these hold.
    of_held: over the highest rate that its own runs held, as far as that configuration truly holds it.
    of_any_held: over the best configuration of which a run held, at whatever rate.
    stated, low, high: what is stated over what the chosen configuration truly holds; None: no answer, or no end.
    seconds, thinking_s: of the sweep's clock; real_s: what the bench took for it.
    """

    sweep: Sweep
    error: str | None = None
    chosen: str = ""
    share: float = 0.0
    of_defaults: float = 0.0
    of_no_batching: float = 0.0
    of_held: float = 0.0
    of_any_held: float = 0.0
    stated: float | None = None
    low: float | None = None
    high: float | None = None
    established: bool = False
    runs: int = 0
    seconds: float = 0.0
    thinking_s: float = 0.0
    real_s: float = 0.0

    @property
    def bracket_holds(self) -> bool:
        return self.error is None and not self.too_high and not self.too_low

    @property
    def too_high(self) -> bool:
        """The truth lies below the bracket."""
        return self.low is not None and self.low > 1.0

    @property
    def too_low(self) -> bool:
        """The truth lies above it."""
        return self.high is not None and self.high < 1.0

    @property
    def wrongly_established(self) -> bool:
        outside = (self.low or 0.0) > 1.0 + WRONG_BRACKET or (self.high or math.inf) < 1.0 - WRONG_BRACKET
        return self.established and (self.share < WRONG_SHARE or outside)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Judged:
        """From what `asdict` made."""
        return cls(**{**values, "sweep": Sweep(**values["sweep"])})


def judged(sweep: Sweep, device: SimulatedDevice, swept: Swept, *, real_s: float) -> Judged:
    """The answer beside the truth."""
    recommended, capacity = swept.recommended, swept.recommended.capacity
    assert capacity is not None
    holds_rps = truth.capacity_rps(device, recommended.configuration)
    _, best_rps = truth.best(device.name)
    held = [trial for trial in swept.trials if _held_rps(trial)]
    truths_rps = {trial.configuration: truth.capacity_rps(device, trial.configuration) for trial in held}
    held_rps = max((min(_held_rps(trial), truths_rps[trial.configuration]) for trial in held), default=0.0)
    return Judged(
        sweep=sweep,
        chosen=recommended.configuration.label(),
        share=_over(holds_rps, best_rps),
        of_defaults=_over(holds_rps, truth.capacity_rps(device, truth.DEFAULTS)),
        of_no_batching=_over(holds_rps, truth.capacity_rps(device, truth.NO_BATCHING)),
        of_held=_over(holds_rps, held_rps),
        of_any_held=_over(holds_rps, max(truths_rps.values(), default=0.0)),
        stated=_stated_over(capacity.held_rps, holds_rps),
        low=_stated_over(capacity.held_rps, holds_rps),
        high=None if capacity.missed_rps is None else _stated_over(capacity.missed_rps, holds_rps),
        established=recommended.established,
        runs=len(swept.trials),
        seconds=swept.clock(),
        thinking_s=swept.clock.thinking_s,
        real_s=real_s,
    )


def _held_rps(trial: Trial) -> float:
    """The rate that a load held within the limits or, of a closed loop, answered; 0.0: none."""
    measured, rate_rps = trial.measurement, trial.request.rate_rps or 0.0
    if measured is None or not trial.feasible:
        return 0.0
    answered_rps = measured.throughput_rps.value
    return (rate_rps or answered_rps) if answered_rps >= ANSWERED_RATIO * rate_rps else 0.0


def _over(value: float, other: float) -> float:
    """Nothing is as good as nothing."""
    return value / other if other > 0.0 else 1.0


def _stated_over(value: float, holds_rps: float) -> float:
    """Anything over nothing is `FAR_TOO_HIGH`."""
    return value / holds_rps if holds_rps > 0.0 else FAR_TOO_HIGH * (value > 0.0)
