"""A launched server that dies or falls silent is told from one that works, and the next configuration gets a new one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import TargetError
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target.external import read_parameters
from batchtune.target.process import HEAD_BYTES, TAIL_BYTES, WRITTEN_BYTES_MAX, ServerLog
from batchtune.target.tfserving import TfServingTarget
from tests.server.server_process import write_emulated

BATCHED = Configuration(batching=BatchingParameters(max_batch_size=4, batch_timeout_micros=0))


@pytest.fixture
def target(tmp_path: Path) -> Iterator[TfServingTarget]:
    model = write_emulated(tmp_path / "m", base_ms=1.0)
    with TfServingTarget(TargetSpec(model=str(model))) as launched:
        launched.apply(Configuration(batching=None))
        yield launched


def signalled(target: TfServingTarget, number: signal.Signals) -> int:
    pid = target.pid
    assert pid is not None
    os.kill(pid, number)
    return pid


def test_a_server_that_was_killed_says_so_and_is_launched_again(target: TfServingTarget) -> None:
    killed = signalled(target, signal.SIGKILL)
    with pytest.raises(TargetError, match="the server was ended by signal 9"):
        target.counters()
    assert target.apply(BATCHED) is not None
    assert target.pid != killed
    assert target.in_force == BATCHED
    target.counters()


@pytest.mark.slow
def test_a_server_that_does_not_answer_says_so_and_is_launched_again(target: TfServingTarget) -> None:
    """Five seconds until the answer is missed, five more until the server is ended the hard way."""
    stopped = signalled(target, signal.SIGSTOP)
    with pytest.raises(TargetError, match="metrics: no answer in time"):
        target.counters()
    assert target.in_force is None
    assert target.apply(BATCHED) is not None
    assert target.pid != stopped
    target.counters()


def test_retries_that_were_asked_for_are_left_alone(tmp_path: Path) -> None:
    model = write_emulated(tmp_path / "m")
    (tmp_path / "server.py").write_text("import sys\nprint(sys.argv, flush=True)\nsys.exit(1)\n")
    command = [sys.executable, str(tmp_path / "server.py")]
    spec = TargetSpec(model=str(model), command=command, flags={"max_num_load_retries": 3})
    with TfServingTarget(spec) as target, pytest.raises(TargetError, match="--max_num_load_retries=3"):
        target.apply(Configuration(batching=None))


def test_the_servers_log_is_kept(target: TfServingTarget, tmp_path: Path) -> None:
    kept = tmp_path / "server.log"
    target.keep_log(kept)
    assert "is available" in kept.read_text()
    signalled(target, signal.SIGTERM)
    target.close()
    assert kept.read_text().count("is available") == 1


def test_of_a_long_log_the_start_and_the_end_are_kept(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "scratch.log")
    log.path.write_text("flags and devices\n")
    log.keep_in(tmp_path / "server.log")
    for round_ in range(4):
        with log.path.open("a") as file:
            file.write(f"a line for each request of round {round_}\n" * 2**17)
        log.copy()
    text = (tmp_path / "server.log").read_text()
    assert len(text) < HEAD_BYTES + TAIL_BYTES + 100
    assert text.startswith("flags and devices\n")
    assert text.count("left out the middle") == 1
    assert text.endswith("round 3\n")
    assert log.path.stat().st_size < WRITTEN_BYTES_MAX


def test_a_log_that_cannot_be_kept_costs_nothing_else(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "scratch.log")
    log.path.write_text("words\n")
    log.keep_in(tmp_path / "no such folder" / "server.log")
    log.copy()
    assert log.path.read_text() == "words\n"


def test_length_buckets_come_into_force_between_two_batches_and_other_flags_by_a_restart(
    target: TfServingTarget,
) -> None:
    for flags in ((), (("length_buckets", "32,64"),), (("length_buckets", "auto"),), ()):
        bucketed = Configuration(batching=BATCHED.batching, flags=flags)
        assert target.apply(bucketed) is None
        assert read_parameters(target.endpoint) == bucketed
    assert target.apply(Configuration(batching=None, flags=(("zero_padding", "true"),))) is not None
