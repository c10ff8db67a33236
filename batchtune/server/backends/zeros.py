"""What does a batch look like that any model takes, whatever it means to it?"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.wire.signature import TensorSpec

_LENGTH_OF_FREE_DIMENSION = 1


def zeros(spec: TensorSpec, rows: int) -> NDArray[Any]:
    """A batch of zeros, or of empty strings; a free dimension has length 1."""
    sizes = (spec.shape or (None,))[1:]
    shape = (rows, *(_LENGTH_OF_FREE_DIMENSION if size is None else size for size in sizes))
    if spec.dtype == "object":
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, _dtype(spec.dtype))


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype
