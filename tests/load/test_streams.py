"""Streams of tokens from an OpenAI-compatible server: instants, counts, and servers that break off, err or dribble."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchtune.errors import TargetError
from batchtune.load.answers import require_answer
from batchtune.load.samples import GAP_STRIDE, GAPS, Columns, Samples, Status, Streams, merge, new_memory
from batchtune.scenario.prompts import UNIQUE_MARK, build_prompts
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.workload import RequestSpec
from batchtune.target.endpoint import Endpoint
from tests.load.load_servers import (
    HttpScript,
    ScriptedHttp,
    a_job,
    always,
    closed,
    evenly,
    load_http,
    run_here,
)

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 11, "completion_tokens": 7}


def event(document: dict[str, Any] | str, *, newline: bytes = b"\n") -> bytes:
    text = document if isinstance(document, str) else json.dumps(document)
    return b"data: " + text.encode() + 2 * newline


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(text: str, **delta: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": None}],
        "usage": None,
    }


ROLE = token("", role="assistant")
END: list[dict[str, Any] | str] = [
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None},
    {"choices": [], "usage": USAGE},
    "[DONE]",
]


def requests(**openai: Any) -> Any:
    spec = RequestSpec.model_validate(
        {"protocol": "openai", "lengths": {"constant": 20}, "openai": openai, "distinct": 2}
    )
    return build_prompts(spec, model_name="m")


def streamed(*events: dict[str, Any] | str, newline: bytes = b"\n", size: int = 1_000_000) -> bytes:
    """An answer of these events in chunks of so many bytes."""
    whole = b"".join(event(each, newline=newline) for each in events)
    return HEAD + b"".join(chunk(whole[at : at + size]) for at in range(0, len(whole), size)) + b"0\r\n\r\n"


def whole_answer(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (status, kind, len(body))
    return head + body


def asked(script: HttpScript | bytes, count: int = 1, **openai: Any) -> tuple[Samples, Streams]:
    """What one user hears who asks so often."""
    script = always(script) if isinstance(script, bytes) else script
    samples = load_http(script, closed(1, count), requests=requests(**openai))
    assert samples.streams is not None
    return samples, samples.streams


def test_first_token_and_every_gap_are_recorded_and_counts_come_from_usage() -> None:
    async def script(_number: int, transport: asyncio.Transport) -> None:
        transport.write(HEAD)
        for each in [ROLE, token("a"), token("b c"), token(" d"), *END]:
            await asyncio.sleep(0.01)
            transport.write(chunk(event(each)))
        transport.write(b"0\r\n\r\n")

    samples, streams = asked(script, count=3)
    assert samples.errors() == {}
    assert streams.prompt_tokens.tolist() == [11] * 3
    assert streams.output_tokens.tolist() == [7] * 3
    assert len(streams.gaps_ns) == 2 * 3  # of three chunks with tokens each
    waited_ns = samples.first_byte_ns - samples.sent_ns
    ends_ns = streams.gaps_ns.reshape(3, 2).sum(axis=1)  # a chunk that comes late shortens the gap behind it
    assert (ends_ns + waited_ns >= 38_000_000).all()
    assert (waited_ns >= 18_000_000).all()  # the role comes before the first token and is none
    assert (samples.done_ns - samples.first_byte_ns >= streams.gaps_ns.reshape(3, 2).sum(axis=1)).all()
    assert (streams.gap_p99_ns == streams.gaps_ns.reshape(3, 2).max(axis=1)).all()


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_are_found_however_they_are_cut(size: int, newline: bytes) -> None:
    samples, streams = asked(streamed(ROLE, token('"'), token("\\n"), *END, newline=newline, size=size))
    assert samples.errors() == {}
    assert (len(streams.gaps_ns), streams.output_tokens[0]) == (1, 7)


PAGE = whole_answer(b"<html>please log in</html>", b"text/html; charset=utf-8")
NOT_FOUND = whole_answer(b'{"error": {"message": "no such model"}}', status=b"404 Not Found")
OVERLOADED = b'{"error": {"message": "model overloaded"}}'
BROKEN_OFF = {"error": {"message": "out of blocks"}}


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (streamed(ROLE, token("a"), BROKEN_OFF), "MALFORMED", "out of blocks"),
        (streamed(ROLE, token("a")), "MALFORMED", "ended before its last event"),
        (streamed(), "MALFORMED", "ended before its last event"),
        (NOT_FOUND, "INVALID_REQUEST", "no such model"),
        (whole_answer(OVERLOADED), "MALFORMED", "model overloaded"),
        (HEAD + chunk(OVERLOADED) + b"0\r\n\r\n", "MALFORMED", "model overloaded"),
        (PAGE, "MALFORMED", "please log in"),
        (whole_answer(b"{}", status=b"429 Busy"), "QUEUE_FULL", "too many requests"),
    ],
)
def test_what_breaks_off_or_tells_an_error_is_no_good_answer(answer: bytes, status: str, words: str) -> None:
    samples, _ = asked(answer, count=2)
    assert samples.errors() == {status: 2}
    assert words in samples.error_texts[status]


@pytest.mark.parametrize(
    ("url", "openai", "path"),
    [
        ("/api/v1/chat/completions", "{}", "/api/v1/chat/completions"),
        ("/openai/v1/embeddings", "{}", "/openai/v1/embeddings"),
        ("/proxy/completions?key=1", "{}", "/proxy/completions?key=1"),
        ("/api/v1/chat/completions", "{api: completions}", "/api/v1/completions"),
        ("/api/v1/chat/completions", "{path: /mine}", "/mine"),
        ("", "{}", "/v1/chat/completions"),
        ("/m", "{api: embeddings}", "/v1/embeddings"),
    ],
)
def test_requests_go_to_the_path_of_the_url_if_it_is_of_the_api(url: str, openai: str, path: str) -> None:
    text = f"""
name: x
target: {{kind: http, url: "http://h:1{url}", model: m}}
request: {{protocol: openai, openai: {openai}}}
load: {{arrivals: closed, concurrency: 1}}
objective: throughput
"""
    requests = build_prompts(parse_scenario(text).request, model_name="m")
    body = json.loads(requests.bodies[0])
    assert requests.path == path
    assert ("messages" in body, "input" in body) == ("chat" in path or path == "/mine", "embed" in path)


FIELDS = b"""{"detail": "Unexpected fields in the request: {'ignore_eos'}"}"""
NO_PAGE = whole_answer(b"", b"text/html; charset=utf-8")


@pytest.mark.parametrize(
    ("answer", "words", "advice"),
    [
        (PAGE, "text/html, neither events nor JSON: <html>please", "target.url"),
        (NO_PAGE, "text/html, neither events nor JSON", "target.url"),
        (whole_answer(FIELDS, status=b"422 X"), "HTTP 422: ", "request.openai.ignore_eos: false"),
        (whole_answer(b"{}", status=b"500 X"), "HTTP 500: ", "request.openai"),
        (whole_answer(b"{}", status=b"429 X"), r"HTTP 429 \(too many requests\): ", "fewer"),
        (whole_answer(OVERLOADED), "model overloaded", ""),
    ],
)
def test_a_first_answer_without_tokens_ends_before_the_load(answer: bytes, words: str, advice: str) -> None:
    with ScriptedHttp(always(answer)) as server, pytest.raises(TargetError, match=words) as raised:
        require_answer(Endpoint(model_name="m", rest_port=server.port), requests(), is_json=False)
    assert advice in str(raised.value.hint)
    assert "request.body" not in str(raised.value.hint)
    assert raised.value.exit_code == 7


EMPTY = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 0}}
NO_TEXT = {**EMPTY, "choices": [{"message": {"content": ""}, "finish_reason": "stop"}]}
TEXT = {"choices": [{"message": {"content": "a b"}}], "usage": USAGE}
EVENTS = b"text/event-stream"


GATHERED = b"".join(event(one) for one in [ROLE, token("a"), token("b"), *END])


@pytest.mark.parametrize(
    ("answer", "textless", "tokens"),
    [
        (streamed(ROLE, *END), 2, 7),
        (whole_answer(json.dumps(TEXT).encode()), 0, 7),
        (whole_answer(json.dumps(EMPTY).encode()), 2, 0),
        (whole_answer(json.dumps(NO_TEXT).encode()), 2, 0),
        (whole_answer(event({"choices": []}) + event("[DONE]"), EVENTS), 2, 0),
        (whole_answer(event(EMPTY) + event("[DONE]"), EVENTS), 2, 0),
        *(
            (whole_answer(first + GATHERED, EVENTS), 0, 7)
            for first in (b"", b": comment\n\n", b"event: message\n")
        ),
    ],
)
def test_an_answer_however_it_comes_is_read_and_one_without_text_is_counted(
    answer: bytes, textless: int, tokens: int
) -> None:
    """As a proxy gathers events, in one piece, without choices or text."""
    samples, streams = asked(answer, count=2)
    assert (samples.errors(), streams.textless) == ({}, textless)
    assert streams.output_tokens.tolist() == [tokens] * 2


def test_a_lost_stream_keeps_the_gaps_that_it_had() -> None:
    async def script(_number: int, transport: asyncio.Transport) -> None:
        transport.write(HEAD)
        for text in "abc":
            transport.write(chunk(event(token(text))))
            await asyncio.sleep(0.001)
        transport.abort()

    samples, streams = asked(script)
    assert (samples.errors(), len(streams.gaps_ns)) == ({"RESET": 1}, 2)


def test_an_embedding_comes_whole() -> None:
    body = json.dumps({"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 9}}).encode()
    samples, streams = asked(whole_answer(body), count=3, api="embeddings")
    assert samples.errors() == {}
    assert streams.prompt_tokens.tolist() == [9, 9, 9]
    assert "stream" not in json.loads(requests(api="embeddings").bodies[0])


def test_prompts_begin_differently_unless_shared_ones_are_asked_for() -> None:
    texts = {}
    for prefix in ("unique", "shared"):
        with ScriptedHttp(always(streamed(token("a"), *END))) as server:
            job = a_job("rest", server.port, evenly(200, 0.1), requests=requests(prefix=prefix))
            assert run_here(job).errors() == {}
        texts[prefix] = [json.loads(body)["messages"][0]["content"][:16] for body in server.bodies]
    assert len(set(texts["unique"])) == len(texts["unique"]) == 20
    assert UNIQUE_MARK.decode() not in texts["unique"]
    assert len(set(texts["shared"])) == 2


def test_the_digits_of_a_recorded_chat_leave_its_system_prompt_as_it_is(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    parts = [{"type": "text", "text": "What is this?"}]
    chats = [[system, {"role": "user", "content": content}] for content in ("Who?", parts)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in [*chats, [system]]))
    spec = RequestSpec.model_validate({"protocol": "openai", "inputs": {"file": str(file)}})
    bodies = build_prompts(spec, model_name="m").bodies
    first, second, alone = (json.loads(body)["messages"] for body in bodies)
    mark = UNIQUE_MARK.decode()
    assert first == [system, {"role": "user", "content": f"{mark} Who?"}]
    assert second == [system, {"role": "user", "content": [{"type": "text", "text": mark}, *parts]}]
    assert alone == [{"role": "system", "content": f"{mark} Be brief."}]


def test_the_table_of_gaps_is_bounded_and_thins_evenly() -> None:
    descriptor = new_memory(4, 100)
    columns = Columns(descriptor, 4, 100)
    for first in range(0, 1000, 10):
        numbers = np.arange(first, first + 10)
        columns.keep_gaps(numbers, numbers)
    count, stride = columns.header[GAPS], columns.header[GAP_STRIDE]
    assert 30 < count <= 100
    assert stride == 16
    kept = columns.gaps[0, :count]
    assert np.histogram(kept, bins=4, range=(0, 1000))[0].min() >= count // 4 - 8


def test_workers_streams_are_merged_in_the_order_of_their_requests() -> None:
    first, second = (asked(streamed(ROLE, token("a"), token("b"), *END), count=2)[0] for _ in range(2))
    whole = merge([first, replace(second, started_ns=first.started_ns)])
    assert whole.streams is not None
    assert len(whole.streams.gaps_ns) == 4
    assert whole.streams.output_tokens.tolist() == [7] * 4
    assert whole.status.tolist() == [Status.OK] * 4


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_thousands_of_streams_are_open_at_once(count: int) -> None:
    all_open = asyncio.Barrier(count)
    rest = streamed(token("b"), *END).removeprefix(HEAD)

    async def script(_number: int, transport: asyncio.Transport) -> None:
        transport.write(HEAD + chunk(event(token("a"))))
        await all_open.wait()  # in which order a busy client reads them is open
        transport.write(rest)

    patient = replace(requests(), timeout_s=120.0)
    samples = load_http(script, closed(count, count, duration_s=120.0), requests=patient)
    assert samples.errors() == {}
    assert (samples.first_byte_ns < samples.done_ns).all()
    assert samples.streams is not None
    assert len(samples.streams.gaps_ns) == count
    assert samples.streams.output_tokens.sum() == 7 * count
