"""Versions replace each other under traffic, and parameters change meanwhile: nothing is lost, nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.benchmarks.server import version_swaps
from tests.benchmarks.server.server_residue import Residue
from tests.benchmarks.server.version_models import installed_backends
from tests.benchmarks.server.version_swaps import SLACK_MB, Availability, Case, Outcome, new_writers


@pytest.fixture(scope="module")
def writers() -> Iterator[ProcessPoolExecutor]:
    with new_writers() as pool:
        yield pool


def swapped(case: Case, base: Path, writers: ProcessPoolExecutor) -> Outcome:
    """The outcome of a run in which no answer was lost or wrong."""
    outcome = asyncio.run(version_swaps.swap_versions(case, base, writers))
    assert outcome.answers.failed == 0, str(outcome)
    assert outcome.answers.counts["good"] > 100 * case.swaps
    assert outcome.puts.failed == 0
    assert outcome.puts.counts["good"] > case.swaps
    return outcome


@pytest.mark.parametrize(
    ("backend", "batched"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in (("emulated", True), ("onnx", False))],
)
def test_swaps_under_load_lose_nothing_and_leave_no_thread(
    backend: str, batched: bool, tmp_path: Path, writers: ProcessPoolExecutor
) -> None:
    if backend not in installed_backends():
        pytest.skip(f"{backend} is not installed")
    case = Case(backend=backend, batched=batched, swaps=6, weights_mb=4, warm_up_s=0.2, put_every_s=0.02)
    threads = [rest.threads for rest in swapped(case, tmp_path, writers).rests]
    assert min(threads[3:]) <= max(threads[:3]), threads  # those of a pool just replaced may be there yet


@pytest.mark.slow
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("backend", installed_backends())
def test_memory_never_exceeds_two_versions(
    backend: str, batched: bool, tmp_path: Path, writers: ProcessPoolExecutor
) -> None:
    outcome = swapped(Case(backend=backend, batched=batched, swaps=12), tmp_path, writers)
    assert outcome.over_two_versions_mb <= SLACK_MB, str(outcome)


def test_an_answer_of_a_version_outside_its_time_is_wrong() -> None:
    availability = Availability("onnx")
    availability.asked(1)
    begin_s = availability.windows[1][0][0]
    assert not availability.check(7.0, [1007.0], begin_s, begin_s + 1)
    assert "which was not available" in availability.check(7.0, [2007.0], begin_s, begin_s + 1)
    assert "no version answers" in availability.check(7.0, [1007.5], begin_s, begin_s + 1)
    availability.gone(1)
    end_s = availability.windows[1][0][1]
    assert not availability.check(7.0, [1007.0], end_s, end_s + 1)
    assert availability.check(7.0, [1007.0], end_s + 0.1, end_s + 1)


def test_a_report_shows_growth() -> None:
    """A server that keeps 10 MB and a thread of each version."""
    base = Residue(at_s=0.0, resident_mb=200.0, threads=10, descriptors=20)
    rests = [
        Residue(at_s=float(number), resident_mb=200.0 + 10 * number, threads=10 + number, descriptors=20)
        for number in range(1, 26)
    ]
    peaks_mb = [rest.resident_mb + 100 for rest in rests]
    outcome = Outcome(case=Case(backend="onnx", batched=True), base=base, rests=rests, peaks_mb=peaks_mb)
    outcome.answers.counts["good"] = 9
    assert str(outcome) == (
        "onnx, batched: 25 swaps; answers 9 good; PUTs ; peak +250.0 MB beside two versions (bar: +20); "
        "a swap, 95 %: +10 [+10, +10] MB, +1 [+1, +1] threads, +0 [+0, +0] descriptors"
    )
