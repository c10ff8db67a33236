"""Searches a space: chooses which contender to load next, how, and why.

The ledger is the only state: after the same runs a search chooses the same load again, so that a sweep that was killed
can be resumed. This module has what all objectives share: the contenders, the service-time curve, the cost of a run,
the phases. The classes in `capacity` and `fixed_load` choose the next load.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from batchtune.batching.parameters import Configuration
from batchtune.measure.measurement import Measurement
from batchtune.plain_values import Coded, coded
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import DEFAULT_TIME_BUDGET_S
from batchtune.tune.evidence.bracket import FRESH, BracketRun, of_limit, runs_of
from batchtune.tune.search.contenders import (
    SIZE,
    THREADS,
    Contender,
    Contenders,
    one_by_one,
    same_instances,
)
from batchtune.tune.search.curve import MISLEADING, Curve, plane_through
from batchtune.tune.search.proposals import (
    STARTUP_TRIALS,
    RuleAnswer,
    guide_point,
    proposed_points,
    throughput_interval_rule,
)
from batchtune.tune.trials.pace import (
    SIDE_BY_SIDE,
    UNBATCHED_CLIENTS,
    Pace,
    clients_to_fill,
    usual_budget_s,
)
from batchtune.tune.trials.trial import (
    NO_CANDIDATES,
    REPEATS,
    Source,
    Trial,
    TrialRequest,
    memory_ceiling_rows,
    points_beyond_memory,
)

SCOUT_SHARE = 0.2
"""Share of the budget for scouting, at most; more where five scouts do not fit (`Search.scout_s`)."""

COMPARE_SHARE = 0.7
"""Share of the budget for scouting and comparing together; the rest is for confirmation runs."""

RUN_SHARE, FRESH_SHARE = 0.055, 0.07
"""Share of the budget that one run, and one confirmation run, may last."""


CLIENTS_MAX = 2000
"""Clients of a closed loop, at most (noisy.py, thousand)."""

NORMAL_MAD = statistics.NormalDist().inv_cdf(0.75)
"""Median absolute deviation of a normal distribution over its standard deviation."""


class Search(ABC):
    """One search: `observe` takes the trials that ended, `next_asks` returns the loads to run next.

    `alone`: with several models, the name of the only model that this search loads; "": all.
    """

    hopes_max = 64
    """Points that become contenders at the beginning, at most."""

    def __init__(self, scenario: Scenario, *, budget_s: float, alone: str = "") -> None:
        self.scenario = scenario
        self.budget_s = budget_s
        self.contenders = Contenders(scenario, alone=alone)
        scenarios = scenario.of_models()
        self.of_models = bool(scenarios)
        self.name = alone
        self._apart = (alone,) if alone else ()
        rates = [scenarios[name].load.rate_rps or 1.0 for name in self._apart or scenarios]
        self.stated_rps = math.fsum(rates) or scenario.load.rate_rps or 0.0
        """Requests/s that the scenario states; with several models the sum over those that this search loads.

        A rate of this search is then the sum too: each model gets its share in proportion to its stated rate.
        """
        self.rarest = min(rates) / math.fsum(rates) if rates else 1.0
        """The least of the models' stated rates, as a share of their sum; 1 with one model."""
        self.limits = {
            name: limit
            for name, limit in scenario.limits.items()
            if not alone or name.startswith(f"{alone}:")
        }
        self.alone: dict[str, Search] = {}
        """With several models: model name -> the search that loads this model only."""
        if len(scenarios) > 1 and not alone:
            self.alone = {name: type(self)(scenario, budget_s=budget_s, alone=name) for name in scenarios}
        self.curve = Curve(scenario)
        self.trials: list[Trial] = []
        self.ran: list[Contender] = []
        """Contenders that can be the answer and ran."""
        self.pending: set[Contender] = set()
        """Contenders for which `next_asks`, while it runs, has chosen a load already."""
        self.lone_s = math.nan
        """Median latency of a lone request, seconds; NaN before it was measured."""
        self.is_hopeless = False
        """Whether even a lone request misses a latency limit, so that no configuration can keep it."""
        self.rule: RuleAnswer | None = None
        self._lone = one_by_one(scenario)
        self._rows = scenario.request.rows_most
        self._streams = scenario.streams
        self._is_attached = scenario.target.attached
        self._answer_limits = self.limits if self.of_models else scenario.slo.e2e_limits()
        self._limit_s = min(self._answer_limits.values(), default=math.inf)
        self._asked_model: tuple[int, int] | None = None
        self.trusts_curve = self.has_curve = scenario.sizes_batches and not self.of_models
        """Whether hopes come from the service-time curve, and whether there can be one.

        There is none for a server whose batch size is not known (`Scenario.sizes_batches`), and with several models,
        whose times the server does not count apart: hopes then come from the runs of other contenders.
        """
        self._named = False
        if self.of_models:
            self.name_points()

    # What was measured.

    def observe(self, trials: Iterable[Trial]) -> None:
        """Add trials that have ended, in the order in which they ended; later choices depend on them."""
        for trial in trials:
            self.trials.append(trial)
            apart = self.alone.get(next(iter(trial.request.models), ""))
            if apart is not None:
                apart.observe([trial])
                continue
            if trial.source != "probe":
                self._name_best_alone()  # where the loads of each alone have ended: contenders keep their order
            self._take(trial)
        self.contenders.ceiling_rows = memory_ceiling_rows(self.trials)
        self.contenders.beyond_memory = points_beyond_memory(self.trials)
        self.ran = [contender for contender in self.contenders if contender.runs]

    def violation(self, run: BracketRun) -> float:
        """Return the largest of a run's ratios figure / limit, over latencies, the share of errors, and requested over
        answered rate; above 1 the run misses the SLO. inf: a figure is unknown, or no request was answered."""
        error_limit, answered_rps = self.scenario.slo.error_ratio, run.answered_rps
        errors = run.error_ratio / error_limit if error_limit > 0.0 else 1.0 + run.error_ratio
        unanswered = (run.rate_rps or 0.0) / answered_rps if answered_rps > 0.0 else math.inf
        return max(of_limit(run.latency_s, self.limits), errors, unanswered)

    def comparable(self, contender: Contender, beside: Contender | None) -> list[BracketRun]:
        """Return the runs of a contender that can be compared with those of `beside`; `beside` None: all.

        Of a reference these are the runs that the host did not disturb, and those after the first confirmation run of
        `beside`: who ran only while the host was disturbed would make a gain of any other. Of another contender all.
        """
        if beside is None or beside is contender or not contender.is_reference:
            return contender.runs
        first = min((run.trial for run in beside.runs if run.fresh), default=math.inf)
        return [run for run in contender.runs if not run.disturbed or run.trial > first]

    def _take(self, trial: Trial) -> None:
        if trial.source in ("probe", "node", "variant", "load"):
            if trial.request.concurrency == 1 and trial.measurements:
                self._take_lone(trial)
            if trial.source != "probe" or trial.request.concurrency == 1:
                return
        contender, source = self.contenders.find(trial.configuration), _proposer(trial.source)
        if source == "present" and self.contenders.of("present") not in (None, contender):
            source = "grid"  # it ran before somebody else changed what runs now
        if contender is None or source != "grid":
            contender = self.contenders.add(trial.configuration, source, trial.point)
        contender.failures += trial.state == "failed"
        for run in runs_of([trial], self.scenario.slo, self.scenario):
            contender.add(run)
            self._learn(contender, run, trial.measurement)

    def _take_lone(self, trial: Trial) -> None:
        """Set `lone_s` (with several models the slowest one's) and `is_hopeless` by a lone client's trial."""
        p50_s = {name: measured.latency_s["p50"].value for name, measured in trial.measurements.items()}
        self.lone_s = max(p50_s.values())
        self.is_hopeless = any(
            p50_s.get(name.rpartition(":")[0], 0.0) > limit for name, limit in self._answer_limits.items()
        )

    def _learn(self, contender: Contender, run: BracketRun, measured: Measurement | None) -> None:
        """Add a run to the service-time curve if all of its batches were full: the rows of other runs are unknown."""
        answered_all = run.clients is not None and run.requests >= run.clients > 1  # else it stalled
        # An overloaded server refuses what it cannot queue.
        answers = run.error_ratio <= 0.1 or run.rate_rps is not None
        busy = run.full or (contender is self.unbatched() and answered_all)
        if busy and answers and self.has_curve and measured is not None:
            self.curve.learn(
                contender.configuration, rows=contender.rows, rows_per_s=run.answered_rps * self._rows
            )

    # What is asked next.

    def next_asks(self, count: int, *, left_s: float) -> list[TrialRequest]:
        """Return up to `count` loads to run at once (one for each node); []: the search is done, or out of time.

        `left_s`: seconds left of the budget. All returned loads are of one phase, since scouts decide which contenders
        are compared, and comparisons which contender is confirmed. Each is of a different contender, except
        confirmation runs.
        """
        asks: list[TrialRequest] = []
        self.pending = set()
        while len(asks) < count:
            ask = self._scout(left_s)
            if ask is None and not self.contenders.is_empty:
                ask = self._question(left_s=left_s, taken=self.pending)
            if ask is None or (asks and _stage(ask) > _stage(asks[-1])):
                break
            if sum(other.configuration == ask.configuration for other in asks) >= FRESH:
                break
            if self._has_tried_enough() and ask.configuration not in self._tried() and _stage(ask) == 1:
                break
            asks.append(ask)
            self.pending |= {c for c in self.contenders.all() if c is self.contenders.find(ask.configuration)}
            if ask.source == "probe":
                break
        self.pending = set()
        return asks

    def _scout(self, left_s: float) -> TrialRequest | None:
        """Choose the next scout, a short load that shows which contenders deserve a longer one: a lone client first,
        with several models then a load of one by itself. None: scouting is over."""
        if (lone := self.lone_probe()) is not None:
            return lone
        self.name_points()
        return self.alone_comparison(left_s) if self.of_models else self._own_scout(left_s)

    @abstractmethod
    def _own_scout(self, left_s: float) -> TrialRequest | None:
        """Choose the next scout for one model, after that of a lone client; None: scouting is over."""

    @abstractmethod
    def _question(self, *, left_s: float, taken: set[Contender]) -> TrialRequest | None:
        """Choose the next run that may change the answer or confirm it, of no contender in `taken` unless it confirms;
        None: there is none, or no time for it."""

    @abstractmethod
    def leader(self) -> Contender:
        """Return the contender that would be the answer now; where none keeps the SLO, the one nearest to it."""

    @abstractmethod
    def best(self) -> Contender | None:
        """Return the leader; None where it does not keep the SLO."""

    @abstractmethod
    def comparison(self, left_s: float) -> TrialRequest | None:
        """Return the next run that compares contenders; None: none is left to compare, or there is no time for it."""

    def alone_comparison(self, left_s: float) -> TrialRequest | None:
        """With several models, return the next load of one model by itself; None: the time or trials for such loads are
        spent.

        Before None is returned, the combinations of each model's best point become contenders.
        """
        most = self.scenario.search.budget.trials
        for at, search in enumerate(self.alone.values(), 1):
            search.budget_s = self.budget_s
            tried = len(search._tried())
            has_room = most is None or tried < SCOUT_SHARE * most / len(self.alone)
            is_time = self.spent_s(left_s) < SCOUT_SHARE * self.budget_s * at / len(self.alone)
            if not tried or (has_room and is_time):
                ask = search.comparison(left_s)
                if ask is not None:
                    return ask
        self._name_best_alone()
        return None

    def _name_best_alone(self) -> None:
        best = {name: search.best() for name, search in self.alone.items()}
        points = {name: top.point for name, top in best.items() if top is not None and top.point is not None}
        if len(points) == len(self.alone) > 1:
            self.contenders.put_together(points)

    def spent_s(self, left_s: float) -> float:
        """Return the seconds of the budget that are spent; where a budget of trials is used up, at least as many as
        scouting and comparing may take."""
        spent_s = self.budget_s - left_s
        return max(spent_s, COMPARE_SHARE * self.budget_s) if self._has_tried_enough() else spent_s

    def _has_tried_enough(self) -> bool:
        most = self.scenario.search.budget.trials
        return most is not None and len(self._tried()) >= most

    def _tried(self) -> set[Configuration]:
        """Configurations that count against a budget of trials: those that ran other than as scout or confirmation."""
        return {
            trial.configuration
            for trial in self.trials
            if trial.source not in NO_CANDIDATES | REPEATS and trial.request.models == self._apart
        }

    def is_first(self, contender: Contender) -> bool:
        """Whether a contender is tried before the leader's neighbours, so that not all tried lie around one point.

        With several models: the combinations of each model's best point, and the scattered points. With one model: no
        contender.
        """
        return self.of_models and bool({"alone", "grid"} & set(contender.sources))

    @property
    def space_size(self) -> int:
        """Number of points of the space, including those by which it grew."""
        return math.prod(len(values) for values in self.contenders.values.values())

    @property
    def usual_s(self) -> float:
        """Seconds of the budget, of which a run may take a share. Where only trials are budgeted, what a sweep of such
        a server would get by default: else a stall that is taken for a slow batch would make confirmation runs of 20
        s."""
        usual_s = usual_budget_s(self.lone_s if math.isfinite(self.lone_s) else 0.0)
        return (
            self.budget_s if self.scenario.search.budget.time_s is not None else min(self.budget_s, usual_s)
        )

    @property
    def scout_s(self) -> float:
        """Seconds that scouting may take: SCOUT_SHARE of the budget, but at least 5.5 s where COMPARE_SHARE of the
        budget allows.

        5.5 s are five scouts: with fewer, one that was stalled determines the slope of the curve (noisy.py, 20 s).
        """
        return max(SCOUT_SHARE * self.budget_s, min(5.5, COMPARE_SHARE * self.budget_s))

    def plan(self) -> Coded:
        """Return how the budget is divided, as a finding: `60 s: 12 to scout, 30 to compare, 18 to confirm`, and the
        number of trials where that is limited."""
        budget = self.scenario.search.budget
        of_trials = coded("plan_of_trials", trials=budget.trials or 0)
        if budget.time_s is None:
            return of_trials
        scout_s = self.scout_s
        compare_s = COMPARE_SHARE * self.budget_s - scout_s
        confirm_s = self.budget_s - scout_s - compare_s
        of_time = coded(
            "plan_of_time",
            budget_s=self.budget_s,
            scout=round(scout_s),
            compare=round(compare_s),
            confirm=round(confirm_s),
        )
        if round(compare_s) < 1:
            of_time = coded("plan_too_short", plan=of_time, usual_s=DEFAULT_TIME_BUDGET_S)
        return of_time if budget.trials is None else coded("plan_of_both", plan=of_time, trials=of_trials)

    # The contenders that are added once something is known.

    def name_points(self) -> None:
        """Add the first contenders of the search, at the first call only.

        By `search.strategy`: "guided" the tuning guide's point and a grid, "grid" also every further point of
        the space, "optuna" the sampler's first STARTUP_TRIALS proposals; with several models random points.
        """
        # Random points proposed with several models, beside the middle of the space and the best of each
        # model alone.
        random_points = 3
        if self._named:
            return
        strategy = self.scenario.search.strategy
        if strategy in ("guided", "grid") and self.has_curve:
            self.contenders.overlaid(guide_point(self.scenario, self.contenders.values), "guide")
        if self.of_models:
            self.contenders.scattered(random_points)
        elif strategy == "grid":
            grid_most = 10_000  # Points of a space that strategy grid proposes: more are not run in a day.
            self.contenders.whole(grid_most)
        elif strategy == "guided":
            self.contenders.grid(self.hopes_max)
        elif strategy == "optuna":
            list(islice(self.optuna_contenders([]), STARTUP_TRIALS))
        self._named = True

    def name_rule(self, unbatched_rps: float) -> None:
        """Add the point of the throughput × interval rule as a contender, once.

        `unbatched_rps`: requests/s without batching. Nothing is added while it is 0 or the latency of a lone request is
        unknown.
        """
        if not self.has_curve or self.rule is not None or not (unbatched_rps > 0.0 and self.lone_s > 0.0):
            return
        self.rule = throughput_interval_rule(
            rows_per_s=unbatched_rps * self._rows,
            lone_latency_s=self.lone_s,
            limits=self.scenario.slo.e2e_limits(),
            rows_per_request=self._rows,
        )
        if self.scenario.search.strategy != "optuna":
            self.contenders.overlaid(self.rule.point, "rule")

    def optuna_contenders(self, worth: Sequence[tuple[Contender, float]]) -> Iterator[Contender]:
        """Yield contenders that Optuna's sampler proposes; nothing with strategy "rule" or "grid".

        `worth`: contenders that ran, each with its value, higher is better. Those that were proposed as neighbours are
        not passed to the sampler: they all lie around a leader, and its points would then stay there too.
        """
        if self.scenario.search.strategy in ("rule", "grid"):
            return
        known = [
            (contender.point, value)
            for contender, value in worth
            if contender.point is not None and "neighbour" not in contender.sources
        ]
        seed = self.scenario.search.seed + len(self.trials)
        for point in proposed_points(self.contenders.values, known, seed=seed):
            contender = self.contenders.at(point, "sampler")
            if contender is not None:
                yield contender

    def best_trial(self) -> Trial | None:
        """Return the latest trial of the contender that would be the answer now; None: no trial of it has run."""
        if not any(contender.runs for contender in self.contenders):
            return None
        runs = self.leader().runs
        by_number = {trial.number: trial for trial in self.trials}
        return by_number[runs[-1].trial] if runs else None

    # What a run costs.

    def overhead_s(self) -> float:
        """Return the seconds that a run takes beside its measured part (applying, warming up, draining): the median
        over the last eight trials, at least 0.1 s; 0.4 s with fewer than three."""
        assumed_s = 0.4
        beside = [
            trial.seconds - trial.request.duration_s
            for trial in self.trials[-8:]
            if trial.request.duration_s is not None and trial.state == "complete"
        ]
        return max(statistics.median(beside), 0.1) if len(beside) >= 3 else assumed_s

    def pace(self) -> Pace:
        """Return the server's pace as far as it is known, from which the warm-up and timeouts of the next run are
        chosen."""
        # Batch sizes in rows for which `Search.pace` gives the time of a batch.
        paced_rows = tuple(1 << power for power in range(12))
        known = {rows: self.curve.batch_s(rows) for rows in paced_rows} if self.curve.is_known else {}
        rows = self._rows if self.has_curve else SIDE_BY_SIDE
        return Pace(lone_s=self.lone_s, lone_rows=rows, batch_s_by_rows=known)

    def batch_s(self, rows: float) -> float:
        """Return the seconds that a batch of `rows` rows takes, by the service-time curve; before there is a curve, the
        seconds of a lone request (0: unknown)."""
        if self.curve.is_known:
            return self.curve.batch_s(rows)
        return max(self.lone_s, 0.0) if math.isfinite(self.lone_s) else 0.0

    def ask(
        self,
        contender: Contender,
        source: Source | None,
        reason: str,
        *,
        rate_rps: float | None = None,
        **load: float | None,
    ) -> TrialRequest:
        """Return the request for a load of this contender.

        `source`: what the trial is for; None: the source that proposed the contender. `rate_rps`: requests/s, with
        several models the sum of their rates; None: the scenario's. `load`: `concurrency` or `duration_s` of the load.

        `reason`: why the trial is run, in words for the ledger.
        """
        if self.of_models:
            load["scale"] = 1.0 if rate_rps is None else rate_rps / self.stated_rps
        else:
            load["rate_rps"] = rate_rps
        return TrialRequest(
            models=self._apart,
            configuration=contender.configuration,
            source=source or contender.sources[0],
            reason=reason,
            point=contender.point,
            **load,  # type: ignore[arg-type]
        )

    # Scouts of an open loop, and of the rule.

    def lone_probe(self) -> TrialRequest | None:
        """Return a load of one client, whose latency no configuration can beat; None: it has run already."""
        if any(trial.request.concurrency == 1 for trial in self.trials):
            return None
        return TrialRequest(
            configuration=self._lone,
            source="probe",
            reason="the latency of a lone request",
            concurrency=1,
            duration_s=0.5,
        )

    def loop(self, contender: Contender, clients: int, why: str) -> TrialRequest | None:
        """Return a closed loop of `clients` for a contender, `why` in words; None: it has had a closed loop, or
        `next_asks` has already chosen a load for it."""
        if contender in self.pending or any(
            run.clients is not None and run.rate_rps is None for run in contender.runs
        ):
            return None
        turn_s = self.batch_s(min(contender.rows, clients * self._rows))
        scout_s = 0.7  # at least
        seconds = min(max(scout_s, 5 * turn_s), max(RUN_SHARE * self.usual_s, 2.5 * turn_s))
        return self.ask(contender, "calibration", why, concurrency=clients, duration_s=seconds)

    def full_loop(self, contender: Contender) -> TrialRequest | None:
        """Return a closed loop with enough clients to fill every batch of a contender; None: it has had a closed loop,
        or `next_asks` has already chosen a load for it."""
        clients = clients_to_fill(contender.configuration, self.scenario)
        batch_s = self.batch_s(contender.rows)
        # Of a loop that fills every batch, beyond two batches a thread: those whose answers are on their way.
        spare_clients = 64
        way_s = 0.005  # No answer is on its way for longer than this.
        if contender.configuration.batching is not None and batch_s > 0.0:
            clients += int(min(max(way_s * contender.rows / self._rows / batch_s, 4), spare_clients))
        if not self.has_curve:
            clients = min(clients, self._patient_clients())
        return self.loop(
            contender, min(clients, CLIENTS_MAX), f"what full batches of {contender.rows} rows answer"
        )

    def corners(self) -> list[Contender]:
        """Return the contenders to scout: a middle batch size, the largest whose batch takes at most 0.7 of the latency
        limit, and the middle size with more threads.

        Without a service-time curve also the last of these with each other parameter at either end of its values.
        """
        grid = [c for c in self.contenders if c.configuration.batching is not None and c.point is not None]
        if not grid:
            return []
        every = grid
        if not self.has_curve:
            base = self.contenders.base()
            rest = {name: value for name, value in base.items() if name not in (SIZE, THREADS)}
            grid = [c for c in grid if c.point is not None and rest.items() <= c.point.items()] or grid
        fewest = min(c.threads for c in grid)
        more = min((c.threads for c in grid if c.threads > fewest), default=fewest)
        alone = sorted((c for c in grid if c.threads == fewest), key=lambda c: c.rows)
        sizes = sorted({c.rows for c in alone})
        # Requests in a batch of the middle and of the large size that are scouted, at most.
        middle_most, large_most = 16, 128
        affordable = SCOUT_SHARE * self.budget_s / (2.0 * self.lone_s) if self.lone_s > 0.0 else middle_most
        # As long as if a row cost what a request does.
        wanted_rows = self._rows * min(middle_most, max(affordable, 2.0))
        middle = min(sizes, key=lambda rows: abs(math.log(rows / wanted_rows)))
        useful = [
            rows
            for rows in sizes
            if rows <= large_most * self._rows and self.batch_s(rows) <= 0.7 * self._limit_s
        ]
        large = max(useful, default=middle)
        wanted = [(middle, fewest), (large, fewest), (middle, more)]
        matching = (
            next((c for c in grid if (c.rows, c.threads) == pair), None) for pair in dict.fromkeys(wanted)
        )
        corners = [c for c in matching if c is not None]
        return corners if self.has_curve else [*corners, *self._ends_beside(corners, every)]

    def _ends_beside(self, corners: Sequence[Contender], grid: Sequence[Contender]) -> Iterator[Contender]:
        """Yield contenders that differ from the last corner by one parameter, other than size and threads, at either
        end of its values: without a curve nothing else shows what these parameters do."""
        point = corners[-1].point if corners else None
        for name, values in self.contenders.values.items() if point is not None else ():
            for end in (values[-1], values[0]) if name not in (SIZE, THREADS) else ():
                yield from (c for c in grid if c.point == {**(point or {}), name: end} and c not in corners)

    def unbatched_loop(self) -> TrialRequest | None:
        """Return a closed loop without batching; None: it has already run."""
        return self._patient_loop(self.unbatched(), "what is answered one by one")

    def present(self) -> Contender | None:
        """Return the contender with an attached server's own configuration; None: the server was launched."""
        return self.contenders.of("present") if self._is_attached else None

    def present_loop(self) -> TrialRequest | None:
        """Return a closed loop of what an attached server runs now; None: it has already run, or the server was
        launched."""
        present = self.present()
        return None if present is None else self._patient_loop(present, "what runs now")

    def _patient_loop(self, contender: Contender, why: str) -> TrialRequest | None:
        """Return a closed loop with fewer clients where the last of them would wait for long; None: as `loop`."""
        return self.loop(contender, min(self._patient_clients(), UNBATCHED_CLIENTS), why)

    def _patient_clients(self) -> int:
        """Return how many clients are answered one after another while a run lasts, by the latency of a lone request;
        2 at least, and where it is not known."""
        patient_s = max(RUN_SHARE * self.usual_s, 1.0)
        return int(max(patient_s / self.lone_s, 2)) if self.lone_s > 0.0 else 2

    def unbatched(self) -> Contender:
        """Return the contender without batching, whose throughput the throughput × interval rule starts from.

        Where batching cannot be switched off, the contender with the smallest batches (`one_by_one`).
        """
        return self.contenders.of("no_batching") or self.contenders.add(self._lone, "calibration")

    def equal_unbatched(self, top: Contender) -> Contender | None:
        """Return the contender without batching that has as many model instances as `top`, for a fair comparison.

        None: the contender "no_batching" has as many already or is missing, or `top` does not batch.
        """
        unbatched = self.contenders.of("no_batching")
        if unbatched is None or top.configuration.batching is None:
            return None
        alike = same_instances(unbatched.configuration, top.configuration)
        return None if alike == unbatched.configuration else self.contenders.add(alike, "no_batching")

    def hope_by_plane(self, known: Sequence[tuple[Contender, float]]) -> None:
        """Set the hope of every contender in the space, the figure expected of it, by a plane through the contenders
        that ran; for searches without a service-time curve.

        `known`: contenders that ran, the leader first, each with the natural log of its figure; those near the leader
        weigh most.
        """
        located = [(at, value) for c, value in known if (at := self.contenders.indices(c)) is not None]
        if not located:
            return
        hope = plane_through([at for at, _ in located], [value for _, value in located])
        for contender in self.contenders:
            at = self.contenders.indices(contender)
            if at is not None:
                contender.hope = math.exp(hope(at))

    def correct_hopes(self, known: Sequence[tuple[Contender, float, float]]) -> None:
        """Set the hope of every contender, the figure expected of it: the curve's prediction times the median ratio of
        runs to predictions in this sweep.

        `known`: (contender, figure to compare with the prediction, figure from runs alone) of contenders that ran, in
        the unit of `model_says`. Where the ratios differ too much between contenders, the curve is not trusted
        (`trusts_curve`), and the hope is the figure of the nearest contender that ran.
        """
        shifts = [
            math.log(value / contender.model_says)
            for contender, value, _ in known
            if value > 0.0 and contender.model_says > 0.0
        ]
        shift = statistics.median(shifts) if shifts else 0.0
        differ = statistics.median(abs(other - shift) for other in shifts) / NORMAL_MAD if shifts else 0.0
        # Where the shift between the curve's word and the brackets differs by more between contenders (standard
        # deviation by the median, in logs: one may have been disturbed), the curve is left aside: a wrong model
        # costs more than none.
        self.trusts_curve = self.has_curve and not (len(shifts) >= FRESH and differ > MISLEADING)
        for contender in self.contenders:
            if self.trusts_curve or not known:
                contender.hope = contender.model_says * math.exp(shift)
            else:
                near = min(known, key=lambda entry: _distance(entry[0], contender))
                contender.hope = near[2]


def _stage(ask: TrialRequest) -> int:
    """Phase of a load: 0 a scout, 1 a comparison, 2 a confirmation run."""
    return {"probe": 0, "calibration": 0, "confirm": 2}.get(ask.source, 1)


def _distance(first: Contender, other: Contender) -> float:
    """Distance of two contenders: doublings of rows and threads, and 0.5 for each parameter that differs; 100 between
    batching and none."""
    if (first.configuration.batching is None) != (other.configuration.batching is None):
        return 100.0
    apart = abs(math.log2(first.rows / other.rows)) + abs(math.log2(first.threads / other.threads))
    if first.point is None or other.point is None:
        return apart
    differing = [name for name, value in other.point.items() if first.point.get(name) != value]
    return apart + 0.5 * len(differing)


def _proposer(source: Source) -> Source:
    """Who named the configuration of a trial: its source, or "grid" where the source says what the trial was for."""
    return "grid" if source in ("calibration", "confirm", "race", "probe") else source
