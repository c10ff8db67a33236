"""How well does a twin that was calibrated in half a minute predict configurations that it has not seen?

python tests/benchmarks/twin/twin_accuracy.py [--model emulated|emulated-parallel|imdb] [--seed 1] [--held-out 30] [--apart]

Launches the bundled server, runs short probes, fits the twin, then measures random configurations (sizes × timeouts ×
threads; closed loops, and Poisson at 0.3-0.8 of the capacity that the twin expects) and compares p95 and throughput. A
run that the host spoilt (steal, other programs, a slow clock) is repeated, as a sweep would.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.load.fleet import LoadFleet
from batchtune.measure.caveats import HOST_CODES
from batchtune.measure.measurement import Measurement
from batchtune.report.twin_text import accuracy_text
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import target_of
from batchtune.twin.calibrate import calibrate, observation_of
from batchtune.twin.simulator.simulate import batcher_of
from batchtune.twin.traffic import traffic_of
from batchtune.twin.twin import Twin
from tests.benchmarks.emulated import Emulated
from tests.benchmarks.live.live_target import Loading
from tests.twin.twin_fakes import best_alone

WARM_UP_S = 0.3
ATTEMPTS = 3
SCENARIO = """\
name: twin-accuracy
target: {{model: {model}{server_cpus}}}
request: {{protocol: grpc}}
load: {{arrivals: poisson, rate: 100, warm_up: {warm_up_s}s, duration: 2s{client_cpus}}}
slo: {{p95: 1s}}
objective: latency
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A configuration under load: of so many clients, or Poisson at a rate, a share of what the twin expects at most."""

    configuration: Configuration
    seconds: float
    clients: int | None = None
    rate_share: float = 0.0
    rate_rps: float = 0.0


def point_of(
    size: int, timeout_micros: int = 0, threads: int = 1, seconds: float = 3.0, **load: float
) -> Point:
    parameters = BatchingParameters(
        max_batch_size=size,
        batch_timeout_micros=timeout_micros,
        num_batch_threads=threads,
        max_enqueued_batches=10_000,
    )
    return Point(configuration=Configuration(batching=parameters), seconds=seconds, **load)  # type: ignore[arg-type]


PROBES = (
    point_of(1, clients=1, seconds=1.0),
    point_of(4, clients=8, seconds=1.2),
    point_of(16, clients=32, seconds=1.5),
    point_of(64, clients=128, seconds=2.0),
    point_of(4, 0, 2, clients=16, seconds=1.2),
    point_of(64, 0, 2, clients=192, seconds=2.0),
    point_of(32, 2000, 2, clients=24, seconds=1.5),
    point_of(32, 2000, 1, rate_share=0.6, seconds=2.5),
    point_of(16, 0, 2, rate_share=0.6, seconds=2.5),
    point_of(8, 1000, 1, rate_share=0.3, seconds=2.0),
    point_of(16, clients=32, seconds=1.5),
)
"""Alone, three sizes full on one thread, two of them on two, a timeout that closes batches, three open loops, and one of
them all again at the end, as machines drift."""


def held_out_points(count: int, seed: int) -> Iterator[Point]:
    rng = np.random.default_rng(seed)
    for number in range(count):
        size = int(rng.choice([1, 2, 4, 8, 16, 24, 32, 48, 64]))
        timeout_micros = int(rng.choice([0, 0, 500, 1000, 2000, 5000, 10_000]))
        threads = int(rng.integers(1, 3))
        if number % 2:
            yield point_of(size, timeout_micros, threads, clients=int(rng.choice([2, 8, 16, 32, 64, 128])))
        else:
            yield point_of(size, timeout_micros, threads, rate_share=float(rng.uniform(0.3, 0.8)))


def scenario_of(model: str, folder: Path, *, apart: bool) -> Scenario:
    named: object = "imdb_transformer"
    if model != "imdb":
        parallel = model == "emulated-parallel"
        device = Emulated(base_ms=2.0, per_row_ms=0.05, jitter_ratio=0.02, parallel=parallel, floats=200)
        named = device.write(folder / "emulated")
    server_cpus, client_cpus = (", cpus: [0]", ", cpus: [1]") if apart else ("", "")
    return parse_scenario(
        SCENARIO.format(model=named, warm_up_s=WARM_UP_S, server_cpus=server_cpus, client_cpus=client_cpus)
    )


class Meter:
    """Measures points on a launched server; `seconds` is what the attempts that count took."""

    def __init__(self, server: Loading, seed: int) -> None:
        self._server, self._seed = server, seed
        self.seconds = 0.0

    def __call__(self, point: Point, twin: Twin | None) -> tuple[Point, Measurement]:
        """Of some attempts the first that the host did not spoil, else the last."""
        if twin is not None and point.rate_share:
            traffic = traffic_of(self._server.scenario, rate_rps=1.0)
            capacity_rps = twin.saturation_rps(batcher_of(point.configuration), traffic)
            point = replace(point, rate_rps=point.rate_share * capacity_rps)
        for _ in range(ATTEMPTS):
            began_s = time.monotonic()
            measured = self._attempt(point)
            took_s = time.monotonic() - began_s
            if not any(one.code in HOST_CODES for one in measured.caveats):
                break
        self.seconds += took_s
        return point, measured

    def _attempt(self, point: Point) -> Measurement:
        self._server.target.apply(point.configuration)
        self._seed += 1
        lasts = {"warm_up_s": WARM_UP_S, "duration_s": point.seconds}
        if point.clients:
            return self._server.closed_loop(point.clients, **lasts).measurement
        return self._server.open_loop(point.rate_rps, seed=self._seed, **lasts).measurement


def fitted(probes: list[tuple[Point, Measurement]], scenario: Scenario) -> Twin:
    return calibrate([observation_of(point.configuration, one, scenario) for point, one in probes])


def compared(point: Point, one: Measurement, twin: Twin, scenario: Scenario) -> tuple[dict[str, float], bool]:
    """Log of foretold over measured, by figure; whether the twin's interval of p95 and the measured one overlap."""
    clients = one.concurrency
    traffic = traffic_of(scenario, rate_rps=None if clients else one.offered_rps, concurrency=clients)
    batcher = batcher_of(point.configuration)
    best = best_alone(twin).predict(batcher, traffic)
    ours = {"p95": best.latency("p95").value, "throughput": best.throughput.value}
    theirs = {"p95": one.latency_s["p95"].value, "throughput": one.throughput_rps.value}
    off = {name: math.log(ours[name] / theirs[name]) for name in ours}
    interval, measured = twin.predict(batcher, traffic).latency("p95"), one.latency_s["p95"]
    return off, interval.low <= measured.high and measured.low <= interval.high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="emulated", choices=["emulated", "emulated-parallel", "imdb"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="server on the first CPU, client on the second")
    parser.add_argument("--held-out", type=int, default=30)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scenario = scenario_of(asked.model, Path(folder), apart=asked.apart)
        with target_of(scenario) as target, LoadFleet(cpus=scenario.load.cpus) as fleet:
            target.apply(PROBES[0].configuration)
            meter = Meter(Loading(scenario, target, fleet), asked.seed)
            probes: list[tuple[Point, Measurement]] = []
            for point in PROBES:
                probes.append(meter(point, fitted(probes, scenario) if point.rate_share else None))
            measured_s, began_s = meter.seconds, time.monotonic()
            twin = fitted(probes, scenario)
            fit_s = time.monotonic() - began_s
            print(
                f"calibrated in {measured_s:.1f} s of measuring and {fit_s:.1f} s of fitting: {twin.best_fit}"
            )
            print(accuracy_text(twin), flush=True)
            held_out = [meter(point, twin) for point in held_out_points(asked.held_out, asked.seed)]
    errors: dict[str, list[float]] = defaultdict(list)
    outside = 0
    for point, one in held_out:
        off, inside = compared(point, one, twin, scenario)
        outside += not inside
        for name, value in off.items():
            errors[name].append(value)
    for name, values in errors.items():
        sizes = np.abs(values)
        print(
            f"{name:>10}: median error {np.median(sizes):.1%}, 90th percentile {np.quantile(sizes, 0.9):.1%}, "
            f"worst {np.max(sizes):.1%}, bias {np.median(values):+.1%} ({len(values)} configurations)"
        )
    print(f"p95 outside the twin's 95 % interval: {outside} of {len(held_out)}")


if __name__ == "__main__":
    main()
