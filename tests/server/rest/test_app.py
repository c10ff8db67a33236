"""Does the REST front end answer ordinary clients as tensorflow_model_server does?"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from batchtune.errors import BatchingParametersError
from batchtune.server.rest.parser import Head, HttpRequest
from batchtune.wire.status import HTTP_CODES, StatusError
from tests.server.server_fakes import PREDICT, FakeServable, RunningRest, running_rest, signature, spec

METRICS = "/monitoring/prometheus/metrics"
TUNING = "/v1/tuning/batching_parameters"
ONE = {"instances": [1.0]}


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningRest]:
    with running_rest(monitoring_path=METRICS) as running:
        yield running


@pytest.fixture
def rest(shared: RunningRest) -> RunningRest:
    shared.models.servable.error = None
    return shared


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/m:predict",
        "/v1/models/m/versions/123:predict",
        "/v1/models/m/versions/0123:predict",
        "/v1/models/m/labels/stable:predict",
        "/V1/MODELS/m:PREDICT",
        "/v1/models/%6d:predict",
    ],
)
def test_every_spelling_of_a_predict_path_works_at_first_and_again(rest: RunningRest, path: str) -> None:
    for _ in range(3):
        answer = rest.ask({"instances": [1.0, 2.0, 5.0]}, path, content_type="text/html")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.text == '{\n    "predictions": [2.5, 3.0, 4.5\n    ]\n}'


def test_columns_are_answered_by_column(rest: RunningRest) -> None:
    assert rest.ask({"inputs": [1.0, 2.0]}).json() == {"outputs": [2.5, 3.0]}


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        ("POST /v1/models/x:predict {}", 404, "Servable not found for request: Latest(x)"),
        ("POST /v1/models/m/versions/9:predict {}", 404, "Servable not found for request: Specific(m, 9)"),
        ("POST /v1/models/m/labels/l:predict {}", 400, "Unrecognized servable version label: l"),
        (f"POST /v1/models/m/versions/{1 << 63}:predict {{}}", 400, f"version: {1 << 63} to numeric."),
        (f'POST {PREDICT} {{"signature_name": "s"}}', 400, 'name: "s" not found in signature def'),
        (f"POST {PREDICT}", 400, "JSON Parse error: The document is empty"),
        (f"POST {PREDICT} {{}}", 400, "Missing 'inputs' or 'instances' key"),
        ("POST /v1/models/x:predict {", 400, "Missing a name for object member. at offset: 1"),
        (
            'POST /v1/models/x:predict {"signature_name": 1}',
            400,
            "'signature_name' key must be a string value.",
        ),
        ('POST /v1/models/x:predict {"instances": 1}', 404, "Servable not found for request: Latest(x)"),
        (f"GET {PREDICT}", 400, "Malformed request: GET /v1/models/m:predict"),
        ("POST /v1/models/m", 400, "Malformed request: POST /v1/models/m"),
        ("DELETE /v1/models/m", 400, "Malformed request: DELETE /v1/models/m"),
        ("GET /v1/models/m/", 400, "Malformed request: GET /v1/models/m/"),
        (f"POST {PREDICT}?a=b {{}}", 400, "Malformed request: POST /v1/models/m:predict?a=b"),
        ("GET /v1/models/m?a=b", 404, "Could not find any versions of model m?a=b"),
        ("POST /v1/models/m:explain", 400, "Malformed request: POST /v1/models/m:explain"),
        ("GET /v1/", 400, "Malformed request: GET /v1/"),
        ("GET /v1/models", 400, "Missing model name in request."),
        ("GET /v1/models/x", 404, "Could not find any versions of model x"),
        ("GET /v1/models/m/versions/9", 404, "Could not find version 9 of model m"),
        ("GET /v1/models/x/metadata", 404, "Servable not found for request: Latest(x)"),
        ("GET /v1/models/m/labels/other/metadata", 400, "Unrecognized servable version label: other"),
        ("GET /elsewhere", 404, "Not found: /elsewhere"),
        (f"PUT {TUNING} {{}}", 400, "Malformed request: PUT /v1/tuning/batching_parameters"),
        (f"OPTIONS {PREDICT}", 400, "Origin header is missing in CORS preflight"),
    ],
)
def test_refusals_are_the_references(rest: RunningRest, request_: str, code: int, text: str) -> None:
    method, path, *body = request_.split(" ", 2)
    for _ in range(2):
        answer = rest.ask("".join(body).encode(), path, method=method)
        assert answer.status_code == code
        assert answer.json()["error"].endswith(text)


@pytest.mark.parametrize("code", sorted(set(HTTP_CODES) - {"OK"}))
def test_every_status_has_its_http_code(rest: RunningRest, code: str) -> None:
    rest.models.servable.error = StatusError(code, f'because "{code}"')
    for _ in range(2):
        answer = rest.ask(ONE)
        assert (answer.status_code, answer.json()) == (HTTP_CODES[code], {"error": f'because "{code}"'})


def test_status_of_all_versions_and_of_one(rest: RunningRest) -> None:
    status = {"version": "123", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    for path in ("/v1/models/m", "/v1/models/m/versions/123", "/v1/models/m/labels/whatever"):
        assert rest.ask(path=path, method="GET").json() == {"model_version_status": [status]}


def test_metadata_is_protobufs_json_of_the_signatures(rest: RunningRest) -> None:
    answer = rest.ask(path="/v1/models/m/metadata", method="GET").json()
    assert answer["model_spec"] == {"name": "m", "signature_name": "", "version": "123"}
    definition = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert definition["inputs"]["x"] == {
        "dtype": "DT_FLOAT",
        "tensor_shape": {"dim": [{"size": "-1", "name": ""}], "unknown_rank": False},
        "name": "x:0",
    }
    assert definition["method_name"] == "tensorflow/serving/predict"
    assert rest.ask(path="/v1/models/m/labels/stable/metadata", method="GET").json() == answer


def test_metrics_count_requests_by_status(rest: RunningRest) -> None:
    def count(status: str) -> int:
        text = rest.ask(path=METRICS, method="GET").text
        label = f':tensorflow:serving:request_count{{model_name="m",status="{status}"}} '
        return int(next((line.split()[-1] for line in text.splitlines() if line.startswith(label)), 0))

    ok, refused = count("OK"), count("UNAVAILABLE")
    rest.ask(ONE)
    rest.models.servable.error = StatusError("UNAVAILABLE", "full")
    rest.ask(ONE)
    assert (count("OK"), count("UNAVAILABLE")) == (ok + 1, refused + 1)
    answer = rest.ask(path=METRICS, method="GET")
    assert answer.headers["content-type"] == "text/plain"
    assert 'request_latency_count{model_name="m",API="predict",entrypoint="REST"}' in answer.text


def test_a_query_is_part_of_the_monitoring_path_too(rest: RunningRest) -> None:
    answer = rest.ask(path=f"{METRICS}?a=b", method="GET")
    assert (answer.status_code, answer.headers["content-type"]) == (400, "text/plain")
    assert answer.text == f"Unexpected path: {METRICS}?a=b. Should be {METRICS}"


def test_without_a_monitoring_path_there_are_no_metrics() -> None:
    with running_rest() as rest:
        assert rest.ask(path=METRICS, method="GET").status_code == 404
        assert rest.ask(path="/", method="GET").status_code == 404


def test_cors_headers_need_the_flag(rest: RunningRest) -> None:
    preflight: dict[str, Any] = {"method": "OPTIONS", "origin": "https://x"}
    assert "access-control-allow-origin" not in rest.ask(**preflight).headers
    with running_rest(rest_api_enable_cors_support=True) as open_rest:
        unknown = open_rest.ask(path="/v1/models/x", method="GET")
        for answer in (open_rest.ask(**preflight), open_rest.ask(ONE), open_rest.ask(ONE), unknown):
            named = {key: value for key, value in answer.headers.items() if key.startswith("access-control-")}
            assert named == {
                "access-control-allow-origin": "*",
                "access-control-allow-methods": "POST, GET",
                "access-control-allow-headers": "Content-Type",
            }


class Control:
    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {"enable_batching": True, "max_batch_size": 4}

    def in_force(self) -> dict[str, Any]:
        return self.parameters

    def replace(self, parameters: dict[str, Any]) -> dict[str, Any]:
        if parameters.get("max_batch_size") == 0:
            raise BatchingParametersError("input_batch_size_limit must be positive; was 0")
        if parameters.get("max_batch_size") == 1:
            raise StatusError("INVALID_ARGUMENT", "too small")
        self.parameters = parameters
        return parameters


@pytest.fixture(scope="module")
def tuned() -> Iterator[RunningRest]:
    with running_rest(tuning=Control()) as running:
        yield running


def test_tuning_replaces_parameters_and_says_what_is_in_force(tuned: RunningRest) -> None:
    def asked(method: str, body: Any = b"") -> tuple[int, Any]:
        answer = tuned.ask(body, TUNING, method=method)
        return answer.status_code, answer.json()

    assert asked("GET") == (200, {"enable_batching": True, "max_batch_size": 4})
    assert asked("PUT", {"max_batch_size": 8}) == asked("GET") == (200, {"max_batch_size": 8})
    zero = {"error": "input_batch_size_limit must be positive; was 0"}
    assert asked("PUT", {"max_batch_size": 0}) == (400, zero)
    assert asked("PUT", {"max_batch_size": 1}) == (400, {"error": "too small"})
    assert asked("PUT", []) == (400, {"error": "expected a JSON object of batching parameters"})
    assert asked("PUT", b"{")[0] == asked("POST", b"{}")[0] == 400
    assert asked("PUT", b" " * 2**20 + b"{}") == (400, {"error": "batching parameters exceed 1048576 bytes"})


@pytest.mark.parametrize(
    ("peer", "status"),
    [
        ("127.0.0.1", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("", 200),
        ("10.0.0.1", 403),
        ("::ffff:10.0.0.1", 403),
        ("nonsense", 403),
    ],
)
def test_tuning_answers_this_machine_only(tuned: RunningRest, peer: str, status: int) -> None:
    """Asked without a socket, as a client of another machine would."""
    head = Head("GET", TUNING.encode(), {b"host": b"localhost"}, keep_alive=True, is_http_1_0=False)
    told: list[int] = []
    tuned.thread.call(
        lambda: tuned.api.start(HttpRequest(head), peer, lambda status, *_: told.append(status))
    )
    assert told == [status]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ("host: localhost", 200),
        ("host: LOCALHOST:8501", 200),
        ("host: 127.0.0.1:8501", 200),
        ("host: [::1]:8501", 200),
        ("host: attacker.example", 403),
        ("host: 127.0.0.1.attacker.example:8501", 403),
        ("host: localhost.attacker.example", 403),
        ("host: ", 403),
        ("host: localhost:x", 403),
        ("host: localhost\r\norigin: http://localhost:3000", 200),
        ("host: localhost\r\norigin: https://attacker.example", 403),
        ("host: localhost\r\norigin: null", 403),
        ("host: localhost\r\nx-forwarded-for: 10.0.0.1", 403),
        ("host: localhost\r\nForwarded: for=10.0.0.1", 403),
        ("host: localhost\r\nvia: 1.1 proxy", 403),
        ("host: localhost\r\nx-real-ip: 127.0.0.1", 403),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_tuning_refuses_a_page_and_a_proxy(tuned: RunningRest, method: str, fields: str, status: int) -> None:
    """Also a page whose name was made to point here."""
    request = f"{method} {TUNING} HTTP/1.1\r\n{fields}\r\ncontent-length: 2\r\n\r\n{{}}"
    assert tuned.exchange(request.encode()).startswith(b"HTTP/1.1 %d " % status)


def test_tuning_refuses_http_1_0(tuned: RunningRest) -> None:
    """nginx on the same host passes on no field of its own unless told, but speaks HTTP/1.0 and says its own Host."""
    request = f"GET {TUNING} HTTP/1.0\r\nhost: 127.0.0.1:8501\r\n\r\n"
    assert tuned.exchange(request.encode()).startswith(b"HTTP/1.1 403 ")


def test_bodies_beyond_the_limit_are_413() -> None:
    large = {"instances": [1.0] * 1000}
    with running_rest(rest_api_max_body_bytes=1000) as rest:
        for _ in range(2):
            assert rest.ask(ONE).status_code == 200
            answer = rest.ask(large)
            assert (answer.status_code, answer.json()["error"]) == (
                413,
                "the request body exceeds 1000 bytes",
            )


def test_what_gzip_inflates_to_has_a_limit_of_its_own() -> None:
    body = b'{"instances": [%b1.0]}' % (b"1.0, " * 999)
    with running_rest() as rest:
        rest.api.inflated_bytes_max = 1000
        assert rest.ask(body).status_code == 200
        answer = rest.ask(gzip.compress(body), content_encoding="gzip")
        assert answer.status_code == 413
        assert answer.json() == {"error": "the inflated request body exceeds 1000 bytes"}


def test_a_call_that_takes_too_long_is_504() -> None:
    servable = FakeServable()
    servable.hold = True
    with running_rest(servable, rest_api_timeout_in_ms=30) as rest:
        for _ in range(2):
            answer = rest.ask(ONE)
            assert answer.status_code == 504
            assert answer.json() == {"error": "Timed out waiting for notification"}
        rest.thread.call(servable.release)  # answers that come too late go nowhere
        servable.hold = False
        assert rest.ask(ONE).status_code == 200
        assert all(deadline is not None for _, _, _, deadline in servable.asked)


def test_without_a_timeout_there_is_no_deadline() -> None:
    with running_rest(rest_api_timeout_in_ms=0) as rest:
        assert rest.ask(ONE).status_code == 200
        assert rest.models.servable.asked[0][3] is None


EXAMPLES = [spec("inputs", "object")]
SCORES = [spec("classes", "object", 2), spec("scores", "float32", 2)]


def classify(inputs: dict[str, Any]) -> dict[str, Any]:
    rows = len(inputs["inputs"])
    return {
        "classes": np.array([[b"a", b"b"]] * rows, object),
        "scores": np.array([[0.25, 0.75]] * rows, np.float32),
    }


def regress(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"outputs": np.array([[len(one)] for one in inputs["inputs"]], np.float32)}


def test_classify_and_regress_take_examples() -> None:
    runs = {
        "serving_default": (signature("serving_default", EXAMPLES, SCORES, "classify"), classify),
        "length": (signature("length", EXAMPLES, [spec("outputs", "float32", 1)], "regress"), regress),
    }
    with running_rest(FakeServable(runs)) as rest:

        def asked(method: str, **body: Any) -> Any:
            return rest.ask({"examples": [{"x": [1.5]}, {}], **body}, f"/v1/models/m:{method}").json()

        assert asked("classify") == {"results": [[["a", 0.25], ["b", 0.75]]] * 2}
        assert len(asked("regress", signature_name="length")["results"]) == 2
        assert asked("regress") == {"error": "Expected one output Tensor."}
        assert asked("classify", signature_name="s") == {"error": "No signature was found with the name: s"}


def test_a_fault_is_500_and_logged(
    rest: RunningRest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(rest.models, "find", broken)
        answers = [rest.ask(ONE) for _ in range(2)]
    said = {"error": "the server failed to handle the request"}
    assert [(answer.status_code, answer.json()) for answer in answers] == [(500, said)] * 2
    assert "a bug" in caplog.text
    assert rest.ask(ONE).status_code == 200
