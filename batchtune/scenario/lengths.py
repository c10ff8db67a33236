"""Which length has each request? Drawn once for each payload, so that a few stand for the whole distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.spec.request import LengthsSpec
from batchtune.wire.signature import Signature

_LENGTH_MAX = 2**31 - 1
_FEW = 1e-9


def draw_lengths(spec: LengthsSpec, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`count` lengths, one of each of as many equal shares of the distribution, in random order.

    Raises:
        ScenarioError: a file that holds no lengths.
    """
    levels = np.clip((rng.permutation(count) + rng.random(count)) / count, _FEW, 1 - _FEW)
    if spec.lognormal is not None:
        normal = NormalDist(math.log(spec.lognormal.median), spec.lognormal.sigma)
        drawn = [math.exp(min(normal.inv_cdf(level), math.log(_LENGTH_MAX))) for level in levels.tolist()]
        return np.clip(np.rint(drawn), 1, spec.lognormal.max).astype(np.int64)
    if spec.histogram is not None:
        ends = np.cumsum(spec.histogram.weights) / np.sum(spec.histogram.weights)
        places = np.minimum(np.searchsorted(ends, levels), len(ends) - 1)
        return np.asarray(spec.histogram.lengths, dtype=np.int64)[places]
    recorded = np.sort(_recorded(Path(str(spec.file))))
    return recorded[(levels * len(recorded)).astype(np.int64)]


def shapes_of_length(
    signature: Signature, shapes: Mapping[str, Sequence[int]], length: int
) -> dict[str, Sequence[int]]:
    """`shapes`, and this length in every open dimension of the inputs that they leave out.

    Raises:
        UsageError: the model leaves no length open.
    """
    lengthened: dict[str, Sequence[int]] = dict(shapes)
    for spec in signature.inputs:
        inner = (None,) if spec.shape is None else spec.shape[1:]
        if None in inner and spec.name not in shapes:
            lengthened[spec.name] = tuple(length if size is None else size for size in inner)
    if len(lengthened) == len(shapes):
        raise UsageError(
            f"request.lengths: no input of signature {signature.name!r} has an open length",
            hint="leave lengths out, or do not give the input's shape in request.shapes",
        )
    return lengthened


def _recorded(path: Path) -> NDArray[np.int64]:
    lengths = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ScenarioError(f"request.lengths.file: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(
            f"request.lengths.file: {path} is no text", hint="write one length a line"
        ) from error
    for number, line in enumerate(lines, start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        if not (word.isascii() and word.isdigit() and len(word) <= 10 and 0 < int(word) <= _LENGTH_MAX):
            raise ScenarioError(
                f"{path}:{number}: expected a length, a whole number above 0; was {word[:60]!r}"
            )
        lengths.append(int(word))
    if not lengths:
        raise ScenarioError(f"request.lengths.file: {path} holds no lengths", hint="write one a line")
    return np.asarray(lengths, dtype=np.int64)
