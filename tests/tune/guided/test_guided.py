"""The guided search on simulated servers whose best configuration is known."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from batchtune.batching.parameters import Configuration
from batchtune.errors import NoFeasibleConfigurationError
from batchtune.recommend.recommendation import recommend
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.guided import calibration as guided_calibration
from batchtune.tune.guided.calibration import searched_sizes
from batchtune.tune.guided.crowd import whole_crowd
from batchtune.tune.guided.posterior import Beliefs, Cell, Kinship, Measured
from batchtune.tune.guided.state import Insight
from batchtune.tune.guided.strategy import guided_strategy
from batchtune.tune.sweep.progress import SweepProgress, Watcher
from batchtune.tune.sweep.sweep import sweep
from batchtune.tune.trials.out_of_memory import memory_ceiling_rows
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import Trial
from batchtune.twin.model.reading import Fitted
from batchtune.twin.model.service_time import linear_service_time
from batchtune.twin.model.twin import FitError, Twin
from batchtune.twin.simulator.replica import Device
from tests.tune.strategy_driver import Driver
from tests.tune.tune_fakes import Law, scenario_of
from tests.twin.simulated_fleet import _Simulated, simulated_server, true_capacities

SPACE = {"max_batch_size": [1, 4, 16, 64], "batch_timeout_micros": [0, 2000, 10000]}


def capacity_scenario(*, space=None, time="60s", p95="40ms", threads=1, seed=1) -> Scenario:
    return scenario_of(
        load={"arrivals": "poisson", "warm_up": "300ms", "duration": "1s", "seed": seed},
        objective="capacity",
        slo={"p95": p95},
        fixed={"num_batch_threads": threads, "max_enqueued_batches": 1000},
        search={
            "strategy": "guided",
            "budget": {"time": time},
            "seed": seed,
            "space": space or SPACE,
        },
    )


def device(fixed_s=0.006, per_row_s=0.0006, **more) -> Device:
    return Device(tau_s=fixed_s + per_row_s * np.arange(1025), delay_s=0.0003, **more)


def searched(
    scenario: Scenario, known: Device, *, noise=0.02, lie=1.0, finished=(), seed=1
) -> tuple[list[Trial], SearchSummary]:
    clock, target, fleet = simulated_server(known, noise=noise, lie=lie, seed=seed)
    told: list[SearchSummary] = []
    watcher = Watcher(on_summary=told.append)
    found = [
        one.trial for one in sweep(scenario, target, fleet, finished=finished, watcher=watcher, now_s=clock)
    ]
    return found, told[0]


def test_what_goes_on_between_trials_and_what_is_expected_of_each_is_told():
    clock, target, fleet = simulated_server(device())
    said: list[str] = []
    standings: list[SweepProgress] = []
    list(
        sweep(
            capacity_scenario(time="15s"),
            target,
            fleet,
            watcher=Watcher(on_thinking=said.append, on_progress=standings.append),
            now_s=clock,
        )
    )
    expected = {standing.plan.source: standing.plan.expected for standing in standings}
    assert expected["calibration"] == expected["confirm"] == ""
    assert expected["twin"].startswith("a capacity of ")
    assert expected["twin"].endswith(" requests/s")
    assert said
    assert all(one.startswith("the twin is fitted to ") and one.endswith(" trials") for one in said)


@pytest.mark.parametrize("time", ["10s", pytest.param("15s", marks=pytest.mark.slow)])
def test_in_haste_a_proposal_is_tried_at_the_rate_that_it_is_expected_to_take(time):
    """The server's defaults have more threads than the space, and the twin expects too much of them: no bar to set."""
    scenario = capacity_scenario(time=time, threads=1)
    known = device(0.002, 0.00005, serial=True)
    trials, _ = searched(scenario, known, noise=0.0)
    best = max(true_capacities(scenario, known).values())
    tried = [one.asked_rate_rps for one in trials if one.source == "twin"]
    assert tried
    assert max(tried) <= 1.15 * best
    assert regret(scenario, trials, known) <= 0.15


def regret(scenario: Scenario, trials: list[Trial], known: Device) -> float:
    truth = true_capacities(scenario, known)
    return 1.0 - truth[recommend(trials, scenario=scenario).configuration] / max(truth.values())


@pytest.fixture(scope="module")
def usual():
    scenario = capacity_scenario()
    return scenario, *searched(scenario, device(serial=True))


def test_probes_come_first_then_the_usual_answers_then_proposals_race_and_fresh_runs(usual):
    _, trials, _ = usual
    phases = [
        {
            "probe": 0,
            "calibration": 1,
            "no_batching": 2,
            "defaults": 2,
            "rule": 2,
            "race": 4,
            "confirm": 5,
        }.get(one.source, 3)
        for one in trials
    ]
    assert phases == sorted(phases)
    assert set(phases) >= {0, 1, 2, 4, 5}
    probes = [one for one in trials if one.source == "calibration"]
    assert 2 <= len(probes) <= 8
    assert all(one.asked_duration_s <= 1.5 for one in probes)


def test_the_sweep_keeps_its_time_and_says_what_it_found(usual):
    scenario, trials, summary = usual
    assert sum(one.seconds for one in trials) <= scenario.search.time_budget_s + 3.0
    assert summary.strategy == "guided"
    assert summary.twin is not None
    assert summary.trust in ("leads", "shares", "off")
    assert summary.trust_reason
    assert all(0.0 <= near <= 1.0 for near in summary.near_best.values())
    assert summary.judged == summary.space_size
    assert summary.stop_reason
    assert summary.space_size == 12
    assert set(summary.seconds_by_phase) >= {"reference points", "calibration", "confirmation"}
    assert SearchSummary.from_dict(summary.to_dict()) == summary


def test_it_ends_within_a_twentieth_of_the_true_best_on_a_serial_device(usual):
    scenario, trials, _ = usual
    assert regret(scenario, trials, device(serial=True)) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("known", "threads", "p95"),
    [
        (device(0.012, 0.0012), 2, "60ms"),
        (device(0.004, 0.0003, contention=0.5), 2, "20ms"),
    ],
    ids=["parallel", "contention"],
)
def test_it_ends_within_a_twentieth_of_the_true_best_whatever_the_threads_share(known, threads, p95):
    scenario = capacity_scenario(threads=threads, p95=p95)
    trials, _ = searched(scenario, known)
    assert regret(scenario, trials, known) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("lie", [0.7, 1.3])
def test_a_server_that_lies_about_its_times_does_not_lead_it_astray(lie):
    known, scenario = device(serial=True), capacity_scenario()
    trials, _ = searched(scenario, known, lie=lie)
    assert regret(scenario, trials, known) <= 0.05


def test_time_proportional_to_rows_is_said_before_searching():
    scenario = capacity_scenario(space={"max_batch_size": [1, 4, 16], "batch_timeout_micros": [0, 2000]})
    trials, summary = searched(scenario, device(0.0, 0.004, serial=True), noise=0.005)
    assert summary.cannot_pay is not None
    assert "proportional to its rows" in summary.cannot_pay
    assert not any(one.source in ("sampler", "race") for one in trials)
    assert len({one.configuration for one in trials if one.source == "twin"}) == 1
    assert recommend(trials, scenario=scenario, search=summary).batching_helps != "yes"


@pytest.mark.slow
def test_of_the_proposals_at_least_one_in_five_is_the_samplers_own():
    space = {"max_batch_size": [1, 2, 4, 8, 16, 32, 64], "batch_timeout_micros": [0, 1000, 2000, 5000]}
    trials, _ = searched(capacity_scenario(space=space, time="100s"), device(serial=True))
    proposed = [one.source for one in trials if one.source in ("twin", "sampler")]
    counts = Counter(proposed)
    assert counts["twin"] > 0
    assert counts["sampler"] >= len(proposed) // policy.PROPOSALS_BLOCK


@pytest.mark.slow
def test_a_resumed_search_measures_only_what_is_missing(usual):
    scenario, whole, _ = usual
    resumed, _ = searched(scenario, device(serial=True), finished=whole[:12])
    assert resumed[0].number == 13
    asked = [(one.source, one.configuration, one.block) for one in resumed]
    assert asked[0] == (whole[12].source, whole[12].configuration, whole[12].block)
    tried = {(one.source, one.configuration, one.asked_concurrency) for one in whole[:12]}
    assert not any((one.source, one.configuration, one.asked_concurrency) in tried for one in resumed)


@pytest.mark.slow
def test_throughput_in_a_closed_loop_is_raced_in_blocks():
    scenario = scenario_of(
        load={"arrivals": "closed", "concurrency": 32, "warm_up": "100ms", "duration": "1s"},
        search={"strategy": "guided", "budget": {"time": "60s"}, "space": SPACE},
        fixed={"num_batch_threads": 1},
        slo={"p95": "200ms"},
    )
    trials, _ = searched(scenario, device(serial=True))
    blocks = [one.block for one in trials if one.source == "race"]
    assert len(set(blocks)) >= 2
    chosen = recommend(trials, scenario=scenario).configuration
    assert chosen.batching.max_batch_size >= 16


CROWD = {"max_batch_size": [1, 8, 32], "batch_timeout_micros": [0, 1000, 5000], "num_batch_threads": [1]}


def crowd_scenario(**load):
    return scenario_of(
        load={"arrivals": "closed", "concurrency": 32, "warm_up": "100ms", "duration": "500ms", **load},
        search={"strategy": "guided", "budget": {"time": "20s"}, "space": CROWD},
        slo={"p95": "200ms"},
    )


def cheap_in_a_crowd(monkeypatch, known, *, cheaper):
    """The front end of this device costs so much less a request where one batch answers all 32 clients."""
    played = _Simulated._play

    def play(self):
        batching = self._configuration.batching
        together = batching is not None and batching.max_batch_size == 32 and batching.batch_timeout_micros
        front_end_s = known.front_end_s * (cheaper if together else 1.0)
        self._target.device = replace(known, front_end_s=front_end_s)
        played(self)

    monkeypatch.setattr(_Simulated, "_play", play)


def known_twin(*, fixed_s, front_end_s):
    fit = Fitted(
        service_time=linear_service_time(fixed_s, 0.000002, [1.0, 32.0]),
        contention=1.0,
        serial=True,
        jitter_ratio=0.0,
        delay_s=0.0,
        front_end_s=front_end_s,
        wake_s=0.0,
    )
    error = FitError(p95_ratio=0.1, throughput_ratio=0.1, mape=0.1, spearman=0.9, left_out=9)
    return Twin(best_fit=fit, fits=(fit,), rows_max=32, threads_max=1, error=error)


def crowd_of(front_end_s=0.00003, fixed_s=0.0001, **load):
    scenario = crowd_scenario(**load)
    outlook = SimpleNamespace(scenario=scenario, space=Space(scenario))
    return whole_crowd(outlook, known_twin(fixed_s=fixed_s, front_end_s=front_end_s))


def test_where_the_front_end_costs_much_a_batch_of_all_clients_is_tried():
    asked = crowd_of()
    assert asked.point == {"max_batch_size": 32, "batch_timeout_micros": 1000, "num_batch_threads": 1}
    assert asked.reason.startswith("all 32 clients answered by one batch")


def test_its_timeout_is_the_least_in_which_all_clients_return():
    assert crowd_of(front_end_s=0.00006).point["batch_timeout_micros"] == 5000
    assert crowd_of(think_time="1ms").point["batch_timeout_micros"] == 5000


def test_no_trial_goes_to_a_batch_of_all_clients_that_can_save_little_or_does_not_exist():
    assert crowd_of(fixed_s=0.006) is None, "the front end costs little"
    assert crowd_of(concurrency=64) is None, "more clients than the largest batch holds"
    assert crowd_of(front_end_s=0.001) is None, "no timeout in which all return"
    assert crowd_of(think_time="6ms") is None, "no timeout in which all return"
    outlook = SimpleNamespace(scenario=capacity_scenario(), space=Space(capacity_scenario()))
    assert whole_crowd(outlook, known_twin(fixed_s=0.0001, front_end_s=0.00003)) is None, (
        "no clients that return"
    )


@pytest.mark.slow
def test_a_batch_of_all_clients_that_is_the_best_is_found(monkeypatch):
    known = Device(tau_s=0.0001 + 0.000002 * np.arange(1025), front_end_s=0.00003)
    cheap_in_a_crowd(monkeypatch, known, cheaper=0.4)
    trials, _ = searched(crowd_scenario(), known)
    chosen = recommend(trials, scenario=crowd_scenario()).configuration.batching
    assert (chosen.max_batch_size, chosen.batch_timeout_micros > 0) == (32, True)


def test_sizes_below_one_requests_rows_are_not_probed():
    scenario = scenario_of(request={"protocol": "grpc", "rows": 4})
    assert searched_sizes(scenario) == [4, 8, 16, 32]


def test_where_buckets_are_searched_the_twin_is_shown_the_finest():
    space = {"max_batch_size": [4, 8], "length_buckets": ["none", "auto", 64, [16, 64], [32, 64, 128]]}
    searched = scenario_of(search={"strategy": "guided", "space": space})
    shown = [
        [dict(ask.configuration.flags).get("length_buckets") for ask in guided_calibration._asks(outlook)]
        for outlook in (
            SimpleNamespace(scenario=one, space=Space(one)) for one in (searched, capacity_scenario())
        )
    ]
    assert shown[0].count("32,64,128") == 1
    assert set(shown[0]) == {None, "32,64,128"}
    assert set(shown[1]) == {None}


def cells(scenario: Scenario) -> tuple[Space, list[Cell]]:
    space = Space(scenario)
    return space, [Cell(configuration=space.configuration(point), point=point) for point in space.points()]


def test_what_was_measured_moves_what_is_believed_of_neighbours():
    space, found = cells(capacity_scenario())
    predicted = np.zeros((len(found), 8))
    beliefs = Beliefs(
        Kinship(found, space),
        predicted=predicted,
        measured={0: Measured(merit=-0.2, sd=0.01)},
        seed=1,
        error=0.1,
    )
    assert beliefs.expected[0] == pytest.approx(-0.2, abs=0.03)
    distances = [space.distance(found[0].point, one.point) for one in found]
    near, far = np.argsort(distances)[1], np.argmax(distances)
    assert beliefs.expected[near] < beliefs.expected[far] - 0.02 < 0.0


def test_no_point_is_hoped_to_do_more_than_its_full_batches_unless_it_was_seen_to():
    """A point did far more than the twin expected of it; what its neighbour can do at most is known all the same."""
    space, found = cells(capacity_scenario())
    predicted = np.zeros((len(found), 8))
    neighbour = int(np.argsort([space.distance(found[0].point, one.point) for one in found])[1])
    most = np.full(len(found), np.inf)
    most[[0, neighbour]] = 0.0

    def believed(ceiling) -> Beliefs:
        return Beliefs(
            Kinship(found, space),
            predicted=predicted,
            measured={0: Measured(merit=0.3, sd=0.01)},
            seed=1,
            error=0.2,
            most=ceiling,
        )

    free, cut = believed(None), believed(most)
    assert free.expected[neighbour] > 0.1
    assert cut.merits[neighbour].max() <= policy.BOUND_SD
    assert cut.expected[0] == pytest.approx(0.3, abs=0.02)
    assert cut.near_best(0) > free.near_best(0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_where_a_size_that_no_probe_saw_is_the_best_its_own_runs_say_so(seed):
    """Above 32 rows each costs four times as much: the twin, probed at 24 and 64, expects too little of 32, and what it
    was wrong by there says nothing of 24, whose full batches were seen."""
    space = {"max_batch_size": [1, 4, 8, 16, 24, 32, 40, 48, 64], "batch_timeout_micros": [0, 1000, 5000]}
    scenario = capacity_scenario(space=space, time="90s", p95="50ms", threads=2, seed=seed)
    rows = np.arange(1025)
    known = Device(
        tau_s=(3.0 + 0.2 * rows + 0.6 * np.maximum(rows - 32, 0)) / 1e3, delay_s=0.0003, serial=True
    )
    trials, summary = searched(scenario, known, noise=0.015, seed=seed)
    chosen = recommend(trials, scenario=scenario, search=summary)
    assert chosen.configuration.batching.max_batch_size == 32
    assert chosen.near_best.probability > 0.2


def test_a_bound_that_is_kept_says_nothing_and_one_that_is_broken_moves_neighbours_too():
    space, found = cells(capacity_scenario())
    predicted = np.zeros((len(found), 8))

    def believed(**seen) -> Beliefs:
        measured = {0: Measured(**seen)} if seen else {}
        return Beliefs(Kinship(found, space), predicted=predicted, measured=measured, seed=1, error=0.1)

    nothing = believed().expected
    kept = believed(merit=0.5, sd=0.2, says="at least", bound=-0.6).expected
    assert kept == pytest.approx(nothing, abs=0.01)
    distances = [space.distance(found[0].point, one.point) for one in found]
    near, far = np.argsort(distances)[1], np.argmax(distances)
    for side, says in ((-1.0, "at most"), (1.0, "at least")):
        told = believed(merit=side * 0.4, sd=0.1, says=says, bound=side * 0.3)
        assert side * told.expected[0] > 0.3
        assert np.quantile(side * told.merits[0], 0.02) > 0.25
        assert side * told.expected[near] > side * told.expected[far] + 0.02 > 0.0


def test_a_point_that_differs_in_the_timeout_alone_and_not_to_the_twin_is_settled(usual):
    scenario, trials, _ = usual
    driver = Driver(scenario)
    driver.trials.extend(one for one in trials if one.source in ("probe", "calibration", "guide"))
    insight = Insight(driver, SearchSummary(strategy="guided"))
    (guides,) = (one.point for one in trials if one.source == "guide")
    points = {at: cell.point for at, cell in enumerate(insight.cells) if cell.point is not None}
    (measured,) = (at for at, point in points.items() if point == guides)
    settled = insight.settled()
    # Without waiting a batch fills behind the one that runs; behind a busy device 2 ms of waiting change nothing.
    assert {points[at]["batch_timeout_micros"] for at in settled} >= {0, 2000}
    assert measured in settled
    assert {points[at]["max_batch_size"] for at in settled} == {guides["max_batch_size"]}


def test_the_probability_of_being_near_the_best_grows_as_rivals_are_measured():
    space, found = cells(capacity_scenario())
    predicted = np.zeros((len(found), 8))
    alone = Beliefs(
        Kinship(found, space),
        predicted=predicted,
        measured={0: Measured(merit=0.0, sd=0.01)},
        seed=1,
        error=0.1,
    )
    every = {at: Measured(merit=0.0 if at == 0 else -0.1, sd=0.01) for at in range(len(found))}
    known = Beliefs(Kinship(found, space), predicted=predicted, measured=every, seed=1, error=0.1)
    assert alone.near_best(0) < 0.9
    assert known.near_best(0) > 0.99
    assert known.contenders(5)[0] == 0
    assert len(known.contenders(5)) == 2
    assert known.gain_left() == 0.0


def test_top_two_picks_differ_and_leave_out_what_was_measured():
    space, found = cells(capacity_scenario())
    merits = np.repeat(np.linspace(0.0, 0.05, len(found))[:, np.newaxis], 8, axis=1)
    beliefs = Beliefs(Kinship(found, space), predicted=merits, measured={}, seed=1, error=0.05)
    picks = beliefs.top_two(6, without=frozenset({len(found) - 1}))
    assert len(set(picks)) == 6
    assert len(found) - 1 not in picks
    assert math.isinf(beliefs.gain_left())
    best = int(np.argmax(beliefs.expected))
    assert beliefs.highest(1) == [best]
    assert best not in beliefs.highest(3, without=frozenset({best}))


def test_a_point_that_keeps_the_slo_at_no_rate_is_never_the_best():
    space, found = cells(capacity_scenario())
    predicted = np.zeros((len(found), 8))
    predicted[3] = -np.inf
    beliefs = Beliefs(Kinship(found, space), predicted=predicted, measured={}, seed=1)
    assert beliefs.near_best(3) == 0.0
    assert found[3].configuration != Configuration(batching=None)


@pytest.mark.slow
def test_a_limit_below_a_lone_request_ends_with_nothing_that_keeps_it():
    """The twin sees no rate that does: rates of 1e-9/s were asked for."""
    scenario = capacity_scenario(time="40s", p95="3ms")
    trials, summary = searched(scenario, device())
    assert all(trial.asked_rate_rps is None or trial.asked_rate_rps > 0.5 for trial in trials)
    assert not any(trial.source == "race" for trial in trials)
    assert "nothing keeps the SLO" in summary.stop_reason
    with pytest.raises(NoFeasibleConfigurationError):
        recommend(trials, scenario=scenario, search=summary)


def test_where_a_row_is_cheapest_alone_the_largest_batch_says_so():
    scenario = scenario_of(
        load={"arrivals": "closed", "concurrency": 32, "warm_up": "300ms", "duration": "1s"},
        search={"strategy": "guided", "budget": {"time": "40s"}, "space": SPACE},
    )
    dearer = Device(tau_s=0.005 * np.arange(1025.0) ** 1.05, delay_s=0.0003, serial=True)
    _, summary = searched(scenario, dearer, noise=0.0)
    assert summary.cannot_pay is not None
    assert "so 1 rows" not in summary.cannot_pay


def test_sizes_that_ran_out_of_memory_are_neither_proposed_again_nor_hoped_for():
    scenario = scenario_of(
        load={"arrivals": "closed", "concurrency": 64, "warm_up": "300ms", "duration": "1s"},
        search={
            "strategy": "guided",
            "budget": {"time": "60s"},
            "space": {"max_batch_size": [1, 4, 8, 16, 24, 32, 64], "batch_timeout_micros": [0, 1000, 5000]},
        },
    )
    driver = Driver(scenario, law=Law(fixed_s=0.003, per_row_s=0.0001, rows_max=24), trials_max=18)
    trials = driver.run(lambda outlook: guided_strategy(outlook, SearchSummary(strategy="guided")))
    tried = [
        trial.configuration.batching.max_batch_size
        for trial in trials
        if trial.source in ("twin", "race") and trial.configuration.batching is not None
    ]
    assert tried.count(64) == 0
    assert tried.count(32) <= 2  # once each where two race in one block
    assert tried.count(24) >= tried.count(32)
    assert memory_ceiling_rows(trials) == 32
