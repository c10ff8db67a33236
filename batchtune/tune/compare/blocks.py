"""Runs the variants of a scenario in blocks, so that only what differs between them can make the difference.

Before the first block short probes measure the speed of the servers, by which the length of the loads is planned. Each
block runs every variant once, one after another and under one seed, in an order drawn at random and mirrored in the
next block (ABBA). A trial on a noisy host is repeated, and every attempt is archived. A variant that fails twice in a
row is left out from then on; the others go on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import count
from typing import Final

from batchtune.batching.parameters import LENGTH_BUCKETS, Configuration
from batchtune.errors import UsageError
from batchtune.load.duet import DuetPlan
from batchtune.measure.caveats import HOST_CODES
from batchtune.measure.quantiles import balanced_orders, hodges_lehmann, log_ratios
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import SEED_STRIDE, Plan, TrialBench
from batchtune.tune.loader import REPEATS_MAX
from batchtune.tune.one_capacity import CLIENTS_MAX, search_seconds
from batchtune.tune.trials.pace import (
    PROBE_WARM_UP_S,
    RUN_BATCHES,
    WARM_UP_BATCHES,
    Pace,
    clients_to_fill,
    pace_of,
    times_of,
)
from batchtune.tune.trials.trial import FinishedTrial, Source, Trial, TrialRequest

REPEATS_SHARE = 0.5
"""Most repeats for noise, as a share of the trials planned: on a host that is always noisy they gain nothing
(live_check.py --compare)."""


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
    on_turn: Callable[[Variant, Plan, int], None] = lambda _variant, _plan, _attempt: None,
    paces: Mapping[str, Pace] | None = None,
    first_block: int = 1,
    first_number: int = 1,
) -> Iterator[FinishedTrial]:
    """Run `blocks` blocks and yield each trial as it ends, repeats included; of a block the last complete trial of each
    variant counts.

    `bench_of`: called with the variant before each trial; may launch a server at the first call.
    `on_turn(variant, plan, attempt)`: called before each trial; its attempts in a block count from 1. `paces`: variant
    name -> pace, by which the length of loads is chosen; None: the scenario's times. `first_block`, `first_number`: the
    numbers at which blocks and trials start, after blocks that ran before; the random orders continue those blocks.
    Ends early when fewer than two variants still work.
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
                pace = (paces or {}).get(variant.name)
                plan = plan_of(variant, pace, block=block, number=number + 1)
                on_turn(variant, plan, attempt)
                done = bench_of(variant).run(plan)
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


def plan_of(variant: Variant, pace: Pace | None, *, block: int, number: int = 0) -> Plan:
    """Return the trial of a variant in a block; all trials of a block have one seed.

    `pace`: what is known of the speed of the variant's server, by which the length of the load is chosen; None: the
    scenario's length.
    """
    return Plan(
        number=number,
        seed=variant.scenario.load.seed + SEED_STRIDE * block,
        pace=pace,
        request=TrialRequest(
            configuration=variant.configuration,
            source="variant",
            reason=variant.name,
            block=block,
        ),
    )


# How fast the servers are, and how long that makes a comparison.


def probed_pace(
    bench: TrialBench, scenario: Scenario, configuration: Configuration, *, clients: int | None = None
) -> Pace:
    """Measure a server's pace by a lone client and, where batches may be slow or the scenario sends a fixed number of
    requests, by `clients` at once (None: those of the scenario's load, else enough to fill a batch).

    Where no request is answered, the returned pace is that of an unknown server: the loads that follow report why.
    """
    clients = (
        clients or scenario.load.concurrency or min(clients_to_fill(configuration, scenario), CLIENTS_MAX)
    )
    lone = bench.run(_plan(scenario, configuration, "probe", clients=1, duration_s=PROBE_WARM_UP_S))
    pace = pace_of([lone.trial], scenario)
    batch_s = times_of(pace, scenario, configuration, clients=clients).batch_s
    may_be_slow = configuration.batching is not None and RUN_BATCHES * batch_s > scenario.load.duration_s
    if not may_be_slow and (not _counts_requests(scenario) or math.isnan(pace.lone_s)):
        return pace
    long_s = max(PROBE_WARM_UP_S, WARM_UP_BATCHES * pace.lone_s)
    full = bench.run(_plan(scenario, configuration, "calibration", clients=clients, duration_s=long_s))
    pace = pace_of([lone.trial, full.trial], scenario)
    measured = full.trial.measurement
    return pace if measured is None else replace(pace, full_rps=measured.throughput_rps.value)


def leaves_duration_open(scenario: Scenario) -> bool:
    """Whether the scenario's file sets neither the duration of a load nor its number of requests."""
    return "duration_s" not in scenario.load.model_fields_set and scenario.load.requests is None


def probed_paces(
    variants: Sequence[Variant], *, bench_of: Callable[[Variant], TrialBench]
) -> dict[str, Pace]:
    """Measure the pace of each variant's server; return variant name -> pace.

    Variants that differ only in their name are measured once. A server of several models is not measured: its pace is
    that of an unknown server, and its loads last as long as the scenario says.
    """
    by_scenario: dict[str, Pace] = {}
    for variant in variants:
        key = variant.scenario.model_dump_json()
        if variant.scenario.target.models:
            by_scenario[key] = Pace()
        elif key not in by_scenario:
            by_scenario[key] = probed_pace(bench_of(variant), variant.scenario, variant.configuration)
    return {variant.name: by_scenario[variant.scenario.model_dump_json()] for variant in variants}


def comparison_seconds(variants: Sequence[Variant], paces: Mapping[str, Pace], *, blocks: int) -> float:
    """Compute the seconds that `blocks` blocks take, without repeats; `paces`: variant name -> pace."""
    return blocks * sum(run_seconds(variant, paces[variant.name]) for variant in variants)


def run_seconds(variant: Variant, pace: Pace) -> float:
    """Compute the seconds that one run of a variant takes; an upper bound where `is_most` returns True.

    A run that searches a capacity may end sooner; a run of a fixed number of requests ends at the scenario's duration
    at the latest.
    """
    scenario, configuration = variant.scenario, variant.configuration
    if scenario.target.models:
        return scenario.load.warm_up_s + scenario.load.duration_s
    if scenario.objective == "capacity":
        return search_seconds(scenario, configuration, pace)
    times = times_of(pace, scenario, configuration)
    load = scenario.load
    if load.requests is None:
        return times.run_s
    if is_most(variant, pace):
        return load.warm_up_s + load.duration_s + times.turn_s
    clients = load.concurrency or 1
    rate_rps = min(pace.full_rps, clients / (load.think_time_s + pace.lone_s))
    return load.warm_up_s + clients / rate_rps + min(load.requests / rate_rps, load.duration_s)


def is_most(variant: Variant, pace: Pace) -> bool:
    """Whether `run_seconds` is an upper bound, and a run of the variant may end long before it."""
    if variant.scenario.objective == "capacity":
        return not variant.scenario.target.models
    return _counts_requests(variant.scenario) and not pace.full_rps > 0.0


def _counts_requests(scenario: Scenario) -> bool:
    return scenario.load.requests is not None and scenario.objective != "capacity"


def _plan(
    scenario: Scenario, configuration: Configuration, source: Source, *, clients: int, duration_s: float
) -> Plan:
    """Plan a short closed loop for a server of unknown speed."""
    return Plan(
        number=0,
        seed=scenario.load.seed,
        pace=Pace(),
        request=TrialRequest(
            configuration=configuration,
            source=source,
            reason="how fast the server is",
            concurrency=clients,
            duration_s=duration_s,
        ),
    )


# The duet of a block: two servers loaded in short turns (load.duet).

TURN_S: Final = 0.008
"""Shortest turn of a duet (`load.duet`): the ratio of a pair varies as much for turns of 4 as of 200 ms, so that many
short ones yield the narrowest interval (tests/benchmarks/check/duet.py)."""


PAIRS_MIN: Final = 8
"""Least pairs of turns in a duet: fewer yield a wider interval than two runs one after another (duet.py)."""

DUET_S: Final = 3.5
"""Length of a duet: its mean ratio then has a standard deviation of about 2 % (duet.py)."""


def duet_plan(variants: Sequence[Variant], trials: Sequence[Trial], *, block: int) -> DuetPlan | None:
    """Plan the duet of a block: two servers loaded in short turns, to compare the CPU time that a request costs.

    `variants`: the two variants. `trials`: their runs, whose latencies decide how long turns must be. None: the time of
    two runs is too short for PAIRS_MIN pairs of turns, nothing was measured, or the objective is capacity.
    """
    both_s = sum(variant.scenario.load.duration_s for variant in variants)
    typical_s, late_s = (_latency_s(variants, trials, name) for name in ("p50", "p95"))
    if any(variant.scenario.objective == "capacity" for variant in variants) or not math.isfinite(late_s):
        return None
    # In a turn each client sends twice: of one volley a request costs up to a quarter more than in a run, which
    # hides as much of a change. As long is waited for the last answers of a turn, or for a batch that nobody fills
    # (duet.py).
    longer = 1.25
    turn_s = max(TURN_S, longer * typical_s, *(_filled_s(variant.scenario) for variant in variants))
    gap_rest_s = 0.002  # for what the server does behind its last answer (duet.py)
    gap_s = gap_rest_s + max(longer * late_s, typical_s + max(map(_open_s, variants)))
    pair_s = 2.0 * (turn_s + gap_s)
    if both_s < PAIRS_MIN * pair_s:
        return None
    pairs = max(PAIRS_MIN, int(DUET_S / pair_s))
    orders = balanced_orders((0, 1), blocks=pairs, seed=variants[0].scenario.load.seed + block)
    return DuetPlan(
        turn_ns=round(turn_s * 1e9),
        gap_ns=round(gap_s * 1e9),
        order=tuple(server for order in orders for server in order),
    )


def request_cost(pairs: Sequence[tuple[float, float]], *, planned: int) -> tuple[float, float] | None:
    """Compute (first, second), the CPU seconds that a request costs each server; None: more than half of the `planned`
    pairs of turns have no ratio.

    `pairs`: (first, second) of each pair of turns, CPU seconds per request. The first result is the median; the second
    is the first times the Hodges-Lehmann estimate of the pairs' ratio.
    """
    ratios = log_ratios(pairs)
    if 2 * len(ratios) < planned:
        return None
    before_s = statistics.median(before for before, _ in pairs)
    return before_s, before_s * math.exp(hodges_lehmann(ratios).value)


def _latency_s(variants: Sequence[Variant], trials: Sequence[Trial], quantile: str) -> float:
    """A latency quantile of the slower variant in seconds, the median over its runs; inf: a variant has none."""
    by_variant = [
        [
            trial.measurement.latency_s[quantile].value
            for trial in trials
            if trial.reason == variant.name and trial.measurement is not None
        ]
        for variant in variants
    ]
    return max(statistics.median(values) if values else math.inf for values in by_variant)


def _filled_s(scenario: Scenario) -> float:
    """Seconds in which an open loop sends eight requests, the fewest of a turn; 0 for a closed loop."""
    rate_rps = scenario.load.rate_rps
    return 8.0 / rate_rps if scenario.load.open_loop and rate_rps else 0.0


def _open_s(variant: Variant) -> float:
    """The variant's batch timeout in seconds; 0 without batching."""
    configuration = variant.configuration
    return (
        0.0
        if configuration.batching is None
        else (configuration.in_force("batch_timeout_micros") or 0.0) / 1e6
    )
