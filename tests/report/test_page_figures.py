"""What the figures of the page draw and say of a planted ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchtune.archive.run import create_run
from batchtune.load.samples import Samples
from batchtune.report.html.contender_figures import (
    LATEST,
    SweepResults,
    brackets,
    history,
    pareto,
    rates,
    sweep_results_of,
)
from batchtune.report.html.shell.document import render
from batchtune.report.html.shell.drawing import Section, finite
from batchtune.report.html.shell.latency_figures import distribution, sizes, split
from batchtune.report.html.sweep_page import heat_map, service_time, slices, sweep_document
from batchtune.scenario.reader import format_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.trials.trial import Trial
from tests.report.pages import document_of, latencies
from tests.tune.answer.ledgers import (
    BATCH_14,
    CAPACITY,
    SCENARIO,
    STREAMED,
    at_rate,
    capacity_ledger,
    helping_ledger,
    loop,
    streamed_ledger,
)
from tests.tune.tune_fakes import asked, exactly, planted, remeasured


def account_with(
    root: Path, trials: Sequence[Trial], scenario: Scenario = SCENARIO, samples: Samples | None = None
) -> SweepResults:
    run = create_run(scenario, format_scenario(scenario), root=root, provenance={})
    for trial in trials:
        run.append(trial, samples)
    return sweep_results_of(run)


def account_of_server(root: Path, batching: dict[str, Any] | None = BATCH_14, **counted: Any) -> SweepResults:
    """Of one trial, in whose second the server counted this."""
    server = ServerActivity(duration_s=1.0, **counted)
    return account_with(root, [planted(1, batching=batching, throughput=9.0, p95_s=0.01, server=server)])


def traces(section: Section) -> list[dict[str, Any]]:
    assert section.figure is not None
    return section.figure.data


def test_a_bracket_reaches_from_the_rate_held_to_the_rate_missed(tmp_path):
    account = account_with(tmp_path, capacity_ledger(), CAPACITY)
    first, *others = traces(brackets(account))
    assert (first["x"], first["error_x"]["array"]) == ([2000.0], pytest.approx([280.0]))
    assert [trace["x"][0] for trace in others] == pytest.approx([522.0, 1044.0, 1653.0])
    assert first["marker"]["symbol"] == "star"


def test_of_streams_each_limit_is_drawn_against_the_rate(tmp_path: Path) -> None:
    """And the sentence for why names the limit that is met first."""
    limits_ms = {name: limit * 1e3 for name, limit in STREAMED.slo.limits().items()}
    assert set(limits_ms) == {"ttft_p95", "itl_p99"}
    configuration = STREAMED.configuration(STREAMED.search.grid()[0])
    trials = []
    for number, rate in enumerate((100.0, 150.0), start=1):
        shares = {"ttft_p95": 0.9, "itl_p99": 0.5}
        latency_s = {name: exactly(share * limits_ms[name] / 1e3) for name, share in shares.items()}
        trial = remeasured(at_rate(number, rate, 1.0), latency_s=latency_s)
        trials.append(asked(trial, configuration=configuration))
    account = account_with(tmp_path, trials, STREAMED)
    for name, share in (("ttft_p95", 0.9), ("itl_p99", 0.5)):
        (trace,) = traces(rates(account, name))
        assert trace["y"] == pytest.approx([share * limits_ms[name]] * 2)
    document = sweep_document(account)
    assert {"rates-ttft_p95", "rates-itl_p99"} <= {section.anchor for section in document.sections}
    assert "the time to the first token (ttft_p95) is nearest to its limit" in document.notes[0]


def test_the_table_of_a_page_has_first_tokens_and_gaps_of_streams_only(tmp_path: Path) -> None:
    page = render(sweep_document(account_with(tmp_path / "streams", streamed_ledger(), STREAMED)))
    columns = document_of(page)["columns"]
    assert columns[4:9] == ["requests/s", "ttft_p95 ms", "itl_p99 ms", "p50 ms", "p95 ms"]
    assert document_of(page)["rows"][0][5:7] == ["40.0 [40.0, 40.0]", "8.00 [8.00, 8.00]"]
    assert "mean batch" not in columns
    page = render(sweep_document(account_with(tmp_path / "whole", capacity_ledger(), CAPACITY)))
    assert document_of(page)["columns"][4:7] == ["requests/s", "p50 ms", "p95 ms"]


def test_of_a_fixed_load_a_bracket_is_the_range_of_the_runs(tmp_path):
    account = account_with(tmp_path, helping_ledger())
    first, *_ = traces(brackets(account))
    assert first["x"] == [2230.0]
    assert first["error_x"]["arrayminus"] + first["error_x"]["array"] == pytest.approx([22.3, 22.3])
    drawn = [(trace["name"], *trace["x"]) for trace in traces(pareto(account))]
    known = [("recommended", 2230.0), ("no batching", 770.0), ("server defaults", 1500.0), ("tried", 1900.0)]
    assert sorted(drawn) == sorted(known)


def test_every_rate_is_drawn_and_filled_where_it_held(tmp_path):
    recommended, *_ = traces(rates(account_with(tmp_path, capacity_ledger(), CAPACITY)))
    assert recommended["x"] == [2000.0, 2000.0, 2000.0, 2100.0, 2250.0, 2250.0]
    assert recommended["marker"]["symbol"] == ["star"] * 4 + ["star-open"] * 2


def test_the_runs_are_drawn_by_phase(tmp_path):
    trials = [loop(90, 1500.0, 0.02), *capacity_ledger()]
    found = {trace["name"]: trace for trace in traces(history(account_with(tmp_path, trials, CAPACITY)))}
    assert {name: len(trace["x"]) for name, trace in found.items()} == {
        "scouting": 1,
        "comparing": 12,
        "confirming": 3,
    }
    assert found["confirming"]["y"] == [2000.0] * 3


def test_the_map_and_the_slices_hold_what_was_measured(tmp_path):
    beside = {**BATCH_14, "max_batch_size": 16}
    trials = [*helping_ledger(), planted(50, batching=beside, throughput=2000, p95_s=0.01)]
    account = account_with(tmp_path, trials)
    heat, star = traces(heat_map(account))
    assert (heat["x"], heat["y"]) == (["8", "14", "16", "1000"], ["0", "1000", "2000"])
    assert heat["z"][2] == [None, 2230.0, 2000.0, None]
    assert (star["x"], star["y"]) == (["14"], ["2000"])
    (knob,) = traces(slices(account))
    assert (knob["x"], knob["y"]) == (["14", "16"], [2230.0, 2000.0])


def test_the_curve_that_the_search_read_is_drawn_beside_what_the_server_counted(tmp_path):
    account = replace(account_with(tmp_path, helping_ledger()), curve={1: 0.001, 14: 0.006})
    read, counted, alone = traces(service_time(account))
    assert (read["x"], read["y"]) == ([1, 14], [1.0, 6.0])
    assert counted["x"] == [13, 14]
    assert alone["name"] == "in batches of 13"


@pytest.mark.parametrize(
    ("timeout_micros", "reason", "words"),
    [
        (2000, "full", "100 % close because they are full"),
        (2000, "timeout", "100 % close on the timeout"),
        (0, "timeout", "100 % start as soon as a batch thread is free"),
        (2000, "no_room", "100 % close because the next request does not fit"),
        (2000, "closed", "100 % close at the end"),
        (2000, "of_a_later_server", "100 % close by of_a_later_server"),
    ],
)
def test_why_batches_closed_is_told_as_in_the_reason(tmp_path, timeout_micros, reason, words):
    batching = {**BATCH_14, "batch_timeout_micros": timeout_micros}
    counted = {"batches": 10, "rows": 80, "mean_batch_rows": 8.0, "batches_by_rows": {8: 10}}
    account = account_of_server(tmp_path, batching, **counted, close_reasons={reason: 10})
    assert sizes(account.shown, which=LATEST).lead == f"recommended: 8 rows on average; {words}."


@pytest.mark.parametrize(("measured", "slowest_ms"), [(5, 2.0), (10, 100.0)])
def test_the_latency_of_single_requests_is_that_of_the_measured_window(tmp_path, measured, slowest_ms):
    trial = planted(1, batching=BATCH_14, throughput=9.0, p95_s=0.01)
    trial = remeasured(trial, requests=measured)
    warmed_up = latencies([100.0] * 5 + [1.0, 1.0, 2.0, 1.0, 1.0])
    account = account_with(tmp_path, [trial], samples=warmed_up)
    (trace,) = distribution(account.shown, account.scenario.slo, which=LATEST).figure.data
    assert max(trace["y"]) == pytest.approx(slowest_ms)


def test_of_no_batching_the_model_and_the_rest_are_told_for_it_has_no_queue(tmp_path):
    counted = {"batches": 100, "batches_by_rows": {1: 100}, "execution_s_by_rows": {1: 0.002}}
    account = account_of_server(tmp_path, None, **counted)
    section = split(account.shown, which=LATEST)
    queue, model, rest = section.figure.data
    assert (queue["x"], model["x"]) == ([None], [2.0])
    assert rest["x"] == pytest.approx([6.0 - 2.0])
    assert "Without batching there is no such queue" in section.lead
    assert sizes(account.shown, which=LATEST).lead == ""


def test_why_batches_closed_is_drawn_beside_their_sizes_as_shares_of_a_hundred(tmp_path):
    counted = {"batches": 10, "rows": 80, "batches_by_rows": {8: 8, 4: 2}}
    account = account_of_server(tmp_path, **counted, close_reasons={"full": 8, "timeout": 2})
    data = sizes(account.shown, which=LATEST).figure.data
    assert data[0]["x"] == ["4", "8"]
    assert [trace["text"] for trace in data[1:]] == [["full"], ["on the timeout"]]
    assert [(trace["name"], trace["base"], trace["x"]) for trace in data[1:]] == [
        ("full", [0.0], [80.0]),
        ("timeout", [80.0], [20.0]),
    ]


def test_many_sizes_are_summed_up_between_powers_of_two(tmp_path):
    batches = dict.fromkeys(range(1, 41), 5)
    account = account_of_server(tmp_path, batches=200, mean_batch_rows=20.0, batches_by_rows=batches)
    (trace,) = sizes(account.shown, which=LATEST).figure.data
    assert trace["x"] == ["1", "2", "3–4", "5–8", "9–16", "17–32", "33–64"]
    assert trace["y"] == pytest.approx([2.5, 2.5, 5.0, 10.0, 20.0, 40.0, 20.0])


def test_a_figure_too_large_for_json_is_left_out() -> None:
    assert finite(1.7e308, 1e3) is None
    assert finite(math.inf) is None
    assert finite(1234.56789, 1e3) == 1_234_570.0
