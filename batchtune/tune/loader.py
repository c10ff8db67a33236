"""Sends one load to the target with the parameters that it has, or one to each model, and measures the answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Protocol

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.errors import TargetError
from batchtune.load.answers import prompts_to, require_answer, with_lone_answers
from batchtune.load.cluster.cluster_fleet import AnyFleet, WorkerLostError
from batchtune.load.fleet import IN_FLIGHT_MAX, LiveAggregate, LoadInterrupted, LoadJob
from batchtune.load.samples import Samples, Status
from batchtune.measure.caveats import HostNoise, caveat, dispensable_worker, settings_of
from batchtune.measure.measurement import Measurement, measure, warm_up_caveats
from batchtune.measure.slo import Window, between_answers, primary_limit, whole_run, window_of
from batchtune.plain_values import Coded, coded
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule
from batchtune.scenario.payloads import RequestSet, build_requests
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.workload import transport_of
from batchtune.system import schedulable_cpus
from batchtune.target.endpoint import Endpoint, replicas_of
from batchtune.target.telemetry import Counters, ServerActivity, activity
from batchtune.tune.trials.pace import WARM_UP_BATCHES
from batchtune.wire.signature import Signature

REPEATS_MAX = 2
"""How often a run is repeated at most when noise of the host or a slow client spoilt it."""

PATIENCE = 10.0
"""When a run has ended, answers are waited for this many times the SLO's largest latency limit, a server's rest for as
many looks, and a lone answer for as many seconds (noisy.py, host harsh)."""


class Served(Protocol):
    """A protocol: one model on a running server: its address, the counters and signatures of the model.

    `in_force`: the configuration that the server runs with; None: unknown. `counters` reads the counters once,
    `signature` the signature called `name`; both raise TargetError where the server does not answer.
    """

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def in_force(self) -> Configuration | None: ...

    def counters(self) -> Counters: ...

    def signature(self, name: str) -> Signature: ...


class Target(Served, Protocol):
    """A protocol: a running server whose batching parameters and flags can be changed.

    `apply` returns the seconds from a launch of the server until its models were AVAILABLE (None: no launch, or not
    known), and raises TargetError or BatchingParametersError where the server refuses the parameters. `alive`: whether
    the server still runs. `log_tail`: the last lines of its log.
    """

    def apply(self, configuration: Configuration) -> float | None: ...

    def alive(self) -> bool: ...

    def log_tail(self) -> str: ...


class Guard(Protocol):
    """A protocol: watches the host during a load. `begin` is called before it; `end` after it, and returns the noise.

    `cpus`: numbers of the CPUs to watch; None: those of this process. `server_cpu_s`, `client_cpu_s`: CPU seconds that
    server and client used during the load; `server_cpu_s` None: unknown, and with it what other programs used.
    """

    def begin(self, *, cpus: Collection[int] | None = None) -> None: ...

    def end(self, *, server_cpu_s: float | None = None, client_cpu_s: float = 0.0) -> HostNoise: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """What to send in one load, and which part of it counts.

    `arrivals`: when requests are sent, warm-up included.
    `warm_up_s`: requests that are due before this time, from the start of the load, do not count.
    `whole`: every request counts, from the start to the last answer, whatever `warm_up_s` is.
    `overdue_after_s`: live counts call an answer late after this time; None: after the request's timeout.
    `should_stop`: called with the live counts; True ends the load early. None: never.
    `timeout_s`: of a request; None: the scenario's.
    `batch_s`: how long a batch is expected to take; 0: unknown.
    `short`: a run of the search, for which the scenario's warm-up is cut by intent.
    `patient`: at the end, answers are waited for up to the timeout; else up to PATIENCE times the largest limit.
    `kept_if_interrupted`: Ctrl-C ends the load early, and what was measured so far is returned with the caveat
    `cut_short`, if it is long enough; else LoadInterrupted passes through.
    """

    arrivals: Arrivals
    warm_up_s: float
    whole: bool = False
    overdue_after_s: float | None = None
    should_stop: Callable[[LiveAggregate], bool] | None = None
    timeout_s: float | None = None
    batch_s: float = 0.0
    short: bool = False
    patient: bool = False
    kept_if_interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The result of one load: every request, the window of time that counts, and the figures of that window.

    `waited`: at the end, answers were waited for up to the request's timeout; False: up to PATIENCE times the largest
    limit.
    """

    samples: Samples
    window: Window
    measurement: Measurement
    waited: bool = True


class Loader:
    """Sends loads of the scenario's requests, which are encoded once, and measures each.

    `guard`: watches this host during each load, so that the measurement has a caveat where the host was noisy; unused
    where the load comes from a fleet on other hosts. None: the host is not watched.
    `client_max_rps`: measures the highest rate at which the client can send these requests, so that a measurement near
    that rate has a caveat. `sleep`: waits while the server works off its queue; replaced in tests.
    """

    def __init__(
        self,
        scenario: Scenario,
        target: Served,
        fleet: AnyFleet,
        *,
        sleep: Callable[[float], None] = time.sleep,
        guard: Guard | None = None,
        client_max_rps: Callable[[RequestSet], float] | None = None,
    ) -> None:
        self._scenario = scenario
        self._target = target
        self._fleet = fleet
        self._sleep = sleep
        self._guard = guard if scenario.load.fleet is None else None
        self._ask_client_max_rps = client_max_rps
        self._client_max_rps: float | None = None
        self._requests: RequestSet | None = None
        self._cpus = loaded_cpus(scenario)
        self._cpu_tells_rest = True
        metrics = scenario.target.metrics
        self._metrics_every_s = 0.0 if metrics is None else metrics.every_s
        self._loaded_until_s = -inf

    def run(self, load: LoadRun, *, on_live: Callable[[LiveAggregate], None]) -> Figures:
        """Send one load and measure it; `on_live` is called with the live counts a few times a second.

        The load is sent again by the remaining workers where a worker of a fleet was lost during the load, or was too
        slow (`_may_repeat`).

        Raises:
            TargetError: the server died or cannot be reached.
            MeasurementInvalidError: a load generator failed, or too few workers are left.
        """
        losses: list[Coded] = []
        suspects: set[str] = set()
        while True:
            try:
                figures = self._run(load, on_live, losses)
            except WorkerLostError as error:
                if not error.left:
                    raise
                losses.append(caveat("worker_lost", loss=error.message))
                self._with_fewer(error.left_ratio)
            else:
                slow = self._slow_worker(figures)
                if slow is None or not self._may_repeat(*slow, suspects, figures):
                    return figures
                losses.append(
                    caveat("worker_lost", loss=coded("worker_repeated", worker=slow[0], why=slow[1]))
                )
            self._settle(load, None)

    def answers_one(self, limit_s: float) -> bool:
        """Send one request alone; return whether it gets an answer within `limit_s` seconds, an error counts too.

        Raises what `job` and the fleet's `run` raise.
        """
        lone = ClosedLoop(concurrency=1, duration_s=limit_s, requests_max=1)
        load = LoadRun(arrivals=lone, warm_up_s=0.0, timeout_s=limit_s, patient=True)
        return not self._fleet.run(self.job(load)).unanswered.all()

    def _slow_worker(self, figures: Figures) -> tuple[str, Coded] | None:
        """Name and fault of a worker of a fleet that was too slow, where the others can send its share; None: none."""
        if self._scenario.load.fleet is None:
            return None
        limit = primary_limit(self._scenario.slo)
        limit_s = figures.measurement.latency_s["p95"].value if limit is None else limit.seconds
        limit_s = limit_s if isfinite(limit_s) else 0.0
        return dispensable_worker(figures.samples, figures.window, limit_s=limit_s)

    def _may_repeat(self, worker: str, why: Coded, suspects: set[str], figures: Figures) -> bool:
        """Whether to send the load again because `worker` was too slow, for the reason `why`.

        The first time it is sent by the same workers, since any node may be disturbed for a moment (for at most
        REPEATS_MAX workers); the second time without this worker, where the fleet can do without it.
        """
        if worker not in suspects:
            suspects.add(worker)
            return len(suspects) <= REPEATS_MAX
        if not self._fleet.retire(worker, why.code.replace("_", " ")):
            return False
        self._with_fewer(1.0 - 1.0 / len(figures.samples.workers))
        return True

    def _with_fewer(self, left_ratio: float) -> None:
        if self._client_max_rps is not None:
            self._client_max_rps *= left_ratio

    def _run(
        self, load: LoadRun, on_live: Callable[[LiveAggregate], None], losses: Sequence[Coded]
    ) -> Figures:
        job = self.job(load)
        if self._guard is not None:
            self._guard.begin(cpus=self._cpus)
        before, _ = self._counters(load)
        interrupted = False
        try:
            samples = self._fleet.run(job, on_progress=on_live, should_stop=load.should_stop)
        except LoadInterrupted as interrupt:
            samples, interrupted = interrupt.samples, True
            if not load.kept_if_interrupted or not _is_long_enough(
                samples, _window(load, samples, interrupted=True)
            ):
                raise
        self._loaded_until_s = time.monotonic()
        after, waited_s = self._counters(load)
        moved = activity(before, replace(after, monotonic_s=after.monotonic_s - waited_s))
        noise = None
        if self._guard is not None:
            noise = self._guard.end(server_cpu_s=moved.server_cpu_s, client_cpu_s=samples.client_cpu_s)
        if not interrupted and np.isin(samples.status, (int(Status.UNFINISHED), int(Status.TIMEOUT))).any():
            self._settle(load, moved)
        window = _window(load, samples, interrupted=interrupted)
        measurement = measure(
            replace(samples, stopped_early=samples.stopped_early and not interrupted),
            warm_up_s=load.warm_up_s,
            slo=self._scenario.slo,
            activity=moved,
            window=window,
            client_max_rps=self._client_max_rps,
            notes=(
                *losses,
                *((caveat("cut_short", window_s=window.seconds),) if interrupted else ()),
                *(() if noise is None else noise.caveats()),
                *self._warm_up_caveats(load, window, moved),
                *self._graph_caveats(),
                *(() if interrupted else _cut_caveats(load.arrivals, samples)),
            ),
        )
        measurement = replace(measurement, caveats=self._with_own_advice(measurement.caveats, after, load))
        if noise is not None:
            measurement = replace(measurement, canary_s=noise.canary_s)
        if interrupted and measurement.verdict == "PASS":
            measurement = replace(measurement, verdict="UNSURE", verdict_reason=coded("interrupted_early"))
        waited = job.drain_s is None or job.drain_s >= job.timeout_or_default_s
        return Figures(samples=samples, window=window, measurement=measurement, waited=waited)

    def _counters(self, load: LoadRun) -> tuple[Counters, float]:
        """Read the server's counters once its metrics page includes all that was sent, and return them with the seconds
        waited for it; without its metrics for a load that is too short for that."""
        if self._outruns_metrics(load):
            return replace(self._target.counters(), series={}), 0.0
        waited_s = max(0.0, self._loaded_until_s + self._metrics_every_s - time.monotonic())
        if waited_s > 0.0:
            self._sleep(waited_s)
        return self._target.counters(), waited_s

    def _outruns_metrics(self, load: LoadRun) -> bool:
        """Whether the wait until the server's metrics page includes the load would take more than half of its time."""
        return load.arrivals.duration_s < 2.0 * self._metrics_every_s

    def _with_own_advice(
        self, caveats: Sequence[Coded], counters: Counters, load: LoadRun
    ) -> tuple[Coded, ...]:
        """Replace the caveat of a server that counts no batches for servers other than TensorFlow Serving; leave it out
        where the server's own metrics are read, and say which of them the page lacks."""
        is_http = self._scenario.target.kind == "http"
        if not is_http and self._scenario.request.protocol in ("grpc", "rest"):
            return tuple(caveats)
        kept = tuple(note for note in caveats if note.code != "no_server_counters")
        is_silent, own = len(kept) < len(caveats), self._metrics_caveats(counters)
        if self._outruns_metrics(load):
            every_s, run_s = self._metrics_every_s, load.arrivals.duration_s
            slow = caveat("slow_metrics", every_s=every_s, run_s=run_s, needed_s=2.0 * every_s)
            own = (slow,) if is_silent else ()
        elif is_silent and not own and not (is_http and any(counters.series.values())):
            own = (caveat("no_target_metrics"),)
        return (*kept, *own)

    def _metrics_caveats(self, counters: Counters) -> tuple[Coded, ...]:
        """Caveats of a page of `target.metrics`, read after a load, that cannot be read or lacks a metric; () without
        batching, where a server need not count batches."""
        target, in_force = self._scenario.target, self._target.in_force
        if counters.page_fault:
            return (caveat("no_metrics_page", answer=counters.page_fault),)
        is_off = in_force is not None and in_force.known and in_force.batching is None
        if not counters.missing or (is_off and target.means.rows is not None):
            return ()
        names = [
            coded(
                "metric_misspelt" if near else "metric_lacking",
                name=getattr(target.metrics, key),
                key=key,
                near=near,
            )
            for key, near in counters.missing.items()
        ]
        return (caveat("missing_metrics", names=tuple(names)),)

    def _warm_up_caveats(self, load: LoadRun, window: Window, moved: ServerActivity) -> tuple[Coded, ...]:
        """Caveats of a warm-up that was too short; () where the whole run counts, or the parameters are not known."""
        in_force = self._target.in_force
        if in_force is None or load.whole:
            return ()
        settings = settings_of(in_force, cpus=self._scenario.target.cpus)
        return warm_up_caveats(window, moved, settings, cut=load.short)

    def _graph_caveats(self) -> tuple[Coded, ...]:
        """The caveat that both the model's graph and the server batch; () where they do not."""
        inside, in_force = self._target.endpoint.batches_inside, self._target.in_force
        if not inside or in_force is None or in_force.batching is None:
            return ()
        return (caveat("batched_twice", inside=inside),)

    def job(self, load: LoadRun) -> LoadJob:
        """Make the job for the load generators: which requests to send where and when, and how long to wait for
        answers.

        Raises:
            UsageError: the requests do not fit the model, the arrivals, or `target.endpoints`.
            ScenarioError: a recorded file of requests cannot be read.
            TargetError: the server does not answer what is sent once before the first load.
            MeasurementInvalidError: the client's highest rate could not be measured.
        """
        request, slo = self._scenario.request, self._scenario.slo
        requests = self._encoded()
        limit_s = None if load.patient else slo.patience_s(streams=request.protocol == "openai")
        arrivals = load.arrivals
        if isinstance(arrivals, Schedule):
            arrivals = arrivals.with_bodies(requests.order, requests.rows)
        timeout_s = request.timeout_s if load.timeout_s is None else load.timeout_s
        if timeout_s != requests.timeout_s:
            requests = replace(requests, timeout_s=timeout_s)  # it travels with a gRPC call
        answers = request.answers
        checked = answers.check != "status" and answers.sample > 0
        endpoint = self._target.endpoint
        return LoadJob(
            endpoint=endpoint,
            replicas=replicas_of(endpoint, self._scenario.target.endpoints, transport_of(requests.protocol)),
            requests=requests,
            arrivals=arrivals,
            timeout_s=timeout_s,
            drain_s=None if limit_s is None else min(timeout_s, PATIENCE * limit_s),
            in_flight_max=self._scenario.load.max_in_flight or IN_FLIGHT_MAX,
            connections=self._scenario.load.connections,
            check_every=max(1, round(1 / answers.sample)) if checked else 0,
            overdue_after_s=load.overdue_after_s,
        )

    def _encoded(self) -> RequestSet:
        """Encode the requests at the first call; later calls return the same set.

        That call also sends one request to a server of kind http, to see that it answers; sends each request alone,
        where the answers under load are to be compared with these; and measures the client's highest rate.
        """
        if self._requests is not None:
            return self._requests
        request, model_name = self._scenario.request, self._target.endpoint.model_name
        if request.protocol == "openai":
            self._requests = prompts_to(self._target.endpoint, request, seed=self._scenario.load.seed)
            if self._scenario.target.kind == "http":
                require_answer(self._target.endpoint, self._requests, is_json=False)
            return self._requests
        names = () if request.protocol == "http" else request.signatures
        requests = build_requests(
            request,
            {name: self._target.signature(name) for name in names},
            model_name=model_name,
            seed=self._scenario.load.seed,
            distinct=request.distinct,
        )
        if request.protocol == "http":
            require_answer(self._target.endpoint, requests, is_json=request.answers.check != "status")
        if request.answers.check == "expected" and requests.expected is None:
            requests = with_lone_answers(self._target.endpoint, requests)
        if self._ask_client_max_rps is not None:
            self._client_max_rps = self._ask_client_max_rps(requests)
        self._requests = requests
        return requests

    def _settle(self, load: LoadRun, during: ServerActivity | None) -> None:
        """Wait until the server has worked off requests that were given up, so that they do not slow the next trial.

        The server is idle when its counters do not move between two looks. These are WARM_UP_BATCHES executions of its
        longest batch apart (of those executed `during` the load or since: an overflowed queue makes far larger batches
        than were expected), since within a batch a slow server seems idle. After PATIENCE looks, and as many seconds,
        nothing more is waited for.
        """
        step_min_s = max(0.1, 0.0 if self._outruns_metrics(load) else self._metrics_every_s)
        before, _ = self._counters(load)
        longest_s = max(load.batch_s, 0.0 if during is None else _longest_batch_s(during))
        waited_s, by_cpu_only = 0.0, False
        while True:
            step_s = max(step_min_s, WARM_UP_BATCHES * longest_s)
            if waited_s >= PATIENCE * max(step_s, 1.0):
                self._cpu_tells_rest = self._cpu_tells_rest and not by_cpu_only  # one that never sleeps
                return
            self._sleep(step_s)
            waited_s += step_s
            after, _ = self._counters(load)
            moved = activity(before, after)
            counted = moved.batches or moved.device_busy_ratio or moved.requests_inside
            shows_work = counted or any(moved.requests_by_status.values()) or moved.went_back
            by_cpu_only = not shows_work
            computes = (moved.server_cpu_s or 0.0) > 0.2 * moved.duration_s  # it may be within a batch
            if not shows_work and not (computes and self._cpu_tells_rest):
                return
            longest_s = max(longest_s, _longest_batch_s(moved))
            before = after


class NotLoadedError(TargetError):
    """The load of a model was ended, or did not begin, because the load of another model failed."""


class LoadGroup:
    """Ties the loads of several models together: they begin at once, and a failure of one ends all.

    It is the `Guard` of each load: `begin` and `end` wait for the other loads, and the host is watched once,
    from the first to the last. `server`: the change of the server's counters meanwhile; None: no load has
    ended yet.
    """

    def __init__(self, target: Target, guard: Guard) -> None:
        self._target = target
        self._guard = guard
        self.server: ServerActivity | None = None

    def prepare(self, loads: int, *, ends_all: bool) -> None:
        """Make ready for `loads` loads; `ends_all`: when one of them ends early, all end."""
        self._cpus: Collection[int] | None = None
        self._first = threading.Barrier(loads, self._begin)
        self._last = threading.Barrier(loads, self._end)
        self._stop = threading.Event()
        self._ends_all = ends_all
        self._client_cpu_s: list[float] = []

    def begin(self, *, cpus: Collection[int] | None = None) -> None:
        """Wait until every load is ready, then watch the host; raises NotLoadedError where another load failed, or is
        not ready within 120 s."""
        self._cpus = cpus
        # For the others' requests to be encoded, and asked alone where answers are expected.
        ready_limit_s = 120.0
        _wait(self._first, ready_limit_s)

    def end(self, *, server_cpu_s: float | None = None, client_cpu_s: float = 0.0) -> HostNoise:  # noqa: ARG002
        """Wait until every load has ended, and return the noise of the host from the first to the last; raises
        NotLoadedError where another load failed."""
        self._client_cpu_s.append(client_cpu_s)
        _wait(self._last, None)
        return self._noise

    def abort(self) -> None:
        """End the loads that run; those that wait to begin raise `NotLoadedError`."""
        self._stop.set()
        self._first.abort()
        self._last.abort()

    def ends(self, should_stop: Callable[[LiveAggregate], bool] | None) -> Callable[[LiveAggregate], bool]:
        """Return a function of a load's live counts that is True when the load is to stop: `should_stop` says so, or
        another load has ended early or failed."""

        def stops(live: LiveAggregate) -> bool:
            if should_stop is not None and should_stop(live):
                if self._ends_all:
                    self._stop.set()
                return True
            return self._stop.is_set()

        return stops

    def _begin(self) -> None:
        self._guard.begin(cpus=self._cpus)
        self._before = self._target.counters()

    def _end(self) -> None:
        self.server = activity(self._before, self._target.counters())
        server_cpu_s, client_cpu_s = self.server.server_cpu_s, sum(self._client_cpu_s)
        self._noise = self._guard.end(server_cpu_s=server_cpu_s, client_cpu_s=client_cpu_s)


def _wait(barrier: threading.Barrier, limit_s: float | None) -> None:
    try:
        barrier.wait(limit_s)
    except threading.BrokenBarrierError as error:
        raise NotLoadedError("not loaded, because the load of another model failed") from error


def _window(load: LoadRun, samples: Samples, *, interrupted: bool = False) -> Window:
    """Return the part of a load that counts; of an interrupted one what was due before the first of the requests that
    the interruption left without an answer."""
    if load.whole:
        window = whole_run(samples)
    else:
        window = window_of(samples, warm_up_s=load.warm_up_s, duration_s=load.arrivals.duration_s)
    if interrupted:
        left = np.isin(samples.status, (int(Status.UNFINISHED), int(Status.UNSENT)))
        end_ns = int(np.min(samples.due_ns, where=left, initial=window.end_ns))
        window = replace(window, end_ns=max(end_ns, window.start_ns))
    if isinstance(load.arrivals, ClosedLoop) and not load.whole:
        window = between_answers(samples, window)
    return window


def _is_long_enough(samples: Samples, window: Window) -> bool:
    """Whether the part of an interrupted load that counts has a second and ten requests."""
    return window.seconds >= 1.0 and int(np.count_nonzero(window.holds(samples.due_ns))) >= 10


def _longest_batch_s(moved: ServerActivity) -> float:
    return max(moved.execution_s_by_rows.values(), default=0.0)


def loaded_cpus(scenario: Scenario) -> frozenset[int]:
    """Return the numbers of the CPUs that the server or the client may run on: those in the scenario; all, where it
    names none for one of them."""
    anywhere = schedulable_cpus()
    server, client = scenario.target.cpus, scenario.load.cpus
    return frozenset(anywhere if server is None else server) | (
        anywhere if client is None else frozenset(client)
    )


def _cut_caveats(arrivals: Arrivals, samples: Samples) -> tuple[Coded, ...]:
    """The caveat that the time was over before the requested number of requests was sent; () where it was not."""
    asked = arrivals.requests_max if isinstance(arrivals, ClosedLoop) else None
    requests = samples.one_in * len(samples)
    if asked is None or requests >= asked:
        return ()
    return (caveat("requests_cut", requests=requests, asked=asked),)
