"""Guesses what a model's inputs hold, and reads the scenarios that come with the program."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from batchtune.batching.parameters import did_you_mean
from batchtune.errors import UsageError
from batchtune.scenario.spec.request import RandomInputs, RandomRange, RandomValues, RequestSpec
from batchtune.wire.signature import Signature, TensorSpec

Shapes = Mapping[str, tuple[int, ...]]
Ranges = Mapping[str, RandomRange]


SMALL: Final = RandomRange(low=0, high=100, whole=True)
"""Whole numbers below the size of nearly every vocabulary."""
BINARY: Final = RandomRange(low=0, high=2, whole=True)


def shape_guesses(signature: Signature, given: Collection[str]) -> list[dict[str, tuple[int, ...]]]:
    """Guess the dimensions after the first for every input that leaves some open: name -> dimensions, one
    mapping for each guess, the likeliest first. One empty guess where no input leaves any open; inputs in
    `given` are left out.

    Inputs change together: those that belong together (tokens and their mask) have one length.
    """
    candidates = {
        spec.name: sizes for spec in signature.inputs if spec.name not in given and (sizes := _sizes(spec))
    }
    count = max(map(len, candidates.values()), default=1)
    return [
        {name: sizes[min(at, len(sizes) - 1)] for name, sizes in candidates.items()} for at in range(count)
    ]


def range_guesses(signature: Signature, given: Collection[str]) -> dict[str, RandomRange]:
    """Guess ranges of values for every input of whole numbers: ones for a mask, 0 or 1 for a type, 0 to 255
    for an image, small numbers for any other. Inputs in `given` are left out."""
    return {
        spec.name: _range(spec)
        for spec in signature.inputs
        if spec.name not in given and spec.dtype.startswith(("int", "uint"))
    }


def narrower(ranges: Ranges) -> Iterator[dict[str, RandomRange]]:
    """Yield the ranges with one input after the other held to 0 and 1, then with all of them: for models
    whose tables are smaller than guessed."""
    wide = [name for name, limits in ranges.items() if limits.high is not None and limits.high > 2]
    for name in wide:
        yield {**ranges, name: BINARY}
    if len(wide) > 1:
        yield {**ranges, **dict.fromkeys(wide, BINARY)}


def guessed_request(request: RequestSpec, *, shapes: Shapes, ranges: Ranges) -> RequestSpec:
    """Return the request with guessed dimensions and ranges added; its own stay."""
    inputs = request.inputs
    if ranges and (inputs == "random" or isinstance(inputs, RandomInputs)):
        values = inputs.random if isinstance(inputs, RandomInputs) else RandomValues()
        by_input = {**ranges, **values.by_input}
        inputs = RandomInputs(random=values.model_copy(update={"by_input": by_input}))
    return request.model_copy(update={"shapes": {**shapes, **request.shapes}, "inputs": inputs})


def inputs_with_range(request: RequestSpec, signature: Signature) -> set[str]:
    """Return the names of the inputs whose values the request itself determines: all where it gives one range
    for all, sends zeros or recorded inputs."""
    every = {spec.name for spec in signature.inputs}
    if request.inputs == "random":
        return set()
    if not isinstance(request.inputs, RandomInputs):
        return every
    values = request.inputs.random
    return every if values.low is not None or values.high is not None else set(values.by_input)


def _sizes(spec: TensorSpec) -> list[tuple[int, ...]]:
    strings = spec.dtype == "object"
    if spec.shape is None:
        return [()] if strings else [(128,), (224, 224, 3), (3, 224, 224), ()]
    inner = spec.shape[1:]
    if None not in inner:
        return []
    if strings:
        return [_filled(inner, size) for size in (1, 8)]
    # Of a sequence: tokens of a sentence or two, then what convolutions and reshapes may want.
    lengths = (128, 64, 32, 16, 8, 256, 512, 1)
    if len(inner) != 3:
        return [_filled(inner, size) for size in lengths]
    sides = (224, 32, 64, 28, 299, 512)  # Of an image, in pixels: ImageNet's, CIFAR's, MNIST's, Inception's.
    if any(size in (1, 3, 4) for size in inner):
        return [_filled(inner, side) for side in sides]
    if inner == (None, None, None):
        return [(224, 224, 3), (3, 224, 224), (32, 32, 3), (28, 28, 1)]
    return [_filled(inner, size) for size in (*sides, 16, 8)]


def _filled(inner: tuple[int | None, ...], size: int) -> tuple[int, ...]:
    return tuple(size if dimension is None else dimension for dimension in inner)


def _range(spec: TensorSpec) -> RandomRange:
    name = spec.name.lower()
    if "mask" in name:
        return RandomRange(low=1, high=2, whole=True)
    if "type" in name or "segment" in name:
        return BINARY
    image = spec.dtype == "uint8" and spec.shape is not None and len(spec.shape) == 4
    return RandomRange(low=0, high=256, whole=True) if image else SMALL


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
        """The command that its comments run, such as `sweep` or `compare`; `sweep` where they name none."""
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


def server_names() -> list[str]:
    """List the servers for which `--server` has a scenario."""
    return sorted(path.stem for path in (examples_folder() / "servers").glob("*.yaml"))


def server_scenario(server: str, app: str) -> str:
    """Return the text of a preset server's scenario for an app, `my_app.py:NAME`, or for whatever the server
    serves.

    Raises:
        UsageError: no such server, no such file, or the app's name is missing or has a character that a
            command line splits.
    """
    names = server_names()
    if server not in names:
        hint = did_you_mean(server, names, otherwise="there are")
        raise UsageError(
            f"--server: no server {server!r}", hint=f"{hint}; any other takes a scenario of kind http"
        )
    text = _preset(server)
    file_name, _, name = app.partition(":")
    file = Path(file_name).resolve()
    if "{file}" in text or "{module}" in text:
        if not file.is_file():
            raise UsageError(f"{app}: there is no file {file_name}", hint="name the app: my_app.py:app")
        if "{name}" in text and not name.isidentifier():
            raise UsageError(
                f"{app}: what in it is the app?", hint=f"write {file_name}:app, by its name there"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPreset:
    """A running server that a preset's scenario describes."""

    # Name of the preset, as `--server` takes it.
    server: str
    model: str
    # Text of the preset -> text that is put in its place.
    places: Mapping[str, str]
    # Applications that are sent along, unchanged, with each new configuration.
    others: tuple[Any, ...] = ()

    def scenario(self) -> str:
        """Return the text of the preset's scenario, without what launches the server."""
        words = dict.fromkeys(("{file}", "{folder}", "{module}", "{stem}", "{name}", "{app}"), self.model)
        text = _preset(self.server)
        for place, there in self.places.items():
            text = text.replace(place, there)
        document = yaml.safe_load(_with_words(text, words))
        target = document["target"]
        del target["launch"]
        target.pop("grpc_url", None)
        if self.server == "ray-serve":
            del target["set"]["file"]  # what launches it
            target["set"]["request"]["body"]["applications"] += self.others
        return yaml.safe_dump(document, sort_keys=False)


def _preset(server: str) -> str:
    return (examples_folder() / "servers" / f"{server}.yaml").read_text(encoding="utf-8")


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
