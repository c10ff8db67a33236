"""How are the variants of a scenario run, so that only what varies can make the difference?

In blocks: each runs every variant once, side by side and under one seed, in an order drawn at random and mirrored in
the next block (ABBA). A trial on a noisy host is repeated, and every attempt is kept. A variant that fails twice in a
row is left out from then on; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import count

from batchtune.batching.length_buckets import LENGTH_BUCKETS
from batchtune.batching.parameters import Configuration
from batchtune.errors import UsageError
from batchtune.measure.statistics.paired import balanced_orders
from batchtune.measure.validity.caveats import HOST_CODES
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import SEED_STRIDE, Plan, TrialBench
from batchtune.tune.loader import REPEATS_MAX
from batchtune.tune.trials.pace import Pace
from batchtune.tune.trials.trial import FinishedTrial, Trial, TrialRequest

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
        """With the parameters that are a model's own, where several have some."""
        return self.scenario.with_models(self.scenario.configuration({}))

    @property
    def server_key(self) -> str:
        """Equal for variants that one server can serve: they differ at most in what it takes hot, or by commands."""
        target = self.scenario.target.model_dump_json(exclude={"found"})
        given = () if self.scenario.target.kind == "command" else self.configuration.server_flags.items()
        flags = [item for item in given if item[0] != LENGTH_BUCKETS]
        return f"{target} {flags}"

    def arms(self) -> list[Variant]:
        """Itself; of several models the part of each, `VARIANT/MODEL`, at its stated load."""
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
    """The variants with the baseline first: the one named, else the first of the file.

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
    """Which of both are compared with each other: those of the same model."""
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
    """Whether the host disturbed it."""
    return any(
        caveat.code in HOST_CODES for measured in trial.measurements.values() for caveat in measured.caveats
    )


def plan_of(turn: Turn, pace: Pace | None) -> Plan:
    """The trial of a turn; all of a block have the seed of the block."""
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
