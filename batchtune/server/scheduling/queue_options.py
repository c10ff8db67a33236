"""What can be asked of a queue? TF Serving's options with its defaults, checks and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from batchtune.wire.status import invalid_argument


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """TF Serving's options of a queue, with its defaults.

    max_batch_size: most rows of one task, and of a batch unless splitting is on.
    batch_timeout_micros: from the first task of the open batch; 0 means as soon as a thread is free.
    max_enqueued_batches: waiting batches, the open one included; 0 is taken as 1 where splitting is off.
    max_execution_batch_size: most rows of a batch when splitting is on (None: max_batch_size); else ignored.
    """

    max_batch_size: int = 1000
    batch_timeout_micros: int = 0
    max_enqueued_batches: int = 10
    enable_large_batch_splitting: bool = False
    max_execution_batch_size: int | None = None
    allowed_batch_sizes: tuple[int, ...] = ()

    @property
    def batch_size_limit(self) -> int:
        """Most rows of an executed batch."""
        if self.enable_large_batch_splitting and self.max_execution_batch_size is not None:
            return self.max_execution_batch_size
        return self.max_batch_size

    def validate(self) -> None:
        """Raise INVALID_ARGUMENT with the texts of `SharedBatchScheduler::AddQueue`."""
        if self.max_batch_size < 1:
            raise invalid_argument(f"input_batch_size_limit must be positive; was {self.max_batch_size}")
        if self.batch_timeout_micros < 0:
            raise invalid_argument(
                f"batch_timeout_micros must be non-negative; was {self.batch_timeout_micros}"
            )
        if self.max_enqueued_batches < (1 if self.enable_large_batch_splitting else 0):
            raise invalid_argument(f"max_enqueued_batches must be positive; was {self.max_enqueued_batches}")
        if self.batch_size_limit < 1:
            raise invalid_argument(f"max_execution_batch_size must be positive; was {self.batch_size_limit}")
        if self.max_batch_size < self.batch_size_limit:
            raise invalid_argument(
                "When enable_large_batch_splitting is true, input_batch_size_limit must be greater than or equal to "
                f"max_execution_batch_size.1{self.max_batch_size}{self.batch_size_limit}"
            )


def split_sizes(size: int, open_slot: int, limit: int) -> list[int]:
    """Rows of each part of a task: fill the open batch, then full batches, then the rest.

    Source: `InputSplitMetadata`.
    """
    sizes = [min(size, open_slot)] if open_slot > 0 else []
    rest = size - sum(sizes)
    sizes += [limit] * (rest // limit)
    if rest % limit or not sizes:
        sizes.append(rest % limit)
    return sizes


def next_allowed_size(rows: int, allowed_sizes: Sequence[int]) -> int:
    """The rows that a batch of `rows` runs with: the first allowed size that holds them, else `rows` itself."""
    return next((size for size in allowed_sizes if size >= rows), rows)


def check_allowed_sizes(options: QueueOptions) -> None:
    """Raise INVALID_ARGUMENT unless the allowed sizes increase up to max_batch_size, splitting or not.

    Source: `WrapSessionForBatching` of the model server, and TensorFlow's text for the order it does not check.
    """
    sizes = options.allowed_batch_sizes
    if not sizes:
        return
    if any(later <= earlier for earlier, later in pairwise(sizes)):
        raise invalid_argument("allowed_batch_sizes entries must be monotonically increasing")
    if sizes[-1] != options.max_batch_size:
        raise invalid_argument(
            "Last entry in allowed_batch_sizes must match max_batch_size; last entry was "
            f"{sizes[-1]}; expected {options.max_batch_size}"
        )
