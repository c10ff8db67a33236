"""Requests through a batching session, rule by rule (B1-B16 of TF Serving's BatchingSession)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from batchtune.server.metrics import Metrics
from batchtune.server.scheduling.batch_queue import QueueOptions, SharedBatchScheduler
from batchtune.server.scheduling.retrier import BatchSchedulerRetrier, RetrierOptions
from batchtune.server.sessions.batched import BatchingSession, Completion
from batchtune.server.sessions.pool import BatchingSettings, SessionPool
from batchtune.server.sessions.unbatched import (
    HANDLERS_MAX,
    RequestThreads,
    UnbatchedSession,
    handlers_at_least,
)
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError
from tests.server.scheduling.manual_clock import ManualClock
from tests.server.sessions.session_fakes import Answer, Arrays, Observer, deliver

Make = Callable[..., "Session"]
Names = tuple[str, ...] | None
ONE = np.ones((1, 1), np.float32)


def signature(*inputs: TensorSpec, dtype: str = "float32") -> Signature:
    """x of any shape in, beside other inputs; `double` and `sum` out."""
    x = TensorSpec(name="x", dtype=dtype, shape=None)
    double = TensorSpec(name="double", dtype=dtype, shape=(None, 3))
    total = TensorSpec(name="sum", dtype=dtype, shape=(None,))
    return Signature(name="s", method_name="p", inputs=(x, *inputs), outputs=(double, total))


TWO_INPUTS = signature(TensorSpec(name="z", dtype="float32", shape=(None, None)))


def double_and_sum(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    x = inputs["x"]
    return {"double": x + x, "sum": x.sum(axis=1)}


class Session:
    """A session on a manual clock; `run` lets time pass and everything that waits be answered."""

    def __init__(
        self,
        *,
        runner: Callable[[Mapping[str, NDArray[Any]]], Arrays] = double_and_sum,
        of: Signature | None = None,
        length_padding: Any = "off",
        retrier: BatchSchedulerRetrier | None = None,
        clock: ManualClock | None = None,
        **options: Any,
    ) -> None:
        self.clock = clock or ManualClock()
        self.scheduler = SharedBatchScheduler(num_batch_threads=1, clock=self.clock)
        self.observer = Observer()
        self.seen: list[NDArray[Any]] = []
        self.deliveries: list[int] = []
        self.runner = runner
        self.session = BatchingSession(
            signature=of or signature(),
            runner=self._run,
            scheduler=self.scheduler,
            options=QueueOptions(**{"batch_timeout_micros": 1000, "max_batch_size": 16} | options),
            observer=self.observer,
            deliver=self.deliver,
            length_padding=length_padding,
            retrier=retrier,
        )

    def _run(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        self.seen.append(inputs["x"])
        return self.runner(inputs)

    def deliver(self, completions: Sequence[Completion]) -> None:
        self.deliveries.append(len(completions))
        deliver(completions)

    def submit(
        self, *rows: Any, outputs: Names = None, deadline_ns: int | None = None, inputs: Arrays | None = None
    ) -> Answer:
        answer = Answer()
        inputs = inputs if inputs is not None else {"x": np.array(rows, np.float32)}
        self.session.submit(inputs, outputs, deadline_ns, answer)
        return answer

    def refusal(self, inputs: Arrays) -> str:
        with pytest.raises(StatusError) as caught:
            self.submit(inputs=inputs)
        return str(caught.value)

    def run(self) -> None:
        self.session.close()

    def batches(self) -> list[Any]:
        return [x.tolist() for x in self.seen]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Session] = []

    def build(**kwargs: Any) -> Session:
        made.append(Session(**kwargs))
        return made[-1]

    yield build
    for session in made:
        session.scheduler.close()


SHAPES_DIFFER = (
    "FAILED_PRECONDITION: Tensors with name 'x' from different tasks have different shapes and padding is turned off. "
    "Set pad_variable_length_inputs to true, or ensure that all tensors with the same name have equal dimensions "
    "starting with the first dim."
)
EMPTY = "INVALID_ARGUMENT: Got empty tensor in batch of non-empty tensors."
RANK = "INVALID_ARGUMENT: Only tensors with rank from 1 to 6 can be padded."
SPLIT = {"enable_large_batch_splitting": True, "max_execution_batch_size": 2, "max_batch_size": 8}
FIRST, ZERO = {"length_padding": "first_element"}, {"length_padding": "zero"}
RANK_7 = [[[[[[[1.0]]]]]]]


@pytest.mark.parametrize(
    ("options", "requests", "batches", "sums"),
    [
        # Rows are padded with the first row of the last request, unless the size is allowed.
        (
            {"allowed_batch_sizes": (2, 6, 16)},
            [[[1, 1]], [[2, 2], [3, 3]]],
            [[[1, 1], [2, 2], [3, 3], [2, 2], [2, 2], [2, 2]]],
            [[2], [4, 6]],
        ),
        ({"allowed_batch_sizes": (2, 16)}, [[[1], [2]]], [[[1], [2]]], [[1, 2]]),
        # Different shapes and ranks fail the whole batch where lengths are not padded.
        ({}, [[[1, 2]], [[1, 2, 3]]], [], [SHAPES_DIFFER] * 2),
        ({}, [[[1, 2]], [[[1, 2]]]], [], [SHAPES_DIFFER] * 2),
        # Lengths are padded at the end to the longest, in every dimension but the first.
        (FIRST, [[[7, 8]], [[1, 2, 3, 4]]], [[[7, 8, 7, 7], [1, 2, 3, 4]]], [[29], [10]]),
        (ZERO, [[[7, 8]], [[1, 2, 3, 4]]], [[[7, 8, 0, 0], [1, 2, 3, 4]]], [[15], [10]]),
        (
            FIRST,
            [[[[5, 5, 5]]], [[[6], [6]]]],
            [[[[5, 5, 5], [5, 5, 5]], [[6, 6, 6], [6, 6, 6]]]],
            [[[10, 10, 10]], [[12, 12, 12]]],
        ),
        (FIRST, [[[]], [[1, 2]]], [], [EMPTY] * 2),
        (FIRST, [RANK_7] * 2, [], [RANK] * 2),
        # A split request is put together again in order.
        (
            SPLIT,
            [[[1]], [[2], [3], [4], [5], [6]]],
            [[[1], [2]], [[3], [4]], [[5], [6]]],
            [[1], [2, 3, 4, 5, 6]],
        ),
    ],
)
def test_requests_become_batches(
    make: Make, options: dict[str, Any], requests: list[Any], batches: list[Any], sums: list[Any]
) -> None:
    session = make(**options)
    answers = [session.submit(*request) for request in requests]
    session.run()
    assert session.batches() == batches
    assert [answer.sums for answer in answers] == sums
    assert [answer.times for answer in answers] == [1] * len(answers)
    assert sum(session.deliveries) == len(answers)


def test_requests_run_together_and_each_gets_its_own_rows(make: Make) -> None:
    session = make()
    first = session.submit([1, 2, 3])
    second = session.submit([4, 5, 6], [7, 8, 9])
    session.run()
    assert session.batches() == [[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]
    assert first.plain == {"double": [[2, 4, 6]], "sum": [6]}
    assert second.plain == {"double": [[8, 10, 12], [14, 16, 18]], "sum": [15, 24]}
    assert session.deliveries == [2]


def test_one_record_describes_each_batch(make: Make) -> None:
    session = make(allowed_batch_sizes=(4, 16))
    session.submit([1, 2])
    session.clock.advance(300)
    session.submit([3, 4], [5, 6])
    session.clock.advance(700)
    session.run()
    (record,) = session.observer.records
    assert (record.rows, record.padded_rows, record.input_tensors) == (3, 4, 1)
    assert (list(record.task_rows), list(record.queue_wait_micros)) == ([1, 2], [1000, 700])
    assert record.close_reason == "timeout"
    assert record.execution_micros >= 0


def test_a_single_request_that_needs_no_padding_is_passed_on_without_a_copy(make: Make) -> None:
    session = make()
    x = np.array([[1, 2]], np.float32)
    session.submit(inputs={"x": x})
    session.run()
    assert session.seen[0] is x


NO_DIMENSION = "INVALID_ARGUMENT: Batching Run() input tensors must have at least one dimension"
UNEQUAL = "INVALID_ARGUMENT: Batching Run() input tensors must have equal 0th-dimension size"
NOT_FLOAT32 = "INVALID_ARGUMENT: Expects arg[0] to be float32 but float64 is provided"
OTHER_SIGNATURE = "INTERNAL: Task does not conform to batch signature"
TOO_LARGE = "INVALID_ARGUMENT: Task size 17 is larger than maximum input batch size 16"


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "INVALID_ARGUMENT: Batching Run() must have at least one input tensor"),
        ({"x": np.float32(1).reshape(()), "z": ONE}, NO_DIMENSION),
        ({"x": np.ones((2, 1), np.float32), "z": ONE}, UNEQUAL),
        ({"x": ONE.astype(np.float64), "z": ONE}, NOT_FLOAT32),
        ({"x": ONE, "y": ONE}, OTHER_SIGNATURE),
        ({"x": ONE, "y": ONE, "z": ONE}, OTHER_SIGNATURE),
        ({"x": ONE}, OTHER_SIGNATURE),
        ({"x": ONE.repeat(17, 0), "z": ONE.repeat(17, 0)}, TOO_LARGE),
    ],
)
@pytest.mark.parametrize("known", [False, True], ids=["at first", "after one that passed"])
def test_a_bad_request_is_refused_at_once(make: Make, inputs: Arrays, said: str, known: bool) -> None:
    session = make(of=TWO_INPUTS)
    for _ in range(2 * known):
        session.submit(inputs={"x": ONE, "z": ONE})
    assert session.refusal(inputs) == said
    assert session.session.queue_depth == (known, 2 * known)


def test_a_refusal_of_the_queue_reaches_the_caller_and_is_counted(make: Make) -> None:
    session = make(max_batch_size=2, max_enqueued_batches=1, batch_timeout_micros=10**9)
    assert session.refusal({"x": ONE.repeat(3, 0)}).startswith("INVALID_ARGUMENT")
    session.submit([1])
    assert session.refusal({"x": ONE.repeat(2, 0)}).startswith("UNAVAILABLE")
    assert session.observer.rejections == ["too_large", "queue_full"]
    assert session.session.queue_depth == (1, 1)


def test_a_batch_whose_requests_have_all_expired_is_not_run(make: Make) -> None:
    session = make()
    answers = [session.submit([1], deadline_ns=500_000), session.submit([2], deadline_ns=1_000_000)]
    session.clock.advance(1000)
    session.run()
    late = "RESOURCE_EXHAUSTED: Run() timeout exceeded while waiting in batching queue"
    assert [answer.plain for answer in answers] == [late] * 2
    assert (session.seen, session.observer.records) == ([], [])
    assert session.observer.rejections == ["expired", "expired"]


@pytest.mark.parametrize("other_deadline_ns", [None, 1_000_001])
def test_one_live_request_makes_the_whole_batch_run(make: Make, other_deadline_ns: int | None) -> None:
    session = make()
    answers = [session.submit([1], deadline_ns=500_000), session.submit([2], deadline_ns=other_deadline_ns)]
    session.clock.advance(1000)
    session.run()
    assert [answer.sums for answer in answers] == [[1], [2]]
    assert session.batches() == [[[1], [2]]]


def test_strings_are_concatenated_and_padded(make: Make) -> None:
    session = make(
        of=signature(dtype="object"),
        length_padding="first_element",
        allowed_batch_sizes=(4, 16),
        runner=lambda inputs: {"double": inputs["x"], "sum": inputs["x"][:, 0]},
    )
    short = session.submit(inputs={"x": np.array([[b"a"]], object)})
    session.submit(inputs={"x": np.array([[b"bb", b"ccc"]], object)})
    session.run()
    assert session.batches() == [[[b"a", b"a"], *[[b"bb", b"ccc"]] * 3]]
    assert short.plain == {"double": [[b"a", b"a"]], "sum": [b"a"]}


NO_ROWS = "FAILED_PRECONDITION: Batched output tensor has 0 dimensions"
OTHER_ROWS = (
    "FAILED_PRECONDITION: Batched output tensor's 0th dimension does not equal the sum of the 0th dimension sizes of "
    "the input tensors"
)


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"double": np.float32(1).reshape(()), "sum": np.float32(1).reshape(())}, NO_ROWS),
        ({"double": ONE.repeat(3, 0), "sum": ONE.repeat(3, 0)}, OTHER_ROWS),
        ({"double": ONE.repeat(5, 0), "sum": ONE.repeat(5, 0)}, OTHER_ROWS),
        ({"sum": ONE.repeat(4, 0)}, "INTERNAL: Wrong number of batched output tensors"),
    ],
)
def test_wrong_outputs_fail_the_whole_batch(make: Make, outputs: Arrays, said: str) -> None:
    session = make(runner=lambda inputs: outputs, allowed_batch_sizes=(4, 16))
    answers = [session.submit([1]), session.submit([2], [3])]
    session.run()
    assert [answer.plain for answer in answers] == [said] * 2


def test_requests_for_other_outputs_have_a_queue_of_their_own_and_the_order_is_each_one_s(make: Make) -> None:
    session = make()
    answers = [
        session.submit([1]),
        session.submit([2], outputs=("sum",)),
        session.submit([3], outputs=("sum",)),
        session.submit([4], outputs=("sum", "double")),
        session.submit([5], outputs=("double", "sum")),
    ]
    session.run()
    assert sorted(session.batches()) == [[[1], [4], [5]], [[2], [3]]]
    both = ["double", "sum"]
    assert [list(answer.outputs or ()) for answer in answers] == [both, ["sum"], ["sum"], both[::-1], both]
    assert [answer.sums for answer in answers] == [[1], [2], [3], [4], [5]]
    with pytest.raises(StatusError, match="does not conform"):
        session.submit([1], outputs=("nothing",))


def test_an_error_of_the_model_reaches_every_request(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        raise StatusError("RESOURCE_EXHAUSTED", "out of memory") if len(inputs["x"]) > 1 else KeyError("bug")

    session = make(runner=run)
    answers = [session.submit([1]), session.submit([2])]
    session.clock.advance(1000)
    answers.append(session.submit([3]))
    session.run()
    memory = "RESOURCE_EXHAUSTED: out of memory"
    assert [answer.plain for answer in answers] == [memory, memory, "INTERNAL: KeyError: 'bug'"]
    assert [record.rows for record in session.observer.records] == [2, 1]
    assert "a batch of 1 rows failed" in caplog.text


def test_one_failing_part_fails_a_split_request_once_all_parts_are_done(make: Make) -> None:
    def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        if 3 in inputs["x"]:
            raise StatusError("INTERNAL", "three")
        return double_and_sum(inputs)

    session = make(runner=run, **SPLIT)
    large = session.submit([1], [2], [3], [4], [5])
    session.run()
    assert (large.plain, large.times, len(session.seen)) == ("INTERNAL: three", 1, 3)


def test_a_request_without_rows_is_answered_at_once_with_empty_outputs(make: Make) -> None:
    session = make()
    answer = session.submit(inputs={"x": np.empty((0, 5), np.float32)})
    assert answer.outputs is not None
    assert (answer.outputs["double"].shape, answer.outputs["sum"].shape) == ((0, 3), (0,))
    assert answer.outputs["double"].dtype == np.float32
    assert session.seen == []


def test_allowed_sizes_are_checked_as_the_model_server_does(make: Make) -> None:
    said = "INVALID_ARGUMENT: Last entry in allowed_batch_sizes must match max_batch_size; last entry was 4; expected 8"
    with pytest.raises(StatusError, match=said):
        make(**SPLIT, allowed_batch_sizes=(2, 4))


def test_a_full_queue_is_retried_when_a_retrier_is_given(make: Make) -> None:
    clock = ManualClock()
    retrier = BatchSchedulerRetrier(RetrierOptions(max_time_micros=500, retry_delay_micros=100), clock=clock)
    gate, entered = threading.Event(), threading.Semaphore(0)

    def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        entered.release()
        gate.wait(10)
        return double_and_sum(inputs)

    one_waits = {"max_batch_size": 1, "max_enqueued_batches": 1, "batch_timeout_micros": 10**9}
    session = make(runner=run, clock=clock, retrier=retrier, **one_waits)
    running = session.submit([1])
    assert entered.acquire(timeout=10)
    waiting, refused = session.submit([2]), session.submit([3])
    for _ in range(6):
        clock.advance(100)
    assert str(refused.error).startswith("UNAVAILABLE: ")
    assert session.observer.rejections == ["queue_full"]
    retried = session.submit([4])
    gate.set()
    assert entered.acquire(timeout=10)
    while not retried.times:
        clock.advance(50)
    session.run()
    assert [answer.sums for answer in (running, waiting, retried)] == [[1], [2], [4]]
    retrier.close()


def test_without_batching_each_request_runs_alone_and_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        seen.append(len(inputs["x"]))
        match inputs["x"].max(initial=0):
            case 1:
                raise StatusError("FAILED_PRECONDITION", "one")
            case 2:
                raise RuntimeError("two")
            case 3:
                return {}
            case _:
                return double_and_sum(inputs)

    threads = RequestThreads(1)
    session = UnbatchedSession(
        signature=signature(), runner=run, threads=threads, observer=Metrics(), deliver=deliver
    )
    requests: list[tuple[int, int, Names, int | None]] = [
        *((rows, 9, None, None) for rows in (0, 1, 4)),
        (5, 9, ("sum",), None),
        *((1, number, None, None) for number in (1, 2, 3)),
        (1, 4, None, 1),
    ]
    answers = [Answer() for _ in requests]
    for (rows, number, outputs, deadline_ns), answer in zip(requests, answers, strict=True):
        session.submit({"x": np.full((rows, 2), number, np.float32)}, outputs, deadline_ns, answer)
    threads.close()
    assert seen == [0, 1, 4, 5, 1, 1, 1]
    assert [answer.sums for answer in answers[:4]] == [[], [18], [18] * 4, [18] * 5]
    assert [list(answer.outputs or ()) for answer in answers[2:4]] == [["double", "sum"], ["sum"]]
    codes = [answer.error.code for answer in answers if answer.error]
    assert codes == ["FAILED_PRECONDITION", "INTERNAL", "INTERNAL", "DEADLINE_EXCEEDED"]
    assert "RuntimeError: two" in caplog.text
    with pytest.raises(StatusError, match="UNAVAILABLE"):
        session.submit({}, None, None, Answer())


def test_shapes_are_remembered_up_to_a_bound(make: Make) -> None:
    session = make(max_enqueued_batches=1000)
    for columns in range(200):
        session.submit(inputs={"x": np.ones((1, columns), np.float32)})
    assert len(session.session._rows_by_shape) == 64


def test_a_model_that_batches_inside_gets_as_many_requests_at_once_as_it_waits_for() -> None:
    """Every run waits for all the others, as in a batch of the graph that closes when it is full."""
    count = handlers_at_least() + 5
    together = threading.Barrier(count)

    def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        together.wait(10)
        return double_and_sum(inputs)

    pool = SessionPool(BatchingSettings(), observer=Metrics(), deliver=deliver)
    session = pool.open(signature(), run, parameters=None, at_once=count)
    answers = [Answer() for _ in range(count)]
    for answer in answers:
        session.submit({"x": ONE}, None, None, answer)
    pool.close()
    assert [answer.error for answer in answers] == [None] * count


@pytest.mark.parametrize(("at_once", "expected"), [(0, handlers_at_least()), (10**9, HANDLERS_MAX)])
def test_other_models_have_the_usual_threads_and_none_has_any_number(at_once: int, expected: int) -> None:
    pool = SessionPool(BatchingSettings(), observer=Metrics(), deliver=deliver)
    pool.open(signature(), lambda inputs: inputs, parameters=None, at_once=at_once)
    assert list(pool._handlers) == [expected]
    pool.close()
