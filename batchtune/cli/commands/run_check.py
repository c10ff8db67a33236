"""`batchtune check`: says whether the candidate is still as good as the baseline, with an exit code for a job, and
why; `batchtune history`: what all checks said.

A stored figure (`--baseline FILE`) is a weaker witness than one measured side by side: a machine is not the same on two
days, so margins are no less than SESSION_MARGIN, and on another host the check is a tripwire at best.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batchtune.archive.run import CHECK, write_json
from batchtune.check.account import REGRESSION_EXIT_CODE, Conclusion, attributed
from batchtune.check.baseline import (
    BASELINE,
    Baseline,
    baseline_of,
    differences,
    read_baseline,
    write_baseline,
)
from batchtune.check.gate import BlockFigures, Gate, parse_margins
from batchtune.check.history import (
    append_history,
    are_equal,
    history_line,
    read_history,
    series_of,
    track_record,
)
from batchtune.check.paired_check import Phase, judged, paired_figures
from batchtune.cli.arguments.options import CheckRequest
from batchtune.cli.arguments.overrides import asked_scenario
from batchtune.cli.benches import Benches, check_targets, placed_variants
from batchtune.cli.commands.check_course import (
    Course,
    closed,
    gates_for,
    hand_on,
    loop_text,
    needs_relaunches,
    require_writable,
    without_search,
)
from batchtune.cli.commands.report import report_at_end
from batchtune.cli.session import session
from batchtune.errors import (
    ArchiveError,
    BaselineError,
    BatchtuneError,
    MeasurementInvalidError,
    TargetError,
    UsageError,
)
from batchtune.plain_values import as_text, to_plain
from batchtune.provenance import collect
from batchtune.report.check_text import account_document, print_check, print_history
from batchtune.report.findings import print_json, text_of
from batchtune.scenario.reader import lines_named, read_arms, read_variants
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import placed, refuse_several_models
from batchtune.tune.compare.blocks import Variant, chosen_variants
from batchtune.units import counted, percentage

if TYPE_CHECKING:
    from batchtune.tune.trials.trial import Trial


def run_check(wanted: CheckRequest) -> int:
    """Run `batchtune check`: measure both sides side by side, or the candidate against the stored figures of
    --baseline, and judge; with --update-baseline measure new ones. Returns the exit code, 130 when interrupted.

    Raises:
        BaselineError: there is no baseline, or this version cannot read it.
        UsageError: no such scenario, no two sides, no such gate, a file that is no baseline, or one that cannot be
            written.
        TargetError: an attached server could not be put back; the verdict was printed and saved before.
    """
    asked, sides = _asked_sides(wanted)
    margins = parse_margins(wanted.max_regress or ()) or sides[0].scenario.check.gates
    scenario, *loaded = without_search([asked, *(side.scenario for side in sides)], margins)
    sides = [replace(side, scenario=own) for side, own in zip(sides, loaded, strict=True)]
    gates: Sequence[Gate] = gates_for(sides[0], margins)
    blocks_max = wanted.blocks or scenario.check.blocks
    path = wanted.baseline
    stored: Baseline | None = None
    if path is not None and wanted.update_baseline:
        path = _made_place(path)
    elif path is not None:
        try:
            stored = read_baseline(path)
        except BaselineError as error:
            if not (wanted.allow_missing and not path.exists()):
                raise
            return _passed(error, json=wanted.json)
    require_writable(wanted)
    duets: dict[int, tuple[float, float]] = {}

    def figures(trials: Sequence[Trial], phase: Phase) -> Sequence[BlockFigures]:
        if path is None:
            return paired_figures(trials, *sides, cpu=duets)
        return [] if stored is None else stored.blocks_with(trials, phase)

    started_s = time.monotonic()
    with (
        lines_named(wanted.scenario, wanted.overrides),
        session(scenario, "check", results=wanted.results, quiet=wanted.quiet) as current,
    ):
        view = current.view
        if scenario.objective != asked.objective:
            view.event(loop_text(scenario))
        variants = placed_variants(sides, view)
        check_targets(variants, view)
        provenance = collect(scenario.load.seed)
        relaunches, refusal = needs_relaunches(gates), ""
        if stored is not None:
            refusal, rough = comparability(stored, variants[0], provenance, wanted, relaunches=relaunches)
            gates = widened(gates, is_other_host=bool(rough))
            blocks_max = blocks_max if refusal else min(blocks_max, len(stored.runs))
            wanted = replace(wanted, note=_note(rough, stored, wanted))
        kept = variants[0].scenario if path is not None else placed(with_sides(scenario, sides))[0]
        run = current.require_run(kept, provenance=provenance)
        course = Course(
            variants=variants,
            benches=Benches(view, current.stack, blocks=blocks_max, folder=run.path, apart=path is None),
            session=current,
            figures=figures,
            duets=duets,
            relaunches=relaunches,
        )
        if path is not None and stored is None:
            return update_baseline(
                course, path, wanted, gates=gates, provenance=provenance, blocks=blocks_max
            )
        conclusion = _incomparable(refusal, blocks_max) if refusal else course.conclude(gates, blocks_max)
        fault = closed(current.stack)
    if current.fault is not None:
        return current.exit_code(0)
    return tell(course, conclusion, wanted, fault=fault, started_s=started_s, stored=stored)


def _asked_sides(wanted: CheckRequest) -> tuple[Scenario, list[Variant]]:
    """Return (scenario, sides): both sides, or with a stored baseline the candidate alone, whose scenario it then is.

    Raises:
        UsageError: as `asked_pair`; with a stored baseline --candidate, options of its side, or several models.
    """
    if wanted.baseline is None:
        scenario = asked_scenario(wanted.scenario, wanted.overrides)
        return scenario, asked_pair(wanted, scenario)
    if wanted.baseline_set:
        raise UsageError(
            "--baseline: a stored baseline has no model, flags or settings",
            hint="leave --baseline-model, --baseline-ref and the like out, or --baseline",
        )
    refuse_variant(wanted.candidate)
    arms = read_arms(wanted.scenario, {"candidate": wanted.candidate_set}, overrides=wanted.overrides)
    refuse_several_models(arms["candidate"])
    return arms["candidate"], [Variant(name="candidate", scenario=arms["candidate"])]


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


def tell(
    course: Course,
    conclusion: Conclusion,
    wanted: CheckRequest,
    *,
    fault: BatchtuneError | None,
    started_s: float,
    stored: Baseline | None = None,
) -> int:
    """Judge what was concluded, save the account and add it to the history, print it, write the CI job's files and the
    HTML page. Returns the exit code.

    An interrupted check is no part of the history. What cannot be saved is printed as a note. `started_s`: when the
    check began, by the monotonic clock. `stored`: the baseline of an earlier session, None: a side of this one.

    Raises:
        BatchtuneError: `fault`, an error from closing the servers; raised after all else is done.
    """
    run, trials, candidate = course.run, course.trials, course.variants[-1]
    if trials:
        conclusion = judged(conclusion, trials, course.variants)
    baseline = course.variants[0].name if stored is None else f"baseline of {stored.utc[:10]}"
    account = replace(
        conclusion,
        scenario=course.session.scenario.name,
        baseline=baseline,
        candidate=candidate.name,
        attribution=None
        if stored
        else attributed(conclusion, trials, baseline=baseline, candidate=candidate.name),
        seconds=time.monotonic() - started_s,
        run=str(run.path),
        stored=stored is not None,
        note=wanted.note,
    )
    document = account_document(account)
    try:
        write_json(run.path / CHECK, document)
        sides = [variant.scenario for variant in course.variants]
        unchanged = len(sides) > 1 and are_equal(*sides)
        line = history_line(account, run.provenance(), commit=wanted.commit, unchanged=unchanged)
        if not account.interrupted:
            append_history(wanted.results, line)
    except ArchiveError as error:  # the verdict is valid without its copy
        print(f"note: {error.message}", file=sys.stderr)
    if wanted.json:
        print_json(document)
    else:
        print_check(account)
    hand_on(account, wanted)
    if trials:
        report_at_end(run, quiet=wanted.quiet)
    if fault is not None:
        raise fault
    return account.exit_code


# `check --baseline FILE`: against what was measured before, and kept.


def run_history(results: Path, *, scenario: str | None, json: bool) -> int:
    """Run `batchtune history`; `scenario`: the name of one, None: all. Returns the exit code, 0.

    Raises:
        ArchiveError: no check was saved in `results`.
        UsageError: no check of this scenario was.
    """
    every = read_history(results)
    lines = [line for line in every if scenario in (None, line["scenario"])]
    if scenario is not None and not lines:
        names = ", ".join(sorted({line["scenario"] for line in every}))
        raise UsageError(
            f"--scenario: no check of {scenario!r} in {results}", hint=f"there are: {names or 'none'}"
        )
    series = series_of(lines)
    if json:
        print_json({"checks": lines, "series": to_plain(series), "record": track_record(lines)})
    else:
        print_history(lines, series)
    return 0


SESSION_MARGIN: Final = 0.05
"""Least margin of a gate against figures of an earlier session on this host, as a ratio."""

OTHER_HOST_MARGIN: Final = 0.25
"""Least margin of a gate against another host, as a ratio.

Hosted runners of one kind differ by some per cent, and by far more under load.
"""


def _note(note: str, baseline: Baseline, wanted: CheckRequest) -> str:
    """Return what to know before believing the verdict: when the baseline was measured, and the request's own
    note."""
    session = note or f"stored figures of {baseline.utc}: margins are at least {percentage(SESSION_MARGIN)}."
    return f"{session} {wanted.note}".strip()


def comparability(
    baseline: Baseline,
    variant: Variant,
    provenance: Mapping[str, Any],
    wanted: CheckRequest,
    *,
    relaunches: bool,
) -> tuple[str, str]:
    """Return (refusal, note): why this check must not be compared with the baseline, and what the user should
    know where it may; each "" for nothing.

    `relaunches`: every run of this check has a server of its own.
    """
    workload, host = differences(baseline, variant.scenario, provenance, relaunches=relaunches)
    if workload:
        return f"the baseline is of another workload ({'; '.join(workload)})", ""
    if host and not wanted.allow_mismatch:
        differing = "; ".join(host)
        return f"the baseline is of another host ({differing}); --allow-mismatch compares by wide margins", ""
    if host:
        least = percentage(OTHER_HOST_MARGIN)
        return "", f"ROUGH CHECK ONLY: another host ({'; '.join(host)}): margins are at least {least}."
    return "", ""


def widened(gates: Sequence[Gate], *, is_other_host: bool) -> list[Gate]:
    """Return the gates with margins of at least SESSION_MARGIN, or OTHER_HOST_MARGIN where `is_other_host`; the margin
    of errors is not changed."""
    least = OTHER_HOST_MARGIN if is_other_host else SESSION_MARGIN
    return [gate if gate.is_absolute else replace(gate, margin=max(gate.margin, least)) for gate in gates]


def _passed(error: BaselineError, *, json: bool) -> int:
    """Print that there is no baseline yet and that --allow-missing lets this pass. Returns the exit code, 0."""
    print(f"{error.message}; --allow-missing lets it pass", file=sys.stderr)
    if json:
        print_json({"verdict": "NO BASELINE", "exit_code": 0, "reason": error.message})
    return 0


def _made_place(path: Path) -> Path:
    """Return the path of a new baseline's file, and make its folder before minutes are spent.

    Raises:
        UsageError: the folder cannot be made.
    """
    place = path / BASELINE if path.is_dir() else path
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--baseline: cannot write {place}: {error.strerror}") from error
    return place


def update_baseline(
    course: Course,
    path: Path,
    wanted: CheckRequest,
    *,
    gates: Sequence[Gate],
    provenance: Mapping[str, Any],
    blocks: int,
) -> int:
    """Measure a new baseline and write it to `path`, and to the folder of the run, unless it drifted: a median is worse
    than the best one that the file records by more than its gate allows (`Baseline.drifts`).

    Without a comparable baseline in that file nothing drifts; with `wanted.force` neither, and the best figures are
    forgotten. Returns the exit code: 0 written, 1 it drifted, 6 the measurement is invalid. `course`: makes the runs.
    `gates`: whose figures must not drift. `blocks`: how many runs.

    Raises:
        TargetError: no run was complete.
        ArchiveError: the baseline cannot be written.
    """
    course.measure("screen", blocks, ())
    void = judged(_incomparable("", blocks), course.trials, course.variants)
    if void.verdict == "INVALID" and void.reason is not None:
        print(f"invalid: {text_of(void.reason)}; no baseline was written", file=sys.stderr)
        return MeasurementInvalidError.exit_code
    baseline = baseline_of(
        course.variants[0].scenario,
        course.trials,
        provenance,
        relaunches=course.relaunches,
        commit=wanted.commit,
    )
    if not baseline.runs:
        raise TargetError("no run came to its end: no baseline was written", hint=f"see {course.run.path}")
    baseline = baseline.after(_kept_before(path, course.variants[0].scenario, provenance, course) or baseline)
    drifts = [] if wanted.force else baseline.drifts(gates)
    if drifts:
        print(
            f"REGRESSED  {', '.join(drifts)} against the best earlier baseline; {path} is not replaced\n"
            "hint: --force accepts these figures as the new baseline",
            file=sys.stderr,
        )
        return REGRESSION_EXIT_CODE
    if wanted.force:
        baseline = replace(baseline, best={})
    write_baseline(baseline, path)
    write_baseline(baseline, course.run.path / BASELINE)
    if wanted.json:
        kept = {"baseline": str(path), "runs": len(baseline.runs), "run": str(course.run.path)}
        print_json({**kept, "note": wanted.note})
        return 0
    of = f"; {wanted.note}" if wanted.note else ""
    print(f"baseline of {counted(len(baseline.runs), 'run')} saved in {path}{of}")
    return 0


def _kept_before(
    path: Path, scenario: Scenario, provenance: Mapping[str, Any], course: Course
) -> Baseline | None:
    """Return the baseline in `path`, which is to be replaced; None where there is none, or one of another
    workload or host."""
    try:
        before = read_baseline(path)
    except (ArchiveError, BaselineError):
        return None
    apart = differences(before, scenario, provenance, relaunches=course.relaunches)
    return None if any(apart) else before


def _incomparable(reason: str, blocks_max: int) -> Conclusion:
    return Conclusion(
        verdict="INCOMPARABLE",
        findings=(),
        blocks=0,
        fresh_blocks=0,
        blocks_max=blocks_max,
        reason=as_text(reason),
    )
