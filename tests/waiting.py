"""Waiting for what comes soon, looked for often and given up late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], *, limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"the condition was not met within {limit_s} s"
        time.sleep(0.005)
