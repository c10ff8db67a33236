"""What limits this run? One of a closed list, with the figures that say so and one piece of advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from batchtune.measure.bottleneck_advice import Kind, advice_for
from batchtune.measure.bottleneck_figures import BUSY_RATIO, MANY_RATIO, PAYS_PROBABLY_FROM, Facts
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
    facts = Facts(measurement, settings)
    looks = (
        _client,
        _queue_limit,
        _server_threads,
        _batch_timeout,
        _concurrency,
        _device,
        _front_end,
        _errors,
    )
    for look in (_host, *looks) if blame_host else looks:
        verdict = look(facts)
        if verdict is not None:
            return _bottleneck(*verdict, facts)
    return _bottleneck("none", _nothing(facts), facts)


def _bottleneck(kind: Kind, text: str, facts: Facts) -> Bottleneck:
    return Bottleneck(kind=kind, text=text, advice=advice_for(kind, facts.case), evidence=facts.figures())


def _nothing(facts: Facts) -> str:
    if facts.run.server is None:
        return "the server tells nothing of itself"
    if facts.disturbed:
        return "nothing of the server's is used up, and other programs took the machine's time"
    if facts.run.concurrency is not None:
        return "nothing is used up"
    if facts.is_met:
        return "the rate offered is met; nothing is used up"
    return (
        f"{rounded(facts.run.throughput_rps.value)} of {rounded(facts.due_rps or 0.0)} requests/s are answered, "
        "but nothing is used up"
    )


_Found = tuple[Kind, str] | None


def _host(facts: Facts) -> _Found:
    noise = next((caveat for caveat in facts.run.caveats if caveat.code in HOST_CODES), None)
    return None if noise is None else ("host_noise", noise.text)


def _client(facts: Facts) -> _Found:
    """Lag alone is the limit only when it makes up much of the latency."""
    blamed = {caveat.code: caveat.text for caveat in facts.run.caveats if caveat.blames_client}
    for code in ("client_throttled", "client_behind", "client_busy", "client_near_limit"):
        if code in blamed:
            return "client", blamed[code]
    if "client_late" in blamed and facts.run.send_lag_p99_s > MANY_RATIO * facts.run.latency_s["p99"].value:
        return "client", blamed["client_late"]
    return None


def _queue_limit(facts: Facts) -> _Found:
    """A full queue before an idle device; before a busy one it only sheds what the device cannot do."""
    refused, busy = facts.error_ratio("queue_full"), facts.thread_busy_ratio
    if refused <= SOME_ERRORS_RATIO or (busy is not None and busy >= BUSY_RATIO):
        return None
    idle = "" if busy is None else " while batch threads were free"
    return "queue_limit", f"{percentage(refused, 1)} of the requests found the queue full{idle}"


def _server_threads(facts: Facts) -> _Found:
    """Requests wait for a thread before they can wait for a batch, so batches hold no more than there are threads."""
    exhausted = facts.error_ratio("thread_pool_exhausted")
    if exhausted > SOME_ERRORS_RATIO:
        return (
            "server_threads",
            f"{percentage(exhausted, 1)} of the requests found no thread of the server free",
        )
    threads, inside, users = (
        facts.settings.request_threads,
        facts.requests_in_server,
        facts.run.concurrency,
    )
    if threads is None or inside is None or (users is not None and users <= threads):
        return None
    taken = MANY_RATIO <= inside / threads <= 2.0 - BUSY_RATIO
    inside_s = inside / facts.run.throughput_rps.value
    if not taken or facts.run.latency_mean_s < 2.0 * inside_s or threads >= _requests_wanted(facts):
        return None
    batch = facts.fill_ratio and facts.fill_ratio * (facts.settings.max_batch_size or 1)
    held = "" if batch is None else f"; batches hold {rounded(batch)} rows of {facts.settings.max_batch_size}"
    return "server_threads", (
        f"all {threads} request threads are taken, and of {rounded_duration(facts.run.latency_mean_s)} only "
        f"{rounded_duration(inside_s)} pass in queue and device{held}"
    )


def _requests_wanted(facts: Facts) -> float:
    """How many requests at a time would keep batch threads and device busy; 0 where the device is busy already."""
    most, batch_threads = facts.settings.max_batch_size, facts.settings.batch_threads
    if most is not None:
        return most / facts.settings.rows_per_request
    server = facts.run.server
    busy = (
        server is not None and (server.device_busy_ratio or 0.0) >= BUSY_RATIO and not server.device_parallel
    )
    return 0.0 if busy else batch_threads


def _batch_timeout(facts: Facts) -> _Found:
    """The device idles while most batches wait out their time, and that wait is much of the latency."""
    busy, wait_s, timeout_s = (
        facts.thread_busy_ratio,
        facts.run.queue_mean_s,
        facts.settings.batch_timeout_s,
    )
    if timeout_s <= 0.0 or wait_s is None or (busy is not None and busy >= BUSY_RATIO):
        return None
    if facts.timeout_ratio < MANY_RATIO or wait_s < 0.3 * facts.run.latency_mean_s:
        return None
    idle = "" if busy is None else f"; batch threads are busy {percentage(busy)} of the time"
    return "batch_timeout", (
        f"{percentage(facts.timeout_ratio)} of the batches waited out {rounded_duration(timeout_s)}, "
        f"requests {rounded_duration(wait_s)} of {rounded_duration(facts.run.latency_mean_s)}{idle}"
    )


def _concurrency(facts: Facts) -> _Found:
    """A closed loop that cannot fill a batch, where fuller batches would pay and requests are answered."""
    if facts.unexplained_error_ratio > SOME_ERRORS_RATIO:
        return None
    rows, fill, most = facts.rows_in_flight, facts.fill_ratio, facts.settings.max_batch_size
    if rows is None or fill is None or most is None or rows >= most or fill >= MANY_RATIO:
        return None
    if facts.fuller_gain is not None and facts.fuller_gain < PAYS_PROBABLY_FROM:
        return None
    return "concurrency", (
        f"{rows:.0f} rows in flight cannot fill batches of {most}; they hold {rounded(fill * most)} rows on average"
    )


def _device(facts: Facts) -> _Found:
    """Every batch thread executes all the time: the device's limit, or the threads' where the device has room.

    Threads that idle beside a device that never does are no limit either.
    """
    busy, used, executing = facts.thread_busy_ratio, facts.device_used_ratio, facts.execution_ratio
    if used is not None and used >= BUSY_RATIO:
        return "device", f"the device is busy {percentage(used)} of the time"
    if busy is None or busy < BUSY_RATIO:
        if executing is not None and executing >= MANY_RATIO and used is None:
            return (
                "device",
                f"batches execute all the time, and {percentage(executing)} of the latency passes in them",
            )
        return None
    if facts.has_room_in_batches:
        return None
    if facts.settings.max_batch_size is None:
        return "device", f"request threads execute {percentage(busy)} of the time"
    if facts.device_room is not None and facts.device_room < ROOM_RATIO:
        device = (
            f"the device is used {percentage(facts.device_room)}"
            if facts.device_room
            else "batches run side by side on the device"
        )
        return (
            "batch_threads",
            f"{_threads(facts)} {percentage(busy)} of the time, {device}",
        )
    return "device", f"batch threads execute {percentage(busy)} of the time"


def _threads(facts: Facts) -> str:
    count = facts.settings.batch_threads
    return "the one batch thread executes" if count == 1 else f"{count} batch threads execute"


def _front_end(facts: Facts) -> _Found:
    """The device has time, and the event loop or the server's CPU has not; or nothing else takes the time.

    On a CPU the model's own threads are the likelier user of what the server uses up.
    """
    cpu = facts.server_cpu_ratio
    if facts.run.server is None:
        return None
    if cpu is not None and cpu >= BUSY_RATIO:
        return _used_up(facts, cpu)
    if facts.disturbed:
        return None
    lag_s = facts.run.server.event_loop_lag_p99_s
    if (
        lag_s is not None
        and lag_s > max(LATE_S, 0.3 * facts.run.latency_mean_s)
        and facts.loop_is_busy(lag_s)
    ):
        return (
            "front_end",
            f"1 in 100 looks at the server's event loop waits more than {rounded_duration(lag_s)}",
        )
    overhead_s = facts.run.overhead_mean_s
    closed = facts.run.concurrency is not None
    if closed and overhead_s is not None and overhead_s > MANY_RATIO * facts.run.latency_mean_s:
        return "front_end", (
            f"{rounded_duration(overhead_s)} of {rounded_duration(facts.run.latency_mean_s)} "
            "pass outside queue and device"
        )
    return None


def _errors(facts: Facts) -> _Found:
    """Nothing is used up, and yet requests fail: more of them would tell nothing."""
    if facts.unexplained_error_ratio <= SOME_ERRORS_RATIO:
        return None
    classes, replica = ", ".join(facts.run.errors), facts.failing_replica
    whose = f"; {replica}" if replica else ""
    return "errors", f"{percentage(facts.run.error_ratio, 1)} of the requests failed ({classes}){whose}"


def _used_up(facts: Facts, cpu: float) -> _Found:
    executing = facts.executing_ratio
    if not facts.device_is_cpu or executing is None or executing < MANY_RATIO:
        return (
            "front_end",
            f"the server uses {percentage(cpu)} of its CPU and its batch threads are not all busy",
        )
    if facts.has_room_in_batches:
        return None
    return "device", (
        f"the model's own threads fill the CPUs: the server uses {percentage(cpu)} of them, and "
        f"it executes {percentage(min(executing, 1.0))} of the time"
    )
