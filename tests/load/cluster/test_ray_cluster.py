"""Fleets on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.ray_script import answer_of


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'batchtune[ray]'")
def test_fleets_on_two_nodes_send_the_schedule_survive_one_of_them_and_leave_nothing() -> None:
    found = answer_of(Path(__file__).with_name("ray_two_nodes.py"), timeout_s=290)
    for run in ("connecting", "connected", "killed"):
        assert (found[run]["same_schedule"], found[run]["errors"]) == (True, {}), run
    clocks = [
        re.findall(r"clock ([+-][\d.,]+) ± ([\d.]+) ms", note)[0] for note in found["connected"]["clocks"]
    ]
    assert len(clocks) == 2
    for offset, uncertainty in clocks:  # of one machine
        assert abs(float(offset.replace(",", ""))) <= float(uncertainty) + 0.001
    told = r"load worker [01] on .*; what it was sending is invalid, and measured again with 1 worker$"
    assert re.match(told, found["killed"]["message"])
    assert found["killed"]["left"] == 1
    assert found["too_many"] == "load.fleet: the cluster's 2 nodes can take 2 workers with 1 CPU each, not 9"
    assert found["left"] == {"actors": [], "workers": [], "objects": 0, "cpus_taken": 0.0}
    client = found["client"]
    if "not_started" in client:
        pytest.skip(f"Ray's own server for its clients does not start here: {client['not_started']}")
    assert (client["same_schedule"], client["errors"]) == (True, {})
