"""The end of a version: everything that it was asked is answered, then nothing of it is left."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.model import LoadedModel, Tensors
from batchtune.server.backends.registry import load_model
from batchtune.server.backends.torch.device import HostDevice
from batchtune.server.backends.torch.lanes import Lanes
from batchtune.server.metrics import Metrics
from batchtune.server.models.servable import Servable
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.input_shapes import InputShape
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.server.sessions.unbatched import RequestThreads, UnbatchedSession
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.rest_json import GraphBatching
from tests.server.backends.model_files import onnx_graph, save_program
from tests.server.models.model_fakes import SIGNATURE, GatedModel, Outputs, Server, Y, batching, serving

UNBATCHED, SHARED = BatchingSettings(), batching(max_batch_size=4)
RETRIES = BatchingSettings(enabled=True, retry_max_time_micros=10_000_000)
ALL = (UNBATCHED, SHARED, replace(batching(batch_timeout_micros=1000), scheduler="streaming"), RETRIES)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What was there when the server started is frozen: the collector never looks at it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@serving(*ALL)
async def test_the_weights_of_a_version_die_with_it(server: Server) -> None:
    weights = GatedModel()
    servable = server.load(weights)
    kept = weakref.ref(weights)
    del weights
    codes = await asyncio.gather(*[server.code(value, of=servable) for value in (1, 2, -1, 3)])
    assert "OK" in codes or server.control.settings.enabled
    assert "INVALID_ARGUMENT" in codes
    await server.replace(max_batch_size=8, batch_timeout_micros=100)
    assert await server.code(of=servable) == "OK"
    await server.end(servable)
    assert kept() is None


@pytest.mark.parametrize("replaced", [False, True])
@serving(UNBATCHED, SHARED)
async def test_a_version_ends_after_its_requests_of_old_pools_too(server: Server, replaced: bool) -> None:
    """PUT, then unload, while requests wait under the old parameters: none finds a closed model."""
    server.model.gate.clear()
    waiting = [server.code() for _ in range(10)]
    if replaced:
        await server.replace(max_batch_size=2)
        waiting += [server.code() for _ in range(4)]
    end = asyncio.ensure_future(server.end(server.servable))
    await asyncio.sleep(0.02)
    assert not end.done()
    server.model.gate.set()
    assert set(await asyncio.gather(*waiting)) == {"OK"}
    await end
    assert (server.model.closed, server.model.ran_closed) == (True, False)


@serving(*ALL)
async def test_no_thread_is_left_after_many_versions_and_changes(server: Server) -> None:
    counts = []
    for number in range(6):
        servable = server.load(GatedModel())
        few = server.control.settings.scheduler == "streaming"
        sent = [server.code(of=servable) for _ in range(1 if few else 8)]
        await server.replace(max_batch_size=2 + number, num_batch_threads=2, batch_timeout_micros=100)
        assert set(await asyncio.gather(*sent)) == {"OK"}
        await server.end(servable)
        counts.append(sum("asyncio" not in thread.name for thread in threading.enumerate()))
    assert max(counts[2:]) <= counts[1]


@serving(SHARED)
async def test_sessions_of_a_version_that_cannot_be_attached_are_closed(server: Server) -> None:
    def prepare(_sizes: Any, _at_once: Any) -> None:
        raise StatusError("RESOURCE_EXHAUSTED", "out of memory")

    weights = GatedModel()
    model = LoadedModel(signatures={"s": SIGNATURE}, runs={"s": weights}, prepare=prepare)
    with pytest.raises(StatusError, match="out of memory"):
        server.attach(model)
    kept = weakref.ref(weights)
    del model, weights
    gc.collect()
    assert kept() is None


def test_unbatched_requests_beyond_what_may_wait_are_refused_as_the_reference_does() -> None:
    delivered: list[Any] = []
    begun, gate, metrics = threading.Event(), threading.Event(), Metrics()

    def run(inputs: Tensors) -> Tensors:
        begun.set()
        gate.wait(10)
        return {"y": inputs["x"]}

    threads = RequestThreads(1, waiting_max=4)
    session = UnbatchedSession(
        signature=SIGNATURE, runner=run, threads=threads, observer=metrics, deliver=delivered.extend
    )
    request = ({"x": np.zeros((1, 1))}, None, None, lambda *_: None)
    session.submit(*request)
    assert begun.wait(10)
    for _ in range(4):
        session.submit(*request)
    for _ in range(2):
        with pytest.raises(StatusError, match=r"^RESOURCE_EXHAUSTED: Server Threadpool Exhausted$"):
            session.submit(*request)
    assert 'batchtune:serving:rejected_count{reason="queue_full"} 2' in metrics.render()
    gate.set()
    threads.close()
    assert len(delivered) == 5


@serving()
async def test_a_version_says_in_a_line_what_it_is(server: Server) -> None:
    text = TensorSpec(name="text", dtype="object", shape=None)
    other = Signature(name="a", method_name="", inputs=(text,), outputs=(Y,))
    runs = {name: GatedModel() for name in ("s", "a")}
    model = LoadedModel(signatures={"s": SIGNATURE, "a": other}, runs=runs)
    assert Servable(name="m", version=1, model=model, metrics=server.metrics).summary() == "closed"
    servable = server.attach(model)
    described = "a(text: string <unknown>) -> (y: float32 [?,1]) and 1 more; "
    assert servable.summary() == f"{described}not batched"
    await server.replace(max_batch_size=8, allowed_batch_sizes=[4, 8], num_batch_threads=3)
    assert servable.summary() == (
        f"{described}max_batch_size 8, batch_timeout_micros 0, max_enqueued_batches 10, num_batch_threads 3, "
        "allowed_batch_sizes 4,8"
    )


@serving(replace(UNBATCHED, enabled=True, per_model=True))
async def test_a_model_that_batches_inside_is_told_where_it_is_batched_twice(server: Server) -> None:
    inside = (GraphBatching(max_batch_size=2, batch_timeout_micros=1, num_batch_threads=1),)
    model = LoadedModel(signatures={"s": SIGNATURE}, runs={"s": GatedModel()}, inside=inside)
    without = server.attach(model).summary()
    assert "not batched; its graph batches: max_batch_size 2," in without
    twice = server.attach(model, own_parameters=BatchingParameters(max_batch_size=8)).summary()
    assert "; batched twice, in its graph too: max_batch_size 2," in twice


IMAGES = replace(SIGNATURE, inputs=(TensorSpec(name="x", dtype="float32", shape=(None, 28, None, 1)),))


@serving(UNBATCHED, SHARED)
async def test_a_wrong_shape_never_reaches_the_model(server: Server) -> None:
    """TensorFlow's convolutions abort the process where the rank is wrong."""
    runs: list[tuple[int, ...]] = []

    def run(inputs: Tensors) -> Outputs:
        runs.append(inputs["x"].shape)
        return {"y": np.zeros((len(inputs["x"]), 1), np.float32)}

    servable = server.attach(LoadedModel(signatures={"s": IMAGES}, runs={"s": run}))
    done: list[Any] = []

    def submit(*sizes: int) -> None:
        servable.submit("s", {"x": np.zeros(sizes, np.float32)}, None, None, lambda *end: done.append(end))

    for shape in ((1, 2), (3,), (1, 28, 5, 1, 1), (2, 27, 5, 1), (1, 28, 5, 3)) * 2:
        with pytest.raises(StatusError) as raised:
            submit(*shape)
        assert str(raised.value) == (
            "INVALID_ARGUMENT: signature s input x shape is wrong, expected: [?,28,?,1], "
            f"actual: {str(list(shape)).replace(' ', '')}"
        )
    good = [(rows, 28, width, 1) for rows, width in ((1, 9), (2, 9), *((1, width) for width in range(70)))]
    for count, sizes in enumerate(good, 1):
        submit(*sizes)
        while len(done) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert runs == good


def test_an_unknown_shape_takes_all_and_a_scalar_is_one() -> None:
    unknown = InputShape("s", TensorSpec(name="x", dtype="float32", shape=None))
    for shape in ((), (1,), (1, 2, 3)):
        unknown.check(shape)
    scalar = InputShape("s", TensorSpec(name="x", dtype="float32", shape=()))
    scalar.check(())
    with pytest.raises(StatusError, match=r"expected: \[\], actual: \[1\]"):
        scalar.check((1,))


def test_a_batch_for_closed_lanes_is_refused() -> None:
    torch = pytest.importorskip("torch")
    lanes = Lanes(torch, HostDevice(torch), list, failures=(RuntimeError,))
    assert [array.tolist() for array in lanes.run([np.ones(2, np.float32)])] == [[1.0, 1.0]]
    lanes.close()
    with pytest.raises(StatusError, match="The model is closed"):
        lanes.run([np.ones(2, np.float32)])


WIDTH = 500
WEIGHTS_BYTES = 4 * WIDTH * WIDTH


async def come_and_go(server: Server, directory: Path) -> list[weakref.ref[Any]]:
    """Load a version, ask it, end it; its runs."""
    model = load_model(directory, ServerFlags(device="cpu"))
    (name, signature), *_ = model.signatures.items()
    kept: list[weakref.ref[Any]] = [weakref.ref(run) for run in model.runs.values()]
    servable = server.attach(model)
    del model
    answered = asyncio.get_running_loop().create_future()
    inputs = {signature.inputs[0].name: np.ones((2, WIDTH), np.float32)}
    servable.submit(name, inputs, None, None, lambda *ended: answered.set_result(ended))
    assert (await answered)[1] is None
    await server.end(servable)
    return kept


@pytest.mark.usefixtures("no_collector")
@serving(SHARED)
async def test_an_onnx_session_dies_with_its_version(server: Server, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    weights = onnx.numpy_helper.from_array(np.ones((WIDTH, WIDTH), np.float32), "w")
    product = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    x, y = ((name, onnx.TensorProto.FLOAT, [None, WIDTH]) for name in "xy")
    onnx.save(onnx_graph([product], [x], [y], [weights]), tmp_path / "model.onnx")
    assert [run() for run in await come_and_go(server, tmp_path)] == [None]


@pytest.mark.usefixtures("no_collector")
@serving(SHARED)
async def test_exported_weights_are_freed_though_in_a_cycle(server: Server, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_program(tmp_path, torch.nn.Linear(WIDTH, WIDTH), width=WIDTH)

    def weights() -> int:
        """Bytes of all tensors as large as the model's; others may be there from other tests."""
        tensors = [one for one in gc.get_objects() if type(one) in {torch.Tensor, torch.nn.Parameter}]
        sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        return sum(size for size in sizes.values() if size >= WEIGHTS_BYTES)

    before = weights()
    await come_and_go(server, tmp_path)
    assert weights() == before
