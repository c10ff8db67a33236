"""Who may be the answer: references, the guide's point, points of the space and beyond it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchtune.batching.parameters import Configuration, from_dict
from batchtune.batching.triton_config import FoundBatching
from batchtune.report.findings import text_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.search.contenders import (
    Contenders,
    first_configuration,
    one_by_one,
    reference_configurations,
)
from batchtune.tune.search.fixed_load import search_of
from batchtune.tune.search.proposals import guide_point
from tests.tune.tune_fakes import planted, scenario_of

SPACE = {"max_batch_size": [1, 4, 16], "batch_timeout_micros": [0, 1000], "num_batch_threads": [1, 2]}


def scenario(**search: Any) -> Scenario:
    """An open loop: so many clients would bound the sizes."""
    return scenario_of(load={"arrivals": "poisson"}, objective="capacity", search={"space": SPACE, **search})


def sizes(contenders: Contenders) -> set[int]:
    return {contender.point["max_batch_size"] for contender in contenders if contender.point is not None}


@pytest.mark.parametrize(
    "asked",
    [
        {"objective": "throughput"},
        {"objective": "capacity", "load": {"arrivals": "poisson"}},
        {"objective": "latency", "load": {"arrivals": "poisson", "rate": "50/s"}},
    ],
)
def test_what_an_attached_server_has_is_loaded_before_anything_else_is_tried(asked: dict[str, Any]) -> None:
    """But for one client, whose time tells how many may be sent."""
    found = {"max_batch_size": 8, "dynamic_batching": True, "max_queue_delay_microseconds": 700}
    target = {"kind": "triton", "model": "m", "rest_url": "http://127.0.0.1:8000", "found": found}
    scenario = scenario_of(target=target, request={}, **asked)
    present = reference_configurations(scenario)["present"]
    assert first_configuration(scenario) == present
    search = search_of(scenario, budget_s=60.0)
    (lone,) = search.next_asks(1, left_s=60.0)
    assert lone.concurrency == 1
    search.observe([replace(planted(1, throughput=100.0, p95_s=0.01, source="probe"), request=lone)])
    (first,) = search.next_asks(1, left_s=59.0)
    assert (first.configuration, first.reason) == (present, "what runs now")


def test_no_batching_and_the_defaults_are_always_named() -> None:
    assert list(reference_configurations(scenario())) == ["no_batching", "defaults"]
    assert one_by_one(scenario()).batching is None


def test_what_fixed_says_is_what_runs_now() -> None:
    space = {"space": {"max_batch_size": [1, 8]}}
    asked = scenario_of(fixed={"num_batch_threads": 2}, search=space)
    present = Configuration(batching=from_dict({"num_batch_threads": 2}))
    assert reference_configurations(asked)["present"] == present
    flags = scenario_of(fixed={"max_enqueued_batches": 100}, search=space)
    assert "present" not in reference_configurations(flags)


@pytest.mark.parametrize(("is_batched", "same"), [(True, "defaults"), (False, "no_batching")])
def test_what_an_attached_triton_has_is_what_runs_now(is_batched: bool, same: str) -> None:
    found = FoundBatching(max_batch_size=8, dynamic_batching=is_batched)
    target = {"kind": "triton", "model": "m", "rest_url": "http://h:1"}
    space = {"space": {"max_batch_size": [1, 8]}}
    asked = scenario_of(target=target, request={"protocol": "kserve_rest_binary"}, search=space)
    asked = asked.model_copy(update={"target": asked.target.model_copy(update={"found": found})})
    references = reference_configurations(asked)
    assert list(references) == ["present", "no_batching", "defaults"]
    assert references["present"] == references[same]


def test_a_configuration_that_several_name_is_one_contender() -> None:
    contenders = Contenders(scenario())
    first = contenders.at({"max_batch_size": 4, "batch_timeout_micros": 0, "num_batch_threads": 1}, "grid")
    again = contenders.overlaid({"max_batch_size": 4, "num_batch_threads": 1}, "rule")
    assert first is again
    assert first.sources == ["grid", "rule"]


@pytest.mark.parametrize(
    ("search", "is_in"), [({"grow": False}, False), ({"grow": True}, True), ({"strategy": "rule"}, True)]
)
def test_a_written_space_excludes_what_lies_outside_and_a_guessed_one_nothing(
    search: Any, is_in: bool
) -> None:
    contenders = Contenders(scenario(**search))
    named = contenders.overlaid({"max_batch_size": 7, "batch_timeout_micros": 333}, "rule")
    assert (named in list(contenders)) is is_in
    assert named in contenders.all()


def test_defaults_that_a_scenario_states_can_be_the_answer_outside_the_space() -> None:
    target: dict[str, Any] = {"kind": "http", "url": "http://127.0.0.1:1/", "launch": ["serve"]}
    target |= {
        "set": {"flag": {"size": "--size", "wait_s": "--wait"}},
        "defaults": {"size": 10, "wait_s": 0.01},
    }
    target |= {"means": {"rows": "size", "wait_s": "wait_s"}}
    space = {"size": [1, 4, 8], "wait_s": [0, 0.005]}
    asked = scenario_of(target=target, request={"body": {"x": 1}}, search={"space": space})
    contenders = Contenders(asked)
    assert contenders.of("defaults") in list(contenders)
    assert contenders.add(asked.configuration({"size": 6, "wait_s": 0}), "rule") not in list(contenders)


def test_points_with_words_and_the_switch_lie_inside_their_own_space() -> None:
    space = {"max_batch_size": [4, 8], "allowed_batch_sizes": ["powers_of_two", "none"]}
    contenders = Contenders(scenario_of(search={"space": {**space, "enable_batching": [True, False]}}))
    grid = contenders.grid(64)
    assert {contender.configuration.batching is None for contender in grid} == {True, False}
    assert all(contender in list(contenders) for contender in grid)


def test_points_that_cannot_hold_a_request_are_not_named() -> None:
    asked = scenario_of(request={"rows": 4}, search={"space": SPACE})
    contenders = Contenders(asked)
    contenders.whole(1000)
    assert sizes(contenders) == {4, 16}


def test_batches_that_ran_out_of_memory_bar_all_as_large() -> None:
    contenders = Contenders(scenario())
    contenders.grid(64)
    contenders.ceiling_rows = 16
    assert sizes(contenders) == {1, 4}
    assert contenders.of("no_batching") in list(contenders)
    assert contenders.of("defaults") not in list(contenders)


TOP = {"max_batch_size": 16, "batch_timeout_micros": 0, "num_batch_threads": 1}


@pytest.mark.parametrize(("grow", "sizes"), [(False, {4, 16}), (True, {4, 16, 32})])
def test_neighbours_are_a_step_of_one_parameter_and_grow_a_guessed_space(grow: bool, sizes: set[int]) -> None:
    contenders = Contenders(scenario(grow=grow))
    near = [one.point for one in contenders.neighbours(contenders.at(TOP, "grid")) if one.point]
    assert {point["max_batch_size"] for point in near} == sizes
    assert all(sum(point[name] != TOP[name] for name in TOP) == 1 for point in near)


@pytest.mark.parametrize("strategy", ["rule", "optuna"])
def test_where_others_name_all_contenders_nobody_steps_or_grows(strategy: str) -> None:
    contenders = Contenders(scenario(strategy=strategy, grow=True))
    leader = contenders.at(TOP, "sampler")
    assert contenders.neighbours(leader) == []
    assert not contenders.grow_sizes(leader)


def test_the_guide_begins_with_a_thread_for_each_cpu_a_large_batch_and_no_timeout() -> None:
    asked = scenario_of(target={"model": "fake", "cpus": [0, 1, 2]}, search={"space": SPACE})
    assert guide_point(asked, SPACE) == {**TOP, "num_batch_threads": 3}


SHORT = "leaves no time to compare configurations, perhaps none for an answer; without a budget a sweep takes 2 min"
COUNTS = "search.budget.trials counts configurations: at most 5 are compared, and scouts and confirmation runs come on top"


@pytest.mark.parametrize(
    ("budget", "budget_s", "said"),
    [
        ({"time": "2s"}, 2.0, {SHORT}),
        ({"time": "6s"}, 6.0, {SHORT}),
        ({"time": "20s"}, 20.0, set()),
        ({"trials": 5}, 60.0, {COUNTS}),
        ({"trials": 5, "time": "60s"}, 60.0, {COUNTS, "1 min 00 s: "}),
    ],
)
def test_the_opening_line_says_what_a_budget_leaves_no_time_for_and_what_it_counts(
    budget: Any, budget_s: float, said: set[str]
) -> None:
    search = {"budget": budget, "space": {"max_batch_size": [1, 2, 4]}}
    plan = text_of(search_of(scenario_of(search=search), budget_s=budget_s).plan())
    assert {words for words in (SHORT, COUNTS, "1 min 00 s: ") if words in plan} == said
