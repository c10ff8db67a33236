"""What does the bundled server make of the models: its share of the card's own speed, the two published tables, and sweeps.

What two searches chose is measured again, side by side in mirrored blocks, so that neither is flattered by its luckiest run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchtuneError
from batchtune.load.calibration import calibrate
from batchtune.load.fleet import LoadFleet
from batchtune.measure.caveats import HostGuard
from batchtune.measure.quantiles import balanced_orders, ratio_estimate
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
FILES = {
    "text_recognition": "text-recognition-gpu.yaml",
    "imdb_transformer": "imdb-benchmark-gpu.yaml",
    "resnet50": "resnet50-gpu.yaml",
}

# Rows in a batch, rows in a request, clients and client processes for each thread count tried: always more requests
# under way than four threads can take.
FULL = {
    "text_recognition": (32, 1, 192, 2),
    "imdb_transformer": (512, 5, 640, 2),
    "resnet50": (16, 1, 96, 3),
}
THREADS = (1, 2, 4)
TABLE_VARIANTS = {
    "one_request_at_a_time": {"max_batch_size": 2},
    "dynamic_batching": {},
    "dynamic_batching_two_threads": {"num_batch_threads": 2},
}
GRID = {"max_batch_size": (64, 16, 4), "batch_timeout_micros": (0, 2000), "num_batch_threads": (1, 4)}
TINY_GRID = {"max_batch_size": (1, 8), "batch_timeout_micros": (0,), "num_batch_threads": (1,)}
SHORT = ("load.duration=300ms", "load.warm_up=100ms")
TINY = (*SHORT, "load.concurrency=8", "load.processes=1", "slo.p95=5s", "search.budget.trials=4")
BLOCKS = 6


@dataclass(kw_only=True)
class Served:
    """A server, a fleet and the scenario's requests, for one load after another."""

    scenario: Scenario
    bench: Bench
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def load(
        self,
        configuration: Configuration,
        duration_s: float,
        *,
        concurrency: int | None = None,
        block: int = 0,
    ) -> Trial:
        request = TrialRequest(
            configuration=configuration,
            source="probe",
            reason="gpu check",
            concurrency=concurrency,
            duration_s=duration_s,
        )
        seed = self.scenario.load.seed + block
        return self.bench.run(Plan(number=next(self.numbers), seed=seed, request=request)).trial


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


def scenario_of(asked: Asked, model: str, *changed: str, file: str | None = None) -> Scenario:
    return read_scenario(SCENARIOS / (file or FILES[model]), overrides=[*settings(asked, model), *changed])


def server_share(asked: Asked) -> None:
    """Keep each model's rows per second at full batches, and their share of what the model does alone."""
    ceilings = json.loads((asked.scratch / "ceiling.json").read_text())["rows"]
    for name, full in FULL.items():
        size, request_rows, clients, processes = (8, full[1], 16, 1) if asked.tiny else full
        changed = [f"request.rows={request_rows}", "request.protocol=grpc", f"load.concurrency={clients}"]
        changed += [f"load.processes={processes}", "load.requests=null", "load.duration=2s", "variants={}"]
        scenario = scenario_of(asked, name, *changed)
        alone = ceilings.get(name, {}).get(str(size), {})
        ceiling = alone.get("graph") or alone.get("eager")
        both = alone.get("graph_two_streams") or ceiling
        rows: dict[str, Any] = {}
        kept = {"size": size, "clients": clients, "model_rows_per_s": ceiling, "threads": rows}
        batching = {"max_batch_size": size, "allowed_batch_sizes": (size,), "batch_timeout_micros": 1000}
        with served(scenario) as server:
            for threads in THREADS[:1] if asked.tiny else THREADS:
                batching |= {"num_batch_threads": threads, "max_enqueued_batches": 1000}
                trial = server.load(scenario.configuration(batching), 0.5 if asked.tiny else 1.5)
                rows[str(threads)] = found = row(trial)
                found["share_of_model"] = _share(found["rows_per_s"], ceiling)
                found["share_of_two_streams"] = _share(found["rows_per_s"], both)
                asked.keep(name, kept)


def _share(rows_per_s: float | None, ceiling: float | None) -> float | None:
    """None where the ceiling was not measured."""
    return None if ceiling is None else (rows_per_s or 0.0) / ceiling


def text_recognition(asked: Asked) -> None:
    """Keep the comparison of the variants at 16 clients, then the published table: 2 to 16 clients."""
    short = SHORT if asked.tiny else ("load.duration=1s",)
    asked.keep(
        "comparison", compared(asked, "text_recognition", 2 if asked.tiny else BLOCKS, *short, share=0.6)
    )
    table: dict[str, list[dict[str, Any]]] = {}
    scenario = scenario_of(asked, "text_recognition", *short)
    with served(scenario) as server:
        for name, parameters in TABLE_VARIANTS.items():
            for clients in (2, 16) if asked.tiny else range(2, 17, 2):
                configuration, seconds = scenario.configuration(parameters), 0.3 if asked.tiny else 0.8
                trial = server.load(configuration, seconds, concurrency=clients)
                table.setdefault(name, []).append({"clients": clients, **row(trial)})
                asked.keep("table", table)


def imdb(asked: Asked) -> None:
    """Keep the comparison of REST and gRPC, batching on and off; fewer requests than published, to have six blocks."""
    short = ["load.requests=4000", "load.warm_up=300ms"]
    if asked.tiny:
        short = ["load.requests=200", "load.concurrency=20", "load.warm_up=100ms"]
    blocks = 1 if asked.tiny else BLOCKS
    asked.keep("comparison", compared(asked, "imdb_transformer", blocks, *short, share=0.95))


def search(asked: Asked) -> None:
    """The guided search of gpu-quickstart.yaml against the best of a coarse grid."""
    file, model = "gpu-quickstart.yaml", "text_recognition"
    found = swept(asked, file, model, budget_s=35.0)
    asked.keep("guided", found)
    scenario = scenario_of(asked, model, *TINY * asked.tiny, file=file)
    with served(scenario) as server:
        rows: list[dict[str, Any]] = []
        best: tuple[float, Configuration] | None = None
        grid = TINY_GRID if asked.tiny else GRID
        for values in product(*grid.values()):
            if asked.left_s < 26.0 and best is not None:
                break
            point = dict(zip(grid, values, strict=True))
            trial = server.load(scenario.configuration(point), 0.3 if asked.tiny else 0.7)
            rows.append({**point, **row(trial), "feasible": trial.feasible})
            asked.keep("grid", rows)
            reached = rows[-1]["rows_per_s"] or 0.0
            if trial.feasible and (best is None or reached > best[0]):
                best = reached, trial.configuration
        if best is not None and "configuration" in found:
            chosen = Configuration.from_dict(found["configuration"])
            asked.keep("guided_over_grid", head_to_head(asked, server, best[1], chosen))


def rule_against_search(asked: Asked) -> None:
    """Throughput × interval alone against the guided search, for ResNet-50."""
    file, model = FILES["resnet50"], "resnet50"
    rule = swept(asked, file, model, "search.strategy=rule", budget_s=12.0)
    asked.keep("rule", rule)
    guided = swept(asked, file, model, budget_s=20.0)
    asked.keep("guided", guided)
    if "configuration" in rule and "configuration" in guided:
        chosen = [Configuration.from_dict(one["configuration"]) for one in (rule, guided)]
        with served(scenario_of(asked, model, *TINY * asked.tiny)) as server:
            asked.keep("guided_over_rule", head_to_head(asked, server, *chosen))


def head_to_head(asked: Asked, server: Served, one: Configuration, other: Configuration) -> dict[str, Any]:
    """The factor of `other` over `one` in throughput, from mirrored blocks."""
    if one == other:
        return {"same": True, "one": one.label(), "other": other.label(), "ratio": {"value": 1.0}}
    pairs: list[tuple[float, float]] = []
    for block, order in enumerate(balanced_orders((one, other), blocks=2 if asked.tiny else BLOCKS, seed=1)):
        if asked.left_s < 3.0:
            break
        reached = {each.label(): _rows_per_s(asked, server, each, block) for each in order}
        pairs.append((reached[one.label()], reached[other.label()]))
    ratio = to_plain(ratio_estimate(pairs))
    return {"same": False, "one": one.label(), "other": other.label(), "pairs": pairs, "ratio": ratio}


def _rows_per_s(asked: Asked, server: Served, configuration: Configuration, block: int) -> float:
    try:
        trial = server.load(configuration, 0.3 if asked.tiny else 0.7, block=block)
    except BatchtuneError:
        return math.nan
    return row(trial)["rows_per_s"] or math.nan


def row(trial: Trial) -> dict[str, Any]:
    """What a table says of one load."""
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
        "limit": to_plain(trial_bottleneck(trial)),
        "caveats": [one.code for one in measured.caveats],
        **told,
    }


def swept(asked: Asked, file: str, model: str, *changed: str, budget_s: float) -> dict[str, Any]:
    """What the command line recommends within the budget, or its error."""
    budget = f"search.budget.time={20 if asked.tiny else budget_s:g}s"
    changes = [*changed, *TINY * asked.tiny, budget]
    return said_by(asked, model, "sweep", SCENARIOS / file, changed=changes, share=0.7)


def compared(asked: Asked, model: str, blocks: int, *changed: str, share: float) -> dict[str, Any]:
    words = ["compare", SCENARIOS / FILES[model], "--blocks", blocks]
    return said_by(asked, model, *words, changed=changed, share=share)


def said_by(
    asked: Asked, model: str, *words: object, changed: list[str] | tuple[str, ...], share: float
) -> dict[str, Any]:
    """The JSON that a command prints, given this share of the time left; interrupted, it says what it has so far."""
    overrides = [f"--set={one}" for one in (*settings(asked, model), *changed)]
    options = ["--quiet", "--results", asked.scratch / "results", *overrides]
    done = batchtune(*words, *options, cwd=asked.scratch, within_s=max(asked.left_s * share, 5.0))
    sys.stderr.write(done.errors[-3000:])
    return {"exit_code": done.code, **(done.document or {"error": done.errors[-1000:] or "no word"})}
