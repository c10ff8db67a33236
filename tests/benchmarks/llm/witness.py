"""Does our client see a stream as the `openai` Python client does? Chunk by chunk, on the same bytes.

    python -m tests.benchmarks.llm.witness --python ENV/bin/python --url http://127.0.0.1:8000 --model m [--count 30]

ENV has the package `openai`. A proxy sends each request of ours to the server once, and hands each piece of its answer to
both clients at the same instant (which of them first, in turn), so that what differs is the clients' own. Prints the
differences of first tokens and gaps in ms, and whether the counts of tokens are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading

import numpy as np
import uvloop

from batchtune.load.samples import Samples
from tests.benchmarks.llm.served import prompts, streamed
from tests.load.load_servers import closed

OPENAI_CLIENT = """
import json, sys, time
from openai import OpenAI
url, model, count, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
for _ in range(count):
    instants, usage = [], None
    stream = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}],
        max_tokens=tokens, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            instants.append(time.monotonic_ns())
        usage = chunk.usage or usage
    print(json.dumps([instants, usage.prompt_tokens, usage.completion_tokens]), flush=True)
"""


class Tee:
    """Listens on two ports: the n-th request on one is answered with the answer to the n-th on the other."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._waiting: dict[str, asyncio.Queue[tuple[bytes, asyncio.StreamWriter]]] = {}
        self.ports: dict[str, int] = {}
        self._ready = threading.Event()
        threading.Thread(target=lambda: uvloop.run(self._run()), daemon=True).start()
        assert self._ready.wait(10)

    async def _run(self) -> None:
        for name in ("ours", "theirs"):
            self._waiting[name] = asyncio.Queue()
            server = await asyncio.start_server(self._heard(name), "127.0.0.1", 0)
            self.ports[name] = server.sockets[0].getsockname()[1]
        self._ready.set()
        turn = 0
        while True:
            (request, ours), (_, theirs) = [await self._waiting[name].get() for name in ("ours", "theirs")]
            reader, writer = await asyncio.open_connection(*self._upstream)
            writer.write(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            turn += 1
            order = (ours, theirs) if turn % 2 else (theirs, ours)
            while piece := await reader.read(1 << 16):
                for client in order:
                    client.write(piece.replace(b"connection: close\r\n", b"x-connection: none\r\n"))
            writer.close()

    def _heard(self, name: str):  # type: ignore[no-untyped-def]
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    return
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                await self._waiting[name].put((head + await reader.readexactly(length), writer))

        return connected


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=30)
    options = parser.parse_args()
    host, _, port = options.url.rpartition("/")[2].partition(":")
    tee = Tee(host, int(port))
    url = f"http://127.0.0.1:{tee.ports['theirs']}"
    command = [options.python, "-c", OPENAI_CLIENT, url, options.model, options.count, options.tokens]
    theirs = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    requests = prompts(options.tokens, model=options.model, ignore_eos=False)
    samples = streamed(tee.ports["ours"], closed(1, options.count, duration_s=600.0), requests)
    said, _ = theirs.communicate(timeout=60)
    compare(samples, [json.loads(line) for line in said.splitlines()])


def compare(samples: Samples, theirs: list[tuple[list[int], int, int]]) -> None:
    streams = samples.streams
    assert streams is not None
    first_ms, gaps_ms, at, chunks = [], [], 0, 0
    for number, (instants, prompt, output) in enumerate(theirs):
        first_ms.append((samples.started_ns + samples.first_byte_ns[number] - instants[0]) / 1e6)
        own = np.diff(np.array(instants)) / 1e6
        gaps_ms += (streams.gaps_ns[at : at + len(own)] / 1e6 - own).tolist()
        at += len(own)
        chunks += len(instants)
        assert (streams.prompt_tokens[number], streams.output_tokens[number]) == (prompt, output)
    assert at == len(streams.gaps_ns), "another number of chunks with tokens"
    print(f"{len(theirs)} streams, {chunks} chunks, {streams.output_tokens.sum()} tokens: counts equal")
    for name, values in (("first token", first_ms), ("gaps", gaps_ms)):
        p50, p95, most = np.quantile(np.abs(values), (0.5, 0.95, 1.0))
        print(
            f"{name}: median of differences {np.median(values):+.3f} ms, |difference| p50 {p50:.3f}, p95 {p95:.3f}, most {most:.3f}"
        )


if __name__ == "__main__":
    main()
