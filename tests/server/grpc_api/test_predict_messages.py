"""Are Predict messages read and written by template exactly as protobuf would?"""

from __future__ import annotations

import gc
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from batchtune.server.calls.pending_call import PendingCalls
from batchtune.server.grpc_api.predict import PredictRequests, PredictResponses, decode_inputs
from batchtune.server.metrics import Metrics
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import PredictRequest, PredictResponse
from batchtune.wire.tfserving.tensors import encode_predict_request, tensor_from_proto
from tests.wire.tensor_protos import tensor_to_proto

DTYPES = [*(f"float{bits}" for bits in (16, 32, 64)), *(f"int{bits}" for bits in (8, 16, 32, 64))]
DTYPES += ["uint8", "uint32", "uint64", "bool"]
Shape = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


FIELDS = ("model_name", "version", "label", "signature_name", "input_names", "output_filter")


def outcome(requests: PredictRequests, message: bytes) -> Any:
    """Everything that decoding gives, comparable: the plan's fields and the arrays, or the error."""
    try:
        plan, inputs, request = requests.decode(message)
        arrays = decode_inputs(request) if inputs is None else inputs
    except StatusError as error:
        return error.code, error.message
    fields = [getattr(plan, name) for name in FIELDS]
    return fields, {name: (one.dtype.name, one.shape, contents(one)) for name, one in arrays.items()}


def contents(array: Any) -> Any:
    if array.size > 1 << 16:  # one value repeated: cheap to hold, dear to write out
        return array.ravel()[:1].tolist()
    return array.tolist() if array.dtype.hasobject else array.tobytes()


@st.composite
def same_shaped_requests(draw: st.DrawFn) -> list[bytes]:
    """Some requests that differ in the values of their tensors only."""
    names = draw(st.lists(st.sampled_from(["x", "y", "ids", "é"]), max_size=3, unique=True))
    kinds = {name: (draw(st.sampled_from(DTYPES)), draw(Shape)) for name in names}
    version = draw(st.one_of(st.none(), st.integers(0, 2**40)))
    as_content = draw(st.booleans())
    return [
        encode_predict_request(
            "model",
            draw(st.sampled_from(["", "s"])) if index == 0 else "",
            {name: draw(arrays_of.arrays(dtype, shape)) for name, (dtype, shape) in kinds.items()},
            version=version,
            as_content=as_content,
        )
        for index in range(draw(st.integers(2, 4)))
    ]


@settings(max_examples=60, deadline=None)
@given(messages=same_shaped_requests())
def test_a_template_gives_what_protobuf_gives(messages: list[bytes]) -> None:
    warm = PredictRequests()
    for message in [*messages, *messages]:
        assert outcome(warm, message) == outcome(PredictRequests(), message)


LEARNT = encode_predict_request(
    "model", "s", {"x": np.arange(4, dtype=np.float32), "ids": np.arange(3)}, version=3, output_filter=("y",)
)


def test_a_learnt_message_is_read_without_protobuf() -> None:
    warm = PredictRequests()
    for _ in range(2):
        assert warm.decode(LEARNT)[1] is None
    inputs = warm.decode(LEARNT)[1]
    assert inputs is not None
    assert inputs["x"].tolist() == [0, 1, 2, 3]
    assert not inputs["x"].flags.writeable


def test_a_message_with_any_byte_changed_is_read_as_protobuf_reads_it() -> None:
    warm = PredictRequests()
    for _ in range(3):
        warm.decode(LEARNT)
    for position in range(len(LEARNT)):
        for flip in (0x01, 0x80, 0xFF):
            message = bytearray(LEARNT)
            message[position] ^= flip
            assert outcome(warm, bytes(message)) == outcome(PredictRequests(), bytes(message)), position


def test_one_plan_serves_equal_requests() -> None:
    warm = PredictRequests()
    plans = {warm.decode(LEARNT)[0] for _ in range(4)}
    other = warm.decode(encode_predict_request("model", "t", {"x": np.zeros(4, np.float32)}))[0]
    assert len(plans) == 1
    assert other not in plans


@pytest.mark.slow
def test_nothing_large_is_kept_of_requests_for_models_that_do_not_exist() -> None:
    requests, message = PredictRequests(), PredictRequest()
    message.inputs["x"].CopyFrom(tensor_to_proto(np.zeros(4, np.float32), as_content=True))
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(6):  # of an unknown field, and a name, of a megabyte
            message.model_spec.name = "absent"
            filler = b"\xfa\x07\x80\x80\x40" + bytes([number]) * 2**20
            for _ in range(2):
                requests.decode(message.SerializeToString() + filler)
            message.model_spec.name = f"{number}" * 2**19
            for _ in range(2):
                requests.decode(message.SerializeToString())
        del filler
        message.Clear()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()


def test_names_of_models_that_do_not_exist_are_cut_and_hide_none_that_does() -> None:
    metrics = Metrics()
    models, nothing = SimpleNamespace(names=lambda: ["served"]), lambda *_: None
    counts = PendingCalls(metrics, "GRPC", models, reply=nothing, refuse=nothing, is_gone=nothing)
    for number in range(600):
        counts.failed(f"{number:03}" + "x" * 60_000, "NOT_FOUND")
    assert len(metrics.render()) < 200_000
    counts.failed("served", "INVALID_ARGUMENT")
    assert 'request_count{model_name="served",status="INVALID_ARGUMENT"} 1' in metrics.render()


def test_memory_is_bounded_whatever_comes() -> None:
    warm = PredictRequests()
    for size in range(3000):
        for _ in range(2):
            warm.decode(encode_predict_request("m" * (size % 40), "", {"x": np.zeros(size, np.float32)}))
    for number in range(100):
        warm.decode(encode_predict_request(f"{number:03}", "", {"x": np.zeros(9, np.float32)}))
    assert len(warm._templates) <= 512
    assert len(warm._plans) <= 512
    assert all(len(known) <= 8 for known in warm._templates.values())


@pytest.mark.parametrize("as_content", [False, True])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_answers_parse_to_the_outputs(as_content: bool, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(["y", "scores", "é"]), min_size=1, max_size=3, unique=True))
    kinds = {
        name: (data.draw(st.sampled_from([*DTYPES, "complex64", "complex128", "uint16"])), data.draw(Shape))
        for name in names
    }
    responses = PredictResponses(
        model_name="model", version=7, signature_name="s", outputs=names, as_content=as_content
    )
    for _ in range(3):
        outputs = {name: data.draw(arrays_of.arrays(dtype, shape)) for name, (dtype, shape) in kinds.items()}
        response = PredictResponse.FromString(responses.encode(outputs))
        assert (response.model_spec.name, response.model_spec.version.value) == ("model", 7)
        assert set(response.outputs) == set(names)
        for name, array in outputs.items():
            read = tensor_from_proto(response.outputs[name])
            assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())
            assert bool(response.outputs[name].tensor_content) == (as_content and array.size > 0)


def test_slices_of_a_batch_are_written_in_order() -> None:
    responses = PredictResponses(
        model_name="m", version=1, signature_name="s", outputs=("y",), as_content=False
    )
    batch = np.arange(12, dtype=np.float32).reshape(3, 4)
    for _ in range(2):
        response = PredictResponse.FromString(responses.encode({"y": batch[1:, ::2]}))
        assert tensor_from_proto(response.outputs["y"]).tolist() == [[4, 6], [8, 10]]


def test_requests_from_a_map_in_any_order_are_understood() -> None:
    """protobuf writes maps in no fixed order, so one client may send several layouts of one request."""
    request = PredictRequest.FromString(LEARNT)
    layouts = {request.SerializeToString() for _ in range(5)} | {LEARNT}
    warm = PredictRequests()
    for message in [*layouts, *layouts, *layouts]:
        assert outcome(warm, message) == outcome(PredictRequests(), message)
