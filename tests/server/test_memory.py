"""Does the memory of a peak go back to the system?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from batchtune.server.memory import Trimming

FREED = """
import sys, threading
from batchtune.server.memory import resident_bytes, share_one_heap, trim

if sys.argv[1] == "one heap":
    share_one_heap()
bytes(31_000_000)  # freed, it lifts the threshold below which the end of a heap stays
blocks = []
thread = threading.Thread(target=lambda: blocks.extend(bytes(65_600) for _ in range(400)))
thread.start()
thread.join()
peak_bytes = resident_bytes()
blocks.clear()
trim()
print(peak_bytes - resident_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heaps")
@pytest.mark.parametrize("heaps", ["one heap", "a heap for each thread"])
def test_what_another_thread_took_can_be_given_back_where_there_is_one_heap(heaps: str) -> None:
    """26 MB; from a heap of the thread's own they are not, which is why there is one."""
    command = [sys.executable, "-c", FREED, heaps]
    freed_bytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (freed_bytes > 10_000_000) is (heaps == "one heap")


class Process:
    """Has the memory that the test says; a trim takes it down to what is in use."""

    def __init__(self) -> None:
        self.resident_mb = self.used_mb = 100.0
        self.trims = 0
        self.trimming = Trimming(trim=self.trim, resident_bytes=lambda: int(1e6 * self.resident_mb))

    def trim(self) -> None:
        self.trims += 1
        self.resident_mb = min(self.resident_mb, self.used_mb)

    def look(self, *resident_mb: float) -> list[int]:
        """The trims so far, after a look at each."""
        trims = []
        for resident in resident_mb:
            self.resident_mb = resident
            self.trimming.look()
            trims.append(self.trims)
        return trims


def test_memory_is_given_back_once_a_peak_is_over() -> None:
    process = Process()
    assert process.look(100, 200, 400, 300) == [0, 0, 0, 1]
    assert process.resident_mb == 100
    assert process.look(100, 103, 103, 104.5) == [1, 1, 1, 1]
    assert process.look(104.5) == [2]


def test_what_is_freed_unseen_is_given_back_too() -> None:
    """What clients held is free once they are cut off, but the system still counts it."""
    process = Process()
    process.used_mb = 200.0
    assert process.look(200, 200, 200, 200) == [0, 1, 1, 2]
    process.used_mb = 110.0
    assert process.look(*[200] * 4) == [2, 2, 2, 3]
    process.used_mb = 100.0
    assert process.look(110) == [4]
    assert process.resident_mb == 100


def test_a_fall_shows_that_there_is_more_to_give_back() -> None:
    process = Process()
    process.used_mb = 200.0
    assert process.look(*[200] * 9) == [0, 1, 1, 2, 2, 2, 2, 3, 3]
    process.used_mb = 100.0
    assert process.look(150) == [4]


def test_what_is_in_use_is_trimmed_a_few_times_only() -> None:
    process = Process()
    process.used_mb = 200.0
    assert process.look(*[200] * 1000)[-1] == 5
    process.used_mb = 190.0
    assert process.look(210, 210, 190)[-1] == 6
