"""Chooses the target that a scenario describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from batchtune.errors import UsageError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.claim import OriginalModel
from batchtune.target.command import CommandTarget
from batchtune.target.container import demand_of
from batchtune.target.endpoint import external_endpoint
from batchtune.target.external import ExternalTarget
from batchtune.target.model_files import served_name
from batchtune.target.tfserving import TfServingTarget
from batchtune.target.triton import TritonTarget

LaunchedTarget: TypeAlias = TfServingTarget | TritonTarget | CommandTarget
"""Targets whose server takes configurations."""


def target_of(
    scenario: Scenario,
    *,
    on_event: Callable[[str], None] = lambda _text: None,
    original: OriginalModel | None = None,
    clients_most: int = 0,
    several_models: bool = False,
) -> LaunchedTarget:
    """Make the target to which the scenario's configurations are applied; it is not started yet.

    `original`: the model as an interrupted run found it on the server that it attached to, to be put back.
    `clients_most`: how many clients a load may have where that is more than the scenario's. `several_models`:
    the scenario may list several.

    Raises:
        UsageError: the server is external, does not speak the protocol of the scenario's requests, or
            serves
            several models where one is allowed.
    """
    if not several_models:
        refuse_several_models(scenario)
    protocol = scenario.request.protocol
    match scenario.target.kind:
        case "triton":
            return TritonTarget(scenario.target, on_event=on_event, original=original)
        case "command" | "http":
            return CommandTarget(
                scenario.target,
                kserve=protocol.startswith("kserve_"),
                tells=protocol not in ("http", "openai"),
                rows_per_request=scenario.request.rows_most,
                on_event=on_event,
                original=original,
            )
        case "external":
            raise UsageError(
                "target.kind: an external server is loaded as it is: nothing of it is reconfigured",
                hint="measure it with `batchtune load`; a Triton in explicit model control is tuned by "
                "kind: triton, any server by commands of yours by kind: command",
            )
        case "tfserving" if protocol not in ("grpc", "rest"):
            raise UsageError(
                f"request.protocol: no {scenario.target.kind} server speaks {protocol}",
                hint="set target.kind: triton, or load a running KServe v2 server with `batchtune load --rest-url` "
                "or `--grpc-url`",
            )
        case "tfserving":
            demand = demand_of(scenario, clients_most=clients_most)
            return TfServingTarget(scenario.target, on_event=on_event, demand=demand)


def refuse_several_models(scenario: Scenario) -> None:
    """Check that a scenario has one model, for commands that cannot measure several.

    Raises:
        UsageError: the scenario lists several.
    """
    if scenario.target.models:
        raise UsageError(
            "target.models: this is of one model; `load`, `sweep`, `compare` and `check` side by side take several",
            hint="take one of these, or name one, target.model, and remove target.models",
        )


def external_target(
    scenario: Scenario, *, rest_url: str | None = None, grpc_url: str | None = None
) -> ExternalTarget:
    """Make a target of a running server that is loaded as it is: at the given URLs, else at those of the
    scenario's `target`.

    Raises:
        UsageError: a URL without host or port, or two URLs of different hosts.
    """
    target = scenario.target
    own = rest_url is None and grpc_url is None
    endpoint = external_endpoint(
        model_name=served_name(target.model),
        rest_url=target.rest_url if own else rest_url,
        grpc_url=target.grpc_url if own else grpc_url,
        tls=target.tls,
        names=("target.rest_url", "target.grpc_url") if own else ("--rest-url", "--grpc-url"),
    )
    return ExternalTarget(endpoint, kserve=scenario.request.protocol.startswith("kserve_"))
