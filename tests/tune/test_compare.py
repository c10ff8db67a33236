"""Comparisons from the first block to the answer, on a fake server and a fake clock."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchtune.batching.parameters import Configuration
from batchtune.cli.commands.compare import _exit_code
from batchtune.errors import UsageError
from batchtune.measure.caveats import caveat
from batchtune.measure.quantiles import Estimate
from batchtune.report.comparison import (
    comparison_facts,
    comparison_text,
    noise_lines,
    pace_text,
    pair_sentence,
    print_comparison,
    small_print,
    speed_text,
    variant_line,
)
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.compare.blocks import (
    Variant,
    chosen_variants,
    compare,
    comparison_seconds,
    leaves_duration_open,
    probed_pace,
    probed_paces,
    run_seconds,
)
from batchtune.tune.compare.result import Comparison, arms_of, noise_floor, summarise
from batchtune.tune.loader import REPEATS_MAX
from batchtune.tune.trials.pace import RUN_BATCHES, Pace
from batchtune.tune.trials.trial import FinishedTrial, Trial
from batchtune.units import rounded_duration
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, asked, planted, scenario_of

OFF = {"enable_batching": False}
BATCHED = {"max_batch_size": 16, "batch_timeout_micros": 0, "num_batch_threads": 1}


def variant_scenario(**changes: Any) -> Scenario:
    given = scenario_of().model_dump(by_alias=True, exclude={"search"}, exclude_none=True)
    return Scenario.model_validate({**given, **changes}, by_alias=True)


def scenarios(**fixed: dict[str, Any]) -> dict[str, Scenario]:
    return {name: variant_scenario(fixed=values) for name, values in fixed.items()}


class Laboratory:
    """Fake benches for the variants, a server each for those whose targets differ."""

    def __init__(self, law: Law | None = None, **target: Any) -> None:
        self.clock = FakeClock()
        self.law = law or Law(noise=0.01)
        self.target_changes = target
        self.servers: dict[str, FakeTarget] = {}
        self.fleets: dict[str, FakeFleet] = {}

    def bench_of(self, variant: Variant) -> Bench:
        if variant.server_key not in self.servers:
            target = FakeTarget(self.clock, law=self.law, **self.target_changes)
            self.servers[variant.server_key] = target
            self.fleets[variant.server_key] = FakeFleet(target, seed=len(self.servers))
        return Bench(
            variant.scenario,
            self.servers[variant.server_key],
            self.fleets[variant.server_key],
            on_live=lambda _plan, _live: None,
            now_s=self.clock,
            sleep=self.clock.sleep,
        )


def run(
    variants: list[Variant], *, blocks: int, law: Law | None = None, **target: Any
) -> tuple[list[Trial], Comparison]:
    laboratory = Laboratory(law, **target)
    found = [one.trial for one in compare(variants, blocks=blocks, bench_of=laboratory.bench_of)]
    return found, summarise(found, variants)


def test_each_block_runs_every_variant_once_under_one_seed_and_the_next_mirrors_it():
    variants = chosen_variants(scenarios(off=OFF, on=BATCHED, two={**BATCHED, "num_batch_threads": 2}))
    trials, _ = run(variants, blocks=4)
    assert [trial.number for trial in trials] == list(range(1, 13))
    blocks = [[trial for trial in trials if trial.block == block] for block in (1, 2, 3, 4)]
    orders = [[trial.reason for trial in block] for block in blocks]
    assert all(sorted(order) == ["off", "on", "two"] for order in orders)
    assert orders[1] == orders[0][::-1]
    assert orders[3] == orders[2][::-1]
    seeds = [{trial.seed for trial in block} for block in blocks]
    assert all(len(one) == 1 for one in seeds)
    assert len(set.union(*seeds)) == 4
    assert {trial.source for trial in trials} == {"variant"}


def test_batching_that_helps_is_told_with_its_factor_and_interval():
    variants = chosen_variants(scenarios(off=OFF, on=BATCHED))
    _, found = run(variants, blocks=8)
    (pair,) = found.pairs
    assert (pair.baseline, pair.variant, pair.outcome, pair.metric) == (
        "off",
        "on",
        "different",
        "throughput",
    )
    _, quiet = run(variants, blocks=1, law=Law())
    assert pair.ratio.low <= quiet.pairs[0].ratio.value <= pair.ratio.high
    assert pair.ratio.half_width_ratio < 0.03
    assert pair_sentence(pair).startswith(f"on: ×{pair.ratio.value:.3g} [")
    assert pair_sentence(pair).endswith("] throughput")
    (answer,) = found.answers
    assert answer.helps == "yes"
    helps, by_how_much, *_ = comparison_facts(found)
    assert (helps.headline, helps.lines[0]) == ("Yes", "gRPC, requests of 1 row")
    assert by_how_much.headline.startswith("×")


def test_a_configuration_does_not_differ_from_itself():
    variants = [Variant(name=name, scenario=scenarios(one=BATCHED)["one"]) for name in ("A", "B")]
    _, found = run(variants, blocks=10)
    (pair,) = found.pairs
    assert pair.outcome == "not distinguishable"
    assert pair.ratio.low <= 1.0 <= pair.ratio.high
    assert pair_sentence(pair).startswith("B: not distinguishable, ×")
    assert not found.answers


def test_a_slower_server_of_five_percent_is_found_by_ten_blocks():
    slower = Law(fixed_s=0.0009 * 1.05, per_row_s=0.0004 * 1.05, noise=0.01)
    laboratory = Laboratory()
    variants = chosen_variants(
        {
            "base": variant_scenario(fixed=BATCHED),
            "slower": variant_scenario(fixed=BATCHED, target={"model": "slower"}),
        }
    )
    laboratory.bench_of(variants[0])
    laboratory.law = slower
    trials = [one.trial for one in compare(variants, blocks=10, bench_of=laboratory.bench_of)]
    assert len(laboratory.servers) == 2
    (pair,) = summarise(trials, variants).pairs
    assert pair.outcome == "different"
    assert pair.ratio.low <= 1 / 1.05 <= pair.ratio.high


def test_variants_that_differ_only_in_batching_share_a_server():
    variants = chosen_variants(scenarios(off=OFF, on=BATCHED, flagged={**BATCHED, "rest_api_num_threads": 2}))
    laboratory = Laboratory()
    for _ in compare(variants, blocks=1, bench_of=laboratory.bench_of):
        pass
    assert len(laboratory.servers) == 2


def test_too_few_blocks_claim_nothing():
    _, found = run(chosen_variants(scenarios(off=OFF, on=BATCHED)), blocks=3)
    (pair,) = found.pairs
    assert pair.outcome == "not distinguishable"
    assert math.isinf(pair.ratio.high)
    assert "3 blocks, and an interval needs 6 (×" in pair_sentence(pair)


def test_with_too_few_blocks_no_variant_is_called_best():
    few = scenarios(four={**BATCHED, "max_batch_size": 4}, more=BATCHED)
    _, found = run(chosen_variants(few), blocks=2)
    best, _, sure, _ = comparison_facts(found)
    assert (best.headline, sure.headline) == ("Not decided", "Not decided")
    assert best.lines[-1] == "Let at least 6 blocks end (--blocks)."


@pytest.mark.parametrize(
    ("metric", "value", "worse"), [("p95", 1.86, True), ("p95", 0.5, False), ("throughput", 0.5, True)]
)
def test_a_ratio_for_the_worse_is_called_so(metric: Any, value: float, worse: bool) -> None:
    _, found = run(chosen_variants(scenarios(off=OFF, on=BATCHED)), blocks=2)
    ratio = Estimate(value=value, low=value, high=value)
    pair = replace(found.pairs[0], metric=metric, ratio=ratio)
    _, by_how_much, *_ = comparison_facts(replace(found, pairs=(pair,), answers=()))
    assert by_how_much.headline.endswith(" (worse)") == worse


def test_a_variant_that_fails_is_left_out_and_the_others_go_on():
    def refuses(configuration: Configuration) -> str | None:
        batching = configuration.batching
        return "out of memory" if batching is not None and batching.max_batch_size == 64 else None

    variants = chosen_variants(scenarios(off=OFF, on=BATCHED, huge={**BATCHED, "max_batch_size": 64}))
    trials, found = run(variants, blocks=6, refuses=refuses)
    assert Counter(trial.reason for trial in trials) == {"off": 6, "on": 6, "huge": 2}
    assert {trial.block for trial in trials if trial.reason == "huge"} == {1}
    by_name = {pair.variant: pair for pair in found.pairs}
    assert by_name["on"].outcome == "different"
    assert by_name["huge"].outcome == "not measured"
    failure = found.figures("huge").failure
    assert failure == "out of memory"
    assert pair_sentence(by_name["huge"], failure=failure) == "huge: not measured: out of memory"


def test_one_variant_left_has_nothing_to_be_compared_with():
    trials, _ = run(
        chosen_variants(scenarios(off=OFF, on=BATCHED)),
        blocks=6,
        refuses=lambda one: None if one.batching is None else "no",
    )
    assert Counter(trial.reason for trial in trials) == {"off": 1, "on": 2}


def test_a_variant_that_fails_once_is_tried_again_and_stays():
    deaths = iter(["killed by a neighbour"])

    def refuses(configuration: Configuration) -> str | None:
        return None if configuration.batching is None else next(deaths, None)

    trials, found = run(chosen_variants(scenarios(off=OFF, on=BATCHED)), blocks=6, refuses=refuses)
    assert [trial.state for trial in trials if trial.reason == "on"] == ["failed", *["complete"] * 6]
    assert found.figures("on").failure is None
    assert found.figures("on").runs == 6
    assert found.pairs[0].blocks == 6


def noisy(trial: Trial) -> Trial:
    assert trial.measurement is not None
    disturbed = replace(trial.measurement, caveats=(caveat("host_steal", steal_ratio=0.1),))
    return replace(trial, measurement=disturbed)


class NoisyBench:
    """A bench whose host disturbs the trials of these numbers, and whose server dies under those of others."""

    def __init__(
        self,
        disturbed: Callable[[int], bool],
        failed: Container[int] = (),
        gain: Callable[[int], float] = lambda _: 1.0,
    ) -> None:
        self._disturbed = disturbed
        self._failed = failed
        self._gain = gain

    def run(self, plan: Any) -> FinishedTrial:
        failure = "the server died" if plan.number in self._failed else None
        batches = plan.request.configuration.batching is not None
        throughput = 100.0 * (self._gain(plan.request.block) if batches else 1.0)
        trial = replace(
            planted(plan.number, throughput=throughput, p95_s=0.01, failure=failure), request=plan.request
        )
        return FinishedTrial(trial=noisy(trial) if self._disturbed(plan.number) else trial, samples=None)


def run_on(
    disturbed: Callable[[int], bool],
    *,
    blocks: int,
    failed: Container[int] = (),
    gain: Callable[[int], float] = lambda _: 1.0,
) -> tuple[list[Trial], list[tuple[Variant, Plan, int]], Comparison]:
    variants = chosen_variants(scenarios(off=OFF, on=BATCHED))
    turns: list[tuple[Variant, Plan, int]] = []
    bench: Any = NoisyBench(disturbed, failed, gain)
    done = compare(
        variants, blocks=blocks, bench_of=lambda _one: bench, on_turn=lambda *turn: turns.append(turn)
    )
    trials = [one.trial for one in done]
    return trials, turns, summarise(trials, variants)


def test_a_noisy_trial_is_repeated_and_counted_and_the_last_attempt_counts():
    trials, turns, found = run_on(lambda number: number == 2, blocks=6)
    assert len(trials) == 13
    assert [(plan.request.block, attempt) for _, plan, attempt in turns][:3] == [(1, 1), (1, 1), (1, 2)]
    assert turns[1][0] == turns[2][0]
    assert (found.repeats, found.trials) == (1, 13)
    assert sum(one.noisy for one in found.variants) == 0


def test_one_trial_is_repeated_twice_at_most():
    trials, turns, found = run_on(lambda number: number <= 5, blocks=6)
    assert [attempt for *_, attempt in turns][:5] == [1, 2, 1 + REPEATS_MAX, 1, 2]
    assert not any(one.disturbed for one in found.variants)
    assert found.repeats == 4
    assert sum(one.noisy for one in found.variants) == 1
    assert len(trials) == 16


def test_on_a_host_that_is_always_noisy_repeats_end():
    trials, _, found = run_on(lambda _number: True, blocks=6)
    assert found.repeats == 6
    assert len(trials) == 18
    assert sum(one.noisy for one in found.variants) == 12
    assert all(one.disturbed for one in found.variants)


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


def test_a_retry_of_a_failed_trial_is_no_repeat_for_noise():
    trials, _, found = run_on(lambda number: number == 2, blocks=6, failed={1, 6})
    assert [trial.state for trial in trials][:3] == ["failed", "complete", "complete"]
    assert (found.repeats, found.trials) == (1, 15)
    assert noise_floor(trials, chosen_variants(scenarios(off=OFF, on=BATCHED))).repeats == 1


def test_a_variant_that_fails_twice_but_not_in_a_row_stays():
    _, turns, found = run_on(lambda number: number == 2, blocks=6, failed={1, 3})
    assert [attempt for *_, attempt in turns][:5] == [1, 2, 3, 4, 1]
    assert [one.runs for one in found.variants] == [6, 6]
    assert not any(one.failure for one in found.variants)


def test_a_complete_run_counts_when_its_repeat_fails():
    _, turns, found = run_on(lambda number: number == 1, blocks=2, failed={2, 3})
    disturbed = found.figures(turns[0][0].name)
    assert (disturbed.runs, disturbed.noisy, disturbed.failure) == (1, 1, "the server died")
    assert found.pairs[0].blocks == 1


def test_one_quiet_run_is_enough_for_a_variant_to_count():
    _, _, found = run_on(lambda number: number not in (2, 3), blocks=2)
    assert sorted((one.runs, one.noisy, one.disturbed) for one in found.variants) == [
        (2, 1, False),
        (2, 1, False),
    ]


def test_a_client_at_its_limit_makes_the_pair_invalid():
    variants = chosen_variants(scenarios(off=OFF, on=BATCHED))
    trials = []
    for block in range(1, 7):
        for name, throughput in (("off", 100.0), ("on", 200.0)):
            trial = planted(len(trials) + 1, throughput=throughput, p95_s=0.01, source="variant", block=block)
            assert trial.measurement is not None
            busy = replace(trial.measurement, caveats=(caveat("client_busy", cpu_ratio=0.97),))
            trials.append(
                replace(asked(trial, reason=name), measurement=busy if name == "on" else trial.measurement)
            )
    found = summarise(trials, variants)
    (pair,) = found.pairs
    assert pair.outcome == "client-limited"
    assert pair_sentence(pair) == "on: invalid: client-limited"
    assert comparison_facts(found)[0].headline == "Invalid: client-limited"


def test_rows_are_compared_where_requests_differ_in_rows():
    variants = chosen_variants(
        {
            "one": variant_scenario(fixed=BATCHED),
            "four": variant_scenario(fixed=BATCHED, request={"protocol": "grpc", "rows": 4}),
        }
    )
    _, found = run(variants, blocks=6)
    (pair,) = found.pairs
    assert pair.metric == "rows"
    assert pair_sentence(pair).endswith("throughput in rows")
    assert found.figures("four").rows_per_request == pytest.approx(4.0)


def test_a_fixed_number_of_requests_has_a_wall_time(capsys):
    load = {"arrivals": "closed", "concurrency": 16, "requests": 400, "warm_up": "100ms", "duration": "10s"}
    variants = chosen_variants(
        {"off": variant_scenario(load=load, fixed=OFF), "on": variant_scenario(load=load, fixed=BATCHED)}
    )
    _, found = run(variants, blocks=6, law=Law())
    assert found.figures("off").requests == 400
    assert found.figures("off").wall_s.value == pytest.approx(400 * 0.0013, rel=0.01)
    print_comparison(found, path=Path("results/x"))
    text = capsys.readouterr().out
    assert "wall time s" in text
    assert "Wall time: from the first of 400 requests to the last answer." in text
    assert "With no batching: off.\nWith max_batch_size=" in text


def test_a_run_cut_short_by_its_duration_has_no_wall_time():
    load = {
        "arrivals": "closed",
        "concurrency": 16,
        "requests": 100_000,
        "warm_up": "0s",
        "duration": "500ms",
    }
    variants = chosen_variants(
        {"off": variant_scenario(load=load, fixed=OFF), "on": variant_scenario(load=load, fixed=BATCHED)}
    )
    _, found = run(variants, blocks=2)
    assert found.figures("off").wall_s is None
    assert found.figures("off").throughput_rps is not None


def test_answers_for_two_sizes_of_request_are_summed_up():
    law = Law(fixed_s=0.0002, per_row_s=0.0004)
    rows = {"protocol": "grpc", "rows": 8}
    variants = chosen_variants(
        {
            "off_1": variant_scenario(fixed=OFF),
            "on_1": variant_scenario(fixed=BATCHED),
            "off_8": variant_scenario(fixed=OFF, request=rows),
            "on_8": variant_scenario(fixed=BATCHED, request=rows),
        }
    )
    _, found = run(variants, blocks=6, law=law)
    assert [(one.rows_per_request, one.helps) for one in found.answers] == [(1.0, "yes"), (8.0, "hardly")]
    helps = comparison_facts(found)[0]
    assert helps.headline == "It depends"
    assert helps.lines == ("gRPC, requests of 1 row: it pays", "gRPC, requests of 8 rows: it hardly pays")


def test_everything_survives_json():
    _, found = run(chosen_variants(scenarios(off=OFF, on=BATCHED)), blocks=2)
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["pairs"][0]["ratio"]["high"] == "inf"
    assert [one["name"] for one in document["variants"]] == ["off", "on"]


def test_a_line_for_each_trial_names_its_block_and_variant():
    trials, _ = run(chosen_variants(scenarios(off=OFF, on=BATCHED)), blocks=1)
    assert variant_line(trials[0]).startswith(f"block 1, {trials[0].reason}, ")
    assert variant_line(trials[0], again=True).startswith(f"block 1 again, {trials[0].reason}, ")
    failed = asked(planted(1, throughput=1.0, p95_s=1.0, failure="no memory"), reason="on", block=2)
    assert variant_line(failed) == "block 2, on: failed: no memory"


@pytest.mark.parametrize("names", [[], ["only"]])
def test_a_comparison_needs_two_variants(names):
    with pytest.raises(UsageError, match="needs two") as caught:
        chosen_variants({name: variant_scenario(fixed=OFF) for name in names})
    assert "variants:" in caught.value.hint


def test_the_baseline_may_be_named_and_comes_first():
    found = chosen_variants(scenarios(off=OFF, on=BATCHED), baseline="on")
    assert [one.name for one in found] == ["on", "off"]
    with pytest.raises(UsageError, match="no variant is called 'of'") as caught:
        chosen_variants(scenarios(off=OFF, on=BATCHED), baseline="of")
    assert caught.value.hint == "did you mean 'off'?"


def test_variants_of_different_objectives_are_refused():
    load = {"arrivals": "poisson", "rate": "100/s", "duration": "1s"}
    mixed = {
        "a": variant_scenario(fixed=OFF),
        "b": variant_scenario(load=load, objective="latency", fixed=OFF),
    }
    with pytest.raises(UsageError, match="their objectives differ"):
        chosen_variants(mixed)


def test_latency_is_compared_where_it_is_the_objective():
    load = {"arrivals": "poisson", "rate": "300/s", "warm_up": "100ms", "duration": "1s"}
    variants = chosen_variants(
        {
            name: variant_scenario(load=load, objective="latency", fixed=values)
            for name, values in {
                "at_once": BATCHED,
                "waits": {**BATCHED, "batch_timeout_micros": 20000},
            }.items()
        }
    )
    _, found = run(variants, blocks=6)
    (pair,) = found.pairs
    assert (pair.metric, pair.outcome) == ("p95", "different")
    assert pair.ratio.value > 2.0


def floor_of(noise: float, *, blocks: int) -> Any:
    arms = arms_of(variant_scenario(fixed=BATCHED))
    laboratory = Laboratory(Law(noise=noise))
    trials = [one.trial for one in compare(arms, blocks=blocks, bench_of=laboratory.bench_of)]
    return noise_floor(trials, arms)


def test_the_noise_floor_finds_the_spread_that_was_planted():
    """Each run has 1 % noise, so a difference of two has √2 %; 40 pairs estimate it to a quarter. Seed fixed."""
    found = floor_of(0.01, blocks=40)
    throughput = found.floors["throughput"]
    assert throughput.spread.low <= 0.01 * math.sqrt(2) <= throughput.spread.high
    assert not throughput.differs
    assert found.pairs == 40
    smallest = throughput.smallest
    assert smallest[6] > smallest[10] > smallest[20] > 0.0
    assert smallest[6] == pytest.approx(math.expm1(1.79 * throughput.spread.value), rel=0.05)
    assert (
        json.loads(json.dumps(found.to_dict(), allow_nan=False))["figures"]["p95"]["smallest_change"]["6"] > 0
    )


def test_the_noise_floor_is_told_in_plain_words():
    found = floor_of(0.01, blocks=6)
    line = noise_lines(found)[0]
    assert line.startswith(
        "The smallest change of throughput that `batchtune compare` detects here in 4 of 5 comparisons: "
    )
    assert line.endswith("% with 20 blocks.")


def slow_scenarios(**load: Any) -> dict[str, Scenario]:
    """Clients that fill batches of 16; loads without a duration, a warm-up or a time-out of their own."""
    given = scenario_of(load={"arrivals": "closed", "concurrency": 32, **load}, slo={}).model_dump(
        by_alias=True, exclude={"search"}, exclude_unset=True
    )
    return {
        name: Scenario.model_validate({**given, "fixed": values}, by_alias=True)
        for name, values in {"off": OFF, "on": BATCHED}.items()
    }


def test_runs_of_a_slow_model_hold_batches_enough_and_say_beforehand_how_long_they_take():
    """A batch of 16 takes 2.1 s: the 5 s of the scenario would hold two, and 10 s of patience lose the last."""
    variants = chosen_variants(slow_scenarios())
    laboratory = Laboratory(Law(fixed_s=0.5, per_row_s=0.1, contention=0.0))
    paces = probed_paces(variants, bench_of=laboratory.bench_of)
    assert paces["on"].batch_s(16) == pytest.approx(2.1, rel=0.05)
    assert paces["off"].lone_s == pytest.approx(0.6, rel=0.05)
    probed_s = laboratory.clock() - 1000.0
    assert probed_s < 30.0
    text = pace_text(variants[1], paces["on"])
    assert text.startswith("on: a batch takes about 2.1 s, each run ")
    http = replace(variants[1].configuration, dialect="http")
    assert speed_text(http, paces["on"], batch_s=2.1) == "a lone request takes about 600 ms"
    trials = [done.trial for done in compare(variants, blocks=1, bench_of=laboratory.bench_of, paces=paces)]
    on = next(trial.measurement for trial in trials if trial.reason == "on")
    assert on.window_s >= RUN_BATCHES * 2.0
    assert on.error_ratio == 0.0
    took_s = laboratory.clock() - 1000.0 - probed_s
    assert took_s == pytest.approx(comparison_seconds(variants, paces, blocks=1), rel=0.35)


def test_times_that_the_scenario_sets_stay_whatever_the_pace():
    variants = chosen_variants(slow_scenarios(duration="4s", warm_up="1s"))
    laboratory = Laboratory(Law(fixed_s=0.5, per_row_s=0.1, contention=0.0))
    paces = probed_paces(variants, bench_of=laboratory.bench_of)
    list(compare(variants, blocks=1, bench_of=laboratory.bench_of, paces=paces))
    jobs = [job for fleet in laboratory.fleets.values() for job in fleet.jobs]
    assert [job.arrivals.duration_s for job in jobs[-2:]] == [5.0, 5.0]


def test_a_quick_model_is_probed_by_a_lone_client_only_and_its_runs_stay_as_long():
    variants = chosen_variants(slow_scenarios())
    laboratory = Laboratory(Law())
    paces = probed_paces(variants, bench_of=laboratory.bench_of)
    jobs = [job for fleet in laboratory.fleets.values() for job in fleet.jobs]
    assert [job.arrivals.concurrency for job in jobs] == [1, 1]
    lone = rounded_duration(paces["on"].lone_s)
    assert pace_text(variants[1], paces["on"]).startswith(f"on: a lone request takes about {lone}, each run ")
    assert comparison_seconds(variants, paces, blocks=2) == pytest.approx(24.0, rel=0.05)


def test_runs_of_a_number_of_requests_are_announced_by_the_rate_that_all_clients_got():
    """3 minutes are where they would end at the latest; 10 million requests take longer."""
    variants = chosen_variants(slow_scenarios(requests=4000, duration="3m", warm_up="1s"))
    laboratory = Laboratory(Law())
    paces = probed_paces(variants, bench_of=laboratory.bench_of)
    trials = [done.trial for done in compare(variants, blocks=1, bench_of=laboratory.bench_of, paces=paces)]
    for variant, trial in zip(variants, sorted(trials, key=lambda trial: trial.reason), strict=True):
        took_s = 1.0 + trial.measurement.window_s
        assert run_seconds(variant, paces[variant.name]) == pytest.approx(took_s, rel=0.05)
    assert re.search(r", each run 6\.\d+ s$", pace_text(variants[0], paces["off"]))
    assert comparison_text(variants, paces, blocks=10).startswith("in total about 1 min 3")
    endless = chosen_variants(slow_scenarios(requests=10**7, duration="4s", warm_up="1s"))
    assert [run_seconds(one, paces[one.name]) for one in endless] == pytest.approx([5.0, 5.0], rel=0.05)


def test_runs_of_a_number_of_requests_take_as_long_as_they_may_at_most_where_no_rate_is_known():
    variants = chosen_variants(slow_scenarios(requests=10_000, duration="3m", warm_up="1s"))
    paces = {variant.name: Pace(lone_s=0.001) for variant in variants}
    assert pace_text(variants[0], paces["off"]).endswith(", each run at most 3 min 01 s")
    text = comparison_text(variants, paces, blocks=10)
    assert text == "in total at most 60 min 21 s, repeats on a noisy host left out"


def test_a_think_time_slows_the_announced_rate():
    variant = chosen_variants(slow_scenarios(requests=4000, duration="3m", warm_up="0s", think_time="1s"))[0]
    pace = Pace(lone_s=0.001, full_rps=500.0)
    assert run_seconds(variant, pace) == pytest.approx((4000 + 32) / 32, rel=0.01)


def test_variants_that_differ_in_nothing_are_probed_once():
    arms = arms_of(slow_scenarios()["on"])
    laboratory = Laboratory(Law())
    paces = probed_paces(arms, bench_of=laboratory.bench_of)
    assert len(paces) == 2
    assert sum(len(fleet.jobs) for fleet in laboratory.fleets.values()) == 1


def test_the_most_clients_of_a_range_fill_the_batch_that_is_probed():
    """A load test of 1 to 32 clients: by the lone one alone a batch of 16 would take 16 times as long."""
    variant = chosen_variants(slow_scenarios(concurrency=1))[1]
    laboratory = Laboratory(Law(fixed_s=0.5, per_row_s=0.1, contention=0.0))
    bench = laboratory.bench_of(variant)
    pace = probed_pace(bench, variant.scenario, variant.configuration, clients=32)
    assert pace.batch_s(16) == pytest.approx(2.1, rel=0.05)
    assert leaves_duration_open(variant.scenario)


def test_a_server_that_answers_no_lone_request_has_no_pace_and_the_loads_say_why():
    variants = chosen_variants(slow_scenarios())
    laboratory = Laboratory(refuses=lambda _configuration: "cannot start")
    paces = probed_paces(variants, bench_of=laboratory.bench_of)
    assert pace_text(variants[0], paces["off"]) == "off: a lone request was not answered"
    trials = list(compare(variants, blocks=1, bench_of=laboratory.bench_of, paces=paces))
    assert {done.trial.failure for done in trials} == {"cannot start"}


def test_variants_that_differ_in_length_buckets_share_a_server_and_say_what_padding_they_save():
    one, two = (
        Variant(name=name, scenario=variant_scenario(fixed={**BATCHED, "length_buckets": value}))
        for name, value in (("one_queue", "none"), ("buckets", [32, 64]))
    )
    assert one.server_key == two.server_key
    assert Variant(
        name="x", scenario=variant_scenario(fixed={**BATCHED, "zero_padding": True})
    ).server_key != (one.server_key)
    _, found = run([one, two], blocks=1)
    assert not any("adding" in line for line in small_print(found))
    first, second = found.variants
    padded = replace(
        found,
        variants=(replace(first, padding_per_element=1.5), replace(second, padding_per_element=0.25)),
    )
    assert (
        "Length padding, of the elements computed: one_queue 60 %, buckets 20 %; against one_queue padding saved: 83.3 % "
        "(buckets)."
    ) in small_print(padded)


def test_variants_that_say_what_is_batched_tell_how_busy_the_device_is():
    one, two = (
        Variant(name=stage, scenario=variant_scenario(fixed={**BATCHED, "batching_stage": stage}))
        for stage in ("unit", "device")
    )
    assert one.server_key != two.server_key
    _, found = run([one, two], blocks=1)
    first, second = found.variants
    busy = replace(
        found, variants=(replace(first, device_busy_ratio=0.55), replace(second, device_busy_ratio=1.002))
    )
    assert "The device part of the model runs, of the time: unit 55 %, device 100 %." in small_print(busy)
    unbusy = replace(found, variants=(first, second))
    assert not any("device part" in line for line in small_print(unbusy))
