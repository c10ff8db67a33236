"""Finds why trials failed: from which batch size on memory ran out, and what the server's error text means."""

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
from batchtune.units import percentage

# Did a trial fail because its batches were too large for the memory, and from which size on?

_OUT_OF_MEMORY = re.compile(
    r"\bOOM\b|out of memory|bad_alloc|failed to allocate|allocate memory|exited with (?:137|-9)\b"
    r"|no available memory for the cache|not enough memory\b",
    re.IGNORECASE,
)


def out_of_memory(trial: Trial) -> str | None:
    """Return the part of a trial's error texts that says that memory ran out, in one line of at most 60 characters.

    "exited with 137" or "-9" counts too: under load nothing but a lack of memory kills a server. A trial that answered
    other requests may have such a text, since batches differ in size. None: no text says so.
    """
    texts = (*(trial.failure or "").splitlines(), *trial.error_texts.values())
    words_max = 60
    for text in texts:
        match = _OUT_OF_MEMORY.search(text)
        if match is not None:
            return " ".join(text[match.start() :].split())[:words_max]
    return None


def memory_ceiling_rows(trials: Sequence[Trial]) -> float:
    """Return the least max_batch_size that ran out of memory and is above all sizes that worked; inf: there is none.

    A size worked where a complete trial with it has no error that says that memory ran out.
    """
    sizes = [
        (in_force(trial.configuration, "max_batch_size"), out_of_memory(trial) is not None, trial.state)
        for trial in trials
        if trial.configuration.batching is not None
    ]
    worked = max((size for size, ran_out, state in sizes if not ran_out and state == "complete"), default=0)
    return min((size for size, ran_out, _ in sizes if ran_out and size > worked), default=math.inf)


def points_beyond_memory(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return the points (parameter -> value) that ran out of memory, without those that a point which worked equals or
    exceeds (`is_as_large`)."""
    known = [trial for trial in trials if trial.point is not None]
    worked = [trial.point for trial in known if trial.state == "complete" and out_of_memory(trial) is None]
    ran_out = [trial.point for trial in known if out_of_memory(trial) is not None]
    return [
        point
        for point in ran_out
        if point and not any(is_as_large(other, point) for other in worked if other)
    ]


def is_beyond_memory(point: Mapping[str, Any], ran_out: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a point would run out of memory, judged by the points `ran_out` that did.

    It would if each of its numbers is at least that of one such point. With two such points or more, also if
    the product of its numbers is at least their least product: several parameters take memory together (batch
    size times threads), so that two points on the edge are enough.
    """
    if len(ran_out) > 1 and _size(point) >= min(map(_size, ran_out)):
        return True
    return any(is_as_large(point, other) for other in ran_out)


def is_as_large(point: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether every number of `point` is at least that of `other`, and every value that is no number is equal."""
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
"""Classes of error, as in the keys of a trial's `error_texts`, of a working server that gets too many requests."""


def texts_by_class(samples: Samples) -> dict[str, str]:
    """Return class of error -> one error text of the server; classes are named as in `Measurement.errors`."""
    return {name.lower(): text for name, text in samples.error_texts.items()}


def is_overload(samples: Samples) -> bool:
    """Whether every error is one of a working server that gets too many requests; True without errors."""
    return {name.lower() for name in samples.errors()} <= _OVERLOAD


def unanswered(samples: Samples) -> str:
    """Return the failure of a trial in which no request was answered: counts by class, the server's texts, and what
    they mean where that is known."""
    classes = ", ".join(f"{count} × {name}" for name, count in samples.errors().items())
    texts = "; ".join(samples.error_texts.values())
    meaning = meaning_of(texts)
    return f"no request was answered: {classes}{': ' + texts if texts else ''}{f' ({meaning})' if meaning else ''}"


def undecodable(samples: Samples) -> str:
    """Return the failure of a trial in which at least half of the answers that were checked cannot be decoded; ""
    otherwise."""
    malformed = min(int((samples.status == Status.MALFORMED).sum()), samples.answers_checked)
    if not malformed or 2 * malformed < samples.answers_checked:
        return ""
    text = samples.error_texts.get(Status.MALFORMED.name, "")
    return f"of {samples.answers_checked} answers that were looked at {malformed} are none: {text}"


def explain_failure(trials: Sequence[Trial]) -> str:
    """Return the error text that most of the failed trials have, with its explanation where that is known;
    "": no trial has one.

    A complete trial counts as failed too when more than half of its requests failed and at least one by an
    error of the model or the server rather than by too much load.
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


def commonest_error(trial: Trial) -> str:
    """Return what the most frequent error of a measured trial with a text says, in one line of at most 90 characters,
    and its share of all requests: `(20 % of all) by HTTP 503: busy`; "" where no error has a text."""
    measured = trial.measurement
    counts = {} if measured is None else measured.errors
    text_max_chars = 90
    for name, count in counts.items():
        if measured is not None and trial.error_texts.get(name):
            share = percentage(measured.error_ratio * count / sum(counts.values()))
            return f"({share} of all) by {_in_a_line(trial.error_texts[name], text_max_chars)}"
    return ""


def _only_errors(trial: Trial) -> bool:
    measured = trial.measurement
    return measured is not None and measured.error_ratio > 0.5 and bool(_texts_of_model(trial))


def _texts_of_model(trial: Trial) -> list[str]:
    return [text for status, text in trial.error_texts.items() if status not in _OVERLOAD]


def _words(trial: Trial) -> str:
    """First error text of the model or the server, else the first line of the trial's failure; "" without any.

    In one line of at most 200 characters, without the meaning that `unanswered` appends in brackets.
    """
    failure = (trial.failure or "").removesuffix(f" ({_meaning(trial)})").replace("; its last words:", "", 1)
    texts: Iterable[str] = _texts_of_model(trial) or failure.splitlines()[:1]
    return next((_in_a_line(text) for text in texts if text.strip()), "")


def _in_a_line(text: str, max_chars: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= max_chars else f"{line[: max_chars - 1]}…"


def _meaning(trial: Trial) -> str:
    """What a trial's error texts mean, from the table of known errors; "" where that is unknown."""
    meaning = meaning_of("\n".join([*_texts_of_model(trial), trial.failure or ""]))
    return meaning or (meaning_of("out of memory") if out_of_memory(trial) is not None else "")
