"""What does a capacity search ask of one trial, and what does it hear?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate, number_from_json, number_to_json
from batchtune.measure.slo import Decision, Limit, Verdict

ProbeKind = Literal["idle", "burst", "rate", "confirm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityProbe:
    """One trial that the search asks for.

    idle: `concurrency` 1, serial requests; burst: a closed loop of `concurrency`; rate: open loop at `rate_rps`,
    judged by SPRT; confirm: the same, judged strictly. `duration_s` leaves the warm-up out.
    """

    kind: ProbeKind
    duration_s: float
    seed: int
    rate_rps: float | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """What came of it: `quantile_s` is the watched quantile; `throughput_rps` matters for a burst only."""

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

    def to_dict(self) -> dict[str, Any]:
        probe, outcome = self.probe, self.outcome
        return {
            "kind": probe.kind,
            "rate_rps": probe.rate_rps,
            "concurrency": probe.concurrency,
            "duration_s": probe.duration_s,
            "seed": probe.seed,
            "verdict": outcome.verdict,
            "quantile_s": outcome.quantile_s.to_dict(),
            "requests": outcome.requests,
            "misses": outcome.misses,
            "throughput_rps": number_to_json(outcome.throughput_rps),
            "seconds": outcome.seconds,
            "design_effect": outcome.design_effect,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evidence:
        return cls(
            probe=CapacityProbe(
                **{name: values[name] for name in ("kind", "rate_rps", "concurrency", "duration_s", "seed")}
            ),
            outcome=ProbeOutcome(
                **{
                    name: values[name]
                    for name in ("verdict", "requests", "misses", "seconds", "design_effect")
                },
                quantile_s=Estimate.from_dict(values["quantile_s"]),
                throughput_rps=number_from_json(values["throughput_rps"]),
            ),
        )


def probe_outcome(
    measurement: Measurement, *, limit: Limit, seconds: float, decision: Decision = "UNSURE"
) -> ProbeOutcome:
    """What a search needs of a measurement; `decision` is that of the `SloWatch` that ended the run, if one did.

    A client or a host that spoiled the run overrules the watch, except for its PASS.
    """
    verdict: Verdict = measurement.verdict or "UNSURE"
    if decision == "PASS" or (decision == "FAIL" and verdict not in {"INVALID", "NOISY"}):
        verdict = decision
    return ProbeOutcome(
        verdict=verdict,
        quantile_s=measurement.latency_s[limit.name],
        requests=measurement.requests,
        misses=measurement.misses,
        throughput_rps=measurement.throughput_rps.value,
        seconds=seconds,
        design_effect=measurement.design_effect,
    )
