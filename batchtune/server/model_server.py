"""How do the parts become one server process, and how does it end?

The ports are bound first, so that a port in use is known before a model is loaded and the status of a model can be
asked while it loads; then the models are loaded; then the ready line is written.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

from batchtune.errors import UsageError
from batchtune.server import startup
from batchtune.server.flags import ServerFlags
from batchtune.server.loaded_model import load_model
from batchtune.server.loop_port import LoopLagSampler, LoopPort
from batchtune.server.metrics import Metrics
from batchtune.server.model_config import read_model_config_file
from batchtune.server.repository import ModelRepository
from batchtune.server.rest_api import RestOptions, make_app
from batchtune.server.rest_server import RestServer, serve_rest
from batchtune.server.servable import DeliveredLimit, Servable
from batchtune.server.tuning import BatchingControl
from batchtune.server.warmup import warm_up
from batchtune.wire.status import StatusError

_DRAIN_LIMIT_S = 30.0
# Requests make short-lived objects by the thousand; the young generation may grow before it is looked through.
_GC_THRESHOLDS = (50_000, 20, 100)


class ModelServer:
    """One server process, from its flags to its end.

    Raises UsageError where the flags or the files that they name are wrong.
    """

    def __init__(self, flags: ServerFlags) -> None:
        self._flags = flags
        self._settings = startup.batching_settings(flags)
        self._limit = startup.concurrency_limit(flags, self._settings)
        self._models = startup.configured_models(flags)
        self._backend_options = startup.backend_options(flags)
        self._monitoring_path = startup.monitoring_path(flags)
        self._metrics = Metrics()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._port = LoopPort(loop)
        self._control = BatchingControl(
            self._settings, observer=self._metrics, deliver=self._port.deliver, on_loop=self._port.run_soon
        )
        self._metrics.queue_depths = self._control
        self._repository = ModelRepository(
            self._models,
            open_servable=self._open_servable,
            close_servable=self._close_servable,
            on_loop=self._port.run_soon,
            options=startup.repository_options(self._flags),
        )
        try:
            rest = await self._listen_rest()
        except OSError as error:
            say(f"error: {error}")
            return 1
        self._repository.start()
        loaded: asyncio.Future[Any] = loop.run_in_executor(None, self._repository.wait_until_loaded)
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([loaded, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            _exit_now(0)  # nothing has been promised yet, and a load cannot be interrupted
        try:
            loaded.result()
        except StatusError as error:
            say(f"error: {error.message}")
            _exit_now(1)
        await self._serve(rest, stopped)
        return 0

    async def _serve(self, rest: RestServer | None, stopped: asyncio.Future[Any]) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        lag = LoopLagSampler(self._port, self._metrics.event_loop_lag)
        lag.start()
        watch = asyncio.ensure_future(self._watch_model_config())
        say(f"REST {self._address(rest.port if rest else None)}, ready")
        await stopped
        watch.cancel()
        lag.close()
        if rest is not None:
            await rest.drain(_DRAIN_LIMIT_S)
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    async def _listen_rest(self) -> RestServer | None:
        if not self._flags.rest_api_port:
            return None
        options = RestOptions(
            timeout_ms=self._flags.rest_api_timeout_in_ms,
            cors=self._flags.rest_api_enable_cors_support,
            monitoring_path=self._monitoring_path,
            tuning=self._control if self._flags.enable_tuning_api else None,
            check_methods=self._flags.enable_signature_method_name_check,
        )
        app = make_app(self._repository, self._metrics, options=options)
        return await serve_rest(app, self._flags.host, self._flags.rest_api_port)

    def _address(self, port: int | None) -> str:
        return "off" if port is None else f"on {self._flags.host}:{port}"

    def _open_servable(self, name: str, version: int, directory: Path) -> Servable:
        own = startup.own_batching_parameters(directory) if self._settings.per_model else None
        model = load_model(directory, self._backend_options)
        if model.emulated:
            self._metrics.emulated = True
            say(f"note: model {name} version {version} is an emulated device, not a model")
        try:
            if self._flags.enable_model_warmup:
                parameters = self._control.settings.parameters_for(own)
                iterations = self._flags.num_request_iterations_for_warmup or 1
                warm_up(model, directory, parameters, iterations=iterations)
            limit = DeliveredLimit(limit=self._limit, deliver=self._port.deliver) if self._limit else None
            servable = Servable(
                name=name,
                version=version,
                model=model,
                metrics=self._metrics,
                own_parameters=own,
                limit=limit,
            )
            self._control.attach(servable)
        except StatusError:
            model.close()
            raise
        return servable

    def _close_servable(self, servable: Servable) -> None:
        self._control.detach(servable)
        servable.close()

    async def _watch_model_config(self) -> None:
        interval_s = self._flags.model_config_file_poll_wait_seconds
        path = Path(self._flags.model_config_file)
        if not interval_s or not self._flags.model_config_file:
            return
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval_s)
            try:
                models = await loop.run_in_executor(None, read_model_config_file, path)
                await loop.run_in_executor(None, self._repository.configure, models)
            except (UsageError, StatusError) as error:
                say(f"warning: {error.message}")

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            _exit_now(128 + number)
        self._stop.set()

    def _close(self) -> None:
        self._repository.close()
        self._control.close()


def say(line: str) -> None:
    """One line on stderr, from the server."""
    sys.stderr.write(f"batchtune-model-server: {line}\n")


def _exit_now(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)
