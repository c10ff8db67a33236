"""Where does a job want the result of a check too?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchtune.check.account import Account
from batchtune.errors import UsageError
from batchtune.report.gate.files import code_quality, comment, github_annotations, junit_xml, markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFiles:
    """None: nowhere. Markdown is appended, by default to the summary of a GitHub job; the others are written anew."""

    junit: Path | None = None
    markdown: Path | None = None
    comment: Path | None = None
    code_quality: Path | None = None


def require_writable(files: CheckFiles) -> None:
    """Try the files asked for before minutes are spent on what they are to hold: none is changed, new ones are removed.

    Raises:
        UsageError: one cannot be written.
    """
    for path in (files.junit, files.markdown, files.comment, files.code_quality):
        try:
            if path is None or path.is_fifo():
                continue
            is_new = not os.path.lexists(path)  # a link to what is not there yet stays
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
            if is_new:
                path.unlink()
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error


def hand_on(account: Account, files: CheckFiles, *, scenario: Path) -> None:
    """The files asked for, the summary of the job's page, annotations for its runner; a note for each that cannot be
    written."""
    summary = files.markdown
    if summary is None and os.environ.get("GITHUB_STEP_SUMMARY"):
        summary = Path(os.environ["GITHUB_STEP_SUMMARY"])
    texts: tuple[tuple[Path | None, Literal["w", "a"], Callable[[], str]], ...] = (
        (files.junit, "w", lambda: junit_xml(account)),
        (files.comment, "w", lambda: comment(account)),
        (files.code_quality, "w", lambda: code_quality(account, file=str(scenario))),
        (summary, "a", lambda: markdown(account)),
    )
    for path, mode, text in texts:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode, encoding="utf-8") as file:
                file.write(text())
        except OSError as error:  # the verdict stands without it
            print(f"note: cannot write {path}: {error.strerror}", file=sys.stderr)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_annotations(account, file=str(scenario)):
            print(line, file=sys.stderr)
