"""Trials on several nodes at once: a sweep on fakes, stations as a cluster would hold them, a real one on two Ray nodes."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchtune.batching.triton_config import FoundBatching
from batchtune.errors import MeasurementInvalidError, TargetError, UsageError
from batchtune.load.cluster.host import Place
from batchtune.load.fleet import LiveAggregate
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import placed_on_node
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.bench import Plan
from batchtune.tune.search.contenders import one_by_one
from batchtune.tune.sweep.ray_nodes import NodeBenches, NodeStation, ServerNodes
from batchtune.tune.sweep.sweep import sweep_nodes
from batchtune.tune.trials.trial import FinishedTrial, Trial
from tests.ray_script import answer_of
from tests.tune.tune_fakes import (
    FakeClock,
    FakeFleet,
    FakeTarget,
    Law,
    bench_of,
    capacity_scenario,
    heard,
    planned,
    planted,
    scenario_of,
)

SPACE = {"max_batch_size": [1, 4, 16, 32], "batch_timeout_micros": [0, 2000], "num_batch_threads": [1]}
SEARCH = {"budget": {"time": "30s"}, "space": SPACE}
CLOSED = scenario_of(search=SEARCH)
CAPACITY = capacity_scenario(search=SEARCH)


class FakeNodes:
    """A fake server and client for each law, all started by one head whose time is that of the last end; `begun` lists
    what ran where, with the head's time."""

    def __init__(self, scenario: Scenario, laws: Sequence[Law], **target: Any) -> None:
        self.names = [f"n{number}" for number in range(1, len(laws) + 1)]
        self.begun: list[tuple[float, str, Plan]] = []
        self.clock = FakeClock()
        self._nodes = {}
        for seed, (name, law) in enumerate(zip(self.names, laws, strict=True), start=1):
            fake = FakeTarget(FakeClock(), law=law, **target)
            self._nodes[name] = fake.clock, bench_of(scenario, fake, FakeFleet(fake, seed=seed))

    def run_all(self, plans: Sequence[Plan]) -> Iterator[FinishedTrial]:
        """In the order of their ends: each node begins the first plan that waits as soon as it is free."""
        waiting, free, ends = list(plans), list(self.names), []
        while waiting or ends:
            while waiting and free:
                heapq.heappush(ends, self._run(waiting.pop(0), free.pop(0)))
            self.clock.now_s, _, name, done = heapq.heappop(ends)
            free.append(name)
            yield replace(done, trial=replace(done.trial, node=name))

    def _run(self, plan: Plan, name: str) -> tuple[float, int, str, FinishedTrial]:
        self.begun.append((self.clock(), name, plan))
        clock, bench = self._nodes[name]
        clock.now_s = self.clock()
        done = bench.run(plan)
        return clock(), plan.number, name, done


def swept(scenario, count, *, finished=(), **target):
    """On so many nodes that are alike."""
    nodes, summaries = FakeNodes(scenario, [Law(noise=0.01)] * count, **target), []
    on_event = heard(on_summary=summaries.append)
    found = sweep_nodes(
        scenario, lambda _report: nodes, finished=finished, on_event=on_event, now_s=nodes.clock
    )
    return [one.trial for one in found], nodes, summaries[0]


@pytest.fixture(scope="module", params=[CLOSED, CAPACITY], ids=["throughput", "capacity"])
def four(request):
    """A scenario, and its sweep on four nodes."""
    return request.param, *swept(request.param, 4)


def at_once(nodes: FakeNodes) -> list[list[Plan]]:
    """The plans that were asked for together: those begun at one time, before any ended."""
    by_time: dict[float, list[Plan]] = {}
    for begun_s, _, plan in nodes.begun:
        by_time.setdefault(begun_s, []).append(plan)
    return list(by_time.values())


def test_trials_run_at_once_on_every_node_and_each_says_where(four):
    _, trials, nodes, summary = four
    assert {trial.number for trial in trials} == set(range(1, len(trials) + 1))
    assert {trial.node for trial in trials} == {"n1", "n2", "n3", "n4"}
    assert summary.nodes == "n1, n2, n3, n4"
    assert sum(trial.seconds for trial in trials) > 2.0 * (nodes.clock() - 1000.0)
    assert "node" not in {trial.source for trial in trials}  # nothing is corrected by a speed


def test_what_is_asked_at_once_is_of_different_configurations_but_for_fresh_runs(four):
    for plans in at_once(four[2]):
        compared = [plan.request.configuration for plan in plans if plan.request.source != "confirm"]
        assert len(set(compared)) == len(compared)
        fresh = Counter(plan.request.configuration for plan in plans if plan.request.source == "confirm")
        assert max(fresh.values(), default=0) <= 3
        assert len({plan.seed for plan in plans}) == len(plans)


def test_nothing_is_asked_beside_what_decides_whether_it_is_asked(four):
    """A lone client alone; scouts beside scouts; no fresh run beside a comparison that was asked for before it."""
    groups = [[plan.request.source for plan in plans] for plans in at_once(four[2])]
    assert groups[0] == ["probe"]
    for sources in groups:
        assert "calibration" not in sources or set(sources) == {"calibration"}
        assert "confirm" not in sources or sources[0] == "confirm"


def test_the_choice_is_that_of_one_server_and_is_confirmed(four):
    """All 16 clients in one batch; of a capacity whichever size holds most."""
    scenario, trials, _, _ = four
    chosen, alone = (recommend(runs, scenario=scenario) for runs in (trials, swept(scenario, 1)[0]))
    assert chosen.configuration.batching.max_batch_size >= 16
    assert sum(trial.source == "confirm" for trial in trials) >= 3
    assert chosen.throughput_rps.value == pytest.approx(alone.throughput_rps.value, rel=0.06)


@pytest.mark.parametrize("count", [1, 3])
def test_a_budget_of_time_is_kept_by_the_clock_on_the_wall(count):
    trials, nodes, _ = swept(CLOSED, count)
    assert nodes.clock() - 1000.0 <= 30.0 + max(trial.seconds for trial in trials)


def test_a_sweep_goes_on_with_the_nodes_that_are_left():
    nodes = FakeNodes(CLOSED, [Law(noise=0.01)] * 3)
    found = sweep_nodes(CLOSED, lambda _report: nodes, now_s=nodes.clock)
    assert "n3" in {next(found).trial.node for _ in range(4)}
    nodes.names.remove("n3")
    rest = [done.trial.node for done in found]
    assert set(rest[3:]) == {"n1", "n2"}


def ran_by(nodes: NodeBenches | ServerNodes, count: int) -> list[Trial]:
    plans = [planned(one_by_one(CLOSED), number=number, source="grid") for number in range(1, count + 1)]
    return [done.trial for done in nodes.run_all(plans)]


def played(plan: Plan) -> FinishedTrial:
    return FinishedTrial(trial=planted(plan.number, p95_s=0.01), samples=None)


def lost(_plan: Plan) -> FinishedTrial:
    raise MeasurementInvalidError("its node is gone")


def test_more_plans_than_nodes_run_as_these_become_free():
    done = ran_by(NodeBenches({name: SimpleNamespace(run=played) for name in ("n1", "n2")}), 5)
    assert {trial.node for trial in done} == {"n1", "n2"}
    assert sorted(trial.number for trial in done) == [1, 2, 3, 4, 5]


def test_without_any_node_left_the_sweep_ends():
    benches = NodeBenches({"n1": SimpleNamespace(run=lost)})
    with pytest.raises(MeasurementInvalidError, match="n1, the last node, was lost: its node is gone"):
        ran_by(benches, 1)


class FakeStation(NodeStation):
    """A station that launches no server, and that may be lost under its trial."""

    def __init__(
        self, node: str, machine: str, *, cpus: int = 4, lost: bool = False, rows: int | None = None
    ) -> None:
        super().__init__()
        self._bench = SimpleNamespace(run=played)  # type: ignore[assignment]
        self._place = Place(node=node, machine=machine, cpus=tuple(range(cpus)))
        self._lost, self._rows = lost, rows

    def place(self) -> Place:
        return self._place

    def open(self, scenario: Scenario, cpus: Any, alone: bool) -> Scenario:
        self.opened, self.scenario = (tuple(cpus), alone), scenario
        if self._rows == 0:
            raise TargetError("no tritonserver")
        found = None if self._rows is None else FoundBatching(max_batch_size=self._rows)
        return scenario.model_copy(update={"target": scenario.target.model_copy(update={"found": found})})

    def look(self) -> Any:
        if self._lost:
            raise MeasurementInvalidError("the actor died")
        return super().look()


def nodes_of(*stations: FakeStation) -> tuple[ServerNodes, list[str]]:
    told: list[str] = []
    return ServerNodes(scenario_of(), stations, on_event=told.append, sleep=lambda _seconds: None), told


def test_what_a_tritons_model_had_must_be_the_same_on_all_nodes_and_each_must_start() -> None:
    first = FakeStation("a", "m1", rows=8)
    nodes, _ = nodes_of(first, FakeStation("b", "m2", rows=8))
    assert nodes.scenario.target.found is not None
    with pytest.raises(UsageError, match="b has another configuration of it than a"):
        nodes_of(first, FakeStation("b", "m2", rows=4))
    with pytest.raises(TargetError, match="b: no tritonserver"):
        nodes_of(first, FakeStation("b", "m2", rows=0))


def test_servers_on_one_machine_share_its_cpus_out_and_do_not_watch_each_other() -> None:
    stations = [FakeStation("a", "m1"), FakeStation("a", "m1"), FakeStation("b", "m2")]
    nodes, told = nodes_of(*stations)
    opened = [((0, 1), False), ((2, 3), False), ((0, 1, 2, 3), True)]
    assert [station.opened for station in stations] == opened
    assert nodes.names == ("a #1", "a #2", "b")
    assert "2 of them share a machine" in told[-1]


def test_servers_of_a_resumed_sweep_have_their_own_cpus_again() -> None:
    earlier = placed_on_node(scenario_of(), cpus=(0, 1), alone=False)
    stations = [FakeStation("a", "m1"), FakeStation("a", "m1")]
    ServerNodes(earlier, stations)
    assert earlier.target.cpus is not None
    asked = [(station.scenario.target.cpus, station.scenario.load.cpus) for station in stations]
    assert asked == [(None, None)] * 2


def test_more_servers_than_cpus_all_have_all_of_them() -> None:
    stations = [FakeStation("a", "m", cpus=1), FakeStation("a", "m", cpus=1)]
    nodes_of(*stations)
    assert [station.opened for station in stations] == [((0,), False)] * 2


@pytest.mark.parametrize("lost", [False, True])
def test_trials_run_on_every_station_that_is_not_lost_and_say_where(lost: bool) -> None:
    nodes, told = nodes_of(FakeStation("a", "m1", lost=lost), FakeStation("b", "m2"))
    done = ran_by(nodes, 4)
    assert {one.node for one in done} == ({"b"} if lost else {"a", "b"})
    assert sorted(one.number for one in done) == [1, 2, 3, 4]
    said = "a is lost: the actor died; its trial is run again on another node"
    assert (told[-1] == said, nodes.names == ("b",)) == (lost, lost)


def test_one_live_load_is_told_while_trials_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchtune.tune.sweep.ray_nodes.WAIT_S", 0.0)
    nodes, _ = nodes_of(FakeStation("a", "m1"))
    told: list[int] = []
    nodes.report = lambda plan, _live: told.append(plan.number)
    (trials,) = nodes._trials
    trials.live = planned(one_by_one(CLOSED)), LiveAggregate.__new__(LiveAggregate)
    nodes._report()
    assert told == [1]


def result_of(station: NodeStation, plan: object) -> Any:
    """What a trial on the station ends with, whose bench answers with its thread, or raises what it is asked with."""

    def run(asked: Any) -> threading.Thread:
        if isinstance(asked, Exception):
            raise asked
        return threading.current_thread()

    bench: Any = SimpleNamespace(run=run)
    station._bench = bench
    station.begin(plan)  # type: ignore[arg-type]
    station._trial.exception(timeout=30.0)
    assert station.look()[1]
    return station.result()


@pytest.fixture
def station():
    opened = NodeStation()
    yield opened
    opened.close()


def test_the_thread_that_launches_a_server_outlives_the_trial(station: NodeStation) -> None:
    """The kernel ends a server with the thread that launched it, and so between two trials."""
    first = result_of(station, "first")
    assert first.is_alive()
    assert result_of(station, "second") is first
    station.close()
    first.join(30.0)
    assert not first.is_alive()


def test_a_fault_of_a_trial_is_the_trials(station: NodeStation) -> None:
    with pytest.raises(TargetError, match="gone"):
        result_of(station, TargetError("gone"))
    with pytest.raises(MeasurementInvalidError, match="its trial ended with ValueError: what"):
        result_of(station, ValueError("what"))


def test_a_triton_is_launched_when_its_node_is_opened(tmp_path: Path, station: NodeStation) -> None:
    """What its model's configuration says of batching belongs to the search; that nothing starts is told before."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python" max_batch_size: 4')
    target = {"kind": "triton", "model": str(tmp_path / "m"), "command": [str(tmp_path / "tritonserver")]}
    with pytest.raises(TargetError, match=r"tritonserver"):
        station.open(scenario_of(target=target, request={"protocol": "kserve_grpc"}), (0,), alone=False)


def test_a_server_keeps_to_its_share_where_that_is_too_small_for_both(station: NodeStation) -> None:
    with pytest.raises(UsageError, match=r"target\.cpus: this process may run on"):
        station.open(scenario_of(), (9_999,), alone=False)


def test_what_was_not_begun_is_lost(station: NodeStation) -> None:
    with pytest.raises(MeasurementInvalidError, match="was not opened"):
        station.begin("plan")  # type: ignore[arg-type]
    with pytest.raises(MeasurementInvalidError, match="runs no trial"):
        station.look()


@pytest.mark.slow
def test_a_sweep_on_two_ray_nodes_goes_on_when_one_is_killed_and_recommends_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray", reason="pip install 'batchtune[ray]'")
    found = answer_of(Path(__file__).with_name("ray_sweep.py"), str(tmp_path), timeout_s=240)
    assert found["exit_code"] in (0, 5)
    assert found["exit_code"] == 5 or found["batching"]["max_batch_size"] == 8
    assert found["nodes"] == 2
    assert found["overlapping"] > 0
    assert "servers under test: 2 nodes" in found["said"]
    assert "is lost: " in found["said"]
    assert found["trials_after_one_was_lost"] > 0
    assert found["left"] == []
