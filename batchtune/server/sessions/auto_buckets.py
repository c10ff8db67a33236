"""When do the lengths that came call for other boundaries? `--length_buckets=auto`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from batchtune.batching.length_buckets import PAYS_FROM, boundaries_for, rounded_up

FIRST_REQUESTS: Final = 256
"""After so many the share of requests below a length is known within 3 points: enough to gain most of what there is."""

WINDOW_REQUESTS: Final = 2_048
"""From then on each so many are looked at by themselves, known within 1 point; what was long ago does not count."""


class LengthWindow:
    """A histogram of the last lengths, in at most 32 + 16 bins an octave whatever they are, and when to look at it.

    Longer lengths than 32 are rounded up, by a sixteenth at most.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._requests = 0
        self._wanted = FIRST_REQUESTS

    def add(self, length: int, rows: int) -> bool:
        """Count one request; whether enough have come to look at them."""
        length = rounded_up(length)
        self._rows[length] = self._rows.get(length, 0) + rows
        self._requests += 1
        return self._requests >= self._wanted

    def take(self) -> dict[int, int]:
        """Rows of each length; begins anew."""
        rows, self._rows, self._requests = self._rows, {}, 0
        self._wanted = WINDOW_REQUESTS
        return rows


def better_boundaries(rows_by_length: Mapping[int, int], present: tuple[int, ...]) -> tuple[int, ...]:
    """Other boundaries where they pay, else those present."""
    best = boundaries_for(rows_by_length)
    pays = computed_elements(rows_by_length, best) < (1.0 - PAYS_FROM) * computed_elements(
        rows_by_length, present
    )
    return best if pays else present


def computed_elements(rows_by_length: Mapping[int, int], boundaries: tuple[int, ...]) -> float:
    """Elements of these requests, each padded to the boundary above it, those above the last to the longest."""
    longest = max(rows_by_length, default=0)
    lengths = np.array(list(rows_by_length), dtype=np.float64)
    rows = np.array(list(rows_by_length.values()), dtype=np.float64)
    ends = np.array([*(end for end in boundaries if end < longest), longest], dtype=np.float64)
    return float(np.sum(rows * ends[np.searchsorted(ends, lengths)]))
