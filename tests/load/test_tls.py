"""TLS: the server's certificate is verified, over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from batchtune.errors import UsageError
from batchtune.load.clients.client import PREDICT_PATH
from batchtune.scenario.spec.target import TlsSpec
from batchtune.target.endpoint import Endpoint, control_channel, url_failure
from tests.load.load_servers import (
    Certificate,
    a_job,
    certificate_in,
    closed,
    grpcio_server,
    python_server,
    run_here,
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate_in(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def ports(certificate: Certificate) -> Iterator[dict[str, int]]:
    with (
        python_server(lambda _body: b"{}", certificate) as rest,
        grpcio_server(lambda *_: b"", certificate) as grpcs,
    ):
        yield {"rest": rest, "grpc": grpcs}


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_who_proves_themselves_is_served(
    protocol: str, ports: dict[str, int], certificate: Certificate
) -> None:
    tls = TlsSpec(ca_file=str(certificate[0]))
    samples = run_here(a_job(protocol, ports[protocol], closed(3, 30), tls=tls, check_every=0))
    assert (len(samples), samples.errors()) == (30, {})
    elsewhere = tls.model_copy(update={"server_name": "elsewhere.example"})
    for refused, words in ((TlsSpec(), "CERTIFICATE_VERIFY_FAILED"), (elsewhere, "mismatch")):
        samples = run_here(a_job(protocol, ports[protocol], closed(1, 3), tls=refused))
        assert samples.errors() == {"REFUSED": 3}
        assert words in samples.error_texts["REFUSED"]


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [("localhost", "HTTP 501", None), ("elsewhere.example", "mismatch", grpc.StatusCode.UNAVAILABLE)],
)
def test_the_control_plane_verifies_the_name_that_was_given(
    name: str, words: str, code: grpc.StatusCode | None, ports: dict[str, int], certificate: Certificate
) -> None:
    tls = TlsSpec(ca_file=str(certificate[0]), server_name=name)
    endpoint = Endpoint(model_name="m", rest_port=ports["rest"], grpc_port=ports["grpc"], tls=tls)
    assert words in url_failure(f"{endpoint.rest_url}/ready", endpoint)
    assert "HTTP 501" in url_failure(f"https://localhost:{ports['rest']}/of-another-host", endpoint)
    with control_channel(endpoint) as channel:
        error = channel.unary_unary(PREDICT_PATH).future(b"", timeout=20.0).exception()
    assert (None if error is None else error.code()) == code


def test_a_ca_file_that_cannot_be_read_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="TLS files cannot be used"):
        run_here(a_job("rest", 1, closed(1, 1), tls=TlsSpec(ca_file="/does/not/exist.pem")))
