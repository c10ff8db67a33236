"""Every command reads one capacity of a configuration under an SLO: that of its bracket, never less for a looser SLO."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchtune.errors import (
    BatchtuneError,
    InconclusiveError,
    MeasurementInvalidError,
    NoFeasibleConfigurationError,
)
from batchtune.measure.caveats import caveat
from batchtune.measure.quantiles import Estimate
from batchtune.report.answer_words import (
    confidence_sentence,
    figures_sentence,
    gain_parts,
    promise_sentence,
    unconfirmed_text,
    why_sentence,
)
from batchtune.report.findings import text_of
from batchtune.report.words import bottleneck_sentence
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.answer.reason import padding_note
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Capacity, Recommendation, capacity_of
from batchtune.tune.evidence.bracket import UNCONFIRMED
from batchtune.tune.trials.trial import Trial
from batchtune.units import percentage, rounded
from tests.tune.answer.ledgers import BATCH_8, BATCH_14, STREAMED, streamed_ledger
from tests.tune.tune_fakes import asked, capacity_scenario, exactly, planted, remeasured, scenario_of

SCENARIO = capacity_scenario()
SMALL: dict[str, Any] = {"max_batch_size": 8, "num_batch_threads": 1}
LARGE: dict[str, Any] = {"max_batch_size": 32, "num_batch_threads": 1}


def at_rate(
    number: int,
    rate_rps: float,
    p95_ms: float,
    *,
    batching: dict[str, Any] | None = SMALL,
    source: str = "neighbour",
    **measured: Any,
) -> Trial:
    """A run at this rate that answered all of it."""
    figures = {"throughput": rate_rps, "p95_s": p95_ms / 1e3, **measured}
    trial = planted(number, batching=batching, source=source, **figures)
    return replace(asked(trial, rate_rps=rate_rps), rate_rps=rate_rps, concurrency=None)


def fresh(rate_rps: float, p95_ms: float, *numbers: int, **measured: Any) -> list[Trial]:
    """Confirmation runs."""
    return [at_rate(number, rate_rps, p95_ms, source="confirm", **measured) for number in numbers]


def loop(number: int, clients: int, answered_rps: float, p95_ms: float) -> Trial:
    figures = {"throughput": answered_rps, "p95_s": p95_ms / 1e3}
    trial = planted(number, batching=SMALL, source="calibration", **figures)
    return replace(asked(trial, concurrency=clients), concurrency=clients)


def lone(p95_ms: float) -> Trial:
    trial = planted(1, throughput=50.0, p95_s=p95_ms / 1e3, batching=None, source="probe")
    return asked(trial, concurrency=1)


def known(trials: Sequence[Trial], slo: SloSpec | None = None) -> Capacity:
    return capacity_of(trials[0].configuration, trials, scenario=SCENARIO, slo=slo)


def round_trip(answer: Recommendation) -> dict[str, Any]:
    """Its JSON, which is read again as it was."""
    plain = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    again = Recommendation.from_dict(plain)
    assert again == answer or repr(again) == repr(answer)  # what is not known is no number
    return plain


def test_fresh_runs_that_held_are_stated_with_the_lowest_rate_that_two_runs_missed() -> None:
    found = known([at_rate(1, 1300.0, 30.0), at_rate(2, 1300.0, 30.0), *fresh(1000.0, 12.0, 3, 4, 5)])
    assert (found.held_rps, found.missed_rps, found.held, found.missed) == (1000.0, 1300.0, 3, 0)
    assert (found.confirmed, found.by_loops) == (True, False)


def test_where_each_rate_was_missed_as_often_as_met_the_share_is_of_the_lowest_rate_missed() -> None:
    """And an end that a run met is disputed, and runs that missed are not called none made: a sweep of MLServer."""
    rates = [(69.9, 90.0), (58.0, 90.0), (53.5, 18.0), (58.0, 90.0)]
    runs = [at_rate(number, rate, p95_ms) for number, (rate, p95_ms) in enumerate(rates, 1)]
    runs += [*fresh(50.3, 90.0, 5), *fresh(47.8, 90.0, 6)]
    found = known(runs)
    assert (found.search_rps, found.disputed_rps, found.missed_rps) == (None, 47.8, 53.5)
    assert (found.is_disputed_end, found.is_bound) == (True, True)
    steady = known([at_rate(1, 500.0, 5.0), at_rate(2, 800.0, 30.0), at_rate(3, 800.0, 30.0)])
    assert (steady.search_rps, steady.disputed_rps, steady.is_disputed_end) == (500.0, None, False)
    text = confidence_sentence(recommend(runs, scenario=SCENARIO))
    assert "both confirmation runs missed the SLO, at 47.8/s or more" in text
    assert "was made" not in text


def test_the_recommendation_states_the_same_for_each_contender_and_slo() -> None:
    large = [at_rate(1, 2000.0, 12.0, batching=LARGE), at_rate(2, 2600.0, 40.0, batching=LARGE)]
    large += fresh(1800.0, 10.0, 3, 4, 5, batching=LARGE)
    trials = [*large, at_rate(6, 1000.0, 8.0), at_rate(7, 1500.0, 50.0), at_rate(8, 1500.0, 50.0)]
    for p95 in ("9ms", "11ms", "20ms", "60ms"):
        slo = SloSpec.model_validate({"p95": p95})
        answer = recommend(trials, scenario=SCENARIO, slo=slo)
        told = [(answer.configuration, answer.capacity)]
        told += [(other.configuration, other.capacity) for other in (*answer.contenders, *answer.references)]
        assert len(told) == 2
        for configuration, capacity in told:
            assert capacity == capacity_of(configuration, trials, scenario=SCENARIO, slo=slo)


def test_parameters_left_to_the_server_are_those_that_it_has() -> None:
    spelt = {**SMALL, "batch_timeout_micros": 0, "max_enqueued_batches": 10}
    trials = [at_rate(1, 500.0, 5.0), at_rate(2, 800.0, 5.0, batching=spelt)]
    assert known(trials).held_rps == pytest.approx(UNCONFIRMED * 800.0)
    assert known([trials[0], at_rate(2, 800.0, 5.0, batching=LARGE)]).held_rps == UNCONFIRMED * 500.0


def test_what_only_missed_has_the_rate_that_it_missed_and_no_run_says_nothing() -> None:
    found = known([at_rate(1, 500.0, 30.0), at_rate(2, 500.0, 30.0)])
    assert (found.held_rps, found.missed_rps, found.missed) == (0.0, 500.0, 2)
    assert capacity_of(at_rate(1, 1.0, 1.0).configuration, [], scenario=SCENARIO) is None
    assert known([asked(loop(1, 1, 100.0, 5.0), source="probe")]) is None


def test_closed_loops_alone_are_told_as_such_and_believed_as_far_as_no_rate_missed() -> None:
    kept = loop(1, 16, 1000.0, 15.0)
    alone = known([kept])
    assert (alone.by_loops, alone.confirmed) == (True, False)
    assert 0.0 < alone.held_rps < 1000.0
    assert known([kept, at_rate(2, 400.0, 30.0)]).held_rps < 400.0


def test_rates_of_load_tests_count() -> None:
    tested = [at_rate(1, 400.0, 10.0, source="load"), at_rate(2, 900.0, 90.0, source="load")]
    assert known(tested).held_rps == UNCONFIRMED * 400.0


RUNS = st.lists(
    st.tuples(
        st.floats(min_value=10.0, max_value=1000.0),
        st.floats(min_value=1.0, max_value=100.0),
        st.sampled_from(["open", "fresh", "loop"]),
    ),
    min_size=1,
    max_size=12,
)


@given(RUNS, st.floats(min_value=1.0, max_value=100.0), st.floats(min_value=1.0, max_value=100.0))
@example([(34.0, 1.0, "loop"), (36.0, 2.0, "open"), (35.0625, 3.0, "open")], 1.0, 2.0)
@example([(11.0, 1.0, "loop"), (11.0, 2.0, "open"), (11.0, 3.0, "open")], 1.0, 2.0)
@settings(max_examples=300, deadline=None)
def test_a_looser_slo_never_gives_less(
    runs: list[tuple[float, float, str]], one_ms: float, other_ms: float
) -> None:
    trials = [
        loop(number, 16, rate, p95_ms)
        if kind == "loop"
        else at_rate(number, rate, p95_ms, source="confirm" if kind == "fresh" else "neighbour")
        for number, (rate, p95_ms, kind) in enumerate(runs, 1)
    ]
    strict, loose = (
        getattr(known(trials, SloSpec.model_validate({"p95": f"{limit}ms"})), "held_rps", 0.0)
        for limit in sorted((one_ms, other_ms))
    )
    assert strict <= loose


def test_figures_of_a_failed_measurement_state_nothing() -> None:
    found = known([at_rate(1, 500.0, 5.0, throughput_rps=exactly(float("nan")))])
    assert (found.held_rps, found.missed_rps) == (0.0, 500.0)


def test_a_confirmation_run_that_missed_the_rate_of_those_that_held_it_is_counted() -> None:
    trials = [at_rate(1, 154.0, 10.0), *fresh(153.0, 10.0, 2, 3), *fresh(153.0, 30.0, 4)]
    answer = recommend(trials, scenario=SCENARIO)
    said = answer.capacity
    assert (said.held, said.missed, said.search_rps) == (2, 1, 153.0)
    assert said.held_rps == pytest.approx(UNCONFIRMED * 153.0)
    assert [(promise.kept, promise.runs) for promise in answer.promises] == [(2, 3)]


def test_where_every_confirmation_run_missed_a_guess_is_stated_first_with_what_was_measured() -> None:
    trials = [at_rate(1, 120.0, 10.0), at_rate(2, 154.0, 10.0), *fresh(153.0, 30.0, 3, 4, 5)]
    unbatched = [at_rate(number, 60.0, 30.0, batching=None) for number in (6, 7)]
    answer = recommend([*trials, *unbatched], scenario=SCENARIO)
    assert [(promise.kept, promise.runs) for promise in answer.promises] == [(0, 3)]
    assert (answer.capacity.held, answer.capacity.missed, answer.capacity.refuted_rps) == (0, 3, 153.0)
    (first,), others = gain_parts(answer)
    assert first == (
        f"Capacity {rounded(answer.capacity.held_rps)}/s is a guess, "
        f"{percentage(answer.capacity.held_rps / 153.0)} of 153/s: all 3 confirmation runs missed the SLO, at 153/s or "
        "more; runs of the search met it at 120-154/s."
    )
    assert others
    assert all("if that guess holds" in text for text in others)
    assert unconfirmed_text(answer) == " (not confirmed: confirmation runs missed the SLO)"
    confidence = confidence_sentence(answer)
    assert confidence.startswith("not confirmed: all 3 confirmation runs missed the SLO, at 153/s or more")
    assert "may be less than stated, or up to" in confidence


NINETY = [(90.0, 10.0), (110.0, 30.0), (110.0, 30.0)]
"""Rates and p95 in ms of runs of a reference that met 90/s."""


@pytest.mark.parametrize("gained", ["no_batching", "defaults"])
def test_a_gain_is_the_ratio_of_the_rates_that_stand_beside_it(gained: str) -> None:
    reference: dict[str, Any] = {"batching": None} if gained == "no_batching" else {"batching": {}}
    searched = [(560.0, 30.0, {}), (560.0, 30.0, {})]
    searched += [(rate, p95_ms, {**reference, "source": gained}) for rate, p95_ms in NINETY]
    trials = [at_rate(at, rate, p95_ms, **own) for at, (rate, p95_ms, own) in enumerate(searched, 4)]
    answer = recommend([*fresh(488.0, 10.0, 1, 2, 3), *trials], scenario=SCENARIO)
    (other,) = (one for one in answer.references if gained in one.names)
    ours, theirs = answer.capacity, other.capacity
    assert other.gain.low == pytest.approx(ours.held_rps / theirs.missed_rps)
    assert other.gain.high == pytest.approx(ours.missed_rps / theirs.held_rps)


@pytest.mark.parametrize(("scouts_ms", "met"), [((), "1 of 1 run"), ((10.0, 10.0, 157.0), "3 of 4 runs")])
def test_where_only_short_loads_ran_it_is_said_how_many_of_all_met_the_slo(
    scouts_ms: Sequence[float], met: str
) -> None:
    scouts = [loop(number, 8, 100.0, p95_ms) for number, p95_ms in enumerate(scouts_ms, 2)]
    words = rf"too little was measured: only short loads ran; {met} met the SLO$"
    with pytest.raises(InconclusiveError, match=words):
        recommend([lone(10.0), *scouts], scenario=scenario_of(slo={"p95": "20ms"}))


@pytest.mark.parametrize("scenario", [SCENARIO, scenario_of()])
@pytest.mark.parametrize("loops", [[], [loop(2, 16, 120.0, 250.0), loop(3, 41, 380.0, 157.0)]])
def test_a_limit_that_one_request_alone_misses_is_met_by_no_setting(
    scenario: Scenario, loops: list[Trial]
) -> None:
    with pytest.raises(NoFeasibleConfigurationError) as refused:
        recommend([lone(100.0), *loops], scenario=scenario)
    limit_ms = round(1e3 * scenario.slo.limits()["p95"])
    takes = rf"one request alone takes longer \(p95 100 ms is \d × {limit_ms} ms\), at any setting$"
    assert re.search(takes, refused.value.message)
    assert "lower the load" not in (refused.value.hint or "")


def test_a_configuration_nearer_to_the_limit_than_one_request_alone_is_named_and_a_busy_host() -> None:
    words = "; nearest: max_batch_size=8 num_batch_threads=1, p95 25 ms misses"
    for notes in ((), (caveat("host_busy", foreign_ratio=0.6),)):
        trials = [lone(100.0), *(at_rate(number, 100.0, 25.0, caveats=notes) for number in (2, 3))]
        with pytest.raises(NoFeasibleConfigurationError, match=words) as refused:
            recommend(trials, scenario=SCENARIO)
        assert ("other processes used 60 % of the CPUs" in refused.value.hint) == bool(notes)


def test_a_single_miss_that_does_not_count_is_named() -> None:
    answer = recommend([*fresh(100.0, 10.0, *range(1, 6)), at_rate(6, 140.0, 22.0)], scenario=SCENARIO)
    assert (answer.capacity.missed_rps, answer.capacity.doubtful_rps) == (None, 140.0)
    said = "no rate was missed by most runs; the lowest that a run missed is 140/s"
    assert said in figures_sentence(answer)
    assert f"{said}, so it may serve more" in confidence_sentence(answer)


def test_a_capacity_met_with_a_busy_client_is_called_that_or_more() -> None:
    said = "Or more: a late or busy load generator makes a server look slower, never faster."
    for notes in ((caveat("client_busy", cpu_ratio=0.87),), ()):
        answer = recommend(fresh(100.0, 10.0, 1, 2, 3, caveats=notes), scenario=SCENARIO)
        assert figures_sentence(answer).endswith(said) == bool(notes)


def test_a_rate_that_was_confirmed_is_stated_not_a_guess_above_it() -> None:
    """A stranger's sweep: 8,940/s met in three, 9,900/s missed: 87 % of 10,400/s, met once, was stated in its place."""
    searched = [at_rate(number, 10_400.0, 6.0) for number in (6, 7, 8)]
    runs = [*fresh(10_400.0, 6.6, 1), *fresh(10_400.0, 30.0, 2), *fresh(9_900.0, 30.0, 3)]
    runs += [*fresh(8_940.0, 9.1, 4), *fresh(8_940.0, 5.4, 5)]
    answer = recommend([*searched, *runs], scenario=SCENARIO)
    assert answer.capacity.held_rps == 8_940.0
    assert "Capacity 8,940/s: met in 3 of 5 confirmation runs" in figures_sentence(answer)


def test_what_is_typical_is_so_of_runs_that_met_the_slo() -> None:
    """Three overloaded confirmation runs, whose batches were full, were called typical of one that met the SLO."""

    def server(rows: int) -> ServerActivity:
        return ServerActivity(duration_s=1.0, batches=100, rows=100 * rows, mean_batch_rows=rows)

    runs = [*fresh(100.0, 10.0, 1, server=server(2)), *fresh(100.0, 30.0, 2, 3, 4, server=server(4))]
    answer = recommend([at_rate(5, 120.0, 10.0), *runs], scenario=SCENARIO)
    assert "batches contain 2" in why_sentence(answer)


def test_confirmation_runs_at_higher_rates_are_counted_with_what_they_missed() -> None:
    """Of five, two missed a higher rate: one its latency limit, the other only for want of answers."""
    trials = [*fresh(100.0, 10.0, 1, 2, 3), *fresh(110.0, 25.0, 4)]
    trials += fresh(110.0, 12.0, 5, throughput_rps=exactly(60.0))
    answer = recommend(trials, scenario=SCENARIO)
    said, (promise,) = answer.capacity, answer.promises
    assert (said.held, said.missed, said.missed_higher, said.fell_behind) == (3, 0, 2, 1)
    assert figures_sentence(answer) == (
        "Capacity 100/s: met in 3 of 5 confirmation runs at this rate or more (p95 10.0 ms); in 1 confirmation run "
        "the server did not keep up with the rate; the limit is about 114/s; the lowest rate that a run missed is "
        "110/s."
    )
    assert promise_sentence(promise, answer) == (
        "p95 ≤ 20 ms: met in 3 of 5 confirmation runs, missed in 2 at higher rates; in 1 since the server did not keep "
        "up with the rate (worst of the others 10 ms, 50 % to spare)."
    )
    assert "3 of 5 confirmation runs at this rate or more met the SLO" in confidence_sentence(answer)


def test_json_of_an_answer_gives_goodput_as_the_share_within_all_limits() -> None:
    slo = STREAMED.slo.model_copy(update={"goodput": 0.9})
    scenario = STREAMED.model_copy(update={"slo": slo})
    misses = Estimate(value=0.02, low=0.01, high=0.03)
    answer = recommend(
        [
            remeasured(trial, latency_s={**trial.measurement.latency_s, "goodput": misses})
            for trial in streamed_ledger()
        ],
        scenario=scenario,
    )
    plain = round_trip(answer)
    (promise,) = (one for one in plain["promises"] if one["name"] == "goodput")
    assert plain["slo"]["goodput_ratio"] == promise["limit_ratio"] == 0.9
    assert "goodput" not in plain["slo"]
    assert plain["goodput_ratio"]["value"] == promise["value_ratio"] == promise["worst_ratio"] == 0.98
    assert "goodput" not in plain["latency_s"]
    assert not any(name.endswith("_s") for name in promise)
    said = "goodput ≥ 90 %: met in 3 of 3 confirmation runs (worst 98 %; 2 % of the requests missed a limit, 10 % may)."
    assert promise_sentence(answer.promises[-1], answer) == said
    older = {**plain["slo"], "goodput": 0.1}
    del older["goodput_ratio"]
    assert Recommendation.from_dict({**plain, "slo": older}) == answer


def test_where_the_client_made_every_miss_nothing_is_said_of_the_server() -> None:
    by_client, other = (at_rate(1, 1000.0, 30.0, verdict="INVALID"), at_rate(2, 500.0, 30.0))
    with pytest.raises(MeasurementInvalidError, match="the client was the limit in every run that missed"):
        recommend([by_client, remeasured(other, verdict="INVALID")], scenario=SCENARIO)
    with pytest.raises(BatchtuneError, match="no configuration of 1 measured meets"):
        recommend([by_client, other], scenario=SCENARIO)


def test_json_of_a_capacity_that_no_run_missed_has_no_upper_end() -> None:
    plain = round_trip(recommend(fresh(1000.0, 12.0, 1, 2, 3), scenario=SCENARIO))
    assert plain["capacity_rps"]["high"] is None


@pytest.mark.parametrize(
    ("kind", "advice"), [("server_error", "its log says why"), ("queue_full", "relax the SLO")]
)
def test_where_the_server_fails_its_requests_no_other_slo_is_advised(kind: str, advice: str) -> None:
    trials = []
    for number, rate_rps in enumerate((1000.0, 500.0, 250.0), start=1):
        failing: dict[str, Any] = {"error_ratio": 0.9, "errors": {kind: 900}}
        trial = at_rate(number, rate_rps, 30.0, batching={**SMALL, "max_batch_size": 2**number}, **failing)
        trials.append(replace(trial, error_texts={kind: "HTTP 500: CUDA error"}))
    with pytest.raises(BatchtuneError) as raised:
        recommend(trials, scenario=SCENARIO)
    assert advice in raised.value.hint


def test_errors_nearest_to_their_limit_are_the_promise_and_the_bottleneck() -> None:
    def failing(ratio: float) -> dict[str, Any]:
        return {"error_ratio": ratio, "errors": {"server_error": round(1000 * ratio)}}

    held = fresh(100.0, 7.0, *range(1, 6), **failing(0.0072))
    missed = [at_rate(number, 110.0 + number, 7.0, **failing(0.03)) for number in range(6, 9)]
    answer = recommend([*held, *missed], scenario=SCENARIO)
    assert promise_sentence(answer.promises[-1], answer).startswith("errors ≤ 1 %: met in 5 of 5")
    assert "worst 0.72 %, 28 % to spare" in promise_sentence(answer.promises[-1], answer)
    assert bottleneck_sentence(answer.bottleneck).startswith(
        "the requests that fail; above 100 requests/s the server refuses requests: 3 % or more of them failed"
    )
    assert round_trip(answer)["promises"][-1]["limit_ratio"] == 0.01
    late = [at_rate(number, 110.0 + number, 90.0) for number in range(6, 9)]
    assert recommend([*held, *late], scenario=SCENARIO).bottleneck.kind != "errors"


def test_misses_at_higher_rates_are_not_told_twice_where_they_are_among_the_runs() -> None:
    trials = [at_rate(1, 100.0, 10.0), at_rate(2, 110.0, 10.0), *fresh(105.0, 30.0, 3)]
    answer = recommend([*trials, *fresh(95.0, 30.0, 4), *fresh(50.0, 10.0, 5)], scenario=SCENARIO)
    assert (answer.capacity.refuted_rps, answer.capacity.missed_higher) == (None, 2)
    (promise,) = answer.promises
    assert "higher rate" not in promise_sentence(promise, answer)
    assert "no confirmation run met the SLO at 82.7/s or more, and 2 missed it" in confidence_sentence(answer)


def padded(
    number: int, padding: int, *, buckets: str = "", throughput: float = 100.0, batching=BATCH_8
) -> Trial:
    server = ServerActivity(
        duration_s=1.0, bucket_sent_elements={"": 100}, bucket_padding_elements={"": padding}
    )
    trial = planted(number, batching=batching, throughput=throughput, p95_s=0.01, server=server)
    flags = (("length_buckets", buckets),) if buckets else ()
    return asked(trial, configuration=replace(trial.configuration, flags=flags))


def note_of(*trials: Trial) -> tuple[str, ...]:
    chosen = trials[0].configuration
    runs = [trial for trial in trials if trial.configuration == chosen]
    return tuple(map(text_of, padding_note(runs, chosen, trials)))


ONE_QUEUE = padded(2, 100)
SHARE = "20 % of the elements computed are padding"
IN_ONE = "50 % in one queue with max_batch_size=8 batch_timeout_micros=1000 num_batch_threads=1"


@pytest.mark.parametrize(
    ("others", "padding", "said"),
    [
        (
            [ONE_QUEUE, padded(3, 300, throughput=200.0, batching=BATCH_14)],
            25,
            f"saved: 75 %: {SHARE}, {IN_ONE}",
        ),
        (
            [padded(2, 50, batching=BATCH_14), padded(3, 30, throughput=1.0, batching="defaults")],
            60,
            "added: 20 %: 37.5 % of the elements computed are padding, 33.3 % in one queue with max_batch_size=14 ",
        ),
        ([asked(ONE_QUEUE, source="calibration")], 25, "saved: 75 %: "),
    ],
)
def test_buckets_are_compared_with_one_queue(others, padding, said):
    (note,) = note_of(padded(1, padding, buckets="32,64"), *others)
    assert note.startswith(f"padding {said}")


def test_without_a_single_queue_to_compare_with_it_says_so_and_without_buckets_nothing():
    (note,) = note_of(padded(1, 25, buckets="32"))
    assert note == f"{SHARE}; what the buckets save is not known: one queue was not measured"
    assert note_of(ONE_QUEUE) == ()
