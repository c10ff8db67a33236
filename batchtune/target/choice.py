"""Chooses the target that a scenario describes, and the CPUs of a launched server and of its client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeAlias

from batchtune.errors import UsageError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.section import cpu_list
from batchtune.system import quota_cpus, schedulable_cpus
from batchtune.target.claim import OriginalModel
from batchtune.target.command import CommandTarget
from batchtune.target.endpoint import external_endpoint, running_endpoint
from batchtune.target.external import ExternalTarget
from batchtune.target.model_files import served_name
from batchtune.target.tfserving import TfServingTarget, demand_of
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
    """Make the target to which the scenario's configurations are applied; the server is not started yet.

    `original`: the model as an interrupted run found it on the server, to be restored; None: no such run.
    `clients_most`: how many clients a load may have, if more than the scenario's. `several_models`: the scenario may
    list several.

    Raises:
        UsageError: the server is external, does not speak the protocol of the scenario's requests, or serves several
            models where one is allowed.
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
                "target.kind: an external server is loaded as it is, never reconfigured",
                hint="measure it with `batchtune load`; a Triton in explicit model control is tuned by "
                "kind: triton, any server by your own commands by kind: command",
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
    """Make a target of a running server that is loaded as it is, at the given URLs; both None: at those of the
    scenario's `target`.

    Raises:
        UsageError: a URL without host or port, two URLs of different hosts, or one with TLS and one without.
    """
    name = served_name(scenario.target.model)
    if rest_url is None and grpc_url is None:
        endpoint = running_endpoint(scenario.target, name)
    else:
        endpoint = external_endpoint(
            model_name=name, rest_url=rest_url, grpc_url=grpc_url, tls=scenario.target.tls
        )
    return ExternalTarget(endpoint, kserve=scenario.request.protocol.startswith("kserve_"))


# CPUs of a launched server and of its client, where the scenario leaves them open.
#
# They get different CPUs where there are enough: a client on the server's CPUs takes time from it, and makes runs
# differ (README, Measured). What is measured is then a server on those CPUs, so what is recommended is for such a
# server, and both the sweep and its statement say so. `target.cpus: all` lets them share the machine.

OF_A_FLEET = (
    "Ray places the load workers, on this machine too if it is a node of the cluster: --set target.cpus=[0] keeps the "
    "server on a CPU of its own"
)


def placed(
    scenario: Scenario, *, cpus: Collection[int] | None = None, quota: float | None = None
) -> tuple[Scenario, str]:
    """Choose separate CPUs for server and client where the scenario leaves that open.

    Returns (scenario, note): the scenario with these CPUs, or unchanged where that is not possible, and a note for the
    user ("": none). The client gets the highest CPUs, as many as it has processes, the server the rest. `cpus`: numbers
    of the CPUs that both may use; `quota`: how many of them they may use at once; None: what applies to this process.
    """
    if scenario.target.cpus is not None or scenario.load.cpus is not None or scenario.target.runs_already:
        return scenario, ""
    if scenario.load.fleet is not None:
        return scenario, OF_A_FLEET
    usable = sorted(schedulable_cpus() if cpus is None else cpus)
    why = _why_shared(scenario, len(usable), quota_cpus() if quota is None else quota)
    if why is not None:
        return scenario, f"server and client share {cpu_list(usable)}: {why}" if len(usable) > 1 else ""
    client, server = usable[-scenario.load.processes :], usable[: -scenario.load.processes]
    note = (
        f"the server has {cpu_list(server)}, the client {cpu_list(client)}: neither takes the other's time; "
        "--set target.cpus=all lets them share"
    )
    return _with_cpus(scenario, server=tuple(server), client=tuple(client)), note


def placed_on_node(scenario: Scenario, *, cpus: Sequence[int], alone: bool) -> Scenario:
    """Return the scenario with CPUs of this node for server and client; `alone`: no other server runs on this machine.

    With others on the machine, server and client stay on `cpus` even where these are too few to keep the two apart.
    """
    apart, _ = placed(scenario, cpus=cpus)
    target, load = scenario.target, scenario.load
    if alone or apart is not scenario or target.cpus is not None or load.cpus is not None:
        return apart
    if target.runs_already or load.fleet is not None or _is_container(scenario):
        return scenario
    return _with_cpus(scenario, server=tuple(cpus), client=tuple(cpus))


def unplaced(scenario: Scenario, *, cpus: Sequence[int], alone: bool) -> Scenario:
    """Return the scenario without the CPUs that `placed_on_node` gave it in an earlier run; CPUs that the user named
    stay.

    `cpus`, `alone`: the arguments of that call of `placed_on_node`.
    """
    still_open = _with_cpus(scenario, server=None, client=None)
    earlier = placed_on_node(still_open, cpus=cpus, alone=alone)
    is_earlier = (scenario.target.cpus, scenario.load.cpus) == (earlier.target.cpus, earlier.load.cpus)
    return still_open if is_earlier else scenario


def placed_as(scenario: Scenario, earlier: Scenario) -> Scenario:
    """Return the scenario with the CPUs of `earlier`, an earlier run's, if it names none of its own."""
    if scenario.target.cpus is not None or scenario.load.cpus is not None:
        return scenario
    return _with_cpus(scenario, server=earlier.target.cpus, client=earlier.load.cpus)


def _why_shared(scenario: Scenario, count: int, quota: float | None) -> str | None:
    """Explain why server and client cannot be kept apart, or why that gains nothing; None: it is worth it."""
    if _is_container(scenario):
        return "a container inherits no CPUs; give it --cpuset-cpus and the client load.cpus"
    if count <= scenario.load.processes:
        return f"the client's {scenario.load.processes} processes leave the server no CPU of its own"
    if quota is not None and quota < scenario.load.processes + 1:
        return f"their quota is {quota:g} CPUs, which both draw on wherever they run"
    return None


def _is_container(scenario: Scenario) -> bool:
    command = scenario.target.command
    return command is not None and Path(command[0]).name in {"docker", "podman", "nerdctl"}


def _with_cpus(
    scenario: Scenario, *, server: tuple[int, ...] | None, client: tuple[int, ...] | None
) -> Scenario:
    return scenario.with_target(cpus=server).with_load(cpus=client)
