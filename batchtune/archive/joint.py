"""What is deployed for several models of one server: which files, and what is in each?"""

from __future__ import annotations

import json
import os.path
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batchtune.archive.run import BATCHING_PARAMETERS, JOINT_RECOMMENDATION, Run, write_whole
from batchtune.batching.parameters import Configuration
from batchtune.batching.tfserving_file import parameters_file
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.launch.container import OWN_PARAMETERS, model_config_text, own_text
from batchtune.target.model_files import lies_bare
from batchtune.tune.joint.answer import JointRecommendation

MODELS_CONFIG: Final = "models.config"
UNKNOWN: Final = "PATH"
"""Stands before a model's name where its directory of versions is not known: a sample model, one that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointFiles:
    """`server`: for --batching_parameters_file; `models`: for --model_config_file; `own`: by model, for each of its
    version directories, under the name batching_params.pbtxt."""

    server: Path
    models: Path
    own: Mapping[str, Path]


def files_of_run(run: Run, names: Iterable[str]) -> JointFiles:
    """Where a sweep leaves them."""
    return JointFiles(
        server=run.path / BATCHING_PARAMETERS,
        models=run.path / MODELS_CONFIG,
        own={name: run.path / "models" / name / OWN_PARAMETERS for name in names},
    )


def files_beside(file: Path, names: Iterable[str]) -> JointFiles:
    """Where `recommend --write FILE` leaves them: the server's there, the others beside it, under its name."""
    return JointFiles(
        server=file,
        models=file.with_name(f"{file.stem}.{MODELS_CONFIG}"),
        own={name: file.with_name(f"{file.stem}.{name}.{OWN_PARAMETERS}") for name in names},
    )


def versions_of(model: str) -> list[Path]:
    """The version directories of a model; none where its directory is not known."""
    path = Path(os.path.abspath(model))  # noqa: PTH100 - a link keeps its own name
    if not path.is_dir() or lies_bare(path):
        return []
    return sorted(
        (below for below in path.iterdir() if below.name.isdigit()), key=lambda below: int(below.name)
    )


def deployable(run: Run, configuration: Configuration, scenario: Scenario) -> JointFiles:
    """The files of the run where they hold this configuration, else FILE and what lies beside it."""
    names = [own.name for own in scenario.target.models]
    files = files_of_run(run, names)
    try:
        if all(
            path.read_text(encoding="utf-8") == text
            for path, text in _texts(files, configuration, scenario).items()
        ):
            return files
    except (OSError, UnicodeDecodeError):
        pass
    return files_beside(Path("FILE"), names)


def write_files(files: JointFiles, configuration: Configuration, scenario: Scenario) -> None:
    """Write what the server takes; a model without parameters of its own has no file.

    Raises:
        ArchiveError: one cannot be written.
    """
    for path, text in _texts(files, configuration, scenario).items():
        write_whole(path, text.encode())


def write_joint(run: Run, recommendation: JointRecommendation, scenario: Scenario) -> None:
    """Keep the recommendation, and its files in place of those of an earlier one.

    Raises:
        ArchiveError: the directory cannot be written.
    """
    document = json.dumps(recommendation.to_dict(), allow_nan=False, indent=2) + "\n"
    write_whole(run.path / JOINT_RECOMMENDATION, document.encode())
    files = files_of_run(run, [own.name for own in scenario.target.models])
    for path in files.own.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    write_files(files, recommendation.configuration, scenario)


def _texts(files: JointFiles, configuration: Configuration, scenario: Scenario) -> dict[Path, str]:
    shared = Configuration(batching=configuration.batching, flags=configuration.flags)
    base_paths = {
        own.name: str(versions[0].parent) if (versions := versions_of(own.model)) else f"{UNKNOWN}/{own.name}"
        for own in scenario.target.models
    }
    return {
        files.server: parameters_file(shared).text,
        files.models: model_config_text(base_paths),
        **{files.own[name]: own_text(own) for name, own in configuration.models},
    }
