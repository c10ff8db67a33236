"""The search space and Optuna's proposals from a ledger."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.parameters import BatchingParameters, Configuration, default_num_batch_threads
from batchtune.errors import UsageError
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import pool
from batchtune.tune.strategies.optuna_sampler import Sampler, optuna_strategy
from batchtune.tune.strategies.optuna_study import build_study, directions, distributions, entries
from batchtune.tune.sweep.sweep import sweep
from batchtune.tune.trials.space import Space
from tests.tune.strategy_driver import Driver
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, planted, scenario_of

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
    throughput = (
        2500 * size / (size + 4) * (1 - 0.1 * abs(point.get("batch_timeout_micros", 1000) - 1000) / 5000)
    )
    return throughput * (1 if point.get("num_batch_threads", 2) == 2 else 0.8), 32 / throughput


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


NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
KINDS = [pytest.param("gp", marks=(NEEDS_TORCH, pytest.mark.slow)), "tpe", "qmc", "random", "nsga2"]


def proposed(scenario, kind: str, trials: int, *, seed: int = 1):
    """A ledger of proposals and what `law` gives for them."""
    space = Space(scenario)
    sampler, ledger = Sampler(space, maximise=True, seed=seed, kind=kind), []
    while len(ledger) < trials:
        proposal = sampler.propose(pool(ledger, scenario=scenario), failed={})
        if proposal is None:
            break
        throughput, p95_s = law(proposal.point)
        trial = planted(len(ledger) + 1, batching=proposal.point, throughput=throughput, p95_s=p95_s)
        ledger.append(replace(trial, point=proposal.point, reason=proposal.reason))
    return ledger


@pytest.mark.parametrize("kind", KINDS)
def test_every_sampler_proposes_no_point_twice_and_in_the_end_every_point(kind):
    ledger = proposed(scenario_with(SPACE), kind, 100 if kind != "gp" else 7)
    assert len(ledger) == (24 if kind != "gp" else 7)
    assert len({one.configuration for one in ledger}) == len(ledger)


@pytest.mark.parametrize("kind", KINDS)
def test_every_sampler_proposes_the_same_for_the_same_ledger(kind):
    scenario = scenario_with(SPACE)
    ledger = proposed(scenario, "random", 9)
    pooled = pool(ledger, scenario=scenario)

    def proposal():
        return Sampler(Space(scenario), maximise=True, seed=5, kind=kind).propose(pooled, failed={})

    assert proposal() == proposal()


@pytest.mark.parametrize("kind", KINDS)
def test_a_space_of_one_value_or_of_one_point_is_no_trouble(kind):
    ledger = proposed(scenario_with({"max_batch_size": [1, 8], "num_batch_threads": [2]}), kind, 5)
    assert len(ledger) == 2
    assert len(proposed(scenario_with({"max_batch_size": [8]}), kind, 5)) == 1


@pytest.mark.parametrize(
    ("kind", "seeds"), [("tpe", 8), pytest.param("gp", 2, marks=(NEEDS_TORCH, pytest.mark.slow))]
)
def test_samplers_that_learn_leave_what_fails_alone(kind, seeds):
    """Sizes from 32 up fail, half of the space; with 16 points known, 3 of 4 proposals lie in the other half."""
    space = {
        "max_batch_size": [2**power for power in range(10)],
        "batch_timeout_micros": list(range(0, 8000, 1000)),
    }
    scenario = scenario_with(space)
    working = 0
    for draw in range(3):
        ledger, failed = [], {}
        points = random.Random(draw).sample(list(Space(scenario).points()), 16)
        for number, point in enumerate(points, start=1):
            throughput, p95_s = law(point)
            if point["max_batch_size"] >= 32:
                failed[Space(scenario).configuration(point)] = point
            else:
                trial = planted(number, batching=point, throughput=throughput, p95_s=p95_s)
                ledger.append(replace(trial, point=point))
        pooled = pool(ledger, scenario=scenario)
        samplers = [Sampler(Space(scenario), maximise=True, seed=seed, kind=kind) for seed in range(seeds)]
        found = [one.propose(pooled, failed=failed) for one in samplers]
        working += sum(one.point["max_batch_size"] < 32 for one in found)
    assert working >= 0.75 * 3 * seeds


def test_the_sobol_sequence_covers_a_space_more_evenly_than_chance():
    """16 points of a 16 × 16 grid: each row and each column of four gets four, exactly, as the sequence promises.

    Rounding to the grid may move a point over an edge, so one off is allowed. Chance manages this in fewer than 1 of
    10 draws.
    """
    space = {"max_batch_size": list(range(1, 17)), "batch_timeout_micros": list(range(0, 16000, 1000))}
    for seed in range(3):
        ledger = proposed(scenario_with(space), "qmc", 16, seed=seed)
        for name, step in (("max_batch_size", 4), ("batch_timeout_micros", 4000)):
            strata = Counter((one.point[name] - (name == "max_batch_size")) // step for one in ledger)
            assert all(3 <= strata[stratum] <= 5 for stratum in range(4)), (seed, strata)


def test_the_sobol_sequence_goes_on_where_it_was_though_the_study_is_new():
    scenario = scenario_with(
        {"max_batch_size": list(range(1, 33)), "batch_timeout_micros": list(range(0, 3200, 100))}
    )
    whole = [one.point for one in proposed(scenario, "qmc", 12)]
    first = Sampler(Space(scenario), maximise=True, seed=1, kind="qmc").propose([], failed={})
    assert first.point == whole[0]
    assert len({tuple(point.values()) for point in whole}) == 12


def nsga2_ledger():
    """Three generations: eight points without waiting lie on the front, sixteen that wait are behind it."""
    space = {"max_batch_size": list(range(1, 41)), "batch_timeout_micros": list(range(0, 30000, 1000))}
    scenario = scenario_with(space, slo={"p95": "10s"})
    points = [(size, 0) for size in range(1, 41, 5)] + [
        (size, 20000 + 1000 * (size % 9)) for size in range(1, 17)
    ]
    random.Random(1).shuffle(points)
    ledger = []
    for number, (size, wait_micros) in enumerate(points, start=1):
        point = {"max_batch_size": size, "batch_timeout_micros": wait_micros}
        late = 1 if wait_micros else 0
        trial = planted(
            number, batching=point, throughput=100 * size / (1 + 50 * late), p95_s=0.001 * size + late
        )
        ledger.append(replace(trial, point=point))
    return scenario, ledger


def test_nsga2_breeds_from_the_front_of_throughput_and_p95():
    """A third of 60 new proposals do not wait, as their parents (sd 3.7); of random draws 1 of 30 do not (sd 1.4).

    Each of two parameters mutates with probability 1/2, else it is a parent's; where neither does, the child is old.
    """
    scenario, ledger = nsga2_ledger()
    pooled = pool(ledger, scenario=scenario)

    def unwaiting(kind: str) -> int:
        samplers = [Sampler(Space(scenario), maximise=True, seed=seed, kind=kind) for seed in range(60)]
        found = [one.propose(pooled, failed={}) for one in samplers]
        return sum(one.point["batch_timeout_micros"] == 0 for one in found)

    assert unwaiting("nsga2") >= 11
    assert unwaiting("random") <= 6


def test_nsga2_keeps_what_misses_a_promise_out_of_the_front():
    """The eight points of the front miss the SLO; then none of them is a parent of a proposal."""
    scenario, ledger = nsga2_ledger()
    spoilt = [
        replace(
            one,
            measurement=replace(
                one.measurement, error_ratio=0.0 if one.point["batch_timeout_micros"] else 0.5
            ),
        )
        for one in ledger
    ]
    pooled = pool(spoilt, scenario=scenario)
    samplers = [Sampler(Space(scenario), maximise=True, seed=seed, kind="nsga2") for seed in range(20)]
    waits = [one.propose(pooled, failed={}).point["batch_timeout_micros"] for one in samplers]
    assert sum(wait == 0 for wait in waits) <= 3
    assert sum(20000 <= wait < 29000 for wait in waits) >= 10


def test_p95_and_throughput_are_the_two_goals_of_nsga2_whatever_the_objective():
    scenario, ledger = nsga2_ledger()
    pooled = pool(ledger, scenario=scenario)
    one = ledger[0]
    (throughput, p95_s), *_ = [
        entry.values for entry in entries(pooled, {}, space=Space(scenario), kind="nsga2", maximise=True)
    ]
    assert (throughput, p95_s) == pytest.approx((one.objective.value, one.measurement.latency_s["p95"].value))
    second = entries(pooled, {}, space=Space(scenario), kind="nsga2", maximise=False)[0].values[1]
    assert second == pytest.approx(one.measurement.throughput_rps.value)
    assert directions("nsga2", maximise=False) == ["minimize", "maximize"]


def test_the_twins_candidates_are_taken_first_in_their_order_and_called_so():
    scenario = scenario_with(SPACE)
    sampler = Sampler(Space(scenario), maximise=True, seed=1)
    ledger = proposed(scenario, "random", 6)
    pooled = pool(ledger, scenario=scenario)
    tried = {tuple(one.point.values()) for one in ledger}
    unseen = [point for point in Space(scenario).points() if tuple(point.values()) not in tried]
    candidates = [ledger[0].point, unseen[3], unseen[1]]
    proposal = sampler.propose(pooled, failed={}, enqueue=candidates)
    assert (proposal.point, proposal.proposer) == (unseen[3], "twin")
    known = sampler.propose(pooled, failed={}, enqueue=[ledger[0].point, ledger[1].point])
    assert known.proposer == "sampler"
    assert tuple(known.point.values()) not in tried
    assert sampler.propose(pooled, failed={}).proposer == "sampler"


def test_no_figure_that_was_not_measured_enters_the_study():
    scenario = scenario_with(SPACE)
    ledger = proposed(scenario, "random", 6)
    found = entries(pool(ledger, scenario=scenario), {}, space=Space(scenario), kind="tpe", maximise=True)
    assert [one.values[0] for one in found] == pytest.approx([one.objective.value for one in ledger])
    study = build_study(found, space=Space(scenario), kind="tpe", maximise=True, seed=1, turn=6)
    study.enqueue_trial({"max_batch_size": 0, "batch_timeout_micros": 0, "num_batch_threads": 0})
    assert study.best_value == pytest.approx(max(one.objective.value for one in ledger))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_each_entry_has_every_constraint_relative_and_in_one_order(kind):
    """Optuna compares constraints by position, takes a trial without any for feasible, and fails on unequal numbers."""
    scenario = scenario_with(SPACE, slo={"p50": "5ms", "p95": "18ms"})
    ledger = proposed(scenario, "random", 6)
    pooled = pool(ledger, scenario=scenario)
    turned = replace(pooled[1], constraints=dict(reversed(pooled[1].constraints.items())))
    unseen = next(point for point in Space(scenario).points() if point not in [one.point for one in ledger])
    failed = {Space(scenario).configuration(unseen): unseen}
    found = entries([pooled[0], turned, *pooled[2:]], failed, space=Space(scenario), kind=kind, maximise=True)
    assert {tuple(one.constraints) for one in found} == {("p50", "p95", "errors")}
    assert all(value <= policy.WORST_VIOLATION for one in found for value in one.constraints.values())
    assert found[0].constraints["p95"] == pytest.approx(pooled[0].latency_s["p95"] / 0.018 - 1)
    assert set(found[-1].constraints.values()) == {policy.WORST_VIOLATION}
    study = build_study(found, space=Space(scenario), kind=kind, maximise=True, seed=1, turn=7)
    assert all(list(one.constraints) == ["p50", "p95", "errors"] for one in study.trials)
    assert study.ask(fixed_distributions=distributions(Space(scenario))).params


def test_a_promise_missed_by_a_share_counts_alike_in_seconds_and_in_errors():
    """TPE adds up violations: 2 % errors of 1 % allowed weigh as much as 36 ms of 18 ms."""
    scenario = scenario_with(SPACE, slo={"p95": "18ms", "errors": "1%"})
    slow = _with_point(planted(1, throughput=100, p95_s=0.036, batching={"max_batch_size": 1}), None)
    wrong = planted(2, throughput=100, p95_s=0.001, error_ratio=0.02, batching={"max_batch_size": 4})
    first, second = pool([slow, wrong], scenario=scenario)
    assert first.constraints["p95"] == pytest.approx(second.constraints["errors"])


def test_knobs_are_ordinal_numbers_to_the_samplers():
    scenario = scenario_with({"max_batch_size": [1, 4, 64], "allowed_batch_sizes": ["none", "powers_of_two"]})
    found = distributions(Space(scenario))
    assert {name: (one.low, one.high) for name, one in found.items()} == {
        "max_batch_size": (0, 2),
        "allowed_batch_sizes": (0, 1),
    }


def test_repeats_of_a_configuration_are_one_entry_with_their_mean():
    scenario = scenario_with(SPACE)
    point = {"max_batch_size": 4, "batch_timeout_micros": 0, "num_batch_threads": 1}
    runs = [
        _with_point(planted(n, batching=point, throughput=x, p95_s=0.01), point)
        for n, x in ((1, 100), (2, 400))
    ]
    found = entries(pool(runs, scenario=scenario), {}, space=Space(scenario), kind="tpe", maximise=True)
    assert [one.values for one in found] == [(pytest.approx(200.0),)]


@pytest.mark.parametrize("strategy", ["optuna", "guided"])
def test_a_gaussian_process_without_torch_is_refused_before_anything_is_measured(strategy, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    scenario = scenario_of(search={"strategy": strategy, "sampler": "gp", "space": SPACE})
    target = FakeTarget(FakeClock())
    with pytest.raises(
        UsageError, match=r"search\.sampler: gp needs torch, which is not installed"
    ) as caught:
        list(sweep(scenario, target, FakeFleet(target)))
    assert caught.value.hint == "pip install 'batchtune[torch]', or set search.sampler to tpe"
    assert target.applied == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_runs_with_every_sampler(kind):
    scenario = scenario_of(search={"sampler": kind, "space": SPACE, "budget": {"trials": 12}})
    clock = FakeClock()
    target = FakeTarget(clock, law=Law(noise=0.01))
    trials = [one.trial for one in sweep(scenario, target, FakeFleet(target), now_s=clock)]
    asked = [one for one in trials if one.source == "sampler"]
    assert len(asked) >= 8
    assert len({one.configuration for one in asked}) == len(asked)


def sizes_after_a_ceiling(scenario, strategy, *, rows_max: int, trials_max: float = 40) -> list[int]:
    """Sizes in the order in which they were asked for, on a server whose memory holds so many rows."""
    driver = Driver(
        scenario, law=Law(fixed_s=0.003, per_row_s=0.0001, rows_max=rows_max), trials_max=trials_max
    )
    driver.run(strategy)
    return [ask.configuration.batching.max_batch_size for ask in driver.asks]


def never_above_what_failed(sizes: list[int], *, rows_max: int) -> bool:
    failed = [(at, size) for at, size in enumerate(sizes) if size > rows_max]
    return all(size < before for (_, before), (_, size) in pairwise(failed))


@pytest.mark.parametrize("sampler", ["tpe", "random", "nsga2"])
def test_sizes_that_ran_out_of_memory_are_proposed_by_no_sampler(sampler):
    """64 clients fill the sizes; each size too large is tried at most once, and only below those that failed."""
    scenario = scenario_of(
        load={"arrivals": "closed", "concurrency": 64, "warm_up": "300ms", "duration": "1s"},
        search={
            "sampler": sampler,
            "space": {"max_batch_size": [1, 4, 8, 16, 24, 32, 64], "batch_timeout_micros": [0, 1000, 5000]},
        },
    )
    sizes = sizes_after_a_ceiling(scenario, optuna_strategy, rows_max=24)
    assert max(sizes) > 24
    assert never_above_what_failed(sizes, rows_max=24)
    assert len(sizes) > 12  # the sizes that fit are searched to the end


def test_a_space_of_which_most_is_barred_is_searched_on():
    """1,024 sizes of which 8 fit, and too many points to list: proposals at random hardly ever fit."""
    scenario = scenario_of(
        load={"arrivals": "closed", "concurrency": 64, "warm_up": "300ms", "duration": "1s"},
        search={
            "space": {
                "max_batch_size": {"low": 1, "high": 1024},
                "batch_timeout_micros": {"low": 0, "high": 99},
            }
        },
    )
    space = Space(scenario)
    space.bar(9)
    sampler = Sampler(space, maximise=True, seed=1)
    proposals = [
        sampler.propose(
            [], failed={Configuration(batching=None, flags=((str(n), ""),)): None for n in range(turn)}
        )
        for turn in range(20)
    ]
    assert all(one is not None and one.point["max_batch_size"] <= 8 for one in proposals)


def test_barred_sizes_are_neither_points_to_propose_nor_near_to_anything():
    space = Space(scenario_with(SPACE))
    space.bar(16)
    assert (
        space.configuration({**dict.fromkeys(SPACE, 1), "max_batch_size": 16, "batch_timeout_micros": 0})
        is None
    )
    assert space.nearest({"max_batch_size": 64})["max_batch_size"] == 4
    assert space.open_shape == {"max_batch_size": 2, "batch_timeout_micros": 3, "num_batch_threads": 2}
    ran_out = Configuration(
        batching=BatchingParameters(max_batch_size=64, batch_timeout_micros=0, num_batch_threads=1)
    )
    assert space.locate(ran_out) == {"max_batch_size": 64, "batch_timeout_micros": 0, "num_batch_threads": 1}
    assert space.is_barred(Configuration(batching=BatchingParameters()))
    assert not space.is_barred(Configuration(batching=None))


def test_where_no_size_is_searched_none_is_barred():
    scenario = scenario_with({"num_batch_threads": [1, 2]}, fixed={"max_batch_size": 32})
    space = Space(scenario)
    space.bar(32)
    assert all(space.configuration(point) for point in space.points())
