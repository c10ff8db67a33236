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
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchtune.load.record.samples import Status

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


ERROR_TEXT_MAX_CHARS: Final = 500
CHECKED_ANSWERS_MAX: Final = 2_000
CHECKED_BYTES_MAX: Final = 64 * 1024 * 1024

_monotonic_ns = time.monotonic_ns


class Recorder:
    """The slow path of recording; clients store the outcome of a good answer themselves."""

    def __init__(self, columns: Columns, *, check_every: int) -> None:
        """`check_every`: keep the bytes of one good answer in so many, to be decoded after the run; 0: of none."""
        self.columns = columns
        self.check_every = check_every
        self.error_texts: dict[Status, str] = {}
        self.answers: dict[int, bytes] = {}
        self.answers_bytes = 0

    def fail(self, index: int, status: Status, text: str) -> None:
        """End a pending request now with a failure; the first text of each status is kept."""
        columns = self.columns
        if columns.outcome[index] != PENDING:
            return
        columns.done[index] = _monotonic_ns()
        columns.outcome[index] = status + ENDED
        if status not in self.error_texts:
            self.error_texts[status] = text[:ERROR_TEXT_MAX_CHARS]

    def keep_answer(self, index: int, answer: bytes) -> None:
        """Keep the answer of request `index` for decoding after the run, within fixed limits."""
        if not self.check_every:
            return
        if len(self.answers) < CHECKED_ANSWERS_MAX and self.answers_bytes + len(answer) <= CHECKED_BYTES_MAX:
            self.answers[index] = answer
            self.answers_bytes += len(answer)

    def reject_answer(self, index: int, status: Status, text: str) -> None:
        """Turn an answer that was recorded as good into MALFORMED or WRONG_ANSWER, after the run."""
        self.columns.outcome[index] = status + ENDED
        if status not in self.error_texts:
            self.error_texts[status] = text[:ERROR_TEXT_MAX_CHARS]
