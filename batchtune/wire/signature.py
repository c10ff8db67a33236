"""Describes the inputs and outputs of a model for every protocol, and converts tensors as all protocols need it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEFAULT_SIGNATURE = "serving_default"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of a signature: name, dtype and shape.

    `dtype` is numpy's name ("object" for strings). `shape` includes the batch dimension; None: unknown rank; a None
    dimension: any size.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


def by_name(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the tensors sorted by name, the order that a `Signature` needs."""
    return tuple(sorted(specs, key=lambda spec: spec.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A callable of a model: its inputs and outputs, each sorted by name.

    `method_name`: the kind of call that it serves, such as "tensorflow/serving/predict".
    """

    name: str
    method_name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


MAX_RANK = 64
"""Most dimensions of a tensor, numpy's own limit."""


def object_array(values: Sequence[Any]) -> NDArray[Any]:
    """Return the values, which are no sequences, as an array of dtype object, shape (len(values),)."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def as_bytes(value: Any) -> bytes:
    """Return an element of a string tensor as bytes, text as UTF-8; raises ValueError for any other type."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise ValueError(f"strings are bytes or text, not {type(value).__name__}")


def little_endian(name: str) -> np.dtype[Any]:
    """Return numpy's dtype of this name in little-endian order, the order on the wire."""
    if name == "bfloat16":
        import ml_dtypes  # comes with tensorflow; registers the dtype with numpy

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name).newbyteorder("<")
