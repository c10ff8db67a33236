"""Which figures are guarded, and how a change for the worse is told from one for the better."""

from __future__ import annotations

import math

import pytest

from batchtune.check.gate import (
    DEFAULT_MARGINS,
    OBJECTIVE_METRICS,
    Gate,
    default_gates,
    gates_of,
    parse_margins,
)
from batchtune.errors import UsageError
from batchtune.scenario.spec.check import METRICS

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
        ("p95", "expected FIGURE=MARGIN"),
        ("p96=5%", "no figure is called 'p96'"),
        ("p95=0", "above 0 and below 100 %"),
        ("p95=150%", "above 0 and below 100 %"),
        ("p95=much", "--max-regress p95=much: expected a percentage"),
        ("p95=-5%", "--max-regress p95=-5%: expected a percentage"),
        ("", "expected FIGURE=MARGIN"),
        (" , ", "expected FIGURE=MARGIN"),
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
