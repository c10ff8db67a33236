"""Points that Optuna's sampler names."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import numpy as np
import pytest

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.search.contenders import Contender
from batchtune.tune.search.fixed_load import search_of
from batchtune.tune.search.proposals import ATTEMPTS, proposed_points
from tests.tune.tune_fakes import scenario_of

VALUES: dict[str, list[Any]] = {
    "size": [1, 2, 4, 8, 16, 32],
    "threads": [1, 2, 4],
    "mode": ["eager", "graph", "fused"],
    "fixed": [7],
}


def held(point: dict[str, Any]) -> float:
    """One hill: 16 rows, 2 threads, fused."""
    far = abs(np.log2(point["size"] / 16)) + abs(np.log2(point["threads"] / 2))
    return 1000.0 - 100.0 * far - (0.0 if point["mode"] == "fused" else 200.0)


def every_point() -> list[dict[str, Any]]:
    return [dict(zip(VALUES, point, strict=True)) for point in product(*VALUES.values())]


def test_points_are_of_the_grid_and_no_two_alike() -> None:
    known = [(point, held(point)) for point in every_point()[::9]]
    named = list(proposed_points(VALUES, known, seed=3))
    assert 1 <= len(named) <= ATTEMPTS
    assert all(point in every_point() for point in named)
    assert all(named.count(point) == 1 for point in named)
    assert all(point["fixed"] == 7 for point in named)


def test_the_same_is_named_after_the_same_and_another_seed_names_others() -> None:
    known = [(point, held(point)) for point in every_point()[::9]]
    named = list(proposed_points(VALUES, known, seed=3))
    assert list(proposed_points(VALUES, known, seed=3)) == named
    assert list(proposed_points(VALUES, known, seed=4)) != named


def test_without_anything_known_points_are_drawn_from_the_whole_grid() -> None:
    named = [next(proposed_points(VALUES, [], seed=seed)) for seed in range(40)]
    for name, choices in VALUES.items():
        assert {point[name] for point in named} == set(choices)


def test_what_held_more_draws_the_points_near_it() -> None:
    """Over 40 seeds: what is named after a third of the grid held holds more than the grid in the mean."""
    known = [(point, held(point)) for point in every_point()[::3]]
    named = [held(next(proposed_points(VALUES, known, seed=seed))) for seed in range(40)]
    assert np.mean(named) > np.mean([held(point) for point in every_point()]) + 100.0


def test_points_that_are_not_of_the_grid_tell_nothing() -> None:
    known = [(point, held(point)) for point in every_point()[::9]]
    outside = [({"size": 1000, "threads": 1, "mode": "eager", "fixed": 7}, 9e9), ({"size": 4}, 9e9)]
    assert list(proposed_points(VALUES, [*known, *outside], seed=3)) == list(
        proposed_points(VALUES, known, seed=3)
    )


def test_of_a_space_of_one_point_nothing_is_named() -> None:
    assert list(proposed_points({"size": [8], "threads": [2]}, [], seed=1)) == []


def test_a_space_that_has_grown_is_named_from_as_a_whole() -> None:
    known = [({"size": size, "threads": 1}, float(size)) for size in (1, 2, 4, 8, 16)]
    grown = {"size": [1, 2, 4, 8, 16, 32, 64], "threads": [1, 2]}
    named = {next(proposed_points(grown, known, seed=seed))["size"] for seed in range(30)}
    assert named & {32, 64}


def scenario(strategy: str = "guided") -> Scenario:
    space = {"max_batch_size": [1, 4, 16], "batch_timeout_micros": [0, 1000], "num_batch_threads": [1, 2]}
    return scenario_of(search={"strategy": strategy, "budget": {"time": "60s"}, "space": space})


def named_by_a_search(strategy: str, *, steps: int = 0) -> list[Contender]:
    """Whom it names after all points of one thread, of which so many were named as neighbours too."""
    search = search_of(scenario(strategy), budget_s=60.0)
    known = []
    for size, micros in product([1, 4, 16], [0, 1000]):
        point = {"max_batch_size": size, "batch_timeout_micros": micros, "num_batch_threads": 1}
        contender = search.contenders.at(point, "grid")
        assert contender is not None
        if len(known) < steps:
            search.contenders.at(point, "neighbour")
        known.append((contender, float(size)))
    return list(islice(search.optuna_contenders(known), 5))


def test_a_search_is_told_contenders_with_its_sampler_as_their_name() -> None:
    named = named_by_a_search("optuna")
    assert named
    assert all("sampler" in contender.sources and contender.point is not None for contender in named)


@pytest.mark.parametrize("strategy", ["rule", "grid"])
def test_with_strategies_that_name_all_contenders_nobody_else_is(strategy: str) -> None:
    assert named_by_a_search(strategy) == []


def test_the_sampler_is_not_told_of_a_leaders_neighbours() -> None:
    """All but the first two points hold more the larger they are; told of these two alone it is as if nothing were."""
    told_all = [contender.point for contender in named_by_a_search("guided")]
    told_none = [contender.point for contender in named_by_a_search("guided", steps=6)]
    untold = scenario().search.seed
    values = {name: list(knob.values) for name, knob in scenario().search.space.items()}
    assert told_none == list(islice(proposed_points(values, [], seed=untold), 5))
    assert told_all != told_none
