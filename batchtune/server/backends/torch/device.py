"""What batches need of the device under PyTorch: host memory, copies, streams, waiting, graphs.

`HostDevice` offers it on the CPU, where memory is shared, copies are not needed and a stream is the calling thread;
`CudaDevice` on an NVIDIA GPU: so one path runs on both. Nothing there waits for a whole device: a batch waits for an
event of its own stream, with the interpreter lock released and the thread asleep.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from batchtune.server.log import say

Tensor = Any

_INT16 = np.dtype(np.int16)


def from_numpy(torch: Any, array: NDArray[Any]) -> Tensor:
    """Make a tensor over the array's memory; raises TypeError or ValueError for what torch has no type for."""
    return retyped(torch, torch.from_numpy(array.view(carried(array.dtype))), array.dtype)


def to_numpy(torch: Any, tensor: Tensor) -> NDArray[Any]:
    """Make an array over a host tensor's memory."""
    if tensor.dtype != torch.bfloat16:
        array: NDArray[Any] = tensor.numpy()
        return array
    import ml_dtypes

    carried: NDArray[Any] = tensor.view(torch.int16).numpy()
    return carried.view(ml_dtypes.bfloat16)


def carried(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype as which an array's bits travel to torch: int16 for numpy's bfloat16, else its own."""
    return _INT16 if _is_bfloat16(dtype) else dtype


def retyped(torch: Any, tensor: Tensor, dtype: np.dtype[Any]) -> Tensor:
    return tensor.view(torch.bfloat16) if _is_bfloat16(dtype) else tensor


def _is_bfloat16(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "V" and dtype.name == "bfloat16"  # a name costs a microsecond


Forward = Callable[[Sequence[Tensor]], list[Tensor]]
"""Device tensors in, in the order of the model's arguments; device tensors out."""


class Graph(Protocol):
    """A recorded run: `replay` reads `inputs` and fills `outputs`, always the same tensors."""

    inputs: list[Tensor]
    outputs: list[Tensor]

    def replay(self) -> None:
        """Start the run on the current stream."""


class TorchDevice(Protocol):
    """Where a model runs. Tensors come from one call to the next on the thread that runs the batch."""

    name: Any
    lanes_max: int | None
    """Batches in work at once where the settings name no number; None: as many as come."""
    records: bool
    """Whether graphs are recorded at all."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Allocate host memory to gather a batch in."""

    def staged(self, array: NDArray[Any]) -> Tensor:
        """Return the array as a host tensor from which `to_device` copies without waiting."""

    def to_device(self, staged: Tensor) -> Tensor:
        """Start the copy of an input; the same tensor where memory is shared."""

    def to_host(self, output: Tensor) -> Tensor:
        """Start the copy of an output; it is there after `wait`."""

    def new_stream(self) -> Any:
        """Make a stream: batches on different streams run beside one another."""

    def new_event(self) -> Any:
        """Make an event, which `wait` waits with."""

    def new_pool(self) -> Any:
        """Make a memory pool for graphs that never run at the same time."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Run what follows on this stream."""

    def wait(self, event: Any) -> None:
        """Return when everything started on the current stream is done."""

    def record(self, forward: Forward, inputs: Sequence[Tensor], pool: Any) -> Graph:
        """Record one run with `inputs`, host tensors as `staged` gives them, on the current stream."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether this failure means that the batch is too large."""

    def has_failed(self, error: BaseException) -> bool:
        """Whether the device, and not the request, is at fault."""

    def end_if_lost(self, error: BaseException) -> None:
        """End the process, with a word, if after this failure nothing will run here any more."""

    def free_cache(self) -> None:
        """Give memory back that is kept for later but not in use."""


class HostDevice:
    """The CPU, on which nothing is recorded."""

    records = False

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.name = torch.device("cpu")
        self.lanes_max: int | None = None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.empty(shape, dtype)

    def staged(self, array: NDArray[Any]) -> Tensor:
        if array.flags.writeable:
            return from_numpy(self._torch, array)
        return from_numpy(self._torch, array.copy())  # a view of a message: the model may write to its inputs

    def to_device(self, staged: Tensor) -> Tensor:
        return staged

    def to_host(self, output: Tensor) -> Tensor:
        return output

    def new_stream(self) -> Any:
        return None

    def new_event(self) -> Any:
        return None

    def new_pool(self) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def wait(self, event: Any) -> None:
        """Return at once: on the CPU everything is done by now."""

    def record(self, forward: Forward, inputs: Sequence[Tensor], pool: Any) -> Graph:
        raise NotImplementedError

    def is_out_of_memory(self, error: BaseException) -> bool:
        # What c10's CPU allocator says where malloc gives nothing.
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def has_failed(self, error: BaseException) -> bool:
        del error
        return False

    def end_if_lost(self, error: BaseException) -> None:
        """Do nothing: the CPU cannot be lost."""

    def free_cache(self) -> None:
        """Do nothing: the allocator of the C library keeps little."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error of PyTorch, before its advice and its stack."""
    return str(error).strip().partition("\n")[0]


# PyTorch has 32 streams of each priority for a device, and hands them out in turn, over and over: a second owner's work
# would end up in what the first one records.
_STREAMS = 32

# PyTorch's words for what CUDA, cuBLAS and cuDNN report; AcceleratorError came with 2.8, for a part of it.
_FAULTS = ("CUDA error", "CUDA driver error", "cuDNN error")
_OWNED_STREAMS: WeakValueDictionary[int, _OwnStream] = WeakValueDictionary()
_OWNING = threading.Lock()


class _OwnStream:
    """A stream of PyTorch that nobody else is given while this lives.

    Weak references point here and never at PyTorch's own object: until 2.11 at least it leaves them dangling.
    """

    __slots__ = ("__weakref__", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = stream


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
            array: NDArray[Any] = self._pinned(shape, dtype).numpy().view(dtype)
        except (RuntimeError, TypeError):
            # No more memory can be locked; strings, which the model will refuse.
            return np.empty(shape, dtype)
        return array

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
        """Take a stream that nobody else has; where none is left, one on which no graph is recorded."""
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
        return _CudaGraph(self._torch, forward, [self.to_device(array) for array in inputs], pool)

    def is_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, (self._torch.OutOfMemoryError, MemoryError)):
            return True
        # cudaHostAlloc's, cuBLAS's and cuDNN's own.
        return any(text in str(error) for text in ("out of memory", "ALLOC_FAILED"))

    def has_failed(self, error: BaseException) -> bool:
        return str(error).startswith(_FAULTS)

    def end_if_lost(self, error: BaseException) -> None:
        # PyTorch would end it when it next frees page-locked memory, as TensorFlow does too, but with a stack of C++.
        if not self.has_failed(error) or not self._is_lost():
            return
        say(f"error: {self.name} is lost to this process, which ends: {first_line(error)}; start it again")
        os.abort()

    def free_cache(self) -> None:
        with suppress(RuntimeError):  # while a graph is being recorded elsewhere
            self._torch.cuda.empty_cache()

    def _is_lost(self) -> bool:
        """After a kernel's failed assertion or a wild address every call fails, whatever it asks for."""
        try:
            self.wait(self.new_event())
        except RuntimeError as error:
            return self.has_failed(error)
        return False

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
