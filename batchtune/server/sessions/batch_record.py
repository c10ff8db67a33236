"""What is told of each batch, and of each request that never got into one?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from batchtune.server.scheduling.batch_queue import CloseReason


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One batch that was run.

    rows: without padding. task_rows, queue_wait_micros: one entry per task, in order. execution_micros: the model's
    run alone. error_code: gRPC's name where the run failed. sent_elements, padding_elements: of the inputs that may
    differ in length, what the requests brought and what fills them up to the batch's longest, without the rows that
    only fill up the batch. bucket: the length bucket; "" without buckets.
    """

    rows: int
    padded_rows: int
    tasks: int
    task_rows: Sequence[int]
    input_tensors: int
    close_reason: CloseReason
    queue_wait_micros: Sequence[int]
    execution_micros: float
    error_code: str | None
    sent_elements: int = 0
    padding_elements: int = 0
    bucket: str = ""


class BatchObserver(Protocol):
    def on_batch(self, record: BatchRecord) -> None:
        """One batch has been run; called on its batch thread, which is not running a model meanwhile."""

    def on_rejected(self, reason: str) -> None:
        """One request was refused: queue_full, too_large; or dropped: expired."""
