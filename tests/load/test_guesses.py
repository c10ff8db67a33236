"""What a signature leaves open is guessed in an order that a person would try."""

from __future__ import annotations

import pytest

from batchtune.load.first_tries import (
    BINARY,
    SMALL,
    guessed_request,
    inputs_with_range,
    narrower,
    range_guesses,
    shape_guesses,
)
from batchtune.scenario.spec.workload import RandomInputs, RandomRange, RandomValues, RequestSpec
from batchtune.wire.signature import Signature, TensorSpec


def signature_of(**inputs: tuple[str, tuple[int | None, ...] | None]) -> Signature:
    specs = [TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in inputs.items()]
    return Signature(name="serving_default", method_name="", inputs=tuple(specs), outputs=())


BERT = signature_of(
    input_ids=("int64", (None, None)),
    attention_mask=("int64", (None, None)),
    token_type_ids=("int64", (None, None)),
)


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("float32", (None, 784), ()),
        ("float32", (), ()),
        ("int64", (None, None), (128,)),
        ("float32", (None, None, 80), (128, 80)),
        ("float32", (None, None, None, 3), (224, 224, 3)),
        ("float32", (None, 1, None, None), (1, 224, 224)),
        ("float32", (None, None, None, None), (224, 224, 3)),
        ("object", (None, None), (1,)),
        ("float32", None, (128,)),
    ],
)
def test_open_dimensions_are_guessed_by_rank_and_type(
    dtype: str, shape: tuple[int | None, ...] | None, expected: tuple[int, ...]
) -> None:
    first = shape_guesses(signature_of(x=(dtype, shape)), ())[0]
    assert first == ({"x": expected} if expected else {})


def test_inputs_that_belong_together_have_one_length_in_every_guess() -> None:
    guesses = shape_guesses(BERT, ())
    assert len(guesses) > 4
    assert all(len(set(guess.values())) == 1 for guess in guesses)
    assert len({guess["input_ids"] for guess in guesses}) == len(guesses)


def test_what_is_given_is_not_guessed() -> None:
    assert all("input_ids" not in guess for guess in shape_guesses(BERT, {"input_ids"}))
    assert "input_ids" not in range_guesses(BERT, {"input_ids"})
    given = RequestSpec(inputs=RandomInputs(random=RandomValues(by_input={"input_ids": RandomRange(high=9)})))
    assert inputs_with_range(given, BERT) == {"input_ids"}
    everywhere = RequestSpec(inputs=RandomInputs(random=RandomValues(low=0, high=20000)))
    assert inputs_with_range(everywhere, BERT) == {"input_ids", "attention_mask", "token_type_ids"}
    assert inputs_with_range(RequestSpec(inputs="zeros"), BERT) == inputs_with_range(everywhere, BERT)
    assert inputs_with_range(RequestSpec(), BERT) == set()


def test_whole_numbers_are_small_those_of_a_mask_ones_and_of_a_type_binary() -> None:
    ranges = range_guesses(BERT, ())
    assert ranges["input_ids"] == SMALL
    assert ranges["token_type_ids"] == BINARY
    assert (ranges["attention_mask"].low, ranges["attention_mask"].high) == (1, 2)
    assert range_guesses(signature_of(x=("float32", (None, 3)), on=("bool", (None,))), ()) == {}
    assert range_guesses(signature_of(image=("uint8", (None, 8, 8, 3))), ())["image"].high == 256


def test_ranges_are_narrowed_one_by_one_and_then_all() -> None:
    ranges = {"a": SMALL, "b": SMALL, "c": BINARY}
    assert list(narrower(ranges)) == [
        {"a": BINARY, "b": SMALL, "c": BINARY},
        {"a": SMALL, "b": BINARY, "c": BINARY},
        {"a": BINARY, "b": BINARY, "c": BINARY},
    ]


def test_what_the_request_says_wins_over_guesses() -> None:
    own = RequestSpec(
        shapes={"ids": (7,)}, inputs=RandomInputs(random=RandomValues(by_input={"ids": RandomRange(high=9)}))
    )
    request = guessed_request(
        own, shapes={"ids": (128,), "mask": (128,)}, ranges={"ids": SMALL, "mask": BINARY}
    )
    assert request.shapes == {"ids": (7,), "mask": (128,)}
    assert isinstance(request.inputs, RandomInputs)
    assert request.inputs.random.by_input == {"ids": RandomRange(high=9), "mask": BINARY}
    assert guessed_request(RequestSpec(inputs="zeros"), shapes={}, ranges={"ids": SMALL}).inputs == "zeros"
