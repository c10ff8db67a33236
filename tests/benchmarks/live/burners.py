"""Programs that take the CPU from what is measured: a process pinned to each CPU, ended by its id."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

BURN = """
import os, random, sys, time
cpu, parent, pauses = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "pauses"
os.sched_setaffinity(0, {cpu})
random.seed(cpu)
while os.getppid() == parent:
    half_s = random.uniform(0.010, 0.025)
    until_s = time.perf_counter() + half_s
    while time.perf_counter() < until_s:
        pass
    if pauses:
        time.sleep(half_s)
"""


@contextmanager
def burning(cpus: Collection[int], *, pauses: bool) -> Iterator[None]:
    """All of each of these CPUs, or (`pauses`) half of its time in turns of 10 to 25 ms."""
    words = [sys.executable, "-c", BURN]
    more = [str(os.getpid()), "pauses" if pauses else "all"]
    burners = [subprocess.Popen([*words, str(cpu), *more]) for cpu in cpus]
    try:
        yield
    finally:
        for burner in burners:
            burner.terminate()
            burner.wait()
