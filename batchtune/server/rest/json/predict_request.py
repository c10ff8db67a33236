"""Turns bodies of REST calls (predict, classify, regress) into inputs, and some results into JSON.

Checks, their order and texts are those of TensorFlow Serving's util/json_tensor.cc. A regular predict body
(lists of equal length, all values numbers of the right kind) takes a fast path: lists are flattened and
packed by `struct` (0.8 µs for 200 floats; numpy.array needs 2.4 µs). Any other body takes the slow path,
which finds the error if any.
"""

from __future__ import annotations

import re
import struct
import warnings
from array import array
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import simdjson
from numpy.typing import NDArray

from batchtune.server.rest.json.answers import decimal, quoted
from batchtune.server.rest.json.values import (
    WIRE_TYPES,
    Column,
    array_of,
    debug_text,
    decode_base64,
    dense_tensor,
    is_base64_object,
    malformed,
    parse_json,
    to_bytes,
    type_name,
)
from batchtune.wire.signature import DEFAULT_SIGNATURE, MAX_RANK, Signature, TensorSpec
from batchtune.wire.status import StatusError, invalid_argument
from batchtune.wire.tfserving.messages import Feature, Input

# The rows of numbers of most predict bodies become an array without a Python float each.
#
# simdjson writes the numbers of `{"instances": [[…], …]}` into a buffer: 200 of them cost 4 µs less than by way of
# orjson and `struct`. Whatever is not just that (another key than the default signature's name, another rank, uneven
# rows, a value that is no number, an integer beyond 64 bits, text after the value) is left to json_tensors, which reads
# the body anew.

_FLOAT64 = np.dtype("<f8")  # made once: half a microsecond of each request
_FLOAT32 = np.dtype("float32")


def float_rows_reader() -> Callable[[bytes], NDArray[np.float32] | None]:
    """Return a function that reads the matrix `instances` of a predict body as float32, shape (rows, width).

    The function returns None for a body that has more than that and the default signature's name, or has faults. For
    one thread, since its parser reuses its memory.
    """
    parse = simdjson.Parser().parse

    def read(body: bytes) -> NDArray[np.float32] | None:
        if body.find(b"{", 1) >= 0:  # rows by name
            return None
        try:
            document: Any = parse(body)
            rows = document["instances"]
            count, width = len(rows), len(rows[0])
            values = np.frombuffer(rows.as_buffer(of_type="d"), _FLOAT64).reshape(count, width)
            if not _is_matrix(body, rows, count, width):
                return None
            if len(document) > 1 and (
                len(document) > 2 or document.get("signature_name") != DEFAULT_SIGNATURE
            ):
                return None
            return values.astype(_FLOAT32)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, RuntimeWarning):
            return None

    return read


def takes_float_rows(specs: tuple[TensorSpec, ...]) -> bool:
    """Whether there is only one input, a matrix of float32."""
    return len(specs) == 1 and specs[0].dtype == "float32" and len(specs[0].shape or ()) == 2


def _is_matrix(body: bytes, rows: Any, count: int, width: int) -> bool:
    """Whether `rows`, parsed from `body`, has rows of equal length and nothing nested within them.

    All values are known to be numbers.
    """
    if count == 1:
        first = body.find(b"[")
        last = body.rfind(b"[")
        return first < last and not body[first + 1 : last].strip()
    return body.count(b"[") == count + 1 and all(len(row) == width for row in rows)


# Beyond float32 is infinity. numpy.errstate would cost 0.7 µs a request.
warnings.filterwarnings("ignore", "overflow encountered in cast", RuntimeWarning, re.escape(__name__))


def parse_predict(
    body: bytes, find_signature: Callable[[str], Signature]
) -> tuple[str, bool, dict[str, NDArray[Any]]]:
    """Parse the body of a predict call; return (signature name, whether body and answer are by row, input name ->
    array).

    find_signature: name of a signature, never "" -> the signature; may raise StatusError.

    Raises:
        StatusError: INVALID_ARGUMENT or UNIMPLEMENTED with TensorFlow Serving's text, or an error of find_signature.
    """
    document = parse_request_object(body)
    name = signature_name(document)
    signature = find_signature(name or DEFAULT_SIGNATURE)
    return signature.name, *read_inputs(body, document, name, signature)


def read_inputs(
    body: bytes, document: Mapping[str, Any], name: str, signature: Signature
) -> tuple[bool, dict[str, NDArray[Any]]]:
    """Read the inputs of a predict call from `document`, which was parsed from `body`; return (whether they are by row,
    input name -> array).

    name: the signature's name in the body; "": absent, the default is meant.

    Raises:
        StatusError: INVALID_ARGUMENT or UNIMPLEMENTED with TensorFlow Serving's text.
    """
    if not signature.inputs:
        raise invalid_argument(f"Failed to get input map for signature: {name or 'DEFAULT'}")
    if "instances" in document:
        instances = document["instances"]
        if "inputs" in document:
            raise malformed(
                document,
                "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist ",
            )
        if not isinstance(instances, list):
            raise malformed(document, "Expecting 'instances' to be an list/array")
        if not instances:
            raise malformed(document, "No values in 'instances' array")
        return True, _rows(instances, signature.inputs, _may_hold_booleans(body, document))
    if "inputs" not in document:
        raise invalid_argument("Missing 'inputs' or 'instances' key")
    return False, _columns(document["inputs"], signature.inputs, _may_hold_booleans(body, document))


def parse_request_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object; raises StatusError INVALID_ARGUMENT when it is not one."""
    document = parse_json(body)
    if not isinstance(document, dict):
        raise malformed(document, "Is not object")
    return document


def signature_name(document: Mapping[str, Any]) -> str:
    """Return the `signature_name` of a request, "" if absent; raises StatusError INVALID_ARGUMENT when it is not a
    string."""
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        raise malformed(document, "not formatted correctly. 'signature_name' key must be a string value.")
    return name


def _rows(
    instances: list[Any], specs: tuple[TensorSpec, ...], may_hold_booleans: bool
) -> dict[str, NDArray[Any]]:
    """Return the inputs, by name, of an `instances` list, whose elements are the rows."""
    first = instances[0]
    if not isinstance(first, dict):
        if len(specs) > 1:
            raise invalid_argument(
                "instances is a plain list, but expecting list of objects as multiple input tensors required as "
                "per tensorinfo_map"
            )
        values = _quickly(instances, specs[0].dtype, may_hold_booleans)
        if values is not None:
            return {specs[0].name: values}
    elif not is_base64_object(first):
        columns = _named_rows_quickly(instances, specs, may_hold_booleans)
        if columns is not None:
            return columns
    return _rows_carefully(instances, specs)


def _columns(inputs: Any, specs: tuple[TensorSpec, ...], may_hold_booleans: bool) -> dict[str, NDArray[Any]]:
    """Return the inputs, by name, of an `inputs` value, each with the shape that it has in the JSON."""
    if isinstance(inputs, dict) and not is_base64_object(inputs):
        tensors = {}
        for spec in specs:
            if spec.name not in inputs:
                raise invalid_argument(f"Missing named input: {spec.name} in 'inputs' object.")
            tensors[spec.name] = _tensor(inputs[spec.name], spec.dtype, may_hold_booleans)
        return tensors
    if len(specs) > 1:
        raise invalid_argument(
            "inputs is a plain value/list, but expecting an object as multiple input tensors required as per "
            "tensorinfo_map"
        )
    return {specs[0].name: _tensor(inputs, specs[0].dtype, may_hold_booleans)}


def _tensor(value: Any, dtype: str, may_hold_booleans: bool) -> NDArray[Any]:
    if isinstance(value, list):
        tensor = _quickly(value, dtype, may_hold_booleans)
        if tensor is not None:
            return tensor
    return dense_tensor(value, dtype)


def _named_rows_quickly(
    instances: list[Any], specs: tuple[TensorSpec, ...], may_hold_booleans: bool
) -> dict[str, NDArray[Any]] | None:
    columns = {}
    count = len(specs)
    try:
        for row in instances:
            if len(row) != count:
                return None
        for spec in specs:
            name = spec.name
            tensor = _quickly([row[name] for row in instances], spec.dtype, may_hold_booleans)
            if tensor is None:
                return None
            columns[name] = tensor
    except (KeyError, TypeError, IndexError):  # an element that is no object, or has other keys
        return None
    return columns


def _quickly(values: list[Any], dtype: str, may_hold_booleans: bool) -> NDArray[Any] | None:
    """Return nested lists as an array; None where they are irregular or values need the slow path.

    may_hold_booleans: true or false may occur in them.
    """
    shape = [len(values)]
    flat = values
    while flat and type(flat[0]) is list:
        length = len(flat[0])
        shape.append(length)
        if len(shape) > MAX_RANK:
            return None
        if len(flat) == 1:
            flat = flat[0]
        elif set(map(type, flat)) == {list} and set(map(len, flat)) == {length}:
            flat = list(chain.from_iterable(flat))
        else:
            return None
    wire_type = WIRE_TYPES.get(dtype)
    if wire_type is not None:
        if may_hold_booleans and bool in set(map(type, flat)):
            return None
        return _packed(flat, shape, dtype, wire_type)
    types = set(map(type, flat))
    if dtype == "object" and types == {str}:
        return array_of([to_bytes(text) for text in flat], shape, dtype)
    if dtype == "bool" and types == {bool}:
        return array_of(flat, shape, dtype)
    return None


def _may_hold_booleans(body: bytes, document: Mapping[str, Any]) -> bool:
    """Whether the body may have `true` or `false` as a value, which Python would take for numbers.

    It has no letter u or l beside those of its top-level keys and signature name: no. To count two letters is
    forty times cheaper than to check the types of 200 values.
    """
    if body.find(b"u") < 0 and body.find(b"l") < 0:
        return False
    keys = "".join(document) + str(document.get("signature_name", ""))
    return body.count(b"u") > keys.count("u") or body.count(b"l") > keys.count("l")


@lru_cache(maxsize=256)
def _packer(count: int, code: str) -> struct.Struct:
    return struct.Struct(f"<{count}{code}")


def _packed(flat: list[Any], shape: list[int], dtype: str, wire_type: tuple[str, str]) -> NDArray[Any] | None:
    code, wire_dtype = wire_type
    max_packed_values = 1 << 16
    try:
        if len(flat) <= max_packed_values:
            tensor = np.frombuffer(_packer(len(flat), code).pack(*flat), wire_dtype)
        else:
            tensor = np.frombuffer(array(code, flat), wire_dtype)
    except (struct.error, OverflowError, TypeError, ValueError):
        return None
    if wire_dtype == "<i4" and dtype != "int32":
        tensor = tensor.astype(dtype)
    return tensor.reshape(shape)


def _rows_carefully(instances: list[Any], specs: tuple[TensorSpec, ...]) -> dict[str, NDArray[Any]]:
    named = isinstance(instances[0], dict) and not is_base64_object(instances[0])
    by_name = {spec.name: Column(spec) for spec in specs}
    first = specs[0].name
    for index, element in enumerate(instances):
        if named and (not isinstance(element, dict) or is_base64_object(element)):
            raise invalid_argument(f"Expecting object but got list at item {index} of input list")
        if not named and isinstance(element, dict) and not is_base64_object(element):
            raise invalid_argument(f"Expecting value/list but got object at item {index} of input list")
        for name, value in element.items() if named else ((first, element),):
            try:
                if name not in by_name:
                    raise invalid_argument(f"JSON object: does not have named input: {name}")
                by_name[name].add(value)
            except StatusError as error:
                key = f" key: {name}" if named else ""
                raise invalid_argument(
                    f"Failed to process element: {index}{key} of 'instances' list. Error: {error}"
                ) from error
        if named and element.keys() != by_name.keys():
            raise invalid_argument(
                f"Failed to process element: {index} of 'instances' list. JSON object: {debug_text(element)} keys "
                f"must be equal to: {','.join(sorted(by_name))}"
            )
    if not named and len(specs) > 1:  # base64 objects, taken for values of the first input
        given, wanted = f"{{{first}}}", ",".join(sorted(by_name))
        missing = ",".join(sorted(by_name.keys() - {first}))
        raise invalid_argument(
            f"input size does not match signature: 1!={len(specs)} len({given}) != len({{{wanted}}}). "
            f"Sent extra: {{}}. Missing but required: {{{missing}}}."
        )
    return {name: column.stacked(len(instances)) for name, column in by_name.items()}


# The body of a REST classify or regress call as Examples, and their result.
#
# The checks, in order, and their texts are TensorFlow Serving's (util/json_tensor.cc).


def parse_examples(body: bytes) -> tuple[str, Any]:
    """Parse the body of a classify or regress call; return (signature name, "" if absent; Input message).

    Raises:
        StatusError: INVALID_ARGUMENT with TensorFlow Serving's text.
    """
    document = parse_request_object(body)
    name = signature_name(document)
    message = Input()
    kind = message.example_list
    if "context" in document:
        kind = message.example_list_with_context
        _fill_example(kind.context, document["context"])
        kind.context.SetInParent()
    if "examples" not in document:
        raise malformed(document, "When method is classify, key 'examples' is expected and was not found")
    examples = document["examples"]
    if not isinstance(examples, list):
        raise malformed(document, "Expecting 'examples' value to be an list/array")
    if not examples:
        raise malformed(document, "'examples' value is an empty array")
    for example in examples:
        _fill_example(kind.examples.add(), example)
    return name, message


def classification_answer(result: Any) -> bytes:
    """Return a ClassificationResult as JSON: a list of [label, score] pairs for each Example.

    Raises StatusError INVALID_ARGUMENT where it has no Examples.
    """
    if not result.classifications:
        raise invalid_argument("Cannot convert empty ClassificationResults to JSON")
    rows = [
        b", ".join(
            b"[" + quoted(scored.label.encode()) + b", " + decimal(scored.score) + b"]"
            for scored in entry.classes
        )
        for entry in result.classifications
    ]
    return b'{\n    "results": [[' + b"], [".join(rows) + b"]\n    ]\n}"


def regression_answer(result: Any) -> bytes:
    """Return a RegressionResult as JSON, a number for each Example; raises StatusError INVALID_ARGUMENT where it has
    none."""
    if not result.regressions:
        raise invalid_argument("Cannot convert empty RegressionResults to JSON")
    return (
        b'{\n    "results": ['
        + b", ".join(decimal(regression.value) for regression in result.regressions)
        + b"]\n}"
    )


def _fill_example(example: Any, value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid_argument(f"Example must be JSON object but got JSON {type_name(value)}")
    for name, content in value.items():
        feature = Feature()
        for element in content if isinstance(content, list) else (content,):
            _add_value(feature, name, element)
        example.features.feature[to_bytes(name).decode("utf-8", "replace")].CopyFrom(feature)


def _add_value(feature: Any, name: str, value: Any) -> None:
    if isinstance(value, str):
        _list_of(feature, name, "bytes_list").append(to_bytes(value))
    elif is_base64_object(value):
        _list_of(feature, name, "bytes_list").append(decode_base64(value["b64"]))
    elif isinstance(value, float):
        values = _list_of(feature, name, "float_list")
        values.append(value)
    elif isinstance(value, int):
        values = _list_of(feature, name, "int64_list")
        if not -(2**63) <= value < 2**63:
            raise invalid_argument(f"Feature: {name} has uint64_t element. Only int64_t is supported.")
        values.append(int(value))
    else:
        raise invalid_argument(f"Feature: {name} has element with unexpected JSON type: {type_name(value)}")


def _list_of(feature: Any, name: str, kind: str) -> Any:
    """Return a feature's list of one kind; raises StatusError where it has values of another kind already."""
    kind_names = {"bytes_list": "bytes", "float_list": "float", "int64_list": "int64"}
    present = feature.WhichOneof("kind")
    if present is not None and present != kind:
        raise invalid_argument(
            f"Unexpected element type in feature: {name} expecting type: {kind_names[present]}"
        )
    return getattr(feature, kind).value
