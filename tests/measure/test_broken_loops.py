"""Closed loops whose server breaks, hangs or is slow: every request that fails in the time asked for counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from batchtune.load.samples import Samples, Status
from batchtune.measure.measurement import Measurement, measure
from batchtune.measure.slo import between_answers, window_of
from batchtune.report.findings import text_of
from tests.measure.measure_streams import make_samples, p95_within

pytestmark = pytest.mark.smoke

Answer = Callable[[int, float], tuple[float, Status]]
"""(client, second at which it sends) -> (latency in s, status)."""


def closed_loop(clients: int, answer: Answer, *, duration_s: float, drain_s: float) -> Samples:
    """Return the samples of a loop in which each client sends as soon as it has its answer; what is not
    answered `drain_s` after the end is UNFINISHED."""
    rows = []
    for client in range(clients):
        due_s = 0.0
        while due_s < duration_s:
            latency_s, status = answer(client, due_s)
            if due_s + latency_s > duration_s + drain_s:
                latency_s, status = duration_s + drain_s - due_s, Status.UNFINISHED
            rows.append((due_s, latency_s, int(status)))
            due_s += latency_s
    due_s, latency_s, status = np.array(sorted(rows)).T
    samples = make_samples(due_s, latency_s, status=status.astype(np.uint8), concurrency=clients)
    return replace(samples, wall_s=max(samples.wall_s, duration_s + drain_s))


def measured(
    samples: Samples, *, duration_s: float, limit_s: float = 1.0, errors: float = 0.4
) -> Measurement:
    window = between_answers(samples, window_of(samples, warm_up_s=1.0, duration_s=duration_s))
    slo = p95_within(limit_s, error_ratio=errors)
    return measure(samples, warm_up_s=1.0, slo=slo, duration_s=duration_s, window=window)


def breaks_at(second: float, *, answer_s: float, quick_s: float) -> Answer:
    def answer(_client: int, due_s: float) -> tuple[float, Status]:
        if due_s < second:
            return answer_s, Status.OK
        return quick_s, Status.SERVER_ERROR

    return answer


def hangs_at(second: float, *, answer_s: float, clients: int, timeout_s: float) -> Answer:
    """From `second` on the first `clients` clients get no answer within the timeout."""

    def answer(client: int, due_s: float) -> tuple[float, Status]:
        if client < clients and due_s >= second:
            return timeout_s, Status.TIMEOUT
        return answer_s + 0.001 * client, Status.OK

    return answer


@pytest.mark.parametrize(("clients", "duration_s", "answer_s"), [(4, 4.0, 0.25), (8, 20.0, 2.0)])
def test_a_server_that_breaks_in_the_middle_fails_with_all_its_failures(
    clients: int, duration_s: float, answer_s: float
) -> None:
    answer = breaks_at(duration_s / 2, answer_s=answer_s, quick_s=0.005)
    samples = closed_loop(clients, answer, duration_s=duration_s, drain_s=5.0)
    due_in_time = samples.due_ns < duration_s * 1e9
    failed = int(np.count_nonzero(due_in_time & (samples.status == Status.SERVER_ERROR)))
    result = measured(samples, duration_s=duration_s)
    whole = (duration_s - 1.0, {"server_error": failed}, "FAIL")
    assert (result.window_s, result.errors, result.verdict) == whole


def test_a_server_that_hangs_in_the_middle_fails_by_its_timeouts() -> None:
    answer = hangs_at(2.6, answer_s=0.5, clients=8, timeout_s=20.0)
    samples = closed_loop(8, answer, duration_s=8.0, drain_s=20.0)
    result = measured(samples, duration_s=8.0, errors=0.15)
    assert (result.window_s, result.errors, result.verdict) == (7.0, {"timeout": 8}, "FAIL")


def test_a_server_that_hangs_fails_where_the_run_ends_before_the_timeout() -> None:
    answer = hangs_at(2.6, answer_s=0.5, clients=8, timeout_s=60.0)
    samples = closed_loop(8, answer, duration_s=8.0, drain_s=1.0)
    assert measured(samples, duration_s=8.0, errors=0.2).errors == {"unfinished": 8}


def test_clients_that_wait_from_the_warm_up_to_the_end_count_as_failed() -> None:
    answer = hangs_at(0.0, answer_s=0.5, clients=3, timeout_s=20.0)
    samples = closed_loop(8, answer, duration_s=8.0, drain_s=20.0)
    result = measured(samples, duration_s=8.0)
    assert result.errors == {"timeout": 3}
    silent = hangs_at(0.0, answer_s=0.5, clients=8, timeout_s=20.0)
    result = measured(closed_loop(8, silent, duration_s=8.0, drain_s=20.0), duration_s=8.0)
    assert (result.requests, result.error_ratio, result.verdict) == (8, 1.0, "FAIL")
    assert "8 of 8 requests failed" in text_of(result.verdict_reason)


def test_an_answer_that_comes_after_the_end_of_a_hang_counts_with_its_latency() -> None:
    def answer(_client: int, due_s: float) -> tuple[float, Status]:
        return (9.0 if due_s >= 2.6 else 0.5), Status.OK

    result = measured(closed_loop(8, answer, duration_s=8.0, drain_s=20.0), duration_s=8.0)
    assert result.latency_s["p95"].value == pytest.approx(9.0)
    assert result.misses == 8


@pytest.mark.parametrize("drain_s", [0.1, 20.0])
def test_the_window_of_a_healthy_loop_of_few_turns_still_ends_with_an_answer(drain_s: float) -> None:
    def answer(client: int, _due_s: float) -> tuple[float, Status]:
        return 0.7 + 0.0001 * client, Status.OK

    samples = closed_loop(8, answer, duration_s=4.0, drain_s=drain_s)
    asked = window_of(samples, warm_up_s=1.0, duration_s=4.0)
    window = between_answers(samples, asked)
    answered_ns = samples.done_ns[samples.status == Status.OK]
    assert window.start_ns == np.max(answered_ns[answered_ns < 1e9]) + 1
    assert window.end_ns == np.max(answered_ns[answered_ns < 4e9]) + 1
    assert measured(samples, duration_s=4.0).throughput_rps.value == pytest.approx(8 / 0.7, rel=1e-3)


def test_failures_of_a_slow_start_are_not_cut_off_with_it() -> None:
    def answer(_client: int, due_s: float) -> tuple[float, Status]:
        if due_s < 6.0:
            return 0.2, Status.SERVER_ERROR if int(due_s * 10) % 4 == 0 else Status.OK
        return 0.01 + 0.001 * (int(due_s * 1e4) % 7), Status.OK

    samples = closed_loop(4, answer, duration_s=20.0, drain_s=1.0)
    failed = np.count_nonzero((samples.status == Status.SERVER_ERROR) & (samples.due_ns >= 1e9))
    assert measured(samples, duration_s=20.0).errors == {"server_error": failed}
