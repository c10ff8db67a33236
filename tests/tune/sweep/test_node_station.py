"""Trials of a node under test: on which thread, and what becomes of their faults."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from batchtune.errors import MeasurementInvalidError, TargetError, UsageError
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.sweep.ray_nodes import NodeStation
from tests.tune.tune_fakes import scenario_of


class FakeBench:
    """Answers with the thread that ran it; raises what it is asked with, if that can be raised."""

    def run(self, plan: Any) -> Any:
        if isinstance(plan, Exception):
            raise plan
        return threading.current_thread()


def station_of_fakes() -> NodeStation:
    station = NodeStation()
    station._bench = cast("Bench", FakeBench())
    return station


def result_of(station: NodeStation, plan: object) -> Any:
    station.begin(cast("Plan", plan))
    assert station._trial is not None
    station._trial.exception(timeout=30.0)
    assert station.look()[1]
    return station.result()


def test_the_thread_that_launches_a_server_outlives_the_trial() -> None:
    """The kernel ends a server with the thread that launched it, and so between two trials."""
    station = station_of_fakes()
    first = result_of(station, "first")
    assert first.is_alive()
    assert result_of(station, "second") is first
    station.close()
    first.join(30.0)
    assert not first.is_alive()


def test_a_fault_of_a_trial_is_the_trials() -> None:
    station = station_of_fakes()
    with pytest.raises(TargetError, match="gone"):
        result_of(station, TargetError("gone"))
    with pytest.raises(MeasurementInvalidError, match="its trial ended with ValueError: what"):
        result_of(station, ValueError("what"))
    station.close()


def test_a_triton_is_launched_when_its_node_is_opened(tmp_path: Path) -> None:
    """What its model's configuration says of batching belongs to the search; that nothing starts is told before."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python" max_batch_size: 4')
    target = {"kind": "triton", "model": str(tmp_path / "m"), "command": [str(tmp_path / "tritonserver")]}
    station = NodeStation()
    with pytest.raises(TargetError, match=r"tritonserver"):
        station.open(scenario_of(target=target, request={"protocol": "kserve_grpc"}), (0,), alone=False)
    station.close()


def test_a_server_keeps_to_its_share_where_that_is_too_small_for_both() -> None:
    station = NodeStation()
    with pytest.raises(UsageError, match=r"target\.cpus: this process may run on"):
        station.open(scenario_of(), (9_999,), alone=False)
    station.close()


def test_what_was_not_begun_is_lost() -> None:
    station = NodeStation()
    with pytest.raises(MeasurementInvalidError, match="was not opened"):
        station.begin(cast("Plan", "plan"))
    with pytest.raises(MeasurementInvalidError, match="runs no trial"):
        station.look()
