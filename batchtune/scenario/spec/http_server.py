"""The keys of a scenario for a server of `target.kind: http`: how it is ready, given its parameters, and
read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from batchtune.batching.parameters import ServerWord
from batchtune.scenario.places import holes
from batchtune.scenario.spec.section import HttpStatus, Seconds, Spec, problem

CHANGED: Final = "changed"
"""Name in the body of a request that sets parameters for the document that was read, with its changes."""
MICROS_PER_UNIT: Final = {"wait_s": 1_000_000, "wait_ms": 1_000, "wait_micros": 1}


class ReadySpec(Spec):
    """A URL that tells when the server is ready."""

    url: str = Field(pattern=r"^https?://", examples=["http://127.0.0.1:8000/health"])
    status: tuple[HttpStatus, ...] = Field(default=(200,), description="any of these status codes")
    body: str | None = Field(default=None, description="a text that the answer must contain")


class MeansSpec(Spec):
    """The server's own names of the parameters that every batching server has: size, wait and concurrency."""

    rows: str | None = Field(default=None, description="the most rows, or requests, in a batch")
    wait_s: str | None = Field(default=None, description="how long a batch waits to fill, in seconds")
    wait_ms: str | None = Field(default=None, description="the same in milliseconds")
    wait_micros: str | None = Field(default=None, description="the same in microseconds")
    concurrency: str | None = Field(default=None, description="how many batches run at once")

    @model_validator(mode="after")
    def _one_wait(self) -> Self:
        given = [name for name in MICROS_PER_UNIT if getattr(self, name) is not None]
        if len(given) > 1:
            raise problem(f"the wait is given twice: {' and '.join(given)}", at=(given[1],))
        names = [name for name in self.model_dump().values() if name is not None]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise problem(f"{twice} cannot mean two things")
        return self

    def words(self) -> tuple[ServerWord, ...]:
        """Return (TensorFlow Serving's name, the server's name, factor) for each batching parameter that the server
        has; the server's value times the factor is TensorFlow Serving's: 1, but for a wait in seconds or
        milliseconds."""
        words = [("max_batch_size", self.rows, 1), ("num_batch_threads", self.concurrency, 1)]
        words += [
            ("batch_timeout_micros", getattr(self, unit), micros) for unit, micros in MICROS_PER_UNIT.items()
        ]
        return tuple((name, word, micros) for name, word, micros in words if word is not None)


class FileSetting(Spec):
    """A file that the server reads its parameters from: JSON of which some values change, or a text."""

    path: str = Field(
        description="{scratch} is a folder that lasts as long as the sweep; an existing file is restored",
        examples=["{scratch}/model-settings.json"],
    )
    base: Any = Field(default=None, description="the JSON to start from if the file does not exist")
    change: dict[str, Any] = Field(
        default_factory=dict,
        description="values by their place in the JSON, {{PARAMETER}} in them replaced",
        examples=[{"max_batch_size": "{{max_batch_size}}"}],
    )
    text: str | None = Field(
        default=None, description="instead: the whole file, {{PARAMETER}} in it replaced"
    )


class UntilSpec(Spec):
    """What a URL must answer before the new parameters are in force."""

    url: str = Field(pattern=r"^https?://")
    path: str = Field(description="a place in its JSON", examples=["applications.default.status"])
    value: Any = Field(description="what must stand there", examples=["RUNNING"])
    failed: tuple[str, ...] = Field(default=(), description="values there that mean failure")


class RequestSetting(Spec):
    """A request by which a running server takes its parameters, without a restart."""

    url: str = Field(pattern=r"^https?://")
    method: Literal["PUT", "POST", "PATCH"] = "POST"
    headers: dict[str, str] = Field(default_factory=dict, examples=[{"Authorization": "Bearer …"}])
    read: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="a URL that returns what is in force, which is restored at the end",
    )
    at: str = Field(default="", description="the part of what was read that is sent back, changed")
    change: dict[str, Any] = Field(
        default_factory=dict,
        description="values by their place in that part; * is every key; default: each parameter of body by its name",
        examples=[{"deployments.*.user_config.max_batch_size": "{{max_batch_size}}"}],
    )
    body: Any = Field(
        default=None,
        description="what is sent, {{PARAMETER}} in it replaced; {{changed}} is the changed part, and the default "
        "with change",
        examples=[{"applications": ["{{changed}}"]}],
    )
    off: Any = Field(
        default=None,
        description="that part for no batching, sent instead of the changed one",
        examples=[{"enable_batching": False}],
    )
    until: UntilSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        """Return the keys with the `body` that `change` means, or the `change` that `body` means."""
        if not isinstance(given, Mapping):
            return given
        if given.get("change") and given.get("read") is None:
            raise problem(
                "read is missing: change gives places in what read returns",
                at=("change",),
                hint="add read: URL, or give body: {NAME: '{{PARAMETER}}'} instead of change",
            )
        if given.get("change") and given.get("body") is None:
            return {**given, "body": f"{{{{{CHANGED}}}}}"}
        names = set(holes(given.get("body")))
        if given.get("read") is None or given.get("change") or not names or CHANGED in names:
            return given
        return {**given, "change": {name: f"{{{{{name}}}}}" for name in sorted(names)}}


class SettingSpec(Spec):
    """How the server is given its parameters, each by its own name."""

    env: dict[str, str] = Field(
        default_factory=dict, description="environment variables: {PARAMETER: VARIABLE}; by a restart"
    )
    flag: dict[str, str] = Field(
        default_factory=dict, description="flags after the words of launch: {PARAMETER: --flag}; by a restart"
    )
    file: FileSetting | None = None
    request: RequestSetting | None = None

    @property
    def restarts(self) -> bool:
        """Whether a new configuration needs a new process."""
        return bool(self.env or self.flag or self.request is None)

    def names(self) -> set[str]:
        """Return the names of all parameters that `env`, `flag`, `file` and `request` give to the server."""
        return {*self.env, *self.flag, *holes(self.model_dump())} - {CHANGED}


class MetricsSpec(Spec):
    """A Prometheus page, and what its names mean. A time's unit is read from its name: _ms, _us, else seconds."""

    url: str = Field(pattern=r"^https?://", examples=["http://127.0.0.1:8000/metrics"])
    batch_size: str | None = Field(default=None, description="histogram or summary of the rows in a batch")
    batches: str | None = Field(default=None, description="counter of batches, where batch_size is none")
    rows: str | None = Field(default=None, description="counter of the rows in all batches; needs batches")
    queue: str | None = Field(default=None, description="histogram or summary of the time in the queue")
    running: str | None = Field(default=None, description="gauge of the requests that are executed")
    waiting: str | None = Field(
        default=None,
        description="gauge of the waiting requests; a trial begins only when those of the trial before are answered",
    )
    execution: str | None = Field(
        default=None, description="histogram or summary of a batch's execution time"
    )
    every_s: Seconds = Field(
        default=0.0,
        alias="every",
        description="how often the server brings the page up to date; 0: at each request for it",
    )
