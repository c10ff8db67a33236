"""Trials on several nodes at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from batchtune.errors import MeasurementInvalidError
from batchtune.recommend.recommendation import recommend
from batchtune.tune.bench import Plan
from batchtune.tune.strategies.references import one_by_one
from batchtune.tune.strategies.side_by_side import together
from batchtune.tune.sweep.nodes import NodeBenches
from batchtune.tune.sweep.progress import Watcher
from batchtune.tune.sweep.sweep import sweep_nodes
from batchtune.tune.trials.trial import Ask, FinishedTrial
from tests.tune.node_fakes import FakeNodes
from tests.tune.tune_fakes import Law, planted, scenario_of

SPACE = {"max_batch_size": [1, 4, 16, 32], "batch_timeout_micros": [0, 2000], "num_batch_threads": [1]}
GUIDED = scenario_of(search={"strategy": "guided", "budget": {"time": "30s"}, "space": SPACE})
SAMPLED = scenario_of(
    search={"strategy": "optuna", "budget": {"trials": 7}, "space": SPACE, "sampler": "random"}
)
ALIKE = Law(noise=0.01)


def slower(law: Law, factor: float) -> Law:
    return Law(fixed_s=law.fixed_s * factor, per_row_s=law.per_row_s * factor, noise=law.noise)


def swept(scenario, laws, *, finished=(), nodes_class=FakeNodes):
    nodes, told, summaries = nodes_class(scenario, laws), [], []
    watcher = Watcher(on_plan=told.append, on_summary=summaries.append)
    found = sweep_nodes(
        scenario, lambda _report: nodes, finished=finished, watcher=watcher, now_s=nodes.now_s
    )
    return [one.trial for one in found], nodes, told, summaries[0]


def alike(count: int) -> dict[str, Law]:
    return {f"n{number}": ALIKE for number in range(1, count + 1)}


@pytest.fixture(scope="module")
def four():
    """A guided sweep on four nodes, the second of two thirds of the others' speed."""
    return swept(GUIDED, {**alike(4), "n2": slower(ALIKE, 1.5)})


def test_nodes_are_compared_first_and_it_is_said_how_alike_they_are(four):
    trials, _, told, summary = four
    assert [trial.source for trial in trials[:12]] == ["node"] * 12
    assert {trial.node for trial in trials[:4]} == {"n1", "n2", "n3", "n4"}
    assert "node" not in {trial.source for trial in trials[12:]}
    assert summary.nodes in told
    assert summary.nodes.startswith("4 nodes under the same load, 2 runs on each")


def test_trials_run_at_once_and_fill_the_nodes(four):
    trials, nodes, _, _ = four
    busy_s = sum(trial.seconds for trial in trials)
    assert busy_s > 2.0 * (nodes.now_s() - 1000.0)
    assert {trial.number for trial in trials} == set(range(1, len(trials) + 1))


def test_what_is_asked_for_later_anyway_runs_on_nodes_that_have_nothing_to_do():
    told: list[Ask] = []
    outlook = SimpleNamespace(nodes=("n1", "n2", "n3"), ahead=lambda asks: told.extend([*asks, "end"]))
    first, second, third, fourth = asks = [
        Ask(configuration=one_by_one(GUIDED), source="twin", reason=word) for word in "abcd"
    ]
    next(together(outlook, [first, second], later=[third, fourth]))
    next(together(outlook, asks[:3], later=[fourth]))
    assert told == [first, second, third, "end", first, second, third, "end"]


def test_the_usual_answers_are_measured_once(four):
    trials, *_ = four
    assert [sum(trial.source == source for trial in trials) for source in ("no_batching", "defaults")] == [
        1,
        1,
    ]


def test_what_decides_is_compared_within_a_node(four):
    """Each block of the race and of the fresh runs lies on one node, and the blocks on several."""
    trials, *_ = four
    for source in ("race", "confirm"):
        nodes_of = defaultdict(set)
        for trial in trials:
            if trial.source == source:
                nodes_of[trial.block].add(trial.node)
        assert nodes_of
        assert all(len(nodes) == 1 for nodes in nodes_of.values())
        assert len(set.union(*nodes_of.values())) >= 3


def test_proposals_made_at_once_differ(four):
    trials, *_ = four
    proposed = [trial.configuration for trial in trials if trial.source in ("twin", "sampler")]
    assert len(set(proposed)) == len(proposed) > 1


def test_a_slow_node_is_not_taken_for_a_slow_configuration(four):
    """What the search measured on a node of two thirds of the speed counts for what it would be on the usual one."""
    trials, _, told, _ = four
    assert any("faster than the slowest (n2)" in text for text in told)
    by_configuration = defaultdict(lambda: defaultdict(list))
    for trial in trials:
        if trial.source == "race":
            by_configuration[trial.configuration][trial.node].append(trial.objective.value)
    compared = [nodes for nodes in by_configuration.values() if {"n1", "n2"} <= nodes.keys()]
    assert compared
    for nodes in compared:
        assert nodes["n2"][0] == pytest.approx(nodes["n1"][0], rel=0.12)
    slow = next(trial for trial in trials if trial.source == "race" and trial.node == "n2")
    assert slow.node_speed < 0.8
    assert slow.objective.value * slow.node_speed == pytest.approx(slow.measurement.throughput_rps.value)


def test_fresh_runs_state_what_they_measured(four):
    trials, *_ = four
    fresh = next(trial for trial in trials if trial.source == "confirm" and trial.node == "n2")
    assert fresh.objective == fresh.measurement.throughput_rps


def test_the_choice_is_that_of_the_device(four):
    """All 16 clients in one batch."""
    trials, *_ = four
    assert recommend(trials, scenario=GUIDED).configuration.batching.max_batch_size >= 16


def test_a_budget_of_trials_is_kept():
    trials, *_ = swept(SAMPLED, alike(4))
    searched = {trial.configuration for trial in trials if trial.source not in ("node", "confirm")}
    assert len(searched) == 7


def test_a_resumed_sweep_runs_nothing_again():
    trials, *_ = swept(SAMPLED, alike(3))
    cut = next(trial.number for trial in trials if trial.source == "sampler")
    resumed, nodes, *_ = swept(SAMPLED, alike(3), finished=trials[:cut])
    begun = [plan for _, _, plan in nodes.begun]
    kept = {(trial.source, trial.configuration) for trial in trials[:cut]}
    assert not kept & {(plan.source, plan.configuration) for plan in begun}
    searched, again = (
        sorted(trial.configuration.label() for trial in ledger if trial.source == "sampler")
        for ledger in (trials, [*trials[:cut], *resumed])
    )
    assert again == searched


def broken(where: Callable[[Plan, str], bool]) -> type[FakeNodes]:
    """Nodes on which such plans fail."""

    class Broken(FakeNodes):
        def _run(self, plan, name):
            end_s, number, _, done = super()._run(plan, name)
            if where(plan, name):
                failed = replace(done.trial, state="failed", failure="no such model", objective=None)
                done = FinishedTrial(trial=failed, samples=None)
            return end_s, number, name, done

    return Broken


def test_a_node_that_cannot_run_the_model_is_left_out():
    trials, _, told, _ = swept(SAMPLED, alike(3), nodes_class=broken(lambda _plan, name: name == "n2"))
    assert "n2 is left out: no such model" in told
    assert {trial.node for trial in trials if trial.source != "node"} == {"n1", "n3"}


def test_what_fails_on_every_node_leaves_none_out():
    def under_many(plan: Plan, _name: str) -> bool:
        return plan.source == "node" and plan.concurrency != 1

    trials, _, told, _ = swept(SAMPLED, alike(2), nodes_class=broken(under_many))
    assert [text for text in told if "left out" in text] == []
    assert {trial.node for trial in trials if trial.source != "node"} == {"n1", "n2"}


def test_of_nodes_that_fail_in_turn_one_stays():
    def in_turn(plan: Plan, name: str) -> bool:
        return plan.source == "node" and (name, plan.block) in {("n1", 2), ("n2", 3)}

    trials, _, told, _ = swept(SAMPLED, alike(2), nodes_class=broken(in_turn))
    assert [text for text in told if "left out" in text] == ["n1 is left out: no such model"]
    assert {trial.node for trial in trials if trial.source != "node"} == {"n2"}


class _Bench:
    """Notes who runs what; `lost` raises as a bench does whose node is gone."""

    def __init__(self, name, ran, *, lost=False) -> None:
        self._name, self._ran, self._lost = name, ran, lost

    def run(self, plan: Plan) -> FinishedTrial:
        if self._lost:
            raise MeasurementInvalidError("its node is gone")
        self._ran.append((self._name, plan.number))
        return FinishedTrial(trial=planted(plan.number, throughput=1.0, p95_s=0.01), samples=None)


def plans(*nodes: str | None) -> list[Plan]:
    configuration = one_by_one(SAMPLED)
    return [
        Plan(number=number, configuration=configuration, source="grid", reason="", seed=1, node=node)
        for number, node in enumerate(nodes, start=1)
    ]


def test_a_plan_with_a_node_runs_there_and_the_others_where_there_is_room():
    ran = []
    benches = NodeBenches({name: _Bench(name, ran) for name in ("n1", "n2")})
    done = list(benches.run_all(plans("n2", "n2", None, "n1")))
    where = {number: name for name, number in ran}
    assert (where[1], where[2], where[4]) == ("n2", "n2", "n1")
    assert {one.trial.number: one.trial.node for one in done} == where


def test_what_a_lost_node_was_to_run_is_run_on_another():
    ran, told = [], []
    benches = NodeBenches({"n1": _Bench("n1", ran, lost=True), "n2": _Bench("n2", ran)}, on_event=told.append)
    done = list(benches.run_all(plans("n1", "n1", None)))
    assert {one.trial.node for one in done} == {"n2"}
    assert len(done) == 3
    assert told == ["n1 is lost: its node is gone; its trial is run again on another node"]
    assert benches.names == ("n2",)


def test_without_any_node_left_the_sweep_ends():
    benches = NodeBenches({"n1": _Bench("n1", [], lost=True)})
    with pytest.raises(MeasurementInvalidError, match="n1, the last node, was lost: its node is gone"):
        list(benches.run_all(plans(None)))


def test_with_every_node_left_out_the_sweep_ends():
    benches = NodeBenches({"n1": _Bench("n1", [])})
    benches.leave_out("n1")
    with pytest.raises(MeasurementInvalidError, match="no node is left for 2 trials"):
        list(benches.run_all(plans(None, None)))
