"""Checks rows, type, rank and fixed sizes of a request's tensors against the signature.

A framework that is handed another shape may end the process: a convolution of TensorFlow's that expects four dimensions
and gets two aborts. The text is that of TensorFlow's TFRT (saved_model.cc, IsInputSpecsCorrect), which has INTERNAL
for it; the first dimension, the rows, is the batching's affair. A shape that has been found to fit costs 0.1 µs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError, invalid_argument

_Sizes = tuple[int, ...]


class InputShape:
    """The shapes that one input may have; `known` are sizes beside the rows that have been found to fit."""

    __slots__ = ("_signature_name", "_spec", "known")

    def __init__(self, signature_name: str, spec: TensorSpec) -> None:
        self._signature_name = signature_name
        self._spec = spec
        self.known: set[_Sizes] = set()

    def check(self, shape: _Sizes) -> None:
        """Raise StatusError INVALID_ARGUMENT unless `shape` fits; one of a spec without a shape always does."""
        expected = self._spec.shape
        if expected is not None and (
            len(shape) != len(expected)
            or any(
                size != fixed
                for size, fixed in zip(shape[1:], expected[1:], strict=True)
                if fixed is not None
            )
        ):
            raise StatusError(
                "INVALID_ARGUMENT",
                f"signature {self._signature_name} input {self._spec.name} shape is wrong, expected: "
                f"{shown(expected)}, actual: {shown(shape)}",
            )
        known_max = 64
        if shape and len(self.known) < known_max:
            self.known.add(shape[1:])


class SignatureInputs:
    """The inputs of a signature, all of which a request brings, with as many rows in each."""

    __slots__ = ("_inputs",)

    def __init__(self, signature: Signature) -> None:
        self._inputs = [
            (spec.name, numpy_dtype(spec.dtype), InputShape(signature.name, spec))
            for spec in signature.inputs
        ]

    def count_rows(self, inputs: Mapping[str, NDArray[Any]]) -> int:
        """Check a request's inputs against the signature and return its number of rows.

        Raises:
            StatusError: INTERNAL for an input too few or too many, INVALID_ARGUMENT for another type or shape.
        """
        rows = -1
        for name, dtype, expected in self._inputs:
            array = inputs.get(name)
            if array is None:
                raise StatusError("INTERNAL", "Task does not conform to batch signature")
            shape = array.shape
            if not shape:
                raise invalid_argument("Batching Run() input tensors must have at least one dimension")
            if rows != shape[0]:
                if rows >= 0:
                    raise invalid_argument("Batching Run() input tensors must have equal 0th-dimension size")
                rows = shape[0]
            if shape[1:] not in expected.known:
                expected.check(shape)
            if array.dtype is not dtype and dtype is not None and array.dtype != dtype:
                index = [taken for taken, _, _ in self._inputs].index(name)
                raise invalid_argument(
                    f"Expects arg[{index}] to be {dtype.name} but {array.dtype.name} is provided"
                )
        if len(inputs) != len(self._inputs):
            raise StatusError("INTERNAL", "Task does not conform to batch signature")
        return rows


def shown(shape: tuple[int | None, ...] | None) -> str:
    """Write a shape as TensorFlow does, such as [?,28,28,1]."""
    if shape is None:
        return "<unknown>"
    return f"[{','.join('?' if size is None else str(size) for size in shape)}]"


def listed(specs: Iterable[TensorSpec]) -> str:
    """Describe tensors in a line, such as tokens: float32 [?,200]."""
    return ", ".join(
        f"{spec.name}: {'string' if spec.dtype == 'object' else spec.dtype} {shown(spec.shape)}"
        for spec in specs
    )


def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """Return numpy's dtype of this name; None for one that only a library registers (bfloat16)."""
    try:
        return np.dtype(name)
    except TypeError:
        return None
