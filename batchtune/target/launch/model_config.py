"""How is a server told to serve several models?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from batchtune.batching.parameters import BatchingParameters, Configuration, to_dict
from batchtune.batching.tfserving import format_tfserving_text
from batchtune.scenario.spec.target import TargetSpec

OWN_PARAMETERS: Final = "batching_params.pbtxt"
"""TensorFlow Serving's name for a version's own, read with --enable_per_model_batching_parameters."""


def model_config_text(base_paths: Mapping[str, str]) -> str:
    """A text ModelServerConfig, by the names that the models are served by; a JSON string is a text proto's too."""
    entries = "".join(
        f'  config {{ name: {json.dumps(name)} base_path: {_quoted(path)} model_platform: "tensorflow" }}\n'
        for name, path in base_paths.items()
    )
    return f"model_config_list {{\n{entries}}}\n"


def own_parameters(spec: TargetSpec, configuration: Configuration) -> dict[str, BatchingParameters]:
    """What each of several models is batched with, by name; empty where all are with the same, or none is."""
    if not (configuration.models or any(own.batching for own in spec.models)):
        return {}
    batched = {own.name: own.configuration(configuration).batching for own in spec.models}
    return {name: batching for name, batching in batched.items() if batching is not None}


def own_fields(models: Mapping[str, BatchingParameters]) -> dict[str, dict[str, Any]]:
    """By name the fields that are a model's own."""
    return {name: to_dict(_without_threads(own)) for name, own in models.items()}


def own_text(parameters: BatchingParameters) -> str:
    """A version's own file; the threads are left out: those of the server's own file count."""
    return format_tfserving_text(_without_threads(parameters))


def _without_threads(parameters: BatchingParameters) -> BatchingParameters:
    return replace(parameters, num_batch_threads=None, thread_pool_name=None)


def with_own_parameters(base_path: Path, folder: Path, parameters: BatchingParameters | None) -> Path:
    """A base directory in `folder`: the versions of `base_path` by links, each beside batching parameters of its own.

    Without parameters of its own the model stays where it is.
    """
    if parameters is None:
        return base_path
    text = own_text(parameters)
    for version in base_path.iterdir():
        if not (version.is_dir() and version.name.isdigit()):
            continue
        own = folder / version.name
        own.mkdir(parents=True)
        for file in version.iterdir():
            if file.name != OWN_PARAMETERS:
                (own / file.name).symlink_to(file.resolve())
        (own / OWN_PARAMETERS).write_text(text, encoding="utf-8")
    return folder


def _quoted(path: str) -> str:
    """Bytes beyond ASCII as they are: text proto knows no surrogate pairs."""
    return json.dumps(path, ensure_ascii=False)
