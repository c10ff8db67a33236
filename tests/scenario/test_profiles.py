"""A day of rates is read as it is meant, and a mistake in it is named by file, line and column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchtune.errors import UsageError
from batchtune.scenario.arrivals import draw
from batchtune.scenario.profiles import PARTS, profile_of_load, read_profile
from batchtune.scenario.spec.load import LoadSpec


def written(folder: Path, text: str) -> Path:
    path = folder / "day.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "starts", "lengths_h", "rates"),
    [
        ("hour,rate\n0,100\n6,1.2k/s\n22.5,300/min\n", ["0", "6", "22.5"], [6, 16.5, 1.5], [100, 1200, 5]),
        ("time, requests/s\n08:00, 5\n20:30:00, 1\n", ["08:00", "20:30:00"], [12.5, 11.5], [5, 1]),
        ("note,time,rps\nx,2026-11-23T00:00,7\ny,2026-11-23T01:00,8\n", None, [1, 1], [7, 8]),
        ("hour,rate\n0,1\n30,2\n", ["0", "30"], [30, 30], [1, 2]),
        ("\ufeffhour,rate\n0,1\n12,2\n\n", ["0", "12"], [12, 12], [1, 2]),
    ],
)
def test_intervals_hold_until_the_next_one(
    tmp_path: Path, text: str, starts: list[str] | None, lengths_h: list[float], rates: list[float]
) -> None:
    profile = read_profile(written(tmp_path, text))
    assert starts is None or [part.name for part in profile] == starts
    assert [part.length_s / 3600 for part in profile] == pytest.approx(lengths_h)
    assert [part.rate_rps for part in profile] == pytest.approx(rates)


def test_relative_rates_are_scaled_so_that_the_highest_is_the_peak(tmp_path: Path) -> None:
    profile = read_profile(written(tmp_path, "hour,relative\n0,20\n12,80\n18,0\n"), peak_rps=1000.0)
    assert [part.rate_rps for part in profile] == [250.0, 1000.0, 0.0]


@pytest.mark.parametrize(
    ("text", "peak_rps", "expected"),
    [
        ("", None, "day.csv: the profile is empty"),
        ("hour,rate\n", None, "day.csv: the profile is empty"),
        ("hour,rate\n0,5\n", None, "day.csv: one line is no profile"),
        ("day,rate\n0,5\n", None, "day.csv:1: expected a column hour or time; the header has day, rate"),
        (
            "hour,load\n0,5\n",
            None,
            "day.csv:1: expected one column rate or relative; the header has hour, load",
        ),
        ("hour,rate,relative\n0,5,1\n", None, "day.csv:1: expected one column rate or relative"),
        ("hour,rate\n0,5\n1,many\n", None, "day.csv:3: rate: expected requests/s from 0"),
        ("hour,rate\n0,5\n1,-4\n", None, "day.csv:3: rate: expected requests/s from 0"),
        ("hour,rate\n0,5\n1\n", None, "day.csv:3: rate: expected requests/s from 0"),
        ("hour,relative\n0,1\n1,nan\n", 9.0, "day.csv:3: relative: expected a number from 0"),
        ("hour,rate\nnoon,5\n13,4\n", None, "day.csv:2: hour: expected a number of hours; was 'noon'"),
        ("hour,rate\n0,5\n1e306,4\n", None, "day.csv:3: hour: expected a number of hours; was '1e306'"),
        ("time,rate\n25:00,5\n", None, "day.csv:2: time: expected a time such as 14:30"),
        ("time,rate\n23:00,5\n00:00,4\n", None, "day.csv:3: time: 00:00 does not come after 23:00 of line 2"),
        ("hour,rate\n1,5\n1,4\n", None, "day.csv:3: hour: 1 does not come after 1 of line 2"),
        ("hour,rate\n0,0\n1,0\n", None, "day.csv: rate: no line has more than 0"),
        ("hour,relative\n0,1\n1,2\n", None, "day.csv:1: relative: needs the rate of the peak"),
        ("hour,rate\n0,1\n1,2\n", 5.0, "day.csv:1: rate: these are requests/s, and so is --rate"),
    ],
)
def test_mistakes_are_named_by_line_and_column(
    tmp_path: Path, text: str, peak_rps: float | None, expected: str
) -> None:
    with pytest.raises(UsageError) as failure:
        read_profile(written(tmp_path, text), peak_rps=peak_rps)
    assert expected in failure.value.message


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read as a profile"):
        read_profile(tmp_path / "absent.csv")
    (tmp_path / "bytes.csv").write_bytes(b"hour,rate\n\xff,1\n")
    with pytest.raises(UsageError, match="cannot be read as a profile"):
        read_profile(tmp_path / "bytes.csv")


def test_a_ramp_is_planned_by_the_highest_rate_of_each_part() -> None:
    load = LoadSpec.model_validate(
        {"arrivals": "ramp", "ramp": {"from": "240/s", "to": "0/s"}, "duration": "48s"}
    )
    profile = profile_of_load(load)
    assert len(profile) == PARTS
    assert profile[0].rate_rps == 240.0
    assert profile[-1].rate_rps == pytest.approx(10.0)
    assert sum(part.length_s for part in profile) == pytest.approx(48.0)


def test_a_trace_is_counted(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("offset_s\n" + "".join(f"{at}\n" for at in (0, 0.5, 1.2, 24)), encoding="utf-8")
    load = LoadSpec.model_validate(
        {"arrivals": "trace", "trace": {"file": str(trace), "speed": 2}, "duration": "48s"}
    )
    profile = profile_of_load(load)
    assert profile[0].length_s == pytest.approx(0.5)
    assert [part.rate_rps for part in profile[:3]] == [4.0, 2.0, 0.0]
    assert profile[-1].rate_rps == 2.0


def test_a_rate_scales_steps_as_it_scales_what_is_sent() -> None:
    """The mean is that of the whole run: the warm-up is sent at the first rate."""
    steps = [{"rate": "1/s", "duration": "10s"}, {"rate": "3/s", "duration": "10s"}]
    load = LoadSpec.model_validate({"arrivals": "steps", "steps": steps, "rate": "400/s", "warm_up": "20s"})
    profile = profile_of_load(load)
    assert [part.length_s for part in profile] == [10.0, 10.0]
    assert [part.rate_rps for part in profile] == [pytest.approx(400.0 / 1.5), pytest.approx(800.0)]
    due_s = draw(load).due_ns / 1e9
    assert np.count_nonzero(due_s >= 30.0) == pytest.approx(8_000, rel=0.05)


def test_a_rate_plays_a_trace_faster(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("offset_s\n" + "".join(f"{at}\n" for at in (0, 0.5, 1.2, 24)), encoding="utf-8")
    load = LoadSpec.model_validate({"arrivals": "trace", "trace": {"file": str(trace)}, "rate": "1/s"})
    profile = profile_of_load(load)  # 3 in 24 s, as recorded
    assert sum(part.length_s for part in profile) == pytest.approx(3.0)
    assert [part.rate_rps for part in profile[:3]] == [pytest.approx(16.0), pytest.approx(8.0), 0.0]


def test_steady_loads_have_no_profile() -> None:
    assert profile_of_load(LoadSpec.model_validate({"arrivals": "poisson", "rate": "5/s"})) == ()
