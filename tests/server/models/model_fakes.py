"""A model whose runs wait at a gate, and the parts of the server that its requests pass through."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.model import LoadedModel, Tensors
from batchtune.server.calls.pending_call import deliver_to
from batchtune.server.metrics import Metrics
from batchtune.server.models.batching_control import BatchingControl
from batchtune.server.models.servable import Servable
from batchtune.server.sessions.batched import Queued
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError

Outputs = dict[str, NDArray[Any]]
Names = tuple[str, ...] | None
X, Y = (TensorSpec(name=name, dtype="float32", shape=(None, 1)) for name in "xy")
SIGNATURE = Signature(name="s", method_name="tensorflow/serving/predict", inputs=(X,), outputs=(Y,))


def batching(**parameters: Any) -> BatchingSettings:
    return BatchingSettings(enabled=True, parameters=BatchingParameters(**parameters))


class GatedModel:
    """y = 2 x; a negative x fails as a framework would; a run waits while the gate is shut. Remembers the rows."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.rows: list[int] = []
        self.closed = False
        self.ran_closed = False

    def __call__(self, inputs: Tensors) -> Outputs:
        self.gate.wait(10)
        self.ran_closed |= self.closed
        self.rows.append(len(inputs["x"]))
        if inputs["x"].min() < 0:
            self.fail()
        return {"y": inputs["x"] * 2}

    def fail(self) -> None:
        try:
            raise ValueError("in C++")
        except ValueError as error:
            raise StatusError("INVALID_ARGUMENT", "negative") from error

    def close(self) -> None:
        self.closed = True


class Loop:
    """The parts that a request passes through, on the running loop; a subclass has a servable."""

    servable: Servable

    def __init__(self, settings: BatchingSettings) -> None:
        loop = asyncio.get_running_loop()
        self.deliver = deliver_to(loop)
        self.metrics = Metrics()
        self.control = BatchingControl(
            settings, observer=self.metrics, deliver=self.deliver, on_loop=loop.call_soon_threadsafe
        )
        self.metrics.queue_depths = self.control.queue_depths
        self.metrics.length_boundaries = self.control.length_boundaries
        self.queued: Queued | None = None

    def attach(self, model: LoadedModel, **options: Any) -> Servable:
        servable = Servable(name="m", version=1, model=model, metrics=self.metrics, **options)
        self.control.attach(servable)
        return servable

    def ask(
        self, inputs: Outputs, *, signature: str, names: Names = None, deadline_ns: int | None = None
    ) -> asyncio.Future[Outputs]:
        answered: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()

        def done(outputs: Outputs | None, error: StatusError | None) -> None:
            if outputs is None:
                answered.set_exception(error or AssertionError())
            else:
                answered.set_result(outputs)

        self.queued = self.servable.submit(signature, inputs, names, deadline_ns, done)
        return answered

    async def replace(self, **wanted: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.control.replace, wanted)


class Server(Loop):
    """With a gated model; `options` are those of its version."""

    def __init__(self, settings: BatchingSettings, **options: Any) -> None:
        super().__init__(settings)
        self.model = GatedModel()
        if "limit" in options:
            options["limit"] = (options["limit"], self.deliver)
        self.servable = self.load(self.model, **options)

    def load(self, model: GatedModel, **options: Any) -> Servable:
        names = ("s", "alias")
        signatures, runs = dict.fromkeys(names, SIGNATURE), dict.fromkeys(names, model)
        return self.attach(LoadedModel(signatures=signatures, runs=runs, close=model.close), **options)

    def request(self, value: float = 1.0, *, signature: str = "s") -> asyncio.Future[Outputs]:
        return self.ask({"x": np.full((1, 1), value, np.float32)}, signature=signature)

    def code(self, value: float = 1.0, *, of: Servable | None = None) -> asyncio.Future[str]:
        """The code of the answer."""
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def done(_outputs: Outputs | None, error: StatusError | None) -> None:
            answered.set_result("OK" if error is None else error.code)

        inputs = {"x": np.full((1, 1), value, np.float32)}
        (of or self.servable).submit("s", inputs, None, None, done)
        return answered

    async def answers(self, count: int) -> list[float]:
        """Of requests for 0, 1, ... at once."""
        return values(await asyncio.gather(*(self.request(value) for value in range(count))))

    async def end(self, servable: Servable) -> None:
        await asyncio.to_thread(self.control.detach, servable)
        await asyncio.to_thread(servable.close)


def values(answers: list[Outputs]) -> list[float]:
    return [float(one["y"][0, 0]) for one in answers]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 what is waited for happens on other threads
        await asyncio.sleep(0.001)


def loop_test(
    scenario: Callable[..., Awaitable[None]],
    run: Callable[..., None],
    table: str,
    rows: Sequence[Any],
    **ids: Any,
) -> Any:
    """A test that calls `run` with a coroutine, its other fixtures given, and with fixtures of its own: once for each
    row of a table."""
    _, *wanted = inspect.signature(scenario).parameters
    own = list(inspect.signature(run).parameters)[1:]

    def test(**fixtures: Any) -> None:
        ask = partial(scenario, **{name: fixtures[name] for name in wanted})
        run(ask, **{name: fixtures[name] for name in own})

    names = dict.fromkeys([*wanted, *own])
    asked = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    test.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
    test.__doc__, test.__name__ = scenario.__doc__, scenario.__name__
    return pytest.mark.parametrize(table, rows, **ids)(test)


def serving(*settings: BatchingSettings, **options: Any) -> Callable[[Callable[..., Awaitable[None]]], Any]:
    """Makes a coroutine the test of a server, under each of some settings."""

    def kind(one: BatchingSettings) -> str:
        return one.scheduler if one.enabled else "unbatched"

    def run(ask: Callable[[Server], Awaitable[None]], settings: BatchingSettings) -> None:
        async def on_loop() -> None:
            server = Server(settings, **options)
            try:
                await asyncio.wait_for(ask(server), 20)
            finally:
                server.model.gate.set()
                await asyncio.to_thread(server.control.close)

        asyncio.run(on_loop())

    rows = settings or (BatchingSettings(),)
    return lambda scenario: loop_test(scenario, run, "settings", rows, ids=kind)
