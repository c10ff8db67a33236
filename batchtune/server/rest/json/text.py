"""How is a request body read as JSON, and what is said of one that is not?

orjson reads what is strictly JSON; what it refuses, TensorFlow Serving's parser (rapidjson 1.1, iterative, with NaN
and Infinity, stopping when done) may still accept: bare `NaN`, `Infinity` and `Inf`, text after the value, bytes that
are no UTF-8. It is asked then, through python-rapidjson: error texts are its own, with the offset in bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import orjson
import rapidjson

from batchtune.wire.status import StatusError

DEBUG_BYTES = 256
"""JSON shown in an error message is cut at the first token past this many bytes."""

# Possessive and closed by the end of the text too: linear even on a hostile body.
_BARE_INFINITY = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z|\\\Z)|Inf(?!i)', re.DOTALL)
_NUMBERS = rapidjson.NM_NAN | rapidjson.NM_NATIVE
_NO_VALUE_STARTS_SO = frozenset("}],:\0")
# rapidjson 1.1 as released; python-rapidjson holds a later commit.
_REWORDED = {"Invalid encoding in string.": "Invalid escape character in string."}


def parse_json(body: bytes) -> Any:
    """Read one JSON value.

    Raises:
        StatusError: INVALID_ARGUMENT `JSON Parse error: …`, as TensorFlow Serving words it.
    """
    number_too_big = "Number too big to be stored in double."
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if error.msg.startswith("number is infinity"):
            raise _parse_error(number_too_big, len(body.decode()[: error.pos].encode())) from error
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
    """Encode a string that parse_json has read; bytes that were no UTF-8 come back as they were."""
    return text.encode("utf-8", "surrogateescape")


def _parse_leniently(body: bytes) -> Any:
    text = body.decode("utf-8", "surrogateescape")
    start = len(text) - len(text.lstrip(" \t\r\n\ufeff"))
    if start == len(text):
        raise _parse_error("The document is empty" + ("." if body else ""), len(body) if body else None)
    lead = len(text[:start].encode())
    if text[start] in _NO_VALUE_STARTS_SO:
        raise _parse_error("The document is empty.", lead)
    value = _read(text.encode("utf-8", "replace"), lead)  # a byte that is no UTF-8 is one byte here too
    spelled_out = _BARE_INFINITY.sub(lambda match: "Infinity" if match[0] == "Inf" else match[0], text)
    try:
        return _EXACT.raw_decode(spelled_out, start)[0]  # rapidjson's doubles may be off by their last bit
    except RecursionError as error:  # a few levels before rapidjson's
        raise _too_deep(body) from error
    except ValueError:  # -NaN
        return value


def _integer(digits: str) -> int | float:
    """An integer of 64 bits, or the double nearest to a larger one."""
    value = float(digits) if len(digits) > len(str(-(2**63))) else int(digits)
    return value if -(2**63) <= value < 2**64 else float(value)


_EXACT = json.JSONDecoder(parse_int=_integer)


def _read(body: bytes, lead: int) -> Any:
    """The value that begins at `lead`, whatever follows it."""
    try:
        return rapidjson.loads(body[lead:], number_mode=_NUMBERS)
    except RecursionError as error:
        raise _too_deep(body) from error
    except rapidjson.JSONDecodeError as error:
        place, _, message = str(error).removeprefix("Parse error at offset ").partition(": ")
        if message.startswith("The document root must not be followed"):
            return _read(body[: lead + int(place)], lead)
        raise _parse_error(_REWORDED.get(message, message), lead + int(place)) from error


def _too_deep(body: bytes) -> StatusError:
    return _parse_error("Nested too deeply.", len(body))


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
