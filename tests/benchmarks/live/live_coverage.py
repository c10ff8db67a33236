"""Do the stated 95 % intervals of p95 hold the truth of a live server? Many short runs against the exact chain.

    python tests/benchmarks/live/live_coverage.py [--load 0.6] [--runs 20] [--requests 1000]

The bundled server on core 0 with an emulated device (tau(b) = 4 ms + 0.75 ms × b, batches of at most 8, timeout 0, one batch
thread), one client process on core 1, Poisson arrivals, a seed for each run. The truth is the exact law of the batch
queue (tuning.md 2.2) for the cycle of a batch as the live server has it, plus the constant delay of network and front
end; both are measured beforehand in a closed loop of one client and one that fills every batch (live_target.Calibrated),
so no run is judged by itself. Beside it stands the p95 of all runs' requests together, which assumes nothing.
"""

from __future__ import annotations

import argparse

import numpy as np

from batchtune.measure.caveats import HOST_CODES
from batchtune.measure.quantiles import latency_quantiles
from tests.benchmarks.live.live_target import Calibrated, Case, live
from tests.measure.measure_streams import exact_latency

CASE = Case(base_ms=4.0, per_row_ms=0.75, max_batch_size=8)
QUANTILES = {"p50": 0.5, "p95": 0.95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1000)
    asked = parser.parse_args()
    with live(CASE) as server:
        known = Calibrated.of(server, CASE)
        rate_rps = asked.load * CASE.max_batch_size / CASE.nominal_tau_s()[-1]
        law = exact_latency(rate_rps, known.tau_s, steps=32, states=200)
        truth_s = {name: law.quantile(q) + known.delay_s for name, q in QUANTILES.items()}
        added_ms = 1e3 * (known.tau_s[1] - CASE.nominal_tau_s()[1])
        print(
            f"{rate_rps:.0f} requests/s, {asked.load:.0%} of the device's most; each batch takes {added_ms:.3f} ms more than "
            f"the device, requests {known.delay_s * 1e3:.3f} ms more than their batches; mean batch {law.mean_batch:.2f}"
        )
        runs, held, noisy = [], dict.fromkeys(QUANTILES, 0), 0
        for seed in range(1, asked.runs + 1):
            figures = server.open_loop(
                rate_rps, seed=seed, warm_up_s=0.7, duration_s=asked.requests / rate_rps
            )
            found = figures.measurement
            inside = {
                name: found.latency_s[name].low <= truth_s[name] <= found.latency_s[name].high
                for name in QUANTILES
            }
            for name in QUANTILES:
                held[name] += inside[name]
            noisy += any(one.code in HOST_CODES for one in found.caveats)
            counted = figures.window.holds(figures.samples.due_ns)
            runs.append(figures.samples.latency_ns[counted] / 1e9)
            p95 = found.latency_s["p95"]
            print(
                f"{seed:3d} p95 {p95.value * 1e3:6.2f} [{p95.low * 1e3:6.2f}, {p95.high * 1e3:7.2f}] ms, {found.requests} "
                f"requests: {'holds' if inside['p95'] else 'MISSES'}",
                flush=True,
            )
    pooled = np.concatenate(runs)
    together = latency_quantiles(pooled, np.arange(len(pooled), dtype=np.int64))
    for name in QUANTILES:
        print(
            f"{name}: {held[name]} of {asked.runs} intervals hold the chain's {truth_s[name] * 1e3:.2f} ms; all "
            f"{len(pooled)} requests together: {together[name].value * 1e3:.2f} "
            f"[{together[name].low * 1e3:.2f}, {together[name].high * 1e3:.2f}] ms"
        )
    print(f"runs that the host disturbed: {noisy}")


if __name__ == "__main__":
    main()
