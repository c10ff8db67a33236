"""How do a model's outputs become the bytes of a PredictResponse in a microsecond?

Answers of the same outputs, dtypes and shapes differ only in their values: everything else is written once. That
holds where values travel as plain bytes: floats and bools in their packed fields, every number in tensor_content
(--enable_serialization_as_tensor_content). Other answers are written by protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from batchtune.server.calls.contract import Outputs
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import ModelSpec, PredictResponse, TensorProto
from batchtune.wire.tfserving.tensors import datatype_number, fill_tensor
from batchtune.wire.varint import varint

_TEMPLATES_MAX = 256
_LENGTH_DELIMITED = 2
_CONTENT_FIELD = 4
# numpy's type character → the packed field whose bytes are the array's own.
_RAW_FIELDS = {"f": 5, "d": 6, "?": 11, "F": 9, "D": 12}
_NUMBERS = "fdFDbhilqBHILQe?"


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
