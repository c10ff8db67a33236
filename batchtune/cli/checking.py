"""Options of the commands that guard what was reached."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchtune.cli.arguments.options import (
    JsonOption,
    MaxRegressOption,
    QuietOption,
    RootOption,
    ScenarioArgument,
    SetOption,
    SideWords,
    examples,
    takes_sides,
    takes_slo,
)
from batchtune.errors import UsageError

checking = typer.Typer()


@checking.command(
    epilog=examples(
        "check scenario.yaml",
        "check scenario.yaml --baseline-model models/main --candidate-model models/new",
        "check scenario.yaml --baseline-ref main --candidate-ref HEAD",
        "check scenario.yaml --candidate-flag tensorflow_intra_op_parallelism=2",
        "check scenario.yaml --baseline-image serving:1.0 --candidate-image serving:1.1",
        "check scenario.yaml --max-regress p95=5%,cpu=3% --json",
        "check scenario.yaml --baseline baseline.json --update-baseline",
        "check scenario.yaml --baseline baseline.json --junit junit.xml",
    )
)
@takes_sides
@takes_slo
def check(
    *,
    slo: dict[str, str],
    sides: dict[str, SideWords],
    scenario: ScenarioArgument,
    candidate: Annotated[
        str | None, typer.Option(metavar="NAME", help="The variant to check. Default: the second of two.")
    ] = None,
    paired: Annotated[
        bool,
        typer.Option(
            "--paired", help="Measure both sides in this job, side by side. The default without --baseline."
        ),
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="RUN|FILE", help="Compare with stored figures instead of side by side."),
    ] = None,
    update_baseline: Annotated[
        bool,
        typer.Option("--update-baseline", help="Measure the baseline anew and write the file of --baseline."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="With --update-baseline: write it even if it is worse than the best earlier baseline.",
        ),
    ] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Exit with 0 if there is no baseline yet.")
    ] = False,
    allow_mismatch: Annotated[
        bool,
        typer.Option(
            "--allow-mismatch", help="Compare with another host's baseline by margins of 25 % and more."
        ),
    ] = False,
    max_regress: MaxRegressOption = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            min=6, max=200, help="Most runs of each side; a check stops sooner once it is clear. Default: 36."
        ),
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JUnit report.")] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append Markdown. Default: $GITHUB_STEP_SUMMARY, if set."),
    ] = None,
    comment: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a comment for the pull request, with a marker to update it."
        ),
    ] = None,
    code_quality: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write GitLab's code quality report.")
    ] = None,
    set_: SetOption = None,
    results: RootOption = Path("results"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Test whether a candidate is worse than a baseline, side by side.

    Launches both and loads them in turns, in blocks; the first of the scenario's variants is the baseline. A check
    stops as soon as every gate is clear: after about a minute on a quiet host with servers that start in 2 s. What
    looks worse is measured again, in confirmation blocks with new servers, before it fails. With --baseline, check
    compares with figures stored in a file, by wider margins. Exit code: 0 OK or improved, 1 regressed, 3 the
    candidate misses the SLO, 4 no baseline or not comparable, 5 inconclusive, 6 invalid (load generator or noisy
    host), 7 a server failed.
    """
    from batchtune.cli.arguments.overrides import slo_overrides
    from batchtune.cli.commands.gate.course import CheckFiles, CheckRequest, with_words_of_sides
    from batchtune.cli.commands.gate.paired import run_paired_check
    from batchtune.cli.commands.gate.stored import StoredRequest, run_stored_check

    if baseline is not None and paired:
        raise UsageError("--paired and --baseline exclude each other", hint="give one of the two")
    if baseline is None and (update_baseline or allow_missing or allow_mismatch):
        raise UsageError("a stored baseline has a file", hint="add --baseline baseline.json")
    if force and not update_baseline:
        raise UsageError(
            "--force accepts a worse baseline", hint="add --update-baseline, or leave --force out"
        )
    wanted = CheckRequest(
        scenario=scenario,
        overrides=[*(set_ or []), *slo_overrides(slo)],
        candidate=candidate,
        max_regress=max_regress or [],
        blocks=blocks,
        files=CheckFiles(junit=junit, markdown=markdown, comment=comment, code_quality=code_quality),
        results=results,
        json=json,
        quiet=quiet,
    )
    with with_words_of_sides(wanted, sides) as asked:
        if baseline is None:
            return run_paired_check(asked)
        stored = StoredRequest(
            path=baseline,
            update=update_baseline,
            force=force,
            allow_missing=allow_missing,
            allow_mismatch=allow_mismatch,
        )
        return run_stored_check(asked, stored)


@checking.command(epilog=examples("history", "history --scenario quickstart --json"))
def history(
    scenario: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the checks of this scenario, by its name.")
    ] = None,
    results: RootOption = Path("results"),
    json: JsonOption = False,
) -> int:
    """List the verdicts of all checks, and when each figure changed.

    Looks for changes in the candidate's figures, over the checks of one scenario on one kind of CPU.
    """
    from batchtune.cli.commands.gate.stored import run_history

    return run_history(results, scenario=scenario, json=json)
