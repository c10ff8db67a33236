"""`python -m batchtune.sample_models NAME`: export a sample model once, print its base path; `--list` names them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from batchtune.sample_models import NAMES, cache_path


def main(arguments: list[str]) -> int:
    if arguments == ["--list"]:
        print("\n".join(NAMES))
        return 0
    if len(arguments) != 1 or arguments[0] not in NAMES:
        print(f"error: give one of: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    print(export(arguments[0]), flush=True)
    return 0


def export(name: str) -> Path:
    """Export the model unless the cache holds it; a concurrent or interrupted export is never seen half-done."""
    base_path = cache_path(name)
    if (base_path / "1").is_dir():
        return base_path
    base_path.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".export-", dir=base_path.parent))
    try:
        _build(name, scratch / "1")
        try:
            (scratch / "1").rename(base_path / "1")
        except OSError:
            if not (base_path / "1").is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return base_path


def _build(name: str, version_path: Path) -> None:
    match name:
        case "imdb_transformer":
            from batchtune.sample_models.imdb_transformer import export_saved_model
        case _:
            raise ValueError(name)
    export_saved_model(version_path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
