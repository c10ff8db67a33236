"""How does the body of a REST classify or regress call become Examples, and how is their result written?

The checks, in order, and their texts are TensorFlow Serving's (util/json_tensor.cc).
"""

from __future__ import annotations

from typing import Any

from batchtune.server.rest.json.answers import decimal, quoted
from batchtune.server.rest.json.dense_tensor import decode_base64, is_base64_object
from batchtune.server.rest.json.predict_request import parse_request_object, signature_name
from batchtune.server.rest.json.text import debug_text, to_bytes, type_name
from batchtune.wire.status import StatusError, invalid_argument
from batchtune.wire.tfserving.messages import Feature, Input

_KIND_NAMES = {"bytes_list": "bytes", "float_list": "float", "int64_list": "int64"}


def parse_examples(body: bytes) -> tuple[str, Any]:
    """Read the body of a classify or regress call: the signature's name ("" when absent) and an Input message.

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
        raise _malformed(document, "When method is classify, key 'examples' is expected and was not found")
    examples = document["examples"]
    if not isinstance(examples, list):
        raise _malformed(document, "Expecting 'examples' value to be an list/array")
    if not examples:
        raise _malformed(document, "'examples' value is an empty array")
    for example in examples:
        _fill_example(kind.examples.add(), example)
    return name, message


def classification_answer(result: Any) -> bytes:
    """Write a ClassificationResult: a list of [label, score] pairs for each example."""
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
    """Write a RegressionResult: one number for each example."""
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
    """The feature's list of one kind; the first value of a feature settles its kind."""
    present = feature.WhichOneof("kind")
    if present is not None and present != kind:
        raise invalid_argument(
            f"Unexpected element type in feature: {name} expecting type: {_KIND_NAMES[present]}"
        )
    return getattr(feature, kind).value


def _malformed(value: Any, complaint: str) -> StatusError:
    return invalid_argument(f"JSON Value: {debug_text(value)} {complaint}")
