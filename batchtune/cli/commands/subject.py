"""What do `sweep`, `load` and `compare` run: the scenario that they are given, or the one that a bare model makes?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from batchtune.archive.run import SCENARIO
from batchtune.batching.reading import read_batching_file
from batchtune.cli.arguments.batching_file import with_file
from batchtune.cli.arguments.load_request import (
    LoadRequest,
    loop_overrides,
    refuse_both,
    refuse_range,
    split_settings,
)
from batchtune.cli.arguments.subject import kind_of, scenario_source
from batchtune.cli.commands.model_scenario import (
    Command,
    LookedAt,
    inputs_of,
    look_at,
    look_at_running,
    loop_of_model,
    shortage_of,
    speed_of,
    wants_of,
)
from batchtune.errors import UsageError
from batchtune.report.live import sweep_view
from batchtune.scenario.examples import server_scenario
from batchtune.scenario.reader import ScenarioText, parse_scenario, unchecked_scenario
from batchtune.target.address import answering_at, attachable, how_to_attach

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Where the scenario is read, and what to lay over it."""

    source: Path | ScenarioText
    overrides: list[str]


def subject_of_sweep(
    argument: str,
    overrides: Sequence[str],
    *,
    rate: str | None,
    concurrency: str | None,
    batching_file: Path | None = None,
    server: str | None = None,
    resume: Path | None,
    quiet: bool,
) -> Subject:
    """The scenario of a sweep; with `server` that of a server's preset, for the app that is the argument.

    Raises:
        UsageError: neither a scenario nor a model; a server that runs already.
        TargetError: a model that does not serve.
    """
    if server is not None:
        text = ScenarioText(text=server_scenario(server, argument), source=f"--server {server}")
        loop = loop_overrides(unchecked_scenario(text).get("load", {}), rate=rate, concurrency=concurrency)
        return _with_file(Subject(source=text, overrides=[*overrides, *loop]), batching_file, searched=True)
    if resume is not None and kind_of(argument) != "scenario":
        raise UsageError(
            "--resume goes on with the scenario of the run, not with a model",
            hint=f"batchtune sweep {resume / SCENARIO} --resume {resume}",
        )
    _check_file(batching_file)
    subject = _subject(argument, overrides, command="sweep", rate=rate, concurrency=concurrency, quiet=quiet)
    return _with_file(subject, batching_file, searched=True)


def subject_of_comparison(
    argument: str,
    overrides: Sequence[str],
    *,
    rate: str | None,
    concurrency: str | None,
    no_batching: bool,
    batching_file: Path | None = None,
    quiet: bool,
) -> Subject:
    """The scenario of a comparison; a bare model has no variants but with and without batching.

    Raises:
        UsageError: as `subject_of_sweep`; a model without `--no-batching`, or a scenario with it.
        TargetError: a model that does not serve.
    """
    is_scenario = kind_of(argument) == "scenario"
    if is_scenario and no_batching:
        raise UsageError(
            "--no-batching is for a model alone; a scenario names its variants",
            hint="add to its variants: no_batching: {fixed: {enable_batching: false}}",
        )
    if kind_of(argument) == "model" and not no_batching:
        raise UsageError(
            f"{argument}: a model alone has no variants",
            hint="give --no-batching to compare with and without batching, or a scenario with variants",
        )
    _check_file(batching_file)
    subject = _subject(
        argument, overrides, command="compare", rate=rate, concurrency=concurrency, quiet=quiet
    )
    return _with_file(subject, batching_file, searched=False)


def subject_of_load(argument: str, wanted: LoadRequest, *, quiet: bool) -> LoadRequest:
    """The request with its scenario; that of an address names the server that is loaded.

    Raises:
        UsageError: neither a scenario, nor a model, nor an address.
        TargetError: a model that does not serve, or a server that does not answer.
    """
    kind = kind_of(argument)
    if kind == "scenario":
        return replace(wanted, scenario=scenario_source(argument))
    if wanted.rest_url or wanted.grpc_url:
        raise UsageError(
            f"{argument}: --rest-url and --grpc-url go with a scenario",
            hint="give the address in the argument's place: batchtune load HOST:PORT/MODEL",
        )
    refuse_both(rate=wanted.rate, concurrency=wanted.concurrency)
    _check_file(wanted.batching_parameters_file)
    _, overrides = split_settings(wanted.overrides)
    overrides += loop_of_model(overrides, command="load", rate=wanted.rate, concurrency=wanted.concurrency)
    if kind == "model":
        looked = looked_at(
            argument,
            lambda say: look_at(argument, overrides, command="load", say=say, batched=not wanted.no_batching),
            quiet=quiet,
        )
        return replace(wanted, scenario=looked.text(argument))
    address = answering_at(argument)
    looked = looked_at(argument, lambda _say: look_at_running(address, overrides), quiet=quiet)
    return replace(
        wanted, scenario=looked.text(argument), rest_url=address.rest_url, grpc_url=address.grpc_url
    )


def _check_file(batching_file: Path | None) -> None:
    """A mistake in the file is told before a model is looked at."""
    if batching_file is not None:
        read_batching_file(batching_file)


def _with_file(subject: Subject, batching_file: Path | None, *, searched: bool) -> Subject:
    if batching_file is None:
        return subject
    source = with_file(subject.source, subject.overrides, batching_file, searched=searched)
    return Subject(source=source, overrides=[])


def _subject(
    argument: str,
    overrides: Sequence[str],
    *,
    command: Command,
    rate: str | None,
    concurrency: str | None,
    quiet: bool,
) -> Subject:
    refuse_both(rate=rate, concurrency=concurrency)
    refuse_range(rate=rate, concurrency=concurrency)
    kind = kind_of(argument)
    if kind == "address":
        return _attached(
            argument, overrides, command=command, rate=rate, concurrency=concurrency, quiet=quiet
        )
    if kind == "scenario":
        source = scenario_source(argument)
        load = unchecked_scenario(source, overrides=overrides).get("load")
        loop = loop_overrides(load if isinstance(load, dict) else {}, rate=rate, concurrency=concurrency)
        return Subject(source=source, overrides=[*overrides, *loop])
    loop = loop_of_model(overrides, command=command, rate=rate, concurrency=concurrency)
    laid_over = [*overrides, *loop]
    looked = looked_at(
        argument,
        lambda say: look_at(argument, laid_over, command=command, say=say),
        quiet=quiet,
        command=command,
    )
    return Subject(source=looked.text(argument), overrides=[])


def _attached(
    argument: str,
    overrides: Sequence[str],
    *,
    command: Command,
    rate: str | None,
    concurrency: str | None,
    quiet: bool,
) -> Subject:
    """The sweep of a server that runs, and that takes parameters through its address."""
    if command != "sweep":
        raise UsageError(
            f"{argument}: a {command} launches its own server",
            hint=f"`batchtune load {argument}` measures it as it is; `batchtune {command} MODEL_DIR` tries others",
        )
    address = answering_at(argument)
    target = attachable(address)
    if target is None:
        raise UsageError(
            f"{argument}: this server takes no parameters through its address",
            hint=f"`batchtune load {argument}` measures it as it is; {how_to_attach(address)}",
        )
    laid_over = [*overrides, *loop_of_model(overrides, command=command, rate=rate, concurrency=concurrency)]
    looked = looked_at(
        argument,
        lambda _say: look_at_running(address, laid_over, command="sweep", target=target),
        quiet=quiet,
        command=command,
    )
    return Subject(source=looked.text(argument), overrides=[])


def looked_at(
    argument: str,
    look: Callable[[Callable[[str], None]], LookedAt],
    *,
    quiet: bool,
    command: Command = "load",
) -> LookedAt:
    """The model, with what was found and guessed said on stderr."""
    with sweep_view(quiet=quiet) as view:
        try:
            looked = look(view.event)
        except KeyboardInterrupt:
            print("interrupted before the first trial", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        view.event(f"{inputs_of(looked.signature)}; {speed_of(looked.tries)}")
        for note in looked.notes:
            view.event(note)
        if command == "sweep":
            scenario = parse_scenario(looked.text(argument).text, source=argument)
            view.event(wants_of(scenario))
            shortage = shortage_of(scenario, looked.tries)
            if shortage is not None:
                view.event(shortage)
    return looked
