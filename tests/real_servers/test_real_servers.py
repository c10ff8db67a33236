"""Do the servers that people run take their parameters, serve, and end in an answer that fresh loads confirm?

Each server has an environment of its own, as their pins clash: made by pip on first use and kept in $BATCHTUNE_SERVERS, or
for this session only. All of them: `pytest -m real_servers tests/real_servers`. LitServe's is made by .ci/run, where its
test is marked slow.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.real_servers.environments import APPS, SERVERS, app_of, path_with
from tests.server.server_process import free_ports
from tests.waiting import wait_until


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The PATH that has a server's programs first; skips where pip cannot have it."""
    root = Path(os.environ.get("BATCHTUNE_SERVERS") or tmp_path_factory.mktemp("servers"))

    def path_of(server: str) -> str:
        try:
            return path_with(server, root)
        except RuntimeError as error:
            pytest.skip(str(error))

    return path_of


def batchtune(
    path: str, folder: Path, *words: str, limit_s: float = 400.0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "batchtune", *words],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "server",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "litserve" else pytest.mark.real_servers)
        for name in SERVERS
    ],
)
def test_a_sweep_of_a_real_server_names_its_trap_and_answers(
    server: str, programs: Callable[[str], str], tmp_path: Path
) -> None:
    """The answer is one of the space or no batching, held at some rate; how good it is depends on the machine's peace."""
    path = programs(server)
    limits = (
        [] if SERVERS[server].writes_app else ["--slo-p95", "200ms"]
    )  # a language model's are the preset's
    words = ["sweep", app_of(server, path, tmp_path), "--server", server, *limits, "--json"]
    done = batchtune(path, tmp_path, *words, "--budget", "60s")
    assert SERVERS[server].trap in done.stderr, done.stderr
    assert done.returncode in (0, 3, 5), done.stderr
    ledgers = list(tmp_path.glob("results/*/*/trials.jsonl"))
    trials = [json.loads(line) for line in ledgers[0].read_text().splitlines()]
    assert [trial for trial in trials if trial["state"] == "complete"], done.stderr
    assert not [trial for trial in trials if trial["state"] == "failed"], done.stderr
    answered = [trial["measurement"]["throughput_rps"] for trial in trials]
    assert all(answered)


def has_now(server: str, address: str, file: Path) -> Any:
    """What must be there again after a sweep."""
    if server == "mlserver":
        return file.read_text(encoding="utf-8")
    return httpx.get(f"{address}/api/serve/applications/").json()["applications"]["default"][
        "deployed_app_config"
    ]


@contextmanager
def running(server: str, path: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """A server that somebody else started: the address to attach to, and the file of its settings."""
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(APPS), "RAY_AUTH_MODE": "disabled"}
    ports = dict(
        zip(("MLSERVER_HTTP_PORT", "MLSERVER_GRPC_PORT", "MLSERVER_METRICS_PORT"), free_ports(3), strict=True)
    )
    settings: dict[str, Any] = {"max_batch_size": 4, "batch_wait_timeout_s": 0.02}
    if server == "mlserver":
        file = folder / "models" / "Model" / "model-settings.json"
        tensors = {
            name: [{"name": name, "datatype": "FP32", "shape": [-1, 4]}] for name in ("input", "output")
        }
        document = {"name": "Model", "implementation": "mlserver_app.Model", "max_batch_size": 4}
        document |= {"max_batch_time": 0.02, "inputs": tensors["input"], "outputs": tensors["output"]}
        command, port = ["mlserver", "start", str(folder / "models")], ports["MLSERVER_HTTP_PORT"]
        address, ready = f"http://127.0.0.1:{port}", "/v2/models/Model/ready"
    else:
        file = folder / "serve.json"
        deployment = {"name": "Model", "max_ongoing_requests": 20, "user_config": settings}
        application = {"name": "default", "route_prefix": "/", "import_path": "ray_app:app"}
        document = {"applications": [{**application, "deployments": [deployment]}]}
        command = ["serve", "run", str(file)]
        address, ready = "http://127.0.0.1:8265", "/api/serve/applications/"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document), encoding="utf-8")
    environment |= {name: str(port) for name, port in ports.items()}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until(lambda: is_up(f"{address}{ready}"), limit_s=120)
        yield address, file
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def is_up(url: str) -> bool:
    try:
        answer = httpx.get(url)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and ("applications" not in url or "RUNNING" in answer.text)


@pytest.mark.real_servers
@pytest.mark.timeout(900)
@pytest.mark.parametrize("server", ["mlserver", "ray-serve"])
def test_a_server_that_runs_is_attached_to_by_its_address_and_put_back(
    server: str, programs: Callable[[str], str], tmp_path: Path
) -> None:
    """After a sweep, and by `restore` after a sweep that was killed; it is never restarted."""
    path = programs(server)
    with running(server, path, tmp_path) as (address, file):
        before = has_now(server, address, file)
        sweep = ["sweep", address, "--slo-p95", "5s", "--budget", "20s"]  # kept on a busy machine too
        done = batchtune(path, tmp_path, *sweep, "--json")
        assert done.returncode in (0, 3, 5), done.stderr
        answer = json.loads(done.stdout)
        assert "present" in {
            *answer["names"],
            *(name for other in answer["references"] for name in other["names"]),
        }
        assert has_now(server, address, file) == before
        with subprocess.Popen(
            [sys.executable, "-m", "batchtune", *sweep],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as killed:
            wait_until(lambda: has_now(server, address, file) != before, limit_s=60)
            killed.kill()
        assert has_now(server, address, file) != before
        run = max(tmp_path.glob("results/*/*"), key=lambda folder: folder.name)
        restored = batchtune(path, tmp_path, "restore", str(run))
        assert restored.returncode == 0, restored.stderr
        assert has_now(server, address, file) == before
