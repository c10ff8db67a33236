"""What does the bundled server make of the models: its share of the card's own speed, and the two published tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.load.calibration import calibrate
from batchtune.load.fleet import LoadFleet
from batchtune.measure.caveats import HostGuard
from batchtune.plain_values import to_plain
from batchtune.scenario.reader import read_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.tfserving import TfServingTarget
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.evidence.best_point import trial_bottleneck
from batchtune.tune.trials.trial import Trial, TrialRequest
from tests.benchmarks.commands import batchtune
from tests.benchmarks.gpu.gpu_models import ROOT, Asked, settings

SCENARIOS = ROOT / "scenarios"

# Rows in a batch, rows in a request, clients and client processes for each thread count tried: always more requests
# under way than four threads can take.
FULL = {
    "text_recognition": {"size": 32, "rows": 1, "clients": 192, "processes": 2},
    "imdb_transformer": {"size": 512, "rows": 5, "clients": 640, "processes": 2},
    "resnet50": {"size": 16, "rows": 1, "clients": 96, "processes": 3},
}
THREADS = (1, 2, 4)
FILES = {
    "text_recognition": "text-recognition-gpu.yaml",
    "imdb_transformer": "imdb-benchmark-gpu.yaml",
    "resnet50": "resnet50-gpu.yaml",
}
TABLE_VARIANTS = {
    "one_request_at_a_time": {"max_batch_size": 2},
    "dynamic_batching": {},
    "dynamic_batching_two_threads": {"num_batch_threads": 2},
}


@dataclass(kw_only=True)
class Served:
    """A server, a fleet and the scenario's requests, for one load after another."""

    scenario: Scenario
    bench: Bench
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def configuration(self, **changed: Any) -> Configuration:
        return self.scenario.configuration(changed)

    def load(
        self,
        configuration: Configuration,
        *,
        concurrency: int | None = None,
        duration_s: float | None = None,
        block: int = 0,
    ) -> Trial:
        plan = Plan(
            number=next(self.numbers),
            seed=self.scenario.load.seed + block,
            request=TrialRequest(
                configuration=configuration,
                source="probe",
                reason="gpu check",
                concurrency=concurrency,
                duration_s=duration_s or self.scenario.load.duration_s,
            ),
        )
        return self.bench.run(plan).trial


@contextmanager
def served(scenario: Scenario) -> Iterator[Served]:
    with TfServingTarget(scenario.target) as target, LoadFleet(processes=scenario.load.processes) as fleet:
        bench = Bench(
            scenario,
            target,
            fleet,
            on_live=lambda _plan, _live: None,
            guard=HostGuard(),
            client_max_rps=lambda requests: calibrate(fleet, requests),
        )
        yield Served(scenario=scenario, bench=bench)


def scenario_of(asked: Asked, name: str, *changed: str) -> Scenario:
    return read_scenario(SCENARIOS / FILES[name], overrides=[*settings(asked, name), *changed])


def server_share(asked: Asked) -> None:
    """Keep each model's rows per second at full batches, and their share of what the model does alone."""
    ceilings = json.loads((asked.scratch / "ceiling.json").read_text())["rows"]
    for name, full in FULL.items():
        size, clients = (8, 16) if asked.tiny else (full["size"], full["clients"])
        changed = [f"request.rows={full['rows']}", "request.protocol=grpc", f"load.concurrency={clients}"]
        changed += [f"load.processes={1 if asked.tiny else full['processes']}", "load.requests=null"]
        scenario = scenario_of(asked, name, *changed, "load.duration=2s", "variants={}")
        alone = ceilings.get(name, {}).get(str(size), {})
        ceiling = alone.get("graph") or alone.get("eager")
        both = alone.get("graph_two_streams") or ceiling
        rows = {}
        with served(scenario) as server:
            for threads in THREADS[:1] if asked.tiny else THREADS:
                batching = {
                    "max_batch_size": size,
                    "allowed_batch_sizes": (size,),
                    "batch_timeout_micros": 1000,
                }
                batching |= {"num_batch_threads": threads, "max_enqueued_batches": 1000}
                trial = server.load(server.configuration(**batching), duration_s=0.5 if asked.tiny else 1.5)
                found = row(trial)
                found["share_of_model"] = _share(found["rows_per_s"], ceiling)
                found["share_of_two_streams"] = _share(found["rows_per_s"], both)
                rows[str(threads)] = found
                asked.keep(
                    name, {"size": size, "clients": clients, "model_rows_per_s": ceiling, "threads": rows}
                )


def _share(rows_per_s: float | None, ceiling: float | None) -> float | None:
    """None where the ceiling was not measured."""
    return None if ceiling is None else (rows_per_s or 0.0) / ceiling


def text_recognition(asked: Asked) -> None:
    """Keep the comparison of the variants at 16 clients, then the published table: 2 to 16 clients."""
    path = SCENARIOS / FILES["text_recognition"]
    short = ["load.duration=300ms", "load.warm_up=100ms"] if asked.tiny else ["load.duration=1s"]
    changed = [f"--set={one}" for one in (*settings(asked, "text_recognition"), *short)]
    blocks = "2" if asked.tiny else "6"
    asked.keep("comparison", said_by(asked, "compare", str(path), "--blocks", blocks, *changed, share=0.6))
    table: dict[str, list[dict]] = {}
    with served(scenario_of(asked, "text_recognition", *short)) as server:
        for name, parameters in TABLE_VARIANTS.items():
            configuration = server.configuration(**parameters)
            for clients in (2, 16) if asked.tiny else range(2, 17, 2):
                trial = server.load(configuration, concurrency=clients, duration_s=0.3 if asked.tiny else 0.8)
                table.setdefault(name, []).append({"clients": clients, **row(trial)})
                asked.keep("table", table)


def imdb(asked: Asked) -> None:
    """Keep the comparison of REST and gRPC, batching on and off; fewer requests than published, to have six blocks."""
    path = SCENARIOS / FILES["imdb_transformer"]
    short = ["load.requests=200", "load.concurrency=20", "load.warm_up=100ms"] if asked.tiny else []
    short = short or ["load.requests=4000", "load.warm_up=300ms"]
    changed = [f"--set={one}" for one in (*settings(asked, "imdb_transformer"), *short)]
    blocks = "1" if asked.tiny else "6"
    asked.keep("comparison", said_by(asked, "compare", str(path), "--blocks", blocks, *changed, share=0.95))


def row(trial: Trial) -> dict[str, Any]:
    """What a table says of one load."""
    limit = trial_bottleneck(trial)
    measured = trial.measurement
    if measured is None:
        return {"failure": trial.failure, "rows_per_s": None, "p95_ms": None}
    server = {} if measured.server is None else to_plain(measured.server)
    told = {name: value for name, value in server.items() if "gpu" in name or name == "device_busy_ratio"}
    return {
        "configuration": trial.configuration.label(),
        "failure": trial.failure,
        "rows_per_s": measured.throughput_rows_per_s.value,
        "rows_per_s_interval": [measured.throughput_rows_per_s.low, measured.throughput_rows_per_s.high],
        "p50_ms": measured.latency_s["p50"].value * 1e3,
        "p95_ms": measured.latency_s["p95"].value * 1e3,
        "mean_batch_rows": server.get("mean_batch_rows"),
        "errors": measured.errors,
        "limit": to_plain(limit),
        "caveats": [one.code for one in measured.caveats],
        **told,
    }


def said_by(asked: Asked, *words: object, share: float) -> dict[str, Any]:
    """The JSON that a command prints, given this share of the time left; interrupted, it says what it has so far."""
    results = asked.scratch / "results"
    within_s = max(asked.left_s * share, 5.0)
    done = batchtune(*words, "--quiet", "--results", results, cwd=asked.scratch, within_s=within_s)
    sys.stderr.write(done.errors[-3000:])
    return {"exit_code": done.code, **(done.document or {"error": done.errors[-1000:] or "no word"})}
