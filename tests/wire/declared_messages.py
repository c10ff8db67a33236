"""`python -m tests.wire.declared_messages`: write messages.binpb from tensorflow-serving-api and tensorflow."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

from google.protobuf import descriptor_pb2

SERVICES = (
    "apis.model_service",
    "apis.prediction_service",
    "apis.prediction_log",
    "config.model_server_config",
)


def their_files() -> descriptor_pb2.FileDescriptorSet:
    """The files of SERVICES and all that they import, dependencies first, as the installed packages declare them.

    For a process of its own: TensorFlow's package is entered as a bare namespace, so that its runtime stays out.
    """
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("tensorflow is not installed", name="tensorflow")
    sys.modules["tensorflow"] = types.ModuleType("tensorflow")
    sys.modules["tensorflow"].__path__ = list(spec.submodule_search_locations)
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}

    def add(file: object) -> None:
        if file.name not in files:
            for needed in file.dependencies:
                add(needed)
            files[file.name] = descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)

    for name in SERVICES:
        add(importlib.import_module(f"tensorflow_serving.{name}_pb2").DESCRIPTOR)
    return descriptor_pb2.FileDescriptorSet(file=files.values())


if __name__ == "__main__":
    from batchtune.wire.tfserving.messages import DESCRIPTORS

    DESCRIPTORS.write_bytes(their_files().SerializeToString())
