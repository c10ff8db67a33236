"""How busy is a device whose requests need the CPU before it, and a store? As a unit, and with the device part alone.

python tests/benchmarks/server/stages.py [--blocks 2]

The device is emulated (it sleeps), so that the CPUs are there for the stages as they are beside a GPU: 4 ms a batch
and 0.25 ms a row; before it Python that keeps a CPU busy for 0.2 ms a row, and a store that answers after 2 ms. Prints
what `batchtune compare` says; two minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

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
CODE = """\
import time

CPU_S = 0.0002


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


def main(blocks: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "staged" / "1"
        version.mkdir(parents=True)
        (version / "emulated.yaml").write_text(EMULATED)
        (version / "stages.yaml").write_text(STAGES)
        (version / "stages.py").write_text(CODE)
        scenario = Path(folder) / "stages.yaml"
        scenario.write_text(SCENARIO.format(model=version.parent))
        command = [sys.executable, "-m", "batchtune", "compare", str(scenario), "--blocks", str(blocks)]
        return subprocess.run([*command, "--results", folder], check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=2)
    sys.exit(main(parser.parse_args().blocks))
