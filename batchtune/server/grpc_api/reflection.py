"""Which services and messages does the server speak? grpc.reflection v1 and v1alpha, for tools such as grpcurl."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2

from batchtune.wire.grpc.server_call import GrpcStream
from batchtune.wire.status import GRPC_CODES, StatusError
from batchtune.wire.tfserving.messages import PredictRequest

REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

_NOT_FOUND = GRPC_CODES["NOT_FOUND"]


def _reflection_file(version: str) -> descriptor_pb2.FileDescriptorProto:
    """grpcio-reflection carries v1alpha only; v1 is the same under another name."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    return text_format.Parse(str(file).replace("v1alpha", version), descriptor_pb2.FileDescriptorProto())


class Reflection:
    """Answers the messages of one version of the reflection service."""

    def __init__(self, service: str, services: tuple[str, ...]) -> None:
        package = service.rpartition(".")[0]
        own_pool = descriptor_pool.DescriptorPool()
        own_pool.Add(_reflection_file(package.rpartition(".")[2]))
        self._request: Any = _message_class(own_pool, f"{package}.ServerReflectionRequest")
        self._response: Any = _message_class(own_pool, f"{package}.ServerReflectionResponse")
        self._pools = (PredictRequest.DESCRIPTOR.file.pool, own_pool)
        self._services = services

    def serve(self, stream: GrpcStream) -> None:
        """Serve ServerReflectionInfo: one answer for each message, until the client has said its last."""

        def answer(message: bytes) -> None:
            try:
                stream.send(self.answer(message))
            except StatusError as error:
                stream.finish(error.code, error.message)

        stream.on_message = answer
        stream.on_end = stream.finish
        stream.on_cancel = lambda: stream.finish("CANCELLED")

    def answer(self, message: bytes) -> bytes:
        """Answer one message; what does not exist is an error inside the answer.

        Raises:
            StatusError: INTERNAL when the message is no ServerReflectionRequest.
        """
        try:
            request = self._request.FromString(message)
        except DecodeError as error:
            raise StatusError("INTERNAL", f"Failed to parse the ServerReflectionRequest: {error}") from error
        response = self._response(valid_host=request.host, original_request=request)
        asked = request.WhichOneof("message_request")
        if asked == "list_services":
            for name in sorted(self._services):
                response.list_services_response.service.add(name=name)
        elif asked == "file_by_filename":
            self._describe(response, "FindFileByName", request.file_by_filename)
        elif asked == "file_containing_symbol":
            self._describe(response, "FindFileContainingSymbol", request.file_containing_symbol)
        elif asked == "all_extension_numbers_of_type":
            self._list_extensions(response, request.all_extension_numbers_of_type)
        else:
            self._refuse(response, "nothing was asked for that exists here")
        return bytes(response.SerializeToString())

    def _describe(self, response: Any, finder: str, name: str) -> None:
        for pool in self._pools:
            try:
                file = getattr(pool, finder)(name)
            except KeyError:
                continue
            described = response.file_descriptor_response.file_descriptor_proto
            described.extend(_with_dependencies(file))
            return
        self._refuse(response, f"{name} not found")

    def _list_extensions(self, response: Any, name: str) -> None:
        """No message served here has extensions: say so for the ones that exist."""
        for pool in self._pools:
            try:
                pool.FindMessageTypeByName(name)
            except KeyError:
                continue
            response.all_extension_numbers_response.base_type_name = name
            return
        self._refuse(response, f"{name} not found")

    def _refuse(self, response: Any, why: str) -> None:
        response.error_response.error_code = _NOT_FOUND
        response.error_response.error_message = why


def load_service_descriptions() -> None:
    """Register the files of TensorFlow Serving's services, so that reflection finds them."""
    from tensorflow_serving.apis import model_service_pb2, prediction_service_pb2

    del model_service_pb2, prediction_service_pb2


def _message_class(pool: Any, name: str) -> Any:
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def _with_dependencies(file: Any) -> list[bytes]:
    """A file and all it imports, each once, the file first."""
    files: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        descriptor = waiting.pop(0)
        if descriptor.name not in files:
            files[descriptor.name] = descriptor.serialized_pb
            waiting.extend(descriptor.dependencies)
    return list(files.values())
