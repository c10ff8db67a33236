"""What does TensorFlow Serving's parser (rapidjson 1.1, iterative) say of a text that is not JSON, and at which byte?

Python's decoder has found the place; what stands there and before it decides the words and the exact offset, as
`reader.h` and `error/en.h` of rapidjson 1.1.0 do.
"""

from __future__ import annotations

import json
import re

# Possessive and closed by the end of the text too: linear even on a hostile body.
STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z|\\\Z)'
_STRUCTURE = re.compile(STRING + r"|[^\[\]{}\"]+", re.DOTALL)
_NUMBER_BEFORE = re.compile(r"[0-9](\.[0-9]+)?([eE][+-]?[0-9]+)?\Z")
_NUMBER_CHARACTERS_MAX = 400  # looked at before a stray dot or exponent
_ODD_BACKSLASHES = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
_NO_VALUE_STARTS_SO = frozenset("}],:\0")
# As far as a text agrees with one of these, rapidjson has read it before it complains.
_LITERALS = ("null", "true", "false", "NaN", "Infinity", "-NaN", "-Infinity", "-")

_TEXTS = {
    "Expecting property name enclosed in double quotes": "Missing a name for object member.",
    "Illegal trailing comma before end of object": "Missing a name for object member.",
    "Illegal trailing comma before end of array": "Invalid value.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Invalid \\escape: ": "Invalid escape character in string.",
    "Invalid \\escape": "Invalid escape character in string.",
}
NUMBER_TOO_BIG = "Number too big to be stored in double."
LONE_SURROGATE = "The surrogate pair in string is invalid."


def complaint(error: json.JSONDecodeError) -> tuple[str, int]:
    """Word what Python's decoder found wrong: rapidjson's message and the character of the text that it names."""
    text, at = error.doc, error.pos
    match error.msg:
        case "Expecting value":
            return _no_value(text, at)
        case "Expecting ',' delimiter":
            return _cut_number(text, at) or (_missing_comma(text[:at]), at)
        case "Invalid control character at" if text[at] == "\0":
            return "Missing a closing quotation mark in string.", at
        case "Invalid control character at":
            return "Invalid escape character in string.", at
        case "Invalid \\uXXXX escape":
            return "Incorrect hex digit after \\u escape in string.", text.rindex("\\", 0, at + 1)
    if error.msg.startswith("Unterminated string"):
        if _ODD_BACKSLASHES.search(text):
            return "Invalid escape character in string.", len(text) - 1
        return "Missing a closing quotation mark in string.", len(text)
    if error.msg.startswith("Illegal trailing comma"):  # since Python 3.13 it points at the comma
        at += 1 + len(text[at + 1 :]) - len(text[at + 1 :].lstrip(" \t\r\n"))
    return _TEXTS.get(error.msg, "Unspecific syntax error."), at


def _no_value(text: str, at: int) -> tuple[str, int]:
    if text[at : at + 1] in _NO_VALUE_STARTS_SO and not text[:at].strip(" \t\r\n\ufeff"):
        return "The document is empty.", at
    return "Invalid value.", at + max(_agreement(text, at, literal) for literal in _LITERALS)


def _agreement(text: str, at: int, literal: str) -> int:
    size = 0
    while size < len(literal) and text.startswith(literal[size], at + size):
        size += 1
    return size


def _cut_number(text: str, at: int) -> tuple[str, int] | None:
    """A number that ends with its dot or its exponent's sign: Python takes it for one that ended before them."""
    mark = text[at : at + 1]
    number = _NUMBER_BEFORE.search(text[max(0, at - _NUMBER_CHARACTERS_MAX) : at]) if mark in ".eE" else None
    if not mark or number is None or number[2]:
        return None
    if mark == ".":
        return None if number[1] else ("Miss fraction part in number.", at + 1)
    return "Miss exponent in number.", at + 1 + text.startswith(("+", "-"), at + 1)


def _missing_comma(prefix: str) -> str:
    if _innermost_container(prefix) == "{":
        return "Missing a comma or '}' after an object member."
    return "Missing a comma or ']' after an array element."


def _innermost_container(prefix: str) -> str:
    """The bracket that is still open at the end of well-formed `prefix`, "" for none."""
    depth = 0
    for bracket in reversed(_STRUCTURE.sub("", prefix)):
        depth += 1 if bracket in "]}" else -1
        if depth < 0:
            return bracket
    return ""
