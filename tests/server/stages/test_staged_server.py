"""A server with a staged model, over REST: its code only by the flag, its signature and its metrics."""

from __future__ import annotations

from pathlib import Path

from tests.server.server_process import ServerProcess, run_to_end
from tests.server.stages.stage_fakes import write_stages

EMULATED = "service_time: {base_ms: 0.1}\ninputs: {x: {shape: [1]}}\noutputs: {y: {shape: [1]}}\n"


def base_path(tmp_path: Path) -> Path:
    folder = write_stages(tmp_path / "m" / "1")
    (folder / "emulated.yaml").write_text(EMULATED)
    return tmp_path / "m"


def test_code_of_a_model_runs_only_where_it_is_allowed(tmp_path: Path) -> None:
    base = base_path(tmp_path)
    flags = ServerProcess.free_ports()
    refused = run_to_end(f"--model_base_path={base}", "--file_system_poll_wait_seconds=0", *flags)
    assert refused.returncode == 1
    assert "pre: stages.py:preprocess is code of the model's folder" in refused.stderr
    assert "--allow_model_code" in refused.stderr
    monitoring = tmp_path / "monitoring.txt"
    monitoring.write_text("prometheus_config { enable: true }")
    with ServerProcess(
        base, "--allow_model_code", "--enable_batching", f"--monitoring_config_file={monitoring}"
    ) as server:
        assert server.predict({"instances": ["abc", "de"]}) == {
            "predictions": [{"label": "1 letters", "y": [3.0]}, {"label": "1 letters", "y": [2.0]}]
        }
        answer = server.predict({"instances": ["bug"]})
        assert answer == {"error": "pre: stages.py, line 16, in preprocess: KeyError: 'missing'"}
        metadata = server.rest.get("/v1/models/m/metadata").json()["metadata"]["signature_def"]
        inputs = metadata["signature_def"]["serving_default"]["inputs"]
        assert list(inputs) == ["text"]
        page = server.rest.get("/monitoring/prometheus/metrics").text
        assert ':batchtune:serving:stage_calls_total{model_name="m",stage="post"} 1' in page
        assert server.stop() == 0
