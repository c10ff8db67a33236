"""Which files are a model, and how do they become the directory of numbered versions that a server wants?

A model that lies without a version directory is laid out by links in a folder of ours; the user's stays as it is.
"""

from __future__ import annotations

import difflib
import os.path
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from batchtune.errors import UsageError
from batchtune.target.process import run_to_end
from batchtune.wire.tfserving.graph_batching import read_graph_batching

MODEL_FILES: Final = ("saved_model.pb", "model.onnx", "model.pt2", "model.pt", "emulated.yaml")
"""What a version directory holds, one of them."""

_ALONE: Final = ("saved_model.pb", "emulated.yaml")
"""These stand for their directory wherever it is."""
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
    ".pth": "weights are no model: save the module with torch.export.save(torch.export.export(…), '{stem}.pt2')",
    ".ckpt": "weights are no model: save the module with torch.export.save(torch.export.export(…), '{stem}.pt2')",
    ".safetensors": "weights are no model: save the module with torch.export.save(…, '{stem}.pt2')",
    ".pkl": "convert it with skl2onnx.to_onnx(model, X[:1], options={{'zipmap': False}})",
    ".joblib": "convert it with skl2onnx.to_onnx(model, X[:1], options={{'zipmap': False}})",
    ".pb": "a frozen graph is no SavedModel: export the model with tf.saved_model.save",
    ".tflite": "no server takes it: export the model as a SavedModel",
}


def resolve_model(
    model: str,
    *,
    framework: str | None = None,
    folder: Path | None = None,
    on_event: Callable[[str], None] = lambda _text: None,
) -> Path:
    """The model base directory for `target.model`: a path, or the name of a sample model, exported on first use.

    What lies without a version directory is laid out in `folder`; None: it is only looked at, and its own path
    returned. `framework` chooses among those that a sample model is written in; None: the first that is installed.

    Raises:
        UsageError: neither a sample model nor a model's directory or file; says what is there instead.
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
    path = located_model(model)
    return path if folder is None or _versions(path) else _laid_out(path, folder)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Look at what lies at a path.

    Raises:
        UsageError: this user may not, or nothing can have such a name.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def located_model(given: str) -> Path:
    """Where the model lies: a directory of versions, a SavedModel's own directory, or a file.

    A version directory, and a file in one, stand for the model where they are the version that a server takes: the
    highest. A link stands under its own name.

    Raises:
        UsageError: no model is there; the hint says what was expected, or where one is.
    """
    path = Path(os.path.abspath(Path(given).expanduser()))  # noqa: PTH100
    with readable(path):
        return _located(path, given)


def _located(path: Path, given: str) -> Path:
    if not path.exists():
        raise UsageError(
            f"target.model: {given!r} does not exist", hint=f"give {_FORMS}, or a sample model's name"
        )
    if path.is_dir():
        if _versions(path):
            return path
        if not _holds_model(path):
            raise UsageError(f"target.model: no model in {path}", hint=_where_else(path))
    elif path.name in _ALONE or (path.name in MODEL_FILES and path.parent.name.isdigit()):
        path = path.parent
    else:
        _check_file(path)
        _check_stages(path)
        return path
    if path.name.isdigit() and path == max(_versions(path.parent), key=lambda version: int(version.name)):
        return path.parent
    return path


def only_model_below(path: Path) -> Path | None:
    """The one model in the directories of a directory that is no model itself; None: there is none, or several."""
    if _versions(path) or _holds_model(path):
        return None
    below = _models_below(path)
    return below[0] if len(below) == 1 else None


def lies_bare(path: Path) -> bool:
    """Whether it is a model that lies without a version directory."""
    if path.is_file():
        return path.suffix in _NAME_BY_SUFFIX
    return _holds_model(path) and not _versions(path)


def batches_inside(base_path: Path) -> str:
    """With what the highest version batches inside its graph, in words; "": it does not."""
    versions = _versions(base_path)
    version = max(versions, key=lambda version: int(version.name)) if versions else base_path
    return "; ".join(batcher.in_words() for batcher in read_graph_batching(version))


def served_name(model: str) -> str:
    """The name under which a launched server serves `target.model`, whether that is still there or not."""
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
    """The files of a version directory, by their names there, for a model's file: itself, and what belongs to it.

    That is the signature of TorchScript, and the weights that an ONNX graph keeps outside of itself, under its name
    (`net.onnx.data`, `net.onnx_data`).
    """
    files = {_NAME_BY_SUFFIX[path.suffix]: path}
    signature = path.with_name(_SCRIPT_SIGNATURE)
    if path.suffix != ".onnx":
        return {**files, signature.name: signature} if signature.is_file() else files
    for file in sorted(path.parent.iterdir()):
        belongs = file.name.startswith((f"{path.stem}.", f"{path.stem}_")) and file.is_file()
        if belongs and file.suffix not in _NAME_BY_SUFFIX and file.name not in MODEL_FILES:
            files[file.name] = file
    return files


def _laid_out(path: Path, folder: Path) -> Path:
    """The base directory in `folder` whose version 1 is the model; one that is there already is used again."""
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
        (version / name).symlink_to(file)
    return base_path


def _versions(path: Path) -> list[Path]:
    """The version directories of a model base directory."""
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
    """What to give instead of a directory without a model."""
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
            f"target.model: {path} is no model that a server loads",
            hint=hint.format(path=path, stem=stem, forms=forms),
        )
    if path.suffix == ".pt" and not path.with_name(_SCRIPT_SIGNATURE).is_file():
        raise UsageError(
            f"target.model: {path} does not tell its inputs (TorchScript)",
            hint=f"write {path.with_name(_SCRIPT_SIGNATURE)}, with the dimensions after the batch, such as: "
            "{inputs: {x: {dtype: float32, shape: [200]}}, outputs: {y: {dtype: float32, shape: [2]}}}",
        )


def _check_stages(path: Path) -> None:
    """A model's file is served alone, whatever lies beside it: stages.yaml is read in a version directory."""
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
    names = run_to_end([sys.executable, "-m", "batchtune.sample_models", "--list"], limit_s=30.0).split()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        suggestion = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(
            f"target.model: {name!r} is neither a file, nor a directory, nor a sample model",
            hint=f"{suggestion}sample models: {', '.join(names)}",
        )
    on_event(f"preparing the sample model {name} (exported once, then cached)")
    chosen = [] if framework is None else [f"--framework={framework}"]
    printed = run_to_end([sys.executable, "-m", "batchtune.sample_models", name, *chosen], limit_s=300.0)
    _EXPORTED[name, framework] = Path(printed.strip().splitlines()[-1])
    return _EXPORTED[name, framework]
