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
from batchtune.load.samples import Columns, Samples, Status, merge, new_memory
from batchtune.scenario.prompts import UNIQUE_MARK, build_prompts
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.workload import RequestSpec
from batchtune.target.endpoint import Endpoint
from tests.load.load_servers import ScriptedHttp, a_job, closed, evenly, run_here

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


def run_script(events: list[dict[str, Any] | str], *, pause_s: float = 0.0, count: int = 1) -> Samples:
    async def script(_number: int, transport: asyncio.Transport) -> None:
        transport.write(HEAD)
        for each in events:
            await asyncio.sleep(pause_s)
            transport.write(chunk(event(each)))
        transport.write(b"0\r\n\r\n")

    with ScriptedHttp(script) as server:
        job = a_job("rest", server.port, closed(1, count), requests=requests())
        return run_here(job)


def test_first_token_and_every_gap_are_recorded_and_counts_come_from_usage() -> None:
    samples = run_script([ROLE, token("a"), token("b c"), token(" d"), *END], pause_s=0.01, count=3)
    streams = samples.streams
    assert samples.errors() == {}
    assert streams is not None
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
    whole = b"".join(event(each, newline=newline) for each in [ROLE, token('"'), token("\\n"), *END])

    async def script(_number: int, transport: asyncio.Transport) -> None:
        transport.write(HEAD)
        for at in range(0, len(whole), size):
            transport.write(chunk(whole[at : at + size]))
        transport.write(b"0\r\n\r\n")

    with ScriptedHttp(script) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 1), requests=requests()))
    assert samples.errors() == {}
    assert samples.streams is not None
    assert (len(samples.streams.gaps_ns), samples.streams.output_tokens[0]) == (1, 7)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([ROLE, token("a"), {"error": {"message": "out of blocks"}}], "out of blocks"),
        ([ROLE, token("a")], "ended before its last event"),
        ([], "ended before its last event"),
    ],
)
def test_a_stream_that_breaks_off_or_tells_an_error_is_no_good_answer(
    events: list[dict[str, Any] | str], words: str
) -> None:
    samples = run_script(events)
    assert samples.errors() == {"MALFORMED": 1}
    assert words in samples.error_texts["MALFORMED"]


def test_an_http_error_is_of_its_class() -> None:
    async def script(_number: int, transport: asyncio.Transport) -> None:
        body = b'{"error": {"message": "no such model"}}'
        transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with ScriptedHttp(script) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 2), requests=requests()))
    assert samples.errors() == {"INVALID_REQUEST": 2}
    assert "no such model" in samples.error_texts["INVALID_REQUEST"]


@pytest.mark.parametrize("chunked", [False, True])
def test_an_error_with_status_200_is_quoted(chunked: bool) -> None:
    body = b'{"error": {"message": "model overloaded"}}'

    async def script(_number: int, transport: asyncio.Transport) -> None:
        if chunked:
            transport.write(HEAD + chunk(body) + b"0\r\n\r\n")
        else:
            transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with ScriptedHttp(script) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 2), requests=requests()))
        with pytest.raises(TargetError, match="model overloaded"):
            require_answer(Endpoint(model_name="m", rest_port=server.port), requests(), is_json=False)
    assert samples.errors() == {"MALFORMED": 2}
    assert "model overloaded" in samples.error_texts["MALFORMED"]


def one_answer(head: bytes, body: bytes) -> ScriptedHttp:
    async def script(_number: int, transport: asyncio.Transport) -> None:
        transport.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (head, len(body), body))

    return ScriptedHttp(script)


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
def test_requests_go_to_the_path_of_the_url_where_it_is_one_of_the_api(
    url: str, openai: str, path: str
) -> None:
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


PAGE = b"200 OK\r\nContent-Type: text/html; charset=utf-8"
FIELDS = b"""{"detail": "Unexpected fields in the request: {'ignore_eos'}"}"""


@pytest.mark.parametrize(
    ("head", "body", "words", "advice"),
    [
        (
            PAGE,
            b"<html>please log in</html>",
            "text/html, neither events nor JSON: <html>please",
            "target.url",
        ),
        (PAGE, b"", "text/html, neither events nor JSON", "target.url"),
        (b"422 Unprocessable", FIELDS, "HTTP 422: ", "request.openai.ignore_eos: false"),
        (b"500 Internal", b"{}", "HTTP 500: ", "request.openai"),
        (b"429 Busy", b"{}", r"HTTP 429 \(too many requests\): ", "fewer"),
    ],
)
def test_a_first_answer_without_tokens_is_refused_before_the_load(
    head: bytes, body: bytes, words: str, advice: str
) -> None:
    with one_answer(head, body) as server, pytest.raises(TargetError, match=words) as raised:
        require_answer(Endpoint(model_name="m", rest_port=server.port), requests(), is_json=False)
    assert advice in str(raised.value.hint)
    assert "request.body" not in str(raised.value.hint)
    assert raised.value.exit_code == 7


@pytest.mark.parametrize(
    ("head", "body", "words"),
    [(PAGE, b"<html>please log in</html>", "please log in"), (b"429 Busy", b"{}", "too many requests")],
)
def test_a_failure_under_load_is_named(head: bytes, body: bytes, words: str) -> None:
    with one_answer(head, body) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 2), requests=requests()))
    assert words in next(iter(samples.error_texts.values()))


def test_streams_without_text_are_counted_and_answers_in_one_piece_are_not() -> None:
    without = run_script([ROLE, *END])
    assert without.errors() == {}
    assert without.streams is not None
    assert without.streams.textless == 1
    whole = json.dumps({"choices": [{"message": {"content": "a b"}}], "usage": USAGE}).encode()
    with one_answer(b"200 OK", whole) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 2), requests=requests()))
    assert samples.streams is not None
    assert (samples.streams.textless, samples.errors()) == (0, {})


EMPTY = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 0}}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(EMPTY).encode(),
        json.dumps({**EMPTY, "choices": [{"message": {"content": ""}, "finish_reason": "stop"}]}).encode(),
        event({"choices": []}) + event("[DONE]"),
        event(EMPTY) + event("[DONE]"),
    ],
)
def test_an_answer_without_choices_or_text_is_counted_however_it_comes(body: bytes) -> None:
    kind = b"text/event-stream" if body.startswith(b"data:") else b"application/json"
    with one_answer(b"200 OK\r\nContent-Type: " + kind, body) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 2), requests=requests()))
    assert samples.errors() == {}
    assert samples.streams is not None
    assert samples.streams.textless == 2


def test_a_lost_stream_keeps_the_gaps_that_it_had() -> None:
    async def script(_number: int, transport: asyncio.Transport) -> None:
        transport.write(HEAD)
        for text in "abc":
            transport.write(chunk(event(token(text))))
            await asyncio.sleep(0.001)
        transport.abort()

    with ScriptedHttp(script) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 1), requests=requests()))
    assert samples.errors() == {"RESET": 1}
    assert samples.streams is not None
    assert len(samples.streams.gaps_ns) == 2


def test_an_embedding_comes_whole() -> None:
    body = json.dumps({"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 9}}).encode()

    async def script(_number: int, transport: asyncio.Transport) -> None:
        transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with ScriptedHttp(script) as server:
        asked = requests(api="embeddings")
        samples = run_here(a_job("rest", server.port, closed(1, 3), requests=asked))
        sent = json.loads(server.requests[0].partition(b"\r\n\r\n")[2])
    assert samples.errors() == {}
    assert samples.streams is not None
    assert samples.streams.prompt_tokens.tolist() == [9, 9, 9]
    assert "stream" not in sent


@pytest.mark.parametrize("first", [b"", b": comment\n\n", b"event: message\n"])
def test_events_that_a_proxy_gathered_into_one_answer_are_read(first: bytes) -> None:
    body = first + b"".join(event(one) for one in [ROLE, token("a"), token("b"), *END])
    with one_answer(b"200 OK\r\nContent-Type: text/event-stream", body) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 3), requests=requests()))
    assert samples.errors() == {}
    assert samples.streams is not None
    assert samples.streams.output_tokens.tolist() == [7, 7, 7]


def test_prompts_begin_differently_unless_shared_ones_are_asked_for() -> None:
    async def script(_number: int, transport: asyncio.Transport) -> None:
        transport.write(HEAD + chunk(b"".join(map(event, [token("a"), *END]))) + b"0\r\n\r\n")

    texts = {}
    for prefix in ("unique", "shared"):
        with ScriptedHttp(script) as server:
            job = a_job("rest", server.port, evenly(200, 0.1), requests=requests(prefix=prefix))
            samples = run_here(job)
            bodies = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in server.requests]
        assert samples.errors() == {}
        texts[prefix] = [body["messages"][0]["content"][:16] for body in bodies]
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
    from batchtune.load.samples import GAP_STRIDE, GAPS

    count, stride = columns.header[GAPS], columns.header[GAP_STRIDE]
    assert 30 < count <= 100
    assert stride == 16
    kept = columns.gaps[0, :count]
    assert np.histogram(kept, bins=4, range=(0, 1000))[0].min() >= count // 4 - 8


def test_workers_streams_are_merged_in_the_order_of_their_requests() -> None:
    first, second = (run_script([ROLE, token("a"), token("b"), *END], count=2) for _ in range(2))
    second = Samples(
        **{name: getattr(second, name) for name in second.__dataclass_fields__ if name != "started_ns"},
        started_ns=first.started_ns,
    )
    whole = merge([first, second])
    assert whole.streams is not None
    assert len(whole.streams.gaps_ns) == 4
    assert whole.streams.output_tokens.tolist() == [7] * 4
    assert whole.status.tolist() == [Status.OK] * 4


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_thousands_of_streams_are_open_at_once(count: int) -> None:
    open_now = asyncio.Event()
    first, rest = (chunk(b"".join(map(event, events))) for events in ([token("a")], [token("b"), *END]))
    begun = ended = most = 0

    async def script(_number: int, transport: asyncio.Transport) -> None:
        nonlocal begun, ended, most
        transport.write(HEAD + first)
        begun += 1
        most = max(most, begun - ended)
        if begun == count:
            open_now.set()
        await open_now.wait()
        transport.write(rest + b"0\r\n\r\n")
        ended += 1

    with ScriptedHttp(script) as server:
        asked = replace(requests(), timeout_s=120.0)
        samples = run_here(a_job("rest", server.port, closed(count, count, duration_s=120.0), requests=asked))
    assert samples.errors() == {}
    assert most == count  # all had begun before one ended; in which order a busy client reads them is open
    assert (samples.first_byte_ns < samples.done_ns).all()
    assert samples.streams is not None
    assert len(samples.streams.gaps_ns) == count
    assert samples.streams.output_tokens.sum() == 7 * count
