"""The joint search asks what pays, gives way to what confirmation runs refute, and finds what tuning each alone does not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchtune.archive.run import read_trials
from batchtune.batching.parameters import Configuration
from batchtune.errors import (
    InconclusiveError,
    MeasurementInvalidError,
    NoFeasibleConfigurationError,
    ScenarioError,
    TargetError,
)
from batchtune.measure.quantiles import Estimate
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.bracket import FRESH
from batchtune.tune.joint.answer import recommend_joint
from batchtune.tune.joint.search import contenders
from batchtune.tune.joint.space import Indices, JointLoad, JointSpace, loads_of, side_by_side
from batchtune.tune.sweep.sweep import run_sweep
from batchtune.tune.trials.trial import Trial, TrialRequest, is_feasible
from tests.tune.joint.pool_simulator import Device, SimulatedBench, simulated_load

DEVICE = Device(fixed_s={"ranker": 0.002, "reader": 0.004}, per_row_s={"ranker": 0.0002, "reader": 0.004})
TEXT = """\
name: two
target:
  models:
    - {name: ranker, model: a, rate: 200/s, slo: {p95: 25ms}}
    - {name: reader, model: b, rate: 40/s, slo: {p95: 150ms}}
load: {arrivals: poisson, seed: 3}
objective: capacity
search: {budget: {trials: 40}, space: {max_batch_size: [1, 4, 16], num_batch_threads: [1, 2]}}
fixed: {batch_timeout_micros: 0, max_enqueued_batches: 100}
"""


def swept(
    scenario: Scenario,
    *,
    earlier: list[JointLoad] | None = None,
    change: Callable[[JointLoad], JointLoad] = lambda load: load,
) -> list[JointLoad]:
    bench = SimulatedBench(scenario, DEVICE, duration_s=2.0, change=change)
    finished = [load.trial for load in earlier or []]
    done = run_sweep(scenario, bench, finished=finished, now_s=bench.now_s)
    return loads_of(finished_trial.trial for finished_trial in done)


def with_parts(load: JointLoad, change: Callable[[Trial], Trial], **whole: Any) -> JointLoad:
    """The load, had each model got something else."""
    parts = {name: change(part) for name, part in load.trials.items()}
    return JointLoad(replace(load.trial, parts=parts, **whole))


def test_each_model_has_its_own_axes_and_all_share_the_threads() -> None:
    space = JointSpace(parse_scenario(TEXT))
    assert [(axis.model, axis.knob) for axis in space.axes] == [
        ("", "num_batch_threads"),
        ("ranker", "max_batch_size"),
        ("reader", "max_batch_size"),
    ]
    configuration = space.configuration((1, 2, 0))
    ranker, reader = (configuration.of_model(name).batching for name in ("ranker", "reader"))
    assert ranker is not None
    assert reader is not None
    assert (ranker.max_batch_size, reader.max_batch_size) == (16, 1)
    assert ranker.num_batch_threads == reader.num_batch_threads == 2
    assert ranker.max_enqueued_batches == 100
    assert space.size == 18
    assert len({space.configuration(point) for point in itertools.product(*map(range, space.shape))}) == 18


def test_a_models_own_space_and_what_it_fixes_stand_before_those_of_all() -> None:
    own = TEXT.replace("slo: {p95: 150ms}", "slo: {p95: 150ms}, space: {max_batch_size: [1, 2]}").replace(
        "slo: {p95: 25ms}", "slo: {p95: 25ms}, batching: {max_batch_size: 8}"
    )
    space = JointSpace(parse_scenario(own))
    assert [(axis.model, axis.values) for axis in space.axes] == [("", (1, 2)), ("reader", (1, 2))]
    ranker = space.configuration((0, 1)).of_model("ranker").batching
    assert ranker is not None
    assert ranker.max_batch_size == 8


def test_what_is_best_for_each_alone_is_put_together_only_where_all_batch() -> None:
    space = JointSpace(parse_scenario(TEXT))
    best = {name: space.configuration((1, 2, 0)) for name in ("ranker", "reader")}
    assert side_by_side(best) == [best["ranker"]]
    assert side_by_side({**best, "reader": replace(best["reader"], batching=None, models=())}) == []


def test_a_value_that_no_server_takes_names_the_model() -> None:
    with pytest.raises(
        ScenarioError, match="reader: max_batch_size: input_batch_size_limit must be positive"
    ):
        JointSpace(
            parse_scenario(
                TEXT.replace("slo: {p95: 150ms}", "slo: {p95: 150ms}, space: {max_batch_size: [0, 2]}")
            )
        )


def test_it_beats_what_is_best_for_each_alone_where_they_compete_and_says_so() -> None:
    scenario = parse_scenario(TEXT)
    loads = swept(scenario)
    chosen = recommend_joint(loads, scenario)
    assert chosen.held >= FRESH
    assert (chosen.fresh, chosen.held) == (3, 3) or chosen.held > chosen.fresh // 2
    reader = chosen.configuration.of_model("reader").batching
    assert reader is not None
    alone = {share.name: share.alone for share in chosen.models}
    best_alone = alone["reader"]
    assert best_alone is not None
    assert best_alone.configuration.batching is not None
    assert best_alone.configuration.batching.max_batch_size == 16
    assert reader.max_batch_size is not None
    assert reader.max_batch_size < 16
    assert all(share.alone and share.rate_rps < share.alone.rate_rps for share in chosen.models)
    (rival, *_) = chosen.rivals
    assert rival.kept is False
    assert rival.factor is None or rival.factor < chosen.factor


def test_the_same_answers_make_the_same_asks_so_that_an_interrupted_sweep_goes_on() -> None:
    scenario = parse_scenario(TEXT)
    whole = swept(scenario)
    rest = swept(scenario, earlier=whole[:20])
    assert [load.asked for load in rest] == [load.asked for load in whole[20:]]
    assert rest[0].trial.number == whole[20].trial.number == whole[19].trial.last_number + 1


def test_what_only_the_search_saw_hold_gives_way_to_what_fresh_runs_hold() -> None:
    scenario = parse_scenario(TEXT)

    def lucky(load: JointLoad) -> JointLoad:
        """Every confirmation run above ×0.5 breaks."""
        if load.asked.source != "confirm" or load.asked.scale <= 0.5:
            return load
        return with_parts(load, lambda part: replace(part, feasible=False))

    loads = swept(scenario, change=lucky)
    refuted = [load for load in loads if load.asked.source == "confirm" and not load.alone]
    assert refuted[1].asked.scale < refuted[0].asked.scale
    chosen = recommend_joint(loads, scenario)
    assert not chosen.established or chosen.factor <= 0.5


def test_a_latency_is_the_room_that_the_tightest_limit_leaves() -> None:
    scenario = parse_scenario(TEXT.replace("objective: capacity", "objective: latency"))
    loads = swept(scenario)
    assert {load.asked.scale for load in loads} == {1.0}
    ranked = contenders(loads, "latency")
    assert ranked[0].score == max(standing.score for standing in ranked)
    assert recommend_joint(loads, scenario).factor == 1.0


def test_slos_that_are_never_kept_together_are_told_as_such() -> None:
    scenario = parse_scenario(TEXT.replace("p95: 25ms", "p95: 1ms"))
    with pytest.raises(NoFeasibleConfigurationError, match="never met their SLOs together"):
        recommend_joint(swept(scenario), scenario)


def client_limited(load: JointLoad) -> JointLoad:
    def invalid(part: Trial) -> Trial:
        assert part.measurement is not None
        return replace(part, measurement=replace(part.measurement, verdict="INVALID"))

    return with_parts(load, invalid)


def answering(load: JointLoad, share: float) -> JointLoad:
    """One model answers so many of many requests."""
    trial = load.trials["ranker"]
    assert trial.measurement is not None
    rate = Estimate(value=share * 1000.0, low=share * 1000.0, high=share * 1000.0)
    slow = replace(trial.measurement, offered_rps=1000.0, window_s=1000.0, throughput_rps=rate)
    return with_parts(load, lambda part: replace(part, measurement=slow) if part is trial else part)


def test_loads_that_the_client_limited_break_no_slo() -> None:
    scenario = parse_scenario(TEXT)
    loads = [client_limited(load) for load in swept(scenario)]
    with pytest.raises(MeasurementInvalidError, match="the client was the limit"):
        recommend_joint(loads, scenario)


def test_fresh_runs_that_the_client_limited_refute_nothing() -> None:
    scenario = parse_scenario(TEXT.replace("objective: capacity", "objective: latency"))
    loads = [client_limited(load) if load.asked.source == "confirm" else load for load in swept(scenario)]
    chosen = recommend_joint(loads, scenario)
    assert (chosen.fresh, chosen.held, chosen.established) == (0, 0, False)


def test_what_held_once_and_then_no_more_is_told_as_such() -> None:
    scenario = parse_scenario(TEXT.replace("objective: capacity", "objective: latency"))
    loads = swept(scenario)
    (first, *_) = [load for load in loads if not load.alone and load.holds]
    request = replace(first.asked, source="confirm", block=1)
    again = with_parts(first, lambda part: replace(part, feasible=False), request=request)
    with pytest.raises(NoFeasibleConfigurationError, match="at 1 times the stated rates, but not in most"):
        recommend_joint([first, again], scenario)


def test_what_was_measured_is_of_the_runs_that_count() -> None:
    scenario = parse_scenario(TEXT)
    loads = swept(scenario)
    chosen = recommend_joint(loads, scenario)
    (first, *_) = [
        load
        for load in loads
        if (load.alone, load.asked.source) == ("", "confirm")
        and (load.asked.configuration, load.asked.scale) == (chosen.configuration, chosen.factor)
    ]

    def slow(trial: Trial) -> Trial:
        assert trial.measurement is not None
        p95 = Estimate(value=9.0, low=9.0, high=9.0)
        return replace(trial, measurement=replace(trial.measurement, latency_s={"p95": p95}))

    late = client_limited(with_parts(first, slow))
    again = recommend_joint([*loads, *[late] * 9], scenario)
    assert (again.factor, again.models) == (chosen.factor, chosen.models)


def test_no_load_of_all_models_is_no_answer() -> None:
    scenario = parse_scenario(TEXT)
    alone = [load for load in swept(scenario) if load.alone]
    with pytest.raises(InconclusiveError, match="nothing was measured with all models loaded"):
        recommend_joint(alone, scenario)


def test_a_server_that_never_works_ends_the_sweep() -> None:
    def fail(load: JointLoad) -> JointLoad:
        return with_parts(
            load,
            lambda part: replace(part, state="failed", failure="it died", feasible=False),
            state="failed",
            failure="it died",
        )

    with pytest.raises(TargetError, match="3 trials in a row failed; the last: it died"):
        swept(parse_scenario(TEXT), change=fail)


def lines_of_before(load: JointLoad, number: int, kind: str = "") -> list[dict[str, Any]]:
    """The lines of trials.jsonl that a load had in runs of before: one for each model, with its company."""
    of = load.alone or ("ranker" if kind == "flood" else "")
    kind = kind or ("alone" if load.alone else "together")
    company = {"load": number, "kind": kind, "factor": load.asked.scale, "of": of}
    several = ("scale", "models", "model", "parts", "server")
    return [
        {key: value for key, value in part.to_dict().items() if key not in several}
        | {"company": {"model": name, **company}, "reason": name}
        for name, part in load.trials.items()
    ]


def read_again(folder: Path, lines: list[dict[str, Any]]) -> list[JointLoad]:
    ledger = folder / "trials.jsonl"
    ledger.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return loads_of(read_trials(ledger)[0])


def test_loads_of_runs_of_before_are_put_together_again(tmp_path: Path) -> None:
    whole = swept(parse_scenario(TEXT))[:30]
    assert {load.alone for load in whole} == {"", "ranker", "reader"}
    lines = [line for number, load in enumerate(whole, 1) for line in lines_of_before(load, number)]
    again = read_again(tmp_path, lines)
    assert [load.asked for load in again] == [load.asked for load in whole]
    assert [load.run for load in again] == [load.run for load in whole]
    assert [[part.number for part in load.trials.values()] for load in again] == [
        [part.number for part in load.trials.values()] for load in whole
    ]


def test_a_load_survives_json(tmp_path: Path) -> None:
    whole = swept(parse_scenario(TEXT))[:5]
    assert read_again(tmp_path, [load.trial.to_dict() for load in whole]) == whole


def test_a_load_that_was_killed_before_its_last_trial_was_kept_is_none(tmp_path: Path) -> None:
    *whole, last = (load for load in swept(parse_scenario(TEXT)) if not load.alone)
    lines = [line for number, load in enumerate(whole, 1) for line in lines_of_before(load, number)]
    again = read_again(tmp_path, [*lines, lines_of_before(last, 99)[0]])
    assert [load.asked for load in again] == [load.asked for load in whole]


def test_floods_of_runs_of_before_are_passed_over(tmp_path: Path) -> None:
    load = swept(parse_scenario(TEXT))[-1]
    lines = [*lines_of_before(load, 1), *lines_of_before(load, 2, kind="flood")]
    assert [again.asked for again in read_again(tmp_path, lines)] == [load.asked]
    (_, flood), _ = read_trials(tmp_path / "trials.jsonl")
    assert (flood.source, flood.reason) == ("load", "flood of ranker")


def test_best_for_each_alone_is_put_together_once_for_each_number_of_threads() -> None:
    space = JointSpace(parse_scenario(TEXT))
    ranker, reader = space.configuration((0, 2, 0)), space.configuration((1, 0, 1))
    together = side_by_side({"ranker": ranker, "reader": reader})
    assert together == [space.configuration((0, 2, 1)), space.configuration((1, 2, 1))]


def test_a_configuration_that_leads_by_luck_gives_way_once_it_was_measured_again() -> None:
    scenario = parse_scenario(TEXT)
    lucky = JointSpace(scenario).configuration((1, 0, 0))

    def helped(load: JointLoad) -> JointLoad:
        asked = load.asked
        if asked.configuration != lucky or asked.source == "confirm" or load.alone:
            return load
        easy = replace(asked, scale=asked.scale / 4.0)
        truly = simulated_load(scenario, DEVICE, easy, number=load.trial.number, duration_s=2.0)
        return JointLoad(replace(truly.trial, request=asked))

    loads = swept(scenario, change=helped)
    fresh = [load.asked.configuration for load in loads if load.asked.source == "confirm"]
    chosen = recommend_joint(loads, scenario)
    assert lucky in fresh
    assert chosen.configuration != lucky
    assert chosen.held >= FRESH


def test_points_near_one_are_a_step_two_steps_or_a_step_of_each_of_two_parameters_away() -> None:
    space = JointSpace(parse_scenario(TEXT))
    single, double, pairs = space.around((0, 1, 1), (0, 1, 2))
    assert sorted(single) == [(0, 0, 1), (0, 1, 0), (0, 1, 2), (0, 2, 1), (1, 1, 1)]
    assert double == []
    assert len(pairs) == 8
    assert all(sum(here != there for here, there in zip(pair, (0, 1, 1), strict=True)) == 2 for pair in pairs)
    assert list(space.around((0, 0, 0), (1,)))[:2] == [[(0, 1, 0)], [(0, 2, 0)]]


def test_a_configuration_of_an_earlier_sweep_is_located_in_the_space() -> None:
    scenario = parse_scenario(TEXT)
    named = JointSpace(scenario)
    points = [point for point in itertools.product(*map(range, named.shape)) if sum(point) % 3 == 0]
    fresh = JointSpace(scenario)
    assert [fresh.locate(named.configuration(point)) for point in points] == points
    assert fresh.locate(Configuration(batching=None)) is None


ANSWER = (0, 1, 1)
"""Of the space of TEXT."""


def load_at(point: Indices, factor: float, tightness: float, *, fresh: bool = False) -> JointLoad:
    """A load that used so much of each limit."""
    scenario = parse_scenario(TEXT)
    request = TrialRequest(
        configuration=JointSpace(scenario).configuration(point),
        source="confirm" if fresh else "sampler",
        reason="",
        scale=factor,
    )
    broken = {"p95": tightness - 1.0}

    def used(part: Trial) -> Trial:
        assert part.measurement is not None
        measured = replace(part.measurement, requests=1000)
        return replace(part, constraints=broken, feasible=is_feasible(broken), measurement=measured)

    return with_parts(simulated_load(scenario, DEVICE, request, duration_s=0.2), used)


BESIDE = [
    load_at(point, 1.09, 5.0) for point in next(JointSpace(parse_scenario(TEXT)).around(ANSWER, (0, 1, 2)))
]
HELD = [load_at(ANSWER, 1.0, 0.9, fresh=True)] * 3
MISSED = [load_at(ANSWER, 1.12, 1.1)] * 2


@pytest.mark.parametrize(
    ("loads", "open_questions"),
    [
        ([*HELD, *MISSED, *BESIDE], []),
        ([*HELD[:2], *MISSED, *BESIDE], ["unconfirmed", "wide", "rivals"]),
        ([*HELD, *BESIDE], ["wide"]),
        ([*HELD, MISSED[0], *BESIDE], ["wide"]),
        ([*HELD, load_at(ANSWER, 1.12, 2.5), *BESIDE], []),
        ([*HELD, *MISSED, *BESIDE[1:]], ["rivals"]),
        ([*HELD, *MISSED, *BESIDE[1:], load_at((1, 1, 1), 1.09, 1.1)], ["rivals"]),
        ([*HELD, *MISSED, *BESIDE[1:], *[load_at((1, 1, 1), 1.09, 1.1)] * 2], []),
        ([*HELD, *MISSED, *BESIDE, *[load_at((1, 2, 2), 0.9, 0.5)] * 2], ["rivals"]),
    ],
    ids=[
        "three fresh loads held, two missed, no neighbour is better",
        "two fresh loads",
        "nothing missed",
        "one near miss",
        "one far miss",
        "a neighbour untried",
        "a neighbour missed once, by little",
        "a neighbour missed twice",
        "what held less may hold more",
    ],
)
def test_an_answer_is_established_where_nothing_is_open(
    loads: list[JointLoad], open_questions: list[str]
) -> None:
    chosen = recommend_joint(loads, parse_scenario(TEXT))
    assert [question.code for question in chosen.open_questions] == open_questions
    assert chosen.factor == (0.9 if "unconfirmed" in open_questions else 1.0)
    assert chosen.established == (not open_questions)


@pytest.mark.parametrize(
    ("load", "held", "far"),
    [
        (load_at(ANSWER, 1.0, 0.99), True, False),
        (load_at(ANSWER, 1.0, 1.01), False, False),
        (load_at(ANSWER, 1.0, 2.0), False, True),
        (client_limited(load_at(ANSWER, 1.0, 2.0)), False, False),
        (answering(load_at(ANSWER, 1.0, 0.5), 0.9), False, False),
        (answering(load_at(ANSWER, 1.0, 0.5), 0.7), False, True),
    ],
)
def test_a_load_holds_misses_or_misses_by_far(load: JointLoad, held: bool, far: bool) -> None:
    assert (load.run.held, load.run.far) == (held, far)
