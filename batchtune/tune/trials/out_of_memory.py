"""Did a trial fail because its batches were too large for the memory, and from which size on?"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Trial

_OUT_OF_MEMORY = re.compile(
    r"\bOOM\b|out of memory|bad_alloc|failed to allocate|allocate memory|exited with (?:137|-9)\b"
    r"|no available memory for the cache|not enough memory\b",
    re.IGNORECASE,
)


def out_of_memory(trial: Trial) -> str | None:
    """The server's own words, shortened to a line; None when memory is not what failed.

    A server that was killed (137, -9) counts too: nothing else kills one under load. Batches differ in size, so some
    requests may have been answered.
    """
    texts = (*(trial.failure or "").splitlines(), *trial.error_texts.values())
    words_max = 60
    for text in texts:
        match = _OUT_OF_MEMORY.search(text)
        if match is not None:
            return " ".join(text[match.start() :].split())[:words_max]
    return None


def memory_ceiling_rows(trials: Sequence[Trial]) -> float:
    """The least max_batch_size that ran out of memory, above all sizes that worked; inf: none did.

    A trial worked where it was answered and no request ran out of memory.
    """
    sizes = [
        (in_force(trial.configuration, "max_batch_size"), out_of_memory(trial) is not None, trial.state)
        for trial in trials
        if trial.configuration.batching is not None
    ]
    worked = max((size for size, ran_out, state in sizes if not ran_out and state == "complete"), default=0)
    return min((size for size, ran_out, _ in sizes if ran_out and size > worked), default=math.inf)


def points_beyond_memory(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The points that ran out of memory, but for those that are no larger than one that worked."""
    known = [trial for trial in trials if trial.point is not None]
    worked = [trial.point for trial in known if trial.state == "complete" and out_of_memory(trial) is None]
    ran_out = [trial.point for trial in known if out_of_memory(trial) is not None]
    return [
        point
        for point in ran_out
        if point and not any(is_as_large(other, point) for other in worked if other)
    ]


def is_beyond_memory(point: Mapping[str, Any], ran_out: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a point is as large in every knob as one that ran out of memory; once two did, as large in the product.

    Memory is taken by several knobs together, so that the edge is a line: two points on it are learned, no more.
    """
    if len(ran_out) > 1 and _size(point) >= min(map(_size, ran_out)):
        return True
    return any(is_as_large(point, other) for other in ran_out)


def is_as_large(point: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether every number of a point is at least the other's, and all else is equal."""
    return all(
        point.get(name) == value
        or (_is_number(value) and _is_number(point.get(name)) and point[name] >= value)
        for name, value in other.items()
    )


def _size(point: Mapping[str, Any]) -> float:
    return math.prod(max(float(value), 1.0) for value in point.values() if _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
