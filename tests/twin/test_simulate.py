"""Does the simulator agree with theory where there is one, with itself, and with sense where there is none?

Monte Carlo runs have fixed seeds and 10^5 to 2 · 10^6 requests; each tolerance is at least four standard errors. What theory
says is written out: one worker that takes all that waits is the chain of Inoue, "Queueing analysis of GPU-based inference
servers with dynamic batching" (2021), with a largest batch and solved to 2048 states (its unlimited ones are his figures);
batches that close by size or timeout with a thread always free follow from Poisson arrivals; M/D/1's distribution is
Erlang's, M/D/c's mean Cosmetatos' (1975).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.twin.simulator.simulate import (
    Batcher,
    Device,
    SimulatedTraffic,
    batcher_of,
    closed_traffic,
    left_out,
    run_by_events,
    summary_of,
)
from tests.twin.simulated_run import run_of, simulate_closed, simulate_open

SEED = 20_261_121
V100, P4 = (0.1438, 1.8874), (0.5833, 1.4284)


def linear(fit: tuple[float, float], most: int) -> NDArray[np.float64]:
    return fit[1] + fit[0] * np.arange(most + 1)


def poisson_due(rate: float, requests: int, *, seed: int = SEED) -> NDArray[np.float64]:
    """The same gaps for each rate, stretched."""
    return np.cumsum(np.random.default_rng(seed).exponential(1.0, requests)) / rate


# -- where theory knows --


@pytest.mark.parametrize(
    ("fit", "load", "most", "mean_s", "mean_batch", "p95_s"),
    [
        (V100, 0.1, 64, 3.1459, 1.7115, 4.3192),
        pytest.param(V100, 0.3, 8, 4.4578, 5.6309, 6.5740, marks=pytest.mark.slow),
        (V100, 0.5, 64, 5.9019, 13.1252, 8.3170),
        pytest.param(V100, 0.7, 64, 9.8177, 30.6254, 14.1906, marks=pytest.mark.slow),
        (P4, 0.3, 64, 3.5345, 1.4988, 5.6947),
        (P4, 0.5, 8, 5.1878, 2.6511, 8.6027),
        pytest.param(P4, 0.7, 8, 10.1131, 5.7537, 19.4748, marks=pytest.mark.slow),
        (P4, 0.9, 64, 25.8786, 22.0408, None),
    ],
)
def test_one_worker_without_timeout_has_the_mean_and_the_p95_of_the_chain(
    fit: tuple[float, float], load: float, most: int, mean_s: float, mean_batch: float, p95_s: float | None
) -> None:
    due_s = poisson_due(load / fit[0], 2_000_000)
    run = simulate_open(due_s, 1, Batcher(max_batch_size=most), Device(tau_s=linear(fit, most)))
    assert run.mean_latency_s == pytest.approx(mean_s, rel=0.02)
    assert run.mean_batch_rows == pytest.approx(mean_batch, rel=0.02)
    assert p95_s is None or run.quantile(0.95) == pytest.approx(p95_s, rel=0.025)


@pytest.mark.parametrize(
    ("rate", "timeout", "size", "mean_batch", "mean_s", "quantiles_s"),
    [
        (2.0, 2.0, 8, 4.9152, 1.6257, [1.0493, 1.6647, 2.5, 2.55]),
        (1.0, 5.0, 4, 3.8282, 1.8414, [0.4793, 1.4654, 4.9282, 5.35]),
        pytest.param(4.0, 1.0, 16, 5.0, 1.09, [0.8123, 1.125, 1.55, 1.65], marks=pytest.mark.slow),
    ],
)
def test_with_a_thread_always_free_latency_is_that_of_the_batch_former(
    rate: float, timeout: float, size: int, mean_batch: float, mean_s: float, quantiles_s: list[float]
) -> None:
    batcher = Batcher(max_batch_size=size, batch_timeout_s=timeout, batch_threads=64)
    run = simulate_open(poisson_due(rate, 400_000), 1, batcher, Device(tau_s=linear((0.05, 0.2), size)))
    assert run.mean_batch_rows == pytest.approx(mean_batch, rel=0.01)
    assert run.mean_latency_s == pytest.approx(mean_s, rel=0.01)
    assert [run.quantile(p) for p in (0.25, 0.5, 0.95, 0.99)] == pytest.approx(quantiles_s, rel=0.015)


def test_batches_of_one_make_m_d_1_and_m_d_c() -> None:
    single, tau = Batcher(max_batch_size=1), np.array([0.0, 1.0])
    run = simulate_open(poisson_due(0.8, 2_000_000), 1, single, Device(tau_s=tau))
    assert run.mean_latency_s - 1.0 == pytest.approx(2.0, rel=0.02)
    shares = [float(np.mean(run.latency_s <= 1.0 + wait)) for wait in (0.5, 1.5, 4.0)]
    assert shares == pytest.approx([0.2984, 0.5447, 0.8454], abs=0.005)
    unbatched = Batcher(max_batch_size=None, batch_threads=4)
    run = simulate_open(poisson_due(3.2, 2_000_000), 1, unbatched, Device(tau_s=tau))
    assert run.mean_latency_s - 1.0 == pytest.approx(0.38543, rel=0.04)


def test_jitter_has_the_spread_that_pollaczek_and_khinchine_charge_for() -> None:
    jitter, rate = 0.6, 0.6
    device = Device(tau_s=np.array([0.0, 1.0]), jitter_ratio=jitter)
    run = simulate_open(poisson_due(rate, 60_000), 1, Batcher(max_batch_size=1), device)
    expected = rate * (1.0 + jitter**2) / (2.0 * (1.0 - rate))
    assert run.mean_latency_s - 1.0 == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(
    ("most", "timeout", "clients", "batch_s"),
    [(16, 0.0, 8, 8.0), (8, 3.0, 8, 6.0), (9, 3.0, 8, 9.0), (8, 3.0, 1, 5.5), (8, 0.0, 1, 2.5)],
)
def test_closed_loops_have_the_throughput_of_the_identities(
    most: int, timeout: float, clients: int, batch_s: float
) -> None:
    """Without a timeout k and N - k requests alternate, and a client waits for both; with one all N wait together."""
    batcher = Batcher(max_batch_size=most, batch_timeout_s=timeout)
    device = Device(tau_s=linear((0.5, 2.0), most))
    summary = summary_of(closed_traffic(clients, 4000, 1), batcher, [device], warm_up_s=100.0)
    assert summary.throughput_rps[0] == pytest.approx(clients / batch_s, rel=0.01)
    assert summary.mean_latency_s[0] * summary.throughput_rps[0] == pytest.approx(clients, rel=0.01)  # Little


@pytest.mark.parametrize(
    ("device", "batches_at_once"),
    [({}, 3.0), ({"contention": 0.4}, 3.0 / 1.8), ({"contention": 1.0}, 1.0), ({"serial": True}, 1.0)],
)
def test_overload_is_served_at_the_rate_of_saturation(
    device: dict[str, float], batches_at_once: float
) -> None:
    tau = linear((0.1, 1.0), 16)
    batcher = Batcher(max_batch_size=16, batch_threads=3)
    saturation = batches_at_once * 16 / float(tau[16])
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
    known = Device(tau_s=np.array([0.0, 1.0, 1.5]))
    assert simulate_open(np.zeros(1), 6, Batcher(max_batch_size=8), known).latency_s.tolist() == [4.5]


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
    batcher, fleet = Batcher(max_batch_size=1), {"replicas": 4, "seed": 5}
    least, even, chance = (
        simulate_open(due, 1, batcher, device, routing=routing, **fleet).quantile(0.95)
        for routing in ("least_loaded", "round_robin", "random")
    )
    assert least < even < chance


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


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    drawn=st.fixed_dictionaries(
        {
            "max_batch_size": st.integers(1, 12),
            "batch_timeout_s": st.sampled_from([0.0, 0.5, 2.0, 8.0]),
            "batch_threads": st.integers(1, 4),
            "max_enqueued_batches": st.sampled_from([None, None, 1, 3]),
        }
    ),
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
    one = simulate_open(due, rows, batcher, device, replicas=replicas)
    traffic = SimulatedTraffic(due_s=due, rows=rows, replicas=replicas)
    other = run_of(run_by_events(traffic, batcher, device))
    assert np.array_equal(one.latency_s, other.latency_s)
    assert np.array_equal(np.sort(one.batch_start_s), np.sort(other.batch_start_s))
    assert one.duration_s == other.duration_s
    if replicas == 1:
        assert np.array_equal(one.batch, other.batch)
        assert np.array_equal(one.batch_rows, other.batch_rows)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    told=st.fixed_dictionaries(
        {
            "batch_threads": st.integers(1, 4),
            "batch_timeout_s": st.sampled_from([0.0, 1.0]),
            "max_execution_batch_size": st.sampled_from([None, 2, 5]),
        }
    ),
    contention=st.sampled_from([0.0, 0.5, 1.0]),
    front_end=st.sampled_from([0.0, 0.05]),
    routing=st.sampled_from(["round_robin", "random", "least_loaded"]),
    seed=st.integers(0, 10**6),
)
def test_every_accepted_row_is_run_once_by_whatever_server(
    told: dict[str, Any], contention: float, front_end: float, routing: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    due, rows = np.cumsum(rng.exponential(0.2, 300)), rng.integers(1, 11, 300).astype(np.int32)
    batcher = Batcher(max_batch_size=10, max_enqueued_batches=6, **told)
    device = Device(tau_s=linear((0.1, 0.4), 10), contention=contention, front_end_s=front_end)
    run = simulate_open(due, rows, batcher, device, replicas=2, routing=routing)
    served = np.isfinite(run.latency_s)
    assert run.batch_rows.sum() == rows[served].sum()
    assert run.batch_rows.max() <= (batcher.max_execution_batch_size or 10)
    assert np.all(run.latency_s >= 0.5 + front_end - 1e-9)
    last = (due + run.latency_s)[served].max()
    assert run.duration_s == pytest.approx(last - due[0], abs=1e-9) or due[-1] > last


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
    # U = X E[τ(B)] / E[B]: one worker, so its busy share, of the chain
    due, tau = poisson_due(2.0, 200_000), linear((0.1, 0.3), 8)
    for device in (Device(tau_s=tau), Device(tau_s=tau, front_end_s=1e-9)):  # either kernel
        traffic = SimulatedTraffic(due_s=due, rows=1)
        summary = summary_of(traffic, Batcher(max_batch_size=8), [device], warm_up_s=0.0)
        assert summary.busy_ratio[0] == pytest.approx(0.66718, rel=0.01)


def test_a_configuration_without_values_has_the_servers_defaults() -> None:
    cpus = len(os.sched_getaffinity(0))
    splits = {"max_execution_batch_size": 8, "enable_large_batch_splitting": True}
    told = {"max_enqueued_batches": 7, "num_batch_threads": 3, "allowed_batch_sizes": (8, 32), **splits}
    taken = {"max_enqueued_batches": 7, "batch_threads": 3, "allowed_batch_sizes": (8, 32)}
    for batching, batcher in (
        (None, Batcher(max_batch_size=None, batch_threads=4 * cpus)),
        (
            BatchingParameters(),
            Batcher(max_batch_size=1000, batch_threads=cpus, max_enqueued_batches=10),
        ),
        (
            BatchingParameters(max_batch_size=32, batch_timeout_micros=1500, **told),
            Batcher(max_batch_size=32, batch_timeout_s=0.0015, max_execution_batch_size=8, **taken),
        ),
        (
            BatchingParameters(max_batch_size=32, max_execution_batch_size=8),
            Batcher(max_batch_size=32, batch_threads=cpus, max_enqueued_batches=10),
        ),
    ):
        assert batcher_of(Configuration(batching=batching)) == batcher


ONE = Batcher(max_batch_size=4), Device(tau_s=np.array([0.0, 1.0]))


@pytest.mark.parametrize(
    ("nonsense", "match"),
    [
        (lambda: simulate_open(np.array([1.0, 0.5]), 1, *ONE), "ascending"),
        (lambda: simulate_open(np.array([0.0, np.inf]), 1, *ONE), "finite"),
        (lambda: simulate_open(np.zeros(0), 1, *ONE), "no request"),
        (lambda: simulate_open(np.zeros(2), 0, *ONE), "at least one row"),
        (lambda: simulate_open(np.zeros(2), np.array([1], np.int32), *ONE), "for each of 2 requests"),
        (lambda: simulate_open(np.zeros(2), 1, *ONE, replicas=0), "replicas"),
        (lambda: simulate_closed(0, 5, 1, *ONE), "client"),
        (lambda: Batcher(max_batch_size=4, batch_threads=0), "batch_threads"),
        (lambda: Batcher(max_batch_size=0), "max_batch_size"),
        (lambda: Batcher(max_batch_size=4, batch_timeout_s=-1.0), "batch_timeout_s"),
        (lambda: Device(tau_s=np.array([0.0, 0.0])), "positive time"),
        (lambda: Device(tau_s=np.array([0.0, 1.0]), contention=-0.1), "contention"),
    ],
)
def test_nonsense_is_refused_by_name(nonsense: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        nonsense()


def test_types_of_the_simulator_load_without_the_compiler() -> None:
    code = "import sys, batchtune.twin.simulator.simulate; print('numba' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_a_calibrated_twin_says_that_it_takes_another_scheduler_for_the_shared_one() -> None:
    """Nobody has measured for it how long the work on a request takes."""
    streaming = Configuration(batching=BatchingParameters(), flags=(("batch_scheduler", "streaming"),))
    assert left_out(streaming) == ("the streaming scheduler is simulated as the shared one",)
    assert left_out(Configuration(batching=BatchingParameters())) == ()
