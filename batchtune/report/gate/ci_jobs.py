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
"""Host of the repository -> path at which it expects the CI job."""


class _JobTemplate(Template):
    """A template in which `@name` is filled in, because the shell and the CI system use `$`."""

    delimiter = "@"


_TORCH_FOR_CPUS: Final = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""Command that installs PyTorch for CPUs: PyPI's build brings gigabytes of CUDA, of no use on hosted runners.
"""


def job_text(
    host: Host, *, path: str, scenario: str, model: str, usual: str, minutes: int, extras: Sequence[str] = ()
) -> str:
    """Return the text of a CI job that checks every change by a scenario.

    `path`: of the scenario's file. `scenario`, `model`: that path and its model's, quoted for a shell.
    `usual`: how long a check usually takes, in words. `minutes`: after which the host ends the job. `extras`:
    of batchtune's package.
    """
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
