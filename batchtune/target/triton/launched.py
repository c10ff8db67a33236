"""Starts a tritonserver of our own for one model of a repository, watches it and ends it.

It runs in explicit model control with that model loaded, on free ports of the loopback. The repository is
read, never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from batchtune.batching.text_proto import parse_text_proto
from batchtune.errors import BatchingParametersError, UsageError
from batchtune.scenario.spec.target import TargetSpec
from batchtune.system import ScratchFolder, absolute
from batchtune.target.endpoint import Endpoint, url_failure, wait_for
from batchtune.target.launch.container import MODELS_INSIDE, tritons_container
from batchtune.target.process import ServerLog, ServerProcess, coming_up, free_ports

_PORTS: Final = ("http-port", "grpc-port", "metrics-port")


class LaunchedTriton:
    """A server process and its log; started anew as often as needed, ended by `close`."""

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._scratch = ScratchFolder()
        self._log = ServerLog(self._scratch.path / "server.log")
        # Triton ends its Python models politely: it takes some five seconds.
        self.process = ServerProcess(log_path=self._log.path, cpus=spec.cpus, grace_s=10.0)

    def start(self, flags: Mapping[str, str]) -> Endpoint:
        """Start the server, with these flags over those of `target.flags`, and return when the model is ready.

        Raises:
            UsageError: no model with versions in a repository.
            TargetError: it did not start, or not in time; with its last words.
        """
        repository, model = model_in_repository(self._spec.model)
        inside = self._spec.runs == "docker"
        addresses = () if inside else ("http-address", "grpc-address", "metrics-address")
        loopback = dict.fromkeys(addresses, "127.0.0.1")
        ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        asked = {**self._spec.flag_texts, **flags}
        ports |= {name: int(asked.pop(name)) for name in _PORTS if name in asked}
        arguments = {
            "model-repository": MODELS_INSIDE if inside else str(repository),
            "model-control-mode": "explicit",
            "load-model": model,
            **loopback,
            **({"disable-auto-complete-config": "true"} if _is_complete(repository / model) else {}),
            **{name: str(port) for name, port in ports.items()},
            **asked,
        }
        if inside:
            mounts = {repository / model: f"{MODELS_INSIDE}/{model}"}
            program = tritons_container(self._spec, ports=tuple(ports.values()), mounts=mounts)
        else:
            program = list(self._spec.command or ("tritonserver",))
        self.process.launch([*program, *flag_words(arguments)])
        endpoint = Endpoint(model_name=model, rest_port=ports["http-port"], grpc_port=ports["grpc-port"])
        with coming_up(self.process):
            wait_for(
                lambda _left_s: url_failure(f"{endpoint.kserve_path}/ready", endpoint),
                what=f"model {endpoint.model_name!r} at {endpoint.rest_url} is not ready",
                limit_s=self._spec.ready_timeout_s,
                still_alive=self.process.raise_if_dead,
            )
        self.process.look_for_listener(endpoint.rest_port)
        self._log.copy()
        return endpoint

    def keep_log(self, path: Path) -> None:
        """From now on copy the server's output to this file too, bounded in size."""
        self._log.keep_in(path)

    def stop(self) -> None:
        """End the process; more than once is fine."""
        self.process.stop()
        self._log.copy()

    def close(self) -> None:
        """End the server and remove its scratch files; more than once is fine."""
        self.stop()
        self._scratch.close()


def flag_words(flags: Mapping[str, str]) -> list[str]:
    """Write flags as words of tritonserver's command line."""
    bare = "disable-auto-complete-config"
    words = [f"--{name}={text}" for name, text in flags.items() if name != bare]
    return [*words, f"--{bare}"] if flags.get(bare) == "true" else words


def model_in_repository(model: str) -> tuple[Path, str]:
    """Return (model repository, model's name) for `target.model`, a folder in a model repository.

    Raises:
        UsageError: `model` is no folder with a version.
    """
    path = absolute(Path(model).expanduser())
    if not path.is_dir():
        raise UsageError(
            f"target.model: {model!r} does not exist",
            hint="give a model's folder in a model repository; of a running Triton give its name, and target.rest_url",
        )
    if not any(folder.is_dir() and folder.name.isdigit() for folder in path.iterdir()):
        inside = sorted(folder.name for folder in path.iterdir() if (folder / "config.pbtxt").is_file())
        hint = f"did you mean {path / inside[0]}?" if inside else "expected <version>/ beside config.pbtxt"
        raise UsageError(f"target.model: no version directory in {path}", hint=hint)
    return path.parent, path.name


def _is_complete(folder: Path) -> bool:
    """Whether config.pbtxt names inputs, outputs and max_batch_size, which Triton would else read from the
    model.

    A Python model is started once more for that: 1.2 s of every load.
    """
    try:
        config = parse_text_proto(
            (folder / "config.pbtxt").read_text(encoding="utf-8"), source="config.pbtxt"
        )
    except (OSError, UnicodeDecodeError, BatchingParametersError):
        return False
    return {"max_batch_size", "input", "output"} <= {field.name for field in config.fields}
