"""`batchtune check --baseline FILE`: says whether it is still as good as what was measured before, and kept.

A figure of another session is a weaker witness than one measured side by side: a machine is not the same on two days,
so margins are no less than SESSION_MARGIN, and on another host the check is a tripwire at best.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from batchtune.check.account import Account
from batchtune.check.baseline import (
    BASELINE,
    Baseline,
    baseline_of,
    differences,
    read_baseline,
    write_baseline,
)
from batchtune.check.gate import Gate, gates_of, parse_margins
from batchtune.check.history import read_history, series_of, track_record
from batchtune.check.paired_check import REGRESSION_EXIT_CODE, Conclusion, judged
from batchtune.cli.arguments.options import CheckRequest
from batchtune.cli.benches import Benches, check_targets, placed_variants
from batchtune.cli.commands.check_course import (
    Course,
    closed,
    loop_text,
    needs_relaunches,
    require_writable,
    without_search,
)
from batchtune.cli.commands.run_check import refuse_variant, tell
from batchtune.cli.session import session
from batchtune.errors import ArchiveError, BaselineError, MeasurementInvalidError, TargetError, UsageError
from batchtune.plain_values import as_text, fields_to_plain
from batchtune.provenance import collect
from batchtune.report.check_text import print_history
from batchtune.report.findings import print_json, text_of
from batchtune.scenario.reader import read_arms
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import refuse_several_models
from batchtune.tune.compare.blocks import Variant
from batchtune.units import counted, percentage


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
    series, record = series_of(lines), track_record(lines)
    if json:
        print_json(
            {
                "checks": lines,
                "series": [fields_to_plain(figure) for figure in series],
                "record": {**fields_to_plain(record), "rate_most": record.rate_most},
            }
        )
    else:
        print_history(lines, series)
    return 0


SESSION_MARGIN: Final = 0.05
"""Least margin of a gate against figures of an earlier session on this host, as a ratio."""

OTHER_HOST_MARGIN: Final = 0.25
"""Least margin of a gate against another host, as a ratio.

Hosted runners of one kind differ by some per cent, and by far more under load.
"""


def run_stored_check(wanted: CheckRequest, path: Path) -> int:
    """Run `batchtune check --baseline FILE`: measure the candidate, compare with the stored figures in `path`, a
    file or a run that has one. Returns the exit code.

    Raises:
        BaselineError: there is no baseline, or this version cannot read it.
        UsageError: no such scenario or gate, a file that is no baseline, or one that cannot be written.
        TargetError: an attached server could not be put back; the verdict was printed and saved before.
    """
    if wanted.baseline_set:
        raise UsageError(
            "--baseline: a stored baseline has no model, flags or settings",
            hint="leave --baseline-model, --baseline-ref and the like out, or --baseline",
        )
    asked, scenario, gates = _asked(wanted)
    baseline: Baseline | None = None
    if wanted.update_baseline:
        path = _made_place(path)
    else:
        try:
            baseline = read_baseline(path)
        except BaselineError as error:
            if not (wanted.allow_missing and not path.exists()):
                raise
            return _passed(error, json=wanted.json)
    require_writable(wanted)
    started_s = time.monotonic()
    with session(scenario, "check", results=wanted.results, quiet=wanted.quiet) as current:
        view = current.view
        if scenario.objective != asked.objective:
            view.event(loop_text(scenario))
        (variant,) = placed_variants([Variant(name="candidate", scenario=scenario)], view)
        check_targets([variant], view)
        provenance = collect(variant.scenario.load.seed)
        blocks_max = wanted.blocks or variant.scenario.check.blocks
        relaunches = needs_relaunches(gates)
        refusal, note = "", ""
        if baseline is not None:
            refusal, note = comparability(baseline, variant, provenance, wanted, relaunches=relaunches)
        if not refusal:
            blocks_max = blocks_max if baseline is None else min(blocks_max, len(baseline.runs))
        run = current.require_run(variant.scenario, provenance=provenance)
        course = Course(
            variants=[variant],
            benches=Benches(view, current.stack, blocks=blocks_max, folder=run.path),
            session=current,
            figures=lambda trials, phase: [] if baseline is None else baseline.blocks_with(trials, phase),
            relaunches=relaunches,
        )
        if baseline is None:
            return update_baseline(
                course, path, wanted, gates=gates, provenance=provenance, blocks=blocks_max
            )
        if refusal:
            conclusion = _incomparable(refusal, blocks_max)
        else:
            conclusion = course.conclude(widened(gates, is_other_host=bool(note)), blocks_max)
        fault = closed(current.stack)
    if current.fault is not None:
        return current.exit_code(0)
    if not refusal:
        conclusion = judged(conclusion, course.trials, [variant])
    account = Account(
        scenario=variant.scenario.name,
        baseline=f"baseline of {baseline.utc[:10]}",
        candidate="candidate",
        conclusion=conclusion,
        attribution=None,
        seconds=time.monotonic() - started_s,
        run=str(course.run.path),
        stored=True,
        note=_note(note, baseline, wanted),
    )
    return tell(account, course, wanted, fault=fault)


def _asked(wanted: CheckRequest) -> tuple[Scenario, Scenario, tuple[Gate, ...]]:
    """Return (scenario of the candidate, that scenario with the load that is sent, gates).

    Raises:
        UsageError: --candidate, several models, or no such gate.
    """
    refuse_variant(wanted.candidate)
    asked = read_arms(wanted.scenario, {"candidate": wanted.candidate_set}, overrides=wanted.overrides)[
        "candidate"
    ]
    refuse_several_models(asked)
    margins = parse_margins(wanted.max_regress or ()) or asked.check.gates
    (scenario,) = without_search([asked], margins)
    return asked, scenario, gates_of(margins, objective=scenario.objective, streams=scenario.streams_tokens)


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
    """Measure a new baseline and write it to `path`, unless it drifted from the best baseline recorded in that file.

    Returns the exit code: 0 written, 1 it drifted, 6 the measurement is invalid. `course`: makes the runs.
    `gates`: whose figures must not drift. `blocks`: how many runs.

    Raises:
        TargetError: no run was complete.
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
