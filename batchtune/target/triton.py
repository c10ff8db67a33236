"""Launches or attaches to a Triton, applies configurations, reads it, and leaves it as it was.

Each configuration goes in by the model repository's load (`kserve`); the server is not restarted for it, and no file of
the repository is changed. An attached server gets back what it had when the target is closed. The caller stores what
that was before the first change, for the case that we are killed. A launched server runs in explicit model control with
one model of the repository loaded, on free ports of the loopback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from batchtune.batching.parameters import Configuration
from batchtune.batching.text_proto import parse_text_proto
from batchtune.batching.triton_config import FoundBatching, found_batching, other_batching, with_batching
from batchtune.errors import BatchingParametersError, TargetError, UsageError
from batchtune.scenario.spec.section import require_cpus
from batchtune.scenario.spec.target import TargetSpec
from batchtune.system import ScratchFolder, absolute
from batchtune.target.claim import Claim, Keep, OriginalModel
from batchtune.target.container import MODELS_INSIDE, tritons_container
from batchtune.target.endpoint import (
    Endpoint,
    external_endpoint,
    refuses,
    require_launched,
    require_there,
    running_endpoint,
    url_failure,
    wait_for,
)
from batchtune.target.kserve import (
    ADDED,
    EXECUTIONS,
    EXPLICIT,
    TritonRepository,
    is_marked,
    marked,
    put_back,
    read_kserve_counters,
    read_kserve_signature,
    require_unmarked,
)
from batchtune.target.model_files import served_name
from batchtune.target.process import DYING_S, ServerLog, ServerProcess, coming_up, free_ports
from batchtune.target.telemetry import Counters
from batchtune.wire.signature import Signature


class TritonTarget:
    """A Triton as the scenario's `target` describes it; a context manager that ends or restores it.

    `original`: what an earlier run of the same sweep found and could not put back; None: no such run. `in_force`: the
    configuration applied last; None: none yet, or the server died or does not answer.
    """

    def __init__(
        self,
        spec: TargetSpec,
        *,
        on_event: Callable[[str], None] = lambda _text: None,
        original: OriginalModel | None = None,
    ) -> None:
        require_cpus("target.cpus", spec.cpus)
        self._spec = spec
        self._on_event = on_event
        self._endpoint = running_endpoint(spec, served_name(spec.model)) if spec.attached else None
        where = (self.endpoint.rest_url, self.endpoint.model_name) if spec.attached else ("", spec.model)
        # Of a launched server it is never held.
        self._claim = Claim(*where, original=original, on_event=on_event)
        self._changed = original is not None
        self._is_lost = False
        self.in_force: Configuration | None = None
        self._batches = 0.0
        self._flags: Mapping[str, str] = {}
        self._scratch = ScratchFolder()
        self._log = ServerLog(self._scratch.path / "server.log")
        self._process: ServerProcess | None = None  # of an attached server
        if not spec.attached:  # Triton ends its Python models politely: it takes some five seconds
            self._process = ServerProcess(log_path=self._log.path, cpus=spec.cpus, grace_s=10.0)

    @property
    def endpoint(self) -> Endpoint:
        """Where the model answers; raises TargetError before the launch."""
        return require_launched(self._endpoint)

    @property
    def pid(self) -> int | None:
        """Process id of a launched server; None: none runs."""
        return None if self._process is None else self._process.pid

    def start(self, *, before_load: Keep | None = None) -> FoundBatching:
        """Launch the server or connect to it. Return how the model batched, by its configuration, before the first
        change.

        A model that an attached server does not serve is loaded from its own files, so that Triton reports its
        configuration; before that, `before_load` is called with the model as it is to be put back.

        Raises:
            TargetError: nobody answers, no such model, the server did not start, or another process changes it now.
            UsageError: the model cannot be batched, or has no version directory.
        """
        if self._process is not None and not self._process.running:
            self._endpoint = launch(self._process, self._spec, self._flags)
            self._log.copy()
        if self._process is None and not self._claim.held:
            self._claim.hold(self._judged)
            self._changed = self._claim.original is not None
        original = self._claim.original
        if original is None or not original.config:
            original = self._claim.original = self._read(before_load)
        try:
            return found_batching(original.config)
        except BatchingParametersError as error:
            raise UsageError(f"target.model: {error.message}", hint=error.hint) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise TargetError(
                f"{self.endpoint.rest_url} reports an invalid configuration of {self.endpoint.model_name}: {error}",
                hint="is that a Triton?",
            ) from error

    def _judged(self, earlier: OriginalModel) -> tuple[bool, str]:
        """Return whether the server still has the configuration of an earlier process's last trial, and in words
        what it had before; False and what it has now where somebody loaded the model with another one since."""
        now = self._repository().config() if earlier.config and self._repository().require_model() else {}
        if now and now != earlier.config and not is_marked(now):
            return False, found_batching(now).words()
        return True, earlier.words()

    def keep_original(self, keep: Keep) -> None:
        """Call `keep` with the model as it is to be put back: now, and again when it has been put back. Required before
        an attached server is changed.

        Raises:
            TargetError: nobody answers, no such model, the server did not start, or another process changes it now.
            UsageError: the model cannot be batched, or has no version directory.
        """
        self.start()
        self._claim.keep = keep
        self._claim.record(self._found())

    def apply(self, configuration: Configuration) -> None:
        """Bring a configuration into force by loading the model with it; by a restart where its server flags differ
        from those in force.

        Raises:
            TargetError: the server refused it, did not start, or died. ServerGoneError: an attached server does not
                return.
            ValueError: `keep_original` was not called for an attached server.
        """
        if self._process is None and self._claim.keep is None:
            raise ValueError("keep_original must run before an attached server is changed")
        if self._process is None:
            require_there(self.endpoint, self._on_event)
        if configuration == self.in_force and self._still_in_force(configuration):
            return
        self._restart_for(configuration)
        self.in_force = None
        wanted = with_batching(self._found().config, configuration)
        try:
            self._load(wanted if self._process is not None else marked(wanted))
            now = self._repository().config()
        except TargetError as error:
            if self._process is not None:
                self._process.raise_if_dead(within_s=DYING_S)
            raise TargetError(f"{configuration.label()}: {error.message}", hint=error.hint) from error
        other = _other_batching(now, wanted)
        if other:
            is_added = "dynamic_batching" in now and "dynamic_batching" not in wanted
            hint = ADDED if is_added else ""
            raise TargetError(f"the server took {configuration.label()}, but runs {other}", hint=hint)
        self.in_force, self._batches = configuration, 0.0

    def counters(self) -> Counters:
        """Read the model's statistics once.

        Raises:
            TargetError: the server died or does not answer, or somebody else loaded the model.
        """
        try:
            if self._process is not None:
                self._process.raise_if_dead()
            counters = read_kserve_counters(self.endpoint)
        except TargetError:
            self.in_force = None
            if self._process is not None:
                self._process.raise_if_dead(within_s=DYING_S)
            raise
        self._require_going_on(counters)
        return counters if self._process is None else self._process.with_usage(counters)

    def cpu_clock(self) -> Callable[[], float] | None:
        """Return a function that reads the CPU seconds so far of the server and its present descendants; None: the
        server is attached, does not run, or runs in a container."""
        return None if self._process is None else self._process.cpu_clock()

    def signature(self, name: str) -> Signature:
        """Read the model's inputs and outputs as a signature called `name`; raises TargetError where there are none."""
        return read_kserve_signature(self.endpoint, name)

    def alive(self) -> bool:
        """Whether a launched server runs; for an attached server, whether it does not refuse connections."""
        return not refuses(self.endpoint) if self._process is None else self._process.running

    def keep_log(self, path: Path) -> None:
        """From now on also copy a launched server's output to `path`, bounded in size."""
        if self._process is not None:
            self._log.keep_in(path)

    def log_tail(self) -> str:
        """Return the last lines of a launched server's log, indented by two spaces; for an attached server a line that
        says who has it."""
        return "  (its log is with its owner)" if self._process is None else self._process.log_tail()

    def restore(self) -> None:
        """Put back, once, the configuration that an attached server had before; does nothing where it was not changed.

        Raises:
            TargetError: the server is gone, or does not take it.
        """
        if self._process is not None or not self._changed or self._is_lost:
            return
        original = self._found()
        try:
            self._claim.put_back(original, partial(put_back, self._repository()))
        except TargetError:
            self._is_lost = True
            raise
        self._changed = False
        self.in_force = None
        self._on_event(f"{original.model} is configured as it was: {original.words()}")

    def stop(self) -> None:
        """End a launched server, which the next `apply` launches again; an attached server is left running."""
        if self._process is not None:
            self.in_force = None
            self._process.stop()
            self._log.copy()

    def close(self) -> None:
        """End a launched server; restore an attached one, and unlock it for others even where that fails. May be called
        more than once.

        Raises:
            TargetError: the attached server is gone, or does not take its former configuration.
        """
        self.stop()
        try:
            self.restore()
        finally:
            self._claim.release()
            self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_fault: object) -> None:
        self.close()

    def _still_in_force(self, configuration: Configuration) -> bool:
        """Whether the configuration applied last is in force; an attached server's own is read, since others may
        change it too.

        Raises:
            TargetError: it does not answer.
        """
        if self._process is not None:
            return self._process.running
        wanted = with_batching(self._found().config, configuration)
        return not _other_batching(self._repository().config(), wanted)

    def _require_going_on(self, counters: Counters) -> None:
        """Raise TargetError where the count of batches fell, which begins anew with each load of a model:
        somebody else loaded it."""
        if EXECUTIONS not in counters.series:
            return
        batches = sum(counters.series[EXECUTIONS].values())
        if batches < self._batches:
            self.in_force, self._batches = None, 0.0
            raise TargetError(
                f"{self.endpoint.model_name} was loaded by somebody else, or restarted: its count of batches went back"
            )
        self._batches = batches

    def _restart_for(self, configuration: Configuration) -> None:
        """Start a launched server that does not run, or whose flags differ from the configuration's."""
        flags = configuration.server_flags
        if self._process is not None and self._process.running and flags != self._flags:
            self.stop()
        self._flags = flags
        self.start()

    def _read(self, before_load: Keep | None) -> OriginalModel:
        """Return the model as it is now, loaded for that where it is not served. Until that load has ended
        the claim says that the model is not served.

        Raises:
            TargetError: no such model, or it does not load.
        """
        repository, endpoint = self._repository(), self.endpoint
        original = self._claim.original or OriginalModel(
            model=endpoint.model_name,
            rest_url=endpoint.rest_url,
            loaded=repository.require_model(),
            config={},
            attached=self._process is None,
        )
        if not original.loaded:
            if before_load is not None:
                self._claim.keep = before_load
            self._claim.record(original)
            original = self._found()
            self._load()
        config = repository.config()
        require_unmarked(config, model=endpoint.model_name)
        return replace(original, config=config)

    def _load(self, config: Mapping[str, Any] | None = None) -> None:
        """Load the model and note that it was changed: also where the load failed, except on a server that
        takes no orders."""
        before, self._changed = self._changed, True
        try:
            self._repository().load(config)
        except TargetError as error:
            self._changed = before or error.hint != EXPLICIT
            raise

    def _found(self) -> OriginalModel:
        if self._claim.original is None:
            raise TargetError("the server has not been reached yet")
        return self._claim.original

    def _repository(self) -> TritonRepository:
        return TritonRepository(self.endpoint, limit_s=self._spec.ready_timeout_s)


def _other_batching(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Describe the batching of a configuration where it is not what was wanted; "": it is.

    Raises:
        TargetError: `config` is not even a configuration.
    """
    try:
        return other_batching(config, wanted)
    except (BatchingParametersError, ValueError, TypeError, AttributeError) as error:
        raise TargetError(f"the server now reports a configuration without batches: {error}") from error


def restored(original: OriginalModel, spec: TargetSpec) -> OriginalModel:
    """Put back the model of an attached server as `original` says, in place of a process that changed it and was
    killed.

    Returns `original` with `restored` set.

    Raises:
        TargetError: the server is gone or does not take it, or another process changes it now.
    """
    endpoint = external_endpoint(
        model_name=original.model, rest_url=original.rest_url, grpc_url=None, tls=spec.tls
    )
    claim = Claim(endpoint.rest_url, original.model)
    try:
        claim.lock()
        claim.put_back(original, partial(put_back, TritonRepository(endpoint, limit_s=spec.ready_timeout_s)))
    finally:
        claim.release()
    return replace(original, restored=True)


# A tritonserver of our own, for one model of a repository.


def launch(process: ServerProcess, spec: TargetSpec, flags: Mapping[str, str]) -> Endpoint:
    """Launch the server with `flags`, which override those of `target.flags`, and return when the model is ready.

    Raises:
        UsageError: `target.model` is no model with versions in a repository.
        TargetError: the server did not start, or not in time; with the last lines of its log.
    """
    repository, model = model_in_repository(spec.model)
    inside = spec.runs == "docker"
    addresses = () if inside else ("http-address", "grpc-address", "metrics-address")
    loopback = dict.fromkeys(addresses, "127.0.0.1")
    port_flags = ("http-port", "grpc-port", "metrics-port")
    ports = dict(zip(port_flags, free_ports(len(port_flags)), strict=True))
    asked = {**spec.flag_texts, **flags}
    ports |= {name: int(asked.pop(name)) for name in port_flags if name in asked}
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
        program = tritons_container(spec, ports=tuple(ports.values()), mounts=mounts)
    else:
        program = list(spec.command or ("tritonserver",))
    process.launch([*program, *flag_words(arguments)])
    endpoint = Endpoint(model_name=model, rest_port=ports["http-port"], grpc_port=ports["grpc-port"])
    with coming_up(process):
        wait_for(
            lambda _left_s: url_failure(f"{endpoint.kserve_path}/ready", endpoint),
            what=f"model {endpoint.model_name!r} at {endpoint.rest_url} is not ready",
            limit_s=spec.ready_timeout_s,
            still_alive=process.raise_if_dead,
        )
    process.look_for_listener(endpoint.rest_port)
    return endpoint


def flag_words(flags: Mapping[str, str]) -> list[str]:
    """Return flags as words of tritonserver's command line, `--NAME=VALUE`; `disable-auto-complete-config`, where it is
    "true", without a value. `flags`: name, without dashes, -> value."""
    bare = "disable-auto-complete-config"
    words = [f"--{name}={text}" for name, text in flags.items() if name != bare]
    return [*words, f"--{bare}"] if flags.get(bare) == "true" else words


def model_in_repository(model: str) -> tuple[Path, str]:
    """Return (model repository, model's name) for `target.model`, a folder in a model repository.

    Raises:
        UsageError: `model` is no folder with a version directory.
    """
    path = absolute(Path(model).expanduser())
    if not path.is_dir():
        raise UsageError(
            f"target.model: {model!r} does not exist",
            hint="give a model's folder in a model repository; of a running Triton give its name, and target.rest_url",
        )
    if not any(folder.is_dir() and folder.name.isdigit() for folder in path.iterdir()):
        inside = sorted(folder.name for folder in path.iterdir() if (folder / "config.pbtxt").is_file())
        hint = f"did you mean {path / inside[0]}?" if inside else "expected <version>/ next to config.pbtxt"
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
