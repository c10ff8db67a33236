"""Do Triton's, Cortex's and flags' ways of writing mean the same parameters?"""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from batchtune.batching import (
    BatchingParameters,
    format_cortex,
    format_flags,
    format_triton,
    parse_cortex,
    parse_flags,
    parse_triton,
)
from batchtune.errors import BatchingParametersError

TUNED = BatchingParameters(
    max_batch_size=32, batch_timeout_micros=2000, num_batch_threads=2, max_enqueued_batches=100
)

BLOCK = "server_side_batching: {max_batch_size: 8, batch_interval: 1s}\n"
CONFIG_PBTXT = """
name: "m"  backend: "python"  max_batch_size: 8
input  [{ name: "INPUT0"  data_type: TYPE_FP32 dims: [ 16 ] }]
output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }]
instance_group [{ count: 1 kind: KIND_CPU }, { kind: KIND_CPU }]
dynamic_batching { max_queue_delay_microseconds: 500 preferred_batch_size: [4, 8] }
parameters { key: "execute_delay_ms" value: { string_value: "5" } }
"""


def test_triton_config_is_written_with_its_own_names() -> None:
    assert format_triton(TUNED, kind="KIND_CPU").splitlines() == [
        "max_batch_size: 32",
        "dynamic_batching {",
        "  max_queue_delay_microseconds: 2000",
        "  default_queue_policy { max_queue_size: 3200 }",
        "}",
        "instance_group [{ count: 2 kind: KIND_CPU }]",
    ]


def test_a_whole_triton_config_is_read() -> None:
    assert parse_triton(CONFIG_PBTXT) == BatchingParameters(
        max_batch_size=8, batch_timeout_micros=500, num_batch_threads=2
    )


def test_triton_queues_requests_and_tf_serving_batches() -> None:
    text = format_triton(TUNED, rows_per_request=5)
    assert "max_queue_size: 640" in text
    assert parse_triton(text, rows_per_request=5) == TUNED


def test_what_triton_cannot_say_is_said_in_a_comment() -> None:
    text = format_triton(BatchingParameters(max_batch_size=8, allowed_batch_sizes=(4, 8)))
    assert text.startswith("# allowed_batch_sizes has no counterpart in Triton\n")
    assert parse_triton(text) == BatchingParameters(max_batch_size=8)


def test_triton_without_a_dynamic_batcher_does_not_batch() -> None:
    assert parse_triton(format_triton(None)) is None
    assert parse_triton('name: "m" max_batch_size: 8') is None


@pytest.mark.parametrize("text", ["dynamic_batching { }", "max_batch_size: 0\ndynamic_batching { }"])
def test_a_dynamic_batcher_needs_a_batch_dimension(text: str) -> None:
    with pytest.raises(BatchingParametersError, match="needs a max_batch_size"):
        parse_triton(text, source="config.pbtxt")


@pytest.mark.parametrize(
    "text",
    [
        "max_batch_size: 8 dynamic_batching: true",
        "max_batch_size: eight dynamic_batching {}",
        "max_batch_size: 8 dynamic_batching {} instance_group [{ count: 0 }]",
        "max_batch_size: 8 dynamic_batching {",
    ],
)
def test_a_broken_triton_config_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(BatchingParametersError, match=r"^config\.pbtxt:"):
        parse_triton(text, source="config.pbtxt")


@given(
    st.builds(
        BatchingParameters,
        max_batch_size=st.integers(1, 10_000),
        batch_timeout_micros=st.none() | st.integers(0, 10**7),
        num_batch_threads=st.none() | st.integers(1, 512),
        max_enqueued_batches=st.none() | st.integers(1, 10**5),
    )
)
def test_triton_gives_back_what_it_was_given(parameters: BatchingParameters) -> None:
    assert parse_triton(format_triton(parameters)) == parameters


def test_cortex_keys_are_legal_by_cortex_own_rules() -> None:
    written = yaml.safe_load(format_cortex(TUNED))
    assert written == {
        "server_side_batching": {"max_batch_size": 32, "batch_interval": "2ms"},
        "processes_per_replica": 2,
        "threads_per_process": 64,
    }
    assert parse_cortex(format_cortex(TUNED)) == BatchingParameters(
        max_batch_size=32, batch_timeout_micros=2000, num_batch_threads=2
    )


@pytest.mark.parametrize(
    ("interval", "micros"), [("0.1s", 100_000), ("100ms", 100_000), ("1m30s", 90_000_000), ("1500us", 1500)]
)
def test_a_whole_cortex_specification_is_read(interval: str, micros: int) -> None:
    text = f"""
- name: classifier
  kind: RealtimeAPI
  predictor:
    type: tensorflow
    models: {{path: s3://bucket/model}}
    server_side_batching: {{max_batch_size: 32, batch_interval: {interval}}}
    processes_per_replica: 4
    threads_per_process: 192
"""
    assert parse_cortex(text) == BatchingParameters(
        max_batch_size=32, batch_timeout_micros=micros, num_batch_threads=4
    )


def test_cortex_without_the_block_does_not_batch() -> None:
    assert parse_cortex(format_cortex(None)) is None
    assert parse_cortex("- name: a\n  predictor: {type: tensorflow}\n") is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("server_side_batching: {max_batch_size: 1, batch_interval: 1s}", "2 to 1024"),
        ("server_side_batching: {max_batch_size: 8, batch_interval: 0s}", "above 0"),
        ("server_side_batching: {max_batch_size: 8, batch_interval: 1}", "a duration such as"),
        ("server_side_batching: {max_batch_size: 8}", "takes max_batch_size and batch_interval"),
        ("server_side_batching: {max_batch_size: x, batch_interval: 1s}", "whole number"),
        (
            BLOCK + "processes_per_replica: 2\nthreads_per_process: 3\n",
            r"processes_per_replica \* threads_per_process \(2 \* 3 = 6\)",
        ),
        ("[unclosed", "not YAML"),
    ],
)
def test_what_cortex_would_refuse_is_refused(text: str, what: str) -> None:
    with pytest.raises(BatchingParametersError, match=what):
        parse_cortex(text)


def test_cortex_cannot_say_an_interval_of_zero() -> None:
    with pytest.raises(BatchingParametersError, match="above 0"):
        format_cortex(BatchingParameters(max_batch_size=8))


def test_flags_are_one_line_for_a_shell() -> None:
    line = format_flags(
        BatchingParameters(max_batch_size=8, allowed_batch_sizes=(4, 8), pad_variable_length_inputs=True)
    )
    assert line == (
        "--enable_batching=true --max_batch_size=8 --allowed_batch_sizes=4,8 --pad_variable_length_inputs=true"
    )
    assert format_flags(None) == "--enable_batching=false"
    assert parse_flags("--enable_batching=false") is None


@given(
    st.builds(
        BatchingParameters,
        max_batch_size=st.none() | st.integers(),
        thread_pool_name=st.none() | st.text(max_size=10),
        allowed_batch_sizes=st.lists(st.integers(-9, 9), min_size=0, max_size=3).map(tuple),
        enable_large_batch_splitting=st.none() | st.booleans(),
    ).filter(lambda one: one.max_batch_size is None or abs(one.max_batch_size) < 2**63)
)
def test_flags_give_back_what_they_were_given(parameters: BatchingParameters) -> None:
    assert parse_flags(format_flags(parameters)) == parameters


def test_flags_are_read_with_dashes_or_underscores() -> None:
    assert parse_flags(["--max-batch-size=8", "-num_batch_threads=2", "--pad_variable_length_inputs"]) == (
        BatchingParameters(max_batch_size=8, num_batch_threads=2, pad_variable_length_inputs=True)
    )


@pytest.mark.parametrize(
    "words",
    [
        "max_batch_size=8",
        "--max_batchsize=8",
        "--max_batch_size=8 --max_batch_size=9",
        "--max_batch_size",
        "--max_batch_size=many",
        "--pad_variable_length_inputs=maybe",
        "--enable_batching=false --max_batch_size=8",
        "--thread_pool_name='open",
    ],
)
def test_flags_that_mean_nothing_are_refused(words: str) -> None:
    with pytest.raises(BatchingParametersError):
        parse_flags(words)
