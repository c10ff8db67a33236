"""How often do the stated 95 % intervals hold the truth, and what do verdicts cost? Prints; about five minutes.

Truth is the exact law of the batch queue (tuning.md 2.2), and of M/M/1, where requests go one by one and slow ones come
in the longest spells. Run: python tests/benchmarks/twin/measure_coverage.py [coverage] [one_by_one] [limits] [verdicts]
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from batchtune.measure.measurement import measure
from batchtune.measure.quantiles import QUANTILES, latency_quantiles, rate_estimate
from batchtune.measure.slo import Limit, SloWatch
from tests.measure.measure_streams import (
    Promise,
    batch_streams,
    exact_batch,
    exact_latency,
    linear_tau,
    looks,
    make_samples,
    p95_within,
    poisson_due,
    queue_latencies,
)

TAU_S = linear_tau(0.0015, 0.0003, 16)
SATURATION_RPS = 16 / TAU_S[16]
STREAMS = 400
VERDICTS = 400
CLEAR = (0.01, 0.2, 0.5)


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


def one_by_one() -> None:
    print(
        "\nM/M/1, 1 ms a request: the same, how often a caveat says that spells were few, and whole runs' verdicts"
    )
    print("where the limit is the exact p95 (either verdict is wrong), and where 1 % miss it")
    print(
        f"{'load':>5} {'requests':>8} {'p50':>6} {'p95':>6} {'p99':>6} {'told':>6} {'PASS':>6} {'FAIL':>6} {'1%: PASS':>9}"
    )
    for load in (0.5, 0.8, 0.9):
        mean_s = 0.001 / (1.0 - load)
        for requests in (300, 1000, 3000, 10_000):
            generator = np.random.default_rng(requests)
            due_s = poisson_due(1000.0 * load, streams=200, requests=requests + 4000, generator=generator)
            latency_s = queue_latencies(due_s, generator.exponential(0.001, due_s.shape))
            held: Counter[str] = Counter()
            for due, latency in zip(due_s[:, 4000:], latency_s[:, 4000:], strict=True):
                samples = make_samples(due - due[0], latency)
                found = measure(samples, warm_up_s=0.0, slo=p95_within(mean_s * math.log(20)))
                for name, quantile in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
                    one = found.latency_s[name]
                    held[name] += one.low <= -mean_s * math.log(1 - quantile) <= one.high
                held["told"] += any(one.code in {"correlated", "few_requests"} for one in found.caveats)
                held[str(found.verdict)] += 1
                kept = measure(samples, warm_up_s=0.0, slo=p95_within(mean_s * math.log(100)))
                held["kept"] += kept.verdict == "PASS"
            shares = " ".join(
                f"{held[name] / 200:6.3f}" for name in ("p50", "p95", "p99", "told", "PASS", "FAIL")
            )
            print(f"{load:5.1f} {requests:8d} {shares} {held['kept'] / 200:9.3f}")


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


def verdicts() -> None:
    print(
        "\nverdicts: share of streams by outcome, median requests; edges of the indifference zone 3.5 and 7 %"
    )
    print(f"{'load':>5} {'misses':>7} {'PASS':>6} {'FAIL':>6} {'UNSURE':>6} {'requests':>9}")
    clear: list[int] = []
    for load in (0.1, 0.2, 0.3, 0.6):
        rate_rps = load * SATURATION_RPS
        law = exact_latency(rate_rps, TAU_S, steps=32)
        for misses in (0.01, 0.035, 0.05, 0.07, 0.2, 0.5):
            limit = Limit(name="p95", quantile=0.95, seconds=law.quantile(1 - misses))
            due_s, latency_s = batch_streams(rate_rps, TAU_S, streams=VERDICTS, requests=6000, seed=5)
            found, cost = {"PASS": 0, "FAIL": 0, "UNSURE": 0}, []
            for due, latency in zip(due_s, latency_s, strict=True):
                watch = SloWatch(
                    limit=limit,
                    error_ratio=0.01,
                    warm_up_s=0.5,
                    rate_rps=rate_rps,
                    requests_per_batch=exact_batch(rate_rps, TAU_S),
                    batch_rows_max=16,
                )
                any(watch(each) for each in looks(due, latency, limit_s=limit.seconds, every_s=0.05))
                found[watch.decision] += 1
                cost.append(watch.requests)
            clear += cost if misses in CLEAR else []
            shares = " ".join(f"{count / VERDICTS:6.3f}" for count in found.values())
            print(f"{load:5.1f} {misses:7.3f} {shares} {np.median(cost):9.0f}")
    print(
        f"median cost of a clear verdict of a search (1, 20 and 50 % misses, all loads): {np.median(clear):.0f}"
    )


def speed() -> None:
    latencies = np.random.default_rng(1).exponential(0.01, 10**6)
    due_ns = np.arange(10**6, dtype=np.int64) * 10_000
    start = time.perf_counter()
    latency_quantiles(latencies, due_ns)
    quantiles_s = time.perf_counter() - start
    start = time.perf_counter()
    rate_estimate(due_ns, (0, 10**10))
    print(f"\n10^6 samples: five quantiles {quantiles_s:.3f} s, rate {time.perf_counter() - start:.3f} s")


PARTS = (coverage, one_by_one, limits, verdicts, speed)

if __name__ == "__main__":
    asked = sys.argv[1:] or [each.__name__ for each in PARTS]
    for part in PARTS:
        if part.__name__ in asked:
            part()
