"""Do grpcio's clients get what tensorflow_model_server would answer?"""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.text_format import Parse
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from batchtune.server.grpc_api.services import REFLECTION_SERVICES, HealthCalls
from batchtune.wire.grpc.server_call import GrpcStream, read_head
from batchtune.wire.status import GRPC_CODES, StatusError
from batchtune.wire.tfserving.messages import (
    ClassificationRequest,
    ExampleListWithContext,
    GetModelMetadataRequest,
    GetModelStatusRequest,
    ModelServerConfig,
    MultiInferenceRequest,
    PredictRequest,
    PredictResponse,
    RegressionRequest,
    ReloadConfigRequest,
    SignatureDefMap,
    TensorProto,
)
from batchtune.wire.tfserving.tensors import encode_predict_request, tensor_from_proto
from tests.server.server_fakes import FakeModels, FakeServable, RunningGrpc, running_grpc, signature, spec
from tests.waiting import wait_until
from tests.wire.stubs import Stub
from tests.wire.tensor_protos import tensor_to_proto

TIMEOUT_S = 20.0
MANY = {
    "serving_default": (
        signature("serving_default", [spec("a"), spec("b", "int64")], [spec("sum"), spec("text", "object")]),
        lambda inputs: {
            "sum": (inputs["a"] + inputs["b"]).astype(np.float32),
            "text": np.array([str(one).encode() for one in inputs["b"].tolist()], object),
        },
    )
}


def score(inputs: dict[str, Any]) -> dict[str, Any]:
    sizes = [len(one) for one in inputs["inputs"].tolist()]
    return {
        "scores": np.array([[size, size + 0.5] for size in sizes], np.float32),
        "classes": np.array([[b"short", b"long"]] * len(sizes), object),
        "outputs": np.array(sizes, np.float32),
    }


EXAMPLES = [spec("inputs", "object")]
EXAMPLE_MODEL = {
    "serving_default": (
        signature("serving_default", EXAMPLES, [spec("classes", "object", 2), spec("scores", "float32", 2)]),
        score,
    ),
    "scores": (signature("scores", EXAMPLES, [spec("scores", "float32", 2)], "classify"), score),
    "size": (signature("size", EXAMPLES, [spec("outputs")], "regress"), score),
    "plain": (signature("plain", [spec("x")], [spec("y")]), score),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningGrpc]:
    with running_grpc(enable_grpc_reflection=True) as running:
        yield running


@pytest.fixture(autouse=True)
def server(shared: RunningGrpc) -> RunningGrpc:
    servable = shared.models.servable
    servable.error, servable.hold, shared.models.reload_error = None, False, None
    servable.held.clear()
    servable.asked.clear()
    return shared


@pytest.fixture(scope="module")
def channel(shared: RunningGrpc) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(shared.address) as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return Stub(channel, "PredictionService")


def predict_request(**inputs: Any) -> PredictRequest:
    request = PredictRequest()
    request.model_spec.name = "m"
    for name, value in inputs.items():
        proto = value if isinstance(value, TensorProto) else tensor_to_proto(value, as_content=True)
        request.inputs[name].CopyFrom(proto)
    return request


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def failure(call: Callable[..., Any], request: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=TIMEOUT_S)
    return caught.value.code().name, caught.value.details()


def test_predict_answers_typed_values_and_the_version(server: RunningGrpc, stub: Any) -> None:
    for count in range(1, 6):  # the first messages of a length teach the templates that the later ones use
        for shift in (0.0, 7.0):
            values = np.arange(count, dtype=np.float32) + np.float32(shift)
            response = stub.Predict(predict_request(x=values), timeout=TIMEOUT_S)
            assert list(response.outputs["y"].float_val) == (values / 2 + 2).tolist()
            assert response.outputs["y"].tensor_content == b""
            assert [dim.size for dim in response.outputs["y"].tensor_shape.dim] == [count]
            assert (response.model_spec.name, response.model_spec.version.value) == ("m", 123)
            assert response.model_spec.signature_name == "serving_default"


@pytest.mark.parametrize("as_content", [False, True])
def test_requests_with_values_in_either_form_are_understood(stub: Any, as_content: bool) -> None:
    for values in (floats(1, 2), floats(3, 4), floats(5, 6)):
        request = PredictRequest.FromString(
            encode_predict_request("m", "", {"x": values}, as_content=as_content)
        )
        answer = stub.Predict(request, timeout=TIMEOUT_S).outputs["y"]
        assert list(answer.float_val) == (values / 2 + 2).tolist()


def test_the_last_value_is_repeated_and_no_value_means_zeros(stub: Any) -> None:
    for values, expected in (([1.0, 3.0], [2.5, 3.5, 3.5]), ([], [2.0, 2.0, 2.0]), ([5.0], [4.5] * 3)):
        proto = TensorProto(dtype="DT_FLOAT", float_val=values)
        proto.tensor_shape.dim.add().size = 3
        for _ in range(3):
            answer = stub.Predict(predict_request(x=proto), timeout=TIMEOUT_S)
            assert list(answer.outputs["y"].float_val) == expected


def test_values_not_packed_are_understood(channel: grpc.Channel) -> None:
    tensor = b"\x08\x01\x12\x04\x12\x02\x08\x02" + b"\x2d\x00\x00\x80\x3f" + b"\x2d\x00\x00\x00\x40"
    entry = b"\x0a\x01x\x12" + bytes([len(tensor)]) + tensor
    message = b"\x0a\x03\x0a\x01m\x12" + bytes([len(entry)]) + entry
    call = channel.unary_unary(
        "/tensorflow.serving.PredictionService/Predict", response_deserializer=PredictResponse.FromString
    )
    for _ in range(3):
        assert list(call(message, timeout=TIMEOUT_S).outputs["y"].float_val) == [2.5, 3.0]


def test_versions_labels_and_signatures_are_chosen(stub: Any, server: RunningGrpc) -> None:
    by_version, by_label, by_name = (predict_request(x=floats(1)) for _ in range(3))
    by_version.model_spec.version.value = 123
    by_label.model_spec.version_label = "stable"
    by_name.model_spec.signature_name = "serving_default"
    for request in (by_version, by_label, by_name):
        response = stub.Predict(request, timeout=TIMEOUT_S)
        assert response.model_spec.version.value == 123
        assert list(response.outputs["y"].float_val) == [2.5]
    assert [asked[0] for asked in server.models.servable.asked] == ["serving_default"] * 3


def test_refused_requests_leave_nothing_behind(server: RunningGrpc) -> None:
    """The same refusal, again and again: neither the request nor its frames are kept by what refuses it."""
    alive: list[weakref.ref[Any]] = []

    class Call:
        head = SimpleNamespace(path="/tensorflow.serving.PredictionService/Predict")
        deadline_ns, cancelled = None, False

        def __init__(self) -> None:
            request = predict_request(x=np.zeros(16, np.float32))
            request.output_filter.append("z")
            self.message = request.SerializeToString()
            self.ended = ""
            alive.append(weakref.ref(self))

        def fail(self, code: str, _message: str) -> None:
            self.ended = code

    def refuse() -> str:
        call = Call()
        server.dispatch(call)  # type: ignore[arg-type]
        return call.ended

    assert {server.thread.call(refuse) for _ in range(20)} == {"INVALID_ARGUMENT"}
    gc.collect()
    assert [one for one in alive if one() is not None] == []


def test_an_output_filter_selects_and_orders_nothing_else(stub: Any) -> None:
    with running_grpc(FakeServable(MANY)) as server, grpc.insecure_channel(server.address) as channel:
        many = Stub(channel, "PredictionService")
        for numbers in ([1, 2], [3, 4], [5, 6]):
            request = predict_request(a=floats(0.5, 1.5), b=np.array(numbers, np.int64))
            response = many.Predict(request, timeout=TIMEOUT_S)
            assert sorted(response.outputs) == ["sum", "text"]
            assert list(response.outputs["text"].string_val) == [str(one).encode() for one in numbers]
            request.output_filter.append("sum")
            filtered = many.Predict(request, timeout=TIMEOUT_S)
            assert list(filtered.outputs) == ["sum"]
            assert list(filtered.outputs["sum"].float_val) == [0.5 + numbers[0], 1.5 + numbers[1]]
        assert server.models.servable.asked[-1][2] == ("sum",)
        for names, text in (
            (
                ["no"],
                "output tensor alias not found in signature: no Outputs expected to be in the set {sum,text}.",
            ),
            (["sum", "sum"], "duplicate output tensor alias: sum"),
        ):
            refused = predict_request(a=floats(1), b=np.array([1]))
            refused.output_filter.extend(names)
            for _ in range(3):
                assert failure(many.Predict, refused) == ("INVALID_ARGUMENT", text)


def test_tensor_content_is_answered_when_the_flag_asks_for_it() -> None:
    with (
        running_grpc(FakeServable(MANY), enable_serialization_as_tensor_content=True) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        many = Stub(channel, "PredictionService")
        for number in (1, 2, 3):
            request = predict_request(a=floats(0.5), b=np.array([number]))
            outputs = many.Predict(request, timeout=TIMEOUT_S).outputs
            assert outputs["sum"].tensor_content == floats(number + 0.5).tobytes()
            assert list(outputs["text"].string_val) == [str(number).encode()]


OUTPUT_VALUES = {
    "float32": [1.5, -2.5],
    "float64": [1.5, -2.5],
    "float16": [1.5, -2.5],
    "int8": [-1, 2],
    "int16": [-1, 2],
    "int32": [-1, 2],
    "int64": [-1, 2],
    "uint8": [1, 255],
    "uint16": [1, 65535],
    "uint32": [1, 2**32 - 1],
    "uint64": [1, 2**64 - 1],
    "bool": [True, False],
    "complex64": [1 + 2j, 3],
    "complex128": [1 + 2j, 3],
    "object": [b"a", b"\xff"],
}


@pytest.mark.parametrize("as_content", [False, True])
@pytest.mark.parametrize("dtype", OUTPUT_VALUES)
def test_outputs_of_every_type_and_no_rows_at_all_arrive(dtype: str, as_content: bool) -> None:
    values = np.array(OUTPUT_VALUES[dtype], dtype)
    model = {
        "serving_default": (
            signature("serving_default", [spec("x")], [spec("y", dtype)]),
            lambda inputs: {"y": values[: len(inputs["x"])]},
        )
    }
    with (
        running_grpc(FakeServable(model), enable_serialization_as_tensor_content=as_content) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        one = Stub(channel, "PredictionService")
        for rows in (2, 2, 1, 0, 0):
            response = one.Predict(predict_request(x=np.zeros(rows, np.float32)), timeout=TIMEOUT_S)
            assert tensor_from_proto(response.outputs["y"]).tolist() == values[:rows].tolist()


def edited(change: Callable[[Any], Any], **inputs: Any) -> PredictRequest:
    request = predict_request(**(inputs or {"x": floats(1)}))
    change(request)
    return request


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (PredictRequest(), "INVALID_ARGUMENT", "Missing ModelSpec"),
        (
            edited(lambda one: one.model_spec.ClearField("name")),
            "INVALID_ARGUMENT",
            "ModelSpec has no name specified.",
        ),
        (
            edited(lambda one: setattr(one.model_spec, "name", "x")),
            "NOT_FOUND",
            "Servable not found for request: Latest(x)",
        ),
        (
            edited(lambda one: setattr(one.model_spec.version, "value", 9)),
            "NOT_FOUND",
            "Servable not found for request: Specific(m, 9)",
        ),
        (
            edited(lambda one: setattr(one.model_spec, "version_label", "l")),
            "INVALID_ARGUMENT",
            "Unrecognized servable version label: l",
        ),
        (
            edited(lambda one: setattr(one.model_spec, "signature_name", "s")),
            "FAILED_PRECONDITION",
            'Serving signature key "s" not found.',
        ),
        (
            predict_request(x=floats(1), z=floats(1)),
            "INVALID_ARGUMENT",
            (
                "input size does not match signature: 2!=1 len({x,z}) != len({x}). Sent extra: {z}. Missing but "
                "required: {}."
            ),
        ),
        (
            predict_request(),
            "INVALID_ARGUMENT",
            (
                "input size does not match signature: 0!=1 len({}) != len({x}). Sent extra: {}. Missing but "
                "required: {x}."
            ),
        ),
        (
            predict_request(z=floats(1)),
            "INVALID_ARGUMENT",
            (
                "Signature input alias: x(feed name: x:0) not found in request and no default value provided. Inputs "
                "expected to be in the request {z}, or default input alias set: "
            ),
        ),
        (
            predict_request(x=TensorProto(dtype="DT_FLOAT", tensor_content=b"123")),
            "INVALID_ARGUMENT",
            "tensor parsing error: x",
        ),
        (predict_request(x=TensorProto()), "INVALID_ARGUMENT", "tensor parsing error: x"),
    ],
)
def test_predict_refusals_are_the_references(stub: Any, request_: Any, code: str, text: str) -> None:
    for _ in range(3):
        assert failure(stub.Predict, request_) == (code, text)


def test_signature_defaults_fill_in_for_missing_inputs() -> None:
    servable = FakeServable(MANY)
    definitions = SignatureDefMap.FromString(servable.metadata)
    defaults = definitions.signature_def["serving_default"].defaults
    defaults["b"].CopyFrom(tensor_to_proto(np.array([40, 50]), as_content=True))
    servable.metadata = definitions.SerializeToString()
    with running_grpc(servable) as server, grpc.insecure_channel(server.address) as channel:
        many = Stub(channel, "PredictionService")
        for _ in range(3):
            response = many.Predict(predict_request(a=floats(1, 2)), timeout=TIMEOUT_S)
            assert list(response.outputs["sum"].float_val) == [41, 52]
        assert failure(many.Predict, predict_request(a=floats(1), z=floats(1))) == (
            "INVALID_ARGUMENT",
            "Inputs contains invalid name. Used request inputs: a, request input: a,z",
        )
        code, text = failure(many.Predict, predict_request(b=np.array([1])))
        assert code == "INVALID_ARGUMENT"
        assert text.endswith("Inputs expected to be in the request {b}, or default input alias set: b")


def test_a_message_that_is_no_request_is_internal(channel: grpc.Channel) -> None:
    for method in ("PredictionService/Predict", "PredictionService/Classify", "ModelService/GetModelStatus"):
        code, text = failure(channel.unary_unary(f"/tensorflow.serving.{method}"), b"\xff\xff\xff")
        assert code == "INTERNAL"
        assert text.startswith("Failed to parse the ")


def test_methods_that_do_not_exist_are_unimplemented(channel: grpc.Channel) -> None:
    assert failure(channel.unary_unary("/tensorflow.serving.SessionService/SessionRun"), b"") == (
        "UNIMPLEMENTED",
        "unknown method /tensorflow.serving.SessionService/SessionRun",
    )


@pytest.mark.parametrize("code", sorted(set(GRPC_CODES) - {"OK"}))
def test_every_status_of_the_model_reaches_the_client(server: RunningGrpc, stub: Any, code: str) -> None:
    server.models.servable.error = StatusError(code, "because é")
    assert failure(stub.Predict, predict_request(x=floats(1))) == (code, "because é")


def test_long_messages_are_cut_as_tensorflow_serving_cuts_them(server: RunningGrpc, stub: Any) -> None:
    server.models.servable.error = StatusError("INTERNAL", "x" * 1024)
    assert failure(stub.Predict, predict_request(x=floats(1)))[1] == "x" * 1024
    server.models.servable.error = StatusError("INTERNAL", "x" * 1025)
    assert failure(stub.Predict, predict_request(x=floats(1)))[1] == "x" * 1024 + "...TRUNCATED"


def test_a_deadline_reaches_the_model_and_ends_the_call(server: RunningGrpc, stub: Any) -> None:
    server.models.servable.hold = True
    began_ns = time.monotonic_ns()
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(predict_request(x=floats(1)), timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    deadline_ns = server.models.servable.asked[0][3]
    assert deadline_ns is not None
    assert began_ns < deadline_ns < began_ns + 10**9
    server.thread.call(server.models.servable.release)  # nobody waits for it any more
    server.models.servable.hold = False
    assert stub.Predict(predict_request(x=floats(1)), timeout=TIMEOUT_S).outputs["y"].float_val[0] == 2.5


def test_the_server_itself_ends_a_call_at_its_deadline() -> None:
    """A client that sends grpc-timeout but does not watch it."""
    from batchtune.wire.grpc.client_connection import GrpcClientConnection, prepare_call

    with running_grpc() as server:
        server.models.servable.hold = True
        message = encode_predict_request("m", "", {"x": floats(1)})
        prepared = prepare_call(
            "/tensorflow.serving.PredictionService/Predict", server.address, message, timeout_s=0.03
        )

        async def ask() -> tuple[int, str]:
            loop = asyncio.get_running_loop()
            answered: asyncio.Future[tuple[int, str]] = loop.create_future()
            ready = loop.create_future()
            _, connection = await loop.create_connection(
                lambda: GrpcClientConnection(
                    lambda _tag, status, _message, text: answered.set_result((status, text)),
                    lambda *_: None,
                    ready.set_result,
                ),
                "127.0.0.1",
                server.port,
            )
            await ready
            connection.call(prepared, 1)
            connection.flush()
            answer = await answered
            connection.close()
            return answer

        assert server.thread.run(ask()) == (
            GRPC_CODES["DEADLINE_EXCEEDED"],
            "Timed out waiting for notification",
        )


def test_a_cancelled_call_is_dropped_and_its_late_answer_too(server: RunningGrpc, stub: Any) -> None:
    server.models.servable.hold = True
    pending = stub.Predict.future(predict_request(x=floats(1)), timeout=TIMEOUT_S)
    wait_until(lambda: server.models.servable.held)
    pending.cancel()
    server.models.servable.hold = False
    assert stub.Predict(predict_request(x=floats(1)), timeout=TIMEOUT_S).outputs["y"].float_val[0] == 2.5
    server.thread.call(server.models.servable.release)
    assert stub.Predict(predict_request(x=floats(3)), timeout=TIMEOUT_S).outputs["y"].float_val[0] == 3.5


def test_a_replaced_version_is_noticed_by_requests_already_known(server: RunningGrpc, stub: Any) -> None:
    old = server.models.servable
    try:
        for _ in range(3):
            stub.Predict(predict_request(x=floats(1)), timeout=TIMEOUT_S)
        server.models.servable = FakeServable(version=124)
        for _ in range(2):
            response = stub.Predict(predict_request(x=floats(1)), timeout=TIMEOUT_S)
            assert response.model_spec.version.value == 124
    finally:
        server.models.servable = old


def test_a_large_tensor_goes_both_ways(server: RunningGrpc) -> None:
    values = np.arange(2**20, dtype=np.float32)
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        call = Stub(channel, "PredictionService")
        response = call.Predict(predict_request(x=values), timeout=TIMEOUT_S)
    np.testing.assert_array_equal(tensor_from_proto(response.outputs["y"]), values / 2 + 2)


def test_aio_stubs_get_the_same_answers(server: RunningGrpc) -> None:
    async def ask() -> list[float]:
        async with grpc.aio.insecure_channel(server.address) as channel:
            aio = Stub(channel, "PredictionService")
            calls = [aio.Predict(predict_request(x=floats(one)), timeout=TIMEOUT_S) for one in range(50)]
            return [response.outputs["y"].float_val[0] for response in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [one / 2 + 2 for one in range(50)]


def test_requests_are_counted_by_status(stub: Any, server: RunningGrpc) -> None:
    stub.Predict(predict_request(x=floats(1)), timeout=TIMEOUT_S)
    server.models.servable.error = StatusError("UNAVAILABLE", "full")
    failure(stub.Predict, predict_request(x=floats(1)))
    text = server.metrics.render()
    assert ':tensorflow:serving:request_count{model_name="m",status="OK"}' in text
    assert ':tensorflow:serving:request_count{model_name="m",status="UNAVAILABLE"}' in text
    assert 'request_latency_count{model_name="m",API="Predict",entrypoint="GRPC"}' in text


def examples_of(request: Any, *texts: str) -> Any:
    request.model_spec.name = "m"
    for text in texts:
        example = request.input.example_list.examples.add()
        example.features.feature["t"].bytes_list.value.append(text.encode())
    return request


@pytest.fixture(scope="module")
def example_stub() -> Iterator[Any]:
    with (
        running_grpc(FakeServable(EXAMPLE_MODEL)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield Stub(channel, "PredictionService")


def test_classify_gives_labels_and_scores(example_stub: Any) -> None:
    request = examples_of(ClassificationRequest(), "a", "bcd")
    sizes = [len(one.SerializeToString()) for one in request.input.example_list.examples]
    response = example_stub.Classify(request, timeout=TIMEOUT_S)
    rows = [[(one.label, one.score) for one in entry.classes] for entry in response.result.classifications]
    assert rows == [[("short", size), ("long", size + 0.5)] for size in sizes]
    assert response.model_spec.signature_name == "serving_default"
    request.model_spec.signature_name = "scores"
    only_scores = example_stub.Classify(request, timeout=TIMEOUT_S).result.classifications[0].classes
    assert [(one.label, one.score) for one in only_scores] == [("", sizes[0]), ("", sizes[0] + 0.5)]


def test_regress_gives_values_and_a_context_is_merged_into_examples(example_stub: Any) -> None:
    request = examples_of(RegressionRequest(), "a")
    request.model_spec.signature_name = "size"
    alone = example_stub.Regress(request, timeout=TIMEOUT_S).result.regressions[0].value
    examples = list(request.input.example_list.examples)
    with_context = ExampleListWithContext(examples=examples, context=examples[0])
    request.input.example_list_with_context.CopyFrom(with_context)
    response = example_stub.Regress(request, timeout=TIMEOUT_S)
    assert response.result.regressions[0].value == 2 * alone
    assert response.model_spec.version.value == 123


def with_signature(request: Any, name: str) -> Any:
    request.model_spec.signature_name = name
    return request


@pytest.mark.parametrize(
    ("method", "request_", "code", "text"),
    [
        ("Classify", ClassificationRequest(), "INVALID_ARGUMENT", "Missing ModelSpec"),
        ("Regress", RegressionRequest(), "INVALID_ARGUMENT", "Missing ModelSpec"),
        ("Classify", examples_of(ClassificationRequest()), "INVALID_ARGUMENT", "Input is empty."),
        (
            "Classify",
            with_signature(examples_of(ClassificationRequest(), "a"), "no"),
            "INVALID_ARGUMENT",
            "No signature was found with the name: no",
        ),
        (
            "Regress",
            examples_of(RegressionRequest(), "a"),
            "INVALID_ARGUMENT",
            "Expected one output Tensor.",
        ),
    ],
)
def test_classify_and_regress_refusals(
    example_stub: Any, method: str, request_: Any, code: str, text: str
) -> None:
    assert failure(getattr(example_stub, method), request_) == (code, text)


def test_a_signature_of_another_kind_is_shown(example_stub: Any) -> None:
    for method, request, complaint in (
        ("Classify", ClassificationRequest(), "No classification inputs found in SignatureDef: inputs {"),
        ("Regress", RegressionRequest(), "No regression inputs found in SignatureDef: inputs {"),
    ):
        code, text = failure(
            getattr(example_stub, method), with_signature(examples_of(request, "a"), "plain")
        )
        assert code == "INVALID_ARGUMENT"
        assert text.startswith(complaint)


def multi_request(*tasks: tuple[str, str, str]) -> MultiInferenceRequest:
    request = MultiInferenceRequest()
    for model, name, method in tasks:
        task = request.tasks.add(method_name=f"tensorflow/serving/{method}")
        task.model_spec.name = model
        task.model_spec.signature_name = name
    request.input.example_list.examples.add().features.feature["t"].int64_list.value.append(1)
    return request


def test_multi_inference_answers_all_tasks_in_order(example_stub: Any) -> None:
    request = multi_request(("m", "size", "regress"), ("m", "scores", "classify"))
    size = len(request.input.example_list.examples[0].SerializeToString())
    regression, classification = example_stub.MultiInference(request, timeout=TIMEOUT_S).results
    assert regression.regression_result.regressions[0].value == size
    assert classification.classification_result.classifications[0].classes[1].score == size + 0.5
    assert (regression.model_spec.signature_name, classification.model_spec.signature_name) == (
        "size",
        "scores",
    )


@pytest.mark.parametrize(
    ("tasks", "code", "text"),
    [
        ([], "INVALID_ARGUMENT", "ModelSpec has no name specified."),
        (
            [("m", "size", "regress"), ("", "scores", "classify")],
            "INVALID_ARGUMENT",
            "Found ModelSpec with an empty model name.",
        ),
        (
            [("m", "size", "regress"), ("n", "scores", "classify")],
            "INVALID_ARGUMENT",
            "All ModelSpecs in a MultiInferenceRequest must access the same model name.",
        ),
        (
            [("m", "size", "regress"), ("m", "size", "regress")],
            "INVALID_ARGUMENT",
            "Duplicate evaluation of signature: size",
        ),
        (
            [("m", "no", "regress")],
            "INVALID_ARGUMENT",
            "Requested signature not found in model graph: no",
        ),
        (
            [("m", "size", "predict")],
            "UNIMPLEMENTED",
            "Unsupported signature method_name: tensorflow/serving/predict",
        ),
    ],
)
def test_multi_inference_refusals(example_stub: Any, tasks: Any, code: str, text: str) -> None:
    assert failure(example_stub.MultiInference, multi_request(*tasks)) == (code, text)


def test_method_names_are_checked_when_the_flag_asks_for_it() -> None:
    with (
        running_grpc(FakeServable(EXAMPLE_MODEL), enable_signature_method_name_check=True) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        strict = Stub(channel, "PredictionService")
        assert failure(strict.Classify, examples_of(ClassificationRequest(), "a")) == (
            "INVALID_ARGUMENT",
            (
                "Expected classification signature method_name to be tensorflow/serving/classify. Was: "
                "tensorflow/serving/predict"
            ),
        )
        request = with_signature(examples_of(ClassificationRequest(), "a"), "scores")
        assert strict.Classify(request, timeout=TIMEOUT_S).result.classifications


def metadata_request(*fields: str, name: str = "m") -> GetModelMetadataRequest:
    request = GetModelMetadataRequest(metadata_field=fields)
    request.model_spec.name = name
    return request


def test_metadata_holds_the_signatures(stub: Any) -> None:
    response = stub.GetModelMetadata(metadata_request("signature_def"), timeout=TIMEOUT_S)
    assert (response.model_spec.name, response.model_spec.version.value) == ("m", 123)
    definitions = SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(definitions)
    assert definitions.signature_def["serving_default"].inputs["x"].name == "x:0"


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (GetModelMetadataRequest(), "INVALID_ARGUMENT", "Missing ModelSpec"),
        (
            metadata_request(),
            "INVALID_ARGUMENT",
            "GetModelMetadataRequest must specify at least one metadata_field",
        ),
        (metadata_request("f"), "INVALID_ARGUMENT", "Metadata field f is not supported"),
        (
            metadata_request("signature_def", name="x"),
            "NOT_FOUND",
            "Servable not found for request: Latest(x)",
        ),
    ],
)
def test_metadata_refusals(stub: Any, request_: Any, code: str, text: str) -> None:
    assert failure(stub.GetModelMetadata, request_) == (code, text)


def test_status_shows_the_versions(channel: grpc.Channel) -> None:
    models = Stub(channel, "ModelService")
    request = GetModelStatusRequest()
    assert failure(models.GetModelStatus, request) == ("INVALID_ARGUMENT", "Missing ModelSpec")
    request.model_spec.name = "m"
    (entry,) = models.GetModelStatus(request, timeout=TIMEOUT_S).model_version_status
    assert (entry.version, entry.state, entry.status.error_code) == (123, entry.AVAILABLE, 0)
    request.model_spec.version.value = 9
    assert failure(models.GetModelStatus, request) == ("NOT_FOUND", "Could not find version 9 of model m")
    request.model_spec.name = "x"
    request.model_spec.ClearField("version")
    assert failure(models.GetModelStatus, request) == (
        "NOT_FOUND",
        "Could not find any versions of model x",
    )


def test_reload_hands_over_the_configuration_or_says_why_not(
    server: RunningGrpc, channel: grpc.Channel
) -> None:
    models = Stub(channel, "ModelService")
    config = Parse('model_config_list { config { name: "m" base_path: "/x" } }', ModelServerConfig())
    response = models.HandleReloadConfigRequest(ReloadConfigRequest(config=config), timeout=TIMEOUT_S)
    assert response.status.error_code == 0
    assert server.models.reloaded == [config]
    assert failure(models.HandleReloadConfigRequest, ReloadConfigRequest()) == (
        "INVALID_ARGUMENT",
        (
            "ServerModelConfig type not supported by HandleReloadConfigRequest. Only ModelConfigList is currently "
            "supported"
        ),
    )
    server.models.reload_error = StatusError("INVALID_ARGUMENT", "bad")
    assert failure(models.HandleReloadConfigRequest, ReloadConfigRequest(config=config)) == (
        "INVALID_ARGUMENT",
        "bad",
    )


def test_reload_tells_by_how_much_metrics_grew_meanwhile() -> None:
    count = "/tensorflow/serving/request_count"
    request = ReloadConfigRequest(metric_names=[count, "/no/such/metric"])
    Parse('model_config_list { config { name: "m" base_path: "/x" } }', request.config)
    with running_grpc() as server, grpc.insecure_channel(server.address) as channel:
        server.models.on_reload = lambda: server.metrics.request_count("m", "OK")
        models = Stub(channel, "ModelService")
        response = models.HandleReloadConfigRequest(request, timeout=TIMEOUT_S)
    grown = {metric.name: metric.int64_value_increase for metric in response.metric}
    assert grown == {count: 1, "/no/such/metric": 0}


def health_call(channel: grpc.Channel, name: str) -> Any:
    maker = channel.unary_unary if name == "Check" else channel.unary_stream
    return maker(
        f"/grpc.health.v1.Health/{name}",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )


def test_health_tells_of_server_services_and_models() -> None:
    with running_grpc() as server, grpc.insecure_channel(server.address) as channel:
        check = health_call(channel, "Check")
        full = ("tensorflow.serving.PredictionService", "tensorflow.serving.ModelService")
        for service in ("", *full, "PredictionService", "ModelService", "m"):
            answer = check(HealthCheckRequest(service=service), timeout=TIMEOUT_S)
            assert answer.status == HealthCheckResponse.SERVING
        assert failure(check, HealthCheckRequest(service="x")) == ("NOT_FOUND", "unknown service")
        watch = health_call(channel, "Watch")
        told = watch(HealthCheckRequest(), timeout=TIMEOUT_S)
        unknown = watch(HealthCheckRequest(service="x"), timeout=TIMEOUT_S)
        assert next(told).status == HealthCheckResponse.SERVING
        assert next(unknown).status == HealthCheckResponse.SERVICE_UNKNOWN
        server.thread.call(server.announce_stop)
        assert next(told).status == HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as ended:  # a drain waits for every stream
            next(told)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        late = watch(HealthCheckRequest(), timeout=TIMEOUT_S)
        assert [next(late).status] == [HealthCheckResponse.NOT_SERVING]
        with pytest.raises(grpc.RpcError):
            next(late)
        assert check(HealthCheckRequest(), timeout=TIMEOUT_S).status == HealthCheckResponse.NOT_SERVING
        told.cancel()
        unknown.cancel()


class WatchSink:
    """A connection that takes what a Watch sends; one that is `clogged` answers the stream instead."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.clogged = False

    def send_message(self, stream: GrpcStream, message: bytes) -> None:
        if self.clogged:
            stream.finish("RESOURCE_EXHAUSTED", "too many answers wait")
        else:
            self.sent.append(message)

    def send_failure(self, *_: Any) -> None: ...


def watch_stream(health: HealthCalls, sink: WatchSink) -> GrpcStream:
    head = read_head([(":method", "POST"), (":scheme", "http"), (":path", "/w")])
    stream = GrpcStream(sink, 1, head, 1 << 20)  # type: ignore[arg-type]
    health.watch(stream)
    return stream


def test_watches_that_come_and_go_leave_no_polls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[Callable[[], None]] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda _delay, poll: polls.append(poll))
        health = HealthCalls(FakeModels(), ())
        for _ in range(200):
            stream = watch_stream(health, WatchSink())
            assert stream.on_message is not None
            stream.on_message(b"")
            stream.cancel()
        assert len(polls) == 1
        polls.pop()()
        assert polls == []
        stream = watch_stream(health, WatchSink())
        assert stream.on_message is not None
        stream.on_message(b"")
        assert len(polls) == 1

    asyncio.run(scenario())


def test_a_watch_keeps_little_and_nothing_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Models(FakeModels):
        def __init__(self) -> None:
            super().__init__()
            self.looked_up = 0

        def names(self) -> list[str]:
            self.looked_up += 1
            return list(super().names())

    def begin(sink: WatchSink, service: str = "") -> GrpcStream:
        stream = watch_stream(health, sink)
        assert stream.on_message is not None
        stream.on_message(HealthCheckRequest(service=service).SerializeToString())
        assert stream.on_message is None  # a second request of the stream is not looked at
        return stream

    polls: list[Callable[[], None]] = []
    models = Models()
    health = HealthCalls(models, ())

    async def scenario() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda _delay, poll: polls.append(poll))
        begin(WatchSink(), "ä" * 100_000)
        assert [len(service.encode()) for service, _ in health._watchers.values()] == [256]
        clogged, reading = WatchSink(), WatchSink()
        clogged.clogged = True
        assert begin(clogged) not in health._watchers  # ended by its first answer
        clogged.clogged = False
        streams = [begin(sink) for sink in (clogged, reading, reading)]
        models.looked_up = 0
        streams[2].finish("INTERNAL", "its request cannot be decompressed")
        polls.pop()()
        assert models.looked_up == 2  # once for "", once for the unknown name
        assert streams[2] not in health._watchers
        clogged.clogged = True
        health.stop()
        assert not health._watchers

    asyncio.run(scenario())


@pytest.mark.parametrize("service", REFLECTION_SERVICES)
def test_reflection_describes_every_service(channel: grpc.Channel, service: str) -> None:
    call = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
        response_deserializer=ServerReflectionResponse.FromString,
    )
    asked = [
        {"list_services": ""},
        {"file_containing_symbol": "tensorflow.serving.PredictionService"},
        {"file_by_filename": "grpc_health/v1/health.proto"},
        {"file_containing_symbol": service},
        {"file_containing_symbol": "no.Such"},
        {"all_extension_numbers_of_type": "tensorflow.serving.PredictRequest"},
        {},
    ]
    answers = list(call((ServerReflectionRequest(**one) for one in asked), timeout=TIMEOUT_S))
    listed, predict, health, own, unknown, extensions, nothing = answers
    assert [one.name for one in listed.list_services_response.service] == sorted(
        [
            "grpc.health.v1.Health",
            *REFLECTION_SERVICES,
            "tensorflow.serving.ModelService",
            "tensorflow.serving.PredictionService",
        ]
    )
    files = list(predict.file_descriptor_response.file_descriptor_proto)
    assert any(b"tensorflow/core/framework/tensor.proto" in one for one in files)
    assert b"PredictionService" in files[0]
    assert b"HealthCheckRequest" in health.file_descriptor_response.file_descriptor_proto[0]
    assert own.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == GRPC_CODES["NOT_FOUND"]
    assert extensions.all_extension_numbers_response.base_type_name == "tensorflow.serving.PredictRequest"
    assert nothing.WhichOneof("message_response") == "error_response"


def test_a_fault_of_the_server_is_internal_and_logged(
    server: RunningGrpc, stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    find, server.models.find = server.models.find, broken  # type: ignore[method-assign]
    try:
        refused = failure(stub.Predict, predict_request(x=floats(1)))
        assert refused == ("INTERNAL", "the server failed to handle the request")
    finally:
        server.models.find = find  # type: ignore[method-assign]
    assert "a bug" in caplog.text
    assert stub.Predict(predict_request(x=floats(1)), timeout=TIMEOUT_S).outputs["y"].float_val[0] == 2.5
