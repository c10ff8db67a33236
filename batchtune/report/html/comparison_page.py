"""The page of a comparison: whether batching helps, by how much, how sure that is, what limits."""

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
    bounded,
    comparison_facts,
    comparison_rows,
    pair_sentence,
    small_print,
)
from batchtune.report.findings import Marks, labels
from batchtune.report.html.shell import document, drawing
from batchtune.report.html.shell.document import Report
from batchtune.report.html.shell.drawing import LineStyle, Merit, Panel, PlottedRun, Section, Table, Trace
from batchtune.report.html.shell.latency_figures import distribution, sizes, split
from batchtune.report.tables import ratio, without_empty_columns
from batchtune.report.words import models_text, shortened
from batchtune.scenario.reader import read_kept_variants
from batchtune.scenario.spec.check import SloSpec
from batchtune.tune.compare.blocks import Metric, Variant, figure_of, is_noisy, runs_of
from batchtune.tune.compare.result import Comparison, Pair, summarise
from batchtune.tune.trials.trial import Trial, parts_of
from batchtune.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One variant of a comparison: its runs by block, and `places`, number of a trial -> its index in the
    page's table."""

    name: str
    look: LineStyle
    runs: Mapping[int, Trial]
    places: Mapping[int, int]


def all_pairs(comparison: Comparison) -> list[Pair]:
    """Return the pairs to show, each once: each variant against the baseline, then each with batching against
    the one without."""
    pairs = [*comparison.pairs, *(answer.pair for answer in comparison.answers)]
    return list({(pair.variant, pair.baseline): pair for pair in pairs}.values())


def factors(comparison: Comparison) -> Section:
    """Draw the factor of each pair with its interval, for the figure compared and for p95, with a line at ×1."""
    pairs = [pair for pair in all_pairs(comparison) if pair.ratio is not None]
    if not pairs:
        return drawing.section("factors", None)
    metrics = list(dict.fromkeys([*(pair.metric for pair in pairs), "p95"]))
    names = [_pair_name(pair) for pair in pairs][::-1]
    height_px = 190 + 42 * len(names)
    looks = {
        "different": ("a measurable difference", "@chosen", "circle"),
        "not distinguishable": ("no measurable difference", "@muted", "circle-open"),
        "client-limited": ("invalid: client-limited", "@limit", "x-thin-open"),
    }
    panels = []
    for at, (title, metrics_shown) in enumerate(_panels(metrics)):
        shown = [(pair, factor) for pair in pairs if (factor := _factor(pair, metrics_shown)) is not None]
        rows = [
            (_outcome(pair, factor), _pair_name(pair), bounded(factor) or factor, _hover(pair, factor, at))
            for pair, factor in shown
        ]
        beside = {"showticklabels": False} if at else {}
        panel = Panel(
            traces=drawing.intervals(rows, looks, showlegend=not at),
            x=_factor_axis([factor for _, factor in shown]),
            y=drawing.categories("", names, range=[-0.6, len(names) - 0.4], **beside),
            title=title,
            marks=[(1, "@ink", 1.2)],
        )
        panels.append(panel)
    return drawing.section(
        "factors",
        drawing.in_panels(panels, height_px=height_px, legend=drawing.legend_above(height_px)),
        rows=" Throughput is that of rows where requests differ in rows." if "rows" in metrics else "",
        blocks=BLOCKS_NEEDED,
    )


def block_values(arms: Sequence[Arm], metric: Metric, *, slo: SloSpec) -> Section:
    """Draw each arm's figures over the blocks: the one compared, `metric`, and p95."""
    if not any(arm.runs for arm in arms):
        return drawing.section("blocks", None)
    shown: list[Metric] = [metric] if metric == "p95" else [metric, "p95"]
    panels = []
    for at, name in enumerate(shown):
        merit = drawing.MERITS[name]
        traces = [_line(arm, figure_of(name), merit, legend=at == 0) for arm in arms if arm.runs]
        blocks = drawing.count_axis("block", max(block for arm in arms for block in arm.runs))
        panels.append(Panel(traces=traces, x=blocks, y=drawing.axis(merit.title, rangemode="tozero")))
    figure = drawing.in_panels(panels, height_px=360)
    layout = drawing.limited(slo, figure.layout, panel="" if len(shown) == 1 else "2")
    noisy = any(is_noisy(trial) for arm in arms for trial in arm.runs.values())
    return drawing.section(
        "blocks",
        replace(figure, layout=layout),
        clickable=True,
        noisy=" Open points: the host disturbed that run, also when it was repeated." if noisy else "",
    )


def typical_run(runs: Mapping[int, Trial]) -> Trial | None:
    """Return the run with the median p95, whose single requests are shown for all runs; None without runs."""
    p95_of = figure_of("p95")
    ranked = sorted(runs.values(), key=lambda trial: (math.isnan(p95_of(trial)), p95_of(trial)))
    return ranked[(len(ranked) - 1) // 2] if ranked else None


def _panels(metrics: Sequence[Metric]) -> list[tuple[str, tuple[Metric, ...]]]:
    """Return (title, figures) of each panel: rates share one, whether of requests or of rows, p95 has its
    own."""
    rates = tuple(metric for metric in metrics if metric != "p95")
    panels: list[tuple[str, tuple[Metric, ...]]] = [("p95", ("p95",))]
    if rates:
        name = labels("compared")[rates[0]] if len(rates) == 1 else "throughput"
        panels.insert(0, (name, rates))
    return panels


def _factor(pair: Pair, metrics: tuple[Metric, ...]) -> Estimate | None:
    """Return the factor of a pair for a panel; None where it is not known."""
    factor = pair.latency_ratios.get("p95") if metrics == ("p95",) else pair.ratio
    return factor if factor is not None and math.isfinite(factor.value) else None


def _hover(pair: Pair, factor: Estimate, panel: int) -> str:
    text = ratio(bounded(factor)) if panel else pair_sentence(pair)
    return f"{drawing.safe(text)}<br>{pair.blocks} blocks"


def _outcome(pair: Pair, factor: Estimate) -> str:
    if pair.outcome == "client-limited":
        return "client-limited"
    return "not distinguishable" if factor.low <= 1.0 <= factor.high else "different"


def _factor_axis(shown: Sequence[Estimate]) -> dict[str, Any]:
    """Return a logarithmic axis with 1 on it, on which twice and half are as far from 1."""
    ends = [
        end for factor in shown for end in (factor.low, factor.value, factor.high) if 0.0 < end < math.inf
    ]
    low, high = min([*ends, 1.0]), max([*ends, 1.0])
    span = max(high / low, 1.2)
    pad = span**0.08
    return drawing.axis(
        "times", type="log", span=span, range=[math.log10(low / pad), math.log10(high * pad)], tickprefix="×"
    )


def _pair_name(pair: Pair) -> str:
    return f"{drawing.safe(pair.variant)}<br>over {drawing.safe(pair.baseline)}"


def _line(arm: Arm, figure: Callable[[Trial], float], merit: Merit, *, legend: bool) -> Trace:
    """Return the line of one arm over the blocks; a run that the host disturbed is an open symbol."""
    blocks = sorted(arm.runs)
    trials = [arm.runs[block] for block in blocks]
    symbols = [f"{arm.look.symbol}-open" if is_noisy(trial) else arm.look.symbol for trial in trials]
    name = drawing.safe(arm.name)
    return drawing.trace(
        blocks,
        [drawing.finite(figure(trial), merit.scale) for trial in trials],
        colour=arm.look.colour,
        marker={"symbol": symbols, "line": {"width": 1.5}},
        line={"width": 1.6, "dash": arm.look.dash},
        hover=f"block %{{x}}: %{{y:,.4~r}} {merit.title}, %{{text}}",
        of=name,
        name=name,
        legendgroup=name,
        showlegend=legend,
        customdata=[arm.places[trial.number] for trial in trials],
        text=[f"trial {trial.number}" for trial in trials],
    )


TYPICAL: Final = "Of each the run with the median p95"
"""Phrase that says which run is shown for an arm."""


def comparison_document(run: Run) -> Report:
    """Make the page of a run of `batchtune compare`, whole or interrupted.

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
        document.traffic_text(scenario),
        *document.slo_words(scenario),
    ]
    return Report(
        title=scenario.name,
        subtitle=" · ".join(["Comparison", *said, f"objective {arms[0].scenario.objective}"]),
        emulated=drawing.is_emulated(trials),
        answers=shortened(comparison_facts(comparison)),
        sections=_sections(run, trials, arms, comparison),
        caveats=document.gathered_caveats({variant.name: variant.caveats for variant in comparison.variants}),
        provenance=document.provenance_rows(run, scenario),
        trials=document.table_of_single_trials(
            trials,
            lambda trial: by_name.get(trial.reason, scenario),
            lambda trial: f"{trial.reason}, block {trial.block}",
        ),
        intervals=drawing.page_texts()["intervals"]["compare"],
    )


def arms_of_runs(names: Sequence[str], trials: Sequence[Trial]) -> list[Arm]:
    """Return an arm for each name, in their order, with its runs that count."""
    places = {trial.number: at for at, trial in enumerate(trials)}
    return [
        Arm(
            name=name,
            look=drawing.LINE_STYLES[at % len(drawing.LINE_STYLES)],
            runs=runs_of(trials, name),
            places=places,
        )
        for at, name in enumerate(names)
    ]


def shared_slo(variants: Sequence[Variant]) -> SloSpec:
    """Return the SLO whose limits a figure of all arms may draw: the arms' SLO where it is equal for all;
    else an empty one."""
    slo = variants[0].scenario.slo
    return slo if all(variant.scenario.slo == slo for variant in variants) else SloSpec()


def typical_runs(arms: Sequence[Arm], run: Run) -> list[PlottedRun]:
    """Return one run of each arm, whose single requests are shown; arms without runs are left out."""
    typical = [(arm, typical_run(arm.runs)) for arm in arms]
    return [
        PlottedRun(name=arm.name, look=arm.look, trial=trial, run=run)
        for arm, trial in typical
        if trial is not None
    ]


def _variants(run: Run) -> list[Variant]:
    """Return the scenario's variants, the baseline of the comparison first."""
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
    rows = without_empty_columns(comparison_rows(comparison, marks))
    metric = comparison.pairs[0].metric if comparison.pairs else "throughput"
    return [
        factors(comparison),
        drawing.section("variants", Table(rows=rows), anchor="figures"),
        drawing.section("words", small_print(comparison)),
        block_values(arms, metric, slo=slo),
        distribution(shown, slo, which=TYPICAL),
        split(shown, which=TYPICAL),
        sizes(shown, which=TYPICAL),
    ]
