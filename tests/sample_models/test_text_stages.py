"""The file that is copied beside the text classifier runs there alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from batchtune.sample_models import text_stages

ALONE = """
import runpy, sys
sys.modules["batchtune"] = None  # an import of it fails
import numpy as np
stages = runpy.run_path(sys.argv[1])
given = np.array(["Thé cat".encode()], dtype=object)
print(stages["preprocess"]({"text": given})["embedded"][0, :3, 0].tolist())
"""


def test_the_copy_needs_nothing_of_batchtune(tmp_path: Path) -> None:
    copied = shutil.copyfile(text_stages.__file__, tmp_path / "stages.py")
    (tmp_path / "vocabulary.txt").write_text("\nthe\ncat")
    np.save(tmp_path / "embeddings.npy", np.array([[0.0], [1.5], [2.5]], np.float32))
    command = [sys.executable, "-c", ALONE, str(copied)]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (asked.returncode, asked.stdout) == (0, "[1.5, 2.5, 0.0]\n"), asked.stderr
