"""Do the encoded requests hold what the scenario and the model's signature ask for?"""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.arrivals import Schedule
from batchtune.scenario.payloads import RequestSet, build_requests
from batchtune.scenario.spec.workload import RequestSpec
from batchtune.wire.encoding import tfrecords
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.tfserving.messages import PredictionLog, PredictRequest
from batchtune.wire.tfserving.tensors import encode_predict_request, tensor_from_proto

PREDICT = "tensorflow/serving/predict"
TOKENS = Signature(
    name="serving_default",
    method_name=PREDICT,
    inputs=(TensorSpec(name="tokens", dtype="float32", shape=(None, 200)),),
    outputs=(TensorSpec(name="scores", dtype="float32", shape=(None, 2)),),
)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64")
DTYPES += ("uint8", "uint16", "uint32", "uint64", "bool", "object")


def signature(
    *inputs: tuple[str, str, tuple[int | None, ...] | None], name: str = "serving_default"
) -> Signature:
    specs = tuple(TensorSpec(name=one, dtype=dtype, shape=shape) for one, dtype, shape in sorted(inputs))
    return Signature(name=name, method_name=PREDICT, inputs=specs, outputs=())


def request(**keys: Any) -> RequestSpec:
    return RequestSpec.model_validate(keys)


def build(spec: RequestSpec, called: Signature = TOKENS, **keys: Any) -> RequestSet:
    return build_requests(spec, called, model_name="m", **keys)


def arrays_in(body: bytes) -> dict[str, NDArray[Any]]:
    return {name: tensor_from_proto(proto) for name, proto in PredictRequest.FromString(body).inputs.items()}


def test_a_request_has_the_models_shape_and_the_asked_values() -> None:
    spec = request(rows=3, inputs={"random": {"low": 0, "high": 20000, "whole": True}}, headers={"a": "b"})
    requests = build(spec, version=7)
    assert len(requests.bodies) == len(set(requests.bodies)) == 16
    assert (requests.rows, requests.order.tolist()) == ((3,) * 16, list(range(16)))
    assert (requests.headers, requests.timeout_s) == ((("a", "b"),), 10)
    called = PredictRequest.FromString(requests.bodies[0]).model_spec
    assert (called.name, called.signature_name, called.version.value) == ("m", "serving_default", 7)
    tokens = arrays_in(requests.bodies[0])["tokens"]
    assert (tokens.shape, tokens.dtype) == ((3, 200), np.float32)
    assert np.all((tokens >= 0) & (tokens < 20000) & (tokens == np.floor(tokens)))


def test_the_same_seed_gives_the_same_bytes() -> None:
    spec = request(rows=2)
    assert build(spec, seed=4).bodies == build(spec, seed=4).bodies
    assert build(spec, seed=4).bodies != build(spec, seed=5).bodies
    assert len(build(spec, distinct=3).bodies) == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", ["random", "zeros"])
def test_every_type_can_be_drawn_and_be_zero(dtype: str, inputs: str) -> None:
    called = signature(("x", dtype, (None, 3, 2)))
    values = arrays_in(build(request(rows=2, inputs=inputs), called).bodies[0])["x"]
    assert values.shape == (2, 3, 2)
    assert values.dtype.name == dtype
    if inputs == "zeros":
        assert all(value in {0, b""} for value in values.ravel().tolist())


@pytest.mark.parametrize("protocol", ["grpc", "rest"])
def test_ranges_hold_for_single_inputs(protocol: str) -> None:
    called = signature(("ids", "int32", (None, 50)), ("mask", "int32", (None, 50)))
    spec = request(protocol=protocol, inputs={"random": {"high": 30000, "by_input": {"mask": {"high": 2}}}})
    body = build(spec, called).bodies[0]
    if protocol == "grpc":
        values = arrays_in(body)
    else:
        values = {name: np.array(value) for name, value in orjson.loads(body)["instances"][0].items()}
    assert values["ids"].max() > 100
    assert set(values["mask"].ravel().tolist()) == {0, 1}


def test_rest_bodies_are_rows_or_columns() -> None:
    called = signature(("x", "float32", (None, 2)))
    row = orjson.loads(build(request(protocol="rest", rows=2), called).bodies[0])
    assert row["signature_name"] == "serving_default"
    assert np.array(row["instances"]).shape == (2, 2)
    columns = orjson.loads(build(request(protocol="rest", rest_format="columnar"), called).bodies[0])
    assert np.array(columns["inputs"]).shape == (1, 2)


def test_open_dimensions_are_asked_for_by_name() -> None:
    called = signature(("ids", "int32", (None, None, 3)))
    with pytest.raises(UsageError) as caught:
        build(request(), called)
    assert caught.value.message == "request.shapes: the model leaves the shape of input 'ids' open: [?, ?, 3]"
    assert caught.value.hint == "add request.shapes: {ids: [200, 3]}"
    assert arrays_in(build(request(shapes={"ids": [7, 3]}), called).bodies[0])["ids"].shape == (1, 7, 3)


@pytest.mark.parametrize(
    ("shape", "shapes", "found"),
    [
        ((None,), {}, (2,)),
        (None, {"x": [4]}, (2, 4)),
        (None, {"x": []}, (2,)),
        ((), {}, ()),
        ((2, 3), {}, (2, 3)),
    ],
)
def test_shapes_follow_the_model(shape: Any, shapes: Any, found: tuple[int, ...]) -> None:
    spec = request(rows=2, shapes=shapes)
    assert arrays_in(build(spec, signature(("x", "float32", shape))).bodies[0])["x"].shape == found


@pytest.mark.parametrize(
    ("shape", "keys", "what"),
    [
        ((None, 3), {"shapes": {"x": [4]}}, r"the model has \[3\]; was \[4\]"),
        ((None, 3), {"shapes": {"x": [3, 1]}}, r"the model has \[3\]; was \[3, 1\]"),
        (None, {}, "open: any rank"),
        ((5, 3), {}, "takes exactly 5 rows; was 1"),
        ((None, 3), {"shapes": {"y": [3]}}, "has no input 'y'"),
        ((None, 3), {"inputs": {"random": {"by_input": {"y": {"low": 0}}}}}, "has no input 'y'"),
        ((None, 3), {"signature": "other"}, "'other' is not known"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(shape: Any, keys: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as raised:
        build(request(**keys), signature(("x", "float32", shape)))
    assert ("--rows 5" in (raised.value.hint or "")) == ("exactly 5 rows" in what)


def test_values_that_the_type_cannot_hold_are_refused() -> None:
    byte, wide = signature(("x", "uint8", (None,))), signature(("x", "complex64", (None,)))
    scalar = signature(("x", "float32", (None, None)), ("y", "float32", ()))
    for keys, called, said in (
        ({"inputs": {"random": {"high": 1000}}}, byte, "no uint8 of input 'x' lies from 0 to below 1000"),
        ({}, wide, "complex64"),
        ({"protocol": "rest", "shapes": {"x": [2]}}, scalar, "cannot be encoded for rest"),
    ):
        with pytest.raises(UsageError, match=said):
            build(request(**keys), called)


def test_a_mix_has_its_shares_and_rotates_its_bodies() -> None:
    kinds = [{"weight": 3, "rows": 1}, {"weight": 1, "rows": 8, "inputs": "zeros"}]
    requests = build(request(mix=kinds))
    assert requests.rows == (1,) * 16 + (8,)
    rows = np.array(requests.rows)[requests.order]
    assert np.mean(rows == 1) == 0.75
    assert sorted(set(requests.order.tolist())) == list(range(17))
    singles = requests.order[requests.order < 16]
    assert np.array_equal(singles[:32], np.tile(np.arange(16), 2))
    assert not np.array_equal(np.sort(rows), rows)


@given(weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=5))
def test_shares_of_a_mix_are_exact_to_one_in_four_thousand(weights: list[float]) -> None:
    spec = request(
        mix=[{"weight": weight, "rows": at + 1} for at, weight in enumerate(weights)], inputs="zeros"
    )
    requests = build(spec)
    for at, weight in enumerate(weights):
        assert np.mean(requests.order == at) == pytest.approx(weight / sum(weights), abs=1.01 / 4096)


def test_a_mix_may_call_several_signatures() -> None:
    other = signature(("y", "int32", (None,)), name="other")
    spec = request(mix=[{}, {"signature": "other"}])
    requests = build_requests(spec, {"serving_default": TOKENS, "other": other}, model_name="m", distinct=1)
    names = [PredictRequest.FromString(body).model_spec.signature_name for body in requests.bodies]
    assert names == ["serving_default", "other"]


def test_recorded_arrays_are_cut_into_requests(tmp_path: Path) -> None:
    tokens = np.arange(7 * 200, dtype=np.float64).reshape(7, 200)
    scores = np.arange(14, dtype=np.float32).reshape(7, 2)
    np.savez(tmp_path / "in.npz", tokens=tokens)
    np.savez(tmp_path / "out.npz", scores=scores[:6])
    spec = request(
        rows=2,
        inputs={"file": str(tmp_path / "in.npz")},
        answers={"check": "expected", "file": str(tmp_path / "out.npz")},
    )
    requests = build(spec)
    assert requests.rows == (2, 2, 2)
    assert np.array_equal(arrays_in(requests.bodies[1])["tokens"], tokens[2:4])
    assert requests.expected is not None
    assert requests.expected[2] is not None
    assert np.array_equal(requests.expected[2]["scores"], scores[4:6])


def test_recorded_rest_bodies_are_sent_as_they_are_or_as_tensors(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    called = signature(("x", "object", (None,)), ("y", "int64", (None, 2)))
    encoded = base64.b64encode(b"\xff\x00").decode()
    lines = [
        f'{{"instances": [{{"x": {{"b64": "{encoded}"}}, "y": [1, 2]}}, {{"x": "b", "y": [3, 4.0]}}]}}',
        '{"signature_name": "serving_default", "inputs": {"x": ["c"], "y": [[5, 6]]}}',
    ]
    path.write_text("\n".join(lines) + "\n\n")
    rest = build(request(protocol="rest", inputs={"file": str(path)}), called)
    assert rest.bodies == tuple(line.encode() for line in lines)
    assert rest.rows == (2, 1)
    grpc = build(request(inputs={"file": str(path)}), called)
    first = arrays_in(grpc.bodies[0])
    assert first["x"].tolist() == [b"\xff\x00", b"b"]
    assert first["y"].tolist() == [[1, 2], [3, 4]]


def test_one_input_needs_no_name_in_a_rest_body(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    path.write_text('{"instances": [1.5, 2.5]}\n{"inputs": [3.5]}\n')
    requests = build(request(inputs={"file": str(path)}), signature(("x", "float32", (None,))))
    assert [arrays_in(body)["x"].tolist() for body in requests.bodies] == [[1.5, 2.5], [3.5]]


def tfrecord(*records: bytes) -> bytes:
    return b"".join(struct.pack("<QI", len(record), 0) + record + bytes(4) for record in records)


def prediction_log(tokens: NDArray[Any], name: str = "serving_default") -> bytes:
    log = PredictionLog()
    log.predict_log.request.ParseFromString(encode_predict_request("recorded", name, {"tokens": tokens}))
    return bytes(log.SerializeToString())


def test_warm_up_requests_of_tf_serving_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "tf_serving_warmup_requests"
    tokens = np.arange(400, dtype=np.float32).reshape(2, 200)
    path.write_bytes(tfrecord(prediction_log(tokens), prediction_log(tokens[:1])))
    requests = build(request(inputs={"file": str(path)}))
    assert requests.rows == (2, 1)
    assert PredictRequest.FromString(requests.bodies[0]).model_spec.name == "m"
    assert np.array_equal(arrays_in(requests.bodies[0])["tokens"], tokens)
    rest = build(request(protocol="rest", inputs={"file": str(path)}))
    assert np.array_equal(orjson.loads(rest.bodies[0])["instances"], tokens)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_records_come_out_as_they_went_in(records: list[bytes]) -> None:
    assert list(tfrecords(tfrecord(*records))) == records


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "no request in it"),
        (b"some text", "no TFRecords: the file ends within record 1"),
        (tfrecord(b"", b"abc")[:-1], "the file ends within record 2"),
        (tfrecord(b"\xff\xff"), "record 1: no PredictionLog"),
        (tfrecord(b""), "record 1: an empty log"),
        (tfrecord(prediction_log(np.zeros((1, 200), np.float32), "x")), "recorded for signature 'x'"),
    ],
)
def test_broken_warm_up_files_are_named_with_the_record(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "warmup"
    path.write_bytes(content)
    with pytest.raises(ScenarioError, match=what):
        build(request(inputs={"file": str(path)}))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a predict body"),
        ('{"instances": [[1]], "inputs": [[1]]}', "expected a predict body"),
        ('{"instances": []}', "instances must be a list with at least one row"),
        ('{"instances": [[1, 2], [3]]}', "tokens: rows of different shapes"),
        ('{"instances": [["a"]]}', "tokens: expected numbers of one shape"),
        ('{"instances": [[1, 2]]}', r"input 'tokens' has shape \[1, 2\]; the model takes \[\?, 200\]"),
        ('{"instances": [{"tokens": [1]}, {"token": [1]}]}', "the instances do not name the same inputs"),
        ('{"inputs": {"token": [[1]]}}', "signature 'serving_default' has no input 'token'"),
        ('{"inputs": {}}', "input 'tokens' is missing"),
        ('{"signature_name": "x", "inputs": [[1]]}', "recorded for signature 'x'"),
    ],
)
def test_broken_bodies_are_named_with_their_line(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises((ScenarioError, UsageError), match=rf"b\.jsonl:2: {what}"):
        build(request(inputs={"file": str(path)}))


def test_broken_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    spec = request(inputs={"file": str(path)})
    two = signature(("x", "int32", (None,)), ("y", "int32", (None,)))
    whole = np.arange(2)
    for arrays, rows, what in (
        ({"x": np.arange(3), "y": whole}, 1, "different numbers of rows"),
        ({"x": np.array([0.5]), "y": whole[:1]}, 1, "input 'x' is float64; the model takes int32"),
        ({"x": np.array([np.nan]), "y": whole[:1]}, 1, "input 'x' is float64"),
        ({"x": whole, "y": whole}, 3, "2 rows; one request takes 3"),
    ):
        np.savez(path, **arrays)
        with pytest.raises((ScenarioError, UsageError), match=what):
            build(spec.model_copy(update={"rows": rows}), two)
    path.write_bytes(b"no archive")
    with pytest.raises(ScenarioError, match=r"cannot be read as \.npz"):
        build(spec, two)


def test_expected_answers_must_be_as_many_as_the_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", tokens=np.zeros((4, 200), np.float32))
    np.savez(tmp_path / "out.npz", scores=np.zeros((3, 2), np.float32))
    spec = request(
        inputs={"file": str(tmp_path / "in.npz")},
        answers={"check": "expected", "file": str(tmp_path / "out.npz")},
    )
    with pytest.raises(UsageError, match=r"output 'scores' has shape \(3, 2\); the requests have 4 rows"):
        build(spec)


def schedule(count: int, **columns: Any) -> Schedule:
    return Schedule(due_ns=np.arange(count), duration_s=1.0, offered_rps=float(count), **columns)


def assign(schedule: Schedule, requests: RequestSet) -> Schedule:
    return schedule.with_bodies(requests.order, requests.rows)


def test_requests_are_assigned_in_rotation_by_index_or_by_rows() -> None:
    requests = build(request(mix=[{"rows": 1}, {"rows": 4}]), distinct=2)
    for asked, sent in (
        (schedule(5000), np.resize(requests.order, 5000).tolist()),
        (schedule(3, request_index=np.array([0, 3, 5], np.int32)), [0, 3, 1]),
        (schedule(5, trace_rows=np.array([4, 1, 4, 4, 1], np.int32)), [2, 0, 3, 2, 1]),
    ):
        assigned = assign(asked, requests)
        assert np.array(assigned.request_index).tolist() == sent
        assert np.array(assigned.slice(1, 3).request_index).tolist() == sent[1::3]
    with pytest.raises(UsageError, match="asks for requests of 9 rows; there are some of 1, 4"):
        assign(schedule(1, trace_rows=np.array([9], np.int32)), requests)


def test_a_request_that_no_message_holds_is_refused_before_it_is_made() -> None:
    with pytest.raises(UsageError, match=r"request\.rows: 100,000,000 rows of this model are 74\.5 GiB"):
        build_requests(RequestSpec(rows=100_000_000), TOKENS, model_name="m")


def test_requests_that_do_not_fit_in_memory_are_refused_before_they_are_made() -> None:
    with pytest.raises(UsageError, match=r"request\.distinct: 1000000 requests of"):
        build_requests(RequestSpec(rows=1_000_000), TOKENS, model_name="m", distinct=1_000_000)
