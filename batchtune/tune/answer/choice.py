"""Compares contenders for the answer: by the rates that they held, or under the scenario's own load.

`Capacities` and `FixedLoads` have the same methods; `recommend` uses one or the other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from batchtune.measure.quantiles import Estimate
from batchtune.tune.answer.recommendation import Capacity, OpenQuestion, stated_capacity
from batchtune.tune.evidence.bracket import FRESH, LEVEL, OPEN, UNSTEADY, WIDEST, BracketRun, exceeds, runs_of
from batchtune.tune.search.capacity import CapacitySearch
from batchtune.tune.search.contenders import Contender
from batchtune.tune.search.fixed_load import FixedLoadSearch
from batchtune.tune.search.search_loop import Search


class Capacities:
    """Compares contenders by the rates that they held."""

    def __init__(self, search: CapacitySearch) -> None:
        self.search = search
        self.beside: Contender | None = None
        """The recommended contender, with which others are compared; None: nobody is recommended yet."""

    def value(self, contender: Contender) -> float:
        """Return the rate that is stated as held for a contender, requests/s; 0: none."""
        capacity = self.capacity(contender)
        return 0.0 if capacity is None else capacity.held_rps

    def chosen(self) -> Contender | None:
        """Return the contender to recommend; None: none held a rate.

        The one with the highest stated rate; a simpler reference confirmed within LEVEL of it is preferred, unless only
        the other would be established.
        """
        known = [c for c in self.search.contenders if self.value(c) > 0.0]
        if not known:
            return None
        top = max(
            known, key=lambda c: (c.bracket.stated_rps, self.value(c), [-part for part in c.simplicity])
        )  # whom only closed loops kept comes behind whoever held a rate
        simpler = [
            c
            for c in known
            if c.simplicity < top.simplicity
            and c.is_reference
            and c.bracket.confirmed_rps >= top.bracket.stated_rps / LEVEL
            and c.bracket.confirmed_rps > 0.0
            and (self.is_established(c) or not self.is_established(top))
        ]
        return min(simpler, key=lambda c: c.simplicity, default=top)

    def ends(self, contender: Contender) -> tuple[float, float]:
        """Return (held, missed) of a contender's bracket as it is stated, requests/s: the highest rate held (0: none),
        and the lowest rate missed (inf: none is known, or a disturbed host made a reference miss it)."""
        said, upper_rps = self.capacity(contender), self.search.upper(contender)
        least_rps = upper_rps if said is None or said.missed_rps is None else said.missed_rps
        compared_rps = self.search.upper(contender, self.beside)
        if compared_rps > upper_rps:
            least_rps = max(least_rps, compared_rps)
        held_rps = 0.0 if said is None else said.held_rps
        return held_rps, max(least_rps, held_rps)

    def gain(self, ours: Contender, other: Contender) -> Estimate | None:
        """Return the capacity of `ours` divided by that of `other`, with an interval from the ends of both brackets;
        None: `ours` held no rate, or the ratio may be anything.

        What full batches answered does not bound the capacity of `other` here, unless each batch is one request: a
        server may answer more in smaller batches (noisy.py, device steps).
        """
        held_rps, missed_rps = self.ends(other)
        if not held_rps and other.configuration.batching is not None:
            missed_rps = max(missed_rps, other.bracket.missed_once(0.0))
        return _ratio(self.ends(ours), (held_rps, missed_rps), same=ours is other)

    def is_judged(self, contender: Contender) -> bool:
        """Whether a contender has any run."""
        return bool(contender.runs)

    def keeps(self, contender: Contender) -> bool:
        """Whether a contender held a rate."""
        return self.value(contender) > 0.0

    def is_open(self, rival: Contender, top: Contender) -> bool:
        """Whether a rival that ran may hold more than OPEN times the stated rate of `top`: the upper end of its bracket
        is above that."""
        if top.bracket.stated_rps:
            return self.search.is_open(rival, top)
        return rival is not top and bool(rival.runs) and self.search.upper(rival) > OPEN * self.value(top)

    def behind(self, contender: Contender) -> tuple[list[BracketRun], int]:
        """Return (runs, confirmations): the runs from which a contender's figures are computed, and how many of them
        are confirmation runs.

        The confirmation runs of its stated rate (`Bracket.confirmations`), if one of them has figures. Else these and
        the first of: runs that held the highest rate, with those that missed this rate or a lower one; closed loops
        that held the SLO; the run that missed the SLO by least.
        """
        bracket, stated = contender.bracket, self.value(contender)
        fresh = bracket.confirmations(stated)
        if not all(run.failed for run in fresh):
            return fresh, len(fresh)
        held = [run for run in bracket.open_runs if run.held]
        highest = max((run.rate_rps or 0.0 for run in held), default=0.0)
        runs = [run for run in held if not exceeds(highest, run.rate_rps or 0.0)]
        runs += [
            run for run in bracket.open_runs if not run.held and not exceeds(run.rate_rps or 0.0, highest)
        ]
        runs = runs or [run for run in contender.runs if run.held]
        runs = runs or sorted(contender.runs, key=self.search.violation)[:1]
        runs += [run for run in fresh if run not in runs]
        return runs, sum(run.fresh for run in runs)

    def capacity(self, contender: Contender) -> Capacity | None:
        """Return the capacity that is stated for a contender; None: its runs say nothing about it."""
        said = stated_capacity(contender.bracket, self.search.scenario.slo.stream_limits())
        if said is None or (said.held_rps and not said.by_loops):
            return said
        lone_rps = self._lone_rps(contender)
        said = replace(said, lone_rps=lone_rps if lone_rps > said.held_rps else None)
        upper_rps = self.search.upper(contender)
        is_closer = not said.held_rps and upper_rps < (said.missed_rps or math.inf)
        return replace(said, missed_rps=upper_rps, is_bound=True) if is_closer else said

    def _lone_rps(self, contender: Contender) -> float:
        """Return what one client alone was answered within the limits, requests/s; 0: it missed them, or did not run
        with this configuration."""
        lone = [trial for trial in self.search.trials if trial.request.is_lone and not trial.parts]
        own = [trial for trial in lone if trial.configuration == contender.configuration]
        runs = runs_of(own, self.search.scenario.slo, self.search.scenario)
        return max((run.answered_rps for run in runs if run.kept), default=0.0)

    def is_established(self, contender: Contender) -> bool:
        """Whether the answer would be established, without a question of `questions`, if this contender were
        recommended."""
        rivals = [c for c in self.search.contenders if self.is_open(c, contender)]
        return not self.questions(contender, rivals)

    def questions(self, chosen: Contender, rivals: Sequence[Contender]) -> list[OpenQuestion]:
        """Return the reasons why the answer `chosen` is not established; []: it is. `rivals`: the contenders that may
        be better."""
        bracket = chosen.bracket
        stated = bracket.stated_rps
        if not stated:
            return [OpenQuestion(code="no_run")]
        questions = []
        said = self.capacity(chosen)
        held, missed = (0, 0) if said is None else (said.held, said.missed)
        if bracket.confirmed_rps < stated or FRESH * missed > held:
            questions.append(OpenQuestion(code="unconfirmed", held=held, missed=missed))
        high = bracket.stated_missed_rps / stated
        if high > WIDEST:
            questions.append(OpenQuestion(code="wide", high=high if math.isfinite(high) else None))
        if rivals:
            first = max(rivals, key=self.search.upper)
            factor = self.search.upper(first) / stated
            questions.append(_rivals(first, rivals, factor))
        return questions


class FixedLoads:
    """Compares contenders by their figures under the scenario's own load."""

    def __init__(self, search: Search) -> None:
        if not isinstance(search, FixedLoadSearch):
            raise TypeError(f"a fixed load is searched by {FixedLoadSearch.__name__}")
        self.search = search
        self.beside: Contender | None = None
        """The recommended contender, beside which others count by the runs that are comparable; None: by all."""

    def chosen(self) -> Contender | None:
        """Return the contender to recommend; None: none keeps the SLO.

        The search's leader; a simpler reference with FRESH confirmation runs within LEVEL of it is preferred.
        """
        search = self.search
        if search.contenders.is_empty:
            return None
        top = search.leader()
        standing = search.standing(top)
        if standing is None or not standing.keeps:
            return None
        simpler = [
            c
            for c in search.contenders
            if c.simplicity < top.simplicity
            and c.is_reference
            and (other := search.standing(c)) is not None
            and other.keeps
            and sum(run.fresh for run in c.runs) >= FRESH
            and other.mean >= standing.mean - math.log(LEVEL)
        ]
        return min(simpler, key=lambda c: c.simplicity, default=top)

    def ends(self, contender: Contender) -> tuple[float, float]:
        """Return (low, high), the interval of a contender's figure: requests/s, or 1 / (p95 in seconds) with objective
        latency; (0, inf) without comparable runs."""
        standing = self.search.standing(contender, self.beside)
        if standing is None:
            return 0.0, math.inf
        return math.exp(standing.low), math.exp(standing.high)

    def gain(self, ours: Contender, other: Contender) -> Estimate | None:
        """Return the figure of `ours` divided by that of `other` (above 1: `ours` is better), with an interval from
        both intervals; None: one of them has no comparable runs."""
        return _ratio(self.ends(ours), self.ends(other), same=ours is other)

    def is_judged(self, contender: Contender) -> bool:
        """Whether a contender has a run under the scenario's own load."""
        return self.search.standing(contender) is not None

    def keeps(self, contender: Contender) -> bool:
        """Whether the runs of a contender that met the SLO are more than those that missed it."""
        standing = self.search.standing(contender, self.beside) or self.search.standing(contender)
        return standing is not None and standing.keeps

    def is_open(self, rival: Contender, top: Contender) -> bool:
        """Whether a rival may be better than `top`, as the search has it."""
        return self.search.is_open(rival, top)

    def behind(self, contender: Contender) -> tuple[list[BracketRun], int]:
        """Return (runs, confirmations): the runs from which a contender's figures are computed, and its number of
        confirmation runs.

        The runs are those that count (`counted_runs`) of the comparable ones; without any, of all.
        """
        runs = self.search.counted_runs(contender, self.beside) or self.search.counted_runs(contender)
        return runs, sum(run.fresh for run in runs)

    def capacity(self, _contender: Contender) -> Capacity | None:
        """Return None: under a fixed load no capacity is measured."""
        return None

    def questions(self, chosen: Contender, rivals: Sequence[Contender]) -> list[OpenQuestion]:
        """Return the reasons why the answer `chosen` is not established; []: it is. `rivals`: the contenders that may
        be better."""
        fresh = [run for run in self.search.own_runs(chosen) if run.fresh]
        held = sum(run.held for run in fresh)
        missed = len(fresh) - held
        questions = []
        if held < FRESH or FRESH * missed > held:
            questions.append(OpenQuestion(code="unconfirmed", held=held, missed=missed))
        merits = sorted(merit for run in fresh if math.isfinite(merit := self.search.merit(run)))
        low = sum(merit < statistics.median(merits) - math.log(UNSTEADY) for merit in merits)
        if FRESH * low > len(merits) - low:
            questions.append(OpenQuestion(code="unsteady", high=math.exp(merits[-1] - merits[0])))
        if rivals:
            first = max(rivals, key=lambda c: self.ends(c)[1])
            mean = self.search.standing(chosen)
            factor = self.ends(first)[1] / math.exp(mean.mean) if mean is not None else math.inf
            questions.append(_rivals(first, rivals, factor))
        return questions


def _rivals(first: Contender, rivals: Sequence[Contender], factor: float) -> OpenQuestion:
    labels = [first.configuration.label(), *(c.configuration.label() for c in rivals if c is not first)]
    return OpenQuestion(code="rivals", labels=tuple(labels), high=factor if math.isfinite(factor) else None)


def _ratio(ours: tuple[float, float], theirs: tuple[float, float], *, same: bool) -> Estimate | None:
    """Ratio of two brackets (low, high), ours over theirs: the middle and both ends; `same`: 1.

    `high` inf: the other held no rate. None: ours held no rate, or the ratio may be anything.
    """
    if same:
        return Estimate(value=1.0, low=1.0, high=1.0)
    low = ours[0] / theirs[1] if theirs[1] > 0.0 else math.inf
    high = ours[1] / theirs[0] if theirs[0] > 0.0 else math.inf
    if not ours[0] > 0.0 or not (low > 0.0 or math.isfinite(high)):
        return None
    value = low if math.isinf(high) else math.sqrt(low * high) or ours[0] / theirs[0]
    return Estimate(value=value, low=low, high=high)
