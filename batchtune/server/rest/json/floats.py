"""How do the rows of numbers that most predict bodies are become an array without a Python float each?

simdjson writes the numbers of `{"instances": [[…], …]}` into a buffer: 200 of them cost 4 µs less than by way of orjson
and `struct`. Whatever is not just that (another key than the default signature's name, another rank, uneven rows, a
value that is no number, an integer beyond 64 bits, text after the value) is left to json_tensors, which reads the body
anew.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.wire.signature import DEFAULT_SIGNATURE, TensorSpec

_new_parser: Callable[[], Any] | None
try:
    import simdjson
except ImportError:  # no wheel for this platform: all bodies take the long way
    _new_parser = None
else:
    _new_parser = simdjson.Parser

_FLOAT64 = np.dtype("<f8")
_FLOAT32 = np.dtype("float32")


class FloatRows:
    """Reads bodies with one parser, which keeps the memory of the longest; for one thread."""

    def __init__(self) -> None:
        self._parse = None if _new_parser is None else _new_parser().parse

    def read(self, body: bytes) -> NDArray[np.float32] | None:
        """The tensor of rank 2, in float32, of a body that is nothing else; None for any other."""
        if self._parse is None or body.find(b"{", 1) >= 0:  # rows by name
            return None
        try:
            document: Any = self._parse(body)
            rows = document["instances"]
            count, width = len(rows), len(rows[0])
            values = np.frombuffer(rows.as_buffer(of_type="d"), _FLOAT64).reshape(count, width)
            if not _is_matrix(body, rows, count, width):
                return None
            if len(document) > 1 and (
                len(document) > 2 or document.get("signature_name") != DEFAULT_SIGNATURE
            ):
                return None
            return values.astype(_FLOAT32)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, RuntimeWarning):
            return None


def takes_float_rows(specs: tuple[TensorSpec, ...]) -> bool:
    """Whether a signature's inputs are one matrix of float32."""
    return len(specs) == 1 and specs[0].dtype == "float32" and len(specs[0].shape or ()) == 2


def _is_matrix(body: bytes, rows: Any, count: int, width: int) -> bool:
    """Whether there is no list within a row, and all rows are as long as the first; all leaves are numbers."""
    if count == 1:
        first = body.find(b"[")
        last = body.rfind(b"[")
        return first < last and not body[first + 1 : last].strip()
    return body.count(b"[") == count + 1 and all(len(row) == width for row in rows)


# Beyond float32 is infinity. numpy.errstate would cost 0.7 µs a request.
warnings.filterwarnings("ignore", "overflow encountered in cast", RuntimeWarning, re.escape(__name__))
