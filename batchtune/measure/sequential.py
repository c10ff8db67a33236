"""Can this run stop already? A verdict that grows with the run (measurement.md 2.4 and 2.5).

`SloWatch` is a pure state machine: it hears the load driver's live counts and says when enough is known. A request
that is overdue is a miss before it has ended.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from batchtune.load.live import LiveAggregate
from batchtune.measure.slo import ALPHA, Decision, Limit
from batchtune.measure.statistics.quantiles import Z_95, t_quantile
from batchtune.scenario.units import rounded

GOOD_SHARE: Final = 0.7
BAD_SHARE: Final = 1.4
"""The indifference zone: between 0.7 and 1.4 times the allowed misses either verdict will do (3.5 and 7 % at p95)."""

SURE: Final = math.log((1.0 - ALPHA) / ALPHA)
LOOKS_FOR_EFFECT: Final = 6
MOST_SPELLS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPlan:
    """What is watched. `requests_per_batch` bounds how far requests stand or fall together until the run shows it.

    `rate_rps` None: a closed loop, whose backlog says nothing. `batch_rows_max` 1, no batching: nothing tells
    beforehand how long slow spells last, so until the run shows it, after `LOOKS_FOR_EFFECT` looks, only a majority of
    misses counts.
    """

    limit: Limit
    error_ratio: float
    warm_up_s: float
    rate_rps: float | None
    requests_per_batch: float = 1.0
    batch_rows_max: int = 1


class _Spells:
    """Requests and misses per stretch between looks, merged in pairs when there are many: the design effect's data."""

    def __init__(self) -> None:
        self._cumulative: list[tuple[int, int]] = [(0, 0)]

    def add(self, requests: int, misses: int) -> None:
        if requests > self._cumulative[-1][0]:
            self._cumulative.append((requests, misses))
        if len(self._cumulative) > MOST_SPELLS:
            self._cumulative = self._cumulative[::2]

    @property
    def told(self) -> bool:
        """Whether there are enough stretches to tell a design effect."""
        return len(self._cumulative) > LOOKS_FOR_EFFECT

    def design_effect(self) -> float:
        """The largest of two stretch lengths and their extrapolation, as in `quantiles.design_effect`; at least 1."""
        total, missed = self._cumulative[-1]
        if not self.told or not 0 < missed < total:
            return 1.0
        share = missed / total
        single = np.diff(np.array(self._cumulative, dtype=np.float64), axis=0)
        pairs = np.add.reduceat(single, np.arange(0, len(single), 2), axis=0)
        fours = np.add.reduceat(pairs, np.arange(0, len(pairs), 2), axis=0)
        independent = total * share * (1.0 - share)
        by_ones, by_twos, by_fours = (
            float(np.square(part[:, 1] - share * part[:, 0]).sum())
            * len(part)
            / (len(part) - 1)
            / independent
            for part in (single, pairs, fours)
        )
        unsure = (t_quantile(0.975, len(single) - 1) / Z_95) ** 2
        return max(1.0, unsure * max(by_ones, by_twos, by_fours, 2.0 * by_twos - by_ones))


@dataclass(slots=True)
class SloWatch:
    """Call with each live aggregate; True means stop. `decision` and `reason` then say what is known."""

    plan: WatchPlan
    decision: Decision = "UNSURE"
    reason: str = "too few requests to tell"
    requests: int = 0
    misses: int = 0
    _start: LiveAggregate | None = None
    _spells: _Spells = field(default_factory=_Spells)
    _backlog_since_s: float | None = None
    _in_flight: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        t_quantile(0.975, 1)  # scipy is imported now, not beside the load

    def __call__(self, live: LiveAggregate) -> bool:
        if self.decision != "UNSURE":
            return True
        if live.elapsed_s < self.plan.warm_up_s:
            return False
        if self._start is None:
            self._start = live
            return False
        self._count(live)
        end = self._too_many_errors(live) or self._backlog(live) or self._drift(live) or self._misses(live)
        if end is not None:
            self.decision, self.reason = end
        return end is not None

    @property
    def design_effect(self) -> float:
        """What the run shows, and at least what batches of the expected size do.

        The requests of a batch share their end, and neighbouring batches share a queue: 2·batch − 0.6 covers the
        exact chain from light load to four fifths of capacity.
        """
        return max(2.0 * self.plan.requests_per_batch - 0.6, self._spells.design_effect())

    def _count(self, live: LiveAggregate) -> None:
        start = self._start or live
        self.requests = live.done + live.overdue - start.done - start.overdue
        self.misses = _missed(live) - _missed(start)
        self._spells.add(self.requests, self.misses)

    def _misses(self, live: LiveAggregate) -> tuple[Decision, str] | None:
        if self.plan.batch_rows_max <= 1 and not self._spells.told and 2 * self.misses <= self.requests:
            return None
        allowed = self.plan.limit.allowed_miss_ratio
        counted = f"{self.misses} misses in {self.requests} requests"
        # Quick answers of the last moments are in, their slow siblings are not: for a PASS they do not count.
        unsettled = self.plan.limit.seconds / max(self._elapsed_s(live), 1e-9)
        settled = self.requests * max(0.0, 1.0 - unsettled) if self._may_pass(live) else 0.0
        if likelihood_ratio(settled, self.misses, allowed) <= -SURE * self.design_effect:
            return "PASS", counted
        if likelihood_ratio(self.requests, self.misses, allowed) >= SURE * self.design_effect:
            return "FAIL", counted
        return None

    def _too_many_errors(self, live: LiveAggregate) -> tuple[Decision, str] | None:
        """More than are allowed, by Wald's test too: looking often finds no more by chance, nor do refused batches.

        Where none are allowed one is too many; where half or more are, the misses tell.
        """
        start = self._start or live
        done, errors, allowed = live.done - start.done, live.errors - start.errors, self.plan.error_ratio
        if done < 100 or errors <= allowed * done or allowed >= 0.5:
            return None
        if allowed > 0.0 and likelihood_ratio(done, errors, allowed) < SURE * self.design_effect:
            return None
        return "FAIL", f"{errors} of {done} requests failed"

    def _backlog(self, live: LiveAggregate) -> tuple[Decision, str] | None:
        """By Little's law a service that keeps the limit has at most rate × limit in flight, give or take."""
        if self.plan.rate_rps is None:
            return None
        expected = self.plan.rate_rps * self.plan.limit.seconds
        most = 2.0 * expected + 5.0 * math.sqrt(expected) + self.plan.batch_rows_max
        if live.in_flight <= most:
            self._backlog_since_s = None
            return None
        if self._backlog_since_s is None:
            self._backlog_since_s = live.elapsed_s
        if live.elapsed_s - self._backlog_since_s <= max(0.3, 3.0 * self.plan.limit.seconds):
            return None
        return "FAIL", f"{live.in_flight} requests in flight where at most {most:.0f} can be in time"

    def _drift(self, live: LiveAggregate) -> tuple[Decision, str] | None:
        """In flight grows steadily, and answers come slower than requests."""
        span_s = max(1.0, 10.0 * self.plan.limit.seconds)
        self._in_flight.append((live.elapsed_s, live.in_flight))
        while len(self._in_flight) > 2 and self._in_flight[1][0] <= live.elapsed_s - span_s:
            self._in_flight.popleft()
        if self.plan.rate_rps is None or self._elapsed_s(live) < span_s or not self._grows(live):
            return None
        answered_rps = (live.done - (self._start or live).done) / self._elapsed_s(live)
        if answered_rps >= 0.97 * self.plan.rate_rps:
            return None
        return "FAIL", f"in flight grew to {live.in_flight} at {rounded(answered_rps)} answers/s"

    def _may_pass(self, live: LiveAggregate) -> bool:
        """Slight overload takes its time to break the limit: no PASS too soon, nor while in flight grows."""
        return self._elapsed_s(live) >= 10.0 * self.plan.limit.seconds and not self._grows(live)

    def _grows(self, live: LiveAggregate) -> bool:
        if len(self._in_flight) < 5 or live.in_flight <= self.plan.batch_rows_max:
            return False
        times, counts = (np.array(column, dtype=np.float64) for column in zip(*self._in_flight, strict=True))
        return _slope_t(times, counts) > 3.0

    def _elapsed_s(self, live: LiveAggregate) -> float:
        return live.elapsed_s - (self._start or live).elapsed_s


def likelihood_ratio(requests: float, misses: float, allowed_miss_ratio: float) -> float:
    """Wald's log likelihood ratio of too many misses against few: at ±2.944 one of them is 19 times likelier."""
    good, bad = GOOD_SHARE * allowed_miss_ratio, BAD_SHARE * allowed_miss_ratio
    hits = max(requests - misses, 0.0)
    return misses * math.log(bad / good) + hits * math.log((1.0 - bad) / (1.0 - good))


def _missed(live: LiveAggregate) -> int:
    return live.errors + live.late + live.overdue


def _slope_t(times: np.ndarray, counts: np.ndarray) -> float:
    """Student's t of the slope of a straight line through the points."""
    centred = times - times.mean()
    spread = float(centred @ centred)
    slope = float(centred @ counts) / spread
    residuals = counts - counts.mean() - slope * centred
    noise = math.sqrt(float(residuals @ residuals) / (len(times) - 2) / spread)
    return slope / noise if noise > 0.0 else math.copysign(math.inf, slope)
