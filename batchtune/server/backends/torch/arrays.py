"""How do numpy's arrays and PyTorch's tensors share memory?"""

from __future__ import annotations

from typing import Any

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
