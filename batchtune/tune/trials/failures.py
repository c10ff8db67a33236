"""Finds why batches fail, in the model's own words, and what that means."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from batchtune.load.samples import Samples, Status
from batchtune.plain_values import is_number
from batchtune.target.endpoint import meaning_of
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Trial

# Did a trial fail because its batches were too large for the memory, and from which size on?

_OUT_OF_MEMORY = re.compile(
    r"\bOOM\b|out of memory|bad_alloc|failed to allocate|allocate memory|exited with (?:137|-9)\b"
    r"|no available memory for the cache|not enough memory\b",
    re.IGNORECASE,
)


def out_of_memory(trial: Trial) -> str | None:
    """Return the server's own words for running out of memory, shortened to a line; None when something else failed.

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
    """Return the least max_batch_size that ran out of memory, above all sizes that worked; inf: none did.

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
    """Return the points that ran out of memory, but for those that are no larger than one that worked."""
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
        point.get(name) == value or (is_number(value) and is_number(point.get(name)) and point[name] >= value)
        for name, value in other.items()
    )


def _size(point: Mapping[str, Any]) -> float:
    return math.prod(max(float(value), 1.0) for value in point.values() if is_number(value))


_OVERLOAD: Final = frozenset(
    status.name.lower()
    for status in (Status.UNFINISHED, Status.UNSENT, Status.TIMEOUT, Status.QUEUE_FULL, Status.EXPIRED)
)
"""How requests end at a working server that gets too many of them, as a trial's `error_texts` are keyed."""


def texts_by_class(samples: Samples) -> dict[str, str]:
    """Return the server's error texts by the names under which a measurement counts errors."""
    return {name.lower(): text for name, text in samples.error_texts.items()}


def is_overload(samples: Samples) -> bool:
    """Whether all of a trial's errors are those of a server that gets too many requests."""
    return {name.lower() for name in samples.errors()} <= _OVERLOAD


def unanswered(samples: Samples) -> str:
    """Describe a server that answered no request."""
    classes = ", ".join(f"{count} × {name}" for name, count in samples.errors().items())
    texts = "; ".join(samples.error_texts.values())
    meaning = meaning_of(texts)
    return f"no request was answered: {classes}{': ' + texts if texts else ''}{f' ({meaning})' if meaning else ''}"


def undecodable(samples: Samples) -> str:
    """Describe a server most of whose examined answers cannot be decoded; "" where they can."""
    malformed = min(int((samples.status == Status.MALFORMED).sum()), samples.answers_checked)
    if not malformed or 2 * malformed < samples.answers_checked:
        return ""
    text = samples.error_texts.get(Status.MALFORMED.name, "")
    return f"of {samples.answers_checked} answers that were looked at {malformed} are none: {text}"


def explain_failure(trials: Sequence[Trial]) -> str:
    """Write the error that most of the failed trials have, once, and what it means where that is known; "" without one.

    A trial counts as failed when no request of it worked because of an error of the model or the server, as opposed to
    too much load.
    """
    failed = [trial for trial in trials if trial.state == "failed" or _only_errors(trial)]
    words = Counter(word for word in map(_words, failed) if word)
    if not words:
        return ""
    text, _ = words.most_common(1)[0]
    meaning = next(
        (meaning for trial in failed if _words(trial) == text and (meaning := _meaning(trial))), ""
    )
    return f"{text.rstrip('.')}: {meaning}" if meaning else text


def _only_errors(trial: Trial) -> bool:
    measured = trial.measurement
    return measured is not None and measured.error_ratio > 0.5 and bool(_texts_of_model(trial))


def _texts_of_model(trial: Trial) -> list[str]:
    return [text for status, text in trial.error_texts.items() if status not in _OVERLOAD]


def _words(trial: Trial) -> str:
    """The model's own words in one line, without what a failure says of their meaning.

    The figures of one batch, which differ from trial to trial, stay.
    """
    failure = (trial.failure or "").removesuffix(f" ({_meaning(trial)})")
    texts: Iterable[str] = _texts_of_model(trial) or failure.splitlines()[:1]
    return next((_in_a_line(text) for text in texts if text.strip()), "")


def _in_a_line(text: str) -> str:
    line = " ".join(text.split())
    words_max = 200
    return line if len(line) <= words_max else f"{line[: words_max - 1]}…"


def _meaning(trial: Trial) -> str:
    """Empty where it is not known."""
    meaning = meaning_of("\n".join([*_texts_of_model(trial), trial.failure or ""]))
    return meaning or (meaning_of("out of memory") if out_of_memory(trial) is not None else "")
