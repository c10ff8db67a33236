"""The server process: real clients get the model's own scores, mistakes are one line, an end loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf.text_format import Parse

from batchtune.server import __main__ as program
from batchtune.wire.tfserving.messages import (
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelVersionStatus,
    ReloadConfigRequest,
    ReloadConfigResponse,
)
from batchtune.wire.tfserving.tensors import decode_predict_response, encode_predict_request
from tests.server.server_process import ServerProcess, can_connect, free_ports, run_to_end, write_emulated
from tests.waiting import wait_until

LOOK_ONCE = "--file_system_poll_wait_seconds=0"
PREDICT = "/tensorflow.serving.PredictionService/Predict"
TUNING = "/v1/tuning/batching_parameters"
ONE = {"instances": [[1, 2]]}
ANSWER = {"predictions": [[3.0, 4.0]]}
MESSAGE = encode_predict_request("m", "serving_default", {"x": np.ones((1, 2), np.float32)})


def call_models(server: ServerProcess, method: str, request: Any, answer: Any) -> Any:
    """A unary call of the ModelService by grpcio."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = channel.unary_unary(f"/tensorflow.serving.ModelService/{method}")
        return answer.FromString(stub(request.SerializeToString(), timeout=20))


def reload(server: ServerProcess, name: str, base_path: Path | str) -> str:
    """The code that a reload of one model ends with."""
    request = ReloadConfigRequest()
    request.config.model_config_list.config.add(name=name, base_path=str(base_path))
    try:
        call_models(server, "HandleReloadConfigRequest", request, ReloadConfigResponse)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def wait_for_line(server: ServerProcess, part: str) -> None:
    wait_until(lambda: any(part in line for line in server.lines))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("emulated")
    monitoring = directory / "monitoring.txt"
    monitoring.write_text("prometheus_config { enable: true }")
    flags = (f"--monitoring_config_file={monitoring}", "--enable_tuning_api", "--enable_batching")
    with ServerProcess(write_emulated(directory / "m"), *flags) as server:
        yield server


def test_lines_name_the_ports_and_say_what_a_version_takes(emulated: ServerProcess) -> None:
    ready = f"gRPC on 127.0.0.1:{emulated.grpc_port}, REST on 127.0.0.1:{emulated.rest_port}, ready"
    assert emulated.lines[-1] == f"batchtune-model-server: {ready}\n"
    assert any("model m version 1 is an emulated device, not a model" in line for line in emulated.lines)
    (line,) = [line for line in emulated.lines if "is available" in line]
    assert line.startswith(
        "batchtune-model-server: model m version 1 is available: serving_default(x: float32 [?,2]) -> "
        "(y: float32 [?,2]); max_batch_size 1000, batch_timeout_micros 0, max_enqueued_batches 10, num_batch_threads "
    )


def test_rest_and_grpc_answer_the_same(emulated: ServerProcess) -> None:
    assert emulated.predict({"instances": [[1, 1], [3, 4]]}) == {"predictions": [[2.0, 3.0], [7.0, 8.0]]}
    with grpc.insecure_channel(f"127.0.0.1:{emulated.grpc_port}") as channel:
        outputs = decode_predict_response(channel.unary_unary(PREDICT)(MESSAGE, timeout=20))
    np.testing.assert_array_equal(outputs["y"], [[2, 3]])


def test_metrics_count_requests_batches_and_what_the_process_takes(emulated: ServerProcess) -> None:
    emulated.predict(ONE)
    text = emulated.rest.get("/monitoring/prometheus/metrics").text
    for part in (
        ':tensorflow:serving:request_count{model_name="m",status="OK"}',
        ':batchtune:serving:batch_close_count{reason="timeout"}',
        ":batchtune:serving:queue_depth_rows{} 0",
        ":batchtune:serving:emulated_device{} 1",
        ":batchtune:serving:process_cpu_micros_total{}",
    ):
        assert part in text


def test_new_batching_parameters_come_into_force_hot(emulated: ServerProcess) -> None:
    wanted = {"enable_batching": True, "max_batch_size": 4, "num_batch_threads": 1}
    answer = emulated.rest.put(TUNING, json=wanted)
    assert answer.json() == {**wanted, "batch_scheduler": "shared"} == emulated.rest.get(TUNING).json()
    said = "Task size 5 is larger than maximum input batch size 4"
    assert emulated.predict({"instances": [[0, 0]] * 5}) == {"error": said}
    refused = emulated.rest.put(TUNING, json={"max_batch_size": 4, "allowed_batch_sizes": [2]})
    assert refused.status_code == 400
    assert "Last entry in allowed_batch_sizes must match max_batch_size" in refused.json()["error"]
    assert emulated.rest.put(TUNING, json={"enable_batching": False}).json() == {"enable_batching": False}
    assert emulated.predict(ONE) == ANSWER
    emulated.rest.put(TUNING, json={"enable_batching": True})


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, str]:
    """A key, and a certificate that is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = {"key": str(tmp_path / "key.pem"), "out": str(tmp_path / "cert.pem")}
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject]
    subprocess.run([*command, "-keyout", files["key"], "-out", files["out"]], check=True, capture_output=True)
    return {name: Path(path).read_text() for name, path in files.items()}


def test_grpc_is_served_by_tls_and_on_a_unix_socket(tmp_path: Path, pem: dict[str, str]) -> None:
    """As tensorflow_model_server does with ssl_config.proto and --grpc_socket_path."""
    fields = {"server_key": pem["key"], "server_cert": pem["out"], "custom_ca": pem["out"]}
    config = tmp_path / "ssl.txt"
    config.write_text(
        "".join(f"{name}: {json.dumps(text)}\n" for name, text in fields.items()) + "client_verify: true"
    )
    socket_path = tmp_path / "grpc.sock"
    flags = [f"--ssl_config_file={config}", f"--grpc_socket_path={socket_path}"]
    named, stranger = (
        grpc.ssl_channel_credentials(pem["out"].encode(), *pair)
        for pair in ((pem["key"].encode(), pem["out"].encode()), (None, None))
    )
    with ServerProcess(write_emulated(tmp_path / "m"), *flags) as server:
        for address in (f"localhost:{server.grpc_port}", f"unix:{socket_path}"):
            for credentials, served in ((named, True), (stranger, False)):
                options = [("grpc.ssl_target_name_override", "localhost")]
                with grpc.secure_channel(address, credentials, options) as channel:
                    answer = channel.unary_unary(PREDICT).future(MESSAGE, timeout=20)
                    assert answer.code() == (grpc.StatusCode.OK if served else grpc.StatusCode.UNAVAILABLE)
        assert server.predict(ONE) == ANSWER  # REST is not encrypted
        assert server.rest.get(TUNING).status_code == 400  # without the flag
        assert server.stop(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("flags", "text", "said"),
    [
        ("--ssl_config_file={file}", "server_key: 7", ":1: server_key must be a quoted string; was 7"),
        ("--ssl_config_file={file}", "key: ''", ":1: unknown field 'key' of SSLConfig"),
        ("--ssl_config_file={file}", "server_key: 'no key'", ": server_key, server_cert or custom_ca: "),
        ("--enable_batching --batching_parameters_file={file}", None, ": No such file or directory"),
        (
            "--enable_batching --batching_parameters_file={file}",
            "max_batch_size { value: 8 } allowed_batch_sizes: 4",
            ": Last entry in allowed_batch_sizes must match max_batch_size; last entry was 4; expected 8",
        ),
    ],
)
def test_a_wrong_file_is_one_clear_error_in_this_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    text: str | None,
    said: str,
) -> None:
    monkeypatch.setattr(program, "share_one_heap", lambda: None)  # it is that of all tests
    if text is not None:
        (tmp_path / "given").write_text(text)
    given = flags.format(file=tmp_path / "given").split()
    assert program.main([f"--model_base_path={tmp_path}", *given]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / 'given'}{said}" in told
    assert told.count("error:") == 1


def test_the_status_can_be_asked_while_a_model_loads_and_a_signal_ends_that(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m", base_ms=30_000)  # its warm-up run takes so long
    with ServerProcess(tmp_path / "m", wait=False) as server:
        wait_for_line(server, "emulated device")
        assert "LOADING" in server.rest.get("/v1/models/m").text
        request = Parse('model_spec { name: "m" }', GetModelStatusRequest())
        status = call_models(server, "GetModelStatus", request, GetModelStatusResponse)
        assert [one.state for one in status.model_version_status] == [ModelVersionStatus.LOADING]
        assert server.stop() == 0


@pytest.mark.slow
def test_a_base_path_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "m", wait=False) as server:
        wait_for_line(server, "Could not find base path")
        write_emulated(tmp_path / "staging")
        (tmp_path / "staging").rename(tmp_path / "m")
        server.wait_until_ready()
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["gone", "full disk", "closed"])
def test_a_server_that_nobody_can_read_serves_new_versions(tmp_path: Path, reader: str) -> None:
    grpc_port, rest_port = free_ports(2)
    model = f"--model_base_path={write_emulated(tmp_path / 'm')}"
    command = [sys.executable, "-m", "batchtune.server", model, "--model_name=m"]
    command += [f"--port={grpc_port}", f"--rest_api_port={rest_port}"]
    if reader == "closed":
        command = ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    def versions() -> dict[str, str]:
        try:
            answer = httpx.get(f"http://127.0.0.1:{rest_port}/v1/models/m", trust_env=False).json()
        except httpx.TransportError:
            return {}
        return {status["version"]: status["state"] for status in answer.get("model_version_status", ())}

    read_end, write_end = os.pipe()
    os.close(read_end)
    with ExitStack() as stack:
        stack.callback(os.close, write_end)
        lines = write_end if reader == "gone" else stack.enter_context(Path("/dev/full").open("w"))
        process = subprocess.Popen(command, stderr=lines, env=buffered)
        stack.callback(process.wait)
        stack.callback(process.kill)
        wait_until(lambda: versions() == {"1": "AVAILABLE"})
        (write_emulated(tmp_path / "staging", version=2) / "2").rename(tmp_path / "m" / "2")
        wait_until(lambda: versions() == {"1": "END", "2": "AVAILABLE"})
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.slow
def test_several_models_with_labels_are_served_and_reloaded(tmp_path: Path) -> None:
    """A reload that cannot be carried out holds up neither good ones nor the end."""
    for name, version in (("a", 1), ("a", 2), ("b", 5)):
        write_emulated(tmp_path / name, version=version)
    config = tmp_path / "models.config"
    of_a = 'model_version_policy { all {} } version_labels { key: "old" value: 1 } } }'
    config.write_text(listed(tmp_path, "a").replace("} }", of_a))
    flags = (f"--model_config_file={config}", "--model_config_file_poll_wait_seconds=1")
    with ServerProcess(None, *flags) as server:
        for named in ("a", "a/versions/1", "a/labels/old"):
            assert server.predict(ONE, path=f"/v1/models/{named}:predict") == ANSWER
        assert "not found" in server.predict(ONE, path="/v1/models/b:predict")["error"]
        assert [reload(server, "n", "a" * 5_000) for _ in range(3)] == ["UNKNOWN"] * 3
        assert reload(server, "n", "a\0b") == "INVALID_ARGUMENT"
        assert reload(server, "b", tmp_path / "b") == "OK"
        assert server.predict(ONE, path="/v1/models/b:predict") == ANSWER
        # The file still lists a: its next reading brings it back.
        wait_until(lambda: server.rest.post("/v1/models/a:predict", json=ONE).status_code == 200)
        assert server.stop() == 0


@pytest.mark.parametrize("others", [[], ["typo"]], ids=["alone", "while another model is waited for"])
def test_sigterm_under_load_answers_what_was_sent(tmp_path: Path, others: list[str]) -> None:
    write_emulated(tmp_path / "m", base_ms=20)
    (tmp_path / "models.config").write_text(listed(tmp_path, "m", *others))
    (tmp_path / "batching.txt").write_text("max_batch_size { value: 4 } num_batch_threads { value: 1 }")
    files = [
        f"--batching_parameters_file={tmp_path / 'batching.txt'}",
        f"--model_config_file={tmp_path / 'models.config'}",
    ]
    with ServerProcess(None, "--enable_batching", *files, wait=False) as server:
        wait_for_line(server, "model m version 1 is available")
        wait_until(lambda: can_connect(server.grpc_port))
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            ask = channel.unary_unary(PREDICT)
            calls = [ask.future(MESSAGE, timeout=20) for _ in range(32)]
            calls[0].result()
            server._process.send_signal(signal.SIGTERM)
            assert {call.code() for call in calls} == {grpc.StatusCode.OK}
        assert server.stop(0) == 0


@pytest.mark.slow
def test_a_mistake_in_the_list_of_models_can_be_mended_while_it_is_waited_for(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m")
    config = tmp_path / "models.config"
    config.write_text(listed(tmp_path, "typo"))
    flags = (f"--model_config_file={config}", "--model_config_file_poll_wait_seconds=1")
    with ServerProcess(None, *flags, wait=False) as server:
        wait_for_line(server, "Could not find base path")
        config.write_text(listed(tmp_path, "m"))
        server.wait_until_ready()
        assert server.stop() == 0


def listed(folder: Path, *names: str) -> str:
    """A text ModelServerConfig of the models in a folder."""
    entries = " ".join(f'config {{ name: "{name}" base_path: "{folder / name}" }}' for name in names)
    return f"model_config_list {{ {entries} }}"


def test_a_second_signal_ends_a_drain_at_once(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m", base_ms=5_000)
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: h\r\ncontent-length: 23\r\n\r\n"
    with (
        ServerProcess(tmp_path / "m", "--enable_model_warmup=false") as server,
        socket.create_connection(("127.0.0.1", server.rest_port)) as client,
    ):
        client.sendall(head + b'{"instances": [[1, 2]]}')
        wait_until(lambda: server.rest.get("/v1/models/m").status_code == 200)
        server._process.send_signal(signal.SIGTERM)
        wait_until(lambda: not can_connect(server.rest_port))
        assert server.stop() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model_base_path={none}", LOOK_ONCE], "Could not find base path {none} for servable default"),
        (["--model_base_path={empty}", LOOK_ONCE], "Did you forget to name your leaf directory as a number"),
        (["--model_base_path={broken}"], "due to error: INVALID_ARGUMENT: {broken}/1/emulated.yaml"),
        (["--host=192.0.2.1"], "error: cannot listen on 192.0.2.1:"),
        (
            ["--port={taken}"],
            "127.0.0.1:{taken}: address already in use\nhint: choose other ports with --port and --rest_api_port\n",
        ),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_error(
    tmp_path: Path, emulated: ServerProcess, flags: list[str], said: str
) -> None:
    names = {name: str(tmp_path / name) for name in ("none", "empty", "broken")}
    names["taken"] = str(emulated.grpc_port)
    (tmp_path / "empty").mkdir()
    write_emulated(tmp_path / "broken", base_ms=-1)
    good = f"--model_base_path={write_emulated(tmp_path / 'good')}"
    given = [flag.format(**names) for flag in flags]
    finished = run_to_end(good, *ServerProcess.free_ports(), *given)
    assert finished.returncode == 1
    assert said.format(**names) in finished.stderr
    assert "Traceback" not in finished.stderr
    assert len([line for line in finished.stderr.splitlines() if line.startswith("error:")]) == 1
