"""With which words is a server run in a container, given its parameters by a command, or reached in secret?"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from batchtune.batching.parameters import PER_MODEL_FLAG, PORT_FLAGS, SERVER_SWITCHES, TARGETS_FLAGS
from batchtune.scenario.spec.section import FileName, Spec
from batchtune.scenario.units import problem


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


class TlsSpec(Spec):
    """How to verify the server and, for mutual TLS, to identify ourselves; PEM files."""

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
    """Whether a command names a file with the parameters."""
    return any(place in word for word in words for place in (JSON_PLACE, FILE_PLACE))
