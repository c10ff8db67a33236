"""Do guided sweeps of a live server end at the best configuration?

    python tests/benchmarks/live/live_sweeps.py [--sweeps 10] [--budget 90] [--first 1]

Each sweep launches the bundled server on an emulated device and seeks the highest rate within a p95 limit, over two or
three parameters. The truth is the simulator's capacity of every point of the space on that very device, so regret is
how far the true capacity of the recommended configuration lies below the true best. The bar is 9 of 10 within 5 %.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtune.load.calibration import calibrate
from batchtune.load.fleet import LoadFleet
from batchtune.measure.caveats import HostGuard
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import target_of
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.search.contenders import reference_configurations
from batchtune.tune.sweep.sweep import sweep
from batchtune.tune.trials.trial import Trial
from batchtune.twin.simulator.simulate import Device
from tests.benchmarks.emulated import Emulated
from tests.twin.simulated_fleet import true_capacities, true_capacity

WITHIN = 0.05


@dataclass(frozen=True)
class Case:
    """A device with τ(b) = base + per_row · b, a limit on p95, and how many parameters are searched."""

    base_ms: float
    per_row_ms: float
    serial: bool
    p95_ms: float
    parameters: int

    @property
    def device(self) -> Emulated:
        return Emulated(base_ms=self.base_ms, per_row_ms=self.per_row_ms, parallel=not self.serial)

    def scenario(self, model: Path, *, seed: int, budget_s: float) -> Scenario:
        fixed: dict[str, Any] = {"max_enqueued_batches": 1000}
        space = {
            "max_batch_size": [1, 2, 4, 8, 16, 32, 64],
            "batch_timeout_micros": [0, 500, 1000, 2000, 5000, 10000],
        }
        if self.parameters == 3:
            space["num_batch_threads"] = [1, 2, 4]
        else:
            fixed["num_batch_threads"] = 2
        return Scenario.model_validate(
            {
                "name": "live-sweep",
                "target": {"model": str(model)},
                "request": {"protocol": "grpc"},
                "load": {"arrivals": "poisson", "warm_up": "500ms", "duration": "3s", "seed": seed},
                "slo": {"p95": f"{self.p95_ms}ms"},
                "objective": "capacity",
                "fixed": fixed,
                "search": {
                    "strategy": "guided",
                    "budget": {"time": f"{budget_s}s"},
                    "seed": seed,
                    "space": space,
                },
            }
        )

    def __str__(self) -> str:
        kind = "serial" if self.serial else "parallel"
        return f"{self.base_ms} + {self.per_row_ms}·b ms {kind}, p95 {self.p95_ms:g} ms, {self.parameters} parameters"


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


def swept(scenario: Scenario) -> tuple[list[Trial], float]:
    """Trials, and the seconds that they took with what was between them."""
    with target_of(scenario) as target, LoadFleet() as fleet:
        target.apply(reference_configurations(scenario)["no_batching"])
        started_s = time.monotonic()
        found = sweep(
            scenario,
            target,
            fleet,
            guard=HostGuard(),
            client_max_rps=lambda requests: calibrate(fleet, requests),
        )
        return [done.trial for done in found], time.monotonic() - started_s


def regret(number: int, case: Case, budget_s: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        model = case.device.write(Path(folder) / "device")
        scenario = case.scenario(model, seed=number, budget_s=budget_s)
        trials, seconds = swept(scenario)
        chosen = recommend(trials, scenario=scenario)
    device = Device(tau_s=case.device.tau_ms() / 1e3, serial=case.serial)
    truth = true_capacities(scenario, device)
    best_rps = max(truth.values())
    true_rps = truth.get(chosen.configuration) or true_capacity(scenario, chosen.configuration, device)
    lost = 1.0 - true_rps / best_rps
    outside_s = seconds - sum(trial.seconds for trial in trials)
    print(
        f"{number:2d} {case}: regret {lost:6.1%}, stated/true {(chosen.rate_rps or 0.0) / true_rps:.3f}, "
        f"{seconds:.0f} s ({outside_s:.0f} outside trials), {len(trials)} trials, {chosen.configuration.label()} "
        f"of {best_rps:.0f}/s{'' if chosen.established else '; not established'}",
        flush=True,
    )
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=10)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--budget", type=float, default=90.0)
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.sweeps)
    lost = [regret(number, CASES[(number - 1) % len(CASES)], given.budget) for number in numbers]
    good = sum(one <= WITHIN for one in lost)
    print(f"{good} of {len(lost)} sweeps end within {WITHIN:.0%} of the true best")


if __name__ == "__main__":
    main()
