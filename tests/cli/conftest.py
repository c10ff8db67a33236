"""A server that runs already, for all tests that only ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.test_cli import write_version
from tests.server.server_process import ServerProcess


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A bundled server that tells nobody its parameters; it answers in 2 ms."""
    folder = tmp_path_factory.mktemp("running")
    parameters = folder / "parameters.txt"
    parameters.write_text("max_batch_size { value: 4 }\nnum_batch_threads { value: 1 }\n")
    flags = ("--enable_batching", f"--batching_parameters_file={parameters}")
    with ServerProcess(write_version(folder / "m"), *flags) as server:
        yield server
