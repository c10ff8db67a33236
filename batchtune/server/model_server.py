"""One server process: makes its parts, loads the models, serves, and ends.

The ports are bound first: so a port in use is an error before any model is loaded, and clients can ask for a
model's status while it loads. The line "… ready" is written when the models are loaded.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchtune.errors import UsageError
from batchtune.server import startup
from batchtune.server.backends.model import nothing_to_prepare
from batchtune.server.backends.registry import load_model
from batchtune.server.calls.pending_call import deliver_to
from batchtune.server.grpc_api.services import make_grpc_api
from batchtune.server.log import flush, note, say, say_error, warn
from batchtune.server.memory import Trimming
from batchtune.server.metrics import GpuSampler, Metrics, loop_lag_sampled
from batchtune.server.models.batching_control import BatchingControl
from batchtune.server.models.model_config import read_model_config_file
from batchtune.server.models.model_repository import ModelRepository
from batchtune.server.models.servable import Servable
from batchtune.server.models.warmup import warm_up
from batchtune.server.rest.connection import serve_rest
from batchtune.server.rest.rest_api import RestApi
from batchtune.server.server_flags import ServerFlags
from batchtune.server.stages.stages import ModelStages
from batchtune.wire.grpc.server_connection import serve
from batchtune.wire.listener import Listener
from batchtune.wire.status import StatusError

_DRAIN_LIMIT_S = 25.0
_STOPPING = (
    f"stopping: finishing requests in flight, for {_DRAIN_LIMIT_S:g} s at most; a second signal ends it now"
)

_logger = logging.getLogger(__name__)


class ModelServer:
    """One server process, from its flags to its end.

    Raises UsageError where the flags or the files that they name are wrong.
    """

    def __init__(self, flags: ServerFlags) -> None:
        self._flags = flags
        self._settings = startup.batching_settings(flags)
        self._limit = startup.concurrency_limit(flags, self._settings)
        self._models = startup.configured_models(flags)
        self._monitoring_path = startup.monitoring_path(flags)
        self._grpc_limits = startup.grpc_limits(flags)
        self._tls = startup.tls_context(flags)
        self._gpus = GpuSampler(flags.device)
        self._metrics = Metrics()
        self._metrics.gpus = self._gpus
        self._stop = asyncio.Event()
        self._listeners: dict[str, Listener] = {}  # gRPC, REST; without those that are off
        self._before_drain: list[Callable[[], None]] = []
        self._after_drain: list[Callable[[], None]] = []

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit code: 0, or 1 where a port cannot be bound.

        Ends the process at once, without returning, where models fail to load (exit code 1), the signal comes before
        they are loaded (0) or twice (128 + its number), or models do not end in time (0).
        """
        _allow_many_connections()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._deliver = deliver_to(loop)
        self._control = BatchingControl(
            self._settings,
            observer=self._metrics,
            deliver=self._deliver,
            on_loop=loop.call_soon_threadsafe,
        )
        self._metrics.queue_depths = self._control.queue_depths
        self._metrics.length_boundaries = self._control.length_boundaries
        self._repository = ModelRepository(
            self._models,
            open_servable=self._open_version,
            close_servable=self._close_version,
            on_loop=loop.call_soon_threadsafe,
            on_dead=_models_unwatched,
            flags=self._flags,
        )
        try:
            await self._listen()
        except OSError as error:
            say_error(str(error), hint="choose other ports with --port and --rest_api_port")
            return 1
        self._gpus.start()
        self._repository.start()
        watch = asyncio.ensure_future(self._watch_model_config())  # it may name what never comes
        loaded: asyncio.Future[Any] = loop.run_in_executor(None, self._repository.wait_until_loaded)
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([loaded, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            say(_STOPPING)
            self._repository.stop()
            await self._drain()  # while one model is waited for, others answer
            _exit_now(0)  # a load cannot be interrupted
        try:
            loaded.result()
        except StatusError as error:
            say_error(error.message)
            _exit_now(1)
        await self._serve(stopped, watch)
        return 0

    async def _listen(self) -> None:
        """Bind the ports and the Unix socket that the flags name, and begin to serve.

        Raises:
            OSError: an address cannot be bound; the message says which.
        """
        flags = self._flags
        where = f"{flags.host}:{flags.port}"
        try:
            if flags.port:
                dispatch, streams, announce_stop = make_grpc_api(self._repository, self._metrics, flags)
                self._before_drain.append(announce_stop)
                limits, tls = self._grpc_limits, self._tls
                grpc = await serve(flags.host, flags.port, dispatch, streams=streams, limits=limits, tls=tls)
                self._listeners["gRPC"] = grpc
                if flags.grpc_socket_path:
                    where = f"unix:{flags.grpc_socket_path}"
                    await grpc.listen_unix(flags.grpc_socket_path, tls)
                    say(f"gRPC on {where} too")
            if flags.rest_api_port:
                where = f"{flags.host}:{flags.rest_api_port}"
                tuning = self._control if flags.enable_tuning_api else None
                path = self._monitoring_path
                app = RestApi(self._repository, self._metrics, flags, monitoring_path=path, tuning=tuning)
                self._listeners["REST"] = await serve_rest(app, flags.host, flags.rest_api_port)
                self._after_drain.append(app.close)
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
            raise OSError(f"cannot listen on {where}: {reason}") from error

    def _addresses(self) -> str:
        """Describe where the server listens, such as `gRPC on 127.0.0.1:8500, REST off`."""
        host, ends = self._flags.host, {name: self._listeners.get(name) for name in ("gRPC", "REST")}
        return ", ".join(
            f"{name} on {host}:{end.port}" if end else f"{name} off" for name, end in ends.items()
        )

    async def _drain(self) -> None:
        """Take no more requests, answer those under way, close; abort what is left after _DRAIN_LIMIT_S."""
        for announce_stop in self._before_drain:
            announce_stop()
        await asyncio.gather(*(listener.drain(_DRAIN_LIMIT_S) for listener in self._listeners.values()))
        for close in self._after_drain:
            close()

    async def _serve(self, stopped: asyncio.Future[Any], watch: asyncio.Future[None]) -> None:
        # Requests make short-lived objects by the thousand; the young generation may grow before it is looked
        # through.
        gc_thresholds = (50_000, 20, 100)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc_thresholds)
        loop = asyncio.get_running_loop()
        trimming = Trimming()
        trimming.start(loop)
        with loop_lag_sampled(loop.call_soon_threadsafe, self._metrics.event_loop_lag):
            say(f"{self._addresses()}, ready")
            await stopped
            say(_STOPPING)
            watch.cancel()
        trimming.close()
        self._repository.stop()  # whoever waits for a load gets an error, and is drained
        await self._drain()
        # A thread of its own: whoever waits for models may hold all those of the loop.
        closer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="close")
        closing = loop.run_in_executor(closer, self._close)
        # For models to end: one that is being loaded, or whose run hangs, cannot be. Both together stay below
        # the 30 s after which Kubernetes kills.
        await asyncio.wait([closing], timeout=4.0)
        if not closing.done():
            _exit_now(0)
        closer.shutdown()
        closing.result()

    def _open_version(self, name: str, version: int, directory: Path) -> Servable:
        own = startup.own_batching_parameters(directory) if self._settings.per_model else None
        declared = startup.declared_stages(directory, self._flags)
        model = load_model(directory, self._flags)
        if not self._flags.enable_model_warmup:
            model = replace(model, prepare=nothing_to_prepare)
        if model.emulated:
            self._metrics.emulated = True
            self._metrics.emulated_parallel = model.parallel
            note(f"model {name} version {version} is an emulated device, not a model")
        stages = None
        try:
            if self._flags.enable_model_warmup:
                parameters = self._control.settings.parameters_of(name, own)
                iterations = self._flags.num_request_iterations_for_warmup or 1
                warm_up(model, directory, parameters, iterations=iterations)
            if declared is not None:
                stages = ModelStages(
                    declared,
                    model,
                    model_name=name,
                    stage=self._flags.batching_stage,  # type: ignore[arg-type]  # its choices are checked
                    use=self._metrics.stages,
                    options=self._flags,
                    observer=self._metrics,
                    deliver=self._deliver,
                )
            limit = (self._limit, self._deliver) if self._limit else None
            servable = Servable(
                name=name,
                version=version,
                model=model,
                metrics=self._metrics,
                own_parameters=own,
                limit=limit,
                stages=stages,
            )
            self._control.attach(servable)
        except Exception:
            if stages is not None:
                stages.drain()
                stages.close()
            model.close()
            raise
        return servable

    def _close_version(self, version: Servable) -> None:
        version.drain()
        self._control.detach(version)
        version.close()
        gc.collect()  # a framework's own cycles hold weights; what was there at the start is frozen, so this is quick

    async def _watch_model_config(self) -> None:
        interval_s = self._flags.model_config_file_poll_wait_seconds
        path = Path(self._flags.model_config_file)
        if not interval_s or not self._flags.model_config_file:
            return
        loop = asyncio.get_running_loop()
        complaint = ""
        while True:
            await asyncio.sleep(interval_s)
            try:
                models = await loop.run_in_executor(None, read_model_config_file, path)
                await loop.run_in_executor(None, self._repository.configure, models)
                complaint = ""
            except (UsageError, StatusError) as error:
                if error.message != complaint:  # a mistake may stay for days, and is reported once
                    warn(error.message)
                complaint = error.message
            except Exception:  # the file is looked at again
                _logger.exception("%s could not be followed", path)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            _exit_now(128 + number)
        self._stop.set()

    def _close(self) -> None:
        self._repository.close()
        self._control.close()
        self._gpus.close()


def _models_unwatched() -> None:
    """End the process, whose models would never change again, so that it is started anew."""
    say_error("the thread that watches the models has ended", hint="start the server again")
    _exit_now(1)


def _allow_many_connections() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _exit_now(code: int) -> None:
    flush()
    os._exit(code)
