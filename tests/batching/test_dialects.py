"""Do Triton's, Cortex's and flags' texts say what the parameters are?"""

from __future__ import annotations

import shlex

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from batchtune.batching.cortex import format_cortex
from batchtune.batching.flags import format_flags
from batchtune.batching.parameters import BatchingParameters
from batchtune.batching.text_proto import Message, parse_text_proto, whole_number
from batchtune.batching.triton_config import format_triton
from batchtune.errors import BatchingParametersError

TUNED = BatchingParameters(
    max_batch_size=32, batch_timeout_micros=2000, num_batch_threads=2, max_enqueued_batches=100
)


def test_triton_config_is_written_with_its_own_names() -> None:
    assert format_triton(TUNED).splitlines() == [
        "max_batch_size: 32",
        "dynamic_batching {",
        "  max_queue_delay_microseconds: 2000",
        "  default_queue_policy { max_queue_size: 3200 }",
        "}",
        "instance_group [{ count: 2 kind: KIND_AUTO }]",
    ]


def test_triton_queues_requests_and_tf_serving_batches() -> None:
    text = format_triton(TUNED, rows_per_request=5)
    assert "max_queue_size: 600" in text  # six requests a batch
    assert "in TF Serving 10; Triton's queue has no limit" in format_triton(BatchingParameters())
    assert "no limit" not in text


def test_what_triton_cannot_say_is_said_in_a_comment() -> None:
    text = format_triton(BatchingParameters(max_batch_size=8, allowed_batch_sizes=(4, 8)))
    assert text.startswith("# allowed_batch_sizes has no counterpart in Triton\n")


def test_triton_without_a_dynamic_batcher_does_not_batch() -> None:
    assert format_triton(None).startswith("# no dynamic_batching block")


@given(
    st.builds(
        BatchingParameters,
        max_batch_size=st.integers(1, 10_000),
        batch_timeout_micros=st.none() | st.integers(0, 10**7),
        num_batch_threads=st.none() | st.integers(1, 512),
        max_enqueued_batches=st.none() | st.integers(1, 10**5),
    )
)
def test_triton_is_given_each_number_in_its_text_format(parameters: BatchingParameters) -> None:
    top = parse_text_proto(format_triton(parameters), source="config.pbtxt")
    assert numbers(top) == {
        "max_batch_size": parameters.max_batch_size,
        "max_queue_delay_microseconds": parameters.batch_timeout_micros,
        "count": parameters.num_batch_threads,
        "max_queue_size": parameters.max_enqueued_batches
        and min(parameters.max_enqueued_batches * parameters.max_batch_size, 2**32 - 1),
    }


def numbers(message: Message) -> dict[str, int | None]:
    """Every whole number of a text, by field name; None: it is not there."""
    values: dict[str, int | None] = dict.fromkeys(
        ("max_batch_size", "max_queue_delay_microseconds", "count", "max_queue_size")
    )
    for field in message.fields:
        if isinstance(field.value, Message):
            values |= {name: value for name, value in numbers(field.value).items() if value is not None}
        elif field.value.kind == "number":
            values[field.name] = whole_number(field, source="config.pbtxt")
    return values


def test_cortex_keys_are_legal_by_cortex_own_rules() -> None:
    written = yaml.safe_load(format_cortex(TUNED))
    assert written == {
        "server_side_batching": {"max_batch_size": 32, "batch_interval": "2ms"},
        "processes_per_replica": 2,
        "threads_per_process": 64,
    }
    assert format_cortex(None).startswith("# no server_side_batching block")


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


@given(
    st.builds(
        BatchingParameters,
        max_batch_size=st.none() | st.integers(),
        thread_pool_name=st.none() | st.text(max_size=10),
        allowed_batch_sizes=st.lists(st.integers(-9, 9), min_size=0, max_size=3).map(tuple),
        enable_large_batch_splitting=st.none() | st.booleans(),
    ).filter(lambda one: one.max_batch_size is None or abs(one.max_batch_size) < 2**63)
)
def test_flags_hold_what_they_were_given(parameters: BatchingParameters) -> None:
    words = shlex.split(format_flags(parameters))
    assert words[0] == "--enable_batching=true"
    flags = dict(word.removeprefix("--").split("=", 1) for word in words[1:])
    sizes, splitting = parameters.allowed_batch_sizes, parameters.enable_large_batch_splitting
    expected = {
        "max_batch_size": parameters.max_batch_size,
        "thread_pool_name": parameters.thread_pool_name,
        "allowed_batch_sizes": ",".join(map(str, sizes)) if sizes else None,
        "enable_large_batch_splitting": splitting if splitting is None else str(splitting).lower(),
    }
    assert flags == {name: str(value) for name, value in expected.items() if value is not None}
