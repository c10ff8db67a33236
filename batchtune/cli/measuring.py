"""Options of the commands that measure, or guard what was measured: sweep, load, compare, noise, check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from batchtune.cli.arguments.options import (
    CheckRequest,
    ConcurrencyOption,
    JsonOption,
    LoadRequest,
    LoadSetOption,
    MaxRegressOption,
    QuietOption,
    RateOption,
    RootOption,
    ScenarioArgument,
    ServerOption,
    SetOption,
    SideWords,
    SubjectArgument,
    WhyOption,
    examples,
    flag,
    option,
    takes,
    takes_load,
    takes_sides,
    takes_slo,
)
from batchtune.errors import UsageError

measuring = typer.Typer()


@measuring.command(
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
    results: RootOption = Path("results"),
    resume: Annotated[Path | None, option("RUN", "Continue this run.")] = None,
    optuna_storage: Annotated[
        str | None, option("URL", "Export the search as an Optuna study: sqlite:///FILE.")
    ] = None,
    why: WhyOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
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
        require_writable(results)
    if budget is not None:
        positive_s("--budget", budget, units=("s", "m"))
        wanted = replace(wanted, overrides=[*wanted.overrides, f"search.budget.time={budget}"])
    asked = subject_of_sweep(subject, wanted, server=server, resume=resume, quiet=quiet)
    of_one = {"--rate": wanted.rate, "--concurrency": wanted.concurrency, "--optuna-storage": optuna_storage}
    return run_sweep(
        asked.scenario,
        asked.overrides,
        results=results,
        resume=resume,
        optuna_storage=optuna_storage,
        why=why,
        json=json,
        quiet=quiet,
        of_one=[name for name, value in of_one.items() if value is not None],
    )


@measuring.command(
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
    results: RootOption = Path("results"),
    no_save: Annotated[bool, flag("Save nothing under --results.", "--no-save")] = False,
    json: JsonOption = False,
    csv: Annotated[bool, flag("Print the points as CSV, as `trials --csv` does.", "--csv")] = False,
    quiet: QuietOption = False,
) -> int:
    """Load-test a scenario, a model, or a running server.

    Give a running server as HOST:PORT/MODEL. Measures one point or a range, and saves each under --results. --rate
    keeps the pattern of the scenario's arrivals. Ctrl-C keeps the part of a point that was measured, where it lasted a
    second, without a PASS. Exit code: 0 the SLO and every --gate are met, or there is none; 3 one
    is missed; 5 no verdict; 6 no point is valid (the load generator was the limit, or the host stayed noisy through two
    repeats); 7 a point failed. In a range the best point decides.
    """
    if json and csv:
        raise UsageError("--json and --csv exclude each other", hint="give one of the two")
    from batchtune.archive.run import require_writable
    from batchtune.check.load_limits import parse_limits
    from batchtune.cli.commands.model_scenario import subject_of_load
    from batchtune.cli.commands.run_load import run_load

    if not no_save:
        require_writable(results)
    wanted = replace(wanted, no_batching=no_batching, rest_url=rest_url, grpc_url=grpc_url)
    parse_limits(gate or [])  # a mistake is reported before a model is launched
    wanted = subject_of_load(subject, wanted, server=server, quiet=quiet)
    output: Literal["json", "csv", "table"] = "json" if json else "csv" if csv else "table"
    return run_load(
        wanted, output=output, results=None if no_save else results, quiet=quiet, gates=gate or []
    )


@measuring.command(
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
    results: RootOption = Path("results"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Compare variants, or a model with and without batching.

    Runs them side by side, and reports the factor between variants with its confidence interval, and the bottleneck of
    each. Exit code: 0 compared; 6 invalid (the load generator was the limit, or the host stayed noisy in every run of a
    variant). With --max-regress also: 1 a variant regressed, 3 one misses the SLO, 5 no verdict.
    """
    from batchtune.archive.run import require_writable
    from batchtune.cli.commands.compare import run_compare
    from batchtune.cli.commands.model_scenario import subject_of_comparison

    require_writable(results)
    wanted = replace(wanted, no_batching=no_batching)
    asked = subject_of_comparison(subject, wanted, quiet=quiet)
    return run_compare(
        asked.scenario,
        asked.overrides,
        baseline=baseline,
        blocks=blocks,
        max_regress=max_regress or [],
        results=results,
        json=json,
        quiet=quiet,
    )


@measuring.command(epilog=examples("noise scenarios/quickstart.yaml --blocks 6"))
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

    return run_noise(scenario, set_ or [], blocks=blocks, results=results, json=json, quiet=quiet)


@measuring.command(epilog=examples("restore results/triton-attached/20261121T205903Z-2fda2e"))
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


@measuring.command(
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
    from batchtune.cli.commands.run_check import run_paired_check, run_stored_check

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
        if asked.baseline is None:
            return run_paired_check(asked)
        return run_stored_check(asked, asked.baseline)


@measuring.command(epilog=examples("history", "history --scenario quickstart --json"))
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
