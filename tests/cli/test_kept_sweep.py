"""Is a sweep gone on with only where what was measured before and what comes are alike? What may end it early?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.archive.run import create_run
from batchtune.cli import kept_sweep
from batchtune.cli.kept_sweep import ended_early, exit_code_of, require_same
from batchtune.errors import (
    BatchtuneError,
    InconclusiveError,
    MeasurementInvalidError,
    TargetError,
    UsageError,
)
from batchtune.scenario.reader import format_scenario, parse_scenario
from tests.check.check_fakes import trial

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


@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [(TargetError("died"), 7), (MeasurementInvalidError("noisy"), 6), (KeyboardInterrupt(), 130)],
)
def test_a_sweep_that_ends_early_keeps_what_worked(
    fault: BatchtuneError | KeyboardInterrupt, exit_code: int
) -> None:
    trials = [trial("a", 1)]
    with ended_early(trials) as early:
        raise fault
    assert early.fault is fault
    assert exit_code_of(fault) == exit_code


def test_a_sweep_in_which_nothing_worked_ends_by_its_error() -> None:
    trials = [replace(trial("a", 1), state="failed", measurement=None)]
    with pytest.raises(TargetError, match="died"), ended_early(trials):
        raise TargetError("died")
    with pytest.raises(InconclusiveError, match="else"), ended_early([trial("a", 1)]):
        raise InconclusiveError("something else ends it as it is")
    with ended_early([]) as early:
        raise KeyboardInterrupt
    assert isinstance(early.fault, KeyboardInterrupt)
