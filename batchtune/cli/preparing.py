"""Which words do the commands take that come before the first measurement, or serve without one?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from batchtune.cli.arguments.options import JsonOption, QuietOption, RootOption, examples

preparing = typer.Typer()


@preparing.command(epilog=examples("init --example", "init --example quickstart"))
def init(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A bundled example.")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Write the bundled example NAME; without NAME, list them.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to. Default: NAME.yaml; -: stdout."),
    ] = None,
) -> None:
    """Write a scenario to begin with."""
    from batchtune.cli.commands.init import run_init

    raise typer.Exit(run_init(name, example=example, output=output))


@preparing.command(epilog=examples("doctor", "doctor --json"))
def doctor(
    results: RootOption = Path("results"), json: JsonOption = False, quiet: QuietOption = False
) -> None:
    """Say what is installed and usable here, and what to do about the rest.

    Ends with 7 when something is broken without which the quickstart cannot be swept: no framework for its model, no
    simulator, no room for results.
    """
    from batchtune.cli.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(results=results, json=json, quiet=quiet))


@preparing.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    epilog=examples("serve --model_base_path=/models/m --rest_api_port=8501"),
)
def serve(context: typer.Context) -> None:
    """Run the bundled server with tensorflow_model_server's flags."""
    os.execv(sys.executable, [sys.executable, "-m", "batchtune.server", *context.args])
