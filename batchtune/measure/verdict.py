"""Did this run keep the SLO, and could we tell?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchtune.load.record.samples import Samples, Status
from batchtune.measure.slo import Decision, Limit, Slo, Verdict, limits_of, strict_decision, times_longer
from batchtune.measure.statistics.quantiles import design_effect, quantile_design_effect, time_slices
from batchtune.measure.validity.caveats import HOST_CODES, Caveat
from batchtune.measure.validity.client import own_lag_ns
from batchtune.measure.validity.steady_state import Window
from batchtune.scenario.units import percentage, rounded, rounded_duration
from batchtune.target.telemetry import ServerActivity

CLIENT_UNTOLD = frozenset({"client_throttled", "client_busy", "client_near_limit", "worker_slow"})
"""Client limits that the send lag does not show in full."""

FEW_MISSES = 10
"""Below this many misses their clumping cannot be seen; the mean batch stands in for the design effect."""

MOST_MISSES = 0.95
MARGIN_REQUESTS = 300
"""A PASS may be shown at a lower limit: so many times lower, with as many times the misses allowed, up to this share.

That holds where the tail falls at least as fast as one over the latency, as that of every queue does. In runs of at
least so many requests the false PASSes at the exact limit stay near 5 %, in streams of queues, bursts and drift (the
part `limits` of tests/benchmarks/twin/measure_coverage.py); with 100 requests of a drifting host they were 12 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRequests:
    """The requests due in the window: `counted` selects them from the samples, `latencies_s` is inf without an answer.

    `requests_per_batch` is by the server's account; 1 when it does not tell.
    """

    samples: Samples
    counted: NDArray[np.bool_]
    latencies_s: NDArray[np.float64]
    due_ns: NDArray[np.int64]
    requests_per_batch: float

    def design_effect(self, limit_s: float) -> float:
        """Of the share of requests slower than `limit_s`; where few are, at least that of a batch."""
        effect = self.shown_effect(limit_s)
        few = np.count_nonzero(self.latencies_s > limit_s) < FEW_MISSES
        return max(effect, self.requests_per_batch) if few else effect

    def shown_effect(self, limit_s: float) -> float:
        """As far as the misses themselves show it: 1 without any."""
        return design_effect(self.latencies_s > limit_s, time_slices(self.due_ns))


def counted_requests(samples: Samples, window: Window, activity: ServerActivity | None) -> CountedRequests:
    """Select the latency population: due in the window, answered or not."""
    counted = window.holds(samples.due_ns)
    latencies_s = np.where(samples.status == Status.OK, samples.latency_ns / 1e9, math.inf)[counted]
    per_batch = 1.0
    if activity is not None and activity.mean_batch_rows and len(samples):
        per_batch = max(1.0, activity.mean_batch_rows / float(samples.rows.mean()))
    return CountedRequests(
        samples=samples,
        counted=counted,
        latencies_s=latencies_s,
        due_ns=samples.due_ns[counted],
        requests_per_batch=per_batch,
    )


def judge(run: CountedRequests, slo: Slo, distrust: tuple[Caveat, ...]) -> tuple[Verdict, str]:
    """The verdict and its reason in one sentence.

    PASS and FAIL are binomial tests, each wrong for at most 1 in 20 runs at the limit itself. Errors are judged as
    they were seen, without allowing for chance: a cap (measurement.md 2.5 d).
    Distrust never overturns an open-loop PASS: lag and noise only make requests slower. Nor does a late client
    excuse a FAIL that holds when its own lag is taken off.
    """
    if not len(run.due_ns):
        return "UNSURE", "nothing was measured"
    decision, reason = _decide(run, run.latencies_s, slo)
    closed = run.samples.concurrency is not None
    noise = next((caveat for caveat in distrust if caveat.code in HOST_CODES), None)
    blame = next((caveat for caveat in distrust if caveat.blames_client), None)
    if (noise is None and blame is None) or (decision == "PASS" and not closed):
        return decision, reason
    if noise is not None:
        return "NOISY", noise.text
    if decision == "FAIL" and not any(caveat.code in CLIENT_UNTOLD for caveat in distrust):
        lag_s = own_lag_ns(run.samples)[run.counted] / 1e9
        if _decide(run, run.latencies_s - lag_s, slo)[0] == "FAIL":
            return "FAIL", f"{reason}, and the client's own lag is not what broke it"
    return "INVALID", blame.text if blame is not None else ""


def _decide(run: CountedRequests, latencies_s: NDArray[np.float64], slo: Slo) -> tuple[Decision, str]:
    count = len(latencies_s)
    failed = int(np.count_nonzero(np.isinf(latencies_s)))
    if failed > slo.error_ratio * count:
        return "FAIL", f"{failed} of {count} requests failed, {percentage(slo.error_ratio, 3)} may"
    unsure = ""
    for limit in limits_of(slo):
        misses = int(np.count_nonzero(latencies_s > limit.seconds))
        effect = run.design_effect(limit.seconds)
        decision = strict_decision(count, misses, limit.allowed_miss_ratio, design_effect=effect)
        shown = run.shown_effect(limit.seconds)
        if strict_decision(count, misses, limit.allowed_miss_ratio, design_effect=shown) == "PASS":
            # Few misses cannot show how far they come together; batches and the values around the quantile can.
            effect = max(effect, quantile_design_effect(latencies_s, run.due_ns, limit.quantile))
            decision = "PASS" if _kept_by_far(run, latencies_s, limit, effect) else "UNSURE"
        counted = (
            f"{misses} of {count} requests over {limit.name}'s {rounded_duration(limit.seconds)} "
            f"({percentage(misses / count, 2)}; {percentage(limit.allowed_miss_ratio, 2)} may), "
            f"which tell as much as {count / effect:.0f} independent ones"
        )
        if decision == "FAIL":
            return "FAIL", counted
        if decision == "UNSURE" and not unsure:
            times = times_longer(count, misses, limit.allowed_miss_ratio, design_effect=effect)
            longer = f"; a run about {rounded(times)} times as long would tell" if times else ""
            unsure = f"{counted}{longer}"
    return ("UNSURE", unsure) if unsure else ("PASS", "every limit is kept")


def _kept_by_far(
    run: CountedRequests, latencies_s: NDArray[np.float64], limit: Limit, least_effect: float
) -> bool:
    """Whether the limit is kept, or a lower one, still above the quantile seen, with as many times the misses allowed.

    How far requests come together at the quantile's own value, milliseconds below a distant limit, says little of the
    limit: where none comes near it, few independent ones are enough; a run is one at least.
    """
    count = len(latencies_s)
    for factor in _margins(limit.allowed_miss_ratio) if count >= MARGIN_REQUESTS else (1.0,):
        level_s = limit.seconds / factor
        misses = int(np.count_nonzero(latencies_s > level_s))
        effect = min(count, max(least_effect, run.design_effect(level_s)))
        if misses > limit.allowed_miss_ratio * count:
            return False
        allowed = limit.allowed_miss_ratio * factor
        if strict_decision(count, misses, allowed, design_effect=effect) == "PASS":
            return True
    return False


def _margins(allowed_miss_ratio: float) -> Iterator[float]:
    """How many times lower a limit may be judged: 1, 2, 4 … and as often as allows MOST_MISSES."""
    factor, most = 1.0, MOST_MISSES / allowed_miss_ratio
    while factor < most:
        yield factor
        factor *= 2.0
    yield most
