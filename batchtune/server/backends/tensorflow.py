"""Loads TensorFlow SavedModels and runs them from batch threads.

As in TensorFlow Serving, the graph with the given tags is loaded into a Session, and each signature is run by
its tensor names. `Session._make_callable_from_options` takes numpy arrays, releases the interpreter lock
while the graph runs, and costs least: 80 µs for a two-layer model and 32 rows, of which about 60 are
TensorFlow's executor. `Session.run` and `make_callable` cost 165 µs, a concrete function of
`tf.saved_model.load` 175 µs (2 virtual CPUs, TF 2.21; medians of 3,000).
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from batchtune.server.backends.model import LoadedModel, Runner, Tensors
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.signature import Signature
from batchtune.wire.status import GRPC_NAMES, StatusError
from batchtune.wire.tfserving.messages import SignatureDef, SignatureDefMap
from batchtune.wire.tfserving.rest_json import read_graph_batching
from batchtune.wire.tfserving.tensors import signature_from_def

# Keeping a native library's start-up messages off stderr, and nothing else.
#
# TensorFlow 2.21 writes some lines before it looks at TF_CPP_MIN_LOG_LEVEL.

# Two that swapped the descriptor crosswise would leave it on what one of them has collected.
_SWAPPING = threading.Lock()


@contextmanager
def native_log_lines_dropped() -> Iterator[None]:
    """Return a context manager that holds back what the process writes to file descriptor 2, and writes it at the end
    without native log lines.

    Lines of other threads are held back too. Only one thread at a time is inside.
    """
    native = re.compile(rb"^(?:[IWEF]\d{4} \d\d:\d\d:|WARNING: All log messages before absl::InitializeLog)")
    with _SWAPPING, tempfile.TemporaryFile() as collected:
        kept = os.dup(2)
        os.dup2(collected.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            collected.seek(0)
            with suppress(OSError):  # nobody reads it, or its disk is full
                for line in collected:
                    if not native.match(line):
                        os.write(2, line)


def load_saved_model(version_directory: Path, options: ServerFlags) -> LoadedModel:
    """Load a SavedModel with all signatures but those with tensors that cannot be sent (sparse, resources).

    Raises:
        StatusError: FAILED_PRECONDITION where TensorFlow, the GPU or every usable signature is missing; else the reason
            why the file cannot be loaded.
    """
    with nullcontext() if "TF_CPP_MIN_LOG_LEVEL" in os.environ else native_log_lines_dropped():
        tf = _import_tensorflow(version_directory, options)
        config = _session_config(tf.compat.v1, options)
        session = tf.compat.v1.Session(graph=tf.Graph(), config=config)
    try:
        with session.graph.as_default():
            loader = tf.compat.v1.saved_model.loader
            meta_graph = loader.load(session, options.saved_model_tags.split(","), str(version_directory))
    except (tf.errors.OpError, OSError, RuntimeError, ValueError) as error:
        session.close()
        raise _load_failure(error, version_directory) from error
    definitions = {
        name: SignatureDef.FromString(theirs.SerializeToString())
        for name, theirs in meta_graph.signature_def.items()
    }
    signatures = {
        name: signature
        for name, definition in definitions.items()
        if (signature := _signature(name, definition))
    }
    if not signatures:
        session.close()
        raise StatusError(
            "FAILED_PRECONDITION", f"{version_directory}: the SavedModel has no serving signature"
        )
    runs: dict[tuple[Any, ...], Runner] = {}
    by_name = {}
    for name in signatures:
        tensors = _tensor_names(definitions[name])
        if tensors not in runs:
            runs[tensors] = _runner(session, *tensors, op_error=tf.errors.OpError)
        by_name[name] = runs[tensors]
    return LoadedModel(
        signatures=signatures,
        runs=by_name,
        metadata=SignatureDefMap(signature_def=definitions).SerializeToString(),
        close=session.close,
        inside=read_graph_batching(version_directory),
    )


def _runner(
    session: Any,
    inputs: tuple[tuple[str, str], ...],
    outputs: tuple[tuple[str, str], ...],
    *,
    op_error: Any,
) -> Runner:
    """Prepare the call of one signature; inputs, outputs: (name in the signature, tensor in the graph).

    The function returned raises StatusError with TensorFlow's own code and message, of which `op_error` is the class.
    """
    from tensorflow.core.protobuf.config_pb2 import CallableOptions

    options = CallableOptions()
    # A tensor may stand behind two names, but can be fed and fetched only once.
    order = list(dict.fromkeys(tensor for _, tensor in outputs))
    options.feed.extend(tensor for _, tensor in inputs)
    options.fetch.extend(order)
    call = session._make_callable_from_options(options)
    input_names = tuple(name for name, _ in inputs)
    positions = {name: order.index(tensor) for name, tensor in outputs}

    def run(given: Tensors) -> Tensors:
        try:
            fetched = call(*(given[name] for name in input_names))
        except op_error as error:
            code = GRPC_NAMES.get(error.error_code, "UNKNOWN")
            raise StatusError(code, error.message) from error
        except (RuntimeError, TypeError, ValueError) as error:  # numpy array to tensor
            raise StatusError("INVALID_ARGUMENT", str(error)) from error
        return {name: fetched[position] for name, position in positions.items()}

    return run


def _import_tensorflow(path: Path, options: ServerFlags) -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # for what it logs later
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    try:
        import tensorflow as tf
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":  # it is there, and not whole
            raise
        raise StatusError(
            "FAILED_PRECONDITION", f"{path} needs TensorFlow: pip install 'batchtune[tensorflow]'"
        ) from error

    tf.get_logger().setLevel("ERROR")
    gpu_count = len(tf.config.list_physical_devices("GPU")) if options.wants_cuda else 0
    if options.wants_cuda and options.cuda_index >= gpu_count:
        built = "" if tf.test.is_built_with_cuda() else " (this tensorflow is built without CUDA)"
        raise StatusError(
            "FAILED_PRECONDITION",
            f"--device={options.device}: TensorFlow sees {gpu_count or 'no'} GPU{built}",
        )
    return tf


def _session_config(v1: Any, options: ServerFlags) -> Any:
    config = v1.ConfigProto(allow_soft_placement=True)
    if options.tensorflow_session_config_file:
        from google.protobuf import text_format

        try:
            text_format.Parse(
                Path(options.tensorflow_session_config_file).read_text(encoding="utf-8"), config
            )
        except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
            message = f"--tensorflow_session_config_file={options.tensorflow_session_config_file}: {error}"
            raise StatusError("INVALID_ARGUMENT", message) from error
    if options.intra_op_threads:
        config.intra_op_parallelism_threads = options.intra_op_threads
    if options.inter_op_threads:
        config.inter_op_parallelism_threads = options.inter_op_threads
    if options.wants_cuda:
        config.gpu_options.visible_device_list = str(options.cuda_index)
    if options.per_process_gpu_memory_fraction:
        config.gpu_options.per_process_gpu_memory_fraction = options.per_process_gpu_memory_fraction
    else:
        config.gpu_options.allow_growth = True
    return config


def _signature(name: str, definition: SignatureDef) -> Signature | None:
    try:
        signature = signature_from_def(name, definition)
    except ValueError:
        return None
    every = (*definition.inputs.values(), *definition.outputs.values())
    return (
        signature
        if signature.inputs and all(tensor.WhichOneof("encoding") == "name" for tensor in every)
        else None
    )


def _tensor_names(
    definition: SignatureDef,
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    return (
        tuple(sorted((name, tensor.name) for name, tensor in definition.inputs.items())),
        tuple(sorted((name, tensor.name) for name, tensor in definition.outputs.items())),
    )


def _load_failure(error: Exception, version_directory: Path) -> StatusError:
    code = GRPC_NAMES.get(getattr(error, "error_code", 0) or 0, "OK")
    return StatusError("INVALID_ARGUMENT" if code == "OK" else code, f"{version_directory}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Return the first line of an error that says what is wrong, past TensorFlow's headings and nodes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    beside_the_reason = (
        "Graph execution error:",
        "Detected at node",
        "<stack traces",
        "Node:",
        "[[",
        "File ",
    )
    telling = [line for line in lines if not line.startswith(beside_the_reason)]
    return (telling or lines or [type(error).__name__])[0]
