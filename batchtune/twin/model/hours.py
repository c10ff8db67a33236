"""How many replicas does each hour of a day need, and what does it save to follow the traffic?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchtune.errors import TwinError
from batchtune.plain_values import to_plain
from batchtune.scenario.profiles import Interval
from batchtune.twin.model.replicas import Fleet, ReplicaPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPlan:
    """`name` as the profile writes it; `replicas` advised for its rate; `peak`: the first of the highest rate."""

    name: str
    length_s: float
    rate_rps: float
    replicas: int
    peak: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DayPlan:
    """The plan of the peak, and the replicas of each interval; replica-hours of these and of the peak's throughout."""

    peak: ReplicaPlan
    intervals: tuple[IntervalPlan, ...]

    @property
    def peak_interval(self) -> IntervalPlan:
        return next(interval for interval in self.intervals if interval.peak)

    @property
    def replica_hours(self) -> float:
        return sum(interval.replicas * interval.length_s for interval in self.intervals) / 3600.0

    @property
    def flat_replica_hours(self) -> float:
        return self.peak.advised * sum(interval.length_s for interval in self.intervals) / 3600.0

    @property
    def saved_ratio(self) -> float:
        return 1.0 - self.replica_hours / self.flat_replica_hours

    def to_dict(self) -> dict[str, Any]:
        """The peak's plan, with the profile beside it."""
        profile = {
            "intervals": to_plain(self.intervals),
            "peak": self.peak_interval.name,
            "replica_hours": self.replica_hours,
            "flat_replica_hours": self.flat_replica_hours,
            "saved_ratio": self.saved_ratio,
        }
        return {**self.peak.to_dict(), "profile": profile}


def plan_day(fleet: Fleet, profile: Sequence[Interval]) -> DayPlan:
    """The replicas that each interval needs; an interval without requests keeps those of a fleet of one.

    Raises:
        TwinError: no rate keeps the limits, or the profile has no requests.
    """
    highest_rps = max((interval.rate_rps for interval in profile), default=0.0)
    if not highest_rps > 0.0:
        raise TwinError("the profile has no requests", hint="give rates above 0")
    peak = fleet.plan(highest_rps)
    replicas = {highest_rps: peak.advised, 0.0: fleet.least}
    for interval in profile:
        if interval.rate_rps not in replicas:
            replicas[interval.rate_rps] = min(fleet.advised(interval.rate_rps), peak.advised)
    first = next(number for number, interval in enumerate(profile) if interval.rate_rps == highest_rps)
    intervals = tuple(
        IntervalPlan(
            name=interval.name,
            length_s=interval.length_s,
            rate_rps=interval.rate_rps,
            replicas=replicas[interval.rate_rps],
            peak=number == first,
        )
        for number, interval in enumerate(profile)
    )
    return DayPlan(peak=peak, intervals=intervals)
