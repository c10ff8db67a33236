"""Between which lengths should requests be told apart, given the lengths that came? `--length_buckets=auto`.

What a batch computes is its rows times its longest, which in a bucket whose batches are full is about its boundary. So
the boundaries are those with which the requests that came, each padded to the boundary above it, have the fewest
elements: an exact dynamic programme over a histogram of lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

BUCKETS_MOST: Final = 6
"""Queues at most. Each more saves padding and fills its own batches later: over twenty distributions of lengths 4, 6, 8
and 12 lose 5.0, 4.1, 4.1 and 4.7 % to the best of twenty sets (tests/benchmarks/replay/bucket_search.py --auto)."""

PAYS_FROM: Final = 0.05
"""More queues, or other boundaries, must save this share of the elements computed: chance alone saves 1 to 3 %."""

FIRST_REQUESTS: Final = 256
"""After so many the share of requests below a length is known within 3 points: enough to gain most of what there is."""

WINDOW_REQUESTS: Final = 2_048
"""From then on each so many are looked at by themselves, known within 1 point; what was long ago does not count."""

_EXACT_TO: Final = 32
_BINS_PER_OCTAVE: Final = 16


class LengthWindow:
    """A histogram of the last lengths, in at most 32 + 16 bins an octave whatever they are, and when to look at it.

    Longer lengths than 32 are rounded up, by a sixteenth at most.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._requests = 0
        self._wanted = FIRST_REQUESTS

    def add(self, length: int, rows: int) -> bool:
        """Count one request; whether enough have come for `rows_by_length` to be asked."""
        length = rounded_up(length)
        self._rows[length] = self._rows.get(length, 0) + rows
        self._requests += 1
        return self._requests >= self._wanted

    def take(self) -> dict[int, int]:
        """Rows of each length; begins anew."""
        rows, self._rows, self._requests = self._rows, {}, 0
        self._wanted = WINDOW_REQUESTS
        return rows


def rounded_up(length: int) -> int:
    """The end of the bin that holds a length."""
    if length <= _EXACT_TO:
        return max(length, 1)
    step = 1 << ((length - 1).bit_length() - _BINS_PER_OCTAVE.bit_length())
    return -(-length // step) * step


def better_boundaries(rows_by_length: Mapping[int, int], present: tuple[int, ...]) -> tuple[int, ...]:
    """Other boundaries where they pay, else those present."""
    best = boundaries_for(rows_by_length)
    pays = computed_elements(rows_by_length, best) < (1.0 - PAYS_FROM) * computed_elements(
        rows_by_length, present
    )
    return best if pays else present


def boundaries_for(rows_by_length: Mapping[int, int], most: int = BUCKETS_MOST) -> tuple[int, ...]:
    """The boundaries of at most so many queues with the fewest elements; as few as have about as few.

    The last queue takes what is longer than the last boundary, so that one queue has none.
    """
    lengths = np.array(sorted(rows_by_length), dtype=np.float64)
    rows = np.array([rows_by_length[int(length)] for length in lengths], dtype=np.float64)
    if not len(lengths):
        return ()
    before = np.concatenate([[0.0], np.cumsum(rows)])
    # [first, last]: the elements of a queue from one length to another; inf where there is none
    queue = (before[np.newaxis, 1:] - before[:-1, np.newaxis]) * lengths
    queue[np.tril_indices(len(lengths), -1)] = np.inf
    fewest, ends = [queue[0]], np.zeros((0, len(lengths)), dtype=np.intp)
    for _ in range(min(most, len(lengths)) - 1):
        # [end of the queues before, last]: with one queue more that begins after that end
        split = fewest[-1][:-1, np.newaxis] + queue[1:]
        ends = np.vstack([ends, np.argmin(split, axis=0)])
        fewest.append(np.min(split, axis=0))
    enough = min(elements[-1] for elements in fewest) / (1.0 - PAYS_FROM)
    queues = next(count for count, elements in enumerate(fewest, start=1) if elements[-1] <= enough)
    return _traced(ends[: queues - 1], lengths)


def computed_elements(rows_by_length: Mapping[int, int], boundaries: tuple[int, ...]) -> float:
    """Elements of these requests, each padded to the boundary above it, those above the last to the longest."""
    longest = max(rows_by_length, default=0)
    lengths = np.array(list(rows_by_length), dtype=np.float64)
    rows = np.array(list(rows_by_length.values()), dtype=np.float64)
    ends = np.array([*(end for end in boundaries if end < longest), longest], dtype=np.float64)
    return float(np.sum(rows * ends[np.searchsorted(ends, lengths)]))


def _traced(ends: NDArray[np.intp], lengths: NDArray[np.float64]) -> tuple[int, ...]:
    last, boundaries = len(lengths) - 1, []
    for of_queue in ends[::-1]:
        last = int(of_queue[last])
        boundaries.append(int(lengths[last]))
    return tuple(reversed(boundaries))
