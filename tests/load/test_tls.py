"""TLS: the server's certificate is verified, over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from batchtune.errors import UsageError
from batchtune.load.clients.client import PREDICT_PATH
from batchtune.scenario.spec.target import TlsSpec
from batchtune.target.endpoint import Endpoint, control_channel, url_failure
from tests.load.load_servers import a_job, closed, requests_for, run_here

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(
        [*command, "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"], check=True, capture_output=True
    )
    return certificate, key


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        return


class QuietServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that does not trust us ends its handshake."""


@pytest.fixture
def https_port(certificate: tuple[Path, Path]) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server = QuietServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def grpcs_port(certificate: tuple[Path, Path]) -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(2))
    service, method = PREDICT_PATH[1:].split("/")
    handler = grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    pem, key = certificate
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), pem.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield port
    server.stop(None).wait()


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_a_server_that_proves_itself_is_served(
    protocol: str, certificate: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    port = request.getfixturevalue("https_port" if protocol == "rest" else "grpcs_port")
    tls = TlsSpec(ca_file=str(certificate[0]))
    samples = run_here(a_job(protocol, port, closed(3, 30), tls=tls, check_every=0))
    assert len(samples) == 30
    assert samples.errors() == {}


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_a_server_that_cannot_prove_itself_is_refused(protocol: str, request: pytest.FixtureRequest) -> None:
    port = request.getfixturevalue("https_port" if protocol == "rest" else "grpcs_port")
    requests = requests_for(protocol)
    samples = run_here(a_job(protocol, port, closed(1, 3), tls=TlsSpec(), requests=requests))
    assert samples.errors() == {"REFUSED": 3}
    assert "CERTIFICATE_VERIFY_FAILED" in samples.error_texts["REFUSED"]


def test_a_name_that_the_certificate_does_not_hold_is_refused(
    https_port: int, certificate: tuple[Path, Path]
) -> None:
    tls = TlsSpec(ca_file=str(certificate[0]), server_name="elsewhere.example")
    samples = run_here(a_job("rest", https_port, closed(1, 2), tls=tls))
    assert samples.errors() == {"REFUSED": 2}
    assert "mismatch" in samples.error_texts["REFUSED"]


def test_the_control_plane_verifies_the_name_that_was_given(
    https_port: int, certificate: tuple[Path, Path]
) -> None:
    for name, words in (("localhost", "HTTP 501"), ("elsewhere.example", "mismatch")):
        tls = TlsSpec(ca_file=str(certificate[0]), server_name=name)
        endpoint = Endpoint(model_name="m", rest_port=https_port, tls=tls)
        assert words in url_failure(f"{endpoint.rest_url}/ready", endpoint)
    assert "HTTP 501" in url_failure(f"https://localhost:{https_port}/of-another-host", endpoint)


def test_the_control_plane_verifies_the_name_over_grpc_too(
    grpcs_port: int, certificate: tuple[Path, Path]
) -> None:
    for name, code in (("localhost", None), ("elsewhere.example", grpc.StatusCode.UNAVAILABLE)):
        tls = TlsSpec(ca_file=str(certificate[0]), server_name=name)
        with control_channel(Endpoint(model_name="m", grpc_port=grpcs_port, tls=tls)) as channel:
            error = channel.unary_unary(PREDICT_PATH).future(b"", timeout=20.0).exception()
        assert (None if error is None else error.code()) == code


def test_a_ca_file_that_cannot_be_read_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="TLS files cannot be used"):
        run_here(a_job("rest", 1, closed(1, 1), tls=TlsSpec(ca_file="/does/not/exist.pem")))
