"""Length buckets: the boundaries that the bundled server's `--length_buckets` takes.

TensorFlow Serving has one queue for each signature, whatever the length of its requests; with buckets there is one for
each range of lengths.

The cost of a batch is its rows times its longest request, in a bucket with full batches about rows times boundary. So
the best boundaries are those with which the requests, each padded to the boundary above it, have the fewest elements:
`boundaries_for` finds them by an exact dynamic programme over a histogram of lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

from batchtune.errors import BatchingParametersError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTH_BUCKETS: Final = "length_buckets"
NO_BUCKETS: Final = "none"
AUTO_BUCKETS: Final = "auto"

Boundaries = tuple[int, ...] | Literal["auto"]
"""Lengths in rising order, () for one queue; or "auto": the server chooses them by the lengths of its requests."""

BUCKETS_MOST: Final = 6
"""Most queues that are chosen automatically. One more saves padding, but its batches fill later: over twenty
distributions of lengths 4, 6, 8 and 12 queues lose 5.0, 4.1, 4.1 and 4.7 % to the best of twenty sets of boundaries
(tests/benchmarks/replay/bucket_search.py --auto)."""

PAYS_FROM: Final = 0.05
"""More queues, or other boundaries, must save this share of the elements computed: chance alone saves 1 to 3 %."""


BUCKETS_MAX: Final = 64
"""Most boundaries: every signature gets a queue for each, and a batch thread looks at the queues in turn."""


def parse_length_buckets(given: object) -> Boundaries:
    """Read boundaries from "32,64,128", a list or a single length; "none", "" and () become (), "auto" stays "auto".

    Raises:
        BatchingParametersError: anything else, boundaries that do not rise, or too many.
    """
    if isinstance(given, str) and given.strip() == AUTO_BUCKETS:
        return AUTO_BUCKETS
    if isinstance(given, str):
        given = [] if given.strip() in ("", NO_BUCKETS) else given.split(",")
    elif isinstance(given, int):
        given = [given]
    if not isinstance(given, list | tuple) or any(isinstance(length, bool | float) for length in given):
        raise _not_lengths(given)
    try:
        boundaries = tuple(int(length) for length in given)
    except (TypeError, ValueError) as error:
        raise _not_lengths(",".join(map(str, given))) from error
    _check(boundaries)
    return boundaries


def format_length_buckets(boundaries: Boundaries) -> str:
    """Write boundaries as the flag `--length_buckets` takes them; () as "none"."""
    if boundaries == AUTO_BUCKETS:
        return AUTO_BUCKETS
    return ",".join(map(str, boundaries)) or NO_BUCKETS


def rounded_up(length: int) -> int:
    """Round a length up to the end of its histogram bin: exact to 32, then 16 bins an octave."""
    exact_to = 32
    if length <= exact_to:
        return max(length, 1)
    bins_per_octave = 16
    step = 1 << ((length - 1).bit_length() - bins_per_octave.bit_length())
    return -(-length // step) * step


def boundaries_for(rows_by_length: Mapping[int, int], most: int = BUCKETS_MOST) -> tuple[int, ...]:
    """Choose the boundaries of at most `most` length buckets with the fewest elements, padding included, for
    these requests.

    `rows_by_length`: length -> rows. Fewer buckets are chosen where more would save at most PAYS_FROM of the
    elements. The last bucket takes what is longer than the last boundary, so n buckets have n - 1 boundaries;
    () for one bucket.
    """
    import numpy as np

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


def _check(boundaries: tuple[int, ...]) -> None:
    if any(length < 1 for length in boundaries):
        raise BatchingParametersError(f"{LENGTH_BUCKETS} entries must be positive; was {min(boundaries)}")
    length_max = 2**31 - 1
    if any(length > length_max for length in boundaries):
        raise BatchingParametersError(f"{LENGTH_BUCKETS} entries must be {length_max} at most")
    if any(later <= earlier for earlier, later in pairwise(boundaries)):
        raise BatchingParametersError(
            f"{LENGTH_BUCKETS} entries must be monotonically increasing; was {format_length_buckets(boundaries)}",
            hint="list each length once, the shortest first, such as 32,64,128",
        )
    if len(boundaries) > BUCKETS_MAX:
        raise BatchingParametersError(f"{LENGTH_BUCKETS}: {len(boundaries)} are more than {BUCKETS_MAX}")


def _not_lengths(given: object) -> BatchingParametersError:
    return BatchingParametersError(
        f"{LENGTH_BUCKETS} must be lengths such as 32,64,128, {AUTO_BUCKETS} or {NO_BUCKETS}; was {str(given)[:100]!r}"
    )


def _traced(ends: NDArray[Any], lengths: NDArray[Any]) -> tuple[int, ...]:
    last, boundaries = len(lengths) - 1, []
    for of_queue in ends[::-1]:
        last = int(of_queue[last])
        boundaries.append(int(lengths[last]))
    return tuple(reversed(boundaries))
