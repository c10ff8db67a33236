"""Sweeps as a new user types them, judged by common sense: is the answer the best of what fresh loads show?

    python tests/benchmarks/live/common_sense.py --draw 90 --seed 1 --file common_sense.jsonl [--minutes-max 170]
    python tests/benchmarks/live/common_sense.py --only transformer --budgets 20 --hosts quiet --file try.jsonl
    python tests/benchmarks/live/common_sense.py --draw 0 --file common_sense.jsonl       # only the table

Twelve targets (common_sense_targets.py) × capacity, closed loop, latency at a rate × 20, 45, 90 s × a quiet host and one
whose neighbour burns half of each CPU: a process pinned to each, started here and stopped by its id. `--draw` takes as many
of these by seed, evenly from each host and budget. Each is `batchtune sweep MODEL …`; then the recommended configuration,
the server's defaults, no batching, the best other that the sweep measured and the best of earlier sweeps in the file take
turns under fresh loads on the same host (common_sense_judge.py). Every result is appended to the file as it ends; what the
file has is not run again. The table holds the results against the floors of the noisy bench less 5 points.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, product, zip_longest
from pathlib import Path
from subprocess import run
from typing import Any, Literal

from batchtune.system import schedulable_cpus
from tests.benchmarks.bars import Bar
from tests.benchmarks.commands import ROOT, Ended, batchtune
from tests.benchmarks.live.burners import burning
from tests.benchmarks.live.common_sense_judge import (
    OURS,
    OVERSTATED,
    SideBySide,
    answer_of,
    judged,
    merit,
    rivals_of,
    trials_of,
)
from tests.benchmarks.live.common_sense_targets import OBJECTIVES, TARGETS, Objective, Target

Host = Literal["quiet", "neighbour"]
HOSTS: tuple[Host, ...] = ("quiet", "neighbour")
BUDGETS_S = (20, 45, 90)
START_UP_S = 60.0
"""For the look at the model, the server's start and the end of a sweep, beyond its budget."""

DESCRIBE = ("git", "describe", "--always", "--dirty", "--abbrev=7")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One sweep; its fields are the key of a row of results."""

    target: str
    objective: Objective
    budget_s: int
    host: Host

    def asked(self) -> Target:
        return replace(TARGETS[self.target], objective=self.objective)

    def is_of(self, row: Row) -> bool:
        return all(row[name] == value for name, value in asdict(self).items())

    def __str__(self) -> str:
        return f"{self.host:9s} {self.budget_s:2d} s {self.objective:8s} {self.target:16s}"


def drawn(asked: argparse.Namespace) -> list[Question]:
    """The questions asked for, one of each host and budget in turn, so that an unfinished run is balanced too."""
    random_order = random.Random(asked.seed)
    cells = []
    for host, budget_s in product(asked.hosts, asked.budgets):
        cell = [
            Question(target=target, objective=objective, budget_s=budget_s, host=host)
            for target, objective in product(asked.only, asked.objectives)
        ]
        random_order.shuffle(cell)
        cells.append(cell)
    in_turn = [question for question in chain.from_iterable(zip_longest(*cells)) if question is not None]
    return in_turn[: asked.draw]


def asked_and_judged(question: Question, folder: Path, before: Sequence[Row], *, judge_s: float) -> Row:
    """The row of one question."""
    target = question.asked()
    row: Row = {
        **asdict(question),
        "commit": run(DESCRIBE, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip(),
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average": os.getloadavg()[0],
    }
    words = [target.model_path(folder), *target.words()]
    words += ["--budget", f"{question.budget_s}s", "--results", str(folder / "results")]
    cpus = schedulable_cpus() if question.host == "neighbour" else []
    with burning(sorted(cpus), pauses=True):
        swept = batchtune("sweep", *words, cwd=folder, within_s=2.0 * question.budget_s + START_UP_S)
        started_s = time.monotonic()
        row |= _told(question, swept, folder, before, judge_s=judge_s)
    return {**row, "judge_s": round(time.monotonic() - started_s, 1)}


def _told(question: Question, swept: Ended, folder: Path, before: Sequence[Row], *, judge_s: float) -> Row:
    """What a sweep said, and what fresh loads say of it."""
    target = question.asked()
    document: Mapping[str, Any] = swept.document
    answer = answer_of(document, target)
    trials = trials_of(folder / document["run"]) if "run" in document else []
    held = any(merit(trial, target) > 0.0 for trial in trials)
    row: Row = {
        "exit_code": swept.code,
        "seconds": round(swept.seconds, 1),
        "error": document.get("error", "") or ("" if answer else swept.errors.strip()[-400:]),
        "established": swept.code == 0,
        "nonsense": answer is None and held,
        "recommended": document.get("label", ""),
        "share": None if answer else 0.0,
    }
    if answer is None:
        return row
    rivals = rivals_of(trials, answer.fixed, target, _best_earlier(question, before))
    configurations = {OURS: answer.fixed, **rivals}
    run_folder = folder / document["run"]
    bench = SideBySide(sweep_run=run_folder, folder=folder, target=target, configurations=configurations)
    verdict = judged(bench, answer, trials=trials, within_s=judge_s)
    return {
        **row,
        "stated": [
            value if math.isfinite(value) else None for value in (answer.value, answer.low, answer.high)
        ],
        **asdict(verdict),
        "configurations": configurations,
        "runs": [one.plain() for one in bench.runs],
    }


def _best_earlier(question: Question, before: Sequence[Row]) -> Mapping[str, Any] | None:
    """The configuration that did best in fresh loads after earlier sweeps of the same question on the same host."""
    alike = ("target", "objective", "host")
    best, most = None, 0.0
    for row in before:
        if all(row[name] == getattr(question, name) for name in alike):
            for name, reached in row.get("fresh", {}).items():
                if reached > most:
                    best, most = row["configurations"][name], reached
    return best


def wrong(row: Row) -> list[str]:
    """What common sense has against an answer; [] for nothing."""
    faults = [f"below {name}" for name in row.get("below", ())]
    if row["nonsense"]:
        faults.append("no answer, though the limit was held")
    if row["exit_code"] not in (0, 3, 5):
        faults.append(f"ended with {row['exit_code']}")
    if row["objective"] == "capacity" and row.get("overstated_ratio", 1.0) >= OVERSTATED:
        faults.append(f"stated ×{row['overstated_ratio']:.2f} of what it holds")
    return faults


def _share_bar(says: str, host: Host, budgets: tuple[int, ...], floor: float, ratio: float) -> Bar[Row]:
    return Bar(
        says=f"{says}: share of the best at least {floor:.0%}",
        of=lambda row: row["host"] == host and row["budget_s"] in budgets and row["share"] is not None,
        good=lambda row: row["share"] >= floor,
        ratio=ratio,
    )


def _established_bar(budget_s: int, ratio: float) -> Bar[Row]:
    return Bar(
        says=f"quiet, {budget_s} s: established",
        of=lambda row: row["host"] == "quiet" and row["budget_s"] == budget_s,
        good=lambda row: row["established"],
        ratio=ratio,
    )


def _stated_capacity(row: Row) -> bool:
    return row["objective"] == "capacity" and "overstated_ratio" in row and row["share"] is not None


def _answers_nothing(row: Row) -> bool:
    return row["nonsense"] or row["exit_code"] not in (0, 3, 5)


def _surely_below(row: Row) -> bool:
    return any(name != "earlier" for name in row.get("below", ()))


none = partial(Bar, ratio=0.0, most=True)
BARS: tuple[Bar[Row], ...] = (
    _share_bar("quiet, 45 and 90 s", "quiet", (45, 90), 0.90, 0.97),
    _share_bar("quiet, 20 s", "quiet", (20,), 0.80, 0.95),
    _share_bar("neighbour, 45 and 90 s (as harsh)", "neighbour", (45, 90), 0.80, 0.95),
    none(says="surely below defaults, no batching or own runs by 10 %", good=_surely_below),
    none(says="no answer where the limit was held", good=_answers_nothing),
    Bar(
        says="capacity stated at least 10 % above the truth",
        of=_stated_capacity,
        good=lambda row: row["overstated_ratio"] >= OVERSTATED,
        ratio=0.02,
        most=True,
    ),
    Bar(
        says="the truth lies in the stated bracket of the capacity",
        of=_stated_capacity,
        good=lambda row: row["interval_holds"],
        ratio=0.85,
    ),
    _established_bar(90, 0.70),
    _established_bar(45, 0.50),
    none(says="established wrongly", of=lambda row: row["established"], good=lambda row: bool(wrong(row))),
)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Counts per host and budget, the bars, and each answer that common sense has something against."""
    yield (
        f"{'host':9s} {'budget':>6s} {'sweeps':>6s} {'share: least, median':>20s} {'≥ 90 %':>6s} {'wrong':>5s} "
        f"{'established':>11s} {'wrongly':>7s} {'stated/true ≥ 1.05, 1.1':>23s} {'wall s: median, most':>20s}"
    )
    for host, budget_s in product(HOSTS, BUDGETS_S):
        cell = [row for row in rows if row["host"] == host and row["budget_s"] == budget_s]
        if cell:
            yield _cell_line(cell, host, budget_s)
    yield ""
    yield from (bar.line(rows) for bar in BARS)
    yield ""
    for row in rows:
        if wrong(row) or (row["share"] or 0.0) < 0.9:
            yield _row_line(row)


def _cell_line(cell: Sequence[Row], host: str, budget_s: int) -> str:
    shares = [row["share"] for row in cell if row["share"] is not None] or [0.0]
    stated = [row["overstated_ratio"] for row in cell if _stated_capacity(row)]
    seconds = [row["seconds"] for row in cell]
    return (
        f"{host:9s} {budget_s:4d} s {len(cell):6d} {f'{min(shares):.0%}, {statistics.median(shares):.0%}':>20s} "
        f"{sum(share >= 0.9 for share in shares):6d} {sum(bool(wrong(row)) for row in cell):5d} "
        f"{sum(row['established'] for row in cell):11d} "
        f"{sum(row['established'] and bool(wrong(row)) for row in cell):7d} "
        f"{f'{sum(one >= 1.049 for one in stated)}, {sum(one >= OVERSTATED for one in stated)} of {len(stated)}':>23s} "
        f"{f'{statistics.median(seconds):.0f}, {max(seconds):.0f}':>20s}"
    )


def _row_line(row: Row) -> str:
    question = Question(**{name: row[name] for name in ("target", "objective", "budget_s", "host")})
    fresh = ", ".join(f"{name} {_figure(row, reached)}" for name, reached in row.get("fresh", {}).items())
    share = "nobody held anything" if row["share"] is None else f"share {row['share']:.0%}"
    stated = f", stated {row['stated'][0]:,.4g}" if "stated" in row and row["objective"] != "latency" else ""
    sure = "established" if row["established"] else f"exit {row['exit_code']}"
    faults = "; ".join(wrong(row))
    return (
        f"{question} {share}, {sure}, {row['recommended'] or row['error'][:150]}{stated}: fresh {fresh or '-'}"
        f"{': ' if faults else ''}{faults}"
    )


def _figure(row: Row, reached: float) -> str:
    if row["objective"] != "latency":
        return f"{reached:,.4g}/s"
    return f"p95 {1e3 / reached:.3g} ms" if reached else "fails"


def rows_of(file: Path) -> list[Row]:
    """The results so far; [] where there is no file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path("common_sense.jsonl"), help="results, appended to")
    parser.add_argument("--draw", type=int, help="so many questions of all; absent: all")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=HOSTS)
    parser.add_argument("--budgets", nargs="+", type=int, choices=BUDGETS_S, default=BUDGETS_S)
    parser.add_argument(
        "--judge-s", type=float, default=45.0, help="no round of fresh loads begins after this"
    )
    parser.add_argument("--minutes-max", type=float, default=float("inf"), help="no sweep begins after this")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked = _arguments()
    started_s = time.monotonic()
    questions = drawn(asked)
    for number, question in enumerate(questions, start=1):
        rows = rows_of(asked.file)
        if any(question.is_of(row) for row in rows):
            continue
        if time.monotonic() - started_s > 60.0 * asked.minutes_max:
            print(f"stopped after {asked.minutes_max:g} minutes: {number - 1} of {len(questions)} questions")
            break
        with tempfile.TemporaryDirectory() as folder:
            row = asked_and_judged(question, Path(folder), rows, judge_s=asked.judge_s)
        with asked.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        print(
            f"{number:3d} of {len(questions)} {_row_line(row)} ({row['seconds']:.0f} + {row['judge_s']:.0f} s)",
            flush=True,
        )
    print("\n".join(table(rows_of(asked.file))))


if __name__ == "__main__":
    main()
