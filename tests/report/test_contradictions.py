"""No two sentences of a statement contradict each other, whatever was measured."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError, TargetError
from batchtune.recommend.recommendation import recommend
from batchtune.report.answer import print_answer
from batchtune.report.statement import print_recommendation
from tests.tune.tune_fakes import planted, scenario_of

SCENARIO = scenario_of()
CAPACITY = scenario_of(load={"arrivals": "poisson"}, objective="capacity")
FORBIDDEN = [
    (r"Recommended: no batching", r"Batching helps here"),
    (r"Batching does not help here", r"Recommended(, though .*)? max_batch_size"),
    (r"no configuration with batching was measured(?! inside)", r"batching is worth"),
    (r"not confirmed by fresh runs", r"Established:"),
    (r"Established:", r"Not established:"),
    (r"Established:", r"so it may be missed"),
    (r"Established:", r"cannot be told from these measurements"),
    (r"Nothing better by 5 % or more", r"Better points may exist"),
    (r"no configuration with batching meets the SLO", r"Batching helps here"),
    (r"to be told from no batching", r"Batching helps here"),
    (r"Batching helps here", r"[Bb]atching cannot pay"),
    (r"Instead: [^.]* more throughput and [^.]* lower p95", r"."),
    (r"made after the choice", r"no fresh run confirms it"),
    (r"Not established:", r"the mean of the fresh runs keeps it"),
    (r"what was tuned cannot be told", r"is worth its parameters"),
    (r"hardly better than", r"nothing that was tuned"),
    (r"[∞]|nan", r"."),
    (r"runs confirms|1 fresh run confirm ", r"."),
]
SHORT_FORBIDDEN = [
    (r"Use no batching", r"Batching helps:"),
    (r"Batching does not help", r"Use max_batch_size"),
    (r"Established\.", r"may be missed"),
    (r"Established\.", r"Not established"),
    (r"Established\.", r"Whether batching helps is not known"),
    (r"not to be told from no batching", r"Batching helps:"),
    (r"Batching helps:", r"[Bb]atching cannot pay"),
    (r"hardly better than", r"nothing that was tuned"),
    (r"this +[\d,]+ \[", r"Capacity (below|not known|at least)"),
    (r"None of the", r"one is likely 5 % better"),
    (r"[∞]|nan", r"."),
    (r"runs confirms|1 fresh run confirm ", r"."),
]
VERDICTS = st.sampled_from([None, "PASS", "PASS", "FAIL", "UNSURE"])
ROWS = st.lists(
    st.tuples(
        st.sampled_from([None, "defaults", 4, 16, 32]),
        st.sampled_from([0, 1000]),
        st.sampled_from([500, 900, 1000, 1050, 2000, 2100]),
        st.floats(0.005, 0.08),
        st.sampled_from([0.0, 0.3]),
        st.sampled_from(["sampler", "confirm"]),
        st.sampled_from([None, None, None, "broken"]),
    ),
    min_size=1,
    max_size=14,
)


CAPACITY_ROWS = st.lists(
    st.tuples(
        st.sampled_from([None, "defaults", 8, 16]),
        st.sampled_from([500.0, 900.0, 1000.0, 1050.0, 2000.0]),
        st.floats(0.02, 0.08),
        st.sampled_from([0.0, 0.0, 0.3]),
        st.sampled_from(["search", "confirm", "confirm"]),
        VERDICTS,
    ),
    min_size=1,
    max_size=14,
)


def ledger_of(rows):
    for number, (size, timeout, rate, p95_s, errors, source, failure) in enumerate(rows, 1):
        reference = {None: "no_batching", "defaults": "defaults"}.get(size, "sampler")
        batching = (
            size
            if size in (None, "defaults")
            else {"max_batch_size": size, "batch_timeout_micros": timeout, "num_batch_threads": 1}
        )
        yield planted(
            number,
            batching=batching,
            throughput=rate,
            p95_s=p95_s,
            error_ratio=errors,
            source=source if source == "confirm" else reference,
            block=number // 3 if source == "confirm" else None,
            failure=failure,
        )


def capacity_ledger_of(rows):
    for number, (size, rate, p95_s, errors, source, verdict) in enumerate(rows, 1):
        reference = {None: "no_batching", "defaults": "defaults"}.get(size, "race")
        batching = (
            size
            if size in (None, "defaults")
            else {"max_batch_size": size, "batch_timeout_micros": 0, "num_batch_threads": 1}
        )
        trial = planted(
            number,
            batching=batching,
            throughput=rate,
            p95_s=p95_s,
            error_ratio=errors,
            source="confirm" if source == "confirm" else reference,
            block=number // 3 if source == "confirm" else None,
        )
        measured = replace(trial.measurement, verdict=verdict)
        yield replace(trial, asked_rate_rps=rate, rate_rps=rate, measurement=measured)


def is_free_of_contradictions(ledger, scenario):
    try:
        found = recommend(ledger, scenario=scenario)
    except (NoFeasibleConfigurationError, InconclusiveError, TargetError):
        return
    for forbidden, write in ((FORBIDDEN, print_recommendation), (SHORT_FORBIDDEN, print_answer)):
        stream = io.StringIO()
        write(found, scenario=scenario, deployment=None, stream=stream)
        text = re.sub(r"\s+", " ", stream.getvalue())
        for one, other in forbidden:
            assert not (re.search(one, text) and re.search(other, text)), (one, other, text)


@settings(max_examples=200, deadline=None)
@example(
    [(None, 0, 900, 0.0625, 0.0, "sampler", None)] * 2
    + [(None, 0, 900, 0.03125, 0.0, "sampler", None)]
    + [("defaults", 0, 500, 0.0625, 0.0, "sampler", None)] * 5
    + [(4, 0, 500, 0.03125, 0.0, "confirm", None)],
    [None] * 14,
)
@given(ROWS, st.lists(VERDICTS, min_size=14, max_size=14))
def test_no_two_sentences_contradict_each_other(rows, verdicts):
    ledger = [
        trial
        if trial.measurement is None
        else replace(trial, measurement=replace(trial.measurement, verdict=verdict))
        for trial, verdict in zip(ledger_of(rows), verdicts, strict=False)
    ]
    is_free_of_contradictions(ledger, SCENARIO)


@settings(max_examples=200, deadline=None)
@given(CAPACITY_ROWS)
def test_no_two_sentences_of_a_capacity_contradict_each_other(rows):
    is_free_of_contradictions(list(capacity_ledger_of(rows)), CAPACITY)
