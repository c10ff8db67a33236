"""Which figures a run gives to the gates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from batchtune.check.gate import Gate
from batchtune.check.paired_check import judge_fixed, paired_figures, run_figures
from batchtune.report.comparison import comparison_rows
from batchtune.report.findings import Marks
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.compare.result import summarise
from batchtune.tune.trials.trial import Trial
from tests.check.check_fakes import exactly, measurement, moved, trial
from tests.tune.answer.ledgers import SCENARIO

SIDES = [Variant(name=name, scenario=SCENARIO) for name in ("main", "new")]


def test_cpu_is_counted_for_each_request_of_the_servers_own_account():
    figures = run_figures(trial("main", 1))
    assert figures["cpu"] == pytest.approx(0.32 / 1600)
    assert figures["throughput"] == 1600.0
    assert figures["p99"] == 0.007
    assert figures["memory"] == 300 * 2**20


def test_a_server_that_counts_rows_only_is_divided_by_the_rows_of_a_request():
    measured = moved(requests_by_status={}, rows=3200)
    twice = measurement(
        measured.server,
        throughput_rows_per_s=measurement().throughput_rps.__class__(value=3200.0, low=3200.0, high=3200.0),
    )
    assert run_figures(trial("main", 1, twice))["cpu"] == pytest.approx(0.32 / 1600)


def test_memory_of_the_gpu_and_the_start_of_a_server_launched_for_the_run():
    figures = run_figures(trial("main", 1, moved(gpu_memory_used_bytes=5e9), startup_s=1.4))
    assert (figures["gpu_memory"], figures["startup"]) == (5e9, 1.4)
    assert math.isnan(run_figures(trial("main", 1))["startup"])


def test_what_a_server_does_not_tell_is_not_known():
    figures = run_figures(trial("main", 1, measurement(None)))
    assert math.isnan(figures["cpu"])
    assert math.isnan(figures["gpu"])


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


def test_gpu_seconds_are_its_busy_time():
    measured = moved(gpu_busy_ratio=0.8)
    assert run_figures(trial("main", 1, measured))["gpu"] == pytest.approx(0.8 / 1600)


def test_where_cpu_was_measured_apart_only_that_counts():
    trials = [trial(name, block) for block in (1, 2) for name in ("main", "new")]
    blocks = paired_figures(trials, *SIDES, cpu={2: (5e-5, 6e-5)})
    assert blocks[1]["cpu"] == (5e-5, 6e-5)
    assert all(math.isnan(figure) for figure in blocks[0]["cpu"])
    own = run_figures(trials[0])["cpu"]
    alone = paired_figures(trials, *SIDES)
    assert [block["cpu"] for block in alone] == [(own, own)] * 2


@pytest.mark.parametrize(("told", "are_apart"), [(1, False), (2, False), (3, True)])
def test_where_most_of_it_told_nothing_the_runs_of_every_block_count(told, are_apart):
    trials = [trial(name, block) for block in range(1, 9) for name in ("main", "new")]
    cpu = {block: (5e-5, 6e-5) if block <= told else (math.nan, math.nan) for block in range(1, 7)}
    figures = [block["cpu"] for block in paired_figures(trials, *SIDES, cpu=cpu)]
    own = run_figures(trials[0])["cpu"]
    if are_apart:
        assert figures[:3] == [(5e-5, 6e-5)] * 3
        assert all(math.isnan(before) for before, _ in figures[3:])
    else:
        assert figures == [(own, own)] * 8
    of_others = paired_figures(trials, *SIDES, cpu={9: (5e-5, 6e-5)})
    assert [block["cpu"] for block in of_others] == [(own, own)] * 8


def test_blocks_need_both_sides_and_count_the_last_attempt():
    fast = measurement(
        throughput_rps=measurement().throughput_rps.__class__(value=2000.0, low=2000.0, high=2000.0)
    )
    trials = [trial("main", 1), trial("new", 1), trial("main", 2), trial("new", 1, fast)]
    (block,) = paired_figures(trials, *SIDES)
    assert block["throughput"] == (1600.0, 2000.0)


def streamed(name: str, block: int, ttft_s: float) -> Trial:
    measured = measurement()
    waits = {"ttft_p95": exactly(ttft_s), "itl_p99": exactly(0.01)}
    return trial(name, block, replace(measured, latency_s=measured.latency_s | waits))


def test_first_tokens_and_gaps_of_streams_are_paired_as_other_latencies_and_shown():
    trials = [
        streamed(name, block, 0.2 if name == "main" else 0.3)
        for block in range(1, 13)
        for name in ("main", "new")
    ]
    blocks = paired_figures(trials, *SIDES)
    assert blocks[0]["ttft_p95"] == (0.2, 0.3)
    assert math.isnan(paired_figures([trial("main", 1), trial("new", 1)], *SIDES)[0]["ttft_p95"][0])
    gates = [Gate(metric="ttft_p95", margin=0.05), Gate(metric="itl_p99", margin=0.05)]
    assert [finding.state for finding in judge_fixed(gates, blocks).findings] == ["regressed", "ok"]
    comparison = summarise(trials, SIDES)
    (heads, first, _) = comparison_rows(comparison, Marks(caveats=dict.fromkeys(("main", "new"), ())))
    assert dict(zip(heads, first, strict=True))["ttft_p95 ms"].startswith("200")
    assert comparison.pairs[0].latency_ratios["ttft_p95"].value == pytest.approx(1.5)
