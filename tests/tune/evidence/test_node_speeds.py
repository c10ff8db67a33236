"""How alike nodes are, by the same load on all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchtune.tune.evidence.node_speeds import node_speeds
from tests.tune.tune_fakes import planted


def compared(rates: dict[str, list[float]]):
    trials = []
    for node, values in rates.items():
        for block, rate_rps in enumerate(values, start=2):
            trial = planted(len(trials) + 1, throughput=rate_rps, p95_s=0.01, source="node", block=block)
            trials.append(replace(trial, node=node, asked_concurrency=16))
    return trials


def test_a_node_that_is_slow_in_every_block_is_told_and_its_speed_kept():
    likeness = node_speeds(compared({"a": [1000, 1010], "b": [700, 707], "c": [1005, 1000]}))
    assert likeness is not None
    assert likeness.speeds["b"] / likeness.speeds["a"] == pytest.approx(0.7, rel=0.02)
    assert np.prod(list(likeness.speeds.values())) == pytest.approx(1.0)
    assert "the fastest (a) is 42.9 % faster than the slowest (b)" in likeness.text()
    assert "different parameters" in likeness.text()


def test_differences_that_noise_explains_are_taken_off():
    likeness = node_speeds(compared({"a": [1000, 980], "b": [985, 1000], "c": [1000, 990]}))
    assert likeness is not None
    assert likeness.speeds == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert "no more than noise, they count as alike" in likeness.text()


def test_what_the_whole_cluster_does_at_a_moment_is_no_node_s_speed():
    """A block in which all are half as fast."""
    steady = node_speeds(compared({"a": [1000, 1000], "b": [800, 800]}))
    drifting = node_speeds(compared({"a": [1000, 500], "b": [800, 400]}))
    assert steady is not None
    assert drifting is not None
    assert drifting.speeds == pytest.approx(steady.speeds)


def test_alike_nodes_are_called_unlike_in_few_clusters():
    """400 clusters of 4 nodes whose runs differ by 2 %: more than half a per cent is taken off in at most one of ten."""
    chance = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        rates = {node: (1000 * np.exp(0.02 * chance.standard_normal(2))).tolist() for node in "abcd"}
        likeness = node_speeds(compared(rates))
        assert likeness is not None
        wrong += max(abs(np.log(speed)) for speed in likeness.speeds.values()) > 0.005
    assert wrong <= 40


def test_lone_requests_and_one_node_compare_nothing():
    assert node_speeds(compared({"a": [1000, 1000]})) is None
    lone = [replace(trial, asked_concurrency=1) for trial in compared({"a": [9.0], "b": [8.0]})]
    assert node_speeds(lone) is None
