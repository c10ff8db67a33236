"""Trials as data: violations of promises, and a journey through JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.tune.trials.trial import WORST_VIOLATION, Probe, Trial, is_feasible, violations
from tests.tune.tune_fakes import asked, planted

SECONDS = st.floats(min_value=1e-4, max_value=1e3)


def test_violations_are_shares_of_the_promise_in_the_order_of_the_limits():
    found = violations({"p99": 0.03, "p95": 0.01}, 0.02, limits={"p95": 0.02, "p99": 0.02}, error_limit=0.01)
    assert list(found) == ["p95", "p99", "errors"]
    assert found == pytest.approx({"p95": -0.5, "p99": 0.5, "errors": 1.0})
    assert not is_feasible(found)


@given(st.dictionaries(st.sampled_from(["p50", "p95", "p99"]), SECONDS), SECONDS, st.floats(0, 1))
def test_every_trial_gets_every_constraint_and_all_are_finite(latency_s, limit_s, error_ratio):
    limits = {"p95": limit_s, "p99": limit_s}
    found = violations(latency_s, error_ratio, limits=limits, error_limit=0.01)
    assert list(found) == ["p95", "p99", "errors"]
    assert all(math.isfinite(value) and -1.0 <= value <= WORST_VIOLATION for value in found.values())
    kept = all(latency_s.get(name, math.inf) <= limit_s for name in limits) and error_ratio <= 0.01
    assert is_feasible(found) == kept


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_undefined_quantile_is_missed_by_the_most(value):
    assert violations({"p95": value}, 0.0, limits={"p95": 0.1}, error_limit=0.01)["p95"] == WORST_VIOLATION


def test_no_errors_at_all_may_be_promised():
    assert is_feasible(violations({}, 0.0, limits={}, error_limit=0.0))
    assert not is_feasible(violations({}, 0.001, limits={}, error_limit=0.0))


@pytest.mark.parametrize("failure", [None, "out of memory"])
def test_a_trial_survives_json(failure):
    probe = Probe(rate_rps=100.0, met=False, latency_s={"p95": math.inf}, error_ratio=0.5)
    trial = planted(3, batching={"max_batch_size": 8}, throughput=100.0, p95_s=0.01, block=2, failure=failure)
    trial = replace(asked(trial, point={"max_batch_size": 8}, rate_rps=9.0), probes=(probe,))
    assert Trial.from_dict(json.loads(json.dumps(trial.to_dict(), allow_nan=False))) == trial


@pytest.mark.parametrize("missing", ["number", "configuration", "source", "seconds"])
def test_a_line_that_lacks_a_key_is_no_trial(missing):
    values = planted(1, throughput=1.0, p95_s=1.0).to_dict()
    del values[missing]
    with pytest.raises(ValueError, match="not a trial"):
        Trial.from_dict(values)


def test_a_line_of_another_schema_is_no_trial():
    with pytest.raises(
        ValueError, match="written by another version of batchtune: schema_version 2 where 1 is read"
    ):
        Trial.from_dict({**planted(1, throughput=1.0, p95_s=1.0).to_dict(), "schema_version": 2})


@pytest.mark.parametrize(
    "wrong", [{"number": "x"}, {"seed": True}, {"seconds": None}, {"state": "done"}, {"source": "luck"}]
)
def test_a_value_of_another_type_is_no_trial(wrong):
    values = {**planted(1, throughput=1.0, p95_s=1.0).to_dict(), **wrong}
    with pytest.raises(ValueError, match=f"not a trial.*{next(iter(wrong))} is"):
        Trial.from_dict(values)


def test_errors_and_their_texts_go_by_the_same_names():
    """Those of an older ledger, which had the texts under names in capitals, too."""
    document = planted(1, throughput=100.0, p95_s=0.01).to_dict()
    older = {**document, "error_texts": {"QUEUE_FULL": "The batch scheduling queue is full"}}
    assert Trial.from_dict(older).error_texts == {"queue_full": "The batch scheduling queue is full"}
