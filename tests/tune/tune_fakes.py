"""A fake server and client on a fake clock: batches take τ(b) = fixed + per row, threads share the device.

They stand at the tuner's boundary (target and fleet); everything between is our own code.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from batchtune.batching.parameters import (
    BatchingParameters,
    Configuration,
    default_num_batch_threads,
    from_dict,
)
from batchtune.errors import TargetError
from batchtune.load.fleet import LiveAggregate, LoadJob
from batchtune.load.samples import NEVER_NS, Samples, Status
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded
from batchtune.scenario.arrivals import ClosedLoop, Schedule
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.endpoint import Endpoint
from batchtune.target.telemetry import Counters
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.evidence.bracket import BracketRun
from batchtune.tune.sweep.sweep import SweepEvent, SweepProgress, sweep
from batchtune.tune.trials.trial import SearchSummary, Trial, TrialRequest
from batchtune.wire.signature import Signature, TensorSpec


def heard(
    *,
    on_progress: Callable[[SweepProgress], None] | None = None,
    on_plan: Callable[[Coded], None] | None = None,
    on_summary: Callable[[SearchSummary], None] | None = None,
) -> Callable[[SweepEvent], None]:
    """What takes each kind of a sweep's events."""
    takers: dict[type, Any] = {SweepProgress: on_progress, Coded: on_plan, SearchSummary: on_summary}

    def hear(event: SweepEvent) -> None:
        if take := takers[type(event)]:
            take(event)

    return hear


SIGNATURE = Signature(
    name="serving_default",
    method_name="tensorflow/serving/predict",
    inputs=(TensorSpec(name="x", dtype="float32", shape=(None, 2)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(None, 2)),),
)
SESSION = ":tensorflow:serving:batching_session:"
OURS = ":batchtune:serving:"


@dataclass
class Law:
    """τ(b) in seconds with `contention` per further busy thread; `noise` is the log sd of a whole run.

    A batch of more than `rows_max` rows fails, and all its requests with it.
    """

    fixed_s: float = 0.0009
    per_row_s: float = 0.0004
    contention: float = 1.0
    noise: float = 0.0
    unbatched_threads: int = 1
    rows_max: int | None = None

    def batch_s(self, rows: int, busy: int) -> float:
        return (self.fixed_s + self.per_row_s * rows) * (1.0 + self.contention * busy)


@dataclass
class FakeClock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class FakeTarget:
    """`refuses` says why a configuration is refused, `dies_under` which ones kill the server under load.

    `shows`: its counters, of what was counted.
    """

    clock: FakeClock
    law: Law = field(default_factory=Law)
    refuses: Callable[[Configuration], str | None] = lambda _configuration: None
    dies_under: Callable[[Configuration], bool] = lambda _configuration: False
    dies_with: str = "the server exited with 137"
    shows: Callable[[Counters], Counters] = lambda counted: counted
    apply_s: float = 0.05
    in_force: Configuration | None = None
    running: bool = False
    applied: list[Configuration] = field(default_factory=list)
    series: dict[str, dict[tuple[tuple[str, str], ...], float]] = field(default_factory=dict)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(model_name="fake", grpc_port=1, rest_port=2)

    def apply(self, configuration: Configuration) -> float | None:
        self.clock.sleep(self.apply_s)
        self.applied.append(configuration)
        why = self.refuses(configuration)
        if why is not None:
            raise TargetError(why)
        startup_s = None if self.running else self.apply_s
        self.running, self.in_force = True, configuration
        return startup_s

    def counters(self) -> Counters:
        if not self.running:
            raise TargetError("the server has ended")
        series = {name: dict(values) for name, values in self.series.items()}
        return self.shows(Counters(monotonic_s=self.clock(), server_cpu_s=None, series=series))

    def signature(self, name: str) -> Signature:
        assert name == SIGNATURE.name
        return SIGNATURE

    def alive(self) -> bool:
        return self.running

    def log_tail(self) -> str:
        return "  out of memory"

    def count(self, name: str, value: float, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        values = self.series.setdefault(name, {})
        values[key] = values.get(key, 0.0) + value


class FakeFleet:
    """Plays each job against the target's law; `interrupt_after` jobs it is interrupted. `alter`: what comes of them."""

    alter: Callable[[Samples], Samples] = staticmethod(lambda samples: samples)

    def __init__(self, target: FakeTarget, *, seed: int = 1, interrupt_after: int | None = None) -> None:
        self._target = target
        self._noise = random.Random(seed)
        self._interrupt_after = interrupt_after
        self.jobs: list[LoadJob] = []

    def run(
        self,
        job: LoadJob,
        *,
        on_progress: Callable[[LiveAggregate], None] | None = None,
        should_stop: Callable[[LiveAggregate], bool] | None = None,
    ) -> Samples:
        self.jobs.append(job)
        if self._interrupt_after is not None and len(self.jobs) > self._interrupt_after:
            raise KeyboardInterrupt
        configuration = self._target.in_force
        assert configuration is not None
        slower = math.exp(self._noise.gauss(0.0, self._target.law.noise))
        played = self._play(job, configuration, slower)
        stopped_s = played.watch(on_progress, should_stop)
        self._target.clock.sleep(played.drained_s(stopped_s))
        if self._target.dies_under(configuration):
            self._target.running = False
            raise TargetError(self._target.dies_with)
        return self.alter(played.samples(stopped_s))

    def _play(self, job: LoadJob, configuration: Configuration, slower: float) -> _Played:
        return _Played(job, configuration, self._target, slower)


class _Played:
    """One job, event by event; times in ns from its start."""

    def __init__(self, job: LoadJob, configuration: Configuration, target: FakeTarget, slower: float) -> None:
        batching = configuration.batching
        self._law, self._target, self._slower = target.law, target, slower
        self._rows = job.requests.rows[0]
        if batching is None:
            self._limit, self._timeout_ns, self._threads = self._rows, 0, target.law.unbatched_threads
        else:
            self._limit = 1000 if batching.max_batch_size is None else batching.max_batch_size
            self._timeout_ns = 1000 * (batching.batch_timeout_micros or 0)
            self._threads = batching.num_batch_threads or default_num_batch_threads()
        self._batched = batching is not None
        self._job, self._configuration = job, configuration
        self._requests_max = getattr(job.arrivals, "requests_max", None) or math.inf
        self._end_ns = round(job.arrivals.duration_s * 1e9)
        self._drain_ns = self._end_ns + round((job.drain_s or job.timeout_or_default_s) * 1e9)
        self._due: list[int] = []
        self._done: list[int] = []
        self._queue: deque[int] = deque()
        self._starved: set[int] = set()
        self._busy = 0
        self._events: list[tuple[int, int, str, Any]] = []
        self._sequence = 0
        self._play()
        self._due_ns, self._done_ns = (np.array(times, dtype=np.int64) for times in (self._due, self._done))

    def _push(self, at_ns: int, kind: str, what: Any = None) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at_ns, self._sequence, kind, what))

    def _play(self) -> None:
        match self._job.arrivals:
            case Schedule(due_ns=due_ns):
                for one in due_ns.tolist():
                    self._push(one, "arrive")
            case ClosedLoop(concurrency=clients):
                for client in range(clients):
                    self._push(client * 1000, "arrive")
        while self._events:
            now_ns, _, kind, what = heapq.heappop(self._events)
            if now_ns > self._drain_ns:
                return
            if kind == "arrive" and len(self._due) < self._requests_max:
                self._queue.append(len(self._due))
                self._due.append(now_ns)
                self._done.append(NEVER_NS)
            elif kind == "finish":
                self._finish(now_ns, what)
            self._start_batches(now_ns)

    def _finish(self, now_ns: int, batch: list[int]) -> None:
        self._busy -= 1
        for request in batch:
            self._done[request] = now_ns
            if isinstance(self._job.arrivals, ClosedLoop) and now_ns < self._end_ns:
                self._push(now_ns, "arrive")

    def _start_batches(self, now_ns: int) -> None:
        most = max(self._limit // self._rows, 1)
        while self._queue and self._busy < self._threads:
            oldest_ns = self._due[self._queue[0]]
            full = len(self._queue) >= most
            if not full and now_ns < oldest_ns + self._timeout_ns:
                self._push(oldest_ns + self._timeout_ns, "timer")
                return
            batch = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
            took_s = self._law.batch_s(len(batch) * self._rows, self._busy) * self._slower
            self._busy += 1
            if self._law.rows_max is not None and len(batch) * self._rows > self._law.rows_max:
                self._starved.update(batch)
            self._push(now_ns + round(took_s * 1e9), "finish", batch)
            if self._batched:
                self._count(len(batch) * self._rows, took_s, "full" if full else "timeout")

    def _count(self, rows: int, took_s: float, why: str) -> None:
        count = self._target.count
        count(f"{SESSION}wrapped_run_count", 1)
        count(f"{SESSION}processed_batch_size_sum", rows)
        count(f"{OURS}batch_execution_count", 1, batch_size=str(rows))
        count(f"{OURS}batch_execution_micros_total", took_s * 1e6, batch_size=str(rows))
        count(f"{OURS}batch_close_count", 1, reason=why)

    def watch(
        self,
        on_progress: Callable[[LiveAggregate], None] | None,
        should_stop: Callable[[LiveAggregate], bool] | None,
    ) -> float:
        """Show how it went four times a second; seconds until it ended or was stopped."""
        duration_s = self._job.arrivals.duration_s
        for step in range(1, int(duration_s * 4) + 1):
            live = self._live(step / 4)
            if on_progress is not None:
                on_progress(live)
            if should_stop is not None and should_stop(live):
                return step / 4
        return duration_s

    def drained_s(self, stopped_s: float) -> float:
        """When the last answer was in, or no longer waited for; a run that was stopped early ends at once."""
        if stopped_s < self._job.arrivals.duration_s - 0.25:
            return stopped_s
        done = self._done_ns[self._due_ns <= stopped_s * 1e9]
        if (done == NEVER_NS).any():
            return max(self._drain_ns / 1e9, stopped_s)
        return max(float(done.max(initial=0)) / 1e9, stopped_s)

    def _live(self, elapsed_s: float) -> LiveAggregate:
        now_ns, due, done = round(elapsed_s * 1e9), self._due_ns, self._done_ns
        overdue_ns = (self._job.overdue_after_s or self._job.timeout_or_default_s) * 1e9
        sent = due <= now_ns
        ended = sent & (done != NEVER_NS) & (done <= now_ns)
        return LiveAggregate(
            elapsed_s=elapsed_s,
            sent=int(sent.sum()),
            done=int(ended.sum()),
            errors=0,
            late=int((ended & (done - due > overdue_ns)).sum()),
            throughput_rps=float((ended & (done > now_ns - 1e9)).sum()),
            p50_s=0.0,
            p95_s=0.0,
            in_flight=int(sent.sum() - ended.sum()),
            overdue=int((sent & ~ended & (now_ns - due > overdue_ns)).sum()),
        )

    def samples(self, stopped_s: float) -> Samples:
        """What is left of it when it was stopped after so many seconds."""
        arrivals = self._job.arrivals
        early = stopped_s < arrivals.duration_s
        kept = self._due_ns <= (stopped_s * 1e9 if early else math.inf)
        due, done = self._due_ns[kept], self._done_ns[kept]
        status = np.where(done == NEVER_NS, int(Status.UNFINISHED), int(Status.OK)).astype(np.uint8)
        status[[one for one in self._starved if one < len(status)]] = int(Status.SERVER_ERROR)
        texts = {"SERVER_ERROR": "OOM when allocating tensor with shape[64,2]"} if self._starved else {}
        return Samples(
            due_ns=due,
            sent_ns=due.copy(),
            first_byte_ns=done.copy(),
            done_ns=done,
            connection_wait_ns=np.zeros_like(due),
            status=status,
            rows=np.full(len(due), self._rows, dtype=np.int32),
            started_ns=0,
            wall_s=stopped_s,
            client_cpu_s=0.001,
            client_cores=1,
            concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
            offered_rps=arrivals.offered_rps if isinstance(arrivals, Schedule) else None,
            stopped_early=early,
            error_texts=texts,
        )


def scenario_of(**changes: Any) -> Scenario:
    """A closed-loop throughput scenario; keyword arguments replace whole top-level keys."""
    given: dict[str, Any] = {
        "name": "fake",
        "target": {"model": "fake"},
        "request": {"protocol": "grpc"},
        "load": {"arrivals": "closed", "concurrency": 16, "warm_up": "100ms", "duration": "1s"},
        "slo": {"p95": "50ms"},
        "objective": "throughput",
        "search": {
            "budget": {"trials": 12},
            "seed": 1,
            "space": {
                "max_batch_size": [1, 4, 8, 16, 32],
                "batch_timeout_micros": [0, 1000, 5000],
                "num_batch_threads": [1, 2],
            },
        },
    }
    return Scenario.model_validate({**given, **changes})


def capacity_scenario(p95: str = "20ms", **changes: Any) -> Scenario:
    """One that searches the highest rate within this limit."""
    load = {"arrivals": "poisson"}
    return scenario_of(**{"objective": "capacity", "load": load, "slo": {"p95": p95}, **changes})


def bench_of(scenario: Scenario, target: FakeTarget, fleet: Any = None, **options: Any) -> Bench:
    """A bench on the target's clock, which nobody watches."""
    times: dict[str, Any] = {"now_s": target.clock, "sleep": target.clock.sleep}
    fleet = FakeFleet(target) if fleet is None else fleet
    return Bench(scenario, target, fleet, on_live=lambda _plan, _live: None, **{**times, **options})


def swept(
    scenario: Scenario,
    *,
    law: Law | None = None,
    interrupt_after: int | None = None,
    clock: FakeClock | None = None,
    finished: Sequence[Trial] = (),
    on_event: Callable[[SweepEvent], None] = lambda _event: None,
    **target: Any,
) -> Iterator[Trial]:
    """The trials of a sweep of a fake server of this law, one by one."""
    fake = FakeTarget(clock or FakeClock(), law=law or Law(noise=0.01), **target)
    fleet = FakeFleet(fake, interrupt_after=interrupt_after)
    for done in sweep(scenario, fake, fleet, finished=finished, on_event=on_event, now_s=fake.clock):
        yield done.trial


def planned(configuration: Configuration, **changes: Any) -> Plan:
    """A trial to run, the first under the first seed; `changes` of the plan or of what it asks."""
    own = {name: changes.pop(name) for name in ("number", "seed", "pace") if name in changes}
    request = TrialRequest(configuration=configuration, **{"source": "sampler", "reason": "", **changes})
    return Plan(**{"number": 1, "seed": 1, "request": request, **own})


def batches_of(rows: int, *, threads: int | None = 1, timeout_micros: int | None = 0) -> Configuration:
    """Batches of at most so many rows."""
    return Configuration(
        batching=BatchingParameters(
            max_batch_size=rows, batch_timeout_micros=timeout_micros, num_batch_threads=threads
        )
    )


def asked(trial: Trial, **changes: Any) -> Trial:
    """The trial, had something else been asked for."""
    return replace(trial, request=replace(trial.request, **changes))


def remeasured(trial: Trial, **changes: Any) -> Trial:
    """The trial, had something else been measured."""
    assert trial.measurement is not None
    return replace(trial, measurement=replace(trial.measurement, **changes))


def exactly(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def bracket_run(rate_rps: float | None, *, held: bool, **changes: Any) -> BracketRun:
    """A run at this rate, all of which was answered; None: of a closed loop."""
    given: dict[str, Any] = {
        "trial": 1,
        "clients": None,
        "answered_rps": rate_rps or 0.0,
        "latency_s": {"p95": 0.01 if held else 0.05},
        "error_ratio": 0.0,
        "far": False,
    }
    return BracketRun(rate_rps=rate_rps, held=held, **{**given, **changes})


def planted(
    number: int,
    *,
    throughput: float = 1.0,
    p95_s: float = 1.0,
    batching: dict[str, Any] | str | None = "defaults",
    source: str = "sampler",
    block: int | None = None,
    error_ratio: float = 0.0,
    objective: str = "throughput",
    failure: str | None = None,
    within: float = 0.01,
    **measured: Any,
) -> Trial:
    """A trial with these figures; `batching` "defaults" means absent parameters, None no batching."""
    parameters = None if batching is None else from_dict({} if batching == "defaults" else batching)

    def about(value: float) -> Estimate:
        return Estimate(value=value, low=value * (1 - within), high=value * (1 + within))

    constraints = {"p95": p95_s / 0.05 - 1.0, "errors": error_ratio / 0.01 - 1.0}
    given: dict[str, Any] = {
        "requests": 1000,
        "window_s": 1.0,
        "offered_rps": None,
        "concurrency": 16,
        "throughput_rps": about(throughput),
        "throughput_rows_per_s": about(throughput),
        "goodput_rps": throughput,
        "latency_s": {"p50": about(0.6 * p95_s), "p95": about(p95_s), "p99": about(1.3 * p95_s)},
        "latency_mean_s": p95_s * 0.6,
        "error_ratio": error_ratio,
        "errors": {},
        "send_lag_p99_s": 0.0,
        "client_cpu_ratio": 0.1,
        "client_cpu_per_request_s": 1e-5,
    }
    return Trial(
        number=number,
        state="complete" if failure is None else "failed",
        failure=failure,
        seconds=2.0,
        started_utc="2026-01-01T00:00:00.000+00:00",
        seed=1,
        concurrency=16,
        objective=None if failure else about(p95_s if objective == "latency" else throughput),
        constraints=constraints,
        feasible=failure is None and all(value <= 0 for value in constraints.values()),
        measurement=None if failure else Measurement(**{**given, **measured}),
        request=TrialRequest(
            configuration=Configuration(batching=parameters), source=source, reason="planted", block=block
        ),
    )
