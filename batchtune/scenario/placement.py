"""Gives a launched server and its client CPUs where the scenario leaves that open.

They get different CPUs where there are enough: a client on the server's CPUs takes time from it, and makes
runs differ (README, Measured). What is measured is then a server on those CPUs, so what is recommended is for
such a server, and both the sweep and its statement say so. `target.cpus: all` lets them share the machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.section import cpu_list
from batchtune.system import quota_cpus, schedulable_cpus

OF_A_FLEET = (
    "Ray places the load workers, on this machine too if it is a node of the cluster: --set target.cpus=[0] keeps the "
    "server on a CPU of its own"
)


def placed(
    scenario: Scenario, *, cpus: Collection[int] | None = None, quota: float | None = None
) -> tuple[Scenario, str]:
    """Choose separate CPUs for server and client where the scenario leaves that open.

    Returns (scenario, note): the scenario with these CPUs, or unchanged where that is not possible, and a
    note for the user ("": none). The client gets the highest CPUs, as many as it has processes, the server
    the rest. `cpus` are those that both may use, and `quota` how many of them at once; None: as for this
    process.
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
    """Return the scenario with CPUs of this node for server and client; `alone`: `cpus` are all of its
    machine's, and no other server runs there.

    On a machine that others share, both are kept on `cpus` also where these are too few to keep them apart.
    """
    apart, _ = placed(scenario, cpus=cpus)
    target, load = scenario.target, scenario.load
    if alone or apart is not scenario or target.cpus is not None or load.cpus is not None:
        return apart
    if target.runs_already or load.fleet is not None or _is_container(scenario):
        return scenario
    return _with_cpus(scenario, server=tuple(cpus), client=tuple(cpus))


def unplaced(scenario: Scenario, *, cpus: Sequence[int], alone: bool) -> Scenario:
    """Return the scenario without the CPUs that `placed_on_node` gave it in an earlier run; CPUs that the
    user named stay.

    `cpus`, `alone`: those that were passed to `placed_on_node`.
    """
    still_open = _with_cpus(scenario, server=None, client=None)
    earlier = placed_on_node(still_open, cpus=cpus, alone=alone)
    is_earlier = (scenario.target.cpus, scenario.load.cpus) == (earlier.target.cpus, earlier.load.cpus)
    return still_open if is_earlier else scenario


def placed_as(scenario: Scenario, earlier: Scenario) -> Scenario:
    """Return the scenario with the CPUs of an earlier run of it, where it leaves them open."""
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
