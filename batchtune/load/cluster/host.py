"""What does the head of a cluster ask of a place where a worker runs: a Ray node, this machine, a test's fake?"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from batchtune.cpus import schedulable_cpus
from batchtune.errors import MeasurementInvalidError
from batchtune.load.live import LiveAggregate
from batchtune.load.record.samples import Samples
from batchtune.load.worker.job import WorkerJob
from batchtune.scenario.payloads import RequestSet


class HostLostError(MeasurementInvalidError):
    """A host that has died, does not answer, or cannot run its part any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a host is, and on which CPUs; `node` is for people, equal `machine`s share their loopback and CPUs.

    `niceness`: of the host's process and its worker, 0 to 19; above 0 whatever else runs there goes first.
    """

    node: str
    machine: str
    cpus: tuple[int, ...]
    niceness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a part is; `live` None: not started."""

    live: LiveAggregate | None
    ended: bool


class Host(Protocol):
    """One worker and its place. Every call returns soon; a part runs between `start` and `Progress.ended`.

    Each method raises HostLostError when the host is gone, TargetError and UsageError as the worker found them.
    """

    def place(self) -> Place: ...

    def open(self, cpu: int) -> None:
        """Start the worker, kept on this CPU; once, before all that follows."""

    def clock_ns(self) -> int:
        """CLOCK_MONOTONIC there, now."""

    def prepare(self, parts: Sequence[WorkerJob], overdue_after_s: float) -> None:
        """Begin to connect, with a part for each endpoint; whatever ran before is ended."""

    def ready(self) -> bool:
        """Whether the part can start."""

    def start(self, start_ns: int) -> None:
        """Start at this instant of the host's own clock."""

    def stop(self) -> None:
        """Send nothing more; before the start: send nothing."""

    def look(self) -> Progress: ...

    def count(self) -> int:
        """How many rows the ended part has."""

    def rows(self, first: int, last: int, one_in: int) -> Samples:
        """Rows `first` to `last`, without `last`, of the ended part, or one of so many of them, drawn at random.

        Times are from the start, by the host's own clock.
        """

    def client_max_rps(self, requests: RequestSet) -> float:
        """What this worker can send at most, to a server beside it that does nothing."""

    def close(self) -> None:
        """End the worker; never raises."""


Hosts = Callable[[], list[Host]]


def at_usual_priority() -> None:
    """Run this process, and what it starts, at niceness 0: Ray starts its actors at 15. It takes CAP_SYS_NICE."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))


def this_place() -> Place:
    """Where this process runs; a container with a loopback of its own is a machine of its own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    machine = socket.gethostname()
    if boot.exists() and namespace.is_symlink():
        machine = f"{boot.read_text().strip()} {namespace.readlink()}"
    return Place(
        node=socket.gethostname(),
        machine=machine,
        cpus=tuple(sorted(schedulable_cpus())),
        niceness=max(0, os.getpriority(os.PRIO_PROCESS, 0)),
    )
