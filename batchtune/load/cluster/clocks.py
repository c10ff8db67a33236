"""How does a host's clock stand to ours, and does it run on as ours does?

Each machine counts its own CLOCK_MONOTONIC from its own boot. A round trip bounds the offset between two of them by
half its length, whichever leg was the slow one (Cristian, Probabilistic clock synchronization, 1989); the shortest of
many is the best bound. Offsets place a worker's start; a latency is the difference of two readings of one clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

PINGS: Final = 24
"""On an idle loopback cluster the best of so many round trips is within 20 % of the best of 1,000."""

DRIFT_MAX_PPM: Final = 1000.0
"""NTP slews a clock by at most 500 ppm; two clocks by twice that against each other. Beyond it one was set or held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """The other clock was `offset_ns` ahead of ours, give or take `uncertainty_ns`, at `at_ns` of ours."""

    offset_ns: int
    uncertainty_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockAccount:
    """A host's clock over one job, from readings before and after it."""

    before: ClockReading
    after: ClockReading

    @property
    def uncertainty_ns(self) -> int:
        """Of the instant at which the host started."""
        return self.before.uncertainty_ns

    @property
    def drift_ppm(self) -> float:
        return (self.after.offset_ns - self.before.offset_ns) / self._elapsed_ns * 1e6

    @property
    def drift_uncertainty_ppm(self) -> float:
        return (self.before.uncertainty_ns + self.after.uncertainty_ns) / self._elapsed_ns * 1e6

    @property
    def is_lost(self) -> bool:
        """Whether it moved further than clocks drift."""
        return abs(self.drift_ppm) - self.drift_uncertainty_ppm > DRIFT_MAX_PPM

    def text(self) -> str:
        """Such as "clock +50.013 ± 0.110 ms against the head's, drift +100 ± 12 ppm"."""
        return (
            f"clock {self.before.offset_ns / 1e6:+,.3f} ± {self.uncertainty_ns / 1e6:.3f} ms against the head's, "
            f"drift {self.drift_ppm:+.0f} ± {self.drift_uncertainty_ppm:.0f} ppm"
        )

    @property
    def _elapsed_ns(self) -> int:
        return max(1, self.after.at_ns - self.before.at_ns)


def read_clock(
    theirs_ns: Callable[[], int], ours_ns: Callable[[], int], *, pings: int = PINGS
) -> ClockReading:
    """The tightest of so many readings; `theirs_ns` is a round trip to the other clock."""
    readings = []
    for _ in range(pings):
        asked_ns = ours_ns()
        there_ns = theirs_ns()
        answered_ns = ours_ns()
        middle_ns = (asked_ns + answered_ns) // 2
        readings.append(
            ClockReading(
                offset_ns=there_ns - middle_ns,
                uncertainty_ns=(answered_ns - asked_ns) // 2 + 1,
                at_ns=middle_ns,
            )
        )
    return min(readings, key=lambda reading: reading.uncertainty_ns)
