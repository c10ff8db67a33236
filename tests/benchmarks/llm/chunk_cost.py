"""What a streamed chunk costs our client in CPU time, beside curl and h2load reading streams of the same server.

    python -m tests.benchmarks.llm.chunk_cost [--streams 50] [--tokens 400] [--rounds 5]

Each client opens the same number of streams at once, in turn; what it used (user and system time, of C clients that of
their whole process) is divided by the chunks. Prints the median of the rounds in µs and the ratio to curl.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from batchtune.scenario.prompts import build_prompts
from batchtune.scenario.spec.workload import RequestSpec
from tests.load.load_servers import a_job, closed, run_here
from tests.server.server_process import free_ports


def ours(port: int, streams: int, tokens: int) -> float:
    spec = {"protocol": "openai", "lengths": {"constant": 20}, "openai": {"output": {"constant": tokens}}}
    requests = build_prompts(RequestSpec.model_validate({**spec, "timeout": "300s"}), model_name="emulated")
    samples = run_here(a_job("rest", port, closed(streams, streams, duration_s=300.0), requests=requests))
    assert samples.errors() == {}, samples.error_texts
    assert samples.streams is not None
    assert (samples.streams.output_tokens == tokens).all()
    assert len(samples.streams.gaps_ns) == streams * (tokens - 1)
    return samples.client_cpu_s


def of_a_process(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    streams, tokens = options.streams, options.tokens
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": tokens, "stream": True}
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "batchtune.server.emulated_llm",
            f"--port={port}",
            f"--max-num-seqs={streams}",
        ],
        stdout=subprocess.PIPE,
    )
    used: dict[str, list[float]] = {"ours": [], "curl": [], "h2load": []}
    try:
        assert server.stdout is not None
        server.stdout.readline()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "body.json"
            file.write_text(json.dumps({**body, "stream_options": {"include_usage": True}}))
            asked = ["-H", "content-type: application/json", "--data", f"@{file}"]
            one = [*asked, "--output", "/dev/null", url]
            curl = ["curl", "-sN", "--parallel", "--parallel-immediate", "--parallel-max", str(streams)]
            for number in range(streams):
                curl += [*(["--next", "-sN"] if number else []), *one]
            h2load = ["h2load", "--h1", f"-c{streams}", f"-n{streams}", f"--data={file}", url]
            for _ in range(options.rounds):
                used["ours"].append(ours(port, streams, tokens))
                used["curl"].append(of_a_process(curl))
                used["h2load"].append(of_a_process(h2load))
    finally:
        server.terminate()
        server.wait(20)
    micros = {name: statistics.median(values) * 1e6 / (streams * tokens) for name, values in used.items()}
    print(f"{streams} streams of {tokens} tokens, {options.rounds} rounds; CPU of a chunk:")
    for name, value in micros.items():
        print(
            f"{name:7}{value:6.1f} µs  × {value / micros['curl']:.2f} of curl, × {value / micros['h2load']:.2f} of h2load"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
