"""`batchtune init --ci`: a job that checks every change."""

from __future__ import annotations

import math
import os.path
import shlex
import sys
from pathlib import Path
from typing import Final

from batchtune.check.gate import gates_of
from batchtune.cli.arguments.options import BASELINE, CANDIDATE
from batchtune.cli.commands.gate.course import check_seconds, without_search
from batchtune.cli.commands.init_model import write_new
from batchtune.errors import UsageError
from batchtune.report.gate.ci_jobs import JOB_FILES, Host, job_text
from batchtune.scenario.reader import read_arms, section_of, unchecked_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.system import absolute
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.trials.pace import Pace
from batchtune.units import rounded_duration

_EXTRAS: Final = {
    "tensorflow": ("saved_model.pb", "saved_model.pbtxt"),
    "onnx": (".onnx",),
    "torch": (".pt2", ".pt"),
}
"""Extras of batchtune's package -> ends of the names of model files that need them."""


def run_init_ci(host: Host, scenario: str | None, *, output: Path | None) -> int:
    """Run `batchtune init --ci`: write a CI job that checks every change by a scenario. Returns the exit
    code, 0.

    `output`: file of the job; None: where the host expects it; `-`: stdout.

    Raises:
        UsageError: no such scenario, a target or model that a change of the repository cannot change, or
            the file exists or cannot be written.
        ScenarioError: a scenario that no check would take.
    """
    path = Path(scenario or "scenario.yaml")
    if not path.is_file():
        raise UsageError(
            f"{path}: no such scenario to check by",
            hint=f"batchtune init --ci {host} SCENARIO.yaml; `batchtune init ./my_model --write {path}` writes one",
        )
    if not absolute(path).is_relative_to(Path.cwd()):
        raise UsageError(
            f"{path}: lies outside of {Path.cwd()}, where a job will not find it",
            hint="call it from the top of the repository",
        )
    _require_launched(path)
    name = Path(os.path.relpath(path)).as_posix()
    model = _model_of(path)
    asked = read_arms(path, {CANDIDATE: ()})[CANDIDATE]
    usual_s, minutes = _times(asked)
    text = job_text(
        host,
        path=name,
        scenario=shlex.quote(name),
        model=shlex.quote(model),
        usual=rounded_duration(usual_s),
        minutes=minutes,
        extras=_extras(asked, Path(model)),
    )
    if not Path(model).exists():
        print(
            f"note: {model} is not here: have the job build or fetch it, and base/{model}, and name in its pip install "
            "the extra that the model needs: batchtune[tensorflow], batchtune[onnx] or batchtune[torch]",
            file=sys.stderr,
        )
    if output == Path("-"):
        print(text, end="")
        return 0
    target = output or Path(JOB_FILES[host])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from error
    said = f"checks every change by {path}, usually in about {rounded_duration(usual_s)} of measuring"
    write_new(target, text, said=said)
    where = shlex.quote(str(path))
    step = f"git add {shlex.quote(str(target))} {where}"
    if Path(model).exists():  # a check of the model against itself
        step = f"batchtune check {where} --candidate-model {shlex.quote(model)}"
    print(f"next: {step}", file=sys.stderr)
    return 0


def _require_launched(path: Path) -> None:
    """Check that a job could launch the scenario's server twice: for the change and for its target branch.

    Raises:
        UsageError: it runs already, commands start it, or it has several models.
    """
    target = section_of(unchecked_scenario(path), "target")
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
    """Return the path of the scenario's model relative to the repository, whether it exists or the job builds
    it.

    Raises:
        UsageError: it is a sample model, or lies outside.
    """
    model = section_of(unchecked_scenario(path), "target").get("model")
    if not isinstance(model, str):
        raise UsageError(f"{path}: target.model: missing", hint="say the model's folder: target: {model: …}")
    place = absolute(path.parent / model)
    suffixes = [suffix for own in _EXTRAS.values() for suffix in own]
    if "/" not in model and place.suffix not in suffixes and not place.exists():
        raise UsageError(
            f"{path}: target.model: {model!r} is no folder of this repository, so a job would compare it with itself",
            hint="put the model that you serve into the repository, and name its folder: target: {model: ./my_model}",
        )
    here = Path.cwd()
    if not place.is_relative_to(here):
        raise UsageError(
            f"{path}: target.model: {place} lies outside of {here}, where a job will not find it",
            hint="name a folder of the repository; where it is not in git the job may build or fetch it there",
        )
    return place.relative_to(here).as_posix()


def _times(scenario: Scenario) -> tuple[float, int]:
    """Return (seconds, minutes): what a check usually takes, and what a job may take at most.

    The latter is for installing and for all blocks of both phases, on a server that is not slow.
    """
    margins = scenario.check.gates
    (scenario,) = without_search([scenario], margins)
    variants = [Variant(name=name, scenario=scenario) for name in (BASELINE, CANDIDATE)]
    # Of both servers with their first requests.
    usual_s, most_s = check_seconds(
        variants,
        dict.fromkeys((BASELINE, CANDIDATE), Pace()),
        guarded=gates_of(margins, objective=scenario.objective),
        blocks=scenario.check.blocks,
        launch_s=10.0,
    )
    set_up_min = 8  # To install what runs the model, and to check out.
    return usual_s, set_up_min + math.ceil(most_s / 60.0)


def _extras(scenario: Scenario, model: Path) -> list[str]:
    """Return the extras of batchtune's package that the bundled server needs to run this model."""
    if scenario.target.kind != "tfserving" or scenario.target.runs != "bundled":
        return []
    files = list(model.rglob("*")) if model.is_dir() else [model]
    return [extra for extra, ends in _EXTRAS.items() if any(file.name.endswith(ends) for file in files)]
