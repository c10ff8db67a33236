"""What does a search for a capacity ask of one trial, what does it hear, and what does it answer in the end?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from batchtune.measure.measurement import Measurement
from batchtune.measure.slo import Decision, Limit, Verdict
from batchtune.measure.statistics.quantiles import Estimate

ProbeKind = Literal["idle", "burst", "rate"]
CapacityLimit = Literal["slo", "client", "probe budget", "no feasible rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityProbe:
    """One trial that the search asks for.

    idle: `concurrency` 1, serial requests; burst: a closed loop of `concurrency`; rate: open loop at `rate_rps`,
    judged by SPRT. `duration_s` leaves the warm-up out.
    """

    kind: ProbeKind
    duration_s: float
    seed: int
    rate_rps: float | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """What came of it; `throughput_rps` matters for a burst only.

    `quantile_s` is the watched quantile; where other limits are missed that of the one missed by most, in proportion
    to the watched limit, and `misses` are then more than allowed.
    """

    verdict: Verdict
    quantile_s: Estimate
    requests: int
    misses: int
    throughput_rps: float
    seconds: float
    design_effect: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A line of the table behind a capacity."""

    probe: CapacityProbe
    outcome: ProbeOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The highest rate that kept the SLO (`rate_rps`: value = low) and the lowest above it that did not (high).

    `limit` names what is above: the SLO, the client, or the budget of probes; high is inf when
    nothing above was tried, and all are 0 without a feasible rate. `crossing_rps`, between low and high, is where the
    watched quantile is expected to cross its limit: promise `low`, compare configurations by `crossing_rps`.
    `saturation_rps` comes from the burst, nan without one.
    """

    rate_rps: Estimate
    limit: CapacityLimit
    crossing_rps: float
    saturation_rps: float
    evidence: tuple[Evidence, ...]

    @property
    def seconds(self) -> float:
        return math.fsum(piece.outcome.seconds for piece in self.evidence)


def probe_outcome(
    measurement: Measurement,
    *,
    limit: Limit,
    seconds: float,
    others: Sequence[Limit] = (),
    decision: Decision = "UNSURE",
) -> ProbeOutcome:
    """What a search needs of a measurement; `decision` is that of the `SloWatch` that ended the run, if one did.

    A client or a host that spoiled the run overrules the watch, except for its PASS. The watch sees `limit` alone: a
    rate at which one of the `others` is missed, as far as was seen, does not hold.
    """
    verdict: Verdict = measurement.verdict or "UNSURE"
    if decision == "PASS" or (decision == "FAIL" and verdict not in {"INVALID", "NOISY"}):
        verdict = decision
    quantile_s = measurement.latency_s[limit.name]
    worst = max(others, key=lambda other: _over(measurement, other), default=limit)
    if _over(measurement, worst) > max(1.0, _over(measurement, limit)):
        missed_s, share = measurement.latency_s[worst.name], limit.seconds / worst.seconds
        quantile_s = Estimate(
            value=missed_s.value * share, low=missed_s.low * share, high=missed_s.high * share
        )
    misses = measurement.misses
    if any(_over(measurement, other) > 1.0 for other in others):
        misses = max(misses, math.floor(limit.allowed_miss_ratio * measurement.requests) + 1)
        if verdict == "PASS":
            verdict = "FAIL" if measurement.verdict == "FAIL" else "UNSURE"
    return ProbeOutcome(
        verdict=verdict,
        quantile_s=quantile_s,
        requests=measurement.requests,
        misses=misses,
        throughput_rps=measurement.throughput_rps.value,
        seconds=seconds,
        design_effect=measurement.design_effect,
    )


def _over(measurement: Measurement, limit: Limit) -> float:
    """How many times its limit a quantile is; 0 where there is none."""
    value_s = measurement.latency_s[limit.name].value
    return 0.0 if math.isnan(value_s) else value_s / limit.seconds
