"""How is the load going right now? Read from the workers' columns by the parent, without asking the workers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchtune.load.record.columns import ENDED, ISSUED, OLDEST_PENDING, PENDING, Columns
from batchtune.load.record.samples import Status

RECENT_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAggregate:
    """Counts since the start; `throughput_rps` and the quantiles are over the answers of the last second.

    `late`: answers that came after `overdue_after_s`; `overdue`: requests still in flight for longer than that.
    Together with `errors` they are the misses so far among `done + overdue` requests.
    """

    elapsed_s: float
    sent: int
    done: int
    errors: int
    late: int
    throughput_rps: float
    p50_s: float
    p95_s: float
    in_flight: int
    overdue: int


def together(lives: Sequence[LiveAggregate]) -> LiveAggregate:
    """What all workers tell live; the quantiles are the workers', weighted by their answers of the last second."""
    answering = [live for live in lives if live.throughput_rps > 0.0]
    throughput_rps = sum(live.throughput_rps for live in answering)

    def weighted(name: str) -> float:
        if not answering:
            return math.nan
        return float(sum(getattr(live, name) * live.throughput_rps for live in answering)) / throughput_rps

    return LiveAggregate(
        elapsed_s=max(live.elapsed_s for live in lives),
        sent=sum(live.sent for live in lives),
        done=sum(live.done for live in lives),
        errors=sum(live.errors for live in lives),
        late=sum(live.late for live in lives),
        throughput_rps=throughput_rps,
        p50_s=weighted("p50_s"),
        p95_s=weighted("p95_s"),
        in_flight=sum(live.in_flight for live in lives),
        overdue=sum(live.overdue for live in lives),
    )


class LiveView:
    """Summarises the columns of all workers of a job; `look()` costs the recent requests only, not the whole run.

    `first_tokens`: late and overdue are requests whose first token is, not their end.
    """

    def __init__(
        self, tables: Sequence[Columns], *, start_ns: int, overdue_after_s: float, first_tokens: bool = False
    ) -> None:
        self._tables = [
            _Table(columns, int(overdue_after_s * 1e9), first_tokens=first_tokens) for columns in tables
        ]
        self._start_ns = start_ns

    def look(self) -> LiveAggregate:
        now_ns = time.monotonic_ns()
        elapsed_s = max(0.0, (now_ns - self._start_ns) / 1e9)
        looks = [table.look(now_ns) for table in self._tables]
        recent = np.concatenate([look.recent_latency_ns for look in looks])
        p50_ns, p95_ns = np.quantile(recent, (0.5, 0.95)) if len(recent) else (float("nan"), float("nan"))
        return LiveAggregate(
            elapsed_s=elapsed_s,
            sent=sum(look.issued for look in looks),
            done=sum(look.done for look in looks),
            errors=sum(look.errors for look in looks),
            late=sum(look.late for look in looks),
            throughput_rps=len(recent) / min(max(elapsed_s, 1e-3), RECENT_NS / 1e9),
            p50_s=float(p50_ns) / 1e9,
            p95_s=float(p95_ns) / 1e9,
            in_flight=sum(look.issued - look.done for look in looks),
            overdue=sum(look.overdue for look in looks),
        )


@dataclass(frozen=True, slots=True)
class _Look:
    issued: int
    done: int
    errors: int
    late: int
    overdue: int
    recent_latency_ns: NDArray[np.int64]


class _Table:
    """One worker's columns; rows below `_settled` have all ended and are counted once."""

    def __init__(self, columns: Columns, overdue_after_ns: int, *, first_tokens: bool) -> None:
        self._header = columns.header
        self._begun = columns.times("first_byte") if first_tokens else None
        self._due, self._done = columns.times("due"), columns.times("done")
        self._outcome = columns.outcomes()
        self._overdue_after_ns = overdue_after_ns
        self._settled = 0
        self._settled_errors = 0
        self._settled_late = 0
        self._recent_from = 0

    def look(self, now_ns: int) -> _Look:
        oldest = self._header[OLDEST_PENDING]
        issued = self._header[
            ISSUED
        ]  # read last: meanwhile the worker goes on, and the other never passes it
        errors, late, _ = self._count(self._settled, oldest)
        self._settled_errors += errors
        self._settled_late += late
        self._settled = oldest
        errors, late, pending = self._count(oldest, issued)
        begun_ns = 0 if self._begun is None else self._begun[oldest:issued]
        waits_ns = (np.where(begun_ns, begun_ns, now_ns) - self._due[oldest:issued])[pending]
        overdue = int(np.count_nonzero(waits_ns > self._overdue_after_ns))
        return _Look(
            issued=issued,
            done=issued - int(np.count_nonzero(pending)),
            errors=self._settled_errors + errors,
            late=self._settled_late + late,
            overdue=overdue,
            recent_latency_ns=self._recent(issued, oldest, now_ns),
        )

    def _count(self, start: int, end: int) -> tuple[int, int, NDArray[np.bool_]]:
        outcome = self._outcome[start:end]
        good = outcome == Status.OK + ENDED
        done_ns = (self._done if self._begun is None else self._begun)[start:end]
        late = good & (done_ns - self._due[start:end] > self._overdue_after_ns)
        pending = outcome == PENDING
        errors = len(outcome) - int(np.count_nonzero(good)) - int(np.count_nonzero(pending))
        return errors, int(np.count_nonzero(late)), pending

    def _recent(self, issued: int, oldest: int, now_ns: int) -> NDArray[np.int64]:
        """Latencies of good answers within the last second."""
        start = self._recent_from
        done = self._done[start:issued]
        recent = (done > now_ns - RECENT_NS) & (self._outcome[start:issued] == Status.OK + ENDED)
        latencies: NDArray[np.int64] = done[recent] - self._due[start:issued][recent]
        # Rows before the first recent or pending one can never become recent again.
        first = start + int(np.argmax(recent)) if recent.any() else oldest
        self._recent_from = min(first, oldest)
        return latencies
