"""Which command line starts a server with what was recommended?"""

from __future__ import annotations

import shlex
from pathlib import Path

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.tfserving import served_name

PORTS = ("--port=8500", "--rest_api_port=8501")
"""TF Serving's own."""


def deployment(configuration: Configuration, scenario: Scenario, parameters_file: Path) -> str:
    """The whole command; a SavedModel goes to tensorflow_model_server, what that cannot serve to ours.

    The shell asks where a sample model lies; a directory that is gone stands under PATH.
    """
    model = Path(scenario.target.model)
    saved_model = model.is_dir() and any(model.glob("*/saved_model.pb"))
    server = "tensorflow_model_server" if saved_model else "batchtune-model-server"
    words = [f"--model_name={served_name(scenario.target.model)}", *PORTS]
    if configuration.batching is not None:
        words += ["--enable_batching", f"--batching_parameters_file={parameters_file}"]
    words += [f"--{name}={value}" for name, value in configuration.flags]
    return f"{server} --model_base_path={_base_path(scenario)} {shlex.join(words)}"


def _base_path(scenario: Scenario) -> str:
    """As a word of the shell."""
    model, framework = Path(scenario.target.model), scenario.target.framework
    if model.is_dir():
        return shlex.quote(str(model.resolve()))
    if model.name != scenario.target.model:
        return shlex.quote(str(Path("PATH") / model.name))
    chosen = "" if framework is None else f" --framework {framework}"
    return f'"$(python -m batchtune.sample_models {shlex.quote(model.name)}{chosen})"'
