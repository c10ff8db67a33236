"""How long do requests take in a batch server, exactly? The chain of one busy worker, and the former of idle ones.

One unit of time throughout, seconds by the names. Poisson arrivals of one row each. A queue that grows without bound
raises TwinError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import TwinError
from tests.twin.queueing_theory import check_stable

_TAIL = 1e-12
_STATES_MAX = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChain:
    """One worker, timeout 0, batches of up to len(tau_s) - 1 rows in tau_s[b]: its steady state at batch ends.

    tau_s: [b_max + 1]. waiting: [states], the probability of so many waiting when a batch ends.
    """

    rate_rps: float
    tau_s: NDArray[np.float64]
    waiting: NDArray[np.float64]

    @property
    def mean_batch(self) -> float:
        return float(self.waiting @ self._sizes)

    @property
    def busy_ratio(self) -> float:
        """Share of the time in which the worker runs a batch."""
        batch_s = float(self.waiting @ self.tau_s[self._sizes])
        return batch_s / (batch_s + float(self.waiting[0]) / self.rate_rps)

    @property
    def mean_latency_s(self) -> float:
        """Exact: mean number in the system by the renewal reward theorem, then Little (tuning.md 2.2)."""
        batch_s = self.tau_s[self._sizes]
        cycle_s = float(self.waiting @ batch_s) + float(self.waiting[0]) / self.rate_rps
        area_s = float(self.waiting @ (self._present * batch_s + self.rate_rps * batch_s**2 / 2.0))
        return area_s / cycle_s / self.rate_rps

    def latency_law(self, *, steps: int = 64) -> LatencyLaw:
        """The whole distribution; its only error is that `steps` instants stand for those of a running batch.

        A request that comes when a share u of a batch has passed finds what that batch left behind and Poisson(λuτ)
        more before it. The batches before its own are then full, so its latency is certain but for the size of its
        own batch: what is left of the present one + full batches + tau of its own, filled up by later arrivals.
        """
        points, weights = [self.tau_s[1:2]], [self.waiting[:1]]
        left_behind = self._present - self._sizes
        groups: dict[tuple[int, int], float] = {}
        for size, left, chance in zip(self._sizes, left_behind, self.waiting, strict=True):
            groups[int(size), int(left)] = groups.get((int(size), int(left)), 0.0) + float(chance)
        for (size, left), chance in groups.items():
            if chance < _TAIL:
                continue
            batch_s = float(self.tau_s[size])
            for share in (np.arange(steps) + 0.5) / steps:
                latency_s, probability = self._latencies(left, batch_s, float(share))
                points.append(latency_s)
                weights.append(probability * (chance * self.rate_rps * batch_s / steps))
        latency, weight = np.concatenate(points), np.concatenate(weights)
        order = np.argsort(latency)
        return LatencyLaw(latency_s=latency[order], weight=weight[order] / weight.sum())

    @property
    def _present(self) -> NDArray[np.int64]:
        return np.maximum(np.arange(len(self.waiting)), 1)

    @property
    def _sizes(self) -> NDArray[np.int64]:
        return np.minimum(self._present, len(self.tau_s) - 1)

    def _latencies(
        self, left: int, batch_s: float, share: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Latencies and their probabilities of one who comes after `share` of a batch that left `left` behind."""
        most = len(self.tau_s) - 1
        came = poisson(self.rate_rps * batch_s * share)
        ahead = np.concatenate((np.zeros(left), came))
        ahead = np.append(ahead, np.zeros(-len(ahead) % most)).reshape(-1, most)
        points, weights = [], []
        for full, places in enumerate(ahead):
            if places.sum() < _TAIL:
                continue
            start_s = batch_s * (1.0 - share) + full * self.tau_s[most]
            joined = np.convolve(
                places, poisson(self.rate_rps * start_s)
            )  # rows in its batch besides its own
            size = np.zeros(most)
            size[: min(most, len(joined))] = joined[:most]
            size[-1] += joined[most:].sum()
            points.append(start_s + self.tau_s[1:])
            weights.append(size)
        return np.concatenate(points), np.concatenate(weights)


def batch_chain(rate_rps: float, tau_s: NDArray[np.float64]) -> BatchChain:
    """Solve the chain L' = n - min(n, b_max) + Poisson(λ τ(min(n, b_max))), n = max(L, 1) (tuning.md 2.2).

    tau_s: [b_max + 1], increasing or not; a server without a limit is one with a tau_s much longer than its batches.
    Raises TwinError for a rate of b_max / tau_s[b_max] or more, and so near to it that over 2048 may wait.
    """
    most = len(tau_s) - 1
    check_stable(rate_rps, most / float(tau_s[most]))
    states = 64
    while states <= _STATES_MAX:
        waiting = _stationary(rate_rps, tau_s, states)
        if waiting[-states // 8 :].sum() < _TAIL:
            return BatchChain(rate_rps=rate_rps, tau_s=tau_s, waiting=waiting)
        states *= 2
    raise TwinError(
        f"at {rate_rps:.6g} requests/s more than {_STATES_MAX} may wait: too near to saturation to be solved",
        hint="simulate it with simulate_open",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLaw:
    """A distribution as ascending points and their weights, whose sum is 1; [points] each."""

    latency_s: NDArray[np.float64]
    weight: NDArray[np.float64]

    @property
    def mean_s(self) -> float:
        return float(self.latency_s @ self.weight)

    def quantile(self, probability: float) -> float:
        place = int(np.searchsorted(np.cumsum(self.weight), probability))
        return float(self.latency_s[min(place, len(self.latency_s) - 1)])

    def tail(self, latency_s: float) -> float:
        """P(latency > latency_s)."""
        return float(self.weight[np.searchsorted(self.latency_s, latency_s, side="right") :].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFormer:
    """Batches that close when `size` are in or timeout_s after the first, with a worker always free.

    A given batch of n < size holds one request that waited timeout_s and n - 1 whose arrivals are uniform; a full
    one closes with its last arrival. From this the joint law of wait and batch (tuning.md 2.3 has the marginals).
    """

    rate_rps: float
    timeout_s: float
    size: int

    def __post_init__(self) -> None:
        if self.rate_rps <= 0.0 or self.timeout_s < 0.0 or self.size < 1:
            raise ValueError("a batch former needs rate_rps > 0, timeout_s ≥ 0 and size ≥ 1")

    @property
    def batch_probabilities(self) -> NDArray[np.float64]:
        """P(B = n), [size + 1]; entry 0 is 0."""
        smaller = poisson(self.rate_rps * self.timeout_s, self.size - 1)
        return np.concatenate(([0.0], smaller, [max(1.0 - smaller.sum(), 0.0)]))

    @property
    def mean_batch(self) -> float:
        return 1.0 + sum(self._at_least(k, self.timeout_s) for k in range(1, self.size))

    @property
    def mean_wait_s(self) -> float:
        waits = sum(k * self._at_least(k, self.timeout_s) for k in range(1, self.size))
        return waits / (self.rate_rps * self.mean_batch)

    def mean_latency_s(self, tau_s: NDArray[np.float64]) -> float:
        """tau_s: [size + 1] or longer."""
        batches = self.batch_probabilities * np.arange(self.size + 1)
        return self.mean_wait_s + float(batches[1:] @ tau_s[1 : self.size + 1]) / self.mean_batch

    def wait_tail(self, wait_s: float) -> float:
        """P(wait > wait_s); its limit from below at timeout_s is the probability of waiting just that long."""
        return sum(self._wait_tail_in(size, wait_s) for size in range(1, self.size + 1))

    def latency_tail(self, latency_s: float, tau_s: NDArray[np.float64]) -> float:
        """P(wait + τ(batch) > latency_s)."""
        return sum(self._wait_tail_in(n, latency_s - float(tau_s[n])) for n in range(1, self.size + 1))

    def latency_quantile(self, probability: float, tau_s: NDArray[np.float64]) -> float:
        """The smallest latency that is not exceeded with `probability`, by bisection."""
        low, high = 0.0, self.timeout_s + float(np.max(tau_s[1 : self.size + 1]))
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (
                (middle, high) if self.latency_tail(middle, tau_s) > 1.0 - probability else (low, middle)
            )
        return high

    def _wait_tail_in(self, size: int, wait_s: float) -> float:
        """P(wait > wait_s and the request is in a batch of `size`)."""
        if wait_s < 0.0:
            return float(self.batch_probabilities[size]) * size / self.mean_batch
        if wait_s >= self.timeout_s or self.size == 1:
            return 0.0
        if size < self.size:
            longer = 1.0 + (size - 1) * (1.0 - wait_s / self.timeout_s)
            return float(self.batch_probabilities[size]) * longer / self.mean_batch
        closes = self._at_least(size - 1, self.timeout_s) - self._at_least(size - 1, wait_s)
        nearly = self._at_least(size - 2, self.timeout_s) - self._at_least(size - 2, wait_s)
        return ((size - 1) * closes - self.rate_rps * wait_s * nearly) / self.mean_batch

    def _at_least(self, count: int, seconds: float) -> float:
        """P(at least `count` arrivals within `seconds`)."""
        return max(1.0 - float(poisson(self.rate_rps * seconds, count).sum()), 0.0)


def poisson(mean: float, count: int | None = None) -> NDArray[np.float64]:
    """P(X = 0 … count - 1), X ~ Poisson(mean); without `count` up to where what is left is below 1e-12."""
    if count is None:
        count = 20 + int(mean + 9.0 * math.sqrt(mean))
    if mean <= 0.0:
        return np.asarray(np.arange(count) == 0, dtype=np.float64)
    numbers = np.arange(count)
    logs = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1.0, max(count, 1))))))[:count]
    return np.asarray(np.exp(numbers * math.log(mean) - mean - logs))


def _stationary(rate_rps: float, tau_s: NDArray[np.float64], states: int) -> NDArray[np.float64]:
    """The chain's stationary law on 0 … states - 1; all beyond counts as the last state."""
    most = len(tau_s) - 1
    transition = np.zeros((states, states))
    for waiting in range(states):
        present = max(waiting, 1)
        left = present - min(present, most)
        came = poisson(rate_rps * float(tau_s[min(present, most)]), states - left)
        transition[waiting, left:] = came
        transition[waiting, -1] += max(1.0 - came.sum(), 0.0)
    balance = np.vstack(((transition.T - np.eye(states))[:-1], np.ones(states)))
    solution = np.linalg.solve(balance, np.append(np.zeros(states - 1), 1.0))
    return np.asarray(np.maximum(solution, 0.0))
