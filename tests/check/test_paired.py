"""The course of a paired check on simulated machines, from the first look to the verdict.

Shares are of 200 fixed seeds; tests/benchmarks/check/simulated_check.py prints those of 1,000.
"""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest

from batchtune.check.gate import ONE_LAUNCH, Gate, default_gates
from batchtune.check.paired_check import judge_fixed, run_check
from batchtune.scenario.spec.check import METRICS
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

GATES = default_gates("throughput")
SEEDS = range(200)


def verdicts(**pair) -> Counter[str]:
    return Counter(run_check(GATES, SimulatedPair(seed=seed, **pair).measure).verdict for seed in SEEDS)


@pytest.mark.parametrize(
    "host", ["drifting", *(pytest.param(host, marks=pytest.mark.slow) for host in ("steady", "two-speed"))]
)
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


def test_a_quiet_pair_is_cleared_by_six_blocks():
    blocks = [run_check(GATES, SimulatedPair(seed=seed, sd=0.01).measure).blocks for seed in SEEDS]
    assert sorted(blocks)[len(blocks) // 2] <= 6


def test_many_pairs_of_usual_noise_are_cleared_before_their_servers_are_started_anew():
    """Blocks of 2 % noise: 93 of 200; 75 where clearing had a share of looks at which no check can end."""
    blocks = [run_check(GATES, SimulatedPair(seed=seed, sd=0.02).measure).blocks for seed in SEEDS]
    assert sum(count <= ONE_LAUNCH for count in blocks) >= 0.42 * len(blocks)


@pytest.mark.parametrize(("change", "blocks"), [(TWICE, 3), (SLOWER_20, 4)])
def test_what_lies_far_beyond_the_noise_is_flagged_and_confirmed_by_the_first_blocks(change, blocks):
    """Blocks of 2 % noise; the median of 20 seeds."""
    found = [run_check(GATES, SimulatedPair(seed=seed, sd=0.02, change=change).measure) for seed in range(20)]
    assert {conclusion.verdict for conclusion in found} == {"REGRESSED"}
    assert sorted(conclusion.blocks for conclusion in found)[10] <= blocks
    assert sorted(conclusion.fresh_blocks for conclusion in found)[10] <= blocks


@pytest.mark.parametrize(("change", "is_apart"), [(TWICE, False), ({}, True)])
def test_cpu_time_has_loads_of_its_own_only_where_nothing_else_is_flagged(change, is_apart):
    pair = SimulatedPair(seed=1, sd=0.02, change=change)
    apart = []

    def measure(phase, blocks, guarded):
        apart.append("cpu" in {gate.metric for gate in guarded})
        return pair.measure(phase, blocks)

    run_check(GATES, measure)
    assert any(apart) == is_apart


def test_a_gate_that_a_check_ended_before_it_measured_is_not_open():
    pair = SimulatedPair(seed=1, sd=0.02, change=TWICE)

    def measure(phase, blocks, guarded):
        asked = {gate.metric for gate in guarded}
        measured = pair.measure(phase, blocks)
        return [{name: sides for name, sides in block.items() if name in asked} for block in measured]

    conclusion = run_check(GATES, measure)
    assert conclusion.verdict == "REGRESSED"
    (cpu,) = (gate for gate in conclusion.to_dict()["gates"] if gate["metric"] == "cpu")
    assert (cpu["state"], cpu["blocks"]) == ("not measured", 0)


def test_a_change_as_large_as_every_margin_is_flagged_as_rarely_as_stated():
    """The hardest of all that must pass: at most 5 % of 200 checks, three standard errors allowed."""
    change = {"throughput": 0.98, "p95": 1.05, "p99": 1.1, "cpu": 1.03}
    flagged = [
        run_check(GATES, SimulatedPair(seed=seed, sd=0.01, change=change).measure, blocks_max=16).fresh_blocks
        for seed in SEEDS
    ]
    assert sum(map(bool, flagged)) <= 0.096 * len(flagged)


def test_cpu_time_that_is_cleared_is_not_asked_again_and_keeps_its_blocks():
    pair = SimulatedPair(seed=1, sd=0.05)
    asked = []

    def measure(phase, blocks, guarded):
        asked.append((blocks, "cpu" in {gate.metric for gate in guarded}))
        return pair.measure(phase, blocks)

    conclusion = run_check(GATES, measure)
    last = max(blocks for blocks, with_cpu in asked if with_cpu)
    assert last < conclusion.blocks == asked[-1][0]
    (cpu,) = (finding for finding in conclusion.findings if finding.gate.metric == "cpu")
    assert (cpu.state, cpu.blocks) == ("ok", last)


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


def test_a_margin_below_the_noise_is_raised_and_says_so():
    conclusion = run_check(GATES, SimulatedPair(seed=3, sd=0.05).measure)
    throughput = conclusion.findings[0]
    assert throughput.margin > throughput.gate.margin
    assert throughput.margin < 2.6 * throughput.gate.margin


def test_noise_far_beyond_the_margin_leaves_the_check_open():
    conclusion = run_check(GATES, SimulatedPair(seed=3, sd=0.3).measure)
    assert (conclusion.verdict, conclusion.exit_code) == ("INCONCLUSIVE", 5)


def test_a_figure_that_somebody_asked_for_must_be_measured():
    measured = SimulatedPair(seed=1, sd=0.01).measure("screen", 10)
    blocks = [{metric: pair for metric, pair in block.items() if metric != "gpu"} for block in measured]
    asked = (*GATES, Gate(metric="gpu", margin=0.02))
    assert judge_fixed(asked, blocks).verdict == "INCONCLUSIVE"
    unasked = (*GATES, Gate(metric="gpu", margin=0.02, is_default=True))
    assert judge_fixed(unasked, blocks).verdict == "OK"


def test_a_conclusion_goes_to_json_without_infinities():
    blocks = [{"p99": (0.01, math.inf)}, {"p99": (0.01, 0.01)}]
    document = judge_fixed([Gate(metric="p99", margin=0.1)], blocks).to_dict()
    assert json.loads(json.dumps(document, allow_nan=False))["gates"][0]["change"]["high"] is None


def test_a_bound_that_the_blocks_do_not_give_is_null_whichever_way_is_worse():
    blocks = [{"throughput": (100.0, 99.0), "p95": (1.0, 1.0)}] * 2
    gates = [Gate(metric="throughput", margin=0.05), Gate(metric="p95", margin=0.05)]
    for gate in judge_fixed(gates, blocks).to_dict()["gates"]:
        assert (gate["change"]["low"], gate["change"]["high"]) == (None, None)
        assert gate["change"]["value"] is not None


def test_what_was_not_measured_is_null():
    (gate,) = judge_fixed([Gate(metric="gpu", margin=0.05)], [{}] * 6).to_dict()["gates"]
    assert (gate["state"], gate["before"], gate["after"], gate["change"]["value"]) == (
        "not measured",
        None,
        None,
        None,
    )


@pytest.mark.parametrize("metric", METRICS)
def test_a_planted_regression_of_every_figure_is_caught_by_its_gate_and_equal_servers_pass(metric):
    gates = [Gate(metric=metric, margin=0.01 if metric == "errors" else 0.05)]
    change = {metric: 0.8 if metric in ("throughput", "capacity") else 1.25}
    worse = run_check(gates, SimulatedPair(seed=1, sd=0.01, change=change).measure)
    assert (worse.verdict, worse.findings[0].confirmed) == ("REGRESSED", True)
    assert run_check(gates, SimulatedPair(seed=1, sd=0.01).measure).verdict == "OK"
