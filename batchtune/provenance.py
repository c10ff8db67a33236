"""Where, when and with what a run was measured, and whether two measurements may be compared.

Nothing here is ever fatal: what cannot be found out is None.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from batchtune.system import control_groups, quota_cpus, schedulable_cpus, text_of

_PACKAGES = (
    "batchtune",
    "tensorflow",
    "torch",
    "onnxruntime",
    "nvidia-pytriton",
    "ray",
    "numpy",
    "numba",
    "grpcio",
    "protobuf",
    "hpack",
    "httptools",
    "httpx",
    "optuna",
    "orjson",
    "uvloop",
)

# What a number depends on beyond the code under test: the machine and what schedules it. Versions of packages are
# not among them, because a new version is what a comparison is often about.
_MUST_MATCH = (
    ("machine", "architecture"),
    ("cpu", "model"),
    ("cpu", "logical"),
    ("cpu", "usable"),
    ("cpu", "cgroup_limit"),
    ("cpu", "governor"),
    ("kernel_series",),
    ("python", "series"),
    ("gpu", "names"),
    ("gpu", "driver"),
)


def collect(
    seed: int,
    *,
    directory: Path | None = None,
    root: Path = Path("/"),
) -> dict[str, Any]:
    """Return the provenance of a run (machine, CPUs, GPUs, packages, git commit, `seed`) as plain types for JSON; None
    for each value that cannot be found out.

    `directory`: where git runs; None: the current one. `root`: where /proc and /sys are read.
    """
    import psutil

    kernel = platform.release()
    schema_version = 1
    return {
        "schema_version": schema_version,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "machine": {
            "host": platform.node(),
            "architecture": platform.machine(),
            "system": platform.system(),
            "in_container": _in_container(root),
        },
        "kernel": kernel,
        "kernel_series": ".".join(kernel.split(".")[:2]),
        "cpu": _cpu(root),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_cgroup_limit_bytes": _memory_limit_bytes(root),
        "gpu": gpus(root),
        "python": {
            "version": platform.python_version(),
            "series": f"{sys.version_info.major}.{sys.version_info.minor}",
            "implementation": platform.python_implementation(),
        },
        "packages": _package_versions(),
        "git": _git(Path.cwd() if directory is None else directory),
    }


def comparable(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """List the differences that forbid comparing figures of two provenances, a sentence each; []: there are none.

    A value that only one side knows counts as a difference; a value that neither knows does not.
    """
    differences = []
    for path in (("schema_version",), *_MUST_MATCH):
        own, other = _at(ours, path), _at(theirs, path)
        if own != other:
            differences.append(f"{'.'.join(path)}: {_shown(own)} against {_shown(other)}")
    return differences


def _at(document: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = document
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)


def _cpu(root: Path) -> dict[str, Any]:
    import psutil

    return {
        "model": _cpu_model(root),
        "logical": os.cpu_count(),
        "physical": psutil.cpu_count(logical=False),
        "usable": len(schedulable_cpus()),
        "cgroup_limit": quota_cpus(root),
        "governor": text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or None,
    }


def _cpu_model(root: Path) -> str | None:
    for line in text_of(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "Hardware", "cpu model"}:
            return " ".join(value.split())
    return platform.processor() or None


def _memory_limit_bytes(root: Path) -> int | None:
    """Return the smallest memory limit of the control groups at any level, in bytes; None: no limit."""
    texts = [
        text_of(group / name)
        for group in control_groups(root)
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    # Version 1 writes "no limit" as a number close to 2^63.
    return min((int(text) for text in texts if text.isdigit() and int(text) < 2**60), default=None)


def _in_container(root: Path) -> bool:
    return any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))


def gpus(root: Path = Path("/")) -> dict[str, Any]:
    """Return `names`, `driver` (its version) and `memory_bytes` (a list, parallel to `names`) of the NVIDIA GPUs.

    Reads NVML (extra `gpu`), else nvidia-smi, else the files of the kernel module, which lack the memory (empty
    list). Without a GPU the lists are empty and `driver` is None.
    """
    return (
        _gpu_by_nvml()
        or _gpu_by_nvidia_smi()
        or _gpu_by_files(root / "proc/driver/nvidia")
        or {"names": [], "driver": None, "memory_bytes": []}
    )


def _gpu_by_nvml() -> dict[str, Any] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        return {
            "names": [pynvml.nvmlDeviceGetName(handle) for handle in handles],
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "memory_bytes": [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles],
        }
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _gpu_by_nvidia_smi() -> dict[str, Any] | None:
    query = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits")
    # Without a persistence daemon the driver wakes each GPU first: seconds on a machine with eight.
    printed = _output(["nvidia-smi", *query], limit_s=10.0)
    rows = [[word.strip() for word in line.split(",")] for line in (printed or "").splitlines()]
    if not rows or any(len(row) != 3 for row in rows):
        return None
    return {
        "names": [name for name, _driver, _mib in rows],
        "driver": rows[0][1],
        "memory_bytes": [int(mib) * 2**20 for _name, _driver, mib in rows if mib.isdigit()],
    }


def _gpu_by_files(folder: Path) -> dict[str, Any] | None:
    names = []
    for path in sorted(folder.glob("gpus/*/information")):
        for line in text_of(path).splitlines():
            name, _, value = line.partition(":")
            if name == "Model":
                names.append(" ".join(value.split()))
    version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text_of(folder / "version"))
    return {"names": names, "driver": version and version[1], "memory_bytes": []} if names else None


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git(directory: Path) -> dict[str, Any] | None:
    """Return `commit`, checked out in `directory`, and `dirty`: whether tracked files differ; None outside git."""
    commit = _git_output(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git_output(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git_output(directory: Path, *arguments: str) -> str | None:
    return _output(["git", "--no-optional-locks", "-C", str(directory), *arguments], limit_s=2.0)


def _output(command: Sequence[str], *, limit_s: float) -> str | None:
    """Return what a program prints, stripped; None where it is missing, fails or takes longer than `limit_s`."""
    try:
        ended = subprocess.run(
            list(command),
            capture_output=True,
            check=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=limit_s,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return ended.stdout.strip()
