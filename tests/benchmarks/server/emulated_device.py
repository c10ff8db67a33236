"""How late does an emulated device wake, and what does its computation cost?

python tests/benchmarks/server/emulated_device.py [--batches 500]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from batchtune.server.backends.emulated import EmulatedDevice, EmulatedServiceTime
from batchtune.wire.signature import TensorSpec

OUTPUTS = (TensorSpec(name="y", dtype="float32", shape=(None, 2)),)


def overshoots_micros(device: EmulatedDevice, nominal_ns: int, rows: int, batches: int) -> np.ndarray:
    inputs = {"x": np.ones((rows, 200), np.float32)}
    late_ns = np.empty(batches)
    for batch in range(batches):
        started_ns = time.monotonic_ns()
        device(inputs)
        late_ns[batch] = time.monotonic_ns() - started_ns - nominal_ns
    return late_ns / 1000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=500)
    batches = parser.parse_args().batches
    service_time = EmulatedServiceTime(base_ms=2.0, per_row_ms=0.05)
    print("rows  overshoot µs: p50    p99")
    for rows in (1, 32, 64):
        device = EmulatedDevice(service_time, rows_max=None, outputs=OUTPUTS)
        late = overshoots_micros(device, service_time.mean_ns(rows), rows, batches)
        print(f"{rows:4d}  {np.quantile(late, 0.5):18.1f} {np.quantile(late, 0.99):6.1f}")
    idle = EmulatedDevice(EmulatedServiceTime(), rows_max=None, outputs=OUTPUTS)
    late = overshoots_micros(idle, 0, 64, batches)
    print(f"computation of 64 rows: {np.quantile(late, 0.5):.1f} µs (median)")
    times = np.empty(batches)
    for batch in range(batches):
        started_ns = time.monotonic_ns()
        time.sleep(0.002)
        times[batch] = (time.monotonic_ns() - started_ns - 2_000_000) / 1000
    print(f"time.sleep overshoot: {np.quantile(times, 0.5):.1f} µs (median; this thread's slack is lowered)")


if __name__ == "__main__":
    main()
