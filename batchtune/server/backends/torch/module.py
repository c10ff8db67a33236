"""How is a PyTorch module called with tensors, and in which precision does it compute?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from batchtune.server.backends.torch.device import Device, first_line
from batchtune.server.backends.zeros import zeros
from batchtune.server.log import note
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError

Specs = tuple[TensorSpec, ...]
FAILURES = (RuntimeError, TypeError, ValueError, KeyError, AssertionError, MemoryError)
"""What a module may end with; torch's OutOfMemoryError and AcceleratorError are RuntimeErrors."""

_ROWS_TRIED = 2


class Forward:
    """A module on tensors of its device: a tensor, a tuple or a dict that comes back is made a list.

    `dtype`: the precision of a converted module, to which floating-point inputs are cast; the outputs take the dtypes
    of the signature again. `around`: what the module is called within.
    """

    def __init__(
        self,
        torch: Any,
        module: Callable[..., Any],
        outputs: Specs,
        *,
        dtype: Any = None,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._tensor_type = torch.Tensor
        self._module = module
        self._dtype = dtype
        self._around = around
        self._output_dtypes = [getattr(torch, spec.dtype, None) for spec in outputs]
        self.names = tuple(spec.name for spec in outputs)

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Raises what the module raises; StatusError INTERNAL for outputs that the signature does not have."""
        if self._dtype is not None:
            tensors = [tensor.to(self._dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
        with nullcontext() if self._around is None else self._around():
            returned = self._module(*tensors)
        if isinstance(returned, self._tensor_type):
            returned = [returned]
        elif isinstance(returned, Mapping):
            returned = [returned[name] for name in self.names]
        if len(returned) != len(self.names):
            said = f"the model returned {len(returned)} outputs, its signature has {len(self.names)}"
            raise StatusError("INTERNAL", said)
        if self._dtype is None and self._around is None:
            return list(returned)
        return [tensor.to(dtype) for tensor, dtype in zip(returned, self._output_dtypes, strict=True)]

    def close(self) -> None:
        """Free the weights now: an exported module and its graph refer to each other, and may be frozen (gc.freeze)."""
        for kind in ("parameters", "buffers"):
            for tensor in getattr(self._module, kind, tuple)():
                tensor.data = tensor.data.new_empty(0)


def forward_in(
    torch: Any, dtype_name: str, device: Device, load: Callable[[], Any], *, inputs: Specs, outputs: Specs
) -> Forward:
    """The module that `load` gives, computing in the precision of --torch_dtype.

    Converted as a whole where a batch of zeros then runs. A graph that was exported with precisions of its own inside
    cannot be converted so: it keeps its weights, and its matrix products compute in `dtype_name` (autocast).
    """
    if dtype_name == "as_exported":
        return Forward(torch, load(), outputs)
    dtype = getattr(torch, dtype_name)
    converted = Forward(torch, load().to(dtype), outputs, dtype=dtype)
    fault = _fault(torch, converted, device, inputs)
    if fault is None or dtype_name == "float32":
        return converted
    note(f"--torch_dtype={dtype_name}: weights stay as they are, products are cast: {fault}")
    # A recorded graph must not use casts from a cache that is emptied.
    around = partial(torch.autocast, device.name.type, dtype, cache_enabled=False)
    return Forward(torch, load(), outputs, around=around)


def _fault(torch: Any, forward: Forward, device: Device, inputs: Specs) -> str | None:
    """Why a batch of zeros does not run; None where it does."""
    try:
        with torch.inference_mode():
            forward([device.to_device(device.staged(zeros(spec, _ROWS_TRIED))) for spec in inputs])
    except FAILURES as error:
        if device.is_out_of_memory(error):
            raise
        return first_line(error)
    return None
