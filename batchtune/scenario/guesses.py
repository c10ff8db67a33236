"""What can be sent to a model whose signature leaves something open? Guesses, to be tried against the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from batchtune.scenario.spec.request import RandomInputs, RandomRange, RandomValues, RequestSpec
from batchtune.wire.signature import Signature, TensorSpec

Shapes = Mapping[str, tuple[int, ...]]
Ranges = Mapping[str, RandomRange]

_LENGTHS: Final = (128, 64, 32, 16, 8, 256, 512, 1)
"""Of a sequence: tokens of a sentence or two, then what convolutions and reshapes may want."""
_SIDES: Final = (224, 32, 64, 28, 299, 512)
"""Of an image, in pixels: ImageNet's, CIFAR's, MNIST's, Inception's."""

SMALL: Final = RandomRange(low=0, high=100, whole=True)
"""Below the size of nearly every vocabulary."""
BINARY: Final = RandomRange(low=0, high=2, whole=True)


def shape_guesses(signature: Signature, given: Collection[str]) -> list[dict[str, tuple[int, ...]]]:
    """Dimensions after the first for every input that leaves some open, the likeliest first; one empty: none does.

    Inputs change together: what belongs together (tokens and their mask) has one length.
    """
    candidates = {
        spec.name: sizes for spec in signature.inputs if spec.name not in given and (sizes := _sizes(spec))
    }
    count = max(map(len, candidates.values()), default=1)
    return [
        {name: sizes[min(at, len(sizes) - 1)] for name, sizes in candidates.items()} for at in range(count)
    ]


def range_guesses(signature: Signature, given: Collection[str]) -> dict[str, RandomRange]:
    """Values for every input of whole numbers: those of a mask are ones, of a type 0 or 1, any other's small."""
    return {
        spec.name: _range(spec)
        for spec in signature.inputs
        if spec.name not in given and spec.dtype.startswith(("int", "uint"))
    }


def narrower(ranges: Ranges) -> Iterator[dict[str, RandomRange]]:
    """The same with one input after the other held to 0 and 1, then all: some table is smaller than guessed."""
    wide = [name for name, limits in ranges.items() if limits.high is not None and limits.high > 2]
    for name in wide:
        yield {**ranges, name: BINARY}
    if len(wide) > 1:
        yield {**ranges, **dict.fromkeys(wide, BINARY)}


def guessed_request(request: RequestSpec, *, shapes: Shapes, ranges: Ranges) -> RequestSpec:
    """The request with these dimensions and values beside its own, which win."""
    inputs = request.inputs
    if ranges and (inputs == "random" or isinstance(inputs, RandomInputs)):
        values = inputs.random if isinstance(inputs, RandomInputs) else RandomValues()
        by_input = {**ranges, **values.by_input}
        inputs = RandomInputs(random=values.model_copy(update={"by_input": by_input}))
    return request.model_copy(update={"shapes": {**shapes, **request.shapes}, "inputs": inputs})


def inputs_with_range(request: RequestSpec, signature: Signature) -> set[str]:
    """The inputs whose values the request says: all where it says so of all, or sends zeros or recorded ones."""
    every = {spec.name for spec in signature.inputs}
    if request.inputs == "random":
        return set()
    if not isinstance(request.inputs, RandomInputs):
        return every
    values = request.inputs.random
    return every if values.low is not None or values.high is not None else set(values.by_input)


def _sizes(spec: TensorSpec) -> list[tuple[int, ...]]:
    strings = spec.dtype == "object"
    if spec.shape is None:
        return [()] if strings else [(128,), (224, 224, 3), (3, 224, 224), ()]
    inner = spec.shape[1:]
    if None not in inner:
        return []
    if strings:
        return [_filled(inner, size) for size in (1, 8)]
    if len(inner) != 3:
        return [_filled(inner, size) for size in _LENGTHS]
    if any(size in (1, 3, 4) for size in inner):
        return [_filled(inner, side) for side in _SIDES]
    if inner == (None, None, None):
        return [(224, 224, 3), (3, 224, 224), (32, 32, 3), (28, 28, 1)]
    return [_filled(inner, size) for size in (*_SIDES, 16, 8)]


def _filled(inner: tuple[int | None, ...], size: int) -> tuple[int, ...]:
    return tuple(size if dimension is None else dimension for dimension in inner)


def _range(spec: TensorSpec) -> RandomRange:
    name = spec.name.lower()
    if "mask" in name:
        return RandomRange(low=1, high=2, whole=True)
    if "type" in name or "segment" in name:
        return BINARY
    image = spec.dtype == "uint8" and spec.shape is not None and len(spec.shape) == 4
    return RandomRange(low=0, high=256, whole=True) if image else SMALL
