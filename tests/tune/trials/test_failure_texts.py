"""What failed, and why: the models' own words, as ONNX Runtime, PyTorch and TensorFlow said them, and their meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchtune.report.findings import text_of
from batchtune.target.endpoint import meaning_of
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.trials.trial import Trial, explain_failure
from tests.tune.tune_fakes import planted, scenario_of

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
