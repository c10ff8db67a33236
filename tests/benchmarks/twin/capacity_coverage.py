"""Counts how often the bracket that a sweep states holds the true capacity, and its exit code is true. Virtual time.

    python tests/benchmarks/twin/capacity_coverage.py [--sweeps 100] [--budget 45] [--noise 0.015] [--processes 2] [--json FILE]

Each sweep is the default strategy on a simulated server (simulated_fleet) with Poisson arrivals, in turn on each of the
devices of `capacity_truth`, with a seed of its own; the speed of a whole run varies between runs. It is archived, and
`batchtune recommend` answers from it for the SLO and for 0.8, 0.5 and 0.25 of it. The truth is the highest rate whose
p95 keeps the limit on the device without noise, in long simulations.

Judged: the share of stated brackets, from the rate held to the rate missed, that hold the true capacity of what is
recommended (bar: 90 %); rates stated more than 5 % too high (2 %); the exit code, where 0 is true if the rate held is
within 1 % of the truth or below, 3 if nothing meets the SLO, 5 always; that a stricter SLO never has a higher capacity;
the loss to the best of the space. The tuner's own thinking takes no virtual time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from batchtune.archive.run import create_run
from batchtune.batching.parameters import Configuration
from batchtune.cli.app import app
from batchtune.errors import BatchtuneError
from batchtune.scenario.reader import format_scenario
from batchtune.tune.sweep.sweep import sweep
from tests.benchmarks.twin.capacity_truth import CASES, Case, best_rps, true_capacity_rps
from tests.twin.simulated_fleet import simulated_server

NOISE = 0.015
"""Standard deviation of log speed between runs: 1-2 % of throughput between runs of a live server."""

FACTORS = (1.0, 0.8, 0.5, 0.25)
TRUTH_ERROR, TOO_HIGH, NEAR = 0.01, 0.05, 0.05


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What `recommend` said for one SLO, and the truth, in requests/s.

    `held_rps` 0: nothing was recommended. `best_rps`: of the space and no batching; `true_rps`: of what is recommended.
    """

    factor: float
    exit_code: int
    best_rps: float
    recommended: str = ""
    held_rps: float = 0.0
    missed_rps: float = math.inf
    true_rps: float = 0.0

    @property
    def covers(self) -> bool:
        return self.held_rps <= self.true_rps <= self.missed_rps

    @property
    def too_high(self) -> bool:
        return self.held_rps > (1.0 + TOO_HIGH) * self.true_rps

    @property
    def exit_true(self) -> bool:
        match self.exit_code:
            case 0:
                return self.held_rps <= (1.0 + TRUTH_ERROR) * self.true_rps
            case 3:
                return self.best_rps == 0.0
            case code:
                return code == 5


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """One sweep: its answers, the strictest SLO last."""

    case: str
    seed: int
    trials: int
    answers: tuple[Answer, ...]

    @property
    def monotone(self) -> bool:
        rates = [answer.held_rps for answer in self.answers]
        return rates == sorted(rates, reverse=True)

    @property
    def regret(self) -> float:
        return 1.0 - self.answers[0].true_rps / self.answers[0].best_rps


def covered(case: Case, *, seed: int, budget_s: float, noise: float) -> Coverage:
    """Sweep, archive, ask for each SLO, compare."""
    scenario = case.scenario(seed=seed, budget_s=budget_s)
    clock, target, fleet = simulated_server(case.device(), seed=seed, noise=noise)
    with tempfile.TemporaryDirectory() as folder:
        run = create_run(scenario, format_scenario(scenario), root=Path(folder), provenance={})
        trials = 0
        try:
            for done in sweep(scenario, target, fleet, now_s=clock):
                run.append(done.trial, None)
                trials += 1
        except BatchtuneError as error:
            print(f"{case}, seed {seed}: the sweep ended: {error.message}", file=sys.stderr)
        said = [_recommend(run.path, case.p95_ms * factor) for factor in FACTORS]
    answers = tuple(_answer(case, factor, *heard) for factor, heard in zip(FACTORS, said, strict=True))
    return Coverage(case=str(case), seed=seed, trials=trials, answers=answers)


def _recommend(run: Path, p95_ms: float) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of `batchtune recommend`, called as its console script calls it."""
    done = CliRunner().invoke(app, ["recommend", str(run), "--slo-p95", f"{p95_ms:g}ms", "--json"])
    code = done.exception.exit_code if isinstance(done.exception, BatchtuneError) else done.exit_code
    try:
        return code, json.loads(done.stdout)
    except json.JSONDecodeError:
        return code, {}


def _answer(case: Case, factor: float, code: int, document: dict[str, Any]) -> Answer:
    best = best_rps(case, factor)
    if "configuration" not in document:
        return Answer(factor=factor, exit_code=code, best_rps=best)
    configuration, capacity = Configuration.from_dict(document["configuration"]), document["capacity"]
    return Answer(
        factor=factor,
        exit_code=code,
        best_rps=best,
        recommended=configuration.label(),
        held_rps=capacity["held_rps"],
        missed_rps=math.inf if capacity["missed_rps"] is None else capacity["missed_rps"],
        true_rps=true_capacity_rps(case, configuration, factor),
    )


def report(results: Sequence[Coverage]) -> str:
    count = len(results)
    first = [result.answers[0] for result in results if result.answers[0].held_rps]
    stricter = [answer for result in results for answer in result.answers[1:]]
    below = sum(answer.true_rps < answer.held_rps for answer in first)
    above = sum(answer.true_rps > answer.missed_rps for answer in first)
    widths = [answer.missed_rps / answer.held_rps for answer in first] or [math.inf]
    lines = [
        f"brackets that hold the truth: {sum(answer.covers for answer in first)} of {count}; truth below {below}, above {above}",
        f"stated more than {TOO_HIGH:.0%} too high: {sum(answer.too_high for answer in first)} of {count}",
        f"missed over held: median {statistics.median(widths):.2f}",
        f"exit codes true: {_exits([result.answers[0] for result in results])}",
        f"stricter SLOs: a capacity never higher in {sum(result.monotone for result in results)} of {count}",
        f"stricter SLOs, exit codes true: {_exits(stricter)}",
        f"within {NEAR:.0%} of the best: {sum(result.regret <= NEAR for result in results)} of {count}",
    ]
    return "\n".join(lines)


def _exits(answers: Sequence[Answer]) -> str:
    counts = Counter(answer.exit_code for answer in answers)
    true = Counter(answer.exit_code for answer in answers if answer.exit_true)
    each = ", ".join(f"{code}: {true[code]} of {counts[code]}" for code in sorted(counts))
    return f"{true.total()} of {counts.total()} ({each})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=45.0)
    parser.add_argument("--noise", type=float, default=NOISE)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    started_s = time.monotonic()
    results: list[Coverage] = []
    with ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn")) as pool:
        waiting = [
            pool.submit(
                covered,
                CASES[number % len(CASES)],
                seed=asked.first_seed + number,
                budget_s=asked.budget,
                noise=asked.noise,
            )
            for number in range(asked.sweeps)
        ]
        for future in waiting:
            results.append(future.result())
            print(_line(results[-1]), flush=True)
    print(f"{asked.sweeps} sweeps in {time.monotonic() - started_s:.0f} s")
    print(report(results))
    if asked.json is not None:
        plain = json.dumps([asdict(result) for result in results])
        text = json.dumps(json.loads(plain, parse_constant=str), indent=2)
        asked.json.write_text(text + "\n", encoding="utf-8")


def _line(result: Coverage) -> str:
    answer = result.answers[0]
    stricter = " ".join(f"{other.held_rps:.0f}({other.exit_code})" for other in result.answers[1:])
    return (
        f"{result.seed:3d} {result.case:42s} exit {answer.exit_code} held {answer.held_rps:6.0f}/s missed "
        f"{answer.missed_rps:6.0f} true {answer.true_rps:6.0f} {'in ' if answer.covers else 'OUT'} "
        f"regret {result.regret:5.1%}, stricter {stricter}{'' if result.monotone else ' NOT MONOTONE'}"
    )


if __name__ == "__main__":
    main()
