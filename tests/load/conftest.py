"""What several tests of the load room need."""

from __future__ import annotations

import os

import pytest

from batchtune.load.samples import Columns, new_memory


@pytest.fixture
def columns() -> Columns:
    descriptor = new_memory(100)
    made = Columns(descriptor, 100)
    os.close(descriptor)
    return made
