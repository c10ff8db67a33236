"""The grid in randomised blocks."""

from __future__ import annotations

from collections import Counter

from batchtune.tune.evidence.pooled import pool, run_noise
from batchtune.tune.strategies.grid import grid_strategy
from tests.tune.strategy_driver import Driver
from tests.tune.tune_fakes import Law, scenario_of

SPACE = {"max_batch_size": [1, 4, 16], "batch_timeout_micros": [0, 1000], "num_batch_threads": [1, 2]}


def grid(space=None, **search):
    return scenario_of(search={"strategy": "grid", "space": space or SPACE, **search})


def test_every_block_holds_every_point_once():
    trials = Driver(grid(repeats=3)).run(grid_strategy)
    assert [one.block for one in trials] == [1] * 12 + [2] * 12 + [3] * 12
    for block in (1, 2, 3):
        assert len({one.configuration for one in trials if one.block == block}) == 12
    assert {one.source for one in trials} == {"grid"}
    assert trials[0].reason == "the grid: block 1 of 3, turn 1 of 12 in random order"


def test_runs_of_one_block_share_their_arrivals_and_blocks_do_not():
    trials = Driver(grid(repeats=2)).run(grid_strategy)
    seeds = {(one.block, one.seed) for one in trials}
    assert len(seeds) == len({seed for _, seed in seeds}) == 2


def test_each_block_has_its_own_order_and_the_same_seed_the_same_orders():
    def orders(seed: int) -> list[list[object]]:
        trials = Driver(grid(repeats=2, seed=seed)).run(grid_strategy)
        return [[one.configuration for one in trials if one.block == block] for block in (1, 2)]

    one, other = orders(1)
    assert one != other
    assert orders(1) == [one, other]
    assert orders(2) != [one, other]


def test_the_order_owes_nothing_to_the_place_in_the_grid():
    """Over 200 seeds the first point of the grid is measured first 16.7 times on average (sd 3.9): 5 to 29."""
    scenario = grid()
    first = next(iter(Driver(scenario).space.points()))
    counts = Counter()
    for seed in range(200):
        strategy = grid_strategy(Driver(grid(seed=seed)))
        counts[next(strategy).point == first] += 1
        strategy.close()
    assert 5 <= counts[True] <= 29


def test_time_ends_it_within_a_block():
    trials = Driver(grid(repeats=3), trials_max=17).run(grid_strategy)
    assert len(trials) == 17
    assert set(Counter(one.configuration for one in trials).values()) == {1, 2}


def test_points_that_no_server_accepts_or_that_mean_the_same_are_left_out():
    space = {"max_batch_size": [2, 4, 8], "allowed_batch_sizes": [[4], [4, 8], "none"]}
    scenario = scenario_of(search={"strategy": "grid", "space": space, "repeats": 1}, request={"rows": 4})
    trials = Driver(scenario).run(grid_strategy)
    configurations = [one.configuration for one in trials]
    assert len(set(configurations)) == len(configurations)
    assert {one.batching.max_batch_size for one in configurations} == {4, 8}


def test_a_failed_configuration_is_not_measured_again():
    def refuses(configuration):
        batching = configuration.batching
        return "no" if batching and batching.num_batch_threads == 2 else None

    trials = Driver(grid(repeats=3), refuses=refuses).run(grid_strategy)
    failed = Counter(one.configuration for one in trials if one.state == "failed")
    assert len(failed) == 6
    assert set(failed.values()) == {1}
    assert sum(one.state == "complete" for one in trials) == 18


def test_its_repeats_show_the_noise_between_runs():
    """12 configurations × 4 runs with a log sd of 3 %: the estimate of 36 degrees of freedom lies within 2 to 4.2 %."""
    scenario = grid(repeats=4)
    driver = Driver(scenario, law=Law(noise=0.03))
    driver.run(grid_strategy)
    assert 0.02 < run_noise(pool(driver.trials, scenario=scenario), scenario=scenario).sd < 0.042


def test_sizes_that_ran_out_of_memory_are_left_out_with_all_larger_ones():
    scenario = scenario_of(
        load={"arrivals": "closed", "concurrency": 64, "warm_up": "300ms", "duration": "1s"},
        search={"strategy": "grid", "space": {**SPACE, "max_batch_size": [4, 16, 32, 64]}, "repeats": 2},
    )
    driver = Driver(scenario, law=Law(rows_max=16))
    driver.run(grid_strategy)
    sizes = [ask.configuration.batching.max_batch_size for ask in driver.asks]
    too_large = [size for size in sizes if size > 16]
    assert too_large == sorted(set(too_large), reverse=True)
    assert sizes.count(4) == sizes.count(16) == 8
