"""The page of a sweep of several models: what to deploy, what each gets, what company costs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from batchtune.archive.run import Run
from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchtuneError
from batchtune.measure.validity.caveats import Caveat
from batchtune.report.html.shell.document import (
    Detail,
    Report,
    TrialTable,
    gathered_caveats,
    models_text,
    provenance_rows,
    traffic_text,
    trial_rows,
)
from batchtune.report.html.shell.drawing import (
    Figure,
    Section,
    Table,
    Trace,
    axis,
    finite,
    is_emulated,
    safe,
    with_limit,
)
from batchtune.report.live_view import models_load
from batchtune.report.several_models import (
    SHARE_HEADINGS,
    company_lines,
    headline,
    measured_text,
    open_lines,
    rival_lines,
    share_rows,
)
from batchtune.report.words import Fact, parameters_of, sentence
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.joint.answer import JointRecommendation, ModelShare, recommend_joint
from batchtune.tune.joint.space import JointLoad, loads_of
from batchtune.tune.trials.trial import Trial, parts_of
from batchtune.units import counted, percentage, rounded, rounded_duration

_INTERVALS: Final = "Intervals in the table of trials are 95 % intervals of one run, from order statistics."
_KINDS: Final = {
    "chosen": ("recommended, confirmation runs", "@chosen", "star", 14),
    "holds": ("every model met its SLO", "@chosen", "circle", 9),
    "breaks": ("an SLO was broken", "@limit", "x-thin", 10),
    "spoilt": ("not usable: the client was the limit", "@muted", "circle-x-open", 10),
}
"""Of a load: name, colour, symbol, size."""
_SHARE_MAX: Final = 3.0
"""A load that used a limit more often than that is drawn there: how far beyond tells nothing more."""


def joint_document(
    run: Run, chosen: JointRecommendation | BatchtuneError, *, deployment: Sequence[str]
) -> Report:
    """The page; an error in place of a recommendation is why there is none, `deployment` what serves it.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario, trials = run.scenario(), run.ledger()
    loads = loads_of(trials)
    document = Report(
        title=scenario.name,
        subtitle=_subtitle(scenario, loads),
        emulated=is_emulated(parts_of(trials)),
        answers=(),
        sections=(),
        caveats=gathered_caveats(_caveats(trials)),
        provenance=provenance_rows(run, scenario),
        trials=_trials(trials, loads, scenario),
        intervals=_INTERVALS,
    )
    if isinstance(chosen, BatchtuneError):
        return replace(document, answers=_no_answers(chosen, loads), sections=[_against_rates(loads, None)])
    return replace(
        document,
        answers=_answers(chosen),
        sections=[_shares(chosen), _against_rates(loads, chosen.configuration)],
        command="\n".join(deployment),
        notes=[headline(chosen), *rival_lines(chosen)],
        open_questions=[*open_lines(chosen)],
        caveats=gathered_caveats(_caveats(_behind(trials, chosen.configuration))),
    )


def joint_answer(run: Run) -> JointRecommendation | BatchtuneError:
    """What is recommended from a run, or why nothing is.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario = run.scenario()
    loads = loads_of(run.ledger())
    try:
        return recommend_joint(loads, scenario)
    except BatchtuneError as error:
        return error


def _subtitle(scenario: Scenario, loads: Sequence[JointLoad]) -> str:
    parts = [
        f"Sweep of {counted(len(scenario.target.models), 'model')}",
        models_text(scenario),
        traffic_text(scenario),
        f"objective {scenario.objective}",
        counted(len(loads), "load"),
        f"{rounded_duration(sum(load.trial.seconds for load in loads))} of measuring",
    ]
    return " · ".join(parts)


def _answers(chosen: JointRecommendation) -> tuple[Fact, ...]:
    shared = Configuration(batching=chosen.configuration.batching, flags=chosen.configuration.flags)
    own = [
        (f"{name}: {parameter}", value)
        for name, batching in chosen.configuration.models
        for parameter, value in parameters_of(Configuration(batching=batching))
    ]
    gets = f"×{rounded(chosen.factor)} of the stated rates"
    if chosen.objective == "latency":
        gets = f"{percentage(1.0 / chosen.score)} of the tightest limit"
    sure = "loads of the search alone"
    if chosen.fresh:
        sure = f"{chosen.held} of {counted(chosen.fresh, 'confirmation run')} met every SLO"
    company = list(company_lines(chosen))
    return (
        Fact(
            question="What to deploy?",
            headline="No batching" if chosen.configuration.batching is None else "Batching with",
            pairs=(*parameters_of(shared), *own),
        ),
        Fact(
            question="What does each get?",
            headline=gets,
            lines=tuple(_got(share) for share in chosen.models),
        ),
        Fact(
            question="How confident is this?",
            headline="Established" if chosen.established else "Open",
            lines=(sentence(sure), *open_lines(chosen), *(f"Warning: {caveat}" for caveat in chosen.caveats)),
            tone="good" if chosen.established else "open",
        ),
        Fact(
            question="What does company cost?",
            headline="See each alone" if company else "Not measured",
            lines=tuple(company),
        ),
    )


def _no_answers(error: BatchtuneError, loads: Sequence[JointLoad]) -> tuple[Fact, ...]:
    return (
        Fact(
            question="What to deploy?", headline="Nothing yet", lines=(sentence(error.message),), tone="bad"
        ),
        Fact(
            question="What was measured?",
            headline=counted(len(loads), "load"),
            lines=("All of them are below.",),
        ),
        Fact(question="What now?", headline="Next", lines=(sentence(error.hint),)),
    )


def _shares(chosen: JointRecommendation) -> Section:
    return Section(
        anchor="models",
        title="Each model",
        lead="Its rate beside the others, what was promised and measured there, and what it held alone.",
        table=Table(headings=SHARE_HEADINGS, rows=[list(row) for row in share_rows(chosen)]),
        how="Measured: median and range of the loads at the recommended rates. Alone: in the search, the best tried.",
    )


def _got(share: ModelShare) -> str:
    latencies = ", ".join(
        f"{latency.name} {measured_text(latency)} of {rounded_duration(latency.limit_s)}"
        for latency in share.latencies
    )
    return f"{share.name}: {rounded(share.rate_rps)}/s, {latencies}."


def _against_rates(loads: Sequence[JointLoad], chosen: Configuration | None) -> Section:
    """Each load of all models: how much of the tightest limit it used, against how many times the stated rates."""
    section = "Loads of all models"
    points = [(at, load) for at, load in enumerate(loads) if not load.alone and load.failure is None]
    if not points:
        return Section(anchor="rates", title=section, missing="no load of all models was measured")
    grouped: dict[str, list[tuple[int, JointLoad]]] = {}
    for at, load in points:
        grouped.setdefault(_kind(load, chosen), []).append((at, load))
    layout = {
        "xaxis": axis("times the stated rates", rangemode="tozero"),
        "yaxis": axis("share of the tightest limit", rangemode="tozero", tickformat=".0%"),
        "hovermode": "closest",
    }
    return Section(
        anchor="rates",
        title=section,
        lead=f"What is used of the tightest of all latency limits; more than {_SHARE_MAX:g} times is drawn there.",
        figure=Figure(
            data=[_trace(kind, grouped[kind]) for kind in _KINDS if kind in grouped],
            layout=with_limit(layout, 1.0, "the limit"),
        ),
        how="A request that failed counts as infinitely slow; so does a load in which too many failed.",
        clickable=True,
    )


def _kind(load: JointLoad, chosen: Configuration | None) -> str:
    if not load.counts:
        return "spoilt"
    if not load.holds:
        return "breaks"
    return "chosen" if load.asked.source == "confirm" and load.asked.configuration == chosen else "holds"


def _trace(kind: str, points: Sequence[tuple[int, JointLoad]]) -> Trace:
    name, colour, symbol, size = _KINDS[kind]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [finite(load.asked.scale) for _, load in points],
        "y": [finite(_share(load)) for _, load in points],
        "customdata": [at for at, _ in points],
        "text": [safe(f"load {load.trial.number}: {load.asked.configuration.label()}") for _, load in points],
        "hovertemplate": "%{text}<br>×%{x}, %{y:.0%} of a limit<extra></extra>",
        "marker": {"color": colour, "symbol": symbol, "size": size, "line": {"color": colour, "width": 2}},
    }


def _share(load: JointLoad) -> float:
    return min(load.tightness, _SHARE_MAX) if math.isfinite(load.tightness) else _SHARE_MAX


def _trials(trials: Sequence[Trial], loads: Sequence[JointLoad], scenario: Scenario) -> TrialTable:
    """A detail for each load, with the trials of its models."""
    parts = parts_of(trials)
    places = {part.number: at for at, part in enumerate(parts)}
    scenarios = scenario.of_models()
    details = [
        Detail(
            heading=f"Load {load.trial.number}: {models_load(load.asked)}",
            parameters=(),
            rows=[places[part.number] for part in load.trials.values()],
        )
        for load in loads
    ]
    return TrialTable(
        rows=trial_rows(parts, lambda part: scenarios.get(part.model, scenario)), details=details
    )


def _behind(trials: Sequence[Trial], chosen: Configuration) -> list[Trial]:
    """The trials of the recommended configuration with all models loaded: the fresh ones, where there are any."""
    alike = [trial for trial in trials if trial.configuration == chosen and not trial.request.models]
    return [trial for trial in alike if trial.source == "confirm"] or alike


def _caveats(trials: Sequence[Trial]) -> dict[str, list[Caveat]]:
    """By model."""
    caveats: dict[str, list[Caveat]] = {}
    for trial in trials:
        for name, measured in trial.measurements.items():
            caveats.setdefault(name, []).extend(measured.caveats)
    return caveats
