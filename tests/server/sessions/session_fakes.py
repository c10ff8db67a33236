"""Where the answers to requests of a session arrive, and who hears of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from batchtune.server.sessions.batched import BatchRecord, Completion
from batchtune.wire.status import StatusError

Arrays = dict[str, NDArray[Any]]


class Answer:
    """Where the answer to one request arrives."""

    def __init__(self) -> None:
        self.outputs: Arrays | None = None
        self.error: StatusError | None = None
        self.times = 0

    def __call__(self, outputs: Arrays | None, error: StatusError | None) -> None:
        self.outputs, self.error = outputs, error
        self.times += 1

    @property
    def plain(self) -> dict[str, Any] | str:
        """The outputs as lists, or the code and the message of the error."""
        if self.outputs is None:
            return str(self.error)
        return {name: array.tolist() for name, array in self.outputs.items()}

    @property
    def sums(self) -> Any:
        """The output `sum` alone, or the error."""
        return self.plain if isinstance(self.plain, str) else self.plain["sum"]


class Observer:
    def __init__(self) -> None:
        self.records: list[BatchRecord] = []
        self.rejections: list[str] = []

    def on_batch(self, record: BatchRecord) -> None:
        self.records.append(record)

    def on_rejected(self, reason: str) -> None:
        self.rejections.append(reason)


def deliver(completions: Sequence[Completion]) -> None:
    for done, outputs, error in completions:
        done(outputs, error)
