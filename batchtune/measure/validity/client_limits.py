"""Was the load generator the limit? Its send lag, its CPU and what it left unsent (measurement.md 2.9)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchtune.load.record.samples import NEVER_NS, Samples, Status
from batchtune.measure.validity.caveats import Caveat, caveat
from batchtune.measure.validity.steady_state import Window

LAG_TOLERANCE_S = 0.0005
BUSY_CPU_RATIO = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientActivity:
    """What the load generator did within the window.

    `send_lag_p99_s` is how late the client itself was (0 in a closed loop; waits for a free connection excluded), nan
    when nothing was sent; `late_ratio` the share later than `late_after_s`; `sent_ratio` the share that it was ready to
    send before the window ended; `connection_wait_p99_s` the wait for a free connection or stream; `cpu_ratio` of the
    cores it may use, over the whole run; `longest_pause_s` the longest time that a worker stood still, 0 below 5 ms;
    `paused_ratio` the share of its time that it stood still.
    """

    send_lag_p99_s: float
    late_ratio: float
    late_after_s: float
    sent_ratio: float
    connection_wait_p99_s: float
    cpu_ratio: float
    cpu_per_request_s: float
    longest_pause_s: float = 0.0
    paused_ratio: float = 0.0


def client_activity(samples: Samples, window: Window, *, limit_s: float) -> ClientActivity:
    """Sum up the client's side; `limit_s` is the latency that lag is judged against."""
    sent = window.holds(samples.due_ns) & (samples.sent_ns != NEVER_NS)
    lag_ns = own_lag_ns(samples)[sent]
    lag_s, wait_s = lag_ns / 1e9, samples.connection_wait_ns[sent] / 1e9
    late_after_s = max(LAG_TOLERANCE_S, 0.1 * limit_s)
    pauses_s = [
        length / 1e9 for start, length in samples.pauses_ns if window.start_ns <= start < window.end_ns
    ]
    sent_in_all = int(np.count_nonzero(samples.sent_ns != NEVER_NS))
    return ClientActivity(
        send_lag_p99_s=float(np.quantile(lag_s, 0.99)) if len(lag_s) else math.nan,
        late_ratio=float(np.mean(lag_s > late_after_s)) if len(lag_s) else 0.0,
        late_after_s=late_after_s,
        sent_ratio=float(np.mean(samples.due_ns[sent] + lag_ns < window.end_ns)) if len(lag_s) else 1.0,
        connection_wait_p99_s=float(np.quantile(wait_s, 0.99)) if len(wait_s) else math.nan,
        cpu_ratio=samples.client_cpu_ratio,
        cpu_per_request_s=samples.client_cpu_s / sent_in_all / samples.one_in if sent_in_all else math.nan,
        longest_pause_s=max(pauses_s, default=0.0),
        paused_ratio=sum(pauses_s) / window.seconds / samples.client_cores if window.seconds else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWorker:
    """A worker that was the limit by itself; `why` in the words of the caveat that says so of a whole client."""

    name: str
    why: str


def slow_workers(samples: Samples, window: Window, *, limit_s: float) -> tuple[SlowWorker, ...]:
    """Those of several workers whose own lag, backlog or CPU shows the client; none where a lone one sent."""
    slow = []
    for number, share in enumerate(samples.workers):
        activity = client_activity(samples.of_worker(number), window, limit_s=limit_s)
        caveats = client_caveats(activity, limit_s=limit_s, rate_rps=0.0)
        why = next((caveat.text.replace(" %", "%") for caveat in caveats if caveat.blames_client), None)
        if why is not None:
            slow.append(SlowWorker(name=share.name, why=why))
    return tuple(slow)


def dispensable_worker(samples: Samples, window: Window, *, limit_s: float) -> SlowWorker | None:
    """The first slow one where others keep up, and have the CPU for its share too; None: there is none."""
    slow = slow_workers(samples, window, limit_s=limit_s)
    names = {worker.name for worker in slow}
    busy = [
        share.cpu_s / share.wall_s for share in samples.workers if share.name not in names and share.wall_s
    ]
    if not slow or not busy:
        return None
    count = len(samples.workers)
    return slow[0] if max(busy) * count / (count - 1) <= BUSY_CPU_RATIO else None


def worker_caveats(samples: Samples, window: Window, *, limit_s: float) -> list[Caveat]:
    """Name the workers that fell short where others did not; where all did, the client's own caveats say so."""
    slow = slow_workers(samples, window, limit_s=limit_s)
    if not 0 < len(slow) < len(samples.workers):
        return []
    figures = {"slow": len(slow), "workers": len(samples.workers)}
    return [caveat("worker_slow", worker=slow[0].name, why=slow[0].why, **figures)]


def own_lag_ns(samples: Samples) -> NDArray[np.int64]:
    """How late the client itself sent each request, shape (n,); 0 for one that never found a connection."""
    lag = samples.sent_ns - samples.due_ns - samples.connection_wait_ns
    return np.where(samples.sent_ns == NEVER_NS, 0, lag)


def client_caveats(
    client: ClientActivity, *, limit_s: float, rate_rps: float, client_max_rps: float | None = None
) -> list[Caveat]:
    """Every sign that the client, not the server, shaped the figures. `client_max_rps`: from the null server."""
    caveats = []
    if client.send_lag_p99_s > max(LAG_TOLERANCE_S, 0.05 * limit_s) or client.late_ratio > 0.01:
        caveats.append(
            caveat(
                "client_late",
                lag_s=client.send_lag_p99_s,
                late_ratio=client.late_ratio,
                tolerance_s=client.late_after_s,
            )
        )
    if client.sent_ratio < 0.99:
        caveats.append(caveat("client_behind", sent_ratio=client.sent_ratio))
    if client.connection_wait_p99_s > max(LAG_TOLERANCE_S, 0.05 * limit_s):
        caveats.append(caveat("few_connections", wait_s=client.connection_wait_p99_s))
    throttled_ratio = 0.1
    if client.paused_ratio > throttled_ratio:
        caveats.append(caveat("client_throttled", paused_ratio=client.paused_ratio))
    # A pause of a quarter of the limit is told; it makes a run void only where it made more than 1 % of it
    # late.
    long_pause_ratio = 0.25
    if client.longest_pause_s > long_pause_ratio * limit_s:
        caveats.append(caveat("client_paused", pause_s=client.longest_pause_s))
    if client.cpu_ratio > BUSY_CPU_RATIO:
        caveats.append(caveat("client_busy", cpu_ratio=client.cpu_ratio))
    near_limit_ratio = 0.5
    if client_max_rps and rate_rps > near_limit_ratio * client_max_rps:
        caveats.append(
            caveat(
                "client_near_limit",
                rate_rps=rate_rps,
                ratio=rate_rps / client_max_rps,
                client_max_rps=client_max_rps,
            )
        )
    return caveats


def error_counts(samples: Samples, window: Window) -> dict[str, int]:
    """Requests due in the window that got no good answer, by class in lower case; the commonest first.

    Of samples of which one in so many was kept, so many times those.
    """
    counts = np.bincount(samples.status[window.holds(samples.due_ns)], minlength=len(Status))
    counts_by_class = {
        status.name.lower(): samples.one_in * int(counts[status])
        for status in Status
        if status != Status.OK and counts[status]
    }
    return dict(sorted(counts_by_class.items(), key=lambda item: -item[1]))
