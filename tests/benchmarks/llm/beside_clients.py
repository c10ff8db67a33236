"""What do guidellm and aiperf cost as clients of a stream beside ours, and what TTFT do they tell?

    python -m tests.benchmarks.llm.beside_clients [--rate 100] [--seconds 8] [--clients ours guidellm aiperf]
        [--tokenizer FOLDER] [--guidellm PROGRAM] [--aiperf PROGRAM]

One emulated server, whose step takes 2 ms however many sequences it has, answers each client in turn: requests of 20
tokens at a constant rate, 16 tokens streamed back. The server counts what arrives. CPU (user and system time of all the
client's processes) a chunk is what a run of twice the length takes more, over the chunks that it gets more, so that
starting costs nothing. TTFT is what the client itself reports.
guidellm takes a folder as tokenizer; aiperf only a name, here of a model in the cache of the Hugging Face hub: a copy of
the folder as HF_HOME/hub/models--local--tiny/snapshots/REVISION, REVISION in refs/main beside it, HF_HUB_OFFLINE=1 and
--tokenizer local/tiny.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np

from tests.benchmarks.llm.served import emulated_llm, prompts, streamed
from tests.benchmarks.rivals import run_tool
from tests.load.load_servers import evenly

PROMPT, TOKENS = 20, 16
DEVICE = {"step_ms": 2.0, "sequence_ms": 0.0, "prefill_token_ms": 0.0, "memory_tokens": 10_000_000}
Seen = tuple[float, dict[str, float]]
"""CPU seconds of all of a client's processes, and its p50 and p95 of TTFT in ms."""


def ours(port: int, rate_rps: float, seconds: float) -> Seen:
    samples = streamed(port, evenly(rate_rps, seconds), prompts(TOKENS))
    p50, p95 = np.quantile((samples.first_byte_ns - samples.due_ns) / 1e6, (0.5, 0.95))
    return samples.client_cpu_s, {"p50": p50, "p95": p95}


def guidellm(program: str, tokenizer: str, port: int, rate_rps: float, seconds: float, folder: Path) -> Any:
    file = folder / "guidellm.json"
    words = [program, "run", "--disable-console"]
    words += ["--backend", f"kind=openai_http,target=http://127.0.0.1:{port},model=emulated"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    words += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={TOKENS}"]
    words += ["--profile", f"kind=constant,rate={rate_rps:g}"]
    words += ["--constraint", f"kind=max_duration,seconds={seconds:g}", "--output", f"kind=json,path={file}"]
    metrics = "benchmarks", 0, "metrics", "time_to_first_token_ms", "successful", "percentiles"
    return words, file, metrics


def aiperf(program: str, tokenizer: str, port: int, rate_rps: float, seconds: float, folder: Path) -> Any:
    words = [program, "profile", "-m", "emulated", "--tokenizer", tokenizer, "--ui", "none"]
    words += ["--url", f"http://127.0.0.1:{port}", "--endpoint-type", "chat", "--streaming"]
    words += ["--request-rate", f"{rate_rps:g}", "--arrival-pattern", "constant"]
    words += ["--benchmark-duration", f"{seconds:g}", "--artifact-dir", str(folder)]
    words += ["--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(TOKENS)]
    return words, folder / "profile_export_aiperf.json", ("time_to_first_token",)


def another(client: Callable[..., Any], program: str, tokenizer: str, *load: float) -> Seen:
    """A client that is a program, which writes what it saw into a file of JSON."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, offline):
        words, file, way = client(program, tokenizer, *load, folder=Path(folder))
        _, cpu_s = run_tool(words)
        told = json.loads(file.read_text())
    for step in way:
        told = told[step]
    return cpu_s, told


def counted(port: int) -> int:
    """Tokens that the server has sent."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    counts = {name.partition("{")[0]: value for name, value in (line.rsplit(" ", 1) for line in lines)}
    return int(counts["vllm:iteration_tokens_total_sum"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--guidellm", default="guidellm")
    parser.add_argument("--aiperf", default="aiperf")
    parser.add_argument("--clients", nargs="+", default=["ours", "guidellm", "aiperf"])
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    clients: dict[str, Callable[..., Seen]] = {
        "ours": ours,
        "guidellm": partial(another, guidellm, given.guidellm, given.tokenizer),
        "aiperf": partial(another, aiperf, given.aiperf, given.tokenizer),
    }
    with emulated_llm(max_num_seqs=4096, **DEVICE) as port:
        for name in given.clients:
            cpu_s, chunks, ttft = [], [counted(port)], {}
            for seconds in (given.seconds, 2 * given.seconds):
                used_s, ttft = clients[name](port, given.rate, seconds)
                cpu_s.append(used_s)
                chunks.append(counted(port))
            short, long = np.diff(chunks)
            print(
                f"{name}: {(cpu_s[1] - cpu_s[0]) / (long - short) * 1e6:.1f} µs of CPU a chunk; at {given.rate:g}/s asked "
                f"{long / TOKENS / (2 * given.seconds):.1f}/s came; TTFT p50 {ttft['p50']:.2f} p95 {ttft['p95']:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
