"""Requests of a variable-length model wait by their length, and are padded only among their like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.model import Tensors
from batchtune.server.metrics import Metrics
from batchtune.server.sessions.bucketed_session import LengthBuckets
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


def test_a_batch_holds_the_lengths_of_one_bucket_and_is_padded_to_its_own_longest(
    serve: Serve,
) -> None:
    server = serve(zero_padding=True)
    answers = [server.ask(1), server.ask(1, 2), server.ask(1, 2, 3), server.ask(1, 2, 3, 4, 5), server.ask()]
    assert server.pool.queue_depths() == (3, 5)
    server.pool.close()
    assert sorted(server.batches) == [[[1, 0], [1, 2], [0, 0]], [[1, 2, 3]], [[1, 2, 3, 4, 5]]]
    assert [one.sums for one in answers] == [[1], [3], [6], [15], [0]]
    counted = {
        record.bucket: (record.rows, record.sent_elements, record.padding_elements)
        for record in server.observer.records
    }
    assert counted == {"2": (3, 3, 3), "4": (1, 3, 0), ">4": (1, 5, 0)}


def test_without_buckets_there_is_one_queue_as_in_the_reference(serve: Serve) -> None:
    server = serve(length_buckets=())
    assert not isinstance(server.session, LengthBuckets)
    answers = [server.ask(1), server.ask(1, 2, 3)]
    server.pool.close()
    assert server.batches == []  # as in TF Serving: shapes differ, and padding is off
    assert {one.error.code for one in answers if one.error is not None} == {"FAILED_PRECONDITION"}
    assert server.observer.records == []


def test_the_first_element_fills_up_as_in_the_reference_unless_zeros_are_asked_for(
    serve: Serve,
) -> None:
    server = serve()
    server.ask(7)
    server.ask(1, 2)
    server.pool.close()
    assert server.batches == [[[7, 7], [1, 2]]]


def test_every_bucket_has_its_own_limit_of_waiting_batches(serve: Serve) -> None:
    server = serve(zero_padding=True)
    for row in ((1,), (1, 2, 3)):
        server.ask(*row, rows=8)
        with pytest.raises(StatusError, match="max_enqueued_batches is 1") as caught:
            server.ask(*row)
        assert caught.value.code == "UNAVAILABLE"
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
def test_a_request_that_does_not_fit_the_signature_is_refused_as_without_buckets(
    serve: Serve, inputs: Any, words: str
) -> None:
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
    (record,) = server.observer.records
    assert (record.sent_elements, record.padding_elements, record.bucket) == (0, 0, "")


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
    lines = [line for line in metrics.render().splitlines() if "length_bucket_" in line and "#" not in line]
    assert sorted(line for line in lines if "execution_micros" not in line) == [
        ':batchtune:serving:length_bucket_batches_total{bucket="2"} 1',
        ':batchtune:serving:length_bucket_batches_total{bucket="4"} 1',
        ':batchtune:serving:length_bucket_padding_elements_total{bucket="2"} 1',
        ':batchtune:serving:length_bucket_padding_elements_total{bucket="4"} 0',
        ':batchtune:serving:length_bucket_rows_total{bucket="2"} 2',
        ':batchtune:serving:length_bucket_rows_total{bucket="4"} 1',
        ':batchtune:serving:length_bucket_sent_elements_total{bucket="2"} 3',
        ':batchtune:serving:length_bucket_sent_elements_total{bucket="4"} 3',
    ]


def test_the_words_of_a_model_name_the_buckets_that_it_has(serve: Serve) -> None:
    server = serve(zero_padding=True)
    assert in_words(server.settings, server.settings.parameters, server.session).endswith(
        "length_buckets 2,4"
    )
    for server in (serve(length_buckets=()), serve((None, 3))):
        assert "length_buckets" not in in_words(server.settings, server.settings.parameters, server.session)
