"""Did a trial fail because its batches were too large for the memory?"""

from __future__ import annotations

import re

from batchtune.tune.trial import Trial

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
        found = _OUT_OF_MEMORY.search(text)
        if found is not None:
            return " ".join(text[found.start() :].split())[:_WORDS_MAX]
    return None
