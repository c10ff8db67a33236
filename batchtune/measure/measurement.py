"""What does one run mean? Rates, quantiles, errors, the server's side, a verdict, and reasons for distrust."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from batchtune.load.record.samples import Samples, Status
from batchtune.measure.endpoints import EndpointFigures, endpoint_caveats, endpoint_figures
from batchtune.measure.slo import Limit, Slo, Verdict, primary_limit
from batchtune.measure.statistics.quantiles import Estimate, latency_quantiles, rate_estimate
from batchtune.measure.validity.caveats import Caveat, caveat
from batchtune.measure.validity.client import (
    client_activity,
    client_caveats,
    error_counts,
    worker_caveats,
)
from batchtune.measure.validity.server_settings import ServerSettings
from batchtune.measure.validity.steady_state import Window, warm_up_needed_s, window_of
from batchtune.measure.verdict import CountedRequests, counted_requests, judge
from batchtune.target.telemetry import ServerActivity

_SHOWN_TEXT_MAX_CHARS = 160

FEW_INDEPENDENT = 72
"""The fewest independent requests that bound p95 from above at 95 %: 0.95^72 = 2.5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run summed up over its window.

    `requests` were due in the window; `throughput_*` and `goodput_rps` count good answers that arrived in it
    (goodput: within the SLO's limit). In `latency_s` a request without a good answer counts as infinitely slow;
    `latency_mean_s` is over good answers. `errors` counts by class. `misses` are the requests over the SLO's primary
    limit (failed ones included; without an SLO only these), `design_effect` says how far they come together.
    `verdict` is None without an SLO. `endpoints`: the same by replica, where requests went to several. `canary_s` is
    how long a fixed loop took on the host, before or after the run, whichever was faster; None: nobody timed one. Where
    of a load one request in so many was kept (`Samples.one_in`), counts and `design_effect` are multiplied by that.
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
    verdict_reason: str = ""
    caveats: tuple[Caveat, ...] = field(default=())
    endpoints: tuple[EndpointFigures, ...] = ()
    canary_s: float | None = None

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
    notes: tuple[Caveat, ...] = (),
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
    client = client_activity(samples, window, limit_s=limit_s)
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
    verdict, reason = (None, "") if slo is None else judge(run, slo, noted)
    distrust = (*noted, *endpoint_caveats(endpoints), *_thin_caveats(run, latency_s, verdict))
    return Measurement(
        requests=one_in * len(run.due_ns),
        window_s=window.seconds,
        offered_rps=samples.offered_rps,
        concurrency=samples.concurrency,
        throughput_rps=throughput_rps,
        throughput_rows_per_s=rate_estimate(done_ns, ends, weights=one_in * rows),
        goodput_rps=one_in * _goodput_rps(samples, good, window, limit),
        latency_s=latency_s,
        latency_mean_s=float(answered.mean()) if len(answered) else math.nan,
        error_ratio=sum(errors.values()) / (one_in * len(run.due_ns)) if len(run.due_ns) else 0.0,
        errors=errors,
        send_lag_p99_s=client.send_lag_p99_s,
        client_cpu_ratio=client.cpu_ratio,
        client_cpu_per_request_s=client.cpu_per_request_s,
        misses=one_in
        * int(np.count_nonzero(run.latencies_s > (limit.seconds if limit is not None else 1e9))),
        design_effect=one_in * run.design_effect(limit_s),
        server=activity,
        verdict=verdict,
        verdict_reason=reason,
        caveats=distrust,
        endpoints=endpoints,
    )


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


def _own_caveats(run: CountedRequests, window: Window, errors: Mapping[str, int]) -> list[Caveat]:
    requests = len(run.due_ns)
    if not requests:
        return [caveat("nothing_measured", window_s=window.seconds, warm_up_s=window.start_ns / 1e9)]
    caveats = []
    if errors:
        classes = ", ".join(f"{name} {count}" for name, count in errors.items())
        first = _first_text(run.samples, errors)
        failed = sum(errors.values())
        figures = {"errors": failed, "requests": requests * run.samples.one_in}
        caveats.append(caveat("errors", **figures, classes=classes, first_text=first))
    if not window.steady:
        caveats.append(caveat("not_steady"))
    done = int(np.count_nonzero(window.holds(run.samples.done_ns)))
    if run.samples.concurrency is None and done < 0.97 * requests and requests - done > 20:
        caveats.append(caveat("growing_backlog", ratio=done / requests))
    if run.samples.stopped_early:
        caveats.append(caveat("stopped_early", elapsed_s=window.end_ns / 1e9))
    return caveats


def _thinned_caveats(samples: Samples) -> list[Caveat]:
    one_in = samples.one_in
    figures = {"one_in": one_in, "requests": one_in * len(samples), "kept": len(samples)}
    return [caveat("thinned", **figures, failures=samples.failures or 0)] if one_in > 1 else []


def _first_text(samples: Samples, errors: Mapping[str, int]) -> str:
    """What the first failure of the commonest class with a text said, in a line; "" where none said anything."""
    for name in errors:
        text = samples.error_texts.get(name.upper(), "")
        line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
        if line:
            shown = line if len(line) <= _SHOWN_TEXT_MAX_CHARS else f"{line[:_SHOWN_TEXT_MAX_CHARS]}…"
            return f"the first {name} said: {shown}; "
    return ""


def warm_up_caveats(window: Window, activity: ServerActivity, settings: ServerSettings) -> tuple[Caveat, ...]:
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
) -> list[Caveat]:
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
    if verdict in (None, "UNSURE") and effective < min(FEW_INDEPENDENT, requests / 2):
        return [caveat("correlated", effective=effective, requests=requests)]
    return []


def _server_caveats(activity: ServerActivity | None) -> list[Caveat]:
    if activity is not None and activity.went_back:
        return [caveat("counters_went_back")]
    if activity is None or not (activity.batches or activity.requests_by_status):
        return [caveat("no_server_counters")]
    return [caveat("emulated_device")] if activity.emulated else []


def _goodput_rps(samples: Samples, good: NDArray[np.bool_], window: Window, limit: Limit | None) -> float:
    in_time = good & window.holds(samples.done_ns)
    if limit is not None:
        in_time &= samples.latency_ns <= limit.seconds * 1e9
    return int(np.count_nonzero(in_time)) / window.seconds if window.seconds else math.nan


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
