"""Readiness and signatures are read from the server's own words, and its failures are told."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import TargetError, UsageError
from batchtune.target.address import answering_at
from batchtune.target.endpoint import (
    Endpoint,
    control_channel,
    external_endpoint,
    read_signature,
    wait_until_ready,
)
from batchtune.target.external import external_signature, read_parameters
from tests.server.server_process import free_ports
from tests.target.kserve_server import Answer, KserveServer

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
METADATA = {
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
    fake.answers = [(200, METADATA)]
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
