"""Why do batches fail, in the model's own words, and what does that mean?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from batchtune.load.samples import Status
from batchtune.tune.memory import out_of_memory
from batchtune.tune.trial import Trial

_WORDS_MAX: Final = 200

_OVERLOAD: Final = frozenset(
    status.name.lower()
    for status in (Status.UNFINISHED, Status.UNSENT, Status.TIMEOUT, Status.QUEUE_FULL, Status.EXPIRED)
)
"""As a trial's `error_texts` are keyed."""

_MEANINGS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (
        re.compile(
            r"Got: \d+ Expected: 1\b|expected: \[1[,\]][^;]*actual: \[\d+|size\(\)\[0\] == 1\b"
            r"|shape\[0\] to be equal to 1\b|shape '\[1, [^']*' is invalid for input of size"
            r"|requested shape:\{1,|Can not cast TensorSpec\(shape=\(\d+,.*\(1,"
        ),
        "the model's batch dimension is fixed at 1; export it open",
    ),
    (
        re.compile(
            r"requested shape has \d+|cannot be reshaped to the requested shape|is invalid for input of size"
            r"|Incompatible shapes"
        ),
        "a shape inside the model is fixed; export it with an open batch dimension",
    ),
    (
        re.compile(r"unsupported type (?:seq|map)\(|zipmap", re.IGNORECASE),
        "the model answers with a sequence of maps; convert it with zipmap=False",
    ),
    (
        re.compile(r"out of data bounds|index out of range|indices\[[\d, ]*\] = -?\d+ is not in"),
        "an input is beyond the model's vocabulary; set request.inputs: {random: {high: ...}} to its size",
    ),
)


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
    meaning = next((meaning for trial in failed if _words(trial) == text for meaning in _meanings(trial)), "")
    return f"{text.rstrip('.')}: {meaning}" if meaning else text


def _only_errors(trial: Trial) -> bool:
    measured = trial.measurement
    return measured is not None and measured.error_ratio > 0.5 and bool(_texts_of_model(trial))


def _texts_of_model(trial: Trial) -> list[str]:
    return [text for status, text in trial.error_texts.items() if status not in _OVERLOAD]


def _words(trial: Trial) -> str:
    """The model's own words in one line; the figures of one batch, which differ from trial to trial, stay."""
    texts: Iterable[str] = _texts_of_model(trial) or (trial.failure or "").splitlines()[:1]
    return next((_in_a_line(text) for text in texts if text.strip()), "")


def _in_a_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WORDS_MAX else f"{line[: _WORDS_MAX - 1]}…"


def _meanings(trial: Trial) -> list[str]:
    texts = "\n".join([*trial.error_texts.values(), trial.failure or ""])
    meanings = [meaning for pattern, meaning in _MEANINGS if pattern.search(texts)]
    if out_of_memory(trial) is not None:
        meanings.append("such batches do not fit in the memory; search smaller max_batch_size")
    return meanings
