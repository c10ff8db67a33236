"""In which order are the trials run, and when is it enough?

Reference points first (no batching, the server's defaults, the throughput × interval rule), then what the scenario's
strategy asks for until what is left of the budget is needed for confirmation: fresh runs of the leader, interleaved
with the reference points so that gains are ratios of neighbours. Each trial is yielded as it ends, and the caller may
stop at any time.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace

from batchtune.errors import TargetError
from batchtune.load.live import LiveAggregate
from batchtune.measure.validity.host import HostGuard
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.loader import Fleet, Target
from batchtune.tune.strategies.node_comparison import node_comparison
from batchtune.tune.strategies.protocol import Strategy
from batchtune.tune.strategies.side_by_side import after, blocks_at_once
from batchtune.tune.sweep import time_budget
from batchtune.tune.sweep.account import account_of, budget_spent, leading
from batchtune.tune.sweep.confirmation import confirmations, references_to_confirm
from batchtune.tune.sweep.dispatch import strategy_of
from batchtune.tune.sweep.nodes import Nodes, OneServer, TrialBench, compared
from batchtune.tune.sweep.plans import at_usual_speed, plan_of
from batchtune.tune.sweep.progress import NOBODY, SweepProgress, Watcher, phase_of
from batchtune.tune.trials.ledger import Ledger, is_spoilt
from batchtune.tune.trials.out_of_memory import memory_ceiling_rows, out_of_memory
from batchtune.tune.trials.pace import Pace, pace_of, run_s
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import Ask, FinishedTrial, Trial


def sweep(
    scenario: Scenario,
    target: Target,
    fleet: Fleet,
    *,
    finished: Sequence[Trial] = (),
    watcher: Watcher = NOBODY,
    now_s: Callable[[], float] = time.monotonic,
    guard: HostGuard | None = None,
    client_max_rps: Callable[[RequestSet], float] | None = None,
) -> Iterator[FinishedTrial]:
    """Measure configurations on a server until the budget is spent, yielding each trial as it ends.

    `finished` are the trials of an interrupted sweep: they are not run again, and their time counts. An interrupt
    passes through; the trial in flight is lost, and no other. `guard` watches the host; `client_max_rps` measures what
    the client can do at most with these requests, once.

    Raises:
        TargetError: the first three trials failed. Once a trial has worked, failures only end the search sooner.
        MeasurementInvalidError: the load generators failed.
    """
    search = _Sweep(scenario, finished, watcher, now_s)
    report = search.report
    bench = Bench(
        scenario, target, fleet, on_live=report, now_s=now_s, guard=guard, client_max_rps=client_max_rps
    )
    yield from search.run(OneServer(bench))


def run_sweep(
    scenario: Scenario,
    bench: TrialBench,
    *,
    finished: Sequence[Trial] = (),
    watcher: Watcher = NOBODY,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[FinishedTrial]:
    """The same on any bench, with any clock: a recorded table is swept in virtual time."""
    yield from _Sweep(scenario, finished, watcher, now_s).run(OneServer(bench))


def sweep_nodes(
    scenario: Scenario,
    nodes: Callable[[Callable[[Plan, LiveAggregate | None], None]], Nodes],
    *,
    finished: Sequence[Trial] = (),
    watcher: Watcher = NOBODY,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[FinishedTrial]:
    """The same on several nodes at once, compared first; `nodes` is called with whom to tell of a live load."""
    search = _Sweep(scenario, finished, watcher, now_s)
    yield from search.run(nodes(search.report))


class _Sweep:
    """One sweep under way; it is the `Outlook` of its strategies."""

    def __init__(
        self, scenario: Scenario, finished: Sequence[Trial], watcher: Watcher, now_s: Callable[[], float]
    ) -> None:
        self.scenario = scenario
        self.space = Space(scenario)
        self._ledger = Ledger(finished, now_s)
        self._watcher = watcher
        self._now_s = now_s
        self._findings = SearchSummary(strategy=scenario.search.strategy)
        self._conclude: Callable[[], None] = lambda: None
        self._phase_s: defaultdict[str, float] = defaultdict(float)
        self._failures = 0
        self._best: Trial | None = None
        self._told_budget_s: float | None = None
        self._ahead: Sequence[Ask] = ()
        self._speeds: Mapping[str, float] = {}
        self._nodes: Nodes

    @property
    def trials(self) -> Sequence[Trial]:
        return self._ledger.trials

    @property
    def nodes(self) -> Sequence[str]:
        return self._nodes.names

    def ahead(self, asks: Sequence[Ask]) -> None:
        """Remember what will be asked for, where it can be run at once."""
        self._ahead = tuple(asks) if self.nodes else ()

    def run(self, nodes: Nodes) -> Iterator[FinishedTrial]:
        self._nodes = nodes
        try:
            yield from self._drive(node_comparison(self))
            self._tell_nodes()
            yield from self._drive(strategy_of(self, self._findings))
            self._failures = 0
            yield from self._drive(confirmations(self))
        except (KeyboardInterrupt, GeneratorExit):
            self._findings.stop_reason = "it was interrupted"
            raise
        finally:
            self._watcher.on_summary(self._summary())

    def at_end(self, conclude: Callable[[], None]) -> None:
        self._conclude = conclude

    @property
    def pace(self) -> Pace:
        return pace_of(self.trials, self.scenario)

    def may_propose(self, seconds: float | None = None, *, beside: int = 0) -> bool:
        """Whether trials and time are left for one more of so many seconds (None: a usual one)."""
        search = self.scenario.search
        if search.trials is not None and time_budget.searched_trials(self.trials) + beside >= search.trials:
            return False
        usual_s = time_budget.usual_trial_s(self.trials, self.scenario, self.pace)
        takes_s = usual_s if seconds is None else seconds
        return takes_s <= self.remaining_s()

    def remaining_s(self) -> float:
        """Seconds of the budget that are left for the search, confirmations set aside."""
        reserve_s = 0.0
        if self._best is not None:
            reserve_s = (2 * policy.CONFIRMATIONS + len(references_to_confirm(self))) * self.fresh_run_s()
            reserve_s = min(reserve_s, policy.RESERVE_SHARE * self.budget_s)
        return self.left_s() - reserve_s

    def left_s(self) -> float:
        """Seconds of the budget that are left for everything."""
        return self.budget_s - self._ledger.elapsed_s()

    @property
    def budget_s(self) -> float:
        """Seconds that the sweep may take, once they were told for good; inf when only trials are counted."""
        told_s = self._told_budget_s
        return time_budget.budget_s(self.scenario, self.pace) if told_s is None else told_s

    def fresh_run_s(self) -> float:
        """What a confirmation takes: as long as a trial, but for a capacity, which is then one load at one rate."""
        run_s = time_budget.fresh_run_s(
            self.scenario, self.trials, self.pace, best=self._best, budget_s=self.budget_s
        )
        return run_s / blocks_at_once(self)

    def thinking(self, text: str) -> None:
        """Tell the watcher what goes on before the next trial."""
        self._watcher.on_thinking(text)

    def _drive(self, asking: Strategy) -> Iterator[FinishedTrial]:
        """Answer what the strategy asks for, from the interrupted sweep or by a trial, until it or the time ends."""
        try:
            ask = next(asking)
            while True:
                trial = self._ledger.answer(ask)
                if trial is None:
                    asks = self._affordable(ask)
                    if not asks:
                        return
                    last = yield from self._measure(asks)
                    trial = self._ledger.answer(ask) or last
                self._best = leading(self.trials, scenario=self.scenario)
                self.space.bar(memory_ceiling_rows(self.trials))
                self._tell_plan()
                if self._failures >= policy.FAILURES_TO_END:
                    self._findings.stop_reason = f"{self._failures} trials in a row failed"
                    return
                ask = asking.send(trial)
        except StopIteration:
            return
        finally:
            asking.close()

    def _affordable(self, ask: Ask) -> list[Ask]:
        """This ask and what is told to come with it, as far as there is time; none where there is none for this."""
        later = [later for later in after(ask, self._ahead) if not self._ledger.holds(later)]
        self._ahead = ()
        at_once = max(len(self.nodes), 1)
        asks = enumerate((ask, *later))
        return [due for turn, due in asks if self._has_time_for(due, rounds=1 + turn // at_once)]

    def _has_time_for(self, ask: Ask, *, rounds: int) -> bool:
        """Whether so many such trials, one after another, end no more than a little after the time is up."""
        if self.left_s() <= 0.0:
            return False
        takes_s = rounds * run_s(ask, self.pace, self.scenario)
        return not self.pace.is_known or takes_s <= self.left_s() + policy.OVERRUN_SHARE * self.budget_s

    def _tell_nodes(self) -> None:
        likeness = compared(self._nodes, self.trials, tell=self._watcher.on_plan)
        if likeness is not None:
            self._speeds, self._findings.nodes = likeness.speeds, likeness.text()

    def _tell_plan(self) -> None:
        """Once, when the first batch was seen: what the budget can do."""
        if self._findings.plan or not self.pace.is_known:
            return
        self._told_budget_s = time_budget.budget_s(self.scenario, self.pace)
        self._findings.plan = time_budget.plan_text(self.scenario, self.pace, at_once=max(len(self.nodes), 1))
        self._watcher.on_plan(self._findings.plan)

    def _measure(self, asks: Sequence[Ask]) -> Generator[FinishedTrial, None, Trial]:
        """Run and yield trials, again where the host or the client spoilt one; return the last."""
        plans = [self._plan(ask, turn, repeat_of=None) for turn, ask in enumerate(asks)]
        trials: list[Trial] = []
        for attempt in range(policy.REPEATS_MAX + 1):
            trials.clear()
            for done in self._attempts(plans):
                trials.append(done.trial)
                yield done
            if self._failures >= policy.FAILURES_MAX and not self._worked():
                raise TargetError(
                    f"{policy.FAILURES_MAX} trials in a row failed; the last: {trials[-1].failure}",
                    hint="the failed trials are in the ledger; see whether the server works by hand",
                )
            spoilt = [trial.number for trial in trials if is_spoilt(trial) and self._may_repeat(trial)]
            again = [plan for plan in plans if plan.number in spoilt]
            if attempt == policy.REPEATS_MAX or not again:
                break
            plans = [self._plan(plan, turn, repeat_of=plan.number) for turn, plan in enumerate(again)]
        return trials[-1]

    def _plan(self, ask: Ask, turn: int, *, repeat_of: int | None) -> Plan:
        return plan_of(
            ask,
            number=self._ledger.next_number() + turn,
            repeat_of=repeat_of,
            scenario=self.scenario,
            space=self.space,
            pace=self.pace,
            budget_s=self.budget_s,
            best=self._best,
        )

    def _attempts(self, plans: Sequence[Plan]) -> Iterator[FinishedTrial]:
        """Run plans and take in each trial as it ends."""
        self.report(plans[0], None)
        attempts = self._nodes.run_all(plans)
        while True:
            started_s = self._now_s()
            done = next(attempts, None)
            self._phase_s[phase_of(plans[0].source)] += self._now_s() - started_s
            if done is None:
                return
            trial = replace(done.trial, elapsed_s=self._ledger.elapsed_s())
            if trial.node is not None:
                trial = at_usual_speed(trial, self._speeds, scenario=self.scenario)
            self._ledger.append(trial)
            self._failures = 0 if self._tells_something(trial) else self._failures + 1
            yield replace(done, trial=trial)

    def _tells_something(self, trial: Trial) -> bool:
        """Whether it worked, or was out of memory where others were not: a size too large is the configuration's."""
        return trial.state != "failed" or (self._worked() and out_of_memory(trial) is not None)

    def _worked(self) -> bool:
        return any(trial.state == "complete" for trial in self.trials)

    def _may_repeat(self, spoilt: Trial) -> bool:
        return time_budget.may_repeat(self.trials, spoilt, budget_s=self.budget_s, left_s=self.left_s())

    def report(self, plan: Plan, live: LiveAggregate | None) -> None:
        """Tell the watcher where the sweep stands."""
        self._watcher.on_progress(
            SweepProgress(
                phase=phase_of(plan.source),
                plan=plan,
                elapsed_s=self._ledger.elapsed_s(),
                budget_s=self.budget_s if math.isfinite(self.budget_s) else None,
                trials_done=time_budget.searched_trials(self.trials),
                trials_max=self.scenario.search.trials,
                best=self._best,
                live=live,
            )
        )

    def _summary(self) -> SearchSummary:
        self._conclude()
        spent = budget_spent(self.trials, scenario=self.scenario, left_s=self.left_s())
        usual = "" if self.may_propose() else "what is left of the time goes to confirmation"
        return account_of(
            self._findings,
            self.trials,
            scenario=self.scenario,
            space_size=self.space.size,
            stop_reason=spent or usual,
            seconds_by_phase=self._phase_s,
        )
