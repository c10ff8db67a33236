"""Do REST and gRPC end a call on a model alike: checked, counted, expired, refused?"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal as signals
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import requests

from batchtune.server.calls.pending_call import PendingCall, PendingCalls
from batchtune.server.grpc_api.classify_regress import InferenceCalls
from batchtune.server.metrics import Metrics
from batchtune.server.rest.json import parsing_process as json_process
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
from tests.server.server_process import ServerProcess, write_emulated
from tests.waiting import wait_until

EXAMPLES = signature(
    "serving_default",
    [spec("inputs", "object")],
    [spec("classes", "object", 1), spec("scores", "float32", 1)],
    "classify",
)
OF_NO_METHOD = signature("serving_default", [spec("x")], [spec("y")], "explain")


def classes(inputs: dict[str, Any]) -> dict[str, Any]:
    rows = len(inputs["inputs"])
    return {"classes": np.array([[b"a"]] * rows, object), "scores": np.ones((rows, 1), np.float32)}


def over_rest(servable: FakeServable, action: str, body: Any, **options: Any) -> tuple[str, str, str]:
    """The status, the text of an error, and the metrics afterwards."""
    with running_rest(servable, **options) as rest:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = requests.post(f"{rest.url}/v1/models/m:{action}", data=data, timeout=30)
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
    message = encode_predict_request("m", "", {"x": np.ones(1, np.float32)})
    for rows in (1, PREDICT_ON_LOOP_BYTES_MAX // 4):
        servable = FakeServable({"serving_default": (OF_NO_METHOD, half_plus_two)})
        body = {"instances": [1.0] * rows}
        assert over_rest(servable, "predict", body, enable_signature_method_name_check=True)[:2] == (
            "500",
            text,
        )
        assert over_rest(servable, "predict", body)[0] == "200"
    assert over_grpc(servable, "Predict", message, enable_signature_method_name_check=True)[:2] == (
        "INTERNAL",
        text,
    )


def test_both_feed_runtime_latency_under_the_references_names() -> None:
    metric = ":tensorflow:serving:runtime_latency_count"
    _, _, metrics = over_rest(FakeServable(), "predict", {"instances": [1.0]})
    assert f'{metric}{{model_name="m",API="Predict",runtime="TF1"}} 1' in metrics
    message = encode_predict_request("m", "", {"x": np.ones(1, np.float32)})
    _, _, metrics = over_grpc(FakeServable(), "Predict", message)
    assert f'{metric}{{model_name="m",API="Predict",runtime="TF1"}} 1' in metrics
    failing = FakeServable()
    failing.error = StatusError("INTERNAL", "broken")
    assert metric not in over_rest(failing, "predict", {"instances": [1.0]})[2]


@pytest.mark.parametrize("fails", [False, True])
def test_both_count_the_examples_of_requests_that_ran(fails: bool) -> None:
    def servable() -> FakeServable:
        made = FakeServable({"serving_default": (EXAMPLES, classes)})
        made.error = StatusError("UNAVAILABLE", "full") if fails else None
        return made

    request = ClassificationRequest()
    request.model_spec.name = "m"
    for _ in range(3):
        request.input.example_list.examples.add()
    line = ':tensorflow:serving:request_example_count_total{model="m"} 3'
    runtime = ':tensorflow:serving:runtime_latency_count{model_name="m",API="Classify",runtime="TF1"} 1'
    for metrics in (
        over_rest(servable(), "classify", {"examples": [{}, {}, {}]})[2],
        over_grpc(servable(), "Classify", request.SerializeToString())[2],
    ):
        assert (line in metrics) == (runtime in metrics) == (not fails)


class Queued:
    taken = True
    done: Any


QUEUED: weakref.WeakSet[Queued] = weakref.WeakSet()


class Waiting:
    """A request in a queue: it refers to its call."""

    taken = False

    def __init__(self, done: Callable[..., None]) -> None:
        self.done = done


def pending_calls(refuse: Any) -> PendingCalls[Any]:
    return PendingCalls(
        *(Metrics(), "GRPC", FakeModels()),  # type: ignore[arg-type]
        reply=lambda *_: None,
        refuse=refuse,
        is_gone=lambda _: False,
    )


@pytest.mark.parametrize("ends", ["answered", "expired before it was submitted"])
def test_a_request_dies_with_its_answer(ends: str) -> None:
    """A cycle of call and request would keep each body until the collector comes by."""
    waiting: list[Waiting] = []
    kept: list[weakref.ref[Any]] = []

    class Queue:
        def submit(self, *arguments: Any) -> Waiting:
            waiting.append(Waiting(arguments[-1]))
            return waiting[-1]

    async def scenario() -> None:
        calls = pending_calls(lambda *_: None)
        times = calls.times("m", "Predict")
        call = PendingCall(calls, times, object(), 0, None, lambda _: b"")
        call.submit(Queue(), "s", {}, None)  # type: ignore[arg-type]
        if ends == "expired before it was submitted":
            call.expire()
        await asyncio.sleep(0)
        kept.append(weakref.ref(waiting[0]))
        waiting.pop().done({}, None)

    gc.disable()
    try:
        asyncio.run(scenario())
        assert kept[0]() is None
    finally:
        gc.enable()


class QueueingServable(FakeServable):
    """Says of every request whether a batch thread has taken it."""

    def __init__(self, *, taken: bool) -> None:
        super().__init__()
        self.hold = True
        self._queued = SimpleNamespace(taken=taken)

    def submit(self, *arguments: Any) -> Any:
        super().submit(*arguments)
        return self._queued


@pytest.mark.parametrize(
    ("taken", "answer"),
    [
        (False, ("429", "Run() timeout exceeded while waiting in batching queue")),
        (True, ("504", "Timed out waiting for notification")),
    ],
)
def test_a_deadline_in_the_queue_is_told_from_one_in_the_model(taken: bool, answer: tuple[str, str]) -> None:
    servable = QueueingServable(taken=taken)
    assert over_rest(servable, "predict", {"instances": [1.0]}, rest_api_timeout_in_ms=30)[:2] == answer


def test_requests_that_wait_too_long_behind_a_slow_batch_are_429(tmp_path: Path) -> None:
    write_emulated(tmp_path / "model", base_ms=400)
    parameters = tmp_path / "batching.txt"
    parameters.write_text(
        "max_batch_size { value: 1 } max_enqueued_batches { value: 10 } num_batch_threads { value: 1 } "
        "batch_timeout_micros { value: 0 }"
    )
    flags = ["--enable_batching", f"--batching_parameters_file={parameters}", "--rest_api_timeout_in_ms=100"]
    with ServerProcess(tmp_path / "model", *flags) as server, ThreadPoolExecutor(4) as clients:
        url = f"http://127.0.0.1:{server.rest_port}/v1/models/m:predict"
        body = {"instances": [[1.0, 2.0]]}
        answers = list(clients.map(lambda _: requests.post(url, json=body, timeout=20).status_code, range(4)))
    assert sorted(answers) == [429, 429, 429, 504]


class CyclicServable(FakeServable):
    """Gives what stands for a request, which refers to the call as a request of a batching queue does."""

    def submit(self, *arguments: Any) -> Any:
        super().submit(*arguments)
        queued = Queued()
        queued.done = arguments[-1]
        QUEUED.add(queued)
        return queued


def test_a_call_that_has_ended_is_freed_without_the_garbage_collector() -> None:
    message = encode_predict_request("m", "", {"x": np.ones(1, np.float32)})
    gc.collect()
    gc.disable()
    try:
        over_rest(CyclicServable(), "predict", {"instances": [1.0]})
        over_grpc(CyclicServable(), "Predict", message)
        wait_until(lambda: not QUEUED)
    finally:
        gc.enable()


LARGE = PREDICT_ON_LOOP_BYTES_MAX // 2


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, RunningRest]]:
    """A model for each action; the process that reads its large bodies starts once."""
    predicting = FakeServable()
    classifying = FakeServable({"serving_default": (EXAMPLES, classes)})
    with running_rest(predicting) as predict, running_rest(classifying) as classify:
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
        answer = requests.post(f"{served[action].url}/v1/models/{model}:{action}", data=data, timeout=60)
        answers.append((answer.status_code, answer.text))
        monkeypatch.setattr("batchtune.server.rest.calls.PREDICT_ON_LOOP_BYTES_MAX", 1 << 30)
        monkeypatch.setattr("batchtune.server.rest.calls.EXAMPLES_ON_LOOP_BYTES_MAX", 1 << 30)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("action", ["predict", "classify"])
def test_a_large_body_that_is_not_read_in_time_is_refused_and_not_run(action: str) -> None:
    """The process that reads it takes longer than this to start; later ones wait for those before them."""
    body = {"predict": {"instances": [1.0] * LARGE}, "classify": {"examples": [{}] * LARGE}}[action]
    with running_rest(rest_api_timeout_in_ms=1) as rest:
        answer = requests.post(f"{rest.url}/v1/models/m:{action}", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]) == (504, "Timed out waiting for notification")
        assert 'request_count{model_name="m",status="DEADLINE_EXCEEDED"} 1' in rest.metrics.render()
        assert rest.models.servable.asked == []


class SwappingModels(FakeModels):
    """Each look-up is the last that finds its version; the next finds the next."""

    def __init__(self, versions: list[FakeServable]) -> None:
        super().__init__(versions[0])
        self.versions = versions

    def find(self, name: str, *, version: int | None = None, label: str | None = None) -> FakeServable:
        present = super().find(name, version=version, label=label)
        at = self.versions.index(present)
        self.servable = self.versions[min(at + 1, len(self.versions) - 1)]
        return present


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "float64", "float64")])
def test_a_large_body_runs_on_the_version_that_is_there_once_it_is_read(dtypes: tuple[str, ...]) -> None:
    """And is read again for one that declares other tensors."""
    runs = [signature("serving_default", [spec("x", dtype)], [spec("y")]) for dtype in dtypes]
    versions = [FakeServable({"serving_default": (run, half_plus_two)}) for run in runs]
    with running_rest() as rest:
        rest.api.calls._models = SwappingModels(versions)
        url = f"{rest.url}/v1/models/m:predict"
        answer = requests.post(url, data=json.dumps({"instances": [1.0] * LARGE}), timeout=60)
    assert answer.json() == {"predictions": [2.5] * LARGE}
    assert [len(version.asked) for version in versions] == [0] * (len(versions) - 1) + [1]
    (asked,) = versions[-1].asked
    assert asked[1]["x"].dtype == dtypes[-1]


def test_a_reader_of_large_bodies_that_dies_is_replaced_and_dies_with_the_server() -> None:
    body = json.dumps({"instances": [1.0] * LARGE}).encode()
    before = {child.pid for child in psutil.Process().children()}

    def readers() -> list[psutil.Process]:
        children = [child for child in psutil.Process().children() if child.pid not in before]
        alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return [child for child in alive if "spawn_main" in " ".join(child.cmdline())]

    with running_rest() as rest:
        url = f"{rest.url}/v1/models/m:predict"
        assert requests.post(url, data=body, timeout=60).status_code == 200
        (reader,) = readers()
        os.kill(reader.pid, signals.SIGKILL)
        wait_until(lambda: not readers())
        statuses = [requests.post(url, data=body, timeout=60).status_code for _ in range(3)]
        assert statuses[-1] == 200
        assert len(readers()) == 1
    wait_until(lambda: not readers())


def test_a_large_body_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A megabyte that takes 350 ms to read; the others' median, for the machine may be busy."""
    write_emulated(tmp_path / "model")
    with ServerProcess(tmp_path / "model") as server, ThreadPoolExecutor(1) as clients:
        url = f"http://127.0.0.1:{server.rest_port}/v1/models/m"
        slow = b'{"examples":[' + b",".join([b'{"x":1}'] * 125_000) + b"]}"
        requests.post(url + ":classify", data=slow[:200_000], timeout=60)  # starts the process that reads
        reading = clients.submit(lambda: requests.post(url + ":classify", data=slow, timeout=60))
        waits_ms = []
        with requests.Session() as session:
            while not reading.done():
                began = time.monotonic()
                session.post(url + ":predict", json={"instances": [[1.0, 2.0]]}, timeout=20)
                waits_ms.append(1000 * (time.monotonic() - began))
                time.sleep(0.005)
    assert len(waits_ms) > 20
    assert float(np.median(waits_ms)) < 50


class Executor:
    """Stands for the process; its bodies are read when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []
        self.ended = False

    def submit(self, *_: Any) -> Future[Any]:
        self.asked.append(Future())
        return self.asked[-1]

    def shutdown(self, **_: Any) -> None:
        self.ended = True


def test_a_process_that_dies_twice_over_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    executors: list[Executor] = []

    def start(*_: Any, **__: Any) -> Executor:
        executors.append(Executor())
        return executors[-1]

    async def scenario() -> None:
        monkeypatch.setattr(json_process, "ProcessPoolExecutor", start)
        bodies = json_process.LargeBodies()
        reads = [asyncio.create_task(bodies.examples(b"12")) for _ in range(2)]
        await asyncio.sleep(0)
        first = executors[0]
        first.asked[0].set_exception(BrokenProcessPool())
        with pytest.raises(StatusError):
            await reads[0]
        reads.append(asyncio.create_task(bodies.examples(b"12")))
        await asyncio.sleep(0)
        first.asked[1].set_exception(BrokenProcessPool())
        with pytest.raises(StatusError):
            await reads[1]
        assert [executor.ended for executor in executors] == [True, False]
        executors[1].asked[0].set_result(("s", {}))
        assert await reads[2] == ("s", {})
        assert bodies._waiting_bytes == 0

    asyncio.run(scenario())


def test_a_process_that_cannot_be_started_holds_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> Executor:
        raise OSError("no more processes")

    async def scenario() -> None:
        monkeypatch.setattr(json_process, "ProcessPoolExecutor", start)
        bodies = json_process.LargeBodies()
        with pytest.raises(OSError, match="no more processes"):
            await bodies.examples(b"12")
        assert bodies._waiting_bytes == 0

    asyncio.run(scenario())


def test_a_task_that_waits_dies_when_another_was_refused() -> None:
    waiting: list[Waiting] = []
    kept: list[weakref.ref[Any]] = []

    class Queue(FakeServable):
        def submit(self, name: str, *arguments: Any) -> Any:
            if name == "serving_default":
                raise StatusError("UNAVAILABLE", "full")
            waiting.append(Waiting(arguments[-1]))
            return waiting[-1]

    request = MultiInferenceRequest()
    for name in ("serving_default", "other"):
        task = request.tasks.add(method_name="tensorflow/serving/classify")
        task.model_spec.name, task.model_spec.signature_name = "m", name
    request.input.example_list.examples.add()

    async def scenario() -> None:
        models = FakeModels(Queue(dict.fromkeys(("serving_default", "other"), (EXAMPLES, classes))))
        ended: list[str] = []
        calls = InferenceCalls(models, pending_calls(lambda _, error: ended.append(error.code)))
        calls.multi_inference(SimpleNamespace(message=request.SerializeToString(), deadline_ns=None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert ended == ["UNAVAILABLE"]
        kept.append(weakref.ref(waiting[0]))
        waiting.pop()

    gc.disable()
    try:
        asyncio.run(scenario())
        assert kept[0]() is None
    finally:
        gc.enable()
