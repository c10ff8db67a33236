"""The server process: real clients get the model's own scores, mistakes are one line, an end loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from batchtune.server import __main__ as program
from batchtune.wire.grpc.client_connection import GrpcClientConnection, prepare_call
from batchtune.wire.tfserving.messages import (
    GetModelStatusRequest,
    ModelVersionStatus,
    PredictRequest,
    PredictResponse,
    ReloadConfigRequest,
    ReloadConfigResponse,
)
from batchtune.wire.tfserving.tensors import decode_predict_response, encode_predict_request
from tests.server.server_process import ServerProcess, free_ports, run_to_end, write_emulated
from tests.waiting import wait_until
from tests.wire.tensor_protos import tensor_to_proto

LOOK_ONCE = "--file_system_poll_wait_seconds=0"
METRICS = "/monitoring/prometheus/metrics"


def call(server: ServerProcess, method: str, request: Any, answer: Any) -> Any:
    """A unary call by grpcio."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = channel.unary_unary(
            f"/tensorflow.serving.{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return stub(request, timeout=20)


def predict_request(**inputs: np.ndarray) -> PredictRequest:
    request = PredictRequest()
    request.model_spec.name = "m"
    for name, array in inputs.items():
        request.inputs[name].CopyFrom(tensor_to_proto(array, as_content=True))
    return request


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("emulated")
    monitoring = directory / "monitoring.txt"
    monitoring.write_text("prometheus_config { enable: true }")
    flags = (f"--monitoring_config_file={monitoring}", "--enable_tuning_api", "--enable_batching")
    with ServerProcess(write_emulated(directory / "m"), *flags) as server:
        yield server


def test_the_ready_line_names_the_ports_and_an_emulated_device_is_called_one(emulated: ServerProcess) -> None:
    ready = f"gRPC on 127.0.0.1:{emulated.grpc_port}, REST on 127.0.0.1:{emulated.rest_port}, ready"
    assert emulated.lines[-1] == f"batchtune-model-server: {ready}\n"
    assert any("model m version 1 is an emulated device, not a model" in line for line in emulated.lines)


def test_a_line_says_what_a_version_takes_and_how_it_is_batched(emulated: ServerProcess) -> None:
    (line,) = [line for line in emulated.lines if "is available" in line]
    assert line.startswith(
        "batchtune-model-server: model m version 1 is available: serving_default(x: float32 [?,2]) -> "
        "(y: float32 [?,2]); max_batch_size 1000, batch_timeout_micros 0, max_enqueued_batches 10, num_batch_threads "
    )


def test_rest_and_grpc_answer_the_same(emulated: ServerProcess) -> None:
    x = np.array([[1, 2], [3, 4]], np.float32)
    assert emulated.predict({"instances": x.tolist()}) == {"predictions": [[3.0, 4.0], [7.0, 8.0]]}
    response = call(emulated, "PredictionService/Predict", predict_request(x=x), PredictResponse)
    outputs = decode_predict_response(response.SerializeToString())
    np.testing.assert_array_equal(outputs["y"], [[3, 4], [7, 8]])


def test_curl_gets_the_status(emulated: ServerProcess) -> None:
    url = f"http://127.0.0.1:{emulated.rest_port}/v1/models/m"
    shown = subprocess.run(
        ["curl", "-s", "--noproxy", "*", url], check=True, capture_output=True, text=True
    ).stdout
    assert '"AVAILABLE"' in shown


def test_metrics_count_requests_batches_and_the_emulated_device(emulated: ServerProcess) -> None:
    emulated.predict({"instances": [[1, 2]]})
    text = emulated.rest.get(METRICS).text
    for part in (
        ':tensorflow:serving:request_count{model_name="m",status="OK"}',
        ":tensorflow:serving:batching_session:wrapped_run_count{}",
        ':batchtune:serving:batch_close_count{reason="timeout"}',
        ":batchtune:serving:queue_depth_rows{} 0",
        ":batchtune:serving:emulated_device{} 1",
        ":batchtune:serving:process_cpu_micros_total{}",
    ):
        assert part in text


def test_new_batching_parameters_come_into_force_hot(emulated: ServerProcess) -> None:
    path = "/v1/tuning/batching_parameters"
    wanted = {"enable_batching": True, "max_batch_size": 4, "num_batch_threads": 1}
    answer = emulated.rest.put(path, json=wanted)
    assert answer.json() == {**wanted, "batch_scheduler": "shared"}
    assert emulated.rest.get(path).json() == answer.json()
    assert emulated.rest.post("/v1/models/m:predict", json={"instances": [[0, 0]] * 5}).json() == {
        "error": "Task size 5 is larger than maximum input batch size 4"
    }
    refused = emulated.rest.put(path, json={"max_batch_size": 4, "allowed_batch_sizes": [2]})
    assert refused.status_code == 400
    assert "Last entry in allowed_batch_sizes must match max_batch_size" in refused.json()["error"]
    assert emulated.rest.put(path, json={"enable_batching": False}).json() == {"enable_batching": False}
    assert emulated.predict({"instances": [[1, 2]]}) == {"predictions": [[3.0, 4.0]]}
    emulated.rest.put(path, json={"enable_batching": True})


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the program says of flags that it refuses, in this process: no server is made."""
    monkeypatch.setattr(program, "share_one_heap", lambda: None)  # it is that of all tests

    def told(*flags: str) -> str:
        assert program.main(flags) == 2
        return capsys.readouterr().err

    return told


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


def test_grpc_is_served_by_tls_to_clients_with_a_certificate_and_on_a_unix_socket(
    tmp_path: Path, pem: dict[str, str]
) -> None:
    """As tensorflow_model_server does with ssl_config.proto and --grpc_socket_path."""
    fields = {"server_key": pem["key"], "server_cert": pem["out"], "custom_ca": pem["out"]}
    config = tmp_path / "ssl.txt"
    config.write_text(
        "".join(f"{name}: {json.dumps(text)}\n" for name, text in fields.items()) + "client_verify: true"
    )
    socket_path = tmp_path / "grpc.sock"
    flags = [f"--ssl_config_file={config}", f"--grpc_socket_path={socket_path}"]
    request = predict_request(x=np.ones((1, 2), np.float32)).SerializeToString()
    named, stranger = (
        grpc.ssl_channel_credentials(pem["out"].encode(), *pair)
        for pair in ((pem["key"].encode(), pem["out"].encode()), (None, None))
    )
    with ServerProcess(write_emulated(tmp_path / "m"), *flags) as server:
        for address in (f"localhost:{server.grpc_port}", f"unix:{socket_path}"):
            for credentials, served in ((named, True), (stranger, False)):
                options = [("grpc.ssl_target_name_override", "localhost")]
                with grpc.secure_channel(address, credentials, options) as channel:
                    ask = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
                    answer = ask.future(request, timeout=20)
                    assert answer.code() == (grpc.StatusCode.OK if served else grpc.StatusCode.UNAVAILABLE)
        assert server.predict({"instances": [[1, 2]]}) == {
            "predictions": [[3.0, 4.0]]
        }  # REST is not encrypted
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server_key: 7", ":1: server_key must be a quoted string; was 7"),
        ("key: ''", ":1: unknown field 'key' of SSLConfig"),
        ("server_key: 'no key'", ": server_key, server_cert or custom_ca: "),
    ],
)
def test_a_wrong_ssl_config_is_told_at_the_start(
    tmp_path: Path, refused: Callable[..., str], text: str, said: str
) -> None:
    (tmp_path / "ssl.txt").write_text(text)
    told = refused("--model_base_path=/m", f"--ssl_config_file={tmp_path / 'ssl.txt'}")
    assert f"error: --ssl_config_file={tmp_path / 'ssl.txt'}{said}" in told


def test_without_the_flag_there_is_no_tuning_api(tmp_path: Path) -> None:
    with ServerProcess(write_emulated(tmp_path / "m")) as server:
        assert server.rest.get("/v1/tuning/batching_parameters").status_code != 200
        assert server.stop(signal.SIGINT) == 0


def test_the_status_can_be_asked_while_a_model_loads(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m", base_ms=700)  # its warm-up run takes so long
    with ServerProcess(tmp_path / "m", wait=False) as server:
        states: list[str] = []

        def asked() -> bool:
            try:
                states.append(server.rest.get("/v1/models/m").text)
            except httpx.TransportError:
                return False
            return "AVAILABLE" in states[-1]

        wait_until(asked)
        assert any("LOADING" in state for state in states)
        server.wait_until_ready()
        request = GetModelStatusRequest()
        request.model_spec.name = "m"
        from batchtune.wire.tfserving.messages import GetModelStatusResponse

        status = call(server, "ModelService/GetModelStatus", request, GetModelStatusResponse)
        assert [one.state for one in status.model_version_status] == [ModelVersionStatus.AVAILABLE]


def test_a_signal_while_a_model_loads_ends_the_process(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m", base_ms=30_000)
    with ServerProcess(tmp_path / "m", wait=False) as server:
        wait_until(lambda: any("emulated device" in line for line in server.lines))
        assert server.stop() == 0


def test_a_base_path_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "m", wait=False) as server:
        wait_until(lambda: any("Could not find base path" in line for line in server.lines))
        write_emulated(tmp_path / "staging")
        (tmp_path / "staging").rename(tmp_path / "m")
        server.wait_until_ready()
        assert server.stop() == 0


@pytest.mark.slow
def test_a_server_whose_lines_nobody_can_read_serves_new_versions_and_stops(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(unheard(reader, tmp_path / reader))
            for reader in ("gone", "full disk", "closed")
        ]
        for server in servers:
            wait_until(lambda server=server: server.versions() == {"1": "AVAILABLE"})
            staging = write_emulated(tmp_path / "staging" / server.model.name, version=2)
            (staging / "2").rename(server.model / "2")
        for server in servers:
            wait_until(lambda server=server: server.versions() == {"1": "END", "2": "AVAILABLE"})
            server.process.terminate()
        assert [server.process.wait(20) for server in servers] == [0, 0, 0]


@dataclass
class Unheard:
    """A server that runs, and whose lines come nowhere."""

    process: subprocess.Popen[bytes]
    model: Path
    url: str

    def versions(self) -> dict[str, str]:
        try:
            answer = httpx.get(self.url, trust_env=False).json()
        except httpx.TransportError:
            return {}
        return {status["version"]: status["state"] for status in answer.get("model_version_status", ())}


@contextmanager
def unheard(reader: str, model: Path) -> Iterator[Unheard]:
    write_emulated(model)
    grpc_port, rest_port = free_ports(2)
    lines_end, write_end = os.pipe()
    os.close(lines_end)
    stderr = {"gone": write_end, "full disk": os.open("/dev/full", os.O_WRONLY), "closed": None}[reader]
    command = [sys.executable, "-m", "batchtune.server", f"--model_base_path={model}", "--model_name=m"]
    command += [f"--port={grpc_port}", f"--rest_api_port={rest_port}"]
    if reader == "closed":
        command = ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, stderr=stderr, env=buffered)
    try:
        yield Unheard(process, model, f"http://127.0.0.1:{rest_port}/v1/models/m")
    finally:
        process.kill()
        process.wait()
        os.close(write_end)


def test_several_models_with_labels_are_served_and_reloaded(tmp_path: Path) -> None:
    write_emulated(tmp_path / "a", version=1)
    write_emulated(tmp_path / "a", version=2)
    write_emulated(tmp_path / "b", version=5)
    config = tmp_path / "models.config"
    listed = (
        f'config {{ name: "a" base_path: "{tmp_path / "a"}" model_platform: "tensorflow" '
        'model_version_policy { all {} } version_labels { key: "old" value: 1 } }'
    )
    config.write_text(f"model_config_list {{ {listed} }}")
    with ServerProcess(
        None, f"--model_config_file={config}", "--model_config_file_poll_wait_seconds=1"
    ) as server:
        body = {"instances": [[1, 2]]}
        for path in (
            "/v1/models/a:predict",
            "/v1/models/a/versions/1:predict",
            "/v1/models/a/labels/old:predict",
        ):
            assert server.predict(body, path=path) == {"predictions": [[3.0, 4.0]]}
        assert "not found" in server.predict(body, path="/v1/models/b:predict")["error"]
        request = ReloadConfigRequest()
        request.config.model_config_list.config.add(name="b", base_path=str(tmp_path / "b"))
        call(server, "ModelService/HandleReloadConfigRequest", request, ReloadConfigResponse)
        assert server.predict(body, path="/v1/models/b:predict") == {"predictions": [[3.0, 4.0]]}
        wait_until(lambda: server.rest.post("/v1/models/a:predict", json=body).status_code in {200, 404})
        # The file still lists a: its next reading brings it back.
        wait_until(lambda: server.rest.post("/v1/models/a:predict", json=body).status_code == 200)
        assert server.stop() == 0


def test_reloads_that_cannot_be_carried_out_hold_up_neither_good_ones_nor_the_end(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m")
    with ServerProcess(tmp_path / "m") as server:

        def reload_from(base_path: str, name: str = "m") -> str:
            request = ReloadConfigRequest()
            request.config.model_config_list.config.add(name=name, base_path=base_path)
            try:
                call(server, "ModelService/HandleReloadConfigRequest", request, ReloadConfigResponse)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        assert [reload_from("a" * 5_000, name="n") for _ in range(3)] == ["UNKNOWN"] * 3
        assert reload_from("a\0b", name="n") == "INVALID_ARGUMENT"
        assert reload_from(str(tmp_path / "m")) == "OK"
        assert server.stop() == 0


def test_a_new_version_takes_over_while_requests_run(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m", version=1, base_ms=1)
    with ServerProcess(tmp_path / "m", "--enable_batching") as server:
        stop = threading.Event()
        failures: list[str] = []

        def client() -> None:
            with httpx.Client(base_url=server.rest.base_url, trust_env=False) as rest:
                while not stop.is_set():
                    answer = rest.post("/v1/models/m:predict", json={"instances": [[1, 2]]})
                    if answer.status_code != 200:
                        failures.append(answer.text)

        clients = [threading.Thread(target=client) for _ in range(4)]
        for one in clients:
            one.start()
        write_emulated(tmp_path / "staging", version=2)
        (tmp_path / "staging" / "2").rename(tmp_path / "m" / "2")
        wait_until(lambda: any("version 1 is unloaded" in line for line in server.lines))
        stop.set()
        for one in clients:
            one.join()
        assert failures == []


def test_sigterm_under_load_answers_what_was_sent(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m", base_ms=20)
    parameters = tmp_path / "batching.txt"
    parameters.write_text("max_batch_size { value: 4 } num_batch_threads { value: 1 }")
    flags = ("--enable_batching", f"--batching_parameters_file={parameters}")
    with ServerProcess(tmp_path / "m", *flags) as server:
        answered = asyncio.run(send_then_stop(server, requests=32))
        assert answered == [0] * 32
        assert server.stop(0) == 0


def test_while_a_model_is_waited_for_another_s_requests_are_answered_at_sigterm(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m", base_ms=20)
    config = tmp_path / "models.config"
    config.write_text(listed(tmp_path, "m", "typo"))
    parameters = tmp_path / "batching.txt"
    parameters.write_text("max_batch_size { value: 4 } num_batch_threads { value: 1 }")
    flags = ("--enable_batching", f"--batching_parameters_file={parameters}", f"--model_config_file={config}")
    with ServerProcess(None, *flags, wait=False) as server:
        wait_until(lambda: any("model m version 1 is available" in line for line in server.lines))
        assert asyncio.run(send_then_stop(server, requests=32)) == [0] * 32
        assert server.stop(0) == 0


@pytest.mark.slow
def test_a_mistake_in_the_list_of_models_can_be_mended_while_it_is_waited_for(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m")
    config = tmp_path / "models.config"
    config.write_text(listed(tmp_path, "typo"))
    flags = (f"--model_config_file={config}", "--model_config_file_poll_wait_seconds=1")
    with ServerProcess(None, *flags, wait=False) as server:
        wait_until(lambda: any("Could not find base path" in line for line in server.lines))
        config.write_text(listed(tmp_path, "m"))
        server.wait_until_ready()
        assert server.stop() == 0


def listed(folder: Path, *names: str) -> str:
    """A text ModelServerConfig of the models in a folder."""
    entries = " ".join(f'config {{ name: "{name}" base_path: "{folder / name}" }}' for name in names)
    return f"model_config_list {{ {entries} }}"


async def send_then_stop(server: ServerProcess, *, requests: int) -> list[int]:
    """Send at once, let the server be told to stop after the first answer; the status of every call."""
    statuses: list[int] = []
    ready, finished = asyncio.Event(), asyncio.Event()

    def on_done(_tag: int, status: int, _message: bytes, _text: str) -> None:
        if not statuses:
            server._process.send_signal(signal.SIGTERM)
        statuses.append(status)
        if len(statuses) == requests:
            finished.set()

    def on_lost(_connection: object, tags: list[int], _reason: str) -> None:
        statuses.extend([-1] * len(tags))
        finished.set()

    loop = asyncio.get_running_loop()
    transport, connection = await loop.create_connection(
        lambda: GrpcClientConnection(on_done, on_lost, lambda _connection: ready.set()),
        "127.0.0.1",
        server.grpc_port,
    )
    await ready.wait()
    body = encode_predict_request("m", "serving_default", {"x": np.ones((1, 2), np.float32)})
    prepared = prepare_call("/tensorflow.serving.PredictionService/Predict", "localhost", body)
    for tag in range(requests):
        connection.call(prepared, tag)
    connection.flush()
    await asyncio.wait_for(finished.wait(), 20)
    transport.close()
    return statuses


def test_a_second_signal_ends_a_drain_at_once(tmp_path: Path) -> None:
    write_emulated(tmp_path / "m", base_ms=5_000)
    body = b'{"instances": [[1, 2]]}'
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
    with (
        ServerProcess(tmp_path / "m", "--enable_model_warmup=false") as server,
        socket.create_connection(("127.0.0.1", server.rest_port)) as client,
    ):
        client.sendall(head + body)
        wait_until(lambda: server.rest.get("/v1/models/m").status_code == 200)
        server._process.send_signal(signal.SIGTERM)
        wait_until(lambda: not can_connect(server.rest_port))
        assert server.stop() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_signal_while_a_later_version_loads_ends_the_process(tmp_path: Path) -> None:
    """Though a load cannot be interrupted; who waits for it over gRPC is told."""
    write_emulated(tmp_path / "m")
    with (
        ServerProcess(tmp_path / "m") as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        write_emulated(tmp_path / "new" / "m", version=2, base_ms=90_000)  # its warm-up run takes so long
        reload = ReloadConfigRequest()
        config = reload.config.model_config_list.config.add(name="m", base_path=str(tmp_path / "new" / "m"))
        config.model_version_policy.specific.versions.append(2)
        answer = channel.unary_unary("/tensorflow.serving.ModelService/HandleReloadConfigRequest").future(
            reload.SerializeToString(), timeout=60
        )
        status = "/v1/models/m/versions/2"
        wait_until(lambda: "LOADING" in server.rest.get(status).text)
        assert server.predict({"instances": [[1, 2]]}) == {"predictions": [[3.0, 4.0]]}
        assert server.stop() == 0
        assert answer.code() == grpc.StatusCode.UNAVAILABLE
        assert answer.details() == "The server is shutting down"


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--enable_bathing"],
            "error: unknown argument: --enable_bathing\nhint: did you mean --enable_batching?",
        ),
        (
            ["--batching_parameters_file={bad}"],
            "error: server_options.batching_parameters_file is set without setting server_options.enable_batching",
        ),
        (
            ["--enable_batching", "--batching_parameters_file={bad}"],
            "error: {bad}: Last entry in allowed_batch_sizes must match max_batch_size; last entry was 4; expected 8",
        ),
        (["--enable_batching", "--batching_parameters_file={none}"], "No such file or directory"),
    ],
)
def test_a_wrong_flag_is_one_clear_error(
    tmp_path: Path, refused: Callable[..., str], flags: list[str], said: str
) -> None:
    paths = {name: str(tmp_path / name) for name in ("bad", "none")}
    (tmp_path / "bad").write_text("max_batch_size { value: 8 } allowed_batch_sizes: 4")
    told = refused(f"--model_base_path={tmp_path}", *(flag.format(**paths) for flag in flags))
    assert said.replace("{bad}", paths["bad"]) in told
    assert told.count("error:") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model_base_path={none}", LOOK_ONCE], "Could not find base path {none} for servable default"),
        (["--model_base_path={empty}", LOOK_ONCE], "Did you forget to name your leaf directory as a number"),
        (
            ["--model_base_path={broken}"],
            "version: 1} due to error: INVALID_ARGUMENT: {broken}/1/emulated.yaml",
        ),
        (["--host=192.0.2.1"], "error: cannot listen on 192.0.2.1:"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_error(
    tmp_path: Path, flags: list[str], said: str
) -> None:
    paths = {name: str(tmp_path / name) for name in ("none", "empty", "broken", "good")}
    (tmp_path / "empty").mkdir()
    write_emulated(tmp_path / "broken", base_ms=-1)
    write_emulated(tmp_path / "good")
    given = [flag.format(**paths) for flag in flags]
    ports = ServerProcess.free_ports()
    finished = run_to_end(f"--model_base_path={paths['good']}", *ports, *given)
    for name, path in paths.items():
        said = said.replace(f"{{{name}}}", path)
    assert finished.returncode == 1
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr
    assert len([line for line in finished.stderr.splitlines() if line.startswith("error:")]) == 1


def test_a_port_in_use_is_one_clear_error(tmp_path: Path, emulated: ServerProcess) -> None:
    base_path = write_emulated(tmp_path / "m")
    finished = run_to_end(f"--model_base_path={base_path}", f"--port={emulated.grpc_port}")
    assert finished.returncode == 1
    assert finished.stderr == (
        f"error: cannot listen on 127.0.0.1:{emulated.grpc_port}: address already in use\n"
        "hint: choose other ports with --port and --rest_api_port\n"
    )
