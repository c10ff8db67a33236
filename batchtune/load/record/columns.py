"""Where does a worker write each request's times, so that the fleet's parent can read them without asking?

One anonymous shared memory per worker and job: a header of counters, then one column per field. A worker stores
single elements through memoryviews (20 ns each, half of numpy's price); the parent reads the same memory as numpy.
A column entry of 0 means "not yet"; times are absolute CLOCK_MONOTONIC nanoseconds. Streamed answers have a second
table, of the gaps between their tokens, which is bounded: when it is full every second gap is dropped.
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

ISSUED, OLDEST_PENDING, STARTED_NS, GAPS, GAP_STRIDE = 0, 1, 2, 3, 4
"""Words of the header: requests issued so far; all before the second have ended; when the job started; gaps in their
table, of so many in turn one."""

GAPS_MAX: Final = 2_000_000
"""Gaps between tokens that are recorded one by one, of a worker: 32 MB."""

_HEADER_WORDS: Final = 16
_TIME_COLUMNS: Final = ("due", "sent", "first_byte", "done", "wait")
_TOKEN_COLUMNS: Final = ("prompt_tokens", "output_tokens", "gap_p99")


class Columns:
    """The columns `due`, `sent`, `first_byte`, `done`, `wait` (int64) and `outcome` (uint8), each of `capacity` rows.

    `wait` is the time a request spent without a connection. Memory is taken as rows are touched, not before. Streamed
    answers, where there is room for `gaps_max` gaps, have `prompt_tokens`, `output_tokens` and `gap_p99` (ns, of the
    request's own gaps) too, and `gaps` (2, gaps_max): each gap in ns, and when it ended.
    """

    def __init__(self, file_descriptor: int, capacity: int, gaps_max: int = 0) -> None:
        """Map the memory behind `file_descriptor`, of `size_bytes(…)`; the descriptor may be closed after."""
        self.capacity = capacity
        self._memory = mmap.mmap(file_descriptor, size_bytes(capacity, gaps_max))
        self._view = memoryview(self._memory)
        self.header = self._int64(0, _HEADER_WORDS)
        first = _HEADER_WORDS
        self.due, self.sent, self.first_byte, self.done, self.wait = (
            self._int64(first + position * capacity, capacity) for position in range(len(_TIME_COLUMNS))
        )
        outcome_at = 8 * (first + len(_TIME_COLUMNS) * capacity)
        if gaps_max:
            tokens_at = first + len(_TIME_COLUMNS) * capacity
            self.prompt_tokens, self.output_tokens, self.gap_p99 = (
                self._int64(tokens_at + position * capacity, capacity)
                for position in range(len(_TOKEN_COLUMNS))
            )
            gaps_at = tokens_at + len(_TOKEN_COLUMNS) * capacity
            self.gaps = np.frombuffer(self._int64(gaps_at, 2 * gaps_max), dtype=np.int64).reshape(2, gaps_max)
            outcome_at = 8 * (gaps_at + 2 * gaps_max)
        self.outcome = self._view[outcome_at : outcome_at + capacity]

    def times(self, name: str) -> NDArray[np.int64]:
        """The whole column as an array over the same memory, shape (capacity,)."""
        column: memoryview = getattr(self, name)
        return np.frombuffer(column, dtype=np.int64)

    def outcomes(self) -> NDArray[np.uint8]:
        """The outcome column as an array over the same memory, shape (capacity,)."""
        return np.frombuffer(self.outcome, dtype=np.uint8)

    def keep_gaps(self, gaps_ns: NDArray[np.int64], ended_ns: NDArray[np.int64]) -> None:
        """Append the gaps of a stream and when each ended, one in as many as the table has room for."""
        header, table = self.header, self.gaps
        stride = header[GAP_STRIDE] or 1
        gaps_ns, ended_ns = gaps_ns[::stride], ended_ns[::stride]
        while header[GAPS] + len(gaps_ns) > table.shape[1]:
            left = table[:, : header[GAPS] : 2].copy()
            table[:, : left.shape[1]] = left
            header[GAPS], stride = left.shape[1], 2 * stride
            gaps_ns, ended_ns = gaps_ns[::2], ended_ns[::2]
        first, header[GAP_STRIDE] = header[GAPS], stride
        header[GAPS] = first + len(gaps_ns)
        table[0, first : header[GAPS]] = gaps_ns
        table[1, first : header[GAPS]] = ended_ns

    def prefault(self, rows: int) -> None:
        """Touch the first `rows` rows now, so that no page fault falls into the measurement."""
        step = mmap.PAGESIZE // 8
        for name in _TIME_COLUMNS:
            self.times(name)[: min(rows, self.capacity) : step] += 0

    def _int64(self, first_word: int, words: int) -> memoryview:
        return self._view[8 * first_word : 8 * (first_word + words)].cast("q")


def size_bytes(capacity: int, gaps_max: int = 0) -> int:
    """The bytes of memory that columns of `capacity` rows map."""
    columns = len(_TIME_COLUMNS) + (len(_TOKEN_COLUMNS) if gaps_max else 0)
    return 8 * (_HEADER_WORDS + columns * capacity + 2 * gaps_max) + max(capacity, 1)


def new_memory(capacity: int, gaps_max: int = 0) -> int:
    """A file descriptor of fresh zeroed memory for `Columns`; the caller closes it."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("batchtune-samples")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes(capacity, gaps_max))
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
