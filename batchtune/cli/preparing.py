"""Options of the commands that come before the first measurement, or serve without one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from batchtune.cli.arguments.options import (
    JsonOption,
    LoadRequest,
    QuietOption,
    RootOption,
    ServerOption,
    examples,
    flag,
    option,
    takes_load,
)
from batchtune.errors import UsageError

CiHost = Literal["github", "gitlab"]
preparing = typer.Typer()


@preparing.command(
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
        CiHost | None, flag("Write a job that checks every change by this scenario.", "--ci")
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
    quiet: QuietOption = False,
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
        _refuse_idle(
            {"--example": example, **idle},
            "--ci",
            hint="leave it out: the job checks by what the scenario says",
        )
        from batchtune.cli.commands.init_model import run_init_ci

        return run_init_ci(ci, name, output=write)
    if server is not None:
        others = [override for override in wanted.overrides if override not in slo]
        idle = {"--example": example, "--rest, --rows, --shape and --range": others, "--check": check}
        _refuse_idle(idle, "--server", hint="write it into the scenario")
        from batchtune.cli.commands.init_model import run_init_server

        return run_init_server(server, name, wanted, write=write)
    if name is None or example:
        idle |= {"--write": write if name is None else None}
        hint = (
            "name a model: batchtune init ./my_model" if name is None else "write it into the example's file"
        )
        _refuse_idle(idle, "the list of examples" if name is None else "an example", hint=hint)
        from batchtune.cli.commands.init_model import run_init

        return run_init(name, output=write)
    from batchtune.cli.commands.init_model import run_init_model

    return run_init_model(name, wanted, write=write, check=check, quiet=quiet)


def _refuse_idle(given: Mapping[str, object], beside: str, *, hint: str) -> None:
    """Raise UsageError where one of the options was given, because beside `beside` it would change nothing.

    `given`: option -> its value. `hint`: the error's.
    """
    for name, value in given.items():
        if value:
            raise UsageError(f"{name}: not with {beside}", hint=hint)


@preparing.command(epilog=examples("doctor", "doctor --json"))
def doctor(
    results: RootOption = Path("results"), json: JsonOption = False, quiet: QuietOption = False
) -> int:
    """Check what works on this machine, and how to fix it.

    Exit code 7: no sweep can run: the simulator does not load, or results cannot be written.
    """
    from batchtune.cli.commands.doctor import run_doctor

    return run_doctor(results=results, json=json, quiet=quiet)


@preparing.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    epilog=examples("serve --model_base_path=/models/m --rest_api_port=8501"),
)
def serve(context: typer.Context) -> None:
    """Run the bundled server with tensorflow_model_server's flags."""
    os.execv(sys.executable, [sys.executable, "-m", "batchtune.server", *context.args])
