"""Is any HTTP server launched or attached to, given its parameters by its own names, and put back?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from batchtune.archive.run import Run, create_run, open_run, write_original
from batchtune.cli.session import beginning, not_put_back, put_back, run_restore, session
from batchtune.errors import ScenarioError, ServerGoneError, TargetError, UsageError, WrongAnswerError
from batchtune.load.answers import require_answer
from batchtune.scenario.payloads import build_requests
from batchtune.scenario.reader import format_scenario, parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target import command, endpoint
from batchtune.target.claim import foreign_parameters, state_folder
from batchtune.target.command import CommandTarget
from batchtune.target.process import ServerProcess, free_port
from batchtune.target.telemetry import Counters, activity, read_meant_counters
from batchtune.tune.search.contenders import reference_configurations
from tests.cli.in_process import answered
from tests.target.kserve_server import KserveServer
from tests.target.running_process import running_process

APP = Path(__file__).parent / "stand_ins" / "http_app.py"


def scenario(**target: Any) -> Scenario:
    """Of that server, launched unless `target` says otherwise."""
    given = {
        "kind": "http",
        "url": "http://127.0.0.1:{port}/score",
        "launch": [sys.executable, str(APP), "{port}"],
        "set": {"env": {"size": "SIZE", "wait": "WAIT"}},
        "means": {"rows": "size", "wait_s": "wait"},
        **target,
    }
    document = {
        "name": "x",
        "target": {name: value for name, value in given.items() if value is not None},
        "request": {"body": {"x": "{{row}}"}, "timeout": "1s"},
        "load": {"arrivals": "poisson", "warm_up": "50ms", "duration": "200ms"},
        "slo": {"p95": "50ms"},
        "objective": "capacity",
        "search": {"space": {"size": [1, 8], "wait": [0, 0.002]}},
    }
    if given["set"] is None:
        del document["search"]
    return parse_scenario(json.dumps(document), source="x")


def wait_until_it_answers(process: ServerProcess, url: str) -> None:
    for _ in range(500):
        process.raise_if_dead(within_s=0.02)
        try:
            httpx.get(url)
            break
        except httpx.HTTPError:
            continue


@contextmanager
def served(folder: Path, **environment: str) -> Iterator[tuple[str, ServerProcess]]:
    """The URL of a server that somebody else started, and its process."""
    port = free_port()
    words = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, str(APP)]
    with running_process([*words, str(port)], log_path=folder / "log") as process:
        wait_until_it_answers(process, url := f"http://127.0.0.1:{port}")
        yield url, process


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("app")) as (url, _):
        yield url


@pytest.fixture
def running(app: str) -> str:
    """The URL of a server that somebody else started, with the parameters of its start."""
    httpx.delete(f"{app}/parameters").raise_for_status()
    return app


def attached(url: str) -> Scenario:
    setting = {
        "url": f"{url}/parameters",
        "method": "PUT",
        "read": f"{url}/parameters",
        "at": "app",
        "change": {"size": "{{size}}", "wait": "{{wait}}"},
        "body": {"app": "{{changed}}"},
        "until": {"url": f"{url}/parameters", "path": "app.size", "value": "{{size}}"},
    }
    return scenario(url=f"{url}/score", launch=None, set={"request": setting})


def written(folder: Path, document: dict[str, Any]) -> Path:
    """A scenario's file."""
    file = folder / "s.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def of_a_closed_loop(asked: Scenario, **more: Any) -> dict[str, Any]:
    """The document of a short load of two clients, or of a comparison, which search nothing."""
    load = {"arrivals": "closed", "concurrency": 2, "duration": "200ms", "warm_up": "100ms"}
    document = asked.document() | {"objective": "throughput", "load": load, **more}
    del document["search"], document["slo"]
    return document


def changed_and_left(asked: Scenario, run: Run, size: int = 8) -> None:
    """What a process leaves that is killed in a trial of this size: the lock goes with it, as the kernel does."""
    target = CommandTarget(asked.target)
    target.attach(partial(write_original, run.path))
    target.apply(asked.configuration({"max_batch_size": size, "batch_timeout_micros": 1000}))
    target._claim.release()


def kept_run(asked: Scenario, root: Path) -> Run:
    return create_run(asked, format_scenario(asked), root=root)


def test_variables_reach_a_launched_server_in_its_own_unit() -> None:
    asked = scenario()
    with CommandTarget(asked.target) as target:
        startup_s = target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 2000}))
        assert startup_s is not None
        assert httpx.get(target.endpoint.rest_url).json() == {"app": {"size": 8, "wait": 0.002}}
        target.apply(asked.configuration({"enable_batching": False}))
        assert httpx.get(target.endpoint.rest_url).json() == {"app": {"size": 1, "wait": 0}}


def test_flags_follow_the_words_of_launch() -> None:
    wanted = [sys.executable, "-c", "import sys, time; print(sys.argv[1:], flush=True); time.sleep(60)"]
    asked = scenario(
        url="http://127.0.0.1:1/score",
        launch=wanted,
        set={"flag": {"size": "--size", "wait": "--wait"}},
        ready=["true"],
        means={"rows": "size"},
    )
    with CommandTarget(asked.target) as target:
        target.apply(asked.configuration({"max_batch_size": 8, "wait": 0.5}))
        for _ in range(100):
            if "size" in target.log_tail():
                break
            target._process.raise_if_dead(within_s=0.02)  # type: ignore[union-attr]
        assert "['--size', '8', '--wait', '0.5']" in target.log_tail()


def test_a_file_is_changed_at_its_places_and_put_back(running: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"name": "m", "extra": {"size": 3}}')
    setting = {
        "file": {"path": str(file), "change": {"extra.size": "{{size}}", "wait": "{{wait}}"}},
        "request": {"url": f"{running}/score", "body": {}},
    }
    asked = scenario(url=f"{running}/score", launch=None, set=setting)
    with CommandTarget(asked.target) as target:
        assert target.attach() == {"size": 3}
        assert target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 2000})) is None
        assert json.loads(file.read_text()) == {"name": "m", "extra": {"size": 8}, "wait": 0.002}
    assert file.read_text() == '{"name": "m", "extra": {"size": 3}}'


def test_a_running_server_is_read_changed_and_put_back(running: str) -> None:
    asked = attached(running)
    with CommandTarget(asked.target) as target:
        assert target.attach() == {"size": 1, "wait": 0.0}
        assert target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 1000})) is None
        assert httpx.get(running).json() == {"app": {"size": 8, "wait": 0.001}}
    assert httpx.get(running).json() == {"app": {"size": 1, "wait": 0.0}}


def test_a_trial_reads_the_parameters_once_before_it_sets_them_and_once_after(running: str) -> None:
    change = {"app.size": "{{size}}", "app.wait": "{{wait}}"}
    asked = changed_in_place(running, change=change)
    reads = []
    with CommandTarget(asked.target) as target:
        for size in (8, 4, 1):
            target.apply(asked.configuration({"max_batch_size": size}))
            assert httpx.get(running).json()["app"]["size"] == size
            reads.append(httpx.get(f"{running}/reads").json())
    assert [later - before for before, later in pairwise(reads)] == [2, 2]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/fails", "HTTP 500"),
        ("/nowhere", "HTTP 404"),
        ("/page", "text/html, not JSON"),
        ("/moved", "a redirect to /score/"),
        ("/stream", "the answer has no end"),
    ],
)
def test_a_wrong_app_is_told_before_any_load(running: str, path: str, said: str) -> None:
    asked = scenario(url=f"{running}{path}", launch=None, set=None, means={})
    with CommandTarget(asked.target) as target:
        requests = build_requests(asked.request, {}, model_name="x")
        with pytest.raises(TargetError, match=said) as told:
            require_answer(target.endpoint, requests, is_json=True)
        assert told.value.hint


def test_a_body_that_the_app_does_not_take_is_shown(running: str) -> None:
    asked = scenario(url=f"{running}/refuses", launch=None, set=None, means={})
    with CommandTarget(asked.target) as target:
        requests = build_requests(asked.request, {}, model_name="x")
        with pytest.raises(WrongAnswerError, match="field required") as told:
            require_answer(target.endpoint, requests, is_json=True)
    assert f"the body sent: {requests.bodies[0].decode()[:200]}" in told.value.hint


def test_an_address_of_https_at_a_server_of_http_and_a_missing_path_of_parameters_are_told(
    running: str,
) -> None:
    asked = attached(running)
    wrong = asked.document()
    wrong["target"]["set"]["request"]["read"] = f"{running}/no-page"
    with (
        CommandTarget(parse_scenario(json.dumps(wrong), source="x").target) as target,
        pytest.raises(TargetError, match="HTTP 404") as told,
    ):
        target.attach()
    assert "target.set.request.read" in told.value.hint
    with pytest.raises(TargetError, match="the server speaks http, not https"):
        endpoint.answer_of(target.endpoint, running.replace("http:", "https:"))


@pytest.mark.parametrize(
    ("path", "said"), [("/fails", "HTTP 500"), ("/moved", "a redirect"), ("/page", "not JSON")]
)
def test_a_wrong_app_ends_a_sweep_before_a_running_server_is_changed(
    tmp_path: Path, path: str, said: str
) -> None:
    with served(tmp_path, SIZE="3", CHANGES="1") as (url, process):
        document = attached(url).document()
        document["target"]["url"] = f"{url}{path}"
        file = written(tmp_path, document)
        done = answered("sweep", file, "--results", tmp_path / "r", cwd=tmp_path)
        assert process.running
    assert done.returncode == 7, done.stderr
    assert f"error: {url}{path}: " in done.stderr
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("environment", "path", "said"),
    [
        pytest.param({}, "/no-such", "correct target.set.request.url", id="first"),
        pytest.param(
            {"SIZE": "1"},
            "/no-such",
            "correct target.set.request.url",
            id="as-found-first",
            marks=pytest.mark.slow,
        ),
        pytest.param({"MOST": "0"}, "/parameters", "size is not licensed", id="takes-none"),
    ],
)
def test_a_server_that_takes_no_parameters_is_told_once_and_nothing_is_to_be_resumed(
    tmp_path: Path, environment: dict[str, str], path: str, said: str
) -> None:
    with served(tmp_path, **{"SIZE": "4", **environment}) as (url, _):
        document = attached(url).document()
        document["target"]["set"]["request"]["url"] = f"{url}{path}"
        file = written(tmp_path, document)
        done = answered("sweep", file, "--results", tmp_path / "r", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert said in done.stderr
    assert "no recommendation" not in done.stderr
    assert "--resume" not in done.stderr


def test_a_wrong_app_ends_a_comparison_before_a_running_server_is_changed(tmp_path: Path) -> None:
    with served(tmp_path, SIZE="3", CHANGES="1") as (url, process):
        variants = {name: {"fixed": {"size": size}} for name, size in (("a", 1), ("b", 8))}
        document = of_a_closed_loop(attached(url), variants=variants)
        document["target"]["url"] = f"{url}/fails"
        file = written(tmp_path, document)
        done = answered("compare", file, "--results", tmp_path / "r", cwd=tmp_path)
        assert process.running
    assert done.returncode == 7, done.stderr
    assert f"error: {url}/fails: HTTP 500" in done.stderr
    assert "failed:" not in done.stderr


def test_a_wrong_app_that_is_launched_ends_a_sweep_with_its_last_words(tmp_path: Path) -> None:
    setting = {"env": {"size": "SIZE", "wait": "WAIT", "mode": "MODE", "level": "LEVEL"}}
    asked = scenario(url="http://127.0.0.1:{port}/fails", set=setting)
    file = written(tmp_path, asked.document() | {"fixed": {"level": 2}})
    done = answered("sweep", file, "--results", tmp_path / "r", cwd=tmp_path)
    assert "target.set: mode is neither searched nor fixed: the server uses its own value" in done.stderr
    assert done.returncode == 7, done.stderr
    assert "/fails: HTTP 500" in done.stderr
    assert "KeyError: 'features'" in done.stderr
    assert "trial" not in done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"COLD": "1"}, id="still-cold"),
        pytest.param({"LEAST": "2"}, id="fails-with-one-configuration"),
        pytest.param({"LEAST": "9", "WHY": "CUDA out of memory"}, id="out-of-memory"),
    ],
)
def test_an_error_that_other_configurations_may_not_have_is_left_to_the_trials(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    words = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, str(APP)]
    asked = scenario(launch=[*words, "{port}"])
    with session(asked, results=tmp_path, quiet=True) as current, CommandTarget(asked.target) as target:
        configurations = [
            asked.configuration({"max_batch_size": size, "batch_timeout_micros": 0}) for size in (1, 8)
        ]
        current.launch(asked, target, *configurations)
        assert target.alive()


def test_a_server_that_is_not_there_is_told_without_waiting_for_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether its parameters would be set or not; nothing is launched, and nothing says so."""
    monkeypatch.setattr(command, "ANSWERS_S", 0.05)
    url = f"http://127.0.0.1:{free_port()}"
    only_loaded = scenario(url=f"{url}/score", launch=None, set=None, means={})
    for asked in (only_loaded, attached(url)):
        assert beginning(asked) == f"attaching to {url}/score"
        with (
            CommandTarget(asked.target) as target,
            pytest.raises(TargetError, match="nothing answers at") as told,
        ):
            target.apply(asked.configuration({}))
        assert "start the server" in told.value.hint
        assert told.value.exit_code == 7


def test_an_error_with_a_status_of_success_is_told_with_how_to_tell_it_from_an_answer(running: str) -> None:
    """Unless the scenario says itself what a right answer has; an error that is null is none."""
    asked = scenario(url=f"{running}/unloaded", launch=None, set=None, means={})
    request = asked.request.model_copy(update={"ok": asked.request.ok.model_copy(update={"path": "error"})})
    with CommandTarget(asked.target) as target:
        said = r"an error with a status of success: .*model not loaded"
        with pytest.raises(WrongAnswerError, match=said) as told:
            require_answer(target.endpoint, build_requests(asked.request, {}, model_name="x"), is_json=True)
        assert "request.ok.path" in told.value.hint
        assert "counts" not in told.value.hint
        require_answer(target.endpoint, build_requests(request, {}, model_name="x"), is_json=True)


@pytest.mark.parametrize("path", ["missing", "error"])  # the second is null
def test_an_answer_must_have_what_the_scenario_says(running: str, path: str) -> None:
    asked = scenario(url=f"{running}/score", launch=None, set=None, means={})
    request = asked.request.model_copy(update={"ok": asked.request.ok.model_copy(update={"path": path})})
    with CommandTarget(asked.target) as target:
        right = build_requests(asked.request, {}, model_name="x")
        require_answer(target.endpoint, right, is_json=True)
        with pytest.raises(TargetError, match=r"request\.ok\.path"):
            require_answer(target.endpoint, build_requests(request, {}, model_name="x"), is_json=True)


def test_a_mean_batch_can_come_from_two_counters() -> None:
    """Where a server's histogram of the sizes is coarse, or includes batches of nothing."""
    from batchtune.target import telemetry

    spec = telemetry.MetricsSpec(url="http://x/", batches="batches_total", rows="requests_total")
    before, after = (
        telemetry.Counters(
            monotonic_s=at,
            server_cpu_s=None,
            series=telemetry.meant(spec, {"batches_total": {(): batches}, "requests_total": {(): rows}}),
        )
        for at, batches, rows in ((0.0, 5.0, 10.0), (1.0, 15.0, 50.0))
    )
    assert activity(before, after).mean_batch_rows == 4.0


def test_metrics_go_by_what_their_names_mean(running: str) -> None:
    """The page is read as ours: sizes, batches, and times in the unit that their names end in."""
    from batchtune.target import telemetry

    pages = iter(
        f"rows_sum {rows}\nrows_count {batches}\nqueue_ms_sum {wait}\nqueue_ms_count {rows}\nrun_seconds_sum {run}\n"
        f"m:running {batches}\nm:waiting 2\n"
        for rows, batches, wait, run in ((10, 5, 10, 1.0), (50, 15, 90, 2.0))
    )
    spec = telemetry.MetricsSpec.model_validate(
        {
            "url": "http://x/",
            "batch_size": "rows",
            "queue": "queue_ms",
            "execution": "run_seconds",
            "running": "m:running",
            "waiting": "m:waiting",
        }
    )
    readings = [telemetry.meant(spec, telemetry.parse_prometheus(page)) for page in pages]
    before, after = (
        telemetry.Counters(monotonic_s=at, server_cpu_s=None, series=series)
        for at, series in enumerate(readings)
    )
    moved = activity(before, after)
    assert (moved.batches, moved.mean_batch_rows, moved.queue_wait_mean_s) == (10, 4.0, 0.002)
    assert moved.device_busy_ratio == pytest.approx(1.0)
    assert moved.requests_inside == 17
    asked = scenario(url=f"{running}/score", launch=None, set=None, means={})
    with CommandTarget(asked.target) as target:
        assert not read_meant_counters(None, target.endpoint).series


def reading_of(running: str, path: str, **names: str) -> Counters:
    """A reading of the page at this path of a server of kind http."""
    metrics = {"url": f"{running}{path}", **names}
    asked = scenario(url=f"{running}/score", launch=None, set=None, means={}, metrics=metrics)
    with CommandTarget(asked.target) as target:
        return target.counters()


def test_a_metrics_page_that_is_none_says_why(running: str) -> None:
    assert reading_of(running, "/no-page").page_fault == f"{running}/no-page: HTTP 404"
    other = reading_of(running, "/text")
    assert other.page_fault == f"{running}/text: not a page of Prometheus: ok"
    assert not reading_of(running, "/metrics", batches="batches_total").page_fault


def test_names_that_a_metrics_page_lacks_are_noted_with_the_nearest_that_it_has(running: str) -> None:
    names = {"batches": "batch_total", "rows": "rows_total", "execution": "exec_second", "waiting": "zzz"}
    there = reading_of(running, "/metrics", **names)
    assert there.missing == {"batches": "batches_total", "execution": "exec_seconds", "waiting": ""}


def test_a_wrong_metrics_page_is_told_before_any_load(running: str, tmp_path: Path) -> None:
    metrics = {"url": f"{running}/no-page", "batches": "batches_total"}
    asked = scenario(url=f"{running}/score", launch=None, set=None, means={}, metrics=metrics)
    with (
        session(asked, results=tmp_path, quiet=True) as current,
        CommandTarget(asked.target) as target,
        pytest.raises(WrongAnswerError) as told,
    ):
        current.launch(asked, target, asked.configuration({}))
    assert told.value.message == f"target.metrics.url: {running}/no-page: HTTP 404"
    assert told.value.exit_code == 7


def changed_in_place(url: str, **request: Any) -> Scenario:
    """Attached to a server whose PUT takes the parameters themselves."""
    setting = {"url": f"{url}/parameters", "method": "PUT", "read": f"{url}/parameters", **request}
    return scenario(url=f"{url}/score", launch=None, set={"request": setting})


@pytest.mark.parametrize(
    "request_keys",
    [
        pytest.param({"body": {"size": "{{size}}", "wait": "{{wait}}"}}, id="body-without-change"),
        pytest.param({"change": {"size": "{{size}}", "wait": "{{wait}}"}}, id="change-without-body"),
        pytest.param(
            {
                "change": {"size": "{{size}}", "wait": "{{wait}}"},
                "body": {"size": "{{size}}", "wait": "{{wait}}"},
            },
            id="change-not-in-body",
        ),
    ],
)
def test_what_was_read_is_put_back_by_a_short_request(running: str, request_keys: dict[str, Any]) -> None:
    httpx.put(f"{running}/parameters", json={"size": 3, "wait": 0.5})
    before = httpx.get(running).json()
    asked = changed_in_place(running, **request_keys)
    assert parse_scenario(format_scenario(asked), source="kept") == asked
    with CommandTarget(asked.target) as target:
        assert target.attach() == {"size": 3, "wait": 0.5}
        target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 1000}))
        assert httpx.get(running).json() == {**before, "size": 8, "wait": 0.001}
    assert httpx.get(running).json() == before


def test_a_body_that_cannot_be_put_back_is_refused_before_anything_is_sent(running: str) -> None:
    """The server shows its parameters elsewhere, and the scenario does not say where."""
    before = httpx.get(running).json()
    asked = changed_in_place(running, body={"size": "{{size}}", "wait": "{{wait}}"})
    with (
        CommandTarget(asked.target) as target,
        pytest.raises(
            UsageError, match=r"target\.set\.request\.body: \{\{size\}\} cannot be restored"
        ) as told,
    ):
        target.apply(asked.configuration({"max_batch_size": 8}))
    assert told.value.exit_code == 2
    assert "target.set.request.change" in told.value.hint
    assert httpx.get(running).json() == before


def test_a_misspelt_place_of_a_parameter_is_refused_before_anything_is_sent(running: str) -> None:
    httpx.put(f"{running}/parameters", json={"app": {"size": 3, "wait": 0.5}})
    before = httpx.get(running).json()
    change = {"app.sise": "{{size}}", "app.wait": "{{wait}}"}
    asked = changed_in_place(running, change=change)
    with CommandTarget(asked.target) as target, pytest.raises(UsageError) as told:
        target.apply(asked.configuration({"max_batch_size": 8}))
    assert "target.set.request.change: app.sise: " in told.value.message
    assert told.value.hint == "did you mean 'app.size'?"
    assert httpx.get(running).json() == before


@pytest.mark.parametrize(
    ("change", "why", "there"),
    [
        pytest.param(
            {"limit.batch": "{{size}}", "app.wait": "{{wait}}"},
            "limit.batch: {read} returns no such key, and no object at 'limit'",
            "app.size, app.wait, limits.batch",
            id="no-parent",
        ),
        pytest.param(
            {"app.wait.size": "{{size}}", "app.wait": "{{wait}}"},
            "app.wait.size: {read} returns no such key, and no object at 'app.wait'",
            "app.size, app.wait, limits.batch",
            id="parent-is-no-object",
        ),
        pytest.param(
            {"size": "{{size}}", "wait": "{{wait}}"},
            "size: {read} returns no such key, nor another place of change",
            "app.size, app.wait, limits.batch",
            id="no-place-at-all",
        ),
    ],
)
def test_a_place_that_nothing_holds_is_refused_before_anything_is_sent(
    running: str, change: dict[str, str], why: str, there: str
) -> None:
    httpx.put(f"{running}/parameters", json={"app": {"size": 3, "wait": 0.5}, "limits": {"batch": 9}})
    before = httpx.get(running).json()
    asked = changed_in_place(running, change=change)
    with CommandTarget(asked.target) as target, pytest.raises(UsageError) as told:
        target.apply(asked.configuration({"max_batch_size": 8}))
    expected = why.format(read=f"{running}/parameters")
    assert told.value.message == f"target.set.request.change: {expected}"
    assert told.value.hint == f"there are: {there}"
    assert httpx.get(running).json() == before


@pytest.mark.parametrize("command", [("sweep",), ("check", "--candidate-set", "fixed.size=8")])
def test_a_place_that_nothing_holds_is_named_with_its_line(
    running: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    before = httpx.get(running).json()
    asked = changed_in_place(running, change={"limit.batch": "{{size}}", "app.wait": "{{wait}}"})
    name, *options = command
    file = written(tmp_path, asked.document() if name == "sweep" else of_a_closed_loop(asked))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "limit.batch" in text)
    done = answered(name, file, *options, "--results", tmp_path / "r", cwd=tmp_path)
    assert done.returncode == 2
    assert f"error: {file}:{line}: target.set.request.change: limit.batch: " in done.stderr
    assert "hint: there are: app.size, app.wait" in done.stderr
    assert httpx.get(running).json() == before


@pytest.mark.parametrize(
    ("place", "why", "hint"),
    [
        ("extra.sise", "extra.sise: {path} has no such key", "did you mean 'extra.size'?"),
        ("extr.size", "extr.size: {path} has no such key, and no object at 'extr'", "there are: extra.size"),
    ],
)
def test_a_place_that_the_file_cannot_hold_is_refused_before_it_is_written(
    running: str, tmp_path: Path, place: str, why: str, hint: str
) -> None:
    """Of a server that runs and of one that is launched, which is not."""
    settings = tmp_path / "settings.json"
    settings.write_text(text := '{"extra": {"size": 3}}')
    setting = {"file": {"path": str(settings), "change": {place: "{{size}}", "wait": "{{wait}}"}}}
    request = {"request": {"url": f"{running}/score", "body": {}}}
    said = f"target.set.file.change: {why.format(path=settings)}"
    attaching = scenario(url=f"{running}/score", launch=None, set=setting | request)
    with CommandTarget(attaching.target) as target, pytest.raises(ScenarioError) as told:
        target.attach()
    assert (told.value.message, told.value.hint) == (said, hint)
    file = written(tmp_path, scenario(set=setting).document())
    line = next(n for n, words in enumerate(file.read_text().splitlines(), 1) if place in words)
    done = answered("sweep", file, "--results", tmp_path / "r", cwd=tmp_path)
    assert done.returncode == 2
    assert f"error: {file}:{line}: {said}\nhint: {hint}" in done.stderr
    assert settings.read_text() == text


def test_the_method_that_sets_parameters_is_one_that_sends_a_document() -> None:
    with pytest.raises(ScenarioError, match=r"target\.set\.request\.method: expected .*; was 'PUTT'") as told:
        changed_in_place("http://127.0.0.1:1", method="PUTT", change={"size": "{{size}}", "wait": "{{wait}}"})
    assert told.value.hint == "did you mean 'PUT'?"


def test_a_parameter_with_a_known_default_need_not_be_shown(running: str) -> None:
    httpx.put(f"{running}/parameters", json={"app": {"wait": 0.5}})
    asked = changed_in_place(running, change={"app.size": "{{size}}", "app.wait": "{{wait}}"})
    asked = asked.with_target(defaults={"size": 1})
    with CommandTarget(asked.target) as target:
        target.apply(asked.configuration({"max_batch_size": 8}))
        assert httpx.get(running).json() == {"app": {"size": 8, "wait": 0.5}}
    assert httpx.get(running).json() == {"app": {"wait": 0.5}}


def test_a_server_that_does_not_show_its_parameters_is_not_said_to_have_them_back(running: str) -> None:
    said: list[str] = []
    body = {"app": {"size": "{{size}}", "wait": "{{wait}}"}}
    request = {"url": f"{running}/parameters", "method": "PUT", "body": body}
    asked = scenario(url=f"{running}/score", launch=None, set={"request": request})
    with CommandTarget(asked.target, on_event=said.append) as target:
        target.apply(asked.configuration({"max_batch_size": 8}))
    assert "keeps the parameters of the last trial" in said[-1]
    assert "keeps the parameters of the last trial at the end: without target.set.request.read" in said[0]


def test_a_settings_file_edited_after_a_kill_is_kept_beside_the_restored_one(
    running: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"size": 3}')
    setting = {
        "file": {"path": str(file), "change": {"size": "{{size}}", "wait": "{{wait}}"}},
        "request": {"url": f"{running}/score", "body": {}},
    }
    asked = scenario(url=f"{running}/score", launch=None, set=setting)
    for edited in (None, '{"size": 5}'):
        changed_and_left(asked, run := kept_run(asked, tmp_path))
        file.write_text(edited or file.read_text())
        assert run_restore(run.path) == 0
        assert file.read_text() == '{"size": 3}'
        copies = [path.read_text() for path in tmp_path.glob("settings.json.edited-*")]
        assert copies == ([] if edited is None else [edited])
        assert ("the edited file is copied to" in capsys.readouterr().err) == (edited is not None)


def test_what_a_killed_sweep_left_is_never_taken_for_the_original(running: str, tmp_path: Path) -> None:
    asked = attached(running)
    changed_and_left(asked, kept_run(asked, tmp_path))
    assert httpx.get(running).json()["app"]["size"] == 8
    said: list[str] = []
    with CommandTarget(asked.target, on_event=said.append) as target:
        assert target.attach() == {"size": 1, "wait": 0.0}
    assert httpx.get(running).json() == {"app": {"size": 1, "wait": 0.0}}
    assert "an earlier sweep of" in said[0]
    with CommandTarget(asked.target, on_event=said.append) as target:
        target.attach()
    assert len([text for text in said if "an earlier sweep" in text]) == 1


def set_by_hand(url: str, **parameters: float) -> dict[str, Any]:
    httpx.put(f"{url}/parameters", json={"app": parameters})
    return dict(parameters)


def test_what_somebody_set_after_a_killed_sweep_is_what_the_server_gets_back(
    running: str, tmp_path: Path
) -> None:
    asked = attached(running)
    changed_and_left(asked, kept_run(asked, tmp_path))
    theirs = set_by_hand(running, size=12, wait=0.5)
    said: list[str] = []
    with CommandTarget(asked.target, on_event=said.append) as target:
        assert target.attach() == theirs
        target.apply(asked.configuration({"max_batch_size": 4, "batch_timeout_micros": 0}))
    assert httpx.get(running).json()["app"] == theirs
    assert "size 12, wait 0.5 was set since, by somebody else" in said[0]
    assert not any("left its trial" in text for text in said)


def test_what_somebody_sets_between_two_trials_is_what_the_server_gets_back(running: str) -> None:
    asked = attached(running)
    said: list[str] = []
    with CommandTarget(asked.target, on_event=said.append) as target:
        target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 1000}))
        theirs = set_by_hand(running, size=12, wait=0.5)
        for size in (4, 2):
            target.apply(asked.configuration({"max_batch_size": size, "batch_timeout_micros": 0}))
    assert httpx.get(running).json()["app"] == theirs
    assert [text for text in said if "somebody else set size 12, wait 0.5 during the sweep" in text] == [
        said[0]
    ]


def test_what_somebody_sets_under_a_load_is_noticed_before_the_same_configuration_runs_again(
    running: str,
) -> None:
    asked = attached(running)
    ours = asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 1000})
    said: list[str] = []
    with CommandTarget(asked.target, on_event=said.append) as target:
        target.apply(ours)
        assert not target.foreign_change()
        theirs = set_by_hand(running, size=12, wait=0.5)
        assert target.foreign_change() == "size 12, wait 0.5"
        target.apply(ours)
        set_by_hand(running, size=12, wait=0.5)  # what it gets back: no event says so again
        target.apply(ours)
        assert target.in_force == ours
        assert httpx.get(running).json()["app"] == {"size": 8, "wait": 0.001}
        assert target.present == theirs
    assert httpx.get(running).json()["app"] == theirs
    assert said[-1] == "score has size 12, wait 0.5 again, which somebody set during the sweep"
    assert sum("in place of the trial's parameters" in text for text in said) == 2


@pytest.mark.slow
def test_a_trial_under_which_somebody_changed_the_parameters_runs_again(tmp_path: Path) -> None:
    with served(tmp_path, SIZE="2", SEIZED="6") as (url, _):
        file = written(tmp_path, attached(url).document() | {"slo": {"p95": "500ms"}})
        done = answered("sweep", file, "--budget", "3s", "--results", tmp_path / "r", cwd=tmp_path)
        assert httpx.get(url).json()["app"]["size"] == 3
    assert "somebody else set size 3" in done.stderr
    assert "score had size 3" in done.stderr
    assert "again, which somebody set during the sweep" in done.stderr
    run = open_run(next((tmp_path / "r").glob("*/*")))
    assert all(trial.state == "complete" for trial in run.ledger())
    assert run.scenario().target.present["size"] == 3
    assert "what runs now  " not in done.stdout


def test_restore_leaves_what_somebody_set_after_the_kill(
    running: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = attached(running)
    changed_and_left(asked, run := kept_run(asked, tmp_path))
    theirs = set_by_hand(running, size=12, wait=0.5)
    assert run_restore(run.path) == 0
    told = capsys.readouterr().err
    assert "was set since, by somebody else" in told
    assert "is as it was" not in told
    assert httpx.get(running).json()["app"] == theirs
    assert not_put_back(run) is None
    assert not entries()


def test_restore_knows_the_trial_of_a_later_sweep_of_the_same_original(running: str, tmp_path: Path) -> None:
    asked = attached(running)
    runs = [kept_run(asked, tmp_path) for _ in range(2)]
    for run, size in zip(runs, (8, 4), strict=True):
        changed_and_left(asked, run, size)
    assert run_restore(runs[0].path) == 0
    assert httpx.get(running).json() == {"app": {"size": 1, "wait": 0.0}}


def entries() -> list[bytes]:
    return [content for path in state_folder().glob("*.json") if (content := path.read_bytes())]


def test_a_server_that_refused_every_change_is_not_said_to_be_changed(tmp_path: Path) -> None:
    with served(tmp_path, SIZE="9", MOST="0") as (url, _):
        asked = changed_in_place(url, change={"app.size": "{{size}}", "app.wait": "{{wait}}"})
        said: list[str] = []
        with (
            CommandTarget(asked.target, on_event=said.append) as target,
            pytest.raises(TargetError, match="422"),
        ):
            target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 0}))
        assert said == ["score has what it had before"]
        assert not entries()


def test_what_the_server_has_already_is_not_sent(tmp_path: Path) -> None:
    with served(tmp_path, SIZE="9", CHANGES="1") as (url, process):
        asked = attached(url)
        with CommandTarget(asked.target) as target:
            target.attach()
            target.apply(asked.configuration({"max_batch_size": 9, "batch_timeout_micros": 0}))
        assert process.running


def test_an_original_that_the_server_no_longer_takes_can_be_discarded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path, SIZE="9", MOST="8") as (url, _):
        asked = attached(url)
        run = kept_run(asked, tmp_path)
        target = CommandTarget(asked.target)
        target.attach(partial(write_original, run.path))
        target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 0}))
        assert not put_back(target, run)
        assert "with --discard" in capsys.readouterr().err
        target._claim.release()
        with pytest.raises(TargetError, match="422"), CommandTarget(asked.target) as target:
            target.attach()
        assert entries()
        assert run_restore(run.path, discard=True) == 0
        assert not entries()
        with CommandTarget(asked.target) as target:
            assert target.attach() == {"size": 8, "wait": 0.0}


def test_what_an_earlier_sweep_left_hides_no_error_of_this_one(running: str, tmp_path: Path) -> None:
    """`read` names a page by mistake: the parameters that are stored are not shown for its answer."""
    changed_and_left(asked := attached(running), kept_run(asked, tmp_path))
    document = asked.document()
    document["target"]["set"]["request"]["read"] = f"{running}/text"
    wrong = parse_scenario(json.dumps(document), source="x")
    with CommandTarget(wrong.target) as target, pytest.raises(TargetError, match="not JSON: 'ok'"):
        target.attach()
    assert entries()
    with CommandTarget(asked.target) as target:
        target.attach()
    assert httpx.get(running).json() == {"app": {"size": 1, "wait": 0.0}}


def test_places_to_change_need_what_they_are_places_of() -> None:
    with pytest.raises(ScenarioError, match=r"change: read is missing") as told:
        scenario(
            set={
                "request": {"url": "http://127.0.0.1:1/p", "change": {"size": "{{size}}", "wait": "{{wait}}"}}
            }
        )
    assert "x:" in told.value.message


def where(target: CommandTarget) -> tuple[str, str]:
    return target.endpoint.rest_url, target.endpoint.model_name


def test_a_second_process_is_refused_while_the_first_changes_the_server(running: str) -> None:
    asked = attached(running)
    with CommandTarget(asked.target) as first:
        first.attach()
        with (
            CommandTarget(asked.target) as second,
            pytest.raises(TargetError, match="another batchtune changes"),
        ):
            second.apply(asked.configuration({"max_batch_size": 8}))
        assert "another batchtune changes this server now" in foreign_parameters(*where(first))
    assert not foreign_parameters(*where(first))
    with CommandTarget(asked.target) as third:
        third.attach()


def test_a_load_is_told_what_a_killed_sweep_left_and_what_restores_it(running: str, tmp_path: Path) -> None:
    asked = attached(running)
    changed_and_left(asked, run := kept_run(asked, tmp_path / "r"))
    words = ("load", written(tmp_path, of_a_closed_loop(asked)), "--no-save", "-q")
    left = answered(*words, cwd=tmp_path).stderr
    assert f"note: an earlier sweep of score at {running} ({run.path}) did not restore it" in left
    assert f"`batchtune restore {run.path}` restores it" in left
    assert httpx.get(running).json()["app"]["size"] == 8
    assert run_restore(run.path) == 0
    assert httpx.get(running).json() == {"app": {"size": 1, "wait": 0.0}}
    assert "earlier sweep" not in answered(*words, cwd=tmp_path).stderr


def test_the_run_that_changed_the_server_is_named_by_a_later_one_that_cannot_put_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    with served(tmp_path, CHANGES="2") as (url, process):
        asked = attached(url)
        first, later, last = (kept_run(asked, tmp_path) for _ in range(3))
        changed_and_left(asked, first)
        target = CommandTarget(asked.target, on_event=said.append)
        target.attach(partial(write_original, later.path))
        assert str(first.path) in said[0]
        assert not put_back(target, later)
        assert f"`batchtune restore {first.path}` tries again" in capsys.readouterr().err
        target._claim.release()
        process.launch([sys.executable, str(APP), url.rpartition(":")[2]])
        wait_until_it_answers(process, url)
        with CommandTarget(asked.target) as target:
            target.attach(partial(write_original, last.path))
    assert run_restore(first.path) == 0
    assert "restored already" in capsys.readouterr().err


def test_a_server_that_speaks_kserve_is_asked_by_grpc_too() -> None:
    with KserveServer() as server:
        target = {"url": f"http://127.0.0.1:{server.rest_port}", "grpc_url": f"127.0.0.1:{server.grpc_port}"}
        asked = TargetSpec.model_validate({"kind": "http", "model": "m", **target})
        with CommandTarget(asked, kserve=True) as reached:
            assert reached.endpoint.grpc_port == server.grpc_port
            assert reached.signature("s").inputs
    elsewhere = asked.model_copy(update={"grpc_url": "10.0.0.1:8001"})
    with pytest.raises(UsageError, match=r"target\.url and target\.grpc_url must name one host"):
        CommandTarget(elsewhere, kserve=True)


def test_a_session_knows_what_the_server_had_after_that_was_put_back(running: str, tmp_path: Path) -> None:
    """The answer is made then, and compares with what ran before."""
    asked = attached(running)
    with session(asked, results=tmp_path, quiet=True) as current:
        target = CommandTarget(asked.target)
        current.serve(target)
        scenario = current.found_on(asked, target)
        target.apply(scenario.configuration({"max_batch_size": 8}))
    assert httpx.get(running).json() == {"app": {"size": 1, "wait": 0.0}}
    assert current.scenario.target.present == {"size": 1, "wait": 0.0}


def test_what_the_server_has_now_is_the_first_that_is_compared(running: str) -> None:
    asked = attached(running)
    with CommandTarget(asked.target) as target:
        spec = asked.target.model_copy(update={"present": target.attach()})
    references = reference_configurations(asked.model_copy(update={"target": spec}))
    assert next(iter(references)) == "present"
    assert references["present"].server_values() == {"size": 1, "wait": 0}


def test_a_load_gives_a_launched_server_what_is_fixed_and_an_attached_one_nothing(
    running: str, tmp_path: Path
) -> None:
    file = written(tmp_path, of_a_closed_loop(scenario(), fixed={"size": 8, "wait": 0.001}))
    done = json.loads(answered("load", file, "--json", cwd=tmp_path).stdout)
    batching = {"size": 8, "wait": 0.001}
    assert done["points"][0]["configuration"]["batching"] == batching
    done = answered("load", written(tmp_path, of_a_closed_loop(attached(running))), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "before" not in done.stderr
    assert httpx.get(running).json() == {"app": {"size": 1, "wait": 0.0}}


@pytest.mark.slow
def test_a_comparison_gives_a_running_server_each_variant_and_puts_back_what_it_had(
    running: str, tmp_path: Path
) -> None:
    variants = {name: {"fixed": {"size": size, "wait": 0}} for name, size in (("small", 2), ("large", 8))}
    file = written(tmp_path, of_a_closed_loop(attached(running), variants=variants))
    done = answered("compare", file, "--blocks", "2", "--json", cwd=tmp_path)
    assert done.returncode in (0, 5, 6), done.stderr  # 6: the host was not quiet
    labels = {variant["configuration"]["batching"]["size"] for variant in json.loads(done.stdout)["variants"]}
    assert labels == {2, 8}
    assert httpx.get(running).json() == {"app": {"size": 1, "wait": 0.0}}


@pytest.mark.parametrize("size", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_server_that_takes_no_parameters_ends_the_sweep_with_what_it_shows(
    running: str, tmp_path: Path, size: int
) -> None:
    """Only what it had before can be measured, which is no answer, also where that is no batching."""
    httpx.put(f"{running}/parameters", json={"size": size, "wait": 0})
    asked = changed_in_place(
        running, change={"size": "{{size}}", "wait": "{{wait}}"}, body={"ignored": "{{changed}}"}
    ).document()
    asked["search"] = {"space": {"size": [8, 64], "wait": [0, 0.002]}}
    done = answered("sweep", written(tmp_path, asked), "--budget", "30s", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert "only what the server had before could be measured" in done.stderr
    assert f"size is {size} after it, not " in done.stderr
    assert "no recommendation" not in done.stderr
    assert not done.stdout
    run = next((tmp_path / "results").glob("*/*"))
    assert answered("recommend", run, cwd=tmp_path).returncode == 7


def test_a_parameter_that_the_server_leaves_as_it_is_is_named_with_both_values(tmp_path: Path) -> None:
    with served(tmp_path, KEEPS="wait") as (url, _):
        asked = attached(url)
        with CommandTarget(asked.target) as target:
            target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 0}))
            with pytest.raises(TargetError, match=r": wait is 0\.0 after it, not 0\.002$"):
                target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 2000}))


def test_a_running_server_that_ended_is_missed_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters cannot be put back then: the next sweep does that."""
    monkeypatch.setattr(endpoint, "RETURN_LIMIT_S", 0.05)
    said: list[str] = []
    with served(tmp_path) as (url, process):
        asked = attached(url)
        target = CommandTarget(asked.target, on_event=said.append)
        target.apply(asked.configuration({"max_batch_size": 8}))
        assert target.alive()
        process.stop()
        assert not target.alive()
        with pytest.raises(ServerGoneError, match=f"the server at {url} .*refused"):
            target.apply(asked.configuration({"enable_batching": False}))
        assert f"{url} refuses connections: waiting up to" in said[-1]
        with pytest.raises(TargetError, match="was not restored"):
            target.close()
        process.launch([sys.executable, str(APP), url.rpartition(":")[2]])
        wait_until_it_answers(process, url)
        with CommandTarget(asked.target, on_event=said.append) as later:
            later.attach()
        assert "an earlier sweep of" in said[-2]


def test_a_running_server_that_returns_gets_its_parameters_again(tmp_path: Path) -> None:
    with served(tmp_path) as (url, process):
        asked = attached(url)

        def start_again(text: str) -> None:
            if "refuses connections" in text:
                process.launch([sys.executable, str(APP), url.rpartition(":")[2]])

        with CommandTarget(asked.target, on_event=start_again) as target:
            configuration = asked.configuration({"max_batch_size": 8})
            target.apply(configuration)
            process.stop()
            target.apply(configuration)
            assert httpx.get(url).json()["app"]["size"] == 8


def swept(url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A sweep of the app that runs there, with a limit that it keeps; its runs are in the folder `r`."""
    file = written(folder, attached(url).document() | {"slo": {"p95": "500ms"}})
    return answered("sweep", file, "--budget", "20s", "--results", folder / "r", cwd=folder)


@pytest.mark.slow
def test_the_trial_under_whose_load_a_server_ended_is_run_again_when_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing of its configuration, unless the server returns by itself."""
    monkeypatch.setattr(endpoint, "RETURN_LIMIT_S", 0.05)
    with served(tmp_path, SIZE="3", UNDER_LOAD="2") as (url, process):
        done = swept(url, tmp_path)
        assert done.returncode == 7
        assert not process.running
        run = open_run(next((tmp_path / "r").glob("*/*")))
        before = run.ledger()
        assert before
        assert all(trial.state == "complete" for trial in before)
        process.launch([sys.executable, str(APP), url.rpartition(":")[2]])
        wait_until_it_answers(process, url)
        words = (run.path / "scenario.yaml", "--resume", run.path, "--results", tmp_path / "r")
        done = answered("sweep", *words, cwd=tmp_path)
        assert done.returncode in (0, 5), done.stderr
    assert all(trial.state == "complete" for trial in run.ledger()[len(before) :])
    assert run.recommendation().configuration.words
    assert answered("runs", "--results", tmp_path / "r", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_a_sweep_of_a_server_that_ended_says_how_to_go_on_and_recommends_no_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "RETURN_LIMIT_S", 0.05)
    with served(tmp_path, SIZE="3", CHANGES="3") as (url, _):
        done = swept(url, tmp_path)
    run = next((tmp_path / "r").glob("*/*"))
    assert done.returncode == 7
    assert f"error: the server at {url}" in done.stderr
    assert "saved in" in done.stderr
    assert f"next: batchtune sweep {run / 'scenario.yaml'} --resume {run}" in done.stderr
    assert f"`batchtune restore {run}` tries again" in done.stderr
    assert "Recommended" in done.stdout
    assert "not confirmed: the server ended during the sweep" in " ".join(done.stdout.split()).lower()
    again = answered("recommend", run, cwd=tmp_path)
    for text in (done.stdout, again.stdout):
        assert "(not confirmed: the server ended)" in text
        assert "deploy " not in text
