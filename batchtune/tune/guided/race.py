"""Which of a few good configurations is the best, by runs side by side?

Every block runs each survivor once under one seed, in random order, so that a drifting machine favours none. By
throughput or latency a survivor is dropped when the anytime-valid bound on its paired differences from the leader
excludes zero: one may look after every block and still drops the best with probability RACE_ALPHA at most. For a
capacity all survivors run at the same rate, which then climbs; as the quantile grows with the rate, one that misses
twice cannot return. The race ends with one survivor, when the others are as good within INDIFFERENCE, or with the time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.measure.statistics.distributions import Z_95, t_quantile
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import percentage, rounded
from batchtune.tune import policy
from batchtune.tune.evidence.rates import Located, Rung, locate, rungs_of
from batchtune.tune.strategies.protocol import Outlook
from batchtune.tune.strategies.side_by_side import blocks_at_once, together
from batchtune.tune.trials.out_of_memory import out_of_memory
from batchtune.tune.trials.pace import rung_load
from batchtune.tune.trials.trial import Ask, Trial

Race = Generator[Ask, Trial, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A configuration in the race, with its point of the space, if it has one."""

    configuration: Configuration
    point: dict[str, Any] | None


def race(outlook: Outlook, survivors: Sequence[Survivor], *, rate_rps: float | None) -> Race:
    """Run the race and return in words why it ended; `rate_rps` is where the ladder of a capacity begins."""
    if len(survivors) < 2 and outlook.scenario.objective != "capacity":
        return "one configuration stands out"
    if outlook.scenario.objective == "capacity":
        if rate_rps is None:
            return "no rate to race at"
        return (yield from _ladder(outlook, list(survivors), rate_rps))
    return (yield from _paired(outlook, list(survivors)))


def mixture_half_width(blocks: int, sd: float, alpha: float) -> float:
    """Half the anytime-valid interval of a mean of so many differences: the normal mixture bound of tuning.md 3.5.

    Holds at every number of blocks at once with probability 1 - alpha. Source: Robbins 1970, "Statistical methods
    related to the law of the iterated logarithm".
    """
    log = -2.0 * math.log(alpha)
    variance = (log + math.log(log + 1.0)) / policy.MIXTURE_AT_BLOCKS
    grown = blocks * variance + 1.0
    return sd * math.sqrt(2.0 * grown / (blocks**2 * variance) * math.log(math.sqrt(grown) / alpha))


def dropped(merits: Mapping[Any, Sequence[float]], *, prior_sd: float) -> set[Any]:
    """Those whose paired differences from the leader exclude zero; `merits` in the same blocks, more is better."""
    blocks = min(len(values) for values in merits.values())
    if blocks < policy.RACE_FIRST_LOOK or len(merits) < 2:
        return set()
    leader = max(merits, key=lambda rival: float(np.mean(merits[rival])))
    share = policy.RACE_ALPHA / (len(merits) - 1)
    beaten = set()
    for rival, values in merits.items():
        if rival == leader:
            continue
        ahead = np.subtract(merits[leader], values)
        sd = _moderated_sd(ahead, prior_sd)
        if float(ahead.mean()) > mixture_half_width(blocks, sd, share):
            beaten.add(rival)
    return beaten


def as_good(merits: Mapping[Any, Sequence[float]], *, prior_sd: float) -> bool:
    """Whether nothing beats the leader by more than INDIFFERENCE, with probability RACE_SURE (normal, Bonferroni)."""
    leader = max(merits, key=lambda rival: float(np.mean(merits[rival])))
    beaten = 0.0
    for rival, values in merits.items():
        if rival != leader:
            behind = np.subtract(values, merits[leader])
            error = _moderated_sd(behind, prior_sd) / math.sqrt(len(behind))
            beaten += 0.5 * math.erfc(
                (-math.log1p(-policy.INDIFFERENCE) - float(behind.mean())) / error / math.sqrt(2.0)
            )
    return beaten <= 1.0 - policy.RACE_SURE


def _moderated_sd(differences: Any, prior_sd: float) -> float:
    """Averaged with the prior's, and widened as far as few differences tell a spread badly."""
    degrees = policy.PRIOR_DEGREES + len(differences) - 1
    squares = policy.PRIOR_DEGREES * 2.0 * prior_sd**2 + float(
        np.square(differences - np.mean(differences)).sum()
    )
    return math.sqrt(squares / degrees) * t_quantile(0.975, degrees) / Z_95


def _paired(outlook: Outlook, survivors: list[Survivor]) -> Race:
    scenario = outlook.scenario
    prior_sd = policy.LATENCY_PRIOR_SD if scenario.objective == "latency" else policy.THROUGHPUT_PRIOR_SD
    names = {survivor.configuration: survivor for survivor in survivors}
    alive = [survivor.configuration for survivor in survivors]
    by_configuration: dict[Configuration, list[float]] = {configuration: [] for configuration in alive}
    first = _next_block(outlook)
    at_once = max(len(outlook.nodes), 1)
    for block in range(first, first + policy.RACE_BLOCKS_MAX, at_once):
        if not _time_for(outlook, len(alive)):
            return f"the time for the race was spent with {len(alive)} survivors"
        asks = [
            ask for beside in range(at_once) for ask in _block(outlook, names, alive, block + beside, first)
        ]
        for trial in (yield from together(outlook, asks)):
            by_configuration[trial.configuration].append(_merit(trial, scenario))
        known = {configuration: by_configuration[configuration] for configuration in alive}
        finite = [running for running in alive if all(map(math.isfinite, known[running][-at_once:]))]
        alive = finite or alive[:1]
        known = {configuration: known[configuration] for configuration in alive}
        out = dropped(known, prior_sd=prior_sd)
        alive = [configuration for configuration in alive if configuration not in out]
        if len(alive) == 1:
            return "one survivor is left"
        if block + at_once - 1 > first and as_good(
            {configuration: known[configuration] for configuration in alive}, prior_sd=prior_sd
        ):
            return f"none of {len(alive)} survivors beats the leader by more than {percentage(policy.INDIFFERENCE)}"
    return f"{policy.RACE_BLOCKS_MAX} blocks did not separate {len(alive)} survivors"


def _block(
    outlook: Outlook,
    names: Mapping[Configuration, Survivor],
    alive: Sequence[Configuration],
    block: int,
    first: int,
) -> list[Ask]:
    """Each of those alive once, in random order, all on one node: however slow that is, it is so for all."""
    nodes = outlook.nodes
    node = nodes[(block - first) % len(nodes)] if nodes else None
    why = f"race, block {block - first + 1}, {len(alive)} survivors"
    return [
        replace(_ask(names[survivor], why, block=block), node=node) for survivor in _shuffled(alive, block)
    ]


@dataclass(slots=True)
class _Climb:
    """The ladder's state: who is alive, and every rung that each was seen on."""

    scenario: Scenario
    alive: list[Survivor]
    rungs: dict[Configuration, list[Rung]] = field(default_factory=dict)

    def note(self, survivor: Survivor, trial: Trial) -> Rung | None:
        rungs = rungs_of([trial], self.scenario.slo) if trial.state == "complete" else []
        self.rungs.setdefault(survivor.configuration, []).extend(rungs)
        return rungs[-1] if rungs else None

    def located(self, survivor: Survivor) -> Located | None:
        return locate(self.rungs.get(survivor.configuration, []))

    def ahead(self) -> list[Survivor]:
        """Those alive, the highest crossing first."""

        def crossing(survivor: Survivor) -> float:
            located = self.located(survivor)
            return 0.0 if located is None else located.crossing_rps

        return sorted(self.alive, key=crossing, reverse=True)


def _ladder(outlook: Outlook, survivors: list[Survivor], rate_rps: float) -> Race:
    climb = _Climb(scenario=outlook.scenario, alive=survivors)
    held_once = False
    reason = f"{policy.RUNGS_MAX} rungs did not separate the survivors"
    for _ in range(policy.RUNGS_MAX):
        if not _time_for(outlook, len(climb.alive)):
            reason = f"the time for the race was spent with {len(climb.alive)} survivors"
            break
        missed, margins = yield from _rung(outlook, climb, rate_rps, forgives=held_once)
        if len(missed) == len(climb.alive):
            if held_once:
                reason = f"the last {len(missed)} survivors fail at the same rate, {policy.RUNG:g} times what they held"
                break
            rate_rps = _lower(climb, rate_rps)
            continue
        held_once = True
        climb.alive = [survivor for survivor in climb.alive if survivor not in missed]
        if len(climb.alive) == 1 and missed:
            reason = "one survivor is left"
            break
        if len(climb.alive) == 1 and climb.located(climb.alive[0]) is None:
            break
        rate_rps *= policy.LONG_RUNG if max(margins, default=0.0) < policy.EASY_MARGIN else policy.RUNG
    yield from _boundary(outlook, climb)
    return reason


def _rung(
    outlook: Outlook, climb: _Climb, rate_rps: float, *, forgives: bool
) -> Generator[Ask, Trial, tuple[list[Survivor], list[float]]]:
    """All survivors at one rate; those that miss are seen again, and only a second miss counts.

    Where the time ends before, those not seen again stay. Unless it `forgives`, a rate that all miss is too high.
    """
    block = _next_block(outlook)
    margins, doubtful = [], []
    runners = _shuffled(climb.alive, block)
    why = f"race at {rounded(rate_rps)} requests/s"
    asks = [_ladder_ask(outlook, survivor, rate_rps, block, why) for survivor in runners]
    for survivor, trial in zip(runners, (yield from together(outlook, asks)), strict=True):
        rung = climb.note(survivor, trial)
        if rung is None or not rung.held:
            doubtful.append((survivor, _next_node(outlook, trial.node)))
        if rung is not None:
            margins.append(rung.margin)
    if len(doubtful) == len(climb.alive) and not forgives:
        return [survivor for survivor, _ in doubtful], margins
    missed: list[Survivor] = []
    why = f"{why}, seen again after a miss"
    at_once = max(len(outlook.nodes), 1)
    for first in range(0, len(doubtful), at_once):
        if not _time_for(outlook, 1):
            break
        again = doubtful[first : first + at_once]
        asks = [
            replace(_ladder_ask(outlook, survivor, rate_rps, block + 1, why), node=node)
            for survivor, node in again
        ]
        for (survivor, _), trial in zip(again, (yield from together(outlook, asks)), strict=True):
            rung = climb.note(survivor, trial)
            if rung is None or not rung.held:
                missed.append(survivor)
    return missed, margins


def _next_node(outlook: Outlook, node: str | None) -> str | None:
    """Another node than this one, where there are several."""
    nodes = list(outlook.nodes)
    return nodes[(nodes.index(node) + 1) % len(nodes)] if node in nodes else None


def _lower(climb: _Climb, rate_rps: float) -> float:
    """Where the best survivor should hold, after all missed; at least RUNG and at most two LONG_RUNGs down."""
    crossings = [located.crossing_rps for located in map(climb.located, climb.alive) if located is not None]
    hoped_rps = policy.RACE_START_SHARE * max(crossings, default=0.0)
    return min(max(hoped_rps, rate_rps / policy.LONG_RUNG**2), rate_rps / policy.RUNG)


def _boundary(outlook: Outlook, climb: _Climb) -> Generator[Ask, Trial, None]:
    """Runs of the leader around where its quantile is expected to cross the limit, up to a rate that is missed."""
    for turn in range(policy.BOUNDARY_RUNS):
        leader = climb.ahead()[0]
        located = climb.located(leader)
        if located is None or not _time_for(outlook, 1) or (located.bracketed and turn > 1):
            return
        is_above = located.held_rps > 0.0 if turn or not located.bracketed else False
        rate_rps = policy.BOUNDARY_STEP[is_above] * located.crossing_rps
        why = f"the leader's boundary, at {rounded(rate_rps)} requests/s"
        trial = yield _ladder_ask(outlook, leader, rate_rps, _next_block(outlook), why)
        climb.note(leader, trial)


def _ask(survivor: Survivor, reason: str, *, block: int) -> Ask:
    return Ask(
        configuration=survivor.configuration,
        source="race",
        reason=reason,
        point=survivor.point,
        block=block,
    )


def _ladder_ask(outlook: Outlook, survivor: Survivor, rate_rps: float, block: int, reason: str) -> Ask:
    rate_rps, duration_s = rung_load(outlook.pace, outlook.scenario, survivor.configuration, rate_rps)
    return replace(_ask(survivor, reason, block=block), rate_rps=rate_rps, duration_s=duration_s)


def _merit(trial: Trial, scenario: Scenario) -> float:
    """The logarithm of the objective, less what the SLO is missed by; -inf for one that failed or ran out of memory."""
    if trial.objective is None or trial.state != "complete" or not trial.objective.value > 0.0:
        return -math.inf
    if out_of_memory(trial) is not None:
        return -math.inf
    logarithm = math.log(trial.objective.value)
    missed = min(max(0.0, *trial.constraints.values()), policy.WORST_VIOLATION) if trial.constraints else 0.0
    return (-logarithm if scenario.objective == "latency" else logarithm) - policy.BREACH_WEIGHT * math.log1p(
        missed
    )


def _time_for(outlook: Outlook, runs: int) -> bool:
    """Whether so many runs, one after another, fit before the confirmations."""
    recent = [trial.seconds for trial in outlook.trials if trial.source == "race"][-5:]
    load = outlook.scenario.load
    if outlook.scenario.objective == "capacity":
        usual = min(load.duration_s, policy.RUNG_S) + 0.5
    else:
        usual = outlook.fresh_run_s() * blocks_at_once(outlook)
    run_s = float(np.mean(recent)) if recent else usual
    return runs * run_s <= outlook.remaining_s()


def _next_block(outlook: Outlook) -> int:
    return 1 + max((trial.block or 0 for trial in outlook.trials), default=0)


def _shuffled(ones: Sequence[Any], block: int) -> list[Any]:
    order = list(ones)
    random.Random(block).shuffle(order)
    return order
