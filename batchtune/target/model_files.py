"""Finds the files of a model, and lays them out as the directory of numbered versions that a server wants.

A model without a version directory is laid out by links in a folder of ours; the user's stays as it is.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

from batchtune.errors import ScenarioError, TargetError, UsageError
from batchtune.system import absolute
from batchtune.target.container import ask
from batchtune.wire.encoding import FileBytes, bounded_depth, read_fields
from batchtune.wire.tfserving.rest_json import read_graph_batching


def export_model(model: Path, ref: str, folder: Path) -> tuple[Path, str, str]:
    """Write the model that was at a path in a git commit into `folder`. Return (its path there, the full hash of the
    commit, text for messages such as `models/net at main (1a2b3c4d5)`).

    Raises:
        UsageError: no git repository, no such commit, no model at that path in it, files that git does not hold, or
            `folder` cannot be written.
    """
    path = absolute(model)
    beside = next(folder for folder in (path, *path.parents) if folder.is_dir())
    root = Path(
        _git(beside, "rev-parse", "--show-toplevel", what=f"{model}: it is in no git repository").strip()
    )
    prefix = _git(beside, "rev-parse", "--show-prefix").strip()
    inside = PurePosixPath(prefix, path.relative_to(beside).as_posix())
    commit = _commit(root, ref)
    names = _names(root, commit, inside, ref)
    if inside == PurePosixPath():
        folder = folder / root.name
    folder.mkdir(parents=True, exist_ok=True)
    what = f"{inside} at {ref}"
    _extract(root, commit, names, folder, what)
    if inside.suffix == ".onnx" and (folder / inside).is_file():
        weights = [str(inside.parent / name) for name in _named_weights(folder / inside)]
        missing = [f":(literal){name}" for name in weights if not (folder / name).is_file()]
        if missing:
            _extract(root, commit, missing, folder, what)
    _refuse_pointers(folder, ref)
    return folder / inside, commit, f"{what} ({commit[:9]})"


def _extract(root: Path, commit: str, names: Sequence[str], folder: Path, what: str) -> None:
    archive = folder / "model.tar"
    _git(root, "archive", "--format=tar", f"--output={archive}", commit, "--", *names)
    try:
        with tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _folder: member)
            tar.extractall(folder)  # noqa: S202 - what git wrote, and with the filter where Python has it
    except (tarfile.TarError, OSError) as error:
        raise UsageError(f"{what}: cannot be written to {folder}: {error}") from error
    archive.unlink()


def _commit(root: Path, ref: str) -> str:
    hint = f"git fetch origin {ref}; a shallow clone (fetch-depth: 1) contains no other commit"
    what = f"{ref!r} is not a commit of {root}"
    if ref.startswith("-"):
        raise UsageError(what, hint=hint)
    return _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", what=what, hint=hint).strip()


def _names(root: Path, commit: str, inside: PurePosixPath, ref: str) -> list[str]:
    """List what is exported, as git's path specifications: a folder, or a file with what may belong to it, those
    beside it that begin with its name, and a signature."""
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
        if path.is_file() and is_lfs_pointer(path):
            raise UsageError(
                f"{path.relative_to(folder)} at {ref}: a Git LFS pointer; its content is not in this clone",
                hint=f"git lfs install && git lfs fetch origin {ref}, or check that commit out with LFS and give its "
                "folder by --baseline-model or --candidate-model",
            )


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is only a Git LFS pointer, as a checkout without Git LFS leaves it."""
    begin = b"version https://git-lfs.github.com/spec/v1"
    with path.open("rb") as file:
        return file.read(len(begin)) == begin


def _git(folder: Path, *arguments: str, what: str = "", hint: str = "") -> str:
    """Run git and return what it prints.

    Raises:
        UsageError: there is no git, or it fails; `what` stands before its own message.
    """
    limit_s = 600.0  # A model of some GB is written in a minute.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"git {arguments[0]}: {error}", hint="a ref needs git on the PATH") from error
    if done.returncode != 0:
        words = " ".join(done.stderr.split())[-500:]
        raise UsageError(": ".join(filter(None, (what or f"git {arguments[0]}", words))), hint=hint)
    return done.stdout


MODEL_FILES: Final = ("saved_model.pb", "model.onnx", "model.pt2", "model.pt", "emulated.yaml")
"""Files that make a folder a version directory; it holds one of them."""

_NAME_BY_SUFFIX: Final = {".onnx": "model.onnx", ".pt2": "model.pt2", ".pt": "model.pt"}
_SCRIPT_SIGNATURE: Final = "signature.yaml"
STAGES_FILE: Final = "stages.yaml"
_FORMS: Final = "a SavedModel directory (its version directory or not), or a .onnx, .pt2 or .pt file"
_EXPORTED: Final[dict[tuple[str, str | None], Path]] = {}
"""Sample models, by name and framework, that this process has prepared: a server that is launched again finds them."""
_KERAS_EXPORT: Final = """python -c 'import keras; keras.models.load_model("{path}").export("{stem}")'"""
_EXPORTS: Final = {
    ".keras": f"export it as a SavedModel: {_KERAS_EXPORT}",
    ".h5": f"export it as a SavedModel: {_KERAS_EXPORT}",
    ".hdf5": f"export it as a SavedModel: {_KERAS_EXPORT}",
    ".pth": "weights are not a model: save the module with torch.export.save(torch.export.export(…), '{stem}.pt2')",
    ".ckpt": "weights are not a model: save the module with torch.export.save(torch.export.export(…), '{stem}.pt2')",
    ".safetensors": "weights are not a model: save the module with torch.export.save(…, '{stem}.pt2')",
    ".pkl": "convert it with skl2onnx.to_onnx(model, X[:1], options={{'zipmap': False}})",
    ".joblib": "convert it with skl2onnx.to_onnx(model, X[:1], options={{'zipmap': False}})",
    ".pb": "a frozen graph is not a SavedModel: export the model with tf.saved_model.save",
    ".tflite": "no server takes it: export the model as a SavedModel",
}


def resolve_model(
    model: str,
    *,
    framework: str | None = None,
    folder: Path | None = None,
    at: tuple[str | int, ...] = ("target", "model"),
    on_event: Callable[[str], None] = lambda _text: None,
) -> Path:
    """Return the model base directory for `target.model`: a path, or the name of a sample model, which is exported on
    first use.

    A model without a version directory is laid out in `folder` by links; None: its own path is returned. `framework`:
    in which a sample model is exported, of those that it is written in; None: the first that is installed. `at`: the
    path of the scenario's key.

    Raises:
        UsageError: neither a sample model nor a model's directory or file (the message says what is there instead), or
            `framework` with a path.
        TargetError: a sample model cannot be exported.
    """
    with readable(Path(model)):
        is_name = "/" not in model and not Path(model).exists()
    if is_name:
        return _sample_model(model, framework, on_event)
    if framework is not None:
        raise UsageError(
            f"target.framework: read only with a sample model; {model!r} is a path",
            hint="the files of a version directory decide what runs it",
        )
    path = located_model(model, at)
    return path if folder is None or _versions(path) else _laid_out(path, folder)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Return a context manager that turns an OSError into a UsageError that names the path.

    Raises:
        UsageError: this user may not read it, or nothing can have such a name.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def located_model(given: str, at: tuple[str | int, ...] = ("target", "model")) -> Path:
    """Return the model at a path: a directory of versions, a SavedModel's own directory, or a file.

    For the highest version directory, or a file in it, this is the directory of versions: the highest is the one that a
    server takes. A link is not resolved. `at`: the path of the scenario's key.

    Raises:
        UsageError: no model is there; the hint says what was expected, or where a model is.
    """
    path = absolute(Path(given).expanduser())
    with readable(path):
        return _located(path, given, at)


def _located(path: Path, given: str, at: tuple[str | int, ...]) -> Path:
    if not path.exists():
        raise ScenarioError(
            f"{'.'.join(map(str, at))}: {given!r} does not exist",
            hint=f"give {_FORMS}, or a sample model's name",
            path=at,
        )
    if path.is_dir():
        if _versions(path):
            return path
        if not _holds_model(path):
            raise UsageError(f"target.model: no model in {path}", hint=_where_else(path))
    elif path.name in ("saved_model.pb", "emulated.yaml") or (
        path.name in MODEL_FILES and path.parent.name.isdigit()
    ):
        path = path.parent
    else:
        _check_file(path)
        _check_stages(path)
        return path
    if path.name.isdigit() and path == max(_versions(path.parent), key=lambda version: int(version.name)):
        return path.parent
    return path


def only_model_below(path: Path) -> Path | None:
    """Return the only model in the subdirectories of a directory; None: there is none, there are several, or the
    directory is a model itself."""
    if _versions(path) or _holds_model(path):
        return None
    below = _models_below(path)
    return below[0] if len(below) == 1 else None


def lies_bare(path: Path) -> bool:
    """Whether a path is a model without a version directory around it."""
    if path.is_file():
        return path.suffix in _NAME_BY_SUFFIX
    return _holds_model(path) and not _versions(path)


def batches_inside(base_path: Path) -> str:
    """Describe how the highest version batches inside its graph (`tf.nondifferentiable_batch_function`):
    `max_batch_size 32, batch_timeout_micros 5000, num_batch_threads 1`, several divided by semicolons; "": it does
    not."""
    versions = _versions(base_path)
    version = max(versions, key=lambda version: int(version.name)) if versions else base_path
    return "; ".join(batcher.in_words() for batcher in read_graph_batching(version))


def served_name(model: str) -> str:
    """Return the name under which a launched server serves `target.model`, whether or not that path still exists: `net`
    for "models/net", "models/net/1" and "net.onnx"."""
    if "/" not in model and Path(model).suffix not in _NAME_BY_SUFFIX:
        return model
    path = Path(model)
    if path.name in MODEL_FILES:
        path = path.parent
    if path.name.isdigit():
        path = path.parent
    name = path.stem if path.suffix in _NAME_BY_SUFFIX else path.name
    return name or Path(model).stem


def version_files(path: Path) -> dict[str, Path]:
    """Return name -> path of the files that a version directory needs for the model's file `path`: `path` itself, under
    the name that servers look for, and the files that belong to it.

    These are the signature of TorchScript, and the files of weights that an ONNX graph names. Nothing else beside it is
    taken, whatever its name.
    """
    files = {_NAME_BY_SUFFIX[path.suffix]: path}
    signature = path.with_name(_SCRIPT_SIGNATURE)
    if path.suffix == ".onnx":
        weights = {name: path.parent / name for name in _named_weights(path)}
        return files | {name: file for name, file in weights.items() if file.is_file()}
    return {**files, signature.name: signature} if signature.is_file() else files


def _named_weights(path: Path) -> list[str]:
    """List the files that the tensors of an ONNX graph name as the place of their data, relative to its folder: those
    below it.

    The fields are those of onnx.proto. A file that is no such graph names none: the server that loads it says so.
    """
    parts = {
        "model": {7: "graph", 25: "function"},
        "graph": {1: "node", 5: "tensor"},
        "function": {7: "node"},
        "node": {5: "attribute"},
        "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
        "tensor": {13: "external data"},
    }

    def places(kind: str, begin: int, end: int) -> Iterator[str]:
        for number, _, content, stop in read_fields(model, begin, end):
            part = parts[kind].get(number, "")
            if part in parts:
                yield from places(part, content, stop)
            elif part:
                texts = [model[at:to].decode() for _, _, at, to in read_fields(model, content, stop)]
                yield from texts[1:] if texts[0] == "location" else ()

    try:
        with path.open("rb") as file, bounded_depth():
            model = FileBytes(file)
            names = sorted(set(places("model", 0, path.stat().st_size)))
    except (OSError, ValueError, IndexError):
        return []
    own = [name for name in names if not PurePosixPath(name).is_absolute() and ".." not in Path(name).parts]
    return [name for name in own if name != path.name]


def _laid_out(path: Path, folder: Path) -> Path:
    """Return a base directory in `folder` whose version 1 is the model; one that already exists is used
    again."""
    base_path = folder / served_name(str(path))
    version = base_path / "1"
    if version.exists():
        return base_path
    base_path.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        version.symlink_to(path, target_is_directory=True)
        return base_path
    version.mkdir()
    for name, file in version_files(path).items():
        (version / name).parent.mkdir(parents=True, exist_ok=True)
        (version / name).symlink_to(file)
    return base_path


def _versions(path: Path) -> list[Path]:
    """List the version directories of a model base directory; empty where it is none."""
    if not path.is_dir():
        return []
    return [below for below in path.iterdir() if below.name.isdigit() and _holds_model(below)]


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_FILES)


def _models_below(path: Path) -> list[Path]:
    folders = {file.parent.parent for name in MODEL_FILES for file in path.glob(f"*/[0-9]*/{name}")}
    folders |= {file.parent for name in MODEL_FILES for file in path.glob(f"*/{name}")}
    return sorted(folders)


def _where_else(path: Path) -> str:
    """Return a hint at what to give instead of a directory without a model."""
    if any(path.glob("pipeline.yaml")) or any(path.glob("[0-9]*/pipeline.yaml")):
        return "chains of models no longer exist: list the models in target.models, each with its own rate"
    below = _models_below(path)
    if below:
        return f"did you mean {' or '.join(map(str, below[:3]))}?"
    files = sorted(file for suffix in _NAME_BY_SUFFIX for file in path.glob(f"*{suffix}"))
    if files:
        return f"did you mean {' or '.join(map(str, files[:3]))}?"
    return f"expected {', '.join(MODEL_FILES)}, or <version>/ with one of them"


def _check_file(path: Path) -> None:
    if path.suffix not in _NAME_BY_SUFFIX:
        hint = _EXPORTS.get(path.suffix, "give {forms}")
        stem, forms = path.stem, _FORMS
        raise UsageError(
            f"target.model: {path} is not a model that a server loads",
            hint=hint.format(path=path, stem=stem, forms=forms),
        )
    if path.suffix == ".pt" and not path.with_name(_SCRIPT_SIGNATURE).is_file():
        raise UsageError(
            f"target.model: {path} does not list its inputs (TorchScript)",
            hint=f"write {path.with_name(_SCRIPT_SIGNATURE)}, with the dimensions after the batch, such as: "
            "{inputs: {x: {dtype: float32, shape: [200]}}, outputs: {y: {dtype: float32, shape: [2]}}}",
        )


def _check_stages(path: Path) -> None:
    """Raise UsageError for a model's file beside a stages.yaml, which is read only in a version directory:
    the file would be served without it."""
    stages = path.with_name(STAGES_FILE)
    if not stages.is_file():
        return
    name, version = _NAME_BY_SUFFIX[path.suffix], path.parent / path.stem / "1"
    if path.name == name:
        hint = f"give the folder, target.model: {path.parent}"
    else:
        hint = f"make a version directory of them, {version}/ with {name}, {STAGES_FILE} and what that names"
    raise UsageError(
        f"target.model: {path} is served without {stages}, which is read only in a version directory",
        hint=hint,
    )


def _sample_model(name: str, framework: str | None, on_event: Callable[[str], None]) -> Path:
    exported = _EXPORTED.get((name, framework))
    if exported is not None and exported.exists():
        return exported
    names = _sample_models("--list", limit_s=30.0).split()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        suggestion = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(
            f"target.model: {name!r} is neither a file, nor a directory, nor a sample model",
            hint=f"{suggestion}sample models: {', '.join(names)}",
        )
    on_event(f"preparing the sample model {name} (exported once, then cached)")
    chosen = [] if framework is None else [f"--framework={framework}"]
    printed = _sample_models(name, *chosen, limit_s=300.0)
    _EXPORTED[name, framework] = Path(printed.strip().splitlines()[-1])
    return _EXPORTED[name, framework]


def _sample_models(*arguments: str, limit_s: float) -> str:
    """Run the program that exports the sample models, and return what it prints.

    Raises:
        TargetError: it failed, or took longer than `limit_s`.
    """
    output, failure = ask([sys.executable, "-m", "batchtune.sample_models", *arguments], limit_s=limit_s)
    if failure:
        raise TargetError(f"batchtune.sample_models {' '.join(arguments)}: {failure}")
    return output
