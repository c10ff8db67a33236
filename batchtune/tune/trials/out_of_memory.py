"""Did a trial fail because its batches were too large for the memory, and from which size on?"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Trial

_WORDS_MAX = 60
_OUT_OF_MEMORY = re.compile(
    r"\bOOM\b|out of memory|bad_alloc|failed to allocate|allocate memory|exited with (?:137|-9)\b",
    re.IGNORECASE,
)


def out_of_memory(trial: Trial) -> str | None:
    """The server's own words, shortened to a line; None when memory is not what failed.

    A server that was killed (137, -9) counts too: nothing else kills one under load. Batches differ in size, so some
    requests may have been answered.
    """
    texts = (*(trial.failure or "").splitlines(), *trial.error_texts.values())
    for text in texts:
        match = _OUT_OF_MEMORY.search(text)
        if match is not None:
            return " ".join(text[match.start() :].split())[:_WORDS_MAX]
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
