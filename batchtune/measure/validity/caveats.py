"""Reasons why a figure deserves less trust: the closed list, each with one piece of advice."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from batchtune.batching.parameters import (
    DEFAULT_BATCH_TIMEOUT_MICROS,
    DEFAULT_MAX_BATCH_SIZE,
    Configuration,
    default_num_batch_threads,
)
from batchtune.plain_values import Coded
from batchtune.scenario.spec.request import Protocol

Touches = Literal["latency", "throughput", "server", "everything"]

CLIENT_CODES: Final = frozenset(
    {"client_late", "client_behind", "client_throttled", "client_busy", "client_near_limit", "worker_slow"}
)
HOST_CODES: Final = frozenset({"host_steal", "host_busy", "host_canary"})
TOUCHES: Final[Mapping[str, Touches]] = {
    **dict.fromkeys(sorted(CLIENT_CODES | HOST_CODES), "everything"),
    "client_late": "latency",
    "few_connections": "latency",
    "client_paused": "latency",
    "worker_lost": "everything",
    "endpoint_slow": "latency",
    "endpoint_failing": "latency",
    "nothing_measured": "everything",
    "few_requests": "latency",
    "correlated": "latency",
    "errors": "latency",
    "growing_backlog": "everything",
    "not_steady": "everything",
    "warm_up_short": "everything",
    "requests_cut": "everything",
    "thinned": "everything",
    "stopped_early": "everything",
    "emulated_device": "everything",
    "batched_twice": "everything",
    "no_server_counters": "server",
    "counters_went_back": "server",
    "host_pressure": "everything",
}
"""The closed list of caveats, each with the figures that it makes less certain; `report/findings.toml` has
its text and advice."""


def touches(caveat: Coded) -> Touches:
    """Return which figures a caveat makes less certain; `everything` for a code that is not on the list."""
    return TOUCHES.get(caveat.code, "everything")


def caveat(code: str, **figures: Any) -> Coded:
    """Make a caveat of the closed list, with its figures.

    Raises:
        KeyError: the code is not on the list.
    """
    if code not in TOUCHES:
        raise KeyError(code)
    return Coded(code, figures)


# What was in force in the server while it was measured?


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What was in force in a server while it was measured."""

    # None: batching is off.
    max_batch_size: int | None = None
    batch_timeout_s: float = 0.0
    # Without batching the threads that run one request each.
    batch_threads: int = 1
    # The mean.
    rows_per_request: float = 1.0
    # How many requests the server handles at once; None: no limit, or not known.
    request_threads: int | None = None
    # How many CPU cores the server may use; None: not known.
    server_cores: float | None = None
    # Share of the time in which the GPU is busy, by its own counters (NVML), 0 to 1; None: not known.
    device_utilisation: float | None = None
    protocol: Protocol | None = None
    # False: the server reports none of its parameters; size, timeout and threads above mean nothing then.
    known: bool = True

    @property
    def batching(self) -> bool | None:
        """Whether the server batches; None: not known."""
        return self.max_batch_size is not None if self.known else None


def settings_of(
    configuration: Configuration,
    *,
    rows_per_request: float = 1.0,
    server_cores: float | None = None,
    flags: Mapping[str, Any] | None = None,
    protocol: Protocol | None = None,
    cpus: Collection[int] | None = None,
    known: bool = True,
) -> ServerSettings:
    """Return the settings that a configuration puts in force, with TF Serving's defaults for what it leaves
    out.

    `rows_per_request`: mean rows of a request. `server_cores`: CPU cores that the server may use; None:
    unknown. `cpus`: numbers of those CPUs (`target.cpus`; None: those of this process), from which its
    default number of threads follows. `flags`: the server's own (`target.flags`); with `protocol`, that of
    the load, they give `request_threads`. `known` False: somebody else started the server, and the
    configuration is not what it runs with.
    """
    if not known:
        return ServerSettings(
            rows_per_request=rows_per_request, server_cores=server_cores, protocol=protocol, known=False
        )
    batching = configuration.batching
    request_threads = request_threads_of({**(flags or {}), **dict(configuration.flags)}, protocol=protocol)
    # Without batching TF Serving and the bundled server run so many requests at once for each CPU.
    unbatched_threads_per_core = 4
    if batching is None:
        threads = unbatched_threads_per_core * default_num_batch_threads(cpus)
        if configuration.instances_flag:
            threads = int(dict(configuration.flags).get(configuration.instances_flag, 1))
        return ServerSettings(
            batch_threads=threads,
            rows_per_request=rows_per_request,
            server_cores=server_cores,
            request_threads=request_threads,
            protocol=protocol,
        )
    micros = batching.batch_timeout_micros
    return ServerSettings(
        max_batch_size=batching.max_batch_size or DEFAULT_MAX_BATCH_SIZE,
        batch_timeout_s=(DEFAULT_BATCH_TIMEOUT_MICROS if micros is None else micros) / 1e6,
        batch_threads=batching.num_batch_threads or default_num_batch_threads(cpus),
        rows_per_request=rows_per_request,
        server_cores=server_cores,
        request_threads=request_threads,
        protocol=protocol,
    )


def request_threads_of(flags: Mapping[str, Any], *, protocol: Protocol | None) -> int | None:
    """Return the number of requests that the server's flags let it handle at once; None: no limit, or not
    known.

    Cortex's `processes_per_replica` × `threads_per_process` bind the bundled server; `grpc_max_threads` and
    `rest_api_num_threads` bind tensorflow_model_server, whose handlers wait for their batch.
    """
    named = {name.lstrip("-"): value for name, value in flags.items()}
    if named.get("processes_per_replica") and named.get("threads_per_process"):
        return int(named["processes_per_replica"]) * int(named["threads_per_process"])
    threads = named.get("rest_api_num_threads" if protocol == "rest" else "grpc_max_threads")
    return int(threads) if threads else None
