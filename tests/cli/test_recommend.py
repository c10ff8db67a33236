"""`batchtune recommend` on runs of every age: with the search's own account, without it, with a corrupt one."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from batchtune.archive.run import SEARCH, Run, create_run
from batchtune.batching.formats import parse_batching
from batchtune.cli.commands.run_recommend import conclude, formatted, run_recommend, to_establish
from batchtune.cli.deployment import BUNDLED_FLAGS, build_command, deployment, docker_command
from batchtune.cli.session import keep_account
from batchtune.errors import (
    ArchiveError,
    BatchingParametersError,
    InconclusiveError,
    NoFeasibleConfigurationError,
    UsageError,
)
from batchtune.plain_values import coded
from batchtune.scenario.reader import format_scenario
from batchtune.scenario.spec.check import SloSpec
from batchtune.tune.answer.recommend import recommend as choose
from batchtune.tune.trials.trial import SearchSummary
from tests.cli.in_process import answered
from tests.target.test_model_files import touched, write_onnx_naming
from tests.tune.answer.ledgers import BATCH_8, BATCH_14, SCENARIO, STREAMED, helping_ledger, streamed_ledger
from tests.tune.tune_fakes import asked, planted, scenario_of

SUMMARY = SearchSummary(
    strategy="guided", space_size=30, stop_reason=coded("time_spent"), proposals={"grid": 5, "sampler": 1}
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A sweep kept before there was a search.json."""
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path, provenance={})
    for trial in helping_ledger():
        run.append(trial, None)
    return run


def recommend(run: Run, *, json: bool = False, why: bool = True, **limits: str) -> int:
    root = run.path.parents[1]
    return run_recommend(run.path, limits, dialect="tfserving", write=None, results=root, json=json, why=why)


def test_a_run_without_the_searchs_account_still_gives_a_recommendation(run, capsys):
    assert recommend(run) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Batching helps: " in text
    assert "Runs by who named them" not in text


def test_without_why_some_lines_end_with_the_command_that_says_more(run, capsys):
    assert recommend(run, why=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert lines[-1].strip() == f"explain  batchtune recommend {run.path} --why"


def test_the_command_that_says_more_asks_for_the_same_slo(run, capsys):
    assert recommend(run, why=False, p95="40ms") in (0, 5)
    assert "--slo-p95 40ms --why" in capsys.readouterr().out


def test_a_sample_model_is_found_by_the_shell_that_deploys_it():
    alone = planted(1, batching=None, throughput=1, p95_s=1).configuration
    scenario = scenario_of(target={"model": "imdb_transformer", "framework": "torch"})
    found = '--model_base_path="$(python -m batchtune.sample_models imdb_transformer --framework torch)" '
    assert found in deployment(alone, scenario, Path("FILE"))


def test_the_searchs_account_is_stated(run, capsys):
    run.write_search(SUMMARY)
    assert recommend(run) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Runs by source: the space 5, Optuna 1. The search ended: the time is spent." in text


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
    assert document["search"]["proposals"] == {"grid": 5, "sampler": 1}
    assert document["gain_over_no_batching"]["low"] > 2.7
    assert [one["names"][0] for one in document["references"]] == ["no_batching", "defaults"]
    assert document["behind"] == [5, 8, 11]
    assert document["promises"][0]["name"] == "p95"
    assert {"kind", "text", "advice", "evidence"} == set(document["bottleneck"])
    assert document["trials"] == 13
    assert document["seconds"] == 26.0
    assert json.loads((run.path / "recommendation.json").read_text()) == {
        name: value for name, value in document.items() if name not in ("run", "to_establish")
    }


def test_another_slo_is_judged_by_the_same_runs(run, capsys):
    assert recommend(run, json=True, p95="9.35ms") == 5
    document = json.loads(capsys.readouterr().out)
    assert document["slo"]["p95"] == 0.00935
    assert document["promises"][0]["kept"] < document["promises"][0]["runs"]
    assert document["to_establish"].endswith("--slo-p95 9.35ms")


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
    run = create_run(STREAMED, format_scenario(STREAMED), root=tmp_path, provenance={})
    for trial in streamed_ledger():
        run.append(trial, None)

    def recommended(json: bool) -> str:
        run_recommend(
            run.path, limits, dialect=None, write=None, results=run.path.parents[1], json=json, why=False
        )
        return capsys.readouterr().out

    assert json.loads(recommended(json=True))["capacity"]["held_rps"] == pytest.approx(held, rel=0.01)
    text = recommended(json=False)
    assert asked in text
    assert re.search(r"ttft_p95 ms +itl_p99 ms", text)


def test_a_recommendation_of_an_older_schema_is_no_obstacle(run, capsys):
    (run.path / "recommendation.json").write_text('{"schema_version": 2}')
    assert recommend(run) == 0
    assert (run.path / "recommendation.json").read_text() == '{"schema_version": 2}'


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
        ("tfserving", "Leave out --enable_batching"),
    ],
)
def test_each_dialect_says_no_batching_in_its_own_words(dialect, expected):
    alone = planted(1, batching=None, throughput=770, p95_s=0.024, source="no_batching")
    text = formatted(choose([alone], scenario=SCENARIO), dialect)
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
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path, provenance={})
    run.append(planted(1, batching=batching, throughput=900, p95_s=0.01), None)
    file = tmp_path / "cortex.yaml"
    for write in (None, file):
        with pytest.raises(BatchingParametersError) as raised:
            run_recommend(run.path, {}, dialect="cortex", write=write, results=tmp_path, json=False)
        assert raised.value.exit_code == 2
        assert advice in raised.value.hint
    assert capsys.readouterr().out == ""
    assert not file.exists()
    assert not (run.path / "recommendation.json").exists()


@pytest.mark.parametrize("batching", [{"max_batch_size": 8}, None])
def test_flags_that_tensorflow_serving_refuses_name_the_format_of_the_file_that_it_reads(
    tmp_path, capsys, batching
):
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path, provenance={})
    run.append(planted(1, batching=batching, throughput=900, p95_s=0.01), None)
    run_recommend(run.path, {}, dialect="flags", write=None, results=tmp_path, json=False)
    noted = capsys.readouterr().err
    assert ("take batching parameters only from a file" in noted) == (batching is not None)
    assert (f"batchtune recommend {run.path} --format tfserving" in noted) == (batching is not None)


@pytest.fixture
def own_run(tmp_path: Path) -> Run:
    """A sweep of a server of kind http."""
    scenario = scenario_of(
        target={
            "kind": "http",
            "url": "http://h/score",
            "launch": ["true"],
            "set": {"env": {"max_batch": "MAX_BATCH", "wait_ms": "WAIT_MS"}},
            "means": {"rows": "max_batch", "wait_ms": "wait_ms"},
        },
        request={"body": {"x": "{{row}}"}},
        search={"space": {"max_batch": [1, 8], "wait_ms": [0, 2]}},
    )
    run = create_run(scenario, format_scenario(scenario), root=tmp_path, provenance={})
    trial = planted(1, batching={}, throughput=900, p95_s=0.01)
    own = scenario.configuration({"max_batch_size": 8, "batch_timeout_micros": 2000})
    run.append(asked(trial, configuration=own), None)
    return run


@pytest.mark.parametrize("dialect", ["flags", "docker", "k8s", "kserve", "triton", "tfserving", "cortex"])
def test_the_format_of_another_server_is_refused_of_one_of_kind_http(own_run, capsys, dialect):
    with pytest.raises(UsageError, match=f"--format {dialect}: the server is of kind http") as told:
        run_recommend(own_run.path, {}, dialect=dialect, write=None, results=own_run.path, json=False)
    assert "--format json" in told.value.hint
    assert capsys.readouterr().out == ""
    assert not (own_run.path / "recommendation.json").exists()


def test_json_of_a_server_of_kind_http_has_its_own_words(own_run, capsys, tmp_path):
    file = tmp_path / "own.json"
    run_recommend(own_run.path, {}, dialect="json", write=file, results=own_run.path, json=False)
    assert json.loads(file.read_text()) == {"max_batch": 8, "wait_ms": 2}
    capsys.readouterr()
    run_recommend(own_run.path, {}, dialect="json", write=None, results=own_run.path, json=False)
    said = capsys.readouterr()
    assert json.loads(said.out) == {"max_batch": 8, "wait_ms": 2}
    assert "Recommended" in said.err


def test_a_file_is_written_whole_or_not_at_all(run, tmp_path, capsys):
    file = tmp_path / "config.pbtxt"
    file.write_text("kept")
    full = Path("/dev/full")
    told = ((tmp_path, "Is a directory"), (tmp_path / "no" / "such", "No such file"), (full, "No space left"))
    for here, reason in told:
        with pytest.raises(UsageError, match=f"--write: .*{reason}") as refused:
            run_recommend(run.path, {}, dialect="triton", write=here, results=tmp_path, json=False)
        assert "Errno" not in refused.value.message
    assert run_recommend(run.path, {}, dialect="triton", write=file, results=tmp_path, json=False) == 0
    assert file.read_text().startswith("max_batch_size: 14\n")
    assert {one.name for one in tmp_path.iterdir()} == {"config.pbtxt", run.path.parent.name}
    said = capsys.readouterr()
    assert "dynamic_batching" not in said.out
    assert f"note: replaced {file}, which had another text" in said.err
    assert run_recommend(run.path, {}, dialect="triton", write=file, results=tmp_path, json=False) == 0
    assert "replaced" not in capsys.readouterr().err  # the same text, as in CI


def test_flags_of_the_server_are_not_lost(tmp_path):
    flags = {"num_intra_op": "1", "odd": "two words"}
    trial = planted(1, batching={"max_batch_size": 8, "batch_timeout_micros": 10}, throughput=900, p95_s=0.01)
    configuration = replace(trial.configuration, flags=tuple(flags.items()))
    chosen = choose([asked(trial, configuration=configuration)], scenario=SCENARIO)
    assert formatted(chosen, "flags").endswith(" --num_intra_op=1 '--odd=two words'\n")
    assert "# --num_intra_op=1 has no counterpart in Triton\n" in formatted(chosen, "triton")
    assert "# --odd=two words has no counterpart in Cortex\n" in formatted(chosen, "cortex")
    shown = deployment(chosen.configuration, SCENARIO, tmp_path / "a b.txt")
    assert f"'--batching_parameters_file={tmp_path}/a b.txt' --num_intra_op=1" in shown


STAGED = {
    "allow_model_code": True,
    "--tensorflow_intra_op_parallelism": 1,
    "port": 9000,
    "zero_padding": True,
}


def test_the_server_is_deployed_with_the_flags_that_it_was_measured_with(tmp_path):
    trial = planted(1, batching={}, throughput=1, p95_s=1)
    configuration = replace(trial.configuration, flags=(("zero_padding", "false"),))
    scenario = scenario_of(target={"model": str(tmp_path / "m"), "flags": STAGED, "device": "cpu"})
    words = ["--allow_model_code=true", "--tensorflow_intra_op_parallelism=1", "--zero_padding=false"]
    line = deployment(configuration, scenario, Path("FILE"))
    assert line.endswith(f"--batching_parameters_file=FILE --device=cpu {' '.join(words)}")
    assert "--port=9000" not in line
    pinned = scenario.model_copy(update={"target": scenario.target.model_copy(update={"cpus": (0, 2)})})
    assert deployment(configuration, pinned, Path("FILE")) == (
        f"{line}\n# measured under taskset -c 0,2 and with --monitoring_config_file, which the command leaves out"
    )
    assert docker_command(configuration, scenario, Path("FILE")).endswith(f" {' '.join(words)}\n")


def saved_model(folder):
    """With a version directory."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "saved_model.pb").touch()
    return folder


THREADS = "--grpc_max_threads=1040 --rest_api_num_threads=1040"


@pytest.mark.parametrize("runs", [{"server": "local"}, {"server": "docker"}, {"server": "bundled"}])
def test_a_server_that_is_not_ours_has_the_threads_that_it_was_measured_with(tmp_path, runs):
    alone = planted(1, batching=None, throughput=1, p95_s=1).configuration
    target = {"model": str(saved_model(tmp_path / "m")), **runs}
    for write in (deployment, docker_command):
        line = write(alone, scenario_of(target=target), Path("FILE"))
        is_ours = write is deployment and runs["server"] == "bundled"
        assert (THREADS in line) == ("_threads" in line) == (not is_ours)
    own = scenario_of(target={**target, "flags": {"grpc_max_threads": 7}})
    assert "--grpc_max_threads=7" in deployment(alone, own, Path("FILE"))


def test_what_starts_a_server_has_the_flags_of_every_trial(tmp_path):
    trial = planted(1, batching={"max_batch_size": 8, "batch_timeout_micros": 10}, throughput=900, p95_s=0.01)
    flags = {"tensorflow_intra_op_parallelism": 1, "model_name": "net", "port": 9000}
    target = {"model": str(tmp_path / "m"), "flags": flags, "server": "local"}
    scenario = scenario_of(target=target)
    for dialect in ("flags", "k8s", "kserve"):
        text = formatted(choose([trial], scenario=SCENARIO), dialect, scenario=scenario)
        assert "--tensorflow_intra_op_parallelism=1" in text
        assert "--grpc_max_threads=1040" in text
        assert "9000" not in text
        assert ("name: net\n" in text) == (dialect != "flags")
    assert "intra_op" not in formatted(choose([trial], scenario=SCENARIO), "triton", scenario=scenario)


def test_a_model_is_deployed_by_the_name_that_it_was_measured_under(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    alone = planted(1, batching=None, throughput=1, p95_s=1).configuration
    model = saved_model(tmp_path / "m")
    scenario = scenario_of(target={"model": str(model), "flags": {"model_name": "n"}})
    line = deployment(alone, scenario, Path("FILE"))
    assert f"--model_base_path={model} --model_name=n " in line
    line = docker_command(alone, scenario, Path("FILE"))
    assert "--model_name=n --model_base_path=/models/n" in line
    assert f"source={model},target=/models/n," in line


def test_a_file_of_a_version_stands_for_its_model(tmp_path):
    alone = planted(1, batching=None, throughput=1, p95_s=1).configuration
    model = saved_model(tmp_path / "m")
    scenario = scenario_of(target={"model": str(model / "1" / "saved_model.pb")})
    assert f"--model_base_path={model} --model_name=m " in deployment(alone, scenario, Path("FILE"))
    assert f"source={model},target=/models/m," in docker_command(alone, scenario, Path("FILE"))


@pytest.mark.parametrize("stages", [True, False])
def test_what_only_our_server_does_is_not_given_to_tensorflows(tmp_path, monkeypatch, stages):
    program(tmp_path / "bin" / "tensorflow_model_server", monkeypatch)
    version = tmp_path / "saved" / "1"
    version.mkdir(parents=True)
    (version / "saved_model.pb").touch()
    flags = {} if stages else {"batch_scheduler": "streaming"}
    if stages:
        (version / "stages.yaml").touch()
    configuration = planted(1, batching={}, throughput=1, p95_s=1).configuration
    scenario = scenario_of(target={"model": str(tmp_path / "saved"), "flags": flags})
    assert deployment(configuration, scenario, Path("FILE")).startswith("batchtune-model-server ")
    assert " batchtune-server " in docker_command(configuration, scenario, Path("FILE"))


def test_the_flags_that_only_our_server_has_are_known():
    from batchtune.server.server_flags import ServerFlags

    assert {flag.name for flag in fields(ServerFlags) if flag.metadata["ours"]} == BUNDLED_FLAGS


def program(path, monkeypatch):
    """On the PATH alone."""
    path.parent.mkdir()
    path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(path.parent))


def test_the_command_line_is_whole_and_for_a_server_that_is_here_and_can_serve_the_model(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    saved, onnx = tmp_path / "saved", tmp_path / "onnx"
    for model, file in ((saved, "saved_model.pb"), (onnx, "model.onnx")):
        (model / "1").mkdir(parents=True)
        (model / "1" / file).touch()
    batched, alone = (
        planted(1, batching=batching, throughput=1, p95_s=1).configuration for batching in ({}, None)
    )
    line = deployment(batched, scenario_of(target={"model": str(saved)}), Path("FILE"))
    assert line == (
        f"batchtune-model-server --model_base_path={saved} --model_name=saved --port=8500 --rest_api_port=8501 "
        "--enable_batching --batching_parameters_file=FILE"
    )
    local = scenario_of(target={"model": str(saved), "server": "local", "command": ["/opt/tf server"]})
    assert deployment(batched, local, Path("FILE")).startswith(f"'/opt/tf server' --model_base_path={saved} ")
    program(tmp_path / "bin" / "tensorflow_model_server", monkeypatch)
    line = deployment(batched, scenario_of(target={"model": str(saved)}), Path("FILE"))
    assert line.startswith("tensorflow_model_server ")
    bucketed = replace(batched, flags=(("length_buckets", "32,64"),))
    line = deployment(bucketed, scenario_of(target={"model": str(saved)}), Path("FILE"))
    assert line.startswith("batchtune-model-server ")  # no other groups by length
    assert line.endswith(" --length_buckets=32,64")
    line = deployment(alone, scenario_of(target={"model": str(onnx)}), Path("FILE"))
    assert line.startswith("batchtune-model-server ")
    assert "batching" not in line


def test_a_model_without_version_directory_is_copied_into_one_by_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    alone = planted(1, batching=None, throughput=1, p95_s=1).configuration
    write_onnx_naming(tmp_path / "net.onnx", "net.onnx.data", "more/weights.bin")
    touched(*(tmp_path / name for name in ("net.onnx.data", "more/weights.bin", "net.env", "net.onnx.bak")))
    line = deployment(alone, scenario_of(target={"model": str(tmp_path / "net.onnx")}), Path("FILE"))
    assert line == (
        f"mkdir -p served/net/1 served/net/1/more && cp -r {tmp_path}/net.onnx served/net/1/model.onnx "
        f"&& cp -r {tmp_path}/more/weights.bin served/net/1/more/weights.bin "
        f"&& cp -r {tmp_path}/net.onnx.data served/net/1/net.onnx.data "
        '&& batchtune-model-server --model_base_path="$PWD"/served/net --model_name=net --port=8500 '
        "--rest_api_port=8501"
    )
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "saved_model.pb").touch()
    line = deployment(alone, scenario_of(target={"model": str(tmp_path / "bare")}), Path("FILE"))
    assert f"cp -r {tmp_path}/bare/. served/bare/1 && batchtune-model-server" in line


def test_a_linked_model_is_deployed_by_the_name_of_its_link(tmp_path):
    alone = planted(1, batching=None, throughput=1, p95_s=1).configuration
    (tmp_path / "v7" / "1").mkdir(parents=True)
    (tmp_path / "v7" / "1" / "saved_model.pb").touch()
    (tmp_path / "net").symlink_to(tmp_path / "v7", target_is_directory=True)
    line = deployment(alone, scenario_of(target={"model": str(tmp_path / "net")}), Path("FILE"))
    assert f"--model_base_path={tmp_path}/net --model_name=net" in line


def test_no_batching_has_no_parameters_file(tmp_path):
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path, provenance={})
    run.append(planted(1, batching=None, throughput=900, p95_s=0.01, source="no_batching"), None)
    assert recommend(run) == 5
    assert (run.path / "recommendation.json").exists()
    assert not (run.path / "batching_parameters.txt").exists()


def test_a_question_changes_nothing_that_was_recommended(run, tmp_path, capsys):
    assert recommend(run) == 0
    kept = (run.path / "batching_parameters.txt").read_bytes()
    document = (run.path / "recommendation.json").read_bytes()
    recommend(run, p95="9.4ms")
    shown = capsys.readouterr().out
    assert f"--batching_parameters_file={run.path / 'batching_parameters.txt'}\n" in shown
    assert (run.path / "batching_parameters.txt").read_bytes() == kept
    assert (run.path / "recommendation.json").read_bytes() == document


def test_parameters_for_another_slo_are_written_before_they_are_deployed(tmp_path, capsys):
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path / "results", provenance={})
    for number in range(1, 7):
        slow = number < 4
        figures = {"throughput": 2300.0, "p95_s": 0.04} if slow else {"throughput": 1900.0, "p95_s": 0.01}
        batching = BATCH_14 if slow else BATCH_8
        run.append(planted(number, batching=batching, source="confirm", **figures), None)
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
    run_recommend(run.path, {"p95": "20ms"}, dialect="docker", write=None, results=tmp_path, json=False)
    said = capsys.readouterr()
    assert "source=FILE," in said.out
    assert f"note: `{again} --write FILE` writes FILE\n" in said.err
    file = tmp_path / "FILE"
    run_recommend(run.path, {"p95": "20ms"}, dialect=None, write=file, results=tmp_path, json=False)
    assert f"--batching_parameters_file={file}\n" in capsys.readouterr().out
    assert parse_batching(file.read_text(), source="f").parameters.max_batch_size == 8


def test_of_a_scenarios_folder_the_newest_run_is_taken_and_named(run, capsys):
    code = run_recommend(
        run.path.parent, {}, dialect="tfserving", write=None, results=run.path.parents[1], json=False
    )
    assert code == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(f"Run {run.path}, ")


def test_the_latest_run_says_that_there_are_other_scenarios(run, capsys):
    root = run.path.parents[1]
    earlier = create_run(
        scenario_of(name="earlier"), "", root=root, provenance={}, now=datetime(2020, 1, 1, tzinfo=UTC)
    )
    options = {"dialect": "tfserving", "write": None, "results": root, "json": True}
    run_recommend(None, {}, **options)
    said = capsys.readouterr()
    assert said.err == (
        f"note: {run.path} is the latest run, of scenario {run.path.parent.name}; name another by its folder: "
        f"{earlier.path.parent}\n"
    )
    assert json.loads(said.out)["run"] == str(run.path)
    run_recommend(run.path, {}, **options)
    assert capsys.readouterr().err == ""
    earlier.path.rename(root / "kept elsewhere")
    run_recommend(None, {}, **options)
    assert capsys.readouterr().err == ""


def test_a_container_has_the_model_and_the_parameters_mounted(run, tmp_path, capsys):
    assert run_recommend(run.path, {}, dialect="docker", write=None, results=run.path.parent, json=False) == 0
    command = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert command == (
        "docker run --rm --publish=127.0.0.1:8500:8500 --publish=127.0.0.1:8501:8501 "
        "--mount=type=bind,source=PATH/fake,target=/models/fake,readonly "
        f"--mount=type=bind,source={run.path}/batching_parameters.txt,"
        "target=/batchtune/batching_parameters.txt,readonly --init --entrypoint=tensorflow_model_server tensorflow/serving "
        "--port=8500 --rest_api_port=8501 --model_name=fake --model_base_path=/models/fake --enable_batching=true "
        "--batching_parameters_file=/batchtune/batching_parameters.txt --grpc_max_threads=1040 --rest_api_num_threads=1040"
    )
    mounted = re.search(r"source=([^,]*batching_parameters.txt)", command)
    assert parse_batching(Path(mounted[1]).read_text(), source="f").parameters.max_batch_size == 14


@pytest.mark.parametrize(
    ("file", "mount", "image"),
    [
        ("net.onnx", "net.onnx,target=/models/net/1/model.onnx,", "batchtune-server --model_name=net"),
        ("net/1/saved_model.pb", "net,target=/models/net,", "tensorflow/serving --port=8500"),
        ("net/saved_model.pb", "net,target=/models/net/1,", "tensorflow/serving --port=8500"),
    ],
)
def test_a_container_serves_the_model_as_it_lies(tmp_path, file, mount, image):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    model = tmp_path / ("net.onnx" if file == "net.onnx" else "net")
    alone = planted(1, batching=None, throughput=1, p95_s=1).configuration
    line = docker_command(alone, scenario_of(target={"model": str(model)}), Path("FILE"))
    assert f"--mount=type=bind,source={tmp_path}/{mount}readonly" in line
    assert image in line
    assert "batching" not in line.replace("batchtune", "")


def test_a_triton_s_container_has_its_configuration_in_the_place_of_the_old_one(tmp_path):
    (tmp_path / "m").mkdir()
    configuration = planted(1, batching={"max_batch_size": 8}, throughput=1, p95_s=1).configuration
    scenario = scenario_of(target={"model": str(tmp_path / "m")})
    line = docker_command(replace(configuration, dialect="triton"), scenario, Path("config.pbtxt"))
    assert f"source={tmp_path}/m,target=/models/m,readonly" in line
    assert "source=config.pbtxt,target=/models/m/config.pbtxt,readonly" in line
    assert line.endswith("tritonserver --model-repository=/models\n")


def test_a_triton_s_container_has_the_flags_of_the_server(tmp_path):
    configuration = planted(1, batching={"max_batch_size": 8}, throughput=1, p95_s=1).configuration
    own = (("preserve_ordering", "true"), ("thread-count", "2"))
    flags = {"rate-limit": "execution_count", "disable-auto-complete-config": True, "http-port": 9000}
    scenario = scenario_of(target={"model": str(tmp_path / "m"), "flags": flags})
    line = docker_command(replace(configuration, dialect="triton", flags=own), scenario, Path("FILE"))
    assert line.endswith(
        " --model-repository=/models --rate-limit=execution_count --thread-count=2 --disable-auto-complete-config\n"
    )


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"framework": "torch"}, "batchtune-server --model_name=fake"),
        ({"framework": "keras"}, "tensorflow/serving --port=8500"),
        ({"device": "cuda"}, "--gpus=all --init batchtune-server-cuda --model_name=fake"),
        ({"device": "cuda", "model": "saved"}, "tensorflow/serving:latest-gpu --port=8500"),
        ({"docker": {"image": "mine", "gpus": "all"}, "flags": {"zero_padding": True}}, "mine --port=8500"),
    ],
)
def test_a_container_has_the_image_that_can_do_what_was_measured(tmp_path, target, words):
    alone = planted(1, batching=None, throughput=1, p95_s=1).configuration
    if "model" in target:
        target = {**target, "model": str(saved_model(tmp_path / "saved"))}
    line = docker_command(alone, scenario_of(target={"model": "fake", **target}), Path("FILE"))
    assert words in line
    assert ("--device=cuda" in line) == ("server-cuda" in line)
    assert ("--gpus=all" in line) == ("device" in target or "docker" in target)


@pytest.mark.parametrize(
    ("target", "file", "command"),
    [
        ({"framework": "torch"}, "", "TORCH=torch docker/build.sh server"),
        ({}, "1/model.pt2", "TORCH=torch docker/build.sh server"),
        ({}, "1/model.onnx", "docker/build.sh server"),
        ({"device": "cuda"}, "1/model.pt", "docker/build.sh server-cuda"),
        ({}, "1/saved_model.pb", ""),
    ],
)
def test_the_command_that_builds_the_image_is_given_where_it_is_ours(tmp_path, target, file, command):
    model = tmp_path / "m" / file
    model.parent.mkdir(parents=True, exist_ok=True)
    if file:
        model.touch()
    alone = planted(1, batching=None, throughput=1, p95_s=1).configuration
    scenario = scenario_of(target={"model": str(tmp_path / "m") if file else "fake", **target})
    assert build_command(alone, scenario) == command


@pytest.mark.parametrize("dialect", ["k8s", "kserve"])
def test_manifests_hold_what_was_recommended(run, tmp_path, dialect):
    file = tmp_path / "m.yaml"
    assert run_recommend(run.path, {}, dialect=dialect, write=file, results=tmp_path, json=False) == 0
    assert parse_batching(file.read_text(), source="f").parameters.max_batch_size == 14
    assert "name: fake-batching" in file.read_text()


def test_a_server_behind_commands_is_deployed_by_its_own():
    target = {"kind": "command", "model": "m", "rest_url": "http://h:1"}
    configuration = planted(1, batching={"max_batch_size": 8}, throughput=1, p95_s=1).configuration
    again = "batchtune recommend results/r"
    to_file = f"{again} --format k8s --write FILE; "
    for words, render, expected in (
        (["kubectl", "apply", "-f", "{file}"], "k8s", f"{to_file}kubectl apply -f FILE"),
        (["./apply it"], None, f"{again} --format json --write FILE; './apply it' < FILE"),
        (["put", "{json}"], None, f"{again} --format json --write FILE; put FILE"),
        (
            ["put", "{json}", "{file}"],
            "k8s",
            f"{to_file}{again} --format json --write FILE.json; put FILE.json FILE",
        ),
    ):
        scenario = scenario_of(target={**target, "apply": words, "render": render})
        assert deployment(configuration, scenario, Path("FILE"), recommend=again) == expected


def test_what_deploys_by_commands_names_the_run_that_it_is_of(tmp_path, capsys):
    scenario = scenario_of(target={"kind": "command", "model": "m", "rest_url": "http://h:1", "apply": ["a"]})
    run = create_run(scenario, format_scenario(scenario), root=tmp_path, provenance={})
    for trial in helping_ledger():
        run.append(trial, None)
    recommend(run)
    out = capsys.readouterr().out
    assert f"deploy   batchtune recommend {run.path} --format json --write FILE; a < FILE\n" in out


@pytest.mark.parametrize("dialect", ["triton", "cortex"])
def test_another_servers_dialect_is_not_deployed_on_tf_serving(run, capsys, dialect):
    run_recommend(run.path, {}, dialect=dialect, write=None, results=run.path.parent, json=False)
    assert " deploy " not in capsys.readouterr().out


@pytest.mark.parametrize("dialect", ["triton", "cortex"])
def test_threads_that_are_left_to_the_server_are_pointed_out(dialect):
    batching = {"max_batch_size": 8, "batch_timeout_micros": 10}
    text = formatted(
        choose([planted(1, batching=batching, throughput=900, p95_s=0.01)], scenario=SCENARIO), dialect
    )
    assert "# num_batch_threads is absent" in text


def test_a_run_that_cannot_be_written_is_answered_from_all_the_same(run, capsys):
    """A folder stands where the file would: the one obstacle that also stops a superuser."""
    (run.path / "recommendation.json").mkdir()
    assert recommend(run) == 0
    shown = capsys.readouterr()
    assert "--batching_parameters_file=FILE\n" in shown.out
    assert shown.err.startswith(f"note: cannot write {run.path / 'recommendation.json'}: ")
    assert "--write FILE" in shown.err


def test_an_account_of_the_search_that_cannot_be_kept_costs_no_recommendation(run, capsys):
    (run.path / SEARCH).mkdir()
    keep_account(run, SUMMARY)
    assert capsys.readouterr().err.startswith(f"note: cannot write {run.path / SEARCH}: ")


def test_nothing_to_recommend_names_the_run(run):
    with pytest.raises(NoFeasibleConfigurationError, match=f"^{run.path}: no configuration"):
        recommend(run, p95="1ms")


def test_tritons_queue_is_counted_in_requests_of_so_many_rows():
    scenario = scenario_of(request={"rows": 4})
    batching = {"max_batch_size": 8, "max_enqueued_batches": 10, "num_batch_threads": 1}
    chosen = choose([planted(1, batching=batching, throughput=900, p95_s=0.01)], scenario=scenario)
    assert "max_queue_size: 20 " in formatted(chosen, "triton")


def test_a_file_with_other_parameters_than_those_printed_is_not_deployed(run, capsys):
    assert recommend(run) == 0
    assert "FILE" not in capsys.readouterr().out
    for stale in ("max_batch_size { value: 3 }\n", "# batchtune: of an older version\n"):
        (run.path / "batching_parameters.txt").write_text(stale)
        assert recommend(run) == 0
        assert "--batching_parameters_file=FILE\n" in capsys.readouterr().out
        assert (run.path / "batching_parameters.txt").read_text() == stale


def test_a_sweep_that_ends_without_a_recommendation_leaves_no_stale_one(run):
    assert recommend(run) == 0
    missed = [replace(trial, feasible=False) for trial in helping_ledger()]
    scenario = scenario_of(slo={"p95": "1ms"}, search=SCENARIO.search.model_dump(by_alias=True))
    with pytest.raises(NoFeasibleConfigurationError):
        conclude(run, scenario, missed, json=False)
    assert (run.path / "batching_parameters.txt").exists()
    with pytest.raises(NoFeasibleConfigurationError):
        conclude(run, scenario, missed, json=False, swept=True)
    assert not (run.path / "batching_parameters.txt").exists()
    assert not (run.path / "recommendation.json").exists()


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
def test_what_would_establish_it_has_twice_of_what_was_given_but_no_less_than_without_a_budget(
    run, budget, more
):
    scenario = scenario_of(
        search={"space": {"max_batch_size": [8, 14]}, **({"budget": budget} if budget else {})}
    )
    step = to_establish(run, scenario, helping_ledger())
    assert step == f"batchtune sweep {run.path}/scenario.yaml --resume {run.path} {more}"


def test_another_slo_is_established_by_a_sweep_of_its_own(run):
    asked = SloSpec.model_validate({"p95": "9.4ms", "errors": 0.02})
    step = to_establish(run, SCENARIO, helping_ledger(), asked=asked)
    assert step == f"batchtune sweep {run.path}/scenario.yaml --slo-p95 9.4ms --slo-errors 0.02"


@pytest.mark.parametrize(("budget", "is_short"), [("20s", True), ("90s", False)])
def test_a_short_sweep_says_that_more_time_is_what_is_missing(run, capsys, budget, is_short):
    space = {"max_batch_size": [8, 14], "batch_timeout_micros": [1000, 2000], "num_batch_threads": [1]}
    scenario = scenario_of(search={"budget": {"time": budget}, "space": space})
    searched = [trial for trial in helping_ledger() if trial.source != "confirm"]
    for trials in (searched, helping_ledger()):
        code = conclude(run, scenario, trials)
        said = re.sub(r"\s+", " ", capsys.readouterr().out)
        missing = (
            f"More time is what is missing: this sweep had {budget[:2]} s, without --budget it has 2 min"
        )
        assert (missing in said) == (is_short and code == 5)
    asked = SloSpec.model_validate({"p95": "9.4ms"})
    assert to_establish(run, scenario, searched, asked=asked).endswith(
        "--slo-p95 9.4ms --budget 2m" if is_short else "--slo-p95 9.4ms"
    )
    missed = [planted(1, batching=None, throughput=900, p95_s=0.09, source="no_batching")]
    with pytest.raises(InconclusiveError) as raised:
        conclude(run, scenario, missed)
    assert raised.value.hint.startswith("give the sweep more time: " if is_short else "to look further: ")


def test_where_every_batch_fails_nothing_would_establish_more(run):
    trials = [
        planted(1, batching=None, throughput=900, p95_s=0.01, source="no_batching"),
        planted(2, batching=BATCH_14, throughput=900, p95_s=0.01, failure="OOM"),
    ]
    assert to_establish(run, SCENARIO, trials) is None


def test_an_answer_that_is_open_names_the_command_that_goes_on_though_a_trial_failed(run, capsys):
    missed = [
        planted(1, batching=None, throughput=900, p95_s=0.09, source="no_batching"),
        planted(2, batching=BATCH_14, throughput=900, p95_s=0.09),
        planted(3, batching={"max_batch_size": 2}, throughput=1, p95_s=1, failure="OOM"),
    ]
    with pytest.raises(InconclusiveError, match="only 2 configurations with batching were tried") as raised:
        conclude(run, SCENARIO, missed, json=True)
    command = to_establish(run, SCENARIO, missed)
    assert raised.value.hint == f"to look further: {command}"
    assert json.loads(capsys.readouterr().out)["to_establish"] == command


def test_a_single_configuration_was_tried(run):
    missed = [
        planted(1, batching=None, throughput=900, p95_s=0.09, source="no_batching"),
        planted(2, batching=BATCH_14, throughput=900, p95_s=0.09),
    ]
    with pytest.raises(InconclusiveError, match="only 1 configuration with batching was tried"):
        conclude(run, SCENARIO, missed, json=True)


@pytest.mark.parametrize(
    ("path", "where"), [("/etc/app.json", "/etc/app.json"), ("{scratch}/settings.json", "settings.json")]
)
def test_a_server_that_reads_a_file_is_deployed_by_that_file(path, where):
    target = {
        "kind": "http",
        "url": "http://h:1/p",
        "launch": ["serve", path],
        "set": {"file": {"path": path, "change": {"rows": "{{rows}}"}}},
        "means": {"rows": "rows"},
    }
    body = {"request": {"body": {"x": "{{row}}"}}, "search": {"space": {"rows": [1, 8]}}}
    scenario = scenario_of(target=target, **body)
    chosen = scenario.configuration({"max_batch_size": 8})
    assert deployment(chosen, scenario, Path("FILE")) == f"set rows: 8 in {where}"


def test_inside_a_scenarios_folder_the_newest_run_is_found(run, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    assert (
        run_recommend(Path(), {}, dialect="tfserving", write=None, results=Path("results"), json=False) == 0
    )


def test_a_dash_is_no_file_to_write_to(tmp_path):
    done = answered("recommend", "--write", "-", cwd=tmp_path)
    assert done.returncode == 2
    assert "--write: expected a file; was -" in done.stderr
    assert not list(tmp_path.iterdir())
