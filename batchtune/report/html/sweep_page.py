"""Puts the page of a sweep together: what to deploy, all contenders, the space, the latencies, the trials."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from batchtune.batching.parameters import Configuration
from batchtune.measure.quantiles import Estimate
from batchtune.report import answer_words, words
from batchtune.report.findings import labels, text_of
from batchtune.report.html import contender_figures
from batchtune.report.html.contender_figures import SweepResults
from batchtune.report.html.shell import document, drawing
from batchtune.report.html.shell.document import Report, TrialTable
from batchtune.report.html.shell.drawing import Figure, Panel, Section, Trace
from batchtune.report.html.shell.latency_figures import distribution, sizes, split, timeline
from batchtune.report.words import Fact
from batchtune.tune.answer.recommendation import Compared, Recommendation
from batchtune.tune.trials.trial import parts_of
from batchtune.units import counted, rounded_duration

Measured = list[tuple[Configuration, Estimate]]
"""(configuration, its figure of merit) of each configuration that batches and keeps the SLO."""


def heat_map(account: SweepResults) -> Section:
    """Draw the two parameters with the most values tried as a grid; each cell has the best figure over all
    values of the other parameters."""
    measured = _measured(account)
    missed = [
        contender.configuration
        for contender in account.contenders
        if isinstance(contender, Compared) and not contender.keeps and contender.configuration.batching
    ]
    values = _values(account, [*(configuration for configuration, _ in measured), *missed])
    knobs = sorted((name for name in values if len(values[name]) > 1), key=lambda name: -len(values[name]))[
        :2
    ]
    if len(knobs) < 2:
        return drawing.section("space", None)
    across, down = knobs
    merit = account.merit

    def cell(x: Any, y: Any) -> tuple[float | None, str]:
        there = [
            (estimate.value, configuration)
            for configuration, estimate in measured
            if _value(account, configuration, across) == x and _value(account, configuration, down) == y
        ]
        if not there:
            return None, ""
        best = merit.best([value for value, _ in there])
        configuration = next(configuration for value, configuration in there if value == best)
        return drawing.finite(best, merit.scale), drawing.safe(drawing.label(configuration))

    grid = [[cell(x, y) for x in values[across]] for y in values[down]]
    heat: Trace = {
        "type": "heatmap",
        "x": [str(x) for x in values[across]],
        "y": [str(y) for y in values[down]],
        "z": [[value for value, _ in row] for row in grid],
        "text": [[text for _, text in row] for row in grid],
        "hovertemplate": f"%{{z:,.4~r}} {merit.title}<br>%{{text}}<extra></extra>",
        "colorscale": "Cividis",
        "reversescale": not merit.more_is_better,
        "colorbar": {"title": {"text": merit.title}, "thickness": 14, "outlinewidth": 0},
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
    }
    crosses = _crosses(account, missed, grid, values[across], values[down], (across, down))
    rest = [name for name in values if name not in (across, down)]
    figure = Figure(
        data=[heat, *crosses, *_chosen_cell(account, across, down)],
        layout={
            "xaxis": drawing.categories(drawing.safe(across), values[across], showgrid=False),
            "yaxis": drawing.categories(drawing.safe(down), values[down], showgrid=False),
            "showlegend": False,
        },
        height_px=400,
    )
    return drawing.section("space", figure, others=" and ".join(rest) or "its runs")


def _crosses(
    account: SweepResults,
    missed: Sequence[Configuration],
    grid: Sequence[Sequence[tuple[float | None, str]]],
    columns: Sequence[Any],
    rows: Sequence[Any],
    knobs: tuple[str, str],
) -> Sequence[Trace]:
    """Return a trace of crosses in the cells in which something was tried and nothing met the SLO; empty
    without any."""
    tried = {tuple(_value(account, configuration, knob) for knob in knobs) for configuration in missed}
    cells = [
        (str(x), str(y))
        for down, y in enumerate(rows)
        for across, x in enumerate(columns)
        if grid[down][across][0] is None and (x, y) in tried
    ]
    crosses = drawing.trace(
        [x for x, _ in cells],
        [y for _, y in cells],
        colour="@limit",
        marker={"symbol": "x-thin", "size": 10, "line": {"width": 1.5, "color": "@limit"}},
        hover="missed the SLO",
    )
    return [crosses] if cells else []


def slices(account: SweepResults) -> Section:
    """Draw, for each parameter, the objective's figure of those configurations that differ from the
    recommended one in that parameter alone."""
    chosen = account.chosen
    if chosen is None or chosen.configuration.batching is None:
        return drawing.section("knobs", None, variant="unbatched")
    measured, merit = _measured(account), account.merit
    knobs = list(account.scenario.axes)
    sliced = {}
    for knob in knobs:
        beside = [
            (configuration, estimate)
            for configuration, estimate in measured
            if all(
                _value(account, configuration, name) == _value(account, chosen.configuration, name)
                for name in knobs
                if name != knob
            )
        ]
        if len(beside) > 1:
            beside.sort(key=lambda pair: _sortable(_value(account, pair[0], knob)))
            sliced[knob] = beside
    panels = [
        Panel(
            traces=[_slice(account, beside, knob, chosen.configuration)],
            x=drawing.axis(drawing.safe(knob), type="category"),
            y=drawing.axis("" if at else merit.title, rangemode="tozero"),
        )
        for at, (knob, beside) in enumerate(sliced.items())
    ]
    return drawing.section(
        "knobs", drawing.in_panels(panels, height_px=340, showlegend=False) if panels else None
    )


def _slice(account: SweepResults, beside: Measured, knob: str, chosen: Configuration) -> Trace:
    """Return the trace of one parameter's slice; the recommended configuration is a star."""
    stars = [configuration == chosen for configuration, _ in beside]
    return drawing.trace(
        [str(_value(account, configuration, knob)) for configuration, _ in beside],
        [drawing.scaled(estimate, account.merit.scale) for _, estimate in beside],
        bars={"color": "@other"},
        colour=["@chosen" if star else "@other" for star in stars],
        marker={
            "symbol": ["star" if star else "circle" for star in stars],
            "size": [13 if star else 9 for star in stars],
        },
        hover="%{x}: %{y:,.4~r}",
    )


def _measured(account: SweepResults) -> Measured:
    """Return the configurations that batch and keep the SLO, each with its figure of merit."""
    return [
        (contender.configuration, merit)
        for contender, merit in contender_figures.keeping(account)
        if contender.configuration.batching is not None
    ]


def _values(account: SweepResults, tried: Sequence[Configuration]) -> dict[str, list[Any]]:
    """Return, for each parameter that was searched, the values that were tried, sorted."""
    return {
        name: sorted({_value(account, configuration, name) for configuration in tried}, key=_sortable)
        for name in account.scenario.axes
    }


def _value(account: SweepResults, configuration: Configuration, name: str) -> Any:
    """Return the value that a parameter has in a configuration, the server's default where it is not set."""
    return configuration.in_force(name, cpus=account.scenario.target.cpus)


def _sortable(value: Any) -> tuple[bool, float, str]:
    """Return a sort key: numbers by size, then words."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not is_number, float(value) if is_number else 0.0, str(value)


def _chosen_cell(account: SweepResults, across: str, down: str) -> Sequence[Trace]:
    """Return a trace with a star at the recommended configuration; empty where nothing that batches is
    recommended."""
    chosen = account.chosen
    if chosen is None or chosen.configuration.batching is None:
        return []
    star = drawing.trace(
        [str(_value(account, chosen.configuration, across))],
        [str(_value(account, chosen.configuration, down))],
        colour="#fff",
        marker={"symbol": "star", "size": 16, "line": {"color": "#000", "width": 1.5}},
        hover="recommended",
    )
    return [star]


_FEW: Final = 3
"""A size of which fewer batches were executed is left out: their mean time says little."""


def service_time(account: SweepResults) -> Section:
    """Draw τ(b), the time in which a batch of b rows is executed, beside the time of b rows that are executed
    one after another."""
    curves = _times_by_threads(account)
    data = _read(account)
    if not curves and not data:
        return drawing.section("tau", None)
    for at, (threads, times) in enumerate(sorted(curves.items())):
        rows = sorted(times)
        counts = [times[size][0] for size in rows]
        symbol = ("circle", "square-open", "diamond-open", "cross-open", "x-open")[min(at, 4)]
        drawn = drawing.trace(
            rows,
            [drawing.finite(times[size][1] / times[size][0], 1e3) for size in rows],
            colour="@other" if at else "@chosen",
            marker={"symbol": symbol},
            hover="%{x} rows: %{y:,.4~r} ms, %{text}",
            name=f"measured, {threads} batch thread{'' if threads == 1 else 's'}",
            text=[f"{count:,} batches" for count in counts],
        )
        data.append(drawn)
    fewest = (
        {rows: spent_s / count for rows, (count, spent_s) in curves[min(curves)].items()} if curves else {}
    )
    alone = fewest or account.curve
    least, most = min(alone), max(alone)
    if most > least:
        one_s = alone[least] / least
        ends_ms = drawing.numbers((one_s * least, one_s * most), 1e3)
        name = f"in batches of {least}"
        data.append(
            drawing.trace(
                [least, most],
                ends_ms,
                colour="@unbatched",
                line={"width": 1.8, "dash": "dot"},
                name=name,
            )
        )
    xs = [x for drawn in data for x in drawn["x"]]
    ys = [y for drawn in data for y in drawn["y"]]
    layout = {"xaxis": drawing.log_axis("rows in a batch", xs), "yaxis": drawing.log_axis("ms", ys)}
    return drawing.section("tau", Figure(data=data, layout=layout), few=_FEW)


def _times_by_threads(account: SweepResults) -> dict[int, dict[int, tuple[int, float]]]:
    """Return batch threads -> rows of a batch -> (batches, their seconds together), over all trials."""
    curves: dict[int, dict[int, tuple[int, float]]] = {}
    for trial in account.trials:
        server = None if trial.measurement is None else trial.measurement.server
        if server is None or trial.configuration.batching is None:
            continue
        threads = trial.configuration.in_force("num_batch_threads", cpus=account.scenario.target.cpus)
        times = curves.setdefault(int(threads or 0), {})
        for rows, mean_s in server.execution_s_by_rows.items():
            count = server.batches_by_rows.get(rows, 0)
            batches, spent_s = times.get(rows, (0, 0.0))
            times[rows] = (batches + count, spent_s + count * mean_s)
    kept = {
        threads: {rows: pair for rows, pair in times.items() if pair[0] >= _FEW}
        for threads, times in curves.items()
    }
    return {threads: times for threads, times in kept.items() if times}


def _read(account: SweepResults) -> list[Trace]:
    """Return the trace of τ(b) as the search took it from closed loops; empty where it did not."""
    if not account.curve:
        return []
    rows = sorted(account.curve)
    read = drawing.trace(
        rows,
        drawing.numbers((account.curve[size] for size in rows), 1e3),
        colour="@predicted",
        marker={"symbol": "circle", "size": 6},
        line={"width": 2},
        hover="%{x} rows: %{y:,.4~r} ms by closed loops",
        name="read from closed loops",
    )
    return [read]


def answers_of(account: SweepResults) -> tuple[Fact, ...]:
    """Return the four answers at the head of a sweep's page."""
    chosen = account.chosen
    if chosen is None:
        return _nothing(account)
    what = words.capitalised(words.name_without_parameters(chosen.configuration) or "batching with")
    deploy = Fact(
        question="What to deploy?",
        headline=" ".join(filter(None, (answer_words.keep_sentence(chosen), what))),
        pairs=tuple(words.parameters_of(chosen.configuration)),
        tone="" if chosen.established else "open",
    )
    return deploy, _gain(chosen), _sure(chosen), words.limit_fact(chosen.bottleneck)


def _nothing(account: SweepResults) -> tuple[Fact, ...]:
    """Return the answers where nothing is recommended: why, what came nearest, how much was tried, what to
    do."""
    tried = counted(len(account.tried), "configuration")
    trials = f"{counted(len(account.trials), 'trial')}; all of them are below."
    nearest = Fact(question="What came nearest under load?", headline="–", lines=("No trial has a figure.",))
    if account.tried:
        first = account.tried[0]
        name = words.name_without_parameters(first.configuration)
        nearest = Fact(
            question="What came nearest under load?",
            headline="Batching with" if name is None else words.capitalised(name),
            pairs=tuple(words.parameters_of(first.configuration)),
            lines=(f"{contender_figures.told(first, account)}.",),
        )
    return (
        Fact(
            question="What to deploy?",
            headline="Nothing meets the SLO" if account.missed else "Nothing yet",
            lines=(words.sentence(account.refusal),),
            tone="bad" if account.missed or not account.tried else "open",
        ),
        nearest,
        Fact(question="What was tried?", headline=tried, lines=(trials,)),
        Fact(question="What now?", headline=words.sentence(account.advice).removesuffix(".") or "–"),
    )


def _gain(chosen: Recommendation) -> Fact:
    part, then = answer_words.gain_parts(chosen)
    first, *others = [*(part or ["Nothing to compare with."]), *then]
    return Fact(
        question="What does it gain?",
        headline=first.removesuffix("."),
        lines=tuple(others),
        tone="" if chosen.established else "open",
    )


def _sure(chosen: Recommendation) -> Fact:
    lines = [f"SLO {answer_words.promise_sentence(promise, chosen)}" for promise in chosen.promises]
    lines += [
        words.sentence(answer_words.question_text(question, chosen)) for question in chosen.open_questions
    ]
    basis = f"{counted(chosen.trials, 'trial')}, {counted(chosen.confirmations, 'confirmation run')} of this."
    return Fact(
        question="How confident is this?",
        headline="Confirmed" if chosen.established else "Not confirmed",
        lines=(*lines, basis, *answer_words.ways_on(chosen, None, None)),
        tone="good" if chosen.established else "open",
    )


def notes_of(chosen: Recommendation) -> Iterator[str]:
    """Yield sentences for below the answers: the reason, how rule and guide compare, and what weakens the
    answer."""
    yield answer_words.why_sentence(chosen)
    yield from answer_words.model_sentences(chosen)
    yield from answer_words.named_sentences(chosen)
    yield from answer_words.qualifying_sentences(chosen)
    yield from (words.sentence(text_of(note)) for note in chosen.notes)


def sweep_document(
    account: SweepResults, *, deployment: str | None = None, step: str | None = None
) -> Report:
    """Make the page of a sweep.

    `deployment`: command that serves what is recommended. `step`: command that would confirm an open answer.
    """
    chosen = account.chosen
    return Report(
        title=account.scenario.name,
        subtitle=_subtitle(account),
        emulated=drawing.is_emulated(parts_of(account.trials)),
        answers=answers_of(account),
        step=step,
        command=deployment,
        notes=[] if chosen is None else [note for note in notes_of(chosen) if note],
        alternatives=[]
        if chosen is None
        else [
            (words.parameters_of(other.configuration), text_of(other.trade)) for other in chosen.alternatives
        ],
        sections=_sections(account),
        caveats=document.gathered_caveats(
            {name: contender.caveats for name, contender in account.roles.items()}
        ),
        provenance=document.provenance_rows(account.run, account.scenario),
        trials=_trials(account),
        intervals=drawing.page_texts()["intervals"]["sweep"],
    )


def _sections(account: SweepResults) -> list[Section]:
    shown, slo = account.shown, account.scenario.slo
    against = [contender_figures.pareto(account)]
    if account.scenario.objective == "capacity" or account.scenario.target.models:
        limited = [name for name in slo.limits() if account.scenario.streams and name != "goodput"]
        against = [contender_figures.rates(account, name) for name in limited or ["p95"]]
    return [
        contender_figures.brackets(account),
        contender_figures.contenders(account),
        *against,
        heat_map(account),
        slices(account),
        distribution(shown, slo, which=contender_figures.LATEST),
        timeline(shown, slo, which=contender_figures.LATEST),
        split(shown, which=contender_figures.LATEST),
        sizes(shown, which=contender_figures.LATEST),
        service_time(account),
        contender_figures.history(account),
    ]


def _subtitle(account: SweepResults) -> str:
    scenario, chosen = account.scenario, account.chosen
    parts = [
        words.models_text(scenario),
        labels("protocols")[scenario.request.protocol],
        *([] if scenario.target.models else [f"{counted(scenario.request.rows_most, 'row')} a request"]),
        document.traffic_text(scenario),
        document.slo_text(scenario),
        f"objective {scenario.objective}",
    ]
    if chosen is not None:
        parts.append(f"{rounded_duration(chosen.seconds)} of measuring")
    return " · ".join(parts)


def _trials(account: SweepResults) -> TrialTable:
    """Return the page's table: a row for each trial, with several models for each model; a detail for each
    configuration."""
    rows = parts_of(account.trials)
    of_part = {part.number: trial for trial in account.trials for part in trial.parts.values() or (trial,)}
    places = defaultdict(list)
    for at, part in enumerate(rows):
        if not of_part[part.number].request.models:
            places[of_part[part.number].configuration].append(at)
    details = [
        (drawing.label(contender.configuration), contender.configuration, places[contender.configuration])
        for contender in account.contenders
    ]
    scenarios = account.scenario.of_models()
    return TrialTable(
        rows=document.trial_rows(rows, lambda part: scenarios.get(part.model, account.scenario)),
        details=details,
    )
