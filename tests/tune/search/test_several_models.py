"""A sweep of several models finds what tuning each alone does not, gives way to what confirmation runs refute, resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from batchtune.archive.run import read_trials
from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import (
    InconclusiveError,
    MeasurementInvalidError,
    NoFeasibleConfigurationError,
    ScenarioError,
    TargetError,
)
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.evidence.bracket import FRESH, BracketRun, runs_of
from batchtune.tune.search.contenders import Contenders
from batchtune.tune.sweep.sweep import OneServer, sweep_nodes
from batchtune.tune.trials.trial import Trial, TrialRequest
from tests.tune.search.pool_simulator import Device, SimulatedBench, simulated_load
from tests.tune.tune_fakes import exactly, remeasured

DEVICE = Device(fixed_s={"ranker": 0.002, "reader": 0.004}, per_row_s={"ranker": 0.0002, "reader": 0.004})
TEXT = """\
name: two
target:
  models:
    - {name: ranker, model: a, rate: 200/s, slo: {p95: 25ms}}
    - {name: reader, model: b, rate: 40/s, slo: {p95: 150ms}}
load: {arrivals: poisson, seed: 3, duration: 2s}
objective: capacity
search: {budget: {trials: 25}, space: {max_batch_size: [1, 4, 16], num_batch_threads: [1, 2]}}
fixed: {batch_timeout_micros: 0, max_enqueued_batches: 100}
"""
SCENARIO = parse_scenario(TEXT)
LATENCY = TEXT.replace("objective: capacity", "objective: latency")


def swept(
    scenario: Scenario,
    *,
    earlier: Sequence[Trial] = (),
    change: Callable[[Trial], Trial] = lambda trial: trial,
) -> list[Trial]:
    bench = SimulatedBench(scenario, DEVICE, change=change)
    bench.elapsed_s = earlier[-1].elapsed_s or 0.0 if earlier else 0.0
    done = sweep_nodes(scenario, lambda _report: OneServer(bench), finished=earlier, now_s=bench.now_s)
    return [one.trial for one in done]


@cache
def unchanged(text: str = TEXT) -> tuple[Trial, ...]:
    """The loads of a sweep of this scenario, made once: they are the same each time."""
    return tuple(swept(parse_scenario(text)))


def run_of(trial: Trial, scenario: Scenario) -> BracketRun:
    (run,) = runs_of([trial], scenario.slo, scenario)
    return run


def with_parts(trial: Trial, change: Callable[[Trial], Trial], **whole: Any) -> Trial:
    """The load, had each model got something else."""
    return replace(trial, parts={name: change(part) for name, part in trial.parts.items()}, **whole)


def late(part: Trial) -> Trial:
    """Its p95 is 9 s."""
    latency_s = {**part.measurement.latency_s, "p95": exactly(9.0)}
    return replace(remeasured(part, latency_s=latency_s), feasible=False)


def client_limited(trial: Trial) -> Trial:
    return with_parts(trial, lambda part: remeasured(part, verdict="INVALID"))


def batching_of(configuration: Configuration, model: str) -> Any:
    return configuration.of_model(model).batching


def test_each_model_has_its_own_axes_and_all_share_the_threads() -> None:
    assert list(SCENARIO.axes) == ["num_batch_threads", "ranker:max_batch_size", "reader:max_batch_size"]
    configuration = SCENARIO.configuration(
        {"num_batch_threads": 2, "ranker:max_batch_size": 16, "reader:max_batch_size": 1}
    )
    ranker, reader = (batching_of(configuration, name) for name in ("ranker", "reader"))
    assert (ranker.max_batch_size, reader.max_batch_size) == (16, 1)
    assert ranker.num_batch_threads == reader.num_batch_threads == 2
    assert ranker.max_enqueued_batches == 100
    assert SCENARIO.limits == {"ranker:p95": 0.025, "reader:p95": 0.15}


EIGHT = TEXT.replace("slo: {p95: 25ms}", "slo: {p95: 25ms}, batching: {max_batch_size: 8}")


def test_a_models_own_space_and_what_it_fixes_stand_before_those_of_all() -> None:
    own = EIGHT.replace("slo: {p95: 150ms}", "slo: {p95: 150ms}, space: {max_batch_size: [1, 2]}")
    scenario = parse_scenario(own)
    axes = {name: axis.values for name, axis in scenario.axes.items()}
    assert axes == {"num_batch_threads": (1, 2), "reader:max_batch_size": (1, 2)}
    ranker = batching_of(scenario.configuration({"num_batch_threads": 1}), "ranker")
    assert ranker.max_batch_size == 8


def test_a_value_that_no_server_takes_names_the_model() -> None:
    own = TEXT.replace("slo: {p95: 150ms}", "slo: {p95: 150ms}, space: {max_batch_size: [0, 2]}")
    with pytest.raises(ScenarioError, match=r"target.models.1.space.max_batch_size"):
        parse_scenario(own)


def test_every_point_has_a_configuration_of_its_own_by_which_it_is_found_again() -> None:
    named, fresh = Contenders(SCENARIO), Contenders(SCENARIO)
    points = named.whole(100)
    assert len(points) == len({contender.configuration for contender in points}) == 18
    again = [fresh.add(contender.configuration, "grid") for contender in points]
    assert [contender.point for contender in again] == [contender.point for contender in points]


def test_best_for_each_alone_is_put_together_once_for_each_number_of_threads() -> None:
    contenders = Contenders(SCENARIO)
    best = {
        "ranker": {"num_batch_threads": 1, "ranker:max_batch_size": 16},
        "reader": {"num_batch_threads": 2, "reader:max_batch_size": 4},
    }
    together = {"ranker:max_batch_size": 16, "reader:max_batch_size": 4}
    assert [contender.point for contender in contenders.put_together(best)] == [
        {"num_batch_threads": threads, **together} for threads in (1, 2)
    ]


def test_defaults_are_the_servers_own_whatever_a_model_has() -> None:
    defaults = Contenders(parse_scenario(EIGHT)).of("defaults")
    assert batching_of(defaults.configuration, "ranker") == BatchingParameters()


def test_it_beats_what_is_best_for_each_alone_where_they_compete_and_says_so() -> None:
    scenario = parse_scenario(TEXT.replace("trials: 25", "trials: 40"))
    trials = swept(scenario)
    chosen = recommend(trials, scenario=scenario)
    assert chosen.capacity.held >= FRESH
    assert batching_of(chosen.configuration, "reader").max_batch_size == 4
    models = {model.name: model for model in chosen.models}
    assert models["reader"].alone.configuration.batching.max_batch_size == 16
    assert all(model.rate_rps < model.alone.rate_rps for model in chosen.models)
    assert chosen.scale == pytest.approx(chosen.capacity.held_rps / 240.0)
    assert models["ranker"].rate_rps == pytest.approx(200.0 * chosen.scale)
    together = [other.capacity for other in chosen.contenders if "alone" in other.names]
    assert together
    assert all(other is None or other.held_rps < chosen.capacity.held_rps for other in together)
    assert {"no_batching", "present"} <= {reference.name for reference in chosen.references}
    assert set(chosen.latency_s) >= set(scenario.limits) == {promise.name for promise in chosen.promises}


@pytest.mark.slow
def test_the_same_answers_make_the_same_asks_so_that_an_interrupted_sweep_goes_on() -> None:
    whole = unchanged()
    rest = swept(SCENARIO, earlier=whole[:5])
    assert [trial.request for trial in rest] == [trial.request for trial in whole[5:]]
    assert rest[0].number == whole[5].number == whole[4].last_number + 1


@pytest.mark.slow
def test_what_only_the_search_saw_hold_gives_way_to_what_fresh_runs_hold() -> None:
    most = 0.85 * recommend(unchanged(), scenario=SCENARIO).scale

    def unlucky(trial: Trial) -> Trial:
        """Every confirmation run above that scale breaks."""
        is_lucky = trial.source != "confirm" or trial.request.scale <= most
        return trial if is_lucky else with_parts(trial, late)

    trials = swept(SCENARIO, change=unlucky)
    fresh = [trial.request.scale for trial in trials if trial.source == "confirm"]
    assert fresh[2] < fresh[0]
    chosen = recommend(trials, scenario=SCENARIO)
    assert chosen.scale <= most or not chosen.established


def test_a_latency_is_the_room_that_the_tightest_limit_leaves() -> None:
    scenario = parse_scenario(LATENCY)
    trials = unchanged(LATENCY)
    assert {trial.request.scale for trial in trials} == {1.0}
    chosen = recommend(trials, scenario=scenario)
    assert chosen.scale == 1.0

    def share(one: Any) -> float:
        return max(one.latency_s[name].value / limit for name, limit in scenario.limits.items())

    assert chosen.of_limit.value == share(chosen)
    limited = [other for other in chosen.contenders if other.keeps and other.fresh >= FRESH]
    assert all(chosen.of_limit.value <= 1.1 * share(other) for other in limited)


def test_slos_that_are_never_kept_together_are_told_as_such() -> None:
    scenario = parse_scenario(LATENCY.replace("p95: 25ms", "p95: 1ms"))
    with pytest.raises(NoFeasibleConfigurationError, match=r"ranker:p95 ≤ 1 ms, .*[ (]ranker:p95 "):
        recommend(swept(scenario), scenario=scenario)


def test_loads_that_the_client_limited_break_no_slo() -> None:
    with pytest.raises(MeasurementInvalidError, match="the client was the limit"):
        recommend([*map(client_limited, unchanged())], scenario=SCENARIO)


def test_fresh_runs_that_the_client_limited_refute_nothing() -> None:
    trials = [client_limited(trial) if trial.source == "confirm" else trial for trial in unchanged(LATENCY)]
    chosen = recommend(trials, scenario=parse_scenario(LATENCY))
    assert (chosen.confirmations, chosen.established) == (0, False)


def test_no_load_of_all_models_is_no_answer() -> None:
    alone = [trial for trial in unchanged() if trial.request.models]
    with pytest.raises(InconclusiveError, match="no trial is finished"):
        recommend(alone, scenario=SCENARIO)


def test_a_server_that_never_works_ends_the_sweep() -> None:
    def fail(trial: Trial) -> Trial:
        dead: dict[str, Any] = {"state": "failed", "failure": "it died", "feasible": False}
        return with_parts(trial, lambda part: replace(part, **dead), **dead)

    with pytest.raises(TargetError, match="3 trials in a row failed; the last: it died"):
        swept(parse_scenario(TEXT), change=fail)


def test_a_configuration_that_leads_by_luck_gives_way_once_it_was_measured_again() -> None:
    point = {"num_batch_threads": 1, "ranker:max_batch_size": 4, "reader:max_batch_size": 4}
    lucky = SCENARIO.configuration(point)
    helped_loads: list[int] = []

    def helped(trial: Trial) -> Trial:
        """The first two loads of it hold whatever they are sent."""
        asked = trial.request
        if asked.configuration != lucky or asked.source == "confirm" or asked.models or len(helped_loads) > 1:
            return trial
        helped_loads.append(trial.number)
        return with_parts(trial, swift)

    def swift(part: Trial) -> Trial:
        answered, p95 = exactly(part.request.rate_rps or 0.0), {"p95": exactly(0.002)}
        return remeasured(part, error_ratio=0.0, latency_s=p95, throughput_rps=answered)

    trials = swept(SCENARIO, change=helped)
    chosen = recommend(trials, scenario=SCENARIO)
    assert lucky in {trial.configuration for trial in trials if trial.source == "confirm"}
    assert chosen.configuration != lucky
    assert chosen.confirmations >= FRESH


@pytest.mark.parametrize(
    ("p95_s", "answered", "verdict", "held", "far"),
    [
        (0.024, 1.0, None, True, False),
        (0.026, 1.0, None, False, False),
        (0.050, 1.0, None, False, True),
        (0.050, 1.0, "NOISY", False, False),
        (0.010, 0.90, None, False, False),
        (0.010, 0.70, None, False, True),
    ],
)
def test_a_load_holds_misses_or_misses_by_far(
    p95_s: float, answered: float, verdict: Any, held: bool, far: bool
) -> None:
    asked = TrialRequest(configuration=Configuration(batching=None), source="sampler", reason="")

    def measured(part: Trial) -> Trial:
        value, share = (p95_s, answered) if part.model == "ranker" else (0.01, 1.0)
        figures = {"latency_s": {"p95": exactly(value)}, "throughput_rps": exactly(1000.0 * share)}
        loaded = remeasured(part, window_s=1000.0, error_ratio=0.0, verdict=verdict, **figures)
        broken = {"p95": value / SCENARIO.limits[f"{part.model}:p95"] - 1.0}
        return replace(loaded, request=replace(part.request, rate_rps=1000.0), constraints=broken)

    run = run_of(with_parts(simulated_load(SCENARIO, DEVICE, asked, duration_s=0.2), measured), SCENARIO)
    assert (run.held, run.far, run.rate_rps) == (held, far, 240.0)


def lines_of_before(trial: Trial, number: int, kind: str = "") -> list[dict[str, Any]]:
    """The lines of trials.jsonl that a load had in runs of before: one for each model, with its company."""
    of = next(iter(trial.request.models), "") or ("ranker" if kind == "flood" else "")
    kind = kind or ("alone" if trial.request.models else "together")
    company = {"load": number, "kind": kind, "factor": trial.request.scale, "of": of}
    several = ("scale", "models", "model", "parts", "server")
    configuration = trial.to_dict()["configuration"]
    return [
        {key: value for key, value in part.to_dict().items() if key not in several}
        | {"company": {"model": name, **company}, "reason": name, "configuration": configuration}
        for name, part in trial.parts.items()
    ]


def read_again(folder: Path, lines: list[dict[str, Any]]) -> list[Trial]:
    ledger = folder / "trials.jsonl"
    ledger.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_trials(ledger)[0]


def test_loads_of_runs_of_before_are_put_together_again_and_answered_from(tmp_path: Path) -> None:
    whole = [trial for trial in unchanged() if trial.source != "probe"]
    assert {trial.request.models for trial in whole} == {(), ("ranker",), ("reader",)}
    lines = [line for number, trial in enumerate(whole, 1) for line in lines_of_before(trial, number)]
    again = read_again(tmp_path, lines)
    asked = attrgetter("configuration", "request.scale", "request.models")
    assert [*map(asked, again)] == [*map(asked, whole)]
    assert [run_of(load, SCENARIO) for load in again] == [run_of(trial, SCENARIO) for trial in whole]
    before, now = recommend(again, scenario=SCENARIO), recommend(whole, scenario=SCENARIO)
    answer = attrgetter("configuration", "capacity", "models")
    assert answer(before) == answer(now)


def test_a_load_survives_json(tmp_path: Path) -> None:
    whole = list(unchanged()[:5])
    assert read_again(tmp_path, [trial.to_dict() for trial in whole]) == whole


def test_a_load_that_was_killed_before_its_last_trial_was_kept_is_none(tmp_path: Path) -> None:
    *whole, last = (trial for trial in unchanged()[30:] if not trial.request.models)
    lines = [line for number, trial in enumerate(whole, 1) for line in lines_of_before(trial, number)]
    again = read_again(tmp_path, [*lines, lines_of_before(last, 99)[0]])
    assert [trial.number for trial in again] == [trial.number for trial in whole]


def test_floods_of_runs_of_before_are_passed_over(tmp_path: Path) -> None:
    trial = unchanged()[-1]
    lines = [*lines_of_before(trial, 1), *lines_of_before(trial, 2, kind="flood")]
    again = read_again(tmp_path, lines)
    assert [(load.source, load.reason) for load in again[1:]] == [("load", "flood of ranker")]
