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
from batchtune.load.first_tries import BINARY, SMALL, FirstTries, first_tries
from batchtune.scenario.spec.target import TargetSpec
from batchtune.scenario.spec.workload import FileInputs, LengthsSpec, RequestSpec
from batchtune.target.tfserving import TfServingTarget
from tests.load.tiny_onnx import lookup, product, write_graph

pytest.importorskip("onnxruntime")


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
        tries = first_tries(
            target.endpoint, signature, RequestSpec(shapes={"x": (4,)}, rows=2000), live=said.append
        )
        with pytest.raises(UsageError, match=r"request.shapes: signature .* has no input 'z'"):
            first_tries(target.endpoint, signature, RequestSpec(shapes={"x": (4,), "z": (4,)}))
    assert [text.removeprefix("asking it for ") for text in said] == [
        "2,000 rows at once",
        "4,000 rows at once",
        "16,000 rows at once",
        "2,000 rows at once",
    ]
    assert tries.shapes == tries.ranges == {}
    assert tries.larger_s is not None
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
    model = product(tmp_path / "net.onnx", rows=1)
    with pytest.raises(
        TargetError, match="a request of 1 row is answered, one of 2 is not: the batch dim"
    ) as raised:
        tried(model, RequestSpec())
    assert "export" in raised.value.hint
    assert tried(model, RequestSpec(), batched=False).larger_s is None


def test_the_hint_for_a_fixed_batch_of_four_measures_requests_of_four_rows(tmp_path: Path) -> None:
    model = product(tmp_path / "net.onnx", rows=4)
    with pytest.raises(TargetError, match="one of 8 is not") as raised:
        tried(model, RequestSpec(rows=4))
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
