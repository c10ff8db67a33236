"""The metrics page shows what the driver says of the GPUs, and nothing where there are none."""

# ruff: noqa: N802  (NVML has names of its own)

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from batchtune.server.metrics import GpuSampler, Metrics
from tests.server.metrics.test_counters import lines
from tests.waiting import wait_until


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

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return int(name.removeprefix("GPU-"))

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

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
