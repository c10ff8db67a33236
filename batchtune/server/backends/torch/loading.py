"""Loads PyTorch models and runs them from batch threads.

`model.pt2` (torch.export) describes its inputs and outputs; `model.pt` (TorchScript) does not, so it needs a
`signature.yaml` beside it. Where there is one it is used for both, and gives tensors better names:

    inputs: {x: {dtype: float32, shape: [200]}}     # in the order of forward's arguments; batch dimension left out
    outputs: {y: {dtype: float32, shape: [2]}}      # in the order of what forward returns; for a dict its keys

Operators release the interpreter lock while they run. --torch_dtype converts the weights, and on the device each
batch's inputs and outputs; the signature, and what travels, stay as they are.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from batchtune.server.backends.declared_file import check_keys, read_declared, tensor_specs
from batchtune.server.backends.model import (
    PREDICT_METHOD,
    LoadedModel,
    Tensors,
    out_of_memory,
    zeros,
)
from batchtune.server.backends.torch.device import CudaDevice, HostDevice, TorchDevice, first_line
from batchtune.server.backends.torch.lanes import Lanes
from batchtune.server.log import note
from batchtune.server.server_flags import ServerFlags
from batchtune.system import schedulable_cores
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature, TensorSpec, by_name
from batchtune.wire.status import StatusError
from batchtune.yaml_lines import YamlError

Specs = tuple[TensorSpec, ...]
FAILURES = (RuntimeError, TypeError, ValueError, KeyError, AssertionError, MemoryError)
"""The exceptions that a module may raise; torch's OutOfMemoryError and AcceleratorError are RuntimeErrors."""


class Forward:
    """Calls a module on tensors of its device; returns its tensor, tuple or dict as a list.

    dtype: precision of a converted module, to which floating-point inputs are cast; outputs are cast back to the dtypes
    of the signature. around: makes the context in which the module is called; None: no context.
    """

    def __init__(
        self,
        torch: Any,
        module: Callable[..., Any],
        outputs: Specs,
        *,
        dtype: Any = None,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._tensor_type = torch.Tensor
        self._module = module
        self._dtype = dtype
        self._around = around
        self._output_dtypes = [getattr(torch, spec.dtype, None) for spec in outputs]
        self.names = tuple(spec.name for spec in outputs)

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the outputs; raises the module's errors, StatusError INTERNAL for a wrong number of them."""
        if self._dtype is not None:
            tensors = [tensor.to(self._dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
        with nullcontext() if self._around is None else self._around():
            returned = self._module(*tensors)
        if isinstance(returned, self._tensor_type):
            returned = [returned]
        elif isinstance(returned, Mapping):
            returned = [returned[name] for name in self.names]
        if len(returned) != len(self.names):
            said = f"the model returned {len(returned)} outputs, its signature has {len(self.names)}"
            raise StatusError("INTERNAL", said)
        if self._dtype is None and self._around is None:
            return list(returned)
        return [tensor.to(dtype) for tensor, dtype in zip(returned, self._output_dtypes, strict=True)]

    def close(self) -> None:
        """Free the weights now: an exported module is in a reference cycle, which gc.freeze may preserve."""
        for kind in ("parameters", "buffers"):
            for tensor in getattr(self._module, kind, tuple)():
                tensor.data = tensor.data.new_empty(0)


def forward_in(
    torch: Any,
    dtype_name: str,
    device: TorchDevice,
    load: Callable[[], Any],
    *,
    inputs: Specs,
    outputs: Specs,
) -> Forward:
    """Load a module so that it computes in the precision of --torch_dtype.

    The whole module is converted if a batch of zeros then runs. A graph that was exported with fixed precisions inside
    does not run converted: its weights stay as they are, and its matrix products compute in `dtype_name` (autocast),
    which is noted. dtype_name: `as_exported` converts nothing, float32 always converts. load: returns a newly loaded
    module at each call.
    """
    if dtype_name == "as_exported":
        return Forward(torch, load(), outputs)
    dtype = getattr(torch, dtype_name)
    converted = Forward(torch, load().to(dtype), outputs, dtype=dtype)
    fault = _fault(torch, converted, device, inputs)
    if fault is None or dtype_name == "float32":
        return converted
    note(f"--torch_dtype={dtype_name}: weights stay as they are, products are cast: {fault}")
    # A recorded graph must not use casts from a cache that is emptied.
    around = partial(torch.autocast, device.name.type, dtype, cache_enabled=False)
    return Forward(torch, load(), outputs, around=around)


def _fault(torch: Any, forward: Forward, device: TorchDevice, inputs: Specs) -> str | None:
    """Return why a batch of zeros fails, None where it runs; raises the error where memory is too small."""
    rows_tried = 2
    try:
        with torch.inference_mode():
            forward([device.to_device(device.staged(zeros(spec, rows_tried))) for spec in inputs])
    except FAILURES as error:
        if device.is_out_of_memory(error):
            raise
        return first_line(error)
    return None


def load_torch_model(version_directory: Path, options: ServerFlags) -> LoadedModel:
    """Load `model.pt2`, or without it `model.pt`, as signature serving_default.

    Raises:
        StatusError: FAILED_PRECONDITION where torch, the device or signature.yaml is missing, RESOURCE_EXHAUSTED where
            memory is too small, INVALID_ARGUMENT for a file that torch refuses.
    """
    exported = version_directory / "model.pt2"
    path = exported if exported.is_file() else version_directory / "model.pt"
    try:
        import torch
    except ImportError as error:
        raise StatusError(
            "FAILED_PRECONDITION", f"{path} needs torch: pip install 'batchtune[torch]'"
        ) from error
    device = device_of(torch, options)
    _set_thread_counts(torch, options)
    declared = _declared(version_directory / "signature.yaml")
    try:
        if path == exported:
            program = torch.export.load(path)
            declared = declared or _derived(program)
            load = _module_loader(torch, path, program, device.name, options)
        else:
            load = partial(_script_of, torch, path, device.name)
        if declared is None:
            raise StatusError("FAILED_PRECONDITION", f"{path}: TorchScript needs a signature.yaml next to it")
        inputs, outputs = declared
        # Lanes do not wait for the stream on which weights are copied and converted.
        stream = device.new_stream()
        with device.on(stream):
            forward = forward_in(torch, options.torch_dtype, device, load, inputs=inputs, outputs=outputs)
            device.wait(device.new_event())
        device.free_cache()
    except (*FAILURES, OSError, AttributeError, BadZipFile) as error:
        device.end_if_lost(error)
        if device.is_out_of_memory(error):
            raise out_of_memory(f"{path}: {error}") from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise StatusError("INVALID_ARGUMENT", f"{path}: {lines[0]}") from error
    return served_module(torch, forward, device, inputs=inputs, outputs=outputs)


def _set_thread_counts(torch: Any, options: ServerFlags) -> None:
    """Set PyTorch's thread counts; its default of threads over operations ignores the CPU affinity."""
    if options.intra_op_threads:
        torch.set_num_threads(options.intra_op_threads)
    inter_op_threads = options.inter_op_threads or schedulable_cores()
    if torch.get_num_interop_threads() != inter_op_threads:
        with suppress(RuntimeError):  # they run already, for an earlier version, and their number is final
            torch.set_num_interop_threads(inter_op_threads)


def device_of(torch: Any, options: ServerFlags) -> TorchDevice:
    """Return the device that `--device` names: auto, cpu, cuda or cuda:N; on a GPU this limits the memory of the
    process to --per_process_gpu_memory_fraction.

    Raises:
        StatusError: FAILED_PRECONDITION where a GPU is asked for and PyTorch sees none, or not that one.
    """
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        return HostDevice(torch)
    device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.cuda_index >= device_count:
        built = "" if torch.version.cuda else " (this torch is built without CUDA)"
        raise StatusError(
            "FAILED_PRECONDITION",
            f"--device={options.device}: PyTorch sees {device_count or 'no'} GPU{built}",
        )
    if options.per_process_gpu_memory_fraction:
        torch.cuda.set_per_process_memory_fraction(
            options.per_process_gpu_memory_fraction, options.cuda_index
        )
    return CudaDevice(torch, options.cuda_index)


def served_module(
    torch: Any, forward: Forward, device: TorchDevice, *, inputs: Specs, outputs: Specs
) -> LoadedModel:
    """Wrap a module on `device` as a LoadedModel; inputs, outputs: in the module's own order."""
    signature = Signature(
        name=DEFAULT_SIGNATURE, method_name=PREDICT_METHOD, inputs=by_name(inputs), outputs=by_name(outputs)
    )
    run = _ModuleRun(torch, device, forward, inputs)
    return LoadedModel(
        signatures={DEFAULT_SIGNATURE: signature},
        runs={DEFAULT_SIGNATURE: run},
        empty=device.empty,
        prepare=run.prepare,
        close=run.close,
    )


class _ModuleRun:
    """Runs batches of numpy arrays; the module's positional arguments are in the order of `inputs`."""

    def __init__(self, torch: Any, device: TorchDevice, forward: Forward, inputs: Specs) -> None:
        self._device = device
        self._inputs = inputs
        self._input_names = tuple(spec.name for spec in inputs)
        self._forward = forward
        self._output_names = forward.names
        self._lanes = Lanes(torch, device, forward, failures=(StatusError, *FAILURES))

    def __call__(self, inputs: Tensors) -> Mapping[str, Any]:
        """Return the outputs of a batch, by name.

        Raises:
            StatusError: RESOURCE_EXHAUSTED where memory is too small (smaller batches still run), INTERNAL
                for a failure of the device, else INVALID_ARGUMENT.
        """
        try:
            outputs = self._lanes.run([inputs[name] for name in self._input_names])
        except FAILURES as error:
            failure = error
        else:
            return dict(zip(self._output_names, outputs, strict=True))
        raise self._status(failure) from failure

    def prepare(self, sizes: Sequence[int], at_once: int | None) -> None:
        """Record graphs for batches of these numbers of rows, `at_once` of which may run at once."""
        examples = [[zeros(spec, size) for spec in self._inputs] for size in sizes]
        self._lanes.prepare(examples, at_once=at_once)

    def close(self) -> None:
        """Free the graphs and the weights."""
        self._lanes.close()
        self._forward.close()

    def _status(self, error: Exception) -> StatusError:
        self._device.end_if_lost(error)
        error.__traceback__ = None  # it holds the lane and the tensors of the failed run
        if self._device.is_out_of_memory(error):
            self._device.free_cache()
            return out_of_memory(str(error))
        return StatusError("INTERNAL" if self._device.has_failed(error) else "INVALID_ARGUMENT", str(error))


def _module_loader(
    torch: Any, path: Path, program: Any, device_name: Any, options: ServerFlags
) -> Callable[[], Any]:
    """Return a function that makes a module: first of `program`, then of the file, read again.

    Converting a module changes its program, so a second module needs a new one.
    """
    unused = [program]

    def load() -> Any:
        module_of = _moved(unused.pop() if unused else torch.export.load(path), device_name).module
        if options.torch_dtype != "as_exported" and "check_guards" in inspect.signature(module_of).parameters:
            # From torch 2.9 on a module checks that its inputs have the dtype that they were exported with.
            return module_of(check_guards=False).to(device_name)
        return module_of().to(device_name)

    return load


def _moved(program: Any, device_name: Any) -> Any:
    """Move a program to a device, with the constants (arange, zeros) of its graph, which `to` does not."""
    if device_name.type == "cpu":
        return program
    return importlib.import_module("torch.export.passes").move_to_device_pass(program, str(device_name))


def _script_of(torch: Any, path: Path, device_name: Any) -> Any:
    return torch.jit.load(str(path), map_location=device_name).eval()


def _declared(path: Path) -> tuple[Specs, Specs] | None:
    if not path.is_file():
        return None
    file = read_declared(path)
    document = file.data
    try:
        check_keys(document, "", ("inputs", "outputs"))
        return (
            tensor_specs(document, "inputs", wildcard_allowed=True),
            tensor_specs(document, "outputs", wildcard_allowed=True),
        )
    except YamlError as fault:
        raise file.fault(str(fault)) from fault


def _derived(program: Any) -> tuple[Specs, Specs]:
    """Return (inputs, outputs) of an exported program; outputs are called output_0, output_1, …"""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = tuple(_spec(str(name), values.get(name)) for name in signature.user_inputs)
    outputs = tuple(
        _spec(f"output_{index}", values.get(name)) for index, name in enumerate(signature.user_outputs)
    )
    return inputs, outputs


def _spec(name: str, value: Any) -> TensorSpec:
    """Return the spec of an example tensor; symbolic sizes become None. Raises ValueError for no tensor."""
    if not hasattr(value, "shape"):
        raise ValueError(f"{name} is not a tensor; export a module that takes and gives tensors only")
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return TensorSpec(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=shape)
