"""The page of a comparison: whether batching helps, by how much, how sure that is, what limits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from typing import Any

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
from batchtune.report.html.shell.document import Report, TrialTable
from batchtune.report.html.shell.drawing import LineStyle, Panel, PlottedRun, Section, Table, Trace
from batchtune.report.html.shell.latency_figures import distribution, sizes, split
from batchtune.report.tables import ratio, without_empty_columns
from batchtune.report.words import models_text, shortened
from batchtune.scenario.reader import read_kept_variants
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.blocks import Variant, is_noisy
from batchtune.tune.compare.result import Comparison, Metric, Pair, figure_of, runs_of, summarise
from batchtune.tune.trials.trial import Trial, parts_of
from batchtune.units import counted


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
        "host-disturbed": ("invalid: disturbed by the host", "@limit", "cross-thin-open"),
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
            line_at=1.0,
        )
        panels.append(panel)
    return drawing.section(
        "factors",
        drawing.in_panels(panels, height_px=height_px, legend=drawing.legend_above(height_px)),
        rows=" Throughput is that of rows where requests differ in rows." if "rows" in metrics else "",
        blocks=BLOCKS_NEEDED,
    )


def sections_of_runs(
    run: Run, variants: Sequence[Variant], trials: Sequence[Trial], metric: Metric
) -> list[Section]:
    """Draw the runs of variants: their figures over the blocks, the one compared, `metric`, and p95; then the
    requests and batches of a typical run of each.

    Limits are drawn where they are equal for all variants.
    """
    slo = variants[0].scenario.slo
    if any(variant.scenario.slo != slo for variant in variants):
        slo = SloSpec()
    looks = dict(zip((variant.name for variant in variants), cycle(drawing.LINE_STYLES), strict=False))
    runs = {name: runs_of(trials, name) for name in looks}
    shown = [
        PlottedRun(name=name, look=looks[name], trial=trial, run=run)
        for name, own in runs.items()
        if (trial := typical_run(own)) is not None
    ]
    places = {trial.number: at for at, trial in enumerate(trials)}
    which = "Of each the run with the median p95"
    return [
        _block_values(runs, looks, places, metric, slo=slo),
        distribution(shown, slo, which=which),
        split(shown, which=which),
        sizes(shown, which=which),
    ]


def _block_values(
    runs: Mapping[str, Mapping[int, Trial]],
    looks: Mapping[str, LineStyle],
    places: Mapping[int, int],
    metric: Metric,
    *,
    slo: SloSpec,
) -> Section:
    """Draw figures over the blocks; `runs`: by variant and block, `places`: number of a trial -> its index in
    the page's table."""
    drawn = {name: own for name, own in runs.items() if own}
    if not drawn:
        return drawing.section("blocks", None)
    shown: list[Metric] = [metric] if metric == "p95" else [metric, "p95"]
    last = max(block for own in drawn.values() for block in own)
    panels = []
    for at, compared in enumerate(shown):
        traces = [
            _line(name, own, looks[name], places, compared, legend=at == 0) for name, own in drawn.items()
        ]
        y = drawing.axis(drawing.MERITS[compared].title, rangemode="tozero")
        panels.append(Panel(traces=traces, x=drawing.count_axis("block", last), y=y))
    figure = drawing.in_panels(panels, height_px=360)
    layout = drawing.limited(slo, figure.layout, panel="" if len(shown) == 1 else "2")
    noisy = any(is_noisy(trial) for own in drawn.values() for trial in own.values())
    return drawing.section(
        "blocks",
        replace(figure, layout=layout),
        clickable=True,
        noisy=" Open points: the host disturbed that run, also when it was repeated." if noisy else "",
    )


def typical_run(runs: Mapping[int, Trial]) -> Trial | None:
    """Return the run with the median p95, whose requests are shown in place of those of all runs; None without runs."""
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
    return f"{drawing.safe(text)}<br>{counted(pair.blocks, 'block')}"


def _outcome(pair: Pair, factor: Estimate) -> str:
    if pair.is_void:
        return pair.outcome
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


def _line(
    variant: str,
    runs: Mapping[int, Trial],
    look: LineStyle,
    places: Mapping[int, int],
    metric: Metric,
    *,
    legend: bool,
) -> Trace:
    """Return the line of one variant over the blocks; a run that the host disturbed is an open symbol."""
    blocks, merit, name = sorted(runs), drawing.MERITS[metric], drawing.safe(variant)
    trials = [runs[block] for block in blocks]
    symbols = [f"{look.symbol}-open" if is_noisy(trial) else look.symbol for trial in trials]
    return drawing.trace(
        blocks,
        [drawing.finite(figure_of(metric)(trial), merit.scale) for trial in trials],
        colour=look.colour,
        marker={"symbol": symbols, "line": {"width": 1.5}},
        line={"width": 1.6, "dash": look.dash},
        hover=f"block %{{x}}: %{{y:,.4~r}} {merit.title}, %{{text}}",
        of=name,
        name=name,
        legendgroup=name,
        showlegend=legend,
        customdata=[places[trial.number] for trial in trials],
        text=[f"trial {trial.number}" for trial in trials],
    )


def comparison_document(run: Run) -> Report:
    """Make the page of a run of `batchtune compare`, whole or interrupted.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario, trials = run.scenario(), parts_of(run.ledger())
    variants = variants_of(run)
    comparison = summarise(trials, variants)
    arms = [arm for variant in variants for arm in variant.arms()]
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
        trials=table_of_blocks(trials, arms, scenario),
        intervals=drawing.page_texts()["intervals"]["compare"],
    )


def table_of_blocks(trials: Sequence[Trial], variants: Sequence[Variant], scenario: Scenario) -> TrialTable:
    """Return the page's table of trials; `scenario`: of a trial of none of the variants."""
    scenarios = {variant.name: variant.scenario for variant in variants}
    return document.table_of_single_trials(
        trials,
        lambda trial: scenarios.get(trial.reason, scenario),
        lambda trial: f"{trial.reason}, block {trial.block}",
    )


def variants_of(run: Run) -> list[Variant]:
    """Return the variants of a run's scenario, the baseline of a comparison first; empty where it has none.

    Raises:
        ScenarioError: the run's scenario cannot be read.
    """
    scenarios = read_kept_variants(run.path / "scenario.yaml")
    first = None
    with suppress(OSError, ValueError, LookupError, TypeError):
        first = json.loads((run.path / COMPARISON).read_bytes())["variants"][0]["name"]
    names = sorted(scenarios, key=lambda name: name != first)
    return [Variant(name=name, scenario=scenarios[name]) for name in names]


def _sections(
    run: Run, trials: Sequence[Trial], variants: Sequence[Variant], comparison: Comparison
) -> list[Section]:
    marks = Marks(caveats={variant.name: () for variant in comparison.variants})
    rows = without_empty_columns(comparison_rows(comparison, marks))
    metric = comparison.pairs[0].metric if comparison.pairs else "throughput"
    return [
        factors(comparison),
        drawing.section("variants", Table(rows=rows), anchor="figures"),
        drawing.section("words", small_print(comparison)),
        *sections_of_runs(run, variants, trials, metric),
    ]
