"""Runs a sweep: runs the loads that the search chooses, and yields each trial as it ends, until the budget
is spent or nothing is open."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from batchtune.errors import ServerGoneError, TargetError, WrongAnswerError
from batchtune.load.cluster.cluster_fleet import AnyFleet
from batchtune.load.fleet import LiveAggregate
from batchtune.measure.caveats import HostGuard
from batchtune.plain_values import Coded, as_text, coded
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import SEED_STRIDE, Bench, Plan, TrialBench
from batchtune.tune.loader import Target
from batchtune.tune.search.contenders import reference_configurations
from batchtune.tune.search.fixed_load import search_of
from batchtune.tune.search.search_loop import Search
from batchtune.tune.trials.pace import TIME_BUDGET_MAX_S, usual_budget_s
from batchtune.tune.trials.trial import (
    NO_CANDIDATES,
    FinishedTrial,
    SearchSummary,
    Source,
    Trial,
    TrialRequest,
    out_of_memory,
    spent_s,
)

PHASES: Final = ("scouting", "comparing", "confirming")
"""The phases of a sweep in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """How far a sweep is.

    `phase`: one of PHASES. `plan`: of the trial in flight. `live`: its counts; None: not yet known.
    `elapsed_s`, `budget_s`: seconds spent, and the budget (None: only trials limit the sweep).
    `trials_done`, `trials_max`: trials ended, and the budget (None: only time limits the sweep).
    `best`: the last trial of the configuration that leads so far; None: no configuration does.
    """

    phase: str
    plan: Plan
    elapsed_s: float
    budget_s: float | None
    trials_done: int
    trials_max: int | None
    best: Trial | None
    live: LiveAggregate | None


SweepEvent = SweepProgress | Coded | SearchSummary
"""What a sweep tells while it runs: a few times a second during a trial its progress; once, as soon as the server's
speed is known, how it divides its budget; once, when it ends for any reason, its summary."""


def phase_of(source: Source) -> str:
    """Return the phase of a sweep, `scouting`, `comparing` or `confirming`, in which trials with this source run."""
    if source in ("probe", "node", "calibration"):
        return "scouting"
    return "confirming" if source == "confirm" else "comparing"


FAILURES_MAX = 3
"""Failed trials in a row, and none that worked, that mean that it is not the configurations that are at fault. Twice as
many end a search in which some worked: several batch sizes in a row may be too large for the memory
(tests/tune/sweep/test_sweep.py)."""


class Nodes(Protocol):
    """A protocol: what can run several trials at once, one on each node."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the nodes that still work; empty: there is one server, which has no name."""

    def run_all(self, plans: Sequence[Plan]) -> Iterator[FinishedTrial]:
        """Run these trials, each on the next node that is free, and yield each as it ends, with `node` set.

        Raises:
            MeasurementInvalidError: no node is left.
        """


class OneServer:
    """`Nodes` for a single server: runs one trial after another."""

    names: Sequence[str] = ()

    def __init__(self, bench: TrialBench) -> None:
        self._bench = bench

    def run_all(self, plans: Sequence[Plan]) -> Iterator[FinishedTrial]:
        """Run these trials one after another, and yield each as it ends; raises what the bench raises."""
        for plan in plans:
            yield self._bench.run(plan)


def sweep(
    scenario: Scenario,
    target: Target,
    fleet: AnyFleet | Mapping[str, AnyFleet],
    *,
    finished: Sequence[Trial] = (),
    on_event: Callable[[SweepEvent], None] = lambda _event: None,
    now_s: Callable[[], float] = time.monotonic,
    guard: HostGuard | None = None,
    client_max_rps: Callable[[RequestSet], float] | None = None,
) -> Iterator[FinishedTrial]:
    """Measure configurations on a server until no question is open or the budget is spent; yield each trial as it ends.

    `finished`: the trials of an interrupted sweep that is resumed; their time counts, and they are not run again.
    `fleet`, `guard`, `client_max_rps`, `now_s`: passed to `Bench`. KeyboardInterrupt passes through; only the trial in
    flight is lost.

    Raises:
        TargetError: the first three trials failed; once one has worked, failures only end the search sooner.
        WrongAnswerError: a running server worked only with the parameters that it had before.
        ServerGoneError: a running server has ended.
        MeasurementInvalidError: the load generators failed.
        UsageError: the requests do not fit the model.
    """

    def server(report: Callable[[Plan, LiveAggregate | None], None]) -> Nodes:
        bench = Bench(
            scenario,
            target,
            fleet,
            on_live=report,
            now_s=now_s,
            guard=guard,
            client_max_rps=client_max_rps,
        )
        return OneServer(bench)

    return sweep_nodes(scenario, server, finished=finished, on_event=on_event, now_s=now_s)


def sweep_nodes(
    scenario: Scenario,
    nodes: Callable[[Callable[[Plan, LiveAggregate | None], None]], Nodes],
    *,
    finished: Sequence[Trial] = (),
    on_event: Callable[[SweepEvent], None] = lambda _event: None,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[FinishedTrial]:
    """Run a sweep on several nodes, each of which runs one trial at a time; otherwise like `sweep`, with its errors.

    `nodes`: called once with a function to report the plan and live counts of a trial in flight; returns the nodes.
    """
    search = _Sweep(scenario, finished, on_event, now_s)
    yield from search.run(nodes(search.report))


class _Sweep:
    """One sweep under way."""

    def __init__(
        self,
        scenario: Scenario,
        finished: Sequence[Trial],
        on_event: Callable[[SweepEvent], None],
        now_s: Callable[[], float],
    ) -> None:
        self._scenario = scenario
        self._trials = sorted(finished, key=lambda trial: trial.number)
        self._on_event = on_event
        self._now_s = now_s
        self._started_s = now_s() - spent_s(self._trials)
        budget_s = scenario.search.budget.time_s or TIME_BUDGET_MAX_S
        self._search: Search = search_of(scenario, budget_s=budget_s)
        self._search.observe(self._trials)
        self._phase_s: defaultdict[str, float] = defaultdict(float)
        self._failures = 0
        self._present = (
            reference_configurations(scenario).get("present") if scenario.target.attached else None
        )
        self._told_plan: Coded | None = None
        self._stop_reason: Coded | None = None

    def run(self, nodes: Nodes) -> Iterator[FinishedTrial]:
        try:
            self._set_budget()
            if self._trials and self._left_s() <= 0.0:
                self._on_event(coded("budget_spent", budget_s=self._search.budget_s))
            while asks := self._asks(nodes):
                yield from self._measure(asks, nodes)
                if self._failures >= 2 * FAILURES_MAX:
                    self._stop_reason = coded("trials_failed", failures=self._failures)
                    break
        except (KeyboardInterrupt, GeneratorExit):
            self._stop_reason = coded("interrupted")
            raise
        except ServerGoneError:
            self._stop_reason = coded("server_gone")
            raise
        finally:
            self._on_event(self._summary(nodes))

    def _asks(self, nodes: Nodes) -> list[TrialRequest]:
        left_s = self._left_s()
        if left_s <= 0.0:
            return []
        return self._search.next_asks(max(len(nodes.names), 1), left_s=left_s)

    def _measure(self, asks: Sequence[TrialRequest], nodes: Nodes) -> Iterator[FinishedTrial]:
        first = 1 + max((trial.last_number for trial in self._trials), default=0)
        plans = [self._plan(ask, first + turn) for turn, ask in enumerate(asks)]
        self.report(plans[0], None)
        attempts = nodes.run_all(plans)
        while True:
            started_s = self._now_s()
            done = next(attempts, None)
            self._phase_s[phase_of(plans[0].request.source)] += self._now_s() - started_s
            if done is None:
                return
            trial = replace(done.trial, elapsed_s=self._now_s() - self._started_s)
            self._trials.append(trial)
            self._search.observe([trial])
            self._set_budget()
            if not self._tells_something(trial):
                self._failures += 1
            elif not self._is_present(trial):
                self._failures = 0
            yield replace(done, trial=trial)
            if self._failures >= FAILURES_MAX and not any(map(self._was_set, self._trials)):
                only, error_type = "", TargetError
                if self._worked():
                    self._stop_reason = coded("nothing_set")
                    only = ", and only what the server had before could be measured"
                    error_type = WrongAnswerError
                raise error_type(
                    f"{FAILURES_MAX} trials in a row failed{only}; the last: {trial.failure}",
                    hint="`batchtune trials RUN` shows the failed trials; test the server by hand",
                )

    def _plan(self, ask: TrialRequest, number: int) -> Plan:
        seed = self._scenario.load.seed + SEED_STRIDE * (number if ask.block is None else ask.block)
        return Plan(number=number, request=ask, seed=seed, pace=self._search.pace())

    def _set_budget(self) -> None:
        """Set the time budget by the server's speed where the scenario has none, and report the plan; once, as soon as
        a lone request was measured."""
        search = self._scenario.search
        lone_s = self._search.lone_s
        if math.isnan(lone_s) or self._told_plan is not None:
            return
        if not search.budget_is_given:
            self._search.budget_s = usual_budget_s(lone_s)
        self._told_plan = self._search.plan()
        self._on_event(self._told_plan)

    def _left_s(self) -> float:
        return self._search.budget_s - (self._now_s() - self._started_s)

    def _tells_something(self, trial: Trial) -> bool:
        """Whether a trial counts as no failure of the server: it is complete, or the fault is its configuration's: it
        ran out of memory where others did not, or was refused where others were set."""
        if trial.state != "failed":
            return True
        complete = {other.configuration for other in self._trials if other.state == "complete"}
        is_bound = trial.is_refused and trial.configuration not in complete
        if is_bound and any(map(self._was_set, self._trials)):
            return True
        return self._worked() and out_of_memory(trial) is not None

    def _worked(self) -> bool:
        return any(trial.state == "complete" for trial in self._trials)

    def _is_present(self, trial: Trial) -> bool:
        """Whether a trial is of what a running server had before the sweep, which a server that takes no parameters
        has too."""
        present, rows = self._present, self._scenario.request.rows_most
        if present is None or trial.configuration == present:
            return present is not None
        is_http = present.dialect == "http"
        return is_http and trial.configuration.server_values(rows) == present.server_values(rows)

    def _was_set(self, trial: Trial) -> bool:
        return trial.state == "complete" and not self._is_present(trial)

    def report(self, plan: Plan, live: LiveAggregate | None) -> None:
        """Tell the progress: the plan and live counts of the trial in flight."""
        self._on_event(
            SweepProgress(
                phase=phase_of(plan.request.source),
                plan=plan,
                elapsed_s=self._now_s() - self._started_s,
                budget_s=self._search.budget_s,
                trials_done=len(self._trials),
                trials_max=self._scenario.search.budget.trials,
                best=self._search.best_trial(),
                live=live,
            )
        )

    def _summary(self, nodes: Nodes) -> SearchSummary:
        proposers: Counter[str] = Counter(
            trial.source for trial in self._trials if trial.source not in NO_CANDIDATES | {"confirm"}
        )
        left = coded("time_spent" if self._left_s() <= 0.0 else "nothing_open")
        return SearchSummary(
            strategy=self._scenario.search.strategy,
            stop_reason=self._stop_reason or left,
            space_size=self._search.space_size,
            plan=self._told_plan or as_text(""),
            proposals=dict(proposers),
            nodes=", ".join(nodes.names),
            curve=self._search.curve.readings(),
            seconds_by_phase=dict(self._phase_s),
            trials_by_phase=dict(Counter(phase_of(trial.source) for trial in self._trials)),
        )
