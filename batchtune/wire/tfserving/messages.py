"""The protobuf messages of TensorFlow Serving's APIs, without TensorFlow.

`messages.binpb` is a FileDescriptorSet: the .proto files of the services, and all that they import, as
tensorflow-serving-api 2.21 and tensorflow 2.21 declare them (both under the Apache License 2.0).
`python -m tests.wire.declared_messages` writes it from the packages that are installed; a test compares each field with
theirs. Those packages would bring TensorFlow's runtime along: 1.9 GB, and 1.9 s at each start. The pool is our own,
since TensorFlow registers other versions of the same files in the default one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

DESCRIPTORS = Path(__file__).with_suffix(".binpb")


def new_pool() -> descriptor_pool.DescriptorPool:
    """Make a descriptor pool with the services and messages of `messages.binpb`."""
    declared = DESCRIPTORS.read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(declared).file:
        pool.Add(file)
    return pool


POOL = new_pool()


DataType: Any = enum_type_wrapper.EnumTypeWrapper(POOL.FindEnumTypeByName("tensorflow.DataType"))


def __getattr__(name: str) -> Any:
    """Return the class of a message by its name, such as `PredictRequest`; TensorFlow Serving's come first."""
    for package in ("tensorflow.serving", "tensorflow"):
        try:
            return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{package}.{name}"))
        except KeyError:
            continue
    raise AttributeError(f"no message {name} is declared")
