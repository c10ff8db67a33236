"""Loads and calls Python functions in files of a model's folder, and reports their faults with file and line.

Such a file is the user's code and runs only with --allow_model_code. It cannot import other files of the
folder; its imports come from the server's environment. What it raises ends the request, with file and line,
and never a thread of the server.
"""

from __future__ import annotations

import importlib.machinery
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.server.backends.model import Tensors
from batchtune.server.sessions.input_shapes import InputShape, numpy_dtype, shown
from batchtune.wire.signature import TensorSpec, object_array
from batchtune.wire.status import StatusError

_TEXT_MAX = 500

Function = Callable[[Mapping[str, NDArray[Any]]], Any]


class ModelCode:
    """Loads functions from the Python files of a version's folder; runs each file once."""

    def __init__(self, version_directory: Path) -> None:
        self._folder = version_directory
        self._modules: dict[str, ModuleType] = {}

    def function(self, key: str, reference: str, gives: Sequence[TensorSpec]) -> StageFunction:
        """Load the function that `reference`, FILE.py:FUNCTION, names.

        key: the key of stages.yaml that has the reference, for messages. gives: tensors that the function must return;
        (): any.

        Raises:
            StatusError: INVALID_ARGUMENT where there is no such file or function, or running the file fails; with the
                line.
        """
        file_name, _, function_name = reference.partition(":")
        module = self._modules.get(file_name)
        if module is None:
            module = self._modules[file_name] = _run_file(self._folder / file_name)
        function = getattr(module, function_name, None)
        if not callable(function):
            message = (
                f"{self._folder / file_name}: no function {function_name}, which {key} of stages.yaml names"
            )
            raise StatusError("INVALID_ARGUMENT", message)
        return StageFunction(key, reference, str(self._folder / file_name), function, gives)

    def close(self) -> None:
        """Drop the modules of the files, so that Python can free them."""
        for module in self._modules.values():
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
        self._modules.clear()


def rows_of(tensors: Tensors) -> int:
    """Return the number of rows of the first tensor; 1 if it has no dimensions."""
    first = next(iter(tensors.values()))
    return len(first) if first.ndim else 1


def shape_fault(array: NDArray[Any], rows: int, spec: TensorSpec | None) -> str:
    """Describe what is wrong with an output's shape: it has not `rows` rows, or does not fit `spec`; "": nothing.

    spec: the output's declaration in stages.yaml; None: any shape of `rows` rows.
    """
    if not array.ndim or len(array) != rows:
        return f"of shape {list(array.shape)} for {rows} rows"
    if spec is not None and InputShape("", spec).fault(array.shape):
        return f"of shape {shown(array.shape)}; stages.yaml says {shown(spec.shape)}"
    return ""


class StageFunction:
    """A function of a model's code, with checks of what it returns; several threads may call it at once."""

    def __init__(
        self, key: str, reference: str, path: str, function: Function, gives: Sequence[TensorSpec]
    ) -> None:
        self.reference = reference
        self._key = key
        self._path = path
        self._function = function
        self._specs = {spec.name: spec for spec in gives}

    def __call__(self, inputs: Tensors, rows: int | None = None) -> dict[str, NDArray[Any]]:
        """Call the function and return its tensors by name, checked to have `rows` rows.

        rows None: as many as the first input. Only the declared tensors are returned, where any are.

        Raises:
            StatusError: INVALID_ARGUMENT where the function raised ValueError (the request is wrong),
                INTERNAL for any other fault; with file and line.
        """
        try:
            outputs = self._function(dict(inputs))
        except BaseException as error:  # SystemExit and CancelledError would end a thread of the server
            code = "INVALID_ARGUMENT" if isinstance(error, ValueError) else "INTERNAL"
            raise StatusError(code, f"{self._key}: {_place(error, self._path)}") from error
        return self._checked(outputs, rows_of(inputs) if rows is None else rows)

    def _checked(self, outputs: Any, rows: int) -> dict[str, NDArray[Any]]:
        if not isinstance(outputs, Mapping):
            raise self._fault(f"gave a {type(outputs).__name__}; expected a table of arrays by name")
        tensors = {}
        for name in self._specs or outputs:
            if name not in outputs:
                raise self._fault(f"gave no {name!r}; it gave {', '.join(map(repr, outputs)) or 'nothing'}")
            try:
                array = _as_tensor(outputs[name])
            except Exception as error:  # rows of different lengths, say
                raise self._fault(f"gave {name!r}, which is not an array: {_said(error)}") from error
            spec = self._specs.get(name)
            if fault := shape_fault(array, rows, spec):
                raise self._fault(f"gave {name!r} {fault}")
            if spec is not None:
                self._check_type(array, spec)
            tensors[str(name)] = array
        return tensors

    def _check_type(self, array: NDArray[Any], spec: TensorSpec) -> None:
        """Raise StatusError INTERNAL where an output's type is not the one that stages.yaml declares."""
        type_name = "string" if spec.dtype == "object" else spec.dtype
        if array.dtype != (numpy_dtype(spec.dtype) or array.dtype):
            raise self._fault(f"gave {spec.name!r} as {array.dtype.name}; stages.yaml says {type_name}")
        if spec.dtype == "object" and not all(isinstance(text, bytes) for text in array.flat):
            raise self._fault(f"gave {spec.name!r} a value that is not a text; stages.yaml says {type_name}")

    def _fault(self, what: str) -> StatusError:
        return StatusError("INTERNAL", f"{self._key}: {self.reference} {what}")


def _as_tensor(given: Any) -> NDArray[Any]:
    """Return an array as models and answers have it: strings as bytes in an array of objects."""
    array = np.asarray(given)
    if array.dtype.kind == "S":
        return array.astype(object)
    if array.dtype.kind == "U" or (
        array.dtype == object and any(isinstance(text, str) for text in array.flat)
    ):
        texts = [text.encode() if isinstance(text, str) else text for text in array.ravel().tolist()]
        return object_array(texts).reshape(array.shape)
    return array


def _run_file(path: Path) -> ModuleType:
    """Run a Python file and return its module; no __pycache__ is written into the model's folder.

    Raises StatusError INVALID_ARGUMENT where the file cannot be read or raises anything.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise StatusError("INVALID_ARGUMENT", f"{path}: {error.strerror or error}") from error
    module = ModuleType(str(path))
    module.__file__ = str(path)
    sys.modules[str(path)] = module  # dataclasses look there for the module of a class
    try:
        loader = importlib.machinery.SourceFileLoader(str(path), str(path))
        code = loader.source_to_code(source, str(path))
        FunctionType(code, vars(module))()
    except BaseException as error:  # SystemExit and CancelledError would end the thread that looks for models
        sys.modules.pop(str(path), None)
        raise StatusError("INVALID_ARGUMENT", _place(error, str(path), full=True)) from error
    return module


def _place(error: BaseException, path: str, *, full: bool = False) -> str:
    """Describe an error with the last line of the user's file `path` in its traceback.

    Such as `stages.py, line 12, in preprocess: KeyError: 'text'`; `full`: with the whole path.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    shown = path if full else Path(path).name
    if isinstance(error, SyntaxError) and error.lineno is not None:
        shown += f", line {error.lineno}"
    elif frames:
        shown += f", line {frames[-1].lineno}, in {frames[-1].name}"
    return f"{shown}: {_said(error)}"[:_TEXT_MAX]


def _said(error: BaseException) -> str:
    """Return an error's type and text; the type alone where the user's error class fails to give a text."""
    try:
        return f"{type(error).__name__}: {error}"[:_TEXT_MAX]
    except Exception:  # noqa: BLE001 the text is the user's
        return type(error).__name__
