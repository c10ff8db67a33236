"""Which protobuf messages does KServe v2's gRPC speak? Built here from its grammar, without protoc or tritonclient.

Fields that we neither send nor read (`parameters`, mostly) are left out: protobuf passes over them. The pool is our
own, since tritonclient registers the same names in the default one. Source: KServe's and Triton's grpc_service.proto;
the statistics are an extension of Triton's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from batchtune.wire.descriptors import add_messages
from batchtune.wire.kserve.tensors import numpy_name
from batchtune.wire.signature import Signature, TensorSpec

INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"
METADATA_PATH = "/inference.GRPCInferenceService/ModelMetadata"
STATISTICS_PATH = "/inference.GRPCInferenceService/ModelStatistics"

_MESSAGES = (
    (
        "InferTensorContents: bool* bool_contents=1, int32* int_contents=2, int64* int64_contents=3, "
        "uint32* uint_contents=4, uint64* uint64_contents=5, float* fp32_contents=6, "
        "double* fp64_contents=7, bytes* bytes_contents=8"
    ),
    "InferTensor: string name=1, string datatype=2, int64* shape=3, InferTensorContents contents=5",
    (
        "ModelInferRequest: string model_name=1, string model_version=2, InferTensor* inputs=5, "
        "bytes* raw_input_contents=7"
    ),
    (
        "ModelInferResponse: string model_name=1, string model_version=2, InferTensor* outputs=5, "
        "bytes* raw_output_contents=6"
    ),
    "ModelMetadataRequest: string name=1, string version=2",
    "TensorMetadata: string name=1, string datatype=2, int64* shape=3",
    (
        "ModelMetadataResponse: string name=1, string* versions=2, string platform=3, "
        "TensorMetadata* inputs=4, TensorMetadata* outputs=5"
    ),
    "ModelStatisticsRequest: string name=1, string version=2",
    "StatisticDuration: uint64 count=1, uint64 ns=2",
    "InferStatistics: StatisticDuration success=1, StatisticDuration fail=2, StatisticDuration queue=3",
    (
        "InferBatchStatistics: uint64 batch_size=1, StatisticDuration compute_input=2, "
        "StatisticDuration compute_infer=3, StatisticDuration compute_output=4"
    ),
    (
        "ModelStatistics: string name=1, string version=2, uint64 inference_count=4, "
        "uint64 execution_count=5, InferStatistics inference_stats=6, InferBatchStatistics* batch_stats=7"
    ),
    "ModelStatisticsResponse: ModelStatistics* model_stats=1",
)


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="kserve.proto", package="inference", syntax="proto3")
    add_messages(file, _MESSAGES)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{message.name}"))
        for message in file.message_type
    }


_CLASSES = _message_classes()
ModelInferRequest = _CLASSES["ModelInferRequest"]
ModelInferResponse = _CLASSES["ModelInferResponse"]
ModelMetadataRequest = _CLASSES["ModelMetadataRequest"]
ModelMetadataResponse = _CLASSES["ModelMetadataResponse"]
ModelStatisticsRequest = _CLASSES["ModelStatisticsRequest"]
ModelStatisticsResponse = _CLASSES["ModelStatisticsResponse"]


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
