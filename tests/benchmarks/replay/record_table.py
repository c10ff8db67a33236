"""Measures every cell of a grid several times, for `replay.py` to replay without a server and for `zoo.py` to judge by.

    python tests/benchmarks/replay/record_table.py emulated [--seconds 170]     # as often as it says that cells are left
    python tests/benchmarks/replay/record_table.py imdb_transformer
    python tests/benchmarks/replay/record_table.py zoo-forest-rest

Round by round, each in an order of its own, so that a machine that drifts favours no cell. Beside the grid: the
reference points and, but for targets of the zoo, the lone client. Goes on where an earlier call stopped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.load.calibration import calibrate
from batchtune.load.fleet import LoadFleet
from batchtune.measure.caveats import HostGuard
from batchtune.scenario.reader import read_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import placed, target_of
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.search.contenders import Space, one_by_one, reference_configurations
from batchtune.tune.trials.trial import Trial, TrialRequest
from tests.benchmarks.commands import ROOT
from tests.benchmarks.emulated import Emulated
from tests.benchmarks.zoo.zoo_table import TARGETS

TABLES = ROOT / "results" / "reference" / "tables"
ZOO = "zoo-"
SCENARIO = """\
name: table
target: {{model: {model}, device: cpu}}
request: {request}
load: {{arrivals: closed, concurrency: {clients}, warm_up: 200ms, duration: 900ms, seed: 1}}
slo: {{p95: {limit}, errors: 1%}}
objective: throughput
fixed: {{max_enqueued_batches: 100}}
search:
  budget: {{time: 10m}}
  space:
    max_batch_size: [1, 2, 4, 8, 16, 32, 64, 128]
    batch_timeout_micros: [0, 500, 1000, 2000, 5000]
    num_batch_threads: [1, 2, 4]
"""
SCENARIOS = {
    "emulated": {"clients": 64, "limit": "15ms", "request": "{protocol: grpc}"},
    "imdb_transformer": {
        "clients": 32,
        "limit": "40ms",
        "request": "{protocol: grpc, inputs: {random: {low: 0, high: 20000, whole: true}}}",
    },
}
Cell = tuple[Configuration, int | None]
"""A configuration, and the clients where they are not the scenario's."""


def scenario_of(table: str, folder: Path) -> Scenario:
    """The scenario behind a table; an emulated model is written into the folder."""
    if table.startswith(ZOO):
        return read_scenario(TARGETS[table.removeprefix(ZOO)].write_scenario(folder, seed=1))
    model = Emulated(base_ms=2.0, per_row_ms=0.05, floats=8).write(folder / "device")
    path = folder / "scenario.yaml"
    named = "imdb_transformer" if table == "imdb_transformer" else model
    path.write_text(SCENARIO.format(model=named, **SCENARIOS[table]))
    return read_scenario(path)


def recorded(table: str) -> list[Trial]:
    """The runs of a complete table.

    Raises:
        FileNotFoundError: there is none.
    """
    lines = gzip.decompress((TABLES / f"{table}.jsonl.gz").read_bytes()).decode().splitlines()
    return [Trial.from_dict(json.loads(line)) for line in lines]


def indices_of(point: Mapping[str, Any], scenario: Scenario) -> tuple[int, ...]:
    """Which of the values of each knob, in the order of the space."""
    return tuple(knob.values.index(point[name]) for name, knob in scenario.search.space.items())


def turns(table: str, scenario: Scenario) -> Iterator[Cell]:
    """Every run of a table."""
    space, references = Space(scenario), reference_configurations(scenario).values()
    grid = [space.configuration(point) for point in scenario.search.grid()]
    cells: list[Cell] = [(one, None) for one in dict.fromkeys((*grid, *references)) if one is not None]
    if not table.startswith(ZOO):
        cells.append((one_by_one(scenario), 1))
    for repeat in range(2 if table.startswith(ZOO) else 3):
        order = list(cells)
        random.Random(repeat).shuffle(order)
        yield from order


def clients_of(trial: Trial) -> int | None:
    return trial.concurrency if trial.source == "probe" else None


def record(scenario: Scenario, left: list[Cell], table: Path, *, first: int, until_s: float) -> None:
    load, space = scenario.load, Space(scenario)
    with (
        target_of(scenario) as target,
        LoadFleet(processes=load.processes, cpus=load.cpus) as fleet,
        table.open("a") as lines,
    ):
        target.apply(reference_configurations(scenario)["no_batching"])
        bench = Bench(
            scenario,
            target,
            fleet,
            on_live=lambda _plan, _live: None,
            guard=HostGuard(),
            client_max_rps=lambda requests: calibrate(fleet, requests, server_cpus=scenario.target.cpus),
        )
        for number, (configuration, clients) in enumerate(left, start=first):
            if time.monotonic() > until_s:
                return
            request = TrialRequest(
                configuration=configuration,
                source="probe" if clients else "grid",
                reason="recorded",
                point=space.locate(configuration),
                concurrency=clients,
                duration_s=1.0 if clients else None,
            )
            trial = bench.run(Plan(number=number, seed=number, request=request)).trial
            lines.write(json.dumps(trial.to_dict()) + "\n")
            lines.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    of_zoo = [f"{ZOO}{name}" for name, target in TARGETS.items() if target.truth == "recorded"]
    parser.add_argument("table", choices=[*SCENARIOS, *of_zoo])
    parser.add_argument(
        "--seconds", type=float, default=170.0, help="stop after so long; call again to go on"
    )
    asked = parser.parse_args()
    TABLES.mkdir(exist_ok=True)
    open_table = TABLES / f"{asked.table}.jsonl"
    open_table.touch()
    lines = open_table.read_text().splitlines()
    trials = [Trial.from_dict(json.loads(line)) for line in lines]
    done = Counter((trial.configuration, clients_of(trial)) for trial in trials)
    with tempfile.TemporaryDirectory() as folder:
        scenario = scenario_of(asked.table, Path(folder))
        if asked.table.startswith(ZOO):
            scenario, _ = placed(scenario)
        left = []
        for cell in turns(asked.table, scenario):
            done[cell] -= 1
            if done[cell] < 0:
                left.append(cell)
        print(f"{len(lines)} recorded, {len(left)} left", flush=True)
        record(scenario, left, open_table, first=1 + len(lines), until_s=time.monotonic() + asked.seconds)
    new = len(open_table.read_text().splitlines()) - len(lines)
    print(f"{new} more recorded")
    if new == len(left):
        packed = TABLES / f"{asked.table}.jsonl.gz"
        packed.write_bytes(gzip.compress(open_table.read_bytes(), mtime=0))
        print(f"complete: {packed}, {packed.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
