"""Does a newcomer get a scenario without a checkout, and nothing that is there overwritten?"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from batchtune.cli.app import app
from batchtune.cli.commands import init_model
from batchtune.cli.commands.doctor import Check
from batchtune.cli.commands.model_scenario import LookedAt
from batchtune.errors import TargetError, UsageError
from batchtune.scenario.examples import example_names, read_example
from batchtune.scenario.reader import read_scenario
from tests.cli.test_cli import EMULATED
from tests.load.load_servers import ScriptedHttp, http_answer
from tests.load.tiny_onnx import product
from tests.server.server_process import ServerProcess


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def batchtune(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def refused(*words: str) -> UsageError:
    """What `init` says where it refuses; nothing is written."""
    before = sorted(Path().iterdir())
    done = batchtune("init", *words)
    assert isinstance(done.exception, UsageError)
    assert sorted(Path().iterdir()) == before
    return done.exception


@pytest.mark.parametrize("words", [("init", "--example"), ("init",)])
def test_examples_are_listed_a_line_each(words: tuple[str, ...]) -> None:
    lines = batchtune(*words).stdout.splitlines()
    assert [line.split()[0] for line in lines] == example_names()
    assert all(line.endswith("?") for line in lines)


def test_an_example_is_written_where_asked_and_the_next_command_named() -> None:
    done = batchtune("init", "--example", "quickstart")
    assert done.exit_code == 0
    assert done.stdout.startswith("quickstart.yaml: ")
    assert "next: batchtune sweep quickstart.yaml" in done.stderr
    assert read_scenario(Path("quickstart.yaml")).name == "quickstart"
    done = batchtune("init", "--example", "imdb-benchmark", "--output", "a b.yaml")
    assert "next: batchtune compare 'a b.yaml'" in done.stderr
    assert "batchtune compare 'a b.yaml'" in Path("a b.yaml").read_text()
    printed = batchtune("init", "--example", "quickstart", "-o", "-").stdout
    assert printed == read_example("quickstart").text_for("quickstart.yaml")


QUICKSTART = ("--example", "quickstart")
CI = ("--ci", "github")
NO_LIST = "not with the list of examples"
TRY = "init ./my_model"


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ((*CI, "s.yaml", "--slo-p95", "20ms"), "--slo-…: not with --ci", "by what the scenario says"),
        ((*CI, "--example", "s.yaml"), "--example: not with --ci", "leave it out"),
        ((*QUICKSTART, "--slo-p95", "5ms"), "--slo-…: not with an example", "the example's file"),
        ((*QUICKSTART, "--rows", "4"), "--rest, --rows, --shape and --range: not with", ""),
        (("--check",), f"--check: {NO_LIST}", TRY),
        (("--rate", "5"), f"--rate: {NO_LIST}", TRY),
        (("-o", "x.yaml"), f"--write: {NO_LIST}", TRY),
        ((*QUICKSTART, "-o", "mine.yaml"), "mine.yaml: already exists", ""),
        ((*QUICKSTART, "-o", "no/a.yaml"), "no/a.yaml: cannot be written: No such file or directory", ""),
        (("quickstart",), "", "init --example quickstart"),
        (("no_model", "-o", "no/a.yaml"), "no/a.yaml: cannot be written: there is no folder no", ""),
        (("m.yaml",), "is a scenario already", ""),
    ],
)
def test_what_would_not_be_heard_is_refused(words: tuple[str, ...], message: str, hint: str) -> None:
    Path("mine.yaml").write_text("mine")
    error = refused(*words)
    assert message in error.message
    assert hint in error.hint
    assert Path("mine.yaml").read_text() == "mine"


QUIET = Check(state="ok", text="quiet for 4 s")


@pytest.fixture
def emulated(tmp_path: Path) -> Path:
    model = tmp_path / "net"
    model.mkdir()
    (model / "emulated.yaml").write_text(EMULATED)
    return model


def test_a_model_is_asked_and_its_scenario_written_with_the_next_command(
    emulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_model, "watch_host", lambda _on_window: QUIET)
    done = batchtune("init", str(emulated), "--write", "m.yaml", "--rows", "2")
    assert done.exit_code == 0, done.exception
    text = Path("m.yaml").read_text()
    scenario = read_scenario(Path("m.yaml"))
    assert (scenario.name, scenario.objective, scenario.request.rows) == ("net", "capacity", 2)
    assert "    batchtune sweep m.yaml\n" in text
    assert "# a guess, ten times a lone request: set the limit that you promise" in text
    assert "takes x float32 [?, 8]" in text
    assert 0.02 <= scenario.slo.limits()["p95"] <= 0.2
    assert "this machine: quiet for 4 s" in done.stderr
    assert "next: batchtune sweep m.yaml (about 1 min 45 s)" in done.stderr
    assert "m.yaml: already exists" in refused(str(emulated), "--write", "m.yaml").message


def test_a_check_only_asks(emulated: Path) -> None:
    done = batchtune("init", str(emulated), "--check", "-q", "--concurrency", "4")
    assert done.exit_code == 0
    assert done.stdout.startswith(
        f"ok: {emulated} answers 1, 2 and 8 times the rows of a request: 1 row answered in"
    )
    assert done.stderr == ""
    (emulated / "emulated.yaml").write_text("service_time: 3\n")
    done = batchtune("init", str(emulated), "--check", "-q")
    assert isinstance(done.exception, TargetError)


def test_a_running_server_gets_a_scenario_of_loads(
    running: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_model, "watch_host", lambda _on_window: QUIET)
    address = f"127.0.0.1:{running.rest_port}"
    done = batchtune("init", f"{address}/m", "-o", "m.yaml")
    assert done.exit_code == 0, done.exception
    scenario = read_scenario(Path("m.yaml"))
    assert (scenario.target.model, scenario.request.protocol, scenario.load.concurrency) == ("m", "rest", 32)
    assert f"next: batchtune load m.yaml --rest-url http://{address}" in done.stderr
    printed = batchtune("init", f"{address}/m", "-o", "-")
    assert printed.stdout.startswith("# How does m answer on the server that runs?")
    assert not Path("-").exists()


def test_a_check_of_a_running_server_fails_where_rows_cannot_meet(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    product(tmp_path / "base/1/model.onnx", rows=1)
    with ServerProcess(tmp_path / "base") as server:
        done = batchtune("init", f"127.0.0.1:{server.rest_port}/m", "--check", "-q")
    assert isinstance(done.exception, TargetError)
    assert "a request of 1 row is answered, one of 2 is not" in done.exception.message


def test_a_model_beside_the_scenario_is_written_relative_and_one_elsewhere_in_full(tmp_path: Path) -> None:
    """Its own `init --ci` refuses a path that only this machine has."""
    for model, file, expected in (
        (tmp_path / "models" / "m", "s.yaml", "./models/m"),
        (tmp_path / "m", "scenarios/s.yaml", str(tmp_path / "m")),
    ):
        document = {"name": "m", "target": {"model": str(model), "cpus": [0]}}
        looked = LookedAt(document=document, signature=None, tries=None, notes=())  # type: ignore[arg-type]
        target = init_model._beside(looked, Path(file)).document["target"]
        assert target == {"model": expected, "cpus": [0]}
        assert looked.document["target"]["model"] == str(model)


@pytest.mark.parametrize(("key", "words"), [("detail", ()), ("error", ("--slo-p95", "20ms"))])
def test_an_app_of_its_own_gets_a_scenario_that_says_what_to_edit(key: str, words: tuple[str, ...]) -> None:
    async def unknown(_number: int, transport: asyncio.Transport) -> None:
        transport.write(http_answer(f'{{"{key}": "Not Found"}}'.encode(), status="404 Not Found"))

    with ScriptedHttp(unknown) as server:
        url = f"http://127.0.0.1:{server.port}/score"
        done = batchtune("init", url, "--write", "app.yaml", *words)
    assert done.exit_code == 0, done.exception
    scenario = read_scenario(Path("app.yaml"))
    assert (scenario.name, scenario.target.kind, scenario.target.url) == ("score", "http", url)
    assert (scenario.request.protocol, scenario.request.ok.status) == ("http", (200,))
    assert scenario.slo.limits() == {"p95": 0.02 if words else 0.1}
    text = Path("app.yaml").read_text()
    for named in ("launch: [", "set: {env: ", "{flag: ", "means: ", "rows_path", "{{rows}}", "{port}/score"):
        assert named in text
    assert "`batchtune load app.yaml` measures it" in text
    assert "null" not in text
    assert "next: batchtune load app.yaml" in done.stderr


@pytest.mark.parametrize("app", ["app.py", "no/app.py:app"])
def test_an_app_without_its_server_is_told_the_servers(app: str) -> None:
    Path("app.py").write_text("app = None\n")
    error = refused(app)
    assert error.message == f"{app}: an app, not a model"
    assert f"{app} --server NAME, one of bentoml, fastapi, litserve" in error.hint
    assert "vllm" not in error.hint
