"""The course of a paired check on simulated machines, from the first look to the verdict; the figures of its blocks.

Shares are of 200 fixed seeds; tests/benchmarks/check/simulated_check.py prints those of 1,000.
"""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest

from batchtune.check.gate import ONE_LAUNCH, Gate, default_gates
from batchtune.check.paired_check import judge_fixed, paired_figures, run_check, run_figures
from batchtune.report.comparison import comparison_rows
from batchtune.report.findings import Marks
from batchtune.scenario.spec.check import METRICS
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.compare.result import summarise
from batchtune.tune.trials.trial import Trial
from tests.check.check_fakes import exactly, measurement, moved, trial
from tests.check.simulated_blocks import (
    FASTER_10,
    MORE_CPU,
    P99_ONLY,
    SLOWER_5,
    SLOWER_10,
    SLOWER_20,
    TWICE,
    SimulatedPair,
)
from tests.tune.answer.ledgers import SCENARIO

GATES = default_gates("throughput")
SEEDS = range(200)


def verdicts(**pair) -> Counter[str]:
    return Counter(run_check(GATES, SimulatedPair(seed=seed, **pair).measure).verdict for seed in SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["drifting", "steady", "two-speed"])
def test_two_equal_servers_fail_at_most_once_in_a_hundred_checks(host):
    """By the design at most 5 % × 5 %; of 200 checks 2 have a false-alarm rate below 1.5 %."""
    assert verdicts(sd=0.02, host=host)["REGRESSED"] <= 2


@pytest.mark.parametrize(
    ("change", "metric"),
    [(SLOWER_10, "throughput"), (P99_ONLY, "p99"), (MORE_CPU, "cpu"), (SLOWER_5, "throughput")],
)
def test_what_was_planted_is_caught_and_named(change, metric):
    for seed in range(20):
        conclusion = run_check(GATES, SimulatedPair(seed=seed, sd=0.01, change=change).measure)
        assert conclusion.verdict == "REGRESSED"
        (finding,) = (one for one in conclusion.findings if one.gate.metric == metric)
        assert (finding.state, finding.confirmed) == ("regressed", True)
        assert conclusion.fresh_blocks >= 3
        assert conclusion.exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize(("sd", "blocks", "share"), [(0.01, 6, 0.5), (0.02, ONE_LAUNCH, 0.42)])
def test_many_pairs_are_cleared_before_their_servers_are_started_anew(sd, blocks, share):
    """Blocks of 2 % noise: 93 of 200; 75 where clearing had a share of looks at which no check can end."""
    found = [run_check(GATES, SimulatedPair(seed=seed, sd=sd).measure).blocks for seed in SEEDS]
    assert sum(count <= blocks for count in found) >= share * len(found)


@pytest.mark.parametrize(("change", "blocks"), [(TWICE, 3), (SLOWER_20, 4)])
def test_what_lies_far_beyond_the_noise_is_flagged_and_confirmed_by_the_first_blocks(change, blocks):
    """Blocks of 2 % noise; the median of 20 seeds."""
    found = [run_check(GATES, SimulatedPair(seed=seed, sd=0.02, change=change).measure) for seed in range(20)]
    assert {conclusion.verdict for conclusion in found} == {"REGRESSED"}
    assert sorted(conclusion.blocks for conclusion in found)[10] <= blocks
    assert sorted(conclusion.fresh_blocks for conclusion in found)[10] <= blocks


class Asked(SimulatedPair):
    """Measures only what is guarded, and notes how many blocks were asked for, and whether CPU time was."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked = []

    def measure(self, phase, blocks, guarded=()):
        names = {gate.metric for gate in guarded}
        self.asked.append((blocks, "cpu" in names))
        measured = super().measure(phase, blocks)
        return [{name: sides for name, sides in block.items() if name in names} for block in measured]


@pytest.mark.parametrize(
    ("sd", "change", "is_apart", "verdict", "state"),
    [(0.02, TWICE, False, "REGRESSED", "not measured"), (0.05, {}, True, "OK", "ok")],
)
def test_cpu_time_has_loads_of_its_own_only_where_nothing_else_is_flagged(
    sd, change, is_apart, verdict, state
):
    """Once it is cleared, it is not asked again and keeps its blocks; not measured, it is not open."""
    pair = Asked(seed=1, sd=sd, change=change)
    conclusion = run_check(GATES, pair.measure)
    with_cpu = [blocks for blocks, is_asked in pair.asked if is_asked]
    (cpu,) = (gate for gate in conclusion.to_dict()["gates"] if gate["metric"] == "cpu")
    assert (bool(with_cpu), conclusion.verdict, cpu["state"]) == (is_apart, verdict, state)
    assert cpu["blocks"] == max(with_cpu, default=0) < conclusion.blocks == pair.asked[-1][0]


@pytest.mark.slow
def test_a_change_as_large_as_every_margin_is_flagged_as_rarely_as_stated():
    """The hardest of all that must pass: at most 5 % of 200 checks, three standard errors allowed."""
    change = {"throughput": 0.98, "p95": 1.05, "p99": 1.1, "cpu": 1.03}
    flagged = [
        run_check(GATES, SimulatedPair(seed=seed, sd=0.01, change=change).measure, blocks_max=16).fresh_blocks
        for seed in SEEDS
    ]
    assert sum(map(bool, flagged)) <= 0.096 * len(flagged)


def test_what_got_better_is_called_improved():
    conclusion = run_check(GATES, SimulatedPair(seed=1, sd=0.01, change=FASTER_10).measure)
    assert (conclusion.verdict, conclusion.exit_code) == ("IMPROVED", 0)


def test_a_regression_that_fresh_blocks_do_not_show_does_not_fail():
    slow, equal = SimulatedPair(seed=1, sd=0.01, change=SLOWER_10), SimulatedPair(seed=2, sd=0.01)

    def measure(phase, blocks, _guarded):
        return (slow if phase == "screen" else equal).measure(phase, blocks)

    conclusion = run_check(GATES, measure)
    assert conclusion.fresh_blocks > 0
    assert conclusion.verdict != "REGRESSED"
    assert [one.confirmed for one in conclusion.findings if one.gate.metric == "throughput"] == [False]


def test_a_flag_that_the_fresh_blocks_do_not_measure_stays_open_as_the_screen_saw_it():
    pair = SimulatedPair(seed=1, sd=0.01, change=MORE_CPU)

    def measure(phase, blocks, _guarded):
        measured = pair.measure(phase, blocks)
        return (
            measured if phase == "screen" else [{**block, "cpu": (math.nan, math.nan)} for block in measured]
        )

    conclusion = run_check(GATES, measure)
    assert (conclusion.verdict, conclusion.exit_code) == ("INCONCLUSIVE", 5)
    (cpu,) = (finding for finding in conclusion.findings if finding.gate.metric == "cpu")
    assert (cpu.state, cpu.confirmed) == ("open", False)
    assert cpu.change.value > 0.03


def test_a_margin_below_the_noise_is_raised_and_noise_far_beyond_it_leaves_the_check_open():
    throughput = run_check(GATES, SimulatedPair(seed=3, sd=0.05).measure).findings[0]
    assert throughput.gate.margin < throughput.margin < 2.6 * throughput.gate.margin
    conclusion = run_check(GATES, SimulatedPair(seed=3, sd=0.3).measure)
    assert (conclusion.verdict, conclusion.exit_code) == ("INCONCLUSIVE", 5)


@pytest.mark.parametrize(("is_default", "verdict"), [(False, "INCONCLUSIVE"), (True, "OK")])
def test_a_figure_that_somebody_asked_for_must_be_measured(is_default, verdict):
    measured = SimulatedPair(seed=1, sd=0.01).measure("screen", 10)
    blocks = [{metric: pair for metric, pair in block.items() if metric != "gpu"} for block in measured]
    assert (
        judge_fixed((*GATES, Gate(metric="gpu", margin=0.02, is_default=is_default)), blocks).verdict
        == verdict
    )


@pytest.mark.parametrize(
    ("metric", "blocks", "nulls"),
    [
        ("p99", [{"p99": (0.01, math.inf)}, {"p99": (0.01, 0.01)}], {"low", "high"}),
        ("throughput", [{"throughput": (100.0, 99.0)}] * 2, {"low", "high"}),
        ("p95", [{"p95": (1.0, 1.0)}] * 2, {"low", "high"}),
        ("gpu", [{}] * 6, {"value", "low", "high"}),
    ],
)
def test_json_has_null_for_what_the_blocks_do_not_give_whichever_way_is_worse(metric, blocks, nulls):
    document = judge_fixed([Gate(metric=metric, margin=0.05)], blocks).to_dict()
    (gate,) = json.loads(json.dumps(document, allow_nan=False))["gates"]
    assert nulls == {name for name, value in gate["change"].items() if value is None}
    figures = (gate["state"], gate["before"], gate["after"])
    assert (figures == ("not measured", None, None)) == (metric == "gpu")


@pytest.mark.parametrize("metric", METRICS)
def test_a_planted_regression_of_every_figure_is_caught_by_its_gate_and_equal_servers_pass(metric):
    gates = [Gate(metric=metric, margin=0.01 if metric == "errors" else 0.05)]
    change = {metric: 0.8 if metric in ("throughput", "capacity") else 1.25}
    worse = run_check(gates, SimulatedPair(seed=1, sd=0.01, change=change).measure)
    assert (worse.verdict, worse.findings[0].confirmed) == ("REGRESSED", True)
    assert run_check(gates, SimulatedPair(seed=1, sd=0.01).measure).verdict == "OK"


SIDES = [Variant(name=name, scenario=SCENARIO) for name in ("main", "new")]


ROWS = moved(requests_by_status={}, rows=3200).server


@pytest.mark.parametrize(
    ("measured", "own", "figures"),
    [
        (measurement(), {}, {"throughput": 1600.0, "p99": 0.007, "memory": 300 * 2**20, "startup": math.nan}),
        # CPU and GPU for each request of the server's own account, or by the rows of a request
        (measurement(), {}, {"cpu": 0.32 / 1600}),
        (measurement(ROWS, throughput_rows_per_s=exactly(3200.0)), {}, {"cpu": 0.32 / 1600}),
        (moved(gpu_busy_ratio=0.8), {}, {"gpu": 0.8 / 1600}),
        # of a server launched for the run
        (moved(gpu_memory_used_bytes=5e9), {"startup_s": 1.4}, {"gpu_memory": 5e9, "startup": 1.4}),
        (measurement(None), {}, {"cpu": math.nan, "gpu": math.nan}),
    ],
)
def test_a_run_gives_these_figures(measured, own, figures):
    found = run_figures(trial("main", 1, measured, **own))
    assert {name: found[name] for name in figures} == pytest.approx(figures, nan_ok=True)


def test_a_capacity_that_collapsed_in_some_blocks_stays_in_its_gate():
    assert math.isnan(run_figures(trial("new", 1, state="failed"))["capacity"])
    trials = [
        trial(name, block, objective=None if name == "new" and block > 2 else exactly(500.0))
        for block in range(1, 13)
        for name in ("main", "new")
    ]
    blocks = paired_figures(trials, *SIDES)
    assert blocks[-1]["capacity"] == (500.0, 0.0)
    assert judge_fixed([Gate(metric="capacity", margin=0.05)], blocks).verdict == "REGRESSED"


def runs(blocks: range) -> list[Trial]:
    return [trial(name, block) for block in blocks for name in ("main", "new")]


OWN = run_figures(trial("main", 1))["cpu"]


def test_where_cpu_was_measured_apart_only_that_counts():
    first, second = paired_figures(runs(range(1, 3)), *SIDES, cpu={2: (5e-5, 6e-5)})
    assert second["cpu"] == (5e-5, 6e-5)
    assert all(math.isnan(figure) for figure in first["cpu"])
    assert [block["cpu"] for block in paired_figures(runs(range(1, 3)), *SIDES)] == [(OWN, OWN)] * 2


@pytest.mark.parametrize(("told", "are_apart"), [(1, False), (2, False), (3, True)])
def test_where_most_of_it_told_nothing_the_runs_of_every_block_count(told, are_apart):
    trials = runs(range(1, 9))
    cpu = {block: (5e-5, 6e-5) if block <= told else (math.nan, math.nan) for block in range(1, 7)}
    figures = [block["cpu"] for block in paired_figures(trials, *SIDES, cpu=cpu)]
    if are_apart:
        assert figures[:3] == [(5e-5, 6e-5)] * 3
        assert all(math.isnan(before) for before, _ in figures[3:])
    else:
        assert figures == [(OWN, OWN)] * 8
    of_others = paired_figures(trials, *SIDES, cpu={9: (5e-5, 6e-5)})
    assert [block["cpu"] for block in of_others] == [(OWN, OWN)] * 8


def test_blocks_need_both_sides_and_count_the_last_attempt():
    fast = measurement(throughput_rps=exactly(2000.0))
    trials = [trial("main", 1), trial("new", 1), trial("main", 2), trial("new", 1, fast)]
    (block,) = paired_figures(trials, *SIDES)
    assert block["throughput"] == (1600.0, 2000.0)


def streamed(name: str, block: int) -> Trial:
    waits = {"ttft_p95": exactly(0.2 if name == "main" else 0.3), "itl_p99": exactly(0.01)}
    return trial(name, block, measurement(latency_s=measurement().latency_s | waits))


def test_first_tokens_and_gaps_of_streams_are_paired_as_other_latencies_and_shown():
    trials = [streamed(name, block) for block in range(1, 13) for name in ("main", "new")]
    blocks = paired_figures(trials, *SIDES)
    assert blocks[0]["ttft_p95"] == (0.2, 0.3)
    assert math.isnan(paired_figures(runs(range(1, 2)), *SIDES)[0]["ttft_p95"][0])
    gates = [Gate(metric="ttft_p95", margin=0.05), Gate(metric="itl_p99", margin=0.05)]
    assert [finding.state for finding in judge_fixed(gates, blocks).findings] == ["regressed", "ok"]
    comparison = summarise(trials, SIDES)
    (heads, first, _) = comparison_rows(comparison, Marks(caveats=dict.fromkeys(("main", "new"), ())))
    assert dict(zip(heads, first, strict=True))["ttft_p95 ms"].startswith("200")
    assert comparison.pairs[0].latency_ratios["ttft_p95"].value == pytest.approx(1.5)
