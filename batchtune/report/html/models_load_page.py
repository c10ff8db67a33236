"""What does the page of a load of several models say: what did each get, within its SLO, and at what cost?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from batchtune.archive.run import Run
from batchtune.measure.measurement import Measurement
from batchtune.report.html.shell.document import (
    Answer,
    Document,
    gathered_caveats,
    models_text,
    provenance_rows,
    traffic_text,
)
from batchtune.report.html.shell.drawing import Section, Table
from batchtune.report.html.shell.latency_figures import distribution, timeline
from batchtune.report.html.shell.shown import LOOKS, Shown, is_emulated
from batchtune.report.html.shell.trial_rows import table_of_single_trials
from batchtune.report.marks import Marks
from batchtune.report.several_models import (
    LOAD_HEADINGS,
    cost_lines,
    load_rows,
    measured_of,
    parameter_lines,
)
from batchtune.report.units import latency, number
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.scenario.units import rounded_duration
from batchtune.tune.trials.trial import Trial

_INTERVALS: Final = (
    "Intervals are 95 % intervals of one run, from order statistics, widened because requests of one batch finish "
    "together; they do not hold what differs between runs."
)
_ALONE: Final = " alone"
"""Follows the name of the model in the reason of its trial."""

_WHICH: Final = "The run of each model, beside the others and alone"
_TONES: Final = {"PASS": "good", "FAIL": "bad", "INVALID": "bad", "NOISY": "bad", "UNSURE": "open"}
_WORDS: Final = {"PASS": "kept", "FAIL": "missed", "UNSURE": "not sure"}


def models_load_document(run: Run) -> Document:
    """The page of a run of `batchtune load` of several models, whole or interrupted.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario, trials = run.scenario(), run.ledger()
    scenarios = scenario.of_models()
    by_reason = {trial.reason: trial for trial in trials}
    together = {name: by_reason[name] for name in scenarios if name in by_reason}
    alone = {name: by_reason[name + _ALONE] for name in scenarios if name + _ALONE in by_reason}
    measured = measured_of(together)
    return Document(
        title=scenario.name,
        subtitle=" · ".join(["Load test of several models", models_text(scenario), traffic_text(scenario)]),
        emulated=is_emulated(trials),
        answers=_answers(measured, alone, trials, scenarios),
        sections=_sections(run, together, alone, measured),
        caveats=gathered_caveats({name: whole.caveats for name, whole in measured_of(by_reason).items()}),
        provenance=provenance_rows(run, scenario),
        trials=table_of_single_trials(
            trials, lambda trial: scenarios[trial.reason.removesuffix(_ALONE)], lambda trial: trial.reason
        ),
        intervals=_INTERVALS,
    )


def _sections(
    run: Run, together: Mapping[str, Trial], alone: Mapping[str, Trial], measured: Mapping[str, Measurement]
) -> list[Section]:
    shown = [
        Shown(name=trial.reason, look=LOOKS[at % len(LOOKS)], trial=trial, run=run)
        for at, trial in enumerate([*together.values(), *alone.values()])
    ]
    rows = list(load_rows(measured, alone, Marks(caveats=dict.fromkeys(measured, ()))))
    lines = [*parameter_lines(together), *cost_lines(measured, alone)]
    return [
        Section(anchor="figures", title="Each model", table=Table(headings=LOAD_HEADINGS, rows=rows))
        if rows
        else Section(anchor="figures", title="Each model", missing="no model was measured"),
        *([Section(anchor="words", title="In words", paragraphs=lines)] if lines else []),
        distribution(shown, SloSpec(), which=_WHICH),
        timeline(shown[: len(together)], SloSpec(), which="The run of each model beside the others"),
    ]


def _answers(
    measured: Mapping[str, Measurement],
    alone: Mapping[str, Trial],
    trials: Sequence[Trial],
    scenarios: Mapping[str, Scenario],
) -> tuple[Answer, ...]:
    failures = [f"{trial.reason} failed: {trial.failure}" for trial in trials if trial.failure]
    costs = tuple(cost_lines(measured, alone))
    gets = tuple(
        f"{name}: {number(run.throughput_rps.value)} requests/s, p95 {latency(run.latency_s.get('p95'))}"
        for name, run in measured.items()
    )
    headline = f"{number(sum(run.throughput_rps.value for run in measured.values()))} requests/s in all"
    return (
        _kept(measured, scenarios),
        Answer(question="What does each get?", headline=headline if gets else "Nothing", lines=gets),
        Answer(
            question="What do they cost each other?",
            headline="See below" if costs else "Not measured",
            lines=costs,
        ),
        *(
            [Answer(question="What failed?", headline="A load", lines=tuple(failures), tone="bad")]
            if failures
            else []
        ),
    )


def _kept(measured: Mapping[str, Measurement], scenarios: Mapping[str, Scenario]) -> Answer:
    question = "Does each keep its SLO?"
    judged = {name: run for name, run in measured.items() if run.verdict is not None}
    if not judged:
        return Answer(question=question, headline="There is none", lines=("`slo:` at a model sets one.",))
    words = {name: _WORDS.get(run.verdict or "", "invalid") for name, run in judged.items()}
    tones = [_TONES[run.verdict] for run in judged.values() if run.verdict is not None]
    tone = next(worst for worst in ("bad", "open", "good") if worst in tones)
    lines = [
        f"{name}, {_limits(scenarios[name])}: {words[name]}; {run.verdict_reason}."
        for name, run in judged.items()
    ]
    headline = "Yes" if tone == "good" else ", ".join(f"{name}: {word}" for name, word in words.items())
    return Answer(question=question, headline=headline, lines=tuple(lines), tone=tone)


def _limits(scenario: Scenario) -> str:
    limits = [f"{name} ≤ {rounded_duration(limit_s)}" for name, limit_s in scenario.slo.limits().items()]
    return ", ".join(limits) or "errors alone"
