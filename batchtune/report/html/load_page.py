"""The page of a load test: which rate or concurrency is best within the SLO, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchtune.archive.run import Run
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import UNDEFINED, Estimate
from batchtune.report import words
from batchtune.report.findings import advice_of, labels, text_of
from batchtune.report.html.shell import document, drawing
from batchtune.report.html.shell.document import Report
from batchtune.report.html.shell.drawing import Panel, PlottedRun, Section, Table, Trace
from batchtune.report.html.shell.latency_figures import distribution, sizes, split, timeline
from batchtune.report.load_points import plain_rows, points_by_load, spoilt_lines, spoilt_message
from batchtune.report.tables import interval, latency, milliseconds, without_empty_columns
from batchtune.report.words import Fact
from batchtune.scenario.spec.check import limit_words, value_words
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.best_point import BestPoint, best_point, spoilt_by, trial_bottleneck
from batchtune.tune.trials.trial import Trial
from batchtune.units import counted, percentage, rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """A load point that was measured, as the page draws it.

    `load`: clients, or requests/s offered. `place`: index of its trial in the page's table.
    """

    name: str
    load: float
    trial: Trial
    measured: Measurement
    place: int
    is_best: bool

    @property
    def kind(self) -> str:
        """How the point is drawn: "client" or "host" where that spoilt the figures, else "best" or the verdict."""
        spoiler = spoilt_by(self.trial)
        return spoiler or ("best" if self.is_best else self.measured.verdict or "none")


def against_load(points: Sequence[LoadPoint], scenario: Scenario, *, quantile: str) -> Section:
    """Draw throughput and one latency quantile over the load, with the SLO; points that are invalid are
    marked."""
    if not points:
        return drawing.section("load", None, latency="latency")
    in_order = sorted(points, key=lambda point: point.load)
    open_loop = in_order[0].measured.concurrency is None
    title = "offered requests/s" if open_loop else "clients"
    loads = [point.load for point in in_order]
    across = drawing.spread_axis(title, loads)
    latency_traces = _latency(in_order, quantile)
    latencies = [y for drawn in latency_traces for y in drawn["y"]]
    panels = [
        Panel(
            traces=_throughput(in_order, open_loop=open_loop),
            x=across,
            y=drawing.axis("requests/s", rangemode="tozero"),
        ),
        Panel(traces=latency_traces, x=across, y=drawing.spread_axis(f"{quantile}, ms", latencies)),
    ]
    figure = drawing.in_panels(panels, height_px=420, hovermode="closest", legend={"y": 1.06})
    layout = drawing.limited(scenario.slo, figure.layout, quantiles=(quantile,), panel="2")
    beside, is_void = _beside(quantile), any(point.kind in ("client", "host") for point in points)
    return drawing.section(
        "load",
        replace(figure, layout=layout),
        anchor="load" if "_" not in quantile else f"load-{quantile}",
        clickable=True,
        latency="latency" if "_" not in quantile else quantile,
        void="Only the points on the line count; the others are not the server's figures." if is_void else "",
        beside=f" The thin dotted lines beside {quantile} are {' and '.join(beside)}." if beside else "",
    )


def few_of(points: Sequence[LoadPoint], *, most: int) -> list[LoadPoint]:
    """Return at most `most` points, spread from the least load to the greatest, the best one among them."""
    in_order = sorted(points, key=lambda point: point.load)
    if len(in_order) <= most:
        return in_order
    step = (len(in_order) - 1) / (most - 1)
    kept = {round(at * step) for at in range(most)}
    best = next((at for at, point in enumerate(in_order) if point.is_best), None)
    if best is not None and best not in kept:
        inner = kept - {0, len(in_order) - 1}
        kept = kept - {min(inner, key=lambda at: abs(at - best))} | {best} if inner else kept | {best}
    return [in_order[at] for at in sorted(kept)]


def _throughput(points: Sequence[LoadPoint], *, open_loop: bool) -> list[Trace]:
    traces: list[Trace] = []
    if open_loop:
        ends = [min(point.load for point in points), max(point.load for point in points)]
        traces.append(
            drawing.trace(
                ends,
                ends,
                colour="@muted",
                line={"width": 1, "dash": "dot"},
                name="all that is offered",
            )
        )
    return traces + _against(points, [point.measured.throughput_rps for point in points], 1.0)


def _latency(points: Sequence[LoadPoint], quantile: str) -> list[Trace]:
    thin = {"line": {"color": "@other", "width": 1, "dash": "dot"}}
    beside = [_joined(points, _latencies(points, name), 1e3) | thin for name in _beside(quantile)]
    return beside + _against(points, _latencies(points, quantile), 1e3, showlegend=False)


def _latencies(points: Sequence[LoadPoint], quantile: str) -> list[Estimate]:
    return [point.measured.latency_s.get(quantile, UNDEFINED) for point in points]


def _against(
    points: Sequence[LoadPoint], shown: Sequence[Estimate], scale: float, **more: Any
) -> list[Trace]:
    """Return the line through the points that count, and a trace of points for each kind."""
    looks = {
        "best": ("best", "@chosen", "star", 15),
        "PASS": ("meets the SLO", "@chosen", "circle", 9),
        "UNSURE": ("no verdict", "@queue", "diamond-open", 10),
        "FAIL": ("misses the SLO", "@limit", "x-thin", 10),
        "none": ("measured", "@chosen", "circle", 9),
        "client": ("invalid: client-limited", "@muted", "circle-x-open", 11),
        "host": ("invalid: noisy host", "@muted", "square-x-open", 11),
    }
    traces = [_joined(points, shown, scale)]
    for kind in dict.fromkeys(point.kind for point in points):
        mine = [pair for pair in zip(points, shown, strict=True) if pair[0].kind == kind]
        name, colour, symbol, size = looks[kind]
        thin = symbol.endswith(("thin", "open"))
        edge = {"width": 1.8, "color": colour} if thin else {"width": 1.2, "color": "@surface"}
        drawn = drawing.trace(
            [point.load for point, _ in mine],
            [drawing.scaled(estimate, scale) for _, estimate in mine],
            colour=colour,
            marker={"symbol": symbol, "size": size, "line": edge},
            hover="%{text}",
            name=name,
            legendgroup=kind,
            customdata=[point.place for point, _ in mine],
            text=[_hover(point, name) for point, _ in mine],
            **more,
        )
        traces.append(drawn)
    return traces


def _beside(quantile: str) -> list[str]:
    """Return the quantiles to draw thinly beside this one; none for first tokens and gaps, which are other
    times."""
    beside = ("p50", "p99")
    return [name for name in beside if name != quantile and "_" not in quantile]


def _joined(points: Sequence[LoadPoint], shown: Sequence[Estimate], scale: float) -> Trace:
    """Return the line through the points that count."""
    counting = [at for at, point in enumerate(points) if point.kind not in ("client", "host")]
    return drawing.trace(
        [points[at].load for at in counting],
        [drawing.finite(shown[at].value, scale) for at in counting],
        colour="@chosen",
        line={"width": 1.6},
        showlegend=False,
    )


def _hover(point: LoadPoint, kind: str) -> str:
    measured = point.measured
    return (
        f"<b>{drawing.safe(point.name)}</b>, {kind}<br>{drawing.safe(interval(measured.throughput_rps))} requests/s"
        f"<br>p95 {drawing.safe(milliseconds(measured.latency_s.get('p95')))} ms"
        f"<br>p99 {drawing.safe(milliseconds(measured.latency_s.get('p99')))} ms<br>trial {point.trial.number}"
    )


def load_document(run: Run) -> Report:
    """Make the page of a run of `batchtune load`, of one point or more, whole or interrupted.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario, trials = run.scenario(), run.ledger()
    best = best_point(trials)
    points = _points(trials, best)
    return Report(
        title=scenario.name,
        subtitle=_subtitle(scenario, trials),
        emulated=drawing.is_emulated(trials),
        answers=words.shortened(_answers(points, best, trials, scenario)),
        sections=_sections(run, trials, points, scenario),
        caveats=document.gathered_caveats({point.name: point.measured.caveats for point in points}),
        provenance=document.provenance_rows(run, scenario),
        trials=document.table_of_single_trials(trials, lambda _: scenario, _name_of),
        intervals=drawing.page_texts()["intervals"]["load"],
    )


def _points(trials: Sequence[Trial], best: BestPoint | None) -> list[LoadPoint]:
    places = {id(trial): at for at, trial in enumerate(trials)}
    return [
        LoadPoint(
            name=_name_of(trial, load),
            load=float(trial.measurement.concurrency or trial.measurement.offered_rps or 0.0),
            trial=trial,
            measured=trial.measurement,
            place=places[id(trial)],
            is_best=best is not None and len(trials) > 1 and trial is best.point,
        )
        for load, trial in points_by_load(trials).items()
        if trial.measurement is not None
    ]


def _name_of(trial: Trial, load: str | None = None) -> str:
    """Return the name of a load point: `8 clients`, `400 requests/s`; `load`: its key in `points_by_load`."""
    measured = trial.measurement
    clients = trial.concurrency if measured is None else measured.concurrency
    if clients is not None:
        return counted(clients, "client") if load in (None, str(clients)) else f"{load} clients"
    rate_rps = trial.rate_rps if measured is None else measured.offered_rps
    return f"{load or rounded(rate_rps)} requests/s"


def _subtitle(scenario: Scenario, trials: Sequence[Trial]) -> str:
    configuration = trials[0].configuration if trials else None
    parts = [
        "Load test",
        words.models_text(scenario),
        labels("protocols")[scenario.request.protocol],
        f"{counted(scenario.request.rows_most, 'row')} a request",
        counted(len(trials), "point"),
        document.slo_text(scenario),
    ]
    if configuration is None or not configuration.known:
        parts.append("parameters of the server unknown")
    elif configuration.batching is None:
        parts.append("no batching")
    else:
        parameters = " ".join(f"{name} {value}" for name, value in words.parameters_of(configuration))
        parts.append(parameters or "the server's defaults")
    return " · ".join(parts)


def _sections(
    run: Run, trials: Sequence[Trial], points: Sequence[LoadPoint], scenario: Scenario
) -> list[Section]:
    slo, which = scenario.slo, "The run of each load"
    limits = list(slo.limits())
    quantiles = ["p95" if "p95" in limits or not limits else limits[0]]
    if any(point.measured.tokens is not None for point in points):
        quantiles = [*slo.stream_limits()] or ["ttft_p95", "itl_p99"]
    curves = _shown(few_of(points, most=6), run)
    few = _shown(few_of(points, most=3), run)
    return [
        *(against_load(points, scenario, quantile=quantile) for quantile in quantiles),
        drawing.section("points", _table(trials, points, scenario), anchor="figures"),
        drawing.section("void", _notes(trials), anchor="words"),
        distribution(curves, slo, which=which),
        timeline(few, slo, which=which),
        split(_shown(sorted(points, key=lambda point: point.load), run), which=which),
        sizes(few, which=which),
    ]


def _shown(points: Sequence[LoadPoint], run: Run) -> list[PlottedRun]:
    return [
        PlottedRun(
            name=point.name,
            look=drawing.LINE_STYLES[at % len(drawing.LINE_STYLES)],
            trial=point.trial,
            run=run,
        )
        for at, point in enumerate(points)
    ]


def _table(trials: Sequence[Trial], points: Sequence[LoadPoint], scenario: Scenario) -> Table | None:
    """Return the table of load points with the best one marked; None without points."""
    if not points:
        return None
    marked = next((at for at, point in enumerate(points) if point.is_best), None)
    return Table(rows=without_empty_columns(plain_rows(trials, scenario=scenario)), marked=marked)


def _notes(trials: Sequence[Trial]) -> list[str]:
    """Return sentences on what spoilt which points, and on why points failed."""
    failures = [f"{_name_of(trial)} failed: {trial.failure}" for trial in trials if trial.failure]
    return [*spoilt_lines(points_by_load(trials)), *failures]


def _answers(
    points: Sequence[LoadPoint], best: BestPoint | None, trials: Sequence[Trial], scenario: Scenario
) -> tuple[Fact, ...]:
    chosen = next((point for point in points if best is not None and point.trial is best.point), None)
    clients = bool(points) and points[0].measured.concurrency is not None
    question = "How many clients are best?" if clients else "Which rate is best?"
    if len(trials) == 1:
        question = "Which load?"
    if best is None or chosen is None:
        return _void(question, points, trials)
    lines = (
        (words.sentence(text_of(best.why)),)
        if len(trials) > 1
        else ("One point; a range is `--rate 100:900:200`.",)
    )
    return (
        Fact(question=question, headline=words.capitalised(chosen.name), lines=lines),
        _gives(chosen),
        _kept(chosen, points, scenario),
        words.limit_fact(trial_bottleneck(chosen.trial, scenario)),
    )


def _void(question: str, points: Sequence[LoadPoint], trials: Sequence[Trial]) -> tuple[Fact, ...]:
    """Return the answers of a page where no point counts: why, and what to do."""
    why = spoilt_message(trials) or "no point was measured"
    advice = dict.fromkeys(advice_of(caveat) for point in points for caveat in point.measured.caveats)
    return (
        Fact(question=question, headline="No point counts", lines=(words.sentence(why),), tone="bad"),
        Fact(
            question="What now?",
            headline="Measure again",
            lines=tuple(words.sentence(text) for text in advice) or ("The server's log says more.",),
        ),
    )


def _gives(point: LoadPoint) -> Fact:
    """Return the answer to "What does it give?" for the best point."""
    measured = point.measured
    server = measured.server
    lines = [f"p95 {latency(measured.latency_s.get('p95'))}", f"p99 {latency(measured.latency_s.get('p99'))}"]
    if measured.error_ratio:
        lines.append(f"{percentage(measured.error_ratio)} errors")
    if server is not None and server.mean_batch_rows is not None:
        lines.append(f"batches of {rounded(server.mean_batch_rows)} rows on average")
    return Fact(
        question="What does it give?",
        headline=f"{interval(measured.throughput_rps)} requests/s",
        lines=tuple(lines),
    )


def _value(name: str, measured: Measurement) -> str:
    estimate = measured.latency_s.get(name)
    return (
        value_words(name, estimate.value) if name == "goodput" and estimate is not None else latency(estimate)
    )


def _kept(point: LoadPoint, points: Sequence[LoadPoint], scenario: Scenario) -> Fact:
    """Return the answer to "Is the SLO met?" for the best point."""
    question, measured = "Is the SLO met?", point.measured
    void = [point for point in points if point.kind in ("client", "host")]
    lines = [
        f"{limit_words(name, limit_s)}: {_value(name, measured)}"
        for name, limit_s in scenario.slo.limits().items()
    ]
    lines += filter(None, [words.sentence(text_of(measured.verdict_reason))])
    kept = sum(point.measured.verdict == "PASS" for point in points if point not in void)
    if len(points) > 1 and measured.verdict is not None:
        lines.append(f"{kept} of {counted(len(points), 'point')} meet it.")
    if void:
        lines.append(f"{counted(len(void), 'point')} invalid: {', '.join(point.name for point in void)}.")
    if measured.verdict is None:
        return Fact(question=question, headline="There is none", lines=("`--slo-p95 50ms` sets one.", *lines))
    headline, tone = words.headline_of(measured.verdict)
    return Fact(question=question, headline=headline, lines=tuple(lines), tone=tone)
