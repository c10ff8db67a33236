"""The pages of comparisons and load tests: their answers, what is drawn, and what is said to be missing."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.archive.listing import kind_by_trials
from batchtune.archive.run import COMPARISON, LEDGER, Run, create_run
from batchtune.archive.run import SCENARIO as SCENARIO_FILE
from batchtune.cli.commands.report import report_at_end, run_report, write_report
from batchtune.errors import UsageError
from batchtune.measure.measurement import TokenFigures
from batchtune.report.comparison import _best
from batchtune.report.findings import advice_of
from batchtune.report.html.comparison_page import comparison_document, typical_run, variants_of
from batchtune.report.html.load_page import LoadPoint, against_load, few_of, load_document
from batchtune.report.html.shell.document import Report, _coded
from batchtune.report.html.shell.drawing import Figure, Section
from batchtune.scenario.reader import format_scenario, read_kept_variants
from batchtune.scenario.spec.check import SloSpec
from batchtune.tune.compare.result import ARMS, runs_of, summarise
from tests.report.pages import (
    EVIL,
    NOISY_BLOCK,
    REFERENCE,
    STEAL,
    compared_run,
    document_of,
    load_trial,
    loaded_run,
    rising_rates,
    two_arms_run,
)
from tests.tune.answer.ledgers import SCENARIO
from tests.tune.tune_fakes import exactly, planted, remeasured

PAIR = ("without", "with")


def section_of(document: Report, anchor: str) -> Section:
    return next(section for section in document.sections if section.anchor == anchor)


def figure_of(section: Section) -> Figure:
    assert section.figure is not None, section.missing
    return section.figure


def told(document: Report) -> dict[str, str]:
    """Question -> headline and lines."""
    return {each.question: " | ".join([each.headline, *each.lines]) for each in document.answers}


def factors_of(run: Run) -> Figure:
    return figure_of(section_of(comparison_document(run), "factors"))


def load_figure(run: Run) -> Figure:
    return figure_of(section_of(load_document(run), "load"))


def named_in(run: Run) -> list[str]:
    return [row[0] for row in section_of(comparison_document(run), "figures").table.rows[1:]]


@pytest.fixture
def rising(tmp_path: Path) -> Run:
    return loaded_run(tmp_path, rising_rates())


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compared_run(tmp_path_factory.mktemp("compared"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With batching 1.5 times as fast as without, in seven blocks."""
    return two_arms_run(tmp_path_factory.mktemp("pair"), PAIR, blocks=7, gain=1.5, kind="compare")


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return two_arms_run(tmp_path_factory.mktemp("noise"), ARMS, blocks=8, gain=1.0, kind="noise")


def test_a_comparison_answers_on_its_first_screen(pair):
    answers = told(comparison_document(pair))
    assert answers["Does batching help?"].startswith("Yes | ")
    assert re.match(r"×1\.[45]\d* throughput \| ×1\.[45]\d* \[", answers["By how much?"])
    assert answers["How confident is this?"].startswith("A measurable difference | 7 blocks")
    assert "1 trial repeated because the host was noisy" in answers["How confident is this?"]


def test_a_difference_known_to_be_hardly_any_is_called_that_in_headline_and_words(tmp_path):
    document = comparison_document(two_arms_run(tmp_path, PAIR, blocks=10, gain=1.0, kind="compare"))
    assert told(document)["Does batching help?"].startswith("No relevant difference | ")


def test_nothing_is_called_best_where_no_pair_says_anything(pair):
    comparison = summarise(pair.ledger(), variants_of(pair))
    spoilt = [replace(each, outcome="client-limited") for each in comparison.pairs]
    answer = _best(replace(comparison, pairs=tuple(spoilt), answers=()))
    assert (answer.headline, answer.tone) == ("Not known", "bad")


def test_the_factors_are_those_of_the_comparison_and_the_line_stands_at_no_change(compared):
    said = json.loads((compared.path / COMPARISON).read_text())
    figure = factors_of(compared)
    drawn = {
        name: (value, trace["name"])
        for trace in figure.data
        if trace["xaxis"] == "x"
        for name, value in zip(trace["y"], trace["x"], strict=True)
    }
    for each in said["pairs"]:
        words = f"{'a' if each['outcome'] == 'different' else 'no'} measurable difference"
        value = pytest.approx(each["ratio"]["value"], rel=1e-4)
        assert drawn[f"{each['variant']}<br>over {each['baseline']}"] == (value, words)
    assert len(drawn) == len(said["pairs"]) + 2  # gRPC's batched variants, each over its own without
    assert [shape["x0"] for shape in figure.layout["shapes"]] == [1, 1]


def test_an_interval_that_needs_more_blocks_has_no_bar_and_does_not_tell_apart(tmp_path):
    run = two_arms_run(tmp_path, PAIR, blocks=2, gain=3.0, kind="compare")
    (trace, _) = factors_of(run).data
    assert trace["name"] == "no measurable difference"
    assert trace["error_x"]["array"] == trace["error_x"]["arrayminus"] == [0.0]
    assert "An interval needs 6 blocks." in told(comparison_document(run))["How confident is this?"]


def test_each_block_shows_the_run_that_counts_and_its_point_leads_to_that_trial(pair):
    document = comparison_document(pair)
    figure = figure_of(section_of(document, "blocks"))
    without = next(trace for trace in figure.data if trace["name"] == "without")
    counting = runs_of(pair.ledger(), "without")
    assert without["x"] == list(range(1, 8))
    assert without["y"] == pytest.approx(
        [counting[at].measurement.throughput_rps.value for at in range(1, 8)], rel=1e-5
    )
    assert [document.trials.rows[at][0] for at in without["customdata"]] == [
        str(counting[block].number) for block in range(1, 8)
    ]
    assert [symbol.endswith("-open") for symbol in without["marker"]["symbol"]] == [
        block == NOISY_BLOCK for block in range(1, 8)
    ]


def test_the_baseline_that_was_asked_for_stays_the_baseline(pair, tmp_path):
    run = two_arms_run(tmp_path, PAIR, blocks=6, gain=1.5, kind="compare")
    run.write_comparison({"variants": [{"name": "with"}, {"name": "without"}]})
    assert (named_in(run), named_in(pair)) == (["with", "without"], ["without", "with"])


def test_an_interrupted_comparison_says_at_each_figure_what_is_missing(tmp_path):
    run = two_arms_run(tmp_path, PAIR, blocks=1, gain=1.5, kind="compare")
    first = (run.path / LEDGER).read_text().splitlines(keepends=True)[0]
    (run.path / LEDGER).write_text(first)
    text = write_report(run).read_text()
    assert "No block has two variants that were both measured." in text
    (run.path / LEDGER).write_text("")
    text = write_report(run).read_text()
    assert text.count("<h2>Not shown</h2>") == 1
    assert set(document_of(text)["figures"]) == set()


def test_the_variants_of_a_kept_run_are_read_without_the_files_that_they_name(tmp_path):
    run = two_arms_run(tmp_path, PAIR, blocks=1, gain=1.0, kind="compare")
    text = (run.path / SCENARIO_FILE).read_text()
    (run.path / SCENARIO_FILE).write_text(text.replace("model: fake", "model: /gone/away"))
    variants = read_kept_variants(run.path / SCENARIO_FILE)
    assert {name: each.configuration().batching is None for name, each in variants.items()} == {
        "without": True,
        "with": False,
    }


def test_a_typical_run_is_the_one_with_the_median_p95():
    runs = {
        at: planted(at, throughput=1.0, p95_s=p95_s)
        for at, p95_s in enumerate([0.3, 0.1, math.nan, 0.2], start=1)
    }
    assert typical_run(runs).number == 4
    assert typical_run({}) is None


def test_a_command_in_a_sentence_is_code_and_what_stands_in_it_is_escaped():
    assert str(_coded("run `a <b>` & `c`")) == "run <code>a &lt;b&gt;</code> &amp; <code>c</code>"


def test_names_of_variants_are_escaped(tmp_path):
    run = two_arms_run(tmp_path, (EVIL, "b"), blocks=6, gain=1.5, kind="compare")
    text = write_report(run).read_text()
    assert "<script>window" not in text
    for figure in document_of(text)["figures"].values():
        assert "<script" not in json.dumps(figure)


def test_points_that_do_not_count_stand_beside_the_line_under_a_name_of_their_own(rising):
    figure = load_figure(rising)
    apart = {trace.get("name"): trace["x"] for trace in figure.data if trace["mode"] == "markers"}
    for name, rate in (("best", 1000.0), ("misses the SLO", 1500.0), ("invalid: client-limited", 2000.0)):
        assert apart[name] == [rate]
    lines = [trace for trace in figure.data if trace["mode"] == "lines"]
    chosen = [line["x"] for line in lines if line["line"]["color"] == "@chosen"]
    assert chosen == [[500.0, 1000.0, 1500.0]] * 2
    (shape,) = figure.layout["shapes"]
    assert (shape["yref"], shape["y0"]) == ("y2", pytest.approx(50.0))


def test_the_quantile_that_the_slo_limits_is_the_one_drawn(tmp_path):
    layout = load_figure(loaded_run(tmp_path, rising_rates(), slo=SloSpec(p99="80ms"))).layout
    assert layout["yaxis2"]["title"]["text"] == "p99, ms"
    assert [shape["y0"] for shape in layout["shapes"]] == [pytest.approx(80.0)]


def test_the_best_point_is_marked_in_the_table_and_a_click_leads_to_its_trial(rising):
    document = load_document(rising)
    table = section_of(document, "figures").table
    assert table.rows[1:][table.marked][0] == "1,000"
    best = next(trace for trace in load_figure(rising).data if trace.get("name") == "best")
    (place,) = best["customdata"]
    assert document.trials.details[place][0] == "Trial 2: 1,000 requests/s"


def test_a_load_of_which_no_point_counts_says_whose_fault_and_what_now(tmp_path):
    noisy = {"verdict": "NOISY", "caveats": [STEAL]}
    trials = [load_trial(at, clients=at, throughput=10.0 * at, **noisy) for at in (1, 2)]
    answers = told(load_document(loaded_run(tmp_path, trials)))
    fault = "No point counts | No point is a measurement of the server: the"
    assert answers["How many clients are best?"].startswith(fault)
    assert advice_of(STEAL)[1:] in answers["What now?"]


def test_where_every_point_failed_none_was_measured(tmp_path):
    point = load_trial(2, clients=2, throughput=1.0)
    failed = replace(point, measurement=None, failure="the server died", state="failed")
    assert "No point was measured." in write_report(loaded_run(tmp_path, [failed])).read_text()


def test_of_streams_first_tokens_and_gaps_are_drawn_and_no_whole_answers(tmp_path):
    """An SLO names those that are, else the usual ones are."""
    tokens = TokenFigures(output_per_s=exactly(100.0), prompt_mean=10.0, output_mean=20.0, untold_ratio=0.0)
    trials = []
    for at in (1, 2):
        figures = {"p95": 0.9 * at, "ttft_p95": 0.07 * at, "itl_p99": 0.012 * at}
        latency_s = {name: exactly(value) for name, value in figures.items()}
        trial = load_trial(at, clients=at, throughput=10.0 * at)
        trials.append(remeasured(trial, latency_s=latency_s, tokens=tokens))
    document = load_document(loaded_run(tmp_path, trials))
    for name, values in (("ttft_p95", [70.0, 140.0]), ("itl_p99", [12.0, 24.0])):
        traces = figure_of(section_of(document, f"load-{name}")).data
        assert values in [trace["y"] for trace in traces if trace.get("yaxis") == "y2"]
    assert "load" not in {section.anchor for section in document.sections}


@pytest.mark.parametrize("best", [0, 3, 8, 19])
def test_of_many_points_the_ends_and_the_best_are_kept(best):
    trial = load_trial(1, clients=1, throughput=1.0)
    whole = LoadPoint(name="1", load=1.0, trial=trial, measured=trial.measurement, place=1, is_best=False)
    points = [replace(whole, load=float(at), place=at, is_best=at == best) for at in range(20)]
    for most in (2, 3, 6):
        kept = few_of(points[::-1], most=most)
        loads = [point.load for point in kept]
        assert loads == sorted(loads)
        assert len(kept) <= max(most, 3)
        assert {0.0, 19.0, float(best)} <= set(loads)
    assert few_of(points, most=30) == points
    assert against_load([], SCENARIO, quantile="p95").missing == "no point was measured"


def test_a_noise_floor_has_no_page_and_says_what_shows_it(noise):
    with pytest.raises(UsageError, match="a noise floor has no page") as refused:
        write_report(noise)
    assert refused.value.hint.startswith(f"`batchtune trials {noise.path}`")


def test_the_kind_of_a_run_is_told_by_its_trials_and_of_an_empty_one_by_its_name(
    tmp_path, compared, pair, noise, rising
):
    kinds = [kind_by_trials(run) for run in (compared, pair, noise, rising, Run(REFERENCE / "quickstart"))]
    assert kinds == ["compare", "compare", "noise", "load", "sweep"]
    assert kind_by_trials(Run(REFERENCE / "imdb-benchmark")) == "compare"
    scenario = pair.scenario()
    text = format_scenario(scenario)
    for kind in ("", "compare", "noise", "load"):
        empty = create_run(scenario, text, root=tmp_path, provenance={}, kind=kind)
        assert kind_by_trials(empty) == (kind or "sweep")
        if kind != "noise":
            write_report(empty)


def test_the_page_of_a_comparison_is_written_where_it_is_wanted_and_at_its_end(pair, tmp_path, capsys):
    assert run_report(pair.path, output=tmp_path / "x.html", results=tmp_path) == 0
    assert (tmp_path / "x.html").is_file()
    assert capsys.readouterr().out == f"{tmp_path / 'x.html'}\n"
    report_at_end(pair)
    report_at_end(pair, quiet=True)
    assert capsys.readouterr().err == f"report: {pair.path / 'report.html'}\n"
