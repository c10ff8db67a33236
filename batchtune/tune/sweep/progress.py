"""What can be seen of a sweep while it runs?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from batchtune.load.live import LiveAggregate
from batchtune.tune.bench import Plan
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.trial import Source, Trial

_PHASES: dict[Source, str] = {
    "probe": "scouting",
    "node": "scouting",
    "calibration": "scouting",
    "confirm": "confirming",
}

PHASES: Final = ("scouting", "comparing", "confirming")
"""In the order in which a sweep comes to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """Where a sweep stands. `plan` is that of the trial in flight, `best` leads so far.

    `trials_max` is None when only time limits the sweep, `budget_s` when only trials do.
    """

    phase: str
    plan: Plan
    elapsed_s: float
    budget_s: float | None
    trials_done: int
    trials_max: int | None
    best: Trial | None
    live: LiveAggregate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Who is told: `on_progress` a few times a second during a trial, `on_thinking` what goes on between two trials,
    `on_plan` once, what the budget can do, as soon as that is known, `on_summary` once, when the sweep ends, however it
    ends."""

    on_progress: Callable[[SweepProgress], None] = lambda _progress: None
    on_thinking: Callable[[str], None] = lambda _text: None
    on_plan: Callable[[str], None] = lambda _text: None
    on_summary: Callable[[SearchSummary], None] = lambda _summary: None


NOBODY = Watcher()


def phase_of(source: Source) -> str:
    """The phase of a sweep in which such trials are run."""
    return _PHASES.get(source, "comparing")
