"""How is a request body read as JSON, and what is said of one that is not?

orjson reads what is strictly JSON; what it refuses, TensorFlow Serving's parser (rapidjson 1.1, iterative, with NaN
and Infinity, stopping when done) may still accept: bare `NaN`, `Infinity` and `Inf`, text after the value, bytes that
are no UTF-8. Error texts are rapidjson's, with the offset in bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import orjson

from batchtune.wire.status import StatusError

DEBUG_BYTES = 256
"""JSON shown in an error message is cut at the first token past this many bytes."""

# Possessive and closed by the end of the text too: linear even on a hostile body.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z|\\\Z)'
_BARE_INFINITY = re.compile(_STRING + r"|\bInf\b", re.DOTALL)
_STRUCTURE = re.compile(_STRING + r"|[^\[\]{}\"]+", re.DOTALL)
_LONE_SURROGATE = re.compile(
    r"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_MESSAGES = {
    "Expecting value": "Invalid value.",
    "Expecting property name enclosed in double quotes": "Missing a name for object member.",
    "Illegal trailing comma before end of object": "Missing a name for object member.",
    "Illegal trailing comma before end of array": "Invalid value.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Invalid control character at": "Invalid escape character in string.",
    "Invalid \\escape: ": "Invalid escape character in string.",
    "Invalid \\escape": "Invalid escape character in string.",
    "Invalid \\uXXXX escape": "Incorrect hex digit after \\u escape in string.",
}
_decoder = json.JSONDecoder()


def parse_json(body: bytes) -> Any:
    """Read one JSON value.

    Raises:
        StatusError: INVALID_ARGUMENT `JSON Parse error: …`, as TensorFlow Serving words it.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if error.msg.startswith("number is infinity"):
            raise _parse_error("Number too big to be stored in double.", error.pos) from error
        return _parse_leniently(body)


def debug_text(value: Any) -> str:
    """Show a JSON value in an error message: objects over several lines, arrays on one, cut near 256 bytes."""
    parts: list[str] = []
    size = 0
    for part in _tokens(value, 0):
        if size >= DEBUG_BYTES:
            break
        parts.append(part)
        size += len(part.encode("utf-8", "replace"))
    return "".join(parts)


def type_name(value: Any) -> str:
    """Name a JSON value's type as rapidjson does."""
    if value is None:
        return "Null"
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, dict):
        return "Object"
    if isinstance(value, list):
        return "Array"
    return "String" if isinstance(value, str) else "Number"


def to_bytes(text: str) -> bytes:
    """Encode a string that parse_json has read; bytes that were no UTF-8 come back as they were.

    Raises:
        StatusError: INVALID_ARGUMENT for half of a surrogate pair.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _parse_error("The surrogate pair in string is invalid.", 0) from error


def _parse_leniently(body: bytes) -> Any:
    text = body.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    start = len(text) - len(text.lstrip(" \t\r\n"))
    if start == len(text):
        raise _parse_error("The document is empty" + ("." if body else ""), start if body else None)
    surrogate = _LONE_SURROGATE.search(text) if "\\u" in text else None
    if surrogate is not None:
        raise _parse_error("The surrogate pair in string is invalid.", _byte_offset(text, surrogate.start()))
    try:
        return _decode(text, start)
    except json.JSONDecodeError as error:
        raise _parse_error(_message(text, error), _byte_offset(text, _offset(text, error))) from error
    except RecursionError as error:
        raise _parse_error("Nested too deeply.", len(body)) from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise _parse_error("Number too big to be stored in double.", len(body)) from error


def _decode(text: str, start: int) -> Any:
    try:
        return _decoder.raw_decode(text, start)[0]
    except json.JSONDecodeError as error:
        if not text.startswith(("Inf", "-Inf"), error.pos):
            raise
    spelled_out = _BARE_INFINITY.sub(lambda match: "Infinity" if match[0] == "Inf" else match[0], text)
    return _decoder.raw_decode(spelled_out, start)[0]


def _message(text: str, error: json.JSONDecodeError) -> str:
    if error.msg.startswith("Unterminated string"):
        return "Missing a closing quotation mark in string."
    if error.msg == "Expecting ',' delimiter":
        inside = _innermost_container(text[: error.pos])
        return (
            "Missing a comma or } after an object member."
            if inside == "{"
            else "Missing a comma or ] after an array element."
        )
    return _MESSAGES.get(error.msg, "Unspecific syntax error.")


def _offset(text: str, error: json.JSONDecodeError) -> int:
    """rapidjson notices a missing quotation mark at the end of the text, Python at the string's start."""
    return len(text) if error.msg.startswith("Unterminated string") else error.pos


def _innermost_container(prefix: str) -> str:
    """The bracket that is still open at the end of well-formed `prefix`, "" for none."""
    depth = 0
    for bracket in reversed(_STRUCTURE.sub("", prefix)):
        depth += 1 if bracket in "]}" else -1
        if depth < 0:
            return bracket
    return ""


def _byte_offset(text: str, offset: int) -> int:
    return len(text[:offset].encode("utf-8", "surrogateescape"))


def _parse_error(message: str, offset: int | None) -> StatusError:
    where = "" if offset is None else f" at offset: {offset}"
    return StatusError("INVALID_ARGUMENT", f"JSON Parse error: {message}{where}")


def _tokens(value: Any, depth: int) -> Iterator[str]:
    """The pieces that rapidjson's PrettyWriter writes, arrays on a single line."""
    if isinstance(value, dict):
        yield "{"
        for index, (key, member) in enumerate(value.items()):
            yield ("," if index else "") + "\n" + "    " * (depth + 1) + _quoted(key) + ": "
            yield from _tokens(member, depth + 1)
        yield "\n" + "    " * depth + "}" if value else "}"
    elif isinstance(value, list):
        yield "["
        for index, element in enumerate(value):
            if index:
                yield ", "
            yield from _tokens(element, depth + 1)
        yield "]"
    else:
        yield _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return json.dumps(value)


def _quoted(text: str) -> str:
    """A string, without its end if it is long."""
    shown = json.dumps(text[:DEBUG_BYTES], ensure_ascii=False)
    return shown if len(text) <= DEBUG_BYTES else shown[:-1]
