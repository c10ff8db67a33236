"""What happened to each request: the columns that a worker writes, and the samples that are made of them.

A worker's table is one anonymous shared memory per job: a header of counters, then one column per field. A worker
stores single elements through memoryviews (20 ns each, half of numpy's price); the parent reads the same memory as
numpy. A column entry of 0 means "not yet"; times are absolute CLOCK_MONOTONIC nanoseconds. Streamed answers have a
second table, of the gaps between their tokens, which is bounded: when it is full every second gap is dropped.
"""

from __future__ import annotations

import html
import math
import mmap
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from batchtune.wire.status import GRPC_NAMES

NEVER_NS = -1
COLUMNS = ("due_ns", "sent_ns", "first_byte_ns", "done_ns", "connection_wait_ns", "status", "rows")
TOKEN_COLUMNS = ("prompt_tokens", "output_tokens", "gap_p99_ns")

KEPT_MAX: Final = 20_000_000
"""Most requests of a load whose samples are returned one by one: computing with them takes 180 bytes each, 3.6 GB."""

Number = TypeVar("Number", int, float)


class Status(IntEnum):
    """How a request ended; every request that became due has exactly one."""

    OK = 0
    QUEUE_FULL = 1
    """The server's batching queue had no room, or it takes no more requests now: HTTP 429, or 503 with Retry-After."""
    EXPIRED = 2
    """It waited in the server's queue until its deadline."""
    TOO_LARGE = 3
    """More rows than the server's max_batch_size, or more bytes than it takes."""
    THREAD_POOL_EXHAUSTED = 4
    """The server had no thread to accept it (TF Serving's --grpc_max_threads)."""
    INVALID_REQUEST = 5
    """The server refuses this request as such: shape, type, name, authorisation."""
    TIMEOUT = 6
    """No answer within the client's timeout, or the server says that its own deadline passed."""
    RESET = 7
    """The connection or the stream was lost before the answer."""
    REFUSED = 8
    """No connection could be made."""
    MALFORMED = 9
    """The answer breaks the protocol, or does not decode."""
    WRONG_ANSWER = 10
    """It decodes, and it is not what was expected."""
    SERVER_ERROR = 11
    """Any other failure that the server reports."""
    UNFINISHED = 12
    """Still without an answer when the drain ended."""
    UNSENT = 13
    """It was due, and no connection or stream came free for it before the drain ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """What one of several workers spent in a job: `wall_s`, from the start until its last request ended, and `cpu_s` in
    it."""

    name: str
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streams:
    """The tokens of streamed answers, for n requests.

    `prompt_tokens`, `output_tokens` (n,): by the server's `usage`; 0 where it gave none. `gap_p99_ns` (n,): 0.99
    quantile of the request's own gaps between tokens; 0 with fewer than two tokens. `gaps_ns` (m,): one in
    `gaps_one_in` of the gaps of all requests; `gap_ended_ns` (m,): when each ended. `textless`: number of good answers
    of generated text that had no text.
    """

    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    gap_p99_ns: NDArray[np.int64]
    gaps_ns: NDArray[np.int64]
    gap_ended_ns: NDArray[np.int64]
    gaps_one_in: int = 1
    textless: int = 0

    def of_rows(self, rows: Any) -> Streams:
        """Return the token counts of the requests `rows`, an index or a slice; the gaps stay those of all requests."""
        return replace(self, **{name: getattr(self, name)[rows] for name in TOKEN_COLUMNS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One row per request that became due, in the order of due times.

    Times are nanoseconds from `started_ns` (CLOCK_MONOTONIC); NEVER_NS where it did not happen.
    `done_ns` is when the request ended in any way but UNFINISHED and UNSENT. `first_byte_ns` equals `done_ns` when the
    answer came in one piece, and for gRPC; for a streamed answer (`streams`) it is when the first token came.
    `connection_wait_ns` is how long a request waited for a free connection or stream: `sent_ns - due_ns -
    connection_wait_ns` is the client's own send lag.
    `wall_s` runs from the start until the last request ended; `client_cpu_s` is the CPU time of all workers in it.
    `pauses_ns`: (start, length) of each time that a worker stood still for longer than 5 ms (not for garbage
    collection, which is off). `worker` (n,): index in `workers` of the worker that sent the request; `endpoint` (n,):
    index in `endpoints`; None and () where there was only one. `one_in`: only one request in so many is here, drawn at
    random, and counts have to be multiplied by it; `failures`: then the number of all requests that got no good answer,
    else None.
    """

    due_ns: NDArray[np.int64]
    sent_ns: NDArray[np.int64]
    first_byte_ns: NDArray[np.int64]
    done_ns: NDArray[np.int64]
    connection_wait_ns: NDArray[np.int64]
    status: NDArray[np.uint8]
    rows: NDArray[np.int32]
    started_ns: int
    wall_s: float
    client_cpu_s: float
    client_cores: int
    concurrency: int | None = None
    offered_rps: float | None = None
    stopped_early: bool = False
    answers_checked: int = 0
    error_texts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    pauses_ns: tuple[tuple[int, int], ...] = ()
    worker: NDArray[np.uint16] | None = None
    workers: tuple[WorkerShare, ...] = ()
    endpoint: NDArray[np.uint16] | None = None
    endpoints: tuple[str, ...] = ()
    one_in: int = 1
    failures: int | None = None
    streams: Streams | None = None

    def __len__(self) -> int:
        return len(self.due_ns)

    @property
    def latency_ns(self) -> NDArray[np.int64]:
        """Latency from due to done, shape (n,), nanoseconds; NEVER_NS for a request that did not end."""
        latency_ns: NDArray[np.int64] = np.where(
            self.done_ns == NEVER_NS, NEVER_NS, self.done_ns - self.due_ns
        )
        return latency_ns

    @property
    def unanswered(self) -> NDArray[np.bool_]:
        """Which requests got no answer, not even an error, before their timeout or the end of the drain; shape (n,)."""
        return np.isin(self.status, (int(Status.UNFINISHED), int(Status.UNSENT), int(Status.TIMEOUT)))

    @property
    def fell_silent(self) -> bool:
        """Whether requests went unanswered, and no answer came in the second half of the load and its drain."""
        last_ns = np.max(self.done_ns, where=~self.unanswered, initial=0)
        return bool(self.unanswered.any() and last_ns < 0.5e9 * self.wall_s)

    @property
    def client_cpu_ratio(self) -> float:
        """Share of the client's CPU cores that was used, 0 to 1; 0 when nothing ran."""
        available_s = self.wall_s * self.client_cores
        return self.client_cpu_s / available_s if available_s > 0 else 0.0

    def between(self, first: int, last: int) -> Samples:
        """Return rows `first` to `last - 1`. Figures of the whole job stay as they are; the gaps between tokens, which
        are of all rows, go with the slice that begins at row 0."""
        rows = self._chosen(slice(first, last))
        if first and rows.streams is not None:  # the gaps are of all rows, and go with the first
            none = np.zeros(0, dtype=np.int64)
            rows = replace(rows, streams=replace(rows.streams, gaps_ns=none, gap_ended_ns=none))
        return rows

    def thinned(self, one_in: int) -> Samples:
        """Return the samples with one in `one_in` rows, drawn at random, and with `failures` set; `one_in` 1: all rows,
        unchanged."""
        if one_in == 1:
            return self
        failures = int(np.count_nonzero(self.status != Status.OK))
        return replace(self._chosen(drawn_rows(len(self), one_in)), one_in=one_in, failures=failures)

    def of_worker(self, number: int) -> Samples:
        """Return the samples of worker `number` as if it had been alone; without pauses, of which the worker is not
        recorded."""
        share = self.workers[number]
        return replace(
            self._chosen(np.flatnonzero(self.worker == number)),
            wall_s=share.wall_s,
            client_cpu_s=share.cpu_s,
            client_cores=1,
            pauses_ns=(),
            worker=None,
            workers=(),
        )

    def _chosen(self, rows: slice | NDArray[np.intp]) -> Samples:
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in COLUMNS}
        worker, endpoint = (None if of is None else of[rows] for of in (self.worker, self.endpoint))
        streams = None if self.streams is None else self.streams.of_rows(rows)
        return replace(self, **columns, worker=worker, endpoint=endpoint, streams=streams)

    def errors(self) -> dict[str, int]:
        """Return name of a status -> number of its requests, such as `{"TIMEOUT": 3}`, without OK and statuses that no
        request has."""
        counts = np.bincount(self.status, minlength=len(Status))
        return {
            status.name: int(counts[status])
            for status in Status
            if status is not Status.OK and counts[status]
        }


def kept_one_in(count: int, kept_max: int = KEPT_MAX) -> int:
    """Return the smallest n for which keeping one in n of `count` requests keeps at most `kept_max`."""
    return max(1, math.ceil(count / kept_max))


def drawn_rows(count: int, one_in: int) -> NDArray[np.int64]:
    """Draw one row number of each `one_in` consecutive ones of `count` rows; equal arguments give equal numbers.

    A fixed stride would always meet the same payloads.
    """
    firsts = np.arange(0, count, one_in)
    return firsts + np.random.default_rng(count).integers(0, np.minimum(one_in, count - firsts))


def joined(chunks: Sequence[Samples]) -> Samples:
    """Return the samples of one worker from its consecutive slices."""
    columns: dict[str, Any] = _concatenated(chunks, COLUMNS) | {"endpoint": _all_endpoints(chunks)}
    failures = _sum_or_none([chunk.failures for chunk in chunks])
    return replace(chunks[0], **columns, failures=failures, streams=_all_streams(chunks))


def merge_endpoints(parts: Sequence[Samples], endpoints: Sequence[str]) -> Samples:
    """Merge the samples that one worker recorded for several endpoints at once; one part for each of `endpoints`.

    The parts share one process, but each has its own list of that process's pauses: of these lists the one with the
    longest total is returned.
    """
    if len(parts) == 1:
        return parts[0]
    merged = merge(parts)
    return replace(
        merged,
        endpoint=merged.worker,
        endpoints=tuple(endpoints),
        worker=None,
        workers=(),
        client_cores=1,
        pauses_ns=max(
            (part.pauses_ns for part in parts), key=lambda pauses: sum(length for _, length in pauses)
        ),
    )


def _concatenated(parts: Sequence[Samples | Streams], names: Iterable[str]) -> dict[str, Any]:
    return {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}


def _all_endpoints(parts: Sequence[Samples]) -> NDArray[np.uint16] | None:
    columns = [part.endpoint for part in parts if part.endpoint is not None]
    return np.concatenate(columns) if len(columns) == len(parts) else None


def _all_streams(parts: Sequence[Samples]) -> Streams | None:
    """Concatenate the streams of all parts, gaps thinned to the coarsest `gaps_one_in`; None where a part has none."""
    streams = [part.streams for part in parts if part.streams is not None]
    if not streams or len(streams) < len(parts):
        return None
    one_in = max(part.gaps_one_in for part in streams)
    gaps = [
        (part.gaps_ns[:: one_in // part.gaps_one_in], part.gap_ended_ns[:: one_in // part.gaps_one_in])
        for part in streams
    ]
    return Streams(
        **_concatenated(streams, TOKEN_COLUMNS),
        gaps_ns=np.concatenate([gaps_ns for gaps_ns, _ in gaps]),
        gap_ended_ns=np.concatenate([ended_ns for _, ended_ns in gaps]),
        gaps_one_in=one_in,
        textless=sum(part.textless for part in streams),
    )


def merge(parts: Sequence[Samples], *, names: Sequence[str] = ()) -> Samples:
    """Merge the samples of several workers of one job, in the order of due times: every request, of the gaps between
    tokens one in as many as the part that has the fewest.

    `streams` and `endpoint` are None where a part has none; `endpoints` and `one_in` are those of the first part.
    `names`: of the workers; empty: "worker 0", "worker 1" …

    Raises:
        ValueError: no parts, or parts with different starts.
    """
    if not parts:
        raise ValueError("merge() needs at least one part")
    first, endpoint, streams = parts[0], _all_endpoints(parts), _all_streams(parts)
    if any(part.started_ns != first.started_ns for part in parts):
        raise ValueError("only parts with a common start can be merged")
    order = np.argsort(np.concatenate([part.due_ns for part in parts]), kind="stable")
    worker = np.repeat(np.arange(len(parts), dtype=np.uint16), [len(part) for part in parts])
    return Samples(
        **{name: own[order] for name, own in _concatenated(parts, COLUMNS).items()},
        started_ns=first.started_ns,
        wall_s=max(part.wall_s for part in parts),
        client_cpu_s=sum(part.client_cpu_s for part in parts),
        client_cores=sum(part.client_cores for part in parts),
        concurrency=_sum_or_none([part.concurrency for part in parts]),
        offered_rps=_sum_or_none([part.offered_rps for part in parts]),
        stopped_early=any(part.stopped_early for part in parts),
        answers_checked=sum(part.answers_checked for part in parts),
        error_texts={name: text for part in reversed(parts) for name, text in part.error_texts.items()},
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        pauses_ns=tuple(sorted(pause for part in parts for pause in part.pauses_ns)),
        worker=worker[order] if len(parts) > 1 else None,
        workers=_shares(parts, names) if len(parts) > 1 else (),
        endpoint=None if endpoint is None else endpoint[order],
        endpoints=first.endpoints,
        one_in=first.one_in,
        failures=_sum_or_none([part.failures for part in parts]),
        streams=None if streams is None else streams.of_rows(order),
    )


def _shares(parts: Sequence[Samples], names: Sequence[str]) -> tuple[WorkerShare, ...]:
    return tuple(
        WorkerShare(
            name=names[number] if names else f"worker {number}", wall_s=part.wall_s, cpu_s=part.client_cpu_s
        )
        for number, part in enumerate(parts)
    )


def _sum_or_none(values: list[Number | None]) -> Number | None:
    present = [value for value in values if value is not None]
    return sum(present[1:], start=present[0]) if present else None


# The class of failure of an answer.
#
# gRPC's codes and HTTP's are ambiguous: RESOURCE_EXHAUSTED (429) is an expired or full queue, a full thread pool, an
# oversized message or a lack of memory; UNAVAILABLE (503) is a full queue or a dead server. So the words decide first,
# then the code. The texts are those of TensorFlow Serving (servables, batching_util/basic_batch_scheduler.h, gRPC's
# server_cc.cc) and Triton.

_WORDS: Final = (
    ("batch scheduling queue", Status.QUEUE_FULL),
    ("queue is full", Status.QUEUE_FULL),
    ("all batch threads are busy", Status.QUEUE_FULL),
    ("exceeds maximum queue size", Status.QUEUE_FULL),
    ("waiting in batching queue", Status.EXPIRED),
    ("request timeout expired", Status.EXPIRED),
    ("threadpool exhausted", Status.THREAD_POOL_EXHAUSTED),
    ("thread pool exhausted", Status.THREAD_POOL_EXHAUSTED),
    ("task size", Status.TOO_LARGE),
    ("larger than max_batch_size", Status.TOO_LARGE),
    ("batch-size must be <=", Status.TOO_LARGE),
    ("message larger than max", Status.TOO_LARGE),
    ("out of memory", Status.SERVER_ERROR),
    ("oom when allocating", Status.SERVER_ERROR),
    ("failed to parse the request json", Status.INVALID_REQUEST),  # Triton says 500
    ("reset the stream", Status.RESET),
    ("did not process the stream", Status.RESET),
)


def of_grpc(code: int, text: str) -> Status:
    """Return the Status of a gRPC error by its status code, which is not 0, and its text."""
    status = _by_words(text)
    if status is not None:
        return status
    match GRPC_NAMES.get(code):
        case "RESOURCE_EXHAUSTED" if not text:  # TF Serving's older gRPC says nothing at all (issue #1795)
            return Status.THREAD_POOL_EXHAUSTED
        case "RESOURCE_EXHAUSTED":
            return Status.QUEUE_FULL
        case "DEADLINE_EXCEEDED":
            return Status.TIMEOUT
        case "INVALID_ARGUMENT" | "FAILED_PRECONDITION" | "OUT_OF_RANGE" | "NOT_FOUND" | "ALREADY_EXISTS":
            return Status.INVALID_REQUEST
        case "UNIMPLEMENTED" | "PERMISSION_DENIED" | "UNAUTHENTICATED":
            return Status.INVALID_REQUEST
        case _:
            return Status.SERVER_ERROR


def of_http(code: int, text: str, *, retry_after: bool = False) -> Status:
    """Return the Status of an HTTP answer that is an error, by its status code, its text, and whether it has a
    Retry-After."""
    status = _by_words(text)
    if status is not None:
        return status
    if code == 413:
        return Status.TOO_LARGE
    if code in {408, 504}:
        return Status.TIMEOUT
    if code == 429 or (code == 503 and retry_after):
        return Status.QUEUE_FULL
    return Status.INVALID_REQUEST if 300 <= code < 500 and code != 499 else Status.SERVER_ERROR


def http_words(code: int) -> str:
    """Name an HTTP status that is no success: `HTTP 503`, `HTTP 429 (too many requests)`."""
    return "HTTP 429 (too many requests)" if code == 429 else f"HTTP {code}"


def _with_page_named(text: str) -> str:
    """Return a text with the HTML page in it, if any, replaced by the page's title, else by its words."""
    page = re.search(r"(?is)<(!doctype html|html)\b.*", text[:4_096])  # its title is near its top
    if page is None:
        return text
    title = re.search(r"(?is)<title[^>]*>(.*?)</title>", page[0])
    words = re.sub(r"(?is)<(script|style)\b.*?</\1>|<[^>]*>", " ", title[1] if title else page[0])
    words = " ".join(html.unescape(words).split())
    return f"{text[: page.start()]}an HTML page: {words or 'without a word'}"


def error_within(document: bytes) -> str:
    """Describe the `error` in an answer whose status is one of success: `an error with a status of success:` and its
    first 300 bytes; "": it is no JSON object, or its `error` is absent, null or empty."""
    try:
        error = orjson.loads(document).get("error")
    except (orjson.JSONDecodeError, AttributeError):
        return ""
    return f"an error with a status of success: {document[:300].decode('utf-8', 'replace')}" if error else ""


def of_lost_connection(reason: str) -> Status:
    """Return the Status of requests whose HTTP/2 connection was lost for this reason: MALFORMED where it says
    `malformed` or `protocol`, else RESET."""
    lowered = reason.lower()
    return Status.MALFORMED if "malformed" in lowered or "protocol" in lowered else Status.RESET


def _by_words(text: str) -> Status | None:
    lowered = text.lower()
    return next((status for words, status in _WORDS if words in lowered), None)


# The table of one worker and job, in shared memory.

PENDING: Final = 0
"""Outcome of a request that has not ended; an ended one has its Status plus 1."""
ENDED: Final = 1
GOOD: Final = Status.OK + ENDED

ISSUED, OLDEST_PENDING, STARTED_NS, GAPS, GAP_STRIDE, TEXTLESS = 0, 1, 2, 3, 4, 5
"""Positions in the header: number of requests issued; index before which all requests have ended; start of the job
(ns); number of gaps in their table; of how many gaps in turn one is there; number of answers without text."""

GAPS_MAX: Final = 2_000_000
"""Most gaps between tokens that a worker records one by one: 32 MB."""

_HEADER_WORDS: Final = 16
_TIME_COLUMNS: Final = ("due", "sent", "first_byte", "done", "wait")
_TOKEN_COLUMNS: Final = ("prompt_tokens", "output_tokens", "gap_p99")


class Columns:
    """The columns `due`, `sent`, `first_byte`, `done`, `wait` (int64) and `outcome` (uint8), each of `capacity` rows.

    Times are in ns; `wait` is the time that a request spent without a connection. Memory is taken when rows are
    touched, not before. Where `gaps_max` > 0, for streamed answers, there are also `prompt_tokens`, `output_tokens` and
    `gap_p99` (ns, of the request's own gaps), and `gaps` (2, gaps_max): each gap in ns, and when it ended.
    """

    def __init__(self, file_descriptor: int, capacity: int, gaps_max: int = 0) -> None:
        """Map the memory behind `file_descriptor`, from `new_memory`; the descriptor may be closed after."""
        self.capacity = capacity
        self._memory = mmap.mmap(file_descriptor, size_bytes(capacity, gaps_max))
        self._view = memoryview(self._memory)
        self.header = self._int64(0, _HEADER_WORDS)
        first = _HEADER_WORDS
        self.due, self.sent, self.first_byte, self.done, self.wait = (
            self._int64(first + position * capacity, capacity) for position in range(len(_TIME_COLUMNS))
        )
        outcome_at = 8 * (first + len(_TIME_COLUMNS) * capacity)
        if gaps_max:
            tokens_at = first + len(_TIME_COLUMNS) * capacity
            self.prompt_tokens, self.output_tokens, self.gap_p99 = (
                self._int64(tokens_at + position * capacity, capacity)
                for position in range(len(_TOKEN_COLUMNS))
            )
            gaps_at = tokens_at + len(_TOKEN_COLUMNS) * capacity
            self.gaps = np.frombuffer(self._int64(gaps_at, 2 * gaps_max), dtype=np.int64).reshape(2, gaps_max)
            outcome_at = 8 * (gaps_at + 2 * gaps_max)
        self.outcome = self._view[outcome_at : outcome_at + capacity]

    def times(self, name: str) -> NDArray[np.int64]:
        """View the column `name` as an array over the same memory, shape (capacity,): `due`, `sent`, `first_byte`,
        `done` or `wait`, in ns; for streamed answers also `prompt_tokens`, `output_tokens`, `gap_p99`."""
        column: memoryview = getattr(self, name)
        return np.frombuffer(column, dtype=np.int64)

    def outcomes(self) -> NDArray[np.uint8]:
        """View the outcome column as an array over the same memory, shape (capacity,)."""
        return np.frombuffer(self.outcome, dtype=np.uint8)

    def keep_gaps(self, gaps_ns: NDArray[np.int64], ended_ns: NDArray[np.int64]) -> None:
        """Append the gaps of a stream and when each ended (ns). When the table is full, every second gap in it is
        dropped, and from then on only one in 2, 4, … gaps is appended."""
        header, table = self.header, self.gaps
        stride = header[GAP_STRIDE] or 1
        gaps_ns, ended_ns = gaps_ns[::stride], ended_ns[::stride]
        while header[GAPS] + len(gaps_ns) > table.shape[1]:
            left = table[:, : header[GAPS] : 2].copy()
            table[:, : left.shape[1]] = left
            header[GAPS], stride = left.shape[1], 2 * stride
            gaps_ns, ended_ns = gaps_ns[::2], ended_ns[::2]
        first, header[GAP_STRIDE] = header[GAPS], stride
        header[GAPS] = first + len(gaps_ns)
        table[0, first : header[GAPS]] = gaps_ns
        table[1, first : header[GAPS]] = ended_ns

    def prefault(self, rows: int) -> None:
        """Touch the first `rows` rows now, so that no page fault falls into the measurement."""
        step = mmap.PAGESIZE // 8
        for name in _TIME_COLUMNS:
            self.times(name)[: min(rows, self.capacity) : step] += 0

    def _int64(self, first_word: int, words: int) -> memoryview:
        return self._view[8 * first_word : 8 * (first_word + words)].cast("q")


def size_bytes(capacity: int, gaps_max: int = 0) -> int:
    """Return the bytes of memory that a table of `capacity` rows and `gaps_max` gaps takes."""
    columns = len(_TIME_COLUMNS) + (len(_TOKEN_COLUMNS) if gaps_max else 0)
    return 8 * (_HEADER_WORDS + columns * capacity + 2 * gaps_max) + max(capacity, 1)


def new_memory(capacity: int, gaps_max: int = 0) -> int:
    """Create zeroed memory for `Columns` and return its file descriptor; the caller closes it."""
    descriptor = os.memfd_create("batchtune-samples")
    os.ftruncate(descriptor, size_bytes(capacity, gaps_max))
    return descriptor


ERROR_TEXT_MAX_CHARS: Final = 500

_monotonic_ns = time.monotonic_ns


class Recorder:
    """Records failures, and answers to be checked; the outcome of a good answer is written by the clients themselves.

    `error_texts`: status -> its first text. `answers`: index of a request -> bytes of its answer.
    """

    def __init__(self, columns: Columns, *, check_every: int) -> None:
        """`check_every`: keep the bytes of one good answer in so many, to be decoded after the run; 0: of none."""
        self.columns = columns
        self.check_every = check_every
        self.error_texts: dict[Status, str] = {}
        self.answers: dict[int, bytes] = {}
        self.answers_bytes = 0

    def fail(self, index: int, status: Status, text: str) -> None:
        """End a pending request now with a failure; does nothing where it has ended. The first text of each status is
        recorded."""
        columns = self.columns
        if columns.outcome[index] != PENDING:
            return
        columns.done[index] = _monotonic_ns()
        columns.outcome[index] = status + ENDED
        self._keep_text(status, text)

    def keep_answer(self, index: int, answer: bytes) -> None:
        """Store the answer of request `index` for `check_answers` after the run; at most 2,000 answers and 64 MiB are
        stored."""
        checked_bytes_max = 64 * 1024 * 1024
        checked_answers_max = 2_000
        if not self.check_every:
            return
        if len(self.answers) < checked_answers_max and self.answers_bytes + len(answer) <= checked_bytes_max:
            self.answers[index] = answer
            self.answers_bytes += len(answer)

    def reject_answer(self, index: int, status: Status, text: str) -> None:
        """Turn an answer that was recorded as good into MALFORMED or WRONG_ANSWER, after the run."""
        self.columns.outcome[index] = status + ENDED
        self._keep_text(status, text)

    def _keep_text(self, status: Status, text: str) -> None:
        if status not in self.error_texts:
            self.error_texts[status] = _with_page_named(text)[:ERROR_TEXT_MAX_CHARS]
