"""The models, versions and labels that are to be served.

They come from a text `ModelServerConfig` (`--model_config_file`; model_server_config.proto), from the message
of a HandleReloadConfigRequest, or from `--model_name` and `--model_base_path` (one model).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.errors import UsageError
from batchtune.server.log import note
from batchtune.wire.status import StatusError, invalid_argument

if TYPE_CHECKING:
    from batchtune.wire.tfserving.messages import ModelServerConfig


VersionPolicy = int | tuple[int, ...] | None
"""Which versions to serve: so many of the highest numbers, or these numbers; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model: `<base_path>/<number>/` are its versions; `labels`: label -> version number.

    The default policy is TF Serving's: the highest version.
    """

    name: str
    base_path: Path
    policy: VersionPolicy = 1
    labels: dict[str, int] = field(default_factory=dict)


def aspired_versions(policy: VersionPolicy, present: Sequence[int]) -> list[int]:
    """Return the version numbers to serve, ascending, of those `present`."""
    if isinstance(policy, tuple):
        return sorted(set(present) & set(policy))
    return sorted(present) if policy is None else sorted(present)[-policy:]


def aspired_versions_on_disk(model: ModelConfig) -> tuple[dict[int, Path], str]:
    """Return (version number -> directory of each version to serve, "" or the reason why there are no versions).

    Of directories that name the same version, such as 7 and 007, the last by name counts.
    """
    try:
        names = [entry.name for entry in model.base_path.iterdir()]
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        return {}, f"Could not find base path {model.base_path} for servable {model.name} with error {reason}"
    present = {
        int(name): model.base_path / name
        for name in sorted(names)
        if name.isascii() and name.isdigit() and int(name) < 2**63
    }
    aspired = aspired_versions(model.policy, list(present))
    if aspired:
        return {version: present[version] for version in aspired}, ""
    if present:
        return {}, f"None of the versions asked for of servable {model.name} is in {model.base_path}"
    return {}, (
        f"No versions of servable {model.name} found under base path {model.base_path}. "
        "Did you forget to name your leaf directory as a number (eg. '/1/')?"
    )


def read_model_config_file(path: Path, *, may_be_empty: bool = False) -> tuple[ModelConfig, ...]:
    """Read the models of a text ModelServerConfig file.

    may_be_empty: at the start of the server an empty file means no models (()). Later an empty file is an error, since
    somebody is perhaps writing it just now; `model_config_list { }` is how a file says that no model is to be served.

    Raises:
        UsageError: a file that cannot be read or parsed, or that breaks a rule.
    """
    from google.protobuf import text_format

    from batchtune.wire.tfserving.messages import ModelServerConfig

    try:
        message = text_format.Parse(path.read_text(encoding="utf-8"), ModelServerConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise UsageError(
            f"--model_config_file={path}: {error}",
            hint='expected text such as model_config_list { config { name: "m" base_path: "/models/m" } }',
        ) from error
    if message.WhichOneof("config") is None:
        if may_be_empty:
            return ()
        raise UsageError(f"--model_config_file={path}: it is empty: the models stay as they are")
    try:
        return models_of(message)
    except StatusError as error:
        raise UsageError(f"--model_config_file={path}: {error.message}") from error


def models_of(config: ModelServerConfig) -> tuple[ModelConfig, ...]:
    """Read the models of a ModelServerConfig message.

    Raises:
        StatusError: INVALID_ARGUMENT for a message without model_config_list, and for a model that is named
            twice, lacks a name or base path, has a control character there or an unknown platform.
    """
    if config.WhichOneof("config") != "model_config_list":
        raise invalid_argument(
            "ServerModelConfig type not supported by HandleReloadConfigRequest. "
            "Only ModelConfigList is currently supported"
        )
    models: dict[str, ModelConfig] = {}
    for entry in config.model_config_list.config:
        if not entry.name:
            raise invalid_argument(
                f"a model without a name is in the config list: base_path {entry.base_path!r}"
            )
        if entry.name in models:
            raise invalid_argument(f"Illegal to list model {entry.name} multiple times in config list")
        if any(unicodedata.category(letter) == "Cc" for letter in entry.name + entry.base_path):
            raise invalid_argument(f"model {entry.name!r}: control characters in its name or base_path")
        if not entry.base_path:
            raise invalid_argument(f"Expected model {entry.name} to have a base_path; it is empty")
        if entry.model_platform not in {"", "tensorflow", "batchtune"}:
            raise invalid_argument(
                f"model {entry.name}: unknown model_platform {entry.model_platform!r}; expected tensorflow"
            )
        if entry.HasField("logging_config"):
            _note_no_logging(entry.name)
        models[entry.name] = ModelConfig(
            name=entry.name,
            base_path=local_path(entry.base_path).absolute(),
            policy=_policy(entry),
            labels=dict(entry.version_labels),
        )
    return tuple(models.values())


@lru_cache(maxsize=256)  # the file is read again and again
def _note_no_logging(name: str) -> None:
    note(f"model {name}: logging_config has no effect: requests are not logged")


def local_path(base_path: str) -> Path:
    """Return the directory of a base path, which may be written as file:///models/m.

    Raises:
        StatusError: INVALID_ARGUMENT for any scheme but file, such as gs:// or s3://.
    """
    scheme, separator, rest = base_path.partition("://")
    if not separator or "/" in scheme:
        return Path(base_path)
    if scheme.lower() != "file":
        raise invalid_argument(
            f"base_path {base_path!r}: only local directories are served; mount or copy what {scheme}:// holds"
        )
    return Path("/" + rest.partition("/")[2])  # between them is a host, which TensorFlow ignores too


def _policy(config: ModelServerConfig) -> VersionPolicy:
    policy = config.model_version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return None
        case "specific":
            if not policy.specific.versions:
                raise invalid_argument(f"model {config.name}: the specific version policy names no versions")
            return tuple(policy.specific.versions)
        case _:
            return policy.latest.num_versions or 1
