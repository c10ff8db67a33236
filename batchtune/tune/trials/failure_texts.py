"""Why do batches fail, in the model's own words, and what does that mean?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from batchtune.load.record.samples import Samples, Status
from batchtune.target.endpoint import OUT_OF_MEMORY, meaning_of
from batchtune.tune.trials.out_of_memory import out_of_memory
from batchtune.tune.trials.trial import Trial

_OVERLOAD: Final = frozenset(
    status.name.lower()
    for status in (Status.UNFINISHED, Status.UNSENT, Status.TIMEOUT, Status.QUEUE_FULL, Status.EXPIRED)
)
"""How requests end at a working server that gets too many of them, as a trial's `error_texts` are keyed."""


def texts_by_class(samples: Samples) -> dict[str, str]:
    """The server's words under the names that a measurement counts errors by."""
    return {name.lower(): text for name, text in samples.error_texts.items()}


def is_overload(samples: Samples) -> bool:
    """Whether its errors are none but those of a server that gets too many requests."""
    return {name.lower() for name in samples.errors()} <= _OVERLOAD


def unanswered(samples: Samples) -> str:
    """What to say of a server that answered no request."""
    classes = ", ".join(f"{count} × {name}" for name, count in samples.errors().items())
    texts = "; ".join(samples.error_texts.values())
    meaning = meaning_of(texts)
    return f"no request was answered: {classes}{': ' + texts if texts else ''}{f' ({meaning})' if meaning else ''}"


def undecodable(samples: Samples) -> str:
    """What to say of a server most of whose answers, of those that were looked at, are none; empty: they are."""
    malformed = min(int((samples.status == Status.MALFORMED).sum()), samples.answers_checked)
    if not malformed or 2 * malformed < samples.answers_checked:
        return ""
    text = samples.error_texts.get(Status.MALFORMED.name, "")
    return f"of {samples.answers_checked} answers that were looked at {malformed} are none: {text}"


def explain_failure(trials: Sequence[Trial]) -> str:
    """The error that most of the failed trials carry, once, and what it means where that is known; "" without one.

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
    return meaning or (OUT_OF_MEMORY if out_of_memory(trial) is not None else "")
