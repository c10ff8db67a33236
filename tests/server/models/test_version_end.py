"""The end of a version: everything that it was asked is answered, then nothing of it is left."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.model import LoadedModel, Tensors
from batchtune.server.backends.registry import load_model
from batchtune.server.backends.torch.device import HostDevice
from batchtune.server.backends.torch.lanes import Lanes
from batchtune.server.calls.pending_call import deliver_to
from batchtune.server.metrics import Metrics
from batchtune.server.models.batching_control import BatchingControl
from batchtune.server.models.servable import Servable
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.input_shapes import InputShape
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.server.sessions.unbatched import RequestThreads, UnbatchedSession
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.rest_json import GraphBatching

Outputs = dict[str, NDArray[Any]]
X, Y = (TensorSpec(name=name, dtype="float32", shape=(None, 1)) for name in "xy")
SIGNATURE = Signature(name="s", method_name="tensorflow/serving/predict", inputs=(X,), outputs=(Y,))


class Weights:
    """y = 2 x while open; a negative x fails as a framework would; runs wait while the gate is shut."""

    def __init__(self) -> None:
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()
        self.runs_after_close = 0

    def __call__(self, inputs: Tensors) -> Outputs:
        self.gate.wait(10)
        self.runs_after_close += self.closed
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


class Server:
    """The parts that a version passes through, on the running loop."""

    def __init__(self, settings: BatchingSettings) -> None:
        loop = asyncio.get_running_loop()
        self.deliver = deliver_to(loop)
        self.metrics = Metrics()
        self.control = BatchingControl(
            settings, observer=self.metrics, deliver=self.deliver, on_loop=loop.call_soon_threadsafe
        )

    def load(self, weights: Weights) -> Servable:
        model = LoadedModel(signatures={"s": SIGNATURE}, runs={"s": weights}, close=weights.close)
        servable = Servable(name="m", version=1, model=model, metrics=self.metrics)
        self.control.attach(servable)
        return servable

    def request(self, servable: Servable, value: float = 1.0) -> asyncio.Future[str]:
        """The code of the answer."""
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def done(_outputs: Outputs | None, error: StatusError | None) -> None:
            answered.set_result("OK" if error is None else error.code)

        servable.submit("s", {"x": np.full((1, 1), value, np.float32)}, None, None, done)
        return answered

    async def end(self, servable: Servable) -> None:
        await asyncio.to_thread(self.control.detach, servable)
        await asyncio.to_thread(servable.close)


def serve(scenario: Callable[[Server], Awaitable[None]], settings: BatchingSettings) -> None:
    async def run() -> None:
        server = Server(settings)
        try:
            await asyncio.wait_for(scenario(server), 20)
        finally:
            await asyncio.to_thread(server.control.close)

    asyncio.run(run())


SETTINGS = {
    "unbatched": BatchingSettings(),
    "shared": BatchingSettings(enabled=True, parameters=BatchingParameters(max_batch_size=4)),
    "streaming": BatchingSettings(
        enabled=True, scheduler="streaming", parameters=BatchingParameters(batch_timeout_micros=1000)
    ),
    "retries": BatchingSettings(enabled=True, retry_max_time_micros=10_000_000),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What was there when the server started is frozen: the collector never looks at it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_weights_of_a_version_die_with_it(kind: str) -> None:
    async def scenario(server: Server) -> None:
        weights = Weights()
        servable = server.load(weights)
        kept = weakref.ref(weights)
        del weights
        codes = await asyncio.gather(*[server.request(servable, value) for value in (1, 2, -1, 3)])
        assert "OK" in codes or kind != "unbatched"
        assert "INVALID_ARGUMENT" in codes
        await asyncio.to_thread(server.control.replace, {"max_batch_size": 8, "batch_timeout_micros": 100})
        assert await server.request(servable) == "OK"
        await server.end(servable)
        assert kept() is None

    serve(scenario, SETTINGS[kind])


@pytest.mark.parametrize("kind", ["unbatched", "shared"])
def test_a_version_ends_after_the_requests_of_pools_that_were_replaced(kind: str) -> None:
    """PUT, then unload, while requests wait under the old parameters: none finds a closed model."""

    async def scenario(server: Server) -> None:
        weights = Weights()
        servable = server.load(weights)
        weights.gate.clear()
        waiting = [server.request(servable) for _ in range(10)]
        await asyncio.to_thread(server.control.replace, {"max_batch_size": 2})
        waiting += [server.request(servable) for _ in range(4)]
        end = asyncio.ensure_future(server.end(servable))
        await asyncio.sleep(0.02)
        assert not end.done()
        weights.gate.set()
        assert set(await asyncio.gather(*waiting)) == {"OK"}
        await end
        assert weights.closed
        assert weights.runs_after_close == 0

    serve(scenario, SETTINGS[kind])


@pytest.mark.parametrize("kind", SETTINGS)
def test_no_thread_is_left_after_many_versions_and_changes(kind: str) -> None:
    async def scenario(server: Server) -> None:
        counts = []
        for number in range(6):
            servable = server.load(Weights())
            sent = [server.request(servable) for _ in range(1 if kind == "streaming" else 8)]
            await asyncio.to_thread(
                server.control.replace,
                {"max_batch_size": 2 + number, "num_batch_threads": 2, "batch_timeout_micros": 100},
            )
            assert set(await asyncio.gather(*sent)) == {"OK"}
            await server.end(servable)
            counts.append(sum("asyncio" not in thread.name for thread in threading.enumerate()))
        assert max(counts[2:]) <= counts[1]

    serve(scenario, SETTINGS[kind])


def test_sessions_of_a_version_that_cannot_be_attached_are_closed() -> None:
    async def scenario(server: Server) -> None:
        def prepare(_sizes: Any, _at_once: Any) -> None:
            raise StatusError("RESOURCE_EXHAUSTED", "out of memory")

        weights = Weights()
        model = LoadedModel(signatures={"s": SIGNATURE}, runs={"s": weights}, prepare=prepare)
        servable = Servable(name="m", version=1, model=model, metrics=server.metrics)
        with pytest.raises(StatusError, match="out of memory"):
            server.control.attach(servable)
        kept = weakref.ref(weights)
        del servable, model, weights
        gc.collect()
        assert kept() is None

    serve(scenario, SETTINGS["shared"])


def test_unbatched_requests_beyond_what_may_wait_are_refused_as_the_reference_does() -> None:
    delivered: list[Any] = []
    gate, metrics = threading.Event(), Metrics()

    def run(inputs: Tensors) -> Tensors:
        gate.wait(10)
        return {"y": inputs["x"]}

    threads = RequestThreads(1, waiting_max=4)
    session = UnbatchedSession(
        signature=SIGNATURE, runner=run, threads=threads, observer=metrics, deliver=delivered.extend
    )
    refusals: list[str] = []
    for _ in range(20):
        try:
            session.submit({"x": np.zeros((1, 1))}, None, None, lambda *_: None)
        except StatusError as error:
            refusals.append(str(error))
    refused = len(refusals)
    assert refused in {15, 16}  # the thread may hold one
    assert set(refusals) == {"RESOURCE_EXHAUSTED: Server Threadpool Exhausted"}
    assert f'batchtune:serving:rejected_count{{reason="queue_full"}} {refused}' in metrics.render()
    gate.set()
    threads.close()
    assert len(delivered) == 20 - refused


def test_a_version_says_in_a_line_what_it_is() -> None:
    async def scenario(server: Server) -> None:
        text = TensorSpec(name="text", dtype="object", shape=None)
        other = Signature(name="a", method_name="", inputs=(text,), outputs=(Y,))
        runs = {name: Weights() for name in ("s", "a")}
        model = LoadedModel(signatures={"s": SIGNATURE, "a": other}, runs=runs)
        servable = Servable(name="m", version=1, model=model, metrics=server.metrics)
        assert servable.summary() == "closed"
        server.control.attach(servable)
        described = "a(text: string <unknown>) -> (y: float32 [?,1]) and 1 more; "
        assert servable.summary() == f"{described}not batched"
        sizes = {"max_batch_size": 8, "allowed_batch_sizes": [4, 8], "num_batch_threads": 3}
        await asyncio.to_thread(server.control.replace, sizes)
        assert servable.summary() == (
            f"{described}max_batch_size 8, batch_timeout_micros 0, max_enqueued_batches 10, num_batch_threads 3, "
            "allowed_batch_sizes 4,8"
        )

    serve(scenario, SETTINGS["unbatched"])


def test_a_model_that_batches_inside_is_batched_twice_only_where_the_server_batches_it_too() -> None:
    inside = (GraphBatching(max_batch_size=2, batch_timeout_micros=1, num_batch_threads=1),)

    async def scenario(server: Server) -> None:
        model = LoadedModel(signatures={"s": SIGNATURE}, runs={"s": Weights()}, inside=inside)
        for name, own, words in (
            ("without", None, "not batched; its graph batches: max_batch_size 2,"),
            (
                "with",
                BatchingParameters(max_batch_size=8),
                "; batched twice, in its graph too: max_batch_size 2,",
            ),
        ):
            servable = Servable(name=name, version=1, model=model, metrics=server.metrics, own_parameters=own)
            server.control.attach(servable)
            assert words in servable.summary()

    serve(scenario, BatchingSettings(enabled=True, per_model=True))


IMAGES = Signature(
    name="serving_default",
    method_name="tensorflow/serving/predict",
    inputs=(TensorSpec(name="x", dtype="float32", shape=(None, 28, None, 1)),),
    outputs=(Y,),
)


@pytest.mark.parametrize("kind", ["unbatched", "shared"])
@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((1, 2), "[1,2]"),
        ((3,), "[3]"),
        ((1, 28, 5, 1, 1), "[1,28,5,1,1]"),
        ((2, 27, 5, 1), "[2,27,5,1]"),
        ((1, 28, 5, 3), "[1,28,5,3]"),
    ],
)
def test_a_wrong_shape_never_reaches_the_model(kind: str, shape: tuple[int, ...], shown: str) -> None:
    """TensorFlow's convolutions abort the process where the rank is wrong."""

    async def scenario(server: Server) -> None:
        runs: list[tuple[int, ...]] = []

        def run(inputs: Tensors) -> Outputs:
            runs.append(inputs["x"].shape)
            return {"y": np.zeros((len(inputs["x"]), 1), np.float32)}

        model = LoadedModel(signatures={"serving_default": IMAGES}, runs={"serving_default": run})
        servable = Servable(name="m", version=1, model=model, metrics=server.metrics)
        server.control.attach(servable)
        done: list[Any] = []

        def submit(*sizes: int) -> None:
            inputs = {"x": np.zeros(sizes, np.float32)}
            servable.submit("serving_default", inputs, None, None, lambda *ended: done.append(ended))

        for _ in range(2):
            with pytest.raises(StatusError) as raised:
                submit(*shape)
            assert str(raised.value) == (
                "INVALID_ARGUMENT: signature serving_default input x shape is wrong, expected: [?,28,?,1], "
                f"actual: {shown}"
            )
        good = [
            (rows, 28, width, 1) for rows, width in ((1, 9), (2, 9), *((1, width) for width in range(70)))
        ]
        for count, sizes in enumerate(good, 1):
            submit(*sizes)
            while len(done) < count:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert runs == good

    serve(scenario, SETTINGS[kind])


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


def save_onnx(directory: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    weights = onnx.numpy_helper.from_array(np.ones((WIDTH, WIDTH), np.float32), "w")
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [None, WIDTH]) for name in "xy")
    product = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([product], "product", [x], [y], [weights])
    opset = onnx.helper.make_opsetid("", 13)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), directory / "model.onnx")


def save_torch(directory: Path) -> None:
    torch = pytest.importorskip("torch")
    example = (torch.ones(2, WIDTH),)
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(torch.nn.Linear(WIDTH, WIDTH), example, dynamic_shapes=shapes)
    torch.export.save(program, directory / "model.pt2")


async def come_and_go(server: Server, directory: Path) -> list[weakref.ref[Any]]:
    """Load a version, ask it, end it; its runs."""
    model = load_model(directory, ServerFlags(device="cpu"))
    (name, signature), *_ = model.signatures.items()
    kept: list[weakref.ref[Any]] = [weakref.ref(run) for run in model.runs.values()]
    servable = Servable(name="m", version=1, model=model, metrics=server.metrics)
    del model
    server.control.attach(servable)
    answered = asyncio.get_running_loop().create_future()
    inputs = {signature.inputs[0].name: np.ones((2, WIDTH), np.float32)}
    servable.submit(name, inputs, None, None, lambda *ended: answered.set_result(ended))
    assert (await answered)[1] is None
    await server.end(servable)
    return kept


@pytest.mark.usefixtures("no_collector")
def test_an_onnx_session_dies_with_its_version(tmp_path: Path) -> None:
    save_onnx(tmp_path)

    async def scenario(server: Server) -> None:
        assert [run() for run in await come_and_go(server, tmp_path)] == [None]

    serve(scenario, SETTINGS["shared"])


@pytest.mark.usefixtures("no_collector")
def test_exported_weights_are_freed_though_their_module_lives_in_a_cycle(tmp_path: Path) -> None:
    save_torch(tmp_path)
    torch = pytest.importorskip("torch")

    def weights() -> int:
        """Bytes of all tensors as large as the model's; others may be there from other tests."""
        tensors = [one for one in gc.get_objects() if type(one) in {torch.Tensor, torch.nn.Parameter}]
        sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        return sum(size for size in sizes.values() if size >= WEIGHTS_BYTES)

    async def scenario(server: Server) -> None:
        before = weights()
        await come_and_go(server, tmp_path)
        assert weights() == before

    serve(scenario, SETTINGS["shared"])
