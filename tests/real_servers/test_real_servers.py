"""Do the servers that people run take their parameters, serve, and end in an answer that fresh loads confirm?

Each server has an environment of its own, as their pins clash: made by pip on first use and kept in $BATCHTUNE_SERVERS, or
for this session only. All of them: `pytest -m real_servers tests/real_servers`. LitServe's is made by .ci/run, where its
test is marked slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real_servers.environments import APPS, SERVERS, path_with


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The PATH that has a server's programs first; skips where pip cannot have it."""
    root = Path(os.environ.get("BATCHTUNE_SERVERS") or tmp_path_factory.mktemp("servers"))

    def path_of(server: str) -> str:
        try:
            return path_with(server, root)
        except RuntimeError as error:
            pytest.skip(str(error))

    return path_of


def batchtune(
    path: str, folder: Path, *words: str, limit_s: float = 400.0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "batchtune", *words],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "server",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "litserve" else pytest.mark.real_servers)
        for name in SERVERS
    ],
)
def test_a_sweep_of_a_real_server_names_its_trap_and_answers(
    server: str, programs: Callable[[str], str], tmp_path: Path
) -> None:
    """The answer is one of the space or no batching, held at some rate; how good it is depends on the machine's peace."""
    words = ["sweep", str(APPS / SERVERS[server].app), "--server", server, "--slo-p95", "200ms", "--json"]
    done = batchtune(programs(server), tmp_path, *words, "--budget", "60s")
    assert SERVERS[server].trap in done.stderr, done.stderr
    assert done.returncode in (0, 3, 5), done.stderr
    ledgers = list(tmp_path.glob("results/*/*/trials.jsonl"))
    trials = [json.loads(line) for line in ledgers[0].read_text().splitlines()]
    assert [trial for trial in trials if trial["state"] == "complete"], done.stderr
    assert not [trial for trial in trials if trial["state"] == "failed"], done.stderr
    answered = [trial["measurement"]["throughput_rps"] for trial in trials]
    assert all(answered)
