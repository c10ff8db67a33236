"""What limits this run? One of a closed list, with the figures that say so and one piece of advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from batchtune.measure.caveats import HOST_CODES
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import number_from_json, number_to_json
from batchtune.measure.seen import BUSY_RATIO, MANY_RATIO, PAYING_GAIN, Seen
from batchtune.measure.server_settings import ServerSettings, settings_of
from batchtune.scenario.units import percentage, rounded, rounded_duration

__all__ = ["Bottleneck", "Kind", "ServerSettings", "find_bottleneck", "settings_of"]

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

ROOM_RATIO: Final = 0.7
SOME_ERRORS_RATIO: Final = 0.01

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
class Bottleneck:
    """The verdict: `evidence` holds the figures behind it: ratios from 0 to 1, times in seconds, counts."""

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
    seen = Seen(measurement, settings)
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


def _host(seen: Seen) -> _Found:
    noise = next((each for each in seen.run.caveats if each.code in HOST_CODES), None)
    return None if noise is None else ("host_noise", noise.text)


def _client(seen: Seen) -> _Found:
    """Lag alone is the limit only when it makes up much of the latency."""
    blamed = {each.code: each.text for each in seen.run.caveats if each.blames_client}
    for code in ("client_throttled", "client_behind", "client_busy", "client_near_limit"):
        if code in blamed:
            return "client", blamed[code]
    if "client_late" in blamed and seen.run.send_lag_p99_s > MANY_RATIO * seen.run.latency_s["p99"].value:
        return "client", blamed["client_late"]
    return None


def _queue_limit(seen: Seen) -> _Found:
    """A full queue before an idle device; before a busy one it only sheds what the device cannot do."""
    refused, busy = seen.error_ratio("queue_full"), seen.thread_busy_ratio
    if refused <= SOME_ERRORS_RATIO or (busy is not None and busy >= BUSY_RATIO):
        return None
    return (
        "queue_limit",
        f"{percentage(refused, 1)} of the requests found the queue full while batch threads were free",
    )


def _server_threads(seen: Seen) -> _Found:
    """Requests wait for a thread before they can wait for a batch, so batches hold no more than there are threads."""
    exhausted = seen.error_ratio("thread_pool_exhausted")
    if exhausted > SOME_ERRORS_RATIO:
        return (
            "server_threads",
            f"{percentage(exhausted, 1)} of the requests found no thread of the server free",
        )
    threads, inside, users = seen.settings.request_threads, seen.requests_in_server, seen.run.concurrency
    if threads is None or inside is None or (users is not None and users <= threads):
        return None
    taken = MANY_RATIO <= inside / threads <= 2.0 - BUSY_RATIO
    inside_s = inside / seen.run.throughput_rps.value
    if not taken or seen.run.latency_mean_s < 2.0 * inside_s or threads >= _requests_wanted(seen):
        return None
    batch = seen.fill_ratio and seen.fill_ratio * (seen.settings.max_batch_size or 1)
    held = "" if batch is None else f"; batches hold {rounded(batch)} rows of {seen.settings.max_batch_size}"
    return "server_threads", (
        f"all {threads} request threads are taken, and of {rounded_duration(seen.run.latency_mean_s)} only "
        f"{rounded_duration(inside_s)} pass in queue and device{held}"
    )


def _requests_wanted(seen: Seen) -> float:
    """How many requests at a time would keep batch threads and device busy; 0 where the device is busy already."""
    most, batch_threads = seen.settings.max_batch_size, seen.settings.batch_threads
    if most is not None:
        return most / seen.settings.rows_per_request
    server = seen.run.server
    busy = (
        server is not None and (server.device_busy_ratio or 0.0) >= BUSY_RATIO and not server.device_parallel
    )
    return 0.0 if busy else batch_threads


def _batch_timeout(seen: Seen) -> _Found:
    """The device idles while most batches wait out their time, and that wait is much of the latency."""
    busy, wait_s, timeout_s = seen.thread_busy_ratio, seen.run.queue_mean_s, seen.settings.batch_timeout_s
    if timeout_s <= 0.0 or wait_s is None or (busy is not None and busy >= BUSY_RATIO):
        return None
    if seen.timeout_ratio < MANY_RATIO or wait_s < 0.3 * seen.run.latency_mean_s:
        return None
    idle = "" if busy is None else f"; batch threads are busy {percentage(busy)} of the time"
    return "batch_timeout", (
        f"{percentage(seen.timeout_ratio)} of the batches waited out {rounded_duration(timeout_s)}, "
        f"requests {rounded_duration(wait_s)} of {rounded_duration(seen.run.latency_mean_s)}{idle}"
    )


def _concurrency(seen: Seen) -> _Found:
    """A closed loop that cannot fill a batch, where fuller batches would pay."""
    rows, fill, most = seen.rows_in_flight, seen.fill_ratio, seen.settings.max_batch_size
    if rows is None or fill is None or most is None or rows >= most or fill >= MANY_RATIO:
        return None
    if seen.fuller_gain is not None and seen.fuller_gain < PAYING_GAIN:
        return None
    return "concurrency", (
        f"{rows:.0f} rows in flight cannot fill batches of {most}; they hold {rounded(fill * most)} rows on average"
    )


def _device(seen: Seen) -> _Found:
    """Every batch thread executes all the time: the device's limit, or the threads' where the device has room.

    Threads that idle beside a device that never does are no limit either.
    """
    busy, used, executing = seen.thread_busy_ratio, seen.device_used_ratio, seen.execution_ratio
    if used is not None and used >= BUSY_RATIO:
        return "device", f"the device is busy {percentage(used)} of the time"
    if busy is None or busy < BUSY_RATIO:
        if executing is not None and executing >= MANY_RATIO and used is None:
            return (
                "device",
                f"batches execute all the time, and {percentage(executing)} of the latency passes in them",
            )
        return None
    if seen.has_room_in_batches:
        return None
    if seen.settings.max_batch_size is None:
        return "device", f"request threads execute {percentage(busy)} of the time"
    if seen.device_room is not None and seen.device_room < ROOM_RATIO:
        told = (
            f"the device is used {percentage(seen.device_room)}"
            if seen.device_room
            else "batches run side by side on the device"
        )
        return (
            "batch_threads",
            f"{_threads(seen)} {percentage(busy)} of the time, {told}",
        )
    return "device", f"batch threads execute {percentage(busy)} of the time"


def _threads(seen: Seen) -> str:
    count = seen.settings.batch_threads
    return "the one batch thread executes" if count == 1 else f"{count} batch threads execute"


def _front_end(seen: Seen) -> _Found:
    """The device has time, and the event loop or the server's CPU has not; or nothing else takes the time."""
    server, overhead_s = seen.run.server, seen.run.overhead_mean_s
    if server is None:
        return None
    lag_s, cpu = server.event_loop_lag_p99_s, seen.server_cpu_ratio
    if lag_s is not None and lag_s > max(0.002, 0.3 * seen.run.latency_mean_s):
        return "front_end", f"the server's event loop is late by {rounded_duration(lag_s)} (p99)"
    if cpu is not None and cpu >= BUSY_RATIO:
        return (
            "front_end",
            f"the server uses {percentage(cpu)} of its CPU and its batch threads are not all busy",
        )
    closed = seen.run.concurrency is not None
    if closed and overhead_s is not None and overhead_s > MANY_RATIO * seen.run.latency_mean_s:
        return "front_end", (
            f"{rounded_duration(overhead_s)} of {rounded_duration(seen.run.latency_mean_s)} "
            "pass outside queue and device"
        )
    return None
