"""A chain asks its models in turn, row by row, one version of each for a whole request."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.wire.status import StatusError
from tests.server.models.chains.chain_server import (
    BATCHED,
    TRIGGER_AND_SELECT,
    ChainServer,
    Model,
    select,
    serve,
    spec,
    trigger,
)
from tests.waiting import wait_until

ROWS = [[0.0, 1.0], [0.75, 2.0], [0.5, 3.0], [1.0, 4.0]]
ALL = TRIGGER_AND_SELECT.replace("    when: trigger.score > 0.5\n    otherwise: {y: -1}\n", "")


def lines(server: ChainServer, part: str) -> list[str]:
    return [line for line in server.metrics.render().splitlines() if part in line and line[0] != "#"]


@pytest.mark.parametrize("settings", [BATCHED, BatchingSettings()], ids=["batched", "unbatched"])
def test_only_rows_for_which_the_condition_holds_are_asked(
    tmp_path: Path, settings: BatchingSettings
) -> None:
    async def scenario(server: ChainServer) -> None:
        selector = select()
        server.serve("trigger", trigger())
        server.serve("select", selector)
        outputs, error = await server.ask(server.open(tmp_path), ROWS)
        assert error is None
        assert outputs is not None
        np.testing.assert_array_equal(outputs["score"], [[0.0], [0.75], [0.5], [1.0]])
        np.testing.assert_array_equal(outputs["y"], [[-1, -1], [7.5, 20], [-1, -1], [10, 40]])
        assert outputs["y"].dtype == np.float32
        np.testing.assert_array_equal(selector.given[0]["x"], [ROWS[1], ROWS[3]])
        np.testing.assert_array_equal(selector.given[0]["score"], [[0.75], [1.0]])

    serve(scenario, settings)


def test_a_model_that_no_row_needs_is_not_asked(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        selector = select()
        server.serve("trigger", trigger())
        server.serve("select", selector)
        outputs, _ = await server.ask(server.open(tmp_path), ROWS[:1])
        assert outputs is not None
        np.testing.assert_array_equal(outputs["y"], [[-1, -1]])
        assert not selector.given
        assert lines(server, "chain_step_rows") == [
            ':batchtune:serving:chain_step_rows_total{model_name="chain",step="trigger"} 1',
            ':batchtune:serving:chain_step_rows_total{model_name="chain",step="select"} 0',
            ':batchtune:serving:chain_step_rows_not_asked_total{model_name="chain",step="trigger"} 0',
            ':batchtune:serving:chain_step_rows_not_asked_total{model_name="chain",step="select"} 1',
        ]

    serve(scenario)


def test_each_step_waits_in_the_queue_of_its_model_with_all_others(tmp_path: Path) -> None:
    """Steps of several requests, and a request to the model itself, share its batch."""

    async def scenario(server: ChainServer) -> None:
        selector = select()
        server.serve("trigger", trigger())
        server.serve("select", selector)
        chain = server.open(tmp_path, ALL)
        answers = [server.ask(chain, [row]) for row in ROWS]
        for row, answer in zip(ROWS, answers, strict=True):
            outputs, _ = await answer
            assert outputs is not None
            np.testing.assert_array_equal(outputs["y"], np.float32([row]) * 10)
        assert sum(len(given["x"]) for given in selector.given) == 4
        [batches] = lines(server, 'model_batches_total{model_name="select"')
        assert int(batches.split()[-1]) == len(selector.given) < 4

    waiting = BatchingParameters(max_batch_size=4, batch_timeout_micros=50_000, num_batch_threads=1)
    serve(scenario, BatchingSettings(enabled=True, parameters=waiting))


def test_the_latency_of_each_step_is_told(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", select())
        chain = server.open(tmp_path)
        began_ns = time.monotonic_ns()
        for row in ROWS:
            await server.ask(chain, [row])
        micros = (time.monotonic_ns() - began_ns) / 1000
        labels = '{model_name="chain",step="%s"}'
        counts = [lines(server, f"chain_step_latency_count{labels % step}") for step in ("trigger", "select")]
        assert [int(line.split()[-1]) for [line] in counts] == [4, 2]
        sums = [lines(server, f"chain_step_latency_sum{labels % step}") for step in ("trigger", "select")]
        assert 0 < sum(float(line.split()[-1]) for [line] in sums) <= micros

    serve(scenario)


def test_a_later_step_sees_what_stands_for_rows_that_were_not_asked(tmp_path: Path) -> None:
    """A cascade: where the cheap model is sure, its answer is the chain's, and what follows is asked with it."""
    text = """
inputs: {x: {dtype: float32, shape: [2]}}
steps:
  cheap: {model: select, inputs: {x: request.x, score: trigger.score}}
  dear: {model: dear, inputs: {x: request.x, score: trigger.score}, when: "trigger.score >= 0.75", otherwise: {y: cheap.y}}
  judge: {model: trigger, inputs: {x: dear.y}}
outputs:
  y: {from: dear.y, dtype: float32, shape: [2]}
  judged: {from: judge.score, dtype: float32, shape: [1]}
"""
    text = text.replace("steps:", "steps:\n  trigger: {model: trigger, inputs: {x: request.x}}")

    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", select())
        server.serve("dear", select(100.0))
        outputs, _ = await server.ask(server.open(tmp_path, text), ROWS)
        assert outputs is not None
        np.testing.assert_array_equal(outputs["y"], [[0, 10], [75, 200], [5, 30], [100, 400]])
        np.testing.assert_array_equal(outputs["judged"], [[0], [75], [5], [100]])

    serve(scenario)


def test_strings_a_named_element_and_an_output_filter(tmp_path: Path) -> None:
    text = """
inputs: {x: {dtype: float32, shape: [2]}}
steps:
  name: {model: namer, inputs: {x: request.x}, when: "request.x[1] != 2", otherwise: {name: {text: nobody}}}
outputs:
  name: {from: name.name, dtype: string}
  x: {from: request.x, shape: [2]}
"""

    def answer(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"name": np.array([b"%g" % x for x in given["x"][:, 1]], object)}

    async def scenario(server: ChainServer) -> None:
        server.serve("namer", Model([spec("x", 2)], [spec("name", dtype="object")], answer))
        chain = server.open(tmp_path, text)
        outputs, _ = await server.ask(chain, ROWS, output_names=("name",))
        assert outputs is not None
        assert list(outputs) == ["name"]
        assert outputs["name"].tolist() == [b"1", b"nobody", b"3", b"4"]

    serve(scenario)


def test_a_request_without_rows_is_answered_without_rows(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", select())
        outputs, _ = await server.ask(server.open(tmp_path), np.zeros((0, 2)))
        assert outputs is not None
        assert (outputs["score"].shape, outputs["y"].shape) == ((0, 1), (0, 2))

    serve(scenario)


def test_an_error_names_its_step_and_is_counted(tmp_path: Path) -> None:
    def fail(_given: object) -> dict[str, np.ndarray]:
        raise StatusError("RESOURCE_EXHAUSTED", "out of memory")

    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", Model([spec("score", 1), spec("x", 2)], [spec("y", 2)], fail))
        chain = server.open(tmp_path)
        _, error = await server.ask(chain, ROWS)
        assert error is not None
        assert (error.code, error.message) == ("RESOURCE_EXHAUSTED", "step select: out of memory")
        _, error = await server.ask(chain, ROWS[:1])
        assert error is None
        with pytest.raises(StatusError, match=r"step trigger: .*is larger than") as refused:
            server.ask(chain, np.zeros((9, 2)))
        assert refused.value.code == "INVALID_ARGUMENT"
        assert lines(server, "chain_step_failed") == [
            ':batchtune:serving:chain_step_failed_count{model_name="chain",step="trigger",status="INVALID_ARGUMENT"} 1',
            ':batchtune:serving:chain_step_failed_count{model_name="chain",step="select",status="RESOURCE_EXHAUSTED"} 1',
        ]

    serve(scenario)


def test_a_model_that_breaks_its_word_is_an_error_of_its_step(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        wide = Model([spec("x", 2)], [spec("score", 1)], lambda given: {"score": given["x"]})
        server.serve("trigger", wide)
        server.serve("select", select())
        _, error = await server.ask(server.open(tmp_path), ROWS)
        assert error is not None
        assert (
            error.message == "step select: when: a row of trigger.score has 2 values; expected one to compare"
        )

    serve(scenario)


def test_a_deadline_that_passes_between_two_steps_ends_the_request_there(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        first, selector = trigger(), select()
        server.serve("trigger", first)
        server.serve("select", selector)
        chain = server.open(tmp_path)
        first.gate.clear()
        deadline_ns = time.monotonic_ns() + 20_000_000
        answer = server.ask(chain, ROWS, deadline_ns=deadline_ns)
        await asyncio.to_thread(wait_until, lambda: first.given and time.monotonic_ns() > deadline_ns)
        first.gate.set()
        _, error = await answer
        assert error is not None
        assert (error.code, error.message) == (
            "DEADLINE_EXCEEDED",
            "step select: the deadline passed before it was asked",
        )
        assert not selector.given

    serve(scenario)


def test_a_request_under_way_says_in_which_step_it_is_and_whether_it_waits(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        first, selector = trigger(), select()
        server.serve("trigger", first)
        server.serve("select", selector)
        chain = server.open(tmp_path)
        first.gate.clear()
        selector.gate.clear()
        answered: list[object] = []
        queued = chain.submit(
            "serving_default",
            {"x": np.ones((1, 2), np.float32)},
            None,
            None,
            lambda *answer: answered.append(answer),
        )
        assert queued is not None
        assert queued.step == "step trigger: "
        await asyncio.to_thread(wait_until, lambda: first.given)
        assert queued.taken
        behind = chain.submit(
            "serving_default", {"x": np.ones((1, 2), np.float32)}, None, None, lambda *_: None
        )
        assert behind is not None
        assert not behind.taken  # the only batch thread is held by the first
        first.gate.set()
        await asyncio.to_thread(wait_until, lambda: selector.given)
        assert queued.step == "step select: "
        selector.gate.set()
        await asyncio.to_thread(wait_until, lambda: answered)

    serve(scenario)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"x": np.zeros((1, 3), np.float32)}, r"shape is wrong, expected: \[\?,2\], actual: \[1,3\]"),
        ({"x": np.zeros((1, 2), np.float64)}, "Expects arg\\[0\\] to be float32 but float64 is provided"),
        ({"x": np.float32(1)}, "at least one dimension"),
        ({"z": np.zeros((1, 2), np.float32)}, "does not conform"),
    ],
)
def test_wrong_tensors_are_refused_at_once(tmp_path: Path, inputs: dict[str, np.ndarray], words: str) -> None:
    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", select())
        with pytest.raises(StatusError, match=words):
            server.ask(server.open(tmp_path), inputs)

    serve(scenario)


def test_a_request_keeps_its_versions_and_a_version_waits_for_its_requests(tmp_path: Path) -> None:
    """Both models are replaced while the first step runs: its second step is answered by the version of then."""

    async def scenario(server: ChainServer) -> None:
        first, second = trigger(), select(10.0)
        old = [server.serve("trigger", first), server.serve("select", second)]
        chain = server.open(tmp_path)
        first.gate.clear()
        before = server.ask(chain, ROWS[1:2])
        await asyncio.to_thread(wait_until, lambda: first.given)
        server.serve("trigger", trigger(), 2)
        server.serve("select", select(1000.0), 2)
        ends = [asyncio.ensure_future(server.end(servable)) for servable in old]
        await asyncio.to_thread(server.control.replace, {"max_batch_size": 4})  # with a new pool meanwhile
        await asyncio.sleep(0.02)
        assert not second.closed
        assert not any(end.done() for end in ends)
        after = server.ask(chain, ROWS[1:2])
        first.gate.set()
        for answer, factor in ((before, 10), (after, 1000)):
            outputs, error = await answer
            assert error is None
            assert outputs is not None
            np.testing.assert_array_equal(outputs["y"], np.float32([ROWS[1]]) * factor)
        await asyncio.gather(*ends)
        assert first.closed
        assert second.closed

    serve(scenario)


def test_a_version_that_does_not_fit_and_a_model_without_one_are_told_to_each_request(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", select())
        chain = server.open(tmp_path)
        server.serve("select", trigger(), 2)
        with pytest.raises(StatusError) as raised:
            server.ask(chain, ROWS)
        assert raised.value.code == "FAILED_PRECONDITION"
        assert raised.value.message == (
            "the models do not fit the chain: steps.select.inputs.score: model select version 2 has no input score; "
            "it takes x"
        )
        del server.latest["select"]
        with pytest.raises(StatusError, match="step select: Servable not found for request") as raised:
            server.ask(chain, ROWS)
        assert raised.value.code == "NOT_FOUND"
        server.serve("select", select(), 3)
        assert (await server.ask(chain, ROWS))[1] is None
        for servable in server.latest.values():
            await asyncio.to_thread(servable.holds.wait_until_free)  # nobody who was refused holds one

    serve(scenario)


@pytest.mark.parametrize("settings", [BATCHED, BatchingSettings()], ids=["batched", "unbatched"])
def test_an_output_that_the_chain_does_not_use_need_not_have_its_rows(
    tmp_path: Path, settings: BatchingSettings
) -> None:
    async def scenario(server: ChainServer) -> None:
        beside = Model(
            [spec("x", 2)],
            [spec("score", 1), spec("constant", 1)],
            lambda given: {"score": given["x"][:, :1], "constant": np.ones((1, 1), np.float32)},
        )
        server.serve("trigger", beside)
        server.serve("select", select())
        chain = server.open(tmp_path)
        assert (await server.ask(chain, ROWS[1:2]))[1] is None
        _, error = await server.ask(chain, ROWS)
        if settings.enabled:  # its batch is refused, as in TF Serving
            assert error is not None
            assert "0th dimension" in error.message
        else:
            assert error is None

    serve(scenario, settings)


@pytest.mark.parametrize("padded", [True, False])
def test_a_step_whose_outputs_are_padded_with_its_batch_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], padded: bool
) -> None:
    text = """
inputs: {x: {dtype: float32, shape: [-1]}}
steps:
  embed: {model: embed, inputs: {x: request.x}}
  join: {model: join, inputs: {x: request.x, y: embed.y}}
outputs: {z: {from: join.z, dtype: float32, shape: [1]}}
"""
    length = [spec("x", None)]
    outputs = [spec("y", None), spec("unused", None), spec("size", 1)]
    embed = Model(length, outputs, lambda given: dict.fromkeys(("y", "unused", "size"), given["x"]))
    join = Model([*length, spec("y", None)], [spec("z", 1)], lambda given: {"z": given["x"][:, :1]})

    async def scenario(server: ChainServer) -> None:
        server.serve("embed", embed)
        server.serve("join", join)
        server.open(tmp_path, text)
        warning = "model chain version 1: embed.y may be as long as the longest request of its batch"
        assert [warning in line for line in capsys.readouterr().err.splitlines()] == (
            [True] if padded else []
        )

    parameters = BatchingParameters(max_batch_size=8, pad_variable_length_inputs=padded)
    serve(scenario, BatchingSettings(enabled=True, parameters=parameters))


def test_a_chain_says_in_a_line_what_it_is(tmp_path: Path) -> None:
    async def scenario(server: ChainServer) -> None:
        server.serve("trigger", trigger())
        server.serve("select", select())
        assert server.open(tmp_path).summary() == (
            "serving_default(x: float32 [?,2]) -> (score: float32 [?,1], y: float32 [?,2]); "
            "chain trigger (trigger) -> select (select)"
        )

    serve(scenario)
