"""Which changes for the worse does `batchtune check` guard against?"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from batchtune.scenario.spec.section import Spec
from batchtune.scenario.units import Ratio, problem

Metric = Literal[
    "throughput",
    "capacity",
    "p50",
    "p95",
    "p99",
    "errors",
    "cpu",
    "gpu",
    "memory",
    "gpu_memory",
    "startup",
]
"""Requests/s, the highest rate within the SLO, latency quantiles in seconds, the share of failed requests, seconds of
the server's CPUs or of its GPU for each request, the most bytes of memory that it held, those of its GPU, and seconds
from its launch until the model is AVAILABLE."""

METRICS: Final[tuple[Metric, ...]] = get_args(Metric)

CHECK_BLOCKS_MAX: Final = 36
CHECK_BLOCKS_MOST: Final = 200
"""The most that a scenario or --blocks may ask for; without either it is CHECK_BLOCKS_MAX."""


def _known(given: object) -> object:
    for name in given if isinstance(given, dict) else ():
        if name not in METRICS:
            raise problem("unknown figure", at=(name,), hint=f"figures: {', '.join(METRICS)}")
    return given


def _telling(margins: dict[str, float]) -> dict[str, float]:
    for name, margin in margins.items():
        if not 0.0 < margin < 1.0:
            raise problem("a margin lies above 0 and below 100%", at=(name,), hint=f"write {name}: 5%")
    return margins


_MARGIN_SCHEMA: Final[dict[str, Any]] = {"type": ["number", "string"], "pattern": r"^[0-9.]+ ?%?$"}
Margins = Annotated[
    dict[str, Ratio],
    BeforeValidator(_known),
    AfterValidator(_telling),
    WithJsonSchema(
        {
            "type": "object",
            "properties": dict.fromkeys(METRICS, _MARGIN_SCHEMA),
            "additionalProperties": False,
            "examples": [{"throughput": "3%", "p95": "5%"}],
        }
    ),
]


class CheckSpec(Spec):
    """The gates of `batchtune check`."""

    gates: Margins = Field(
        default_factory=dict,
        description="from which change for the worse on a figure fails the check; absent: those of the objective",
    )
    blocks: Annotated[int, Field(ge=6, le=CHECK_BLOCKS_MOST, strict=True)] = Field(
        default=CHECK_BLOCKS_MAX,
        description="most runs of each side, without the confirmation; it ends sooner once it is clear",
    )
