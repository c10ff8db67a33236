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
    "parameters": {"EXECUTION_ENV_PATH": {"string_value": "path"}},
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
    changed = with_batching(mixed, configuration(num_batch_threads=2))
    assert [group["count"] for group in changed["instance_group"]] == [2, 2]


def test_only_the_batching_part_changes() -> None:
    wanted = configuration(max_batch_size=32, batch_timeout_micros=70, num_batch_threads=3)
    dynamic = FOUND["dynamic_batching"] | {"max_queue_delay_microseconds": 70}
    del dynamic["preferred_batch_size"]  # Triton's own follows max_batch_size
    groups = [group | {"count": 3} for group in FOUND["instance_group"]]
    changes = {"max_batch_size": 32, "dynamic_batching": dynamic, "instance_group": groups}
    assert with_batching(FOUND, wanted) == FOUND | changes


def test_settings_are_typed_and_nested() -> None:
    said = {
        "default_queue_policy.max_queue_size": "50",
        "preferred_batch_size": "4,8",
        "preserve_ordering": "false",
    }
    dynamic = with_batching(FOUND, configuration(tuple(said.items())))["dynamic_batching"]
    assert dynamic == FOUND["dynamic_batching"] | {
        "max_queue_delay_microseconds": 0,
        "default_queue_policy": {"timeout_action": "DELAY", "max_queue_size": 50},
        "preferred_batch_size": [4, 8],
        "preserve_ordering": False,
    }
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
        (one.name, plain(one.value) if isinstance(one.value, Message) else (one.value.kind, one.value.text))
        for one in message.fields
    ]


def test_config_pbtxt_says_everything_in_the_grammar_of_protobuf() -> None:
    """Keys and numbers of 64 bits stand as protobuf reads them."""
    config = {
        "platform": "",
        "backend": "python",
        "max_batch_size": 8,
        "input": FOUND["input"],
        "output": [{"dims": ["3", -1], "reshape": {"shape": []}}],
        "batch_input": [],
        "dynamic_batching": {
            "priority_queue_policy": {"1": {"timeout_action": "DELAY", "max_queue_size": 3}}
        },
        "instance_group": [{"count": 2}, {"count": 1}],
        "parameters": {"7": {"string_value": 'a "quoted"\npath'}},
        "optimization": {"cuda": {"graphs": True, "graph_spec": [{"input": {"0": {"dim": ["3"]}}}]}},
        "model_warmup": [{"inputs": {"1": {"zero_data": True}}}],
    }
    policy = [("timeout_action", ("name", "DELAY")), ("max_queue_size", ("number", "3"))]
    spec = [("input", [("key", ("string", "0")), ("value", [("dim", ("number", "3"))])])]
    quoted = [("string_value", ("string", 'a "quoted"\npath'))]
    zero = [("zero_data", ("name", "true"))]
    x = {"name": ("string", "x"), "data_type": ("name", "TYPE_FP32"), "format": ("name", "FORMAT_NONE")}
    assert plain(parse_text_proto(format_config_pbtxt(config), source="config.pbtxt")) == [
        ("backend", ("string", "python")),
        ("max_batch_size", ("number", "8")),
        ("input", [*x.items(), ("dims", ("number", "3"))]),
        ("output", [("dims", ("number", "3")), ("dims", ("number", "-1")), ("reshape", [])]),
        ("dynamic_batching", [("priority_queue_policy", [("key", ("number", "1")), ("value", policy)])]),
        ("instance_group", [("count", ("number", "2"))]),
        ("instance_group", [("count", ("number", "1"))]),
        ("parameters", [("key", ("string", "7")), ("value", quoted)]),
        ("optimization", [("cuda", [("graphs", ("name", "true")), ("graph_spec", spec)])]),
        ("model_warmup", [("inputs", [("key", ("string", "1")), ("value", zero)])]),
    ]
