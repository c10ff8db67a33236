"""Does `batchtune sweep` answer rightly for models of every kind and speed? A zoo of targets whose best is known.

    python tests/benchmarks/zoo/zoo.py [--only NAME,...] [--repeat 1] [--seconds S] [--fresh 3] [--json FILE]

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
from dataclasses import asdict, dataclass
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
    """One sweep and what became of it; regret: nan unknown, inf the SLO is missed in truth."""

    target: str
    seed: int
    exit_code: int
    exit_true: bool
    why: str
    seconds: float
    budget_s: float
    recommended: str
    inside_space: bool
    best: str
    regret: float
    truth_noise: float
    promise_holds: bool | None
    fresh_inside: int
    fresh: tuple[Fresh, ...]


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
    return Judged(
        target=target.name,
        seed=seed,
        exit_code=swept.code,
        exit_true=not why,
        why=why,
        seconds=swept.seconds,
        budget_s=budget_s,
        recommended="" if chosen is None else chosen.label(),
        inside_space=chosen is None or truth is None or truth.is_inside(chosen),
        best="" if truth is None or not truth.anything_meets() else truth.best().label(),
        regret=math.nan if chosen is None or truth is None else truth.regret(chosen),
        truth_noise=0.0 if truth is None else truth.noise(),
        promise_holds=holds,
        fresh_inside=sum(load.inside(swept.document) for load in _told(loads)),
        fresh=loads,
    )


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
    noise = f" ±{judged.truth_noise:.1%}" if judged.truth_noise else ""
    told = len(_told(judged.fresh))
    spoilt = f" ({len(judged.fresh) - told} spoilt)" if told < len(judged.fresh) else ""
    fresh = f"{judged.fresh_inside}/{told}{spoilt}" if judged.fresh else "–"
    holds = {None: "–", True: "holds", False: "MISSED"}[judged.promise_holds]
    return (
        f"{judged.target:27s} exit {judged.exit_code} {'true ' if judged.exit_true else 'FALSE'} "
        f"{judged.seconds:4.0f} s  regret {regret}{noise}  "
        f"SLO {holds:6s} inside {fresh:4s} {judged.recommended}"
        f"{'' if judged.inside_space else ' OUTSIDE THE SPACE'}{f'  [{judged.why}]' if judged.why else ''}"
    )


def summary(results: Sequence[Judged]) -> list[str]:
    """One line a bar of the issue."""
    known = [judged for judged in results if not math.isnan(judged.regret)]
    near = sum(judged.regret <= NEAR for judged in known)
    silent = [judged.target for judged in known if judged.regret > FAR and judged.exit_code == 0]
    stated = [judged for judged in results if judged.exit_code == 0 and judged.promise_holds is not None]
    inside = sum(judged.fresh_inside for judged in results)
    loads = sum(len(_told(judged.fresh)) for judged in results)
    codes = Counter(judged.exit_code for judged in results)
    ended = ", ".join(f"{codes[code]} × {code} {EXIT_WORDS.get(code, '')}".rstrip() for code in sorted(codes))
    return [
        f"exit codes true: {sum(judged.exit_true for judged in results)} of {len(results)} (bar: all); {ended}",
        f"within 5 % of the best: {near} of {len(known)} (bar: 90 %)",
        f"beyond 10 % without saying so: {', '.join(silent) or 'none'} (bar: none)",
        f"established and held: {sum(bool(judged.promise_holds) for judged in stated)} of {len(stated)} (bar: 95 %)",
        f"fresh load tests within both stated intervals: {inside} of {loads} (bar: 9 of 10)",
        f"outside the space: {', '.join(judged.target for judged in results if not judged.inside_space) or 'none'}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", default=",".join(TARGETS), help=f"names with commas between them, of {', '.join(TARGETS)}"
    )
    parser.add_argument("--repeat", type=int, default=1, help="sweeps of each target, each with its own seed")
    parser.add_argument("--seconds", type=float, help="budget of each sweep")
    parser.add_argument("--fresh", type=int, default=3, help="fresh load tests of each recommendation")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    results: list[Judged] = []
    for target in [TARGETS[name] for name in asked.only.split(",")]:
        for seed in range(1, asked.repeat + 1):
            budget_s = asked.seconds or target.seconds
            print(f"{target.name}, seed {seed}, {budget_s:.0f} s", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                results.append(judge(target, seed, budget_s=budget_s, fresh=asked.fresh, folder=Path(folder)))
            print(line(results[-1]), flush=True)
            if asked.json is not None:  # after each: a zoo that is stopped keeps what it has
                asked.json.write_text(_json(results), encoding="utf-8")
    print("\n".join(summary(results)))


def _json(results: Sequence[Judged]) -> str:
    """All figures; what is no number or infinite stands there as text."""
    plain = json.dumps([asdict(judged) for judged in results])
    return json.dumps(json.loads(plain, parse_constant=str), indent=2) + "\n"


if __name__ == "__main__":
    main()
