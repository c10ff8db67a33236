"""Reads and writes scenario files; an error names file, line and key, what is there and what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from batchtune.batching.parameters import PARAMETER_NAMES, did_you_mean
from batchtune.errors import ScenarioError
from batchtune.scenario.examples import example_names
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.yaml_document import Document, overridden, parse_yaml
from batchtune.yaml_lines import Path as KeyPath

REMOVED: Final[Mapping[str, str]] = {
    "search.sampler": "take it out: the sampler is the one that did best; strategy: optuna names configurations by it "
    "alone",
    "search.mode": "take it out: the objective decides between latency and throughput; the guide's point is tried by "
    "guided",
    "search.repeats": "take it out: close configurations run again, and confirmation runs check the answer",
    "target.models.flood": "take it out: `batchtune load` with the higher rate at that model says what the others get",
    "search.strategy=guide": "set guided: it tries the tuning guide's point too",
}
"""Keys that older scenarios may have, or `key=value` -> what to do instead; an item of a list has no key of its
own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioText:
    """A scenario that is not in a file."""

    text: str
    # Names it in errors.
    source: str
    # What file names in it are relative to.
    directory: Path = Path()


def read_scenario(
    path: Path | str | ScenarioText, *, overrides: Iterable[str] = (), searched: bool = False
) -> Scenario:
    """Read and check a scenario file, and its variants, with `key.key=value` overrides applied.

    File names in it are relative to its directory. `searched`: for a sweep, whose server must take
    parameters.

    Raises:
        ScenarioError: every problem found, one a line: `file:line: key: what; expected …`.
        UsageError: an override sets a key of which one of several models has its own value.
    """
    document, directory = _read(path, overrides)
    scenario = _validated(document, directory, searched=searched)
    _variants(document, scenario, directory)
    return scenario


def parse_scenario(
    text: str, *, source: str = "<string>", directory: Path | None = None, overrides: Iterable[str] = ()
) -> Scenario:
    """Parse and check a scenario's YAML text; `source` names it in errors, and file names in it are relative to
    `directory`.

    Raises:
        ScenarioError, UsageError: as `read_scenario`.
    """
    read = ScenarioText(text=text, source=source, directory=directory or Path())
    return read_scenario(read, overrides=overrides)


@contextmanager
def lines_named(source: Path | ScenarioText, overrides: Iterable[str]) -> Iterator[None]:
    """Return a context manager that puts file and line of the wrong key before a ScenarioError that is raised in it."""
    try:
        yield
    except ScenarioError as error:
        if error.path:
            error.message = f"{_read(source, overrides)[0].place_of(error.path)}: {error.message}"
        raise


def lists_models(source: Path | ScenarioText) -> bool:
    """Whether a scenario, valid or not, lists several models of one server; raises what `unchecked_scenario` raises."""
    return bool(section_of(unchecked_scenario(source), "target").get("models"))


def unchecked_scenario(path: Path | str | ScenarioText, *, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read a scenario file with its overrides as plain data, unchecked.

    Raises:
        ScenarioError: no file, no YAML, or an override without a key.
        UsageError: as `read_scenario`.
    """
    return _read(path, overrides)[0].data


def section_of(data: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the mapping below these keys of an unchecked scenario; empty where there is none."""
    for key in keys:
        below = data.get(key)
        data = below if isinstance(below, Mapping) else {}
    return data


def read_kept_scenario(path: Path) -> Scenario:
    """Read the scenario in a run's folder: files that it names may be gone, and keys that were removed since
    are dropped.

    Raises:
        ScenarioError: as `read_scenario`.
    """
    return _validated(_kept(path), path.parent, files_exist=False)


def read_kept_variants(path: Path) -> dict[str, Scenario]:
    """Read each variant of the scenario in a run's folder as a scenario of its own: name -> scenario. Files that
    it names may be gone, and keys that were removed since are dropped.

    Raises:
        ScenarioError: as `read_scenario`.
    """
    document = _kept(path)
    return _variants(
        document, _validated(document, path.parent, files_exist=False), path.parent, files_exist=False
    )


def read_variants(path: Path | str | ScenarioText, *, overrides: Iterable[str] = ()) -> dict[str, Scenario]:
    """Read each variant of a scenario file as a scenario of its own: name -> scenario, in the order of the
    file.

    Raises:
        ScenarioError, UsageError: as `read_scenario`.
    """
    document, directory = _read(path, overrides)
    return _variants(document, _validated(document, directory), directory)


def read_arms(
    path: Path | str, arms: Mapping[str, Iterable[str]], *, overrides: Iterable[str] = ()
) -> dict[str, Scenario]:
    """Read a scenario file once for each arm of a comparison, without its search and variants. Returns the arm's
    name -> its scenario.

    `arms`: the arm's name -> the overrides of that arm alone (`--NAME-set`). `overrides`: those of all arms.

    Raises:
        ScenarioError, UsageError: as `read_scenario`.
    """
    document, directory = _read(path, overrides)
    _validated(document, directory)
    compared = _compared(document)
    return {name: _validated(overridden(compared, own, name), directory) for name, own in arms.items()}


def format_scenario(scenario: Scenario) -> str:
    """Write a scenario as YAML with every default spelt out; `parse_scenario` reads it back as an equal scenario."""
    return "# yaml-language-server: $schema=scenario.schema.json\n" + yaml.safe_dump(
        scenario.document(), sort_keys=False, allow_unicode=True, width=100
    )


@cache
def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a scenario file, for editors."""
    schema = Scenario.model_json_schema(by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "batchtune scenario",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def dotted_keys() -> list[str]:
    """List the keys of a scenario as `--set` takes them, two deep, such as `name` and `load.duration`."""
    return [
        ".".join(filter(None, (top, below)))
        for top in _known_keys(())
        for below in _known_keys((top,)) or [""]
    ]


def scenario_text(source: Path | str | ScenarioText) -> ScenarioText:
    """Read the text of a scenario file; a ScenarioText is returned as it is.

    Raises:
        ScenarioError: no such file, or none that can be read as text.
    """
    if isinstance(source, ScenarioText):
        return source
    path = Path(source)
    try:
        return ScenarioText(text=path.read_text(encoding="utf-8"), source=str(source), directory=path.parent)
    except FileNotFoundError as error:
        raise ScenarioError(f"{path}: no such file", hint=_instead_of(path)) from error
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except IsADirectoryError as error:
        hint = f"`batchtune init {path} --write FILE` makes a scenario of a model"
        raise ScenarioError(
            f"{path}: expected a scenario, a .yaml file; is a directory", hint=hint
        ) from error
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from error


def _instead_of(path: Path) -> str:
    """Return a hint at what there is in place of a missing file: one of nearly that name beside it, else the
    bundled examples."""
    beside = sorted(file.name for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    near = get_close_matches(path.name, beside, n=1)
    if near:
        return f"there is {path.parent / near[0]}"
    names = example_names()
    example = get_close_matches(path.stem, names, n=1, cutoff=0.8)
    if example:
        return f"`batchtune init --example {example[0]}` writes that example here"
    return f"`batchtune init --example NAME` writes an example here, one of: {', '.join(names)}"


def _read(path: Path | str | ScenarioText, overrides: Iterable[str]) -> tuple[Document, Path]:
    """Return a scenario file's document with its overrides, and the directory that its file names are
    relative to."""
    read = scenario_text(path)
    return overridden(parse_yaml(read.text, source=read.source), overrides), read.directory


def _kept(path: Path) -> Document:
    """Return the document of a run's scenario, without keys that no longer exist."""
    if not path.exists():
        hint = "copy the run's folder again with all its files, or start a new run"
        raise ScenarioError(f"{path.parent}: the run is incomplete: it has no {path.name}", hint=hint)
    document = parse_yaml(scenario_text(path).text, source=str(path))
    data = _left(document.data, "")
    if section_of(data, "search").get("strategy") == "guide":
        data["search"]["strategy"] = "guided"
    return Document(data=data, places=document.places)


def _left(data: Any, where: str) -> Any:
    """Return a copy of the data without the removed keys; `where` is the path to it, with a dot at its
    end."""
    if isinstance(data, dict):
        return {
            key: _left(value, f"{where}{key}.")
            for key, value in data.items()
            if f"{where}{key}" not in REMOVED
        }
    return [_left(item, where) for item in data] if isinstance(data, list) else data


def _compared(document: Document) -> Document:
    """Return the document without its search section and its variants."""
    left = {key: value for key, value in document.data.items() if key != "search"}
    return Document(data={**left, "variants": {}}, places=document.places)


def _variants(
    document: Document, scenario: Scenario, directory: Path, *, files_exist: bool = True
) -> dict[str, Scenario]:
    """Return each variant as a scenario, by name. Variants are compared, not searched, so that what the
    scenario searches may be fixed in one."""
    base = _compared(document)
    return {
        name: _validated(
            base.overlaid(document.under("variants", name)), directory, variant=name, files_exist=files_exist
        )
        for name in scenario.variants
    }


def _validated(
    document: Document,
    directory: Path,
    *,
    variant: str = "",
    files_exist: bool = True,
    searched: bool = False,
) -> Scenario:
    context = {"directory": directory, "files_exist": files_exist, "searched": searched}
    try:
        parts = Scenario.without_unset_parts(document.data)
        return Scenario.model_validate(parts, context=context, by_alias=True, by_name=False)
    except ValidationError as error:
        # A default that depends on a wrong value is pydantic's echo of that value's own error.
        mistakes = [
            mistake
            for mistake in error.errors(include_url=False)
            if mistake["type"] != "default_factory_not_called"
        ]
        problems = [_problem(mistake, document) for mistake in mistakes]
    where = f"variants.{variant}: " if variant else ""
    problems = sorted(set(problems))
    if len(problems) == 1:
        _, place, what, hint = problems[0]
        raise ScenarioError(f"{place}: {where}{what}", hint=hint)
    lines = [f"{place}: {where}{what}" + (f" ({hint})" if hint else "") for _, place, what, hint in problems]
    raise ScenarioError("\n".join(lines))


def _problem(error: Mapping[str, Any], document: Document) -> tuple[int, str, str, str]:
    """Return line, place, text and hint of one pydantic error."""
    context = error.get("ctx") or {}
    missing = error["loc"][-1:] if error["type"] == "missing" else ()
    path = (*_path_in(document.data, error["loc"]), *missing, *context.get("at", ()))
    key = ".".join(str(part) for part in path)
    what, hint = _described(error, path)
    place = document.place_of(path)
    line = place.rpartition(":")[2]
    is_said = not key or f" {key}=" in place  # by an option, which has the key
    return int(line) if line.isdigit() else 0, place, what if is_said else f"{key}: {what}", hint


def _described(error: Mapping[str, Any], path: KeyPath) -> tuple[str, str]:
    given = error.get("input")
    context = error.get("ctx") or {}
    match error["type"]:
        case "problem":
            return context.get("what", error["msg"]), context.get("hint", "")
        case "extra_forbidden" if (
            key := ".".join(part for part in path if isinstance(part, str))
        ) in REMOVED:
            return "this key no longer exists", REMOVED[key]
        case "extra_forbidden" if path[0] in PARAMETER_NAMES:
            return "no key of its own, but a batching parameter", (
                f"one value: fixed.{path[0]}; values to try: search.space.{path[0]}"
            )
        case "extra_forbidden":
            return "unknown key", did_you_mean(path[-1], _known_keys(path[:-1]))
        case "missing":
            return f"missing ({_description(path)})", ""
        case "literal_error" if (written := f"{'.'.join(map(str, path))}={given}") in REMOVED:
            return f"this {path[-1]} no longer exists; was {given!r}", REMOVED[written]
        case "literal_error":
            choices = [
                choice.strip("'") for choice in str(context["expected"]).replace(" or ", ", ").split(", ")
            ]
            near = get_close_matches(str(given), choices, n=1, cutoff=0.6)
            return (
                f"expected {context['expected']}; was {given!r}",
                f"did you mean {near[0]!r}?" if near else "",
            )
        case "string_pattern_mismatch":
            is_url = str(context.get("pattern")).startswith("^https?://")
            expected = "a URL, http://… or https://…" if is_url else _description(path).partition(";")[0]
            return f"expected {expected}; was {_short(given)}", ""
        case "model_type" | "model_attributes_type" | "dict_type":
            return (
                f"expected keys and values; was {_short(given)}",
                f"known are: {', '.join(_known_keys(path))}",
            )
        case _:
            wanted = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "expected")
            for ours, plain in {"a valid integer": "a whole number", "a valid tuple": "a list"}.items():
                wanted = wanted.replace(ours, plain)
            return f"{wanted}; was {_short(given)}", ""


def _path_in(data: Any, location: Iterable[str | int]) -> KeyPath:
    """Return the parts of a pydantic location that are keys of the document; the others are names of union
    members."""
    path: list[str | int] = []
    for part in location:
        present = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if present:
            path.append(part)
            data = data[part]
    return tuple(path)


def _schemas_at(path: KeyPath) -> list[dict[str, Any]]:
    """Return the schemas that the value at this path may follow."""
    schemas = _alternatives(json_schema())
    for part in path:
        below: list[dict[str, Any]] = []
        for schema in schemas:
            if isinstance(part, int):
                below += _alternatives(schema.get("items"))
            elif part in schema.get("properties", {}):
                below += _alternatives(schema["properties"][part])
            else:
                below += _alternatives(schema.get("additionalProperties"))
        schemas = below
    return schemas


def _alternatives(schema: Any) -> list[dict[str, Any]]:
    if not isinstance(schema, dict):
        return []
    schemas = [schema]
    if "$ref" in schema:
        schemas += _alternatives(json_schema()["$defs"][schema["$ref"].rpartition("/")[2]])
    for word in ("anyOf", "oneOf", "allOf"):
        for alternative in schema.get(word, []):
            schemas += _alternatives(alternative)
    return schemas


def _known_keys(path: KeyPath) -> list[str]:
    return list(dict.fromkeys(key for schema in _schemas_at(path) for key in schema.get("properties", {})))


def _description(path: KeyPath) -> str:
    described = [schema["description"] for schema in _schemas_at(path) if "description" in schema]
    return described[0] if described else f"a value for {path[-1]}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
