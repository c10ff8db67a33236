"""Which frameworks can a model server load, and is the search's simulator compiled?

Whether a framework is installed is asked of the import system, whether it works of a Python process of its own: an
import takes seconds, and may hang or crash.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from batchtune.cli.checks.machine import Check
from batchtune.provenance import gpus
from batchtune.target.command import Answer, ask

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
            state="missing",
            text=f"its engine does not answer: {answer.failure}",
            advice=f"needed only for containers: start it, or join its group; `{program} version` says more",
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


IMPORT_LIMIT_S: Final = 45.0
"""TensorFlow is imported within 3 s from memory, within 20 s from a slow disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A framework: its module, an expression for the number of GPUs that it sees, and how to install it."""

    module: str
    gpus: str
    install: str


BACKENDS: Final = {
    "TensorFlow": Backend(
        module="tensorflow",
        gpus="len(module.config.list_physical_devices('GPU'))",
        install="pip install 'batchtune[tensorflow]'",
    ),
    "ONNX Runtime": Backend(
        module="onnxruntime",
        gpus="int('CUDAExecutionProvider' in module.get_available_providers())",
        install="pip install 'batchtune[onnx]'",
    ),
    "PyTorch": Backend(
        module="torch", gpus="module.cuda.device_count()", install="pip install 'batchtune[torch]'"
    ),
}
_IMPORT: Final = """\
import json
import {module} as module
print(json.dumps({{"version": module.__version__, "gpus": {gpus}}}))
"""
_SIMULATOR: Final = """\
import json
import numba
from batchtune.twin.simulator.event_kernel import simulate
print(json.dumps({"version": numba.__version__, "cache": simulate.stats.cache_path}))
"""


def backend(
    wanted: Backend, *, python: str = sys.executable, limit_s: float = IMPORT_LIMIT_S, root: Path = Path("/")
) -> Check:
    """Whether it is installed and can be imported, and whether it sees the GPU that the kernel sees."""
    if find_spec(wanted.module) is None:
        return Check(state="missing", text="not installed", advice=f"to serve its models: {wanted.install}")
    code = _IMPORT.format(module=wanted.module, gpus=wanted.gpus)
    answer, values = _asked(code, python=python, limit_s=limit_s)
    if values is None:
        return Check(
            state="problem", text=f"import fails: {answer.failure}", advice=f"reinstall it: {wanted.install}"
        )
    version, count = str(values["version"]), int(values["gpus"])
    if count == 0 and any((root / "proc/driver/nvidia/gpus").glob("*")):
        return Check(
            state="problem",
            text=f"{version}, which does not see the GPU",
            advice="install its build for CUDA; on the CPU it works",
            version=version,
        )
    return Check(state="ok", text=f"{version}, on {'the GPU' if count else 'the CPU'}", version=version)


def simulator(*, python: str = sys.executable, limit_s: float = IMPORT_LIMIT_S) -> Check:
    """Whether numba works, and keeps what it compiles of the simulator."""
    answer, values = _asked(_SIMULATOR, python=python, limit_s=limit_s)
    if values is None:
        return Check(
            state="problem", text=f"import fails: {answer.failure}", advice="reinstall it: pip install numba"
        )
    version, folder = str(values["version"]), values["cache"]
    if folder is None:
        return Check(
            state="problem",
            text=f"{version}, keeps nothing: every command compiles the simulator anew, for seconds",
            advice="set NUMBA_CACHE_DIR to a folder that can be written",
            version=version,
        )
    compiled = any(Path(folder).glob("event_kernel.simulate-*.nbc"))
    then = (
        "the simulator is compiled"
        if compiled
        else "the first search compiles the simulator for some seconds"
    )
    return Check(state="ok", text=f"{version}, {then}", version=version)


def _asked(code: str, *, python: str, limit_s: float) -> tuple[Answer, dict[str, Any] | None]:
    """The answer of a Python process, and the JSON in its last line; None where there is none."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    answer = ask([python, "-P", "-c", code], limit_s=limit_s, environment=quiet)
    if answer.failure:
        return answer, None
    try:
        return answer, json.loads(answer.output.splitlines()[-1])
    except (ValueError, IndexError):
        return Answer(failure=f"it printed {answer.output[-80:]!r}"), None
