"""How are the latencies of any number of requests kept in 33 kB?

The bins are those of floating-point numbers themselves: the exponent and the first seven bits of the fraction, so that
each is 0.4 to 0.8 % wide, its middle at most 0.4 % off, and a bin is found by a shift: 2 to 4 ns a request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

RELATIVE_ERROR: Final = 2.0**-8

_SHIFT: Final = 52 - 7
_LEAST_S: Final = 2.0**-20
_MOST_S: Final = 2.0**12
_FIRST: Final = int(np.float64(_LEAST_S).view(np.int64)) >> _SHIFT
_LAST: Final = (int(np.float64(_MOST_S).view(np.int64)) >> _SHIFT) - _FIRST
"""Holds what took longer too, and requests that were never answered: inf."""


class LatencyHistogram:
    """Counts from 1 µs to 68 min; `counts` [bins] can be sent and added."""

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(_LAST + 1, dtype=np.int64)

    @property
    def requests(self) -> int:
        return int(self.counts.sum())

    @property
    def unanswered(self) -> int:
        """Refused, or slower than an hour."""
        return int(self.counts[_LAST])

    def add(self, latency_s: NDArray[np.float64]) -> None:
        """latency_s: [requests], positive; inf: never answered."""
        keys = np.ascontiguousarray(latency_s).view(np.int64) >> _SHIFT
        keys -= _FIRST
        np.clip(keys, 0, _LAST, out=keys)
        self.counts += np.bincount(keys, minlength=_LAST + 1)

    def quantiles(self, probabilities: Sequence[float]) -> NDArray[np.float64]:
        """The middles of the bins at ranks ceil(n·p), [probabilities]; nan without requests, inf where unanswered."""
        total = self.requests
        if total == 0:
            return np.full(len(probabilities), math.nan)
        ranks = [min(max(math.ceil(total * p - 1e-9), 1), total) for p in probabilities]
        bins = np.searchsorted(np.cumsum(self.counts), ranks)
        middles = ((bins + _FIRST) << _SHIFT) + (1 << (_SHIFT - 1))
        return np.where(bins == _LAST, math.inf, middles.astype(np.int64).view(np.float64))
