"""How do the tensors of several requests become one, and how is the answer cut up again?

Rules and texts: TF Serving's `batching_session.cc` and `batching_util.cc`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from batchtune.wire.status import StatusError

LengthPadding = Literal["off", "first_element", "zero"]

_MAX_PADDED_RANK = 6


def merge_tensors(
    name: str,
    arrays: Sequence[NDArray[Any]],
    *,
    rows: int,
    padded_rows: int,
    length_padding: LengthPadding,
    empty: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]] = np.empty,
) -> NDArray[Any]:
    """Concatenate `arrays` (together `rows` rows) and repeat the last array's first row up to `padded_rows`.

    A single array that needs no padding is returned as it is; any other batch is gathered in memory from `empty`.
    length_padding: fill each other dimension up to the batch's largest with the array's own first element, as TF
    Serving does, or with zeros (empty strings).
    Raises StatusError FAILED_PRECONDITION where shapes differ and length_padding is off.
    """
    if length_padding != "off":
        arrays = _pad_lengths(name, arrays, length_padding)
    first = arrays[0]
    if len(arrays) == 1 and rows == padded_rows:
        return first
    merged = empty((padded_rows, *first.shape[1:]), first.dtype)
    try:
        np.concatenate(arrays, out=merged[:rows])
    except ValueError as error:
        raise StatusError(
            "FAILED_PRECONDITION",
            f"Tensors with name '{name}' from different tasks have different shapes and padding is turned off. Set "
            "pad_variable_length_inputs to true, or ensure that all tensors with the same name have equal dimensions "
            "starting with the first dim.",
        ) from error
    if padded_rows > rows:
        merged[rows:] = arrays[-1][:1]
    return merged


def elements_of(
    names: Sequence[str], tasks: Sequence[Mapping[str, NDArray[Any]]], merged: Mapping[str, NDArray[Any]]
) -> tuple[int, int]:
    """How many elements of these inputs the tasks brought, and how many fill them up to the batch's longest.

    The rows that only fill up the batch are not counted.
    """
    rows = sum(len(inputs[name]) for name in names[:1] for inputs in tasks)
    sent = sum(inputs[name].size for name in names for inputs in tasks)
    computed = sum(merged[name].size // len(merged[name]) * rows for name in names)
    return sent, computed - sent


def checked_outputs(
    outputs: Mapping[str, NDArray[Any]], names: Sequence[str], padded_rows: int
) -> dict[str, NDArray[Any]]:
    """The named outputs, each with one row per row of the batch; raises StatusError where one has not."""
    checked = {}
    for name in names:
        array = outputs.get(name)
        if array is None:
            raise StatusError("INTERNAL", "Wrong number of batched output tensors")
        if array.ndim == 0:
            raise StatusError("FAILED_PRECONDITION", "Batched output tensor has 0 dimensions")
        if array.shape[0] != padded_rows:
            raise StatusError(
                "FAILED_PRECONDITION",
                "Batched output tensor's 0th dimension does not equal the sum of the 0th dimension sizes of the "
                "input tensors",
            )
        checked[name] = array
    return checked


def split_tensor(array: NDArray[Any], sizes: Sequence[int]) -> list[NDArray[Any]]:
    """Views of consecutive rows."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(array[start : start + size])
        start += size
    return pieces


def _pad_lengths(
    name: str, arrays: Sequence[NDArray[Any]], length_padding: LengthPadding
) -> Sequence[NDArray[Any]]:
    shapes = {array.shape[1:] for array in arrays}
    ranks = {len(shape) for shape in shapes}
    if max(ranks) >= _MAX_PADDED_RANK:
        raise StatusError("INVALID_ARGUMENT", "Only tensors with rank from 1 to 6 can be padded.")
    if len(shapes) == 1:
        return arrays
    if len(ranks) > 1:
        raise StatusError(
            "INTERNAL",
            f"Tensor concat operation failed: tensors with name '{name}' from different tasks have different ranks",
        )
    largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    return [_pad_one(array, (array.shape[0], *largest), length_padding) for array in arrays]


def _pad_one(array: NDArray[Any], shape: tuple[int, ...], length_padding: LengthPadding) -> NDArray[Any]:
    if array.shape == shape:
        return array
    if length_padding == "first_element":
        if array.size == 0 and 0 not in shape:
            raise StatusError("INVALID_ARGUMENT", "Got empty tensor in batch of non-empty tensors.")
        fill = array.flat[0] if array.size else 0
    else:
        fill = b"" if array.dtype == object else 0
    padded: NDArray[Any] = np.full(shape, fill, array.dtype)
    padded[tuple(slice(size) for size in array.shape)] = array
    return padded
