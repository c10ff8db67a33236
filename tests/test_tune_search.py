"""The search space and Optuna's proposals from a ledger."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_fakes import planted, scenario_of

from batchtune.batching import BatchingParameters, Configuration, default_num_batch_threads
from batchtune.tune.pool import pool
from batchtune.tune.search import Sampler
from batchtune.tune.space import Space

SPACE = {
    "max_batch_size": [1, 4, 16, 64],
    "batch_timeout_micros": [0, 1000, 5000],
    "num_batch_threads": [1, 2],
}


def scenario_with(space, **changes):
    return scenario_of(search={"budget": {"trials": 50}, "space": space}, **changes)


def law(point) -> tuple[float, float]:
    """Throughput and p95 of a server of 32 clients: saturating in size, best at 1000 µs and 2 threads."""
    size = point["max_batch_size"]
    throughput = 2500 * size / (size + 4) * (1 - 0.1 * abs(point["batch_timeout_micros"] - 1000) / 5000)
    return throughput * (1 if point["num_batch_threads"] == 2 else 0.8), 32 / throughput


def searched(scenario, trials: int, *, seed: int = 1, noise: float = 0.0):
    space = Space(scenario)
    sampler = Sampler(space, maximise=True, seed=seed)
    chance, ledger = random.Random(seed), []
    while len(ledger) < trials:
        proposal = sampler.propose(pool(ledger, scenario=scenario), failed={})
        if proposal is None:
            break
        throughput, p95_s = law(proposal.point)
        throughput *= math.exp(chance.gauss(0.0, noise))
        trial = planted(len(ledger) + 1, batching=proposal.point, throughput=throughput, p95_s=p95_s)
        ledger.append(_with_point(trial, proposal.point))
    return ledger


def _with_point(trial, point):
    fields = {name: getattr(trial, name) for name in trial.__slots__}
    return type(trial)(**{**fields, "point": point})


def test_every_point_is_proposed_once_and_then_none():
    ledger = searched(scenario_with(SPACE), 100)
    assert len(ledger) == 24
    assert len({one.configuration for one in ledger}) == 24


def test_the_same_ledger_and_seed_give_the_same_proposals():
    first = [one.point for one in searched(scenario_with(SPACE), 10, seed=3)]
    again = [one.point for one in searched(scenario_with(SPACE), 10, seed=3)]
    other = [one.point for one in searched(scenario_with(SPACE), 10, seed=4)]
    assert first == again
    assert first != other


def test_twelve_of_112_points_come_within_a_tenth_of_the_best():
    """In at least 18 of 20 seeds, with 3 % noise; random search manages 11.

    False alarm: none, the seeds are fixed; a change of sampler may cost a seed or two.
    """
    space = {
        "max_batch_size": [1, 2, 4, 8, 16, 32, 64, 128],
        "batch_timeout_micros": [0, 500, 1000, 2000, 5000, 10000, 20000],
        "num_batch_threads": [1, 2],
    }
    scenario = scenario_with(space, slo={"p95": "1s"})
    best = max(law(point)[0] for point in Space(scenario).points())
    near = [
        max(law(one.point)[0] for one in searched(scenario, 12, seed=seed, noise=0.03)) >= 0.9 * best
        for seed in range(20)
    ]
    assert sum(near) >= 18


def test_infeasible_regions_are_left_alone():
    """The limit forbids sizes below 16; after ten trials most proposals keep it."""
    scenario = scenario_with(SPACE, slo={"p95": "18ms"})
    ledger = []
    for one in searched(scenario, 12):
        ledger.append(one)
    missed = [one for one in pool(ledger[6:], scenario=scenario) if not one.feasible]
    assert len(missed) <= 3


def test_a_failed_configuration_is_not_proposed_again():
    scenario = scenario_with({"max_batch_size": [1, 2], "num_batch_threads": [1]})
    space = Space(scenario)
    failed = {space.configuration(point): point for point in space.points() if point["max_batch_size"] == 2}
    proposal = Sampler(space, maximise=True, seed=1).propose([], failed=failed)
    assert proposal.point["max_batch_size"] == 1
    failed[proposal.configuration] = proposal.point
    assert Sampler(space, maximise=True, seed=1).propose([], failed=failed) is None


def test_points_that_refuse_the_scenarios_requests_are_never_proposed():
    scenario = scenario_with({"max_batch_size": [1, 2, 4, 8]}, request={"rows": 4})
    sizes = {one.batching.max_batch_size for one in searched_configurations(scenario)}
    assert sizes == {4, 8}


def test_allowed_sizes_by_name_and_server_flags_are_searched():
    space = {
        "max_batch_size": [4, 8],
        "allowed_batch_sizes": ["none", "powers_of_two"],
        "threads_flag": [1, 2],
    }
    ledger = searched_configurations(scenario_with(space))
    assert len(ledger) == 8
    assert {one.flags for one in ledger} == {(("threads_flag", "1"),), (("threads_flag", "2"),)}
    assert {one.batching.allowed_batch_sizes for one in ledger} == {(), (1, 2, 4), (1, 2, 4, 8)}


def searched_configurations(scenario) -> set[Configuration]:
    space = Space(scenario)
    sampler, failed = Sampler(space, maximise=True, seed=1), {}
    while (proposal := sampler.propose([], failed=failed)) is not None:
        failed[proposal.configuration] = proposal.point
    return set(failed)


def test_a_configuration_is_located_with_absent_parameters_as_the_servers_defaults():
    threads = default_num_batch_threads()
    space = Space(
        scenario_with(
            {
                "max_batch_size": [8, 1000],
                "batch_timeout_micros": [0, 100],
                "num_batch_threads": sorted({1, threads}),
            }
        )
    )
    defaults = {"max_batch_size": 1000, "batch_timeout_micros": 0, "num_batch_threads": threads}
    assert space.locate(Configuration(batching=BatchingParameters())) == defaults
    assert space.locate(Configuration(batching=None)) is None
    assert space.locate(Configuration(batching=BatchingParameters(max_batch_size=9))) is None
    assert space.locate(Configuration(batching=BatchingParameters(), flags=(("a", "b"),))) is None


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=6, unique=True),
    st.lists(st.integers(0, 10**5), min_size=1, max_size=6, unique=True),
)
def test_points_indices_and_configurations_agree(sizes, timeouts):
    space = Space(scenario_with({"max_batch_size": sizes, "batch_timeout_micros": timeouts}))
    points = list(space.points())
    assert len(points) == space.size
    for point in points:
        assert space.point(space.indices(point)) == point
        assert space.locate(space.configuration(point)) == point
        assert space.distance(point, point) == 0.0


@pytest.mark.parametrize("feasible", [True, False])
def test_a_ledger_of_one_or_none_is_enough_to_propose(feasible):
    scenario = scenario_with(SPACE)
    point = {"max_batch_size": 4, "batch_timeout_micros": 0, "num_batch_threads": 1}
    trial = _with_point(
        planted(1, batching=point, throughput=100, p95_s=0.01 if feasible else math.inf), point
    )
    sampler = Sampler(Space(scenario), maximise=True, seed=1)
    assert sampler.propose([], failed={}) is not None
    assert sampler.propose(pool([trial], scenario=scenario), failed={}).point != point
