"""How do a Deployment and a KServe InferenceService get the parameters?

A ConfigMap holds the server's file, the container mounts it and names it in its args; a label with the file's digest
makes new pods where only the file has changed, and tells them from the old ones. What is not said here (image,
replicas, probes, the model's volume) stays as it is when the manifest is applied over what runs, by a field manager of
its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from batchtune.batching.parameters import FILE_FLAG, SWITCH_FLAG, Configuration
from batchtune.errors import BatchingParametersError

_FOLDER: Final = "/batchtune"
_VOLUME: Final = "batching"
_LABEL: Final = "batchtune"
_HOW: Final = "kubectl apply --server-side --force-conflicts --field-manager=batchtune --filename=FILE"
_FILES: Final = ("batching_parameters.txt", "config.pbtxt")
_CONTAINERS: Final = frozenset({"containers", "predictor", "args"})
"""Keys of which one is in every manifest that runs a server."""
_NAME_CHARACTERS_MAX: Final = 50
"""Kubernetes takes 63; a ConfigMap's name has nine more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersFile:
    """The file of a server: `batching_parameters.txt`, or a Triton model's whole `config.pbtxt`."""

    name: str
    text: str


class _Literal(str):
    """A text that is written line by line."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    """YAML with such texts."""


def _literally(dumper: yaml.SafeDumper, text: _Literal) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")


_Dumper.add_representer(_Literal, _literally)


def format_k8s(configuration: Configuration, file: ParametersFile, *, model: str) -> str:
    """A ConfigMap, and the part of a Deployment that mounts it; Deployment and container are called as the model."""
    name = kubernetes_name(model)
    container = {"name": name, **_container(configuration, file, f"/models/{model}")}
    pod = {"containers": [container], **_volumes(configuration, name)}
    template = {"metadata": {"labels": {_LABEL: digest_of(configuration, file)}}, "spec": pod}
    deployment = _object("apps/v1", "Deployment", name, spec={"template": template})
    note = f"the container is called {name}; {_of_args(configuration, 'these are all its args')}"
    return _written(configuration, file, name, deployment, note)


def format_kserve(configuration: Configuration, file: ParametersFile, *, model: str) -> str:
    """A ConfigMap, and the part of an InferenceService that mounts it."""
    name = kubernetes_name(model)
    served = _container(configuration, file, f"/mnt/models/{model}")
    predictor = {"model": served, **_volumes(configuration, name)}
    service = _object("serving.kserve.io/v1beta1", "InferenceService", name, spec={"predictor": predictor})
    service["metadata"]["labels"] = {_LABEL: digest_of(configuration, file)}
    note = _of_args(configuration, "the args come after those of the runtime")
    return _written(configuration, file, name, service, note)


def digest_of(configuration: Configuration, file: ParametersFile) -> str:
    """The label of the pods that have these parameters."""
    return "p" + hashlib.sha256((file.text + repr(configuration.flags)).encode()).hexdigest()[:12]


def kubernetes_name(model: str) -> str:
    """The model's name as Kubernetes takes names: lower case, digits and dashes."""
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:_NAME_CHARACTERS_MAX].strip("-")
    return plain or "model"


def parse_manifests(text: str, *, source: str) -> tuple[str, str, bool]:
    """The name and text of the parameters' file in a ConfigMap, its lines numbered as in `text`; False: no batching.

    Raises:
        BatchingParametersError: no YAML, several files, args that name a file which is in no ConfigMap, a shell that
            starts the server, or nothing of a server.
    """
    try:
        documents = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise BatchingParametersError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    words = [node for document in documents if not _is_config_map(document) for node in _scalars(document)]
    named = _named_file(words, source)
    names = (*_FILES, *([PurePosixPath(named[0]).name] if named else []))
    files = [file for document in documents for file in _files(document, names)]
    if len(files) > 1:
        raise BatchingParametersError(
            f"{source}:{files[1][2]}: a second {files[1][0]}", hint="keep one ConfigMap with parameters"
        )
    switches = [node.value for node in words if node.value.partition("=")[0] == SWITCH_FLAG]
    if switches and switches[-1].endswith("=false"):
        return "", "", False
    if files:
        name, content, line = files[0]
        return name, "\n" * line + content, True
    if named:
        raise BatchingParametersError(
            f"{source}:{named[1]}: no ConfigMap here has the file of {FILE_FLAG}={named[0]}",
            hint=f"put it beside, under data: {{{PurePosixPath(named[0]).name}: …}}, or name the file itself",
        )
    if any("tritonserver" in node.value for node in words):
        raise BatchingParametersError(
            f"{source}: a Triton's parameters lie in the model's config.pbtxt", hint="give that file"
        )
    if not switches and not _CONTAINERS & {node.value for node in words}:
        raise BatchingParametersError(
            f"{source}: neither a ConfigMap with {_FILES[0]} nor a server's container is in it",
            hint="give the manifest of the Deployment or the InferenceService, or of their ConfigMap",
        )
    return _FILES[0], "", bool(switches)


def _named_file(words: Iterable[yaml.ScalarNode], source: str) -> tuple[str, int] | None:
    """The path and the line of the file that the server's args name, if any."""
    for node in words:
        line = node.start_mark.line + 1
        if not node.value.startswith("-") and re.search(rf"\s({FILE_FLAG}|{SWITCH_FLAG})\b", node.value):
            raise BatchingParametersError(
                f"{source}:{line}: a shell in the container starts the server",
                hint="give the file of parameters itself, or a manifest with the server's own args",
            )
        flag, equals, path = node.value.partition("=")
        if flag == FILE_FLAG and equals:
            return path, line
    return None


def _container(configuration: Configuration, file: ParametersFile, folder: str) -> dict[str, Any]:
    """The part of a container. Of a Triton the file takes the place of the one in the model's `folder`."""
    if configuration.dialect == "triton":
        mount = {"name": _VOLUME, "mountPath": f"{folder}/{file.name}", "subPath": file.name}
        return {"volumeMounts": [mount]}
    flags = [f"--{name}={value}" for name, value in configuration.flags]
    if configuration.batching is None:
        return {"args": flags}
    args = ["--enable_batching=true", f"--batching_parameters_file={_FOLDER}/{file.name}", *flags]
    return {"args": args, "volumeMounts": [{"name": _VOLUME, "mountPath": _FOLDER}]}


def _of_args(configuration: Configuration, which: str) -> str:
    if configuration.dialect == "triton":
        return "the file takes the place of the one in the model repository"
    return f"{which}: others go in the scenario's `fixed`"


def _volumes(configuration: Configuration, name: str) -> dict[str, Any]:
    if not _has_file(configuration):
        return {}
    return {"volumes": [{"name": _VOLUME, "configMap": {"name": f"{name}-{_VOLUME}"}}]}


def _has_file(configuration: Configuration) -> bool:
    """A Triton's file also says that there is no batching."""
    return configuration.batching is not None or configuration.dialect == "triton"


def _object(version: str, kind: str, name: str, **content: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}


def _written(
    configuration: Configuration,
    file: ParametersFile,
    name: str,
    changed: Mapping[str, Any],
    note: str,
) -> str:
    documents = [changed]
    if _has_file(configuration):
        data = {file.name: _Literal(file.text)}
        documents.insert(0, _object("v1", "ConfigMap", f"{name}-{_VOLUME}", data=data))
    label = " ".join(configuration.label().split())
    head = "".join(f"# {line}\n" for line in (f"batchtune: {label}", note, _HOW))
    texts = [yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000) for document in documents]
    return head + "---\n".join(texts)


def _files(node: yaml.Node | None, names: Container[str]) -> Iterator[tuple[str, str, int]]:
    """Name, text and line of each file of these names under the `data` of a ConfigMap."""
    data = _entry(node, "data")
    if not _is_config_map(node) or not isinstance(data, yaml.MappingNode):
        return
    for key, value in data.value:
        if key.value in names and isinstance(value, yaml.ScalarNode):
            yield key.value, value.value, value.start_mark.line + (value.style == "|")


def _is_config_map(node: yaml.Node | None) -> bool:
    kind = _entry(node, "kind")
    return kind is not None and kind.value == "ConfigMap"


def _entry(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """The value of a key; None: it is not there, or nothing has keys."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == name), None)


def _scalars(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    """Every key and plain value of a document, in its order."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.CollectionNode):
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                yield from _scalars(part)
