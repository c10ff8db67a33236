"""Reads and writes the parameters in manifests of a Deployment or a KServe InferenceService.

A ConfigMap holds the server's file, the container mounts it and names it in its args; a label with the file's digest
makes new pods where only the file has changed, and distinguishes them from the old ones. What is not said here (image,
replicas, probes, the model's volume) stays as it is when the manifest is applied over what runs, by a field manager of
its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from batchtune.batching.flags import ServerArgs, server_args
from batchtune.batching.parameters import FILE_FLAG, SWITCH_FLAG, Configuration
from batchtune.errors import BatchingParametersError

_FOLDER: Final = "/batchtune"
_VOLUME: Final = "batching"
_LABEL: Final = "batchtune"
_ASIDE: Final = frozenset({"annotations", "managedFields", "status", "initContainers", "exec"})
"""Keys whose values do not say how the server starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersFile:
    """A server's file by name and content: `batching_parameters.txt`, or a Triton model's whole `config.pbtxt`."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """What manifests contain: the parameters file (None: there is none), whether batching is on, the server's
    arguments.

    `file_source`: the file's name in errors; the manifests' own name where the file is a literal block, whose text is
    then padded to have the manifests' line numbers.
    """

    file: ParametersFile | None
    file_source: str
    enabled: bool
    arguments: ServerArgs


class _Dumper(yaml.SafeDumper):
    """Writes YAML, with texts of several lines, such as files, as literal blocks."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_node)


def format_k8s(configuration: Configuration, file: ParametersFile, *, model: str) -> str:
    """Write manifests as YAML: a ConfigMap with the parameters, and the part of a Deployment that mounts it, both named
    after the model (`kubernetes_name`). No ConfigMap for TensorFlow Serving without batching, which takes no file."""
    name = kubernetes_name(model)
    container = {"name": name, **_container(configuration, file, f"/models/{model}")}
    pod = {"containers": [container], **_volumes(configuration, name)}
    template = {"metadata": {"labels": {_LABEL: digest_of(configuration, file)}}, "spec": pod}
    deployment = _object("apps/v1", "Deployment", name, spec={"template": template})
    note = f"the container is called {name}; {_of_args(configuration, 'these are all its args')}"
    return _written(configuration, file, name, deployment, note)


def format_kserve(configuration: Configuration, file: ParametersFile, *, model: str) -> str:
    """Write manifests as YAML: a ConfigMap with the parameters, and the part of an InferenceService that mounts it;
    both are named after the model (`kubernetes_name`). No ConfigMap for TensorFlow Serving without batching, which
    takes no file."""
    name = kubernetes_name(model)
    served = _container(configuration, file, f"/mnt/models/{model}")
    predictor = {"model": served, **_volumes(configuration, name)}
    service = _object("serving.kserve.io/v1beta1", "InferenceService", name, spec={"predictor": predictor})
    service["metadata"]["labels"] = {_LABEL: digest_of(configuration, file)}
    note = _of_args(configuration, "the args come after those of the runtime")
    return _written(configuration, file, name, service, note)


def digest_of(configuration: Configuration, file: ParametersFile) -> str:
    """Return a digest of these parameters and flags, the value of the label that distinguishes pods with other ones."""
    return "p" + hashlib.sha256((file.text + repr(configuration.flags)).encode()).hexdigest()[:12]


def kubernetes_name(model: str) -> str:
    """Return the model's name as Kubernetes allows names: lower case, digits and dashes; "model" if no character is
    left."""
    name_characters_max = 50  # Kubernetes takes 63; a ConfigMap's name has nine more.
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:name_characters_max].strip("-")
    return plain or "model"


def parse_manifests(text: str, *, source: str) -> Manifests:
    """Read the server's flags and parameters file from its manifests, in YAML or JSON, one by one or in a list.

    Raises:
        BatchingParametersError: no YAML, several files or servers, args that name a file which is in no ConfigMap, a
            shell that starts the server, a Triton without a config.pbtxt, or no server at all.
    """
    usual = ("batching_parameters.txt", "config.pbtxt")
    # Keys of which one is in every manifest that runs a server.
    containers = frozenset({"containers", "predictor", "args"})
    try:
        documents = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise BatchingParametersError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    objects = [item for document in documents for item in _objects(document)]
    others = [item for item in objects if not _is_config_map(item)]
    words = [node for item in others for node in _scalars(item)]
    _require_no_shell(words, source)
    server = _server(others, source)
    named = PurePosixPath(server.file).name
    files = [node for item in objects for node in _files(item, (*usual, named))]
    if len(files) > 1:
        key, _ = files[1]
        raise BatchingParametersError(
            f"{source}:{key.start_mark.line + 1}: a second {key.value}",
            hint="keep one ConfigMap with parameters",
        )
    switched = [flag for flag in server.flags.split() if flag.partition("=")[0] == SWITCH_FLAG]
    if files:
        file, file_source = _file(*files[0], source)
        is_on = not switched[-1].endswith("=false") if switched else not server.file
        return Manifests(file=file, file_source=file_source, enabled=is_on, arguments=server)
    if server.file:
        raise BatchingParametersError(
            f"{source}:{server.line}: no ConfigMap here has the file of {FILE_FLAG}={server.file}",
            hint=f"put it into the same ConfigMap, under data: {{{named}: …}}, or name the file itself",
        )
    if any("tritonserver" in node.value for node in words):
        raise BatchingParametersError(
            f"{source}: a Triton's parameters are in the model's config.pbtxt", hint="give that file"
        )
    if not switched and not containers & {node.value for node in words}:
        raise BatchingParametersError(
            f"{source}: neither a ConfigMap with {usual[0]} nor a server's container is in it",
            hint="give the manifest of the Deployment or the InferenceService, or of their ConfigMap",
        )
    return Manifests(file=None, file_source=source, enabled=bool(switched), arguments=server)


def _require_no_shell(words: Sequence[yaml.ScalarNode], source: str) -> None:
    for node in words:
        if not node.value.startswith("-") and re.search(rf"\s({FILE_FLAG}|{SWITCH_FLAG})\b", node.value):
            raise BatchingParametersError(
                f"{source}:{node.start_mark.line + 1}: a shell in the container starts the server",
                hint="give the file of parameters itself, or a manifest with the server's own args",
            )


def _server(objects: Sequence[yaml.Node], source: str) -> ServerArgs:
    """Return the arguments of the server's container: the only one that batches, else the only one that is TensorFlow
    Serving's, else the only one; no arguments where there is none such, or it is a Triton.

    Raises:
        BatchingParametersError: two servers batch, or a shell starts it.
    """
    containers = [part for item in objects for part in _containers(item, source)]
    switches = (SWITCH_FLAG, FILE_FLAG)
    batching = [
        part for part in containers if any(word.value.partition("=")[0] in switches for word in part[1])
    ]
    if len(batching) > 1:
        raise BatchingParametersError(
            f"{source}:{batching[1][1][0].start_mark.line + 1}: a second server",
            hint="give a manifest with one server only",
        )
    programs = ("tensorflow_model_server", "tensorflow/serving", "batchtune-model-server")
    known = [part for part in containers if any(name in f"{part[0]} {part[1][0].value}" for name in programs)]
    image, words = next((parts[0] for parts in (batching, known, containers) if len(parts) == 1), ("", []))
    if not words or "tritonserver" in f"{image} {words[0].value}":
        return ServerArgs()
    first = next((word for word in words if word.value.startswith(FILE_FLAG)), words[0])
    args = [image, *(word.value for word in words)]
    return server_args(args, source=source, line=first.start_mark.line + 1, in_container=True)


def _containers(node: yaml.Node, source: str) -> Iterator[tuple[str, list[yaml.ScalarNode]]]:
    """Yield (image, words of command and args) of each container that has such words.

    Raises:
        BatchingParametersError: these are no list.
    """
    if isinstance(node, yaml.SequenceNode):
        for part in node.value:
            yield from _containers(part, source)
    elif isinstance(node, yaml.MappingNode):
        said = [_entry(node, name) for name in ("command", "args")]
        for part in said if _entry(node, "image") is not None else ():
            if isinstance(part, yaml.ScalarNode) and part.tag != "tag:yaml.org,2002:null":
                raise BatchingParametersError(
                    f"{source}:{part.start_mark.line + 1}: command and args of a container are lists of words; was "
                    f"{part.value!r}",
                    hint="write args: [--enable_batching=true, …]",
                )
        lists = [part for part in said if isinstance(part, yaml.SequenceNode)]
        words = [word for part in lists for word in part.value if isinstance(word, yaml.ScalarNode)]
        if words:
            image = _entry(node, "image")
            yield str(image.value) if isinstance(image, yaml.ScalarNode) else "", words
        for key, value in node.value:
            if key.value not in _ASIDE:
                yield from _containers(value, source)


def _container(configuration: Configuration, file: ParametersFile, folder: str) -> dict[str, Any]:
    """Return the keys of a container that the configuration sets: args and volumeMounts.

    A Triton's file is mounted in place of the one in the model's `folder`.
    """
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
    """Whether the server needs a file; a Triton always does: its file also says that there is no batching."""
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
        data = {file.name: file.text}
        documents.insert(0, _object("v1", "ConfigMap", f"{name}-{_VOLUME}", data=data))
    label = " ".join(configuration.label().split())
    how = "kubectl apply --server-side --force-conflicts --field-manager=batchtune --filename=FILE"
    head = "".join(f"# {line}\n" for line in (f"batchtune: {label}", note, how))
    texts = [yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000) for document in documents]
    return head + "---\n".join(texts)


def _objects(node: yaml.Node | None) -> Iterator[yaml.Node]:
    """Yield the manifest, or those of a list (`kubectl get`)."""
    items = _entry(node, "items")
    if isinstance(items, yaml.SequenceNode):
        for item in items.value:
            yield from _objects(item)
    elif node is not None:
        yield node


def _files(node: yaml.Node, names: Container[str]) -> Iterator[tuple[yaml.ScalarNode, yaml.ScalarNode]]:
    """Yield (name, text) of each file of these names under the `data` of a ConfigMap."""
    data = _entry(node, "data")
    if not _is_config_map(node) or not isinstance(data, yaml.MappingNode):
        return
    for key, value in data.value:
        if key.value in names and isinstance(value, yaml.ScalarNode):
            yield key, value


def _file(key: yaml.ScalarNode, value: yaml.ScalarNode, source: str) -> tuple[ParametersFile, str]:
    """Return (file, its name in errors); a literal block is padded with lines to have the manifest's line numbers."""
    line = value.start_mark.line + 1
    if value.style == "|":
        return ParametersFile(name=key.value, text="\n" * line + value.value), source
    return ParametersFile(name=key.value, text=value.value), f"{source}:{line}: {key.value}"


def _is_config_map(node: yaml.Node | None) -> bool:
    kind = _entry(node, "kind")
    return kind is not None and kind.value == "ConfigMap"


def _entry(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """Return the value of a key; None where the node has no such key, or no keys."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == name), None)


def _scalars(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    """Yield every key and plain value of a document, in its order, that may say how a server starts."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for part in node.value:
            yield from _scalars(part)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value not in _ASIDE:
                yield from _scalars(key)
                yield from _scalars(value)
