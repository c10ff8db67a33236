"""`batchtune init --ci`: a job that checks every change."""

from __future__ import annotations

import os.path
import shlex
import sys
from pathlib import Path

from batchtune.errors import UsageError
from batchtune.report.gate.ci_jobs import JOB_FILES, Host, job_text
from batchtune.scenario.reader import unchecked_scenario

_SCENARIO = "scenario.yaml"


def run_init_ci(host: Host, scenario: str | None, *, output: Path | None) -> int:
    """The exit code, 0.

    Raises:
        UsageError: no such scenario, or the file is there already or cannot be written.
    """
    path = Path(scenario or _SCENARIO)
    if not path.is_file():
        raise UsageError(
            f"{path}: no such scenario to check by",
            hint=f"batchtune init --ci {host} SCENARIO.yaml; `batchtune init --example quickstart` writes one",
        )
    if not Path(os.path.abspath(path)).is_relative_to(Path.cwd()):  # noqa: PTH100 - a link keeps its own name
        raise UsageError(
            f"{path}: lies outside of {Path.cwd()}, where a job will not find it",
            hint="call it from the top of the repository",
        )
    _require_launched(path)
    name = Path(os.path.relpath(path)).as_posix()
    text = job_text(host, path=name, scenario=shlex.quote(name), model=shlex.quote(_model_of(path)))
    if output == Path("-"):
        print(text, end="")
        return 0
    target = output or Path(JOB_FILES[host])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        hint = "name another file with --output, or -: stdout"
        raise UsageError(f"{target}: is there already", hint=hint) from error
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from error
    print(f"{target}: checks every change by {path}")
    print(f"next: batchtune check {shlex.quote(str(path))} --help", file=sys.stderr)
    return 0


def _require_launched(path: Path) -> None:
    """Refuse a scenario whose server the job could not launch twice, of the change and of its target branch.

    Raises:
        UsageError: it runs already, commands start it, or it has several models.
    """
    target = unchecked_scenario(path).get("target")
    if not isinstance(target, dict):
        return
    kind = target.get("kind", "tfserving")
    if kind == "command":
        raise UsageError(
            f"{path}: target.kind: command: the job launches the model of the change beside that of its target branch, "
            "and no command says which model",
            hint=f"write two variants into {path}, and have the job call `batchtune check {shlex.quote(str(path))}`",
        )
    if target.get("models"):
        raise UsageError(
            f"{path}: target.models: the job launches the model of the change beside that of its target branch, and "
            "several do not say which is meant",
            hint=f"write two variants into {path}, and have the job call `batchtune check {shlex.quote(str(path))}`",
        )
    if kind == "external" or (kind == "triton" and target.get("rest_url") is not None):
        raise UsageError(
            f"{path}: the job launches the model of the change beside that of its target branch, and this server runs "
            "already",
            hint=f"leave out target.{'kind, target.endpoints, target.' if kind == 'external' else ''}rest_url and "
            "target.grpc_url, and say the model's folder: target: {model: …}",
        )


def _model_of(path: Path) -> str:
    """The model's folder or file relative to the repository; of a sample model a folder to fill in."""
    target = unchecked_scenario(path).get("target")
    model = target.get("model") if isinstance(target, dict) else None
    if not isinstance(model, str) or not (path.parent / model).exists():
        return "model"
    place = Path(os.path.abspath(path.parent / model))  # noqa: PTH100 - a link keeps its own name
    here = Path.cwd()
    return place.relative_to(here).as_posix() if place.is_relative_to(here) else "model"
