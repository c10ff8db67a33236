"""Which parameters does the throughput × interval rule try after its first answer, and what is its verdict?

The last two of the rule's five steps. Where a size does not work (out of memory), size and interval are reduced by
the same factor until one does. Then observed throughput × interval, the rows that come together in one interval, is
held against max_batch_size: where it reaches it, max_batch_size is raised; where it stays below, the interval triggers
first and max_batch_size is more than what comes together. Iterated, this ends at the fixed point
`max_batch_size = throughput(max_batch_size) · interval`, which at a saturated thread is the batch whose execution takes
as long as the interval. Where neither another size nor another interval changes the throughput, something else limits.

Everything here counts rows. A batch holds whole requests, so of requests of 5 rows a size of 16 takes 15 rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from batchtune.scenario.units import rounded, rounded_duration
from batchtune.tune import policy

Verdict = Literal[
    "fixed_point", "raise_size", "interval_first", "something_else", "memory", "no_interval", "fails"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one size and interval gave. `failure` says why they do not work, `rows_per_s` is NaN then."""

    max_batch_size: int
    interval_s: float
    rows_per_s: float = math.nan
    failure: str | None = None

    @property
    def interval_rows(self) -> float:
        """Observed throughput × interval: the rows that come together in one interval."""
        return self.rows_per_s * self.interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to try next, and why."""

    max_batch_size: int
    interval_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The verdict in words, and the round that it recommends (None: none works)."""

    verdict: Verdict
    text: str
    best: Round | None


def next_step(
    rounds: Sequence[Round], *, rows_per_request: int, rows_under_way: int | None = None, last: bool = False
) -> Step | Conclusion:
    """The next size and interval, or the verdict; `rounds` in their order, at least one.

    `rows_under_way` is what the clients of a closed loop send at once at most. `last`: there is no time for another
    round, so the verdict is what it is by now.
    """
    known = _Seen(rounds, rows_per_request, rows_under_way)
    if not known.worked:
        return known.fails() if last else known.reduced()
    if known.interval_s <= 0.0:
        return known.no_interval()
    wanted = None if last else known.wanted_size()
    if wanted is not None:
        return Step(max_batch_size=wanted, interval_s=known.interval_s, reason=known.why(wanted))
    if not last and known.interval_is_untried():
        return known.shorter_interval()
    return known.conclusion()


class _Seen:
    """The rounds so far, sorted by what they show."""

    def __init__(self, rounds: Sequence[Round], rows: int, rows_under_way: int | None) -> None:
        self._rounds = rounds
        self._rows = rows
        self._rows_under_way = rows_under_way
        self.worked = [round_ for round_ in rounds if round_.failure is None]
        self._failed = [round_ for round_ in rounds if round_.failure is not None]
        if not self.worked:
            return
        self.interval_s = self.worked[0].interval_s
        same = [round_ for round_ in self.worked if round_.interval_s == self.interval_s]
        self._same_interval = same
        by_size = sorted(same, key=lambda round_: round_.max_batch_size)
        self._filled = [round_ for round_ in by_size if self._reaches(round_)]
        self._unfilled = [round_ for round_ in by_size if not self._reaches(round_)]
        self._low = self._filled[-1] if self._filled else None
        self.settled = self._low or self._unfilled[0]

    def wanted_size(self) -> int | None:
        """The next size on the way to the fixed point; None where it is reached."""
        wanted = self._wanted_rows()
        size = None if wanted is None else self._whole_requests(wanted)
        return None if size is None or size in self._sizes() else size

    def why(self, size: int) -> str:
        last = self._rounds[-1]
        if last.failure is not None:
            return f"{last.max_batch_size} rows do not work ({last.failure}): {size}, below them"
        return f"{self._sum(last)}; {size} is next"

    def interval_is_untried(self) -> bool:
        """Whether another size left the throughput as it was, and only the other interval is left to try."""
        return self._size_is_without_effect() and self._other_interval() is None

    def shorter_interval(self) -> Step:
        return Step(
            max_batch_size=self.settled.max_batch_size,
            interval_s=_micros(self.interval_s / policy.RULE_REDUCTION),
            reason=f"another max_batch_size leaves the throughput at {rounded(self.settled.rows_per_s)} rows/s: "
            "does the interval matter?",
        )

    def reduced(self) -> Step | Conclusion:
        last = self._rounds[-1]
        size = self._whole_requests(last.max_batch_size / policy.RULE_REDUCTION)
        if size >= last.max_batch_size:
            return self.fails()
        return Step(
            max_batch_size=size,
            interval_s=_micros(last.interval_s * size / last.max_batch_size),
            reason=f"{last.max_batch_size} rows do not work ({last.failure}): size and interval reduced by the factor "
            f"{rounded(last.max_batch_size / size)}",
        )

    def fails(self) -> Conclusion:
        last = self._rounds[-1]
        text = f"even {last.max_batch_size} rows do not work: {last.failure}"
        return Conclusion(verdict="fails", text=text, best=None)

    def no_interval(self) -> Conclusion:
        text = "the SLO leaves no interval to wait, so there is nothing to multiply the throughput by"
        return Conclusion(verdict="no_interval", text=text, best=self.worked[0])

    def conclusion(self) -> Conclusion:
        other = self._other_interval()
        if other is not None and self._size_is_without_effect():
            return self._by_interval(other)
        if self._low is None:
            return self._concluded("interval_first", self._sum(self.settled))
        if self.wanted_size() is not None:
            return self._concluded("raise_size", self._sum(self.settled))
        under_way, above = self._rows_under_way, self._above()
        if above is not None and above.failure is not None and self._aim(self._low) >= above.max_batch_size:
            text = f"{self._sum(self.settled)}, but {above.max_batch_size} rows do not work: memory limits"
            return self._concluded("memory", text)
        if under_way is not None and self.settled.interval_rows * policy.RULE_REACHED_RATIO > under_way:
            text = f"{self._product(self.settled)}, but only {under_way} rows are ever under way: the clients limit"
            return self._concluded("something_else", text)
        size = self.settled.max_batch_size
        return self._concluded(
            "fixed_point", f"{self._product(self.settled)}: fixed point at max_batch_size {size}"
        )

    def _concluded(self, verdict: Verdict, text: str) -> Conclusion:
        return Conclusion(verdict=verdict, text=text, best=self.settled)

    def _by_interval(self, other: Round) -> Conclusion:
        best = max(self.settled, other, key=lambda round_: round_.rows_per_s)
        change = (
            f"{rounded_duration(self.interval_s)} → {rounded_duration(other.interval_s)}: "
            f"{rounded(self.settled.rows_per_s)} → {rounded(other.rows_per_s)} rows/s"
        )
        if _same(other.rows_per_s, self.settled.rows_per_s):
            text = f"neither max_batch_size nor the interval ({change}) changes the throughput: something else limits"
            return Conclusion(verdict="something_else", text=text, best=best)
        text = f"the interval triggers first, not max_batch_size ({change})"
        return Conclusion(verdict="interval_first", text=text, best=best)

    def _wanted_rows(self) -> float | None:
        if self._low is None:
            return self.settled.interval_rows if self.settled.max_batch_size > self._rows else None
        low, above, aim = self._low.max_batch_size, self._above(), self._aim(self._low)
        if aim * policy.RULE_REACHED_RATIO <= low:
            return None
        if above is None or aim < above.max_batch_size:
            return aim
        near = above.max_batch_size <= policy.RULE_BRACKET_RATIO * low
        return None if near else math.sqrt(low * above.max_batch_size)

    def _aim(self, round_: Round) -> float:
        return min(round_.interval_rows, self._rows_under_way or math.inf)

    def _above(self) -> Round | None:
        """The next size above the settled one that does not fill, or does not work."""
        above = [
            round_
            for round_ in (*self._failed, *self._unfilled)
            if round_.max_batch_size > self.settled.max_batch_size
        ]
        return min(above, key=lambda round_: round_.max_batch_size, default=None)

    def _size_is_without_effect(self) -> bool:
        return len(self._same_interval) > 1 and all(
            _same(other.rows_per_s, self.settled.rows_per_s) for other in self._same_interval
        )

    def _other_interval(self) -> Round | None:
        return next((round_ for round_ in self.worked if round_.interval_s != self.interval_s), None)

    def _sizes(self) -> set[int]:
        return {round_.max_batch_size for round_ in (*self._same_interval, *self._failed)}

    def _reaches(self, round_: Round) -> bool:
        whole = max(round_.max_batch_size // self._rows, 1) * self._rows
        return round_.interval_rows >= policy.RULE_REACHED_RATIO * whole

    def _whole_requests(self, rows: float) -> int:
        return max(round(rows / self._rows), 1) * self._rows

    def _sum(self, round_: Round) -> str:
        if round_.failure is not None:
            return f"{round_.max_batch_size} rows do not work ({round_.failure})"
        if self._reaches(round_):
            return f"{self._product(round_)} reach max_batch_size {round_.max_batch_size}: it may be raised"
        return f"{self._product(round_)} are below max_batch_size {round_.max_batch_size}: the interval triggers first"

    def _product(self, round_: Round) -> str:
        requests = f" ({rounded(round_.interval_rows / self._rows)} requests)" if self._rows > 1 else ""
        return (
            f"{rounded(round_.rows_per_s)} rows/s × {rounded_duration(round_.interval_s)} = "
            f"{rounded(round_.interval_rows)} rows{requests}"
        )


def _same(rate: float, other: float) -> bool:
    return abs(rate - other) <= policy.RULE_SAME_THROUGHPUT_RATIO * max(rate, other)


def _micros(seconds: float) -> float:
    """Rounded to whole microseconds, as the parameter is."""
    return round(seconds * 1e6) / 1e6
