"""Opens the stages that stages.yaml declares (code, models, lookups) and checks the tensors between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from batchtune.server.backends.emulated import EmulatedDevice, EmulatedServiceTime
from batchtune.server.backends.model import LoadedModel, Runner, Tensors
from batchtune.server.backends.registry import load_model
from batchtune.server.metrics import Sums
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.input_shapes import InputShape, numpy_dtype
from batchtune.server.stages.model_code import ModelCode, shape_fault
from batchtune.server.stages.stages_file import DeclaredStages, LookupStage
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature, TensorSpec, by_name, object_array
from batchtune.wire.status import StatusError

Named = dict[str, NDArray[Any]]
Stage = Callable[[Tensors, int], Named]
"""Returns tensors by name, each of so many rows, of tensors by name; called on any thread; raises StatusError."""


def sub_model(
    opened: ExitStack,
    key: str,
    folder: Path,
    options: ServerFlags,
    gives: Sequence[TensorSpec],
    kept: Collection[str],
) -> Stage:
    """Return a stage that runs the model of a folder, by its signature serving_default; `opened` closes the model.

    key: the key of stages.yaml that names the folder, for messages. gives: outputs that the model must have. kept:
    names of the outputs to return. Raises StatusError INVALID_ARGUMENT where the model lacks that signature or an
    output; the stage: INTERNAL where an input is missing or an output has another shape; else the model's error.
    """
    model = load_model(folder, options)
    opened.callback(model.close)
    signature = model.signatures.get(DEFAULT_SIGNATURE)
    if signature is None:
        known = ", ".join(sorted(model.signatures))
        message = f"{folder}: {key} of stages.yaml runs {DEFAULT_SIGNATURE}; this model has {known}"
        raise StatusError("INVALID_ARGUMENT", message)
    fault = _misfit({spec.name: spec.dtype for spec in signature.outputs}, gives)
    if fault:
        raise StatusError("INVALID_ARGUMENT", f"{folder}: {key} of stages.yaml gives {fault}")
    run = model.runs[DEFAULT_SIGNATURE]
    input_names = [spec.name for spec in signature.inputs]
    output_names = [spec.name for spec in signature.outputs if spec.name in kept]
    specs = {spec.name: spec for spec in gives}

    def stage(inputs: Tensors, rows: int) -> Named:
        missing = [name for name in input_names if name not in inputs]
        if missing:
            raise StatusError("INTERNAL", f"{key}: its model takes {missing[0]!r}, which nothing gives")
        outputs = run({name: inputs[name] for name in input_names})
        for name in output_names:
            if fault := shape_fault(outputs[name], rows, specs.get(name)):
                raise StatusError("INTERNAL", f"{key}: its model gave {name!r} {fault}")
        return {name: outputs[name] for name in output_names}

    return stage


def _misfit(dtypes: Mapping[str, str], wanted: Sequence[TensorSpec]) -> str:
    """Describe the first of the `wanted` outputs that is missing or has another dtype; "" if none."""
    for spec in wanted:
        dtype = dtypes.get(spec.name)
        if dtype is None:
            return f"no {spec.name!r}"
        if dtype != spec.dtype:
            return f"{spec.name!r} as {dtype}; outputs says {spec.dtype}"
    return ""


def open_lookup(stage: LookupStage, code: ModelCode) -> Runner:
    """Return a function that takes a batch of keys and returns their values, from Redis, code or an emulated device.

    Raises:
        StatusError: INVALID_ARGUMENT for code that cannot be loaded, FAILED_PRECONDITION where the package redis is
            missing.
    """
    if stage.redis is not None:
        return RedisLookup(*stage.redis, key_name=stage.inputs[0].name, value=stage.outputs[0])
    if stage.emulated is not None:
        service_time = EmulatedServiceTime(concurrency="parallel", **stage.emulated)  # type: ignore[arg-type]
        return EmulatedDevice(service_time, rows_max=None, outputs=stage.outputs)
    return code.function("lookup.code", stage.code, stage.outputs)


class RedisLookup:
    """Looks up a batch of keys by one MGET; a key that the store does not have gives a row of zeros or "".

    Under `prefix` + key the store has the bytes of an array with the type and shape of `value`, the output. url: with
    host, port and database; timeout_ms: of connecting, and of each answer; key_name: name of the input. Raises
    StatusError FAILED_PRECONDITION where the package redis is missing.
    """

    def __init__(self, url: str, prefix: str, timeout_ms: float, *, key_name: str, value: TensorSpec) -> None:
        try:
            import redis
        except ImportError as error:
            raise StatusError(
                "FAILED_PRECONDITION", "lookup.redis needs redis: pip install 'batchtune[redis]'"
            ) from error
        timeout_s = timeout_ms / 1000
        self._failure = redis.RedisError
        self._client = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        self._where = _without_password(url)
        self._prefix = prefix.encode()
        self._key_name = key_name
        self._value = value

    def __call__(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """Return {name of the output: values of a batch of keys}.

        Raises:
            StatusError: UNAVAILABLE where the store does not answer, INTERNAL where a value has another size.
        """
        given = inputs[self._key_name]
        keys = [self._prefix + _key(key) for key in given.ravel().tolist()]
        try:
            values = self._client.mget(keys) if keys else []
        except self._failure as error:
            raise StatusError("UNAVAILABLE", f"lookup: {self._where}: {error}") from error
        array = _rows_of(values, keys, self._value)
        return {self._value.name: array.reshape(*given.shape, *array.shape[1:])}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _key(key: Any) -> bytes:
    return key if isinstance(key, bytes) else str(key).encode()


def _rows_of(values: Sequence[bytes | None], keys: Sequence[bytes], spec: TensorSpec) -> NDArray[Any]:
    shape = tuple(size or 0 for size in (spec.shape or (None,))[1:])
    if spec.dtype == "object":
        return object_array([value or b"" for value in values])
    rows = np.zeros((len(values), *shape), np.dtype(spec.dtype))
    for row, (key, value) in enumerate(zip(keys, values, strict=True)):
        if value is None:
            continue
        if len(value) != rows[row].nbytes:
            raise StatusError(
                "INTERNAL",
                f"lookup: the value of {key.decode(errors='replace')!r} has {len(value)} bytes; {spec.dtype} "
                f"{list(shape)} has {rows[row].nbytes}",
            )
        rows[row] = np.frombuffer(value, rows.dtype).reshape(shape)
    return rows


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"


class StagePlan:
    """The opened stages of one signature, each of which counts its calls; None: there is no such stage.

    signature: inputs of requests and outputs of answers; device: the model's own signature. lookup: returns the values
    of a batch of keys; declared: what stages.yaml says. use: where calls, rows and microseconds of each stage are
    counted, under `model_name`. options: for folders of models.

    Runs the files of code, loads folders of models. Raises StatusError: INVALID_ARGUMENT for an unknown signature or
    code that does not run; FAILED_PRECONDITION where a package is missing; or the error of loading a folder's model.
    """

    def __init__(
        self,
        declared: DeclaredStages,
        model: LoadedModel,
        *,
        model_name: str,
        use: Sums,
        options: ServerFlags,
    ) -> None:
        device = model.signatures.get(declared.signature)
        if device is None:
            known = ", ".join(sorted(model.signatures))
            raise declared.file.fault(
                f"signature: {declared.signature!r} is none of the model's; expected {known}"
            )
        _check_takers(declared, device)
        self.declared = declared
        self.device = device
        self.signature = replace(
            device,
            inputs=device.inputs if declared.inputs is None else by_name(declared.inputs),
            outputs=device.outputs if declared.outputs is None else by_name(declared.outputs),
        )
        self.use = use
        self.model_name = model_name
        self.lookup: Stage | None = None
        self._device_shapes = {spec.name: InputShape(device.name, spec) for spec in device.inputs}
        self.code = ModelCode(declared.folder)
        given = self.signature.outputs
        keys = () if declared.lookup is None else declared.lookup.inputs
        with ExitStack() as opened:
            opened.callback(self.code.close)
            if declared.lookup is not None:
                source = open_lookup(declared.lookup, self.code)
                if isinstance(source, RedisLookup):
                    opened.callback(source.close)
                self.lookup = _counted(use, (model_name, "lookup"), lambda inputs, _rows: source(inputs))
            taken = {spec.name for spec in (*device.inputs, *keys)}
            self.pre = self._opened_stage(opened, options, "pre", declared.pre, (), taken)
            taken = {spec.name for spec in given}
            self.post = self._opened_stage(opened, options, "post", declared.post, given, taken)
            self._opened = opened.pop_all()

    def _opened_stage(
        self,
        opened: ExitStack,
        options: ServerFlags,
        key: str,
        reference: str,
        gives: Sequence[TensorSpec],
        kept: Collection[str],
    ) -> Stage | None:
        if not reference:
            return None
        if not reference.endswith("/"):
            return _counted(self.use, (self.model_name, key), self.code.function(key, reference, gives))
        stage = sub_model(opened, key, self.declared.folder / reference, options, gives, kept)
        return _counted(self.use, (self.model_name, key), stage)

    def keys_of(self, tensors: Tensors) -> Named:
        """Return those of `tensors` that are inputs of the lookup.

        Raises:
            StatusError: INTERNAL where an input is missing or has another dtype.
        """
        keys = () if self.declared.lookup is None else self.declared.lookup.inputs
        return self._of(keys, tensors, "the lookup")

    def for_device(self, tensors: Tensors) -> Named:
        """Return those of `tensors` that are inputs of the model.

        Raises:
            StatusError: INTERNAL where an input is missing or has another dtype or shape than the model's.
        """
        chosen = self._of(self.device.inputs, tensors, "the model")
        for name, array in chosen.items():
            shape = self._device_shapes[name]
            if array.shape[1:] not in shape.known and (fault := shape.fault(array.shape)):
                raise StatusError("INTERNAL", f"{self._maker()} {fault}")
        return chosen

    def close(self) -> None:
        """Close the stages' models and connections, and drop the modules of code."""
        self._opened.close()

    def _of(self, specs: tuple[TensorSpec, ...], tensors: Tensors, taker: str) -> Named:
        chosen = {}
        for spec in specs:
            array = tensors.get(spec.name)
            if array is None:
                raise StatusError("INTERNAL", f"{self._maker()} gave no {spec.name!r}, which {taker} takes")
            if array.dtype != (numpy_dtype(spec.dtype) or array.dtype):
                raise StatusError(
                    "INTERNAL",
                    f"{self._maker()} gave {spec.name!r} as {array.dtype.name}; {taker} takes {spec.dtype}",
                )
            chosen[spec.name] = array
        return chosen

    def _maker(self) -> str:
        return "pre:" if self.pre is not None else "the request:"


def _counted(use: Sums, labels: tuple[str, str], run: Callable[[Tensors, int], Tensors]) -> Stage:
    """Return `run` with its calls, rows and microseconds counted; it does not refer to the plan, which refers to it."""

    def stage(inputs: Tensors, rows: int) -> Named:
        began_ns = time.monotonic_ns()
        try:
            return dict(run(inputs, rows))
        finally:
            use.add(labels, 1, rows, (time.monotonic_ns() - began_ns) / 1000)

    return stage


def _check_takers(declared: DeclaredStages, device: Signature) -> None:
    """Check that lookup and model get all their inputs, which without `pre` is known before any request.

    Raises StatusError INVALID_ARGUMENT for an input that nothing gives.
    """
    if declared.pre or declared.lookup is None or declared.inputs is None:
        return
    given = {spec.name for spec in declared.inputs}
    for spec in declared.lookup.inputs:
        if spec.name not in given:
            raise declared.file.fault(
                f"lookup.inputs.{spec.name}: not among inputs, and there is no pre to give it"
            )
    given |= {spec.name for spec in declared.lookup.outputs}
    for spec in device.inputs:
        if spec.name not in given:
            raise declared.file.fault(f"inputs: the model takes {spec.name!r}, which nothing gives")
