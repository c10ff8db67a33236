"""Reads the scenarios that come with the program, and fills them in for an app, a model or a running server."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from batchtune.batching.parameters import did_you_mean
from batchtune.errors import UsageError

_MODELINE: Final = re.compile(r"\A# yaml-language-server:.*\n(#\n)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A bundled scenario; its text begins with comments: a question, and the command that answers it."""

    name: str
    text: str

    @property
    def question(self) -> str:
        """The question that the scenario answers: its comments up to the first question mark, in one line."""
        comments = re.match(r"(?:#.*\n)*", _MODELINE.sub("", self.text))
        words = comments.group().replace("#", " ").split() if comments else []
        question, mark, _ = " ".join(words).partition("?")
        return question + mark

    @property
    def command(self) -> str:
        """The command in the scenario's comments, such as `sweep` or `compare`; `sweep` where they have none."""
        named = re.search(r"batchtune (\w+) scenarios/", self.text)
        return named.group(1) if named else "sweep"

    def text_for(self, path: str) -> str:
        """Return the scenario's text for a file of the user's: the commands in its comments name `path`, and
        the line that names a schema is removed."""
        return _MODELINE.sub("", self.text).replace(f"scenarios/{self.name}.yaml", path)


def example_names() -> list[str]:
    """List the names of the bundled scenarios, the one to begin with first."""
    return sorted(
        (path.stem for path in examples_folder().glob("*.yaml")),
        key=lambda name: (name != "quickstart", name),
    )


def read_example(name: str) -> Example:
    """Read the bundled scenario `name`, given with `.yaml` or without.

    Raises:
        UsageError: there is none; the hint names those that are.
    """
    names = example_names()
    wanted = name.removesuffix(".yaml")
    if wanted not in names:
        hint = did_you_mean(wanted, names, otherwise="bundled are")
        raise UsageError(f"no bundled example {name!r}", hint=hint)
    text = (examples_folder() / f"{wanted}.yaml").read_text(encoding="utf-8")
    return Example(name=wanted, text=text)


def server_names(*, of_apps: bool = False) -> list[str]:
    """List the servers for which `--server` has a scenario; `of_apps`: only those that serve an app of the user's."""
    names = sorted(path.stem for path in (examples_folder() / "servers").glob("*.yaml"))
    return [name for name in names if not of_apps or _serves_app(_preset(name))]


def server_scenario(server: str, app: str | None) -> str:
    """Return the text of a preset server's scenario.

    `app`: what the server is to serve, `my_app.py:NAME` or, for a server of models, a model.

    Raises:
        UsageError: no such server; or `app` is None, is a model for a server of apps or an app for a server of
            models, names no file or name that exists, or has a character that a command line splits.
    """
    names = server_names()
    if server not in names:
        hint = did_you_mean(server, names, otherwise="there are")
        raise UsageError(
            f"--server: no server {server!r}", hint=f"{hint}; any other takes a scenario of kind http"
        )
    text = _preset(server)
    serves_app = _serves_app(text)
    if app is None:
        raise UsageError(
            "--server: what it is to serve is missing",
            hint=f"batchtune init {'my_app.py:app' if serves_app else 'MODEL'} --server {server}",
        )
    file_name, _, name = app.partition(":")
    file = Path(file_name).resolve()
    if serves_app:
        if not file.is_file():
            raise UsageError(f"{app}: there is no file {file_name}", hint="name the app: my_app.py:app")
        if "{name}" in text and not name.isidentifier():
            raise UsageError(
                f"{app}: missing: the name of the app", hint=f"write {file_name}:app, with the app's own name"
            )
        known = _names_in(file)
        if "{name}" in text and known is not None and name not in known:
            raise UsageError(f"{app}: {file_name} has no {name}", hint=did_you_mean(name, sorted(known)))
    elif file_name.endswith(".py"):
        raise UsageError(
            f"{app}: {server} serves a model, not an app", hint=f"name a model: sweep MODEL --server {server}"
        )
    words = {
        "{file}": str(file),
        "{folder}": str(file.parent),
        "{module}": file.stem,
        "{stem}": file.stem,
        "{name}": name,
        "{app}": app,
    }
    odd = next(
        (word for place, word in words.items() if place in text and not re.fullmatch(r"[\w./@-]+", word)),
        None,
    )
    if odd is not None:
        raise UsageError(
            f"{odd!r} has a space or a mark in it", hint="write the scenario by hand: kind: http"
        )
    return _with_words(text, words)


def _names_in(file: Path) -> set[str] | None:
    """Return the names that a Python file binds, which is read and not run; None where it may bind others when it
    runs, or is no Python of this version."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id="globals" | "setattr" | "exec") | ast.alias(name="*"):
                return None
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)):
                names.add(name)
            case ast.alias(name=name):
                names.add(name.partition(".")[0])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    return None if "__getattr__" in names else names


def running_scenario(server: str, model: str, places: Mapping[str, str], others: Sequence[Any] = ()) -> str:
    """Return the text of a preset's scenario for a running server, without the keys that launch a server; for ray-serve
    also without `metrics` where these would count other applications too, or their place is unknown.

    `server`: the preset's name, as `--server` takes it. `places`: text of the preset -> the text that replaces it.
    `others`: applications that are sent along, unchanged, with each new configuration.
    """
    text = _preset(server)
    for place, there in places.items():
        text = text.replace(place, there)
    words = dict.fromkeys(("{file}", "{folder}", "{module}", "{stem}", "{name}", "{app}"), model)
    document = yaml.safe_load(_with_words(text, words))
    target = document["target"]
    del target["launch"], target["install"]
    target.pop("grpc_url", None)
    if server == "ray-serve":
        del target["set"]["file"]  # what launches it
        if others or "{port}" in target["metrics"]["url"]:
            del target["metrics"]  # they count all applications, or nobody knows where they are
        target["set"]["request"]["body"]["applications"] += others
    return yaml.safe_dump(document, sort_keys=False)


def http_app_scenario(url: str, file: str = "") -> str:
    """Return the text of a scenario for an app of which only its URL is known, with comments on what to edit. `file`:
    its name as a word of a shell ("": that of the app)."""
    path = re.sub(r"^\w+://[^/]*", "", url) or "/"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.rpartition("/")[2]).strip("._-") or "app"
    text = Path(__file__).with_name("http_app.yaml").read_text(encoding="utf-8")
    return _with_words(text, {"{url}": url, "{path}": path, "{name}": name, "{file}": file or f"{name}.yaml"})


def _preset(server: str) -> str:
    return (examples_folder() / "servers" / f"{server}.yaml").read_text(encoding="utf-8")


def _serves_app(text: str) -> bool:
    return "{file}" in text or "{module}" in text


def _with_words(text: str, words: Mapping[str, str]) -> str:
    for place, word in words.items():
        text = re.sub(rf"(?<!\{{){re.escape(place)}(?!\}})", word, text)
    return text


def examples_folder() -> Path:
    """Return the folder of the bundled scenarios: within the package in a wheel, as pyproject.toml says; in a
    checkout `scenarios/` beside it."""
    room = Path(__file__).parent
    packaged, checkout = room.parents[0] / "examples", room.parents[1] / "scenarios"
    return checkout if checkout.is_dir() and not packaged.is_dir() else packaged
