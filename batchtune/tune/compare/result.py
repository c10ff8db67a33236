"""Sums up a comparison: figures of each variant over its blocks, ratios with intervals, whether batching helps, and the
noise floor (A/A)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE, Configuration
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.caveats import HOST_CODES
from batchtune.measure.measurement import Measurement, padding_per_element
from batchtune.measure.quantiles import (
    BLOCKS_NEEDED,
    SHOWN,
    Estimate,
    detectable_shift,
    log_ratios,
    ratio_estimate,
    spread_about_zero,
    typical,
)
from batchtune.plain_values import Coded, fields_to_plain
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.blocks import Variant, is_noisy, paired_arms
from batchtune.tune.evidence.best_point import rows_per_request, usual_bottleneck
from batchtune.tune.evidence.bracket import LEVEL, RIVAL
from batchtune.tune.trials.trial import Trial, parts_of

# What one variant of a comparison shows over its blocks, and what limits it.

Metric = Literal["throughput", "rows", "p95", "capacity"]
"""The compared figure of a run: throughput in requests/s, rows/s (where requests differ in rows), p95 in seconds,
capacity in requests/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFigures:
    """Figures of one variant over its blocks. An Estimate has the value typical of a run, and an interval by the spread
    between blocks; None: not measured.

    `rows_per_request`, `mean_batch_rows`, `error_ratio`, `device_busy_ratio`: means over the runs. The last is the
    share of the time in which the device part of the model ran; None: the server does not count it.
    `runs`: number of blocks with a complete run, the last of which counts. `noisy`: in how many of these runs the host
    was noisy in spite of all repeats.
    `requests`, `wall_s`: the fixed number of requests, and the seconds that they took; None: runs were bounded by time.
    `latency_s`: quantile name -> seconds.
    `caveats`: those that most runs have. `failure`: why the last attempt failed; None: it did not.
    `padding_per_element`: elements added to fill up shorter inputs, per element sent; None: all inputs have one length.
    """

    name: str
    protocol: str
    rows_per_request: float | None
    configuration: Configuration
    runs: int
    noisy: int
    requests: int | None
    wall_s: Estimate | None
    throughput_rps: Estimate | None
    throughput_rows_per_s: Estimate | None
    latency_s: dict[str, Estimate]
    mean_batch_rows: float | None
    error_ratio: float
    bottleneck: Bottleneck | None
    caveats: tuple[Coded, ...]
    failure: str | None
    padding_per_element: float | None = None
    device_busy_ratio: float | None = None

    @property
    def client_limited(self) -> bool:
        """Whether the load generator rather than the server limits the variant's throughput."""
        return self.bottleneck is not None and self.bottleneck.kind == "client"

    @property
    def disturbed(self) -> bool:
        """Whether the host was noisy in the last complete run of every block, and there is one; False without any."""
        return 0 < self.runs == self.noisy


def figures_of(variant: Variant, trials: Sequence[Trial]) -> VariantFigures:
    """Compute the figures of one variant from `trials`; those of other variants and failed ones are ignored."""
    runs = runs_of(trials, variant.name)
    counted = list(runs.values())
    measured = [trial.measurement for trial in counted if trial.measurement is not None]
    servers = [run.server for run in measured if run.server is not None]
    requests = variant.scenario.load.requests
    complete = requests is not None and all(run.requests == requests for run in measured)
    last = next((trial for trial in reversed(parts_of(trials)) if trial.reason == variant.name), None)
    latencies = {name: _typical_latency(map(figure_of(name), counted)) for name in shown_latencies(counted)}
    return VariantFigures(
        name=variant.name,
        protocol=variant.scenario.request.protocol,
        rows_per_request=_mean(map(rows_per_request, measured)),
        configuration=variant.configuration,
        runs=len(counted),
        noisy=sum(is_noisy(trial) for trial in counted),
        requests=requests if complete else None,
        wall_s=typical(run.window_s for run in measured) if complete else None,
        throughput_rps=typical(map(figure_of("throughput"), counted)),
        throughput_rows_per_s=typical(map(figure_of("rows"), counted)),
        latency_s={name: latency for name, latency in latencies.items() if latency is not None},
        mean_batch_rows=_mean(server.mean_batch_rows for server in servers),
        error_ratio=_mean(run.error_ratio for run in measured) or 0.0,
        bottleneck=usual_bottleneck(variant.configuration, measured, scenario=variant.scenario),
        caveats=_caveats(measured),
        failure=None if last is None else last.failure,
        padding_per_element=padding_per_element(run.server for run in measured),
        device_busy_ratio=_mean(server.device_busy_ratio for server in servers),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def runs_of(trials: Sequence[Trial], name: str) -> dict[int, Trial]:
    """Return block number -> the run that counts: the last complete trial of the variant `name` in that block."""
    return {
        trial.block: trial
        for trial in parts_of(trials)
        if trial.reason == name
        and trial.block is not None
        and trial.state == "complete"
        and trial.measurement is not None
    }


def noise_repeats(trials: Sequence[Trial]) -> int:
    """Count the trials that repeat an earlier one which noise of the host had disturbed."""
    return sum(
        (before.reason, before.block) == (after.reason, after.block)
        and before.state == "complete"
        and is_noisy(before)
        for before, after in pairwise(sorted(parts_of(trials), key=lambda trial: trial.reason))
    )


def figure_of(name: str) -> Callable[[Trial], float]:
    """Return a function that takes a trial and returns its figure: requests/s for `throughput` and `capacity`, rows/s
    for `rows`, seconds for a latency such as `p95` or `ttft_p50`; NaN where it was not measured."""

    def value(trial: Trial) -> float:
        measured = trial.measurement
        if measured is None:
            return math.nan
        match name:
            case "throughput":
                return measured.throughput_rps.value
            case "rows":
                return measured.throughput_rows_per_s.value
            case "capacity":
                return math.nan if trial.objective is None else trial.objective.value
            case _:
                known = measured.latency_s.get(name)
                return math.nan if known is None else known.value

    return value


def shown_latencies(trials: Iterable[Trial]) -> tuple[str, ...]:
    """Return the names of the latencies to compare, SHOWN (`p50`, `p95`, `p99`); where answers were streamed, those of
    first tokens (`ttft_p50`, `ttft_p95`) and gaps (`itl_p50`, `itl_p99`) before them."""
    names = {
        name for trial in trials if trial.measurement is not None for name in trial.measurement.latency_s
    }
    streamed = ("ttft_p50", "ttft_p95", "itl_p50", "itl_p99")
    return (*(name for name in streamed if name in names), *SHOWN)


def _typical_latency(values: Iterable[float]) -> Estimate | None:
    """Return `typical` of these latencies; where one is infinite (too many errors), the median without an interval."""
    known = [seconds for seconds in values if not math.isnan(seconds)]
    if all(map(math.isfinite, known)):
        return typical(known)
    return Estimate(value=statistics.median(known), low=math.nan, high=math.nan)


def _caveats(measured: Sequence[Measurement]) -> tuple[Coded, ...]:
    """The caveats that more than half of the runs have, one of each code, with the figures of the last run.

    Those about noise of the host are left out: `VariantFigures.noisy` counts them.
    """
    counts = Counter(code for run in measured for code in {caveat.code for caveat in run.caveats})
    latest = {caveat.code: caveat for run in measured for caveat in run.caveats}
    return tuple(
        caveat
        for code, caveat in latest.items()
        if 2 * counts[code] > len(measured) and code not in HOST_CODES
    )


# What two variants show beside each other.

Outcome = Literal["different", "not distinguishable", "client-limited", "host-disturbed", "not measured"]
Helps = Literal[
    "yes", "hardly", "no", "not distinguishable", "client-limited", "host-disturbed", "not measured"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two variants compared block by block.

    `metric`: the compared figure. `ratio`: the figure of the variant divided by that of the baseline; None: no block
    has both.
    `outcome`: "different" where the interval of `ratio` leaves out 1; "host-disturbed" where the host disturbed every
    run of one variant, unless `all_agree` in 12 blocks or more. The order within a block is drawn at random, and
    mirrored in the next, so that two blocks are one independent draw: all six draws favour the same of two equal
    variants in 1 of 32 comparisons, whatever the host does. `all_agree`: whether every block has a ratio, all above 1
    or all below.
    `latency_ratios`: quantile name -> ratio. `blocks`: number of blocks that have both variants.
    `model`: with several models, the name of the model that the figures are of; "": there is one model.
    """

    variant: str
    baseline: str
    metric: Metric
    outcome: Outcome
    ratio: Estimate | None
    latency_ratios: dict[str, Estimate]
    blocks: int
    all_agree: bool
    model: str = ""

    @property
    def is_void(self) -> bool:
        """Whether the load generator or the host spoilt the runs, so that `ratio` says nothing."""
        return self.outcome in ("client-limited", "host-disturbed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingAnswer:
    """Whether batching helps, from two variants that differ in nothing else.

    `pair` compares the variant with batching to the one without.
    """

    protocol: str
    rows_per_request: float | None
    helps: Helps
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison.

    `variants`: figures of each variant; with several models, of each model in each variant. `pairs`: each other variant
    against the first. `answers`: whether batching helps, from any two variants that differ only in it.
    `blocks`, `trials`: numbers of blocks and trials run. `repeats`: number of trials that repeat a noisy one.
    """

    variants: tuple[VariantFigures, ...]
    pairs: tuple[Pair, ...]
    answers: tuple[BatchingAnswer, ...]
    blocks: int
    trials: int
    repeats: int

    @property
    def disturbed(self) -> list[str]:
        """Names of the variants all of whose runs the host disturbed, so that a pair is void."""
        pairs = (*self.pairs, *(answer.pair for answer in self.answers))
        void = [pair for pair in pairs if pair.outcome == "host-disturbed"]
        names = {name for pair in void for name in (pair.baseline, pair.variant)}
        return [variant.name for variant in self.variants if variant.disturbed and variant.name in names]

    def figures(self, name: str) -> VariantFigures:
        """Return the figures of the variant called `name`."""
        return next(variant for variant in self.variants if variant.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return `schema_version` and the fields by name, as values that JSON takes; `answers` is called `batching`."""
        plain = fields_to_plain(self)
        schema_version = 1
        return {"schema_version": schema_version, "batching": plain.pop("answers"), **plain}


def summarise(trials: Sequence[Trial], variants: Sequence[Variant]) -> Comparison:
    """Return the comparison from the trials that `compare` has yielded so far; the first of `variants` is the
    baseline."""
    arms = [arm for variant in variants for arm in variant.arms()]
    runs = {arm.name: runs_of(trials, arm.name) for arm in arms}
    figures = {arm.name: figures_of(arm, trials) for arm in arms}
    by_name = {arm.name: arm for arm in arms}

    def pair(baseline: str, name: str) -> Pair:
        return _pair(by_name[baseline], by_name[name], runs=runs, figures=figures)

    return Comparison(
        variants=tuple(figures.values()),
        pairs=tuple(
            pair(before.name, after.name)
            for variant in variants[1:]
            for before, after in paired_arms(variants[0], variant)
        ),
        answers=tuple(
            _answer(pair(off.name, on.name), figures[on.name])
            for off in arms
            for on in arms
            if _same_but_for_batching(off, on)
        ),
        blocks=max((trial.block or 0 for trial in trials), default=0),
        trials=len(trials),
        repeats=noise_repeats(trials),
    )


def block_pairs(
    before: Mapping[int, Trial], after: Mapping[int, Trial], value: Callable[[Trial], float]
) -> list[tuple[float, float]]:
    """Return (before, after) of one figure for each block that has both, in the order of blocks.

    `before`, `after`: block number -> trial, as `runs_of` returns them. `value`: a trial -> its figure.
    """
    return [(value(before[block]), value(after[block])) for block in sorted(before.keys() & after.keys())]


def _pair(
    baseline: Variant,
    variant: Variant,
    *,
    runs: Mapping[str, Mapping[int, Trial]],
    figures: Mapping[str, VariantFigures],
) -> Pair:
    before, after = runs[baseline.name], runs[variant.name]
    both = (figures[baseline.name], figures[variant.name])
    metric = _metric(*both, objective=variant.scenario.objective)
    pairs = block_pairs(before, after, figure_of(metric))
    ratio, logs = ratio_estimate(pairs), log_ratios(pairs)
    all_agree = 0 < len(logs) == len(pairs) and (min(logs) > 0.0 or max(logs) < 0.0)
    latencies = {
        name: ratio_estimate(block_pairs(before, after, figure_of(name)))
        for name in shown_latencies(before.values())
    }
    outcome: Outcome = "different"
    if ratio is None:
        outcome = "not measured"
    elif any(side.client_limited for side in both):
        outcome = "client-limited"
    elif any(side.disturbed for side in both) and not (all_agree and len(pairs) >= 2 * BLOCKS_NEEDED):
        outcome = "host-disturbed"
    elif ratio.low <= 1.0 <= ratio.high:
        outcome = "not distinguishable"
    return Pair(
        variant=variant.name,
        baseline=baseline.name,
        metric=metric,
        outcome=outcome,
        ratio=ratio,
        latency_ratios={
            name: latency_ratio for name, latency_ratio in latencies.items() if latency_ratio is not None
        },
        blocks=len(pairs),
        all_agree=all_agree,
        model=variant.model,
    )


def _metric(before: VariantFigures, after: VariantFigures, *, objective: str) -> Metric:
    if objective == "latency":
        return "p95"
    if objective == "capacity":
        return "capacity"
    known = [side.rows_per_request for side in (before, after) if side.rows_per_request is not None]
    alike = len(known) < 2 or max(known) <= RIVAL * min(known)
    return "throughput" if alike else "rows"


def _same_but_for_batching(off: Variant, on: Variant) -> bool:
    """Whether `on` batches, `off` does not, and they differ in nothing else.

    A variant whose batches have no room for two requests does not count as batching.
    """
    if off.configuration.batching is not None or not _may_batch(on):
        return False
    apart = {"name", "fixed", "search", "variants"}
    plain = [side.scenario.model_dump(exclude=apart) for side in (off, on)]
    return plain[0] == plain[1] and off.configuration.flags == on.configuration.flags


def _may_batch(variant: Variant) -> bool:
    batching = variant.configuration.batching
    if batching is None:
        return False
    rows = min(kind.rows or 1 for kind in variant.scenario.request.kinds())
    return 2 * rows <= (batching.max_batch_size or DEFAULT_MAX_BATCH_SIZE)


def _answer(pair: Pair, on: VariantFigures) -> BatchingAnswer:
    return BatchingAnswer(
        protocol=on.protocol, rows_per_request=on.rows_per_request, helps=_helps(pair), pair=pair
    )


def _helps(pair: Pair) -> Helps:
    if pair.outcome != "different" or pair.ratio is None:
        return pair.outcome if pair.outcome != "different" else "not measured"
    gain = 1.0 / pair.ratio.value if pair.metric == "p95" else pair.ratio.value
    if gain < 1.0:
        return "no"
    return "yes" if gain >= LEVEL else "hardly"


# The noise floor: the smallest change that can be detected on this machine, from one configuration compared with
# itself (A/A), block by block.

ARMS: Final = ("A", "A again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The noise floor of one figure.

    `spread`: standard deviation about 0 of the natural log of the ratio within a block, with its interval.
    `ratio`: second run divided by first run of one configuration; its interval should contain 1.
    `smallest`: number of blocks -> the smallest relative change that a comparison of that many blocks detects in 4 of 5
    cases.
    """

    spread: Estimate
    ratio: Estimate
    smallest: dict[int, float]

    @property
    def differs(self) -> bool:
        """Whether the interval of `ratio` does not contain 1: 1 figure in 20 does so by chance, more are a sign of
        drift."""
        return not self.ratio.low <= 1.0 <= self.ratio.high

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as values that JSON takes; `smallest` is called `smallest_change`."""
        plain = fields_to_plain(self)
        return {"smallest_change": plain.pop("smallest"), **plain}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """The noise floor of a machine.

    `floors`: figure ("capacity", "throughput", "p50", …) -> its floor, the objective's first.
    `pairs`: number of blocks that have both runs. `runs`: number of complete runs, the last of each arm and block.
    `noisy`: in how many of these the host was noisy in spite of all repeats. `repeats`: number of trials that repeat a
    noisy one.
    `client_limited`: the load generator limits the throughput. `failure`: why a run failed; None: no run did.
    """

    floors: dict[str, Floor]
    pairs: int
    runs: int
    noisy: int
    repeats: int
    client_limited: bool
    failure: str | None
    caveats: tuple[Coded, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return `schema_version` and the fields by name, as values that JSON takes; `floors` is called `figures`."""
        plain = fields_to_plain(self)
        schema_version = 1
        return {"schema_version": schema_version, "figures": plain.pop("floors"), **plain}


def arms_of(scenario: Scenario) -> list[Variant]:
    """Return the scenario as two variants that differ only in their names, ARMS."""
    return [Variant(name=name, scenario=scenario) for name in ARMS]


def noise_floor(trials: Sequence[Trial], arms: Sequence[Variant]) -> NoiseFloor:
    """Compute the noise floor from the trials that `compare` yields for the two variants of `arms_of`."""
    first, second = (runs_of(trials, arm.name) for arm in arms)
    figures = [figures_of(arm, trials) for arm in arms]
    objective = arms[0].scenario.objective
    own = {"capacity": "capacity", "latency": "p95"}.get(objective, "throughput")
    names = dict.fromkeys([own, "throughput", *shown_latencies(first.values())])
    floors = {name: _floor(block_pairs(first, second, figure_of(name))) for name in names}
    return NoiseFloor(
        floors={name: floor for name, floor in floors.items() if floor is not None},
        pairs=len(first.keys() & second.keys()),
        runs=len(first) + len(second),
        noisy=sum(half.noisy for half in figures),
        repeats=noise_repeats(trials),
        client_limited=any(half.client_limited for half in figures),
        failure=next((half.failure for half in figures if half.failure is not None), None),
        caveats=tuple({caveat.code: caveat for half in figures for caveat in half.caveats}.values()),
    )


def _floor(pairs: list[tuple[float, float]]) -> Floor | None:
    ratio = ratio_estimate(pairs)
    if ratio is None:
        return None
    spread = spread_about_zero(log_ratios(pairs))
    blocks_shown = (6, 10, 20)
    smallest = {blocks: math.expm1(detectable_shift(blocks) * spread.value) for blocks in blocks_shown}
    return Floor(spread=spread, ratio=ratio, smallest=smallest)
