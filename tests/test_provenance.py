"""Is what a number depends on recorded, and are numbers of different machines kept apart?"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchtune.provenance import collect, comparable


def write(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_a_provenance_is_plain_json_and_comparable_with_itself(tmp_path: Path) -> None:
    provenance = collect(7, directory=tmp_path)
    again = json.loads(json.dumps(provenance))
    assert again == provenance
    assert comparable(provenance, again) == []
    assert provenance["seed"] == 7
    assert provenance["git"] is None
    assert datetime.fromisoformat(provenance["utc"]).utcoffset() is not None
    assert "numpy" in provenance["packages"]


def test_limits_of_control_groups_are_found_at_every_level(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/outer/inner\n")
    write(tmp_path, "sys/fs/cgroup/outer/cpu.max", "150000 100000\n")
    write(tmp_path, "sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/outer/inner/memory.max", "1073741824\n")
    write(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name\t: Some  CPU @ 3 GHz\n")
    write(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
    provenance = collect(1, directory=tmp_path, root=tmp_path)
    assert provenance["cpu"]["cgroup_limit"] == 1.5
    assert provenance["cpu"]["model"] == "Some CPU @ 3 GHz"
    assert provenance["cpu"]["governor"] == "performance"
    assert provenance["memory_cgroup_limit_bytes"] == 2**30


def test_no_limit_of_memory_in_the_first_version_of_control_groups_is_a_large_number(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "3:memory:/docker/abc\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert collect(1, directory=tmp_path, root=tmp_path)["memory_cgroup_limit_bytes"] is None


def test_nothing_to_find_is_not_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    provenance = collect(1, directory=tmp_path / "none", root=tmp_path / "none")
    assert provenance["git"] is None
    assert provenance["cpu"]["cgroup_limit"] is None
    assert provenance["cpu"]["governor"] is None


def test_the_commit_and_changes_to_it_are_recorded(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    write(tmp_path, "file", "one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    clean = collect(1, directory=tmp_path)["git"]
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    write(tmp_path, "untracked", "")
    assert collect(1, directory=tmp_path)["git"] == clean
    write(tmp_path, "file", "two")
    assert collect(1, directory=tmp_path)["git"] == {**clean, "dirty": True}


def test_gpus_are_named_with_their_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda at: at,
        nvmlDeviceGetName=lambda at: ("GPU A", "GPU B")[at],
        nvmlSystemGetDriverVersion=lambda: "600.1",
        nvmlDeviceGetMemoryInfo=lambda _at: SimpleNamespace(total=2**34),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert collect(1, directory=tmp_path)["gpu"] == {
        "names": ["GPU A", "GPU B"],
        "driver": "600.1",
        "memory_bytes": [2**34, 2**34],
    }


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class NVMLError(Exception):
        pass

    def fail() -> None:
        raise NVMLError

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=fail))
    assert collect(1, directory=tmp_path)["gpu"]["names"] == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert collect(1, directory=tmp_path)["gpu"]["names"] == []


H200 = "NVIDIA H200, 550.90.07, 143771"
ANSWERS = f'case "$*" in *name,driver_version,memory.total*noheader,nounits*) echo "{H200}";; esac'
SILENT = "echo NVIDIA-SMI has failed; exit 9"
CLOSED = "NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
OPEN = "NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (user@host)"


@pytest.mark.parametrize(
    ("script", "version", "driver", "memory"),
    [
        (ANSWERS, CLOSED, "550.90.07", [143771 * 2**20]),
        (SILENT, CLOSED, "535.104.05", []),
        (SILENT, OPEN, "535.104.05", []),
    ],
)
def test_gpus_are_seen_without_the_extra_by_the_drivers_own_program_or_the_files_of_its_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, version: str, driver: str, memory: list[int]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    write(tmp_path, "bin/nvidia-smi", f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    information = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 190\nGPU UUID: \t GPU-1\n"
    write(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", information)
    write(tmp_path, "proc/driver/nvidia/version", f"NVRM version: {version}\nGCC version:  gcc 12\n")
    found = collect(1, directory=tmp_path, root=tmp_path)["gpu"]
    assert found == {"names": ["NVIDIA H200"], "driver": driver, "memory_bytes": memory}


def test_only_differences_of_the_machine_forbid_a_comparison() -> None:
    ours = {
        "utc": "2026-01-01T00:00:00+00:00",
        "seed": 1,
        "kernel": "6.1.0-1",
        "kernel_series": "6.1",
        "machine": {"host": "a", "architecture": "x86_64"},
        "cpu": {"model": "A", "logical": 2, "usable": 2, "cgroup_limit": None, "governor": None},
        "gpu": {"names": ["G"], "driver": "600"},
        "python": {"version": "3.11.7", "series": "3.11"},
        "packages": {"tensorflow": "2.21.0"},
        "git": {"commit": "a", "dirty": False},
    }
    alike = {
        **ours,
        "utc": "2026-02-02T00:00:00+00:00",
        "seed": 2,
        "kernel": "6.1.0-2",
        "machine": {"host": "b", "architecture": "x86_64"},
        "python": {"version": "3.11.9", "series": "3.11"},
        "packages": {"tensorflow": "2.22.0"},
        "git": {"commit": "b", "dirty": True},
    }
    assert comparable(ours, alike) == []
    other = {**alike, "cpu": {**ours["cpu"], "cgroup_limit": 1.5}, "gpu": {"names": [], "driver": None}}
    assert comparable(ours, other) == [
        "cpu.cgroup_limit: unknown against 1.5",
        "gpu.names: G against none",
        "gpu.driver: 600 against unknown",
    ]
    assert "cpu.model: A against unknown" in comparable(ours, {})
