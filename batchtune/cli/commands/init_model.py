"""`batchtune init MODEL`: sends the model requests and writes a commented scenario for it; `--check` only sends."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from batchtune.cli.arguments.load_request import LoadRequest, refuse_range
from batchtune.cli.arguments.overrides import kind_of
from batchtune.cli.commands.doctor import watch_host
from batchtune.cli.commands.model_scenario import (
    LookedAt,
    inputs_of,
    look,
    speed_of,
    wants_of,
)
from batchtune.errors import UsageError
from batchtune.load.first_tries import FirstTries
from batchtune.report.live_view import sweep_view
from batchtune.scenario.examples import Example, example_names, read_example, server_scenario
from batchtune.scenario.reader import read_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.yaml_document import commented
from batchtune.target.address import Address, answering_at, attachable, preset_at
from batchtune.units import rounded_duration


def run_init(name: str | None, *, output: Path | None) -> int:
    """Run `batchtune init --example NAME`: write that example; None lists the examples. Returns the exit
    code, 0.

    Raises:
        UsageError: no such example, or the file exists or cannot be written.
    """
    if name is None:
        return _list_examples()
    _write_example(read_example(name), output)
    return 0


def _list_examples() -> int:
    bundled = [read_example(name) for name in example_names()]
    width = max((len(example.name) for example in bundled), default=0)
    for example in bundled:
        print(f"{example.name:<{width}}  {example.question}")
    print("`batchtune init --example NAME` writes one here", file=sys.stderr)
    return 0


def _write_example(example: Example, output: Path | None) -> None:
    if output == Path("-"):
        print(example.text_for(f"{example.name}.yaml"), end="")
        return
    path = output or Path(f"{example.name}.yaml")
    write_new(path, example.text_for(shlex.quote(str(path))), said=example.question)
    print(f"next: batchtune {example.command} {shlex.quote(str(path))}", file=sys.stderr)


def run_init_server(server: str, app: str | None, *, write: Path | None) -> int:
    """Run `batchtune init APP --server NAME`: write a scenario for an app of a known server. Returns the exit
    code, 0.

    `write`: the file; None or `-`: stdout.

    Raises:
        UsageError: no such server or app, or the file exists.
    """
    if app is None:
        raise UsageError("--server: missing: the app", hint=f"batchtune init my_app.py:app --server {server}")
    return _written(server_scenario(server, app), write)


def write_new(path: Path, text: str, *, said: str = "a scenario to begin with") -> None:
    """Write a file that does not exist yet, and print its path with `said`, a description of it.

    Raises:
        UsageError: it exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(
            f"{path}: is there already", hint="name another file with --write, or -: stdout"
        ) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    print(f"{path}: {said}")


def _written(text: str, write: Path | None) -> int:
    if write is None or write == Path("-"):
        print(text, end="")
        return 0
    write_new(write, text)
    print(f"next: batchtune sweep {shlex.quote(str(write))}", file=sys.stderr)
    return 0


_COMMENTS: Final[Mapping[str, str]] = {
    "name": "results go to results/<name>/",
    "target.cpus": "that the server may run on",
    "request.protocol": "or rest",
    "request.rows": "in a request: a batch is made of several requests",
    "load.concurrency": "clients: at most so many requests can meet in a batch",
    "load.rate": "requests per second",
    "load.warm_up": "of a trial: sent, and not counted",
    "load.duration": "of a trial: counted; longer ones are more precise, and fewer",
    "search.budget": "for everything, confirmation runs included",
    "search.grow": "the space is a guess: where the best lies on its edge, the next step outward is tried",
    "search.space.max_batch_size": "rows in a batch at most; 1 runs every request by itself",
    "search.space.batch_timeout_micros": "how long the first request of a batch may wait for company",
    "search.space.num_batch_threads": "batches that run at the same time",
    "fixed.max_enqueued_batches": "that may wait; a request beyond is refused",
}
"""Key of a scenario -> the comment beside it in a file that `init` writes."""


def run_init_model(
    argument: str, wanted: LoadRequest, *, write: Path | None, check: bool, quiet: bool
) -> int:
    """Run `batchtune init MODEL`: send a model a few requests, and write a scenario for it. Returns the exit
    code, 0.

    `argument`: MODEL as typed, a path or the address of a running server. `wanted`: the options on load and
    server. `write`: the file; None or `-`: stdout. `check`: only send requests, and print how fast they are
    answered.

    Raises:
        UsageError: no model, options that contradict each other, or the file exists.
        TargetError: the model does not serve, or refuses a request.
    """
    refuse_range(rate=wanted.rate, concurrency=wanted.concurrency)
    kind = kind_of(argument)
    if kind == "scenario":
        raise UsageError(
            f"{argument}: is a scenario already",
            hint=f"`batchtune sweep {argument}` runs it; init takes a model",
        )
    running = preset_at(argument) if kind == "address" else None
    if running is not None:
        return _written(running.scenario(), write)
    write = None if check or write == Path("-") else write
    if write is not None:
        _refuse_unwritable(write)
    address = answering_at(argument) if kind == "address" else None
    target = None if address is None else attachable(address)
    looked = look(
        argument,
        wanted,
        command="init" if address is None or target is not None else "load",
        address=address,
        target=target,
        batched=address is None or (check and target is None),
        quiet=quiet,
    )
    if check:
        print(f"ok: {argument} answers{_asked_rows(looked.tries)}: {speed_of(looked.tries)}")
        return 0
    scenario = read_scenario(looked.text(argument))
    text = _text(_beside(looked, write or Path(f"{scenario.name}.yaml")), scenario, argument, write)
    if write is None:
        print(text, end="")
    else:
        write_new(write, text)
    with sweep_view(quiet=quiet) as view:
        host = watch_host(lambda _windows: None)
        view.event(f"this machine: {host.text}" + (f"; {host.advice}" if host.advice else ""))
    print(_next(scenario, address, write), file=sys.stderr)
    return 0


def _beside(looked: LookedAt, file: Path) -> LookedAt:
    """Return the scenario with its model relative to the scenario's `file` where it lies below that folder:
    both move together."""
    target = looked.document.get("target", {})
    model, folder = Path(str(target.get("model", ""))), file.parent.absolute()
    if not model.is_absolute() or not model.is_relative_to(folder):
        return looked
    relative = f"./{model.relative_to(folder)}"
    return replace(looked, document={**looked.document, "target": {**target, "model": relative}})


def _asked_rows(tries: FirstTries) -> str:
    if tries.recorded:
        return ""
    return f" {'1, 2 and 8' if tries.refusal is None else '1 and 2'} times the rows of a request"


def _text(looked: LookedAt, scenario: Scenario, argument: str, write: Path | None) -> str:
    file = shlex.quote(str(write or f"{scenario.name}.yaml"))
    searched = "search" in looked.document
    question = (
        f"Which batching parameters should {scenario.name} be served with?"
        if searched
        else f"How does {scenario.name} answer on the server that runs?"
    )
    head = [
        question,
        "",
        f"    batchtune {'sweep' if searched else 'load'} {file}",
        "",
        f"Written by `batchtune init {shlex.quote(argument)}`, which asked the model: {speed_of(looked.tries)}.",
        "Every key: scenarios/README.md of batchtune; --set key=value overrides one for a run.",
    ]
    return commented(looked.document, head=head, comments=_comments(looked, scenario))


def _comments(looked: LookedAt, scenario: Scenario) -> dict[str, str]:
    arrivals = {
        "poisson": "requests come at random, whatever the server does; others: constant, gamma (bursts), trace, …",
        "closed": "each client waits for its answer before it asks again; poisson: requests come at a rate",
    }
    comments = {
        **_COMMENTS,
        "target.model": f"takes {inputs_of(looked.signature)}",
        "load.arrivals": arrivals.get(scenario.load.arrivals, ""),
        "objective": wants_of(scenario) if "search" in looked.document else "",
    }
    guessed = [note.replace(" (--", "; --").removesuffix(")") for note in looked.notes]
    shapes = [note for note in guessed if "--shape" in note]
    values = [note for note in guessed if "--shape" not in note]
    comments["request.shapes"] = f"guessed, and answered: {'; '.join(shapes)}" if shapes else ""
    comments["request.inputs"] = f"guessed, and answered: {'; '.join(values)}" if values else ""
    if looked.guessed_limit:
        comments["slo.p95"] = "a guess, ten times a lone request: what do you promise?"
    return comments


def _refuse_unwritable(path: Path) -> None:
    """Raise UsageError where the file exists or has no folder, before minutes are spent on asking the model."""
    if path.exists():
        raise UsageError(f"{path}: is there already", hint="name another file with --write, or -: stdout")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: cannot be written: there is no folder {path.parent}")


def _next(scenario: Scenario, address: Address | None, write: Path | None) -> str:
    file = shlex.quote(str(write or f"{scenario.name}.yaml"))
    saved = "" if write is not None else f"save it as {file}, then "
    if address is not None and not scenario.target.attached:
        option = f"--rest-url {address.rest_url}" if address.rest_url else f"--grpc-url {address.grpc_url}"
        return f"next: {saved}batchtune load {file} {option}"
    budget_s = scenario.search.time_budget_s or 0.0
    launch_s = 15.0  # Of a sweep beside its budget: the launch, the first look, the report.
    return f"next: {saved}batchtune sweep {file} (about {rounded_duration(budget_s + launch_s)})"
