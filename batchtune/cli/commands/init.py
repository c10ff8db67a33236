"""`batchtune init --example`: a bundled scenario to begin with."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from batchtune.errors import UsageError
from batchtune.scenario.examples import Example, example_names, read_example


def run_init(name: str | None, *, output: Path | None) -> int:
    """The exit code, 0.

    Raises:
        UsageError: no such example, or the file is there already or cannot be written.
    """
    if name is None:
        return _list_examples()
    _write_example(read_example(name), output)
    return 0


def _list_examples() -> int:
    bundled = [read_example(name) for name in example_names()]
    width = max((len(example.name) for example in bundled), default=0)
    for example in bundled:
        print(f"{example.name:<{width}}  {example.question}")
    print("`batchtune init --example NAME` writes one here", file=sys.stderr)
    return 0


def _write_example(example: Example, output: Path | None) -> None:
    if output == Path("-"):
        print(example.text_for(f"{example.name}.yaml"), end="")
        return
    path = output or Path(f"{example.name}.yaml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(example.text_for(shlex.quote(str(path))))
    except FileExistsError as error:
        raise UsageError(
            f"{path}: is there already", hint="name another file with --output, or -: stdout"
        ) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    print(f"{path}: {example.question}")
    print(f"next: batchtune {example.command} {shlex.quote(str(path))}", file=sys.stderr)
