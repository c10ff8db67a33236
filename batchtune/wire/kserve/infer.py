"""How is a model called in KServe v2 (Triton, KServe, OpenVINO Model Server): by JSON, JSON with binary data, gRPC?

The client's side: requests are encoded, answers decoded. Source: KServe's open inference protocol, and Triton's
extension for binary tensor data, in which the raw tensors follow the JSON in the order in which it names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from batchtune.wire.kserve.messages import ModelInferRequest, ModelInferResponse
from batchtune.wire.kserve.tensors import datatype_of, from_contents, from_json, from_raw, to_json, to_raw

JSON_LENGTH_HEADER = "Inference-Header-Content-Length"
"""An HTTP header of requests and answers with binary data: how many bytes of JSON come before them."""

_WHITESPACE = b" \t\r\n"


def encode_infer_json(inputs: Mapping[str, NDArray[Any]], *, binary: bool = False) -> bytes:
    """Write the body of a REST infer call; with `binary` the tensors follow as raw bytes, and are asked for as such.

    Raises ValueError for an array without a KServe datatype, or that JSON cannot hold (FP16, BF16, other BYTES than
    UTF-8).
    """
    entries: list[dict[str, Any]] = []
    tails: list[bytes] = []
    for name, array in inputs.items():
        entry: dict[str, Any] = {"name": name, "shape": array.shape, "datatype": datatype_of(array)}
        if binary:
            raw = to_raw(array)
            tails.append(raw)
            entry["parameters"] = {"binary_data_size": len(raw)}
        else:
            entry["data"] = to_json(array)
        entries.append(entry)
    document: dict[str, Any] = {"inputs": entries}
    if binary:
        document["parameters"] = {"binary_data_output": True}
    if binary or all(array.dtype.kind != "f" or np.isfinite(array).all() for array in inputs.values()):
        return b"".join((orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), *tails))
    return json.dumps(document, default=lambda array: array.tolist()).encode()  # NaN as Triton reads it


def json_length(body: bytes) -> int:
    """Say after how many bytes of a body its JSON ends and its binary data begin; raises ValueError if never.

    The value of `JSON_LENGTH_HEADER`, for who has the body only.
    """
    start = len(body) - len(body.lstrip(_WHITESPACE))
    try:
        # Latin-1 makes every byte one character, so that what is found counts bytes.
        _, end = json.JSONDecoder().raw_decode(body.decode("latin-1"), start)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON at the start: {error}") from error
    return end


def decode_infer_json(body: bytes) -> dict[str, NDArray[Any]]:
    """Read the answer of a REST infer call, with or without binary data, into outputs by name.

    Bare NaN and Infinity are accepted, as Triton writes them. Raises ValueError for anything that is not such an
    answer; a server's `{"error": …}` becomes the text of the ValueError.
    """
    end = json_length(body)
    try:
        document = orjson.loads(body[:end])
    except orjson.JSONDecodeError:
        document = json.loads(body[:end])
    if not isinstance(document, dict):
        raise ValueError("the answer is not a JSON object")
    entries = document.get("outputs")
    if not isinstance(entries, list):
        raise ValueError(str(document.get("error", "the answer has no list of 'outputs'")))
    outputs: dict[str, NDArray[Any]] = {}
    for entry in entries:
        name, array, end = _read_entry(entry, body, end)
        outputs[name] = array
    if body[end:].strip(_WHITESPACE):
        raise ValueError(f"{len(body) - end} bytes follow that belong to no output")
    return outputs


def encode_infer_request(
    model_name: str, inputs: Mapping[str, NDArray[Any]], *, version: int | None = None
) -> bytes:
    """Serialise a ModelInferRequest with raw contents; raises ValueError for an array without a KServe datatype."""
    request = ModelInferRequest(model_name=model_name, model_version="" if version is None else str(version))
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        request.raw_input_contents.append(to_raw(array))
    return bytes(request.SerializeToString(deterministic=True))


def decode_infer_response(message: bytes) -> dict[str, NDArray[Any]]:
    """Parse a ModelInferResponse, raw or typed, into its outputs by name; raises ValueError when it is not one."""
    try:
        response = ModelInferResponse.FromString(message)
    except DecodeError as error:
        raise ValueError(f"not a ModelInferResponse: {error}") from error
    raws = response.raw_output_contents
    if raws and len(raws) != len(response.outputs):
        raise ValueError(f"{len(response.outputs)} outputs come with {len(raws)} raw contents")
    outputs: dict[str, NDArray[Any]] = {}
    for position, output in enumerate(response.outputs):
        with _naming(output.name):
            if raws:
                array = from_raw(raws[position], output.datatype, output.shape)
            else:
                array = from_contents(output.contents, output.datatype, output.shape)
        outputs[output.name] = array
    return outputs


def _read_entry(entry: Any, body: bytes, position: int) -> tuple[str, NDArray[Any], int]:
    """An output's name and array, and where the binary data go on after it."""
    match entry:
        case {
            "name": str(name),
            "datatype": str(datatype),
            "shape": [*shape],
            "parameters": {"binary_data_size": int(size)},
        }:
            with _naming(name):
                if not 0 <= size <= len(body) - position:
                    raise ValueError(f"{size} bytes are announced; {len(body) - position} follow")
                return name, from_raw(body[position : position + size], datatype, shape), position + size
        case {"name": str(name), "datatype": str(datatype), "shape": [*shape], "data": data}:
            with _naming(name):
                return name, from_json(data, datatype, shape), position
    raise ValueError("an output lacks name, datatype, shape, or its data")


@contextmanager
def _naming(output_name: str) -> Iterator[None]:
    """Say which output a ValueError is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"output {output_name!r}: {error}") from error
