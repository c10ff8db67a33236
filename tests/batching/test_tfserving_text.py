"""Do we read a batching parameters file exactly as protobuf does? The real parser is the witness."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format, wrappers_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.parameters import BatchingParameters, validate
from batchtune.batching.tfserving_file import format_tfserving_text, parse_tfserving_text
from batchtune.errors import BatchingParametersError

pytestmark = pytest.mark.smoke

# BatchingParameters as in session_bundle_config.proto, which no Python wheel carries: number, name and type.
FIELDS = """
1 max_batch_size Int64Value
2 batch_timeout_micros Int64Value
3 max_enqueued_batches Int64Value
4 num_batch_threads Int64Value
5 thread_pool_name StringValue
6 allowed_batch_sizes TYPE_INT64
7 pad_variable_length_inputs TYPE_BOOL
8 enable_large_batch_splitting BoolValue
9 max_execution_batch_size Int64Value
"""


def _message_class() -> Any:
    wrappers, file = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto(syntax="proto3")
    wrappers_pb2.DESCRIPTOR.CopyToProto(wrappers)
    file.name, file.package = "session_bundle_config.proto", "tensorflow.serving"
    file.dependency.append(wrappers.name)
    message, kind = file.message_type.add(name="BatchingParameters"), descriptor_pb2.FieldDescriptorProto
    for number, name, type_name in (line.split() for line in FIELDS.split("\n") if line):
        label = kind.LABEL_REPEATED if name == "allowed_batch_sizes" else kind.LABEL_OPTIONAL
        field = message.field.add(name=name, number=int(number), label=label)
        if type_name.startswith("TYPE_"):
            field.type = kind.Type.Value(type_name)
        else:
            field.type, field.type_name = kind.TYPE_MESSAGE, f".google.protobuf.{type_name}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(wrappers)
    pool.Add(file)
    found = pool.FindMessageTypeByName("tensorflow.serving.BatchingParameters")
    return message_factory.GetMessageClass(found)


MESSAGE = _message_class()


def as_protobuf_reads(text: str) -> BatchingParameters:
    message = text_format.Parse(text, MESSAGE())
    fields: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        fields[descriptor.name] = value.value if descriptor.message_type else value
    if "allowed_batch_sizes" in fields:
        fields["allowed_batch_sizes"] = tuple(fields["allowed_batch_sizes"])
    return BatchingParameters(**fields)


README = """
max_batch_size { value: 128 }
batch_timeout_micros { value: 0 }
max_enqueued_batches { value: 1000000 }
num_batch_threads { value: 8 }
"""
ALL = f"""
{README.replace("1000000", "100")}
thread_pool_name {{ value: "model_server_batch_threads" }}
enable_large_batch_splitting {{ value: true }}
max_execution_batch_size {{ value: 32 }}
allowed_batch_sizes: 8
allowed_batch_sizes: 16
allowed_batch_sizes: 32
allowed_batch_sizes: 128
pad_variable_length_inputs: true
"""

LEGAL = [
    "",
    "# nothing but a comment",
    README,
    ALL,
    "max_batch_size: { value: 128 }",
    "max_batch_size < value: 128 >",
    "max_batch_size:<value:128>",
    "max_batch_size { value: 128 }, batch_timeout_micros { value: 5 };num_batch_threads{value:1}",
    "max_batch_size { value: 128, }",
    "max_batch_size { value: 0x80 }",
    "max_batch_size { value: 010 }",
    "max_batch_size { value: -3 }",
    "batch_timeout_micros { }",
    "thread_pool_name { }",
    "enable_large_batch_splitting { }",
    "allowed_batch_sizes: [8, 16, 32]",
    "allowed_batch_sizes: []",
    "allowed_batch_sizes: [8] allowed_batch_sizes: 16",
    "allowed_batch_sizes: 8 # comment\nallowed_batch_sizes: 16",
    "pad_variable_length_inputs: True",
    "pad_variable_length_inputs: t",
    "pad_variable_length_inputs: 1",
    "pad_variable_length_inputs: false",
    "thread_pool_name { value: 'a' \"b\" }",
    r"""thread_pool_name { value: "a\"b\n\x41\101\\" }""",
    'thread_pool_name { value: "#no comment" }',
    "enable_large_batch_splitting { value: false }",
]

ILLEGAL = [
    "max_batch_size: 128",
    "max_batch_size 128",
    "max_batch_size = 128",
    "max_batch_size { value: 128",
    "max_batch_size { value: 128 > ",
    "max_batch_size { value: 1.5 }",
    "max_batch_size { value: '8' }",
    "max_batch_size { value: 99999999999999999999 }",
    "max_batch_size { value: 089 }",
    "max_batch_size { value: 1 value: 2 }",
    "max_batch_size { size: 1 }",
    "max_batch_size { value: 1 } max_batch_size { value: 2 }",
    "max_batchsize { value: 1 }",
    "allowed_batch_sizes { value: 8 }",
    "allowed_batch_sizes: [8, ]",
    "allowed_batch_sizes: [8 16]",
    "allowed_batch_sizes: many",
    "pad_variable_length_inputs { value: true }",
    "pad_variable_length_inputs: yes",
    "pad_variable_length_inputs: 2",
    "enable_large_batch_splitting: true",
    "thread_pool_name { value: name }",
    'thread_pool_name { value: "open }',
    "}",
    "max_batch_size { value: }",
    ", max_batch_size { value: 1 }",
]


@pytest.mark.parametrize("text", LEGAL)
def test_every_legal_form_is_read_as_protobuf_reads_it(text: str) -> None:
    assert parse_tfserving_text(text) == as_protobuf_reads(text)


@pytest.mark.parametrize("text", ILLEGAL)
def test_what_protobuf_refuses_we_refuse(text: str) -> None:
    with pytest.raises(text_format.ParseError):
        as_protobuf_reads(text)
    with pytest.raises(BatchingParametersError):
        parse_tfserving_text(text)


whole = st.none() | st.integers(-(2**63), 2**63 - 1)
parameters = st.builds(
    BatchingParameters,
    max_batch_size=whole,
    batch_timeout_micros=whole,
    max_enqueued_batches=whole,
    num_batch_threads=whole,
    thread_pool_name=st.none() | st.text(st.characters(codec="utf-8"), max_size=20),
    allowed_batch_sizes=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(tuple),
    pad_variable_length_inputs=st.booleans(),
    enable_large_batch_splitting=st.none() | st.booleans(),
    max_execution_batch_size=whole,
)


@settings(max_examples=200, deadline=None)
@given(parameters)
def test_what_we_write_protobuf_and_we_read_back(given_parameters: BatchingParameters) -> None:
    text = format_tfserving_text(given_parameters)
    assert parse_tfserving_text(text) == given_parameters
    assert as_protobuf_reads(text) == given_parameters


WORDS = ["max_batch_size", "allowed_batch_sizes", "value", "8", "#\n", *"{}<>[]:,;"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=10).map(" ".join))
def test_any_sequence_of_words_is_read_or_refused_as_protobuf_does(text: str) -> None:
    try:
        expected = as_protobuf_reads(text)
    except text_format.ParseError:
        with pytest.raises(BatchingParametersError):
            parse_tfserving_text(text)
    else:
        assert parse_tfserving_text(text) == expected


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("# sizes\n\nmax_batch_size: 128\n", "b.txt:3: max_batch_size", "max_batch_size { value: 128 }"),
        ("allowed_batch_sizes { value: 8 }", "b.txt:1: allowed_batch_sizes", "allowed_batch_sizes: 8"),
        ("max_batch_size {\n  value: x\n}", "b.txt:2: ", None),
        ("\n\n;", "b.txt:3: ", None),
        ("max_batch_size {\n\n", "b.txt:3: ", None),
    ],
)
def test_a_mistake_is_told_with_its_line_and_the_remedy(text: str, said: str, hint: str | None) -> None:
    with pytest.raises(BatchingParametersError) as caught:
        parse_tfserving_text(text, source="b.txt")
    assert caught.value.message.startswith(said)
    assert hint is None or caught.value.hint == f"write it as {hint}"


def test_the_reference_example_is_legal_to_serve() -> None:
    validate(parse_tfserving_text(README))
    validate(parse_tfserving_text(ALL))
