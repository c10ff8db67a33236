"""Of a Triton model's configuration only the batching part is changed, and config.pbtxt says all of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.batching.text_proto import Message, parse_text_proto
from batchtune.batching.triton_config import (
    FoundBatching,
    configuration_as_found,
    dropped,
    format_config_pbtxt,
    found_batching,
    with_batching,
)
from batchtune.errors import BatchingParametersError

FOUND: dict[str, Any] = {
    "name": "m",
    "platform": "",
    "backend": "python",
    "version_policy": {"latest": {"num_versions": 1}},
    "max_batch_size": 8,
    "input": [
        {"name": "x", "data_type": "TYPE_FP32", "format": "FORMAT_NONE", "dims": [3], "optional": False}
    ],
    "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": [-1], "reshape": {"shape": []}}],
    "batch_input": [],
    "optimization": {"priority": "PRIORITY_DEFAULT", "cuda": {"graphs": False}},
    "dynamic_batching": {
        "preferred_batch_size": [8],
        "max_queue_delay_microseconds": 500,
        "preserve_ordering": True,
        "priority_levels": 2,
        "default_queue_policy": {"timeout_action": "DELAY", "max_queue_size": 7},
        "priority_queue_policy": {"1": {"max_queue_size": 3}},
    },
    "instance_group": [
        {"name": "m_0", "kind": "KIND_GPU", "count": 2, "gpus": [0]},
        {"name": "m_1", "kind": "KIND_GPU", "count": 2, "gpus": [1]},
    ],
    "parameters": {"EXECUTION_ENV_PATH": {"string_value": 'a "quoted"\npath'}},
}


def configuration(flags: tuple[tuple[str, str], ...] = (), **batching: int) -> Configuration:
    values = {"max_batch_size": 16, "batch_timeout_micros": 0, "num_batch_threads": 1, **batching}
    return Configuration(batching=BatchingParameters(**values), dialect="triton", flags=flags)


def test_what_another_batching_part_leaves_out_is_said() -> None:
    """Triton's own filled-in sizes are nobody's word, nor are defaults that it spells out."""
    assert dropped(FOUND, configuration()) == ()
    dynamic = FOUND["dynamic_batching"] | {"preferred_batch_size": [4, 8], "default_priority_level": 0}
    found = FOUND | {"dynamic_batching": dynamic}
    assert dropped(found, configuration()) == ("preferred_batch_size 4,8",)
    assert dropped(found, configuration((("preferred_batch_size", "4,8"),))) == ()
    assert dropped(found, Configuration(batching=None, dialect="triton")) == (
        "preferred_batch_size 4,8",
        "preserve_ordering true",
        "priority_levels 2",
        "default_queue_policy timeout_action DELAY, max_queue_size 7",
        "priority_queue_policy 1 max_queue_size 3",
    )


def test_what_was_found_is_said_again_by_its_own_configuration() -> None:
    found = found_batching(FOUND)
    assert found == FoundBatching(
        max_batch_size=8, dynamic_batching=True, max_queue_delay_microseconds=500, instance_count=2
    )
    again = with_batching(FOUND, configuration_as_found(found))
    again["dynamic_batching"]["preferred_batch_size"] = [8]  # Triton fills in its maximum
    assert again == FOUND


def test_groups_of_different_counts_stay_so_where_the_largest_is_wanted() -> None:
    groups = [{"kind": "KIND_GPU", "count": 1}, {"kind": "KIND_CPU", "count": 4}]
    mixed = {**FOUND, "instance_group": groups}
    found = found_batching(mixed)
    assert found.instance_count == 4
    assert with_batching(mixed, configuration_as_found(found))["instance_group"] == groups
    assert [
        group["count"] for group in with_batching(mixed, configuration(num_batch_threads=2))["instance_group"]
    ] == [2, 2]


def test_only_the_batching_part_changes() -> None:
    changed = with_batching(
        FOUND, configuration(max_batch_size=32, batch_timeout_micros=70, num_batch_threads=3)
    )
    differing = {name for name in FOUND if changed[name] != FOUND[name]}
    assert differing == {"max_batch_size", "dynamic_batching", "instance_group"}
    assert changed["max_batch_size"] == 32
    assert [group["count"] for group in changed["instance_group"]] == [3, 3]
    assert changed["instance_group"][1]["gpus"] == [1]
    dynamic = changed["dynamic_batching"]
    assert dynamic["max_queue_delay_microseconds"] == 70
    assert "preferred_batch_size" not in dynamic  # Triton's own follows max_batch_size
    assert dynamic["priority_queue_policy"] == {"1": {"max_queue_size": 3}}


def test_settings_are_typed_and_nested() -> None:
    flags = (
        ("default_queue_policy.max_queue_size", "50"),
        ("preferred_batch_size", "4,8"),
        ("preserve_ordering", "false"),
    )
    dynamic = with_batching(FOUND, configuration(flags))["dynamic_batching"]
    assert dynamic["default_queue_policy"] == {"timeout_action": "DELAY", "max_queue_size": 50}
    assert dynamic["preferred_batch_size"] == [4, 8]
    assert dynamic["preserve_ordering"] is False
    assert FOUND["dynamic_batching"]["default_queue_policy"]["max_queue_size"] == 7


def test_without_batching_there_is_no_block_and_the_size_stays() -> None:
    off = Configuration(batching=None, dialect="triton", flags=(("instance_group.count", "4"),))
    changed = with_batching(FOUND, off)
    assert "dynamic_batching" not in changed
    assert changed["max_batch_size"] == 8
    assert found_batching(changed).instance_count == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_batch_size": 0}, "no batch dimension"),
        ({"max_batch_size": 4, "sequence_batching": {}}, "it batches sequences"),
        ({"max_batch_size": 4, "ensemble_scheduling": {}}, "tune its parts"),
    ],
)
def test_a_model_that_cannot_be_batched_says_why(config: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchingParametersError) as raised:
        found_batching({"name": "m", **config})
    assert words in raised.value.message


def test_labels_are_in_tritons_words_and_survive_json() -> None:
    said = configuration((("preserve_ordering", "true"),), batch_timeout_micros=500)
    assert said.label() == (
        "max_batch_size=16 max_queue_delay_microseconds=500 instance_group.count=1 preserve_ordering=true"
    )
    assert Configuration.from_dict(said.to_dict()) == said
    with pytest.raises(TypeError):
        Configuration.from_dict({**said.to_dict(), "dialect": "klingon"})


def plain(message: Message) -> list[tuple[str, Any]]:
    return [
        (
            field.name,
            plain(field.value) if isinstance(field.value, Message) else (field.value.kind, field.value.text),
        )
        for field in message.fields
    ]


def test_config_pbtxt_says_everything_in_the_grammar_of_protobuf() -> None:
    fields = plain(parse_text_proto(format_config_pbtxt(FOUND), source="config.pbtxt"))
    assert ("backend", ("string", "python")) in fields
    assert ("max_batch_size", ("number", "8")) in fields
    assert "platform" not in dict(fields)
    assert dict(fields)["input"] == [
        ("name", ("string", "x")),
        ("data_type", ("name", "TYPE_FP32")),
        ("format", ("name", "FORMAT_NONE")),
        ("dims", ("number", "3")),
    ]
    assert ("reshape", []) in dict(fields)["output"]
    assert dict(fields)["parameters"] == [
        ("key", ("string", "EXECUTION_ENV_PATH")),
        ("value", [("string_value", ("string", 'a "quoted"\npath'))]),
    ]
    dynamic = dict(dict(fields)["dynamic_batching"])
    assert dynamic["priority_queue_policy"] == [
        ("key", ("number", "1")),
        ("value", [("max_queue_size", ("number", "3"))]),
    ]
    assert ("timeout_action", ("name", "DELAY")) in dynamic["default_queue_policy"]
    assert [name for name, _ in fields].count("instance_group") == 2


def test_keys_and_numbers_of_64_bits_stand_as_protobuf_reads_them() -> None:
    spec = {"batch_size": 1, "input": {"0": {"dim": ["3", -1]}}}
    config = {
        "optimization": {"cuda": {"graphs": True, "graph_spec": [spec]}},
        "parameters": {"7": {"string_value": "x"}},
        "model_warmup": [{"name": "w", "inputs": {"1": {"dims": ["2"], "zero_data": True}}}],
    }
    text = format_config_pbtxt(config)
    assert [line.strip() for line in text.splitlines() if "key:" in line] == [
        'key: "0"',
        'key: "7"',
        'key: "1"',
    ]
    assert [line.strip() for line in text.splitlines() if "dim" in line] == ["dim: 3", "dim: -1", "dims: 2"]
    parse_text_proto(text, source="config.pbtxt")
