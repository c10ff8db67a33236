"""Is a real Triton tuned without restarts, to its known best, and left as it was found?

    python tests/benchmarks/triton/tuned_triton.py [loads] [attached] [launched] [wide] [--budget 25] [--seed 1]

Needs nvidia-pytriton (BATCHTUNE_TRITON_PYTHON) and two cores, one for the server and one for the client.

loads: 24 configurations one after another on a server that runs already; the seconds of each (bar: 1 s).
attached, launched: `batchtune sweep` by gRPC and by REST; how far what the recommended configuration can do
lies below the best of the space (bar: 5 %), and whether the model has what it had.
wide: after how many seconds a sweep of 28 configurations has measured one within 5 % of the best (--budget 60). Model
Analyzer's quick search did after 86-87 s (results/reference, 11-22).
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
from tests.benchmarks.triton.known_model import BEST_RPS, launchable, limit_rps, serving, sweep

PARTS = ["loads", "attached", "launched", "wide"]
SPACE = {"sizes": [1, 2, 4, 8, 16], "delays": [0, 2000], "instances": [1, 2], "clients": 64}
WIDE = {"sizes": [1, 2, 4, 8, 16, 32, 64], "delays": [0], "instances": [1, 2, 3, 4], "clients": 128}


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


def sweeps(name: str, target: str, folder: Path, **asked: object) -> None:
    for protocol in ("kserve_grpc", "kserve_rest_binary"):
        found = sweep(folder, target=target, protocol=protocol, **SPACE, **asked)
        print(f"{name}, {protocol}: {found}", flush=True)


def wide(target: str, folder: Path, **asked: object) -> None:
    found = sweep(folder, target=target, protocol="kserve_grpc", **WIDE, **asked)
    spent_s = found.seconds - sum(trial.seconds for trial in found.trials)
    within = "never"
    for number, trial in enumerate(found.trials, 1):
        spent_s += trial.seconds
        batching = trial.configuration.batching or BatchingParameters()
        reached_rps = limit_rps(batching.max_batch_size or 1, batching.num_batch_threads or 1)
        if reached_rps >= 0.95 * BEST_RPS:
            within = f"by measurement {number}, after {spent_s:.0f} s"
            break
    print(f"wide: within 5 % of the best {within}; {found}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=PARTS, help=" ".join(PARTS))
    parser.add_argument("--budget", type=float, default=25.0, help="seconds of each sweep")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    asked = {"budget": given.budget, "seed": given.seed}
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
                    sweeps("attached", target, folder, **asked)
                print(f"the model is {'as it was' if config_of(url) == before else 'NOT AS IT WAS'}")
        if {"launched", "wide"} & set(given.parts):
            program, models = launchable(folder / "launched")
            target = f"model: {models / 'm'}, command: [{program}], cpus: [{SERVER_CORE}]"
            if "launched" in given.parts:
                sweeps("launched", target, folder, **asked)
            if "wide" in given.parts:
                wide(target, folder, **asked)


def config_of(url: str) -> Any:
    return httpx.get(f"{url}/v2/models/m/config").json()


if __name__ == "__main__":
    main()
