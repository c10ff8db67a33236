"""A launched server that dies or falls silent is told from one that works, and the next configuration gets a new one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import write_emulated

from batchtune.batching import BatchingParameters, Configuration
from batchtune.errors import TargetError
from batchtune.scenario.spec import TargetSpec
from batchtune.target.tfserving import TfServingTarget

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
    assert target.apply(BATCHED).how == "restart"
    assert target.pid != killed
    assert target.in_force == BATCHED
    target.counters()


def test_a_server_that_is_not_ready_in_time_says_what_it_said_last(tmp_path: Path) -> None:
    model = write_emulated(tmp_path / "m")
    (tmp_path / "sleeper.py").write_text(
        "import time\nprint('loading weights', flush=True)\ntime.sleep(60)\n"
    )
    spec = TargetSpec(
        model=str(model), command=[sys.executable, str(tmp_path / "sleeper.py")], ready_timeout="1s"
    )
    with TfServingTarget(spec) as target:
        with pytest.raises(
            TargetError, match="is not ready after 1 s: no connection; its last words"
        ) as raised:
            target.apply(Configuration(batching=None))
        assert raised.value.message.endswith("  loading weights")
        assert "target.ready_timeout" in raised.value.hint
        assert not target.alive()


@pytest.mark.slow
def test_a_server_that_does_not_answer_says_so_and_is_launched_again(target: TfServingTarget) -> None:
    """Five seconds until the answer is missed, five more until the server is ended the hard way."""
    stopped = signalled(target, signal.SIGSTOP)
    with pytest.raises(TargetError, match="metrics: no answer in time"):
        target.counters()
    assert target.in_force is None
    assert target.apply(BATCHED).how == "restart"
    assert target.pid != stopped
    target.counters()
