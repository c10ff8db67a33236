"""Does `batchtune sweep` answer rightly for models of every kind and speed? A zoo of targets whose best is known.

    python tests/benchmarks/zoo/zoo.py [--only NAME,...] [--repeat 1] [--seconds S] [--fresh 3]

Each target (zoo_table.py) is swept by the default strategy in a child process. Then: is the exit code true; how far
lies the recommended configuration from the best of an exhaustive grid (zoo_truth.py; record_table.py records that of a
real model); does the recommended file hold its promise, and lie within its stated intervals, in fresh load tests at
the recommended load?

An answer is unsure by its own words when it ends with 5.
Exit 0 is true where the median fresh p95 and errors keep the SLO, 3 where nothing in the truth does, 5 always.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchtune.batching.parameters import Configuration
from batchtune.scenario.reader import read_scenario
from tests.benchmarks.commands import Ended, batchtune
from tests.benchmarks.fresh_loads import Fresh, fresh_load
from tests.benchmarks.zoo.zoo_table import TARGETS, ZooTarget
from tests.benchmarks.zoo.zoo_truth import Truth, truth_of

NEAR, FAR = 0.05, 0.10
EXIT_WORDS = {0: "established", 3: "nothing meets it", 5: "not established", 6: "invalid", 7: "target failed"}
START_UP_S = 60.0
"""For the server's start, the first compilation of the simulator and the end of a sweep, beyond its budget."""

FRESH_REQUESTS = 600
"""Of a fresh load test: p95 has 30 requests above it."""

FRESH_S = (3.0, 30.0)
"""A fresh load test takes at least and at most so long."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One sweep and what became of it; `why` the exit code is not true, "" where it is."""

    target: ZooTarget
    swept: Ended
    chosen: Configuration | None
    truth: Truth | None
    loads: Sequence[Fresh]
    holds: bool | None
    why: str

    @property
    def told(self) -> list[Fresh]:
        return _told(self.loads)

    @property
    def regret(self) -> float:
        """nan: unknown; inf: the SLO is missed in truth."""
        return math.nan if self.chosen is None or self.truth is None else self.truth.regret(self.chosen)

    @property
    def outside(self) -> bool:
        if self.chosen is None or self.truth is None:
            return False
        return self.chosen not in self.truth.candidates

    @property
    def fresh_inside(self) -> int:
        return sum(load.inside(self.swept.document) for load in self.told)


def judge(target: ZooTarget, seed: int, *, budget_s: float, fresh: int, folder: Path) -> Judged:
    """Sweep a target and hold the answer against the truth and against fresh load tests."""
    scenario = target.write_scenario(folder, seed=seed, seconds=budget_s)
    swept = batchtune("sweep", scenario, cwd=folder, within_s=2.0 * budget_s + 2.0 * START_UP_S)
    plain = swept.document.get("configuration")
    chosen = None if plain is None else Configuration.from_dict(plain)
    truth = truth_of(target, asked=() if chosen is None else [chosen])
    loads = () if chosen is None else _fresh_loads(scenario, swept, seed=seed, wanted=fresh)
    slo = read_scenario(scenario).slo
    holds = None if slo.p95_s is None else _holds(loads, p95_limit_s=slo.p95_s, error_ratio=slo.error_ratio)
    why = _untrue(target, swept, truth, holds, within_s=target.within_s or budget_s + START_UP_S)
    return Judged(target=target, swept=swept, chosen=chosen, truth=truth, loads=loads, holds=holds, why=why)


def _fresh_loads(scenario: Path, swept: Ended, *, seed: int, wanted: int) -> tuple[Fresh, ...]:
    """At the recommended load, as many as it takes until so many tell something, at most twice as many."""
    document = swept.document
    throughput_rps = float(document["throughput_rps"]["value"])
    duration_s = min(max(FRESH_REQUESTS / max(throughput_rps, 1e-9), FRESH_S[0]), FRESH_S[1])
    words = ["--set", f"load.duration={duration_s:.1f}s"]
    if document["objective"] == "capacity":
        words += ["--rate", f"{float(document['rate_rps']):.6g}"]
    within_s = 6.0 * duration_s + START_UP_S
    loads: tuple[Fresh, ...] = ()
    for attempt in range(2 * wanted):
        if len(_told(loads)) == wanted:
            break
        number = 1000 * seed + attempt
        loads += (
            fresh_load(scenario, document, *words, cwd=scenario.parent, seed=number, within_s=within_s),
        )
    return loads


def _told(loads: Sequence[Fresh]) -> list[Fresh]:
    """Those that neither the client nor a busy host spoilt: of the others `load` itself says that they do not count."""
    return [load for load in loads if load.spoilt_by is None]


def _holds(loads: Sequence[Fresh], *, p95_limit_s: float, error_ratio: float) -> bool | None:
    """Whether the median load test keeps the SLO; None where none tells."""
    told = _told(loads)
    if not told:
        return None
    return (
        statistics.median(load.p95_s for load in told) <= p95_limit_s
        and statistics.median(load.error_ratio for load in told) <= error_ratio
    )


def _untrue(
    target: ZooTarget, swept: Ended, truth: Truth | None, holds: bool | None, *, within_s: float
) -> str:
    """Why the exit code does not say what is so; "" where it does."""
    errors = [text for text in swept.errors.splitlines() if text.startswith("error: ")]
    ended = f"ended with {swept.code}{f': {errors[-1][7:107]}' if errors else ''}"
    if swept.seconds > within_s:
        return f"took {swept.seconds:.0f} s where {within_s:.0f} s are given"
    if target.says not in (swept.errors + json.dumps(swept.document)).lower():
        return f"does not say {target.says!r}"
    if target.exits:
        wanted = " or ".join(map(str, target.exits))
        return "" if swept.code in target.exits else f"{ended} where {wanted} is true"
    match swept.code:
        case 0:
            return "fresh load tests miss the SLO" if holds is False else ""
        case 3:
            meets = truth is not None and truth.anything_meets()
            return "some configuration does meet the SLO" if meets else ""
        case 5:
            return ""
        case _:
            return ended


def line(judged: Judged) -> str:
    regret = "  –  " if math.isnan(judged.regret) else f"{judged.regret:5.1%}"
    deviation = 0.0 if judged.truth is None else judged.truth.noise()
    noise = f" ±{deviation:.1%}" if deviation else ""
    told = len(judged.told)
    spoilt = f" ({len(judged.loads) - told} spoilt)" if told < len(judged.loads) else ""
    fresh = f"{judged.fresh_inside}/{told}{spoilt}" if judged.loads else "–"
    holds = {None: "–", True: "holds", False: "MISSED"}[judged.holds]
    recommended = "" if judged.chosen is None else judged.chosen.label()
    return (
        f"{judged.target.name:27s} exit {judged.swept.code} {'FALSE' if judged.why else 'true '} "
        f"{judged.swept.seconds:4.0f} s  regret {regret}{noise}  SLO {holds:6s} inside {fresh:4s} {recommended}"
        f"{' OUTSIDE THE SPACE' if judged.outside else ''}{f'  [{judged.why}]' if judged.why else ''}"
    )


def summary(results: Sequence[Judged]) -> list[str]:
    """One line a bar of the issue."""
    known = [judged for judged in results if not math.isnan(judged.regret)]
    near = sum(judged.regret <= NEAR for judged in known)
    sure = [judged for judged in results if judged.swept.code == 0]
    silent = [judged.target.name for judged in sure if judged.regret > FAR]
    stated = [judged for judged in sure if judged.holds is not None]
    inside, loads = sum(each.fresh_inside for each in results), sum(len(each.told) for each in results)
    codes = Counter(judged.swept.code for judged in results)
    ended = ", ".join(f"{codes[code]} × {code} {EXIT_WORDS.get(code, '')}".rstrip() for code in sorted(codes))
    return [
        f"exit codes true: {sum(not judged.why for judged in results)} of {len(results)} (bar: all); {ended}",
        f"within 5 % of the best: {near} of {len(known)} (bar: 90 %)",
        f"beyond 10 % without saying so: {', '.join(silent) or 'none'} (bar: none)",
        f"established and held: {sum(bool(judged.holds) for judged in stated)} of {len(stated)} (bar: 95 %)",
        f"fresh load tests within both stated intervals: {inside} of {loads} (bar: 9 of 10)",
        f"outside the space: {', '.join(judged.target.name for judged in results if judged.outside) or 'none'}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", default=",".join(TARGETS), help=f"names with commas between them, of {', '.join(TARGETS)}"
    )
    parser.add_argument("--repeat", type=int, default=1, help="sweeps of each target, each with its own seed")
    parser.add_argument("--seconds", type=float, help="budget of each sweep")
    parser.add_argument("--fresh", type=int, default=3, help="fresh load tests of each recommendation")
    asked = parser.parse_args()
    results: list[Judged] = []
    for target in [TARGETS[name] for name in asked.only.split(",")]:
        for seed in range(1, asked.repeat + 1):
            budget_s = asked.seconds or target.seconds
            print(f"{target.name}, seed {seed}, {budget_s:.0f} s", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                results.append(judge(target, seed, budget_s=budget_s, fresh=asked.fresh, folder=Path(folder)))
            print(line(results[-1]), flush=True)
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
