"""How is a server that speaks TensorFlow Serving's API launched, given its parameters, and stopped?

Launches the bundled server, or `target.command`, a local `tensorflow_model_server`. The bundled server takes new
batching parameters between two batches; any other is restarted for them. Unless `target.flags` say otherwise a model
that does not load is not tried again (TensorFlow Serving: five times, a minute apart), so that the reason is told at
once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from batchtune.batching.parameters import Configuration, to_dict
from batchtune.batching.tfserving import format_tfserving_text
from batchtune.errors import TargetError, UsageError
from batchtune.scenario.spec.scenario import Scenario, TargetSpec
from batchtune.scenario.spec.section import require_cpus
from batchtune.scratch import ScratchFolder
from batchtune.target.container import container_of
from batchtune.target.endpoint import Endpoint, control_client, in_words, read_signature, wait_until_ready
from batchtune.target.model_errors import meaning_of
from batchtune.target.model_files import resolve_model, served_name
from batchtune.target.process import ServerProcess, free_port
from batchtune.target.server_log import ServerLog
from batchtune.target.telemetry import Counters, read_counters
from batchtune.wire.signature import Signature

TUNING_PATH = "/v1/tuning/batching_parameters"

DYING_S: Final = 0.2
"""A server that is killed closes its connections a moment before it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRecord:
    """How a configuration came into force, and how many seconds that took."""

    how: Literal["hot", "restart", "unchanged"]
    seconds: float


class TfServingTarget:
    """A launched server, as the scenario's `target` describes it; a context manager that stops it."""

    def __init__(self, spec: TargetSpec, *, on_event: Callable[[str], None] = lambda _text: None) -> None:
        require_cpus("target.cpus", spec.cpus)
        self._spec = spec
        self._flags = {name.lstrip("-"): _flag_text(value) for name, value in spec.flags.items()}
        self._on_event = on_event
        self._scratch = ScratchFolder()
        self._log = ServerLog(self._scratch.path / "server.log")
        self._process: ServerProcess | None = None
        self._launches = 0
        self._in_force: Configuration | None = None
        self._endpoint: Endpoint | None = None
        self._base_path: Path | None = None

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            raise TargetError("the server has not been launched yet")
        return self._endpoint

    @property
    def in_force(self) -> Configuration | None:
        """The configuration applied last; None before the first, and where the server died or does not answer."""
        return self._in_force

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def apply(self, configuration: Configuration) -> ApplyRecord:
        """Bring a configuration into force: between two batches where the server can, else by a restart.

        Raises:
            TargetError: the server refused it, did not start, or died.
        """
        started = time.monotonic()
        running = self._process is not None and self._process.running
        if running and configuration == self._in_force:
            return ApplyRecord(how="unchanged", seconds=0.0)
        same_flags = self._in_force is not None and configuration.flags == self._in_force.flags
        if running and self._spec.command is None and same_flags:
            self._apply_hot(configuration)
            how: Literal["hot", "restart"] = "hot"
        else:
            self._restart(configuration)
            how = "restart"
        self._in_force = configuration
        self._log.copy()
        return ApplyRecord(how=how, seconds=time.monotonic() - started)

    def counters(self) -> Counters:
        """One reading of the server's metrics. A server that does not answer is started anew by the next `apply`.

        Raises:
            TargetError: the server died or does not answer.
        """
        process = self._running_process()
        process.raise_if_dead()
        try:
            return read_counters(self.endpoint, server_cpu_s=process.cpu_s, memory_bytes=process.memory_bytes)
        except TargetError:
            self._in_force = None
            process.raise_if_dead(within_s=DYING_S)
            raise

    def signature(self, name: str) -> Signature:
        return read_signature(self.endpoint, name)

    def alive(self) -> bool:
        return self._process is not None and self._process.running

    def keep_log(self, path: Path) -> None:
        """From now on keep what the server says in this file too, bounded in size."""
        self._log.keep_in(path)

    def log_tail(self) -> str:
        return self._process.log_tail() if self._process else "  (not started)"

    def close(self) -> None:
        """Stop the server and remove its scratch files; more than once is fine."""
        if self._process is not None:
            self._process.stop()
            self._process = None
        self._log.copy()
        self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _running_process(self) -> ServerProcess:
        if self._process is None:
            raise TargetError("the server has not been launched yet")
        return self._process

    def _apply_hot(self, configuration: Configuration) -> None:
        import httpx

        wanted: dict[str, Any] = {"enable_batching": configuration.batching is not None}
        if configuration.batching is not None:
            wanted |= to_dict(configuration.batching)
        try:
            with control_client(self.endpoint, timeout_s=30.0) as client:
                answer = client.put(TUNING_PATH, json=wanted)
        except httpx.HTTPError as error:
            self._in_force = None
            self._running_process().raise_if_dead(within_s=DYING_S)
            raise TargetError(
                f"the server did not take new batching parameters: {in_words(error)}"
            ) from error
        if answer.status_code != 200:
            raise TargetError(f"the server refused {configuration.label()}: {_error_text(answer.text)}")

    def _restart(self, configuration: Configuration) -> None:
        self._in_force = None
        if self._process is not None:
            self._process.stop()
        flags = {"max_num_load_retries": "0", **self._flags, **dict(configuration.flags)}
        # TensorFlow Serving reads a port of 0 as "off", so free ports are chosen here.
        grpc_port = int(flags.pop("port", 0)) or free_port()
        rest_port = int(flags.pop("rest_api_port", 0)) or free_port()
        model_name = flags.pop("model_name", None) or served_name(self._spec.model)
        arguments = [
            f"--port={grpc_port}",
            f"--rest_api_port={rest_port}",
            f"--model_name={model_name}",
            *self._model_arguments(flags),
            f"--monitoring_config_file={self._write('monitoring.txt', 'prometheus_config { enable: true }')}",
            *self._batching_arguments(configuration),
            *(f"--{name}={value}" for name, value in sorted(flags.items())),
        ]
        self._endpoint = Endpoint(model_name=model_name, grpc_port=grpc_port, rest_port=rest_port)
        program = self._program()
        self._launches += 1
        container = container_of(program, self._scratch.path / f"container-{self._launches}")
        self._process = ServerProcess(
            [*(container.run_command if container else program), *arguments],
            container=container,
            log_path=self._log.path,
            cpus=self._spec.cpus,
        )
        self._process.start()
        try:
            wait_until_ready(
                self._endpoint, limit_s=self._spec.ready_timeout_s, still_alive=self._process.raise_if_dead
            )
            if self._spec.command is not None:
                self._process.look_for_listener(rest_port)
        except TargetError as error:
            if not self._process.running:
                hint = meaning_of(error.message) or "mend what it names: the model, a flag, or target.command"
                raise TargetError(error.message, hint=error.hint or hint) from error
            tail = self._process.log_tail()
            self._process.stop()
            raise TargetError(f"{error.message}; its last words:\n{tail}", hint=error.hint) from error
        except BaseException:
            self._process.stop()
            raise

    def _program(self) -> list[str]:
        if self._spec.command is not None:
            return list(self._spec.command)
        return [
            sys.executable,
            "-m",
            "batchtune.server",
            "--enable_tuning_api",
            f"--device={self._spec.device}",
        ]

    def _model_arguments(self, flags: Mapping[str, str]) -> list[str]:
        if "model_config_file" in flags:
            return []
        if self._base_path is None:
            self._base_path = resolve_model(
                self._spec.model,
                framework=self._spec.framework,
                folder=self._scratch.path / "models",
                on_event=self._on_event,
            )
        return [f"--model_base_path={self._base_path}"]

    def _batching_arguments(self, configuration: Configuration) -> list[str]:
        if configuration.batching is None:
            return []
        path = self._write("batching_parameters.txt", format_tfserving_text(configuration.batching))
        return ["--enable_batching=true", f"--batching_parameters_file={path}"]

    def _write(self, name: str, text: str) -> Path:
        path = self._scratch.path / name
        path.write_text(text, encoding="utf-8")
        return path


def launched_target(
    scenario: Scenario, *, on_event: Callable[[str], None] = lambda _text: None
) -> TfServingTarget:
    """The target that a scenario describes, not started yet.

    Raises:
        UsageError: the scenario's requests speak a protocol that such a server does not.
    """
    protocol = scenario.request.protocol
    if protocol not in ("grpc", "rest"):
        raise UsageError(
            f"request.protocol: no {scenario.target.kind} server speaks {protocol}",
            hint="load a running KServe v2 server with `batchtune load --rest-url` or `--grpc-url`",
        )
    return TfServingTarget(scenario.target, on_event=on_event)


def _flag_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _error_text(body: str) -> str:
    import orjson

    try:
        return str(orjson.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:300]
