"""CPU per request of the whole server, REST and gRPC, and the share of the device's limit that it reaches.

python tests/benchmarks/server/front_ends.py [--seconds 3] [--only echo] [--beside OTHER_CHECKOUT --rounds 4]
The server (its real process, an emulated device, one batch thread) on core 0, h2load or wrk on core 1; requests of one
row of 200 float32, answers of 2. Bars: echo ≥ 110,000/s gRPC and ≥ 50,000/s REST; CPU ≤ 14 µs gRPC, ≤ 25 µs REST; where
a batch of b rows takes 2.0 ms + 0.05 ms × b, ≥ 95 % of b/τ(b); one client: p50 ≤ τ(1) + 0.2 ms.
One gRPC answer of each case is read: h2load counts those with a failure's status too. What is answered after the last
second does not count (h2load itself counts it: 128 clients of 9,000/s then look 0.7 % faster in two seconds).
With --beside this checkout and the other one take turns, and the medians of each are printed with their ranges; "n/o" is
the ratio new/old of the two runs of one round, which what else runs on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path

import grpc
import numpy as np
import psutil

sys.path += [str(Path(__file__).parents[3])]

from batchtune.wire.tfserving.tensors import decode_predict_response, encode_predict_request
from tests.benchmarks.commands import ROOT
from tests.benchmarks.rivals import PREDICT_PATHS, Run, alternate, h2load, require, served, spread, wrk
from tests.server.server_process import ServerProcess

EMULATED = """
service_time: {{base_ms: {base_ms}, per_row_ms: {per_row_ms}}}
inputs: {{x: {{dtype: float32, shape: [200]}}}}
outputs: {{y: {{dtype: float32, shape: [2]}}}}
"""
INPUTS = np.random.default_rng(1).random((1, 200), dtype=np.float32)
MESSAGE = encode_predict_request("m", "", {"x": INPUTS})
BODY = json.dumps({"instances": INPUTS.tolist()})
FIGURES = {"requests/s": ",.0f", "of limit": ".3f", "CPU µs/request": ".1f", "p50 ms": ".2f", "p99 ms": ".2f"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One load on one configuration; the limit is in requests per second, NaN without one."""

    name: str
    base_ms: float = 2.0
    per_row_ms: float = 0.05
    max_batch_size: int
    clients: int

    @property
    def limit_rps(self) -> float:
        batch_ms = self.base_ms + self.per_row_ms * self.max_batch_size
        return 1000 * self.max_batch_size / batch_ms if batch_ms else nan


CASES = {
    "echo": Case(name="echo", base_ms=0, per_row_ms=0, max_batch_size=64, clients=128),
    "few": Case(name="few", base_ms=0, per_row_ms=0, max_batch_size=64, clients=32),
    "b32": Case(name="b32", max_batch_size=32, clients=128),
    "b64": Case(name="b64", max_batch_size=64, clients=256),
    "one": Case(name="one", max_batch_size=32, clients=1),
}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seconds", type=int, default=3)
    arguments.add_argument("--only", default="")
    arguments.add_argument("--beside", type=Path)
    arguments.add_argument("--rounds", type=int, default=4)
    options = arguments.parse_args()
    require("wrk", "h2load")
    checkouts = {} if options.beside is None else {"old": options.beside.resolve()}
    checkouts["new"] = ROOT
    print(f"{'case':16}" + "".join(f"{name:>26}" for name in FIGURES) + "  failed")
    for case in CASES.values() if not options.only else [CASES[options.only]]:
        turns = {name: partial(run_case, case, options.seconds, path) for name, path in checkouts.items()}
        rounds = alternate(options.rounds if options.beside else 1, turns)
        for protocol in PREDICT_PATHS:
            runs = {name: [one[protocol] for one in ones] for name, ones in rounds.items()}
            rows = {name: np.array([figures(case, one) for one in ones]) for name, ones in runs.items()}
            if "old" in rows:
                rows["n/o"] = rows["new"] / rows["old"]
            for name, values in rows.items():
                failed = sum(one.failed for one in runs.get(name, []))
                forms = FIGURES.values() if name in runs else [".3f"] * len(FIGURES)
                shown = (f"{spread(list(one), form):>26}" for one, form in zip(values.T, forms, strict=True))
                print(f"{case.name:6}{protocol:5}{name:5}{''.join(shown)}  {failed}", flush=True)


def run_case(case: Case, seconds: int, checkout: Path) -> dict[str, Run]:
    with served_case(case, checkout) as server:
        check_grpc(server.grpc_port)
        load(case, server, 1)  # warms up
        return load(case, server, seconds)


def figures(case: Case, run: Run) -> Sequence[float]:
    assert run.p50_s is not None
    assert run.p99_s is not None
    rate_rps = run.rate_rps
    return rate_rps, rate_rps / case.limit_rps, run.cpu_micros, 1000 * run.p50_s, 1000 * run.p99_s


@contextmanager
def served_case(case: Case, checkout: Path = ROOT) -> Iterator[ServerProcess]:
    """The server of a checkout for a case."""
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        (base / "model" / "1").mkdir(parents=True)
        emulated = EMULATED.format(base_ms=case.base_ms, per_row_ms=case.per_row_ms)
        (base / "model" / "1" / "emulated.yaml").write_text(emulated)
        (base / "batching.txt").write_text(
            f"max_batch_size {{ value: {case.max_batch_size} }} batch_timeout_micros {{ value: 0 }} "
            "max_enqueued_batches { value: 1000000 } num_batch_threads { value: 1 }"
        )
        batching = ["--enable_batching", f"--batching_parameters_file={base / 'batching.txt'}"]
        with served(base / "model", *batching, checkout=checkout) as server:
            yield server


def check_grpc(port: int) -> None:
    """Raises unless a Predict is answered with one row of y."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = channel.unary_unary(PREDICT_PATHS["grpc"])(MESSAGE, timeout=30)
    if decode_predict_response(answer)["y"].shape != (1, 2):
        raise RuntimeError(f"a Predict over gRPC was answered by {answer!r}")


def load(case: Case, server: ServerProcess, seconds: int) -> dict[str, Run]:
    """By protocol; the CPU is the server's."""
    connections = min(case.clients, 8)
    streams = case.clients // connections
    loads = {
        "grpc": partial(
            h2load, server.grpc_port, MESSAGE, connections=connections, streams=streams, seconds=seconds
        ),
        "rest": partial(wrk, server.rest_port, BODY, clients=case.clients, seconds=seconds),
    }
    runs = {}
    for protocol, run in loads.items():
        before_s = process_cpu_s(server.pid)
        done = run()
        runs[protocol] = replace(done, cpu_s=process_cpu_s(server.pid) - before_s)
    return runs


def process_cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
