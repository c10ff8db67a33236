"""What do runs at several rates say of the highest rate that one configuration can take?

A search for a capacity and a race leave behind rates at which the watched quantile was measured. The quantile grows
with the rate, so an increasing fit through its margins to the limit crosses zero at the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from batchtune.measure.isotonic import isotonic_root
from batchtune.measure.slo import Limit, primary_limit
from batchtune.scenario.spec import SloSpec
from batchtune.tune import policy
from batchtune.tune.trial import Trial, is_feasible, violations


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One rate that was tried: the logarithm of quantile over limit (cut at MOST_MARGIN), at most 0 when kept.

    `answered_rps` is what the server answered at that rate, where it is known.
    """

    rate_rps: float
    margin: float
    answered_rps: float | None = None

    @property
    def held(self) -> bool:
        return self.margin <= 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where the capacity lies: the highest rate held (0: none), where the limit is expected to be crossed, and the
    standard deviation of the logarithm of that.

    `says`: what the crossing is worth: "about" it; "at least" `bound_rps`, the highest rate held, easily and nothing
    missed; "at most" that, the lowest rate missed, by far and nothing held.
    """

    held_rps: float
    crossing_rps: float
    sd: float
    says: Literal["about", "at least", "at most"] = "about"
    bound_rps: float = math.nan
    bracketed: bool

    @property
    def claim_rps(self) -> float:
        """A rate that a fresh run should keep; the highest held where none was missed; 0 where none was held."""
        if self.held_rps <= 0.0 or not self.bracketed:
            return self.held_rps
        return policy.CLAIM_BELOW_CROSSING * self.crossing_rps


def rungs_of(trials: Iterable[Trial], slo: SloSpec) -> list[Rung]:
    """Every rate that these trials tried, judged by this SLO; none when it has no latency limit."""
    limit = primary_limit(slo)
    if limit is None:
        return []
    found = []
    for trial in trials:
        for probe in trial.probes:
            missed = _missed(probe.latency_s, probe.error_ratio, slo)
            found.append(Rung(rate_rps=probe.rate_rps, margin=_margin(probe.latency_s, limit, missed=missed)))
        if not trial.probes and trial.asked_rate_rps is not None and trial.measurement is not None:
            latency_s = {name: one.value for name, one in trial.measurement.latency_s.items()}
            missed = _missed(latency_s, trial.measurement.error_ratio, slo)
            found.append(Rung(rate_rps=trial.asked_rate_rps, margin=_margin(latency_s, limit, missed=missed)))
    return found


def locate(rungs: Sequence[Rung]) -> Located | None:
    """Where the capacity lies by an increasing fit through the margins; None without a rate."""
    if not rungs:
        return None
    held = [one for one in rungs if one.held]
    missed = [one for one in rungs if not one.held]
    if not missed:
        top = max(held, key=lambda one: one.rate_rps)
        ahead = min(policy.RATE_ELASTICITY * -top.margin, 0.1)
        return Located(
            held_rps=top.rate_rps,
            crossing_rps=top.rate_rps * math.exp(ahead),
            sd=0.03 + ahead,
            says="about" if -top.margin <= policy.NEAR_MARGIN else "at least",
            bound_rps=top.rate_rps,
            bracketed=False,
        )
    if not held:
        bottom = min(missed, key=lambda one: one.rate_rps)
        behind = min(policy.RATE_ELASTICITY * bottom.margin, 0.4)
        crossing, sd = bottom.rate_rps * math.exp(-behind), 0.03 + behind
        says: Literal["about", "at most"] = "about" if bottom.margin <= policy.NEAR_MARGIN else "at most"
        if (
            bottom.margin >= policy.MOST_MARGIN and bottom.answered_rps
        ):  # what an overwhelmed server answers is its most
            crossing = min(policy.OF_SATURATION * bottom.answered_rps, bottom.rate_rps)
            sd, says = 0.04, "about"
        return Located(
            held_rps=0.0,
            crossing_rps=crossing,
            sd=sd,
            says=says,
            bound_rps=bottom.rate_rps,
            bracketed=False,
        )
    return _between(rungs, held, missed)


def _between(rungs: Sequence[Rung], held: Sequence[Rung], missed: Sequence[Rung]) -> Located:
    low, high = max(one.rate_rps for one in held), min(one.rate_rps for one in missed)
    points = [(math.log(one.rate_rps), one.margin, 1.0) for one in rungs]
    crossing = math.exp(isotonic_root(points, default=0.5 * math.log(low * high)))
    # Rates in between that were held and missed are noise, and widen what is unsure.
    width = math.log(high / low) if low < high else math.log(low / high) + 2.0 * policy.CROSSING_LEAST_SD
    kept = [one.rate_rps for one in held if one.rate_rps <= crossing * (1.0 + 1e-9)]
    return Located(
        held_rps=max(kept, default=min(one.rate_rps for one in held)),
        crossing_rps=crossing,
        sd=max(policy.CROSSING_LEAST_SD, 0.25 * width),
        bracketed=True,
    )


def _missed(latency_s: Mapping[str, float], error_ratio: float, slo: SloSpec) -> bool:
    found = violations(latency_s, error_ratio, limits=slo.limits(), error_limit=slo.error_ratio)
    return not is_feasible(found)


def _margin(latency_s: Mapping[str, float], limit: Limit, *, missed: bool) -> float:
    """Another limit that is missed, or errors, count as a small miss at least."""
    value = latency_s.get(limit.name, math.nan)
    margin = policy.MOST_MARGIN
    if math.isfinite(value) and value > 0.0:
        margin = min(max(math.log(value / limit.seconds), -policy.MOST_MARGIN), policy.MOST_MARGIN)
    return max(margin, 0.01) if missed else margin
