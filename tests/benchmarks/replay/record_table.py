"""Measures every cell of a grid several times, for `replay.py` to replay without a server.

    python tests/benchmarks/replay/record_table.py emulated [--seconds 170]     # as often as it says that cells are left
    python tests/benchmarks/replay/record_table.py imdb_transformer

Round by round, each in an order of its own, so that a machine that drifts favours no cell. Beside the grid: the
reference points and the lone client. Goes on where an earlier call stopped.
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
from batchtune.target.choice import target_of
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.search.contenders import Space, one_by_one, reference_configurations
from batchtune.tune.trials.trial import Trial, TrialRequest
from tests.benchmarks.zoo.zoo_table import TARGETS

TABLES = Path(__file__).parents[3] / "results" / "reference" / "tables"
REPEATS = 3
EMULATED = """\
service_time: {base_ms: 2.0, per_row_ms: 0.05}
inputs: {x: {dtype: float32, shape: [8]}}
outputs: {y: {dtype: float32, shape: [2]}}
"""
SCENARIO = """\
name: {name}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", choices=SCENARIOS)
    parser.add_argument(
        "--seconds", type=float, default=170.0, help="stop after so long; call again to go on"
    )
    asked = parser.parse_args()
    TABLES.mkdir(exist_ok=True)
    open_table = TABLES / f"{asked.table}.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        scenario = scenario_of(asked.table, Path(folder))
        recorded = [Trial.from_dict(json.loads(line)) for line in _lines(open_table)]
        done = Counter((trial.configuration, _clients(trial)) for trial in recorded)
        left = [one for one in turns(scenario) if not _taken(done, one)]
        print(f"{len(recorded)} recorded, {len(left)} left", flush=True)
        if left:
            record(
                scenario, left, open_table, first=1 + len(recorded), until_s=time.monotonic() + asked.seconds
            )
    written = open_table.read_text().splitlines()
    print(f"{len(written)} recorded")
    if len(written) >= len(list(turns(scenario))):
        packed = TABLES / f"{asked.table}.jsonl.gz"
        packed.write_bytes(gzip.compress(open_table.read_bytes(), mtime=0))
        print(f"complete: {packed}, {packed.stat().st_size / 1e3:.0f} KB")


def scenario_of(table: str, folder: Path) -> Scenario:
    """The scenario behind a table; an emulated model is written into the folder. Tables of the zoo begin with `zoo-`."""
    if table.startswith("zoo-"):
        return read_scenario(TARGETS[table.removeprefix("zoo-")].write_scenario(folder, seed=1))
    model = "imdb_transformer"
    if table == "emulated":
        (folder / "device" / "1").mkdir(parents=True)
        (folder / "device" / "1" / "emulated.yaml").write_text(EMULATED)
        model = str(folder / "device")
    path = folder / "scenario.yaml"
    path.write_text(SCENARIO.format(name=f"table-{table}", model=model, **SCENARIOS[table]))
    return read_scenario(path)


def indices_of(point: Mapping[str, Any], scenario: Scenario) -> tuple[int, ...]:
    """Which of the values of each knob, in the order of the space."""
    return tuple(knob.values.index(point[name]) for name, knob in scenario.search.space.items())


def cells(scenario: Scenario) -> list[Cell]:
    """The grid and the reference points under the scenario's load, and a lone client."""
    space = Space(scenario)
    grid = [space.configuration(point) for point in scenario.search.grid()]
    references = reference_configurations(scenario).values()
    loaded: list[Cell] = [(one, None) for one in (*grid, *references) if one is not None]
    return [*loaded, (one_by_one(scenario), 1)]


def turns(scenario: Scenario) -> Iterator[Cell]:
    for repeat in range(REPEATS):
        order = cells(scenario)
        random.Random(repeat).shuffle(order)
        yield from order


def record(scenario: Scenario, left: list[Cell], table: Path, *, first: int, until_s: float) -> None:
    load = scenario.load
    with (
        target_of(scenario) as target,
        LoadFleet(processes=load.processes, cpus=load.cpus) as fleet,
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
        space = Space(scenario)
        with table.open("a") as lines:
            for number, (configuration, clients) in enumerate(left, start=first):
                if time.monotonic() > until_s:
                    return
                plan = Plan(
                    number=number,
                    seed=number,
                    request=TrialRequest(
                        configuration=configuration,
                        source="probe" if clients else "grid",
                        reason="recorded",
                        point=space.locate(configuration),
                        concurrency=clients,
                        duration_s=1.0 if clients else None,
                    ),
                )
                trial = bench.run(plan).trial
                lines.write(json.dumps(trial.to_dict()) + "\n")
                lines.flush()


def _clients(trial: Trial) -> int | None:
    return trial.concurrency if trial.source == "probe" else None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _taken(done: Counter[Cell], cell: Cell) -> bool:
    if not done[cell]:
        return False
    done[cell] -= 1
    return True


if __name__ == "__main__":
    main()
