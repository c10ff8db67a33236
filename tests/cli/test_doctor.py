"""Does the doctor say of each thing whether it works and what to do, within its time and without a traceback?"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from batchtune.cli.app import app
from batchtune.cli.commands import doctor
from batchtune.cli.commands.doctor import Check, answers, backend, simulator
from batchtune.measure.caveats import HostNoise

QUIET = HostNoise(steal_ratio=0.0, pressure_ratio=0.0, canary_change=-0.1, foreign_ratio=0.03)
BUSY = HostNoise(steal_ratio=0.0, pressure_ratio=0.9, canary_change=0.0, foreign_ratio=0.43)
STOLEN = HostNoise(steal_ratio=0.04, pressure_ratio=0.0, canary_change=0.12)
NOISY = (
    "noisy in 3 of 8 half seconds: other processes used up to 43 % of these CPUs; the hypervisor took up to 4 % of "
    "their time; they were up to 12 % slower than usual"
)
FAKE = ("fake_framework", "module.gpus()", "pip install fake")
OK = Check(state="ok", text="1.0", version="1.0")
MISSING = Check(state="missing", text="not installed")
PROBLEM = Check(state="problem", text="import fails")

Framework = Callable[[str], tuple[str, str, str]]


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def program(path: Path, script: str) -> str:
    write(path, f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Framework:
    """Installs a module that a process of its own imports."""

    def install(code: str) -> tuple[str, str, str]:
        write(tmp_path / "site" / "fake_framework.py", code)
        return FAKE

    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return install


def test_answers_keep_their_order_and_nothing_that_hangs_is_waited_for() -> None:
    never = threading.Event()

    def hangs() -> Check:
        never.wait(60)
        return OK

    def breaks() -> Check:
        raise OSError("no such device")

    found = dict(answers({"slow": hangs, "broken": breaks, "good": lambda: OK}, limit_s=0.05))
    never.set()
    assert list(found) == ["slow", "broken", "good"]
    assert found["slow"] == Check(state="problem", text="no answer within 0.05 s")
    assert found["broken"].text == "could not be checked: OSError: no such device"
    assert found["good"] == OK


def working(gpus: int) -> str:
    return f"print('hello')\n__version__ = '1.2'\ndef gpus():\n    return {gpus}\n"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (working(0), "1.2, on the CPU"),
        (working(2), "1.2, on the GPU"),
        ("raise ImportError('libfake.so: none')", "import fails: ImportError: libfake.so: none"),
        ("import os; os.abort()", "import fails: ended by SIGABRT"),
        ("import os; os._exit(0)", "import fails: it printed ''"),
        ("import time; time.sleep(1000)", "import fails: no answer within 0.1 s"),
        ("", "not installed"),
    ],
)
def test_a_framework_tells_its_version_and_device_or_why_not(
    framework: Framework, tmp_path: Path, code: str, text: str
) -> None:
    wanted = framework(code) if code else ("no_such_framework", "0", "pip install fake")
    check = backend(wanted, root=tmp_path, limit_s=0.1 if "sleep" in code else 60.0)
    assert check.text == text
    if text.startswith("1.2"):
        assert (check.state, check.version, check.advice) == ("ok", "1.2", "")
    else:
        assert check.state == ("problem" if code else "missing")
        assert "pip install fake" in check.advice


def test_a_framework_that_does_not_see_the_gpu_is_a_problem(framework: Framework, tmp_path: Path) -> None:
    write(tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information", "")
    check = backend(framework(working(0)), root=tmp_path)
    assert (check.state, check.version) == ("problem", "1.2")  # it serves, though slowly
    assert "CUDA" in check.advice


@pytest.mark.parametrize(
    ("printed", "state", "words"),
    [
        ('{"version": "0.62", "cache": null}', "problem", "cannot save its cache"),
        ('{"version": "0.62", "cache": "CACHE"}', "ok", "the first search compiles"),
        ("nonsense", "problem", "nonsense"),
    ],
)
def test_the_simulator_tells_if_it_is_compiled(tmp_path: Path, printed: str, state: str, words: str) -> None:
    python = program(tmp_path / "python", f"echo '{printed.replace('CACHE', str(tmp_path))}'")
    check = simulator(python=python)
    assert check.state == state
    assert words in check.text
    write(tmp_path / "event_kernel.simulate-21.py311.1.nbc", "")
    assert ("is compiled" in simulator(python=python).text) == (state == "ok")


@pytest.mark.parametrize(
    ("affinity", "quota", "state"),
    [({0, 1, 2, 3}, None, "ok"), ({5}, None, "problem"), ({0, 1, 2, 3}, 250_000, "problem")],
)
def test_cpus_are_those_of_the_affinity_and_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affinity: set[int], quota: int | None, state: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: affinity)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    write(tmp_path / "sys/fs/cgroup/cpu.max", f"{quota or 'max'} 100000")
    check = doctor.cpus(tmp_path)
    assert check.state == state
    assert check.text.startswith(f"{len(affinity)} of 16 may be used, ")
    assert check.text.endswith("a quota of 2.5" if quota else "no quota")
    assert bool(check.advice) == (state == "problem")


@pytest.mark.parametrize(
    ("windows", "state", "text"),
    [
        ([QUIET] * 7 + [BUSY], "ok", "quiet for 4 s: other processes used at most 43 % of the CPUs"),
        ([QUIET] * 5 + [BUSY, STOLEN, STOLEN], "problem", NOISY),
    ],
)
def test_one_disturbed_half_second_is_no_noise(windows: list[HostNoise], state: str, text: str) -> None:
    check = doctor.host_noise(windows)
    assert (check.state, check.text) == (state, text)
    assert ("batchtune noise" in check.advice) == (state == "problem")


def test_the_host_is_watched_window_by_window() -> None:
    slept: list[float] = []
    watched: list[int] = []
    assert doctor.watch_host(watched.append, sleep=slept.append).state in ("ok", "problem")
    assert slept == [doctor.WINDOW_S] * doctor.WATCHED_WINDOWS
    assert watched == list(range(doctor.WATCHED_WINDOWS))


@pytest.mark.parametrize(("limit", "state"), [(3 * 2**30, "ok"), (2**30, "problem")])
def test_free_memory_is_that_of_the_control_group(tmp_path: Path, limit: int, state: str) -> None:
    group = tmp_path / "sys/fs/cgroup"
    write(group / "memory.max", str(limit))
    write(group / "memory.current", str(2**30))
    write(group / "memory.stat", f"anon 1\ninactive_file {2**29}\n")
    check = doctor.memory(tmp_path)
    assert check.text == f"{(limit - 2**29) / 2**30:.1f} GiB free"
    assert check.state == state


@pytest.mark.parametrize(("free", "state"), [(2**40, "ok"), (2**28, "ok"), (2**20, "problem")])
def test_results_need_room_in_a_folder_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, state: str
) -> None:
    write(tmp_path / "file", "")
    assert doctor.room_for_results(tmp_path / "file").text == f"{tmp_path / 'file'} is a file"
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=free))
    check = doctor.room_for_results(tmp_path / "not" / "yet")
    assert (check.state, bool(check.advice)) == (state, free < 2**30)
    assert f"GiB free in {tmp_path}" in check.text
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    check = doctor.room_for_results(tmp_path)
    assert (check.state, check.text) == ("problem", f"{tmp_path} cannot be written")
    assert "--results" in check.advice


@pytest.mark.parametrize(
    ("hard", "state"), [(resource.RLIM_INFINITY, "ok"), (65_536, "ok"), (1024, "problem")]
)
def test_open_files_are_of_the_hard_limit(monkeypatch: pytest.MonkeyPatch, hard: int, state: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, hard))
    assert doctor.open_files().state == state


@pytest.mark.parametrize(
    ("script", "state", "text"),
    [
        ("echo 27.1", "ok", "27.1"),
        ("echo 'permission denied' >&2; exit 1", "missing", "its engine does not answer: permission denied"),
        ("exec sleep 1000", "missing", "its engine does not answer: no answer within 0.2 s"),
    ],
)
def test_a_container_program_needs_an_engine_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, state: str, text: str
) -> None:
    engine = program(tmp_path / "docker", script)
    check = doctor.container_engine(engine, limit_s=0.2)
    assert (check.state, check.text) == (state, text)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert doctor.container_engine().state == "missing"
    assert doctor.tritonserver().advice == doctor.tensorflow_model_server().advice


def test_another_server_is_told_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path / "tensorflow_model_server", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor.tensorflow_model_server()
    assert (check.state, check.text) == ("ok", path)
    assert "target: {command: [tensorflow_model_server]}" in check.advice


def test_a_gpu_is_told_with_what_its_measuring_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    program(tmp_path / "nvidia-smi", "echo 'NVIDIA H200, 580.1, 143771'; echo 'NVIDIA H200, 580.1, 143771'")
    monkeypatch.setattr(doctor, "find_spec", lambda _name: None)
    check = doctor.gpu(tmp_path)
    assert (check.state, check.text) == ("problem", "2 × NVIDIA H200, utilization not measured")
    assert "batchtune[gpu]" in check.advice
    monkeypatch.setattr(doctor, "find_spec", lambda _name: object())
    assert doctor.gpu(tmp_path) == Check(state="ok", text="2 × NVIDIA H200, driver 580.1")
    program(tmp_path / "nvidia-smi", "exit 9")
    assert doctor.gpu(tmp_path).state == "missing"
    write(tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t NVIDIA A100\n")
    check = doctor.gpu(tmp_path)
    assert (check.state, check.text) == ("problem", "1 × NVIDIA A100: the driver does not answer")


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({}, []),
        ({"TensorFlow": MISSING, "PyTorch": PROBLEM}, []),
        ({"results": PROBLEM}, ["results"]),
        ({"numba": PROBLEM}, ["numba"]),
        ({"numba": Check(state="problem", text="keeps nothing", version="0.62")}, []),
        ({"docker": MISSING, "GPU": MISSING, "memory": PROBLEM}, []),
    ],
)
def test_only_what_every_sweep_needs_is_lacking(changed: dict[str, Check], lacking: list[str]) -> None:
    names = ("results", "numba", "TensorFlow", "PyTorch", "docker", "GPU", "memory")
    assert doctor.lacking_for_a_sweep({**dict.fromkeys(names, OK), **changed}) == lacking


def test_what_a_sweep_can_do_without_is_optional_and_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    checks = {"results": OK, "TensorFlow": MISSING, "docker": MISSING, "ONNX Runtime": OK}
    doctor._print(checks, [])
    states = [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert states == ["ready", "optional", "optional", "ready"]
    doctor._print({**checks, "numba": MISSING}, ["numba"])
    assert any(line.startswith("problem   numba") for line in capsys.readouterr().out.splitlines())
    doctor._print(dict.fromkeys(doctor.BACKENDS, MISSING), [])
    assert "Ready to measure running servers." in capsys.readouterr().out


def test_the_whole_check_is_a_table_and_a_document(
    framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "WINDOW_S", 0.0)
    wanted = framework("__version__ = '1.2'\ndef gpus():\n    return 0\n")
    kept = dict.fromkeys(doctor.BACKENDS, wanted)
    monkeypatch.setattr(doctor, "BACKENDS", kept)
    shown = CliRunner().invoke(app, ["doctor", "--results", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line), lines
    assert any(line.split() == ["ready", "TensorFlow", "1.2,", "on", "the", "CPU"] for line in lines)
    wrong = [line.split()[1] for line in lines if line.startswith("problem")]
    ready = shown.stdout[shown.stdout.rindex("Ready") :]
    assert ready.startswith("Ready, despite the problem above (" if wrong else "Ready: ")
    assert all(name in ready for name in wrong)
    assert "measuring the noise of this machine" in shown.stderr

    monkeypatch.setattr(doctor, "BACKENDS", dict.fromkeys(kept, ("none", "", "x")))
    asked = CliRunner().invoke(app, ["doctor", "--json", "--quiet", "--results", str(tmp_path)])
    assert asked.exit_code == 0
    document = json.loads(asked.stdout)
    assert document["lacking"] == []
    assert document["ready"]
    assert {check["state"] for check in document["checks"]} <= {"ok", "missing", "problem"}
    assert asked.stderr == ""
