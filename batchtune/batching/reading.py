"""For which server was a file of batching parameters written, and what does it say?

What is in it decides, not only its name: TensorFlow Serving's text proto, a Triton model's config.pbtxt, Cortex's API
specification, Kubernetes manifests as `k8s` and `kserve` write them, a `docker run`, or flags.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from batchtune.batching.batching_file import BatchingFile
from batchtune.batching.cortex import parse_cortex
from batchtune.batching.docker_run import is_docker_run, parse_docker_run
from batchtune.batching.flags import parse_flags
from batchtune.batching.kubernetes import parse_manifests
from batchtune.batching.parameters import SWITCH_FLAG
from batchtune.batching.tfserving import parse_tfserving_text
from batchtune.batching.triton_reading import MODEL_FIELDS, parse_config_pbtxt
from batchtune.errors import BatchingParametersError

_COMMENT: Final = re.compile(r"#[^\n]*")
_YAML_NAMES: Final = (".yaml", ".yml")
_CORTEX: Final = re.compile(
    r"^[ -]*(?:server_side_batching|processes_per_replica|threads_per_process) *:", re.MULTILINE
)
_MANIFEST: Final = re.compile(r"^apiVersion *:", re.MULTILINE)
_COMPOSE: Final = re.compile(r"^services *:", re.MULTILINE)
_INSTEAD_OF_COMPOSE: Final = (
    "give the file of parameters that its service mounts, or its command as a docker run"
)
_TRITON: Final = re.compile(
    rf"(?<![\w\"'])(?:{'|'.join(name for name in MODEL_FIELDS if name != 'max_batch_size')})\s*[:{{\[<]"
)


def read_batching_file(path: Path) -> BatchingFile:
    """What a file says.

    Raises:
        BatchingParametersError: it cannot be read; else as `parse_batching`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BatchingParametersError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BatchingParametersError(f"{path}: not UTF-8 text (byte {error.start})") from error
    return parse_batching(text, source=str(path))


def parse_batching(text: str, *, source: str) -> BatchingFile:
    """What a text says; `source` is its file's name.

    Raises:
        BatchingParametersError: `source:line: …` for what its server would not understand, or do otherwise.
    """
    try:
        return _parsed(text, source)
    except RecursionError as error:
        raise BatchingParametersError(f"{source}: nested too deeply to be read") from error


def _parsed(text: str, source: str) -> BatchingFile:
    bare = _COMMENT.sub("", text)
    if is_docker_run(bare):
        return _of_docker_run(text, source)
    if _MANIFEST.search(bare):
        name, content, enabled = parse_manifests(text, source=source)
        if not enabled:
            return BatchingFile(dialect="kubernetes", parameters=parse_tfserving_text(""), enabled=False)
        return _of_pbtxt(content, source, named=name)
    compose = _COMPOSE.search(bare)
    if compose is not None:
        line = bare.count("\n", 0, compose.start()) + 1
        raise BatchingParametersError(
            f"{source}:{line}: a compose file is not read", hint=_INSTEAD_OF_COMPOSE
        )
    if Path(source).suffix in _YAML_NAMES or _CORTEX.search(bare):
        return parse_cortex(text, source=source)
    if bare.lstrip().startswith("--"):
        return parse_flags(text, source=source)
    return _of_pbtxt(text, source, named=Path(source).name)


def _of_docker_run(text: str, source: str) -> BatchingFile:
    """The flags of the command, with the parameters of the file that it mounts."""
    run = parse_docker_run(text, source=source)
    flags = parse_flags(run.flags, source=source)
    if run.file is None:
        return replace(flags, dialect="docker", enabled=SWITCH_FLAG in run.flags and flags.enabled)
    try:
        file = read_batching_file(run.file)
    except BatchingParametersError as error:
        raise BatchingParametersError(f"{source}:{run.line}: {error.message}", hint=error.hint) from error
    if file.dialect == "triton":
        return file
    if flags.parameters != type(flags.parameters)():
        raise BatchingParametersError(
            f"{source}:{run.line}: batching parameters stand in the command and in {run.file}",
            hint="keep the file's",
        )
    enabled = SWITCH_FLAG in run.flags and flags.enabled
    return replace(file, dialect="docker", enabled=enabled, settings=flags.settings)


def _of_pbtxt(text: str, source: str, *, named: str) -> BatchingFile:
    if named == "config.pbtxt" or _TRITON.search(_COMMENT.sub("", text)):
        return parse_config_pbtxt(text, source=source)
    return BatchingFile(dialect="tfserving", parameters=parse_tfserving_text(text, source=source))
