"""Run a command where PyTorch's CUDA build finds a GPU that is none: does our use of CUDA hold?

    python tests/gpu/cuda_on_cpu/run.py pytest tests/server/backends/test_torch_cuda.py -m gpu
    python tests/gpu/cuda_on_cpu/run.py python tests/benchmarks/gpu/gpu_checks.py run --tiny --out /tmp/gpu

PyTorch's own allocators, streams, events and graphs run on runtime.cpp, which is late on purpose and as strict as CUDA;
operators.cpp computes on the CPU. So what is awaited too early, freed too early or not allowed while a graph is recorded
shows here. What a GPU alone can show: kernels, cuBLAS and cuDNN, and every figure of speed.

Needs a C++ compiler (CXX, else g++), a PyTorch built with CUDA (pip's usual one, from 2.6 on) and the rest of CUDA's
headers, of the version that PyTorch has: nvidia-cuda-crt and nvidia-cuda-cccl, for CUDA 12 nvidia-cuda-nvcc-cu12 and
nvidia-cuda-cccl-cu12.
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
    # CUDA 13 has one folder of headers for all, CUDA 12 one for each package.
    headers = sorted(package.parent.glob("nvidia/*/include")) + sorted(
        package.parent.glob("nvidia/*/include/cccl")
    )
    compiler = [os.environ.get("CXX", "g++"), "-O1", "-fPIC", "-shared", *(f"-I{path}" for path in headers)]
    runtime = [str(HERE / "runtime.cpp"), f"-Wl,-soname,{RUNTIME}", "-o", str(folder / RUNTIME), "-lpthread"]
    subprocess.run([*compiler, "-std=c++17", *runtime], check=True)
    of_torch = [f"-I{package}/include", f"-I{package}/include/torch/csrc/api/include"]
    libraries = [f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_cuda", "-lc10_cuda"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    unfinished = folder / f"{OPERATORS}.{os.getpid()}"
    operators = [str(HERE / "operators.cpp"), "-o", str(unfinished), *libraries]
    subprocess.run([*compiler, "-std=c++20", abi, *of_torch, *operators], check=True)
    unfinished.rename(folder / OPERATORS)
    return folder


if __name__ == "__main__":
    main()
