"""Sends requests as HTTP/1.1 POSTs over a pool of connections, one request in flight on each.

The path of a good answer is flat on purpose: two clock-free stores, one source call and one write per request keep
the client at the price of wrk (tests/benchmarks/load/load_rest.py).
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import orjson

from batchtune.load.clients.dialer import Dialer
from batchtune.load.clients.source import Source
from batchtune.load.samples import (
    GOOD,
    TEXTLESS,
    Columns,
    Recorder,
    Status,
    error_within,
    http_words,
    of_http,
)
from batchtune.scenario.places import has_value
from batchtune.scenario.prompts import UNIQUE_MARK
from batchtune.scenario.spec.workload import OkSpec
from batchtune.target.endpoint import Endpoint
from batchtune.wire.http1_client import NO_TAG, AnswerHeads, Http1ClientConnection

_monotonic_ns = time.monotonic_ns


class RestClient:
    """Sends `requests[i % len(requests)]` as request i; `source` says which i comes next on a free connection.

    `ok`: which answers of protocol http are good; without `ok.path`, JSON with an `error` at its top is not, unless the
    recorder checks no answers. `ok` None, for other protocols: answers of status 200.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[bytes],
        recorder: Recorder,
        source: Source,
        *,
        connections_max: int,
        timeout_s: float,
        ok: OkSpec | None = None,
        streams: StreamReader | None = None,
    ) -> None:
        columns = recorder.columns
        self._streams = streams
        self._sent, self._first_byte = columns.sent, columns.first_byte
        self._done, self._outcome = columns.done, columns.outcome
        self._ok_status = frozenset(ok.status if ok else (200,))
        self._ok_path = ok.path if ok else ""
        self._requests = requests
        self._period = len(requests)
        self._recorder = recorder
        self._looks = ok is not None and (ok.path != "" or recorder.check_every > 0)
        self._check_every = 1 if self._looks else recorder.check_every or sys.maxsize
        self._keep_every = recorder.check_every or sys.maxsize
        self._source = source
        self._finished = source.finished
        self._heads = AnswerHeads(1_024)
        self._idle: list[Http1ClientConnection] = []
        self._connections: set[Http1ClientConnection] = set()
        self._dialer = Dialer(
            endpoint,
            endpoint.rest_port or 80,
            alpn="http/1.1",
            connections_max=connections_max,
            timeout_s=timeout_s,
            make_protocol=lambda: Http1ClientConnection(self, self._heads, streams=streams is not None),
            on_failed=self._dial_failed,
        )

    async def open(self, connections: int) -> None:
        """Open this many connections before the start, so that connecting is not measured.

        Raises:
            TargetError: the host's name does not resolve.
        """
        await self._dialer.resolve()
        await self._dialer.dial_all(connections)

    def try_send(self, index: int) -> bool:
        """Send request `index` now; return False where no connection is free."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                self._send(connection, index, _monotonic_ns())
                return True
        return False

    def flush(self) -> None:
        """Do nothing: each request is written when it is sent."""

    def fill(self) -> None:
        """Send waiting requests on the connections that are free, and open connections for the rest."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.reusable:
                continue
            now_ns = _monotonic_ns()
            index = self._source.take(now_ns)
            if index < 0:
                self._idle.append(connection)
                return
            self._send(connection, index, now_ns)
        self._dialer.dial(self._source.backlog())

    def cancel(self, indices: Sequence[int]) -> None:
        """Give up on these requests, all of which were sent: close their connections, the only way in HTTP/1.1."""
        by_tag = {connection.tag: connection for connection in self._connections}
        for index in indices:
            if index in by_tag:
                if self._streams is not None:
                    self._streams.end(index)
                by_tag[index].abandon()
                self._source.released(_monotonic_ns())

    def close(self) -> None:
        """Close every connection at once, and open no more."""
        self._dialer.hang_up()

    def ready(self, connection: Http1ClientConnection) -> None:
        """Use a connection that is up: send waiting requests."""
        self._connections.add(connection)
        self._dialer.became_ready(connection)
        self._idle.append(connection)
        self.fill()

    def first_byte(self, connection: Http1ClientConnection, tag: int) -> None:  # noqa: ARG002
        """Record when the answer to request `tag` begins; of a stream nothing."""
        if self._streams is None:
            self._first_byte[tag] = _monotonic_ns()

    def piece(self, tag: int, data: bytes) -> None:
        """Record the tokens in a piece of the answer to request `tag`."""
        if self._streams is not None:
            self._streams.take(tag, data)

    def answered(self, connection: Http1ClientConnection, tag: int, status: int, body: bytes | None) -> None:
        """Record the answer to request `tag` and its fault, if any; send the next request on the connection."""
        now_ns = _monotonic_ns()
        fault = "" if self._streams is None else self._streams.end(tag, body if status == 200 else None)
        if fault and status == 200:
            self._recorder.fail(tag, Status.MALFORMED, fault)
        elif status in self._ok_status and not (self._looks and (fault := self._fault_of(body or b""))):
            self._done[tag] = now_ns
            self._outcome[tag] = GOOD
            if body is not None and tag % self._keep_every == 0:
                self._recorder.keep_answer(tag, body)
        elif status in self._ok_status:
            self._recorder.fail(tag, Status.WRONG_ANSWER, fault)
        else:
            text = (body or b"").decode("utf-8", "replace")
            refusal = of_http(status, text, retry_after=connection.retry_after)
            connection.retry_after = False
            self._recorder.fail(tag, refusal, f"{http_words(status)}: {text}")
        if not connection.reusable:
            self._source.released(now_ns)
            return
        index = self._finished(now_ns)
        if index < 0:
            self._idle.append(connection)
            return
        self._send(connection, index, now_ns)

    def lost(self, connection: Http1ClientConnection, tag: int, reason: str) -> None:
        """Record that request `tag` failed with its connection (NO_TAG: no request did), and send waiting requests on
        others."""
        self._connections.discard(connection)
        self._dialer.closed(connection)
        if tag != NO_TAG:
            if self._streams is not None:
                self._streams.end(tag)
            self._recorder.fail(tag, Status.MALFORMED if connection.malformed else Status.RESET, reason)
            self._source.failed(_monotonic_ns())
        self.fill()

    def _fault_of(self, body: bytes) -> str:
        """Return what is wrong with an answer of a good status: no value at the place that the scenario names, or an
        error where it names none; "" if nothing. JSON is parsed only where `"error"` is among its first or last 512
        bytes: to search 12 KB whole took a third of the client's time."""
        if not self._ok_path:
            ends = body if len(body) <= 1_024 else body[:512] + body[-512:]
            return error_within(body) if b'"error"' in ends else ""
        try:
            lacks = not has_value(orjson.loads(body), self._ok_path)
        except ValueError:
            lacks = True
        if not lacks:
            return ""
        return f"no value at {self._ok_path!r} of the answer: {body.decode('utf-8', 'replace')}"

    def _send(self, connection: Http1ClientConnection, index: int, now_ns: int) -> None:
        self._sent[index] = now_ns
        request = self._requests[index % self._period]
        if self._streams is not None:
            connection.send(self._streams.begin(index, request), index, keep_body=True)
            return
        connection.send(request, index, index % self._check_every == 0)

    def _dial_failed(self, reason: str) -> None:
        now_ns = _monotonic_ns()
        index = self._source.take(now_ns)
        if index >= 0:
            self._recorder.fail(index, Status.REFUSED, reason)
            self._source.failed(now_ns)
        self.fill()


# Streamed answers of OpenAI-compatible servers: when each token came, and how many there were by `usage`.
#
# An instant is taken for each server-sent event that bears a token, in the read that brought it. A line costs two
# `bytes.find`: JSON is parsed once an answer, of the line that holds `usage` (tests/benchmarks/llm/chunk_cost.py).


_OTHER_TEXT: Final = re.compile(rb'"(?:text|reasoning_content|reasoning|arguments|refusal)":\s*"[^"]')
_ERROR: Final = re.compile(rb'^data:\s*\{"error"')
_FINISHED: Final = re.compile(rb'^data:\s*\[DONE\]|"finish_reason":\s*"')


class _Stream:
    __slots__ = ("fault", "finished", "instants", "rest", "usage")

    def __init__(self) -> None:
        self.instants = array("q")
        self.rest = b""
        self.usage = b""
        self.fault = ""
        self.finished = False


class StreamReader:
    """Reads the streamed answers in flight: when their tokens come, and how many there are by the server's count.

    Call `begin` for each request, `take` for each piece of its answer, then `end`; further calls of `end` do nothing.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._first_token = columns.first_byte
        self._in_flight: dict[int, _Stream] = {}
        self._unique = (time.time_ns() << 16 ^ os.getpid()) & (1 << 64) - 1

    def begin(self, index: int, request: bytes) -> bytes:
        """Begin the answer of request `index`, and return the bytes to send for it.

        UNIQUE_MARK in its prompt, if any, is replaced by a text that no other request has.
        """
        self._in_flight[index] = _Stream()
        own = b"%016x" % (self._unique + index * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
        return request.replace(UNIQUE_MARK, own, 1)

    def take(self, index: int, data: bytes) -> None:
        """Record when the tokens in a piece of an answer came, its `usage` and its faults."""
        # Largest server-sent event; one holds a token or a few.
        most_bytes = 1 << 20
        tokens_max = 1_000_000  # of one answer, whose instants are recorded
        now_ns = _monotonic_ns()
        stream = self._in_flight[index]
        lines = (stream.rest + data).split(b"\n") if stream.rest else data.split(b"\n")
        stream.rest = lines.pop()
        for line in lines:
            if not line or line == b"\r":
                continue
            if _bears_token(line):
                if not stream.instants:
                    self._first_token[index] = now_ns
                if len(stream.instants) < tokens_max:
                    stream.instants.append(now_ns)
            elif _FINISHED.search(line):
                stream.finished = True
            elif _ERROR.match(line):
                stream.fault = f"an error within the stream: {line[5:300].decode('utf-8', 'replace').strip()}"
            if b'"usage":' in line:
                stream.usage = line
        if len(stream.rest) > most_bytes:
            stream.rest, stream.fault = b"", f"an event of more than {most_bytes} bytes"

    def end(self, index: int, body: bytes | None = None) -> str:
        """Record the tokens of an answer that has ended; return what is wrong with the answer, such as `the stream
        ended before its last event`, "": nothing.

        `body`: the whole answer where it came in one piece, which may contain events; None: `take` got its pieces.
        """
        if body and body.startswith((b"data:", b"event:", b":", b"id:")) and index in self._in_flight:
            self.take(index, body)
            body = None
        stream = self._in_flight.pop(index, None)
        if stream is None:
            return ""
        columns = self._columns
        whole = body or stream.usage.removeprefix(b"data:") or stream.rest
        usage = _usage_of(whole)
        columns.prompt_tokens[index] = usage.get("prompt_tokens") or 0
        columns.output_tokens[index] = usage.get("completion_tokens") or 0
        if len(stream.instants) > 1:
            instants_ns = np.frombuffer(stream.instants, dtype=np.int64)
            gaps_ns = np.diff(instants_ns)
            columns.keep_gaps(gaps_ns, instants_ns[1:])
            columns.gap_p99[index] = int(np.sort(gaps_ns)[math.ceil(0.99 * len(gaps_ns)) - 1])
        if not self._first_token[index]:
            self._first_token[index] = _monotonic_ns()
        if stream.fault or stream.finished or usage:
            is_generated = stream.finished or b'"choices"' in whole
            if is_generated and not (stream.fault or stream.instants or _bears_token(whole)):
                columns.header[TEXTLESS] += 1
            return stream.fault
        if whole and not stream.instants and not whole.lstrip().startswith((b"data:", b"{")):
            return f"neither events nor JSON: {whole[:4_096].decode('utf-8', 'replace').strip()}"
        return error_within(whole) or "the stream ended before its last event"


def _bears_token(line: bytes) -> bool:
    """Whether an event has text for the user, of a chat or of a completion."""
    at = line.find(b'"content":')
    if at >= 0:
        begin = line[at + 10 : at + 13].lstrip()
        if begin[:1] == b'"' and begin[1:2] != b'"':
            return True
    return _OTHER_TEXT.search(line) is not None


def _usage_of(document: bytes) -> dict[str, int]:
    """Return the `usage` of an event or an answer: token counts by name; {} where it has none."""
    try:
        usage = orjson.loads(document)["usage"] if document else None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return usage if isinstance(usage, dict) else {}
