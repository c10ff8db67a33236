"""Which figures a run gives to the gates."""

from __future__ import annotations

import math

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
