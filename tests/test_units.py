"""Are durations, rates and ratios read exactly, and is a missing unit noticed?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.errors import UsageError
from batchtune.units import (
    format_duration,
    parse_duration_s,
    parse_rate_rps,
    parse_ratio,
    percentage,
    rounded,
    rounded_duration,
    three_digits,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("1.5s", 1.5),
        ("2min", 120.0),
        ("1m30s", 90.0),
        ("500us", 0.0005),
        ("500µs", 0.0005),
        ("100ns", 1e-7),
        ("1h", 3600.0),
        (".5s", 0.5),
        ("20 ms", 0.02),
        (" 20ms ", 0.02),
        ("0", 0.0),
    ],
)
def test_a_duration_is_read_to_the_nearest_float(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "20", "1.5", "ms", "20 parsecs", "20msx", "1e3s", "5 s 3", "20mss", "1:30"]
)
def test_a_duration_without_a_known_unit_is_refused_and_a_bare_number_gets_both_readings(text: str) -> None:
    with pytest.raises(UsageError, match="expected a duration with its unit") as raised:
        parse_duration_s(text)
    assert (raised.value.hint == "write 20ms or 20s") == (text == "20")
    with pytest.raises(UsageError, match=r"expected a positive duration with its unit, .*; was '-60ms'"):
        parse_duration_s("-60ms")


@given(st.floats(0, 1e6, allow_nan=False, allow_infinity=False))
def test_a_duration_written_is_read_back_exactly(seconds: float) -> None:
    assert parse_duration_s(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.02, "20ms"), (1.5, "1.5s"), (120.0, "120s"), (0.0005, "500us"), (1e-7, "0.1us")],
)
def test_a_duration_is_written_in_its_natural_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "rps"),
    [("500", 500.0), ("500/s", 500.0), ("30/min", 0.5), ("2k/s", 2000.0), ("1.5k", 1500.0), ("7 rps", 7.0)],
)
def test_a_rate_is_read_per_second(text: str, rps: float) -> None:
    assert parse_rate_rps(text) == rps


@pytest.mark.parametrize("text", ["", "fast", "-1", "5/week", "5//s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a rate"):
        parse_rate_rps(text)


def test_a_ratio_is_a_percentage_or_a_number() -> None:
    assert parse_ratio("1%") == 0.01
    assert parse_ratio("0.1 %") == 0.001
    assert parse_ratio("0.25") == 0.25
    with pytest.raises(UsageError, match="percentage"):
        parse_ratio("one percent")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (5e-7, "0.5 µs"),
        (85e-5, "850 µs"),
        (0.9999e-3, "1.00 ms"),
        (0.00935, "9.35 ms"),
        (0.9994, "999 ms"),
        (0.99996, "1.00 s"),
        (3.0, "3 s"),
        (59.97, "1 min 00 s"),
        (185.0, "3 min 05 s"),
        (float("inf"), "unbounded"),
        (float("nan"), "–"),
    ],
)
def test_a_sentence_gives_a_duration_three_digits_and_its_natural_unit(seconds: float, text: str) -> None:
    assert rounded_duration(seconds) == text


@given(st.floats(1e-9, 1e7))
def test_a_rounded_duration_is_read_back_within_its_digits(seconds: float) -> None:
    text = rounded_duration(seconds)
    assert "e" not in text
    assert parse_duration_s(text.replace(" min ", "m").replace(" ", "")) == pytest.approx(seconds, rel=0.0101)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123456.0, "123,000"),
        (999.6, "1,000"),
        (6.4, "6.4"),
        (6.4013, "6.40"),
        (0.05, "0.05"),
        (0.05004, "0.0500"),
        (-12.96, "-13.0"),
        (99.96, "100"),
        (None, "–"),
        (0.0, "0"),
        (1e-7, "0.0000001"),
        (float("inf"), "unbounded"),
        (float("-inf"), "unbounded"),
        (float("nan"), "–"),
    ],
)
def test_a_number_has_three_digits_or_fewer_where_they_are_exact(value: float | None, text: str) -> None:
    assert rounded(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(6.4, "6.40"), (12345.6, "12,300"), (99.96, "100"), (0.0, "0"), (float("nan"), "–")]
)
def test_the_ends_of_an_interval_keep_their_zeros(value: float, text: str) -> None:
    assert three_digits(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.12, "12 %"), (0.12345, "12.3 %"), (0.0005, "0.05 %"), (1.0, "100 %"), (None, "–")]
)
def test_a_percentage_is_written_as_any_number(ratio: float | None, text: str) -> None:
    assert percentage(ratio) == text
