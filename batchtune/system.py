"""The machine under a process: CPUs and addresses that it may use, signals that end it, and folders for scratch files.

Affinity says on which CPUs a process runs; a quota of its control groups (docker's --cpus, a Kubernetes limit) says how
much of their time it gets, whichever they are. TensorFlow counts its threads by affinity alone and knows no quota
(`port::MaxParallelism` is `NumSchedulableCPUs`, the CPU_COUNT of sched_getaffinity; tsl/platform/default/port.cc).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import math
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self


def schedulable_cpus(process: int = 0) -> frozenset[int]:
    """Return the numbers of the CPUs that a process (0: this one) and its children may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(process))
    return frozenset(range(os.cpu_count() or 1))


def schedulable_cores(*, root: Path = Path("/")) -> int:
    """Count the cores that this process may run on; CPUs that share a core (simultaneous multithreading) count once.

    A CPU for which /sys, looked for under `root`, lists no siblings counts as a core.
    """
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return len({text_of(root / topology.format(cpu)) or cpu for cpu in schedulable_cpus()})


def quota_cpus(root: Path = Path("/")) -> float | None:
    """Return the CPU time that the control groups allow, in CPUs (1.5: 1.5 s per second), the minimum over their
    levels; None: no limit.

    `root`: where /proc and /sys are read.
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
    """Return how many CPUs' worth of time a process gets on `cpus` (None: on those of this process): their number, or
    the quota of the control groups if that is less."""
    count = float(len(schedulable_cpus() if cpus is None else cpus))
    quota = quota_cpus(root)
    return count if quota is None else min(count, quota)


def usable_threads(cpus: Collection[int] | None = None, *, root: Path = Path("/")) -> int:
    """Return how many threads keep the CPU time of `usable_cpus` busy: rounded up, at least 1."""
    return max(1, math.ceil(usable_cpus(cpus, root=root)))


def control_groups(root: Path = Path("/")) -> Iterator[Path]:
    """Yield every directory, existing or not, of a control group that may limit this process, in versions 1 and 2."""
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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; names other than localhost count as reachable from
    elsewhere."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def absolute(path: Path | str) -> Path:
    """Return the absolute path without `..`; links are not followed: a model is served under the link's name."""
    return Path(os.path.abspath(path))  # noqa: PTH100


def text_of(path: Path) -> str:
    """Read a small file of /proc or /sys, stripped; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# Signals that end a command in good order, as Ctrl-C does, and who hears them.

INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Ctrl-C, a service manager, a terminal that goes away, Ctrl-backslash."""


def hear_interrupts() -> None:
    """From now on, raise KeyboardInterrupt on every signal that interrupts; a signal that is ignored (nohup) stays
    so."""
    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def interrupt(number: int, _frame: FrameType | None) -> None:
    """Handle a signal by raising KeyboardInterrupt; SIGHUP, which a closing terminal sends repeatedly, only once."""
    if number == signal.SIGHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """Return a context manager in which a first interrupt raises nothing; its signal number is appended to the list
    that is the context's value.

    A second interrupt raises KeyboardInterrupt at once; further SIGHUPs are only appended. In another thread than the
    main one, which alone gets signals, the list stays empty.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            before[signal.SIGHUP] = signal.SIG_IGN
        if noted and number != signal.SIGHUP:
            raise KeyboardInterrupt
        noted.append(number)

    raising = (interrupt, signal.default_int_handler)
    handlers: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in INTERRUPTS}
    before = {number: handler for number, handler in handlers.items() if handler in raising}
    for number in before:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Scratch files, and the removal of those of a process that was killed.
#
# Each folder has a file that its owner keeps locked (flock) while it lives: the kernel unlocks it however the owner
# ends.

_SCRATCH_PREFIX: Final = "batchtune-"
_OWNER: Final = "owner"


class ScratchFolder:
    """A new folder below the system's temporary one, at `path`.

    It is removed by `close`; if its process was killed, by the next process that makes a scratch folder.
    """

    def __init__(self) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX))
        unseen = self.path / f".{_OWNER}"
        self._lock = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, f"{os.getpid()}\n".encode())
        unseen.rename(self.path / _OWNER)  # others look at this name only: it is never there unlocked

    def close(self) -> None:
        """Remove the folder and its contents; further calls do nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_fault: object) -> None:
        self.close()


def remove_abandoned() -> set[int]:
    """Remove the scratch folders of this user whose process no longer lives; return the other processes that live and
    may run on one of this process's CPUs."""
    others: set[int] = set()
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH_PREFIX}*/"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                owner = int(os.read(lock, 20))
                if schedulable_cpus(owner) & schedulable_cpus():
                    others.add(owner)
            finally:
                os.close(lock)
    return others - {os.getpid()}
