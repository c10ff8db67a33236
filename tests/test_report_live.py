"""What a log hears of a run: a line per event, and one every ten seconds in between."""

from __future__ import annotations

import io

import pytest

from batchtune.report import live


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    return now


def test_a_log_hears_of_a_long_trial_every_ten_seconds(clock: list[float]) -> None:
    log = io.StringIO()
    with live.sweep_view(quiet=False, stream=log) as view:
        view.event("launching")
        for at_s in range(101, 126):
            clock[0] = float(at_s)
            view.live(f"{at_s} requests")
    assert log.getvalue().splitlines() == [
        "[   0.0 s] launching",
        "[  10.0 s] 110 requests",
        "[  20.0 s] 120 requests",
    ]


def test_a_quiet_view_says_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with live.sweep_view(quiet=True) as view:
        view.event("launching")
        clock[0] += 60.0
        view.live("1 request")
    assert capsys.readouterr() == ("", "")
