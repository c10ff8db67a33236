"""Which words does the command line take?

Nothing heavy is imported here: every command imports the rooms it needs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from batchtune.cli.arguments.options import (
    ConcurrencyOption,
    Dialect,
    JsonOption,
    LoadSetOption,
    ParameterOption,
    QuietOption,
    RateOption,
    RootOption,
    Routing,
    RunArgument,
    ScenarioArgument,
    SetOption,
    Strategy,
    TableFormat,
    WhyOption,
    examples,
    takes_slo,
)
from batchtune.errors import UsageError

app = typer.Typer(
    name="batchtune",
    help="Find the batching parameters to serve a model with, say why, and how sure.",
    epilog=examples("sweep scenarios/quickstart.yaml", "recommend --slo-p95 20ms"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    if version:
        from batchtune import __version__

        typer.echo(f"batchtune {__version__}")
        raise typer.Exit


@app.command(
    epilog=examples(
        "sweep scenarios/quickstart.yaml",
        "sweep scenarios/quickstart.yaml --set search.budget.time=30s --set slo.p95=30ms",
        "sweep scenarios/quickstart.yaml --resume results/quickstart/20261121T205903Z-2fda2e",
        "sweep scenarios/quickstart.yaml --optuna-storage sqlite:///study.db",
    )
)
@takes_slo
def sweep(
    *,
    slo: dict[str, str],
    scenario: ScenarioArgument,
    set_: SetOption = None,
    results: RootOption = Path("results"),
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run.")] = None,
    strategy: Annotated[
        Strategy | None, typer.Option("--strategy", help="Replaces the scenario's search.strategy.")
    ] = None,
    optuna_storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Export the trials for optuna-dashboard: journal:///FILE, sqlite:///FILE, …"
        ),
    ] = None,
    why: WhyOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Launch the server, load it, search the parameters, recommend."""
    from batchtune.cli.arguments.slo import slo_overrides
    from batchtune.cli.commands.sweep import run_sweep

    overrides = [
        *(set_ or []),
        *slo_overrides(slo),
        *([] if strategy is None else [f"search.strategy={strategy}"]),
    ]
    raise typer.Exit(
        run_sweep(
            scenario,
            overrides,
            results=results,
            resume=resume,
            optuna_storage=optuna_storage,
            why=why,
            json=json,
            quiet=quiet,
        )
    )


@app.command(
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
        Dialect,
        typer.Option("--format", help="The dialect that --write uses, or that is shown below the statement."),
    ] = "tfserving",
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the parameters there as well.")
    ] = None,
    results: RootOption = Path("results"),
    why: WhyOption = False,
    json: JsonOption = False,
) -> None:
    """Choose from a run what to deploy for this SLO, and say why."""
    from batchtune.cli.commands.recommend import run_recommend

    raise typer.Exit(
        run_recommend(run, slo, dialect=format_, write=write, results=results, json=json, why=why)
    )


@app.command(
    epilog=examples(
        "load scenarios/quickstart.yaml --concurrency 1:64:x2",
        "load scenarios/quickstart.yaml --set max_batch_size=8 --slo-p99 50ms",
        "load scenarios/quickstart.yaml --rate 100:1000:100 --csv",
        "load scenarios/quickstart.yaml --batching-parameters-file batching_parameters.txt",
        "load scenarios/quickstart.yaml --grpc-url 127.0.0.1:8500 --json",
    )
)
@takes_slo
def load(
    *,
    slo: dict[str, str],
    scenario: ScenarioArgument,
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    batching_parameters_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Parameters for the launched server instead of `fixed`."),
    ] = None,
    no_batching: Annotated[
        bool, typer.Option("--no-batching", help="Launch the server without batching.")
    ] = False,
    rest_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Load this running server by REST; nothing is launched. With --grpc-url too the scenario's protocol "
            "is loaded, and REST tells the server's statistics.",
        ),
    ] = None,
    grpc_url: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Load this running server by gRPC; nothing is launched."),
    ] = None,
    set_: LoadSetOption = None,
    results: RootOption = Path("results"),
    no_save: Annotated[bool, typer.Option("--no-save", help="Keep nothing under --results.")] = False,
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV on stdout.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Load-test the scenario's target, or a running server.

    One point, or a range of them; each is kept under --results. --rate keeps the pattern of the scenario's arrivals.
    Ends with 0 when the SLO is kept or there is none, 3 when it is missed, 5 when that cannot be told; of a range the
    best point decides. Ends with 6 when no point is a measurement of the server: the load generator was the limit, or
    the host stayed noisy through two repeats. Ends with 7 when a point failed.
    """
    if json and csv:
        raise UsageError("--json and --csv exclude each other", hint="give one of the two")
    from batchtune.cli.arguments.load_request import LoadRequest
    from batchtune.cli.arguments.slo import slo_overrides
    from batchtune.cli.commands.load import run_load

    wanted = LoadRequest(
        scenario=scenario,
        overrides=[*(set_ or []), *slo_overrides(slo)],
        concurrency=concurrency,
        rate=rate,
        batching_parameters_file=batching_parameters_file,
        no_batching=no_batching,
        rest_url=rest_url,
        grpc_url=grpc_url,
    )
    output: Literal["json", "csv", "table"] = "json" if json else "csv" if csv else "table"
    raise typer.Exit(run_load(wanted, output=output, results=None if no_save else results, quiet=quiet))


@app.command(
    epilog=examples(
        "compare scenarios/imdb-benchmark.yaml --blocks 6",
        "compare scenarios/imdb-benchmark.yaml --baseline grpc_5_rows --json",
    )
)
@takes_slo
def compare(
    *,
    slo: dict[str, str],
    scenario: ScenarioArgument,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="The variant to compare with. Default: the first.")
    ] = None,
    blocks: Annotated[
        int,
        typer.Option(
            min=1,
            max=200,
            help="Runs of each variant, side by side; an interval needs 6, an even number is best.",
        ),
    ] = 10,
    set_: SetOption = None,
    results: RootOption = Path("results"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run the scenario's variants side by side.

    Tells by which factor they differ, how sure that is, and what limits each. Ends with 6 when the load generator was
    the limit, or the host stayed noisy in every run of a variant.
    """
    from batchtune.cli.arguments.slo import slo_overrides
    from batchtune.cli.commands.compare import run_compare

    code = run_compare(
        scenario,
        [*(set_ or []), *slo_overrides(slo)],
        baseline=baseline,
        blocks=blocks,
        results=results,
        json=json,
        quiet=quiet,
    )
    raise typer.Exit(code)


@app.command(epilog=examples("noise scenarios/quickstart.yaml --blocks 6"))
def noise(
    scenario: ScenarioArgument,
    blocks: Annotated[
        int, typer.Option(min=6, max=200, help="Pairs of runs of the scenario's own configuration.")
    ] = 10,
    set_: SetOption = None,
    results: RootOption = Path("results"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """State the smallest change that can be told on this machine.

    The scenario's configuration is compared with itself. Ends with 6 when the load generator was the limit, or the host
    stayed noisy in every run.
    """
    from batchtune.cli.commands.noise import run_noise

    raise typer.Exit(run_noise(scenario, set_ or [], blocks=blocks, results=results, json=json, quiet=quiet))


@app.command(
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
) -> None:
    """Ask the twin of a run what would be; nothing is measured.

    The twin is calibrated from the run's trials. Without --set it simulates the recommended configuration, without
    --rate and --concurrency the scenario's own load, or the capacity that was found. Exit code 5: the twin predicts
    this server too badly.
    """
    from batchtune.cli.commands.simulate import SimulateRequest, run_simulate

    wanted = SimulateRequest(run=run, settings=set_ or [], rate=rate, concurrency=concurrency)
    raise typer.Exit(run_simulate(wanted, results=results, json=json, quiet=quiet))


@app.command(
    epilog=examples(
        "plan --rate 10000 --slo-p95 20ms",
        "plan --rate 10k/s --routing least_loaded --set max_batch_size=64",
    )
)
@takes_slo
def plan(
    *,
    slo: dict[str, str],
    rate: Annotated[
        str, typer.Option(metavar="R", help="Requests/s of the whole fleet, such as 10000 or 10k/s.")
    ],
    run: RunArgument = None,
    set_: ParameterOption = None,
    routing: Annotated[Routing, typer.Option(help="How requests are dealt out.")] = "round_robin",
    results: RootOption = Path("results"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say how many replicas a rate needs within a latency limit.

    Each replica is a server like the one that the run measured, with the recommended parameters or those of --set. No
    replica is planned above 90 % of its saturation. Exit code 5: the twin predicts this server too badly.
    """
    from batchtune.cli.commands.plan import run_plan

    code = run_plan(
        run,
        rate=rate,
        limits=slo,
        settings=set_ or [],
        routing=routing,
        results=results,
        json=json,
        quiet=quiet,
    )
    raise typer.Exit(code)


@app.command(epilog=examples("runs", "runs --results results/quickstart --json"))
def runs(*, results: RootOption = Path("results"), json: JsonOption = False) -> None:
    """List the runs that are kept, the newest first."""
    from batchtune.cli.commands.listing import run_runs

    raise typer.Exit(run_runs(results, json=json))


@app.command(epilog=examples("trials --sort p95", "trials --csv > trials.csv"))
def trials(
    run: RunArgument = None,
    sort: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="p95, throughput, or a column of --csv; best first.")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Every column as CSV.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table for a pull request.")] = False,
    parquet: Annotated[bool, typer.Option("--parquet", help="Every column as Parquet, for a file.")] = False,
    json: JsonOption = False,
    results: RootOption = Path("results"),
) -> None:
    """Show the trials of a run as a table."""
    from batchtune.cli.commands.listing import run_trials

    wanted = {"csv": csv, "markdown": markdown, "parquet": parquet, "json": json}
    asked: list[TableFormat] = [name for name in get_args(TableFormat) if wanted.get(name)]
    if len(asked) > 1:
        formats = " and ".join(f"--{name}" for name in asked)
        raise UsageError(f"{formats} exclude each other", hint="give one of them")
    raise typer.Exit(run_trials(run, sort=sort, output=asked[0] if asked else "table", results=results))


@app.command(epilog=examples("report", "report results/quickstart --output quickstart.html"))
def report(
    run: RunArgument = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page there. Default: report.html of the run."),
    ] = None,
    results: RootOption = Path("results"),
) -> None:
    """Write a sweep as one HTML file to show: what to deploy, what it gains, how sure, and the figures."""
    from batchtune.cli.commands.report import run_report

    raise typer.Exit(run_report(run, output=output, results=results))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    epilog=examples("serve --model_base_path=/models/m --rest_api_port=8501"),
)
def serve(context: typer.Context) -> None:
    """Run the bundled server with tensorflow_model_server's flags."""
    os.execv(sys.executable, [sys.executable, "-m", "batchtune.server", *context.args])
