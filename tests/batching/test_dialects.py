"""Do Triton's, Cortex's and flags' texts say what the parameters are?"""

from __future__ import annotations

import pytest
import yaml

from batchtune.batching.cortex import format_cortex
from batchtune.batching.flags import format_flags
from batchtune.batching.parameters import BatchingParameters
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
    assert format_triton(None).startswith("# no dynamic_batching block")


def test_cortex_keys_are_legal_by_cortex_own_rules() -> None:
    written = yaml.safe_load(format_cortex(TUNED))
    assert written == {
        "server_side_batching": {"max_batch_size": 32, "batch_interval": "2ms"},
        "processes_per_replica": 2,
        "threads_per_process": 64,
    }
    assert format_cortex(None).startswith("# no server_side_batching block")
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
