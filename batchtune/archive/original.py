"""What was on a Triton before a run changed it, kept in the run."""

from __future__ import annotations

import json
from pathlib import Path

from batchtune.archive.run import MODEL_CONFIG, Run
from batchtune.archive.whole_files import write_whole
from batchtune.errors import ArchiveError
from batchtune.target.triton.repository import OriginalModel


def write_original(folder: Path, original: OriginalModel) -> None:
    """Keep it in a run's folder; on disk when this returns.

    Raises:
        ArchiveError: it cannot be written.
    """
    document = json.dumps(original.to_dict(), allow_nan=False, indent=2) + "\n"
    write_whole(folder / MODEL_CONFIG, document.encode())


def read_original(run: Run) -> OriginalModel | None:
    """None: the run changed no model of a Triton.

    Raises:
        ArchiveError: corrupt.
    """
    path = run.path / MODEL_CONFIG
    try:
        return OriginalModel.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ArchiveError(f"{path}: not the configuration of a model: {error}") from error
