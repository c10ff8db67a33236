"""Checks rows, type, rank and fixed sizes of a request's tensors against the signature.

A wrong shape may end the process inside a framework: a TensorFlow convolution that expects four dimensions
and gets two aborts. The text is that of TensorFlow's TFRT (saved_model.cc, IsInputSpecsCorrect), which has
the code INTERNAL for it. The first dimension, the rows, is checked by the batching. A shape that was found to
fit before costs 0.1 µs.
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
    """Checks the shape of one input; `known`: shapes, without the first dimension, that have been found to fit."""

    __slots__ = ("_signature_name", "_spec", "known")

    def __init__(self, signature_name: str, spec: TensorSpec) -> None:
        self._signature_name = signature_name
        self._spec = spec
        self.known: set[_Sizes] = set()

    def fault(self, shape: _Sizes) -> str:
        """Return why `shape` does not fit the spec, in TensorFlow's words; "": it fits, as any does without a shape."""
        expected = self._spec.shape
        if expected is not None and (
            len(shape) != len(expected)
            or any(
                size != fixed
                for size, fixed in zip(shape[1:], expected[1:], strict=True)
                if fixed is not None
            )
        ):
            return (
                f"signature {self._signature_name} input {self._spec.name} shape is wrong, expected: "
                f"{shown(expected)}, actual: {shown(shape)}"
            )
        known_max = 64
        if shape and len(self.known) < known_max:
            self.known.add(shape[1:])
        return ""

    def check(self, shape: _Sizes) -> None:
        """Raise StatusError INVALID_ARGUMENT unless `shape` fits the spec."""
        if fault := self.fault(shape):
            raise invalid_argument(fault)


class SignatureInputs:
    """Checks the inputs of requests against a signature: all must be present, with equal numbers of rows."""

    __slots__ = ("_inputs",)

    def __init__(self, signature: Signature) -> None:
        self._inputs = [
            (spec.name, numpy_dtype(spec.dtype), InputShape(signature.name, spec))
            for spec in signature.inputs
        ]

    def count_rows(self, inputs: Mapping[str, NDArray[Any]]) -> int:
        """Check a request's inputs against the signature and return its number of rows.

        Raises:
            StatusError: INTERNAL for a missing or surplus input, INVALID_ARGUMENT for a wrong type or
                shape, or for different numbers of rows.
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
    """Write a shape as TensorFlow does, such as [?,28,28,1]; None as <unknown>."""
    if shape is None:
        return "<unknown>"
    return f"[{','.join('?' if size is None else str(size) for size in shape)}]"


def listed(specs: Iterable[TensorSpec]) -> str:
    """Describe tensors in one line, such as `tokens: float32 [?,200], mask: int32 [?,200]`."""
    return ", ".join(
        f"{spec.name}: {'string' if spec.dtype == 'object' else spec.dtype} {shown(spec.shape)}"
        for spec in specs
    )


def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """Return numpy's dtype of this name; None where numpy has none, such as bfloat16."""
    try:
        return np.dtype(name)
    except TypeError:
        return None
