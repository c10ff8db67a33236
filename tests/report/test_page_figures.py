"""What the figures of the page draw and say of a planted ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchtune.archive.run import create_run
from batchtune.load.record.samples import Samples, Status
from batchtune.report.html.account import Account, account_of
from batchtune.report.html.batch_figures import sizes
from batchtune.report.html.latency_figures import distribution
from batchtune.report.html.search_figures import pareto
from batchtune.report.html.twin_figures import rates
from batchtune.scenario.reader import format_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.trials.trial import Trial
from tests.recommend.test_recommendation import BATCH_14, SCENARIO
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
    assert sizes(account).lead == f"Recommended: 8 rows on average; {words}."


def latencies(latency_ms: Sequence[float]) -> Samples:
    """Good answers to requests that were due every millisecond."""
    due_ns = np.arange(len(latency_ms)) * 1_000_000
    done_ns = due_ns + np.round(np.array(latency_ms) * 1e6).astype(np.int64)
    return Samples(
        due_ns=due_ns,
        sent_ns=due_ns,
        first_byte_ns=done_ns,
        done_ns=done_ns,
        connection_wait_ns=np.zeros_like(due_ns),
        status=np.full(len(due_ns), Status.OK, dtype=np.uint8),
        rows=np.ones(len(due_ns), dtype=np.int32),
        started_ns=0,
        wall_s=1.0,
        client_cpu_s=0.1,
        client_cores=1,
    )


@pytest.mark.parametrize(("measured", "slowest_ms"), [(5, 2.0), (10, 100.0)])
def test_the_latency_of_single_requests_is_that_of_the_measured_window(tmp_path, measured, slowest_ms):
    trial = planted(1, batching=BATCH_14, throughput=9.0, p95_s=0.01)
    trial = replace(trial, measurement=replace(trial.measurement, requests=measured))
    warmed_up = latencies([100.0] * 5 + [1.0, 1.0, 2.0, 1.0, 1.0])
    (trace,) = distribution(account_with(tmp_path, [trial], samples=warmed_up)).figure.data
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
