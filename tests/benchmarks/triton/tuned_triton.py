"""Is a real Triton tuned without restarts, to its known best, and left as it was found?

    python tests/benchmarks/triton/tuned_triton.py [loads] [attached] [launched] [--budget 25]

Needs nvidia-pytriton (BATCHTUNE_TRITON_PYTHON) and two cores, one for the server and one for the client.

loads: 24 configurations one after another on a server that runs already; the seconds of each (bar: 1 s).
attached, launched: `batchtune sweep` by gRPC and by REST; how far what the recommended configuration can do
lies below the best of the space (bar: 5 %), and whether the model has what it had.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target.triton import TritonTarget
from tests.benchmarks.rivals import SERVER_CORE, spread
from tests.benchmarks.triton.known_model import launchable, serving, sweep

PARTS = ["loads", "attached", "launched"]
SPACE = {"sizes": [1, 2, 4, 8, 16], "delays": [0, 2000], "instances": [1, 2], "clients": 64, "seed": 1}


def loads(url: str) -> None:
    seconds = []
    with TritonTarget(TargetSpec(kind="triton", model="m", rest_url=url)) as target:
        target.keep_original(lambda _original: None)
        for number in range(24):
            batching = BatchingParameters(
                max_batch_size=1 + number, batch_timeout_micros=100 * number, num_batch_threads=1 + number % 2
            )
            flags = (("preserve_ordering", "true"),) * (number % 3 == 0)
            begun_s = time.perf_counter()
            target.apply(Configuration(batching=batching, dialect="triton", flags=flags))
            seconds.append(time.perf_counter() - begun_s)
    print(f"loads: {len(seconds)} configurations without a restart, {spread(seconds, '.3f')} s each; bar 1 s")


def sweeps(name: str, target: str, folder: Path, budget_s: float) -> None:
    for protocol in ("kserve_grpc", "kserve_rest_binary"):
        found = sweep(folder, target=target, protocol=protocol, budget=budget_s, **SPACE)
        print(f"{name}, {protocol}: {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=PARTS, help=" ".join(PARTS))
    parser.add_argument("--budget", type=float, default=25.0, help="seconds of each sweep")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for inner in ("server", "launched"):
            (folder / inner).mkdir()
        if {"loads", "attached"} & set(given.parts):
            with serving(folder / "server") as server:
                url = f"http://127.0.0.1:{server.rest_port}"
                before = config_of(url)
                if "loads" in given.parts:
                    loads(url)
                if "attached" in given.parts:
                    target = f'model: m, rest_url: "{url}", grpc_url: "127.0.0.1:{server.grpc_port}"'
                    sweeps("attached", target, folder, given.budget)
                print(f"the model is {'as it was' if config_of(url) == before else 'NOT AS IT WAS'}")
        if "launched" in given.parts:
            program, models = launchable(folder / "launched")
            target = f"model: {models / 'm'}, command: [{program}], cpus: [{SERVER_CORE}]"
            sweeps("launched", target, folder, given.budget)


def config_of(url: str) -> Any:
    return httpx.get(f"{url}/v2/models/m/config").json()


if __name__ == "__main__":
    main()
