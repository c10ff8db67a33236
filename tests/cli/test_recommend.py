"""`batchtune recommend` on kept runs: for another SLO, for another server, and where files cannot be written or read.

What it prints of a run is held by tests/golden.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from batchtune.archive.run import SEARCH, Run, create_run
from batchtune.batching.formats import parse_batching
from batchtune.cli.commands.run_recommend import conclude, formatted, run_recommend, to_establish
from batchtune.cli.session import keep_account
from batchtune.errors import (
    BatchingParametersError,
    InconclusiveError,
    NoFeasibleConfigurationError,
    UsageError,
)
from batchtune.plain_values import coded
from batchtune.scenario.spec.check import SloSpec
from batchtune.tune.answer.recommend import recommend as choose
from batchtune.tune.trials.trial import SearchSummary
from tests.cli.in_process import answered
from tests.report.pages import kept_run
from tests.tune.answer import ledgers
from tests.tune.answer.ledgers import BATCH_8, BATCH_14, SCENARIO, STREAMED, helping_ledger, streamed_ledger
from tests.tune.tune_fakes import asked, planted, scenario_of

ALONE = planted(1, batching=None, throughput=900, p95_s=0.01, source="no_batching")
SLOW_ALONE = planted(1, batching=None, throughput=900, p95_s=0.09, source="no_batching")
SLOW_14 = planted(2, batching=BATCH_14, throughput=900, p95_s=0.09)
BEHIND_COMMANDS = {"kind": "command", "model": "m", "rest_url": "http://h:1", "apply": ["a"]}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return kept_run(tmp_path)


def recommend(
    run: Run, *, json: bool = False, why: bool = True, dialect=None, write=None, **limits: str
) -> int:
    root = run.path.parents[1]
    return run_recommend(run.path, limits, dialect=dialect, write=write, results=root, json=json, why=why)


def test_another_slo_is_judged_by_the_same_runs_and_named_by_the_command_that_says_more(run, capsys):
    assert recommend(run, json=True, p95="9.35ms") == 5
    document = json.loads(capsys.readouterr().out)
    assert document["slo"]["p95"] == 0.00935
    assert document["promises"][0]["kept"] < document["promises"][0]["runs"]
    assert document["to_establish"].endswith("--slo-p95 9.35ms")
    recommend(run, why=False, p95="40ms")
    assert "--slo-p95 40ms --why" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limits", "held", "asked"),
    [
        ({}, 150.0, ""),
        ({"ttft_p95": "130ms", "itl_p99": "30ms"}, 174.0, "--slo-ttft-p95 130ms --slo-itl-p99 30ms --why"),
        ({"ttft_p95": "50ms"}, 87.0, "--slo-ttft-p95 50ms --slo-itl-p99 25ms --why"),
        ({"itl_p99": "10ms"}, 87.0, "--slo-ttft-p95 80ms --slo-itl-p99 10ms --why"),
    ],
)
def test_limits_of_streams_are_judged_by_the_runs_measured(tmp_path, capsys, limits, held, asked):
    """Looser ones find more, stricter ones less; those not named are the scenario's."""
    run = kept_run(tmp_path, STREAMED, trials=streamed_ledger())
    recommend(run, json=True, why=False, **limits)
    assert json.loads(capsys.readouterr().out)["capacity"]["held_rps"] == pytest.approx(held, rel=0.01)
    recommend(run, why=False, **limits)
    text = capsys.readouterr().out
    assert asked in text
    assert re.search(r"ttft_p95 ms +itl_p99 ms", text)


def test_where_nothing_meets_the_slo_the_error_and_the_document_say_so(run, capsys):
    with pytest.raises(NoFeasibleConfigurationError, match=f"^{run.path}: no configuration"):
        recommend(run, json=True, p95="1ms")
    assert "nearest" in json.loads(capsys.readouterr().out)["error"]


SHORT = {"max_batch_size": 8, "batch_timeout_micros": 10}
QUEUED = {"max_batch_size": 8, "max_enqueued_batches": 10, "num_batch_threads": 1}
FLAGS = (("num_intra_op", "1"), ("odd", "two words"))


@pytest.mark.parametrize(
    ("batching", "flags", "dialect", "expected"),
    [
        (None, (), "triton", "# no dynamic_batching block"),
        (None, (), "cortex", "# no server_side_batching block"),
        (None, (), "flags", "--enable_batching=false\n"),
        (None, (), "tfserving", "Leave out --enable_batching"),
        (SHORT, FLAGS, "flags", " --num_intra_op=1 '--odd=two words'\n"),
        (SHORT, FLAGS, "triton", "# --num_intra_op=1 has no counterpart in Triton\n"),
        (SHORT, FLAGS, "cortex", "# --odd=two words has no counterpart in Cortex\n"),
        (SHORT, (), "triton", "# num_batch_threads is absent"),
        (SHORT, (), "cortex", "# num_batch_threads is absent"),
        (QUEUED, (), "triton", "max_queue_size: 20 "),
    ],
)
def test_each_dialect_says_in_its_own_words_what_it_can_and_cannot(batching, flags, dialect, expected):
    """Triton's queue is counted in requests, here of four rows."""
    scenario = scenario_of(request={"rows": 4}, search=ledgers.SEARCH)
    trial = planted(1, batching=batching, throughput=900, p95_s=0.01)
    configuration = replace(trial.configuration, flags=flags)
    text = formatted(choose([asked(trial, configuration=configuration)], scenario=scenario), dialect)
    assert expected in text
    assert text.endswith("\n")


@pytest.mark.parametrize(
    ("batching", "advice"),
    [
        ({"max_batch_size": 8, "batch_timeout_micros": 0}, "batch_interval: 1us"),
        ({"max_batch_size": 8}, "batch_interval: 1us"),
        ({"max_batch_size": 1, "batch_timeout_micros": 10}, "leave server_side_batching out"),
    ],
)
def test_what_a_dialect_cannot_say_is_refused_before_anything_is_said(tmp_path, capsys, batching, advice):
    run = kept_run(tmp_path, trials=[planted(1, batching=batching, throughput=900, p95_s=0.01)])
    file = tmp_path / "cortex.yaml"
    for write in (None, file):
        with pytest.raises(BatchingParametersError) as raised:
            recommend(run, dialect="cortex", write=write)
        assert raised.value.exit_code == 2
        assert advice in raised.value.hint
    assert capsys.readouterr().out == ""
    assert not file.exists()
    assert not (run.path / "recommendation.json").exists()


@pytest.fixture
def own_run(tmp_path: Path) -> Run:
    """A sweep of a server of kind http."""
    names = {"max_batch": "MAX_BATCH", "wait_ms": "WAIT_MS"}
    means = {"rows": "max_batch", "wait_ms": "wait_ms"}
    target = {
        "kind": "http",
        "url": "http://h/score",
        "launch": ["true"],
        "set": {"env": names},
        "means": means,
    }
    space = {"max_batch": [1, 8], "wait_ms": [0, 2]}
    scenario = scenario_of(target=target, request={"body": {"x": "{{row}}"}}, search={"space": space})
    own = scenario.configuration({"max_batch_size": 8, "batch_timeout_micros": 2000})
    trial = planted(1, batching={}, throughput=900, p95_s=0.01)
    return kept_run(tmp_path, scenario, trials=[asked(trial, configuration=own)])


@pytest.mark.parametrize("dialect", ["flags", "docker", "k8s", "kserve", "triton", "tfserving", "cortex"])
def test_the_format_of_another_server_is_refused_of_one_of_kind_http(own_run, capsys, dialect):
    with pytest.raises(UsageError, match=f"--format {dialect}: the server is of kind http") as refused:
        recommend(own_run, dialect=dialect)
    assert "--format json" in refused.value.hint
    assert capsys.readouterr().out == ""
    assert not (own_run.path / "recommendation.json").exists()


def test_json_of_a_server_of_kind_http_has_its_own_words(own_run, capsys, tmp_path):
    file = tmp_path / "own.json"
    recommend(own_run, dialect="json", write=file)
    assert json.loads(file.read_text()) == {"max_batch": 8, "wait_ms": 2}
    capsys.readouterr()
    recommend(own_run, dialect="json")
    said = capsys.readouterr()
    assert json.loads(said.out) == {"max_batch": 8, "wait_ms": 2}
    assert "Recommended" in said.err


def test_a_file_is_written_whole_or_not_at_all(run, tmp_path, capsys):
    file = tmp_path / "config.pbtxt"
    file.write_text("kept")
    nowhere, full = tmp_path / "no" / "such", Path("/dev/full")
    places = ((tmp_path, "Is a directory"), (nowhere, "No such file"), (full, "No space left"))
    for place, reason in places:
        with pytest.raises(UsageError, match=f"--write: .*{reason}") as refused:
            recommend(run, dialect="triton", write=place)
        assert "Errno" not in refused.value.message
    assert recommend(run, dialect="triton", write=file) == 0
    assert file.read_text().startswith("max_batch_size: 14\n")
    assert {path.name for path in tmp_path.iterdir()} == {"config.pbtxt", run.path.parent.name}
    said = capsys.readouterr()
    assert "dynamic_batching" not in said.out
    assert f"note: replaced {file}, which had another text" in said.err
    assert recommend(run, dialect="triton", write=file) == 0
    assert "replaced" not in capsys.readouterr().err  # the same text, as in CI


def test_a_dash_is_no_file_to_write_to(tmp_path):
    done = answered("recommend", "--write", "-", cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "--write: expected a file; was -" in done.stderr


def test_what_starts_a_server_has_the_flags_of_every_trial(tmp_path):
    flags = {"tensorflow_intra_op_parallelism": 1, "model_name": "net", "port": 9000}
    scenario = scenario_of(target={"model": str(tmp_path / "m"), "flags": flags, "server": "local"})
    chosen = choose([planted(1, batching=SHORT, throughput=900, p95_s=0.01)], scenario=SCENARIO)
    for dialect in ("flags", "k8s", "kserve"):
        text = formatted(chosen, dialect, scenario=scenario)
        assert "--tensorflow_intra_op_parallelism=1" in text
        assert "--grpc_max_threads=1040" in text
        assert "9000" not in text
        assert ("name: net\n" in text) == (dialect != "flags")
    assert "intra_op" not in formatted(chosen, "triton", scenario=scenario)


def test_no_batching_has_no_parameters_file(tmp_path, capsys):
    run = kept_run(tmp_path, trials=[ALONE])
    assert recommend(run, dialect="flags") == 5
    assert "take batching parameters only from a file" not in capsys.readouterr().err
    assert (run.path / "recommendation.json").exists()
    assert not (run.path / "batching_parameters.txt").exists()


def files_of(run):
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_question_changes_nothing_that_was_recommended(run, capsys):
    assert recommend(run, json=True) == 0
    document = json.loads(capsys.readouterr().out)
    kept = files_of(run)
    recommend(run, p95="9.4ms")
    parameters = run.path / "batching_parameters.txt"
    assert f"--batching_parameters_file={parameters}\n" in capsys.readouterr().out
    assert files_of(run) == kept
    saved = {name: value for name, value in document.items() if name not in ("run", "to_establish")}
    assert json.loads(kept[run.path / "recommendation.json"]) == saved


def test_parameters_for_another_slo_are_written_before_they_are_deployed(tmp_path, capsys):
    quick = {"batching": BATCH_8, "throughput": 1900.0, "p95_s": 0.01}
    slow = {"batching": BATCH_14, "throughput": 2300.0, "p95_s": 0.04}
    trials = [planted(at, source="confirm", **(slow if at < 4 else quick)) for at in range(1, 7)]
    run = kept_run(tmp_path / "results", trials=trials)
    recommend(run, why=False)
    kept = run.path / "batching_parameters.txt"
    assert capsys.readouterr().out.count(f"--batching_parameters_file={kept}\n") == 1
    assert parse_batching(kept.read_text(), source="f").parameters.max_batch_size == 14
    again = f"batchtune recommend {run.path} --slo-p95 20ms"
    for why in (False, True):
        recommend(run, why=why, p95="20ms")
        writing, deploying = capsys.readouterr().out.partition(" deploy ")[2].splitlines()[:2]
        assert writing.strip() == f"{again} --write FILE"
        assert deploying.endswith(" --batching_parameters_file=FILE")
    recommend(run, dialect="docker", p95="20ms")
    said = capsys.readouterr()
    assert "source=FILE," in said.out
    assert f"note: `{again} --write FILE` writes FILE\n" in said.err
    file = tmp_path / "FILE"
    recommend(run, write=file, p95="20ms")
    assert f"--batching_parameters_file={file}\n" in capsys.readouterr().out
    assert parse_batching(file.read_text(), source="f").parameters.max_batch_size == 8


def test_the_newest_run_is_taken_and_named_and_other_scenarios_too(run, capsys, monkeypatch):
    root, scenario_folder = run.path.parents[1], run.path.parent
    options = {"dialect": None, "write": None, "json": False}
    assert run_recommend(scenario_folder, {}, results=root, **options) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(f"Run {run.path}, ")
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    earlier = create_run(scenario_of(name="earlier"), "", root=root, provenance={}, now=long_ago)
    run_recommend(None, {}, results=root, **options)
    assert capsys.readouterr().err == (
        f"note: {run.path} is the latest run, of scenario {scenario_folder.name}; name another by its folder: "
        f"{earlier.path.parent}\n"
    )
    recommend(run)
    assert capsys.readouterr().err == ""
    earlier.path.rename(root / "kept elsewhere")
    run_recommend(None, {}, results=root, **options)
    assert capsys.readouterr().err == ""
    monkeypatch.chdir(scenario_folder)
    assert run_recommend(Path(), {}, results=Path("results"), **options) == 0


def test_what_deploys_by_commands_names_the_run_that_it_is_of(tmp_path, capsys):
    run = kept_run(tmp_path, scenario_of(target=BEHIND_COMMANDS))
    recommend(run)
    writing = f"deploy   batchtune recommend {run.path} --format json --write FILE; a < FILE\n"
    assert writing in capsys.readouterr().out


def test_a_run_that_cannot_be_written_is_answered_from_all_the_same(run, capsys):
    """A folder stands where the file would: the one obstacle that also stops a superuser."""
    (run.path / "recommendation.json").mkdir()
    assert recommend(run) == 0
    shown = capsys.readouterr()
    assert "--batching_parameters_file=FILE\n" in shown.out
    assert shown.err.startswith(f"note: cannot write {run.path / 'recommendation.json'}: ")
    assert "--write FILE" in shown.err
    (run.path / SEARCH).mkdir()
    keep_account(
        run, SearchSummary(strategy="guided", space_size=30, stop_reason=coded("time_spent"), proposals={})
    )
    assert capsys.readouterr().err.startswith(f"note: cannot write {run.path / SEARCH}: ")


def test_a_file_with_other_parameters_is_not_deployed_and_an_older_answer_stays(run, capsys):
    old = '{"schema_version": 2}'
    (run.path / "recommendation.json").write_text(old)
    assert recommend(run) == 0
    assert (run.path / "recommendation.json").read_text() == old
    capsys.readouterr()
    for stale in ("max_batch_size { value: 3 }\n", "# batchtune: of an older version\n"):
        (run.path / "batching_parameters.txt").write_text(stale)
        assert recommend(run) == 0
        assert "--batching_parameters_file=FILE\n" in capsys.readouterr().out
        assert (run.path / "batching_parameters.txt").read_text() == stale


def test_a_sweep_that_ends_without_a_recommendation_leaves_no_stale_one(run):
    assert recommend(run) == 0
    answer = [run.path / name for name in ("batching_parameters.txt", "recommendation.json")]
    missed = [replace(trial, feasible=False) for trial in helping_ledger()]
    scenario = scenario_of(slo={"p95": "1ms"}, search=SCENARIO.search.model_dump(by_alias=True))
    for swept in (False, True):
        with pytest.raises(NoFeasibleConfigurationError):
            conclude(run, scenario, missed, json=False, swept=swept)
        assert [path.exists() for path in answer] == [not swept] * 2


@pytest.mark.parametrize(
    ("budget", "more"),
    [
        ({}, "--budget 2m"),
        ({"time": "90s"}, "--budget 3m"),
        ({"time": "10s"}, "--budget 2m"),
        ({"trials": 12}, "--set search.budget.trials=24"),
        ({"trials": 2}, "--set search.budget.trials=8"),
        ({"time": "90s", "trials": 12}, "--budget 3m --set search.budget.trials=24"),
    ],
)
def test_what_would_establish_it_has_twice_the_budget_or_that_of_none(run, budget, more):
    search = {"space": {"max_batch_size": [8, 14]}, **({"budget": budget} if budget else {})}
    step = to_establish(run, scenario_of(search=search), helping_ledger())
    assert step == f"batchtune sweep {run.path}/scenario.yaml --resume {run.path} {more}"


def test_another_slo_is_established_by_a_sweep_of_its_own_and_where_every_batch_fails_nothing_is(run):
    slo = SloSpec.model_validate({"p95": "9.4ms", "errors": 0.02})
    step = to_establish(run, SCENARIO, helping_ledger(), asked=slo)
    assert step == f"batchtune sweep {run.path}/scenario.yaml --slo-p95 9.4ms --slo-errors 0.02"
    failed = planted(2, batching=BATCH_14, throughput=900, p95_s=0.01, failure="OOM")
    assert to_establish(run, SCENARIO, [ALONE, failed]) is None


@pytest.mark.parametrize(("budget", "is_short"), [("20s", True), ("90s", False)])
def test_a_short_sweep_says_that_more_time_is_what_is_missing(run, capsys, budget, is_short):
    space = {"max_batch_size": [8, 14], "batch_timeout_micros": [1000, 2000], "num_batch_threads": [1]}
    scenario = scenario_of(search={"budget": {"time": budget}, "space": space})
    searched = [trial for trial in helping_ledger() if trial.source != "confirm"]
    missing = f"More time is what is missing: this sweep had {budget[:2]} s, without --budget it has 2 min"
    for trials in (searched, helping_ledger()):
        code = conclude(run, scenario, trials)
        assert (missing in " ".join(capsys.readouterr().out.split())) == (is_short and code == 5)
    slo = SloSpec.model_validate({"p95": "9.4ms"})
    ending = "--slo-p95 9.4ms --budget 2m" if is_short else "--slo-p95 9.4ms"
    assert to_establish(run, scenario, searched, asked=slo).endswith(ending)
    with pytest.raises(InconclusiveError) as raised:
        conclude(run, scenario, [SLOW_ALONE])
    assert raised.value.hint.startswith("give the sweep more time: " if is_short else "to look further: ")


@pytest.mark.parametrize(("tried", "words"), [(1, "1 configuration"), (2, "2 configurations")])
def test_an_open_answer_names_the_command_that_goes_on_though_a_trial_failed(run, capsys, tried, words):
    failed = planted(3, batching={"max_batch_size": 2}, failure="OOM")
    missed = [SLOW_ALONE, SLOW_14, failed][: tried + 1]
    with pytest.raises(InconclusiveError, match=f"only {words} with batching (was|were) tried") as raised:
        conclude(run, SCENARIO, missed, json=True)
    command = to_establish(run, SCENARIO, missed)
    assert raised.value.hint == f"to look further: {command}"
    assert json.loads(capsys.readouterr().out)["to_establish"] == command
