"""How is one trial run: parameters applied, load sent, figures made, failures told?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from batchtune.errors import BatchingParametersError, TargetError
from batchtune.load.live import LiveAggregate
from batchtune.load.record.samples import Status
from batchtune.load.worker.job import LoadJob
from batchtune.measure.measurement import Measurement
from batchtune.measure.slo import primary_limit
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.measure.validity.host import HostGuard
from batchtune.measure.validity.steady_state import SloWatch, WatchPlan
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule, arrivals_of
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.loader import PATIENCE, Figures, Fleet, Loader, LoadRun, Target
from batchtune.tune.one_capacity import find_capacity
from batchtune.tune.trials.failure_texts import is_overload, texts_by_class, unanswered, undecodable
from batchtune.tune.trials.pace import PROBE_WARM_UP_S, Pace, Times, times_of
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import (
    NO_CANDIDATES,
    FinishedTrial,
    Probe,
    Trial,
    TrialRequest,
    is_feasible,
    violations,
)

SEED_STRIDE = 1_000_003
"""Seeds of two trials or blocks are this far apart: a prime, so that none plays the schedule of another."""

LONE_ANSWERS, LONE_MAX_S = 5, 8.0
"""A lone client goes on until so many answers, where that takes no longer. One answer is a measurement too."""

HOPELESS_RATIO = 0.25
"""An open loop ends when this share of its time is over and this share of all its requests is far beyond the SLO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A trial that is to be run; `pace`: what is known of the server's speed (None: the scenario's own times hold)."""

    number: int
    request: TrialRequest
    seed: int
    pace: Pace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    figures: Figures
    objective: Estimate | None
    probes: tuple[Probe, ...] = ()


class Bench:
    """A target, a fleet and the scenario's requests, ready for one trial after another.

    `on_live` is called a few times a second with the trial in flight; `now_s` is the monotonic clock. `guard` and
    `client_max_rps` are a Loader's.
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
        guard: HostGuard | None = None,
        client_max_rps: Callable[[RequestSet], float] | None = None,
    ) -> None:
        self._scenario = scenario
        self._target = target
        self._on_live = on_live
        self._now_s = now_s
        self._loader = Loader(
            scenario, target, fleet, sleep=sleep, guard=guard, client_max_rps=client_max_rps
        )

    def run(self, plan: Plan) -> FinishedTrial:
        """Run a trial; a target that refuses, dies or answers nothing makes a failed one."""
        started_s, started_utc = self._now_s(), datetime.now(UTC).isoformat(timespec="milliseconds")
        outcome: _Outcome | None = None
        failure: str | None = None
        startup_s: float | None = None
        try:
            startup_s = self._target.apply(plan.request.configuration).startup_s
            outcome = self._capacity(plan) if self._asks_capacity(plan) else self._one_load(plan)
            failure = self._defect(outcome)
        except (TargetError, BatchingParametersError) as error:
            failure = error.message
        measurement = None if outcome is None else outcome.figures.measurement
        constraints = {} if outcome is None else self._constraints(outcome)
        trial = Trial(
            number=plan.number,
            request=plan.request,
            state="complete" if failure is None else "failed",
            failure=failure,
            seed=plan.seed,
            rate_rps=None if measurement is None else measurement.offered_rps,
            concurrency=None if measurement is None else measurement.concurrency,
            objective=None if outcome is None or failure is not None else _known(outcome.objective),
            constraints=constraints,
            feasible=failure is None and bool(constraints) and is_feasible(constraints),
            measurement=measurement,
            probes=() if outcome is None else outcome.probes,
            error_texts={} if outcome is None else texts_by_class(outcome.figures.samples),
            startup_s=startup_s,
            seconds=self._now_s() - started_s,
            started_utc=started_utc,
        )
        return FinishedTrial(trial=trial, samples=None if outcome is None else outcome.figures.samples)

    def job(self, plan: Plan, *, duration_s: float) -> LoadJob:
        """The load of a trial for so long, warm-up none, for who sends it beside another."""
        arrivals = arrivals_of(self._scenario.load, duration_s=duration_s, seed=plan.seed)
        timeout_s = self._times(plan).timeout_s
        return self._loader.job(LoadRun(arrivals=arrivals, warm_up_s=0.0, timeout_s=timeout_s, patient=True))

    def _asks_capacity(self, plan: Plan) -> bool:
        return (
            self._scenario.objective == "capacity"
            and plan.request.source == "variant"
            and plan.request.rate_rps is None
            and plan.request.concurrency is None
        )

    def _one_load(self, plan: Plan) -> _Outcome:
        load = self._scenario.load
        short = plan.request.duration_s is not None
        if load.requests is not None and not short:
            return self._counted_requests(plan)
        times = self._times(plan)
        warm_up_s = times.warm_up_s
        duration_s = warm_up_s + times.duration_s
        arrivals: Arrivals
        if plan.request.concurrency is not None and (short or load.open_loop):
            arrivals = ClosedLoop(concurrency=plan.request.concurrency, duration_s=duration_s)
        else:
            arrivals = arrivals_of(
                load,
                rate_rps=plan.request.rate_rps,
                concurrency=plan.request.concurrency,
                duration_s=duration_s,
                seed=plan.seed,
            )
        limit_s = self._scenario.slo.patience_s(streams=self._scenario.request.protocol == "openai")
        watch = self._watch(plan, warm_up_s=warm_up_s)
        late_s = None if limit_s is None else PATIENCE * limit_s
        run = LoadRun(
            arrivals=arrivals,
            warm_up_s=warm_up_s,
            overdue_after_s=late_s if watch is None else watch.plan.limit.seconds,
            should_stop=watch or (None if limit_s is None else _hopeless(arrivals, warm_up_s=warm_up_s)),
            timeout_s=times.timeout_s,
            batch_s=times.batch_s,
            patient=plan.request.source in NO_CANDIDATES,
        )
        figures = self._loader.run(run, on_live=lambda live: self._on_live(plan, live))
        if plan.request.source == "probe" and plan.request.concurrency == 1:
            figures = self._with_enough_answers(plan, run, figures)
        return _Outcome(figures=figures, objective=self._objective(plan, figures.measurement))

    def _with_enough_answers(self, plan: Plan, run: LoadRun, figures: Figures) -> Figures:
        """The lone client again, for longer, where it got few answers and more are to be had in reasonable time."""
        latency_s = figures.measurement.latency_s["p50"].value
        enough_s = min(LONE_ANSWERS * latency_s, LONE_MAX_S)
        if figures.measurement.requests >= LONE_ANSWERS or not 2.0 * latency_s <= enough_s:
            return figures
        longer = replace(
            run, arrivals=ClosedLoop(concurrency=1, duration_s=enough_s), warm_up_s=0.0, whole=True
        )
        return self._loader.run(longer, on_live=lambda live: self._on_live(plan, live))

    def _times(self, plan: Plan) -> Times:
        scenario = self._scenario
        load = scenario.load
        if plan.pace is not None:
            return times_of(
                plan.pace,
                scenario,
                plan.request.configuration,
                clients=plan.request.concurrency,
                rate_rps=plan.request.rate_rps,
                short_s=plan.request.duration_s,
            )
        short = plan.request.duration_s is not None
        return Times(
            warm_up_s=min(load.warm_up_s, PROBE_WARM_UP_S) if short else load.warm_up_s,
            duration_s=load.duration_s if plan.request.duration_s is None else plan.request.duration_s,
            timeout_s=scenario.request.timeout_s,
        )

    def _watch(self, plan: Plan, *, warm_up_s: float) -> SloWatch | None:
        """Ends a run at one rate of a search for a capacity as soon as its verdict is clear; fresh runs go on."""
        limit = primary_limit(self._scenario.slo)
        if (
            limit is None
            or limit.figure in ("itl", "goodput")
            or plan.request.rate_rps is None
            or self._scenario.objective != "capacity"
            or plan.request.source == "confirm"
        ):
            return None
        rows = self._scenario.request.rows_most
        size = (
            1
            if plan.request.configuration.batching is None
            else in_force(plan.request.configuration, "max_batch_size")
        )
        batch_requests_max = 1 if self._scenario.request.protocol == "openai" else max(1, size // rows)
        return SloWatch(
            WatchPlan(
                limit=limit,
                error_ratio=self._scenario.slo.error_ratio,
                warm_up_s=warm_up_s,
                rate_rps=plan.request.rate_rps,
                requests_per_batch=max(1.0, 0.5 * batch_requests_max),
                batch_rows_max=batch_requests_max,
            )
        )

    def _counted_requests(self, plan: Plan) -> _Outcome:
        """A fixed number of requests from the first to the last answer, after a warm-up that is not among them."""
        load = self._scenario.load
        arrivals = arrivals_of(load, concurrency=plan.request.concurrency, duration_s=load.duration_s)
        if load.warm_up_s > 0.0 and isinstance(arrivals, ClosedLoop):
            warm_up = replace(arrivals, duration_s=load.warm_up_s, requests_max=None)
            self._loader.run(
                LoadRun(arrivals=warm_up, warm_up_s=0.0), on_live=lambda live: self._on_live(plan, live)
            )
        run = LoadRun(arrivals=arrivals, warm_up_s=0.0, whole=True)
        figures = self._loader.run(run, on_live=lambda live: self._on_live(plan, live))
        return _Outcome(figures=figures, objective=self._objective(plan, figures.measurement))

    def _objective(self, plan: Plan, measurement: Measurement) -> Estimate:
        if self._scenario.objective == "latency":
            return measurement.latency_s["p95"]
        if self._scenario.objective == "capacity" and plan.request.rate_rps is not None:
            return Estimate(
                value=plan.request.rate_rps, low=plan.request.rate_rps, high=plan.request.rate_rps
            )
        return measurement.throughput_rps

    def _capacity(self, plan: Plan) -> _Outcome:
        def load(request: TrialRequest, number: int) -> Figures:
            return self._one_load(replace(plan, request=request, seed=plan.seed + number)).figures

        capacity = find_capacity(
            load, self._scenario, plan.request, pace=plan.pace or Pace(), now_s=self._now_s
        )
        held_rps, missed_rps = capacity.bracket.held_rps, capacity.bracket.missed_rps
        objective = Estimate(value=held_rps, low=held_rps, high=missed_rps) if held_rps else None
        return _Outcome(figures=capacity.figures, objective=objective, probes=capacity.probes)

    def _defect(self, outcome: _Outcome) -> str | None:
        """Why these figures describe no working server; None when they do."""
        if not self._target.alive():
            return f"the server died under load; its last words:\n{self._target.log_tail()}"
        samples = outcome.figures.samples
        if lie := undecodable(samples):
            return lie
        if not len(samples) or outcome.figures.measurement.throughput_rps.value > 0.0:
            return None
        late = (samples.status == Status.OK).any() or outcome.probes or not outcome.figures.waited
        if late and is_overload(samples):
            return None  # it was overwhelmed, and that is an answer
        return unanswered(samples)

    def _constraints(self, outcome: _Outcome) -> dict[str, float]:
        slo = self._scenario.slo
        run = outcome.figures.measurement
        latency_s = {name: estimate.value for name, estimate in run.latency_s.items()}
        return violations(latency_s, run.error_ratio, limits=slo.limits(), error_limit=slo.error_ratio)


def _known(objective: Estimate | None) -> Estimate | None:
    """None for a rate of 0 and for NaN: nothing was answered in the measured time, so there is nothing to compare."""
    return objective if objective is not None and objective.value > 0.0 else None


def _hopeless(arrivals: Arrivals, *, warm_up_s: float) -> Callable[[LiveAggregate], bool] | None:
    """Stops an open loop when a quarter of all its requests are far beyond the SLO; a closed loop is never stopped."""
    if not isinstance(arrivals, Schedule):
        return None
    total = len(arrivals.due_ns)
    enough_s = warm_up_s + HOPELESS_RATIO * (arrivals.duration_s - warm_up_s)

    def far_beyond(live: LiveAggregate) -> bool:
        return live.elapsed_s >= enough_s and live.errors + live.late + live.overdue >= HOPELESS_RATIO * total

    return far_beyond
