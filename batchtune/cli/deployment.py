"""Which command line starts a server with what was recommended?"""

from __future__ import annotations

import shlex
from pathlib import Path

from batchtune.batching import Configuration
from batchtune.scenario.spec import Scenario
from batchtune.target.tfserving import served_name

PORTS = ("--port=8500", "--rest_api_port=8501")
"""TF Serving's own."""


def deployment(configuration: Configuration, scenario: Scenario, parameters_file: Path) -> str:
    """The whole command; a SavedModel goes to tensorflow_model_server, what that cannot serve to ours.

    A sample model, or one that is gone, stands under PATH: where it will lie nobody knows yet.
    """
    model = Path(scenario.target.model)
    saved_model = model.is_dir() and any(model.glob("*/saved_model.pb"))
    words = [
        "tensorflow_model_server" if saved_model else "batchtune-model-server",
        f"--model_base_path={model.resolve() if model.is_dir() else Path('PATH') / model.name}",
        f"--model_name={served_name(scenario.target.model)}",
        *PORTS,
    ]
    if configuration.batching is not None:
        words += ["--enable_batching", f"--batching_parameters_file={parameters_file}"]
    return shlex.join([*words, *(f"--{name}={value}" for name, value in configuration.flags)])
