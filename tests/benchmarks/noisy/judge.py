"""How good was a sweep's answer, by the exact truths of its device?"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from batchtune.batching.parameters import Configuration
from tests.benchmarks.noisy import truth
from tests.benchmarks.noisy.devices import SimulatedDevice

WRONG_SHARE = 0.9
WRONG_BRACKET = 0.05
"""An established answer is wrong below this share of the best, or where the truth lies so far outside its bracket."""

FAR_TOO_HIGH = 99.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A configuration under load: the rate that it was offered or, of a closed loop, that it answered.

    `held`: within the scenario's limits.
    """

    configuration: Configuration
    rate_rps: float
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A sweep's answer and what it took.

    `low_rps`, `high_rps`: the bracket or interval stated with the capacity. `seconds`: of the clock, thinking included.
    """

    configuration: Configuration
    stated_rps: float
    low_rps: float
    high_rps: float
    established: bool
    runs: int
    seconds: float
    thinking_s: float
    trials: tuple[Tried, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Which sweep: whose search, where, in how long."""

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

    def to_dict(self) -> dict[str, Any]:
        """Plain types, safe for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Judged:
        """The inverse of `to_dict`."""
        return cls(**{**values, "sweep": Sweep(**values["sweep"])})


def judged(sweep: Sweep, device: SimulatedDevice, answered: Answered, *, real_s: float) -> Judged:
    """The answer beside the truth."""
    holds_rps = truth.capacity_rps(device, answered.configuration)
    _, best_rps = truth.best(device.name)
    held = [tried for tried in answered.trials if tried.held]
    truths_rps = {one: truth.capacity_rps(device, one) for one in {tried.configuration for tried in held}}
    held_rps = max((min(tried.rate_rps, truths_rps[tried.configuration]) for tried in held), default=0.0)
    return Judged(
        sweep=sweep,
        chosen=answered.configuration.label(),
        share=_over(holds_rps, best_rps),
        of_defaults=_over(holds_rps, truth.capacity_rps(device, truth.DEFAULTS)),
        of_no_batching=_over(holds_rps, truth.capacity_rps(device, truth.NO_BATCHING)),
        of_held=_over(holds_rps, held_rps),
        of_any_held=_over(holds_rps, max(truths_rps.values(), default=0.0)),
        stated=_finite_over(answered.stated_rps, holds_rps),
        low=_finite_over(answered.low_rps, holds_rps),
        high=_finite_over(answered.high_rps, holds_rps),
        established=answered.established,
        runs=answered.runs,
        seconds=answered.seconds,
        thinking_s=answered.thinking_s,
        real_s=real_s,
    )


def _over(value: float, other: float) -> float:
    """Nothing is as good as nothing."""
    return value / other if other > 0.0 else 1.0


def _finite_over(value: float, holds_rps: float) -> float | None:
    """Anything over nothing is `FAR_TOO_HIGH`."""
    if not math.isfinite(value):
        return None
    return value / holds_rps if holds_rps > 0.0 else FAR_TOO_HIGH * (value > 0.0)
