"""The throughput × interval rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.report.findings import text_of
from batchtune.tune.search.proposals import throughput_interval_rule


def test_interval_is_half_of_what_the_slo_leaves_and_size_is_throughput_times_it():
    answer = throughput_interval_rule(
        rows_per_s=800.0, lone_latency_s=0.002, limits={"p50": 0.010, "p95": 0.042}, rows_per_request=1
    )
    assert answer.interval_s == pytest.approx(0.020)
    assert answer.point == {"max_batch_size": 16, "batch_timeout_micros": 20_000}
    assert text_of(answer.arithmetic()) == (
        "X = 800 rows/s one by one, interval (42 ms - 2 ms) / 2 = 20 ms: X·interval = 16"
    )


def test_an_slo_below_the_lone_latency_leaves_no_interval():
    answer = throughput_interval_rule(
        rows_per_s=800.0, lone_latency_s=0.05, limits={"p95": 0.02}, rows_per_request=4
    )
    assert answer.point == {"max_batch_size": 4, "batch_timeout_micros": 0}
    assert "no interval is left" in text_of(answer.arithmetic())


def test_without_an_slo_the_interval_is_the_lone_latency():
    answer = throughput_interval_rule(rows_per_s=2000.0, lone_latency_s=0.005, limits={}, rows_per_request=1)
    assert answer.point == {"max_batch_size": 10, "batch_timeout_micros": 5000}


def test_without_p95_the_tightest_limit_counts():
    answer = throughput_interval_rule(
        rows_per_s=1000.0, lone_latency_s=0.0, limits={"p90": 0.02, "p99": 0.1}, rows_per_request=1
    )
    assert answer.slo_s == 0.02


@given(
    rows_per_s=st.floats(1.0, 1e5),
    lone_s=st.floats(1e-4, 0.1),
    slo_s=st.floats(1e-3, 2.0),
    rows=st.integers(1, 64),
)
def test_a_device_without_economy_of_scale_still_meets_the_slo(rows_per_s, lone_s, slo_s, rows):
    """Waiting I, executing X·I rows one by one and the lone latency stay within the SLO, but for rounding of a row."""
    answer = throughput_interval_rule(
        rows_per_s=rows_per_s, lone_latency_s=lone_s, limits={"p95": slo_s}, rows_per_request=rows
    )
    assert answer.max_batch_size >= rows
    if lone_s < slo_s and answer.max_batch_size > rows:
        worst_s = answer.interval_s + answer.max_batch_size / rows_per_s + lone_s
        assert worst_s <= slo_s + 1.0 / rows_per_s
