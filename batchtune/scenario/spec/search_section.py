"""The part of a scenario that says which configurations are searched, by whom, and for how long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from batchtune.scenario.spec.section import ClusterAddress, Count, PositiveSeconds, Spec, Whole, problem

KnobValue: TypeAlias = bool | int | float | str | tuple[int, ...]
Strategy = Literal["guided", "rule", "grid", "optuna"]

DEFAULT_TIME_BUDGET_S = 120.0


def _knob_value(given: object) -> object:
    sizes = tuple(given) if isinstance(given, list | tuple) else ()
    if sizes and all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        return sizes
    if given != [] and not isinstance(given, bool | int | float | str):
        raise problem(f"expected a number, a word, true, false or a list of sizes; was {given!r}")
    return given


KnobField = Annotated[KnobValue, BeforeValidator(_knob_value)]


class ListSpace(Spec):
    """Values to try: numbers in rising order, others in the order given."""

    values: tuple[KnobField, ...]

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, given: object) -> object:
        return {"values": _ordered(given)} if isinstance(given, list | tuple) else given

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if not self.values:
            raise problem("expected at least one value; the list is empty")
        for at, value in enumerate(self.values):
            if any(type(value) is type(other) and value == other for other in self.values[:at]):
                raise problem(f"{value!r} is listed twice")
        return self

    @model_serializer
    def _as_list(self) -> list[Any]:
        return [list(value) if isinstance(value, tuple) else value for value in self.values]


class RangeSpace(Spec):
    """Values from low to high: evenly spaced, the last one high or less than a step below it; with log doubling, the
    last one high."""

    low: int | float = Field(description="first value")
    high: int | float = Field(description="last value")
    step: int | float | None = Field(default=None, description="distance of two values; whole numbers: 1")
    log: bool = Field(default=False, description="true: low, 2·low, 4·low, … and high")

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.low > self.high:
            raise problem(
                f"low is above high: {self.low} > {self.high}", at=("low",), hint="swap low and high"
            )
        if self.log and self.step is not None:
            raise problem("give step or log, not both", at=("step",))
        if self.log and self.low <= 0:
            raise problem(
                f"log doubles, so it must start above 0; was {self.low}",
                at=("low",),
                hint="list the values instead",
            )
        if self.step is not None and not self.step > 0:
            raise problem(f"expected more than 0; was {self.step}", at=("step",))
        if (
            not self.log
            and self.step is None
            and not (isinstance(self.low, int) and isinstance(self.high, int))
        ):
            raise problem("missing: a range of fractions needs a step (or log: true)", at=("step",))
        range_values_max = 100_000
        if not self.log and (self.high - self.low) / (self.step or 1) >= range_values_max:
            raise problem(
                f"more than {range_values_max} values", at=("high",), hint="set a step, or log: true"
            )
        return self

    @property
    def values(self) -> tuple[KnobValue, ...]:
        """The values, rising."""
        if self.log:
            doublings = math.floor(math.log2(self.high / self.low) + 1e-9)
            values = [self.low * 2**power for power in range(doublings + 1)]
            return tuple(values if values[-1] == self.high else [*values, self.high])
        step = self.step or 1
        return tuple(
            self.low + step * at for at in range(math.floor((self.high - self.low) / step + 1e-9) + 1)
        )


def _kind(given: object) -> str | None:
    if isinstance(given, list | tuple | ListSpace):
        return "list"
    return "range" if isinstance(given, Mapping | RangeSpace) else None


def _ordered(values: Sequence[Any]) -> list[Any]:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return sorted(values)
    return list(values)


Space = Annotated[
    Annotated[ListSpace, Tag("list")] | Annotated[RangeSpace, Tag("range")],
    Discriminator(
        _kind,
        custom_error_type="problem",
        custom_error_message="expected a list of values, or a range {low, high, step} or {low, high, log: true}",
    ),
    WithJsonSchema(
        {
            "oneOf": [
                {
                    "type": "array",
                    "minItems": 1,
                    "items": TypeAdapter(KnobField).json_schema(),
                    "description": "the values to try",
                },
                RangeSpace.model_json_schema(),
            ],
            "examples": [[1, 2, 4, 8], {"low": 1, "high": 128, "log": True}],
        }
    ),
]


def _default_space() -> dict[str, ListSpace | RangeSpace]:
    return {
        "max_batch_size": ListSpace(values=(1, 2, 4, 8, 16, 32, 64, 128)),
        "batch_timeout_micros": ListSpace(values=(0, 500, 1000, 2000, 5000, 10000)),
        "num_batch_threads": ListSpace(values=(1, 2, 4)),
    }


def _servers(given: object) -> object:
    return {"servers": given} if isinstance(given, int) and not isinstance(given, bool) else given


class ParallelSpec(Spec):
    """Servers under test at once, each with its own load on a node, or a GPU, of a Ray cluster."""

    servers: Count = Field(default=1, description="1: one server, launched on this machine, without Ray")
    ray: ClusterAddress = "auto"
    cpus_per_server: Annotated[float, Field(gt=0, le=1024)] = Field(
        default=2.0, description="CPUs of a node that Ray sets aside for each server and its load"
    )
    gpus_per_server: Annotated[float, Field(ge=0, le=64)] | None = Field(
        default=None,
        description="GPUs that each server gets for itself; absent: 1 where the cluster has one for each",
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="further Ray resources that each server needs; it runs on nodes that have them",
        examples=[{"inference": 1}],
    )


class BudgetSpec(Spec):
    """When the search is to end: whichever comes first."""

    time_s: PositiveSeconds | None = Field(
        default=None,
        alias="time",
        description="from the first trial to the last; without any budget 2m, more for a slow server",
    )
    trials: Count | None = Field(
        default=None,
        description="configurations tried; scouts and confirmation runs come on top",
    )

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.time_s is None and self.trials is None:
            object.__setattr__(self, "time_s", DEFAULT_TIME_BUDGET_S)
        return self


class SearchSpec(Spec):
    """How the space is searched; the space is a grid, and a point of it has one value for each parameter."""

    strategy: Strategy = Field(
        default="guided",
        description="which configurations take part, in addition to no batching and the defaults. guided: those of the "
        "throughput × interval rule and of the tuning guide, points of the space that the service-time curve favours, "
        "the leader's neighbours, and proposals of Optuna; rule: that of the rule alone; grid: every point; optuna: "
        "proposals of Optuna alone. Runs decide: scouts, a comparison, confirmation runs",
    )
    budget: BudgetSpec = Field(default_factory=BudgetSpec)
    parallel: Annotated[
        ParallelSpec,
        BeforeValidator(_servers),
        WithJsonSchema(
            {
                "anyOf": [{"type": "integer", "minimum": 1}, ParallelSpec.model_json_schema()],
                "description": "servers under test at once, on a Ray cluster: this number, or more",
                "examples": [4, {"servers": 4, "ray": "ray://head.example:10001", "gpus_per_server": 1}],
            }
        ),
    ] = Field(default_factory=ParallelSpec)
    seed: Whole = Field(default=1, description="seed of the sampler")
    grow: bool = Field(
        default=False,
        description="true: the space is a guess; while the best lies on its edge the next step outward is tried, and "
        "what lies outside it may be recommended too",
    )
    space: dict[str, Space] = Field(
        default_factory=_default_space,
        description="values to try: max_batch_size, batch_timeout_micros, num_batch_threads, max_enqueued_batches, "
        "allowed_batch_sizes (lists, powers_of_two or none), length_buckets (lists, auto or none) and any server flag",
    )

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.space:
            raise problem(
                "the search space is empty",
                at=("space",),
                hint="list values for at least one parameter, such as max_batch_size: [1, 8, 32]",
            )
        return self

    def check_parallel(self, *, launches: bool, has_fleet: bool) -> None:
        """Check that several servers of `search.parallel` can be tested at once; raises a problem if not.

        `launches`: batchtune launches the server, which has one model. `has_fleet`: the load comes from a fleet.
        """
        path, wrong = ("search", "parallel"), None
        if self.parallel.servers == 1:
            return
        if not launches:
            wrong = (
                "each server is launched on its node: target.kind tfserving, or triton without rest_url, of one model",
                "take search.parallel out, or launch the server: target: {kind: triton, model: …}",
            )
        elif has_fleet:
            wrong = ("each server is loaded from its own node", "take load.fleet out")
        if wrong is not None:
            raise problem(wrong[0], at=path, hint=wrong[1])

    @property
    def budget_is_given(self) -> bool:
        """Whether the scenario limits the time or the trials of the search; else the server's speed decides
        how long it lasts."""
        return bool(self.budget.model_fields_set)

    def grid(self) -> list[dict[str, KnobValue]]:
        """List every point of the space: parameter -> value, the last parameter changing fastest."""
        values = product(*(knob.values for knob in self.space.values()))
        return [dict(zip(self.space, point, strict=True)) for point in values]
