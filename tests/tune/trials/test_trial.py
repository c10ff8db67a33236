"""Trials as data: violations of promises, a journey through JSON; what failed, in the words of the model; the edge of memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.report.findings import text_of
from batchtune.target.endpoint import meaning_of
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.trials.trial import (
    WORST_VIOLATION,
    Probe,
    Trial,
    explain_failure,
    is_as_large,
    is_beyond_memory,
    is_feasible,
    violations,
)
from tests.tune.tune_fakes import asked, planted, scenario_of

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


WRONG = [{"number": "x"}, {"seed": True}, {"seconds": None}, {"state": "done"}, {"source": "luck"}]
MISSING = object()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({name: MISSING}, "not a trial") for name in ("number", "configuration", "source", "seconds")),
        *((wrong, f"not a trial.*{next(iter(wrong))} is") for wrong in WRONG),
        ({"schema_version": 2}, "by another version of batchtune: schema_version 2 where 1 is read"),
    ],
)
def test_a_line_that_is_no_trial_says_why(change, words):
    values = {**planted(1).to_dict(), **change}
    with pytest.raises(ValueError, match=words):
        Trial.from_dict({name: value for name, value in values.items() if value is not MISSING})


def test_errors_and_their_texts_go_by_the_same_names():
    """Those of an older ledger, which had the texts under names in capitals, too."""
    document = planted(1, throughput=100.0, p95_s=0.01).to_dict()
    older = {**document, "error_texts": {"QUEUE_FULL": "The batch scheduling queue is full"}}
    assert Trial.from_dict(older).error_texts == {"queue_full": "The batch scheduling queue is full"}


INSIDE = "a shape inside the model is fixed"
FIXED = "the model's first dimension (the batch) is fixed"


def failed(text: str, number: int = 1) -> Trial:
    failure = f"no request was answered: 16 × INVALID_REQUEST: {text}"
    trial = planted(number, batching={"max_batch_size": 16}, source="calibration", failure=failure)
    return replace(trial, error_texts={"invalid_request": text})


FIXED_SIZE = "Got invalid dimensions for input: x index: 0 Got: 16 Expected: 1"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (
            "Got invalid dimensions for input: x for the following indices\n index: 0 Got: 16 Expected: 1\n",
            FIXED,
        ),
        ("signature serving_default input x shape is wrong, expected: [1,4], actual: [16,4]", FIXED),
        ("Guard failed: x.size()[0] == 1", FIXED),
        ("RuntimeError: shape '[1, 4]' is invalid for input of size 64", FIXED),
        (
            "Input to reshape is a tensor with 64 values, but the requested shape has 4 [[{{node}}]]",
            INSIDE,
        ),
        ("/forest/1: output_probability has the unsupported type seq(map(int64,tensor(float)))", "zipmap"),
        (
            "while running Gather node. Status Message: indices element out of data bounds, idx=50",
            "vocabulary",
        ),
        ("index out of range in self", "vocabulary"),
        ("indices[0] = 50 is not in [0, 10)", "vocabulary"),
        ("OOM when allocating tensor with shape[64,2]", "memory"),
    ],
)
def test_an_error_of_the_model_is_shown_once_with_what_it_means(text, meaning):
    said = explain_failure([failed(text, number) for number in (1, 2, 3)])
    assert said.count(" ".join(text.split()).rstrip(".")[:60]) == 1
    assert meaning in said


def test_a_failure_that_says_what_it_means_is_told_nothing_more():
    """The bench says it, and at start the server's own last words may be all there is."""
    text = FIXED_SIZE
    said = f"no request was answered: 16 × INVALID_REQUEST: {text} ({meaning_of(text)})"
    wordless = replace(failed(text), failure=said, error_texts={})
    assert explain_failure([wordless]).count("is fixed") == 1
    long = replace(wordless, failure=said.replace(text, f"{'x' * 180} {text}"))
    assert explain_failure([long]).endswith("serve it without batching")
    assert explain_failure([long]).count("(the batch)") == 1
    assert explain_failure([replace(wordless, failure=text)]).count("is fixed") == 1


def test_an_unknown_error_is_shown_as_it_is_and_overload_is_none():
    assert explain_failure([failed("the cat sat on the cable")]) == "the cat sat on the cable"
    slow = planted(1, throughput=5, error_ratio=1.0)
    assert explain_failure([replace(slow, error_texts={"timeout": "no answer within 10 s"})]) == ""
    assert explain_failure([replace(slow, error_texts={"server_error": "no such operation"})])


def test_where_every_batch_failed_the_recommendation_says_why():
    trials = [
        planted(1, throughput=100, p95_s=0.01, batching=None, source="no_batching"),
        failed(FIXED_SIZE, 2),
    ]
    chosen = recommend(trials, scenario=scenario_of())
    assert "Got: 16 Expected: 1" in text_of(chosen.reason)
    assert FIXED in text_of(chosen.reason)


SMALL, WIDE, DEEP = {"seqs": 64, "tokens": 512}, {"seqs": 512, "tokens": 512}, {"seqs": 64, "tokens": 8192}


def test_what_is_as_large_in_every_knob_is_beyond_it() -> None:
    assert is_beyond_memory({"seqs": 1024, "tokens": 512}, [WIDE])
    assert is_beyond_memory(WIDE, [WIDE])
    assert not is_beyond_memory({"seqs": 1024, "tokens": 256}, [WIDE])
    assert not is_beyond_memory(SMALL, [WIDE, DEEP])
    assert not is_beyond_memory(SMALL, [])


def test_two_points_on_the_edge_are_enough() -> None:
    between = {"seqs": 256, "tokens": 2048}
    assert not is_beyond_memory(between, [WIDE])
    assert is_beyond_memory(between, [WIDE, DEEP])


def test_words_and_switches_must_be_the_same() -> None:
    assert is_as_large({"seqs": 8, "kind": "a"}, {"seqs": 8, "kind": "a"})
    assert not is_as_large({"seqs": 8, "kind": "b"}, {"seqs": 8, "kind": "a"})
    assert not is_as_large({"seqs": 8, "eager": True}, {"seqs": 8, "eager": False})
