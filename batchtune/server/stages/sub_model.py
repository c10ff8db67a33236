"""How does a model in a folder of its own serve as a stage of another?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from batchtune.server.backends.model import BackendOptions, Tensors
from batchtune.server.backends.registry import load_model
from batchtune.server.stages.model_code import shape_fault
from batchtune.wire.signature import DEFAULT_SIGNATURE, TensorSpec
from batchtune.wire.status import StatusError


class SubModel:
    """The model of a folder, by its signature serving_default; called on any thread, several at a time.

    `gives`: outputs that it must have; `kept`: the names of those of its outputs that are read.
    """

    def __init__(
        self,
        key: str,
        folder: Path,
        options: BackendOptions,
        gives: Sequence[TensorSpec],
        kept: Collection[str],
    ) -> None:
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
        self._kept = [spec.name for spec in signature.outputs if spec.name in kept]
        self._specs = {spec.name: spec for spec in gives}

    def __call__(self, inputs: Tensors, rows: int) -> dict[str, NDArray[Any]]:
        """Those of its outputs that are read, with one row for each of `rows`.

        Raises:
            StatusError: INTERNAL where an input is missing or an output has other rows or another shape; the model's.
        """
        missing = [name for name in self._names if name not in inputs]
        if missing:
            raise StatusError("INTERNAL", f"{self._key}: its model takes {missing[0]!r}, which nothing gives")
        outputs = self._run({name: inputs[name] for name in self._names})
        for name in self._kept:
            if fault := shape_fault(outputs[name], rows, self._specs.get(name)):
                raise StatusError("INTERNAL", f"{self._key}: its model gave {name!r} {fault}")
        return {name: outputs[name] for name in self._kept}

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
