"""Is a body that is not JSON told so in rapidjson's words, and in time that grows with its length only?"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.server.rest.json.values import DEBUG_BYTES, debug_text, parse_json, to_bytes, type_name
from batchtune.wire.status import StatusError


def complaint(body: bytes) -> str:
    with pytest.raises(StatusError) as caught:
        parse_json(body)
    assert caught.value.code == "INVALID_ARGUMENT"
    return caught.value.message.removeprefix("JSON Parse error: ")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "The document is empty"),
        (b" \n", "The document is empty. at offset: 2"),
        (b"}", "The document is empty. at offset: 0"),
        (b"nul", "Invalid value. at offset: 3"),
        (b'{"a":[trie]}', "Invalid value. at offset: 8"),
        (b'{"a":[-]}', "Invalid value. at offset: 7"),
        (b'{"a":[-Infi]}', "Invalid value. at offset: 11"),
        (b'{"a":[1.]}', "Miss fraction part in number. at offset: 8"),
        (b'{"a":[-20e+]}', "Miss exponent in number. at offset: 11"),
        (b'{"a":1.5e', "Miss exponent in number. at offset: 9"),
        (b'{"a":[1.5.]}', "Missing a comma or ']' after an array element. at offset: 9"),
        (b'{"a":[1e5e]}', "Missing a comma or ']' after an array element. at offset: 9"),
        (b'\xef\xbb\xbf{"a" 1}', "Missing a colon after a name of object member. at offset: 8"),
        (b"{", "Missing a name for object member. at offset: 1"),
        (b"{a:1}", "Missing a name for object member. at offset: 1"),
        (b'{"a":1,}', "Missing a name for object member. at offset: 7"),
        (b'{"a"', "Missing a colon after a name of object member. at offset: 4"),
        (b'{"a":', "Invalid value. at offset: 5"),
        (b'{"a":1 "b"', "Missing a comma or '}' after an object member. at offset: 7"),
        (b'{"a":[1],"b":{"c":1 2}}', "Missing a comma or '}' after an object member. at offset: 20"),
        (b"[1 2]", "Missing a comma or ']' after an array element. at offset: 3"),
        (b'{"a{[":[{}, "]" 2]}', "Missing a comma or ']' after an array element. at offset: 16"),
        (b"[1,]", "Invalid value. at offset: 3"),
        (b'{"a":"x', "Missing a closing quotation mark in string. at offset: 7"),
        (b'{"a":"\x01"}', "Invalid escape character in string. at offset: 6"),
        (rb'{"a":"\x"}', "Invalid escape character in string. at offset: 6"),
        (b'{"a":"x\x00"}', "Missing a closing quotation mark in string. at offset: 7"),
        (b'{"a":"x\\', "Invalid escape character in string. at offset: 7"),
        (rb'{"a":"\u12g"}', "Incorrect hex digit after \\u escape in string. at offset: 6"),
        (b'{"a":[1,2}\\ud800', "Missing a comma or ']' after an array element. at offset: 9"),
        (rb'{"a":"\ud800"}', "The surrogate pair in string is invalid. at offset: 6"),
        (rb'{"a":"\\\ud800"}', "The surrogate pair in string is invalid. at offset: 8"),
        (rb'["\udc00"]', "The surrogate pair in string is invalid. at offset: 2"),
        (b'{"a":[Inf,1e400]}', "Number too big to be stored in double. at offset: 10"),
        (b"[1e999]", "Number too big to be stored in double. at offset: 1"),
        (b'{"\xc3\xa9": 1e999}', "Number too big to be stored in double. at offset: 7"),
        (b'{"a": [NaN, "1e999", 1e999]}', "Number too big to be stored in double. at offset: 21"),
        (b'["x", -Infinity}', "Missing a comma or ']' after an array element. at offset: 15"),
        ('{"é":é}'.encode(), "Invalid value. at offset: 6"),
    ],
)
def test_complaints_name_the_byte(body: bytes, text: str) -> None:
    assert complaint(body) == text


def test_a_body_is_complained_of_only_up_to_its_end() -> None:
    assert parse_json(rb'{"a": NaN} "\ud800"').keys() == {"a"}


def test_what_rapidjson_accepts_beyond_json_is_accepted() -> None:
    value = parse_json(
        b'\xef\xbb\xbf {"a": [NaN, Infinity, -Infinity, Inf, -Inf], "Inf": "Inf\xff"} and more'
    )
    assert math.isnan(value["a"][0])
    assert value["a"][1:] == [math.inf, -math.inf, math.inf, -math.inf]
    assert to_bytes(value["Inf"]) == b"Inf\xff"


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": Inf, "' + b'\\"' * 1_000_000,
        b'{"a":' + b"[" * 900 + b'"x",' * 300_000,
        b'["' + b"\\\\" * 1_000_000,
        b'["\\u' + b"\\" * 1_000_001,
        b"[" * 1_000_000,
        b'"' + b"\\ud800" * 300_000,
    ],
    ids=["open string", "open lists", "backslashes", "escapes", "brackets", "surrogates"],
)
@pytest.mark.timeout(20)
def test_hostile_bodies_are_refused_in_linear_time(body: bytes) -> None:
    assert " at offset: " in complaint(body)


def test_debug_text_is_rapidjsons_layout() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}, "d": []}}
    assert debug_text(value) == (
        '{\n    "a": [1, 2.5, null, true, "x"],\n    "b": {\n        "c": {},\n        "d": []\n    }\n}'
    )
    assert debug_text([math.nan, math.inf, -math.inf]) == "[NaN, Infinity, -Infinity]"


@pytest.mark.parametrize("value", [list(range(10_000)), "x" * 10_000, {"k" * 5000: 1}, [[[]]] * 5000])
def test_debug_text_stays_short(value: Any) -> None:
    assert len(debug_text(value)) < 2 * DEBUG_BYTES + 10


def test_a_nest_of_any_depth_is_a_value_or_a_complaint() -> None:
    for depth in range(950, 1051):
        for nest in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
            for body in (nest, nest + b" x", b'{"instances": ' + nest + b"} x"):
                try:
                    value = parse_json(body)
                except StatusError as error:
                    value = error.message
                assert not isinstance(value, str) or value.startswith("JSON Parse error: Nested too deeply.")


def test_types_have_rapidjsons_names() -> None:
    values = [None, False, True, {}, [], "x", 1, 1.5]
    names = ["Null", "False", "True", "Object", "Array", "String", "Number", "Number"]
    assert [type_name(value) for value in values] == names


Json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(max_examples=200, deadline=None)
@given(value=Json)
def test_everything_python_writes_is_read_back(value: Any) -> None:
    text = json.dumps(value)
    assert json.dumps(parse_json(text.encode())) == text
