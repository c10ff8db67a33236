"""The head of several servers under test: stations as a cluster would hold them, and a real sweep on two Ray nodes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from batchtune.batching.triton_config import FoundBatching
from batchtune.errors import MeasurementInvalidError, TargetError, UsageError
from batchtune.load.cluster.host import Place
from batchtune.load.fleet import LiveAggregate
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import placed_on_node
from batchtune.tune.bench import Plan
from batchtune.tune.search.contenders import one_by_one
from batchtune.tune.sweep.ray_nodes import ServerNodes
from batchtune.tune.trials.trial import FinishedTrial, TrialRequest
from tests.ray_script import answer_of
from tests.tune.tune_fakes import planted, scenario_of

SCRIPT = Path(__file__).with_name("ray_sweep.py")
NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'batchtune[ray]'")


class FakeStation:
    """A station whose trials end at the second look, but for those that it is lost under."""

    def __init__(
        self, node: str, machine: str, *, cpus: int = 4, lost: bool = False, rows: int | None = None
    ) -> None:
        self._place = Place(node=node, machine=machine, cpus=tuple(range(cpus)))
        self._lost = lost
        self._looks = 0
        self._plan: Plan | None = None
        self._rows = rows
        self.opened: tuple[tuple[int, ...], bool] | None = None
        self.scenario: Scenario | None = None

    def place(self) -> Place:
        return self._place

    def open(self, scenario: Scenario, cpus: Any, alone: bool) -> Scenario:
        self.opened, self.scenario = (tuple(cpus), alone), scenario
        if self._rows == 0:
            raise TargetError("no tritonserver")
        found = None if self._rows is None else FoundBatching(max_batch_size=self._rows)
        return scenario.model_copy(update={"target": scenario.target.model_copy(update={"found": found})})

    def begin(self, plan: Plan) -> None:
        self._plan, self._looks = plan, 0

    def look(self) -> tuple[None, bool]:
        if self._lost:
            raise MeasurementInvalidError("the actor died")
        self._looks += 1
        return None, self._looks > 1

    def result(self) -> FinishedTrial:
        assert self._plan is not None
        return FinishedTrial(trial=planted(self._plan.number, throughput=1.0, p95_s=0.01), samples=None)

    def close(self) -> None:
        pass


def nodes_of(*stations: FakeStation, told: list[str] | None = None) -> ServerNodes:
    events = [] if told is None else told
    return ServerNodes(scenario_of(), stations, on_event=events.append, sleep=lambda _seconds: None)


def plans(count: int) -> list[Plan]:
    configuration = one_by_one(scenario_of())
    return [
        Plan(
            number=number,
            seed=1,
            request=TrialRequest(configuration=configuration, source="grid", reason=""),
        )
        for number in range(1, count + 1)
    ]


def test_what_a_tritons_model_had_must_be_the_same_on_all_nodes() -> None:
    nodes = nodes_of(FakeStation("a", "m1", rows=8), FakeStation("b", "m2", rows=8))
    assert nodes.scenario.target.found is not None
    with pytest.raises(UsageError, match="b has another configuration of it than a"):
        nodes_of(FakeStation("a", "m1", rows=8), FakeStation("b", "m2", rows=4))


def test_a_server_that_does_not_start_is_named_by_its_node() -> None:
    with pytest.raises(TargetError, match="b: no tritonserver"):
        nodes_of(FakeStation("a", "m1", rows=8), FakeStation("b", "m2", rows=0))


def test_servers_on_one_machine_share_its_cpus_out_and_do_not_watch_each_other() -> None:
    told: list[str] = []
    stations = [FakeStation("a", "m1"), FakeStation("a", "m1"), FakeStation("b", "m2")]
    nodes = nodes_of(*stations, told=told)
    assert [station.opened for station in stations] == [
        ((0, 1), False),
        ((2, 3), False),
        ((0, 1, 2, 3), True),
    ]
    assert nodes.names == ("a #1", "a #2", "b")
    assert "2 of them share a machine" in told[-1]


def test_servers_of_a_resumed_sweep_have_their_own_cpus_again() -> None:
    earlier = placed_on_node(scenario_of(), cpus=(0, 1), alone=False)
    stations = [FakeStation("a", "m1"), FakeStation("a", "m1")]
    ServerNodes(earlier, stations)
    assert earlier.target.cpus is not None
    for station in stations:
        assert station.scenario is not None
        assert (station.scenario.target.cpus, station.scenario.load.cpus) == (None, None)


def test_more_servers_than_cpus_all_have_all_of_them() -> None:
    stations = [FakeStation("a", "m", cpus=1), FakeStation("a", "m", cpus=1)]
    nodes_of(*stations)
    assert [station.opened for station in stations] == [((0,), False), ((0,), False)]


def test_trials_run_on_every_station_and_say_where() -> None:
    nodes = nodes_of(FakeStation("a", "m1"), FakeStation("b", "m2"))
    done = list(nodes.run_all(plans(4)))
    assert {one.trial.node for one in done} == {"a", "b"}
    assert sorted(one.trial.number for one in done) == [1, 2, 3, 4]


def test_a_station_that_is_lost_leaves_its_trial_to_another() -> None:
    told: list[str] = []
    nodes = nodes_of(FakeStation("a", "m1", lost=True), FakeStation("b", "m2"), told=told)
    done = list(nodes.run_all(plans(2)))
    assert {one.trial.node for one in done} == {"b"}
    assert told[-1] == "a is lost: the actor died; its trial is run again on another node"


def test_one_live_load_is_told_while_trials_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchtune.tune.sweep.ray_nodes.WAIT_S", 0.0)
    nodes = nodes_of(FakeStation("a", "m1"))
    told: list[int] = []
    nodes.report = lambda plan, _live: told.append(plan.number)
    (trials,) = nodes._trials
    trials.live = plans(1)[0], LiveAggregate.__new__(LiveAggregate)
    nodes._report()
    assert told == [1]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answer_of(SCRIPT, str(tmp_path_factory.mktemp("runs")), timeout_s=240)


@pytest.mark.slow
@NEEDS_RAY
def test_a_sweep_on_two_ray_nodes_recommends_and_leaves_nothing(swept: dict[str, Any]) -> None:
    assert swept["exit_code"] in (0, 5)
    if swept["exit_code"] == 0:
        assert swept["batching"]["max_batch_size"] == 8
    assert len(swept["nodes"]) == 2
    assert swept["overlapping"] > 0
    assert "servers under test: 2 nodes" in swept["said"]
    assert swept["left"] == []


@pytest.mark.slow
@NEEDS_RAY
def test_a_node_killed_under_its_trial_is_gone_on_without(swept: dict[str, Any]) -> None:
    assert swept["killed"]["lost"]
    assert swept["killed"]["exit_code"] in (0, 5)
    assert swept["killed"]["trials_after"] > 0
