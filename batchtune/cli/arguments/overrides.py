"""What arguments and options mean for a scenario: its SLO, its subject, requests, a file of parameters."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from batchtune.archive.run import LEDGER, SCENARIO
from batchtune.batching.formats import read_batching_file
from batchtune.errors import BatchingParametersError, UsageError
from batchtune.measure.quantiles import QUANTILES
from batchtune.scenario.examples import example_names, server_names
from batchtune.scenario.reader import (
    ScenarioText,
    read_scenario,
    scenario_text,
    section_of,
    unchecked_scenario,
)
from batchtune.scenario.spec.check import SloSpec, limit_words
from batchtune.scenario.spec.knobs import KNOBS
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import KnobValue, ListSpace
from batchtune.system import absolute
from batchtune.target.address import is_address
from batchtune.target.model_files import located_model, only_model_below, readable, resolve_model
from batchtune.units import parse_duration_s, parse_ratio


@contextmanager
def of_option(name: str, *, hint: str | None = None, otherwise: str = "") -> Iterator[None]:
    """Return a context manager that puts an option's name before the message of a UsageError.

    The error's hint becomes `hint`; None keeps its own, or takes `otherwise` where it has none.
    """
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", hint=hint or error.hint or otherwise) from error


# Which promise do the options `--slo-p50` to `--slo-errors` make?


def promised(slo: Mapping[str, str | None]) -> SloSpec | None:
    """Make an SLO of the --slo-… options, name -> text, with no other limit; None where no option is given.

    Raises:
        UsageError: a value that is no limit, or limits that contradict each other.
    """
    given = {name: text for name, text in slo.items() if text is not None}
    if not given:
        return None
    values = {
        name: (_share if name in ("errors", "goodput") else positive_s)(_option(name), text)
        for name, text in given.items()
    }
    goodput = values.pop("goodput", None)  # its limits may be those of the scenario
    try:
        promise = SloSpec.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"--slo-…: {error.errors()[0]['msg']}") from error
    return promise if goodput is None else promise.model_copy(update={"goodput": goodput})


def in_place_of(scenario: Scenario, promise: SloSpec | None) -> SloSpec:
    """Return the SLO of a scenario that was measured, changed by `promise`, the SLO of the --slo-… options;
    None: unchanged.

    Limits of whole answers replace all of the scenario's of whole answers; any other limit replaces that of
    its own name. Limits that are thereby left out are named on stderr, and so is goodput, which the runs
    counted by the scenario's limits.

    Raises:
        UsageError: a limit that these answers cannot have, or that the runs did not measure.
    """
    own = scenario.slo
    if promise is None:
        return own
    changes = {name: getattr(promise, name) for name in promise.model_fields_set}
    if promise.e2e_limits():
        changes = {name: None for name in SloSpec.model_fields if name.startswith("p")} | changes
    slo = own.model_copy(update=changes)
    for name, why in scenario.request.foreign_limits(slo.limits()):
        raise UsageError(f"{_option(name)}: {why}", hint="leave it out")
    _note_left_out(
        {name: limit_words(name, own.limits()[name]) for name in own.limits().keys() - slo.limits()}
    )
    counted_by = own.model_copy(update={"goodput": slo.goodput})
    if slo.goodput is None or (own.goodput is not None and slo.limits() == counted_by.limits()):
        return slo
    if promise.goodput is not None:
        by = ", ".join(limit_words(name, limit) for name, limit in own.limits().items() if name != "goodput")
        counted = "the runs did not count it" if own.goodput is None else f"the runs counted it by {by}"
        raise UsageError(f"{_option('goodput')}: {counted}", hint="sweep with this SLO, or leave it out")
    _note_left_out({"goodput": limit_words("goodput", own.limits()["goodput"])})
    return slo.model_copy(update={"goodput": None})


def slo_overrides(slo: Mapping[str, str | None]) -> list[str]:
    """Return the --slo-… options as `KEY=VALUE` overrides of a scenario that is still to be read.

    Limits of whole answers set to null the scenario's others of whole answers.

    Raises:
        UsageError: as `promised`.
    """
    promise = promised(slo)
    given = {name: text for name, text in slo.items() if text is not None}
    if promise is not None and promise.e2e_limits():
        given = dict.fromkeys(QUANTILES, "null") | given
    return [f"slo.{name}={text}" for name, text in given.items()]


def asked_scenario(
    source: Path | ScenarioText, overrides: Sequence[str], *, searched: bool = False
) -> Scenario:
    """Read a scenario with its overrides; limits of it that the --slo-… options leave out are named on stderr.

    Raises:
        UsageError: --rest for a server of kind http whose scenario has another protocol; or as `read_scenario`.
        ScenarioError: as `read_scenario`.
    """
    written = unchecked_scenario(source)
    is_http = section_of(written, "target").get("kind") == "http"
    is_rest = section_of(written, "request").get("protocol") == "rest"
    if is_http and not is_rest and "request.protocol=rest" in overrides:
        raise UsageError(
            "--rest: TensorFlow Serving's REST requests; a server of kind http gets those of its scenario",
            hint="leave it out; where the server takes them, write request: {protocol: rest}",
        )
    scenario = read_scenario(source, overrides=overrides, searched=searched)
    own_slo = section_of(written, "slo")
    limits = {name.removeprefix("e2e_"): limit for name, limit in own_slo.items() if limit is not None}
    _note_left_out(
        {n: f"{n} ≤ {limits[n]}" for n in QUANTILES if n in limits and f"slo.{n}=null" in overrides}
    )
    return scenario


def _note_left_out(limits: Mapping[str, str]) -> None:
    """Name limits of the scenario that an SLO leaves out, name -> words, on stderr."""
    if limits:
        why = "a limit of whole answers replaces all of them"
        if "goodput" in limits:
            why = "the runs counted it by other limits"
        print(f"note: without {', '.join(sorted(limits.values()))} of the scenario: {why}", file=sys.stderr)


def _option(name: str) -> str:
    """Return the option that sets a limit, such as `--slo-ttft-p95`."""
    return f"--slo-{name.replace('_', '-')}"


def positive_s(option: str, text: str, *, units: tuple[str, str] = ("ms", "s")) -> float:
    """Parse the text of an option into seconds, above 0; `units`: those of a number without a unit, see
    `parse_duration_s`.

    Raises:
        UsageError: no duration above 0; the message names the option.
    """
    with of_option(option):
        seconds = parse_duration_s(text, units=units)
    if seconds <= 0:
        raise UsageError(f"{option}: {text!r} is not above 0", hint=f"write a duration such as 20{units[0]}")
    return seconds


def _share(option: str, text: str) -> float:
    hint = f"write a share such as {'95% or 0.95' if 'goodput' in option else '0.1% or 0.001'}"
    with of_option(option, hint=hint):
        ratio = parse_ratio(text)
    if not 0.0 <= ratio <= 1.0 or ("goodput" in option and ratio in (0.0, 1.0)):
        raise UsageError(f"{option}: {text!r} is not between 0 and 100 %", hint=hint)
    return ratio


def request_overrides(
    *, rest: bool, rows: int | None, shapes: Sequence[str] | None, ranges: Sequence[str] | None
) -> list[str]:
    """Return the options --rest, --rows, --shape and --range as `KEY=VALUE` overrides of a scenario.

    Raises:
        UsageError: a shape or a range that is none.
    """
    overrides = ["request.protocol=rest"] if rest else []
    if rows is not None:
        overrides.append(f"request.rows={rows}")
    if shapes:
        named = dict(_named("--shape", "NAME=128, or NAME=224x224x3", shapes, _dimensions))
        overrides.append(f"request.shapes={json.dumps(named)}")
    if ranges:
        by_input = dict(_named("--range", "NAME=0:20000", ranges, _limits))
        overrides.append(f"request.inputs={json.dumps({'random': {'by_input': by_input}})}")
    return overrides


def _named(option: str, expected: str, texts: Iterable[str], read: Any) -> Iterable[tuple[str, Any]]:
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            if not (name and equals):
                raise ValueError
            yield name.strip(), read(value.strip())
        except ValueError as error:
            raise UsageError(f"{option}: expected {expected}; was {text!r}") from error


def _dimensions(text: str) -> list[int]:
    """Parse `224x224x3`, the dimensions after the batch dimension; empty: one number for each row.

    Raises:
        ValueError: not whole numbers above 0.
    """
    sizes = [int(size) for size in re.split(r"[x×,]", text)] if text else []
    if any(size < 1 for size in sizes):
        raise ValueError
    return sizes


def _limits(text: str) -> dict[str, Any]:
    """Parse `LOW:HIGH` into a scenario's `low` and `high`, with `whole` where both are whole numbers.

    Raises:
        ValueError: not two numbers, the lower one first.
    """
    low, colon, high = text.partition(":")
    if not colon or not -math.inf < float(low) < float(high) < math.inf:
        raise ValueError
    if all(re.fullmatch(r"\s*-?\d+\s*", limit) for limit in (low, high)):
        return {"low": int(low), "high": int(high), "whole": True}
    return {"low": float(low), "high": float(high)}


Kind = Literal["scenario", "model", "address"]


def kind_of(argument: str) -> Kind:
    """Return whether an argument is a scenario, a model or the address of a server.

    A `.yaml` is a scenario whether it exists or not; so is a stream such as /dev/stdin.

    Raises:
        UsageError: the path cannot be read.
    """
    if Path(argument).suffix in (".yaml", ".yml") or _is_stream(argument):
        return "scenario"
    return "address" if is_address(argument) else "model"


def scenario_source(argument: str) -> Path | ScenarioText:
    """Return the scenario's path; of a stream, which can be read only once, its text.

    Raises:
        ScenarioError: the stream is not text.
    """
    if not _is_stream(argument):
        return Path(argument)
    return replace(scenario_text(argument), directory=Path())


def model_of(argument: str) -> str:
    """Return what a scenario's `target.model` holds for an argument: the path of a model, or the name of a
    sample model.

    Raises:
        UsageError: there is neither, or the argument is an app (.py).
    """
    if argument.partition(":")[0].endswith(".py"):
        raise UsageError(
            f"{argument}: an app, not a model",
            hint=f"say what serves it: {argument} --server NAME, one of {', '.join(server_names(of_apps=True))}",
        )
    path = Path(argument).expanduser()
    with readable(path):
        if (path / LEDGER).is_file():
            hint = f"go on with it: batchtune sweep {path / SCENARIO} --resume {path}"
            raise UsageError(f"{argument}: a run, not a model", hint=hint)
        if path.exists():
            only = only_model_below(absolute(path))
            return str(located_model(argument) if only is None else only)
    if "/" in argument:
        return str(located_model(argument))
    try:
        resolve_model(argument)
    except UsageError as error:
        hint = error.hint
        if argument in example_names():
            hint = f"`batchtune init --example {argument}` writes that example here"
        raise UsageError(
            f"{argument!r} is not a scenario (.yaml), model file or directory, HOST:PORT/MODEL, or sample model",
            hint=hint,
        ) from error
    return argument


def _is_stream(argument: str) -> bool:
    """Whether an argument is read as a stream, such as /dev/stdin or a pipe, and not as a file or folder."""
    path = Path(argument)
    # A file that is redirected there is one to the system, under a name that says nothing.
    streams = ("/dev/stdin", "/dev/fd", "/proc")
    if any(path.is_relative_to(stream) for stream in streams):
        return True
    with readable(path):
        return path.exists() and not path.is_file() and not path.is_dir()


# What does `--batching-parameters-file` make of a scenario: which values are fixed, and which are searched too?


def file_knobs(path: Path, scenario: Scenario) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read a file of batching parameters, in the format of any supported server; return (parameters, notes).

    parameters: name -> value, as the scenario's `fixed` has them. notes: a sentence on each part of the file
    that is not used, such as a parameter that the scenario's kind of server lacks, and on defaults in which
    the two kinds of server differ.

    Raises:
        BatchingParametersError: the file cannot be read, or holds values that its own server, or the
            scenario's, would refuse.
    """
    file = read_batching_file(path)
    try:
        knobs, notes = file.knobs(
            on_triton=scenario.target.kind == "triton", rows_per_request=scenario.request.rows_most
        )
    except BatchingParametersError as error:
        raise BatchingParametersError(f"{path}: {error.message}", hint=error.hint) from error
    return knobs, tuple(f"{path}: {note}" for note in notes)


def with_file(
    source: Path | ScenarioText, overrides: Sequence[str], path: Path, *, searched: bool
) -> ScenarioText:
    """Return the scenario with the parameters of a file, for a sweep (`searched`) or a comparison; notes go
    to stderr.

    In a sweep, a parameter in the search space is still searched, with the file's value among its values. All
    other parameters are fixed, in place of those that the scenario fixes; parameters that a variant of a
    comparison sets are not changed.

    Raises:
        BatchingParametersError: as `file_knobs`.
        ScenarioError: the scenario cannot be read.
    """
    scenario = read_scenario(source, overrides=overrides)
    knobs, notes = file_knobs(path, scenario)
    document = scenario.document()
    space: dict[str, Any] = document["search"].get("space", {})
    replaced = () if scenario.target.kind == "triton" else KNOBS
    fixed = {name: value for name, value in document["fixed"].items() if name not in replaced}
    document["fixed"] = fixed
    for name, value in knobs.items():
        knob = scenario.search.space.get(name)
        if knob is None:
            fixed[name] = value
        elif searched:
            space[name] = _with(space[name], knob.values, value)
        else:
            del space[name]
            fixed[name] = value
    if not space:
        document["search"].pop("space", None)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    read = scenario_text(source)
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return ScenarioText(text=text, source=f"{read.source} with {path}", directory=read.directory)


def _with(written: Any, values: Sequence[KnobValue], value: Any) -> Any:
    """Return the search space as it is `written` in the scenario, with `value` among its `values`.

    Unchanged where the value is there, or where there are more than 200.
    """
    value = tuple(value) if isinstance(value, list) else value
    # A range of more values is searched as it is: a list of them would be the run's scenario.
    listed_max = 200
    if value in values or len(values) > listed_max:
        return written
    return ListSpace.model_validate([*values, value]).model_dump(mode="json")
