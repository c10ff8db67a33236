"""Tunes any server by commands of the user's that launch it, set its parameters, check it, and put it back.

A Kubernetes rollout, a compose file, or a server that nobody here knows. The parameters go to a command as JSON on its
stdin, or in files that its words name; to a server of kind http as `settings` says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from batchtune.batching.kubernetes import digest_of
from batchtune.batching.parameters import Configuration
from batchtune.batching.tfserving_file import parameters_file, rendered
from batchtune.errors import TargetError
from batchtune.scenario.spec.http_server import ReadySpec
from batchtune.scenario.spec.target import (
    DIGEST_PLACE,
    FILE_PLACE,
    JSON_PLACE,
    PORT_PLACES,
    TargetSpec,
    require_sayable,
    takes_file,
)
from batchtune.system import ScratchFolder, interrupts_noted
from batchtune.target.claim import Claim, Keep, OriginalModel
from batchtune.target.container import ending_with_us
from batchtune.target.endpoint import (
    Endpoint,
    connection_failure,
    refuses,
    require_there,
    running_endpoint,
    url_failure,
    wait_for,
    wait_until_ready,
)
from batchtune.target.external import ExternalTarget
from batchtune.target.model_files import served_name
from batchtune.target.process import (
    DYING_S,
    ServerLog,
    ServerProcess,
    free_ports,
    last_words,
    launch_named,
)
from batchtune.target.settings import Settings, with_places
from batchtune.target.telemetry import Counters, read_meant_counters
from batchtune.wire.signature import Signature


def small_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """Return name -> value of the environment variables that a command gets: the usual ones (PATH, HOME, …) and
    `names`, as far as they are set here."""
    usual = (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_RUNTIME_DIR"),
        *("SSH_AUTH_SOCK", "KUBECONFIG", "DOCKER_HOST", "DOCKER_CONTEXT"),
    )
    return {name: os.environ[name] for name in (*usual, *names) if name in os.environ}


def run_step(
    words: Sequence[str],
    *,
    key: str,
    limit_s: float,
    environment: Mapping[str, str],
    log_path: Path,
    given: str = "",
) -> None:
    """Run a command, `words` (the program and its arguments), with `given` on its stdin until it has exited with 0; its
    output is appended to the log.

    A command that fails or takes longer than `limit_s` seconds is ended with all processes that it started; processes
    that a successful one leaves running are not ended. `key`: the scenario's key of the command, for messages.

    Raises:
        TargetError: no such program, another exit code, or it took too long; with the last lines of its output.
    """
    if shutil.which(words[0], path=environment.get("PATH")) is None:
        place = f"it is seen from {Path.cwd()}; " if "/" in words[0] else ""
        raise TargetError(
            f"{key}: cannot start {words[0]!r}: no such program", hint=f"{place}give its whole path"
        )
    with log_path.open("ab") as log:
        begins_at = log.tell()
        try:
            process = subprocess.Popen(
                [*ending_with_us(), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(environment),
            )
        except OSError as error:
            raise TargetError(f"{key}: cannot start {words[0]!r}: {error.strerror}") from error
    try:
        process.communicate(given.encode(), timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        _end(process)
        raise TargetError(
            f"{key} did not end within {round(limit_s, 2):g} s{_said(log_path, begins_at)}",
            hint="it hangs, or needs a longer target.step_timeout",
        ) from error
    except BaseException:
        _end(process)
        raise
    if process.returncode != 0:
        _end(process)
        code = process.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
        raise TargetError(f"{key} {how}{_said(log_path, begins_at)}")


def _said(log_path: Path, begins_at: int) -> str:
    """Return the end of a message: the last lines of the log from a byte position on."""
    words = last_words(log_path, begins_at=begins_at)
    return f"; its last words:\n{words}" if words else "; it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of the command's session: SIGTERM, a second later SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0 if number == signal.SIGTERM else None)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


STEP_LIMIT_S: Final = 120.0
"""Limit of a command where the scenario gives none: an apply ends long before its rollout."""

ANSWERS_S: Final = 2.0
"""A running server takes a connection within this time, or nobody is there."""


class CommandTarget:
    """A server behind commands, as the scenario's `target` describes it; a context manager that ends it and puts it
    back.

    `in_force`: the configuration applied last; None: none yet, or the server died, does not answer or was changed
    since. `changed`: this sweep, or the one before it, applied something that is still to be put back. `kserve`: the
    server speaks KServe v2 instead of TensorFlow Serving's APIs. `tells` False: it speaks neither, so that counters
    come from `target.metrics` alone.
    """

    def __init__(
        self,
        spec: TargetSpec,
        *,
        kserve: bool = False,
        tells: bool = True,
        rows_per_request: int = 1,
        on_event: Callable[[str], None] = lambda _text: None,
        original: OriginalModel | None = None,
    ) -> None:
        self._on_event = on_event
        self._kserve = kserve
        self._tells = tells
        self._rows_per_request = rows_per_request
        self._model = served_name(spec.model)
        self._scratch = ScratchFolder()
        if spec.kind == "http":
            ports = dict(zip(PORT_PLACES, map(str, free_ports(len(PORT_PLACES))), strict=True))
            spec = with_places(spec, {**ports, "{scratch}": str(self._scratch.path)})
        self._spec = spec
        self._server = ExternalTarget(running_endpoint(spec, self._model), kserve=kserve)
        self._claim = Claim(self.endpoint.rest_url, self._model, original=original, on_event=on_event)
        self._settings: Settings | None = None
        if spec.set is not None:
            self._settings = Settings(
                spec.set,
                self.endpoint,
                rows_per_request=rows_per_request,
                limit_s=spec.ready_timeout_s,
                attached=spec.attached,
                on_event=on_event,
                record=self._record,
            )
        self._environment = small_environment(spec.environment or ())
        self._log = ServerLog(self._scratch.path / "server.log")
        self._steps_log = ServerLog(self._scratch.path / "steps.log")
        self._process = ServerProcess(log_path=self._log.path, install=spec.install)
        self.in_force: Configuration | None = None
        self.changed = False
        self._digest = ""

    @property
    def endpoint(self) -> Endpoint:
        """Where the server answers."""
        return self._server.endpoint

    @property
    def pid(self) -> int | None:
        """Process id of the launched server; None: none runs."""
        return self._process.pid

    def apply(self, configuration: Configuration) -> float | None:
        """Bring a configuration into force by the scenario's commands and settings, and return when the server is
        ready: the seconds from the launch of a server of kind http; None: none was launched, or the kind is another.

        Raises:
            TargetError: a command failed or hangs, the server is not ready in time, or it does not take the parameters;
                what was launched is ended. ServerGoneError: a running server does not return; WrongAnswerError: it has
                no such place for them.
            BatchingParametersError: the format of the parameters file cannot express it; nothing was run.
            UsageError: the scenario names parameters that the server does not show, or that cannot be put back.
        """
        require_sayable(configuration, self._spec)
        self.attach()
        if configuration == self.in_force and self.alive() and not self.foreign_change():
            return None
        self.in_force = None
        self._tell_unset()
        self.changed = True
        document = rendered(configuration, "json", model=self._model)
        self._write(configuration, document)
        launches = self._process.launches
        try:
            self._launch(configuration)
            launched_s = time.monotonic()
            if self._spec.apply is not None:
                self._step("apply", self._spec.apply, given=document)
            with launch_named(self._process):
                self._wait_until_ready()
            if self._settings is not None:
                self._settings.send(configuration)
            self._process.look_for_listener(self.endpoint.rest_port or self.endpoint.grpc_port)
        except BaseException:
            self._process.stop()
            raise
        finally:
            self._copy_logs()
        self.in_force = configuration
        was_launched = self._spec.kind == "http" and self._process.launches > launches
        return time.monotonic() - launched_s if was_launched else None

    def foreign_change(self) -> str:
        """Return in words, such as `max_batch_size 8, batch_timeout_micros 0`, the parameters that an attached server
        of kind http has now, if somebody else changed what the last `apply` set; the next `apply` then applies
        everything again. "": nobody did."""
        words = "" if self._settings is None or self.in_force is None else self._settings.other_words()
        if words:
            self.in_force = None
            self._on_event(
                f"{self._model} had {words} in place of the trial's parameters, which it gets again"
            )
        return words

    def counters(self) -> Counters:
        """Read the server's metrics once; for a launched server also its CPU time and memory.

        Raises:
            TargetError: the server died or does not answer; the next `apply` applies everything again.
        """
        try:
            self._raise_if_dead()
            if self._spec.metrics is not None or not self._tells:
                counters = read_meant_counters(self._spec.metrics, self.endpoint)
            else:
                counters = self._server.counters()
        except TargetError:
            self.in_force = None
            self._raise_if_dead(within_s=DYING_S)
            raise
        return self._process.with_usage(counters)

    def signature(self, name: str) -> Signature:
        """Read the signature called `name`; raises TargetError where there is none, or the server does not answer."""
        return self._server.signature(name)

    def alive(self) -> bool:
        """Whether the launched server runs. For a running server of kind http: whether it does not refuse connections.
        For one that other commands start: True, since only a request can show that."""
        if self._runs_already:
            return not refuses(self.endpoint)
        return self._spec.launch is None or self._process.running

    def cpu_clock(self) -> None:
        """Return None: it is not known which processes belong to the server."""

    def stop(self) -> None:
        """End the server that was launched; the next `apply` runs all commands again."""
        self.in_force = None
        self._process.stop()

    def keep_log(self, path: Path) -> None:
        """From now on also copy the output of the commands and of a launched server to `path`, bounded in size."""
        self._steps_log.keep_in(path)
        self._log.keep_in(path)

    def log_tail(self) -> str:
        """Return the last lines, indented by two spaces, of the launched server's log; where that is empty, of the
        commands' output."""
        nothing = "  (its log is not known here)" if self._runs_already else "  (nothing was said)"
        return last_words(self._log.path) or last_words(self._steps_log.path) or nothing

    def attach(self, keep: Keep | None = None) -> dict[str, Any]:
        """Lock a running server of kind http and note what is to be put back at the end. Return the parameters that it
        has now, by its own names, such as `{"max_batch_size": 8}`; {}: any other server, or a scenario that does not
        say how parameters are given.

        `keep` is called with what is to be put back, now and once that was done. After a sweep that was killed, this is
        what the server had before that sweep, unless somebody has set other parameters since: then these.

        Raises:
            TargetError: the server does not answer, or another process changes it now.
            UsageError: the scenario names parameters that the server does not show, or that cannot be put back.
        """
        if self._runs_already and not self.changed:
            self._wait_until_listening(ANSWERS_S)
        elif self._runs_already and require_there(self.endpoint, self._on_event):
            self.in_force = None
        if self._settings is None or not self._spec.attached:
            return {}
        if keep is not None:
            self._claim.keep = keep
        if not self._claim.held:
            settings = self._settings
            self._claim.hold(lambda earlier: (settings.take_kept(earlier.config), settings.words()))
            self.changed = self.changed or self._claim.original is not None
            if not self._settings.restorable:
                self._on_event(
                    f"{self._model} keeps the parameters of the last trial at the end: without "
                    "target.set.request.read those that it has now are not known"
                )
        present = self._settings.present()
        if self._settings.tells:
            present = {**self._spec.defaults, **present}
        original = self._claim.original
        if original is None:
            original = self._claim.original = OriginalModel(
                model=self._model,
                rest_url=self.endpoint.rest_url,
                loaded=True,
                config=self._settings.original(),
            )
        if keep is not None:
            self._claim.save(original)
        return present

    @property
    def present(self) -> dict[str, Any]:
        """The parameters that an attached server gets back at the end, by its own names; {}: any other server, or they
        cannot be read."""
        settings = self._settings
        if settings is None or not self._spec.attached or not settings.tells:
            return {}
        return {**self._spec.defaults, **settings.shown()}

    def restore(self) -> None:
        """Run `target.stop`, end what was launched, put back the parameters of an attached server, then run
        `target.restore`; all but the ending only where something was applied, and once. Where `target.stop` fails, this
        is only reported.

        Raises:
            TargetError: the server does not take its parameters back, or `target.restore` failed.
        """
        changed, self.changed = self.changed, False
        self.in_force = None
        with interrupts_noted():
            try:
                if changed and self._spec.stop is not None:
                    self._step("stop", self._spec.stop)
            except TargetError as error:
                self._on_event(error.message)
            finally:
                self._process.stop()
            if changed and self._spec.attached:
                self._put_back()
            if changed and self._spec.restore is not None:
                self._step("restore", self._spec.restore)
                self._on_event("target.restore restored the original state")

    def _put_back(self) -> None:
        """Give an attached server of kind http the parameters back that it had."""
        settings = self._settings
        if settings is None or self._claim.original is None:
            return
        self._claim.put_back(self._claim.original, lambda _original: settings.put_back())
        if settings.replaced:
            self._on_event(f"{self._model} has {settings.words()} again, which somebody set during the sweep")
            return
        self._on_event(
            f"{self._model} has what it had before"
            if settings.restorable
            else f"{self._model} keeps the parameters of the last trial: without target.set.request.read those from "
            "before the sweep are not known"
        )

    def close(self) -> None:
        """Do what `restore` does, and remove the scratch files; more than once is fine."""
        try:
            self.restore()
        finally:
            self._claim.release()
            self._copy_logs()
            self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_fault: object) -> None:
        self.close()

    def _tell_unset(self) -> None:
        """Report once which of the variables that the commands are to get are not set here."""
        unset = [name for name in self._spec.environment or () if name not in os.environ]
        if unset and not self.changed:
            are = "is" if len(unset) == 1 else "are"
            self._on_event(
                f"target.environment: {', '.join(unset)} {are} not set here, so the commands do without"
            )

    def _write(self, configuration: Configuration, document: str) -> None:
        """Write the files that the commands' words name, or that the server reads.

        Raises:
            BatchingParametersError: the format of a file cannot express the configuration.
        """
        if self._settings is not None:
            self._settings.write(configuration)
        self._digest = digest_of(configuration, parameters_file(configuration))
        self._json_path.write_text(document, encoding="utf-8")
        if self._spec.render is not None:
            text = rendered(
                configuration,
                self._spec.render,
                model=self._model,
                rows_per_request=self._rows_per_request,
            )
            self._file_path.write_text(text, encoding="utf-8")

    def _record(self) -> None:
        """Record what is to be put back on an attached server, and by what a trial's parameters are recognized."""
        original = self._claim.original
        if original is not None and self._settings is not None and self._settings.restorable:
            self._claim.record(replace(original, config=self._settings.kept()))

    def _launch(self, configuration: Configuration) -> None:
        """Start the server where it does not run; for every configuration where its command names a file with
        the parameters, or has them as flags or variables."""
        words, environment = self._spec.launch, self._environment
        restarts = words is not None and takes_file(words)
        restarts = restarts or (self._spec.set is not None and self._spec.set.restarts)
        if words is None or (self.alive() and not restarts):
            return
        command = self._filled(words)
        if self._settings is not None:
            command += self._settings.flags(configuration)
            environment = {**environment, **self._settings.environment(configuration)}
        self._process.launch(command, environment=environment)

    def _wait_until_ready(self) -> None:
        ready, limit_s = self._spec.ready, self._spec.ready_timeout_s
        if ready is None and self._spec.kind == "http" and not self._kserve:
            self._wait_until_listening(limit_s)
            return
        if ready is None and not self._kserve:
            wait_until_ready(self.endpoint, limit_s=limit_s, still_alive=self._raise_if_gone)
            return
        if ready is None:
            ready = f"{self.endpoint.rest_url}{self.endpoint.kserve_path}/ready"
        asked = ready
        wait_for(
            lambda left_s: self._unready(asked, left_s),
            what="the server is not ready",
            limit_s=limit_s,
            still_alive=self._raise_if_gone,
            step_s=0.2,
            hint="a big model, or a rollout, may need a longer target.ready_timeout",
        )

    def _wait_until_listening(self, limit_s: float) -> None:
        """Wait until a server of kind http takes connections, where the scenario gives no other sign of being
        ready."""

        def failure(_left_s: float) -> str:
            error = connection_failure(self.endpoint)
            return "" if error is None else error.strerror or "no connection"

        hint = "is target.url where the server listens?"
        if self._spec.launch is None:
            hint = f"start the server, or let target.launch start it; {hint}"
        what = f"nothing answers at {self._spec.url}"
        wait_for(failure, what=what, limit_s=limit_s, still_alive=self._raise_if_gone, step_s=0.05, hint=hint)

    def _unready(self, ready: tuple[str, ...] | str | ReadySpec, limit_s: float) -> str:
        if isinstance(ready, str):
            return url_failure(ready, self.endpoint)
        if isinstance(ready, ReadySpec):
            return url_failure(ready.url, self.endpoint, status=ready.status, body=ready.body)
        return self._failure(ready, limit_s)

    def _failure(self, words: Sequence[str], limit_s: float) -> str:
        try:
            self._step("ready", words, limit_s=limit_s)
        except TargetError as error:
            return error.message
        return ""

    def _step(self, key: str, words: Sequence[str], *, given: str = "", limit_s: float | None = None) -> None:
        run_step(
            self._filled(words),
            key=f"target.{key}",
            limit_s=limit_s or self._spec.step_timeout_s or STEP_LIMIT_S,
            environment=self._environment,
            log_path=self._steps_log.path,
            given=given,
        )

    def _filled(self, words: Sequence[str]) -> list[str]:
        filled = list(words)
        for place, text in (
            (JSON_PLACE, str(self._json_path)),
            (FILE_PLACE, str(self._file_path)),
            (DIGEST_PLACE, self._digest),
        ):
            filled = [word.replace(place, text) for word in filled]
        return filled

    @property
    def _json_path(self) -> Path:
        return self._scratch.path / "parameters.json"

    @property
    def _file_path(self) -> Path:
        suffix = ".yaml" if self._spec.render in ("k8s", "kserve", "cortex") else ".txt"
        return self._scratch.path / f"parameters{suffix}"

    def _copy_logs(self) -> None:
        self._steps_log.copy()
        self._log.copy()

    @property
    def _runs_already(self) -> bool:
        """Whether the server is of kind http and runs already; whoever started it may end it."""
        return self._spec.kind == "http" and self._spec.launch is None

    def _raise_if_dead(self, *, within_s: float = 0.0) -> None:
        if self._process.pid is not None:
            self._process.raise_if_dead(within_s=within_s)

    def _raise_if_gone(self) -> None:
        """Raise TargetError where waiting for the server is pointless: what was launched has ended, or a running
        server has."""
        self._raise_if_dead()
        if self._runs_already and self.changed:
            require_there(self.endpoint, self._on_event)


def restored(spec: TargetSpec) -> None:
    """Run a target's `restore` command, if it has one, in place of a run that was killed before it could.

    Raises:
        TargetError: the command failed.
    """
    if spec.restore is not None:
        with ScratchFolder() as scratch:
            run_step(
                spec.restore,
                key="target.restore",
                limit_s=spec.step_timeout_s or STEP_LIMIT_S,
                environment=small_environment(spec.environment or ()),
                log_path=scratch.path / "log",
            )
