"""What does the page of a comparison say: does batching help, by how much, how sure is that, what limits?"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from batchtune.archive.run import COMPARISON, Run
from batchtune.measure.quantiles import BLOCKS_NEEDED, Estimate
from batchtune.report.comparison import (
    METRICS,
    bounded,
    comparison_facts,
    comparison_rows,
    pair_sentence,
    small_print,
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
    LINE_STYLES,
    Figure,
    LineStyle,
    PlottedRun,
    Section,
    Table,
    Trace,
    axis,
    bars,
    finite,
    is_emulated,
    legend_above,
    limited,
    numbers,
    panel_title,
    safe,
)
from batchtune.report.html.shell.latency_figures import distribution, sizes, split
from batchtune.report.tables import Marks, ratio, without_empty_columns
from batchtune.report.words import models_text, shortened
from batchtune.scenario.reader import read_kept_variants
from batchtune.scenario.spec.check import SloSpec
from batchtune.tune.compare.blocks import Metric, Variant, figure_of, is_noisy, runs_of
from batchtune.tune.compare.result import Comparison, Pair, summarise
from batchtune.tune.trials.trial import Trial, parts_of
from batchtune.units import counted

_OUTCOMES: Final = {
    "different": ("a measurable difference", "@chosen", "circle"),
    "not distinguishable": ("no measurable difference", "@muted", "circle-open"),
    "client-limited": ("invalid: client-limited", "@limit", "x-thin-open"),
}
UNITS: Final[Mapping[Metric, tuple[str, float]]] = {
    "throughput": ("requests/s", 1.0),
    "rows": ("rows/s", 1.0),
    "p95": ("p95, ms", 1e3),
    "capacity": ("capacity, requests/s", 1.0),
}
"""Of each figure that blocks compare, and its scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One variant's runs by block, and where each trial stands in the ledger."""

    name: str
    look: LineStyle
    runs: Mapping[int, Trial]
    places: Mapping[int, int]


def all_pairs(comparison: Comparison) -> list[Pair]:
    """Each variant against the baseline, then with batching against without, each once."""
    pairs = [*comparison.pairs, *(answer.pair for answer in comparison.answers)]
    return list({(pair.variant, pair.baseline): pair for pair in pairs}.values())


def factors(comparison: Comparison) -> Section:
    """Each pair as a factor with its interval, in the objective's figure and in p95, and a line at no change."""
    section = Section(anchor="factors", title="By which factor they differ")
    pairs = [pair for pair in all_pairs(comparison) if pair.ratio is not None]
    if not pairs:
        return replace(section, missing="no block has two variants that were both measured")
    metrics = list(dict.fromkeys([*(pair.metric for pair in pairs), "p95"]))
    groups = _panels(metrics)
    names = [_pair_name(pair) for pair in pairs][::-1]
    height_px = 190 + 42 * len(names)
    data: list[Trace] = []
    layout: dict[str, Any] = {
        "grid": {"rows": 1, "columns": len(groups), "pattern": "independent"},
        "annotations": [],
        "shapes": [],
    }
    for at, (title, metrics_shown) in enumerate(groups):
        panel = "" if at == 0 else str(at + 1)
        shown = [(pair, factor) for pair in pairs if (factor := _factor(pair, metrics_shown)) is not None]
        data += [trace | {"xaxis": f"x{panel}", "yaxis": f"y{panel}"} for trace in _factor_traces(shown, at)]
        layout[f"xaxis{panel}"] = _factor_axis([factor for _, factor in shown])
        layout[f"yaxis{panel}"] = axis(
            "", type="category", categoryorder="array", categoryarray=names, range=[-0.6, len(names) - 0.4]
        )
        layout["shapes"].append(_no_change(panel))
        layout["annotations"].append(panel_title(title, panel))
        if at:
            layout[f"yaxis{panel}"]["showticklabels"] = False
    return replace(
        section,
        lead="Right of the line at ×1 is more, left is less: good is more throughput and less p95. An interval that "
        "crosses the line may be no change at all."
        + (" Throughput is that of rows where requests differ in rows." if "rows" in metrics else ""),
        figure=Figure(data=data, layout=layout | {"legend": legend_above(height_px)}, height_px=height_px),
        how=(
            "One ratio a block, of two runs made side by side under one seed; the point is the Hodges-Lehmann median "
            "of these ratios, the bar their exact 95 % interval (Wilcoxon's signed-rank test). With fewer than "
            f"{BLOCKS_NEEDED} blocks there is none. What a noisy host disturbed was repeated; the last run counts."
        ),
    )


def block_values(arms: Sequence[Arm], metric: Metric, *, slo: SloSpec) -> Section:
    """What each arm did in each block: the figure compared, and p95."""
    section = Section(anchor="blocks", title="Block by block", clickable=True)
    data: list[Trace] = []
    layout: dict[str, Any] = {"annotations": []}
    shown: list[Metric] = [metric] if metric == "p95" else [metric, "p95"]
    layout["grid"] = {"rows": 1, "columns": len(shown), "pattern": "independent"}
    for at, name in enumerate(shown):
        panel = "" if at == 0 else str(at + 1)
        title, scale = UNITS[name]
        traces = [_line(arm, figure_of(name), title, scale, legend=at == 0) for arm in arms if arm.runs]
        data += [trace | {"xaxis": f"x{panel}", "yaxis": f"y{panel}"} for trace in traces]
        layout[f"xaxis{panel}"] = axis("block", **_whole_numbers(arms))
        layout[f"yaxis{panel}"] = axis(title, rangemode="tozero")
        if name == "p95":
            layout = limited(slo, layout, panel=panel)
    if not data:
        return replace(section, missing="no block was measured")
    noisy = any(is_noisy(trial) for arm in arms for trial in arm.runs.values())
    return replace(
        section,
        lead="Lines that go up and down together saw the same disturbance, which their ratio cancels."
        + (" Open points: the host disturbed that run, also when it was repeated." if noisy else ""),
        figure=Figure(data=data, layout=layout, height_px=360),
        how="The run that counts in each block: the last complete one of each. Bars of single runs are in the trials.",
    )


def typical_run(runs: Mapping[int, Trial]) -> Trial | None:
    """The run with the median p95, to stand for all in figures of single requests."""
    ranked = sorted(runs.values(), key=lambda trial: _rank(figure_of("p95")(trial)))
    return ranked[(len(ranked) - 1) // 2] if ranked else None


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _panels(metrics: Sequence[Metric]) -> list[tuple[str, tuple[Metric, ...]]]:
    """p95 apart; what else is compared shares a panel, for it is the same thing in requests or rows."""
    rates = tuple(metric for metric in metrics if metric != "p95")
    panels: list[tuple[str, tuple[Metric, ...]]] = [("p95", ("p95",))]
    if rates:
        name = METRICS[rates[0]] if len(rates) == 1 else "throughput"
        panels.insert(0, (name, rates))
    return panels


def _factor(pair: Pair, metrics: tuple[Metric, ...]) -> Estimate | None:
    factor = pair.latency_ratios.get("p95") if metrics == ("p95",) else pair.ratio
    return factor if factor is not None and math.isfinite(factor.value) else None


def _factor_traces(shown: Sequence[tuple[Pair, Estimate]], panel: int) -> list[Trace]:
    traces: list[Trace] = []
    for outcome, (words, colour, symbol) in _OUTCOMES.items():
        mine = [(pair, factor) for pair, factor in shown if _outcome(pair, factor) == outcome]
        if not mine:
            continue
        traces.append(
            {
                "x": numbers(factor.value for _, factor in mine),
                "y": [_pair_name(pair) for pair, _ in mine],
                "error_x": {
                    **bars([bounded(factor) or factor for _, factor in mine]),
                    "color": colour,
                    "thickness": 2,
                    "width": 5,
                },
                "mode": "markers",
                "name": words,
                "legendgroup": words,
                "showlegend": panel == 0,
                "marker": {"color": colour, "symbol": symbol, "size": 11, "line": {"width": 2}},
                "text": [
                    f"{safe(pair_sentence(pair) if not panel else ratio(bounded(factor)))}<br>{pair.blocks} blocks"
                    for pair, factor in mine
                ],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return traces


def _outcome(pair: Pair, factor: Estimate) -> str:
    if pair.outcome == "client-limited":
        return "client-limited"
    return "not distinguishable" if factor.low <= 1.0 <= factor.high else "different"


def _factor_axis(shown: Sequence[Estimate]) -> dict[str, Any]:
    """Logarithmic, with 1 on it, so that twice and half are as far from no change."""
    ends = [
        end for factor in shown for end in (factor.low, factor.value, factor.high) if 0.0 < end < math.inf
    ]
    low, high = min([*ends, 1.0]), max([*ends, 1.0])
    span = max(high / low, 1.2)
    pad = span**0.08
    return axis(
        "times", type="log", span=span, range=[math.log10(low / pad), math.log10(high * pad)], tickprefix="×"
    )


def _no_change(panel: str) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": f"x{panel}",
        "x0": 1,
        "x1": 1,
        "yref": f"y{panel} domain",
        "y0": 0,
        "y1": 1,
        "line": {"color": "@ink", "width": 1.2, "dash": "dash"},
    }


def _pair_name(pair: Pair) -> str:
    return f"{safe(pair.variant)}<br>over {safe(pair.baseline)}"


def _line(arm: Arm, figure: Callable[[Trial], float], title: str, scale: float, *, legend: bool) -> Trace:
    blocks = sorted(arm.runs)
    trials = [arm.runs[block] for block in blocks]
    symbols = [f"{arm.look.symbol}-open" if is_noisy(trial) else arm.look.symbol for trial in trials]
    return {
        "x": blocks,
        "y": [finite(figure(trial), scale) for trial in trials],
        "mode": "lines+markers",
        "name": safe(arm.name),
        "legendgroup": safe(arm.name),
        "showlegend": legend,
        "line": {"color": arm.look.colour, "dash": arm.look.dash, "width": 1.6},
        "marker": {"color": arm.look.colour, "symbol": symbols, "size": 9, "line": {"width": 1.5}},
        "customdata": [arm.places[trial.number] for trial in trials],
        "text": [f"trial {trial.number}" for trial in trials],
        "hovertemplate": f"block %{{x}}: %{{y:,.4~r}} {title}, %{{text}}<extra>{safe(arm.name)}</extra>",
    }


def _whole_numbers(arms: Sequence[Arm]) -> dict[str, Any]:
    last = max((block for arm in arms for block in arm.runs), default=1)
    return {"dtick": max(1, math.ceil(last / 12)), "tick0": 1, "range": [0.6, last + 0.4]}


TYPICAL: Final = "Of each the run with the median p95"


def comparison_document(run: Run) -> Report:
    """The page of a run of `batchtune compare`, whole or interrupted.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario, trials = run.scenario(), parts_of(run.ledger())
    variants = _variants(run)
    comparison = summarise(trials, variants)
    arms = [arm for variant in variants for arm in variant.arms()]
    by_name = {arm.name: arm.scenario for arm in arms}
    said = [
        models_text(scenario),
        counted(len(variants), "variant"),
        counted(comparison.blocks, "block"),
        traffic_text(scenario),
        *slo_words(scenario),
    ]
    return Report(
        title=scenario.name,
        subtitle=" · ".join(["Comparison", *said, f"objective {arms[0].scenario.objective}"]),
        emulated=is_emulated(trials),
        answers=shortened(comparison_facts(comparison)),
        sections=_sections(run, trials, arms, comparison),
        caveats=gathered_caveats({variant.name: variant.caveats for variant in comparison.variants}),
        provenance=provenance_rows(run, scenario),
        trials=table_of_single_trials(
            trials,
            lambda trial: by_name.get(trial.reason, scenario),
            lambda trial: f"{trial.reason}, block {trial.block}",
        ),
        intervals=(
            "Intervals are 95 % intervals from the spread between blocks; those of single trials come from order "
            "statistics, widened because requests of one batch finish together."
        ),
    )


def arms_of_runs(names: Sequence[str], trials: Sequence[Trial]) -> list[Arm]:
    """The runs that count of each name, in their order."""
    places = {trial.number: at for at, trial in enumerate(trials)}
    return [
        Arm(name=name, look=LINE_STYLES[at % len(LINE_STYLES)], runs=runs_of(trials, name), places=places)
        for at, name in enumerate(names)
    ]


def shared_slo(variants: Sequence[Variant]) -> SloSpec:
    """The limits to draw: those that all of them have."""
    slo = variants[0].scenario.slo
    return slo if all(variant.scenario.slo == slo for variant in variants) else SloSpec()


def typical_runs(arms: Sequence[Arm], run: Run) -> list[PlottedRun]:
    """One run of each arm that has one, for figures of single requests."""
    typical = [(arm, typical_run(arm.runs)) for arm in arms]
    return [
        PlottedRun(name=arm.name, look=arm.look, trial=trial, run=run)
        for arm, trial in typical
        if trial is not None
    ]


def _variants(run: Run) -> list[Variant]:
    """Those of the scenario, the baseline that was asked for first."""
    scenarios = read_kept_variants(run.path / "scenario.yaml")
    first = None
    with suppress(OSError, ValueError, LookupError, TypeError):
        first = json.loads((run.path / COMPARISON).read_bytes())["variants"][0]["name"]
    names = sorted(scenarios, key=lambda name: name != first)
    return [Variant(name=name, scenario=scenarios[name]) for name in names]


def _sections(
    run: Run, trials: Sequence[Trial], variants: Sequence[Variant], comparison: Comparison
) -> list[Section]:
    slo = shared_slo(variants)
    arms = arms_of_runs([variant.name for variant in variants], trials)
    shown = typical_runs(arms, run)
    marks = Marks(caveats={variant.name: () for variant in comparison.variants})
    headings, *rows = without_empty_columns(comparison_rows(comparison, marks))
    metric = comparison.pairs[0].metric if comparison.pairs else "throughput"
    words = small_print(comparison)
    return [
        factors(comparison),
        Section(anchor="figures", title="The variants", table=Table(headings=headings, rows=rows)),
        *([Section(anchor="words", title="What limits the variants", paragraphs=words)] if words else []),
        block_values(arms, metric, slo=slo),
        distribution(shown, slo, which=TYPICAL),
        split(shown, which=TYPICAL),
        sizes(shown, which=TYPICAL),
    ]
