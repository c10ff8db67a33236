"""A chain lives as a model does: on disk, by REST and gRPC, in status, metadata and metrics, from version to version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.benchmarks.server import chain as chains
from tests.benchmarks.server.checked_clients import GrpcChannel
from tests.server.server_process import ServerProcess
from tests.waiting import wait_until


def test_a_chain_is_served_as_a_model_is(tmp_path: Path) -> None:
    flags = chains.write_chain(tmp_path, chains.IN_TURN, (1.0, 2.0))
    (tmp_path / "monitoring.txt").write_text("prometheus_config { enable: true }")
    monitoring = f"--monitoring_config_file={tmp_path / 'monitoring.txt'}"
    with ServerProcess(tmp_path / "m", *flags, monitoring, "--max_num_load_retries=0") as server:
        assert any("chain trigger (trigger) -> select (select)" in line for line in server.lines)
        answer = server.predict({"instances": [[2.0], [-2.0]]})
        assert answer == {
            "predictions": [
                {"trigger": [2.0, 3.0], "select": [2.0, 3.0]},
                {"trigger": [-2.0, -1.0], "select": [-1.0, -1.0]},
            ]
        }

        async def by_grpc() -> dict[str, list[float]]:
            channel = GrpcChannel(server.grpc_port)
            try:
                return await chains.ask(channel, 2.0)
            finally:
                channel.close()

        assert asyncio.run(by_grpc()) == {"trigger": [2.0, 3.0], "select": [2.0, 3.0]}
        metadata = server.rest.get("/v1/models/m/metadata").json()
        outputs = metadata["metadata"]["signature_def"]["signature_def"]["serving_default"]["outputs"]
        assert sorted(outputs) == ["select", "trigger"]
        too_many = server.rest.post("/v1/models/m:predict", json={"instances": [[1.0]] * 17})
        assert (too_many.status_code, too_many.json()["error"][:14]) == (400, "step trigger: ")
        metrics = server.rest.get("/monitoring/prometheus/metrics").text
        for step in ("trigger", "select"):
            assert f':batchtune:serving:chain_step_latency_count{{model_name="m",step="{step}"}} 2' in metrics

        wrong = tmp_path / "new"
        wrong.mkdir()
        (wrong / "pipeline.yaml").write_text(chains.IN_TURN.replace("model: select", "model: slect"))
        wrong.rename(tmp_path / "m" / "2")
        fault = "pipeline.yaml:5: steps.select.model: this server has no model slect, did you mean select?"
        wait_until(lambda: any(fault in line for line in server.lines))
        states = server.rest.get("/v1/models/m").json()["model_version_status"]
        assert [(status["version"], status["state"]) for status in states] == [
            ("2", "END"),
            ("1", "AVAILABLE"),
        ]
        assert "predictions" in server.predict({"instances": [[2.0]]})


@pytest.mark.slow
def test_each_request_has_one_version_of_each_model_while_both_are_replaced(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "m", *chains.write_chain(tmp_path, chains.TWICE, (1.0, 1.0))) as server:
        swapped = asyncio.run(chains.ask_while_swapped(server, tmp_path, requests=1500, swaps=3))
    assert not swapped.faults
    assert {(1, 1), (4, 4)} <= set(swapped.versions)
