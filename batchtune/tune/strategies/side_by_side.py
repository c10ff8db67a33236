"""What may be asked for at once, where there are several nodes to run it?

A strategy asks for one trial after another, and learns what came of each before it asks on. Of trials that it wants
whatever comes of the others it says so ahead, and gets the answers when it asks. With one server nothing changes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from batchtune.tune import policy
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.trials.trial import Ask, Trial


def together(
    outlook: Outlook, asks: Sequence[Ask], *, later: Sequence[Ask] = ()
) -> Generator[Ask, Trial, list[Trial]]:
    """Ask for all of these; their trials, in this order.

    `later` is asked for afterwards in any case: as much of it runs beside them as there are nodes with nothing to do.
    """
    idle = -len(asks) % max(len(outlook.nodes), 1)
    outlook.ahead([*asks, *later[:idle]])
    trials: list[Trial] = []
    for ask in asks:
        trials += [(yield ask)]
    return trials


def after(ask: Ask, asks: Sequence[Ask]) -> list[Ask]:
    """What comes after this one of those told ahead; none where it is not among them. What is expected may differ."""
    alike = [replace(later, expected=ask.expected) for later in asks]
    return list(asks[alike.index(ask) + 1 :]) if ask in alike else []


def in_step(outlook: Outlook, strategies: Sequence[Strategy]) -> Strategy:
    """Strategies of which none waits for another: what each asks for next together, until all have ended.

    With one server each is run to its end before the next is begun.
    """
    if not outlook.nodes:
        for strategy in strategies:
            yield from strategy
        return
    begun = [(strategy, next(strategy, None)) for strategy in strategies]
    under_way = [(strategy, ask) for strategy, ask in begun if ask is not None]
    try:
        while under_way:
            trials = yield from together(outlook, [ask for _, ask in under_way])
            following = [
                (strategy, _following(strategy, trial))
                for (strategy, _), trial in zip(under_way, trials, strict=True)
            ]
            under_way = [(strategy, ask) for strategy, ask in following if ask is not None]
    finally:
        for strategy in strategies:
            strategy.close()


def blocks_at_once(outlook: Outlook) -> int:
    """Blocks of fresh runs that are run at once, each on a node of its own."""
    return max(1, min(len(outlook.nodes), policy.CONFIRMATIONS))


def _following(strategy: Strategy, trial: Trial) -> Ask | None:
    try:
        return strategy.send(trial)
    except StopIteration:
        return None
