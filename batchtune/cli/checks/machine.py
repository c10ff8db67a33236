"""Does this machine have the CPUs, the quiet, the memory and the room that a sweep needs?"""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final, Literal, TypeAlias

from batchtune.measure.validity.host_noise import (
    MOST_CANARY_CHANGE,
    MOST_FOREIGN_RATIO,
    MOST_STEAL_RATIO,
    HostGuard,
    HostNoise,
    read_host,
)
from batchtune.system import control_groups, quota_cpus, schedulable_cpus, text_of
from batchtune.units import percentage


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a check found, in one phrase, and what to do about it ("": nothing); `version` of what is installed.

    "missing": it is not there, which may be as it should; "problem": it is there and does not do.
    """

    state: Literal["ok", "missing", "problem"]
    text: str
    advice: str = ""
    version: str | None = None


Question: TypeAlias = Callable[[], Check]


def answers(questions: Mapping[str, Question], *, limit_s: float) -> Iterator[tuple[str, Check]]:
    """What each question found, in their order; all are asked at once.

    None is waited for beyond `limit_s`: its thread is left behind and ends with this process.
    """
    give_up_s = time.monotonic() + limit_s
    boxes = {name: _asked(question) for name, question in questions.items()}
    for name, box in boxes.items():
        try:
            check = box.get(timeout=max(0.0, give_up_s - time.monotonic()))
        except Empty:
            check = Check(state="problem", text=f"no answer within {limit_s:g} s")
        yield name, check


def _asked(question: Question) -> SimpleQueue[Check]:
    box: SimpleQueue[Check] = SimpleQueue()

    def answer() -> None:
        try:
            box.put(question())
        except Exception as error:  # noqa: BLE001 - what a check cannot do is its finding, whatever it is
            box.put(Check(state="problem", text=f"could not be checked: {type(error).__name__}: {error}"))

    Thread(target=answer, daemon=True).start()
    return box


WATCHED_WINDOWS: Final = 8
WINDOW_S: Final = 0.5

DISK_BYTES: Final = 2**30


def cpus(root: Path = Path("/")) -> Check:
    """How many by affinity, and how many by the quota of the control groups."""
    count, quota = len(schedulable_cpus()), quota_cpus(root)
    text = (
        f"{count} of {os.cpu_count()} may be used, {'no quota' if quota is None else f'a quota of {quota:g}'}"
    )
    if min(count, quota or count) < 2:
        advice = "two are needed to keep the client out of the server's way: what is measured on one is rough"
        return Check(state="problem", text=text, advice=advice)
    if quota is not None and quota < count:
        advice = (
            "TensorFlow starts a thread for each CPU whatever the quota, and is then paused: make both equal"
        )
        return Check(state="problem", text=text, advice=f"{advice} (taskset, --cpuset-cpus)")
    return Check(state="ok", text=text)


def watch_host(on_window: Callable[[int], None], *, sleep: Callable[[float], None] = time.sleep) -> Check:
    """How noisy the CPUs are while nothing of ours runs; `on_window` is told how many windows were watched."""
    guard, windows = HostGuard(), []
    for count in range(WATCHED_WINDOWS):
        on_window(count)
        guard.begin()
        sleep(WINDOW_S)
        windows.append(guard.end(server_cpu_s=0.0))
    return host_noise(windows)


def host_noise(windows: Sequence[HostNoise]) -> Check:
    """The worst of the windows, if enough of them were noisy."""
    taken = max(window.foreign_ratio for window in windows)
    stolen = max(window.steal_ratio for window in windows)
    slower = max(0.0, *(window.canary_change for window in windows))
    noisy = sum(window.noisy for window in windows)
    watched = f"{len(windows) * WINDOW_S:g} s"
    noisy_windows = 2  # One disturbed half second is any machine's; a trial that meets it is repeated.
    if noisy < noisy_windows:
        return Check(
            state="ok", text=f"quiet for {watched}: others used at most {percentage(taken)} of these CPUs"
        )
    texts = (
        (taken > MOST_FOREIGN_RATIO, f"others used up to {percentage(taken)} of these CPUs"),
        (stolen > MOST_STEAL_RATIO, f"the hypervisor took up to {percentage(stolen)} of their time"),
        (slower > MOST_CANARY_CHANGE, f"they were up to {percentage(slower)} slower than usual"),
    )
    said = "; ".join(text for beyond, text in texts if beyond)
    return Check(
        state="problem",
        text=f"noisy in {noisy} of {len(windows)} half seconds: {said}",
        advice="stop other work here; `batchtune noise SCENARIO.yaml` reports the smallest difference it can detect",
    )


def pressure(root: Path = Path("/")) -> Check:
    """Whether the kernel reports how long tasks wait for a CPU (PSI)."""
    pressed = read_host(root=root).pressed
    if pressed is None:
        advice = "boot with psi=1; without it only steal, other programs and a fixed loop show noise"
        return Check(
            state="missing", text="the kernel does not report who waits for a CPU (PSI)", advice=advice
        )
    return Check(state="ok", text=f"the kernel reports how long {pressed} waits for a CPU (PSI)")


def memory(root: Path = Path("/")) -> Check:
    """What is free, of the machine and of the control groups."""
    free_bytes = _free_memory_bytes(root)
    text = f"{free_bytes / 2**30:.1f} GiB free"
    memory_bytes = 2 * 2**30  # TensorFlow's server, two load processes and the search hold 1.5 GiB together.
    if free_bytes < memory_bytes:
        return Check(state="problem", text=text, advice="free 2 GiB, or serve a model that needs less")
    return Check(state="ok", text=text)


def _free_memory_bytes(root: Path) -> int:
    import psutil

    free_bytes = int(psutil.virtual_memory().available)
    for group in control_groups(root):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = text_of(group / limit), text_of(group / used)
            if most.isdigit() and now.isdigit():
                kept = _entry(group / "memory.stat", cache)
                free_bytes = min(free_bytes, max(0, int(most) - int(now) + kept))
    return free_bytes


def _entry(path: Path, name: str) -> int:
    entries = (line.partition(" ") for line in text_of(path).splitlines())
    return next((int(value) for key, _, value in entries if key == name and value.isdigit()), 0)


def room_for_results(results: Path) -> Check:
    """Whether results can be written there, and how much of them."""
    folder = next(place for place in (results.absolute(), *results.absolute().parents) if place.exists())
    elsewhere = "name another folder with --results"
    if not folder.is_dir():
        return Check(state="problem", text=f"{folder} is a file", advice=elsewhere)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Check(state="problem", text=f"{folder} cannot be written", advice=elsewhere)
    free_bytes = shutil.disk_usage(folder).free
    text = f"{free_bytes / 2**30:.1f} GiB free in {folder}"
    least_disk_bytes = 2**26  # The quickstart's results are 10 MB.
    if free_bytes < least_disk_bytes:
        return Check(state="problem", text=f"{text}, too little for a sweep", advice=elsewhere)
    return Check(
        state="ok", text=text, advice="" if free_bytes >= DISK_BYTES else f"make room, or {elsewhere}"
    )


def open_files() -> Check:
    """The hard limit: load processes and the bundled server raise their own to it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard in (resource.RLIM_INFINITY, -1):
        return Check(state="ok", text="no limit of a process")
    text = f"{hard:,} a process (hard limit)"
    files = 4096  # Of a server that is asked by REST each client holds a connection at both ends.
    if hard < files:
        advice = f"ulimit -Hn {files} as root (or LimitNOFILE=); each connection is a file at both ends"
        return Check(state="problem", text=text, advice=advice)
    return Check(state="ok", text=text)
