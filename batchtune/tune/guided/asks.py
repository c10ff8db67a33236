"""What is asked of a cell: which load, and is there time for it?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.tune import policy
from batchtune.tune.guided.state import Insight
from batchtune.tune.strategies.protocol import Outlook
from batchtune.tune.trials.pace import rung_load, times_of
from batchtune.tune.trials.trial import Ask, Source


def ask_of(insight: Insight, at: int, source: Source, reason: str) -> Ask:
    """An ask for a cell."""
    configuration = insight.cells[at].configuration
    return Ask(configuration=configuration, source=source, reason=reason, point=point_of(insight, at))


def point_of(insight: Insight, at: int) -> dict[str, Any] | None:
    """The point of a cell; None outside the space."""
    point = insight.cells[at].point
    return None if point is None else dict(point)


def at_one_rate(outlook: Outlook, ask: Ask, rate_rps: float) -> Ask:
    """The same, at this rate, for as long as a verdict takes."""
    rate_rps, duration_s = rung_load(outlook.pace, outlook.scenario, ask.configuration, rate_rps)
    return replace(ask, rate_rps=rate_rps, duration_s=duration_s)


def at_hoped_rate(outlook: Outlook, insight: Insight, ask: Ask) -> Ask:
    """Of a capacity one rate is tried: what it, or the leader, is expected to take."""
    if outlook.scenario.objective != "capacity":
        return ask
    leader, own = insight.leader(), insight.place(ask.configuration)
    measured = insight.is_measured(insight.cells[leader].configuration)
    if not insight.predicts and not measured:
        return ask
    most_rps = math.inf if own is None else insight.most_rps(own)
    bar_rps = max(math.exp(insight.expected(leader)), min(insight.held_rps(), most_rps))
    hoped_rps = bar_rps if own is None else math.exp(insight.expected(own))
    if measured:
        # A leader that is only believed in sets no bar: it may be wrong, and all would fail at its rate.
        hoped_rps = max(bar_rps, min(hoped_rps, bar_rps * math.exp(policy.STEP_UP[insight.trust])))
    return at_one_rate(outlook, ask, policy.RATE_SHARE * min(hoped_rps, max(most_rps, bar_rps)))


def is_affordable(outlook: Outlook, configuration: Configuration) -> bool:
    """Whether a run of it fits into what is left for the search; of a capacity the rate matters more than the size."""
    if outlook.scenario.objective == "capacity":
        return True
    times = times_of(outlook.pace, outlook.scenario, configuration)
    return times.run_s <= max(outlook.remaining_s(), 0.0)
