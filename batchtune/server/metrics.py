"""The server's metrics: TensorFlow Serving's under their names, and more under /batchtune/serving/.

The front ends count requests (on the event loop), batching sessions report batches (on batch threads, locked
once per batch), models report their runs, a thread samples the GPU's driver. "micros" are microseconds.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Self, TypeVar

from batchtune.server.sessions.batched import BatchRecord

# Counters and histograms that are kept cheaply, and written as TensorFlow Serving writes them.

FOLDED_AT = 256
"""Values that a Timings collects before it adds them to its histogram, which takes 20 µs of the loop."""

Labels = tuple[tuple[str, str], ...]
_Metric = tuple[str, str, tuple[str, ...], Mapping[Any, Any]]
"""(name, kind: counter, gauge or histogram, label names, label values -> value of the metric)."""


class Histogram:
    """Counts of values per bucket, and their sum; not locked.

    bounds: ascending, without the last, infinite one. A value equal to a bound counts in the bucket above it, as in
    TensorFlow (histogram.cc), although Prometheus' `le` means the bucket below.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count one value, `times` times."""
        self.counts[bisect_right(self.bounds, value)] += times
        self.total += value * times

    def add_all(self, values: Sequence[float], times: int = 1) -> None:
        """Add many values, each `times` times; faster than `add` for each."""
        ordered = sorted(values)
        at, end = 0, len(ordered)
        while at < end:
            bucket = bisect_right(self.bounds, ordered[at])
            last = bucket == len(self.bounds)
            after = end if last else bisect_left(ordered, self.bounds[bucket], at)
            self.counts[bucket] += (after - at) * times
            at = after
        self.total += sum(ordered) * times


class Timings(list[float]):
    """Collects values and adds them to a histogram in groups of FOLDED_AT, at less than half the cost of adding each
    alone."""

    __slots__ = ("_histogram",)

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self._histogram = Histogram(bounds)

    def add(self, value: float) -> None:
        """Add one value in the histogram's unit."""
        self.append(value)
        if len(self) >= FOLDED_AT:
            self.fold()

    def fold(self) -> Histogram:
        """Return the histogram, with all values so far."""
        if self:
            self._histogram.add_all(self)
            self.clear()
        return self._histogram


def exponential_bounds(first: float, growth: float, count: int) -> tuple[float, ...]:
    """Return `count` bounds: first, first·growth, … (tensorflow::monitoring::Buckets::Exponential)."""
    return tuple(first * growth**power for power in range(count))


def render_values(name: str, kind: str, values: Mapping[Labels, float]) -> Iterable[str]:
    """Yield the Prometheus lines of a counter or gauge; no line when it has no values yet."""
    if not values:
        return
    mangled = mangle(name)
    yield f"# TYPE {mangled} {kind}"
    for labels, value in values.items():
        yield f"{mangled}{{{_label_text(labels)}}} {_number(value)}"


def render_histograms(name: str, histograms: Mapping[Labels, Histogram]) -> Iterable[str]:
    """Yield the Prometheus lines of a histogram; buckets are cumulative."""
    if not histograms:
        return
    mangled = mangle(name)
    yield f"# TYPE {mangled} histogram"
    for labels, histogram in histograms.items():
        text = _label_text(labels)
        separator = "," if text else ""
        so_far = 0
        for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
            so_far += count
            le = "+Inf" if bound is None else format(bound, "g")
            yield f'{mangled}_bucket{{{text}{separator}le="{le}"}} {so_far}'
        yield f"{mangled}_sum{{{text}}} {_number(histogram.total)}"
        yield f"{mangled}_count{{{text}}} {so_far}"


def mangle(name: str) -> str:
    """Turn a metric's name such as /tensorflow/serving/request_count into the exported one, with colons."""
    return "".join(char if char == "_" or (char.isascii() and char.isalnum()) else ":" for char in name)


def _label_text(labels: Labels) -> str:
    return ",".join(f'{key}="{_escape(value)}"' for key, value in labels)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else format(value, ".10g")


@contextmanager
def loop_lag_sampled(
    run_soon: Callable[[Callable[[], object]], object], record: Callable[[float], None]
) -> Iterator[None]:
    """Return a context manager that measures 20 times a second how many microseconds the event loop takes to call a
    function, which is how long an answer waits after its batch has ended.

    run_soon: has the loop call a function, from any thread; record(micros): called on the loop.
    """
    ended = threading.Event()

    def heard(handed_ns: int) -> None:
        record((time.monotonic_ns() - handed_ns) / 1000)

    def sample() -> None:
        sample_interval_s = 0.05
        while not ended.wait(sample_interval_s):
            run_soon(partial(heard, time.monotonic_ns()))

    thread = threading.Thread(target=sample, name="event_loop_lag", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Sums:
    """Figures of batches or calls, summed for each combination of label values; any thread may add to them.

    name: prefix of the metrics; labels: names of the labels; figures: names of the figures.
    """

    def __init__(self, name: str, labels: tuple[str, ...], figures: tuple[str, ...]) -> None:
        self._name = name
        self._labels = labels
        self._figures = figures
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, ...], list[float]] = {}

    def add(self, key: tuple[str, ...], *amounts: float) -> None:
        """Add amounts to the figures, in their order, for the label values `key`."""
        with self._lock:
            sums = self._sums.setdefault(key, [0] * len(self._figures))
            for at, amount in enumerate(amounts):
                sums[at] += amount

    def metrics(self) -> Iterable[_Metric]:
        """Yield a counter `<name>_<figure>_total` for each figure."""
        with self._lock:
            sums = {key: list(own) for key, own in self._sums.items()}
        for at, figure in enumerate(self._figures):
            values = {key: own[at] for key, own in sums.items()}
            yield f"{self._name}_{figure}_total", "counter", self._labels, values


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_SERVING = "/tensorflow/serving/"


class DeviceActivity(AbstractContextManager["DeviceActivity"]):
    """Counts the model runs in progress, and the time during which there was at least one.

    Enter and leave around each run, from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy_since_ns = 0
        self._busy_ns = 0
        self.in_flight = 0

    def __enter__(self) -> Self:
        with self._lock:
            if self.in_flight == 0:
                self._busy_since_ns = time.monotonic_ns()
            self.in_flight += 1
        return self

    def __exit__(self, *_fault: object) -> None:
        with self._lock:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._busy_ns += time.monotonic_ns() - self._busy_since_ns

    def busy_micros(self) -> float:
        """Return the microseconds during which at least one run was in progress, up to now."""
        with self._lock:
            current_ns = time.monotonic_ns() - self._busy_since_ns if self.in_flight else 0
            return (self._busy_ns + current_ns) / 1000


class Metrics:
    """All metrics of the process; a BatchObserver.

    emulated: whether an emulated device has been loaded; emulated_parallel: whether the last one runs batches at once,
    none of them slower. queue_depths, length_boundaries: functions of a BatchingControl; gpus: None: no metrics of
    GPUs. The server sets all three.
    """

    def __init__(self) -> None:
        self.device = DeviceActivity()
        self.models = Sums("model", ("model_name",), ("batches", "batch_rows", "batch_micros"))
        self.stages = Sums("stage", ("model_name", "stage"), ("calls", "rows", "micros", "wait_micros"))
        self.emulated = False
        self.emulated_parallel = False
        self.queue_depths: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.length_boundaries: Callable[[], dict[str, tuple[int, ...]]] = dict
        self.gpus: GpuSampler | None = None
        self._lock = threading.Lock()
        self._request_counts: Counter[tuple[str, str]] = Counter()
        new_timings = partial(Timings, exponential_bounds(10, 1.8, 33))
        self._request_latencies: defaultdict[tuple[str, str, str], Timings] = defaultdict(new_timings)
        self._runtime_latencies: defaultdict[tuple[str, str, str], Timings] = defaultdict(new_timings)
        new_counts = partial(Histogram, exponential_bounds(1, 2, 15))
        self._example_counts: defaultdict[str, Histogram] = defaultdict(new_counts)
        self._queuing_latency = Histogram(exponential_bounds(100, 1.2, 52))
        size_bounds = exponential_bounds(1, 2, 14)
        self._input_batch_size = Histogram(size_bounds)
        self._processed_batch_size = Histogram(size_bounds)
        self._padding_sizes: defaultdict[int, Histogram] = defaultdict(partial(Histogram, size_bounds))
        self._batches: list[BatchRecord] = []  # not yet counted
        self._run_count = 0
        self._close_reasons: Counter[str] = Counter()
        self._lengths = Sums(
            "length_bucket",
            ("bucket",),
            ("batches", "rows", "sent_elements", "padding_elements", "execution_micros"),
        )
        self._execution_counts: Counter[int] = Counter()
        self._execution_micros: defaultdict[int, float] = defaultdict(float)
        self._rejections: Counter[str] = Counter()
        self._loop_lag = Histogram(exponential_bounds(10, 2, 16))

    # -- the front ends, on the event loop --

    def request_count(self, model_name: str, status: str) -> None:
        """Count a request that was answered with this status, the name of a gRPC code such as OK."""
        self._request_counts[model_name, status] += 1

    def request_times(self, model_name: str, api: str, entrypoint: str) -> Timings:
        """Return the timings to which a caller adds the microseconds of each successful request.

        api: the call's name as TF Serving labels it: "Predict" for entrypoint "GRPC", "predict" for "REST".
        """
        return self._request_latencies[model_name, api, entrypoint]

    def runtime_times(self, model_name: str, api: str, runtime: str) -> Timings:
        """Return the timings to which a caller adds each request's microseconds from submission to outputs, time in the
        queue included. runtime: "TF1", as in TF Serving."""
        return self._runtime_latencies[model_name, api, runtime]

    def example_count(self, model_name: str, examples: int) -> None:
        """Count the examples of one Classify or Regress request."""
        self._example_counts[model_name].add(examples)

    def event_loop_lag(self, micros: float) -> None:
        """Record by how many microseconds the event loop was late."""
        self._loop_lag.add(micros)

    # -- BatchObserver, on batch threads --

    def on_batch(self, record: BatchRecord) -> None:
        """Count a batch that has run or failed."""
        # Counted at once: between two batches the caches are cold. 0.2 µs a request in batches of 32.
        batches_max = 16
        with self._lock:
            self._batches.append(record)
            if len(self._batches) >= batches_max:
                self._fold_batches()

    def on_unbatched_run(self, rows: int, execution_micros: float) -> None:
        """Count a request that ran without batching; TF Serving has no metric for it.

        More than 128 rows are counted as the next power of two.
        """
        if rows > 128:  # a client may send any number: at most 150 series, 16 kB of the page
            rows = 1 << (rows - 1).bit_length()
        with self._lock:
            self._count_execution(rows, execution_micros)

    def on_rejected(self, reason: str) -> None:
        """Count a request that was refused or dropped; reason: "queue_full", "too_large" or "expired"."""
        with self._lock:
            self._rejections[reason] += 1

    # -- reading --

    def first_values(self, names: Iterable[str]) -> dict[str, int]:
        """Return name -> first value of that counter or gauge, 0 where it has none; names have slashes."""
        values_by_name: dict[str, int] = {}
        for line in self.render().splitlines():
            mangled = line.partition("{")[0]
            if mangled not in values_by_name and not line.startswith("#"):
                values_by_name[mangled] = int(float(line.split()[-1]))
        return {name: values_by_name.get(mangle(name), 0) for name in names}

    def render(self) -> str:
        """Write all metrics as Prometheus text."""
        with self._lock:
            self._fold_batches()
            metrics = [*self._reference_metrics(), *self._own_metrics()]
            lines = [line for metric in metrics for line in _render(*metric)]
        return "\n".join(lines) + "\n"

    def _fold_batches(self) -> None:
        for record in self._batches:
            size = record.padded_rows
            self._run_count += 1
            self._queuing_latency.add_all(record.queue_wait_micros)
            self._input_batch_size.add_all(record.task_rows, record.input_tensors)
            self._processed_batch_size.add(size)
            self._padding_sizes[size].add(size - record.rows)
            self._close_reasons[record.close_reason] += 1
            self._count_execution(size, record.execution_micros)
            if record.sent_elements:  # of inputs that all have one length there is nothing to count
                elements = (record.sent_elements, record.padding_elements)
                self._lengths.add((record.bucket,), 1, record.rows, *elements, record.execution_micros)
        self._batches.clear()

    def _count_execution(self, rows: int, micros: float) -> None:
        self._execution_counts[rows] += 1
        self._execution_micros[rows] += micros

    def _reference_metrics(self) -> list[_Metric]:
        session = _SERVING + "batching_session/"
        examples = {name: counts.total for name, counts in self._example_counts.items()}
        requests, runs = _folded(self._request_latencies), _folded(self._runtime_latencies)
        of_requests = ("model_name", "API", "entrypoint")
        return [
            (_SERVING + "request_count", "counter", ("model_name", "status"), self._all_request_counts()),
            (_SERVING + "request_latency", "histogram", of_requests, requests),
            (_SERVING + "runtime_latency", "histogram", ("model_name", "API", "runtime"), runs),
            (_SERVING + "request_example_counts", "histogram", ("model",), self._example_counts),
            (_SERVING + "request_example_count_total", "counter", ("model",), examples),
            (session + "queuing_latency", "histogram", ("thread_pool_name",), {"": self._queuing_latency}),
            (session + "wrapped_run_count", "counter", (), {(): self._run_count}),
            (session + "input_batch_size", "histogram", (), {(): self._input_batch_size}),
            (session + "processed_batch_size", "histogram", (), {(): self._processed_batch_size}),
            (session + "padding_size", "histogram", ("execution_batch_size",), self._padding_sizes),
        ]

    def _all_request_counts(self) -> Counter[tuple[str, str]]:
        counts = self._request_counts.copy()
        for (name, _, _), histogram in _folded(self._request_latencies).items():
            counts[name, "OK"] += sum(histogram.counts)
        return counts

    def _own_metrics(self) -> list[_Metric]:
        batches, rows = self.queue_depths()
        lengths = {(name, ",".join(map(str, own))): 1 for name, own in self.length_boundaries().items()}
        gpus = [] if self.gpus is None else self.gpus.readings()
        by_size = ("batch_size",)
        metrics: list[_Metric] = [
            ("batch_close_count", "counter", ("reason",), self._close_reasons),
            ("batch_execution_count", "counter", by_size, self._execution_counts),
            ("batch_execution_micros_total", "counter", by_size, self._execution_micros),
            *self._lengths.metrics(),
            ("length_buckets", "gauge", ("session", "boundaries"), lengths),
            *self.models.metrics(),
            *self.stages.metrics(),
            ("rejected_count", "counter", ("reason",), self._rejections),
            ("event_loop_lag", "histogram", (), {(): self._loop_lag}),
            ("queue_depth_batches", "gauge", (), {(): batches}),
            ("queue_depth_rows", "gauge", (), {(): rows}),
            ("batches_in_flight", "gauge", (), {(): self.device.in_flight}),
            ("emulated_device", "gauge", (), {(): int(self.emulated)}),
            ("emulated_device_parallel", "gauge", (), {(): int(self.emulated_parallel)}),
            ("device_busy_micros_total", "counter", (), {(): self.device.busy_micros()}),
            ("process_cpu_micros_total", "counter", (), {(): time.process_time_ns() / 1000}),
            ("gpu_busy_micros_total", "counter", ("gpu",), {index: busy for index, busy, _ in gpus}),
            ("gpu_memory_used_bytes", "gauge", ("gpu",), {index: used for index, _, used in gpus}),
        ]
        return [
            ("/batchtune/serving/" + name, kind, labels, values) for name, kind, labels, values in metrics
        ]


def _folded(times_by_key: Mapping[_Key, Timings]) -> dict[_Key, Histogram]:
    """Return the histograms that have values; requests that failed may have made empty ones."""
    histograms = {key: times.fold() for key, times in times_by_key.items()}
    return {key: histogram for key, histogram in histograms.items() if any(histogram.counts)}


def _render(name: str, kind: str, labels: tuple[str, ...], values: Mapping[Any, Any]) -> Iterable[str]:
    labelled = _labelled(labels, values)
    return render_histograms(name, labelled) if kind == "histogram" else render_values(name, kind, labelled)


def _labelled(names: tuple[str, ...], values: Mapping[_Key, _Value]) -> dict[Labels, _Value]:
    """Return a metric's values by (label name, label value) pairs; a key that is no tuple is one value."""
    return {
        tuple(zip(names, map(str, key if isinstance(key, tuple) else (key,)), strict=True)): value
        for key, value in values.items()
    }


# How busy the GPU is, and how much of its memory is in use, by the driver's own count (NVML).
#
# A thread of its own looks every 100 ms, so no request waits for the driver. NVML says during which share of the last
# sampling period (a sixth of a second to one) a kernel was running; the integral over time makes a counter of it.


class GpuSampler:
    """Samples the GPUs that this process can see, from `start` to `close`; no GPU where NVML is missing.

    device: value of --device: "cpu": no GPU; "cuda:N": GPU N; else all. nvml: the module pynvml; None: it is imported.
    clock_s: a monotonic clock, in seconds.
    """

    def __init__(
        self, device: str, *, nvml: Any | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml: Any = _nvml() if nvml is None and device != "cpu" else nvml
        self._clock_s = clock_s
        self._handles = [] if device == "cpu" or self._nvml is None else _handles(self._nvml, device)
        self._busy_s = [0.0] * len(self._handles)
        self._memory_bytes = [0] * len(self._handles)
        self._sampled_at_s = clock_s()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample, every 100 ms on a thread, if there is a GPU."""
        if self._handles:
            self.sample()
            self._thread = threading.Thread(target=self._run, name="gpu_sampler", daemon=True)
            self._thread.start()

    def sample(self) -> None:
        """Sample each GPU once; a GPU whose driver does not answer keeps its last figures."""
        now_s = self._clock_s()
        passed_s, self._sampled_at_s = now_s - self._sampled_at_s, now_s
        nvml = self._nvml
        for at, (_, handle) in enumerate(self._handles):
            with suppress(nvml.NVMLError):
                self._memory_bytes[at] = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
                self._busy_s[at] += nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 * passed_s

    def readings(self) -> list[tuple[int, float, int]]:
        """Return (number in NVML's order, busy microseconds since the start, bytes of memory that all processes use)
        for each GPU, as of the last sample."""
        return [
            (index, busy_s * 1e6, used)
            for (index, _), busy_s, used in zip(self._handles, self._busy_s, self._memory_bytes, strict=True)
        ]

    def close(self) -> None:
        """End the sampling thread and release NVML."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._handles:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _run(self) -> None:
        interval_s = 0.1
        while not self._stop.wait(interval_s):
            self.sample()


def _nvml() -> Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _handles(nvml: Any, device: str) -> list[tuple[int, Any]]:
    """Return (NVML's number, handle) of each GPU that CUDA shows this process, in CUDA's order if set."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    handles = []
    with suppress(nvml.NVMLError):
        for name in _visible(nvml.nvmlDeviceGetCount()):
            if name.isdecimal():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(name)
            handles.append((int(nvml.nvmlDeviceGetIndex(handle)), handle))
    _, colon, number = device.partition(":")
    return handles[int(number) : int(number) + 1] if colon else handles


def _visible(count: int) -> list[str]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, numbers or UUIDs, up to the first unknown; unset: all."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(count)]
    picked = []
    for name in (name.strip() for name in listed.split(",")):
        if not name or name.startswith("-") or (name.isdecimal() and int(name) >= count):
            break
        picked.append(name)
    return picked
