"""Reads streamed answers of OpenAI-compatible servers: when each token came, and how many there were by `usage`.

An instant is taken for each server-sent event that bears a token, in the read that brought it. A line costs two
`bytes.find`: JSON is parsed once an answer, of the line that holds `usage` (tests/benchmarks/llm/chunk_cost.py).
"""

from __future__ import annotations

import math
import os
import re
import time
from array import array
from typing import Final

import numpy as np
import orjson

from batchtune.load.record.columns import Columns
from batchtune.scenario.prompts import UNIQUE_MARK

LINE_MAX_BYTES: Final = 1 << 20
"""Of one server-sent event, which holds a token or a few."""
TOKENS_MAX: Final = 1_000_000
"""Of one answer whose instants are recorded."""

_OTHER_TEXT: Final = re.compile(rb'"(?:text|reasoning_content|reasoning|arguments|refusal)":\s*"[^"]')
_CONTENT: Final = b'"content":'
_USAGE: Final = b'"usage":'
_ERROR: Final = re.compile(rb'^data:\s*\{"error"')
_FINISHED: Final = re.compile(rb'^data:\s*\[DONE\]|"finish_reason":\s*"')
_OWN_QUANTILE: Final = 0.99

_monotonic_ns = time.monotonic_ns


class _Stream:
    __slots__ = ("fault", "finished", "instants", "rest", "usage")

    def __init__(self) -> None:
        self.instants = array("q")
        self.rest = b""
        self.usage = b""
        self.fault = ""
        self.finished = False


class StreamReader:
    """The answers in flight, by the number of their request; each `begin` is followed by one `end` that counts."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._first_token = columns.first_byte
        self._in_flight: dict[int, _Stream] = {}
        self._unique = (time.time_ns() << 16 ^ os.getpid()) & (1 << 64) - 1

    def begin(self, index: int, request: bytes) -> bytes:
        """The bytes to send: each request that has the mark begins with words of its own, as long as the mark."""
        self._in_flight[index] = _Stream()
        own = b"%016x" % (self._unique + index * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
        return request.replace(UNIQUE_MARK, own, 1)

    def take(self, index: int, data: bytes) -> None:
        """Note the tokens in a piece of an answer."""
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
                if len(stream.instants) < TOKENS_MAX:
                    stream.instants.append(now_ns)
            elif _FINISHED.search(line):
                stream.finished = True
            elif _ERROR.match(line):
                stream.fault = f"an error within the stream: {line[5:300].decode('utf-8', 'replace').strip()}"
            if _USAGE in line:
                stream.usage = line
        if len(stream.rest) > LINE_MAX_BYTES:
            stream.rest, stream.fault = b"", f"an event of more than {LINE_MAX_BYTES} bytes"

    def end(self, index: int, body: bytes | None = None) -> str:
        """Record the tokens of an answer; `body`: it came whole. Returns what is wrong with it, "": nothing."""
        stream = self._in_flight.pop(index, None)
        if stream is None:
            return ""
        columns = self._columns
        usage = _usage_of(body or stream.usage.removeprefix(b"data:") or stream.rest)
        columns.prompt_tokens[index] = usage.get("prompt_tokens") or 0
        columns.output_tokens[index] = usage.get("completion_tokens") or 0
        if len(stream.instants) > 1:
            instants_ns = np.frombuffer(stream.instants, dtype=np.int64)
            gaps_ns = np.diff(instants_ns)
            columns.keep_gaps(gaps_ns, instants_ns[1:])
            columns.gap_p99[index] = int(np.sort(gaps_ns)[math.ceil(_OWN_QUANTILE * len(gaps_ns)) - 1])
        if not self._first_token[index]:
            self._first_token[index] = _monotonic_ns()
        if stream.fault or stream.finished or usage:
            return stream.fault
        return "the stream ended before its last event"


def _bears_token(line: bytes) -> bool:
    """Whether an event has text for the user, of a chat or of a completion."""
    at = line.find(_CONTENT)
    if at >= 0:
        begin = line[at + 10 : at + 13].lstrip()
        if begin[:1] == b'"' and begin[1:2] != b'"':
            return True
    return _OTHER_TEXT.search(line) is not None


def _usage_of(document: bytes) -> dict[str, int]:
    """The counts in an event or in an answer; none where it tells none."""
    try:
        usage = orjson.loads(document)["usage"] if document else None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return usage if isinstance(usage, dict) else {}
