"""How busy is the GPU, and how much of its memory is in use, by the driver's own count (NVML)?

A thread of its own asks every 100 ms, so no request waits for the driver. NVML says during which share of the last
sampling period (a sixth of a second to one) a kernel was running; the integral over time makes a counter of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU: its number in NVML's order, busy time since the start of the sampler, memory in use by all."""

    index: int
    busy_micros: float
    memory_used_bytes: int


class GpuSampler:
    """Samples the GPUs that this process can see until `close`; none where NVML is missing or finds none.

    `device` as in --device: on cpu there is nothing to sample, cuda:N samples that one alone. `nvml`: the module
    pynvml. `clock_s`: a monotonic clock.
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
        """Sample from now on."""
        if self._handles:
            self.sample()
            self._thread = threading.Thread(target=self._run, name="gpu_sampler", daemon=True)
            self._thread.start()

    def sample(self) -> None:
        """Ask the driver once; a GPU that does not answer keeps its last figures."""
        now_s = self._clock_s()
        passed_s, self._sampled_at_s = now_s - self._sampled_at_s, now_s
        nvml = self._nvml
        for at, (_, handle) in enumerate(self._handles):
            with suppress(nvml.NVMLError):
                self._memory_bytes[at] = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
                self._busy_s[at] += nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 * passed_s

    def readings(self) -> list[GpuReading]:
        """The figures of the last sample."""
        return [
            GpuReading(index=index, busy_micros=busy_s * 1e6, memory_used_bytes=used)
            for (index, _), busy_s, used in zip(self._handles, self._busy_s, self._memory_bytes, strict=True)
        ]

    def close(self) -> None:
        """End the thread."""
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
    """(NVML's number, handle) of each GPU that CUDA shows this process, in CUDA's order where that was set."""
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
    """CUDA_VISIBLE_DEVICES: numbers or UUIDs; CUDA stops at the first that it does not know."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(count)]
    picked = []
    for name in (name.strip() for name in listed.split(",")):
        if not name or name.startswith("-") or (name.isdecimal() and int(name) >= count):
            break
        picked.append(name)
    return picked
