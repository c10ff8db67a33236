"""A load test of the file that a sweep recommends, beside what the sweep states."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.commands import batchtune


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """One fresh load test of what was recommended.

    `spoilt_by`: "client" or "host" where the figures are not the server's; a load that failed has no answers.
    """

    throughput_rps: float
    p95_s: float
    error_ratio: float
    spoilt_by: str | None

    def inside(self, document: Mapping[str, Any]) -> bool:
        """Whether both figures lie within the intervals that the recommendation states."""
        stated = (
            (self.throughput_rps, document["throughput_rps"]),
            (self.p95_s, document["latency_s"]["p95"]),
        )
        return all(float(one["low"]) <= value <= float(one["high"]) for value, one in stated)


def fresh_load(
    scenario: Path, document: Mapping[str, Any], *words: str, cwd: Path, seed: int, within_s: float = 600.0
) -> Fresh:
    """One `batchtune load` of what the sweep in this folder recommended, with a server of its own."""
    parameters = Path(document["run"]) / "batching_parameters.txt"
    batched = document["configuration"]["batching"] is not None
    mode = ["--batching-parameters-file", parameters] if batched else ["--no-batching"]
    load = ["load", scenario, "--quiet", *mode, "--set", f"load.seed={seed}", *words]
    ended = batchtune(*load, cwd=cwd, within_s=within_s)
    points = ended.document.get("points")
    if not points or points[0]["measurement"] is None:
        print(f"  fresh load failed: {ended.errors.strip()[-500:]}", file=sys.stderr)
        return Fresh(throughput_rps=0.0, p95_s=math.inf, error_ratio=1.0, spoilt_by=None)
    measured = points[0]["measurement"]
    return Fresh(
        throughput_rps=float(measured["throughput_rps"]["value"]),
        p95_s=float(measured["latency_s"]["p95"]["value"]),
        error_ratio=float(measured["error_ratio"]),
        spoilt_by=points[0].get("spoilt_by"),
    )
