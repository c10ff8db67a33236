"""Searches what suits several models that share threads, on simulated servers, and says how good the answer truly is.

    python tests/benchmarks/replay/joint_search.py --loads 80 --seeds 8

For each case and seed a search of so many loads of 5 s, in virtual time: what its configuration truly holds, by three
long loads at each factor, as a share of the best that is known of the space (every point of a small one was tried, a large
one by descents). The server is the simulator of tests/tune/search/pool_simulator.py.

Mean share of the best with the time of 40 loads, four seeds, quiet, and how many of the established were below 90 % of
it; beside it the search of several models that was here before:

    case                 now    before
    short beside long    96 %   87 %
    alike                93 %   93 %
    eager and dear       78 %   84 %
    three                71 %   80 %
    parallel             89 %   58 %
    wrongly established  0 of 20, 0 of 20
"""

from __future__ import annotations

import argparse
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchtuneError
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.evidence.bracket import runs_of
from batchtune.tune.sweep.sweep import OneServer, sweep_nodes
from batchtune.tune.trials.trial import TrialRequest
from tests.tune.search.pool_simulator import APPLY_S, Device, SimulatedBench, simulated_load

LOAD_S = 5.0
TRUE_RUNS, TRUE_S = 3, 20.0

SPACE = "{max_batch_size: [1, 2, 4, 8, 16, 32], batch_timeout_micros: %s, num_batch_threads: %s}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A batch takes `fixed_s` + `per_row_s` · rows; `rate_rps` within `p95` is what is scaled."""

    fixed_s: float
    per_row_s: float
    rate_rps: int
    p95: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Models on one device, by name; `best`: the factor that the best point known holds."""

    name: str
    best: float
    models: dict[str, Model]
    serial: bool = True
    space: str = SPACE % ([0, 4000], [1, 2, 4])

    @property
    def device(self) -> Device:
        return Device(
            fixed_s={name: model.fixed_s for name, model in self.models.items()},
            per_row_s={name: model.per_row_s for name, model in self.models.items()},
            serial=self.serial,
        )


CASES = (
    # Long batches of the reader keep the ranker waiting.
    Case(
        name="short beside long",
        best=2.91,
        models={
            "ranker": Model(fixed_s=0.002, per_row_s=0.0002, rate_rps=200, p95="25ms"),
            "reader": Model(fixed_s=0.004, per_row_s=0.004, rate_rps=40, p95="150ms"),
        },
    ),
    # Both want what each wants alone.
    Case(
        name="alike",
        best=3.67,
        models={
            name: Model(fixed_s=0.003, per_row_s=0.0005, rate_rps=200, p95="40ms")
            for name in ("ranker", "reader")
        },
    ),
    # Batches of the reader cost much however small: run at once they leave the ranker no room.
    Case(
        name="eager and dear",
        best=12.8,
        models={
            "ranker": Model(fixed_s=0.002, per_row_s=0.0003, rate_rps=100, p95="40ms"),
            "reader": Model(fixed_s=0.015, per_row_s=0.0003, rate_rps=50, p95="300ms"),
        },
        space="{max_batch_size: [4, 16, 64], batch_timeout_micros: [0, 10000, 50000, 100000], num_batch_threads: [1, 2]}",
    ),
    # Seven parameters.
    Case(
        name="three",
        best=3.37,
        models={
            "a": Model(fixed_s=0.002, per_row_s=0.0002, rate_rps=100, p95="30ms"),
            "b": Model(fixed_s=0.004, per_row_s=0.002, rate_rps=40, p95="100ms"),
            "c": Model(fixed_s=0.008, per_row_s=0.0005, rate_rps=60, p95="200ms"),
        },
        space=SPACE % ([0, 4000, 20000], [1, 2, 4]),
    ),
    # A device that runs batches side by side: the best is far from the middle.
    Case(
        name="parallel",
        best=41.2,
        models={
            "ranker": Model(fixed_s=0.002, per_row_s=0.0004, rate_rps=200, p95="25ms"),
            "reader": Model(fixed_s=0.010, per_row_s=0.002, rate_rps=40, p95="100ms"),
        },
        serial=False,
        space=SPACE % ([0, 1000, 4000, 16000], [1, 2, 4, 8]),
    ),
)


def scenario_of(case: Case, *, seed: int = 1, loads: int = 80) -> Scenario:
    models = ", ".join(
        f"{{name: {name}, model: {name}, rate: {model.rate_rps}/s, slo: {{p95: {model.p95}}}}}"
        for name, model in case.models.items()
    )
    return parse_scenario(f"""\
name: joint
target: {{models: [{models}]}}
load: {{arrivals: poisson, seed: {seed}, duration: {LOAD_S}s, warm_up: 0s}}
objective: capacity
search: {{seed: {seed}, budget: {{time: {loads * (LOAD_S + APPLY_S)}s}}, space: {case.space}}}
fixed: {{max_enqueued_batches: 100}}
""")


def truly_holds(case: Case, configuration: Configuration, factor: float) -> bool:
    """Whether most of the long loads hold."""
    scenario = scenario_of(case)
    asks = (
        TrialRequest(
            configuration=configuration, source="sampler", reason="", scale=factor, block=100 + block
        )
        for block in range(TRUE_RUNS)
    )
    loads = [simulated_load(scenario, case.device, ask, duration_s=TRUE_S) for ask in asks]
    return 2 * sum(run.held for run in runs_of(loads, scenario.slo, scenario)) > TRUE_RUNS


def true_factor(case: Case, configuration: Configuration, *, near: float = 1.0) -> float:
    """The highest factor that truly holds, from this one on; 0.0: none down to a hundredth of it."""
    low = near
    while not truly_holds(case, configuration, low):
        low /= 1.2
        if low < near / 100.0:
            return 0.0
    high = low * 1.2
    while truly_holds(case, configuration, high):
        low, high = high, high * 1.2
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if truly_holds(case, configuration, middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """`share`: what the choice truly holds, of the best; `stated`: what is said of it, of what it truly holds."""

    share: float
    stated: float
    established: bool
    loads: int


def searched(case: Case, seed: int, *, loads: int) -> Searched:
    scenario = scenario_of(case, seed=seed, loads=loads)
    bench = SimulatedBench(scenario, case.device)
    made = [done.trial for done in sweep_nodes(scenario, lambda _report: OneServer(bench), now_s=bench.now_s)]
    try:
        chosen = recommend(made, scenario=scenario)
    except BatchtuneError:
        return Searched(share=0.0, stated=1.0, established=False, loads=len(made))
    true = true_factor(case, chosen.configuration, near=chosen.scale)
    return Searched(
        share=true / case.best,
        stated=chosen.scale / true if true else math.inf,
        established=chosen.established,
        loads=len(made),
    )


def report(case: Case, seeds: int, loads: int) -> str:
    done = [searched(case, seed, loads=loads) for seed in range(1, seeds + 1)]
    shares = sorted(each.share for each in done)
    wrong = sum(each.established and each.share < 0.9 for each in done)
    return (
        f"{case.name:18s} {math.prod(len(axis.values) for axis in scenario_of(case).axes.values()):6,d} points, {statistics.fmean(e.loads for e in done):.0f} "
        f"loads: mean {statistics.fmean(shares):.3f}, p10 {shares[len(shares) // 10]:.3f}, worst {shares[0]:.3f} of the "
        f"best; stated at most {max(e.stated for e in done):.2f} of the truth; established "
        f"{sum(e.established for e in done)} of {len(done)}, wrongly {wrong}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--loads", type=int, default=80, help="loads that there is time for")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    wanted = parser.parse_args()
    cases = [case for case in CASES if wanted.case in case.name]
    with ProcessPoolExecutor(max_workers=2) as pool:
        given = ([value] * len(cases) for value in (wanted.seeds, wanted.loads))
        for text in pool.map(report, cases, *given):
            print(text, flush=True)


if __name__ == "__main__":
    main()
