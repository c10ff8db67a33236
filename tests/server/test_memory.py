"""Does the memory of a peak go back to the system?"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

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


def trims_after(*looks: tuple[float, float]) -> tuple[list[int], float]:
    """The trims after each look at a process, of so many MB resident and in use; and what it has at the end."""
    process = SimpleNamespace(resident_mb=100.0, used_mb=100.0, trims=0)

    def trim() -> None:
        process.trims += 1
        process.resident_mb = min(process.resident_mb, process.used_mb)

    trimming, trims = Trimming(trim=trim, resident_bytes=lambda: int(1e6 * process.resident_mb)), []
    for process.resident_mb, process.used_mb in looks:
        trimming.look()
        trims.append(process.trims)
    return trims, process.resident_mb


IN_USE = (200, 200)


@pytest.mark.parametrize(
    ("looks", "trims"),
    [
        (
            [(mb, 100) for mb in (100, 200, 400, 300, 100, 103, 103, 104.5, 104.5)],
            [0, 0, 0, 1, 1, 1, 1, 1, 2],
        ),
        ([*[IN_USE] * 4, *[(200, 110)] * 4, (110, 100)], [0, 1, 1, 2, 2, 2, 2, 3, 4]),
        ([*[IN_USE] * 9, (150, 100)], [0, 1, 1, 2, 2, 2, 2, 3, 3, 4]),
    ],
    ids=["a peak is over", "what is freed unseen", "a fall"],
)
def test_memory_is_given_back(looks: list[tuple[float, float]], trims: list[int]) -> None:
    """Also what clients held: it is free once they are cut off, but the system still counts it."""
    assert trims_after(*looks) == (trims, 100)


def test_what_is_in_use_is_trimmed_a_few_times_only() -> None:
    trims, _ = trims_after(*[IN_USE] * 1000, (210, 190), (210, 190), (190, 190))
    assert (trims[999], trims[-1]) == (5, 6)
