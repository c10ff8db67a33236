"""How late does an emulated device wake, and what does its computation cost?

python tests/benchmarks/server/emulated_device.py [--batches 500]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from batchtune.server.backends.emulated import EmulatedDevice, EmulatedServiceTime
from batchtune.wire.signature import TensorSpec

OUTPUTS = (TensorSpec(name="y", dtype="float32", shape=(None, 2)),)


def tell(what: str, run: Callable[[], object], nominal_ns: int, batches: int) -> None:
    late_ns = np.empty(batches)
    for batch in range(batches):
        started_ns = time.monotonic_ns()
        run()
        late_ns[batch] = time.monotonic_ns() - started_ns - nominal_ns
    p50, p99 = np.quantile(late_ns, (0.5, 0.99)) / 1000
    print(f"{what:40}{p50:8.1f}{p99:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=500)
    batches = parser.parse_args().batches
    busy, idle = EmulatedServiceTime(base_ms=2.0, per_row_ms=0.05), EmulatedServiceTime()
    print(f"{'µs beyond the nominal time':40}{'p50':>8}{'p99':>8}")
    for what, service_time, rows in (
        ("1 row", busy, 1),
        ("32 rows", busy, 32),
        ("64 rows", busy, 64),
        ("computation of 64 rows", idle, 64),
    ):
        device = EmulatedDevice(service_time, rows_max=None, outputs=OUTPUTS)
        run = partial(device, {"x": np.ones((rows, 200), np.float32)})
        tell(what, run, service_time.mean_ns(rows), batches)
    tell("time.sleep, this thread's slack lowered", partial(time.sleep, 0.002), 2_000_000, batches)


if __name__ == "__main__":
    main()
