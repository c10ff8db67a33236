"""Which figures of a run tell what limits it?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from batchtune.measure.bottleneck_advice import Case
from batchtune.measure.measurement import Measurement
from batchtune.measure.validity.caveats import HOST_CODES
from batchtune.measure.validity.server_settings import ServerSettings

BUSY_RATIO: Final = 0.85
"""From here on batch threads, a device or a core count as busy all the time; queues grow quickly beyond."""
MANY_RATIO: Final = 0.5
PAYS_FROM: Final = 1.05
"""Rows per second of larger batches over those of smaller ones: from here on batching pays; noise alone makes less."""
PAYS_PROBABLY_FROM: Final = PAYS_FROM**2
"""The same of `fuller_gain`, which is extrapolated and counts half, in logs."""
MET_RATIO: Final = 0.97
_OF_A_RATE: Final = frozenset({"unfinished", "unsent", "timeout", "queue_full", "expired"})


@dataclass(frozen=True, slots=True)
class Facts:
    """The figures that the looks share; None: the server does not tell."""

    run: Measurement
    settings: ServerSettings

    @property
    def thread_busy_ratio(self) -> float | None:
        """Mean share of the batch threads that are executing.

        From the time spent in batches; the device's busy time counts overlapping batches once, so it is a floor.
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
        """Share of a request's latency that passes in execution, where some batch executes all the time."""
        server, compute_s = self.run.server, self.run.compute_mean_s
        if server is None or (server.device_busy_ratio or 0.0) < BUSY_RATIO or compute_s is None:
            return None
        return min(compute_s / self.run.latency_mean_s, 1.0) if self.run.latency_mean_s > 0 else None

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
        used, cores = self.server_cpus_used, self.settings.server_cores
        return None if used is None or not cores else used / cores

    @property
    def server_cpus_used(self) -> float | None:
        """How many CPUs the server keeps busy."""
        server = self.run.server
        if server is None or server.server_cpu_s is None or server.duration_s <= 0:
            return None
        return server.server_cpu_s / server.duration_s

    @property
    def case(self) -> Case:
        """Under which conditions the run was limited, for the advice."""
        return Case(
            protocol=self.settings.protocol,
            batching=self.settings.batching,
            closed=self.run.concurrency is not None,
            batches_full=self._batches_full,
            met=self.is_met,
            disturbed=self.disturbed,
        )

    @property
    def _batches_full(self) -> bool | None:
        if self.fill_ratio is not None and self.fill_ratio >= BUSY_RATIO:
            return True
        return None if self.fuller_gain is None else self.fuller_gain < PAYS_PROBABLY_FROM

    @property
    def is_met(self) -> bool:
        """Whether an open loop is answered as fast as requests are due; a closed one always is."""
        due_rps = self.due_rps
        return due_rps is None or self.run.throughput_rps.value >= MET_RATIO * due_rps

    @property
    def due_rps(self) -> float | None:
        """Requests that were due in the window, a second: what the draw of random arrivals put there, not their rate.

        None: a closed loop, in which nothing is due.
        """
        if self.run.offered_rps is None or self.run.window_s <= 0.0:
            return None
        return self.run.requests / self.run.window_s

    @property
    def disturbed(self) -> bool:
        """Whether other programs took so much of the machine that what is late may be late because of them."""
        return any(caveat.code in HOST_CODES or caveat.code == "host_pressure" for caveat in self.run.caveats)

    @property
    def device_is_cpu(self) -> bool:
        """Whether the model runs on the server's own CPUs: no emulated device, no GPU that tells of itself."""
        server = self.run.server
        return server is not None and not server.emulated and self.device_used_ratio is None

    @property
    def executing_ratio(self) -> float | None:
        """Share of the time with at least one batch executing, for a server that tells it; else that of its threads."""
        server = self.run.server
        return (server and server.device_busy_ratio) or self.thread_busy_ratio

    def loop_is_busy(self, lag_s: float) -> bool:
        """Whether the lag of the event loop is its own work.

        A loop that uses less than half a CPU is kept from running; one that is late by no more than an execution on
        the CPU waits for the model's threads.
        """
        cpus_used = self.server_cpus_used
        if cpus_used is not None and cpus_used < MANY_RATIO:
            return False
        return not (self.device_is_cpu and lag_s <= (self.run.compute_mean_s or 0.0))

    @property
    def has_room_in_batches(self) -> bool:
        """Whether an open loop is met by batches that are half empty: at a higher rate they would hold more."""
        fill = self.fill_ratio
        return (
            self.run.offered_rps is not None
            and self.is_met
            and fill is not None
            and fill < MANY_RATIO
            and (self.fuller_gain or PAYS_PROBABLY_FROM) >= PAYS_PROBABLY_FROM
        )

    @property
    def device_used_ratio(self) -> float | None:
        """Of the device, by its own counters (NVML); None: it has none."""
        utilisation = self.settings.device_utilisation
        return (
            utilisation
            if utilisation is not None or self.run.server is None
            else self.run.server.gpu_busy_ratio
        )

    @property
    def device_room(self) -> float | None:
        """How much of the device is used while batch threads are busy; None: nothing tells.

        Without counters of its own the device is the CPU, or an emulated one, which tells whether batches share it.
        """
        server, used = self.run.server, self.device_used_ratio
        if used is not None or server is None:
            return used
        if server.emulated:
            return 0.0 if server.device_parallel else None
        return self.server_cpu_ratio

    @property
    def requests_in_server(self) -> float | None:
        """How many requests are in queue and execution at a time, by Little's law."""
        inside_s = (self.run.queue_mean_s or 0.0) + (self.run.compute_mean_s or 0.0)
        rate_rps = self.run.throughput_rps.value
        return rate_rps * inside_s if inside_s > 0.0 and math.isfinite(rate_rps) else None

    @property
    def fuller_gain(self) -> float | None:
        """Rows per second of full batches over those of the mean batch, by a straight line through the times told.

        Extrapolates: a guess at what fuller batches would pay. None: no two sizes 2 : 1 apart, or batching off.
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
        return self.run.errors.get(name, 0) / self.run.requests if self.run.requests else 0.0

    @property
    def failing_replica(self) -> str:
        """Which of several endpoints fails more than the others, in a sentence; "" where none does."""
        return next((caveat.text for caveat in self.run.caveats if caveat.code == "endpoint_failing"), "")

    @property
    def unexplained_error_ratio(self) -> float:
        """The requests that failed for another reason than too high a rate, which an open loop is advised on."""
        late = _OF_A_RATE if self.run.concurrency is None and not self.failing_replica else ()
        return sum(self.error_ratio(name) for name in self.run.errors.keys() - set(late))

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
