"""What the page of a sweep shows, and its figures of contenders: brackets, rates, latency, history."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle
from typing import Any, Final

from batchtune.archive.run import Run
from batchtune.batching.parameters import Configuration
from batchtune.errors import ArchiveError, BatchtuneError, NoFeasibleConfigurationError
from batchtune.measure.quantiles import Estimate
from batchtune.report.answer_words import met_text, other_references
from batchtune.report.findings import labels
from batchtune.report.html.shell import drawing
from batchtune.report.html.shell.drawing import Figure, LineStyle, Merit, PlottedRun, Section, Table, Trace
from batchtune.report.recommendation_text import RECOMMENDED, contenders_table, marks_texts, nearest_table
from batchtune.report.run_tables import brief_labels
from batchtune.report.tables import span
from batchtune.report.words import capitalised
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import compared_with_slo, recommend
from batchtune.tune.answer.recommendation import Compared, Recommendation, tightest
from batchtune.tune.evidence.bracket import BracketRun as JudgedRun
from batchtune.tune.evidence.bracket import of_limit, runs_of
from batchtune.tune.sweep.sweep import PHASES, phase_of
from batchtune.tune.trials.trial import NO_CANDIDATES, Trial, without_superseded
from batchtune.units import counted, percentage, rounded

NEAREST: Final = "nearest to the SLO"
ROLE_LOOKS: Final = {
    RECOMMENDED: LineStyle(colour="@chosen", symbol="star", dash="solid"),
    NEAREST: LineStyle(colour="@queue", symbol="hexagon", dash="solid"),
    labels("references")["present"]: LineStyle(colour="@predicted", symbol="triangle-up", dash="dashdot"),
    labels("references")["no_batching"]: LineStyle(colour="@unbatched", symbol="diamond", dash="dash"),
    labels("references")["defaults"]: LineStyle(colour="@defaults", symbol="square", dash="dot"),
}
"""Role of a configuration in the sweep, such as `no batching` -> how it is drawn."""
OTHER: Final = LineStyle(colour="@other", symbol="circle", dash="solid")
LATEST: Final = "The latest run of each configuration"
"""Phrase that says which run is shown for a configuration in figures of single requests."""


@dataclass(frozen=True, kw_only=True)
class SweepResults:
    """What the page of a sweep shows.

    `trials`: those that count, without repeated ones. `chosen`: the recommendation, None without one;
    `refusal` then says why and `advice` what to do; `missed`: it is known that nothing that was tried meets
    the SLO. `tried`: without a recommendation, all configurations with figures, the nearest to the SLO first.
    `curve`: rows of a batch -> seconds, as the search read them.
    """

    run: Run
    scenario: Scenario
    trials: Sequence[Trial]
    chosen: Recommendation | None
    refusal: str = ""
    advice: str = ""
    missed: bool = False
    tried: tuple[Compared, ...] = ()
    curve: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def roles(self) -> dict[str, Recommendation | Compared]:
        """Role -> configuration, for those that the page compares: first the recommended one, or where there
        is none the nearest to the SLO, then the references."""
        if self.chosen is None:
            named = {
                labels("references")[other.name]: other
                for other in self.tried[1:]
                if other.name in labels("references")
            }
            return {NEAREST: self.tried[0], **named} if self.tried else {}
        references = {labels("references")[other.name]: other for other in other_references(self.chosen)}
        return {RECOMMENDED: self.chosen, **references}

    @cached_property
    def contenders(self) -> list[Recommendation | Compared]:
        """All configurations that were tried, in the order of the table of contenders."""
        if self.chosen is None:
            return list(self.tried)
        return [*self.roles.values(), *self.chosen.contenders]

    @cached_property
    def names(self) -> dict[Configuration, str]:
        """Configuration -> role, for the configurations in `roles`."""
        return {contender.configuration: name for name, contender in self.roles.items()}

    def look(self, configuration: Configuration) -> LineStyle:
        """Return how a configuration is drawn: by its role, or as one of the others."""
        return ROLE_LOOKS.get(self.names.get(configuration, ""), OTHER)

    @cached_property
    def runs(self) -> list[tuple[Trial, JudgedRun]]:
        """(trial, its run judged by the SLO) for every trial; with several models, without trials that load
        only some of them."""
        by_number = {trial.number: trial for trial in self.trials if not trial.request.models}
        judged = runs_of(by_number.values(), self.scenario.slo, self.scenario)
        return [(by_number[run.trial], run) for run in judged]

    def latency(self, quantile: str = "p95") -> Merit:
        """Return how a latency quantile is plotted; with several models, as the used share of the tightest
        limit."""
        if self.scenario.target.models:
            return drawing.MERITS["room"]
        return replace(drawing.MERITS["p95"], title=f"{quantile}, ms")

    @property
    def merit(self) -> Merit:
        """How the objective's figure is plotted."""
        return (
            self.latency()
            if self.scenario.objective == "latency"
            else drawing.MERITS[self.scenario.objective]
        )

    def latency_of(self, latency_s: Mapping[str, float], quantile: str = "p95") -> float:
        """Return the latency to plot, in seconds; with several models the used share of the tightest limit.
        nan: not known."""
        # Where a run of several models is drawn that used more of the tightest limit: how much more
        # tells nothing.
        share_max = 10.0
        if self.scenario.target.models:
            return min(of_limit(latency_s, self.scenario.limits), share_max)
        return latency_s.get(quantile, math.nan)

    def merit_of(self, contender: Recommendation | Compared) -> Estimate | None:
        """Return the objective's figure of a configuration as an estimate: requests/s, or with objective latency p95
        in seconds; None: not known.

        A capacity is the highest rate met, with an interval from there to the lowest rate missed. With several models
        a latency is the largest ratio latency / limit; NaN without limits.
        """
        if self.scenario.objective == "latency" and self.scenario.target.models:
            return tightest(contender.latency_s, self.scenario.limits)
        if self.scenario.objective == "latency":
            return contender.latency_s.get("p95")
        if self.scenario.objective != "capacity":
            return contender.throughput_rps
        if contender.capacity is None or not contender.capacity.held_rps:
            return None
        held_rps, missed_rps = contender.capacity.held_rps, contender.capacity.missed_rps
        return Estimate(value=held_rps, low=held_rps, high=missed_rps or held_rps)

    def limited(self, layout: dict[str, Any], quantile: str = "p95") -> dict[str, Any]:
        """Return the layout with a line at the limit of the latency that is plotted."""
        if self.scenario.target.models:
            return drawing.with_limit(layout, 1.0, "the limit")
        return drawing.limited(self.scenario.slo, layout, quantiles=(quantile,))

    @property
    def shown(self) -> list[PlottedRun]:
        """The latest run of each configuration in `roles`; with several models, each model's part of the
        recommended one's run."""
        by_number = {trial.number: trial for trial in self.trials}
        if self.chosen is not None and self.chosen.models:
            parts = by_number[self.chosen.behind[-1]].parts
            looks = cycle(ROLE_LOOKS.values())
            return [
                PlottedRun(name=name, look=look, trial=part, run=self.run)
                for (name, part), look in zip(parts.items(), looks, strict=False)
            ]
        return [
            PlottedRun(name=name, look=ROLE_LOOKS[name], trial=by_number[contender.behind[-1]], run=self.run)
            for name, contender in self.roles.items()
            if contender.behind
        ]


def sweep_results_of(run: Run) -> SweepResults:
    """Read a finished sweep from its run's folder, and compute the recommendation from its trials.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario, trials = run.scenario(), run.ledger()
    try:
        search = run.search()
    except ArchiveError:
        search = None
    chosen, refusal, advice, missed = None, "", "", False
    try:
        chosen = recommend(trials, scenario=scenario, search=search)
    except BatchtuneError as error:
        refusal, advice = error.message, error.hint or ""
        missed = isinstance(error, NoFeasibleConfigurationError)
    return SweepResults(
        run=run,
        scenario=scenario,
        trials=without_superseded(trials),
        chosen=chosen,
        refusal=refusal,
        advice=advice,
        missed=missed,
        tried=() if chosen is not None else compared_with_slo(trials, scenario=scenario),
        curve={} if search is None else search.curve,
    )


def keeping(account: SweepResults) -> Iterator[tuple[Recommendation | Compared, Estimate]]:
    """Yield (configuration, estimate of the objective's figure) for each configuration that meets the SLO and has
    that figure."""
    for contender in account.contenders:
        merit = account.merit_of(contender)
        if merit is not None and (
            contender is account.chosen or (isinstance(contender, Compared) and contender.keeps)
        ):
            yield contender, merit


def contenders(account: SweepResults) -> Section:
    """Return the section with the table of all configurations that were tried."""
    chosen, objective = account.chosen, account.scenario.objective
    if not account.contenders:
        return drawing.section("contenders", None)
    rows = nearest_table(account.tried, objective=objective) if chosen is None else contenders_table(chosen)
    marks = " ".join(marks_texts(account.contenders))
    return drawing.section("contenders", Table(rows=rows, marked=0), marks=marks)


def brackets(account: SweepResults) -> Section:
    """Draw for each configuration the span of requests/s from the highest rate that met the SLO to the lowest
    that missed it.

    With another objective than capacity, the range of the objective's figure over the runs.
    """
    # The best of them; the table has all.
    bars_most = 40
    merit = account.merit
    shown = account.contenders[:bars_most]
    labels, _ = brief_labels([contender.configuration.label() for contender in shown])
    data: list[Trace] = []
    names = []
    for at, contender in enumerate(shown):
        role = account.names.get(contender.configuration)
        text = labels[at]
        names.append(f"{role}: {text}" if role and role not in text else text)
        estimate = account.merit_of(contender)
        if estimate is None or not math.isfinite(estimate.value):
            continue
        look = account.look(contender.configuration)
        drawn = drawing.trace(
            [drawing.scaled(estimate, merit.scale)],
            [at],
            bars={"thickness": 5, "width": 0},
            colour=look.colour,
            marker={"symbol": look.symbol, "size": 11},
            hover="%{text}",
            customdata=[at],
            text=[_hover(contender, account)],
        )
        data.append(drawn)
    layout = {
        "xaxis": drawing.axis(merit.title, rangemode="tozero"),
        "yaxis": drawing.axis(
            "", tickvals=[*range(len(names))], ticktext=[*map(drawing.safe, names)], autorange="reversed"
        ),
        "showlegend": False,
        "hovermode": "closest",
    }
    return drawing.section(
        "brackets",
        Figure(data=data, layout=layout, height_px=120 + 24 * len(names)) if data else None,
        variant=account.scenario.objective,
        clickable=True,
        most="All" if len(shown) == len(account.contenders) else f"The best {len(shown)}",
        count=len(account.contenders),
        side="right" if merit.more_is_better else "left",
    )


def _hover(contender: Recommendation | Compared, account: SweepResults) -> str:
    return f"<b>{drawing.safe(drawing.label(contender.configuration))}</b><br>{drawing.safe(told(contender, account))}"


def pareto(account: SweepResults) -> Section:
    """Draw throughput against p95 under the scenario's own load, a point for each configuration."""
    kept, missing = {contender.configuration for contender, _ in keeping(account)}, "misses the SLO"
    data: list[Trace] = []
    known = []
    for at, contender in enumerate(account.contenders):
        p95 = contender.latency_s.get("p95")
        if contender.throughput_rps is None or p95 is None or not 0.0 < p95.value < math.inf:
            continue
        known.append(p95.value * 1e3)
        look = account.look(contender.configuration)
        misses = contender.configuration not in kept
        is_cross = misses and look is OTHER
        shown_missing = any(drawn["name"] == missing for drawn in data)
        colour = "@limit" if is_cross else look.colour
        drawn = drawing.trace(
            [contender.throughput_rps],
            [drawing.scaled(p95, 1e3)],
            colour=colour,
            marker={
                "symbol": "x-thin" if is_cross else look.symbol,
                "size": 9 if look is OTHER else 15,
                "line": {"width": 1.5, "color": colour if is_cross else "@surface"},
            },
            hover="%{text}",
            name=account.names.get(contender.configuration, missing if misses else "tried"),
            showlegend=look is not OTHER or (misses and not shown_missing),
            customdata=[at],
            text=[_hover(contender, account)],
        )
        data.append(drawn)
    layout = {
        "xaxis": drawing.axis("requests/s", rangemode="tozero"),
        "yaxis": drawing.log_axis("p95, ms", known),
        "hovermode": "closest",
        "legend": {"traceorder": "reversed"},
    }
    # What is recommended is drawn last, over the others.
    figure = Figure(data=data[::-1], layout=account.limited(layout), height_px=440) if data else None
    return drawing.section(
        "pareto", figure, clickable=True, configurations=counted(len(data), "configuration")
    )


def rates(account: SweepResults, quantile: str = "p95") -> Section:
    """Draw a latency quantile over the rate offered: a point for each run at a rate, filled where it met the
    SLO."""
    shown = account.latency(quantile)
    tried = [
        (trial, run)
        for trial, run in account.runs
        if run.rate_rps is not None and math.isfinite(account.latency_of(run.latency_s, quantile))
    ]
    data: list[Trace] = []
    for name, look in {**ROLE_LOOKS, "others": OTHER}.items():
        mine = [
            (trial, run) for trial, run in tried if account.names.get(trial.configuration, "others") == name
        ]
        mine.sort(key=lambda pair: pair[1].rate_rps or 0.0)
        if mine:
            drawn = drawing.trace(
                drawing.numbers(run.rate_rps for _, run in mine),
                drawing.numbers(
                    (account.latency_of(run.latency_s, quantile) for _, run in mine), shown.scale
                ),
                colour=look.colour,
                marker={"symbol": _held_or_not(look.symbol, [run for _, run in mine])},
                line=None if look is OTHER else {"width": 1.5, "dash": look.dash},
                hover=f"%{{text}}<br>%{{x:,.4~r}} requests/s: %{{y:,.4~r}} ({shown.title})",
                name=name,
                text=[_run_text(trial, run) for trial, run in mine],
            )
            data.append(drawn)
    layout = {
        "xaxis": drawing.axis("offered requests/s", rangemode="tozero"),
        "yaxis": drawing.log_axis(shown.title, [y for drawn in data for y in drawn["y"]]),
    }
    return drawing.section(
        "rates",
        Figure(data=data, layout=account.limited(layout, quantile)) if data else None,
        anchor="rates" if quantile == "p95" else f"rates-{quantile}",
        name=capitalised(shown.title) if account.scenario.target.models else quantile,
        quantile=quantile,
    )


def history(account: SweepResults) -> Section:
    """Draw the objective's figure of each run over the time of the sweep, by phase; filled where it met the
    SLO."""
    capacity = account.scenario.objective == "capacity"
    merit = account.merit
    timed = all(trial.elapsed_s is not None for trial, _ in account.runs)
    data: list[Trace] = []
    for phase, symbol in zip(PHASES, ("circle", "square", "star"), strict=True):
        mine = [
            (trial, run, height)
            for trial, run in account.runs
            if phase_of(trial.source) == phase
            and (capacity or trial.source not in NO_CANDIDATES)
            and (height := _height(run, account)) is not None
        ]
        if mine:
            drawn = drawing.trace(
                [drawing.finite(trial.elapsed_s if timed else float(trial.number)) for trial, _, _ in mine],
                [drawing.finite(height, merit.scale) for _, _, height in mine],
                colour="@chosen",
                marker={"symbol": _held_or_not(symbol, [run for _, run, _ in mine])},
                hover="%{text}<br>%{y:,.4~r}",
                name=phase,
                text=[f"{_run_text(trial, run)}: {drawing.safe(trial.reason)}" for trial, run, _ in mine],
            )
            data.append(drawn)
    title = "offered or answered requests/s" if capacity else merit.title
    layout = {
        "xaxis": drawing.axis("seconds since the sweep began" if timed else "trial", rangemode="tozero"),
        "yaxis": drawing.spread_axis(title, [y for drawn in data for y in drawn["y"]]),
    }
    figure = Figure(data=data, layout=layout, height_px=340) if data else None
    return drawing.section("search", figure, anchor="history", variant=account.scenario.objective)


def _height(run: JudgedRun, account: SweepResults) -> float | None:
    """Return the figure of a run to draw, not yet scaled; None where a logarithmic axis cannot hold it."""
    objective = account.scenario.objective
    if objective == "latency":
        value = account.latency_of(run.latency_s)
    else:
        value = run.rate_rps if objective == "capacity" and run.rate_rps is not None else run.answered_rps
    return value if 0.0 < value < math.inf else None


def _held_or_not(symbol: str, runs: Sequence[JudgedRun]) -> list[str]:
    return [symbol if run.held else f"{symbol}-open" for run in runs]


def _run_text(trial: Trial, run: JudgedRun) -> str:
    verdict = "met" if run.held else "missed"
    return f"trial {trial.number}, {drawing.safe(drawing.label(trial.configuration))}: {verdict}"


def told(contender: Recommendation | Compared, account: SweepResults) -> str:
    """Return a text on a configuration's figures: rate, latency and number of runs, as in the table of
    contenders."""
    rate, capacity = f"{span(contender.throughput_rps)} requests/s", contender.capacity
    if capacity is not None:
        met = met_text(capacity)
        held = f"{met} {rounded(capacity.held_rps)}/s" if capacity.held_rps else "met no rate tried"
        rate = held if capacity.missed_rps is None else f"{held}, missed {rounded(capacity.missed_rps)}/s"
    latency = f"p95 {span(contender.latency_s.get('p95'), scale=1e3)} ms"
    if account.scenario.target.models:
        latency = f"{percentage(tightest(contender.latency_s, account.scenario.limits).value)} of the tightest limit"
    return f"{rate}, {latency}, {counted(contender.runs, 'run')}"
