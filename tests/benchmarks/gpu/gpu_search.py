"""Does the search find, on a real device, what a grid finds with many times the measurements? And the rule of thumb?

What each chose is measured again, side by side in mirrored blocks, so that neither is flattered by its luckiest run.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchtuneError
from batchtune.measure.quantiles import balanced_orders, ratio_estimate
from batchtune.plain_values import to_plain
from batchtune.scenario.reader import read_scenario
from batchtune.scenario.spec.scenario import Scenario
from tests.benchmarks.gpu.gpu_models import Asked, settings
from tests.benchmarks.gpu.gpu_served import SCENARIOS, Served, row, said_by, served

GRID = {"max_batch_size": (64, 16, 4), "batch_timeout_micros": (0, 2000), "num_batch_threads": (1, 4)}
TINY_GRID = {"max_batch_size": (1, 8), "batch_timeout_micros": (0,), "num_batch_threads": (1,)}
TINY = (
    "load.duration=300ms",
    "load.warm_up=100ms",
    "load.concurrency=8",
    "load.processes=1",
    "slo.p95=5s",
    "search.budget.trials=4",
)
BLOCKS = 6


def search(asked: Asked) -> None:
    """The guided search of gpu-quickstart.yaml against the best of a coarse grid."""
    found = swept(asked, "gpu-quickstart.yaml", "text_recognition", budget_s=35.0)
    asked.keep("guided", found)
    with served(scenario_of(asked, "gpu-quickstart.yaml", "text_recognition")) as server:
        rows: list[dict[str, Any]] = []
        best: tuple[float, Configuration] | None = None
        grid = TINY_GRID if asked.tiny else GRID
        for values in product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            if asked.left_s < 26.0 and best is not None:
                break
            trial = server.load(server.configuration(**point), duration_s=0.3 if asked.tiny else 0.7)
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
    name = "resnet50-gpu.yaml"
    rule = swept(asked, name, "resnet50", "search.strategy=rule", budget_s=12.0)
    asked.keep("rule", rule)
    guided = swept(asked, name, "resnet50", budget_s=20.0)
    asked.keep("guided", guided)
    if "configuration" in rule and "configuration" in guided:
        chosen = [Configuration.from_dict(one["configuration"]) for one in (rule, guided)]
        with served(scenario_of(asked, name, "resnet50")) as server:
            asked.keep("guided_over_rule", head_to_head(asked, server, *chosen))


def swept(asked: Asked, file: str, name: str, *changed: str, budget_s: float) -> dict[str, Any]:
    """What the command line recommends within the budget, or its error."""
    tiny = TINY if asked.tiny else ()
    budget = f"search.budget.time={20 if asked.tiny else budget_s:g}s"
    overrides = [f"--set={one}" for one in (*settings(asked, name), *changed, *tiny, budget)]
    return said_by(asked, "sweep", str(SCENARIOS / file), *overrides, share=0.7)


def scenario_of(asked: Asked, file: str, name: str) -> Scenario:
    return read_scenario(SCENARIOS / file, overrides=[*settings(asked, name), *(TINY if asked.tiny else ())])


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
    ratio = ratio_estimate(pairs)
    return {
        "same": False,
        "one": one.label(),
        "other": other.label(),
        "pairs": pairs,
        "ratio": to_plain(ratio),
    }


def _rows_per_s(asked: Asked, server: Served, configuration: Configuration, block: int) -> float:
    try:
        trial = server.load(configuration, duration_s=0.3 if asked.tiny else 0.7, block=block)
    except BatchtuneError:
        return math.nan
    return row(trial)["rows_per_s"] or math.nan
