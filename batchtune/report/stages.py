"""How much of the time does the device part of a model run, batched alone or as a unit with the stages around it?"""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.scenario.units import percentage
from batchtune.tune.compare.variant import VariantFigures


def stage_lines(variants: Sequence[VariantFigures]) -> list[str]:
    """A line where variants say what is batched (`--batching_stage`), else none."""
    if not any("batching_stage" in dict(variant.configuration.flags) for variant in variants):
        return []
    shares = [
        f"{variant.name} {percentage(min(variant.device_busy_ratio, 1.0))}"
        for variant in variants
        if variant.device_busy_ratio is not None
    ]
    return [f"The device part of the model runs, of the time: {', '.join(shares)}."] if shares else []
