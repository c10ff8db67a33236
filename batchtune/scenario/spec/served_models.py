"""The models that share a server, and what each is asked and promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pydantic import Field

from batchtune.batching.parameters import (
    PARAMETER_NAMES,
    Configuration,
    did_you_mean,
    from_dict,
    to_dict,
    validate,
)
from batchtune.errors import UsageError
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.search_section import KnobField, Space
from batchtune.scenario.spec.section import Count, ModelName, RateRps, Spec, problem
from batchtune.scenario.spec.workload import LoadSpec, RequestSpec

SHARED: Final = ("num_batch_threads", "thread_pool_name")
"""Parameters that TensorFlow Serving takes from the server's own file alone, also with parameters for each
model."""


class ServedModelSpec(Spec):
    """One of several models of a server; `request`, rate, `concurrency` or `slo` that are left out are the
    scenario's."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="letters, digits, dots, - and _; the server serves the model by it",
        examples=["ranker"],
    )
    model: ModelName = Field(min_length=1, description="as target.model")
    request: RequestSpec | None = None
    rate_rps: RateRps | None = Field(default=None, alias="rate", description="open loop: requests per second")
    concurrency: Count | None = Field(default=None, description="closed loop: number of clients")
    slo: SloSpec | None = None
    batching: dict[str, KnobField] = Field(
        default_factory=dict,
        description="batching parameters of this model over those of `fixed`; the threads are shared",
        examples=[{"max_batch_size": 4}],
    )
    space: dict[str, Space] = Field(
        default_factory=dict,
        description="of `batchtune sweep`: values to try of its parameters, in place of those of search.space, "
        "fixed and batching",
        examples=[{"max_batch_size": [1, 2, 4]}],
    )

    def configuration(self, shared: Configuration) -> Configuration:
        """Return the configuration of this model on a server with the configuration `shared`: with the model's
        parameters in `shared.models`, else with its `batching` added; where the server does not batch, `shared` itself.

        Raises:
            BatchingParametersError: a name or a value that no server would accept.
        """
        if any(name == self.name for name, _ in shared.models):
            return shared.of_model(self.name)
        if shared.batching is None or not self.batching:
            return shared
        own = from_dict({**to_dict(shared.batching), **self.batching})
        validate(own)
        return replace(shared, batching=own)


def refuse_unheard(
    scenario: Mapping[str, Any], overrides: Sequence[Mapping[str, Any]], *, option: str
) -> None:
    """Check that every override of a key that single models may have too takes effect on each of several models: a
    model's own value would take precedence.

    `scenario`: plain data, with the overrides applied. `overrides`: plain data of each. `option`: the option that gave
    them, for the message.

    Raises:
        UsageError: a model has its own value, which no override sets.
    """
    models = _below(scenario, "target.models")
    own_keys = {"slo": "slo", "request": "request", "load.rate": "rate", "load.concurrency": "concurrency"}
    for section, own_section in (("fixed", "batching"), ("search.space", "space")):
        for values in (_below(override, section) for override in overrides):
            if isinstance(values, dict):
                own_keys |= {f"{section}.{name}": f"{own_section}.{name}" for name in values}
    for key, own_key in own_keys.items():
        if all(_below(override, key) is None for override in overrides):
            continue
        own = [
            (at, str(model.get("name", at)))
            for at, model in enumerate(models if isinstance(models, list) else ())
            if _below(model, own_key) is not None
            if all(_below(override, f"target.models.{at}.{own_key}") is None for override in overrides)
        ]
        if own:
            names, has = ", ".join(words for _, words in own), "has its" if len(own) == 1 else "have their"
            value = "=…" if "." in key else ".…=…"
            raise UsageError(
                f"{key}: {names} {has} own, which takes precedence",
                hint=f"set it for each model: {option} target.models.{own[0][0]}.{own_key}{value}",
            )


def check_spaces(models: Sequence[ServedModelSpec]) -> None:
    """Check that each model's `space` has only parameters that a model can have of its own; raises a problem
    if not."""
    for at, own in enumerate(models):
        path = ("target", "models", at)
        for name in own.space:
            if name in SHARED:
                raise problem(
                    "all models share it", at=(*path, "space", name), hint="write it in search.space"
                )
            if name not in PARAMETER_NAMES:
                hint = did_you_mean(name, [known for known in PARAMETER_NAMES if known not in SHARED])
                raise problem("unknown batching parameter", at=(*path, "space", name), hint=hint)


def check_loads(models: Sequence[ServedModelSpec], load: LoadSpec) -> None:
    """Check that several models can have this load: arrivals closed, constant, poisson or gamma, a duration, no fleet;
    and that each model has a rate in an open loop, and clients of its own only in a closed one; raises a problem if
    not."""
    closed = not load.open_loop
    if models and load.arrivals not in ("closed", "constant", "poisson", "gamma"):
        raise problem("several models take closed, constant, poisson or gamma", at=("load", "arrivals"))
    if models and load.requests is not None:
        raise problem(
            "a load of several models needs a duration", at=("load", "requests"), hint="set load.duration"
        )
    if models and load.fleet is not None:
        raise problem("several models are loaded from this machine", at=("load", "fleet"))
    for at, own in enumerate(models):
        key, other = ("rate", "concurrency") if closed else ("concurrency", "rate")
        if (own.rate_rps if closed else own.concurrency) is not None:
            raise problem(
                f"load.arrivals is {load.arrivals}, which has no {key}",
                at=("target", "models", at, key),
                hint=f"write {other}, or change load.arrivals",
            )
        if not closed and (own.rate_rps or load.rate_rps) is None:
            raise problem(
                f"missing: arrivals {load.arrivals} needs the model's rate",
                at=("target", "models", at, "rate"),
                hint="add rate: 100/s",
            )


def _below(data: Any, key: str) -> Any:
    """Return the value of a dotted key in plain data; None where there is none."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data
