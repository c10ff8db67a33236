"""Is any HTTP server launched or attached to, given its parameters by its own names, and put back?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
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
from batchtune.scenario.spec.target import MetricsSpec, TargetSpec
from batchtune.target import command, endpoint
from batchtune.target.claim import Claim, foreign_parameters, state_folder
from batchtune.target.command import CommandTarget
from batchtune.target.process import ServerProcess, free_port
from batchtune.target.telemetry import (
    Counters,
    ServerActivity,
    activity,
    meant,
    parse_prometheus,
    read_meant_counters,
)
from batchtune.tune.search.contenders import reference_configurations
from tests.cli.in_process import answered
from tests.target.kserve_server import KserveServer
from tests.target.running_process import answering_process, answers
from tests.waiting import wait_until

APP = Path(__file__).parent / "stand_ins" / "http_app.py"

ORIGINAL = {"app": {"size": 1, "wait": 0.0}}


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


def launch_again(process: ServerProcess, url: str) -> None:
    process.launch([sys.executable, str(APP), url.rpartition(":")[2]])
    wait_until(lambda: answers(url))


@contextmanager
def served(folder: Path, **environment: str) -> Iterator[tuple[str, ServerProcess]]:
    """The URL of a server that somebody else started, and its process."""
    port = free_port()
    words = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, str(APP)]
    url = f"http://127.0.0.1:{port}"
    with answering_process([*words, str(port)], url, log_path=folder / "log") as process:
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


def changed_in_place(url: str, **request: Any) -> Scenario:
    """Attached to a server whose PUT takes the parameters themselves."""
    setting = {"url": f"{url}/parameters", "method": "PUT", "read": f"{url}/parameters", **request}
    return scenario(url=f"{url}/score", launch=None, set={"request": setting})


def only_loaded(url: str, **target: Any) -> Scenario:
    """Of a server that is given no parameters."""
    return scenario(url=url, launch=None, set=None, means={}, **target)


def by_clients(asked: Scenario) -> dict[str, Any]:
    """The document of a load by two clients."""
    load = {"arrivals": "closed", "concurrency": 2, "duration": "200ms", "warm_up": "100ms"}
    document = asked.document() | {"objective": "throughput", "load": load}
    return {name: part for name, part in document.items() if name not in ("search", "slo")}


def told(command: str, document: Any, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What a command says of this scenario; its runs are in the folder `results`."""
    (folder / "s.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return answered(command, folder / "s.yaml", *options, cwd=folder)


def left_by_a_kill(asked: Scenario, folder: Path, *, size: int = 8) -> Run:
    """The run of a process that changed the server and was killed before it could put anything back."""
    run = create_run(asked, format_scenario(asked), root=folder)
    target = CommandTarget(asked.target)
    target.attach(partial(write_original, run.path))
    target.apply(asked.configuration({"max_batch_size": size, "batch_timeout_micros": 1000}))
    target._claim.release()  # as the kernel does
    return run


def set_by_hand(url: str, **parameters: float) -> dict[str, Any]:
    httpx.put(f"{url}/parameters", json={"app": parameters})
    return dict(parameters)


def present(url: str) -> Any:
    return httpx.get(url).json()


def test_variables_reach_a_launched_server_in_its_own_unit() -> None:
    asked = scenario()
    with CommandTarget(asked.target) as target:
        startup_s = target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 2000}))
        assert startup_s is not None
        assert httpx.get(target.endpoint.rest_url).json() == {"app": {"size": 8, "wait": 0.002}}
        target.apply(asked.configuration({"enable_batching": False}))
        assert httpx.get(target.endpoint.rest_url).json() == {"app": {"size": 1, "wait": 0}}


def test_flags_follow_the_words_of_launch() -> None:
    asked = scenario(
        url="http://127.0.0.1:1/score",
        launch=[sys.executable, "-c", "import sys, time; print(sys.argv[1:], flush=True); time.sleep(60)"],
        set={"flag": {"size": "--size", "wait": "--wait"}},
        ready=["true"],
        means={"rows": "size"},
    )
    with CommandTarget(asked.target) as target:
        target.apply(asked.configuration({"max_batch_size": 8, "wait": 0.5}))
        wait_until(lambda: "['--size', '8', '--wait', '0.5']" in target.log_tail())


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


def first_answer(url: str, *, must_have: str = "") -> None:
    asked = only_loaded(url)
    ok = asked.request.ok.model_copy(update={"path": must_have} if must_have else {})
    requests = build_requests(asked.request.model_copy(update={"ok": ok}), {}, model_name="x")
    with CommandTarget(asked.target) as target:
        require_answer(target.endpoint, requests, is_json=True)


@pytest.mark.parametrize(
    ("path", "said", "hint"),
    [
        ("/fails", "HTTP 500", ""),
        ("/nowhere", "HTTP 404", ""),
        ("/page", "text/html, not JSON", ""),
        ("/moved", "a redirect to /score/", ""),
        ("/stream", "the answer has no end", ""),
        ("/refuses", "field required", 'the body sent: {"x": '),
        ("/unloaded", "an error with a status of success: .*model not loaded", "request.ok.path"),
    ],
)
def test_a_wrong_app_is_told_before_any_load(running: str, path: str, said: str, hint: str) -> None:
    with pytest.raises(TargetError, match=said) as raised:
        first_answer(f"{running}{path}")
    assert raised.value.hint
    assert hint in raised.value.hint


def test_an_answer_must_have_what_the_scenario_says(running: str) -> None:
    """An error that is null is none, and no answer."""
    first_answer(f"{running}/score")
    first_answer(f"{running}/unloaded", must_have="error")
    for path in ("missing", "error"):
        with pytest.raises(TargetError, match=r"request\.ok\.path"):
            first_answer(f"{running}/score", must_have=path)


def test_an_address_of_https_at_a_server_of_http_and_a_missing_path_of_parameters_are_told(
    running: str,
) -> None:
    wrong = changed_in_place(
        running, read=f"{running}/no-page", change={"size": "{{size}}", "wait": "{{wait}}"}
    )
    with CommandTarget(wrong.target) as target:
        with pytest.raises(TargetError, match="HTTP 404") as raised:
            target.attach()
        assert "target.set.request.read" in raised.value.hint
        with pytest.raises(TargetError, match="the server speaks http, not https"):
            endpoint.answer_of(target.endpoint, running.replace("http:", "https:"))


@pytest.mark.parametrize("command", ["sweep", "compare"])
def test_a_wrong_app_ends_a_command_before_a_running_server_is_changed(tmp_path: Path, command: str) -> None:
    with served(tmp_path, SIZE="3", CHANGES="1") as (url, process):
        document = attached(url).document()
        if command == "compare":
            variants = {name: {"fixed": {"size": size}} for name, size in (("a", 1), ("b", 8))}
            document = by_clients(attached(url)) | {"variants": variants}
        document["target"]["url"] = f"{url}/fails"
        done = told(command, document, tmp_path)
        assert process.running
    assert (done.returncode, done.stdout) == (7, "")
    assert f"error: {url}/fails: HTTP 500" in done.stderr
    assert "hint: " in done.stderr
    assert "failed:" not in done.stderr


def test_a_server_that_takes_no_parameters_is_told_once_and_nothing_is_to_be_resumed(tmp_path: Path) -> None:
    with served(tmp_path, SIZE="4") as (url, _):
        document = attached(url).document()
        document["target"]["set"]["request"]["url"] = f"{url}/no-such"
        done = told("sweep", document, tmp_path)
    assert done.returncode == 7, done.stderr
    assert "correct target.set.request.url" in done.stderr
    assert "no recommendation" not in done.stderr
    assert "--resume" not in done.stderr


def test_a_wrong_app_that_is_launched_ends_a_sweep_with_its_last_words(tmp_path: Path) -> None:
    setting = {"env": {"size": "SIZE", "wait": "WAIT", "mode": "MODE", "level": "LEVEL"}}
    asked = scenario(url="http://127.0.0.1:{port}/fails", set=setting)
    done = told("sweep", asked.document() | {"fixed": {"level": 2}}, tmp_path)
    assert "target.set: mode is neither searched nor fixed: the server uses its own value" in done.stderr
    assert done.returncode == 7, done.stderr
    assert "/fails: HTTP 500" in done.stderr
    assert "KeyError: 'features'" in done.stderr
    assert "trial" not in done.stderr


@pytest.mark.parametrize(
    "environment",
    [["COLD=1"], ["LEAST=2"], ["LEAST=9", "WHY=CUDA out of memory"]],
    ids=["still-cold", "fails-with-one-configuration", "out-of-memory"],
)
def test_an_error_that_other_configurations_may_not_have_is_left_to_the_trials(
    tmp_path: Path, environment: list[str]
) -> None:
    asked = scenario(launch=["env", *environment, sys.executable, str(APP), "{port}"])
    points = ({"max_batch_size": size, "batch_timeout_micros": 0} for size in (1, 8))
    with session(asked, results=tmp_path, quiet=True) as current, CommandTarget(asked.target) as target:
        current.launch(asked, target, *map(asked.configuration, points))
        assert target.alive()


def test_a_server_that_is_not_there_is_told_without_waiting_for_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether its parameters would be set or not; nothing is launched, and nothing says so."""
    monkeypatch.setattr(command, "ANSWERS_S", 0.05)
    url = f"http://127.0.0.1:{free_port()}"
    for asked in (only_loaded(f"{url}/score"), attached(url)):
        assert beginning(asked) == f"attaching to {url}/score"
        with (
            CommandTarget(asked.target) as target,
            pytest.raises(TargetError, match="nothing answers at") as raised,
        ):
            target.apply(asked.configuration({}))
        assert "start the server" in raised.value.hint
        assert raised.value.exit_code == 7


def moved_between(pages: Iterable[str], **names: str) -> ServerActivity:
    spec = MetricsSpec.model_validate({"url": "http://x/", **names})
    before, after = (
        Counters(monotonic_s=at, server_cpu_s=None, series=meant(spec, parse_prometheus(page)))
        for at, page in enumerate(pages)
    )
    return activity(before, after)


def test_a_mean_batch_can_come_from_two_counters() -> None:
    """Where a server's histogram of the sizes is coarse, or includes batches of nothing."""
    pages = (f"batches_total {batches}\nrequests_total {rows}\n" for batches, rows in ((5, 10), (15, 50)))
    assert moved_between(pages, batches="batches_total", rows="requests_total").mean_batch_rows == 4.0


def test_metrics_go_by_what_their_names_mean(running: str) -> None:
    """The page is read as ours: sizes, batches, and times in the unit that their names end in."""
    pages = (
        f"rows_sum {rows}\nrows_count {batches}\nqueue_ms_sum {wait}\nqueue_ms_count {rows}\nrun_seconds_sum {run}\n"
        f"m:running {batches}\nm:waiting 2\n"
        for rows, batches, wait, run in ((10, 5, 10, 1.0), (50, 15, 90, 2.0))
    )
    names = {"batch_size": "rows", "queue": "queue_ms", "execution": "run_seconds"}
    moved = moved_between(pages, running="m:running", waiting="m:waiting", **names)
    assert (moved.batches, moved.mean_batch_rows, moved.queue_wait_mean_s) == (10, 4.0, 0.002)
    assert moved.device_busy_ratio == pytest.approx(1.0)
    assert moved.requests_inside == 17
    with CommandTarget(only_loaded(f"{running}/score").target) as target:
        assert not read_meant_counters(None, target.endpoint).series


def test_a_metrics_page_that_is_none_or_lacks_names_says_why_with_the_nearest_that_it_has(
    running: str,
) -> None:
    def reading_of(path: str, **names: str) -> Counters:
        asked = only_loaded(f"{running}/score", metrics={"url": f"{running}{path}", **names})
        with CommandTarget(asked.target) as target:
            return target.counters()

    assert reading_of("/no-page").page_fault == f"{running}/no-page: HTTP 404"
    assert reading_of("/text").page_fault == f"{running}/text: not a page of Prometheus: ok"
    names = {"batches": "batch_total", "rows": "rows_total", "execution": "exec_second", "waiting": "zzz"}
    there = reading_of("/metrics", **names)
    assert not there.page_fault
    assert there.missing == {"batches": "batches_total", "execution": "exec_seconds", "waiting": ""}


def test_a_wrong_metrics_page_is_told_before_any_load(running: str, tmp_path: Path) -> None:
    metrics = {"url": f"{running}/no-page", "batches": "batches_total"}
    asked = only_loaded(f"{running}/score", metrics=metrics)
    with (
        session(asked, results=tmp_path, quiet=True) as current,
        CommandTarget(asked.target) as target,
        pytest.raises(WrongAnswerError) as raised,
    ):
        current.launch(asked, target, asked.configuration({}))
    assert raised.value.message == f"target.metrics.url: {running}/no-page: HTTP 404"
    assert raised.value.exit_code == 7


BOTH = {"size": "{{size}}", "wait": "{{wait}}"}


@pytest.mark.parametrize("keys", [["body"], ["change"], ["change", "body"]], ids="-".join)
def test_what_was_read_is_put_back_by_a_short_request(running: str, keys: list[str]) -> None:
    httpx.put(f"{running}/parameters", json={"size": 3, "wait": 0.5})
    before = present(running)
    asked = changed_in_place(running, **dict.fromkeys(keys, BOTH))
    assert parse_scenario(format_scenario(asked), source="kept") == asked
    with CommandTarget(asked.target) as target:
        assert target.attach() == {"size": 3, "wait": 0.5}
        target.apply(asked.configuration({"max_batch_size": 8, "batch_timeout_micros": 1000}))
        assert present(running) == {**before, "size": 8, "wait": 0.001}
    assert present(running) == before


WAIT = {"app.wait": "{{wait}}"}
SIZE = "{{size}}"
NO_KEY = "READ returns no such key"
HELD = "there are: app.size, app.wait, limits.batch"


@pytest.mark.parametrize(
    ("request_keys", "said", "hint"),
    [
        ({"body": BOTH}, "request.body: {{size}} cannot be restored", "target.set.request.change"),
        ({"change": {"app.sise": SIZE, **WAIT}}, "request.change: app.sise: ", "did you mean 'app.size'?"),
        ({"change": {"limit.batch": SIZE, **WAIT}}, f"limit.batch: {NO_KEY}, and no object at 'limit'", HELD),
        ({"change": {"app.wait.size": SIZE, **WAIT}}, f"{NO_KEY}, and no object at 'app.wait'", HELD),
        ({"change": BOTH}, f"request.change: size: {NO_KEY}, nor another place of change", HELD),
    ],
)
def test_what_cannot_be_put_back_is_refused_before_anything_is_sent(
    running: str, request_keys: dict[str, Any], said: str, hint: str
) -> None:
    httpx.put(f"{running}/parameters", json={"app": {"size": 3, "wait": 0.5}, "limits": {"batch": 9}})
    before = present(running)
    asked = changed_in_place(running, **request_keys)
    with CommandTarget(asked.target) as target, pytest.raises(UsageError) as raised:
        target.apply(asked.configuration({"max_batch_size": 8}))
    assert raised.value.message.startswith("target.set.request.")
    assert said.replace("READ", f"{running}/parameters") in raised.value.message
    assert hint in raised.value.hint
    assert raised.value.exit_code == 2
    assert present(running) == before


def test_a_place_that_nothing_holds_is_named_with_its_line(running: str, tmp_path: Path) -> None:
    asked = changed_in_place(running, change={"limit.batch": "{{size}}", **WAIT})
    done = told("sweep", asked.document(), tmp_path)
    lines = (tmp_path / "s.yaml").read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "limit.batch" in text)
    assert done.returncode == 2
    assert f"error: {tmp_path / 's.yaml'}:{line}: target.set.request.change: limit.batch: " in done.stderr
    assert "hint: there are: app.size, app.wait" in done.stderr
    assert present(running) == ORIGINAL


def test_a_place_that_the_file_cannot_hold_is_refused_before_it_is_written(
    running: str, tmp_path: Path
) -> None:
    """Of a server that runs and of one that is launched, which is not."""
    settings = tmp_path / "settings.json"
    settings.write_text(text := '{"extra": {"size": 3}}')
    request = {"request": {"url": f"{running}/score", "body": {}}}
    for place, why, hint in (
        ("extr.size", "no such key, and no object at 'extr'", "there are: extra.size"),
        ("extra.sise", "no such key", "did you mean 'extra.size'?"),
    ):
        setting = {"file": {"path": str(settings), "change": {place: "{{size}}", "wait": "{{wait}}"}}}
        said = f"target.set.file.change: {place}: {settings} has {why}"
        attaching = scenario(url=f"{running}/score", launch=None, set=setting | request)
        with CommandTarget(attaching.target) as target, pytest.raises(ScenarioError) as raised:
            target.attach()
        assert (raised.value.message, raised.value.hint) == (said, hint)
    done = told("sweep", scenario(set=setting).document(), tmp_path)
    assert done.returncode == 2
    assert f": {said}\nhint: {hint}" in done.stderr
    assert settings.read_text() == text


@pytest.mark.parametrize(
    ("request_keys", "said", "hint"),
    [
        (
            {"method": "PUTT", "read": "http://h:1/p"},
            "method: expected .*; was 'PUTT'",
            "did you mean 'PUT'?",
        ),
        ({"method": "PUT"}, "change: read is missing", ""),
    ],
)
def test_a_request_that_cannot_set_parameters_is_refused(request_keys: Any, said: str, hint: str) -> None:
    request = {"url": "http://h:1/p", "change": BOTH, **request_keys}
    with pytest.raises(ScenarioError, match=rf"x:\d+: target\.set\.request\.{said}") as raised:
        scenario(set={"request": request})
    assert hint in raised.value.hint


def test_a_parameter_with_a_known_default_need_not_be_shown(running: str) -> None:
    set_by_hand(running, wait=0.5)
    asked = changed_in_place(running, change={"app.size": "{{size}}", **WAIT}).with_target(
        defaults={"size": 1}
    )
    with CommandTarget(asked.target) as target:
        target.apply(asked.configuration({"max_batch_size": 8}))
        assert present(running) == {"app": {"size": 8, "wait": 0.5}}
    assert present(running) == {"app": {"wait": 0.5}}


def test_a_server_that_does_not_show_its_parameters_is_not_said_to_have_them_back(running: str) -> None:
    said: list[str] = []
    asked = changed_in_place(running, body={"app": BOTH}, read=None)
    with CommandTarget(asked.target, on_event=said.append) as target:
        target.apply(asked.configuration({"max_batch_size": 8}))
    assert "keeps the parameters of the last trial" in said[-1]
    assert "keeps the parameters of the last trial at the end: without target.set.request.read" in said[0]


@pytest.mark.parametrize("edited", [None, '{"size": 5}'])
def test_a_settings_file_edited_after_a_kill_is_kept_beside_the_restored_one(
    running: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], edited: str | None
) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"size": 3}')
    setting = {
        "file": {"path": str(file), "change": BOTH},
        "request": {"url": f"{running}/score", "body": {}},
    }
    run = left_by_a_kill(scenario(url=f"{running}/score", launch=None, set=setting), tmp_path)
    file.write_text(edited or file.read_text())
    assert run_restore(run.path) == 0
    assert file.read_text() == '{"size": 3}'
    copies = [path.read_text() for path in tmp_path.glob("settings.json.edited-*")]
    assert copies == ([] if edited is None else [edited])
    assert ("the edited file is copied to" in capsys.readouterr().err) == (edited is not None)


def test_what_a_killed_sweep_left_is_never_taken_for_the_original(running: str, tmp_path: Path) -> None:
    asked = attached(running)
    left_by_a_kill(asked, tmp_path)
    assert present(running)["app"]["size"] == 8
    said: list[str] = []
    for _ in range(2):
        with CommandTarget(asked.target, on_event=said.append) as target:
            assert target.attach() == ORIGINAL["app"]
        assert present(running) == ORIGINAL
    assert "an earlier sweep of" in said[0]
    assert len([text for text in said if "an earlier sweep" in text]) == 1


def test_what_somebody_set_after_a_killed_sweep_is_what_the_server_gets_back(
    running: str, tmp_path: Path
) -> None:
    asked = attached(running)
    left_by_a_kill(asked, tmp_path)
    theirs = set_by_hand(running, size=12, wait=0.5)
    said: list[str] = []
    with CommandTarget(asked.target, on_event=said.append) as target:
        assert target.attach() == theirs
        target.apply(asked.configuration({"max_batch_size": 4, "batch_timeout_micros": 0}))
    assert present(running)["app"] == theirs
    assert "size 12, wait 0.5 was set since, by somebody else" in said[0]
    assert not any("left its trial" in text for text in said)


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
    assert sum("somebody else set size 12, wait 0.5 during the sweep" in text for text in said) == 1
    assert sum("in place of the trial's parameters" in text for text in said) == 2


@pytest.mark.slow
def test_a_trial_under_which_somebody_changed_the_parameters_runs_again(tmp_path: Path) -> None:
    with served(tmp_path, SIZE="2", SEIZED="6") as (url, _):
        done = told("sweep", attached(url).document() | {"slo": {"p95": "500ms"}}, tmp_path, "--budget", "3s")
        assert present(url)["app"]["size"] == 3
    assert "somebody else set size 3" in done.stderr
    assert "score had size 3" in done.stderr
    assert "again, which somebody set during the sweep" in done.stderr
    run = open_run(next((tmp_path / "results").glob("*/*")))
    assert all(trial.state == "complete" for trial in run.ledger())
    assert run.scenario().target.present["size"] == 3
    assert "what runs now  " not in done.stdout


def test_restore_leaves_what_somebody_set_after_the_kill(
    running: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = left_by_a_kill(attached(running), tmp_path)
    theirs = set_by_hand(running, size=12, wait=0.5)
    assert run_restore(run.path) == 0
    said = capsys.readouterr().err
    assert "was set since, by somebody else" in said
    assert "is as it was" not in said
    assert present(running)["app"] == theirs
    assert not_put_back(run) is None
    assert not entries()


def test_restore_knows_the_trial_of_a_later_sweep_of_the_same_original(running: str, tmp_path: Path) -> None:
    first, _ = (left_by_a_kill(attached(running), tmp_path, size=size) for size in (8, 4))
    assert run_restore(first.path) == 0
    assert present(running) == ORIGINAL


def entries() -> list[bytes]:
    return [content for path in state_folder().glob("*.json") if (content := path.read_bytes())]


def test_a_server_has_one_record_by_either_name_of_its_host_and_one_cut_short_is_none() -> None:
    claims = [Claim(f"http://{host}:1", "m") for host in ("localhost", "127.0.0.1")]
    assert claims[0].path == claims[1].path
    claims[0].path.parent.mkdir(parents=True, exist_ok=True)
    claims[0].path.write_text('{"model": ')
    assert claims[0].lock() is None
    claims[0].release()


def test_a_server_that_refused_every_change_is_not_said_to_be_changed(tmp_path: Path) -> None:
    said: list[str] = []
    with served(tmp_path, SIZE="9", MOST="0") as (url, _):
        asked = changed_in_place(url, change={"app.size": "{{size}}", **WAIT})
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
        run = create_run(asked, format_scenario(asked), root=tmp_path)
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
    asked = attached(running)
    left_by_a_kill(asked, tmp_path)
    document = asked.document()
    document["target"]["set"]["request"]["read"] = f"{running}/text"
    wrong = parse_scenario(json.dumps(document), source="x")
    with CommandTarget(wrong.target) as target, pytest.raises(TargetError, match="not JSON: 'ok'"):
        target.attach()
    assert entries()
    with CommandTarget(asked.target) as target:
        target.attach()
    assert present(running) == ORIGINAL


def test_a_second_process_is_refused_while_the_first_changes_the_server(running: str) -> None:
    asked = attached(running)
    with CommandTarget(asked.target) as first, CommandTarget(asked.target) as second:
        first.attach()
        where = first.endpoint.rest_url, first.endpoint.model_name
        with pytest.raises(TargetError, match="another batchtune changes"):
            second.apply(asked.configuration({"max_batch_size": 8}))
        assert "another batchtune changes this server now" in foreign_parameters(*where)
    assert not foreign_parameters(*where)
    with CommandTarget(asked.target) as third:
        third.attach()


def test_a_load_is_told_what_a_killed_sweep_left_and_what_restores_it(running: str, tmp_path: Path) -> None:
    run = left_by_a_kill(attached(running), tmp_path / "r")
    load = partial(told, "load", by_clients(attached(running)), tmp_path, "--no-save", "-q")
    left = load().stderr
    assert f"note: an earlier sweep of score at {running} ({run.path}) did not restore it" in left
    assert f"`batchtune restore {run.path}` restores it" in left
    assert present(running)["app"]["size"] == 8
    assert run_restore(run.path) == 0
    assert present(running) == ORIGINAL
    assert "earlier sweep" not in load().stderr


def test_the_run_that_changed_the_server_is_named_by_a_later_one_that_cannot_put_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    with served(tmp_path, CHANGES="2") as (url, process):
        asked = attached(url)
        first = left_by_a_kill(asked, tmp_path)
        later, last = (create_run(asked, format_scenario(asked), root=tmp_path) for _ in range(2))
        target = CommandTarget(asked.target, on_event=said.append)
        target.attach(partial(write_original, later.path))
        assert str(first.path) in said[0]
        assert not put_back(target, later)
        assert f"`batchtune restore {first.path}` tries again" in capsys.readouterr().err
        target._claim.release()
        launch_again(process, url)
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
    """The answer is made then, and compares first with what ran before."""
    asked = attached(running)
    with session(asked, results=tmp_path, quiet=True) as current:
        target = CommandTarget(asked.target)
        current.serve(target)
        scenario = current.found_on(asked, target)
        target.apply(scenario.configuration({"max_batch_size": 8}))
    assert present(running) == ORIGINAL
    assert current.scenario.target.present == ORIGINAL["app"]
    references = reference_configurations(current.scenario)
    assert next(iter(references)) == "present"
    assert references["present"].server_values() == {"size": 1, "wait": 0}


@pytest.mark.slow
def test_a_load_gives_a_launched_server_what_is_fixed_and_an_attached_one_nothing(
    running: str, tmp_path: Path
) -> None:
    batching = {"size": 8, "wait": 0.001}
    done = told("load", by_clients(scenario()) | {"fixed": batching}, tmp_path, "--json")
    assert json.loads(done.stdout)["points"][0]["configuration"]["batching"] == batching
    done = told("load", by_clients(attached(running)), tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert "before" not in done.stderr
    assert present(running) == ORIGINAL


@pytest.mark.slow
def test_a_server_that_takes_no_parameters_ends_the_sweep_with_what_it_shows(
    running: str, tmp_path: Path
) -> None:
    """Only what it had before can be measured, which is no answer."""
    httpx.put(f"{running}/parameters", json={"size": 9, "wait": 0})
    asked = changed_in_place(running, change=BOTH, body={"ignored": "{{changed}}"}).document()
    asked["search"] = {"space": {"size": [8, 64], "wait": [0, 0.002]}}
    done = told("sweep", asked, tmp_path, "--budget", "30s")
    assert (done.returncode, done.stdout) == (7, "")
    assert "only what the server had before could be measured" in done.stderr
    assert "size is 9 after it, not " in done.stderr
    assert "no recommendation" not in done.stderr
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
        launch_again(process, url)
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


@pytest.mark.slow
def test_the_trial_under_whose_load_a_server_ended_is_run_again_when_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing of its configuration, unless the server returns by itself."""
    monkeypatch.setattr(endpoint, "RETURN_LIMIT_S", 0.05)
    with served(tmp_path, SIZE="3", UNDER_LOAD="2") as (url, process):
        document = attached(url).document() | {"slo": {"p95": "500ms"}}
        done = told("sweep", document, tmp_path, "--budget", "20s")
        assert done.returncode == 7
        assert not process.running
        run = open_run(next((tmp_path / "results").glob("*/*")))
        before = run.ledger()
        assert {trial.state for trial in before} == {"complete"}
        launch_again(process, url)
        done = answered("sweep", run.path / "scenario.yaml", "--resume", run.path, cwd=tmp_path)
        assert done.returncode in (0, 5), done.stderr
    assert all(trial.state == "complete" for trial in run.ledger()[len(before) :])
    assert run.recommendation().configuration.words
    assert answered("runs", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_a_sweep_of_a_server_that_ended_says_how_to_go_on_and_recommends_no_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "RETURN_LIMIT_S", 0.05)
    with served(tmp_path, SIZE="3", CHANGES="3") as (url, _):
        document = attached(url).document() | {"slo": {"p95": "500ms"}}
        done = told("sweep", document, tmp_path, "--budget", "20s")
    run = next((tmp_path / "results").glob("*/*"))
    assert done.returncode == 7
    assert f"error: the server at {url}" in done.stderr
    assert "saved in" in done.stderr
    shown = run.relative_to(tmp_path)
    assert f"next: batchtune sweep {shown / 'scenario.yaml'} --resume {shown}" in done.stderr
    assert f"`batchtune restore {shown}` tries again" in done.stderr
    assert "Recommended" in done.stdout
    assert "not confirmed: the server ended during the sweep" in " ".join(done.stdout.split()).lower()
    again = answered("recommend", run, cwd=tmp_path)
    for text in (done.stdout, again.stdout):
        assert "(not confirmed: the server ended)" in text
        assert "deploy " not in text
