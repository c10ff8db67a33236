"""Comparisons from the first block to the answer, on a fake server and a fake clock; the turns of a duet."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchtune.cli.commands.compare import _exit_code
from batchtune.errors import UsageError
from batchtune.measure.caveats import caveat
from batchtune.report.comparison import (
    comparison_facts,
    comparison_text,
    pace_text,
    pair_sentence,
    print_comparison,
    small_print,
    speed_text,
    variant_line,
)
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.compare.blocks import (
    DUET_S,
    PAIRS_MIN,
    TURN_S,
    Variant,
    chosen_variants,
    compare,
    comparison_seconds,
    duet_plan,
    leaves_duration_open,
    probed_pace,
    probed_paces,
    request_cost,
    run_seconds,
)
from batchtune.tune.compare.result import Comparison, arms_of, noise_floor, summarise
from batchtune.tune.loader import REPEATS_MAX
from batchtune.tune.trials.pace import RUN_BATCHES, Pace
from batchtune.tune.trials.trial import FinishedTrial, Trial
from batchtune.units import rounded_duration
from tests.check.check_fakes import measurement
from tests.check.check_fakes import trial as run_of
from tests.tune.tune_fakes import (
    FakeClock,
    FakeFleet,
    FakeTarget,
    Law,
    asked,
    bench_of,
    exactly,
    planted,
    scenario_of,
)

OFF = {"enable_batching": False}
BATCHED = {"max_batch_size": 16, "batch_timeout_micros": 0, "num_batch_threads": 1}


def variant_scenario(**changes: Any) -> Scenario:
    given = scenario_of().model_dump(by_alias=True, exclude={"search"}, exclude_none=True)
    return Scenario.model_validate({**given, **changes}, by_alias=True)


def variants_of(fixed: dict[str, dict[str, Any]] | None = None, **changes: Any) -> list[Variant]:
    """By name what each has fixed, all else alike; with batching and without it."""
    fixed = fixed or {"off": OFF, "on": BATCHED}
    return chosen_variants({name: variant_scenario(fixed=own, **changes) for name, own in fixed.items()})


class Laboratory:
    """Fake benches for the variants, a server each for those whose targets differ."""

    def __init__(self, law: Law | None = None, **target: Any) -> None:
        self.clock = FakeClock()
        self.law = law or Law(noise=0.01)
        self.target_changes = target
        self.fleets: dict[str, FakeFleet] = {}

    def bench_of(self, variant: Variant) -> Bench:
        if variant.server_key not in self.fleets:
            target = FakeTarget(self.clock, law=self.law, **self.target_changes)
            self.fleets[variant.server_key] = FakeFleet(target, seed=len(self.fleets) + 1)
        fleet = self.fleets[variant.server_key]
        return bench_of(variant.scenario, fleet._target, fleet)

    def jobs(self) -> list[Any]:
        return [job.arrivals for fleet in self.fleets.values() for job in fleet.jobs]

    def trials(self, variants: list[Variant], **options: Any) -> list[Trial]:
        return [one.trial for one in compare(variants, bench_of=self.bench_of, **options)]


def run(
    variants: list[Variant] | None = None, *, blocks: int, law: Law | None = None, **target: Any
) -> tuple[list[Trial], Comparison]:
    variants = variants or variants_of()
    found = Laboratory(law, **target).trials(variants, blocks=blocks)
    return found, summarise(found, variants)


def test_each_block_runs_every_variant_once_under_one_seed_and_the_next_mirrors_it():
    trials, _ = run(
        variants_of({"off": OFF, "on": BATCHED, "two": {**BATCHED, "num_batch_threads": 2}}), blocks=4
    )
    assert [trial.number for trial in trials] == list(range(1, 13))
    blocks = [[trial for trial in trials if trial.block == block] for block in (1, 2, 3, 4)]
    orders = [[trial.reason for trial in block] for block in blocks]
    assert all(sorted(order) == ["off", "on", "two"] for order in orders)
    assert [orders[1], orders[3]] == [orders[0][::-1], orders[2][::-1]]
    seeds = [{trial.seed for trial in block} for block in blocks]
    assert [len(one) for one in seeds] == [1] * 4
    assert len(set.union(*seeds)) == 4
    assert {trial.source for trial in trials} == {"variant"}


def test_batching_that_helps_is_told_with_its_factor_and_interval():
    _, found = run(blocks=8)
    (pair,) = found.pairs
    named = (pair.baseline, pair.variant, pair.outcome, pair.metric)
    assert named == ("off", "on", "different", "throughput")
    _, quiet = run(blocks=1, law=Law())
    assert pair.ratio.low <= quiet.pairs[0].ratio.value <= pair.ratio.high
    assert pair.ratio.half_width_ratio < 0.03
    assert pair_sentence(pair).startswith(f"on: ×{pair.ratio.value:.3g} [")
    assert pair_sentence(pair).endswith("] throughput")
    assert [answer.helps for answer in found.answers] == ["yes"]
    document = json.loads(json.dumps(quiet.to_dict(), allow_nan=False))
    assert document["pairs"][0]["ratio"]["high"] == "inf"
    assert [one["name"] for one in document["variants"]] == ["off", "on"]
    helps, by_how_much, *_ = comparison_facts(found)
    assert (helps.headline, helps.lines[0]) == ("Yes", "gRPC, requests of 1 row")
    assert by_how_much.headline.startswith("×")


def test_a_configuration_does_not_differ_from_itself():
    one = variant_scenario(fixed=BATCHED)
    _, found = run([Variant(name=name, scenario=one) for name in ("A", "B")], blocks=10)
    (pair,) = found.pairs
    assert pair.outcome == "not distinguishable"
    assert pair.ratio.low <= 1.0 <= pair.ratio.high
    assert pair_sentence(pair).startswith("B: not distinguishable, ×")
    assert not found.answers


def test_a_slower_server_of_five_percent_is_found_by_ten_blocks():
    laboratory = Laboratory()
    slower = variant_scenario(fixed=BATCHED, target={"model": "slower"})
    variants = chosen_variants({"base": variant_scenario(fixed=BATCHED), "slower": slower})
    laboratory.bench_of(variants[0])
    laboratory.law = Law(fixed_s=0.0009 * 1.05, per_row_s=0.0004 * 1.05, noise=0.01)
    (pair,) = summarise(laboratory.trials(variants, blocks=10), variants).pairs
    assert len(laboratory.fleets) == 2
    assert pair.outcome == "different"
    assert pair.ratio.low <= 1 / 1.05 <= pair.ratio.high


def test_variants_that_differ_only_in_batching_share_a_server():
    laboratory = Laboratory()
    flagged = {**BATCHED, "rest_api_num_threads": 2}
    laboratory.trials(variants_of({"off": OFF, "on": BATCHED, "flagged": flagged}), blocks=1)
    assert len(laboratory.fleets) == 2


def test_too_few_blocks_claim_nothing_and_call_no_variant_best():
    few = variants_of({"four": {**BATCHED, "max_batch_size": 4}, "more": BATCHED})
    _, found = run(few, blocks=3)
    (pair,) = found.pairs
    assert (pair.outcome, pair.ratio.high) == ("not distinguishable", math.inf)
    assert "3 blocks, and an interval needs 6 (×" in pair_sentence(pair)
    best, _, sure, _ = comparison_facts(found)
    assert (best.headline, sure.headline) == ("Not decided", "Not decided")
    assert best.lines[-1] == "Let at least 6 blocks end (--blocks)."


@pytest.mark.parametrize(
    ("metric", "value", "worse"), [("p95", 1.86, True), ("p95", 0.5, False), ("throughput", 0.5, True)]
)
def test_a_ratio_for_the_worse_is_called_so(metric: Any, value: float, worse: bool) -> None:
    _, found = run(blocks=2)
    pair = replace(found.pairs[0], metric=metric, ratio=exactly(value))
    _, by_how_much, *_ = comparison_facts(replace(found, pairs=(pair,), answers=()))
    assert by_how_much.headline.endswith(" (worse)") == worse


def test_a_variant_that_fails_is_left_out_and_the_others_go_on():
    huge = {**BATCHED, "max_batch_size": 64}
    trials, found = run(
        variants_of({"off": OFF, "on": BATCHED, "huge": huge}),
        blocks=6,
        refuses=lambda one: "out of memory" if one.in_force("max_batch_size") == 64 else None,
    )
    assert Counter(trial.reason for trial in trials) == {"off": 6, "on": 6, "huge": 2}
    assert {trial.block for trial in trials if trial.reason == "huge"} == {1}
    by_name = {pair.variant: pair for pair in found.pairs}
    assert (by_name["on"].outcome, by_name["huge"].outcome) == ("different", "not measured")
    failure = found.figures("huge").failure
    assert pair_sentence(by_name["huge"], failure=failure) == "huge: not measured: out of memory"


def test_one_variant_left_has_nothing_to_be_compared_with():
    trials, _ = run(blocks=6, refuses=lambda one: None if one.batching is None else "no")
    assert Counter(trial.reason for trial in trials) == {"off": 1, "on": 2}


def test_a_variant_that_fails_once_is_tried_again_and_stays():
    deaths = iter(["killed by a neighbour"])
    trials, found = run(blocks=6, refuses=lambda one: None if one.batching is None else next(deaths, None))
    assert [trial.state for trial in trials if trial.reason == "on"] == ["failed", *["complete"] * 6]
    assert (found.figures("on").failure, found.figures("on").runs) == (None, 6)
    assert found.pairs[0].blocks == 6


def run_on(
    disturbed: Callable[[int], bool],
    *,
    blocks: int,
    failed: Container[int] = (),
    gain: Callable[[int], float] = lambda _: 1.0,
) -> tuple[list[Trial], list[tuple[Variant, Plan, int]], Comparison]:
    """On a host that disturbs the trials of these numbers, of a server that dies under those of others."""

    def play(plan: Plan) -> FinishedTrial:
        failure = "the server died" if plan.number in failed else None
        batches = plan.request.configuration.batching is not None
        throughput = 100.0 * (gain(plan.request.block or 0) if batches else 1.0)
        notes = (caveat("host_steal", steal_ratio=0.1),) if disturbed(plan.number) else ()
        trial = planted(plan.number, throughput=throughput, p95_s=0.01, failure=failure, caveats=notes)
        return FinishedTrial(trial=replace(trial, request=plan.request), samples=None)

    bench: Any = SimpleNamespace(run=play)
    turns: list[tuple[Variant, Plan, int]] = []
    done = compare(
        variants_of(), blocks=blocks, bench_of=lambda _one: bench, on_turn=lambda *turn: turns.append(turn)
    )
    trials = [one.trial for one in done]
    return trials, turns, summarise(trials, variants_of())


QUIET = (6, 0, False, None)


@pytest.mark.parametrize(
    ("disturbed", "failed", "blocks", "attempts", "counts", "figures"),
    [
        # the last attempt counts
        ({2}, (), 6, [1, 1, 2], (1, 13), [QUIET, QUIET]),
        # one trial is repeated twice at most
        (range(6), (), 6, [1, 2, 1 + REPEATS_MAX, 1, 2], (4, 16), [(6, 1, False, None), QUIET]),
        # on a host that is always noisy repeats end
        (range(99), (), 6, [1, 2, 3, 1, 2, 3, 1, 2, 3, 1], (6, 18), [(6, 6, True, None)] * 2),
        # a retry of a failed trial is no repeat for noise
        ({2}, {1, 6}, 6, [1, 2, 3, 1, 1, 1, 2], (1, 15), [QUIET, QUIET]),
        # a variant that fails twice but not in a row stays
        ({2}, {1, 3}, 6, [1, 2, 3, 4, 1], (1, 15), [QUIET, QUIET]),
        # a complete run counts when its repeat fails
        ({1}, {2, 3}, 2, [1, 2, 3], (1, 4), [(1, 1, True, "the server died"), (1, 0, False, None)]),
        # one quiet run is enough for a variant to count
        ({1, *range(4, 99)}, (), 2, [1, 2, 1], (2, 6), [(2, 1, False, None)] * 2),
    ],
)
def test_noisy_trials_are_repeated_and_failed_ones_tried_again(
    disturbed: Container[int], failed: Container[int], blocks: int, attempts: Any, counts: Any, figures: Any
) -> None:
    """Its figures, by variant: runs that count, how many of these are noisy, whether all were, why it failed."""
    trials, turns, found = run_on(disturbed.__contains__, blocks=blocks, failed=failed)
    assert [attempt for *_, attempt in turns][: len(attempts)] == attempts
    assert (
        (found.repeats, found.trials) == (noise_floor(trials, variants_of()).repeats, len(trials)) == counts
    )
    shown = [(one.runs, one.noisy, one.disturbed, one.failure) for one in found.variants]
    assert (shown, found.pairs[0].blocks) == (figures, min(one.runs for one in found.variants))


def test_a_comparison_whose_runs_were_all_disturbed_is_called_invalid_everywhere(capsys, tmp_path):
    _, _, found = run_on(lambda _number: True, blocks=6)
    assert (found.pairs[0].outcome, found.answers[0].helps) == ("host-disturbed", "host-disturbed")
    for comparison in (found, replace(found, answers=())):
        _, how_much, sure, _ = comparison_facts(comparison)
        assert (how_much.headline, sure.headline) == ("Not known", "Invalid: disturbed by the host")
        assert "The host disturbed every run of off and of on, also when it was repeated." in sure.lines
        print_comparison(comparison, path=tmp_path)
        printed = capsys.readouterr().out
        assert "on: invalid: disturbed by the host" in printed
        assert "measurabl" not in printed
        assert "×" not in printed


@pytest.mark.parametrize(
    ("gains", "outcome", "advised"),
    [
        ([4.6, 4.1, 5.0, 4.4, 4.8, 4.5], "host-disturbed", True),
        ([4.6, 0.9, 5.0, 4.4, 4.8, 4.5], "host-disturbed", False),
        ([4.6, 4.1, 5.0, 4.4, 4.8, 4.5] * 2, "different", False),
        ([0.7, 0.5, 0.8, 0.6, 0.7, 0.6] * 2, "different", False),
        ([4.6, 4.1, 5.0, 4.4, 4.8, 0.9] * 2, "host-disturbed", False),
    ],
)
def test_on_a_host_that_disturbs_every_run_twelve_blocks_that_agree_tell_variants_apart(
    gains: list[float], outcome: str, advised: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Blocks are mirrored in pairs, so that twelve are six draws: 2 / 2^6 = 1 in 32."""
    _, _, found = run_on(lambda _number: True, blocks=len(gains), gain=lambda block: gains[block - 1])
    assert [pair.outcome for pair in found.pairs] == [outcome]
    told = outcome == "different"
    assert _exit_code(found, []) == (0 if told else 6)
    print_comparison(found, path=tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert ("on such a host 12 that do are enough (--blocks)" in printed) == advised
    assert ("on a quiet machine the factor may differ" in printed) == told
    assert ("The figures do not count" in printed) == ("invalid" in printed) == (not told)


def test_a_client_at_its_limit_makes_the_pair_invalid():
    busy = {"caveats": (caveat("client_busy", cpu_ratio=0.97),)}
    trials = [
        asked(planted(block, throughput=rps, p95_s=0.01, source="variant", block=block, **notes), reason=name)
        for block in range(1, 7)
        for name, rps, notes in (("off", 100.0, {}), ("on", 200.0, busy))
    ]
    found = summarise(trials, variants_of())
    assert [pair_sentence(pair) for pair in found.pairs] == ["on: invalid: client-limited"]
    assert found.pairs[0].outcome == "client-limited"
    assert comparison_facts(found)[0].headline == "Invalid: client-limited"


def test_rows_are_compared_where_requests_differ_in_rows():
    four = variant_scenario(fixed=BATCHED, request={"protocol": "grpc", "rows": 4})
    _, found = run(chosen_variants({"one": variant_scenario(fixed=BATCHED), "four": four}), blocks=6)
    (pair,) = found.pairs
    assert pair.metric == "rows"
    assert pair_sentence(pair).endswith("throughput in rows")
    assert found.figures("four").rows_per_request == pytest.approx(4.0)


def requests(count: int, duration: str) -> list[Variant]:
    load = {"arrivals": "closed", "concurrency": 16, "requests": count, "warm_up": "0s", "duration": duration}
    return variants_of(load=load)


@pytest.mark.parametrize(
    ("count", "duration", "wall_s"), [(400, "10s", 400 * 0.0013), (100_000, "500ms", None)]
)
def test_a_fixed_number_of_requests_has_a_wall_time_unless_its_duration_cuts_it(count, duration, wall_s):
    _, found = run(requests(count, duration), blocks=2, law=Law())
    off = found.figures("off")
    assert off.throughput_rps is not None
    assert (off.wall_s and off.wall_s.value) == (wall_s and pytest.approx(wall_s, rel=0.01))
    assert wall_s is None or off.requests == count


def test_answers_for_two_sizes_of_request_are_summed_up():
    scenarios = {
        f"{name}_{rows}": variant_scenario(fixed=fixed, request={"protocol": "grpc", "rows": rows})
        for rows in (1, 8)
        for name, fixed in (("off", OFF), ("on", BATCHED))
    }
    _, found = run(chosen_variants(scenarios), blocks=6, law=Law(fixed_s=0.0002, per_row_s=0.0004))
    assert [(one.rows_per_request, one.helps) for one in found.answers] == [(1.0, "yes"), (8.0, "hardly")]
    helps = comparison_facts(found)[0]
    assert helps.headline == "It depends"
    assert helps.lines == ("gRPC, requests of 1 row: it pays", "gRPC, requests of 8 rows: it hardly pays")


def test_a_line_for_each_trial_names_its_block_and_variant():
    (first, *_), _ = run(blocks=1)
    assert variant_line(first).startswith(f"block 1, {first.reason}, ")
    assert variant_line(first, again=True).startswith(f"block 1 again, {first.reason}, ")
    failed = asked(planted(1, failure="no memory"), reason="on", block=2)
    assert variant_line(failed) == "block 2, on: failed: no memory"


@pytest.mark.parametrize("names", [[], ["only"]])
def test_a_comparison_needs_two_variants(names):
    with pytest.raises(UsageError, match="needs two") as caught:
        chosen_variants({name: variant_scenario(fixed=OFF) for name in names})
    assert "variants:" in caught.value.hint


def test_the_baseline_may_be_named_and_comes_first():
    scenarios = {"off": variant_scenario(fixed=OFF), "on": variant_scenario(fixed=BATCHED)}
    assert [one.name for one in chosen_variants(scenarios, baseline="on")] == ["on", "off"]
    with pytest.raises(UsageError, match="no variant is called 'of'") as caught:
        chosen_variants(scenarios, baseline="of")
    assert caught.value.hint == "did you mean 'off'?"


LATENCY = {
    "load": {"arrivals": "poisson", "rate": "300/s", "warm_up": "100ms", "duration": "1s"},
    "objective": "latency",
}


def test_variants_of_different_objectives_are_refused():
    with pytest.raises(UsageError, match="their objectives differ"):
        chosen_variants({"a": variant_scenario(), "b": variant_scenario(**LATENCY)})


def test_latency_is_compared_where_it_is_the_objective():
    waits = {**BATCHED, "batch_timeout_micros": 20000}
    _, found = run(variants_of({"at_once": BATCHED, "waits": waits}, **LATENCY), blocks=6)
    (pair,) = found.pairs
    assert (pair.metric, pair.outcome) == ("p95", "different")
    assert pair.ratio.value > 2.0


def floor_of(noise: float, *, blocks: int) -> Any:
    arms = arms_of(variant_scenario(fixed=BATCHED))
    return noise_floor(Laboratory(Law(noise=noise)).trials(arms, blocks=blocks), arms)


def test_the_noise_floor_finds_the_spread_that_was_planted():
    """Each run has 1 % noise, so a difference of two has √2 %; 40 pairs estimate it to a quarter. Seed fixed."""
    found = floor_of(0.01, blocks=40)
    throughput = found.floors["throughput"]
    assert throughput.spread.low <= 0.01 * math.sqrt(2) <= throughput.spread.high
    assert (throughput.differs, found.pairs) == (False, 40)
    smallest = throughput.smallest
    assert smallest[6] > smallest[10] > smallest[20] > 0.0
    assert smallest[6] == pytest.approx(math.expm1(1.79 * throughput.spread.value), rel=0.05)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["figures"]["p95"]["smallest_change"]["6"] > 0


SLOW = Law(fixed_s=0.5, per_row_s=0.1, contention=0.0)
"""A batch of 16 takes 2.1 s."""


def slow_variants(**load: Any) -> list[Variant]:
    """Clients that fill batches of 16; loads without a duration, a warm-up or a time-out of their own."""
    given = scenario_of(load={"arrivals": "closed", "concurrency": 32, **load}, slo={})
    plain = given.model_dump(by_alias=True, exclude={"search"}, exclude_unset=True)
    fixed = {"off": OFF, "on": BATCHED}
    return chosen_variants(
        {name: Scenario.model_validate({**plain, "fixed": own}, by_alias=True) for name, own in fixed.items()}
    )


def test_runs_of_a_slow_model_hold_batches_enough_and_say_beforehand_how_long_they_take():
    """The 5 s of the scenario would hold two batches, and 10 s of patience lose the last."""
    variants = slow_variants()
    laboratory = Laboratory(SLOW)
    paces = probed_paces(variants, bench_of=laboratory.bench_of)
    assert paces["on"].batch_s(16) == pytest.approx(2.1, rel=0.05)
    assert paces["off"].lone_s == pytest.approx(0.6, rel=0.05)
    probed_s = laboratory.clock() - 1000.0
    assert probed_s < 30.0
    assert pace_text(variants[1], paces["on"]).startswith("on: a batch takes about 2.1 s, each run ")
    http = replace(variants[1].configuration, dialect="http")
    assert speed_text(http, paces["on"], batch_s=2.1) == "a lone request takes about 600 ms"
    trials = laboratory.trials(variants, blocks=1, paces=paces)
    on = next(trial.measurement for trial in trials if trial.reason == "on")
    assert on.window_s >= RUN_BATCHES * 2.0
    assert on.error_ratio == 0.0
    took_s = laboratory.clock() - 1000.0 - probed_s
    assert took_s == pytest.approx(comparison_seconds(variants, paces, blocks=1), rel=0.35)


def test_a_quick_model_is_probed_by_a_lone_client_only_and_its_runs_stay_as_long():
    variants = slow_variants()
    laboratory, once = Laboratory(Law()), Laboratory(Law())
    paces = probed_paces(variants, bench_of=laboratory.bench_of)
    assert [job.concurrency for job in laboratory.jobs()] == [1, 1]
    probed_paces(arms_of(variants[1].scenario), bench_of=once.bench_of)
    assert len(once.jobs()) == 1  # variants that differ in nothing
    lone = rounded_duration(paces["on"].lone_s)
    assert pace_text(variants[1], paces["on"]).startswith(f"on: a lone request takes about {lone}, each run ")
    assert comparison_seconds(variants, paces, blocks=2) == pytest.approx(24.0, rel=0.05)


def test_runs_of_a_number_of_requests_are_announced_by_the_rate_that_all_clients_got():
    """3 minutes are where they would end at the latest; 10 million requests take longer."""
    variants = slow_variants(requests=4000, duration="3m", warm_up="1s")
    laboratory = Laboratory(Law())
    paces = probed_paces(variants, bench_of=laboratory.bench_of)
    trials = laboratory.trials(variants, blocks=1, paces=paces)
    for variant, trial in zip(variants, sorted(trials, key=lambda trial: trial.reason), strict=True):
        took_s = 1.0 + trial.measurement.window_s
        assert run_seconds(variant, paces[variant.name]) == pytest.approx(took_s, rel=0.05)
    assert re.search(r", each run 6\.\d+ s$", pace_text(variants[0], paces["off"]))
    assert comparison_text(variants, paces, blocks=10).startswith("in total about 1 min 3")
    endless = slow_variants(requests=10**7, duration="4s", warm_up="1s")
    assert [run_seconds(one, paces[one.name]) for one in endless] == pytest.approx([5.0, 5.0], rel=0.05)


def test_runs_of_a_number_of_requests_take_as_long_as_they_may_at_most_where_no_rate_is_known():
    variants = slow_variants(requests=10_000, duration="3m", warm_up="1s")
    paces = {variant.name: Pace(lone_s=0.001) for variant in variants}
    assert pace_text(variants[0], paces["off"]).endswith(", each run at most 3 min 01 s")
    text = comparison_text(variants, paces, blocks=10)
    assert text == "in total at most 60 min 21 s, repeats on a noisy host left out"


def test_a_think_time_slows_the_announced_rate():
    variant = slow_variants(requests=4000, duration="3m", warm_up="0s", think_time="1s")[0]
    assert run_seconds(variant, Pace(lone_s=0.001, full_rps=500.0)) == pytest.approx(4032 / 32, rel=0.01)


def test_the_most_clients_of_a_range_fill_the_batch_that_is_probed():
    """A load test of 1 to 32 clients: by the lone one alone a batch of 16 would take 16 times as long."""
    variant = slow_variants(concurrency=1)[1]
    bench = Laboratory(SLOW).bench_of(variant)
    pace = probed_pace(bench, variant.scenario, variant.configuration, clients=32)
    assert pace.batch_s(16) == pytest.approx(2.1, rel=0.05)
    assert leaves_duration_open(variant.scenario)


def test_a_server_that_answers_no_lone_request_has_no_pace_and_the_loads_say_why():
    variants = slow_variants()
    laboratory = Laboratory(refuses=lambda _configuration: "cannot start")
    paces = probed_paces(variants, bench_of=laboratory.bench_of)
    assert pace_text(variants[0], paces["off"]) == "off: a lone request was not answered"
    trials = laboratory.trials(variants, blocks=1, paces=paces)
    assert {trial.failure for trial in trials} == {"cannot start"}


PADDING = "Length padding, of the elements computed: a 60 %, b 20 %; against a padding saved: 83.3 % (b)."
BUSY = "The device part of the model runs, of the time: a 55 %, b 100 %."


@pytest.mark.parametrize(
    ("name", "fixed", "is_shared", "figure", "values", "said"),
    [
        ("length_buckets", ("none", [32, 64]), True, "padding_per_element", (1.5, 0.25), PADDING),
        ("batching_stage", ("unit", "device"), False, "device_busy_ratio", (0.55, 1.002), BUSY),
    ],
)
def test_variants_that_differ_in_buckets_share_a_server_and_say_what_these_and_stages_change(
    name: str, fixed: Any, is_shared: bool, figure: str, values: Any, said: str
) -> None:
    one, two, padded = (
        Variant(name=variant, scenario=variant_scenario(fixed={**BATCHED, **own}))
        for variant, own in (("a", {name: fixed[0]}), ("b", {name: fixed[1]}), ("x", {"zero_padding": True}))
    )
    assert (one.server_key == two.server_key) == is_shared
    assert padded.server_key != one.server_key
    _, found = run([one, two], blocks=1)
    assert not any("adding" in line or "device part" in line for line in small_print(found))
    both = (replace(its, **{figure: value}) for its, value in zip(found.variants, values, strict=True))
    assert said in small_print(replace(found, variants=tuple(both)))


DUET = """\
name: duet
target: {model: ./model}
request: {protocol: grpc, rows: 1}
load: LOAD
objective: throughput
fixed: {max_batch_size: 8, batch_timeout_micros: 2000, num_batch_threads: 1}
"""
CLOSED = "{arrivals: closed, concurrency: 8, warm_up: 50ms, duration: 800ms, seed: 1}"


def duet_variants(load: str = CLOSED, **words: str) -> list[Variant]:
    text = DUET.replace("LOAD", load)
    if "rate" in load:
        text = text.replace("objective: throughput", "objective: latency")
    for word, replacement in words.items():
        text = text.replace(word, replacement)
    return [Variant(name=name, scenario=parse_scenario(text)) for name in ("main", "new")]


def duet_runs(*, p50_s: float = 0.006, p95_s: float = 0.008):
    latency_s = {"p50": exactly(p50_s), "p95": exactly(p95_s), "p99": exactly(1.0)}
    return [run_of(name, 1, measurement(latency_s=latency_s)) for name in ("main", "new")]


LONG, RARE = CLOSED.replace("800ms", "5s"), "{arrivals: poisson, rate: 100/s, duration: 5s, seed: 1}"


def test_turns_are_short_and_many():
    plan = duet_plan(duet_variants(), duet_runs(), block=1)
    assert plan.turn_ns == TURN_S * 1e9
    assert plan.gap_ns == pytest.approx(2e6 + 1.25 * 8e6)
    assert plan.pairs == int(DUET_S / (2 * (0.008 + 0.012)))
    assert all(sorted(plan.order[turn : turn + 2]) == [0, 1] for turn in range(0, len(plan.order), 2))
    assert duet_plan(duet_variants(), duet_runs(), block=2).order != plan.order


def test_the_clocks_are_read_when_a_batch_that_nobody_fills_has_been_answered():
    plan = duet_plan(duet_variants(LONG, **{"micros: 2000": "micros: 30000"}), duet_runs(), block=1)
    assert plan.gap_ns == pytest.approx(2e6 + 30e6 + 6e6)


@pytest.mark.parametrize(("load", "p50_s", "turn_s"), [(LONG, 0.02, 0.025), (RARE, 0.006, 0.08)])
def test_turns_hold_some_typical_latencies_and_requests(load, p50_s, turn_s):
    assert duet_plan(duet_variants(load), duet_runs(p50_s=p50_s), block=1).turn_ns == pytest.approx(
        1e9 * turn_s
    )


def test_a_duet_takes_no_longer_than_is_needed():
    longer = duet_variants(CLOSED.replace("800ms", "30s"))
    assert duet_plan(longer, duet_runs(), block=1).begins_ns[-1] <= DUET_S * 1e9
    assert duet_plan(longer, duet_runs(p50_s=0.2, p95_s=0.3), block=1).pairs == PAIRS_MIN


@pytest.mark.parametrize(
    ("load", "latencies"),
    [
        (CLOSED, {"p50_s": 0.2, "p95_s": 0.3}),
        (CLOSED, {"p95_s": math.inf}),
        (CLOSED.replace("800ms", "100ms"), {}),
        ("{arrivals: poisson, rate: 5/s, warm_up: 50ms, duration: 5s, seed: 1}", {}),
    ],
)
def test_where_too_few_pairs_fit_there_is_none(load, latencies):
    assert duet_plan(duet_variants(load), duet_runs(**latencies), block=1) is None


def test_without_runs_or_with_rates_of_their_own_there_is_none():
    assert duet_plan(duet_variants(), duet_runs()[:1], block=1) is None
    searched = {"objective: latency": "objective: capacity\nslo: {p95: 20ms}"}
    load = "{arrivals: poisson, rate: 500/s, warm_up: 50ms, duration: 800ms, seed: 1}"
    assert duet_plan(duet_variants(load, **searched), duet_runs(), block=1) is None


def test_the_cost_of_a_request_is_typical_of_the_pairs_one_that_strays_aside():
    pairs = [(1.0, 1.05)] * 9 + [(1.0, 40.0)]
    assert request_cost(pairs, planned=12) == pytest.approx((1.0, 1.05))
    assert request_cost(pairs[:5], planned=12) is None
    assert request_cost([], planned=12) is None
