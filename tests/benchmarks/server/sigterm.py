"""Does SIGTERM at any moment end the server within the 30 s after which Kubernetes kills?

    python tests/benchmarks/server/sigterm.py [--tries 100] [--at-once 4] [--seed 1]

Each try starts a server of two emulated models, sends it requests (4 REST clients, batching on) and SIGTERM at a random
moment: of its start, of requests alone, of versions that follow one another, of a later version that loads for
minutes, of reloads one in five of which waits for such a load, or of a run that hangs. The bar: every process ends
within 30 s, with exit code 0, or by the signal itself while Python starts.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import grpc
import httpx

from batchtune.wire.tfserving.messages import ReloadConfigRequest
from tests.server.server_process import ServerProcess, write_emulated

GRACE_S = 30.0
MINUTES_MS = 300_000.0
CLIENTS = 4
MOMENTS = ("start", "requests", "swapping", "loading", "reloading", "hanging")
End = tuple[float, int | None]
"""Seconds until the process ended, its exit code; None: not within the grace period."""


def attempt(moment: str, chance: random.Random) -> End:
    """How one try ended."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_emulated(folder / "m", base_ms=2.0)
        write_emulated(folder / "h", base_ms=MINUTES_MS if moment == "hanging" else 1.0)
        models = " ".join(f'config {{ name: "{name}" base_path: "{folder / name}" }}' for name in "mh")
        (folder / "models.txt").write_text(f"model_config_list {{ {models} }}")
        flags = [f"--model_config_file={folder / 'models.txt'}", "--enable_batching", "--num_load_threads=2"]
        flags += ["--enable_model_warmup=false"] * (moment == "hanging")
        with ServerProcess(None, *flags, wait=moment != "start") as server, ExitStack() as beside:
            if moment != "start":
                steps = [(partial(predict, server, "m"), 0.0)] * CLIENTS
                for step, pause_s in steps + disturbance(moment, server, folder):
                    beside.enter_context(repeated(step, pause_s))
            time.sleep(chance.uniform(0.0, 2.0))
            began_s, code = time.monotonic(), None
            with suppress(subprocess.TimeoutExpired):
                code = server.stop()
            return time.monotonic() - began_s, code


def disturbance(
    moment: str, server: ServerProcess, folder: Path
) -> list[tuple[Callable[[int], object], float]]:
    """What goes on beside the requests: steps, each with its pause in seconds."""
    model = folder / "m"
    match moment:
        case "swapping":
            return [(lambda number: swap(model, number + 1), 0.05)]
        case "loading":
            swap(model, 2, MINUTES_MS)
        case "reloading":
            slow, quick = (
                write_emulated(folder / name, base_ms=ms) for name, ms in (("s", MINUTES_MS), ("q", 1.0))
            )
            others = [slow, quick, folder / "h"]

            def reload(number: int) -> None:
                reload_config(server.grpc_port, model, others[1 + number % 2 if number % 5 else 0])

            return [(reload, 0.02)]
        case "hanging":
            return [(partial(predict, server, "h"), 0.0)]
    return []


@contextmanager
def repeated(step: Callable[[int], object], pause_s: float) -> Iterator[None]:
    """Call `step` with 1, 2, … in a thread until the end, or until it fails, for the server is gone."""
    stop = threading.Event()

    def run() -> None:
        with suppress(grpc.RpcError, httpx.HTTPError):
            for number in count(1):
                step(number)
                if stop.wait(pause_s):
                    return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(GRACE_S + 10)


def predict(server: ServerProcess, model: str, _number: int) -> None:
    body = {"instances": [[1, 2]]}
    server.rest.post(f"/v1/models/{model}:predict", json=body, timeout=GRACE_S + 5)


def reload_config(port: int, *base_paths: Path) -> None:
    request = ReloadConfigRequest()
    for base_path in base_paths:
        request.config.model_config_list.config.add(name=base_path.name, base_path=str(base_path))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/tensorflow.serving.ModelService/HandleReloadConfigRequest")
        ask(request.SerializeToString(), timeout=GRACE_S + 5)


def swap(base_path: Path, version: int, base_ms: float = 1.0) -> None:
    """Put a whole version in its place."""
    staging = write_emulated(base_path.parent / "staging", version=version, base_ms=base_ms)
    (staging / str(version)).rename(base_path / str(version))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--tries", type=int, default=100)
    arguments.add_argument("--at-once", type=int, default=4)
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    tries = [
        (MOMENTS[number % len(MOMENTS)], random.Random(f"{options.seed} {number}"))
        for number in range(options.tries)
    ]
    with ThreadPoolExecutor(options.at_once) as pool:
        ends = list(pool.map(lambda one: attempt(*one), tries))
    held = 0
    print("moment      tries   held   s to the end: median    most   exit codes")
    for moment in MOMENTS[: options.tries]:
        seconds, codes = zip(
            *(end for end, (of, _) in zip(ends, tries, strict=True) if of == moment), strict=True
        )
        good = {0, -signal.SIGTERM} if moment == "start" else {0}
        kept = sum(code in good for code in codes)
        held += kept
        shown = f"{median(seconds):22.2f} {max(seconds):7.2f}   {', '.join(sorted(map(str, set(codes))))}"
        print(f"{moment:10s} {len(codes):6d} {kept:6d} {shown}")
    print(f"{held} of {len(tries)} ended within {GRACE_S:g} s")


if __name__ == "__main__":
    main()
