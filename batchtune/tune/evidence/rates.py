"""What do runs at several rates say of the highest rate that one configuration can take?

Each run at a rate leaves a margin: the logarithm of a quantile over its limit. Quantiles grow with the rate, so an
increasing fit through the margins crosses zero at the capacity. A stricter limit raises every margin, so it raises the
fit and moves the crossing down: a capacity is monotone in the SLO.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from batchtune.measure.statistics.isotonic import increasing_fit, isotonic_root
from batchtune.scenario.spec.slo import SloSpec
from batchtune.tune import policy
from batchtune.tune.trials.ledger import is_spoilt
from batchtune.tune.trials.trial import Trial, violations

SAME_RATE = 1.0 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One rate that was tried: the logarithm of quantile over limit (cut at MOST_MARGIN), at most 0 when kept.

    `weight` grows with the independent requests behind it and is 1 at most, as it is for a `fresh` run, made after the
    choice. `trial` is the number of the trial that tried it; `p95_s` what it measured, NaN for none.
    """

    rate_rps: float
    margin: float
    weight: float = 1.0
    fresh: bool = False
    trial: int = 0
    p95_s: float = math.nan

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
    """Every rate that these trials tried, judged by all limits of this SLO; none when it has no latency limit."""
    if not slo.limits():
        return []
    rungs = []
    for trial in trials:
        rungs += [
            Rung(
                rate_rps=probe.rate_rps / _speed(trial),
                margin=_margin(probe.latency_s, probe.error_ratio, slo),
                weight=policy.PROBE_WEIGHT,
                trial=trial.number,
                p95_s=probe.latency_s.get("p95", math.nan),
            )
            for probe in trial.probes
        ]
        rate_rps = asked_rps(trial)
        if not trial.probes and rate_rps is not None and trial.measurement is not None:
            latency_s = {name: quantile.value for name, quantile in trial.measurement.latency_s.items()}
            rungs.append(
                Rung(
                    rate_rps=rate_rps / _speed(trial),
                    margin=_margin(latency_s, trial.measurement.error_ratio, slo),
                    weight=_weight(trial),
                    fresh=trial.source == "confirm",
                    trial=trial.number,
                    p95_s=latency_s.get("p95", math.nan),
                )
            )
    return rungs


def _speed(trial: Trial) -> float:
    """A slow node is as busy at a lower rate; fresh runs state what was offered."""
    return 1.0 if trial.source == "confirm" else trial.node_speed


def asked_rps(trial: Trial) -> float | None:
    """The one rate that a trial was to offer; None for a search over rates and for a closed loop."""
    if trial.probes or trial.asked_rate_rps is not None:
        return trial.asked_rate_rps
    return trial.rate_rps if trial.source == "confirm" else None


def locate(rungs: Sequence[Rung]) -> Located | None:
    """Where the capacity lies by an increasing fit through the margins; None without a rate."""
    if not rungs:
        return None
    points = [(math.log(rung.rate_rps), rung.margin, rung.weight) for rung in rungs]
    fit = increasing_fit(points)
    rates = [rung.rate_rps for rung in rungs]
    if fit[0][1] > 0.0:
        return _below(min(rates), fit[0][1])
    if fit[-1][1] <= 0.0:
        return _above(max(rates), fit[-1][1])
    return _between(rungs, math.exp(isotonic_root(points, default=fit[0][0])))


def _above(tried_rps: float, margin: float) -> Located:
    ahead = min(policy.RATE_ELASTICITY * -margin, policy.CROSSING_AHEAD_MAX)
    return Located(
        held_rps=tried_rps,
        crossing_rps=tried_rps * math.exp(ahead),
        sd=policy.CROSSING_ONE_SIDED_SD + ahead,
        says="about" if -margin <= policy.NEAR_MARGIN else "at least",
        bound_rps=tried_rps,
        bracketed=False,
    )


def _below(tried_rps: float, margin: float) -> Located:
    behind = min(policy.RATE_ELASTICITY * margin, policy.CROSSING_BELOW_MAX)
    return Located(
        held_rps=0.0,
        crossing_rps=tried_rps * math.exp(-behind),
        sd=policy.CROSSING_ONE_SIDED_SD + behind,
        says="about" if margin <= policy.NEAR_MARGIN else "at most",
        bound_rps=tried_rps,
        bracketed=False,
    )


def _between(rungs: Sequence[Rung], crossing_rps: float) -> Located:
    low = max(rung.rate_rps for rung in rungs if rung.held)
    high = min(rung.rate_rps for rung in rungs if not rung.held)
    # Rates in between that were held and missed are noise, and widen what is unsure.
    width = math.log(high / low) if low < high else math.log(low / high) + 2.0 * policy.CROSSING_LEAST_SD
    return Located(
        held_rps=max(
            rung.rate_rps for rung in rungs if rung.held and rung.rate_rps <= crossing_rps * SAME_RATE
        ),
        crossing_rps=crossing_rps,
        sd=max(policy.CROSSING_LEAST_SD, policy.CROSSING_BRACKET_SHARE * width),
        bracketed=True,
    )


def _weight(trial: Trial) -> float:
    """Independent requests over themselves and WEIGHT_HALF_REQUESTS; whatever the limit, or the fit is not monotone."""
    measured = trial.measurement
    if measured is None:
        return 0.0
    independent = measured.requests / measured.design_effect
    weight = independent / (independent + policy.WEIGHT_HALF_REQUESTS)
    if trial.source == "confirm":
        weight = 1.0
    return max(weight, policy.WEIGHT_LEAST) * (policy.SPOILT_WEIGHT if is_spoilt(trial) else 1.0)


def _margin(latency_s: Mapping[str, float], error_ratio: float, slo: SloSpec) -> float:
    """The worst of all limits; requests that fail beyond what may count as a miss."""
    missed = violations(latency_s, error_ratio, limits=slo.limits(), error_limit=slo.error_ratio)["errors"]
    margins = [_over(latency_s.get(name, math.nan), limit_s) for name, limit_s in slo.limits().items()]
    if missed > 0.0:
        margins.append(min(max(math.log1p(missed), policy.ERRORS_LEAST_MARGIN), policy.MOST_MARGIN))
    return max(margins)


def _over(value_s: float, limit_s: float) -> float:
    if not (math.isfinite(value_s) and value_s > 0.0):
        return policy.MOST_MARGIN
    return min(max(math.log(value_s / limit_s), -policy.MOST_MARGIN), policy.MOST_MARGIN)
