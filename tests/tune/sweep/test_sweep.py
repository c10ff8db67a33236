"""The sweep end to end against a fake server on a fake clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError, ServerGoneError, TargetError
from batchtune.plain_values import Coded, coded
from batchtune.report.answer_words import confidence_sentence
from batchtune.report.findings import text_of
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.search.contenders import REFERENCES
from batchtune.tune.sweep.sweep import FAILURES_MAX, PHASES, SweepProgress, sweep
from batchtune.tune.trials.trial import NO_CANDIDATES, REPEATS, SearchSummary, Trial
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, heard, planted, scenario_of

SPACE = {"max_batch_size": [1, 4, 16, 64], "batch_timeout_micros": [0, 2000], "num_batch_threads": [1, 2]}
LOADS = {
    "throughput": {"load": {"arrivals": "closed", "concurrency": 16}},
    "capacity": {"load": {"arrivals": "poisson"}, "slo": {"p95": "20ms"}},
    "latency": {"load": {"arrivals": "poisson", "rate": 1000}},
}


def asked(objective: str = "throughput", *, time: str = "40s", **search):
    return scenario_of(
        objective=objective, **LOADS[objective], search={"budget": {"time": time}, "space": SPACE, **search}
    )


def run(scenario, *, law=None, finished=(), on_event=None, **target_options) -> list[Trial]:
    clock = FakeClock()
    target = FakeTarget(clock, law=law or Law(noise=0.01), **target_options)
    found = sweep(
        scenario,
        target,
        FakeFleet(target),
        finished=finished,
        on_event=on_event or (lambda _event: None),
        now_s=clock,
    )
    return [one.trial for one in found]


@pytest.fixture(scope="module", params=list(LOADS))
def swept(request):
    """A scenario and its trials."""
    scenario = asked(request.param)
    return scenario, run(scenario)


def test_a_lone_client_comes_first_and_fresh_runs_of_the_answer_after_others_of_it(swept):
    scenario, trials = swept
    assert (trials[0].source, trials[0].request.concurrency) == ("probe", 1)
    assert [one.number for one in trials] == list(range(1, len(trials) + 1))
    answer = recommend(trials, scenario=scenario).configuration
    fresh = [one for one in trials if one.source == "confirm" and one.configuration == answer]
    assert len(fresh) >= 3
    first = next(one.number for one in trials if one.configuration == answer)
    assert first < fresh[0].number


def test_fresh_runs_have_seeds_of_their_own(swept):
    _, trials = swept
    assert len({one.seed for one in trials}) == len(trials)


def test_the_references_take_part(swept):
    scenario, trials = swept
    answer = recommend(trials, scenario=scenario)
    assert {reference.name for reference in answer.references} >= {"no_batching"}
    if scenario.objective == "throughput":
        assert {"no_batching", "defaults"} <= {one.source for one in trials}


def test_the_budget_of_time_is_kept_within_one_trial():
    for objective in LOADS:
        for time_s in (10, 25):
            trials = run(asked(objective, time=f"{time_s}s"))
            assert sum(one.seconds for one in trials) <= time_s + max(one.seconds for one in trials)
            assert any(one.source == "confirm" for one in trials)


@pytest.mark.parametrize("objective", list(LOADS))
def test_a_budget_of_trials_counts_configurations_beside_scouts_and_fresh_runs(objective):
    trials = run(asked(objective, budget={"trials": 5}))
    compared = {one.configuration for one in trials if one.source not in NO_CANDIDATES | REPEATS}
    assert len(compared) == 5
    assert sum(one.source == "confirm" for one in trials) >= 3


def test_batching_is_found_to_help_on_a_device_that_shares_its_fixed_cost():
    scenario = asked()
    answer = recommend(run(scenario, law=Law(noise=0.02)), scenario=scenario)
    assert answer.batching_helps == "yes"
    assert answer.batching_gain.value > 1.5


def test_batching_is_found_not_to_help_where_time_is_proportional_to_rows():
    scenario = asked()
    law = Law(fixed_s=0.0, per_row_s=0.001, noise=0.01)
    answer = recommend(run(scenario, law=law), scenario=scenario)
    assert answer.batching_helps != "yes"
    assert answer.configuration.batching is None or answer.level_with is not None


def test_capacity_is_the_rate_that_the_law_says():
    """One thread, τ(b) = 0.9 ms + 0.4 ms·b: without batching at most 769/s; with batches of 16 at most 2192/s."""
    scenario = scenario_of(
        objective="capacity",
        **LOADS["capacity"],
        search={"budget": {"time": "60s"}, "space": {"max_batch_size": [1, 4, 16], "num_batch_threads": [1]}},
    )
    answer = recommend(run(scenario), scenario=scenario)
    assert answer.configuration.batching.max_batch_size == 16
    assert 0.85 * 2192 < answer.capacity.held_rps < 2192
    assert answer.capacity.confirmed
    assert answer.batching_gain.value > 1.5


def test_a_capacity_that_no_rate_gives_is_infeasible():
    scenario = scenario_of(
        objective="capacity",
        load={"arrivals": "poisson"},
        slo={"p95": "1ms"},
        search={"budget": {"time": "30s"}, "space": SPACE},
    )
    trials = run(scenario)
    with pytest.raises(NoFeasibleConfigurationError):
        recommend(trials, scenario=scenario)


def test_a_target_that_refuses_a_configuration_makes_a_failed_trial_with_the_reason():
    def refuses(configuration):
        batching = configuration.batching
        return "num_batch_threads must not be 2" if batching and batching.num_batch_threads == 2 else None

    trials = run(asked(time="60s"), refuses=refuses)
    failed = [one for one in trials if one.state == "failed"]
    assert failed
    assert all(one.failure == "num_batch_threads must not be 2" for one in failed)
    assert len({one.configuration for one in failed}) == len(failed)
    answer = recommend(trials, scenario=asked(time="60s"))
    assert answer.configuration.batching.num_batch_threads != 2


def test_a_target_that_dies_is_launched_again_for_the_next_trial():
    def dies_under(configuration):
        return configuration.batching is not None and configuration.batching.max_batch_size == 64

    trials = run(asked(time="60s"), dies_under=dies_under)
    failed = [one for one in trials if one.state == "failed"]
    assert failed
    assert "exited with 137" in failed[0].failure
    assert trials[-1].state == "complete"


def test_three_failures_in_a_row_end_the_sweep_with_the_last_reason():
    clock = FakeClock()
    target = FakeTarget(clock, refuses=lambda _configuration: "no model")
    with pytest.raises(TargetError, match="3 trials in a row failed; the last: no model") as error:
        list(sweep(asked(), target, FakeFleet(target), now_s=clock))
    assert error.value.hint == "`batchtune trials RUN` shows the failed trials; test the server by hand"


def test_a_sweep_is_not_given_up_while_anything_worked():
    """Every size above 1 is out of memory: what is left is confirmed, and that is the recommendation."""
    trials = run(asked(), law=Law(rows_max=1))
    assert any(one.state == "failed" for one in trials)
    assert trials[-1].source == "confirm"
    answer = recommend(trials, scenario=asked()).configuration
    assert answer.batching is None or answer.batching.max_batch_size == 1


def test_six_failures_under_load_in_a_row_end_a_search_that_had_worked():
    said: list[SearchSummary] = []
    trials = run(
        asked(),
        dies_under=lambda configuration: configuration.batching is not None,
        dies_with="the server exited with 1",
        on_event=heard(on_summary=said.append),
    )
    assert sum(one.state == "failed" for one in trials) == 2 * FAILURES_MAX
    assert [one.stop_reason.code for one in said] == ["trials_failed"]
    assert any(one.state == "complete" for one in trials)


@pytest.mark.parametrize("objective", ["throughput", "capacity"])
def test_refused_configurations_do_not_end_the_search_and_are_named_in_the_answer(objective):
    def refuses(configuration):
        batching = configuration.batching
        return "max_batch_size must be <= 8" if batching and (batching.max_batch_size or 0) > 8 else None

    scenario = asked(objective, time="60s")
    said: list[SearchSummary] = []
    trials = run(scenario, refuses=refuses, on_event=heard(on_summary=said.append))
    refused = [one.configuration for one in trials if one.is_refused]
    assert len(refused) == len(set(refused)) > 2 * FAILURES_MAX
    assert "trials_failed" not in {one.stop_reason.code for one in said}
    answer = recommend(trials, scenario=scenario)
    assert answer.configuration.batching.max_batch_size == 4
    assert answer.confirmations >= 3
    (note,) = (text_of(note) for note in answer.notes if note.code == "refused")
    assert note.startswith("max_batch_size=")
    most = len(refused)
    assert (
        f" and {most - 1} more failed at the start in {most} of {most} runs; the search then left them out"
        in note
    )
    assert note.endswith("max_batch_size must be <= 8")
    assert Trial.from_dict(next(one for one in trials if one.is_refused).to_dict()).is_refused


def test_a_configuration_that_worked_and_is_refused_later_counts_as_a_failure_of_the_server():
    clock = FakeClock()
    refuses = lambda _configuration: "disk full" if clock.now_s > 1008.0 else None  # noqa: E731
    target = FakeTarget(clock, law=Law(noise=0.01), refuses=refuses)
    said: list[SearchSummary] = []
    found = sweep(
        asked(time="1000s", space={"max_batch_size": [1, 4], "num_batch_threads": [1]}),
        target,
        FakeFleet(target),
        now_s=clock,
        on_event=heard(on_summary=said.append),
    )
    trials = [one.trial for one in found]
    assert sum(one.state == "failed" for one in trials) < 20
    assert trials[-1].state == "failed"


def test_a_search_without_an_answer_says_what_failed_not_that_time_was_short():
    def refuses(configuration):
        batching = configuration.batching
        return "max_batch_size must be 1" if batching and batching.max_batch_size != 1 else None

    scenario = scenario_of(
        objective="capacity",
        load={"arrivals": "poisson"},
        slo={"p95": "2ms"},
        search={"budget": {"time": "4s"}, "space": SPACE},
    )
    trials = run(scenario, refuses=refuses)
    with pytest.raises(InconclusiveError) as error:
        recommend(trials, scenario=scenario)
    assert "too little time" not in error.value.message
    assert "trials failed, most often: max_batch_size must be 1" in error.value.message
    assert "at the server" not in error.value.hint
    for _ in range(2):
        silent = planted(trials[-1].number + 1, throughput=0.0, p95_s=10.0, error_ratio=1.0, batching=None)
        measured = replace(silent.measurement, errors={"timeout": 900, "unfinished": 100})
        trials.append(replace(silent, measurement=measured))
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
    assert answer.lost_server
    assert not answer.established
    assert "ended during the sweep" in confidence_sentence(answer)


def test_an_interrupt_passes_through_and_everything_measured_stays():
    clock = FakeClock()
    target = FakeTarget(clock)
    said = []
    fleet = FakeFleet(target, interrupt_after=5)
    running = sweep(asked(), target, fleet, now_s=clock, on_event=heard(on_summary=said.append))
    kept = [next(running).trial for _ in range(5)]
    with pytest.raises(KeyboardInterrupt):
        next(running)
    assert recommend(kept, scenario=asked()).confirmations == 0
    assert [one.stop_reason for one in said] == [coded("interrupted")]


@pytest.mark.parametrize("objective", list(LOADS))
def test_a_resumed_sweep_goes_on_where_it_stood_wherever_it_was_cut(objective):
    """The trials are the only state: one that never stopped asks the same after the same trials."""
    scenario = asked(objective, time="20s")
    whole = run(scenario, law=Law())
    for cut in range(1, len(whole), max(len(whole) // 2, 1)):
        resumed = run(scenario, law=Law(), finished=whole[:cut])
        assert resumed[0].number == cut + 1
        assert resumed[0].configuration == whole[cut].configuration
        assert resumed[0].request.rate_rps == whole[cut].request.rate_rps
        assert resumed[0].source == whole[cut].source


@pytest.mark.parametrize(("time", "is_spent"), [("5s", True), ("40s", False)])
def test_a_resumed_sweep_whose_budget_is_spent_says_so(time, is_spent):
    whole = run(asked())
    events: list[object] = []
    resumed = run(asked(time=time), finished=whole[:12], on_event=events.append)
    texts = [text_of(event) for event in events if isinstance(event, Coded)]
    assert bool(resumed) != is_spent
    assert any("took the whole budget of 5 s: nothing more is measured" in text for text in texts) == is_spent


def test_what_a_sweep_thought_between_its_trials_counts_once_when_it_is_resumed():
    clock = FakeClock()
    target = FakeTarget(clock)

    def think(progress: SweepProgress) -> None:
        clock.sleep(1.0 if progress.live is None else 0.0)

    running = sweep(asked(), target, FakeFleet(target), on_event=heard(on_progress=think), now_s=clock)
    whole = [one.trial for one in running]
    spent_s = sum(one.seconds for one in whole) + len(whole)
    assert whole[-1].elapsed_s == pytest.approx(spent_s)
    assert Trial.from_dict(whole[0].to_dict()).elapsed_s == whole[0].elapsed_s
    seen: list[SweepProgress] = []
    run(asked(), finished=whole[:5], on_event=heard(on_progress=seen.append))
    assert seen[0].elapsed_s == pytest.approx(whole[4].elapsed_s)


def test_progress_tells_phase_budget_and_the_best_so_far():
    seen: list[SweepProgress] = []
    plans: list[Coded] = []
    trials = run(asked(), on_event=heard(on_progress=seen.append, on_plan=plans.append))
    assert [one.phase for one in seen if one.phase == "scouting"]
    assert tuple(dict.fromkeys(one.phase for one in seen)) == PHASES
    assert seen[0].best is None
    assert seen[-1].best is not None
    assert {one.plan.number for one in seen} == {one.number for one in trials}
    assert any(one.live is not None for one in seen)
    assert [*map(text_of, plans)] == ["40 s: 8 to scout, 20 to compare, 12 to confirm"]


def test_the_summary_is_handed_over_even_when_the_sweep_is_broken_off():
    told = []
    clock = FakeClock()
    target = FakeTarget(clock)
    running = sweep(asked(), target, FakeFleet(target), on_event=heard(on_summary=told.append), now_s=clock)
    for _ in range(5):
        next(running)
    running.close()
    assert told[0].strategy == "guided"
    assert sum(told[0].trials_by_phase.values()) == 5


def named(trials: list[Trial]) -> set[str]:
    return {one.source for one in trials} - {"probe", "calibration", "confirm", *REFERENCES}


@pytest.mark.parametrize("objective", list(LOADS))
def test_strategy_rule_tries_the_rules_point_beside_the_references_wherever_it_lies(objective):
    scenario = asked(objective, strategy="rule")
    assert named(run(scenario)) == {"rule"}


@pytest.mark.parametrize("objective", list(LOADS))
def test_strategy_optuna_tries_whom_its_sampler_names_beside_the_references(objective):
    trials = run(asked(objective, strategy="optuna"))
    assert named(trials) == {"sampler"}
    tried = Counter(one.configuration for one in trials if one.source == "sampler")
    assert len(tried) >= 4
    assert all(one.point is not None for one in trials if one.source == "sampler")


def test_strategy_grid_runs_every_point_that_there_is_time_for():
    space = {"max_batch_size": [1, 4, 16], "batch_timeout_micros": [0, 2000]}
    trials = run(asked(strategy="grid", time="60s", space=space))
    points = {tuple((one.point or {}).values()) for one in trials if one.state == "complete"}
    assert {(size, micros) for size in (1, 4, 16) for micros in (0, 2000)} <= points


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
    assert answer.configuration.batching.max_batch_size >= 8
    tried = [one for one in trials if one.point is not None and one.source != "defaults"]
    assert {"4", "8", "16"} >= {str(one.point["max_batch_size"]) for one in tried}
    assert all(set(one.point) == set(space) for one in tried)


def test_where_nobody_may_be_the_answer_the_sweep_ends_without_a_fault_of_its_own():
    """No batching cannot be said, and every size of the space is out of memory."""
    target = {"kind": "command", "model": "m", "rest_url": "http://h:1", "apply": ["reload", "{file}"]}
    scenario = asked(time="20s", space={"max_batch_size": [4, 16]})
    scenario = scenario_of(target={**target, "render": "tfserving"}, search=scenario.search.model_dump())
    trials = run(scenario, law=Law(rows_max=1))
    assert trials[0].source == "probe"
    assert trials[-1].state == "failed"


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
    target = {
        "kind": "http",
        "url": "http://h:1",
        "grpc_url": "h:2",
        "launch": ["serve"],
        "set": {"env": names},
    }
    scenario = scenario_of(
        **LOADS[objective],
        target={**target, "means": means},
        request={"protocol": "kserve_grpc", "rows": 2},
        objective=objective,
        search={"budget": {"time": "20s"}, "space": space},
    )
    trials = run(scenario)
    answer = recommend(trials, scenario=scenario)
    assert set(dict(answer.configuration.flags)) == set(space) - set(means.values())
    assert all(set(dict(trial.configuration.flags)) <= set(space) for trial in trials)
