"""What does a KServe v2 model say of its inputs and outputs?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from batchtune.wire.kserve.messages import ModelMetadataResponse
from batchtune.wire.kserve.tensors import numpy_name
from batchtune.wire.signature import Signature, TensorSpec

METHOD_NAME = "kserve/infer"


def signature_from_metadata(name: str, document: Any) -> Signature:
    """The signature in the JSON of `GET /v2/models/M`; raises ValueError when it is no such document.

    KServe models have one signature and no name for it; `name` is what it is to be called.
    """
    if not isinstance(document, dict):
        raise ValueError("the metadata are not a JSON object")
    if "inputs" not in document:
        raise ValueError(str(document.get("error", "the metadata have no 'inputs'")))
    return Signature(
        name=name,
        method_name=METHOD_NAME,
        inputs=_specs(_json_tensors(document["inputs"])),
        outputs=_specs(_json_tensors(document.get("outputs", []))),
    )


def signature_from_response(name: str, message: bytes) -> Signature:
    """The signature in a ModelMetadataResponse; raises ValueError when it is not one."""
    try:
        response = ModelMetadataResponse.FromString(message)
    except DecodeError as error:
        raise ValueError(f"not a ModelMetadataResponse: {error}") from error
    inputs, outputs = (
        _specs((tensor.name, tensor.datatype, tensor.shape) for tensor in tensors)
        for tensors in (response.inputs, response.outputs)
    )
    return Signature(name=name, method_name=METHOD_NAME, inputs=inputs, outputs=outputs)


def _json_tensors(entries: Any) -> Iterable[tuple[str, str, Sequence[int]]]:
    if not isinstance(entries, list):
        raise ValueError("the metadata's tensors are not a list")
    for entry in entries:
        match entry:
            case {"name": str(name), "datatype": str(datatype), "shape": [*shape]} if all(
                isinstance(size, int) for size in shape
            ):
                yield name, datatype, shape
            case _:
                raise ValueError(f"the metadata tell no name, datatype and shape: {entry!r}")


def _specs(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=name,
            dtype=numpy_name(datatype),
            shape=tuple(None if size < 0 else size for size in shape),
        )
        for name, datatype, shape in sorted(tensors)
    )
