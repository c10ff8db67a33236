"""How many CPUs may a process use: by affinity, and by the quota of its control groups?

The two limit different things. Affinity says on which CPUs it runs; a quota (docker's --cpus, a Kubernetes limit) says
how much of their time it gets, whichever they are. TensorFlow counts its threads by affinity alone and knows no quota
(`port::MaxParallelism` is `NumSchedulableCPUs`, the CPU_COUNT of sched_getaffinity; tsl/platform/default/port.cc).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path


def schedulable_cpus() -> frozenset[int]:
    """The CPUs that this process may run on, and what it starts."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def schedulable_cores(*, root: Path = Path("/")) -> int:
    """Cores that this process may run on: CPUs that share a core (simultaneous multithreading) count once.

    A CPU of which /sys under `root` does not say whom it shares with counts as a core.
    """
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return len({text_of(root / topology.format(cpu)) or cpu for cpu in schedulable_cpus()})


def quota_cpus(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the control groups allow, the least of all levels; None: no limit.

    `root` is where /proc and /sys are looked for.
    """
    limits = []
    for group in control_groups(root):
        quota, _, period = text_of(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = text_of(group / "cpu.cfs_quota_us"), text_of(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def usable_cpus(cpus: Collection[int] | None = None, *, root: Path = Path("/")) -> float:
    """CPUs' worth of time for a process that may run on `cpus` (None: where this one may), quota counted."""
    count = float(len(schedulable_cpus() if cpus is None else cpus))
    quota = quota_cpus(root)
    return count if quota is None else min(count, quota)


def usable_threads(cpus: Collection[int] | None = None, *, root: Path = Path("/")) -> int:
    """How many threads can keep those CPUs busy: part of a CPU is a thread's worth."""
    return max(1, math.ceil(usable_cpus(cpus, root=root)))


def control_groups(root: Path = Path("/")) -> Iterator[Path]:
    """Every directory that may limit this process, in both versions of control groups."""
    for line in (text_of(root / "proc/self/cgroup") or "0::/").splitlines():
        _, controllers, group = line.split(":", 2)
        mounts = [root / "sys/fs/cgroup"]
        if controllers:
            mounts = [mounts[0] / controllers, *(mounts[0] / name for name in controllers.split(","))]
        for mount in mounts:
            path = mount / group.lstrip("/")
            # Inside a container the group's own path is often not mounted: the mount itself is then the limit.
            while path != mount.parent:
                yield path
                path = path.parent


def text_of(path: Path) -> str:
    """A small file of /proc or /sys, stripped; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
