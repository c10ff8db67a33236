"""A model is asked a few times before anything is measured: what is open is found out, what would fail is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from batchtune.batching.parameters import Configuration
from batchtune.errors import TargetError, UsageError
from batchtune.load.first_tries import (
    BINARY,
    SMALL,
    FirstTries,
    first_tries,
    guessed_request,
    inputs_with_range,
    narrower,
    range_guesses,
    shape_guesses,
)
from batchtune.scenario.spec.target import TargetSpec
from batchtune.scenario.spec.workload import (
    FileInputs,
    LengthsSpec,
    RandomInputs,
    RandomRange,
    RandomValues,
    RequestSpec,
)
from batchtune.target.tfserving import TfServingTarget
from batchtune.wire.signature import Signature, TensorSpec
from tests.load.tiny_onnx import lookup, product, write_graph


@contextmanager
def served(model: Path) -> Iterator[TfServingTarget]:
    with TfServingTarget(TargetSpec(model=str(model))) as target:
        target.apply(Configuration(batching=None))
        yield target


def tried(model: Path, request: RequestSpec, *, batched: bool = True) -> FirstTries:
    with served(model) as target:
        return first_tries(target.endpoint, target.signature("serving_default"), request, batched=batched)


def test_a_length_that_the_model_does_not_take_is_followed_by_others(tmp_path: Path) -> None:
    model = product(tmp_path / "net.onnx", columns="features")
    with served(model) as target:
        signature = target.signature("serving_default")
        with pytest.raises(TargetError, match="the model refuses a request: INVALID_ARGUMENT") as raised:
            first_tries(target.endpoint, signature, RequestSpec())
        assert "--shape x=…" in raised.value.hint
        said: list[str] = []
        request = RequestSpec(shapes={"x": (4,)}, rows=2000)
        tries = first_tries(target.endpoint, signature, request, live=said.append)
        with pytest.raises(UsageError, match=r"request.shapes: signature .* has no input 'z'"):
            first_tries(target.endpoint, signature, RequestSpec(shapes={"x": (4,), "z": (4,)}))
    assert said == [f"asking it for {rows} rows at once" for rows in ("2,000", "4,000", "16,000", "2,000")]
    assert (tries.shapes, tries.ranges, tries.larger_s is None) == ({}, {}, False)
    assert 0.0 < tries.lone_s < 1.0


@pytest.mark.parametrize(("vocabulary", "expected"), [(1000, SMALL), (2, BINARY)])
def test_numbers_beyond_a_table_are_narrowed(tmp_path: Path, vocabulary: int, expected: object) -> None:
    lengths = LengthsSpec(file=str(tmp_path / "lengths.txt"))
    (tmp_path / "lengths.txt").write_text("3\n5\n")
    with served(lookup(tmp_path / "net.onnx", vocabulary=vocabulary)) as target:
        signature = target.signature("serving_default")
        tries = first_tries(target.endpoint, signature, RequestSpec(protocol="rest"))
        drawn = first_tries(target.endpoint, signature, RequestSpec(lengths=lengths))
    assert (tries.shapes, tries.ranges) == ({"ids": (128,)}, {"ids": expected})
    assert tries.request.shapes == {"ids": (128,)}
    assert (drawn.shapes, drawn.request.shapes, drawn.ranges) == ({}, {}, {"ids": expected})


def test_a_fixed_batch_dimension_is_told_unless_nothing_is_batched(tmp_path: Path) -> None:
    of_one, of_four = (product(tmp_path / f"{rows}.onnx", rows=rows) for rows in (1, 4))
    with pytest.raises(
        TargetError, match="a request of 1 row is answered, one of 2 is not: the batch dim"
    ) as raised:
        tried(of_one, RequestSpec())
    assert "export" in raised.value.hint
    assert tried(of_one, RequestSpec(), batched=False).larger_s is None
    with pytest.raises(TargetError, match="one of 8 is not") as raised:
        tried(of_four, RequestSpec(rows=4))
    assert "`batchtune load MODEL --rows 4 --no-batching`" in raised.value.hint


def test_an_output_without_the_rows_of_its_input_is_told_as_no_server_can_deal_it_out(tmp_path: Path) -> None:
    rows_lost = {"x": (TensorProto.FLOAT, ["batch", 4])}
    model = write_graph(tmp_path / "net.onnx", ("ReduceSum", ["x"]), rows_lost)
    with pytest.raises(TargetError, match=r"output 'y' has shape \[1, 1\], not a row for each of 2"):
        tried(model, RequestSpec())
    assert tried(model, RequestSpec(), batched=False).larger_s is None


def test_so_many_rows_that_the_model_refuses_them_are_said_and_no_fault(tmp_path: Path) -> None:
    (tmp_path / "emulated.yaml").write_text(
        "service_time: {base_ms: 1.0}\ninputs: {x: {dtype: float32, shape: [2]}}\n"
        "outputs: {y: {dtype: float32, shape: [2]}}\nmemory: {rows_max: 4}\n"
    )
    tries = tried(tmp_path, RequestSpec())
    assert tries.larger_s is None
    assert "room for 4 rows" in (tries.refusal or "")


def test_recorded_requests_are_asked_as_they_are_and_a_few_of_them(tmp_path: Path) -> None:
    ids = np.ones((40, 7), np.int64)
    ids[20:] = 9  # beyond the table: a request after the first few
    np.savez(tmp_path / "inputs.npz", ids=ids)
    model = lookup(tmp_path / "net.onnx", vocabulary=2)
    request = RequestSpec(inputs=FileInputs(file=str(tmp_path / "inputs.npz")))
    with served(model) as target:
        signature = target.signature("serving_default")
        tries = first_tries(target.endpoint, signature, request)
        np.savez(tmp_path / "inputs.npz", ids=ids[20:])
        with pytest.raises(TargetError, match="the model refuses a recorded request") as raised:
            first_tries(target.endpoint, signature, request)
    assert (tries.request, tries.recorded) == (request, True)
    assert (tries.shapes, tries.ranges, tries.larger_s) == ({}, {}, None)
    assert tries.lone_s > 0.0
    assert raised.value.hint


# -- guesses, in an order that a person would try --


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
