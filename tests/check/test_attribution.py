"""Where a change comes from, by what the servers say of themselves."""

from __future__ import annotations

import math

import pytest

from batchtune.check.account import attribute
from batchtune.measure.caveats import caveat
from batchtune.report.check_text import attribution_text
from tests.check.check_fakes import measurement, moved

NOISY = (caveat("host_steal", steal_ratio=0.1),)


@pytest.mark.parametrize(
    ("after", "cause", "words"),
    [
        (moved(execution_s_by_rows={16: 0.0022}), "compute", "batch execution time 2 ms → 2.2 ms (+10 %)"),
        (
            moved(mean_batch_rows=8.0, batches_by_rows={8: 200}, execution_s_by_rows={8: 0.0015}),
            "batch size",
            "mean batch size 16 → 8 rows (−50 %)",
        ),
        (moved(queue_wait_mean_s=0.0005), "front end", "front end and network 1 ms → 1.5 ms"),
        (
            moved(server_cpu_s=0.352),
            "not known",
            "the cause is not known: server CPU per request 200 µs → 220 µs (+10 %)",
        ),
        (measurement(latency_mean_s=0.006), "front end", "front end and network 1 ms → 3 ms"),
        (measurement(), "tail", "a few slow requests"),
        (measurement(caveats=NOISY), "host", "the host disturbed one side more often"),
    ],
)
def test_what_explains_most_is_named_with_its_figures(after, cause, words):
    attribution = attribute([measurement()] * 6, [after] * 6)
    assert attribution.cause == cause
    assert words in attribution_text(attribution)


def test_batches_of_equal_size_that_take_longer_are_the_cause_rather_than_a_few_rows_less():
    slower = moved(
        mean_batch_rows=15.1,
        batches_by_rows={16: 90, 8: 10},
        execution_s_by_rows={16: 0.00232, 8: 0.0012},
        queue_wait_mean_s=0.0014,
    )
    attribution = attribute([measurement()] * 6, [slower] * 6)
    assert attribution.cause == "compute"
    assert attribution_text(attribution).startswith("batch execution time 2 ms → 2.32 ms (+16 %); also ")


def test_the_cause_is_named_first_also_where_three_others_moved_more():
    slower = moved(execution_s_by_rows={16: 0.0021}, queue_wait_mean_s=0.004, server_cpu_s=0.6)
    attribution = attribute([measurement()] * 6, [measurement(slower.server, latency_mean_s=0.02)] * 6)
    assert attribution.cause == "compute"
    assert attribution_text(attribution).startswith("batch execution time 2 ms → 2.1 ms (+5 %); also ")


def test_a_longer_wait_alone_is_the_queue():
    after = moved(queue_wait_mean_s=0.002)
    longer = measurement(after.server, latency_mean_s=0.005)
    assert attribute([measurement()] * 6, [longer] * 6).cause == "queue"


def test_a_silent_server_leaves_the_cause_open():
    attribution = attribute([measurement(None)] * 6, [measurement(None)] * 6)
    assert attribution.cause == "not known"
    assert attribution.parts == ()


def test_without_a_part_on_a_request_s_way_no_cause_is_named():
    streams = [measurement(None)] * 6
    assert attribute(streams, streams, cpu_s=(math.nan, math.nan)).cause == "not known"
