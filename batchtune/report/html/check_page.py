"""What does the page of a check say: is it still as good, what moved, why, and how sure is that?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from batchtune.archive.run import Run
from batchtune.check.account import Account, read_account
from batchtune.check.gate import Finding, State, margin_text
from batchtune.check.history import ERROR_RATE, SIDE_MIN, Series, read_history, series_of
from batchtune.check.paired_check import Verdict
from batchtune.errors import ArchiveError
from batchtune.measure.quantiles import Estimate
from batchtune.report.findings import text_of
from batchtune.report.gate.statement import (
    HEADINGS,
    advice_text,
    attribution_text,
    change_lines,
    change_text,
    finding_text,
    gate_rows,
    test_text,
    unit_of,
)
from batchtune.report.html.comparison_page import (
    TYPICAL,
    arms_of_runs,
    block_values,
    shared_slo,
    typical_runs,
)
from batchtune.report.html.shell.document import (
    Report,
    gathered_caveats,
    provenance_rows,
    slo_words,
    table_of_single_trials,
    traffic_text,
)
from batchtune.report.html.shell.drawing import (
    Figure,
    Section,
    Table,
    Trace,
    axis,
    bars,
    finite,
    is_emulated,
    legend_above,
    numbers,
    panel_title,
    provenance_of,
    safe,
)
from batchtune.report.html.shell.latency_figures import distribution, sizes, split
from batchtune.report.words import Fact, capitalised, models_text, sentence, shortened
from batchtune.scenario.reader import read_kept_variants
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.blocks import Variant, figures_of
from batchtune.tune.trials.trial import Trial, parts_of
from batchtune.units import counted, percentage, rounded

_STATES: Final[dict[State, tuple[str, str]]] = {
    "regressed": ("@limit", "x"),
    "improved": ("@defaults", "circle"),
    "ok": ("@chosen", "circle"),
    "open": ("@unbatched", "circle-open"),
}
_MOST_DRAWN: Final = 3.0
"""A change of four times, or an end of an interval there, leaves the picture and stays in the table."""


def gate_changes(account: Account) -> Section:
    """Each gate's change with its interval, and its margin as a mark on the side that is worse."""
    section = Section(anchor="gates", title="What changed, and how much counts")
    shown = [finding for finding in account.conclusion.findings if math.isfinite(finding.change.value)]
    if not shown:
        return replace(section, missing="no figure was measured on both sides")
    names = [_short_name(finding) for finding in shown]
    data: list[Trace] = []
    for state, (colour, symbol) in _STATES.items():
        mine = [(finding, name) for finding, name in zip(shown, names, strict=True) if finding.state == state]
        if mine:
            data.append(_changes(mine, state, colour, symbol))
    data.append(_margins(list(zip(shown, names, strict=True))))
    runs = "of two sessions, one of them stored" if account.stored else "made in turns"
    height_px = 150 + 40 * len(shown)
    layout: dict[str, Any] = {
        "xaxis": axis("change, % (of errors: points)", zeroline=True),
        "yaxis": axis("", type="category", categoryorder="array", categoryarray=names[::-1]),
        "legend": legend_above(height_px),
    }
    return replace(
        section,
        lead=f"{_counting(account)} Below 0 is less: worse of throughput and capacity alone.",
        figure=Figure(data=data, layout=layout, height_px=height_px),
        how=(
            f"One difference of logarithms a block, of two runs {runs}; the point is the Hodges-Lehmann median, "
            "the bar its one-sided bounds at the levels of the last look: signed-rank, or Student's t of the first "
            "blocks. An end that so few blocks do not give, or beyond four times, is not drawn."
        ),
    )


def _short_name(finding: Finding) -> str:
    """Without the unit."""
    gate = finding.gate
    return f"{gate.model} {gate.metric}" if gate.model else unit_of(gate.name)[0].partition(" ")[0]


def history_of(series: Sequence[Series], *, utc: str | None) -> Section:
    """The candidates' figures from check to check, with the changes that lasted; `utc` is when this one was kept."""
    section = Section(anchor="history", title="From check to check")
    shown = [figure for figure in series if len(figure.values) > 1]
    if not shown:
        return replace(
            section, missing="the history holds no other check of this scenario on this kind of CPU"
        )
    data: list[Trace] = []
    layout: dict[str, Any] = {
        "grid": {"rows": len(shown), "columns": 1, "pattern": "independent", "ygap": 0.35},
        "annotations": [],
        "shapes": [],
        "showlegend": False,
    }
    most = max(len(figure.values) for figure in shown)
    for at, figure in enumerate(shown):
        panel = "" if at == 0 else str(at + 1)
        data += [trace | {"xaxis": f"x{panel}", "yaxis": f"y{panel}"} for trace in _one_history(figure, utc)]
        is_last = at == len(shown) - 1
        layout[f"xaxis{panel}"] = axis(
            "check" if is_last else "",
            dtick=_tick(figure),
            tick0=1,
            range=[0.5, most + 0.5],
            showticklabels=is_last,
        )
        layout[f"yaxis{panel}"] = axis("")
        layout["annotations"].append(panel_title(unit_of(figure.metric)[0], panel))
        layout["shapes"] += [_change_mark(change.at, panel) for change in figure.changes]
    return replace(
        section,
        lead=" ".join(change_lines(shown)),
        figure=Figure(data=data, layout=layout, height_px=90 + 170 * len(shown)),
        how=(
            "The candidate's median of each check of this scenario on this kind of CPU; the star is this one. Dashed: "
            f"the split with the largest rank CUSUM, {SIDE_MIN} checks or more on either side, tested by permutation "
            f"({percentage(ERROR_RATE)} of series without a change show one); horizontal: the medians between."
        ),
    )


def _counting(account: Account) -> str:
    """What a bar means for the verdict."""
    if account.conclusion.is_void:
        return "The check is void, so that no bar counts."
    return "A bar that lies beyond its margin fails the check; one that crosses it is undecided."


def _changes(mine: Sequence[tuple[Finding, str]], state: State, colour: str, symbol: str) -> Trace:
    estimates = [_drawn(finding.change) for finding, _ in mine]
    return {
        "x": numbers((estimate.value for estimate in estimates), 100),
        "y": [name for _, name in mine],
        "error_x": {**bars(estimates, 100), "color": colour, "thickness": 2, "width": 5},
        "mode": "markers",
        "name": state,
        "marker": {"color": colour, "symbol": symbol, "size": 11, "line": {"width": 2}},
        "text": [
            f"{safe(finding.gate.name)} {safe(change_text(finding))}<br>margin "
            f"{safe(margin_text(finding.gate, finding.margin))}, {finding.blocks} blocks: {state}"
            for finding, _ in mine
        ],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _margins(shown: Sequence[tuple[Finding, str]]) -> Trace:
    return {
        "x": numbers(
            (finding.gate.change(finding.gate.limit_of(finding.margin)) for finding, _ in shown), 100
        ),
        "y": [name for _, name in shown],
        "mode": "markers",
        "name": "margin",
        "marker": {"symbol": "line-ns-open", "size": 20, "color": "@ink", "line": {"width": 2}},
        "hovertemplate": "margin %{x:+.3~r} %<extra></extra>",
    }


def _drawn(change: Estimate) -> Estimate:
    value, low, high = (
        end if abs(end) <= _MOST_DRAWN else math.nan for end in (change.value, change.low, change.high)
    )
    return Estimate(value=value, low=low, high=high)


def _one_history(series: Series, utc: str | None) -> list[Trace]:
    title, scale = unit_of(series.metric)
    count = len(series.values)
    symbols = ["star" if time == utc else "circle" for time in series.utc]
    points: Trace = {
        "x": list(range(1, count + 1)),
        "y": numbers(series.values, scale),
        "mode": "lines+markers",
        "line": {"color": "@chosen", "width": 1.2},
        "marker": {
            "color": "@chosen",
            "symbol": symbols,
            "size": [14 if mark == "star" else 8 for mark in symbols],
        },
        "text": [
            f"{safe(time[:16])}{f', commit {safe(commit[:9])}' if commit else ''}"
            for time, commit in zip(series.utc, series.commits, strict=True)
        ],
        "hovertemplate": f"check %{{x}}: %{{y:,.4~r}} {safe(title)}<br>%{{text}}<extra></extra>",
    }
    edges = [0, *(change.at for change in series.changes), count]
    medians = (
        [series.changes[0].before, *(change.after for change in series.changes)] if series.changes else []
    )
    steps: list[Trace] = [
        {
            "x": [start + 0.5, end + 0.5],
            "y": [finite(median, scale)] * 2,
            "mode": "lines",
            "line": {"color": "@limit", "width": 2},
            "hovertemplate": f"median {rounded(median * scale)}<extra></extra>",
        }
        for (start, end), median in zip(pairwise(edges), medians, strict=False)
    ]
    return [points, *steps]


def _change_mark(at: int, panel: str) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": f"x{panel}",
        "x0": at + 0.5,
        "x1": at + 0.5,
        "yref": f"y{panel} domain",
        "y0": 0,
        "y1": 1,
        "line": {"color": "@limit", "width": 1.4, "dash": "dash"},
    }


def _tick(series: Series) -> int:
    return max(1, math.ceil(len(series.values) / 12))


_VERDICTS: Final[Mapping[Verdict, tuple[str, str]]] = {
    "OK": ("Yes", "good"),
    "IMPROVED": ("Yes, better", "good"),
    "REGRESSED": ("No: regressed", "bad"),
    "SLO MISSED": ("No: SLO missed", "bad"),
    "INCONCLUSIVE": ("No verdict", "open"),
    "INVALID": ("Invalid", "bad"),
    "INCOMPARABLE": ("Not comparable", "bad"),
}


def check_document(run: Run) -> Report:
    """The page of a run of `batchtune check` that came to its end.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    account = read_account(run.path)
    scenario, trials = run.scenario(), parts_of(run.ledger())
    variants = _variants(run, scenario, trials)
    scenarios = {variant.name: variant.scenario for variant in variants}
    workload = [models_text(scenario), traffic_text(scenario), *slo_words(scenario)]
    blocks = counted(account.conclusion.blocks + account.conclusion.fresh_blocks, "block")
    return Report(
        title=scenario.name,
        subtitle=" · ".join([f"Check of {account.candidate} against {account.baseline}", *workload, blocks]),
        emulated=is_emulated(trials),
        answers=shortened(_answers(account)),
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


def _answers(account: Account) -> tuple[Fact, ...]:
    conclusion = account.conclusion
    verdict, tone = _VERDICTS[conclusion.verdict]
    why = f"{account.candidate} against {account.baseline}"
    if conclusion.reason is not None:
        why = text_of(conclusion.reason)
    advice = advice_text(account)
    sure = [test_text(account)] if conclusion.findings and not conclusion.is_void else []
    sure += [sentence(text) for text in (account.note, advice) if text]
    attribution = account.attribution
    return (
        Fact(question="Is it still as good?", headline=verdict, lines=(sentence(why),), tone=tone),
        _moved(conclusion.findings),
        Fact(
            question="Why?",
            headline="Nothing to explain" if attribution is None else capitalised(attribution.cause),
            lines=() if attribution is None else (sentence(attribution_text(attribution)),),
        ),
        Fact(
            question="How confident is this?",
            headline=_sureness(account),
            lines=tuple(sure),
        ),
    )


def _moved(findings: Sequence[Finding]) -> Fact:
    moved = [finding for finding in findings if finding.state in ("regressed", "improved")]
    lines = [finding_text(finding) for finding in moved[1:]]
    lines += [f"undecided: {finding_text(finding)}" for finding in findings if finding.state == "open"]
    headline = "Nothing by its margin" if findings else "Not measured"
    if moved:
        headline = f"{moved[0].gate.name} {change_text(moved[0], ends=False)}"
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
