"""What is promised of latency and of errors?"""

from __future__ import annotations

from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from batchtune.scenario.spec.section import Spec
from batchtune.scenario.units import PositiveSeconds, Ratio, problem


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
    error_ratio: Ratio = Field(default=0.01, alias="errors", description="most requests that may fail")

    def limits(self) -> dict[str, float]:
        """The latency limits that are set, in seconds, from `p50` to `p99.9`."""
        limits = {
            "p50": self.p50_s,
            "p90": self.p90_s,
            "p95": self.p95_s,
            "p99": self.p99_s,
            "p99.9": self.p99_9_s,
        }
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def promises(self) -> bool:
        """Whether anything is promised: a latency limit, or a share of errors that somebody wrote down."""
        return bool(self.limits()) or "error_ratio" in self.model_fields_set

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        limits = list(self.limits().items())
        for (lower, lower_s), (higher, higher_s) in pairwise(limits):
            if higher_s < lower_s:
                raise problem(
                    f"the limit of {higher} is below that of {lower}, which it includes", at=(higher,)
                )
        return self
