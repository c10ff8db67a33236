"""Fills in the job that checks every change: a workflow for GitHub, a pipeline for GitLab.

Both launch the model of the target branch and that of the change side by side; neither needs a token but the one that
posts the comment, which a change from a fork has not and does without.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Final, Literal

Host = Literal["github", "gitlab"]

JOB_FILES: Final[dict[Host, str]] = {
    "github": ".github/workflows/batchtune.yml",
    "gitlab": ".gitlab-ci.batchtune.yml",
}


class _JobTemplate(Template):
    """`@name` is filled in: `$` is the shell's and the runner's."""

    delimiter = "@"


_TORCH_FOR_CPUS: Final = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""PyPI's brings gigabytes of CUDA, for which hosted runners have no GPU."""


def job_text(
    host: Host, *, path: str, scenario: str, model: str, usual: str, minutes: int, extras: Sequence[str] = ()
) -> str:
    """Write the file of a CI job for the scenario at `path`; `scenario` is that path and `model` its model, as a
    shell takes them, `extras` are those of the framework that runs it."""
    template = Path(__file__).with_name(f"{host}_job.yml").read_text(encoding="utf-8")
    package = f"batchtune[{','.join(extras)}]" if extras else "batchtune"
    install = f"pip install {shlex.quote(package)}"
    return _JobTemplate(template.replace("@v", "@@v")).substitute(
        path=path,
        scenario=scenario,
        model=model,
        usual=usual,
        minutes=minutes,
        package=package,
        install=f"{_TORCH_FOR_CPUS} && {install}" if "torch" in extras else install,
    )
