"""Finds what limits a run: one of a closed list, with the figures that say so and one piece of advice, as codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from batchtune.measure.caveats import CLIENT_CODES, HOST_CODES, ServerSettings, fails_by_itself
from batchtune.measure.measurement import Measurement
from batchtune.plain_values import Coded, coded

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
    "errors",
    "none",
    "unknown",
]


def advice_for(kind: Kind, facts: Facts) -> Coded:
    """Return one piece of advice, as a finding, on this configuration under this load; other points of a search space
    are not considered.

    For a server that speaks KServe v2 the figures contain `in_tritons_words`, so that the report uses Triton's terms;
    for a server of kind http `own_NAME`, its own name for the parameter NAME.
    """
    protocol, own_words = facts.settings.protocol or "", facts.settings.own_words
    speaks_kserve = protocol.startswith("kserve_") and own_words is None
    figures: dict[str, Any] = {"in_tritons_words": True} if speaks_kserve else {}
    figures |= {f"own_{ours}": own for ours, own in own_words or ()}
    if kind == "server_threads":
        flags = {"grpc": " (grpc_max_threads)", "rest": " (rest_api_num_threads)"}
        figures["flag"] = flags.get(protocol, "")
    return Coded(_advice(kind, facts), figures)


def _advice(kind: Kind, facts: Facts) -> str:
    settings = facts.settings
    match kind:
        case "queue_limit":
            named = settings.batching and settings.own_words is None
            return "longer_queue" if named else "longer_queue_unbatched"
        case "server_threads":
            return "more_request_threads" if settings.batching else "more_request_threads_unbatched"
        case "device":
            return _more_device(facts)
        case "front_end":
            # Binary messages cost less to read than JSON, and no protocol is advised to those who speak it.
            lighter = {"rest": "grpc_or_more_rows", "kserve_rest": "binary_or_more_rows"}
            return lighter.get(settings.protocol or "", "more_rows")
        case "concurrency" if not settings.batch_timeout_s and settings.own_words is None:  # no batch waits
            return "more_clients"
        case "none":
            return _more_load(facts)
        case "unknown":
            load = _more_load(facts)
            return "report_metrics" if load in ("more_clients", "higher_rate", "looser_limit") else load
        case _:
            return f"{kind}_advice"


def _more_device(facts: Facts) -> str:
    if facts.settings.batching is None:
        return "more_device_unknown"
    if not facts.settings.batching:
        return "more_device"
    return "more_device_full" if facts.batches_full else "more_device_or_fuller"


def _more_load(facts: Facts) -> str:
    if facts.disturbed:
        return "quiet_machine"
    if facts.is_missed:
        return "lower_load"
    if facts.run.concurrency is not None:
        return "more_clients"
    if not facts.is_met:
        return "lower_rate"
    return "looser_limit" if facts.at_capacity else "higher_rate"


BUSY_RATIO: Final = 0.85
"""From this share of the time on, batch threads, a device or a core count as always busy; queues grow quickly
beyond."""
MANY_RATIO: Final = 0.5
PAYS_FROM: Final = 1.05
"""Rows per second of larger batches over those of smaller ones: from this ratio on batching pays; noise alone
makes less."""
PAYS_PROBABLY_FROM: Final = PAYS_FROM**2
"""As PAYS_FROM, for `fuller_gain`, which is extrapolated: its logarithm must be twice as large."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The figures of one run that the conditions of `find_bottleneck` share; a figure is None where the server does not
    report what it needs. `at_capacity`: higher rates missed the SLO."""

    run: Measurement
    settings: ServerSettings
    at_capacity: bool = False

    @property
    def thread_busy_ratio(self) -> float | None:
        """Mean share of the batch threads that are executing, 0 to 1; None: the server does not report it.

        The time spent in batches, divided by the run's length and the number of threads. Where the device's busy time
        is larger, which counts overlapping batches once, that is divided instead.
        """
        server = self.run.server
        if server is None or not self.settings.known:
            return None
        known = [] if server.device_busy_ratio is None else [server.device_busy_ratio]
        if server.execution_s_by_rows and server.duration_s > 0:
            counts = server.batches_by_rows
            spent_s = sum(mean * counts.get(rows, 0) for rows, mean in server.execution_s_by_rows.items())
            known.append(spent_s / server.duration_s)
        return max(known) / max(self.settings.batch_threads, 1) if known else None

    @property
    def execution_ratio(self) -> float | None:
        """Share of a request's latency that is execution, 0 to 1; None: not reported, or the device is idle for a part
        of the time."""
        server, compute_s = self.run.server, self.run.compute_mean_s
        if server is None or (server.device_busy_ratio or 0.0) < BUSY_RATIO or compute_s is None:
            return None
        return min(compute_s / self.run.latency_mean_s, 1.0) if self.run.latency_mean_s > 0 else None

    @property
    def timeout_ratio(self) -> float:
        """Share of the batches that closed because their batch timeout passed, 0 to 1; 0: the server reports no
        reasons."""
        reasons = {} if self.run.server is None else self.run.server.close_reasons
        total = sum(reasons.values())
        return reasons.get("timeout", 0) / total if total else 0.0

    @property
    def fill_ratio(self) -> float | None:
        """Mean rows of a batch divided by max_batch_size, 0 to 1; None: one of the two is unknown."""
        server, most = self.run.server, self.settings.max_batch_size
        return server.mean_batch_rows / most if server and server.mean_batch_rows and most else None

    @property
    def server_cpu_ratio(self) -> float | None:
        """Share of the CPU cores that the server may use which is busy, 0 to 1; None: unknown."""
        used, cores = self.server_cpus_used, self.settings.server_cores
        return None if used is None or not cores else used / cores

    @property
    def server_cpus_used(self) -> float | None:
        """Number of CPUs that the server keeps busy on average; None: unknown."""
        server = self.run.server
        if server is None or server.server_cpu_s is None or server.duration_s <= 0:
            return None
        return server.server_cpu_s / server.duration_s

    @property
    def is_missed(self) -> bool:
        """Whether the SLO is missed although requests are answered as fast as they are due."""
        return self.run.verdict == "FAIL" and self.is_met

    @property
    def batches_full(self) -> bool | None:
        """Whether fuller batches would gain nothing, because batches are full or larger ones hardly cheaper per row;
        None: not known."""
        if self.fill_ratio is not None and self.fill_ratio >= BUSY_RATIO:
            return True
        return None if self.fuller_gain is None else self.fuller_gain < PAYS_PROBABLY_FROM

    @property
    def is_met(self) -> bool:
        """Whether at least 97 % of the requests that were due per second were answered; True for a closed loop."""
        met_ratio = 0.97
        due_rps = self.due_rps
        return due_rps is None or self.run.throughput_rps.value >= met_ratio * due_rps

    @property
    def due_rps(self) -> float | None:
        """Requests that became due in the window, per second, which differs by chance from the rate of the schedule;
        None: a closed loop."""
        if self.run.offered_rps is None or self.run.window_s <= 0.0:
            return None
        return self.run.requests / self.run.window_s

    @property
    def has_foreign_load(self) -> bool:
        """Whether a caveat says that other programs, or a slower CPU, disturbed the run."""
        return any(caveat.code in HOST_CODES for caveat in self.run.caveats)

    @property
    def disturbed(self) -> bool:
        """Whether a caveat says that requests may have been late because CPUs were taken, by other programs or by
        server and client from each other."""
        return self.has_foreign_load or any(caveat.code == "host_pressure" for caveat in self.run.caveats)

    @property
    def is_silent(self) -> bool:
        """Whether the server reports nothing about its batches, so that it is unknown whether it has capacity left."""
        silent, server = {"no_target_metrics", "no_server_counters", "no_metrics_page"}, self.run.server
        if server is not None and not server.batches:
            silent.add("missing_metrics")
        return server is None or any(caveat.code in silent for caveat in self.run.caveats)

    @property
    def shows_room(self) -> bool:
        """Whether a figure can show that the server has capacity left: it reports how long batches execute, requests
        hardly wait, or it met a rate."""
        if self.executing_ratio is not None or self.device_used_ratio is not None:
            return True
        wait_s = self.run.queue_mean_s
        hardly_wait = wait_s is not None and wait_s < MANY_RATIO * self.run.latency_mean_s
        return hardly_wait or (self.run.concurrency is None and self.is_met and not self.is_missed)

    @property
    def device_is_cpu(self) -> bool:
        """Whether the model runs on the server's own CPUs: the device is not emulated, and no GPU reports how busy it
        is."""
        server = self.run.server
        return server is not None and not server.emulated and self.device_used_ratio is None

    @property
    def executing_ratio(self) -> float | None:
        """Share of the time with at least one batch executing, 0 to 1; where the server does not report it,
        `thread_busy_ratio`."""
        server = self.run.server
        return (server and server.device_busy_ratio) or self.thread_busy_ratio

    def loop_is_busy(self, lag_s: float) -> bool:
        """Whether an event loop lag of `lag_s` seconds comes from the loop's own work.

        False where the server uses less than half a CPU (the loop is kept from running) and, with the model on the CPU,
        where the lag is no longer than an execution (the loop waits for the model's threads).
        """
        cpus_used = self.server_cpus_used
        if cpus_used is not None and cpus_used < MANY_RATIO:
            return False
        return not (self.device_is_cpu and lag_s <= (self.run.compute_mean_s or 0.0))

    @property
    def has_room_in_batches(self) -> bool:
        """Whether, in an open loop that the server keeps up with, batches are less than half full and would gain from
        more rows: at a higher rate, if it does not miss the SLO, they would hold more."""
        fill = self.fill_ratio
        return (
            not self.at_capacity
            and self.run.offered_rps is not None
            and self.is_met
            and fill is not None
            and fill < MANY_RATIO
            and (self.fuller_gain or PAYS_PROBABLY_FROM) >= PAYS_PROBABLY_FROM
        )

    @property
    def device_used_ratio(self) -> float | None:
        """Share of the time in which the GPU is busy, 0 to 1, by its own counters (NVML); None: there is no GPU."""
        return None if self.run.server is None else self.run.server.gpu_busy_ratio

    @property
    def is_cpu_taken(self) -> bool:
        """Whether the device is the server's CPUs and more batch threads would not use more of them: other programs
        take them, or there are as many threads as CPUs."""
        threads, cores = self.settings.batch_threads, self.settings.server_cores
        return self.device_is_cpu and (self.disturbed or (cores is not None and threads >= cores))

    @property
    def device_room(self) -> float | None:
        """Share of the device that is in use while batch threads are busy, 0 to 1; None: not known.

        By the GPU's own counters; without a GPU by the server's CPUs; for an emulated device on which batches run side
        by side, 0.
        """
        server, used = self.run.server, self.device_used_ratio
        if used is not None or server is None:
            return used
        if server.emulated:
            return 0.0 if server.device_parallel else None
        return self.server_cpu_ratio

    @property
    def requests_in_server(self) -> float | None:
        """Mean number of requests that wait or execute in the server at a time, by Little's law; None: the server
        reports no times."""
        inside_s = (self.run.queue_mean_s or 0.0) + (self.run.compute_mean_s or 0.0)
        rate_rps = self.run.throughput_rps.value
        return rate_rps * inside_s if inside_s > 0.0 and math.isfinite(rate_rps) else None

    @property
    def fuller_gain(self) -> float | None:
        """Rows/s of full batches divided by those of batches of the mean size, extrapolated by a straight line through
        the execution times by size.

        None: no execution times are reported, no two sizes are a factor of 2 apart, or batching is off.
        """
        server, most = self.run.server, self.settings.max_batch_size
        if server is None or most is None or not server.mean_batch_rows:
            return None
        times = server.execution_s_by_rows
        sizes = sorted(rows for rows in times if rows > 0)
        if len(sizes) < 2 or sizes[-1] < 2 * sizes[0]:
            return None
        rows, spent_s = np.array(sizes, dtype=np.float64), np.array([times[size] for size in sizes])
        counts = np.array([max(server.batches_by_rows.get(size, 0), 1) for size in sizes], dtype=np.float64)
        per_row_s, fixed_s = np.polyfit(rows, spent_s, 1, w=np.sqrt(counts))
        fixed_s, per_row_s = max(float(fixed_s), 0.0), max(float(per_row_s), 1e-9)
        return (fixed_s / server.mean_batch_rows + per_row_s) / (fixed_s / most + per_row_s)

    def error_ratio(self, name: str) -> float:
        """Return the share of the requests that failed with errors of the class `name` (in lower case), 0 to 1."""
        return self.run.errors.get(name, 0) / self.run.requests if self.run.requests else 0.0

    @property
    def failing_replica(self) -> Coded | None:
        """The caveat that names the endpoint which fails more often than every other; None: there is no such
        endpoint."""
        return next((caveat for caveat in self.run.caveats if caveat.code == "endpoint_failing"), None)

    @property
    def unexplained_error_ratio(self) -> float:
        """Share of the requests that failed for another reason than a rate above the server's capacity, 0 to 1."""
        of_a_rate = frozenset({"unfinished", "unsent", "timeout", "queue_full", "expired"})
        late = of_a_rate if self.run.concurrency is None and not self.failing_replica else ()
        return sum(self.error_ratio(name) for name in self.run.errors.keys() - set(late))

    def figures(self) -> dict[str, float]:
        """Return all known figures by name, for the report."""
        server = self.run.server
        known = {
            "client_cpu_ratio": self.run.client_cpu_ratio,
            "send_lag_p99_s": self.run.send_lag_p99_s,
            "latency_mean_s": self.run.latency_mean_s,
            "queue_mean_s": self.run.queue_mean_s,
            "compute_mean_s": self.run.compute_mean_s,
            "overhead_mean_s": self.run.overhead_mean_s,
            "thread_busy_ratio": self.thread_busy_ratio,
            "device_utilisation": self.device_used_ratio,
            "requests_in_server": self.requests_in_server,
            "request_threads": self.settings.request_threads,
            "server_cpu_ratio": self.server_cpu_ratio,
            "event_loop_lag_p99_s": None if server is None else server.event_loop_lag_p99_s,
            "mean_batch_rows": None if server is None else server.mean_batch_rows,
            "fill_ratio": self.fill_ratio,
            "timeout_ratio": self.timeout_ratio,
            "fuller_gain": self.fuller_gain,
            "queue_full_ratio": self.error_ratio("queue_full"),
        }
        return {name: value for name, value in known.items() if value is not None}


SOME_ERRORS_RATIO: Final = 0.01
"""From this share of the requests on, errors are named as the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What limits a run, as a finding, with advice. `evidence`: name -> figure that shows it: ratios 0 to 1, times in
    seconds, counts."""

    kind: Kind
    text: Coded
    advice: Coded
    evidence: dict[str, float]


def find_bottleneck(
    measurement: Measurement,
    settings: ServerSettings,
    *,
    blame_host: bool = True,
    blame_met: bool = True,
    at_capacity: bool = False,
) -> Bottleneck:
    """Name what limits the run: the first condition of an ordered list that the figures meet; else kind `unknown` where
    nothing that the server reports can show that it has capacity left, or where it does not keep up and its CPU time
    is not known, or `none`.

    Host and client come first because they spoil every other figure (the host not where the server fails by itself);
    the device comes after what keeps it idle or its batches small. `blame_host` False: a noisy host is not named, and
    what its noise explains is not blamed on the server. `blame_met` False: a run that met its rate within the SLO has
    no bottleneck, and the text says what is busy. `at_capacity`: higher rates missed the SLO, so that none is advised.
    """
    facts = Facts(measurement, settings, at_capacity)
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
    met = facts.due_rps is not None and facts.is_met and measurement.verdict in ("PASS", None)
    for look in (_host, *looks) if blame_host else looks:
        verdict = look(facts)
        if verdict is not None:
            kind, text = verdict
            if met and not blame_met and kind in ("batch_threads", "device", "front_end"):
                kind, text = "none", coded("rate_met_though", busy=text)
            return _bottleneck(kind, text, facts)
    if facts.is_silent:
        return _bottleneck("unknown", coded("server_silent"), facts)
    if not facts.shows_room:
        return _bottleneck("unknown", coded("busy_untold"), facts)
    is_open = facts.server_cpu_ratio is None and not facts.is_met
    return _bottleneck("unknown" if is_open else "none", _nothing(facts), facts)


def _bottleneck(kind: Kind, text: Coded, facts: Facts) -> Bottleneck:
    return Bottleneck(kind=kind, text=text, advice=advice_for(kind, facts), evidence=facts.figures())


def _nothing(facts: Facts) -> Coded:
    busy, server = facts.thread_busy_ratio, facts.run.server
    if facts.has_room_in_batches and busy is not None and busy >= BUSY_RATIO and server is not None:
        return coded("busy_in_small_batches", busy_ratio=busy, mean_rows=server.mean_batch_rows)
    if facts.disturbed:
        return coded("machine_disturbed")
    if facts.is_missed:
        return coded("too_slow_unloaded")
    if facts.run.concurrency is not None:
        return coded("capacity_left")
    if facts.is_met:
        return coded("rate_met")
    return coded("rate_not_met", answered_rps=facts.run.throughput_rps.value, due_rps=facts.due_rps or 0.0)


_Found = tuple[Kind, Coded] | None


def _host(facts: Facts) -> _Found:
    noise = next((caveat for caveat in facts.run.caveats if caveat.code in HOST_CODES), None)
    if noise is None or fails_by_itself(facts.run.errors, facts.run.requests):
        return None
    return "host_noise", coded("text", text=noise)


def _client(facts: Facts) -> _Found:
    """The load generator; its send lag alone only when that makes up much of the latency."""
    blamed = {caveat.code: caveat for caveat in facts.run.caveats if caveat.code in CLIENT_CODES}
    for code in ("client_throttled", "client_behind", "client_busy", "client_near_limit"):
        if code in blamed:
            return "client", coded("text", text=blamed[code])
    if "client_late" in blamed and facts.run.send_lag_p99_s > MANY_RATIO * facts.run.latency_s["p99"].value:
        return "client", coded("text", text=blamed["client_late"])
    return None


def _queue_limit(facts: Facts) -> _Found:
    """A full queue before an idle device; before a busy one a full queue only sheds what the device cannot
    do."""
    refused, busy = facts.error_ratio("queue_full"), facts.thread_busy_ratio
    if refused <= SOME_ERRORS_RATIO or (busy is not None and busy >= BUSY_RATIO):
        return None
    code = "queue_full" if busy is None else "queue_full_threads_free"
    if facts.settings.protocol in ("http", "openai"):  # where a refusal need not be that of a queue
        code = "requests_refused"
    return "queue_limit", coded(code, refused_ratio=refused)


def _server_threads(facts: Facts) -> _Found:
    """Requests wait for a thread before they can wait for a batch, so batches hold no more than there are threads."""
    exhausted = facts.error_ratio("thread_pool_exhausted")
    if exhausted > SOME_ERRORS_RATIO:
        return "server_threads", coded("no_thread_free", refused_ratio=exhausted)
    threads, inside = facts.settings.request_threads, facts.requests_in_server
    users = facts.run.concurrency
    if threads is None or inside is None or (users is not None and users <= threads):
        return None
    taken = MANY_RATIO <= inside / threads <= 2.0 - BUSY_RATIO
    inside_s = inside / facts.run.throughput_rps.value
    if not taken or facts.run.latency_mean_s < 2.0 * inside_s or threads >= _requests_wanted(facts):
        return None
    batch = facts.fill_ratio and facts.fill_ratio * (facts.settings.max_batch_size or 1)
    figures = {"threads": threads, "latency_s": facts.run.latency_mean_s, "inside_s": inside_s}
    if batch is None:
        return "server_threads", coded("threads_taken", **figures)
    most = facts.settings.max_batch_size
    return "server_threads", coded("threads_taken_small_batches", **figures, held_rows=batch, most=most)


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
    busy, wait_s = facts.thread_busy_ratio, facts.run.queue_mean_s
    timeout_s = facts.settings.batch_timeout_s
    if timeout_s <= 0.0 or wait_s is None or (busy is not None and busy >= BUSY_RATIO):
        return None
    if facts.timeout_ratio < MANY_RATIO or wait_s < 0.3 * facts.run.latency_mean_s:
        return None
    figures = {
        "timed_out_ratio": facts.timeout_ratio,
        "timeout_s": timeout_s,
        "wait_s": wait_s,
        "latency_s": facts.run.latency_mean_s,
    }
    if busy is None:
        return "batch_timeout", coded("waited_out", **figures)
    return "batch_timeout", coded("waited_out_idle", **figures, busy_ratio=busy)


def _concurrency(facts: Facts) -> _Found:
    """A closed loop that cannot fill a batch, where fuller batches would pay and requests are answered."""
    if facts.unexplained_error_ratio > SOME_ERRORS_RATIO:
        return None
    users, fill, most = facts.run.concurrency, facts.fill_ratio, facts.settings.max_batch_size
    if users is None or fill is None or most is None or fill >= MANY_RATIO:
        return None
    rows, gain = users * facts.settings.rows_per_request, facts.fuller_gain
    if rows >= most or (gain is not None and gain < PAYS_PROBABLY_FROM):
        return None
    return "concurrency", coded("few_in_flight", in_flight=round(rows), most=most, held_rows=fill * most)


def _device(facts: Facts) -> _Found:
    """Every batch thread executes all the time: the device's limit, or the threads' where the device has room.

    Threads that idle beside a device that never does are no limit either.
    """
    room_ratio = 0.7
    busy, used, executing = facts.thread_busy_ratio, facts.device_used_ratio, facts.execution_ratio
    if used is not None and used >= BUSY_RATIO:
        return "device", coded("device_busy", busy_ratio=used)
    if busy is None or busy < BUSY_RATIO:
        if executing is not None and executing >= MANY_RATIO and used is None:
            return "device", coded("batches_execute", execution_ratio=executing)
        return None
    if facts.has_room_in_batches:
        return None
    if facts.settings.max_batch_size is None:
        return "device", coded("request_threads_execute", busy_ratio=busy)
    room = facts.device_room
    if facts.settings.has_threads and not facts.is_cpu_taken and room is not None and room < room_ratio:
        figures = {"batch_threads": facts.settings.batch_threads, "busy_ratio": busy}
        if room:
            return "batch_threads", coded("threads_busy_device_free", **figures, used_ratio=room)
        return "batch_threads", coded("threads_busy_side_by_side", **figures)
    return "device", coded("batch_threads_execute", busy_ratio=busy)


def _front_end(facts: Facts) -> _Found:
    """The device has time, and the event loop or the server's CPU has not; or nothing else takes the time of a closed
    loop or of a rate that is not met.

    On a CPU the model's own threads are the likelier user of what the server uses up.
    """
    late_s = 0.002  # An event loop that is late by less delays answers by less than a batch usually takes.
    cpu = facts.server_cpu_ratio
    if facts.run.server is None:
        return None
    if cpu is not None and cpu >= BUSY_RATIO:
        return _used_up(facts, cpu)
    lag_s, latency_s = facts.run.server.event_loop_lag_p99_s, facts.run.latency_mean_s
    is_late = lag_s is not None and lag_s > max(late_s, 0.3 * latency_s)
    if lag_s is not None and is_late and not facts.disturbed and facts.loop_is_busy(lag_s):
        return "front_end", coded("event_loop_late", lag_s=lag_s)
    overhead_s = facts.run.overhead_mean_s
    if facts.has_foreign_load or overhead_s is None or overhead_s <= MANY_RATIO * latency_s:
        return None
    if facts.run.concurrency is None and facts.is_met:
        return None
    return "front_end", coded("outside_queue_and_device", overhead_s=overhead_s, latency_s=latency_s)


def _errors(facts: Facts) -> _Found:
    """Nothing is used up, and yet requests fail: more of them would show nothing."""
    if facts.unexplained_error_ratio <= SOME_ERRORS_RATIO:
        return None
    figures = {"error_ratio": facts.run.error_ratio, "classes": ", ".join(facts.run.errors)}
    if facts.failing_replica is not None:
        return "errors", coded("requests_fail_at", **figures, replica=facts.failing_replica)
    return "errors", coded("requests_fail", **figures)


def _used_up(facts: Facts, cpu: float) -> _Found:
    executing = facts.executing_ratio
    if not facts.device_is_cpu or executing is None or executing < MANY_RATIO:
        return "front_end", coded("server_cpu_used_up", cpu_ratio=cpu)
    if facts.has_room_in_batches:
        return None
    return "device", coded("cpus_full", cpu_ratio=cpu, executing_ratio=min(executing, 1.0))
