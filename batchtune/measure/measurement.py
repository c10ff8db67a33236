"""What one run means: rates, quantiles, errors, the server's side, a verdict, and reasons for distrust."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from batchtune.load.samples import Samples, Status
from batchtune.measure.quantiles import (
    QUANTILES,
    UNDEFINED,
    Z_95,
    Estimate,
    design_effect,
    latency_quantiles,
    quantile_design_effect,
    rate_estimate,
    time_slices,
)
from batchtune.measure.slo import (
    Decision,
    Figure,
    Limit,
    Slo,
    Verdict,
    limits_of,
    primary_limit,
    strict_decision,
    times_longer,
)
from batchtune.measure.validity.caveats import CLIENT_CODES, HOST_CODES, ServerSettings, caveat
from batchtune.measure.validity.disturbances import (
    client_activity,
    client_caveats,
    error_counts,
    own_lag_ns,
    worker_caveats,
)
from batchtune.measure.validity.steady_state import Window, warm_up_needed_s, window_of
from batchtune.plain_values import Coded, as_text, coded
from batchtune.target.telemetry import ServerActivity


def padding_per_element(servers: Iterable[ServerActivity | None]) -> float | None:
    """Elements of padding for each that a request brought, over several runs; None: no server tells of any."""
    known = [server for server in servers if server is not None]
    sent = sum(sum(server.bucket_sent_elements.values()) for server in known)
    padding = sum(sum(server.bucket_padding_elements.values()) for server in known)
    return padding / sent if sent else None


MOST_MISSES = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRequests:
    """The requests due in the window: `counted` selects them from the samples, `latencies_s` is inf without an answer.

    `requests_per_batch` is by the server's account; 1 when it does not tell. `lag_s`, where it is to be taken off, is
    how late the client itself sent each.
    """

    window: Window
    samples: Samples
    counted: NDArray[np.bool_]
    latencies_s: NDArray[np.float64]
    due_ns: NDArray[np.int64]
    requests_per_batch: float
    lag_s: NDArray[np.float64] | None = None

    def by(self, limit: Limit, slo: Slo) -> CountedRequests:
        """What a limit counts in place of whole answers: first tokens, gaps between tokens, or of each request the
        largest share that it takes of any limit, by its own figures."""
        samples, streams = self.samples, self.samples.streams
        match limit.figure:
            case "e2e":
                return self
            case "ttft":
                waits_s = (samples.first_byte_ns - samples.due_ns)[self.counted] / 1e9
                return replace(self, latencies_s=np.where(np.isfinite(self.latencies_s), waits_s, math.inf))
            case "itl":
                values_ns = ended_ns = np.zeros(0, dtype=np.int64)
                if streams is not None:
                    inside = self.window.holds(streams.gap_ended_ns)
                    values_ns, ended_ns = streams.gaps_ns[inside], streams.gap_ended_ns[inside]
                return replace(self, latencies_s=values_ns / 1e9, due_ns=ended_ns, requests_per_batch=1.0)
            case "goodput":
                shares = np.where(np.isfinite(self.latencies_s), 0.0, math.inf)
                for other in limits_of(slo):
                    if other.figure == "itl" and streams is not None:
                        shares = np.maximum(shares, streams.gap_p99_ns[self.counted] / 1e9 / other.seconds)
                    elif other.figure in ("e2e", "ttft"):
                        shares = np.maximum(shares, self.by(other, slo).latencies_s / other.seconds)
                return replace(self, latencies_s=shares)

    def design_effect(self, limit_s: float) -> float:
        """Factor by which requests that come together widen the variance of the share slower than `limit_s`; at least
        that of a batch where few are slower."""
        effect = self.shown_effect(limit_s)
        # Below this many misses their clumping cannot be seen; the mean batch stands in for the design effect.
        few_misses = 10
        few = np.count_nonzero(self.latencies_s > limit_s) < few_misses
        return max(effect, self.requests_per_batch) if few else effect

    def shown_effect(self, limit_s: float) -> float:
        """Design effect as estimated from the misses alone; 1 without misses."""
        return design_effect(self.latencies_s > limit_s, time_slices(self.due_ns))


def counted_requests(samples: Samples, window: Window, activity: ServerActivity | None) -> CountedRequests:
    """Select the latency population: due in the window, answered or not."""
    counted = window.holds(samples.due_ns)
    latencies_s = np.where(samples.status == Status.OK, samples.latency_ns / 1e9, math.inf)[counted]
    per_batch = 1.0
    if activity is not None and activity.mean_batch_rows and len(samples):
        per_batch = max(1.0, activity.mean_batch_rows / float(samples.rows.mean()))
    return CountedRequests(
        window=window,
        samples=samples,
        counted=counted,
        latencies_s=latencies_s,
        due_ns=samples.due_ns[counted],
        requests_per_batch=per_batch,
    )


def judge(run: CountedRequests, slo: Slo, distrust: tuple[Coded, ...]) -> tuple[Verdict, Coded]:
    """The verdict and its reason.

    PASS and FAIL are binomial tests, each wrong for at most 1 in 20 runs at the limit itself. Errors are judged as
    they were seen, without allowing for chance: a cap (measurement.md 2.5 d).
    Distrust never overturns an open-loop PASS: lag and noise only make requests slower. Nor does a late client
    excuse a FAIL that holds when its own lag is taken off.
    """
    if not len(run.due_ns):
        return "UNSURE", coded("none_measured")
    decision, reason = _decide(run, slo)
    closed = run.samples.concurrency is not None
    noise = next((caveat for caveat in distrust if caveat.code in HOST_CODES), None)
    blame = next((caveat for caveat in distrust if caveat.code in CLIENT_CODES), None)
    if (noise is None and blame is None) or (decision == "PASS" and not closed):
        return decision, reason
    if noise is not None:
        return "NOISY", coded("text", text=noise)
    # Client limits that the send lag does not show in full.
    client_untold = frozenset({"client_throttled", "client_busy", "client_near_limit", "worker_slow"})
    if decision == "FAIL" and not any(caveat.code in client_untold for caveat in distrust):
        lag_s = own_lag_ns(run.samples)[run.counted] / 1e9
        if _decide(replace(run, lag_s=lag_s), slo)[0] == "FAIL":
            return "FAIL", coded("not_by_lag", counted=reason)
    return "INVALID", coded("text", text=blame)


def _decide(requests: CountedRequests, slo: Slo) -> tuple[Decision, Coded]:
    count = len(requests.latencies_s)
    failed = int(np.count_nonzero(np.isinf(requests.latencies_s)))
    if failed > slo.error_ratio * count:
        return "FAIL", coded("too_many_fail", failed=failed, requests=count, allowed_ratio=slo.error_ratio)
    unsure: Coded | None = None
    for limit in limits_of(slo):
        run = requests.by(limit, slo)
        latencies_s = run.latencies_s
        if requests.lag_s is not None and limit.figure in ("e2e", "ttft"):
            latencies_s = latencies_s - requests.lag_s
        count = len(latencies_s)
        if not count:
            return "UNSURE", coded("no_answer_has", name=limit.name)
        misses = int(np.count_nonzero(latencies_s > limit.seconds))
        effect = run.design_effect(limit.seconds)
        decision = strict_decision(count, misses, limit.allowed_miss_ratio, design_effect=effect)
        shown = run.shown_effect(limit.seconds)
        if strict_decision(count, misses, limit.allowed_miss_ratio, design_effect=shown) == "PASS":
            # Few misses cannot show how far they come together; batches and the values around the quantile can.
            effect = max(effect, quantile_design_effect(latencies_s, run.due_ns, limit.quantile))
            decision = "PASS" if _kept_by_far(run, latencies_s, limit, effect) else "UNSURE"
        counted = coded(
            "requests_over",
            misses=misses,
            requests=count,
            what=coded("gaps" if limit.figure == "itl" else "requests"),
            bound=_bound(limit),
            miss_ratio=misses / count,
            allowed_ratio=limit.allowed_miss_ratio,
            independent=round(count / effect),
        )
        if decision == "FAIL":
            return "FAIL", counted
        if decision == "UNSURE" and unsure is None:
            times = times_longer(count, misses, limit.allowed_miss_ratio, design_effect=effect)
            unsure = coded("longer_would_decide", counted=counted, times=times) if times else counted
    return ("UNSURE", unsure) if unsure is not None else ("PASS", coded("limits_met"))


def _bound(limit: Limit) -> Coded:
    """`p95's 20 ms`."""
    if limit.figure == "goodput":
        return coded("a_limit")
    return coded("limit_of", name=limit.name, limit_s=limit.seconds)


def _kept_by_far(
    run: CountedRequests, latencies_s: NDArray[np.float64], limit: Limit, least_effect: float
) -> bool:
    """Whether the limit is kept, or a lower one, still above the quantile seen, with as many times the misses allowed.

    How far requests come together at the quantile's own value, milliseconds below a distant limit, says little of the
    limit: where none comes near it, few independent ones are enough; a run is one at least.
    """
    count = len(latencies_s)
    # A PASS may be shown at a lower limit: so many times lower, with as many times the misses allowed, up to
    # this share. That holds where the tail falls at least as fast as one over the latency, as that of every
    # queue does. In runs of at least so many requests the false PASSes at the exact limit stay near 5 %, in
    # streams of queues, bursts and drift (the part `limits` of tests/benchmarks/twin/measure_coverage.py); with
    # 100 requests of a drifting host they were 12 %.
    margin_requests = 300
    for factor in _margins(limit.allowed_miss_ratio) if count >= margin_requests else (1.0,):
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


SLOWER_RATIO: Final = 1.1
"""From which ratio a replica is worth a look: placement alone makes equal ones differ by some percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFigures:
    """One replica over the window, as a Measurement has them of all; `requests` were due in it."""

    endpoint: str
    requests: int
    throughput_rps: float
    p50_s: Estimate
    p95_s: Estimate
    error_ratio: float


def endpoint_figures(samples: Samples, window: Window) -> tuple[EndpointFigures, ...]:
    """The figures of each endpoint, in their order; none where all requests went to one."""
    return tuple(_figures_of(samples, window, number) for number in range(len(samples.endpoints)))


def endpoint_caveats(figures: Sequence[EndpointFigures]) -> list[Coded]:
    """Name the replica that is worse than every other: by failures, else by p50 or p95.

    Slower is one whose 95 % interval lies beyond the intervals of all others, and whose value is SLOWER_RATIO times
    the next. Two that do not overlap are a difference of 2.8 standard errors: by chance 1 in 170 pairs of equal ones.
    """
    if len(figures) < 2:
        return []
    worst, after = sorted(figures, key=lambda replica: replica.error_ratio, reverse=True)[:2]
    others = len(figures) - 1
    failing_more = 0.01
    if worst.error_ratio - after.error_ratio > failing_more:
        ratios = {"error_ratio": worst.error_ratio, "next_ratio": after.error_ratio}
        return [caveat("endpoint_failing", endpoint=worst.endpoint, others=others, **ratios)]
    quantiles: tuple[Literal["p95", "p50"], ...] = ("p95", "p50")
    for quantile in quantiles:
        worst, after = sorted(figures, key=lambda replica: _value(replica, quantile), reverse=True)[:2]
        if _is_slower(worst, [replica for replica in figures if replica is not worst], quantile):
            times = {"endpoint_s": _value(worst, quantile), "next_s": _value(after, quantile)}
            words = {"endpoint": worst.endpoint, "others": others, "quantile": quantile}
            return [caveat("endpoint_slow", **words, **times)]
    return []


def _figures_of(samples: Samples, window: Window, number: int) -> EndpointFigures:
    own = samples.endpoint == number
    due = own & window.holds(samples.due_ns)
    good = samples.status == Status.OK
    latencies_s = np.where(good, samples.latency_ns / 1e9, math.inf)[due]
    quantiles = latency_quantiles(latencies_s, samples.due_ns[due])
    answered = int(np.count_nonzero(own & good & window.holds(samples.done_ns)))
    count = int(np.count_nonzero(due))
    return EndpointFigures(
        endpoint=samples.endpoints[number],
        requests=samples.one_in * count,
        throughput_rps=samples.one_in * answered / window.seconds if window.seconds else math.nan,
        p50_s=quantiles["p50"],
        p95_s=quantiles["p95"],
        error_ratio=int(np.count_nonzero(due & ~good)) / count if count else 0.0,
    )


def _is_slower(
    worst: EndpointFigures, others: Sequence[EndpointFigures], quantile: Literal["p50", "p95"]
) -> bool:
    highest_s = max(_estimate(replica, quantile).high for replica in others)
    next_s = max(_value(replica, quantile) for replica in others)
    own = _estimate(worst, quantile)
    return math.isfinite(own.value) and own.low > highest_s and own.value > SLOWER_RATIO * next_s


def _estimate(figures: EndpointFigures, quantile: Literal["p50", "p95"]) -> Estimate:
    return figures.p95_s if quantile == "p95" else figures.p50_s


def _value(figures: EndpointFigures, quantile: Literal["p50", "p95"]) -> float:
    """Its value; 0 where nothing was asked of it."""
    value = _estimate(figures, quantile).value
    return 0.0 if math.isnan(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """Of streamed answers, by the server's `usage`: output tokens/s of the good answers that ended in the window, mean
    tokens of the prompts and of the answers, and the share of answers without usage."""

    output_per_s: Estimate
    prompt_mean: float
    output_mean: float
    untold_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run summed up over its window.

    `requests` were due in the window; `throughput_*` and `goodput_rps` count good answers that arrived in it
    (goodput: within the SLO's limit). In `latency_s` a request without a good answer counts as infinitely slow;
    `latency_mean_s` is over good answers. `errors` counts by class. `misses` are the requests over the SLO's primary
    limit (failed ones included; without an SLO only these), `design_effect` says how far they come together.
    `latency_s` has of streamed answers `ttft_p50` … and `itl_p50` … too, with a limit on goodput also the share of
    requests that miss it; `tokens` are theirs alone. `verdict` is None without an SLO. `endpoints`: the same by
    replica, where requests went to several. `canary_s` is how long a fixed loop took on the host, before or after the
    run, whichever was faster; None: nobody timed one. Where of a load one request in so many was kept
    (`Samples.one_in`), counts and `design_effect` are multiplied by that.
    """

    requests: int
    window_s: float
    offered_rps: float | None
    concurrency: int | None
    throughput_rps: Estimate
    throughput_rows_per_s: Estimate
    goodput_rps: float
    latency_s: dict[str, Estimate]
    latency_mean_s: float
    error_ratio: float
    errors: dict[str, int]
    send_lag_p99_s: float
    client_cpu_ratio: float
    client_cpu_per_request_s: float
    misses: int = 0
    design_effect: float = 1.0
    server: ServerActivity | None = None
    verdict: Verdict | None = None
    verdict_reason: Coded = field(default=as_text(""))
    caveats: tuple[Coded, ...] = field(default=())
    endpoints: tuple[EndpointFigures, ...] = ()
    canary_s: float | None = None
    tokens: TokenFigures | None = None

    @property
    def queue_mean_s(self) -> float | None:
        """Mean wait for a batch, by the server's account."""
        return None if self.server is None else self.server.queue_wait_mean_s

    @property
    def compute_mean_s(self) -> float | None:
        """Mean execution time that a row sees: batches weighted by their rows."""
        if self.server is None or not self.server.execution_s_by_rows:
            return None
        counts = self.server.batches_by_rows
        rows = {size: size * counts.get(size, 0) for size in self.server.execution_s_by_rows}
        total = sum(rows.values())
        times = self.server.execution_s_by_rows
        return sum(rows[size] * times[size] for size in rows) / total if total else None

    @property
    def overhead_mean_s(self) -> float | None:
        """What is left of the mean latency: the wire, parsing, the event loop, the client.

        At least 0: the server's account covers the warm-up too, and may be of slower requests.
        """
        if self.queue_mean_s is None or self.compute_mean_s is None:
            return None
        return max(0.0, self.latency_mean_s - self.queue_mean_s - self.compute_mean_s)


def measure(
    samples: Samples,
    *,
    warm_up_s: float,
    slo: Slo | None,
    activity: ServerActivity | None = None,
    duration_s: float | None = None,
    window: Window | None = None,
    client_max_rps: float | None = None,
    notes: tuple[Coded, ...] = (),
) -> Measurement:
    """Sum up one run.

    `duration_s` is the schedule's length with its warm-up (None: up to the last request due); `window` overrules
    both; `client_max_rps` is what the client can send to a null server; `notes` are caveats of the caller's, such as
    the host's and `warm_up_caveats`.
    """
    window = window or window_of(samples, warm_up_s=warm_up_s, duration_s=duration_s)
    activity = None if activity is None else _while_loaded(activity, samples.wall_s)
    run = counted_requests(samples, window, activity)
    good, one_in = samples.status == Status.OK, samples.one_in
    answered = run.latencies_s[np.isfinite(run.latencies_s)]
    latency_s = latency_quantiles(run.latencies_s, run.due_ns)
    limit = None if slo is None else primary_limit(slo)
    limit_s = limit.seconds if limit is not None else _finite(latency_s["p95"].value)
    watched = run if limit is None or slo is None else run.by(limit, slo)
    streamed = {} if samples.streams is None else streamed_figures(run, slo)
    client = client_activity(samples, window)
    done_ns, ends = samples.done_ns[good], (window.start_ns, window.end_ns)
    rows = samples.rows[good].astype(np.float64)
    throughput_rps = rate_estimate(done_ns, ends, weights=np.full(len(done_ns), float(one_in)))
    errors = error_counts(samples, window)
    noted = (
        *client_caveats(
            client, limit_s=limit_s, rate_rps=throughput_rps.value, client_max_rps=client_max_rps
        ),
        *worker_caveats(samples, window, limit_s=limit_s),
        *_own_caveats(run, window, errors),
        *_thinned_caveats(samples),
        *_server_caveats(activity),
        *notes,
    )
    endpoints = endpoint_figures(samples, window)
    verdict, reason = (None, as_text("")) if slo is None else judge(run, slo, noted)
    distrust = (*noted, *endpoint_caveats(endpoints), *_thin_caveats(run, latency_s, verdict))
    return Measurement(
        requests=one_in * len(run.due_ns),
        window_s=window.seconds,
        offered_rps=samples.offered_rps,
        concurrency=samples.concurrency,
        throughput_rps=throughput_rps,
        throughput_rows_per_s=rate_estimate(done_ns, ends, weights=one_in * rows),
        goodput_rps=one_in * _goodput_rps(run, good, window, slo),
        latency_s=latency_s | streamed,
        latency_mean_s=float(answered.mean()) if len(answered) else math.nan,
        error_ratio=sum(errors.values()) / (one_in * len(run.due_ns)) if len(run.due_ns) else 0.0,
        errors=errors,
        send_lag_p99_s=client.send_lag_p99_s,
        client_cpu_ratio=client.cpu_ratio,
        client_cpu_per_request_s=client.cpu_per_request_s,
        misses=one_in
        * int(np.count_nonzero(watched.latencies_s > (limit.seconds if limit is not None else 1e9))),
        design_effect=one_in * watched.design_effect(limit_s),
        server=activity,
        verdict=verdict,
        verdict_reason=reason,
        caveats=distrust,
        endpoints=endpoints,
        tokens=None if samples.streams is None else _tokens(samples, good, window),
    )


STREAMED_QUANTILES: Final = {name: QUANTILES[name] for name in ("p50", "p95", "p99")}


def streamed_figures(run: CountedRequests, slo: Slo | None) -> dict[str, Estimate]:
    """Quantiles of the time to the first token and of the gaps, and of goodput the share of requests that miss."""
    promise = slo or _NoSlo()
    figures: dict[str, Estimate] = {}
    streamed: tuple[Figure, ...] = ("ttft", "itl")
    for figure in streamed:
        waits = run.by(Limit(name=figure, quantile=0.5, seconds=1.0, figure=figure), promise)
        quantiles = latency_quantiles(waits.latencies_s, waits.due_ns, STREAMED_QUANTILES)
        figures |= {f"{figure}_{name}": estimate for name, estimate in quantiles.items()}
    for limit in limits_of(promise):
        if limit.figure == "goodput":
            figures[limit.name] = _share_beyond(run.by(limit, promise))
    return figures


@dataclass(frozen=True, slots=True)
class _NoSlo:
    error_ratio: float = 1.0

    def limits(self) -> Mapping[str, float]:
        return {}


def _share_beyond(run: CountedRequests) -> Estimate:
    """Of the requests that miss a limit, with Wilson's interval, widened by the design effect."""
    count = len(run.latencies_s)
    if not count:
        return UNDEFINED
    share = float(np.mean(run.latencies_s > 1.0))
    effective = count / run.design_effect(1.0)
    z2 = Z_95**2 / effective
    centre, half = (share + z2 / 2) / (1 + z2), math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
    return Estimate(value=share, low=max(centre - half, 0.0), high=min(centre + half, 1.0))


def _tokens(samples: Samples, good: NDArray[np.bool_], window: Window) -> TokenFigures:
    streams = samples.streams
    if streams is None:
        raise ValueError("only streamed answers have tokens")
    has_usage = good & (streams.prompt_tokens + streams.output_tokens > 0)
    counted = good & window.holds(samples.due_ns)
    ends = (window.start_ns, window.end_ns)
    weights = samples.one_in * streams.output_tokens[good].astype(np.float64)
    return TokenFigures(
        output_per_s=rate_estimate(samples.done_ns[good], ends, weights=weights),
        prompt_mean=_mean(streams.prompt_tokens[counted]),
        output_mean=_mean(streams.output_tokens[counted]),
        untold_ratio=1.0 - float(has_usage.sum()) / max(int(good.sum()), 1),
    )


def _mean(values: NDArray[np.int64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _while_loaded(activity: ServerActivity, wall_s: float) -> ServerActivity:
    """The server's account is read a little before and after the load, when it is idle: that time does not count."""
    if not 0.0 < wall_s < activity.duration_s:
        return activity

    def of_the_load(ratio: float | None) -> float | None:
        return None if ratio is None else min(ratio * activity.duration_s / wall_s, max(ratio, 1.0))

    return replace(
        activity,
        duration_s=wall_s,
        device_busy_ratio=of_the_load(activity.device_busy_ratio),
        gpu_busy_ratio=of_the_load(activity.gpu_busy_ratio),
    )


def _own_caveats(run: CountedRequests, window: Window, errors: Mapping[str, int]) -> list[Coded]:
    requests = len(run.due_ns)
    if not requests:
        return [caveat("nothing_measured", window_s=window.seconds, warm_up_s=window.start_ns / 1e9)]
    caveats = []
    if errors:
        classes = ", ".join(f"{name} {count}" for name, count in errors.items())
        first = _first_answer(run.samples, errors)
        failed = sum(errors.values())
        figures = {"errors": failed, "requests": requests * run.samples.one_in}
        caveats.append(caveat("errors", **figures, classes=classes, first=first))
    if not window.steady:
        caveats.append(caveat("not_steady"))
    done = int(np.count_nonzero(window.holds(run.samples.done_ns)))
    if run.samples.concurrency is None and done < 0.97 * requests and requests - done > 20:
        caveats.append(caveat("growing_backlog", answered_ratio=done / requests))
    if run.samples.stopped_early:
        caveats.append(caveat("stopped_early", elapsed_s=window.end_ns / 1e9))
    return caveats


def _thinned_caveats(samples: Samples) -> list[Coded]:
    one_in = samples.one_in
    figures = {"one_in": one_in, "requests": one_in * len(samples), "recorded": len(samples)}
    return [caveat("thinned", **figures, failures=samples.failures or 0)] if one_in > 1 else []


def _first_answer(samples: Samples, errors: Mapping[str, int]) -> Coded:
    """What the first failure of the commonest class with a text said, in a line; empty where none said anything."""
    shown_text_max_chars = 160
    for name in errors:
        text = samples.error_texts.get(name.upper(), "")
        line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
        if line:
            shown = line if len(line) <= shown_text_max_chars else f"{line[:shown_text_max_chars]} [...]"
            return coded("first_failure", name=name, answer=shown)
    return as_text("")


def warm_up_caveats(window: Window, activity: ServerActivity, settings: ServerSettings) -> tuple[Coded, ...]:
    """Say so where the warm-up was shorter than these settings call for.

    The rule of measurement.md 2.2 but for its one second, which is for servers that were never loaded before."""
    if not activity.batches:
        return ()
    needed_s = warm_up_needed_s(
        at_least_s=0.0,
        batch_timeout_s=settings.batch_timeout_s,
        batch_s=max(activity.execution_s_by_rows.values(), default=0.0),
        batch_threads=settings.batch_threads,
        batch_rows=activity.mean_batch_rows or 1.0,
        rows_per_s=activity.rows / activity.duration_s,
    )
    warm_up_s = window.start_ns / 1e9
    short = warm_up_s < needed_s
    return (caveat("warm_up_short", warm_up_s=warm_up_s, needed_s=needed_s),) if short else ()


def _thin_caveats(
    run: CountedRequests, latency_s: Mapping[str, Estimate], verdict: Verdict | None
) -> list[Coded]:
    """Too few requests for p95 or p99; too few independent ones where that leaves a question open.

    Intervals and verdicts allow for requests that come together: a limit that is kept or missed in spite of it is.
    """
    requests = len(run.due_ns)
    if not requests:
        return []
    for name, needed in (("p95", 72), ("p99", 368)):
        bound = latency_s[name]
        if math.isfinite(bound.value) and math.isinf(bound.high) and requests < 2 * needed:
            return [caveat("few_requests", requests=requests, quantile=name)]
    effective = requests / run.design_effect(latency_s["p95"].value)
    # The fewest independent requests that bound p95 from above at 95 %: 0.95^72 = 2.5 %.
    few_independent = 72
    if verdict in (None, "UNSURE") and effective < min(few_independent, requests / 2):
        return [caveat("correlated", effective=round(effective), requests=requests)]
    return []


def _server_caveats(activity: ServerActivity | None) -> list[Coded]:
    if activity is not None and activity.went_back:
        return [caveat("counters_went_back")]
    if activity is None or not (activity.batches or activity.requests_by_status):
        return [caveat("no_server_counters")]
    return [caveat("emulated_device")] if activity.emulated else []


def _goodput_rps(run: CountedRequests, good: NDArray[np.bool_], window: Window, slo: Slo | None) -> float:
    """Of whole answers those within the primary limit, of streams those within every limit by their own figures."""
    samples, limit = run.samples, None if slo is None else primary_limit(slo)
    in_time = good & window.holds(samples.done_ns)
    if slo is not None and limit is not None and samples.streams is not None:
        everything = replace(
            run,
            counted=np.ones(len(samples), dtype=np.bool_),
            latencies_s=np.where(good, samples.latency_ns / 1e9, math.inf),
        )
        every = Limit(name="goodput", quantile=0.5, seconds=1.0, figure="goodput")
        in_time &= everything.by(every, slo).latencies_s <= 1.0
    elif limit is not None:
        in_time &= samples.latency_ns <= limit.seconds * 1e9
    return int(np.count_nonzero(in_time)) / window.seconds if window.seconds else math.nan


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
