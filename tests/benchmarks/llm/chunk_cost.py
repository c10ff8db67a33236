"""What a streamed chunk costs our client in CPU time, beside curl and h2load reading streams of the same server.

    python -m tests.benchmarks.llm.chunk_cost [--streams 50] [--tokens 400] [--rounds 5]

Each client opens the same number of streams at once, in turn; what it used (user and system time, of C clients that of
their whole process) is divided by the chunks. Prints the median of the rounds in µs and the ratio to curl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from tests.benchmarks.llm.served import emulated_llm, prompts, streamed
from tests.benchmarks.rivals import alternate, run_tool
from tests.load.load_servers import closed


def ours(port: int, streams: int, tokens: int) -> float:
    samples = streamed(port, closed(streams, streams, duration_s=300.0), prompts(tokens))
    assert samples.streams is not None
    assert (samples.streams.output_tokens == tokens).all()
    assert len(samples.streams.gaps_ns) == streams * (tokens - 1)
    return samples.client_cpu_s


def of_a_process(command: list[str]) -> float:
    return run_tool(command)[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    streams, tokens = options.streams, options.tokens
    body = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": tokens, "stream": True}
    with tempfile.TemporaryDirectory() as folder, emulated_llm(max_num_seqs=streams) as port:
        file = Path(folder) / "body.json"
        file.write_text(json.dumps({**body, "stream_options": {"include_usage": True}}))
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        one = ["-H", "content-type: application/json", "--data", f"@{file}", "--output", "/dev/null", url]
        curl = ["curl", "-sN", "--parallel", "--parallel-immediate", "--parallel-max", str(streams), *one]
        curl += ["--next", "-sN", *one] * (streams - 1)
        h2load = ["h2load", "--h1", f"-c{streams}", f"-n{streams}", f"--data={file}", url]
        turns = {"ours": partial(ours, port, streams, tokens)}
        turns |= {words[0]: partial(of_a_process, words) for words in (curl, h2load)}
        used = alternate(options.rounds, turns)
    micros = {name: median(values) * 1e6 / (streams * tokens) for name, values in used.items()}
    print(f"{streams} streams of {tokens} tokens, {options.rounds} rounds; CPU of a chunk:")
    for name, value in micros.items():
        ratios = ", ".join(f"× {value / micros[rival]:.2f} of {rival}" for rival in ("curl", "h2load"))
        print(f"{name:7}{value:6.1f} µs  {ratios}")


if __name__ == "__main__":
    main()
