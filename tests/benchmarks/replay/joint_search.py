"""Does the joint search find what suits two models that share threads? On simulated servers, against every point there is.

    python tests/benchmarks/replay/joint_search.py --seeds 4 --points 60

For each case: the best of the whole grid (by three runs of 20 s at each factor), what the parameters that are best for each
model alone hold when put together (the better of their thread counts), and for each seed what the search recommends
(loads of 5 s), all as the factor of the stated mix that truly holds, by the same long runs. `gap` is how far the search ends
below the best of the grid; `gain` how far it ends above tuning each alone. The twin's place is taken by the simulator of
tests/tune/joint/pool_simulator.py; measured noise is that of 5 s of Poisson arrivals.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from batchtune.batching.parameters import Configuration
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.joint.answer import recommend_joint
from batchtune.tune.joint.bench import Finished
from batchtune.tune.joint.load import JointAsk, Kind
from batchtune.tune.joint.space import JointSpace, side_by_side
from batchtune.tune.joint.sweep import joint_sweep
from tests.tune.joint.pool_simulator import Device, simulated_load

LOAD_S = 5.0
TRUE_RUNS = 3
TRUE_S = 20.0
NEAR = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two models on one device; `what` says why they compete, or do not."""

    name: str
    what: str
    device: Device
    models: str
    space: str = "{max_batch_size: [1, 2, 4, 8, 16, 32], batch_timeout_micros: [0, 4000], num_batch_threads: [1, 2, 4]}"


CASES = (
    Case(
        name="short beside long",
        what="long batches of the reader keep the ranker waiting",
        device=Device(
            fixed_s={"ranker": 0.002, "reader": 0.004}, per_row_s={"ranker": 0.0002, "reader": 0.004}
        ),
        models="{name: ranker, model: a, rate: 200/s, slo: {p95: 25ms}}, "
        "{name: reader, model: b, rate: 40/s, slo: {p95: 150ms}}",
    ),
    Case(
        name="alike",
        what="both want what each wants alone",
        device=Device(
            fixed_s={"ranker": 0.003, "reader": 0.003}, per_row_s={"ranker": 0.0005, "reader": 0.0005}
        ),
        models="{name: ranker, model: a, rate: 200/s, slo: {p95: 40ms}}, "
        "{name: reader, model: b, rate: 200/s, slo: {p95: 40ms}}",
    ),
    Case(
        name="eager and dear",
        what="batches of the reader cost much however small: run at once they leave the ranker no room",
        device=Device(
            fixed_s={"ranker": 0.002, "reader": 0.015}, per_row_s={"ranker": 0.0003, "reader": 0.0003}
        ),
        models="{name: ranker, model: a, rate: 100/s, slo: {p95: 40ms}}, "
        "{name: reader, model: b, rate: 50/s, slo: {p95: 300ms}}",
        space="{max_batch_size: [4, 16, 64], batch_timeout_micros: [0, 10000, 50000, 100000], "
        "num_batch_threads: [1, 2]}",
    ),
)


def scenario_of(case: Case, *, seed: int = 1, points: int = 60) -> Scenario:
    return parse_scenario(f"""\
name: joint
target: {{models: [{case.models}]}}
load: {{arrivals: poisson, seed: {seed}}}
objective: capacity
search: {{seed: {seed}, budget: {{trials: {points}}}, space: {case.space}}}
fixed: {{max_enqueued_batches: 100}}
""")


def true_factor(
    case: Case, configuration: Configuration, *, than: float = 0.0, kind: Kind = "together", of: str = ""
) -> float:
    """The highest factor at which every SLO is kept in most of the long runs; 0.0: not above `than`."""
    scenario = scenario_of(case)

    def holds(factor: float) -> bool:
        kept = 0
        for block in range(1, TRUE_RUNS + 1):
            ask = JointAsk(configuration=configuration, factor=factor, kind=kind, of=of, block=100 + block)
            kept += simulated_load(scenario, case.device, ask, duration_s=TRUE_S).holds
            if kept > TRUE_RUNS // 2 or block - kept > TRUE_RUNS // 2:
                break
        return kept > TRUE_RUNS // 2

    low = than * 1.005 if than else 1.0
    if than and not holds(low):
        return 0.0
    while not than and not holds(low):
        low /= 2.0
        if low < 1 / 64:
            return 0.0
    high = low
    while holds(high := high * 1.2):
        low = high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def best_of_grid(case: Case, *, kind: Kind = "together", of: str = "") -> tuple[float, Configuration]:
    space = JointSpace(scenario_of(case))
    axes = space.axes_of(of)
    ranges = [range(values) if at in axes else (0,) for at, values in enumerate(space.shape)]
    best = (0.0, space.configuration(space.middle()))
    for point in itertools.product(*ranges):
        configuration = space.configuration(point)
        factor = true_factor(case, configuration, than=best[0], kind=kind, of=of)
        if factor > best[0]:
            best = (factor, configuration)
    return best


def searched(case: Case, seed: int, points: int, seconds: float = LOAD_S) -> tuple[float, int, Configuration]:
    """What the search's choice truly holds, how many loads it took, and the choice."""
    scenario = scenario_of(case, seed=seed, points=points)

    def run(ask: JointAsk, number: int, _first_trial: int) -> Finished:
        return Finished(
            load=simulated_load(scenario, case.device, ask, number=number, duration_s=seconds), trials=()
        )

    loads = [finished.load for finished in joint_sweep(scenario, run)]
    choice = recommend_joint(loads, scenario).configuration
    return true_factor(case, choice), len(loads), choice


def report(case: Case, seeds: int, points: int, seconds: float = LOAD_S) -> str:
    started_s = time.monotonic()
    best, best_configuration = best_of_grid(case)
    names = [own.name for own in scenario_of(case).target.models]
    alone = {name: best_of_grid(case, kind="alone", of=name) for name in names}
    together = side_by_side({name: configuration for name, (_, configuration) in alone.items()})
    apart = max(true_factor(case, configuration) for configuration in together)
    answers = [searched(case, seed, points, seconds) for seed in range(1, seeds + 1)]
    gaps = [1.0 - factor / best for factor, _, _ in answers]
    gains = [factor / apart - 1.0 for factor, _, _ in answers] if apart else []
    lines = [
        f"{case.name}: {case.what} ({JointSpace(scenario_of(case)).size} points)",
        f"  best of the grid   ×{best:.2f}  {best_configuration.label()}",
        f"  best for each alone, together ×{apart:.2f}; alone "
        + ", ".join(f"{name} ×{factor:.2f}" for name, (factor, _) in alone.items()),
        *(
            f"  search             ×{factor:.2f} in {loads} loads  {choice.label()}"
            for factor, loads, choice in answers
        ),
        f"  gap to the grid: mean {100 * statistics.mean(gaps):.1f} %, worst {100 * max(gaps):.1f} %",
    ]
    if gains:
        lines.append(f"  gain over each alone: mean {100 * statistics.mean(gains):.0f} %")
    return "\n".join([*lines, f"  ({time.monotonic() - started_s:.0f} s)"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--points", type=int, default=60, help="points that the search may try")
    parser.add_argument("--seconds", type=float, default=LOAD_S, help="length of a load of the search")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    wanted = parser.parse_args()
    cases = [case for case in CASES if wanted.case in case.name]
    with ProcessPoolExecutor(max_workers=2) as pool:
        for text in pool.map(
            report, cases, *([value] * len(cases) for value in (wanted.seeds, wanted.points, wanted.seconds))
        ):
            print(text, flush=True)


if __name__ == "__main__":
    main()
