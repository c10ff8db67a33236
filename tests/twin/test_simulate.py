"""Does the simulator agree with theory where there is one, with itself, and with sense where there is none?

Monte Carlo runs have fixed seeds and 10^5 to 2 · 10^6 requests; each tolerance is at least four standard errors.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.twin.simulator.simulate import (
    Batcher,
    Device,
    Rows,
    SimulatedTraffic,
    batcher_of,
    closed_traffic,
    left_out,
    run_by_events,
    summary_of,
)
from tests.twin.batch_theory import BatchFormer, batch_chain
from tests.twin.early_work import run_early
from tests.twin.queueing_theory import (
    closed_loop_rps,
    md1_mean_wait_s,
    md1_wait_cdf,
    mdc_mean_wait_s,
    mg1_mean_wait_s,
    saturation_rows_per_s,
)
from tests.twin.simulated_run import SimulatedRun, run_of, simulate_closed, simulate_open

SEED = 20_261_121
V100, P4 = (0.1438, 1.8874), (0.5833, 1.4284)


def linear(fit: tuple[float, float], most: int) -> NDArray[np.float64]:
    return fit[1] + fit[0] * np.arange(most + 1)


def poisson_due(rate: float, requests: int, *, seed: int = SEED) -> NDArray[np.float64]:
    """The same gaps for each rate, stretched."""
    return np.cumsum(np.random.default_rng(seed).exponential(1.0, requests)) / rate


def by_events(
    due_s: NDArray[np.float64], batcher: Batcher, device: Device, *, rows: int = 1, replicas: int = 1
) -> SimulatedRun:
    traffic = SimulatedTraffic(due_s=due_s, rows=rows, replicas=replicas)
    return run_of(run_by_events(traffic, batcher, device))


# -- where theory knows --


@pytest.mark.parametrize(
    ("fit", "load", "most", "exact"),
    [
        (V100, 0.1, 64, 3.1459),
        pytest.param(V100, 0.3, 8, 4.4578, marks=pytest.mark.slow),
        (V100, 0.5, 64, 5.9019),
        pytest.param(V100, 0.7, 64, 9.8177, marks=pytest.mark.slow),
        (P4, 0.3, 64, 3.5345),
        (P4, 0.5, 8, 5.1878),
        pytest.param(P4, 0.7, 8, 10.1131, marks=pytest.mark.slow),
        (P4, 0.9, 64, 25.8786),
    ],
)
def test_one_worker_without_timeout_has_the_mean_and_the_p95_of_the_chain(
    fit: tuple[float, float], load: float, most: int, exact: float
) -> None:
    rate, tau = load / fit[0], linear(fit, most)
    run = simulate_open(poisson_due(rate, 2_000_000), 1, Batcher(max_batch_size=most), Device(tau_s=tau))
    chain = batch_chain(rate, tau)
    assert run.mean_latency_s == pytest.approx(exact, rel=0.02)
    assert run.mean_batch_rows == pytest.approx(chain.mean_batch, rel=0.02)
    if load < 0.9:
        assert run.quantile(0.95) == pytest.approx(chain.latency_law().quantile(0.95), rel=0.025)


@pytest.mark.parametrize(
    ("rate", "timeout", "size"),
    [(2.0, 2.0, 8), (1.0, 5.0, 4), pytest.param(4.0, 1.0, 16, marks=pytest.mark.slow)],
)
def test_with_a_thread_always_free_latency_is_that_of_the_batch_former(
    rate: float, timeout: float, size: int
) -> None:
    tau = linear((0.05, 0.2), size)
    batcher = Batcher(max_batch_size=size, batch_timeout_s=timeout, batch_threads=64)
    run = simulate_open(poisson_due(rate, 400_000), 1, batcher, Device(tau_s=tau))
    former = BatchFormer(rate_rps=rate, timeout_s=timeout, size=size)
    assert run.mean_batch_rows == pytest.approx(former.mean_batch, rel=0.01)
    assert run.mean_latency_s == pytest.approx(former.mean_latency_s(tau), rel=0.01)
    for probability in (0.25, 0.5, 0.95, 0.99):
        assert run.quantile(probability) == pytest.approx(
            former.latency_quantile(probability, tau), rel=0.015
        )


def test_batches_of_one_make_m_d_1_and_m_d_c() -> None:
    single, tau = Batcher(max_batch_size=1), np.array([0.0, 1.0])
    run = simulate_open(poisson_due(0.8, 2_000_000), 1, single, Device(tau_s=tau))
    assert run.mean_latency_s - 1.0 == pytest.approx(md1_mean_wait_s(0.8, 1.0), rel=0.02)
    for wait in (0.5, 1.5, 4.0):
        share = float(np.mean(run.latency_s <= 1.0 + wait))
        assert share == pytest.approx(md1_wait_cdf(0.8, 1.0, wait), abs=0.005)
    unbatched = Batcher(max_batch_size=None, batch_threads=4)
    run = simulate_open(poisson_due(3.2, 2_000_000), 1, unbatched, Device(tau_s=tau))
    assert run.mean_latency_s - 1.0 == pytest.approx(mdc_mean_wait_s(3.2, 1.0, 4), rel=0.04)


def test_jitter_has_the_spread_that_pollaczek_and_khinchine_charge_for() -> None:
    jitter = 0.6
    device = Device(tau_s=np.array([0.0, 1.0]), jitter_ratio=jitter)
    run = simulate_open(poisson_due(0.6, 60_000), 1, Batcher(max_batch_size=1), device)
    expected = mg1_mean_wait_s(0.6, 1.0, 1.0 + jitter**2)
    assert run.mean_latency_s - 1.0 == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(
    ("most", "timeout", "clients"), [(16, 0.0, 8), (8, 3.0, 8), (9, 3.0, 8), (8, 3.0, 1), (8, 0.0, 1)]
)
def test_closed_loops_have_the_throughput_of_the_identities(most: int, timeout: float, clients: int) -> None:
    batcher = Batcher(max_batch_size=most, batch_timeout_s=timeout)
    device = Device(tau_s=linear((0.5, 2.0), most))
    summary = summary_of(closed_traffic(clients, 4000, 1), batcher, [device], warm_up_s=100.0)
    expected = closed_loop_rps(clients, per_row_s=0.5, fixed_s=2.0, batch_rows_max=most, timeout_s=timeout)
    assert summary.throughput_rps[0] == pytest.approx(expected, rel=0.01)
    assert summary.mean_latency_s[0] * summary.throughput_rps[0] == pytest.approx(clients, rel=0.01)  # Little


@pytest.mark.parametrize("device", [{}, {"contention": 0.4}, {"contention": 1.0}, {"serial": True}], ids=str)
def test_overload_is_served_at_the_rate_of_saturation(device: dict[str, float]) -> None:
    tau = linear((0.1, 1.0), 16)
    batcher = Batcher(max_batch_size=16, batch_threads=3)
    saturation = saturation_rows_per_s(tau, threads=3, **device)
    traffic = SimulatedTraffic(due_s=poisson_due(1.5 * saturation, 50_000), rows=1)
    summary = summary_of(traffic, batcher, [Device(tau_s=tau, **device)], warm_up_s=50.0)
    assert summary.throughput_rps[0] == pytest.approx(saturation, rel=0.01)
    assert summary.busy_ratio[0] == pytest.approx(1.0, abs=1e-3)


# -- by hand --


def test_a_shared_device_slows_what_runs_together() -> None:
    # κ = 1: alone 0-1 s, two from 1 s on at half the rate each: the first has 1 s of work left, done at 3 s.
    batcher = Batcher(max_batch_size=1, batch_threads=2)
    run = simulate_open(np.array([0.0, 1.0]), 1, batcher, Device(tau_s=np.array([0.0, 2.0]), contention=1.0))
    assert run.latency_s.tolist() == [3.0, 3.0]
    serial = simulate_open(np.array([0.0, 1.0]), 1, batcher, Device(tau_s=np.array([0.0, 2.0]), serial=True))
    assert serial.latency_s.tolist() == [2.0, 3.0]
    assert serial.batch_start_s.tolist() == [0.0, 1.0]  # by its thread


def test_the_front_end_is_one_queue_for_arrivals_and_answers() -> None:
    # Half a second on each side: in at 0.5 and 1; both run 1-2 as one batch but for the first, alone 0.5-1.5.
    device = Device(tau_s=np.array([0.0, 1.0, 1.0]), front_end_s=1.0, delay_s=10.0)
    run = simulate_open(np.array([0.0, 0.0]), 1, Batcher(max_batch_size=2), device)
    # the second waits for the thread until 1.5, runs to 2.5, and is answered half a second later
    assert run.latency_s.tolist() == [12.0, 13.0]
    full = simulate_open(np.array([0.0, 0.0]), 1, Batcher(max_batch_size=2, batch_timeout_s=9.0), device)
    assert full.latency_s.tolist() == [12.5, 13.0]


def test_a_large_request_is_done_with_its_last_part() -> None:
    batcher = Batcher(max_batch_size=10, max_execution_batch_size=4, batch_timeout_s=5.0)
    rows = np.array([3, 6], dtype=np.int32)
    run = simulate_open(np.array([0.0, 1.0]), rows, batcher, Device(tau_s=np.full(5, 2.0)))
    # 3 + 1 rows run 1-3, 4 rows 3-5, the last row times out at 1 + 5 and runs 6-8
    assert run.batch_rows.tolist() == [4, 4, 1]
    assert run.batch_start_s.tolist() == [1.0, 3.0, 6.0]
    assert run.latency_s.tolist() == [3.0, 7.0]
    assert run.batch.tolist() == [0, 0]


def test_padding_costs_the_time_of_the_allowed_size() -> None:
    tau = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    batcher = Batcher(max_batch_size=4, allowed_batch_sizes=(2, 4))
    rows = np.array([1, 3], dtype=np.int32)
    run = simulate_open(np.array([0.0, 10.0]), rows, batcher, Device(tau_s=tau))
    assert run.latency_s.tolist() == [2.0, 4.0]
    assert run.batch_rows.tolist() == [1, 3]
    alone = simulate_open(np.array([0.0]), 3, Batcher(max_batch_size=None), Device(tau_s=tau))
    assert alone.latency_s.tolist() == [3.0]


def test_beyond_the_known_sizes_time_goes_on_in_proportion() -> None:
    run = simulate_open(
        np.array([0.0]), 6, Batcher(max_batch_size=8), Device(tau_s=np.array([0.0, 1.0, 1.5]))
    )
    assert run.latency_s.tolist() == [4.5]


def test_a_full_queue_refuses_and_a_refused_client_comes_again() -> None:
    batcher = Batcher(max_batch_size=1, max_enqueued_batches=1)
    device = Device(tau_s=np.array([0.0, 1.0]))
    run = simulate_open(np.zeros(4), 1, batcher, device)
    assert run.latency_s.tolist() == [1.0, 2.0, math.inf, math.inf]
    assert run.batch.tolist() == [0, 1, -1, -1]
    assert run.error_ratio == 0.5
    assert run.quantile(0.5) == 2.0
    assert math.isinf(run.quantile(0.95))
    closed = simulate_closed(4, 50_000, 1, batcher, device)
    assert closed.throughput_rps == pytest.approx(1.0, rel=0.2)
    assert closed.error_ratio > 0.9


def test_replicas_share_the_requests_as_the_routing_says() -> None:
    due, device = poisson_due(3.0, 20_000), Device(tau_s=np.array([0.0, 1.0]), jitter_ratio=1.0)
    p95 = {
        routing: simulate_open(
            due, 1, Batcher(max_batch_size=1), device, replicas=4, routing=routing, seed=5
        ).quantile(0.95)
        for routing in ("least_loaded", "round_robin", "random")
    }
    assert p95["least_loaded"] < p95["round_robin"] < p95["random"]


def test_one_replica_of_a_round_robin_is_a_server_with_each_nth_request() -> None:
    due, device = poisson_due(9.0, 3000), Device(tau_s=linear((0.1, 0.4), 8), front_end_s=0.01)
    batcher = Batcher(max_batch_size=8, batch_timeout_s=0.3, batch_threads=2)
    together = simulate_open(due, 1, batcher, device, replicas=3)
    for replica in range(3):
        alone = simulate_open(due[replica::3], 1, batcher, device)
        assert np.array_equal(together.latency_s[replica::3], alone.latency_s)


def test_a_closed_loop_over_replicas_keeps_every_client_in_work() -> None:
    device = Device(tau_s=linear((0.5, 2.0), 4), delay_s=0.5, front_end_s=0.01)
    run = simulate_closed(12, 6000, 1, Batcher(max_batch_size=4), device, replicas=3, routing="least_loaded")
    done = np.sort(run.due_s + run.latency_s)
    assert np.all(np.diff(run.due_s) >= 0.0)
    # whoever sends is a client that was answered: never more than 12 under way
    under_way = np.arange(1, 6001) - np.searchsorted(done, run.due_s + 1e-9, side="right")
    assert under_way.max() <= 12
    assert under_way[12:].min() >= 1
    assert np.all(np.isfinite(run.latency_s))


# -- whatever the settings --

settings_drawn = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 12),
        "batch_timeout_s": st.sampled_from([0.0, 0.5, 2.0, 8.0]),
        "batch_threads": st.integers(1, 4),
        "max_enqueued_batches": st.sampled_from([None, None, 1, 3]),
    }
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    drawn=settings_drawn,
    rows=st.sampled_from([1, 1, 2, 3]),
    gap=st.sampled_from([0.05, 0.3, 1.0, 4.0]),
    serial=st.booleans(),
    jitter=st.sampled_from([0.0, 0.5]),
    replicas=st.sampled_from([1, 1, 3]),
    seed=st.integers(0, 10**6),
)
def test_both_kernels_give_the_same_run(
    drawn: dict[str, object], rows: int, gap: float, serial: bool, jitter: float, replicas: int, seed: int
) -> None:
    batcher = Batcher(**{**drawn, "max_batch_size": drawn["max_batch_size"] * rows})
    device = Device(
        tau_s=linear((0.2, 0.7), batcher.max_batch_size),
        serial=serial,
        jitter_ratio=jitter if replicas == 1 else 0.0,
        delay_s=0.25,
    )
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.choice([0.0, gap, 2.0 * gap], 300))  # many ties, in time and with the timeouts
    one, other = (
        simulate_open(due, rows, batcher, device, replicas=replicas),
        by_events(due, batcher, device, rows=rows, replicas=replicas),
    )
    assert np.array_equal(one.latency_s, other.latency_s)
    assert np.array_equal(np.sort(one.batch_start_s), np.sort(other.batch_start_s))
    assert one.duration_s == other.duration_s
    if replicas == 1:
        assert np.array_equal(one.batch, other.batch)
        assert np.array_equal(one.batch_rows, other.batch_rows)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(drawn=settings_drawn, gap=st.sampled_from([0.1, 0.5, 2.0]), seed=st.integers(0, 10**6))
def test_no_request_is_lost_nor_kept_waiting_by_an_idle_thread(
    drawn: dict[str, object], gap: float, seed: int
) -> None:
    batcher, tau = Batcher(**drawn), linear((0.2, 0.7), 12)
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(gap, 200))
    rows = rng.integers(1, batcher.max_batch_size + 2, 200).astype(np.int32)
    run = simulate_open(due, rows, batcher, Device(tau_s=tau))
    served = np.isfinite(run.latency_s)
    assert not served[rows > batcher.max_batch_size].any()
    assert np.array_equal(served, run.batch >= 0)
    assert np.array_equal(np.bincount(run.batch[served], rows[served]), run.batch_rows)
    assert run.batch_rows.max(initial=0) <= batcher.max_batch_size
    assert np.all(run.latency_s >= tau[1] - 1e-9)
    ends = run.batch_start_s + tau[run.batch_rows]
    for batch, start in enumerate(run.batch_start_s):
        arrived = due[run.batch == batch]
        timed_out = arrived[0] + batcher.batch_timeout_s
        if start > timed_out + 1e-9:
            running = (run.batch_start_s < start) & (ends >= start)
            assert np.count_nonzero(running) >= batcher.batch_threads
            assert start in ends


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    threads=st.integers(1, 4),
    contention=st.sampled_from([0.0, 0.5, 1.0]),
    front_end=st.sampled_from([0.0, 0.05]),
    timeout=st.sampled_from([0.0, 1.0]),
    split=st.sampled_from([None, 2, 5]),
    routing=st.sampled_from(["round_robin", "random", "least_loaded"]),
    seed=st.integers(0, 10**6),
)
def test_every_accepted_row_is_run_once_by_whatever_server(
    threads: int,
    contention: float,
    front_end: float,
    timeout: float,
    split: int | None,
    routing: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    due, rows = np.cumsum(rng.exponential(0.2, 300)), rng.integers(1, 11, 300).astype(np.int32)
    batcher = Batcher(
        max_batch_size=10,
        batch_timeout_s=timeout,
        batch_threads=threads,
        max_enqueued_batches=6,
        max_execution_batch_size=split,
    )
    device = Device(tau_s=linear((0.1, 0.4), 10), contention=contention, front_end_s=front_end)
    run = simulate_open(due, rows, batcher, device, replicas=2, routing=routing)
    served = np.isfinite(run.latency_s)
    assert run.batch_rows.sum() == rows[served].sum()
    assert run.batch_rows.max() <= (split or 10)
    assert np.all(run.latency_s >= 0.5 + front_end - 1e-9)
    assert (
        run.duration_s == pytest.approx((due + run.latency_s)[served].max() - due[0], abs=1e-9)
        or due[-1] > (due + run.latency_s)[served].max()
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_p95_grows_with_the_rate_where_nothing_waits_for_a_timeout(threads: int) -> None:
    batcher, device = Batcher(max_batch_size=16, batch_threads=threads), Device(tau_s=linear(V100, 16))
    p95 = [
        simulate_open(poisson_due(rate, 200_000), 1, batcher, device).quantile(0.95)
        for rate in np.linspace(0.3, 3.5, 9) * threads
    ]
    assert all(later >= earlier * 0.995 for earlier, later in pairwise(p95))


def test_with_a_timeout_a_higher_rate_can_be_faster() -> None:
    # The reference says that p95 does not fall with the rate; a batch that fills before its timeout says otherwise.
    batcher, device = Batcher(max_batch_size=8, batch_timeout_s=10.0), Device(tau_s=linear((0.05, 0.5), 8))
    slow, fast = (
        simulate_open(poisson_due(rate, 100_000), 1, batcher, device).quantile(0.95) for rate in (0.5, 3.0)
    )
    assert fast < 0.5 * slow


# -- sums, defaults, refusals --


def test_a_summary_says_what_its_runs_say() -> None:
    due = poisson_due(5.0, 20_000)
    batcher = Batcher(max_batch_size=8, batch_timeout_s=0.2, max_enqueued_batches=2)
    devices = [Device(tau_s=linear((0.1, 0.3), 8) * factor, jitter_ratio=0.2) for factor in (0.8, 1.0, 1.6)]
    traffic = SimulatedTraffic(due_s=due, rows=1, seed=3)
    summary = summary_of(traffic, batcher, devices, warm_up_s=100.0, quantiles=(0.5, 0.95))
    assert summary.latency_s.shape == (3, 2)
    for draw, device in enumerate(devices):
        run = simulate_open(due, 1, batcher, device, seed=3)
        counted, done = due >= 100.0, due + run.latency_s
        ordered = np.sort(run.latency_s[counted])
        assert summary.latency_s[draw, 1] == ordered[math.ceil(0.95 * len(ordered)) - 1]
        assert summary.error_ratio[draw] == pytest.approx(np.isinf(run.latency_s[counted]).mean())
        assert summary.throughput_rps[draw] == pytest.approx(
            np.count_nonzero((done >= 100.0) & (done <= due[-1])) / (due[-1] - 100.0)
        )
        late = run.batch_start_s >= 100.0
        assert summary.mean_batch_rows[draw] == pytest.approx(run.batch_rows[late].mean())
    assert np.all(np.diff(summary.busy_ratio) > 0.0)
    assert summary.error_ratio[2] > 0.0


def test_busy_ratio_is_the_utilisation_law() -> None:
    # U = X E[τ(B)] / E[B]: one worker, so its busy share
    due, tau = poisson_due(2.0, 200_000), linear((0.1, 0.3), 8)
    for device in (Device(tau_s=tau), Device(tau_s=tau, front_end_s=1e-9)):  # either kernel
        traffic = SimulatedTraffic(due_s=due, rows=1)
        summary = summary_of(traffic, Batcher(max_batch_size=8), [device], warm_up_s=0.0)
        assert summary.busy_ratio[0] == pytest.approx(batch_chain(2.0, tau).busy_ratio, rel=0.01)


def test_a_configuration_without_values_has_the_servers_defaults() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert batcher_of(Configuration(batching=None)) == Batcher(max_batch_size=None, batch_threads=4 * cpus)
    assert batcher_of(Configuration(batching=BatchingParameters())) == Batcher(
        max_batch_size=1000, batch_threads=cpus, max_enqueued_batches=10
    )
    told = BatchingParameters(
        max_batch_size=32,
        batch_timeout_micros=1500,
        max_enqueued_batches=7,
        num_batch_threads=3,
        allowed_batch_sizes=(8, 32),
        enable_large_batch_splitting=True,
        max_execution_batch_size=8,
    )
    assert batcher_of(Configuration(batching=told)) == Batcher(
        max_batch_size=32,
        batch_timeout_s=0.0015,
        batch_threads=3,
        max_enqueued_batches=7,
        allowed_batch_sizes=(8, 32),
        max_execution_batch_size=8,
    )
    ignored = BatchingParameters(max_batch_size=32, max_execution_batch_size=8)
    assert batcher_of(Configuration(batching=ignored)).max_execution_batch_size is None


def test_nonsense_is_refused_by_name() -> None:
    batcher, device = Batcher(max_batch_size=4), Device(tau_s=np.array([0.0, 1.0]))
    for due, rows, match in (
        (np.array([1.0, 0.5]), 1, "ascending"),
        (np.array([0.0, np.inf]), 1, "finite"),
        (np.zeros(0), 1, "no request"),
        (np.zeros(2), 0, "at least one row"),
        (np.zeros(2), np.array([1], dtype=np.int32), "for each of 2 requests"),
    ):
        with pytest.raises(ValueError, match=match):
            simulate_open(due, rows, batcher, device)
    with pytest.raises(ValueError, match="client"):
        simulate_closed(0, 5, 1, batcher, device)
    with pytest.raises(ValueError, match="replicas"):
        simulate_open(np.zeros(2), 1, batcher, device, replicas=0)
    with pytest.raises(ValueError, match="batch_threads"):
        Batcher(max_batch_size=4, batch_threads=0)
    with pytest.raises(ValueError, match="max_batch_size"):
        Batcher(max_batch_size=0)
    with pytest.raises(ValueError, match="batch_timeout_s"):
        Batcher(max_batch_size=4, batch_timeout_s=-1.0)
    with pytest.raises(ValueError, match="positive time"):
        Device(tau_s=np.array([0.0, 0.0]))
    with pytest.raises(ValueError, match="contention"):
        Device(tau_s=np.array([0.0, 1.0]), contention=-0.1)


def test_types_of_the_simulator_load_without_the_compiler() -> None:
    code = "import sys, batchtune.twin.simulator.simulate; print('numba' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


# -- early work: requests prepared as they come, while their batch is open --


def early(rows_max: int = 4, *, threads: int = 2, timeout_s: float = 10.0) -> Batcher:
    return Batcher(max_batch_size=rows_max, batch_timeout_s=timeout_s, batch_threads=threads)


def played(
    due_s: NDArray[np.float64], rows: Rows, batcher: Batcher, there: Device, *, early_s: float = 2.0
) -> SimulatedRun:
    return run_of(run_early(SimulatedTraffic(due_s=due_s, rows=rows), batcher, there, early_s))


def device(rows_max: int = 4, *, serial: bool = False) -> Device:
    """3 seconds a batch and 1 a row."""
    return Device(tau_s=3.0 + np.arange(rows_max + 1.0), serial=serial)


def test_a_batch_runs_when_it_is_full_and_prepared() -> None:
    run = played(np.array([0.0, 1.0, 5.0, 6.0]), 1, early(), device())
    # prepared at 2, 4, 7 and 9, then 3 + 4 seconds of the device
    assert run.latency_s.tolist() == [16.0, 15.0, 11.0, 10.0]
    assert run.batch_start_s.tolist() == [9.0]


def test_a_batch_runs_at_its_timeout_where_all_is_prepared_and_one_without_room_opens_the_next() -> None:
    run = played(np.array([0.0, 1.0, 30.0, 31.0]), np.array([1, 2, 3, 2], np.int32), early(), device())
    assert run.batch.tolist() == [0, 0, 1, 2]
    assert run.batch_rows.tolist() == [3, 3, 2]
    # 0 and 1 close at 10, prepared at 6; 30 closes at 31, prepared at 36; 31 times out at 41
    assert run.batch_start_s.tolist() == [10.0, 36.0, 41.0]
    assert run.latency_s.tolist() == [16.0, 15.0, 12.0, 15.0]


def test_a_batch_holds_a_thread_from_its_first_request_and_without_one_requests_are_refused() -> None:
    due_s = np.array([0.0, 1.0, 2.0, 3.0, 12.0, 13.0])
    run = played(due_s, 1, early(2, threads=1), device())
    # 0 and 1 close at 1, are prepared at 4 and hold the thread until 9
    assert run.batch.tolist() == [0, 0, -1, -1, 1, 1]
    assert np.isinf(run.latency_s).tolist() == [False, False, True, True, False, False]
    too_large = played(np.array([0.0, 1.0]), np.array([5, 1], np.int32), early(), device())
    assert too_large.batch.tolist() == [-1, 0]


def test_a_serial_device_takes_one_batch_after_the_other() -> None:
    due_s = np.array([0.0, 0.0, 1.0, 1.0])
    apart = played(due_s, 1, early(2), device(), early_s=0.0)
    assert apart.latency_s.tolist() == [5.0, 5.0, 5.0, 5.0]
    shared = played(due_s, 1, early(2), device(serial=True), early_s=0.0)
    assert shared.latency_s.tolist() == [5.0, 5.0, 9.0, 9.0]


def test_early_work_beats_work_in_the_batch_where_both_take_as_long_as_the_device() -> None:
    """Poisson arrivals, batches that close by their timeout: 5 ms of pre-processing and 6.5 of the device in a batch of
    10; as a unit each batch takes both one after the other."""
    due_s = np.cumsum(np.random.default_rng(SEED).exponential(1 / 500, 20_000))
    rows = np.arange(17)
    tau_s, pre_s = 0.004 + 0.00025 * rows, 0.0005
    in_batch = simulate_open(
        due_s,
        1,
        Batcher(max_batch_size=16, batch_timeout_s=0.02, batch_threads=3, max_enqueued_batches=100),
        Device(tau_s=tau_s + pre_s * rows),
    )
    streaming = Batcher(max_batch_size=16, batch_timeout_s=0.02, batch_threads=3)
    as_it_comes = played(due_s, 1, streaming, Device(tau_s=tau_s), early_s=pre_s)
    assert as_it_comes.error_ratio < 1e-3
    assert as_it_comes.quantile(0.95) < in_batch.quantile(0.95) - 0.003


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="close by a timeout above 0"):
        played(np.array([0.0]), 1, early(timeout_s=0.0), device())
    with pytest.raises(ValueError, match="early work takes a time"):
        played(np.array([0.0]), 1, early(), device(), early_s=math.nan)
    with pytest.raises(ValueError, match="without front end or contention"):
        played(np.array([0.0]), 1, early(), Device(tau_s=np.ones(5), contention=0.5))


def test_a_calibrated_twin_says_that_it_takes_another_scheduler_for_the_shared_one() -> None:
    """Nobody has measured for it how long the work on a request takes."""
    streaming = Configuration(batching=BatchingParameters(), flags=(("batch_scheduler", "streaming"),))
    assert left_out(streaming) == ("the streaming scheduler is simulated as the shared one",)
    assert left_out(Configuration(batching=BatchingParameters())) == ()
