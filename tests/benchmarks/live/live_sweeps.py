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
from pathlib import Path

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
from tests.benchmarks.zoo.zoo_table import ZooTarget
from tests.twin.simulated_fleet import true_capacities, true_capacity

WITHIN = 0.05


TIMEOUTS_MICROS = [0, 500, 1000, 2000, 5000, 10000]


def case(base_ms: float, per_row_ms: float, kind: str, p95: str, parameters: int) -> ZooTarget:
    """A device with τ(b) = base + per_row · b, a limit on p95, and how many parameters are searched."""
    return ZooTarget(
        f"{base_ms} + {per_row_ms}·b ms {kind}, p95 {p95}, {parameters} parameters",
        Emulated(base_ms=base_ms, per_row_ms=per_row_ms, parallel=kind == "parallel"),
        truth="exact",
        objective="capacity",
        p95=p95,
        threads=(1, 2, 4) if parameters == 3 else (),
    )


CASES = (
    case(8.0, 0.6, "serial", "60ms", 2),
    case(8.0, 0.6, "serial", "60ms", 3),
    case(10.0, 0.5, "serial", "50ms", 3),
    case(6.0, 1.0, "serial", "80ms", 2),
    case(12.0, 1.2, "parallel", "60ms", 3),
    case(20.0, 1.0, "parallel", "80ms", 2),
    case(15.0, 2.0, "parallel", "70ms", 3),
    case(5.0, 0.4, "serial", "30ms", 2),
    case(30.0, 0.8, "parallel", "100ms", 3),
    case(10.0, 0.3, "serial", "100ms", 3),
)


def scenario_of(target: ZooTarget, model: Path, *, seed: int, budget_s: float) -> Scenario:
    document = target.document(str(model), seed=seed, seconds=budget_s)
    document["name"] = "live-sweep"
    document["load"]["duration"] = "3s"
    document["search"]["space"]["batch_timeout_micros"] = TIMEOUTS_MICROS
    if not target.threads:
        document["fixed"]["num_batch_threads"] = 2
    return Scenario.model_validate(document)


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


def regret(number: int, target: ZooTarget, budget_s: float) -> float:
    emulated = target.model
    assert isinstance(emulated, Emulated)
    with tempfile.TemporaryDirectory() as folder:
        model = emulated.write(Path(folder) / "device")
        scenario = scenario_of(target, model, seed=number, budget_s=budget_s)
        trials, seconds = swept(scenario)
        chosen = recommend(trials, scenario=scenario)
    device = Device(tau_s=emulated.tau_ms() / 1e3, serial=not emulated.parallel)
    truth = true_capacities(scenario, device)
    best_rps = max(truth.values())
    true_rps = truth.get(chosen.configuration) or true_capacity(scenario, chosen.configuration, device)
    lost = 1.0 - true_rps / best_rps
    outside_s = seconds - sum(trial.seconds for trial in trials)
    print(
        f"{number:2d} {target.name}: regret {lost:6.1%}, stated/true {(chosen.rate_rps or 0.0) / true_rps:.3f}, "
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
