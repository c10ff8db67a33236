"""What is a search strategy, and what may it look at?

A strategy is a coroutine: it yields an `Ask` and is sent the trial that came of it. It never runs anything itself, so
the same strategy drives a server, a recorded table and a simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeAlias

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.trials.pace import Pace
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import Ask, Trial

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

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes that run trials at once, one each; empty where there is one server."""
        ...

    def may_propose(self, seconds: float | None = None, *, beside: int = 0) -> bool:
        """Whether there is time for one more trial of so many seconds (None: a usual one) and for the confirmations.

        `beside`: so many were decided on, and not asked for yet.
        """
        ...

    def ahead(self, asks: Sequence[Ask]) -> None:
        """Tell that all of these will be asked for in this order, whatever comes of each: nodes run them at once."""
        ...

    def remaining_s(self) -> float:
        """Seconds of the budget that are left for the search, confirmations set aside; inf without a limit."""
        ...

    def left_s(self) -> float:
        """Seconds of the budget that are left for everything; inf without a limit."""
        ...

    def fresh_run_s(self) -> float:
        """What one fresh run for confirmation takes; of several that run at once its share of the time."""
        ...

    def at_end(self, conclude: Callable[[], None]) -> None:
        """Call this when the sweep ends, however it ends: to bring findings up to date with the fresh runs."""
        ...

    def thinking(self, text: str) -> None:
        """Say what goes on before the next trial, when it may take over a second."""
        ...
