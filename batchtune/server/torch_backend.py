"""How is a PyTorch model loaded and called from batch threads?

`model.pt2` (torch.export) tells its inputs and outputs itself; `model.pt` (TorchScript) does not, so a
`signature.yaml` must lie beside it. Where there is one it is used for both, and gives tensors better names:

    inputs: {x: {dtype: float32, shape: [200]}}     # in the order of forward's arguments; batch dimension left out
    outputs: {y: {dtype: float32, shape: [2]}}      # in the order of what forward returns; for a dict its keys

Operators release the interpreter lock while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchtune.server.declared_tensors import FaultError, check_keys, read_yaml, tensor_specs
from batchtune.server.loaded_model import PREDICT_METHOD, BackendOptions, LoadedModel, Tensors
from batchtune.wire.status import StatusError
from batchtune.wire.tensors import Signature, TensorSpec

SIGNATURE_NAME = "serving_default"
_Specs = tuple[TensorSpec, ...]


def load_torch_model(version_directory: Path, options: BackendOptions) -> LoadedModel:
    """The module of `model.pt2`, else of `model.pt`, as signature serving_default.

    Raises:
        StatusError: torch is missing, does not take the file, or nothing tells the signature.
    """
    exported = version_directory / "model.pt2"
    path = exported if exported.is_file() else version_directory / "model.pt"
    try:
        import torch
    except ImportError as error:
        raise StatusError(
            "FAILED_PRECONDITION", f"{path} needs torch: pip install 'batchtune[torch]'"
        ) from error
    device = _device(torch, options)
    if options.intra_op_threads:
        torch.set_num_threads(options.intra_op_threads)
    declared = _declared(version_directory / "signature.yaml")
    try:
        if path == exported:
            program = torch.export.load(path)
            module = program.module().to(device)
            declared = declared or _derived(program)
        else:
            module = torch.jit.load(str(path), map_location=device).eval()
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise StatusError("INVALID_ARGUMENT", f"{path}: {lines[0]}") from error
    if declared is None:
        raise StatusError("FAILED_PRECONDITION", f"{path}: TorchScript needs a signature.yaml beside it")
    inputs, outputs = declared
    signature = Signature(
        name=SIGNATURE_NAME, method_name=PREDICT_METHOD, inputs=_by_name(inputs), outputs=_by_name(outputs)
    )
    run = _ModuleRun(torch, module, device, inputs, outputs)
    return LoadedModel(platform="torch", signatures={SIGNATURE_NAME: signature}, runs={SIGNATURE_NAME: run})


class _ModuleRun:
    """Positional arguments in the order of `inputs`; a tensor, a tuple or a dict comes back."""

    def __init__(
        self, torch: Any, module: Callable[..., Any], device: Any, inputs: _Specs, outputs: _Specs
    ) -> None:
        self._torch = torch
        self._module = module
        self._device = device
        self._input_names = tuple(spec.name for spec in inputs)
        self._output_names = tuple(spec.name for spec in outputs)

    def __call__(self, inputs: Tensors) -> Mapping[str, Any]:
        """The outputs of a batch; raises StatusError INVALID_ARGUMENT or, out of memory, RESOURCE_EXHAUSTED."""
        torch = self._torch
        try:
            with torch.inference_mode():
                arguments = [torch.tensor(inputs[name], device=self._device) for name in self._input_names]
                returned = self._module(*arguments)
                if isinstance(returned, Mapping):
                    returned = [returned[name] for name in self._output_names]
                elif isinstance(returned, torch.Tensor):
                    returned = [returned]
                outputs = [one.cpu().numpy() for one in returned]
        except torch.OutOfMemoryError as error:
            raise StatusError("RESOURCE_EXHAUSTED", str(error)) from error
        except (RuntimeError, TypeError, ValueError, KeyError, AssertionError) as error:
            raise StatusError("INVALID_ARGUMENT", str(error)) from error
        if len(outputs) != len(self._output_names):
            said = f"the model returned {len(outputs)} outputs, its signature has {len(self._output_names)}"
            raise StatusError("INTERNAL", said)
        return dict(zip(self._output_names, outputs, strict=True))


def _device(torch: Any, options: BackendOptions) -> Any:
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StatusError("FAILED_PRECONDITION", "--device=cuda: PyTorch sees no GPU")
    return torch.device("cuda")


def _declared(path: Path) -> tuple[_Specs, _Specs] | None:
    if not path.is_file():
        return None
    document = read_yaml(path)
    try:
        check_keys(document, "", ("inputs", "outputs"))
        return (
            tensor_specs(document, "inputs", wildcard_allowed=True),
            tensor_specs(document, "outputs", wildcard_allowed=True),
        )
    except FaultError as fault:
        raise StatusError("INVALID_ARGUMENT", f"{path}: {fault}") from fault


def _derived(program: Any) -> tuple[_Specs, _Specs]:
    """The inputs and outputs of an exported program; outputs are called output_0, output_1, …"""
    nodes = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = tuple(_spec(name, nodes[name].meta["val"]) for name in signature.user_inputs)
    outputs = tuple(
        _spec(f"output_{index}", nodes[name].meta["val"]) for index, name in enumerate(signature.user_outputs)
    )
    return inputs, outputs


def _spec(name: str, value: Any) -> TensorSpec:
    """A size that torch.export left symbolic may take any value."""
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return TensorSpec(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=shape)


def _by_name(specs: _Specs) -> _Specs:
    return tuple(sorted(specs, key=lambda spec: spec.name))
