"""How busy is a device whose requests need the CPU before it, and a store? As a unit, and with the device part alone.

python tests/benchmarks/server/stages.py [--blocks 2] [--early]

The device is emulated (it sleeps), so that the CPUs are there for the stages as they are beside a GPU: 4 ms a batch
and 0.25 ms a row; before it Python that keeps a CPU busy for 0.2 ms a row, and a store that answers after 2 ms. Prints
what `batchtune compare` says; a minute. With --early instead: how late is an answer at a steady rate, where the Python
takes as long as the device and batches close by their timeout, as a unit of the shared scheduler, and with early work in
batches of the streaming one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

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


def main(blocks: int, *, early: bool) -> int:
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
