"""Loads versions of models from disk, and unloads versions no longer wanted.

A keeper thread compares the versions that are configured and on disk with those that are loaded. It has
missing ones loaded (by a pool of load threads) and superfluous ones unloaded (each by a thread of its own),
but an old version answers until a wanted one is AVAILABLE, as TF Serving's availability-preserving policy has
it. No model waits for another: each is compared again once its loads have ended; while a version unloads,
none of that model is loaded. The states of a version: START (waits for a load thread), LOADING (also between
two attempts), AVAILABLE, UNLOADING, END. No exception ends the keeper thread; if anything else does,
`on_dead` is called, since no model would change again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.server.log import say, warn
from batchtune.server.models.model_config import ModelConfig, aspired_versions_on_disk, models_of
from batchtune.server.models.servable import Servable, VersionBook, VersionEntry, VersionStatus
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.status import StatusError

if TYPE_CHECKING:
    from batchtune.wire.tfserving.messages import ModelServerConfig


_logger = logging.getLogger(__name__)


class ModelRepository:
    """All models of the process.

    open_servable(name, version, directory): loads and warms up a version on a load thread, may raise StatusError.
    close_servable: answers a version's queued requests and frees it.
    on_loop: makes the event loop call a function soon; a version is closed only after two loop turns, when each request
    that found it has been submitted. on_dead: called if the keeper thread ends before the repository is closed. flags:
    when and how versions are loaded.
    """

    def __init__(
        self,
        models: Iterable[ModelConfig],
        *,
        open_servable: Callable[[str, int, Path], Servable],
        close_servable: Callable[[Servable], None],
        on_loop: Callable[[Callable[[], object]], object],
        on_dead: Callable[[], None],
        flags: ServerFlags,
    ) -> None:
        self._open_servable = open_servable
        self._close_servable = close_servable
        self._on_loop = on_loop
        self._on_dead = on_dead
        self._poll_wait_s = max(flags.file_system_poll_wait_seconds, 0)  # 0: looks at the disk once
        self._load_retries_max = flags.max_num_load_retries
        self._load_retry_interval_s = flags.load_retry_interval_micros / 1e6
        self._labels_for_unavailable = flags.allow_version_labels_for_unavailable_models
        self._wanted = {model.name: model for model in models}
        self._book = VersionBook()
        self.find = self._book.find  # called for every request
        self.statuses = self._book.statuses
        self._complaints: dict[str, str] = {}
        self._rounds_begun = 0
        self._rounds_done = 0
        self._look_again = False
        self._starting = True  # until no model is busy for the first time
        self._loads: dict[str, int] = {}  # under way or waiting for a thread, by model
        self._busy: set[str] = set()  # models that had something to load in the last round
        self._unloads: list[threading.Thread] = []
        self._fault = ""
        self._closing = False
        self._ended = False
        self._reconfiguring = threading.Lock()
        self._loaders = ThreadPoolExecutor(max_workers=flags.num_load_threads or 1, thread_name_prefix="load")
        self._keeper = threading.Thread(target=self._keep, name="model_repository", daemon=True)

    def names(self) -> tuple[str, ...]:
        """Return the names of the configured models, sorted."""
        return tuple(sorted(self._wanted))

    def start(self) -> None:
        """Begin to load models; returns at once."""
        self._keeper.start()

    def wait_until_loaded(self) -> None:
        """Block until each configured model has an AVAILABLE version, or can have none any more.

        A base path that is missing or empty is waited for, as in TF Serving, unless the disk is read only once
        (--file_system_poll_wait_seconds=0).

        Raises:
            StatusError: UNKNOWN where a model has no AVAILABLE version, FAILED_PRECONDITION for a label of a version
                that is not AVAILABLE.
        """
        with self._book.changed:
            self._book.changed.wait_for(lambda: self._closing or self._ended or self._is_settled())
        with self._reconfiguring:
            self._adopt_labels(list(self._wanted.values()))

    def reload_config(self, config: ModelServerConfig) -> None:
        """Serve exactly the models of `config`; blocks until each is loaded or has failed.

        Raises:
            StatusError: INVALID_ARGUMENT for an invalid configuration (nothing changes), UNKNOWN where a model did not
                become available, FAILED_PRECONDITION for a label of a version that is not AVAILABLE, INTERNAL where the
                disk could not be read, UNAVAILABLE while the server ends.
        """
        self.configure(models_of(config))

    def configure(self, models: Sequence[ModelConfig]) -> None:
        """Serve exactly these models; blocks until each is loaded or has failed. Concurrent calls take turns.

        Raises:
            StatusError: UNKNOWN where a model did not become available, FAILED_PRECONDITION for a label of a version
                that is not AVAILABLE, INTERNAL where the disk could not be read, UNAVAILABLE while the server ends.
        """
        with self._reconfiguring:
            with self._book.changed:
                before, self._wanted = self._wanted, {model.name: model for model in models}
            new = {m.name for m in models if before.get(m.name) != m or not self._book.available(m.name)}
            self._look_now(new)
            if self._closing:
                raise StatusError("UNAVAILABLE", "The server is shutting down")
            if self._fault:
                raise StatusError("INTERNAL", f"The models could not be looked for: {self._fault}")
            self._adopt_labels(models)

    def stop(self) -> None:
        """Begin no further load or unload, and end every wait for models; loaded versions still answer."""
        with self._book.changed:
            self._closing = True
            self._book.changed.notify_all()

    def close(self) -> None:
        """Stop, wait for loads and unloads under way, answer queued requests, unload every version."""
        self.stop()
        if self._keeper.is_alive():
            self._keeper.join()
        self._loaders.shutdown(wait=True, cancel_futures=True)
        for thread in self._unloads:
            thread.join()
        for name, versions in self._book.entries.items():
            for entry in versions.values():
                if entry.servable is not None:
                    self._end(name, entry, entry.servable)

    def _look_now(self, names: set[str]) -> None:
        """Have the keeper look at the disk at once, and wait until no load of these models is under way."""
        with self._book.changed:
            begun = self._rounds_begun
            self._look_again = True
            self._book.changed.notify_all()
            # A round that was under way may have begun before the change; the one after it did not.
            while not (
                self._closing or self._ended or (self._rounds_done > begun and not self._busy & names)
            ):
                self._book.changed.wait()

    def _adopt_labels(self, models: Sequence[ModelConfig]) -> None:
        failures = self._book.failures([model.name for model in models], self._complaints)
        if failures:
            listed = "; ".join(failures)
            raise StatusError("UNKNOWN", f"{len(failures)} servable(s) did not become available: {listed}")
        if not self._labels_for_unavailable:
            for model in models:
                self._book.check_labels(model)
        self._book.labels = {model.name: model.labels for model in models}

    # The keeper's thread.

    def _keep(self) -> None:
        try:
            while not self._closing:
                self._go_round()
        except BaseException:  # SystemExit, say: no Exception gets here
            _logger.exception("the thread that watches the models has ended")
        finally:
            with self._book.changed:
                self._ended = True
                self._book.changed.notify_all()
            if not self._closing:
                self._on_dead()

    def _go_round(self) -> None:
        with self._book.changed:
            self._look_again = False
            self._rounds_begun += 1
            wanted = dict(self._wanted)
        fault, busy = "", set[str]()
        try:
            busy = self._look(wanted)
        except Exception as error:  # the next round may go well
            fault = f"{type(error).__name__}: {error}"
            if fault != self._fault:
                _logger.exception("the models could not be compared with what is on disk")
        with self._book.changed:
            self._fault, self._busy = fault, busy
            self._starting = self._starting and bool(busy)
            self._rounds_done = self._rounds_begun
            self._book.changed.notify_all()
            self._book.changed.wait_for(lambda: self._look_again or self._closing, timeout=self._pause_s())

    def _pause_s(self) -> float:
        due = [
            entry.retry_at_s - time.monotonic()
            for name, versions in self._book.entries.items()
            if name not in self._busy
            for entry in versions.values()
            if entry.retry_at_s is not None
        ]
        longest_wait_s = 3600.0
        return max(0.0, min([self._poll_wait_s or longest_wait_s, *due]))

    def _is_settled(self) -> bool:
        return self._rounds_done > 0 and not self._busy and not any(map(self._may_come, self._wanted))

    def _may_come(self, name: str) -> bool:
        """Whether a model that has no AVAILABLE version may get one without a new configuration."""
        if self._book.available(name):
            return False
        statuses = [entry.status for entry in self._book.entries.get(name, {}).values()]
        if any(status.state in {"START", "LOADING"} for status in statuses):
            return True
        return self._poll_wait_s > 0 and all(status.error_code == "OK" for status in statuses)

    def _look(self, wanted: Mapping[str, ModelConfig]) -> set[str]:
        """Begin the loads and unloads that are due; returns the names of models with versions to load."""
        with self._book.changed:
            loading = set(self._loads)
        due: dict[str, dict[int, Path]] = {}
        aspired: dict[str, list[int]] = {}
        for name, model in wanted.items():
            directories, complaint = aspired_versions_on_disk(model)
            self._note_complaint(name, complaint)
            aspired[name] = list(directories)
            must_load = {v: path for v, path in directories.items() if self._must_load(name, v)}
            if must_load and name not in loading:
                due[name] = must_load
        self._book.announce((name, version) for name, versions in due.items() for version in versions)
        busy = loading.union(due)
        for name, versions in due.items():
            states = [entry.status.state for entry in self._book.entries[name].values()]
            if "UNLOADING" not in states:  # no third version shall be in memory
                self._begin_loads(name, versions)
        for name in list(self._book.entries):
            if name not in self._loads:
                self._tidy(name, aspired.get(name, []), removed=name not in wanted)
        return busy

    def _begin_loads(self, name: str, versions: Mapping[int, Path]) -> None:
        with self._book.changed:
            self._loads[name] = len(versions)
        for version, directory in versions.items():
            load = self._loaders.submit(self._load, name, version, directory)
            load.add_done_callback(partial(self._note_loaded, name))

    def _note_loaded(self, name: str, load: Future[None]) -> None:
        if not load.cancelled() and (error := load.exception()) is not None:
            _logger.error("a load of model %s ended with a fault", name, exc_info=error)
        with self._book.changed:
            self._loads[name] -= 1
            if not self._loads[name]:
                del self._loads[name]
                self._look_again = True
                self._book.changed.notify_all()

    def _note_complaint(self, name: str, complaint: str) -> None:
        if complaint and complaint != self._complaints.get(name):
            warn(complaint if self._rounds_done or not self._poll_wait_s else f"{complaint}; waiting")
        self._complaints[name] = complaint

    def _must_load(self, name: str, version: int) -> bool:
        entry = self._book.entries.get(name, {}).get(version)
        if entry is None or entry.status.state == "START":
            return True
        if entry.status.state == "END":
            return entry.status.error_code == "OK"  # unloaded before, and wanted again
        return entry.retry_at_s is not None and entry.retry_at_s <= time.monotonic()

    def _load(self, name: str, version: int, directory: Path) -> None:
        if self._closing:
            return
        entry = self._book.entries[name][version]
        with self._book.changed:
            entry.status = replace(entry.status, state="LOADING")
            entry.retry_at_s = None
            entry.attempts += 1
        try:
            servable = self._open_servable(name, version, directory)
        except StatusError as error:
            self._note_failure(name, entry, error.code, error.message)
            return
        except (Exception, SystemExit) as error:  # what a framework says of a file is its own affair
            _logger.exception("model %s version %d failed to load", name, version)
            self._note_failure(name, entry, "INTERNAL", f"{type(error).__name__}: {error}")
            return
        entry.attempts = 0
        self._book.publish(entry, servable=servable, status=VersionStatus(version=version, state="AVAILABLE"))
        say(f"model {name} version {version} is available: {servable.summary()}")

    def _note_failure(self, name: str, entry: VersionEntry, code: str, message: str) -> None:
        # At the start such a failure is final: the files are wrong, not late.
        codes = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED", "DATA_LOSS"}
        final = (self._starting and code in codes) or entry.attempts > self._load_retries_max
        with self._book.changed:
            if not final:
                entry.retry_at_s = time.monotonic() + self._load_retry_interval_s
            entry.status = replace(
                entry.status,
                state="END" if final else "LOADING",
                error_code=code,
                error_message=message,
            )
            self._book.changed.notify_all()
        again = "" if final else f"; trying again in {self._load_retry_interval_s:g} s"
        warn(f"model {name} version {entry.status.version} failed to load: {code}: {message}{again}")

    def _tidy(self, name: str, aspired: Sequence[int], *, removed: bool) -> None:
        """Unload a model's versions that are not `aspired`, and drop old entries of versions that have gone.

        A version is unloaded only if an aspired one is loaded or the model is `removed` from the
        configuration. The last 16 ended versions stay listed; those that failed to load do not.
        """
        entries = self._book.entries[name]
        loaded = {version for version, entry in entries.items() if entry.servable is not None}
        replaceable = removed or bool(loaded.intersection(aspired))
        past = sorted(set(entries).difference(aspired))
        ended = [version for version in past if entries[version].status.state == "END"]
        with self._book.changed:
            for version in ended[:-16]:  # a model may be published every minute
                del entries[version]
        for version in [version for version in past if version in entries]:
            entry = entries[version]
            if entry.servable is not None and replaceable:
                status = VersionStatus(version=version, state="UNLOADING")
                servable = entry.servable
                self._book.publish(entry, servable=None, status=status)
                self._unloads = [thread for thread in self._unloads if thread.is_alive()]
                self._unloads.append(
                    threading.Thread(target=self._unload, args=(name, entry, servable), daemon=True)
                )
                self._unloads[-1].start()
            elif entry.status.error_code != "OK" or entry.status.state == "START":
                with self._book.changed:
                    del entries[version]

    def _unload(self, name: str, entry: VersionEntry, servable: Servable) -> None:
        version = entry.status.version
        submitted = threading.Event()
        # Front ends submit one loop turn after they found the version, so the barrier is two turns long.
        self._on_loop(lambda: self._on_loop(submitted.set))
        submitted.wait()
        if self._end(name, entry, servable):
            say(f"model {name} version {version} is unloaded")
        with self._book.changed:
            self._look_again = True
            self._book.changed.notify_all()

    def _end(self, name: str, entry: VersionEntry, servable: Servable) -> bool:
        """Close a version that no request finds any more; returns whether that succeeded."""
        ended = VersionStatus(version=entry.status.version, state="END")
        try:
            self._close_servable(servable)
        except Exception as error:  # the other versions are closed, and looked for, all the same
            _logger.exception("model %s version %d could not be closed", name, ended.version)
            ended = replace(ended, error_code="INTERNAL", error_message=f"{type(error).__name__}: {error}")
        self._book.publish(entry, servable=None, status=ended)
        return ended.error_code == "OK"
