"""The sweep end to end against a fake server on a fake clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from batchtune.errors import NoFeasibleConfigurationError, TargetError
from batchtune.recommend.recommendation import recommend
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import pool
from batchtune.tune.sweep.progress import SweepProgress, Watcher
from batchtune.tune.sweep.sweep import run_sweep, sweep
from batchtune.tune.trials.ledger import Ledger
from batchtune.tune.trials.trial import Ask, FinishedTrial, Trial
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, planted, scenario_of


def run(scenario, *, law=None, finished=(), fleet_seed=1, watcher=None, **target_options) -> list[Trial]:
    clock = FakeClock()
    target = FakeTarget(clock, law=law or Law(), **target_options)
    fleet = FakeFleet(target, seed=fleet_seed)
    found = sweep(scenario, target, fleet, finished=finished, watcher=watcher or Watcher(), now_s=clock)
    return [one.trial for one in found]


def test_reference_points_come_first_and_confirmation_last():
    trials = run(scenario_of())
    sources = [one.source for one in trials]
    assert sources[:4] == ["no_batching", "probe", "rule", "defaults"]
    first_confirmation = sources.index("confirm")
    assert set(sources[first_confirmation:]) == {"confirm"}
    assert set(sources[4:first_confirmation]) == {"sampler"}
    assert [one.number for one in trials] == list(range(1, len(trials) + 1))


def test_no_configuration_is_searched_twice_and_the_trial_budget_is_kept():
    trials = run(scenario_of())
    searched = [one.configuration for one in trials if one.source not in ("probe", "confirm")]
    assert len(set(searched)) == len(searched) == 12


def test_the_leader_is_confirmed_three_times_beside_its_rival_under_fresh_seeds():
    trials = run(scenario_of(), law=Law(noise=0.01))
    confirmed = [one for one in trials if one.source == "confirm"]
    recommendation = recommend(trials, scenario=scenario_of())
    assert recommendation.confirmations >= 3
    arms = Counter(one.configuration for one in confirmed)
    assert arms[recommendation.configuration] >= 3
    assert sorted(arms.values())[-2] >= 3
    seeds = {one.block: one.seed for one in confirmed}
    assert len(set(seeds.values())) == len(seeds)
    assert all(one.seed == seeds[one.block] for one in confirmed)
    assert not set(seeds.values()) & {one.seed for one in trials if one.source != "confirm"}


def test_far_reference_points_are_confirmed_once_and_near_ones_as_often_as_the_leader():
    trials = run(scenario_of())
    times = Counter(one.configuration.label() for one in trials if one.source == "confirm")
    assert times["no batching"] == 1
    trials = run(scenario_of(), law=Law(fixed_s=0.0, per_row_s=0.001))
    times = Counter(one.configuration.label() for one in trials if one.source == "confirm")
    assert times["no batching"] == times["server defaults"] == 3


def test_batching_is_found_to_help_on_a_device_that_shares_its_fixed_cost():
    scenario = scenario_of()
    recommendation = recommend(run(scenario, law=Law(noise=0.02)), scenario=scenario)
    assert recommendation.batching_helps == "yes"
    assert recommendation.gain_over_no_batching.value > 1.5
    assert "one by one" in recommendation.reason


def test_batching_is_found_not_to_help_where_time_is_proportional_to_rows():
    scenario = scenario_of()
    law = Law(fixed_s=0.0, per_row_s=0.001, noise=0.01)
    recommendation = recommend(run(scenario, law=law), scenario=scenario)
    assert recommendation.batching_helps == "no"
    assert recommendation.configuration.batching is None
    assert recommendation.confirmations >= 3


def test_an_exhausted_space_ends_the_search():
    space = {"max_batch_size": [1, 8], "batch_timeout_micros": [0, 1000]}
    trials = run(scenario_of(search={"budget": {"trials": 100}, "space": space}))
    assert sum(one.source == "sampler" for one in trials) == 4


def test_the_time_budget_is_kept_within_one_trial():
    scenario = scenario_of(
        search={"budget": {"time": "30s"}, "space": {"max_batch_size": list(range(1, 60))}}
    )
    trials = run(scenario)
    longest = max(one.seconds for one in trials)
    assert sum(one.seconds for one in trials) <= 30.0 + longest
    assert sum(one.seconds for one in trials) >= 24.0
    assert recommend(trials, scenario=scenario).confirmations >= 3


def test_a_target_that_refuses_a_configuration_makes_a_failed_trial_with_the_reason():
    def refuses(configuration):
        batching = configuration.batching
        return "num_batch_threads must not be 2" if batching and batching.num_batch_threads == 2 else None

    trials = run(
        scenario_of(search={"budget": {"trials": 25}, "space": scenario_of().search.space}), refuses=refuses
    )
    failed = [one for one in trials if one.state == "failed"]
    assert failed
    assert all(one.failure == "num_batch_threads must not be 2" for one in failed)
    assert recommend(trials, scenario=scenario_of()).configuration.batching.num_batch_threads != 2


def test_a_target_that_dies_is_launched_again_for_the_next_trial():
    def dies_under(configuration):
        return configuration.batching is not None and configuration.batching.max_batch_size == 32

    trials = run(
        scenario_of(search={"budget": {"trials": 33}, "space": scenario_of().search.space}),
        dies_under=dies_under,
    )
    failed = [one for one in trials if one.state == "failed"]
    assert failed
    assert "exited with 137" in failed[0].failure
    assert trials[-1].state == "complete"


def test_three_failures_in_a_row_end_the_sweep_with_the_last_reason():
    found = []
    clock = FakeClock()
    target = FakeTarget(clock, refuses=lambda _configuration: "no model")
    with pytest.raises(TargetError, match="3 trials in a row failed; the last: no model"):
        found.extend(sweep(scenario_of(), target, FakeFleet(target), now_s=clock))


def test_a_sweep_is_not_given_up_while_anything_worked():
    """Every size above 1 fails: what is left is confirmed, and that is the recommendation."""
    said = []
    trials = run(
        scenario_of(search={"strategy": "guided", "budget": {"time": "20s"}}),
        law=Law(rows_max=1),
        watcher=Watcher(on_summary=said.append),
    )
    assert (
        sum(one.state == "failed" for one in trials) > policy.FAILURES_MAX
    )  # other sizes are barred by then
    assert trials[-1].source == "confirm"
    assert recommend(trials, scenario=scenario_of()).configuration.batching is None


def test_an_interrupt_passes_through_and_everything_measured_stays():
    clock = FakeClock()
    target = FakeTarget(clock)
    said = []
    fleet = FakeFleet(target, interrupt_after=5)
    running = sweep(scenario_of(), target, fleet, now_s=clock, watcher=Watcher(on_summary=said.append))
    kept = [next(running).trial for _ in range(5)]
    with pytest.raises(KeyboardInterrupt):
        next(running)
    assert recommend(kept, scenario=scenario_of()).confirmations == 0
    assert [one.stop_reason for one in said] == ["it was interrupted"]


def test_a_resumed_sweep_runs_what_is_missing_and_proposes_the_same():
    scenario = scenario_of()
    whole = run(scenario)
    resumed = run(scenario, finished=whole[:7])
    assert resumed[0].number == 8
    searched = [one.configuration for one in whole if one.source == "sampler"]
    again = [one.configuration for one in [*whole[:7], *resumed] if one.source == "sampler"]
    assert again == searched


def test_progress_tells_phase_budget_and_the_best_so_far():
    seen: list[SweepProgress] = []
    trials = run(scenario_of(), watcher=Watcher(on_progress=seen.append))
    assert seen[0].phase == "reference points"
    assert {one.phase for one in seen} == {"reference points", "search", "confirmation"}
    assert seen[0].best is None
    assert seen[-1].best is not None
    assert {one.plan.number for one in seen} == {one.number for one in trials}
    assert any(one.live is not None for one in seen)
    assert seen[-1].trials_max == 12


def test_the_rule_strategy_measures_reference_points_and_confirms():
    scenario = scenario_of(
        search={"strategy": "rule", "budget": {"trials": 20}, "space": {"max_batch_size": [1, 8]}}
    )
    assert {one.source for one in run(scenario)} == {"no_batching", "defaults", "rule", "probe", "confirm"}


def test_latency_at_a_rate_that_no_batching_cannot_sustain():
    load = {"arrivals": "poisson", "rate": 1000, "warm_up": "200ms", "duration": "1s", "seed": 3}
    scenario = scenario_of(load=load, objective="latency")
    trials = run(scenario)
    recommendation = recommend(trials, scenario=scenario)
    assert recommendation.batching_helps == "yes"
    assert recommendation.rate_rps == pytest.approx(1000, rel=0.01)
    assert "without batching p95" in recommendation.reason


def capacity_scenario(**changes):
    load = {"arrivals": "poisson", "warm_up": "100ms", "duration": "1s", "seed": 3}
    search = {"budget": {"trials": 6}, "space": {"max_batch_size": [1, 4, 16, 64]}}
    return scenario_of(
        **{"load": load, "objective": "capacity", "slo": {"p95": "20ms"}, "search": search, **changes}
    )


def test_capacity_is_the_rate_that_the_law_says():
    """One thread, τ(b) = 0.9 ms + 0.4 ms·b: without batching at most 769/s; with batches of 16 at most 2192/s."""
    scenario = capacity_scenario(fixed={"num_batch_threads": 1})
    trials = run(scenario)
    no_batching = next(one for one in trials if one.source == "no_batching")
    assert 0.75 * 769 < no_batching.objective.value < 769
    recommendation = recommend(trials, scenario=scenario)
    assert 0.8 * 2192 < recommendation.rate_rps < 2500
    assert recommendation.batching_helps == "yes"
    assert recommendation.confirmations >= 3
    assert recommendation.latency_s["p95"].value < 0.025
    assert len(next(one for one in trials if one.source == "sampler").probes) <= 5


def test_a_capacity_that_no_rate_gives_is_infeasible():
    scenario = capacity_scenario(slo={"p95": "1ms"})
    trials = run(scenario)
    assert not any(one.feasible for one in trials if one.source != "probe")
    with pytest.raises(NoFeasibleConfigurationError, match="nearest"):
        recommend(trials, scenario=scenario)


def test_a_trial_that_the_host_spoilt_is_repeated_twice_at_most_and_counted():
    class SpoiltBench:
        """Every trial of the defaults is noisy; the others are quiet."""

        def __init__(self) -> None:
            self.plans = []

        def run(self, plan):
            self.plans.append(plan)
            spoilt = plan.source == "defaults"
            trial = planted(
                plan.number,
                throughput=3000.0 if spoilt else 1000.0,
                p95_s=0.01,
                batching=None if plan.configuration.batching is None else "defaults",
                source=plan.source,
                block=plan.block,
            )
            measurement = replace(trial.measurement, verdict="NOISY" if spoilt else "PASS")
            asked = {"asked_concurrency": plan.concurrency, "asked_duration_s": plan.duration_s}
            trial = replace(
                trial,
                configuration=plan.configuration,
                measurement=measurement,
                repeat_of=plan.repeat_of,
                **asked,
            )
            return FinishedTrial(trial=trial, samples=None)

    bench, told = SpoiltBench(), []
    scenario = scenario_of(
        search={"strategy": "rule", "budget": {"trials": 3}, "space": {"max_batch_size": [8]}}
    )
    watcher = Watcher(on_summary=told.append)
    trials = [one.trial for one in run_sweep(scenario, bench, watcher=watcher, now_s=FakeClock())]
    of_defaults = [one for one in trials if one.source == "defaults"]
    assert [one.repeat_of for one in of_defaults] == [None, of_defaults[0].number, of_defaults[1].number]
    assert told[0].repeated_trials == 2
    pooled = pool(trials, scenario=scenario)
    defaults = next(one for one in pooled if one.configuration == of_defaults[0].configuration)
    assert len(defaults.searched) == 1


def test_the_summary_is_handed_over_even_when_the_sweep_is_broken_off():
    told = []
    clock = FakeClock()
    target = FakeTarget(clock)
    running = sweep(
        scenario_of(), target, FakeFleet(target), watcher=Watcher(on_summary=told.append), now_s=clock
    )
    for _ in range(5):
        next(running)
    running.close()
    assert told[0].strategy == "optuna"
    assert sum(told[0].trials_by_phase.values()) == 5


def test_what_an_interrupted_sweep_measured_answers_in_order_and_its_time_counts():
    clock = FakeClock()
    target = FakeTarget(clock)
    whole = [one.trial for one in sweep(scenario_of(), target, FakeFleet(target), now_s=clock)]
    ledger = Ledger(whole, lambda: 0.0)
    first = whole[0]
    ask = Ask(configuration=first.configuration, source=first.source, reason="again")
    assert ledger.answer(ask) == first
    assert ledger.trials == [first]
    assert ledger.elapsed_s() == pytest.approx(first.seconds)
    assert ledger.answer(ask) is None
    assert len(ledger.trials) == len(whole)
    assert ledger.elapsed_s() == pytest.approx(sum(one.seconds for one in whole))
    assert ledger.next_number() == len(whole) + 1


def test_what_a_sweep_thought_between_its_trials_counts_once_when_it_is_resumed():
    clock = FakeClock()
    target = FakeTarget(clock)

    def think(progress: SweepProgress) -> None:
        clock.sleep(1.0 if progress.live is None else 0.0)

    running = sweep(scenario_of(), target, FakeFleet(target), watcher=Watcher(on_progress=think), now_s=clock)
    whole = [one.trial for one in running]
    in_trials_s = sum(one.seconds for one in whole)
    assert whole[-1].elapsed_s == pytest.approx(in_trials_s + len(whole))
    ledger = Ledger(whole, lambda: 0.0)
    first = whole[0]
    ledger.answer(Ask(configuration=first.configuration, source=first.source, reason="again"))
    assert ledger.elapsed_s() == first.elapsed_s == pytest.approx(first.seconds + 1.0)
    ledger.end_replay()
    assert ledger.elapsed_s() == pytest.approx(in_trials_s + len(whole))
    assert Trial.from_dict(first.to_dict()).elapsed_s == first.elapsed_s


@pytest.mark.parametrize(
    ("objective", "strategy"),
    [
        ("throughput", "optuna"),
        pytest.param("capacity", "guided", marks=pytest.mark.slow),
        pytest.param("capacity", "optuna", marks=pytest.mark.slow),
        pytest.param("throughput", "guided", marks=pytest.mark.slow),
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
    search = {"strategy": strategy, "budget": {"trials": 12, "time": "90s"}, "seed": 1, "space": space}
    fixed = {"batch_timeout_micros": 0, "num_batch_threads": 1, "max_execution_batch_size": 8}
    load = {"arrivals": "poisson", "warm_up": "100ms", "duration": "1s"}
    changes = {} if objective == "throughput" else {"load": load}
    scenario = scenario_of(search=search, fixed=fixed, objective=objective, **changes)
    trials = run(scenario)
    recommendation = recommend(trials, scenario=scenario)
    assert recommendation.configuration.batching is not None
    assert recommendation.batching_helps == "yes"
    assert recommendation.configuration in {one.configuration for one in trials if one.source == "confirm"}
    assert not any(note.startswith(("outside your space", "no point")) for note in recommendation.notes)
