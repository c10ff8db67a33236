"""Are the nodes alike? The same two loads on each, at the same time, before anything is tried.

They are the loads that the rule needs: a lone request, and the throughput one by one. The second runs several times.
"""

from __future__ import annotations

from collections.abc import Iterator

from batchtune.tune import policy
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.strategies.references import one_by_one, saturating_clients
from batchtune.tune.strategies.side_by_side import together
from batchtune.tune.trials.trial import Ask


def node_comparison(outlook: Outlook) -> Strategy:
    """A lone client on each node, then blocks of many; nothing where there is one server."""
    if not outlook.nodes:
        return
    yield from together(outlook, list(_asks(outlook, clients=1, block=1)))
    clients = saturating_clients(outlook.pace.lone_s)
    blocks = range(2, 2 + policy.NODE_RUNS)
    yield from together(
        outlook, [ask for block in blocks for ask in _asks(outlook, clients=clients, block=block)]
    )


def _asks(outlook: Outlook, *, clients: int, block: int) -> Iterator[Ask]:
    what = "latency of a lone request" if clients == 1 else "throughput one by one"
    for node in outlook.nodes:
        yield Ask(
            configuration=one_by_one(outlook.scenario),
            source="node",
            reason=f"are the nodes alike? {what} on {node}",
            concurrency=clients,
            duration_s=policy.RULE_PROBE_S,
            block=block,
            node=node,
        )
