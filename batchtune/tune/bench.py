"""How is one trial run: parameters applied, load sent, counters read, figures made?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np

from batchtune.batching import Configuration
from batchtune.errors import BatchingParametersError, TargetError
from batchtune.load.job import IN_FLIGHT_MAX, LoadJob
from batchtune.load.live import LiveAggregate
from batchtune.load.samples import Samples, Status
from batchtune.measure.measurement import Measurement, measure
from batchtune.measure.quantiles import Estimate
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule, arrivals_of
from batchtune.scenario.payloads import RequestSet, build_requests
from batchtune.scenario.spec import Scenario
from batchtune.target.endpoint import Endpoint
from batchtune.target.telemetry import Counters, activity
from batchtune.target.tfserving import ApplyRecord
from batchtune.tune.trial import FinishedTrial, Source, Trial, is_feasible, violations
from batchtune.wire.tensors import Signature

PROBE_WARM_UP_S = 0.3
"""Warm-up of the rule's short probes, when the scenario's is longer."""

PATIENCE = 10.0
"""Answers later than so many times the SLO's largest limit are not waited for when a run has ended."""

HOPELESS_RATIO = 0.25

SETTLE_LIMIT_S = 3.0
SETTLE_STEP_S = 0.1

_LEFT_BEHIND = (int(Status.UNFINISHED), int(Status.TIMEOUT))


class Target(Protocol):
    """A launched server that takes configurations."""

    @property
    def endpoint(self) -> Endpoint: ...

    def apply(self, configuration: Configuration) -> ApplyRecord: ...

    def counters(self) -> Counters: ...

    def signature(self, name: str) -> Signature: ...

    def alive(self) -> bool: ...

    def log_tail(self) -> str: ...


class Fleet(Protocol):
    """Load generators that run one job at a time."""

    def run(
        self,
        job: LoadJob,
        *,
        on_progress: Callable[[LiveAggregate], None] | None = None,
        should_stop: Callable[[LiveAggregate], bool] | None = None,
    ) -> Samples: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A trial that is to be run. `concurrency` and `duration_s` are set for probes only; None: as the scenario says."""

    number: int
    configuration: Configuration
    source: Source
    reason: str
    seed: int
    point: dict[str, Any] | None = None
    block: int | None = None
    rate_rps: float | None = None
    concurrency: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What came of one load: the samples and their sum."""

    samples: Samples
    measurement: Measurement


class Bench:
    """A target, a fleet and the scenario's requests, ready for one trial after another.

    `on_live` is called a few times a second with the trial in flight; `now_s` is the monotonic clock.
    """

    def __init__(
        self,
        scenario: Scenario,
        target: Target,
        fleet: Fleet,
        *,
        on_live: Callable[[Plan, LiveAggregate], None],
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sleep = sleep
        self._scenario = scenario
        self._target = target
        self._fleet = fleet
        self._on_live = on_live
        self._now_s = now_s
        self._requests: RequestSet | None = None

    def run(self, plan: Plan) -> FinishedTrial:
        """Run a trial; a target that refuses, dies or answers nothing makes a failed one."""
        started_s, started_utc = self._now_s(), datetime.now(UTC).isoformat(timespec="milliseconds")
        figures: Figures | None = None
        failure: str | None = None
        try:
            self._target.apply(plan.configuration)
            figures = self._load(plan)
            failure = self._defect(figures)
        except (TargetError, BatchingParametersError) as error:
            failure = error.message
        measurement = figures.measurement if figures is not None else None
        constraints = self._constraints(measurement) if measurement is not None else {}
        objective = self._objective(plan, measurement) if measurement is not None else None
        trial = Trial(
            number=plan.number,
            configuration=plan.configuration,
            source=plan.source,
            reason=plan.reason,
            state="failed" if failure is not None else "complete",
            failure=failure,
            point=plan.point,
            block=plan.block,
            seed=plan.seed,
            rate_rps=None if measurement is None else measurement.offered_rps,
            concurrency=None if measurement is None else measurement.concurrency,
            objective=None if failure is not None else objective,
            constraints=constraints,
            feasible=failure is None and bool(constraints) and is_feasible(constraints),
            measurement=measurement,
            seconds=self._now_s() - started_s,
            started_utc=started_utc,
        )
        return FinishedTrial(trial=trial, samples=None if figures is None else figures.samples)

    def _load(self, plan: Plan) -> Figures:
        load = self._scenario.load
        probe = plan.duration_s is not None
        warm_up_s = min(load.warm_up_s, PROBE_WARM_UP_S) if probe else load.warm_up_s
        duration_s = warm_up_s + (plan.duration_s if plan.duration_s is not None else load.duration_s)
        arrivals: Arrivals = arrivals_of(load, rate_rps=plan.rate_rps, duration_s=duration_s, seed=plan.seed)
        if plan.concurrency is not None:
            arrivals = ClosedLoop(concurrency=plan.concurrency, duration_s=duration_s)
        before = self._target.counters()
        samples = self._fleet.run(
            self._job(arrivals),
            on_progress=lambda live: self._on_live(plan, live),
            should_stop=_hopeless(arrivals, warm_up_s=warm_up_s),
        )
        after = self._target.counters()
        if np.isin(samples.status, _LEFT_BEHIND).any():
            self._settle()
        measurement = measure(
            samples,
            warm_up_s=warm_up_s,
            slo=self._scenario.slo,
            activity=activity(before, after),
            duration_s=duration_s,
        )
        return Figures(samples=samples, measurement=measurement)

    def _job(self, arrivals: Arrivals) -> LoadJob:
        request = self._scenario.request
        limit_s = max(self._scenario.slo.limits().values(), default=None)
        if self._requests is None:
            self._requests = build_requests(
                request,
                self._target.signature(request.signature),
                model_name=self._target.endpoint.model_name,
                seed=self._scenario.load.seed,
                distinct=request.distinct,
            )
        return LoadJob(
            endpoint=self._target.endpoint,
            requests=self._requests,
            arrivals=arrivals,
            timeout_s=request.timeout_s,
            drain_s=min(request.timeout_s, PATIENCE * limit_s) if limit_s is not None else None,
            in_flight_max=self._scenario.load.max_in_flight or IN_FLIGHT_MAX,
            connections=self._scenario.load.connections,
            overdue_after_s=None if limit_s is None else PATIENCE * limit_s,
        )

    def _settle(self) -> None:
        """Wait until the server has worked off what we gave up on, so that it does not weigh on the next trial."""
        give_up_s = self._now_s() + SETTLE_LIMIT_S
        before = self._target.counters()
        while self._now_s() < give_up_s:
            self._sleep(SETTLE_STEP_S)
            after = self._target.counters()
            moved = activity(before, after)
            if not moved.batches and not sum(moved.requests_by_status.values()):
                return
            before = after

    def _defect(self, figures: Figures) -> str | None:
        """Why these figures describe no working server; None when they do."""
        if not self._target.alive():
            return f"the server died under load; its last words:\n{self._target.log_tail()}"
        measurement = figures.measurement
        if measurement.requests and measurement.throughput_rps.value == 0.0:
            classes = ", ".join(f"{count} × {name}" for name, count in measurement.errors.items())
            texts = "; ".join(figures.samples.error_texts.values())
            return f"no request was answered: {classes or 'none finished'}{': ' + texts if texts else ''}"
        return None

    def _constraints(self, measurement: Measurement) -> dict[str, float]:
        slo = self._scenario.slo
        latency_s = {name: one.value for name, one in measurement.latency_s.items()}
        return violations(
            latency_s, measurement.error_ratio, limits=slo.limits(), error_limit=slo.error_ratio
        )

    def _objective(self, plan: Plan, measurement: Measurement) -> Estimate:
        match self._scenario.objective:
            case "throughput":
                return measurement.throughput_rps
            case "latency":
                return measurement.latency_s["p95"]
            case "capacity":
                rate_rps = plan.rate_rps or measurement.throughput_rps.value
                return Estimate(value=rate_rps, low=rate_rps, high=rate_rps)


def _hopeless(arrivals: Arrivals, *, warm_up_s: float) -> Callable[[LiveAggregate], bool] | None:
    """Stops an open loop when a quarter of all its requests are far beyond the SLO; a closed loop is never stopped."""
    if not isinstance(arrivals, Schedule):
        return None
    total = len(arrivals.due_ns)
    enough_s = warm_up_s + HOPELESS_RATIO * (arrivals.duration_s - warm_up_s)

    def far_beyond(live: LiveAggregate) -> bool:
        return live.elapsed_s >= enough_s and live.errors + live.late + live.overdue >= HOPELESS_RATIO * total

    return far_beyond
