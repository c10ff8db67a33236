"""Length buckets are read from a flag, a scenario or JSON, and refused in words where they are none."""

from __future__ import annotations

from typing import Any

import pytest

from batchtune.batching.parameters import BUCKETS_MAX, format_length_buckets, parse_length_buckets
from batchtune.errors import BatchingParametersError


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
