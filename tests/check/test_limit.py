"""Absolute limits on the figures of one load test."""

from __future__ import annotations

import pytest

from batchtune.check.load_limits import judge_limits, parse_limits
from batchtune.errors import UsageError
from batchtune.measure.quantiles import Estimate
from batchtune.report.check_text import limit_text
from tests.check.check_fakes import measurement, trial

P95 = Estimate(value=0.02, low=0.018, high=0.023)
LATENCY_S = {"p99": Estimate(value=0.03, low=0.025, high=0.04), "ttft_p95": P95, "p95": P95}
THROUGHPUT = Estimate(value=500.0, low=480.0, high=520.0)
RUN = trial("load", 1, measurement(throughput_rps=THROUGHPUT, latency_s=LATENCY_S, error_ratio=0.01))


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("throughput=470/s", "kept"),
        ("throughput=490", "open"),
        ("throughput=530/s", "missed"),
        ("p95=25ms", "kept"),
        ("p95=20ms", "open"),
        ("p95=10ms", "missed"),
        ("errors=1%", "kept"),
        ("errors=0.5%", "missed"),
        ("cpu=300us", "kept"),
        ("cpu=100us", "missed"),
        ("gpu=1ms", "not measured"),
        ("ttft_p95=25ms", "kept"),
        ("itl_p99=1ms", "not measured"),
    ],
)
def test_a_limit_is_kept_or_missed_where_the_whole_interval_says_so(text, state):
    (finding,) = judge_limits(parse_limits([text]), RUN)
    assert finding.state == state


def test_what_is_said_names_figure_interval_and_limit():
    (finding,) = judge_limits(parse_limits(["p95=20ms"]), RUN)
    assert limit_text(finding) == "p95 20 ms [18 ms, 23 ms]: at most 20 ms: undecided"
    (met,) = judge_limits(parse_limits(["errors=1%"]), RUN)
    assert limit_text(met).endswith(": at most 1 %: met")


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("p95", "expected FIGURE=LIMIT", ""),
        ("p96=1ms", "called 'p96'", ""),
        ("p95=20", "its unit", ""),
        ("errors=x", "percentage", ""),
        ("", "expected FIGURE=LIMIT", ""),
        ("errors=5", "at most 500 % of all requests is always met", "write errors=5%"),
        ("errors=100%", "at most 100 %", "write errors=1%"),
    ],
)
def test_a_limit_that_says_nothing_is_refused(text, words, hint):
    with pytest.raises(UsageError, match=words) as raised:
        parse_limits([text])
    assert hint in ("", raised.value.hint)
