"""How does an NVIDIA GPU serve batches under PyTorch?

Nothing here waits for a whole device: a batch waits for an event of its own stream, with the interpreter lock released
and the thread asleep.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from batchtune.server.backends.torch.device import (
    Forward,
    Graph,
    Tensor,
    carried,
    first_line,
    from_numpy,
    retyped,
)
from batchtune.server.log import say

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
