"""A server on a simulated device and the load generators that play it, in virtual time, on a host with noise.

They stand at the tuner's boundary (target and fleet). A sweep's clock is charged for what it would take in truth: the
applying of parameters, warm-up, load, drain, and the time that an overwhelmed server needs to come to rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import Configuration
from batchtune.load.fleet import LiveAggregate, LoadJob
from batchtune.load.samples import NEVER_NS, Samples, Status
from batchtune.load.worker_process import DRAIN_AFTER_STOP_S
from batchtune.scenario.arrivals import ClosedLoop, Schedule
from batchtune.target.telemetry import Counters
from batchtune.twin.simulator.simulate import (
    Batcher,
    Device,
    Outcome,
    SimulatedTraffic,
    closed_traffic,
    run_simulation,
)
from tests.benchmarks.noisy.devices import SimulatedDevice
from tests.benchmarks.noisy.hosts import Host, VirtualClock, stalls_of
from tests.tune.tune_fakes import OURS, SESSION, FakeTarget

LOOKS_PER_S = 4
CLIENT_CPU_S = 2e-6
"""Of a request, where the client is no limit."""

QUEUE_FULL_TEXT = "The batch scheduling queue to which this task was submitted is full"


class VirtualTarget(FakeTarget):
    """A server that goes on counting batches until it has worked off what its clients gave up on."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)  # type: ignore[arg-type]
        self.busy_until_s = -math.inf

    def counters(self) -> Counters:
        if self.clock.now_s < self.busy_until_s:
            self.count(f"{SESSION}wrapped_run_count", 1)
        return super().counters()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """What became of a load if nobody stops it: [requests] in order of due times, seconds from its start.

    sent_s: by the client; done_s: when the answer came, late or not; refused: it said that the queue was full;
    server_done_s: when the server had it done.
    """

    due_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    done_s: NDArray[np.float64]
    refused: NDArray[np.bool_]
    server_done_s: NDArray[np.float64]
    outcome: Outcome


class VirtualFleet:
    """Plays each job by the simulator; `client_max_rps` is what its clients can do at most, None: anything.

    Whoever is told of a load while it runs thinks beside it, at no cost.
    """

    def __init__(
        self, target: VirtualTarget, device: SimulatedDevice, host: Host, chance: np.random.Generator
    ) -> None:
        self.client_max_rps = device.client_max_rps
        self._target, self._device, self._host, self._chance = target, device, host, chance
        self._clock: VirtualClock = target.clock  # type: ignore[assignment]

    def run(
        self,
        job: LoadJob,
        *,
        on_progress: Callable[[LiveAggregate], None] | None = None,
        should_stop: Callable[[LiveAggregate], bool] | None = None,
    ) -> Samples:
        with self._clock.simulating():
            configuration = self._target.in_force
            assert configuration is not None
            played = self._play(job, configuration)
            stopped_s = _watch(played, job, on_progress, should_stop)
            early = stopped_s < job.arrivals.duration_s
            sent = int(np.searchsorted(played.due_s, stopped_s, side="right" if early else "left"))
            self._count(played, self._device.batcher(configuration), sent)
            rest_s = float(played.server_done_s[:sent].max(initial=0.0))
            self._target.busy_until_s = self._clock.now_s + rest_s
            samples = self._samples(job, played, sent, stopped_s)
            self._clock.sleep(samples.wall_s)
            return samples

    def retire(self, name: str, why: str) -> bool:
        """The only worker stays."""
        return False

    def _play(self, job: LoadJob, configuration: Configuration) -> _Played:
        slower = math.exp(self._chance.normal(0.0, self._host.run_sd))
        device, batcher = self._device.device(slower=slower), self._device.batcher(configuration)
        seed = int(self._chance.integers(2**31)) if device.jitter_ratio else 1
        arrivals = job.arrivals
        stalls = stalls_of(self._host, arrivals.duration_s, self._chance)
        if isinstance(arrivals, Schedule):
            due_s = arrivals.due_ns / 1e9
            traffic = SimulatedTraffic(due_s=due_s, rows=self._device.rows, seed=seed)
            outcome = run_simulation(traffic, batcher, device)
            server_done_s = due_s + outcome.latency_s
            done_s = stalls.held_up(server_done_s)
        else:
            outcome = _closed(arrivals, self._device.rows, batcher, device, seed)
            server_done_s = stalls.stretched(outcome.due_s + outcome.latency_s)
            due_s, done_s = stalls.stretched(outcome.due_s), server_done_s
        refused = np.isinf(outcome.latency_s)
        return _Played(
            due_s=due_s,
            sent_s=np.minimum(self._sent(due_s, arrivals), done_s),
            done_s=np.where(refused, due_s + device.delay_s, done_s),
            refused=refused,
            server_done_s=np.where(refused, due_s, server_done_s),
            outcome=outcome,
        )

    def _sent(self, due_s: NDArray[np.float64], arrivals: Schedule | ClosedLoop) -> NDArray[np.float64]:
        """When a client at its limit comes to each request; in a closed loop nothing is due before."""
        if self.client_max_rps is None or isinstance(arrivals, ClosedLoop):
            return due_s
        steps_s = np.arange(len(due_s)) / self.client_max_rps
        return np.asarray(np.maximum.accumulate(due_s - steps_s) + steps_s)

    def _count(self, played: _Played, batcher: Batcher, requests: int) -> None:
        """What the server's counters say of the batches of so many requests; nothing of single ones."""
        outcome = played.outcome
        in_batch = ~played.refused[:requests]
        batch = outcome.batch[:requests][in_batch]
        if batcher.max_batch_size is None or not len(batch):
            return
        finish_s = np.zeros(len(outcome.batch_rows))
        finish_s[batch] = (outcome.due_s + outcome.latency_s)[:requests][in_batch]
        ran = np.flatnonzero(np.bincount(batch, minlength=len(finish_s)))
        rows, took_s = outcome.batch_rows[ran], finish_s[ran] - outcome.batch_start_s[ran]
        waits_s = outcome.batch_start_s[batch] - outcome.due_s[:requests][in_batch]
        count = self._target.count
        count(f"{SESSION}wrapped_run_count", len(ran))
        count(f"{SESSION}processed_batch_size_sum", int(rows.sum()))
        count(f"{SESSION}queuing_latency_sum", float(waits_s.sum()) * 1e6)
        count(f"{SESSION}queuing_latency_count", len(batch))
        count(f"{OURS}device_busy_micros_total", outcome.busy_s * len(ran) / len(outcome.batch_rows) * 1e6)
        batches_by_rows, micros_by_rows = np.bincount(rows), np.bincount(rows, took_s) * 1e6
        for size in np.flatnonzero(batches_by_rows):
            count(f"{OURS}batch_execution_count", int(batches_by_rows[size]), batch_size=str(size))
            count(f"{OURS}batch_execution_micros_total", float(micros_by_rows[size]), batch_size=str(size))

    def _samples(self, job: LoadJob, played: _Played, sent: int, stopped_s: float) -> Samples:
        """The requests that were sent until the load ended or was stopped.

        A request without an answer when it times out, or when the client gives up, never gets one.
        """
        arrivals, timeout_s = job.arrivals, job.timeout_or_default_s
        drain_s = timeout_s if job.drain_s is None else job.drain_s
        early = stopped_s < arrivals.duration_s
        due_s, done_s, refused = played.due_s[:sent], played.done_s[:sent], played.refused[:sent]
        gives_up_s = stopped_s + (min(drain_s, DRAIN_AFTER_STOP_S) if early else drain_s)
        timed_out = done_s - due_s > timeout_s
        done_s = np.where(timed_out, due_s + timeout_s, done_s)
        unfinished = done_s > gives_up_s
        status = np.select(
            [unfinished, timed_out, refused],
            [Status.UNFINISHED, Status.TIMEOUT, Status.QUEUE_FULL],
            Status.OK,
        ).astype(np.uint8)
        wall_s = max(stopped_s, gives_up_s if unfinished.any() else float(done_s.max(initial=0.0)))
        due_ns, done_ns = _ns(due_s), np.where(unfinished, NEVER_NS, _ns(done_s))
        per_request_s = 1.0 / self.client_max_rps if self.client_max_rps else CLIENT_CPU_S
        return Samples(
            due_ns=due_ns,
            sent_ns=_ns(np.minimum(played.sent_s[:sent], done_s)),
            first_byte_ns=done_ns.copy(),
            done_ns=done_ns,
            connection_wait_ns=np.zeros_like(due_ns),
            status=status,
            rows=np.full(sent, self._device.rows, dtype=np.int32),
            started_ns=0,
            wall_s=wall_s,
            client_cpu_s=min(per_request_s * sent, wall_s),
            client_cores=1,
            concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
            offered_rps=arrivals.offered_rps if isinstance(arrivals, Schedule) else None,
            stopped_early=early,
            error_texts={"QUEUE_FULL": QUEUE_FULL_TEXT} if (status == Status.QUEUE_FULL).any() else {},
        )


def _watch(
    played: _Played,
    job: LoadJob,
    on_progress: Callable[[LiveAggregate], None] | None,
    should_stop: Callable[[LiveAggregate], bool] | None,
) -> float:
    """Show how it went some times a second; seconds until it ended or was stopped."""
    duration_s = job.arrivals.duration_s
    overdue_s = job.overdue_after_s or job.timeout_or_default_s
    for step in range(1, int(duration_s * LOOKS_PER_S) + 1):
        live = _live(played, step / LOOKS_PER_S, overdue_s)
        if on_progress is not None:
            on_progress(live)
        if should_stop is not None and should_stop(live):
            return step / LOOKS_PER_S
    return duration_s


def _live(played: _Played, now_s: float, overdue_s: float) -> LiveAggregate:
    sent = int(np.searchsorted(played.due_s, now_s, side="right"))
    due_s, done_s = played.due_s[:sent], played.done_s[:sent]
    ended = done_s <= now_s
    done = int(np.count_nonzero(ended))
    old = int(np.searchsorted(due_s, now_s - overdue_s))
    return LiveAggregate(
        elapsed_s=now_s,
        sent=sent,
        done=done,
        errors=int(np.count_nonzero(ended & played.refused[:sent])),
        late=int(np.count_nonzero(ended & (done_s - due_s > overdue_s))),
        throughput_rps=float(np.count_nonzero(ended & (done_s > now_s - 1.0))),
        p50_s=0.0,
        p95_s=0.0,
        in_flight=sent - done,
        overdue=old - int(np.count_nonzero(ended[:old])),
    )


def _closed(loop: ClosedLoop, rows: int, batcher: Batcher, device: Device, seed: int) -> Outcome:
    """A closed loop of this length, or a little more: as many requests as a shorter one says will do."""
    most = loop.requests_max or math.inf
    requests = 40 * loop.concurrency
    while True:
        traffic = closed_traffic(
            clients=loop.concurrency, requests=int(min(requests, most)), rows=rows, seed=seed
        )
        outcome = run_simulation(traffic, batcher, device)
        last_s = float(outcome.due_s[-1])
        if last_s >= loop.duration_s or requests >= most:
            return outcome
        requests = math.ceil(1.05 * requests * loop.duration_s / last_s) + 2 * loop.concurrency


def _ns(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.round(seconds * 1e9).astype(np.int64)
