"""The history of checks: read, split at its changes, and printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchtune.check.history import HISTORY, are_equal, read_history, series_of, track_record
from batchtune.cli.commands.run_check import run_history
from batchtune.errors import ArchiveError, UsageError
from batchtune.report.check_text import change_lines, print_history, record_lines
from tests.target.test_model_files import write_onnx_naming
from tests.tune.tune_fakes import scenario_of


def line(number: int, p95_s: float, **changes) -> dict:
    given = {
        "schema_version": 1,
        "utc": f"2026-11-{number + 1:02d}T12:00:00+00:00",
        "scenario": "gate",
        "verdict": "OK",
        "gates": {"p95": {"before": 0.01, "after": p95_s, "change": None, "state": "ok"}},
        "commit": f"{number:040d}",
        "cpu": "EPYC",
    }
    return {**given, **changes}


LINES = [line(number, (0.010 if number < 12 else 0.012) + 0.0001 * (number % 5)) for number in range(24)]


@pytest.fixture
def root(tmp_path):
    texts = [json.dumps(checked) for checked in LINES]
    (tmp_path / HISTORY).write_text("\n".join([*texts[:3], '{"cut', *texts[3:]]) + "\n")
    return tmp_path


def test_a_change_is_told_with_its_day_and_commit(root, capsys):
    lines = read_history(root)
    assert len(lines) == 24
    (told, worth) = change_lines(series_of(lines))
    assert told == "p95 ms 10.1 → 12.2 (+20.2 %) from 2026-11-13 12:00 on, commit 000000000."
    assert worth.startswith("1 figure analyzed")
    print_history(lines, series_of(lines))
    assert capsys.readouterr().out.count("OK") == 24


def test_without_commits_the_table_has_no_column_of_them(capsys):
    for commit in ("a" * 40, None):
        print_history([line(1, 0.01, commit=commit)], [])
        assert ("commit" in capsys.readouterr().out.splitlines()[0]) == (commit is not None)


def test_another_cpu_is_another_series_and_few_checks_show_nothing():
    lines = [line(number, 0.01, cpu="Xeon" if number % 2 else "EPYC") for number in range(22)]
    assert [len(series.values) for series in series_of(lines)] == [11, 11]
    (told,) = change_lines(series_of(lines))
    assert told.startswith("Changes: unknown; that takes 12 checks")
    told, worth = change_lines(series_of([line(number, 0.01) for number in range(12)]))
    assert told == "No change was found."
    assert worth.startswith("1 figure analyzed")


def test_it_says_how_many_failures_were_confirmed_or_dismissed_later():
    told: list[tuple[str | None, str]] = [(commit, "REGRESSED") for commit in "abc"]
    told += [
        ("a", "INVALID"),
        ("a", "OK"),
        ("b", "REGRESSED"),
        ("c", "OK"),
        (None, "REGRESSED"),
        (None, "OK"),
    ]
    lines = [line(at, 0.01, commit=commit, verdict=verdict) for at, (commit, verdict) in enumerate(told, 1)]
    lines[6]["scenario"] = "another"
    record = track_record(lines)
    assert (record["failures"], record["confirmed"], record["dismissed"]) == (5, 1, 1)
    (told, alarms) = record_lines(record)
    assert told == (
        "Failures: 5 (1 confirmed and 1 dismissed by a later check of the same commit, 3 not checked again)."
    )
    assert alarms == "False alarms: unknown; no check compared two equal sides."


def test_its_own_rate_of_false_alarms_is_that_of_equal_sides():
    """0 of 20: at most 13.9 % by 1 - 0.05 ** (1 / 20); one of 20: at most 21.6 %."""
    equal = [line(number, 0.01, unchanged=True) for number in range(20)]
    record = track_record([*equal, line(20, 0.01, verdict="REGRESSED")])
    assert (record["unchanged"], record["false_alarms"], record["failures"]) == (20, 0, 1)
    assert record["rate_most"] == pytest.approx(0.139, abs=0.0005)
    equal[3]["verdict"] = "REGRESSED"
    record = track_record(equal)
    assert (record["false_alarms"], record["failures"]) == (1, 0)
    assert record["rate_most"] == pytest.approx(0.216, abs=0.0005)
    assert record_lines(record)[1] == (
        "False alarms: 1 of 20 checks of equal sides failed: 5 %, at most 21.6 % (95 % confidence)."
    )


def side(model: Path, **fixed):
    scenario = scenario_of()
    target = scenario.target.model_copy(update={"model": str(model)})
    return scenario.model_copy(update={"target": target, "fixed": {**scenario.fixed, **fixed}})


def test_sides_are_equal_that_differ_in_the_place_of_the_same_files_alone(tmp_path):
    one, same, other = (tmp_path / name for name in "abc")
    for folder, text in ((one, "one"), (same, "one"), (other, "two")):
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.onnx").write_text(text)
    assert are_equal(side(one), side(same))
    assert not are_equal(side(one), side(other))
    assert not are_equal(side(one), side(same, max_batch_size=3))
    (same / "1" / "more").write_text("")
    assert not are_equal(side(one), side(same))
    assert not are_equal(side(tmp_path / "nowhere"), side(tmp_path / "nothing"))


def test_sides_of_one_graph_are_not_equal_where_the_weights_that_it_names_differ(tmp_path):
    one, same, other = (tmp_path / name for name in "abc")
    for folder, text in ((one, "one"), (same, "one"), (other, "two")):
        folder.mkdir()
        write_onnx_naming(folder / "net.onnx", "weights.bin")
        (folder / "weights.bin").write_text(text)
    assert are_equal(side(one / "net.onnx"), side(same / "net.onnx"))
    assert not are_equal(side(one / "net.onnx"), side(other / "net.onnx"))


def test_no_history_and_one_of_the_future_are_told(tmp_path, root):
    with pytest.raises(ArchiveError, match="no check under"):
        read_history(tmp_path / "none")
    (root / HISTORY).write_text(json.dumps(line(1, 0.01, schema_version=9)) + "\n")
    with pytest.raises(ArchiveError, match="schema_version 9"):
        read_history(root)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(line(1, 0.01, gates=[])),
        json.dumps(line(1, 0.01, gates={"p95": 3})),
        json.dumps(line(1, 0.01, gates={"p95": {"after": "fast"}})),
        json.dumps(line(1, 0.01, scenario=["gate"])),
        json.dumps(line(1, 0.01, verdict=None)),
        "[" * 100_000,
        "<<<<<<< HEAD",
    ],
)
def test_a_line_that_somebody_edited_is_passed_over(root, capsys, text):
    with (root / HISTORY).open("a") as file:
        file.write(text + "\n")
    assert run_history(root, scenario=None, json=False) == 0
    assert len(read_history(root)) == 24


def test_a_scenario_that_was_never_checked_is_told_with_those_that_were(root):
    with pytest.raises(UsageError, match="no check of 'gat'") as raised:
        run_history(root, scenario="gat", json=False)
    assert raised.value.hint == "there are: gate"


def test_json_has_lines_and_series(root, capsys):
    assert run_history(root, scenario="gate", json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["checks"]) == 24
    assert document["series"][0]["changes"][0]["at"] == 12


def test_a_change_from_nothing_has_no_share_and_void_checks_do_not_count():
    lines = [
        line(number, 0.01, gates={"errors": {"after": 0.0 if number < 12 else 0.02 + 0.001 * number}})
        for number in range(24)
    ]
    void = [line(25, 0.5, verdict=verdict) for verdict in ("INVALID", "INCOMPARABLE")]
    (series,) = series_of([*lines, *void])
    assert len(series.values) == 24
    told, *_ = change_lines([series])
    assert told.startswith("errors % 0 → ")
    assert "nan" not in told
    assert "(" not in told
