"""Reads the `stages.yaml` beside a model.

    pre: stages.py:preprocess                 # a function: tensors of a request -> tensors of the model; or tokenizer/:
                                              # the model of a folder of this one, by its signature serving_default
    post: stages.py:postprocess               # the model's outputs -> those of the answer
    lookup:                                   # run between the two, in batches of its own
      inputs: {user: {dtype: string}}         # tensors that `pre` gives, or the request
      outputs: {features: {dtype: float32, shape: [16]}}
      redis: {url: "redis://127.0.0.1:6379/0", prefix: "user:", timeout_ms: 1000}
      # or code: stages.py:features           # a function of many rows
      # or emulated: {base_ms: 2.0, per_row_ms: 0.01}     # a stand-in: keys as in emulated.yaml
      max_batch_size: 64
      batch_timeout_micros: 1000
      max_enqueued_batches: 100
      num_batch_threads: 2
    inputs: {text: {dtype: string}}           # what a request brings; needed with pre and with lookup
    outputs: {label: {dtype: string}}         # what an answer holds; needed with post
    signature: serving_default                # of the model
    request_threads: 2                        # that run pre and post; default: the CPUs

A function takes and returns a table of arrays by name, whose first dimension is rows; each row must come out alike,
whatever rows it came in with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from batchtune.batching.parameters import default_num_batch_threads
from batchtune.server.backends.declared_file import (
    DeclaredFile,
    check_keys,
    number,
    read_declared,
    tensor_specs,
    whole_number,
)
from batchtune.server.scheduling.batch_queue import QueueOptions
from batchtune.wire.signature import DEFAULT_SIGNATURE, TensorSpec
from batchtune.yaml_lines import YamlError

_CODE = re.compile(r"[A-Za-z_][\w-]*\.py:[A-Za-z_]\w*")
_THREADS_MAX = 1024
"""Beyond some thousands of threads the system has no more, for the whole server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupStage:
    """A stage that looks up values, in batches of its own.

    Exactly one source is set: code (FILE.py:FUNCTION, "": none), redis (url, prefix of keys, timeout in ms of
    connecting and of each answer), or emulated (keys of service_time of an emulated.yaml). queue: options of the queue
    of its batches; num_batch_threads: threads that run them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    code: str
    redis: tuple[str, str, float] | None
    emulated: Mapping[str, float] | None
    queue: QueueOptions
    num_batch_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredStages:
    """The checked content of a stages.yaml.

    pre, post: FILE.py:FUNCTION or FOLDER/, "": none. inputs, outputs: of requests and answers; None: the
    model's own. signature: name of the model's signature around which the stages lie.
    """

    file: DeclaredFile
    pre: str
    post: str
    lookup: LookupStage | None
    inputs: tuple[TensorSpec, ...] | None
    outputs: tuple[TensorSpec, ...] | None
    signature: str
    request_threads: int

    @property
    def folder(self) -> Path:
        """Directory of the version, in which the file lies."""
        return self.file.path.parent

    @property
    def code(self) -> dict[str, str]:
        """Key of stages.yaml -> FILE.py:FUNCTION, for the stages that are code of the model's folder."""
        own = {"pre": self.pre, "post": self.post, "lookup.code": self.lookup.code if self.lookup else ""}
        return {key: reference for key, reference in own.items() if _CODE.fullmatch(reference)}


def read_stages_file(version_directory: Path) -> DeclaredStages | None:
    """Read a version's stages.yaml; None: it has no such file.

    Raises:
        StatusError: INVALID_ARGUMENT `<path>:<line>: <key>: <what>; expected …`.
    """
    path = version_directory / "stages.yaml"
    if not path.is_file():
        return None
    file = read_declared(path)
    try:
        return _declared(file)
    except YamlError as fault:
        raise file.fault(str(fault)) from fault


def _declared(file: DeclaredFile) -> DeclaredStages:
    keys = ("pre", "post", "lookup", "inputs", "outputs", "signature", "request_threads")
    document = check_keys(file.data, "", keys)
    if not any(key in document for key in ("pre", "post", "lookup")):
        raise YamlError("the file: no stage; expected pre, post or lookup")
    signature = document.get("signature", DEFAULT_SIGNATURE)
    if not isinstance(signature, str):
        raise YamlError(f"signature: {signature!r}; expected a name")
    threads = document.get("request_threads", default_num_batch_threads())
    return DeclaredStages(
        file=file,
        pre=_stage(document, "pre"),
        post=_stage(document, "post"),
        lookup=_lookup(document["lookup"]) if "lookup" in document else None,
        inputs=_tensors(document, "inputs", ("pre", "lookup")),
        outputs=_tensors(document, "outputs", ("post",)),
        signature=signature,
        request_threads=whole_number(threads, "request_threads", least=1, most=_THREADS_MAX),
    )


def _tensors(document: dict[str, Any], section: str, of: tuple[str, ...]) -> tuple[TensorSpec, ...] | None:
    if any(key in document for key in of):
        return tensor_specs(document, section, wildcard_allowed=True)
    if section in document:
        raise YamlError(f"{section}: read only with {' or '.join(of)}; without, they are the model's own")
    return None


def _stage(document: dict[str, Any], key: str) -> str:
    reference = document.get(key)
    if isinstance(reference, str) and re.fullmatch(r"[A-Za-z_][\w-]*/", reference):
        return reference
    return _code(document, key, key)


def _code(section: dict[str, Any], name: str, key: str) -> str:
    if name not in section:
        return ""
    reference = section[name]
    if not isinstance(reference, str) or not _CODE.fullmatch(reference):
        raise YamlError(
            f"{key}: {reference!r}; expected FILE.py:FUNCTION of this folder, such as stages.py:{name}"
        )
    return reference


def _lookup(section: Any) -> LookupStage:
    known_sources = ("code", "redis", "emulated")
    queue_keys = ("max_batch_size", "batch_timeout_micros", "max_enqueued_batches", "num_batch_threads")
    check_keys(section, "lookup", ("inputs", "outputs", *known_sources, *queue_keys))
    sources = [name for name in known_sources if name in section]
    if len(sources) != 1:
        given = " and ".join(sources) or "none"
        raise YamlError(f"lookup: one of {', '.join(known_sources)} says whom to ask; given {given}")
    try:
        inputs = tensor_specs(section, "inputs", wildcard_allowed=True)
        outputs = tensor_specs(section, "outputs", wildcard_allowed=False)
    except YamlError as fault:
        raise YamlError(f"lookup.{fault}") from fault
    redis = _redis(section["redis"]) if "redis" in section else None
    if redis is not None and (len(inputs) != 1 or len(outputs) != 1):
        raise YamlError("lookup.redis: one key, one value; expected one tensor in inputs and one in outputs")
    counts = {
        name: whole_number(
            section[name],
            f"lookup.{name}",
            least=0 if name == "batch_timeout_micros" else 1,
            most=_THREADS_MAX if name == "num_batch_threads" else 2**63 - 1,
        )
        for name in queue_keys
        if name in section
    }
    return LookupStage(
        inputs=inputs,
        outputs=outputs,
        code=_code(section, "code", "lookup.code"),
        redis=redis,
        emulated=_emulated(section["emulated"]) if "emulated" in section else None,
        queue=QueueOptions(
            max_batch_size=counts.get("max_batch_size", 64),
            batch_timeout_micros=counts.get("batch_timeout_micros", 1000),
            max_enqueued_batches=counts.get("max_enqueued_batches", 100),
        ),
        num_batch_threads=counts.get("num_batch_threads", 2),
    )


def _redis(section: Any) -> tuple[str, str, float]:
    check_keys(section, "lookup.redis", ("url", "prefix", "timeout_ms"))
    url, prefix = section.get("url"), section.get("prefix", "")
    if not isinstance(url, str) or not url.startswith(("redis://", "rediss://", "unix://")):
        raise YamlError(f"lookup.redis.url: {url!r}; expected redis://HOST:PORT/DATABASE")
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise YamlError(f"lookup.redis.url: {error}; expected redis://HOST:PORT/DATABASE") from error
    if port == 0:
        raise YamlError("lookup.redis.url: port 0; expected redis://HOST:PORT/DATABASE")
    if not isinstance(prefix, str):
        raise YamlError(
            f"lookup.redis.prefix: {prefix!r}; expected what stands before a key, such as 'user:'"
        )
    # A store that has not answered by then is not answering: requests have deadlines of seconds.
    redis_timeout_ms = 1000.0
    timeout_ms = number(section.get("timeout_ms", redis_timeout_ms), "lookup.redis.timeout_ms")
    return url, prefix, timeout_ms or redis_timeout_ms


def _emulated(section: Any) -> dict[str, float]:
    known = ("base_ms", "per_row_ms", "jitter_ratio")
    check_keys(section, "lookup.emulated", known)
    return {name: number(value, f"lookup.emulated.{name}") for name, value in section.items()}
