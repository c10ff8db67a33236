"""Requests through a batching session, rule by rule (B1-B16 of TF Serving's BatchingSession)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from batchtune.server.metrics import Metrics
from batchtune.server.scheduling.batch_queue import QueueOptions, SharedBatchScheduler
from batchtune.server.scheduling.retrier import BatchSchedulerRetrier, RetrierOptions
from batchtune.server.sessions.batched import BatchingSession, BatchRecord, Completion
from batchtune.server.sessions.unbatched import RequestThreads, UnbatchedSession
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError
from tests.server.scheduling.manual_clock import ManualClock

Arrays = dict[str, NDArray[Any]]


def signature(*, dtype: str = "float32", two_inputs: bool = False) -> Signature:
    """x (and z) in, `double` and `sum` out, of any length."""
    inputs = [TensorSpec(name="x", dtype=dtype, shape=None)]
    if two_inputs:
        inputs.append(TensorSpec(name="z", dtype=dtype, shape=(None, None)))
    outputs = (
        TensorSpec(name="double", dtype=dtype, shape=(None, 3)),
        TensorSpec(name="sum", dtype=dtype, shape=(None,)),
    )
    return Signature(name="s", method_name="p", inputs=tuple(inputs), outputs=outputs)


def double_and_sum(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    x = inputs["x"]
    return {"double": x + x, "sum": x.sum(axis=1)}


class Answer:
    """Where the answer to one request arrives."""

    def __init__(self) -> None:
        self.outputs: Arrays | None = None
        self.error: StatusError | None = None
        self.times = 0

    def __call__(self, outputs: Arrays | None, error: StatusError | None) -> None:
        self.outputs, self.error = outputs, error
        self.times += 1


class Observer:
    def __init__(self) -> None:
        self.records: list[BatchRecord] = []
        self.rejections: list[str] = []

    def on_batch(self, record: BatchRecord) -> None:
        self.records.append(record)

    def on_rejected(self, reason: str) -> None:
        self.rejections.append(reason)


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
        self.seen: list[Arrays] = []
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
        self.seen.append(dict(inputs))
        return self.runner(inputs)

    def deliver(self, completions: list[Completion]) -> None:
        self.deliveries.append(len(completions))
        for done, outputs, error in completions:
            done(outputs, error)

    def submit(
        self,
        *rows: Any,
        outputs: tuple[str, ...] | None = None,
        deadline_ns: int | None = None,
        inputs: Arrays | None = None,
    ) -> Answer:
        answer = Answer()
        self.session.submit(
            inputs if inputs is not None else {"x": np.array(rows, np.float32)}, outputs, deadline_ns, answer
        )
        return answer

    def run(self) -> None:
        self.session.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Session]]:
    made: list[Session] = []

    def build(**kwargs: Any) -> Session:
        made.append(Session(**kwargs))
        return made[-1]

    yield build
    for session in made:
        session.scheduler.close()


def refusal(submit: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(StatusError) as caught:
        submit()
    return caught.value.code, caught.value.message


def failure(answer: Answer) -> tuple[str, str]:
    assert answer.outputs is None
    assert answer.error is not None
    return answer.error.code, answer.error.message


def test_requests_run_together_and_each_gets_its_own_rows(make: Callable[..., Session]) -> None:
    session = make()
    first = session.submit([1, 2, 3])
    second = session.submit([4, 5, 6], [7, 8, 9])
    session.run()
    assert [one["x"].tolist() for one in session.seen] == [[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]
    assert first.outputs is not None
    assert second.outputs is not None
    assert list(first.outputs) == ["double", "sum"]
    assert first.outputs["double"].tolist() == [[2, 4, 6]]
    assert second.outputs["sum"].tolist() == [15, 24]
    assert (first.times, second.times, session.deliveries) == (1, 1, [2])


def test_one_record_describes_each_batch(make: Callable[..., Session]) -> None:
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


def test_a_single_request_that_needs_no_padding_is_passed_on_without_a_copy(
    make: Callable[..., Session],
) -> None:
    session = make()
    x = np.array([[1, 2]], np.float32)
    session.submit(inputs={"x": x})
    session.run()
    assert session.seen[0]["x"] is x


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "Batching Run() must have at least one input tensor"),
        (
            {"x": np.float32(1).reshape(()), "z": np.ones((1, 1), np.float32)},
            "Batching Run() input tensors must have at least one dimension",
        ),
        (
            {"x": np.ones((2, 1), np.float32), "z": np.ones((1, 1), np.float32)},
            "Batching Run() input tensors must have equal 0th-dimension size",
        ),
        (
            {"x": np.ones((1, 1), np.float64), "z": np.ones((1, 1), np.float32)},
            "Expects arg[0] to be float32 but float64 is provided",
        ),
    ],
)
def test_a_bad_request_is_refused_before_it_is_queued(
    make: Callable[..., Session], inputs: Arrays, message: str
) -> None:
    session = make(of=signature(two_inputs=True))
    assert refusal(lambda: session.submit(inputs=inputs)) == ("INVALID_ARGUMENT", message)
    assert session.session.queue_depth == (0, 0)


def test_inputs_of_another_signature_are_refused(make: Callable[..., Session]) -> None:
    session = make()
    one = np.ones((1, 1), np.float32)
    for inputs in ({"y": one}, {"x": one, "y": one}):
        assert refusal(lambda inputs=inputs: session.submit(inputs=inputs)) == (
            "INTERNAL",
            "Task does not conform to batch signature",
        )


def test_a_refusal_of_the_queue_reaches_the_caller_and_is_counted(make: Callable[..., Session]) -> None:
    session = make(max_batch_size=2, max_enqueued_batches=1, batch_timeout_micros=10**9)
    assert refusal(lambda: session.submit([1], [2], [3])) == (
        "INVALID_ARGUMENT",
        "Task size 3 is larger than maximum input batch size 2",
    )
    session.submit([1])
    assert refusal(lambda: session.submit([1], [2]))[0] == "UNAVAILABLE"
    assert session.observer.rejections == ["too_large", "queue_full"]
    assert session.session.queue_depth == (1, 1)


def test_a_batch_whose_requests_have_all_expired_is_not_run(make: Callable[..., Session]) -> None:
    session = make()
    answers = [session.submit([1], deadline_ns=500_000), session.submit([2], deadline_ns=1_000_000)]
    session.clock.advance(1000)
    session.run()
    late = ("RESOURCE_EXHAUSTED", "Run() timeout exceeded while waiting in batching queue")
    assert [failure(answer) for answer in answers] == [late, late]
    assert (session.seen, session.observer.records) == ([], [])
    assert session.observer.rejections == ["expired", "expired"]


@pytest.mark.parametrize("other_deadline_ns", [None, 1_000_001])
def test_one_live_request_makes_the_whole_batch_run(
    make: Callable[..., Session], other_deadline_ns: int | None
) -> None:
    session = make()
    expired = session.submit([1], deadline_ns=500_000)
    live = session.submit([2], deadline_ns=other_deadline_ns)
    session.clock.advance(1000)
    session.run()
    assert (expired.error, live.error) == (None, None)
    assert len(session.seen[0]["x"]) == 2


def test_rows_are_padded_with_the_first_row_of_the_last_request(make: Callable[..., Session]) -> None:
    session = make(allowed_batch_sizes=(2, 6, 16))
    first = session.submit([1, 1])
    last = session.submit([2, 2], [3, 3])
    session.run()
    assert session.seen[0]["x"].tolist() == [[1, 1], [2, 2], [3, 3], [2, 2], [2, 2], [2, 2]]
    assert first.outputs is not None
    assert last.outputs is not None
    assert first.outputs["sum"].tolist() == [2]
    assert last.outputs["sum"].tolist() == [4, 6]


def test_a_size_that_is_allowed_is_not_padded(make: Callable[..., Session]) -> None:
    session = make(allowed_batch_sizes=(2, 16))
    session.submit([1], [2])
    session.run()
    assert len(session.seen[0]["x"]) == 2


def test_different_shapes_fail_the_whole_batch_when_padding_is_off(make: Callable[..., Session]) -> None:
    session = make()
    answers = [session.submit([1, 2]), session.submit([1, 2, 3])]
    session.run()
    message = (
        "Tensors with name 'x' from different tasks have different shapes and padding is turned off. Set "
        "pad_variable_length_inputs to true, or ensure that all tensors with the same name have equal dimensions "
        "starting with the first dim."
    )
    assert [failure(answer) for answer in answers] == [("FAILED_PRECONDITION", message)] * 2
    assert session.seen == []


def test_different_ranks_fail_the_whole_batch_when_padding_is_off(make: Callable[..., Session]) -> None:
    session = make()
    answers = [session.submit([1, 2]), session.submit(inputs={"x": np.ones((1, 2, 3), np.float32)})]
    session.run()
    assert [failure(answer)[0] for answer in answers] == ["FAILED_PRECONDITION"] * 2


@pytest.mark.parametrize(("length_padding", "fill"), [("first_element", 7), ("zero", 0)])
def test_lengths_are_padded_at_the_end_to_the_longest(
    make: Callable[..., Session], length_padding: str, fill: int
) -> None:
    session = make(length_padding=length_padding)
    short = session.submit([7, 8])
    session.submit([1, 2, 3, 4])
    session.run()
    assert session.seen[0]["x"].tolist() == [[7, 8, fill, fill], [1, 2, 3, 4]]
    assert short.outputs is not None
    assert short.outputs["double"].shape == (1, 4)  # outputs are not cropped back


def test_every_dimension_but_the_first_is_padded(make: Callable[..., Session]) -> None:
    session = make(
        length_padding="first_element", runner=lambda inputs: {"double": inputs["x"], "sum": inputs["x"]}
    )
    session.submit(inputs={"x": np.full((1, 1, 3), 5, np.float32)})
    session.submit(inputs={"x": np.full((2, 2, 1), 6, np.float32)})
    session.run()
    assert session.seen[0]["x"].shape == (3, 2, 3)
    assert session.seen[0]["x"][0].tolist() == [[5, 5, 5], [5, 5, 5]]


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        (
            [np.ones((1, 0), np.float32), np.ones((1, 2), np.float32)],
            ("INVALID_ARGUMENT", "Got empty tensor in batch of non-empty tensors."),
        ),
        (
            [np.ones((1,) * 7, np.float32)] * 2,
            ("INVALID_ARGUMENT", "Only tensors with rank from 1 to 6 can be padded."),
        ),
    ],
)
def test_what_cannot_be_padded_fails_with_the_reference_text(
    make: Callable[..., Session], arrays: list[NDArray[Any]], expected: tuple[str, str]
) -> None:
    session = make(length_padding="first_element")
    answers = [session.submit(inputs={"x": array}) for array in arrays]
    session.run()
    assert [failure(answer) for answer in answers] == [expected] * 2


def test_strings_are_concatenated_and_padded(make: Callable[..., Session]) -> None:
    session = make(
        of=signature(dtype="object"),
        length_padding="first_element",
        allowed_batch_sizes=(4, 16),
        runner=lambda inputs: {"double": inputs["x"], "sum": inputs["x"][:, 0]},
    )
    short = session.submit(inputs={"x": np.array([[b"a"]], object)})
    session.submit(inputs={"x": np.array([[b"bb", b"ccc"]], object)})
    session.run()
    assert session.seen[0]["x"].tolist() == [[b"a", b"a"], [b"bb", b"ccc"], [b"bb", b"ccc"], [b"bb", b"ccc"]]
    assert short.outputs is not None
    assert short.outputs["sum"].tolist() == [b"a"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (np.float32(1).reshape(()), "Batched output tensor has 0 dimensions"),
        pytest.param(
            np.ones((3, 1), np.float32),
            "Batched output tensor's 0th dimension does not equal the sum of the 0th dimension sizes of the input "
            "tensors",
        ),
    ],
)
def test_an_output_without_a_row_per_input_row_fails_the_whole_batch(
    make: Callable[..., Session], result: NDArray[Any], message: str
) -> None:
    session = make(runner=lambda inputs: {"double": result, "sum": result}, allowed_batch_sizes=(4, 16))
    answers = [session.submit([1]), session.submit([2], [3])]
    session.run()
    assert [failure(answer) for answer in answers] == [("FAILED_PRECONDITION", message)] * 2


def test_a_missing_output_fails_the_whole_batch(make: Callable[..., Session]) -> None:
    session = make(runner=lambda inputs: {"sum": inputs["x"]})
    answer = session.submit([1])
    session.run()
    assert failure(answer) == ("INTERNAL", "Wrong number of batched output tensors")


def test_each_request_gets_the_outputs_it_asked_for_in_its_order(make: Callable[..., Session]) -> None:
    session = make()
    turned = session.submit([1, 2], outputs=("sum", "double"))
    one = session.submit([3, 4], outputs=("sum",))
    session.run()
    assert turned.outputs is not None
    assert one.outputs is not None
    assert list(turned.outputs) == ["sum", "double"]
    assert {name: array.tolist() for name, array in one.outputs.items()} == {"sum": [7]}


def test_requests_for_other_outputs_have_a_queue_of_their_own(make: Callable[..., Session]) -> None:
    session = make()
    session.submit([1])
    session.submit([2], outputs=("sum",))
    session.submit([3], outputs=("sum",))
    session.submit([4], outputs=("sum", "double"))
    session.run()
    assert sorted(one["x"].tolist() for one in session.seen) == [[[1], [4]], [[2], [3]]]
    with pytest.raises(StatusError, match="does not conform"):
        session.submit([1], outputs=("nothing",))


def test_an_error_of_the_model_reaches_every_request_of_the_batch(
    make: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        raise StatusError("RESOURCE_EXHAUSTED", "out of memory") if len(inputs["x"]) > 1 else KeyError("bug")

    session = make(runner=run)
    answers = [session.submit([1]), session.submit([2])]
    session.clock.advance(1000)
    unexpected = session.submit([3])
    session.run()
    assert [failure(answer) for answer in answers] == [("RESOURCE_EXHAUSTED", "out of memory")] * 2
    assert failure(unexpected) == ("INTERNAL", "KeyError: 'bug'")
    assert [record.rows for record in session.observer.records] == [2, 1]
    assert "a batch of 1 rows failed" in caplog.text


SPLITTING = {"enable_large_batch_splitting": True, "max_execution_batch_size": 2, "max_batch_size": 8}


def test_a_split_request_is_put_together_again_in_order(make: Callable[..., Session]) -> None:
    session = make(**SPLITTING)
    small = session.submit([1])
    large = session.submit([2], [3], [4], [5], [6])
    session.run()
    assert [one["x"].ravel().tolist() for one in session.seen] == [[1, 2], [3, 4], [5, 6]]
    assert small.outputs is not None
    assert large.outputs is not None
    assert small.outputs["sum"].tolist() == [1]
    assert large.outputs["sum"].tolist() == [2, 3, 4, 5, 6]
    assert large.outputs["double"].tolist() == [[4], [6], [8], [10], [12]]
    assert large.times == 1
    assert sum(session.deliveries) == 2


def test_one_failing_part_fails_a_split_request_once_all_parts_are_done(make: Callable[..., Session]) -> None:
    def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        if 3 in inputs["x"]:
            raise StatusError("INTERNAL", "three")
        return double_and_sum(inputs)

    session = make(runner=run, **SPLITTING)
    large = session.submit([1], [2], [3], [4], [5])
    session.run()
    assert failure(large) == ("INTERNAL", "three")
    assert (large.times, len(session.seen)) == (1, 3)


def test_a_request_without_rows_is_answered_at_once_with_empty_outputs(make: Callable[..., Session]) -> None:
    session = make()
    answer = session.submit(inputs={"x": np.empty((0, 5), np.float32)})
    assert answer.outputs is not None
    assert (answer.outputs["double"].shape, answer.outputs["sum"].shape) == ((0, 3), (0,))
    assert answer.outputs["double"].dtype == np.float32
    assert session.seen == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_batch_size": 8, "allowed_batch_sizes": (2, 4)},
            "Last entry in allowed_batch_sizes must match max_batch_size; last entry was 4; expected 8",
        ),
        (
            {
                "max_batch_size": 8,
                "allowed_batch_sizes": (2, 4),
                "enable_large_batch_splitting": True,
                "max_execution_batch_size": 4,
            },
            "Last entry in allowed_batch_sizes must match max_batch_size; last entry was 4; expected 8",
        ),
        (
            {"max_batch_size": 8, "allowed_batch_sizes": (4, 2, 8)},
            "allowed_batch_sizes entries must be monotonically increasing",
        ),
    ],
)
def test_allowed_sizes_are_checked_as_the_model_server_does(
    make: Callable[..., Session], options: dict[str, Any], message: str
) -> None:
    assert refusal(lambda: make(**options)) == ("INVALID_ARGUMENT", message)


def test_a_full_queue_is_retried_when_a_retrier_is_given(make: Callable[..., Session]) -> None:
    clock = ManualClock()
    retrier = BatchSchedulerRetrier(RetrierOptions(max_time_micros=500, retry_delay_micros=100), clock=clock)
    session = make(
        clock=clock, retrier=retrier, max_batch_size=1, max_enqueued_batches=1, batch_timeout_micros=10**9
    )
    gate, entered = threading.Event(), threading.Semaphore(0)

    def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        entered.release()
        gate.wait(10)
        return double_and_sum(inputs)

    session.runner = run
    running = session.submit([1])
    assert entered.acquire(timeout=10)
    waiting, refused = session.submit([2]), session.submit([3])
    for _ in range(6):
        clock.advance(100)
    assert failure(refused)[0] == "UNAVAILABLE"
    assert session.observer.rejections == ["queue_full"]
    retried = session.submit([4])
    gate.set()
    assert entered.acquire(timeout=10)
    while retried.outputs is None and retried.error is None:
        clock.advance(50)
    session.run()
    assert [answer.error for answer in (running, waiting)] == [None, None]
    retrier.close()


class Unbatched:
    def __init__(self, runner: Callable[[Mapping[str, NDArray[Any]]], Arrays], count: int = 2) -> None:
        self.answers: list[Completion] = []
        self.threads = RequestThreads(count)
        self.session = UnbatchedSession(
            signature=signature(),
            runner=runner,
            threads=self.threads,
            observer=Metrics(),
            deliver=self.deliver,
        )

    def deliver(self, completions: list[Completion]) -> None:
        self.answers += completions
        for done, outputs, error in completions:
            done(outputs, error)


def test_without_batching_each_request_runs_alone() -> None:
    seen: list[int] = []

    def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        seen.append(len(inputs["x"]))
        return double_and_sum(inputs)

    unbatched = Unbatched(run)
    answers = [Answer() for _ in range(5)]
    for index, answer in enumerate(answers):
        unbatched.session.submit({"x": np.full((index, 2), 1, np.float32)}, None, None, answer)
    one = Answer()
    unbatched.session.submit({"x": np.ones((1, 2), np.float32)}, ("sum",), None, one)
    unbatched.threads.close()
    assert sorted(seen) == [0, 1, 1, 2, 3, 4]
    assert [len(answer.outputs["sum"]) for answer in answers if answer.outputs] == [0, 1, 2, 3, 4]
    assert one.outputs is not None
    assert list(one.outputs) == ["sum"]


def test_without_batching_errors_and_deadlines_reach_their_request_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        match int(inputs["x"][0, 0]):
            case 1:
                raise StatusError("FAILED_PRECONDITION", "one")
            case 2:
                raise RuntimeError("two")
            case 3:
                return {}
            case _:
                return double_and_sum(inputs)

    unbatched = Unbatched(run, count=1)
    answers = [Answer() for _ in range(5)]
    for number, answer in enumerate(answers):
        unbatched.session.submit(
            {"x": np.full((1, 1), number, np.float32)}, None, 1 if number == 4 else None, answer
        )
    unbatched.threads.close()
    assert answers[0].error is None
    assert [failure(answer)[0] for answer in answers[1:]] == [
        "FAILED_PRECONDITION",
        "INTERNAL",
        "INTERNAL",
        "DEADLINE_EXCEEDED",
    ]
    assert "RuntimeError: two" in caplog.text
    with pytest.raises(StatusError, match="UNAVAILABLE"):
        unbatched.session.submit({}, None, None, Answer())


def test_a_shape_that_passed_once_passes_nothing_else(make: Callable[..., Session]) -> None:
    session = make()
    known = np.ones((2, 3), np.float32)
    for _ in range(2):
        session.submit(inputs={"x": known})
    assert refusal(lambda: session.submit(inputs={"x": known.astype(np.float64)})) == (
        "INVALID_ARGUMENT",
        "Expects arg[0] to be float32 but float64 is provided",
    )
    for inputs in ({"x": known, "z": known}, {"z": known}):
        assert refusal(lambda inputs=inputs: session.submit(inputs=inputs))[0] == "INTERNAL"  # type: ignore[misc]


def test_shapes_are_remembered_up_to_a_bound(make: Callable[..., Session]) -> None:
    session = make(max_enqueued_batches=1000)
    for columns in range(200):
        session.submit(inputs={"x": np.ones((1, columns), np.float32)})
    assert len(session.session._rows_by_shape) == 64


def test_outputs_in_another_order_are_each_request_s_own(make: Callable[..., Session]) -> None:
    session = make()
    both = session.submit([1, 2], outputs=("double", "sum"))
    turned = session.submit([3, 4], outputs=("sum", "double"))
    one = session.submit([5, 6], outputs=("sum",))
    session.run()
    assert [list(answer.outputs or {}) for answer in (both, turned, one)] == [
        ["double", "sum"],
        ["sum", "double"],
        ["sum"],
    ]
    assert turned.outputs is not None
    assert turned.outputs["sum"].tolist() == [7]
    assert one.outputs is not None
    assert one.outputs["sum"].tolist() == [11]
