"""The load clients against the bundled server: what they decode is what grpcio and httpx receive."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from batchtune.load.clients.client import PREDICT_PATH
from batchtune.wire.tfserving.rest_json import encode_predict_json
from batchtune.wire.tfserving.tensors import decode_predict_response, encode_predict_request
from tests.load.load_servers import a_job, closed, evenly, requests_for, run_here
from tests.server.server_process import ServerProcess, write_emulated

pytestmark = pytest.mark.smoke

INPUTS = [np.full((rows, 2), rows, np.float32) for rows in (1, 3)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With room for every request, however long this machine pauses."""
    directory = tmp_path_factory.mktemp("served")
    parameters = directory / "batching.txt"
    parameters.write_text(
        "max_batch_size {value: 4} num_batch_threads {value: 1} max_enqueued_batches {value: 100}"
    )
    base_path = write_emulated(directory / "m", base_ms=5.0)
    flags = ("--enable_batching", f"--batching_parameters_file={parameters}")
    with ServerProcess(base_path, *flags) as started:
        yield started


def encoded(protocol: str, rows: np.ndarray) -> bytes:
    if protocol == "grpc":
        return encode_predict_request("m", "serving_default", {"x": rows})
    return encode_predict_json({"x": rows}, signature_name="serving_default")


def witnessed(server: ServerProcess, rows: np.ndarray) -> dict[str, np.ndarray]:
    """What grpcio receives."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        return decode_predict_response(channel.unary_unary(PREDICT_PATH)(encoded("grpc", rows)))


@pytest.mark.parametrize("protocol", ["grpc", "rest"])
def test_answers_equal_what_grpcio_receives(server: ServerProcess, protocol: str) -> None:
    port = server.grpc_port if protocol == "grpc" else server.rest_port
    requests = requests_for(
        protocol,
        bodies=tuple(encoded(protocol, rows) for rows in INPUTS),
        rows=(1, 3),
        expected=tuple(witnessed(server, rows) for rows in INPUTS),
    )
    for arrivals in (closed(3, 30), evenly(100, 0.3)):
        samples = run_here(a_job(protocol, port, arrivals, requests=requests, check_every=1))
        assert samples.errors() == {}
        assert samples.answers_checked == len(samples) == 30
        assert (samples.latency_ns > 5_000_000).all()
    too_large = requests_for(protocol, bodies=(encoded(protocol, np.zeros((5, 2), np.float32)),), rows=(5,))
    assert run_here(a_job(protocol, port, closed(2, 8), requests=too_large)).errors() == {"TOO_LARGE": 8}
