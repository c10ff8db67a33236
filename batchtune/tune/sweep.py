"""In which order are the trials run, and when is it enough?

Reference points first (no batching, the server's defaults, the throughput × interval rule), then proposals until what
is left of the budget is needed for confirmation: fresh runs of the leader, interleaved with the reference points so
that gains are ratios of neighbours. Each trial is yielded as it ends, and the caller may stop at any time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchtune.batching import BatchingParameters, Configuration
from batchtune.errors import BatchingParametersError, TargetError
from batchtune.load.live import LiveAggregate
from batchtune.measure.host import HostGuard
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec import Scenario
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.confirmation import BLOCKS_MAX, CONFIRMATIONS, confirmation_arms
from batchtune.tune.load_run import Fleet, Target
from batchtune.tune.pool import pool
from batchtune.tune.ranking import leaders
from batchtune.tune.rule import RuleAnswer, throughput_interval_rule
from batchtune.tune.space import Space, in_force
from batchtune.tune.trial import FinishedTrial, Source, Trial

FAILURES_MAX = 3
"""So many failed trials in a row mean that it is not the configurations that are at fault."""

PROBE_S = 1.0
"""Length of each of the rule's two probes."""

SATURATING_CLIENTS = 16
"""Closed-loop clients of the probe for the throughput without batching, where the scenario's loop is open."""

_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """Where a sweep stands. `trial_number` and `configuration` are of the trial in flight, `best` leads so far.

    `trials_max` is None when only time limits the sweep, `budget_s` when only trials do.
    """

    phase: str
    trial_number: int
    configuration: Configuration
    elapsed_s: float
    budget_s: float | None
    trials_done: int
    trials_max: int | None
    best: Trial | None
    live: LiveAggregate | None


def sweep(
    scenario: Scenario,
    target: Target,
    fleet: Fleet,
    *,
    finished: Sequence[Trial] = (),
    on_progress: Callable[[SweepProgress], None] | None = None,
    now_s: Callable[[], float] = time.monotonic,
    guard: HostGuard | None = None,
    client_max_rps: Callable[[RequestSet], float] | None = None,
) -> Iterator[FinishedTrial]:
    """Measure configurations until the budget is spent, yielding each trial as it ends.

    `finished` are the trials of an interrupted sweep: they are not run again, and their time counts. An interrupt
    passes through; the trial in flight is lost, and no other. `guard` watches the host; `client_max_rps` measures
    what the client can do at most with these requests, once.

    Raises:
        TargetError: three trials in a row failed.
        MeasurementInvalidError: the load generators failed.
    """
    search = _Sweep(scenario, finished, on_progress, now_s)
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


def reference_configurations(scenario: Scenario) -> dict[Source, Configuration]:
    """No batching, and the server's own defaults; with the scenario's fixed server flags."""
    flags = scenario.fixed_flags
    return {
        "no_batching": Configuration(batching=None, flags=flags),
        "defaults": Configuration(batching=BatchingParameters(), flags=flags),
    }


class _Sweep:
    def __init__(
        self,
        scenario: Scenario,
        finished: Sequence[Trial],
        on_progress: Callable[[SweepProgress], None] | None,
        now_s: Callable[[], float],
    ) -> None:
        self._scenario = scenario
        self._space = Space(scenario)
        self._references = reference_configurations(scenario)
        self._ledger = list(finished)
        self._spent_s = sum(trial.seconds for trial in finished)
        self._on_progress = on_progress
        self._now_s = now_s
        self._started_s = now_s()
        self._failures = 0
        self._phase = ""
        self._best: Trial | None = None
        self._bench: Bench

    def run(self, bench: Bench) -> Iterator[FinishedTrial]:
        self._bench = bench
        self._phase = "reference points"
        yield from self._reference_points()
        self._phase = "search"
        yield from self._proposals()
        self._phase = "confirmation"
        yield from self._confirmations()

    def _reference_points(self) -> Iterator[FinishedTrial]:
        no_batching, defaults = self._references["no_batching"], self._references["defaults"]
        if not self._has("no_batching"):
            yield from self._measure(no_batching, "no_batching", "reference point: batching off")
        if not self._has("rule"):
            yield from self._rule()
        if not self._has("defaults"):
            yield from self._measure(defaults, "defaults", "reference point: the server's own defaults")

    def _rule(self) -> Iterator[FinishedTrial]:
        """The two probes that the rule needs, as far as they are missing, then its answer."""
        off = self._references["no_batching"]
        if self._probe(1) is None:
            yield from self._measure(off, "probe", "for the rule: latency of a lone request", clients=1)
        if self._scenario.load.open_loop and self._probe(SATURATING_CLIENTS) is None:
            why = "for the rule: throughput without batching"
            yield from self._measure(off, "probe", why, clients=SATURATING_CLIENTS)
        answer = self._rule_answer()
        if answer is None:
            return
        point = {name: value for name, value in answer.point.items() if name not in self._scenario.fixed}
        try:
            configuration = self._scenario.configuration(point)
        except BatchingParametersError:  # what is fixed does not go with the rule
            return
        outside = "" if self._space.locate(configuration) else " (outside the search space)"
        yield from self._measure(configuration, "rule", f"{answer.explain()}{outside}")

    def _rule_answer(self) -> RuleAnswer | None:
        lone = self._probe(1)
        busy = self._probe(SATURATING_CLIENTS) if self._scenario.load.open_loop else self._last("no_batching")
        if lone is None or busy is None or lone.measurement is None or busy.measurement is None:
            return None
        rows_per_s = busy.measurement.throughput_rows_per_s.value
        lone_latency_s = lone.measurement.latency_s["p50"].value
        if not (math.isfinite(rows_per_s) and math.isfinite(lone_latency_s)):
            return None
        return throughput_interval_rule(
            rows_per_s=rows_per_s,
            lone_latency_s=lone_latency_s,
            limits=self._scenario.slo.limits(),
            rows_per_request=max(kind.rows or 1 for kind in self._scenario.request.kinds()),
        )

    def _proposals(self) -> Iterator[FinishedTrial]:
        if self._scenario.search.strategy == "rule":
            return
        from batchtune.tune.search import Sampler

        yield from self._rule_without_waiting()
        maximise = self._scenario.objective != "latency"
        sampler = Sampler(self._space, maximise=maximise, seed=self._scenario.search.seed)
        while self._may_propose():
            failed = {one.configuration: one.point for one in self._ledger if one.state == "failed"}
            proposal = sampler.propose(pool(self._ledger, scenario=self._scenario), failed=failed)
            if proposal is None:
                return
            yield from self._measure(proposal.configuration, "sampler", proposal.reason, point=proposal.point)

    def _rule_without_waiting(self) -> Iterator[FinishedTrial]:
        """The rule's size with a timeout of 0, where the space has it: behind a busy device batches grow unasked."""
        rule = self._last("rule")
        if rule is None or self._has("sampler") or not self._may_propose():
            return
        size = in_force(rule.configuration, "max_batch_size")
        point = self._space.nearest({"max_batch_size": size, "batch_timeout_micros": 0})
        configuration = self._space.configuration(point)
        if configuration is not None and configuration not in {one.configuration for one in self._ledger}:
            yield from self._measure(
                configuration, "sampler", "nearest to the rule's size, without waiting", point=point
            )

    def _may_propose(self) -> bool:
        search = self._scenario.search
        if search.trials is not None and self._searched() >= search.trials:
            return False
        if search.time_budget_s is None:
            return True
        reserve_s = 0.0
        if self._best is not None:
            references = len(self._references_to_confirm())
            reserve_s = (2 * CONFIRMATIONS + references) * self._fresh_run_s()
        return self._elapsed_s() + self._trial_s() + reserve_s <= search.time_budget_s

    def _confirmations(self) -> Iterator[FinishedTrial]:
        """Blocks of fresh runs, each arm once a block, until what would be recommended has been confirmed."""
        for block in range(1 + self._blocks(), 1 + BLOCKS_MAX):
            arms = confirmation_arms(
                pool(self._ledger, scenario=self._scenario),
                scenario=self._scenario,
                references=self._references_to_confirm(),
                runs_affordable=self._runs_affordable(),
            )
            if not arms:
                return
            # Turns rotate; when time is short, what is to be recommended goes first.
            shift = block % len(arms) if self._runs_affordable() >= len(arms) else 0
            for configuration in [*arms[shift:], *arms[:shift]]:
                yield from self._measure(configuration, "confirm", f"fresh run, block {block}", block=block)

    def _references_to_confirm(self) -> list[Configuration]:
        """None for a capacity: each has its own, and a search for it costs many fresh runs at one rate."""
        if self._scenario.objective == "capacity":
            return []
        return [one.configuration for one in self._working_references()]

    def _measure(
        self,
        configuration: Configuration,
        source: Source,
        reason: str,
        *,
        point: dict[str, Any] | None = None,
        block: int | None = None,
        clients: int | None = None,
    ) -> Iterator[FinishedTrial]:
        """Run and yield one trial, unless time is up; `clients` makes it a probe of a short closed loop."""
        if self._out_of_time():
            return
        plan = Plan(
            number=1 + max((one.number for one in self._ledger), default=0),
            configuration=configuration,
            source=source,
            reason=reason,
            seed=self._scenario.load.seed + _SEED_STRIDE * (block or 0),
            point=point if point is not None else self._space.locate(configuration),
            block=block,
            concurrency=clients,
            duration_s=None if clients is None else PROBE_S,
            rate_rps=self._claimed_rps(configuration) if source == "confirm" else None,
            hint_rps=self._hint_rps(source),
        )
        self.report(plan, None)
        done = self._bench.run(plan)
        self._ledger.append(done.trial)
        self._update_best()
        self._failures = self._failures + 1 if done.trial.state == "failed" else 0
        yield done
        if self._failures >= FAILURES_MAX:
            raise TargetError(
                f"{FAILURES_MAX} trials in a row failed; the last: {done.trial.failure}",
                hint="the failed trials are in the ledger; see whether the server works by hand",
            )

    def _hint_rps(self, source: Source) -> float | None:
        """Where the search for a capacity begins: at the incumbent's, but for the reference points."""
        if self._scenario.objective != "capacity" or source in ("no_batching", "defaults"):
            return None
        return None if self._best is None or self._best.objective is None else self._best.objective.value

    def _claimed_rps(self, configuration: Configuration) -> float | None:
        """The capacity that a fresh run is to confirm; None for the other objectives."""
        if self._scenario.objective != "capacity":
            return None
        pooled = pool(self._ledger, scenario=self._scenario)
        return next(one.value for one in pooled if one.configuration == configuration)

    def report(self, plan: Plan, live: LiveAggregate | None) -> None:
        """Tell the watcher where the sweep stands."""
        if self._on_progress is None:
            return
        self._on_progress(
            SweepProgress(
                phase=self._phase,
                trial_number=plan.number,
                configuration=plan.configuration,
                elapsed_s=self._elapsed_s(),
                budget_s=self._scenario.search.time_budget_s,
                trials_done=self._searched(),
                trials_max=self._scenario.search.trials,
                best=self._best,
                live=live,
            )
        )

    def _update_best(self) -> None:
        ranked = leaders(pool(self._ledger, scenario=self._scenario), scenario=self._scenario)
        self._best = ranked[0].runs[-1].trial if ranked else None

    def _has(self, source: Source) -> bool:
        return self._last(source) is not None

    def _last(self, source: Source) -> Trial | None:
        return next((one for one in reversed(self._ledger) if one.source == source), None)

    def _probe(self, clients: int) -> Trial | None:
        probes = (one for one in self._ledger if one.source == "probe" and one.state == "complete")
        return next((one for one in probes if one.concurrency == clients), None)

    def _searched(self) -> int:
        return sum(one.source not in ("probe", "confirm") for one in self._ledger)

    def _blocks(self) -> int:
        return max((one.block for one in self._ledger if one.block is not None), default=0)

    def _working_references(self) -> list[Trial]:
        """The search-time trials of the reference points, without those that failed."""
        found = (self._last("no_batching"), self._last("defaults"))
        return [one for one in found if one is not None and one.state == "complete"]

    def _trial_s(self) -> float:
        """What a trial takes: the median so far, before that the scenario's own times."""
        load = self._scenario.load
        seconds = [one.seconds for one in self._ledger if one.source not in ("no_batching", "probe")]
        return statistics.median(seconds) if seconds else load.warm_up_s + load.duration_s

    def _fresh_run_s(self) -> float:
        """What a confirmation takes: as long as a trial, but for a capacity, which is then one load at one rate."""
        load = self._scenario.load
        return (
            load.warm_up_s + load.duration_s + 1.0
            if self._scenario.objective == "capacity"
            else self._trial_s()
        )

    def _elapsed_s(self) -> float:
        return self._spent_s + self._now_s() - self._started_s

    def _out_of_time(self) -> bool:
        budget_s = self._scenario.search.time_budget_s
        return budget_s is not None and self._elapsed_s() >= budget_s

    def _runs_affordable(self) -> float:
        budget_s = self._scenario.search.time_budget_s
        return math.inf if budget_s is None else (budget_s - self._elapsed_s()) / self._fresh_run_s()
