"""`batchtune compare`: the scenario's variants side by side, and in plain words what makes the difference."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from batchtune.check.account import REGRESSION_EXIT_CODE, Conclusion, attributed
from batchtune.check.gate import ERROR_RATE, OF_A_LAUNCH, Gate, parse_margins
from batchtune.check.paired_check import judge_fixed, judged, paired_figures
from batchtune.cli.arguments.options import LoadRequest
from batchtune.cli.arguments.overrides import asked_scenario
from batchtune.cli.benches import Benches, check_targets, placed_variants
from batchtune.cli.commands.check_course import gates_for
from batchtune.cli.commands.report import report_at_end
from batchtune.cli.session import MeasuringSession, gravest, session
from batchtune.errors import (
    MeasurementInvalidError,
    TargetError,
    UsageError,
)
from batchtune.report.check_text import account_document, print_check
from batchtune.report.comparison import (
    comparison_text,
    pace_text,
    print_comparison,
    print_noise,
)
from batchtune.report.findings import print_json, worded
from batchtune.scenario.reader import lines_named, read_scenario, read_variants
from batchtune.target.choice import placed, refuse_several_models
from batchtune.tune.compare.blocks import Variant, chosen_variants, compare, probed_paces
from batchtune.tune.compare.result import Comparison, arms_of, noise_floor, summarise
from batchtune.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchtune.scenario.spec.scenario import Scenario
    from batchtune.tune.trials.trial import Trial


def run_compare(
    wanted: LoadRequest, *, baseline: str | None = None, blocks: int, max_regress: Sequence[str] = ()
) -> int:
    """Run `batchtune compare`. Returns the exit code.

    0, also where the variants cannot be distinguished. With gates, 1 for a regression, 3 for a missed SLO, 5 for no
    verdict. 6 where the load generator was the limit of a pair, or the host disturbed every run of a variant (repeats
    included) and not all of 12 blocks agree. 7 where a variant failed. 130 when interrupted.

    Raises:
        UsageError: no two variants, no such gate, a gate on a figure of a launch, or as `run_blocks`.
        ScenarioError: as `read_scenario`.
        TargetError: as `run_blocks`.
    """
    scenario = asked_scenario(wanted.scenario, wanted.overrides)
    read = read_variants(wanted.scenario, overrides=wanted.overrides)
    variants = chosen_variants(read, baseline=baseline)
    margins = parse_margins(max_regress)
    gates = gates_for(variants[0], margins) if margins else ()
    drawn_once = OF_A_LAUNCH & margins.keys()
    if drawn_once:
        raise UsageError(
            f"{min(drawn_once)}: compare launches each server once, or one for several variants",
            hint="`batchtune check` launches one for every run",
        )
    started_s = time.monotonic()
    with lines_named(wanted.scenario, wanted.overrides):
        done = run_blocks(scenario, variants, wanted, kind="compare", blocks=blocks)
    if done.run is None:
        return done.exit_code(0)
    comparison = summarise(done.trials, done.variants)
    document = worded(comparison.to_dict())
    done.run.write_comparison(document)
    accounts = _accounts(
        done.trials, done.variants, gates, scenario=scenario, seconds=time.monotonic() - started_s
    )
    if wanted.json:
        checks = {"checks": [account_document(account) for account in accounts]} if gates else {}
        print_json({"run": str(done.run.path), **document, **checks})
    elif done.trials:
        print_comparison(comparison, path=done.run.path)
        for account in accounts:
            print()
            print_check(account)
    if done.trials:
        report_at_end(done.run, quiet=wanted.quiet)
    return done.exit_code(0 if done.fault is not None else _exit_code(comparison, accounts))


def run_blocks(
    scenario: Scenario,
    variants: Sequence[Variant],
    wanted: LoadRequest,
    *,
    kind: Literal["compare", "noise"],
    blocks: int,
) -> MeasuringSession:
    """Run the blocks of a comparison or of a noise floor, save each trial as it ends, and return the session.

    Raises:
        UsageError: a model that does not exist, or a protocol that no launched server speaks.
        TargetError: a server failed before any trial was complete.
    """
    scenario, _ = placed(scenario)
    with session(scenario, kind, results=wanted.results, quiet=wanted.quiet) as current:
        view = current.view
        variants = current.variants = placed_variants(variants, view)
        check_targets(variants, view)
        view.event(f"{counted(blocks, 'block')} of {counted(len(variants), 'variant')}")
        run = current.require_run(scenario)
        benches = Benches(view, current.stack, blocks=blocks, folder=run.path)
        variants = current.variants = benches.reached(variants)
        paces = probed_paces(variants, bench_of=benches.bench)
        for variant in variants:
            view.event(pace_text(variant, paces[variant.name]))
        view.event(comparison_text(variants, paces, blocks=blocks))
        for finished in compare(
            variants, blocks=blocks, bench_of=benches.bench, on_turn=benches.turn, paces=paces
        ):
            current.keep([finished], shown=False)
            benches.show(finished.trial)
    return current


def _accounts(
    trials: Sequence[Trial],
    variants: Sequence[Variant],
    gates: Sequence[Gate],
    *,
    scenario: Scenario,
    seconds: float,
) -> list[Conclusion]:
    """Judge each variant against the first one by the gates; empty without gates or trials.

    The comparisons share one error rate: among variants that are all equal, any of them is flagged that
    seldom.
    """
    if not gates or not trials:
        return []
    baseline = variants[0].name
    accounts = []
    error_rate = ERROR_RATE / len(variants[1:])
    for variant in variants[1:]:
        blocks = paired_figures(trials, variants[0], variant)
        fixed = judge_fixed(gates, blocks, error_rate=error_rate)
        conclusion = judged(fixed, trials, (variants[0], variant))
        attribution = attributed(conclusion, trials, baseline=baseline, candidate=variant.name)
        accounts.append(
            replace(
                conclusion,
                scenario=scenario.name,
                baseline=baseline,
                candidate=variant.name,
                attribution=attribution,
                seconds=seconds,
            )
        )
    return accounts


def _exit_code(comparison: Comparison, accounts: Sequence[Conclusion]) -> int:
    """Return the exit code: that of a failed server first, then of a load generator at its limit, then of a
    regression of a variant that the host did not disturb in every run, then of a host that did.
    """
    if any(variant.failure is not None for variant in comparison.variants):
        return TargetError.exit_code
    if any(pair.outcome == "client-limited" for pair in comparison.pairs):
        return MeasurementInvalidError.exit_code
    codes = {account.exit_code for account in accounts}
    if REGRESSION_EXIT_CODE in codes:
        return REGRESSION_EXIT_CODE
    if comparison.disturbed:
        return void_by_host(" and of ".join(comparison.disturbed))
    return gravest(codes)


def void_by_host(whose: str) -> int:
    """Print that the host disturbed every run of `whose`, so that the figures do not count. Returns the exit
    code, 6."""
    print(f"invalid: the host disturbed every run of {whose}, also when it was repeated", file=sys.stderr)
    return MeasurementInvalidError.exit_code


def run_noise(wanted: LoadRequest, *, blocks: int) -> int:
    """Run `batchtune noise`. Returns the exit code.

    0; 6 where the load generator was the limit or the host disturbed every run; 130 when interrupted.

    Raises:
        TargetError: the server failed, or no block was complete.
    """
    scenario = read_scenario(wanted.scenario, overrides=wanted.overrides)
    refuse_several_models(scenario)
    arms = arms_of(scenario)
    done = run_blocks(scenario, arms, wanted, kind="noise", blocks=blocks)
    if done.run is None:
        return done.exit_code(0)
    floor = noise_floor(done.trials, done.variants)
    document = worded(floor.to_dict())
    done.run.write_comparison(document)
    if done.fault is None and (floor.failure is not None or not floor.floors):
        raise TargetError(floor.failure or "no block gave two figures", hint=f"see {done.run.path}")
    if wanted.json:
        print_json({"run": str(done.run.path), **document})
    elif floor.floors:
        print_noise(floor, path=done.run.path)
    if done.fault is not None:
        return done.exit_code(0)
    if floor.client_limited:
        return MeasurementInvalidError.exit_code
    return void_by_host("both arms") if floor.noisy == floor.runs else 0
