"""Which services and messages does the server speak? grpc.reflection v1 and v1alpha, for tools such as grpcurl."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from batchtune.wire.grpc_call import GrpcStream
from batchtune.wire.protos import HEALTH_POOL, PredictRequest
from batchtune.wire.status import GRPC_CODES, StatusError

REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

_Field = descriptor_pb2.FieldDescriptorProto
_NOT_FOUND = GRPC_CODES["NOT_FOUND"]


def _add_field(message: Any, number: int, name: str, kind: int, **settings: Any) -> None:
    message.field.add(name=name, number=number, type=kind, **{"label": _Field.LABEL_OPTIONAL, **settings})


def _reflection_file(package: str) -> descriptor_pb2.FileDescriptorProto:
    """Describe grpc/reflection/<version>/reflection.proto: both versions are alike but for the package."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package.replace('.', '/')}/reflection.proto", package=package, syntax="proto3"
    )
    repeated = {"label": _Field.LABEL_REPEATED}
    extension = file.message_type.add(name="ExtensionRequest")
    _add_field(extension, 1, "containing_type", _Field.TYPE_STRING)
    _add_field(extension, 2, "extension_number", _Field.TYPE_INT32)
    request = file.message_type.add(name="ServerReflectionRequest")
    request.oneof_decl.add(name="message_request")
    _add_field(request, 1, "host", _Field.TYPE_STRING)
    _add_field(request, 3, "file_by_filename", _Field.TYPE_STRING, oneof_index=0)
    _add_field(request, 4, "file_containing_symbol", _Field.TYPE_STRING, oneof_index=0)
    _add_field(
        request,
        5,
        "file_containing_extension",
        _Field.TYPE_MESSAGE,
        type_name=f".{package}.ExtensionRequest",
        oneof_index=0,
    )
    _add_field(request, 6, "all_extension_numbers_of_type", _Field.TYPE_STRING, oneof_index=0)
    _add_field(request, 7, "list_services", _Field.TYPE_STRING, oneof_index=0)
    files = file.message_type.add(name="FileDescriptorResponse")
    _add_field(files, 1, "file_descriptor_proto", _Field.TYPE_BYTES, **repeated)
    numbers = file.message_type.add(name="ExtensionNumberResponse")
    _add_field(numbers, 1, "base_type_name", _Field.TYPE_STRING)
    _add_field(numbers, 2, "extension_number", _Field.TYPE_INT32, **repeated)
    service = file.message_type.add(name="ServiceResponse")
    _add_field(service, 1, "name", _Field.TYPE_STRING)
    services = file.message_type.add(name="ListServiceResponse")
    _add_field(
        services, 1, "service", _Field.TYPE_MESSAGE, type_name=f".{package}.ServiceResponse", **repeated
    )
    error = file.message_type.add(name="ErrorResponse")
    _add_field(error, 1, "error_code", _Field.TYPE_INT32)
    _add_field(error, 2, "error_message", _Field.TYPE_STRING)
    response = file.message_type.add(name="ServerReflectionResponse")
    response.oneof_decl.add(name="message_response")
    _add_field(response, 1, "valid_host", _Field.TYPE_STRING)
    _add_field(
        response, 2, "original_request", _Field.TYPE_MESSAGE, type_name=f".{package}.ServerReflectionRequest"
    )
    for number, name, kind in (
        (4, "file_descriptor_response", "FileDescriptorResponse"),
        (5, "all_extension_numbers_response", "ExtensionNumberResponse"),
        (6, "list_services_response", "ListServiceResponse"),
        (7, "error_response", "ErrorResponse"),
    ):
        _add_field(response, number, name, _Field.TYPE_MESSAGE, type_name=f".{package}.{kind}", oneof_index=0)
    method = file.service.add(name="ServerReflection").method.add(
        name="ServerReflectionInfo", client_streaming=True, server_streaming=True
    )
    method.input_type = f".{package}.ServerReflectionRequest"
    method.output_type = f".{package}.ServerReflectionResponse"
    return file


class Reflection:
    """Answers the messages of one version of the reflection service."""

    def __init__(self, service: str, services: tuple[str, ...]) -> None:
        package = service.rpartition(".")[0]
        own_pool = descriptor_pool.DescriptorPool()
        own_pool.Add(_reflection_file(package))
        self._request: Any = _message_class(own_pool, f"{package}.ServerReflectionRequest")
        self._response: Any = _message_class(own_pool, f"{package}.ServerReflectionResponse")
        # Not from the default pool: a tool's own registration of the same file must not clash.
        self._pools = (PredictRequest.DESCRIPTOR.file.pool, HEALTH_POOL, own_pool)
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
    found: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        one = waiting.pop(0)
        if one.name not in found:
            found[one.name] = one.serialized_pb
            waiting.extend(one.dependencies)
    return list(found.values())
