"""A limit is judged while and after a run, of a window that begins after the transient; drift is told from bursts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchtune.load.fleet import LiveAggregate
from batchtune.measure.slo import (
    SURE,
    Limit,
    SloWatch,
    Window,
    likelihood_ratio,
    limits_of,
    parts_differ,
    primary_limit,
    strict_decision,
    times_longer,
    window_of,
)
from tests.measure.measure_streams import (
    Promise,
    batch_streams,
    exact_batch,
    exact_latency,
    linear_tau,
    looks,
    make_samples,
    poisson_due,
    queue_latencies,
)

P95 = Limit(name="p95", quantile=0.95, seconds=0.02)


SINGLE_LOOK = {59: (0, 7), 100: (1, 10), 200: (4, 16), 300: (8, 22), 500: (16, 34), 1000: (38, 63)}


SINGLE_LOOK |= {2000: (83, 117), 5000: (224, 277)}


Streams = tuple[NDArray[np.float64], NDArray[np.float64]]


TAU_S = linear_tau(0.0015, 0.0003, 16)


def live(elapsed_s: float, **counts: int) -> LiveAggregate:
    plain = {"sent": 0, "done": 0, "errors": 0, "late": 0, "in_flight": 0, "overdue": 0}
    return LiveAggregate(elapsed_s=elapsed_s, throughput_rps=0.0, p50_s=0.0, p95_s=0.0, **(plain | counts))


def watch(**changes: object) -> SloWatch:
    plan = {"limit": P95, "error_ratio": 0.01, "warm_up_s": 1.0, "rate_rps": 500.0}
    return SloWatch(**(plan | changes))


def watching(**changes: object) -> SloWatch:
    """From the end of its warm-up on."""
    one = watch(**changes)
    one(live(1.0))
    return one


@pytest.mark.parametrize(("requests", "bounds"), SINGLE_LOOK.items())
def test_single_looks_have_the_reference_bounds(requests: int, bounds: tuple[int, int]) -> None:
    passing, failing = bounds
    decisions = {misses: strict_decision(requests, misses, 0.05) for misses in range(failing + 3)}
    assert max(misses for misses, decision in decisions.items() if decision == "PASS") == passing
    assert min(misses for misses, decision in decisions.items() if decision == "FAIL") == failing


@settings(deadline=None)
@given(
    requests=st.integers(1, 5000),
    share=st.floats(0, 1),
    effect=st.floats(1, 50),
)
def test_correlation_makes_no_verdict_surer(requests: int, share: float, effect: float) -> None:
    misses = int(share * requests)
    widened = strict_decision(requests, misses, 0.05, design_effect=effect)
    assert widened in {"UNSURE", strict_decision(requests, misses, 0.05)}


def test_the_watched_limit_is_p95_when_it_is_promised() -> None:
    promise = Promise(promised={"p99": 0.1, "p50": 0.01, "p95": 0.05})
    assert [each.name for each in limits_of(promise)] == ["p50", "p95", "p99"]
    assert primary_limit(promise) == Limit(name="p95", quantile=0.95, seconds=0.05)
    assert primary_limit(Promise(promised={})) is None


def test_wald_steps_are_those_of_the_reference() -> None:
    assert likelihood_ratio(1, 1, 0.05) == pytest.approx(0.693, abs=1e-3)
    assert likelihood_ratio(1, 0, 0.05) == pytest.approx(-0.0369, abs=1e-4)
    assert pytest.approx(2.944, abs=1e-3) == SURE


def test_independent_requests_get_a_clear_verdict_within_150() -> None:
    """SPRT on Bernoulli misses; medians over 400 runs, seed fixed; the reference expects 99, 82 and 27."""
    generator = np.random.default_rng(1)
    medians = {}
    for share in (0.0, 0.01, 0.1, 0.2):
        steps = np.where(
            generator.random((400, 2000)) < share, likelihood_ratio(1, 1, 0.05), likelihood_ratio(1, 0, 0.05)
        )
        crossed = np.abs(np.cumsum(steps, axis=1)) >= SURE
        medians[share] = float(np.median(np.argmax(crossed, axis=1) + 1))
    assert max(medians.values()) <= 150


def decisions(streams: Streams, limit_s: float, *, every_s: float, **plan: object) -> Counter[str]:
    """How the watches of these streams end."""
    limit = Limit(name="p95", quantile=0.95, seconds=limit_s)
    found: Counter[str] = Counter()
    for due_s, latency_s in zip(*streams, strict=True):
        one = watch(limit=limit, warm_up_s=0.5, **plan)
        any(one(each) for each in looks(due_s, latency_s, limit_s=limit_s, every_s=every_s))
        found[one.decision] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rate_rps", "streams", "most"), [(700.0, 150, 12), (1500.0, 150, 12)])
def test_wrong_verdicts_at_the_edge_stay_within_one_in_twenty(
    rate_rps: float, streams: int, most: int
) -> None:
    """Batch-correlated streams a side; a true 5 % shows more than so many in 4 of 100; the seed is fixed."""
    law = exact_latency(rate_rps, TAU_S, steps=32)
    made = batch_streams(rate_rps, TAU_S, streams=streams, requests=6000, seed=7)
    plan = {"rate_rps": rate_rps, "requests_per_batch": exact_batch(rate_rps, TAU_S), "batch_rows_max": 16}
    for misses, wrong in ((0.07, "PASS"), (0.035, "FAIL")):
        assert decisions(made, law.quantile(1 - misses), every_s=0.1, **plan)[wrong] <= most


@pytest.mark.slow
@pytest.mark.parametrize(("rate_rps", "misses", "most"), [(800.0, 0.07, 20), (900.0, 0.2, 5)])
def test_without_batching_a_pass_waits_until_slow_spells_have_shown(
    rate_rps: float, misses: float, most: int
) -> None:
    """100 streams of M/D/1, 1 ms a request, for 4 s. At 90 % load half a second of requests says nothing yet: decided
    at once, 65 and 26 of 100 passed, now 8 and none; the seed is fixed, and a true 13 % and 1 % exceed the bounds in
    1 of 50 and 1 of 1,000 seeds."""
    tau_s = linear_tau(0.001, 0.0, 1)
    limit_s = exact_latency(rate_rps, tau_s).quantile(1 - misses)
    made = batch_streams(rate_rps, tau_s, streams=100, requests=int(4.5 * rate_rps), seed=3)
    assert decisions(made, limit_s, every_s=0.25, rate_rps=rate_rps)["PASS"] <= most


def test_the_warm_up_does_not_count() -> None:
    one = watch(batch_rows_max=16)
    assert not one(live(0.5, done=200, late=200))
    assert not one(live(1.0, done=500, late=500))
    assert not one(live(1.1, done=550, late=500))
    assert (one.requests, one.misses) == (50, 0)
    assert one(live(2.0, done=1000, late=500))
    assert one.decision == "PASS"
    assert one(live(2.1, done=1000, late=900))


def test_overdue_requests_are_misses_before_they_end() -> None:
    one = watching()
    assert one(live(1.1, sent=50, in_flight=50, overdue=40))
    assert one.decision == "FAIL"


def test_a_backlog_beyond_littles_law_fails_once_it_lasts() -> None:
    one = watching()
    assert not one(live(1.1, in_flight=80))
    assert not one(live(1.3, in_flight=10))
    assert not one(live(1.4, in_flight=80))
    assert one(live(1.8, in_flight=80))
    assert one.decision == "FAIL"


def test_a_backlog_says_nothing_in_a_closed_loop() -> None:
    one = watching(rate_rps=None)
    assert not any(one(live(1.0 + 0.1 * step, in_flight=500)) for step in range(1, 20))


def test_a_steady_drift_fails_before_the_backlog_is_large() -> None:
    one = watching(limit=Limit(name="p95", quantile=0.95, seconds=0.2))
    steps = ({"done": 47 * step, "sent": 50 * step, "in_flight": 3 * step} for step in range(1, 40))
    assert any(one(live(1 + 0.1 * at, **counts)) for at, counts in enumerate(steps, 1))
    assert one.decision == "FAIL"


def test_slight_overload_does_not_pass_while_its_backlog_still_fits() -> None:
    one = watching(limit=Limit(name="p95", quantile=0.95, seconds=0.2))
    steps = range(1, 15)
    assert not any(
        one(live(1 + 0.1 * step, done=49 * step, sent=50 * step, in_flight=step)) for step in steps
    )


def test_many_errors_end_a_run() -> None:
    one = watching()
    assert not one(live(1.1, done=90, errors=3))
    assert one(live(1.4, done=200, errors=8))
    assert one.decision == "FAIL"


def test_looking_often_at_fewer_errors_than_allowed_ends_no_run() -> None:
    """200 runs of 80 looks, half of the allowed errors, 16 of a batch at a time; at a twentieth each, one run in three
    ended. More than 10 of 200 would show in less than 1 of 100 seeds; the seed is fixed."""
    generator = np.random.default_rng(6)
    ended = 0
    for _ in range(200):
        errors = np.cumsum(np.repeat(generator.random(625) < 0.005, 16))
        one = watching(requests_per_batch=16.0, batch_rows_max=16)
        for look in range(1, 80):
            done = look * 125
            one(live(1.0 + 0.25 * look, done=done, errors=int(errors[done - 1])))
        ended += one.decision == "FAIL"
    assert ended <= 10


def test_where_no_error_is_allowed_one_ends_the_run() -> None:
    one = watching(error_ratio=0.0, batch_rows_max=16)
    assert not one(live(1.2, done=99, errors=1))
    assert one(live(1.4, done=200, errors=1))
    assert one.decision == "FAIL"


def test_large_batches_delay_a_pass() -> None:
    small, large = watching(batch_rows_max=16), watching(requests_per_batch=20.0, batch_rows_max=32)
    for one, decision in ((small, "PASS"), (large, "UNSURE")):
        one(live(2.0, done=500))
        assert one.decision == decision


def test_how_much_longer_a_run_must_last_for_a_verdict() -> None:
    """0 misses of 59 independent requests show a p95, 0 of 34 do not; at the limit itself no length is enough."""
    times = times_longer(340, 0, 0.05, design_effect=10.0)
    assert times is not None
    assert 59 / 34 <= times <= 1.25 * 59 / 34
    assert times_longer(1000, 50, 0.05, design_effect=1.0) is None


STREAMS = 60


def windows(due_s: NDArray[np.float64], latency_s: NDArray[np.float64]) -> list[Window]:
    return [
        window_of(make_samples(due, latency), warm_up_s=0.0)
        for due, latency in zip(due_s, latency_s, strict=True)
    ]


def unsteady(due_s: NDArray[np.float64], latency_s: NDArray[np.float64]) -> int:
    return sum(not window.steady for window in windows(due_s, latency_s))


def bursts(phase_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """20 s of 600 requests/s on average, five times as many in a busy phase as in a quiet one; 1 ms of service."""
    generator = np.random.default_rng(8)
    due_s = np.empty((STREAMS, 12_000))
    for row in due_s:
        lengths = generator.exponential(phase_s, 2 * int(40 / phase_s))
        ends = np.concatenate(([0.0], np.cumsum(lengths)))
        reached = np.concatenate(([0.0], np.cumsum(lengths * np.resize((1000.0, 200.0), len(lengths)))))
        row[:] = np.interp(np.cumsum(generator.exponential(1.0, len(row))), reached, ends)
    return due_s, queue_latencies(due_s, np.full(due_s.shape, 0.001))


@pytest.mark.parametrize("phase_s", [0.05, 0.5])
def test_bursts_are_no_drift(phase_s: float) -> None:
    """MSER-5 alone called 9 and 48 of 100 such runs unsteady. More than 4 of 60 would show in 1 of 100 seeds at a true
    2 %; the seed is fixed."""
    assert unsteady(*bursts(phase_s)) <= 4


@pytest.mark.parametrize("load", [pytest.param(0.6, marks=pytest.mark.slow), 0.9])
def test_a_steady_batch_server_is_steady_and_loses_little_of_its_run(load: float) -> None:
    """15 s each; the same bound as above."""
    rate_rps = load * 16 / TAU_S[16]
    due_s, latency_s = batch_streams(
        rate_rps, TAU_S, streams=STREAMS, requests=int(15 * rate_rps) + 2000, seed=3
    )
    found = windows(due_s[:, 2000:] - due_s[:, 2000:2001], latency_s[:, 2000:])
    assert sum(not window.steady for window in found) <= 4
    assert np.mean([window.start_ns / window.end_ns for window in found]) <= 0.02


def test_a_little_overload_is_told() -> None:
    """2 % above saturation for 15 s: 98 of 100 were found; fewer than 54 of 60 in 1 of 1,000 seeds."""
    rate_rps = 1.02 * 16 / TAU_S[16]
    streams = batch_streams(rate_rps, TAU_S, streams=STREAMS, requests=int(15 * rate_rps), seed=3)
    assert unsteady(*streams) >= 54


@pytest.mark.parametrize("at", [0.45, 0.55])
def test_a_server_that_slows_down_by_half_midway_is_told(at: float) -> None:
    """M/M/1 at 50 % load, then 75 %, 20 s: nine of ten are found; fewer than 45 of 60 in 1 of 1,000 seeds."""
    generator = np.random.default_rng(4)
    due_s = poisson_due(500.0, streams=STREAMS, requests=10_000, generator=generator)
    service_s = generator.exponential(0.001, due_s.shape)
    service_s[:, int(at * 10_000) :] *= 1.5
    assert unsteady(due_s, queue_latencies(due_s, service_s)) >= 45


def test_a_slow_start_is_cut() -> None:
    """The first second of 20 s at 85 % load instead of 50 %: nearly all are cut there; fewer than 54 in 1 of 1,000."""
    generator = np.random.default_rng(5)
    due_s = poisson_due(500.0, streams=STREAMS, requests=10_000, generator=generator)
    service_s = generator.exponential(0.001, due_s.shape)
    service_s[:, :500] *= 1.7
    starts_s = [window.start_ns / 1e9 for window in windows(due_s, queue_latencies(due_s, service_s))]
    assert sum(0.7 <= start <= 2.0 for start in starts_s) >= 54


@pytest.mark.parametrize(("values", "cut"), [(np.ones(100), 0), (np.ones(100), 100), (np.ones(39), 20)])
def test_too_little_to_compare_does_not_differ(values: NDArray[np.float64], cut: int) -> None:
    assert not parts_differ(values, cut)


def test_a_plain_step_differs() -> None:
    assert parts_differ(np.repeat((1.0, 2.0), 50), 50)
