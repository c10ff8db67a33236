"""Is a sweep gone on with only where what was measured before and what comes are alike?"""

from __future__ import annotations

from pathlib import Path

import pytest

from batchtune.archive.run import create_run
from batchtune.cli import kept_sweep
from batchtune.cli.kept_sweep import require_same
from batchtune.errors import UsageError
from batchtune.scenario.reader import format_scenario, parse_scenario

TEXT = """\
name: again
target: {kind: external, model: m, grpc_url: "127.0.0.1:8500"}
request: {inputs: zeros}
load: {arrivals: closed, concurrency: 8}
objective: throughput
search: {space: {max_batch_size: [1, 8]}, budget: {time: 10s}}
"""


def test_a_sweep_goes_on_under_its_own_scenario_on_its_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = parse_scenario(TEXT)
    run = create_run(before, format_scenario(before), root=tmp_path)
    require_same(run, parse_scenario(TEXT.replace("10s", "90s")), before)
    with pytest.raises(UsageError, match="was run with another scenario; it differs in: load"):
        require_same(run, parse_scenario(TEXT.replace("concurrency: 8", "concurrency: 9")), before)
    monkeypatch.setattr(kept_sweep, "comparable", lambda _here, _there: ["cpu: a here, b there"])
    with pytest.raises(UsageError, match="another machine or system: cpu: a here, b there") as caught:
        require_same(run, before, before)
    assert "start a new run" in (caught.value.hint or "")
