"""Which commands are there?

Nothing heavy is imported here: every command imports the rooms it needs, so that `--help` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from batchtune.cli.arguments.options import examples
from batchtune.cli.checking import checking
from batchtune.cli.measuring import measuring
from batchtune.cli.preparing import preparing
from batchtune.cli.reading import reading

app = typer.Typer(
    name="batchtune",
    help="Find the batching parameters to serve a model with, say why, and how sure.",
    epilog=examples("init --example quickstart", "sweep quickstart.yaml", "recommend --slo-p95 20ms"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for commands in (preparing, measuring, checking, reading):
    app.add_typer(commands)


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
