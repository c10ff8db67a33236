"""Where does a worker write each request's times, so that the fleet's parent can read them without asking?

One anonymous shared memory per worker and job: a header of counters, then one column per field. A worker stores
single elements through memoryviews (20 ns each, half of numpy's price); the parent reads the same memory as numpy.
A column entry of 0 means "not yet"; times are absolute CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from typing import Final

import numpy as np
from numpy.typing import NDArray

PENDING: Final = 0
"""Outcome of a request that has not ended; an ended one has its Status plus 1."""
ENDED: Final = 1

ISSUED, OLDEST_PENDING, STARTED_NS = 0, 1, 2
"""Words of the header: requests issued so far; all before the second have ended; when the job started."""

_HEADER_WORDS: Final = 16
_TIME_COLUMNS: Final = ("due", "sent", "first_byte", "done", "wait")


class Columns:
    """The columns `due`, `sent`, `first_byte`, `done`, `wait` (int64) and `outcome` (uint8), each of `capacity` rows.

    `wait` is the time a request spent without a connection. Memory is taken as rows are touched, not before.
    """

    def __init__(self, file_descriptor: int, capacity: int) -> None:
        """Map the memory behind `file_descriptor`, of `size_bytes(capacity)`; the descriptor may be closed after."""
        self.capacity = capacity
        self._memory = mmap.mmap(file_descriptor, size_bytes(capacity))
        self._view = memoryview(self._memory)
        self.header = self._int64(0, _HEADER_WORDS)
        first = _HEADER_WORDS
        self.due, self.sent, self.first_byte, self.done, self.wait = (
            self._int64(first + position * capacity, capacity) for position in range(len(_TIME_COLUMNS))
        )
        outcome_at = 8 * (first + len(_TIME_COLUMNS) * capacity)
        self.outcome = self._view[outcome_at : outcome_at + capacity]

    def times(self, name: str) -> NDArray[np.int64]:
        """The whole column as an array over the same memory, shape (capacity,)."""
        column: memoryview = getattr(self, name)
        return np.frombuffer(column, dtype=np.int64)

    def outcomes(self) -> NDArray[np.uint8]:
        """The outcome column as an array over the same memory, shape (capacity,)."""
        return np.frombuffer(self.outcome, dtype=np.uint8)

    def prefault(self, rows: int) -> None:
        """Touch the first `rows` rows now, so that no page fault falls into the measurement."""
        step = mmap.PAGESIZE // 8
        for name in _TIME_COLUMNS:
            self.times(name)[: min(rows, self.capacity) : step] += 0

    def _int64(self, first_word: int, words: int) -> memoryview:
        return self._view[8 * first_word : 8 * (first_word + words)].cast("q")


def size_bytes(capacity: int) -> int:
    """The bytes of memory that columns of `capacity` rows map."""
    return 8 * (_HEADER_WORDS + len(_TIME_COLUMNS) * capacity) + max(capacity, 1)


def new_memory(capacity: int) -> int:
    """A file descriptor of fresh zeroed memory for `Columns`; the caller closes it."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("batchtune-samples")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes(capacity))
    return descriptor
