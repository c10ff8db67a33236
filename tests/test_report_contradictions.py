"""No two sentences of a statement contradict each other, whatever was measured."""

from __future__ import annotations

import io
import re

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tune_fakes import planted, scenario_of

from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError, TargetError
from batchtune.recommend import recommend
from batchtune.report.statement import print_recommendation

SCENARIO = scenario_of()
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
    (r"cannot be told from no batching", r"Batching helps here"),
    (r"Batching helps here", r"[Bb]atching cannot pay"),
    (r"Instead: [^.]* more throughput and [^.]* lower p95", r"."),
    (r"made after the choice", r"no fresh run confirms it"),
]
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


@settings(max_examples=200, deadline=None)
@example(
    [(None, 0, 900, 0.0625, 0.0, "sampler", None)] * 2
    + [(None, 0, 900, 0.03125, 0.0, "sampler", None)]
    + [("defaults", 0, 500, 0.0625, 0.0, "sampler", None)] * 5
    + [(4, 0, 500, 0.03125, 0.0, "confirm", None)]
)
@given(ROWS)
def test_no_two_sentences_contradict_each_other(rows):
    try:
        found = recommend(list(ledger_of(rows)), scenario=SCENARIO)
    except (NoFeasibleConfigurationError, InconclusiveError, TargetError):
        return
    stream = io.StringIO()
    print_recommendation(found, scenario=SCENARIO, deployment=None, stream=stream)
    text = re.sub(r"\s+", " ", stream.getvalue())
    for one, other in FORBIDDEN:
        assert not (re.search(one, text) and re.search(other, text)), (one, other, text)
