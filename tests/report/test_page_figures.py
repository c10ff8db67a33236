"""What the figures of the page draw and say of a planted ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.archive.run import create_run
from batchtune.load.record.samples import Samples
from batchtune.report.html.shell.batch_sizes import sizes
from batchtune.report.html.shell.latency_figures import distribution, split
from batchtune.report.html.sweep.account import LATEST, Account, account_of
from batchtune.report.html.sweep.search_figures import pareto
from batchtune.report.html.sweep.twin_figures import rates
from batchtune.scenario.reader import format_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.trials.trial import Trial
from tests.recommend.test_recommendation import BATCH_14, SCENARIO
from tests.report.pages import latencies
from tests.tune.evidence.test_pooled import CAPACITY, capacity_found, fresh_at
from tests.tune.tune_fakes import planted


def account_with(
    root: Path,
    trials: Sequence[Trial],
    scenario: Scenario = SCENARIO,
    samples: Samples | None = None,
) -> Account:
    run = create_run(scenario, format_scenario(scenario), root=root, provenance={})
    for trial in trials:
        run.append(trial, samples)
    return account_of(run)


def test_a_point_is_the_geometric_mean_of_its_runs_in_both(tmp_path):
    fresh = [
        planted(at, batching=BATCH_14, throughput=rate, p95_s=p95_s, source="confirm", block=at)
        for at, (rate, p95_s) in enumerate([(1000.0, 0.01), (4000.0, 0.04)], start=1)
    ]
    (trace,) = pareto(account_with(tmp_path, fresh)).figure.data
    assert trace["x"] == pytest.approx([2000.0])
    assert trace["y"] == pytest.approx([20.0])


@pytest.mark.parametrize(
    ("timeout_micros", "reason", "words"),
    [
        (2000, "full", "100 % close because they are full"),
        (2000, "timeout", "100 % close on the timeout"),
        (0, "timeout", "100 % go as soon as a thread is free"),
        (2000, "no_room", "100 % close because the next request does not fit"),
        (2000, "closed", "100 % close at the end"),
        (2000, "of_a_later_server", "100 % close by of_a_later_server"),
    ],
)
def test_why_batches_closed_is_told_as_in_the_reason(tmp_path, timeout_micros, reason, words):
    busy = ServerActivity(
        duration_s=1.0,
        batches=10,
        rows=80,
        mean_batch_rows=8.0,
        batches_by_rows={8: 10},
        close_reasons={reason: 10},
    )
    batching = {**BATCH_14, "batch_timeout_micros": timeout_micros}
    account = account_with(tmp_path, [planted(1, batching=batching, throughput=9.0, p95_s=0.01, server=busy)])
    assert sizes(account.shown, which=LATEST).lead == f"recommended: 8 rows on average; {words}."


@pytest.mark.parametrize(("measured", "slowest_ms"), [(5, 2.0), (10, 100.0)])
def test_the_latency_of_single_requests_is_that_of_the_measured_window(tmp_path, measured, slowest_ms):
    trial = planted(1, batching=BATCH_14, throughput=9.0, p95_s=0.01)
    trial = replace(trial, measurement=replace(trial.measurement, requests=measured))
    warmed_up = latencies([100.0] * 5 + [1.0, 1.0, 2.0, 1.0, 1.0])
    account = account_with(tmp_path, [trial], samples=warmed_up)
    (trace,) = distribution(account.shown, account.scenario.slo, which=LATEST).figure.data
    assert max(trace["y"]) == pytest.approx(slowest_ms)


def test_every_rate_behind_a_claimed_capacity_is_drawn_also_that_of_fresh_runs(tmp_path):
    ledger = [
        capacity_found(1, 1000.0, p95_s=0.040),
        fresh_at(2, 1000.0, 0.055),
        fresh_at(3, 900.0, 0.045),
    ]
    (trace,) = rates(account_with(tmp_path, ledger, CAPACITY), None).figure.data
    assert list(zip(trace["x"], trace["y"], strict=True)) == [(900.0, 45.0), (1000.0, 40.0), (1000.0, 55.0)]
    assert trace["text"] == ["keeps the SLO", "keeps the SLO", "misses the SLO"]


def test_without_a_search_for_a_capacity_no_rate_was_varied(tmp_path):
    section = rates(account_with(tmp_path, [fresh_at(1, 900.0, 0.045)]), None)
    assert section.missing.startswith("the rate was not varied")


def test_of_no_batching_the_model_and_the_rest_are_told_for_it_has_no_queue(tmp_path):
    server = ServerActivity(
        duration_s=1.0, batches=100, batches_by_rows={1: 100}, execution_s_by_rows={1: 0.002}
    )
    trial = planted(1, batching=None, throughput=9.0, p95_s=0.01, server=server)
    account = account_with(tmp_path, [trial])
    section = split(account.shown, which=LATEST)
    queue, model, rest = section.figure.data
    assert (queue["x"], model["x"]) == ([None], [2.0])
    assert rest["x"] == pytest.approx([6.0 - 2.0])
    assert "Without batching there is no such queue" in section.lead
    assert sizes(account.shown, which=LATEST).lead == ""


def test_why_batches_closed_is_drawn_beside_their_sizes_as_shares_of_a_hundred(tmp_path):
    server = ServerActivity(
        duration_s=1.0,
        batches=10,
        rows=80,
        batches_by_rows={8: 8, 4: 2},
        close_reasons={"full": 8, "timeout": 2},
    )
    trial = planted(1, batching=BATCH_14, throughput=9.0, p95_s=0.01, server=server)
    data = sizes(account_with(tmp_path, [trial]).shown, which=LATEST).figure.data
    assert data[0]["x"] == ["4", "8"]
    assert [trace["text"] for trace in data[1:]] == [["full"], ["on the timeout"]]
    assert [(trace["name"], trace["base"], trace["x"]) for trace in data[1:]] == [
        ("full", [0.0], [80.0]),
        ("timeout", [80.0], [20.0]),
    ]


def test_many_sizes_are_summed_up_between_powers_of_two(tmp_path):
    batches = dict.fromkeys(range(1, 41), 5)
    server = ServerActivity(duration_s=1.0, batches=200, mean_batch_rows=20.0, batches_by_rows=batches)
    trial = planted(1, batching=BATCH_14, throughput=9.0, p95_s=0.01, server=server)
    figure = sizes(account_with(tmp_path, [trial]).shown, which=LATEST).figure
    (trace,) = figure.data
    assert trace["x"] == ["1", "2", "3–4", "5–8", "9–16", "17–32", "33–64"]
    assert trace["y"] == pytest.approx([2.5, 2.5, 5.0, 10.0, 20.0, 40.0, 20.0])
