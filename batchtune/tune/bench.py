"""Runs one trial: applies the parameters, loads every model, measures the answers, judges them by the SLO.

Several models of one server are loaded at once, each by a fleet of its own: no load begins before the requests of all
are encoded, and the host is watched from the first request to the last answer of all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol, cast

from batchtune.batching.parameters import Configuration
from batchtune.errors import (
    BatchingParametersError,
    ServerGoneError,
    TargetError,
    UsageError,
    WrongAnswerError,
)
from batchtune.load.cluster.cluster_fleet import AnyFleet
from batchtune.load.fleet import LiveAggregate, LoadJob
from batchtune.load.samples import Status
from batchtune.measure.caveats import HostGuard
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.measure.slo import SloWatch, primary_limit
from batchtune.plain_values import as_text
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule, arrivals_of
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.command import CommandTarget
from batchtune.target.telemetry import ServerActivity
from batchtune.target.tfserving import ServedModel, TfServingTarget
from batchtune.tune.loader import (
    PATIENCE,
    Figures,
    Guard,
    Loader,
    LoadGroup,
    LoadRun,
    NotLoadedError,
    Served,
    Target,
)
from batchtune.tune.one_capacity import find_capacity
from batchtune.tune.trials.pace import PROBE_WARM_UP_S, RUN_BATCHES, Pace, RunTimes, times_of
from batchtune.tune.trials.trial import (
    NO_CANDIDATES,
    FinishedTrial,
    Probe,
    Trial,
    TrialRequest,
    is_feasible,
    is_overload,
    texts_by_class,
    unanswered,
    undecodable,
    violations,
)

SEED_STRIDE = 1_000_003
"""Distance between the seeds of two trials or blocks: a prime, so that no two have the same schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A trial that is to be run: its number, what it is to measure, the seed of its load.

    `pace`: what is known of the server's speed, by which the load's times are chosen; None: the scenario's times.
    """

    number: int
    request: TrialRequest
    seed: int
    pace: Pace | None = None


class TrialBench(Protocol):
    """A protocol: what can run a planned trial, such as a server under load, a table of recorded trials, a simulator.

    `run` returns the finished trial, a failed one too; it raises what `Bench.run` raises.
    """

    def run(self, plan: Plan) -> FinishedTrial: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    figures: Figures
    objective: Estimate | None
    probes: tuple[Probe, ...] = ()


class Bench:
    """Runs trials one after another on a target, with the scenario's requests.

    `fleet`: sends the load; with several models, model name -> its fleet.
    `on_live`: called a few times a second, one call at a time, with the plan of the trial in flight and its live
    counts; with several models, with the plan and counts of one model at a time. `now_s`: a monotonic clock, in
    seconds.
    `sleep`, `guard`, `client_max_rps`: passed to `Loader`.
    """

    def __init__(
        self,
        scenario: Scenario,
        target: Target,
        fleet: AnyFleet | Mapping[str, AnyFleet],
        *,
        on_live: Callable[[Plan, LiveAggregate], None],
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        guard: Guard | None = None,
        client_max_rps: Callable[[RequestSet], float] | None = None,
    ) -> None:
        self._scenario = scenario
        self._target = target
        self._on_live = on_live
        self._now_s = now_s
        self._lock = threading.Lock()
        self._together: LoadGroup | None = None
        self._answered_with: Configuration | None = None
        if isinstance(fleet, Mapping):
            guard = self._together = LoadGroup(target, HostGuard() if guard is None else guard)

        def model(own: Scenario, served: Served, sender: AnyFleet) -> _ModelBench:
            loader = Loader(own, served, sender, sleep=sleep, guard=guard, client_max_rps=client_max_rps)
            return _ModelBench(own, loader, on_live=self._show, now_s=now_s, together=self._together)

        if isinstance(fleet, Mapping):
            server = cast("TfServingTarget", target)  # a scenario of several models has no other
            self._models = {
                name: model(own, ServedModel(server, name), fleet[name])
                for name, own in scenario.of_models().items()
            }
        else:
            self._models = {"": model(scenario, target, fleet)}

    def run(self, plan: Plan) -> FinishedTrial:
        """Run a trial. It is a failed trial where the target refuses the parameters, dies or answers nothing.

        Where somebody else changed the parameters during the load, the load is sent again once; where that happens
        twice, the trial fails.

        Raises:
            UsageError: the requests do not fit a model; with several models the message names it.
            MeasurementInvalidError: a load generator failed, or too few workers are left.
            ServerGoneError: a running server has ended and does not return, or answers nothing any more; the trial says
                nothing of its configuration.
            WrongAnswerError: a running server has no such place for its parameters as the scenario names.
        """
        started_s, started_utc = self._now_s(), datetime.now(UTC).isoformat(timespec="milliseconds")
        plans = self._plans(plan)
        outcomes: dict[str, _Outcome] = {}
        failure: str | None = None
        startup_s: float | None = None
        is_applied = False
        try:
            startup_s = self._target.apply(plan.request.configuration)
            is_applied = True
            outcomes = self._loaded(plans)
            if self._foreign_change():
                self._target.apply(plan.request.configuration)
                outcomes = self._loaded(plans)
                if theirs := self._foreign_change():
                    outcomes = {}
                    raise TargetError(f"somebody else set {theirs} under its load, twice")
            self._require_answers(plan, outcomes)
        except (TargetError, BatchingParametersError) as error:
            fatal = (ServerGoneError,) if is_applied else (ServerGoneError, WrongAnswerError)
            if isinstance(error, fatal):
                raise
            failure = error.message
            self._await_return(plan)
        ended = Trial(
            number=plan.number,
            request=plan.request,
            state="complete" if failure is None else "failed",
            failure=failure,
            is_refused=not is_applied,
            seed=plan.seed,
            startup_s=startup_s,
            seconds=self._now_s() - started_s,
            started_utc=started_utc,
        )
        parts = {
            name: self._judged(
                replace(ended, number=own.number, request=own.request, seed=own.seed, model=name),
                outcomes.get(name),
                beside=len(plans) > 1,
            )
            for name, own in plans.items()
        }
        samples = {name: outcome.figures.samples for name, outcome in outcomes.items()}
        if self._together is None:
            return FinishedTrial(trial=parts[""], samples=samples.get(""))
        server = self._together.server if outcomes else None
        return FinishedTrial(trial=_whole(ended, parts, server), samples=samples)

    def job(self, plan: Plan, *, duration_s: float) -> LoadJob:
        """Make the job of a trial that lasts `duration_s` seconds without warm-up, for a load generator that runs two
        jobs in turns (`load.duet`). Only for servers of one model."""
        return self._models[""].job(plan, duration_s=duration_s)

    def _plans(self, plan: Plan) -> dict[str, Plan]:
        """Model name -> the plan of its part: `scale` times the model's stated rate, and a seed of its own.

        A server of one model has one part, "": the plan itself.
        """
        if self._together is None:
            return {"": plan}
        request = plan.request
        plans: dict[str, Plan] = {}
        for name in request.models or self._models:
            load = self._models[name].scenario.load
            part = replace(
                request,
                configuration=request.configuration.of_model(name),
                reason="/".join(filter(None, (request.reason, name))),
                rate_rps=request.scale * (load.rate_rps or 0.0)
                if load.open_loop and request.concurrency is None
                else None,
            )
            seed = plan.seed + load.seed - self._scenario.load.seed
            plans[name] = Plan(number=plan.number + len(plans), request=part, seed=seed, pace=plan.pace)
        return plans

    def _loaded(self, plans: Mapping[str, Plan]) -> dict[str, _Outcome]:
        """Run the loads at once, each on a thread of its own (one model: on this thread). Returns outcomes by model.

        Where a load raises, or Ctrl-C comes, all end; then raises the error of a load that failed by itself.
        """
        together = self._together
        if together is None:
            return {name: self._models[name].load(plan) for name, plan in plans.items()}
        together.prepare(len(plans), ends_all=all(plan.request.source != "load" for plan in plans.values()))

        def load(name: str) -> _Outcome:
            try:
                return self._models[name].load(plans[name])
            except BaseException as error:
                together.abort()
                if isinstance(error, UsageError):
                    raise type(error)(f"{name}: {error.message}", hint=error.hint) from error
                raise

        with ThreadPoolExecutor(max_workers=len(plans), thread_name_prefix="load") as pool:
            runs = {name: pool.submit(load, name) for name in plans}
            try:
                errors = [error for run in runs.values() if (error := run.exception()) is not None]
            except BaseException:
                together.abort()
                raise
        for error in sorted(errors, key=lambda error: isinstance(error, NotLoadedError)):
            raise error
        return {name: run.result() for name, run in runs.items()}

    def _require_answers(self, plan: Plan, outcomes: Mapping[str, _Outcome]) -> None:
        """Check that a running server of kind http that fell silent under a load still answers a lone request, with the
        configuration that it answered with before.

        Raises:
            TargetError: it takes no connections.
            ServerGoneError: it does not, or does not take that configuration any more.
        """
        if not self._is_of_others:
            return
        if not self._target.alive():
            raise TargetError("the server ended under load")
        if not any(outcome.figures.samples.fell_silent for outcome in outcomes.values()):
            self._answered_with = plan.request.configuration
            return
        known = self._answered_with
        if known is None:
            return
        lone_s = 0.0 if plan.pace is None else plan.pace.lone_s
        wait_s = float(known.in_force("batch_timeout_micros") or 0) / 1e6
        limit_s = PATIENCE * max(1.0, lone_s) + wait_s
        where = f"the server at {self._target.endpoint.rest_url} stopped answering"
        hint = "start the server again, then go on"
        try:
            self._target.apply(known)
        except ServerGoneError:
            raise
        except TargetError as error:
            raise ServerGoneError(f"{where}: {error.message}", hint=hint) from error
        if not self._models[""].loader.answers_one(limit_s):
            failure = f"no answer within {limit_s:.3g} s to a request sent alone after trial {plan.number}"
            raise ServerGoneError(f"{where}: {failure}", hint=hint)

    def _await_return(self, plan: Plan) -> None:
        """Wait for a running server of kind http that ended in a trial, by giving it the configuration that it answered
        with before.

        Raises:
            ServerGoneError: it does not return.
        """
        if not self._is_of_others or self._target.alive():
            return
        try:
            self._target.apply(self._answered_with or plan.request.configuration)
        except ServerGoneError:
            raise
        except (TargetError, BatchingParametersError):
            return  # the next trial shows it

    def _foreign_change(self) -> str:
        """What somebody else gave a running server of kind http under the load, in words; "" where nobody did."""
        return self._target.foreign_change() if isinstance(self._target, CommandTarget) else ""

    @property
    def _is_of_others(self) -> bool:
        """Whether the server is of kind http and others start it."""
        return self._scenario.target.kind == "http" and self._scenario.target.launch is None

    def _judged(self, trial: Trial, outcome: _Outcome | None, *, beside: bool) -> Trial:
        """Complete the trial of one model with its figures, judged by the SLO.

        `outcome` None: its load did not end; the trial is returned as it is. `beside`: other models were loaded too,
        so that the server's counters are left out: they count all models.
        """
        if outcome is None:
            return trial
        model, measurement = self._models[trial.model], outcome.figures.measurement
        failure = self._defect(outcome)
        constraints = model.constraints(measurement)
        if beside:
            measurement = replace(measurement, server=None)  # it counts all models together
        if failure is not None:  # whatever else was wrong with client or host
            reason = as_text(failure)
            measurement = replace(measurement, verdict="FAIL", verdict_reason=reason, decision=None)
        return replace(
            trial,
            state="complete" if failure is None else "failed",
            failure=failure,
            rate_rps=measurement.offered_rps,
            concurrency=measurement.concurrency,
            objective=_known(outcome.objective) if failure is None else None,
            constraints=constraints,
            feasible=failure is None and is_feasible(constraints),
            measurement=measurement,
            probes=outcome.probes,
            error_texts=texts_by_class(outcome.figures.samples),
        )

    def _show(self, plan: Plan, live: LiveAggregate) -> None:
        with self._lock:
            self._on_live(plan, live)

    def _defect(self, outcome: _Outcome) -> str | None:
        """Why these figures are not those of a working server: it died, its answers cannot be decoded, or it answered
        nothing though it was not overloaded. None: they are."""
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
        # A load that was ended early may have been ended before the first answer; a lone request waits behind it.
        model = self._models.get("") if samples.stopped_early and is_overload(samples) else None
        if model is not None and model.loader.answers_one(model.scenario.request.timeout_s):
            return None
        return unanswered(samples)


def _whole(ended: Trial, parts: Mapping[str, Trial], server: ServerActivity | None) -> Trial:
    """The trial of several models: failed where the part of one is, feasible where all parts are."""
    failures = [f"{name}: {part.failure}" for name, part in parts.items() if part.failure is not None]
    failure = ended.failure or next(iter(failures), None)
    return replace(
        ended,
        state="complete" if failure is None else "failed",
        failure=failure,
        feasible=all(part.feasible for part in parts.values()),
        parts=dict(parts),
        server=server,
    )


class _ModelBench:
    """Loads one model of the server; `together`: what ties its load to those of the other models, None: it is alone."""

    def __init__(
        self,
        scenario: Scenario,
        loader: Loader,
        *,
        on_live: Callable[[Plan, LiveAggregate], None],
        now_s: Callable[[], float],
        together: LoadGroup | None,
    ) -> None:
        self.scenario = scenario
        self.loader = loader
        self._on_live = on_live
        self._now_s = now_s
        self._together = together

    def load(self, plan: Plan) -> _Outcome:
        """Send the plan's load, or search the capacity where the plan needs one, and return what was measured."""
        if self._asks_capacity(plan):
            return self._capacity(plan)
        figures = self._one_load(plan)
        return _Outcome(figures=figures, objective=self._objective(plan, figures.measurement))

    def _keeps_part(self, plan: Plan) -> bool:
        """Whether Ctrl-C keeps the part of a load that was measured: of `batchtune load`, for one model."""
        return plan.request.source == "load" and self._together is None

    def job(self, plan: Plan, *, duration_s: float) -> LoadJob:
        """Make the load generators' job for a plan that lasts `duration_s` seconds, without warm-up."""
        arrivals = arrivals_of(self.scenario.load, duration_s=duration_s, seed=plan.seed)
        timeout_s = self._times(plan).timeout_s
        return self.loader.job(LoadRun(arrivals=arrivals, warm_up_s=0.0, timeout_s=timeout_s, patient=True))

    def constraints(self, measurement: Measurement) -> dict[str, float]:
        """Return by how much the measurement exceeds each limit of this model's SLO, as a share of the limit: name of
        the limit -> value / limit - 1, such as `{"p95": 0.25, "errors": -1.0}`; not positive where it is kept."""
        slo = self.scenario.slo
        latency_s = {name: estimate.value for name, estimate in measurement.latency_s.items()}
        return violations(
            latency_s, measurement.error_ratio, limits=slo.limits(), error_limit=slo.error_ratio
        )

    def _asks_capacity(self, plan: Plan) -> bool:
        return (
            self.scenario.objective == "capacity"
            and plan.request.source == "variant"
            and plan.request.rate_rps is None
            and plan.request.concurrency is None
        )

    def _one_load(self, plan: Plan) -> Figures:
        load = self.scenario.load
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
        limit_s = self.scenario.slo.patience_s(streams=self.scenario.request.protocol == "openai")
        watch = self._watch(plan, warm_up_s=warm_up_s)
        late_s = None if limit_s is None else PATIENCE * limit_s
        run = LoadRun(
            arrivals=arrivals,
            warm_up_s=warm_up_s,
            overdue_after_s=late_s if watch is None else watch.limit.seconds,
            should_stop=self._ends(
                watch or (None if limit_s is None else _hopeless(arrivals, warm_up_s=warm_up_s))
            ),
            timeout_s=times.timeout_s,
            batch_s=times.batch_s,
            short=short,
            patient=plan.request.source in NO_CANDIDATES,
            kept_if_interrupted=self._keeps_part(plan),
        )
        figures = self._send(plan, run)
        if plan.request.is_lone and self._together is None:
            return self._with_enough_answers(plan, run, figures)
        return figures

    def _send(self, plan: Plan, run: LoadRun) -> Figures:
        return self.loader.run(run, on_live=lambda live: self._on_live(plan, live))

    def _ends(
        self, should_stop: Callable[[LiveAggregate], bool] | None
    ) -> Callable[[LiveAggregate], bool] | None:
        """What ends a load early: `should_stop`; with several models also another model's load that ended early."""
        return should_stop if self._together is None else self._together.ends(should_stop)

    def _with_enough_answers(self, plan: Plan, run: LoadRun, figures: Figures) -> Figures:
        """Figures of a lone client with at least RUN_BATCHES answers.

        Where it got fewer, the client runs once more for longer, unless PATIENCE seconds are too short for two answers.
        """
        latency_s = figures.measurement.latency_s["p50"].value
        enough_s = min(RUN_BATCHES * latency_s, PATIENCE)
        if figures.measurement.requests >= RUN_BATCHES or not 2.0 * latency_s <= enough_s:
            return figures
        longer = replace(
            run, arrivals=ClosedLoop(concurrency=1, duration_s=enough_s), warm_up_s=0.0, whole=True
        )
        return self._send(plan, longer)

    def _times(self, plan: Plan) -> RunTimes:
        scenario = self.scenario
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
        return RunTimes(
            warm_up_s=min(load.warm_up_s, PROBE_WARM_UP_S) if short else load.warm_up_s,
            duration_s=load.duration_s if plan.request.duration_s is None else plan.request.duration_s,
            timeout_s=scenario.request.timeout_s,
        )

    def _watch(self, plan: Plan, *, warm_up_s: float) -> SloWatch | None:
        """A watch that ends a run at one rate early, once it is clear whether the rate is held.

        None: it runs to its end, as do confirmation runs, other objectives, and limits that no live count shows.
        """
        limit = primary_limit(self.scenario.slo)
        if (
            limit is None
            or limit.figure in ("itl", "goodput")
            or plan.request.rate_rps is None
            or self.scenario.objective != "capacity"
            or plan.request.source == "confirm"
        ):
            return None
        rows = self.scenario.request.rows_most
        size = (
            1
            if plan.request.configuration.batching is None
            else plan.request.configuration.in_force("max_batch_size")
        )
        batch_requests_max = 1 if self.scenario.request.protocol == "openai" else max(1, size // rows)
        return SloWatch(
            limit=limit,
            error_ratio=self.scenario.slo.error_ratio,
            warm_up_s=warm_up_s,
            rate_rps=plan.request.rate_rps,
            requests_per_batch=max(1.0, batch_requests_max / 2),
            batch_rows_max=batch_requests_max,
        )

    def _counted_requests(self, plan: Plan) -> Figures:
        """Send the scenario's number of requests, after a warm-up that is a load of its own; all of them count, from
        the first request to the last answer."""
        load = self.scenario.load
        arrivals = arrivals_of(load, concurrency=plan.request.concurrency, duration_s=load.duration_s)
        if load.warm_up_s > 0.0 and isinstance(arrivals, ClosedLoop):
            warm_up = replace(arrivals, duration_s=load.warm_up_s, requests_max=None)
            self._send(plan, LoadRun(arrivals=warm_up, warm_up_s=0.0, should_stop=self._ends(None)))
        run = LoadRun(
            arrivals=arrivals,
            warm_up_s=0.0,
            whole=True,
            should_stop=self._ends(None),
            kept_if_interrupted=self._keeps_part(plan),
        )
        return self._send(plan, run)

    def _objective(self, plan: Plan, measurement: Measurement) -> Estimate:
        if self.scenario.objective == "latency":
            return measurement.latency_s["p95"]
        if self.scenario.objective == "capacity" and plan.request.rate_rps is not None:
            return Estimate(
                value=plan.request.rate_rps, low=plan.request.rate_rps, high=plan.request.rate_rps
            )
        return measurement.throughput_rps

    def _capacity(self, plan: Plan) -> _Outcome:
        def load(request: TrialRequest, number: int) -> Figures:
            return self._one_load(replace(plan, request=request, seed=plan.seed + number))

        bracket, figures = find_capacity(
            load, self.scenario, plan.request, pace=plan.pace or Pace(), now_s=self._now_s
        )
        held_rps = bracket.held_rps
        objective = Estimate(value=held_rps, low=held_rps, high=bracket.missed_rps) if held_rps else None
        probes = tuple(
            Probe(rate_rps=run.rate_rps, met=run.held, latency_s=run.latency_s, error_ratio=run.error_ratio)
            for run in bracket.open_runs
            if run.rate_rps is not None
        )
        return _Outcome(figures=figures, objective=objective, probes=probes)


def _known(objective: Estimate | None) -> Estimate | None:
    """The objective; None where it is 0 or NaN: nothing was answered in the measured time."""
    return objective if objective is not None and objective.value > 0.0 else None


def _hopeless(arrivals: Arrivals, *, warm_up_s: float) -> Callable[[LiveAggregate], bool] | None:
    """Return a function of the live counts that is True once a quarter of the measured time is over and a quarter of
    all requests have failed or are late (`LiveAggregate`). None for a closed loop, which is never stopped so."""
    if not isinstance(arrivals, Schedule):
        return None
    total = len(arrivals.due_ns)
    # An open loop ends when this share of its time is over and this share of all its requests is far beyond the
    # SLO (fixed_load.py).
    hopeless_ratio = 0.25
    enough_s = warm_up_s + hopeless_ratio * (arrivals.duration_s - warm_up_s)

    def far_beyond(live: LiveAggregate) -> bool:
        return live.elapsed_s >= enough_s and live.errors + live.late + live.overdue >= hopeless_ratio * total

    return far_beyond
