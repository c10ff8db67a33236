"""How does the model of a git commit become files: exported whole, and refused where git holds no content of it?"""

from __future__ import annotations

import os.path
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from batchtune.errors import UsageError

_POINTER: Final = b"version https://git-lfs.github.com/spec/v1"
_POINTER_BYTES_MAX: Final = 1024
"""Of a pointer by its specification."""

_LIMIT_S: Final = 600.0
"""A model of some GB is written in a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInGit:
    """`path` is where the exported model lies, `text` says which it is: `models/net at main (1a2b3c4d5)`, `commit` in
    full."""

    path: Path
    text: str
    commit: str


def export_model(model: Path, ref: str, folder: Path) -> ModelInGit:
    """Write the model that lay at a path in a commit below `folder`, under its own name.

    Raises:
        UsageError: no git repository, no such commit, no model at that path in it, or files that git does not hold.
    """
    path = _absolute(model)
    beside = next(folder for folder in (path, *path.parents) if folder.is_dir())
    root = Path(
        _git(beside, "rev-parse", "--show-toplevel", what=f"{model}: no git repository holds it").strip()
    )
    prefix = _git(beside, "rev-parse", "--show-prefix").strip()
    inside = PurePosixPath(prefix, path.relative_to(beside).as_posix())
    commit = _commit(root, ref)
    names = _names(root, commit, inside, ref)
    if inside == PurePosixPath():
        folder = folder / root.name
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "model.tar"
    _git(root, "archive", "--format=tar", f"--output={archive}", commit, "--", *names)
    try:
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _folder: member)
            tar.extractall(folder)  # noqa: S202 - what git wrote, and with the filter where Python has it
    except (tarfile.TarError, OSError) as error:
        raise UsageError(f"{inside} at {ref}: cannot be written to {folder}: {error}") from error
    archive.unlink()
    _refuse_pointers(folder, ref)
    return ModelInGit(path=folder / inside, text=f"{inside} at {ref} ({commit[:9]})", commit=commit)


def _commit(root: Path, ref: str) -> str:
    hint = f"git fetch origin {ref}; a shallow clone (fetch-depth: 1) holds no other commit"
    what = f"{ref!r} is no commit of {root}"
    if ref.startswith("-"):
        raise UsageError(what, hint=hint)
    return _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", what=what, hint=hint).strip()


def _names(root: Path, commit: str, inside: PurePosixPath, ref: str) -> list[str]:
    """What is exported: a folder, or a file with those beside it that begin with its name, and a signature."""
    if inside == PurePosixPath():
        return ["."]
    entry = _git(root, "ls-tree", "-z", commit, "--", str(inside)).rstrip("\0")
    if not entry:
        raise UsageError(
            f"{inside}: not in {ref} of {root}",
            hint="give the model's folder of that commit by --baseline-model or --candidate-model",
        )
    kind = entry.split()[1]
    if kind == "commit":
        raise UsageError(
            f"{inside} at {ref}: a submodule, of which git archives no file", hint="check it out"
        )
    if kind == "tree":
        return [f":(literal){inside}"]
    parent = "" if inside.parent == PurePosixPath() else f"{inside.parent}/"
    listed = _git(root, "ls-tree", "-z", "--name-only", commit, *(["--", parent] if parent else []))
    beside = [PurePosixPath(name) for name in listed.split("\0") if name]
    starts = (f"{inside.stem}.", f"{inside.stem}_")
    return [
        f":(literal){path}"
        for path in beside
        if path.name.startswith(starts) or path.name == "signature.yaml"
    ]


def _refuse_pointers(folder: Path, ref: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size <= _POINTER_BYTES_MAX and is_lfs_pointer(path):
            raise UsageError(
                f"{path.relative_to(folder)} at {ref}: a Git LFS pointer; its content is not in this clone",
                hint=f"git lfs install && git lfs fetch origin {ref}, or check that commit out with LFS and give its "
                "folder by --baseline-model or --candidate-model",
            )


def is_lfs_pointer(path: Path) -> bool:
    """Whether a checkout without Git LFS has left a pointer in the place of this file."""
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - a link keeps its own name


def _git(folder: Path, *arguments: str, what: str = "", hint: str = "") -> str:
    """What git prints.

    Raises:
        UsageError: there is no git, or it refuses; `what` stands before its own words.
    """
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"git {arguments[0]}: {error}", hint="a ref needs git on the PATH") from error
    if done.returncode != 0:
        words = " ".join(done.stderr.split())[-500:]
        raise UsageError(": ".join(filter(None, (what or f"git {arguments[0]}", words))), hint=hint)
    return done.stdout
