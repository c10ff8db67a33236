"""What do batches need of the device under PyTorch: host memory, copies, streams, waiting, graphs?

`CudaDevice` is an NVIDIA GPU. `HostDevice` offers the same on the CPU, where memory is shared, copies are not needed
and a stream is the calling thread: so one path runs on both. Nothing here waits for a whole device: a batch waits
for an event of its own stream, with the interpreter lock released and the thread asleep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from batchtune.server.loaded_model import BackendOptions
from batchtune.server.torch_arrays import Tensor, carried, from_numpy, retyped
from batchtune.wire.status import StatusError

Forward = Callable[[Sequence[Tensor]], list[Tensor]]
"""Device tensors in, in the order of the model's arguments; device tensors out."""

# PyTorch has 32 streams of each priority for a device, and hands them out in turn, over and over: a second owner's work
# would end up in what the first one records.
_STREAMS = 32
_OWNED_STREAMS: WeakValueDictionary[int, _OwnStream] = WeakValueDictionary()
_OWNING = threading.Lock()


class _OwnStream:
    """A stream of PyTorch that nobody else is given while this lives.

    Weak references point here and never at PyTorch's own object: until 2.11 at least it leaves them dangling.
    """

    __slots__ = ("__weakref__", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = stream


class Graph(Protocol):
    """A recorded run: `replay` reads `inputs` and fills `outputs`, always the same tensors."""

    inputs: list[Tensor]
    outputs: list[Tensor]

    def replay(self) -> None:
        """Start the run on the current stream."""


class Device(Protocol):
    """Where a model runs. Tensors come from one call to the next on the thread that runs the batch."""

    name: Any
    lanes_max: int | None
    """Batches in work at once where the settings name no number; None: as many as come."""
    records: bool
    """Whether graphs are recorded at all."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Host memory to gather a batch in."""

    def staged(self, array: NDArray[Any]) -> Tensor:
        """The array as a host tensor from which `to_device` copies without waiting."""

    def to_device(self, staged: Tensor) -> Tensor:
        """Start the copy of an input; the same tensor where memory is shared."""

    def to_host(self, output: Tensor) -> Tensor:
        """Start the copy of an output; it is there after `wait`."""

    def new_stream(self) -> Any:
        """Somewhere to run one batch beside others."""

    def new_event(self) -> Any:
        """Something to wait with."""

    def new_pool(self) -> Any:
        """Memory for graphs that never run at the same time."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Run what follows on this stream."""

    def wait(self, event: Any) -> None:
        """Return when everything started on the current stream is done."""

    def record(self, forward: Forward, inputs: Sequence[Tensor], pool: Any) -> Graph:
        """Record one run with `inputs`, host tensors as `staged` gives them, on the current stream."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether this failure means that the batch is too large."""

    def free_cache(self) -> None:
        """Give memory back that is kept for later but not in use."""


def device_of(torch: Any, options: BackendOptions) -> Device:
    """The device that `--device` names: auto, cpu, cuda, cuda:N.

    Raises:
        StatusError: FAILED_PRECONDITION where a GPU is asked for and PyTorch sees none, or not that one.
    """
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        return HostDevice(torch)
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.cuda_index >= seen:
        built = "" if torch.version.cuda else " (this torch is built without CUDA)"
        raise StatusError(
            "FAILED_PRECONDITION", f"--device={options.device}: PyTorch sees {seen or 'no'} GPU{built}"
        )
    if options.memory_fraction:
        torch.cuda.set_per_process_memory_fraction(options.memory_fraction, options.cuda_index)
    return CudaDevice(torch, options.cuda_index)


class HostDevice:
    """The CPU. `records` is for tests: graphs that keep one set of tensors, as CUDA's do, and run the module again."""

    def __init__(self, torch: Any, *, records: bool = False) -> None:
        self._torch = torch
        self.name = torch.device("cpu")
        self.lanes_max: int | None = None
        self.records = records

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.empty(shape, dtype)

    def staged(self, array: NDArray[Any]) -> Tensor:
        if array.flags.writeable:
            return from_numpy(self._torch, array)
        return from_numpy(self._torch, array.copy())  # a view of a message: the model may write to its inputs

    def to_device(self, staged: Tensor) -> Tensor:
        return staged

    def to_host(self, output: Tensor) -> Tensor:
        return output.clone() if self.records else output

    def new_stream(self) -> Any:
        return None

    def new_event(self) -> Any:
        return None

    def new_pool(self) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def wait(self, event: Any) -> None:
        """Everything is done by now."""

    def record(self, forward: Forward, inputs: Sequence[Tensor], pool: Any) -> Graph:
        del pool
        return _HostGraph(forward, [one.clone() for one in inputs])

    def is_out_of_memory(self, error: BaseException) -> bool:
        # What c10's CPU allocator says where malloc gives nothing.
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def free_cache(self) -> None:
        """The allocator of the C library keeps little."""


class _HostGraph:
    def __init__(self, forward: Forward, inputs: list[Tensor]) -> None:
        self._forward = forward
        self.inputs = inputs
        self.outputs = forward(inputs)

    def replay(self) -> None:
        for kept, fresh in zip(self.outputs, self._forward(self.inputs), strict=True):
            kept.copy_(fresh)


class CudaDevice:
    """One NVIDIA GPU.

    Host memory is page-locked and comes from PyTorch's cache of such blocks, so buffers are reused over batches, and
    a block is not handed out again before the copies from it are done.
    """

    records = True
    lanes_max: int | None = 8

    def __init__(self, torch: Any, index: int) -> None:
        self._torch = torch
        self.name = torch.device("cuda", index)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        try:
            found: NDArray[Any] = self._pinned(shape, dtype).numpy().view(dtype)
        except (
            RuntimeError,
            TypeError,
        ):  # no more memory can be locked; strings, which the model will refuse
            return np.empty(shape, dtype)
        return found

    def staged(self, array: NDArray[Any]) -> Tensor:
        if array.flags.writeable:
            tensor = from_numpy(self._torch, array)
            if tensor.is_pinned():
                return tensor
        memory = self._pinned(array.shape, array.dtype)
        np.copyto(memory.numpy(), array.view(carried(array.dtype)))
        return retyped(self._torch, memory, array.dtype)

    def to_device(self, staged: Tensor) -> Tensor:
        return staged.to(self.name, non_blocking=True)

    def to_host(self, output: Tensor) -> Tensor:
        copy = self._torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        return copy.copy_(output, non_blocking=True)

    def new_stream(self) -> Any:
        """One that nobody else has; where there is none left, one of those on which nothing is recorded."""
        with _OWNING:
            for _ in range(_STREAMS):
                own = _OwnStream(self._torch.cuda.Stream(self.name))
                if _OWNED_STREAMS.setdefault(own.stream.cuda_stream, own) is own:
                    return own
        return _OwnStream(self._torch.cuda.Stream(self.name, priority=-1))

    def new_event(self) -> Any:
        return self._torch.cuda.Event(blocking=True)  # the thread sleeps; else it would spin

    def new_pool(self) -> Any:
        return self._torch.cuda.graph_pool_handle()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._torch.cuda.stream(stream.stream)
        return context

    def wait(self, event: Any) -> None:
        event.record()
        event.synchronize()

    def record(self, forward: Forward, inputs: Sequence[Tensor], pool: Any) -> Graph:
        if self._torch.cuda.current_stream().cuda_stream not in _OWNED_STREAMS:
            raise RuntimeError(f"all {_STREAMS} streams are taken; have fewer batch threads or models")
        return _CudaGraph(self._torch, forward, [self.to_device(one) for one in inputs], pool)

    def is_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, (self._torch.OutOfMemoryError, MemoryError)):
            return True
        # cudaHostAlloc's, cuBLAS's and cuDNN's own.
        return any(text in str(error) for text in ("out of memory", "ALLOC_FAILED"))

    def free_cache(self) -> None:
        with suppress(RuntimeError):  # while a graph is being recorded elsewhere
            self._torch.cuda.empty_cache()

    def _pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        torch_dtype = from_numpy(self._torch, np.empty(0, carried(dtype))).dtype
        return self._torch.empty(shape, dtype=torch_dtype, pin_memory=True)


class _CudaGraph:
    """Recorded on the current stream, which is not the default one, in the calling thread alone.

    capture_error_mode thread_local: other threads may allocate and run meanwhile. torch.cuda.graph() is not used
    because it waits for the whole device first.
    """

    def __init__(self, torch: Any, forward: Forward, inputs: list[Tensor], pool: Any) -> None:
        self.inputs = inputs
        stream = torch.cuda.current_stream()
        # cuBLAS, cuDNN and TorchScript choose and allocate in the first runs, which a recording must not contain.
        for _ in range(3):
            forward(inputs)
        stream.synchronize()
        torch.cuda.empty_cache()  # a recording has memory of its own, and cannot take what those runs leave cached
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self.outputs = forward(inputs)
        except BaseException:
            _abandon(torch, self._graph, stream, pool)
            raise
        try:
            self._graph.capture_end()
        except RuntimeError:
            _stop_allocating(torch, stream, pool)
            raise

    def replay(self) -> None:
        self._graph.replay()


def _abandon(torch: Any, graph: Any, stream: Any, pool: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        _stop_allocating(torch, stream, pool)


def _stop_allocating(torch: Any, stream: Any, pool: Any) -> None:
    """Before 2.12 a recording that failed went on allocating from its pool, and the cache could not be emptied."""
    older_name = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    stop = getattr(torch._C, "_cuda_endAllocateToPool", older_name)
    if stop is not None:
        with suppress(RuntimeError):
            stop(stream.device.index, pool)
