"""In which order are the trials run, and when is it enough?

Reference points first (no batching, the server's defaults, the throughput × interval rule), then what the scenario's
strategy asks for until what is left of the budget is needed for confirmation: fresh runs of the leader, interleaved
with the reference points so that gains are ratios of neighbours. Each trial is yielded as it ends, and the caller may
stop at any time.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from batchtune.batching.parameters import Configuration
from batchtune.errors import TargetError
from batchtune.load.live import LiveAggregate
from batchtune.measure.validity.host import HostGuard
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.evidence.pooled import is_inside, pool, run_noise
from batchtune.tune.evidence.ranking import leaders
from batchtune.tune.loader import Fleet, Target
from batchtune.tune.strategies.protocol import Strategy
from batchtune.tune.sweep import time_budget
from batchtune.tune.sweep.confirmation import confirmations, references_to_confirm
from batchtune.tune.sweep.dispatch import strategy_of
from batchtune.tune.sweep.progress import NOBODY, SweepProgress, Watcher, phase_of
from batchtune.tune.trials.ask import Ask, run_s
from batchtune.tune.trials.ledger import Ledger, is_spoilt
from batchtune.tune.trials.out_of_memory import memory_ceiling_rows, out_of_memory
from batchtune.tune.trials.pace import Pace, pace_of, times_of
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import FinishedTrial, Trial


class TrialBench(Protocol):
    """Whatever can run a trial: a server under load, a recorded table, a simulator."""

    def run(self, plan: Plan) -> FinishedTrial: ...


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
    bench = Bench(
        scenario,
        target,
        fleet,
        on_live=search.report,
        now_s=now_s,
        guard=guard,
        client_max_rps=client_max_rps,
    )
    yield from search.run(bench)


def run_sweep(
    scenario: Scenario,
    bench: TrialBench,
    *,
    finished: Sequence[Trial] = (),
    watcher: Watcher = NOBODY,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[FinishedTrial]:
    """The same on any bench, with any clock: a recorded table is swept in virtual time."""
    yield from _Sweep(scenario, finished, watcher, now_s).run(bench)


class _Sweep:
    """One sweep under way; it is the `Outlook` of its strategies."""

    def __init__(
        self,
        scenario: Scenario,
        finished: Sequence[Trial],
        watcher: Watcher,
        now_s: Callable[[], float],
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
        self._bench: TrialBench

    @property
    def trials(self) -> Sequence[Trial]:
        return self._ledger.trials

    def run(self, bench: TrialBench) -> Iterator[FinishedTrial]:
        self._bench = bench
        try:
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

    def may_propose(self, seconds: float | None = None) -> bool:
        """Whether trials and time are left for one more of so many seconds (None: a usual one)."""
        search = self.scenario.search
        if search.trials is not None and time_budget.searched_trials(self.trials) >= search.trials:
            return False
        takes_s = self._trial_s() if seconds is None else seconds
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
        if self.scenario.objective != "capacity":
            return self._trial_s()
        best = self._best
        rate_rps = None if best is None or best.objective is None else best.objective.value
        return self._run_s(best.configuration if best is not None else None, rate_rps=rate_rps) + 0.5

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
                    if not self._has_time_for(ask):
                        return
                    trial = yield from self._measure(ask)
                self._update_best()
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

    def _has_time_for(self, ask: Ask) -> bool:
        """A trial may end a little after the time is up."""
        if self.left_s() <= 0.0:
            return False
        takes_s = run_s(ask, self.pace, self.scenario)
        return not self.pace.is_known or takes_s <= self.left_s() + policy.OVERRUN_SHARE * self.budget_s

    def _tell_plan(self) -> None:
        """Once, when the first batch was seen: what the budget can do."""
        if self._findings.plan or not self.pace.is_known:
            return
        self._told_budget_s = time_budget.budget_s(self.scenario, self.pace)
        self._findings.plan = time_budget.plan_text(self.scenario, self.pace)
        self._watcher.on_plan(self._findings.plan)

    def _measure(self, ask: Ask) -> Generator[FinishedTrial, None, Trial]:
        """Run and yield one trial, again where the host or the client spoilt it; the last attempt counts."""
        repeat_of: int | None = None
        attempt = 0
        while True:
            done = self._attempt(ask, repeat_of=repeat_of)
            yield done
            if self._failures >= policy.FAILURES_MAX and not self._worked():
                raise TargetError(
                    f"{policy.FAILURES_MAX} trials in a row failed; the last: {done.trial.failure}",
                    hint="the failed trials are in the ledger; see whether the server works by hand",
                )
            if attempt == policy.REPEATS_MAX or not is_spoilt(done.trial) or not self._may_repeat(done.trial):
                return done.trial
            attempt, repeat_of = attempt + 1, done.trial.number

    def _attempt(self, ask: Ask, *, repeat_of: int | None) -> FinishedTrial:
        plan = Plan(
            number=self._ledger.next_number(),
            configuration=ask.configuration,
            source=ask.source,
            reason=ask.reason,
            expected=ask.expected,
            seed=self.scenario.load.seed + policy.SEED_STRIDE * (ask.block or 0),
            point=ask.point if ask.point is not None else self.space.locate(ask.configuration),
            block=ask.block,
            concurrency=ask.concurrency,
            duration_s=ask.duration_s,
            rate_rps=ask.rate_rps,
            hint_rps=self._hint_rps(ask),
            repeat_of=repeat_of,
            pace=self.pace,
            budget_s=self.budget_s,
        )
        self.report(plan, None)
        started_s = self._now_s()
        done = self._bench.run(plan)
        done = replace(done, trial=replace(done.trial, elapsed_s=self._ledger.elapsed_s()))
        self._phase_s[phase_of(ask.source)] += self._now_s() - started_s
        self._ledger.append(done.trial)
        self._failures = 0 if self._tells_something(done.trial) else self._failures + 1
        return done

    def _tells_something(self, trial: Trial) -> bool:
        """Whether it worked, or was out of memory where others were not: a size too large is the configuration's."""
        return trial.state != "failed" or (self._worked() and out_of_memory(trial) is not None)

    def _worked(self) -> bool:
        return any(trial.state == "complete" for trial in self.trials)

    def _may_repeat(self, spoilt: Trial) -> bool:
        return time_budget.may_repeat(self.trials, spoilt, budget_s=self.budget_s, left_s=self.left_s())

    def _hint_rps(self, ask: Ask) -> float | None:
        """Where the search for a capacity begins: at the incumbent's, but for the reference points."""
        if ask.hint_rps is not None or self.scenario.objective != "capacity":
            return ask.hint_rps
        if ask.source in ("no_batching", "defaults") or self._best is None or self._best.objective is None:
            return None
        return self._best.objective.value

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

    def _update_best(self) -> None:
        pooled = pool(self.trials, scenario=self.scenario)
        inside = [one for one in pooled if is_inside(one, self.scenario)]
        ranked = leaders(inside, scenario=self.scenario)
        self._best = ranked[0].runs[-1].trial if ranked else None

    def _trial_s(self) -> float:
        return time_budget.usual_trial_s(self.trials, self.scenario, self.pace)

    def _run_s(self, configuration: Configuration | None, *, rate_rps: float | None) -> float:
        if configuration is None:
            return time_budget.usual_run_s(self.scenario, self.pace)
        times = times_of(
            self.pace, self.scenario, configuration, rate_rps=rate_rps, fresh=True, budget_s=self.budget_s
        )
        return times.run_s

    def _summary(self) -> SearchSummary:
        self._conclude()
        pooled = pool(self.trials, scenario=self.scenario)
        return replace(
            self._findings,
            stop_reason=self._findings.stop_reason or self._stop_reason(),
            space_size=self.space.size,
            proposals=dict(Counter(one.source for one in self.trials if one.source in ("twin", "sampler"))),
            noise_ratio=run_noise(pooled, scenario=self.scenario).sd,
            repeated_trials=sum(one.repeat_of is not None for one in self.trials),
            seconds_by_phase=dict(self._phase_s),
            trials_by_phase=dict(Counter(phase_of(one.source) for one in self.trials)),
        )

    def _stop_reason(self) -> str:
        search = self.scenario.search
        if self.left_s() <= 0.0:
            return "the time is spent"
        if search.trials is not None and time_budget.searched_trials(self.trials) >= search.trials:
            return "the budget of trials is spent"
        return "" if self.may_propose() else "what is left of the time goes to confirmation"
