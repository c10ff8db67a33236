"""A fleet on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ray_script import answer_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'batchtune[ray]'"),
]
SCRIPT = Path(__file__).with_name("ray_two_nodes.py")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return answer_of(SCRIPT, timeout_s=290)


def test_workers_on_two_nodes_send_the_schedule_of_one_process(found: dict[str, Any]) -> None:
    for run in (found["connecting"], found["connected"], found["killed"]):
        assert (run["same_schedule"], run["errors"]) == (True, {})


def test_workers_reached_by_the_client_of_ray_send_it_too(found: dict[str, Any]) -> None:
    client = found["client"]
    if "not_started" in client:
        pytest.skip(f"Ray's own server for its clients does not start here: {client['not_started']}")
    assert (client["same_schedule"], client["errors"]) == (True, {})


def test_clocks_of_one_machine_are_found_to_be_one(found: dict[str, Any]) -> None:
    for note in found["connected"]["clocks"]:
        offset, uncertainty = re.findall(r"clock ([+-][\d.,]+) ± ([\d.]+) ms", note)[0]
        assert abs(float(offset.replace(",", ""))) <= float(uncertainty) + 0.001
    assert len(found["connected"]["clocks"]) == 2


def test_a_node_killed_under_its_load_is_gone_on_without(found: dict[str, Any]) -> None:
    told = r"load worker [01] on .*; what it was sending is invalid, and measured again with 1 worker$"
    assert re.match(told, found["killed"]["message"])
    assert found["killed"]["left"] == 1


def test_more_workers_than_the_cluster_can_ever_take_are_refused(found: dict[str, Any]) -> None:
    assert found["too_many"] == "load.fleet: the cluster's 2 nodes can take 2 workers with 1 CPU each, not 9"


def test_fleets_leave_no_actor_no_worker_no_object(found: dict[str, Any]) -> None:
    assert found["left"] == {"actors": [], "workers": [], "objects": 0, "cpus_taken": 0.0}
