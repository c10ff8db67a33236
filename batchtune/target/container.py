"""Runs a program to its end, and writes the `docker run` command of a server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from batchtune.scenario.spec.target import DockerSpec, TargetSpec

# A program that is run to its end.


def ending_with_us() -> tuple[str, ...]:
    """Return the words to put before a command so that the kernel ends it when the thread that starts it ends; () where
    setpriv is not installed."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "TERM") if setpriv else ()


def ask(
    command: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Run a program to its end; after `limit_s` seconds it is killed. Return (its stdout, stripped, ""), or, where it
    failed, ("", the reason).

    `environment` is added to this process's own.
    """
    try:
        ended = subprocess.run(
            [*ending_with_us(), *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {limit_s:g} s"
    except OSError as error:
        return "", f"cannot be started: {error.strerror}"
    if ended.returncode == 0:
        return ended.stdout.strip(), ""
    if ended.returncode < 0:
        return "", f"ended by {signal.Signals(-ended.returncode).name}"
    last_words = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
    return "", last_words[0].strip()[:200]


# A server in a container.
#
# Ports have the same number inside and outside, and lie on the loopback. The model, and what is written for the server,
# are mounted read-only.

MODELS_INSIDE: Final = "/models"
SCRATCH_INSIDE: Final = "/batchtune"


def tfservings_container(spec: TargetSpec, *, ports: Iterable[int], mounts: Mapping[Path, str]) -> list[str]:
    """Return the `docker run` command of TensorFlow Serving, up to the server's flags. `mounts`: path here ->
    path inside.

    As the first process of a container it would ignore SIGTERM; `docker run --init` puts another before it.
    """
    docker = spec.docker or DockerSpec()
    image = docker.image or f"tensorflow/serving{'' if docker.gpus is None else ':latest-gpu'}"
    head = _run(docker, spec, ports, mounts)
    first = ["--init"] if Path(docker.program).name == "docker" else []
    return [*head, *first, "--entrypoint=tensorflow_model_server", *docker.options, image]


def tritons_container(spec: TargetSpec, *, ports: Iterable[int], mounts: Mapping[Path, str]) -> list[str]:
    """Return the `docker run` command of NVIDIA's Triton image, up to the program's flags; Python models get
    shared memory. `mounts`: path here -> path inside."""
    docker = spec.docker or DockerSpec()
    head = _run(docker, spec, ports, mounts)
    return [*head, "--shm-size=1g", *docker.options, docker.image or "", "tritonserver"]


def _run(docker: DockerSpec, spec: TargetSpec, ports: Iterable[int], mounts: Mapping[Path, str]) -> list[str]:
    words = [docker.program, "run", "--rm"]
    words += [f"--publish=127.0.0.1:{port}:{port}" for port in ports]
    words += [f"--mount=type=bind,source={host},target={inside},readonly" for host, inside in mounts.items()]
    if docker.gpus is not None:
        words.append(f"--gpus={docker.gpus}")
    if spec.cpus is not None:
        words.append(f"--cpuset-cpus={','.join(map(str, spec.cpus))}")
    return words
