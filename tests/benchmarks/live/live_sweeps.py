"""Do guided sweeps of a live server end at the best configuration?

    python tests/benchmarks/live/live_sweeps.py [--sweeps 10] [--budget 90] [--first 1] [--json FILE]

Each sweep launches the bundled server on an emulated device and seeks the highest rate within a p95 limit, over two or
three parameters. The truth is the simulator's capacity of every point of the space on that very device, so regret is
how far the true capacity of the recommended configuration lies below the true best. The bar is 9 of 10 within 5 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE
from batchtune.load.calibration import calibrate
from batchtune.load.fleet import LoadFleet
from batchtune.measure.caveats import HostGuard
from batchtune.report.findings import text_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import target_of
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.search.contenders import reference_configurations
from batchtune.tune.sweep.sweep import sweep
from batchtune.tune.trials.trial import SearchSummary, Trial
from batchtune.twin.simulator.simulate import Device
from tests.tune.tune_fakes import heard
from tests.twin.simulated_fleet import true_capacities, true_capacity

WITHIN = 0.05
SIZES = [1, 2, 4, 8, 16, 32, 64]
TIMEOUTS = [0, 500, 1000, 2000, 5000, 10000]
THREADS = [1, 2, 4]


@dataclass(frozen=True)
class Case:
    """A device with τ(b) = base + per_row · b, a limit on p95, and how many parameters are searched."""

    base_ms: float
    per_row_ms: float
    serial: bool
    p95_ms: float
    dimensions: int

    def space(self) -> dict[str, list[int]]:
        two = {"max_batch_size": SIZES, "batch_timeout_micros": TIMEOUTS}
        return two if self.dimensions == 2 else {**two, "num_batch_threads": THREADS}

    def device(self) -> Device:
        rows = np.arange(DEFAULT_MAX_BATCH_SIZE + 1)
        return Device(tau_s=(self.base_ms + self.per_row_ms * rows) / 1e3, serial=self.serial)

    def __str__(self) -> str:
        kind = "serial" if self.serial else "parallel"
        return f"{self.base_ms} + {self.per_row_ms}·b ms {kind}, p95 {self.p95_ms:g} ms, {self.dimensions} parameters"


CASES = [
    Case(8.0, 0.6, True, 60.0, 2),
    Case(8.0, 0.6, True, 60.0, 3),
    Case(10.0, 0.5, True, 50.0, 3),
    Case(6.0, 1.0, True, 80.0, 2),
    Case(12.0, 1.2, False, 60.0, 3),
    Case(20.0, 1.0, False, 80.0, 2),
    Case(15.0, 2.0, False, 70.0, 3),
    Case(5.0, 0.4, True, 30.0, 2),
    Case(30.0, 0.8, False, 100.0, 3),
    Case(10.0, 0.3, True, 100.0, 3),
]


def write_model(case: Case, folder: Path) -> Path:
    version = folder / "device" / "1"
    version.mkdir(parents=True)
    document = {
        "service_time": {
            "base_ms": case.base_ms,
            "per_row_ms": case.per_row_ms,
            "concurrency": "serial" if case.serial else "parallel",
        },
        "inputs": {"x": {"dtype": "float32", "shape": [16]}},
        "outputs": {"y": {"dtype": "float32", "shape": [2]}},
    }
    (version / "emulated.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return version.parent


def scenario_of(case: Case, model: Path, *, seed: int, budget_s: float) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "live-sweep",
            "target": {"model": str(model)},
            "request": {"protocol": "grpc"},
            "load": {"arrivals": "poisson", "warm_up": "500ms", "duration": "3s", "seed": seed},
            "slo": {"p95": f"{case.p95_ms}ms"},
            "objective": "capacity",
            "fixed": {
                "max_enqueued_batches": 1000,
                **({"num_batch_threads": 2} if case.dimensions == 2 else {}),
            },
            "search": {
                "strategy": "guided",
                "budget": {"time": f"{budget_s}s"},
                "seed": seed,
                "space": case.space(),
            },
        }
    )


def swept(scenario: Scenario, *, show: bool) -> tuple[list[Trial], SearchSummary, float, float]:
    """Trials, summary, seconds, and seconds outside trials."""
    summaries: list[SearchSummary] = []
    trials: list[Trial] = []
    with target_of(scenario) as target, LoadFleet() as fleet:
        target.apply(reference_configurations(scenario)["no_batching"])
        started_s = time.monotonic()
        found = sweep(
            scenario,
            target,
            fleet,
            on_event=heard(on_summary=summaries.append),
            guard=HostGuard(),
            client_max_rps=lambda requests: calibrate(fleet, requests),
        )
        for one in found:
            trials.append(one.trial)
            if show:
                print_trial(one.trial, time.monotonic() - started_s)
        seconds = time.monotonic() - started_s
    return trials, summaries[0], seconds, seconds - sum(one.seconds for one in trials)


def print_trial(trial: Trial, elapsed_s: float) -> None:
    measured = trial.measurement
    p95_ms = measured.latency_s["p95"].value * 1e3 if measured else float("nan")
    rate = f"{trial.request.rate_rps:.0f}/s" if trial.request.rate_rps else ""
    objective = f"{trial.objective.value:.1f}" if trial.objective else "-"
    print(
        f"  {elapsed_s:5.1f} s {trial.source:11s} {trial.configuration.label():80s} {rate:>7s} {objective:>7s} "
        f"p95 {p95_ms:6.1f} ms {'ok' if trial.feasible else '--'} {trial.seconds:4.1f} s {trial.reason[:50]}",
        flush=True,
    )


def report(number: int, case: Case, budget_s: float, *, show: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        scenario = scenario_of(case, write_model(case, Path(folder)), seed=number, budget_s=budget_s)
        trials, summary, seconds, outside_s = swept(scenario, show=show)
        chosen = recommend(trials, scenario=scenario)
        truth = true_capacities(scenario, case.device())
    best = max(truth, key=lambda one: truth[one])
    true = truth.get(chosen.configuration) or true_capacity(scenario, chosen.configuration, case.device())
    found = {
        "sweep": number,
        "case": str(case),
        "recommended": chosen.configuration.label(),
        "best": best.label(),
        "true_best_rps": truth[best],
        "true_rps": true,
        "regret": 1.0 - true / truth[best],
        "stated_rps": chosen.rate_rps,
        "stated_over_true": (chosen.rate_rps or 0.0) / true,
        "seconds": seconds,
        "outside_trials_s": outside_s,
        "trials": len(trials),
        "established": chosen.established,
        "stop_reason": text_of(summary.stop_reason),
        "seconds_by_phase": dict(summary.seconds_by_phase),
    }
    print(
        f"{number:2d} {case}: regret {found['regret']:6.1%}, stated/true {found['stated_over_true']:.3f}, "
        f"{seconds:.0f} s ({outside_s:.0f} outside trials), {len(trials)} trials, {chosen.configuration.label()} "
        f"of {truth[best]:.0f}/s{'' if chosen.established else '; not established'}",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweeps", type=int, default=10)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--budget", type=float, default=90.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", action="store_true", help="print every trial")
    given = parser.parse_args()
    found = [
        report(number, CASES[(number - 1) % len(CASES)], given.budget, show=given.show)
        for number in range(given.first, given.first + given.sweeps)
    ]
    good = sum(one["regret"] <= WITHIN for one in found)
    print(f"{good} of {len(found)} sweeps end within {WITHIN:.0%} of the true best")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
