"""Decides which requests of a run count, whether they keep the SLO, and whether a run can stop already."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from batchtune.load.fleet import LiveAggregate
from batchtune.load.samples import NEVER_NS, Samples, Status
from batchtune.measure.quantiles import QUANTILES, binomial_cdf, effect_of_slices, t_quantile
from batchtune.scenario.spec.check import SloSpec

Verdict = Literal["PASS", "FAIL", "UNSURE", "INVALID", "NOISY"]
"""On an SLO: met, missed, too few requests to decide; INVALID: the client was the limit; NOISY: the host was
disturbed."""

Decision = Literal["PASS", "FAIL", "UNSURE"]

ALPHA = 0.05

Figure = Literal["e2e", "ttft", "itl", "goodput"]
"""What a limit is on: whole answers, times to the first token, gaps between tokens, or the share of requests
that keep all limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One latency limit: at least a share `quantile` of the requests (itl: of the gaps between tokens) takes at most
    `seconds`.

    For goodput a request's value is its largest ratio figure / limit over the other limits, and `seconds` is 1.
    """

    name: str
    quantile: float
    seconds: float
    figure: Figure = "e2e"

    @property
    def allowed_miss_ratio(self) -> float:
        """Share of the requests that may miss the limit, 1 - quantile."""
        return 1.0 - self.quantile


def limits_of(slo: SloSpec) -> tuple[Limit, ...]:
    """List the latency limits of `slo`: on whole answers by rising quantile, then on first tokens, on gaps,
    and on goodput."""
    promised = slo.limits()
    whole = tuple(
        Limit(name=name, quantile=quantile, seconds=promised[name])
        for name, quantile in QUANTILES.items()
        if name in promised
    )
    figures: tuple[Figure, ...] = ("ttft", "itl")
    streamed = tuple(
        Limit(name=name, quantile=quantile, seconds=promised[name], figure=figure)
        for figure in figures
        for quantile_name, quantile in QUANTILES.items()
        if (name := f"{figure}_{quantile_name}") in promised
    )
    if "goodput" not in promised:
        return whole + streamed
    good = Limit(name="goodput", quantile=1.0 - promised["goodput"], seconds=1.0, figure="goodput")
    return (*whole, *streamed, good)


def primary_limit(slo: SloSpec) -> Limit | None:
    """Return the limit that a search watches: the first there is of p95, p99, p90, p99.9, p50, then of those on first
    tokens, on gaps, on goodput; None: no latency limit."""
    by_name = {limit.name: limit for limit in limits_of(slo)}
    whole = ("p95", "p99", "p90", "p99.9", "p50")
    return next((by_name[name] for name in (*whole, *by_name) if name in by_name), None)


def keeps(slo: SloSpec, latency_s: dict[str, float], error_ratio: float) -> bool:
    """Whether these figures keep every limit; a limited quantile that is undefined or was not measured does not.

    `latency_s`: quantile name -> seconds. `error_ratio`: the share of requests that failed, 0 to 1.
    """
    return error_ratio <= slo.error_ratio and all(
        latency_s.get(name, math.nan) <= limit_s for name, limit_s in slo.limits().items()
    )


def strict_decision(
    requests: float,
    misses: float,
    allowed_miss_ratio: float,
    *,
    design_effect: float = 1.0,
) -> Decision:
    """Decide by a binomial test, at ALPHA on both sides, whether the true miss ratio is below the allowed one (PASS) or
    above it (FAIL); UNSURE: the test shows neither.

    `requests`: number that counted. `misses`: how many of them missed the limit. Both are divided by `design_effect`
    and rounded against the verdict.
    """
    effective, missed = requests / design_effect, misses / design_effect
    if binomial_cdf(math.ceil(missed - 1e-9), math.floor(effective + 1e-9), allowed_miss_ratio) <= ALPHA:
        return "PASS"
    at_least = 1.0 - binomial_cdf(
        math.floor(missed + 1e-9) - 1, math.ceil(effective - 1e-9), allowed_miss_ratio
    )
    return "FAIL" if at_least <= ALPHA else "UNSURE"


def times_longer(
    requests: int, misses: int, allowed_miss_ratio: float, *, design_effect: float
) -> float | None:
    """Estimate how many times as long a run like this must last for a PASS or a FAIL, in steps of 25 %; None: even 100
    times as long is not enough, so that there is nothing to advise.

    Assumes that misses go on at this ratio and come together as before (`design_effect`).
    """
    times, longest_times = 1.0, 100.0
    while times < longest_times:
        times *= 1.25
        decision = strict_decision(
            times * requests, times * misses, allowed_miss_ratio, design_effect=design_effect
        )
        if decision != "UNSURE":
            return times
    return None


# Whether a run can stop already: a verdict that grows with the run.
#
# `SloWatch` is a pure state machine: it hears the load driver's live counts and says when enough is known. A request
# that is overdue is a miss before it has ended.


SURE: Final = math.log((1.0 - ALPHA) / ALPHA)


@dataclass(slots=True, kw_only=True)
class SloWatch:
    """Decides early whether a run meets a limit: called with each live aggregate, it returns True when the run can
    stop.

    `decision`: then PASS or FAIL. `requests`, `misses`: their numbers since the warm-up.
    """

    limit: Limit
    error_ratio: float
    warm_up_s: float
    # None: a closed loop, whose backlog says nothing.
    rate_rps: float | None
    # Requests that are expected to share a batch, and so to be slow together, until the run shows it.
    requests_per_batch: float = 1.0
    # 1: no batching. Nothing tells beforehand how long slow spells last then, so until the run shows it,
    # after six looks, only a majority of misses counts.
    batch_rows_max: int = 1
    decision: Decision = "UNSURE"
    requests: int = 0
    misses: int = 0
    _start: LiveAggregate | None = None
    # (requests, misses) so far at each look, or at every second one and so on beyond 40: what came between two shows
    # how misses come together.
    _looks: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    _backlog_since_s: float | None = None
    _in_flight: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        t_quantile(0.975, 1)  # scipy is imported now, not beside the load

    def __call__(self, live: LiveAggregate) -> bool:
        if self.decision != "UNSURE":
            return True
        if live.elapsed_s < self.warm_up_s:
            return False
        if self._start is None:
            self._start = live
            return False
        self._count(live)
        end = self._too_many_errors(live) or self._backlog(live) or self._drift(live) or self._misses(live)
        if end is not None:
            self.decision = end
        return end is not None

    @property
    def design_effect(self) -> float:
        """Estimate the design effect of the share of misses; at least that of batches of the expected size.

        The requests of a batch end together, and neighbouring batches share a queue: 2·batch − 0.6 covers the exact
        chain from light load to four fifths of capacity.
        """
        expected = max(2.0 * self.requests_per_batch - 0.6, 1.0)
        total, missed = self._looks[-1]
        if not self._has_enough_looks or not 0 < missed < total:
            return expected
        requests, misses = np.diff(np.array(self._looks, dtype=np.float64), axis=0).T
        return max(expected, effect_of_slices(requests, misses))

    @property
    def _has_enough_looks(self) -> bool:
        """Whether there are enough looks to estimate a design effect from the run."""
        return len(self._looks) > 6

    def _count(self, live: LiveAggregate) -> None:
        start = self._start or live
        self.requests = live.done + live.overdue - start.done - start.overdue
        self.misses = _missed(live) - _missed(start)
        if self.requests > self._looks[-1][0]:
            self._looks.append((self.requests, self.misses))
        most_looks = 40
        if len(self._looks) > most_looks:
            self._looks = self._looks[::2]

    def _misses(self, live: LiveAggregate) -> Decision | None:
        if self.batch_rows_max <= 1 and not self._has_enough_looks and 2 * self.misses <= self.requests:
            return None
        allowed = self.limit.allowed_miss_ratio
        # Quick answers of the last moments are in, their slow siblings are not: for a PASS they do not count.
        unsettled = self.limit.seconds / max(self._elapsed_s(live), 1e-9)
        settled = self.requests * max(0.0, 1.0 - unsettled) if self._may_pass(live) else 0.0
        if likelihood_ratio(settled, self.misses, allowed) <= -SURE * self.design_effect:
            return "PASS"
        if likelihood_ratio(self.requests, self.misses, allowed) >= SURE * self.design_effect:
            return "FAIL"
        return None

    def _too_many_errors(self, live: LiveAggregate) -> Decision | None:
        """FAIL where more requests fail than are allowed, by Wald's test too: then looking often does not
        find more by chance, nor do refused batches.

        Where none are allowed one is too many; where half or more are, misses decide.
        """
        start = self._start or live
        done, errors, allowed = live.done - start.done, live.errors - start.errors, self.error_ratio
        if done < 100 or errors <= allowed * done or allowed >= 0.5:
            return None
        if allowed > 0.0 and likelihood_ratio(done, errors, allowed) < SURE * self.design_effect:
            return None
        return "FAIL"

    def _backlog(self, live: LiveAggregate) -> Decision | None:
        """FAIL where more requests stay in flight than rate × limit (Little's law), the most under a kept
        limit, give or take."""
        if self.rate_rps is None:
            return None
        expected = self.rate_rps * self.limit.seconds
        most = 2.0 * expected + 5.0 * math.sqrt(expected) + self.batch_rows_max
        if live.in_flight <= most:
            self._backlog_since_s = None
            return None
        if self._backlog_since_s is None:
            self._backlog_since_s = live.elapsed_s
        if live.elapsed_s - self._backlog_since_s <= max(0.3, 3.0 * self.limit.seconds):
            return None
        return "FAIL"

    def _drift(self, live: LiveAggregate) -> Decision | None:
        """FAIL where the requests in flight grow steadily, and answers come slower than requests."""
        span_s = max(1.0, 10.0 * self.limit.seconds)
        self._in_flight.append((live.elapsed_s, live.in_flight))
        while len(self._in_flight) > 2 and self._in_flight[1][0] <= live.elapsed_s - span_s:
            self._in_flight.popleft()
        if self.rate_rps is None or self._elapsed_s(live) < span_s or not self._grows(live):
            return None
        answered_rps = (live.done - (self._start or live).done) / self._elapsed_s(live)
        if answered_rps >= 0.97 * self.rate_rps:
            return None
        return "FAIL"

    def _may_pass(self, live: LiveAggregate) -> bool:
        """Slight overload takes its time to break the limit: no PASS too soon, nor while in flight grows."""
        return self._elapsed_s(live) >= 10.0 * self.limit.seconds and not self._grows(live)

    def _grows(self, live: LiveAggregate) -> bool:
        if len(self._in_flight) < 5 or live.in_flight <= self.batch_rows_max:
            return False
        times, counts = (np.array(column, dtype=np.float64) for column in zip(*self._in_flight, strict=True))
        return _slope_t(times, counts) > 3.0

    def _elapsed_s(self, live: LiveAggregate) -> float:
        return live.elapsed_s - (self._start or live).elapsed_s


def likelihood_ratio(requests: float, misses: float, allowed_miss_ratio: float) -> float:
    """Return Wald's log likelihood ratio of too many misses (1.4 times the allowed ratio) against few (0.7 times).

    `requests`: number that counted. `misses`: how many of them missed the limit. At ±2.944 (SURE) one of the two
    hypotheses is 19 times likelier.
    """
    # Between 0.7 and 1.4 times the allowed misses either verdict will do (3.5 and 7 % at p95).
    good, bad = 0.7 * allowed_miss_ratio, 1.4 * allowed_miss_ratio
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of a run, [start, end), in ns since the run started; `steady` is False where the latencies of its
    halves differ."""

    start_ns: int
    end_ns: int
    steady: bool = True

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return max(self.end_ns - self.start_ns, 0) / 1e9

    def holds(self, times_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of `times_ns`, ns since the run started, lie in the window, shape (n,)."""
        return (times_ns >= self.start_ns) & (times_ns < self.end_ns)


def warm_up_needed_s(
    *,
    batch_timeout_s: float = 0.0,
    batch_s: float = 0.0,
    batch_threads: int = 1,
    batch_rows: float = 1.0,
    rows_per_s: float | None = None,
) -> float:
    """Return how many seconds at the start of a run must be left out.

    The maximum of three times (timeout + time of one batch), and the time in which each batch thread gets four batches
    of `batch_rows` at `rows_per_s` (None: only the former). `batch_rows`: rows that a batch will hold, which may be far
    below the largest size: few clients never fill a batch of 1000.
    """
    four_batches_s = 4.0 * batch_threads * batch_rows / rows_per_s if rows_per_s else 0.0
    return max(3.0 * (batch_timeout_s + batch_s), four_batches_s)


def window_of(samples: Samples, *, warm_up_s: float, duration_s: float | None = None) -> Window:
    """Return the measured window: from the end of the warm-up to the end of the schedule.

    `duration_s`: the schedule's length, warm-up included; None: up to the last request due. The window of a run that
    was stopped ends with the last request that became due. A window of 10 s or more begins later where MSER-5 says so,
    if what it cuts differs from the rest and no request of that part failed: on its own MSER-5 also cuts the busy
    spells with which a steady run may begin, and the intervals would then be too narrow.
    """
    start_ns = round(warm_up_s * 1e9)
    end_ns = round(duration_s * 1e9) if duration_s is not None else _last(samples.due_ns) + 1
    if samples.stopped_early:
        end_ns = min(end_ns, _last(samples.due_ns) + 1)
    window = Window(start_ns=start_ns, end_ns=max(end_ns, start_ns))
    # From here on MSER-5 may lengthen the warm-up, and the halves of the window are compared.
    long_window_s = 10.0
    if window.seconds < long_window_s:
        return window
    answered = np.flatnonzero(window.holds(samples.due_ns) & (samples.status == Status.OK))
    in_order = answered[np.argsort(samples.due_ns[answered], kind="stable")]
    latency_ns = samples.latency_ns[in_order].astype(np.float64)
    cut = mser5(latency_ns) or 0
    if cut and parts_differ(latency_ns, cut):
        later_ns = int(samples.due_ns[in_order[cut]])
        cut_off = window.holds(samples.due_ns) & (samples.due_ns < later_ns)
        if not (cut_off & (samples.status != Status.OK)).any():
            start_ns, latency_ns = later_ns, latency_ns[cut:]
    steady = not parts_differ(latency_ns, len(latency_ns) // 2)
    return Window(start_ns=start_ns, end_ns=window.end_ns, steady=steady)


def whole_run(samples: Samples) -> Window:
    """Return the window for a run of a fixed number of requests: the whole run from the start to the last answer, with
    the time in which it speeds up and runs out."""
    return Window(start_ns=0, end_ns=max(_last(samples.done_ns), _last(samples.due_ns)) + 1)


def between_answers(samples: Samples, window: Window) -> Window:
    """Return the window of a closed loop; where the clients had fewer than 20 answers each in it, its ends are moved to
    answers.

    Answers come a batch at a time, so a window of four batches that begins and ends anywhere is a quarter of a batch
    off on average; from the end of one batch to the end of another the rate is exact. A window without any answer
    becomes the whole run: all clients were waiting until the end. The window stays as it is where the last answer is
    the last before the server failed or hung.
    """
    clients = samples.concurrency or 1
    done_ns = np.sort(samples.done_ns[samples.status == Status.OK])
    inside = int(np.count_nonzero(window.holds(done_ns)))
    # Turns of a client in a window: with so many, where the window's edges fall moves the rate by less than 5
    # %.
    few_turns = 20
    if not len(done_ns) or inside >= few_turns * clients:
        return window
    earlier = done_ns[done_ns <= window.start_ns]
    start_ns = int(earlier[-1]) + 1 if len(earlier) else 0
    counted = done_ns[(done_ns >= start_ns) & (done_ns < window.end_ns)]
    end_ns = int(counted[-1] if len(counted) else done_ns[-1]) + 1
    if end_ns <= start_ns or _breaks_off(samples, window, last_ns=end_ns):
        return window
    return Window(start_ns=start_ns, end_ns=end_ns, steady=window.steady)


def counted_in(samples: Samples, window: Window) -> NDArray[np.bool_]:
    """Return which requests count in a window, shape (len(samples),): those due in it. In a closed loop also those that
    were due before it and failed after it: meanwhile their clients sent nothing that is due in it."""
    due = window.holds(samples.due_ns)
    if samples.concurrency is None:
        return due
    ended_ns = np.where(samples.done_ns == NEVER_NS, window.end_ns, samples.done_ns)
    waited = (samples.due_ns < window.start_ns) & (ended_ns >= window.end_ns)
    return np.asarray(due | (waited & (samples.status != Status.OK)))


def _breaks_off(samples: Samples, window: Window, *, last_ns: int) -> bool:
    """Whether a request of the window that had not ended by `last_ns` failed, or had no answer for longer than
    twice the slowest good answer that came by then."""
    status = samples.status
    good_ns = samples.latency_ns[(status == Status.OK) & (samples.done_ns < last_ns)]
    ended_ns = np.where(samples.done_ns == NEVER_NS, round(samples.wall_s * 1e9), samples.done_ns)
    after = (ended_ns >= last_ns) & (samples.due_ns < window.end_ns)
    # A request that the run's end cut short says nothing until it has waited this many times as long as any other.
    patience = 2
    overlong = ended_ns - samples.due_ns > patience * int(good_ns.max(initial=0))
    failed = ~np.isin(status, (int(Status.OK), int(Status.UNFINISHED), int(Status.UNSENT)))
    return bool((after & (failed | overlong)).any())


def mser5(values: NDArray[np.float64]) -> int | None:
    """Return how many leading values to cut by MSER-5: means of five values each, cut where the error of the mean of
    the rest is smallest.

    None: the best cut lies in the second half, so too few values are left. Fewer than 50 values: 0. Source: White, Cobb
    & Spratt, "A comparison of five steady-state truncation heuristics" (WSC 2000).
    """
    groups = len(values) // 5
    if groups < 10:
        return 0
    means = values[: groups * 5].reshape(groups, 5).mean(axis=1)
    means = means - means.mean()
    remaining = np.arange(groups, 0, -1, dtype=np.float64)
    sums = np.cumsum(means[::-1])[::-1]
    squares = np.cumsum(means[::-1] ** 2)[::-1]
    error = (squares - sums**2 / remaining) / remaining**2
    best = int(np.argmin(error[: groups - 5]))
    return None if best > groups // 2 else best * 5


def parts_differ(values: NDArray[np.float64], cut: int) -> bool:
    """Whether the means of values[:cut] and values[cut:] differ by more than chance explains (Student's t above 4),
    judged by the spread between blocks of a twentieth of the values within either part; False for fewer than 40
    values."""
    parts = 20
    if not 0 < cut < len(values) or len(values) < 2 * parts:
        return False
    size = len(values) / parts
    means = [
        np.array([block.mean() for block in np.array_split(part, max(1, round(len(part) / size)))])
        for part in (values[:cut], values[cut:])
    ]
    within = np.concatenate([block - block.mean() for block in means])
    error_squared = float(within @ within) / (len(within) - 2) * sum(1.0 / len(block) for block in means)
    # Beyond this Student's t two parts of a run differ. Of steady runs of 15 s, batch servers up to 90 % load
    # and bursts among them, up to 2 in 100 do; of runs in 2 % overload nearly all
    # (tests/measure/test_slo.py).
    different_t = 4.0
    return abs(float(means[0].mean() - means[1].mean())) > different_t * math.sqrt(error_squared)


def _last(times_ns: NDArray[np.int64]) -> int:
    return int(times_ns.max()) if len(times_ns) else -1
