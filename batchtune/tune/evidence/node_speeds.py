"""How alike are the nodes on which trials run at once?

The same load runs on all of them at the same time, several times. What a node answers, relative to the others of its
block, is its speed; the rest is noise between runs. Speeds that differ by no more than noise are taken to be equal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.measure.statistics.distributions import t_quantile
from batchtune.scenario.units import counted, percentage
from batchtune.tune import policy
from batchtune.tune.trials.ledger import without_superseded
from batchtune.tune.trials.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpeeds:
    """`measured` maps a node to its speed over the geometric mean of all; `speeds` is what is made of that: drawn
    towards 1 as far as noise explains the differences. `runs` were made on each; `half_width` is half the 95 %
    interval of a measured speed, in logs.
    """

    measured: Mapping[str, float]
    speeds: Mapping[str, float]
    runs: int
    half_width: float

    @property
    def spread(self) -> float:
        """The fastest over the slowest, less one, as measured."""
        return max(self.measured.values()) / min(self.measured.values()) - 1.0

    def text(self) -> str:
        """How alike they are, in words."""
        compared = (
            f"{counted(len(self.measured), 'node')} under the same load, {counted(self.runs, 'run')} on each"
        )
        slowest, fastest = (choose(self.measured, key=self.measured.__getitem__) for choose in (min, max))
        faster = f"{percentage(self.spread, 1)} faster than the slowest ({slowest})"
        apart = f"{compared}: the fastest ({fastest}) is {faster}"
        sure = f"each known to ± {percentage(self.half_width, 1)}"
        removed = max(abs(math.log(speed)) for speed in self.speeds.values())
        if removed < policy.NODES_ALIKE:
            return f"{apart}, {sure}: no more than noise, they count as alike"
        text = f"{apart}, {sure}: figures of the search are divided by the speed of their node"
        if self.spread > policy.NODES_UNLIKE:
            text = f"{text}; nodes so different may want different parameters"
        return text


def node_speeds(trials: Sequence[Trial]) -> NodeSpeeds | None:
    """The speeds by the blocks of the comparison that ran on all nodes; None without two nodes and a block."""
    by_block: dict[int, dict[str, float]] = defaultdict(dict)
    nodes: dict[str, None] = {}
    for trial in without_superseded(trials):
        if (
            trial.source != "node"
            or trial.asked_concurrency == 1
            or trial.node is None
            or trial.measurement is None
        ):
            continue
        rate_rps = trial.measurement.throughput_rps.value
        if trial.state == "complete" and rate_rps > 0.0:
            nodes[trial.node] = None
            by_block[trial.block or 0][trial.node] = math.log(rate_rps)
    whole = [values for values in by_block.values() if values.keys() == nodes.keys()]
    if len(nodes) < 2 or not whole:
        return None
    rates = np.array([[values[node] for node in nodes] for values in whole])
    return _read(list(nodes), rates - rates.mean(axis=1, keepdims=True))


def _read(nodes: Sequence[str], ahead: np.ndarray) -> NodeSpeeds:
    """`ahead`: log rate over the mean of its block, shape (blocks, nodes)."""
    blocks, count = ahead.shape
    effects = ahead.mean(axis=0)
    degrees = policy.PRIOR_DEGREES + (blocks - 1) * (count - 1)
    squares = policy.PRIOR_DEGREES * policy.THROUGHPUT_PRIOR_SD**2 + float(np.square(ahead - effects).sum())
    error = squares / degrees / blocks
    between = max(0.0, float(effects @ effects) / (count - 1) - error)
    kept = between / (between + error)
    return NodeSpeeds(
        measured={node: math.exp(effect) for node, effect in zip(nodes, effects.tolist(), strict=True)},
        speeds={node: math.exp(kept * effect) for node, effect in zip(nodes, effects.tolist(), strict=True)},
        runs=blocks,
        half_width=t_quantile(0.975, degrees) * math.sqrt(error * (1.0 - 1.0 / count)),
    )
