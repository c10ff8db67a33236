"""Launches a server that speaks TensorFlow Serving's API, applies parameters to it, and stops it.

Launches the bundled server, a local `tensorflow_model_server`, one in a container, or `target.command`. The
bundled server takes new batching parameters between two batches; any other is restarted for them. Unless
`target.flags` say otherwise, a model that does not load is not tried again (TensorFlow Serving: five times, a
minute apart), so that the reason is reported at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from batchtune.batching.parameters import (
    LENGTH_BUCKETS,
    NO_BUCKETS,
    BatchingParameters,
    Configuration,
    to_dict,
)
from batchtune.batching.tfserving_file import format_tfserving_text
from batchtune.errors import TargetError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.section import require_cpus
from batchtune.scenario.spec.target import TargetSpec
from batchtune.system import ScratchFolder
from batchtune.target.container import MODELS_INSIDE, SCRATCH_INSIDE, tfservings_container
from batchtune.target.endpoint import (
    Endpoint,
    answer_of,
    error_text,
    read_signature,
    require_launched,
    wait_until_ready,
)
from batchtune.target.model_files import batches_inside, lies_bare, located_model, resolve_model, served_name
from batchtune.target.process import DYING_S, ServerLog, ServerProcess, coming_up, free_ports
from batchtune.target.telemetry import Counters, read_counters
from batchtune.wire.signature import Signature

TUNING_PATH = "/v1/tuning/batching_parameters"


# How many requests a server gets at once, and whether it has the threads for them.
#
# In TensorFlow Serving a request holds a thread from its arrival to its answer, also while its batch fills: fewer
# threads than clients are a queue before the queue, and a batch never has more requests than there are threads.

THREAD_LIMITS: Final = ("grpc_max_threads", "rest_api_num_threads")

_OPEN_LOOP_REQUESTS: Final = 1024
"""Requests under way to allow for in an open loop, where as many wait as the server lets: beyond this it is
overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The most that a server has to handle at once, by which its limits of threads are set."""

    # The most requests under way at once.
    clients: int
    # Rows of the largest request.
    rows: int
    # The scenario's `request.protocol`.
    protocol: str

    @property
    def threads(self) -> int:
        """A number of server threads that this many clients never exhaust."""
        return self.clients + 16  # gRPC's own pollers


def demand_of(scenario: Scenario, *, clients_most: int = 0) -> Demand:
    """Compute the most requests that a search of the scenario may have under way: the maximum of those of its load, of
    closed loops that keep the largest batches full, of `clients_most`, and of 1,024."""
    rows = scenario.request.rows_most
    space = scenario.search.space

    def most(name: str) -> int:
        knob = space.get(name)
        values = (scenario.fixed.get(name),) if knob is None else knob.values
        return max((value for value in values if isinstance(value, int)), default=1)

    full = most("max_batch_size") * (1 + most("num_batch_threads")) // rows
    load = scenario.load
    waiting = load.max_in_flight or _OPEN_LOOP_REQUESTS if load.open_loop else load.concurrency or 1
    clients = max(waiting, full, clients_most, _OPEN_LOOP_REQUESTS)
    return Demand(clients=clients, rows=rows, protocol=scenario.request.protocol)


def thread_limits(target: TargetSpec, demand: Demand) -> dict[str, str]:
    """Return the flags that raise TensorFlow Serving's own limits of threads above `demand`, name -> value, such as
    `{"grpc_max_threads": "1040"}`; {}: a server that may have other flags, neither a local tensorflow_model_server nor
    one in docker."""
    if target.runs not in ("local", "docker"):
        return {}
    return dict.fromkeys(THREAD_LIMITS, str(demand.threads))


def thread_words(configuration: Configuration, flags: Mapping[str, str], demand: Demand) -> Iterator[str]:
    """Yield a warning if the user's own limit of threads is so low that batches of `max_batch_size` never fill."""
    name = "rest_api_num_threads" if demand.protocol == "rest" else "grpc_max_threads"
    text = flags.get(name, "")
    batching = configuration.batching
    if not text.isdigit() or batching is None or batching.max_batch_size is None:
        return
    threads = int(text)
    if batching.max_batch_size > threads * demand.rows:
        rows = f"{demand.rows} row{'' if demand.rows == 1 else 's'}"
        yield (
            f"max_batch_size {batching.max_batch_size} never fills: each request, of {rows}, holds one of "
            f"{threads} threads ({name}) while it waits"
        )


# The target.


class TfServingTarget:
    """A launched server, as the scenario's `target` describes it; a context manager that stops it.

    `in_force`: the configuration applied last; None: none yet, or the server was stopped or does not answer.
    `batches_inside`: name of a model -> how its own graph batches, in words ("": it does not), for the models launched
    so far.
    """

    def __init__(
        self,
        spec: TargetSpec,
        *,
        on_event: Callable[[str], None] = lambda _text: None,
        demand: Demand | None = None,
    ) -> None:
        require_cpus("target.cpus", spec.cpus)
        if "model_config_file" not in spec.flag_texts:  # before anything is said to be launched
            several = enumerate(spec.models)
            keys: dict[tuple[str | int, ...], str]
            keys = {("target", "models", at, "model"): own.model for at, own in several}
            for key, model in (keys or {("target", "model"): spec.model}).items():
                if "/" in model:
                    located_model(model, key)
        self._spec = spec
        self._demand = demand or Demand(clients=_OPEN_LOOP_REQUESTS, rows=1, protocol="grpc")
        self._told: set[str] = set()
        self._flags = spec.flag_texts
        self._is_bundled = spec.runs == "bundled"
        self._model_names = [own.name for own in spec.models]
        self._on_event = on_event
        self._scratch = ScratchFolder()
        self._log = ServerLog(self._scratch.path / "server.log")
        self._process = ServerProcess(log_path=self._log.path, cpus=spec.cpus)
        self.in_force: Configuration | None = None
        self._endpoint: Endpoint | None = None
        self._base_path: Path | None = None
        self.batches_inside: dict[str, str] = {}  # of the models launched so far, as of their endpoints

    @property
    def endpoint(self) -> Endpoint:
        """Where the first model answers; raises TargetError before the launch."""
        return require_launched(self._endpoint)

    @property
    def pid(self) -> int | None:
        """Process id of the server; None: none runs."""
        return self._process.pid

    def apply(self, configuration: Configuration) -> float | None:
        """Bring a configuration into force: between two batches where the server can, else by a restart. Returns the
        seconds from the launch until its models were AVAILABLE; None: it was not restarted.

        Raises:
            TargetError: the server refused it, did not start, or died.
        """
        running = self._process.running
        if running and configuration == self.in_force:
            return None
        startup_s: float | None = None
        if running and self._is_bundled and self._takes_hot(configuration):
            self._apply_hot(configuration)
        else:
            startup_s = self._restart(configuration)
        self.in_force = configuration
        self._log.copy()
        return startup_s

    def counters(self) -> Counters:
        """Read the server's metrics once. Where the server does not answer, the next `apply` launches it again.

        Raises:
            TargetError: the server died or does not answer.
        """
        process = self._process
        process.raise_if_dead()
        try:
            return process.with_usage(read_counters(self.endpoint))
        except TargetError:
            self.in_force = None
            process.raise_if_dead(within_s=DYING_S)
            raise

    def cpu_clock(self) -> Callable[[], float] | None:
        """Return a function that reads the CPU seconds so far of the server and its present descendants; None: the
        server does not run, or runs in a container or elsewhere."""
        return self._process.cpu_clock()

    def signature(self, name: str) -> Signature:
        """Read the signature called `name`; raises TargetError where there is none, or the server does not answer."""
        return read_signature(self.endpoint, name)

    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process.running

    def keep_log(self, path: Path) -> None:
        """From now on also copy the server's output to `path`, bounded in size."""
        self._log.keep_in(path)

    def log_tail(self) -> str:
        """Return the last lines of the server's log, indented by two spaces."""
        return self._process.log_tail()

    def stop(self) -> None:
        """End the server; the next `apply` launches it again."""
        self.in_force = None
        self._process.stop()

    def close(self) -> None:
        """Stop the server and remove its scratch files; more than once is fine."""
        self.stop()
        self._log.copy()
        self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_fault: object) -> None:
        self.close()

    def _takes_hot(self, configuration: Configuration) -> bool:
        """Whether the configuration differs from the one in force only in what the tuning API replaces."""
        if self.in_force is None:
            return False
        present, wanted = dict(self.in_force.flags), dict(configuration.flags)
        names = (present.keys() | wanted.keys()) - {LENGTH_BUCKETS}
        return all(present.get(name) == wanted.get(name) for name in names)

    def _apply_hot(self, configuration: Configuration) -> None:
        wanted: dict[str, Any] = {"enable_batching": configuration.batching is not None}
        if configuration.batching is not None:
            wanted |= to_dict(configuration.batching)
            wanted["models"] = own_fields(own_parameters(self._model_names, configuration))
            asked = {**self._flags, **dict(configuration.flags)}
            wanted[LENGTH_BUCKETS] = asked.get(LENGTH_BUCKETS, NO_BUCKETS)
        try:
            answer = answer_of(
                self.endpoint,
                TUNING_PATH,
                method="PUT",
                json=wanted,
                timeout_s=30.0,
                what="the server did not take new parameters",
            )
        except TargetError:
            self.in_force = None
            self._process.raise_if_dead(within_s=DYING_S)
            raise
        if answer.status_code != 200:
            raise TargetError(f"the server refused {configuration.label()}: {error_text(answer.text)}")

    def _restart(self, configuration: Configuration) -> float:
        """Launch the server anew with this configuration. Returns the seconds from the launch until its
        models were AVAILABLE, in steps of 20 ms."""
        self.stop()
        asked = {**self._flags, **dict(configuration.flags)}
        flags = {"max_num_load_retries": "0", **thread_limits(self._spec, self._demand), **asked}
        for word in thread_words(configuration, flags, self._demand):
            if word not in self._told:
                self._told.add(word)
                self._on_event(word)
        # TensorFlow Serving reads a port of 0 as "off", so free ports are chosen here.
        free_grpc_port, free_rest_port = free_ports(2)
        grpc_port = int(flags.pop("port", 0)) or free_grpc_port
        rest_port = int(flags.pop("rest_api_port", 0)) or free_rest_port
        names = self._model_names
        model_name = names[0] if names else flags.pop("model_name", "") or served_name(self._spec.model)
        arguments = [
            f"--port={grpc_port}",
            f"--rest_api_port={rest_port}",
            f"--model_name={model_name}",
            *self._model_arguments(flags, model_name, configuration),
            f"--monitoring_config_file={self._write('monitoring.txt', 'prometheus_config { enable: true }')}",
            *self._batching_arguments(configuration),
            *(f"--{name}={value}" for name, value in sorted(flags.items())),
        ]
        inside = self.batches_inside.get(model_name, "")
        self._endpoint = Endpoint(
            model_name=model_name, grpc_port=grpc_port, rest_port=rest_port, batches_inside=inside
        )
        program = self._program(model_name, (grpc_port, rest_port))
        launched_s = time.monotonic()
        self._process.launch([*program, *arguments])
        try:
            with coming_up(self._process):
                for name in names or [model_name]:
                    wait_until_ready(
                        replace(self._endpoint, model_name=name),
                        limit_s=self._spec.ready_timeout_s,
                        still_alive=self._process.raise_if_dead,
                    )
        except TargetError as error:
            raise TargetError(self._in_users_paths(error.message), hint=error.hint) from error
        startup_s = time.monotonic() - launched_s
        if not self._is_bundled:
            self._process.look_for_listener(rest_port)
        return startup_s

    def _in_users_paths(self, text: str) -> str:
        """Return a message of the server with the model's own path in place of the scratch folder that it is
        linked into."""
        if self._base_path is None or not self._base_path.is_relative_to(self._scratch.path):
            return text
        for file in self._base_path.rglob("*"):
            text = text.replace(str(file), str(file.resolve())) if file.is_symlink() else text
        return text

    def _program(self, model_name: str, ports: tuple[int, ...]) -> list[str]:
        match self._spec.runs:
            case "docker":
                mounts = {self._scratch.path: SCRATCH_INSIDE}
                if self._base_path is not None:
                    inside = f"{MODELS_INSIDE}/{model_name}"
                    mounts[self._base_path] = f"{inside}/1" if lies_bare(self._base_path) else inside
                return tfservings_container(self._spec, ports=ports, mounts=mounts)
            case "bundled":
                device = f"--device={self._spec.device}"
                return [sys.executable, "-m", "batchtune.server", "--enable_tuning_api", device]
            case "local" | "command":
                return list(self._spec.command or ("tensorflow_model_server",))

    def _model_arguments(
        self, flags: Mapping[str, str], model_name: str, configuration: Configuration
    ) -> list[str]:
        if "model_config_file" in flags:
            return []
        if self._spec.models:
            return self._several_models(configuration)
        inside = self._spec.runs == "docker"
        if self._base_path is None:
            self._base_path = resolve_model(
                self._spec.model,
                framework=self._spec.framework,
                folder=None if inside else self._scratch.path / "models",
                on_event=self._on_event,
            )
            self._look_inside(model_name, self._base_path)
        return [f"--model_base_path={f'{MODELS_INSIDE}/{model_name}' if inside else self._base_path}"]

    def _several_models(self, configuration: Configuration) -> list[str]:
        """Write the file that lists the models; return the flags that name it. A model with batching
        parameters of its own is laid out anew, with those beside its versions."""
        batched = own_parameters(self._model_names, configuration)
        base_paths = {}
        for own in self._spec.models:
            folder = self._scratch.path / "models" / own.name
            base_path = resolve_model(
                own.model, framework=self._spec.framework, folder=folder, on_event=self._on_event
            )
            self._look_inside(own.name, base_path)
            beside = self._scratch.path / f"batched-{self._process.launches}" / own.name
            base_paths[own.name] = str(with_own_parameters(base_path, beside, batched.get(own.name)))
        listed = f"--model_config_file={self._write('models.txt', model_config_text(base_paths))}"
        return [listed, *(["--enable_per_model_batching_parameters=true"] if batched else [])]

    def _look_inside(self, name: str, base_path: Path) -> None:
        """Note how a model batches inside its graph, and report it once."""
        if name not in self.batches_inside:
            self.batches_inside[name] = words = batches_inside(base_path)
            if words:
                self._on_event(f"{name} batches inside its graph: {words}; the server can leave it unbatched")

    def _batching_arguments(self, configuration: Configuration) -> list[str]:
        if configuration.batching is None:
            return []
        path = self._write("batching_parameters.txt", format_tfserving_text(configuration.batching))
        return ["--enable_batching=true", f"--batching_parameters_file={path}"]

    def _write(self, name: str, text: str) -> str:
        """Write a scratch file, and return its path as the server sees it."""
        path = self._scratch.path / name
        path.write_text(text, encoding="utf-8")
        return f"{SCRATCH_INSIDE}/{name}" if self._spec.runs == "docker" else str(path)


class ServedModel:
    """One of several models of a started server, with the methods that a measurement needs; its counters are those of
    the whole server."""

    def __init__(self, server: TfServingTarget, name: str) -> None:
        self._server = server
        self._name = name

    @property
    def endpoint(self) -> Endpoint:
        """Where the model answers."""
        inside = self._server.batches_inside.get(self._name, "")
        return replace(self._server.endpoint, model_name=self._name, batches_inside=inside)

    @property
    def in_force(self) -> Configuration | None:
        """The model's part of the configuration applied last; None: none was applied yet, or the server was stopped or
        does not answer."""
        whole = self._server.in_force
        return None if whole is None else whole.of_model(self._name)

    def counters(self) -> Counters:
        """Read the metrics of the whole server once.

        Raises:
            TargetError: the server died or does not answer.
        """
        return self._server.counters()

    def signature(self, name: str) -> Signature:
        """Read the signature called `name`; raises TargetError where there is none, or the server does not answer."""
        return read_signature(self.endpoint, name)


# The parameters of several models, each its own.

OWN_PARAMETERS: Final = "batching_params.pbtxt"
"""TensorFlow Serving's name for the file with a version's own batching parameters, read with
--enable_per_model_batching_parameters."""


def model_config_text(base_paths: Mapping[str, str]) -> str:
    """Return a ModelServerConfig as text protobuf; `base_paths`: name of a served model -> its base path.

    TensorFlow Serving starts with no entry that lacks a platform, and knows tensorflow alone; the bundled server
    chooses the backend by the files of a version.
    """
    entries = "".join(
        f'  config {{ name: {json.dumps(name)} base_path: {_quoted(path)} model_platform: "tensorflow" }}\n'
        for name, path in base_paths.items()
    )
    return f"model_config_list {{\n{entries}}}\n"


def own_parameters(names: Iterable[str], configuration: Configuration) -> dict[str, BatchingParameters]:
    """Return model name -> its own batching parameters; {}: all models have equal ones, or no model batches."""
    batched = {name: configuration.of_model(name).batching for name in names if configuration.models}
    return {name: batching for name, batching in batched.items() if batching is not None}


def own_fields(models: Mapping[str, BatchingParameters]) -> dict[str, dict[str, Any]]:
    """Return model name -> {parameter: value}, the parameters that are set for the model, without those of threads,
    such as `{"a": {"max_batch_size": 8}}`."""
    return {name: to_dict(_without_threads(own)) for name, own in models.items()}


def own_text(parameters: BatchingParameters) -> str:
    """Return the text of a model's own parameters file, text protobuf such as `max_batch_size { value: 8 }`, without
    threads: only the server's file may set these."""
    return format_tfserving_text(_without_threads(parameters))


def _without_threads(parameters: BatchingParameters) -> BatchingParameters:
    return replace(parameters, num_batch_threads=None, thread_pool_name=None)


def with_own_parameters(base_path: Path, folder: Path, parameters: BatchingParameters | None) -> Path:
    """Return `folder`, made a base directory with the versions of `base_path`: links to each version's files, and a
    file with `parameters` beside them. `parameters` None: the model has none of its own, and `base_path` is
    returned."""
    if parameters is None:
        return base_path
    text = own_text(parameters)
    for version in base_path.iterdir():
        if not (version.is_dir() and version.name.isdigit()):
            continue
        own = folder / version.name
        own.mkdir(parents=True)
        for file in version.iterdir():
            if file.name != OWN_PARAMETERS:
                (own / file.name).symlink_to(file.resolve())
        (own / OWN_PARAMETERS).write_text(text, encoding="utf-8")
    return folder


def _quoted(path: str) -> str:
    """Quote a path for text proto, bytes beyond ASCII as they are: it knows no surrogate pairs."""
    return json.dumps(path, ensure_ascii=False)
