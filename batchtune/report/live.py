"""What is going on right now? One live view on a terminal; a plain line per event anywhere else. All on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from batchtune.measure.validity.caveats import CLIENT_CODES, HOST_CODES
from batchtune.report.bottleneck import limit_word
from batchtune.report.units import latency, number, percent
from batchtune.scenario.units import counted, rounded, rounded_duration
from batchtune.tune.evidence.bottleneck_of import usual_bottleneck
from batchtune.tune.trials.trial import NO_CANDIDATES

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from batchtune.load.live import LiveAggregate
    from batchtune.measure.measurement import Measurement
    from batchtune.scenario.spec.scenario import Scenario
    from batchtune.tune.sweep.progress import SweepProgress
    from batchtune.tune.trials.trial import Trial

_REFRESH_S = 0.25
_HEARTBEAT_S = 10.0
"""Where there is no terminal, a line at least so often while a trial runs."""


class View(Protocol):
    """Somebody who watches a sweep."""

    def event(self, text: str) -> None: ...
    def progress(self, progress: SweepProgress) -> None: ...
    def trial(self, trial: Trial) -> None: ...
    def live(self, text: str) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def sweep_view(*, quiet: bool, scenario: Scenario | None = None, stream: TextIO | None = None) -> View:
    """The view that fits the stream (default: stderr): live on a terminal, plain lines elsewhere, nothing when quiet.

    `scenario` is that of its trials, as of `trial_line`.
    """
    if quiet:
        return _SilentView()
    stream = stream or sys.stderr
    return _LiveView(scenario) if stream.isatty() else _PlainView(stream, scenario)


def trial_line(trial: Trial, *, head: str | None = None, scenario: Scenario | None = None) -> str:
    """One finished trial in one line; `head` says which it is, if not number, source, configuration and load.

    `scenario` tells the server's CPUs and flags, and whether there is an SLO to miss; None: there is, and all CPUs.
    """
    head = head or _head(trial)
    if trial.measurement is None:
        return f"{head}: {trial.state}: {trial.failure}"
    measured = trial.measurement
    parts = [
        f"{number(measured.throughput_rps.value)} requests/s",
        f"p95 {latency(measured.latency_s.get('p95'))}",
    ]
    if measured.server is not None and measured.server.mean_batch_rows is not None:
        parts.append(f"mean batch {number(measured.server.mean_batch_rows)} rows")
    if measured.error_ratio > 0:
        parts.append(f"{percent(measured.error_ratio)} errors")
    if not trial.feasible and not _own_load(trial) and (scenario is None or scenario.slo.promises):
        parts.append(f"misses the SLO{_at_rate(trial)}")
    limit = usual_bottleneck(trial.configuration, [measured], scenario=scenario)
    if limit is not None and limit.kind not in ("none", "client"):
        parts.append(f"limited by {limit_word(limit)}")
    parts += [one.text for one in measured.caveats if one.code in CLIENT_CODES | HOST_CODES]
    return f"{head}: {', '.join(parts)}"


def _head(trial: Trial) -> str:
    source = f"{trial.source}, not comparable" if _own_load(trial) else trial.source
    load = "" if trial.measurement is None else f", {_load(trial.measurement)}"
    return f"trial {trial.number} [{source}] {trial.configuration.label()}{load}"


def _load(measured: Measurement) -> str:
    if measured.concurrency is not None:
        return counted(measured.concurrency, "client")
    return (
        "its own arrivals" if measured.offered_rps is None else f"{rounded(measured.offered_rps)}/s offered"
    )


def _own_load(trial: Trial) -> bool:
    """Whether it feeds the rule or the twin, under another load than that of the scenario."""
    asked = trial.asked_concurrency is not None or trial.asked_rate_rps is not None
    return trial.source in NO_CANDIDATES and asked


def _at_rate(trial: Trial) -> str:
    offered_rps = None if trial.measurement is None else trial.measurement.offered_rps
    return "" if offered_rps is None else f" at {rounded(offered_rps)}/s"


class _SilentView:
    def event(self, text: str) -> None:
        pass

    def progress(self, progress: SweepProgress) -> None:
        pass

    def trial(self, trial: Trial) -> None:
        pass

    def live(self, text: str) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _PlainView(_SilentView):
    def __init__(self, stream: TextIO, scenario: Scenario | None) -> None:
        self._stream, self._scenario = stream, scenario
        self._started = self._told = time.monotonic()
        self._phase = ""

    def event(self, text: str) -> None:
        self._told = time.monotonic()
        self._stream.write(f"[{self._told - self._started:6.1f} s] {text}\n")
        self._stream.flush()

    def progress(self, progress: SweepProgress) -> None:
        if progress.phase != self._phase:
            self._phase = progress.phase
            self.event(progress.phase)
        elif progress.live is not None:
            self.live(f"trial {progress.trial_number}: {live_line(progress.live)}")

    def live(self, text: str) -> None:
        if time.monotonic() - self._told >= _HEARTBEAT_S:
            self.event(text)

    def trial(self, trial: Trial) -> None:
        self.event(trial_line(trial, scenario=self._scenario))


class _LiveView(_SilentView):
    """Finished trials scroll by; below them a panel with the current trial, the best so far and the time left."""

    def __init__(self, scenario: Scenario | None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._scenario = scenario
        self._console = Console(stderr=True, highlight=False)
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True)
        self._next_draw = 0.0

    def event(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def progress(self, progress: SweepProgress) -> None:
        now = time.monotonic()
        if now >= self._next_draw:
            self._next_draw = now + _REFRESH_S
            self._live.update(_panel(progress, self._scenario), refresh=True)

    def trial(self, trial: Trial) -> None:
        style = "red" if trial.measurement is None else "" if trial.feasible else "yellow"
        self._console.print(trial_line(trial, scenario=self._scenario), style=style, markup=False)

    def live(self, text: str) -> None:
        from rich.text import Text

        self._live.update(Text(text), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def _panel(progress: SweepProgress, scenario: Scenario | None) -> RenderableType:
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    rows = Table.grid(padding=(0, 2))
    done = f"{progress.trials_done}" + (f" of {progress.trials_max}" if progress.trials_max else "")
    rows.add_row("now", f"{progress.phase}, trial {progress.trial_number} ({done} done)")
    if progress.configuration is not None:
        rows.add_row("trying", progress.configuration.label())
    if progress.live is not None:
        rows.add_row("measured", live_line(progress.live))
    if progress.best is not None:
        rows.add_row("best so far", trial_line(progress.best, scenario=scenario))
    if progress.budget_s:
        left = max(0.0, progress.budget_s - progress.elapsed_s)
        rows.add_row("time left", rounded_duration(left))
        rows.add_row("", ProgressBar(total=progress.budget_s, completed=progress.elapsed_s, width=40))
    return Panel(rows, title="batchtune sweep", title_align="left", expand=False)


def live_line(live: LiveAggregate) -> str:
    """What the running load test sees at this moment."""
    text = f"{number(live.throughput_rps)} requests/s, p95 {rounded_duration(live.p95_s)}, {live.in_flight} in flight"
    return f"{text}, {live.errors} errors" if live.errors else text
