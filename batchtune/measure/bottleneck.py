"""What limits this run? One of a closed list, with the figures that say so and one piece of advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from batchtune.batching import (
    DEFAULT_BATCH_TIMEOUT_MICROS,
    DEFAULT_MAX_BATCH_SIZE,
    Configuration,
    default_num_batch_threads,
)
from batchtune.measure.caveats import HOST_CODES
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import number_from_json, number_to_json

Kind = Literal[
    "host_noise",
    "client",
    "queue_limit",
    "server_threads",
    "batch_timeout",
    "concurrency",
    "batch_threads",
    "device",
    "front_end",
    "none",
]

BUSY_RATIO: Final = 0.85
"""From here on batch threads, a device or a core count as busy all the time; queues grow quickly beyond."""
MANY_RATIO: Final = 0.5
SOME_ERRORS_RATIO: Final = 0.01
PAYING_GAIN: Final = 1.1

UNBATCHED_THREADS_PER_CORE: Final = 4
"""Without batching TF Serving and the bundled server run so many requests at once for each CPU."""

_ADVICE: Final[Mapping[Kind, str]] = {
    "host_noise": "repeat on a quiet machine: these figures are not the server's",
    "client": "these figures are the load generator's; give it more cores or processes and measure again",
    "queue_limit": "raise max_enqueued_batches, or shed load before the server does",
    "server_threads": "raise the number of the server's request threads to what should share a batch",
    "batch_timeout": "lower batch_timeout_micros: the device stands idle while batches wait to fill",
    "concurrency": "measure with more requests in flight, or lower max_batch_size to what comes together",
    "batch_threads": "raise num_batch_threads: the device has room while all batch threads are taken",
    "device": "a faster device, a smaller model or more replicas; no batching parameter buys more here",
    "front_end": "gRPC instead of REST, larger requests, or more server processes: parsing is what costs",
    "none": "raise the rate to find what limits it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What was in force; None: unknown. `max_batch_size` None: batching off, and
    `batch_threads` are then those that run one request each.

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


def settings_of(
    configuration: Configuration, *, rows_per_request: float = 1.0, server_cores: float | None = None
) -> ServerSettings:
    """The settings that a configuration puts in force, TF Serving's defaults where it is silent."""
    batching = configuration.batching
    if batching is None:
        return ServerSettings(
            batch_threads=UNBATCHED_THREADS_PER_CORE * default_num_batch_threads(),
            rows_per_request=rows_per_request,
            server_cores=server_cores,
        )
    micros, threads = batching.batch_timeout_micros, batching.num_batch_threads
    return ServerSettings(
        max_batch_size=batching.max_batch_size or DEFAULT_MAX_BATCH_SIZE,
        batch_timeout_s=(DEFAULT_BATCH_TIMEOUT_MICROS if micros is None else micros) / 1e6,
        batch_threads=threads or default_num_batch_threads(),
        rows_per_request=rows_per_request,
        server_cores=server_cores,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The verdict: `evidence` holds the figures behind it, ratios from 0 to 1 and times in seconds."""

    kind: Kind
    text: str
    advice: str
    evidence: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        figures = {name: number_to_json(value) for name, value in self.evidence.items()}
        return {"kind": self.kind, "text": self.text, "advice": self.advice, "evidence": figures}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Bottleneck:
        figures = {name: number_from_json(value) for name, value in values["evidence"].items()}
        return cls(kind=values["kind"], text=values["text"], advice=values["advice"], evidence=figures)


def find_bottleneck(measurement: Measurement, settings: ServerSettings) -> Bottleneck:
    """The first of the list that the figures show, from the least to the most trustworthy ground.

    Host and client come first because they spoil every other figure; the device comes after what keeps it idle or
    its batches small.
    """
    seen = _Seen(measurement, settings)
    for look in (
        _host,
        _client,
        _queue_limit,
        _server_threads,
        _batch_timeout,
        _concurrency,
        _device,
        _front_end,
    ):
        found = look(seen)
        if found is not None:
            kind, text = found
            return Bottleneck(kind=kind, text=text, advice=_ADVICE[kind], evidence=seen.figures())
    closed = measurement.concurrency is not None
    text = "nothing is used up" if closed else "the rate offered is met; nothing is used up"
    return Bottleneck(kind="none", text=text, advice=_ADVICE["none"], evidence=seen.figures())


_Found = tuple[Kind, str] | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """The figures that the looks share; None: the server does not tell."""

    run: Measurement
    settings: ServerSettings

    @property
    def thread_busy_ratio(self) -> float | None:
        """Mean share of the batch threads that are executing.

        From the time spent in batches; the device's busy time counts overlapping batches once, so it is a floor.
        """
        server = self.run.server
        if server is None:
            return None
        known = [] if server.device_busy_ratio is None else [server.device_busy_ratio]
        if server.execution_s_by_rows and server.duration_s > 0:
            counts = server.batches_by_rows
            spent_s = sum(mean * counts.get(rows, 0) for rows, mean in server.execution_s_by_rows.items())
            known.append(spent_s / server.duration_s)
        return max(known) / max(self.settings.batch_threads, 1) if known else None

    @property
    def execution_ratio(self) -> float | None:
        """Share of a request's latency that passes in execution, where some batch executes all the time."""
        server, compute_s = self.run.server, self.run.compute_mean_s
        if server is None or (server.device_busy_ratio or 0.0) < BUSY_RATIO or compute_s is None:
            return None
        return compute_s / self.run.latency_mean_s if self.run.latency_mean_s > 0 else None

    @property
    def timeout_ratio(self) -> float:
        """Share of the batches that closed because their time was up."""
        reasons = {} if self.run.server is None else self.run.server.close_reasons
        total = sum(reasons.values())
        return reasons.get("timeout", 0) / total if total else 0.0

    @property
    def fill_ratio(self) -> float | None:
        server, most = self.run.server, self.settings.max_batch_size
        return server.mean_batch_rows / most if server and server.mean_batch_rows and most else None

    @property
    def rows_in_flight(self) -> float | None:
        """In a closed loop; an open loop has as many as there are."""
        users = self.run.concurrency
        return None if users is None else users * self.settings.rows_per_request

    @property
    def server_cpu_ratio(self) -> float | None:
        """Of the cores that the server may use."""
        server, cores = self.run.server, self.settings.server_cores
        if server is None or server.server_cpu_s is None or not cores or server.duration_s <= 0:
            return None
        return server.server_cpu_s / server.duration_s / cores

    @property
    def batching_gain(self) -> float | None:
        """Rows per second at the largest batch seen over that at the smallest; None: no two sizes 2 : 1 apart."""
        times = {} if self.run.server is None else self.run.server.execution_s_by_rows
        sizes = sorted(rows for rows, mean in times.items() if mean > 0 and rows > 0)
        if len(sizes) < 2 or sizes[-1] < 2 * sizes[0]:
            return None
        return (sizes[-1] / times[sizes[-1]]) / (sizes[0] / times[sizes[0]])

    def error_ratio(self, name: str) -> float:
        return self.run.errors.get(name, 0) / self.run.requests if self.run.requests else 0.0

    def figures(self) -> dict[str, float]:
        """Everything known, for the report."""
        server = self.run.server
        known = {
            "client_cpu_ratio": self.run.client_cpu_ratio,
            "send_lag_p99_s": self.run.send_lag_p99_s,
            "latency_mean_s": self.run.latency_mean_s,
            "queue_mean_s": self.run.queue_mean_s,
            "compute_mean_s": self.run.compute_mean_s,
            "overhead_mean_s": self.run.overhead_mean_s,
            "thread_busy_ratio": self.thread_busy_ratio,
            "device_utilisation": self.settings.device_utilisation,
            "server_cpu_ratio": self.server_cpu_ratio,
            "event_loop_lag_p99_s": None if server is None else server.event_loop_lag_p99_s,
            "mean_batch_rows": None if server is None else server.mean_batch_rows,
            "fill_ratio": self.fill_ratio,
            "timeout_ratio": self.timeout_ratio,
            "batching_gain": self.batching_gain,
            "queue_full_ratio": self.error_ratio("queue_full"),
        }
        return {name: value for name, value in known.items() if value is not None}


def _host(seen: _Seen) -> _Found:
    noise = next((each for each in seen.run.caveats if each.code in HOST_CODES), None)
    return None if noise is None else ("host_noise", noise.text)


def _client(seen: _Seen) -> _Found:
    """Lag alone is the limit only when it makes up much of the latency."""
    blamed = {each.code: each.text for each in seen.run.caveats if each.blames_client}
    for code in ("client_behind", "client_busy", "client_near_limit"):
        if code in blamed:
            return "client", blamed[code]
    if "client_late" in blamed and seen.run.send_lag_p99_s > MANY_RATIO * seen.run.latency_s["p99"].value:
        return "client", blamed["client_late"]
    return None


def _queue_limit(seen: _Seen) -> _Found:
    """A full queue before an idle device; before a busy one it only sheds what the device cannot do."""
    refused, busy = seen.error_ratio("queue_full"), seen.thread_busy_ratio
    if refused <= SOME_ERRORS_RATIO or (busy is not None and busy >= BUSY_RATIO):
        return None
    return "queue_limit", f"{refused:.1%} of the requests found the queue full while batch threads were free"


def _server_threads(seen: _Seen) -> _Found:
    """Requests wait for a thread before they can wait for a batch, so batches hold no more than there are threads."""
    exhausted = seen.error_ratio("thread_pool_exhausted")
    if exhausted > SOME_ERRORS_RATIO:
        return "server_threads", f"{exhausted:.1%} of the requests found no thread of the server free"
    threads, users, server = seen.settings.request_threads, seen.run.concurrency, seen.run.server
    if threads is None or server is None or (users is not None and users <= threads):
        return None
    in_server_s = (seen.run.queue_mean_s or 0.0) + (seen.run.compute_mean_s or 0.0)
    full = seen.settings.max_batch_size or 1
    batch_requests = (server.mean_batch_rows or 1.0) / seen.settings.rows_per_request
    outside = seen.run.latency_mean_s > 2.0 * in_server_s > 0.0
    if not outside or batch_requests > threads or threads * seen.settings.rows_per_request >= full:
        return None
    return "server_threads", (
        f"{threads} request threads keep batches at {batch_requests:.3g} requests; of "
        f"{seen.run.latency_mean_s * 1e3:.3g} ms only {in_server_s * 1e3:.3g} ms pass in queue and device"
    )


def _batch_timeout(seen: _Seen) -> _Found:
    """The device idles while most batches wait out their time, and that wait is much of the latency."""
    busy, wait_s, timeout_s = seen.thread_busy_ratio, seen.run.queue_mean_s, seen.settings.batch_timeout_s
    if timeout_s <= 0.0 or wait_s is None or (busy is not None and busy >= BUSY_RATIO):
        return None
    if seen.timeout_ratio < MANY_RATIO or wait_s < 0.3 * seen.run.latency_mean_s:
        return None
    idle = "" if busy is None else f"; batch threads are busy {busy:.0%} of the time"
    return "batch_timeout", (
        f"{seen.timeout_ratio:.0%} of the batches waited out {timeout_s * 1e3:.3g} ms, requests {wait_s * 1e3:.3g} ms "
        f"of {seen.run.latency_mean_s * 1e3:.3g} ms{idle}"
    )


def _concurrency(seen: _Seen) -> _Found:
    """A closed loop that cannot fill a batch, where fuller batches would pay."""
    rows, fill, most = seen.rows_in_flight, seen.fill_ratio, seen.settings.max_batch_size
    if rows is None or fill is None or most is None or rows >= most or fill >= MANY_RATIO:
        return None
    if seen.batching_gain is not None and seen.batching_gain < PAYING_GAIN:
        return None
    return "concurrency", (
        f"{rows:.0f} rows in flight cannot fill batches of {most}; they hold {fill * most:.3g} rows on average"
    )


def _device(seen: _Seen) -> _Found:
    """Every batch thread executes all the time: the device's limit, or the threads' where the device has room.

    Threads that idle beside a device that never does are no limit either.
    """
    busy, used, executing = seen.thread_busy_ratio, seen.settings.device_utilisation, seen.execution_ratio
    if used is not None and used >= BUSY_RATIO:
        return "device", f"the device is busy {used:.0%} of the time"
    if busy is None or busy < BUSY_RATIO:
        if executing is not None and executing >= MANY_RATIO and used is None:
            return (
                "device",
                f"batches execute all the time, and {executing:.0%} of the latency passes in them",
            )
        return None
    if seen.settings.max_batch_size is None:
        return "device", f"request threads execute {busy:.0%} of the time"
    emulated = seen.run.server is not None and seen.run.server.emulated
    room = used if used is not None else (None if emulated else seen.server_cpu_ratio)
    if room is not None and room < 0.7:
        return "batch_threads", (
            f"{seen.settings.batch_threads} batch threads execute {busy:.0%} of the time, the device is used {room:.0%}"
        )
    return "device", f"batch threads execute {busy:.0%} of the time"


def _front_end(seen: _Seen) -> _Found:
    """The device has time, and the event loop or the server's CPU has not; or nothing else takes the time."""
    server, overhead_s = seen.run.server, seen.run.overhead_mean_s
    if server is None:
        return None
    lag_s, cpu = server.event_loop_lag_p99_s, seen.server_cpu_ratio
    if lag_s is not None and lag_s > max(0.002, 0.3 * seen.run.latency_mean_s):
        return "front_end", f"the server's event loop is late by {lag_s * 1e3:.3g} ms (p99)"
    if cpu is not None and cpu >= BUSY_RATIO:
        return "front_end", f"the server uses {cpu:.0%} of its CPU and its batch threads are not all busy"
    closed = seen.run.concurrency is not None
    if closed and overhead_s is not None and overhead_s > MANY_RATIO * seen.run.latency_mean_s:
        return "front_end", (
            f"{overhead_s * 1e3:.3g} ms of {seen.run.latency_mean_s * 1e3:.3g} ms pass outside queue and device"
        )
    return None
