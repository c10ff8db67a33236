"""What is the highest rate that keeps the SLO? A search of few short trials (measurement.md 2.6).

The search only proposes probes and hears their outcomes, so it runs on a server as on a simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from batchtune.measure.capacity_probes import (
    Capacity,
    CapacityLimit,
    CapacityProbe,
    Evidence,
    ProbeKind,
    ProbeOutcome,
)
from batchtune.measure.slo import Decision, Limit
from batchtune.measure.statistics.isotonic import isotonic_root
from batchtune.measure.statistics.quantiles import Estimate

FIRST_SHARE: Final = 0.7
STEP_UP: Final = 1.2
STEPS_DOWN: Final = (0.7, 0.5)
MOST_REPEATS: Final = 2
FEWEST_REQUESTS: Final = 60
"""Requests of a probe, at least: of fewer, p95 is the slowest two or three."""

LEAST_SHARE: Final = 0.05
"""Rates down to this share of the first are tried: a server that misses there misses with hardly any load."""
MOST_MARGIN: Final = 2.0
SPOILT: Final = frozenset({"INVALID", "NOISY"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """How to search. The defaults find a capacity within 5 % in 6 to 10 trials.

    `concurrency` of the first burst: 4 × `batch_requests_max` (requests of a full batch) × batch threads.
    `lone_s` is the latency of a lone request, NaN unknown: above the limit it is measured again first, and no rate is
    tried where it still is. A rate is tried for `probe_s`, or longer where that would be fewer requests than
    FEWEST_REQUESTS, up to `probe_max_s`.
    `first_rate_rps` replaces the burst: the bracket starts there. Cheap, for racing many configurations: a first rate
    from the incumbent, `probes_max` 5, `width_ratio` 0.1.
    """

    limit: Limit
    concurrency: int
    first_rate_rps: float | None = None
    width_ratio: float = 0.05
    burst_s: float = 1.5
    probe_s: float = 2.0
    probe_max_s: float = 15.0
    lone_s: float = math.nan
    probes_max: int = 12
    seconds_max: float = 45.0
    seed: int = 1
    batch_requests_max: int = 1


def find_capacity(run_trial: Callable[[CapacityProbe], ProbeOutcome], plan: CapacityPlan) -> Capacity:
    """Run the search, each probe by `run_trial`; whatever that raises ends it."""
    search = capacity_search(plan)
    probe = next(search)
    while True:
        try:
            probe = search.send(run_trial(probe))
        except StopIteration as found:
            capacity: Capacity = found.value
            return capacity


Asking = Generator[CapacityProbe, ProbeOutcome, Any]


def capacity_search(plan: CapacityPlan) -> Generator[CapacityProbe, ProbeOutcome, Capacity]:
    """The search as a coroutine: yields probes, is sent their outcomes, returns the capacity."""
    search = _Search(plan)
    if plan.lone_s > plan.limit.seconds and not (yield from search.idle_meets_limit()):
        return search.result("no feasible rate")
    if plan.first_rate_rps is None:
        yield from search.saturate()
    yield from search.bracket()
    yield from search.refine()
    yield from search.fail_above()
    return search.result()


@dataclass(slots=True)
class _Search:
    """The bracket (low keeps the SLO, high does not) and the table behind it; each step is a coroutine."""

    plan: CapacityPlan
    evidence: list[Evidence] = field(default_factory=list)
    low: float = 0.0
    high: float = math.inf
    high_is: CapacityLimit = "slo"
    saturation_rps: float = math.nan

    def result(self, limit: CapacityLimit | None = None) -> Capacity:
        if limit is None:
            limit = self.high_is
            if self.low <= 0.0:
                limit = "no feasible rate"
            elif math.isinf(self.high):
                limit = "probe budget"
        failed = self.failed_above(self.low)
        high = min(failed) if limit == "slo" and failed else self.high
        return Capacity(
            rate_rps=Estimate(value=self.low, low=self.low, high=high),
            limit=limit,
            crossing_rps=self.crossing(self.low, high),
            saturation_rps=self.saturation_rps,
            evidence=tuple(self.evidence),
        )

    def idle_meets_limit(self) -> Asking:
        outcome = yield from self.ask("idle", duration_s=self.plan.burst_s, concurrency=1)
        return not outcome.quantile_s.low > self.plan.limit.seconds

    def saturate(self) -> Asking:
        """Closed-loop bursts, doubled while that gains more than a twentieth."""
        concurrency, best = self.plan.concurrency, 0.0
        for _ in range(3):
            outcome = yield from self.ask("burst", duration_s=self.plan.burst_s, concurrency=concurrency)
            gained = outcome.throughput_rps > 1.05 * best
            best = max(best, outcome.throughput_rps)
            if not gained or outcome.verdict == "INVALID":
                break
            concurrency *= 2
        self.saturation_rps = best

    def bracket(self) -> Asking:
        """Down from the first rate until one holds, or up until one does not."""
        rate = self.plan.first_rate_rps or FIRST_SHARE * self.saturation_rps
        least, failures = LEAST_SHARE * rate, 0
        while self.probes_left and rate > least:
            yield from self.try_rate(rate)
            if self.low > 0.0:
                break
            rate *= STEPS_DOWN[min(failures, len(STEPS_DOWN) - 1)]
            failures += 1
        while self.low > 0.0 and math.isinf(self.high) and self.probes_left:
            yield from self.try_rate(self.low * STEP_UP)

    def refine(self) -> Asking:
        while self.low > 0.0 and math.isfinite(self.high) and self.probes_left:
            if self.high / self.low <= 1.0 + self.plan.width_ratio:
                return
            yield from self.try_rate(self.crossing(self.low, self.high, keep_off=0.2))

    def fail_above(self) -> Asking:
        """A high end that only tended to miss is not a failing rate yet: look a little above it."""
        rate = self.high
        while self.low > 0.0 and self.probes_left and not self.failed_above(self.low):
            if math.isinf(rate) or self.high_is != "slo":
                return
            rate *= 1.0 + 2.0 * self.plan.width_ratio
            yield from self.ask("rate", duration_s=self.probe_s(rate), rate_rps=rate)

    def try_rate(self, rate_rps: float) -> Asking:
        outcome = yield from self.ask("rate", duration_s=self.probe_s(rate_rps), rate_rps=rate_rps)
        if outcome.verdict == "INVALID":
            self.high, self.high_is = rate_rps, "client"
        elif self.decide(outcome) == "PASS":
            self.low = rate_rps
        else:
            self.high, self.high_is = rate_rps, "slo"

    def probe_s(self, rate_rps: float) -> float:
        """Long enough for FEWEST_REQUESTS, within reason."""
        return max(self.plan.probe_s, min(FEWEST_REQUESTS / rate_rps, self.plan.probe_max_s))

    def ask(
        self,
        kind: ProbeKind,
        *,
        duration_s: float,
        rate_rps: float | None = None,
        concurrency: int | None = None,
    ) -> Generator[CapacityProbe, ProbeOutcome, ProbeOutcome]:
        """One probe; one that the host or the client spoilt is repeated at most twice, and stays in the table.

        A client that is late once was held up; one that is late three times at a rate is too slow for it.
        """
        probe = CapacityProbe(
            kind=kind, duration_s=duration_s, seed=0, rate_rps=rate_rps, concurrency=concurrency
        )
        repeats = 0
        while True:
            probe = replace(probe, seed=self.plan.seed * 1000 + len(self.evidence))
            outcome = yield probe
            self.evidence.append(Evidence(probe=probe, outcome=outcome))
            spoilt = outcome.verdict == "NOISY" or (outcome.verdict == "INVALID" and rate_rps is not None)
            if not spoilt or repeats == MOST_REPEATS or not self.time_left:
                return outcome
            repeats += 1

    def decide(self, outcome: ProbeOutcome) -> Decision:
        """An outcome that is not sure goes with the misses that were seen: the bracket narrows either way."""
        if outcome.verdict in {"PASS", "FAIL"}:
            return "PASS" if outcome.verdict == "PASS" else "FAIL"
        allowed = self.plan.limit.allowed_miss_ratio * outcome.requests
        return "PASS" if outcome.requests and outcome.misses <= allowed else "FAIL"

    def rated(self) -> list[tuple[float, ProbeOutcome]]:
        """Every open-loop probe that neither client nor host spoilt: its rate and what came of it."""
        return [
            (piece.probe.rate_rps, piece.outcome)
            for piece in self.evidence
            if piece.probe.rate_rps is not None and piece.outcome.verdict not in SPOILT
        ]

    def failed_above(self, rate_rps: float) -> list[float]:
        return [rate for rate, outcome in self.rated() if outcome.verdict == "FAIL" and rate > rate_rps]

    @property
    def spent_s(self) -> float:
        return math.fsum(piece.outcome.seconds for piece in self.evidence)

    @property
    def probes_left(self) -> bool:
        """Spoilt probes take time, and none of the probes that are allowed."""
        used = sum(
            piece.probe.kind in {"burst", "rate"} and piece.outcome.verdict not in SPOILT
            for piece in self.evidence
        )
        return used < self.plan.probes_max and self.time_left

    @property
    def time_left(self) -> bool:
        return self.spent_s < self.plan.seconds_max

    def crossing(self, low: float, high: float, *, keep_off: float = 0.0) -> float:
        """Where ln(quantile / limit), made increasing, crosses 0; `keep_off` of the log bracket from either end."""
        if low <= 0.0 or math.isinf(high):
            return low
        start, span = math.log(low), math.log(high / low)
        points = [
            (math.log(rate), self.margin(outcome), float(max(outcome.requests, 1)))
            for rate, outcome in self.rated()
        ]
        share = (isotonic_root(points, default=start + 0.5 * span) - start) / span
        return low * math.exp(span * min(max(share, keep_off), 1.0 - keep_off))

    def margin(self, outcome: ProbeOutcome) -> float:
        """Below 0 when the quantile keeps the limit; clipped, and 'as late as can be' without a quantile."""
        value = outcome.quantile_s.value
        if not math.isfinite(value) or value <= 0.0:
            return MOST_MARGIN
        return min(max(math.log(value / self.plan.limit.seconds), -MOST_MARGIN), MOST_MARGIN)
