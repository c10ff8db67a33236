"""docker/action.yml: another repository's check in ten lines, and what its steps run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "name" in step}
CHECK = STEPS["Check the change against its target branch, side by side"]


def job() -> str:
    """The workflow in docker/README.md."""
    (found,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docker" / "README.md").read_text(), re.DOTALL)
    return str(found)


def test_a_job_of_ten_lines_uses_the_action() -> None:
    assert len(job().strip().splitlines()) <= 10
    document = yaml.safe_load(job())
    (check,) = document["jobs"].values()
    (used,) = (step for step in check["steps"] if "/docker@" in step["uses"])
    assert set(used["with"]) <= set(ACTION["inputs"])
    assert {name for name, value in ACTION["inputs"].items() if value.get("required")} <= set(used["with"])


def in_shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As GitHub runs a step of bash; the programs of `folder` stand before the others."""
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (2, 2), (3, 3), (5, 0), (7, 7)])
def test_the_check_ends_the_job_as_it_ended(tmp_path: Path, code: int, ends: int) -> None:
    program(tmp_path, "git", 'echo "git $*" >> said')
    program(tmp_path, "batchtune", f'for word; do echo "$word" >> said; done\nexit {code}')
    asked = {"BASE": "1a2b", "SCENARIO": "a b.yaml", "OPTIONS": "--max-regress p95=5%"}
    assert set(asked) == set(CHECK["env"])
    done = in_shell(CHECK["run"], tmp_path, **asked)
    assert done.returncode == ends, done.stderr
    assert ("::warning::" in done.stdout) == (code == 5)
    said = (tmp_path / "said").read_text().splitlines()
    assert said[0] == "git fetch --quiet --depth=1 origin 1a2b"
    assert said[1:] == ["check", "a b.yaml", "--baseline-ref", "1a2b", "--max-regress", "p95=5%"]


@pytest.mark.parametrize(("extras", "wanted"), [("", "/action/.."), ("onnx,torch", "/action/..[onnx,torch]")])
def test_it_installs_itself_with_what_the_model_needs(tmp_path: Path, extras: str, wanted: str) -> None:
    program(tmp_path, "pip", 'for word; do echo "$word" >> said; done')
    install = STEPS["Install batchtune"]
    assert in_shell(install["run"], tmp_path, SOURCE="/action/..", EXTRAS=extras).returncode == 0
    assert (tmp_path / "said").read_text().splitlines()[-1] == wanted
