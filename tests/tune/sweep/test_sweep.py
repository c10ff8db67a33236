"""The sweep end to end against a fake server on a fake clock, and at any speed: from 50 µs to seconds a batch."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError, ServerGoneError, TargetError
from batchtune.plain_values import Coded, coded
from batchtune.report.answer_words import confidence_sentence
from batchtune.report.findings import text_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.search.contenders import REFERENCES
from batchtune.tune.sweep.sweep import FAILURES_MAX, PHASES, SweepProgress, sweep
from batchtune.tune.trials.pace import usual_budget_s
from batchtune.tune.trials.trial import NO_CANDIDATES, REPEATS, SearchSummary, Trial
from batchtune.twin.simulator.simulate import Device
from tests.tune.tune_fakes import FakeClock, Law, batches_of, bench_of, heard, planned, planted, scenario_of
from tests.tune.tune_fakes import swept as running
from tests.twin.simulated_fleet import simulated_server

SPACE = {"max_batch_size": [1, 4, 16, 64], "batch_timeout_micros": [0, 2000], "num_batch_threads": [1, 2]}
LOADS = {
    "throughput": {"load": {"arrivals": "closed", "concurrency": 16}},
    "capacity": {"load": {"arrivals": "poisson"}, "slo": {"p95": "20ms"}},
    "latency": {"load": {"arrivals": "poisson", "rate": 1000}},
}
EACH_OBJECTIVE = pytest.mark.parametrize("objective", list(LOADS))


def asked(objective: str = "throughput", *, time: str = "40s", changes=None, **search):
    search = {"budget": {"time": time}, "space": SPACE, **search}
    return scenario_of(**{"objective": objective, **LOADS[objective], "search": search, **(changes or {})})


def run(scenario, **options) -> list[Trial]:
    return list(running(scenario, **options))


def failed(trials: list[Trial]) -> list[Trial]:
    return [one for one in trials if one.state == "failed"]


def size(configuration) -> int:
    """The most rows of a batch as it is written, 0: it is not."""
    return 0 if configuration.batching is None else configuration.batching.max_batch_size or 0


@pytest.fixture(scope="module", params=list(LOADS))
def swept(request):
    """A scenario, its trials and their answer."""
    scenario = asked(request.param)
    trials = run(scenario)
    return scenario, trials, recommend(trials, scenario=scenario)


def test_a_lone_client_comes_first_and_fresh_runs_of_the_answer_after_others_of_it(swept):
    _, trials, answer = swept
    assert (trials[0].source, trials[0].request.concurrency) == ("probe", 1)
    assert [one.number for one in trials] == list(range(1, len(trials) + 1))
    ours = [one for one in trials if one.configuration == answer.configuration]
    fresh = [one for one in ours if one.source == "confirm"]
    assert len(fresh) >= 3
    assert ours[0].number < fresh[0].number
    assert len({one.seed for one in trials}) == len(trials)


def test_the_references_take_part(swept):
    scenario, trials, answer = swept
    assert {reference.name for reference in answer.references} >= {"no_batching"}
    assert scenario.objective != "throughput" or {"no_batching", "defaults"} <= {one.source for one in trials}


@EACH_OBJECTIVE
def test_the_budget_of_time_is_kept_within_one_trial(objective):
    for time_s in (10, 25):
        trials = run(asked(objective, time=f"{time_s}s"))
        assert sum(one.seconds for one in trials) <= time_s + max(one.seconds for one in trials)
        assert any(one.source == "confirm" for one in trials)


@EACH_OBJECTIVE
def test_a_budget_of_trials_counts_configurations_beside_scouts_and_fresh_runs(objective):
    trials = run(asked(objective, budget={"trials": 5}))
    compared = {one.configuration for one in trials if one.source not in NO_CANDIDATES | REPEATS}
    assert len(compared) == 5
    assert sum(one.source == "confirm" for one in trials) >= 3


def test_capacity_is_the_rate_that_the_law_says():
    """One thread, τ(b) = 0.9 ms + 0.4 ms·b: without batching at most 769/s; with batches of 16 at most 2192/s."""
    space = {"max_batch_size": [1, 4, 16], "num_batch_threads": [1]}
    scenario = asked("capacity", time="60s", space=space)
    answer = recommend(run(scenario), scenario=scenario)
    assert size(answer.configuration) == 16
    assert 0.85 * 2192 < answer.capacity.held_rps < 2192
    assert answer.capacity.confirmed
    assert answer.batching_gain.value > 1.5


def test_a_capacity_that_no_rate_gives_is_infeasible():
    scenario = asked("capacity", time="30s", changes={"slo": {"p95": "1ms"}})
    with pytest.raises(NoFeasibleConfigurationError):
        recommend(run(scenario), scenario=scenario)


def test_a_target_that_dies_is_launched_again_for_the_next_trial():
    trials = run(asked(time="60s"), dies_under=lambda one: size(one) == 64)
    assert "exited with 137" in failed(trials)[0].failure
    assert trials[-1].state == "complete"


def test_three_failures_in_a_row_end_the_sweep_with_the_last_reason():
    with pytest.raises(TargetError, match="3 trials in a row failed; the last: no model") as error:
        run(asked(), refuses=lambda _configuration: "no model")
    assert error.value.hint == "`batchtune trials RUN` shows the failed trials; test the server by hand"


def test_a_sweep_is_not_given_up_while_anything_worked():
    """Every size above 1 is out of memory: what is left is confirmed, and that is the recommendation."""
    trials = run(asked(), law=Law(rows_max=1))
    assert failed(trials)
    assert trials[-1].source == "confirm"
    answer = recommend(trials, scenario=asked()).configuration
    assert answer.batching is None or size(answer) == 1


def test_six_failures_under_load_in_a_row_end_a_search_that_had_worked():
    said: list[SearchSummary] = []
    dying = {"dies_under": lambda one: one.batching is not None, "dies_with": "the server exited with 1"}
    trials = run(asked(), on_event=heard(on_summary=said.append), **dying)
    assert len(failed(trials)) == 2 * FAILURES_MAX < len(trials)
    assert [one.stop_reason.code for one in said] == ["trials_failed"]


@pytest.mark.parametrize("objective", ["throughput", "capacity"])
def test_refused_configurations_do_not_end_the_search_and_are_named_in_the_answer(objective):
    scenario = asked(objective, time="60s")
    said: list[SearchSummary] = []
    why = "max_batch_size must be <= 8"
    refuses = lambda one: why if size(one) > 8 else None  # noqa: E731
    trials = run(scenario, refuses=refuses, on_event=heard(on_summary=said.append))
    refused = [one for one in trials if one.is_refused]
    most = len(refused)
    assert most == len({one.configuration for one in refused}) > 2 * FAILURES_MAX
    assert "trials_failed" not in {one.stop_reason.code for one in said}
    answer = recommend(trials, scenario=scenario)
    assert size(answer.configuration) == 4
    assert answer.confirmations >= 3
    (note,) = (text_of(note) for note in answer.notes if note.code == "refused")
    at_start = (
        f" and {most - 1} more failed at the start in {most} of {most} runs; the search then left them out"
    )
    assert note.startswith("max_batch_size=")
    assert at_start in note
    assert note.endswith(why)
    assert Trial.from_dict(refused[0].to_dict()).is_refused


def test_a_configuration_that_worked_and_is_refused_later_counts_as_a_failure_of_the_server():
    clock = FakeClock()
    refuses = lambda _configuration: "disk full" if clock.now_s > 1008.0 else None  # noqa: E731
    space = {"max_batch_size": [1, 4], "num_batch_threads": [1]}
    trials = run(asked(time="1000s", space=space), clock=clock, refuses=refuses)
    assert len(failed(trials)) < 20
    assert trials[-1].state == "failed"


def test_a_search_without_an_answer_says_what_failed_not_that_time_was_short():
    scenario = asked("capacity", time="4s", changes={"slo": {"p95": "2ms"}})
    why = "max_batch_size must be 1"
    trials = run(scenario, refuses=lambda one: why if one.batching and size(one) != 1 else None)
    with pytest.raises(InconclusiveError) as error:
        recommend(trials, scenario=scenario)
    assert "too little time" not in error.value.message
    assert f"trials failed, most often: {why}" in error.value.message
    assert "at the server" not in error.value.hint
    silent = {"p95_s": 10.0, "error_ratio": 1.0, "errors": {"timeout": 900, "unfinished": 100}}
    trials += [planted(trials[-1].number + at, throughput=0.0, batching=None, **silent) for at in (1, 2)]
    with pytest.raises(InconclusiveError) as error:
        recommend(trials, scenario=scenario)
    assert error.value.hint.startswith("the last trials had no answer at all: look at the server and its log")


def test_a_running_server_that_ended_ends_the_sweep_and_leaves_its_answer_open():
    """Also one that all runs so far would have confirmed."""
    whole = run(asked())
    assert recommend(whole, scenario=asked()).established
    said: list[SearchSummary] = []

    def gone(_configuration):
        raise ServerGoneError("the server has ended")

    with pytest.raises(ServerGoneError):
        run(asked(), refuses=gone, finished=whole[:8], on_event=heard(on_summary=said.append))
    assert [one.stop_reason for one in said] == [coded("server_gone")]
    answer = recommend(whole, scenario=asked(), search=said[0])
    assert (answer.lost_server, answer.established) == (True, False)
    assert "ended during the sweep" in confidence_sentence(answer)


def test_an_interrupt_passes_through_and_everything_measured_stays():
    said: list[SearchSummary] = []
    trials = running(asked(), interrupt_after=5, on_event=heard(on_summary=said.append))
    kept = list(islice(trials, 5))
    with pytest.raises(KeyboardInterrupt):
        next(trials)
    assert recommend(kept, scenario=asked()).confirmations == 0
    assert [one.stop_reason for one in said] == [coded("interrupted")]


@EACH_OBJECTIVE
def test_a_resumed_sweep_goes_on_where_it_stood_wherever_it_was_cut(objective):
    """The trials are the only state: one that never stopped asks the same after the same trials."""
    scenario = asked(objective, time="20s")
    whole = run(scenario, law=Law())
    for cut in range(1, len(whole), max(len(whole) // 2, 1)):
        resumed = next(running(scenario, law=Law(), finished=whole[:cut]))
        assert (resumed.number, resumed.request) == (cut + 1, whole[cut].request)


@pytest.mark.parametrize(("time", "is_spent"), [("5s", True), ("40s", False)])
def test_a_resumed_sweep_whose_budget_is_spent_says_so(time, is_spent):
    events: list[object] = []
    resumed = run(asked(time=time), finished=run(asked())[:12], on_event=events.append)
    texts = [text_of(event) for event in events if isinstance(event, Coded)]
    assert bool(resumed) != is_spent
    assert any("took the whole budget of 5 s: nothing more is measured" in text for text in texts) == is_spent


def test_what_a_sweep_thought_between_its_trials_counts_once_when_it_is_resumed():
    clock = FakeClock()

    def think(progress: SweepProgress) -> None:
        clock.sleep(1.0 if progress.live is None else 0.0)

    whole = run(asked(), law=Law(), clock=clock, on_event=heard(on_progress=think))
    spent_s = sum(one.seconds for one in whole) + len(whole)
    assert whole[-1].elapsed_s == pytest.approx(spent_s)
    assert Trial.from_dict(whole[0].to_dict()).elapsed_s == whole[0].elapsed_s
    seen: list[SweepProgress] = []
    next(running(asked(), finished=whole[:5], on_event=heard(on_progress=seen.append)))
    assert seen[0].elapsed_s == pytest.approx(whole[4].elapsed_s)


def test_progress_tells_phase_budget_and_the_best_so_far():
    seen: list[SweepProgress] = []
    plans: list[Coded] = []
    trials = run(asked(), on_event=heard(on_progress=seen.append, on_plan=plans.append))
    assert tuple(dict.fromkeys(one.phase for one in seen)) == PHASES
    assert (seen[0].best, seen[-1].best is None) == (None, False)
    assert {one.plan.number for one in seen} == {one.number for one in trials}
    assert any(one.live is not None for one in seen)
    assert [*map(text_of, plans)] == ["40 s: 8 to scout, 20 to compare, 12 to confirm"]


def test_the_summary_is_handed_over_even_when_the_sweep_is_broken_off():
    told: list[SearchSummary] = []
    trials = running(asked(), on_event=heard(on_summary=told.append))
    assert len(list(islice(trials, 5))) == 5
    trials.close()
    assert told[0].strategy == "guided"
    assert sum(told[0].trials_by_phase.values()) == 5


@pytest.mark.parametrize("strategy", ["rule", "optuna"])
@EACH_OBJECTIVE
def test_strategies_try_whom_they_name_beside_the_references_wherever_it_lies(objective, strategy):
    trials = run(asked(objective, strategy=strategy))
    source = {"rule": "rule", "optuna": "sampler"}[strategy]
    assert {one.source for one in trials} - {"probe", "calibration", "confirm", *REFERENCES} == {source}
    tried = [one for one in trials if one.source == source]
    assert strategy == "rule" or len(Counter(one.configuration for one in tried)) >= 4
    assert strategy == "rule" or all(one.point is not None for one in tried)


def test_strategy_grid_runs_every_point_that_there_is_time_for():
    space = {"max_batch_size": [1, 4, 16], "batch_timeout_micros": [0, 2000]}
    trials = run(asked(strategy="grid", time="60s", space=space))
    points = {tuple((one.point or {}).values()) for one in trials if one.state == "complete"}
    assert {(rows, micros) for rows in (1, 4, 16) for micros in (0, 2000)} <= points


@pytest.mark.parametrize(
    ("objective", "strategy"),
    [
        ("throughput", "guided"),
        ("capacity", "optuna"),
        pytest.param("capacity", "guided", marks=pytest.mark.slow),
        pytest.param("throughput", "optuna", marks=pytest.mark.slow),
    ],
)
def test_points_that_hold_flags_the_switch_and_fitted_sizes_are_searched_confirmed_and_recommended(
    objective, strategy
):
    space = {
        "max_batch_size": [4, 8, 16],
        "allowed_batch_sizes": ["powers_of_two", "none"],
        "enable_batching": [True, False],
        "--tensorflow_session_parallelism": [0, 2],
    }
    scenario = asked(objective, strategy=strategy, time="60s", space=space)
    trials = run(scenario)
    answer = recommend(trials, scenario=scenario)
    assert answer.confirmations >= 3
    assert size(answer.configuration) >= 8
    tried = [one for one in trials if one.point is not None and one.source != "defaults"]
    assert {"4", "8", "16"} >= {str(one.point["max_batch_size"]) for one in tried}
    assert all(set(one.point) == set(space) for one in tried)


def test_where_nobody_may_be_the_answer_the_sweep_ends_without_a_fault_of_its_own():
    """No batching cannot be said, and every size of the space is out of memory."""
    target = {"kind": "command", "model": "m", "rest_url": "http://h:1", "apply": ["reload", "{file}"]}
    changes = {"target": {**target, "render": "tfserving"}}
    trials = run(asked(time="20s", space={"max_batch_size": [4, 16]}, changes=changes), law=Law(rows_max=1))
    assert (trials[0].source, trials[-1].state) == ("probe", "failed")


@pytest.mark.parametrize(
    ("means", "space"),
    [
        ({}, {"max_batch": [4, 16], "wait_ms": [0, 2]}),
        ({}, {"mode": ["fast", "exact"]}),
        ({}, {"max_batch_size": [4, 16]}),
        ({"wait_ms": "wait_ms"}, {"max_batch": [4, 16], "wait_ms": [0, 2]}),
        ({"rows": "max_batch"}, {"max_batch": [4, 16]}),
    ],
)
@pytest.mark.parametrize("objective", ["capacity", "throughput"])
def test_a_server_of_kind_http_gets_its_own_parameters_only_whatever_means_leaves_out(
    objective, means, space
):
    names = dict.fromkeys(["max_batch", "wait_ms", "mode", "max_batch_size"], "X")
    target = {"kind": "http", "url": "http://h:1", "grpc_url": "h:2", "launch": ["serve"], "means": means}
    changes = {"target": {**target, "set": {"env": names}}, "request": {"protocol": "kserve_grpc", "rows": 2}}
    scenario = asked(objective, time="20s", space=space, changes=changes)
    trials = run(scenario)
    answer = recommend(trials, scenario=scenario)
    assert set(dict(answer.configuration.flags)) == set(space) - set(means.values())
    assert all(set(dict(trial.configuration.flags)) <= set(space) for trial in trials)


SPEEDS = {
    "50 µs": (0.00004, 0.00001),
    "2 ms": (0.0015, 0.0005),
    "40 ms": (0.035, 0.005),
    "400 ms": (0.35, 0.05),
    "250 ms a row": (0.1, 0.15),
    "5 s a batch": (4.5, 0.5),
}
QUICK = (("40 ms", "throughput"), ("250 ms a row", "capacity"))
ASKED = [
    pytest.param(speed, objective, marks=() if (speed, objective) in QUICK else pytest.mark.slow)
    for speed in SPEEDS
    for objective in ("throughput", "capacity", "latency")
]
SIZES = {"max_batch_size": [1, 4, 16, 64], "batch_timeout_micros": [0, 2000], "num_batch_threads": [1, 2]}


def device(fixed_s: float, per_row_s: float) -> Device:
    return Device(tau_s=fixed_s + per_row_s * np.arange(1025), delay_s=0.0002, serial=True)


def users_scenario(objective: str, fixed_s: float, per_row_s: float, **search) -> Scenario:
    """What a user gives who knows the model: an SLO of ten lone requests, a rate of three quarters of one by one."""
    lone_s = fixed_s + per_row_s
    load = {
        "throughput": {"arrivals": "closed", "concurrency": 32},
        "capacity": {"arrivals": "poisson"},
        "latency": {"arrivals": "poisson", "rate": f"{0.75 / lone_s}/s"},
    }[objective]
    slo = {} if objective == "throughput" else {"p95": f"{1000 * 10 * lone_s:.4f}ms"}
    return scenario_of(load=load, objective=objective, slo=slo, search={"space": SIZES, **search})


@pytest.mark.parametrize(("speed", "objective"), ASKED)
def test_the_default_sweep_ends_with_a_recommendation_at_any_speed(speed, objective):
    given = users_scenario(objective, *SPEEDS[speed])
    clock, target, fleet = simulated_server(device(*SPEEDS[speed]), noise=0.01)
    told, plans = [], []
    on_event = heard(on_summary=told.append, on_plan=plans.append)
    started_s = clock()
    trials = [done.trial for done in sweep(given, target, fleet, on_event=on_event, now_s=clock)]
    chosen = recommend(trials, scenario=given, search=told[0])
    assert chosen.throughput_rps.value > 0.0
    assert not any(trial.state == "failed" for trial in trials)
    assert len(plans) == 1
    assert told[0].plan == plans[0]
    budget_s = usual_budget_s(sum(SPEEDS[speed]))
    assert clock() - started_s <= budget_s + max(trial.seconds for trial in trials)


def test_a_run_of_a_few_batches_has_an_exact_rate():
    """Batches of 16 in 2.5 s: in 10 s there are 3 to 5 of them, and between their ends always 6.4 requests/s."""
    _, target, fleet = simulated_server(device(0.1, 0.15))
    given = users_scenario("throughput", 0.1, 0.15)
    for warm_up_s in (3.0, 4.1, 5.2):
        load = given.load.model_copy(update={"warm_up_s": warm_up_s, "duration_s": 10.0})
        bench = bench_of(given.model_copy(update={"load": load}), target, fleet)
        measured = bench.run(planned(batches_of(16))).trial.measurement
        assert measured.throughput_rps.value == pytest.approx(6.4, rel=0.01)
