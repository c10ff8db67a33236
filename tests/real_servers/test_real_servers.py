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

from tests.benchmarks.commands import batchtune
from tests.real_servers.environments import APPS, SERVERS, app_of, path_with
from tests.server.server_process import free_ports
from tests.waiting import wait_until

BATCHTUNE = [sys.executable, "-m", "batchtune"]
DONE = (0, 3, 5)


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


@pytest.fixture(autouse=True)
def path(server: str, programs: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The PATH of everything that a test of this server starts."""
    found = programs(server)
    monkeypatch.setenv("PATH", found)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "server",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "litserve" else pytest.mark.real_servers)
        for name in SERVERS
    ],
)
def test_a_sweep_of_a_real_server_names_its_trap_and_answers(server: str, path: str, tmp_path: Path) -> None:
    """The answer is one of the space or no batching, held at some rate; how good it is depends on the machine's peace."""
    served = SERVERS[server]
    limits = [] if served.writes_app else ["--slo-p95", "200ms"]  # a language model's are the preset's
    app = app_of(server, path, tmp_path)
    done = batchtune("sweep", app, "--server", server, *limits, "--budget", "60s", cwd=tmp_path)
    assert served.trap in done.errors
    assert done.code in DONE, done.errors
    (ledger,) = tmp_path.glob("results/*/*/trials.jsonl")
    trials = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert {trial["state"] for trial in trials} == {"complete"}, done.errors
    assert all(trial["measurement"]["throughput_rps"] for trial in trials)


def has_now(address: str, file: Path) -> Any:
    """What must be there again after a sweep: MLServer's file, or what Ray's dashboard says."""
    if file.name == "model-settings.json":
        return file.read_text(encoding="utf-8")
    applications = httpx.get(f"{address}/api/serve/applications/").json()["applications"]
    return applications["default"]["deployed_app_config"]


@contextmanager
def running(server: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """A server that somebody else started: the address to attach to, and the file of its settings."""
    environment = {**os.environ, "PYTHONPATH": str(APPS), "RAY_AUTH_MODE": "disabled"}
    ports = free_ports(3)
    for name, port in zip(("HTTP", "GRPC", "METRICS"), ports, strict=True):
        environment[f"MLSERVER_{name}_PORT"] = str(port)
    if server == "mlserver":
        file = folder / "models" / "Model" / "model-settings.json"
        document: dict[str, Any] = {
            "name": "Model",
            "implementation": "mlserver_app.Model",
            "max_batch_size": 4,
            "max_batch_time": 0.02,
            "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 4]}],
        }
        command, address = ["mlserver", "start", str(folder / "models")], f"http://127.0.0.1:{ports[0]}"
        ready = f"{address}/v2/models/Model/ready"
    else:
        file = folder / "serve.json"
        settings = {"max_batch_size": 4, "batch_wait_timeout_s": 0.02}
        deployment = {"name": "Model", "max_ongoing_requests": 20, "user_config": settings}
        application = {"name": "default", "route_prefix": "/", "import_path": "ray_app:app"}
        document = {"applications": [{**application, "deployments": [deployment]}]}
        command, address = ["serve", "run", str(file)], "http://127.0.0.1:8265"
        ready = f"{address}/api/serve/applications/"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document), encoding="utf-8")
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: is_up(ready), limit_s=120)
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
def test_a_server_that_runs_is_attached_to_by_its_address_and_put_back(server: str, tmp_path: Path) -> None:
    """After a sweep, and by `restore` after a sweep that was killed; it is never restarted."""
    with running(server, tmp_path) as (address, file):
        before = has_now(address, file)
        sweep = ["sweep", address, "--slo-p95", "5s", "--budget", "20s"]  # kept on a busy machine too
        done = batchtune(*sweep, cwd=tmp_path)
        assert done.code in DONE, done.errors
        answers = [done.document, *done.document["references"]]
        assert any("present" in answer["names"] for answer in answers)
        assert has_now(address, file) == before
        quiet = subprocess.DEVNULL
        with subprocess.Popen([*BATCHTUNE, *sweep], cwd=tmp_path, stdout=quiet, stderr=quiet) as killed:
            wait_until(lambda: has_now(address, file) != before, limit_s=60)
            killed.kill()
        assert has_now(address, file) != before
        run = max(tmp_path.glob("results/*/*"), key=lambda folder: folder.name)
        subprocess.run([*BATCHTUNE, "restore", run], cwd=tmp_path, check=True)
        assert has_now(address, file) == before
