"""Signals that end a command in good order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchtune.system import INTERRUPTS, hear_interrupts, interrupts_noted

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def handlers_as_at_the_start_of_a_shell() -> Iterator[None]:
    """Whoever runs the tests may have told them to ignore some, as nohup does."""
    before = {number: signal.getsignal(number) for number in INTERRUPTS}
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", INTERRUPTS)
def test_each_interrupts(number: signal.Signals) -> None:
    hear_interrupts()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hear_interrupts()
    os.kill(os.getpid(), signal.SIGHUP)


def test_a_terminal_that_goes_away_twice_interrupts_once() -> None:
    hear_interrupts()
    with interrupts_noted() as noted:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
    assert set(noted) == {signal.SIGHUP}


def test_the_second_raises_at_once_and_handlers_come_back() -> None:
    hear_interrupts()
    with interrupts_noted() as noted:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert noted == [signal.SIGTERM]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_off_the_main_thread_nothing_is_noted_and_no_handler_is_touched() -> None:
    hear_interrupts()
    before = [signal.getsignal(number) for number in INTERRUPTS]

    def within() -> tuple[list[int], bool]:
        with interrupts_noted() as noted:
            return noted, [signal.getsignal(number) for number in INTERRUPTS] == before

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(within).result() == ([], True)
