"""What does a search strategy ask for next, and what may it look at?

A strategy is a coroutine: it yields an `Ask` and is sent the trial that came of it. It never runs anything itself, so
the same strategy drives a server, a recorded table and a simulator.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from batchtune.batching import Configuration
from batchtune.scenario.spec import Scenario
from batchtune.tune.pace import Pace, times_of
from batchtune.tune.space import Space
from batchtune.tune.trial import Source, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A trial that a strategy wants, with its reason in words.

    `rate_rps`, `concurrency` (a closed loop of so many clients) and `duration_s` (the measured part) replace the
    scenario's; with `rate_rps` a capacity is not searched but this one rate measured. `hint_rps` is where a search for
    the capacity begins. `block` numbers runs made side by side under one seed.
    """

    configuration: Configuration
    source: Source
    reason: str
    point: dict[str, Any] | None = None
    block: int | None = None
    rate_rps: float | None = None
    concurrency: int | None = None
    duration_s: float | None = None
    hint_rps: float | None = None


def run_s(ask: Ask, pace: Pace, scenario: Scenario) -> float:
    """What the run of an ask takes on a server of this pace, in seconds."""
    times = times_of(
        pace,
        scenario,
        ask.configuration,
        clients=ask.concurrency,
        rate_rps=ask.rate_rps,
        short_s=ask.duration_s,
    )
    return times.run_s


Strategy: TypeAlias = Generator[Ask, Trial, None]


class Outlook(Protocol):
    """What a strategy sees of the sweep while it runs."""

    @property
    def scenario(self) -> Scenario: ...

    @property
    def space(self) -> Space: ...

    @property
    def trials(self) -> Sequence[Trial]:
        """The ledger: every trial so far, in order."""
        ...

    @property
    def pace(self) -> Pace:
        """How fast the server is, by the trials so far."""
        ...

    def may_propose(self, seconds: float | None = None) -> bool:
        """Whether there is time for one more trial of so many seconds (None: a usual one) and for the confirmations."""
        ...

    def remaining_s(self) -> float:
        """Seconds of the budget that are left for the search, confirmations set aside; inf without a limit."""
        ...

    def left_s(self) -> float:
        """Seconds of the budget that are left for everything; inf without a limit."""
        ...

    def fresh_run_s(self) -> float:
        """What one fresh run for confirmation takes."""
        ...

    def thinking(self, text: str) -> None:
        """Say what goes on before the next trial, when it may take over a second."""
        ...
