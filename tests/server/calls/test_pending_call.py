"""Do REST and gRPC end a call on a model alike, and does every request get an answer, whatever fails?"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal as signals
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from batchtune.server.calls.pending_call import Deadlines, PendingCall, PendingCalls, deliver_to
from batchtune.server.grpc_api.classify_regress import InferenceCalls
from batchtune.server.metrics import Metrics
from batchtune.server.rest.json import parsing_process
from batchtune.server.rest.json.parsing_process import EXAMPLES_ON_LOOP_BYTES_MAX, PREDICT_ON_LOOP_BYTES_MAX
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import ClassificationRequest, MultiInferenceRequest
from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.server.server_fakes import (
    FakeModels,
    FakeServable,
    RunningRest,
    half_plus_two,
    running_grpc,
    running_rest,
    signature,
    spec,
)
from tests.waiting import wait_until

LARGE = PREDICT_ON_LOOP_BYTES_MAX // 2
EXAMPLES = signature(
    "serving_default",
    [spec("inputs", "object")],
    [spec("classes", "object", 1), spec("scores", "float32", 1)],
    "classify",
)
OF_NO_METHOD = signature("serving_default", [spec("x")], [spec("y")], "explain")
PREDICT_MESSAGE = encode_predict_request("m", "", {"x": np.ones(1, np.float32)})


def classes(inputs: dict[str, Any]) -> dict[str, Any]:
    rows = len(inputs["inputs"])
    return {"classes": np.array([[b"a"]] * rows, object), "scores": np.ones((rows, 1), np.float32)}


def over_rest(servable: FakeServable, action: str, body: Any, **options: Any) -> tuple[str, str, str]:
    """The status, the text of an error, and the metrics afterwards."""
    with running_rest(servable, **options) as rest:
        answer = rest.ask(body, f"/v1/models/m:{action}")
        return str(answer.status_code), answer.json().get("error", ""), rest.metrics.render()


def over_grpc(servable: FakeServable, method: str, message: bytes, **options: Any) -> tuple[str, str, str]:
    with running_grpc(servable, **options) as server, grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(f"/tensorflow.serving.PredictionService/{method}")
        try:
            call(message, timeout=30)
        except grpc.RpcError as error:
            return error.code().name, error.details(), server.metrics.render()
        return "OK", "", server.metrics.render()


def test_both_check_the_method_of_a_signature_if_told() -> None:
    text = (
        "Expected prediction signature method_name to be one of {tensorflow/serving/predict, "
        "tensorflow/serving/classify, tensorflow/serving/regress}. Was: tensorflow/serving/explain"
    )
    servable, checked = FakeServable({"serving_default": (OF_NO_METHOD, half_plus_two)}), True
    for body in ({"instances": [1.0]}, {"instances": [1.0] * LARGE}):
        refused = over_rest(servable, "predict", body, enable_signature_method_name_check=checked)
        assert refused[:2] == ("500", text)
        assert over_rest(servable, "predict", body)[0] == "200"
    refused = over_grpc(servable, "Predict", PREDICT_MESSAGE, enable_signature_method_name_check=checked)
    assert refused[:2] == ("INTERNAL", text)


@pytest.mark.parametrize("fails", [False, True])
def test_both_count_runs_and_examples_of_requests_that_ran(fails: bool) -> None:
    request = ClassificationRequest()
    request.model_spec.name = "m"
    for _ in range(3):
        request.input.example_list.examples.add()
    predicting, classifying = FakeServable(), FakeServable({"serving_default": (EXAMPLES, classes)})
    predicting.error = classifying.error = StatusError("INTERNAL", "broken") if fails else None
    runtime = ':tensorflow:serving:runtime_latency_count{model_name="m",API="%s",runtime="TF1"} 1'
    examples = ':tensorflow:serving:request_example_count_total{model="m"} 3'
    for line, metrics in (
        (runtime % "Predict", over_rest(predicting, "predict", {"instances": [1.0]})[2]),
        (runtime % "Predict", over_grpc(predicting, "Predict", PREDICT_MESSAGE)[2]),
        (runtime % "Classify", over_rest(classifying, "classify", {"examples": [{}, {}, {}]})[2]),
        (runtime % "Classify", over_grpc(classifying, "Classify", request.SerializeToString())[2]),
    ):
        assert (line in metrics) is not fails
        assert (examples in metrics) is ("Classify" in line and not fails)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Waiting:
    """A request in a queue: it refers to its call."""

    taken = False

    def __init__(self, *arguments: Any) -> None:
        self.done = arguments[-1]


def pending_calls(refuse: Any = lambda *_: None) -> PendingCalls[Any]:
    return PendingCalls(
        *(Metrics(), "GRPC", FakeModels()),  # type: ignore[arg-type]
        reply=lambda *_: None,
        refuse=refuse,
        is_gone=lambda _: False,
    )


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("ends", ["answered", "expired before it was submitted"])
async def test_a_request_dies_with_its_answer(ends: str) -> None:
    """A cycle of call and request would keep each body until the collector comes by."""
    waiting: list[Waiting] = []
    queue = SimpleNamespace(submit=lambda *arguments: waiting.append(Waiting(*arguments)) or waiting[-1])
    calls = pending_calls()
    call = PendingCall(calls, calls.times("m", "Predict"), object(), 0, None, lambda _: b"")
    call.submit(queue, "s", {}, None)  # type: ignore[arg-type]
    if ends == "expired before it was submitted":
        call.expire()
    del call
    await asyncio.sleep(0)
    kept = weakref.ref(waiting[0])
    waiting.pop().done({}, None)
    await asyncio.sleep(0)
    assert kept() is None


@pytest.mark.usefixtures("no_collector")
async def test_a_task_that_waits_dies_when_another_was_refused() -> None:
    waiting: list[Waiting] = []

    class Queue(FakeServable):
        def submit(self, name: str, *arguments: Any) -> Any:
            if name == "serving_default":
                raise StatusError("UNAVAILABLE", "full")
            waiting.append(Waiting(*arguments))
            return waiting[-1]

    request = MultiInferenceRequest()
    for name in ("serving_default", "other"):
        task = request.tasks.add(method_name="tensorflow/serving/classify")
        task.model_spec.name, task.model_spec.signature_name = "m", name
    request.input.example_list.examples.add()
    models = FakeModels(Queue(dict.fromkeys(("serving_default", "other"), (EXAMPLES, classes))))
    ended: list[str] = []
    calls = InferenceCalls(models, pending_calls(lambda _, error: ended.append(error.code)))
    calls.multi_inference(SimpleNamespace(message=request.SerializeToString(), deadline_ns=None))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert ended == ["UNAVAILABLE"]
    kept = weakref.ref(waiting[0])
    waiting.pop()
    assert kept() is None


class QueueingServable(FakeServable):
    """Gives a request of a queue for each, and remembers it for as long as somebody else does."""

    def __init__(self, *, taken: bool = True) -> None:
        super().__init__()
        self.queued: weakref.WeakSet[Waiting] = weakref.WeakSet()
        self._taken = taken

    def submit(self, *arguments: Any) -> Any:
        super().submit(*arguments)
        queued = Waiting(*arguments)
        queued.taken = self._taken
        self.queued.add(queued)
        return queued


@pytest.mark.usefixtures("no_collector")
def test_a_call_that_has_ended_is_freed_without_the_garbage_collector() -> None:
    servable = QueueingServable()
    over_rest(servable, "predict", {"instances": [1.0]})
    over_grpc(servable, "Predict", PREDICT_MESSAGE)
    assert len(servable.asked) == 2
    servable.asked.clear()
    wait_until(lambda: not servable.queued)


@pytest.mark.parametrize(
    ("taken", "answer"),
    [
        (False, ("429", "Run() timeout exceeded while waiting in batching queue")),
        (True, ("504", "Timed out waiting for notification")),
    ],
)
def test_a_deadline_in_the_queue_is_told_from_one_in_the_model(taken: bool, answer: tuple[str, str]) -> None:
    servable = QueueingServable(taken=taken)
    servable.hold = True
    assert over_rest(servable, "predict", {"instances": [1.0]}, rest_api_timeout_in_ms=30)[:2] == answer


async def test_an_answer_that_cannot_be_written_becomes_an_error(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []

    def unwritable(outputs: Any, error: StatusError | None) -> None:
        if error is None:
            raise TypeError("no such dtype")
        told.append(error.code)

    def hopeless(_outputs: Any, _error: Any) -> None:
        raise RuntimeError("fails twice")

    finished = asyncio.Event()
    answers = [(hopeless, {}, None), (unwritable, {}, None), (lambda *_: finished.set(), {}, None)]
    deliver_to(asyncio.get_running_loop())(answers)
    await asyncio.wait_for(finished.wait(), 20)
    assert told == ["INTERNAL"]
    assert caplog.text.count("an answer could not be given") == 3


class Call:
    def __init__(self) -> None:
        self.ended: list[str] = []
        self.queued: Any = None
        self.submitted_ns = 0

    def done(self, outputs: Any, error: StatusError | None) -> None:
        self.ended.append("OK" if error is None else error.code)

    def fail(self, error: StatusError) -> None:
        self.ended.append(error.code)

    def expire(self) -> None:
        self.ended.append("DEADLINE_EXCEEDED")


async def test_a_request_that_cannot_be_submitted_does_not_hold_up_the_others() -> None:
    def submit(name: str, *arguments: Any) -> None:
        if name == "refused":
            raise StatusError("UNAVAILABLE", "full")
        if name == "surprise":
            raise ZeroDivisionError
        arguments[-1]({}, None)

    calls, turn, before_ns = [Call(), Call(), Call()], pending_calls(), time.monotonic_ns()
    for call, name in zip(calls, ("surprise", "refused", "taken"), strict=True):
        servable: Any = SimpleNamespace(submit=submit)
        turn.submit((call, servable, name, {"x": np.zeros(1)}, None, None, call.done))  # type: ignore[arg-type]
    await asyncio.sleep(0)  # the turn ends
    assert [call.ended for call in calls] == [["INTERNAL"], ["UNAVAILABLE"], ["OK"]]
    assert before_ns <= calls[0].submitted_ns == calls[1].submitted_ns == calls[2].submitted_ns


async def test_a_deadline_that_has_passed_already_replaces_none_that_is_watched() -> None:
    late, watched = [Call() for _ in range(20)], [Call() for _ in range(20)]
    deadlines, now_ns = Deadlines(), time.monotonic_ns()
    for number in range(20):
        deadlines.add(watched[number], now_ns + (number << 18))
        deadlines.add(late[number], now_ns - 10**9 + number * 10**7)
    async with asyncio.timeout(20):
        while not all(call.ended for call in late + watched):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert {tuple(call.ended) for call in late + watched} == {("DEADLINE_EXCEEDED",)}


async def test_calls_that_end_in_time_leave_nothing_behind() -> None:
    deadlines, now_ns = Deadlines(), time.monotonic_ns()
    calls = {Call(): now_ns + (number + 10) * 10**9 for number in range(1000)}
    for call, deadline_ns in calls.items():
        deadlines.add(call, deadline_ns)
    for call, deadline_ns in [*calls.items(), *calls.items()]:
        deadlines.discard(call, deadline_ns)
    assert not deadlines._slots


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, RunningRest]]:
    """A model for each action; the process that reads its large bodies starts once."""
    classifying = FakeServable({"serving_default": (EXAMPLES, classes)})
    with running_rest() as predict, running_rest(classifying) as classify:
        yield {"predict": predict, "classify": classify}


@pytest.mark.parametrize(
    ("action", "body"),
    [
        ("predict", {"instances": [1.0] * LARGE}),
        ("predict", {"inputs": [1.0] * LARGE}),
        ("predict", {"signature_name": "none", "instances": [1.0] * LARGE}),
        ("predict", {"instances": [1.0] * LARGE + ["x"]}),
        ("predict", {"signature_name": 1, "instances": [1.0] * LARGE}),
        ("predict", b'{"instances": [' + b"1," * LARGE),
        ("classify", {"examples": [{"x": number} for number in range(LARGE // 4)]}),
        ("classify", {"signature_name": "none", "examples": [{}] * LARGE}),
        ("classify", {"examples": [{}] * LARGE + [1]}),
    ],
)
@pytest.mark.parametrize("model", ["m", "missing"])
def test_a_large_body_is_answered_as_a_small_one(
    served: dict[str, RunningRest], monkeypatch: pytest.MonkeyPatch, action: str, body: Any, model: str
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert len(data) > (PREDICT_ON_LOOP_BYTES_MAX if action == "predict" else EXAMPLES_ON_LOOP_BYTES_MAX)
    answers = []
    for _ in range(2):
        answer = served[action].ask(data, f"/v1/models/{model}:{action}")
        answers.append((answer.status_code, answer.text))
        monkeypatch.setattr("batchtune.server.rest.calls.PREDICT_ON_LOOP_BYTES_MAX", 1 << 30)
        monkeypatch.setattr("batchtune.server.rest.calls.EXAMPLES_ON_LOOP_BYTES_MAX", 1 << 30)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("action", ["predict", "classify"])
def test_a_large_body_that_is_not_read_in_time_is_refused_and_not_run(action: str) -> None:
    """The process that reads it takes longer than this to start; later ones wait for those before them."""
    body = {"predict": {"instances": [1.0] * LARGE}, "classify": {"examples": [{}] * LARGE}}[action]
    with running_rest(rest_api_timeout_in_ms=1) as rest:
        answer = rest.ask(body, f"/v1/models/m:{action}")
        assert (answer.status_code, answer.json()["error"]) == (504, "Timed out waiting for notification")
        assert 'request_count{model_name="m",status="DEADLINE_EXCEEDED"} 1' in rest.metrics.render()
        assert rest.models.servable.asked == []


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "float64", "float64")])
def test_a_large_body_runs_on_the_version_that_is_there_once_it_is_read(dtypes: tuple[str, ...]) -> None:
    """And is read again for one that declares other tensors."""
    runs = [signature("serving_default", [spec("x", dtype)], [spec("y")]) for dtype in dtypes]
    versions = [FakeServable({"serving_default": (run, half_plus_two)}) for run in runs]
    later = iter(versions[1:])
    with running_rest(versions[0]) as rest:
        find = rest.models.find

        def find_for_the_last_time(*name: Any, **version: Any) -> FakeServable:
            present = find(*name, **version)
            rest.models.servable = next(later, present)
            return present

        rest.models.find = find_for_the_last_time  # type: ignore[method-assign]
        answer = rest.ask({"instances": [1.0] * LARGE})
    assert answer.json() == {"predictions": [2.5] * LARGE}
    assert [len(version.asked) for version in versions] == [0] * (len(versions) - 1) + [1]
    (asked,) = versions[-1].asked
    assert asked[1]["x"].dtype == dtypes[-1]


def test_a_reader_of_large_bodies_that_dies_is_replaced_and_dies_with_the_server() -> None:
    before = set(psutil.Process().children())

    def readers() -> list[psutil.Process]:
        children = [child for child in psutil.Process().children() if child not in before]
        alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return [child for child in alive if "spawn_main" in " ".join(child.cmdline())]

    with running_rest() as rest:
        assert rest.ask({"instances": [1.0] * LARGE}).status_code == 200
        (reader,) = readers()
        os.kill(reader.pid, signals.SIGKILL)
        wait_until(lambda: not readers())
        statuses = [rest.ask({"instances": [1.0] * LARGE}).status_code for _ in range(3)]
        assert statuses[-1] == 200
        assert len(readers()) == 1
    wait_until(lambda: not readers())


async def test_a_process_that_dies_twice_over_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    executors: list[SimpleNamespace] = []

    def start(*_: Any, **__: Any) -> SimpleNamespace:
        """Stands for the process; its bodies are read when the test says so."""
        asked: list[Future[Any]] = []
        submit = lambda *_: asked.append(Future()) or asked[-1]  # noqa: E731
        executor = SimpleNamespace(asked=asked, submit=submit, ended=False)
        executor.shutdown = lambda **_: setattr(executor, "ended", True)
        executors.append(executor)
        return executor

    monkeypatch.setattr(parsing_process, "ProcessPoolExecutor", start)
    bodies = parsing_process.LargeBodies()
    reads = [asyncio.create_task(bodies.examples(b"12")) for _ in range(2)]
    await asyncio.sleep(0)
    first = executors[0]
    first.asked[0].set_exception(BrokenProcessPool())
    with pytest.raises(StatusError):
        await reads[0]
    third = asyncio.create_task(bodies.examples(b"12"))
    await asyncio.sleep(0)
    first.asked[1].set_exception(BrokenProcessPool())
    with pytest.raises(StatusError):
        await reads[1]
    assert [executor.ended for executor in executors] == [True, False]
    executors[1].asked[0].set_result(("s", {}))
    assert await third == ("s", {})
    assert bodies._waiting_bytes == 0


async def test_a_process_that_cannot_be_started_holds_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(parsing_process, "ProcessPoolExecutor", start)
    bodies = parsing_process.LargeBodies()
    with pytest.raises(OSError, match="no more processes"):
        await bodies.examples(b"12")
    assert bodies._waiting_bytes == 0
