"""What limits this run? One of a closed list, with the figures that say so and one piece of advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from batchtune.measure.bottleneck_advice import Kind, advice_for
from batchtune.measure.bottleneck_figures import BUSY_RATIO, MANY_RATIO, PAYS_PROBABLY_FROM, Seen
from batchtune.measure.measurement import Measurement
from batchtune.measure.validity.caveats import HOST_CODES
from batchtune.measure.validity.server_settings import ServerSettings
from batchtune.scenario.units import percentage, rounded, rounded_duration

ROOM_RATIO: Final = 0.7
SOME_ERRORS_RATIO: Final = 0.01
LATE_S: Final = 0.002
"""An event loop that is late by less delays answers by less than a batch usually takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The verdict: `evidence` holds the figures behind it: ratios from 0 to 1, times in seconds, counts."""

    kind: Kind
    text: str
    advice: str
    evidence: dict[str, float]


def find_bottleneck(
    measurement: Measurement, settings: ServerSettings, *, blame_host: bool = True
) -> Bottleneck:
    """The first of the list that the figures show, from the least to the most trustworthy ground.

    Host and client come first because they spoil every other figure; the device comes after what keeps it idle or
    its batches small. `blame_host` False looks past a noisy host to the server, which is then not blamed for what the
    noise explains.
    """
    seen = Seen(measurement, settings)
    looks = (_client, _queue_limit, _server_threads, _batch_timeout, _concurrency, _device, _front_end)
    for look in (_host, *looks) if blame_host else looks:
        verdict = look(seen)
        if verdict is not None:
            return _bottleneck(*verdict, seen)
    return _bottleneck("none", _nothing(seen), seen)


def _bottleneck(kind: Kind, text: str, seen: Seen) -> Bottleneck:
    return Bottleneck(kind=kind, text=text, advice=advice_for(kind, seen.case), evidence=seen.figures())


def _nothing(seen: Seen) -> str:
    if seen.run.server is None:
        return "the server tells nothing of itself"
    if seen.disturbed:
        return "nothing of the server's is used up, and other programs took the machine's time"
    if seen.run.concurrency is not None:
        return "nothing is used up"
    if seen.is_met:
        return "the rate offered is met; nothing is used up"
    return (
        f"{rounded(seen.run.throughput_rps.value)} of {rounded(seen.due_rps or 0.0)} requests/s are answered, "
        "but nothing is used up"
    )


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
    idle = "" if busy is None else " while batch threads were free"
    return "queue_limit", f"{percentage(refused, 1)} of the requests found the queue full{idle}"


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
    if seen.fuller_gain is not None and seen.fuller_gain < PAYS_PROBABLY_FROM:
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
    """The device has time, and the event loop or the server's CPU has not; or nothing else takes the time.

    On a CPU the model's own threads are the likelier user of what the server uses up.
    """
    cpu = seen.server_cpu_ratio
    if seen.run.server is None:
        return None
    if cpu is not None and cpu >= BUSY_RATIO:
        return _used_up(seen, cpu)
    if seen.disturbed:
        return None
    lag_s = seen.run.server.event_loop_lag_p99_s
    if lag_s is not None and lag_s > max(LATE_S, 0.3 * seen.run.latency_mean_s) and seen.loop_is_busy(lag_s):
        return (
            "front_end",
            f"1 in 100 looks at the server's event loop waits more than {rounded_duration(lag_s)}",
        )
    overhead_s = seen.run.overhead_mean_s
    closed = seen.run.concurrency is not None
    if closed and overhead_s is not None and overhead_s > MANY_RATIO * seen.run.latency_mean_s:
        return "front_end", (
            f"{rounded_duration(overhead_s)} of {rounded_duration(seen.run.latency_mean_s)} "
            "pass outside queue and device"
        )
    return None


def _used_up(seen: Seen, cpu: float) -> _Found:
    executing = seen.executing_ratio
    if not seen.device_is_cpu or executing is None or executing < MANY_RATIO:
        return (
            "front_end",
            f"the server uses {percentage(cpu)} of its CPU and its batch threads are not all busy",
        )
    if seen.has_room_in_batches:
        return None
    return "device", (
        f"the model's own threads fill the CPUs: the server uses {percentage(cpu)} of them, and "
        f"it executes {percentage(min(executing, 1.0))} of the time"
    )
