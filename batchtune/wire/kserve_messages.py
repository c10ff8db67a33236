"""Which protobuf messages does KServe v2's gRPC speak? Built here from its grammar, without protoc or tritonclient.

Fields that we neither send nor read (`parameters`, mostly) are left out: protobuf passes over them. The pool is our
own, since tritonclient registers the same names in the default one. Source: KServe's and Triton's grpc_service.proto;
the statistics are an extension of Triton's.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"
METADATA_PATH = "/inference.GRPCInferenceService/ModelMetadata"
STATISTICS_PATH = "/inference.GRPCInferenceService/ModelStatistics"

_PROTO = """
message InferTensorContents {
  repeated bool bool_contents = 1;
  repeated int32 int_contents = 2;
  repeated int64 int64_contents = 3;
  repeated uint32 uint_contents = 4;
  repeated uint64 uint64_contents = 5;
  repeated float fp32_contents = 6;
  repeated double fp64_contents = 7;
  repeated bytes bytes_contents = 8;
}
message InferTensor {
  string name = 1;
  string datatype = 2;
  repeated int64 shape = 3;
  InferTensorContents contents = 5;
}
message ModelInferRequest {
  string model_name = 1;
  string model_version = 2;
  repeated InferTensor inputs = 5;
  repeated bytes raw_input_contents = 7;
}
message ModelInferResponse {
  string model_name = 1;
  string model_version = 2;
  repeated InferTensor outputs = 5;
  repeated bytes raw_output_contents = 6;
}
message ModelMetadataRequest {
  string name = 1;
  string version = 2;
}
message TensorMetadata {
  string name = 1;
  string datatype = 2;
  repeated int64 shape = 3;
}
message ModelMetadataResponse {
  string name = 1;
  repeated string versions = 2;
  string platform = 3;
  repeated TensorMetadata inputs = 4;
  repeated TensorMetadata outputs = 5;
}
message ModelStatisticsRequest {
  string name = 1;
  string version = 2;
}
message StatisticDuration {
  uint64 count = 1;
  uint64 ns = 2;
}
message InferStatistics {
  StatisticDuration success = 1;
  StatisticDuration fail = 2;
  StatisticDuration queue = 3;
}
message InferBatchStatistics {
  uint64 batch_size = 1;
  StatisticDuration compute_input = 2;
  StatisticDuration compute_infer = 3;
  StatisticDuration compute_output = 4;
}
message ModelStatistics {
  string name = 1;
  string version = 2;
  uint64 inference_count = 4;
  uint64 execution_count = 5;
  InferStatistics inference_stats = 6;
  repeated InferBatchStatistics batch_stats = 7;
}
message ModelStatisticsResponse {
  repeated ModelStatistics model_stats = 1;
}
"""
_MESSAGE = re.compile(r"message (\w+) \{([^}]*)\}")
_FIELD = re.compile(r"(repeated )?(\w+) (\w+) = (\d+);")


def _message_classes() -> dict[str, Any]:
    proto = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="kserve.proto", package="inference", syntax="proto3")
    for name, body in _MESSAGE.findall(_PROTO):
        message = file.message_type.add(name=name)
        for repeated, kind, field_name, number in _FIELD.findall(body):
            label = proto.LABEL_REPEATED if repeated else proto.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=int(number), label=label)
            if kind[0].isupper():
                field.type, field.type_name = proto.TYPE_MESSAGE, f".inference.{kind}"
            else:
                field.type = proto.Type.Value(f"TYPE_{kind.upper()}")
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
