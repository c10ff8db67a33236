"""`batchtune init`: writes a scenario for a model that it sends requests, a bundled example, or a CI job."""

from __future__ import annotations

import math
import os.path
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import yaml

from batchtune.cli.arguments.load_request import refuse_range
from batchtune.cli.arguments.options import LoadRequest
from batchtune.cli.arguments.overrides import kind_of
from batchtune.cli.commands.check_course import check_seconds, gates_for, without_search
from batchtune.cli.commands.doctor import watch_host
from batchtune.cli.commands.model_scenario import (
    LookedAt,
    inputs_of,
    look,
    scenario_of_language_model,
    speed_of,
    wants_of,
    with_loop,
)
from batchtune.errors import UsageError
from batchtune.load.first_tries import FirstTries
from batchtune.report.ci_files import JOB_FILES, Host, job_text
from batchtune.report.live_view import sweep_view
from batchtune.scenario.examples import example_names, http_app_scenario, read_example, server_scenario
from batchtune.scenario.reader import ScenarioText, read_arms, read_scenario, section_of, unchecked_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.yaml_document import commented
from batchtune.system import absolute
from batchtune.target.address import Address, answering_at, attachable, http_app_at, preset_at
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.trials.pace import Pace
from batchtune.units import rounded_duration


def run_init(name: str | None, *, output: Path | None) -> int:
    """Run `batchtune init --example NAME`: write the example `name`, or list all where it is None. Returns the exit
    code, 0.

    `output`: the file; None: NAME.yaml in the working directory; `-`: stdout.

    Raises:
        UsageError: no such example, or the file exists or cannot be written.
    """
    if name is None:
        width = max(map(len, example_names()))
        for bundled in map(read_example, example_names()):
            print(f"{bundled.name:<{width}}  {bundled.question}")
        print("`batchtune init --example NAME` writes one here", file=sys.stderr)
        return 0
    example = read_example(name)
    path = output or Path(f"{example.name}.yaml")
    file = f"{example.name}.yaml" if path == Path("-") else shlex.quote(str(path))
    step = f"batchtune {example.command} {file}"
    return _written(example.text_for(file), path, said=example.question, step=step)


def run_init_server(server: str, app: str | None, wanted: LoadRequest, *, write: Path | None) -> int:
    """Run `batchtune init APP --server NAME`: write a scenario for an app of a known server. Returns the exit
    code, 0.

    `wanted`: the options on the load and the SLO. `write`: the file; None or `-`: stdout.

    Raises:
        UsageError: no such server or app, or the file exists.
        ScenarioError: an option that does not go with the rest.
    """
    return _written(_asked_text(server_scenario(server, app), wanted, source=f"--server {server}"), write)


def _asked_text(text: str, wanted: LoadRequest, *, source: str) -> str:
    """Return the text of a scenario with what the options ask for; without options it stays as it is."""
    if not (wanted.overrides or wanted.rate or wanted.concurrency):
        return text
    above = takewhile(lambda line: line.startswith("#"), text.splitlines())
    head = [line.removeprefix("#").removeprefix(" ") for line in above]
    return commented(_asked_document(text, wanted, source=source), head=head, comments={})


def _asked_document(text: str, wanted: LoadRequest, *, source: str) -> dict[str, Any]:
    """Return the keys of a scenario with what the options ask for. Raises ScenarioError: they do not go with it."""
    asked = with_loop(wanted, ScenarioText(text=text, source=source))
    read_scenario(asked.scenario, overrides=asked.overrides)
    document = unchecked_scenario(asked.scenario, overrides=asked.overrides)
    return document | {
        name: {key: value for key, value in section_of(document, name).items() if value is not None}
        for name in ("load", "slo")
        if name in document
    }


def write_new(path: Path, text: str, *, said: str) -> None:
    """Write a file that does not exist yet, and print its path with `said`, a description of it.

    Raises:
        UsageError: it exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(
            f"{path}: already exists", hint="name another file with --write, or -: stdout"
        ) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    print(f"{path}: {said}")


def _written(text: str, write: Path | None, *, step: str = "", said: str = "a scenario to begin with") -> int:
    """Write a new file, and print the next step, None: a sweep of it; to stdout where there is no file. Returns the
    exit code, 0."""
    if write is None or write == Path("-"):
        print(text, end="")
        return 0
    write_new(write, text, said=said)
    print(f"next: {step or f'batchtune sweep {shlex.quote(str(write))}'}", file=sys.stderr)
    return 0


def _language_model_text(
    document: Mapping[str, Any], argument: str, write: Path | None, *, guessed: bool
) -> str:
    file = shlex.quote(str(write or f"{document['name']}.yaml"))
    head = [
        f"How does {document['target']['model']} answer on the server that runs?",
        "",
        f"    batchtune load {file}",
        "",
        f"Written by `batchtune init {shlex.quote(argument)}`. Every key: scenarios/README.md of batchtune.",
    ]
    comments = {
        "request.lengths": "a guess: tokens of the prompts",
        "request.openai": "output: tokens of each answer, a guess",
        "load.concurrency": "clients, each of which waits for its answer before it asks again",
        "slo": f"{'' if guessed else 'what you did not give is '}a guess: set the limits that you promise",
    }
    return commented(document, head=head, comments=comments)


def run_init_model(argument: str, wanted: LoadRequest, *, write: Path | None, check: bool = False) -> int:
    """Run `batchtune init MODEL`: send a model a few requests, and write a scenario for it. Returns the exit
    code, 0.

    At an address, a server with a preset, a language model or an app gets no such requests: its scenario
    follows from what it says of itself.

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
        return _written(_asked_text(running, wanted, source=argument), write)
    language_model = scenario_of_language_model(argument) if kind == "address" else None
    if language_model is not None:
        text = yaml.safe_dump(language_model, sort_keys=False)
        language_model = _asked_document(text, wanted, source=argument)
        text = _language_model_text(language_model, argument, write, guessed=not wanted.overrides)
        return _written(text, write, step=f"batchtune load {shlex.quote(str(write))}")
    if kind == "address" and (url := http_app_at(argument)) is not None:
        file = "" if write in (None, Path("-")) else shlex.quote(str(write))
        text = _asked_text(http_app_scenario(url, file), wanted, source=argument)
        return _written(text, write, step=f"batchtune load {shlex.quote(str(write))}")
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
    )
    if check:
        print(f"ok: {argument} answers{_asked_rows(looked.tries)}: {speed_of(looked.tries)}")
        return 0
    scenario = read_scenario(looked.text(argument))
    text = _text(_beside(looked, write or Path(f"{scenario.name}.yaml")), scenario, argument, write)
    if write is None:
        print(text, end="")
    else:
        write_new(write, text, said="a scenario to begin with")
    with sweep_view(quiet=wanted.quiet) as view:
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
        "name": "results go to results/<name>/",
        "target.cpus": "that the server may run on",
        "request.protocol": "or rest",
        "request.rows": "in a request: a batch is made of several requests",
        "load.concurrency": "clients: a batch cannot contain more requests than that",
        "load.rate": "requests per second",
        "load.warm_up": "of a trial: sent but not measured",
        "load.duration": "of a trial: measured; longer trials are more precise, but fewer",
        "search.budget": "for everything, confirmation runs included",
        "search.grow": "the space is a guess: where the best lies on its edge, the next step outward is tried",
        "search.space.max_batch_size": "most rows in a batch; 1 runs each request alone",
        "search.space.batch_timeout_micros": "how long the first request of a batch may wait for others",
        "search.space.num_batch_threads": "batches that run at the same time",
        "fixed.max_enqueued_batches": "most batches that wait; further requests are refused",
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
        comments["slo.p95"] = "a guess, ten times a lone request: set the limit that you promise"
    return comments


def _refuse_unwritable(path: Path) -> None:
    """Raise UsageError where the file exists or has no folder, before minutes are spent on asking the model."""
    if path.exists():
        raise UsageError(f"{path}: already exists", hint="name another file with --write, or -: stdout")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: cannot be written: there is no folder {path.parent}")


def _next(scenario: Scenario, address: Address | None, write: Path | None) -> str:
    file = shlex.quote(str(write or f"{scenario.name}.yaml"))
    saved = "" if write is not None else f"save it as {file}, then "
    if address is not None and not scenario.target.attached:
        option = f"--rest-url {address.rest_url}" if address.rest_url else f"--grpc-url {address.grpc_url}"
        return f"next: {saved}batchtune load {file} {option}"
    budget_s = scenario.search.budget.time_s or 0.0
    launch_s = 15.0  # Of a sweep beside its budget: the launch, the first look, the report.
    return f"next: {saved}batchtune sweep {file} (about {rounded_duration(budget_s + launch_s)})"


# `init --ci`: a job that checks every change.

_EXTRAS: Final = {
    "tensorflow": ("saved_model.pb", "saved_model.pbtxt"),
    "onnx": (".onnx",),
    "torch": (".pt2", ".pt"),
}
"""Extras of batchtune's package -> ends of the names of model files that need them."""


def run_init_ci(host: Host, scenario: str | None, *, output: Path | None) -> int:
    """Run `batchtune init --ci`: write a CI job that checks every change by a scenario. Returns the exit
    code, 0.

    `output`: file of the job; None: where the host expects it; `-`: stdout.

    Raises:
        UsageError: no such scenario, a target or model that a change of the repository cannot change, or
            the file exists or cannot be written.
        ScenarioError: a scenario that no check would take.
    """
    path = Path(scenario or "scenario.yaml")
    if not path.is_file():
        raise UsageError(
            f"{path}: no such scenario to check by",
            hint=f"batchtune init --ci {host} SCENARIO.yaml; `batchtune init ./my_model --write {path}` writes one",
        )
    if not absolute(path).is_relative_to(Path.cwd()):
        raise UsageError(
            f"{path}: lies outside of {Path.cwd()}, where a job will not find it",
            hint="call it from the top of the repository",
        )
    _require_launched(path)
    name = Path(os.path.relpath(path)).as_posix()
    model = _model_of(path)
    asked = read_arms(path, {"candidate": ()})["candidate"]
    usual_s, minutes = _times(asked)
    text = job_text(
        host,
        path=name,
        scenario=shlex.quote(name),
        model=shlex.quote(model),
        usual=rounded_duration(usual_s),
        minutes=minutes,
        extras=_extras(asked, Path(model)),
    )
    if not Path(model).exists():
        print(
            f"note: {model} is not here: have the job build or fetch it, and base/{model}, and name in its pip install "
            "the extra that the model needs: batchtune[tensorflow], batchtune[onnx] or batchtune[torch]",
            file=sys.stderr,
        )
    target = output or Path(JOB_FILES[host])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from error
    said = f"checks every change by {path}, usually in about {rounded_duration(usual_s)} of measuring"
    where = shlex.quote(str(path))
    step = f"git add {shlex.quote(str(target))} {where}"
    if Path(model).exists():  # a check of the model against itself
        step = f"batchtune check {where} --candidate-model {shlex.quote(model)}"
    return _written(text, target, said=said, step=step)


def _require_launched(path: Path) -> None:
    """Check that a job could launch the scenario's server twice: for the change and for its target branch.

    Raises:
        UsageError: it runs already, commands start it, or it has several models.
    """
    target = section_of(unchecked_scenario(path), "target")
    kind = target.get("kind", "tfserving")
    unsaid = "models" if target.get("models") else "kind: command" if kind == "command" else None
    if unsaid is not None:
        raise UsageError(
            f"{path}: target.{unsaid}: the job launches the model of the change next to that of its target branch, and "
            "nothing here says which model that is",
            hint=f"write two variants into {path}, and have the job call `batchtune check {shlex.quote(str(path))}`",
        )
    if kind == "external" or (kind == "triton" and target.get("rest_url") is not None):
        raise UsageError(
            f"{path}: the job launches the model of the change next to that of its target branch, and this server runs "
            "already",
            hint=f"leave out target.{'kind, target.endpoints, target.' if kind == 'external' else ''}rest_url and "
            "target.grpc_url, and set the model's folder: target: {model: …}",
        )


def _model_of(path: Path) -> str:
    """Return the path of the scenario's model relative to the repository, whether it exists or the job builds
    it.

    Raises:
        UsageError: it is a sample model, or lies outside.
    """
    model = section_of(unchecked_scenario(path), "target").get("model")
    if not isinstance(model, str):
        raise UsageError(f"{path}: target.model: missing", hint="set the model's folder: target: {model: …}")
    place = absolute(path.parent / model)
    suffixes = [suffix for own in _EXTRAS.values() for suffix in own]
    if "/" not in model and place.suffix not in suffixes and not place.exists():
        raise UsageError(
            f"{path}: target.model: {model!r} is not a folder of this repository, so a job compares it with itself",
            hint="put the model that you serve into the repository, and name its folder: target: {model: ./my_model}",
        )
    here = Path.cwd()
    if not place.is_relative_to(here):
        raise UsageError(
            f"{path}: target.model: {place} lies outside of {here}, where a job will not find it",
            hint="name a folder of the repository; where it is not in git the job may build or fetch it there",
        )
    return place.relative_to(here).as_posix()


def _times(scenario: Scenario) -> tuple[float, int]:
    """Return (seconds, minutes): what a check usually takes, and what a job may take at most.

    The latter is for installing and for all blocks of both phases, on a server that is not slow.
    """
    margins = scenario.check.gates
    (scenario,) = without_search([scenario], margins)
    variants = [Variant(name=name, scenario=scenario) for name in ("baseline", "candidate")]
    # Of both servers with their first requests.
    usual_s, most_s = check_seconds(
        variants,
        dict.fromkeys(("baseline", "candidate"), Pace()),
        guarded=gates_for(variants[0], margins),
        blocks=scenario.check.blocks,
        launch_s=10.0,
    )
    set_up_min = 8  # To install what runs the model, and to check out.
    return usual_s, set_up_min + math.ceil(most_s / 60.0)


def _extras(scenario: Scenario, model: Path) -> list[str]:
    """Return the extras of batchtune's package that the bundled server needs to run this model."""
    if scenario.target.kind != "tfserving" or scenario.target.runs != "bundled":
        return []
    files = list(model.rglob("*")) if model.is_dir() else [model]
    return [extra for extra, ends in _EXTRAS.items() if any(file.name.endswith(ends) for file in files)]
