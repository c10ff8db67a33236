"""Trials on several nodes at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from batchtune.errors import MeasurementInvalidError, TargetError
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.bench import Plan
from batchtune.tune.search.contenders import one_by_one
from batchtune.tune.sweep.ray_nodes import NodeBenches
from batchtune.tune.sweep.sweep import sweep_nodes
from batchtune.tune.trials.trial import FinishedTrial, Trial, TrialRequest
from tests.tune.node_fakes import FakeNodes
from tests.tune.tune_fakes import Law, heard, planted, scenario_of

SPACE = {"max_batch_size": [1, 4, 16, 32], "batch_timeout_micros": [0, 2000], "num_batch_threads": [1]}
SEARCH = {"strategy": "guided", "budget": {"time": "30s"}, "space": SPACE}
CLOSED = scenario_of(search=SEARCH)
CAPACITY = scenario_of(load={"arrivals": "poisson"}, objective="capacity", slo={"p95": "20ms"}, search=SEARCH)


def alike(count: int) -> dict[str, Law]:
    return {f"n{number}": Law(noise=0.01) for number in range(1, count + 1)}


def swept(scenario, laws, *, finished=(), **target):
    nodes, summaries = FakeNodes(scenario, laws, **target), []
    on_event = heard(on_summary=summaries.append)
    found = sweep_nodes(
        scenario, lambda _report: nodes, finished=finished, on_event=on_event, now_s=nodes.now_s
    )
    return [one.trial for one in found], nodes, summaries[0]


@pytest.fixture(scope="module", params=[CLOSED, CAPACITY], ids=["throughput", "capacity"])
def four(request):
    """A scenario, and its sweep on four nodes."""
    return request.param, *swept(request.param, alike(4))


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
    assert sum(trial.seconds for trial in trials) > 2.0 * (nodes.now_s() - 1000.0)


def test_nodes_are_not_compared_and_nothing_is_corrected_by_a_speed(four):
    _, trials, _, _ = four
    assert "node" not in {trial.source for trial in trials}


def test_what_is_asked_at_once_is_of_different_configurations_but_for_fresh_runs(four):
    _, _, nodes, _ = four
    for plans in at_once(nodes):
        compared = [plan.request.configuration for plan in plans if plan.request.source != "confirm"]
        assert len(set(compared)) == len(compared)
        fresh = Counter(plan.request.configuration for plan in plans if plan.request.source == "confirm")
        assert max(fresh.values(), default=0) <= 3
        assert len({plan.seed for plan in plans}) == len(plans)


def test_nothing_is_asked_beside_what_decides_whether_it_is_asked(four):
    """A lone client alone; scouts beside scouts; no fresh run beside a comparison that was asked for before it."""
    _, _, nodes, _ = four
    groups = at_once(nodes)
    assert [plan.request.source for plan in groups[0]] == ["probe"]
    for plans in groups:
        sources = [plan.request.source for plan in plans]
        assert "calibration" not in sources or set(sources) == {"calibration"}
        assert "confirm" not in sources or sources[0] == "confirm"


def test_the_choice_is_that_of_one_server_and_is_confirmed(four):
    """All 16 clients in one batch; of a capacity whichever size holds most."""
    scenario, trials, _, _ = four
    chosen = recommend(trials, scenario=scenario)
    alone = recommend(swept(scenario, alike(1))[0], scenario=scenario)
    assert chosen.configuration.batching.max_batch_size >= 16
    assert sum(trial.source == "confirm" for trial in trials) >= 3
    assert chosen.throughput_rps.value == pytest.approx(alone.throughput_rps.value, rel=0.06)


def test_a_budget_of_time_is_kept_by_the_clock_on_the_wall():
    for count in (1, 3):
        trials, nodes, _ = swept(CLOSED, alike(count))
        assert nodes.now_s() - 1000.0 <= 30.0 + max(trial.seconds for trial in trials)


def test_a_resumed_sweep_goes_on_where_it_stood():
    trials, *_ = swept(CAPACITY, alike(3))
    cut = len(trials) // 2
    resumed, nodes, _ = swept(CAPACITY, alike(3), finished=trials[:cut])
    assert {plan.number for _, _, plan in nodes.begun} == {trial.number for trial in resumed}
    assert min(trial.number for trial in resumed) == 1 + max(trial.number for trial in trials[:cut])
    assert "probe" not in {trial.source for trial in resumed}


def test_what_fails_on_every_node_ends_the_sweep():
    with pytest.raises(TargetError, match="3 trials in a row failed; the last: no such model"):
        swept(CLOSED, alike(2), refuses=lambda _configuration: "no such model")


class _Bench:
    """Notes who runs what; `lost` raises as a bench does whose node is gone."""

    def __init__(self, name: str, ran: list[tuple[str, int]], *, lost: bool = False) -> None:
        self._name, self._ran, self._lost = name, ran, lost

    def run(self, plan: Plan) -> FinishedTrial:
        if self._lost:
            raise MeasurementInvalidError("its node is gone")
        self._ran.append((self._name, plan.number))
        return FinishedTrial(trial=planted(plan.number, throughput=1.0, p95_s=0.01), samples=None)


def plans(count: int) -> list[Plan]:
    configuration = one_by_one(CLOSED)
    return [
        Plan(
            number=number,
            seed=1,
            request=TrialRequest(configuration=configuration, source="grid", reason=""),
        )
        for number in range(1, count + 1)
    ]


def ran_by(benches: NodeBenches, count: int) -> list[Trial]:
    return [done.trial for done in benches.run_all(plans(count))]


def test_more_plans_than_nodes_run_as_these_become_free():
    ran: list[tuple[str, int]] = []
    benches = NodeBenches({name: _Bench(name, ran) for name in ("n1", "n2")})
    done = ran_by(benches, 5)
    assert {trial.number: trial.node for trial in done} == {number: name for name, number in ran}
    assert sorted(trial.number for trial in done) == [1, 2, 3, 4, 5]


def test_what_a_lost_node_was_to_run_is_run_on_another():
    ran, told = [], []
    benches = NodeBenches({"n1": _Bench("n1", ran, lost=True), "n2": _Bench("n2", ran)}, on_event=told.append)
    done = ran_by(benches, 3)
    assert [trial.node for trial in done] == ["n2"] * 3
    assert told == ["n1 is lost: its node is gone; its trial is run again on another node"]
    assert benches.names == ("n2",)


def test_without_any_node_left_the_sweep_ends():
    benches = NodeBenches({"n1": _Bench("n1", [], lost=True)})
    with pytest.raises(MeasurementInvalidError, match="n1, the last node, was lost: its node is gone"):
        ran_by(benches, 1)


def test_a_sweep_goes_on_with_the_nodes_that_are_left():
    names: Callable[[list[Trial]], set[str | None]] = lambda trials: {trial.node for trial in trials}  # noqa: E731
    nodes = FakeNodes(CLOSED, alike(3))
    found = sweep_nodes(CLOSED, lambda _report: nodes, now_s=nodes.now_s)
    begun = [next(found).trial for _ in range(4)]
    assert "n3" in names(begun)
    nodes.names.remove("n3")
    rest = [done.trial for done in found]
    assert names(rest[3:]) == {"n1", "n2"}
