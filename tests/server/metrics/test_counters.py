"""The metrics page has TensorFlow Serving's names, says what that lacks, and what the driver says of the GPUs."""

# ruff: noqa: N802, N815  (NVML has names of its own)

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.server.metrics import GpuSampler, Histogram, Metrics, render_histograms
from batchtune.server.sessions.batched import BatchRecord
from tests.waiting import wait_until


def record(rows: int, padded_rows: int, **changes: object) -> BatchRecord:
    values: dict[str, object] = {
        "rows": rows,
        "padded_rows": padded_rows,
        "task_rows": (1, rows - 1),
        "input_tensors": 2,
        "close_reason": "full",
        "queue_wait_micros": (150, 50),
        "execution_micros": 2000.0,
    }
    return BatchRecord(**(values | changes))  # type: ignore[arg-type]


def lines(metrics: Metrics, part: str) -> list[str]:
    return [line for line in metrics.render().splitlines() if part in line and not line.startswith("#")]


def test_histograms_are_cumulative_and_end_with_infinity() -> None:
    histogram = Histogram((1, 298.5984, 1e6))
    for value in (0.5, 1, 2, 298.5984, 1e6):  # as in TensorFlow, what equals a bound lies above it
        histogram.add(value)
    assert list(render_histograms("/h", {(("a", 'x"y'),): histogram})) == [
        "# TYPE :h histogram",
        ':h_bucket{a="x\\"y",le="1"} 1',
        ':h_bucket{a="x\\"y",le="298.598"} 3',
        ':h_bucket{a="x\\"y",le="1e+06"} 4',
        ':h_bucket{a="x\\"y",le="+Inf"} 5',
        ':h_sum{a="x\\"y"} 1000302.098',
        ':h_count{a="x\\"y"} 5',
    ]


@given(st.lists(st.integers(0, 20)), st.integers(1, 3))
def test_adding_values_together_is_adding_each(values: list[int], times: int) -> None:
    together, one_by_one = Histogram((1, 4, 9, 16)), Histogram((1, 4, 9, 16))
    together.add_all(values, times)
    for value in values:
        one_by_one.add(value, times)
    assert (together.counts, together.total) == (one_by_one.counts, one_by_one.total)


def test_times_that_nobody_has_yet_are_not_shown() -> None:
    metrics = Metrics()
    metrics.request_times("m", "predict", "REST")
    metrics.runtime_times("m", "Predict", "TF1")
    assert "latency" not in "".join(lines(metrics, "serving:re")) + "".join(lines(metrics, "serving:ru"))
    assert lines(metrics, "serving:request_count") == []


def test_any_number_of_metrics_is_read_from_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the configuration may ask for the growth of as many as it likes."""
    metrics = Metrics()
    metrics.request_count("m", "OK")
    rendered = metrics.render()
    pages = [rendered]
    monkeypatch.setattr(metrics, "render", pages.pop)
    count = "/tensorflow/serving/request_count"
    values = metrics.first_values([count, *(f"/no/such/{number}" for number in range(10_000))])
    assert (values[count], sum(values.values()), len(values)) == (1, 1, 10_001)


def test_times_are_all_there_however_many_were_collected() -> None:
    metrics = Metrics()
    for number in range(600):
        metrics.request_times("m", "Predict", "GRPC").add(float(number))
        metrics.runtime_times("m", "Predict", "TF1").add(1.0)
        if number in {100, 599}:
            assert f'request_count{{model_name="m",status="OK"}} {number + 1}\n' in metrics.render()
    text = metrics.render()
    assert 'request_latency_sum{model_name="m",API="Predict",entrypoint="GRPC"} 179700\n' in text
    assert 'runtime_latency_count{model_name="m",API="Predict",runtime="TF1"} 600\n' in text


SHOWN = """
:tensorflow:serving:request_count{model_name="m",status="OK"} 2
:tensorflow:serving:request_count{model_name="m",status="UNAVAILABLE"} 1
:tensorflow:serving:request_latency_count{model_name="m",API="predict",entrypoint="REST"} 1
:tensorflow:serving:batching_session:wrapped_run_count{} 2
:tensorflow:serving:batching_session:processed_batch_size_sum{} 12
:tensorflow:serving:batching_session:input_batch_size_count{} 8
:tensorflow:serving:batching_session:queuing_latency_count{thread_pool_name=""} 4
:tensorflow:serving:batching_session:queuing_latency_sum{thread_pool_name=""} 400
:tensorflow:serving:batching_session:padding_size_sum{execution_batch_size="4"} 1
:tensorflow:serving:batching_session:padding_size_sum{execution_batch_size="8"} 0
:batchtune:serving:batch_close_count{reason="full"} 1
:batchtune:serving:batch_close_count{reason="timeout"} 1
:batchtune:serving:batch_execution_count{batch_size="4"} 1
:batchtune:serving:batch_execution_count{batch_size="5"} 1
:batchtune:serving:batch_execution_count{batch_size="8"} 1
:batchtune:serving:batch_execution_micros_total{batch_size="8"} 2000
:batchtune:serving:rejected_count{reason="queue_full"} 1
:batchtune:serving:rejected_count{reason="expired"} 1
:batchtune:serving:queue_depth_batches{} 2
:batchtune:serving:queue_depth_rows{} 17
:batchtune:serving:length_buckets{session="m/1/s",boundaries="32,64"} 1
:batchtune:serving:length_buckets{session="m/2/s",boundaries=""} 1
:batchtune:serving:emulated_device{} 1
:batchtune:serving:model_batches_total{model_name="a"} 2
:batchtune:serving:model_batches_total{model_name="b"} 1
:batchtune:serving:model_batch_rows_total{model_name="a"} 6
:batchtune:serving:model_batch_rows_total{model_name="b"} 1
:batchtune:serving:model_batch_micros_total{model_name="a"} 4
:batchtune:serving:model_batch_micros_total{model_name="b"} 0.5
"""


def test_all_that_happens_is_shown_by_name() -> None:
    """An unbatched run only in our own metrics; a batch of two requests and two inputs has four sizes."""
    metrics = Metrics()
    assert "model_batches" not in metrics.render()
    for status in ("OK", "UNAVAILABLE"):
        metrics.request_count("m", status)
    metrics.request_times("m", "predict", "REST").add(20.0)
    metrics.on_batch(record(3, 4))
    metrics.on_batch(record(8, 8, close_reason="timeout"))
    metrics.on_unbatched_run(5, 100.0)
    metrics.on_rejected("queue_full")
    metrics.on_rejected("expired")
    metrics.queue_depths = lambda: (2, 17)
    metrics.length_boundaries = lambda: {"m/1/s": (32, 64), "m/2/s": ()}
    metrics.emulated = True
    for name, rows, micros in (("a", 4, 3.0), ("a", 2, 1.0), ("b", 1, 0.5)):
        metrics.models.add((name,), 1, rows, micros)
    assert set(SHOWN.split("\n")) - {""} <= set(metrics.render().splitlines())


def test_clients_cannot_make_series_without_end() -> None:
    """Without batching each run has as many rows as a client sent."""
    metrics = Metrics()
    for rows in [0, 128, 129, 256, *range(257, 100_000, 41), 2**27]:
        metrics.on_unbatched_run(rows, 1.0)
    counts = lines(metrics, "batch_execution_count")
    assert len(counts) <= 2 + 20
    assert ':batchtune:serving:batch_execution_count{batch_size="128"} 1' in counts
    assert ':batchtune:serving:batch_execution_count{batch_size="256"} 2' in counts


def test_busy_time_counts_overlapping_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [0]
    monkeypatch.setattr("batchtune.server.metrics.time.monotonic_ns", lambda: now_ns[0])
    device = Metrics().device
    with device:
        now_ns[0] = 1_000_000
        with device:
            assert device.in_flight == 2
            now_ns[0] = 3_000_000
            assert device.busy_micros() == 3000
        now_ns[0] = 4_000_000
    now_ns[0] = 9_000_000
    assert device.busy_micros() == 4000
    assert device.in_flight == 0


class FakeNvml:
    """pynvml with one figure per GPU, which a test may change."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int) -> None:
        self.utilization = [0] * count
        self.used = [1000 * (index + 1) for index in range(count)]
        self.lost: set[int] = set()
        self.calls: list[str] = []

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if not self.used:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.used)

    nvmlDeviceGetHandleByIndex = nvmlDeviceGetIndex = staticmethod(int)

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return int(name.removeprefix("GPU-"))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle in self.lost:
            raise self.NVMLError("the GPU is lost")
        return SimpleNamespace(used=self.used[handle])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=self.utilization[handle])


def gpu_lines(sampler: GpuSampler) -> list[str]:
    metrics = Metrics()
    metrics.gpus = sampler
    return lines(metrics, ":gpu_")


@pytest.fixture(autouse=True)
def no_device_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_busy_time_of_a_gpu_is_the_integral_of_its_utilisation() -> None:
    nvml, now_s = FakeNvml(2), iter((100.0, 100.1, 100.3, 100.4))
    sampler = GpuSampler("auto", nvml=nvml, clock_s=lambda: next(now_s))
    for utilization in (50, 100, 0):
        nvml.utilization[1] = utilization
        nvml.used[1] += 1
        sampler.sample()
    assert gpu_lines(sampler) == [
        ':batchtune:serving:gpu_busy_micros_total{gpu="0"} 0',
        ':batchtune:serving:gpu_busy_micros_total{gpu="1"} 250000',
        ':batchtune:serving:gpu_memory_used_bytes{gpu="0"} 1000',
        ':batchtune:serving:gpu_memory_used_bytes{gpu="1"} 2003',
    ]


@pytest.mark.parametrize(
    ("device", "visible", "sampled"),
    [
        ("auto", None, [0, 1, 2]),
        ("cpu", None, []),
        ("cuda:1", None, [1]),
        ("cuda:7", None, []),
        ("cuda", "2,0", [2, 0]),
        ("cuda:1", "2,0", [0]),
        ("auto", "GPU-1", [1]),
        ("auto", "", []),
        ("auto", "-1", []),
        ("auto", "1,9,2", [1]),
    ],
)
def test_only_gpus_that_the_process_sees_are_sampled(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str | None, sampled: list[int]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    readings = GpuSampler(device, nvml=FakeNvml(3)).readings()
    assert [index for index, _, _ in readings] == sampled


def test_a_gpu_that_stops_answering_keeps_its_last_figures() -> None:
    nvml, now_s = FakeNvml(2), iter((100.0, 101.0, 102.0))
    sampler = GpuSampler("cuda", nvml=nvml, clock_s=lambda: next(now_s))
    nvml.utilization = [100, 100]
    for _ in range(2):
        sampler.sample()
        nvml.lost = {0}
    assert [busy_micros for _, busy_micros, _ in sampler.readings()] == [1e6, 2e6]


def test_without_a_driver_the_page_has_no_gpu() -> None:
    sampler = GpuSampler("auto", nvml=FakeNvml(0))
    sampler.start()
    assert gpu_lines(sampler) == []
    sampler.close()
    assert gpu_lines(GpuSampler("cpu")) == []
    assert lines(Metrics(), ":gpu_") == []


def test_the_sampler_has_a_thread_of_its_own_that_ends() -> None:
    nvml = FakeNvml(1)
    nvml.utilization = [100]
    sampler = GpuSampler("auto", nvml=nvml)
    sampler.start()
    wait_until(lambda: sampler.readings()[0][1] > 50_000)
    sampler.close()
    assert nvml.calls == ["init", "shutdown"]
    assert not any(thread.name == "gpu_sampler" for thread in threading.enumerate())
