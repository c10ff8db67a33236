"""The page of a check: whether it is still as good, why, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from batchtune.archive.run import Run
from batchtune.check.account import Conclusion, read_account
from batchtune.check.gate import Finding, margin_text
from batchtune.measure.quantiles import Estimate
from batchtune.report import check_text
from batchtune.report.findings import labels
from batchtune.report.html.comparison_page import sections_of_runs, table_of_blocks, variants_of
from batchtune.report.html.shell import document, drawing
from batchtune.report.html.shell.document import Report
from batchtune.report.html.shell.drawing import Figure, Section, Table
from batchtune.report.words import Fact, capitalised, headline_of, models_text, sentence, shortened
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.compare.result import figures_of
from batchtune.tune.trials.trial import Trial, parts_of
from batchtune.units import counted


def gate_changes(account: Conclusion) -> Section:
    """Draw the change of each gate with its interval, and its margin as a mark on the side that is worse."""
    shown = [finding for finding in account.findings if math.isfinite(finding.change.value)]
    if not shown:
        return drawing.section("gates", None)
    names = [_short_name(finding) for finding in shown]
    looks = {
        "regressed": ("regressed", "@limit", "x"),
        "improved": ("improved", "@defaults", "circle"),
        "ok": ("ok", "@chosen", "circle"),
        "open": ("undecided", "@unbatched", "circle-open"),
    }
    rows = [
        (finding.state, name, drawing.scaled(_drawn(finding.change), 100), _hover(finding))
        for finding, name in zip(shown, names, strict=True)
    ]
    margins = drawing.trace(
        drawing.numbers(
            (finding.gate.change(finding.gate.limit_of(finding.margin)) for finding in shown), 100
        ),
        names,
        colour="@ink",
        marker={"symbol": "line-ns-open", "size": 20, "line": {"width": 2}},
        hover="margin %{x:+.3~r} %",
        name="margin",
    )
    height_px = 150 + 40 * len(shown)
    layout: dict[str, Any] = {
        "xaxis": drawing.axis("change, % (of errors: points)", zeroline=True),
        "yaxis": drawing.categories("", names[::-1]),
        "legend": drawing.legend_above(height_px),
    }
    return drawing.section(
        "gates",
        Figure(data=[*drawing.intervals(rows, looks), margins], layout=layout, height_px=height_px),
        variant="void" if account.is_void else "",
        runs="of two sessions, one of them stored" if account.stored else "made in turns",
    )


def _short_name(finding: Finding) -> str:
    """Return the gate's figure without its unit."""
    gate = finding.gate
    return f"{gate.model} {gate.metric}" if gate.model else check_text.unit_of(gate.name)[0].partition(" ")[0]


def _hover(finding: Finding) -> str:
    change, margin = check_text.change_text(finding), margin_text(finding.gate, finding.margin)
    state = check_text.STATES.get(finding.state, finding.state)
    text = f"{finding.gate.name} {change}\nmargin {margin}, {counted(finding.blocks, 'block')}: {state}"
    return drawing.safe(text).replace("\n", "<br>")


def _drawn(change: Estimate) -> Estimate:
    """Return the change without value or ends beyond ±300 %, which would flatten the figure; the table has
    them."""
    most = 3.0
    value, low, high = (
        end if abs(end) <= most else math.nan for end in (change.value, change.low, change.high)
    )
    return Estimate(value=value, low=low, high=high)


def check_document(run: Run) -> Report:
    """Make the page of a run of `batchtune check` that saved its verdict.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    account = read_account(run.path)
    scenario, trials = run.scenario(), parts_of(run.ledger())
    variants = _variants(run, scenario, trials)
    workload = [models_text(scenario), document.traffic_text(scenario), *document.slo_words(scenario)]
    blocks = counted(account.blocks + account.fresh_blocks, "block")
    return Report(
        title=scenario.name,
        subtitle=" · ".join([f"Check of {account.candidate} against {account.baseline}", *workload, blocks]),
        emulated=drawing.is_emulated(trials),
        answers=shortened(_answers(account)),
        sections=_sections(run, account, variants, trials),
        caveats=document.gathered_caveats(
            {variant.name: figures_of(variant, trials).caveats for variant in variants}
        ),
        provenance=document.provenance_rows(run, scenario),
        trials=table_of_blocks(trials, variants, scenario),
        intervals=drawing.page_texts()["intervals"]["check"],
    )


def _variants(run: Run, scenario: Scenario, trials: Sequence[Trial]) -> list[Variant]:
    """Return both sides, with several models an arm for each model; with a stored baseline the candidate
    alone."""
    arms = [arm for side in variants_of(run) for arm in side.arms()]
    names = dict.fromkeys(trial.reason for trial in trials)
    return arms or [Variant(name=name, scenario=scenario) for name in names]


def _sections(
    run: Run, account: Conclusion, variants: Sequence[Variant], trials: Sequence[Trial]
) -> list[Section]:
    scenario = variants[0].scenario
    metric = "p95" if scenario.objective == "latency" else scenario.objective
    rows = check_text.gate_table(account)
    return [
        gate_changes(account),
        drawing.section("verdicts", Table(rows=rows) if rows else None),
        *sections_of_runs(run, variants, trials, metric),
    ]


def _answers(account: Conclusion) -> tuple[Fact, ...]:
    verdict, tone = headline_of(account.verdict)
    cause = "Nothing to explain"
    if account.attribution is not None:
        cause = capitalised(labels("causes")[account.attribution.cause])
    below = {label: sentence(text) for label, text in check_text.closing(account)}
    blocks = counted(account.blocks + account.fresh_blocks, "block")
    sure = tuple(below[label] for label in ("Test", "Next", "Note") if label in below)
    return (
        Fact(
            question="Is it still as good?",
            headline=verdict,
            lines=(sentence(check_text.outcome(account)),),
            tone=tone,
        ),
        Fact(question="Why?", headline=cause, lines=(below["Why"],) if "Why" in below else ()),
        Fact(
            question="How confident is this?",
            headline=blocks if "Test" in below else "Nothing is known",
            lines=sure,
        ),
    )
