"""How is an ONNX model loaded and called from batch threads? ONNX Runtime, one session, one signature.

`InferenceSession.run` releases the interpreter lock and may be called from several threads at once. With
onnxruntime-gpu installed the graph runs on a GPU, which copies its inputs and outputs itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.cpus import schedulable_cores
from batchtune.server.backends.model import (
    PREDICT_METHOD,
    BackendOptions,
    LoadedModel,
    Tensors,
    out_of_memory,
)
from batchtune.server.backends.onnx_weights import cut_weights, read_weights
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature, TensorSpec
from batchtune.wire.status import StatusError

_WEIGHTS_BESIDE = "session.model_external_initializers_file_folder_path"
_CUDA = "CUDAExecutionProvider"
_DTYPES = {
    "tensor(bool)": "bool",
    "tensor(double)": "float64",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(int8)": "int8",
    "tensor(string)": "object",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
    "tensor(uint8)": "uint8",
}


def load_onnx_model(version_directory: Path, options: BackendOptions) -> LoadedModel:
    """The graph of `model.onnx`, as signature serving_default with the graph's own input and output names.

    Raises:
        StatusError: onnxruntime is missing, or does not take the file.
    """
    path = version_directory / "model.onnx"
    try:
        import onnxruntime
    except ImportError as error:
        raise StatusError(
            "FAILED_PRECONDITION", f"{path} needs onnxruntime: pip install 'batchtune[onnx]'"
        ) from error
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level = 3
    # 0 would be a thread for each core of the machine, tied to that core whatever the affinity of this process says.
    session_options.intra_op_num_threads = options.intra_op_threads or schedulable_cores()
    session_options.inter_op_num_threads = options.inter_op_threads
    if options.inter_op_threads > 1:
        session_options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    failures: tuple[type[Exception], ...] = (*_failures(), OSError)
    try:
        model, tables = _model(onnxruntime, path, session_options)
        session = onnxruntime.InferenceSession(
            model, session_options, providers=_providers(onnxruntime, options)
        )
    except failures as error:
        raise StatusError("INVALID_ARGUMENT", f"{path}: {error}") from error
    _check_device(path, session, options)
    signature = Signature(
        name=DEFAULT_SIGNATURE,
        method_name=PREDICT_METHOD,
        inputs=_specs(path, session.get_inputs()),
        outputs=_specs(path, session.get_outputs()),
    )
    run = _GraphRun(session, tuple(spec.name for spec in signature.outputs), failures, tables)
    return LoadedModel(
        platform="onnxruntime", signatures={DEFAULT_SIGNATURE: signature}, runs={DEFAULT_SIGNATURE: run}
    )


def _model(onnxruntime: Any, path: Path, session_options: Any) -> tuple[str | bytes, list[Any]]:
    """What a session is made of: the path, or the graph without large tables, and these, which must outlive it."""
    cut = cut_weights(path) if path.exists() else None
    if cut is None:
        return str(path), []
    session_options.add_session_config_entry(_WEIGHTS_BESIDE, str(path.parent))
    tables = []
    for weight, array in zip(cut.weights, read_weights(path, cut.weights), strict=True):
        table = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, weight.data_type)
        session_options.add_initializer(weight.name, table)
        tables.append(table)
    return cut.proto, tables


class _GraphRun:
    def __init__(
        self,
        session: Any,
        output_names: tuple[str, ...],
        failures: tuple[type[Exception], ...],
        tables: list[Any],
    ) -> None:
        self._session = session
        self._tables = tables  # the session has no reference to them, and goes before them
        self._output_names = output_names
        self._failures = failures

    def __call__(self, inputs: Tensors) -> Mapping[str, Any]:
        """The outputs of a batch; raises StatusError INVALID_ARGUMENT or, out of memory, RESOURCE_EXHAUSTED."""
        feeds = {name: _text(array) if array.dtype == object else array for name, array in inputs.items()}
        try:
            outputs = self._session.run(self._output_names, feeds)
        except self._failures as error:
            message = str(error)
            if any(
                words in message.lower() for words in ("allocate memory", "out of memory", "alloc_failed")
            ):
                raise out_of_memory(message) from error
            raise StatusError("INVALID_ARGUMENT", message) from error
        return {
            name: _bytes(array) if array.dtype == object else array
            for name, array in zip(self._output_names, outputs, strict=True)
        }


def _providers(onnxruntime: Any, options: BackendOptions) -> list[str | tuple[str, dict[str, int]]]:
    available = onnxruntime.get_available_providers()
    if options.device != "cpu" and _CUDA in available:
        return [(_CUDA, {"device_id": options.cuda_index}), "CPUExecutionProvider"]
    if options.wants_cuda:
        raise StatusError(
            "FAILED_PRECONDITION",
            f"--device={options.device}: this onnxruntime has no {_CUDA}: pip install onnxruntime-gpu",
        )
    return ["CPUExecutionProvider"]


def _check_device(path: Path, session: Any, options: BackendOptions) -> None:
    """Where CUDA's libraries are missing or of another version, ONNX Runtime goes on without a GPU."""
    if options.wants_cuda and _CUDA not in session.get_providers():
        raise StatusError(
            "FAILED_PRECONDITION",
            f"{path}: --device={options.device}: onnxruntime could not start its {_CUDA}; it needs a GPU, and CUDA "
            "and cuDNN of the versions that it was built for",
        )


def _failures() -> tuple[type[Exception], ...]:
    """What a session raises: the classes of its C++ status codes, and Python's for unusable arguments."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NoSuchFile", "NotImplemented")
    own = [getattr(state, name) for name in (*names, "RuntimeException", "EPFail", "NoModel", "EngineError")]
    return (*own, RuntimeError, ValueError, TypeError)


def _specs(path: Path, arguments: Sequence[Any]) -> tuple[TensorSpec, ...]:
    specs = []
    for argument in arguments:
        if argument.type not in _DTYPES:
            raise StatusError(
                "UNIMPLEMENTED", f"{path}: {argument.name} has the unsupported type {argument.type}"
            )
        shape = tuple(size if isinstance(size, int) and size >= 0 else None for size in argument.shape)
        specs.append(TensorSpec(name=argument.name, dtype=_DTYPES[argument.type], shape=shape))
    return tuple(sorted(specs, key=lambda spec: spec.name))


def _text(array: NDArray[Any]) -> NDArray[Any]:
    """Strings as ONNX Runtime wants them: str, not bytes."""
    flat = [
        element.decode("utf-8", "replace") if isinstance(element, bytes) else element
        for element in array.ravel()
    ]
    return np.array(flat, dtype=object).reshape(array.shape)


def _bytes(array: NDArray[Any]) -> NDArray[Any]:
    flat = [element.encode() if isinstance(element, str) else element for element in array.ravel()]
    return np.array(flat, dtype=object).reshape(array.shape)
