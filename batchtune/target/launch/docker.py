"""With which words is a server run in a container?

Ports have the same number inside and outside, and lie on the loopback. The model, and what is written for the server,
are mounted read-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from batchtune.scenario.spec.server_words import DockerSpec
from batchtune.scenario.spec.target import TargetSpec

MODELS_INSIDE: Final = "/models"
SCRATCH_INSIDE: Final = "/batchtune"


def tfservings_container(spec: TargetSpec, *, ports: Iterable[int], mounts: Mapping[Path, str]) -> list[str]:
    """Everything before the server's flags. Its program is named, since the image's own script sets ports.

    As the first process of a container it would ignore SIGTERM; `docker run --init` puts another before it.
    """
    docker = spec.docker or DockerSpec()
    image = docker.image or f"tensorflow/serving{'' if docker.gpus is None else ':latest-gpu'}"
    head = _run(docker, spec, ports, mounts)
    first = ["--init"] if Path(docker.program).name == "docker" else []
    return [*head, *first, "--entrypoint=tensorflow_model_server", *docker.options, image]


def tritons_container(spec: TargetSpec, *, ports: Iterable[int], mounts: Mapping[Path, str]) -> list[str]:
    """The same for NVIDIA's image, which runs the program that it is given; Python models share memory of theirs."""
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
