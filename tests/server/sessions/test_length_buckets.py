"""Requests of a variable-length model wait by their length, and are padded only among their like."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from batchtune.batching.parameters import (
    BUCKETS_MOST,
    BUCKETS_PAY_FROM,
    BatchingParameters,
    boundaries_for,
    rounded_up,
)
from batchtune.server.backends.model import Tensors
from batchtune.server.metrics import Metrics
from batchtune.server.sessions import bucketed_session as length_buckets
from batchtune.server.sessions.bucketed_session import (
    FIRST_REQUESTS,
    WINDOW_REQUESTS,
    LengthBuckets,
    LengthWindow,
    better_boundaries,
    computed_elements,
)
from batchtune.server.sessions.pool import BatchingSettings, Session, SessionPool, in_words
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError
from tests.server.sessions.session_fakes import Answer, Observer, deliver

Serve = Callable[..., "Server"]
LONG_US = 60_000_000
OPEN = (None, None)


def signature(*shapes: tuple[int | None, ...] | None) -> Signature:
    inputs = tuple(
        TensorSpec(name=name, dtype="int32", shape=shape) for name, shape in zip("xz", shapes, strict=False)
    )
    outputs = (TensorSpec(name="sum", dtype="int64", shape=(None,)),)
    return Signature(name="s", method_name="p", inputs=inputs, outputs=outputs)


class Server:
    """A pool whose batches wait until it is closed."""

    def __init__(self, of: Signature, observer: Any = None, **settings: Any) -> None:
        parameters = BatchingParameters(
            max_batch_size=8, batch_timeout_micros=LONG_US, num_batch_threads=1, max_enqueued_batches=1
        )
        self.observer: Any = observer or Observer()
        self.batches: list[list[list[int]]] = []
        self.settings = BatchingSettings(enabled=True, parameters=parameters, **settings)
        self.pool = SessionPool(self.settings, observer=self.observer, deliver=deliver)
        self.session: Session = self.pool.open(of, self.run, parameters=parameters, name="m/1/s")

    def run(self, inputs: Tensors) -> Tensors:
        self.batches.append(inputs["x"].tolist())
        return {"sum": inputs["x"].reshape(len(inputs["x"]), -1).sum(axis=1, dtype=np.int64)}

    def ask(self, *row: int, rows: int = 1) -> Answer:
        answer = Answer()
        self.session.submit({"x": np.array([row] * rows, np.int32)}, None, None, answer)
        return answer


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Makes servers with the buckets 2 and 4."""
    servers: list[Server] = []

    def make(*shapes: Any, **settings: Any) -> Server:
        servers.append(Server(signature(*(shapes or (OPEN,))), **{"length_buckets": (2, 4)} | settings))
        return servers[-1]

    yield make
    for server in servers:
        server.pool.close()


def counted(server: Server) -> dict[str, tuple[int, int, int]]:
    """Of each bucket its rows, sent elements, and elements of padding."""
    records = server.observer.records
    return {one.bucket: (one.rows, one.sent_elements, one.padding_elements) for one in records}


def test_a_batch_has_lengths_of_one_bucket_padded_to_its_longest(serve: Serve) -> None:
    server = serve(zero_padding=True)
    answers = [server.ask(1), server.ask(1, 2), server.ask(1, 2, 3), server.ask(1, 2, 3, 4, 5), server.ask()]
    assert server.pool.queue_depths() == (3, 5)
    server.pool.close()
    assert sorted(server.batches) == [[[1, 0], [1, 2], [0, 0]], [[1, 2, 3]], [[1, 2, 3, 4, 5]]]
    assert [one.sums for one in answers] == [[1], [3], [6], [15], [0]]
    assert counted(server) == {"2": (3, 3, 3), "4": (1, 3, 0), ">4": (1, 5, 0)}


def test_without_buckets_there_is_one_queue_as_in_the_reference(serve: Serve) -> None:
    server = serve(length_buckets=())
    assert not isinstance(server.session, LengthBuckets)
    answers = [server.ask(1), server.ask(1, 2, 3)]
    server.pool.close()
    # As in TF Serving: shapes differ, and padding is off.
    assert [str(one.error).partition(":")[0] for one in answers] == ["FAILED_PRECONDITION"] * 2
    assert (server.batches, server.observer.records) == ([], [])


def test_the_first_element_fills_up_as_in_the_reference_by_default(serve: Serve) -> None:
    server = serve()
    server.ask(7)
    server.ask(1, 2)
    server.pool.close()
    assert server.batches == [[[7, 7], [1, 2]]]


def test_every_bucket_has_its_own_limit_of_waiting_batches(serve: Serve) -> None:
    server = serve(zero_padding=True)
    for row in ((1,), (1, 2, 3)):
        server.ask(*row, rows=8)
        with pytest.raises(StatusError, match=r"^UNAVAILABLE: .*max_enqueued_batches is 1"):
            server.ask(*row)
    assert server.observer.rejections == ["queue_full"] * 2


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "at least one input tensor"),
        ({"y": np.ones((1, 1), np.int32)}, "does not conform"),
        ({"x": np.ones((), np.int32)}, "at least one dimension"),
        ({"x": np.ones((1, 1, 1), np.int32)}, "shape is wrong"),
        ({"x": np.ones((1, 3), np.float32)}, "to be int32 but float32"),
        ({"x": np.ones((9, 3), np.int32)}, "larger than maximum input batch size 8"),
    ],
)
def test_a_request_of_another_signature_is_refused(serve: Serve, inputs: Any, words: str) -> None:
    server = serve(zero_padding=True)
    with pytest.raises(StatusError, match=words):
        server.session.submit(inputs, None, None, Answer())


@pytest.mark.parametrize(
    ("shapes", "sizes", "bucket"),
    [
        ([(None, None, 9)], [(1, 2, 9)], "2"),  # a fixed size is no length
        ([(None, None, None)], [(1, 1, 3)], "4"),
        ([None], [(1, 5)], ">4"),  # of any rank
        ([None], [(1,)], "2"),
        ([OPEN, OPEN], [(1, 1), (1, 4)], "4"),  # the longest of all inputs
    ],
)
def test_the_length_is_the_largest_open_size(
    serve: Serve, shapes: list[Any], sizes: list[tuple[int, ...]], bucket: str
) -> None:
    server = serve(*shapes)
    inputs = {name: np.ones(size, np.int32) for name, size in zip("xz", sizes, strict=False)}
    server.session.submit(inputs, None, None, Answer())
    server.pool.close()
    assert [record.bucket for record in server.observer.records] == [bucket]


def test_a_model_of_one_length_has_one_queue_and_no_padding_to_count(serve: Serve) -> None:
    server = serve((None, 3))
    assert not isinstance(server.session, LengthBuckets)
    server.ask(1, 2, 3)
    server.pool.close()
    assert counted(server) == {"": (1, 0, 0)}


def test_a_version_that_ends_closes_every_bucket(serve: Serve) -> None:
    server = serve(zero_padding=True)
    answers = [server.ask(1), server.ask(1, 2, 3)]
    server.pool.forget(server.session)
    assert [one.times for one in answers] == [1, 1]
    with pytest.raises(StatusError, match="closed"):
        server.ask(1)
    assert server.pool.queue_depths() == (0, 0)


def test_rows_and_padding_are_told_by_bucket(serve: Serve) -> None:
    metrics = Metrics()
    server = serve(observer=metrics)
    for row in ((1,), (1, 2), (1, 2, 3)):
        server.ask(*row)
    server.pool.close()
    page = metrics.render()
    for name, values in {
        "batches": (1, 1),
        "padding_elements": (1, 0),
        "rows": (2, 1),
        "sent_elements": (3, 3),
    }.items():
        for bucket, value in zip("24", values, strict=True):
            assert f':batchtune:serving:length_bucket_{name}_total{{bucket="{bucket}"}} {value}\n' in page


def test_the_words_of_a_model_name_the_buckets_that_it_has(serve: Serve) -> None:
    for server, told in ((serve(), "2,4"), (serve(length_buckets=()), ""), (serve((None, 3)), "")):
        words = in_words(server.settings, server.settings.parameters, server.session)
        assert words.partition(", length_buckets ")[2] == told


FEW = 6


def fewest_elements(rows_by_length: dict[int, int], queues: int) -> float:
    """By trying every set of boundaries."""
    lengths = sorted(rows_by_length)[:-1]
    sets = itertools.chain.from_iterable(itertools.combinations(lengths, count) for count in range(queues))
    return min(_elements(rows_by_length, chosen) for chosen in sets)


def _elements(rows_by_length: dict[int, int], boundaries: tuple[int, ...]) -> float:
    ends = [*boundaries, max(rows_by_length)]
    return sum(rows * min(end for end in ends if end >= length) for length, rows in rows_by_length.items())


@pytest.mark.parametrize("seed", range(20))
def test_the_boundaries_have_the_fewest_elements_of_all_sets_there_are(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    count = int(drawn.integers(1, 9))
    lengths = drawn.choice(np.arange(1, 40), size=count, replace=False)
    rows_by_length = {int(length): int(drawn.integers(1, 50)) for length in lengths}
    most = int(drawn.integers(1, 6))
    chosen = boundaries_for(rows_by_length, most)
    elements = _elements(rows_by_length, chosen)
    assert len(chosen) < most
    assert list(chosen) == sorted(set(chosen) & set(rows_by_length))
    assert elements == fewest_elements(rows_by_length, len(chosen) + 1)
    assert elements == computed_elements(rows_by_length, chosen)
    enough = fewest_elements(rows_by_length, most) / (1.0 - BUCKETS_PAY_FROM)
    assert elements <= enough
    if chosen:  # and one queue less does not do
        assert fewest_elements(rows_by_length, len(chosen)) > enough


def test_boundaries_that_other_lengths_were_chosen_for_are_counted_up_to_the_longest_that_came() -> None:
    assert computed_elements({8: 2, 30: 1}, (10, 20, 64)) == 2 * 10 + 30
    assert computed_elements({8: 2, 30: 1}, ()) == 3 * 30
    assert computed_elements({}, (10,)) == 0
    assert better_boundaries({}, (10,)) == (10,)


def test_one_length_needs_no_boundary() -> None:
    assert better_boundaries({40: 1000}, ()) == ()
    assert better_boundaries({40: 1000, 41: 1}, ()) == ()


def test_whatever_lengths_come_a_histogram_has_some_hundred_bins() -> None:
    lengths = [*range(5000), *(1 << exponent for exponent in range(31)), 2**31 - 1]
    assert all(length <= rounded_up(length) <= max(1.0625 * length, 1) for length in lengths)
    assert all(rounded_up(rounded_up(length)) == rounded_up(length) for length in lengths)
    assert (
        len({rounded_up(2**exponent + step) for exponent in range(31) for step in range(33)}) <= 32 + 26 * 16
    )
    assert len({rounded_up(length) for length in range(32, 65)}) == 17


def test_the_same_traffic_keeps_its_boundaries_and_another_gets_its_own() -> None:
    drawn = np.random.default_rng(1)

    def lengths(median: float, count: int) -> dict[int, int]:
        values = np.clip(np.rint(median * np.exp(0.7 * drawn.normal(size=count))), 1, 256)
        return dict(Counter(rounded_up(int(length)) for length in values))

    first = better_boundaries(lengths(40, FIRST_REQUESTS), ())
    assert 2 <= len(first) < BUCKETS_MOST
    whole = lengths(40, 50_000)
    assert computed_elements(whole, first) < 1.05 * computed_elements(whole, boundaries_for(whole))
    present, changes = first, []
    for _ in range(20):
        before, present = present, better_boundaries(lengths(40, WINDOW_REQUESTS), present)
        changes.append(present != before)
    assert sum(changes) <= 2  # the first requests were few
    assert not any(changes[10:])
    assert better_boundaries({27: 1000, 43: 1000}, present) == (27,)


def test_a_window_ends_sooner_the_first_time() -> None:
    window = LengthWindow()
    assert [window.add(3, 2) for _ in range(FIRST_REQUESTS)].index(True) == FIRST_REQUESTS - 1
    assert window.take() == {3: 2 * FIRST_REQUESTS}
    assert [window.add(0, 1) for _ in range(WINDOW_REQUESTS)].index(True) == WINDOW_REQUESTS - 1
    assert window.take() == {1: WINDOW_REQUESTS}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """One that looks at six requests at once; a batch has room for eight."""
    monkeypatch.setattr(length_buckets, "FIRST_REQUESTS", FEW)
    monkeypatch.setattr(length_buckets, "WINDOW_REQUESTS", FEW)
    server = Server(signature(OPEN), Metrics(), length_buckets="auto", zero_padding=True)
    yield server
    server.pool.close()


def boundaries(server: Server) -> tuple[int, ...]:
    assert isinstance(server.session, LengthBuckets)
    return server.session.boundaries


def wait_for_old_queues() -> None:
    for thread in threading.enumerate():
        if thread.name == "leave_old_buckets":
            thread.join()


def test_new_boundaries_leave_what_waits_in_its_batch_and_part_what_comes_after(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [server.ask(1, 2) if number % 2 else server.ask(*range(20)) for number in range(FEW)]
    assert boundaries(server) == (2,)
    wait_for_old_queues()
    assert [len(batch) for batch in server.batches] == [FEW]  # as it was open, of both lengths
    assert all(answer.outputs is not None for answer in answers)
    answers = [server.ask(1, 2), server.ask(*range(20))]
    assert server.pool.queue_depths() == (2, 2)
    server.pool.close()
    assert sorted(len(batch[0]) for batch in server.batches[1:]) == [2, 20]
    assert all(answer.outputs is not None for answer in answers)
    assert (
        "length_buckets of m/1/s: 2 by the last 6 rows; 45 % less to compute than before where batches are full"
        in capsys.readouterr().err
    )


def test_boundaries_follow_the_traffic_and_are_told_by_the_metrics(server: Server) -> None:
    metrics: Metrics = server.observer
    metrics.queue_depths = server.pool.queue_depths
    metrics.length_boundaries = server.pool.length_boundaries
    for length in (2, 20, 2, 20, 2, 20, 40, 9, 40, 9, 40, 9):
        server.ask(*range(length))
        wait_for_old_queues()
    assert boundaries(server) == (9,)
    assert ':batchtune:serving:length_buckets{session="m/1/s",boundaries="9"} 1' in metrics.render()
    server.pool.close()
    text = metrics.render()
    assert ':batchtune:serving:length_bucket_rows_total{bucket=""} 6' in text
    assert ':batchtune:serving:length_bucket_rows_total{bucket="2"}' not in text
    assert ':batchtune:serving:length_bucket_rows_total{bucket=">2"} 6' in text


def test_a_version_that_ends_waits_for_the_queues_of_earlier_boundaries(server: Server) -> None:
    answers = [server.ask(1, 2) if number % 2 else server.ask(*range(20)) for number in range(FEW)]
    server.pool.forget(server.session)
    assert [answer.times for answer in answers] == [1] * FEW
    assert not [thread for thread in threading.enumerate() if thread.name == "leave_old_buckets"]
    assert server.pool.queue_depths() == (0, 0)


def test_requests_that_are_refused_are_not_counted(server: Server) -> None:
    for _ in range(2 * FEW):
        with pytest.raises(Exception, match="larger than maximum"):
            server.ask(1, 2, rows=9)
        with pytest.raises(Exception, match="larger than maximum"):
            server.ask(*range(20), rows=9)
    assert boundaries(server) == ()
