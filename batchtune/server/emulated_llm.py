"""An emulated server of a language model: OpenAI's API over a device that is known only by the time of its steps.

`python -m batchtune.server.emulated_llm --port 8000 --max-num-seqs 64`. Nothing is computed: tokens are the word "tok".
What is real is the scheduling, as vLLM's: continuous batching, chunked prefill, a memory of keys and values that
sequences fill token by token, preemption of the newest where it is full. Every output says that it is emulated.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

import httptools
import orjson
import uvloop

from batchtune.server.backends.emulated import sleep_until

OUT_OF_MEMORY: Final = "emulated device: out of memory"
_FIRST: Final = b'data: {"id":"emulated","object":"%s","choices":[{"index":0,%s,"finish_reason":null}]}\n\n'
_OBJECTS: Final = {"chat": b"chat.completion.chunk", "completions": b"text_completion"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The time of a step and the size of the memory, which is counted in tokens of keys and values.

    A step takes step_ms, plus sequence_ms for each running sequence and prefill_token_ms for each prompt token in it.
    sequence_tokens, batched_token_tokens: memory reserved for each of max_num_seqs and for each of
    max_num_batched_tokens.
    """

    step_ms: float = 4.0
    sequence_ms: float = 0.05
    prefill_token_ms: float = 0.02
    memory_tokens: int = 60_000
    sequence_tokens: int = 60
    batched_token_tokens: int = 8

    def kv_tokens(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Return how many tokens fit beside the reserved memory; below 1: the server cannot start."""
        aside = self.sequence_tokens * max_num_seqs + self.batched_token_tokens * max_num_batched_tokens
        return self.memory_tokens - aside


@dataclass(eq=False, slots=True)
class Sequence:
    """A request; all counts are tokens.

    prompt: to read; output: to produce; computed: in memory; produced: so far. owner: connection that gets each token;
    gone: its client has left.
    """

    prompt: int
    output: int
    owner: Any = None
    computed: int = 0
    produced: int = 0
    gone: bool = False

    @property
    def wanted(self) -> int:
        """Tokens that must be computed before the next one is produced."""
        return self.prompt + self.produced


class Scheduler:
    """Chooses the tokens that a step computes: first those of decoding sequences, then of prefilling ones, then of new
    ones.

    At most max_num_seqs sequences run, a step has at most max_num_batched_tokens tokens, and memory is limited.
    """

    def __init__(self, device: Device, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_tokens = device.kv_tokens(max_num_seqs, max_num_batched_tokens)
        self.used_tokens = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a request that has arrived."""
        self.waiting.append(sequence)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not (self.waiting or self.running)

    def step(self) -> tuple[float, list[Sequence]]:
        """Compute a step; return (its seconds, sequences that get a token at its end); (0.0, []): no sequence runs."""
        for sequence in [running for running in self.running if running.gone]:
            self._release(sequence)
        budget, decoding, prefilled = self.max_num_batched_tokens, 0, 0
        answered: list[Sequence] = []
        position = 0
        while (
            position < len(self.running) and budget > 0
        ):  # it grows shorter from its end: the newest are preempted
            sequence = self.running[position]
            left = sequence.wanted - sequence.computed
            tokens = min(left, budget)
            if not self._make_room(sequence, tokens):
                continue
            is_decoding = left == 1 and sequence.produced > 0
            decoding += is_decoding
            prefilled += 0 if is_decoding else tokens
            budget -= tokens
            self._compute(sequence, tokens, answered)
            position += 1
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            sequence = self.waiting[0]
            if sequence.gone:
                self.waiting.popleft()
                continue
            if sequence.wanted > self.kv_tokens - self.used_tokens:
                break
            self.running.append(self.waiting.popleft())
            tokens = min(sequence.wanted, budget)
            budget -= tokens
            prefilled += tokens
            self.used_tokens += tokens
            self._compute(sequence, tokens, answered)
        if not decoding and not prefilled:
            return 0.0, []
        device = self.device
        busy = len(self.running)
        milliseconds = device.step_ms + device.sequence_ms * busy + device.prefill_token_ms * prefilled
        for sequence in answered:
            sequence.produced += 1
            if sequence.produced >= sequence.output:
                self._release(sequence)
        return milliseconds / 1e3, answered

    def _compute(self, sequence: Sequence, tokens: int, answered: list[Sequence]) -> None:
        sequence.computed += tokens
        if sequence.computed == sequence.wanted:
            answered.append(sequence)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Reserve memory for more tokens, preempting the newest sequences; False: `sequence` itself was."""
        while tokens > self.kv_tokens - self.used_tokens:
            newest = self.running[-1]
            self._release(newest)
            newest.computed = 0
            self.preemptions += 1
            self.waiting.appendleft(newest)
            if newest is sequence:
                return False
        self.used_tokens += tokens
        return True

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.used_tokens -= sequence.computed


class Engine(threading.Thread):
    """The thread that runs the steps, on a timetable, so that late wake-ups do not add up."""

    def __init__(self, scheduler: Scheduler, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="emulated-llm", daemon=True)
        self.scheduler = scheduler
        self._loop = loop
        self._arrived: deque[Sequence] = deque()
        self._wake = threading.Event()
        self.steps = 0
        self.tokens = 0
        self.requests = 0

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; called on the event loop."""
        self.requests += 1
        self._arrived.append(sequence)
        self._wake.set()

    def run(self) -> None:
        """Run a step after another while there are requests; never returns. Tokens are reported on the event loop."""
        ends_ns = 0
        while True:
            while self._arrived:
                self.scheduler.add(self._arrived.popleft())
            if self.scheduler.is_idle:
                self._wake.wait()
                self._wake.clear()
                continue
            seconds, answered = self.scheduler.step()
            if not seconds:
                continue
            ends_ns = max(ends_ns, time.monotonic_ns() - 2_000_000) + round(seconds * 1e9)
            sleep_until(ends_ns)
            self.steps += 1
            self.tokens += len(answered)
            if answered:
                counts = [(sequence, sequence.produced) for sequence in answered]
                self._loop.call_soon_threadsafe(_hand_out, counts)


def _hand_out(answered: list[tuple[Sequence, int]]) -> None:
    """Give each (sequence, number of its token) to its owner; the engine may be steps ahead by now."""
    for sequence, produced in answered:
        if not sequence.gone:
            sequence.owner.token(sequence, produced)


class Connection(asyncio.Protocol):
    """One client, one request at a time."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self._engine = engine
        self._options = options
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._sequence: Sequence | None = None
        self._handed = 0
        self._keep_alive = True
        self._document: dict[str, Any] = {}
        self._token_event = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._sequence is not None:
            self._sequence.gone = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        """Begin a request: note its path; httptools calls this."""
        self._url = url
        self._body, self._body_bytes = [], 0

    def on_body(self, data: bytes) -> None:
        """Store a piece of the body; a body of more than 16 MiB ends the connection."""
        body_max_bytes = 16 << 20
        self._body_bytes += len(data)
        if self._body_bytes > body_max_bytes:
            self._transport.close()
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """Answer the request that has arrived; a completion is answered token by token (`token`)."""
        self._keep_alive = self._parser.should_keep_alive()
        match self._url.partition(b"?")[0]:
            case b"/health":
                self._answer(200, b"{}")
            case b"/v1/models":
                models = [{"id": self._options.model, "object": "model", "owned_by": "emulated"}]
                self._answer(200, orjson.dumps({"object": "list", "data": models}))
            case b"/metrics" | b"/monitoring/prometheus/metrics":
                self._answer(200, self._metrics(), kind=b"text/plain")
            case b"/v1/chat/completions":
                self._generate("chat")
            case b"/v1/completions":
                self._generate("completions")
            case _:
                self._fail(404, "no such path")

    def token(self, sequence: Sequence, produced: int) -> None:
        """Accept token number `produced`; send the chunk that it completes, and with the last token the whole answer if
        it is not streamed."""
        per_chunk = self._options.tokens_per_chunk
        done = produced >= sequence.output
        if self._document.get("stream"):
            if not done and produced - self._handed < per_chunk:
                return
            self._handed = produced
            self._transport.write(self._token_event + (self._end_of_stream(sequence) if done else b""))
        elif done:
            self._whole(sequence)
        if done:
            self._sequence = None
            self._end()

    def _end(self) -> None:
        """End an answer: close the connection if the client asked for that."""
        if not self._keep_alive:
            self._transport.close()

    def _generate(self, api: str) -> None:
        try:
            document = orjson.loads(b"".join(self._body))
            text = document["prompt"] if api == "completions" else _text_of(document["messages"])
            output = int(document.get("max_completion_tokens") or document.get("max_tokens") or 16)
            prompt = max(len(text.split()), 1)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            self._fail(400, "expected a JSON object with messages or a prompt")
            return
        if output < 1 or prompt + output > self._engine.scheduler.kv_tokens:
            self._fail(400, f"{prompt} + {output} tokens do not fit into memory")
            return
        self._document, self._handed = document, 0
        self._api = api
        self._sequence = Sequence(prompt=prompt, output=output, owner=self)
        if document.get("stream"):
            word = b" tok" * self._options.tokens_per_chunk
            text_key = b'"delta":{"content":"%s"}' if api == "chat" else b'"text":"%s"'
            self._token_event = _chunk(_FIRST % (_OBJECTS[api], text_key % word))
            head = b"HTTP/1.1 200 OK\r\nServer: batchtune-emulated-llm\r\nContent-Type: text/event-stream\r\n"
            opening = b"Transfer-Encoding: chunked\r\n\r\n"
            if api == "chat":
                role = b'"delta":{"role":"assistant","content":""}'
                opening += _chunk(_FIRST % (_OBJECTS[api], role))
            self._transport.write(head + opening)
        self._engine.submit(self._sequence)

    def _end_of_stream(self, sequence: Sequence) -> bytes:
        last = (
            b'data: {"id":"emulated","object":"%s","choices":[{"index":0,%s,"finish_reason":"length"}]}\n\n'
        )
        empty = b'"delta":{}' if self._api == "chat" else b'"text":""'
        events = _chunk(last % (_OBJECTS[self._api], empty))
        if (self._document.get("stream_options") or {}).get("include_usage"):
            usage = {"id": "emulated", "object": "usage", "choices": [], "usage": _usage(sequence)}
            events += _chunk(b"data: " + orjson.dumps(usage) + b"\n\n")
        return events + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def _whole(self, sequence: Sequence) -> None:
        text = " tok" * sequence.output
        answer = (
            {"message": {"role": "assistant", "content": text}} if self._api == "chat" else {"text": text}
        )
        choices = [{"index": 0, **answer, "finish_reason": "length"}]
        self._answer(200, orjson.dumps({"id": "emulated", "choices": choices, "usage": _usage(sequence)}))

    def _metrics(self) -> bytes:
        engine, scheduler = self._engine, self._engine.scheduler
        used = scheduler.used_tokens / scheduler.kv_tokens
        return (
            f":batchtune:serving:emulated_device 1\n"
            f':tensorflow:serving:request_count{{status="OK"}} {engine.requests}\n'
            f"vllm:num_requests_running {len(scheduler.running)}\nvllm:num_requests_waiting {len(scheduler.waiting)}\n"
            f"vllm:kv_cache_usage_perc {used}\nvllm:num_preemptions_total {scheduler.preemptions}\n"
            f"vllm:iteration_tokens_total_count {engine.steps}\nvllm:iteration_tokens_total_sum {engine.tokens}\n"
        ).encode()

    def _fail(self, status: int, text: str) -> None:
        self._answer(status, orjson.dumps({"error": {"message": text, "type": "emulated"}}))

    def _answer(self, status: int, body: bytes, *, kind: bytes = b"application/json") -> None:
        words = {200: b"OK", 400: b"Bad Request", 404: b"Not Found"}[status]
        head = b"HTTP/1.1 %d %s\r\nServer: batchtune-emulated-llm\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (status, words, kind, len(body)) + body)
        self._end()


def _text_of(messages: list[dict[str, Any]]) -> str:
    return " ".join(str(message.get("content", "")) for message in messages)


def _usage(sequence: Sequence) -> dict[str, int]:
    total = sequence.prompt + sequence.output
    return {"prompt_tokens": sequence.prompt, "completion_tokens": sequence.output, "total_tokens": total}


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line (None: sys.argv); a flag that vLLM has too has vLLM's name."""
    parser = argparse.ArgumentParser(prog="batchtune.server.emulated_llm", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="emulated")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--startup-s", type=float, default=0.0, help="how long loading weights is to take")
    for name, default in asdict(Device()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args(words)


def device_of(options: argparse.Namespace) -> Device:
    """Return the emulated device that the command line describes."""
    return Device(**{name: getattr(options, name) for name in asdict(Device())})


async def _serve(options: argparse.Namespace, scheduler: Scheduler) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(scheduler, loop)
    server = await loop.create_server(
        lambda: Connection(engine, options), options.host, options.port, backlog=4096
    )
    engine.start()
    sys.stdout.write(f"emulated language model on port {server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()
    server.close()


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 0, or 1 where the settings do not fit into memory."""
    options = options_of()
    time.sleep(options.startup_s)
    scheduler = Scheduler(
        device_of(options),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    if scheduler.kv_tokens < 1:
        need = scheduler.device.memory_tokens - scheduler.kv_tokens
        sys.stderr.write(f"{OUT_OF_MEMORY}: {need} of {scheduler.device.memory_tokens} tokens wanted\n")
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, scheduler))
    return 0


if __name__ == "__main__":
    sys.exit(main())
