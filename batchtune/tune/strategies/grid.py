"""In which order is every point of a space measured, several times?

In blocks: each holds every point once, in an order drawn anew. What drifts on a machine, its clock, its neighbours,
then falls on all points alike, and a point's runs lie a block apart; the spread between them is that of the machine and
not of one moment. A search that is cut short has measured every point equally often, to one run.
"""

from __future__ import annotations

import random

from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.strategies.side_by_side import together
from batchtune.tune.trials.trial import Ask


def grid_strategy(outlook: Outlook) -> Strategy:
    """Every point of the space once a block, `search.repeats` blocks, as far as time and trials allow.

    A configuration that failed is not measured again, nor is one whose size ran out of memory. Points that mean one
    configuration are one.
    """
    search = outlook.scenario.search
    configurations = {
        configuration: point
        for point in reversed(list(outlook.space.points()))
        if (configuration := outlook.space.configuration(point)) is not None
    }
    order = random.Random(search.seed)
    left = list(configurations.items())
    for block in range(1, search.repeats + 1):
        order.shuffle(left)
        failed = set()
        asks = [
            Ask(
                configuration=configuration,
                source="grid",
                reason=f"the grid: block {block} of {search.repeats}, turn {turn} of {len(left)} in random order",
                point=point,
                block=block,
            )
            for turn, (configuration, point) in enumerate(left, start=1)
        ]
        while asks:
            at_once: list[Ask] = []
            while asks and len(at_once) < max(len(outlook.nodes), 1):
                ask = asks.pop(0)
                if outlook.space.is_barred(ask.configuration):
                    continue
                if not outlook.may_propose(beside=len(at_once)):
                    return
                at_once.append(ask)
            trials = yield from together(outlook, at_once)
            failed |= {trial.configuration for trial in trials if trial.state == "failed"}
        left = [(tried, point) for tried, point in left if tried not in failed]
