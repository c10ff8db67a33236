"""Pre- and post-processing run around the device part, as a unit with it or in request threads, and fail alone."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchtune.server.backends.model import LoadedModel, Runner, Tensors
from batchtune.server.backends.registry import load_model
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.unbatched import RequestThreads
from batchtune.server.stages.stages import BatchingStage, check_allowed
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError
from tests.server.stages.stage_fakes import StagedServer, declared_in, serve, write_stages

TOGETHER = {"max_batch_size": 4, "batch_timeout_micros": 60_000_000, "num_batch_threads": 1}
ALONE = {"max_batch_size": 4, "batch_timeout_micros": 500, "num_batch_threads": 2}


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("stage", ["device", "unit", "early"])
def test_requests_meet_in_one_batch_and_each_gets_its_own_answer(
    tmp_path: Path, stage: BatchingStage
) -> None:
    async def ask(server: StagedServer) -> None:
        answers = await asyncio.gather(server.text(b"a", b"bcd"), server.text(b"ef"), server.text(b"ghij"))
        assert [answer["label"].tolist() for answer in answers] == [
            [b"1 letters", b"3 letters"],
            [b"2 letters"],
            [b"4 letters"],
        ]
        assert answers[0]["y"].tolist() == [[2.0], [6.0]]
        assert server.device.rows == [4]
        calls = 1 if stage == "unit" else 3
        assert f'stage_calls_total{{model_name="m",stage="pre"}} {calls}' in server.metrics.render()
        assert 'stage_rows_total{model_name="m",stage="post"} 4' in server.metrics.render()

    serve(write_stages(tmp_path), ask, stage=stage, **TOGETHER)


@pytest.mark.parametrize(("stage", "threads"), [("device", "request_stage"), ("unit", "model_server_batch")])
def test_the_stage_says_whose_threads_run_the_code(
    tmp_path: Path, stage: BatchingStage, threads: str
) -> None:
    async def ask(server: StagedServer) -> None:
        await server.text(b"a")
        assert all(name.startswith(threads) for name in server.code["THREADS"])
        assert server.code["THREADS"]

    serve(write_stages(tmp_path), ask, stage=stage, **ALONE)


def test_only_the_device_part_counts_as_busy(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        server.code["GATE"].clear()
        asked = server.text(b"a")
        while not server.code["THREADS"]:  # noqa: ASYNC110 it is a batch thread that gets there
            await asyncio.sleep(0.001)
        assert server.metrics.device.in_flight == 0
        server.code["GATE"].set()
        await asked

    serve(write_stages(tmp_path), ask, stage="unit", **ALONE)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (b"wrong", "INVALID_ARGUMENT", "pre: stages.py, line 14, in preprocess: ValueError: no such word"),
        (b"bug", "INTERNAL", "pre: stages.py, line 16, in preprocess: KeyError: 'missing'"),
        (b"exit", "INTERNAL", "pre: stages.py, line 18, in preprocess: SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("stage", ["device", "unit", "early"])
def test_an_error_of_the_code_ends_its_request_with_file_and_line(
    tmp_path: Path, stage: BatchingStage, text: bytes, code: str, message: str
) -> None:
    async def ask(server: StagedServer) -> None:
        failed = server.text(text)
        with pytest.raises(StatusError) as raised:
            await failed
        assert (raised.value.code, raised.value.message) == (code, message)
        assert (await server.text(b"abc"))["y"].tolist() == [[6.0]]  # the same threads serve on

    serve(write_stages(tmp_path), ask, stage=stage, **ALONE)


@pytest.mark.parametrize("stage", ["device", "early"])
def test_an_error_of_one_request_leaves_the_others_of_its_batch_alone(
    tmp_path: Path, stage: BatchingStage
) -> None:
    async def ask(server: StagedServer) -> None:
        outcomes = await asyncio.gather(
            server.text(b"a"), server.text(b"bug"), server.text(b"b", b"c"), server.text(b"d", b"e"),
            return_exceptions=True,
        )  # fmt: skip
        assert [isinstance(outcome, StatusError) for outcome in outcomes] == [False, True, False, False]
        assert sum(server.device.rows) == 5

    serve(
        write_stages(tmp_path),
        ask,
        stage=stage,
        **(TOGETHER | {"batch_timeout_micros": 1000, "num_batch_threads": 2}),
    )


def test_early_work_is_done_before_the_batch_is_full(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        first = server.text(b"a")
        while not server.code["THREADS"]:  # noqa: ASYNC110 it is a batch thread that gets there
            await asyncio.sleep(0.001)
        assert not server.device.rows
        others = [server.text(b"bc"), server.text(b"d", b"ef")]
        answers = await asyncio.gather(first, *others)
        assert [answer["y"].ravel().tolist() for answer in answers] == [[2.0], [4.0], [2.0, 4.0]]
        assert server.device.rows == [4]
        assert "batched after early work" in server.servable.summary()

    serve(write_stages(tmp_path), ask, stage="early", **TOGETHER)


def test_early_work_needs_the_streaming_scheduler_and_has_no_lookups(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        wanted = {"max_batch_size": 4, "batch_scheduler": "shared"}
        with pytest.raises(StatusError, match="batching_stage early needs batch_scheduler streaming"):
            await asyncio.to_thread(server.control.replace, wanted)
        answers = [server.text(b"a", b"b", b"c", b"d")]
        assert len(await asyncio.gather(*answers)) == 1

    serve(write_stages(tmp_path), ask, stage="early", **TOGETHER)
    lookup = """
        inputs: {k: {dtype: string}}
        lookup: {inputs: {k: {dtype: string}}, outputs: {x: {shape: [1]}}, emulated: {base_ms: 1}}
    """
    with pytest.raises(StatusError, match="--batching_stage=early: lookups are batched, not early"):
        serve(write_stages(tmp_path, lookup), ask, stage="early", **TOGETHER)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "pre: stages.py:preprocess gave a int; expected a table of arrays by name"),
        ("return {}", "pre: gave no 'x', which the model takes"),
        ("return {'x': np.zeros((1, 1))}", "pre: gave 'x' as float64; the model takes float32"),
        (
            "return {'x': np.zeros((5, 1), np.float32)}",
            "pre: stages.py:preprocess gave 'x' of shape [5, 1] for 1 rows",
        ),
        (
            "return {'x': np.zeros((1, 2), np.float32)}",
            "pre: signature serving_default input x shape is wrong, expected: [?,1], actual: [1,2]",
        ),
    ],
)
@pytest.mark.parametrize("stage", ["device", "unit"])
def test_what_the_model_does_not_take_is_refused_before_it_runs(
    tmp_path: Path, stage: BatchingStage, body: str, message: str
) -> None:
    code = f"import numpy as np\ndef preprocess(tensors):\n    {body}\n"
    stages = "pre: stages.py:preprocess\ninputs: {text: {dtype: string}}\n"

    async def ask(server: StagedServer) -> None:
        with pytest.raises(StatusError) as raised:
            await server.text(b"a")
        assert (raised.value.code, raised.value.message) == ("INTERNAL", message)
        assert not server.device.rows

    serve(write_stages(tmp_path, stages, code), ask, stage=stage, **ALONE)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return {'x': [[1.0], [2.0, 3.0]]}",
            r"pre: stages.py:preprocess gave 'x', which is not an array: ValueError: .*inhomogeneous",
        ),
        (
            "raise asyncio.CancelledError('by hand')",
            r"pre: stages.py, line 4, in preprocess: CancelledError: by hand",
        ),
        ("raise Mute()", r"pre: stages.py, line 4, in preprocess: Mute$"),
    ],
)
@pytest.mark.parametrize("stage", ["device", "unit", "early"])
def test_whatever_the_code_gives_or_raises_is_the_end_of_that_request(
    tmp_path: Path, stage: BatchingStage, body: str, message: str
) -> None:
    code = f"""
        import asyncio
        class Mute(Exception):
            __str__ = None
        def preprocess(tensors): {body}
    """.lstrip("\n")
    stages = "pre: stages.py:preprocess\ninputs: {text: {dtype: string}}\n"

    async def ask(server: StagedServer) -> None:
        for _ in range(3):  # more than there are threads
            with pytest.raises(StatusError, match=message) as raised:
                await asyncio.wait_for(server.text(b"a", b"b"), 5)
            assert raised.value.code == "INTERNAL"

    serve(write_stages(tmp_path, stages, code), ask, stage=stage, **ALONE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tensors['y'].astype(np.float64)", "gave 'z' as float64; stages.yaml says float32"),
        ("tensors['y'].ravel()", "gave 'z' of shape [1]; stages.yaml says [?,1]"),
        ("np.array([[None]])", "gave 'z' as object; stages.yaml says float32"),
    ],
)
@pytest.mark.parametrize("stage", ["device", "unit"])
def test_an_answer_is_what_the_declaration_tells_clients(
    tmp_path: Path, stage: BatchingStage, given: str, message: str
) -> None:
    code = f"import numpy as np\ndef last(tensors):\n    return {{'z': {given}}}\n"

    async def ask(server: StagedServer) -> None:
        with pytest.raises(StatusError) as raised:
            await server.request({"x": np.zeros((1, 1), np.float32)})
        assert raised.value.message == f"post: stages.py:last {message}"

    stages = "post: stages.py:last\noutputs: {z: {dtype: float32, shape: [1]}}\n"
    serve(write_stages(tmp_path, stages, code), ask, stage=stage, **ALONE)
    text = "post: stages.py:last\noutputs: {z: {dtype: string, shape: [1]}}\n"
    if "None" in given:
        message = "gave 'z' a value that is not a text; stages.yaml says string"
        serve(write_stages(tmp_path, text, code), ask, stage=stage, **ALONE)


def test_what_the_model_of_a_stage_raises_is_the_end_of_that_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_inputs: Tensors) -> Tensors:
        raise RuntimeError("index out of range in self")

    counter = load_model_of_counts(tmp_path, fail)
    monkeypatch.setattr("batchtune.server.stages.plan.load_model", lambda *_: counter)

    async def ask(server: StagedServer) -> None:
        with pytest.raises(StatusError, match="RuntimeError: index out of range"):
            await asyncio.wait_for(server.text(b"a"), 5)
        await server.end_version()

    serve(write_stages(tmp_path, "pre: letters/\ninputs: {text: {dtype: string}}\n"), ask, **ALONE)


@pytest.mark.parametrize("stage", ["device", "unit", "early"])
def test_every_stage_runs_where_nothing_is_batched(tmp_path: Path, stage: BatchingStage) -> None:
    async def ask(server: StagedServer) -> None:
        answer = await server.text(b"abc", b"d")
        assert (answer["y"].tolist(), answer["label"].tolist()) == (
            [[6.0], [2.0]],
            [b"3 letters", b"1 letters"],
        )
        assert "the device part is run request by request" in server.servable.summary()

    serve(write_stages(tmp_path), ask, stage=stage, enabled=False)


@pytest.mark.parametrize("stage", ["device", "unit", "early"])
def test_batching_may_be_turned_off_and_on_again_under_stages(tmp_path: Path, stage: BatchingStage) -> None:
    async def ask(server: StagedServer) -> None:
        for wanted in ({"enable_batching": False}, {"max_batch_size": 4, "batch_timeout_micros": 500}):
            await asyncio.to_thread(server.control.replace, wanted)
            assert (await server.text(b"abc"))["y"].tolist() == [[6.0]]

    serve(write_stages(tmp_path), ask, stage=stage, **ALONE)


@pytest.mark.parametrize("stage", ["device", "unit", "early"])
def test_the_model_of_a_stage_is_closed_after_the_last_queued_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: BatchingStage
) -> None:
    runs: list[bool] = []
    closed = threading.Event()

    def run(inputs: Tensors) -> Tensors:
        runs.append(closed.is_set())
        return {"label": np.array([b"%g" % y for y in inputs["y"].ravel()], object)}

    (tmp_path / "names").mkdir()
    (tmp_path / "names" / "emulated.yaml").write_text(
        "inputs: {y: {shape: [1]}}\noutputs: {label: {dtype: string}}\n"
    )
    model = load_model(tmp_path / "names", ServerFlags())
    model = replace(model, runs=dict.fromkeys(model.runs, run), close=closed.set)
    monkeypatch.setattr("batchtune.server.stages.plan.load_model", lambda *_: model)
    stages = """
        pre: stages.py:preprocess
        post: names/
        inputs: {text: {dtype: string}}
        outputs: {label: {dtype: string}}
    """

    async def ask(server: StagedServer) -> None:
        asked = server.text(b"abc")
        await server.end_version()
        assert (await asked)["label"].tolist() == [b"6"]
        assert runs == [False]
        assert closed.is_set()

    # As a unit the end of the version closes the batch; alone the request must be answered before that.
    serve(write_stages(tmp_path, stages), ask, stage=stage, **(ALONE if stage == "device" else TOGETHER))


@pytest.mark.parametrize("stage", ["device", "unit", "early"])
def test_the_model_of_a_last_stage_answers_only_what_is_declared(
    tmp_path: Path, stage: BatchingStage
) -> None:
    (tmp_path / "names").mkdir()
    (tmp_path / "names" / "emulated.yaml").write_text(
        "inputs: {y: {shape: [1]}}\noutputs: {label: {dtype: string}, score: {shape: [1]}, beside: {shape: [7]}}\n"
    )
    stages = """
        pre: stages.py:preprocess
        post: names/
        inputs: {text: {dtype: string}}
        outputs: {label: {dtype: string}, score: {shape: [SIZE]}}
    """

    async def ask(server: StagedServer) -> None:
        answer = await server.text(b"abc")
        assert {name: array.tolist() for name, array in answer.items()} == {"label": [b"6"], "score": [[6.0]]}

    async def refuse(server: StagedServer) -> None:
        with pytest.raises(StatusError) as raised:
            await server.text(b"abc")
        assert raised.value.message == "post: its model gave 'score' of shape [1,1]; stages.yaml says [?,2]"

    serve(write_stages(tmp_path, stages.replace("SIZE", "1")), ask, stage=stage, **ALONE)
    serve(write_stages(tmp_path, stages.replace("SIZE", "2")), refuse, stage=stage, **ALONE)


@pytest.mark.parametrize("stage", ["device", "unit", "early"])
def test_a_model_of_a_first_stage_gives_as_many_rows_as_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: BatchingStage
) -> None:
    def run(inputs: Tensors) -> Tensors:
        return {"x": np.ones((len(inputs["text"]) + (b"odd" in inputs["text"]), 1), np.float32)}

    model = load_model_of_counts(tmp_path, run)
    monkeypatch.setattr("batchtune.server.stages.plan.load_model", lambda *_: model)

    async def ask(server: StagedServer) -> None:
        asked = [server.text(b"odd"), server.text(b"a", b"b", b"c")]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        expected = "pre: its model gave 'x' of shape [5, 1] for 4 rows"
        if stage != "unit":  # where it is an error of the whole batch
            expected = "pre: its model gave 'x' of shape [2, 1] for 1 rows"
            assert outcomes[1]["y"].tolist() == [[2.0]] * 3  # type: ignore[index]
        assert isinstance(outcomes[0], StatusError)
        assert outcomes[0].message == expected

    together = TOGETHER | {"batch_timeout_micros": 60_000_000 if stage == "unit" else 1000}
    serve(
        write_stages(tmp_path, "pre: letters/\ninputs: {text: {dtype: string}}\n"),
        ask,
        stage=stage,
        **together,
    )


@pytest.mark.parametrize(
    "beside", [np.float32(3), np.ones(7, np.float32)], ids=["no dimension", "other rows"]
)
@pytest.mark.parametrize("stage", ["device", "unit", "early"])
def test_rows_of_a_last_stage_are_those_of_the_batch_whatever_the_model_gives_first(
    tmp_path: Path, stage: BatchingStage, beside: np.ndarray
) -> None:
    async def ask(server: StagedServer) -> None:
        server.device.beside = {"constant": beside}
        assert (await server.text(b"abc", b"d"))["label"].tolist() == [b"3 letters", b"1 letters"]
        assert 'stage_rows_total{model_name="m",stage="post"} 2' in server.metrics.render()

    serve(write_stages(tmp_path), ask, stage=stage, **ALONE)


def test_length_buckets_by_lengths_that_early_work_gives_are_refused(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        assert (await server.text(b"abc"))["y"].tolist() == [[6.0]]
        assert "length_buckets" not in server.servable.summary()
        with pytest.raises(
            StatusError, match="length_buckets with batching_stage early: the lengths of model m"
        ):
            await asyncio.to_thread(
                server.control.replace, {"batch_timeout_micros": 500, "length_buckets": "2,4"}
            )

    of_any_length = (TensorSpec(name="x", dtype="float32", shape=(None, None)),)
    serve(write_stages(tmp_path), ask, stage="early", inputs=of_any_length, **ALONE)
    with pytest.raises(StatusError, match="give batching_stage device") as raised:
        serve(write_stages(tmp_path), ask, stage="early", inputs=of_any_length, length_buckets=(2,), **ALONE)
    assert raised.value.code == "INVALID_ARGUMENT"


def test_some_outputs_may_be_asked_for_and_another_signature_stays_as_it_is(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        assert list(await server.text(b"a", names=("label",))) == ["label"]
        plain = await server.request({"x": np.array([[1.5]], np.float32)}, signature="plain")
        assert plain["y"].tolist() == [[3.0]]
        assert [spec.name for spec in server.servable.signatures["plain"].inputs] == ["x"]
        assert [spec.name for spec in server.servable.signatures["serving_default"].inputs] == ["text"]
        assert "stages pre, post; the device part is batched alone" in server.servable.summary()

    serve(write_stages(tmp_path), ask, **ALONE)


def test_wrong_tensors_are_refused_at_once(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        for inputs, message in (
            ({"text": [1.0]}, "Expects arg\\[0\\] to be object but float64 is provided"),
            ({"text": [[b"a"]]}, "input text shape is wrong"),
            ({}, "does not conform"),
        ):
            with pytest.raises(StatusError, match=message):
                server.request(inputs)

    serve(write_stages(tmp_path), ask, **ALONE)


def test_new_parameters_come_into_force_while_requests_are_in_their_first_stage(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        server.code["GATE"].clear()
        asked = [server.text(b"abc") for _ in range(5)]
        await asyncio.to_thread(server.control.replace, {"max_batch_size": 8, "batch_timeout_micros": 0})
        server.code["GATE"].set()
        assert [answer["y"].tolist() for answer in await asyncio.gather(*asked)] == [[[6.0]]] * 5

    serve(write_stages(tmp_path), ask, **ALONE)


def test_a_version_that_ends_answers_what_is_in_any_of_its_stages(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        server.code["GATE"].clear()
        gate = server.code["GATE"]
        asked = [server.text(b"abc") for _ in range(5)]
        ending = asyncio.create_task(server.end_version())
        await asyncio.sleep(0)
        gate.set()
        assert [answer["y"].tolist() for answer in await asyncio.gather(*asked)] == [[[6.0]]] * 5
        await ending
        assert not [name for name in sys.modules if name.startswith(str(tmp_path))]
        with pytest.raises(StatusError, match="Servable not found"):
            server.text(b"a")

    serve(write_stages(tmp_path), ask, **ALONE)


def test_a_request_whose_deadline_passes_before_its_first_stage_is_not_run(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        late = server.text(b"abc", deadline_ns=time.monotonic_ns())
        with pytest.raises(StatusError) as raised:
            await late
        assert raised.value.code == "DEADLINE_EXCEEDED"
        assert not server.code["THREADS"]

    serve(write_stages(tmp_path), ask, **ALONE)


def test_a_request_that_waits_for_its_batch_says_so(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        answered = server.text(b"a")
        queued = server.queued
        assert queued is not None
        assert queued.taken  # by its first stage
        while queued.taken:  # noqa: ASYNC110 a request thread hands it on
            await asyncio.sleep(0.001)
        await server.text(b"b", b"c", b"d")
        await answered
        assert queued.taken

    serve(write_stages(tmp_path), ask, **TOGETHER)


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
    with pytest.raises(StatusError) as raised:
        threads.put(lambda: order.append("refused"))
    assert raised.value.code == "RESOURCE_EXHAUSTED"
    threads.put_last_stage(lambda: order.append("last stage"))
    gate.set()
    threads.close()
    assert order == ["last stage", "first"]


def test_no_more_wait_for_a_last_stage_alone_than_may(tmp_path: Path) -> None:
    code = """
        import threading
        GATE = threading.Event()
        def last(tensors):
            GATE.wait(10)
            return tensors
    """
    stages = "post: stages.py:last\noutputs: {y: {shape: [1]}}\nrequest_threads: 1\n"

    async def ask(server: StagedServer) -> None:
        threads = server.stages._threads
        assert threads is not None
        threads._waiting_max = 2
        row = {"x": np.ones((1, 1), np.float32)}
        asked = [server.request(row) for _ in range(3)]
        while threads.has_room:  # noqa: ASYNC110 it is a batch thread that gets there
            await asyncio.sleep(0.001)
        with pytest.raises(StatusError) as raised:
            server.request(row)
        assert raised.value.code == "RESOURCE_EXHAUSTED"
        server.code["GATE"].set()
        assert [answer["y"].tolist() for answer in await asyncio.gather(*asked)] == [[[2.0]]] * 3

    serve(write_stages(tmp_path, stages, code), ask, **ALONE)


def test_what_early_work_refuses_has_not_run_any_code(tmp_path: Path) -> None:
    async def ask(server: StagedServer) -> None:
        raise AssertionError("loaded")

    stages = "post: stages.py:last\noutputs: {y: {shape: [1]}}\n"
    with pytest.raises(StatusError, match="there is no pre to run early"):
        serve(write_stages(tmp_path, stages, "open(__file__ + '.ran', 'w')"), ask, stage="early", **ALONE)
    assert not (tmp_path / "stages.py.ran").exists()


def test_code_and_connections_of_a_model_are_refused_without_the_flag(tmp_path: Path) -> None:
    declared = declared_in(write_stages(tmp_path))
    with pytest.raises(
        StatusError, match=r"stages.yaml:2: pre: stages.py:preprocess .* --allow_model_code"
    ) as raised:
        check_allowed(declared, allow_code=False)
    assert raised.value.code == "FAILED_PRECONDITION"
    check_allowed(declared, allow_code=True)
    lookup = (
        "inputs: {k: {dtype: string}}\n"
        "lookup: {inputs: {k: {dtype: string}}, outputs: {x: {shape: [1]}}, redis: {url: 'redis://h'}}\n"
    )
    with pytest.raises(StatusError, match=r"lookup.redis: .* --allow_model_code"):
        check_allowed(declared_in(write_stages(tmp_path, lookup)), allow_code=False)
    emulated = lookup.replace("redis: {url: 'redis://h'}", "emulated: {base_ms: 1}")
    check_allowed(declared_in(write_stages(tmp_path, emulated)), allow_code=False)


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
def test_code_that_does_not_run_is_refused_at_load_with_its_line(
    tmp_path: Path, code: str, message: str
) -> None:
    async def ask(server: StagedServer) -> None:
        raise AssertionError("loaded")

    with pytest.raises(StatusError, match=message.replace("(", r"\(")) as raised:
        serve(write_stages(tmp_path, code=code), ask)
    assert raised.value.code == "INVALID_ARGUMENT"
    assert not (tmp_path / "__pycache__").exists()
    assert not [name for name in sys.modules if name.startswith(str(tmp_path))]


def load_model_of_counts(folder: Path, run: Runner) -> LoadedModel:
    (folder / "letters").mkdir()
    (folder / "letters" / "emulated.yaml").write_text(COUNTS)
    model = load_model(folder / "letters", ServerFlags())
    return replace(model, runs=dict.fromkeys(model.runs, run))


COUNTS = "inputs: {text: {dtype: string}}\noutputs: {x: {shape: [1]}}\n"


@pytest.mark.parametrize("stage", ["device", "unit", "early"])
def test_a_stage_may_be_a_model_of_a_folder_of_its_own_without_leave_to_run_code(
    tmp_path: Path, stage: BatchingStage
) -> None:
    async def ask(server: StagedServer) -> None:
        assert (await server.text(b"abc", b"d"))["y"].tolist() == [[6.0], [2.0]]

    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "emulated.yaml").write_text(COUNTS)
    write_stages(tmp_path, "pre: letters/\ninputs: {text: {dtype: string}}\n", "")
    check_allowed(declared_in(tmp_path), allow_code=False)
    serve(tmp_path, ask, stage=stage, **ALONE)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "Could not find a model: .* is in .*letters"),
        (COUNTS, "letters: post of stages.yaml gives no 'label'"),
    ],
)
def test_a_folder_that_cannot_be_the_stage_is_refused_at_load(
    tmp_path: Path, model: str | None, message: str
) -> None:
    async def ask(server: StagedServer) -> None:
        raise AssertionError("loaded")

    (tmp_path / "letters").mkdir()
    if model is not None:
        (tmp_path / "letters" / "emulated.yaml").write_text(model)
    write_stages(tmp_path, "post: letters/\noutputs: {label: {dtype: string}}\n", "")
    with pytest.raises(StatusError, match=message):
        serve(tmp_path, ask, **ALONE)
