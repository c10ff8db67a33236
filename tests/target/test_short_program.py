"""Does a program that fails, crashes or hangs leave a reason instead of an answer?"""

from __future__ import annotations

import sys

import pytest

from batchtune.target.container import ask

pytestmark = pytest.mark.smoke


def test_what_it_prints_is_the_answer() -> None:
    answer = ask(["sh", "-c", 'echo " $WORD "; echo no >&2'], limit_s=10.0, environment={"WORD": "yes"})
    assert answer == ("yes", "")


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("echo first >&2; echo 'the reason' >&2; exit 3", "the reason"),
        ("exit 3", "exit code 3"),
        ("kill -ILL $$", "ended by SIGILL"),
        ("read word && echo it waits for input", "exit code 1"),
    ],
)
def test_a_failure_is_told_by_its_last_words(script: str, failure: str) -> None:
    assert ask(["sh", "-c", script], limit_s=10.0) == ("", failure)


def test_a_program_that_hangs_is_killed() -> None:
    assert ask(["sleep", "1000"], limit_s=0.05) == ("", "no answer within 0.05 s")


def test_a_program_that_is_not_there_is_a_failure() -> None:
    assert "no_such_program" in ask(["no_such_program"], limit_s=10.0)[1] or sys.platform != "linux"


def test_bytes_that_are_no_text_are_no_traceback() -> None:
    assert ask(["printf", r"\377"], limit_s=10.0)[0] == "\N{REPLACEMENT CHARACTER}"
