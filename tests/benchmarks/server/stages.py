"""How busy is a device whose requests need the CPU before it, and a store? As a unit, and with the device part alone.

python tests/benchmarks/server/stages.py [--blocks 2] [--early]

The device is emulated (it sleeps), so that the CPUs are there for the stages as they are beside a GPU: 4 ms a batch
and 0.25 ms a row; before it Python that keeps a CPU busy for 0.2 ms a row, and a store that answers after 2 ms. Prints
what `batchtune compare` says; a minute. With --early instead: how late is an answer at a steady rate, where the Python
takes as long as the device and batches close by their timeout, as a unit of the shared scheduler, and with early work in
batches of the streaming one. The twin says the same first, from these times alone: no delay of wire or server, no
interpreter that two threads share.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from batchtune.twin.simulator.simulate import Batcher, Device, SimulatedTraffic, summarise, summary_of
from tests.twin.early_work import run_early

RATE_RPS, TIMEOUT_S, ROWS_MAX, THREADS = 500, 0.02, 16, 3
EARLY_CPU_S = 0.0005
EMULATED = """\
service_time: {base_ms: 4.0, per_row_ms: 0.25}
inputs: {x: {dtype: float32, shape: [4]}, features: {dtype: float32, shape: [8]}}
outputs: {y: {dtype: float32, shape: [2]}}
"""
STAGES = """\
pre: stages.py:preprocess
inputs: {user: {dtype: int64}, x: {dtype: float32, shape: [4]}}
lookup:
  inputs: {user: {dtype: int64}}
  outputs: {features: {dtype: float32, shape: [8]}}
  emulated: {base_ms: 2.0, per_row_ms: 0.005}
  max_batch_size: 32
  batch_timeout_micros: 1000
"""
EARLY_STAGES = """\
pre: stages.py:preprocess
inputs: {features: {dtype: float32, shape: [8]}, x: {dtype: float32, shape: [4]}}
"""
CODE = """\
import time

CPU_S = %s


def preprocess(tensors):
    end_s = time.thread_time() + CPU_S * len(tensors["x"])
    while time.thread_time() < end_s:
        sum(range(100))
    return tensors
"""
SCENARIO = """\
name: emulated-stages
target: {{model: {model}, cpus: all, flags: {{allow_model_code: true}}}}
request: {{rows: 1, inputs: random}}
load: {{arrivals: closed, concurrency: 48, warm_up: 1s, duration: 3s, seed: 1}}
objective: throughput
fixed: {{max_batch_size: 16, batch_timeout_micros: 2000, max_enqueued_batches: 100, num_batch_threads: 1}}
variants:
  unit: {{fixed: {{batching_stage: unit}}}}
  device: {{fixed: {{batching_stage: device}}}}
"""
EARLY_SCENARIO = """\
name: early-work
target: {{model: {model}, cpus: all, flags: {{allow_model_code: true}}}}
request: {{rows: 1, inputs: random}}
load: {{arrivals: poisson, rate: 500/s, warm_up: 1s, duration: 4s, seed: 1}}
objective: latency
fixed: {{max_batch_size: 16, batch_timeout_micros: 20000, max_enqueued_batches: 100, num_batch_threads: 3}}
variants:
  shared: {{fixed: {{batching_stage: unit}}}}
  streaming: {{fixed: {{batching_stage: early, batch_scheduler: streaming}}}}
"""


def print_prediction() -> None:
    """Of the two variants of EARLY_SCENARIO: a minute of Poisson arrivals."""
    due_s = np.cumsum(np.random.default_rng(1).exponential(1 / RATE_RPS, 60 * RATE_RPS))
    rows = np.arange(ROWS_MAX + 1)
    device_s = 0.004 + 0.00025 * rows
    usual = {"max_batch_size": ROWS_MAX, "batch_timeout_s": TIMEOUT_S, "batch_threads": THREADS}
    # as a unit a batch holds the device, which is serial, only for its own part, which tau of the unit is not
    unit = Device(tau_s=device_s + EARLY_CPU_S * rows)
    traffic, device = SimulatedTraffic(due_s=due_s, rows=1), Device(tau_s=device_s, serial=True)
    shared = summary_of(traffic, Batcher(**usual, max_enqueued_batches=100), [unit], warm_up_s=1.0)
    early = run_early(traffic, Batcher(**usual), device, EARLY_CPU_S, count_from_s=1.0)
    streaming = summarise([early], warm_up_s=1.0, quantiles=(0.5, 0.95, 0.99))
    print("predicted       p50 ms  p95 ms  p99 ms  mean batch rows  refused %")
    for name, summary in (("shared", shared), ("streaming", streaming)):
        p50_ms, p95_ms, p99_ms = summary.latency_s[0] * 1e3
        rest = f"{summary.mean_batch_rows[0]:15.1f}  {summary.error_ratio[0] * 100:9.2f}"
        print(f"{name:12} {p50_ms:9.1f} {p95_ms:7.1f} {p99_ms:7.1f}  {rest}", flush=True)


def main(blocks: int, *, early: bool) -> int:
    if early:
        print_prediction()
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "staged" / "1"
        version.mkdir(parents=True)
        (version / "emulated.yaml").write_text(EMULATED)
        (version / "stages.yaml").write_text(EARLY_STAGES if early else STAGES)
        (version / "stages.py").write_text(CODE % (EARLY_CPU_S if early else 0.0002))
        scenario = Path(folder) / "stages.yaml"
        scenario.write_text((EARLY_SCENARIO if early else SCENARIO).format(model=version.parent))
        command = [sys.executable, "-m", "batchtune", "compare", str(scenario), "--blocks", str(blocks)]
        return subprocess.run([*command, "--results", folder], check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--early", action="store_true")
    asked = parser.parse_args()
    sys.exit(main(asked.blocks, early=asked.early))
