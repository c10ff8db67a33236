"""How well does a twin that was calibrated in half a minute predict configurations that it has not seen?

python tests/benchmarks/twin/twin_accuracy.py [--model emulated|emulated-parallel|imdb] [--seed 1] [--held-out 30]
    [--record FILE | --again FILE | --replay FILE]

Launches the bundled server, runs short probes, fits the twin, then measures random configurations (sizes × timeouts ×
threads; closed loops, and Poisson at 0.3-0.8 of the capacity that the twin expects) and compares p95 and throughput.
`--record` keeps every measurement, `--again` launches the server anew and adds another round of the same held-out
configurations to a recording, `--replay` fits and compares without measuring. The truth of a configuration is the
median of its rounds; with several, the spread between them says how much of the error is the measurement's own. A run
that the host spoilt (steal, other programs, a slow clock) is repeated, as a sweep would.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.load.fleet import LoadFleet
from batchtune.measure.caveats import HOST_CODES, HostGuard
from batchtune.measure.measurement import Measurement
from batchtune.plain_values import from_plain, to_plain
from batchtune.report.twin_text import accuracy_text
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, draw
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import target_of
from batchtune.tune.loader import Loader, LoadRun
from batchtune.twin.calibrate import calibrate, observation_of
from batchtune.twin.simulator.simulate import batcher_of
from batchtune.twin.traffic import traffic_of
from batchtune.twin.twin import Twin
from tests.twin.twin_fakes import best_alone

EMULATED = """\
service_time: {base_ms: 2.0, per_row_ms: 0.05, jitter_ratio: 0.02, concurrency: CONCURRENCY}
inputs: {x: {dtype: float32, shape: [200]}}
outputs: {y: {dtype: float32, shape: [2]}}
"""
WARM_UP_S = 0.3
ATTEMPTS = 3
Point = dict[str, Any]
Probe = tuple[Point, Measurement]
Held = tuple[Point, list[Measurement]]


def scenario_of(model: str, directory: Path) -> Scenario:
    if model == "imdb":
        named = [sys.executable, "-m", "batchtune.sample_models", "imdb_transformer"]
        path = (
            subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
        )
    else:
        version = directory / "emulated" / "1"
        version.mkdir(parents=True)
        text = EMULATED.replace("CONCURRENCY", "parallel" if model == "emulated-parallel" else "serial")
        (version / "emulated.yaml").write_text(text)
        path = str(directory / "emulated")
    return Scenario.model_validate(
        {
            "name": "twin-accuracy",
            "target": {"model": path},
            "request": {"protocol": "grpc"},
            "load": {"arrivals": "poisson", "rate": 100, "warm_up": f"{WARM_UP_S}s", "duration": "2s"},
            "slo": {"p95": "1s"},
            "objective": "latency",
        }
    )


def configuration_of(size: int | None, timeout_micros: int = 0, threads: int = 1) -> Configuration:
    if size is None:
        return Configuration(batching=None)
    return Configuration(
        batching=BatchingParameters(
            max_batch_size=size,
            batch_timeout_micros=timeout_micros,
            num_batch_threads=threads,
            max_enqueued_batches=10_000,
        )
    )


def calibration_points() -> list[Point]:
    """Eleven probes: alone, three sizes full on one thread, two of them on two, a timeout that closes batches, three
    open loops, and one of them all again at the end, as machines drift."""
    return [
        {"configuration": configuration_of(1), "clients": 1, "seconds": 1.0},
        {"configuration": configuration_of(4), "clients": 8, "seconds": 1.2},
        {"configuration": configuration_of(16), "clients": 32, "seconds": 1.5},
        {"configuration": configuration_of(64), "clients": 128, "seconds": 2.0},
        {"configuration": configuration_of(4, 0, 2), "clients": 16, "seconds": 1.2},
        {"configuration": configuration_of(64, 0, 2), "clients": 192, "seconds": 2.0},
        {"configuration": configuration_of(32, 2000, 2), "clients": 24, "seconds": 1.5},
        {"configuration": configuration_of(32, 2000, 1), "rate_share": 0.6, "seconds": 2.5},
        {"configuration": configuration_of(16, 0, 2), "rate_share": 0.6, "seconds": 2.5},
        {"configuration": configuration_of(8, 1000, 1), "rate_share": 0.3, "seconds": 2.0},
        {"configuration": configuration_of(16), "clients": 32, "seconds": 1.5},
    ]


def held_out_points(twin: Twin, scenario: Scenario, *, count: int, seed: int) -> list[Point]:
    rng = np.random.default_rng(seed)
    points = []
    for number in range(count):
        size = int(rng.choice([1, 2, 4, 8, 16, 24, 32, 48, 64]))
        timeout_micros = int(rng.choice([0, 0, 500, 1000, 2000, 5000, 10_000]))
        point: Point = {
            "configuration": configuration_of(size, timeout_micros, int(rng.integers(1, 3))),
            "seconds": 3.0,
        }
        if number % 2:
            point["clients"] = int(rng.choice([2, 8, 16, 32, 64, 128]))
        else:
            batcher = batcher_of(point["configuration"])
            capacity = twin.saturation_rps(batcher, traffic_of(scenario, rate_rps=1.0))
            point["rate_rps"] = float(rng.uniform(0.3, 0.8)) * capacity
        points.append(point)
    return points


class Meter:
    """Measures points on a launched server; `seconds` is what the attempts that count took."""

    def __init__(self, scenario: Scenario, target: Any, fleet: Any, seed: int) -> None:
        self._target = target
        self._loader = Loader(scenario, target, fleet, guard=HostGuard())
        self._scenario = scenario
        self._seed = seed
        self.seconds = 0.0

    def __call__(self, point: Point) -> Measurement:
        """Of some attempts the first that the host did not spoil, else the last."""
        for _ in range(ATTEMPTS):
            began = time.monotonic()
            measured = self._attempt(point)
            took_s = time.monotonic() - began
            if not any(one.code in HOST_CODES for one in measured.caveats):
                break
        self.seconds += took_s
        return measured

    def _attempt(self, point: Point) -> Measurement:
        self._target.apply(point["configuration"])
        self._seed += 1
        total_s = WARM_UP_S + point["seconds"]
        arrivals: Arrivals
        if "clients" in point:
            arrivals = ClosedLoop(concurrency=point["clients"], duration_s=total_s)
        else:
            arrivals = draw(
                self._scenario.load, rate_rps=point["rate_rps"], duration_s=total_s, seed=self._seed
            )
        run = LoadRun(arrivals=arrivals, warm_up_s=WARM_UP_S)
        return self._loader.run(run, on_live=lambda _live: None).measurement


def measure_all(meter: Meter, scenario: Scenario, *, held_out: int, seed: int) -> dict[str, Any]:
    probes: list[Probe] = []
    for point in calibration_points():
        if "rate_share" in point:
            twin = fitted(probes, scenario)
            traffic = traffic_of(scenario, rate_rps=1.0)
            point["rate_rps"] = point["rate_share"] * twin.saturation_rps(
                batcher_of(point["configuration"]), traffic
            )
        probes.append((point, meter(point)))
    calibrated_s = meter.seconds
    twin = fitted(probes, scenario)
    points = held_out_points(twin, scenario, count=held_out, seed=seed)
    return {
        "calibrated_s": calibrated_s,
        "probes": probes,
        "held_out": [(point, [meter(point)]) for point in points],
    }


def fitted(probes: list[Probe], scenario: Scenario) -> Twin:
    return calibrate([observation_of(point["configuration"], one, scenario) for point, one in probes])


def compare(recorded: dict[str, Any], scenario: Scenario, *, verbose: bool) -> None:
    began = time.monotonic()
    twin = fitted(recorded["probes"], scenario)
    fit_s = time.monotonic() - began
    best = twin.best_fit
    how = "serial" if best.serial else f"contention {best.contention:.2f}"
    print(
        f"calibrated in {recorded['calibrated_s']:.1f} s of measuring and {fit_s:.1f} s of fitting: {how}, "
        f"delay {best.delay_s * 1e6:.0f} µs, front end {best.front_end_s * 1e6:.1f} µs, wake {best.wake_s * 1e6:.0f} µs, "
        f"crowding {best.crowding_s * 1e6:.0f} µs, jitter {best.jitter_ratio:.3f}, τ(1, 8, 64) "
        + ", ".join(f"{best.device(64).tau_s[rows] * 1e3:.2f}" for rows in (1, 8, 64))
        + " ms"
    )
    print(accuracy_text(twin))
    if verbose:
        for point, one in recorded["probes"]:
            print("  probe", line(point, [one], twin, scenario)[0])
    errors: dict[str, list[float]] = {"p95": [], "throughput": []}
    outside = 0
    for point, rounds in recorded["held_out"]:
        text, off, inside = line(point, rounds, twin, scenario)
        for name in errors:
            errors[name].append(off[name])
        outside += not inside
        if verbose:
            print("  ", text)
    for name, values in errors.items():
        print(
            f"{name:>10}: {summed_up(values)}, bias {np.median(values):+.1%} ({len(values)} configurations)"
        )
    print(f"p95 outside the twin's 95 % interval: {outside} of {len(recorded['held_out'])}")
    print_repeatability(recorded["held_out"])


def summed_up(values: list[float]) -> str:
    sizes = np.abs(values)
    return (
        f"median error {np.median(sizes):.1%}, 90th percentile {np.quantile(sizes, 0.9):.1%}, "
        f"worst {np.max(sizes):.1%}"
    )


def print_repeatability(held_out: list[Held]) -> None:
    """How well a round predicts the median of the others: what no twin can be better than on one round."""
    for name in ("p95", "throughput"):
        off = []
        for _, rounds in held_out:
            for at in range(len(rounds)):
                others = rounds[:at] + rounds[at + 1 :]
                if others:
                    off.append(math.log(figure(rounds[at : at + 1], name) / figure(others, name)))
        if off:
            print(f"a round of the server itself against the others, {name}: {summed_up(off)}")


def figure(rounds: list[Measurement], name: str) -> float:
    """The median over rounds."""
    return float(
        np.median(
            [
                one.throughput_rps.value if name == "throughput" else one.latency_s[name].value
                for one in rounds
            ]
        )
    )


def line(
    point: Point, rounds: list[Measurement], twin: Twin, scenario: Scenario
) -> tuple[str, dict[str, float], bool]:
    one = rounds[0]
    clients = one.concurrency
    rate_rps = point.get("rate_rps")
    traffic = traffic_of(scenario, rate_rps=None if clients else one.offered_rps, concurrency=clients)
    batcher = batcher_of(point["configuration"])
    expected = twin.predict(batcher, traffic)
    best = best_alone(twin).predict(batcher, traffic)
    ours = {name: best.latency(name).value for name in ("p50", "p95")} | {"throughput": best.throughput.value}
    theirs = {name: figure(rounds, name) for name in ours}
    off = {name: math.log(ours[name] / theirs[name]) for name in ("p95", "throughput")}
    load = 0.0 if clients else one.offered_rps / twin.saturation_rps(batcher, traffic)
    by_round = " ".join(f"{each.latency_s['p95'].value * 1e3:.2f}" for each in rounds)
    rows = [each.server.mean_batch_rows or math.nan for each in rounds if each.server] or [math.nan]
    text = (
        f"b {batcher.max_batch_size or 0:3d} T {batcher.batch_timeout_s * 1e3:4.1f} c {batcher.batch_threads} "
        f"{f'N {clients}' if clients else f'λ {rate_rps:.0f} {load:.2f}':11s} "
        f"p50 {theirs['p50'] * 1e3:6.2f} {ours['p50'] * 1e3:6.2f} "
        f"p95 {theirs['p95'] * 1e3:6.2f} {ours['p95'] * 1e3:6.2f} {off['p95']:+.2f}  "
        f"X {theirs['throughput']:6.0f} {ours['throughput']:6.0f} {off['throughput']:+.2f}  "
        f"rows {np.median(rows):5.2f} {best.mean_batch_rows[0]:5.2f} "
        f"p95 by round {by_round} "
        f"{' '.join(sorted({note.code for each in rounds for note in each.caveats} - {'emulated_device'}))}"
    )
    interval = expected.latency("p95")
    low, high = (
        statistics.median(getattr(each.latency_s["p95"], end) for each in rounds) for end in ("low", "high")
    )
    return text, off, interval.low <= high and low <= interval.high


def to_json(recorded: dict[str, Any]) -> dict[str, Any]:
    def plain(point: Point) -> Point:
        return {**point, "configuration": point["configuration"].to_dict()}

    return {
        "calibrated_s": recorded["calibrated_s"],
        "probes": [
            {"point": plain(point), "measurement": to_plain(one)} for point, one in recorded["probes"]
        ],
        "held_out": [
            {"point": plain(point), "rounds": [to_plain(one) for one in rounds]}
            for point, rounds in recorded["held_out"]
        ],
    }


def apart(scenario: Scenario) -> Scenario:
    """Server and client on CPUs of their own."""
    target = scenario.target.model_copy(update={"cpus": (0,)})
    load = scenario.load.model_copy(update={"cpus": (1,)})
    return scenario.model_copy(update={"target": target, "load": load})


def from_json(values: dict[str, Any]) -> dict[str, Any]:
    def point(one: dict[str, Any]) -> Point:
        return {**one["point"], "configuration": Configuration.from_dict(one["point"]["configuration"])}

    return {
        "calibrated_s": values["calibrated_s"],
        "probes": [(point(one), from_plain(Measurement, one["measurement"])) for one in values["probes"]],
        "held_out": [
            (point(one), [from_plain(Measurement, each) for each in one["rounds"]])
            for one in values["held_out"]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="emulated", choices=["emulated", "emulated-parallel", "imdb"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="server on the first CPU, client on the second")
    parser.add_argument("--held-out", type=int, default=30)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true")
    asked = parser.parse_args()
    kept = asked.again or asked.replay
    recorded = from_json(json.loads(kept.read_text())) if kept else {}
    with tempfile.TemporaryDirectory() as directory:
        scenario = scenario_of(asked.model, Path(directory))
        if asked.apart:
            scenario = apart(scenario)
        if not asked.replay:
            with target_of(scenario) as target, LoadFleet(cpus=scenario.load.cpus) as fleet:
                target.apply(configuration_of(1))
                meter = Meter(scenario, target, fleet, asked.seed)
                if asked.again:
                    for point, rounds in recorded["held_out"]:
                        rounds.append(meter(point))
                else:
                    recorded = measure_all(meter, scenario, held_out=asked.held_out, seed=asked.seed)
            written = asked.again or asked.record
            if written:
                written.write_text(json.dumps(to_json(recorded)))
        compare(recorded, scenario, verbose=asked.verbose)


if __name__ == "__main__":
    main()
