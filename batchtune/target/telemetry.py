"""Reads what the server itself counted between two moments.

Reads the Prometheus page of TensorFlow Serving and of the bundled server, which adds what TensorFlow Serving lacks:
why batches closed, execution time per batch size, queue depth, device busy time.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial

from batchtune.scenario.spec.http_server import MetricsSpec
from batchtune.target.endpoint import Endpoint, answer_of

_SESSION = ":tensorflow:serving:batching_session:"
_OURS = ":batchtune:serving:"
_INSIDE = f"{_OURS}requests_inside"

_Series = dict[tuple[tuple[str, str], ...], float]
_Labelled = Mapping[tuple[tuple[str, str], ...], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """One reading of a server's counters."""

    monotonic_s: float
    # CPU time that the server used so far; None: not known.
    server_cpu_s: float | None
    # Most memory that the server held so far; None: not known.
    memory_peak_bytes: int | None = None
    # Metric name -> label pairs -> value.
    series: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]] = field(default_factory=dict)
    # What is wrong with the page of `target.metrics`, with its URL; "": nothing.
    page_fault: str = ""
    # Key of `target.metrics` whose metric that page lacks -> the nearest name that it has, "" where none is near.
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerActivity:
    """What a server counted between two readings; None or empty: the server does not report it."""

    duration_s: float
    # A counter fell: the readings are not of one server process, so all that they count is left out.
    went_back: bool = False
    batches: int = 0
    # Rows that were executed, padding included.
    rows: int = 0
    # Without padding.
    mean_batch_rows: float | None = None
    # Rows of a batch, padding included -> batches.
    batches_by_rows: dict[int, int] = field(default_factory=dict)
    # Rows of a batch, padding included -> mean execution time of one.
    execution_s_by_rows: dict[int, float] = field(default_factory=dict)
    queue_wait_mean_s: float | None = None
    # Why batches were closed (`full`, `timeout`, `no_room`, `closed`) -> batches.
    close_reasons: dict[str, int] = field(default_factory=dict)
    # Reason -> requests that the server refused.
    rejected: dict[str, int] = field(default_factory=dict)
    requests_by_status: dict[str, int] = field(default_factory=dict)
    # Share of padding in the rows that were executed.
    padding_ratio: float | None = None
    # Share of the time with at least one batch running.
    device_busy_ratio: float | None = None
    server_cpu_s: float | None = None
    # Most memory that the server and its children held since their launch.
    memory_peak_bytes: int | None = None
    # A lower bound: the lower edge of the histogram's bucket.
    event_loop_lag_p99_s: float | None = None
    # Whether the device is emulated.
    emulated: bool = False
    # Of an emulated device: whether batches run side by side on it.
    device_parallel: bool | None = None
    # Requests that ran or waited at the second reading; reported by servers of kind http only.
    requests_inside: float | None = None
    # NVML's utilisation of the busiest GPU, 0 to 1.
    gpu_busy_ratio: float | None = None
    # Of the busiest GPU.
    gpu_memory_used_bytes: float | None = None
    # By length bucket ("" without buckets), of inputs that may differ in length: batches; below it rows,
    # elements that requests brought, elements of padding, and execution time of all batches.
    bucket_batches: dict[str, int] = field(default_factory=dict)
    bucket_rows: dict[str, int] = field(default_factory=dict)
    bucket_sent_elements: dict[str, int] = field(default_factory=dict)
    bucket_padding_elements: dict[str, int] = field(default_factory=dict)
    bucket_execution_micros: dict[str, int] = field(default_factory=dict)
    # By model: batches; below it their rows, padding included, and their execution time.
    model_batches: dict[str, int] = field(default_factory=dict)
    model_batch_rows: dict[str, int] = field(default_factory=dict)
    model_batch_micros: dict[str, int] = field(default_factory=dict)


def parse_prometheus(text: str) -> dict[str, _Series]:
    """Parse a Prometheus page: metric name -> sorted (label, value) pairs -> number. A line `rows{model="m"} 8` becomes
    `{"rows": {(("model", "m"),): 8.0}}`. Other lines than samples are ignored."""
    label_pattern = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
    line_pattern = re.compile(r"^([:a-zA-Z_][:\w]*)(?:\{(.*)\})? (\S+)(?: \d+)?$")
    series: dict[str, _Series] = defaultdict(dict)
    for line in text.splitlines():
        match = None if line.startswith("#") else line_pattern.match(line.strip())
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            series[name][tuple(sorted(label_pattern.findall(labels or "")))] = float(value)
        except ValueError:
            continue
    return dict(series)


def read_counters(endpoint: Endpoint) -> Counters:
    """Read the metrics page of a server that speaks TensorFlow Serving's API. The reading has no series where the
    server has no such page or no REST port.

    Raises:
        TargetError: the server does not answer.
    """
    series: Mapping[str, _Labelled] = {}
    if endpoint.rest_port is not None:
        series = _page(f"{endpoint.rest_url}{endpoint.monitoring_path}", endpoint)
    return Counters(monotonic_s=time.monotonic(), server_cpu_s=None, series=series)


def read_meant_counters(metrics: MetricsSpec | None, endpoint: Endpoint) -> Counters:
    """Read the metrics page of a server of kind http; its series get the names that the bundled server gives them.

    `metrics`: the scenario's map from the server's names; None: no page is read, and the returned Counters have no
    series. A page that is none of Prometheus, or an error status, is noted in `page_fault`.

    Raises:
        TargetError: the server does not answer.
    """
    if metrics is None:
        return Counters(monotonic_s=time.monotonic(), server_cpu_s=None)
    answer = answer_of(endpoint, metrics.url, hint="correct target.metrics.url")
    page, fault = parse_prometheus(answer.text), ""
    if answer.status_code != 200:
        page, fault = {}, f"{metrics.url}: HTTP {answer.status_code}"
    elif not page and answer.text.strip() and not re.search(r"^# (HELP|TYPE) ", answer.text, re.MULTILINE):
        fault = f"{metrics.url}: not a page of Prometheus: {' '.join(answer.text[:100].split())}"
    return Counters(
        monotonic_s=time.monotonic(),
        server_cpu_s=None,
        series=meant(metrics, page),
        page_fault=fault,
        missing={} if fault else _missing(metrics, page),
    )


def _missing(metrics: MetricsSpec, page: Mapping[str, _Labelled]) -> dict[str, str]:
    """Return `Counters.missing` of a page."""
    nearest = {}
    sums = ("batch_size", "queue", "execution")
    for key in (*sums, "batches", "rows", "running", "waiting"):
        name, end = getattr(metrics, key), "_sum" if key in sums else ""
        if name is not None and f"{name}{end}" not in page:
            there = [other.removesuffix(end) for other in page if other.endswith(end)]
            nearest[key] = next(iter(get_close_matches(name, there, n=1)), "")
    return nearest


def _page(url: str, endpoint: Endpoint) -> dict[str, _Series]:
    """Read the series of a Prometheus page; empty where there is no such page."""
    answer = answer_of(endpoint, url)
    return parse_prometheus(answer.text) if answer.status_code == 200 else {}


def meant(metrics: MetricsSpec, page: Mapping[str, _Labelled]) -> dict[str, _Labelled]:
    """Return the series of a metrics page under the bundled server's names, with times in microseconds.

    `metrics`: the scenario's map from the server's names. Series that it does not name are left out.
    """
    series: dict[str, _Labelled] = {}
    for name, total, count in (
        (metrics.batch_size, "processed_batch_size_sum", "wrapped_run_count"),
        (metrics.queue, "queuing_latency_sum", "queuing_latency_count"),
    ):
        if name is not None:
            micros = 1.0 if name == metrics.batch_size else _micros_in(name)
            series[_SESSION + total] = _scaled(page.get(f"{name}_sum", {}), micros)
            series[_SESSION + count] = page.get(f"{name}_count", {})
    for counter, ours in ((metrics.batches, "wrapped_run_count"), (metrics.rows, "processed_batch_size_sum")):
        if counter is not None:
            series[_SESSION + ours] = page.get(counter, {})
    gauges = [
        sum(page[name].values()) for name in (metrics.running, metrics.waiting) if name and name in page
    ]
    if gauges:
        series[_INSIDE] = {(): sum(gauges)}
    if metrics.execution is not None:
        series[f"{_OURS}device_busy_micros_total"] = _scaled(
            page.get(f"{metrics.execution}_sum", {}), _micros_in(metrics.execution)
        )
    return series


def _micros_in(name: str) -> float:
    """Return the microseconds in the unit that the name of a time ends in; in a second, Prometheus' own unit,
    where it ends in none."""
    return (
        1e3 if name.endswith(("_ms", "_milliseconds")) else 1.0 if name.endswith(("_us", "_micros")) else 1e6
    )


def _scaled(values: _Labelled, factor: float) -> _Series:
    return {labels: value * factor for labels, value in values.items()}


def activity(before: Counters, after: Counters) -> ServerActivity:
    """Return what a server did between two readings, computed from the differences of their counters."""
    duration_s = max(after.monotonic_s - before.monotonic_s, 1e-9)
    cpu = None
    if before.server_cpu_s is not None and after.server_cpu_s is not None:
        cpu = after.server_cpu_s - before.server_cpu_s
    if _went_back(before.series, after.series):
        peak = after.memory_peak_bytes
        return ServerActivity(duration_s=duration_s, went_back=True, server_cpu_s=cpu, memory_peak_bytes=peak)
    change = partial(_change, before.series, after.series)

    def total(name: str) -> float:
        return sum(change(name).values())

    # TensorFlow Serving counts each batch once under its exact size there; its histogram of sizes is coarser.
    batches_by_rows = _by_rows(change(f"{_OURS}batch_execution_count"), "batch_size") or _by_rows(
        change(f"{_SESSION}padding_size_count"), "execution_batch_size"
    )
    micros_by_rows = _by_rows(change(f"{_OURS}batch_execution_micros_total"), "batch_size")
    batches = round(total(f"{_SESSION}wrapped_run_count")) or sum(batches_by_rows.values())
    rows = round(total(f"{_SESSION}processed_batch_size_sum"))
    padding = total(f"{_SESSION}padding_size_sum")
    waits = total(f"{_SESSION}queuing_latency_count")
    busy_micros = total(f"{_OURS}device_busy_micros_total")
    gpus = {
        dict(labels).get("gpu", ""): busy for labels, busy in change(f"{_OURS}gpu_busy_micros_total").items()
    }
    busiest = max(gpus, key=gpus.__getitem__, default=None)
    memory = {
        dict(labels).get("gpu"): value
        for labels, value in after.series.get(f"{_OURS}gpu_memory_used_bytes", {}).items()
    }
    parallel = after.series.get(f"{_OURS}emulated_device_parallel", {})
    return ServerActivity(
        duration_s=duration_s,
        batches=batches,
        rows=rows,
        mean_batch_rows=(rows - padding) / batches if batches and rows else None,
        batches_by_rows=batches_by_rows,
        execution_s_by_rows={
            size: micros_by_rows[size] / count / 1e6
            for size, count in batches_by_rows.items()
            if count and size in micros_by_rows
        },
        queue_wait_mean_s=total(f"{_SESSION}queuing_latency_sum") / waits / 1e6 if waits else None,
        close_reasons=_by_label(change(f"{_OURS}batch_close_count"), "reason"),
        rejected=_by_label(change(f"{_OURS}rejected_count"), "reason"),
        requests_by_status=_by_label(change(":tensorflow:serving:request_count"), "status"),
        padding_ratio=padding / rows if rows else None,
        device_busy_ratio=busy_micros / 1e6 / duration_s if busy_micros else None,
        server_cpu_s=cpu,
        memory_peak_bytes=after.memory_peak_bytes,
        event_loop_lag_p99_s=_histogram_quantile_s(change(f"{_OURS}event_loop_lag_bucket"), 0.99),
        emulated=any(value > 0 for value in after.series.get(f"{_OURS}emulated_device", {}).values()),
        device_parallel=any(value > 0 for value in parallel.values()) if parallel else None,
        requests_inside=after.series.get(_INSIDE, {}).get(()),
        gpu_busy_ratio=None if busiest is None else gpus[busiest] / 1e6 / duration_s,
        gpu_memory_used_bytes=None if busiest is None else memory.get(busiest),
        model_batches=_by_label(change(f"{_OURS}model_batches_total"), "model_name"),
        model_batch_rows=_by_label(change(f"{_OURS}model_batch_rows_total"), "model_name"),
        model_batch_micros=_by_label(change(f"{_OURS}model_batch_micros_total"), "model_name"),
        bucket_batches=_by_label(change(f"{_OURS}length_bucket_batches_total"), "bucket"),
        bucket_rows=_by_label(change(f"{_OURS}length_bucket_rows_total"), "bucket"),
        bucket_sent_elements=_by_label(change(f"{_OURS}length_bucket_sent_elements_total"), "bucket"),
        bucket_padding_elements=_by_label(change(f"{_OURS}length_bucket_padding_elements_total"), "bucket"),
        bucket_execution_micros=_by_label(change(f"{_OURS}length_bucket_execution_micros_total"), "bucket"),
    )


def _went_back(before: Mapping[str, _Labelled], after: Mapping[str, _Labelled]) -> bool:
    """Whether a counter fell, or the process is another one: restarted, or one of several behind a
    balancer."""
    started = "process_start_time_seconds"
    if started in before and started in after and before[started] != after[started]:
        return True
    return any(
        value > after[name].get(labels, value)
        for name in before.keys() & after.keys()
        if name.startswith((":tensorflow:serving:", _OURS))
        and name.endswith(("_total", "_count", "_sum", "_bucket"))
        for labels, value in before[name].items()
    )


def _change(before: Mapping[str, _Labelled], after: Mapping[str, _Labelled], name: str) -> _Series:
    """Return the differences between the counters called `name` of two readings, by their labels."""
    earlier = before.get(name, {})
    return {labels: value - earlier.get(labels, 0.0) for labels, value in after.get(name, {}).items()}


def _by_label(changes: _Labelled, label: str) -> dict[str, int]:
    """Return label value -> the sum of the changes above 0 of the counters with this value."""
    counts: dict[str, int] = defaultdict(int)
    for labels, change in changes.items():
        if change > 0:
            counts[dict(labels).get(label, "")] += round(change)
    return dict(sorted(counts.items()))


def _by_rows(changes: _Labelled, label: str) -> dict[int, int]:
    counts = _by_label(changes, label).items()
    return dict(sorted((int(rows), count) for rows, count in counts if rows.isdigit()))


def _histogram_quantile_s(changes: _Labelled, quantile: float) -> float | None:
    """Return a lower bound of the quantile (s): the lower edge of the bucket that holds it; None: no samples."""
    cumulative: dict[float, float] = defaultdict(float)
    for labels, change in changes.items():
        cumulative[float(dict(labels).get("le", "inf"))] += change
    most = cumulative[max(cumulative)] if cumulative else 0.0
    if most <= 0:
        return None
    return max((edge for edge, count in cumulative.items() if count < quantile * most), default=0.0) / 1e6
