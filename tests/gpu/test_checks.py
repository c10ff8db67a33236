"""The GPU checks run from one command on a machine without a GPU, and a section that fails holds up no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "benchmarks" / "gpu" / "gpu_checks.py"


def run(out: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, str(SCRIPT), "run", "--device", "cpu", "--tiny", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=out)
    return done.returncode, json.loads((out / "gpu_checks.json").read_text()), done.stdout + done.stderr


@pytest.mark.slow
def test_a_section_that_fails_says_why_and_the_next_ones_run(tmp_path: Path) -> None:
    """Before the models are exported there is nothing whose ceiling could be measured."""
    code, document, said = run(tmp_path, "--only", "ceiling,models,correctness")
    assert code == 1
    sections = document["sections"]
    assert sections["ceiling"]["status"].startswith("failed")
    assert "model.pt2" in sections["ceiling"]["log"]
    assert (sections["models"]["status"], sections["correctness"]["status"]) == ("ok", "ok"), said
    rows = sections["correctness"]["rows"]
    assert set(rows) == {"text_recognition", "imdb_transformer", "resnet50"}
    assert all(one["right"] and one["mean_batch_rows"] > 3 for one in rows.values()), rows
    # A build from PyPI tells its CUDA (2.11.0+cu130) in torch.__version__ only.
    assert document["card"]["torch"].startswith(document["provenance"]["packages"]["torch"])
    assert "no figure means anything" in (tmp_path / "gpu_checks.txt").read_text()


def test_no_section_is_begun_without_time_for_it(tmp_path: Path) -> None:
    code, document, _ = run(tmp_path, "--only", "models", "--limit", "14")
    assert code == 1
    assert document["sections"]["models"]["status"] == "no time left"


@pytest.mark.slow
def test_every_section_runs_without_a_gpu(tmp_path: Path) -> None:
    code, document, said = run(tmp_path)
    assert code == 0, said
    sections = document["sections"]
    assert {name for name, one in sections.items() if one["status"] == "ok"} == set(sections)
    assert len(sections) == 8
