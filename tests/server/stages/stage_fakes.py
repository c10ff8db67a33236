"""A version with stages in a folder of its own, and the parts that its requests pass, on the running loop."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.model import LoadedModel, Tensors
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.server.stages.stages import BatchingStage, ModelStages
from batchtune.server.stages.stages_file import DeclaredStages, read_stages_file
from batchtune.wire.signature import TensorSpec
from tests.server.models.model_fakes import SIGNATURE, Loop, Outputs, X, loop_test

ALONE = {"max_batch_size": 4, "batch_timeout_micros": 500, "num_batch_threads": 2}
STAGES = """
    pre: stages.py:preprocess
    post: stages.py:postprocess
    inputs: {text: {dtype: string}}
    outputs: {label: {dtype: string}, y: {dtype: float32, shape: [1]}}
"""
CODE = """
    import threading
    import numpy as np

    GATE = threading.Event()
    GATE.set()
    THREADS = set()

    def preprocess(tensors):
        THREADS.add(threading.current_thread().name)
        GATE.wait(10)
        texts = tensors["text"]
        if b"wrong" in texts:
            raise ValueError("no such word")
        if b"bug" in texts:
            return {}["missing"]
        if b"exit" in texts:
            raise SystemExit(3)
        return {"x": np.array([[len(text)] for text in texts], np.float32)}

    def postprocess(tensors):
        THREADS.add(threading.current_thread().name)
        return {"label": [f"{int(row[0])} letters" for row in tensors["y"] / 2], "y": tensors["y"]}
"""


def write_stages(folder: Path, stages: str = STAGES, code: str = CODE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stages.yaml").write_text(textwrap.dedent(stages))
    (folder / "stages.py").write_text(textwrap.dedent(code))
    return folder


def declared_in(folder: Path) -> DeclaredStages:
    declared = read_stages_file(folder)
    assert declared is not None
    return declared


class Doubling:
    """y = 2 x (+ z) after what is `beside`; remembers the rows of each run."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.beside: Outputs = {}

    def __call__(self, inputs: Tensors) -> Outputs:
        self.rows.append(len(inputs["x"]))
        total = sum(np.asarray(array).reshape(len(array), -1)[:, :1] for array in inputs.values())
        return {**self.beside, "y": (total * 2).astype(np.float32)}


class StagedServer(Loop):
    """One version with the stages of a folder."""

    def __init__(
        self,
        folder: Path,
        settings: BatchingSettings,
        *,
        stage: BatchingStage,
        inputs: tuple[TensorSpec, ...],
    ) -> None:
        super().__init__(settings)
        self.device = Doubling()
        names = ("serving_default", "plain")
        signature = replace(SIGNATURE, name=names[0], inputs=inputs)
        model = LoadedModel(
            signatures=dict.fromkeys(names, signature), runs=dict.fromkeys(names, self.device)
        )
        self.stages = ModelStages(
            declared_in(folder),
            model,
            model_name="m",
            stage=stage,
            use=self.metrics.stages,
            options=ServerFlags(),
            observer=self.metrics,
            deliver=self.deliver,
        )
        self.servable = self.attach(model, stages=self.stages)

    @property
    def code(self) -> dict[str, Any]:
        """The globals of the model's stages.py."""
        return vars(next(iter(self.stages._plan.code._modules.values())))

    def request(self, inputs: dict[str, Any], **options: Any) -> asyncio.Future[Outputs]:
        arrays = {name: np.asarray(given) for name, given in inputs.items()}
        return self.ask(arrays, **{"signature": "serving_default"} | options)

    def text(self, *texts: bytes, **options: Any) -> asyncio.Future[Outputs]:
        return self.request({"text": np.array(texts, object)}, **options)

    async def end_version(self) -> None:
        """As the server ends a version."""

        def end() -> None:
            self.servable.drain()
            self.control.detach(self.servable)
            self.servable.close()

        await asyncio.to_thread(end)


Ask = Callable[[StagedServer], Awaitable[None]]


def serve(folder: Path, ask: Ask, *, stage: BatchingStage = "device", **options: Any) -> None:
    """Serve the version in a folder while a scenario asks; by default small batches that wait for few. options: the
    model's `inputs`, settings of batching, and parameters."""
    inputs = options.pop("inputs", (X,))
    settings = {name: options.pop(name) for name in ("enabled", "length_buckets") if name in options}
    batching = BatchingSettings(
        **{"enabled": True, **settings},
        parameters=BatchingParameters(**(options or ALONE)),
        scheduler="streaming" if stage == "early" else "shared",
    )

    async def on_loop() -> None:
        server = StagedServer(folder, batching, stage=stage, inputs=inputs)
        try:
            await asyncio.wait_for(ask(server), 20)
        finally:
            await asyncio.to_thread(server.servable.drain)
            await asyncio.to_thread(server.servable.close)
            await asyncio.to_thread(server.control.close)

    asyncio.run(on_loop())


def staged(
    *stages: BatchingStage, files: tuple[str, str] = (STAGES, CODE), **options: Any
) -> Callable[[Callable[..., Awaitable[None]]], Any]:
    """Makes a coroutine the test of a server of a version with these files, stages.yaml and stages.py."""

    def run(ask: Ask, tmp_path: Path, stage: BatchingStage) -> None:
        serve(write_stages(tmp_path, *files), ask, stage=stage, **options)

    return lambda scenario: loop_test(scenario, run, "stage", stages or ("device",))


async def unloaded(_server: StagedServer) -> None:
    raise AssertionError("it was loaded")
