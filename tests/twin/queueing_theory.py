"""What does queueing theory say without simulating? Closed forms for servers of batches and of single requests.

One unit of time throughout, seconds by the names; rates are its inverse. Poisson arrivals of one row each unless said.
A queue that grows without bound raises TwinError. `batch_theory` holds the forms that need a chain or a distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import TwinError


def check_stable(rate_rps: float, saturation_rps: float) -> None:
    """Raise TwinError unless 0 < rate < saturation."""
    if not 0.0 < rate_rps < saturation_rps:
        raise TwinError(
            f"at {rate_rps:.6g} requests/s the queue has no steady state: the rate must be above 0 and below "
            f"{saturation_rps:.6g}",
            hint="lower the rate, or simulate the overload with simulate_open",
        )


# -- one worker that takes everything waiting, batch of b in α b + τ0 --


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyServer:
    """One worker, timeout 0, no limit of batch size, a batch of b rows in per_row_s · b + fixed_s.

    Source: Inoue, "Queueing analysis of GPU-based inference servers with dynamic batching" (2021); the lemmas and
    theorems named below are that paper's. Stable where rate · per_row_s < 1.
    """

    per_row_s: float
    fixed_s: float

    def mean_latency_bound_s(self, rate_rps: float) -> float:
        """Theorem 2: an upper bound of the mean latency, within 8 % of it for real devices; min(φ0, φ1)."""
        check_stable(rate_rps, 1.0 / self.per_row_s)
        load, per_row, fixed = rate_rps * self.per_row_s, self.per_row_s, self.fixed_s
        light = (per_row + fixed) / (2.0 * (1.0 - load))
        light *= 1.0 + 2.0 * rate_rps * fixed + (1.0 - rate_rps * fixed) / (1.0 + load)
        heavy = 1.5 * fixed / (1.0 - load) + 0.5 * per_row * (load + 2.0) / (1.0 - load**2)
        return min(light, heavy)

    def mean_latency_s(self, rate_rps: float, busy_ratio: float) -> float:
        """Lemma 4: the exact mean latency, given the share of time in which the worker is busy."""
        check_stable(rate_rps, 1.0 / self.per_row_s)
        load, per_row, fixed = rate_rps * self.per_row_s, self.per_row_s, self.fixed_s
        spread = 2.0 * per_row * fixed + per_row**2 + (busy_ratio - load) * fixed / rate_rps
        return per_row + fixed + rate_rps * (1.0 + 2.0 * load) / (2.0 * (1.0 - load**2)) * spread

    def mean_batch(self, rate_rps: float, empty_ratio: float) -> float:
        """Lemma 3: E[B], given the probability that nothing arrives during a batch."""
        check_stable(rate_rps, 1.0 / self.per_row_s)
        return (rate_rps * self.fixed_s + empty_ratio) / (1.0 - rate_rps * self.per_row_s)

    def busy_ratio(self, rate_rps: float, mean_batch: float) -> float:
        """Equation 38."""
        check_stable(rate_rps, 1.0 / self.per_row_s)
        return rate_rps * self.per_row_s + rate_rps * self.fixed_s / mean_batch


# -- saturation and closed loop --


def saturation_rows_per_s(
    tau_s: NDArray[np.float64], *, threads: int = 1, contention: float = 0.0, serial: bool = False
) -> float:
    """The highest rate of rows that full batches of len(tau_s) - 1 rows sustain.

    tau_s [b_max + 1]: a batch of b rows alone; c batches at once each take 1 + contention · (c - 1) times as long.
    """
    size = len(tau_s) - 1
    together = 1 if serial else threads
    return float(together * size / (tau_s[size] * (1.0 + contention * (together - 1))))


def closed_loop_rps(
    clients: int, *, per_row_s: float, fixed_s: float, batch_rows_max: int, timeout_s: float = 0.0
) -> float:
    """Throughput of `clients` without think time, one row each, one worker, batch_rows_max ≥ clients.

    Timeout 0: the batches alternate between k and N - k requests, each client waits for both. Above 0: all N wait
    together, until the batch is full (batch_rows_max = N) or for the whole timeout (batch_rows_max > N).
    """
    if clients < 1 or batch_rows_max < clients:
        raise ValueError(f"needs 1 ≤ clients ≤ batch_rows_max; were {clients} and {batch_rows_max}")
    batch_s = per_row_s * clients + fixed_s
    waits = batch_rows_max > clients
    if timeout_s == 0.0 and clients > 1:
        return clients / (batch_s + fixed_s)
    return clients / (batch_s + (timeout_s if waits else 0.0))


def little_concurrency(rate_rps: float, latency_s: float) -> float:
    """Requests in the system, N = X · R; holds for every system in its steady state."""
    return rate_rps * latency_s


def busy_ratio(rate_rps: float, mean_batch_s: float, mean_batch: float) -> float:
    """The utilisation law, U = X · E[τ(B)] / E[B]: mean batches at work."""
    return rate_rps * mean_batch_s / mean_batch


# -- one request at a time --


def mg1_mean_wait_s(rate_rps: float, mean_s: float, mean_square_s2: float) -> float:
    """Pollaczek-Khinchine: mean wait in M/G/1, from the service time's first two moments."""
    check_stable(rate_rps, 1.0 / mean_s)
    return rate_rps * mean_square_s2 / (2.0 * (1.0 - rate_rps * mean_s))


def md1_mean_wait_s(rate_rps: float, service_s: float) -> float:
    """Mean wait in M/D/1."""
    return mg1_mean_wait_s(rate_rps, service_s, service_s**2)


def md1_wait_cdf(rate_rps: float, service_s: float, wait_s: float) -> float:
    """P(wait ≤ wait_s) in M/D/1, by Erlang's alternating sum, in as many digits as its cancellation costs."""
    check_stable(rate_rps, 1.0 / service_s)
    if wait_s < 0.0:
        return 0.0
    with localcontext() as context:
        context.prec = 30 + int(rate_rps * wait_s)
        rate, service, wait = Decimal(rate_rps), Decimal(service_s), Decimal(wait_s)
        total, factorial = Decimal(0), Decimal(1)
        for count in range(int(wait / service) + 1):
            factorial *= max(count, 1)
            over = rate * (count * service - wait)
            power = Decimal(1) if count == 0 else over**count  # Decimal refuses 0⁰
            total += power / factorial * (-over).exp()
        return float((1 - rate * service) * total)


def erlang_c(servers: int, offered: float) -> float:
    """P(an arrival waits) in M/M/c with offered load a = λ/μ < c, by the recursion of Erlang's B."""
    check_stable(offered, servers)
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return servers * blocked / (servers - offered * (1.0 - blocked))


def mmc_mean_wait_s(rate_rps: float, service_rps: float, servers: int) -> float:
    """Mean wait in M/M/c; service_rps: μ of one server."""
    return erlang_c(servers, rate_rps / service_rps) / (servers * service_rps - rate_rps)


def mmc_wait_tail(rate_rps: float, service_rps: float, servers: int, wait_s: float) -> float:
    """P(wait > wait_s) in M/M/c, wait_s ≥ 0."""
    spare = servers * service_rps - rate_rps
    return erlang_c(servers, rate_rps / service_rps) * math.exp(-spare * wait_s)


def mmc_latency_tail(rate_rps: float, service_rps: float, servers: int, latency_s: float) -> float:
    """P(wait + service > latency_s) in M/M/c, latency_s ≥ 0."""
    offered = rate_rps / service_rps
    waits, spare, served = erlang_c(servers, offered), servers - 1.0 - offered, service_rps * latency_s
    mixed = served if math.isclose(spare, 0.0, abs_tol=1e-12) else -math.expm1(-served * spare) / spare
    return math.exp(-served) * (1.0 + waits * mixed)


def mdc_mean_wait_s(rate_rps: float, service_s: float, servers: int) -> float:
    """Mean wait in M/D/c, approximately: Cosmetatos (1975), a few per cent off for few servers."""
    load = rate_rps * service_s / servers
    exponential_s = mmc_mean_wait_s(rate_rps, 1.0 / service_s, servers)
    correction = (
        (1.0 - load) * (servers - 1) * (math.sqrt(4.0 + 5.0 * servers) - 2.0) / (16.0 * load * servers)
    )
    return 0.5 * (1.0 + correction) * exponential_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkQueue:
    """M/M(1,b)/1: the server takes min(waiting, b), in an exponential time that does not depend on how many.

    root: r, the ratio of the geometric queue length while the server is busy. empty_ratio: P(nobody in the system).
    """

    root: float
    empty_ratio: float
    mean_queue: float
    mean_latency_s: float


def bulk_queue(rate_rps: float, service_rps: float, size: int) -> BulkQueue:
    """M/M(1,b)/1 with batches of up to `size`. Source: tuning.md 2.5; for size 1 it is M/M/1.

    r is the root in (0, 1) of μ r^(b+1) - (λ + μ) r + λ, found by bisection.
    """
    check_stable(rate_rps, size * service_rps)
    low, high = 0.0, ((rate_rps + service_rps) / ((size + 1) * service_rps)) ** (1.0 / size)
    for _ in range(200):
        root = 0.5 * (low + high)
        if service_rps * root ** (size + 1) - (rate_rps + service_rps) * root + rate_rps > 0.0:
            low = root
        else:
            high = root
    root = 0.5 * (low + high)
    scale = 1.0 / (service_rps / rate_rps + 1.0 / (1.0 - root))
    mean_queue = scale * root / (1.0 - root) ** 2
    return BulkQueue(
        root=root,
        empty_ratio=service_rps * scale / rate_rps,
        mean_queue=mean_queue,
        mean_latency_s=mean_queue / rate_rps + 1.0 / service_rps,
    )
