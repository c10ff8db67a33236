"""How are several models of one server loaded at the same time, each with its own requests, rate and SLO?

A bench and a fleet for each, in a thread; every load is encoded before the first is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from batchtune.batching.parameters import Configuration
from batchtune.errors import TargetError, UsageError
from batchtune.load.live import LiveAggregate
from batchtune.load.record.samples import Samples
from batchtune.load.worker.job import LoadJob
from batchtune.measure.validity.caveats import HOST_CODES
from batchtune.measure.validity.host import HostGuard, HostNoise
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.telemetry import ServerActivity, activity
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.loader import Fleet, Target, loaded_cpus
from batchtune.tune.trials.trial import FinishedTrial, Source, Trial, TrialRequest

READY_LIMIT_S: Final = 120.0
"""How long one load waits for the others' requests to be encoded, and asked alone where answers are expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """One model: its scenario, what it is batched with, the target that answers for it, and who sends its requests."""

    name: str
    scenario: Scenario
    configuration: Configuration
    target: Target
    fleet: Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTogether:
    """One trial for each model, in their order, and what the whole server did meanwhile.

    Of several models at once a trial has no account of the server's own: it counts them together.
    """

    finished: tuple[FinishedTrial, ...]
    server: ServerActivity

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(finished.trial for finished in self.finished)


def load_together(
    loads: Sequence[ModelLoad],
    *,
    first_number: int = 1,
    reason: str = "{name}",
    source: Source = "load",
    all_or_none: bool = False,
    guard: HostGuard | None = None,
    on_live: Callable[[str, LiveAggregate], None] = lambda _name, _live: None,
) -> LoadedTogether:
    """Load these models side by side, once; `reason` names their trials, which count from `first_number`.

    `all_or_none`: where one model's requests are hopelessly late the loads of all end. With a `guard` every trial
    says whether the host was quiet from the first request to the last answer of all. `on_live` is called on the
    threads of the loads, one at a time. Ctrl-C ends them all.

    Raises:
        UsageError: requests that do not fit a model; the message names it.
        TargetError, MeasurementInvalidError: the server or a load generator died.
    """
    begin = None if guard is None else partial(guard.begin, cpus=loaded_cpus(loads[0].scenario))
    start, stop, lock = threading.Barrier(len(loads), begin), threading.Event(), threading.Lock()

    def tell(name: str, live: LiveAggregate) -> None:
        with lock:
            on_live(name, live)

    def run(load: ModelLoad, number: int) -> FinishedTrial:
        fleet = _StartedTogether(load.fleet, start, stop, ends_all=all_or_none)
        bench = Bench(load.scenario, load.target, fleet, on_live=lambda _plan, live: tell(load.name, live))
        plan = Plan(
            number=number,
            seed=load.scenario.load.seed,
            request=TrialRequest(
                configuration=load.configuration, source=source, reason=reason.format(name=load.name)
            ),
        )
        try:
            return bench.run(plan)
        except UsageError as error:
            raise type(error)(f"{load.name}: {error.message}", hint=error.hint) from error
        finally:
            if not fleet.started:
                start.abort()

    server = loads[0].target
    before = server.counters()
    with ThreadPoolExecutor(max_workers=len(loads), thread_name_prefix="load") as pool:
        runs = [pool.submit(run, load, first_number + at) for at, load in enumerate(loads)]
        try:
            finished = [future.result() for future in runs]
        except BaseException:
            stop.set()
            start.abort()
            raise
    moved = activity(before, server.counters())
    if guard is not None:
        noise = guard.end(loaded_cpu_s=_loaded_cpu_s(finished, moved))
        finished = [_beside(trial, noise) for trial in finished]
    if len(loads) > 1:
        finished = [_without_server(trial) for trial in finished]
    return LoadedTogether(finished=tuple(finished), server=moved)


def _loaded_cpu_s(finished: Sequence[FinishedTrial], moved: ServerActivity) -> float | None:
    """CPU time of the server and of everybody who sent."""
    if moved.server_cpu_s is None:
        return None
    return moved.server_cpu_s + sum(
        done.samples.client_cpu_s for done in finished if done.samples is not None
    )


def _beside(finished: FinishedTrial, noise: HostNoise) -> FinishedTrial:
    """With what the host did meanwhile, which leaves a verdict but a PASS in an open loop to nobody; see `judge`."""
    measured, caveats = finished.trial.measurement, noise.caveats()
    if measured is None or not caveats:
        return finished
    measured = replace(measured, caveats=(*measured.caveats, *caveats))
    disturbance = next((caveat for caveat in caveats if caveat.code in HOST_CODES), None)
    kept = measured.verdict is None or (measured.verdict == "PASS" and measured.concurrency is None)
    if disturbance is not None and not kept:
        measured = replace(measured, verdict="NOISY", verdict_reason=disturbance.text)
    return replace(finished, trial=replace(finished.trial, measurement=measured))


def _without_server(finished: FinishedTrial) -> FinishedTrial:
    measurement = finished.trial.measurement
    if measurement is None:
        return finished
    return replace(finished, trial=replace(finished.trial, measurement=replace(measurement, server=None)))


class _StartedTogether:
    """A fleet that begins to send when all the others do, and ends where one of them failed."""

    def __init__(
        self, fleet: Fleet, start: threading.Barrier, stop: threading.Event, *, ends_all: bool
    ) -> None:
        self._fleet = fleet
        self._start = start
        self._stop = stop
        self._ends_all = ends_all
        self.started = False

    def retire(self, name: str, why: str) -> bool:
        """Of several loads each has the workers that it has."""
        return self._fleet.retire(name, why)

    def run(
        self,
        job: LoadJob,
        *,
        on_progress: Callable[[LiveAggregate], None] | None = None,
        should_stop: Callable[[LiveAggregate], bool] | None = None,
    ) -> Samples:
        if not self.started:
            try:
                self._start.wait(READY_LIMIT_S)
            except threading.BrokenBarrierError as error:
                raise TargetError("not loaded, because the load of another model could not begin") from error
            self.started = True

        def ends(live: LiveAggregate) -> bool:
            if should_stop is not None and should_stop(live):
                if self._ends_all:
                    self._stop.set()
                return True
            return self._stop.is_set()

        return self._fleet.run(job, on_progress=on_progress, should_stop=ends)
