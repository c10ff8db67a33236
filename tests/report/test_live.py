"""What a log hears of a run: a line per event, and one every ten seconds in between."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from batchtune.measure.quantiles import Estimate
from batchtune.report import live_view as live
from batchtune.report.tables import span
from batchtune.tune.trials.trial import Trial
from tests.tune.answer.ledgers import streamed_ledger
from tests.tune.tune_fakes import asked, exactly, planted, remeasured, scenario_of


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


def trial(concurrency: int | None = None, rate_rps: float | None = None, source: str = "sampler") -> Trial:
    batching = {"max_batch_size": 4, "num_batch_threads": 1}
    load = {"concurrency": concurrency, "offered_rps": rate_rps}
    made = planted(7, batching=batching, throughput=rate_rps or 133.0, p95_s=0.03, source=source, **load)
    return asked(made, concurrency=concurrency, rate_rps=rate_rps)


def test_every_line_says_under_which_load() -> None:
    line = live.trial_line(trial(concurrency=4))
    assert line.startswith("trial 7 [sampler] max_batch_size=4 num_batch_threads=1, 4 clients: ")
    offered = live.trial_line(trial(rate_rps=50.0))
    assert ", 50/s offered: " in offered


def test_of_streams_a_line_says_first_tokens_and_gaps() -> None:
    (streamed, *_) = streamed_ledger()
    assert "ttft_p95 40.0 [40.0, 40.0] ms, itl_p99 8.00 [8.00, 8.00] ms" in live.trial_line(streamed)


def test_a_miss_at_a_rate_names_the_rate() -> None:
    assert "misses the SLO at 120/s" in live.trial_line(replace(trial(rate_rps=120.0), feasible=False))
    slow = trial(rate_rps=120.0)
    assert "did not keep up with the rate" in live.trial_line(remeasured(slow, throughput_rps=exactly(80.0)))
    assert "keep up" not in live.trial_line(slow)
    closed = live.trial_line(replace(trial(concurrency=16), feasible=False))
    assert "misses the SLO" in closed
    assert "misses the SLO at" not in closed


def test_without_an_slo_nothing_is_missed() -> None:
    failing = replace(trial(concurrency=16), feasible=False)
    assert "misses" not in live.trial_line(failing, scenario=scenario_of(slo={}))
    assert "misses the SLO" in live.trial_line(failing, scenario=scenario_of())


def test_a_scout_is_marked_and_misses_nothing() -> None:
    """256 clients look ten times better than the 16 of the scenario."""
    line = live.trial_line(replace(trial(source="calibration", concurrency=256), feasible=False))
    assert "trial 7 [scout]" in line
    assert "256 clients" in line
    assert "misses" not in line


def test_a_slow_model_is_told_in_seconds() -> None:
    slow = remeasured(trial(concurrency=4), latency_s={"p95": Estimate(value=2.5, low=2.4, high=2.6)})
    assert "p95 2.50 [2.40, 2.60] s" in live.trial_line(slow)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (8.9, 9.4, "8.90-9.40"),
        (9.401, 9.402, "9.40"),
        (9.4, float("inf"), "9.40 or more"),
        (float("nan"), float("nan"), "–"),
    ],
)
def test_a_range_is_told_by_its_ends(low: float, high: float, words: str) -> None:
    assert span(Estimate(value=low, low=low, high=high)) == words
