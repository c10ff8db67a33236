"""Runs the variants of a scenario so that only what varies can make the difference.

In blocks: each runs every variant once, side by side and under one seed, in an order drawn at random and mirrored in
the next block (ABBA). A trial on a noisy host is repeated, and every attempt is kept. A variant that fails twice in a
row is left out from then on; the others go on.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import count, pairwise
from typing import Literal

from batchtune.batching.length_buckets import LENGTH_BUCKETS
from batchtune.batching.parameters import Configuration
from batchtune.errors import UsageError
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.measurement import Measurement, padding_per_element
from batchtune.measure.quantiles import Estimate, balanced_orders, typical
from batchtune.measure.validity.caveats import HOST_CODES
from batchtune.plain_values import Coded
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import SEED_STRIDE, Plan, TrialBench
from batchtune.tune.evidence.best_point import rows_per_request, usual_bottleneck
from batchtune.tune.loader import REPEATS_MAX
from batchtune.tune.trials.pace import Pace
from batchtune.tune.trials.trial import FinishedTrial, Trial, TrialRequest, parts_of

# What does one variant of a comparison show over its blocks, and what limits it?

QUANTILES = ("p50", "p95", "p99")

Metric = Literal["throughput", "rows", "p95", "capacity"]
"""What is compared: requests/s, rows/s (where rows per request differ), p95 in seconds, capacity in requests/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFigures:
    """One variant over its blocks: each figure is typical of a run, its interval from the spread between blocks.

    `requests` is the fixed number that `wall_s` is the time of; None: the runs were bounded by time. `noisy` counts
    the runs among `runs` that the host disturbed after all repeats. `failure` is why it was left out; None: it was not.
    `padding_per_element`: what filled up shorter inputs, for each element sent; None: all have one length.
    `device_busy_ratio`: the share of the time in which the device part of the model ran; None: not told.
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
        """Whether the load generator, not the server, limited the variant's figures."""
        return self.bottleneck is not None and self.bottleneck.kind == "client"

    @property
    def disturbed(self) -> bool:
        """Whether the host disturbed every run of the variant that counts."""
        return 0 < self.runs == self.noisy


def figures_of(variant: Variant, trials: Sequence[Trial]) -> VariantFigures:
    """Sum up the trials of one variant, failed ones included."""
    runs = runs_of(trials, variant.name)
    counted = list(runs.values())
    measured = [trial.measurement for trial in counted if trial.measurement is not None]
    rows = [count for count in map(rows_per_request, measured) if count is not None]
    batches = [run.server.mean_batch_rows for run in measured if run.server is not None]
    servers = [run.server for run in measured if run.server is not None]
    busy = [server.device_busy_ratio for server in servers]
    known_busy = [ratio for ratio in busy if ratio is not None]
    known_batches = [mean_rows for mean_rows in batches if mean_rows is not None]
    requests = variant.scenario.load.requests
    complete = requests is not None and all(run.requests == requests for run in measured)
    last = next((trial for trial in reversed(parts_of(trials)) if trial.reason == variant.name), None)
    latencies = {name: _typical_latency(map(latency_of(name), counted)) for name in QUANTILES}
    return VariantFigures(
        name=variant.name,
        protocol=variant.scenario.request.protocol,
        rows_per_request=sum(rows) / len(rows) if rows else None,
        configuration=variant.configuration,
        runs=len(counted),
        noisy=sum(is_noisy(trial) for trial in counted),
        requests=requests if complete else None,
        wall_s=typical(run.window_s for run in measured) if complete else None,
        throughput_rps=typical(map(figure_of("throughput"), counted)),
        throughput_rows_per_s=typical(map(figure_of("rows"), counted)),
        latency_s={name: latency for name, latency in latencies.items() if latency is not None},
        mean_batch_rows=sum(known_batches) / len(known_batches) if known_batches else None,
        error_ratio=sum(run.error_ratio for run in measured) / len(measured) if measured else 0.0,
        bottleneck=usual_bottleneck(variant.configuration, measured, scenario=variant.scenario),
        caveats=_caveats(measured),
        failure=None if last is None else last.failure,
        padding_per_element=padding_per_element(run.server for run in measured),
        device_busy_ratio=sum(known_busy) / len(known_busy) if known_busy else None,
    )


def runs_of(trials: Sequence[Trial], name: str) -> dict[int, Trial]:
    """Return the trial that counts in each block: the variant's last complete attempt."""
    return {
        trial.block: trial
        for trial in parts_of(trials)
        if trial.reason == name
        and trial.block is not None
        and trial.state == "complete"
        and trial.measurement is not None
    }


def noise_repeats(trials: Sequence[Trial]) -> int:
    """Count the attempts made because the host had disturbed the one before."""
    return sum(
        (before.reason, before.block) == (after.reason, after.block)
        and before.state == "complete"
        and is_noisy(before)
        for before, after in pairwise(sorted(parts_of(trials), key=lambda trial: trial.reason))
    )


def figure_of(metric: Metric) -> Callable[[Trial], float]:
    """Return the figure of a run that a metric compares; NaN without one."""

    def value(trial: Trial) -> float:
        measured = trial.measurement
        if measured is None:
            return math.nan
        match metric:
            case "throughput":
                return measured.throughput_rps.value
            case "rows":
                return measured.throughput_rows_per_s.value
            case "p95":
                return measured.latency_s["p95"].value
            case "capacity":
                return math.nan if trial.objective is None else trial.objective.value

    return value


def latency_of(quantile: str) -> Callable[[Trial], float]:
    """Return one latency quantile of a run, in seconds."""

    def value(trial: Trial) -> float:
        return math.nan if trial.measurement is None else trial.measurement.latency_s[quantile].value

    return value


def _typical_latency(values: Iterable[float]) -> Estimate | None:
    """As `typical`; with infinite ones among them, of runs with too many errors, the plain median."""
    known = [seconds for seconds in values if not math.isnan(seconds)]
    if all(map(math.isfinite, known)):
        return typical(known)
    return Estimate(value=statistics.median(known), low=math.nan, high=math.nan)


def _caveats(measured: Sequence[Measurement]) -> tuple[Coded, ...]:
    """One of each kind, as the last run has it, where most runs have it; noise of the host is counted apart."""
    counts = Counter(code for run in measured for code in {caveat.code for caveat in run.caveats})
    latest = {caveat.code: caveat for run in measured for caveat in run.caveats}
    return tuple(
        caveat
        for code, caveat in latest.items()
        if 2 * counts[code] > len(measured) and code not in HOST_CODES
    )


REPEATS_SHARE = 0.5
"""Repeats end when so many, per trial planned, were made: that host is always noisy, and repeating buys nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One arm of a comparison: a scenario of its own, under the name that its trials carry as their reason.

    `model` is which of several models it is the part of; "": it is whole.
    """

    name: str
    scenario: Scenario
    model: str = ""

    @property
    def configuration(self) -> Configuration:
        """Configuration of the variant, with the parameters that are a model's own, where several have some."""
        return self.scenario.with_models(self.scenario.configuration())

    @property
    def server_key(self) -> str:
        """Key that is equal for variants which one server can serve: they differ at most in what it takes while it
        runs, or by commands."""
        target = self.scenario.target.model_dump_json(exclude={"found"})
        given = () if self.scenario.target.kind == "command" else self.configuration.server_flags.items()
        flags = [item for item in given if item[0] != LENGTH_BUCKETS]
        return f"{target} {flags}"

    def arms(self) -> list[Variant]:
        """The variant itself; of several models the part of each, `VARIANT/MODEL`, at its stated load."""
        if not self.scenario.target.models:
            return [self]
        batches = self.configuration.batching is not None
        scenarios = self.scenario.of_models()
        arms = []
        for own in self.scenario.target.models:
            fixed = {**self.scenario.fixed, **(own.batching if batches else {})}
            part = scenarios[own.name].model_copy(update={"fixed": fixed})
            arms.append(replace(self, name=f"{self.name}/{own.name}", scenario=part, model=own.name))
        return arms


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The trial that is about to run: `attempt` counts from 1, `block` too."""

    variant: Variant
    block: int
    attempt: int
    number: int


def chosen_variants(scenarios: Mapping[str, Scenario], *, baseline: str | None = None) -> list[Variant]:
    """Return the variants with the baseline first: the one named, else the first of the file.

    Raises:
        UsageError: fewer than two, a baseline that is none of them, or variants with different objectives or models.
    """
    if len(scenarios) < 2:
        known = f"only {next(iter(scenarios))!r}" if scenarios else "none"
        raise UsageError(
            f"variants: a comparison needs two; there is {known}",
            hint="add: variants: {without: {fixed: {enable_batching: false}}, with: {fixed: {max_batch_size: 32}}}",
        )
    if baseline is not None and baseline not in scenarios:
        near = get_close_matches(baseline, scenarios, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(scenarios)}"
        raise UsageError(f"--baseline: no variant is called {baseline!r}", hint=hint)
    objectives = {name: scenario.objective for name, scenario in scenarios.items()}
    if len(set(objectives.values())) > 1:
        asked = ", ".join(f"{name}: {objective}" for name, objective in objectives.items())
        raise UsageError(f"variants: their objectives differ ({asked})", hint="compare under one objective")
    served = {
        name: ", ".join(sorted(own.name for own in scenario.target.models))
        for name, scenario in scenarios.items()
    }
    if len(set(served.values())) > 1:
        listed = "; ".join(f"{name}: {models or 'one'}" for name, models in served.items())
        raise UsageError(f"variants: their target.models differ ({listed})", hint="serve the same in each")
    first = baseline or next(iter(scenarios))
    names = [first, *(name for name in scenarios if name != first)]
    return [Variant(name=name, scenario=scenarios[name]) for name in names]


def paired_arms(before: Variant, after: Variant) -> list[tuple[Variant, Variant]]:
    """Return the pairs of arms to compare of two variants: those of the same model."""
    by_model = {arm.model: arm for arm in after.arms()}
    return [(arm, by_model[arm.model]) for arm in before.arms()]


def compare(
    variants: Sequence[Variant],
    *,
    blocks: int,
    bench_of: Callable[[Variant], TrialBench],
    on_turn: Callable[[Turn], None] = lambda _turn: None,
    paces: Mapping[str, Pace] | None = None,
    first_block: int = 1,
    first_number: int = 1,
) -> Iterator[FinishedTrial]:
    """Run the blocks, yielding each trial as it ends, repeats included: the last complete attempt counts.

    `bench_of` is asked before every trial and may launch a server on first use; only the variant that runs is under
    load. `paces`, by the variants' names, say how long loads must last; without them the scenario's own times hold.
    Blocks and trials are counted from `first_block` and `first_number`: those before were run, and these go on with
    their orders. Ends early when fewer than two variants still work.
    """
    working = {variant.name for variant in variants}
    repeats_left = int(REPEATS_SHARE * blocks * len(variants))
    number = first_number - 1
    orders = balanced_orders(variants, blocks=first_block - 1 + blocks, seed=variants[0].scenario.load.seed)
    # A variant that fails is tried again so often in its block: a server may die of what has nothing to do with
    # it.
    retries = 1
    for block, order in enumerate(orders[first_block - 1 :], start=first_block):
        if len(working) < min(2, len(variants)):
            return
        for variant in order:
            if variant.name not in working:
                continue
            failures = 0
            for attempt in count(1):
                turn = Turn(variant=variant, block=block, attempt=attempt, number=number + 1)
                on_turn(turn)
                done = bench_of(variant).run(plan_of(turn, (paces or {}).get(variant.name)))
                number = done.trial.last_number
                yield done
                if done.trial.state == "failed":
                    failures += 1
                    if failures <= retries:
                        continue
                    working.discard(variant.name)
                    break
                failures = 0
                if not is_noisy(done.trial) or attempt > REPEATS_MAX or not repeats_left:
                    break
                repeats_left -= 1


def is_noisy(trial: Trial) -> bool:
    """Whether the host disturbed a trial."""
    return any(
        caveat.code in HOST_CODES for measured in trial.measurements.values() for caveat in measured.caveats
    )


def plan_of(turn: Turn, pace: Pace | None) -> Plan:
    """Return the trial to run in a turn; all of a block have the seed of the block."""
    return Plan(
        number=turn.number,
        seed=turn.variant.scenario.load.seed + SEED_STRIDE * turn.block,
        pace=pace,
        request=TrialRequest(
            configuration=turn.variant.configuration,
            source="variant",
            reason=turn.variant.name,
            block=turn.block,
        ),
    )
