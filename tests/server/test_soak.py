"""A run of the soak benchmark says what it has shown, in words and in JSON, however it ends."""

from __future__ import annotations

import json
from collections import Counter

from tests.benchmarks.server.checked_clients import Tally
from tests.benchmarks.server.server_residue import Residue
from tests.benchmarks.server.soak import Conclusion, conclude


def concluded(samples: int) -> Conclusion:
    """Of a server that keeps 1 MB and a thread a minute."""
    tally = Tally(counts=Counter(good=99), slowest_s=0.5)
    tally.note("lost", "no answer")
    residues = [
        Residue(at_s=60.0 * number, resident_mb=60.0 + number, threads=9 + number, descriptors=20)
        for number in range(samples)
    ]
    return conclude("by a signal", samples, Counter(put=3), tally, residues)


def test_growth_is_told_by_the_hour() -> None:
    said = json.loads(concluded(100).as_json())
    assert (said["ended"], said["answers"], said["failed"]) == ("by a signal", {"good": 99, "lost": 1}, 1)
    assert said["faults"] == {"lost: no answer": 1}
    assert (said["slowest_ms"], said["crowd"]) == (500.0, {"put": 3})
    assert {name: round(slope["per_unit"], 6) for name, slope in said["an_hour"].items()} == {
        "memory_mb": 60.0,
        "threads": 60.0,
        "descriptors": 0.0,
    }
    assert "an hour, 95 %, after the first 20%: +60 [+60, +60] MB (bar: +1)" in str(concluded(100))


def test_a_run_that_ends_early_has_no_slopes() -> None:
    said = json.loads(concluded(10).as_json())
    assert said["an_hour"] == {"memory_mb": None, "threads": None, "descriptors": None}
    assert "ended by a signal after 10.0 minutes" in str(concluded(10))
