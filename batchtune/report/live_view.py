"""Shows what goes on: one live view on a terminal, a plain line per event anywhere else; all on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Self, TextIO, TypeAlias

from batchtune.measure.caveats import CLIENT_CODES, HOST_CODES
from batchtune.report.findings import text_of
from batchtune.report.tables import latency
from batchtune.report.words import limit_word
from batchtune.scenario.spec.check import limit_words
from batchtune.tune.evidence.best_point import usual_bottleneck
from batchtune.tune.evidence.bracket import keeps_up
from batchtune.tune.sweep.sweep import PHASES
from batchtune.tune.trials.trial import NO_CANDIDATES
from batchtune.units import counted, percentage, rounded, rounded_duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

    from batchtune.load.fleet import LiveAggregate
    from batchtune.measure.measurement import Measurement
    from batchtune.scenario.spec.scenario import Scenario
    from batchtune.tune.bench import Plan
    from batchtune.tune.sweep.sweep import SweepProgress
    from batchtune.tune.trials.trial import Trial, TrialRequest


_LEFT_OF_PLOT: Final = 10

Kind = Literal["kept", "missed", "best"]
"""What a trial in the plot shows: the SLO was met, it was missed, or it is the best so far."""
_MARKS: Final[Mapping[Kind, tuple[str, str]]] = {
    "kept": ("•", ""),
    "missed": ("×", "yellow"),
    "best": ("◆", "green"),
}
"""Kind of a point -> (character, style); later ones are drawn over earlier ones."""


Point: TypeAlias = tuple[float, float, Kind]
"""One trial under the scenario's own load, as the plot shows it: (requests/s, p95 in seconds, kind)."""


def panel(
    rows: Iterable[tuple[str, str, str]],
    *,
    points: Sequence[Point],
    limit_s: float | None,
    console: Console,
) -> RenderableType:
    """Return the panel of a sweep: rows of (label, text, style), and below them a plot of the points where
    there is room.

    `limit_s`: the SLO's limit of p95, None without one.
    """
    # A plot has at least and at most so many lines; where there is no room for the least there is none.
    # Lines of the panel that are neither row nor plot: border, gap, title, axis, its labels, legend.
    around_plot, border = 7, 4
    plot_heights = (4, 7)
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, text, style in rows:
        table.add_row(Text(label, style="dim"), Text(text, style=style))
    width = min(console.width, 100)
    inside = console.options.update(width=width - border)
    least, most = plot_heights
    height = min(most, console.height - 1 - around_plot - len(console.render_lines(table, inside)))
    columns = min(56, width - border - _LEFT_OF_PLOT)
    shown: list[RenderableType] = [table]
    if points and height >= least and columns >= 20:
        shown += ["", *scatter(points, limit_s=limit_s, width=columns, height=height)]
    return Panel(Group(*shown), title="batchtune sweep", title_align="left", width=width)


def phases_text(phases_s: Mapping[str, float], *, current: str, expected: Sequence[str]) -> str:
    """Return the seconds spent in each phase, the `current` one in brackets, then the `expected` phases that come
    after it."""
    phases = [
        f"[{name} {seconds:.0f} s]" if name == current else f"{name} {seconds:.0f} s"
        for name, seconds in phases_s.items()
    ]
    following = expected[expected.index(current) + 1 :] if current in expected else ()
    return " · ".join([*phases, *(name for name in following if name not in phases_s)])


def scatter(points: Sequence[Point], *, limit_s: float | None, width: int, height: int) -> list[Text]:
    """Return lines of text that plot p95 (logarithmic, upwards) over throughput (to the right), with the SLO
    as a line.

    `width`, `height`: of the plot in characters, without its labels. A limit far above all points is named
    below instead.
    """
    # A limit that is further above the slowest point is named below the plot, so that the points keep
    # their room.
    limit_shown = 4.0
    from rich.text import Text

    rates, latencies_s, kinds = zip(*points, strict=True)
    slowest_s = max(latencies_s)
    is_limit_shown = limit_s is not None and limit_s <= limit_shown * slowest_s
    seconds = [*latencies_s, *([limit_s] if limit_s and is_limit_shown else [])]
    grid = [[(" ", "") for _ in range(width)] for _ in range(height)]
    if limit_s is not None and is_limit_shown:
        grid[_place(limit_s, seconds, height, logarithmic=True)] = [("┄", "dim")] * width
    for kind, mark in _MARKS.items():
        for rate_rps, p95_s, own in points:
            if own == kind:
                row = _place(p95_s, seconds, height, logarithmic=True)
                grid[row][_place(rate_rps, rates, width)] = mark
    edges = {0: rounded_duration(min(seconds)), height - 1: rounded_duration(max(seconds))}
    lines = [Text("p95", style="dim")]
    for row in reversed(range(height)):
        line = Text(f"{edges.get(row, ''):>8} ┤", style="dim")
        for character, style in grid[row]:
            line.append(character, style=style or "default")
        lines.append(line)
    lines.append(Text(f"{'':>8} └{'─' * width}", style="dim"))
    low, high = rounded(min(rates)), f"{rounded(max(rates))} requests/s"
    lines.append(Text(f"{'':>{_LEFT_OF_PLOT}}{low}{high:>{max(1, width - len(low))}}", style="dim"))
    lines.append(Text(f"{'':>{_LEFT_OF_PLOT}}{_legend(kinds, limit_s, is_limit_shown)}", style="dim"))
    return lines


def _legend(kinds: Collection[Kind], limit_s: float | None, is_limit_shown: bool) -> str:
    names: dict[Kind, str] = {"kept": "measured", "missed": "misses the SLO", "best": "best so far"}
    entries = [f"{_MARKS[kind][0]} {name}" for kind, name in names.items() if kind in kinds]
    if limit_s is not None:
        entries.append(
            f"{'┄ ' if is_limit_shown else ''}SLO {rounded_duration(limit_s)}{'' if is_limit_shown else ' (above)'}"
        )
    return "  ".join(entries)


def _place(value: float, values: Sequence[float], count: int, *, logarithmic: bool = False) -> int:
    """Return the index from 0 to `count` - 1 at which a value lies between the least and the greatest; the
    middle if all equal."""
    low, high = min(values), max(values)
    if high <= low:
        return count // 2
    if logarithmic and low > 0.0:
        return round(math.log(value / low) / math.log(high / low) * (count - 1))
    return round((value - low) / (high - low) * (count - 1))


_REFRESH_S = 0.5
"""Least seconds between two frames: each takes 6 ms of a CPU of the machine that is measured."""


class View:
    """Shows the progress of a sweep as a plain line per event in `stream`; None: shows nothing, for --quiet."""

    def __init__(self, stream: TextIO | None = None, scenario: Scenario | None = None) -> None:
        self._stream, self._scenario = stream, scenario
        self._started = self._told = time.monotonic()
        self._phase = ""

    def event(self, text: str) -> None:
        """Show a line that stays."""
        self._told = time.monotonic()
        if self._stream is not None:
            self._stream.write(f"[{self._told - self._started:6.1f} s] {text}\n")
            self._stream.flush()

    def progress(self, progress: SweepProgress) -> None:
        """Show how far the sweep and its current trial are."""
        if progress.phase != self._phase:
            self._phase = progress.phase
            self.event(progress.phase)
        elif self._stream is not None and progress.live is not None:
            load = plan_load(progress.plan, self._scenario)
            self.live(f"trial {progress.plan.number}, {load}: {live_line(progress.live)}")

    def live(self, text: str) -> None:
        """Show what goes on at this moment, in place of what was shown before."""
        # Where there is no terminal, a line at least so often while a trial runs.
        heartbeat_s = 10.0
        if time.monotonic() - self._told >= heartbeat_s:
            self.event(text)

    def trial(self, trial: Trial) -> None:
        """Show a finished trial."""
        if self._stream is not None:
            self.event(trial_line(trial, scenario=self._scenario))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_fault: object) -> None:
        pass


def sweep_view(*, quiet: bool, scenario: Scenario | None = None, stream: TextIO | None = None) -> View:
    """Make the view for the stream (default: stderr): a panel on a terminal, plain lines elsewhere, nothing
    when `quiet`.

    `scenario`: of the trials; None: one with an SLO, and a server that has all CPUs.
    """
    stream = stream or sys.stderr
    if not quiet and stream.isatty():
        return TerminalView(scenario)
    return View(None if quiet else stream, scenario)


def trial_line(trial: Trial, *, head: str | None = None, scenario: Scenario | None = None) -> str:
    """Return one line on a finished trial; `head` begins it, None: number, source, configuration and load.

    `scenario`: its SLO decides whether a limit is missed, and its server's CPUs and flags decide the
    bottleneck; None: there is an SLO, and the server has all CPUs.
    """
    if trial.parts:
        return _line_of_models(trial)
    head = head or _head(trial)
    if trial.measurement is None or trial.failure is not None:
        return f"{head}: {trial.state}: {trial.failure}"
    measured = trial.measurement
    names = ("ttft_p95", "itl_p99") if "ttft_p95" in measured.latency_s else ("p95",)
    latencies = (f"{name} {latency(measured.latency_s.get(name))}" for name in names)
    parts = [f"{rounded(measured.throughput_rps.value)} requests/s", *latencies]
    if measured.server is not None and measured.server.mean_batch_rows is not None:
        parts.append(f"mean batch {rounded(measured.server.mean_batch_rows)} rows")
    if measured.error_ratio > 0:
        parts.append(f"{percentage(measured.error_ratio)} errors")
    if not trial.feasible and not _own_load(trial) and (scenario is None or scenario.slo.promises):
        parts.append(f"misses the SLO{_at_rate(trial)}")
    offered_rps = measured.offered_rps
    if offered_rps is not None and not (_own_load(trial) or keeps_up(measured, offered_rps)):
        parts.append("did not keep up with the rate")
    limit = usual_bottleneck(trial.configuration, [measured], scenario=scenario, blame_met=False)
    if limit is not None and limit.kind not in ("none", "unknown", "client"):
        parts.append(f"limited by {limit_word(limit)}")
    parts += [text_of(caveat) for caveat in measured.caveats if caveat.code in CLIENT_CODES | HOST_CODES]
    return f"{head}: {', '.join(parts)}"


def _line_of_models(trial: Trial) -> str:
    """Return one line on a finished load of several models."""
    head = f"{_numbered(trial)} {models_load(trial.request)}"
    if trial.failure is not None:
        return f"{head}: failed: {trial.failure.splitlines()[0]}"
    figures = "; ".join(
        f"{name} {measured_load(measured)}, {_p95_of_model(measured)}"
        for name, measured in trial.measurements.items()
    )
    verdict = "holds" if trial.feasible else "breaks an SLO"
    if {"INVALID", "NOISY"} & {measured.verdict for measured in trial.measurements.values()}:
        verdict += ", disturbed by the client or the host"
    return f"{head}: {verdict}: {figures} [{trial.configuration.label()}]"


def _p95_of_model(measurement: Measurement) -> str:
    seconds = measurement.latency_s["p95"].value
    if math.isinf(seconds):
        return f"{percentage(measurement.error_ratio)} failed"
    return f"p95 {rounded_duration(seconds)}"


def _head(trial: Trial) -> str:
    load = "" if trial.measurement is None else f", {measured_load(trial.measurement)}"
    return f"{_numbered(trial)} {trial.configuration.label()}{load}"


def _numbered(trial: Trial) -> str:
    source = "scout" if _own_load(trial) else trial.source.replace("_", " ")
    where = "" if trial.node is None else f" on {trial.node}"
    return f"trial {trial.number}{where} [{source}]"


def measured_load(measured: Measurement) -> str:
    """Return the load under which a trial was measured: `8 clients` or `500/s offered`; `its own arrivals` without a
    mean rate."""
    return load_text(measured.concurrency, measured.offered_rps)


def load_text(clients: int | None, rate_rps: float | None) -> str:
    """Return a load as text: `8 clients` or `500/s offered`; `its own arrivals` without a mean rate."""
    if clients is not None:
        return counted(clients, "client")
    return "its own arrivals" if rate_rps is None else f"{rounded(rate_rps)}/s offered"


def _own_load(trial: Trial) -> bool:
    """Whether a trial had another load than the scenario's and says nothing of its objective, as a scout."""
    asked = trial.request.concurrency is not None or trial.request.rate_rps is not None
    return trial.source in NO_CANDIDATES and asked


def _at_rate(trial: Trial) -> str:
    offered_rps = None if trial.measurement is None else trial.measurement.offered_rps
    return "" if offered_rps is None else f" at {rounded(offered_rps)}/s"


class TerminalView(View):
    """Finished trials as lines that scroll by; below them a panel with phases, current trial, the best so
    far, and a plot."""

    def __init__(self, scenario: Scenario | None, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._scenario = scenario
        self._console = console or Console(stderr=True, highlight=False)
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True)
        self._next_draw = 0.0
        self._progress: SweepProgress | None = None
        self._thought = ""
        self._phases_s: dict[str, float] = {}
        self._trials: list[Trial] = []

    def event(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def progress(self, progress: SweepProgress) -> None:
        since_s = progress.elapsed_s - (progress if self._progress is None else self._progress).elapsed_s
        self._phases_s[progress.phase] = self._phases_s.get(progress.phase, 0.0) + since_s
        self._progress, self._thought = progress, ""
        now = time.monotonic()
        if now >= self._next_draw:
            self._next_draw = now + _REFRESH_S
            self._draw()

    def trial(self, trial: Trial) -> None:
        style = "red" if not trial.measurements else "" if trial.feasible else "yellow"
        self._console.print(trial_line(trial, scenario=self._scenario), style=style, markup=False)
        self._trials.append(trial)

    def live(self, text: str) -> None:
        self._thought = text
        self._draw()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_fault: object) -> None:
        self._live.stop()

    def _draw(self) -> None:
        from rich.text import Text

        progress = self._progress
        if progress is None:
            self._live.update(Text(self._thought), refresh=True)
            return
        drawn = panel(
            self._rows(progress),
            points=_points(self._trials, progress.best),
            limit_s=None if self._scenario is None else self._scenario.slo.limits().get("p95"),
            console=self._console,
        )
        self._live.update(drawn, refresh=True)

    def _rows(self, progress: SweepProgress) -> Iterator[tuple[str, str, str]]:
        """Yield (label, text, style) of each row of the panel."""
        plan = progress.plan
        yield (
            "phase",
            phases_text(self._phases_s, current=progress.phase, expected=PHASES),
            "",
        )
        if progress.budget_s:
            left = rounded_duration(max(0.0, progress.budget_s - progress.elapsed_s))
            yield "time left", f"{left} of {rounded_duration(progress.budget_s)}, confirmation included", ""
        done = f"{progress.trials_done}" + (f" of {progress.trials_max}" if progress.trials_max else "")
        yield "trial", f"{plan.number} ({done} tried), {plan_load(plan, self._scenario)}", ""
        yield "trying", plan.request.configuration.label(), ""
        yield "because", plan.request.reason, ""
        if self._thought:
            yield "now", self._thought, ""
        elif progress.live is not None:
            yield "now", *_against_slo(progress.live, self._scenario)
        if progress.best is not None:
            best = progress.best
            head = f"trial {best.number}, {measured_load(best.measurement)}" if best.measurement else None
            yield "best so far", trial_line(best, head=head, scenario=self._scenario), "green"


def _against_slo(live: LiveAggregate, scenario: Scenario | None) -> tuple[str, str]:
    """Return (text, style): what is measured at this moment, beside the limit; yellow where p95 is above it."""
    text = live_line(live)
    limits = {} if scenario is None else scenario.slo.limits()
    if not limits:
        return text, ""
    name = "p95" if "p95" in limits else next(iter(limits))
    above = name == "p95" and live.p95_s > limits[name]
    return f"{text} (SLO {limit_words(name, limits[name])})", "yellow" if above else ""


def _points(trials: Sequence[Trial], best: Trial | None) -> list[Point]:
    """Return the points of the plot: the trials under the scenario's own load, which alone can be compared
    with each other."""
    points = []
    for trial in trials:
        measured = trial.measurement
        p95_s = (
            math.nan
            if measured is None or "p95" not in measured.latency_s
            else measured.latency_s["p95"].value
        )
        if measured is not None and math.isfinite(p95_s) and not _own_load(trial):
            points.append((measured.throughput_rps.value, p95_s, _kind(trial, best)))
    return points


def _kind(trial: Trial, best: Trial | None) -> Kind:
    if best is not None and trial.number == best.number:
        return "best"
    return "kept" if trial.feasible else "missed"


def plan_load(plan: Plan, scenario: Scenario | None) -> str:
    """Return the load of a running trial, such as `8 clients`, `500/s offered`, or `at rising rates` for a
    capacity. `scenario` None: only what the plan itself says."""
    if scenario is not None and scenario.target.models:
        return ", ".join(filter(None, (models_load(plan.request), plan.request.reason)))
    request, load = plan.request, None if scenario is None else scenario.load
    if scenario is None or load is None or request.rate_rps is not None or request.concurrency is not None:
        return load_text(request.concurrency, request.rate_rps)
    if scenario.objective == "capacity" and load.concurrency is None:
        return "at rising rates"
    return load_text(load.concurrency, load.rate_rps)


def models_load(request: TrialRequest) -> str:
    """Return the load of several models, such as `reader alone, ×1.15`."""
    who = f"{' and '.join(request.models)} alone" if request.models else "together"
    if request.concurrency is not None:
        return f"{who}, {counted(request.concurrency, 'client')} each"
    return f"{who}, ×{rounded(request.scale)}"


def live_line(live: LiveAggregate) -> str:
    """Return one line on what the running load test has measured up to now."""
    text = f"{rounded(live.throughput_rps)} requests/s, p95 {rounded_duration(live.p95_s)}, {live.in_flight} in flight"
    return f"{text}, {live.errors} errors" if live.errors else text
