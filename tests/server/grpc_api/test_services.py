"""Do grpcio's clients get what tensorflow_model_server would answer?"""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.text_format import Parse
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from batchtune.server.grpc_api.services import REFLECTION_SERVICES, HealthCalls
from batchtune.wire.grpc.server_call import GrpcStream, read_head
from batchtune.wire.status import GRPC_CODES, StatusError
from batchtune.wire.tfserving.messages import POOL, PredictRequest, SignatureDefMap, TensorProto
from batchtune.wire.tfserving.tensors import encode_predict_request, tensor_from_proto
from tests.server.hostile_attacks import PREDICT, connect_grpc, data, head
from tests.server.server_fakes import (
    HALF_PLUS_TWO,
    FakeModels,
    FakeServable,
    RecordedCall,
    RunningGrpc,
    half_plus_two,
    running_grpc,
    signature,
    spec,
)
from tests.waiting import wait_until
from tests.wire.stubs import Stub
from tests.wire.tensor_protos import tensor_to_proto

TIMEOUT_S = 20.0
EXAMPLES = [spec("inputs", "object")]
LABELS, SCORES = spec("classes", "object", 2), spec("scores", "float32", 2)


def total(inputs: dict[str, Any]) -> dict[str, Any]:
    texts = [str(one).encode() for one in inputs["b"].tolist()]
    return {"sum": (inputs["a"] + inputs["b"]).astype(np.float32), "text": np.array(texts, object)}


def score(inputs: dict[str, Any]) -> dict[str, Any]:
    sizes = [len(one) for one in inputs["inputs"].tolist()]
    return {
        "scores": np.array([[size, size + 0.5] for size in sizes], np.float32),
        "classes": np.array([[b"short", b"long"]] * len(sizes), object),
        "outputs": np.array(sizes, np.float32),
    }


MODEL = {
    "serving_default": (HALF_PLUS_TWO, half_plus_two),
    "many": (
        signature("many", [spec("a"), spec("b", "int64")], [spec("sum"), spec("text", "object")]),
        total,
    ),
    "labels": (signature("labels", EXAMPLES, [LABELS, SCORES]), score),
    "scores": (signature("scores", EXAMPLES, [SCORES], "classify"), score),
    "size": (signature("size", EXAMPLES, [spec("outputs")], "regress"), score),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningGrpc]:
    with running_grpc(FakeServable(MODEL), enable_grpc_reflection=True) as running:
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


@contextmanager
def calling(servable: FakeServable, **flags: Any) -> Iterator[Any]:
    """Predictions of a server of its own."""
    with running_grpc(servable, **flags) as server, grpc.insecure_channel(server.address) as channel:
        yield Stub(channel, "PredictionService")


def predict_request(signature_name: str = "", **inputs: Any) -> PredictRequest:
    return PredictRequest.FromString(encode_predict_request("m", signature_name, inputs))


def request_of(method: str, text: str) -> Any:
    """A message to a service of TensorFlow Serving; `text` as protobuf writes it."""
    service, _, name = method.partition("/")
    described = POOL.FindServiceByName(f"tensorflow.serving.{service}").methods_by_name[name]
    return Parse(text, GetMessageClass(described.input_type)())


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def predict(stub: Any, *values: float) -> list[float]:
    return list(stub.Predict(predict_request(x=floats(*values)), timeout=TIMEOUT_S).outputs["y"].float_val)


def failure(call: Callable[..., Any], request: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=TIMEOUT_S)
    return caught.value.code().name, caught.value.details()


@pytest.mark.parametrize("as_content", [False, True])
def test_predict_answers_typed_values_and_the_version(stub: Any, as_content: bool) -> None:
    for count in range(1, 6):  # the first messages of a length teach the templates that the later ones use
        for shift in (0.0, 7.0):
            values = np.arange(count, dtype=np.float32) + np.float32(shift)
            message = encode_predict_request("m", "", {"x": values}, as_content=as_content)
            response = stub.Predict(PredictRequest.FromString(message), timeout=TIMEOUT_S)
            tensor = TensorProto(dtype="DT_FLOAT", float_val=values / 2 + 2)
            tensor.tensor_shape.dim.add(size=count)
            assert response.outputs["y"] == tensor
            assert str(response.model_spec).split() == (
                ["name:", '"m"', "version", "{", "value:", "123", "}", "signature_name:", '"serving_default"']
            )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (b"\x2d\x00\x00\x80\x3f" + b"\x2d\x00\x00\x40\x40", [2.5, 3.5, 3.5]),
        (b"\x2a\x08\x00\x00\x80\x3f\x00\x00\x40\x40", [2.5, 3.5, 3.5]),
        (b"\x2d\x00\x00\xa0\x40", [4.5] * 3),
        (b"", [2.0] * 3),
    ],
    ids=["not packed", "packed", "one", "none"],
)
def test_the_last_value_is_repeated(channel: grpc.Channel, values: bytes, expected: list[float]) -> None:
    tensor = b"\x08\x01\x12\x04\x12\x02\x08\x03" + values
    entry = b"\x0a\x01x\x12" + bytes([len(tensor)]) + tensor
    call = channel.unary_unary(PREDICT)
    for _ in range(3):
        answer = call(b"\x0a\x03\x0a\x01m\x12" + bytes([len(entry)]) + entry, timeout=TIMEOUT_S)
        assert np.array(expected, np.float32).tobytes() in answer


@pytest.mark.parametrize(
    "chosen", ["version { value: 123 }", 'version_label: "stable"', 'signature_name: "serving_default"']
)
def test_versions_labels_and_signatures_are_chosen(stub: Any, server: RunningGrpc, chosen: str) -> None:
    request = predict_request(x=floats(1))
    Parse(chosen, request.model_spec)
    response = stub.Predict(request, timeout=TIMEOUT_S)
    assert response.model_spec.version.value == 123
    assert list(response.outputs["y"].float_val) == [2.5]
    assert [asked[0] for asked in server.models.servable.asked] == ["serving_default"]


def test_refused_requests_leave_nothing_behind(server: RunningGrpc) -> None:
    """The same refusal, again and again: neither the request nor its frames are kept by what refuses it."""
    alive: list[weakref.ref[Any]] = []
    message = encode_predict_request("m", "", {"x": np.zeros(16, np.float32)}, output_filter=("z",))

    def refuse() -> str:
        call = RecordedCall(PREDICT, message)
        server.dispatch(call)
        alive.append(weakref.ref(call))
        return str(call.answers[0][0])

    assert {server.thread.call(refuse) for _ in range(20)} == {"INVALID_ARGUMENT"}
    gc.collect()
    assert [one for one in alive if one() is not None] == []


def test_an_output_filter_selects_and_orders_nothing_else(stub: Any, server: RunningGrpc) -> None:
    for numbers in ([1, 2], [3, 4], [5, 6]):
        request = predict_request("many", a=floats(0.5, 1.5), b=np.array(numbers))
        response = stub.Predict(request, timeout=TIMEOUT_S)
        assert sorted(response.outputs) == ["sum", "text"]
        assert list(response.outputs["text"].string_val) == [str(one).encode() for one in numbers]
        request.output_filter.append("sum")
        filtered = stub.Predict(request, timeout=TIMEOUT_S)
        assert list(filtered.outputs) == ["sum"]
        assert list(filtered.outputs["sum"].float_val) == [0.5 + numbers[0], 1.5 + numbers[1]]
    assert server.models.servable.asked[-1][2] == ("sum",)


OUTPUT_VALUES: dict[str, list[Any]] = {
    **{dtype: [1.5, -2.5] for dtype in ("float32", "float64", "float16")},
    **{f"int{bits}": [-1, 2] for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": [1, 2**bits - 1] for bits in (8, 16, 32, 64)},
    **{dtype: [1 + 2j, 3] for dtype in ("complex64", "complex128")},
    "bool": [True, False],
    "object": [b"a", b"\xff"],
}


@pytest.mark.parametrize("as_content", [False, True])
def test_outputs_of_every_type_and_no_rows_at_all_arrive(as_content: bool) -> None:
    outputs = {dtype: np.array(values, dtype) for dtype, values in OUTPUT_VALUES.items()}
    every = signature("serving_default", [spec("x")], [spec(dtype, dtype) for dtype in outputs])
    run = {"serving_default": (every, lambda inputs: {k: v[: len(inputs["x"])] for k, v in outputs.items()})}
    with calling(FakeServable(run), enable_serialization_as_tensor_content=as_content) as stub:
        for rows in (2, 2, 1, 0, 0):
            response = stub.Predict(predict_request(x=np.zeros(rows, np.float32)), timeout=TIMEOUT_S)
            for dtype, values in outputs.items():
                proto = response.outputs[dtype]
                assert tensor_from_proto(proto).tolist() == values[:rows].tolist()
                assert bool(proto.tensor_content) is (as_content and rows > 0 and dtype != "object")


X = 'inputs { key: "x" value { dtype: DT_FLOAT float_val: 1 } }'
Z = X.replace('"x"', '"z"')
EXAMPLE = "input { example_list { examples {} } }"
TASK = 'tasks { model_spec { name: "%s" signature_name: "%s" } method_name: "tensorflow/serving/%s" }'
SIZE = TASK % ("m", "size", "regress")
MISMATCH = "INVALID_ARGUMENT: input size does not match signature:"


def named(name: str, more: str = "", rest: str = "") -> str:
    return f'model_spec {{ name: "{name}" {more} }} {rest}'


REFUSALS = {
    "PredictionService/Predict": {
        "": "INVALID_ARGUMENT: Missing ModelSpec",
        named("m", "version { value: 9 }", X): "NOT_FOUND: Servable not found for request: Specific(m, 9)",
        named("m", 'version_label: "l"', X): "INVALID_ARGUMENT: Unrecognized servable version label: l",
        named("m", 'signature_name: "s"', X): 'FAILED_PRECONDITION: Serving signature key "s" not found.',
        named("m", "", X + Z): (
            f"{MISMATCH} 2!=1 len({{x,z}}) != len({{x}}). Sent extra: {{z}}. Missing but required: {{}}."
        ),
        named(
            "m"
        ): f"{MISMATCH} 0!=1 len({{}}) != len({{x}}). Sent extra: {{}}. Missing but required: {{x}}.",
        named("m", "", Z): (
            "INVALID_ARGUMENT: Signature input alias: x(feed name: x:0) not found in request and no default value "
            "provided. Inputs expected to be in the request {z}, or default input alias set: "
        ),
        named("m", "", X + 'output_filter: "no"'): (
            "INVALID_ARGUMENT: output tensor alias not found in signature: no Outputs expected to be in the set {y}."
        ),
        named("m", "", X + 'output_filter: ["y", "y"]'): "INVALID_ARGUMENT: duplicate output tensor alias: y",
        named("m", "", X.replace("float_val: 1", 'tensor_content: "123"')): (
            "INVALID_ARGUMENT: tensor parsing error: x"
        ),
        named("m", "", 'inputs { key: "x" value {} }'): "INVALID_ARGUMENT: tensor parsing error: x",
    },
    "PredictionService/Classify": {
        "": "INVALID_ARGUMENT: Missing ModelSpec",
        named("m", 'signature_name: "scores"'): "INVALID_ARGUMENT: Input is empty.",
        named("m", 'signature_name: "no"', EXAMPLE): (
            "INVALID_ARGUMENT: No signature was found with the name: no"
        ),
    },
    "PredictionService/Regress": {
        "": "INVALID_ARGUMENT: Missing ModelSpec",
        named("m", 'signature_name: "labels"', EXAMPLE): "INVALID_ARGUMENT: Expected one output Tensor.",
    },
    "PredictionService/MultiInference": {
        EXAMPLE: "INVALID_ARGUMENT: ModelSpec has no name specified.",
        SIZE + TASK % ("", "scores", "classify") + EXAMPLE: (
            "INVALID_ARGUMENT: Found ModelSpec with an empty model name."
        ),
        SIZE + TASK % ("n", "scores", "classify") + EXAMPLE: (
            "INVALID_ARGUMENT: All ModelSpecs in a MultiInferenceRequest must access the same model name."
        ),
        SIZE + SIZE + EXAMPLE: "INVALID_ARGUMENT: Duplicate evaluation of signature: size",
        TASK % ("m", "no", "regress") + EXAMPLE: (
            "INVALID_ARGUMENT: Requested signature not found in model graph: no"
        ),
        TASK % ("m", "size", "predict") + EXAMPLE: (
            "UNIMPLEMENTED: Unsupported signature method_name: tensorflow/serving/predict"
        ),
    },
    "PredictionService/GetModelMetadata": {
        "": "INVALID_ARGUMENT: Missing ModelSpec",
        named("m"): "INVALID_ARGUMENT: GetModelMetadataRequest must specify at least one metadata_field",
        named("m", "", 'metadata_field: "f"'): "INVALID_ARGUMENT: Metadata field f is not supported",
        named("x", "", 'metadata_field: "signature_def"'): (
            "NOT_FOUND: Servable not found for request: Latest(x)"
        ),
    },
    "ModelService/GetModelStatus": {
        "": "INVALID_ARGUMENT: Missing ModelSpec",
        named("m", "version { value: 9 }"): "NOT_FOUND: Could not find version 9 of model m",
    },
    "ModelService/HandleReloadConfigRequest": {
        "": (
            "INVALID_ARGUMENT: ServerModelConfig type not supported by HandleReloadConfigRequest. Only ModelConfigList "
            "is currently supported"
        ),
    },
}


@pytest.mark.parametrize(
    ("method", "text", "said"), [(key, *row) for key, rows in REFUSALS.items() for row in rows.items()]
)
def test_refusals_are_the_references(channel: grpc.Channel, method: str, text: str, said: str) -> None:
    service, _, name = method.partition("/")
    for _ in range(3):
        refused = failure(getattr(Stub(channel, service), name), request_of(method, text))
        assert ": ".join(refused) == said


def test_signature_defaults_fill_in_for_missing_inputs() -> None:
    servable = FakeServable(MODEL)
    definitions = SignatureDefMap.FromString(servable.metadata)
    default = tensor_to_proto(np.array([40, 50]), as_content=True)
    definitions.signature_def["many"].defaults["b"].CopyFrom(default)
    servable.metadata = definitions.SerializeToString()
    with calling(servable) as stub:
        for _ in range(3):
            response = stub.Predict(predict_request("many", a=floats(1, 2)), timeout=TIMEOUT_S)
            assert list(response.outputs["sum"].float_val) == [41, 52]
        assert failure(stub.Predict, predict_request("many", a=floats(1), z=floats(1))) == (
            "INVALID_ARGUMENT",
            "Inputs contains invalid name. Used request inputs: a, request input: a,z",
        )
        code, text = failure(stub.Predict, predict_request("many", b=np.array([1])))
        assert code == "INVALID_ARGUMENT"
        assert text.endswith("Inputs expected to be in the request {b}, or default input alias set: b")


@pytest.mark.parametrize(
    ("method", "code", "said"),
    [
        ("PredictionService/Predict", "INTERNAL", "Failed to parse the "),
        ("PredictionService/Classify", "INTERNAL", "Failed to parse the "),
        ("ModelService/GetModelStatus", "INTERNAL", "Failed to parse the "),
        (
            "SessionService/SessionRun",
            "UNIMPLEMENTED",
            "unknown method /tensorflow.serving.SessionService/Ses",
        ),
    ],
)
def test_what_is_no_request_is_refused(channel: grpc.Channel, method: str, code: str, said: str) -> None:
    refused, text = failure(channel.unary_unary(f"/tensorflow.serving.{method}"), b"\xff\xff\xff")
    assert refused == code
    assert text.startswith(said)


@pytest.mark.parametrize("code", sorted(set(GRPC_CODES) - {"OK"}))
def test_every_status_of_the_model_reaches_the_client(server: RunningGrpc, stub: Any, code: str) -> None:
    server.models.servable.error = StatusError(code, "because é")
    assert failure(stub.Predict, predict_request(x=floats(1))) == (code, "because é")


@pytest.mark.parametrize(("size", "told"), [(1024, "x" * 1024), (1025, "x" * 1024 + "...TRUNCATED")])
def test_long_messages_are_cut(server: RunningGrpc, stub: Any, size: int, told: str) -> None:
    server.models.servable.error = StatusError("INTERNAL", "x" * size)
    assert failure(stub.Predict, predict_request(x=floats(1))) == ("INTERNAL", told)


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
    assert predict(stub, 1) == [2.5]


def test_the_server_itself_ends_a_call_at_its_deadline(server: RunningGrpc) -> None:
    """A client that sends grpc-timeout but does not watch it."""
    server.models.servable.hold = True
    message = encode_predict_request("m", "", {"x": floats(1)})
    with connect_grpc(server.port) as client:
        client.sendall(head(1, PREDICT, ("grpc-timeout", "30m")) + data(1, message))
        received = b""
        while b"Timed out waiting for notification" not in received:
            received += client.recv(65536)


def test_a_cancelled_call_is_dropped_and_its_late_answer_too(server: RunningGrpc, stub: Any) -> None:
    server.models.servable.hold = True
    pending = stub.Predict.future(predict_request(x=floats(1)), timeout=TIMEOUT_S)
    wait_until(lambda: server.models.servable.held)
    pending.cancel()
    server.models.servable.hold = False
    assert predict(stub, 1) == [2.5]
    server.thread.call(server.models.servable.release)
    assert predict(stub, 3) == [3.5]


def test_a_replaced_version_is_noticed(
    server: RunningGrpc, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = predict_request(x=floats(1))
    for version in (123, 123, 123, 124, 124):
        if version == 124:
            monkeypatch.setattr(server.models, "servable", FakeServable(version=124))
        assert stub.Predict(request, timeout=TIMEOUT_S).model_spec.version.value == version


async def test_aio_stubs_get_the_same_answers_also_large_ones(server: RunningGrpc) -> None:
    values = [np.arange(size, dtype=np.float32) for size in (*range(50), 1 << 20)]
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        aio = Stub(channel, "PredictionService")
        calls = [aio.Predict(predict_request(x=each), timeout=TIMEOUT_S) for each in values]
        for each, response in zip(values, await asyncio.gather(*calls), strict=True):
            np.testing.assert_array_equal(tensor_from_proto(response.outputs["y"]), each / 2 + 2)


def test_requests_are_counted_by_status(stub: Any, server: RunningGrpc) -> None:
    predict(stub, 1)
    server.models.servable.error = StatusError("UNAVAILABLE", "full")
    failure(stub.Predict, predict_request(x=floats(1)))
    text = server.metrics.render()
    assert ':tensorflow:serving:request_count{model_name="m",status="OK"}' in text
    assert ':tensorflow:serving:request_count{model_name="m",status="UNAVAILABLE"}' in text
    assert 'request_latency_count{model_name="m",API="Predict",entrypoint="GRPC"}' in text


def examples_of(method: str, signature_name: str, *texts: str) -> Any:
    request = request_of(f"PredictionService/{method}", named("m", f'signature_name: "{signature_name}"'))
    for text in texts:
        example = request.input.example_list.examples.add()
        example.features.feature["t"].bytes_list.value.append(text.encode())
    return request


@pytest.mark.parametrize(("name", "labels"), [("labels", ("short", "long")), ("scores", ("", ""))])
def test_classify_gives_labels_and_scores(stub: Any, name: str, labels: tuple[str, str]) -> None:
    request = examples_of("Classify", name, "a", "bcd")
    sizes = [len(one.SerializeToString()) for one in request.input.example_list.examples]
    response = stub.Classify(request, timeout=TIMEOUT_S)
    rows = [[(one.label, one.score) for one in entry.classes] for entry in response.result.classifications]
    assert rows == [[(labels[0], size), (labels[1], size + 0.5)] for size in sizes]
    assert response.model_spec.signature_name == name


def test_regress_gives_values_and_a_context_is_merged_into_examples(stub: Any) -> None:
    request = examples_of("Regress", "size", "a")
    alone = stub.Regress(request, timeout=TIMEOUT_S).result.regressions[0].value
    (example,) = request.input.example_list.examples
    request.input.example_list_with_context.examples.append(example)
    request.input.example_list_with_context.context.CopyFrom(example)
    response = stub.Regress(request, timeout=TIMEOUT_S)
    assert response.result.regressions[0].value == 2 * alone
    assert response.model_spec.version.value == 123


@pytest.mark.parametrize(("method", "kind"), [("Classify", "classification"), ("Regress", "regression")])
def test_a_signature_of_another_kind_is_shown(stub: Any, method: str, kind: str) -> None:
    request = request_of(f"PredictionService/{method}", named("m", "", EXAMPLE))  # of serving_default
    code, text = failure(getattr(stub, method), request)
    assert code == "INVALID_ARGUMENT"
    assert text.startswith(f"No {kind} inputs found in SignatureDef: inputs {{")


def test_multi_inference_answers_all_tasks_in_order(stub: Any) -> None:
    request = request_of(
        "PredictionService/MultiInference", SIZE + TASK % ("m", "scores", "classify") + EXAMPLE
    )
    request.input.example_list.examples[0].features.feature["t"].int64_list.value.append(1)
    size = len(request.input.example_list.examples[0].SerializeToString())
    regression, classification = stub.MultiInference(request, timeout=TIMEOUT_S).results
    assert regression.regression_result.regressions[0].value == size
    assert classification.classification_result.classifications[0].classes[1].score == size + 0.5
    names = [one.model_spec.signature_name for one in (regression, classification)]
    assert names == ["size", "scores"]


def test_method_names_are_checked_when_the_flag_asks_for_it() -> None:
    with calling(FakeServable(MODEL), enable_signature_method_name_check=True) as strict:
        said = "Expected classification signature method_name to be tensorflow/serving/classify. Was: "
        refused = failure(strict.Classify, examples_of("Classify", "labels", "a"))
        assert refused == ("INVALID_ARGUMENT", f"{said}tensorflow/serving/predict")
        request = examples_of("Classify", "scores", "a")
        assert strict.Classify(request, timeout=TIMEOUT_S).result.classifications


def test_metadata_holds_the_signatures(stub: Any) -> None:
    request = request_of(
        "PredictionService/GetModelMetadata", named("m", "", 'metadata_field: "signature_def"')
    )
    response = stub.GetModelMetadata(request, timeout=TIMEOUT_S)
    assert (response.model_spec.name, response.model_spec.version.value) == ("m", 123)
    definitions = SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(definitions)
    assert definitions.signature_def["serving_default"].inputs["x"].name == "x:0"


def test_status_shows_the_versions(channel: grpc.Channel) -> None:
    request = request_of("ModelService/GetModelStatus", named("m"))
    status = Stub(channel, "ModelService").GetModelStatus(request, timeout=TIMEOUT_S)
    (entry,) = status.model_version_status
    assert (entry.version, entry.state, entry.status.error_code) == (123, entry.AVAILABLE, 0)


def test_reload_hands_over_the_configuration_or_says_why_not() -> None:
    count = "/tensorflow/serving/request_count"
    config = 'model_config_list { config { name: "m" base_path: "/x" } }'
    text = f'config {{ {config} }} metric_names: "{count}" metric_names: "/no/such/metric"'
    request = request_of("ModelService/HandleReloadConfigRequest", text)
    with running_grpc() as server, grpc.insecure_channel(server.address) as channel:
        server.models.on_reload = lambda: server.metrics.request_count("m", "OK")
        reload = Stub(channel, "ModelService").HandleReloadConfigRequest
        response = reload(request, timeout=TIMEOUT_S)
        assert response.status.error_code == 0
        assert server.models.reloaded == [request.config]
        grown = {metric.name: metric.int64_value_increase for metric in response.metric}
        assert grown == {count: 1, "/no/such/metric": 0}
        server.models.reload_error = StatusError("INVALID_ARGUMENT", "bad")
        assert failure(reload, request) == ("INVALID_ARGUMENT", "bad")


def test_health_tells_of_server_services_and_models() -> None:
    def health_call(maker: Any, name: str) -> Any:
        request, answer = HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        return maker(
            f"/grpc.health.v1.Health/{name}", request_serializer=request, response_deserializer=answer
        )

    def status(service: str = "") -> int:
        return int(check(HealthCheckRequest(service=service), timeout=TIMEOUT_S).status)

    def watched(service: str = "") -> Any:
        return watch(HealthCheckRequest(service=service), timeout=TIMEOUT_S)

    with running_grpc() as server, grpc.insecure_channel(server.address) as channel:
        check = health_call(channel.unary_unary, "Check")
        watch = health_call(channel.unary_stream, "Watch")
        full = ("tensorflow.serving.PredictionService", "tensorflow.serving.ModelService")
        for service in ("", *full, "PredictionService", "ModelService", "m"):
            assert status(service) == HealthCheckResponse.SERVING
        assert failure(check, HealthCheckRequest(service="x")) == ("NOT_FOUND", "unknown service")
        told, unknown = watched(), watched("x")
        assert next(told).status == HealthCheckResponse.SERVING
        assert next(unknown).status == HealthCheckResponse.SERVICE_UNKNOWN
        server.thread.call(server.announce_stop)
        for watching in (told, watched()):
            assert next(watching).status == HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as ended:  # a drain waits for every stream
                next(watching)
            assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert status() == HealthCheckResponse.NOT_SERVING
        unknown.cancel()


class WatchSink:
    """A connection that takes what a Watch sends; one that is `clogged` answers the stream instead."""

    clogged = False

    def send_message(self, stream: GrpcStream, _message: bytes) -> None:
        if self.clogged:
            stream.finish("RESOURCE_EXHAUSTED", "too many answers wait")

    def send_failure(self, *_: Any) -> None: ...


def watch_stream(health: HealthCalls, service: str = "", sink: WatchSink | None = None) -> GrpcStream:
    """A Watch that has been asked."""
    request_head = read_head([(":method", "POST"), (":scheme", "http"), (":path", "/w")])
    stream = GrpcStream(sink or WatchSink(), 1, request_head, 1 << 20)  # type: ignore[arg-type]
    health.watch(stream)
    assert stream.on_message is not None
    stream.on_message(HealthCheckRequest(service=service).SerializeToString())
    return stream


async def test_watches_that_come_and_go_leave_no_polls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[Callable[[], None]] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda _delay, poll: polls.append(poll))
    health = HealthCalls(FakeModels(), ())
    for _ in range(200):
        watch_stream(health).cancel()
    assert len(polls) == 1
    polls.pop()()
    assert polls == []
    watch_stream(health)
    assert len(polls) == 1


async def test_a_watch_keeps_little_and_nothing_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[Callable[[], None]] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda _delay, poll: polls.append(poll))
    models, looked_up = FakeModels(), []
    monkeypatch.setattr(models, "names", lambda: looked_up.append(1) or ("m",))
    health = HealthCalls(models, ())
    unknown = watch_stream(health, "ä" * 100_000)
    assert unknown.on_message is None  # a second request of the stream is not looked at
    assert [len(service.encode()) for service, _ in health._watchers.values()] == [256]
    clogged = WatchSink()
    clogged.clogged = True
    assert watch_stream(health, sink=clogged) not in health._watchers  # ended by its first answer
    clogged.clogged = False
    streams = [watch_stream(health, sink=sink) for sink in (clogged, None, None)]
    looked_up.clear()
    streams[2].finish("INTERNAL", "its request cannot be decompressed")
    polls.pop()()
    assert len(looked_up) == 2  # once for "", once for the unknown name
    assert streams[2] not in health._watchers
    clogged.clogged = True
    health.stop()
    assert not health._watchers


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
    ours = {
        "tensorflow.serving.ModelService",
        "tensorflow.serving.PredictionService",
        "grpc.health.v1.Health",
    }
    assert [one.name for one in listed.list_services_response.service] == sorted(
        {*ours, *REFLECTION_SERVICES}
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
    server: RunningGrpc, stub: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(server.models, "find", broken)
        refused = failure(stub.Predict, predict_request(x=floats(1)))
    assert refused == ("INTERNAL", "the server failed to handle the request")
    assert "a bug" in caplog.text
    assert predict(stub, 1) == [2.5]
