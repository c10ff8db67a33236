"""`batchtune recommend` on runs of every age: with the search's own account, without it, with a corrupt one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_recommend import SCENARIO, helping_ledger
from tune_fakes import planted, scenario_of

from batchtune.archive import SEARCH, Run, create_run
from batchtune.cli.recommend import formatted, run_recommend
from batchtune.errors import ArchiveError, NoFeasibleConfigurationError
from batchtune.recommend import recommend as choose
from batchtune.scenario.reader import format_scenario
from batchtune.tune.summary import SearchSummary

SUMMARY = SearchSummary(
    strategy="guided",
    space_size=30,
    trust="shares",
    trust_reason="its errors are above 15 %",
    twin={"draws": []},
    twin_error={"p95": 0.2, "throughput": 0.1},
    near_best_probability=0.91,
    noise_ratio=0.02,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A sweep kept before there was a search.json."""
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path, provenance={})
    for trial in helping_ledger():
        run.append(trial, None)
    return run


def recommend(run: Run, *, json: bool = False, **limits: str) -> int:
    root = run.path.parents[1]
    return run_recommend(run.path, limits, dialect="tfserving", write=None, results=root, json=json)


def test_a_run_without_the_searchs_account_still_gives_a_recommendation(run, capsys):
    assert recommend(run) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Batching helps here" in text
    assert "of the best of the 4 configurations measured with probability" in text
    assert "twin" not in text


def test_the_searchs_account_is_stated(run, capsys):
    run.write_search(SUMMARY)
    assert recommend(run) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The twin shared the search with the sampler" in text
    assert "all 30 points of the space with probability 91 %" in text


def test_a_corrupt_account_is_named_with_what_to_do(run):
    (run.path / SEARCH).write_text('{"schema_version": 1')
    with pytest.raises(ArchiveError) as caught:
        recommend(run)
    assert caught.value.exit_code == 2
    assert SEARCH in caught.value.message
    assert "remove it" in caught.value.hint
    (run.path / SEARCH).unlink()
    assert recommend(run) == 0


def test_json_says_all_that_the_console_says(run, capsys):
    run.write_search(SUMMARY)
    assert recommend(run, json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["near_best"] == {"probability": 0.91, "of": "space", "count": 30}
    assert document["search"]["trust"] == "shares"
    assert document["search"]["twin_error"] == {"p95": 0.2, "throughput": 0.1}
    assert document["noise_ratio"] == 0.02
    assert document["promises"][0]["name"] == "p95"
    assert {"kind", "text", "advice", "evidence"} == set(document["bottleneck"])
    assert document["trials"] == 13
    assert document["seconds"] == 26.0
    assert json.loads((run.path / "recommendation.json").read_text()) == {
        name: value for name, value in document.items() if name != "run"
    }


def test_another_slo_is_not_given_the_searchs_probability(run, capsys):
    run.write_search(SUMMARY)
    assert recommend(run, json=True, p95="40ms") == 0
    assert json.loads(capsys.readouterr().out)["near_best"]["of"] == "measured"


def test_json_says_so_when_nothing_meets_the_slo(run, capsys):
    with pytest.raises(NoFeasibleConfigurationError):
        recommend(run, json=True, p95="1ms")
    assert "nearest" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("triton", "# no dynamic_batching block"),
        ("cortex", "# no server_side_batching block"),
        ("flags", "--enable_batching=false"),
        ("tfserving", "leave out --enable_batching"),
    ],
)
def test_each_dialect_says_no_batching_in_its_own_words(dialect, expected):
    alone = planted(1, batching=None, throughput=770, p95_s=0.024, source="no_batching")
    text = formatted(choose([alone], scenario=SCENARIO), dialect)
    assert expected in text
    assert text.endswith("\n")


def test_tritons_queue_is_counted_in_requests_of_so_many_rows():
    scenario = scenario_of(request={"rows": 4})
    batching = {"max_batch_size": 8, "max_enqueued_batches": 10, "num_batch_threads": 1}
    chosen = choose([planted(1, batching=batching, throughput=900, p95_s=0.01)], scenario=scenario)
    assert "max_queue_size: 20 " in formatted(chosen, "triton")
