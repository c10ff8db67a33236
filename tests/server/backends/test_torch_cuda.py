"""What a PyTorch model does on a GPU: lanes, graphs, page-locked copies, memory that runs out.

The first part puts a record of CUDA's calls at torch's boundary, and computes on the CPU. What is marked gpu needs the
real thing.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.model import LoadedModel
from batchtune.server.backends.registry import load_model
from batchtune.server.backends.torch import lanes as torch_lanes
from batchtune.server.backends.torch.device import CudaDevice, HostDevice
from batchtune.server.backends.torch.loading import Forward, device_of, served_module
from batchtune.server.models.warmup import expected_sizes
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError
from tests.server.backends.model_files import save_program

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

X = TensorSpec(name="x", dtype="float32", shape=(None, 3))
Y = TensorSpec(name="y", dtype="float32", shape=(None, 3))
Z = TensorSpec(name="z", dtype="int64", shape=(None,))
REPLAYED = ["replay", "event on", "event wait"]
UNRECORDED = ["run", "event on", "event wait"]
NO_GRAPH = "batchtune-model-server: note: no CUDA graph for"
SPLITTING = {"enable_large_batch_splitting": True}
Module = Callable[..., Any]
Heard = pytest.CaptureFixture[str]


def rows(count: int, *, start: int = 0) -> np.ndarray:
    return np.arange(start, start + 3 * count, dtype=np.float32).reshape(count, 3)


def served(
    module: Module, device: Any = None, outputs: tuple[TensorSpec, ...] = (Y,), *, of: Any = torch
) -> LoadedModel:
    forward = Forward(of, module, outputs)
    return served_module(of, forward, device or HostDevice(torch), inputs=(X,), outputs=outputs)


def run(model: LoadedModel, x: np.ndarray) -> np.ndarray:
    return model.runs["serving_default"]({"x": x})["y"]


def double(x: Any) -> Any:
    return x * 2


def assert_doubles(model: LoadedModel, *counts: int) -> None:
    for count in counts:
        np.testing.assert_array_equal(run(model, rows(count)), rows(count) * 2)


class FakeCuda:
    """torch with a GPU: tensors are the CPU's, `torch.cuda` writes down what is asked of it."""

    class OutOfMemoryError(RuntimeError):
        pass

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.current = threading.local()
        self.recording: Any = None
        self.fail_recording = ""
        self.lost = ""
        self.drawn: Counter[int] = Counter()
        self.cuda = SimpleNamespace(
            Stream=self._stream,
            Event=self._event,
            CUDAGraph=self._graph,
            stream=self._on,
            current_stream=lambda: self.current.stream,
            graph_pool_handle=lambda: ("pool", len(self.log)),
            is_available=lambda: True,
            device_count=lambda: 2,
            set_per_process_memory_fraction=lambda share, at: self.log.append(("memory", share, at)),
            empty_cache=lambda: self.log.append(("empty_cache",)),
        )  # no synchronize: to wait for the whole device is an AttributeError
        self.pinned = 0
        self._C = SimpleNamespace(_cuda_endAllocateToPool=lambda *args: self.log.append(("end_pool", *args)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: str, index: int = 0) -> Any:
        assert kind == "cuda"
        return torch.device("cpu")

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        self.pinned += pin_memory
        return torch.empty(*args, **kwargs)

    def _stream(self, device: Any, priority: int = 0) -> Any:
        """One of the 32 of its priority; what is drawn later may be the same stream."""
        number = self.drawn[priority] % 32
        self.drawn[priority] += 1
        name = f"stream {number}" + " of high priority" * (priority < 0)
        self.log.append(("stream", name))
        # Takes no weak references: PyTorch 2.11's takes them, and crashes the process when it dies before they do.
        return SimpleNamespace(
            name=name,
            device=device,
            cuda_stream=hash((id(self), number, priority)),
            synchronize=lambda: self.log.append(("wait for", name)),
        )

    def _event(self, *, blocking: bool) -> Any:
        assert blocking, "a thread that waits must sleep, not spin"
        if self.lost:
            raise RuntimeError(self.lost)
        return SimpleNamespace(
            record=lambda: self.log.append(("event on", self._current_name())),
            synchronize=lambda: self.log.append(("event wait",)),
        )

    def _current_name(self) -> str:
        stream = getattr(self.current, "stream", None)
        return "the default stream" if stream is None else str(stream.name)

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before = getattr(self.current, "stream", None)
        self.current.stream = stream
        try:
            yield
        finally:
            self.current.stream = before

    def _graph(self) -> Any:
        graph = SimpleNamespace(stream=None, body=None)

        def begin(*, pool: Any, capture_error_mode: str) -> None:
            assert self.recording is None, "two recordings at once"
            assert capture_error_mode == "thread_local"
            graph.stream, self.recording = self.current.stream.name, graph
            self.log.append(("begin", graph.stream, pool))

        def end() -> None:
            assert self.current.stream.name == graph.stream
            self.recording = None
            self.log.append(("end", graph.stream))
            if self.fail_recording:
                raise RuntimeError(self.fail_recording)

        def replay() -> None:
            assert self.current.stream.name == graph.stream, "a lane's graph runs on the lane's stream"
            assert self.recording is None, "older PyTorch refuses to replay while a graph is recorded"
            self.log.append(("replay", graph.stream))
            graph.body()

        graph.capture_begin, graph.capture_end, graph.replay = begin, end, replay
        return graph

    def records_here(self) -> bool:
        return self.recording is not None and self.recording.stream == self._current_name()

    def served(self, module: Module = double) -> LoadedModel:
        """While a graph is recorded, the module writes into the same tensor at each replay."""

        def recorded(x: Any) -> Any:
            self.log.append(("run", len(x)))
            y = module(x)
            if self.records_here():
                self.recording.body = lambda: y.copy_(module(x))
            return y

        return served(recorded, CudaDevice(self, 0), of=self)

    def calls(self, *names: str) -> list[tuple[Any, ...]]:
        return [one for one in self.log if one[0] in names]

    def after(self, action: Callable[[], Any]) -> list[str]:
        """The names of the calls that an action makes."""
        at = len(self.log)
        action()
        return [one[0] for one in self.log[at:]]


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def test_only_recorded_sizes_are_replayed_and_all_are_right(cuda: FakeCuda, capfd: Heard) -> None:
    model = cuda.served()
    model.prepare((2, 4), 1)
    first = run(model, rows(2, start=100))
    for count in (1, 2, 3, 4):
        calls = cuda.after(lambda count=count: assert_doubles(model, count))  # type: ignore[misc]
        assert calls == (REPLAYED if count in (2, 4) else UNRECORDED)
    assert capfd.readouterr().err == (
        f"{NO_GRAPH} a batch of 1 rows, such batches run without: recorded are 2, 4 rows\n"
    )
    np.testing.assert_array_equal(first, rows(2, start=100) * 2)  # it outlives the next batch on its lane


def test_as_many_batches_as_there_are_lanes_are_in_work_and_share_no_tensors(cuda: FakeCuda) -> None:
    together, armed = threading.Barrier(2, timeout=20), threading.Event()
    inside, most, lock = [0], [0], threading.Lock()

    def module(x: Any) -> Any:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        if armed.is_set():
            together.wait()
        y = x + 1
        with lock:
            inside[0] -= 1
        return y

    model = cuda.served(module)
    model.prepare((2,), 2)
    armed.set()
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda start: run(model, rows(2, start=start)), range(40)))
    np.testing.assert_array_equal(answers, [rows(2, start=start) + 1 for start in range(40)])
    assert most == [2]


def test_other_sizes_or_threads_bring_other_graphs_and_a_change_of_neither_none(cuda: FakeCuda) -> None:
    model = cuda.served()
    changes = [((2,), 1, [2]), ((8, 4), 2, [8, 4, 8, 4]), ((4, 8), 2, []), ((4, 8), 1, [8, 4])]
    for sizes, threads, recorded in changes:
        cuda.log.clear()
        model.prepare(sizes, threads)
        assert [one[1] for one in cuda.calls("run")] == [size for size in recorded for _ in range(4)]
    assert_doubles(model, 4)


def test_batches_under_way_end_before_other_graphs_are_recorded(cuda: FakeCuda) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def module(x: Any) -> Any:
        if len(x) == 3:
            inside.set()
            assert go_on.wait(20)
        return x * 2

    model = cuda.served(module)
    with ThreadPoolExecutor(2) as threads:
        asking = threads.submit(run, model, rows(3))
        assert inside.wait(20)
        preparing = threads.submit(model.prepare, (4,), 1)
        with pytest.raises(TimeoutError):
            preparing.result(0.02)
        go_on.set()
        preparing.result(20)
        asking.result(20)
    assert [one[0] for one in cuda.calls("event wait", "begin")] == ["event wait", "begin"]


def test_a_surprise_while_recording_costs_no_lane(cuda: FakeCuda) -> None:
    armed = [True]

    def module(x: Any) -> Any:
        if armed[0]:
            raise IndexError("nobody expects this")
        return x * 2

    model = cuda.served(module)
    with pytest.raises(IndexError):
        model.prepare((2,), 3)
    armed[0] = False
    assert_doubles(model, 2)
    model.prepare((4,), 2)
    model.close()


@pytest.mark.parametrize(
    ("parameters", "sizes"),
    [
        (None, (1, 2, 4, 8)),
        ({"max_batch_size": 32, "allowed_batch_sizes": (8, 32)}, (8, 32)),
        ({"max_batch_size": 3}, (1, 2, 3)),
        ({"max_batch_size": 100}, (*range(1, 17), 100)),
        ({}, tuple(range(1, 17))),
        ({**SPLITTING, "max_batch_size": 64, "max_execution_batch_size": 4}, (1, 2, 3, 4)),
    ],
)
def test_graphs_have_the_sizes_of_batches(parameters: dict[str, Any] | None, sizes: tuple[int, ...]) -> None:
    assert expected_sizes(None if parameters is None else BatchingParameters(**parameters)) == sizes


def test_recording_ends_with_its_time(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, capfd: Heard) -> None:
    monkeypatch.setattr(torch_lanes, "RECORDING_LIMIT_S", -1.0)
    model = cuda.served()
    model.prepare((2, 4), 2)
    assert not cuda.calls("run")
    assert_doubles(model, 2)
    assert capfd.readouterr().err.count("no more CUDA graphs") == 1


@pytest.mark.parametrize(("given", "declared"), [(2, 1), (1, 2)])
def test_a_wrong_number_of_outputs_is_said(given: int, declared: int) -> None:
    model = served(lambda x: (x,) * given, outputs=(Y, Z)[:declared])
    words = f"returned {given} outputs, its signature has {declared}"
    with pytest.raises(StatusError, match=words) as raised:
        run(model, rows(2))
    assert raised.value.code == "INTERNAL"


def test_bfloat16_travels_as_numpys_guest_type() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    answer = run(served(double), rows(2).astype(ml_dtypes.bfloat16))
    assert answer.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(answer.astype(np.float32), rows(2) * 2)


def test_a_model_that_writes_to_its_input_does_not_write_to_the_message() -> None:
    message = rows(2).tobytes()
    x = np.frombuffer(message, np.float32).reshape(2, 3)
    np.testing.assert_array_equal(run(served(lambda x: x.add_(1)), x), rows(2) + 1)
    assert message == rows(2).tobytes()


def test_memory_of_the_host_that_runs_out_fails_one_batch() -> None:
    model = served(lambda x: x * 2 if len(x) <= 4 else torch.empty((len(x), 10**14)))
    with pytest.raises(StatusError, match=r"^RESOURCE_EXHAUSTED: "):
        run(model, rows(8))
    assert_doubles(model, 4)


def test_a_failed_run_keeps_no_tensors(cuda: FakeCuda) -> None:
    kept: list[Any] = []

    def module(x: Any) -> Any:
        large = x * 2
        kept.append(weakref.ref(large))
        raise cuda.OutOfMemoryError("CUDA out of memory.")

    model = cuda.served(module)
    seen: list[bool] = []
    cuda.cuda.empty_cache = lambda: seen.append(kept[-1]() is None)
    with pytest.raises(StatusError):
        run(model, rows(2))
    assert seen == [True]


def test_a_graph_is_recorded_on_its_lanes_stream_after_three_runs(cuda: FakeCuda) -> None:
    model = cuda.served()
    cuda.log.clear()
    model.prepare((4, 8), 2)
    first, second = (one[1] for one in cuda.calls("stream"))
    begun = cuda.calls("begin")
    assert [stream for _, stream, _ in begun] == [first, first, second, second]
    pools = [pool for *_, pool in begun]
    assert pools[0] == pools[1] != pools[2] == pools[3]  # what never runs together shares memory
    names = [one[0] for one in cuda.calls("run", "begin", "wait for", "empty_cache")]
    assert names[:7] == ["run"] * 3 + ["wait for", "empty_cache", "begin", "run"]
    assert [one[1] for one in cuda.calls("run")] == [*[8] * 4, *[4] * 4] * 2  # the largest first


def test_no_two_lanes_have_the_same_stream(cuda: FakeCuda) -> None:
    """PyTorch hands the same 32 out again and again: what runs on one would get into what is recorded on it."""
    models = [cuda.served(), cuda.served()]
    for count in (10, 5, 10, 20):
        for model in models:
            model.prepare((2,), count)
        held = [lane.stream.stream.name for model in models for lane in lanes_of(model)]
        if count <= 16:
            assert len(set(held)) == len(held) == 2 * count
    recorded = {lane.stream.stream.name: lane for model in models for lane in lanes_of(model) if lane.graphs}
    assert len(recorded) == 32
    assert not [name for name in recorded if name.endswith("priority")]
    for model in models:
        assert_doubles(model, 2)


def test_a_thread_too_many_for_the_streams_is_said_once(cuda: FakeCuda, capfd: Heard) -> None:
    model = cuda.served()
    model.prepare((2,), 40)
    assert len(lanes_of(model)) == 40
    assert capfd.readouterr().err == (
        f"{NO_GRAPH} 2 rows, such batches run without: all 32 streams are taken; have fewer batch threads or models\n"
    )


def lanes_of(model: LoadedModel) -> list[Any]:
    return model.runs["serving_default"]._lanes._free._lanes  # type: ignore[attr-defined]


def test_while_a_graph_is_recorded_batches_run_without(cuda: FakeCuda) -> None:
    threads = ThreadPoolExecutor(1)
    asked: list[Any] = []

    def module(x: Any) -> Any:
        if (
            cuda.records_here() and len(cuda.calls("begin")) == 2 and not asked
        ):  # the first lane is at work already
            asked.append(threads.submit(assert_doubles, model, 2))
            asked[0].result(20)
        return x * 2

    model = cuda.served(module)
    model.prepare((2,), 2)
    threads.shutdown()
    assert len(asked) == 1
    assert not cuda.calls("replay")
    assert cuda.after(lambda: run(model, rows(2))) == REPLAYED


def test_batches_are_gathered_and_answered_in_page_locked_memory(cuda: FakeCuda) -> None:
    model = cuda.served()
    before = cuda.pinned
    merged = model.empty((2, 3), np.dtype(np.float32))
    assert (merged.shape, merged.dtype, cuda.pinned - before) == ((2, 3), np.float32, 1)
    assert model.empty((2,), np.dtype(object)).dtype == object
    merged[:] = rows(2)
    before = cuda.pinned
    run(model, merged)
    # The fake cannot tell locked memory, so there is one more copy than on a GPU: in, and out.
    assert cuda.pinned - before == 2


def test_a_recording_that_fails_is_ended_and_done_without(cuda: FakeCuda, capfd: Heard) -> None:
    cuda.fail_recording = "CUDA error: operation not permitted when stream is capturing\nmore"
    model = cuda.served()
    model.prepare((2, 4), 2)
    assert len(cuda.calls("begin")) == 1  # the other sizes would fail in the same way
    assert cuda.calls("end_pool")
    assert cuda.after(lambda: run(model, rows(2))) == UNRECORDED
    assert capfd.readouterr().err == (
        f"{NO_GRAPH} 4 rows, such batches run without: CUDA error: operation not permitted when stream is capturing\n"
    )


def test_a_module_that_fails_while_recorded_leaves_no_recording_open(cuda: FakeCuda) -> None:
    def module(x: Any) -> Any:
        if cuda.recording is not None:
            raise RuntimeError("cannot be recorded")
        return x * 2

    model = cuda.served(module)
    model.prepare((2,), 1)
    assert cuda.recording is None
    assert len(cuda.calls("end")) == 1
    assert_doubles(model, 2)


def test_a_size_for_which_memory_is_out_fails_alone_recorded_and_run(cuda: FakeCuda, capfd: Heard) -> None:
    def module(x: Any) -> Any:
        if len(x) > 4:
            raise cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x * 2

    model = cuda.served(module)
    model.prepare((4, 8), 2)
    assert capfd.readouterr().err.count("no CUDA graph for 8 rows") == 1
    for _ in range(3):
        with pytest.raises(StatusError, match=r"^RESOURCE_EXHAUSTED: .*CUDA out of memory\. Tried"):
            run(model, rows(8))
        assert cuda.log[-1] == ("empty_cache",)
        assert cuda.after(lambda: assert_doubles(model, 4)) == REPLAYED


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("CUDA error: invalid argument\nmore", "INTERNAL"),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "INTERNAL"),
        ("shapes cannot be multiplied", "INVALID_ARGUMENT"),
    ],
)
def test_what_the_gpu_does_wrong_is_no_fault_of_the_request(said: str, code: str, cuda: FakeCuda) -> None:
    def module(x: Any) -> Any:
        raise RuntimeError(said)

    with pytest.raises(StatusError) as raised:
        run(cuda.served(module), rows(2))
    assert raised.value.code == code


def test_a_lost_gpu_ends_the_process(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, capfd: Heard) -> None:
    def module(x: Any) -> Any:
        cuda.lost = "CUDA error: device-side assert triggered"
        raise RuntimeError(f"{cuda.lost}\nCompile with ...")

    def end() -> None:
        raise SystemExit("ended")

    monkeypatch.setattr("os.abort", end)
    with pytest.raises(SystemExit):
        run(cuda.served(module), rows(2))
    assert capfd.readouterr().err == (
        "batchtune-model-server: error: cpu is lost to this process, which ends: CUDA error: device-side assert "
        "triggered; start it again\n"
    )


def test_weights_come_before_the_lanes(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tmp_path, mixed=False)
    monkeypatch.setattr("batchtune.server.backends.torch.loading.device_of", lambda *_: CudaDevice(cuda, 0))
    load_model(tmp_path, ServerFlags(device="cuda"))
    loading = cuda.calls("stream")[0]
    # The lanes are made afterwards.
    assert cuda.log[:3] == [loading, ("event on", loading[1]), ("event wait",)]


@pytest.mark.parametrize("wanted", ["cuda:1", "cuda", "auto"])
def test_the_device_flag_names_a_gpu(wanted: str, cuda: FakeCuda) -> None:
    assert isinstance(device_of(cuda, ServerFlags(device=wanted)), CudaDevice)
    with pytest.raises(StatusError, match="PyTorch sees 2 GPU"):
        device_of(cuda, ServerFlags(device="cuda:2"))
    assert cuda.log == []
    device_of(cuda, ServerFlags(device=wanted, per_process_gpu_memory_fraction=0.5))
    assert cuda.log == [("memory", 0.5, 1 if wanted == "cuda:1" else 0)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(StatusError, match=r"^FAILED_PRECONDITION: .*PyTorch sees no GPU"):
        load_model(tmp_path, ServerFlags(device="cuda"))
    assert isinstance(device_of(torch, ServerFlags(device="auto")), HostDevice)


# -- precision --


class Classifier(torch.nn.Module):  # type: ignore[misc, name-defined]
    """One that can be converted as a whole; with `mixed`, one that makes float32 tensors of its own."""

    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = torch.nn.Linear(3, 64)
        self.outer = torch.nn.Linear(64, 3)
        self.mixed = mixed

    def forward(self, x: Any) -> Any:
        if self.mixed:
            x = x + torch.arange(3, device=x.device).float()
        return torch.softmax(self.outer(torch.relu(self.inner(x))), -1)


def exported(directory: Path, *, mixed: bool) -> torch.nn.Module:  # type: ignore[name-defined]
    module = Classifier(mixed=mixed).eval()
    save_program(directory, module)
    return module


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_computes_in_this_precision(tmp_path: Path, capfd: Heard, dtype: str, mixed: bool) -> None:
    module = exported(tmp_path, mixed=mixed)
    x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    expected = module(torch.tensor(x)).detach().numpy()
    model = load_model(tmp_path, ServerFlags(device="cpu", torch_dtype=dtype))
    answer = model.runs["serving_default"]({"x": x})["output_0"]
    assert answer.dtype == np.float32
    np.testing.assert_allclose(answer, expected, atol=1e-6 if dtype == "float32" else 2e-2)
    assert (np.abs(answer - expected).max() > 1e-6) == (dtype != "float32")
    assert ("products are cast" in capfd.readouterr().err) == (mixed and dtype != "float32")


# -- a real GPU --

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")


@pytest.mark.gpu
@needs_gpu
def test_gpu_memory_that_runs_out_ends_one_batch(capfd: Heard) -> None:
    def module(x: Any) -> Any:
        held = torch.empty((len(x) - 4, 1 << 36), device=x.device) if len(x) > 4 else None
        return x * 2 if held is None else held[:, :3]

    model = served(module, CudaDevice(torch, 0))
    model.prepare((4, 8), 2)
    assert "no CUDA graph for 8 rows" in capfd.readouterr().err
    for _ in range(3):
        with pytest.raises(StatusError, match=r"^RESOURCE_EXHAUSTED: .*out of memory"):
            run(model, rows(8))
        assert_doubles(model, 4)


@pytest.mark.gpu
@needs_gpu
def test_gpu_runs_of_a_module_that_cannot_be_recorded(capfd: Heard) -> None:
    model = served(lambda x: x * x.sum().item(), CudaDevice(torch, 0))
    model.prepare((2, 4), 2)
    assert capfd.readouterr().err.count("no CUDA graph") == 1
    np.testing.assert_allclose(run(model, rows(2)), rows(2) * 15)
    np.testing.assert_allclose(run(model, rows(4)), rows(4) * 66)
    torch.cuda.empty_cache()  # a failed recording must not be in the way
    recorded = served(lambda x: x * 3, CudaDevice(torch, 0))
    recorded.prepare((2,), 1)
    assert "no CUDA graph" not in capfd.readouterr().err
    np.testing.assert_allclose(run(recorded, rows(2)), rows(2) * 3)


@pytest.mark.gpu
@needs_gpu
def test_gpu_batches_are_gathered_in_page_locked_memory() -> None:
    device = CudaDevice(torch, 0)
    gathered = device.empty((2, 3), np.dtype(np.float32))
    gathered[:] = rows(2)
    assert torch.from_numpy(gathered).is_pinned()
    assert device.staged(gathered).data_ptr() == torch.from_numpy(gathered).data_ptr()
    assert device.staged(rows(2)).is_pinned()


@pytest.mark.gpu
@needs_gpu
def test_gpu_graphs_are_right_while_parameters_change(tmp_path: Path, capfd: Heard) -> None:
    tolerances = {"as_exported": 1e-3, "float16": 2e-2, "bfloat16": 2e-2}
    module, stop = exported(tmp_path, mixed=False), threading.Event()
    models = {
        dtype: load_model(tmp_path, ServerFlags(device="cuda:0", torch_dtype=dtype)) for dtype in tolerances
    }

    def ask(client: int) -> int:
        random, answered = np.random.default_rng(client), 0
        while not stop.is_set():
            dtype = str(random.choice(list(tolerances)))
            x = random.normal(size=(int(random.integers(1, 9)), 3)).astype(np.float32)
            answer = models[dtype].runs["serving_default"]({"x": x})["output_0"]
            expected = module(torch.tensor(x)).detach().numpy()
            np.testing.assert_allclose(answer, expected, atol=tolerances[dtype])
            answered += 1
        return answered

    with ThreadPoolExecutor(6) as clients:
        asking = [clients.submit(ask, client) for client in range(6)]
        try:
            for change, model in enumerate(list(models.values()) * 6):
                model.prepare(((1, 4), (2, 8), (1, 2, 4, 8))[change // 3 % 3], 1 + change % 4)
        finally:
            stop.set()
        assert all(one.result(60) for one in asking)
    assert not re.search(r"no CUDA graph for \d", capfd.readouterr().err)
    for model in models.values():
        model.close()
