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

from batchtune.server.json_complaints import LONE_SURROGATE, NUMBER_TOO_BIG, STRING, complaint
from batchtune.wire.status import StatusError

DEBUG_BYTES = 256
"""JSON shown in an error message is cut at the first token past this many bytes."""

_BARE_INFINITY = re.compile(STRING + r"|Inf(?!i)", re.DOTALL)
_LONE_SURROGATE = re.compile(
    r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_TOO_BIG = re.compile(STRING + r"|[-0-9][-+.0-9eE]+", re.DOTALL)


def _finite(text: str) -> float:
    """A number of the text; raises OverflowError beyond double."""
    value = float(text)
    if math.isinf(value):
        raise OverflowError
    return value


_decoder = json.JSONDecoder(parse_float=_finite)


def parse_json(body: bytes) -> Any:
    """Read one JSON value.

    Raises:
        StatusError: INVALID_ARGUMENT `JSON Parse error: …`, as TensorFlow Serving words it.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if error.msg.startswith("number is infinity"):
            raise _parse_error(NUMBER_TOO_BIG, _byte_offset(body.decode(), error.pos)) from error
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
        raise _parse_error(LONE_SURROGATE, 0) from error


def _parse_leniently(body: bytes) -> Any:
    text = body.decode("utf-8", "surrogateescape")
    start = len(text) - len(text.lstrip(" \t\r\n\ufeff"))
    if start == len(text):
        raise _parse_error("The document is empty" + ("." if body else ""), len(body) if body else None)
    try:
        value, end = _decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if text.startswith(("Inf", "-Inf"), error.pos):
            spelled_out = _BARE_INFINITY.sub(lambda one: "Infinity" if one[0] == "Inf" else one[0], text)
            if spelled_out != text:
                return _parse_leniently(spelled_out.encode("utf-8", "surrogateescape"))
        _check_surrogates(text, len(text) if error.msg.startswith("Unterminated") else error.pos)
        message, at = complaint(error)
        raise _parse_error(message, _byte_offset(text, at)) from error
    except RecursionError as error:
        raise _parse_error("Nested too deeply.", len(body)) from error
    except (OverflowError, ValueError) as error:  # ValueError: an integer of more digits than Python reads
        raise _parse_error(NUMBER_TOO_BIG, _byte_offset(text, _number_too_big(text))) from error
    _check_surrogates(text, end)
    return value


def _check_surrogates(text: str, end: int) -> None:
    lone = _LONE_SURROGATE.search(text, 0, end) if "\\u" in text else None
    if lone is not None:
        raise _parse_error(LONE_SURROGATE, _byte_offset(text, lone.start(1)))


def _number_too_big(text: str) -> int:
    """Where the first number stands that no double can hold."""
    for number in _TOO_BIG.finditer(text):
        try:
            if number[0][0] != '"' and math.isinf(float(number[0])):
                return number.start()
        except ValueError:  # no number after all
            continue
    return len(text)


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
