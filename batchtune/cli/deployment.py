"""Which command line starts a server with what was recommended?"""

from __future__ import annotations

import os.path
import shlex
from pathlib import Path

from batchtune.batching.length_buckets import LENGTH_BUCKETS
from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.model_files import lies_bare, served_name, version_files

PORTS = ("--port=8500", "--rest_api_port=8501")
"""TF Serving's own."""

_SERVED = "served"
"""The folder, where the command is run, to which a model without a version directory is copied."""


def deployment(configuration: Configuration, scenario: Scenario, parameters_file: Path) -> str:
    """The whole command; a SavedModel goes to tensorflow_model_server, what that cannot serve or group to ours.

    The shell asks where a sample model lies; a model that lies without a version directory is copied into one first; a
    path that is gone stands under PATH. To a Triton the file goes into its model repository: the server of a run that
    attached may be anywhere.
    """
    model = Path(scenario.target.model)
    if configuration.dialect == "triton":
        folder = model if model.is_dir() else Path("MODEL_REPOSITORY") / served_name(scenario.target.model)
        return f"cp {shlex.quote(str(parameters_file))} {shlex.quote(str(folder / 'config.pbtxt'))}"
    saved_model = any(model.glob("*/saved_model.pb")) or (model / "saved_model.pb").is_file()
    bucketed = LENGTH_BUCKETS in dict(configuration.flags)
    server = "tensorflow_model_server" if saved_model and not bucketed else "batchtune-model-server"
    name = served_name(scenario.target.model)
    copying, base_path = _copied(model, name) if lies_bare(model) else ("", _base_path(scenario))
    words = [f"--model_name={name}", *PORTS]
    if configuration.batching is not None:
        words += ["--enable_batching", f"--batching_parameters_file={parameters_file}"]
    words += [f"--{name}={value}" for name, value in configuration.flags]
    return f"{copying}{server} --model_base_path={base_path} {shlex.join(words)}"


def _copied(model: Path, name: str) -> tuple[str, str]:
    """The commands that copy it, and the base path they make, as a word of the shell."""
    version = Path(_SERVED) / name / "1"
    if model.is_dir():
        copies = {f"{model}/.": str(version)}
    else:
        copies = {str(file): str(version / own) for own, file in version_files(model).items()}
    commands = [["mkdir", "-p", str(version)], *(["cp", "-r", *copy] for copy in copies.items())]
    base_path = f'"$PWD"/{shlex.quote(str(version.parent))}'
    return "".join(f"{shlex.join(command)} && " for command in commands), base_path


def _base_path(scenario: Scenario) -> str:
    """As a word of the shell."""
    model, framework = Path(scenario.target.model), scenario.target.framework
    if model.is_dir():
        return shlex.quote(os.path.abspath(model))  # noqa: PTH100 - a link keeps its own name
    if model.name != scenario.target.model:
        return shlex.quote(str(Path("PATH") / model.name))
    chosen = "" if framework is None else f" --framework {framework}"
    return f'"$(python -m batchtune.sample_models {shlex.quote(model.name)}{chosen})"'
