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
from batchtune.scenario.spec.request import Protocol
from batchtune.units import rounded, rounded_duration

Touches = Literal["latency", "throughput", "server", "everything"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caveat:
    """One reason for distrust: `code` of the closed list, `text` with the figures, `advice` on what to do."""

    code: str
    text: str
    advice: str

    @property
    def touches(self) -> Touches:
        """Names of the figures that this caveat makes less certain; an unknown code touches all."""
        return _KNOWN[self.code][0] if self.code in _KNOWN else "everything"

    @property
    def blames_client(self) -> bool:
        return self.code in CLIENT_CODES


CLIENT_CODES: Final = frozenset(
    {"client_late", "client_behind", "client_throttled", "client_busy", "client_near_limit", "worker_slow"}
)
HOST_CODES: Final = frozenset({"host_steal", "host_busy", "host_canary"})

_MORE_CLIENT = "give the load generator more processes or cores, or another machine, and measure again"
_QUIET_HOST = "stop other work on this machine, or repeat"

_KNOWN: Final[Mapping[str, tuple[Touches, str, str]]] = {
    "client_late": (
        "latency",
        "the load generator sent requests late, 1 in 100 by more than {lag_s}",
        _MORE_CLIENT,
    ),
    "client_behind": (
        "everything",
        "the client was ready to send only {sent_ratio:.1%} of the requests in time",
        _MORE_CLIENT,
    ),
    "few_connections": (
        "latency",
        "requests waited for a free connection or stream: p99 {wait_s}",
        "allow more connections or in-flight requests, if the service will have them",
    ),
    "client_paused": (
        "latency",
        "the load generator could not run for {pause_s} at a time: what was due then was sent late",
        "keep its CPUs free of other work",
    ),
    "client_throttled": (
        "everything",
        "the client could not run {paused_ratio:.0%} of the time (a CPU quota, or others on its core)",
        _MORE_CLIENT,
    ),
    "client_busy": ("everything", "the client used {cpu_ratio:.0%} of the CPU that it has", _MORE_CLIENT),
    "client_near_limit": (
        "everything",
        "{rate_rps} requests/s is {ratio:.0%} of the most that this client can send ({client_max_rps}/s)",
        _MORE_CLIENT,
    ),
    "worker_slow": (
        "everything",
        "of the load generator's workers {slow} of {workers} fell short, first {worker}: {why}",
        "keep that CPU or node free of other work, or leave it out (load.fleet.resources)",
    ),
    "worker_lost": (
        "everything",
        "{loss}",
        "see the node's own log; these figures are of the fleet that was left",
    ),
    "endpoint_slow": (
        "latency",
        "{endpoint} is slower than the other {others}: {quantile} {endpoint_s}, the next slowest {next_s}",
        "look at that replica; the figures here are of all together",
    ),
    "endpoint_failing": (
        "latency",
        "{endpoint} failed {error_ratio:.2%} of its requests, the next worst {next_ratio:.2%}",
        "look at that replica; the figures here are of all together",
    ),
    "nothing_measured": (
        "everything",
        "no request was due within the window of {window_s} after a warm-up of {warm_up_s}",
        "measure for longer or raise the rate",
    ),
    "few_requests": (
        "latency",
        "{requests} requests, not all independent of each other, give no upper bound of {quantile}",
        "measure for longer",
    ),
    "correlated": (
        "latency",
        (
            "slow requests came together (in a batch, behind a queue): {requests} carry as much information on p95 as "
            "{effective:.0f} independent ones"
        ),
        "measure for longer; p95 may be another next time",
    ),
    "errors": (
        "latency",
        "{errors} of {requests} requests failed ({classes}); they count as slower than any limit",
        "{first_text}the server's own log may say more",
    ),
    "growing_backlog": (
        "everything",
        "answers came at {ratio:.1%} of the offered rate: the queue was growing",
        "the rate is above capacity; latency depends on how long you measure",
    ),
    "not_steady": (
        "everything",
        "latency drifted: the second half of the run differs from the first by more than chance",
        "lengthen warm-up and duration",
    ),
    "warm_up_short": (
        "everything",
        "the warm-up was {warm_up_s}; these parameters need {needed_s} to settle",
        "raise `load.warm_up`",
    ),
    "requests_cut": (
        "everything",
        "{requests} of {asked} requests were sent when load.duration ended the run",
        "raise `load.duration`",
    ),
    "thinned": (
        "everything",
        (
            "of about {requests:,} requests one in {one_in}, drawn at random, was recorded: intervals, percentiles and "
            "file of requests are of {recorded:,}, counts are multiplied; {failures:,} of all failed"
        ),
        "lower rate or duration to record every request",
    ),
    "stopped_early": (
        "everything",
        "stopped after {elapsed_s}, before its planned end",
        "the verdict is valid; the figures are rough",
    ),
    "emulated_device": (
        "everything",
        "the device is emulated by its service time",
        "these figures hold for no real hardware",
    ),
    "batched_twice": (
        "everything",
        "the model batches inside its graph ({inside}), and the server gathered batches around that too",
        "serve it without batching (enable_batching: false), or export it without its own",
    ),
    "no_server_counters": (
        "server",
        "the server reports nothing about its batches",
        (
            "for batch sizes and queue waits start tensorflow_model_server or batchtune-model-server with "
            "--monitoring_config_file=FILE, FILE holding `prometheus_config {{ enable: true }}`; beside --grpc-url "
            "give --rest-url"
        ),
    ),
    "counters_went_back": (
        "server",
        (
            "the server's counters fell during the load, so what it counted is left out: it was restarted, or several "
            "servers answer at its address"
        ),
        "give --rest-url, or target.rest_url, of one server instead of a balancer; its log records a restart",
    ),
    "host_steal": ("everything", "the hypervisor took {steal_ratio:.1%} of the CPU time away", _QUIET_HOST),
    "host_busy": (
        "everything",
        "other processes used {foreign_ratio:.0%} of the CPUs: latencies may be too high, rates too low",
        _QUIET_HOST,
    ),
    "host_canary": (
        "everything",
        "this machine's CPU was {canary_change:.0%} slower than it usually was in this session",
        _QUIET_HOST,
    ),
    "host_pressure": (
        "everything",
        "something in {pressed} had to wait for a free CPU {pressure_ratio:.0%} of the time",
        "pin client and server to different cores, or use more of them",
    ),
}


def caveat(code: str, **figures: Any) -> Caveat:
    """A caveat of the closed list with its figures filled in: those named `_s` are durations, `_rps` rates.

    Raises:
        KeyError: the code is not on the list, or a figure of its text is missing.
    """
    _, template, advice = _KNOWN[code]
    shown = {name: _shown(name, figure) for name, figure in figures.items()}
    text = template.format(**shown).replace("%", " %")
    return Caveat(code=code, text=text, advice=advice.format(**shown))


def _shown(name: str, figure: Any) -> Any:
    if name.endswith("_s"):
        return rounded_duration(figure)
    return rounded(figure) if name.endswith("_rps") else figure


# What was in force in the server while it was measured?


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What was in force; None: unknown. `max_batch_size` None: batching off, and
    `batch_threads` are then those that run one request each. `known` False: a server that tells nothing of its
    parameters, whose size, timeout and threads are not to be read.

    `rows_per_request` is the mean; `request_threads` how many requests the server handles at once;
    `server_cores` how many it may use; `device_utilisation` from the device's own counters (NVML), 0 to 1.
    """

    max_batch_size: int | None = None
    batch_timeout_s: float = 0.0
    batch_threads: int = 1
    rows_per_request: float = 1.0
    request_threads: int | None = None
    server_cores: float | None = None
    device_utilisation: float | None = None
    protocol: Protocol | None = None
    known: bool = True

    @property
    def batching(self) -> bool | None:
        """Whether the server batches; None if unknown."""
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
    """The settings that a configuration puts in force, TF Serving's defaults where it is silent.

    `cpus` are those of the server (`target.cpus`; None: those of this process), which its default of threads follows.
    `flags` are the server's own (`target.flags`), `protocol` the one that is loaded: both tell `request_threads`.
    `known` False: a server that somebody else started, of which the configuration tells nothing.
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
    """Number of requests that the server's flags let it handle at once; None: no limit, or unknown.

    Cortex's `processes_per_replica` × `threads_per_process` bind the bundled server; `grpc_max_threads` and
    `rest_api_num_threads` bind tensorflow_model_server, whose handlers wait for their batch.
    """
    named = {name.lstrip("-"): value for name, value in flags.items()}
    if named.get("processes_per_replica") and named.get("threads_per_process"):
        return int(named["processes_per_replica"]) * int(named["threads_per_process"])
    threads = named.get("rest_api_num_threads" if protocol == "rest" else "grpc_max_threads")
    return int(threads) if threads else None
