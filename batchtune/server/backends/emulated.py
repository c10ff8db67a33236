"""An emulated device: it holds each batch for its service time and answers sums of the inputs.

`emulated.yaml`, every key but inputs and outputs optional:

    service_time:
      base_ms: 2.0            # a batch of n rows takes base_ms + per_row_ms * n
      per_row_ms: 0.05
      per_element_ms: 0.0     # beside that, for each element of the inputs, padding included
      steps: {1: 2.1, 8: 2.5} # instead: up to 1 row 2.1 ms, up to 8 rows 2.5 ms; above, in proportion
      jitter_ratio: 0.0       # standard deviation / mean of a log-normal factor
      seed: 0                 # of the jitter
      slow_ratio: 0.0         # this share of the batches, drawn with the same seed,
      slow_factor: 10.0       # takes so many times as long
      cpu_ms: 0.0             # CPU time that each batch burns of its time,
      cpu_ratio: 0.0          # and this share of what the process used since the batch before
      concurrency: serial     # one batch at a time, in order; parallel: all at once
      contention_ratio: 0.0   # of a parallel device: beside n others a batch runs at the rate 1 / (1 + ratio * n)
    memory: {rows_max: 256}   # a batch of more rows fails as out of memory does
    inputs: {x: {dtype: float32, shape: [200]}}     # shape without the batch dimension; -1: any size
    outputs: {y: {dtype: float32, shape: [2]}}

Output element j of row i is sum(row i of all numeric inputs) + j (strings count with their length), so that
every answer can be checked: `expected_outputs`. The service time includes the computation.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import heapq
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from batchtune.server.backends.declared_file import (
    check_keys,
    number,
    read_declared,
    tensor_specs,
    whole_number,
)
from batchtune.server.backends.model import PREDICT_METHOD, LoadedModel, Tensors
from batchtune.server.scheduling.batch_threads import lower_timer_slack
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature, TensorSpec, by_name
from batchtune.wire.status import StatusError
from batchtune.yaml_lines import YamlError

# Sleeping until an instant, and waking within microseconds of it.
#
# `clock_nanosleep` with TIMER_ABSTIME, called through ctypes, which releases the interpreter lock; the thread's
# timer slack is lowered to 1 ns first. An idle virtual CPU still needs 45-50 µs to wake, so the sleep ends
# 50 µs before the deadline and the rest is yielded away, the lock free in between. Median overshoot on
# an idle 2-core virtual machine (tests/benchmarks/server/emulated_device.py): 2 µs, 99th percentile 50 µs; without the
# early wake-up 50 µs, time.sleep 75 µs.


_TimeSpec = ctypes.c_long * 2  # seconds, nanoseconds
_libc = ctypes.CDLL(None)
_clock_nanosleep = _libc.clock_nanosleep
_clock_nanosleep.argtypes = (ctypes.c_int, ctypes.c_int, _TimeSpec, ctypes.c_void_p)
_clock_nanosleep.restype = ctypes.c_int
_sched_yield = _libc.sched_yield
_slack_lowered = threading.local()


def sleep_until(deadline_ns: int) -> None:
    """Sleep until CLOCK_MONOTONIC reads `deadline_ns`; returns at once when it has passed."""
    wake_ns = deadline_ns - 50_000
    timer_abstime = 1
    if time.monotonic_ns() < wake_ns:
        if not hasattr(_slack_lowered, "done"):
            lower_timer_slack()
            _slack_lowered.done = True
        until = _TimeSpec(*divmod(wake_ns, 1_000_000_000))
        while _clock_nanosleep(time.CLOCK_MONOTONIC, timer_abstime, until, None) == errno.EINTR:
            pass
    while time.monotonic_ns() < deadline_ns:
        _sched_yield()


def _service_time(section: Any) -> EmulatedServiceTime:
    check_keys(section, "service_time", EmulatedServiceTime.__dataclass_fields__)
    checked = dict(section)
    for field in fields(EmulatedServiceTime):
        if field.type == "float" and field.name in section:
            checked[field.name] = number(section[field.name], f"service_time.{field.name}")
    if "seed" in section:
        whole_number(section["seed"], "service_time.seed", least=0)
    if section.get("concurrency", "serial") not in ("serial", "parallel"):
        raise YamlError(f"service_time.concurrency: {section['concurrency']!r}; expected serial or parallel")
    if "contention_ratio" in section and section.get("concurrency") != "parallel":
        raise YamlError("service_time.contention_ratio: read only with concurrency: parallel")
    if "steps" in section:
        checked["steps"] = _steps(section["steps"])
    return EmulatedServiceTime(**checked)


def _steps(table: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(table, Mapping) or not table:
        raise YamlError(
            "service_time.steps: expected a table of rows: milliseconds, such as {1: 2.1, 8: 2.5}"
        )
    checked = {
        whole_number(int(rows) if rows.isdecimal() else rows, "service_time.steps", least=1): number(
            milliseconds, f"service_time.steps.{rows}"
        )
        for rows, milliseconds in table.items()
    }
    return tuple(sorted(checked.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedServiceTime:
    """How long a batch occupies the device; the keys of service_time in an emulated.yaml (see the module)."""

    base_ms: float = 0.0
    per_row_ms: float = 0.0
    per_element_ms: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()
    jitter_ratio: float = 0.0
    seed: int = 0
    slow_ratio: float = 0.0
    slow_factor: float = 10.0
    cpu_ms: float = 0.0
    cpu_ratio: float = 0.0
    concurrency: Literal["serial", "parallel"] = "serial"
    contention_ratio: float = 0.0

    def mean_ns(self, rows: int, elements: int = 0) -> int:
        """Return the mean time, in nanoseconds, of a batch of `rows` rows and `elements` elements in all."""
        return round((self._of_rows_ms(rows) + self.per_element_ms * elements) * 1e6)

    def _of_rows_ms(self, rows: int) -> float:
        if not self.steps:
            return self.base_ms + self.per_row_ms * rows
        for rows_max, milliseconds in self.steps:
            if rows <= rows_max:
                return milliseconds
        rows_max, milliseconds = self.steps[-1]
        return milliseconds * rows / rows_max


class SharedTimetable:
    """Computes when batches end that run at once and slow each other down; times in ns, batches by number.

    All running batches get an equal share of the device, so one work clock serves them all: a batch ends when that
    clock has advanced by the time that the batch would take alone. Ends are computed in order of time, however late
    `advance` is called, so late wake-ups do not add up.
    """

    def __init__(self, contention_ratio: float) -> None:
        self._contention_ratio = contention_ratio
        self._running: list[tuple[float, int]] = []  # (work clock at its end, number), a heap
        self._ended: set[int] = set()
        self._work_ns = 0.0
        self._at_ns = 0.0
        self._batches = 0

    def start(self, now_ns: float, held_ns: float) -> int:
        """Start, at `now_ns`, a batch that would take `held_ns` alone on the device; return its number, for
        `has_ended`.

        `now_ns`: on the clock of all calls, at least that of the call before.
        """
        self.advance(now_ns)
        self._batches += 1
        heapq.heappush(self._running, (self._work_ns + held_ns, self._batches))
        return self._batches

    def next_end_ns(self) -> int:
        """Return when the next batch ends, ns on the clock of `start`, if no other starts before; there must be a
        running batch."""
        return math.ceil(self._at_ns + (self._running[0][0] - self._work_ns) * self._slowdown())

    def advance(self, now_ns: float) -> None:
        """Advance the clock to instant `now_ns`, and end the batches that were due by then."""
        while self._running and self.next_end_ns() <= now_ns:
            self._at_ns = self.next_end_ns()
            self._work_ns, number = heapq.heappop(self._running)
            self._ended.add(number)
        if self._running:
            self._work_ns += (now_ns - self._at_ns) / self._slowdown()
        self._at_ns = now_ns

    def has_ended(self, number: int) -> bool:
        """Whether batch `number` has ended; True is returned only once for a batch, which is then forgotten."""
        ended = number in self._ended
        self._ended.discard(number)
        return ended

    def _slowdown(self) -> float:
        return 1.0 + self._contention_ratio * (len(self._running) - 1)


class EmulatedDevice:
    """A device that is known only by its service time; a call occupies it, without the interpreter lock.

    rows_max: rows that fit into its memory; None: any number. A serial device has a timetable instead of a lock: a
    batch starts when it arrives or when the batch before it is due to end, whichever is later. So late wake-ups do not
    add up while several threads use it.
    """

    def __init__(
        self, service_time: EmulatedServiceTime, *, rows_max: int | None, outputs: tuple[TensorSpec, ...]
    ) -> None:
        self._service_time = service_time
        self._rows_max = rows_max
        self._outputs = outputs
        self._lock = threading.Lock()
        self._free_at_ns = 0
        self._shared = (
            SharedTimetable(service_time.contention_ratio) if service_time.contention_ratio else None
        )
        self._random = np.random.default_rng(service_time.seed)
        self._sigma = math.sqrt(math.log1p(service_time.jitter_ratio**2))
        self._burnt_ns = time.process_time_ns()

    def __call__(self, inputs: Tensors) -> dict[str, NDArray[Any]]:
        """Return the `expected_outputs` of a batch, once its service time has passed.

        Raises:
            StatusError: RESOURCE_EXHAUSTED for more rows than fit into the memory.
        """
        arrived_ns = time.monotonic_ns()
        first = next(iter(inputs.values()))
        rows = len(first)
        if self._rows_max is not None and rows > self._rows_max:
            shape = ",".join(str(size) for size in first.shape)
            raise StatusError(
                "RESOURCE_EXHAUSTED",
                f"OOM when allocating tensor with shape[{shape}] and type {first.dtype} on /device:EMULATED:0: the "
                f"emulated device has room for {self._rows_max} rows",
            )
        elements = sum(array.size for array in inputs.values()) if self._service_time.per_element_ms else 0
        if self._shared is not None:
            self._burn_cpu()
            self._hold_shared(self._shared, rows, elements)
            return expected_outputs(self._outputs, inputs)
        due_ns = self._due_ns(arrived_ns, rows, elements)
        outputs = expected_outputs(self._outputs, inputs)
        self._burn_cpu()
        sleep_until(due_ns)
        return outputs

    def _burn_cpu(self) -> None:
        service_time = self._service_time
        if not (service_time.cpu_ms or service_time.cpu_ratio):
            return
        used_ns = time.process_time_ns() - self._burnt_ns
        _burn_cpu(service_time.cpu_ms * 1e6 + service_time.cpu_ratio * used_ns)
        self._burnt_ns = time.process_time_ns()

    def _hold_shared(self, shared: SharedTimetable, rows: int, elements: int) -> None:
        """Start a batch on a shared device, and sleep until it has ended."""
        with self._lock:
            number = shared.start(time.monotonic_ns(), self._held_ns(rows, elements))
            next_end_ns = shared.next_end_ns()
        while True:
            sleep_until(next_end_ns)
            with self._lock:
                shared.advance(time.monotonic_ns())
                if shared.has_ended(number):
                    return
                next_end_ns = shared.next_end_ns()

    def _due_ns(self, arrived_ns: int, rows: int, elements: int = 0) -> int:
        is_drawn = self._sigma > 0.0 or self._service_time.slow_ratio > 0.0
        if not is_drawn and self._service_time.concurrency == "parallel":
            return arrived_ns + self._held_ns(rows, elements)
        with self._lock:
            held_ns = self._held_ns(rows, elements)
            if self._service_time.concurrency == "parallel":
                return arrived_ns + held_ns
            self._free_at_ns = max(arrived_ns, self._free_at_ns) + held_ns
            return self._free_at_ns

    def _held_ns(self, rows: int, elements: int) -> int:
        """Draw the time of a batch alone on the device, in ns; needs the lock where anything is random."""
        factor = 1.0
        if self._sigma > 0.0:
            factor *= math.exp(self._random.normal(-(self._sigma**2) / 2, self._sigma))
        if self._service_time.slow_ratio > 0.0 and self._random.random() < self._service_time.slow_ratio:
            factor *= self._service_time.slow_factor
        return round(self._service_time.mean_ns(rows, elements) * factor)


def expected_outputs(outputs: tuple[TensorSpec, ...], inputs: Tensors) -> dict[str, NDArray[Any]]:
    """Return the outputs of an emulated device, by name: output[i, j] = sum of row i over all inputs + j.

    Sums are computed in float64, then converted to the output's dtype; j counts a row's elements in row-major
    order.
    """
    sums = sum(_row_sums(array) for array in inputs.values())
    return {spec.name: _output(spec, np.asarray(sums)) for spec in outputs}


def _burn_cpu(nanoseconds: float) -> None:
    """Use so much CPU time on this thread, most of it without the interpreter lock."""
    hashed = bytes(4096)  # in some 5 µs; for less than 2 KiB hashlib holds the lock
    end_ns = time.thread_time_ns() + nanoseconds
    while time.thread_time_ns() < end_ns:
        hashlib.sha256(hashed)


def load_emulated_model(version_directory: Path) -> LoadedModel:
    """Load the emulated device that `emulated.yaml` describes, with one signature, serving_default.

    Raises:
        StatusError: INVALID_ARGUMENT `<path>:<line>: <key>: <what>; expected …`.
    """
    file = read_declared(version_directory / "emulated.yaml")
    document = file.data
    try:
        check_keys(document, "", ("service_time", "memory", "inputs", "outputs"))
        memory = check_keys(document.get("memory", {}), "memory", ("rows_max",))
        if "rows_max" in memory:
            whole_number(memory["rows_max"], "memory.rows_max", least=1)
        service_time = _service_time(document.get("service_time", {}))
        inputs = by_name(tensor_specs(document, "inputs", wildcard_allowed=True))
        outputs = by_name(tensor_specs(document, "outputs", wildcard_allowed=False))
    except YamlError as fault:
        raise file.fault(str(fault)) from fault
    signature = Signature(name=DEFAULT_SIGNATURE, method_name=PREDICT_METHOD, inputs=inputs, outputs=outputs)
    device = EmulatedDevice(service_time, rows_max=memory.get("rows_max"), outputs=outputs)
    return LoadedModel(
        signatures={DEFAULT_SIGNATURE: signature},
        runs={DEFAULT_SIGNATURE: device},
        emulated=True,
        parallel=service_time.concurrency == "parallel" and service_time.contention_ratio == 0.0,
    )


def _row_sums(array: NDArray[Any]) -> NDArray[np.float64]:
    rows = array.reshape(len(array), -1) if array.size else np.zeros((len(array), 1))
    if rows.dtype == object:
        return np.array([float(sum(len(text) for text in row)) for row in rows])
    sums: NDArray[np.float64] = rows.sum(axis=1, dtype=np.float64)
    return sums


def _output(spec: TensorSpec, sums: NDArray[np.float64]) -> NDArray[Any]:
    shape = (len(sums), *(size or 0 for size in (spec.shape or ())[1:]))
    values = (sums[:, np.newaxis] + np.arange(math.prod(shape[1:]))).reshape(shape)
    if spec.dtype != "object":
        return values.astype(spec.dtype)
    return np.array([b"%g" % value for value in values.ravel()], dtype=object).reshape(shape)
