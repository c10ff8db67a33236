"""The search under the scenario's own load, on simulated devices in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from batchtune.errors import NoFeasibleConfigurationError
from batchtune.measure.caveats import caveat
from batchtune.measure.quantiles import Estimate
from batchtune.report.answer_words import gain_sentences
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.tune.search.contenders import Contender
from batchtune.tune.search.fixed_load import FixedLoadSearch
from batchtune.tune.sweep.sweep import sweep
from batchtune.tune.trials.trial import Trial
from batchtune.twin.simulator.simulate import Device
from tests.benchmarks.replay.replay import NEAR, guided_choices, read_table
from tests.tune.answer.ledgers import BATCH_8, BATCH_14, BUSY, SCENARIO, SEARCH, at_rate
from tests.tune.tune_fakes import planted, scenario_of
from tests.twin.simulated_fleet import simulated_server

SPACE = {
    "max_batch_size": [1, 2, 4, 8, 16, 32],
    "batch_timeout_micros": [0, 1000, 5000],
    "num_batch_threads": [1, 2],
}


def device(fixed_ms: float, per_row_ms: float) -> Device:
    rows = np.arange(1025)
    return Device(tau_s=(fixed_ms + per_row_ms * rows) / 1e3, serial=True, delay_s=0.0003)


def scenario(budget_s: float = 45.0, **load: object) -> Scenario:
    objective = "latency" if "rate" in load else "throughput"
    return scenario_of(
        load={"warm_up": "500ms", "duration": "2s", "seed": 1, **load},
        objective=objective,
        slo={"p95": "60ms"},
        search={"budget": {"time": f"{budget_s:g}s"}, "seed": 1, "space": SPACE},
    )


@cache
def swept(
    fixed_ms: float, per_row_ms: float, *, rate: str | None = None, noise: float = 0.02
) -> tuple[tuple[Trial, ...], Recommendation, Scenario]:
    load: dict[str, object] = {"arrivals": "closed", "concurrency": 32}
    if rate is not None:
        load = {"arrivals": "poisson", "rate": rate}
    asked = scenario(**load)
    clock, target, fleet = simulated_server(device(fixed_ms, per_row_ms), seed=1, noise=noise)
    trials = tuple(done.trial for done in sweep(asked, target, fleet, now_s=clock))
    return trials, recommend(trials, scenario=asked), asked


def size_of(answer: Recommendation) -> int:
    batching = answer.configuration.batching
    return 1 if batching is None else batching.max_batch_size or 1000


def test_a_closed_loop_gets_the_size_that_its_clients_fill() -> None:
    _, answer, _ = swept(7.0, 0.11)
    assert size_of(answer) == 32
    assert answer.established
    assert answer.batching_helps == "yes"
    assert answer.batching_gain is not None
    assert answer.batching_gain.low > 10.0


def test_where_batching_cannot_pay_nothing_is_claimed_for_it() -> None:
    _, answer, _ = swept(0.05, 1.5)
    assert answer.batching_helps != "yes"
    assert answer.batching_gain is not None
    assert answer.batching_gain.low <= 1.0 <= answer.batching_gain.high


def test_the_lowest_latency_at_a_rate_is_found() -> None:
    trials, answer, _ = swept(4.0, 0.1, rate="1000/s")
    p95_s = answer.latency_s["p95"]
    best = min(
        trial.measurement.latency_s["p95"].value
        for trial in trials
        if trial.measurement is not None and trial.request.concurrency is None and trial.feasible
    )
    assert p95_s.value <= 1.1 * best


def test_no_batching_that_cannot_serve_the_rate_is_told_by_batching_helps() -> None:
    _, answer, _ = swept(4.0, 0.1, rate="1000/s")
    assert answer.batching_helps == "yes"


def test_an_slo_below_a_lone_request_is_missed_for_sure() -> None:
    trials, _, asked = swept(7.0, 0.11)
    slo = asked.slo.model_validate({"p95": "2ms"})
    with pytest.raises(NoFeasibleConfigurationError, match="one request alone takes longer"):
        recommend(trials, scenario=asked, slo=slo)


def observed() -> tuple[FixedLoadSearch, Contender]:
    """A search that has seen the trials of a sweep, and the contender that it recommended."""
    trials, answer, asked = swept(7.0, 0.11)
    search = FixedLoadSearch(asked, budget_s=45.0)
    search.observe(trials)
    chosen = search.contenders.find(answer.configuration)
    assert chosen is not None
    return search, chosen


def test_figures_are_those_of_five_fresh_runs_where_there_is_time() -> None:
    trials, answer, _ = swept(7.0, 0.11)
    fresh = [
        trial.measurement.throughput_rps.value
        for trial in trials
        if trial.source == "confirm"
        and trial.configuration == answer.configuration
        and trial.measurement is not None
    ]
    assert answer.confirmations == len(fresh) == 5
    assert answer.interval == "prediction"
    assert answer.throughput_rps.low <= min(fresh) <= max(fresh) <= answer.throughput_rps.high


def test_confirmation_runs_that_missed_outweigh_earlier_ones_that_met_the_slo() -> None:
    search, chosen = observed()
    run = next(run for run in chosen.runs if run.fresh)
    missed = [replace(run, held=False) for _ in range(3)]
    chosen.runs[:] = [*(replace(run, fresh=False) for _ in range(4)), run, *missed]
    standing = search.standing(chosen)
    assert standing is not None
    assert (standing.keeps, standing.misses) == (False, True)
    assert search.leader() is not chosen


def test_one_stalled_run_does_not_decide() -> None:
    search, chosen = observed()
    before = search.standing(chosen)
    stalled = next(run for run in chosen.runs)
    chosen.runs.append(replace(stalled, answered_rps=1.0, held=False, fresh=True))
    after = search.standing(chosen)
    assert before is not None
    assert after is not None
    assert after.mean == pytest.approx(before.mean, abs=0.1)


def test_a_loop_that_stalled_tells_nothing_of_a_batch_s_time() -> None:
    """One of 0.4 s in which no request was due: batches of half a second, and a confirmation run of a minute."""
    trials, _, asked = swept(7.0, 0.11)
    search = FixedLoadSearch(asked, budget_s=45.0)
    search.observe(trials)
    before = search.curve.readings()
    batched = next(one for one in trials if one.configuration.batching is not None and one.measurement)
    measured = batched.measurement
    assert measured is not None
    assert measured.server is not None
    slow = replace(
        measured,
        requests=0,
        throughput_rps=Estimate(value=30.0, low=30.0, high=30.0),
        server=replace(measured.server, mean_batch_rows=20.0),
    )
    search.observe([replace(batched, number=len(trials) + 1, measurement=slow)])
    assert search.curve.readings() == before


@pytest.mark.parametrize(("better", "is_unseated"), [(1.04, False), (1.10, True)])
def test_a_confirmed_leader_gives_way_to_what_gains_the_user_something(
    better: float, is_unseated: bool
) -> None:
    search, leader = observed()
    rival = next(c for c in search.contenders if c is not leader and c.configuration.batching is not None)
    fresh = [run for run in leader.runs if run.fresh]
    rival.runs[:] = [replace(run, answered_rps=better * run.answered_rps) for run in fresh[:2]]
    assert (search.leader() is rival) == is_unseated


def test_one_lucky_run_unseats_no_confirmed_leader() -> None:
    """As a sweep met it: 1,568/s once, in a fast minute of the host, beside four confirmation runs of 1,456/s."""
    search, leader = observed()
    rival = next(c for c in search.contenders if c is not leader and c.configuration.batching is not None)
    fresh = [run for run in leader.runs if run.fresh]
    leader.runs[:] = [
        replace(run, answered_rps=run.answered_rps * at)
        for run, at in zip(fresh, (0.97, 1.0, 1.03), strict=False)
    ]
    rival.runs[:] = [replace(fresh[0], answered_rps=1.077 * fresh[1].answered_rps, fresh=False)]
    assert search.leader() is leader


def test_where_runs_differ_widely_a_lone_run_of_no_batching_proves_no_gain() -> None:
    trials, _, asked = swept(0.05, 1.5, rate="300/s")
    random = np.random.default_rng(1)
    disturbed: list[Trial] = []
    lone_runs = 0
    for trial in trials:
        measured = trial.measurement
        assert measured is not None
        unbatched = trial.configuration.batching is None and trial.request.concurrency is None
        lone_runs += unbatched
        if not unbatched or lone_runs == 1:
            slower = 40.0 if unbatched else random.lognormal(1.0, 0.6)
            latency_s = {name: scaled(quantile, slower) for name, quantile in measured.latency_s.items()}
            disturbed.append(replace(trial, measurement=replace(measured, latency_s=latency_s)))
    answer = recommend(disturbed, scenario=asked.model_copy(update={"slo": asked.slo.model_validate({})}))
    assert answer.configuration.batching is not None
    assert answer.batching_helps != "yes"
    assert not answer.established


def test_where_batches_were_only_scouted_nothing_is_said_against_them() -> None:
    trials, _, asked = swept(0.05, 1.5, rate="300/s")
    scouted = [
        trial
        for trial in trials
        if trial.configuration.batching is None or trial.source in ("probe", "calibration")
    ]
    assert any(trial.configuration.batching is not None for trial in scouted)
    answer = recommend(scouted, scenario=asked)
    assert answer.batching_helps != "no"
    assert "no_batches" in str(answer.reason)


def scaled(quantile: Estimate, factor: float) -> Estimate:
    return Estimate(value=factor * quantile.value, low=factor * quantile.low, high=factor * quantile.high)


@pytest.mark.parametrize("name", ["emulated", "imdb_transformer"])
def test_a_recorded_grid_gives_nearly_the_best_in_a_sixteenth_of_a_pass(name: str) -> None:
    """Of the first, the best batches wait until all clients are in: a timeout, which the curve must be asked of."""
    table = read_table(name)
    (choice,) = guided_choices(table, 0.063 * table.pass_s, (), seed=2)
    assert choice.cell is not None
    assert table.regret(choice.cell) <= NEAR


def test_a_second_thread_is_tried_before_the_sizes_that_the_curve_can_tell() -> None:
    """As on Triton, where what runs now has one instance and no default has more: 25 s are ten runs."""
    asked = scenario(budget_s=25.0, arrivals="closed", concurrency=64).model_copy(
        update={"fixed": {"max_batch_size": 4, "batch_timeout_micros": 0, "num_batch_threads": 1}}
    )
    rows = np.arange(1025)
    parallel = Device(tau_s=(20.0 + 0.5 * rows) / 1e3, contention=0.0, delay_s=0.0003)
    clock, target, fleet = simulated_server(parallel, seed=1, noise=0.02)
    trials = [done.trial for done in sweep(asked, target, fleet, now_s=clock)]
    first = [trial.configuration.batching for trial in trials[:8]]
    assert (
        max(one.num_batch_threads or 1 for one in first if one is not None and one.max_batch_size == 32) == 2
    )


def test_in_a_budget_of_trials_a_stalled_scout_makes_no_long_confirmation_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two scouts of 0.4 s that stalled: batches of half a second, and five runs of 40 of them each took two minutes."""
    asked = scenario_of(
        load={"arrivals": "closed", "concurrency": 32, "duration": "400ms"}, slo={"p95": "60ms"}
    )
    monkeypatch.setattr(FixedLoadSearch, "batch_s", lambda *_: 0.5)
    clock, target, fleet = simulated_server(device(7.0, 0.11), seed=1, noise=0.02)
    fresh = [
        done.trial for done in sweep(asked, target, fleet, now_s=clock) if done.trial.source == "confirm"
    ]
    assert fresh
    assert max(trial.request.duration_s or 0.0 for trial in fresh) < 6.0


@pytest.mark.parametrize(("timeout_micros", "is_of_use"), [(2_499_136, False), (500, True)])
def test_batches_that_wait_for_more_clients_than_there_are_teach_nothing_and_are_not_tried(
    timeout_micros: int, is_of_use: bool
) -> None:
    """The rule waited 2.5 s for 2,000 rows of 8 clients: taken for a batch's time, it left no time to confirm."""
    batching = {"max_batch_size": 2019, "batch_timeout_micros": timeout_micros, "num_batch_threads": 1}
    seconds = 0.0023 + timeout_micros / 1e6
    waited = planted(
        1,
        batching=batching,
        throughput=16 / seconds,
        p95_s=seconds,
        server=replace(BUSY, mean_batch_rows=16.0),
    )
    search = FixedLoadSearch(SCENARIO, budget_s=20.0)
    rule = search.contenders.add(waited.configuration, "rule")
    assert (rule in search._first()) == is_of_use
    search.observe([waited])
    assert bool(search.curve.readings()) == is_of_use


def beside_others(trial: Trial) -> Trial:
    """The same run while other programs use the CPUs."""
    assert trial.measurement is not None
    busy = (caveat("host_busy", foreign_ratio=0.77),)
    measured = replace(trial.measurement, verdict="NOISY", decision="PASS", caveats=busy)
    return replace(trial, measurement=measured)


def confirmed_after_a_disturbance() -> list[Trial]:
    """As a user had it: both references ran once, beside another sweep; the leader was confirmed after its end."""
    return [
        beside_others(planted(1, batching=None, throughput=625, p95_s=0.028, source="no_batching")),
        beside_others(planted(2, throughput=850, p95_s=0.015, source="defaults")),
        planted(3, batching=BATCH_14, throughput=2700, p95_s=0.005),
        *(
            planted(at, batching=BATCH_14, throughput=2700 + at, p95_s=0.005, source="confirm")
            for at in (4, 5, 6)
        ),
    ]


def test_references_that_ran_only_beside_other_programs_run_again_near_the_confirmed_leader() -> None:
    search = FixedLoadSearch(SCENARIO, budget_s=60.0)
    search.observe(confirmed_after_a_disturbance())
    named = []
    for number, batching in ((7, None), (8, "defaults"), (9, BATCH_14)):
        ask = search._fresh(30.0, set())
        assert ask is not None
        assert ask.source == "confirm"
        named.append(search.contenders.find(ask.configuration))
        again = planted(number, batching=batching, throughput=2650, p95_s=0.005, source="confirm")
        search.observe([beside_others(again)])
    assert named == [search.contenders.of("no_batching"), search.contenders.of("defaults"), search.leader()]


def test_no_gain_is_stated_over_a_reference_that_ran_only_beside_other_programs() -> None:
    trials = confirmed_after_a_disturbance()
    answer = recommend(trials, scenario=SCENARIO)
    assert answer.gains == {"no_batching": None, "defaults": None}
    assert answer.batching_helps == "not distinguishable"
    assert not answer.established
    again = planted(7, throughput=2650, p95_s=0.005, source="confirm")
    unbatched = planted(8, batching=None, throughput=800, p95_s=0.02, source="confirm")
    settled = recommend([*trials, beside_others(again), beside_others(unbatched)], scenario=SCENARIO)
    assert settled.established
    gain = settled.gains["defaults"]
    assert gain is not None
    assert gain.low < 1.02 < gain.high < 1.2
    assert settled.batching_helps == "yes"


def test_a_configuration_without_a_p95_is_no_alternative() -> None:
    """Nearly all requests of its run were unfinished; without an SLO it counts as kept, and the sweep ended in NaN."""
    trials = [
        planted(at, batching=BATCH_14, throughput=500, p95_s=0.04, source="confirm") for at in (1, 2, 3)
    ]
    trials.append(planted(4, batching=BATCH_8, throughput=16, p95_s=math.nan))
    no_limits = SCENARIO.model_copy(update={"slo": SCENARIO.slo.model_validate({"errors": "100%"})})
    answer = recommend(trials, scenario=no_limits)
    assert answer.to_dict()["alternatives"] == []


def test_no_timeout_longer_than_a_limit_is_recommended_while_a_shorter_one_keeps_it() -> None:
    long = {**BATCH_14, "batch_timeout_micros": 14_482}
    short = {**BATCH_14, "batch_timeout_micros": 0}
    trials = [planted(1, batching=short, throughput=3000, p95_s=0.006)]
    trials += [planted(at, batching=long, throughput=4000, p95_s=0.005, source="confirm") for at in (2, 3, 4)]
    answer = recommend(trials, scenario=SCENARIO, slo=SCENARIO.slo.model_validate({"p95": "8ms"}))
    assert answer.configuration.in_force("batch_timeout_micros") == 0
    answer = recommend(trials, scenario=SCENARIO)
    assert answer.configuration.in_force("batch_timeout_micros") == 14_482


def test_confirmation_runs_that_differ_by_a_factor_of_three_confirm_nothing() -> None:
    p95s_ms = (15.5, 14.4, 15.2, 25.6, 47.1)
    trials = [
        at_rate(at, 1000.0, p95_ms / 1e3, batching=BATCH_14, source="confirm")
        for at, p95_ms in enumerate(p95s_ms, 1)
    ]
    asked = scenario_of(load={"arrivals": "poisson", "rate": "1000/s"}, objective="latency", search=SEARCH)
    questions = recommend(trials, scenario=asked).open_questions
    assert [(question.code, round(question.high or 0.0, 2)) for question in questions] == [("unsteady", 3.27)]
    assert recommend(trials[:4], scenario=asked).established


def test_that_no_batching_cannot_keep_up_is_known_from_its_closed_loop() -> None:
    every, _, asked = swept(4.0, 0.1, rate="1000/s")
    trials = [one for one in every if one.configuration.batching is not None or one.request.concurrency]
    answer = recommend(trials, scenario=asked)
    assert "unbatched_too_slow" in [note.code for note in answer.notes]
    assert "No batching cannot keep up with 1,000 requests/s" in " ".join(gain_sentences(answer))
    slow = asked.load.model_copy(update={"rate_rps": 100.0})
    slower = recommend(trials, scenario=asked.model_copy(update={"load": slow}))
    assert "unbatched_too_slow" not in [note.code for note in slower.notes]


@pytest.mark.parametrize(("within", "is_undecided"), [(0.15, True), (0.01, False)])
def test_one_run_whose_interval_contains_the_limit_leaves_undecided_whether_it_is_missed(
    within: float, is_undecided: bool
) -> None:
    trials = [
        planted(1, batching=None, throughput=900, p95_s=0.053, source="no_batching", within=within),
        *(planted(at, batching=BATCH_14, throughput=2700, p95_s=0.005, source="confirm") for at in (2, 3, 4)),
    ]
    answer = recommend(trials, scenario=SCENARIO)
    assert [other.undecided for other in answer.references] == [is_undecided]
    said = " ".join(gain_sentences(answer))
    assert ("No batching misses the SLO." in said) == (not is_undecided)
