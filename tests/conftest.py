"""What every test needs of the process that runs it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from batchtune.interrupts import INTERRUPTS

# A shell's background job is started with Ctrl-C ignored, and would hand that on to what the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A command that a test runs in this process hears signals for good; the next test is not to."""
    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
