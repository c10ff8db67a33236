"""What does the throughput × interval rule answer?

Published with Cortex's server-side batching: measure the throughput X without batching, choose the largest interval
I that the application accepts, set `max_batch_size = X·I` and the batch timeout to I. X counts rows, not requests.

The interval is what the SLO leaves. A request waits at most I for its batch to close; then the batch is executed,
which for X·I rows takes at worst (no economy of scale at all) X·I/X = I; and everything around the model costs the
latency L of a lone request. So 2·I + L ≤ SLO, and

    I = (SLO − L) / 2        max_batch_size = round(X·I)        batch_timeout_micros = I

The same 2·τ(b) ≤ SLO is Nexus's rule (Shen et al., SOSP 2019). Without an SLO on latency, I = L: batching may then
double the latency of a lone request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchtune.scenario.units import rounded, rounded_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleAnswer:
    """The rule's own answer, not clamped to any search space. `interval_s` 0: the SLO leaves nothing to wait for."""

    rows_per_s: float
    lone_latency_s: float
    slo_s: float | None
    interval_s: float
    max_batch_size: int
    batch_timeout_micros: int

    @property
    def point(self) -> dict[str, Any]:
        return {"max_batch_size": self.max_batch_size, "batch_timeout_micros": self.batch_timeout_micros}

    def explain(self) -> str:
        """The arithmetic in one line."""
        shown = rounded_duration(self.interval_s)
        if self.slo_s is None:
            interval = f"interval {shown} (no SLO: the latency of a lone request)"
        elif self.interval_s > 0:
            slo, lone = rounded_duration(self.slo_s), rounded_duration(self.lone_latency_s)
            interval = f"interval ({slo} - {lone}) / 2 = {shown}"
        else:
            interval = (
                f"a lone request takes {rounded_duration(self.lone_latency_s)} of the "
                f"{rounded_duration(self.slo_s)} allowed: no interval is left"
            )
        return f"X = {rounded(self.rows_per_s)} rows/s one by one, {interval}: X·interval = {self.max_batch_size}"


def throughput_interval_rule(
    *, rows_per_s: float, lone_latency_s: float, limits: Mapping[str, float], rows_per_request: int
) -> RuleAnswer:
    """Apply the rule to X and L; `limits` are the SLO's quantile limits in seconds, of which p95 is used if given.

    Without a limit on p95 the tightest one is used. max_batch_size is at least one request's rows: a smaller one
    would refuse every request.
    """
    slo_s = limits.get("p95", min(limits.values(), default=None))
    interval_s = lone_latency_s if slo_s is None else max(0.0, (slo_s - lone_latency_s) / 2.0)
    return RuleAnswer(
        rows_per_s=rows_per_s,
        lone_latency_s=lone_latency_s,
        slo_s=slo_s,
        interval_s=interval_s,
        max_batch_size=max(round(rows_per_s * interval_s), rows_per_request),
        batch_timeout_micros=round(interval_s * 1e6),
    )
