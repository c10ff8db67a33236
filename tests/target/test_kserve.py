"""A KServe v2 server's metadata become a signature, Triton's statistics become what the server did."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchtune.errors import TargetError
from batchtune.target.endpoint import Endpoint
from batchtune.target.external import ExternalTarget
from batchtune.target.telemetry import activity
from batchtune.wire.kserve_infer import signature_from_metadata
from tests.server.server_process import free_ports
from tests.target.kserve_server import METADATA, KserveServer, statistics


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
