"""What do the blocks say of one gate?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchtune.check.gate import Gate, Look, bounds, student_bounds
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.plain_values import to_plain

State = Literal["regressed", "improved", "ok", "open", "not measured"]
"""`open`: its interval holds the margin."""

BlockFigures = Mapping[str, tuple[float, float]]
"""(before, after) of each figure in one block, by the name of its gate; nan where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One gate after `blocks` blocks that have both figures.

    `worsening` is how much worse, in the gate's unit, with bounds at the levels of the look. It is flagged, and told as
    improved, against the margin asked for, whatever the noise; it is cleared against `margin`: the same, or more where
    the noise does not let less be told. `before` and `after` are medians.
    `confirmed` is None where no fresh blocks were asked.
    """

    gate: Gate
    state: State
    blocks: int
    worsening: Estimate
    margin: float
    before: float
    after: float
    confirmed: bool | None = None

    @property
    def change(self) -> Estimate:
        """The change of the figure itself with its bounds in order: 0.05 is 5 % more (of errors: 5 points). A bound
        that the blocks do not give is infinite."""
        ends = sorted((self.gate.change(self.worsening.low), self.gate.change(self.worsening.high)))
        return Estimate(value=self.gate.change(self.worsening.value), low=ends[0], high=ends[1])

    def to_dict(self) -> dict[str, Any]:
        """Safe for JSON: null for a bound that the blocks do not give, and for what was not measured."""
        change = {name: _known(getattr(self.change, name)) for name in ("value", "low", "high")}
        return {
            "metric": self.gate.metric,
            "model": self.gate.model,
            "margin_asked": self.gate.margin,
            "is_default": self.gate.is_default,
            "change": change,
            "state": self.state,
            "blocks": self.blocks,
            "margin": _known(self.margin),
            "before": None if math.isnan(self.before) else to_plain(self.before),
            "after": None if math.isnan(self.after) else to_plain(self.after),
            "confirmed": self.confirmed,
        }


def find(gate: Gate, blocks: Sequence[BlockFigures], look: Look, *, blocks_max: int) -> Finding:
    """Judge one gate at one look of a phase of at most `blocks_max` blocks."""
    pairs = [figures[gate.name] for figures in blocks if gate.name in figures]
    known = [
        worse for worse in (gate.worsening(before, after) for before, after in pairs) if not math.isnan(worse)
    ]
    value, low, high = bounds(known, low_level=look.flag_level, high_level=look.clear_level)
    student_low, student_high = student_bounds(
        _sides(gate, pairs), low_level=look.student_flag_level, high_level=look.student_clear_level
    )
    low, high = min(max(low, student_low), value), max(min(high, student_high), value)
    # The noise may raise that margin to so many times what was asked for; beyond it the gate stays open, and
    # says so.
    floor_most = 2.5
    clear_limit = max(gate.limit, min(_floor(known, blocks_max), floor_most * gate.limit))
    state = _state(known, low=low, high=high, limit=gate.limit, clear_limit=clear_limit)
    return Finding(
        gate=gate,
        state=state,
        blocks=len(known),
        worsening=Estimate(value=value, low=low, high=high),
        margin=gate.margin if state in ("regressed", "improved") else abs(gate.change(clear_limit)),
        before=_median(before for before, _ in pairs),
        after=_median(after for _, after in pairs),
    )


def _sides(gate: Gate, pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """How much worse both sides of each pair are than the first baseline;
    empty where one of them has no logarithm."""
    known = [pair for pair in pairs if not math.isnan(gate.worsening(*pair))]
    if not gate.is_absolute and not all(0.0 < value < math.inf for pair in known for value in pair):
        return []
    origin = known[0][0] if known else 0.0
    return [(gate.worsening(origin, before), gate.worsening(origin, after)) for before, after in known]


def _state(known: Sequence[float], *, low: float, high: float, limit: float, clear_limit: float) -> State:
    if not known:
        return "not measured"
    if low > limit:
        return "regressed"
    if high < -limit:
        return "improved"
    return "ok" if high < clear_limit else "open"


def _floor(worsenings: Sequence[float], blocks_max: int) -> float:
    """The smallest change that so many blocks can clear, by the spread of those there are; 0 where they are too few."""
    one_error = 0.1587  # The level of a bound that lies one standard error away.
    value, _, above = bounds(worsenings, low_level=one_error, high_level=one_error)
    if math.isinf(above) or not worsenings:
        return 0.0
    # A gate is cleared against no less than so many standard errors of the last look: 2.3 of its interval, and
    # 2 so that 19 of 20 unchanged pairs are cleared (tests/benchmarks/check/simulated_check.py).
    floor_errors = 4.3
    return floor_errors * (above - value) * math.sqrt(len(worsenings) / blocks_max)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan
