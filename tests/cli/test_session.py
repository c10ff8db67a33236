"""Does a session keep what was measured, and say how it ended? Is a sweep resumed only where both halves are alike?"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import typer

from batchtune.archive.run import Run, create_run
from batchtune.cli import session as cli_session
from batchtune.cli.app import _exit_code
from batchtune.cli.commands.run_recommend import to_establish
from batchtune.cli.session import MeasuringSession, require_same, session
from batchtune.errors import (
    ArchiveError,
    BatchtuneError,
    InconclusiveError,
    MeasurementInvalidError,
    TargetError,
    UsageError,
)
from batchtune.scenario.reader import format_scenario, parse_scenario
from batchtune.tune.trials.trial import FinishedTrial
from tests.check.check_fakes import trial

TEXT = """\
name: again
target: {kind: external, model: m, grpc_url: "127.0.0.1:8500"}
request: {inputs: zeros}
load: {arrivals: closed, concurrency: 8}
objective: throughput
search: {space: {max_batch_size: [1, 8]}, budget: {time: 10s}}
"""


def test_a_sweep_goes_on_with_its_scenario_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = parse_scenario(TEXT)
    run = create_run(before, format_scenario(before), root=tmp_path)
    require_same(run, parse_scenario(TEXT.replace("10s", "90s")), before)
    for key, was, now in (("load", "concurrency: 8", "concurrency: 9"), ("search", "[1, 8]", "[1, 4]")):
        with pytest.raises(UsageError, match=f"was run with another scenario; it differs in: {key}"):
            require_same(run, parse_scenario(TEXT.replace(was, now)), before)
    monkeypatch.setattr(cli_session, "comparable", lambda _here, _there: ["cpu: a here, b there"])
    with pytest.raises(UsageError, match="another machine or system: cpu: a here, b there") as caught:
        require_same(run, before, before)
    assert "start a new run" in (caught.value.hint or "")


Fault = BatchtuneError | KeyboardInterrupt
Kind = Literal["", "compare"]


def a_session(root: Path, **options: Any) -> AbstractContextManager[MeasuringSession]:
    return session(parse_scenario(TEXT), results=root, quiet=True, **options)


@pytest.mark.parametrize(
    ("fault", "exit_code", "words"),
    [
        (TargetError("died", hint="look"), 7, "error: died\nhint: look\nhint: 1 trial saved in"),
        (MeasurementInvalidError("noisy"), 6, "error: noisy\nhint: 1 trial saved in"),
        (KeyboardInterrupt(), 130, "interrupted; 1 trial saved in"),
    ],
)
@pytest.mark.parametrize("kind", ["", "compare"])
def test_a_session_that_ends_early_keeps_what_worked_and_says_how_to_go_on(
    fault: Fault, exit_code: int, words: str, kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_session(tmp_path, kind=kind) as current:
        run = current.begin(current.scenario)
        current.keep([FinishedTrial(trial=trial("a", 1), samples=None)])
        raise fault
    assert current.fault is fault
    assert current.exit_code(0) == exit_code
    assert run is not None
    assert len(run.ledger()) == 1
    err = capsys.readouterr().err
    assert err.startswith(words)
    on = f"\nnext: batchtune sweep {run.path / 'scenario.yaml'} --resume {run.path}\n"
    is_told = kind == "" and not isinstance(fault, KeyboardInterrupt)
    assert (on in err) == ("batchtune recommend" in err) == is_told


def test_where_nothing_worked_the_error_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = replace(trial("a", 1), state="failed", measurement=None)
    with pytest.raises(TargetError, match="died"), a_session(tmp_path, trials=[failed]):
        raise TargetError("died")
    with pytest.raises(InconclusiveError, match="else"), a_session(tmp_path, trials=[trial("a", 1)]):
        raise InconclusiveError("something else ends it as it is")
    with a_session(tmp_path) as current:
        raise KeyboardInterrupt
    assert current.exit_code(0) == 130
    assert capsys.readouterr().err == "interrupted before the first trial\n"
    assert not list(tmp_path.iterdir())


def test_a_session_begins_once_and_holds_its_run_until_its_end(tmp_path: Path) -> None:
    with a_session(tmp_path, kind="load") as current:
        run = current.begin(current.scenario)
        assert run is not None
        assert current.begin(current.scenario) is run
        with pytest.raises(ArchiveError, match="in use by pid"):
            Run(run.path).hold()
    Run(run.path).hold()
    with session(parse_scenario(TEXT), "load", results=None, quiet=True) as current:
        assert current.begin(current.scenario) is None
        current.keep([FinishedTrial(trial=trial("a", 1), samples=None)])
    assert len(current.trials) == 1


def test_a_sweep_and_recommend_name_the_same_budget_for_the_next_step(tmp_path: Path) -> None:
    """Also of a sweep that was resumed with another one than it began with."""
    with a_session(tmp_path) as current:
        begun = current.begin(current.scenario)
    assert begun is not None
    longer = parse_scenario(TEXT.replace("10s", "90s"))
    resumed = {"run": Run(begun.path), "trials": [trial("a", 1)]}
    with session(longer, results=tmp_path, quiet=True, **resumed) as current:
        run = current.begin(longer)
    assert run is not None
    step = to_establish(run, longer, current.trials)
    assert step is not None
    assert step.endswith("--budget 3m")
    assert to_establish(run, run.scenario(), current.trials) == step


def test_a_server_that_could_not_be_put_back_counts_more_than_what_was_measured(tmp_path: Path) -> None:
    with a_session(tmp_path) as current:
        raise KeyboardInterrupt
    current.restored = False
    assert current.exit_code(0) == 7


def test_an_interrupt_that_no_command_hears_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def early() -> None:
        raise KeyboardInterrupt

    command = typer.Typer()
    command.command()(early)
    assert _exit_code(lambda: command([])) == 130
    assert capsys.readouterr().err == "interrupted\n"
