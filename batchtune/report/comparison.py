"""Renders a comparison: the table, a factor for each pair, and in plain words whether batching helps here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.batching.parameters import Configuration
from batchtune.measure.caveats import Touches
from batchtune.measure.measurement import padding_per_element
from batchtune.measure.quantiles import BLOCKS_NEEDED, SHOWN
from batchtune.report import tables, words
from batchtune.report.findings import Marks, labels, text_of
from batchtune.report.live_view import measured_load, trial_line
from batchtune.report.words import Fact
from batchtune.tune.compare.blocks import Variant, comparison_seconds, is_most, run_seconds
from batchtune.tune.compare.result import BatchingAnswer, Comparison, Pair, VariantFigures
from batchtune.tune.evidence.bracket import LEVEL
from batchtune.tune.trials.pace import Pace, times_of
from batchtune.tune.trials.trial import Trial
from batchtune.units import counted, percentage, rounded, rounded_duration

if TYPE_CHECKING:
    from batchtune.measure.quantiles import Estimate
    from batchtune.target.telemetry import ServerActivity
    from batchtune.tune.compare.result import NoiseFloor


def stage_lines(variants: Sequence[VariantFigures]) -> list[str]:
    """Return a line on how much of the time each variant's device works, where a variant sets
    --batching_stage; else none."""
    if not any("batching_stage" in dict(variant.configuration.flags) for variant in variants):
        return []
    shares = [
        f"{variant.name} {percentage(min(variant.device_busy_ratio, 1.0))}"
        for variant in variants
        if variant.device_busy_ratio is not None
    ]
    return [f"The device part of the model runs, of the time: {', '.join(shares)}."] if shares else []


def padding_share(per_element: float) -> str:
    """Return padding as a percentage of all elements computed; `per_element`: padding for each element that
    was sent."""
    return percentage(per_element / (1.0 + per_element))


def saved_text(per_element: float, *, in_one_queue: float) -> str:
    """Return `padding saved: 84 %`, how much less padding there is than in one queue, or `padding added: 5 %`; ""
    where one queue has none.

    `per_element`, `in_one_queue`: elements of padding for each element that was sent.
    """
    if in_one_queue <= 0.0:
        return ""
    saved = 1.0 - per_element / in_one_queue
    return f"padding saved: {percentage(saved)}" if saved >= 0 else f"padding added: {percentage(-saved)}"


def bucket_text(server: ServerActivity) -> str:
    """Return the share of padding, in all and for each length bucket; "" where no input may differ in length."""
    whole = padding_per_element([server])
    if whole is None:
        return ""
    text = f"length padding: {padding_share(whole)} of the elements computed"
    shares = [
        f"{bucket}: {padding_share(server.bucket_padding_elements.get(bucket, 0) / sent)}"
        for bucket, sent in sorted(
            server.bucket_sent_elements.items(),
            key=lambda item: float(item[0]) if item[0].isdecimal() else math.inf,
        )
        if bucket
    ]
    return f"{text} (bucket {', '.join(shares)})" if shares else text


def print_comparison(comparison: Comparison, *, path: Path) -> None:
    """Print a comparison: the table, a line for each pair, the answers, and the caveats with their letters.

    `path`: the run's folder, which the last line names.
    """
    # Columns that go first where there is little room.
    dispensable = (
        "itl_p50 ms",
        "ttft_p50 ms",
        "p50 ms",
        "rows/s",
        "mean batch rows",
        "wall time s",
        "errors",
        "p99 ms",
    )
    marks = Marks(caveats={variant.name: variant.caveats for variant in comparison.variants})
    tables.print_rows(comparison_rows(comparison, marks), dispensable=dispensable)
    facts = map(words.fact_text, comparison_facts(comparison))
    lines = ["", *_pair_lines(comparison, marks), "", *facts, "", *small_print(comparison), *marks.lines()]
    lines.append(f"Saved in {path}")
    tables.print_text(*lines, indent="    ")


def pace_text(variant: Variant, pace: Pace) -> str:
    """Return how long a variant's runs will take, before they begin: `large: a batch takes about 2.1 s, each
    run 12 s`."""
    if variant.scenario.target.models:
        takes = rounded_duration(run_seconds(variant, pace))
        return f"{variant.name}: all models at once, at their stated loads, each run {takes}"
    times = times_of(pace, variant.scenario, variant.configuration)
    speed = f"{variant.name}: {speed_text(variant.configuration, pace, batch_s=times.batch_s)}"
    if math.isnan(pace.lone_s):
        return speed
    run_s = rounded_duration(run_seconds(variant, pace))
    most = "at most " if is_most(variant, pace) else ""
    return f"{speed}, each run {most}{run_s}"


def speed_text(configuration: Configuration, pace: Pace, *, batch_s: float) -> str:
    """Return how long a batch takes, where one of several requests was measured; else how long a lone request takes.

    `batch_s`: seconds that a batch takes by the pace.
    """
    if math.isnan(pace.lone_s):
        return "a lone request was not answered"
    if configuration.dialect != "http" and max(pace.batch_s_by_rows, default=0) > pace.lone_rows:
        return f"a batch takes about {rounded_duration(batch_s)}"
    return f"a lone request takes about {rounded_duration(pace.lone_s)}"


def comparison_text(variants: Sequence[Variant], paces: Mapping[str, Pace], *, blocks: int) -> str:
    """Return how long a comparison will take: `in total about 7 min 05 s, …`; `at most` where no more is known
    of a variant."""
    most = any(is_most(variant, paces[variant.name]) for variant in variants)
    takes = rounded_duration(comparison_seconds(variants, paces, blocks=blocks))
    return f"in total {'at most' if most else 'about'} {takes}, repeats on a noisy host left out"


def print_noise(floor: NoiseFloor, *, path: Path) -> None:
    """Print how much one configuration differs from itself, and the smallest change that a comparison
    detects."""
    marks = Marks(caveats={"A/A": floor.caveats})
    tables.print_rows(noise_rows(floor, marks))
    lines = ["", *noise_lines(floor), *marks.lines(), f"Saved in {path}"]
    tables.print_text(*lines, indent="    ")


def noise_rows(floor: NoiseFloor, marks: Marks) -> list[list[str]]:
    """Return the table of a noise floor, headings first: a row for each figure.

    Its columns: spread in %, ratio of the second arm to the first, and the smallest detectable change in % by
    number of blocks. `marks`: letters of the caveats on the runs, under the name "A/A".
    """
    shown = next(iter(floor.floors.values())).smallest
    rows = [[marks.head("A/A"), "spread %", "A again / A", *(f"{blocks} blocks, %" for blocks in shown)]]
    for name, figure in floor.floors.items():
        rows.append(
            [
                marks.marked(name, "A/A", "throughput" if name in ("throughput", "capacity") else "latency"),
                tables.interval(figure.spread, scale=100),
                tables.ratio(bounded(figure.ratio)),
                *(rounded(change * 100) for change in figure.smallest.values()),
            ]
        )
    return rows


def noise_lines(floor: NoiseFloor) -> list[str]:
    """Return sentences below the table of a noise floor: the smallest change that a comparison detects, and
    what weakens that."""
    name, first = next(iter(floor.floors.items()))
    changes = ", ".join(f"{percentage(change)} with {blocks}" for blocks, change in first.smallest.items())
    lines = [
        f"The smallest change of {name} that `batchtune compare` detects here in 4 of 5 comparisons: {changes} blocks.",
    ]
    strange = [figure_name for figure_name, figure in floor.floors.items() if figure.differs]
    if strange:
        lines.append(
            f"{', '.join(strange)}: the same configuration differs from itself. By chance that happens to one figure "
            "in twenty; if it recurs, the machine drifts."
        )
    if floor.client_limited:
        lines.append("INVALID: client-limited; this is the spread of the load generator, not of the server")
    return [*lines, *host_lines(floor.repeats, floor.noisy, floor.runs, is_void=floor.noisy == floor.runs)]


def variant_line(trial: Trial, *, again: bool = False) -> str:
    """Return one line on a finished trial of a comparison; `again`: it repeats an earlier trial of its block."""
    load = "" if trial.measurement is None else f", {measured_load(trial.measurement)}"
    return trial_line(trial, head=f"block {trial.block}{' again' if again else ''}, {trial.reason}{load}")


def pair_sentence(pair: Pair, *, failure: str | None = None) -> str:
    """Return a variant's factor over its baseline, `B: ×1.83 [1.79, 1.88] throughput`, or why there is none.

    `failure`: why the variant failed, None where it did not.
    """
    what = labels("compared")[pair.metric]
    match pair.outcome:
        case "different":
            return f"{pair.variant}: {tables.ratio(pair.ratio)} {what}"
        case "client-limited" | "host-disturbed":
            headline, _ = words.headline_of(pair.outcome)
            return f"{pair.variant}: {headline.lower()}"
        case "not measured":
            return f"{pair.variant}: not measured{'' if failure is None else f': {failure}'}"
        case "not distinguishable":
            if pair.blocks < BLOCKS_NEEDED:
                so_far = tables.ratio(bounded(pair.ratio))
                return (
                    f"{pair.variant}: not decided: {counted(pair.blocks, 'block')}, and an interval needs "
                    f"{BLOCKS_NEEDED} ({so_far} {what} so far)"
                )
            return f"{pair.variant}: not distinguishable, {tables.ratio(pair.ratio)} {what}"


def comparison_facts(comparison: Comparison) -> tuple[Fact, ...]:
    """Return four answers: whether batching helps (else which variant is best), by how much, how sure that
    is, and what limits."""
    first = _batching(comparison.answers) if comparison.answers else _best(comparison)
    return (first, _by_how_much(comparison), _sure(comparison), _limits(comparison))


def _batching(answers: Sequence[BatchingAnswer]) -> Fact:
    verdicts = {(answer.helps, makes_no_difference(answer)) for answer in answers}
    headline, tone = words.headline_of(answers[0].helps) if len(verdicts) == 1 else ("It depends", "open")
    if all(map(makes_no_difference, answers)):
        headline = "No relevant difference"
    if len(answers) == 1:
        answer = answers[0]
        lines = [f"{labels('protocols')[answer.protocol]}, {words.requests_text(answer.rows_per_request)}"]
        lines.append(f"{answer.pair.variant} against {answer.pair.baseline}")
    else:
        lines = [
            f"{f'{answer.pair.model}, ' if answer.pair.model else ''}{labels('protocols')[answer.protocol]}, "
            f"{words.requests_text(answer.rows_per_request)}: it {labels('pays')[answer.helps]}"
            for answer in answers
        ]
    return Fact(question="Does batching help?", headline=headline, lines=tuple(lines), tone=tone)


def _best(comparison: Comparison) -> Fact:
    """Return the answer to "Which is best?", for variants of which no two differ in batching alone."""
    gains = [pair for pair in comparison.pairs if pair.outcome == "different" and _gain(pair) > 1.0]
    is_void = any(pair.is_void for pair in comparison.pairs)
    if gains and not is_void:
        best = max(gains, key=_gain)
        lines = (f"{tables.ratio(best.ratio)} {labels('compared')[best.metric]} over {best.baseline}",)
        return Fact(question="Which is best?", headline=best.variant, lines=lines, tone="good")
    if is_void or not {pair.outcome for pair in comparison.pairs} & {"different", "not distinguishable"}:
        why = tuple([pair_sentence(pair) for pair in comparison.pairs])
        return Fact(question="Which is best?", headline="Not known", lines=why, tone="bad")
    if comparison.blocks < BLOCKS_NEEDED:
        so_far = (
            *map(pair_sentence, comparison.pairs),
            f"Let at least {BLOCKS_NEEDED} blocks end (--blocks).",
        )
        return Fact(question="Which is best?", headline="Not decided", lines=so_far, tone="open")
    baseline = comparison.variants[0].name
    lines = (f"No variant is measurably better than {baseline}.",)
    return Fact(question="Which is best?", headline=baseline, lines=lines, tone="open")


def _by_how_much(comparison: Comparison) -> Fact:
    question = "By how much?"
    pairs = [answer.pair for answer in comparison.answers] or list(comparison.pairs)
    measured = [pair for pair in pairs if pair.ratio is not None and not pair.is_void]
    if not measured:
        why = tuple([pair_sentence(pair) for pair in pairs])
        return Fact(question=question, headline="Not known", lines=why, tone="bad")
    values = sorted(pair.ratio.value for pair in measured if pair.ratio is not None)
    headline = (
        f"×{rounded(values[0])}" if len(values) == 1 else f"×{rounded(values[0])} to ×{rounded(values[-1])}"
    )
    metrics = {pair.metric for pair in measured}
    if len(metrics) == 1:
        metric = metrics.pop()
        worse = values[0] > 1.0 if metric == "p95" else values[-1] < 1.0
        headline = f"{headline} {labels('compared')[metric]}{' (worse)' if worse else ''}"
    lines = _one_pair(measured[0], comparison) if len(pairs) == 1 else [pair_sentence(pair) for pair in pairs]
    return Fact(question=question, headline=headline, lines=tuple(lines))


def _one_pair(pair: Pair, comparison: Comparison) -> list[str]:
    before, after = comparison.figures(pair.baseline), comparison.figures(pair.variant)
    lines = [f"{tables.ratio(bounded(pair.ratio))} {labels('compared')[pair.metric]} over {pair.baseline}"]
    lines += [
        f"{tables.ratio(bounded(factor))} {name}"
        for name, factor in pair.latency_ratios.items()
        if not name.endswith("p50")
    ]
    lines.append(f"{_rate(after)} instead of {_rate(before)} requests/s")
    lines.append(f"p95 {_p95(after)} instead of {_p95(before)}")
    return lines


def _sure(comparison: Comparison) -> Fact:
    pairs = [answer.pair for answer in comparison.answers] or list(comparison.pairs)
    different = sum(pair.outcome == "different" for pair in pairs)
    tone = "good" if different == len(pairs) else "open"
    void = next((pair.outcome for pair in pairs if pair.is_void), None)
    if void is not None:
        headline, tone = words.headline_of(void)
    elif len(pairs) == 1:
        undecided = "No measurable difference" if comparison.blocks >= BLOCKS_NEEDED else "Not decided"
        headline = "A measurable difference" if different else undecided
    else:
        headline = f"{different} of {len(pairs)} differ measurably"
    lines = [f"{counted(comparison.blocks, 'block')}, each with every variant side by side under one seed."]
    if comparison.blocks < BLOCKS_NEEDED:
        lines.append(f"An interval needs {BLOCKS_NEEDED} blocks.")
    elif not different and void is None:
        lines.append("More blocks (--blocks) detect smaller differences; `batchtune noise` reports how many.")
    lines += [
        f"{variant.name} failed: {variant.failure}" for variant in comparison.variants if variant.failure
    ]
    if comparison.disturbed:
        names = " and of ".join(comparison.disturbed)
        lines.append(f"The host disturbed every run of {names}, also when it was repeated.")
    if any(pair.outcome == "host-disturbed" and pair.all_agree for pair in pairs):
        lines.append(
            f"All blocks agree on which is better; on such a host {2 * BLOCKS_NEEDED} that do are enough (--blocks)."
        )
    noisy = sum(variant.noisy for variant in comparison.variants)
    runs = sum(variant.runs for variant in comparison.variants)
    lines += host_lines(comparison.repeats, noisy, runs, is_void=bool(comparison.disturbed))
    return Fact(question="How confident is this?", headline=headline, lines=tuple(lines), tone=tone)


def _limits(comparison: Comparison) -> Fact:
    kinds: dict[str, list[VariantFigures]] = {}
    for variant in comparison.variants:
        if variant.bottleneck is not None:
            kinds.setdefault(words.limit_word(variant.bottleneck), []).append(variant)
    if len(kinds) < 2:
        last = next((same[-1].bottleneck for same in kinds.values()), None)
        return words.limit_fact(last)
    lines = [f"{', '.join(variant.name for variant in variants)}: {kind}" for kind, variants in kinds.items()]
    return Fact(question="What limits it?", headline="Not the same for all", lines=tuple(lines))


def _gain(pair: Pair) -> float:
    if pair.ratio is None:
        return 0.0
    return 1.0 / pair.ratio.value if pair.metric == "p95" else pair.ratio.value


def _rate(figures: VariantFigures) -> str:
    return rounded(None if figures.throughput_rps is None else figures.throughput_rps.value)


def _p95(figures: VariantFigures) -> str:
    p95 = figures.latency_s.get("p95")
    return "–" if p95 is None else rounded_duration(p95.value)


def makes_no_difference(answer: BatchingAnswer) -> bool:
    """Whether the difference that batching makes is not measurable, and its interval lies within a factor of LEVEL."""
    ratio, is_open = answer.pair.ratio, answer.helps == "not distinguishable"
    return is_open and ratio is not None and ratio.low > 1.0 / LEVEL and ratio.high < LEVEL


def comparison_rows(comparison: Comparison, marks: Marks) -> list[list[str]]:
    """Return the table of variants, headings first, with all columns, also those in which no variant has a value.

    `marks`: the letters of the variants' caveats, which follow the figures.
    """
    variants = comparison.variants

    def marked(kind: Touches, texts: Iterable[str]) -> list[str]:
        return [marks.marked(text, variant.name, kind) for text, variant in zip(texts, variants, strict=True)]

    rows_per_s = (variant.throughput_rows_per_s for variant in variants)
    rows = [rounded(None if rate is None else rate.value) for rate in rows_per_s]
    rows_differ = len({words.requests_text(variant.rows_per_request) for variant in variants}) > 1
    columns = {
        "variant": [marks.head(variant.name) for variant in variants],
        "wall time s": marked("throughput", (_figure(variant.wall_s) for variant in variants)),
        "requests/s": marked("throughput", (_figure(variant.throughput_rps) for variant in variants)),
        **({"rows/s": marked("throughput", rows)} if rows_differ else {}),
        **{
            f"{name} ms": marked(
                "latency", (tables.milliseconds(bounded(variant.latency_s.get(name))) for variant in variants)
            )
            for name in dict.fromkeys(name for variant in variants for name in (*variant.latency_s, *SHOWN))
        },
        "mean batch rows": marked("server", (rounded(variant.mean_batch_rows) for variant in variants)),
        "errors": [percentage(variant.error_ratio) for variant in variants],
        "limited by": [
            "failed" if variant.failure else words.limit_word(variant.bottleneck) for variant in variants
        ],
    }
    return [[*columns], *map(list, zip(*columns.values(), strict=True))]


def _pair_lines(comparison: Comparison, marks: Marks) -> list[str]:
    """Return a line for each pair, below a heading for its baseline, with the mark of both sides' caveats."""
    if not comparison.pairs:
        return []
    failures = {variant.name: variant.failure for variant in comparison.variants}
    lines = []
    baselines = list(dict.fromkeys(pair.baseline for pair in comparison.pairs))
    for pair in sorted(comparison.pairs, key=lambda pair: baselines.index(pair.baseline)):
        head = f"Against {pair.baseline}, over {counted(comparison.blocks, 'block')}:"
        lines += [] if head in lines else [head]
        kind: Touches = "latency" if pair.metric == "p95" else "throughput"
        sentence = pair_sentence(pair, failure=failures[pair.variant])
        lines.append(f"  {marks.marked(sentence, (pair.baseline, pair.variant), kind, 'everything')}")
    lines += [
        f"  {baseline}, the baseline, failed: {failures[baseline]}"
        for baseline in baselines
        if failures[baseline] is not None
    ]
    return lines


def small_print(comparison: Comparison) -> list[str]:
    """Return lines on equal configurations, padding, how busy the device is, what limits which variants, and
    the wall time."""
    named: dict[str, list[str]] = {}
    for variant in comparison.variants:
        named.setdefault(variant.configuration.label(), []).append(variant.name)
    lines = [f"With {label}: {', '.join(names)}." for label, names in named.items() if len(named) > 1]
    lines += [*_padding_lines(comparison), *stage_lines(comparison.variants)]
    limits = {variant.name: variant.bottleneck for variant in comparison.variants}
    if len({words.limit_word(bottleneck) for bottleneck in limits.values() if bottleneck}) > 1:
        lines += [
            f"Limited by {words.limit_word(bottleneck)} ({', '.join(names)}): {text_of(bottleneck.advice)}"
            for names, bottleneck in words.alike(limits)
        ]
    requests = {variant.requests for variant in comparison.variants if variant.requests is not None}
    if len(requests) == 1:
        lines.append(f"Wall time: from the first of {requests.pop():,} requests to the last answer.")
    return lines


def _padding_lines(comparison: Comparison) -> list[str]:
    """Return a line with the share of padding of each variant, and what the others save against the first;
    none without padding."""
    per_element = {
        variant.name: variant.padding_per_element
        for variant in comparison.variants
        if variant.padding_per_element is not None
    }
    if not any(per_element.values()):
        return []
    shares = ", ".join(f"{name} {padding_share(share)}" for name, share in per_element.items())
    first, *others = per_element
    in_one_queue, ending = per_element[first], ""
    if others and in_one_queue > 0.0:
        saved = (f"{saved_text(per_element[name], in_one_queue=in_one_queue)} ({name})" for name in others)
        ending = f"; against {first} {'; '.join(saved)}"
    return [f"Length padding, of the elements computed: {shares}{ending}."]


def host_lines(repeats: int, noisy: int, runs: int, *, is_void: bool) -> list[str]:
    """Return a line on how often the host disturbed the runs; [] where it did not.

    `repeats`: number of trials that were repeated because of it. `runs`: number of trials that count, of which
    `noisy` were disturbed too. `is_void`: so that a figure does not count.
    """
    if not repeats and not noisy:
        return []
    ending = "Blocks cancel what disturbs their runs alike; a quiet machine gives narrower intervals."
    if noisy == runs:
        ending = "All blocks agree on which is better; on a quiet machine the factor may differ."
    if is_void:
        ending = "The figures do not count; measure again on a quiet machine."
    sentence = (
        f"Host: {counted(repeats, 'trial')} repeated because the host was noisy; {noisy} of the {runs} runs that count "
        f"still disturbed. {ending}"
    )
    return [sentence]


def _figure(estimate: Estimate | None) -> str:
    return tables.interval(bounded(estimate))


def bounded(estimate: Estimate | None) -> Estimate | None:
    """Return the estimate, without its interval where the upper end is infinite, as with too few blocks; None for
    None."""
    if estimate is None or math.isfinite(estimate.high):
        return estimate
    return replace(estimate, low=math.nan, high=math.nan)
