"""What every test needs of the process that runs it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from batchtune.system import INTERRUPTS

# A shell's background job is started with both of the keyboard's signals ignored, and would hand that on to what the
# tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# The tests start some hundred Pythons. Where nothing compiled may be written beside the sources, each would compile them
# anew (0.4 s for a command); then it is kept in the user's cache.
if sys.dont_write_bytecode:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    sys.pycache_prefix = str(cache / "batchtune" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    sys.dont_write_bytecode = False

# What is imported and collected lives until the end: the collector, which would look through all of it at every test that
# calls it, need not know of it.
gc.disable()


# How long an example takes is the machine's affair: beside other work one took 0.8 s.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own: that of its module's `loop_factory`, if it has one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    with asyncio.Runner(loop_factory=getattr(pyfuncitem.module, "loop_factory", None)) as runner:
        runner.run(pyfuncitem.obj(**arguments))
    return True


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m smoke` does not even import the other files: that takes as long as its tests."""
    if config.getoption("markexpr") != "smoke" or not collection_path.name.startswith("test_"):
        return None
    return "pytest.mark.smoke" not in collection_path.read_text(encoding="utf-8") or None


@pytest.fixture(scope="session")
def _states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that whoever needs one makes: to make each by pytest looks through those of all tests before."""
    folder = tmp_path_factory.mktemp("states")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_state(_states: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be put back on a server of one test is no affair of the next."""
    monkeypatch.setenv("XDG_STATE_HOME", str(next(_states)))


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A command that a test runs in this process hears signals for good; the next test is not to."""
    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
