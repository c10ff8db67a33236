"""How the runs of a check are made: whose servers are launched anew, and when."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from batchtune.check.account import account_from
from batchtune.check.gate import Gate
from batchtune.check.paired_check import judge_interrupted, paired_figures
from batchtune.cli.commands.check_course import Course, look_text, needs_relaunches, without_search
from batchtune.cli.session import MeasuringSession
from batchtune.errors import TargetError
from batchtune.report.check_text import closing, gate_table, headline
from batchtune.report.findings import text_of
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.one_capacity import BURST_S
from batchtune.tune.trials.pace import PROBE_WARM_UP_S
from batchtune.tune.trials.trial import FinishedTrial
from tests.check.check_fakes import account, slower_blocks, trial
from tests.tune.tune_fakes import scenario_of

SIDES = [Variant(name=name, scenario=scenario_of()) for name in ("main", "new")]
GATES = [Gate(metric="startup", margin=0.1), Gate(metric="p95", margin=0.1)]


class FakeBenches:
    """Servers that start in one second, those of `new` in `slower` of them; `dead` is one that was killed. Loaded in
    turn a request of `new` costs `dearer` times as much CPU time; the duet of block 2 tells nothing."""

    def __init__(self, *, slower: float = 1.0, dearer: float = 1.0, dead: str | None = None) -> None:
        self.slower, self.dearer, self.dead, self.blocks = slower, dearer, dead, 24
        self.duets: list[int] = []
        self.running: set[str] = set()
        self.launches: list[str] = []
        self.at_runs: list[set[str]] = []
        self.at_duets: list[set[str]] = []

    def turn(self, _variant, _plan, _attempt) -> None: ...

    def show(self, _trial) -> None: ...

    def reached(self, variants):
        return list(variants)

    def of(self, variant):
        def run(plan):
            startup_s = None
            if variant.name not in self.running:
                self.launch(variant)
                startup_s = (1.0 + 0.001 * plan.number) * (self.slower if variant.name == "new" else 1.0)
            if plan.request.block is not None:
                self.at_runs.append({*self.running})
            measured = trial(variant.name, plan.request.block or 0, startup_s=startup_s)
            return FinishedTrial(trial=measured, samples=None)

        return SimpleNamespace(run=run)

    bench = of

    def launch(self, variant) -> None:
        if variant.name not in self.running:
            self.running.add(variant.name)
            self.launches.append(variant.name)

    def require_running(self, variant) -> None:
        if variant.name == self.dead or variant.name not in self.running:
            raise TargetError(f"{variant.name}: ended by signal 9")

    def duet(self, pair, _trials, _paces, *, block):
        self.duets.append(block)
        self.at_duets.append({*self.running})
        return None if block == 2 else (5e-5, 5e-5 * self.dearer * (1.0 + 0.001 * (-1) ** block))

    def stop_server(self, variant) -> None:
        self.running.discard(variant.name)

    def stop_servers(self) -> None:
        self.running.clear()


def ignored(*_what: object) -> None: ...


def course_of(benches: FakeBenches, gates) -> Course:
    silent = SimpleNamespace(event=ignored)
    run = SimpleNamespace(append=ignored, keep_duet=ignored, path="RUN")
    session = MeasuringSession(scenario=SIDES[0].scenario, kind="check", results=None, view=silent, run=run)
    duets: dict[int, tuple[float, float]] = {}
    return Course(
        variants=SIDES,
        benches=benches,  # type: ignore[arg-type]
        session=session,  # type: ignore[arg-type]
        figures=lambda trials, _phase: paired_figures(trials, *SIDES, cpu=duets),
        duets=duets,
        relaunches=needs_relaunches(gates),
    )


def test_what_a_launch_decides_is_measured_of_a_launch_for_every_run():
    """Peaks since one launch would be one draw, however many blocks: ever rising, and never apart."""
    metrics = ("startup", "memory", "gpu_memory", "p95", "cpu", "throughput")
    launched = [metric for metric in metrics if needs_relaunches([Gate(metric=metric, margin=0.05)])]
    assert launched == ["startup", "memory", "gpu_memory"]


def test_a_gate_of_the_start_up_launches_a_server_for_every_run_and_catches_a_slower_one():
    benches = FakeBenches(slower=1.3)
    conclusion = course_of(benches, GATES).conclude(GATES, 24)
    assert conclusion.verdict == "REGRESSED"
    assert [finding.state for finding in conclusion.findings] == ["regressed", "ok"]
    assert len(benches.launches) >= 2 * (conclusion.blocks + conclusion.fresh_blocks)
    assert benches.duets == []  # no gate is of CPU time


def test_without_one_eight_blocks_share_a_launch_and_each_later_look_has_its_own():
    benches = FakeBenches()
    assert course_of(benches, GATES[1:]).conclude(GATES[1:], 24).verdict == "OK"
    assert sorted(benches.launches) == ["main", "new"]
    benches = FakeBenches()
    course = course_of(benches, GATES[1:])
    for blocks in (3, 4, 6, 8, 10, 16):
        course.measure("screen", blocks, GATES[1:])
    course.measure("confirmation", 6, GATES[1:])
    assert benches.launches.count("main") == benches.launches.count("new") == 4


@pytest.mark.parametrize("dead", ["main", "new"])
def test_a_server_that_was_killed_between_two_runs_makes_it_invalid(dead):
    conclusion = course_of(FakeBenches(dead=dead), GATES[1:]).conclude(GATES[1:], 24)
    assert (conclusion.verdict, conclusion.exit_code) == ("INVALID", 7)
    assert text_of(conclusion.reason) == f"{dead}: ended by signal 9"


def test_a_gate_of_cpu_time_is_judged_by_duets_a_block_each_in_both_phases():
    benches = FakeBenches(dearer=1.05)
    gates = [Gate(metric="cpu", margin=0.02)]
    course = course_of(benches, gates)
    conclusion = course.conclude(gates, 24)
    assert conclusion.verdict == "REGRESSED"
    blocks = conclusion.blocks + conclusion.fresh_blocks
    assert benches.duets == list(range(1, blocks + 1))
    told = [block for block, (before_s, _) in course.duets.items() if not math.isnan(before_s)]
    assert told == [1, *range(3, blocks + 1)]


def test_a_run_with_a_launch_of_its_own_has_no_other_server_beside_it_but_a_duet_has_both():
    """What a GPU has in use is no process's own: that of the other side would hide a change."""
    benches = FakeBenches()
    gates = [Gate(metric="gpu_memory", margin=0.05), Gate(metric="cpu", margin=0.02)]
    course_of(benches, gates).measure("screen", 6, gates)
    assert sorted(map(sorted, benches.at_runs)) == [["main"]] * 6 + [["new"]] * 6
    assert benches.at_duets == [{"main", "new"}] * 6


def test_a_failure_in_the_confirmation_tells_the_blocks_of_both_phases():
    benches = FakeBenches()
    course = course_of(benches, GATES[1:])
    course.measure("screen", 2, GATES[1:])
    course.measure("confirmation", 6, GATES[1:])
    benches.dead = "main"
    conclusion = course.conclude(GATES[1:], 24)
    assert (conclusion.verdict, conclusion.blocks, conclusion.fresh_blocks) == ("INVALID", 2, 6)


def test_the_start_says_how_long_it_usually_takes_and_at_most():
    said = []
    for guarded in (GATES[1:], ()):
        course = course_of(FakeBenches(), GATES[1:])
        events: list[str] = []
        course.session.view = SimpleNamespace(event=events.append)
        course.measure("screen", 6, guarded)
        said += [event for event in events if "24 blocks" in event]
    duration = r"usually about .* at most about .*24 blocks, twice where a change is confirmed"
    assert re.match(duration, said[0])
    assert said[1:] == ["24 blocks"]


def test_blocks_after_it_is_cleared_have_no_duets_nor_has_a_confirmation_of_something_else():
    benches = FakeBenches()
    cpu, memory = Gate(metric="cpu", margin=0.02), Gate(metric="memory", margin=0.05)
    course = course_of(benches, [cpu, memory])
    course.measure("screen", 6, [cpu, memory])
    blocks = course.measure("screen", 10, [memory])
    assert benches.duets == [1, 2, 3, 4, 5, 6]
    assert math.isnan(blocks[9]["cpu"][0])
    course.measure("confirmation", 6, [memory])
    assert len(benches.duets) == 6


def test_where_the_duets_of_a_look_told_nothing_no_server_is_launched_for_more():
    benches = FakeBenches()
    benches.duet = lambda *_pair, block: benches.duets.append(block)  # type: ignore[method-assign]
    gates = [Gate(metric="memory", margin=0.05), Gate(metric="cpu", margin=0.02)]
    course = course_of(benches, gates)
    course.measure("screen", 6, gates)
    course.measure("screen", 10, gates)
    assert benches.duets == [1, 2, 3, 4, 5, 6]
    assert math.isnan(course.duets[10][0])


class InterruptedBenches(FakeBenches):
    """Ctrl-C comes in this block."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def turn(self, _variant, plan, _attempt) -> None:
        if plan.request.block == self.block:
            raise KeyboardInterrupt


def test_ctrl_c_ends_a_check_with_what_its_blocks_show_and_without_a_verdict():
    conclusion = course_of(InterruptedBenches(3), GATES[1:]).conclude(GATES[1:], 24)
    assert (conclusion.verdict, conclusion.exit_code, conclusion.blocks) == ("INCONCLUSIVE", 130, 2)
    (finding,) = conclusion.findings
    assert (finding.before, finding.after, finding.blocks) == (0.006, 0.006, 2)
    checked = account(conclusion, attribution=None)
    assert headline(checked).endswith(
        "interrupted after 2 of at most 24 blocks: no verdict, only what these show"
    )
    assert dict(closing(checked)) == {"Next": "let it run to its end"}
    assert account_from(json.loads(json.dumps(checked.to_dict()))).exit_code == 130


def test_ctrl_c_before_a_whole_block_leaves_nothing_to_show():
    with pytest.raises(KeyboardInterrupt):
        course_of(InterruptedBenches(1), GATES[1:]).conclude(GATES[1:], 24)


def test_a_change_that_only_an_interrupted_check_shows_is_not_confirmed():
    conclusion = judge_interrupted([Gate(metric="p95", margin=0.02)], slower_blocks(10), blocks_max=36)
    (finding,) = conclusion.findings
    assert (finding.state, finding.confirmed) == ("open", False)
    assert gate_table(account(conclusion))[1][-1] == "undecided: not confirmed"


@pytest.mark.parametrize(("stated", "warm_up_s"), [({"warm_up": "2s"}, 2.0), ({}, PROBE_WARM_UP_S)])
def test_a_loop_of_open_duration_is_short_and_keeps_the_warm_up_that_is_stated(stated, warm_up_s):
    """A warm-up that is too short is a caveat with the advice to raise it."""
    (loaded,) = without_search(
        [scenario_of(load={"arrivals": "closed", "concurrency": 16, **stated})], {"p95": 0.05}
    )
    assert (loaded.load.warm_up_s, loaded.load.duration_s) == (warm_up_s, BURST_S)


NO_VERDICT = "no verdict yet on p95; at most about 5 min 00 s more"


@pytest.mark.parametrize(
    ("phase", "state", "words"),
    [
        ("screen", "open", f"blocks: {NO_VERDICT} before a confirmation"),
        ("confirmation", "open", f"confirmation blocks: {NO_VERDICT}"),
        ("screen", "ok", "blocks: OK: p95"),
    ],
)
def test_a_look_tells_how_long_the_rest_may_take(phase: Any, state: str, words: str) -> None:
    finding: Any = SimpleNamespace(state=state, gate=SimpleNamespace(name="p95"))
    assert look_text(phase, 6, [finding], blocks_max=36, spent_s=60.0) == f"6 of at most 36 {words}"
