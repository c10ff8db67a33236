"""What do guidellm and aiperf cost as clients of a stream, how much can each offer, and what TTFT do they tell?

    python -m tests.benchmarks.llm.beside_clients --tokenizer FOLDER [--guidellm PROGRAM] [--aiperf PROGRAM]
        [--rates 25 50 100 ...] [--seconds 8] [--clients ours guidellm aiperf] [--file FILE.jsonl]

One emulated server, whose step takes 2 ms however many sequences it has, answers each client in turn: requests of 20
tokens at a constant rate, 16 tokens streamed back. The server counts what arrives, every quarter of a second; a rate is
offered where the middle half of a run had at least 97 % of it. CPU (user and system time of all the client's processes)
a chunk is what a run of twice the length takes more, over the chunks that it gets more, so that starting costs nothing.
TTFT is what the client itself reports, at half of the highest rate that it offered, with ours at the same rate beside.
guidellm takes a folder as tokenizer; aiperf only a name, here of a model in the cache of the Hugging Face hub: a copy of
the folder as HF_HOME/hub/models--local--tiny/snapshots/REVISION, REVISION in refs/main beside it, HF_HUB_OFFLINE=1 and
--tokenizer local/tiny.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from batchtune.scenario.prompts import build_prompts
from batchtune.scenario.spec.workload import RequestSpec
from tests.load.load_servers import a_job, evenly, run_here
from tests.server.server_process import free_ports

PROMPT, TOKENS = 20, 16
OFFERED: Final = 0.97
DEVICE: Final = {"step-ms": 2.0, "sequence-ms": 0.0, "prefill-token-ms": 0.0, "memory-tokens": 10_000_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Of one run: what the server counted, what the client's processes used, and what the client said."""

    client: str
    asked_rps: float
    arrived_rps: float
    chunks: int
    cpu_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float


class Server:
    """The emulated server, and what it counts."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        words = [f"--{name}={value}" for name, value in DEVICE.items()]
        command = [sys.executable, "-m", "batchtune.server.emulated_llm", f"--port={self.port}", *words]
        self._process = subprocess.Popen([*command, "--max-num-seqs=4096"], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._client = httpx.Client()

    def counted(self) -> tuple[int, int]:
        """Requests and tokens so far."""
        lines = self._client.get(f"http://127.0.0.1:{self.port}/metrics").text.splitlines()
        counts = {name.partition("{")[0]: value for name, value in (line.rsplit(" ", 1) for line in lines)}
        return int(counts[":tensorflow:serving:request_count"]), int(
            counts["vllm:iteration_tokens_total_sum"]
        )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)


def arrivals_rps(server: Server, run: Callable[[], Any]) -> tuple[float, int, float, Any]:
    """The rate of the middle half of all requests of a run, its tokens, CPU seconds of reading the server's counts, and
    what the run returned."""
    readings: list[tuple[float, int]] = []
    read_cpu_s: list[float] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(0.25):
            readings.append((time.monotonic(), server.counted()[0]))
        read_cpu_s.append(time.thread_time())

    requests, tokens = server.counted()
    thread = threading.Thread(target=read)
    thread.start()
    try:
        returned = run()
    finally:
        ended.set()
        thread.join()
    at, counts = np.array([reading[0] for reading in readings]), np.array([each[1] for each in readings])
    after, tokens_after = server.counted()
    quarters = requests + (after - requests) * np.array([0.25, 0.75])
    inside = (counts >= quarters[0]) & (counts <= quarters[1])
    if inside.sum() < 2:
        raise SystemExit("too few readings: give more --seconds")
    rate = (counts[inside][-1] - counts[inside][0]) / (at[inside][-1] - at[inside][0])
    return float(rate), tokens_after - tokens, read_cpu_s[0], returned


def ours(server: Server, rate_rps: float, seconds: float) -> Seen:
    spec = {"protocol": "openai", "lengths": {"constant": PROMPT}, "openai": {"output": {"constant": TOKENS}}}
    requests = build_prompts(RequestSpec.model_validate({**spec, "timeout": "60s"}), model_name="emulated")
    job = a_job("rest", server.port, evenly(rate_rps, seconds), requests=requests)
    arrived, tokens, read_cpu_s, samples = arrivals_rps(server, lambda: run_here(job))
    assert samples.errors() == {}, samples.error_texts
    waited_ms = (samples.first_byte_ns - samples.due_ns) / 1e6
    p50, p95 = np.quantile(waited_ms, (0.5, 0.95))
    return Seen(
        client="ours",
        asked_rps=rate_rps,
        arrived_rps=arrived,
        chunks=tokens,
        cpu_s=samples.client_cpu_s - read_cpu_s,  # which is of the same process
        ttft_p50_ms=p50,
        ttft_p95_ms=p95,
    )


def guidellm(
    server: Server, rate_rps: float, seconds: float, *, program: str, tokenizer: str, folder: Path
) -> Seen:
    file = folder / "guidellm.json"
    words = [program, "run", "--disable-console"]
    words += ["--backend", f"kind=openai_http,target=http://127.0.0.1:{server.port},model=emulated"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    words += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={TOKENS}"]
    words += ["--profile", f"kind=constant,rate={rate_rps:g}"]
    words += ["--constraint", f"kind=max_duration,seconds={seconds:g}", "--output", f"kind=json,path={file}"]
    return seen_of(
        "guidellm",
        words,
        server,
        rate_rps,
        file,
        lambda told: told["benchmarks"][0]["metrics"]["time_to_first_token_ms"]["successful"]["percentiles"],
    )


def aiperf(
    server: Server, rate_rps: float, seconds: float, *, program: str, tokenizer: str, folder: Path
) -> Seen:
    words = [program, "profile", "-m", "emulated", "--tokenizer", tokenizer, "--ui", "none"]
    words += ["--url", f"http://127.0.0.1:{server.port}", "--endpoint-type", "chat", "--streaming"]
    words += ["--request-rate", f"{rate_rps:g}", "--arrival-pattern", "constant"]
    words += ["--benchmark-duration", f"{seconds:g}", "--artifact-dir", str(folder)]
    words += ["--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(TOKENS)]
    file = folder / "profile_export_aiperf.json"
    return seen_of("aiperf", words, server, rate_rps, file, lambda told: told["time_to_first_token"])


def seen_of(
    client: str,
    words: list[str],
    server: Server,
    rate_rps: float,
    file: Path,
    ttft_ms: Callable[[Any], dict[str, float]],
) -> Seen:
    """Run a client that is a program; `ttft_ms` finds p50 and p95 in the JSON that it writes to `file`."""
    arrived, tokens, _, cpu_s = arrivals_rps(server, lambda: cpu_of(words))
    told = ttft_ms(json.loads(file.read_text()))
    return Seen(
        client=client,
        asked_rps=rate_rps,
        arrived_rps=arrived,
        chunks=tokens,
        cpu_s=cpu_s,
        ttft_p50_ms=told["p50"],
        ttft_p95_ms=told["p95"],
    )


def cpu_of(words: list[str]) -> float:
    """Seconds of CPU that a program and all that it started took."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{words[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--guidellm", default="guidellm")
    parser.add_argument("--aiperf", default="aiperf")
    parser.add_argument("--clients", nargs="+", default=["ours", "guidellm", "aiperf"])
    parser.add_argument("--rates", nargs="+", type=float, default=[25 * 2**power for power in range(8)])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--file", type=Path, help="each run is appended here")
    options = parser.parse_args()
    server = Server()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for client in options.clients:
                judge(client, server, options, Path(folder))
    finally:
        server.stop()
    return 0


def judge(client: str, server: Server, options: argparse.Namespace, folder: Path) -> None:
    other = {"guidellm": guidellm, "aiperf": aiperf}

    def run(name: str, rate_rps: float, seconds: float) -> Seen:
        if name == "ours":
            seen = ours(server, rate_rps, seconds)
        else:
            program = getattr(options, name)
            seen = other[name](
                server, rate_rps, seconds, program=program, tokenizer=options.tokenizer, folder=folder
            )
        print(
            f"    {name}: {rate_rps:g}/s asked, {seen.arrived_rps:.1f}/s arrived, TTFT p50 {seen.ttft_p50_ms:.2f} "
            f"p95 {seen.ttft_p95_ms:.2f} ms, {seen.cpu_s:.1f} s of CPU for {seen.chunks} chunks",
            flush=True,
        )
        if options.file is not None:
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**asdict(seen), "host_load": os.getloadavg()[0]}) + "\n")
        return seen

    offered, most = 0.0, 0.0
    for rate_rps in options.rates:
        seen = run(client, rate_rps, options.seconds)
        most = max(most, seen.arrived_rps)
        if seen.arrived_rps < OFFERED * rate_rps:
            break
        offered = rate_rps
    half = offered / 2
    short, long = run(client, half, options.seconds), run(client, half, 2 * options.seconds)
    cpu_us = (long.cpu_s - short.cpu_s) / (long.chunks - short.chunks) * 1e6
    beside = run("ours", half, options.seconds) if client != "ours" else long
    print(
        f"{client}: {cpu_us:.1f} µs of CPU a chunk; {offered:g}/s offered, {most:.0f}/s at most; at {half:g}/s TTFT "
        f"p50 {long.ttft_p50_ms:.2f} p95 {long.ttft_p95_ms:.2f} ms, ours {beside.ttft_p50_ms:.2f} and "
        f"{beside.ttft_p95_ms:.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
