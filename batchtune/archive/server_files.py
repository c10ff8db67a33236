"""Files that a server takes: those with the recommended parameters, of one model or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from batchtune.batching.parameters import Configuration
from batchtune.batching.tfserving_file import parameters_file, rendered
from batchtune.batching.triton_config import format_config_pbtxt, format_triton, with_batching
from batchtune.scenario.spec.served_models import ServedModelSpec
from batchtune.system import absolute
from batchtune.target.model_files import lies_bare
from batchtune.target.tfserving import OWN_PARAMETERS, model_config_text, own_text
from batchtune.tune.answer.recommendation import Recommendation

BATCHING_PARAMETERS: Final = "batching_parameters.txt"
CONFIG_PBTXT: Final = "config.pbtxt"
PARAMETERS_JSON: Final = "parameters.json"


def parameters_name(configuration: Configuration) -> str:
    """Return the name of the file with the parameters, by the kind of server: config.pbtxt for Triton,
    parameters.json for a server that takes them over HTTP, else batching_parameters.txt."""
    names = {"triton": CONFIG_PBTXT, "http": PARAMETERS_JSON}
    return names.get(configuration.dialect, BATCHING_PARAMETERS)


def parameters_text(recommendation: Recommendation, model_config: Mapping[str, Any] | None) -> str:
    """Return the text of the file with the parameters, as the kind of server that was measured reads it.

    `model_config`: the whole configuration that the model had on Triton; None where none was saved.
    """
    if recommendation.configuration.dialect == "triton":
        return tritons_file(recommendation, model_config)
    if recommendation.configuration.dialect == "http":
        rows = recommendation.rows_per_request
        return rendered(recommendation.configuration, "http", model="", rows_per_request=rows)
    return parameters_file(recommendation.configuration).text


MODELS_CONFIG: Final = "models.config"
UNKNOWN: Final = "PATH"
"""Placeholder for the parent folder of a model whose directory is not known, such as a sample model."""


def versions_of(model: str) -> list[Path]:
    """Return the version directories of a model, the lowest version first; empty where `model` is no directory of
    versions, as a sample model."""
    path = absolute(model)
    if not path.is_dir() or lies_bare(path):
        return []
    return sorted(
        (below for below in path.iterdir() if below.name.isdigit()), key=lambda below: int(below.name)
    )


def base_path_of(file: Path, own: ServedModelSpec) -> Path:
    """Return the directory of versions of one of several models. A model that has none is to be copied into one beside
    `file`; where it is not known, the directory is PATH/NAME."""
    if versions := versions_of(own.model):
        return versions[0].parent
    is_bare = lies_bare(absolute(own.model))
    return own_file(absolute(file), own.name).parent if is_bare else Path(UNKNOWN) / own.name


def beside(file: Path, *names: str) -> Path:
    """Return the path of a further file that a server of several models needs: `names`, its path in parts, below the
    folder of `file`, such as "models", "a", "batching_params.pbtxt".

    Where `file` is not called batching_parameters.txt, as files of a run are, its stem comes before the first name:
    `out.txt` and "models.config" become `out.models.config`.
    """
    head = "" if file.name == BATCHING_PARAMETERS else f"{file.stem}."
    return file.parent.joinpath(f"{head}{names[0]}", *names[1:])


def own_file(file: Path, name: str) -> Path:
    """Return the path, beside `file`, of the file with the own parameters of the model `name`, which is to be copied
    into each of its version directories: `models/NAME/batching_params.pbtxt` in a run."""
    return beside(file, "models", name, OWN_PARAMETERS)


def server_files(
    file: Path,
    recommendation: Recommendation,
    models: Sequence[ServedModelSpec],
    *,
    model_config: Mapping[str, Any] | None = None,
) -> dict[Path, str]:
    """Make the files from which a server reads the recommended parameters: path -> text, `file` first.

    `models`: those of the scenario, where the server has several. Empty for TensorFlow Serving without
    batching, which takes none.
    """
    configuration = recommendation.configuration
    if not models:
        is_none = configuration.batching is None and configuration.dialect == "tfserving"
        return {} if is_none else {file: parameters_text(recommendation, model_config)}
    shared = Configuration(batching=configuration.batching, flags=configuration.flags)
    base_paths = {own.name: str(base_path_of(file, own)) for own in models}
    return {
        file: parameters_file(shared).text,
        beside(file, MODELS_CONFIG): model_config_text(base_paths),
        **{own_file(file, name): own_text(own) for name, own in configuration.models},
    }


def tritons_file(recommendation: Recommendation, model_config: Mapping[str, Any] | None) -> str:
    """Return a config.pbtxt: the model's whole configuration with the recommended batching; only the batching
    part where `model_config` is None or the configuration was measured on another server."""
    configuration = recommendation.configuration
    if model_config is None or configuration.dialect != "triton":
        return format_triton(configuration.batching, rows_per_request=recommendation.rows_per_request)
    config = with_batching(model_config, configuration)
    return f"# batchtune: {configuration.label()}\n{format_config_pbtxt(config)}"
