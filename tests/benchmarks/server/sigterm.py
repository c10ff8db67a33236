"""Does SIGTERM at any moment end the server within the 30 s after which Kubernetes kills?

    python tests/benchmarks/server/sigterm.py [--tries 100] [--at-once 4] [--seed 1]

Each try starts a server of two emulated models, sends it requests (4 REST clients, batching on) and SIGTERM at a random
moment: of its start, of requests alone, of versions that follow one another, of a later version that loads for
minutes, of reloads one in five of which waits for such a load, or of a run that hangs. The bar: every process ends
within 30 s, with exit code 0, or by the signal itself while Python starts.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx

from batchtune.wire.tfserving.messages import ReloadConfigRequest
from tests.server.server_process import ServerProcess, write_emulated

GRACE_S = 30.0
MINUTES_MS = 300_000.0
CLIENTS = 4
BODY = {"instances": [[1, 2]]}


@dataclass(frozen=True, kw_only=True)
class Try:
    """How one try ended; `exit_code` None: it did not within the grace period."""

    moment: str
    end_s: float
    exit_code: int | None

    @property
    def holds(self) -> bool:
        return self.exit_code == 0 or (self.moment == "start" and self.exit_code == -signal.SIGTERM)


@contextmanager
def repeated(step: Callable[[int], object], pause_s: float) -> Iterator[None]:
    """Call `step` with 1, 2, … in a thread until the end, or until it fails, for the server is gone."""
    stop = threading.Event()

    def run() -> None:
        number = 0
        with contextlib.suppress(grpc.RpcError, httpx.HTTPError):
            while not stop.is_set():
                number += 1
                step(number)
                stop.wait(pause_s)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(GRACE_S + 10)


def reload_config(port: int, *models: tuple[str, Path]) -> None:
    request = ReloadConfigRequest()
    for name, base_path in models:
        request.config.model_config_list.config.add(name=name, base_path=str(base_path))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/tensorflow.serving.ModelService/HandleReloadConfigRequest")
        ask(request.SerializeToString(), timeout=GRACE_S + 5)


def disturbance(moment: str, server: ServerProcess, folder: Path) -> contextlib.AbstractContextManager[None]:
    """What goes on beside the requests."""
    model = folder / "m"
    match moment:
        case "swapping":
            return repeated(lambda number: swap(model, number + 1), 0.05)
        case "loading":
            swap(model, 2, MINUTES_MS)
        case "reloading":
            slow, quick = (
                write_emulated(folder / name, base_ms=ms) for name, ms in (("s", MINUTES_MS), ("q", 1.0))
            )
            others = [("s", slow), ("q", quick), ("h", folder / "h")]
            return repeated(
                lambda number: reload_config(
                    server.grpc_port, ("m", model), others[0 if number % 5 == 0 else 1 + number % 2]
                ),
                0.02,
            )
        case "hanging":
            return repeated(lambda _: predict(server, "h"), 0.0)
    return contextlib.nullcontext()


def predict(server: ServerProcess, model: str) -> None:
    server.rest.post(f"/v1/models/{model}:predict", json=BODY, timeout=GRACE_S + 5)


def swap(base_path: Path, version: int, base_ms: float = 1.0) -> None:
    """Put a whole version in its place."""
    staging = write_emulated(base_path.parent / "staging", version=version, base_ms=base_ms)
    (staging / str(version)).rename(base_path / str(version))


MOMENTS = ("start", "requests", "swapping", "loading", "reloading", "hanging")


def attempt(number: int, seed: int) -> Try:
    chance = random.Random(f"{seed} {number}")
    moment = MOMENTS[number % len(MOMENTS)]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_emulated(folder / "m", base_ms=2.0)
        write_emulated(folder / "h", base_ms=MINUTES_MS if moment == "hanging" else 1.0)
        models = " ".join(f'config {{ name: "{name}" base_path: "{folder / name}" }}' for name in "mh")
        (folder / "models.txt").write_text(f"model_config_list {{ {models} }}")
        flags = [f"--model_config_file={folder / 'models.txt'}", "--enable_batching", "--num_load_threads=2"]
        if moment == "hanging":
            flags.append("--enable_model_warmup=false")
        with ServerProcess(None, *flags, wait=moment != "start") as server, contextlib.ExitStack() as beside:
            if moment != "start":
                for _ in range(CLIENTS):
                    beside.enter_context(repeated(lambda _: predict(server, "m"), 0.0))
                beside.enter_context(disturbance(moment, server, folder))
            time.sleep(chance.uniform(0.0, 2.0))
            return ended(moment, server)


def ended(moment: str, server: ServerProcess) -> Try:
    began_s = time.monotonic()
    code: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = server.stop()
    return Try(moment=moment, end_s=time.monotonic() - began_s, exit_code=code)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--tries", type=int, default=100)
    arguments.add_argument("--at-once", type=int, default=4)
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    with ThreadPoolExecutor(options.at_once) as pool:
        tries = list(pool.map(lambda number: attempt(number, options.seed), range(options.tries)))
    print("moment      tries   held   s to the end: median    most   exit codes")
    for moment in MOMENTS:
        of_moment = sorted((one for one in tries if one.moment == moment), key=lambda one: one.end_s)
        if of_moment:
            codes = sorted({str(one.exit_code) for one in of_moment})
            print(
                f"{moment:10s} {len(of_moment):6d} {sum(one.holds for one in of_moment):6d} "
                f"{of_moment[len(of_moment) // 2].end_s:22.2f} {of_moment[-1].end_s:7.2f}   {', '.join(codes)}"
            )
    print(f"{sum(one.holds for one in tries)} of {len(tries)} ended within {GRACE_S:g} s")


if __name__ == "__main__":
    main()
