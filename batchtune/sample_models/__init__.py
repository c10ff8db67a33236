"""Which models can be tried without bringing one?

`python -m batchtune.sample_models NAME` builds one with seeded weights, exports it once into the cache directory
and prints its base path. Building may import TensorFlow; importing this package does not.
"""

from __future__ import annotations

import os
from pathlib import Path

NAMES = ("imdb_transformer",)

# Raised whenever the exported bytes would change, so that an old export is never served as a new one.
EXPORT_REVISION = 1


def cache_path(name: str) -> Path:
    """The base path (holding version directories) where the named sample model is or will be exported."""
    root = (
        os.environ.get("BATCHTUNE_CACHE_DIR")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "batchtune"
    )
    return Path(root).expanduser() / "models" / f"{name}-r{EXPORT_REVISION}" / name
