"""The throughput × interval rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.tune.strategies.rule import rule_conclusion, rule_strategy
from batchtune.tune.strategies.rule_formula import throughput_interval_rule
from batchtune.tune.strategies.rule_rounds import Conclusion, Round, next_step
from batchtune.tune.trials.out_of_memory import out_of_memory
from tests.tune.strategy_driver import Driver
from tests.tune.tune_fakes import Law, planted, scenario_of


def test_interval_is_half_of_what_the_slo_leaves_and_size_is_throughput_times_it():
    answer = throughput_interval_rule(
        rows_per_s=800.0, lone_latency_s=0.002, limits={"p50": 0.010, "p95": 0.042}, rows_per_request=1
    )
    assert answer.interval_s == pytest.approx(0.020)
    assert answer.point == {"max_batch_size": 16, "batch_timeout_micros": 20_000}
    assert answer.explain() == (
        "X = 800 rows/s one by one, interval (42 ms - 2 ms) / 2 = 20 ms: X·interval = 16"
    )


def test_an_slo_below_the_lone_latency_leaves_no_interval():
    answer = throughput_interval_rule(
        rows_per_s=800.0, lone_latency_s=0.05, limits={"p95": 0.02}, rows_per_request=4
    )
    assert answer.point == {"max_batch_size": 4, "batch_timeout_micros": 0}
    assert "no interval is left" in answer.explain()


def test_without_an_slo_the_interval_is_the_lone_latency():
    answer = throughput_interval_rule(rows_per_s=2000.0, lone_latency_s=0.005, limits={}, rows_per_request=1)
    assert answer.point == {"max_batch_size": 10, "batch_timeout_micros": 5000}


def test_without_p95_the_tightest_limit_counts():
    answer = throughput_interval_rule(
        rows_per_s=1000.0, lone_latency_s=0.0, limits={"p90": 0.02, "p99": 0.1}, rows_per_request=1
    )
    assert answer.slo_s == 0.02


@given(
    rows_per_s=st.floats(1.0, 1e5),
    lone_s=st.floats(1e-4, 0.1),
    slo_s=st.floats(1e-3, 2.0),
    rows=st.integers(1, 64),
)
def test_a_device_without_economy_of_scale_still_meets_the_slo(rows_per_s, lone_s, slo_s, rows):
    """Waiting I, executing X·I rows one by one and the lone latency stay within the SLO, but for rounding of a row."""
    answer = throughput_interval_rule(
        rows_per_s=rows_per_s, lone_latency_s=lone_s, limits={"p95": slo_s}, rows_per_request=rows
    )
    assert answer.max_batch_size >= rows
    if lone_s < slo_s and answer.max_batch_size > rows:
        worst_s = answer.interval_s + answer.max_batch_size / rows_per_s + lone_s
        assert worst_s <= slo_s + 1.0 / rows_per_s


def linear(max_batch_size: int, interval_s: float) -> Round:
    """A saturated thread of τ(b) = 2 ms + 0.5 ms·b: throughput b/τ(b)."""
    tau_s = 0.002 + 0.0005 * max_batch_size
    return Round(max_batch_size=max_batch_size, interval_s=interval_s, rows_per_s=max_batch_size / tau_s)


def followed(first: Round, measure, *, rounds_max: int = 12, **known) -> tuple[list[Round], Conclusion]:
    """All rounds from the first one on, and the verdict."""
    rounds = [first]
    known = {"rows_per_request": 1, **known}
    while len(rounds) < rounds_max:
        found = next_step(rounds, **known)
        if isinstance(found, Conclusion):
            return rounds, found
        rounds.append(measure(found.max_batch_size, found.interval_s))
    return rounds, next_step(rounds, last=True, **known)


def test_the_fixed_point_is_the_batch_that_takes_as_long_as_the_interval():
    """By hand: b ← 22 ms · b/τ(b) from 8: 8/6 ms · 22 = 29.3, 29/16.5 ms · 22 = 38.7, 39/21.5 ms · 22 = 39.9 ≈ 39.

    Exactly, τ(b) = 22 ms at b = 40; 39 lies within the tenth in which throughput × interval reaches the size.
    """
    rounds, found = followed(linear(8, 0.022), linear)
    assert [one.max_batch_size for one in rounds] == [8, 29, 39]
    assert found.verdict == "fixed_point"
    assert found.best.max_batch_size == 39
    assert "= 39.9 rows: fixed point at max_batch_size 39" in found.text


def test_from_above_the_fixed_point_is_reached_as_well():
    """By hand: 100/52 ms · 22 = 42.3, and 42/23 ms · 22 = 40.2, which reaches 42 to a tenth."""
    rounds, found = followed(linear(100, 0.022), linear)
    assert [one.max_batch_size for one in rounds] == [100, 42]
    assert (found.verdict, found.best.max_batch_size) == ("fixed_point", 42)


def test_reaching_and_staying_below_max_batch_size_have_the_published_verdicts():
    full = next_step([linear(8, 0.022)], rows_per_request=1, last=True)
    assert full.verdict == "raise_size"
    assert full.text == "1,330 rows/s × 22 ms = 29.3 rows reach max_batch_size 8: it may be raised"
    short = next_step([linear(100, 0.022)], rows_per_request=1, last=True)
    assert short.verdict == "interval_first"
    assert short.text == (
        "1,920 rows/s × 22 ms = 42.3 rows are below max_batch_size 100: the interval triggers first"
    )


def test_where_neither_parameter_changes_the_throughput_something_else_limits():
    def network(size: int, interval_s: float) -> Round:
        return Round(max_batch_size=size, interval_s=interval_s, rows_per_s=1000.0)

    rounds, found = followed(network(8, 0.02), network)
    assert [(one.max_batch_size, one.interval_s) for one in rounds] == [(8, 0.02), (20, 0.02), (20, 0.01)]
    assert found.verdict == "something_else"
    assert found.text == (
        "neither max_batch_size nor the interval (20 ms → 10 ms: 1,000 → 1,000 rows/s) changes the throughput: "
        "something else limits"
    )


def test_where_only_the_interval_changes_the_throughput_it_triggers_first():
    def waiting(size: int, interval_s: float) -> Round:
        return Round(max_batch_size=size, interval_s=interval_s, rows_per_s=10.0 / (interval_s + 0.001))

    _, found = followed(waiting(4, 0.02), waiting)
    assert found.verdict == "interval_first"
    assert found.best.interval_s == 0.01


def test_out_of_memory_reduces_both_by_the_same_factor_until_it_works():
    def small_memory(size: int, interval_s: float) -> Round:
        if size > 20:
            return Round(max_batch_size=size, interval_s=interval_s, failure="OOM")
        return linear(size, interval_s)

    rounds, found = followed(small_memory(96, 0.024), small_memory)
    assert [(one.max_batch_size, one.interval_s) for one in rounds[:4]] == [
        (96, 0.024),
        (48, 0.012),
        (24, 0.006),
        (12, 0.003),
    ]
    assert found.best.max_batch_size <= 20
    assert found.best.failure is None


def test_a_raise_beyond_the_memory_is_taken_back_and_memory_is_the_verdict():
    def small_memory(size: int, interval_s: float) -> Round:
        if size > 20:
            return Round(max_batch_size=size, interval_s=interval_s, failure="OOM")
        return linear(size, interval_s)

    rounds, found = followed(small_memory(8, 0.022), small_memory)
    assert [one.max_batch_size for one in rounds] == [8, 29, 15, 21, 18]
    assert all(one.interval_s == 0.022 for one in rounds)
    assert (found.verdict, found.best.max_batch_size) == ("memory", 18)


def test_where_not_even_one_request_fits_nothing_works():
    def no_memory(size: int, interval_s: float) -> Round:
        return Round(max_batch_size=size, interval_s=interval_s, failure="OOM")

    rounds, found = followed(no_memory(16, 0.016), no_memory, rows_per_request=4)
    assert [one.max_batch_size for one in rounds] == [16, 8, 4]
    assert (found.verdict, found.best) == ("fails", None)


def test_rows_and_requests_are_kept_apart():
    """Requests of 5 rows: a size of 16 takes 15 of them, so 14 rows of throughput × interval fill it."""
    whole = Round(max_batch_size=16, interval_s=0.01, rows_per_s=1400.0)
    assert next_step([whole], rows_per_request=5).verdict == "fixed_point"
    step = next_step([Round(max_batch_size=16, interval_s=0.01, rows_per_s=3300.0)], rows_per_request=5)
    assert step.max_batch_size == 35
    assert "33 rows (6.6 requests)" in step.reason


def test_clients_of_a_closed_loop_bound_what_can_come_together():
    def eight_clients(size: int, interval_s: float) -> Round:
        rows = min(size, 8)
        wait_s = interval_s if size > 8 else 0.0
        return Round(
            max_batch_size=size, interval_s=interval_s, rows_per_s=rows / (0.002 + 0.0005 * rows + wait_s)
        )

    rounds, found = followed(eight_clients(64, 0.02), eight_clients, rows_under_way=8)
    assert [one.max_batch_size for one in rounds] == [64, 6, 8]
    assert found.verdict == "something_else"
    assert "only 8 rows are ever under way" in found.text


def test_without_an_interval_there_is_nothing_to_iterate():
    assert next_step([linear(4, 0.0)], rows_per_request=4).verdict == "no_interval"


@settings(deadline=None, max_examples=200)
@given(
    fixed_ms=st.floats(0.01, 20.0),
    row_ms=st.floats(0.01, 5.0),
    interval_ms=st.floats(0.1, 100.0),
    start=st.integers(1, 2000),
    rows=st.integers(1, 8),
    memory_rows=st.one_of(st.none(), st.integers(8, 500)),
)
def test_every_law_ends_in_a_verdict_on_a_size_that_works(
    fixed_ms, row_ms, interval_ms, start, rows, memory_rows
):
    def measure(size: int, interval_s: float) -> Round:
        if memory_rows is not None and size > memory_rows:
            return Round(max_batch_size=size, interval_s=interval_s, failure="OOM")
        whole = max(size // rows, 1) * rows
        return Round(
            max_batch_size=size, interval_s=interval_s, rows_per_s=whole / (fixed_ms + row_ms * whole) * 1e3
        )

    rounds, found = followed(
        measure(max(start, rows), interval_ms / 1e3), measure, rounds_max=60, rows_per_request=rows
    )
    assert len(rounds) < 60
    assert len({(one.max_batch_size, one.interval_s) for one in rounds}) == len(rounds)
    assert found.best is not None
    assert found.best.failure is None
    if found.verdict == "fixed_point":
        whole = max(found.best.max_batch_size // rows, 1) * rows
        assert found.best.interval_rows >= 0.9 * whole


SPACE = {"max_batch_size": [1, 4, 16, 64], "batch_timeout_micros": [0, 1000, 5000]}


def closed(**changes):
    return scenario_of(fixed={"num_batch_threads": 1}, search={"strategy": "rule", "space": SPACE}, **changes)


def capacity(**changes):
    load = {"arrivals": "poisson", "warm_up": "100ms", "duration": "1s", "seed": 3}
    return closed(load=load, objective="capacity", slo={"p95": "40ms"}, **changes)


def test_in_a_closed_loop_every_round_is_a_trial_of_the_scenarios_own_load():
    driver = Driver(closed()).refer()
    trials = driver.run(rule_strategy)
    assert {one.source for one in trials} == {"rule"}
    assert {one.concurrency for one in trials} == {16}
    assert [one.configuration.batching.max_batch_size for one in trials] == [12, 16]
    assert "the interval triggers first; 12 is next (outside the search space)" in trials[0].reason
    found = rule_conclusion(closed(), driver.trials)
    assert found.verdict == "something_else"
    assert "only 16 rows are ever under way" in found.text


def test_in_an_open_loop_two_batches_of_clients_find_the_peak_and_the_end_is_measured():
    """One thread of τ(b) = 0.9 + 0.4·b ms and I = 19.35 ms: τ(b) = I at b = 46; 42 is within a tenth of it."""
    driver = Driver(capacity()).refer()
    trials = driver.run(rule_strategy)
    assert [one.source for one in trials] == ["probe", "probe", "rule"]
    sizes = [one.configuration.batching.max_batch_size for one in trials]
    assert sizes == [15, 42, 42]
    assert [one.concurrency for one in trials[:2]] == [30, 84]
    assert trials[-1].objective is not None
    assert trials[-1].reason.startswith("the rule settles here: ")
    assert rule_conclusion(capacity(), driver.trials).verdict == "fixed_point"


def test_out_of_memory_is_known_by_the_servers_words_though_some_requests_were_answered():
    scenario = capacity(request={"rows": 5})
    driver = Driver(scenario, law=Law(rows_max=20)).refer()
    trials = driver.run(rule_strategy)
    first, second = trials[0], trials[1]
    assert out_of_memory(first) == "OOM when allocating tensor with shape[64,2]"
    assert second.configuration.batching.max_batch_size == 15
    factor = first.configuration.batching.max_batch_size / 15
    expected = first.configuration.batching.batch_timeout_micros / factor
    assert second.configuration.batching.batch_timeout_micros == pytest.approx(expected, abs=1)
    assert "size and interval reduced by the factor" in second.reason
    assert trials[-1].source == "rule"
    assert trials[-1].configuration.batching.max_batch_size <= 20


def test_a_killed_server_counts_as_out_of_memory_and_a_refusal_does_not():
    killed = planted(1, throughput=1, p95_s=1, failure="the server died under load:\n  exited with 137")
    refused = planted(1, throughput=1, p95_s=1, failure="num_batch_threads must be positive; was 0")
    assert out_of_memory(killed) == "exited with 137"
    assert out_of_memory(refused) is None


def test_what_is_fixed_stays_and_time_ends_the_rule():
    scenario = scenario_of(
        fixed={"num_batch_threads": 1, "batch_timeout_micros": 2000},
        search={"strategy": "rule", "space": {"max_batch_size": [1, 4, 16, 64]}},
    )
    trials = Driver(scenario).refer().run(rule_strategy)
    assert {one.configuration.batching.batch_timeout_micros for one in trials} <= {2000}
    assert len(Driver(closed(), trials_max=1).refer().run(rule_strategy)) == 1
