"""Which configurations deserve a fresh run in the next block of confirmations?

A block runs each arm once, side by side, under one seed and on one node; several nodes run a block each at once. The
leader and the best configuration with batching are run until their spread is known; a rival that is too close to call,
or ahead in everything, runs beside them; then the reference points, until the gain over them is known well enough,
which is once where they are far behind.
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
from batchtune.tune.strategies.side_by_side import blocks_at_once, together
from batchtune.tune.trials.trial import Ask


def confirmations(outlook: Outlook) -> Strategy:
    """Blocks of fresh runs, each arm once a block, until what would be recommended has been confirmed."""
    scenario = outlook.scenario
    searched = max((trial.block or 0 for trial in outlook.trials if trial.source != "confirm"), default=0)
    at_once = blocks_at_once(outlook)
    for first in range(1 + searched, 1 + searched + policy.CONFIRMATION_BLOCKS_MAX, at_once):
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
        claims = {candidate.configuration: candidate.value for candidate in hopeful(pooled)}
        asks = []
        for block in range(first, first + at_once):
            # Turns rotate; in the first block, and when time is short, what is to be recommended goes first.
            turn = block - searched - 1
            shift = turn % len(arms) if runs_affordable >= len(arms) else 0
            asks += [
                Ask(
                    configuration=configuration,
                    source="confirm",
                    reason=f"fresh run, block {block - searched}",
                    block=block,
                    rate_rps=claims[configuration] if scenario.objective == "capacity" else None,
                    node=outlook.nodes[turn % len(outlook.nodes)] if outlook.nodes else None,
                )
                for configuration in [*arms[shift:], *arms[:shift]]
            ]
        yield from together(outlook, asks)


def hopeful(pooled: Sequence[Pooled]) -> list[Pooled]:
    """The same, but of a capacity that fresh runs refuted the next lower rate to be tried counts as claimed."""
    hopes = []
    for candidate in pooled:
        hope = candidate
        if candidate.claim is not None and candidate.claim.next_rps > candidate.claim.rps:
            kept = {name: min(missed, 0.0) for name, missed in candidate.constraints.items()}
            hope = replace(candidate, value=candidate.claim.next_rps, constraints=kept)
        hopes.append(hope)
    return hopes


def references_to_confirm(outlook: Outlook) -> list[Configuration]:
    """The reference points for which time is set aside; none for a capacity, where few need a fresh run."""
    return [] if outlook.scenario.objective == "capacity" else _references(outlook)


def _references(outlook: Outlook) -> list[Configuration]:
    """The reference points that work."""
    references = {
        trial.source: trial.configuration
        for trial in outlook.trials
        if trial.source in ("no_batching", "defaults") and trial.state == "complete"
    }
    return [references[source] for source in ("no_batching", "defaults") if source in references]


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
    inside = [candidate for candidate in pooled if is_inside(candidate, scenario)]
    ranked = leaders(inside, scenario=scenario)
    batched = [candidate for candidate in ranked if candidate.configuration.batching is not None]
    claims = list({candidate.configuration: candidate for candidate in (*ranked[:1], *batched[:1])}.values())
    others = [
        candidate
        for candidate in ranked
        if candidate not in claims and candidate.configuration not in references
    ]
    if all(candidate.confirmations >= _wanted(candidate, pooled, scenario=scenario) for candidate in claims):
        ahead = [candidate for candidate in others if _is_ahead(candidate, claims, pooled, scenario=scenario)]
        return (
            [candidate.configuration for candidate in (*claims[:1], *ahead[:1])]
            if ahead and runs_affordable >= 2
            else []
        )
    compared = [
        candidate
        for candidate in pooled
        if candidate.configuration in references
        and candidate not in claims
        and (scenario.objective != "capacity" or _may_win(candidate, claims[-1], pooled, scenario=scenario))
        and _gain_is_open(candidate, claims[-1], pooled=pooled, scenario=scenario)
    ]
    lacking = sum(max(policy.CONFIRMATIONS - candidate.confirmations, 0) for candidate in claims)
    if scenario.objective == "capacity" and runs_affordable < lacking + len(compared):
        compared = []  # the claim first: without its fresh runs nothing is established
    close = sorted(
        (candidate for candidate in others if _may_win(candidate, claims[-1], pooled, scenario=scenario)),
        key=lambda candidate: merit(candidate.value, scenario),
        reverse=True,
    )
    # A rival once begun stays while it may still win: leaders that take turns would else never finish.
    rivals = [candidate for candidate in close if candidate.confirmations or _refuted(candidate)]
    if not rivals and runs_affordable >= policy.CONFIRMATIONS * (len(claims) + 1) + len(compared) - 1:
        rivals = close[:1]
    return [candidate.configuration for candidate in (*claims, *rivals, *compared)]


def _may_win(candidate: Pooled, leader: Pooled, pooled: Sequence[Pooled], *, scenario: Scenario) -> bool:
    """Whether it is ahead of the leader, like with like, or too close to call; after a miss, whether its next lower
    claim is still ahead."""
    if _refuted(candidate):
        return merit(candidate.value, scenario) > merit(leader.value, scenario)
    if candidate.feasible and merit(candidate.search_value, scenario) > merit(leader.search_value, scenario):
        return True
    return indistinct(leader, candidate, pooled=pooled, scenario=scenario)


def _is_ahead(
    candidate: Pooled, claims: Sequence[Pooled], pooled: Sequence[Pooled], *, scenario: Scenario
) -> bool:
    """Whether the search alone puts it ahead of what is confirmed, beyond noise, and no fresh run was made of it."""
    bar = merit(claims[0].search_value, scenario)
    apart = not indistinct(claims[0], candidate, pooled=pooled, scenario=scenario)
    return (
        candidate.confirmations == 0
        and not _refuted(candidate)
        and apart
        and merit(candidate.search_value, scenario) > bar
    )


def _refuted(candidate: Pooled) -> bool:
    return candidate.claim is not None and not candidate.claim.established and bool(candidate.claim.misses)


def _wanted(candidate: Pooled, pooled: Sequence[Pooled], *, scenario: Scenario) -> int:
    if candidate.confirmations < policy.CONFIRMATIONS:
        return policy.CONFIRMATIONS
    noises = (run_noise([candidate], scenario=scenario), run_noise(pooled, scenario=scenario))
    widest = max(noise.half_width(candidate.confirmations) for noise in noises)
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
