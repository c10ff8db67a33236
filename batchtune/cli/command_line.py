"""Every command with its options: those before the first measurement, those that measure, those that read a run."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from batchtune.cli.arguments.options import (
    CheckRequest,
    ConcurrencyOption,
    Dialect,
    JsonOption,
    LoadRequest,
    LoadSetOption,
    MaxRegressOption,
    ParameterOption,
    QuietOption,
    RateOption,
    RootOption,
    Routing,
    RunArgument,
    ScenarioArgument,
    ServerOption,
    SetOption,
    SideWords,
    SubjectArgument,
    TableFormat,
    WhyOption,
    examples,
    flag,
    option,
    refuse,
    takes,
    takes_load,
    takes_sides,
    takes_slo,
)
from batchtune.errors import UsageError

commands = typer.Typer()


@commands.command(
    epilog=examples(
        "init ./my_model --slo-p95 20ms --write my_model.yaml",
        "init model.onnx --check",
        "init my_app.py:app --server litserve --write my_app.yaml",
        "init http://127.0.0.1:8000/score --write score.yaml",
        "init --example quickstart",
        "init --ci github scenario.yaml",
    )
)
@takes_load(set_=None)
def init(
    *,
    wanted: LoadRequest,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|HOST:PORT/MODEL|NAME",
            help="A SavedModel directory, a .onnx, .pt2 or .pt file, a sample model; a running server; with --example "
            "a bundled scenario; with --ci the scenario to check by.",
        ),
    ] = None,
    example: Annotated[
        bool, flag("Write the bundled example NAME; without NAME, list them.", "--example")
    ] = False,
    ci: Annotated[
        Literal["github", "gitlab"] | None,
        flag("Write a job that checks every change by this scenario.", "--ci"),
    ] = None,
    server: ServerOption = None,
    write: Annotated[
        Path | None,
        option(
            "FILE",
            "The file to write; -: stdout. Default: stdout, for an example NAME.yaml.",
            "--write",
            "--output",
            "-o",
        ),
    ] = None,
    check: Annotated[
        bool, flag("Only send 1, 2 and 8 rows to the model. Exit code 7: it does not answer.", "--check")
    ] = False,
) -> int:
    """Write a scenario for a model, a bundled example, or a CI job.

    Launches the model and sends a few requests: what its signature leaves open is guessed, tried and reported.
    """
    slo = [override for override in wanted.overrides if override.startswith("slo.")]
    idle: dict[str, object] = {
        "--slo-…": slo,
        "--rest, --rows, --shape and --range": wanted.overrides,
        "--rate": wanted.rate,
        "--concurrency": wanted.concurrency,
        "--check": check,
    }
    if ci is not None:
        refuse(
            {"--example": example, **idle},
            "not with --ci",
            hint="leave it out: the job checks by what the scenario says",
        )
        from batchtune.cli.commands.init_model import run_init_ci

        return run_init_ci(ci, name, output=write)
    if server is not None:
        others = [override for override in wanted.overrides if override not in slo]
        idle = {"--example": example, "--rest, --rows, --shape and --range": others, "--check": check}
        refuse(idle, "not with --server", hint="write it into the scenario")
        from batchtune.cli.commands.init_model import run_init_server

        return run_init_server(server, name, wanted, write=write)
    if name is None or example:
        idle |= {"--write": write if name is None else None}
        hint = (
            "name a model: batchtune init ./my_model" if name is None else "write it into the example's file"
        )
        refuse(idle, f"not with {'the list of examples' if name is None else 'an example'}", hint=hint)
        from batchtune.cli.commands.init_model import run_init

        return run_init(name, output=write)
    from batchtune.cli.commands.init_model import run_init_model

    return run_init_model(name, wanted, write=write, check=check)


@commands.command(epilog=examples("doctor", "doctor --json"))
def doctor(
    results: RootOption = Path("results"), json: JsonOption = False, quiet: QuietOption = False
) -> int:
    """Check what works on this machine, and how to fix it.

    Exit code 7: no sweep can run: the simulator does not load, or results cannot be written.
    """
    from batchtune.cli.commands.doctor import run_doctor

    return run_doctor(results=results, json=json, quiet=quiet)


@commands.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    epilog=examples("serve --model_base_path=/models/m --rest_api_port=8501"),
)
def serve(context: typer.Context) -> None:
    """Run the bundled server with tensorflow_model_server's flags."""
    os.execv(sys.executable, [sys.executable, "-m", "batchtune.server", *context.args])


# Commands that measure, or guard what was measured.


@commands.command(
    epilog=examples(
        "sweep ./my_model --slo-p95 20ms",
        "sweep model.onnx --slo-p95 20ms --concurrency 32 --rest --shape ids=128",
        "sweep my_app.py:app --server litserve --slo-p95 50ms",
        "sweep scenarios/quickstart.yaml --set search.budget.time=30s --set slo.p95=30ms",
        "sweep scenarios/triton-attached.yaml --batching-parameters-file config.pbtxt",
        "sweep scenarios/quickstart.yaml --resume results/quickstart/20261121T205903Z-2fda2e",
        "sweep scenarios/quickstart.yaml --set search.parallel=4",
        "sweep scenarios/quickstart.yaml --optuna-storage sqlite:///study.db",
    )
)
@takes_load()
def sweep(
    *,
    wanted: LoadRequest,
    subject: SubjectArgument,
    budget: Annotated[str | None, option("DURATION", "Total time of the sweep, such as 90s.")] = None,
    server: ServerOption = None,
    resume: Annotated[Path | None, option("RUN", "Continue this run.")] = None,
    optuna_storage: Annotated[
        str | None, option("URL", "Export the search as an Optuna study: sqlite:///FILE.")
    ] = None,
    why: WhyOption = False,
) -> int:
    """Find the best batching parameters under load.

    For a model alone, sweep first sends a few requests: what the signature leaves open is guessed, tried and reported.
    Without --rate and --concurrency, sweep looks for the highest rate within the SLO. Exit code: 0 confirmed, 3 nothing
    meets the SLO, 5 not confirmed, 7 the server failed.
    """
    from batchtune.archive.run import require_writable
    from batchtune.cli.arguments.overrides import positive_s
    from batchtune.cli.commands.model_scenario import subject_of_sweep
    from batchtune.cli.commands.run_sweep import run_sweep

    if resume is None:
        require_writable(wanted.results)
    if budget is not None:
        positive_s("--budget", budget, units=("s", "m"))
        wanted = replace(wanted, overrides=[*wanted.overrides, f"search.budget.time={budget}"])
    wanted = subject_of_sweep(subject, wanted, server=server, resume=resume)
    return run_sweep(wanted, resume=resume, optuna_storage=optuna_storage, why=why)


@commands.command(
    epilog=examples(
        "load ./my_model --concurrency 1:64:x2 --slo-p95 20ms",
        "load 127.0.0.1:8501/my_model --rate 100:1000:100",
        "load scenarios/quickstart.yaml --set max_batch_size=8 --slo-p99 50ms",
        "load scenarios/quickstart.yaml --batching-parameters-file batching_parameters.txt",
        "load scenarios/quickstart.yaml --grpc-url 127.0.0.1:8500 --json",
        "load 10.0.0.7:8500/my_model --rate 500k --set load.fleet.ray=ray://10.0.0.1:10001",
    )
)
@takes_load(RateOption, ConcurrencyOption, set_=LoadSetOption)
def load(
    *,
    wanted: LoadRequest,
    subject: SubjectArgument,
    server: ServerOption = None,
    no_batching: Annotated[bool, flag("Launch the server without batching.", "--no-batching")] = False,
    rest_url: Annotated[
        str | None,
        option(
            "URL",
            "Load this running server by REST; nothing is launched. With --grpc-url as well, requests use the "
            "scenario's protocol, and REST gives the server's statistics.",
        ),
    ] = None,
    grpc_url: Annotated[
        str | None, option("HOST:PORT", "Load this running server by gRPC; nothing is launched.")
    ] = None,
    gate: Annotated[
        list[str] | None,
        option(
            "FIGURE=LIMIT,…",
            "Limits besides the SLO: throughput at least; p50, p95, p99, errors, cpu, gpu (per request), of streams "
            "ttft_p95, itl_p99 and the like at most; e.g. throughput=500/s,cpu=200us.",
        ),
    ] = None,
    no_save: Annotated[bool, flag("Save nothing under --results.", "--no-save")] = False,
    csv: Annotated[bool, flag("Print the points as CSV, as `trials --csv` does.", "--csv")] = False,
) -> int:
    """Load-test a scenario, a model, or a running server.

    Give a running server as HOST:PORT/MODEL. Measures one point or a range, and saves each under --results. --rate
    keeps the pattern of the scenario's arrivals. Ctrl-C keeps the part of a point that was measured, where it lasted a
    second, without a PASS. Exit code: 0 the SLO and every --gate are met, or there is none; 3 one
    is missed; 5 no verdict; 6 no point is valid (the load generator was the limit, or the host stayed noisy through two
    repeats); 7 a point failed. In a range the best point decides.
    """
    if wanted.json and csv:
        raise UsageError("--json and --csv exclude each other", hint="give one of the two")
    from batchtune.archive.run import require_writable
    from batchtune.check.load_limits import parse_limits
    from batchtune.cli.commands.model_scenario import subject_of_load
    from batchtune.cli.commands.run_load import run_load

    wanted = replace(wanted, no_batching=no_batching, rest_url=rest_url, grpc_url=grpc_url)
    if no_save:
        wanted = replace(wanted, results=None)
    require_writable(wanted.results)
    parse_limits(gate or [])  # a mistake is reported before a model is launched
    return run_load(subject_of_load(subject, wanted, server=server), csv=csv, gates=gate or [])


@commands.command(
    epilog=examples(
        "compare ./my_model --no-batching --concurrency 32",
        "compare scenarios/imdb-benchmark.yaml --blocks 6",
        "compare scenarios/imdb-benchmark.yaml --baseline grpc_5_rows --json",
        "compare scenarios/imdb-benchmark.yaml --max-regress p95=5%,throughput=3%",
    )
)
@takes_load()
def compare(
    *,
    wanted: LoadRequest,
    subject: SubjectArgument,
    no_batching: Annotated[
        bool, flag("For a model alone: compare it without and with batching.", "--no-batching")
    ] = False,
    baseline: Annotated[
        str | None, option("NAME", "The variant to compare with. Default: the first.")
    ] = None,
    blocks: Annotated[
        int,
        typer.Option(
            min=1,
            max=200,
            help="Runs of each variant, side by side. An interval needs 6; prefer an even number.",
        ),
    ] = 10,
    max_regress: MaxRegressOption = None,
) -> int:
    """Compare variants, or a model with and without batching.

    Runs them side by side, and reports the factor between variants with its confidence interval, and the bottleneck of
    each. Exit code: 0 compared; 6 invalid (the load generator was the limit, or the host stayed noisy in every run of a
    variant). With --max-regress also: 1 a variant regressed, 3 one misses the SLO, 5 no verdict.
    """
    from batchtune.archive.run import require_writable
    from batchtune.cli.commands.compare import run_compare
    from batchtune.cli.commands.model_scenario import subject_of_comparison

    require_writable(wanted.results)
    wanted = subject_of_comparison(subject, replace(wanted, no_batching=no_batching))
    return run_compare(wanted, baseline=baseline, blocks=blocks, max_regress=max_regress or [])


@commands.command(epilog=examples("noise scenarios/quickstart.yaml --blocks 6"))
def noise(
    scenario: ScenarioArgument,
    blocks: Annotated[
        int, typer.Option(min=6, max=200, help="Pairs of runs of the scenario's own configuration.")
    ] = 10,
    set_: SetOption = None,
    results: RootOption = Path("results"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Report the smallest difference this machine can detect.

    Compares the scenario's configuration with itself. Exit code 6: the load generator was the limit, or the host stayed
    noisy in every run.
    """
    from batchtune.cli.commands.compare import run_noise

    overrides = set_ or []
    wanted = LoadRequest(scenario=scenario, overrides=overrides, results=results, json=json, quiet=quiet)
    return run_noise(wanted, blocks=blocks)


@commands.command(epilog=examples("restore results/triton-attached/20261121T205903Z-2fda2e"))
def restore(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run that was killed.")],
    discard: Annotated[
        bool,
        typer.Option("--discard", help="Leave the server as it is, and forget what it had before the run."),
    ] = False,
) -> int:
    """Restore a running server after a killed sweep.

    A sweep restores the configuration itself at its end, after Ctrl-C and when it fails; after a kill, use this
    command. A run saves what the server had before the first change. For a target of kind command, target.restore is
    run. Exit code 7: the server is gone, or refuses the configuration.
    """
    from batchtune.cli.session import run_restore

    return run_restore(run, discard=discard)


@commands.command(
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
@takes("wanted", CheckRequest)
def check(
    *, slo: dict[str, str], sides: dict[str, SideWords], wanted: CheckRequest, set_: SetOption = None
) -> int:
    """Test whether a candidate is worse than a baseline.

    Launches both side by side and loads them in turns, in blocks; the first of the scenario's variants is the baseline.
    A check stops as soon as every gate is clear: after about a minute on a quiet host with servers that start in 2 s.
    What looks worse is measured again, in confirmation blocks with new servers, before it fails. With --baseline, check
    compares with figures stored in a file, by wider margins. Exit code: 0 OK or improved, 1 regressed, 3 the candidate
    misses the SLO, 4 no baseline or not comparable, 5 inconclusive, 6 invalid (load generator or noisy host), 7 a
    server failed.
    """
    from batchtune.cli.arguments.overrides import slo_overrides
    from batchtune.cli.commands.check_course import with_words_of_sides
    from batchtune.cli.commands.run_check import run_check

    if wanted.baseline is not None and wanted.paired:
        raise UsageError("--paired and --baseline exclude each other", hint="give one of the two")
    if wanted.baseline is None and (wanted.update_baseline or wanted.allow_missing or wanted.allow_mismatch):
        raise UsageError("a stored baseline has a file", hint="add --baseline baseline.json")
    if wanted.force and not wanted.update_baseline:
        raise UsageError(
            "--force accepts a worse baseline", hint="add --update-baseline, or leave --force out"
        )
    wanted = replace(wanted, overrides=[*(set_ or []), *slo_overrides(slo)])
    with with_words_of_sides(wanted, sides) as asked:
        return run_check(asked)


@commands.command(epilog=examples("history", "history --scenario quickstart --json"))
def history(
    scenario: Annotated[str | None, option("NAME", "Only the checks of this scenario, by its name.")] = None,
    results: RootOption = Path("results"),
    json: JsonOption = False,
) -> int:
    """List the verdicts of all checks, and when each figure changed.

    Looks for changes in the candidate's figures, over the checks of one scenario on one kind of CPU.
    """
    from batchtune.cli.commands.run_check import run_history

    return run_history(results, scenario=scenario, json=json)


# Commands that read a kept run, or all of them.


@commands.command(
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


@commands.command(
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


@commands.command(
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


@commands.command(epilog=examples("runs", "runs --results results/quickstart --json"))
def runs(*, results: RootOption = Path("results"), json: JsonOption = False) -> int:
    """List the saved runs, the newest first."""
    from batchtune.cli.commands.report import run_runs

    return run_runs(results, json=json)


@commands.command(epilog=examples("trials --sort p95", "trials --csv > trials.csv"))
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


@commands.command(epilog=examples("report", "report results/quickstart --output quickstart.html"))
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
