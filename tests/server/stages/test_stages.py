"""Pre- and post-processing run around the device part, as a unit with it or in request threads, and fail alone."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchtune.server.backends.model import Runner, Tensors
from batchtune.server.backends.registry import load_model
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.unbatched import RequestThreads
from batchtune.server.stages.stages import BatchingStage, check_allowed
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError
from tests.server.models.model_fakes import until
from tests.server.stages.stage_fakes import (
    ALONE,
    StagedServer,
    declared_in,
    serve,
    staged,
    unloaded,
    write_stages,
)

TOGETHER = {"max_batch_size": 4, "batch_timeout_micros": 60_000_000, "num_batch_threads": 1}
STAGES: tuple[BatchingStage, ...] = ("device", "unit", "early")
PRE = "pre: stages.py:preprocess\ninputs: {text: {dtype: string}}\n"
LETTERS = "pre: letters/\ninputs: {text: {dtype: string}}\n"
COUNTS = "inputs: {text: {dtype: string}}\noutputs: {x: {shape: [1]}}\n"
NAMES = """
    pre: stages.py:preprocess
    post: names/
    inputs: {text: {dtype: string}}
    outputs: {label: {dtype: string}}
"""
LOOKUP = """
    inputs: {k: {dtype: string}}
    lookup: {inputs: {k: {dtype: string}}, outputs: {x: {shape: [1]}}, emulated: {base_ms: 1}}
"""
OF_ANY_LENGTH = (TensorSpec(name="x", dtype="float32", shape=(None, None)),)

every_stage = pytest.mark.parametrize("stage", STAGES)


def write_model(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "emulated.yaml").write_text(text)


@pytest.fixture
def loaded_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the model of a stage one that runs a function."""

    def load(text: str, run: Runner, **changes: Any) -> None:
        write_model(tmp_path / "model", text)
        model = load_model(tmp_path / "model", ServerFlags())
        model = replace(model, runs=dict.fromkeys(model.runs, run), **changes)
        monkeypatch.setattr("batchtune.server.stages.plan.load_model", lambda *_: model)

    return load


@staged(*STAGES, **TOGETHER)
async def test_requests_meet_in_one_batch(server: StagedServer, stage: BatchingStage) -> None:
    answers = await asyncio.gather(server.text(b"a", b"bcd"), server.text(b"ef"), server.text(b"ghij"))
    labels = [[b"1 letters", b"3 letters"], [b"2 letters"], [b"4 letters"]]
    assert [answer["label"].tolist() for answer in answers] == labels
    assert answers[0]["y"].tolist() == [[2.0], [6.0]]
    assert server.device.rows == [4]
    calls = 1 if stage == "unit" else 3
    assert f'stage_calls_total{{model_name="m",stage="pre"}} {calls}' in server.metrics.render()
    assert 'stage_rows_total{model_name="m",stage="post"} 4' in server.metrics.render()


@staged("device", "unit")
async def test_the_stage_says_whose_threads_run_the_code(server: StagedServer, stage: BatchingStage) -> None:
    await server.text(b"a")
    threads = {"device": "request_stage", "unit": "model_server_batch"}[stage]
    assert {name[: len(threads)] for name in server.code["THREADS"]} == {threads}


@staged("unit")
async def test_only_the_device_part_counts_as_busy(server: StagedServer) -> None:
    server.code["GATE"].clear()
    asked = server.text(b"a")
    await until(lambda: bool(server.code["THREADS"]))
    assert server.metrics.device.in_flight == 0
    server.code["GATE"].set()
    await asked


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"wrong", "INVALID_ARGUMENT: pre: stages.py, line 14, in preprocess: ValueError: no such word"),
        (b"bug", "INTERNAL: pre: stages.py, line 16, in preprocess: KeyError: 'missing'"),
        (b"exit", "INTERNAL: pre: stages.py, line 18, in preprocess: SystemExit: 3"),
    ],
)
@staged(*STAGES)
async def test_an_error_ends_its_request_with_its_line(server: StagedServer, text: bytes, said: str) -> None:
    with pytest.raises(StatusError) as raised:
        await server.text(text)
    assert str(raised.value) == said
    assert (await server.text(b"abc"))["y"].tolist() == [[6.0]]  # the same threads serve on


@staged("device", "early", **(TOGETHER | {"batch_timeout_micros": 1000, "num_batch_threads": 2}))
async def test_an_error_of_one_request_leaves_the_others_of_its_batch_alone(server: StagedServer) -> None:
    asked = [server.text(b"a"), server.text(b"bug"), server.text(b"b", b"c"), server.text(b"d", b"e")]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(outcome, StatusError) for outcome in outcomes] == [False, True, False, False]
    assert sum(server.device.rows) == 5


@staged("early", **TOGETHER)
async def test_early_work_is_done_before_the_batch_is_full(server: StagedServer) -> None:
    first = server.text(b"a")
    await until(lambda: bool(server.code["THREADS"]))
    assert not server.device.rows
    answers = await asyncio.gather(first, server.text(b"bc"), server.text(b"d", b"ef"))
    assert [answer["y"].ravel().tolist() for answer in answers] == [[2.0], [4.0], [2.0, 4.0]]
    assert server.device.rows == [4]
    assert "batched after early work" in server.servable.summary()


@staged("early", **TOGETHER)
async def test_early_work_needs_the_streaming_scheduler(server: StagedServer) -> None:
    wanted = {"max_batch_size": 4, "batch_scheduler": "shared"}
    with pytest.raises(StatusError, match="batching_stage early needs batch_scheduler streaming"):
        await server.replace(**wanted)
    await server.text(b"a", b"b", b"c", b"d")


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        (LOOKUP, {}, "--batching_stage=early: lookups are batched, not early"),
        (PRE, {"inputs": OF_ANY_LENGTH, "length_buckets": (2,)}, "give batching_stage device"),
        ("post: stages.py:f\noutputs: {y: {shape: [1]}}\n", {}, "there is no pre to run early"),
    ],
)
def test_early_work_has_no_lookups_and_no_lengths_and_runs_no_code_before_that_is_said(
    tmp_path: Path, stages: str, options: dict[str, Any], message: str
) -> None:
    ran = "import pathlib\npathlib.Path(__file__ + '.ran').touch()\n"
    write_stages(tmp_path, stages, f"{ran}def preprocess(tensors): return tensors")
    with pytest.raises(StatusError, match=message) as raised:
        serve(tmp_path, unloaded, stage="early", **options)
    assert raised.value.code == "INVALID_ARGUMENT"
    assert (tmp_path / "stages.py.ran").exists() == ("length_buckets" in options)


@staged("early", inputs=OF_ANY_LENGTH)
async def test_length_buckets_by_lengths_that_early_work_gives_are_refused(server: StagedServer) -> None:
    assert (await server.text(b"abc"))["y"].tolist() == [[6.0]]
    assert "length_buckets" not in server.servable.summary()
    wanted = {"batch_timeout_micros": 500, "length_buckets": "2,4"}
    with pytest.raises(StatusError, match="length_buckets with batching_stage early: the lengths of model m"):
        await server.replace(**wanted)


CODE = """
import asyncio
import numpy as np
class Mute(Exception):
    __str__ = None
def pre(tensors):
    {pre}
def last(tensors):
    {post}
"""
WRONG_SHAPE = "pre: signature serving_default input x shape is wrong, expected: [?,1], actual: [1,2]"


@pytest.mark.parametrize(
    ("which", "body", "said"),
    [
        ("pre", "return 3", "pre: stages.py:pre gave a int; expected a table of arrays by name"),
        ("pre", "return {}", "pre: gave no 'x', which the model takes"),
        ("pre", "return {'x': np.zeros((1, 1))}", "pre: gave 'x' as float64; the model takes float32"),
        (
            "pre",
            "return {'x': np.ones((5, 1), 'f')}",
            "pre: stages.py:pre gave 'x' of shape [5, 1] for 1 rows",
        ),
        ("pre", "return {'x': np.zeros((1, 2), 'f')}", WRONG_SHAPE),
        (
            "pre",
            "return {'x': [[1], [2, 3]]}",
            "pre: stages.py:pre gave 'x', which is not an array: ValueError",
        ),
        ("pre", "raise asyncio.CancelledError('me')", "pre: stages.py, line 7, in pre: CancelledError: me"),
        ("pre", "raise Mute()", "pre: stages.py, line 7, in pre: Mute"),
        ("post", "return {'z': tensors['y'].astype('d')}", "gave 'z' as float64; stages.yaml says float32"),
        ("post", "return {'z': tensors['y'].ravel()}", "gave 'z' of shape [1]; stages.yaml says [?,1]"),
        ("post", "return {'z': np.array([[None]])}", "gave 'z' as object; stages.yaml says float32"),
        ("text", "return {'z': [[None]]}", "gave 'z' a value that is not a text; stages.yaml says string"),
    ],
)
@every_stage
def test_whatever_code_gives_or_raises_ends_its_request(
    tmp_path: Path, stage: BatchingStage, which: str, body: str, said: str
) -> None:
    async def ask(server: StagedServer) -> None:
        for _ in range(3):  # more than there are threads
            with pytest.raises(StatusError) as raised:
                await asyncio.wait_for(server.text(b"a"), 5)
            assert str(raised.value).partition(": setting an array")[0] == f"INTERNAL: {said}"
        assert which != "pre" or not server.device.rows

    code = CODE.format(pre=body if which == "pre" else "return {'x': np.zeros((1, 1), 'f')}", post=body)
    outputs = f"outputs: {{z: {{dtype: {'string' if which == 'text' else 'float32'}, shape: [1]}}}}\n"
    stages = f"pre: stages.py:pre\ninputs: {{text: {{dtype: string}}}}\npost: stages.py:last\n{outputs}"
    said = said if which == "pre" else f"post: stages.py:last {said}"
    serve(write_stages(tmp_path, stages, code), ask, stage=stage)


def test_what_the_model_of_a_stage_raises_is_the_end_of_that_request(tmp_path: Path, loaded_as: Any) -> None:
    def fail(_inputs: Tensors) -> Tensors:
        raise RuntimeError("index out of range in self")

    async def ask(server: StagedServer) -> None:
        with pytest.raises(StatusError, match="RuntimeError: index out of range"):
            await asyncio.wait_for(server.text(b"a"), 5)
        await server.end_version()

    loaded_as(COUNTS, fail)
    serve(write_stages(tmp_path, LETTERS), ask)


@staged(*STAGES, enabled=False)
async def test_every_stage_runs_where_nothing_is_batched(server: StagedServer) -> None:
    answer = await server.text(b"abc", b"d")
    assert answer["y"].tolist() == [[6.0], [2.0]]
    assert answer["label"].tolist() == [b"3 letters", b"1 letters"]
    assert "the device part is run request by request" in server.servable.summary()


@every_stage
def test_a_stage_ends_after_the_last_request(tmp_path: Path, loaded_as: Any, stage: BatchingStage) -> None:
    runs: list[bool] = []
    closed = threading.Event()

    def run(inputs: Tensors) -> Tensors:
        runs.append(closed.is_set())
        return {"label": np.array([b"%g" % y for y in inputs["y"].ravel()], object)}

    async def ask(server: StagedServer) -> None:
        asked = server.text(b"abc")
        await server.end_version()
        assert (await asked)["label"].tolist() == [b"6"]
        assert runs == [False]
        assert closed.is_set()

    loaded_as("inputs: {y: {shape: [1]}}\noutputs: {label: {dtype: string}}\n", run, close=closed.set)
    # As a unit the end of the version closes the batch; alone the request must be answered before that.
    serve(write_stages(tmp_path, NAMES), ask, stage=stage, **(ALONE if stage == "device" else TOGETHER))


@pytest.mark.parametrize("size", [1, 2])
@every_stage
def test_a_last_stage_answers_only_what_is_declared(tmp_path: Path, stage: BatchingStage, size: int) -> None:
    async def ask(server: StagedServer) -> None:
        if size == 1:
            answer = await server.text(b"abc")
            plain = {name: array.tolist() for name, array in answer.items()}
            assert plain == {"label": [b"6"], "score": [[6.0]]}
        else:
            with pytest.raises(StatusError) as raised:
                await server.text(b"abc")
            said = "post: its model gave 'score' of shape [1,1]; stages.yaml says [?,2]"
            assert raised.value.message == said

    outputs = "{label: {dtype: string}, score: {shape: [1]}, beside: {shape: [7]}}"
    write_model(tmp_path / "names", f"inputs: {{y: {{shape: [1]}}}}\noutputs: {outputs}\n")
    stages = NAMES.replace("{label:", f"{{score: {{shape: [{size}]}}, label:")
    serve(write_stages(tmp_path, stages), ask, stage=stage)


@every_stage
def test_a_first_stage_gives_the_rows_it_took(tmp_path: Path, loaded_as: Any, stage: BatchingStage) -> None:
    def run(inputs: Tensors) -> Tensors:
        return {"x": np.ones((len(inputs["text"]) + (b"odd" in inputs["text"]), 1), np.float32)}

    async def ask(server: StagedServer) -> None:
        asked = [server.text(b"odd"), server.text(b"a", b"b", b"c")]
        odd, other = await asyncio.gather(*asked, return_exceptions=True)
        rows = 4 if stage == "unit" else 1  # where it is an error of the whole batch
        said = f"pre: its model gave 'x' of shape [{rows + 1}, 1] for {rows} rows"
        assert isinstance(odd, StatusError)
        assert odd.message == said
        assert stage == "unit" or other["y"].tolist() == [[2.0]] * 3  # type: ignore[index]

    loaded_as(COUNTS, run)
    timeout = {"batch_timeout_micros": 60_000_000 if stage == "unit" else 1000}
    serve(write_stages(tmp_path, LETTERS), ask, stage=stage, **(TOGETHER | timeout))


@pytest.mark.parametrize(
    "beside", [np.float32(3), np.ones(7, np.float32)], ids=["no dimension", "other rows"]
)
@staged(*STAGES)
async def test_rows_of_a_last_stage_are_those_of_the_batch(server: StagedServer, beside: np.ndarray) -> None:
    server.device.beside = {"constant": beside}
    assert (await server.text(b"abc", b"d"))["label"].tolist() == [b"3 letters", b"1 letters"]
    assert 'stage_rows_total{model_name="m",stage="post"} 2' in server.metrics.render()


@staged()
async def test_some_outputs_may_be_asked_for_and_other_signatures_stay(server: StagedServer) -> None:
    assert list(await server.text(b"a", names=("label",))) == ["label"]
    plain = await server.request({"x": np.array([[1.5]], np.float32)}, signature="plain")
    assert plain["y"].tolist() == [[3.0]]
    signatures = server.servable.signatures.items()
    inputs = {name: [spec.name for spec in signature.inputs] for name, signature in signatures}
    assert inputs == {"plain": ["x"], "serving_default": ["text"]}
    assert "stages pre, post; the device part is batched alone" in server.servable.summary()


@staged()
async def test_wrong_tensors_are_refused_at_once(server: StagedServer) -> None:
    for inputs, message in (
        ({"text": [1.0]}, "Expects arg\\[0\\] to be object but float64 is provided"),
        ({"text": [[b"a"]]}, "input text shape is wrong"),
        ({}, "does not conform"),
    ):
        with pytest.raises(StatusError, match=message):
            server.request(inputs)


@pytest.mark.parametrize("ends", [False, True])
@staged()
async def test_what_is_in_any_stage_is_answered(server: StagedServer, ends: bool, tmp_path: Path) -> None:
    gate = server.code["GATE"]
    gate.clear()
    asked = [server.text(b"abc") for _ in range(5)]
    wanted = {"max_batch_size": 8, "batch_timeout_micros": 0}
    change = server.end_version() if ends else server.replace(**wanted)
    changing = asyncio.ensure_future(change)
    if ends:
        await asyncio.sleep(0)
    else:
        await changing
    gate.set()
    assert [answer["y"].tolist() for answer in await asyncio.gather(*asked)] == [[[6.0]]] * 5
    await changing
    if ends:
        assert not [name for name in sys.modules if name.startswith(str(tmp_path))]
        with pytest.raises(StatusError, match="Servable not found"):
            server.text(b"a")


@staged()
async def test_a_request_that_is_late_before_its_first_stage_is_not_run(server: StagedServer) -> None:
    with pytest.raises(StatusError, match=r"^DEADLINE_EXCEEDED: "):
        await server.text(b"abc", deadline_ns=time.monotonic_ns())
    assert not server.code["THREADS"]


@staged(**TOGETHER)
async def test_a_request_that_waits_for_its_batch_says_so(server: StagedServer) -> None:
    answered = server.text(b"a")
    queued = server.queued
    assert queued is not None
    assert queued.taken  # by its first stage
    await until(lambda: not queued.taken)  # a request thread hands it on
    await server.text(b"b", b"c", b"d")
    await answered
    assert queued.taken


def test_no_more_wait_for_a_thread_than_may_and_last_stages_go_first() -> None:
    threads = RequestThreads(1, waiting_max=2)
    order: list[str] = []
    begun, gate = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(10)

    threads.put(hold)
    begun.wait(10)
    threads.put(lambda: order.append("first"))
    threads.put(lambda: 1 / 0)
    with pytest.raises(StatusError, match=r"^RESOURCE_EXHAUSTED: "):
        threads.put(lambda: order.append("refused"))
    threads.put_last_stage(lambda: order.append("last stage"))
    gate.set()
    threads.close()
    assert order == ["last stage", "first"]


LAST = """
    import threading
    GATE = threading.Event()
    def last(tensors):
        GATE.wait(10)
        return tensors
"""


@staged(files=("post: stages.py:last\noutputs: {y: {shape: [1]}}\nrequest_threads: 1\n", LAST))
async def test_no_more_wait_for_a_last_stage_alone_than_may(server: StagedServer) -> None:
    threads = server.stages._threads
    assert threads is not None
    threads._waiting_max = 2
    row = {"x": np.ones((1, 1), np.float32)}
    asked = [server.request(row) for _ in range(3)]
    await until(lambda: not threads.has_room)
    with pytest.raises(StatusError, match=r"^RESOURCE_EXHAUSTED: "):
        server.request(row)
    server.code["GATE"].set()
    assert [answer["y"].tolist() for answer in await asyncio.gather(*asked)] == [[[2.0]]] * 3


def test_code_and_connections_of_a_model_are_refused_without_the_flag(tmp_path: Path) -> None:
    redis = LOOKUP.replace("emulated: {base_ms: 1}", "redis: {url: 'redis://h'}")
    write_model(tmp_path / "letters", COUNTS)
    for stages, refused in ((PRE, "yaml:1: pre: stages.py:preprocess"), (redis, "lookup.redis:")):
        declared = declared_in(write_stages(tmp_path, stages))
        with pytest.raises(StatusError, match=rf"stages.*{refused} .* --allow_model_code") as raised:
            check_allowed(declared, allow_code=False)
        assert raised.value.code == "FAILED_PRECONDITION"
        check_allowed(declared, allow_code=True)
    for stages in (LOOKUP, LETTERS):
        check_allowed(declared_in(write_stages(tmp_path, stages)), allow_code=False)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = (", "stages.py, line 1: SyntaxError"),
        ("import nothing_of_this_name", "stages.py, line 1, in <module>: ModuleNotFoundError"),
        ("raise SystemExit(1)", "stages.py, line 1, in <module>: SystemExit"),
        ("x = open('words.txt')", "stages.py, line 1, in <module>: FileNotFoundError"),
        ("other = 1", "stages.py: no function preprocess, which pre of stages.yaml names"),
    ],
)
def test_code_that_does_not_run_is_refused_with_its_line(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(StatusError, match=message) as raised:
        serve(write_stages(tmp_path, code=code), unloaded)
    assert raised.value.code == "INVALID_ARGUMENT"
    assert not (tmp_path / "__pycache__").exists()
    assert not [name for name in sys.modules if name.startswith(str(tmp_path))]


@every_stage
def test_a_stage_may_be_a_model_of_a_folder_of_its_own(tmp_path: Path, stage: BatchingStage) -> None:
    async def ask(server: StagedServer) -> None:
        assert (await server.text(b"abc", b"d"))["y"].tolist() == [[6.0], [2.0]]

    write_model(tmp_path / "letters", COUNTS)
    serve(write_stages(tmp_path, LETTERS, ""), ask, stage=stage)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "Could not find a model: .* is in .*letters"),
        (COUNTS, "letters: post of stages.yaml gives no 'label'"),
    ],
)
def test_a_folder_that_is_no_stage_is_refused(tmp_path: Path, model: str | None, message: str) -> None:
    if model is None:
        (tmp_path / "letters").mkdir()
    else:
        write_model(tmp_path / "letters", model)
    write_stages(tmp_path, "post: letters/\noutputs: {label: {dtype: string}}\n", "")
    with pytest.raises(StatusError, match=message):
        serve(tmp_path, unloaded)
