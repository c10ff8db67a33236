"""What a terminal shows of a sweep under way: phases, the trial against the SLO, the best, a plot; in every size."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.load.fleet import LiveAggregate
from batchtune.report import live_view as live
from batchtune.report.findings import text_of
from batchtune.report.live_view import Point, TerminalView, phases_text, scatter
from batchtune.tune.bench import Plan
from batchtune.tune.sweep.sweep import SweepProgress, sweep
from batchtune.tune.trials.trial import Trial, TrialRequest
from batchtune.units import rounded_duration
from tests.tune.tune_fakes import (
    FakeClock,
    FakeFleet,
    FakeTarget,
    asked,
    heard,
    planted,
    remeasured,
    scenario_of,
)

SCENARIO = scenario_of(
    slo={"p95": "60ms"},
    search={"strategy": "guided", "budget": {"time": "90s"}, "space": {"max_batch_size": [1, 8]}},
)
BATCHING = Configuration(batching=BatchingParameters(max_batch_size=8, num_batch_threads=1))
LIVE = LiveAggregate(
    elapsed_s=1.0,
    sent=900,
    done=880,
    errors=0,
    late=0,
    throughput_rps=880.0,
    p50_s=0.01,
    p95_s=0.0213,
    in_flight=16,
    overdue=0,
)


def progress(phase: str = "comparing", elapsed_s: float = 30.0, **changes: Any) -> SweepProgress:
    request = TrialRequest(configuration=BATCHING, source="sampler", reason="the sampler's own")
    standing = SweepProgress(
        phase=phase,
        plan=Plan(number=14, seed=1, request=request),
        elapsed_s=elapsed_s,
        budget_s=90.0,
        trials_done=9,
        trials_max=30,
        best=None,
        live=LIVE,
    )
    return replace(standing, **changes)


def terminal(width: int = 80, height: int = 40) -> Console:
    size = {"width": width, "height": height}
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, record=True, **size)


def shown(console: Console) -> str:
    return console.export_text(clear=True)


@pytest.fixture(autouse=True)
def every_change_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_REFRESH_S", 0.0)


def own_planted(number: int, throughput: float = 900, p95_s: float = 0.02, **changes: Any) -> Trial:
    return planted(number, batching={"max_batch_size": 8}, throughput=throughput, p95_s=p95_s, **changes)


def test_the_panel_says_phases_time_load_trial_and_best() -> None:
    console = terminal(120)
    with TerminalView(SCENARIO, console) as view:
        view.progress(progress("scouting", 0.0))
        view.progress(progress("scouting", 12.0))
        shown(console)
        view.progress(progress("comparing", 30.0, best=own_planted(11)))
    text = shown(console)
    for words in (
        "scouting 12 s · [comparing 18 s] · confirming",
        f"{rounded_duration(60.0)} of {rounded_duration(90.0)}, confirmation included",
        "14 (9 of 30 tried), 16 clients",
        "max_batch_size=8 num_batch_threads=1",
        "the sampler's own",
        "880 requests/s, p95 21.3 ms, 16 in flight (SLO p95 ≤ 60 ms)",
        "trial 11, ",
    ):
        assert words in text


def test_a_trial_that_misses_the_slo_right_now_is_coloured() -> None:
    assert live._against_slo(LIVE, SCENARIO)[1] == ""
    assert live._against_slo(replace(LIVE, p95_s=0.061), SCENARIO)[1] == "yellow"
    assert live._against_slo(LIVE, scenario_of(slo={"p99": "10ms"})) == (
        "880 requests/s, p95 21.3 ms, 16 in flight (SLO p99 ≤ 10 ms)",
        "",
    )
    assert "SLO" not in live._against_slo(LIVE, scenario_of(slo={}))[0]


def test_a_thought_between_trials_keeps_the_panel() -> None:
    console = terminal()
    with TerminalView(SCENARIO, console) as view:
        view.live("waiting for the server")
        assert "waiting for the server" in shown(console)
        view.progress(progress())
        shown(console)
        view.live("the server restarts")
        text = shown(console)
        assert "the server restarts" in text
        assert "in flight" not in text
        assert "batchtune sweep" in text


def test_only_trials_under_the_scenarios_load_are_plotted() -> None:
    """256 clients look ten times better than the 16 of the scenario."""
    own = own_planted(1)
    probe = asked(own_planted(2, 9000), source="calibration", concurrency=256)
    failed = own_planted(3, 0, math.nan, failure="broken")
    silent = remeasured(own, latency_s={})
    assert [rate_rps for rate_rps, _, _ in live._points([own, probe, failed, silent], None)] == [900.0]
    assert live._points([own], own) == [(900.0, 0.02, "best")]
    assert live._points([replace(own, feasible=False)], None) == [(900.0, 0.02, "missed")]


def point(throughput_rps: float, p95_s: float, kind: Any = "kept") -> Point:
    return throughput_rps, p95_s, kind


def plotted(points: list[Point], limit_s: float | None = None, width: int = 40) -> list[str]:
    return [line.plain for line in scatter(points, limit_s=limit_s, width=width, height=7)]


def test_the_plot_puts_fast_points_right_and_slow_points_up() -> None:
    lines = plotted([point(100, 0.1, "missed"), point(1000, 0.01, "best"), point(550, 0.0316)], 0.05)
    top, bottom = lines[1], lines[7]
    assert top.startswith("  100 ms ┤×")
    assert bottom.startswith("   10 ms ┤")
    assert bottom.endswith("◆")
    assert lines[4][10 + 20] == "•"
    assert any(line.count("┄") > 30 for line in lines)
    assert lines[-2].split() == ["100", "1,000", "requests/s"]
    assert lines[-1].strip() == "• measured  × misses the SLO  ◆ best so far  ┄ SLO 50 ms"


def test_a_limit_far_above_is_told_and_costs_the_points_no_room() -> None:
    lines = plotted([point(100, 0.001), point(200, 0.002)], 0.06)
    assert lines[1].startswith("    2 ms ┤")
    assert lines[-1].strip() == "• measured  SLO 60 ms (above)"


@pytest.mark.parametrize("limit_s", [None, 0.06, 1e-6])
@pytest.mark.parametrize("points", [[point(100, 0.01)], [point(100, 0.01), point(100, 0.01)]])
def test_points_that_are_alike_are_plotted_in_the_middle(points: list[Point], limit_s: float | None) -> None:
    lines = plotted(points, limit_s)
    assert sum(line.count("•") for line in lines[1:8]) == 1


def test_phases_to_come_follow_those_that_were() -> None:
    """A phase that was left out does not come after the one that followed it."""
    expected = ("scouting", "comparing", "confirming", "more")
    spent = {"scouting": 9.4, "confirming": 2.0}
    text = phases_text(spent, current="confirming", expected=expected)
    assert text == "scouting 9 s · [confirming 2 s] · more"
    assert phases_text({"other": 1.0}, current="other", expected=expected) == "[other 1 s]"


@pytest.mark.parametrize("width", [12, 40, 80, 200])
@pytest.mark.parametrize("height", [10, 18, 24, 60])
def test_it_fits_every_terminal(width: int, height: int) -> None:
    console = terminal(width, height)
    trials = [own_planted(number, 100 * number) for number in range(1, 20)]
    with TerminalView(SCENARIO, console) as view:
        for trial in trials:
            view.trial(trial)
        view.progress(progress(best=trials[-1]))
        frame = view._live.get_renderable()
    shown(console)
    console.print(frame)
    text = shown(console)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    if "◆" in text:  # the plot is there
        assert len(lines) < height
    assert ("◆" in text) == {10: False, 60: width > 12}.get(height, "◆" in text)


def test_markup_in_a_models_name_is_text() -> None:
    console = terminal()
    with TerminalView(SCENARIO, console) as view:
        view.event("[bold]launching [/nonsense]")
        plan = progress().plan
        request = replace(plan.request, reason="[red]why[/]")
        view.progress(progress(plan=replace(plan, request=request)))
    text = shown(console)
    assert "[bold]launching [/nonsense]" in text
    assert "[red]why[/]" in text


def test_a_whole_sweep_is_followed() -> None:
    console, clock = terminal(100), FakeClock()
    target = FakeTarget(clock)
    scenario = scenario_of()
    with TerminalView(scenario, console) as view:
        on_event = heard(on_progress=view.progress, on_plan=lambda plan: view.event(text_of(plan)))
        for done in sweep(scenario, target, FakeFleet(target), on_event=on_event, now_s=clock):
            view.trial(done.trial)
    text = shown(console)
    assert "[confirming " in text
    assert "◆ best so far" in text
    assert sum(view._phases_s.values()) == pytest.approx(view._progress.elapsed_s, abs=1.0)
