"""The device under PyTorch: host memory, copies, streams, waiting, recorded graphs.

One code path runs batches on both implementations of `TorchDevice`: `HostDevice` for the CPU, where memory is
shared, no copies are needed and a stream is the calling thread, and `CudaDevice` for an NVIDIA GPU. Nothing
waits for a whole device: a batch waits for an event of its own stream, with the interpreter lock released and
the thread asleep.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from batchtune.server.log import say

Tensor = Any


def from_numpy(torch: Any, array: NDArray[Any]) -> Tensor:
    """Return a tensor over an array's memory; raises TypeError or ValueError for a dtype that torch lacks."""
    return retyped(torch, torch.from_numpy(array.view(carried(array.dtype))), array.dtype)


def to_numpy(torch: Any, tensor: Tensor) -> NDArray[Any]:
    """Return an array over a host tensor's memory."""
    if tensor.dtype != torch.bfloat16:
        array: NDArray[Any] = tensor.numpy()
        return array
    import ml_dtypes

    carried: NDArray[Any] = tensor.view(torch.int16).numpy()
    return carried.view(ml_dtypes.bfloat16)


def carried(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype with which an array's bits are passed to torch: int16 for bfloat16, else its own."""
    return np.dtype(np.int16) if _is_bfloat16(dtype) else dtype


def retyped(torch: Any, tensor: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """Return the tensor under its real dtype: as bfloat16 where `dtype` is bfloat16, whose bits travel as
    int16."""
    return tensor.view(torch.bfloat16) if _is_bfloat16(dtype) else tensor


def _is_bfloat16(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "V" and dtype.name == "bfloat16"  # a name costs a microsecond


Forward = Callable[[Sequence[Tensor]], list[Tensor]]
"""Runs a model: device tensors in the order of its arguments -> device tensors."""


class HostDevice:
    """The CPU, which records no graphs; its methods have the docstrings for CudaDevice too.

    records: whether the device can record graphs. lanes_max: most batches that run at once where the settings give no
    number; None: no limit. A batch's thread calls staged, to_device, to_host and wait in this order.
    """

    records = False

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.name = torch.device("cpu")
        self.lanes_max: int | None = None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Allocate host memory, its content undefined, to gather a batch in; for a GPU page-locked where that is
        possible."""
        return np.empty(shape, dtype)

    def staged(self, array: NDArray[Any]) -> Tensor:
        """Return the array as a host tensor from which `to_device` can copy without blocking."""
        if array.flags.writeable:
            return from_numpy(self._torch, array)
        return from_numpy(self._torch, array.copy())  # a view of a message: the model may write to its inputs

    def to_device(self, staged: Tensor) -> Tensor:
        """Start the copy of an input to the device and return it; the tensor itself if memory is shared."""
        return staged

    def to_host(self, output: Tensor) -> Tensor:
        """Start the copy of an output to the host and return the copy, which is complete after `wait`."""
        return output

    def new_stream(self) -> Any:
        """Make a stream; batches on different streams run at once."""
        return None

    def new_event(self) -> Any:
        """Make an event for `wait`."""
        return None

    def new_pool(self) -> Any:
        """Make a memory pool for graphs that never run at the same time."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which the device's work goes to this stream."""
        return nullcontext(stream)

    def wait(self, event: Any) -> None:
        """Block until all work started on the current stream is done; `event` comes from `new_event`.

        On the CPU, work is done when its call returns.
        """

    def record(self, forward: Forward, inputs: Sequence[Tensor], pool: Any) -> CudaGraph:
        """Record a run of `forward` for tensors of the shapes of `inputs`, on the current stream.

        inputs: host tensors from `staged`; pool: from `new_pool`. Raises NotImplementedError on the CPU (`records`),
        RuntimeError where the stream is shared with another caller, and what PyTorch raises.
        """
        raise NotImplementedError

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error means that memory was too small for the batch."""
        # What c10's CPU allocator says where malloc gives nothing.
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def has_failed(self, error: BaseException) -> bool:
        """Whether an error comes from the device, not from the request."""
        del error
        return False

    def end_if_lost(self, error: BaseException) -> None:
        """End the process with a message if, after this error, the device runs no further work; a CPU never gets into
        that state."""

    def free_cache(self) -> None:
        """Return memory that the framework caches and does not use; on the CPU nothing: the allocator of the C library
        caches little."""


def first_line(error: BaseException) -> str:
    """Return the first line of a PyTorch error, without the advice and the stack that follow."""
    return str(error).strip().partition("\n")[0]


# PyTorch has 32 streams of each priority for a device, and hands them out in turn, over and over: a second owner's work
# would end up in what the first one records.
_STREAMS = 32

_OWNED_STREAMS: WeakValueDictionary[int, _OwnStream] = WeakValueDictionary()
_OWNING = threading.Lock()


class _OwnStream:
    """A PyTorch stream that `new_stream` returns to no other caller while this object lives.

    Weak references point to this object, since PyTorch (2.11) leaves those to its own streams dangling.
    """

    __slots__ = ("__weakref__", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = stream


class CudaDevice:
    """One NVIDIA GPU; its methods do what the docstrings of HostDevice say.

    Host memory is page-locked and comes from PyTorch's cache of such blocks, so buffers are reused over batches, and a
    block is not handed out again before the copies from it are done.
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
        """Return a stream that no other caller has; if all are taken, a shared one, on which `record` fails."""
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

    def record(self, forward: Forward, inputs: Sequence[Tensor], pool: Any) -> CudaGraph:
        if self._torch.cuda.current_stream().cuda_stream not in _OWNED_STREAMS:
            raise RuntimeError(f"all {_STREAMS} streams are taken; have fewer batch threads or models")
        return CudaGraph(self._torch, forward, [self.to_device(array) for array in inputs], pool)

    def is_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, (self._torch.OutOfMemoryError, MemoryError)):
            return True
        # cudaHostAlloc's, cuBLAS's and cuDNN's own.
        return any(text in str(error) for text in ("out of memory", "ALLOC_FAILED"))

    def has_failed(self, error: BaseException) -> bool:
        # PyTorch's words for what CUDA, cuBLAS and cuDNN report; AcceleratorError came with 2.8, for a part of it.
        return str(error).startswith(("CUDA error", "CUDA driver error", "cuDNN error"))

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
        """Whether every call fails now, as after a kernel's failed assertion or illegal address."""
        try:
            self.wait(self.new_event())
        except RuntimeError as error:
            return self.has_failed(error)
        return False

    def _pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        torch_dtype = from_numpy(self._torch, np.empty(0, carried(dtype))).dtype
        return self._torch.empty(shape, dtype=torch_dtype, pin_memory=True)


TorchDevice = HostDevice | CudaDevice
"""Where a model runs."""


class CudaGraph:
    """A recorded run of `forward`; making the object records it, on the current stream (not the default one).

    `replay` reads the tensors `inputs` and overwrites the tensors `outputs`.

    Other threads may allocate and run meanwhile (capture_error_mode thread_local). torch.cuda.graph() is not used
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
        """Start the recorded run on the current stream."""
        self._graph.replay()


def _abandon(torch: Any, graph: Any, stream: Any, pool: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        _stop_allocating(torch, stream, pool)


def _stop_allocating(torch: Any, stream: Any, pool: Any) -> None:
    """End allocation from a failed recording's pool: before 2.12 it goes on, and the cache stays full."""
    older_name = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    stop = getattr(torch._C, "_cuda_endAllocateToPool", older_name)
    if stop is not None:
        with suppress(RuntimeError):
            stop(stream.device.index, pool)
