"""What the trials of a run took, and which of an older run count."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.tune.trials.trial import Trial


def spent_s(trials: Sequence[Trial]) -> float:
    """What a sweep had spent after these; of a ledger that does not say it what the trials took."""
    known = [trial.elapsed_s for trial in trials if trial.elapsed_s is not None]
    return max(known) if known else sum(trial.seconds for trial in trials)


def measuring_s(trials: Sequence[Trial]) -> float:
    """What these took: on one server their sum, on several nodes at once the time until the last had ended."""
    return spent_s(trials) if any(trial.node for trial in trials) else sum(trial.seconds for trial in trials)


def without_superseded(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that count: of one that was repeated and its repeats the last."""
    superseded = {trial.repeat_of for trial in trials}
    return [trial for trial in trials if trial.number not in superseded]
