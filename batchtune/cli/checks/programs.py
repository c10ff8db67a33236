"""Which other servers, containers and GPUs are there?"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from batchtune.cli.checks.check import Check
from batchtune.provenance import gpus
from batchtune.target.short_program import ask

ENGINE_LIMIT_S: Final = 5.0
"""An engine answers within 0.1 s."""


def container_engine(program: str = "docker", *, limit_s: float = ENGINE_LIMIT_S) -> Check:
    """Whether its engine answers: the program alone runs no container."""
    if shutil.which(program) is None:
        return Check(
            state="missing", text="not installed", advice="needed only where target.command runs a container"
        )
    answer = ask([program, "version", "--format", "{{.Server.Version}}"], limit_s=limit_s)
    if answer.failure:
        return Check(
            state="problem",
            text=f"its engine cannot be used: {answer.failure}",
            advice=f"start it, or join the group that may use it; `{program} version` says more",
        )
    return Check(state="ok", text=answer.output, version=answer.output)


def tensorflow_model_server() -> Check:
    """Google's server, which a scenario may launch instead of the bundled one."""
    return _program(
        "tensorflow_model_server", "target: {command: [tensorflow_model_server]} in a scenario launches it"
    )


def tritonserver() -> Check:
    """NVIDIA's server, which can be loaded where it runs."""
    return _program("tritonserver", "start it, then: batchtune load SCENARIO.yaml --grpc-url HOST:8001")


def _program(name: str, use: str) -> Check:
    path = shutil.which(name)
    if path is None:
        return Check(
            state="missing", text="not installed", advice="not needed: batchtune-model-server is bundled"
        )
    return Check(state="ok", text=path, advice=use)


def gpu(root: Path = Path("/")) -> Check:
    """The NVIDIA GPUs, and whether their use can be measured."""
    devices = gpus(root)
    names: list[str] = devices["names"]
    if not names:
        return Check(state="missing", text="no NVIDIA GPU: models are served on the CPU")
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    if not devices["memory_bytes"]:
        return Check(
            state="problem", text=f"{kinds}: the driver does not answer", advice="`nvidia-smi` says why"
        )
    if find_spec("pynvml") is None:
        return Check(
            state="problem",
            text=f"{kinds}, whose use cannot be measured",
            advice="pip install 'batchtune[gpu]' (nvidia-ml-py)",
        )
    return Check(state="ok", text=f"{kinds}, driver {devices['driver']}")
