"""What a model takes and gives, whichever protocol asks for it, and tensors as all protocols carry them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEFAULT_SIGNATURE = "serving_default"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a signature says of one tensor; the batch dimension is part of `shape`.

    `dtype` is numpy's name ("object" for strings); `shape` None: unknown rank; a None dimension: any size.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


def by_name(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The tensors in the order of their names, as a `Signature` has them."""
    return tuple(sorted(specs, key=lambda spec: spec.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A callable of a model: its inputs and outputs, each sorted by name."""

    name: str
    method_name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


MAX_RANK = 64
"""numpy's own limit."""


def object_array(values: Sequence[Any]) -> NDArray[Any]:
    """Make a one-dimensional array of Python objects."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def as_bytes(value: Any) -> bytes:
    """Encode an element of a string tensor; raises ValueError for what is neither text nor bytes."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise ValueError(f"strings are bytes or text, not {type(value).__name__}")


def little_endian(name: str) -> np.dtype[Any]:
    """Return the little-endian dtype of this name, as it travels."""
    if name == "bfloat16":
        import ml_dtypes  # comes with tensorflow; registers the dtype with numpy

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name).newbyteorder("<")
