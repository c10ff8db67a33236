"""Known errors of models come with what they mean; the texts are those of the runtimes."""

from __future__ import annotations

import pytest

from batchtune.target.endpoint import meaning_of

FIRST_DIMENSION = """INVALID_ARGUMENT: Got invalid dimensions for input: x for the following indices
 index: 0 Got: 8 Expected: 1
 Please fix either the inputs/outputs or the model."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/m/1/model.onnx: probabilities has the unsupported type seq(map(int64,tensor(float)))", "zipmap"),
        (FIRST_DIMENSION, "first dimension"),
        ("indices[0,3] = 25000 is not in [0, 20000)\n\t [[{{node embedding}}]]", "vocabulary"),
        ("indices element out of data bounds, idx=25000 must be within the inclusive range", "vocabulary"),
        ("index out of range in self", "vocabulary"),
        (
            "pre: stages.py:f is code of the model's folder; it runs only with --allow_model_code",
            "--set target.flags.allow_model_code=true",
        ),
        (
            "INTERNAL: pre: stages.py, line 2, in preprocess: RecursionError: too deep",
            "the model's own stages",
        ),
        ("INTERNAL: step read: post: gave no 'y'", "the model's own stages"),
        ("RESOURCE_EXHAUSTED: out of memory", "max_batch_size"),
        ("OOM when allocating tensor with shape[1024,512]", "max_batch_size"),
    ],
)
def test_a_known_error_says_what_to_do(text: str, expected: str) -> None:
    assert expected in meaning_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "The batch scheduling queue to which this task was submitted is full",
        "Got invalid dimensions for input: x for the following indices\n index: 1 Got: 8 Expected: 4",
        "no answer within 10 s",
        "",
    ],
)
def test_any_other_error_is_left_to_its_own_words(text: str) -> None:
    assert meaning_of(text) == ""
