"""Which lengths share a batching queue? The boundaries that the bundled server's `--length_buckets` takes.

TensorFlow Serving has one queue a signature, whatever the length of its requests.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, Literal

from batchtune.errors import BatchingParametersError

LENGTH_BUCKETS: Final = "length_buckets"
NO_BUCKETS: Final = "none"
AUTO_BUCKETS: Final = "auto"

Boundaries = tuple[int, ...] | Literal["auto"]
"""Lengths, rising; none for one queue; or what the server makes of the lengths that come."""

BUCKETS_MAX: Final = 64
"""Every signature gets a queue for each; a batch thread asks them in turn."""


def parse_length_buckets(given: object) -> Boundaries:
    """Rising boundaries from `32,64,128`, a list or a single length; "none", "" and () give none, "auto" itself.

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
    """As the flag takes them; "none" for none."""
    if boundaries == AUTO_BUCKETS:
        return AUTO_BUCKETS
    return ",".join(map(str, boundaries)) or NO_BUCKETS


def _check(boundaries: tuple[int, ...]) -> None:
    if any(length < 1 for length in boundaries):
        raise BatchingParametersError(f"{LENGTH_BUCKETS} entries must be positive; was {min(boundaries)}")
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
