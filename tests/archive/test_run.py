"""Results directories: whole files, the ledger after a kill at any byte, the latest run."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchtune.archive.listing import swept_scenarios
from batchtune.archive.run import (
    DUETS,
    LEDGER,
    SEARCH,
    Run,
    create_run,
    open_run,
    require_writable,
    write_whole,
)
from batchtune.batching.tfserving_file import parse_tfserving_text
from batchtune.errors import ArchiveError, ScenarioError
from batchtune.report.findings import text_of, worded
from batchtune.scenario.reader import format_scenario, read_scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.sweep.sweep import sweep
from batchtune.tune.trials.trial import SearchSummary
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, scenario_of

PROVENANCE = {"host": "test"}
SWEPT = scenario_of(search={"budget": {"trials": 4}, "space": {"max_batch_size": [1, 8, 16]}})


@pytest.fixture(scope="module")
def finished():
    clock = FakeClock()
    target = FakeTarget(clock)
    return list(sweep(SWEPT, target, FakeFleet(target), now_s=clock))


@pytest.fixture(scope="module")
def recommendation(finished):
    return recommend([one.trial for one in finished], scenario=SWEPT)


def new_run(root: Path, **options) -> Run:
    return create_run(scenario_of(), "name: fake\n", root, provenance=PROVENANCE, **options)


@pytest.fixture
def run(tmp_path) -> Run:
    return new_run(tmp_path)


@pytest.fixture
def kept(run, finished) -> Run:
    """A run with its trials, without their requests."""
    for one in finished:
        run.append(one.trial, None)
    return run


def test_trials_and_provenance_come_back_as_they_were_kept(kept, finished):
    back = [one.to_dict() for one in Run(kept.path).ledger()]
    assert json.dumps(back) == json.dumps([one.trial.to_dict() for one in finished])
    assert (kept.notes, kept.provenance()) == ((), PROVENANCE)


def test_a_duet_that_cannot_be_kept_is_told(run):
    run.keep_duet(1, (5e-5, 6e-5))
    whole = {"block": 1, "before_cpu_s": 5e-5, "after_cpu_s": 6e-5}
    assert json.loads((run.path / DUETS).read_text()) == whole
    (run.path / DUETS).unlink()
    (run.path / DUETS).mkdir()
    with pytest.raises(ArchiveError, match=r"block 2 cannot be saved: cannot write .*duets\.jsonl"):
        run.keep_duet(2, (5e-5, 6e-5))


def test_every_request_of_a_trial_is_kept_also_where_the_folder_of_samples_was_removed(run, finished):
    (run.path / "samples").rmdir()
    samples = replace(finished[0].samples, pauses_ns=((5, 6_000_000), (9, 7_000_000)))
    run.append(finished[0].trial, samples)
    back = run.requests(finished[0].trial.number)
    for name in ("due_ns", "sent_ns", "first_byte_ns", "done_ns", "connection_wait_ns", "status", "rows"):
        kept, given = getattr(back, name), getattr(samples, name)
        assert kept.dtype == given.dtype
        assert np.array_equal(kept, given)
    for name in ("pauses_ns", "concurrency", "wall_s"):
        assert getattr(back, name) == getattr(samples, name)


def test_a_trial_that_cannot_be_kept_says_how_to_go_on(run, finished):
    run.append(finished[0].trial, None)
    (run.path / "samples").rmdir()
    (run.path / "samples").write_text("no folder")
    with pytest.raises(ArchiveError, match=r"trial 2 cannot be saved: .*exists") as raised:
        run.append(finished[1].trial, finished[1].samples)
    assert raised.value.hint.endswith(f"--resume {run.path}")
    assert [one.number for one in run.ledger()] == [1]


def test_samples_that_cannot_be_read_are_named(run, finished):
    run.append(finished[0].trial, finished[0].samples)
    (kept,) = (run.path / "samples").iterdir()
    whole = kept.read_bytes()
    foreign = pa.BufferOutputStream()
    pq.write_table(pa.table({"due_ns": [1]}), foreign)
    for corrupt in (b"", b"no parquet", whole[:100], whole[:-1], foreign.getvalue().to_pybytes()):
        kept.write_bytes(corrupt)
        with pytest.raises(ArchiveError, match=kept.name):
            run.requests(finished[0].trial.number)


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_cut_at_any_byte_of_the_last_line_loses_that_trial_only(run, finished, step):
    for trial in (finished[0].trial, finished[1].trial):
        run.append(trial, None)
    ledger = run.path / LEDGER
    whole = ledger.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for length in (*range(start, len(whole), step), len(whole) - 1):
        ledger.write_bytes(whole[:length])
        assert [trial.number for trial in run.ledger()] == [1]
        assert len(run.notes) == (1 if length > start else 0)
    assert f"{LEDGER}:2" in run.notes[0]
    run.append(finished[1].trial, None)
    assert ledger.read_bytes() == whole
    assert run.ledger()[1].number == 2


def test_a_run_is_read_from_anywhere_also_when_its_files_are_gone(tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    (asked / "model" / "1").mkdir(parents=True)
    (asked / "times.csv").write_text("offset_s\n0.0\n0.5\n")
    (asked / "scenario.yaml").write_text(
        "name: traced\ntarget: {model: ./model}\nobjective: latency\nslo: {p95: 20ms}\n"
        "load: {arrivals: trace, trace: {file: times.csv}}\nsearch: {space: {max_batch_size: [1, 2]}}\n"
    )
    monkeypatch.chdir(tmp_path)
    scenario = read_scenario("asked/scenario.yaml")
    run = create_run(scenario, format_scenario(scenario), tmp_path / "results", provenance=PROVENANCE)
    monkeypatch.chdir("/")
    assert run.scenario() == scenario
    assert run.scenario().target.model == str(asked / "model")
    assert read_scenario(run.path / "scenario.yaml") == scenario
    (asked / "times.csv").unlink()
    assert run.scenario() == scenario
    with pytest.raises(ScenarioError, match="no such file"):
        read_scenario(run.path / "scenario.yaml")


def test_a_corrupt_line_is_refused_with_its_place(kept):
    ledger = kept.path / LEDGER
    lines = ledger.read_bytes().split(b"\n")
    for corrupt in (
        b"{",
        b"",
        b"\xff\xfe",
        b"[]",
        b"17",
        b'{"schema_version": 99}',
        b'{"schema_version": 1}',
        re.sub(rb'"misses":\d+', b'"misses":"many"', lines[1]),
        re.sub(rb'"errors":{[^}]*}', b'"errors":[]', lines[1]),
    ):
        ledger.write_bytes(b"\n".join([lines[0], corrupt, *lines[2:]]))
        with pytest.raises(ArchiveError, match=rf"{LEDGER}:2: not a trial"):
            kept.ledger()


def test_a_killed_writer_leaves_a_readable_ledger(run, finished):
    """The writer is killed while it appends as fast as it can; whatever is there is read."""
    run.append(finished[0].trial, None)
    script = (
        "import sys; from pathlib import Path; from batchtune.archive.run import Run\n"
        "run = Run(Path(sys.argv[1])); trial = run.ledger()[0]\n"
        "print('ready', flush=True)\n"
        "while True: run.append(trial, None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, run.path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"ready\n"
        while (run.path / LEDGER).read_bytes().count(b"\n") < 2:
            pass
        writer.kill()
    trials = run.ledger()
    assert len(trials) >= 2
    assert all(one.number == 1 for one in trials)


def test_the_latest_run_is_found_across_scenarios_and_reference_runs_are_not_it(tmp_path):
    for name, hour in (("a", 3), ("b", 5), ("reference", 9), ("a", 4)):
        at = datetime(2026, 1, 1, hour, tzinfo=UTC)
        create_run(scenario_of(name=name), "", tmp_path, provenance=PROVENANCE, now=at)
    assert open_run(root=tmp_path).path.parent.name == "b"
    assert swept_scenarios(tmp_path) == ["a", "b"]
    assert open_run(tmp_path / "a").path.name.startswith("20260101T040000Z-")
    with pytest.raises(ArchiveError, match="is not a run"):
        open_run(tmp_path / "nowhere")


def test_no_run_at_all_and_a_folder_that_is_no_run_are_told_apart(tmp_path):
    with pytest.raises(ArchiveError, match="no run under"):
        open_run(root=tmp_path)
    create_run(scenario_of(), "", tmp_path / "loads", provenance=PROVENANCE, kind="load")
    with pytest.raises(ArchiveError, match="no sweep under ") as caught:
        open_run(root=tmp_path / "loads")
    assert "batchtune runs" in caught.value.hint
    new_run(tmp_path)
    with pytest.raises(ArchiveError, match="is not a run") as caught:
        open_run(tmp_path)
    assert "<UTC>" in caught.value.hint


def test_the_recommendation_and_its_parameters_are_kept(run, recommendation):
    run.write_recommendation(recommendation)
    assert run.recommendation().to_dict() == recommendation.to_dict()
    parameters = parse_tfserving_text((run.path / "batching_parameters.txt").read_text())
    assert parameters == recommendation.configuration.batching
    assert not list(run.path.glob(".*.tmp"))


def test_a_corrupt_model_config_leaves_the_earlier_recommendation_as_it_was(run, recommendation):
    run.write_recommendation(recommendation)
    (run.path / "model_config.json").write_text("{")
    with pytest.raises(ArchiveError, match=r"model_config\.json: not JSON"):
        run.write_recommendation(recommendation, {"another": "document"})
    assert run.recommendation().to_dict() == recommendation.to_dict()


def test_a_recommendation_with_worded_findings_reads_as_it_did(run, recommendation):
    """As the file of a command, and of every older run, has them."""
    document = worded(recommendation.to_dict())
    assert isinstance(document["reason"], str)
    run.write_recommendation(recommendation, document)
    again = run.recommendation()
    assert worded(again.to_dict()) == document
    assert text_of(again.reason) == document["reason"]


def test_a_corrupt_recommendation_is_refused(run):
    for text in ("", "{", "[]", "{}", '{"schema_version": 4}', '{"schema_version": 5}'):
        (run.path / "recommendation.json").write_text(text)
        with pytest.raises(ArchiveError, match=r"recommendation\.json"):
            run.recommendation()


def test_a_recommendation_of_an_older_schema_is_made_anew_from_the_trials(tmp_path, finished, recommendation):
    run = create_run(SWEPT, format_scenario(SWEPT), tmp_path, provenance=PROVENANCE)
    for one in finished:
        run.append(one.trial, None)
    (run.path / "recommendation.json").write_text('{"schema_version": 2, "near_best": {"probability": 0.9}}')
    assert run.recommendation() == recommendation


def test_reading_a_run_and_recommending_imports_nothing_heavy(kept):
    script = (
        "import sys; from pathlib import Path; from batchtune.archive.run import open_run\n"
        "from tests.tune.tune_fakes import scenario_of\n"
        "from batchtune.tune.answer.recommend import recommend\n"
        "scenario = scenario_of(search={'space': {'max_batch_size': [1, 8, 16]}})\n"
        "run = open_run(Path(sys.argv[1])); run.write_recommendation(recommend(run.ledger(), scenario=scenario))\n"
        "print(sorted({'optuna', 'pandas', 'pyarrow', 'tensorflow', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, kept.path],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "[]\n", done.stderr


def test_what_the_search_says_of_itself_is_kept(run):
    assert run.search() is None
    curve = {1: 0.001, 16: 0.004}
    summary = SearchSummary(strategy="guided", curve=curve, proposals={"rule": 1}, space_size=30)
    run.write_search(summary)
    assert Run(run.path).search() == summary


def test_a_sweep_that_goes_on_adds_its_time_to_what_was_spent_before():
    earlier = SearchSummary(strategy="guided", seconds_by_phase={"scouting": 4.0, "comparing": 1.0})
    later = SearchSummary(strategy="guided", seconds_by_phase={"comparing": 2.0, "confirming": 3.0})
    spent = later.continuing(earlier).seconds_by_phase
    assert dict(spent) == {"scouting": 4.0, "comparing": 3.0, "confirming": 3.0}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": 1}'])
def test_a_corrupt_account_of_the_search_is_named_with_what_to_do(run, text):
    (run.path / SEARCH).write_text(text)
    with pytest.raises(ArchiveError) as caught:
        run.search()
    assert caught.value.message.startswith(str(run.path / SEARCH))
    assert "remove it" in caught.value.hint


HOLDING = """
import sys
from pathlib import Path
from batchtune.archive.run import Run
Run(Path(sys.argv[1])).hold()
print("held", flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time_measures_for_a_run(tmp_path: Path) -> None:
    run, command = Run(tmp_path), [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ArchiveError, match=f"is in use by pid {other.pid}"):
            run.hold()
        other.kill()
    run.hold()
    run.hold()


def refusing(number: int):
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_run_that_cannot_be_locked_on_a_full_disk_is_left_unlocked(tmp_path, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr("batchtune.archive.run.os.write", refusing(errno.ENOSPC))
        with pytest.raises(ArchiveError, match=r"cannot write .*lock: No space left on device"):
            Run(tmp_path).hold()
    Run(tmp_path).hold()


def test_a_folder_that_is_mounted_read_only_is_told_in_a_line(tmp_path, monkeypatch):
    for name in ("open", "unlink"):
        monkeypatch.setattr(Path, name, refusing(errno.EROFS))
    with pytest.raises(ArchiveError, match=r"cannot write .*: Read-only file system"):
        write_whole(tmp_path / "recommendation.json", b"{}")


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    require_writable(tmp_path / "new" / "results")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    with pytest.raises(
        ArchiveError, match=r"cannot make .*/file/results: .*/file: it is no folder"
    ) as caught:
        require_writable(tmp_path / "file" / "results")
    assert "--results" in caught.value.hint
