"""What several tests of the load room need."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from batchtune.load.fleet import LoadFleet
from batchtune.load.samples import Columns, new_memory


@pytest.fixture
def columns() -> Columns:
    descriptor = new_memory(100)
    made = Columns(descriptor, 100)
    os.close(descriptor)
    return made


@pytest.fixture(scope="module")
def fleet() -> Iterator[LoadFleet]:
    """Two workers, which take half a second to start."""
    with LoadFleet(processes=2) as started:
        yield started
