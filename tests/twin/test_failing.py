"""When replicas die, what they had and are sent is lost, and the others serve the rest as if they were alone."""

from __future__ import annotations

import numpy as np
import pytest

from batchtune.twin.simulator.failing import Death, run_failing
from batchtune.twin.simulator.replica import Batcher, Device, Routing
from batchtune.twin.simulator.run import OpenTraffic
from tests.twin.simulated_run import simulate_open
from tests.twin.twin_fakes import batcher_of, device_of

LONE = Batcher(max_batch_size=None, batch_threads=1)
TEN_MS = Device(tau_s=np.array([0.0, 0.010]))
DEATH = Death(replicas=1, at_s=1.0, forgotten_s=1.5)


def every(seconds: float, until_s: float) -> np.ndarray:
    return np.arange(round(until_s / seconds)) * seconds


def test_what_the_dead_had_and_were_sent_is_lost_and_nothing_else() -> None:
    due_s = every(0.1, 3.0)  # 1.0 s goes to replica 0, 1.1 s to 1, ...
    latency_s = run_failing(OpenTraffic(due_s=due_s, rows=1, replicas=2), LONE, TEN_MS, DEATH)
    lost = due_s[np.isnan(latency_s)]
    assert lost == pytest.approx([1.1, 1.3])
    assert latency_s[~np.isnan(latency_s)] == pytest.approx(0.010)


def test_a_request_under_way_at_the_death_is_lost() -> None:
    due_s = np.array([0.0, 0.995, 2.0])
    latency_s = run_failing(OpenTraffic(due_s=due_s, rows=1, replicas=2), LONE, TEN_MS, DEATH)
    assert np.isnan(latency_s).tolist() == [False, True, False]


@pytest.mark.parametrize("routing", ["round_robin", "random", "least_loaded"])
def test_without_a_death_within_the_run_all_is_as_ever(routing: Routing) -> None:
    due_s = np.cumsum(np.random.default_rng(3).exponential(1e-3, 4_000))
    later = Death(replicas=1, at_s=100.0, forgotten_s=101.0)
    traffic = OpenTraffic(due_s=due_s, rows=1, replicas=3, routing=routing)
    batcher, device = batcher_of(16, 1.0, 2), device_of(contention=0.5)
    alone = simulate_open(due_s, 1, batcher, device, replicas=3, routing=routing)
    assert run_failing(traffic, batcher, device, later) == pytest.approx(alone.latency_s)


def test_the_least_loaded_gets_more_only_until_the_dead_one_has_as_much_unanswered() -> None:
    due_s = every(0.002, 2.0)
    traffic = OpenTraffic(due_s=due_s, rows=1, replicas=2, routing="least_loaded")
    latency_s = run_failing(traffic, batcher_of(8), device_of(), DEATH)
    lost = np.isnan(latency_s)
    assert 1 <= lost.sum() < 20
    assert due_s[lost].min() > 0.98
    assert np.isfinite(latency_s[due_s > 1.5]).all()


def test_a_fleet_that_becomes_too_small_refuses() -> None:
    due_s = every(0.006, 4.0)  # two of 100/s each carry it, one does not
    small = Batcher(max_batch_size=1, batch_threads=1, max_enqueued_batches=5)
    latency_s = run_failing(OpenTraffic(due_s=due_s, rows=1, replicas=2), small, TEN_MS, DEATH)
    refused = np.isinf(latency_s)
    assert not refused[due_s < 1.5].any(), "a dead replica does not even refuse"
    assert refused[due_s > 2.0].mean() == pytest.approx(0.4, abs=0.05)


def test_the_tree_of_events_is_right_for_a_fleet_that_fills_no_power_of_two() -> None:
    due_s = every(0.003, 3.0)
    death = Death(replicas=2, at_s=1.0, forgotten_s=1.3)
    latency_s = run_failing(
        OpenTraffic(due_s=due_s, rows=1, replicas=5, routing="random"), batcher_of(8), device_of(), death
    )
    lost = np.isnan(latency_s)
    assert 20 <= lost.sum() <= 60  # two fifths of 100
    assert ((due_s[lost] > 0.98) & (due_s[lost] < 1.3)).all()
    assert np.isfinite(latency_s[~lost]).all()
