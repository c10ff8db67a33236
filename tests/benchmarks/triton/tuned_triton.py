"""Is a real Triton tuned without restarts, to its known best, and left as it was found?

    python tests/benchmarks/triton/tuned_triton.py [loads] [attached] [launched] [killed] [--budget 25]

Needs nvidia-pytriton (BATCHTUNE_TRITON_PYTHON) and two cores, one for the server and one for the client. The model sleeps
20 ms + 0.5 ms for each row, so that the most of every configuration is known: instances × size / τ(size).

loads: 24 configurations one after another on a server that runs already; the seconds of each (bar: 1 s).
attached, launched: `batchtune sweep` by gRPC and by REST; how far what the recommended configuration can do
lies below the best of the space (bar: 5 %), the batches of its last run, and whether the model has what it had.
killed: a sweep is ended by SIGKILL, then `batchtune restore`.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from batchtune.archive.run import open_run
from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target.triton import TritonTarget
from tests.benchmarks.triton.known_model import (
    CLIENT_CORE,
    CLIENTS,
    DELAYS_MICROS,
    INSTANCES,
    SERVER_CORE,
    SIZES,
    config_of,
    launchable,
    limit_rps,
    serving,
    url,
)
from tests.target.triton.triton_server import TritonServer

PARTS = ["loads", "attached", "launched", "killed"]
SCENARIO = """\
name: known
target: {{kind: triton, model: {model}, {target}}}
request: {{protocol: {protocol}}}
load: {{arrivals: closed, concurrency: {clients}, cpus: [{core}], seed: {seed}}}
objective: throughput
search:
  seed: {seed}
  budget: {{time: {budget}s}}
  space:
    max_batch_size: {sizes}
    max_queue_delay_microseconds: {delays}
    instance_group: {{count: {instances}}}
"""


def write_scenario(
    folder: Path, *, model: str, target: str, protocol: str, budget_s: float, seed: int = 1
) -> Path:
    path = folder / "known.yaml"
    path.write_text(
        SCENARIO.format(
            model=model,
            target=target,
            protocol=protocol,
            clients=CLIENTS,
            core=CLIENT_CORE,
            seed=seed,
            budget=budget_s,
            sizes=SIZES,
            delays=DELAYS_MICROS,
            instances=INSTANCES,
        )
    )
    return path


def attached_to(server: TritonServer) -> str:
    return f'rest_url: "{url(server)}", grpc_url: "127.0.0.1:{server.grpc_port}"'


def batchtune(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "batchtune", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def loads(server: TritonServer) -> None:
    before = config_of(server)
    seconds = []
    with TritonTarget(TargetSpec(kind="triton", model="m", rest_url=url(server))) as target:
        target.keep_original(lambda _original: None)
        for number in range(24):
            batching = BatchingParameters(
                max_batch_size=1 + number, batch_timeout_micros=100 * number, num_batch_threads=1 + number % 2
            )
            configuration = Configuration(
                batching=batching,
                dialect="triton",
                flags=(("preserve_ordering", "true"),) * (number % 3 == 0),
            )
            begun_s = time.perf_counter()
            target.apply(configuration)
            seconds.append(time.perf_counter() - begun_s)
            print(f"  {configuration.label():92s} {seconds[-1]:.3f} s", flush=True)
    kept = "as it was" if config_of(server) == before else "NOT AS IT WAS"
    print(
        f"loads: {len(seconds)} configurations without a restart, {statistics.median(seconds):.3f} s "
        f"({min(seconds):.3f}-{max(seconds):.3f}) each; bar 1 s; afterwards the model is {kept}",
        flush=True,
    )


def told(name: str, done: subprocess.CompletedProcess[str], cwd: Path, seconds: float) -> None:
    if done.returncode not in (0, 5):
        print(f"{name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return
    chosen: dict[str, Any] = json.loads(done.stdout)
    batching = chosen["configuration"]["batching"]
    size, instances = batching["max_batch_size"], batching["num_batch_threads"]
    best = max(limit_rps(one, count) for one in SIZES for count in INSTANCES)
    trials = open_run(cwd / chosen["run"]).ledger()
    last = [one for one in trials if one.configuration.batching is not None and one.measurement is not None][
        -1
    ]
    assert last.measurement is not None
    activity = last.measurement.server
    assert activity is not None
    print(
        f"{name}: size {size}, delay {batching['batch_timeout_micros']} µs, {instances} instances, which can do "
        f"{limit_rps(size, instances):.0f}/s of the {best:.0f}/s of the best: "
        f"{1 - limit_rps(size, instances) / best:.1%} below; last run of {last.configuration.label()}: "
        f"{last.measurement.throughput_rps.value:.0f}/s, batches {dict(activity.batches_by_rows)}; "
        f"{len(trials)} trials in {seconds:.0f} s, exit code {done.returncode}",
        flush=True,
    )


def attached_sweeps(server: TritonServer, folder: Path, budget_s: float) -> None:
    for protocol in ("kserve_grpc", "kserve_rest_binary"):
        before = config_of(server)
        path = write_scenario(
            folder, model="m", target=attached_to(server), protocol=protocol, budget_s=budget_s
        )
        started_s = time.monotonic()
        done = batchtune("sweep", path, "--json", cwd=folder)
        told(f"attached, {protocol}", done, folder, time.monotonic() - started_s)
        print(f"  afterwards the model is {'as it was' if config_of(server) == before else 'NOT AS IT WAS'}")


def launched_sweeps(folder: Path, budget_s: float) -> None:
    program, model = launchable(folder)
    for protocol in ("kserve_grpc", "kserve_rest_binary"):
        target = f"command: [{program}], cpus: [{SERVER_CORE}]"
        path = write_scenario(folder, model=str(model), target=target, protocol=protocol, budget_s=budget_s)
        started_s = time.monotonic()
        done = batchtune("sweep", path, "--json", cwd=folder)
        told(f"launched, {protocol}", done, folder, time.monotonic() - started_s)


def killed(server: TritonServer, folder: Path) -> None:
    before = config_of(server)
    results = folder / "killed"
    results.mkdir()
    path = write_scenario(
        results, model="m", target=attached_to(server), protocol="kserve_grpc", budget_s=60.0
    )
    command = [sys.executable, "-m", "batchtune", "sweep", str(path)]
    with subprocess.Popen(
        command, cwd=results, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as sweep:
        give_up = time.monotonic() + 60
        while config_of(server) == before and time.monotonic() < give_up:
            time.sleep(0.02)
        sweep.send_signal(signal.SIGKILL)
    changed = config_of(server)
    differing = sorted(name for name in {*before, *changed} if before.get(name) != changed.get(name))
    (run,) = (results / "results" / "known").iterdir()
    started_s = time.monotonic()
    done = batchtune("restore", run, cwd=results)
    print(
        f"killed: the sweep left {', '.join(differing)} changed; `batchtune restore` ended with {done.returncode} after "
        f"{time.monotonic() - started_s:.1f} s; the model is "
        f"{'as it was' if config_of(server) == before else 'NOT AS IT WAS'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=PARTS, help=" ".join(PARTS))
    parser.add_argument("--budget", type=float, default=25.0, help="seconds of each sweep")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for inner in ("server", "launched", "work"):
            (folder / inner).mkdir()
        if {"loads", "attached", "killed"} & set(given.parts):
            with serving(folder / "server") as server:
                if "loads" in given.parts:
                    loads(server)
                if "attached" in given.parts:
                    attached_sweeps(server, folder / "work", given.budget)
                if "killed" in given.parts:
                    killed(server, folder / "work")
        if "launched" in given.parts:
            launched_sweeps(folder / "launched", given.budget)


if __name__ == "__main__":
    main()
