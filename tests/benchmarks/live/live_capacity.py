"""Does the capacity search find the capacity of a live server? Searches with fresh seeds against the exact value.

    python tests/benchmarks/live/live_capacity.py [--searches 4] [--first-seed 1] [--timeout-ms 0]

The bundled server on core 0 with an emulated device (tau(b) = 3 ms + 0.5 ms × b, batches of at most 16, one batch
thread), one client process on core 1, Poisson arrivals, p95 within 25 ms. The exact capacity is that of the batch queue
(tuning.md 2.2; with a timeout, of 2.4 million simulated requests) for the cycle of a batch as the live server has it
and the constant delay of network and front end, both measured beforehand in closed loops (live_target.Calibrated).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from batchtune.measure.slo import Limit
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.trials.pace import Pace
from batchtune.tune.trials.trial import Trial, TrialRequest
from tests.benchmarks.live.live_target import Calibrated, Case, Loading, live
from tests.measure.measure_streams import batch_streams, exact_latency, highest_rate

LIMIT = Limit(name="p95", quantile=0.95, seconds=0.025)
CASE = Case(base_ms=3.0, per_row_ms=0.5, max_batch_size=16, limit_s=LIMIT.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--searches", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--timeout-ms", type=float, default=0.0)
    asked = parser.parse_args()
    case = replace(CASE, batch_timeout_micros=round(asked.timeout_ms * 1e3))
    with live(case) as server:
        known = Calibrated.of(server, case)
        exact_rps = highest_rate(_miss_ratio(known, case), 0.05, 300.0, 16 / float(known.tau_s[-1]), steps=10)
        print(
            f"timeout {asked.timeout_ms:g} ms: exact capacity {exact_rps:.0f}/s of at most {16 / known.tau_s[-1]:.0f}; "
            f"requests take {known.delay_s * 1e3:.3f} ms more than their batches"
        )
        for seed in range(asked.first_seed, asked.first_seed + asked.searches):
            started_s = time.monotonic()
            _tell(_search(server, case, seed), exact_rps, time.monotonic() - started_s)


def _search(server: Loading, case: Case, seed: int) -> Trial:
    bench = Bench(server.scenario, server.target, server.fleet, on_live=lambda _plan, _live: None)
    plan = Plan(
        number=seed,
        seed=1000 * seed,
        pace=Pace(),
        request=TrialRequest(configuration=case.configuration, source="variant", reason=""),
    )
    return bench.run(plan).trial


def _miss_ratio(known: Calibrated, case: Case) -> Callable[[float], float]:
    """The share of requests over the limit at a rate."""
    timeout_s, within_s = case.batch_timeout_micros / 1e6, LIMIT.seconds - known.delay_s

    def exact(rate_rps: float) -> float:
        return exact_latency(rate_rps, known.tau_s, states=200, steps=24).miss_ratio(within_s)

    def simulated(rate_rps: float) -> float:
        _, latency_s = batch_streams(
            rate_rps, known.tau_s, streams=400, requests=7000, seed=1, timeout_s=timeout_s
        )
        return float(np.mean(latency_s[:, 1000:] > within_s))

    return simulated if timeout_s else exact


def _tell(searched: Trial, exact_rps: float, seconds: float) -> None:
    found = searched.objective
    probes = " ".join(f"{probe.rate_rps:.0f}{'+' if probe.met else '-'}" for probe in searched.probes)
    held = "nothing held" if found is None else f"held {found.low / exact_rps - 1.0:+.3f}"
    missed = "" if found is None else f" missed {found.high / exact_rps - 1.0:+.3f}"
    print(f"{searched.number:3d} {held}{missed}, {seconds:.0f} s | {probes}", flush=True)


if __name__ == "__main__":
    main()
