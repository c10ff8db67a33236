"""Where a change comes from, by what the servers say of themselves."""

from __future__ import annotations

import math

import pytest

from batchtune.check.account import attribute
from batchtune.measure.caveats import caveat
from batchtune.report.check_text import attribution_text
from tests.check.check_fakes import measurement, moved

TIME = "batch execution time 2 ms →"
UNKNOWN = "the cause is not known"
NOISY = (caveat("host_steal", steal_ratio=0.1),)


SMALLER = {"mean_batch_rows": 8.0, "batches_by_rows": {8: 200}, "execution_s_by_rows": {8: 0.0015}}
FEWER = {"mean_batch_rows": 15.1, "batches_by_rows": {16: 90, 8: 10}, "queue_wait_mean_s": 0.0014}
WAITING = moved(execution_s_by_rows={16: 0.0021}, queue_wait_mean_s=0.004, server_cpu_s=0.6).server


@pytest.mark.parametrize(
    ("after", "cause", "words"),
    [
        (moved(execution_s_by_rows={16: 0.0022}), "compute", f"{TIME} 2.2 ms (+10 %)"),
        (moved(**SMALLER), "batch size", "mean batch size 16 → 8 rows (−50 %)"),
        (moved(queue_wait_mean_s=0.0005), "front end", "front end and network 1 ms → 1.5 ms"),
        (
            moved(server_cpu_s=0.352),
            "not known",
            f"{UNKNOWN}: server CPU per request 200 µs → 220 µs (+10 %)",
        ),
        (measurement(latency_mean_s=0.006), "front end", "front end and network 1 ms → 3 ms"),
        (
            measurement(),
            "tail",
            "no mean changed by more than 2 %: a few slow requests, or noise of the host",
        ),
        (measurement(caveats=NOISY), "host", "the host disturbed one side more often"),
        # batches of equal size that take longer, rather than a few rows less
        (
            moved(execution_s_by_rows={16: 0.00232, 8: 0.0012}, **FEWER),
            "compute",
            f"{TIME} 2.32 ms (+16 %); also ",
        ),
        # also where three others moved more
        (measurement(WAITING, latency_mean_s=0.02), "compute", f"{TIME} 2.1 ms (+5 %); also "),
        (measurement(moved(queue_wait_mean_s=0.002).server, latency_mean_s=0.005), "queue", ""),
    ],
)
def test_what_explains_most_is_named_first_with_its_figures(after, cause, words):
    attribution = attribute([measurement()] * 6, [after] * 6)
    assert attribution.cause == cause
    assert attribution_text(attribution).startswith(words)


def test_a_silent_server_leaves_the_cause_open():
    silent = [measurement(None)] * 6
    attribution = attribute(silent, silent)
    assert (attribution.cause, attribution.parts) == ("not known", ())
    assert attribute(silent, silent, cpu_s=(math.nan, math.nan)).cause == "not known"
