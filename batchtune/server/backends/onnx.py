"""Loads ONNX models and runs them from batch threads: one ONNX Runtime session, one signature a model.

`InferenceSession.run` releases the interpreter lock and may be called from several threads at once. With
onnxruntime-gpu installed the graph runs on a GPU, which copies its inputs and outputs itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.server.backends.model import (
    PREDICT_METHOD,
    LoadedModel,
    Runner,
    Tensors,
    out_of_memory,
)
from batchtune.server.server_flags import ServerFlags
from batchtune.system import schedulable_cores
from batchtune.wire.encoding import (
    VARINT,
    FileBytes,
    length_delimited,
    read_fields,
    read_varint,
    read_varints,
    varint,
)
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature, TensorSpec, by_name
from batchtune.wire.status import StatusError

# Holding the large tables of an ONNX file once while it is loaded.
#
# ONNX Runtime reads the whole file and then copies each initializer, so that a load holds all weights twice. Here
# tables that are only looked up in (Gather) are cut out of the graph and read into arrays that the session uses as they
# are: 100 MB take 100 MB. Other weights stay: ONNX Runtime packs them anew and then lets go of its own, but not of
# ours. (To map the file would do too, until somebody truncates it.) The fields are those of onnx.proto.

WEIGHT_BYTES_MIN = 1 << 16
"""Smaller initializers stay in the graph."""
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 13, 14
_ELEMENT_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}
"""TensorProto.DataType -> bytes of an element; without strings, complex numbers and types below a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """An initializer whose values are `size` bytes at `position` of the file; data_type: TensorProto's."""

    name: str
    data_type: int
    shape: tuple[int, ...]
    position: int
    size: int


def cut_weights(path: Path) -> tuple[bytes, list[Weight]] | None:
    """Return (the serialised model, whose large look-up tables refer to their values in the file; those tables).

    None, so that ONNX Runtime reads the file itself: it has no such tables, has weights in other files or subgraphs, or
    is no model.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        weights: list[Weight] = []
        try:
            model, copied, pieces, graph_number = FileBytes(file), 0, [], 7
            for number, _, content, end in read_fields(model, 0, size):
                if number == graph_number:
                    graph = _cut_graph(model, content, end, path.name, weights)
                    pieces += [_field(graph_number, graph)]
                else:
                    pieces.append(model[copied:end])
                copied = end
        except (ValueError, IndexError):
            return None
    return (b"".join(pieces), weights) if weights else None


def read_weights(path: Path, weights: Sequence[Weight]) -> list[NDArray[Any]]:
    """Return the values of the tables, in order, as arrays of unsigned integers of their element size.

    Raises:
        OSError: the file cannot be read, or has become shorter.
    """
    values = []
    with path.open("rb") as file:
        for weight in weights:
            value = np.empty(weight.shape, f"u{_ELEMENT_BYTES[weight.data_type]}")
            file.seek(weight.position)
            if file.readinto(value.data.cast("B")) != weight.size:
                raise OSError(f"{path} has become shorter while it was read")
            values.append(value)
    return values


def _cut_graph(model: FileBytes, begin: int, end: int, file_name: str, weights: list[Weight]) -> bytes:
    fields = list(read_fields(model, begin, end))
    tables = _looked_up(model, fields)
    pieces, initializer, copied = [], 5, begin
    for number, _, content, stop in fields:
        weight = _weight(model, content, stop, tables) if number == initializer else None
        if weight is None:
            pieces.append(model[copied:stop])
        else:
            weights.append(weight)
            pieces.append(_field(initializer, _elsewhere(weight, file_name)))
        copied = stop
    return b"".join(pieces)


def _looked_up(model: FileBytes, fields: list[tuple[int, int, int, int]]) -> set[str]:
    """Return the names that only Gather nodes read; raises ValueError where the graph has subgraphs."""
    looked_up: set[str] = set()
    others: set[str] = set()
    node_number, input_number, operation_number = 1, 1, 4
    for number, _, begin, end in fields:
        if number != node_number:
            continue
        inputs, operation = [], ""
        node = model[begin:end]
        for own, _, content, stop in read_fields(node, 0, len(node)):
            if own == input_number:
                inputs.append(node[content:stop].decode())
            elif own == operation_number:
                operation = node[content:stop].decode()
        # Their subgraphs may read initializers that are not among their inputs.
        if operation in {"If", "Loop", "Scan"}:
            raise ValueError("a node with graphs of its own")
        (looked_up if operation == "Gather" else others).update(inputs)
    return looked_up - others


def _weight(model: FileBytes, begin: int, end: int, tables: set[str]) -> Weight | None:
    """Return an initializer as a Weight if it is one of `tables`, large and plain, else None."""
    name, data_type, shape, position, size = "", 0, [], 0, 0
    raw_data = 9
    for number, _, content, stop in read_fields(model, begin, end):
        if number == _DIMS:
            shape += read_varints(model[content:stop])  # packed, or one
        elif number == _DATA_TYPE:
            data_type, _ = read_varint(model, content)
        elif number == _NAME:
            name = model[content:stop].decode()
        elif number == raw_data:
            position, size = content, stop - content
        elif number == _EXTERNAL_DATA or (number == _DATA_LOCATION and model[content]):
            raise ValueError("weights in other files")
    if size < WEIGHT_BYTES_MIN or name not in tables:
        return None
    if size != int(np.prod(shape, dtype=object)) * _ELEMENT_BYTES.get(data_type, 0):
        return None
    return Weight(name=name, data_type=data_type, shape=tuple(shape), position=position, size=size)


def _elsewhere(weight: Weight, file_name: str) -> bytes:
    """Return a TensorProto with external data, in this file: ONNX Runtime checks that the place exists."""
    place = {"location": file_name, "offset": str(weight.position), "length": str(weight.size)}
    pieces = [varint(_DIMS << 3 | VARINT) + varint(dimension) for dimension in weight.shape]
    pieces.append(varint(_DATA_TYPE << 3 | VARINT) + varint(weight.data_type))
    pieces.append(_field(_NAME, weight.name.encode()))
    for key, value in place.items():
        entry = _field(1, key.encode()) + _field(2, value.encode())
        pieces.append(_field(_EXTERNAL_DATA, entry))
    pieces.append(varint(_DATA_LOCATION << 3 | VARINT) + varint(1))
    return b"".join(pieces)


def _field(number: int, content: bytes) -> bytes:
    return length_delimited(number, len(content)) + content


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


def load_onnx_model(version_directory: Path, options: ServerFlags) -> LoadedModel:
    """Load `model.onnx` as signature serving_default, with the graph's own input and output names.

    Raises:
        StatusError: FAILED_PRECONDITION where onnxruntime or its GPU is missing, INVALID_ARGUMENT for a file
            that it refuses, UNIMPLEMENTED for an unsupported type.
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
    run = _runner(session, tuple(spec.name for spec in signature.outputs), failures, tables)
    return LoadedModel(signatures={DEFAULT_SIGNATURE: signature}, runs={DEFAULT_SIGNATURE: run})


def _model(onnxruntime: Any, path: Path, session_options: Any) -> tuple[str | bytes, list[Any]]:
    """Return (path or serialised model for a session, tables that must live as long as the session)."""
    # ONNX Runtime refuses tables in a file to which a link outside of its folder leads.
    file = path.resolve()
    cut = cut_weights(file) if file.exists() else None
    if cut is None:
        return str(path), []
    proto, weights = cut
    weights_beside = "session.model_external_initializers_file_folder_path"
    session_options.add_session_config_entry(weights_beside, str(file.parent))
    tables = []
    for weight, array in zip(weights, read_weights(file, weights), strict=True):
        table = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, weight.data_type)
        session_options.add_initializer(weight.name, table)
        tables.append(table)
    return proto, tables


def _runner(
    session: Any, output_names: tuple[str, ...], failures: tuple[type[Exception], ...], tables: list[Any]
) -> Runner:
    """Return a function that runs the graph and raises StatusError: RESOURCE_EXHAUSTED or INVALID_ARGUMENT.

    It holds the tables, to which the session has no reference.
    """

    def run(inputs: Tensors, _tables: list[Any] = tables) -> Mapping[str, Any]:
        feeds = {name: _text(array) if array.dtype == object else array for name, array in inputs.items()}
        try:
            outputs = session.run(output_names, feeds)
        except failures as error:
            message = str(error)
            if any(
                words in message.lower() for words in ("allocate memory", "out of memory", "alloc_failed")
            ):
                raise out_of_memory(message) from error
            raise StatusError("INVALID_ARGUMENT", message) from error
        return {
            name: _bytes(array) if array.dtype == object else array
            for name, array in zip(output_names, outputs, strict=True)
        }

    return run


def _providers(onnxruntime: Any, options: ServerFlags) -> list[str | tuple[str, dict[str, int]]]:
    available = onnxruntime.get_available_providers()
    if options.device != "cpu" and _CUDA in available:
        return [(_CUDA, {"device_id": options.cuda_index}), "CPUExecutionProvider"]
    if options.wants_cuda:
        raise StatusError(
            "FAILED_PRECONDITION",
            f"--device={options.device}: this onnxruntime has no {_CUDA}: pip install onnxruntime-gpu",
        )
    return ["CPUExecutionProvider"]


def _check_device(path: Path, session: Any, options: ServerFlags) -> None:
    """Raise StatusError if a GPU is required and ONNX Runtime has silently fallen back to the CPU."""
    if options.wants_cuda and _CUDA not in session.get_providers():
        raise StatusError(
            "FAILED_PRECONDITION",
            f"{path}: --device={options.device}: onnxruntime could not start its {_CUDA}; it needs a GPU, and CUDA "
            "and cuDNN of the versions that it was built for",
        )


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that a session raises: ONNX Runtime's own, and Python's for bad arguments."""
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
    return by_name(specs)


def _text(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of strings as ONNX Runtime takes them: str, not bytes."""
    flat = [
        element.decode("utf-8", "replace") if isinstance(element, bytes) else element
        for element in array.ravel()
    ]
    return np.array(flat, dtype=object).reshape(array.shape)


def _bytes(array: NDArray[Any]) -> NDArray[Any]:
    flat = [element.encode() if isinstance(element, str) else element for element in array.ravel()]
    return np.array(flat, dtype=object).reshape(array.shape)
