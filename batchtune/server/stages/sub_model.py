"""How does a model in a folder of its own serve as a stage of another?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from batchtune.server.backends.model import BackendOptions, Tensors
from batchtune.server.backends.registry import load_model
from batchtune.wire.signature import DEFAULT_SIGNATURE, TensorSpec
from batchtune.wire.status import StatusError


class SubModel:
    """The model of a folder, by its signature serving_default; called on any thread, several at a time.

    `gives`: outputs that it must have.
    """

    def __init__(self, key: str, folder: Path, options: BackendOptions, gives: Sequence[TensorSpec]) -> None:
        self._model = load_model(folder, options)
        signature = self._model.signatures.get(DEFAULT_SIGNATURE)
        if signature is None:
            self._model.close()
            known = ", ".join(sorted(self._model.signatures))
            message = f"{folder}: {key} of stages.yaml runs {DEFAULT_SIGNATURE}; this model has {known}"
            raise StatusError("INVALID_ARGUMENT", message)
        fault = _misfit({spec.name: spec.dtype for spec in signature.outputs}, gives)
        if fault:
            self._model.close()
            raise StatusError("INVALID_ARGUMENT", f"{folder}: {key} of stages.yaml gives {fault}")
        self._key = key
        self._run = self._model.runs[DEFAULT_SIGNATURE]
        self._names = [spec.name for spec in signature.inputs]

    def __call__(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """Its outputs; raises StatusError where an input is missing, or the model's own."""
        missing = [name for name in self._names if name not in inputs]
        if missing:
            raise StatusError("INTERNAL", f"{self._key}: its model takes {missing[0]!r}, which nothing gives")
        return dict(self._run({name: inputs[name] for name in self._names}))

    def close(self) -> None:
        """Free the model."""
        self._model.close()


def _misfit(dtypes: Mapping[str, str], wanted: Sequence[TensorSpec]) -> str:
    """Which output is missing, or of another type; "" where all are there."""
    for spec in wanted:
        dtype = dtypes.get(spec.name)
        if dtype is None:
            return f"no {spec.name!r}"
        if dtype != spec.dtype:
            return f"{spec.name!r} as {dtype}; outputs says {spec.dtype}"
    return ""
