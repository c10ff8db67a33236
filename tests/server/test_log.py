"""The server says what it does, and goes on where nobody can read it."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchtune.server import log
from batchtune.server.backends.tensorflow import native_log_lines_dropped


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [FullDisk(), closed(), None])
def test_to_say_something_never_raises(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    log.say("a version is available")
    log.note("an emulated device")
    log.warn("a version failed")
    log.say_error("the port is taken", hint="choose another")
    log.flush()


def test_lines_begin_with_who_says_them(capsys: pytest.CaptureFixture[str]) -> None:
    log.say("ready")
    log.warn("no versions")
    log.say_error("the port is taken", hint="choose another")
    assert capsys.readouterr().err == (
        "batchtune-model-server: ready\nbatchtune-model-server: warning: no versions\n"
        "error: the port is taken\nhint: choose another\n"
    )


def test_what_a_client_chose_writes_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    log.warn("no model x\nbatchtune-model-server: warning: FORGED\r\x1b[31m\x7f\x9b, é\t.")
    assert capsys.readouterr().err == (
        "batchtune-model-server: warning: no model x\\nbatchtune-model-server: warning: FORGED"
        "\\x0d\\x1b[31m\\x7f\\x9b, é\t.\n"
    )


@contextmanager
def stderr_in(path: Path) -> Iterator[None]:
    """File descriptor 2 is this file."""
    kept = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_native_log_lines_are_dropped_and_others_kept(tmp_path: Path) -> None:
    with stderr_in(tmp_path / "stderr"), native_log_lines_dropped():
        os.write(2, b"I0000 00:00:1 a.cc:1] one\nours\n")
    assert (tmp_path / "stderr").read_bytes() == b"ours\n"


def test_two_loads_that_overlap_leave_stderr_as_it_was(tmp_path: Path) -> None:
    """They swap the same descriptor: crosswise it would end on what one of them collects."""
    first_inside, second_asked, second_inside = threading.Event(), threading.Event(), threading.Event()
    first_ended = threading.Event()

    def second() -> None:
        first_inside.wait(10)
        second_asked.set()
        with native_log_lines_dropped():
            second_inside.set()
            os.write(2, b"second\n")
            first_ended.wait(10)

    other = threading.Thread(target=second)
    other.start()
    with stderr_in(tmp_path / "stderr"):
        with native_log_lines_dropped():
            first_inside.set()
            second_asked.wait(10)
            second_inside.wait(0.05)  # where they may overlap, it is inside now
            os.write(2, b"first\n")
        first_ended.set()
        other.join(10)
        os.write(2, b"later\n")
    assert (tmp_path / "stderr").read_bytes() == b"first\nsecond\nlater\n"


def test_a_full_disk_under_stderr_fails_no_load() -> None:
    with stderr_in(Path("/dev/full")), native_log_lines_dropped():
        os.write(2, b"ours\n")
