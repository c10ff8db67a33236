"""Readiness, signatures and counts are read from the server's own words, and what its failures mean is told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import TargetError, UsageError
from batchtune.target.address import answering_at
from batchtune.target.endpoint import (
    Endpoint,
    control_channel,
    external_endpoint,
    meaning_of,
    read_signature,
    wait_until_ready,
)
from batchtune.target.external import ExternalTarget, external_signature, read_parameters
from batchtune.target.telemetry import activity
from batchtune.wire.kserve_infer import signature_from_metadata
from tests.server.server_process import free_ports
from tests.target.kserve_server import METADATA, Answer, KserveServer, statistics

pytestmark = pytest.mark.smoke


# Shapes and spelling as in TensorFlow Serving's saved_model_half_plus_two_2_versions_metadata.json.
def tensor(dtype: str, *sizes: str) -> dict[str, object]:
    shape = {"dim": [{"size": size, "name": ""} for size in sizes], "unknown_rank": not sizes}
    return {"dtype": dtype, "tensor_shape": shape, "name": "x:0"}


SIGNATURE = {
    "inputs": {"x": tensor("DT_FLOAT", "-1", "200"), "any": tensor("DT_STRING")},
    "outputs": {},
    "method_name": "tensorflow/serving/predict",
    "defaults": {},
}


TF_METADATA = {
    "model_spec": {"name": "m", "signature_name": "", "version": "1"},
    "metadata": {"signature_def": {"signature_def": {"serving_default": SIGNATURE}}},
}


class Fake(KserveServer):
    """A server that gives its answers one after the other, whatever is asked, and the last for ever."""

    answers: list[Answer]

    def page(self, path: str) -> Answer:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(model_name="m", rest_port=self.rest_port)


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as running:
        yield running


def version(state: str, error: str = "") -> dict[str, object]:
    status = {"error_code": "UNKNOWN" if error else "OK", "error_message": error}
    return {"model_version_status": [{"version": "1", "state": state, "status": status}]}


def test_waiting_ends_when_a_version_is_available(fake: Fake) -> None:
    fake.answers = [(404, {"error": "not yet"}), (200, version("LOADING")), (200, version("AVAILABLE"))]
    wait_until_ready(fake.endpoint, limit_s=10)


def test_a_model_that_failed_to_load_is_told_at_once(fake: Fake) -> None:
    fake.answers = [(200, version("END", "no saved_model.pb"))]
    with pytest.raises(TargetError, match=r"no saved_model\.pb"):
        wait_until_ready(fake.endpoint, limit_s=10)


def test_a_server_that_never_gets_ready_is_given_up_with_its_last_answer(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(
        "batchtune.target.endpoint.time",
        SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda _s: now_s.append(now_s.pop() + 25.0)),
    )
    fake.answers = [(503, b"starting")]
    with pytest.raises(TargetError, match="503: starting"):
        wait_until_ready(fake.endpoint, limit_s=60.0)
    assert now_s == [75.0]


def test_waiting_ends_when_the_process_is_dead(fake: Fake) -> None:
    def dead() -> None:
        raise TargetError("the server exited with 1")

    fake.answers = [(200, version("LOADING"))]
    with pytest.raises(TargetError, match="exited with 1"):
        wait_until_ready(fake.endpoint, limit_s=10, still_alive=dead)


def test_the_signature_is_read_from_the_metadata_and_an_unknown_one_lists_those_there_are(fake: Fake) -> None:
    fake.answers = [(200, TF_METADATA)]
    found = [
        (one.name, one.dtype, one.shape) for one in read_signature(fake.endpoint, "serving_default").inputs
    ]
    assert found == [("any", "object", None), ("x", "float32", (None, 200))]
    with pytest.raises(TargetError, match="has no signature 'predict'; it has: serving_default"):
        read_signature(fake.endpoint, "predict")


@pytest.mark.parametrize("body", [b"", b"<html>", {}, [], {"metadata": None}])
def test_metadata_that_is_nonsense_is_a_clear_error(fake: Fake, body: object) -> None:
    fake.answers = [(200, body)]
    with pytest.raises(TargetError, match="HTTP 200 without a model's metadata"):
        read_signature(fake.endpoint, "serving_default")


def test_a_models_name_travels_as_a_path() -> None:
    endpoint = Endpoint(model_name="mödel x", rest_port=1, model_version=2)
    assert endpoint.model_path == "/v1/models/m%C3%B6del%20x/versions/2"
    assert endpoint.kserve_path == "/v2/models/m%C3%B6del%20x/versions/2"


def test_ipv6_hosts_are_bracketed() -> None:
    assert Endpoint(model_name="m", host="::1", grpc_port=8500).grpc_authority == "[::1]:8500"


def test_where_nobody_answers_or_no_grpc_is_told_in_words(fake: Fake) -> None:
    rest_port, grpc_port = free_ports(2)
    for ports, words in (
        ({"rest_port": rest_port}, r"127\.0\.0\.1:\d+.*: no connection$"),
        ({"grpc_port": grpc_port}, r"127\.0\.0\.1:\d+.*: no connection$"),
        ({"grpc_port": fake.rest_port}, "speaks no gRPC"),
    ):
        with pytest.raises(TargetError, match=words):
            external_signature(Endpoint(model_name="m", **ports), "serving_default")


def test_an_answer_beyond_grpcs_own_limit_is_received() -> None:
    large = bytes(5 * 2**20)
    echo = grpc.unary_unary_rpc_method_handler(lambda _request, _context: large)
    with ThreadPoolExecutor(max_workers=1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": echo}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with control_channel(Endpoint(model_name="m", grpc_port=port)) as channel:
                assert len(channel.unary_unary("/s/m")(b"", timeout=5.0)) == len(large)
        finally:
            server.stop(None).wait()


def test_a_models_own_parameters_stand_in_place_of_the_others_but_for_the_threads(fake: Fake) -> None:
    own = {"m": {"max_batch_size": 4}, "other": {"max_batch_size": 2}}
    shared = {"max_batch_size": 64, "batch_timeout_micros": 100, "num_batch_threads": 2}
    fake.answers = [(200, {"enable_batching": True, "batch_scheduler": "shared", **shared, "models": own})]
    parameters = BatchingParameters(max_batch_size=4, num_batch_threads=2)
    assert read_parameters(fake.endpoint) == Configuration(batching=parameters)


@pytest.mark.parametrize(
    ("rest_url", "grpc_url"), [("https://h:443", "grpc://h:8500"), ("http://h:80", "grpcs://h:443")]
)
def test_one_url_with_tls_and_one_without_are_refused(rest_url: str, grpc_url: str) -> None:
    with pytest.raises(UsageError, match="one is with TLS, the other without"):
        external_endpoint(model_name="m", rest_url=rest_url, grpc_url=grpc_url)
    assert external_endpoint(model_name="m", rest_url="https://h:443", grpc_url="h:8500").tls
    assert not external_endpoint(model_name="m", rest_url="http://h:80", grpc_url="h:8500").tls


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://h:8000/v2", "'http://h:8000/v2' is not an address"),
        ("http://h:8000?token=a", "is not an address"),
        ("http://h", "is not an address"),
        ("ftp://h:8000", "is not an address"),
        ("http://h:99999", "Port out of range"),
        ("http://me:secret@h:8000", "would not be sent"),
        ("ftp://secret@h", "would not be sent"),
    ],
)
def test_a_url_that_means_more_than_an_address_is_refused(url: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        external_endpoint(model_name="m", rest_url=url, grpc_url=None)
    assert raised.value.message.startswith("--rest-url: ")
    assert words in raised.value.message
    assert "HOST:PORT" in raised.value.hint
    assert "secret" not in raised.value.message


@pytest.mark.parametrize("text", ["{at}/m", "http://{at}/m", "http://{at}/v1/models/m"])
def test_a_plain_web_server_is_told_as_what_it_is_however_it_is_named(fake: Fake, text: str) -> None:
    fake.answers = [(404, b"<html>not found</html>")]
    at = f"127.0.0.1:{fake.rest_port}"
    with pytest.raises(TargetError) as raised:
        answering_at(text.format(at=at))
    assert raised.value.message == (
        f"{at}: answers HTTP, but GET /v1/models/m gives 404: neither TensorFlow Serving nor KServe v2"
    )
    assert "target.kind: http" in raised.value.hint


@pytest.fixture
def server() -> Iterator[KserveServer]:
    with KserveServer() as started:
        yield started


def by_rest(server: KserveServer, name: str = "m") -> ExternalTarget:
    return ExternalTarget(Endpoint(model_name=name, rest_port=server.rest_port), kserve=True)


def by_grpc(server: KserveServer, name: str = "m") -> ExternalTarget:
    return ExternalTarget(Endpoint(model_name=name, grpc_port=server.grpc_port), kserve=True)


def test_the_signature_is_read_by_rest_and_by_grpc(server: KserveServer) -> None:
    expected = signature_from_metadata("mine", METADATA)
    assert by_rest(server).signature("mine") == expected
    assert by_grpc(server).signature("mine") == expected


def test_what_hinders_the_signature_is_told(server: KserveServer) -> None:
    server.get["/v2/models/nope"] = (404, {"error": "Request for unknown model: 'nope' is not found"})
    server.get["/v2/models/page"] = (200, b"<html>")
    server.get["/v2/models/mute"] = (200, {"name": "mute", "inputs": []})
    for target, words in (
        (by_rest(server, "nope"), "/v2/models/nope: Request for unknown model"),
        (by_grpc(server, "nope"), "NOT_FOUND: Request for unknown model"),
        (by_rest(server, "page"), "/v2/models/page: HTTP 200 without JSON"),
        (by_rest(server, "mute"), "list no inputs"),
    ):
        with pytest.raises(TargetError, match=words):
            target.signature("s")


def test_a_version_is_part_of_every_path(server: KserveServer) -> None:
    server.get["/v2/models/m/versions/3"] = server.get["/v2/models/m"]
    server.get["/v2/models/m/versions/3/stats"] = (200, statistics((1, 1)))
    target = ExternalTarget(
        Endpoint(model_name="m", model_version=3, rest_port=server.rest_port), kserve=True
    )
    assert target.signature("s").inputs
    assert target.counters().series


def test_nobody_there_is_a_target_error() -> None:
    rest_port, grpc_port = free_ports(2)
    for ports in ({"rest_port": rest_port}, {"grpc_port": grpc_port}):
        target = ExternalTarget(Endpoint(model_name="m", **ports), kserve=True)
        for read in (target.counters, lambda asked=target: asked.signature("s")):
            with pytest.raises(TargetError, match=r"127\.0\.0\.1"):
                read()


def tell(server: KserveServer, page: dict[str, Any]) -> None:
    """By REST and by gRPC."""
    server.get["/v2/models/m/stats"] = (200, page)
    server.grpc_statistics = page


@pytest.mark.parametrize("by", [by_rest, by_grpc])
def test_the_difference_of_two_readings_is_what_triton_did(
    server: KserveServer, by: Callable[[KserveServer], ExternalTarget]
) -> None:
    tell(server, statistics((1, 5), (8, 1)))
    before = by(server).counters()
    tell(server, statistics((1, 7), (4, 1), (8, 3), failed=2))
    did = activity(before, by(server).counters())
    assert (did.batches, did.rows) == (5, 22)
    assert did.mean_batch_rows == pytest.approx(4.4)
    assert did.batches_by_rows == {1: 2, 4: 1, 8: 2}
    assert did.execution_s_by_rows == pytest.approx({1: 0.01, 4: 0.01, 8: 0.01})
    assert did.queue_wait_mean_s == pytest.approx(0.002)
    assert did.requests_by_status == {"OK": 22, "FAILED": 2}
    assert did.device_busy_ratio == pytest.approx(0.05 / did.duration_s)


def test_versions_that_serve_together_are_summed(server: KserveServer) -> None:
    two = statistics((2, 3))
    two["model_stats"].append(copy.deepcopy(two["model_stats"][0]) | {"version": "2"})
    server.get["/v2/models/m/stats"] = (200, {"model_stats": []})
    before = by_rest(server).counters()
    server.get["/v2/models/m/stats"] = (200, two)
    did = activity(before, by_rest(server).counters())
    assert (did.batches, did.rows, did.batches_by_rows) == (6, 12, {2: 6})


@pytest.mark.parametrize(
    "page", [{"error": "no such extension"}, {"model_stats": [{}]}, [], b"<html>"], ids=str
)
def test_a_server_without_statistics_gives_a_reading_without_series(server: KserveServer, page: Any) -> None:
    server.get["/v2/models/m/stats"] = (404, page)
    assert by_rest(server).counters().series == {}
    assert by_grpc(server).counters().series == {}
    server.grpc_statistics, server.garbage = statistics((1, 1)), True
    assert by_grpc(server).counters().series == {}


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
