"""What does the page of a check say: is it still as good, what moved, why, and how sure is that?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from batchtune.archive.run import Run
from batchtune.check.account import Account
from batchtune.check.history import read_history, series_of
from batchtune.check.kept import read_account
from batchtune.check.paired import Verdict
from batchtune.errors import ArchiveError
from batchtune.report.gate.statement import (
    HEADINGS,
    advice_text,
    closing_lines,
    finding_text,
    gate_rows,
    headline,
    test_text,
)
from batchtune.report.html.check_figures import gate_changes, history_of
from batchtune.report.html.comparison_figures import block_values
from batchtune.report.html.comparison_page import (
    TYPICAL,
    arms_of_runs,
    shared_slo,
    short_lines,
    typical_runs,
)
from batchtune.report.html.shell.batch_sizes import sizes
from batchtune.report.html.shell.document import (
    Answer,
    Document,
    gathered_caveats,
    models_text,
    provenance_rows,
    sentence,
    slo_words,
    traffic_text,
)
from batchtune.report.html.shell.drawing import Section, Table
from batchtune.report.html.shell.latency_figures import distribution, split
from batchtune.report.html.shell.shown import is_emulated, provenance_of
from batchtune.report.html.shell.trial_rows import table_of_single_trials
from batchtune.report.words import capitalised
from batchtune.scenario.reader import read_kept_variants
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import counted
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.compare.variant import figures_of
from batchtune.tune.trials.trial import Trial

_VERDICTS: Final[Mapping[Verdict, tuple[str, str]]] = {
    "OK": ("Yes", "good"),
    "IMPROVED": ("Yes, better", "good"),
    "REGRESSED": ("No: regressed", "bad"),
    "SLO MISSED": ("No: SLO missed", "bad"),
    "INCONCLUSIVE": ("It cannot be told", "open"),
    "INVALID": ("Invalid", "bad"),
    "INCOMPARABLE": ("Not comparable", "bad"),
}


def check_document(run: Run) -> Document:
    """The page of a run of `batchtune check` that came to its end.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    account = read_account(run.path)
    scenario, trials = run.scenario(), run.ledger()
    variants = _variants(run, scenario, trials)
    scenarios = {variant.name: variant.scenario for variant in variants}
    workload = [models_text(scenario), traffic_text(scenario), *slo_words(scenario)]
    blocks = counted(account.conclusion.blocks + account.conclusion.fresh_blocks, "block")
    return Document(
        title=scenario.name,
        subtitle=" · ".join([f"Check of {account.candidate} against {account.baseline}", *workload, blocks]),
        emulated=is_emulated(trials),
        answers=_answers(account),
        sections=_sections(run, account, variants, trials),
        caveats=gathered_caveats({variant.name: figures_of(variant, trials).caveats for variant in variants}),
        provenance=provenance_rows(run, scenario),
        trials=table_of_single_trials(
            trials,
            lambda trial: scenarios.get(trial.reason, scenario),
            lambda trial: f"{trial.reason}, block {trial.block}",
        ),
        intervals=(
            "Intervals of gates are one-sided bounds at the levels of the last look; those of single trials come from "
            "order statistics, widened because requests of one batch finish together."
        ),
    )


def _variants(run: Run, scenario: Scenario, trials: Sequence[Trial]) -> list[Variant]:
    """Both sides, of several models an arm for each; the candidate alone where the baseline's figures were kept."""
    sides = read_kept_variants(run.path / "scenario.yaml")
    if sides:
        both = [Variant(name=name, scenario=side) for name, side in sides.items()]
        return [arm for side in both for arm in side.arms()]
    names = dict.fromkeys(trial.reason for trial in trials)
    return [Variant(name=name, scenario=scenario) for name in names]


def _sections(
    run: Run, account: Account, variants: Sequence[Variant], trials: Sequence[Trial]
) -> list[Section]:
    names = {"baseline": account.baseline, "candidate": account.candidate}
    scenario = variants[0].scenario
    slo = shared_slo(variants)
    arms = arms_of_runs([variant.name for variant in variants], trials)
    shown = typical_runs(arms, run)
    rows = gate_rows(account.conclusion)
    headings = [heading.format(**names) for heading in HEADINGS]
    return [
        gate_changes(account),
        *(
            [Section(anchor="verdicts", title="The gates", table=Table(headings=headings, rows=rows))]
            if rows
            else []
        ),
        Section(
            anchor="words",
            title="In words",
            paragraphs=[sentence(headline(account)), *closing_lines(account)],
        ),
        _history(run, account),
        block_values(arms, "p95" if scenario.objective == "latency" else scenario.objective, slo=slo),
        distribution(shown, slo, which=TYPICAL),
        split(shown, which=TYPICAL),
        sizes(shown, which=TYPICAL),
    ]


def _history(run: Run, account: Account) -> Section:
    """Of the gates of this check, over all that the folder of results keeps."""
    cpu = provenance_of(run).get("cpu", {}).get("model")
    lines: list[dict[str, Any]] = []
    try:
        kept = read_history(run.path.parent.parent)
        lines = [line for line in kept if line["scenario"] == account.scenario and line.get("cpu") == cpu]
    except ArchiveError:
        lines = []
    own = next((line["utc"] for line in reversed(lines) if line.get("run") == account.run), None)
    metrics = {finding.gate.name for finding in account.conclusion.findings}
    return history_of([figure for figure in series_of(lines) if figure.metric in metrics], utc=own)


def _answers(account: Account) -> tuple[Answer, ...]:
    conclusion = account.conclusion
    verdict, tone = _VERDICTS[conclusion.verdict]
    why = conclusion.reason or f"{account.candidate} against {account.baseline}"
    advice = advice_text(account)
    sure = [test_text(account)] if conclusion.findings and not conclusion.is_void else []
    sure += [sentence(text) for text in (account.note, advice) if text]
    steady = "Nothing by its margin" if conclusion.findings else "Not measured"
    moved = [
        finding_text(finding) for finding in conclusion.findings if finding.state in ("regressed", "improved")
    ]
    open_ones = [
        f"open: {finding_text(finding)}" for finding in conclusion.findings if finding.state == "open"
    ]
    attribution = account.attribution
    return (
        Answer(
            question="Is it still as good?", headline=verdict, lines=short_lines([sentence(why)]), tone=tone
        ),
        Answer(
            question="What moved?",
            headline=moved[0].partition(" (")[0] if moved else steady,
            lines=short_lines([*moved, *open_ones]),
        ),
        Answer(
            question="Why?",
            headline="Nothing to explain" if attribution is None else capitalised(attribution.cause),
            lines=() if attribution is None else short_lines([sentence(attribution.text)]),
        ),
        Answer(
            question="How sure is that?",
            headline=_sureness(account),
            lines=short_lines(sure),
        ),
    )


def _sureness(account: Account) -> str:
    conclusion = account.conclusion
    match conclusion.verdict:
        case "REGRESSED" if conclusion.fresh_blocks:
            return "Seen twice, on fresh blocks too"
        case "INCONCLUSIVE":
            return "Not sure"
        case "INVALID" | "INCOMPARABLE":
            return "Nothing is known"
        case _:
            return counted(conclusion.blocks, "block")
