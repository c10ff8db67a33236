"""Is any server launched, given its parameters, asked, and put back by commands, and is every failure of one told?"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import yaml

from batchtune.archive.run import create_run
from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.cli.arguments.load_request import LoadRequest
from batchtune.cli.commands import run_load as load
from batchtune.cli.commands.compare import run_compare
from batchtune.cli.session import run_restore
from batchtune.errors import ScenarioError, TargetError, UsageError
from batchtune.scenario.reader import format_scenario, parse_scenario, read_scenario
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target.choice import target_of
from batchtune.target.command import CommandTarget, restored, small_environment
from tests.target.stand_in_docker import StandInDocker
from tests.target.triton.fake_triton import FakeTriton
from tests.waiting import wait_until

SCENARIOS = Path(__file__).parents[2] / "scenarios"


BATCHED = Configuration(batching=BatchingParameters(max_batch_size=4, batch_timeout_micros=0))


READY = ["sh", "-c", "exit 0"]


def spec_of(**keys: object) -> TargetSpec:
    given = {
        "kind": "command",
        "model": "m",
        "rest_url": "http://127.0.0.1:9",
        "apply": ["true"],
        "ready": READY,
    }
    return TargetSpec.model_validate({**given, **keys})


def kept(path: Path) -> list[str]:
    return ["sh", "-c", f'cat > {path} && echo "$@" >> {path}', "sh"]


def test_a_command_gets_json_on_its_stdin_and_files_in_its_words(tmp_path: Path) -> None:
    spec = spec_of(apply=[*kept(tmp_path / "got"), "{json}", "--file={file}", "{other}"], render="tfserving")
    with CommandTarget(spec) as target:
        target.apply(BATCHED)
        *document, words = (tmp_path / "got").read_text().splitlines()
        (tmp_path / "got").unlink()
        target.apply(BATCHED)
        assert not (tmp_path / "got").exists()  # it is in force
        expected = {"batching": {"max_batch_size": 4, "batch_timeout_micros": 0}, "flags": {}}
        json_path, file, other = words.split()
        assert json.loads("\n".join(document)) == json.loads(Path(json_path).read_text()) == expected
        assert "max_batch_size { value: 4 }" in Path(file.removeprefix("--file=")).read_text()
        assert other == "{other}"
    assert not Path(json_path).exists()


def test_the_words_of_a_step_and_those_of_the_server_are_told_apart_and_both_kept(tmp_path: Path) -> None:
    talking = tmp_path / "talking"
    launch = ["sh", "-c", f"echo chatter; touch {talking}; exec sleep 60"]
    hanging = f"while [ ! -e {talking} ]; do sleep 0.01; done; exit 3"
    with CommandTarget(spec_of(launch=launch, apply=["sh", "-c", hanging])) as target:
        target.keep_log(tmp_path / "log")
        with pytest.raises(TargetError) as raised:
            target.apply(BATCHED)
        assert raised.value.message == "target.apply exited with 3; it said nothing"
        assert target.log_tail() == "  chatter"
    with CommandTarget(spec_of(launch=launch, apply=["sh", "-c", "echo applied"])) as target:
        target.keep_log(tmp_path / "log")
        target.apply(BATCHED)
    assert {"chatter", "applied"} <= set((tmp_path / "log").read_text().split())


def test_a_command_has_a_small_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("ASKED_FOR", "2")
    spec = spec_of(apply=["sh", "-c", f"env > {tmp_path / 'env'}"], environment=["ASKED_FOR", "NOT_SET"])
    with CommandTarget(spec) as target:
        target.apply(BATCHED)
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert {"PATH", "ASKED_FOR"} <= names
    assert not names & {"SECRET", "NOT_SET"}
    assert "SECRET" not in small_environment()


def test_a_variable_that_is_not_there_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_HERE", "1")
    events: list[str] = []
    with CommandTarget(spec_of(environment=["SET_HERE", "TYPO"]), on_event=events.append) as target:
        target.apply(BATCHED)
        target.apply(Configuration(batching=None))
    assert events == ["target.environment: TYPO is not set here, so the commands do without"]


def test_stop_and_restore_are_run_once_and_only_after_something_was_applied(tmp_path: Path) -> None:
    log = tmp_path / "log"
    steps = {name: ["sh", "-c", f"echo {name} >> {log}"] for name in ("stop", "restore")}
    with CommandTarget(spec_of(**steps)):
        pass
    assert not log.exists()
    with CommandTarget(spec_of(**steps, apply=["sh", "-c", f"echo apply >> {log}"])) as target:
        target.apply(BATCHED)
        target.restore()
    assert log.read_text().split() == ["apply", "stop", "restore"]
    restored(spec_of(**steps))
    assert log.read_text().split()[3:] == ["restore"]


def test_a_stop_that_fails_is_told_and_what_was_there_is_put_back_all_the_same(tmp_path: Path) -> None:
    events: list[str] = []
    restore = ["touch", str(tmp_path / "restored")]
    with CommandTarget(spec_of(stop=["false"], restore=restore), on_event=events.append) as target:
        target.apply(BATCHED)
    assert events[0] == "target.stop exited with 1; it said nothing"
    assert (tmp_path / "restored").exists()


def test_a_restore_that_fails_says_so() -> None:
    target = CommandTarget(spec_of(restore=["sh", "-c", "echo forbidden; exit 3"]))
    target.apply(BATCHED)
    with pytest.raises(TargetError, match=r"target\.restore exited with 3; its last words:\n  forbidden"):
        target.close()
    target.close()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"apply": ["sh", "-c", "echo no quota >&2; exit 3"]}, "target.apply exited with 3; its last words:\n  no quota"),
        ({"apply": ["sh", "-c", "kill -9 $$"]}, "target.apply was ended by signal 9; it said nothing"),
        ({"apply": ["no-such-program-here"]}, "target.apply: cannot start 'no-such-program-here': no such program"),
        ({"apply": ["./no-such-program"]}, "target.apply: cannot start './no-such-program': no such program"),
        ({"apply": ["sh", "-c", "echo waiting; sleep 60"], "step_timeout": "100ms"}, "target.apply did not end within 0.1 s; its last words:\n  waiting"),
        ({"ready": ["sh", "-c", "echo 0 of 1; exit 1"], "ready_timeout": "300ms"}, "the server is not ready after 0.3 s: target.ready exited with 1; its last words:\n  0 of 1"),
        ({"ready": ["sleep", "60"], "ready_timeout": "100ms"}, "the server is not ready after 0.1 s: target.ready did not end"),
        ({"ready": "http://me:secret@127.0.0.1:9/x", "ready_timeout": "100ms"}, "the server is not ready after 0.1 s: http://127.0.0.1:9/x: no connection"),
        ({"ready": None, "ready_timeout": "100ms"}, "model 'm' at http://127.0.0.1:9 is not ready after 0.1 s: no connection"),
        ({"launch": ["sh", "-c", "echo bad flag; exit 2"], "ready": ["false"]}, "target.launch: the server exited with 2; its last words:\n  bad flag"),
        ({"apply": ["true", "{file}"], "render": "cortex"}, "cortex: batch_interval: Cortex accepts only an interval above 0"),
    ],
)  # fmt: skip
def test_what_fails_is_the_trial_s_reason_and_nothing_is_left_running(
    keys: dict[str, object], words: str
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with CommandTarget(spec_of(**keys)) as target:
        with pytest.raises((TargetError, Exception)) as raised:
            target.apply(BATCHED)
        assert str(getattr(raised.value, "message", raised.value)).startswith(words)
        assert target.in_force is None
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("script", "words", "hints"),
    [
        ("exit 1", "target.launch: the server exited with 1; its last words:\n  (the log is empty)", ("by hand", "target.environment")),
        ("echo port 9; exec sleep 60", "no connection; what target.launch started still runs; its last words:\n  port 9", ("target.rest_url", "target.ready_timeout")),
    ],
)  # fmt: skip
def test_a_launch_that_is_never_ready_names_its_key_its_words_and_what_to_do(
    script: str, words: str, hints: tuple[str, ...]
) -> None:
    spec = spec_of(launch=["sh", "-c", script], ready=None, ready_timeout="300ms")
    with CommandTarget(spec) as target:
        with pytest.raises(TargetError) as raised:
            target.apply(BATCHED)
        assert not target.alive()
    assert raised.value.message.endswith(words)
    assert all(hint in raised.value.hint for hint in hints)


def test_what_a_hanging_command_started_is_ended_with_it(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path / 'pid'}; wait"
    spec = spec_of(apply=["sh", "-c", script], step_timeout="200ms")
    with CommandTarget(spec) as target, pytest.raises(TargetError, match="did not end within"):
        target.apply(BATCHED)
    (started,) = (int(word) for word in (tmp_path / "pid").read_text().split())
    wait_until(lambda: not psutil.pid_exists(started) or psutil.Process(started).status() == "zombie")


@pytest.mark.parametrize(
    ("discard", "says"), [(False, "restored the original state"), (True, "stays as it is")]
)
def test_a_sweep_that_was_killed_is_put_back_by_its_own_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], discard: bool, says: str
) -> None:
    scenario = parse_scenario(
        f"name: s\ntarget: {{kind: command, model: m, rest_url: 'http://h:1', apply: [a], restore: [touch, {tmp_path}/it]}}\n"
        "load: {arrivals: closed, concurrency: 4}\nobjective: throughput\n"
    )
    run = create_run(scenario, format_scenario(scenario), root=tmp_path, provenance={})
    assert run_restore(run.path, discard=discard) == 0
    assert (tmp_path / "it").exists() != discard
    assert says in capsys.readouterr().err


def test_a_load_is_kept_before_its_first_configuration_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchtune.cli.session.fleet_of", lambda _load, **_events: nullcontext())
    path, results, restored = tmp_path / "s.yaml", tmp_path / "results", tmp_path / "it"
    path.write_text(
        "name: s\ntarget: {kind: command, model: m, rest_url: 'http://127.0.0.1:9', "
        f"apply: [sh, -c, 'ls {results}/s; exit 1'], restore: [touch, {restored}]}}\n"
        "load: {arrivals: closed, concurrency: 4}\nobjective: throughput\n"
    )
    with pytest.raises(TargetError, match="-load") as raised:
        load.run_load(LoadRequest(scenario=path, results=results, json=True, quiet=True))
    (run,) = (results / "s").iterdir()
    assert run.name in raised.value.message
    restored.unlink()
    assert run_restore(run) == 0
    assert restored.exists()


def test_a_server_whose_words_name_a_file_is_started_anew_for_each_configuration(tmp_path: Path) -> None:
    launch = ["sh", "-c", f"cat $1 >> {tmp_path / 'seen'}; sleep 60", "sh", "{file}"]
    ready = ["test", "-s", str(tmp_path / "seen")]
    with CommandTarget(spec_of(launch=launch, apply=None, render="flags", ready=ready)) as target:
        pids = []
        for size in (4, 8):
            target.apply(Configuration(batching=BatchingParameters(max_batch_size=size)))
            pids.append(target.pid)
        assert len(set(pids)) == 2
        assert target.alive()
    assert not target.alive()
    assert not any(psutil.pid_exists(pid) for pid in pids if pid is not None)


def test_a_container_that_a_launch_runs_is_removed_with_it(tmp_path: Path) -> None:
    server = tmp_path / "server"
    server.write_text("#!/bin/sh\nexec sleep 60\n")
    server.chmod(0o755)
    docker = StandInDocker(tmp_path, server=server)
    id_file = tmp_path / "id"
    launch = [str(docker.program), "run", f"--cidfile={id_file}", "image"]
    with CommandTarget(spec_of(launch=launch, ready=["test", "-s", str(id_file)])) as target:
        target.apply(BATCHED)
        container = psutil.Process(docker.pid)
    container.wait(5)
    assert docker.command_lines[-1] == ["rm", "--force", "c0ffee"]
    assert not id_file.exists()


def test_an_id_file_that_is_there_names_a_container_of_somebody_elses(tmp_path: Path) -> None:
    docker = StandInDocker(tmp_path)
    id_file = tmp_path / "id"
    id_file.write_text("theirs")
    launch = [str(docker.program), "run", f"--cidfile={id_file}", "image"]
    words = "exists: it names another container"
    with CommandTarget(spec_of(launch=launch)) as target, pytest.raises(TargetError, match=words):
        target.apply(BATCHED)
    assert id_file.read_text() == "theirs"
    assert not (docker.program.parent / "command_lines").exists()


def test_a_launch_that_only_waits_for_the_server_does_not_pass_for_it() -> None:
    with FakeTriton() as server:
        spec = spec_of(launch=["sleep", "60"], rest_url=server.url)
        with CommandTarget(spec, kserve=True) as target:
            target.apply(BATCHED)
            counters = target.counters()
    assert (counters.server_cpu_s, counters.memory_peak_bytes) == (None, None)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{kind: command, model: m, rest_url: 'http://h:1'}", "target.apply: missing: how the server is given"),
        ("{kind: command, model: m, apply: [a]}", "target.rest_url: missing: where the server is"),
        ("{kind: command, model: m, grpc_url: 'h:1', apply: [a]}", "target.ready: missing: how batchtune finds out"),
        ("{kind: command, model: m, rest_url: 'http://h:1', apply: a b}", "target.apply: expected a list of words"),
        ("{kind: command, model: m, rest_url: 'http://h:1', apply: [a, 1]}", "target.apply: expected a list of words"),
        ("{kind: command, model: m, rest_url: 'http://h:1', apply: [a, '{file}']}", "target.render: missing"),
        ("{kind: command, model: m, rest_url: 'http://h:1', apply: [a], render: k8s}", "target.render: no word"),
        ("{kind: command, model: m, rest_url: 'http://h:1', apply: [a], server: local}", "target.server: of kind command"),
        ("{kind: command, model: m, rest_url: 'http://h:1', apply: [a], ready: soon}", "target.ready: expected a URL"),
        ("{model: imdb_transformer, apply: [a]}", "target.apply: of kind command only; this one is tfserving"),
        ("{model: imdb_transformer, step_timeout: 5s}", "target.step_timeout: of kind command only"),
    ],
)  # fmt: skip
def test_words_that_do_not_go_together_are_refused(target: str, words: str) -> None:
    text = f"name: s\ntarget: {target}\nload: {{arrivals: closed, concurrency: 4}}\nobjective: throughput\n"
    with pytest.raises(ScenarioError) as raised:
        parse_scenario(text)
    assert f"<string>:2: {words}" in raised.value.message


KUBECTL = """#!/bin/sh
echo "$@" >> FOLDER/command_lines
for word; do last=$word; done
[ "$1" != apply ] || cp "${last#--filename=}" FOLDER/manifest
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a kubectl in the PATH was given: `command_lines`, and the last `manifest` to apply. No server runs.

    What only a cluster can show (pods side by side, field managers, a rollout that stalls) is not tested.
    """
    (tmp_path / "kubectl").write_text(KUBECTL.replace("FOLDER", str(tmp_path)))
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_a_deployment_is_rolled_out_and_gets_its_own_manifest_back(cluster: Path) -> None:
    scenario = read_scenario(SCENARIOS / "kubernetes-rollout.yaml")
    with target_of(scenario) as target:
        target.apply(scenario.configuration({"max_batch_size": 8, "batch_timeout_micros": 0}))
    config_map, deployment = yaml.safe_load_all((cluster / "manifest").read_text())
    (file,) = config_map["data"]
    assert "max_batch_size { value: 8 }" in config_map["data"][file]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    path = f"/batchtune/{file}"
    flags = ["--enable_batching=true", f"--batching_parameters_file={path}", "--grpc_max_threads=1000"]
    assert container["args"] == flags
    apply, *_, asked, replace = (cluster / "command_lines").read_text().splitlines()
    assert apply.startswith("apply --server-side --force-conflicts --field-manager=batchtune --filename=")
    assert asked == "rollout status deployment/my-model --timeout=30s"
    assert replace == "replace --filename=my_model.yaml"


def test_an_inference_service_gets_its_args_rewritten(cluster: Path) -> None:
    scenario = read_scenario(SCENARIOS / "kserve-inferenceservice.yaml")
    labels = []
    with target_of(scenario) as target:
        for size in (8, 16):
            target.apply(scenario.configuration({"max_batch_size": size}))
            *_, service = yaml.safe_load_all((cluster / "manifest").read_text())
            labels.append(service["metadata"]["labels"]["batchtune"])
            assert service["spec"]["predictor"]["model"]["args"][0] == "--enable_batching=true"
            assert service["metadata"]["name"] == scenario.target.model  # KServe serves it by that name
    lines = (cluster / "command_lines").read_text().splitlines()
    digests = [line.split()[2].rpartition("=")[2] for line in lines if line.startswith("wait ")]
    assert digests == labels
    assert len(set(labels)) == 2


PAIR = """\
name: pair
target: {kind: command, model: m, rest_url: "http://127.0.0.1:9", apply: [a], ready: [b]}
load: {arrivals: closed, concurrency: 2}
objective: throughput
variants:
  one: {fixed: {max_batch_size: 16}}
  other: {target: {apply: [other]}}
"""


def test_variants_with_commands_of_their_own_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pair.yaml").write_text(PAIR)
    wanted = LoadRequest(scenario=tmp_path / "pair.yaml", results=tmp_path / "results", quiet=True)
    with pytest.raises(UsageError, match="different targets of kind command") as raised:
        run_compare(wanted, blocks=1)
    assert "in fixed" in raised.value.hint
