"""A gRPC Predict call: decoded, checked against its model, run and answered.

Texts and the order of checks are TensorFlow Serving's (servables/tensorflow/predict_util.cc and TensorFlow's
cc/saved_model/util.cc). The content of a request beside its values is checked once for each version of a
model.

The requests of one client often differ only in the values of their tensors. So a request that protobuf has
parsed leaves a template: the bytes around the values, and the position of each tensor's values. A later
message of that length with the template's bytes is the template's request with other values, and its arrays
are views of the message. A message that fits no template is parsed by protobuf; both ways give equal arrays.

Answers with equal outputs, dtypes and shapes differ only in their values, so the bytes around these are kept
too. That holds where values travel as plain bytes: floats and bools in their packed fields, every number in
tensor_content (--enable_serialization_as_tensor_content). Other answers are written by protobuf.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from batchtune.server.calls.pending_call import (
    ModelTimes,
    Outputs,
    PendingCall,
    PendingCalls,
    check_predict_method,
)
from batchtune.server.models.model_repository import ModelRepository
from batchtune.server.models.servable import Servable
from batchtune.wire.encoding import Memo, length_delimited, read_fields
from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature
from batchtune.wire.status import StatusError, invalid_argument
from batchtune.wire.tfserving.messages import (
    ModelSpec,
    PredictRequest,
    PredictResponse,
    SignatureDefMap,
    TensorProto,
)
from batchtune.wire.tfserving.tensors import (
    RAW_FIELDS,
    datatype_number,
    fill_tensor,
    numpy_name,
    tensor_from_proto,
)

_LITERAL_BYTES_MAX = 1024
"""Most bytes beside the values that a template or plan keeps; usual are 60, and 20 for each input."""
_FIELDS_MAX = 2048
"""Most inputs and output names in one request; 70,000 in 0.8 MB held the event loop for 400 ms."""
_CONTENT_FIELD = 4
# What travels as plain little-endian bytes: the packed field of a TensorProto that holds them so, else tensor_content.
_RAW_DTYPES = frozenset(
    ["float16", "float32", "float64"] + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


class PredictCalls:
    """Answers Predict calls, later, by way of `pending`.

    as_content: whether to write tensors as tensor_content (--enable_serialization_as_tensor_content). check_methods:
    whether to check the signatures' method names (--enable_signature_method_name_check).
    """

    def __init__(
        self,
        models: ModelRepository,
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
        self._bindings: Memo[PredictPlan, _Binding] = Memo(1_024)

    def start(self, call: GrpcCall) -> None:
        """Start a Predict call; `call` gets its answer or error later, a refused request its error at once."""
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
        """Check a plan against a version, and return the result as a binding.

        Raises StatusError for an unknown signature or wrong inputs. Wrong names of outputs, which TensorFlow
        Serving notices only after it has read the tensors, become the binding's `refusal`.
        """
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
            times=self._pending.times(plan.model_name, "Predict"),
        )
        if plan.remembered:
            self._bindings.keep(plan, binding)
        return binding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Binding:
    """The result of checking a plan against a version of a model; refers to the version only weakly.

    output_names None: all. defaults: input -> the signature's default, of the inputs that the plan lacks.
    encode: the outputs -> bytes of the answer. refusal: message of the error of such requests, "": they run.
    """

    servable: weakref.ref[Servable]
    signature_name: str
    output_names: tuple[str, ...] | None
    defaults: Mapping[str, NDArray[Any]]
    encode: Callable[[Outputs], bytes]
    refusal: str
    times: ModelTimes


def _check_inputs(given: Iterable[str], signature: Signature, servable: Servable) -> dict[str, NDArray[Any]]:
    """Check the names of a request's inputs; returns the signature's defaults of the missing ones, by name.

    Raises StatusError INVALID_ARGUMENT for a missing input without a default, and for an unknown name.
    """
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
    """Describe the first output name that is unknown or given twice; "" if none is."""
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
    """Writes the answers of one signature of one version, with the outputs named, in their order.

    as_content: whether to write tensors as tensor_content (--enable_serialization_as_tensor_content).
    """

    def __init__(
        self, *, model_name: str, version: int, signature_name: str, outputs: Sequence[str], as_content: bool
    ) -> None:
        self._spec = ModelSpec(name=model_name, signature_name=signature_name)
        self._spec.version.value = version
        self._outputs = tuple(outputs)
        self._single = self._outputs[0] if len(self._outputs) == 1 else None
        self._as_content = as_content
        self._templates: Memo[tuple[Any, ...], list[bytes]] = Memo(256)

    def encode(self, outputs: Outputs) -> bytes:
        """Return the bytes of the PredictResponse; raises StatusError INTERNAL for an unknown dtype."""
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
            template = self._templates.keep(key, self._template(arrays))
        pieces = [template[0]]
        for array, after in zip(arrays, template[1:], strict=True):
            pieces += (array.tobytes(), after)
        return b"".join(pieces)

    def _is_raw(self, array: NDArray[Any]) -> bool:
        raw = array.dtype.char in "fdFDbhilqBHILQe?" if self._as_content else array.dtype.name in RAW_FIELDS
        return raw and array.dtype.isnative

    def _template(self, arrays: Sequence[NDArray[Any]]) -> list[bytes]:
        """Return the bytes before, between and after the values of the arrays: one more piece than arrays."""
        pieces = [b""]
        for name, array in zip(self._outputs, arrays, strict=True):
            field = _CONTENT_FIELD if self._as_content else RAW_FIELDS[array.dtype.name]
            before = _tensor_head(array)
            if array.nbytes:
                before += length_delimited(field, array.nbytes)
            key = length_delimited(1, len(name.encode())) + name.encode()
            value = length_delimited(2, len(before) + array.nbytes) + before
            pieces[-1] += length_delimited(1, len(key) + len(value) + array.nbytes) + key + value
            pieces.append(b"")
        spec = self._spec.SerializeToString()
        pieces[-1] += length_delimited(2, len(spec)) + spec
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PredictPlan:
    """The content of a Predict request apart from its tensors: model, version or label, signature, names.

    signature_name "": serving_default; input_names: sorted; output_filter (): all outputs. Requests with equal content
    share one object, unless it is too long to be `remembered` (above _LITERAL_BYTES_MAX characters).
    """

    model_name: str
    version: int | None
    label: str | None
    signature_name: str
    input_names: tuple[str, ...]
    output_filter: tuple[str, ...]
    remembered: bool


class PredictRequests:
    """Decodes Predict requests, by the plans and templates of earlier requests where these fit.

    A plan is a request's content apart from its tensors; a template is the bytes around a request's values, by which
    further requests are read without parsing. Whatever clients send, at most 4,096 templates and 512 plans of 1 kB each
    are stored: about 10 MB in all.
    """

    def __init__(self) -> None:
        self._templates: Memo[int, list[_Template | None]] = Memo(512)  # by length
        self._plans: Memo[tuple[Any, ...], PredictPlan] = Memo(512)

    def decode(self, message: bytes) -> tuple[PredictPlan, dict[str, NDArray[Any]] | None, Any]:
        """Return (plan, inputs, request) of a serialised PredictRequest.

        plan: the request's content apart from its tensors. Where a template of an earlier request fits, inputs is name
        -> read-only view of `message`, and request is None; else inputs is None and request is the parsed
        PredictRequest, for `decode_inputs`.

        Raises:
            StatusError: INTERNAL when the message is no PredictRequest; INVALID_ARGUMENT without a model_spec, or with
                thousands of inputs.
        """
        known = self._templates.get(len(message))
        for template in known or ():
            if template is not None and (inputs := template.match(message)) is not None:
                return template.plan, inputs, None
        return self._parse(message, known)

    def _parse(self, message: bytes, known: list[_Template | None] | None) -> tuple[PredictPlan, None, Any]:
        """Parse a message that no template fits, and add its own to `known`, the templates of its length.

        None stands there for a message of which no template can be made: at most 8 are tried.
        """
        # A message of so many bytes has at most 8,192 fields, which protobuf reads in 2 ms.
        uncounted_bytes_max = 1 << 14
        if len(message) > uncounted_bytes_max and _has_too_many_fields(message):
            raise StatusError(
                "INVALID_ARGUMENT", f"a request with more than {_FIELDS_MAX} inputs and outputs is not read"
            )
        try:
            request = PredictRequest.FromString(message)
        except DecodeError as error:
            raise StatusError("INTERNAL", f"Failed to parse the PredictRequest: {error}") from error
        plan = self._plan(request)
        templates_per_length = 8
        if known is None:
            self._templates.keep(len(message), [])
        elif len(known) < templates_per_length:
            known.append(_make_template(message, request, plan))
        return plan, None, request

    def _plan(self, request: Any) -> PredictPlan:
        if not request.HasField("model_spec"):
            raise StatusError("INVALID_ARGUMENT", "Missing ModelSpec")
        name, version, label, signature_name = read_model_spec(request.model_spec)
        key = (
            name,
            version,
            label,
            signature_name,
            tuple(sorted(request.inputs)),
            tuple(request.output_filter),
        )
        plan = self._plans.get(key)
        if plan is None:
            words = (name, label or "", signature_name, *key[4], *key[5])
            plan = PredictPlan(
                model_name=name,
                version=version,
                label=label,
                signature_name=signature_name,
                input_names=key[4],
                output_filter=key[5],
                remembered=sum(map(len, words)) <= _LITERAL_BYTES_MAX,
            )
            if plan.remembered:
                self._plans.keep(key, plan)
        return plan


def read_model_spec(spec: Any) -> tuple[str, int | None, str | None, str]:
    """Return (name, version, label, signature name) of a ModelSpec; a field that is not set gives "", None, None or
    ""."""
    choice = spec.WhichOneof("version_choice")
    return (
        spec.name,
        spec.version.value if choice == "version" else None,
        spec.version_label if choice == "version_label" else None,
        spec.signature_name,
    )


def decode_inputs(request: Any) -> dict[str, NDArray[Any]]:
    """Return input name -> array for a parsed PredictRequest.

    Raises StatusError INVALID_ARGUMENT for a malformed tensor, and for one whose shape is far larger than its
    message.
    """
    inputs = {}
    tensor_bytes = 0
    for name in sorted(request.inputs):
        try:
            # What is filled takes memory while the request waits, and 1,024 may.
            array = tensor_from_proto(request.inputs[name], filled_bytes_max=1 << 18)
        except ValueError as error:
            raise StatusError("INVALID_ARGUMENT", f"tensor parsing error: {name}") from error
        # Rows without values count too: an answer has values for each.
        tensor_bytes += array.nbytes or math.prod(filter(None, array.shape)) * array.itemsize
        # A value repeated over 512 MiB took 35 bytes; 3 MB are an image of 512 x 512, 8 bytes an int64 sent in one.
        if tensor_bytes > 1 << 22 and tensor_bytes > 8 * request.ByteSize():
            raise StatusError(
                "INVALID_ARGUMENT", f"tensor parsing error: {name}: too few values for its shape"
            )
        inputs[name] = array
    return inputs


class _Template:
    """A message with gaps for the values of its tensors.

    literals: (offset, bytes) of what lies around the values; gaps: (input name, shape, dtype, offset) of each
    tensor.
    """

    __slots__ = ("_gaps", "_literals", "plan")

    def __init__(
        self,
        literals: list[tuple[int, bytes]],
        gaps: list[tuple[str, tuple[int, ...], np.dtype[Any], int]],
        plan: PredictPlan,
    ) -> None:
        self._literals = literals
        self._gaps = gaps
        self.plan = plan

    def match(self, message: bytes) -> dict[str, NDArray[Any]] | None:
        """Return name -> view of the message for its inputs, if its literals agree with the template's; else None.

        The message must have the template's length.
        """
        for offset, literal in self._literals:
            if not message.startswith(literal, offset):
                return None
        return {name: np.ndarray(shape, dtype, message, offset) for name, shape, dtype, offset in self._gaps}


def _make_template(message: bytes, request: Any, plan: PredictPlan) -> _Template | None:
    """Make a template of a message, given parsed too; None where values are not plain bytes in one place.

    None also where the literals exceed _LITERAL_BYTES_MAX.
    """
    spans = _find_values(message)
    if spans is None or spans.keys() != set(request.inputs):
        return None
    if len(message) - sum(end - start for _, start, end in spans.values()) > _LITERAL_BYTES_MAX:
        return None
    gaps, literals = [], []
    end_of_last = 0
    for name, (field, start, end) in sorted(spans.items(), key=lambda item: item[1][1]):
        proto = request.inputs[name]
        try:
            dtype = np.dtype(numpy_name(proto.dtype))
            if dtype.name not in _RAW_DTYPES or field not in {_CONTENT_FIELD, RAW_FIELDS.get(dtype.name)}:
                return None
            shape = tensor_from_proto(proto).shape
        except (TypeError, ValueError):
            return None
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size != end - start or size == 0:
            return None
        gaps.append((name, shape, dtype, start))
        literals.append((end_of_last, message[end_of_last:start]))
        end_of_last = end
    literals.append((end_of_last, message[end_of_last:]))
    return _Template([literal for literal in literals if literal[1]], gaps, plan) if gaps else None


def _has_too_many_fields(message: bytes) -> bool:
    """Whether a message has more than _FIELDS_MAX top-level fields; False for bytes that are no message."""
    try:
        return any(count >= _FIELDS_MAX for count, _ in enumerate(read_fields(message, 0, len(message))))
    except (ValueError, IndexError):
        return False


def _find_values(message: bytes) -> dict[str, tuple[int, int, int]] | None:
    """Return input name -> (TensorProto field with its values, start, end) of a serialised PredictRequest.

    None where an input has no or several fields of values, or the message has another structure.
    """
    spans: dict[str, tuple[int, int, int]] = {}
    entry_fields_max = 5  # one more than a tensor of plain values has
    try:
        for number, wire_type, start, end in read_fields(message, 0, len(message)):
            if number != 2:
                continue
            entry = list(islice(read_fields(message, start, end), entry_fields_max))
            if wire_type != 2 or [(field[0], field[1]) for field in entry] != [(1, 2), (2, 2)]:
                return None
            name = message[entry[0][2] : entry[0][3]].decode()
            tensor = list(islice(read_fields(message, entry[1][2], entry[1][3]), entry_fields_max))
            values = [field for field in tensor if field[0] not in {1, 2, 3}]  # those are dtype and shape
            if name in spans or len(tensor) == entry_fields_max or len(values) != 1 or values[0][1] != 2:
                return None
            spans[name] = (values[0][0], values[0][2], values[0][3])
    except (ValueError, IndexError):
        return None
    return spans
