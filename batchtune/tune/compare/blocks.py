"""Runs the variants of a scenario in blocks, so that only what differs between them can make the difference.

Each block runs every variant once, one after another and under one seed, in an order drawn at random and mirrored in
the next block (ABBA). A trial on a noisy host is repeated, and every attempt is archived. A variant that fails twice in
a row is left out from then on; the others go on.
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

from batchtune.batching.parameters import LENGTH_BUCKETS, Configuration
from batchtune.errors import UsageError
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.caveats import HOST_CODES
from batchtune.measure.measurement import Measurement, padding_per_element
from batchtune.measure.quantiles import SHOWN, Estimate, balanced_orders, typical
from batchtune.plain_values import Coded
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import SEED_STRIDE, Plan, TrialBench
from batchtune.tune.evidence.best_point import rows_per_request, usual_bottleneck
from batchtune.tune.loader import REPEATS_MAX
from batchtune.tune.trials.pace import Pace
from batchtune.tune.trials.trial import FinishedTrial, Trial, TrialRequest, parts_of

# What does one variant of a comparison show over its blocks, and what limits it?

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
    latencies = {name: _typical_latency(map(latency_of(name), counted)) for name in shown_latencies(counted)}
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


def figure_of(metric: Metric) -> Callable[[Trial], float]:
    """Return a function that takes a trial and returns its figure for `metric`; NaN where it was not measured."""

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
    """Return a function that takes a trial and returns its latency at `quantile`, a name such as `p95` or `ttft_p50`,
    in seconds; NaN where not measured."""

    def value(trial: Trial) -> float:
        known = None if trial.measurement is None else trial.measurement.latency_s.get(quantile)
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


REPEATS_SHARE = 0.5
"""Most repeats for noise, as a share of the trials planned: on a host that is always noisy they gain nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One of the compared scenarios; `name` is also the `reason` of its trials.

    `model`: with several models in the server, the model of which this is the part; "": the whole variant.
    """

    name: str
    scenario: Scenario
    model: str = ""

    @property
    def configuration(self) -> Configuration:
        """Configuration of the variant; with several models it holds the batching parameters of each."""
        return self.scenario.with_models(self.scenario.configuration())

    @property
    def server_key(self) -> str:
        """Text that is equal for variants which one launched server can serve, because they differ at most in
        parameters that can be changed while the server runs, or by the user's own commands."""
        target = self.scenario.target.model_dump_json(exclude={"found"})
        given = () if self.scenario.target.kind == "command" else self.configuration.server_flags.items()
        flags = [item for item in given if item[0] != LENGTH_BUCKETS]
        return f"{target} {flags}"

    def arms(self) -> list[Variant]:
        """Return [the variant itself]; with several models, the part of each model, named `VARIANT/MODEL`, under the
        model's stated load."""
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
    """The trial that is about to run: its variant, the number of its block, its attempt in this block, its own number;
    all from 1."""

    variant: Variant
    block: int
    attempt: int
    number: int


def chosen_variants(scenarios: Mapping[str, Scenario], *, baseline: str | None = None) -> list[Variant]:
    """Return the variants with the baseline first: the variant called `baseline`; None: the first of the file.
    `scenarios`: name of a variant -> its scenario.

    Raises:
        UsageError: fewer than two variants, no variant called `baseline`, or variants with different objectives or
            models.
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
    """Return [(before, after)], the two variants to compare; with several models, one pair of their parts for each
    model."""
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
    """Run `blocks` blocks and yield each trial as it ends, repeats included; of a block the last complete trial of each
    variant counts.

    `bench_of`: called with the variant before each trial; may launch a server at the first call.
    `on_turn`: called before each trial. `paces`: variant name -> pace, by which the length of loads is chosen; None:
    the scenario's times. `first_block`, `first_number`: the numbers at which blocks and trials start, after blocks that
    ran before; the random orders continue those blocks. Ends early when fewer than two variants still work.
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
    """Whether a trial has a caveat about noise of the host."""
    return any(
        caveat.code in HOST_CODES for measured in trial.measurements.values() for caveat in measured.caveats
    )


def plan_of(turn: Turn, pace: Pace | None) -> Plan:
    """Return the trial to run for a turn: its number, configuration and seed; all trials of a block have one seed.

    `pace`: what is known of the speed of the variant's server, by which the length of the load is chosen; None: the
    scenario's length.
    """
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
