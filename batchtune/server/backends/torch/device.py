"""What do batches need of the device under PyTorch: host memory, copies, streams, waiting, graphs?

`HostDevice` offers it on the CPU, where memory is shared, copies are not needed and a stream is the calling thread;
`cuda.CudaDevice` on an NVIDIA GPU: so one path runs on both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tensor = Any

_INT16 = np.dtype(np.int16)


def from_numpy(torch: Any, array: NDArray[Any]) -> Tensor:
    """A tensor over the array's memory; raises TypeError or ValueError for what torch has no type for."""
    return retyped(torch, torch.from_numpy(array.view(carried(array.dtype))), array.dtype)


def to_numpy(torch: Any, tensor: Tensor) -> NDArray[Any]:
    """An array over a host tensor's memory."""
    if tensor.dtype != torch.bfloat16:
        array: NDArray[Any] = tensor.numpy()
        return array
    import ml_dtypes

    carried: NDArray[Any] = tensor.view(torch.int16).numpy()
    return carried.view(ml_dtypes.bfloat16)


def carried(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """numpy's bfloat16 is a guest that torch does not know: its bits travel as int16."""
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
        """Everything is done by now."""

    def record(self, forward: Forward, inputs: Sequence[Tensor], pool: Any) -> Graph:
        raise NotImplementedError

    def is_out_of_memory(self, error: BaseException) -> bool:
        # What c10's CPU allocator says where malloc gives nothing.
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def has_failed(self, error: BaseException) -> bool:
        del error
        return False

    def end_if_lost(self, error: BaseException) -> None:
        """The CPU goes on."""

    def free_cache(self) -> None:
        """The allocator of the C library keeps little."""


def first_line(error: BaseException) -> str:
    """What PyTorch says before its advice and its stack."""
    return str(error).strip().partition("\n")[0]
