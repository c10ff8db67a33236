"""A sweep on a Ray cluster of two nodes on this machine, with emulated devices; prints what came of it as JSON.

    python tests/tune/sweep/ray_sweep.py FOLDER

The second node is killed under a trial. In a process of its own: Ray keeps threads and handlers
until its process ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import sys
import threading
import time
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from batchtune.archive.run import LEDGER, open_run
from batchtune.cli.arguments.options import LoadRequest
from batchtune.cli.commands.run_sweep import run_sweep
from batchtune.errors import BatchtuneError
from batchtune.tune.trials.trial import Trial

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
QUICK_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 20,
}
SIGNS_OF_LIFE = 6
"""Trials of both nodes, before one of them is ended."""
MODEL = """\
service_time: {base_ms: 8.0, per_row_ms: 1.0}
inputs: {x: {dtype: float32, shape: [8]}}
outputs: {y: {dtype: float32, shape: [2]}}
"""
SCENARIO = """\
name: parallel
target: {kind: tfserving, model: MODEL}
load: {arrivals: closed, concurrency: 16, warm_up: 100ms, duration: 400ms}
objective: throughput
search:
  budget: {time: 25s}
  parallel: {servers: 2, ray: "ADDRESS", cpus_per_server: 1}
  space: {max_batch_size: [1, 2, 4, 8], batch_timeout_micros: [0, 2000], num_batch_threads: [1]}
"""


def main(folder: Path) -> dict[str, Any]:
    version = folder / "emulated" / "1"
    version.mkdir(parents=True)
    (version / "emulated.yaml").write_text(MODEL)
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": QUICK_DEATH})
    other = cluster.add_node(**NODE)
    scenario = folder / "scenario.yaml"
    scenario.write_text(
        SCENARIO.replace("MODEL", str(folder / "emulated")).replace("ADDRESS", cluster.address)
    )
    killer = threading.Thread(target=_kill, args=(cluster, other, folder / "results"))
    try:
        killer.start()
        found = _swept(scenario, folder / "results")
        killer.join()
        return {**found, "left": _left()}
    finally:
        ray.shutdown()
        cluster.shutdown()


def _kill(cluster: Cluster, node: Any, results: Path) -> None:
    """End the node once trials have come from it and from the other."""
    give_up_s = time.monotonic() + 60.0
    while time.monotonic() < give_up_s:
        ledgers = [path.read_bytes() for path in results.glob(f"*/*/{LEDGER}")]
        if sum(ledger.count(b"\n") for ledger in ledgers) >= SIGNS_OF_LIFE:
            break
        time.sleep(0.05)
    cluster.remove_node(node, False)


def _swept(scenario: Path, results: Path) -> dict[str, Any]:
    said, answer = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(answer):
            code = run_sweep(LoadRequest(scenario=scenario, results=results, json=True))
    except BatchtuneError:
        print(said.getvalue(), file=sys.stderr)
        raise
    (path,) = (results / "parallel").iterdir()
    trials = open_run(path).ledger()
    last = {trial.node: trial.number for trial in sorted(trials, key=attrgetter("number"))}
    return {
        "exit_code": code,
        "said": said.getvalue(),
        "nodes": len(last),
        "trials_after_one_was_lost": max(last.values()) - min(last.values()),
        "overlapping": _overlapping(trials),
        "batching": json.loads(answer.getvalue())["configuration"]["batching"],
    }


def _overlapping(trials: list[Trial]) -> int:
    """Pairs of trials on different nodes that ran at the same moment."""
    begun = [(datetime.fromisoformat(trial.started_utc).timestamp(), trial) for trial in trials]
    return sum(
        one.node != other.node and one_s < other_s + other.seconds and other_s < one_s + one.seconds
        for at, (one_s, one) in enumerate(begun)
        for other_s, other in begun[:at]
    )


def _left() -> list[str]:
    """What a sweep leaves behind: servers, load processes and actors."""
    give_up_s = time.monotonic() + 20.0
    while True:
        lines = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
        marks = ("ray::_Actor", "spawn_main", "batchtune.server")
        left = [line[:100] for line in lines if any(mark in line for mark in marks)]
        if not left or time.monotonic() > give_up_s:
            return left
        time.sleep(0.05)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(220, exit=True)
    print(json.dumps(main(Path(sys.argv[1]))))
