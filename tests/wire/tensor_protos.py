"""A TensorProto of its own: what tests put into messages."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from batchtune.wire.tfserving.messages import TensorProto
from batchtune.wire.tfserving.tensors import fill_tensor


def tensor_to_proto(array: NDArray[Any], *, as_content: bool) -> Any:
    proto = TensorProto()
    fill_tensor(proto, array, as_content=as_content)
    return proto
