"""How does a front end report its requests to the metrics, without letting clients make new labels at will?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from batchtune.server.metrics.prometheus_text import Times

_NAMES_MAX = 256
_NAME_CHARACTERS_MAX = 256
_RUNTIME = "TF1"  # TensorFlow Serving's name of sessions; its other one is TFRT


class RequestMetrics(Protocol):
    """What the front ends tell; metrics.counters.Metrics implements it."""

    def request_count(self, model_name: str, status: str) -> None:
        """One request answered with this status, a gRPC code name."""
        ...

    def request_times(self, model_name: str, api: str, entrypoint: str) -> Times:
        """Takes the micros of each request of a model that ended OK."""
        ...

    def runtime_times(self, model_name: str, api: str, runtime: str) -> Times:
        """Takes the micros of each request between submit and outputs."""
        ...

    def example_count(self, model_name: str, examples: int) -> None:
        """The examples of one Classify or Regress request."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """What the metrics call a kind of call: `api` in request_latency, which REST spells in lower case, and
    `runtime_api` in runtime_latency, which has one spelling (predict_util.cc, classifier.cc, regressor.cc)."""

    api: str
    runtime_api: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTimes:
    """Where calls of one kind on one model leave their micros: `runtime` from submit to outputs, whatever becomes of
    them, and `request` from arrival to an answer that is OK. Looked up once, for a look-up costs as much as the rest.
    """

    model_name: str
    runtime: Times
    request: Times


class RequestCounts:
    """Counts the requests of one front end; `entrypoint` is TF Serving's "REST" or "GRPC", `configured` gives the
    names of the models."""

    def __init__(
        self, metrics: RequestMetrics, entrypoint: str, configured: Callable[[], Sequence[str]]
    ) -> None:
        self._metrics = metrics
        self._entrypoint = entrypoint
        self._configured = configured
        self._failed_names: set[str] = set()
        self._unknown_names = 0  # of them, those that no model had

    def times(self, model_name: str, kind: CallKind) -> ModelTimes:
        """Where the calls of a kind on a model that is served leave their times."""
        return ModelTimes(
            model_name=model_name,
            runtime=self._metrics.runtime_times(model_name, kind.runtime_api, _RUNTIME),
            request=self._metrics.request_times(model_name, kind.api, self._entrypoint),
        )

    def answered(self, model_name: str) -> None:
        """One request beside the model calls ended OK; its latency is no model's."""
        self._metrics.request_count(model_name, "OK")

    def failed(self, model_name: str, code: str) -> None:
        """One request ended otherwise. Of names that no model has, only the first 256, and of each 256 characters, are
        told apart: a client may invent any number, of any length."""
        if model_name not in self._failed_names:
            if model_name not in self._configured():
                model_name = model_name[:_NAME_CHARACTERS_MAX] if self._unknown_names < _NAMES_MAX else ""
                self._unknown_names += model_name not in self._failed_names
            self._failed_names.add(model_name)
        self._metrics.request_count(model_name, code)

    def examples(self, model_name: str, count: int) -> None:
        """The model gave outputs for the examples of one request, whatever becomes of them."""
        self._metrics.example_count(model_name, count)
