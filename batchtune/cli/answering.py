"""Options of the commands that read a kept run, or all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from batchtune.cli.arguments.options import (
    ConcurrencyOption,
    Dialect,
    JsonOption,
    ParameterOption,
    QuietOption,
    RateOption,
    RootOption,
    Routing,
    RunArgument,
    TableFormat,
    WhyOption,
    examples,
    flag,
    option,
    takes_slo,
)
from batchtune.errors import UsageError

reading = typer.Typer()


@reading.command(
    epilog=examples(
        "recommend --slo-p95 20ms",
        "recommend --slo-p95 20ms --format triton --write config.pbtxt",
        "recommend results/quickstart/20261121T205903Z-2fda2e --json",
    )
)
@takes_slo
def recommend(
    *,
    slo: dict[str, str],
    run: RunArgument = None,
    format_: Annotated[
        Dialect | None,
        flag(
            "The format of the parameters, for --write or below the answer. Default: that of the server that was "
            "measured.",
            "--format",
        ),
    ] = None,
    write: Annotated[
        Path | None,
        option(
            "FILE",
            "Also write the parameters to FILE; for several models, one file each and a list in its folder.",
        ),
    ] = None,
    results: RootOption = Path("results"),
    why: WhyOption = False,
    json: JsonOption = False,
) -> int:
    """Recommend what to deploy for an SLO from a finished run."""
    from batchtune.cli.commands.run_recommend import run_recommend

    if write == Path("-"):
        raise UsageError(
            "--write: expected a file; was -",
            hint="give a file name; --format prints the parameters on stdout",
        )
    return run_recommend(run, slo, dialect=format_, write=write, results=results, json=json, why=why)


@reading.command(
    epilog=examples(
        "simulate --set max_batch_size=16,32,64 --set batch_timeout_micros=0,2000 --rate 500",
        "simulate --concurrency 1:64:x2",
    )
)
def simulate(
    run: RunArgument = None,
    set_: ParameterOption = None,
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    results: RootOption = Path("results"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Predict other settings or loads from a finished run.

    Measures nothing. A simulator of the server (the twin) is calibrated from the run's trials. Without --set it
    simulates the recommended configuration; without --rate and --concurrency, the scenario's own load or the capacity
    that was found. Exit code 5: its predictions are too inaccurate for this server.
    """
    from batchtune.cli.commands.ask_twin import run_simulate

    return run_simulate(
        run, settings=set_ or [], rate=rate, concurrency=concurrency, results=results, json=json, quiet=quiet
    )


@reading.command(
    epilog=examples(
        "plan --rate 10000 --slo-p95 20ms",
        "plan --rate 10k/s --routing least_loaded --set max_batch_size=64",
        "plan --rate 1M --failing 5%",
    )
)
@takes_slo
def plan(
    *,
    slo: dict[str, str],
    run: RunArgument = None,
    rate: Annotated[str | None, option("R", "Requests/s of the whole fleet, such as 10000 or 10k/s.")] = None,
    set_: ParameterOption = None,
    routing: Annotated[Routing, typer.Option(help="How requests are distributed.")] = "round_robin",
    failing: Annotated[
        str | None, option("N|N%", "Replicas that may be down at once while the others meet every limit.")
    ] = None,
    results: RootOption = Path("results"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Compute how many replicas a target rate needs.

    Each replica is a server like the one that the run measured, with the recommended parameters or those of --set, at
    no more than 90 % of its saturation. Exit code 5: the predictions are too inaccurate for this server.
    """
    from batchtune.cli.commands.ask_twin import run_plan

    return run_plan(
        run,
        rate=rate,
        limits=slo,
        settings=set_ or [],
        routing=routing,
        failing=failing,
        results=results,
        json=json,
        quiet=quiet,
    )


@reading.command(epilog=examples("runs", "runs --results results/quickstart --json"))
def runs(*, results: RootOption = Path("results"), json: JsonOption = False) -> int:
    """List the saved runs, the newest first."""
    from batchtune.cli.commands.report import run_runs

    return run_runs(results, json=json)


@reading.command(epilog=examples("trials --sort p95", "trials --csv > trials.csv"))
def trials(
    run: RunArgument = None,
    sort: Annotated[
        str | None, option("COLUMN", "p95, throughput, or a column of --csv; best first.")
    ] = None,
    csv: Annotated[bool, flag("Print every column as CSV.", "--csv")] = False,
    markdown: Annotated[bool, flag("Print the table as Markdown.", "--markdown")] = False,
    parquet: Annotated[bool, flag("Print every column as Parquet, for a file.", "--parquet")] = False,
    json: JsonOption = False,
    results: RootOption = Path("results"),
) -> int:
    """Show the trials of a run as a table."""
    from batchtune.cli.commands.report import run_trials

    wanted = {"csv": csv, "markdown": markdown, "parquet": parquet, "json": json}
    asked: list[TableFormat] = [name for name in get_args(TableFormat) if wanted.get(name)]
    if len(asked) > 1:
        formats = " and ".join(f"--{name}" for name in asked)
        raise UsageError(f"{formats} exclude each other", hint="give one of them")
    return run_trials(run, sort=sort, output=asked[0] if asked else "table", results=results)


@reading.command(epilog=examples("report", "report results/quickstart --output quickstart.html"))
def report(
    run: RunArgument = None,
    output: Annotated[
        Path | None, option("FILE", "The file to write. Default: report.html of the run.")
    ] = None,
    results: RootOption = Path("results"),
) -> int:
    """Write a run as one HTML page: answers first, then figures."""
    from batchtune.cli.commands.report import run_report

    return run_report(run, output=output, results=results)
