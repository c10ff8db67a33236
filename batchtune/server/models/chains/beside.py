"""Which models does a chain ask that lie beside it? Served with it where it is the one model of a server."""

from __future__ import annotations

from pathlib import Path

from batchtune.server.models.chains.pipeline import PIPELINE_FILE
from batchtune.server.models.chains.pipeline_file import read_pipeline
from batchtune.server.models.model_config import ModelConfig
from batchtune.wire.status import StatusError

_NAME_MAX_BYTES = 255  # NAME_MAX of Linux


def models_beside(chain: ModelConfig) -> tuple[ModelConfig, ...]:
    """The models that its versions ask, each from the directory of its name beside the chain's own.

    None where it is no chain; what is not there, or is wrong with a declaration, is told when the chain is loaded. A
    version that is a link stands where it leads.
    """
    beside: dict[str, ModelConfig] = {}
    for file in sorted(chain.base_path.glob(f"*/{PIPELINE_FILE}")):
        version = file.parent.resolve()
        home = version.parent.parent if version.name.isdigit() else version.parent
        for name in _models_asked(file):
            if name != chain.name and _is_name(name) and (home / name).is_dir():
                beside.setdefault(name, ModelConfig(name=name, base_path=home / name))
    return tuple(beside.values())


def _is_name(model: str) -> bool:
    """Whether it names a directory beside, and no other: `..` and `/etc` lead elsewhere."""
    return model == Path(model).name != ".." and "\0" not in model and len(model.encode()) <= _NAME_MAX_BYTES


def _models_asked(file: Path) -> list[str]:
    try:
        return [step.model for step in read_pipeline(file).steps]
    except StatusError:
        return []
