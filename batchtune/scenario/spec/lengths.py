"""How long are the requests of a model that leaves a length open?"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from batchtune.scenario.spec.section import FileName, Spec
from batchtune.scenario.units import Count, problem

_EXAMPLE = "lengths: {lognormal: {median: 40, sigma: 0.8, max: 256}}"


class LognormalLengths(Spec):
    """A log-normal length: half of them below the median, 5 of 6 below median × e^sigma; longer ones are cut to max."""

    median: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sigma: Annotated[float, Field(gt=0, le=10, description="standard deviation of the logarithm")]
    max: Count


class HistogramLengths(Spec):
    """Lengths drawn by weight."""

    lengths: Annotated[tuple[Count, ...], Field(min_length=1)]
    weights: Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.lengths) != len(self.weights):
            raise problem(
                f"expected a weight for each of the {len(self.lengths)} lengths; was {len(self.weights)}",
                at=("weights",),
            )
        return self


class LengthsSpec(Spec):
    """A distribution; every request draws a length, for all dimensions that the model leaves open."""

    lognormal: LognormalLengths | None = None
    histogram: HistogramLengths | None = None
    file: FileName | None = Field(
        default=None, description="recorded lengths, a whole number a line; as often as they occur there"
    )

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise problem(
                f"expected one of lognormal, histogram and file; was {' and '.join(given) or 'none of them'}",
                hint=f"write {_EXAMPLE}",
            )
        return self
