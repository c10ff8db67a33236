"""Does the REST front end answer ordinary clients as tensorflow_model_server does?"""

from __future__ import annotations

import gc
import gzip
import json
import socket
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import requests

from batchtune.errors import BatchingParametersError
from batchtune.server.rest.parser import Head, HttpRequest, RestLimits
from batchtune.wire.listener import SWEEP_S, SharedLimits
from batchtune.wire.status import HTTP_CODES, StatusError
from tests.server.server_fakes import (
    FakeServable,
    RunningRest,
    count_answers,
    running_rest,
    signature,
    spec,
)
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningRest]:
    with running_rest(monitoring_path="/monitoring/prometheus/metrics") as running:
        yield running


@pytest.fixture
def rest(shared: RunningRest) -> RunningRest:
    servable = shared.models.servable
    servable.error, servable.hold = None, False
    servable.held.clear()
    servable.asked.clear()
    return shared


def post(rest: RunningRest, path: str, body: Any, **headers: str) -> requests.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return requests.post(rest.url + path, data=data, headers=headers, timeout=10)


def get(rest: RunningRest, path: str, method: str = "GET", **headers: str) -> requests.Response:
    return requests.request(method, rest.url + path, headers=headers, timeout=10)


def exchange(rest: RunningRest, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send raw bytes over one connection and read until the server has been silent or gone.

    Where as many answers as requests have come, a shorter silence will do.
    """
    asked = b"".join(pieces).count(b" HTTP/1.")
    with socket.create_connection(("127.0.0.1", rest.port), timeout=5) as client:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(pause_s)
        client.settimeout(0.3)
        answer = b""
        try:
            while chunk := client.recv(65536):
                answer += chunk
                client.settimeout(0.03 if count_answers(answer) >= asked else 0.3)
        except TimeoutError:
            pass
        return answer


PREDICT = "/v1/models/m:predict"
REQUEST = b'POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n{"instances": [1.0]}'


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
        answer = post(rest, path, {"instances": [1.0, 2.0, 5.0]})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.text == '{\n    "predictions": [2.5, 3.0, 4.5\n    ]\n}'


def test_columns_are_answered_by_column(rest: RunningRest) -> None:
    assert post(rest, PREDICT, {"inputs": [1.0, 2.0]}).json() == {"outputs": [2.5, 3.0]}


def test_no_content_type_is_asked_for(rest: RunningRest) -> None:
    answer = post(rest, PREDICT, {"instances": [1.0]}, **{"Content-Type": "text/html"})
    assert answer.json() == {"predictions": [2.5]}


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "text"),
    [
        ("POST", "/v1/models/x:predict", "{}", 404, "Servable not found for request: Latest(x)"),
        (
            "POST",
            "/v1/models/m/versions/9:predict",
            "{}",
            404,
            "Servable not found for request: Specific(m, 9)",
        ),
        ("POST", "/v1/models/m/labels/l:predict", "{}", 400, "Unrecognized servable version label: l"),
        (
            "POST",
            "/v1/models/m/versions/9223372036854775808:predict",
            "{}",
            400,
            "Failed to convert version: 9223372036854775808 to numeric.",
        ),
        (
            "POST",
            PREDICT,
            '{"signature_name": "s"}',
            400,
            'Serving signature name: "s" not found in signature def',
        ),
        ("POST", PREDICT, "", 400, "JSON Parse error: The document is empty"),
        ("POST", PREDICT, "{}", 400, "Missing 'inputs' or 'instances' key"),
        ("GET", PREDICT, "", 400, "Malformed request: GET /v1/models/m:predict"),
        ("POST", "/v1/models/m", "", 400, "Malformed request: POST /v1/models/m"),
        ("DELETE", "/v1/models/m", "", 400, "Malformed request: DELETE /v1/models/m"),
        ("GET", "/v1/models/m/", "", 400, "Malformed request: GET /v1/models/m/"),
        ("POST", PREDICT + "?a=b", "{}", 400, "Malformed request: POST /v1/models/m:predict?a=b"),
        ("GET", "/v1/models/m?a=b", "", 404, "Could not find any versions of model m?a=b"),
        ("POST", "/v1/models/m:explain", "", 400, "Malformed request: POST /v1/models/m:explain"),
        ("GET", "/v1/", "", 400, "Malformed request: GET /v1/"),
        ("GET", "/v1/models", "", 400, "Missing model name in request."),
        ("GET", "/v1/models/x", "", 404, "Could not find any versions of model x"),
        ("GET", "/v1/models/m/versions/9", "", 404, "Could not find version 9 of model m"),
        ("GET", "/v1/models/x/metadata", "", 404, "Servable not found for request: Latest(x)"),
        ("GET", "/elsewhere", "", 404, "Not found: /elsewhere"),
        (
            "PUT",
            "/v1/tuning/batching_parameters",
            "{}",
            400,
            "Malformed request: PUT /v1/tuning/batching_parameters",
        ),
    ],
)
def test_refusals_have_the_references_code_and_text(
    rest: RunningRest, method: str, path: str, body: str, code: int, text: str
) -> None:
    for _ in range(2):
        answer = requests.request(method, rest.url + path, data=body.encode(), timeout=10)
        assert (answer.status_code, answer.json()) == (code, {"error": text})


def test_lookup_comes_after_parsing_and_before_the_tensors(rest: RunningRest) -> None:
    unknown = "/v1/models/x:predict"
    assert "JSON Parse error" in post(rest, unknown, b"{").json()["error"]
    assert "must be a string" in post(rest, unknown, {"signature_name": 1}).json()["error"]
    assert post(rest, unknown, {"instances": 1}).status_code == 404


@pytest.mark.parametrize("code", sorted(set(HTTP_CODES) - {"OK"}))
def test_every_status_has_its_http_code(rest: RunningRest, code: str) -> None:
    rest.models.servable.error = StatusError(code, f'because "{code}"')
    for _ in range(2):
        answer = post(rest, PREDICT, {"instances": [1.0]})
        assert answer.status_code == HTTP_CODES[code]
        assert answer.json() == {"error": f'because "{code}"'}


def test_status_of_all_versions_and_of_one(rest: RunningRest) -> None:
    expected = {
        "model_version_status": [
            {"version": "123", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ]
    }
    for path in ("/v1/models/m", "/v1/models/m/versions/123", "/v1/models/m/labels/whatever"):
        assert get(rest, path).json() == expected


def test_metadata_is_protobufs_json_of_the_signatures(rest: RunningRest) -> None:
    answer = get(rest, "/v1/models/m/metadata").json()
    assert answer["model_spec"] == {"name": "m", "signature_name": "", "version": "123"}
    definition = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert definition["inputs"]["x"] == {
        "dtype": "DT_FLOAT",
        "tensor_shape": {"dim": [{"size": "-1", "name": ""}], "unknown_rank": False},
        "name": "x:0",
    }
    assert definition["method_name"] == "tensorflow/serving/predict"
    assert get(rest, "/v1/models/m/labels/stable/metadata").json() == answer
    assert get(rest, "/v1/models/m/labels/other/metadata").status_code == 400


def test_metrics_count_requests_by_status(rest: RunningRest) -> None:
    def count(status: str) -> int:
        text = get(rest, "/monitoring/prometheus/metrics").text
        label = f':tensorflow:serving:request_count{{model_name="m",status="{status}"}} '
        return int(next((line.split()[-1] for line in text.splitlines() if line.startswith(label)), 0))

    ok, refused = count("OK"), count("UNAVAILABLE")
    post(rest, PREDICT, {"instances": [1.0]})
    rest.models.servable.error = StatusError("UNAVAILABLE", "full")
    post(rest, PREDICT, {"instances": [1.0]})
    assert (count("OK"), count("UNAVAILABLE")) == (ok + 1, refused + 1)
    answer = get(rest, "/monitoring/prometheus/metrics")
    assert answer.headers["content-type"] == "text/plain"
    assert 'request_latency_count{model_name="m",API="predict",entrypoint="REST"}' in answer.text


def test_a_query_is_part_of_the_monitoring_path_too(rest: RunningRest) -> None:
    answer = get(rest, "/monitoring/prometheus/metrics?a=b")
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "text/plain"
    assert answer.text == (
        "Unexpected path: /monitoring/prometheus/metrics?a=b. Should be /monitoring/prometheus/metrics"
    )


def test_invented_model_names_do_not_grow_the_metrics(rest: RunningRest) -> None:
    with requests.Session() as session:
        for number in range(400):
            session.post(f"{rest.url}/v1/models/n{number}:predict", data=b"{}", timeout=10)
    text = get(rest, "/monitoring/prometheus/metrics").text
    assert text.count('status="NOT_FOUND"') < 300


def test_without_a_monitoring_path_there_are_no_metrics() -> None:
    with running_rest() as rest:
        assert get(rest, "/monitoring/prometheus/metrics").status_code == 404
        assert get(rest, "/").status_code == 404


def test_preflight_needs_an_origin_and_cors_headers_need_the_flag(rest: RunningRest) -> None:
    refused = get(rest, PREDICT, "OPTIONS")
    assert (refused.status_code, refused.json()) == (
        400,
        {"error": "Origin header is missing in CORS preflight"},
    )
    assert "access-control-allow-origin" not in get(rest, PREDICT, "OPTIONS", Origin="https://x").headers
    with running_rest(rest_api_enable_cors_support=True) as open_rest:
        for answer in (
            get(open_rest, PREDICT, "OPTIONS", Origin="https://x"),
            post(open_rest, PREDICT, {"instances": [1.0]}),
            post(open_rest, PREDICT, {"instances": [1.0]}),
            get(open_rest, "/v1/models/x"),
        ):
            assert answer.headers["access-control-allow-origin"] == "*"
            assert answer.headers["access-control-allow-methods"] == "POST, GET"
            assert answer.headers["access-control-allow-headers"] == "Content-Type"


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


def test_tuning_replaces_parameters_and_says_what_is_in_force() -> None:
    with running_rest(tuning=Control()) as rest:
        url = rest.url + "/v1/tuning/batching_parameters"
        assert requests.get(url, timeout=10).json() == {"enable_batching": True, "max_batch_size": 4}
        assert requests.put(url, json={"max_batch_size": 8}, timeout=10).json() == {"max_batch_size": 8}
        assert requests.get(url, timeout=10).json() == {"max_batch_size": 8}
        for body, text in (
            (b'{"max_batch_size": 0}', "input_batch_size_limit must be positive; was 0"),
            (b'{"max_batch_size": 1}', "too small"),
            (b"[]", "expected a JSON object of batching parameters"),
        ):
            answer = requests.put(url, data=body, timeout=10)
            assert (answer.status_code, answer.json()) == (400, {"error": text})
        assert requests.put(url, data=b"{", timeout=10).status_code == 400
        assert requests.post(url, data=b"{}", timeout=10).status_code == 400


def ask_app(rest: RunningRest, method: str, target: bytes, *, peer: str, **fields: bytes) -> int:
    """Ask without a socket, as a client of another machine would; gives the status."""
    named = {name.encode(): value for name, value in fields.items()}
    head = Head(method, target, named, keep_alive=True, is_http_1_0=False)
    statuses: list[int] = []
    rest.thread.call(
        lambda: rest.api.start(HttpRequest(head), peer, lambda status, *_: statuses.append(status))
    )
    return statuses[0]


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
def test_tuning_answers_this_machine_only(peer: str, status: int) -> None:
    with running_rest(tuning=Control()) as rest:
        assert ask_app(rest, "GET", b"/v1/tuning/batching_parameters", peer=peer, host=b"localhost") == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost", 200),
        (b"LOCALHOST:8501", 200),
        (b"127.0.0.1:8501", 200),
        (b"[::1]:8501", 200),
        (b"attacker.example", 403),
        (b"127.0.0.1.attacker.example:8501", 403),
        (b"", 403),
        (b"localhost:x", 403),
    ],
)
def test_tuning_refuses_a_page_whose_name_was_made_to_point_here(host: bytes, status: int) -> None:
    with running_rest(tuning=Control()) as rest:
        path = b"/v1/tuning/batching_parameters"
        for method in ("GET", "PUT"):
            request = b"%b %b HTTP/1.1\r\nhost: %b\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}" % (
                method.encode(),
                path,
                host,
            )
            assert exchange(rest, request).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"origin: http://localhost:3000", 200),
        (b"origin: https://attacker.example", 403),
        (b"origin: null", 403),
        (b"x-forwarded-for: 10.0.0.1", 403),
        (b"Forwarded: for=10.0.0.1", 403),
        (b"via: 1.1 proxy", 403),
        (b"x-real-ip: 127.0.0.1", 403),
        (b"", 403),
    ],
)
def test_tuning_refuses_what_comes_by_way_of_a_page_or_a_proxy(line: bytes, status: int) -> None:
    """nginx on the same host passes on no field of its own unless told, but speaks HTTP/1.0 and says its own Host."""
    version = b"1.1" if line else b"1.0"
    more = b"host: 127.0.0.1:8501\r\nconnection: close\r\ncontent-length: 2\r\n" + line + b"\r\n" * bool(line)
    with running_rest(tuning=Control()) as rest:
        for method in (b"GET", b"PUT"):
            request = b"%b /v1/tuning/batching_parameters HTTP/%b\r\n%b\r\n{}" % (method, version, more)
            assert exchange(rest, request).startswith(b"HTTP/1.1 %d " % status)


def test_gzip_bodies_are_inflated(rest: RunningRest) -> None:
    packed = gzip.compress(b'{"instances": [1.0]}')
    for _ in range(2):
        assert post(rest, PREDICT, packed, **{"Content-Encoding": "gzip"}).json() == {"predictions": [2.5]}


@pytest.mark.parametrize(
    "broken",
    [b"no gzip", gzip.compress(b'{"instances": [1.0]}', mtime=0)[:-8]],
    ids=["no gzip", "cut short"],  # the heading of a gzip tells the time, and each worker its own
)
def test_gzip_bodies_that_are_broken_or_cut_short_are_refused(rest: RunningRest, broken: bytes) -> None:
    answer = post(rest, PREDICT, broken, **{"Content-Encoding": "gzip"})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("Failed to uncompress the gzipped body")


def test_bodies_beyond_the_limit_are_413() -> None:
    with running_rest(rest_api_max_body_bytes=1000) as rest:
        large = {"instances": [1.0] * 1000}
        packed = gzip.compress(json.dumps(large).encode())
        assert len(packed) < 1000
        for _ in range(2):
            assert post(rest, PREDICT, {"instances": [1.0]}).status_code == 200
            answer = post(rest, PREDICT, large)
            assert (answer.status_code, answer.json()) == (
                413,
                {"error": "the request body exceeds 1000 bytes"},
            )
            assert post(rest, PREDICT, packed, **{"Content-Encoding": "gzip"}).status_code == 413
            in_chunks = iter([json.dumps(large).encode()])  # without a declared length
            assert requests.post(rest.url + PREDICT, data=in_chunks, timeout=10).status_code == 413


def test_what_gzip_inflates_to_has_a_limit_of_its_own() -> None:
    with running_rest() as rest:
        rest.api.inflated_bytes_max = 1000
        body = json.dumps({"instances": [1.0] * 1000}).encode()
        assert post(rest, PREDICT, body).status_code == 200
        answer = post(rest, PREDICT, gzip.compress(body), **{"Content-Encoding": "gzip"})
        assert answer.status_code == 413
        assert answer.json() == {"error": "the inflated request body exceeds 1000 bytes"}


@pytest.mark.parametrize("expect", [b"", b"expect: 100-continue\r\n"])
def test_a_length_declared_beyond_the_limit_is_413_before_the_body(expect: bytes) -> None:
    head = REQUEST.partition(b"\r\n\r\n")[0].replace(b"length: 20", b"length: 1001")
    with running_rest(rest_api_max_body_bytes=1000) as rest:
        exchange(rest, REQUEST)
        for path in (b"m:predict", b"x:predict"):
            answer = exchange(rest, head.replace(b"m:predict", path) + b"\r\n" + expect + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 413")
            assert b"connection: close\r\n" in answer


def test_a_call_that_takes_too_long_is_504() -> None:
    servable = FakeServable()
    servable.hold = True
    with running_rest(servable, rest_api_timeout_in_ms=30) as rest:
        for _ in range(2):
            answer = post(rest, PREDICT, {"instances": [1.0]})
            assert answer.status_code == 504
            assert answer.json() == {"error": "Timed out waiting for notification"}
        rest.thread.call(servable.release)  # answers that come too late go nowhere
        servable.hold = False
        assert post(rest, PREDICT, {"instances": [1.0]}).status_code == 200
        deadlines = [deadline for _, _, _, deadline in servable.asked]
        assert all(deadline is not None for deadline in deadlines)


def test_without_a_timeout_there_is_no_deadline() -> None:
    with running_rest(rest_api_timeout_in_ms=0) as rest:
        assert post(rest, PREDICT, {"instances": [1.0]}).status_code == 200
        assert rest.models.servable.asked[0][3] is None


def test_one_connection_serves_many_requests(rest: RunningRest) -> None:
    answer = exchange(rest, REQUEST, REQUEST, REQUEST, pause_s=0.02)
    assert answer.count(b"HTTP/1.1 200 OK") == 3


def test_pipelined_requests_are_answered_in_order(rest: RunningRest) -> None:
    second = REQUEST.replace(b"[1.0]", b"[3.0]")
    third = b"GET /v1/models/m HTTP/1.1\r\nhost: x\r\n\r\n"
    exchange(rest, REQUEST)
    answer = exchange(rest, REQUEST + second + third + REQUEST)
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert answer.index(b"2.5") < answer.index(b"3.5") < answer.index(b"AVAILABLE") < answer.rindex(b"2.5")


def test_pipelined_requests_do_not_pile_up() -> None:
    requests_bytes = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n" * 1000
    with running_rest() as rest, socket.create_connection(("127.0.0.1", rest.port)) as client:
        wait_until(lambda: rest.server.connections)
        (connection,) = rest.server.connections
        client.setblocking(False)
        sent, waiting, blocked_since = 0, 0, time.monotonic()
        while sent < 20 << 20 and time.monotonic() - blocked_since < 0.5:
            try:
                sent += client.send(requests_bytes)
                blocked_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.001)
            waiting = max(waiting, connection.waiting_bytes)
        assert 0 < waiting < 1 << 20


def test_a_request_in_single_bytes_is_one_request(rest: RunningRest) -> None:
    exchange(rest, REQUEST)
    answer = exchange(rest, *(REQUEST[index : index + 1] for index in range(len(REQUEST))))
    assert answer.count(b"HTTP/1.1 200 OK") == 1


def test_chunked_bodies_are_put_together(rest: RunningRest) -> None:
    chunks = b'9\r\n{"instanc\r\n' + b'b\r\nes": [1.0]}\r\n' + b"0\r\n\r\n"
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for _ in range(2):
        assert b"2.5" in exchange(rest, head + chunks)


def test_expect_continue_is_answered(rest: RunningRest) -> None:
    head, body = REQUEST.split(b"\r\n\r\n")
    for _ in range(2):
        answer = exchange(rest, head + b"\r\nexpect: 100-continue\r\n\r\n", body, pause_s=0.05)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


@pytest.mark.parametrize("close", [b"HTTP/1.1\r\nconnection: close", b"HTTP/1.0"])
def test_a_client_that_wants_to_close_is_told_so(rest: RunningRest, close: bytes) -> None:
    exchange(rest, REQUEST)
    answer = exchange(rest, REQUEST.replace(b"HTTP/1.1", close, 1) + REQUEST)
    assert answer.count(b"200 OK") == 1
    assert b"connection: close\r\n" in answer


def test_a_client_of_http_1_0_may_keep_its_connection(rest: RunningRest) -> None:
    exchange(rest, REQUEST)
    kept = REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0\r\nconnection: keep-alive", 1)
    answer = exchange(rest, kept, kept, pause_s=0.02)
    assert answer.count(b"200 OK") == answer.count(b"connection: keep-alive\r\n") == 2


@pytest.mark.parametrize(
    "nonsense", [b"\x16\x03\x01\x02\x00\x01", b"nonsense\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"]
)
def test_what_is_not_http_is_400_and_closed(rest: RunningRest, nonsense: bytes) -> None:
    assert exchange(rest, nonsense).startswith(b"HTTP/1.1 400")


def test_a_head_without_end_is_cut_off(rest: RunningRest) -> None:
    """A close with bytes still unread resets the connection, which may overtake the 400; a third ending is a fault."""
    endless = b"GET /v1/models/m HTTP/1.1\r\n" + b"x: " + b"y" * 300_000
    try:
        assert exchange(rest, endless).startswith(b"HTTP/1.1 400")
    except (ConnectionResetError, BrokenPipeError):
        wait_until(lambda: len(rest.server.connections) == 0)
    assert exchange(rest, REQUEST).startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_early_leaves_nothing_behind(rest: RunningRest) -> None:
    exchange(rest, REQUEST)
    rest.models.servable.hold = True
    with socket.create_connection(("127.0.0.1", rest.port)) as client:
        client.sendall(REQUEST)
        wait_until(lambda: rest.models.servable.held)
    rest.thread.call(rest.models.servable.release)  # until then it may still read: it looks like `nc -N`
    wait_until(lambda: len(rest.server.connections) == 0)
    assert post(rest, "/v1/models/x:predict", b"{}").status_code == 404


def test_a_client_that_leaves_pipelined_requests_is_not_answered(
    rest: RunningRest, caplog: pytest.LogCaptureFixture
) -> None:
    servable = rest.models.servable
    exchange(rest, REQUEST)
    servable.hold = True
    with socket.create_connection(("127.0.0.1", rest.port)) as client:
        client.sendall(REQUEST * 3)
        wait_until(lambda: servable.held)
        servable.asked.clear()
        rest.thread.call(servable.release)
        wait_until(lambda: servable.asked)  # the second is under way, the third waits
    wait_until(lambda: len(rest.server.connections) == 0)
    rest.thread.call(servable.release)
    assert len(servable.asked) == 1
    assert not caplog.records


def test_the_body_of_a_request_that_is_never_finished_is_freed_at_once() -> None:
    """Not only when the garbage collector next looks for reference cycles, which is seldom."""
    size = 8 << 20
    head = REQUEST.partition(b"{")[0].replace(b"length: 20", b"length: %d" % (size + 1))
    with running_rest() as rest:
        for path in (b"m:predict", b"m:predict", b"x:predict"):  # through the app, then not, then always
            exchange(rest, REQUEST)
            wait_until(lambda: len(rest.server.connections) == 0)
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                with socket.create_connection(("127.0.0.1", rest.port)) as client:
                    client.sendall(head.replace(b"m:predict", path) + bytes(size))
                    wait_until(lambda: tracemalloc.get_traced_memory()[0] > size * 3 // 4)
                wait_until(lambda: tracemalloc.get_traced_memory()[0] < size // 4)
            finally:
                tracemalloc.stop()
                gc.enable()


SOON_CUT_OFF = SharedLimits(patience_s=SWEEP_S)  # in the second sweep


@pytest.mark.parametrize("sent_bytes", [1, 30])  # of one the parser tells nothing
def test_silent_connections_are_closed(sent_bytes: int) -> None:
    limits = RestLimits(idle_s=0.05, shared=SOON_CUT_OFF)
    with running_rest(limits=limits) as rest, socket.create_connection(("127.0.0.1", rest.port)) as idle:
        with socket.create_connection(("127.0.0.1", rest.port)) as stalled:
            stalled.sendall(REQUEST[:sent_bytes])
            wait_until(lambda: len(rest.server.connections) == 2)

            def swept() -> bool:
                rest.thread.call(rest.server.sweep)
                return len(rest.server.connections) == 0

            wait_until(swept)
            assert stalled.recv(100).startswith(b"HTTP/1.1 503 ")
        assert idle.recv(10) == b""


def test_a_client_that_reads_no_answers_is_read_no_more_and_cut_off() -> None:
    body = json.dumps({"instances": [[0.1] * 1000] * 20}).encode()
    request = REQUEST.replace(b"length: 20", b"length: %d" % len(body)).partition(b"{")[0] + body
    servable, limits = FakeServable(), RestLimits(idle_s=60, shared=SOON_CUT_OFF)
    with running_rest(servable, limits=limits) as rest, socket.socket() as client:
        exchange(rest, REQUEST)
        wait_until(lambda: len(rest.server.connections) == 0)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", rest.port))
        wait_until(lambda: len(rest.server.connections) == 1)
        (connection,) = rest.server.connections

        def ask_and_wait() -> None:
            asked = len(servable.asked)
            client.sendall(request)
            wait_until(lambda: len(servable.asked) > asked or connection.is_paused)
            time.sleep(0.02 * connection.is_paused)  # the kernel may take more of the answer yet

        while not connection.is_paused:
            ask_and_wait()
            assert len(servable.asked) < 400, "40 MB of answers that nobody reads, and no end"
        assert connection._transport.get_write_buffer_size() < 1 << 20

        def swept() -> bool:
            rest.thread.call(rest.server.sweep)
            return len(rest.server.connections) == 0

        wait_until(swept)


@pytest.mark.parametrize("expect", [b"", b"expect: nothing\r\n"], ids=["fast", "through the app"])
def test_a_request_half_read_while_the_last_answer_is_stuck_goes_on(rest: RunningRest, expect: bytes) -> None:
    exchange(rest, REQUEST)
    wait_until(lambda: len(rest.server.connections) == 0)
    half, other = REQUEST.replace(b"host: x\r\n", b"host: x\r\n" + expect)[:-10], REQUEST[-10:]
    with socket.create_connection(("127.0.0.1", rest.port), timeout=10) as client:
        client.sendall(half)
        wait_until(lambda: [one for one in rest.server.connections if one._parser.arriving])
        (connection,) = rest.server.connections
        rest.thread.call(connection.pause_writing)
        rest.thread.call(connection.resume_writing)
        client.sendall(other)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_draining_lets_requests_finish_and_refuses_new_ones() -> None:
    servable = FakeServable()
    with running_rest(servable) as rest:
        post(rest, PREDICT, {"instances": [1.0]})
        servable.hold = True
        with socket.create_connection(("127.0.0.1", rest.port)) as client:
            client.sendall(REQUEST)
            wait_until(lambda: servable.held)
            rest.thread.loop.call_soon_threadsafe(rest.thread.loop.create_task, rest.server.drain(5))
            rest.thread.call(lambda: None)
            rest.thread.call(servable.release)
            answer = b""
            while chunk := client.recv(65536):
                answer += chunk
            assert b"200 OK" in answer
            assert b"connection: close" in answer
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", rest.port))


def test_what_outlasts_the_grace_is_cut_off() -> None:
    servable = FakeServable()
    servable.hold = True
    with running_rest(servable) as rest:
        with socket.create_connection(("127.0.0.1", rest.port)) as first:
            first.sendall(REQUEST)  # the first of its path is served as a task
            wait_until(lambda: len(servable.held) == 1)
            with socket.create_connection(("127.0.0.1", rest.port)) as second:
                second.sendall(REQUEST)
                wait_until(lambda: len(servable.held) == 2)
                rest.thread.run(rest.server.drain(0.01))
                assert len(rest.server.connections) == 0
        rest.thread.call(servable.release)


EXAMPLES = [spec("inputs", "object")]


def classify(inputs: dict[str, Any]) -> dict[str, Any]:
    rows = len(inputs["inputs"])
    return {
        "classes": np.array([[b"a", b"b"]] * rows, object),
        "scores": np.array([[0.25, 0.75]] * rows, np.float32),
    }


def regress(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"outputs": np.array([[len(one)] for one in inputs["inputs"]], np.float32)}


def test_classify_and_regress_take_examples() -> None:
    servable = FakeServable(
        {
            "serving_default": (
                signature(
                    "serving_default",
                    EXAMPLES,
                    [spec("classes", "object", 2), spec("scores", "float32", 2)],
                    "classify",
                ),
                classify,
            ),
            "length": (signature("length", EXAMPLES, [spec("outputs", "float32", 1)], "regress"), regress),
        }
    )
    with running_rest(servable) as rest:
        body = {"examples": [{"x": 1}, {"x": 2}]}
        answer = post(rest, "/v1/models/m:classify", body)
        assert answer.json() == {"results": [[["a", 0.25], ["b", 0.75]]] * 2}
        sizes = post(
            rest, "/v1/models/m:regress", {"signature_name": "length", "examples": [{"x": [1.5]}, {}]}
        )
        assert len(sizes.json()["results"]) == 2
        for path, text in (
            ("regress", "Expected one output Tensor."),
            ("predict", "Missing 'inputs' or 'instances' key"),
        ):
            refused = post(rest, f"/v1/models/m:{path}", body)
            assert (refused.status_code, refused.json()) == (400, {"error": text})
        unknown = post(rest, "/v1/models/m:classify", {"signature_name": "s", **body})
        assert unknown.json() == {"error": "No signature was found with the name: s"}


def test_curl_gets_the_answer(rest: RunningRest) -> None:
    command = ["curl", "-s", "-d", '{"instances": [1.0, 2.0, 5.0]}', rest.url + PREDICT]
    printed = subprocess.run(command, check=True, capture_output=True, timeout=20).stdout
    assert json.loads(printed) == {"predictions": [2.5, 3.0, 4.5]}


def test_a_fault_of_the_server_is_500_and_logged(rest: RunningRest, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    find, rest.models.find = rest.models.find, broken  # type: ignore[method-assign]
    try:
        for _ in range(2):
            answer = post(rest, PREDICT, {"instances": [1.0]})
            assert (answer.status_code, answer.json()) == (
                500,
                {"error": "the server failed to handle the request"},
            )
    finally:
        rest.models.find = find  # type: ignore[method-assign]
    assert "a bug" in caplog.text
    assert post(rest, PREDICT, {"instances": [1.0]}).status_code == 200
