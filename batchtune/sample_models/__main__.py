"""`python -m batchtune.sample_models NAME`: export a sample model once, print its base path; `--list` names them."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from batchtune.sample_models import FRAMEWORKS, MODELS, NAMES, Framework, cache_path, framework_for


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m batchtune.sample_models", description=__doc__)
    parser.add_argument("name", nargs="?", choices=NAMES)
    parser.add_argument("--framework", choices=FRAMEWORKS, help="default: the first that is installed")
    parser.add_argument("--list", action="store_true", help="print the names and nothing else")
    asked = parser.parse_args(arguments)
    if asked.list:
        print("\n".join(NAMES))
        return 0
    if asked.name is None:
        parser.error(f"give one of: {', '.join(NAMES)}")
    framework = asked.framework or framework_for(asked.name)
    if framework not in MODELS[asked.name]:
        parser.error(f"{asked.name} is not written in {framework}, but in {', '.join(MODELS[asked.name])}")
    try:
        print(export(asked.name, framework), flush=True)
    except ModuleNotFoundError as error:
        extra = "tensorflow" if framework == "keras" else "torch"
        print(f"error: {asked.name} needs {error.name}: pip install 'batchtune[{extra}]'", file=sys.stderr)
        return 2
    return 0


def export(name: str, framework: Framework) -> Path:
    """Export the model unless the cache holds it; returns its base path.

    A concurrent or interrupted export leaves no incomplete model at that path.
    """
    base_path = cache_path(name, framework)
    if (base_path / "1").is_dir():
        return base_path
    base_path.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".export-", dir=base_path.parent))
    try:
        _build(name, framework, scratch / "1")
        try:
            (scratch / "1").rename(base_path / "1")
        except OSError:
            if not (base_path / "1").is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return base_path


def _build(name: str, framework: Framework, version_path: Path) -> None:
    if framework == "keras":
        from batchtune.sample_models.keras_models import write_saved_model

        write_saved_model(name, version_path)
    else:
        from batchtune.sample_models.torch_models import write_program

        write_program(name, version_path, torchscript=framework == "torchscript")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
