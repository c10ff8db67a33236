"""Is the address of a Ray Serve or an MLServer enough to attach to it, tune it, and put it back?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchtune.cli.arguments.load_request import LoadRequest
from batchtune.cli.commands.model_scenario import subject_of_sweep
from batchtune.errors import UsageError
from batchtune.scenario.reader import read_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.command import CommandTarget
from batchtune.target.process import free_port
from tests.target.running_process import answering_process

APP = Path(__file__).parent / "stand_ins" / "attached_server.py"
SERVE = "/api/serve/applications/"


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a stand-in with these words after its port; its URL."""
    with ExitStack() as stack:

        def start(*words: str) -> str:
            port = free_port()
            url, command = f"http://127.0.0.1:{port}", [sys.executable, str(APP), str(port), *words]
            stack.enter_context(answering_process(command, url, log_path=tmp_path / "log"))
            return url

        yield start


def swept(address: str) -> Scenario:
    subject = subject_of_sweep(address, LoadRequest(overrides=["slo.p95=1s"], quiet=True))
    return read_scenario(subject.scenario, overrides=subject.overrides)


def test_a_ray_serve_is_attached_to_by_the_address_of_its_dashboard(launched: Callable[..., str]) -> None:
    """The other application is sent along: a PUT replaces them all."""
    url = launched()
    scenario = swept(f"{url}/main")
    assert (scenario.target.url, scenario.target.launch, scenario.target.attached) == (
        f"{url}/main",
        None,
        True,
    )
    before = applications(url)
    with CommandTarget(scenario.target) as target:
        assert target.attach() == {"max_batch_size": 4, "batch_wait_timeout_s": 0.02}
        target.apply(scenario.configuration({"max_batch_size": 16, "batch_timeout_micros": 2000}))
        config = {"max_batch_size": 16, "batch_wait_timeout_s": 0.002, "further": "kept"}
        now = applications(url)
        changed = {"name": "Model", "user_config": config, "max_ongoing_requests": 1600}
        assert now["main"]["deployed_app_config"]["deployments"] == [{"name": "Ingress"}, changed]
        assert now["other"] == before["other"]
    assert applications(url) == before


def test_the_metrics_of_a_ray_serve_are_read_if_they_are_of_one_application(
    launched: Callable[..., str],
) -> None:
    """They have no application's name on all counters, and are 10 s old."""
    url = launched()
    assert swept(f"{url}/main").target.metrics is None
    main = applications(url)["main"]["deployed_app_config"]
    httpx.put(url + SERVE, json={"applications": [main]})
    metrics = swept(f"{url}/main").target.metrics
    assert metrics is not None
    assert (metrics.url, metrics.every_s) == (f"{url}/metrics", 10.0)


def applications(url: str) -> dict[str, Any]:
    return dict(httpx.get(url + SERVE).json()["applications"])


def test_which_of_several_applications_is_asked(launched: Callable[..., str]) -> None:
    url = launched()
    with pytest.raises(UsageError, match="which model of that server") as raised:
        swept(url)
    assert raised.value.hint == f"give {url}/MODEL; there are main, other"
    with pytest.raises(
        UsageError, match="no deployment of other has batch_wait_timeout_s and max_batch_size"
    ):
        swept(f"{url}/other")


def test_an_mlserver_of_this_machine_is_attached_to_by_its_address(
    launched: Callable[..., str], tmp_path: Path
) -> None:
    """Its file is found in the folder that it was started with; what that does not say is off."""
    file = tmp_path / "models" / "m" / "model-settings.json"
    file.parent.mkdir(parents=True)
    text = json.dumps({"name": "m", "implementation": "m.M", "max_batch_time": 0.5})
    file.write_text(text)
    url = launched(str(tmp_path / "models"))
    scenario = swept(url.removeprefix("http://"))
    with CommandTarget(scenario.target, kserve=True) as target:
        assert target.attach() == {"max_batch_size": 1, "max_batch_time": 0.5}
        target.apply(scenario.configuration({"max_batch_size": 16, "batch_timeout_micros": 2000}))
    changed = {"name": "m", "implementation": "m.M", "max_batch_time": 0.002, "max_batch_size": 16}
    assert httpx.get(f"{url}/loaded").json() == [changed, json.loads(text)]
    assert file.read_text() == text


def test_an_mlserver_whose_file_is_elsewhere_says_so(launched: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"that of m is not found here"):
        swept(launched(str(tmp_path)))
