"""How near is a pool of 16 replicas to the whole fleet that it stands for, and how many requests/s are simulated?

python tests/benchmarks/twin/pool_and_fleet.py [--requests 2M] [--processes N]   (two minutes on two cores)
python tests/benchmarks/twin/pool_and_fleet.py --speed 1000M                      (only that many requests, 1,000 replicas)

Each line: a fleet at a share of its saturation; p50, p95 and p99 of the whole fleet in ms; by how many per cent the pool's
are above them: as `plan` simulates it (100,000 requests at most), and with ten times as many, which leaves what is due
to the pool being small. A pool that errs towards more replicas is above.
"""

from __future__ import annotations

import argparse
import time

from batchtune.twin.model.exact import simulate_whole, whole_fleet
from batchtune.twin.model.replicas import POOL_MOST
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.simulator.replica import Batcher, Routing
from tests.twin.test_replicas import twin_of

NAMES = ("p50", "p95", "p99")
ROUTINGS: tuple[Routing, ...] = ("random", "round_robin", "least_loaded")
TRAFFIC = Traffic(rate_rps=1.0)
TWIN = twin_of()
BATCHER = Batcher(max_batch_size=32, batch_timeout_s=0.002, batch_threads=1, max_enqueued_batches=100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", default="2M")
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--speed", default=None)
    given = parser.parse_args()
    if given.speed:
        speed(count(given.speed), given.processes)
        return
    print("replicas  routing       load   p50 ms  p95 ms  p99 ms   plan's pool, %         10 x as long, %")
    for replicas in (64, 1000):
        for routing in ROUTINGS:
            for load in (0.3, 0.6, 0.8, 0.9):
                compare(replicas, routing, load, count(given.requests), given.processes)


def compare(replicas: int, routing: Routing, load: float, requests: int, processes: int | None) -> None:
    rate_rps = load * replicas * TWIN.saturation_rps(BATCHER, TRAFFIC)
    fleet = whole_fleet(
        TWIN.best_fit,
        BATCHER,
        TRAFFIC,
        replicas=replicas,
        rate_rps=rate_rps,
        duration_s=requests / rate_rps,
        routing=routing,
    )
    figures = simulate_whole(fleet, pool_latency_s=dict.fromkeys(NAMES, 0.0), processes=processes)
    differences = []
    for played in (None, 1_000_000):
        pool = TWIN.predict(
            BATCHER,
            TRAFFIC.at(rate_rps * POOL_MOST / replicas),
            quantiles=NAMES,
            requests=played,
            only_best=True,
            replicas=POOL_MOST,
            routing=routing,
        )
        above = [100.0 * (float(pool.latency_s[name][0]) / figures.latency_s[name] - 1.0) for name in NAMES]
        differences.append(" ".join(f"{value:+6.1f}" for value in above))
    milliseconds = " ".join(f"{1e3 * figures.latency_s[name]:7.2f}" for name in NAMES)
    print(f"{replicas:>8}  {routing:<12} {load:5.2f}  {milliseconds}   {'   '.join(differences)}", flush=True)


def speed(requests: int, processes: int | None) -> None:
    rate_rps = 0.6 * 1000 * TWIN.saturation_rps(BATCHER, TRAFFIC)
    for routing in ROUTINGS:
        fleet = whole_fleet(
            TWIN.best_fit,
            BATCHER,
            TRAFFIC,
            replicas=1000,
            rate_rps=rate_rps,
            duration_s=requests / rate_rps,
            routing=routing,
        )
        started_cpu_s = time.process_time()
        figures = simulate_whole(fleet, pool_latency_s=dict.fromkeys(NAMES, 0.0), processes=processes)
        print(
            f"{routing}: {figures.requests:,} requests in {figures.took_s:.1f} s on {figures.processes} processes: "
            f"{figures.simulated_rps / 1e6:.2f} million/s (this process's own CPU: "
            f"{time.process_time() - started_cpu_s:.1f} s); mean batch {figures.mean_batch_rows:.1f}; "
            + ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in figures.latency_s.items()),
            flush=True,
        )
        if requests >= 500_000_000:
            return


def count(text: str) -> int:
    return round(float(text.rstrip("M")) * 1e6)


if __name__ == "__main__":
    main()
