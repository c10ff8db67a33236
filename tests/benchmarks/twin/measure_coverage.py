"""How often do the stated 95 % intervals hold the truth, and is a limit passed that is just missed? Some three minutes.

Truth is the exact law of the batch queue (tuning.md 2.2). Run: python tests/benchmarks/twin/measure_coverage.py [coverage]
[limits]. What else it asked once, of M/M/1 and of the cost of verdicts, is in results/reference/2026-11-21-epyc-2-cores.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np

from batchtune.measure.measurement import measure
from batchtune.measure.quantiles import QUANTILES, latency_quantiles
from tests.measure.measure_streams import (
    Promise,
    batch_streams,
    exact_latency,
    linear_tau,
    make_samples,
    queue_latencies,
)

TAU_S = linear_tau(0.0015, 0.0003, 16)
SATURATION_RPS = 16 / TAU_S[16]
STREAMS = 400


def coverage() -> None:
    print("\ncoverage of 95 % intervals: share of runs whose interval holds the truth; width relative to it")
    print(f"{'load':>5} {'requests':>8} {'batch':>6} {'p50':>6} {'p95':>6} {'p99':>6} {'width p95':>10}")
    for load in (0.1, 0.3, 0.6, 0.8):
        rate_rps = load * SATURATION_RPS
        law = exact_latency(rate_rps, TAU_S, steps=32)
        for requests in (1000, 3000, 10_000):
            streams = STREAMS if requests < 10_000 else STREAMS // 2
            due_s, latency_s = batch_streams(
                rate_rps, TAU_S, streams=streams, requests=requests + 1000, seed=int(rate_rps) + requests
            )
            held, width = dict.fromkeys(("p50", "p95", "p99"), 0), 0.0
            for due, latency in zip(due_s[:, 1000:], latency_s[:, 1000:], strict=True):
                found = latency_quantiles(latency, (due * 1e9).astype(np.int64))
                for name, quantile in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
                    truth_s = law.quantile(quantile)
                    held[name] += found[name].low - 1e-9 <= truth_s <= found[name].high + 1e-9
                width += min(found["p95"].half_width_ratio, 1.0) / streams
            shares = " ".join(f"{held[name] / streams:6.3f}" for name in held)
            print(f"{load:5.1f} {requests:8d} {law.mean_batch:6.2f} {shares} {width:10.3f}")


def limits() -> None:
    print(
        "\nfalse PASSes of whole runs at the exact limit, of 200 each: a PASS may be shown at a lower limit"
    )
    print(f"{'stream':>30} {'requests':>8} {'p95':>6} {'p99':>6}")
    for name, streams in _streams().items():
        _, long_s = streams(4, 400_000, 7)
        for requests in (300, 1000, 3000, 10_000):
            due_s, latency_s = streams(200, requests, requests)
            shares = []
            for quantile in ("p95", "p99"):
                promise = Promise(promised={quantile: float(np.quantile(long_s, QUANTILES[quantile]))})
                verdicts_of = [
                    measure(make_samples(due - due[0], latency), warm_up_s=0.0, slo=promise).verdict
                    for due, latency in zip(due_s, latency_s, strict=True)
                ]
                shares.append(verdicts_of.count("PASS") / len(verdicts_of))
            print(f"{name:>30} {requests:8d} {shares[0]:6.3f} {shares[1]:6.3f}")


Streams = Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]


def _streams() -> dict[str, Streams]:
    """Due times and latencies, (streams, requests), by what makes requests come together."""

    def queued(gaps: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]) -> Streams:
        def draw(streams: int, requests: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
            generator = np.random.default_rng(seed)
            shape = (streams, requests + 6000)
            due_s = np.cumsum(gaps(generator, shape), axis=1)
            latency_s = queue_latencies(due_s, generator.exponential(0.001, shape))
            return due_s[:, 6000:], latency_s[:, 6000:]

        return draw

    def batched(streams: int, requests: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        due_s, latency_s = batch_streams(
            0.8 * SATURATION_RPS, TAU_S, streams=streams, requests=requests + 1000, seed=seed
        )
        return due_s[:, 1000:], latency_s[:, 1000:]

    def bursts(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        gaps_s = generator.exponential(0.001 / 1.2, shape)
        return gaps_s + np.where(generator.random(shape) < 1 / 300, generator.exponential(0.75, shape), 0.0)

    def drift(streams: int, requests: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(seed)
        kept = math.exp(-1 / 1000)
        steps = generator.normal(size=(streams, requests))
        speed = np.empty_like(steps)
        speed[:, 0] = steps[:, 0]
        for at in range(1, requests):
            speed[:, at] = kept * speed[:, at - 1] + math.sqrt(1 - kept * kept) * steps[:, at]
        latency_s = 0.002 * np.exp(speed + 0.1 * generator.normal(size=(streams, requests)))
        return np.tile(np.arange(requests) * 0.001, (streams, 1)), latency_s

    return {
        "one by one, load 0.8": queued(lambda rng, shape: rng.exponential(0.00125, shape)),
        "one by one, load 0.95": queued(lambda rng, shape: rng.exponential(0.001 / 0.95, shape)),
        "batches, load 0.8": batched,
        "gamma arrivals, cv 4, load 0.6": queued(
            lambda rng, shape: rng.gamma(1 / 16, 16 * 0.001 / 0.6, shape)
        ),
        "bursts of 300 at load 1.2": queued(bursts),
        "a host that drifts for 1000": drift,
    }


PARTS = (coverage, limits)

if __name__ == "__main__":
    asked = sys.argv[1:] or [each.__name__ for each in PARTS]
    for part in PARTS:
        if part.__name__ in asked:
            part()
