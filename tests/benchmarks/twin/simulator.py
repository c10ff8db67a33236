"""How many requests per second does the twin simulate on one core? Prints each kernel's rate; takes half a minute.

python tests/benchmarks/twin/simulator.py

Each line: the median of nine runs and their range, in millions of requests per second of one core, after compilation,
with the arrays of the result made anew in each run; and the seconds of the first run in this process, which loads the
compiled code (`--fresh`: compiles it).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from os import environ
from statistics import median

import numpy as np

if "--fresh" in sys.argv:
    environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()

from batchtune.twin.simulator.simulate import Batcher, Device, SimulatedTraffic, run_by_events, summary_of
from tests.twin.simulated_run import simulate_closed, simulate_open

REQUESTS = 1_000_000
REPEATS = 9
FIXED_MS, PER_ROW_MS = 1.8874, 0.1438  # a V100 (tuning.md 2.1)
TAU = FIXED_MS + PER_ROW_MS * np.arange(65)


def say(what: str, run: Callable[[], object], requests: int = REQUESTS) -> None:
    started = time.perf_counter()
    run()
    first = time.perf_counter() - started
    rates = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        rates.append(requests / (time.perf_counter() - started) / 1e6)
    print(
        f"{what:<62} {median(rates):7.1f} [{min(rates):.1f}, {max(rates):.1f}]  first {first:.2f} s",
        flush=True,
    )


def main() -> None:
    gaps = np.random.default_rng(1).exponential(1.0, REQUESTS)
    greedy, device = Batcher(max_batch_size=64), Device(tau_s=TAU)
    patient = Batcher(max_batch_size=64, batch_timeout_s=2.0, batch_threads=4, max_enqueued_batches=100)
    shared = Device(tau_s=TAU, contention=0.6, front_end_s=0.01, jitter_ratio=0.1)
    for load in (0.1, 0.3, 0.7):
        due = np.cumsum(gaps) * PER_ROW_MS / load
        traffic = SimulatedTraffic(due_s=due, rows=1)
        plain, general = partial(simulate_open, due, 1), partial(run_by_events, traffic)
        batch = plain(greedy, device).mean_batch_rows
        say(f"plain kernel, load {load}, mean batch {batch:.1f}", partial(plain, greedy, device))
        say(f"plain kernel, load {load}, 4 threads, timeout 2 ms", partial(plain, patient, device))
        say(f"general kernel, load {load}, as the first line", partial(general, greedy, device))
        every = f"general kernel, load {load}, 4 threads, contention, front end, jitter"
        say(every, partial(general, patient, shared))
    say("general kernel, closed loop of 128", partial(simulate_closed, 128, REQUESTS, 1, greedy, device))
    due = np.cumsum(gaps) * PER_ROW_MS / 0.5 / 100
    for routing in ("round_robin", "least_loaded"):
        many = partial(simulate_open, due, 1, greedy, device, replicas=100, routing=routing)
        say(f"100 replicas, {routing}", many)
    short = SimulatedTraffic(due_s=np.cumsum(gaps[:20_000]) * PER_ROW_MS / 0.5, rows=1)
    draws = partial(summary_of, short, greedy, [device] * 30, warm_up_s=100.0)
    say("summary of 30 draws of 20,000 requests, plain kernel", draws, 30 * 20_000)


if __name__ == "__main__":
    main()
