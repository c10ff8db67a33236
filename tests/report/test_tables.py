"""Tables: as wide as the stream lets them be, whole figures, no empty column."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.archive.listing import runs_under
from batchtune.archive.run import create_run
from batchtune.archive.table import trial_table
from batchtune.cli.commands.report import run_trials
from batchtune.measure.quantiles import Estimate
from batchtune.report.check_text import print_history
from batchtune.report.comparison import print_comparison, print_noise
from batchtune.report.load_points import figure_cells, print_points
from batchtune.report.run_tables import brief_labels, print_runs, print_trials
from batchtune.report.tables import aligned, latency, print_rows, rows_that_fit
from batchtune.scenario.reader import format_scenario, read_kept_variants
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.compare.result import noise_floor, summarise
from tests.cli.in_process import answered
from tests.report.pages import (
    Terminal,
    compared_run,
    load_trial,
    loaded_run,
    quickstart_run,
    rising_rates,
    two_arms_run,
)
from tests.tune.answer.ledgers import SCENARIO
from tests.tune.tune_fakes import remeasured

GATES = ("throughput", "p50", "p95", "p99", "errors", "cpu", "gpu", "memory", "gpu_memory", "startup")


def of_rows(rows: list[list[str]], stream: io.StringIO | None = None, **options) -> list[str]:
    stream = stream or io.StringIO()
    with redirect_stdout(stream):
        print_rows(rows, **options)
    return stream.getvalue().splitlines()


def test_brackets_and_colons_of_a_cell_are_text_and_no_row_is_cut_off():
    names = ("m[int8]", "[/]", ":warning:", "x" * 300)
    text = "\n".join(of_rows([["variant", "p95 [ms]"], *([name, "3.36 [2.10, 5.00]"] for name in names)]))
    assert text.count("3.36 [2.10, 5.00]") == 4
    for shown in ("p95 [ms]", *names):
        assert shown in text


def test_a_noisy_trial_shows_its_verdict_with_the_noise_behind_it(capsys):
    """In an older run, that has no verdict but NOISY, that alone."""
    noisy = load_trial(1, clients=4, throughput=100.0, verdict="NOISY")
    known = remeasured(noisy, decision="FAIL")
    table = trial_table([known, noisy, load_trial(3, clients=4, throughput=100.0, verdict="PASS")])
    assert table["verdict"] == ["NOISY", "NOISY", "PASS"]
    assert table["decision"] == ["FAIL", "NOISY", "PASS"]
    print_trials(table, sort=None, output="table")
    shown = [line.rpartition("  ")[2].strip() for line in capsys.readouterr().out.splitlines()[2:5]]
    assert shown == ["FAIL NOISY", "NOISY", "PASS"]
    assert figure_cells(known.measurement, ["SLO"]) == ["FAIL NOISY"]


def test_a_trial_that_failed_is_called_so_and_a_run_without_trials_says_so(tmp_path, capsys):
    measured = load_trial(1, clients=4, throughput=100.0, verdict="PASS")
    failed = replace(measured, number=2, state="failed", failure="the server died", measurement=None)
    for trials, words in (([measured, failed], ["PASS", "failed"]), ([failed], ["failed"])):
        print_trials(trial_table(trials), sort=None, output="table")
        lines = capsys.readouterr().out.splitlines()[2 : 2 + len(trials)]
        assert [line.split()[-1] for line in lines] == words
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path, provenance={})
    run_trials(run.path, sort=None, output="table", results=tmp_path)
    assert capsys.readouterr() == ("", f"no trial is finished in {run.path}\n")


def test_a_narrow_terminal_loses_the_least_wanted_columns_first_and_no_digit():
    rows = [["clients", "p50 ms", "p95 ms"], ["4", "5.61 [4.67, 6.75]", "9.35"]]
    full = len("clients") + 2 + len("5.61 [4.67, 6.75]") + 2 + len("p95 ms")
    assert rows_that_fit(rows, width=full, dispensable=[1]) == rows
    assert rows_that_fit(rows, width=full - 1, dispensable=[1]) == [["clients", "p95 ms"], ["4", "9.35"]]
    assert rows_that_fit(rows, width=1, dispensable=[1]) == [["clients", "p95 ms"], ["4", "9.35"]]


def test_a_table_says_which_columns_it_leaves_out_and_where_they_are(monkeypatch):
    rows = [["clients", "p50 ms", "p95 ms"], ["4", "5.61 [4.67, 6.75]", "9.35"]]
    monkeypatch.setenv("COLUMNS", "20")
    *_, note = of_rows(rows, Terminal(), dispensable=("p50 ms",), elsewhere="--csv has them")
    assert note == "Columns that do not fit: p50 ms; --csv has them."
    assert "Not shown" not in " ".join(of_rows(rows, dispensable=("p50 ms",)))


def test_numbers_stand_to_the_right_words_to_the_left_and_empty_columns_stay_away():
    rows = [["trial", "source", "p90 ms", "gain"], ["1", "grid", "–", "×1.10"], ["10", "rule", "–", ""]]
    head, _, *lines = of_rows(rows)
    assert head == "trial  source   gain"
    assert lines == ["1      grid    ×1.10", "10     rule"]
    assert aligned([["a", "n"], ["b", "−2"], ["c", "10"]])[1] == "b  −2"


def test_what_all_configurations_have_in_common_stands_below_the_table():
    labels = ["no batching", "max_batch_size=8 num_batch_threads=1", "max_batch_size=4 num_batch_threads=1"]
    assert brief_labels(labels) == (["no batching", "size 8", "size 4"], "1 thread")
    assert brief_labels(labels[:2]) == (["no batching", "size 8 · 1 thread"], "")
    within = ["max_batch_size=8", "max_batch_size=8 num_batch_threads=1"]
    assert brief_labels(within) == (["size 8", "size 8 · 1 thread"], "")


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.0066, 0.006, 0.0075, "6.60 [6.00, 7.50] ms"),
        (0.0066, 0.006, math.inf, "6.60 [≥ 6.00] ms"),
        (math.inf, 0.5, math.inf, "≥ 500 ms"),
        (math.inf, math.inf, math.inf, "unbounded"),
        (1.5, -math.inf, math.inf, "1.50 s"),
        (1.5, math.nan, math.nan, "1.50 s"),
    ],
)
def test_an_interval_without_an_end_names_the_one_it_has(value, low, high, text):
    assert latency(Estimate(value=value, low=low, high=high)) == text


def print_history_of_all_gates() -> None:
    gates = {name: {"before": 0.01, "after": 0.0123456, "change": None, "state": "ok"} for name in GATES}
    line = {"utc": "2026-11-01T12:00:00+00:00", "scenario": "quickstart", "verdict": "REGRESSED"}
    print_history([{**line, "gates": gates, "commit": "a" * 40}] * 2, [])


def tables_of(root: Path) -> dict[str, Callable[[], object]]:
    swept, compared = quickstart_run(root), compared_run(root)
    variants = [
        Variant(name=name, scenario=scenario)
        for name, scenario in read_kept_variants(compared.path / "scenario.yaml").items()
    ]
    alike = two_arms_run(root / "alike", ("a", "b"), blocks=8, gain=1.0, kind="noise")
    arms = [Variant(name=name, scenario=SCENARIO) for name in ("a", "b")]
    return {
        "trials": lambda: print_trials(swept.trials(), sort=None, output="table"),
        "runs": lambda: print_runs(runs_under(root), json=False),
        "load": lambda: print_points(loaded_run(root / "load", rising_rates()).ledger()),
        "compare": lambda: print_comparison(summarise(compared.ledger(), variants), path=Path("results/a")),
        "noise": lambda: print_noise(noise_floor(alike.ledger(), arms), path=Path("results/a")),
        "history": print_history_of_all_gates,
        "recommend": lambda: print(
            answered("recommend", swept.path, "--why", cwd=root).stdout.partition("\nNext ")[0],
        ),
    }


@pytest.mark.parametrize("name", ["trials", "runs", "load", "compare", "noise", "history", "recommend"])
def test_no_table_is_wider_than_a_log_where_there_is_no_terminal(name: str, tmp_path: Path, capsys):
    tables_of(tmp_path)[name]()
    lines = capsys.readouterr().out.splitlines()
    assert any(set(line) == {"─"} for line in lines)
    assert max(map(len, lines)) <= 100, lines


@pytest.mark.parametrize(("verdict", "words"), [("established", "confirmed"), ("open", "unconfirmed")])
def test_the_list_of_runs_has_the_words_of_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verdict: str, words: str
) -> None:
    quickstart_run(tmp_path)
    (entry,) = runs_under(tmp_path)
    print_runs([replace(entry, verdict=verdict)], json=False)
    assert f" {words} " in (listed := capsys.readouterr().out)
    assert verdict not in listed
    print_runs([replace(entry, verdict=verdict)], json=True)
    assert f'"verdict": "{verdict}"' in capsys.readouterr().out
