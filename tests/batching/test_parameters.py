"""Are the rules TF Serving's, with its texts, and do parameters survive their plain form?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchtune.batching.parameters import (
    BUCKETS_MAX,
    BatchingParameters,
    Configuration,
    format_length_buckets,
    from_dict,
    parse_length_buckets,
    to_dict,
    validate,
)
from batchtune.errors import BatchingParametersError

SPLITTING = (
    "When enable_large_batch_splitting is true, input_batch_size_limit must be greater than or equal to "
)
LAST_ENTRY = "Last entry in allowed_batch_sizes must match max_batch_size; last entry was 16; expected "
NOT_INCREASING = "allowed_batch_sizes entries must be monotonically increasing"
NEITHER = "enable_large_batch_splitting needs max_batch_size or max_execution_batch_size"
SPLIT = {"enable_large_batch_splitting": True}
SPLIT_8 = {**SPLIT, "max_batch_size": 8}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_batch_size": 1, "batch_timeout_micros": 0, "num_batch_threads": 1, "max_enqueued_batches": 1},
        {"max_enqueued_batches": 0},
        {"max_batch_size": 32, "allowed_batch_sizes": (8, 16, 32)},
        {"allowed_batch_sizes": (500, 1000)},
        {"max_batch_size": 64, "enable_large_batch_splitting": True},
        {"max_batch_size": 64, "enable_large_batch_splitting": True, "max_execution_batch_size": 64},
        {"max_batch_size": 64, "enable_large_batch_splitting": False, "max_execution_batch_size": 128},
    ],
)
def test_what_tf_serving_accepts_is_accepted(fields: dict[str, object]) -> None:
    validate(BatchingParameters(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_batch_threads": 0}, "num_batch_threads must be positive; was 0"),
        ({"max_batch_size": 0}, "input_batch_size_limit must be positive; was 0"),
        ({"batch_timeout_micros": -1}, "batch_timeout_micros must be non-negative; was -1"),
        ({**SPLIT_8, "max_enqueued_batches": 0}, "max_enqueued_batches must be positive; was 0"),
        ({"allowed_batch_sizes": (8, 16)}, f"{LAST_ENTRY}1000"),
        # Also where it is the largest that is executed.
        ({**SPLIT_8, "allowed_batch_sizes": (8, 16), "max_execution_batch_size": 16}, f"{LAST_ENTRY}8"),
        ({"max_batch_size": 16, "allowed_batch_sizes": (8, 4, 16)}, NOT_INCREASING),
        ({"max_batch_size": 8, "allowed_batch_sizes": (8, 8)}, NOT_INCREASING),
        ({**SPLIT_8, "max_execution_batch_size": 32}, f"{SPLITTING}max_execution_batch_size.1832"),
        (SPLIT, f"{NEITHER}; both are absent"),
    ],
)
def test_what_tf_serving_refuses_is_refused_with_its_text(fields: dict[str, object], text: str) -> None:
    with pytest.raises(BatchingParametersError) as caught:
        validate(BatchingParameters(**fields))  # type: ignore[arg-type]
    assert caught.value.message == text


def test_the_plain_form_holds_only_what_is_present() -> None:
    parameters = BatchingParameters(max_batch_size=32, batch_timeout_micros=0, allowed_batch_sizes=(8, 32))
    plain = {"max_batch_size": 32, "batch_timeout_micros": 0, "allowed_batch_sizes": [8, 32]}
    assert to_dict(parameters) == plain
    assert from_dict(plain) == parameters
    assert to_dict(BatchingParameters()) == {}
    assert from_dict({"max_batch_size": np.int64(8)}) == BatchingParameters(max_batch_size=8)


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        ({"max_batch_size": "8"}, "max_batch_size must be a whole number; was '8'"),
        ({"max_batch_size": 8.0}, "max_batch_size must be a whole number; was 8.0"),
        ({"max_batch_size": True}, "max_batch_size must be a whole number; was True"),
        ({"max_batch_size": 2**63}, f"max_batch_size must be a whole number of 64 bits; was {2**63}"),
        ({"thread_pool_name": 3}, "thread_pool_name must be a string; was 3"),
        ({"pad_variable_length_inputs": 1}, "pad_variable_length_inputs must be true or false; was 1"),
        ({"allowed_batch_sizes": 8}, "allowed_batch_sizes must be a list of whole numbers; was 8"),
    ],
)
def test_values_of_another_type_are_refused(plain: dict[str, object], text: str) -> None:
    with pytest.raises(BatchingParametersError) as caught:
        from_dict(plain)
    assert caught.value.message == text


def test_a_misspelt_name_gets_the_right_one_as_a_hint() -> None:
    with pytest.raises(BatchingParametersError) as caught:
        from_dict({"max_batchsize": 8})
    assert caught.value.hint == "did you mean 'max_batch_size'?"


def test_a_configuration_has_a_label_and_a_plain_form() -> None:
    tuned = Configuration(
        batching=BatchingParameters(max_batch_size=32, allowed_batch_sizes=(8, 32)),
        flags=(("tensorflow_intra_op_parallelism", "1"),),
    )
    assert tuned.label() == "max_batch_size=32 allowed_batch_sizes=8,32 --tensorflow_intra_op_parallelism=1"
    assert Configuration.from_dict(tuned.to_dict()) == tuned
    assert Configuration(batching=None).label() == "no batching"
    assert Configuration(batching=BatchingParameters()).label() == "server defaults"
    assert Configuration.from_dict({"batching": None}) == Configuration(batching=None)
    assert len({tuned, Configuration.from_dict(tuned.to_dict())}) == 1


def test_flags_are_sorted_when_read() -> None:
    read = Configuration.from_dict({"batching": None, "flags": {"b": 1, "a": True}})
    assert read.flags == (("a", "True"), ("b", "1"))


def test_one_model_of_several_has_its_own_parameters_and_the_shared_threads() -> None:
    shared = BatchingParameters(max_batch_size=8, num_batch_threads=2)
    configuration = Configuration(
        batching=shared, flags=(("f", "1"),), models=(("a", BatchingParameters(max_batch_size=4)),)
    )
    assert Configuration.from_dict(configuration.to_dict()) == configuration
    assert configuration.of_model("a").batching == BatchingParameters(max_batch_size=4, num_batch_threads=2)
    assert configuration.of_model("b") == Configuration(batching=shared, flags=(("f", "1"),))
    assert configuration.label() == "max_batch_size=8 num_batch_threads=2 --f=1; a: max_batch_size=4"
    assert "models" not in Configuration(batching=shared).to_dict()


@pytest.mark.parametrize(
    ("given", "boundaries"),
    [
        ("32,64,128", (32, 64, 128)),
        (" 32, 64", (32, 64)),
        ([32, 64], (32, 64)),
        (64, (64,)),
        ("none", ()),
        ("", ()),
        ((), ()),
        (" auto ", "auto"),
    ],
)
def test_boundaries_are_a_text_a_list_or_one_length(given: Any, boundaries: tuple[int, ...]) -> None:
    assert parse_length_buckets(given) == boundaries
    assert parse_length_buckets(format_length_buckets(boundaries)) == boundaries


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("64,32", "entries must be monotonically increasing; was 64,32"),
        ("32,32", "entries must be monotonically increasing"),
        ("0,32", "entries must be positive; was 0"),
        (f"32,{'9' * 400}", "entries must be 2147483647 at most"),
        ("Auto", "must be lengths such as 32,64,128, auto or none; was 'Auto'"),
        ("auto,64", "must be lengths"),
        (["auto"], "must be lengths"),
        ("32,,64", "must be lengths"),
        ([32.5], "must be lengths"),
        ([True], "must be lengths"),
        ({"32": 1}, "must be lengths"),
        (None, "must be lengths"),
        (",".join(map(str, range(1, BUCKETS_MAX + 2))), "65 are more than 64"),
        ("9" * 5000, "must be lengths"),
    ],
)
def test_what_are_no_buckets_is_refused(given: Any, words: str) -> None:
    with pytest.raises(BatchingParametersError, match="length_buckets") as caught:
        parse_length_buckets(given)
    assert words in caught.value.message
    assert len(caught.value.message) < 200
