"""Which row count does a batch of n rows run with, and which of its tasks wait for the next batch instead?

Source: TensorFlow `batch_scheduler_utils.h`. An allowed size list that is empty allows every size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

PAD_UP = "PAD_UP"
BATCH_DOWN = "BATCH_DOWN"
MINIMIZE_TPU_COST_PER_REQUEST = "MINIMIZE_TPU_COST_PER_REQUEST"

_logger = logging.getLogger(__name__)


def next_allowed_size(rows: int, allowed_sizes: Sequence[int]) -> int:
    """The first allowed size that holds `rows`; `rows` itself where there is none."""
    return next((size for size in allowed_sizes if size >= rows), rows)


def previous_allowed_size(rows: int, allowed_sizes: Sequence[int]) -> int:
    """The last allowed size of at most `rows`; `rows` itself where there is none."""
    return next((size for size in reversed(allowed_sizes) if size <= rows), rows)


def size_to_trim_to(
    rows: int, allowed_sizes: Sequence[int], policy: str, mean_cost: Callable[[int], float | None] | None
) -> int:
    """The size that `policy` would cut an open batch of `rows` down to; `rows` where it leaves it alone.

    `mean_cost(size)` is the mean cost of a batch of `size` rows, None while unknown; only
    MINIMIZE_TPU_COST_PER_REQUEST asks for it.
    """
    if policy not in (BATCH_DOWN, MINIMIZE_TPU_COST_PER_REQUEST):
        if policy != PAD_UP:
            _log_once(f"Unsupported batch_padding_policy: {policy}, falling back on the PAD_UP policy.")
        return rows
    up, down = next_allowed_size(rows, allowed_sizes), previous_allowed_size(rows, allowed_sizes)
    if up == rows or down == rows:
        return rows
    if policy == BATCH_DOWN:
        return down
    if mean_cost is None:
        _log_once(
            "MINIMIZE_TPU_COST_PER_REQUEST batch padding policy has been chosen but no ModelBatchStats passed to "
            "the batch scheduler; will fall back on the PAD_UP policy."
        )
        return rows
    up_cost, down_cost = mean_cost(up), mean_cost(down)
    if up_cost is None or down_cost is None or up_cost / rows < down_cost / down:
        return rows
    return down


def tasks_within(sizes: Sequence[int], rows: int) -> int | None:
    """How many leading tasks have exactly `rows` rows together; None where only splitting a task would do."""
    total = 0
    for index, size in enumerate(sizes):
        if total + size > rows:
            return index if total == rows else None
        total += size
    return len(sizes) if total == rows else None


@cache
def _log_once(message: str) -> None:
    _logger.error(message)
