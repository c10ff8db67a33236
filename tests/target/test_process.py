"""A server process is started apart from us, watched, and never left behind."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from batchtune.errors import TargetError
from batchtune.target.process import ServerProcess, free_port
from tests.target.running_process import running_process
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
