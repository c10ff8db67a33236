"""How late does an open loop send? Poisson arrivals against the null server: idle, beside a busy core, and fast.

python tests/benchmarks/load/load_pacing.py
Bars: at 2,000/s the p99 send lag is at most 150 µs idle and 500 µs with the other core saturated; at 20,000/s the
rate that is achieved is within 0.5 % of the one asked for.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator

import numpy as np

from batchtune.load.calibration import null_server
from batchtune.load.fleet import LoadFleet, LoadJob
from batchtune.load.samples import Samples
from batchtune.scenario.arrivals import Schedule
from tests.benchmarks.rivals import CLIENT_CORE, SERVER_CORE, print_host, spread
from tests.load.load_servers import requests_for
from tests.measure.send_lag import send_lag_ns

ROUNDS = 3
RUN_S = 2.0


def spin(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    while True:
        pass


@contextlib.contextmanager
def busy(cpu: int) -> Iterator[None]:
    child = multiprocessing.get_context("spawn").Process(target=spin, args=(cpu,), daemon=True)
    child.start()
    try:
        yield
    finally:
        child.kill()
        child.join()


def poisson(rate_rps: int, seed: int) -> Schedule:
    count = int(rate_rps * RUN_S)
    due_ns = np.sort(np.random.default_rng(seed).uniform(0, RUN_S * 1e9, count)).astype(np.int64)
    return Schedule(due_ns=due_ns, duration_s=RUN_S, offered_rps=float(rate_rps))


def report(name: str, runs: list[Samples]) -> None:
    lags_micros = [send_lag_ns(samples) / 1e3 for samples in runs]
    quantiles = [
        spread([float(np.quantile(lag, quantile)) for lag in lags_micros], ".0f")
        for quantile in (0.5, 0.99, 0.999)
    ]
    achieved = [float(np.mean(samples.sent_ns < RUN_S * 1e9)) for samples in runs]
    cpu = [samples.client_cpu_s / len(samples) * 1e6 for samples in runs]
    errors = [samples.errors() for samples in runs if samples.errors()]
    print(
        f"{name:34}{quantiles[0]:>16}{quantiles[1]:>18}{quantiles[2]:>20}"
        f"{spread([100 * one for one in achieved], '.2f'):>26}{spread(cpu, '.1f'):>18}  {errors or ''}"
    )


def main() -> None:
    print(f"{'':34}{'lag p50, µs':>16}{'p99, µs':>18}{'p99.9, µs':>20}{'sent in time, %':>26}{'CPU, µs':>18}")
    with null_server(cpus=[SERVER_CORE]) as endpoint, LoadFleet(cpus=[CLIENT_CORE]) as fleet:
        for protocol in ("rest", "grpc"):

            def run(rate_rps: int, seed: int, protocol: str = protocol) -> Samples:
                job = LoadJob(
                    endpoint=endpoint,
                    requests=requests_for(protocol, bodies=(b"x" * 1024,)),
                    arrivals=poisson(rate_rps, seed),
                    check_every=0,
                )
                return fleet.run(job)

            report(f"{protocol} 2,000/s, idle", [run(2000, seed) for seed in range(ROUNDS)])
            with busy(SERVER_CORE):
                report(f"{protocol} 2,000/s, other core busy", [run(2000, seed) for seed in range(ROUNDS)])
            report(f"{protocol} 20,000/s, idle", [run(20_000, seed) for seed in range(ROUNDS)])
    print_host()


if __name__ == "__main__":
    main()
