"""How does a front end report its requests to the metrics, without letting clients make new labels at will?"""

from __future__ import annotations

import time
from typing import Protocol

_NAMES_MAX = 256
_NAME_CHARACTERS_MAX = 256
_RUNTIME = "TF1"  # TensorFlow Serving's name of sessions; its other one is TFRT


class RequestMetrics(Protocol):
    """What the front ends tell; server.metrics.Metrics implements it."""

    def request_count(self, model_name: str, status: str) -> None:
        """One request answered with this status, a gRPC code name."""
        ...

    def request_succeeded(self, model_name: str, api: str, entrypoint: str, micros: float) -> None:
        """One request of a model ended OK after this time."""
        ...

    def runtime_latency(self, model_name: str, api: str, runtime: str, micros: float) -> None:
        """The time of one request between submit and outputs."""
        ...

    def example_count(self, model_name: str, examples: int) -> None:
        """The examples of one Classify or Regress request."""
        ...


class RequestCounts:
    """Counts the requests of one front end; `entrypoint` is TF Serving's "REST" or "GRPC"."""

    def __init__(self, metrics: RequestMetrics, entrypoint: str) -> None:
        self._metrics = metrics
        self._entrypoint = entrypoint
        self._failed_names: set[str] = set()

    def succeeded(self, model_name: str, api: str, started_ns: int) -> None:
        """One request of a served model ended OK; `started_ns` is CLOCK_MONOTONIC when it arrived."""
        micros = (time.monotonic_ns() - started_ns) / 1000
        self._metrics.request_succeeded(model_name, api, self._entrypoint, micros)

    def answered(self, model_name: str) -> None:
        """One request beside the model calls ended OK; its latency is no model's."""
        self._metrics.request_count(model_name, "OK")

    def failed(self, model_name: str, code: str) -> None:
        """One request ended otherwise. Only the first 256 names, and of each 256 characters, are told apart: a client
        may invent any number, of any length."""
        model_name = model_name[:_NAME_CHARACTERS_MAX]
        if model_name not in self._failed_names:
            if len(self._failed_names) >= _NAMES_MAX:
                model_name = ""
            self._failed_names.add(model_name)
        self._metrics.request_count(model_name, code)

    def ran(self, model_name: str, api: str, submitted_ns: int, examples: int) -> None:
        """The model gave the outputs of one request, whatever becomes of them; `examples` 0: it carried none."""
        self._metrics.runtime_latency(model_name, api, _RUNTIME, (time.monotonic_ns() - submitted_ns) / 1000)
        if examples:
            self._metrics.example_count(model_name, examples)
