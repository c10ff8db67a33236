"""How is a gRPC Predict call checked against its model, run and answered?

Texts and the order of checks are TensorFlow Serving's (servables/tensorflow/predict_util.cc and TensorFlow's
cc/saved_model/util.cc). What a request says beside its values is checked once for each version of a model.

Answers of the same outputs, dtypes and shapes differ only in their values: everything else is written once. That
holds where values travel as plain bytes: floats and bools in their packed fields, every number in tensor_content
(--enable_serialization_as_tensor_content). Other answers are written by protobuf.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from batchtune.server.calls.pending_call import (
    Models,
    Outputs,
    PendingCall,
    PendingCalls,
    check_predict_method,
)
from batchtune.server.calls.request_counts import CallKind, ModelTimes
from batchtune.server.grpc_api.predict_decoding import PredictPlan, PredictRequests, decode_inputs
from batchtune.server.sessions.request import Servable
from batchtune.wire.descriptors import varint
from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature
from batchtune.wire.status import StatusError, invalid_argument
from batchtune.wire.tfserving.messages import ModelSpec, PredictResponse, SignatureDefMap, TensorProto
from batchtune.wire.tfserving.tensors import datatype_number, fill_tensor, tensor_from_proto

_PREDICT = CallKind(api="Predict", runtime_api="Predict")
_BINDINGS_MAX = 1024
_TEMPLATES_MAX = 256
_LENGTH_DELIMITED = 2
_CONTENT_FIELD = 4
# numpy's type character → the packed field whose bytes are the array's own.
_RAW_FIELDS = {"f": 5, "d": 6, "?": 11, "F": 9, "D": 12}
_NUMBERS = "fdFDbhilqBHILQe?"


class PredictCalls:
    """Answers Predict."""

    def __init__(
        self,
        models: Models,
        pending: PendingCalls[GrpcCall],
        *,
        as_content: bool,
        check_methods: bool = False,
    ) -> None:
        self._models = models
        self._pending = pending
        self._as_content = as_content
        self._check_methods = check_methods
        self._requests = PredictRequests()
        self._bindings: dict[PredictPlan, _Binding] = {}

    def start(self, call: GrpcCall) -> None:
        """Start one call; it ends by itself."""
        name, started_ns = "", time.monotonic_ns()
        try:
            plan, inputs, request = self._requests.decode(call.message)
            name = plan.model_name
            servable = self._models.find(name, version=plan.version, label=plan.label)
            binding = self._bindings.get(plan)
            if binding is None or binding.servable() is not servable:
                binding = self._bind(plan, servable)
            if inputs is None:
                inputs = decode_inputs(request)
            if binding.refusal:
                raise invalid_argument(binding.refusal)
            if binding.defaults:
                inputs = {**binding.defaults, **inputs}
        except StatusError as error:
            self._pending.refuse(call, name, error)
            return
        running = PendingCall(
            self._pending, binding.times, call, started_ns, call.deadline_ns, binding.encode
        )
        running.submit(servable, binding.signature_name, inputs, binding.output_names)

    def _bind(self, plan: PredictPlan, servable: Servable) -> _Binding:
        """Check a plan against a version. Raises StatusError; what TensorFlow Serving checks only after the tensors
        is kept as the binding's refusal."""
        signature_name = plan.signature_name or DEFAULT_SIGNATURE
        signature = servable.signatures.get(signature_name)
        if signature is None:
            raise StatusError("FAILED_PRECONDITION", f'Serving signature key "{signature_name}" not found.')
        if self._check_methods:
            check_predict_method(signature)
        defaults = _check_inputs(plan.input_names, signature, servable)
        responses = PredictResponses(
            model_name=servable.name,
            version=servable.version,
            signature_name=signature_name,
            outputs=plan.output_filter or tuple(spec.name for spec in signature.outputs),
            as_content=self._as_content,
        )
        binding = _Binding(
            servable=weakref.ref(servable),
            signature_name=signature_name,
            output_names=plan.output_filter or None,
            defaults=defaults,
            encode=responses.encode,
            refusal=_check_output_filter(plan.output_filter, signature),
            times=self._pending.counts.times(plan.model_name, _PREDICT),
        )
        if plan.remembered:
            if len(self._bindings) >= _BINDINGS_MAX:
                self._bindings.clear()
            self._bindings[plan] = binding
        return binding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Binding:
    """A plan that fits a version; holds no reference that would keep an unloaded version alive.

    `refusal` is what such a request is told, "" where it runs; an exception kept here would keep every request that
    it has refused.
    """

    servable: weakref.ref[Servable]
    signature_name: str
    output_names: tuple[str, ...] | None
    defaults: Mapping[str, NDArray[Any]]
    encode: Callable[[Outputs], bytes]
    refusal: str
    times: ModelTimes


def _check_inputs(given: Iterable[str], signature: Signature, servable: Servable) -> dict[str, NDArray[Any]]:
    """Compare the names of the inputs; gives the signature's defaults of those that are missing."""
    sent = set(given)
    wanted = {spec.name for spec in signature.inputs}
    if sent == wanted:
        return {}
    definition = SignatureDefMap.FromString(servable.metadata).signature_def[signature.name]
    if len(sent) > len(wanted) or (len(sent) < len(wanted) and not definition.defaults):
        raise invalid_argument(
            f"input size does not match signature: {len(sent)}!={len(wanted)} len({_braced(sent)}) != "
            f"len({_braced(wanted)}). Sent extra: {_braced(sent - wanted)}. Missing but required: "
            f"{_braced(wanted - sent)}."
        )
    defaults = {}
    for name in sorted(wanted - sent):
        if name not in definition.defaults:
            raise invalid_argument(
                f"Signature input alias: {name}(feed name: {definition.inputs[name].name}) not found in request and "
                f"no default value provided. Inputs expected to be in the request {_braced(sent)}, or default input "
                f"alias set: {','.join(sorted(definition.defaults))}"
            )
        try:
            defaults[name] = tensor_from_proto(definition.defaults[name])
        except ValueError as error:
            raise invalid_argument(f"tensor parsing error: {name}") from error
    if not sent <= wanted:
        raise invalid_argument(
            f"Inputs contains invalid name. Used request inputs: {','.join(sorted(sent & wanted))}, "
            f"request input: {','.join(sorted(sent))}"
        )
    return defaults


def _check_output_filter(names: tuple[str, ...], signature: Signature) -> str:
    """What is wrong with the names, "" if nothing."""
    known = {spec.name for spec in signature.outputs}
    for index, name in enumerate(names):
        if name not in known:
            return (
                f"output tensor alias not found in signature: {name} Outputs expected to be in the set "
                f"{_braced(known)}."
            )
        if name in names[:index]:
            return f"duplicate output tensor alias: {name}"
    return ""


def _braced(names: Iterable[str]) -> str:
    return f"{{{','.join(sorted(names))}}}"


class PredictResponses:
    """Writes the answers of one signature of one version with one choice of outputs."""

    def __init__(
        self, *, model_name: str, version: int, signature_name: str, outputs: Sequence[str], as_content: bool
    ) -> None:
        self._spec = ModelSpec(name=model_name, signature_name=signature_name)
        self._spec.version.value = version
        self._outputs = tuple(outputs)
        self._single = self._outputs[0] if len(self._outputs) == 1 else None
        self._as_content = as_content
        self._templates: dict[tuple[Any, ...], list[bytes]] = {}

    def encode(self, outputs: Outputs) -> bytes:
        """Write the PredictResponse; raises StatusError for a dtype that has no TensorProto."""
        if self._single is not None:
            array = outputs[self._single]
            template = self._templates.get((array.dtype.char, array.shape))
            if template is not None:
                head, tail = template
                return head + array.tobytes() + tail
        return self._encode(outputs)

    def _encode(self, outputs: Outputs) -> bytes:
        arrays = [outputs[name] for name in self._outputs]
        key = tuple(part for array in arrays for part in (array.dtype.char, array.shape))
        template = self._templates.get(key)
        if template is None:
            if not all(self._is_raw(array) for array in arrays):
                return self._encode_by_protobuf(arrays)
            if len(self._templates) >= _TEMPLATES_MAX:
                self._templates.clear()
            template = self._templates[key] = self._template(arrays)
        pieces = [template[0]]
        for array, after in zip(arrays, template[1:], strict=True):
            pieces += (array.tobytes(), after)
        return b"".join(pieces)

    def _is_raw(self, array: NDArray[Any]) -> bool:
        character = array.dtype.char
        return character in (_NUMBERS if self._as_content else _RAW_FIELDS) and array.dtype.isnative

    def _template(self, arrays: Sequence[NDArray[Any]]) -> list[bytes]:
        """The bytes before, between and after the values of the arrays."""
        pieces = [b""]
        for name, array in zip(self._outputs, arrays, strict=True):
            field = _CONTENT_FIELD if self._as_content else _RAW_FIELDS[array.dtype.char]
            before = _tensor_head(array)
            if array.nbytes:
                before += _head(field, array.nbytes)
            key = _head(1, len(name.encode())) + name.encode()
            value = _head(2, len(before) + array.nbytes) + before
            pieces[-1] += _head(1, len(key) + len(value) + array.nbytes) + key + value
            pieces.append(b"")
        spec = self._spec.SerializeToString()
        pieces[-1] += _head(2, len(spec)) + spec
        return pieces

    def _encode_by_protobuf(self, arrays: Sequence[NDArray[Any]]) -> bytes:
        response = PredictResponse()
        response.model_spec.CopyFrom(self._spec)
        for name, array in zip(self._outputs, arrays, strict=True):
            try:
                fill_tensor(response.outputs[name], array, as_content=self._as_content)
            except ValueError as error:
                raise StatusError("INTERNAL", f"output {name}: {error}") from error
        return bytes(response.SerializeToString())


def _tensor_head(array: NDArray[Any]) -> bytes:
    proto = TensorProto(dtype=datatype_number(array.dtype.name))
    proto.tensor_shape.SetInParent()
    for size in array.shape:
        proto.tensor_shape.dim.add().size = size
    return bytes(proto.SerializeToString())


def _head(field: int, size: int) -> bytes:
    """Tag and length of a field of bytes."""
    return bytes([field << 3 | _LENGTH_DELIMITED]) + varint(size)
