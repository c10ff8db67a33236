"""Does a run begin after its transient, and is drift told from the ups and downs of a steady load?"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from batchtune.measure.slo import Window, parts_differ, window_of
from tests.measure.measure_streams import (
    batch_streams,
    linear_tau,
    make_samples,
    poisson_due,
    queue_latencies,
)

STREAMS = 60
TAU_S = linear_tau(0.0015, 0.0003, 16)


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
