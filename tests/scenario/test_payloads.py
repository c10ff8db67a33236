"""Do the encoded requests hold what the scenario and the model's signature ask for, in the lengths that are asked for?"""

from __future__ import annotations

import base64
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchtune.batching.parameters import Configuration
from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.arrivals import Schedule
from batchtune.scenario.payloads import RequestSet, build_requests, draw_lengths
from batchtune.scenario.reader import format_scenario, parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.workload import DISTINCT_LENGTHS, LengthsSpec, RequestSpec
from batchtune.tune.search.contenders import Space, lies_inside
from batchtune.wire.encoding import tfrecords
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.tfserving.messages import PredictionLog, PredictRequest
from batchtune.wire.tfserving.tensors import encode_predict_request, tensor_from_proto
from tests.scenario.test_reader import SMALL, changed

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


LOGNORMAL = {"lognormal": {"median": 40, "sigma": 0.7, "max": 256}}


def drawn(count: int = 200, seed: int = 1, **spec: Any) -> list[int]:
    lengths = draw_lengths(LengthsSpec.model_validate(spec), count, np.random.default_rng(seed))
    return [int(length) for length in lengths]


def test_a_lognormal_has_its_median_and_its_longest() -> None:
    """One length of each of 200 equal shares: the quantiles are those of the distribution, for any seed."""
    for seed in range(5):
        lengths = sorted(drawn(seed=seed, **LOGNORMAL))
        assert 38 <= lengths[100] <= 42
        assert 40 * np.exp(0.7) * 0.9 <= lengths[168] <= 40 * np.exp(0.7) * 1.1  # one standard deviation up
        assert lengths[0] >= 1
        assert lengths[-1] <= 256
    assert max(drawn(lognormal={"median": 200, "sigma": 1, "max": 256})) == 256


def test_a_histogram_gives_each_length_its_weight() -> None:
    counts = Counter(drawn(100, histogram={"lengths": [8, 64, 32], "weights": [3, 1, 1]}))
    assert counts == {8: 60, 64: 20, 32: 20}


def test_recorded_lengths_come_as_often_as_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("# tokens\n5\n\n5 # again\n9\n12\n")
    assert Counter(drawn(40, file=str(tmp_path / "lengths.txt"))) == {5: 20, 9: 10, 12: 10}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5\n-1\n", r"lengths.txt:2: expected a length, a whole number above 0; was '-1'"),
        ("5.5\n", r"lengths.txt:1: expected a length"),
        ("0\n", "lengths.txt:1: expected a length"),
        ("9" * 200, "lengths.txt:1: expected a length"),
        ("# nothing\n", "lengths.txt contains no lengths"),
    ],
)
def test_a_file_of_anything_else_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(ScenarioError, match=words):
        drawn(file=str(tmp_path / "lengths.txt"))


def test_a_file_that_is_no_text_is_named_with_what_belongs_in_it(tmp_path: Path) -> None:
    (tmp_path / "lengths.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(
        ScenarioError, match=r"^request.lengths.file: .*/lengths.npy is not a text$"
    ) as caught:
        drawn(file=str(tmp_path / "lengths.npy"))
    assert caught.value.hint == "write one length a line"


def test_the_same_seed_draws_the_same_lengths_in_an_order_of_its_own() -> None:
    assert drawn(seed=3, **LOGNORMAL) == drawn(seed=3, **LOGNORMAL)
    assert drawn(seed=3, **LOGNORMAL) != drawn(seed=4, **LOGNORMAL)
    assert drawn(seed=3, **LOGNORMAL) != sorted(drawn(seed=3, **LOGNORMAL))


def test_each_request_has_one_length_in_every_open_dimension() -> None:
    called = signature(("ids", "int32", (None, None)), ("mask", "int32", (None, None, 2)))
    requests = build(request(rows=2, lengths=LOGNORMAL), called)
    assert len(requests.bodies) == DISTINCT_LENGTHS
    shapes = [(one["ids"].shape, one["mask"].shape) for one in map(arrays_in, requests.bodies)]
    assert all(ids == (2, mask[1]) and mask == (2, ids[1], 2) for ids, mask in shapes)
    assert len({ids for ids, _ in shapes}) > 50


def test_shapes_that_are_given_stay_and_zeros_have_lengths_too() -> None:
    called = signature(("ids", "int32", (None, None)), ("image", "float32", (None, None)))
    spec = request(lengths={"histogram": {"lengths": [3, 5], "weights": [1, 1]}}, shapes={"image": [7]})
    arrays = [arrays_in(body) for body in build(spec, called, distinct=4).bodies]
    assert {one["image"].shape for one in arrays} == {(1, 7)}
    assert Counter(one["ids"].shape[1] for one in arrays) == {3: 2, 5: 2}
    zeros = request(lengths=LOGNORMAL, inputs="zeros", distinct=8)
    assert len({arrays_in(body)["ids"].shape for body in build(zeros, IDS).bodies}) == 8


IDS = signature(("ids", "int32", (None, None)))


def test_a_mix_has_kinds_of_different_lengths() -> None:
    short, long = ({"histogram": {"lengths": [length], "weights": [1]}} for length in (4, 64))
    spec = request(lengths=short, mix=[{"weight": 1}, {"weight": 1, "lengths": long}], distinct=2)
    lengths = [arrays_in(body)["ids"].shape[1] for body in build(spec, IDS).bodies]
    assert lengths == [4, 4, 64, 64]


def test_a_model_of_one_length_takes_no_lengths() -> None:
    with pytest.raises(UsageError, match="no input of signature 'serving_default' has an open length"):
        build(request(lengths=LOGNORMAL), signature(("x", "float32", (None, 4))))


WITH_LENGTHS = changed(SMALL, ("load:", "request: {lengths: LENGTHS}\nload:"))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ("{}", "request.lengths: expected one of lognormal, histogram, file and constant; was none of them"),
        ("{lognormal: {median: 4, sigma: 1, max: 9}, file: x}", "request.lengths"),
        ("{lognormal: {median: 0, sigma: 1, max: 9}}", "request.lengths.lognormal.median"),
        ("{lognormal: {median: 4, sigma: 1}}", "request.lengths.lognormal.max: missing"),
        (
            "{histogram: {lengths: [4, 5], weights: [1]}}",
            "expected a weight for each of the 2 lengths; was 1",
        ),
        ("{histogram: {lengths: [0], weights: [1]}}", "request.lengths.histogram.lengths.0"),
        ("{file: nothing.txt}", "request.lengths.file: no such file"),
        ("{uniform: {low: 1}}", "request.lengths.uniform: unknown key"),
    ],
)
def test_a_mistake_is_told_with_its_key(lengths: str, words: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(WITH_LENGTHS.replace("LENGTHS", lengths))
    assert words in caught.value.message


LOGNORMAL_TEXT = "{lognormal: {median: 4, sigma: 1, max: 9}}"


def with_request(text: str, folder: Path) -> Scenario:
    """Beside recorded requests in r.npz."""
    (folder / "r.npz").touch()
    request = f"request: {text.replace('LENGTHS', LOGNORMAL_TEXT)}\nload:"
    return parse_scenario(changed(SMALL, ("load:", request)), directory=folder)


def test_a_part_of_recorded_requests_inherits_no_lengths(tmp_path: Path) -> None:
    scenario = with_request("{lengths: LENGTHS, mix: [{inputs: {file: r.npz}}, {rows: 2}]}", tmp_path)
    assert [one.lengths is None for one in scenario.request.kinds()] == [True, False]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{lengths: LENGTHS, inputs: {file: r.npz}}", "lengths"),
        ("{mix: [{inputs: zeros}, {inputs: {file: r.npz}, lengths: LENGTHS}]}", "mix.1.lengths"),
        ("{mix: [{inputs: zeros}, {lengths: LENGTHS}], inputs: {file: r.npz}}", "mix.1.lengths"),
    ],
)
def test_lengths_of_recorded_requests_are_refused_by_their_own_key(
    tmp_path: Path, text: str, key: str
) -> None:
    with pytest.raises(ScenarioError, match=f"request.{key}: recorded requests have their own lengths"):
        with_request(text, tmp_path)


def test_a_scenario_with_lengths_reads_back_as_it_was_written(tmp_path: Path) -> None:
    scenario = with_request("{lengths: LENGTHS}", tmp_path)
    assert scenario.request.distinct == DISTINCT_LENGTHS
    assert parse_scenario(format_scenario(scenario)) == scenario


SEARCHED = changed(
    SMALL, ("    max_batch_size:", "    length_buckets: [none, [32, 64], 128, auto]\n    max_batch_size:")
)


def test_buckets_are_searched_and_none_means_what_the_server_does_without() -> None:
    scenario = parse_scenario(SEARCHED)
    values = {"none": (), (32, 64): ("32,64",), 128: ("128",), "auto": ("auto",)}
    for value, flags in values.items():
        point = {"max_batch_size": 4, "length_buckets": value}
        found = scenario.configuration(point)
        assert found.flags == tuple(("length_buckets", text) for text in flags)
        assert Space(scenario).locate(found) == point
        assert lies_inside(found, scenario)
    assert not lies_inside(replace(found, flags=(("length_buckets", "7"),)), scenario)
    off = scenario.configuration({"enable_batching": False, "length_buckets": (32, 64)})
    assert off == Configuration(batching=None)


MODEL = "{model: imdb_transformer}"


FLAGGED = "{model: imdb_transformer, flags: {length_buckets: '16'}}"


FIXED = changed(SMALL, ("load:", "fixed: {length_buckets: none}\nload:"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SEARCHED.replace("[32, 64]", "[64, 32]"), "search.space.length_buckets"),
        (SEARCHED.replace("[32, 64]", "automatic"), "search.space.length_buckets"),
        (SEARCHED.replace("[32, 64]", "[]"), "search.space.length_buckets: length_buckets must be a list of"),
        (
            FIXED.replace("none", "[]"),
            "fixed.length_buckets: length_buckets must be a list of rising lengths",
        ),
        (FIXED.replace("none", "''"), "rising lengths, auto or none; is empty"),
        (SEARCHED.replace("length_buckets", "length_bucket"), "search.space.length_bucket: unknown batching"),
        (SEARCHED.replace(MODEL, "{model: m, server: local}"), "only the bundled server groups requests"),
        (SEARCHED.replace(MODEL, FLAGGED), "target.flags.length_buckets: length_buckets is searched too"),
        (FIXED.replace(MODEL, FLAGGED), "target.flags.length_buckets: length_buckets is fixed too"),
    ],
)
def test_buckets_that_no_server_would_take_are_refused_by_the_scenario(text: str, words: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text)
    assert words in caught.value.message
