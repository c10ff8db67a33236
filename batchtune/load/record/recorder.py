"""How does a request end: which outcome is stored, and which words of the server are kept for each kind of failure?"""

from __future__ import annotations

import time
from typing import Final

from batchtune.load.record.columns import ENDED, PENDING, Columns
from batchtune.load.record.samples import Status

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
