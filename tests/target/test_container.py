"""A server in a container counts as the server. A stand-in takes the place of `docker`: no engine is needed.

What only an engine can show is not tested: that its `inspect` tells the host's pid of the container's first process
(rootless and remote engines may not), and the control group that its runtime makes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from batchtune.target.process import (
    Container,
    container_of,
    group_cpu_s,
    group_memory_peak_bytes,
    process_cpu_s,
    tree_cpu_clock,
    tree_cpu_s,
    tree_memory_peak_bytes,
)
from tests.target.running_process import running_process
from tests.target.stand_in_docker import StandInDocker
from tests.waiting import wait_until

BUSY = """#!PYTHON
import time
while time.process_time() < 0.3: pass
time.sleep(60)
"""
LISTENING = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts the server in a session of its own, out of the tree of whoever called."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    (tmp_path / "busy").write_text(BUSY.replace("PYTHON", sys.executable))
    (tmp_path / "busy").chmod(0o755)
    docker = StandInDocker(tmp_path, server=tmp_path / "busy")
    return [str(docker.program), "run", "tensorflow/serving"]


def test_the_time_of_a_server_that_an_engine_started_is_counted(command: list[str], tmp_path: Path) -> None:
    with running_process(command, log_path=tmp_path / "log") as server:
        wait_until(lambda: (server.cpu_s() or 0.0) >= 0.3)


def test_a_container_that_cannot_be_asked_makes_the_time_unknown_not_small(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2375")
    with running_process(command, log_path=tmp_path / "log") as server:
        assert server.running
        assert server.cpu_s() is None


def test_a_script_that_starts_the_server_elsewhere_does_not_pass_for_it(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        running_process([sys.executable, "-c", LISTENING], log_path=tmp_path / "log") as server,
    ):
        wait_until((tmp_path / "log").read_text)
        server.look_for_listener(int((tmp_path / "log").read_text()))
        assert server.cpu_s() is not None
        server.look_for_listener(listener.getsockname()[1])
        assert server.cpu_s() is None


def test_only_a_container_program_that_runs_one_is_taken_for_one(tmp_path: Path) -> None:
    found = container_of(["/usr/bin/podman", "run", "--rm", "image"], tmp_path / "id")
    assert isinstance(found, Container)
    assert found.run_command == ("/usr/bin/podman", "run", f"--cidfile={tmp_path / 'id'}", "--rm", "image")
    assert container_of(["tensorflow_model_server"], tmp_path / "id") is None
    for others in (["docker", "compose", "run", "service"], ["docker", "exec", "server", "run"]):
        assert container_of(others, tmp_path / "id") is None
    own = container_of(["docker", "run", "--cidfile=mine", "image"], tmp_path / "id")
    assert own is not None
    assert own.run_command == ("docker", "run", "--cidfile=mine", "image")


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


STAT = "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\n"


@pytest.mark.parametrize(
    ("group", "ours", "file", "text", "cpu_s"),
    [
        ("0::/docker-4f2a\n", "0::/user\n", "docker-4f2a/cpu.stat", STAT, 2.5),
        ("5:memory:/d\n4:cpu,cpuacct:/d\n", "", "cpu,cpuacct/d/cpuacct.usage", "1500000000\n", 1.5),
        ("0::/user\n", "0::/user\n", "user/cpu.stat", STAT, None),
    ],
    ids=["second version", "first version", "ours too"],
)
def test_a_control_group_that_is_not_ours_tells_its_time(
    tmp_path: Path, group: str, ours: str, file: str, text: str, cpu_s: float | None
) -> None:
    write(tmp_path, **{"proc/77/cgroup": group, "proc/self/cgroup": ours, f"sys/fs/cgroup/{file}": text})
    assert group_cpu_s(77, root=tmp_path) == cpu_s


def test_a_control_group_tells_the_most_memory_that_it_held(tmp_path: Path) -> None:
    group = "5:memory:/docker/4f2a\n0::/docker-4f2a\n"
    first = "sys/fs/cgroup/memory/docker/4f2a/memory.max_usage_in_bytes"
    for name, text, peak_bytes in (
        ("proc/77/cgroup", group, None),
        ("sys/fs/cgroup/docker-4f2a/memory.peak", "1000\n", 1000),
        (first, "2000\n", 2000),
        ("proc/self/cgroup", group, None),
    ):
        write(tmp_path, **{name: text})
        assert group_memory_peak_bytes(77, root=tmp_path) == peak_bytes


def test_a_process_tells_the_most_memory_that_it_held_not_what_it_holds() -> None:
    """A child that touches 64 MB and gives them back."""
    program = "import sys; x = bytearray(64 << 20); del x; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        peak = tree_memory_peak_bytes(child.pid)
        assert peak is not None
        assert peak > psutil.Process(child.pid).memory_info().rss + (48 << 20)
        child.kill()
    assert tree_memory_peak_bytes(child.pid) is None


def test_the_cpu_time_of_a_process_is_finer_than_a_tick() -> None:
    own = psutil.Process()
    for _ in range(20):
        before_s, used_s, after_s = time.process_time(), process_cpu_s(own), time.process_time()
        assert before_s <= used_s <= after_s


def test_a_process_that_is_gone_has_no_cpu_time() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as short:
        process = psutil.Process(short.pid)
        short.wait()
    with pytest.raises(psutil.NoSuchProcess):
        process_cpu_s(process)
    assert tree_cpu_s(short.pid) is None
    assert tree_cpu_clock(short.pid) is None


def test_a_clock_of_processes_goes_on_with_them_and_says_when_one_has_ended() -> None:
    code = "import sys, time\nprint(flush=True)\nwhile time.process_time() < 0.05: pass\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        clock = tree_cpu_clock(child.pid)
        assert clock is not None
        child.stdout.readline()
        assert 0.05 <= clock() <= clock()
        child.kill()
    with pytest.raises(psutil.NoSuchProcess):
        clock()
