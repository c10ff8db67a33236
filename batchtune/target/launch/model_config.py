"""How is a server told to serve several models?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from batchtune.batching.parameters import BatchingParameters
from batchtune.batching.tfserving import format_tfserving_text

OWN_PARAMETERS: Final = "batching_params.pbtxt"
"""TensorFlow Serving's name for a version's own, read with --enable_per_model_batching_parameters."""


def model_config_text(base_paths: Mapping[str, str]) -> str:
    """A text ModelServerConfig, by the names that the models are served by; a JSON string is a text proto's too."""
    entries = "".join(
        f'  config {{ name: {json.dumps(name)} base_path: {_quoted(path)} model_platform: "tensorflow" }}\n'
        for name, path in base_paths.items()
    )
    return f"model_config_list {{\n{entries}}}\n"


def with_own_parameters(base_path: Path, folder: Path, parameters: BatchingParameters) -> Path:
    """A base directory in `folder`: the versions of `base_path` by links, each beside batching parameters of its own.

    The threads are left out: those of the server's own file count.
    """
    text = format_tfserving_text(replace(parameters, num_batch_threads=None, thread_pool_name=None))
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
