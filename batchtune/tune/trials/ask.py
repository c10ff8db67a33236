"""Which trial does a strategy ask for next, and what does its run take?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.trials.pace import Pace, times_of
from batchtune.tune.trials.trial import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A trial that a strategy wants, with its reason in words.

    `rate_rps`, `concurrency` (a closed loop of so many clients) and `duration_s` (the measured part) replace the
    scenario's; with `rate_rps` a capacity is not searched but this one rate measured. `hint_rps` is where a search for
    the capacity begins. `block` numbers runs made side by side under one seed. `expected` says in words what it is
    believed to give before it is run; "": nothing is. `node` is that of several on which it is to run; None: on any.
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
    expected: str = ""
    node: str | None = None


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
