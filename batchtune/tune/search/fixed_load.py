"""Searches the configuration that serves the scenario's own load best: most requests/s, or the lowest p95.

Every run has that load, so that every run counts. A contender has the median of its runs, with an interval that is
wider the more runs of one configuration differ, and narrower with each run. First the references and a few batch sizes
run, then contenders of which the service-time curve predicts most, then the leader's neighbours and points that Optuna
names. Those that cannot be distinguished from the leader run again, in turn with it. Confirmation runs end the search.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass

from batchtune.measure.measurement import Measurement
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.bracket import FRESH, LEVEL, OPEN, PREDICTION_RUNS, RIVAL, BracketRun, of_limit
from batchtune.tune.search.capacity import HOPELESS, CapacitySearch
from batchtune.tune.search.contenders import REFERENCES, Contender
from batchtune.tune.search.search_loop import (
    COMPARE_SHARE,
    NORMAL_MAD,
    RUN_SHARE,
    Search,
)
from batchtune.tune.trials.trial import WORST_VIOLATION, Source, TrialRequest

SURE = 2.0
"""Standard errors from the middle of a contender's interval to its ends."""

WORTH = 1.02
"""Least hope of an untried contender, times the leader's figure, for it to be tried."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A contender's merit under the scenario's load, from `runs` runs.

    `mean`, `low`, `high`: the median merit and the ends of its interval. The merit of a run is the natural log of
    requests/s; with objective latency minus the log of p95 in seconds, with several models minus the log of the largest
    ratio latency / limit. Higher is better.
    `keeps`: more of its runs under that load (once there are FRESH confirmation runs, of these) held the SLO than
    missed it. `misses`: at least two missed it, and fewer held it.
    """

    mean: float
    low: float
    high: float
    runs: int
    keeps: bool
    misses: bool


class FixedLoadSearch(Search):
    """Searches by the merit of runs under the scenario's own load (`Standing`); hopes are merits too."""

    hopes_max = 400  # with timeouts: a closed loop gains where all its clients fit into one batch

    def __init__(self, scenario: Scenario, *, budget_s: float, alone: str = "") -> None:
        super().__init__(scenario, budget_s=budget_s, alone=alone)
        self._is_latency = scenario.objective == "latency"
        self._clients = None if scenario.load.open_loop else scenario.load.concurrency
        self._spread: tuple[int, float] = (-1, 0.0)

    # What runs say.

    def merit(self, run: BracketRun) -> float:
        """Return the merit of one run (`Standing`), a natural log; NaN: the run has no figure."""
        value = run.latency_s.get("p95", math.nan) if self._is_latency else run.answered_rps
        if self.of_models:
            value = min(of_limit(run.latency_s, self.limits), WORST_VIOLATION)
        if not (math.isfinite(value) and value > 0.0):
            return math.nan
        return -math.log(value) if self._is_latency else math.log(value)

    def own_runs(self, contender: Contender, beside: Contender | None = None) -> list[BracketRun]:
        """Return a contender's runs under the scenario's own load, without scouts, whose clients are others: those that
        are `comparable` with the runs of `beside` (None: all)."""
        return [
            run for run in self.comparable(contender, beside) if not run.scout or run.clients == self._clients
        ]

    def counted_runs(self, contender: Contender, beside: Contender | None = None) -> list[BracketRun]:
        """Return the runs from which a contender's figures are computed: its own, once there are FRESH confirmation
        runs only these; `beside` as in `own_runs`."""
        runs = self.own_runs(contender, beside)
        fresh = [run for run in runs if run.fresh]
        return fresh if len(fresh) >= FRESH else runs

    def standing(self, contender: Contender, beside: Contender | None = None) -> Standing | None:
        """Return a contender's merit from its `counted_runs`; None: none of these has a figure. `high` of a lone run is
        inf where latencies differ more from run to run than is assumed, unless it missed by far."""
        counted = self.counted_runs(contender, beside)
        merits = [merit for run in counted if math.isfinite(merit := self.merit(run))]
        if not merits:
            return None
        mean = statistics.median(merits)
        half = SURE * self.spread() / math.sqrt(len(merits))
        held = sum(run.held for run in counted)
        missed = len(counted) - held
        # A stall of a lone run makes any p95 of it, where those of other runs differ by twice what is assumed.
        is_unsteady = self._is_latency and self.spread() > 2.0 * self._assumed_spread
        high = math.inf if is_unsteady and len(merits) == 1 and not counted[0].far else mean + half
        return Standing(
            mean, mean - half, high, len(merits), keeps=held > missed, misses=missed > max(held, 1)
        )

    def spread(self) -> float:
        """Return the standard deviation of the merit, a natural log, between runs of one configuration (0.05 is about 5
        %).

        It comes from the median deviation of repeated runs; while there are few of them, averaged with an assumed
        spread. Runs of a reference that the host disturbed before any confirmation are left out.
        """
        # Repeats (degrees of freedom) from which the measured spread is used alone, and the least.
        trusted, least = 4, 0.015
        if self._spread[0] == len(self.trials):
            return self._spread[1]
        differ: list[float] = []
        degrees = 0
        for contender in self.contenders.all():
            runs = self.own_runs(contender)
            if contender.is_reference:
                runs = [run for run in runs if run.fresh or not run.disturbed]
            merits = [m for run in runs if math.isfinite(m := self.merit(run))]
            if len(merits) > 1:
                middle, widened = statistics.median(merits), math.sqrt(len(merits) / (len(merits) - 1))
                degrees += len(merits) - 1
                differ += [widened * abs(merit - middle) for merit in merits]
        assumed = self._assumed_spread
        weight = min(degrees / trusted, 1.0)
        measured = statistics.median(differ) / NORMAL_MAD if differ else assumed
        self._spread = len(self.trials), max(weight * measured + (1.0 - weight) * assumed, least)
        return self._spread[1]

    @property
    def _assumed_spread(self) -> float:
        # Assumed spread of a rate between runs, and of a latency quantile over that.
        spread, latency_factor = 0.05, 1.5
        return spread * (latency_factor if self._is_latency else 1.0)

    def leader(self) -> Contender:
        """Return the contender with the best merit of those that keep the SLO; where none does, the nearest to the SLO,
        else the one with the best hope.

        A contender with confirmation runs stays the leader while its interval, or LEVEL times its figure, reaches the
        best merit. Where the contender with the best merit has fewer than FRESH confirmation runs, the lower end of its
        interval is to be reached instead: the best of many runs was also lucky. None whose timeout is longer than a
        latency limit leads while another keeps the SLO.
        """
        best = max(self.contenders, key=self._rank)
        top = self.standing(best)
        if top is None or not top.keeps:
            return best
        is_confirmed = self._fresh_runs(best) >= FRESH
        reach = top.mean if is_confirmed else top.low
        confirmed = [
            (min(self._fresh_runs(c), FRESH), self._rank(c), at, c)
            for at, c in enumerate(self.contenders)
            if self._fresh_runs(c)
            and (standing := self.standing(c)) is not None
            and self._rank(c)[:2] == self._rank(best)[:2]
            and max(standing.high, standing.mean + math.log(LEVEL)) >= reach
        ]
        return max(confirmed)[3] if confirmed else best

    def best(self) -> Contender | None:
        """Return the leader; None where it does not keep the SLO."""
        top = self.leader()
        standing = self.standing(top)
        return top if standing is not None and standing.keeps else None

    def comparison(self, left_s: float) -> TrialRequest | None:
        """Return the next run that compares contenders; None: none is left to compare, or there is no time for it."""
        return self._compared(left_s, set())

    def _rank(self, contender: Contender) -> tuple[bool, bool, float, float, list[int]]:
        standing = self.standing(contender)
        keeps = standing is not None and standing.keeps
        value = -math.inf if standing is None else standing.mean if keeps else -self._violation(contender)
        # With a longer timeout a batch that is not full misses the limit.
        is_short = contender.configuration.timeout_s < self._limit_s
        return keeps, is_short, value, contender.hope, [-part for part in contender.simplicity]

    def _violation(self, contender: Contender) -> float:
        worst = [of_limit(run.latency_s, self.limits) + run.error_ratio for run in self.own_runs(contender)]
        return min(worst, default=math.inf)

    # What is asked next.

    def _own_scout(self, left_s: float) -> TrialRequest | None:
        """Choose the next scout: what runs now, no batching, in an open loop closed loops of full batches. None:
        scouting is over."""
        present = self.present()
        if present is not None and not self.own_runs(present) and present not in self.pending:
            return self._own_run(present, "what runs now")
        unbatched = self.unbatched()
        if self._clients is None:
            if (ask := self.unbatched_loop()) is not None:
                return ask
            self.name_rule(
                max((r.answered_rps for r in unbatched.runs if r.clients is not None), default=0.0)
            )
            if self.spent_s(left_s) < self.scout_s or len(self.curve.rows_read) < 2:
                for contender in self.corners():
                    if (ask := self.full_loop(contender)) is not None:
                        return ask
        else:
            if not self.own_runs(unbatched) and unbatched not in self.pending:
                return self._own_run(unbatched, "no batching")
            self.name_rule(max((run.answered_rps for run in unbatched.runs), default=0.0))
        return None

    def _sizes(self) -> tuple[list[Contender], list[Contender]]:
        """The contenders that show the curve: at once a batch size that was not measured, while fewer than two were,
        and while the gain by threads is unknown the largest size measured with more threads; later the other sizes.

        Sizes are a middle one, the largest and the smallest, each with the fewest threads.
        """
        grid = [c for c in self.contenders if c.configuration.batching is not None and c.point is not None]
        if not grid:
            return [], []
        fewest = min(c.threads for c in grid)
        alone = sorted((c for c in grid if c.threads == fewest), key=lambda c: c.rows)
        wanted = list(dict.fromkeys([alone[len(alone) // 2], alone[-1], alone[0]]))
        unread = [c for c in wanted if not self.curve.has_read(c.rows, threads=fewest)]
        new = unread[:1] if len(self.curve.rows_read) < 2 or unread == wanted else []
        read = [c.rows for c in alone if self.curve.has_read(c.rows, threads=fewest)]
        rows = max(read, default=wanted[0].rows)
        more = [c for c in grid if c.threads > fewest and c.rows == rows and not self.curve.knows_threads]
        return [*new, *sorted(more, key=lambda c: (c.threads, c.simplicity))[:1]], unread[len(new) :]

    def _first(self) -> list[Contender]:
        """The references, the rule's and the guide's points, in the order in which to run them.

        While the curve knows fewer than two sizes: also a few sizes. Then by hope, without those for which the trusted
        curve predicts less than HOPELESS of the best.
        """
        references: tuple[Source, ...] = (*REFERENCES, "rule", "guide")
        named = [self.contenders.of(source) for source in references]
        first = [
            c
            for c in named
            if c is not None
            and not c.is_broken
            and not self.contenders.is_barred(c)
            and not self.is_saturated(c)
            # a warm-up and a run of one such batch each would last longer than a run may
            and not (self._waits_in_vain(c) and 2.0 * c.configuration.timeout_s > RUN_SHARE * self.usual_s)
        ]
        if self.of_models:
            return [*filter(self.is_first, self.contenders), *first]
        one_thread = all(c.threads == 1 for c in self.contenders if c.configuration.batching is not None)
        is_known = self.curve.knows_threads or one_thread or self._clients is None
        if len(self.curve.rows_read) < 2 or not is_known:
            at_once, ends = self._sizes()  # with these the curve decides which comes next
            return [*(c for c in first if c.is_reference), *at_once, *first, *ends]
        self._ask_curve()
        most = max((c.hope for c in self.contenders if c.model_says), default=-math.inf)
        likely = [c for c in first if not (self.trusts_curve and c.hope < most + math.log(HOPELESS))]
        return sorted(likely, key=lambda c: -c.hope)

    def _waits_in_vain(self, contender: Contender) -> bool:
        """Whether the clients of a closed loop cannot fill a batch, so that each batch waits for its timeout; False
        for an open loop."""
        rows = math.inf if self._clients is None else self._clients * self._rows
        return contender.rows > rows and contender.configuration.timeout_s > 0.0

    def is_saturated(self, contender: Contender) -> bool:
        """Whether a contender cannot answer the scenario's rate, by its closed loops; False for a closed loop."""
        rate_rps = None if self._clients is not None else self.scenario.load.rate_rps
        return rate_rps is not None and contender.bracket.saturated_rps < rate_rps

    def _question(self, *, left_s: float, taken: set[Contender]) -> TrialRequest | None:
        leader = self.leader()
        standing = self.standing(leader)
        if standing is None or not standing.keeps:  # nothing to confirm: all the time is for finding it
            return self._compared(left_s, taken)
        ask = None
        if self.spent_s(left_s) < COMPARE_SHARE * self.budget_s:
            ask = self._compared(left_s, taken)
        return ask or self._fresh(left_s, taken)

    def _compared(self, left_s: float, taken: set[Contender]) -> TrialRequest | None:
        """The next run that compares contenders; None: none is left to compare, or there is no time."""
        named = self._next_compared(taken)
        return None if named is None or self._cost_s(named[0]) > left_s else self._own_run(*named)

    def _next_compared(self, taken: set[Contender]) -> tuple[Contender, str] | None:
        if self.scenario.search.strategy == "grid":
            untried = (c for c in self.contenders if c not in taken and not self.own_runs(c))
            return next(((c, "a point of the grid") for c in untried), None)
        first = self._first()
        is_known = self.curve.knows_threads or self._clients is None
        hoped = self._hoped(taken) if len(self.curve.rows_read) > 1 and is_known else None
        if hoped is not None:
            return hoped
        for contender in first:
            if contender not in taken and not self.own_runs(contender):
                return contender, "a first look"
        self._ask_curve()
        return self._rival(taken) or self._near(taken)

    def _hoped(self, taken: set[Contender]) -> tuple[Contender, str] | None:
        """The untried contender with the best hope, and the reason to run it; None: no hope is WORTH times the leader's
        figure."""
        top = self.standing(self.leader())
        bar = -math.inf if top is None or not top.keeps else top.mean + math.log(WORTH)
        untried = [
            c
            for c in self.contenders
            if c not in taken and not self.own_runs(c) and c.hope > bar and c.model_says
        ]
        best = max(untried, key=lambda c: (round(c.hope, 3), [-part for part in c.simplicity]), default=None)
        return None if best is None else (best, "it may be better than the leader")

    def _rival(self, taken: set[Contender]) -> tuple[Contender, str] | None:
        """Of the leader and those whose interval reaches above it, the one with the fewest runs, and the reason.

        None: there is none but the leader, or all have FRESH runs: more are for confirmation runs.
        """
        leader = self.leader()
        top = self.standing(leader)
        if top is None:
            return None
        level = [
            (standing.runs, -standing.mean, at, c)
            for at, c in enumerate(self.contenders)
            if c not in taken
            and (standing := self.standing(c)) is not None
            and standing.runs < FRESH
            and not standing.misses
            and (c is leader or standing.high > top.mean + math.log(RIVAL) or self._was_disturbed(c, top))
        ]
        if not level or (len(level) == 1 and level[0][3] is leader and top.runs > 1):
            return None
        return min(level)[3], "no measurable difference from the leader"

    def _was_disturbed(self, contender: Contender, top: Standing) -> bool:
        """Whether a contender's only run may have been disturbed: its hope is more than WORTH times what the leader
        `top` gives."""
        standing = self.standing(contender)
        is_hoped = self.trusts_curve and contender.model_says > 0.0
        lone = standing is not None and standing.runs == 1
        return lone and is_hoped and contender.hope > top.mean + math.log(WORTH)

    def _near(self, taken: set[Contender]) -> tuple[Contender, str] | None:
        """The most promising untried neighbour of the leader, else a point that Optuna names, with the reason; None:
        none is left."""
        leader = self.leader()
        near = [
            c
            for c in self.contenders.neighbours(leader)
            if c not in taken and c.eligible and not self.contenders.is_barred(c) and not self.own_runs(c)
        ]
        self._ask_curve()
        near = [c for c in near if _is_step(c, leader) or not self._is_unlikely(c, leader)]
        if near:
            return max(near, key=lambda c: (c.hope, [-part for part in c.simplicity])), "near the leader"
        known = [
            (c, standing.mean - (0.0 if standing.keeps else 1.0))
            for c in self.contenders
            if (standing := self.standing(c)) is not None
        ]
        for named in self.optuna_contenders(known):
            self._ask_curve()
            untried = named not in taken and named.eligible and not self.own_runs(named)
            if untried and (
                self.scenario.search.strategy == "optuna" or not self._is_unlikely(named, leader)
            ):
                return named, "named by Optuna"
        return None

    def _is_unlikely(self, contender: Contender, leader: Contender) -> bool:
        """Whether the trusted curve predicts less than 0.8 of the leader's figure; False while it is not trusted."""
        top = self.standing(leader)
        if top is None or not top.keeps or not (self.trusts_curve and len(self.curve.rows_read) > 1):
            return False
        if contender.threads != leader.threads and not self.curve.knows_threads:
            return False
        unlikely = 0.8  # Of the leader's, a hope below which nobody is tried while the curve is trusted.
        return contender.hope < top.mean + math.log(unlikely)

    def _fresh(self, left_s: float, taken: set[Contender]) -> TrialRequest | None:
        """The next confirmation run; None: there are enough, or no time.

        Runs of the leader alternate with those of its strongest rival where there is time for both, so that noise of
        the host affects both; then come the references without a comparable run, as many runs of the leader as a
        prediction interval needs, other rivals, and the references over which the gain is not known well enough.
        """
        leader = self.leader()
        others = self.contenders.all() if self._fresh_runs(leader) else ()
        rivals = self._open_rivals(leader)
        in_turn = sorted((leader, *rivals[:1]), key=lambda c: self._fresh_runs(c, taken))
        missing_s = sum(
            max(FRESH - self._fresh_runs(c, taken), 0) * self._cost_s(c, fresh=True) for c in in_turn
        )
        first = in_turn if missing_s <= left_s else [leader]
        for contender, runs in (
            *((c, self._fresh_wanted(c, leader)) for c in dict.fromkeys((*first, leader))),
            *((c, math.inf) for c in others if c not in taken and self._is_unknown(c, leader)),
            (leader, PREDICTION_RUNS),
            *((c, FRESH) for c in (*rivals, *self._compared_with(leader))),
        ):
            is_short = self._fresh_runs(contender, taken) < runs
            if is_short and self._cost_s(contender, fresh=True) <= left_s:
                return self._own_run(contender, "a confirmation run", fresh=True)
        return None

    def _fresh_runs(self, contender: Contender, taken: Collection[Contender] = ()) -> int:
        """Number of a contender's confirmation runs, those already chosen for the next round included."""
        return sum(run.fresh for run in contender.runs) + sum(c is contender for c in taken)

    def _fresh_wanted(self, contender: Contender, leader: Contender) -> int:
        """Confirmation runs that a contender needs: FRESH; one more for a leader that missed one."""
        missed = sum(run.fresh and not run.held for run in contender.runs)
        return FRESH + missed if contender is leader and missed <= 1 else FRESH

    def is_open(self, rival: Contender, top: Contender) -> bool:
        """Whether a rival that ran may be better than `top`: it does not miss the SLO, and the upper end of its
        interval is above OPEN times the figure of `top`; or none of its runs is comparable with those of `top`."""
        if rival is top or self._is_unknown(rival, top):
            return rival is not top
        theirs, ours = self.standing(rival, top), self.standing(top)
        return (
            theirs is not None
            and ours is not None
            and not theirs.misses
            and theirs.high > ours.mean + math.log(OPEN)
        )

    def _is_unknown(self, contender: Contender, top: Contender) -> bool:
        """Whether a contender ran, but never comparably with `top`: a reference on a disturbed host."""
        ran = self.own_runs(contender)
        return not contender.is_broken and bool(ran) and not self.own_runs(contender, top)

    def _open_rivals(self, leader: Contender) -> list[Contender]:
        rivals = [
            (standing.high, at, c)
            for at, c in enumerate(self.contenders)
            if self.is_open(c, leader) and (standing := self.standing(c, leader)) is not None
        ]
        return [c for _, _, c in sorted(rivals, reverse=True)]

    def _compared_with(self, leader: Contender) -> list[Contender]:
        """The references over which the leader's gain is not known well enough."""
        named = [*map(self.contenders.of, REFERENCES), self.equal_unbatched(leader)]
        return [c for c in named if c is not None and not c.is_broken and not self._is_gain_known(c, leader)]

    def _is_gain_known(self, reference: Contender, leader: Contender) -> bool:
        top, standing = self.standing(leader), self.standing(reference, leader)
        if top is None or standing is None or not standing.keeps:
            return bool(self.own_runs(reference))
        half = math.hypot(top.high - top.mean, standing.high - standing.mean)
        # A gain over a reference known this well (in logs), and other than none, needs no more runs.
        gain_known = 0.15
        return half < gain_known and not abs(top.mean - standing.mean) < half

    # Hopes.

    def _learn(self, contender: Contender, run: BracketRun, measured: Measurement | None) -> None:
        """Add a run to the service-time curve; also one of a closed loop whose batches were not full, since the device
        was busy and the server counted their rows."""
        super()._learn(contender, run, measured)
        if run.full or run.clients is None or measured is None or run.error_ratio > 0.1:
            return
        if run.requests < run.clients:  # it stalled, or was too short
            return
        rows = None if measured.server is None else measured.server.mean_batch_rows
        waited_s = contender.configuration.timeout_s if self._waits_in_vain(contender) else 0.0
        # Of the time of a batch more than half was spent waiting.
        if rows and 2.0 * waited_s * run.answered_rps * self._rows > rows:
            return
        if rows and contender.configuration.batching is not None and run.clients >= 4:
            self.curve.learn(contender.configuration, rows=rows, rows_per_s=run.answered_rps * self._rows)

    def _ask_curve(self) -> None:
        if self.of_models:
            ran = [(c, s.mean) for c in self.contenders if (s := self.standing(c)) is not None]
            self.hope_by_plane(sorted(ran, key=lambda pair: -pair[1]))
            return
        if not self.curve.is_known or len(self.curve.rows_read) < 2:
            return
        contenders = list(self.contenders)[: self.hopes_max]
        known = len(contenders), len(self.trials)
        if self._asked_model != known:
            for contender in contenders:
                contender.model_says = self._predicted(contender)
            self._asked_model = known
        self.correct_hopes(
            [
                (c, math.exp(s.mean), math.exp(s.mean))
                for c in contenders
                if (s := self.standing(c)) is not None and c.model_says > 0.0
            ]
        )
        for contender in contenders:
            contender.hope = math.log(contender.hope) if contender.hope > 0.0 else -math.inf

    def _predicted(self, contender: Contender) -> float:
        """The curve's prediction under the scenario's load: requests/s, or 1 / p95; 0: the SLO would be missed.

        In an open loop always 1 / p95.
        """
        if self._clients is not None:
            said = self.curve.closed(contender.configuration, self._clients)
        else:
            said = self.curve.open(contender.configuration, self.scenario.load.rate_rps or 1.0)
        if said.of_limit > 1.2:
            return 0.0
        return said.answered_rps if self._clients is not None and not self._is_latency else 1.0 / said.p95_s

    # What a run is, and costs.

    def _own_run(self, contender: Contender, why: str, *, fresh: bool = False) -> TrialRequest:
        seconds = self._seconds(contender, fresh=fresh)
        return self.ask(contender, "confirm" if fresh else None, why, duration_s=seconds)

    def _seconds(self, contender: Contender, *, fresh: bool = False) -> float | None:
        """Seconds of a run; None: the scenario's, since its load has a shape or a fixed number of requests."""
        load = self.scenario.load
        if load.requests is not None or load.arrivals in ("ramp", "steps", "trace"):
            return None
        rate = (self.stated_rps or math.inf) * self.rarest
        finite_s = self._limit_s if math.isfinite(self._limit_s) else 1.0
        under_way = rate * finite_s / 2 if self._clients is None else self._clients
        batch_s = self.batch_s(min(contender.rows, max(under_way, 1.0) * self._rows))
        # A run lasts so many batches or requests, or so long, whichever is longest; a fresh run twice as long.
        batches, requests, run_s, fresh_factor = 20, 300, 1.0, 2.0
        factor = fresh_factor if fresh else 1.0
        wanted = factor * max(batches * batch_s, requests / rate if self._clients is None else 0.0, run_s)
        if "duration_s" in load.model_fields_set and not self.scenario.search.grow:
            wanted = max(wanted, load.duration_s) if fresh else min(wanted, load.duration_s)
        run_batches_min = 3
        longest = max(RUN_SHARE * self.usual_s, run_batches_min * batch_s)
        if fresh:  # so that as many fit into the time to confirm as the leader and its strongest rival need
            fresh_s = (1.0 - COMPARE_SHARE) * self.usual_s / (PREDICTION_RUNS + FRESH) - self.overhead_s()
            longest = min(longest, max(fresh_s, run_s, run_batches_min * batch_s))
        return min(wanted, longest)

    def _cost_s(self, contender: Contender, *, fresh: bool = False) -> float:
        load = self.scenario.load
        seconds = self._seconds(contender, fresh=fresh)
        return (load.duration_s + load.warm_up_s if seconds is None else seconds) + self.overhead_s()


def _is_step(contender: Contender, leader: Contender) -> bool:
    """Whether two contenders differ in batch size or threads; such steps are tried even against the curve."""
    return (contender.rows, contender.threads) != (leader.rows, leader.threads)


def search_of(scenario: Scenario, *, budget_s: float) -> Search:
    """Make the search for the scenario's objective: for capacity by loads at different rates, for throughput or latency
    under the scenario's own load. `budget_s`: seconds that the sweep may take."""
    kind = CapacitySearch if scenario.objective == "capacity" else FixedLoadSearch
    return kind(scenario, budget_s=budget_s)
