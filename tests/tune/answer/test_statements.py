"""No two sentences of an answer contradict each other, whatever was measured: 500 random ledgers, each printed twice."""

from __future__ import annotations

import io
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import pytest

from batchtune.archive.run import create_run
from batchtune.cli.commands.run_recommend import conclude
from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError, TargetError
from batchtune.measure.caveats import caveat
from batchtune.report.answer_words import gain_cell, other_references, question_text
from batchtune.report.recommendation_text import print_answer
from batchtune.scenario.reader import format_scenario
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.answer.choice import LEVEL
from batchtune.tune.answer.recommend import compared_with_slo, recommend
from batchtune.tune.answer.recommendation import Compared, Recommendation
from batchtune.tune.trials.trial import Trial
from batchtune.units import parse_duration_s
from tests.tune.answer.ledgers import SCENARIO, at_rate, loop
from tests.tune.tune_fakes import asked, capacity_scenario, planted, scenario_of

STEP, OFFER = "batchtune sweep S --resume R", "--budget 3m"
SPACE = {
    "max_batch_size": [1, 4, 8, 16, 32],
    "batch_timeout_micros": [0, 1000],
    "num_batch_threads": [1, 2],
}
CONFIRMED = r"(?<![Nn]ot )(?<!not\n            )[Cc]onfirmed:"
EXCLUDE = [
    (r"Recommended:? no batching", r"Batching helps:"),
    (r"Batching does not help", r"Recommended max_batch_size"),
    (r"Batching helps:", r"cannot pay"),
    (r"Whether batching helps is not known", r"batching is worth"),
    (CONFIRMED, r"[Nn]ot confirmed"),
    (CONFIRMED, r"Whether it is better than [\w' ]+ is open"),
    (CONFIRMED, r"by the search alone|by closed loops alone|no rate that misses the SLO"),
    (CONFIRMED, r"may be better|it may still be better"),
    (CONFIRMED, r"of the search[,.;]"),
    (r"[Nn]ot confirmed", r"may find a better"),
    (r"None: this is what runs now", r"(over|than|from) what runs now"),
    (r"no confirmation run (?:was made|met the SLO)", r"met in [1-9]\d* of \d+ confirmation"),
    (r"to spare", r"a further run may miss it"),
    (r"\bnan\b|\binf\b|∞|…|\.\.\.|not known\]|None\b(?![:;])", r"."),
]
"""What must not stand in one text together."""


@dataclass(frozen=True)
class Case:
    """A random ledger, and what it is asked."""

    scenario: Scenario
    trials: list[Trial]
    slo: SloSpec | None


def scenario_with(draw: random.Random, **changes: Any) -> Scenario:
    """Sometimes with something that runs now, and a space that is a guess."""
    fixed = {"max_batch_size": 8, "num_batch_threads": 1} if draw.random() < 0.3 else {}
    space = {name: values for name, values in SPACE.items() if name not in fixed}
    search = {"seed": 1, "budget": {"time": "60s"}, "grow": draw.random() < 0.5, "space": space}
    return scenario_of(fixed=fixed, search=search, **changes)


def contenders(draw: random.Random, scenario: Scenario) -> list[tuple[Any, str]]:
    """Batching and who named it: the references mostly, and some points."""
    found: list[tuple[Any, str]] = [
        (batching, source)
        for batching, source in ((None, "no_batching"), ("defaults", "defaults"))
        if draw.random() < 0.85
    ]
    for _ in range(draw.randint(0, 5)):
        point = {name: draw.choice(values) for name, values in SPACE.items()} | dict(scenario.fixed)
        found.append((point, draw.choice(["grid", "rule", "guide", "sampler", "neighbour"])))
    return found or [(None, "no_batching")]


def capacity_case(seed: int) -> Case:
    """Scouts, runs at rates about a capacity of each contender, and fresh runs of one or two."""
    draw = random.Random(seed)
    scenario = scenario_with(draw, load={"arrivals": "poisson"}, objective="capacity")
    noise = draw.choice([0.0, 0.02, 0.1, 0.3])
    truths = [
        (batching, source, draw.choice([100.0, 1000.0, 1000.0, 1020.0, 20_000.0]) * draw.uniform(0.8, 1.2))
        for batching, source in contenders(draw, scenario)
    ]
    trials: list[Trial] = []

    def run(batching: Any, source: str, capacity_rps: float, share: float) -> None:
        here_rps, rate_rps = capacity_rps * math.exp(draw.gauss(0.0, noise)), share * capacity_rps
        p95_s = 0.05 * (rate_rps / here_rps) ** draw.choice([1, 4, 8])
        answered = min(1.0, here_rps / rate_rps) if draw.random() < 0.5 else 1.0
        trial = at_rate(len(trials) + 1, rate_rps, p95_s, batching=batching, source=source, answered=answered)
        if draw.random() < 0.03:
            trial = replace(trial, state="failed", failure="OOM", measurement=None, objective=None)
        trials.append(trial)

    if draw.random() < 0.7:
        lone = loop(1, 50.0, draw.choice([0.002, 0.02, 0.08]), clients=1, batching=None)
        trials.append(asked(lone, source="probe"))
    for batching, _, capacity_rps in truths:
        if draw.random() < 0.6:
            clients, p95_s = draw.choice([4, 16, 64, 4000]), draw.choice([0.01, 0.09])
            trials.append(loop(len(trials) + 1, capacity_rps, p95_s, clients=clients, batching=batching))
    for _ in range(draw.randint(0, 14)):
        run(*draw.choice(truths), draw.uniform(0.6, 1.3))
    for batching, _, capacity_rps in draw.sample(truths, min(len(truths), draw.randint(0, 2))):
        share = draw.uniform(0.8, 1.02)
        for _ in range(draw.randint(1, 6)):
            run(batching, "confirm", capacity_rps, share)
            share *= draw.choice([1.0, 1.0, 0.95])
    if draw.random() < 0.5:  # as a search ends that had the time
        for truth in truths * 2:
            run(*truth, 1.04)
        batching, _, capacity_rps = max(truths, key=lambda truth: truth[2])
        for _ in range(draw.randint(3, 6)):
            run(batching, "confirm", capacity_rps, 0.96)
    return Case(scenario, trials, other_slo(draw))


def fixed_case(seed: int) -> Case:
    """Runs of some contenders under one load, and fresh runs of one or two."""
    draw = random.Random(seed)
    objective = draw.choice(["throughput", "latency"])
    open_loop, closed_loop = (
        {"arrivals": "poisson", "rate": "900/s"},
        {"arrivals": "closed", "concurrency": 16},
    )
    load = open_loop if objective == "latency" else closed_loop
    scenario = scenario_with(draw, load=load, objective=objective)
    noise = draw.choice([0.0, 0.02, 0.1, 0.3])
    truths = [
        (batching, source, draw.choice([500.0, 1000.0, 1020.0, 3000.0]), draw.uniform(0.005, 0.07))
        for batching, source in contenders(draw, scenario)
    ]
    trials: list[Trial] = []

    def run(batching: Any, source: str, rate_rps: float, p95_s: float) -> None:
        off = math.exp(draw.gauss(0.0, noise))
        figures: dict[str, Any] = {
            "throughput": rate_rps * off,
            "p95_s": p95_s / off if draw.random() > 0.05 else math.inf,
            "error_ratio": draw.choice([0.0] * 9 + [0.3]),
            "failure": "OOM" if draw.random() < 0.03 else None,
        }
        if objective == "latency":
            figures |= {"concurrency": None, "offered_rps": rate_rps}
        trial = planted(len(trials) + 1, batching=batching, source=source, objective=objective, **figures)
        if objective == "latency" and trial.measurement is not None:
            trial = replace(trial, concurrency=None, rate_rps=rate_rps)
        trials.append(trial)

    for _ in range(draw.randint(1, 14)):
        run(*draw.choice(truths))
    for batching, _, rate_rps, p95_s in draw.sample(truths, min(len(truths), draw.randint(0, 2))):
        for _ in range(draw.randint(1, 6)):
            run(batching, "confirm", rate_rps, p95_s)
    return Case(scenario, trials, other_slo(draw))


def other_slo(draw: random.Random) -> SloSpec | None:
    """Sometimes another limit than the one that was searched."""
    if draw.random() < 0.7:
        return None
    limit = draw.choice(["20ms", "45ms", "90ms"])
    return SloSpec.model_validate({"p95": limit} | ({"p99": "120ms"} if draw.random() < 0.3 else {}))


def answered(case: Case) -> Recommendation | None:
    try:
        return recommend(case.trials, scenario=case.scenario, slo=case.slo)
    except (NoFeasibleConfigurationError, InconclusiveError, TargetError) as error:
        told = f"{error.message} {error.hint}"
    assert not re.search(EXCLUDE[-1][0], told), told
    return None


def texts_of(chosen: Recommendation, scenario: Scenario) -> Iterator[str]:
    """The short answer and the whole statement, with lines joined."""
    step = None if chosen.established else STEP
    for whole in (False, True):
        with redirect_stdout(io.StringIO()) as said:
            print_answer(
                chosen, scenario=scenario, deployment="DEPLOY", next_step=step, offer=OFFER, whole=whole
            )
        yield re.sub(r"\s+", " ", said.getvalue())


def check_choice_against_table(chosen: Recommendation) -> None:
    """Nothing in the table is stated to be better, but what is level, open, or outside the space.

    A higher rate that closed loops alone kept stands there as such.
    """
    for other in (*other_references(chosen), *chosen.contenders):
        ours, theirs, capacity = merit(chosen, chosen), merit(other, chosen), other.capacity
        if theirs > ours and not other.outside:
            simpler = chosen.capacity is not None and theirs <= LEVEL * ours * 1.001
            no_gain = r"none measurable|may be better|misses the SLO|undecided|met in \d of \d|–"
            assert simpler or re.fullmatch(no_gain, gain_cell(other)), (ours, theirs, gain_cell(other))
            if chosen.capacity is not None and not (capacity and capacity.by_loops):
                assert {"present", "no_batching", "defaults"} & set(chosen.names), (ours, theirs)
        assert capacity is None or capacity.missed_rps is None or capacity.missed_rps >= capacity.held_rps


def merit(one: Recommendation | Compared, chosen: Recommendation) -> float:
    if chosen.capacity is not None:
        return 0.0 if one.capacity is None else one.capacity.held_rps
    if chosen.objective == "latency":
        return 1.0 / one.latency_s["p95"].value if "p95" in one.latency_s else 0.0
    return 0.0 if one.throughput_rps is None else one.throughput_rps.value


def check_certainty(chosen: Recommendation, text: str) -> None:
    """Established, open questions, the sentence and the command are of one mind."""
    assert chosen.established == (not chosen.open_questions) == bool(re.search(CONFIRMED, text))
    assert chosen.established == (not re.search("[Nn]ot confirmed", text)) == (STEP not in text)
    for question in chosen.open_questions:
        assert question_text(question, chosen) in text
    if chosen.established:
        assert not any(other.open for other in (*chosen.references, *chosen.contenders))
        assert chosen.confirmations >= 3
        if chosen.capacity is not None:
            held, runs = chosen.capacity.held, chosen.capacity.held + chosen.capacity.missed
            assert held >= 3
            assert held >= 3 * chosen.capacity.missed
            assert f"met in {held} of {runs + chosen.capacity.missed_higher} confirmation run" in text
    assert ("may find a better" in text) == (chosen.established and chosen.may_find_more)


def check_limits(chosen: Recommendation, text: str) -> None:
    """What is said of the SLO follows from the figures beside it."""
    for promise in chosen.promises:
        all_kept = promise.kept == promise.runs
        assert all_kept == (promise.worst_s <= promise.limit_s) or promise.fell_behind
        said = re.search(rf"SLO {promise.name} ≤ [^:;]+: ([^.]|\.\d)*\.", text)
        assert said is not None, text
        of_errors = promise.name == "errors"
        high = promise.worst_s if of_errors else chosen.latency_s[promise.name].high
        assert ("since the server did not keep up" in said[0]) == (promise.fell_behind > 0)
        assert ("to spare" in said[0]) == (all_kept and high <= promise.limit_s)
        assert ("may miss it" in said[0]) == (all_kept and high > promise.limit_s)
        assert f"met in {promise.kept} of {promise.runs + promise.missed_higher} " in said[0]
        assert ("higher rate" in said[0]) == (promise.missed_higher > 0)
        meaning = "95 % of further runs" in said[0]
        assert (meaning or of_errors) == (chosen.interval == "prediction" or of_errors)
        assert (chosen.interval == "prediction") == (chosen.established and chosen.runs >= 5)


def check_gains(chosen: Recommendation, text: str) -> None:
    """A gain is told of each reference in one way."""
    for other in other_references(chosen):
        cell = gain_cell(other)
        if cell.startswith("×") and other.gain is not None:
            assert not other.gain.low <= 1.0 <= other.gain.high
        if other.open and other.name == "no_batching":
            assert "no measurable difference from no batching" not in text
        if chosen.level_with == other.name:
            assert cell in ("none measurable", "may be better"), cell
    assert chosen.level_with is None or chosen.level_with not in chosen.names


LEDGERS = pytest.mark.parametrize(
    ("cases", "seeds"),
    [
        (capacity_case, range(80)),
        (fixed_case, range(80)),
        pytest.param(capacity_case, range(80, 250), marks=pytest.mark.slow),
        pytest.param(fixed_case, range(80, 250), marks=pytest.mark.slow),
    ],
    ids=["capacity", "fixed", "more capacity", "more fixed"],
)
"""Of two kinds, each by its seed."""


def answers(cases: Callable[[int], Case], seeds: Iterable[int]) -> Iterator[tuple[int, Case, Recommendation]]:
    """Those that have one."""
    for seed in seeds:
        case = cases(seed)
        chosen = answered(case)
        if chosen is not None:
            yield seed, case, chosen


@LEDGERS
def test_no_two_sentences_of_one_answer_contradict_each_other(
    cases: Callable[[int], Case], seeds: range
) -> None:
    established = []
    for seed, case, chosen in answers(cases, seeds):
        established.append(chosen.established)
        check_choice_against_table(chosen)
        for text in texts_of(chosen, case.scenario):
            try:
                check_certainty(chosen, text)
                check_limits(chosen, text)
                check_gains(chosen, text)
                for one, other in EXCLUDE:
                    assert not (re.search(one, text) and re.search(other, text)), (one, other)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}\n{text}") from error
    assert len(established) > 0.6 * len(seeds)
    assert sum(established) > 0.05 * len(seeds)


@LEDGERS
def test_the_exit_code_says_what_the_answer_says(
    cases: Callable[[int], Case], seeds: range, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for _, case, chosen in answers(cases, seeds[::10]):
        run = create_run(case.scenario, format_scenario(case.scenario), root=tmp_path, provenance={})
        code = conclude(run, case.scenario, case.trials, slo=case.slo)
        text = capsys.readouterr().out
        assert (code == 0) == bool(re.search(CONFIRMED, text)) == chosen.established
        assert code == 0 or "Next        confirm  batchtune sweep " in text


def refusal(trials: list[Trial], scenario: Scenario = SCENARIO) -> str:
    with pytest.raises((NoFeasibleConfigurationError, InconclusiveError, TargetError)) as refused:
        recommend(trials, scenario=scenario)
    return refused.value.message


def test_what_keeps_a_recommendation_away_is_said_once() -> None:
    assert refusal([]) == "no trial is finished"
    failed = [planted(number, batching=None, failure="the server died") for number in (1, 2)]
    assert refusal(failed) == "all trials failed (2); the last: the server died"


@LEDGERS
def test_the_error_and_the_page_name_the_same_run_as_nearest_to_the_slo(
    cases: Callable[[int], Case], seeds: range
) -> None:
    words = r"no configuration of (\d+) measured meets .*?; nearest: (.*?), (?:p95|\d)"
    compared = 0
    for seed in seeds:
        case = cases(seed)
        slo = SloSpec.model_validate({"p95": random.Random(seed).choice(["1ms", "5ms", "20ms"])})
        scenario = case.scenario.model_copy(update={"slo": slo})
        try:
            recommend(case.trials, scenario=scenario)
            continue
        except (NoFeasibleConfigurationError, InconclusiveError, TargetError) as error:
            said = re.search(words, error.message)
        if said is None:
            continue
        compared += 1
        nearest, *_ = tried = compared_with_slo(case.trials, scenario=scenario)
        missed = sum(not other.keeps for other in tried)
        assert [said[1], said[2]] == [str(missed), nearest.configuration.label()], seed
        if p95 := re.search(r"p95 ([\d.,]+ \S+) (?:misses|is \d)", said.string):
            value_s, shown = parse_duration_s(p95[1].replace(",", "")), nearest.latency_s["p95"]
            assert shown.low * 0.99 <= value_s <= shown.high * 1.01, (seed, said.string, shown)
    assert compared > 0.08 * len(seeds)


AT_60_MS = capacity_scenario("60ms")
SMALL = {"max_batch_size": 4}


def test_one_batch_that_misses_is_no_proof_that_batching_does_not_help() -> None:
    trials = [
        loop(1, 1890.0, 0.013, clients=16, batching=None),
        at_rate(2, 2400.0, 0.2, batching={"max_batch_size": 8}),
    ]
    answer = recommend(trials, scenario=AT_60_MS)
    assert (answer.configuration.batching, answer.batching_helps) == (None, "not distinguishable")
    missed = [at_rate(number, 1500.0, 0.2, batching={"max_batch_size": 8}) for number in (3, 4)]
    assert recommend([*trials, *missed], scenario=AT_60_MS).batching_helps == "no"


def test_where_requests_fail_the_missing_answer_quotes_the_commonest_error_once() -> None:
    texts = {"server_error": "HTTP 500: other", "queue_full": f"HTTP 503: {'busy ' * 40}"}
    counts = {"queue_full": 150, "server_error": 50}
    trials = []
    for number, size in enumerate((None, 4, 8, 16), 1):
        batching = size and {"max_batch_size": size}
        trial = at_rate(number, 200.0, 0.03, batching=batching, error_ratio=0.2, errors=counts)
        trials.append(replace(trial, error_texts=texts))
    message = refusal(trials, AT_60_MS)
    assert message.count("HTTP 503: busy") == 1
    assert "20 % of requests fail where 1 % may, most often (15 % of all) by HTTP 503: busy busy" in message
    assert "other" not in message
    assert len(message) < 260


@pytest.mark.parametrize(("deaths", "confirmed"), [(1, True), (2, False)])
def test_a_confirmation_run_whose_server_ended_is_counted_as_missed(deaths: int, confirmed: bool) -> None:
    trials = [
        at_rate(1, 200.0, 0.03, batching=SMALL),
        *(at_rate(number, 210.0, 0.08, batching=SMALL) for number in (2, 3)),
        *(at_rate(number, 190.0, 0.02, batching=SMALL, source="confirm") for number in (4, 5, 6)),
    ]
    for number in range(7, 7 + deaths):
        died = planted(number, batching=SMALL, source="confirm", failure="the server exited with 1")
        trials.append(replace(asked(died, rate_rps=195.0), concurrency=None))
    chosen, runs = recommend(trials, scenario=AT_60_MS), 3 + deaths
    assert (chosen.capacity.held, chosen.capacity.missed) == (3, deaths)
    assert (chosen.runs, chosen.confirmations) == (runs, runs)
    assert [(promise.kept, promise.runs) for promise in chosen.promises] == [(3, runs)]
    assert confirmed != any(question.code == "unconfirmed" for question in chosen.open_questions)
    for text in texts_of(chosen, AT_60_MS):
        assert text.count(f"met in 3 of {runs} confirmation runs") == 2
        of_all = f"{deaths} of the {runs} confirmation runs of max_batch_size=4 failed"
        assert f"{of_all}: the server exited with 1." in text


def test_a_run_above_the_stated_capacity_is_no_warning_about_it() -> None:
    answer = recommend(
        [at_rate(number, 100.0, 0.02, batching=SMALL) for number in (1, 2, 3)], scenario=AT_60_MS
    )
    chosen = replace(answer, caveats=(caveat("growing_backlog", answered_ratio=0.9),))
    assert chosen.capacity is not None
    for stated, is_warned in ((chosen, False), (replace(chosen, capacity=None), True)):
        short, _ = texts_of(stated, AT_60_MS)
        assert ("above capacity" in short) == is_warned


WAIT = "PUT http://h/settings: wait is 0 after it, not 0.002"
NOT_READY = (
    "model 'm' at http://h:1 is not ready after 5 s: no connection; what target.launch started still runs"
)
LAST_WORDS = "; its last words:\n  x = zeros(n)\n  "
LARGER = "ran out of memory in 1 of 1 run; the search then left out all that are as large: "
AT_START = "failed at the start in 1 of 1 run; the search then left it out: "


@pytest.mark.parametrize(
    ("failures", "is_refused", "note"),
    [
        (
            [(4, WAIT), (16, WAIT), (64, "out of memory")],
            False,
            f" and 1 more failed under load in 2 of 2 runs; the search then left them out: {WAIT}.",
        ),
        ([(32, "out of memory")], False, f"{LARGER}out of memory"),
        ([(32, f"exited with 1{LAST_WORDS}CUDA error: out of memory")], True, f"{LARGER}exited with 1"),
        ([(32, f"exited with 3{LAST_WORDS}no such option")], True, f"{AT_START}exited with 3"),
        ([(32, f"{NOT_READY}{LAST_WORDS}")], True, f"{AT_START}{NOT_READY}."),
        ([(32, None)], False, "failed under load in 1 of 1 run: no request was answered"),
        ([(8, "exited with 1")], False, "failed under load in 1 of 4 runs: exited with 1"),
    ],
)
def test_configurations_that_failed_beside_others_are_named_with_their_commonest_error(
    failures: list[tuple[int, str | None]], is_refused: bool, note: str
) -> None:
    trials = [
        planted(1, throughput=100.0, p95_s=0.01, batching=None, source="no_batching"),
        *(planted(at, throughput=300.0, p95_s=0.01, batching={"max_batch_size": 8}) for at in (2, 3, 4)),
    ]
    for number, (size, failure) in enumerate(failures, 5):
        nothing: dict[str, float] = {} if failure else {"throughput": 0.0, "p95_s": math.inf}
        failed = planted(number, batching={"max_batch_size": size}, failure=failure, **nothing)
        trials.append(replace(failed, is_refused=is_refused))
    for text in texts_of(recommend(trials, scenario=scenario_of()), scenario_of()):
        assert text.count(f"max_batch_size={failures[0][0]}{'' if len(failures) > 1 else ' '}{note}") == 1


CLOSED = [(1, 19.0), (1, 23.0), (1, 24.0), (4, 21.0), (8, 20.2), (8, 40.0), (8, 41.0)]
"""Batch size and p95, in ms, of runs in a closed loop."""


@pytest.mark.parametrize(
    ("runs", "error", "words"),
    [
        (
            CLOSED,
            NoFeasibleConfigurationError,
            (
                "no configuration of 3 measured meets p95 ≤ 20 ms, errors ≤ 1 % in most of its runs; nearest: "
                "max_batch_size=1, p95 23 ms misses 20 ms by 15 %, though 1 of 3 runs met it"
            ),
        ),
        (
            [*CLOSED, (4, 19.5)],
            InconclusiveError,
            (
                "nearest: max_batch_size=4, p95 21 ms misses 20 ms by 5 %, though 1 of 2 runs met it; whether most runs "
                "would meet it is not known"
            ),
        ),
        (
            [(1, 23.0), (4, 21.0), (8, 20.2), (8, 40.0), (8, 41.0)],
            NoFeasibleConfigurationError,
            "meets p95 ≤ 20 ms, errors ≤ 1 %; nearest: max_batch_size=8, p95 20.2 ms misses 20 ms by 1 %",
        ),
    ],
)
def test_what_single_runs_of_a_closed_loop_met_is_said_of_the_nearest(
    runs: list[tuple[int, float]], error: type[Exception], words: str
) -> None:
    """Of the nearest the middle run is quoted: most of its runs would have to meet it."""
    rest = {"batch_timeout_micros": 0, "num_batch_threads": 1}
    trials = [
        planted(number, throughput=500.0, p95_s=p95_ms / 1e3, batching={"max_batch_size": size, **rest})
        for number, (size, p95_ms) in enumerate(runs, 1)
    ]
    with pytest.raises(error) as raised:
        recommend(trials, scenario=scenario_of(slo={"p95": "20ms"}))
    assert words in str(raised.value).replace(" batch_timeout_micros=0 num_batch_threads=1", "")


def waiting(timed_out: int, wait_s: float) -> ServerActivity:
    """Of a hundred batches so many waited for the whole timeout."""
    closed = {"full": 100 - timed_out, "timeout": timed_out}
    sizes: dict[str, Any] = {"rows": 400, "mean_batch_rows": 4.0, "batches_by_rows": {4: 100}}
    times: dict[str, Any] = {"execution_s_by_rows": {4: 0.002}, "queue_wait_mean_s": wait_s}
    return ServerActivity(duration_s=1.0, batches=100, close_reasons=closed, **sizes, **times)


@pytest.mark.parametrize(
    ("lower_rps", "advice"),
    [(2400, "Lower batch_timeout_micros"), (900, "A lower batch_timeout_micros was tried and is not better")],
)
def test_why_and_bottleneck_are_of_one_run_and_what_may_be_better_is_not_called_worse(
    lower_rps: float, advice: str
) -> None:
    waits = {"max_batch_size": 8, "batch_timeout_micros": 2000, "num_batch_threads": 1}
    lower = waits | {"batch_timeout_micros": 0}
    trials = [
        planted(1, batching=None, throughput=770, p95_s=0.024, source="no_batching"),
        planted(2, batching=lower, throughput=lower_rps, p95_s=0.0095),
    ]
    fresh: dict[str, Any] = {"throughput": 2230, "p95_s": 0.0093, "source": "confirm"}
    trials += [
        planted(number, batching=waits, server=waiting(*closed), **fresh)
        for number, closed in enumerate([(75, 0.003), (75, 0.003), (54, 0.001)], 3)
    ]
    chosen = recommend(trials, scenario=SCENARIO)
    assert chosen.configuration.in_force("batch_timeout_micros") == 2000
    for text in texts_of(chosen, SCENARIO):
        shares = re.findall(r"([\d.]+) % of the batches", text)
        assert len(shares) == 2, text
        assert {float(share) for share in shares} == {75.0}
        assert advice in text
        assert ("may be better" in text) == (lower_rps == 2400)
