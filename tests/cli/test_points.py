"""Ranges of rates and of clients on the command line."""

from __future__ import annotations

import pytest

from batchtune.cli.arguments.load_request import parse_range
from batchtune.errors import UsageError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8", [8]),
        ("500/s", [500]),
        ("1,2,8", [1, 2, 8]),
        ("1:4", [1, 2, 3, 4]),
        ("100:500:200", [100, 300, 500]),
        ("100:450:200", [100, 300]),
        ("1:64:x2", [1, 2, 4, 8, 16, 32, 64]),
        ("1:100:x2", [1, 2, 4, 8, 16, 32, 64, 100]),
        ("100/s:1k/s:*10", [100, 1000]),
        ("4:4:x2", [4]),
        ("1,4:8:4", [1, 4, 8]),
    ],
)
def test_ranges_of_rates_and_concurrencies(text: str, values: list[float]) -> None:
    assert parse_range(text) == tuple(values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "1:",
        "4:1",
        "1:4:0",
        "1:4:x1",
        "0:4:x2",
        "1:2:3:4",
        "1:9:x",
        "0:1M:1",
        "9" * 400,
        f"1:{'9' * 400}:x2",
        "1:64:x1.00001",
    ],
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_range(text)
