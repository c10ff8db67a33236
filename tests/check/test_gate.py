"""Which figures are guarded and what is worse; what each look may spend; absolute limits on a load test."""

from __future__ import annotations

import math
import random

import pytest

from batchtune.check.gate import (
    DEFAULT_MARGINS,
    OBJECTIVE_METRICS,
    Gate,
    default_gates,
    gates_of,
    looks_up_to,
    parse_margins,
    planned_looks,
    student_bounds,
)
from batchtune.check.load_limits import judge_limits, parse_limits
from batchtune.errors import UsageError
from batchtune.measure.quantiles import Estimate
from batchtune.report.check_text import limit_text
from batchtune.scenario.spec.check import METRICS
from tests.check.check_fakes import measurement, trial

FARTHEST = math.log(1000.0)


@pytest.mark.parametrize(
    ("metric", "before", "after", "worsening"),
    [
        ("throughput", 100.0, 90.0, math.log(100 / 90)),
        ("p95", 0.010, 0.009, math.log(9 / 10)),
        ("errors", 0.0, 0.01, 0.01),
        ("p99", 0.01, math.inf, FARTHEST),
        ("p99", math.inf, 0.01, -FARTHEST),
        ("p99", math.inf, math.inf, math.nan),
        ("p99", math.nan, 1.0, math.nan),
        ("p99", 0.0, 1.0, math.nan),
        ("capacity", 500.0, 0.0, FARTHEST),
        ("capacity", 0.0, 500.0, -FARTHEST),
        ("capacity", 0.0, 0.0, math.nan),
        ("capacity", math.nan, 0.0, math.nan),
    ],
)
def test_lower_throughput_and_higher_latency_are_worse_and_nothing_is_farther_than_a_factor_of_1000(
    metric, before, after, worsening
):
    found = Gate(metric=metric, margin=0.05).worsening(before, after)
    assert found == pytest.approx(worsening, nan_ok=True)


@pytest.mark.parametrize(
    ("metric", "before", "after"),
    [("throughput", 1.0, 0.95), ("p95", 1.0, 1.05), ("cpu", 1.0, 1.05), ("errors", 0.0, 0.05)],
)
def test_a_change_as_large_as_the_margin_is_just_the_limit(metric, before, after):
    gate = Gate(metric=metric, margin=0.05)
    assert gate.worsening(before, after) == pytest.approx(gate.limit)
    assert gate.change(gate.limit) == pytest.approx(after - before)


@pytest.mark.parametrize("metric", ["throughput", "p95", "errors"])
def test_an_end_without_a_bound_stays_infinite(metric):
    gate = Gate(metric=metric, margin=0.05)
    sign = -1.0 if metric == "throughput" else 1.0
    assert [gate.change(end) for end in (-math.inf, math.inf)] == [-sign * math.inf, sign * math.inf]


def test_a_capacity_is_guarded_only_where_runs_search_one():
    assert gates_of({"capacity": 0.05}, objective="capacity")[0].margin == 0.05
    with pytest.raises(UsageError, match="capacity: no run searches it under objective: throughput"):
        gates_of({"capacity": 0.05}, objective="throughput")


def test_every_figure_has_a_margin_and_is_read_as_a_gate():
    assert set(DEFAULT_MARGINS) == set(METRICS)
    named = parse_margins([f"{metric}=5%" for metric in METRICS])
    assert [gate.metric for gate in gates_of(named, objective="capacity", streams=True)] == list(METRICS)


def test_first_tokens_and_gaps_are_guarded_where_answers_are_streamed():
    guarded = [gate.metric for gate in gates_of({}, objective="latency", streams=True)]
    assert guarded[-2:] == ["ttft_p95", "itl_p99"]
    assert gates_of({"itl_p99": 0.05}, objective="latency", streams=True)[0].metric == "itl_p99"
    with pytest.raises(UsageError, match="itl_p99: only of streamed answers") as refused:
        gates_of({"itl_p99": 0.05}, objective="latency")
    assert "p99" in refused.value.hint


def test_margins_are_read_from_one_text_or_several():
    expected = {"p95": 0.05, "throughput": 0.03, "cpu": 0.02}
    assert parse_margins(["p95=5%,throughput=0.03", "cpu=2%"]) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "expected FIGURE=MARGIN") for text in ("p95", "", " , ")),
        ("p96=5%", "no figure is called 'p96'"),
        *((f"p95={margin}", "above 0 and below 100 %") for margin in ("0", "150%")),
        *((f"p95={margin}", f"--max-regress p95={margin}: expected a perc") for margin in ("much", "-5%")),
    ],
)
def test_a_margin_that_says_nothing_is_refused_in_words(text, words):
    with pytest.raises(UsageError, match=words):
        parse_margins([text])


def test_without_names_the_objective_says_what_is_guarded():
    guarded = [gate.metric for gate in gates_of({}, objective="latency")]
    assert guarded == ["p50", "p95", "p99", "errors", "cpu"]
    assert all(gate.is_default for gate in default_gates("throughput"))
    (named,) = gates_of({"p95": 0.03}, objective="throughput")
    assert (named.margin, named.is_default) == (0.03, False)
    assert {metric for metrics in OBJECTIVE_METRICS.values() for metric in metrics} <= set(METRICS)


@pytest.mark.parametrize("blocks_max", [6, 7, 10, 24, 54, 200])
@pytest.mark.parametrize("gates", [1, 5, 8])
def test_the_looks_of_both_tests_spend_no_more_than_the_error_rate(blocks_max, gates):
    looks = planned_looks(looks_up_to(blocks_max), gates=gates)
    flags = sum(look.flag_level + look.student_flag_level for look in looks)
    clears = sum(look.clear_level + look.student_clear_level for look in looks)
    assert looks[-1].blocks == blocks_max
    assert 0.02 / gates - 1e-12 <= flags <= 0.05 / gates + 1e-12
    assert 0.03 < clears <= 0.05 + 1e-12


def test_nothing_is_spent_on_clearing_before_all_gates_are_measured():
    usual, later = (planned_looks(looks_up_to(36), gates=5, clear_first=first) for first in (0, 6))
    assert [look.blocks for look in later if look.student_clear_level] == [6, 8, 10]
    assert [look.student_flag_level for look in later] == [look.student_flag_level for look in usual]
    spent = [sum(look.student_clear_level for look in looks) for looks in (usual, later)]
    assert spent[0] == pytest.approx(spent[1])


def test_the_first_looks_have_students_test_alone():
    first, _, third, *_ = planned_looks(looks_up_to(36), gates=5)
    assert (first.blocks, first.flag_level, first.clear_level) == (3, 0.0, 0.0)
    assert first.student_flag_level > 0.0
    assert (third.blocks, third.clear_level) == (6, 0.0)


def test_three_blocks_tell_what_lies_an_order_of_magnitude_beyond_their_noise():
    """A change of 0.69 over noise of 0.01 is told within 0.15 at 0.1 %; over noise of 0.5 nothing is."""
    quiet = [(0.0, 0.69), (0.01, 0.71), (-0.01, 0.67)]
    low, high = student_bounds(quiet, low_level=0.001, high_level=0.001)
    assert 0.54 < low < 0.69 < high < 0.84
    loud = [(0.0, 0.69), (0.5, 0.21), (-0.5, 1.17)]
    assert student_bounds(loud, low_level=0.001, high_level=0.001)[0] < 0.0


def test_students_bounds_hold_the_truth_as_often_as_stated():
    """4,000 draws of 3 blocks of one noise: at most 5 % expected beyond each end, three standard errors allowed."""
    chance = random.Random(1)
    drawn = [[(chance.gauss(0, 1), chance.gauss(0, 1)) for _ in range(3)] for _ in range(4000)]
    ends = [student_bounds(pairs, low_level=0.05, high_level=0.05) for pairs in drawn]
    assert 0.02 < sum(low > 0.0 for low, _ in ends) / 4000 <= 0.0604
    assert 0.02 < sum(high < 0.0 for _, high in ends) / 4000 <= 0.0604


def test_students_test_follows_the_pairs_where_the_host_moves_both_sides():
    pairs = [(speed, speed + 0.1) for speed in (0.0, 0.3, -0.2, 0.1, 0.25, -0.3)]
    assert student_bounds(pairs, low_level=0.01, high_level=0.01) == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize("pairs", [[], [(0.0, 1.0)] * 2, [(0.0, 1.0), (0.0, 1.0), (0.0, math.inf)]])
def test_students_test_says_nothing_of_two_blocks_or_of_what_is_infinite(pairs):
    assert student_bounds(pairs, low_level=0.01, high_level=0.01) == (-math.inf, math.inf)


P95 = Estimate(value=0.02, low=0.018, high=0.023)
LATENCY_S = {"p99": Estimate(value=0.03, low=0.025, high=0.04), "ttft_p95": P95, "p95": P95}
THROUGHPUT = Estimate(value=500.0, low=480.0, high=520.0)
RUN = trial("load", 1, measurement(throughput_rps=THROUGHPUT, latency_s=LATENCY_S, error_ratio=0.01))


@pytest.mark.parametrize(
    ("state", "limits"),
    [
        ("kept", ["throughput=470/s", "p95=25ms", "errors=1%", "cpu=300us", "ttft_p95=25ms"]),
        ("open", ["throughput=490", "p95=20ms"]),
        ("missed", ["throughput=530/s", "p95=10ms", "errors=0.5%", "cpu=100us"]),
        ("not measured", ["gpu=1ms", "itl_p99=1ms"]),
    ],
)
def test_a_limit_is_kept_or_missed_where_the_whole_interval_says_so(state, limits):
    found = {text: judge_limits(parse_limits([text]), RUN)[0].state for text in limits}
    assert found == dict.fromkeys(limits, state)


def test_what_is_said_names_figure_interval_and_limit():
    (finding,) = judge_limits(parse_limits(["p95=20ms"]), RUN)
    assert limit_text(finding) == "p95 20 ms [18 ms, 23 ms]: at most 20 ms: undecided"
    (met,) = judge_limits(parse_limits(["errors=1%"]), RUN)
    assert limit_text(met).endswith(": at most 1 %: met")


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("p95", "expected FIGURE=LIMIT", ""),
        ("p96=1ms", "called 'p96'", ""),
        ("p95=20", "its unit", ""),
        ("errors=x", "percentage", ""),
        ("", "expected FIGURE=LIMIT", ""),
        ("errors=5", "at most 500 % of all requests is always met", "write errors=5%"),
        ("errors=100%", "at most 100 %", "write errors=1%"),
    ],
)
def test_a_limit_that_says_nothing_is_refused(text, words, hint):
    with pytest.raises(UsageError, match=words) as raised:
        parse_limits([text])
    assert hint in ("", raised.value.hint)
