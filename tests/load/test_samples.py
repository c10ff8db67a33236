"""Samples: how parts are dealt out, written to shared memory, read back and merged; exactly."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.load.fleet import LiveTable, LoadJob, live_of, rows_of, samples_of, split
from batchtune.load.samples import (
    ENDED,
    ISSUED,
    NEVER_NS,
    OLDEST_PENDING,
    Columns,
    Samples,
    Status,
    drawn_rows,
    kept_one_in,
    merge,
    new_memory,
    of_grpc,
    of_http,
    of_lost_connection,
)
from batchtune.load.worker_process import WorkerReport
from batchtune.scenario.arrivals import ClosedLoop, Schedule
from batchtune.wire.status import GRPC_CODES
from tests.load.load_servers import a_job, evenly, requests_for
from tests.measure.send_lag import send_lag_ns

pytestmark = pytest.mark.smoke

SECOND_NS = 1_000_000_000


def some_samples(due_ns: list[int], *, started_ns: int = 5, status: int = 0, text: str = "") -> Samples:
    due = np.array(due_ns, dtype=np.int64)
    return Samples(
        due_ns=due,
        sent_ns=due + 1,
        first_byte_ns=due + 2,
        done_ns=due + 3,
        connection_wait_ns=np.zeros_like(due),
        status=np.full(len(due), status, np.uint8),
        rows=np.arange(len(due), dtype=np.int32),
        started_ns=started_ns,
        wall_s=float(len(due)),
        client_cpu_s=0.5,
        client_cores=1,
        concurrency=2,
        error_texts={Status(status).name: text} if text else {},
        notes=("coarse",),
    )


def test_merging_interleaves_parts_by_due_time_and_adds_what_adds() -> None:
    merged = merge([some_samples([0, 20, 40], text="first"), some_samples([10, 30], text="second")])
    assert merged.due_ns.tolist() == [0, 10, 20, 30, 40]
    assert merged.sent_ns.tolist() == [1, 11, 21, 31, 41]
    assert merged.rows.tolist() == [0, 0, 1, 1, 2]
    assert merged.rows.dtype == np.int32
    assert merged.status.dtype == np.uint8
    assert (merged.wall_s, merged.client_cpu_s, merged.client_cores, merged.concurrency) == (3.0, 1.0, 2, 4)
    assert merged.error_texts == {"OK": "first"}
    assert merged.notes == ("coarse",)


@given(count=st.integers(0, 500), one_in=st.integers(1, 60))
def test_of_so_many_rows_in_turn_one_is_drawn(count: int, one_in: int) -> None:
    rows = drawn_rows(count, one_in)
    assert (rows // one_in).tolist() == list(range(-(-count // one_in)))
    assert (rows < count).all()


def test_rows_are_not_drawn_at_a_stride_that_payloads_may_have_nor_more_than_asked_for() -> None:
    assert np.bincount(drawn_rows(40_000, 4) % 4).min() > 2_300  # of 2,500 each; 1 in 100,000 by chance
    assert [kept_one_in(count, 100) for count in (0, 100, 101, 1000, 1001)] == [1, 1, 2, 10, 11]


def test_thinned_samples_know_how_many_of_all_failed() -> None:
    parts = [some_samples(list(range(begin, 100, 2))).thinned(5) for begin in (0, 1)]
    failed = some_samples(list(range(100)), status=Status.RESET).thinned(5)
    merged = merge([*parts, failed])
    assert (len(merged), merged.one_in, merged.failures) == (40, 5, 100)
    whole = some_samples([1, 2])
    assert whole.thinned(1) is whole


def test_parts_without_a_common_start_are_not_merged() -> None:
    with pytest.raises(ValueError, match="common start"):
        merge([some_samples([0]), some_samples([0], started_ns=6)])
    with pytest.raises(ValueError, match="at least one"):
        merge([])


def test_errors_are_counted_by_class_and_latency_runs_from_due() -> None:
    merged = merge([some_samples([0, 1]), some_samples([2], status=Status.RESET)])
    assert (merged.errors(), merged.latency_ns.tolist()) == ({"RESET": 1}, [3, 3, 3])
    assert merged.client_cpu_ratio == pytest.approx(1.0 / (2.0 * 2))


@given(
    count=st.integers(0, 60),
    workers=st.integers(1, 7),
    bodies=st.integers(1, 5),
    order=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_any_number_of_workers_sends_the_same_requests_at_the_same_times(
    count: int, workers: int, bodies: int, order: list[int], seed: int
) -> None:
    due_ns = np.sort(np.random.default_rng(seed).integers(0, SECOND_NS, count))
    schedule = Schedule(due_ns=due_ns, duration_s=1.0, offered_rps=float(count))
    requests = requests_for(
        "rest",
        bodies=tuple(b"%d" % one for one in range(bodies)),
        rows=tuple(range(1, bodies + 1)),
        order=np.array(order, dtype=np.int32) % bodies,
    )
    job = a_job("rest", 1, schedule, requests=requests)

    def sent(parts: int) -> list[tuple[int, int, int]]:
        found = []
        for part in split(job, parts):
            assert isinstance(part.arrivals, Schedule)
            due = part.arrivals.due_ns
            columns = (due, np.resize(part.request_order, len(due)), rows_of(part, len(due)))
            found += list(zip(*(column.tolist() for column in columns), strict=True))
        return sorted(found)

    assert sent(workers) == sent(1)
    assert [due for due, _, _ in sent(1)] == due_ns.tolist()


@given(users=st.integers(1, 40), workers=st.integers(1, 7), requests_max=st.integers(1, 500))
def test_users_and_requests_are_shared_out_exactly(users: int, workers: int, requests_max: int) -> None:
    loop = ClosedLoop(concurrency=users, duration_s=1.0, requests_max=requests_max)
    parts = [part.arrivals for part in split(a_job("grpc", 1, loop), workers)]
    closed = [part for part in parts if isinstance(part, ClosedLoop)]
    assert sum(part.concurrency for part in closed) == users
    assert sum(part.requests_max or 0 for part in closed) == requests_max
    assert max(part.concurrency for part in closed) - min(part.concurrency for part in closed) <= 1
    assert all(part.concurrency or not part.requests_max for part in closed)


def test_columns_are_the_same_memory_for_everyone_who_maps_them() -> None:
    descriptor = new_memory(10)
    ours, theirs = Columns(descriptor, 10), Columns(descriptor, 10)
    os.close(descriptor)
    theirs.sent[3] = 42
    theirs.outcome[3] = Status.RESET + ENDED
    theirs.header[ISSUED] = 4
    assert ours.times("sent").tolist() == [0, 0, 0, 42] + [0] * 6
    assert ours.outcomes()[3] == Status.RESET + ENDED
    assert ours.header[ISSUED] == 4
    ours.prefault(10)
    assert ours.times("sent")[3] == 42


def test_gathering_takes_what_was_issued_and_says_never_where_it_never_was(columns: Columns) -> None:
    start = 1000
    names = ("due", "sent", "first_byte", "done", "wait", "outcome")
    rows = [
        (start, start + 1, 0, start + 9, 0, Status.OK + ENDED),
        (start + 1, start + 2, start + 5, start + 9, 0, Status.OK + ENDED),
        (start + 2, 0, 0, start + 9, -77, Status.UNSENT + ENDED),
        (start + 3, start + 8, 0, 0, 4, 0),
    ]
    for index, row in enumerate(rows):
        for name, value in zip(names, row, strict=True):
            getattr(columns, name)[index] = value
    part = split(a_job("rest", 1, evenly(100, 1.0)), 1)[0]
    report = WorkerReport(
        issued=4, wall_s=1.0, cpu_s=0.1, stopped_early=False, answers_checked=0, error_texts={}, notes=()
    )
    samples = samples_of(columns, report, part, start)
    assert samples.due_ns.tolist() == [0, 1, 2, 3]
    assert samples.sent_ns.tolist() == [1, 2, NEVER_NS, 8]
    assert samples.first_byte_ns.tolist() == [9, 5, NEVER_NS, NEVER_NS]
    assert samples.done_ns.tolist() == [9, 9, NEVER_NS, NEVER_NS]
    assert samples.connection_wait_ns.tolist() == [0, 0, 0, 4]
    assert samples.status.tolist() == [Status.OK, Status.OK, Status.UNSENT, Status.UNFINISHED]
    assert send_lag_ns(samples).tolist() == [1, 1, 1]
    drawn = samples_of(columns, report, part, start, one_in=2)
    places = drawn.due_ns.tolist()
    assert [place // 2 for place in places] == [0, 1]
    assert (drawn.one_in, drawn.failures) == (2, 2)
    assert drawn.sent_ns.tolist() == samples.sent_ns[places].tolist()
    assert drawn.rows.tolist() == samples.rows[places].tolist()


@pytest.fixture
def now_ns(monkeypatch: pytest.MonkeyPatch) -> int:
    """The instant of every look, however long this machine pauses in between."""
    frozen_ns = 100 * SECOND_NS
    monkeypatch.setattr("batchtune.load.fleet.time", SimpleNamespace(monotonic_ns=lambda: frozen_ns))
    return frozen_ns


def test_the_live_aggregate_counts_each_request_once_in_any_order(columns: Columns, now_ns: int) -> None:
    start_ns = now_ns - SECOND_NS
    tables = [LiveTable(columns, overdue_after_s=0.1)]
    assert live_of(tables, start_ns).sent == 0
    for index in range(20):
        columns.due[index] = columns.sent[index] = start_ns + index * 1_000_000
    for index in (*range(5), *range(6, 15)):
        columns.outcome[index] = (Status.RESET if index == 9 else Status.OK) + ENDED
        columns.done[index] = columns.due[index] + (200_000_000 if index == 3 else 10_000_000)
    columns.header[ISSUED] = 20
    columns.header[OLDEST_PENDING] = 5
    for _ in range(2):
        live = live_of(tables, start_ns)
        assert (live.sent, live.done, live.errors, live.late) == (20, 14, 1, 1)
        assert (live.in_flight, live.overdue) == (6, 6)
        assert live.p50_s == pytest.approx(0.01)
    columns.outcome[5] = Status.OK + ENDED
    columns.done[5] = columns.due[5] + 500_000_000
    columns.header[OLDEST_PENDING] = 15
    live = live_of(tables, start_ns)
    assert (live.done, live.errors, live.late, live.in_flight) == (15, 1, 2, 5)
    assert live.throughput_rps > 0


def test_the_live_quantiles_forget_what_is_older_than_a_second(columns: Columns, now_ns: int) -> None:
    tables = [LiveTable(columns, overdue_after_s=1.0)]
    for index in range(10):
        columns.due[index] = now_ns - (5 * SECOND_NS if index < 5 else SECOND_NS // 10)
        columns.done[index] = columns.due[index] + (50_000_000 if index < 5 else 1_000_000)
        columns.outcome[index] = Status.OK + ENDED
    columns.header[ISSUED] = columns.header[OLDEST_PENDING] = 10
    live = live_of(tables, now_ns - 10 * SECOND_NS)
    assert live.p95_s == pytest.approx(0.001)
    assert live.throughput_rps == pytest.approx(5.0)
    assert live.done == 10


def test_a_look_at_a_worker_that_goes_on_meanwhile_counts_what_it_saw(columns: Columns, now_ns: int) -> None:
    """Between the two readings of its header the worker sends and settles three more requests."""
    header = MagicMock()
    header.__getitem__.side_effect = itertools.count(3, 3)
    for index in range(9):
        columns.due[index] = columns.done[index] = now_ns - SECOND_NS // 2
        columns.outcome[index] = Status.OK + ENDED
    seen = SimpleNamespace(times=columns.times, outcomes=columns.outcomes, header=header)
    tables = [LiveTable(seen, overdue_after_s=0.1)]  # type: ignore[arg-type]
    live = live_of(tables, now_ns - SECOND_NS)
    assert (live.sent, live.done, live.in_flight, live.overdue) == (6, 6, 0, 0)


FULL = "The batch scheduling queue to which this task was submitted is full; task size is 4 but …"
QUEUED = "Run() timeout exceeded while waiting in batching queue"
TRITON_FULL = "[request id: <id_unknown>] Exceeds maximum queue size"
TRITON_LARGE = "[request id: <id_unknown>] inference request batch-size must be <= 8 for 'm'"
TRITON_TYPE = "inference input 'X' data-type is 'INT32', but model 'm' expects 'FP32'"
TRITON_JSON = "failed to parse the request JSON buffer: Missing a name for object member. at 1"


@pytest.mark.parametrize(
    ("grpc_code", "http_code", "text", "status"),
    [
        ("UNAVAILABLE", 503, FULL, Status.QUEUE_FULL),
        ("UNAVAILABLE", 503, TRITON_FULL, Status.QUEUE_FULL),
        ("UNAVAILABLE", 503, "Request timeout expired", Status.EXPIRED),
        ("RESOURCE_EXHAUSTED", 429, QUEUED, Status.EXPIRED),
        ("UNAVAILABLE", 503, "Socket closed", Status.SERVER_ERROR),
        ("UNAVAILABLE", None, "the peer reset the stream: REFUSED_STREAM", Status.RESET),
        ("RESOURCE_EXHAUSTED", None, "", Status.THREAD_POOL_EXHAUSTED),
        ("RESOURCE_EXHAUSTED", None, "Server Threadpool Exhausted", Status.THREAD_POOL_EXHAUSTED),
        ("RESOURCE_EXHAUSTED", None, "Received message larger than max (9 vs. 4)", Status.TOO_LARGE),
        ("RESOURCE_EXHAUSTED", 429, "out of memory", Status.SERVER_ERROR),
        ("RESOURCE_EXHAUSTED", 429, "OOM when allocating tensor", Status.SERVER_ERROR),
        ("RESOURCE_EXHAUSTED", 429, "quota exceeded", Status.QUEUE_FULL),
        ("INVALID_ARGUMENT", 400, "Task size 9 is larger than maximum input batch size 4", Status.TOO_LARGE),
        ("INVALID_ARGUMENT", 400, "Task size 9 is larger than maximum batch size 4", Status.TOO_LARGE),
        ("INVALID_ARGUMENT", 400, TRITON_LARGE, Status.TOO_LARGE),
        ("INVALID_ARGUMENT", 400, TRITON_TYPE, Status.INVALID_REQUEST),
        ("NOT_FOUND", 404, "Request for unknown model: 'nope' is not found", Status.INVALID_REQUEST),
        ("NOT_FOUND", 404, "Could not find any versions of model m", Status.INVALID_REQUEST),
        ("UNAUTHENTICATED", 401, "who are you?", Status.INVALID_REQUEST),
        ("DEADLINE_EXCEEDED", 504, "Timed out waiting for notification", Status.TIMEOUT),
        ("INTERNAL", 500, TRITON_JSON, Status.INVALID_REQUEST),
        ("INTERNAL", 500, "Failed to process the request(s) for model 'm'", Status.SERVER_ERROR),
        (None, 413, "", Status.TOO_LARGE),
        (None, 408, "", Status.TIMEOUT),
        (None, 499, "", Status.SERVER_ERROR),
        (None, 302, "", Status.INVALID_REQUEST),
    ],
)
def test_words_decide_before_codes(
    grpc_code: str | None, http_code: int | None, text: str, status: Status
) -> None:
    if grpc_code is not None:
        assert of_grpc(GRPC_CODES[grpc_code], text) is status
    if http_code is not None:
        assert of_http(http_code, f'{{"error":"{text}"}}') is status


def test_what_a_refusal_to_come_back_to_and_a_lost_connection_are() -> None:
    assert of_http(503, "busy", retry_after=True) is Status.QUEUE_FULL
    assert of_lost_connection("PROTOCOL_ERROR: DATA before HEADERS") is Status.MALFORMED
    assert of_lost_connection("the peer closed the connection") is Status.RESET


def test_a_jobs_timeout_is_its_own_or_its_requests() -> None:
    requests = requests_for("rest", timeout_s=3.0)
    job = a_job("rest", 1, evenly(10, 1.0), requests=requests)
    assert split(job, 1)[0].timeout_s == 3.0
    shorter = LoadJob(endpoint=job.endpoint, requests=requests, arrivals=job.arrivals, timeout_s=1.5)
    part = split(shorter, 2)[1]
    assert (part.timeout_s, part.drain_s, part.in_flight_max) == (1.5, 1.5, 2048)
