"""How late does an open loop send? Poisson arrivals against the null server: idle, beside a busy core, and fast.

python tests/benchmarks/load/load_pacing.py
Bars: at 2,000/s the p99 send lag is at most 150 µs idle and 500 µs with the other core saturated; at 20,000/s the
rate that is achieved is within 0.5 % of the one asked for.
"""

from __future__ import annotations

import numpy as np

from batchtune.load.calibration import null_server
from batchtune.load.fleet import LoadFleet, LoadJob
from batchtune.load.samples import Samples
from batchtune.scenario.arrivals import Schedule
from tests.benchmarks.live.burners import burning
from tests.benchmarks.rivals import CLIENT_CORE, SERVER_CORE, print_host, spread
from tests.load.load_servers import requests_for
from tests.measure.send_lag import send_lag_ns

ROUNDS = 3
RUN_S = 2.0
FIGURES = {
    "lag p50, µs": ".0f",
    "p99, µs": ".0f",
    "p99.9, µs": ".0f",
    "sent in time, %": ".2f",
    "CPU, µs": ".1f",
    "errors": ".0f",
}


def poisson(rate_rps: int, seed: int) -> Schedule:
    count = int(rate_rps * RUN_S)
    due_ns = np.sort(np.random.default_rng(seed).uniform(0, RUN_S * 1e9, count)).astype(np.int64)
    return Schedule(due_ns=due_ns, duration_s=RUN_S, offered_rps=float(rate_rps))


def figures(samples: Samples) -> list[float]:
    lags = np.quantile(send_lag_ns(samples) / 1e3, (0.5, 0.99, 0.999)).tolist()
    in_time = 100.0 * float(np.mean(samples.sent_ns < RUN_S * 1e9))
    return [*lags, in_time, samples.client_cpu_s / len(samples) * 1e6, sum(samples.errors().values())]


def main() -> None:
    print(f"{'':34}" + "".join(f"{name:>22}" for name in FIGURES))
    with null_server(cpus=[SERVER_CORE]) as endpoint, LoadFleet(cpus=[CLIENT_CORE]) as fleet:

        def report(protocol: str, rate_rps: int, beside: str) -> None:
            requests = requests_for(protocol, bodies=(b"x" * 1024,))
            rows = []
            for seed in range(ROUNDS):
                arrivals = poisson(rate_rps, seed)
                job = LoadJob(endpoint=endpoint, requests=requests, arrivals=arrivals, check_every=0)
                rows.append(figures(fleet.run(job)))
            columns = zip(zip(*rows, strict=True), FIGURES.values(), strict=True)
            shown = "".join(f"{spread(values, form):>22}" for values, form in columns)
            print(f"{f'{protocol} {rate_rps:,}/s, {beside}':34}{shown}", flush=True)

        for protocol in ("rest", "grpc"):
            report(protocol, 2000, "idle")
            with burning([SERVER_CORE], pauses=False):
                report(protocol, 2000, "other core busy")
            report(protocol, 20_000, "idle")
    print_host()


if __name__ == "__main__":
    main()
