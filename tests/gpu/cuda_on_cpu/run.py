"""Run a command where PyTorch's CUDA build finds a GPU that is none: does our use of CUDA hold?

    python tests/gpu/cuda_on_cpu/run.py pytest tests/server/backends/test_torch_cuda.py -m gpu
    python tests/gpu/cuda_on_cpu/run.py python tests/benchmarks/gpu/gpu_checks.py run --tiny --out /tmp/gpu

PyTorch's own allocators, streams, events and graphs run on runtime.cpp, which is late on purpose and as strict as CUDA;
operators.cpp computes on the CPU. So what is awaited too early, freed too early or not allowed while a graph is recorded
shows here. What a GPU alone can show: kernels, cuBLAS and cuDNN, and every figure of speed.

Needs a C++ compiler, a PyTorch built with CUDA (pip's usual one, from 2.6 on) and the rest of CUDA's headers; where they
are missing it names the packages.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent
RUNTIME, OPERATORS = "libcuda.so.1", "libcuda_operators.so"


def main() -> NoReturn:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    folder = built()
    preloaded = [str(folder / RUNTIME), os.environ.get("LD_PRELOAD", "")]
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(filter(None, preloaded)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "CUDA_ON_CPU_OPERATORS": str(folder / OPERATORS),
    }
    try:
        os.execvpe(sys.argv[1], sys.argv[1:], environment)
    except OSError as error:
        raise SystemExit(f"{sys.argv[1]}: {error.strerror}") from error


def built() -> Path:
    """The folder of both libraries, compiled unless they are there for these sources and this PyTorch."""
    import torch

    if torch.version.cuda is None:
        raise SystemExit(
            f"torch {torch.__version__} is built without CUDA; install it from PyPI: pip install torch"
        )
    sources = b"".join((HERE / name).read_bytes() for name in ("model.hpp", "runtime.cpp", "operators.cpp"))
    key = f"{torch.__version__}-{hashlib.sha256(sources).hexdigest()[:12]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "batchtune" / "cuda_on_cpu" / key
    if (folder / OPERATORS).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    package = Path(torch.__file__).parent
    headers = [f"-I{path}" for path in cuda_headers(package.parent / "nvidia", torch.version.cuda)]
    compiler = [os.environ.get("CXX", "g++"), "-O1", "-fPIC", "-shared", *headers]
    _compile(
        [*compiler, "-std=c++17", str(HERE / "runtime.cpp"), f"-Wl,-soname,{RUNTIME}", "-o", str(folder / RUNTIME), "-lpthread"],
    )  # fmt: skip
    of_torch = [package / "include", package / "include/torch/csrc/api/include"]
    libraries = [f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_cuda", "-lc10_cuda"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    unfinished = folder / f"{OPERATORS}.{os.getpid()}"
    _compile(
        [*compiler, "-std=c++20", abi, *(f"-I{path}" for path in of_torch), str(HERE / "operators.cpp"), "-o", str(unfinished), *libraries],
    )  # fmt: skip
    unfinished.rename(folder / OPERATORS)
    return folder


def _compile(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError as error:
        raise SystemExit(f"{command[0]}: no such compiler; install g++, or name another in CXX") from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{command[0]} ended with {error.returncode}; its words are above") from error


def cuda_headers(nvidia: Path, version: str) -> list[Path]:
    """Folders of the headers in pip's packages of NVIDIA: CUDA 13 has one for all, CUDA 12 one for each package."""
    found = sorted(nvidia.glob("*/include")) + sorted(nvidia.glob("*/include/cccl"))
    of_13 = version.startswith("13")
    needed = {"crt/host_defines.h": "crt" if of_13 else "nvcc", "nv/target": "cccl"}
    suffix = "" if of_13 else "-cu12"
    missing = [
        f"'nvidia-cuda-{name}{suffix}=={version}.*'"
        for header, name in needed.items()
        if not any((folder / header).exists() for folder in found)
    ]
    if missing:
        raise SystemExit(f"CUDA's headers are incomplete: pip install {' '.join(missing)}")
    return found


if __name__ == "__main__":
    main()
