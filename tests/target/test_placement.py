"""Server and client are kept apart where the scenario leaves that open and there are CPUs enough."""

from __future__ import annotations

import math

from batchtune.scenario.reader import format_scenario, parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.section import cpu_list
from batchtune.system import schedulable_cpus
from batchtune.target.choice import placed, placed_as, placed_on_node, unplaced
from tests.tune.tune_fakes import scenario_of

NO_QUOTA = math.inf


def with_target(scenario: Scenario, **changes: object) -> Scenario:
    return scenario.model_copy(update={"target": scenario.target.model_copy(update=changes)})


def with_load(scenario: Scenario, **changes: object) -> Scenario:
    return scenario.model_copy(update={"load": scenario.load.model_copy(update=changes)})


def test_the_client_gets_a_cpu_for_each_process_and_the_server_the_rest() -> None:
    apart, told = placed(scenario_of(), cpus=[0, 1], quota=NO_QUOTA)
    assert (apart.target.cpus, apart.load.cpus) == ((0,), (1,))
    assert told.startswith("the server has CPU 0, the client CPU 1")
    assert "--set target.cpus=all" in told
    apart, _ = placed(with_load(scenario_of(), processes=2), cpus=[0, 1, 2, 5, 7], quota=NO_QUOTA)
    assert (apart.target.cpus, apart.load.cpus) == ((0, 1, 2), (5, 7))


def test_one_cpu_is_shared_without_a_word() -> None:
    scenario = scenario_of()
    assert placed(scenario, cpus=[3], quota=NO_QUOTA) == (scenario, "")


def test_what_the_scenario_says_stays() -> None:
    own = [with_target(scenario_of(), cpus=cpus) for cpus in ((0, 1), (1,))]
    for scenario in (*own, with_load(scenario_of(), cpus=(1,))):
        assert placed(scenario, cpus=range(4), quota=NO_QUOTA) == (scenario, "")


def test_they_share_where_apart_is_not_possible_or_buys_nothing_and_it_says_why() -> None:
    crowded = with_load(scenario_of(), processes=2)
    assert placed(crowded, cpus=[0, 1], quota=NO_QUOTA)[0] is crowded
    assert "leave the server no CPU" in placed(crowded, cpus=[0, 1], quota=NO_QUOTA)[1]
    scenario = scenario_of()
    assert placed(scenario, cpus=range(64), quota=1.5) == (
        scenario,
        "server and client share CPUs 0-63: their quota is 1.5 CPUs, which both draw on wherever they run",
    )
    container = with_target(scenario, command=("/usr/bin/docker", "run", "tensorflow/serving"))
    assert "--cpuset-cpus" in placed(container, cpus=[0, 1], quota=NO_QUOTA)[1]


def test_a_resumed_run_keeps_the_cpus_that_it_had() -> None:
    scenario = scenario_of()
    apart, _ = placed(scenario, cpus=[0, 1], quota=NO_QUOTA)
    assert placed_as(scenario, apart) == apart
    assert placed_as(scenario, scenario) == scenario
    own = with_target(scenario, cpus=(4,))
    assert placed_as(own, apart) is own


def cpus_of(scenario: Scenario) -> tuple[object, object]:
    return scenario.target.cpus, scenario.load.cpus


def test_a_share_of_a_machine_that_is_too_small_is_kept_to_by_both() -> None:
    crowded = with_load(scenario_of(), processes=2)
    shared = placed_on_node(crowded, cpus=(2, 3), alone=False)
    assert cpus_of(shared) == ((2, 3), (2, 3))
    assert placed_on_node(crowded, cpus=(2, 3), alone=True) is crowded
    own = with_target(crowded, cpus=(4,))
    assert placed_on_node(own, cpus=(2, 3), alone=False) is own
    container = with_target(scenario_of(), command=("/usr/bin/docker", "run", "tensorflow/serving"))
    assert placed_on_node(container, cpus=(2, 3), alone=False) is container


def test_a_resumed_scenario_gives_up_the_cpus_of_its_first_node() -> None:
    for scenario in (scenario_of(), with_load(scenario_of(), processes=2)):
        earlier = placed_on_node(scenario, cpus=(0, 1), alone=False)
        assert cpus_of(unplaced(earlier, cpus=(0, 1), alone=False)) == (None, None)
        assert unplaced(earlier, cpus=(2, 3), alone=False) is earlier
    own = with_target(scenario_of(), cpus=(0, 1))
    assert unplaced(own, cpus=(0, 1), alone=False) is own


def test_all_means_every_cpu_of_this_process_and_a_placement_is_written_down() -> None:
    written = format_scenario(scenario_of())
    shared = parse_scenario(written.replace("target:\n", "target:\n  cpus: all\n", 1))
    assert shared.target.cpus == tuple(sorted(schedulable_cpus()))
    assert placed(shared, cpus=range(4), quota=NO_QUOTA) == (shared, "")
    apart, _ = placed(scenario_of(), cpus=[0, 1], quota=NO_QUOTA)
    assert parse_scenario(format_scenario(apart)).target.cpus == (0,)


def test_cpus_are_listed_as_ranges() -> None:
    assert cpu_list([3]) == "CPU 3"
    assert cpu_list([8, 0, 1, 2, 3]) == "CPUs 0-3, 8"
    assert cpu_list([1, 3]) == "CPUs 1, 3"
