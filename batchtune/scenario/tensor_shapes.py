"""Which shape does an input have in one request, and do given arrays fit a signature?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import UsageError
from batchtune.wire.signature import Signature, TensorSpec


def concrete_shape(spec: TensorSpec, rows: int, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The shape of an input in a request of `rows` rows; `shapes` gives the dimensions after the first.

    Raises:
        UsageError: dimensions that stay open, or that contradict the model.
    """
    given = shapes.get(spec.name)
    if spec.shape is not None and not spec.shape:
        return ()
    shape = (None, *(given or ())) if spec.shape is None else spec.shape
    if spec.shape is None and given is None:
        raise _open_shape(spec)
    if shape[0] is not None and shape[0] != rows:
        raise UsageError(
            f"request.rows: input {spec.name!r} takes exactly {shape[0]} rows; was {rows}",
            hint=f"set request.rows to {shape[0]}; such a model cannot be batched",
        )
    inner = shape[1:]
    if given is not None:
        agrees = len(given) == len(inner) and all(
            own is None or own == size for own, size in zip(inner, given, strict=True)
        )
        if not agrees:
            raise UsageError(
                f"request.shapes.{spec.name}: the model has {_shown(inner)}; was {_shown(given)}",
                hint="give the dimensions after the batch dimension",
            )
        inner = tuple(given)
    sizes = tuple(size for size in inner if size is not None)
    if len(sizes) != len(inner):
        raise _open_shape(spec)
    return (rows, *sizes)


def check_names(signature: Signature, names: Iterable[str], *, key: str) -> None:
    """Return if all names are inputs of the signature.

    Raises:
        UsageError: naming `key`, with the input that was probably meant.
    """
    known = [spec.name for spec in signature.inputs]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the model has: {', '.join(known)}"
            raise UsageError(f"{key}: signature {signature.name!r} has no input {name!r}", hint=hint)


def fitted(
    arrays: Mapping[str, NDArray[Any]], signature: Signature, *, where: str
) -> dict[str, NDArray[Any]]:
    """The arrays in the signature's types.

    Raises:
        UsageError: `where: …` for a missing or unknown input, a type that would lose something, or a shape.
    """
    check_names(signature, arrays, key=where)
    result = {}
    for spec in signature.inputs:
        if spec.name not in arrays:
            raise UsageError(
                f"{where}: input {spec.name!r} is missing", hint=f"there are: {', '.join(arrays) or 'none'}"
            )
        array = _typed(arrays[spec.name], spec, where)
        if spec.shape is not None and (
            array.ndim != len(spec.shape)
            or any(own is not None and own != size for own, size in zip(spec.shape, array.shape, strict=True))
        ):
            raise UsageError(
                f"{where}: input {spec.name!r} has shape {_shown(array.shape)}; the model takes {_shown(spec.shape)}"
            )
        result[spec.name] = array
    return result


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a signature's type name; bfloat16 comes from ml_dtypes, which TensorFlow brings."""
    wanted: np.dtype[Any]
    if name == "bfloat16":
        import ml_dtypes

        wanted = np.dtype(ml_dtypes.bfloat16)
    else:
        wanted = np.dtype(name)
    return wanted


def rows_of(arrays: Mapping[str, NDArray[Any]]) -> int:
    """The size of the first dimension; 1 for scalars."""
    return next((len(array) for array in arrays.values() if array.ndim), 1)


def _typed(array: NDArray[Any], spec: TensorSpec, where: str) -> NDArray[Any]:
    if spec.dtype == "object":
        if array.dtype.kind in "OSU":
            return array.astype(object)
    elif array.dtype.name == spec.dtype:
        return array
    elif array.dtype.kind in "biuf":
        # JSON and notebooks turn 1 into 1.0 and float32 into float64; only a whole number that changes is refused.
        with np.errstate(invalid="ignore", over="ignore"):
            converted: NDArray[Any] = array.astype(numpy_dtype(spec.dtype))
        if converted.dtype.kind not in "biu" or np.array_equal(converted, array):
            return converted
    raise UsageError(f"{where}: input {spec.name!r} is {array.dtype}; the model takes {spec.dtype}")


def _open_shape(spec: TensorSpec) -> UsageError:
    shown = "any rank" if spec.shape is None else _shown(spec.shape)
    example = "[200]" if spec.shape is None else _shown([size or 200 for size in spec.shape[1:]])
    return UsageError(
        f"request.shapes: the model leaves the shape of input {spec.name!r} open: {shown}",
        hint=f"add request.shapes: {{{spec.name}: {example}}}",
    )


def _shown(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
