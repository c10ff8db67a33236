"""The changes for the worse that `batchtune check` guards against, as a scenario sets them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from batchtune.scenario.spec.section import PositiveSeconds, Ratio, Spec, problem
from batchtune.units import percentage, rounded_duration


def limit_words(name: str, limit: float) -> str:
    """Write a limit of an SLO as text, such as `p95 ≤ 20 ms` or `goodput ≥ 95 %`.

    `limit`: seconds for a latency; for goodput and errors the share of requests, 0 to 1, that may miss the limits, or
    fail.
    """
    return f"{name} {'≥' if name == 'goodput' else '≤'} {value_words(name, limit)}"


def value_words(name: str, value: float) -> str:
    """Write a figure that an SLO limits as text, such as `20 ms` or, for goodput, `95 %`.

    `value`: seconds for a latency; for goodput the share of requests, 0 to 1, that misses the limits; for errors the
    share that fails.
    """
    if name == "errors":
        return percentage(value)
    return percentage(1.0 - value) if name == "goodput" else rounded_duration(value)


class SloSpec(Spec):
    """Limits on latency, counted from when a request was due, and on the share of failed requests."""

    p50_s: PositiveSeconds | None = Field(default=None, alias="p50", description="limit of the median")
    p90_s: PositiveSeconds | None = Field(
        default=None, alias="p90", description="9 of 10 requests within this"
    )
    p95_s: PositiveSeconds | None = Field(
        default=None, alias="p95", description="19 of 20 requests within this"
    )
    p99_s: PositiveSeconds | None = Field(
        default=None, alias="p99", description="99 of 100 requests within this"
    )
    p99_9_s: PositiveSeconds | None = Field(
        default=None, alias="p99.9", description="999 of 1000 within this"
    )
    ttft_p95_s: PositiveSeconds | None = Field(
        default=None,
        alias="ttft_p95",
        description="of streamed answers: time to the first token, 19 of 20 requests",
    )
    ttft_p99_s: PositiveSeconds | None = Field(default=None, alias="ttft_p99")
    itl_p95_s: PositiveSeconds | None = Field(
        default=None,
        alias="itl_p95",
        description="of streamed answers: 19 of 20 gaps between tokens within this",
    )
    itl_p99_s: PositiveSeconds | None = Field(default=None, alias="itl_p99", description="99 of 100 gaps")
    goodput: Annotated[Ratio, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="share of requests that meet every limit here, each by its own latency, first token, and 99 of "
        "100 of its own gaps",
    )
    error_ratio: Ratio = Field(default=0.01, alias="errors", description="most requests that may fail")

    def limits(self) -> dict[str, float]:
        """Return every limit that is set, by its YAML key: latencies, first tokens and gaps in seconds;
        `goodput` as the share that may miss."""
        fields = type(self).model_fields.items()
        limits = {field.alias: getattr(self, name) for name, field in fields if name.endswith("_s")}
        limits["goodput"] = None if self.goodput is None else round(1.0 - self.goodput, 12)
        return {str(name): limit for name, limit in limits.items() if limit is not None}

    def stream_limits(self) -> dict[str, float]:
        """Return the limits of first tokens and gaps that are set, by name, in seconds."""
        return {name: limit for name, limit in self.limits().items() if name.startswith(("ttft_", "itl_"))}

    def patience_s(self, *, streams: bool) -> float | None:
        """Return the largest limit, in seconds, on whole answers, with `streams` also on first tokens; None: no such
        limit."""
        first = (self.ttft_p95_s, self.ttft_p99_s)
        limits = [limit for limit in first if limit is not None] if streams else []
        return max([*limits, *self.e2e_limits().values()], default=None)

    def e2e_limits(self) -> dict[str, float]:
        """Return the limits of whole answers that are set, in seconds, from `p50` to `p99.9`."""
        return {name: limit for name, limit in self.limits().items() if name.startswith("p")}

    @property
    def promises(self) -> bool:
        """Whether the SLO limits anything: one of `limits`, or a share of errors that the user wrote down."""
        return bool(self.limits()) or "error_ratio" in self.model_fields_set

    @model_validator(mode="before")
    @classmethod
    def _without_e2e(cls, given: Any) -> Any:
        """Take `e2e_p95`, as it is called beside `ttft_p95`, for `p95`."""
        if not isinstance(given, Mapping):
            return given
        return {name.removeprefix("e2e_") if isinstance(name, str) else name: given[name] for name in given}

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.goodput is not None and len(self.limits()) == 1:
            raise problem("goodput needs latency limits", at=("goodput",), hint="add ttft_p95: 200ms")
        limits = list(self.e2e_limits().items())
        for (lower, lower_s), (higher, higher_s) in pairwise(limits):
            if higher_s < lower_s:
                raise problem(
                    f"the limit of {higher} is below that of {lower}, which it includes", at=(higher,)
                )
        return self


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
    "ttft_p50",
    "ttft_p95",
    "ttft_p99",
    "itl_p50",
    "itl_p95",
    "itl_p99",
]
"""Figures that a gate may be on: requests/s, the highest rate within the SLO, latency quantiles in seconds,
the share of failed requests, seconds of the server's CPUs or of its GPU for each request, the most bytes of
memory that the server held, of its GPU's memory, and seconds from its launch until the model is AVAILABLE;
of streamed answers quantiles of the time to the first token and of the gaps between tokens, in seconds."""

METRICS: Final[tuple[Metric, ...]] = get_args(Metric)

CHECK_BLOCKS_MAX: Final = 36
CHECK_BLOCKS_MOST: Final = 200
"""Most blocks that a scenario or --blocks may ask for; without either there are at most CHECK_BLOCKS_MAX."""


def _known(given: object) -> object:
    for name in given if isinstance(given, dict) else ():
        if name not in METRICS:
            raise problem("unknown figure", at=(name,), hint=f"figures: {', '.join(METRICS)}")
    return given


def _telling(margins: dict[str, float]) -> dict[str, float]:
    for name, margin in margins.items():
        if not 0.0 < margin < 1.0:
            raise problem("a margin must be above 0 and below 100%", at=(name,), hint=f"write {name}: 5%")
    return margins


Margins = Annotated[
    dict[str, Ratio],
    BeforeValidator(_known),
    AfterValidator(_telling),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                name: {"type": ["number", "string"], "pattern": r"^[0-9.]+ ?%?$"} for name in METRICS
            },
            "additionalProperties": False,
            "examples": [{"throughput": "3%", "p95": "5%"}],
        }
    ),
]


class CheckSpec(Spec):
    """The gates of `batchtune check`."""

    gates: Margins = Field(
        default_factory=dict,
        description="how much worse each figure may get before the check fails; absent: those of the objective",
    )
    blocks: Annotated[int, Field(ge=6, le=CHECK_BLOCKS_MOST, strict=True)] = Field(
        default=CHECK_BLOCKS_MAX,
        description="most runs of each side, without the confirmation; it ends sooner once it is clear",
    )
