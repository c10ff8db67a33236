"""Fresh loads of a recommended configuration beside its rivals, and what they say of the answer of a sweep."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.commands import batchtune
from tests.benchmarks.live.common_sense_targets import Target

OURS = "recommended"
PARAMETERS = ("max_batch_size", "batch_timeout_micros", "max_enqueued_batches", "num_batch_threads")
BELOW = 0.90
"""An answer is below a rival that does better by more than this: the floor of the noisy bench less 5 points."""

STEP = 1.1
"""Rates are told apart by this factor: a rival that misses at 1.1 times what is held leaves a share above 0.9."""

OVERSTATED = 1.0999
"""Stated over true: 5 % as on the noisy bench, and 5 points; just below STEP."""

BLOCKS = 4
"""Of configurations at one load: equal ones seem to differ in all four by chance in one of sixteen, before the second look."""

ROUNDS_MAX = 5
RUN_S = (1.0, 1.5, 2.5)
"""At a stated load; of a capacity, where a stall of 50 ms must be no twentieth of it; at most, of slow devices."""

ERRORS_MAX = 0.01
Loads = list[tuple[str, float | None]]
"""Names of configurations, each with a rate; None: the closed loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a sweep recommends: the parameters, and its figure (requests/s, or p95 in seconds of `latency`)."""

    fixed: Mapping[str, Any]
    value: float
    low: float
    high: float


def answer_of(document: Mapping[str, Any], target: Target) -> Answer | None:
    """All that is read of a sweep's JSON but `run` and `error`; None: it recommends nothing."""
    configuration = document.get("configuration")
    if configuration is None:
        return None
    batching = configuration["batching"]
    fixed = {"enable_batching": False} if batching is None else _named(batching)
    figures = {
        "capacity": document["capacity_rps"] or document["throughput_rps"],
        "closed": document["throughput_rps"],
        "latency": document["latency_s"]["p95"],
    }
    figure = figures[target.objective]
    # Where nothing was missed the upper end is not known (null): the interval is open there.
    high = math.inf if figure["high"] is None else float(figure["high"])
    return Answer(fixed=fixed, value=float(figure["value"]), low=float(figure["low"] or 0.0), high=high)


def _named(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load of one configuration; `p95_s` is infinite where too many requests failed."""

    name: str
    rate_rps: float | None
    block: int
    throughput_rps: float
    p95_s: float
    error_ratio: float
    answered_ratio: float

    @classmethod
    def of(cls, row: Mapping[str, Any], *, name: str = "", blocks_before: int = 0) -> Run:
        """From a row of `batchtune trials --json`."""
        offered_rps = (row["requests"] or 0) / (row["window_s"] or math.inf)
        throughput_rps = row["throughput_rps"] or 0.0
        return cls(
            name=name,
            rate_rps=row["rate_rps"],
            block=(row["block"] or 0) + blocks_before,
            throughput_rps=throughput_rps,
            p95_s=math.inf if row["p95_ms"] is None else row["p95_ms"] / 1e3,
            error_ratio=1.0 if row["error_ratio"] is None else row["error_ratio"],
            answered_ratio=throughput_rps / offered_rps if offered_rps else 0.0,
        )

    def held(self, limit_s: float) -> bool:
        """Whether nearly all was answered within the limit (8 % of a short run may still be under way)."""
        return self.p95_s <= limit_s and self.error_ratio <= ERRORS_MAX and self.answered_ratio >= 0.92

    def plain(self) -> list[Any]:
        """Name, rate, requests/s, p95 in ms: for the file of results."""
        rate = None if self.rate_rps is None else round(self.rate_rps, 1)
        p95_ms = round(self.p95_s * 1e3, 3) if self.p95_s < math.inf else None
        return [self.name, rate, round(self.throughput_rps, 1), p95_ms]


def trials_of(run: Path) -> list[dict[str, Any]]:
    """The trials of a run as `batchtune trials` tells them."""
    ended = batchtune("trials", run, cwd=run, within_s=60.0)
    return ended.document if isinstance(ended.document, list) else []


def fixed_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a trial, as `fixed` of a scenario says it."""
    if not row["batching"]:
        return {"enable_batching": False}
    return _named({name: row.get(name) for name in PARAMETERS})


def merit(row: Mapping[str, Any], target: Target) -> float:
    """How good a trial was: requests/s, or 1/p95; 0 where it tells nothing, or missed the limit.

    A closed loop of several clients says of a capacity that about so much is held: 0.8 of its throughput; of a rate a
    quarter below its throughput that this is answered, at half of the merit.
    """
    run, clients = Run.of(row), row["concurrency"] or 0
    limit_s = math.inf if target.objective == "latency" else target.limit_ms / 1e3
    if row["state"] != "complete" or run.throughput_rps == 0.0 or not run.held(limit_s):
        return 0.0
    match target.objective:
        case "latency":
            if run.rate_rps is None:
                return 0.5 / run.p95_s if clients > 1 and run.throughput_rps > 1.25 * target.rate_rps else 0.0
            return 1.0 / run.p95_s if math.isclose(run.rate_rps, target.rate_rps, rel_tol=0.01) else 0.0
        case "closed":
            return run.throughput_rps if clients == target.clients else 0.0
        case "capacity" if not clients:
            return run.rate_rps or run.throughput_rps
        case "capacity":
            return 0.8 * run.throughput_rps if clients > 1 else 0.0


def rivals_of(
    trials: Iterable[Mapping[str, Any]],
    fixed: Mapping[str, Any],
    target: Target,
    earlier: Mapping[str, Any] | None,
) -> dict[str, Mapping[str, Any]]:
    """Server defaults, no batching, the best other that the sweep measured, and the best of earlier sweeps."""
    rivals: dict[str, Mapping[str, Any]] = {"defaults": {}, "no batching": {"enable_batching": False}}
    taken = [fixed, *rivals.values()]
    others = [row for row in trials if fixed_of(row) not in taken and merit(row, target) > 0.0]
    if others:
        rivals["own"] = fixed_of(max(others, key=lambda row: merit(row, target)))
    if earlier is not None and earlier not in [*taken, rivals.get("own")]:
        rivals["earlier"] = earlier
    return {name: rival for name, rival in rivals.items() if rival != fixed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What fresh loads say of an answer.

    `share` of the best rival, at most 1 (None: nobody held anything); `below` names rivals that surely do better by
    more than BELOW allows; `overstated_ratio` is stated over true, 1 where the figure stated was reached, None: it fails;
    `interval_holds` whether the truth lies in the stated interval; `fresh` is the merit of each configuration.
    """

    share: float | None
    below: tuple[str, ...]
    overstated_ratio: float | None
    interval_holds: bool
    fresh: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class SideBySide:
    """Runs configurations in turn on one server, launched as the sweep launched its own: `batchtune compare`."""

    sweep_run: Path
    folder: Path
    target: Target
    configurations: Mapping[str, Mapping[str, Any]]
    runs: list[Run] = field(default_factory=list)
    calls: int = 0

    def load(self, loads: Loads, *, blocks: int) -> None:
        """Each once in every block; what came out is added to `runs`, its blocks counted on."""
        self.calls += 1
        blocks_before = max((run.block for run in self.runs), default=0)
        scenario = self.folder / f"duel-{self.calls}.yaml"
        scenario.write_text(yaml.safe_dump(self._document(loads), sort_keys=False), encoding="utf-8")
        words = ["compare", scenario, "--blocks", blocks, "--results", self.folder / "duels"]
        ended = batchtune(*words, cwd=self.folder, within_s=60.0 + 10.0 * blocks * len(loads))
        if "run" not in ended.document:
            print(f"  compare ended with {ended.code}: {ended.errors.strip()[-400:]}", file=sys.stderr)
            return
        for row in trials_of(self.folder / ended.document["run"]):
            if row["reason"].startswith("load-") and row["block"] is not None:
                name, _ = loads[int(row["reason"].removeprefix("load-"))]
                self.runs.append(Run.of(row, name=name, blocks_before=blocks_before))

    def _document(self, loads: Loads) -> dict[str, Any]:
        """The scenario that the sweep kept, without its search, with a variant for each load."""
        document: dict[str, Any] = yaml.safe_load(
            (self.sweep_run / "scenario.yaml").read_text(encoding="utf-8")
        )
        for name in ("search", "fixed", "variants", "check", "slo"):
            document.pop(name, None)
        document["objective"] = "throughput" if self.target.objective == "closed" else "latency"
        limit_s = self.target.limit_ms / 1e3
        slowest_rps = min((rate_rps for _, rate_rps in loads if rate_rps), default=math.inf)
        least_s = RUN_S[self.target.objective == "capacity"]
        duration_s = min(max(least_s, 20.0 * limit_s, 300.0 / slowest_rps), RUN_S[-1])
        document["load"] |= {
            "warm_up": f"{min(max(0.3, 2.5 * limit_s), 0.6):g}s",
            "duration": f"{duration_s:.2f}s",
            "seed": 1000 * self.calls,
        }
        document["variants"] = {
            f"load-{number}": {
                "fixed": dict(self.configurations[name]),
                **({} if rate_rps is None else {"load": {"rate": rate_rps}}),
            }
            for number, (name, rate_rps) in enumerate(loads)
        }
        if self.target.objective != "closed":
            document["load"]["rate"] = loads[0][1]
        return document


def judged(
    bench: SideBySide, answer: Answer, *, trials: Sequence[Mapping[str, Any]], within_s: float
) -> Verdict:
    """The verdict on an answer; `trials` are those of the sweep, and no round of loads begins after `within_s`."""
    if bench.target.objective != "capacity":
        return _judged_at_its_load(bench, answer)
    hints: dict[str, float] = defaultdict(float)
    for row, (name, fixed) in product(trials, bench.configurations.items()):
        if fixed_of(row) == fixed:
            hints[name] = max(hints[name], merit(row, bench.target))
    return _judged_capacity(bench, answer, hints=hints, within_s=within_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """The highest rate that a configuration held, 0 for none, and the lowest above that it missed."""

    low_rps: float
    high_rps: float

    @classmethod
    def of(cls, bench: SideBySide, name: str, *, surely: bool = False) -> Bracket:
        """Held in half of the runs at a rate; `surely`: in two, and in three of four."""
        by_rate: dict[float, list[bool]] = {}
        for run in bench.runs:
            if run.name == name and run.rate_rps is not None:
                by_rate.setdefault(run.rate_rps, []).append(run.held(bench.target.limit_ms / 1e3))
        least, share = (2, 0.75) if surely else (1, 0.5)
        held = {rate: sum(kept) >= max(least, share * len(kept)) for rate, kept in by_rate.items()}
        low_rps = max((rate for rate, kept in held.items() if kept), default=0.0)
        high_rps = min((rate for rate, kept in held.items() if not kept and rate > low_rps), default=math.inf)
        return cls(low_rps=low_rps, high_rps=high_rps)

    def middle_rps(self) -> float:
        """The best guess of the capacity; of a bracket that is open above, its lower end."""
        return math.sqrt(self.low_rps * self.high_rps) if self.high_rps < math.inf else self.low_rps


def _judged_capacity(
    bench: SideBySide, answer: Answer, *, hints: Mapping[str, float], within_s: float
) -> Verdict:
    """Ours at the rate stated and a step above, rivals a step above; then until it is known who holds more.

    Who held far more in the sweep is asked for nine tenths of that too. What speaks against the answer is loaded twice
    more.
    """
    started_s = time.monotonic()
    above_rps = STEP * answer.value
    loads: Loads = [(OURS, answer.value), *((name, above_rps) for name in bench.configurations)]
    loads += [(name, 0.9 * hint_rps) for name, hint_rps in hints.items() if hint_rps > 1.5 * above_rps]
    blocks = 2
    while loads and bench.calls < ROUNDS_MAX:
        bench.load(loads, blocks=blocks)
        brackets, blocks = _brackets(bench), 1
        late = time.monotonic() - started_s > within_s
        loads = [] if late and brackets[OURS].high_rps < math.inf else _next_loads(brackets, answer.value)
    verdict = _capacity_verdict(bench, answer)
    if not verdict.below and (verdict.overstated_ratio or 0.0) < OVERSTATED:
        return verdict
    missed_rps = _brackets(bench)[OURS].high_rps
    accused: Loads = [(name, min(verdict.fresh[name], 1.15 * missed_rps)) for name in verdict.below]
    bench.load([(OURS, missed_rps), (OURS, missed_rps / STEP), *accused], blocks=2)
    return _capacity_verdict(bench, answer, surely=True)


def _brackets(bench: SideBySide) -> dict[str, Bracket]:
    return {name: Bracket.of(bench, name) for name in bench.configurations}


def _capacity_verdict(bench: SideBySide, answer: Answer, *, surely: bool = False) -> Verdict:
    brackets = _brackets(bench)
    ours = brackets[OURS]
    shares, below = [1.0], []
    for name, rival in brackets.items():
        if rival.low_rps > ours.low_rps and rival.low_rps >= ours.high_rps:
            shares.append(ours.middle_rps() / rival.low_rps)
        if ours.high_rps < BELOW * Bracket.of(bench, name, surely=surely).low_rps:
            below.append(name)
    reached = ours.low_rps >= 0.999 * answer.value
    return Verdict(
        share=min(shares) if any(bracket.low_rps for bracket in brackets.values()) else None,
        below=tuple(below),
        overstated_ratio=1.0 if reached else answer.value / min(ours.high_rps, answer.value),
        interval_holds=answer.low <= 1.05 * ours.high_rps and answer.high >= ours.low_rps / 1.05,
        fresh={name: bracket.low_rps for name, bracket in brackets.items()},
    )


def _next_loads(brackets: Mapping[str, Bracket], stated_rps: float) -> Loads:
    """What would still change the verdict."""
    ours = brackets[OURS]
    if ours.low_rps == 0.0:
        top_rps = min(ours.high_rps, stated_rps)
        return [(OURS, top_rps / divisor) for divisor in (1.05, STEP, 1.35, 1.8)]
    rivals = {name: rival for name, rival in brackets.items() if name != OURS}
    loads: Loads = []
    if math.isinf(ours.high_rps):
        able = [name for name, rival in rivals.items() if rival.high_rps > 1.001 * STEP * ours.low_rps]
        for factor in (STEP, 1.4, 3.0) if able else ():
            loads += [(name, factor * ours.low_rps) for name in (OURS, *able)]
        return loads
    for name, rival in rivals.items():
        if rival.high_rps > 1.05 * ours.high_rps:
            loads += [(name, rate_rps) for rate_rps in _further_rates(rival, ours)]
        elif ours.high_rps > 1.15 * ours.low_rps and rival.high_rps > STEP * ours.low_rps:
            loads.append((name, ours.middle_rps()))
    return [(OURS, ours.middle_rps()), *loads] if loads else []


def _further_rates(rival: Bracket, ours: Bracket) -> list[float]:
    """Where a rival may hold what ours misses; none where that is known within a fifth, or is by far."""
    if rival.low_rps >= ours.high_rps and rival.high_rps <= 1.2 * rival.low_rps:
        return []
    if rival.low_rps > 2.5 * ours.high_rps:
        return []
    from_rps = max(rival.low_rps, 0.95 * ours.high_rps)
    return [factor * from_rps for factor in (STEP, 1.2, 1.35, 1.8) if factor * from_rps < rival.high_rps]


def _judged_at_its_load(bench: SideBySide, answer: Answer) -> Verdict:
    """All at the load that was asked for; those that seem to do better once more."""
    rate_rps = bench.target.rate_rps if bench.target.objective == "latency" else None
    bench.load([(name, rate_rps) for name in bench.configurations], blocks=BLOCKS)
    verdict = _verdict_at_its_load(bench, answer)
    if verdict.below:
        bench.load([(name, rate_rps) for name in (OURS, *verdict.below)], blocks=BLOCKS)
        verdict = _verdict_at_its_load(bench, answer)
    return verdict


def _verdict_at_its_load(bench: SideBySide, answer: Answer) -> Verdict:
    """A rival is better where it is in the median block, and surely so where it is in all but one of six blocks."""
    merits = {name: _merits(bench, name) for name in bench.configurations}
    ours, fresh = merits[OURS], {name: _median(blocks.values()) for name, blocks in merits.items()}
    shares, below = [1.0], []
    for name, theirs in merits.items():
        ratios = [ours[block] / theirs[block] for block in ours.keys() & theirs.keys() if theirs[block]]
        if not fresh[name] or not ratios:
            continue
        shares.append(statistics.median(ratios))
        if shares[-1] < BELOW and sum(ratio >= 1.0 for ratio in ratios) <= len(ratios) // 6:
            below.append(name)
    stated = 1.0 / answer.value if bench.target.objective == "latency" else answer.value
    return Verdict(
        share=min(shares) if any(fresh.values()) else None,
        below=tuple(below),
        overstated_ratio=max(1.0, stated / fresh[OURS]) if fresh[OURS] else None,
        interval_holds=_lies_inside(fresh[OURS], answer, bench.target),
        fresh=fresh,
    )


def _merits(bench: SideBySide, name: str) -> dict[int, float]:
    """Of each block: requests/s within the limit, or 1/p95; 0 where requests fail or the limit is far missed."""
    by_block: dict[int, list[float]] = {}
    for run in bench.runs:
        if run.name != name:
            continue
        value = run.throughput_rps
        if bench.target.objective == "latency":
            value = 1.0 / run.p95_s
        elif run.p95_s > 1.1 * bench.target.limit_ms / 1e3:
            value = 0.0
        by_block.setdefault(run.block, []).append(value if run.error_ratio <= ERRORS_MAX else 0.0)
    return {block: statistics.median(values) for block, values in by_block.items()}


def _median(values: Iterable[float]) -> float:
    return statistics.median(tuple(values) or (0.0,))


def _lies_inside(fresh: float, answer: Answer, target: Target) -> bool:
    if not fresh:
        return False
    figure = 1.0 / fresh if target.objective == "latency" else fresh
    return answer.low / 1.05 <= figure <= 1.05 * answer.high
