"""Sums up one run: rates, quantiles, errors, the server's side, a verdict, and reasons for distrust."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from batchtune.load.samples import Samples, Status, Streams
from batchtune.measure.caveats import (
    CLIENT_CODES,
    HOST_CODES,
    EndpointFigures,
    ServerSettings,
    caveat,
    client_activity,
    client_caveats,
    endpoint_caveats,
    endpoint_figures,
    error_counts,
    fails_by_itself,
    has_short_client,
    own_lag_ns,
    worker_caveats,
)
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
    Verdict,
    Window,
    counted_in,
    keeps,
    limits_of,
    primary_limit,
    strict_decision,
    times_longer,
    warm_up_needed_s,
    window_of,
)
from batchtune.plain_values import Coded, as_text, coded
from batchtune.scenario.spec.check import SloSpec
from batchtune.target.telemetry import ServerActivity


def padding_per_element(servers: Iterable[ServerActivity | None]) -> float | None:
    """Return the elements of padding divided by the elements that requests brought, over several runs (0.5: half as
    much padding as data); None: no server counted any."""
    known = [server for server in servers if server is not None]
    sent = sum(sum(server.bucket_sent_elements.values()) for server in known)
    padding = sum(sum(server.bucket_padding_elements.values()) for server in known)
    return padding / sent if sent else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRequests:
    """The requests that a latency figure counts, answered or not (`counted_in` selects them)."""

    window: Window
    # All requests of the run.
    samples: Samples
    # Which of the samples count, shape (len(samples),).
    counted: NDArray[np.bool_]
    # Latency of each counted request, inf without a good answer; or what `by` puts in its place, shape (n,).
    latencies_s: NDArray[np.float64]
    # When each was due, in ns since the start of the run, shape (n,).
    due_ns: NDArray[np.int64]
    # Mean requests of a batch by the server's counters; 1 where it reports none.
    requests_per_batch: float
    # How late the client itself sent each, to be taken off its latency, shape (n,); None: nothing is taken
    # off.
    lag_s: NDArray[np.float64] | None = None

    def by(self, limit: Limit, limits: Sequence[Limit] = ()) -> CountedRequests:
        """Return these requests with their latencies replaced by the values that `limit` compares, which depend on its
        figure.

        e2e: the latencies, unchanged. ttft: the time to the first token in seconds, inf without a good answer. itl: the
        gaps between tokens in seconds, one value for each gap that ended in the window. goodput: for each request its
        largest ratio figure / limit over `limits`, without unit; above 1 a limit is missed, inf without a good answer.
        """
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
                for other in limits:
                    if other.figure == "itl" and streams is not None:
                        shares = np.maximum(shares, streams.gap_p99_ns[self.counted] / 1e9 / other.seconds)
                    elif other.figure in ("e2e", "ttft"):
                        shares = np.maximum(shares, self.by(other).latencies_s / other.seconds)
                return replace(self, latencies_s=shares)

    def design_effect(self, limit_s: float) -> float:
        """Return the design effect of the share of values above `limit_s`: the factor, at least 1, by which its
        variance exceeds that for independent requests, since slow requests come together. With fewer than 10 values
        above, it is at least the mean number of requests in a batch."""
        effect = self.shown_effect(limit_s)
        # Below this many misses their clumping cannot be seen; the mean batch replaces the design effect.
        few_misses = 10
        few = np.count_nonzero(self.latencies_s > limit_s) < few_misses
        return max(effect, self.requests_per_batch) if few else effect

    def shown_effect(self, limit_s: float) -> float:
        """Return the design effect of the share of values above `limit_s`, estimated from these requests
        alone; 1.14 where none or all are above."""
        return design_effect(self.latencies_s > limit_s, time_slices(self.due_ns))


def counted_requests(samples: Samples, window: Window, activity: ServerActivity | None) -> CountedRequests:
    """Select the requests that count in `window`, answered or not; `activity`: from which the mean requests of a batch
    follow."""
    counted = counted_in(samples, window)
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


def judge(
    run: CountedRequests, slo: SloSpec, distrust: tuple[Coded, ...], latency_s: Mapping[str, Estimate]
) -> tuple[Verdict, Coded, Decision | None]:
    """Return (verdict, reason, decision) of a run under `slo`; `distrust`: the run's caveats; `latency_s`: its
    quantiles by name.

    PASS and FAIL are binomial tests, each wrong for at most 1 in 20 runs at the limit itself; UNSURE: the tests show
    neither, or no request was due in the window. The error ratio is compared as it was seen, without allowing for
    chance.
    A caveat on the host turns the verdict into NOISY, a caveat on the client into INVALID. Exceptions: a PASS of an
    open loop stays, since lag and noise only make requests slower; so does, with a late or busy client, an UNSURE whose
    quantiles are within the limits; on a noisy host a FAIL by the server's own errors (`fails_by_itself`); and with a
    late client a FAIL that holds when its own lag is subtracted. `decision`: what a NOISY or INVALID run would be
    without its caveat; None for any other.
    """
    if not len(run.due_ns):
        return "UNSURE", coded("none_measured"), None
    decision, reason = _decide(run, slo)
    failing = fails_by_itself(error_counts(run.samples, run.window), run.samples.one_in * len(run.due_ns))
    blames_host = not (failing and reason.code == "too_many_fail")
    noise = next((caveat for caveat in distrust if blames_host and caveat.code in HOST_CODES), None)
    blame = next((caveat for caveat in distrust if caveat.code in CLIENT_CODES), None)
    kept = decision == "PASS"
    if decision == "UNSURE" and noise is None:
        kept = keeps(slo, {name: quantile.value for name, quantile in latency_s.items()}, slo.error_ratio)
    if (noise is None and blame is None) or (kept and run.samples.concurrency is None):
        return decision, reason, None
    if noise is not None:
        return "NOISY", coded("text", text=noise), decision
    if decision == "FAIL" and not has_short_client(distrust):
        lag_s = own_lag_ns(run.samples)[run.counted] / 1e9
        if _decide(replace(run, lag_s=lag_s), slo)[0] == "FAIL":
            return "FAIL", coded("not_by_lag", counted=reason), None
    return "INVALID", coded("text", text=blame), decision


def _decide(requests: CountedRequests, slo: SloSpec) -> tuple[Decision, Coded]:
    count = len(requests.latencies_s)
    failed = int(np.count_nonzero(np.isinf(requests.latencies_s)))
    if failed > slo.error_ratio * count:
        return "FAIL", coded("too_many_fail", failed=failed, requests=count, allowed_ratio=slo.error_ratio)
    unsure: Coded | None = None
    limits = limits_of(slo)
    for limit in limits:
        run = requests.by(limit, limits)
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
        figures = {
            "misses": misses,
            "requests": count,
            "what": coded("gaps" if limit.figure == "itl" else "requests"),
            "bound": _bound(limit),
            "miss_ratio": misses / count,
            "allowed_ratio": limit.allowed_miss_ratio,
        }
        independent = round(count / effect)
        counted = coded("independent_over", **figures)
        if independent < count:
            counted = coded("requests_over", **figures, independent=independent)
        if decision == "FAIL":
            return "FAIL", counted
        if decision == "UNSURE" and unsure is None:
            times = times_longer(count, misses, limit.allowed_miss_ratio, design_effect=effect)
            unsure = coded("longer_would_decide", counted=counted, times=times) if times else counted
    return ("UNSURE", unsure) if unsure is not None else ("PASS", coded("limits_met"))


def _bound(limit: Limit) -> Coded:
    """Name a limit within a reason, as in `p95's 20 ms`."""
    if limit.figure == "goodput":
        return coded("a_limit")
    return coded("limit_of", name=limit.name, limit_s=limit.seconds)


def _kept_by_far(
    run: CountedRequests, latencies_s: NDArray[np.float64], limit: Limit, least_effect: float
) -> bool:
    """Whether a PASS is shown at the limit, or at a limit some times lower with as many times the misses
    allowed.

    Requests come together most near the quantile's own value. Where that lies far below the limit, few
    independent requests are enough. `least_effect` is the smallest design effect to assume; a run is one
    independent request at least.
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
    """Yield the factors by which a limit may be lowered: 1, 2, 4 … and last the one at which 95 % of the
    requests may miss it."""
    factor, most = 1.0, 0.95 / allowed_miss_ratio
    while factor < most:
        yield factor
        factor *= 2.0
    yield most


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """Figures of streamed answers, from the token counts (`usage`) that the server sends with them."""

    # Output tokens per second of the good answers that ended in the window, scaled up from those with token
    # counts; UNDEFINED where no answer has output tokens.
    output_per_s: Estimate
    # Mean tokens of a prompt, over the good answers due in the window with token counts; nan without any.
    prompt_mean: float
    # Mean tokens of an answer, over the same answers; nan without any, and where none has output tokens.
    output_mean: float
    # Share of all good answers for which the server sent no token counts.
    untold_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run summed up over its window.

    Where only one in so many requests was recorded (`Samples.one_in`), counts, rates and `design_effect` are multiplied
    by that number, so that they are of all requests.
    """

    # Requests due in the window, answered or not.
    requests: int
    window_s: float
    # Mean rate of the schedule; None: a closed loop.
    offered_rps: float | None
    # Clients of a closed loop; None: an open loop.
    concurrency: int | None
    # Good answers that arrived in the window, per second.
    throughput_rps: Estimate
    throughput_rows_per_s: Estimate
    # Good answers per second that arrived in the window within the SLO's primary limit; of streamed answers,
    # within every limit. Without an SLO all good answers.
    goodput_rps: float
    # By quantile, p50 to p99.9, seconds; inf where that many requests had no good answer. Of streamed answers
    # also `ttft_p50` … and `itl_p50` …, and where goodput is limited, `goodput`: the share of requests that
    # miss.
    latency_s: dict[str, Estimate]
    # Mean over the good answers; nan without any.
    latency_mean_s: float
    # Share of `requests` without a good answer.
    error_ratio: float
    # Requests without a good answer by class of error in lower case, the commonest first.
    errors: dict[str, int]
    # How late the client itself sent; nan when nothing was sent.
    send_lag_p99_s: float
    # Share of the client's CPU cores that it used, 0 to 1.
    client_cpu_ratio: float
    client_cpu_per_request_s: float
    # Requests over the SLO's primary limit, failed ones included; without a limit the failed ones.
    misses: int = 0
    # Factor by which the variance of the share of misses exceeds that of independent requests.
    design_effect: float = 1.0
    # What the server counted; None: nobody read its counters.
    server: ServerActivity | None = None
    # None: without an SLO.
    verdict: Verdict | None = None
    verdict_reason: Coded = field(default=as_text(""))
    # Where the verdict is NOISY or INVALID, what it would be by the same figures without that caveat; None: any other
    # verdict, or an older file.
    decision: Decision | None = None
    caveats: tuple[Coded, ...] = field(default=())
    # Figures by replica, where requests went to several.
    endpoints: tuple[EndpointFigures, ...] = ()
    # How long a fixed loop took on the host, before or after the run, whichever was faster; None: not timed.
    canary_s: float | None = None
    # Of streamed answers only.
    tokens: TokenFigures | None = None

    @property
    def queue_mean_s(self) -> float | None:
        """Mean seconds that a request waits for its batch, by the server's counters; None: not reported."""
        return None if self.server is None else self.server.queue_wait_mean_s

    @property
    def compute_mean_s(self) -> float | None:
        """Mean execution time that a row sees, in seconds: the mean over batches, weighted by their rows; None: not
        reported."""
        if self.server is None or not self.server.execution_s_by_rows:
            return None
        counts = self.server.batches_by_rows
        rows = {size: size * counts.get(size, 0) for size in self.server.execution_s_by_rows}
        total = sum(rows.values())
        times = self.server.execution_s_by_rows
        return sum(rows[size] * times[size] for size in rows) / total if total else None

    @property
    def overhead_mean_s(self) -> float | None:
        """Mean latency minus mean wait and execution, in seconds: the time of the wire, parsing, the event loop and the
        client. None: the server does not report wait or execution.

        At least 0: the server's counters cover the warm-up too, whose requests may have been slower.
        """
        if self.queue_mean_s is None or self.compute_mean_s is None:
            return None
        return max(0.0, self.latency_mean_s - self.queue_mean_s - self.compute_mean_s)


def measure(
    samples: Samples,
    *,
    warm_up_s: float,
    slo: SloSpec | None,
    activity: ServerActivity | None = None,
    duration_s: float | None = None,
    window: Window | None = None,
    client_max_rps: float | None = None,
    notes: tuple[Coded, ...] = (),
) -> Measurement:
    """Sum up one run: its figures over the window, its verdict by `slo` (None: no verdict), its caveats.

    `window`: the measured window; None: from `warm_up_s` to `duration_s`, the schedule's length with its warm-up (None:
    to the last request due). `activity`: what the server counted during the run; None: unknown. `client_max_rps`: the
    rate at which the client can send to a null server; None: unknown. `notes`: further caveats, such as the host's and
    those of `warm_up_caveats`.
    """
    window = window or window_of(samples, warm_up_s=warm_up_s, duration_s=duration_s)
    activity = None if activity is None else _while_loaded(activity, samples.wall_s)
    run = counted_requests(samples, window, activity)
    good, one_in = samples.status == Status.OK, samples.one_in
    answered = run.latencies_s[np.isfinite(run.latencies_s)]
    latency_s = latency_quantiles(run.latencies_s, run.due_ns)
    limits = () if slo is None else limits_of(slo)
    limit = None if slo is None else primary_limit(slo)
    limit_s = limit.seconds if limit is not None else _finite(latency_s["p95"].value)
    watched = run if limit is None else run.by(limit, limits)
    latency_s |= {} if samples.streams is None else streamed_figures(run, limits)
    client = client_activity(samples, window)
    done_ns, ends = samples.done_ns[good], (window.start_ns, window.end_ns)
    rows = samples.rows[good].astype(np.float64)
    throughput_rps = rate_estimate(done_ns, ends, weights=np.full(len(done_ns), float(one_in)))
    errors = error_counts(samples, window)
    tokens = None if samples.streams is None else _tokens(samples, good, window)
    noted = (
        *client_caveats(
            client, limit_s=limit_s, rate_rps=throughput_rps.value, client_max_rps=client_max_rps
        ),
        *worker_caveats(samples, window, limit_s=limit_s),
        *_own_caveats(run, window, errors),
        *_thinned_caveats(samples),
        *_token_caveats(samples.streams, tokens, answers=one_in * int(good.sum())),
        *_server_caveats(activity),
        *notes,
    )
    endpoints = endpoint_figures(samples, window)
    verdict, reason, decision = judge(run, slo, noted, latency_s) if slo else (None, as_text(""), None)
    distrust = (*noted, *endpoint_caveats(endpoints), *_thin_caveats(run, latency_s, verdict))
    return Measurement(
        requests=one_in * len(run.due_ns),
        window_s=window.seconds,
        offered_rps=samples.offered_rps,
        concurrency=samples.concurrency,
        throughput_rps=throughput_rps,
        throughput_rows_per_s=rate_estimate(done_ns, ends, weights=one_in * rows),
        goodput_rps=one_in * _goodput_rps(run, good, window, slo),
        latency_s=latency_s,
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
        decision=decision,
        caveats=distrust,
        endpoints=endpoints,
        tokens=tokens,
    )


def streamed_figures(run: CountedRequests, limits: Sequence[Limit]) -> dict[str, Estimate]:
    """Return name -> quantile, in seconds, of p50, p95 and p99: `ttft_p50` … of the time to the first token, `itl_p50`
    … of the gaps between tokens. If one of `limits` is on goodput also `goodput`, the share of requests that miss a
    limit."""
    quantiles = {name: QUANTILES[name] for name in ("p50", "p95", "p99")}
    figures: dict[str, Estimate] = {}
    streamed: tuple[Figure, ...] = ("ttft", "itl")
    for figure in streamed:
        waits = run.by(Limit(name=figure, quantile=0.5, seconds=1.0, figure=figure))
        estimates = latency_quantiles(waits.latencies_s, waits.due_ns, quantiles)
        figures |= {f"{figure}_{name}": estimate for name, estimate in estimates.items()}
    for limit in limits:
        if limit.figure == "goodput":
            figures[limit.name] = _share_beyond(run.by(limit, limits))
    return figures


def _share_beyond(run: CountedRequests) -> Estimate:
    """Estimate the share of values above 1, with Wilson's 95 % interval widened by the design effect;
    UNDEFINED without values."""
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
    counted = has_usage & window.holds(samples.due_ns)
    ends = (window.start_ns, window.end_ns)
    output_tokens = streams.output_tokens[has_usage]
    answers_per_usage = int(good.sum()) / max(len(output_tokens), 1)
    weights = (samples.one_in * answers_per_usage * output_tokens).astype(np.float64)
    rate = rate_estimate(samples.done_ns[has_usage], ends, weights=weights)
    has_output = bool(output_tokens.any())
    return TokenFigures(
        output_per_s=rate if has_output else UNDEFINED,
        prompt_mean=_mean(streams.prompt_tokens[counted]),
        output_mean=_mean(streams.output_tokens[counted]) if has_output else math.nan,
        untold_ratio=float((good & ~has_usage).sum()) / max(int(good.sum()), 1),
    )


def _token_caveats(streams: Streams | None, tokens: TokenFigures | None, *, answers: int) -> list[Coded]:
    if streams is None or tokens is None:
        return []
    caveats = []
    if tokens.untold_ratio:
        caveats.append(caveat("tokens_untold", untold_ratio=tokens.untold_ratio))
    if streams.textless:
        share = coded(
            "part_of", part=streams.textless, whole=answers, part_ratio=streams.textless / max(answers, 1)
        )
        caveats.append(caveat("streams_textless", answers=share))
    elif tokens.output_mean > 1.5 and not len(streams.gaps_ns):
        caveats.append(caveat("answers_whole"))
    return caveats


def _mean(values: NDArray[np.int64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _while_loaded(activity: ServerActivity, wall_s: float) -> ServerActivity:
    """Return what the server counted as if read at the ends of the load, `wall_s` long: the readings are a
    little before and after it, when the server is idle, so busy ratios are scaled up."""
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
        classes = ", ".join(f"{count} {name}" for name, count in errors.items())
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
    """Return the error text of the first failure of the commonest class that has one, in one line of at most
    160 characters; an empty finding where none has."""
    shown_text_max_chars = 160
    for name in errors:
        text = samples.error_texts.get(name.upper(), "")
        line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
        if line:
            shown = line if len(line) <= shown_text_max_chars else f"{line[:shown_text_max_chars]} [...]"
            return coded("first_failure", name=name, answer=shown)
    return as_text("")


def warm_up_caveats(
    window: Window, activity: ServerActivity, settings: ServerSettings, *, cut: bool = False
) -> tuple[Coded, ...]:
    """Return (caveat,) where the warm-up was shorter than these settings need: `warm_up_cut` if the run had cut the
    scenario's warm-up by intent (`cut`), else `warm_up_short`; () where it was long enough or the server counted no
    batch.

    The length needed is that of `warm_up_needed_s`.
    """
    if not activity.batches:
        return ()
    needed_s = warm_up_needed_s(
        batch_timeout_s=settings.batch_timeout_s,
        batch_s=max(activity.execution_s_by_rows.values(), default=0.0),
        batch_threads=settings.batch_threads,
        batch_rows=activity.mean_batch_rows or 1.0,
        rows_per_s=activity.rows / activity.duration_s,
    )
    warm_up_s = window.start_ns / 1e9
    if warm_up_s >= needed_s:
        return ()
    return (caveat("warm_up_cut" if cut else "warm_up_short", warm_up_s=warm_up_s, needed_s=needed_s),)


def _thin_caveats(
    run: CountedRequests, latency_s: Mapping[str, Estimate], verdict: Verdict | None
) -> list[Coded]:
    """Return `few_requests` where too few requests bound p95 or p99, else `correlated` where too few
    independent ones do and the verdict is left open by that; else nothing.

    Intervals and verdicts allow for requests that come together, so a decided verdict needs no caveat.
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


def _goodput_rps(run: CountedRequests, good: NDArray[np.bool_], window: Window, slo: SloSpec | None) -> float:
    """Return the good answers per second that arrived in the window and kept the primary limit of `slo`,
    streamed ones every limit; all good answers without a limit, nan in an empty window."""
    samples, limit = run.samples, None if slo is None else primary_limit(slo)
    in_time = good & window.holds(samples.done_ns)
    if slo is not None and limit is not None and samples.streams is not None:
        everything = replace(
            run,
            counted=np.ones(len(samples), dtype=np.bool_),
            latencies_s=np.where(good, samples.latency_ns / 1e9, math.inf),
        )
        every = Limit(name="goodput", quantile=0.5, seconds=1.0, figure="goodput")
        in_time &= everything.by(every, limits_of(slo)).latencies_s <= 1.0
    elif limit is not None:
        in_time &= samples.latency_ns <= limit.seconds * 1e9
    return int(np.count_nonzero(in_time)) / window.seconds if window.seconds else math.nan


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
