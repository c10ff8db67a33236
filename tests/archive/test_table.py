"""A run as tables: pandas frames with units in their columns, and what `batchtune runs` and `trials` print of them."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from batchtune.archive.listing import runs_under
from batchtune.archive.run import RECOMMENDATION, Run, create_run, open_run
from batchtune.archive.table import COMPANY_COLUMNS, TRIAL_COLUMNS, samples_frame, trial_table
from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.cli.app import app
from batchtune.errors import ArchiveError, UsageError
from batchtune.load.samples import NEVER_NS, Samples, Status
from batchtune.measure.measurement import TokenFigures
from batchtune.measure.quantiles import Estimate
from batchtune.report.run_tables import print_trials, short_label
from batchtune.scenario.reader import format_scenario
from batchtune.tune.answer.recommend import recommend
from tests.tune.answer.ledgers import SCENARIO, helping_ledger, streamed_ledger
from tests.tune.tune_fakes import asked, planted

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path, provenance={})
    for trial in helping_ledger():
        run.append(trial, None)
    return run


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def of_three() -> Samples:
    """One good request, one refused, one that never ended."""
    return Samples(
        due_ns=np.array([0, 1_000_000, 2_000_000]),
        sent_ns=np.array([500_000, 1_000_000, NEVER_NS]),
        first_byte_ns=np.array([3_000_000, 2_000_000, NEVER_NS]),
        done_ns=np.array([4_000_000, 2_000_000, NEVER_NS]),
        connection_wait_ns=np.array([200_000, 0, 0]),
        status=np.array([Status.OK, Status.QUEUE_FULL, Status.UNSENT], dtype=np.uint8),
        rows=np.array([1, 1, 2], dtype=np.int32),
        started_ns=0,
        wall_s=0.01,
        client_cpu_s=0.001,
        client_cores=1,
    )


def test_the_frame_of_trials_says_what_the_ledger_says(run):
    frame, ledger = open_run(str(run.path)).trials(), run.ledger()
    assert tuple(frame.columns) == TRIAL_COLUMNS
    assert frame.number.tolist() == [trial.number for trial in ledger]
    first, row = ledger[0], frame.iloc[0]
    assert row.p95_ms == pytest.approx(first.measurement.latency_s["p95"].value * 1e3)
    assert row.p95_ms_high == pytest.approx(first.measurement.latency_s["p95"].high * 1e3)
    assert row.throughput_rps == first.measurement.throughput_rps.value
    batched = frame[frame.batching.eq(True)]
    assert batched.max_batch_size.dtype == "Int64"
    assert set(frame[frame.batching.eq(False)].max_batch_size.isna()) == {True}


def test_a_run_without_trials_is_an_empty_frame_with_the_same_columns(tmp_path):
    frame = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path, provenance={}).trials()
    assert (tuple(frame.columns), len(frame)) == (TRIAL_COLUMNS, 0)


def test_the_frame_of_requests_has_latency_from_due_and_the_clients_own_lag():
    frame = samples_frame(of_three())
    assert frame.status.tolist() == ["OK", "QUEUE_FULL", "UNSENT"]
    assert frame.due_s.tolist() == [0.0, 0.001, 0.002]
    assert frame.latency_ms.tolist()[:2] == [4.0, 1.0]
    assert np.isnan(frame.latency_ms[2])
    assert frame.send_lag_ms[0] == pytest.approx(0.3)


def test_samples_of_a_run_are_kept_requests(run):
    trial = run.ledger()[0]
    run.append(trial, of_three())
    assert len(run.samples(trial.number)) == 3
    with pytest.raises(ArchiveError, match="no requests of trial 999 are stored") as raised:
        run.samples(999)
    assert raised.value.message.count(str(run.path)) == 1


def test_runs_are_listed_newest_first_with_what_they_recommend(run):
    before = next(iter(runs_under(run.path.parents[1])))
    assert before.verdict == "no recommendation"
    run.write_recommendation(recommend(run.ledger(), scenario=SCENARIO))
    broken = run.path.parent / "20990101T000000Z-abcdef"
    broken.mkdir()
    (broken / "trials.jsonl").write_text("")
    newest, entry = runs_under(run.path.parents[1])
    assert newest.verdict.startswith("unreadable: ")
    assert entry.verdict in ("established", "open")
    assert entry.recommended.startswith("max_batch_size=")
    assert entry.trials == len(run.ledger())
    document = json.loads(invoke("runs", "--results", str(run.path.parents[1]), "--json"))
    assert [each["id"] for each in document["runs"]] == [broken.name, run.path.name]
    assert run.path.name in invoke("runs", "--results", str(run.path.parent))


FLAGS = {"batching": None, "flags": [1]}


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("search", []), ("promises", [1]), *(("configuration", one) for one in ("x", {"batching": "x"}, FLAGS))],
)
def test_a_run_whose_recommendation_cannot_be_read_is_listed_with_its_error(run, key, wrong):
    run.write_recommendation(recommend(run.ledger(), scenario=SCENARIO))
    path = run.path / RECOMMENDATION
    path.write_text(json.dumps({**json.loads(path.read_text()), key: wrong}))
    (entry,) = runs_under(run.path.parents[1])
    assert entry.verdict.startswith("unreadable: ")
    assert "not a recommendation" in entry.verdict


def test_without_runs_there_is_an_error_and_an_empty_list_in_json(tmp_path):
    assert json.loads(invoke("runs", "--results", str(tmp_path), "--json")) == {"runs": []}
    with pytest.raises(ArchiveError):
        invoke("runs", "--results", str(tmp_path))


def test_trials_are_sorted_best_first(run):
    for sort, name, falls in (
        ("p95", "p95_ms", False),
        ("throughput", "throughput_rps", True),
        ("capacity", "objective", True),
        ("objective", "objective", True),
    ):
        lines = csv.DictReader(io.StringIO(invoke("trials", str(run.path), "--csv", "--sort", sort)))
        values = [float(line[name]) for line in lines if line[name]]
        assert values == sorted(values, reverse=falls)
    with pytest.raises(UsageError, match="no such column"):
        invoke("trials", str(run.path), "--sort", "beauty")


def test_a_trial_at_a_rate_has_a_dash_for_clients_beside_probes_that_have_some():
    probe, at_rate = (planted(number, throughput=100, p95_s=0.01) for number in (1, 2))
    stream = io.StringIO()
    table = trial_table([replace(probe, concurrency=1), replace(at_rate, concurrency=None, rate_rps=100.0)])
    with redirect_stdout(stream):
        print_trials(table, sort=None, output="markdown")
    *_, first, second = stream.getvalue().splitlines()
    assert (first.split(" | ")[3:5], second.split(" | ")[3:5]) == (["1", "–"], ["–", "100"])
    assert short_label("num_batch_threads=1") == "1 thread"


def test_a_trial_that_failed_has_the_rate_that_was_asked_for():
    trial = asked(planted(1, throughput=1.0, p95_s=1.0, failure="the server exited with 1"), rate_rps=47.5)
    table = trial_table([replace(trial, concurrency=None)])
    assert (table["rate_rps"], table["concurrency"]) == ([47.5], [None])


def test_of_streams_first_tokens_and_gaps_stand_before_whole_answers():
    """In each format; no other run has the columns."""
    table = trial_table(streamed_ledger())
    assert table["ttft_p95_ms"][0] == pytest.approx(40.0)
    assert table["itl_p99_ms_high"][0] == pytest.approx(8.0)
    stream = io.StringIO()
    with redirect_stdout(stream):
        print_trials(table, sort="ttft_p95", output="markdown")
    head, _, first, *_ = stream.getvalue().splitlines()
    assert "| requests/s | ttft_p95 ms | itl_p99 ms | p50 ms | p95 ms |" in head
    assert "| 40 | 8 | 600 |" in first
    other = trial_table([planted(1, throughput=100, p95_s=0.01)])
    assert not [name for name in other if name.startswith(("ttft", "itl"))]
    mixed = trial_table([*streamed_ledger(), planted(7, throughput=1, p95_s=1, failure="out of memory")])
    assert mixed["ttft_p95_ms"][-1] is None


def test_of_streams_with_token_counts_these_are_columns():
    (trial, *_) = streamed_ledger()
    rate = Estimate(value=300.0, low=290.0, high=310.0)
    tokens = TokenFigures(output_per_s=rate, prompt_mean=90.0, output_mean=math.nan, untold_ratio=0.0)
    table = trial_table([replace(trial, measurement=replace(trial.measurement, tokens=tokens))])
    assert (table["output_tokens_per_s"], table["output_tokens_per_s_low"]) == ([300.0], [290.0])
    assert (table["prompt_tokens_mean"], table["output_tokens_mean"]) == ([90.0], [None])


def test_every_format_has_every_trial(run, tmp_path):
    count = len(run.ledger())
    with pytest.raises(UsageError, match="--csv and --json exclude each other"):
        invoke("trials", str(run.path), "--csv", "--json")
    assert len(json.loads(invoke("trials", str(run.path), "--json"))) == count
    markdown = invoke("trials", str(run.path), "--markdown").splitlines()
    assert len(markdown) == count + 2
    assert len({line.count("|") for line in markdown}) == 1
    done = CliRunner().invoke(app, ["trials", str(run.path), "--parquet"], catch_exceptions=False)
    assert len(pd.read_parquet(io.BytesIO(done.stdout_bytes))) == count
    assert "1" in invoke("trials", str(run.path))


def test_only_frames_need_pandas(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for output in ("--csv", "--json", "--markdown", "--sort=p95"):
        assert invoke("trials", str(run.path), output)
    with pytest.raises(ArchiveError, match="pandas") as raised:
        run.trials()
    assert raised.value.hint == "pip install 'batchtune[pandas]'"


def test_of_several_models_each_trial_says_which_beside_whom_and_at_how_many_times_the_rates(tmp_path):
    shared, own = BatchingParameters(num_batch_threads=2), BatchingParameters(max_batch_size=4)
    configuration = Configuration(batching=shared, models=(("ranker", own), ("reader", own)))
    whole = replace(asked(helping_ledger()[0], configuration=configuration, scale=1.5), measurement=None)
    parts = {name: replace(whole, number=at, model=name) for at, name in enumerate(("ranker", "reader"), 1)}
    flood = asked(replace(whole, number=3), reason="flood of ranker", source="load")
    flooded = {"reader": replace(flood, number=3, model="reader")}
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path, provenance={})
    for trial in (replace(whole, number=1, parts=parts), replace(flood, parts=flooded)):
        run.append(trial, None)
    frame = run.trials()
    assert tuple(frame.columns[frame.columns.get_loc("model") :][: len(COMPANY_COLUMNS)]) == COMPANY_COLUMNS
    assert set(frame.columns) == {*TRIAL_COLUMNS, *COMPANY_COLUMNS}
    assert frame[list(COMPANY_COLUMNS)].values.tolist() == [
        ["ranker", 1, "together", 1.5],
        ["reader", 1, "together", 1.5],
        ["reader", 3, "flood of ranker", 1.5],
    ]
    assert frame.max_batch_size.tolist() == [4, 4, 4]
    assert frame.configuration[0] == "max_batch_size=4 num_batch_threads=2"
    head, _, row, *_ = invoke("trials", str(run.path), "--markdown").splitlines()
    assert "| trial | source | model | load | rates | configuration |" in head
    assert "| ranker | together | ×1.5 | size 4 · 2 threads |" in row
    assert "reader" in invoke("trials", str(run.path))


def test_the_notebook_example_of_the_manual_runs(run, monkeypatch):
    text = re.search(
        r"```python\n(from batchtune\.archive.*?)```", (ROOT / "results" / "README.md").read_text(), re.DOTALL
    )
    lines = [line for line in text.group(1).splitlines() if "matplotlib" not in line]
    for trial in run.ledger():
        run.append(trial, of_three())
    run.write_recommendation(recommend(run.ledger(), scenario=run.scenario()))
    code = "\n".join(lines).replace("results/quickstart", str(run.path))
    exec(compile(code, "results/README.md", "exec"), {})
