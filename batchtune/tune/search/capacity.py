"""Searches the configuration that holds the highest rate within the SLO.

1. Scout: short closed loops that fill every batch show the time of a batch by its rows (the service-time curve).
2. Compare: runs at one rate each narrow the brackets, of the contender first that is expected to hold most (its
   hope). The leader is loaded at higher rates, by bisection once it missed one; then its neighbours, and points that
   Optuna names, at a rate just above the leader's.
3. Confirm: longer runs of the leader under new seeds, at a little less than it held, at lower rates until three held
   and three times as many as missed.
4. Settle: with the time left, load every contender that may hold a tenth more than is stated: the leader, its rivals,
   its neighbours. A new leader is confirmed.

The answer, at any time, is the contender with the highest rate held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchtune.tune.evidence.bracket import (
    BACK,
    FRESH,
    LEVEL,
    LOOP_SHARE,
    OPEN,
    RIVAL,
    SATURATED,
    STEP_DOWN,
    TINY_S,
    UNCONFIRMED,
    WIDEST,
    WIDTH,
    Bracket,
    BracketRun,
    exceeds,
    next_rate,
    of_limit,
)
from batchtune.tune.search.contenders import REFERENCES, Contender
from batchtune.tune.search.search_loop import (
    CLIENTS_MAX,
    COMPARE_SHARE,
    FRESH_SHARE,
    RUN_SHARE,
    Search,
)
from batchtune.tune.trials.pace import BATCHES, REQUESTS, UNBATCHED_CLIENTS
from batchtune.tune.trials.trial import WORST_VIOLATION, Source, TrialRequest

UNLIKELY, HOPELESS = 0.7, 0.5
"""While the curve is trusted, contenders whose hope is below this share of the leader's are not tried; HOPELESS for
neighbours in size or threads, which are tried because the curve may be wrong."""

SAFE = 0.94
"""Rate of the first confirmation runs, as a share of the rate that the search found."""

BOLDEST = 3.0
"""Largest first rate, times the most that any contender answered: the curve may be wrong, and a server takes long to
work off an overload."""


class CapacitySearch(Search):
    """Searches by brackets of capacity: runs decide, and the service-time curve only says what to expect (hopes)."""

    # Who leads, and who may still win.

    def worth(self, contender: Contender) -> float:
        """Return the rate by which contenders are ranked, requests/s: the larger of the confirmed rate and SAFE times
        the rate held."""
        return max(contender.bracket.confirmed_rps, SAFE * contender.bracket.held_rps)

    def leader(self) -> Contender:
        """Return the contender with the highest rate held, else the one with the best hope; of equals the simplest."""
        return self._best_of(list(self.contenders))

    def best(self) -> Contender | None:
        """Return the leader; None where it holds no rate."""
        top = self.leader()
        return top if self.worth(top) > 0.0 else None

    def comparison(self, left_s: float) -> TrialRequest | None:
        """Return the next run that compares contenders; None: none is left to compare, or there is no time for it."""
        self._ask_curve()
        return self._affordable(self._next_probe(self.leader(), set()), left_s=left_s, reserve_s=0.0)

    def _best_of(self, contenders: Sequence[Contender]) -> Contender:
        return max(contenders, key=lambda c: (self.worth(c), *_level(self._humbled(c), c)))

    def upper(self, contender: Contender, beside: Contender | None = None) -> float:
        """Return the upper end of a contender's bracket, requests/s; inf: unknown.

        It is the lowest rate missed, or LEVEL times what a closed loop with full batches answered if that is lower and
        the curve or another loop agrees with it. `beside`: the leader, with which a reference is compared: what ends
        its bracket then counts only if a run that can be compared (`comparable`) missed that rate or a lower one.
        """
        bracket, runs = contender.bracket, contender.runs
        known = self.comparable(contender, beside)
        missed = [run.rate_rps or run.answered_rps for run in known if run.full or not run.held]
        if len(known) < len(runs) and min(missed, default=math.inf) > bracket.missed_rps:
            runs = [run for run in runs if run.held or run in known]
            bracket = Bracket(tuple(runs))
        missed_rps = self._missed_rps(contender, bracket)
        full = max((run.answered_rps for run in runs if run.full), default=0.0)
        agrees = self._loops_agree() or self._is_as_expected(contender, full)
        if full and self.has_curve and agrees:
            return max(min(missed_rps, LEVEL * full), bracket.held_rps)
        return missed_rps

    def _missed_rps(self, contender: Contender, bracket: Bracket) -> float:
        """The lowest rate missed, requests/s; inf: unknown. Full batches that answered less than smaller ones bound it
        no more than these: a server may fill its batches less."""
        if bracket.missed_rps != bracket.saturated_rps or contender.configuration.batching is None:
            return bracket.missed_rps
        batched = (c for c in self.ran if c.configuration.batching is not None)
        within = (c for c in batched if c.rows <= contender.rows and c.threads <= contender.threads)
        smaller = max((run.answered_rps for c in within for run in c.runs), default=0.0)
        return max(bracket.missed_rps, min(SATURATED * smaller, bracket.outvoted_above(bracket.held_rps)))

    def _is_as_expected(self, contender: Contender, full_rps: float) -> bool:
        return self.curve.is_checked and RIVAL * full_rps >= self.curve.most_rps(contender.configuration)

    def _loops_agree(self) -> bool:
        """Whether the two fastest closed loops with full batches answered alike: then neither was disturbed."""
        full = sorted(run.answered_rps for c in self.ran for run in c.runs if run.full)
        return len(full) > 1 and full[-1] <= RIVAL * full[-2]

    def is_open(self, rival: Contender, top: Contender) -> bool:
        """Whether `rival`, which ran, may be better than the leader `top`: the upper end of its bracket is above OPEN
        times the rate stated for `top` and above LEVEL times the rate that `top` held, and the curve does not find both
        level (`is_level`)."""
        upper = self.upper(rival, top)
        return (
            rival is not top
            and bool(rival.runs)
            and upper > OPEN * top.bracket.stated_rps
            and upper > LEVEL * top.bracket.held_rps
            and not self.is_level(rival, top)
        )

    def is_level(self, rival: Contender, top: Contender) -> bool:
        """Whether the service-time curve predicts for `rival` at most LEVEL times the capacity that it
        predicts for `top`.

        False while the curve is not trusted, or not checked by three batch sizes.
        """
        if not (self.trusts_curve and self.curve.is_checked):
            return False
        says = self.curve.capacity_rps
        return says(rival.configuration) <= LEVEL * says(top.configuration)

    def _belief(self, contender: Contender) -> float:
        """The hope of a contender, limited to its bracket, requests/s."""
        return min(max(contender.hope, contender.bracket.held_rps), self.upper(contender))

    def _humbled(self, contender: Contender) -> float:
        """The belief, or without one its closed loop's rate, times BACK for each run that missed; requests/s."""
        if self.of_models:
            return self._belief(contender)
        misses = sum(not run.held for run in contender.bracket.open_runs)
        return (self._belief(contender) or contender.bracket.loop_rps) * BACK**misses

    # 1. Scouts.

    def _own_scout(self, left_s: float) -> TrialRequest | None:
        if (ask := self.present_loop()) is not None:
            return ask
        unbatched = self.unbatched() if self.has_curve else None
        if unbatched is not None and (ask := self.unbatched_loop()) is not None:
            return ask
        self.name_rule(0.0 if unbatched is None else self._loop_rps(unbatched))
        scouted = len(self.curve.rows_read) if self.has_curve else len(self._looped())
        if self.spent_s(left_s) > self.scout_s and scouted > 1:
            self._ask_curve()
            return None
        for contender in self.corners():
            if (ask := self.full_loop(contender)) is not None:
                return ask
        if self.pending:
            return None
        if (ask := self._defaults()) is not None:
            return ask
        return self._unknown_size()

    def _loop_rps(self, contender: Contender) -> float:
        return max((run.answered_rps for run in contender.runs if run.clients is not None), default=0.0)

    def _defaults(self) -> TrialRequest | None:
        """A scout of the server's defaults with as many clients as can be answered within the limit; None: it has
        been."""
        defaults = self.contenders.of("defaults")
        if defaults is None:
            return None
        most = max((run.answered_rps for c in self.ran for run in c.runs), default=0.0)
        finite = self._limit_s if math.isfinite(self._limit_s) else 1.0
        clients = int(min(max(0.75 * most * finite, UNBATCHED_CLIENTS), CLIENTS_MAX))
        return self.loop(defaults, clients, "the server's own defaults under many clients")

    def _unknown_size(self) -> TrialRequest | None:
        """A scout of the best batch size by the curve where that size was not measured; None: it was, or six scouts
        with full batches were made. A space that may grow gets larger sizes first."""
        if self.contenders.is_empty:
            return None
        top = self._liked()
        while self.contenders.grow_sizes(top):
            self.contenders.grid(self.hopes_max)
            self._asked_model = None
            top = self._liked()
        if top.configuration.batching is None or len(self._looped()) >= 6:
            return None
        fewest = min((c.threads for c in self.contenders if c.point is not None), default=1)
        useful = [
            c
            for c in self.contenders
            if c.point is not None
            and c.threads == fewest
            and c.rows <= top.rows
            and self.batch_s(c.rows) <= self._limit_s
        ]
        best = max(useful, key=lambda c: c.rows, default=None)
        if best is None:
            return None
        if best.rows in self.curve.rows_read and not self.curve.has_three_sizes:
            # Two sizes lie on a line whatever the device does: is half as large a batch as good, as on many CPUs?
            best = max((c for c in useful if 2 * c.rows <= best.rows), key=lambda c: c.rows, default=best)
        return None if best.rows in self.curve.rows_read else self.full_loop(best)

    def _liked(self) -> Contender:
        """The contender with the highest capacity by the curve; of equals the simplest."""
        self._ask_curve()
        return max(self.contenders, key=lambda c: _level(c.model_says, c))

    def _looped(self) -> list[Contender]:
        """Who ran a closed loop, with batching."""
        return [
            c
            for c in self.contenders
            if c.configuration.batching is not None and any(run.clients is not None for run in c.runs)
        ]

    # 2. Hopes.

    def _ask_curve(self) -> None:
        if self.of_models:
            self._guess()
            return
        asked = (
            len(list(self.contenders)),
            sum(len(c.runs) - len(c.bracket.open_runs) for c in self.contenders),
        )
        if self._asked_model != asked:
            for contender in self.contenders:
                if contender.configuration.batching is None:
                    contender.model_says = UNCONFIRMED * self._loop_rps(contender)
                elif self.curve.is_known:
                    contender.model_says = self.curve.capacity_rps(contender.configuration)
            self._asked_model = len(list(self.contenders)), asked[1]
        known = [
            (c, min(max(c.model_says, c.bracket.held_rps), self.upper(c)), self._measured_rps(c))
            for c in self.contenders
            if self._is_known(c) and self._measured_rps(c) > 0.0
        ]
        self.correct_hopes(known)
        for contender in self.contenders:
            contender.hope = max(contender.hope, LOOP_SHARE * contender.bracket.loop_rps)

    def _guess(self) -> None:
        """Set hopes with several models: for contenders that ran by their runs, for others by a plane through these.

        Before any ran: the rate at which the models would use the server in turns, each as fast as it held alone.
        """
        held = [
            best.bracket.held_rps / search.stated_rps
            for search in self.alone.values()
            if (best := search.best())
        ]
        turns = 1.0 / sum(1.0 / scale for scale in held) if held else 1.0
        for contender in self.contenders:
            is_named = contender.is_reference or "alone" in contender.sources
            contender.hope = turns * self.stated_rps * (1.0 if is_named else UNCONFIRMED)
        ran = {c: self._guessed_rps(c) for c in self.contenders if c.bracket.open_runs}
        order = sorted(ran, key=lambda c: (self.worth(c), ran[c]), reverse=True)
        self.hope_by_plane([(c, math.log(ran[c])) for c in order])
        for contender, rate_rps in ran.items():
            contender.hope = rate_rps

    def _guessed_rps(self, contender: Contender) -> float:
        """The rate held, requests/s; where none was, a rate below those missed, by how far a limit was exceeded."""
        # The power of the used share of a limit by which the rate is divided (joint_search.py).
        nearness = 0.25
        guesses = [
            (run.rate_rps or 0.0)
            * min(min(of_limit(run.latency_s, self.limits), WORST_VIOLATION) ** -nearness, BACK)
            for run in contender.bracket.open_runs
        ]
        return contender.bracket.held_rps or min(guesses)

    def _is_known(self, contender: Contender) -> bool:
        """Whether a contender has a figure to compare with the curve: a run at one rate and a prediction.

        Without a curve: whether it ran at all.
        """
        if not self.has_curve:
            return bool(contender.runs)
        return bool(contender.bracket.open_runs) and contender.model_says > 0.0

    def _measured_rps(self, contender: Contender) -> float:
        """Capacity by a contender's runs alone, requests/s: the rate held, else BACK times the rate missed; 0: unknown.

        Without a curve and without runs at one rate: LOOP_SHARE of what its closed loops answered.
        """
        held, upper = contender.bracket.held_rps, self.upper(contender)
        if not self.has_curve and not contender.bracket.open_runs:
            return max(LOOP_SHARE * run.answered_rps * self._gaps_room(run) for run in contender.runs)
        return held or (BACK * upper if math.isfinite(upper) else 0.0)

    def _gaps_room(self, run: BracketRun) -> float:
        """Factor on a closed loop's rate: below 1 where its gaps between tokens exceed a limit (the square root of
        limit / gap), else 1."""
        limits = {name: limit for name, limit in self.limits.items() if name.startswith("itl_")}
        ratios = [limit / max(run.latency_s.get(name, limit), TINY_S) for name, limit in limits.items()]
        return min(1.0, math.sqrt(min(ratios, default=1.0)))

    # 3. and 4. Brackets, fresh runs, what is left to be settled.

    def _question(self, *, left_s: float, taken: set[Contender]) -> TrialRequest | None:
        if self.is_hopeless:
            return None
        self._ask_curve()
        top = self.leader()
        fresh_runs = 3.3  # Fresh runs of the leader for which time is set aside.
        if self._is_comparing(top, left_s):
            reserve_s = fresh_runs * self._cost_s(top, self._belief(top) or 1.0, fresh=True)
            reserve_s = min(reserve_s, (1.0 - COMPARE_SHARE) * self.budget_s)
            ask = self._affordable(self._next_probe(top, taken), left_s=left_s, reserve_s=reserve_s)
            if ask is not None:
                return ask
        ask = self._fresh(top, left_s) or self._equal_loop(top)
        if ask is not None:
            return ask
        probe = self._open_question(top, taken)
        # Whom nobody tried is tried only where there is time to find its capacity by two more runs and to confirm it:
        # else a sure answer becomes unsure.
        reserve_s = 0.0
        if probe is not None and not probe[0].runs:
            reserve_s = 3.0 * self._cost_s(*probe[:2]) + fresh_runs * self._cost_s(*probe[:2], fresh=True)
        return self._affordable(probe, left_s=left_s, reserve_s=reserve_s) or self._affordable(
            self._unmeasured(top, taken), left_s=left_s, reserve_s=0.0
        )

    def _unmeasured(self, top: Contender, taken: set[Contender]) -> tuple[Contender, float, str] | None:
        """Choose (reference, rate, reason) of a run for which the time is left that settles nothing else: of a
        reference that held no rate, so that the gain over it is unknown; None: there is none, it missed twice, or the
        leader holds no rate either."""
        for source in REFERENCES if top.bracket.held_rps else ():
            other = self.contenders.of(source)
            if other is None or other in {top, *taken} or other.is_broken or not other.runs:
                continue
            rate = STEP_DOWN * (self._humbled(other) or max(run.answered_rps for run in other.runs))
            if rate and not other.bracket.held_rps and len(other.bracket.open_runs) < 2:
                return other, rate, "how much is gained over it"
        return None

    def _is_comparing(self, top: Contender, left_s: float) -> bool:
        """Whether to compare rather than confirm.

        Before the first confirmation run: until COMPARE_SHARE of the budget is spent. After it: while the leader holds
        a rate, is not confirmed, and its bracket is wide, as that of a new leader is.
        """
        bracket = top.bracket
        if any(run.fresh for c in self.ran for run in c.runs):
            return (
                bool(bracket.held_rps)
                and not bracket.confirmed_rps
                and bracket.missed_rps > WIDEST * bracket.held_rps
            )
        return self.spent_s(left_s) < COMPARE_SHARE * self.budget_s

    def _affordable(
        self, probe: tuple[Contender, float, str] | None, *, left_s: float, reserve_s: float
    ) -> TrialRequest | None:
        if probe is None:
            return None
        contender, rate_rps, why = probe
        seconds = self._fitting_s(contender, rate_rps, left_s=left_s - reserve_s)
        if seconds is None:
            return None
        return self.ask(contender, None, why, rate_rps=rate_rps, duration_s=seconds)

    def _fitting_s(
        self, contender: Contender, rate_rps: float, *, left_s: float, fresh: bool = False
    ) -> float | None:
        """Seconds of a run that fits in `left_s`, at least 0.6 of the usual length.

        None: that does not fit, or the run would have fewer than four requests.
        """
        seconds = self._seconds(contender, rate_rps, fresh=fresh)
        requests_min = 4  # Where no rate holds, lower ones are tried until so few requests would be sent.
        if seconds * rate_rps * self.rarest < requests_min:
            return None
        fitting = left_s - (self._cost_s(contender, rate_rps, fresh=fresh) - seconds)
        shortest = 0.6  # Of its length, what the last run is made for in the time that is left.
        return min(seconds, fitting) if fitting >= shortest * seconds else None

    def _next_probe(self, top: Contender, taken: set[Contender]) -> tuple[Contender, float, str] | None:
        """Choose (contender, rate in requests/s, reason) of the next run; None: nothing is open."""
        # OPEN with several models while a contender of `Search.is_first` is untried (joint_search.py: the
        # search then finds 78 % of the best in 40 loads, else 75 %).
        roughly = 1.4
        bracket = top.bracket
        lo = bracket.held_rps
        if not lo:
            if top in taken:
                others = [c for c in self.contenders if c not in taken]
                if not others:
                    return None
                top = self._best_of(others)
            hopeful = 0.92  # as a share of its hope
            return top, self._below_near_misses(hopeful * self._first_rate(top)), "the best hope"
        rivals = [
            c
            for c in self.contenders
            if c is not top
            and c not in taken
            and self.upper(c) > LEVEL * lo
            and (self._belief(c) > RIVAL * self._belief(top) or self._is_unbeaten(c, top))
        ]
        if rivals and not self.of_models:
            rival = max(rivals, key=lambda c: _level(self._belief(c), c))
            return rival, self._rivals_rate(rival, top), "it may serve more than the leader"
        near = self._untried_near(top, taken, widely=self.of_models)
        closed = roughly if near is not None and self.is_first(near) else OPEN
        if top not in taken and bracket.missed_rps > closed * lo and not bracket.confirmed_rps:
            return top, self._next_rate(top), "how much more the leader serves"
        if near is None:
            return None
        return near, self._more_than(top), "whether it serves more than the leader"

    def _is_unbeaten(self, contender: Contender, top: Contender) -> bool:
        """Whether a reference held every rate that it was loaded at, the highest of them HOPELESS times what the leader
        held or more: whatever is hoped of it, it is left out only by a miss."""
        bracket = contender.bracket
        return (
            contender.is_reference
            and bracket.held_rps >= HOPELESS * top.bracket.held_rps
            and math.isinf(bracket.missed_once(0.0))
        )

    def _more_than(self, top: Contender) -> float:
        """Rate in requests/s that another contender must hold to be better than the leader `top`."""
        stands = {"present", "defaults"} & set(top.sources)
        return (LEVEL if stands else RIVAL) * top.bracket.held_rps

    def _rivals_rate(self, rival: Contender, top: Contender) -> float:
        """Rate of a rival's next run, requests/s: at first 0.95 of its belief; then by bisection between what the
        leader or it holds and its belief, but no rate above one that it missed once."""
        bracket, belief, least_rps = rival.bracket, self._belief(rival), self._more_than(top)
        if not bracket.open_runs:
            return max(least_rps, 0.95 * belief)
        least = max(bracket.held_rps, top.bracket.held_rps)
        return max(least_rps, min(math.sqrt(least * belief), bracket.missed_once(least)))

    def _first_rate(self, top: Contender) -> float:
        most = max((run.answered_rps for c in self.ran for run in c.runs), default=0.0)
        return min(self._humbled(top) or most or 1.0, BOLDEST * most if most else math.inf)

    def _below_near_misses(self, rate_rps: float) -> float:
        """Lower a rate to BACK times the lowest that any contender missed narrowly; for while none holds a rate.

        The host may slow down every answer.
        """
        near = [
            run.rate_rps
            for c in self.contenders
            for run in c.bracket.open_runs
            if run.rate_rps is not None and not run.held and not run.far
        ]
        return min([rate_rps, *(BACK * missed_rps for missed_rps in near)])

    def _next_rate(self, top: Contender) -> float:
        is_curved = self.trusts_curve and self.curve.is_known and top.configuration.batching is not None
        most_rps = LEVEL * self.curve.most_rps(top.configuration) if is_curved else math.inf
        belief_rps, streams = self._belief(top), self._streams
        return next_rate(top.bracket, self.limits, belief_rps=belief_rps, most_rps=most_rps, streams=streams)

    def _untried_near(self, top: Contender, taken: set[Contender], *, widely: bool) -> Contender | None:
        """The most promising contender without a run at one rate that may hold more than the leader; None: none left.

        Candidates are neighbours in batch size or threads, what the server has, and its defaults. `widely`: also
        neighbours in any parameter, no batching, the rule's and the guide's points, and points that Optuna names.
        """
        lo = top.bracket.held_rps
        widely = widely or self.scenario.search.strategy == "rule"
        named: tuple[Source, ...] = ("present", "defaults")
        if widely:
            named = (*named, "no_batching", "rule", "guide")
        standing = [c for source in named if (c := self.contenders.of(source)) is not None]
        standing += [c for c in self.contenders if self.is_first(c)]
        steps = [
            c
            for c in self.contenders.neighbours(top)
            if widely or (c.rows, c.threads) != (top.rows, top.threads)
        ]
        if top.configuration.batching is None:
            steps = self.corners()
        steps += self._simpler_steps(top)
        if not widely:  # a checked curve says that these gain nothing, and they are no simpler: confirm first
            steps = [c for c in steps if c.simplicity < top.simplicity or not self.is_level(c, top)]
        near = [c for c in (*steps, *standing) if c is not top and self._is_untried(c, lo, taken)]
        self._ask_curve()
        near = [
            c
            for c in near
            if c in standing or not self._is_unlikely(c, top, least=HOPELESS if c in steps else UNLIKELY)
        ]  # the answer says how the rule's and the guide's points fare, whatever is hoped of them
        if near:
            return max(near, key=lambda c: (self.is_first(c), *_level(self._belief(c), c)))
        return self._named_by_optuna(top, taken) if widely or self._is_optunas else None

    def _simpler_steps(self, top: Contender) -> list[Contender]:
        """Neighbours, each simpler than the contender they adjoin, of those that are simpler than the leader and within
        LEVEL of it: where capacity hardly depends on the size, the smallest size is preferable."""
        level = [
            c for c in self.contenders if c is not top and LEVEL * self.worth(c) >= self.worth(top) > 0.0
        ]
        simpler = [c for c in level if c.simplicity < top.simplicity]
        return [
            near for c in simpler for near in self.contenders.neighbours(c) if near.simplicity < c.simplicity
        ]

    def _is_untried(self, contender: Contender, lo: float, taken: set[Contender]) -> bool:
        return (
            contender not in taken
            and self.contenders.can_win(contender)
            and not contender.bracket.open_runs
            and self.upper(contender) > LEVEL * lo
        )

    def _is_unlikely(self, contender: Contender, top: Contender, *, least: float = UNLIKELY) -> bool:
        """Whether the trusted curve predicts less than `least` of the leader's belief, or that larger batches would
        never be filled. False while the curve is not trusted."""
        if not self.trusts_curve or not contender.model_says or top.configuration.batching is None:
            return False
        never_filled = (
            contender.rows > top.rows
            and contender.threads == top.threads
            and contender.model_says == top.model_says
            and top.bracket.held_rps <= OPEN * top.model_says  # else the curve is wrong about the leader
        )
        return never_filled or self._belief(contender) < least * self._belief(top)

    def _named_by_optuna(self, top: Contender, taken: set[Contender]) -> Contender | None:
        """The first untried contender that Optuna names; None: none, or the space is small enough for neighbours.

        Only in spaces of three parameters or more, with values without an order, or with strategy "optuna".
        """
        if not self._is_wide():
            return None
        known = [(c, self.worth(c) or 0.5 * self._belief(c)) for c in self.contenders if c.bracket.open_runs]
        for named in self.optuna_contenders(known):
            self._ask_curve()
            is_unlikely = self._is_unlikely(named, top) and not self._is_optunas
            if self._is_untried(named, top.bracket.held_rps, taken) and not is_unlikely:
                return named
        return None

    @property
    def _is_optunas(self) -> bool:
        """Whether Optuna names all contenders but the references."""
        return self.scenario.search.strategy == "optuna"

    def _is_wide(self) -> bool:
        knobs = [values for values in self.contenders.values.values() if len(values) > 1]
        has_words = any(isinstance(value, str | bool) for values in knobs for value in values)
        return self._is_optunas or len(knobs) >= 3 or has_words

    def _fresh(self, top: Contender, left_s: float) -> TrialRequest | None:
        """The next confirmation run of the leader; None: it is confirmed, by twice as many runs where they differ, or
        there is no time."""
        rate, bracket = self._fresh_rate(top), top.bracket
        if not exceeds(rate, bracket.confirmed_rps):
            if not bracket.is_unsteady or len(bracket.fresh) >= 2 * FRESH:
                return None
            rate = bracket.confirmed_rps
        seconds = self._fitting_s(top, rate, left_s=left_s, fresh=True)
        if seconds is None:
            return None
        return self.ask(top, "confirm", "confirmation of the leader", rate_rps=rate, duration_s=seconds)

    def _equal_loop(self, top: Contender) -> TrialRequest | None:
        """A closed loop without batching on as many model instances as the leader has; None: as `equal_unbatched`, or
        it was run."""
        equal = self.equal_unbatched(top)
        if equal is None:
            return None
        clients = 2 * top.threads * UNBATCHED_CLIENTS
        return self.loop(equal, min(clients, CLIENTS_MAX), "no batching, with as many instances")

    def _fresh_rate(self, top: Contender) -> float:
        """Rate of the leader's next confirmation run, requests/s: SAFE of the rate found at first.

        Each rate that failed lowers it by STEP_DOWN; a rate near one that was run already is replaced by that.
        """
        bracket = top.bracket
        likely = bracket.held_rps or self._humbled(top)
        rate = SAFE * likely
        if not bracket.held_rps:
            cautious = 0.75  # as a share of its hope
            rate = self._below_near_misses(cautious * min(likely, BOLDEST * bracket.loop_rps or likely))
        tried = sorted({run.rate_rps for run in bracket.open_runs if run.fresh and run.rate_rps is not None})
        if tried and not bracket.confirmed_rps:
            failed = [known for known in tried if bracket.has_failed(known)]
            return tried[0] * STEP_DOWN ** len(failed) if tried[0] in failed else tried[0]
        near = [known for known in tried if rate and abs(math.log(known / rate)) < math.log(RIVAL)]
        rate = near[0] if near else rate
        while bracket.has_failed(rate):
            rate *= STEP_DOWN
        return rate

    def _open_question(self, top: Contender, taken: set[Contender]) -> tuple[Contender, float, str] | None:
        """Choose (contender, rate, reason) of a run after the confirmation, of one that may hold a tenth more than is
        stated; None: no contender may."""
        # Rate at which an open rival is loaded, times the rate stated for the leader.
        beat = 1.095
        bracket = top.bracket
        stated = bracket.stated_rps
        if not stated:
            return self._next_probe(top, taken)
        if top not in taken and bracket.missed_above(stated) > WIDEST * stated:
            return top, WIDTH * stated, "how much more the leader serves"
        rivals = [c for c in self.contenders if c not in taken and self.is_open(c, top)]
        if rivals:
            rival = max(rivals, key=lambda c: _level(self._belief(c), c))
            # Its upper end is lower only where that does not count beside the leader: then it is tried once more.
            rate = min(max(beat * stated, self._more_than(top)), self.upper(rival))
            return rival, rate, "whether it serves 10 % more than the answer"
        near = self._untried_near(top, taken, widely=True)
        return None if near is None else (near, beat * stated, "whether it serves 10 % more than the answer")

    # What a run costs.

    def _run_batch_s(self, contender: Contender, rate_rps: float) -> float:
        finite = self._limit_s if math.isfinite(self._limit_s) else 1.0
        rows = max(1.0, min(contender.rows, rate_rps * self._rows * finite / 2))
        return self.batch_s(rows)

    def _seconds(self, contender: Contender, rate_rps: float, *, fresh: bool = False) -> float:
        """Seconds of a run at this rate: the longest of so many batches, requests and seconds, within its share of the
        budget, but for six batches in any case."""
        batch_s = self._run_batch_s(contender, rate_rps)
        batches, requests, run_s = (100, 4000, 2.0) if fresh else (BATCHES, REQUESTS, 1.0)
        wanted = max(batches * batch_s, requests / (rate_rps * self.rarest), run_s)
        load = self.scenario.load
        if "duration_s" in load.model_fields_set and not self.scenario.search.grow:
            wanted = max(wanted, load.duration_s) if fresh else min(wanted, load.duration_s)
        share = FRESH_SHARE if fresh else RUN_SHARE
        run_batches_min = 6  # Batches that a run holds whatever its share of the budget: fewer show no queue.
        return min(wanted, max(share * self.usual_s, run_batches_min * batch_s))

    def _cost_s(self, contender: Contender, rate_rps: float, *, fresh: bool = False) -> float:
        drained_s = 3 * self._run_batch_s(contender, rate_rps)
        return self._seconds(contender, rate_rps, fresh=fresh) + self.overhead_s() + drained_s


def _level(rate_rps: float, contender: Contender) -> tuple[float, list[int]]:
    """Sort key: rates within about RIVAL are equal; of equals the simplest is largest."""
    step = math.floor(math.log(rate_rps) / math.log(RIVAL)) if rate_rps > 0.0 else -math.inf
    return step, [-part for part in contender.simplicity]
