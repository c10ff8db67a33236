"""A comparison and a check of several models: an arm for each, gates of each, one error rate over all."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchtune.check.account import Conclusion, account_from, attributed
from batchtune.check.gate import gates_of
from batchtune.check.history import history_line, series_of
from batchtune.check.paired_check import judge_fixed, judged, paired_figures
from batchtune.errors import UsageError
from batchtune.measure.caveats import caveat
from batchtune.plain_values import as_text
from batchtune.report.check_text import print_check, print_history
from batchtune.report.comparison import print_comparison
from batchtune.report.findings import text_of
from batchtune.scenario.reader import ScenarioText, read_variants
from batchtune.tune.bench import Plan
from batchtune.tune.compare.blocks import Variant, chosen_variants, compare
from batchtune.tune.compare.result import summarise
from batchtune.tune.trials.trial import FinishedTrial, Trial, parts_of
from tests.check.check_fakes import exactly, measurement, trial

TEXT = """\
name: two
target:
  models:
    - {name: quick, model: imdb_transformer, rate: 100/s, slo: {p95: 10ms}}
    - {name: slow, model: sequence_transformer, rate: 50/s, slo: {p95: 50ms}, batching: {max_batch_size: 2}}
load: {arrivals: poisson, duration: 1s}
objective: capacity
fixed: {max_batch_size: 8}
variants:
  eight: {}
  none: {fixed: {enable_batching: false}}
"""
BLOCKS = 10


def variants(text: str = TEXT) -> list[Variant]:
    return chosen_variants(read_variants(ScenarioText(text=text, source="two.yaml")))


def played(pair: list[Variant], *, slower: float = 1.3, noisy: int = 0) -> list[Trial]:
    """Blocks of loads of both models; of `none` the slow one's latencies are so many times as long. The host disturbs
    the attempt `noisy` of either variant."""

    def bench_of(variant: Variant) -> Any:
        attempts = itertools.count(1)

        def run(plan: Plan) -> FinishedTrial:
            parts, block = {}, plan.request.block or 0
            notes = (caveat("host_steal", steal_ratio=0.5),) if next(attempts) == noisy else ()
            for at, arm in enumerate(variant.arms()):
                is_slow = (variant.name, arm.model) == ("none", "slow")
                factor = (1.0 + 0.002 * block) * (slower if is_slow else 1.0)
                late_s = {
                    name: exactly(factor * value.value) for name, value in measurement().latency_s.items()
                }
                load: dict[str, Any] = {"offered_rps": 100.0, "concurrency": None, "caveats": notes}
                measured = measurement(None, latency_s=late_s, **load)
                parts[arm.model] = trial(arm.name, block, measured, number=plan.number + at, model=arm.model)
            whole = trial(variant.name, block, number=plan.number, parts=parts)
            return FinishedTrial(trial=replace(whole, measurement=None), samples=None)

        return SimpleNamespace(run=run)

    benches = {variant.name: bench_of(variant) for variant in pair}
    done = compare(pair, blocks=BLOCKS, bench_of=lambda variant: benches[variant.name])
    return parts_of(finished.trial for finished in done)


def account_of(pair: list[Variant], trials: list[Trial], **margins: float) -> Conclusion:
    gates = gates_of(margins, objective="latency", models=["quick", "slow"])
    fixed = judge_fixed(gates, paired_figures(trials, *pair))
    sides = {"baseline": "eight", "candidate": "none"}
    cause = attributed(fixed, trials, **sides)
    return replace(judged(fixed, trials, pair), scenario="two", attribution=cause, seconds=1.0, **sides)


def test_each_model_is_an_arm_with_its_own_parameters_limits_and_the_figure_of_its_load():
    eight, none = variants()
    quick, slow = eight.arms()
    assert (quick.name, slow.name, slow.model) == ("eight/quick", "eight/slow", "slow")
    sizes = [arm.configuration.batching.max_batch_size for arm in (quick, slow) if arm.configuration.batching]
    assert sizes == [8, 2]
    assert eight.configuration.of_model("slow") == slow.configuration
    assert [arm.configuration.batching for arm in none.arms()] == [None, None]
    assert [arm.scenario.objective for arm in (quick, slow)] == ["latency", "latency"]
    assert slow.scenario.slo.limits() == {"p95": 0.05}


def test_one_load_gives_a_trial_a_model_under_one_seed_and_a_disturbed_one_is_repeated_whole():
    trials = played(variants(), noisy=2)
    assert [trial.number for trial in trials] == list(range(1, 2 * (2 * BLOCKS + 2) + 1))
    comparison = summarise(trials, variants())
    assert comparison.repeats == 4  # two trials of either variant
    assert [figures.noisy for figures in comparison.variants] == [0, 0, 0, 0]


def test_a_model_is_compared_with_itself_and_the_other_does_not_move(capsys: pytest.CaptureFixture[str]):
    comparison = summarise(played(variants()), variants())
    pairs = {(pair.baseline, pair.variant): pair for pair in comparison.pairs}
    assert set(pairs) == {("eight/quick", "none/quick"), ("eight/slow", "none/slow")}
    moved = pairs["eight/slow", "none/slow"]
    assert (moved.model, moved.metric, moved.outcome) == ("slow", "p95", "different")
    assert moved.ratio.value == pytest.approx(1.3)
    assert pairs["eight/quick", "none/quick"].outcome == "not distinguishable"
    assert {answer.pair.variant for answer in comparison.answers} == {"eight/quick", "eight/slow"}
    print_comparison(comparison, path=Path("RUN"))
    out = capsys.readouterr().out
    quick, slow = (out.index(f"Against eight/{model}, over 10 blocks:") for model in ("quick", "slow"))
    assert quick < slow
    assert "slow, gRPC, requests of 1 row: it pays" in " ".join(out.split())


def test_gates_are_of_each_model_and_share_the_error_rate(capsys: pytest.CaptureFixture[str]):
    pair = variants()
    account = account_of(pair, played(pair), p95=0.05, throughput=0.02)
    states = {finding.gate.name: finding.state for finding in account.findings}
    ok = dict.fromkeys(("quick:p95", "quick:throughput", "slow:throughput"), "ok")
    assert states == {**ok, "slow:p95": "regressed"}
    assert (account.verdict, account.attribution) == ("REGRESSED", None)
    print_check(account)
    out = capsys.readouterr().out
    assert "slow:p95 +30 %" in out
    assert "slow: p95 ms" in out
    assert "two equal servers fails in at most 5 %" in " ".join(out.split())
    again = account_from(account.to_dict())
    assert [finding.gate for finding in again.findings] == [finding.gate for finding in account.findings]


def test_a_model_that_misses_its_slo_is_named():
    pair = variants()
    failing = measurement(None, verdict="FAIL", verdict_reason=as_text("p95 12 ms"))
    late = [
        trial("none/quick", one.block or 0, failing) if one.reason == "none/quick" else one
        for one in played(pair, slower=1.0)
    ]
    account = account_of(pair, late, errors=0.01)
    assert account.verdict == "SLO MISSED"
    assert text_of(account.reason) == "none/quick misses its SLO: p95 12 ms"


def test_the_history_keeps_a_figure_for_each_model(capsys: pytest.CaptureFixture[str]):
    pair = variants()
    line = history_line(account_of(pair, played(pair), p95=0.05), {})
    assert set(line["gates"]) == {"quick:p95", "slow:p95"}
    print_history([line], series_of([line]))
    assert "slow: p95 ms" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("figure", ["cpu", "memory", "startup"])
def test_what_is_the_servers_is_no_gate_of_a_model(figure: str):
    with pytest.raises(UsageError, match=f"{figure}: with several models the server reports it") as caught:
        gates_of({figure: 0.05}, objective="latency", models=["quick", "slow"])
    assert caught.value.hint == "use a gate that each model has: throughput, p50, p95, p99, errors"
    defaults = gates_of({}, objective="latency", models=["quick", "slow"])
    assert [gate.name for gate in defaults][:4] == ["quick:p50", "quick:p95", "quick:p99", "quick:errors"]
    assert len(defaults) == 8


def test_variants_of_other_models_are_not_compared():
    other = "none: {target: {models: [{name: a, model: b, rate: 1/s, slo: {p95: 1s}}]}}"
    with pytest.raises(UsageError, match=r"target\.models differ \(eight: quick, slow; none: a\)"):
        variants(TEXT.replace("none: {fixed: {enable_batching: false}}", other))
