"""Models to try when there is none at hand.

`python -m batchtune.sample_models NAME` builds one with seeded weights, exports it once into the cache directory
and prints its base path. Building imports the framework; importing this package does not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

Framework = Literal["keras", "torch", "torchscript"]

SEED = 20_200_510


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes of a transformer, the same in every framework; `vocabulary` and `length` in words."""

    vocabulary: int = 20_000
    length: int
    embedding: int
    heads: int
    feed_forward: int
    blocks: int = 1


IMDB = Transformer(length=200, embedding=32, heads=2, feed_forward=32)
SEQUENCE = Transformer(length=256, embedding=128, heads=4, feed_forward=512, blocks=2)
"""`length`: of the longest sequence. Wide enough that the length decides the time, not the overhead of a call."""
TEXT_LINE = (32, 100)
"""Height and width of a grey line of text to recognise."""
TEXT_CLASSES = 37
"""36 characters and the blank, for each of 26 places."""
IMAGE_CLASSES = 1000

# What each model is written in; the first that is installed is built when none is asked for.
MODELS: dict[str, tuple[Framework, ...]] = {
    "imdb_transformer": ("keras", "torch", "torchscript"),
    "sequence_transformer": ("torch", "torchscript"),
    "text_classifier": ("torch", "torchscript"),
    "text_recognition": ("torch", "torchscript"),
    "resnet50": ("torch", "torchscript", "keras"),
    "word_relevance": ("torch", "torchscript"),
}
NAMES = tuple(MODELS)
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)

# Raised whenever the exported bytes would change, so that an old export is never served as a new one.

_PACKAGE: dict[Framework, str] = {"keras": "tensorflow", "torch": "torch", "torchscript": "torch"}


def framework_for(name: str) -> Framework:
    """Return the model's first framework that is installed; its first one when none is."""
    installed = (
        implementation for implementation in MODELS[name] if find_spec(_PACKAGE[implementation]) is not None
    )
    return next(installed, MODELS[name][0])


def cache_path(name: str, framework: Framework) -> Path:
    """Return the base path (holding version directories) where the sample model is or will be exported: in
    BATCHTUNE_CACHE_DIR, else in the user's cache (XDG_CACHE_HOME, `~/.cache`).

    The framework's version is part of it: what one release exports an older one may not read.
    """
    revision = 2
    root = (
        os.environ.get("BATCHTUNE_CACHE_DIR")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "batchtune"
    )
    folder = f"{name}-{framework}-{_version(_PACKAGE[framework])}-r{revision}"
    return Path(root).expanduser() / "models" / folder / name


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
