"""The page of a check: whether it is still as good, what moved, why, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from batchtune.archive.run import Run
from batchtune.check.account import Account, read_account
from batchtune.check.gate import Finding, margin_text
from batchtune.check.history import ERROR_RATE, SIDE_MIN, Series, read_history, series_of
from batchtune.errors import ArchiveError
from batchtune.measure.quantiles import Estimate
from batchtune.report import check_text
from batchtune.report.findings import labels, text_of
from batchtune.report.html.comparison_page import sections_of_runs, table_of_blocks
from batchtune.report.html.shell import document, drawing
from batchtune.report.html.shell.document import Report
from batchtune.report.html.shell.drawing import Figure, Panel, Section, Table, Trace
from batchtune.report.words import Fact, capitalised, headline_of, models_text, sentence, shortened
from batchtune.scenario.reader import read_kept_variants
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.blocks import Variant, figures_of
from batchtune.tune.trials.trial import Trial, parts_of
from batchtune.units import counted, percentage, rounded


def gate_changes(account: Account) -> Section:
    """Draw the change of each gate with its interval, and its margin as a mark on the side that is worse."""
    shown = [finding for finding in account.conclusion.findings if math.isfinite(finding.change.value)]
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
        variant="void" if account.conclusion.is_void else "",
        runs="of two sessions, one of them stored" if account.stored else "made in turns",
    )


def _short_name(finding: Finding) -> str:
    """Return the gate's figure without its unit."""
    gate = finding.gate
    return f"{gate.model} {gate.metric}" if gate.model else check_text.unit_of(gate.name)[0].partition(" ")[0]


def history_of(series: Sequence[Series], *, utc: str | None) -> Section:
    """Draw the candidates' figures from check to check, and the changes that lasted.

    `utc`: when this check was saved, which marks it with a star; None: it is not in the history.
    """
    shown = [figure for figure in series if len(figure.values) > 1]
    most = max((len(figure.values) for figure in shown), default=0)
    panels = [
        Panel(
            traces=_one_history(figure, utc),
            x=drawing.count_axis(
                "check" if figure is shown[-1] else "", most, showticklabels=figure is shown[-1]
            ),
            y=drawing.axis(""),
            title=check_text.unit_of(figure.metric)[0],
            marks=[(change.at + 0.5, "@limit", 1.4) for change in figure.changes],
        )
        for figure in shown
    ]
    figure = drawing.in_panels(panels, height_px=90 + 170 * len(shown), below=True, showlegend=False)
    return drawing.section(
        "checks",
        figure if shown else None,
        anchor="history",
        changes=" ".join(check_text.change_lines(shown)),
        least=SIDE_MIN,
        error_rate=percentage(ERROR_RATE),
    )


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


def _one_history(series: Series, utc: str | None) -> list[Trace]:
    """Return the traces of one figure's history: a point for each check, and the median between lasting
    changes."""
    title, scale = check_text.unit_of(series.metric)
    count = len(series.values)
    symbols = ["star" if time == utc else "circle" for time in series.utc]
    points = drawing.trace(
        range(1, count + 1),
        drawing.numbers(series.values, scale),
        colour="@chosen",
        marker={"symbol": symbols, "size": [14 if mark == "star" else 8 for mark in symbols]},
        line={"width": 1.2},
        hover=f"check %{{x}}: %{{y:,.4~r}} {drawing.safe(title)}<br>%{{text}}",
        text=[
            f"{drawing.safe(time[:16])}{f', commit {drawing.safe(commit[:9])}' if commit else ''}"
            for time, commit in zip(series.utc, series.commits, strict=True)
        ],
    )
    edges = [0, *(change.at for change in series.changes), count]
    medians = (
        [series.changes[0].before, *(change.after for change in series.changes)] if series.changes else []
    )
    steps = [
        drawing.trace(
            [start + 0.5, end + 0.5],
            [drawing.finite(median, scale)] * 2,
            colour="@limit",
            line={"width": 2},
            hover=f"median {rounded(median * scale)}",
        )
        for (start, end), median in zip(pairwise(edges), medians, strict=False)
    ]
    return [points, *steps]


def check_document(run: Run) -> Report:
    """Make the page of a run of `batchtune check` that saved its verdict.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    account = read_account(run.path)
    scenario, trials = run.scenario(), parts_of(run.ledger())
    variants = _variants(run, scenario, trials)
    workload = [models_text(scenario), document.traffic_text(scenario), *document.slo_words(scenario)]
    blocks = counted(account.conclusion.blocks + account.conclusion.fresh_blocks, "block")
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
    sides = read_kept_variants(run.path / "scenario.yaml")
    if sides:
        both = [Variant(name=name, scenario=side) for name, side in sides.items()]
        return [arm for side in both for arm in side.arms()]
    names = dict.fromkeys(trial.reason for trial in trials)
    return [Variant(name=name, scenario=scenario) for name in names]


def _sections(
    run: Run, account: Account, variants: Sequence[Variant], trials: Sequence[Trial]
) -> list[Section]:
    scenario = variants[0].scenario
    metric = "p95" if scenario.objective == "latency" else scenario.objective
    rows = check_text.gate_table(account)
    return [
        gate_changes(account),
        drawing.section("verdicts", Table(rows=rows) if rows else None),
        _history(run, account),
        *sections_of_runs(run, variants, trials, metric),
    ]


def _history(run: Run, account: Account) -> Section:
    """Return the section with the history of this check's gates, over all checks in the results folder."""
    cpu = drawing.provenance_of(run).get("cpu", {}).get("model")
    lines: list[dict[str, Any]] = []
    try:
        kept = read_history(run.path.parent.parent)
        lines = [line for line in kept if line["scenario"] == account.scenario and line.get("cpu") == cpu]
    except ArchiveError:
        lines = []
    own = next((line["utc"] for line in reversed(lines) if line.get("run") == account.run), None)
    metrics = {finding.gate.name for finding in account.conclusion.findings}
    return history_of([figure for figure in series_of(lines) if figure.metric in metrics], utc=own)


def _answers(account: Account) -> tuple[Fact, ...]:
    conclusion = account.conclusion
    verdict, tone = headline_of(conclusion.verdict)
    why = f"{account.candidate} against {account.baseline}"
    if conclusion.reason is not None:
        why = text_of(conclusion.reason)
    advice = check_text.advice_text(account)
    sure = [check_text.test_text(account)] if conclusion.findings and not conclusion.is_void else []
    sure += [sentence(text) for text in (account.note, advice) if text]
    attribution = account.attribution
    return (
        Fact(question="Is it still as good?", headline=verdict, lines=(sentence(why),), tone=tone),
        _moved(conclusion.findings),
        Fact(
            question="Why?",
            headline="Nothing to explain"
            if attribution is None
            else capitalised(labels("causes")[attribution.cause]),
            lines=() if attribution is None else (sentence(check_text.attribution_text(attribution)),),
        ),
        Fact(
            question="How confident is this?",
            headline=_sureness(account),
            lines=tuple(sure),
        ),
    )


def _moved(findings: Sequence[Finding]) -> Fact:
    moved = [finding for finding in findings if finding.state in ("regressed", "improved")]
    lines = [check_text.finding_text(finding) for finding in moved[1:]]
    lines += [
        f"undecided: {check_text.finding_text(finding)}" for finding in findings if finding.state == "open"
    ]
    headline = "Nothing by its margin" if findings else "Not measured"
    if moved:
        headline = f"{moved[0].gate.name} {check_text.change_text(moved[0], ends=False)}"
        lines = [f"margin {margin_text(moved[0].gate, moved[0].margin)}", *lines]
    return Fact(question="What moved?", headline=headline, lines=tuple(lines))


def _sureness(account: Account) -> str:
    conclusion = account.conclusion
    match conclusion.verdict:
        case "REGRESSED" if conclusion.fresh_blocks:
            return "Seen twice, in confirmation blocks too"
        case "INCONCLUSIVE":
            return "No verdict yet"
        case "INVALID" | "INCOMPARABLE":
            return "Nothing is known"
        case _:
            return counted(conclusion.blocks, "block")
