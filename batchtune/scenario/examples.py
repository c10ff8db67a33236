"""Which scenarios come with the program, and what does each ask?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from batchtune.errors import UsageError

FIRST: Final = "quickstart"
_MODELINE: Final = re.compile(r"\A# yaml-language-server:.*\n(#\n)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A bundled scenario; its text begins with comments: a question, and the command that answers it."""

    name: str
    text: str

    @property
    def question(self) -> str:
        """The comments up to the first question mark, in one line."""
        comments = re.match(r"(?:#.*\n)*", _MODELINE.sub("", self.text))
        words = comments.group().replace("#", " ").split() if comments else []
        question, mark, _ = " ".join(words).partition("?")
        return question + mark

    @property
    def command(self) -> str:
        """`sweep` or `compare`, as the comments say."""
        named = re.search(r"batchtune (\w+) scenarios/", self.text)
        return named.group(1) if named else "sweep"

    def text_for(self, path: str) -> str:
        """The text as a file of one's own: its commands name `path`, and no schema is expected beside it."""
        return _MODELINE.sub("", self.text).replace(f"scenarios/{self.name}.yaml", path)


def example_names() -> list[str]:
    """The bundled scenarios, the one to begin with first."""
    return sorted(
        (path.stem for path in examples_folder().glob("*.yaml")), key=lambda name: (name != FIRST, name)
    )


def read_example(name: str) -> Example:
    """The bundled scenario `name`, with `.yaml` or without.

    Raises:
        UsageError: there is none; the hint names those that are.
    """
    names = example_names()
    wanted = name.removesuffix(".yaml")
    if wanted not in names:
        near = get_close_matches(wanted, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"bundled are: {', '.join(names)}"
        raise UsageError(f"no bundled example {name!r}", hint=hint)
    text = (examples_folder() / f"{wanted}.yaml").read_text(encoding="utf-8")
    return Example(name=wanted, text=text)


def examples_folder() -> Path:
    """In a wheel `scenarios/` lies within the package, as pyproject.toml says; in a checkout beside it."""
    room = Path(__file__).parent
    packaged, checkout = room.parents[0] / "examples", room.parents[1] / "scenarios"
    return checkout if checkout.is_dir() and not packaged.is_dir() else packaged
