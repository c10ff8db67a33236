"""What has been measured so far, and what of an interrupted sweep answers what is asked now?

A strategy is run again from its beginning when a sweep is resumed. Until it asks for something that the interrupted
sweep did not measure, it sees the trials that it saw then and the time that had passed then, so it asks for the same.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence

from batchtune.measure.validity.caveats import HOST_CODES
from batchtune.tune.trials.trial import Ask, Trial

SAME_RATE = 1e-3
"""Rates that differ by less than this share are the same ask: a fit may differ in its last digits."""


class Ledger:
    """The trials in the order in which they were asked for, and the clock: seconds spent, also by the interrupted
    sweep."""

    def __init__(self, finished: Sequence[Trial], now_s: Callable[[], float]) -> None:
        self._finished = sorted(finished, key=_number)
        self._unused = list(self._finished)
        self._replaying = bool(finished)
        self._now_s = now_s
        self._resumed_s = now_s()
        self.trials: list[Trial] = []

    def elapsed_s(self) -> float:
        """Seconds spent: while answering from the interrupted sweep, those that it had spent by then."""
        if self._replaying:
            return spent_s(self.trials)
        return spent_s(self._finished) + self._now_s() - self._resumed_s

    def answer(self, ask: Ask) -> Trial | None:
        """The trial that answers this ask, of those run ahead or by the interrupted sweep, each at most once.

        None ends the replay.
        """
        answer = next((trial for trial in self._unused if is_answer(trial, ask)), None)
        if answer is None:
            self.end_replay()
            return None
        attempts = [answer, *self._repeats_of(answer)]
        self._unused = [trial for trial in self._unused if trial not in attempts]
        if self._replaying:
            self.trials = sorted([*self.trials, *attempts], key=_number)
        return attempts[-1]

    def end_replay(self) -> None:
        """From here on everything of the interrupted sweep is seen, and real time counts."""
        if self._replaying:
            self._replaying = False
            self._resumed_s = self._now_s()
            self.trials = list(self._finished)

    def append(self, trial: Trial) -> None:
        """Take in a trial that was run; it waits for the ask that it answers."""
        self.end_replay()
        insort(self.trials, trial, key=_number)
        self._unused.append(trial)

    def holds(self, ask: Ask) -> bool:
        """Whether there is a trial that answers this ask, and no other has taken it."""
        return any(is_answer(trial, ask) for trial in self._unused)

    def next_number(self) -> int:
        return 1 + max((trial.number for trial in (*self._finished, *self.trials)), default=0)

    def _repeats_of(self, trial: Trial) -> list[Trial]:
        chain = [trial]
        for later in self._unused:
            if later.repeat_of == chain[-1].number:
                chain.append(later)
        return chain[1:]


def _number(trial: Trial) -> int:
    return trial.number


def spent_s(trials: Sequence[Trial]) -> float:
    """What a sweep had spent after these; of a ledger that does not say it what the trials took."""
    known = [trial.elapsed_s for trial in trials if trial.elapsed_s is not None]
    return max(known) if known else sum(trial.seconds for trial in trials)


def measuring_s(trials: Sequence[Trial]) -> float:
    """What these took: on one server their sum, on several nodes at once the time until the last had ended."""
    return spent_s(trials) if any(trial.node for trial in trials) else sum(trial.seconds for trial in trials)


def is_answer(trial: Trial, ask: Ask) -> bool:
    """Whether this trial was run for such an ask: same configuration, source, block, rate, clients, length and node."""
    return (
        trial.repeat_of is None
        and trial.configuration == ask.configuration
        and trial.source == ask.source
        and trial.block == ask.block
        and trial.asked_concurrency == ask.concurrency
        and trial.asked_duration_s == ask.duration_s
        and _same(trial.asked_rate_rps, ask.rate_rps)
        and ask.node in (None, trial.node)
    )


def is_spoilt(trial: Trial) -> bool:
    """Whether host or client spoilt its figures; a search for a capacity repeats its own probes."""
    if trial.measurement is None or trial.probes:
        return False
    if trial.measurement.verdict is None:
        return any(caveat.code in HOST_CODES for caveat in trial.measurement.caveats)
    return trial.measurement.verdict in ("INVALID", "NOISY")


def without_superseded(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that count: of a spoilt one and its repeats the last."""
    superseded = {trial.repeat_of for trial in trials}
    return [trial for trial in trials if trial.number not in superseded]


def _same(rate_rps: float | None, other_rps: float | None) -> bool:
    if rate_rps is None or other_rps is None:
        return rate_rps is other_rps
    return math.isclose(rate_rps, other_rps, rel_tol=SAME_RATE)
