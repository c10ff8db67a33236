"""Made-up runs for the tests of batchtune.measure: samples by hand, batch-server streams, and their exact law.

The server: Poisson arrivals, one worker, timeout 0, it takes everything waiting up to `most` when it falls idle and
needs tau[b] for a batch of b (tuning.md 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import lgamma

import numpy as np
from numpy.typing import NDArray

from batchtune.load.fleet import LiveAggregate
from batchtune.load.samples import NEVER_NS, Samples, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A stand-in for the scenario's SLO."""

    promised: dict[str, float]
    error_ratio: float = 0.01

    def limits(self) -> dict[str, float]:
        return self.promised


def p95_within(seconds: float, *, error_ratio: float = 0.01) -> Promise:
    return Promise(promised={"p95": seconds}, error_ratio=error_ratio)


def make_samples(
    due_s: NDArray[np.float64],
    latency_s: NDArray[np.float64],
    *,
    lag_s: NDArray[np.float64] | float = 0.0,
    wait_s: NDArray[np.float64] | float = 0.0,
    status: NDArray[np.uint8] | None = None,
    rows: int = 1,
    concurrency: int | None = None,
    offered_rps: float | None = None,
    client_cpu_ratio: float = 0.1,
    stopped_early: bool = False,
) -> Samples:
    """Samples from due times and latencies in seconds; `lag_s` is the client's own, `wait_s` for a connection."""
    due_ns = np.round(np.asarray(due_s) * 1e9).astype(np.int64)
    done_ns = due_ns + np.round(np.asarray(latency_s) * 1e9).astype(np.int64)
    wait_ns = np.broadcast_to(np.round(np.asarray(wait_s) * 1e9).astype(np.int64), due_ns.shape).copy()
    sent_ns = due_ns + np.round(np.asarray(lag_s) * 1e9).astype(np.int64) + wait_ns
    status = np.zeros(len(due_ns), dtype=np.uint8) if status is None else status
    done_ns = np.where(np.isin(status, (Status.UNFINISHED, Status.UNSENT)), NEVER_NS, done_ns)
    sent_ns = np.where(status == Status.UNSENT, NEVER_NS, sent_ns)
    wall_s = float(max(done_ns.max(), due_ns.max()) / 1e9) if len(due_ns) else 1.0
    return Samples(
        due_ns=due_ns,
        sent_ns=sent_ns,
        first_byte_ns=done_ns,
        done_ns=done_ns,
        connection_wait_ns=wait_ns,
        status=status,
        rows=np.full(len(due_ns), rows, dtype=np.int32),
        started_ns=0,
        wall_s=wall_s,
        client_cpu_s=client_cpu_ratio * wall_s,
        client_cores=1,
        concurrency=concurrency,
        offered_rps=offered_rps,
        stopped_early=stopped_early,
    )


def queue_latencies(due_s: NDArray[np.float64], service_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Latencies of one server that takes requests one by one in order; all (streams, requests), seconds."""
    worked = np.cumsum(service_s, axis=1)
    started = np.maximum.accumulate(due_s - (worked - service_s), axis=1)
    return started + worked - due_s


def poisson_due(
    rate_rps: float, *, streams: int, requests: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Due times in seconds, (streams, requests)."""
    return np.cumsum(generator.exponential(1.0 / rate_rps, (streams, requests)), axis=1)


def linear_tau(fixed_s: float, per_row_s: float, most: int) -> NDArray[np.float64]:
    """tau[b] for b = 0 … most; tau[0] is unused."""
    return fixed_s + per_row_s * np.arange(most + 1)


def batch_streams(
    rate_rps: float,
    tau_s: NDArray[np.float64],
    *,
    streams: int,
    requests: int,
    seed: int,
    timeout_s: float = 0.0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Due times and latencies in seconds, each (streams, requests), all streams stepped at once.

    `timeout_s`: an idle worker takes a batch when it is full or its oldest request has waited so long.
    """
    most = len(tau_s) - 1
    generator = np.random.default_rng(seed)
    due = np.cumsum(generator.exponential(1.0 / rate_rps, (streams, requests)), axis=1)
    padded = np.concatenate((due, np.full((streams, most + 1), np.inf)), axis=1)
    done = np.zeros((streams, requests + most + 1))
    first = np.zeros(streams, dtype=np.intp)
    free = np.zeros(streams)
    row = np.arange(streams)
    ahead = np.arange(most)
    while True:
        alive = np.flatnonzero(first < requests)
        if not len(alive):
            return due, done[:, :requests] - due
        window = first[alive, None] + ahead
        arrivals = padded[alive[:, None], window]
        closed = np.minimum(arrivals[:, -1], arrivals[:, 0] + timeout_s)
        start = np.maximum(free[alive], closed)
        taken = (arrivals <= start[:, None]).sum(axis=1)
        end = start + tau_s[taken]
        mine = ahead < taken[:, None]
        done[np.broadcast_to(row[alive][:, None], mine.shape)[mine], window[mine]] = np.broadcast_to(
            end[:, None], mine.shape
        )[mine]
        first[alive] += taken
        free[alive] = end


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLaw:
    """A stationary latency distribution as ascending points and their weights (sum 1)."""

    latency_s: NDArray[np.float64]
    weight: NDArray[np.float64]
    mean_batch: float

    def quantile(self, probability: float) -> float:
        return float(self.latency_s[np.searchsorted(np.cumsum(self.weight), probability)])

    def miss_ratio(self, limit_s: float) -> float:
        return float(self.weight[self.latency_s > limit_s].sum())

    def mean(self) -> float:
        return float(self.latency_s @ self.weight)


def exact_latency(
    rate_rps: float, tau_s: NDArray[np.float64], *, states: int = 160, steps: int = 64
) -> LatencyLaw:
    """The law of latency by the embedded chain at batch ends; error only from `steps` per batch and truncation.

    A request that comes `u` into a batch that started with n in the system finds n − b + Poisson(λu) before it. The
    full batches before its own are certain, so its latency is: rest + full batches + tau[size], size by Poisson.
    """
    most = len(tau_s) - 1
    waiting = np.arange(states)
    present = np.maximum(waiting, 1)
    size = np.minimum(present, most)
    transition = np.zeros((states, states))
    for state in range(states):
        left = present[state] - size[state]
        transition[state, left:] = _poisson(rate_rps * tau_s[size[state]], states - left)
        transition[state, -1] += 1.0 - transition[state].sum()
    stationary = np.linalg.solve(
        np.vstack(((transition.T - np.eye(states))[:-1], np.ones(states))),
        np.append(np.zeros(states - 1), 1.0),
    )
    points, weights = [np.array([0.0])], [np.array([0.0])]
    fractions = (np.arange(steps) + 0.5) / steps
    for state in np.flatnonzero(stationary > 1e-12):
        batch_s = tau_s[size[state]]
        per_step = stationary[state] * rate_rps * batch_s / steps
        for fraction in fractions:
            ahead = present[state] - size[state] + np.arange(60 + int(3 * rate_rps * batch_s))
            chance = _poisson(rate_rps * batch_s * fraction, len(ahead))
            full, before = np.divmod(ahead, most)
            start = batch_s * (1.0 - fraction) + full * tau_s[most]
            for slot in range(most):
                here = (before == slot) & (chance > 1e-12)
                more = np.stack(
                    [_poisson(rate_rps * each, most - slot) for each in start[here]] or [np.ones(most - slot)]
                )
                if not here.any():
                    continue
                more[:, -1] = 1.0 - more[:, :-1].sum(axis=1)
                sizes = slot + 1 + np.arange(most - slot)
                points.append((start[here][:, None] + tau_s[sizes]).ravel())
                weights.append((per_step * chance[here][:, None] * more).ravel())
    points.append(np.array([tau_s[1]]))
    weights.append(np.array([stationary[0]]))
    latency, weight = np.concatenate(points), np.concatenate(weights)
    order = np.argsort(latency)
    return LatencyLaw(
        latency_s=latency[order], weight=weight[order] / weight.sum(), mean_batch=float(stationary @ size)
    )


def highest_rate(
    miss_ratio: Callable[[float], float], allowed: float, low: float, high: float, *, steps: int = 14
) -> float:
    """The rate at which an increasing miss ratio crosses `allowed`, by bisection."""
    for _ in range(steps):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if miss_ratio(middle) <= allowed else (low, middle)
    return 0.5 * (low + high)


def _poisson(mean: float, count: int) -> NDArray[np.float64]:
    """P(X = 0 … count-1)."""
    numbers = np.arange(count)
    logs = np.array([lgamma(number + 1.0) for number in numbers])
    return np.exp(numbers * np.log(max(mean, 1e-300)) - mean - logs)


def looks(
    due_s: NDArray[np.float64], latency_s: NDArray[np.float64], *, limit_s: float, every_s: float
) -> Iterator[LiveAggregate]:
    """What a load driver would have told live, every so often, until the last request was due."""
    done = due_s + latency_s
    ended, late = np.sort(done), np.sort(done[latency_s > limit_s])
    for now in np.arange(every_s, due_s[-1], every_s):
        sent, answered = int(np.searchsorted(due_s, now)), int(np.searchsorted(ended, now))
        yield LiveAggregate(
            elapsed_s=float(now),
            sent=sent,
            done=answered,
            errors=0,
            late=int(np.searchsorted(late, now)),
            throughput_rps=0.0,
            p50_s=0.0,
            p95_s=0.0,
            in_flight=sent - answered,
            overdue=int(np.count_nonzero((due_s[:sent] < now - limit_s) & (done[:sent] > now))),
        )


def exact_batch(rate_rps: float, tau_s: NDArray[np.float64]) -> float:
    """The mean batch where work that comes in a batch's time is the next batch; at least 1."""
    sizes = np.arange(1, len(tau_s))
    stable = sizes / tau_s[1:] >= rate_rps
    return float(sizes[np.argmax(stable)]) if stable.any() else float(sizes[-1])
