"""TensorFlow Serving's services as grpcio calls them: `Stub(channel, "PredictionService").Predict(request)`."""

from __future__ import annotations

from typing import Any

from google.protobuf import message_factory

from batchtune.wire.tfserving.messages import POOL


class Stub:
    """As the generated stubs, whose messages would bring TensorFlow along; `channel` may be one of grpc.aio."""

    def __init__(self, channel: Any, service: str) -> None:
        for method in POOL.FindServiceByName(f"tensorflow.serving.{service}").methods:
            call = channel.unary_unary(
                f"/tensorflow.serving.{service}/{method.name}",
                request_serializer=message_factory.GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)
