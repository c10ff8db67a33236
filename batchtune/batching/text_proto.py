"""Reads and writes protobuf text, field by field and line by line, whatever its message type.

The grammar is protobuf's text format without extensions, `Any` and field numbers:
`name: scalar`, `name { … }`, `name < … >`, `name: [a, b]`, separators `,` and `;`, comments from `#`.
(https://protobuf.dev/reference/protobuf/textformat-spec/)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from batchtune.errors import BatchingParametersError

if TYPE_CHECKING:
    from google.protobuf.text_format import Tokenizer

_CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value that is no message: a number or a word as written, or the text of a string without its quotes."""

    kind: Literal["number", "name", "string"]
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
    from google.protobuf.text_format import Tokenizer

    return _message(Tokenizer(text.split("\n")), source, until="")


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


def _message(tokens: Tokenizer, source: str, *, until: str) -> Message:
    """Read fields up to the mark `until`, which is taken too; "": up to the end of the text."""
    line = _line(tokens)
    fields: list[Field] = []
    empty_lists: list[tuple[str, int]] = []
    while not tokens.LookingAt(until):
        line_of_field, name = _line(tokens), _taken(tokens)
        if not name.isidentifier():
            raise failure(source, line_of_field, f"expected a field name, found {_shown(name)}")
        colon = tokens.TryConsume(":")
        if listed := tokens.TryConsume("["):
            values = _list(tokens, source)
            if not values:
                empty_lists.append((name, line_of_field))
        else:
            values = [_value(tokens, source)]
        if not colon and not (values and isinstance(values[0], Message)):  # only a block needs none
            raise failure(source, line_of_field, f"expected ':' or '{{' after {name}")
        fields += [Field(name=name, value=value, line=line_of_field, listed=listed) for value in values]
        _ = tokens.TryConsume(",") or tokens.TryConsume(";")
    tokens.NextToken()
    return Message(fields=tuple(fields), line=line, empty_lists=tuple(empty_lists))


def _list(tokens: Tokenizer, source: str) -> list[Scalar | Message]:
    values: list[Scalar | Message] = []
    while not tokens.TryConsume("]"):
        if values and not tokens.TryConsume(","):
            raise failure(source, _line(tokens), f"expected ',' or ']', found {_shown(tokens.token)}")
        values.append(_value(tokens, source))
    return values


def _value(tokens: Tokenizer, source: str) -> Scalar | Message:
    from google.protobuf.text_format import ParseError

    line, token = _line(tokens), tokens.token
    if token in _CLOSING:
        tokens.NextToken()
        return _message(tokens, source, until=_CLOSING[token])
    if token.startswith(('"', "'")):
        try:
            return Scalar("string", tokens.ConsumeString(), line)
        except ParseError as error:
            raise failure(source, line, "a string without its end, or with a wrong escape") from error
    if not re.match(r"[\w.+-]", token):
        raise failure(source, line, f"expected a value, found {_shown(token)}")
    return Scalar("name" if token.isidentifier() else "number", _taken(tokens), line)


def _taken(tokens: Tokenizer) -> str:
    token = tokens.token
    tokens.NextToken()
    return token


def _line(tokens: Any) -> int:
    """Return the line of the next token, as an error there would name it."""
    return int(tokens.ParseError("").GetLine())


def _shown(token: str) -> str:
    return repr(token) if token else "the end of the text"
