"""Reads and writes protobuf text, field by field and line by line, whatever its message type.

The grammar is protobuf's text format without extensions, `Any` and field numbers:
`name: scalar`, `name { … }`, `name < … >`, `name: [a, b]`, separators `,` and `;`, comments from `#`.
(https://protobuf.dev/reference/protobuf/textformat-spec/)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchtune.errors import BatchingParametersError

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f\v]+|\#[^\n]*)
  | (?P<newline>\n)
  | (?P<number>[-+]?[ \t]*(?:0[xX][0-9a-fA-F]+|\d+\.\d*(?:[eE][-+]?\d+)?[fF]?|\.\d+(?:[eE][-+]?\d+)?[fF]?
      |\d+[eE][-+]?\d+[fF]?|\d+[fF]?)(?![\w.]))
  | (?P<name>[A-Za-z_][\w.]*)
  | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
  | (?P<mark>[{}<>\[\]:,;])
    """,
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value that is no message: a number or a word as written, or the text of a string without its quotes.

    Within the parser, any token: also a mark, the end of the text, and a string still in its quotes.
    """

    kind: Literal["number", "name", "string", "mark", "end"]
    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The fields of a sub-message (or of the whole text), in order; a repeated field occurs several times.

    `empty_lists`: names and lines of `name: []`, which gives no field.
    """

    fields: tuple[Field, ...]
    line: int
    empty_lists: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One value of a field. A list `[a, b]` gives one Field for each value, with `listed` True."""

    name: str
    value: Scalar | Message
    line: int
    listed: bool = False


def parse_text_proto(text: str, *, source: str) -> Message:
    """Parse a protobuf text without its schema; `source` is a file name for error messages.

    Raises:
        BatchingParametersError: `source:line: …` where the text leaves the grammar.
    """
    return _Parser(list(_tokens(text, source)), source).message(until="end")


def failure(source: str, line: int, what: str, *, hint: str = "") -> BatchingParametersError:
    """Make an error that begins with `source:line:`."""
    return BatchingParametersError(f"{source}:{line}: {what}", hint=hint)


def whole_number(field: Field, *, source: str, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    """Return the field's value as an integer: decimal, `0x…` or octal with a leading 0, as in protobuf.

    Raises:
        BatchingParametersError: the value is no integer, or not in `least` to `most`.
    """
    value = field.value
    expected = "a whole number" if most == 2**63 - 1 else f"{least} to {most}"
    if isinstance(value, Scalar) and value.kind == "number":
        digits = value.text.replace(" ", "").replace("\t", "")
        octal = re.fullmatch(r"([-+]?)0([0-7]+)", digits)
        try:
            number = int(octal[1] + octal[2], 8) if octal else int(digits, 0)
        except ValueError:
            number = None
        if number is not None and least <= number <= most:
            return number
    raise failure(source, field.line, f"{field.name} must be {expected}; was {described(value)}")


def boolean(field: Field, *, source: str) -> bool:
    """Return the field's value as a bool: `true`, `True`, `t`, `1` and their opposites.

    Raises:
        BatchingParametersError: the value is any other.
    """
    value = field.value
    if isinstance(value, Scalar) and value.kind != "string":
        if value.text in {"true", "True", "t", "1"}:
            return True
        if value.text in {"false", "False", "f", "0"}:
            return False
    raise failure(source, field.line, f"{field.name} must be true or false; was {described(value)}")


def string(field: Field, *, source: str) -> str:
    """Return the field's value as a string; raises BatchingParametersError where it was not quoted."""
    value = field.value
    if isinstance(value, Scalar) and value.kind == "string":
        return value.text
    raise failure(source, field.line, f"{field.name} must be a quoted string; was {described(value)}")


def message(field: Field, *, source: str) -> Message:
    """Return the field's value as a message; raises BatchingParametersError where it is a scalar."""
    if isinstance(field.value, Message):
        return field.value
    raise failure(source, field.line, f"{field.name} must be a block {{ … }}; was {described(field.value)}")


def values_of(
    block: Message, kinds: Mapping[str, Callable[..., Any]], *, source: str, of: str
) -> dict[str, Any]:
    """Return name -> value of a message's fields; of a repeated field the last value.

    `kinds`: name -> the function that reads the field, such as `boolean` or `string`.

    Raises:
        BatchingParametersError: a field that the message `of` does not have, or a value of another type.
    """
    values = {}
    for field in block.fields:
        if field.name not in kinds:
            raise failure(source, field.line, f"unknown field {field.name!r} of {of}")
        values[field.name] = kinds[field.name](field, source=source)
    return values


def described(value: Scalar | Message) -> str:
    """Quote a value for an error message."""
    if isinstance(value, Message):
        return "a block { … }"
    return f'"{value.text}"' if value.kind == "string" else value.text


def _tokens(text: str, source: str) -> Iterator[Scalar]:
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise failure(source, line, f"unexpected character {text[position]!r}")
        position = match.end()
        match match.lastgroup:
            case "newline":
                line += 1
            case "number" | "name" | "string" | "mark" as kind:
                yield Scalar(kind, match[0], line)
            case _:
                pass
    yield Scalar("end", "the end of the text", line)


class _Parser:
    """Recursive descent over the tokens; the last token is the end."""

    def __init__(self, tokens: list[Scalar], source: str) -> None:
        self._tokens = tokens
        self._source = source
        self._at = 0

    def message(self, *, until: str) -> Message:
        line = self._next.line
        fields: list[Field] = []
        empty_lists: list[tuple[str, int]] = []
        while not (self._next.kind == "end" if until == "end" else self._is_mark(until)):
            name, values = self._field()
            fields.extend(values)
            if not values:
                empty_lists.append((name.text, name.line))
            if self._is_mark(",") or self._is_mark(";"):
                self._take()
        if until != "end":
            self._take()
        return Message(fields=tuple(fields), line=line, empty_lists=tuple(empty_lists))

    def _field(self) -> tuple[Scalar, list[Field]]:
        name = self._take()
        if name.kind != "name":
            raise failure(self._source, name.line, f"expected a field name, found {name.text!r}")
        if self._is_mark(":"):
            self._take()
        elif not (self._begins_block(0) or (self._is_mark("[") and self._begins_block(1))):
            raise failure(
                self._source,
                self._next.line,
                f"expected ':' or '{{' after {name.text}, found {self._next.text!r}",
            )
        if not self._is_mark("["):
            return name, [Field(name=name.text, value=self._value(), line=name.line)]
        self._take()
        fields = [Field(name=name.text, value=value, line=name.line, listed=True) for value in self._list()]
        return name, fields

    def _list(self) -> Iterator[Scalar | Message]:
        while not self._is_mark("]"):
            yield self._value()
            if self._is_mark(","):
                self._take()
                if self._is_mark("]"):
                    raise failure(self._source, self._next.line, "expected a value after ',', found ']'")
            elif not self._is_mark("]"):
                raise failure(
                    self._source, self._next.line, f"expected ',' or ']', found {self._next.text!r}"
                )
        self._take()

    def _value(self) -> Scalar | Message:
        token = self._take()
        if token.kind == "mark" and token.text in _CLOSING:
            return self.message(until=_CLOSING[token.text])
        if token.kind == "string":
            parts = [_unquoted(token.text)]
            while self._next.kind == "string":
                parts.append(_unquoted(self._take().text))
            return Scalar("string", "".join(parts), token.line)
        if token.kind in {"number", "name"}:
            return token
        raise failure(self._source, token.line, f"expected a value, found {token.text!r}")

    def _begins_block(self, ahead: int) -> bool:
        """Whether a sub-message begins so many tokens ahead: only such a value needs no colon."""
        token = self._tokens[min(self._at + ahead, len(self._tokens) - 1)]
        return token.kind == "mark" and token.text in _CLOSING

    @property
    def _next(self) -> Scalar:
        return self._tokens[self._at]

    def _take(self) -> Scalar:
        token = self._tokens[self._at]
        if token.kind != "end":
            self._at += 1
        return token

    def _is_mark(self, text: str) -> bool:
        return self._next.kind == "mark" and self._next.text == text


def _unquoted(literal: str) -> str:
    escaped = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}

    def character(match: re.Match[str]) -> str:
        hexadecimal, octal, single = match.groups()
        if hexadecimal or octal:
            return chr(int(hexadecimal or octal, 16 if hexadecimal else 8))
        return escaped.get(single, single)

    escape = r"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3})|(.))"
    return re.sub(escape, character, literal[1:-1], flags=re.DOTALL)
