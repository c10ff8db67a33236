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


@pytest.mark.parametrize("words", [("init", "--example"), ("init",)])
def test_examples_are_listed_a_line_each(words: tuple[str, ...]) -> None:
    lines = batchtune(*words).stdout.splitlines()
    assert [line.split()[0] for line in lines] == example_names()
    assert all(line.endswith("?") for line in lines)


def test_an_example_is_written_and_the_next_command_named() -> None:
    done = batchtune("init", "--example", "quickstart")
    assert done.exit_code == 0
    assert done.stdout.startswith("quickstart.yaml: ")
    assert "next: batchtune sweep quickstart.yaml" in done.stderr
    assert read_scenario(Path("quickstart.yaml")).name == "quickstart"


def test_an_example_is_written_where_asked() -> None:
    done = batchtune("init", "--example", "imdb-benchmark", "--output", "a b.yaml")
    assert "next: batchtune compare 'a b.yaml'" in done.stderr
    assert "batchtune compare 'a b.yaml'" in Path("a b.yaml").read_text()


def test_an_example_goes_to_stdout() -> None:
    done = batchtune("init", "--example", "quickstart", "-o", "-")
    assert done.stdout == read_example("quickstart").text_for("quickstart.yaml")
    assert not list(Path().iterdir())


def test_no_file_is_overwritten() -> None:
    Path("quickstart.yaml").write_text("mine")
    done = batchtune("init", "--example", "quickstart")
    assert isinstance(done.exception, UsageError)
    assert "quickstart.yaml: already exists" in done.exception.message
    assert Path("quickstart.yaml").read_text() == "mine"


def test_a_folder_that_is_not_there_is_named() -> None:
    done = batchtune("init", "--example", "quickstart", "-o", "no/where.yaml")
    assert isinstance(done.exception, UsageError)
    assert "no/where.yaml: cannot be written: No such file or directory" in done.exception.message


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (
            ("--ci", "github", "s.yaml", "--slo-p95", "20ms"),
            "--slo-…: not with --ci",
            "by what the scenario says",
        ),
        (("--ci", "github", "--example", "s.yaml"), "--example: not with --ci", "leave it out"),
        (
            ("--example", "quickstart", "--slo-p95", "5ms"),
            "--slo-…: not with an example",
            "the example's file",
        ),
        (("--example", "quickstart", "--rows", "4"), "--rest, --rows, --shape and --range: not with", ""),
        (("--check",), "--check: not with the list of examples", "init ./my_model"),
        (("--rate", "5"), "--rate: not with the list of examples", "init ./my_model"),
        (("-o", "x.yaml"), "--write: not with the list of examples", "init ./my_model"),
    ],
)
def test_an_option_that_nothing_would_hear_is_refused(words: tuple[str, ...], what: str, hint: str) -> None:
    done = batchtune("init", *words)
    assert isinstance(done.exception, UsageError)
    assert what in done.exception.message
    assert hint in done.exception.hint
    assert not list(Path().iterdir())


def test_a_name_without_the_flag_is_told_the_flag() -> None:
    done = batchtune("init", "quickstart")
    assert isinstance(done.exception, UsageError)
    assert "init --example quickstart" in done.exception.hint


@pytest.fixture
def emulated(tmp_path: Path) -> Path:
    model = tmp_path / "net"
    model.mkdir()
    (model / "emulated.yaml").write_text(EMULATED)
    return model


def test_a_model_is_asked_and_its_scenario_written_with_the_next_command(
    emulated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_model, "watch_host", lambda _on_window: Check(state="ok", text="quiet for 4 s"))
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
    again = batchtune("init", str(emulated), "--write", "m.yaml")
    assert isinstance(again.exception, UsageError)
    assert "m.yaml: already exists" in again.exception.message


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


def test_a_file_that_cannot_be_written_is_told_before_the_model_is_asked() -> None:
    done = batchtune("init", "no_model", "-o", "no/where.yaml")
    assert isinstance(done.exception, UsageError)
    assert "no/where.yaml: cannot be written: there is no folder no" in done.exception.message


def test_a_scenario_is_no_model() -> None:
    done = batchtune("init", "m.yaml")
    assert isinstance(done.exception, UsageError)
    assert "is a scenario already" in done.exception.message


def test_a_running_server_gets_a_scenario_to_load_it_with(
    emulated: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(init_model, "watch_host", lambda _on_window: Check(state="ok", text="quiet"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "1").symlink_to(emulated)
    with ServerProcess(tmp_path / "base") as server:
        address = f"127.0.0.1:{server.rest_port}"
        done = batchtune("init", f"{address}/m", "-o", "m.yaml")
        printed = batchtune("init", f"{address}/m", "-o", "-")
    assert printed.stdout.startswith("# How does m answer on the server that runs?")
    assert not Path("-").exists()
    assert done.exit_code == 0, done.exception
    scenario = read_scenario(Path("m.yaml"))
    assert (scenario.target.model, scenario.request.protocol, scenario.load.concurrency) == ("m", "rest", 32)
    assert f"next: batchtune load m.yaml --rest-url http://{address}" in done.stderr


def test_a_check_of_a_running_server_fails_where_rows_cannot_meet(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    product(tmp_path / "base/1/model.onnx", rows=1)
    with ServerProcess(tmp_path / "base") as server:
        done = batchtune("init", f"127.0.0.1:{server.rest_port}/m", "--check", "-q")
    assert isinstance(done.exception, TargetError)
    assert "a request of 1 row is answered, one of 2 is not" in done.exception.message


def test_a_model_beside_or_below_the_scenario_is_written_relative_and_one_elsewhere_in_full(
    tmp_path: Path,
) -> None:
    """Its own `init --ci` refuses a path that only this machine has."""
    for text, file, expected in (
        (tmp_path / "models" / "m", "s.yaml", "./models/m"),
        (tmp_path / "m", "scenarios/s.yaml", str(tmp_path / "m")),
    ):
        looked = LookedAt(
            document={"name": "m", "target": {"model": str(text), "cpus": [0]}},
            signature=None,  # type: ignore[arg-type]
            tries=None,  # type: ignore[arg-type]
            notes=(),
        )
        target = init_model._beside(looked, Path(file)).document["target"]
        assert target == {"model": expected, "cpus": [0]}
    assert looked.document["target"]["model"] == str(tmp_path / "m")


@pytest.mark.parametrize(("key", "words"), [("detail", ()), ("error", ("--slo-p95", "20ms"))])
def test_an_app_that_is_no_model_server_gets_a_scenario_that_says_what_to_edit(
    key: str, words: tuple[str, ...]
) -> None:
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
    done = batchtune("init", app)
    assert isinstance(done.exception, UsageError)
    assert done.exception.message == f"{app}: an app, not a model"
    assert f"{app} --server NAME, one of bentoml, fastapi, litserve" in done.exception.hint
    assert "vllm" not in done.exception.hint
