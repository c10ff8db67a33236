"""The server that a scenario asks for: launched and how, attached to, or only loaded."""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from batchtune.batching.parameters import (
    PER_MODEL_FLAG,
    PORT_FLAGS,
    SERVER_SWITCHES,
    TARGETS_FLAGS,
    Configuration,
    ServerWord,
    flag_text,
)
from batchtune.batching.triton_config import FoundBatching
from batchtune.errors import BatchingParametersError, UsageError
from batchtune.scenario.spec.http_server import MeansSpec, MetricsSpec, ReadySpec, SettingSpec
from batchtune.scenario.spec.knobs import in_words_of
from batchtune.scenario.spec.search_section import KnobField, KnobValue, Space
from batchtune.scenario.spec.section import FileName, ModelName, PositiveSeconds, ServerCpus, Spec, problem
from batchtune.scenario.spec.served_models import ServedModelSpec


def _words(given: object) -> object:
    if not isinstance(given, list | tuple) or not given or not all(isinstance(word, str) for word in given):
        raise problem(
            f"expected a list of words; was {given!r}",
            hint="write [kubectl, apply, …]; no shell reads it, and a number needs quotes",
        )
    return given


def _flag_value(given: object) -> object:
    if not isinstance(given, bool | int | float | str):
        raise problem(f"expected a number, a word, true or false; was {given!r}")
    return given


FlagValue = Annotated[bool | int | float | str, BeforeValidator(_flag_value)]


def _server_flags(given: dict[str, FlagValue], info: ValidationInfo) -> dict[str, FlagValue]:
    """What a run kept may hold files for each model, which were allowed once."""
    kept = not info.context["files_exist"] if info.context else False
    for name, value in given.items():
        plain = name.lstrip("-")
        if plain in SERVER_SWITCHES:
            raise problem(
                "each trial gives the server its parameters by this flag",
                at=(name,),
                hint="write the parameters, or enable_batching: false, in fixed",
            )
        if plain in TARGETS_FLAGS and not (kept and plain == PER_MODEL_FLAG):
            raise problem(TARGETS_FLAGS[plain], at=(name,), hint="leave it out")
        if plain in PORT_FLAGS and not (str(value).isdecimal() and int(value) < 2**16):
            raise problem(f"expected a port, 0 to 65535; was {value!r}", at=(name,))
    return given


FlagValues = Annotated[dict[str, FlagValue], AfterValidator(_server_flags)]
Argv = Annotated[tuple[str, ...], BeforeValidator(_words), Field(min_length=1)]
RenderedFile = Literal["tfserving", "triton", "cortex", "flags", "k8s", "kserve"]
JSON_PLACE: Final = "{json}"
FILE_PLACE: Final = "{file}"
DIGEST_PLACE: Final = "{digest}"
PORT_PLACES: Final = ("{port}", "{port2}", "{port3}")
"""Texts of a target of kind http in which a free port is put."""


class TlsSpec(Spec):
    """PEM files that verify the server and, for mutual TLS, identify the client."""

    ca_file: FileName | None = Field(default=None, description="absent: the system's trust store")
    certificate_file: FileName | None = None
    key_file: FileName | None = None
    server_name: str | None = Field(
        default=None, description="name in the server's certificate, if not its address"
    )

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if self.key_file is not None and self.certificate_file is None:
            raise problem("missing: a key_file goes with a certificate_file", at=("certificate_file",))
        return self

    def context(self) -> ssl.SSLContext:
        """Make an SSL context for clients that verifies the server.

        Raises:
            UsageError: a file that cannot be read as a certificate or key.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"TLS files cannot be used: {error}", hint="give PEM files") from error
        return context

    def pem_files(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the contents of (CA file, key file, certificate file), in the order that grpcio's channel
        credentials take; None for each that is not given.

        Raises:
            UsageError: a file that cannot be read.
        """
        try:
            ca, key, certificate = (
                Path(name).read_bytes() if name else None
                for name in (self.ca_file, self.key_file, self.certificate_file)
            )
        except OSError as error:
            raise UsageError(f"TLS files cannot be used: {error}", hint="give PEM files") from error
        return ca, key, certificate


class DockerSpec(Spec):
    """How a container is run: the model mounted read-only, ports on the loopback, removed at its end."""

    image: str | None = Field(
        default=None,
        min_length=1,
        description="absent: tensorflow/serving, with gpus tensorflow/serving:latest-gpu; a Triton's must be named",
        examples=["tensorflow/serving:2.19.1", "nvcr.io/nvidia/tritonserver:26.04-py3"],
    )
    gpus: str | None = Field(
        default=None, description="as --gpus of docker run; absent: none", examples=["all", "device=0"]
    )
    program: str = Field(default="docker", min_length=1, description="podman and nerdctl take the same words")
    options: tuple[str, ...] = Field(
        default=(),
        description="further options of docker run, each with its value in one word",
        examples=[["--shm-size=2g", "--env=TF_CPP_VMODULE=http_server=1"]],
    )


def takes_file(words: tuple[str, ...]) -> bool:
    """Whether a command names a file with the parameters, by {json} or {file}."""
    return any(place in word for word in words for place in (JSON_PLACE, FILE_PLACE))


Framework = Literal["keras", "torch", "torchscript"]
TargetKind = Literal["tfserving", "triton", "http", "command", "external"]
ServerKind = Literal["bundled", "local", "docker"]


Address = Annotated[
    str, Field(pattern=r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}$", description="HOST:PORT")
]


def name_in(url: str) -> str:
    """Return the name for a model of kind http that has none: the last part of its URL, or `server` where that is no
    identifier."""
    last = url.rstrip("/").rpartition("/")[2]
    return last if last.isidentifier() else "server"


def _either_model_or_models(schema: dict[str, Any]) -> None:
    """Make the JSON schema ask for one of the two keys: `model` is required, but where models are listed it
    is the first of them."""
    schema["required"].remove("model")
    if not schema["required"]:
        del schema["required"]
    schema["anyOf"] = [{"required": ["model"]}, {"required": ["models"]}]


class TargetSpec(Spec):
    """The server that is launched, attached to or only loaded, and the model that it serves."""

    model_config = ConfigDict(json_schema_extra=_either_model_or_models)

    kind: TargetKind = Field(
        default="tfserving",
        description="tfserving: speaks TensorFlow Serving's API, launched; triton: launched, or with rest_url attached "
        "to and restored at the end; http: any HTTP/1.1 server, by url, set and means; command: any server, given its "
        "parameters by your own commands; external: runs "
        "already and is only loaded",
    )
    model: ModelName = Field(
        min_length=1,
        description="a SavedModel directory (with version directories or without), a .onnx, .pt2 or .pt file "
        "(relative to this file), or a sample model; of a Triton a folder of its repository; of a running server the "
        "name that it serves the model by",
        examples=["imdb_transformer", "text_recognition", "resnet50", "./my_model", "./my_model.onnx"],
    )
    models: tuple[ServedModelSpec, ...] = Field(
        default=(),
        description="several models of one server instead of `model`, on the same threads; for `load` and `sweep`",
        examples=[[{"name": "ranker", "model": "imdb_transformer", "rate": "200/s"}]],
    )
    rest_url: str | None = Field(
        default=None,
        description="of a running server: its REST API",
        examples=["http://127.0.0.1:8000"],
    )
    grpc_url: str | None = Field(
        default=None, description="of a running server: its gRPC API", examples=["127.0.0.1:8001"]
    )
    endpoints: tuple[Address, ...] = Field(
        default=(),
        description="of kind external: replicas that requests go to in turn, each by the request's protocol; the "
        "server of rest_url or grpc_url, such as a balancer, then says what the model takes and what was counted",
        examples=[["10.0.0.7:8500", "10.0.0.8:8500"]],
    )
    url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="of kind http: where requests go; {port}, {port2} and {port3} are free ports of this machine, "
        "here and in what starts and asks the server",
        examples=["http://127.0.0.1:{port}/predict"],
    )
    set: SettingSpec | None = Field(
        default=None, description="of kind http: how the server is given its parameters"
    )
    means: MeansSpec = Field(
        default_factory=MeansSpec,
        description="of kind http: which of its parameters are rows, wait, concurrency",
    )
    metrics: MetricsSpec | None = Field(default=None, description="of kind http: its Prometheus page")
    defaults: dict[str, KnobField] = Field(
        default_factory=dict, description="of kind http: its parameters' defaults"
    )
    present: dict[str, KnobField] = Field(
        default_factory=dict,
        description="of kind http: the present settings; written by a sweep that reads them",
    )
    traps: dict[str, str] = Field(
        default_factory=dict,
        description="of kind http: warnings about parameters, printed if one is searched or fixed",
    )
    framework: Framework | None = Field(
        default=None, description="of a sample model; absent: the first of its frameworks that is installed"
    )
    device: str = Field(
        default="auto", description="where the bundled server runs the model", examples=["cpu", "cuda"]
    )
    server: ServerKind | None = Field(
        default=None,
        description="bundled: batchtune's own (the default of kind tfserving); local: tensorflow_model_server, of kind "
        "triton tritonserver (its default), on the PATH or as `command` says; docker: in a container",
    )
    docker: DockerSpec | None = None
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="another server program with the same flags",
        examples=[["tensorflow_model_server"]],
    )
    flags: FlagValues = Field(
        default_factory=dict,
        description="server flags without dashes, the same in every trial",
        examples=[{"tensorflow_intra_op_parallelism": 1}],
    )
    ready_timeout_s: PositiveSeconds = Field(
        default=120.0, alias="ready_timeout", description="how long the server may take to load the model"
    )
    cpus: ServerCpus | None = Field(
        default=None,
        description="CPUs that the launched server may run on. Absent, and load.cpus too: server and client run "
        "on different CPUs where there are enough; all: they share them",
        examples=[[0], "all"],
    )
    launch: Argv | None = Field(
        default=None,
        description="of kinds command and http: the server itself, started before the first configuration and ended "
        "with the sweep; with a {json} or {file} among its words, or variables, flags or a file in `set`, it is "
        "restarted for each",
        examples=[["my_server", "--config={file}"]],
    )
    install: str | None = Field(
        default=None,
        description="of kinds command and http: the command that installs what launch needs; an error for a missing "
        "program names it",
        examples=["pip install vllm"],
    )
    apply: Argv | None = Field(
        default=None,
        description="of kind command: gives a configuration, and ends; on its stdin is JSON, {json} is a file of the "
        "same, {file} one in the dialect of render",
        examples=[["kubectl", "apply", "--server-side", "--force-conflicts", "--filename={file}"]],
    )
    render: RenderedFile | None = Field(default=None, description="of kind command: the format of {file}")
    ready: Argv | str | ReadySpec | None = Field(
        default=None,
        description="of kinds command and http: a URL that answers 200, of http also {url, status, body}, or a "
        "command that ends with 0, asked until it does; "
        "{digest} is the label of the pods that k8s and kserve make; absent: the model's status at rest_url",
        examples=["http://127.0.0.1:8501/v1/models/m", ["kubectl", "rollout", "status", "deployment/m"]],
    )
    stop: Argv | None = Field(
        default=None, description="of kind command: run at the end, before what was launched is ended"
    )
    restore: Argv | None = Field(
        default=None,
        description="of kind command: run last, to restore the original state",
        examples=[["kubectl", "apply", "--filename=my_model.yaml"]],
    )
    environment: tuple[str, ...] | None = Field(
        default=None,
        description="of kinds command and http: names of variables that the commands get besides PATH, HOME and the "
        "like",
        examples=[["AWS_PROFILE"]],
    )
    step_timeout_s: PositiveSeconds | None = Field(
        default=None,
        alias="step_timeout",
        description="of kind command: how long apply, stop and restore may take; absent: 2 minutes",
    )
    tls: TlsSpec | None = None
    found: FoundBatching | None = Field(
        default=None,
        description="written by a sweep of kind triton: the batching part of the model's configuration before the "
        "first change",
    )

    @property
    def runs_already(self) -> bool:
        """Whether the server runs already, or the scenario's own commands start it, so that batchtune chooses no CPUs
        for it."""
        return self.kind in ("external", "command", "http") or self.attached

    @property
    def attached(self) -> bool:
        """Whether a running server, a Triton or one of kind http, is reconfigured and put back as it was."""
        if self.kind == "http":
            return self.launch is None and self.set is not None
        return self.kind == "triton" and self.rest_url is not None

    @property
    def takes_parameters(self) -> bool:
        """Whether the scenario says how the server is given its parameters: False for kind http with neither `set`
        nor a file among the words of `launch`."""
        return self.kind != "http" or self.set is not None or takes_file(self.launch or ())

    @property
    def flag_texts(self) -> dict[str, str]:
        """The server flags, without dashes, as a command line writes them."""
        return {name.lstrip("-"): flag_text(value) for name, value in self.flags.items()}

    @property
    def reads_back(self) -> bool:
        """Whether it is certain that the server runs with the applied configuration: it can be read from the server
        (kind http), or the server is known to obey its flags and file (every kind but command)."""
        if self.kind == "http":
            return self.set is not None and self.set.request is not None and self.set.request.read is not None
        return self.kind != "command"

    @property
    def words(self) -> tuple[ServerWord, ...]:
        """(TensorFlow Serving's name, the server's name, factor to TensorFlow Serving's unit) for each batching
        parameter that a server of kind http has; empty for other kinds."""
        return self.means.words()

    def traps_of(self, values: Mapping[str, Collection[object]]) -> list[str]:
        """Return the warnings of `target.traps` on parameters that are to have any value but 0 or off.

        `values`: parameter, by TensorFlow Serving's name where it has one -> values to be used.
        """
        ours = {word: name for name, word, _ in self.words}
        return [
            f"{word}: {text}"
            for word, text in self.traps.items()
            if any(values.get(ours.get(word, word), ()))
        ]

    def in_house_words(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values, given by the server's own names, under TensorFlow Serving's names and in its units."""
        return dict(in_words_of(values, self.words))

    @property
    def runs(self) -> Literal["bundled", "local", "docker", "command"]:
        """What is launched: the bundled server, a program on this machine (local), a container, or the command of a
        program of the user's that takes the flags of tensorflow_model_server."""
        if self.server is not None:
            return self.server
        if self.docker is not None:
            return "docker"
        if self.kind == "triton":
            return "local"
        return "bundled" if self.command is None else "command"

    @property
    def is_unnamed(self) -> bool:
        """Whether the model's name is only the last part of the URL of a server of kind http."""
        return self.url is not None and self.model == name_in(self.url)

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_url(cls, given: Any) -> Any:
        """Name the model of a server of kind http, where it has no name, by the last part of its URL."""
        if not isinstance(given, Mapping) or given.get("kind") != "http" or given.get("model") is not None:
            return given
        return {**given, "model": name_in(str(given.get("url")))}

    @model_validator(mode="before")
    @classmethod
    def _first_model(cls, given: Any, info: ValidationInfo) -> Any:
        """Make `model` the first of the models that are listed; a scenario that a run kept may have it
        already."""
        models = given.get("models") if isinstance(given, Mapping) else None
        kept = not info.context["files_exist"] if info.context else False
        if models and not kept and given.get("model") is not None:
            what = "several models are listed in target.models"
            raise problem(what, at=("model",), hint="remove target.model, or target.models to serve this one")
        if models and not isinstance(models, list | tuple):
            hint = "several begin with - name: …; --set target.models.0.rate=50/s changes the first of a list"
            raise problem("expected a list of models", at=("models",), hint=hint)
        first = models[0] if models else None
        model = first.get("model") if isinstance(first, Mapping) else getattr(first, "model", None)
        return given if model is None else {**given, "model": model}

    @model_validator(mode="after")
    def _of_several_models(self) -> Self:
        if not self.models:
            return self
        names = [own.name for own in self.models]
        twice = next((at for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            raise problem("another model has this name", at=("models", twice, "name"))
        if self.kind != "tfserving" or self.runs == "docker":
            raise problem(
                "several models are served by a server that is launched here: kind tfserving, bundled or local",
                at=("models",),
                hint="remove kind and docker, or list one model",
            )
        for flag in ("model_name", "model_base_path", "model_config_file"):
            if flag in self.flags:
                raise problem("the models are listed in target.models", at=("flags", flag), hint="remove one")
        return self

    @model_validator(mode="after")
    def _of_one_server(self) -> Self:
        if self.docker is not None and self.runs != "docker":
            raise problem(
                f"read only with server: docker; this one is {self.runs}",
                at=("docker",),
                hint="remove one of the two",
            )
        if self.command is not None and self.runs in ("bundled", "docker"):
            raise problem(
                f"server: {self.runs} starts its own program",
                at=("command",),
                hint="set server: local, or leave it out",
            )
        if self.kind == "triton" and self.runs == "bundled":
            raise problem("the bundled server is not Triton", at=("server",), hint="set local or docker")
        if (
            self.kind == "triton"
            and self.runs == "docker"
            and (self.docker is None or self.docker.image is None)
        ):
            raise problem(
                "missing: the image has no usual tag",
                at=("docker", "image"),
                hint="add docker: {image: nvcr.io/nvidia/tritonserver:26.04-py3}",
            )
        return self

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        if self.kind != "external":
            self._refuse(("endpoints",), "replicas run already", "set kind: external")
        if self.kind == "tfserving":
            self._refuse(
                ("rest_url", "grpc_url"), "a server of kind tfserving is launched", "set kind: external"
            )
        elif self.kind in ("external", "command") and self.rest_url is None and self.grpc_url is None:
            raise problem(
                "missing: where the server is",
                at=("rest_url",),
                hint="add rest_url: http://HOST:PORT, or grpc_url",
            )
        elif self.kind == "triton" and self.rest_url is None and self.grpc_url is not None:
            raise problem(
                "missing: Triton takes configurations by its REST API",
                at=("rest_url",),
                hint="add rest_url: http://HOST:8000 and keep grpc_url, or set kind: external to load it only",
            )
        twice = next((name for name in self.endpoints if self.endpoints.count(name) > 1), None)
        if twice is not None:
            raise problem(f"{twice} is given twice", at=("endpoints",), hint="name each replica once")
        of_a_launch = ("server", "docker", "command", "flags", "cpus", "framework", "device")
        if self.kind == "http":
            self._refuse(
                (*of_a_launch, "rest_url", "apply", "render", "stop", "restore", "step_timeout_s"),
                "a server of kind http is described by url, launch, set and means",
                "leave it out, or set kind: command",
            )
            self._be_asked_by_http()
        elif self.kind == "command":
            self._refuse(
                of_a_launch, "of kind command only launch and apply start a server", "say it in these words"
            )
            self._consist_of_commands()
        else:
            self._refuse(
                (
                    *("launch", "install", "apply", "render", "ready"),
                    *("stop", "restore", "environment", "step_timeout_s"),
                ),
                f"of kind command only; this one is {self.kind}",
                "set kind: command, or leave it out",
            )
        of_http = ("url", "set", "means", "metrics", "defaults", "present", "traps")
        if self.kind != "http":
            self._refuse(
                of_http, f"of kind http only; this one is {self.kind}", "set kind: http, or leave it out"
            )
        if self.runs_already:
            self._refuse(of_a_launch, "the server behind the URL runs already", "leave it out, or the URL")
        if self.kind == "triton":
            self._refuse(
                ("framework", "device"),
                "kind triton takes none",
                "the model's config.pbtxt says what runs it, and where",
            )
        return self

    def _be_asked_by_http(self) -> None:
        """Check that there is a URL for requests, and that each parameter gets to the server; raises a
        problem if not."""
        if self.url is None:
            raise problem(
                "missing: where requests go", at=("url",), hint="add url: http://127.0.0.1:8000/predict"
            )
        self._require_port()
        if self.set is None:
            return
        if (self.set.env or self.set.flag) and self.launch is None:
            raise problem(
                "variables and flags reach a server only when it starts",
                at=("set",),
                hint="add launch: [PROGRAM, …], or set its parameters by a request",
            )
        if self.launch is None and self.set.request is None:
            raise problem(
                "a server that runs already takes parameters by a request only", at=("set", "request")
            )
        known = self.set.names()
        for key, names in (
            ("means", [word for _, word, _ in self.words]),
            ("defaults", self.defaults),
            ("traps", self.traps),
        ):
            for name in names:
                if name not in known:
                    raise problem(
                        f"{name} is a parameter that target.set does not give to the server",
                        at=(key,),
                        hint=f"set gives: {', '.join(sorted(known))}",
                    )

    def _require_port(self) -> None:
        """Check that a free port in the URL is one that the launched server is given; raises a problem if not."""
        for place in re.findall(r"\{\w*\}", urlsplit(self.url or "").netloc):
            if place not in PORT_PLACES:
                raise problem(f"{place} is not a placeholder", at=("url",), hint="write {port}, or a number")
            if place not in repr((self.launch, self.set)):
                raise problem(
                    f"no word of launch has {place} in it",
                    at=("url",),
                    hint=f"add {place} to a word of launch, or write the port that the server takes",
                )

    def _consist_of_commands(self) -> None:
        """Check that the parameters get to the server, and that something shows when it is ready; raises a
        problem if not."""
        given = [word for words in (self.launch, self.apply) for word in words or ()]
        if self.apply is None and (self.launch is None or not takes_file(self.launch)):
            raise problem(
                "missing: how the server is given its parameters",
                at=("apply",),
                hint="add apply: [PROGRAM, …], or a word with {json} or {file} to launch",
            )
        asks_file = any(FILE_PLACE in word for word in given)
        if asks_file and self.render is None:
            raise problem(
                "missing: the format of {file}", at=("render",), hint="add render: k8s, kserve or tfserving"
            )
        if self.render is not None and not asks_file:
            raise problem(
                "no word of launch or apply has {file} in it",
                at=("render",),
                hint="leave it out, or name {file}",
            )
        if self.ready is None and self.rest_url is None:
            raise problem(
                "missing: how batchtune finds out that the server is ready",
                at=("ready",),
                hint="add a command, a URL, or rest_url",
            )
        if isinstance(self.ready, str) and not self.ready.startswith(("http://", "https://")):
            raise problem(f"expected a URL or a list of words; was {self.ready!r}", at=("ready",))

    def _refuse(self, names: tuple[str, ...], why: str, hint: str) -> None:
        for name in names:
            field = type(self).model_fields[name]
            if getattr(self, name) != field.get_default(call_default_factory=True, validated_data={}):
                raise problem(why, at=(field.alias or name,), hint=hint)


def target_written(given: object) -> tuple[str, tuple[ServerWord, ...]]:
    """Return (`target.kind`, names of the target's parameters) of a scenario that is parsed and not yet checked.

    The kind is "" without a target. The names are as `TargetSpec.words`; () where `target.means` is malformed, which
    the check of the scenario reports.
    """
    target = given.get("target") if isinstance(given, Mapping) else None
    if isinstance(target, TargetSpec):
        return target.kind, target.words
    if not isinstance(target, Mapping):
        return "", ()
    means = target.get("means")
    words = means.words() if isinstance(means, MeansSpec) else _written_words(means)
    return str(target.get("kind")), words


def _written_words(means: object) -> tuple[ServerWord, ...]:
    """Return the parameter names of `target.means` in a scenario not yet checked; () where it is malformed,
    which the check of the scenario reports."""
    try:
        return MeansSpec.model_validate(means or {}).words()
    except ValueError:
        return ()


def unsayable(target: TargetSpec) -> str:
    """Return why batching cannot be turned off on this server, as a clause; for a target with `can_be_off` False."""
    if target.kind == "http":
        return "target.means names no parameter for the rows in a batch"
    return "a tfserving file, all that target's commands name, cannot express no batching"


_HINT: Final = (
    "leave it out, or tell the server by {json} too, by JSON on the stdin of an apply that names no file, or by "
    "another dialect in target.render"
)


def can_be_off(target: TargetSpec) -> bool:
    """Whether batching can be turned off: False for commands that get only a tfserving file, and for a server of kind
    http without a parameter for the rows in a batch."""
    if target.kind == "http":
        return target.means.rows is not None
    words = [word for command in (target.launch, target.apply) for word in command or ()]
    reads_stdin = target.apply is not None and not takes_file(target.apply)
    names_json = any(JSON_PLACE in word for word in words)
    names_file = any(FILE_PLACE in word for word in words)
    return target.render != "tfserving" or not names_file or names_json or reads_stdin


def check_off(target: TargetSpec, fixed: Mapping[str, object], space: Mapping[str, Space]) -> None:
    """Check that batching can be turned off on the server where `fixed` or `space` has `enable_batching: false`;
    raises a problem if not."""
    if can_be_off(target):
        return
    switch = "enable_batching"
    values: tuple[KnobValue, ...] = tuple(space[switch].values) if switch in space else ()
    for path, is_asked in (
        (("fixed", switch), fixed.get(switch) is False),
        (("search", "space", switch), False in values),
    ):
        if is_asked:
            raise problem(unsayable(target), at=path, hint=_HINT)


def require_sayable(configuration: Configuration, target: TargetSpec) -> None:
    """Check that this configuration can be applied to the server.

    Raises:
        BatchingParametersError: it turns batching off, which this server cannot.
    """
    if configuration.batching is None and not can_be_off(target):
        raise BatchingParametersError(unsayable(target), hint=_HINT)
