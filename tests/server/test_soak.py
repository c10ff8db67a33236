"""A run of the soak benchmark says what it has shown, however it ends."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.benchmarks.server.checked_clients import Tally
from tests.benchmarks.server.server_residue import Residue
from tests.benchmarks.server.soak import conclude


@pytest.mark.parametrize(
    ("samples", "growth"),
    [
        (101, "+60 [+60, +60] MB, +60 [+60, +60] threads, +0 [+0, +0] descriptors (bar: +1 MB)"),
        (11, "too few to say (bar: +1 MB)"),
    ],
    ids=["growth by the hour", "ended early"],
)
def test_a_run_of_a_server_that_keeps_a_megabyte_and_a_thread_a_minute(samples: int, growth: str) -> None:
    tally = Tally(counts=Counter(good=99), slowest_s=0.5)
    tally.note("lost", "no answer")
    residues = [
        Residue(at_s=60.0 * number, resident_mb=60.0 + number, threads=9 + number, descriptors=20)
        for number in range(samples)
    ]
    assert conclude("by a signal", Counter(put=3), tally, residues) == (
        f"ended by a signal after {samples - 1}.0 minutes\n"
        "innocent: 99 good, 1 lost, 1 × lost: no answer; slowest 500 ms\n"
        f"crowd: 3 put\nan hour, 95 %, after the first fifth: {growth}"
    )
