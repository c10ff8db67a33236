"""What does one run mean? Rates, quantiles, errors, the server's side, a verdict, and reasons for distrust."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.load.samples import Samples, Status
from batchtune.measure.caveats import HOST_CODES, Caveat, caveat
from batchtune.measure.client import client_activity, client_caveats, error_counts, own_lag_ns
from batchtune.measure.quantiles import (
    Estimate,
    design_effect,
    latency_quantiles,
    number_from_json,
    number_to_json,
    rate_estimate,
    time_slices,
)
from batchtune.measure.slo import Decision, Limit, Slo, Verdict, limits_of, primary_limit, strict_decision
from batchtune.measure.steady_state import Window, window_of
from batchtune.target.telemetry import ServerActivity

FEW_MISSES = 10
"""Below this many misses their clumping cannot be seen; the mean batch stands in for the design effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run summed up over its window.

    `requests` were due in the window; `throughput_*` and `goodput_rps` count good answers that arrived in it
    (goodput: within the SLO's limit). In `latency_s` a request without a good answer counts as infinitely slow;
    `latency_mean_s` is over good answers. `errors` counts by class. `verdict` is None without an SLO.
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
    server: ServerActivity | None = None
    verdict: Verdict | None = None
    verdict_reason: str = ""
    caveats: tuple[Caveat, ...] = field(default=())

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
        """What is left of the mean latency: the wire, parsing, the event loop, the client."""
        if self.queue_mean_s is None or self.compute_mean_s is None:
            return None
        return self.latency_mean_s - self.queue_mean_s - self.compute_mean_s

    def to_dict(self) -> dict[str, Any]:
        """Safe for JSON: nan and inf travel as strings."""
        plain = {each.name: _to_json(getattr(self, each.name)) for each in fields(self)}
        plain["server"] = None if self.server is None else _to_json(self.server.to_dict())
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_dict`, also after a journey through JSON.

        Raises:
            KeyError, TypeError: not a measurement.
        """
        read = dict(values)
        for name in ("throughput_rps", "throughput_rows_per_s"):
            read[name] = Estimate.from_dict(values[name])
        read["latency_s"] = {name: Estimate.from_dict(each) for name, each in values["latency_s"].items()}
        for name in ("latency_mean_s", "send_lag_p99_s", "client_cpu_ratio", "client_cpu_per_request_s"):
            read[name] = number_from_json(values[name])
        read["server"] = None if values["server"] is None else ServerActivity.from_dict(values["server"])
        read["caveats"] = tuple(Caveat.from_dict(each) for each in values["caveats"])
        return cls(**read)


def measure(
    samples: Samples,
    *,
    warm_up_s: float,
    slo: Slo | None,
    activity: ServerActivity | None = None,
    duration_s: float | None = None,
    client_max_rps: float | None = None,
    notes: tuple[Caveat, ...] = (),
) -> Measurement:
    """Sum up one run.

    `duration_s` is the schedule's length with its warm-up (None: up to the last request due); `client_max_rps` what
    the client can send to a null server; `notes` are caveats of the caller's, such as the host's.
    """
    window = window_of(samples, warm_up_s=warm_up_s, duration_s=duration_s)
    counted = window.holds(samples.due_ns)
    good = samples.status == Status.OK
    due_ns = samples.due_ns[counted]
    latencies_s = np.where(good, samples.latency_ns / 1e9, math.inf)[counted]
    answered = latencies_s[np.isfinite(latencies_s)]
    latency_s = latency_quantiles(latencies_s, due_ns)
    limit = None if slo is None else primary_limit(slo)
    limit_s = limit.seconds if limit is not None else _finite(latency_s["p95"].value)
    client = client_activity(samples, window, limit_s=limit_s)
    done_ns, ends = samples.done_ns[good], (window.start_ns, window.end_ns)
    throughput_rps = rate_estimate(done_ns, ends)
    errors = error_counts(samples, window)
    distrust = (
        *client_caveats(
            client, limit_s=limit_s, rate_rps=throughput_rps.value, client_max_rps=client_max_rps
        ),
        *_own_caveats(samples, window, latency_s, errors=errors, requests=len(due_ns), warm_up_s=warm_up_s),
        *_server_caveats(activity),
        *notes,
    )
    verdict, reason = None, ""
    if slo is not None:
        run = _Run(
            samples=samples, counted=counted, latencies_s=latencies_s, due_ns=due_ns, activity=activity
        )
        verdict, reason = _verdict(run, slo, distrust)
    return Measurement(
        requests=len(due_ns),
        window_s=window.seconds,
        offered_rps=samples.offered_rps,
        concurrency=samples.concurrency,
        throughput_rps=throughput_rps,
        throughput_rows_per_s=rate_estimate(done_ns, ends, weights=samples.rows[good].astype(np.float64)),
        goodput_rps=_goodput_rps(samples, good, window, limit),
        latency_s=latency_s,
        latency_mean_s=float(answered.mean()) if len(answered) else math.nan,
        error_ratio=sum(errors.values()) / len(due_ns) if len(due_ns) else 0.0,
        errors=errors,
        send_lag_p99_s=client.send_lag_p99_s,
        client_cpu_ratio=client.cpu_ratio,
        client_cpu_per_request_s=client.cpu_per_request_s,
        server=activity,
        verdict=verdict,
        verdict_reason=reason,
        caveats=distrust,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The requests that count: `counted` selects them from the samples, the rest is per counted request."""

    samples: Samples
    counted: NDArray[np.bool_]
    latencies_s: NDArray[np.float64]
    due_ns: NDArray[np.int64]
    activity: ServerActivity | None

    @property
    def requests_per_batch(self) -> float:
        """By the server's account; 1 when it does not tell."""
        rows = self.samples.rows
        if self.activity is None or not self.activity.mean_batch_rows or not len(rows):
            return 1.0
        return max(1.0, self.activity.mean_batch_rows / float(rows.mean()))


def _verdict(run: _Run, slo: Slo, distrust: tuple[Caveat, ...]) -> tuple[Verdict, str]:
    """Distrust never overturns an open-loop PASS: lag and noise only make requests slower.

    Nor does a late client excuse a FAIL that holds when latency is counted from the moment of sending.
    """
    if not len(run.due_ns):
        return "UNSURE", "nothing was measured"
    decision, reason = _decision(run, run.latencies_s, slo)
    closed = run.samples.concurrency is not None
    noise = next((each for each in distrust if each.code in HOST_CODES), None)
    blame = next((each for each in distrust if each.blames_client), None)
    if (noise is None and blame is None) or (decision == "PASS" and not closed):
        return decision, reason
    if noise is not None:
        return "NOISY", noise.text
    if decision == "FAIL" and not any(each.code in {"client_busy", "client_near_limit"} for each in distrust):
        from_sent = run.latencies_s - own_lag_ns(run.samples)[run.counted] / 1e9
        if _decision(run, from_sent, slo)[0] == "FAIL":
            return "FAIL", f"{reason}, even counted from the moment of sending"
    return "INVALID", blame.text if blame is not None else ""


def _decision(run: _Run, latencies_s: NDArray[np.float64], slo: Slo) -> tuple[Decision, str]:
    count = len(latencies_s)
    failed = int(np.count_nonzero(np.isinf(latencies_s)))
    if failed > slo.error_ratio * count:
        return "FAIL", f"{failed} of {count} requests failed, {slo.error_ratio:.3%} may"
    unsure = ""
    slice_of = time_slices(run.due_ns)
    for limit in limits_of(slo):
        over = latencies_s > limit.seconds
        misses = int(np.count_nonzero(over))
        effect = design_effect(over, slice_of)
        if misses < FEW_MISSES:
            effect = max(effect, run.requests_per_batch)
        decision = strict_decision(count, misses, limit.allowed_miss_ratio, design_effect=effect)
        told = (
            f"{misses} of {count} requests over {limit.name}'s {limit.seconds * 1e3:.4g} ms "
            f"({misses / count:.2%}; {limit.allowed_miss_ratio:.2%} may), counted as {count / effect:.0f}"
        )
        if decision == "FAIL":
            return "FAIL", told
        unsure = unsure or (told if decision == "UNSURE" else "")
    return ("UNSURE", unsure) if unsure else ("PASS", "every limit is kept")


def _own_caveats(
    samples: Samples,
    window: Window,
    latency_s: Mapping[str, Estimate],
    *,
    errors: Mapping[str, int],
    requests: int,
    warm_up_s: float,
) -> list[Caveat]:
    if not requests:
        return [caveat("nothing_measured", window_s=window.seconds, warm_up_s=warm_up_s)]
    found = []
    if errors:
        classes = ", ".join(f"{name} {count}" for name, count in errors.items())
        found.append(caveat("errors", errors=sum(errors.values()), requests=requests, classes=classes))
    for name in ("p95", "p99"):
        if math.isinf(latency_s[name].high) and math.isfinite(latency_s[name].value):
            needed = {"p95": 72, "p99": 368}[name]
            found.append(caveat("few_requests", requests=requests, quantile=name, needed=needed))
            break
    if not window.steady:
        found.append(caveat("not_steady"))
    done = int(np.count_nonzero(window.holds(samples.done_ns)))
    if samples.concurrency is None and done < 0.97 * requests and requests - done > 20:
        found.append(caveat("growing_backlog", ratio=done / requests))
    if samples.stopped_early:
        found.append(caveat("stopped_early", elapsed_s=window.end_ns / 1e9))
    return found


def _server_caveats(activity: ServerActivity | None) -> list[Caveat]:
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


def _to_json(value: Any) -> Any:
    """Nested dataclasses with a `to_dict`, mappings and tuples; floats that JSON lacks become strings."""
    if isinstance(value, float):
        return number_to_json(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_to_json(each) for each in value]
    return value.to_dict() if hasattr(value, "to_dict") else value
