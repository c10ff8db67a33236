"""One loaded version of a model, which takes requests; the book in which a request's version is looked up; and a limit
on the requests inside the server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.model import LoadedModel, Runner, Tensors
from batchtune.server.metrics import Metrics
from batchtune.server.models.model_config import ModelConfig
from batchtune.server.models.warmup import expected_sizes
from batchtune.server.sessions.batched import Deliver, Done, Queued
from batchtune.server.sessions.input_shapes import listed
from batchtune.server.sessions.pool import Session, SessionPool, in_words
from batchtune.server.sessions.unbatched import WAITING_MAX
from batchtune.server.stages.stages import ModelStages
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature
from batchtune.wire.status import FAULT, StatusError
from batchtune.wire.tfserving.messages import SignatureDefMap
from batchtune.wire.tfserving.tensors import signature_to_def

# How many requests may be inside the server at once: Cortex's processes_per_replica × threads_per_process.
#
# A server whose workers block on their request can batch no more requests than it has workers: the limit caps the
# batch size. Source: Cortex 0.31 API reference and `pkg/types/spec/validations.go`. TF Serving's front ends meet the
# same limit in two ways: gRPC refuses (RESOURCE_EXHAUSTED), REST lets the request wait.


class ConcurrencyLimit:
    """Admits at most `limit` requests at once, at least 1; only for the event loop's thread.

    inside: number of requests that were admitted and are not answered; waiting: functions that start the requests which
    wait to be admitted.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.inside = 0
        self.waiting: deque[Callable[[], None]] = deque()

    def enter_or_wait(self, start: Callable[[], None]) -> None:
        """Call `start` as soon as the limit admits another request, perhaps now; waiting requests are started in order
        of arrival.

        Raises:
            StatusError: RESOURCE_EXHAUSTED while WAITING_MAX requests wait.
        """
        if self.inside >= self._limit:
            if len(self.waiting) >= WAITING_MAX:
                raise StatusError("RESOURCE_EXHAUSTED", "Server Threadpool Exhausted")
            self.waiting.append(start)
            return
        self.inside += 1
        start()

    def leave(self) -> None:
        """Count a request as answered, and start the next one that waits."""
        if self.waiting:
            self.waiting.popleft()()
        else:
            self.inside -= 1


_logger = logging.getLogger(__name__)


class Servable:
    """One version of a model: a session for each signature, on the session pool that is in force.

    Signatures with the same tensors share a session, and so a batching queue.
    own_parameters: those of the version's batching_params.pbtxt; None: it has none. stages: the stages around the
    model; None: it has none. limit: (the limit on requests inside the server, which all servables share; the function
    that delivers the refusal of a request that has waited for it); None: no limit.
    """

    def __init__(
        self,
        *,
        name: str,
        version: int,
        model: LoadedModel,
        metrics: Metrics,
        own_parameters: BatchingParameters | None = None,
        limit: tuple[ConcurrencyLimit, Deliver] | None = None,
        stages: ModelStages | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self._model: LoadedModel | None = model
        self._stages = stages
        self.signatures: Mapping[str, Signature] = model.signatures if stages is None else stages.signatures
        own_metadata = model.metadata if stages is None else b""
        self.metadata = own_metadata or metadata_of(self.signatures)
        self.own_parameters = own_parameters
        self._metrics = metrics
        self._limit = limit
        self._inside = model.inside
        # What fills a batcher of the graph, and its next batch meanwhile.
        self._at_once = sum(
            batcher.max_batch_size * (1 + batcher.num_batch_threads) for batcher in model.inside
        )
        self._pool: SessionPool | None = None
        self._opened: Mapping[str, Session] = {}  # on the pool
        self._sessions: Mapping[str, Session] = {}  # what requests are given to

    def submit(
        self,
        signature_name: str,
        inputs: dict[str, NDArray[Any]],
        output_names: tuple[str, ...] | None,
        deadline_ns: int | None,
        done: Done,
    ) -> Queued | None:
        """Run a request; later `done(outputs, None)` or `done(None, error)` is called. Both calls are made on the event
        loop.

        output_names: None: all; deadline_ns: on CLOCK_MONOTONIC, None: no deadline. Returns the queued request; None:
        the model is not batched, or a limit on the requests inside applies.

        Raises:
            StatusError: the request is refused at once (unknown signature, wrong tensors, too many rows, full queue,
                closed version); `done` is not called.
        """
        session = self._sessions.get(signature_name)
        if session is None:
            raise self._no_session(signature_name)
        if self._limit is None:
            return session.submit(inputs, output_names, deadline_ns, done)
        limit, deliver = self._limit

        left = False

        def finish(outputs: dict[str, NDArray[Any]] | None, error: StatusError | None) -> None:
            nonlocal left
            try:
                done(outputs, error)
            finally:
                if not left:  # it is called again where `done` fails
                    left = True
                    limit.leave()

        def start() -> None:
            session = self._sessions.get(
                signature_name
            )  # while the request waited, the version may have closed
            try:
                if session is None:
                    raise self._no_session(signature_name)
                session.submit(inputs, output_names, deadline_ns, finish)
            except StatusError as error:
                deliver([(finish, None, error)])
            except Exception:  # the place in the limit must be free again
                _logger.exception("a request for signature %s could not be submitted", signature_name)
                deliver([(finish, None, StatusError("INTERNAL", FAULT))])

        limit.enter_or_wait(start)
        return None

    def use(self, pool: SessionPool) -> None:
        """Open sessions on `pool` and from now on send requests to them; earlier sessions stay open.

        Raises:
            StatusError: INVALID_ARGUMENT for parameters that break a rule; nothing has changed.
        """
        self.switch(pool, self.open_sessions(pool))

    def open_sessions(self, pool: SessionPool) -> dict[str, Session]:
        """Open sessions on `pool`, and prepare the model for their batch sizes; requests are not sent there yet.

        Returns signature name -> session, for `switch`; {} once the version is closed. Raises StatusError
        INVALID_ARGUMENT for parameters that break a rule; then no session stays open.
        """
        model = self._model
        if model is None:
            return {}
        parameters = pool.settings.parameters_of(self.name, self.own_parameters)
        batched = parameters is not None
        stages = self._stages
        by_run: dict[tuple[int, bool], Session] = {}
        sessions: dict[str, Session] = {}
        try:
            for name, run in model.runs.items():
                key = (id(run), stages is not None and stages.stand_around(name))
                if key not in by_run:
                    metered = self._metered(model, run, name, batched=batched)
                    signature = self.signatures[name]
                    if stages is not None:
                        metered = stages.around(
                            name, metered, batched=batched, length_buckets=pool.settings.length_buckets
                        )
                        signature = stages.batched_signature(name, model)
                    by_run[key] = pool.open(
                        signature,
                        metered,
                        parameters=parameters,
                        name=f"{self.name}/{self.version}/{name}",
                        at_once=self._at_once,
                    )
                sessions[name] = by_run[key]
            model.prepare(expected_sizes(parameters), pool.settings.num_batch_threads if batched else None)
        except Exception:
            _forget(pool, sessions)
            raise
        return sessions

    def switch(self, pool: SessionPool, sessions: Mapping[str, Session]) -> None:
        """From now on send requests to the sessions that `open_sessions` returned; on the event loop."""
        self._pool, self._opened = pool, sessions
        self._sessions = sessions if self._stages is None else self._stages.before(sessions)

    def drain(self) -> None:
        """Refuse new requests and answer those that are in the stages around the model, which still need its sessions;
        does nothing for a model without stages.

        Blocks until they are answered. Call it before BatchingControl.detach, when no `submit` is under way.
        """
        if self._stages is not None:
            self._stages.drain()

    def close(self) -> None:
        """Refuse new requests, answer those that are queued, free the model and close its stages.

        Blocks. Call it after `drain` and BatchingControl.detach, when no `submit` is under way.
        """
        sessions, self._opened, self._sessions = self._opened, {}, {}
        if self._pool is not None:
            _forget(self._pool, sessions)
        if self._stages is not None:
            self._stages.close()
        model, self._model = self._model, None
        if model is not None:
            model.close()

    def summary(self) -> str:
        """Describe in a line the inputs, outputs and batching of the default signature, or of the first if there is no
        default."""
        names = sorted(self.signatures, key=lambda name: (name != DEFAULT_SIGNATURE, name))
        if self._pool is None or not names:
            return "closed"
        signature = self.signatures[names[0]]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        settings = self._pool.settings
        parameters = settings.parameters_of(self.name, self.own_parameters)
        batching = in_words(settings, parameters, self._opened.get(names[0]))
        batched = parameters is not None
        for batcher in self._inside:
            twice = "batched twice, in its graph too" if batched else "its graph batches"
            batching = f"{batching}; {twice}: {batcher.in_words()}"
        staged = f"; {self._stages.in_words(batched=batched)}" if self._stages is not None else ""
        return f"{names[0]}({listed(signature.inputs)}) -> ({listed(signature.outputs)}){more}; {batching}{staged}"

    def _metered(self, model: LoadedModel, run: Runner, signature_name: str, *, batched: bool) -> Runner:
        """Return `run` with its time, counted as the device's and, in batches, as the model's."""
        device, metrics, name = self._metrics.device, self._metrics, self.name
        first_input = model.signatures[signature_name].inputs[0].name

        def run_metered(inputs: Tensors) -> Tensors:
            began_ns = time.monotonic_ns()
            with device:
                outputs = run(inputs)
            micros = (time.monotonic_ns() - began_ns) / 1000
            array = inputs[first_input]
            rows = array.shape[0] if array.ndim else 1
            if batched:
                metrics.models.add((name,), 1, rows, micros)
            else:
                metrics.on_unbatched_run(rows, micros)
            return outputs

        run_metered.empty = model.empty  # type: ignore[attr-defined]  # as a Runner may have it
        return run_metered

    def _no_session(self, signature_name: str) -> StatusError:
        if signature_name in self.signatures:  # closed after it was found
            request = f"Specific({self.name}, {self.version})"
            return StatusError("NOT_FOUND", f"Servable not found for request: {request}")
        return StatusError("FAILED_PRECONDITION", f'Serving signature key "{signature_name}" not found.')


def _forget(pool: SessionPool, sessions: Mapping[str, Session]) -> None:
    """Close each of the sessions (signature name -> session) once, also where several names share it."""
    for session in {id(session): session for session in sessions.values()}.values():
        pool.forget(session)


def metadata_of(signatures: Mapping[str, Signature]) -> bytes:
    """Return signatures (name -> signature) as a serialised tensorflow.serving.SignatureDefMap."""
    definitions = {name: signature_to_def(signature) for name, signature in signatures.items()}
    return bytes(SignatureDefMap(signature_def=definitions).SerializeToString())


# The state of each version of each model, and the servable that answers for a name, version or label.
#
# `find` runs on the event loop for every request: it reads dictionaries that are replaced, never changed, and takes
# no lock. Everything else holds `changed`.

State = Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionStatus:
    """A version's state, as in GetModelStatus, with the error of its last load or unload ("OK": none)."""

    version: int
    state: State
    error_code: str = "OK"
    error_message: str = ""


@dataclass(slots=True, kw_only=True)
class VersionEntry:
    """One version of a model.

    servable: None unless it is AVAILABLE. attempts: number of loads since the last that succeeded. retry_at_s: when a
    failed load is tried again (time.monotonic); None: no failed load is to be tried again.
    """

    status: VersionStatus
    servable: Servable | None = None
    attempts: int = 0
    retry_at_s: float | None = None


class VersionBook:
    """The state of each version, and which servable answers for a model's name, version or label.

    entries: model name -> version number -> entry; labels: model name -> label -> version number. `changed`: a
    condition that guards every change, and is notified of it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.entries: dict[str, dict[int, VersionEntry]] = {}
        self.labels: Mapping[str, Mapping[str, int]] = {}
        self._available: Mapping[str, Mapping[int, Servable]] = {}
        self._latest: Mapping[str, Servable] = {}

    def find(self, name: str, *, version: int | None = None, label: str | None = None) -> Servable:
        """Return the servable of a model's version or label; without these, of its highest AVAILABLE version.

        Raises:
            StatusError: NOT_FOUND where that version is not AVAILABLE, INVALID_ARGUMENT for an unknown label or an
                empty name.
        """
        if not name:
            raise StatusError("INVALID_ARGUMENT", "ModelSpec has no name specified.")
        if label is not None:
            version = self.labels.get(name, {}).get(label)
            if version is None:
                raise StatusError("INVALID_ARGUMENT", f"Unrecognized servable version label: {label}")
        if version is None:
            loaded = self._latest.get(name)
            asked = f"Latest({name})"
        else:
            loaded = self._available.get(name, {}).get(version)
            asked = f"Specific({name}, {version})"
        if loaded is None:
            raise StatusError("NOT_FOUND", f"Servable not found for request: {asked}")
        return loaded

    def statuses(self, name: str, *, version: int | None = None) -> list[VersionStatus]:
        """Return the states of a model's versions, highest number first; `version`: only of that version.

        Raises:
            StatusError: NOT_FOUND for an unknown model or version.
        """
        with self.changed:
            statuses = [entry.status for entry in self.entries.get(name, {}).values()]
        if version is not None:
            statuses = [status for status in statuses if status.version == version]
        if not statuses:
            what = "any versions" if version is None else f"version {version}"
            raise StatusError("NOT_FOUND", f"Could not find {what} of model {name}")
        return sorted(statuses, key=lambda status: -status.version)

    def available(self, name: str) -> Mapping[int, Servable]:
        """Return version number -> servable of a model's AVAILABLE versions; {} where none is, or for an unknown
        model."""
        return self._available.get(name, {})

    def publish(self, entry: VersionEntry, *, servable: Servable | None, status: VersionStatus) -> None:
        """Set a version's state, and the servable that `find` returns for it from now on (None: it is not found)."""
        with self.changed:
            entry.servable = servable
            entry.status = status
            self._available = {
                name: {
                    version: other.servable
                    for version, other in versions.items()
                    if other.servable is not None
                }
                for name, versions in self.entries.items()
            }
            self._latest = {
                name: versions[max(versions)] for name, versions in self._available.items() if versions
            }
            self.changed.notify_all()

    def announce(self, versions: Iterable[tuple[str, int]]) -> None:
        """Add each (model name, version number) that is new or has ended, in state START."""
        with self.changed:
            for name, version in versions:
                entries = self.entries.setdefault(name, {})
                if version not in entries or entries[version].status.state == "END":
                    entries[version] = VersionEntry(status=VersionStatus(version=version, state="START"))

    def failures(self, names: Iterable[str], complaints: Mapping[str, str]) -> list[str]:
        """Return the reasons why models have no AVAILABLE version, with the text of TF Serving's ServerCore; []: each
        of `names` has one.

        A line for each version that failed to load; for a model without such versions, one line. complaints: model name
        -> why no version is on disk.
        """
        failures = []
        for name in names:
            if self.available(name):
                continue
            failed = [
                entry.status for entry in self.entries.get(name, {}).values() if entry.status.error_message
            ]
            failures += [
                f"{{name: {name} version: {status.version}}} due to error: {status.error_code}: {status.error_message}"
                for status in failed
            ] or [complaints.get(name, f"{{name: {name}}} has no version")]
        return failures

    def check_labels(self, model: ModelConfig) -> None:
        """Check that each label that `model` newly sets names an AVAILABLE version.

        Raises:
            StatusError: FAILED_PRECONDITION for a label of any other version, unless that label is already in force.
        """
        for label, version in model.labels.items():
            known = self.labels.get(model.name, {}).get(label) == version
            if version not in self.available(model.name) and not known:
                raise StatusError(
                    "FAILED_PRECONDITION",
                    f"Request to assign label to version {version} of model {model.name}, which is not currently "
                    "available for inference",
                )
