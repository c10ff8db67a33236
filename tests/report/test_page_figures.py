"""What the figures of the page draw and say of a planted ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from batchtune.archive.run import create_run
from batchtune.report.html.account import Account, account_of
from batchtune.report.html.search_figures import pareto
from batchtune.scenario.reader import format_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.trials.trial import Trial
from tests.recommend.test_recommendation import BATCH_14, SCENARIO
from tests.tune.tune_fakes import planted


def account_with(root: Path, trials: Sequence[Trial], scenario: Scenario = SCENARIO) -> Account:
    run = create_run(scenario, format_scenario(scenario), root=root, provenance={})
    for trial in trials:
        run.append(trial, None)
    return account_of(run)


def test_a_point_is_the_geometric_mean_of_its_runs_in_both(tmp_path):
    fresh = [
        planted(at, batching=BATCH_14, throughput=rate, p95_s=p95_s, source="confirm", block=at)
        for at, (rate, p95_s) in enumerate([(1000.0, 0.01), (4000.0, 0.04)], start=1)
    ]
    (trace,) = pareto(account_with(tmp_path, fresh)).figure.data
    assert trace["x"] == pytest.approx([2000.0])
    assert trace["y"] == pytest.approx([20.0])
