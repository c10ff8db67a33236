"""Lists the commands.

Nothing heavy is imported here: every command imports the rooms it needs, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from batchtune.cli.answering import reading
from batchtune.cli.arguments.options import examples
from batchtune.cli.checking import checking
from batchtune.cli.measuring import measuring
from batchtune.cli.preparing import preparing
from batchtune.errors import UsageError

REMOVED: Final[Mapping[str, str]] = {
    "plan --exact": "a plan reports its accuracy; leave a margin with --slo-… where the limit is near",
    "plan --exact-time": "leave it out: a plan simulates a pool of 16 replicas at most",
    "plan --fleet": "leave it out: a plan simulates on this machine",
    "plan --profile": "plan for the peak with --rate, and once more for each rate that matters",
    "plan --detect": "leave it out: until they are noticed, dead replicas lose their share of the requests",
    "sweep --strategy": "use --set search.strategy=NAME",
    "sweep --parallel": "use --set search.parallel=N",
    **dict.fromkeys(
        (f"{name} --fleet" for name in ("sweep", "load", "compare", "check")),
        "use --set load.fleet.ray=ADDRESS",
    ),
    **dict.fromkeys(
        (f"{name} --fleet-workers" for name in ("sweep", "load", "compare", "check")),
        "use --set load.fleet.workers=N",
    ),
}
"""Options that earlier versions had, by command and name, each with what to do instead."""


class Commands(TyperGroup):
    """The group of all commands; an option that an earlier version had is refused with a hint at its
    replacement."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind `batchtune`, the command's name first.

        Raises:
            UsageError: an option that no longer exists; the hint says what to use.
        """
        for word in args[1:]:
            hint = REMOVED.get(f"{args[0]} {(option := word.partition('=')[0])}")
            if hint is not None:
                raise UsageError(f"{option}: this option of {args[0]} no longer exists", hint=hint)
        return super().parse_args(ctx, args)


def _end(code: int | None, **_options: object) -> None:
    """Exit with the code that a command returned."""
    raise typer.Exit(code or 0)


app = typer.Typer(
    name="batchtune",
    cls=Commands,
    result_callback=_end,
    help="Find the best batching parameters for a model server, with reason and confidence.",
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
