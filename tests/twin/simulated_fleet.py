"""A fake server whose batches are simulated: as quick as a sweep of dozens of trials needs, with known truth.

It stands at the tuner's boundary, as `tune_fakes` does; `lie` makes the server's own clock run wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.load.fleet import LoadJob
from batchtune.load.samples import NEVER_NS
from batchtune.measure.slo import primary_limit
from batchtune.scenario.arrivals import Schedule
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.search.contenders import Space
from batchtune.twin.simulator.simulate import Batcher, Device, SimulatedTraffic, batcher_of, summary_of
from tests.tune.tune_fakes import OURS, SESSION, FakeClock, FakeFleet, FakeTarget, _Played
from tests.twin.simulated_run import SimulatedRun, simulate_closed, simulate_open
from tests.twin.twin_fakes import activity_of

UNBATCHED_THREADS = 8
TRUTH_REQUESTS = 40_000


@dataclass
class SimulatedTarget(FakeTarget):
    """A server on this device; `lie` is the factor by which its histograms overstate execution times."""

    device: Device | None = None
    lie: float = 1.0


class SimulatedFleet(FakeFleet):
    """Plays each job by the simulator; `noise` is the log sd of a whole run's speed."""

    def __init__(self, target: SimulatedTarget, *, seed: int = 1, noise: float = 0.0) -> None:
        super().__init__(target, seed=seed)
        self._noise_sd = noise
        target.law.noise = noise

    def _play(self, job: LoadJob, configuration: Configuration, slower: float) -> _Played:
        return _Simulated(job, configuration, self._target, slower)


def batcher(configuration: Configuration) -> Batcher:
    """The same number of threads without batching wherever the tests run."""
    found = batcher_of(configuration)
    return found if configuration.batching else replace(found, batch_threads=UNBATCHED_THREADS)


class _Simulated(_Played):
    def _play(self) -> None:
        device = self._target.device
        assert device is not None
        known = replace(device, tau_s=device.tau_s * self._slower)
        scheduler = batcher(self._configuration)
        arrivals = self._job.arrivals
        rows = int(self._rows)
        if isinstance(arrivals, Schedule):
            run = simulate_open(arrivals.due_ns / 1e9, rows, scheduler, known)
        else:
            run = _closed(arrivals.concurrency, arrivals.duration_s, rows, scheduler, known)
        sent = run.due_s < arrivals.duration_s
        self._due = np.round(run.due_s[sent] * 1e9).astype(np.int64).tolist()
        done = np.where(np.isfinite(run.latency_s), np.round((run.due_s + run.latency_s) * 1e9), NEVER_NS)
        done = np.where(done > self._drain_ns, NEVER_NS, done).astype(np.int64)
        self._done = done[sent].tolist()
        self._tell(run, scheduler, known)

    def _tell(self, run: SimulatedRun, scheduler: Batcher, device: Device) -> None:
        if scheduler.max_batch_size is None:
            return
        counted = activity_of(run, scheduler, device)
        count = self._target.count
        count(f"{SESSION}wrapped_run_count", counted.batches)
        count(f"{SESSION}processed_batch_size_sum", counted.rows)
        count(f"{SESSION}queuing_latency_sum", counted.queue_wait_mean_s * len(run.due_s) * 1e6)
        count(f"{SESSION}queuing_latency_count", len(run.due_s))
        busy_s = counted.device_busy_ratio * run.duration_s
        count(f"{OURS}device_busy_micros_total", busy_s * 1e6)
        for size, batches in counted.batches_by_rows.items():
            micros = counted.execution_s_by_rows[size] * batches * 1e6 * self._target.lie
            count(f"{OURS}batch_execution_count", batches, batch_size=str(size))
            count(f"{OURS}batch_execution_micros_total", micros, batch_size=str(size))


def _closed(clients: int, duration_s: float, rows: int, scheduler: Batcher, device: Device) -> SimulatedRun:
    """A closed loop of about this length: as many requests as a short run says will do."""
    first = simulate_closed(clients, 40 * clients, rows, scheduler, device)
    requests = math.ceil(1.02 * first.throughput_rps * duration_s) + 2 * clients
    return simulate_closed(clients, requests, rows, scheduler, device)


def true_capacities(scenario: Scenario, device: Device) -> dict[Configuration, float]:
    """The highest rate of each point of the space within the SLO, by the simulator; no batching too."""
    space = Space(scenario)
    found = [space.configuration(point) for point in scenario.search.grid()]
    unbatched = Configuration(batching=None, flags=scenario.fixed_flags)
    return {one: true_capacity(scenario, one, device) for one in [*filter(None, found), unbatched]}


def true_capacity(scenario: Scenario, configuration: Configuration, device: Device) -> float:
    """Halving between 0 and saturation, until it is known within 1 %; the same long arrivals at every rate."""
    limit = primary_limit(scenario.slo)
    assert limit is not None
    scheduler, rows = batcher(configuration), scenario.request.rows_most
    size = scheduler.batch_rows_max or rows
    threads = (
        1
        if device.serial
        else scheduler.batch_threads / (1 + device.contention * (scheduler.batch_threads - 1))
    )
    low, high = 0.0, threads * size / rows / float(device.tau_s[size])
    arrivals_s = np.cumsum(np.random.default_rng(5).exponential(1.0, TRUTH_REQUESTS))
    while high - low > 0.005 * high and high > 1.0:
        rate = 0.5 * (low + high)
        traffic = SimulatedTraffic(due_s=arrivals_s / rate, rows=rows)
        run = summary_of(traffic, scheduler, [device], warm_up_s=0.05 * TRUTH_REQUESTS / rate)
        kept = run.latency_s[0, 1] <= limit.seconds and run.error_ratio[0] <= scenario.slo.error_ratio
        low, high = (rate, high) if kept and run.throughput_rps[0] >= 0.98 * rate else (low, rate)
    return low


def simulated_server(
    device: Device, *, seed: int = 1, noise: float = 0.0, lie: float = 1.0
) -> tuple[FakeClock, SimulatedTarget, SimulatedFleet]:
    clock = FakeClock()
    target = SimulatedTarget(clock, device=device, lie=lie)
    return clock, target, SimulatedFleet(target, seed=seed, noise=noise)
