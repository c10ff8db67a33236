"""Which configuration is to be recommended, for the SLO that was searched or for another one?

Only what lies inside the search space, and no batching, may be recommended: a bound of the space is a constraint. What
cannot be told from something simpler gives way to it. A capacity asked for under another SLO stays with what the sweep
recommends while that is as good within INDIFFERENCE; else the best is taken, and its capacity stated so that a stricter
SLO never gives more (`_under_another`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from batchtune.measure.statistics.quantiles import Estimate
from batchtune.recommend.prediction import gain_over
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled, is_inside, pool, run_noise
from batchtune.tune.evidence.ranking import leaders, merit, simplest_first
from batchtune.tune.evidence.rates import rungs_of
from batchtune.tune.trials.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`chosen` is to be recommended, `batched` the best with batching; both inside the space, None: none keeps the SLO.

    `pooled` are all configurations under the SLO in question, `inside` those that may be chosen, `references` those
    of them that are no batching and the server's defaults. `outside` is better than `chosen` beyond noise but lies
    outside the space. `yielded_to`: the name of the reference that is recommended because the best cannot be told from
    it, or gains too little over it for its parameters; `yielded_gain` is that gain.
    """

    pooled: Sequence[Pooled]
    inside: Sequence[Pooled]
    references: Mapping[str, Pooled]
    chosen: Pooled | None
    batched: Pooled | None
    outside: Pooled | None = None
    yielded_to: str | None = None
    yielded_gain: Estimate | None = None


def choose(trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec) -> Choice:
    """Choose from what was measured, for this SLO."""
    own = _choose(trials, scenario=scenario, slo=scenario.slo)
    if slo == scenario.slo:
        return own
    other = _choose(trials, scenario=scenario, slo=slo)
    if scenario.objective != "capacity" or other.chosen is None:
        return other
    return _under_another(own, other, trials, scenario=scenario, slo=slo)


def _choose(trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec) -> Choice:
    pooled = [_discounted(candidate) for candidate in pool(trials, scenario=scenario, slo=slo)]
    references = _references(trials, pooled)
    inside = [candidate for candidate in pooled if is_inside(candidate, scenario)]
    ranked = _ranked(inside, scenario=scenario)
    if not ranked:
        return Choice(pooled=pooled, inside=inside, references=references, chosen=None, batched=None)
    batched = next((candidate for candidate in ranked if candidate.configuration.batching is not None), None)
    chosen, name, gain = _simpler(ranked, batched, references, pooled=pooled, scenario=scenario)
    return Choice(
        pooled=pooled,
        inside=inside,
        references=references,
        chosen=chosen,
        batched=batched,
        outside=_better_outside(chosen, pooled, scenario=scenario),
        yielded_to=name,
        yielded_gain=gain,
    )


def _discounted(candidate: Pooled) -> Pooled:
    """A capacity that no fresh run confirms counts less, and is stated so: the best of many such is too good."""
    if candidate.claim is None or candidate.claim.established or not candidate.feasible:
        return candidate
    return replace(candidate, value=policy.UNCONFIRMED_SHARE * candidate.value)


def _ranked(inside: Sequence[Pooled], *, scenario: Scenario) -> list[Pooled]:
    """Of a capacity all claims count alike once discounted; else those confirmed come first."""
    if scenario.objective != "capacity":
        return leaders(inside, scenario=scenario)
    return simplest_first([candidate for candidate in inside if candidate.feasible], scenario=scenario)


def _simpler(
    ranked: Sequence[Pooled],
    batched: Pooled | None,
    references: Mapping[str, Pooled],
    *,
    pooled: Sequence[Pooled],
    scenario: Scenario,
) -> tuple[Pooled, str | None, Estimate | None]:
    """No batching, else the defaults, where the best cannot be told from them or gains too little; else the best.

    A reference that was not confirmed does not take the place of what was.
    """
    best, noise = ranked[0], run_noise(pooled, scenario=scenario)
    no_batching, defaults = references.get("no_batching"), references.get("defaults")
    if batched is not None and no_batching in ranked and no_batching is not None:
        gain = gain_over(batched, no_batching, noise=noise, scenario=scenario)
        if gain is None or is_gain(gain) or _is_weaker(no_batching, batched):
            best = batched
        else:
            return (no_batching, None, None) if best is no_batching else (no_batching, "no_batching", gain)
    if defaults is not None and defaults is not best and defaults in ranked:
        gain = gain_over(best, defaults, noise=noise, scenario=scenario)
        if gain is not None and not is_gain(gain) and not _is_weaker(defaults, best):
            return defaults, "defaults", gain
    return best, None, None


def _is_weaker(reference: Pooled, rival: Pooled) -> bool:
    return reference.confirmations == 0 and rival.confirmations > 0


def is_gain(gain: Estimate) -> bool:
    """Whether it is surely one, and worth the parameters."""
    return gain.low > 1.0 and gain.value >= 1.0 + policy.WORTH_GAIN


def is_told_apart(gain: Estimate) -> bool:
    """Whether it is surely a gain, however small, or surely a loss."""
    return gain.low > 1.0 or gain.high < 1.0


def _better_outside(chosen: Pooled, pooled: Sequence[Pooled], *, scenario: Scenario) -> Pooled | None:
    """What is better than the choice by INDIFFERENCE at least, but outside the space."""
    bar = merit(chosen.value, scenario) + policy.INDIFFERENCE
    better = [
        candidate
        for candidate in pooled
        if candidate.feasible
        and not is_inside(candidate, scenario)
        and merit(candidate.value, scenario) > bar
    ]
    return max(better, key=lambda candidate: merit(candidate.value, scenario), default=None)


def _references(trials: Sequence[Trial], pooled: Sequence[Pooled]) -> dict[str, Pooled]:
    by_configuration = {candidate.configuration: candidate for candidate in pooled}
    return {
        trial.source: by_configuration[trial.configuration]
        for trial in trials
        if trial.source in ("no_batching", "defaults") and trial.configuration in by_configuration
    }


def _under_another(
    own: Choice, other: Choice, trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec
) -> Choice:
    """The capacity for another SLO than the sweep's, such that over all SLOs a stricter one never states more.

    With v the capacity of each configuration, monotone by `claim`, M the largest and c what the sweep's own SLO gets:
    c is kept while v(c) ≥ share · M. Else M is stated, less by `share` where c was tried so high that some looser SLO
    may keep c. What the sweep's own SLO gets bounds all that is stricter.
    """
    feasible = [
        candidate for candidate in other.pooled if candidate.feasible and is_inside(candidate, scenario)
    ]
    best = max(feasible, key=lambda candidate: candidate.value)
    share = 1.0 - policy.INDIFFERENCE
    kept = None if own.chosen is None else _same(own.chosen, feasible)
    if kept is not None and kept.value >= share * best.value:
        chosen, stated_rps = kept, kept.value
    else:
        chosen, stated_rps = best, best.value
        if own.chosen is not None and _highest_tried_rps(own.chosen, trials, slo) >= share * best.value:
            stated_rps = share * best.value
    if own.chosen is not None and is_stricter(slo, scenario.slo):
        stated_rps = min(stated_rps, own.chosen.value)
    chosen = replace(chosen, value=min(stated_rps, chosen.value))
    return replace(
        other,
        chosen=chosen,
        pooled=[
            chosen if candidate.configuration == chosen.configuration else candidate
            for candidate in other.pooled
        ],
        references={
            name: chosen if candidate.configuration == chosen.configuration else candidate
            for name, candidate in other.references.items()
        },
        batched=chosen if chosen.configuration.batching is not None else other.batched,
        outside=_better_outside(chosen, other.pooled, scenario=scenario),
        yielded_to=None,
        yielded_gain=None,
    )


def is_stricter(slo: SloSpec, other: SloSpec) -> bool:
    """Whether it has every limit of the other, none of them looser, and allows no more errors."""
    mine = slo.limits()
    return slo.error_ratio <= other.error_ratio and all(
        mine.get(name, math.inf) <= limit_s for name, limit_s in other.limits().items()
    )


def _same(wanted: Pooled, among: Sequence[Pooled]) -> Pooled | None:
    return next((candidate for candidate in among if candidate.configuration == wanted.configuration), None)


def _highest_tried_rps(candidate: Pooled, trials: Sequence[Trial], slo: SloSpec) -> float:
    mine = [trial for trial in trials if trial.configuration == candidate.configuration]
    return max((rung.rate_rps for rung in rungs_of(mine, slo)), default=0.0)
