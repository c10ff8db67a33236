"""Measurements of a server whose parameters are known: played by the simulator, counted as a server counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import QUANTILES, Estimate
from batchtune.measure.slo import Limit
from batchtune.target.telemetry import ServerActivity
from batchtune.twin.calibrate import Observation
from batchtune.twin.replicas import Failing, ReplicaPlan, Replicas
from batchtune.twin.service_time import Fitted, ServiceTime
from batchtune.twin.simulator.simulate import Batcher, Device, Routing
from batchtune.twin.traffic import Traffic
from batchtune.twin.twin import Twin
from tests.twin.simulated_run import SimulatedRun, simulate_closed, simulate_open


def device_of(fixed_s: float = 0.002, per_row_s: float = 0.00005, **more: object) -> Device:
    """τ(b) = fixed + per row · b, with usual overheads unless told otherwise."""
    sizes = np.arange(1025)
    given = {"delay_s": 0.0002, "front_end_s": 0.00002, "jitter_ratio": 0.01, **more}
    return Device(tau_s=fixed_s + per_row_s * sizes, **given)  # type: ignore[arg-type]


def fitted_of(service_time: ServiceTime, **changes: Any) -> Fitted:
    """A reading of a serial device with usual overheads, unless told otherwise."""
    usual = {"contention": 0.0, "serial": True, "jitter_ratio": 0.01, "wake_s": 0.0}
    return Fitted(
        service_time=service_time, **{**usual, "delay_s": 0.0002, "front_end_s": 0.00002, **changes}
    )


def batcher_of(size: int | None, timeout_ms: float = 0.0, threads: int = 1) -> Batcher:
    told = {"max_batch_size": size, "batch_threads": threads, "max_enqueued_batches": 10_000}
    return Batcher(batch_timeout_s=timeout_ms / 1e3, **told)


def best_alone(twin: Twin) -> Twin:
    """The twin without its other readings."""
    return replace(twin, fits=(twin.best_fit,))


def observed(
    batcher: Batcher,
    traffic: Traffic,
    device: Device,
    *,
    requests: int = 6000,
    noise: float = 0.0,
    tells: bool = True,
    rng: np.random.Generator | None = None,
) -> Observation:
    """What a run would have measured; `noise`: log sd of the whole run's speed; `tells`: the server has counters."""
    rng = rng or np.random.default_rng(7)
    slower = float(np.exp(noise * rng.standard_normal()))
    known = replace(device, tau_s=device.tau_s * slower)
    rows = traffic.rows[0]
    if traffic.clients is not None:
        lengths = traffic.lengths_of(requests)
        run = simulate_closed(traffic.clients, requests, rows, batcher, known, seed=11, lengths=lengths)
    else:
        run = simulate_open(traffic.due_s(requests), rows, batcher, known, seed=11)
    measurement = measurement_of(run, batcher, traffic, known, tells=tells)
    return Observation(batcher=batcher, measurement=measurement, traffic=traffic)


def measurement_of(
    run: SimulatedRun, batcher: Batcher, traffic: Traffic, device: Device, *, tells: bool
) -> Measurement:
    kept = run.due_s >= 0.1 * run.due_s[-1]
    latency_s = np.sort(run.latency_s[kept])
    done_s = run.due_s + run.latency_s
    begin_s, end_s = 0.1 * run.due_s[-1], run.due_s[-1]
    throughput = float(np.count_nonzero((done_s >= begin_s) & (done_s < end_s)) / (end_s - begin_s))

    def about(value: float, within: float = 0.01) -> Estimate:
        return Estimate(value=value, low=value * (1 - within), high=value * (1 + within))

    quantiles = {name: about(float(np.quantile(latency_s, p))) for name, p in QUANTILES.items()}
    return Measurement(
        requests=int(kept.sum()),
        window_s=end_s - begin_s,
        offered_rps=traffic.rate_rps,
        concurrency=traffic.clients,
        throughput_rps=about(throughput),
        throughput_rows_per_s=about(throughput * traffic.mean_rows),
        goodput_rps=throughput,
        latency_s=quantiles,
        latency_mean_s=float(latency_s.mean()),
        error_ratio=0.0,
        errors={},
        send_lag_p99_s=0.0,
        client_cpu_ratio=0.1,
        client_cpu_per_request_s=1e-5,
        server=activity_of(run, batcher, device) if tells else None,
    )


def activity_of(run: SimulatedRun, batcher: Batcher, device: Device) -> ServerActivity:
    """Batches by rows and their mean execution time, waiting for the device included, as the bundled server counts."""
    done_s = run.due_s + run.latency_s - device.delay_s - 0.5 * device.front_end_s
    finish_s = np.full(len(run.batch_rows), np.inf)
    np.minimum.at(finish_s, run.batch, done_s)
    took_s = finish_s - run.batch_start_s
    sizes, counts = np.unique(run.batch_rows, return_counts=True)
    edges = sorted([(at, 1) for at in run.batch_start_s] + [(at, -1) for at in finish_s])
    busy_s, running, since = 0.0, 0, 0.0
    for at, change in edges:
        busy_s += at - since if running else 0.0
        running, since = running + change, at
    waits_s = run.batch_start_s[run.batch] - run.due_s
    return ServerActivity(
        duration_s=run.duration_s,
        batches=len(run.batch_rows),
        rows=int(run.batch_rows.sum()),
        mean_batch_rows=float(run.batch_rows.mean()) if batcher.max_batch_size is not None else None,
        batches_by_rows={int(size): int(count) for size, count in zip(sizes, counts, strict=True)},
        execution_s_by_rows={int(size): float(took_s[run.batch_rows == size].mean()) for size in sizes},
        queue_wait_mean_s=float(waits_s.mean()),
        device_busy_ratio=busy_s / run.duration_s,
    )


P95 = Limit(name="p95", quantile=0.95, seconds=0.02)
POISSON = Traffic(rate_rps=1.0)


def limit_of(seconds: float) -> Limit:
    return replace(P95, seconds=seconds)


def plan_replicas(
    twin: Twin,
    rate_rps: float,
    *limits: Limit,
    batcher: Batcher | None = None,
    routing: Routing = "round_robin",
    failing: Failing | None = None,
) -> ReplicaPlan:
    """The plan of a fleet for one rate, of servers with batches of up to 64, with p95 within 20 ms unless told."""
    batcher = batcher or batcher_of(64)
    return Replicas(twin, batcher, POISSON, limits or (P95,), 0.01, routing, failing).plan(rate_rps)
