"""The search under the scenario's own load, on simulated devices in virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest

from batchtune.measure.caveats import caveat
from batchtune.measure.quantiles import Estimate
from batchtune.report.answer_words import gain_sentences
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.tune.evidence.bracket import BracketRun
from batchtune.tune.search.contenders import Contender
from batchtune.tune.search.fixed_load import FixedLoadSearch
from batchtune.tune.sweep.sweep import sweep
from batchtune.tune.trials.trial import Trial
from batchtune.twin.simulator.simulate import Device
from tests.benchmarks.replay.replay import NEAR, guided_choice, read_table
from tests.tune.answer.ledgers import BATCH_8, BATCH_14, BUSY, SCENARIO, SEARCH, at_rate
from tests.tune.tune_fakes import exactly, planted, remeasured, scenario_of
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
    fixed_ms: float, per_row_ms: float, *, rate: str | None = None
) -> tuple[tuple[Trial, ...], Recommendation, Scenario]:
    closed_loop, open_loop = {"arrivals": "closed", "concurrency": 32}, {"arrivals": "poisson", "rate": rate}
    asked = scenario(**(open_loop if rate else closed_loop))
    trials = tuple(loads(asked, device(fixed_ms, per_row_ms)))
    return trials, recommend(trials, scenario=asked), asked


def loads(asked: Scenario, device: Device) -> Iterator[Trial]:
    clock, target, fleet = simulated_server(device, seed=1, noise=0.02)
    return (done.trial for done in sweep(asked, target, fleet, now_s=clock))


def test_a_closed_loop_gets_the_size_that_its_clients_fill() -> None:
    _, answer, _ = swept(7.0, 0.11)
    assert (answer.configuration.in_force("max_batch_size"), answer.established) == (32, True)
    assert answer.batching_helps == "yes"
    assert answer.batching_gain.low > 10.0


def test_where_batching_cannot_pay_nothing_is_claimed_for_it() -> None:
    _, answer, _ = swept(0.05, 1.5)
    assert answer.configuration.batching is None or answer.level_with is not None
    assert answer.batching_helps != "yes"
    assert answer.batching_gain.low <= 1.0 <= answer.batching_gain.high


def test_the_lowest_latency_at_a_rate_is_found_that_no_batching_cannot_serve() -> None:
    trials, answer, _ = swept(4.0, 0.1, rate="1000/s")
    under_load = [trial for trial in trials if trial.request.concurrency is None and trial.feasible]
    best_s = min(trial.measurement.latency_s["p95"].value for trial in under_load if trial.measurement)
    assert answer.latency_s["p95"].value <= 1.1 * best_s
    assert answer.batching_helps == "yes"


def observed() -> tuple[FixedLoadSearch, Contender, Contender, list[BracketRun]]:
    """A search that has seen the trials of a sweep, the contender that it recommended with its fresh runs, a rival."""
    trials, answer, asked = swept(7.0, 0.11)
    search = FixedLoadSearch(asked, budget_s=45.0)
    search.observe(trials)
    chosen = search.contenders.find(answer.configuration)
    rival = next(c for c in search.contenders if c is not chosen and c.configuration.batching is not None)
    return search, chosen, rival, [run for run in chosen.runs if run.fresh]


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
    search, chosen, _, (run, *_) = observed()
    missed = [replace(run, held=False)] * 3
    chosen.runs[:] = [*[replace(run, fresh=False)] * 4, run, *missed]
    standing = search.standing(chosen)
    assert (standing.keeps, standing.misses) == (False, True)
    assert search.leader() is not chosen


def test_one_stalled_run_does_not_decide() -> None:
    search, chosen, _, _ = observed()
    before = search.standing(chosen).mean
    chosen.runs.append(replace(chosen.runs[0], answered_rps=1.0, held=False, fresh=True))
    assert search.standing(chosen).mean == pytest.approx(before, abs=0.1)


def test_a_loop_that_stalled_tells_nothing_of_a_batch_s_time() -> None:
    """One of 0.4 s in which no request was due: batches of half a second, and a confirmation run of a minute."""
    search, *_ = observed()
    before = search.curve.readings()
    batched = next(one for one in swept(7.0, 0.11)[0] if one.configuration.batching and one.measurement)
    server = replace(batched.measurement.server, mean_batch_rows=20.0)
    slow = remeasured(batched, requests=0, throughput_rps=exactly(30.0), server=server)
    search.observe([replace(slow, number=999)])
    assert search.curve.readings() == before


@pytest.mark.parametrize(("better", "is_unseated"), [(1.04, False), (1.10, True)])
def test_a_confirmed_leader_gives_way_to_what_gains_the_user_something(
    better: float, is_unseated: bool
) -> None:
    search, _, rival, fresh = observed()
    rival.runs[:] = [replace(run, answered_rps=better * run.answered_rps) for run in fresh[:2]]
    assert (search.leader() is rival) == is_unseated


def test_one_lucky_run_unseats_no_confirmed_leader() -> None:
    """As a sweep met it: 1,568/s once, in a fast minute of the host, beside four confirmation runs of 1,456/s."""
    search, leader, rival, fresh = observed()
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
        unbatched = trial.configuration.batching is None and trial.request.concurrency is None
        lone_runs += unbatched
        if not unbatched or lone_runs == 1:
            slower = 40.0 if unbatched else random.lognormal(1.0, 0.6)
            quantiles = trial.measurement.latency_s.items()
            latency_s = {name: scaled(quantile, slower) for name, quantile in quantiles}
            disturbed.append(remeasured(trial, latency_s=latency_s))
    answer = recommend(disturbed, scenario=asked.model_copy(update={"slo": asked.slo.model_validate({})}))
    assert answer.configuration.batching is not None
    assert answer.batching_helps != "yes"
    assert not answer.established


def test_where_batches_were_only_scouted_nothing_is_said_against_them() -> None:
    trials, _, asked = swept(0.05, 1.5, rate="300/s")
    scouts = ("probe", "calibration")
    scouted = [one for one in trials if one.configuration.batching is None or one.source in scouts]
    assert any(trial.configuration.batching is not None for trial in scouted)
    answer = recommend(scouted, scenario=asked)
    assert answer.batching_helps != "no"
    assert "no_batches" in str(answer.reason)


def scaled(quantile: Estimate, factor: float) -> Estimate:
    return Estimate(value=factor * quantile.value, low=factor * quantile.low, high=factor * quantile.high)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emulated", "imdb_transformer"])
def test_a_recorded_grid_gives_nearly_the_best_in_a_sixteenth_of_a_pass(name: str) -> None:
    """Of the first, the best batches wait until all clients are in: a timeout, which the curve must be asked of."""
    table = read_table(name)
    choice = guided_choice(table, 0.063 * table.pass_s, seed=2)
    assert table.regret(choice.cell) <= NEAR


def test_a_second_thread_is_tried_before_the_sizes_that_the_curve_can_tell() -> None:
    """As on Triton, where what runs now has one instance and no default has more: 25 s are ten runs."""
    asked = scenario(budget_s=25.0, arrivals="closed", concurrency=64).model_copy(
        update={"fixed": {"max_batch_size": 4, "batch_timeout_micros": 0, "num_batch_threads": 1}}
    )
    tau_s = (20.0 + 0.5 * np.arange(1025)) / 1e3
    trials = loads(asked, Device(tau_s=tau_s, contention=0.0, delay_s=0.0003))
    first = [trial.configuration.batching for trial in islice(trials, 8)]
    full = [one for one in first if one is not None and one.max_batch_size == 32]
    assert max(one.num_batch_threads or 1 for one in full) == 2


def test_in_a_budget_of_trials_a_stalled_scout_makes_no_long_confirmation_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two scouts of 0.4 s that stalled: batches of half a second, and five runs of 40 of them each took two minutes."""
    load = {"arrivals": "closed", "concurrency": 32, "duration": "400ms"}
    monkeypatch.setattr(FixedLoadSearch, "batch_s", lambda *_: 0.5)
    trials = loads(scenario_of(load=load, slo={"p95": "60ms"}), device(7.0, 0.11))
    fresh_s = [trial.request.duration_s or 0.0 for trial in trials if trial.source == "confirm"]
    assert max(fresh_s) < 6.0


@pytest.mark.parametrize(("timeout_micros", "is_of_use"), [(2_499_136, False), (500, True)])
def test_batches_that_wait_for_more_clients_than_there_are_teach_nothing_and_are_not_tried(
    timeout_micros: int, is_of_use: bool
) -> None:
    """The rule waited 2.5 s for 2,000 rows of 8 clients: taken for a batch's time, it left no time to confirm."""
    batching = {"max_batch_size": 2019, "batch_timeout_micros": timeout_micros, "num_batch_threads": 1}
    seconds = 0.0023 + timeout_micros / 1e6
    server = replace(BUSY, mean_batch_rows=16.0)
    waited = planted(1, batching=batching, throughput=16 / seconds, p95_s=seconds, server=server)
    search = FixedLoadSearch(SCENARIO, budget_s=20.0)
    rule = search.contenders.add(waited.configuration, "rule")
    assert (rule in search._first()) == is_of_use
    search.observe([waited])
    assert bool(search.curve.readings()) == is_of_use


BESIDE_OTHERS = {
    "verdict": "NOISY",
    "decision": "PASS",
    "caveats": (caveat("host_busy", foreign_ratio=0.77),),
}
"""What a run measures while other programs use the CPUs."""


def confirmed(*numbers: int, **changes: Any) -> list[Trial]:
    """Confirmation runs of the leader."""
    figures = {"batching": BATCH_14, "throughput": 2700, "p95_s": 0.005, **changes}
    return [planted(number, source="confirm", **figures) for number in numbers]


AFTER_A_DISTURBANCE = [
    planted(1, batching=None, throughput=625, p95_s=0.028, source="no_batching", **BESIDE_OTHERS),
    planted(2, throughput=850, p95_s=0.015, source="defaults", **BESIDE_OTHERS),
    planted(3, batching=BATCH_14, throughput=2700, p95_s=0.005),
    *(run for number in (4, 5, 6) for run in confirmed(number, throughput=2700 + number)),
]
"""As a user had it: both references ran once, beside another sweep; the leader was confirmed after its end."""


def test_references_that_ran_only_beside_other_programs_run_again_near_the_confirmed_leader() -> None:
    search = FixedLoadSearch(SCENARIO, budget_s=60.0)
    search.observe(AFTER_A_DISTURBANCE)
    named = []
    for number, batching in ((7, None), (8, "defaults"), (9, BATCH_14)):
        ask = search._fresh(30.0, set())
        assert ask.source == "confirm"
        named.append(search.contenders.find(ask.configuration))
        search.observe(confirmed(number, batching=batching, throughput=2650, **BESIDE_OTHERS))
    assert named == [search.contenders.of("no_batching"), search.contenders.of("defaults"), search.leader()]


def test_no_gain_is_stated_over_a_reference_that_ran_only_beside_other_programs() -> None:
    answer = recommend(AFTER_A_DISTURBANCE, scenario=SCENARIO)
    assert answer.gains == {"no_batching": None, "defaults": None}
    assert (answer.batching_helps, answer.established) == ("not distinguishable", False)
    again = confirmed(7, batching="defaults", throughput=2650, **BESIDE_OTHERS)
    again += confirmed(8, batching=None, throughput=800, p95_s=0.02, **BESIDE_OTHERS)
    settled = recommend([*AFTER_A_DISTURBANCE, *again], scenario=SCENARIO)
    gain = settled.gains["defaults"]
    assert gain.low < 1.02 < gain.high < 1.2
    assert (settled.batching_helps, settled.established) == ("yes", True)


def test_a_configuration_without_a_p95_is_no_alternative() -> None:
    """Nearly all requests of its run were unfinished; without an SLO it counts as kept, and the sweep ended in NaN."""
    trials = confirmed(1, 2, 3, throughput=500, p95_s=0.04)
    trials.append(planted(4, batching=BATCH_8, throughput=16, p95_s=math.nan))
    no_limits = SCENARIO.model_copy(update={"slo": SCENARIO.slo.model_validate({"errors": "100%"})})
    answer = recommend(trials, scenario=no_limits)
    assert answer.to_dict()["alternatives"] == []


def test_no_timeout_longer_than_a_limit_is_recommended_while_a_shorter_one_keeps_it() -> None:
    long = {**BATCH_14, "batch_timeout_micros": 14_482}
    short = {**BATCH_14, "batch_timeout_micros": 0}
    trials = [planted(1, batching=short, throughput=3000, p95_s=0.006)]
    trials += confirmed(2, 3, 4, batching=long, throughput=4000)
    for limit, micros in (("8ms", 0), ("50ms", 14_482)):
        answer = recommend(trials, scenario=SCENARIO, slo=SCENARIO.slo.model_validate({"p95": limit}))
        assert answer.configuration.in_force("batch_timeout_micros") == micros


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
    slow = asked.model_copy(update={"load": asked.load.model_copy(update={"rate_rps": 100.0})})
    for given, is_known in ((asked, True), (slow, False)):
        answer = recommend(trials, scenario=given)
        assert ("unbatched_too_slow" in [note.code for note in answer.notes]) == is_known
        said = "No batching cannot keep up with 1,000 requests/s"
        assert (said in " ".join(gain_sentences(answer))) == is_known


@pytest.mark.parametrize(("within", "is_undecided"), [(0.15, True), (0.01, False)])
def test_one_run_whose_interval_contains_the_limit_leaves_undecided_whether_it_is_missed(
    within: float, is_undecided: bool
) -> None:
    trials = [
        planted(1, batching=None, throughput=900, p95_s=0.053, source="no_batching", within=within),
        *confirmed(2, 3, 4),
    ]
    answer = recommend(trials, scenario=SCENARIO)
    assert [other.undecided for other in answer.references] == [is_undecided]
    said = " ".join(gain_sentences(answer))
    assert ("No batching misses the SLO." in said) == (not is_undecided)
