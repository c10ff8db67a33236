"""What do the words of one side change in the scenario: its model, a git commit's, an image, a command, flags?

Paths are relative to where the command is called, as flags are; those in the scenario to the scenario.
"""

from __future__ import annotations

import json
import os.path
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtune.batching.parameters import PARAMETER_NAMES
from batchtune.cli.arguments.batching_file import file_knobs
from batchtune.cli.arguments.sides import SideWords
from batchtune.errors import UsageError
from batchtune.scenario.reader import read_scenario, unchecked_scenario
from batchtune.scratch import ScratchFolder
from batchtune.target.model_files import export_model, is_lfs_pointer, readable


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The overrides of each side by its name, the commits of those that have a ref; `note` says both."""

    overrides: Mapping[str, Sequence[str]]
    commits: Mapping[str, str]
    note: str = ""


@contextmanager
def resolved_sides(
    scenario: Path, words: Mapping[str, SideWords], *, overrides: Sequence[str] = ()
) -> Iterator[Sides]:
    """The sides as changes to the scenario; models of git commits are exported, and removed at the end.

    Raises:
        UsageError: a model or a commit that is not there, or parameters that the scenario fixes and a file lacks.
        BatchingParametersError: a file that cannot be read, or says what no server would understand.
    """
    with ScratchFolder() as scratch:
        changes: dict[str, list[str]] = {}
        commits: dict[str, str] = {}
        notes = []
        for side, said in words.items():
            _require_one_model(scenario, side, said, overrides)
            model = _model(scenario, side, said)
            if said.ref is not None:
                exported = export_model(_model_path(scenario, said, overrides), said.ref, scratch.path / side)
                model = [_override("target.model", str(exported.path))]
                commits[side] = exported.commit
                notes.append(f"{side}: {exported.text}")
            changes[side] = [*model, *_server(said), *_batching(scenario, said, overrides), *said.set]
        yield Sides(overrides=changes, commits=commits, note="; ".join(notes))


def _require_one_model(scenario: Path, side: str, said: SideWords, overrides: Sequence[str]) -> None:
    option = "model" if said.model is not None else "ref"
    if getattr(said, option) is not None and _section(scenario, "target", overrides).get("models"):
        raise UsageError(
            f"--{side}-{option}: {scenario} lists several models, and this does not say which is meant",
            hint=f"give --{side}-set target.models.0.model=PATH: 0 is the first, PATH is seen from the scenario",
        )


def _model(scenario: Path, side: str, said: SideWords) -> list[str]:
    if said.model is None or said.ref is not None:
        return []
    if not _is_path(said.model) and not Path(said.model).exists():
        beside = scenario.parent / said.model
        if beside.exists():
            raise UsageError(f"{said.model}: no such model here", hint=f"did you mean {beside}?")
        return [_override("target.model", said.model)]
    path = _absolute(said.model)
    _refuse_pointers(side, Path(path))
    return [_override("target.model", path)]


def _refuse_pointers(side: str, model: Path) -> None:
    """Raise UsageError where a checkout has left a pointer in the place of a model's file."""
    versions = [path for path in model.glob("*") if path.name.isdecimal() and path.is_dir()]
    served = max(versions, key=lambda path: int(path.name), default=model)
    files = [served, *(file for depth in ("*", "*/*", "*/*/*") for file in sorted(served.glob(depth)))]
    for file in filter(Path.is_file, files):
        with readable(file):
            is_pointer = is_lfs_pointer(file)
        if is_pointer:
            raise UsageError(
                f"--{side}-model: {file}: a Git LFS pointer; its content is not in this checkout",
                hint="git lfs install && git lfs pull; of a job's checkout: lfs: true",
            )


def _model_path(scenario: Path, said: SideWords, overrides: Sequence[str]) -> Path:
    """Where the model of a commit lies: as the side says, else as the scenario does."""
    if said.model is not None:
        return Path(_absolute(said.model))
    target = _section(scenario, "target", overrides)
    model = target.get("model")
    if not isinstance(model, str) or not model:
        raise UsageError(f"{scenario}: target.model: missing: a ref is of a model's folder")
    path = scenario.parent / _at_home(model)
    if not path.exists() and not _is_path(model):
        raise UsageError(
            f"target.model: {model!r} is no folder in git, so it has no ref",
            hint="give --baseline-model PATH too",
        )
    return path


def _server(said: SideWords) -> Iterator[str]:
    if said.image is not None:
        yield _override("target.server", "docker")
        yield _override("target.docker.image", said.image)
    if said.command is not None:
        try:
            yield _override("target.command", shlex.split(said.command))
        except ValueError as error:
            raise UsageError(f"{said.command!r} is no command line: {error}") from error
    for flag in said.flag:
        name, equals, value = flag.lstrip("-").partition("=")
        if not name or not equals:
            raise UsageError(f"expected NAME=VALUE, such as tensorflow_intra_op_parallelism=2; was {flag!r}")
        yield f"target.flags.{name}={value}"


def _batching(scenario: Path, said: SideWords, overrides: Sequence[str]) -> Iterator[str]:
    """The parameters of a file in place of the scenario's own."""
    if said.batching is None:
        return
    path = _at_home(said.batching)
    knobs, notes = file_knobs(path, read_scenario(scenario, overrides=overrides))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    fixed = _section(scenario, "fixed", overrides)
    unnamed = sorted(name for name in fixed if name in PARAMETER_NAMES and name not in knobs)
    if unnamed:
        raise UsageError(
            f"{path}: the scenario fixes {', '.join(unnamed)}, and the file does not say it",
            hint="write it into the file, or take it out of the scenario's fixed",
        )
    yield "fixed.enable_batching=true"
    yield from (_override(f"fixed.{name}", value) for name, value in knobs.items())


def _section(scenario: Path, name: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    section = unchecked_scenario(scenario, overrides=overrides).get(name)
    return section if isinstance(section, dict) else {}


def _is_path(model: str) -> bool:
    """Whether it can only be meant as a path; else a sample model may have that name."""
    return "/" in model or model.endswith((".onnx", ".pt2", ".pt")) or model in (".", "..", "~")


def _absolute(path: str) -> str:
    return os.path.abspath(_at_home(path))  # noqa: PTH100 - a link keeps its own name


def _at_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{path}: no such user has a home folder here", hint="give the path in full"
        ) from error


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"
