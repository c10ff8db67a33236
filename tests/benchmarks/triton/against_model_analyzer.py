"""Which finds the best size and number of instances sooner: Model Analyzer's quick search or `batchtune sweep`?

    python tests/benchmarks/triton/against_model_analyzer.py --model-analyzer PROGRAM --perf-analyzer PROGRAM
        [--only theirs|ours] [--seed 1] [--budget 120]

Both launch the same Triton (`known_model`) on core 0 and load it from core 1. The best are 16 rows in two instances or
more. Space: max_batch_size 1, 2, 4, … 64, 1 to 4 instances (28). Model Analyzer chooses the number
of clients itself (up to 512), batchtune is told 128. A configuration counts as found when its first measurement has ended.
The environment of Model Analyzer: `pip install triton-model-analyzer`, and what perf_analyzer needs in LD_LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from batchtune.batching.parameters import BatchingParameters
from batchtune.target.process import free_ports
from tests.benchmarks.rivals import CLIENT_CORE, SERVER_CORE
from tests.benchmarks.triton.known_model import CONFIG, launchable, limit_rps, sweep

SIZES = [1, 2, 4, 8, 16, 32, 64]
INSTANCES = [1, 2, 3, 4]
CLIENTS = 128
BEST_RPS = limit_rps(16, 2)
WITHIN = 0.05
VARIANT = re.compile(r"m_config_\w+")

ANALYZER = """\
model_repository: {folder}/models
output_model_repository_path: {folder}/output
override_output_model_repository: true
checkpoint_directory: {folder}/checkpoints
export_path: {folder}/export
profile_models: {{m: {{cpu_only: true}}}}
run_config_search_mode: quick
run_config_search_max_model_batch_size: {size}
run_config_search_max_instance_count: {instances}
run_config_search_max_concurrency: 512
triton_launch_mode: local
triton_server_path: {server}
perf_analyzer_path: {client}
triton_http_endpoint: localhost:{http}
triton_grpc_endpoint: localhost:{grpc}
triton_metrics_url: http://localhost:{metrics}/metrics
client_protocol: grpc
skip_summary_reports: true
skip_detailed_reports: true
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measurement that has ended: of which configuration, how long after the start."""

    size: int
    instances: int
    seconds: float

    @property
    def share(self) -> float:
        return limit_rps(self.size, self.instances) / BEST_RPS


def theirs(
    program: str, folder: Path, server: Path, client: Path, limit_s: float
) -> tuple[list[Measured], str]:
    http, grpc, metrics = free_ports(3)
    path = folder / "analyzer.yaml"
    names = {"size": SIZES[-1], "instances": INSTANCES[-1], "http": http, "grpc": grpc, "metrics": metrics}
    path.write_text(ANALYZER.format(folder=folder, server=server, client=client, **names))
    started_s = time.monotonic()
    command = [program, "profile", "-f", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(limit_s, end_all, args=(process.pid,))
        timer.start()
        starts = [(line, time.monotonic() - started_s) for line in process.stdout if keep(line)]
    timer.cancel()
    ended_s = time.monotonic() - started_s
    ends = [*(at for _, at in starts[1:]), ended_s]
    measured = []
    for (line, _), end in zip(starts, ends, strict=True):
        (name,) = VARIANT.findall(line)
        size, instances = configured(folder / "output" / name / "config.pbtxt")
        measured.append(Measured(size=size, instances=instances, seconds=end))
    words = best_of(folder) if process.returncode == 0 else f"ended after its time with {process.returncode}"
    return measured, f"{words}; {ended_s:.0f} s in all"


def end_all(pid: int) -> None:
    """End a program and all that it started, in sessions of their own too."""
    program = psutil.Process(pid)
    for process in [*program.children(recursive=True), program]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def keep(line: str) -> bool:
    """Whether it says that a measurement begins."""
    print(f"    {line.rstrip()}", file=sys.stderr, flush=True)
    return "Profiling " in line and VARIANT.search(line) is not None


def configured(path: Path) -> tuple[int, int]:
    """Size and instances of a variant that Model Analyzer wrote."""
    text = path.read_text() if path.exists() else CONFIG % (1, 1)
    size = re.search(r"max_batch_size: (\d+)", text)
    count = re.search(r"count: (\d+)", text)
    return int(size[1]) if size else 1, int(count[1]) if count else 1


def best_of(folder: Path) -> str:
    """The variant with the highest throughput in its checkpoint."""
    (path,) = (folder / "checkpoints").glob("*.ckpt")
    rate, variant = max(throughputs(json.loads(path.read_text())))
    size, instances = configured(folder / "output" / variant / "config.pbtxt")
    return (
        f"its best is size {size}, {instances} instances with {rate:.0f}/s, "
        f"{1 - limit_rps(size, instances) / BEST_RPS:.1%} below the best"
    )


def throughputs(node: Any, variant: str = "") -> Iterator[tuple[float, str]]:
    """Each `["perf_throughput", {"_value": …}]` of a checkpoint with the variant under whose name it stands."""
    match node:
        case ["perf_throughput", {"_value": value}]:
            yield float(value), variant
        case list():
            for entry in node:
                yield from throughputs(entry, variant)
        case dict():
            for name, entry in node.items():
                yield from throughputs(entry, name if VARIANT.fullmatch(name) else variant)


def ours(folder: Path, server: Path, models: Path, seed: int, budget_s: float) -> tuple[list[Measured], str]:
    space = {"sizes": SIZES, "delays": [0], "instances": INSTANCES, "clients": CLIENTS, "seed": seed}
    target = f"model: {models / 'm'}, command: [{server}], cpus: [{SERVER_CORE}]"
    found = sweep(folder, target=target, protocol="kserve_grpc", budget=budget_s, **space)
    measured, spent_s = [], found.seconds - sum(trial.seconds for trial in found.trials)
    for trial in found.trials:
        spent_s += trial.seconds
        batching = trial.configuration.batching or BatchingParameters()
        size, count = batching.max_batch_size or 1, batching.num_batch_threads or 1
        measured.append(Measured(size=size, instances=count, seconds=spent_s))
    return measured, f"it recommends {found}"


def report(name: str, measured: Iterable[Measured], words: str) -> None:
    ones = list(measured)
    first = next((number for number, one in enumerate(ones, 1) if one.share >= 1 - WITHIN), None)
    reached = "never" if first is None else f"by measurement {first}, after {ones[first - 1].seconds:.0f} s"
    configurations = len({(one.size, one.instances) for one in ones})
    print(
        f"{name}: within 5 % of the best {reached}; {len(ones)} measurements of {configurations} configurations; {words}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-analyzer", default="model-analyzer")
    parser.add_argument("--perf-analyzer", default="perf_analyzer")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that Model Analyzer may take")
    parser.add_argument("--only", choices=["theirs", "ours"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=120.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server, models = launchable(folder, size=1)
        client = folder / "perf_analyzer"
        client.write_text(f'#!/bin/sh\nexec taskset -c {CLIENT_CORE} {given.perf_analyzer} "$@"\n')
        client.chmod(0o755)
        print(f"the best can do {BEST_RPS:.0f}/s; load average {os.getloadavg()[0]:.2f}", flush=True)
        if given.only != "theirs":
            report("batchtune sweep", *ours(folder, server, models, given.seed, given.budget))
        if given.only != "ours":
            report(
                "Model Analyzer, quick", *theirs(given.model_analyzer, folder, server, client, given.limit)
            )


if __name__ == "__main__":
    main()
