"""What the short answer says: what to use, what it gives, the SLO, why, what limits, how sure, what next."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.parameters import from_dict
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.measure.validity.caveats import caveat
from batchtune.recommend.near_best import NearBest
from batchtune.recommend.recommendation import Recommendation, recommend
from batchtune.report.answer import print_answer
from batchtune.report.statement import print_recommendation
from batchtune.report.words import likeness_of
from batchtune.scenario.spec.scenario import Scenario
from tests.recommend.test_recommendation import SCENARIO, helping_ledger
from tests.report.test_statement import DEPLOYMENT, emulated, with_capacities

GOLDEN = """\
fake by gRPC, 1 row per request, 16 clients in a closed loop
Use    max_batch_size 14, batch_timeout_micros 2000, num_batch_threads 1
                              requests/s             p95 ms        gain of this
       this         2,220 [1,970, 2,490]  9.35 [7.78, 11.3]
       no batching        769 [685, 863]  24.0 [20.0, 28.9]  ×2.88 [2.79, 2.98]
       defaults     1,500 [1,330, 1,680]  12.0 [9.97, 14.4]  ×1.48 [1.43, 1.53]
SLO    p95 ≤ 50 ms: kept in 3 fresh runs; another stays below 11.3 ms.
Why    Batching helps: a batch of 14 rows takes 6.1 ms where 14 rows one by one
       take 18.2 ms.
Limit  Nothing that was seen: the server tells nothing of itself. Measure with
       more clients to find what limits it.
Sure?  Established. None of the 4 tried is 5 % better (over 99 % sure).
Mind   The device is emulated by its service time.
Next   batchtune-model-server --model_base_path=PATH/fake --enable_batching --batching_parameters_file=FILE
       batchtune recommend RUN --why
"""


def said(chosen: Recommendation) -> str:
    """As printed, with lines joined."""
    return re.sub(r"\s+", " ", printed(chosen))


def printed(chosen: Recommendation, *, scenario: Scenario = SCENARIO, **options: str) -> str:
    stream = io.StringIO()
    print_answer(chosen, scenario=scenario, deployment=DEPLOYMENT, stream=stream, **options)
    return stream.getvalue()


@pytest.fixture(scope="module")
def chosen() -> Recommendation:
    return recommend(list(emulated(helping_ledger())), scenario=SCENARIO)


def test_the_whole_answer_reads_so_at_80_columns(chosen):
    assert printed(chosen, why="batchtune recommend RUN --why") == GOLDEN


def test_it_has_at_most_fifteen_lines(chosen):
    assert len(printed(chosen, why="batchtune recommend RUN --why").splitlines()) <= 15


def test_what_is_open_and_what_would_settle_it_stand_there(chosen):
    weak = replace(chosen, established=False, open_questions=("only 1 fresh run confirms it",))
    text = printed(weak, next_step="batchtune sweep S --resume R")
    assert "Sure?  Not established: only 1 fresh run confirms it." in text
    assert text.splitlines()[-1].strip() == "batchtune sweep S --resume R"
    assert "kept in" not in text


def test_a_limit_that_single_runs_may_miss_is_not_called_kept_by_them(chosen):
    near = replace(chosen.promises[0], upper_bound_s=chosen.promises[0].limit_s * 1.1)
    assert "a single one may reach" in said(replace(chosen, promises=(near,)))
    open_ = replace(chosen, promises=(near,), established=False, open_questions=("it is near",))
    assert "may be missed" in said(open_)
    unknown = replace(near, upper_bound_s=math.inf)
    assert "how high a fresh run comes is not known" in said(replace(chosen, promises=(unknown,)))


def test_likely_better_points_are_told_as_such(chosen):
    near = NearBest(probability=0.02, of="space", count=126, space_size=None)
    assert "Of the 126 points judged one is likely 5 % better (98 %)." in printed(
        replace(chosen, near_best=near)
    )


def test_a_noisy_host_is_told_only_where_something_is_open(chosen):
    references = tuple(replace(reference, caveats=()) for reference in chosen.references)
    noisy = replace(chosen, caveats=(caveat("host_busy", foreign_ratio=0.4),), references=references)
    assert "Mind" not in printed(noisy)
    open_ = replace(noisy, established=False, open_questions=("only 1 fresh run confirms it",))
    assert "Mind   Programs other than server and client used 40 % of the CPUs" in printed(open_).replace(
        "40%", "40 %"
    )


def test_no_batching_is_told_as_the_flag_that_is_left_out(chosen):
    alone = replace(chosen.configuration, batching=None)
    told = replace(chosen, configuration=alone, batching_helps="no", reason="batches cost what they save")
    assert "Use    no batching" in printed(told)
    assert "Why    Batching does not help: batches cost what they save." in printed(told)


def test_whether_batching_helps_is_not_denied_and_left_open_in_one_line(chosen):
    open_ = replace(
        chosen, batching_helps="not distinguishable", cannot_pay="batching cannot pay here", reason="noise"
    )
    assert "Whether batching helps is not known: noise." in said(open_)
    assert "cannot pay" not in said(open_)
    assert "cannot pay" in said(replace(open_, batching_helps="no"))


def test_flags_that_were_tuned_stand_beside_the_servers_defaults(chosen):
    flags = (("rest_api_num_threads", "8"),)
    defaults = replace(chosen.configuration, batching=from_dict({}), flags=flags)
    assert "Use the server's defaults, --rest_api_num_threads 8" in said(
        replace(chosen, configuration=defaults)
    )


def test_no_batching_with_a_flag_is_not_compared_with_itself(chosen):
    alone = replace(chosen.configuration, batching=None, flags=(("x", "1"),))
    reference = replace(chosen.references[0], name="no_batching", configuration=alone)
    same = replace(chosen, configuration=alone, references=(reference,), indistinct_from="no_batching")
    assert "Use no batching, --x 1: what was tuned cannot be told from it" in said(same)
    known = replace(same, indistinct_from=None, little_better_than="no_batching")
    assert "Use no batching, --x 1: nothing that was tuned is worth its parameters" in said(known)


@pytest.mark.parametrize("other", ["no_batching", "defaults"])
@pytest.mark.parametrize("field", ["indistinct_from", "little_better_than"])
def test_short_answer_and_statement_tell_a_likeness_in_the_same_words(chosen, field, other):
    for configuration in (chosen.configuration, *(one.configuration for one in chosen.references)):
        alike = replace(chosen, configuration=configuration, **{field: other})
        _, words = likeness_of(alike)
        assert words in said(alike)
        stream = io.StringIO()
        print_recommendation(alike, scenario=SCENARIO, deployment=None, stream=stream)
        assert words in re.sub(r"\s+", " ", stream.getvalue())


def test_a_capacity_that_fresh_runs_refuted_stands_in_one_figure(chosen):
    capacity = Estimate(value=18_800.0, low=18_000.0, high=18_900.0)
    rate = Estimate(value=19_000.0, low=17_000.0, high=21_000.0)
    text = said(
        replace(chosen, objective="capacity", capacity_rps=capacity, throughput_rps=rate, promises=())
    )
    assert text.count("below 18,900") == 2
    assert "19,000" not in text


def test_the_column_of_a_capacity_holds_capacities(chosen):
    text = printed(with_capacities(chosen, Estimate(value=473.0, low=460.0, high=490.0), None))
    assert " capacity /s " in text
    assert " requests/s  " not in text
    assert re.search(r"no batching +473 \[460, 490\] ", text)
    assert re.search(r"defaults +– ", text)


def test_where_there_is_little_room_a_sentence_of_the_slo_stays_whole_and_open_questions_are_counted(chosen):
    crowded = replace(
        chosen,
        established=False,
        open_questions=("only 1 fresh run confirms it", "why? " * 150),
        caveats=(caveat("client_busy", cpu_ratio=0.97), caveat("host_steal", steal_ratio=0.1)),
    )
    known = Estimate(value=473.0, low=460.0, high=490.0)
    text = said(with_capacities(crowded, known, known))
    assert "SLO p95 ≤ 50 ms: a fresh run stays below 11.3 ms. Why" in text
    assert "Not established: only 1 fresh run confirms it; another question is open." in text


def test_what_speaks_against_the_run_that_it_is_compared_with_is_said(chosen):
    limited = replace(chosen.references[0], caveats=(caveat("client_busy", cpu_ratio=0.97),))
    text = said(replace(chosen, references=(limited, *chosen.references[1:])))
    assert f"of the CPU that it has (no batching): {limited.caveats[0].advice}." in text


def test_the_gain_says_in_what_where_the_columns_do_not(chosen):
    assert "gain in capacity" in said(replace(chosen, objective="capacity"))
    assert "gain in p95" in said(replace(chosen, objective="latency"))


def test_a_server_on_cpus_of_its_own_costs_no_line(chosen):
    server = SCENARIO.target.model_copy(update={"cpus": (0,), "model": "/models/imdb_transformer"})
    head = printed(chosen, scenario=SCENARIO.model_copy(update={"target": server})).splitlines()[0]
    assert head == "imdb_transformer by gRPC, 1 row per request, 16 clients, server on CPU 0"
    named = server.model_copy(update={"model": f"/models/{'long' * 30}"})
    head = printed(chosen, scenario=SCENARIO.model_copy(update={"target": named})).splitlines()[0]
    assert len(head) <= 80


def test_wide_figures_take_of_the_indent_what_they_need(chosen):
    wide = replace(chosen, throughput_rps=scaled(chosen.throughput_rps, 500.0))
    table = [line for line in printed(wide).splitlines() if "[" in line]
    assert max(map(len, table)) == 80
    assert table[1].lstrip().startswith("no batching")
    assert len(table[1]) - len(table[1].lstrip()) in range(1, 7)


def test_what_there_is_no_room_for_is_counted(chosen):
    promises = tuple(
        replace(chosen.promises[0], name=name, upper_bound_s=upper_bound_s)
        for name, upper_bound_s in (("p50", 0.02), ("p95", 0.06), ("p99", 0.04))
    )
    questions = ("only 1 fresh run confirms it", "whether batching helps is not known", "p95 may be missed")
    caveats = tuple(caveat("host_busy", foreign_ratio=share) for share in (0.3, 0.4, 0.5))
    crowded = replace(chosen, promises=promises, established=False, open_questions=questions, caveats=caveats)
    text = said(crowded)
    assert "p95 ≤ 50 ms: may be missed" in text  # the one that matters most
    assert "p50 ≤" not in text
    assert "may reach 60 ms. And 2 more." in text
    assert "Mind Programs other than server and client used 30 %" in text
    assert "Limit" not in text


def test_that_a_device_is_emulated_hides_no_other_caveat(chosen):
    caveats = (caveat("emulated_device"), caveat("client_busy", cpu_ratio=0.97))
    text = said(replace(chosen, caveats=caveats))
    assert "Mind The client used 97 % of the CPU that it has" in text


SENTENCES = st.text("abcdefgh ", min_size=1, max_size=300).map(lambda text: f"x{text}")


@given(
    data=st.data(),
    questions=st.lists(SENTENCES, max_size=5),
    limits=st.integers(0, 6),
    caveats=st.integers(0, 6),
    flags=st.integers(0, 12),
    cpus=st.none() | st.lists(st.integers(0, 255), min_size=1, max_size=40, unique=True),
    objective=st.sampled_from(["throughput", "capacity", "latency"]),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    commands=st.lists(st.sampled_from(["next_step", "why", "run"]), unique=True),
)
@settings(max_examples=40, deadline=None)
def test_whatever_is_to_be_said_it_has_at_most_fifteen_lines_of_80_columns(
    chosen, data, questions, limits, caveats, flags, cpus, objective, scale, commands
):
    wide = replace(
        chosen,
        reason=data.draw(SENTENCES),
        batching_helps=data.draw(st.sampled_from(["yes", "no", "not distinguishable"])),
        indistinct_from=data.draw(st.sampled_from([None, "defaults", "no_batching"])),
        established=not questions,
        open_questions=tuple(questions),
        objective=objective,
        capacity_rps=scaled(chosen.throughput_rps, scale) if objective == "capacity" else None,
        promises=(replace(chosen.promises[0], upper_bound_s=1.0 / scale),) * limits,
        bottleneck=replace(chosen.bottleneck, text=data.draw(SENTENCES), advice=data.draw(SENTENCES)),
        caveats=(caveat("client_busy", cpu_ratio=0.97),) * caveats,
        throughput_rps=scaled(chosen.throughput_rps, scale),
        latency_s={name: scaled(one, 1.0 / scale) for name, one in chosen.latency_s.items()},
        configuration=replace(
            chosen.configuration, flags=tuple((f"rest_api_flag_{at}", "100") for at in range(flags))
        ),
    )
    server = SCENARIO.target.model_copy(update={"cpus": None if cpus is None else tuple(cpus)})
    scenario = SCENARIO.model_copy(update={"target": server})
    named = {"next_step": "batchtune sweep S", "why": "batchtune recommend R --why", "run": "Run R, 3 h old"}
    text = printed(wide, scenario=scenario, **{name: named[name] for name in commands})
    lines = text.splitlines()
    assert len(lines) <= 15, text
    assert all(len(line) <= 80 for line in lines if DEPLOYMENT not in line), text


def scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(value=estimate.value * factor, low=estimate.low * factor, high=estimate.high * factor)
