"""`batchtune check`: says whether the candidate is still as good as the baseline, with an exit code for a job, and
why."""

from __future__ import annotations

import json as json_text
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from batchtune.archive.run import CHECK, write_whole
from batchtune.check.account import Account, attributed
from batchtune.check.gate import gates_of, parse_margins
from batchtune.check.history import append_history, are_equal, history_line
from batchtune.check.paired_check import judged, paired_figures
from batchtune.cli.arguments.options import CheckRequest
from batchtune.cli.arguments.overrides import asked_scenario
from batchtune.cli.benches import Benches, check_targets, placed_variants
from batchtune.cli.commands.check_course import (
    Course,
    closed,
    hand_on,
    loop_text,
    needs_relaunches,
    require_writable,
    without_search,
)
from batchtune.cli.commands.report import report_at_end
from batchtune.cli.session import session
from batchtune.errors import ArchiveError, BatchtuneError, UsageError
from batchtune.report.check_text import account_document, print_check
from batchtune.report.findings import print_json
from batchtune.scenario.reader import lines_named, read_arms, read_variants
from batchtune.target.choice import placed
from batchtune.tune.compare.blocks import Variant, chosen_variants

if TYPE_CHECKING:
    from batchtune.scenario.spec.scenario import Scenario


def run_paired_check(wanted: CheckRequest) -> int:
    """Run `batchtune check`: measure both sides side by side, and judge. Returns the exit code, 130 when
    interrupted.

    Raises:
        UsageError: no such scenario, no two sides, no such gate, or a file that cannot be written.
        TargetError: an attached server could not be put back; the verdict was printed and saved before.
    """
    scenario = asked_scenario(wanted.scenario, wanted.overrides)
    pair = asked_pair(wanted, scenario)
    baseline, candidate = (variant.name for variant in pair)
    margins = parse_margins(wanted.max_regress or ()) or pair[0].scenario.check.gates
    loaded = without_search([scenario, *(variant.scenario for variant in pair)], margins)
    is_loop = loaded[0].objective != scenario.objective
    scenario = loaded[0]
    pair = [replace(variant, scenario=side) for variant, side in zip(pair, loaded[1:], strict=True)]
    arms = pair[0].arms()
    models = [arm.model for arm in arms if arm.model]
    own = arms[0].scenario
    gates = gates_of(margins, objective=own.objective, models=models, streams=own.streams_tokens)
    blocks_max = wanted.blocks or scenario.check.blocks
    require_writable(wanted)
    duets: dict[int, tuple[float, float]] = {}
    started_s = time.monotonic()
    with (
        lines_named(wanted.scenario, wanted.overrides),
        session(scenario, "check", results=wanted.results, quiet=wanted.quiet) as current,
    ):
        view = current.view
        if is_loop:
            view.event(loop_text(scenario))
        variants = placed_variants(pair, view)
        check_targets(variants, view)
        asked, _ = placed(with_sides(scenario, pair))
        run = current.require_run(asked)
        course = Course(
            variants=variants,
            benches=Benches(view, current.stack, blocks=blocks_max, folder=run.path, apart=True),
            session=current,
            figures=lambda trials, _phase: paired_figures(trials, *pair, cpu=duets),
            duets=duets,
            relaunches=needs_relaunches(gates),
        )
        conclusion = course.conclude(gates, blocks_max)
        fault = closed(current.stack)
    if current.fault is not None:
        return current.exit_code(0)
    conclusion = judged(conclusion, course.trials, course.variants)
    account = Account(
        scenario=scenario.name,
        baseline=baseline,
        candidate=candidate,
        conclusion=conclusion,
        attribution=attributed(conclusion, course.trials, baseline=baseline, candidate=candidate),
        seconds=time.monotonic() - started_s,
        run=str(run.path),
        note=wanted.note,
    )
    return tell(account, course, wanted, fault=fault)


def asked_pair(wanted: CheckRequest, scenario: Scenario) -> list[Variant]:
    """Return the two sides as variants, the baseline first: made of the options of the sides where there are
    any, else two of the scenario's variants.

    Raises:
        UsageError: no two variants, more than two without --candidate, or --candidate beside options of a
            side.
    """
    if wanted.baseline_set or wanted.candidate_set:
        refuse_variant(wanted.candidate)
        sides = {"baseline": wanted.baseline_set, "candidate": wanted.candidate_set}
        return chosen_variants(read_arms(wanted.scenario, sides, overrides=wanted.overrides))
    if not scenario.variants:
        raise UsageError(
            f"{wanted.scenario}: nothing to compare: no variants",
            hint="add variants: {baseline: {}, candidate: {target: {model: ./new}}}, or give --candidate-model PATH",
        )
    variants = chosen_variants(read_variants(wanted.scenario, overrides=wanted.overrides))
    baseline, *names = scenario.variants
    if wanted.candidate is not None:
        others = [variant for variant in variants[1:] if variant.name == wanted.candidate]
        variants = [*variants[:1], *others]
    if len(variants) != 2:
        unknown = "" if wanted.candidate is None else f"--candidate {wanted.candidate}: no candidate of "
        raise UsageError(
            f"{unknown}{wanted.scenario}: a check compares one candidate with {baseline!r}, the baseline",
            hint=f"give --candidate NAME, one of: {', '.join(names)}",
        )
    return variants


def refuse_variant(name: str | None) -> None:
    """Check that --candidate is not given beside options of a side: the scenario's variants do not count
    there.

    Raises:
        UsageError: it is given.
    """
    if name is not None:
        raise UsageError(
            f"--candidate: the variant {name!r} does not count together with --baseline or the options of a side",
            hint="leave --candidate out, and say the variant's keys by --candidate-set KEY=VALUE",
        )


def with_sides(scenario: Scenario, pair: Sequence[Variant]) -> Scenario:
    """Return the scenario with both sides as its variants; each variant has only the keys whose values differ
    from the scenario's."""
    ours = scenario.document()
    apart = {"name", "variants", "check", "search"}
    sides = {
        side.name: {
            key: value
            for key, value in side.scenario.document().items()
            if key not in apart and value != ours.get(key)
        }
        for side in pair
    }
    return scenario.model_copy(update={"variants": sides})


def tell(account: Account, course: Course, wanted: CheckRequest, *, fault: BatchtuneError | None) -> int:
    """Save the account and add it to the history, print it, write the CI job's files and the HTML page.
    Returns the exit code.

    An interrupted check is no part of the history. What cannot be saved is printed as a note.

    Raises:
        BatchtuneError: `fault`, an error from closing the servers; raised after all else is done.
    """
    run, document = course.run, account_document(account)
    try:
        text = json_text.dumps(document, indent=2, allow_nan=False) + "\n"
        write_whole(run.path / CHECK, text.encode())
        sides = [variant.scenario for variant in course.variants]
        unchanged = len(sides) > 1 and are_equal(*sides)
        line = history_line(account, run.provenance(), commit=wanted.commit, unchanged=unchanged)
        if not account.conclusion.interrupted:
            append_history(wanted.results, line)
    except ArchiveError as error:  # the verdict is valid without its copy
        print(f"note: {error.message}", file=sys.stderr)
    if wanted.json:
        print_json(document)
    else:
        print_check(account)
    hand_on(account, wanted)
    if course.trials:
        report_at_end(run, quiet=wanted.quiet)
    if fault is not None:
        raise fault
    return account.conclusion.exit_code
