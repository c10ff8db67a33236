"""What a PyTorch model does on a GPU: lanes, graphs, page-locked copies, memory that runs out.

The first part runs the GPU's path on the CPU, where a graph runs the module again with one set of tensors. The second
puts a record of CUDA's calls at torch's boundary. The third, marked gpu, needs the real thing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.emulated import load_emulated_model
from batchtune.server.backends.model import LoadedModel
from batchtune.server.backends.registry import load_model
from batchtune.server.backends.torch import lanes as torch_lanes
from batchtune.server.backends.torch.device import CudaDevice, HostDevice
from batchtune.server.backends.torch.loading import Forward, device_of, served_module
from batchtune.server.models.warmup import expected_sizes
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.pool import BatchingSettings, SessionPool
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError
from tests.server.backends.recording_device import RecordingDevice

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

X = TensorSpec(name="x", dtype="float32", shape=(None, 3))
Y = TensorSpec(name="y", dtype="float32", shape=(None, 3))
Z = TensorSpec(name="z", dtype="int64", shape=(None,))


def rows(count: int, *, start: int = 0) -> np.ndarray:
    return np.arange(start, start + 3 * count, dtype=np.float32).reshape(count, 3)


def served(module: Callable[..., Any], device: Any, outputs: tuple[TensorSpec, ...] = (Y,)) -> LoadedModel:
    return served_module(torch, Forward(torch, module, outputs), device, inputs=(X,), outputs=outputs)


def run(model: LoadedModel, x: np.ndarray) -> np.ndarray:
    return model.runs["serving_default"]({"x": x})["y"]


class Counted:
    """A module that doubles, and remembers the row counts it was called with."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, x: Any) -> Any:
        self.calls.append(len(x))
        return x * 2


def test_only_recorded_sizes_are_replayed_and_all_give_the_models_answer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = served(Counted(), RecordingDevice(torch))
    model.prepare((2, 4), 1)
    for count in (1, 2, 3, 4):
        np.testing.assert_array_equal(run(model, rows(count)), rows(count) * 2)
    notes = [line for line in capfd.readouterr().err.splitlines() if "note" in line]
    assert notes == [
        (
            "batchtune-model-server: note: no CUDA graph for a batch of 1 rows, such batches run without: recorded are "
            "2, 4 rows"
        )
    ]


def test_an_answer_outlives_the_next_batch_on_the_same_lane() -> None:
    model = served(Counted(), RecordingDevice(torch))
    model.prepare((2,), 1)
    first = run(model, rows(2))
    run(model, rows(2, start=100))
    np.testing.assert_array_equal(first, rows(2) * 2)


def test_batches_in_work_together_do_not_share_tensors() -> None:
    together = threading.Barrier(2, timeout=20)
    armed: list[bool] = []

    def module(x: Any) -> Any:
        if armed:
            together.wait()
        return x + 1

    model = served(module, RecordingDevice(torch))
    model.prepare((2,), 2)
    armed.append(True)
    answers: dict[int, np.ndarray] = {}

    def work(start: int) -> None:
        for at in range(5):
            answers[start + at] = run(model, rows(2, start=start + at))

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 10
    for start, answer in answers.items():
        np.testing.assert_array_equal(answer, rows(2, start=start) + 1)


def test_no_more_batches_are_in_work_than_there_are_lanes() -> None:
    inside, most = [0], [0]
    lock, two = threading.Lock(), threading.Event()

    armed: list[bool] = []

    def module(x: Any) -> Any:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            if inside[0] == 2:
                two.set()
        if armed:
            two.wait(10.0)  # so that a slow host has both lanes at work at once
        threading.Event().wait(0.002)
        with lock:
            inside[0] -= 1
        return x

    model = served(module, RecordingDevice(torch))
    model.prepare((2,), 2)
    armed.append(True)
    threads = [threading.Thread(target=run, args=(model, rows(2))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most[0] == 2


def test_other_parameters_bring_other_graphs() -> None:
    module = Counted()
    model = served(module, RecordingDevice(torch))
    model.prepare((2,), 1)
    module.calls.clear()
    model.prepare((8, 4), 2)
    assert module.calls == [8, 4, 8, 4]
    np.testing.assert_array_equal(run(model, rows(4)), rows(4) * 2)


def test_a_change_that_leaves_sizes_and_threads_alone_records_nothing_anew() -> None:
    module = Counted()
    model = served(module, RecordingDevice(torch))
    model.prepare((8, 4), 2)
    module.calls.clear()
    model.prepare((4, 8), 2)
    assert module.calls == []
    model.prepare((4, 8), 1)
    assert module.calls == [8, 4]


def test_batches_under_way_end_before_other_graphs_are_recorded() -> None:
    inside, go_on, calls = threading.Event(), threading.Event(), []

    def module(x: Any) -> Any:
        calls.append(len(x))
        if len(x) == 3:
            inside.set()
            assert go_on.wait(20)
        return x * 2

    model = served(module, RecordingDevice(torch))
    model.prepare((2,), 1)
    asking = threading.Thread(target=run, args=(model, rows(3)))
    asking.start()
    assert inside.wait(20)
    preparing = threading.Thread(target=model.prepare, args=((4,), 1))
    preparing.start()
    preparing.join(0.02)
    assert preparing.is_alive()
    go_on.set()
    preparing.join(20)
    asking.join(20)
    assert calls == [2, 3, 4]


def test_a_surprise_while_recording_costs_no_lane() -> None:
    armed = [True]

    def module(x: Any) -> Any:
        if armed[0]:
            raise IndexError("nobody expects this")
        return x * 2

    model = served(module, RecordingDevice(torch))
    with pytest.raises(IndexError):
        model.prepare((2,), 3)
    armed[0] = False
    np.testing.assert_array_equal(run(model, rows(2)), rows(2) * 2)
    model.prepare((4,), 2)
    model.close()


def test_a_size_that_cannot_be_recorded_runs_without_a_graph(capfd: pytest.CaptureFixture[str]) -> None:
    recording = [True]

    def module(x: Any) -> Any:
        if recording[0] and len(x) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x * 2

    model = served(module, RecordingDevice(torch))
    model_device_knows_oom(model)
    model.prepare((2, 4), 2)
    recording[0] = False
    np.testing.assert_array_equal(run(model, rows(4)), rows(4) * 2)
    np.testing.assert_array_equal(run(model, rows(2)), rows(2) * 2)
    assert capfd.readouterr().err.count("no CUDA graph for 4 rows") == 1


def model_device_knows_oom(model: LoadedModel) -> None:
    """The CPU never says OutOfMemoryError; a GPU does."""
    device = model.runs["serving_default"]._device  # type: ignore[attr-defined]
    device.is_out_of_memory = lambda error: isinstance(error, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("parameters", "sizes"),
    [
        (None, (1, 2, 4, 8)),
        (BatchingParameters(max_batch_size=32, allowed_batch_sizes=(8, 32)), (8, 32)),
        (BatchingParameters(max_batch_size=3), (1, 2, 3)),
        (BatchingParameters(max_batch_size=100), (*range(1, 17), 100)),
        (BatchingParameters(), tuple(range(1, 17))),
        (
            BatchingParameters(
                max_batch_size=64, max_execution_batch_size=4, enable_large_batch_splitting=True
            ),
            (1, 2, 3, 4),
        ),
    ],
)
def test_graphs_are_recorded_for_the_sizes_that_batches_will_have(
    parameters: BatchingParameters | None, sizes: tuple[int, ...]
) -> None:
    assert expected_sizes(parameters) == sizes


def test_recording_ends_when_its_time_is_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_lanes, "RECORDING_LIMIT_S", -1.0)
    module = Counted()
    model = served(module, RecordingDevice(torch))
    model.prepare((2, 4), 2)
    assert module.calls == []
    assert capfd.readouterr().err.count("no more CUDA graphs") == 1
    np.testing.assert_array_equal(run(model, rows(2)), rows(2) * 2)


def test_a_wrong_number_of_outputs_is_said() -> None:
    model = served(lambda x: x, HostDevice(torch), (Y, Z))
    with pytest.raises(StatusError, match="returned 2 outputs, its signature has 1") as raised:
        run(served(lambda x: (x, x), HostDevice(torch)), rows(2))
    assert raised.value.code == "INTERNAL"
    with pytest.raises(StatusError, match="returned 1 outputs, its signature has 2"):
        run(model, rows(2))


def test_bfloat16_travels_as_numpys_guest_type() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    x = rows(2).astype(ml_dtypes.bfloat16)
    answer = run(served(Counted(), HostDevice(torch)), x)
    assert answer.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(answer.astype(np.float32), rows(2) * 2)


def test_a_model_that_writes_to_its_input_does_not_write_to_the_message() -> None:
    message = rows(2).tobytes()
    x = np.frombuffer(message, np.float32).reshape(2, 3)
    np.testing.assert_array_equal(run(served(lambda x: x.add_(1), HostDevice(torch)), x), rows(2) + 1)
    assert message == rows(2).tobytes()


@contextmanager
def sessions(model: LoadedModel, **parameters: Any) -> Iterator[Callable[[np.ndarray], Any]]:
    """Batches through a real scheduler: a function that sends one request and gives its outputs or its error."""
    settings = BatchingSettings(enabled=True, parameters=BatchingParameters(**parameters))
    observer = SimpleNamespace(on_batch=lambda record: None, on_rejected=lambda reason: None)

    def deliver(completions: Sequence[Any]) -> None:
        for done, outputs, error in completions:
            done(outputs, error)

    pool = SessionPool(settings, observer=observer, deliver=deliver)  # type: ignore[arg-type]
    session = pool.open(
        *(model.signatures["serving_default"], model.runs["serving_default"]), parameters=settings.parameters
    )

    def send(x: np.ndarray) -> Any:
        answered, answer = threading.Event(), []

        def done(outputs: Any, error: Any) -> None:
            answer.append(error or outputs)
            answered.set()

        session.submit({"x": x}, None, None, done)
        assert answered.wait(30)
        return answer[0]

    try:
        yield send
    finally:
        pool.close()


def starved(x: Any) -> Any:
    if len(x) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ...")
    return x * 2


def emulated(directory: Path) -> LoadedModel:
    (directory / "emulated.yaml").write_text(
        "service_time: {base_ms: 0.0}\nmemory: {rows_max: 4}\n"
        "inputs: {x: {dtype: float32, shape: [3]}}\noutputs: {y: {dtype: float32, shape: [3]}}\n"
    )
    return load_emulated_model(directory)


def host_out_of_memory(x: Any) -> Any:
    return x * 2 if len(x) <= 4 else torch.empty((len(x), 10**14))


@pytest.mark.parametrize("kind", ["gpu", "host", "emulated"])
def test_a_batch_for_which_memory_is_out_fails_alone_and_says_so(tmp_path: Path, kind: str) -> None:
    if kind == "emulated":
        model = emulated(tmp_path)
    else:
        model = served(starved if kind == "gpu" else host_out_of_memory, HostDevice(torch))
        if kind == "gpu":
            model_device_knows_oom(model)
    with sessions(model, max_batch_size=8, num_batch_threads=1, batch_timeout_micros=0) as send:
        for _ in range(3):
            error = send(rows(8))
            assert isinstance(error, StatusError)
            assert error.code == "RESOURCE_EXHAUSTED"
            assert "out of memory" in error.message or "OOM" in error.message
            assert send(rows(4))["y"].shape == (4, 3)


def test_a_failed_run_keeps_no_tensors() -> None:
    kept: list[Any] = []

    class Kept:
        def __init__(self) -> None:
            import weakref

            kept.append(weakref.ref(self))

    def module(x: Any) -> Any:
        large = Kept()  # noqa: F841  (what a failed run has on its stack)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model = served(module, HostDevice(torch))
    device = model.runs["serving_default"]._device  # type: ignore[attr-defined]
    device.is_out_of_memory = lambda error: True
    seen: list[bool] = []
    device.free_cache = lambda: seen.append(kept[-1]() is None)
    with pytest.raises(StatusError):
        run(model, rows(2))
    assert seen == [True]


# -- CUDA's calls, recorded at torch's boundary --


class FakeStream:
    """One of the 32 of its priority; what is drawn later may be the same stream.

    It takes no weak references: PyTorch 2.11's takes them, and crashes the process when it dies before they do.
    """

    __slots__ = ("cuda_stream", "device", "name", "synchronize")

    def __init__(self, name: str, device: Any, *, cuda_stream: int) -> None:
        self.name = name
        self.device = device
        self.cuda_stream = cuda_stream


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
        number = self.drawn[priority] % 32
        self.drawn[priority] += 1
        name = f"stream {number}" + " of high priority" * (priority < 0)
        stream = FakeStream(name, device, cuda_stream=hash((id(self), number, priority)))
        stream.synchronize = lambda: self.log.append(("wait for", name))
        self.log.append(("stream", name))
        return stream

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

    def module(self, x: Any) -> Any:
        """Doubles; while a graph is recorded, into the same tensor at each replay."""
        self.log.append(("run", len(x)))
        y = x * 2
        if self.recording is not None and self.recording.stream == self.current.stream.name:
            self.recording.body = lambda: torch.mul(x, 2, out=y)
        return y

    def served(self, module: Callable[..., Any] | None = None) -> LoadedModel:
        forward = Forward(self, module or self.module, (Y,))
        return served_module(self, forward, CudaDevice(self, 0), inputs=(X,), outputs=(Y,))

    def after(self, action: Callable[[], Any]) -> list[str]:
        """The names of the calls that an action makes."""
        at = len(self.log)
        action()
        return [one[0] for one in self.log[at:]]


def test_a_graph_is_recorded_on_its_lanes_stream_after_three_runs() -> None:
    cuda = FakeCuda()
    model = cuda.served()
    at = len(cuda.log)
    model.prepare((4, 8), 2)
    lanes = [one[1] for one in cuda.log[at:] if one[0] == "stream"]
    assert len(lanes) == 2
    begun = [(one[1], one[2]) for one in cuda.log if one[0] == "begin"]
    assert [stream for stream, _ in begun] == [lanes[0], lanes[0], lanes[1], lanes[1]]
    pools = [pool for _, pool in begun]
    assert pools[0] == pools[1] != pools[2] == pools[3]  # what never runs together shares memory
    names = [one for one in cuda.log[at:] if one[0] in {"run", "begin", "wait for", "empty_cache"}]
    assert [one[0] for one in names[:7]] == ["run"] * 3 + ["wait for", "empty_cache", "begin", "run"]
    assert [one[1] for one in names if one[0] == "run"] == [*[8] * 4, *[4] * 4] * 2  # the largest first


def test_no_two_lanes_have_the_same_stream() -> None:
    """PyTorch hands the same 32 out again and again: what runs on one would get into what is recorded on it."""
    cuda = FakeCuda()
    models = [cuda.served(), cuda.served()]
    for count in (10, 5, 10, 20):
        for model in models:
            model.prepare((2,), count)
        held = [lane.stream.stream.name for model in models for lane in lanes_of(model)]
        if count <= 16:
            assert len(set(held)) == len(held) == 2 * count
    recorded = [lane for model in models for lane in lanes_of(model) if lane.graphs]
    assert len({lane.stream.stream.name for lane in recorded}) == len(recorded) == 32
    assert {lane.stream.stream.name.endswith("priority") for lane in recorded} == {False}
    for model in models:
        np.testing.assert_array_equal(run(model, rows(2)), rows(2) * 2)


def test_a_thread_too_many_for_the_streams_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    model = FakeCuda().served()
    model.prepare((2,), 40)
    assert len(lanes_of(model)) == 40
    assert capfd.readouterr().err == (
        "batchtune-model-server: note: no CUDA graph for 2 rows, such batches run without: all 32 streams are taken; "
        "have fewer batch threads or models\n"
    )


def lanes_of(model: LoadedModel) -> list[Any]:
    return model.runs["serving_default"]._lanes._free._lanes  # type: ignore[attr-defined]


def test_while_a_graph_is_recorded_batches_run_without() -> None:
    cuda, answered = FakeCuda(), threading.Event()
    threads: list[threading.Thread] = []

    def ask() -> None:
        np.testing.assert_array_equal(run(model, rows(2)), rows(2) * 2)
        answered.set()

    def module(x: Any) -> Any:
        if cuda.recording is not None and cuda.recording.stream == cuda.current.stream.name:
            begun = [one for one in cuda.log if one[0] == "begin"]
            if len(begun) == 2 and not threads:  # the first lane is at work already
                threads.append(threading.Thread(target=ask))
                threads[0].start()
                assert answered.wait(20)
        return cuda.module(x)

    model = cuda.served(module)
    model.prepare((2,), 2)
    threads[0].join(20)
    assert not any(one[0] == "replay" for one in cuda.log)
    assert cuda.after(lambda: run(model, rows(2))) == ["replay", "event on", "event wait"]


def test_a_replayed_batch_waits_for_one_event_of_its_stream() -> None:
    cuda = FakeCuda()
    model = cuda.served()
    model.prepare((2,), 1)
    calls = cuda.after(lambda: np.testing.assert_array_equal(run(model, rows(2)), rows(2) * 2))
    assert calls == ["replay", "event on", "event wait"]
    assert cuda.after(lambda: run(model, rows(3))) == ["run", "event on", "event wait"]


def test_batches_are_gathered_and_answered_in_page_locked_memory() -> None:
    cuda = FakeCuda()
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


def test_a_recording_that_fails_is_ended_and_the_model_runs_without(
    capfd: pytest.CaptureFixture[str],
) -> None:
    cuda = FakeCuda()
    cuda.fail_recording = "CUDA error: operation not permitted when stream is capturing\nmore"
    model = cuda.served()
    model.prepare((2, 4), 2)
    assert [one[0] for one in cuda.log].count("begin") == 1  # the other sizes would fail in the same way
    assert any(one[0] == "end_pool" for one in cuda.log)
    assert cuda.after(lambda: run(model, rows(2))) == ["run", "event on", "event wait"]
    assert capfd.readouterr().err == (
        "batchtune-model-server: note: no CUDA graph for 4 rows, such batches run without: CUDA error: operation not "
        "permitted when stream is capturing\n"
    )


def test_a_module_that_fails_while_recorded_leaves_no_recording_open() -> None:
    cuda = FakeCuda()

    def module(x: Any) -> Any:
        if cuda.recording is not None:
            raise RuntimeError("cannot be recorded")
        return x * 2

    model = cuda.served(module)
    model.prepare((2,), 1)
    assert cuda.recording is None
    assert [one[0] for one in cuda.log].count("end") == 1
    np.testing.assert_array_equal(run(model, rows(2)), rows(2) * 2)


def test_out_of_memory_on_the_gpu_empties_the_cache_and_later_batches_work() -> None:
    cuda = FakeCuda()

    def module(x: Any) -> Any:
        if len(x) > 4:
            raise cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return cuda.module(x)

    model = cuda.served(module)
    model.prepare((4, 8), 1)
    with pytest.raises(StatusError, match=r"CUDA out of memory\. Tried") as raised:
        run(model, rows(8))
    assert raised.value.code == "RESOURCE_EXHAUSTED"
    assert cuda.log[-1] == ("empty_cache",)
    assert cuda.after(lambda: run(model, rows(4))) == ["replay", "event on", "event wait"]


@pytest.mark.parametrize(
    "said", ["CUDA error: invalid argument\nmore", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"]
)
def test_what_the_gpu_does_wrong_is_no_fault_of_the_request(said: str) -> None:
    cuda = FakeCuda()

    def module(x: Any) -> Any:
        raise RuntimeError(said if len(x) == 2 else "shapes cannot be multiplied")

    model = cuda.served(module)
    for count, code in ((2, "INTERNAL"), (3, "INVALID_ARGUMENT")):
        with pytest.raises(StatusError) as raised:
            run(model, rows(count))
        assert raised.value.code == code


def test_a_gpu_that_answers_nothing_any_more_ends_the_process_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cuda = FakeCuda()

    def module(x: Any) -> Any:
        cuda.lost = "CUDA error: device-side assert triggered"
        raise RuntimeError(f"{cuda.lost}\nCompile with ...")

    def end() -> None:
        raise SystemExit("ended")

    monkeypatch.setattr("os.abort", end)
    model = cuda.served(module)
    with pytest.raises(SystemExit):
        run(model, rows(2))
    assert capfd.readouterr().err == (
        "batchtune-model-server: error: cpu is lost to this process, which ends: CUDA error: device-side assert "
        "triggered; start it again\n"
    )


def test_weights_are_in_place_before_a_lane_can_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tmp_path, mixed=False)
    cuda = FakeCuda()
    monkeypatch.setattr("batchtune.server.backends.torch.loading.device_of", lambda *_: CudaDevice(cuda, 0))
    load_model(tmp_path, ServerFlags(device="cuda"))
    loading = next(one[1] for one in cuda.log if one[0] == "stream")
    at = cuda.log.index(("event on", loading))
    assert cuda.log[at + 1] == ("event wait",)
    assert [one[0] for one in cuda.log[:at]] == ["stream"]  # the lanes are made afterwards


@pytest.mark.parametrize(
    ("wanted", "said"), [("cuda:2", "PyTorch sees 2 GPU"), ("cuda:1", ""), ("cuda", ""), ("auto", "")]
)
def test_the_device_flag_names_a_gpu(wanted: str, said: str) -> None:
    options = ServerFlags(device=wanted)
    if said:
        with pytest.raises(StatusError, match=said):
            device_of(FakeCuda(), options)
    else:
        assert isinstance(device_of(FakeCuda(), options), CudaDevice)


def test_the_share_of_memory_asked_for_is_the_limit() -> None:
    cuda = FakeCuda()
    device_of(cuda, ServerFlags(device="cuda:1", per_process_gpu_memory_fraction=0.5))
    assert cuda.log == [("memory", 0.5, 1)]


def test_a_gpu_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(StatusError, match="PyTorch sees no GPU") as raised:
        load_model(tmp_path, ServerFlags(device="cuda"))
    assert raised.value.code == "FAILED_PRECONDITION"
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
    program = torch.export.export(
        module, (torch.ones(2, 3),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    torch.export.save(program, directory / "model.pt2")
    return module


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_computes_in_the_precision_asked_for_and_keeps_its_signature(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], dtype: str, mixed: bool
) -> None:
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
@pytest.mark.parametrize("dtype", ["as_exported", "float16", "bfloat16"])
def test_gpu_graphs_padding_and_threads_give_the_models_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], dtype: str
) -> None:
    module = exported(tmp_path, mixed=False)
    model = load_model(tmp_path, ServerFlags(device="cuda:0", torch_dtype=dtype))
    model.prepare((1, 2, 4, 8), 3)
    assert "no CUDA graph" not in capfd.readouterr().err
    batches = [
        np.random.default_rng(seed).normal(size=(1 + seed % 8, 3)).astype(np.float32) for seed in range(60)
    ]
    answers: dict[int, np.ndarray] = {}

    def work(first: int) -> None:
        for at in range(first, len(batches), 6):
            answers[at] = model.runs["serving_default"]({"x": batches[at]})["output_0"]

    threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == len(batches)
    for at, answer in answers.items():
        expected = module(torch.tensor(batches[at])).detach().numpy()
        np.testing.assert_allclose(answer, expected, atol=1e-3 if dtype == "as_exported" else 2e-2)


@pytest.mark.gpu
@needs_gpu
def test_gpu_memory_that_runs_out_ends_one_batch(capfd: pytest.CaptureFixture[str]) -> None:
    def module(x: Any) -> Any:
        held = torch.empty((len(x) - 4, 1 << 36), device=x.device) if len(x) > 4 else None
        return x * 2 if held is None else held[:, :3]

    model = served(module, CudaDevice(torch, 0))
    model.prepare((4, 8), 2)
    assert "no CUDA graph for 8 rows" in capfd.readouterr().err
    with sessions(model, max_batch_size=8, num_batch_threads=1, batch_timeout_micros=0) as send:
        for _ in range(3):
            error = send(rows(8))
            assert (error.code, "out of memory" in error.message) == ("RESOURCE_EXHAUSTED", True)
            np.testing.assert_array_equal(send(rows(4))["y"], rows(4) * 2)


@pytest.mark.gpu
@needs_gpu
def test_gpu_runs_of_a_module_that_cannot_be_recorded(capfd: pytest.CaptureFixture[str]) -> None:
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
def test_gpu_parameters_of_three_models_change_under_traffic(tmp_path: Path) -> None:
    modules, models = [], []
    for number, dtype in enumerate(("as_exported", "float16", "bfloat16")):
        directory = tmp_path / str(number)
        directory.mkdir()
        modules.append(exported(directory, mixed=False))
        models.append(load_model(directory, ServerFlags(device="cuda:0", torch_dtype=dtype)))
    stop, faults, answered = threading.Event(), [], Counter[int]()

    def ask(client: int) -> None:
        random = np.random.default_rng(client)
        while not stop.is_set():
            at = int(random.integers(3))
            x = random.normal(size=(int(random.integers(1, 9)), 3)).astype(np.float32)
            answer = models[at].runs["serving_default"]({"x": x})["output_0"]
            expected = modules[at](torch.tensor(x)).detach().numpy()
            if not np.allclose(answer, expected, atol=2e-2 if at else 1e-3):
                faults.append((at, len(x), float(np.abs(answer - expected).max())))
            answered[client] += 1

    with ThreadPoolExecutor(6) as clients:
        asking = [clients.submit(ask, client) for client in range(6)]
        try:
            for change in range(18):
                models[change % 3].prepare(((1, 4), (2, 8), (8,))[change // 3 % 3], 1 + change % 4)
        finally:
            stop.set()
        for one in asking:
            one.result(60)
    assert faults == []
    assert set(answered) == set(range(6))
    for model in models:
        model.close()
