"""A server process, also in a container, is started apart from us, watched, counted and never left behind.

What only an engine can show is not tested: that its `inspect` tells the host's pid of the container's first process
(rootless and remote engines may not), and the control group that its runtime makes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from batchtune.errors import TargetError
from batchtune.target.process import (
    Container,
    ServerProcess,
    container_of,
    free_port,
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

FOREVER = "import time\nprint('ready', flush=True)\ntime.sleep(60)"


@pytest.mark.parametrize(("own_session", "dies"), [(False, False), (True, False), (True, True)])
def test_stopping_ends_children_also_with_a_session_of_their_own(
    tmp_path: Path, own_session: bool, dies: bool
) -> None:
    """Also where the server died before, but for those that it started after it was ready."""
    start = f"subprocess.Popen([sys.executable, '-c', {FOREVER!r}], start_new_session={own_session})"
    parent = f"import subprocess, sys\n{start}\n{FOREVER}"
    with running_process([sys.executable, "-c", parent], log_path=tmp_path / "log") as server:
        wait_until(lambda: (tmp_path / "log").read_text().count("ready") == 2)
        (child,) = psutil.Process(server.pid).children()
        if dies:
            server.look_for_listener(1)
            os.kill(server.pid or 0, signal.SIGKILL)
            wait_until(lambda: not server.running)
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_server_is_kept_on_its_cpus_and_we_are_not(tmp_path: Path) -> None:
    ours = os.sched_getaffinity(0)
    one = min(ours)
    with running_process([sys.executable, "-c", FOREVER], log_path=tmp_path / "log", cpus=[one]) as server:
        assert psutil.Process(server.pid).cpu_affinity() == [one]
    assert os.sched_getaffinity(0) == ours


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FOREVER}"
    server = ServerProcess(log_path=tmp_path / "log", grace_s=0.05)
    server.launch([sys.executable, "-c", stubborn])
    wait_until(lambda: "ready" in (tmp_path / "log").read_text())
    server.stop()
    assert not server.running


def test_ctrl_c_does_not_reach_the_server(tmp_path: Path) -> None:
    with running_process([sys.executable, "-c", FOREVER], log_path=tmp_path / "log") as server:
        assert os.getsid(server.pid or 0) != os.getsid(0)


def test_a_program_that_is_not_there_stays_the_reason(tmp_path: Path) -> None:
    server = ServerProcess(log_path=tmp_path / "log")
    for attempt in (lambda: server.launch(["no-such-server-here"]), server.raise_if_dead):
        with pytest.raises(TargetError, match="cannot start 'no-such-server-here': no such program"):
            attempt()


def test_a_dead_server_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with running_process(
        [sys.executable, "-c", "raise SystemExit('no GPU here')"], log_path=tmp_path / "log"
    ) as server:
        wait_until(lambda: not server.running)
        with pytest.raises(TargetError, match="exited with 1") as raised:
            server.raise_if_dead()
    assert "no GPU here" in raised.value.message


def test_a_free_port_is_none_that_the_kernel_gives_to_connections() -> None:
    """Someone's connection took it now and then before the server listened."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first < 11_000:
        pytest.skip("connections may have every port here")
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    assert not [port for port in ports if first <= port <= last]


def test_where_the_kernel_tells_no_range_any_free_port_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchtune.target.process._LOCAL_PORTS", tmp_path / "none")
    assert free_port() > 1023


def test_a_failure_that_a_warning_and_the_error_behind_it_report_is_in_the_last_words_once(
    tmp_path: Path,
) -> None:
    cause = "INVALID_ARGUMENT: model.onnx: [ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Protobuf parsing failed, twice as long."
    log = tmp_path / "server.log"
    log.write_text(
        f"warning: failed to load: {cause}\nloading\nerror: 1 servable is not available: {cause}\n"
    )
    process = ServerProcess(log_path=log)
    assert process.log_tail().splitlines() == ["  loading", f"  error: 1 servable is not available: {cause}"]


INSTALL = "pip install no-such-server-here"


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (["no-such-server-here"], f"`{INSTALL}`, or check "),
        (["env", "PORT=1", "no-such-server-here"], f"`{INSTALL}`, or check "),
        ([sys.executable, "-m", "no_such_server_here"], f"`{INSTALL}`, or check "),
        ([sys.executable, "-c", "import no_such_server_here"], f"`{INSTALL}`, or check "),
        ([sys.executable, "-c", "import app_needs_this"], "install the module app_needs_this for the Python"),
        ([sys.executable, "-c", "open('/nowhere')"], ""),
    ],
)
def test_what_is_not_installed_is_reported_with_how_to_install_it(
    command: list[str], hint: str, tmp_path: Path
) -> None:
    server = ServerProcess(log_path=tmp_path / "log", install=INSTALL)
    with suppress(TargetError):
        server.launch(command)
    with pytest.raises(TargetError) as told:
        server.raise_if_dead(within_s=10.0)
    assert told.value.hint.startswith(hint)
    assert bool(told.value.hint) is bool(hint)


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
