"""Puts new batching parameters in force while requests are served.

A new pool of threads and sessions is made for them. From one moment on the event loop sends every request to
the new pool; the old one answers its remaining requests and ends. No request is dropped. The new pool equals
one made at the start of the process, so a measurement does not depend on how its configuration was applied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, get_args

from batchtune.batching.parameters import (
    AUTO_BUCKETS,
    LENGTH_BUCKETS,
    PARAMETER_NAMES,
    BatchingParameters,
    from_dict,
    parse_length_buckets,
    to_dict,
    validate,
)
from batchtune.errors import BatchingParametersError
from batchtune.server.models.servable import Servable
from batchtune.server.sessions.batched import BatchObserver, Deliver
from batchtune.server.sessions.pool import BatchingSettings, SchedulerKind, SessionPool

_MODELS = "models"


class BatchingControl:
    """The batching settings in force, for all servables of the process.

    deliver: called on any thread with the completions of a batch. on_loop: makes the event loop call a function soon.
    """

    def __init__(
        self,
        settings: BatchingSettings,
        *,
        observer: BatchObserver,
        deliver: Deliver,
        on_loop: Callable[[Callable[[], object]], object],
    ) -> None:
        self._observer = observer
        self._deliver = deliver
        self._on_loop = on_loop
        self._lock = threading.Lock()
        self._servables: list[Servable] = []
        self._pool = self._new_pool(settings)
        self._draining: list[threading.Thread] = []  # replaced pools, each closed by a thread of its own

    @property
    def settings(self) -> BatchingSettings:
        """The batching settings in force."""
        return self._pool.settings

    def attach(self, servable: Servable) -> None:
        """Open a servable for requests, under the settings in force and all later ones.

        Raises:
            StatusError: INVALID_ARGUMENT where the servable's own parameters break a rule.
        """
        with self._lock:
            servable.use(self._pool)
            self._servables.append(servable)

    def detach(self, servable: Servable) -> None:
        """Remove a servable that is about to be closed: later settings do not apply to it.

        Blocks until every replaced pool has answered its requests: then only the pool in force has requests of the
        servable.
        """
        with self._lock:
            self._servables.remove(servable)
            draining = tuple(self._draining)
        for thread in draining:
            thread.join()

    def in_force(self) -> dict[str, Any]:
        """Return key -> value of the answer to GET /v1/tuning/batching_parameters.

        enable_batching; with batching also batch_scheduler, the parameters that are set, and length_buckets and models
        if there are any.
        """
        settings = self._pool.settings
        shown: dict[str, Any] = {"enable_batching": settings.enabled}
        if settings.enabled:
            shown |= {"batch_scheduler": settings.scheduler, **to_dict(settings.parameters)}
        if settings.enabled and settings.length_buckets:
            shown[LENGTH_BUCKETS] = (
                AUTO_BUCKETS if settings.length_buckets == AUTO_BUCKETS else list(settings.length_buckets)
            )
        if settings.enabled and settings.models:
            shown[_MODELS] = {name: to_dict(own) for name, own in settings.models.items()}
        return shown

    def replace(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Put other parameters in force, and return what `in_force` returns then. Blocks for milliseconds.

        wanted: keys and values as `in_force` returns them. An absent enable_batching means true; an absent
        batch_scheduler or length_buckets (a list, "32,64", "auto", "none") the present value; any other absent key the
        server's default. They hold for all models except those in `models` ({NAME: {max_batch_size: …}}), which have
        the parameters given there instead; all models share the batch threads. Requests that are queued or running
        under the old parameters are answered under them.

        Raises:
            BatchingParametersError: a name, type or value that TF Serving would refuse; nothing has changed.
            StatusError: a value that the scheduler refuses; nothing has changed.
        """
        with self._lock:
            served = {servable.name for servable in self._servables}
            settings = _settings(wanted, self._pool.settings, served=served)
            pool = self._new_pool(settings)
            try:
                opened = [(servable, servable.open_sessions(pool)) for servable in self._servables]
            except BaseException:
                pool.close()
                raise
            switched = threading.Event()

            def switch() -> None:
                for servable, sessions in opened:
                    servable.switch(pool, sessions)
                switched.set()

            self._on_loop(switch)
            switched.wait()
            old, self._pool = self._pool, pool
            self._draining = [thread for thread in self._draining if thread.is_alive()]
            self._draining.append(threading.Thread(target=old.close, name="drain_old_sessions", daemon=True))
            self._draining[-1].start()
        return self.in_force()

    def queue_depths(self) -> tuple[int, int]:
        """Return (batches, rows) that wait for a batch thread, over all queues of the pool in force."""
        return self._pool.queue_depths()

    def length_boundaries(self) -> dict[str, tuple[int, ...]]:
        """Return name -> present length boundaries of each session that has length buckets."""
        return self._pool.length_boundaries()

    def close(self) -> None:
        """Answer all queued requests, then end all threads."""
        with self._lock:
            self._pool.close()
            for thread in self._draining:
                thread.join()

    def _new_pool(self, settings: BatchingSettings) -> SessionPool:
        return SessionPool(settings, observer=self._observer, deliver=self._deliver)


def _settings(
    wanted: Mapping[str, Any], present: BatchingSettings, *, served: Collection[str]
) -> BatchingSettings:
    enabled = wanted.get("enable_batching", True)
    if not isinstance(enabled, bool):
        raise BatchingParametersError(f"enable_batching must be true or false; was {enabled!r}")
    scheduler = wanted.get("batch_scheduler", present.scheduler)
    if scheduler not in get_args(SchedulerKind):
        known = ", ".join(get_args(SchedulerKind))
        raise BatchingParametersError(f"batch_scheduler must be one of {known}; was {scheduler!r}")
    switches = ("enable_batching", "batch_scheduler", LENGTH_BUCKETS, _MODELS)
    parameters = from_dict({name: value for name, value in wanted.items() if name not in switches})
    if not enabled and parameters != BatchingParameters():
        given = ", ".join(name for name in PARAMETER_NAMES if name in wanted)
        raise BatchingParametersError(f"{given} given without setting enable_batching to true")
    validate(parameters)
    models = _own_parameters(wanted.get(_MODELS, {}), enabled=enabled, served=served)
    buckets = present.length_buckets
    if LENGTH_BUCKETS in wanted:
        buckets = parse_length_buckets(wanted[LENGTH_BUCKETS])
    return replace(
        present,
        enabled=enabled,
        parameters=parameters,
        scheduler=scheduler,
        per_model=False,
        length_buckets=buckets,
        models=models,
    )


def _own_parameters(
    given: object, *, enabled: bool, served: Collection[str]
) -> dict[str, BatchingParameters]:
    if not isinstance(given, Mapping) or not all(isinstance(own, Mapping) for own in given.values()):
        raise BatchingParametersError(f"{_MODELS} must be an object of objects, by name; was {given!r}")
    if given and not enabled:
        raise BatchingParametersError(f"{_MODELS} given without setting enable_batching to true")
    own_by_name = {}
    for name, values in given.items():
        if name not in served:
            known = ", ".join(sorted(served))
            raise BatchingParametersError(f"{_MODELS}: no model {name!r} is served; served are: {known}")
        shared = next((knob for knob in ("num_batch_threads", "thread_pool_name") if knob in values), None)
        if shared is not None:
            raise BatchingParametersError(f"{_MODELS}.{name}.{shared}: all models share it")
        own_by_name[name] = from_dict(values)
        validate(own_by_name[name])
    return own_by_name
