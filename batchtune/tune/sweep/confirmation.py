"""Which configurations deserve a fresh run in the next block of confirmations?

A block runs each arm once, side by side and under one seed. The leader and the best configuration with batching are
run until their spread is known; a rival that is too close to call, or ahead in everything, runs beside them; then the
reference points, until the gain over them is known well enough, which is once where they are far behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled, is_inside, pool, run_noise
from batchtune.tune.evidence.ranking import indistinct, leaders, merit
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.trials.ask import Ask


def confirmations(outlook: Outlook) -> Strategy:
    """Blocks of fresh runs, each arm once a block, until what would be recommended has been confirmed."""
    scenario = outlook.scenario
    searched = max((one.block or 0 for one in outlook.trials if one.source != "confirm"), default=0)
    for block in range(1 + searched, 1 + searched + policy.CONFIRMATION_BLOCKS_MAX):
        pooled = pool(outlook.trials, scenario=scenario)
        runs_affordable = outlook.left_s() / outlook.fresh_run_s()
        arms = confirmation_arms(
            pooled,
            scenario=scenario,
            references=_references(outlook),
            runs_affordable=runs_affordable,
        )
        if not arms:
            return
        claims = {one.configuration: one.value for one in hopeful(pooled)}
        # Turns rotate; in the first block, and when time is short, what is to be recommended goes first.
        turn = block - searched - 1
        shift = turn % len(arms) if runs_affordable >= len(arms) else 0
        for configuration in [*arms[shift:], *arms[:shift]]:
            yield Ask(
                configuration=configuration,
                source="confirm",
                reason=f"fresh run, block {block - searched}",
                block=block,
                rate_rps=claims[configuration] if scenario.objective == "capacity" else None,
            )


def hopeful(pooled: Sequence[Pooled]) -> list[Pooled]:
    """The same, but of a capacity that fresh runs refuted the next lower rate to be tried counts as claimed."""
    hopes = []
    for one in pooled:
        hope = one
        if one.claim is not None and one.claim.next_rps > one.claim.rps:
            kept = {name: min(missed, 0.0) for name, missed in one.constraints.items()}
            hope = replace(one, value=one.claim.next_rps, constraints=kept)
        hopes.append(hope)
    return hopes


def references_to_confirm(outlook: Outlook) -> list[Configuration]:
    """The reference points for which time is set aside; none for a capacity, where few need a fresh run."""
    return [] if outlook.scenario.objective == "capacity" else _references(outlook)


def _references(outlook: Outlook) -> list[Configuration]:
    """The reference points that work."""
    found = {
        one.source: one.configuration
        for one in outlook.trials
        if one.source in ("no_batching", "defaults") and one.state == "complete"
    }
    return [found[source] for source in ("no_batching", "defaults") if source in found]


def confirmation_arms(
    pooled: Sequence[Pooled],
    *,
    scenario: Scenario,
    references: Sequence[Configuration],
    runs_affordable: float,
) -> list[Configuration]:
    """The arms of the next block; none when what would be recommended is confirmed.

    `runs_affordable` is how many trials there is time for: a new rival needs room for all its blocks.
    """
    pooled = hopeful(pooled)
    inside = [one for one in pooled if is_inside(one, scenario)]
    ranked = leaders(inside, scenario=scenario)
    batched = [one for one in ranked if one.configuration.batching is not None]
    claims = list({one.configuration: one for one in (*ranked[:1], *batched[:1])}.values())
    others = [one for one in ranked if one not in claims and one.configuration not in references]
    if all(one.confirmations >= _wanted(one, pooled, scenario=scenario) for one in claims):
        ahead = [one for one in others if _is_ahead(one, claims, pooled, scenario=scenario)]
        return (
            [one.configuration for one in (*claims[:1], *ahead[:1])] if ahead and runs_affordable >= 2 else []
        )
    compared = [
        one
        for one in pooled
        if one.configuration in references
        and one not in claims
        and (scenario.objective != "capacity" or _may_win(one, claims[-1], pooled, scenario=scenario))
        and _gain_is_open(one, claims[-1], pooled=pooled, scenario=scenario)
    ]
    lacking = sum(max(policy.CONFIRMATIONS - one.confirmations, 0) for one in claims)
    if scenario.objective == "capacity" and runs_affordable < lacking + len(compared):
        compared = []  # the claim first: without its fresh runs nothing is established
    close = sorted(
        (one for one in others if _may_win(one, claims[-1], pooled, scenario=scenario)),
        key=lambda one: merit(one.value, scenario),
        reverse=True,
    )
    # A rival once begun stays while it may still win: leaders that take turns would else never finish.
    rivals = [one for one in close if one.confirmations or _refuted(one)]
    if not rivals and runs_affordable >= policy.CONFIRMATIONS * (len(claims) + 1) + len(compared) - 1:
        rivals = close[:1]
    return [one.configuration for one in (*claims, *rivals, *compared)]


def _may_win(one: Pooled, leader: Pooled, pooled: Sequence[Pooled], *, scenario: Scenario) -> bool:
    """Whether it is ahead of the leader, like with like, or too close to call; after a miss, whether its next lower
    claim is still ahead."""
    if _refuted(one):
        return merit(one.value, scenario) > merit(leader.value, scenario)
    if one.feasible and merit(one.search_value, scenario) > merit(leader.search_value, scenario):
        return True
    return indistinct(leader, one, pooled=pooled, scenario=scenario)


def _is_ahead(one: Pooled, claims: Sequence[Pooled], pooled: Sequence[Pooled], *, scenario: Scenario) -> bool:
    """Whether the search alone puts it ahead of what is confirmed, beyond noise, and no fresh run was made of it."""
    bar = merit(claims[0].search_value, scenario)
    apart = not indistinct(claims[0], one, pooled=pooled, scenario=scenario)
    return one.confirmations == 0 and not _refuted(one) and apart and merit(one.search_value, scenario) > bar


def _refuted(one: Pooled) -> bool:
    return one.claim is not None and not one.claim.established and bool(one.claim.misses)


def _wanted(one: Pooled, pooled: Sequence[Pooled], *, scenario: Scenario) -> int:
    if one.confirmations < policy.CONFIRMATIONS:
        return policy.CONFIRMATIONS
    noises = (run_noise([one], scenario=scenario), run_noise(pooled, scenario=scenario))
    widest = max(noise.half_width(one.confirmations) for noise in noises)
    return policy.CONFIRMATIONS_MAX if widest > policy.WIDE else policy.CONFIRMATIONS


def _gain_is_open(reference: Pooled, leader: Pooled, *, pooled: Sequence[Pooled], scenario: Scenario) -> bool:
    if reference.failures or reference.confirmations >= policy.CONFIRMATIONS:
        return False
    if not reference.confirmations:
        return True
    gap = abs(merit(reference.value, scenario) - merit(leader.value, scenario))
    noise = run_noise(pooled, scenario=scenario)
    half_width = 2.0 * math.sqrt(2.0 / reference.confirmations) * noise.sd
    return half_width > min(policy.GAIN_HALF_WIDTH, 0.5 * gap)
