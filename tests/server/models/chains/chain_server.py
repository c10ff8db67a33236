"""A chain of models held in memory, on the running loop, with the queues and pools of a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.model import PREDICT_METHOD, LoadedModel, Tensors
from batchtune.server.metrics.counters import Metrics
from batchtune.server.models.batching_control import BatchingControl
from batchtune.server.models.chains.chain import Chain, open_chain
from batchtune.server.models.servable import Servable
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.server.sessions.request import LoopPort
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature, TensorSpec
from batchtune.wire.status import StatusError

Outputs = dict[str, NDArray[Any]]
Answer = tuple[Outputs | None, StatusError | None]
BATCHED = BatchingSettings(enabled=True, parameters=BatchingParameters(max_batch_size=8, num_batch_threads=1))

TRIGGER_AND_SELECT = """
# the second model is asked for rows of a high score
inputs:
  x: {dtype: float32, shape: [2]}
steps:
  trigger:
    model: trigger
    inputs: {x: request.x}
  select:
    model: select
    inputs: {x: request.x, score: trigger.score}
    when: trigger.score > 0.5
    otherwise: {y: -1}
outputs:
  score: {from: trigger.score, dtype: float32, shape: [1]}
  y: {from: select.y, dtype: float32, shape: [2]}
"""


def spec(name: str, *shape: int | None, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=(None, *shape))


class Model:
    """Runs `answer` on what it is given, which it keeps; runs wait while the gate is shut."""

    def __init__(
        self, inputs: list[TensorSpec], outputs: list[TensorSpec], answer: Callable[[Tensors], Outputs]
    ) -> None:
        self.signature = Signature(
            name=DEFAULT_SIGNATURE, method_name=PREDICT_METHOD, inputs=tuple(inputs), outputs=tuple(outputs)
        )
        self._answer = answer
        self.given: list[Tensors] = []
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def __call__(self, inputs: Tensors) -> Outputs:
        self.given.append(inputs)
        self.gate.wait(10)
        if self.closed:
            raise StatusError("INTERNAL", "run after its end")
        return self._answer(inputs)

    def close(self) -> None:
        self.closed = True


def trigger(offset: float = 0.0) -> Model:
    """score = the first value of x, plus an offset by which versions differ."""
    return Model(
        [spec("x", 2)], [spec("score", 1)], lambda given: {"score": given["x"][:, :1] + np.float32(offset)}
    )


def select(factor: float = 10.0) -> Model:
    """y = factor × x."""
    return Model(
        [spec("score", 1), spec("x", 2)], [spec("y", 2)], lambda given: {"y": given["x"] * np.float32(factor)}
    )


class ChainServer:
    """Models by name, each with its latest version, and one chain, `chain`."""

    def __init__(self, settings: BatchingSettings) -> None:
        self.port = LoopPort(asyncio.get_running_loop())
        self.metrics = Metrics()
        self.control = BatchingControl(
            settings, observer=self.metrics, deliver=self.port.deliver, on_loop=self.port.run_soon
        )
        self.latest: dict[str, Servable | Chain] = {}

    def find(self, name: str) -> Servable | Chain:
        if name not in self.latest:
            raise StatusError("NOT_FOUND", f"Servable not found for request: Latest({name})")
        return self.latest[name]

    def serve(self, name: str, model: Model, version: int = 1) -> Servable:
        loaded = LoadedModel(
            platform="test",
            signatures={DEFAULT_SIGNATURE: model.signature},
            runs={DEFAULT_SIGNATURE: model},
            close=model.close,
        )
        servable = Servable(name=name, version=version, model=loaded, metrics=self.metrics)
        self.control.attach(servable)
        self.latest[name] = servable
        return servable

    def open(
        self, folder: Path, text: str = TRIGGER_AND_SELECT, *, configured: tuple[str, ...] = ()
    ) -> Chain:
        (folder / "pipeline.yaml").write_text(text)
        chain = open_chain(
            "chain",
            1,
            folder,
            find=self.find,
            configured=configured or (*self.latest, "chain"),
            use=self.metrics.chains,
            deliver=self.port.deliver,
        )
        self.latest["chain"] = chain
        return chain

    def ask(
        self,
        chain: Chain,
        x: Any,
        *,
        output_names: tuple[str, ...] | None = None,
        deadline_ns: int | None = None,
    ) -> asyncio.Future[Answer]:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def done(outputs: Outputs | None, error: StatusError | None) -> None:
            answered.set_result((outputs, error))

        inputs = x if isinstance(x, dict) else {"x": np.asarray(x, np.float32)}
        chain.submit(DEFAULT_SIGNATURE, inputs, output_names, deadline_ns, done)
        return answered

    async def end(self, servable: Servable) -> None:
        await asyncio.to_thread(servable.holds.wait_until_free)
        await asyncio.to_thread(self.control.detach, servable)
        await asyncio.to_thread(servable.close)


def serve(scenario: Callable[[ChainServer], Awaitable[None]], settings: BatchingSettings = BATCHED) -> None:
    async def run() -> None:
        server = ChainServer(settings)
        try:
            await asyncio.wait_for(scenario(server), 20)
        finally:
            await asyncio.to_thread(server.control.close)

    asyncio.run(run())
