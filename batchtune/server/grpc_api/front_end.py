"""How is a call answered over gRPC?"""

from __future__ import annotations

from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.status import StatusError

MESSAGE_CHARACTERS_MAX = 1024
"""TensorFlow Serving cuts longer error messages (grpc_status_util.cc)."""


class GrpcFrontEnd:
    """What a pending call needs of gRPC."""

    def reply(self, client: GrpcCall, answer: bytes) -> None:
        """Answer OK."""
        client.reply(answer)

    def refuse(self, client: GrpcCall, error: StatusError) -> None:
        """Answer with a status."""
        fail_call(client, error)

    def is_gone(self, client: GrpcCall) -> bool:
        """Whether the client has cancelled the call, or is gone itself."""
        return client.cancelled


def fail_call(call: GrpcCall, error: StatusError) -> None:
    """End a call with an error, its message cut as TensorFlow Serving cuts it."""
    message = error.message
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = message[:MESSAGE_CHARACTERS_MAX] + "...TRUNCATED"
    call.fail(error.code, message)
