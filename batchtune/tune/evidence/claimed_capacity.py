"""Which capacity may be claimed for one configuration, given every rate that it was run at?

Fresh runs, made after the choice, decide where there are any: a rate is established when those that held at it or above
outweigh those that missed at it or below. Without such a rate the claim is what all runs together say, below what
fresh runs refuted, and it counts as unconfirmed. Either is monotone: a stricter SLO turns runs that held into runs that
missed, which takes rates from those established and moves the fit's crossing down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.tune import policy
from batchtune.tune.evidence.rates import SAME_RATE, Located, Rung, locate


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`rps` is the capacity claimed, 0 for none; `established` when fresh runs held there.

    `located` is where all runs together put the crossing. `refuted_rps` is the lowest rate at which fresh runs missed
    and were not outweighed (inf: none); `misses` are those fresh runs, `held` the run at the highest rate below that
    kept the SLO. `next_rps` is where the next fresh run belongs, 0: nowhere. `rungs`: every rate tried.
    """

    rps: float
    established: bool
    located: Located | None
    refuted_rps: float
    misses: tuple[Rung, ...]
    held: Rung | None
    next_rps: float
    rungs: tuple[Rung, ...]

    @property
    def missed_rps(self) -> float:
        """The lowest rate that is known to miss, where none is claimed; NaN where nothing was tried."""
        bound_rps = math.nan if self.located is None else self.located.bound_rps
        return min((rps for rps in (bound_rps, self.refuted_rps) if math.isfinite(rps)), default=math.nan)


def claim_of(rungs: Sequence[Rung]) -> Claim:
    """What these runs of one configuration vouch for."""
    fresh = [rung for rung in rungs if rung.fresh]
    held_fresh = [rung.rate_rps for rung in fresh if rung.held]
    established = [rps for rps in held_fresh if _for(rps, fresh) > _against(rps, fresh)]
    misses = tuple(
        rung
        for rung in fresh
        if not rung.held and _against(rung.rate_rps, fresh) >= _for(rung.rate_rps, fresh)
    )
    refuted_rps = min((rung.rate_rps for rung in misses), default=math.inf)
    located = locate(rungs)
    below = [rung for rung in rungs if rung.held and rung.rate_rps * SAME_RATE < refuted_rps]
    held = max(below, key=lambda rung: rung.rate_rps, default=None)
    ceiling_rps = refuted_rps / policy.CAPACITY_STEP
    claimed_rps = 0.0 if held is None or located is None else min(located.claim_rps, ceiling_rps)
    if established:
        claimed_rps = max(established)
    return Claim(
        rps=claimed_rps,
        established=bool(established),
        located=located,
        refuted_rps=refuted_rps,
        misses=misses,
        held=held,
        next_rps=claimed_rps or _next_rps(rungs, ceiling_rps),
        rungs=tuple(rungs),
    )


def _for(rps: float, fresh: Sequence[Rung]) -> float:
    return math.fsum(rung.weight for rung in fresh if rung.held and rung.rate_rps * SAME_RATE >= rps)


def _against(rps: float, fresh: Sequence[Rung]) -> float:
    return math.fsum(rung.weight for rung in fresh if not rung.held and rung.rate_rps <= rps * SAME_RATE)


def _next_rps(rungs: Sequence[Rung], ceiling_rps: float) -> float:
    """Where nothing lower was tried, a step below what fresh runs refuted, while the search still speaks for it."""
    searched = locate([rung for rung in rungs if not rung.fresh])
    if searched is None or not math.isfinite(ceiling_rps):
        return 0.0
    return ceiling_rps if ceiling_rps >= policy.CAPACITY_GIVEN_UP * searched.claim_rps > 0.0 else 0.0
