"""The search of a prototype, a file of its own outside the project, on the same devices and hosts as the product.

The file has `Search(bench, scenario, clock, budget, seed).go()`, `scenario_for(limit, seed)` and the product's `Bench`
and `Plan`, as they were when it was written: where those have moved on, its results are read from a file that was kept.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

from batchtune.errors import UsageError
from tests.benchmarks.noisy.devices import SimulatedDevice
from tests.benchmarks.noisy.hosts import Guard, VirtualClock
from tests.benchmarks.noisy.judge import Answered, Tried
from tests.benchmarks.noisy.virtual_fleet import VirtualFleet, VirtualTarget


def run_prototype(
    path: Path,
    device: SimulatedDevice,
    target: VirtualTarget,
    fleet: VirtualFleet,
    *,
    guard: Guard,
    clock: VirtualClock,
    seed: int,
    budget_s: float,
) -> Answered:
    """One sweep; its thinking is what it says itself.

    Raises:
        UsageError: it knows requests of one row only.
    """
    if device.rows != 1:
        raise UsageError(f"{device.name}: the prototype knows requests of one row only")
    module = _loaded(path)
    scenario = module.scenario_for(f"{device.p95_ms:g}ms", seed)
    bench = module.Bench(
        scenario,
        target,
        fleet,
        on_live=lambda _plan, _live: None,
        now_s=lambda: clock.now_s,
        sleep=clock.sleep,
        guard=guard,
    )
    search = module.Search(bench, scenario, lambda: clock.now_s, budget_s, seed)
    answer = search.go()
    return Answered(
        configuration=answer.contender.configuration,
        stated_rps=answer.stated,
        low_rps=answer.lo,
        high_rps=answer.hi,
        established=answer.established,
        runs=answer.runs,
        seconds=answer.seconds + answer.thinking_s,
        thinking_s=answer.thinking_s,
        trials=tuple(
            Tried(
                configuration=contender.configuration,
                rate_rps=run.rate or run.answered,
                held=run.held and math.isfinite(run.answered),
            )
            for contender in search.contenders
            for run in contender.runs
        ),
    )


@cache
def _loaded(path: Path) -> Any:
    """The module; what lies beside it is imported from there."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
