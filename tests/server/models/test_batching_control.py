"""New batching parameters come into force at once, for every model, and no request is lost on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from batchtune.batching.parameters import BatchingParameters
from batchtune.errors import BatchingParametersError
from batchtune.server.backends.model import LoadedModel, Tensors
from batchtune.server.calls.pending_call import deliver_to
from batchtune.server.metrics import Metrics, loop_lag_sampled
from batchtune.server.models.batching_control import BatchingControl
from batchtune.server.models.servable import ConcurrencyLimit, Servable
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.server.startup import own_batching_parameters
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import SignatureDefMap

Outputs = dict[str, NDArray[Any]]


class GatedModel:
    """y = 2 x; a run waits while the gate is shut. Remembers the rows of each run and the thread it was on."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.rows: list[int] = []
        self.threads: set[str] = set()

    def __call__(self, inputs: Tensors) -> Outputs:
        self.threads.add(threading.current_thread().name)
        self.gate.wait(10)
        self.rows.append(len(inputs["x"]))
        return {"y": inputs["x"] * 2}


class Server:
    """The parts that a request passes through, on the running loop."""

    def __init__(
        self,
        settings: BatchingSettings,
        *,
        own: BatchingParameters | None = None,
        limit: ConcurrencyLimit | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        deliver = deliver_to(loop)
        self.metrics = Metrics()
        self.control = BatchingControl(
            settings, observer=self.metrics, deliver=deliver, on_loop=loop.call_soon_threadsafe
        )
        self.metrics.queue_depths = self.control.queue_depths
        self.metrics.length_boundaries = self.control.length_boundaries
        self.model = GatedModel()
        x, y = (TensorSpec(name=name, dtype="float32", shape=(None, 1)) for name in "xy")
        signature = Signature(name="s", method_name="tensorflow/serving/predict", inputs=(x,), outputs=(y,))
        self.servable = Servable(
            name="m",
            version=1,
            model=LoadedModel(
                signatures={"s": signature, "alias": signature},
                runs={"s": self.model, "alias": self.model},
            ),
            metrics=self.metrics,
            own_parameters=own,
            limit=(limit, deliver) if limit else None,
        )
        self.control.attach(self.servable)

    def request(self, value: float = 1.0, *, signature: str = "s") -> asyncio.Future[Outputs]:
        answered: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()

        def done(outputs: Outputs | None, error: StatusError | None) -> None:
            if outputs is None:
                answered.set_exception(error or AssertionError())
            else:
                answered.set_result(outputs)

        self.servable.submit(signature, {"x": np.full((1, 1), value, np.float32)}, None, None, done)
        return answered

    async def replace(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(self.control.replace, wanted)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 what is waited for happens on other threads
        await asyncio.sleep(0.001)


def serve(
    scenario: Callable[[Server], Awaitable[None]], settings: BatchingSettings | None = None, **options: Any
) -> None:
    async def run() -> None:
        server = Server(settings or BatchingSettings(), **options)
        try:
            await asyncio.wait_for(scenario(server), 20)
        finally:
            server.model.gate.set()
            await asyncio.to_thread(server.control.close)

    asyncio.run(run())


def batching(**parameters: Any) -> BatchingSettings:
    return BatchingSettings(enabled=True, parameters=BatchingParameters(**parameters))


def test_without_batching_every_request_runs_alone() -> None:
    async def scenario(server: Server) -> None:
        answers = await asyncio.gather(*(server.request(value) for value in range(5)))
        assert [float(one["y"][0, 0]) for one in answers] == [0, 2, 4, 6, 8]
        assert server.model.rows == [1] * 5
        assert 'batch_execution_count{batch_size="1"} 5' in server.metrics.render()

    serve(scenario)


def test_with_batching_waiting_requests_run_together() -> None:
    async def scenario(server: Server) -> None:
        server.model.gate.clear()
        requests = [server.request(value) for value in range(9)]
        server.model.gate.set()
        answers = await asyncio.gather(*requests)
        assert [float(one["y"][0, 0]) for one in answers] == [2 * value for value in range(9)]
        assert sum(server.model.rows) == 9
        assert max(server.model.rows) == 4

    serve(scenario, batching(max_batch_size=4, num_batch_threads=1, max_enqueued_batches=100))


def test_two_names_of_one_run_share_a_queue() -> None:
    async def scenario(server: Server) -> None:
        await asyncio.gather(server.request(1), server.request(2, signature="alias"))
        assert server.model.rows == [2]

    serve(scenario, batching(max_batch_size=2, batch_timeout_micros=10_000_000, num_batch_threads=1))


def test_new_parameters_are_in_force_when_they_are_answered() -> None:
    async def scenario(server: Server) -> None:
        assert server.control.in_force() == {"enable_batching": False}
        wanted = {"enable_batching": True, "max_batch_size": 2, "batch_timeout_micros": 10_000_000}
        in_force = await server.replace(wanted)
        assert in_force == {**wanted, "batch_scheduler": "shared"}
        assert server.control.in_force() == in_force
        await asyncio.gather(server.request(), server.request())
        assert server.model.rows == [2]
        assert await server.replace({"enable_batching": False}) == {"enable_batching": False}
        await server.request()
        assert server.model.rows == [2, 1]

    serve(scenario)


@pytest.mark.parametrize("scheduler", ["shared", "streaming"])
def test_every_scheduler_can_be_put_in_force(scheduler: str) -> None:
    async def scenario(server: Server) -> None:
        wanted = {"max_batch_size": 2, "num_batch_threads": 2, "batch_timeout_micros": 1000}
        in_force = await server.replace({"batch_scheduler": scheduler, **wanted})
        assert in_force == {"enable_batching": True, "batch_scheduler": scheduler, **wanted}
        answers = await asyncio.gather(*(server.request(value) for value in range(4)))
        assert [float(one["y"][0, 0]) for one in answers] == [0, 2, 4, 6]

    serve(scenario, batching())


@pytest.mark.parametrize("wanted", [{}, {"batch_timeout_micros": 0}])
def test_a_streaming_scheduler_without_a_timeout_is_refused(wanted: dict[str, int]) -> None:
    """A request that no others follow would never be answered."""

    async def scenario(server: Server) -> None:
        before = server.control.in_force()
        with pytest.raises(StatusError, match="batch_timeout_micros must be positive") as refused:
            await server.replace({"batch_scheduler": "streaming", "max_batch_size": 8, **wanted})
        assert refused.value.code == "INVALID_ARGUMENT"
        assert server.control.in_force() == before
        await server.request()

    serve(scenario, batching(max_batch_size=4))


def test_the_number_of_threads_changes_too() -> None:
    async def scenario(server: Server) -> None:
        await server.replace({"max_batch_size": 1, "num_batch_threads": 3, "max_enqueued_batches": 100})
        server.model.gate.clear()
        requests = [server.request() for _ in range(6)]
        await until(lambda: server.metrics.device.in_flight >= 3)
        assert server.metrics.device.in_flight == 3
        server.model.gate.set()
        await asyncio.gather(*requests)

    serve(scenario, batching(max_batch_size=1, num_batch_threads=1))


def test_no_request_is_lost_while_parameters_change_under_load() -> None:
    async def scenario(server: Server) -> None:
        answered = 0
        stop = False

        async def client(value: float) -> None:
            nonlocal answered
            while not stop:
                assert float((await server.request(value))["y"][0, 0]) == 2 * value
                answered += 1

        clients = [asyncio.ensure_future(client(value)) for value in range(32)]
        for size in (1, 8, 3, 32, 2, 16):
            wanted = {"max_batch_size": size, "num_batch_threads": 1 + size % 3, "max_enqueued_batches": 100}
            await server.replace(wanted)
            goal = answered + 100
            await until(lambda goal=goal: answered >= goal)
            await server.replace({"enable_batching": False})
        stop = True
        await asyncio.gather(*clients)

    serve(scenario)


def test_requests_queued_under_old_parameters_are_answered_under_them() -> None:
    async def scenario(server: Server) -> None:
        waiting = [server.request(value) for value in range(3)]
        assert server.control.queue_depths() == (1, 3)
        await server.replace({"max_batch_size": 1})
        await asyncio.gather(*waiting)
        assert server.model.rows == [3]
        assert server.control.queue_depths() == (0, 0)

    serve(scenario, batching(max_batch_size=8, batch_timeout_micros=60_000_000, num_batch_threads=1))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"max_batch_size": 8, "allowed_batch_sizes": [4]}, "last entry was 4; expected 8"),
        ({"num_batch_threads": 0}, "num_batch_threads must be positive; was 0"),
        ({"max_batchsize": 8}, "unknown batching parameter 'max_batchsize'"),
        ({"max_batch_size": "8"}, "max_batch_size must be a whole number; was '8'"),
        ({"enable_batching": "yes"}, "enable_batching must be true or false"),
        ({"batch_scheduler": "fifo"}, "batch_scheduler must be one of shared, streaming"),
        ({"enable_batching": False, "max_batch_size": 8}, "without setting enable_batching to true"),
    ],
)
def test_parameters_that_the_reference_refuses_change_nothing(wanted: dict[str, Any], said: str) -> None:
    async def scenario(server: Server) -> None:
        before = server.control.in_force()
        with pytest.raises(BatchingParametersError, match=said):
            await server.replace(wanted)
        assert server.control.in_force() == before
        await server.request()

    serve(scenario, batching(max_batch_size=4))


def test_hot_and_cold_application_build_the_same_sessions() -> None:
    async def rows_of(server: Server) -> list[int]:
        server.model.gate.clear()
        first = server.request()
        await until(lambda: server.metrics.device.in_flight > 0)
        rest = [server.request() for _ in range(10)]
        server.model.gate.set()
        await asyncio.gather(first, *rest)
        return server.model.rows

    seen: list[list[int]] = []
    wanted = {"max_batch_size": 4, "num_batch_threads": 1, "max_enqueued_batches": 9}

    async def hot(server: Server) -> None:
        await server.replace(wanted)
        seen.append(await rows_of(server))

    async def cold(server: Server) -> None:
        seen.append(await rows_of(server))

    serve(hot)
    serve(cold, batching(**wanted))
    assert seen[0] == seen[1] == [1, 4, 4, 2]


def test_a_model_s_own_file_replaces_all_but_the_threads(tmp_path: Path) -> None:
    (tmp_path / "batching_params.pbtxt").write_text(
        "max_batch_size { value: 2 } batch_timeout_micros { value: 9000000 }"
    )
    own = own_batching_parameters(tmp_path)
    assert own == BatchingParameters(max_batch_size=2, batch_timeout_micros=9_000_000)

    async def scenario(server: Server) -> None:
        await asyncio.gather(server.request(), server.request())
        assert server.model.rows == [2]

    serve(scenario, BatchingSettings(enabled=True, per_model=True), own=own)


def test_per_model_parameters_without_a_file_mean_no_batching(tmp_path: Path) -> None:
    assert own_batching_parameters(tmp_path) is None

    async def scenario(server: Server) -> None:
        await asyncio.gather(*(server.request() for _ in range(4)))
        assert server.model.rows == [1] * 4

    settings = BatchingSettings(
        enabled=True,
        per_model=True,
        parameters=BatchingParameters(max_batch_size=4, batch_timeout_micros=9_000_000),
    )
    serve(scenario, settings)


def test_a_wrong_file_of_a_model_s_own_is_named(tmp_path: Path) -> None:
    (tmp_path / "batching_params.pbtxt").write_text("max_batch_size: 2")
    with pytest.raises(StatusError, match=r"batching_params\.pbtxt:1: max_batch_size is a wrapper"):
        own_batching_parameters(tmp_path)


def test_requests_beyond_the_limit_wait_for_their_turn() -> None:
    async def scenario(server: Server) -> None:
        server.model.gate.clear()
        requests = [server.request(value) for value in range(7)]
        await asyncio.sleep(0.02)
        assert server.control.queue_depths()[1] + server.metrics.device.in_flight <= 3
        server.model.gate.set()
        answers = await asyncio.gather(*requests)
        assert [float(one["y"][0, 0]) for one in answers] == [2 * value for value in range(7)]
        assert max(server.model.rows) <= 3

    settings = batching(max_batch_size=8, num_batch_threads=1, batch_timeout_micros=1000)
    serve(scenario, settings, limit=ConcurrencyLimit(3))


def test_a_request_that_is_refused_when_its_turn_comes_is_told_so() -> None:
    async def scenario(server: Server) -> None:
        server.model.gate.clear()
        requests = [server.request() for _ in range(6)]
        server.model.gate.set()
        ended = await asyncio.gather(*requests, return_exceptions=True)
        failed = [one for one in ended if isinstance(one, StatusError)]
        assert all(one.code == "UNAVAILABLE" for one in failed)
        assert len(failed) < 6
        await server.request()

    settings = batching(max_batch_size=1, num_batch_threads=1, max_enqueued_batches=1)
    serve(scenario, settings, limit=ConcurrencyLimit(4))


def test_a_fault_of_the_model_s_session_is_an_internal_error_and_frees_its_place() -> None:
    class FaultySession:
        def submit(self, *_arguments: Any) -> None:
            raise KeyError("a programming error")

        def close(self) -> None:
            pass

    async def scenario(server: Server) -> None:
        real = dict(server.servable._sessions)
        server.servable._sessions = {"s": FaultySession()}
        for _ in range(3):
            with pytest.raises(StatusError, match="the server failed to handle the request") as raised:
                await server.request()
            assert raised.value.code == "INTERNAL"
        server.servable._sessions = real
        await server.request()  # the limit of one has a place

    serve(scenario, batching(), limit=ConcurrencyLimit(1))


def test_a_closed_servable_is_not_found_and_an_unknown_signature_is_said() -> None:
    async def scenario(server: Server) -> None:
        with pytest.raises(StatusError, match='Serving signature key "t" not found') as raised:
            server.request(signature="t")
        assert raised.value.code == "FAILED_PRECONDITION"
        server.control.detach(server.servable)
        await asyncio.to_thread(server.servable.close)
        with pytest.raises(StatusError, match=r"Servable not found for request: Specific\(m, 1\)"):
            server.request()

    serve(scenario, batching())


@pytest.mark.parametrize("settings", [BatchingSettings(), batching(max_batch_size=1, num_batch_threads=1)])
def test_closing_a_servable_waits_for_its_requests_before_it_frees_the_model(
    settings: BatchingSettings,
) -> None:
    async def scenario(server: Server) -> None:
        server.model.gate.clear()
        requests = [server.request(value) for value in range(5)]
        closing = asyncio.ensure_future(asyncio.to_thread(server.servable.close))
        await asyncio.sleep(0.02)
        assert not closing.done()
        server.model.gate.set()
        await closing
        assert len(server.model.rows) == 5
        assert [float(one["y"][0, 0]) for one in await asyncio.gather(*requests)] == [0, 2, 4, 6, 8]

    serve(scenario, settings)


def test_a_full_queue_is_refused_at_once_where_no_retry_fits_the_time() -> None:
    async def scenario(server: Server) -> None:
        server.model.gate.clear()
        running = server.request()
        await until(lambda: server.metrics.device.in_flight == 1)
        waiting = server.request()
        with pytest.raises(StatusError, match="is full"):
            server.request()
        server.model.gate.set()
        await asyncio.gather(running, waiting)

    settings = batching(max_batch_size=1, num_batch_threads=1, max_enqueued_batches=1)
    serve(scenario, replace(settings, retry_max_time_micros=50, retry_delay_micros=100))


def test_a_request_being_retried_survives_a_change_of_parameters() -> None:
    async def scenario(server: Server) -> None:
        server.model.gate.clear()
        requests = [server.request(value) for value in range(4)]  # one runs, one waits, two are tried again
        replacing = asyncio.ensure_future(server.replace({"max_batch_size": 8}))
        await replacing
        server.model.gate.set()
        assert [float(one["y"][0, 0]) for one in await asyncio.gather(*requests)] == [0, 2, 4, 6]

    parameters = BatchingParameters(max_batch_size=1, num_batch_threads=1, max_enqueued_batches=1)
    serve(scenario, BatchingSettings(enabled=True, parameters=parameters, retry_max_time_micros=500_000))


def test_metadata_is_made_from_the_signatures_where_the_model_has_none() -> None:
    async def scenario(server: Server) -> None:
        definitions = SignatureDefMap.FromString(server.servable.metadata).signature_def
        assert sorted(definitions) == ["alias", "s"]
        assert definitions["s"].inputs["x"].tensor_shape.dim[0].size == -1

    serve(scenario)


def test_the_lag_of_the_loop_is_sampled() -> None:
    async def scenario(server: Server) -> None:
        heard: list[float] = []
        with loop_lag_sampled(asyncio.get_running_loop().call_soon_threadsafe, heard.append):
            await until(lambda: bool(heard))
        assert heard[0] >= 0

    serve(scenario)


def test_settings_that_a_model_cannot_be_made_ready_for_leave_no_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise MemoryError("no room for these batches")

    async def scenario(server: Server) -> None:
        before = threading.active_count()
        model = server.servable._model
        assert model is not None
        monkeypatch.setattr(type(model), "prepare", out_of_memory)
        with pytest.raises(MemoryError):
            await server.replace({"num_batch_threads": 7})
        assert threading.active_count() <= before + 1  # the one that `to_thread` keeps
        assert server.control.in_force()["num_batch_threads"] == 1
        await server.request()

    serve(scenario, batching(num_batch_threads=1, batch_timeout_micros=0))


def test_a_fault_of_an_answer_frees_its_place_once() -> None:
    limit = ConcurrencyLimit(1)

    async def scenario(server: Server) -> None:
        times: list[Any] = []

        def done(*answer: Any) -> None:
            times.append(answer)
            raise KeyError("a programming error")

        server.servable.submit("s", {"x": np.ones((1, 1), np.float32)}, None, None, done)
        await until(lambda: len(times) == 2)  # the second time it is told of the fault
        assert limit.inside == 0
        await server.request()
        assert limit.inside == 0

    serve(scenario, batching(batch_timeout_micros=0), limit=limit)


def test_a_pool_that_ends_takes_its_sessions_under_its_lock() -> None:
    """A version that ends at the same time forgets its own, on another thread."""

    async def scenario(server: Server) -> None:
        pool = server.servable._pool
        assert pool is not None
        locked: list[bool] = []

        class Sessions(list[Any]):
            def pop(self, *arguments: Any) -> Any:
                locked.append(pool._lock.locked())
                return super().pop(*arguments)

        pool._batched = Sessions(pool._batched)
        await asyncio.to_thread(pool.close)
        assert locked == [True]

    serve(scenario, batching(batch_timeout_micros=0))


def test_length_buckets_are_replaced_like_parameters_and_stay_until_they_are() -> None:
    async def scenario(server: Server) -> None:
        replaced = await server.replace({"max_batch_size": 8, "length_buckets": "32,64"})
        assert replaced["length_buckets"] == [32, 64]
        assert (await server.replace({"max_batch_size": 4}))["length_buckets"] == [32, 64]
        with pytest.raises(BatchingParametersError, match="length_buckets entries must be"):
            await server.replace({"length_buckets": [64, 32]})
        assert server.control.in_force()["length_buckets"] == [32, 64]
        assert (await server.replace({"length_buckets": "auto"}))["length_buckets"] == "auto"
        assert "length_buckets" not in await server.replace({"length_buckets": "none"})
        assert "length_buckets" not in await server.replace(
            {"enable_batching": False, "length_buckets": [32]}
        )

    serve(scenario, batching(max_batch_size=2))


def test_one_model_has_parameters_of_its_own_and_the_others_those_of_all() -> None:
    async def scenario(server: Server) -> None:
        own = {"max_batch_size": 1}
        wanted = {"max_batch_size": 3, "num_batch_threads": 1, "models": {"m": own}}
        in_force = await server.replace(wanted)
        assert in_force["models"] == {"m": own}
        await asyncio.gather(*(server.request() for _ in range(3)))
        assert server.model.rows == [1, 1, 1]
        assert "max_batch_size 1," in server.servable.summary()
        assert "models" not in await server.replace({"max_batch_size": 3, "batch_timeout_micros": 10_000_000})
        await asyncio.gather(*(server.request() for _ in range(3)))
        assert server.model.rows[3:] == [3]

    serve(scenario, batching(max_batch_size=8))


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"n": {}}, "no model 'n' is served; served are: m"),
        ({"m": 3}, "models must be an object of objects"),
        ({"m": {"num_batch_threads": 2}}, "models.m.num_batch_threads: all models share it"),
        ({"m": {"max_batch_size": 0}}, "input_batch_size_limit must be positive"),
        ({"m": {"size": 1}}, "unknown batching parameter 'size'"),
    ],
)
def test_own_parameters_that_cannot_be_change_nothing(models: Any, words: str) -> None:
    async def scenario(server: Server) -> None:
        before = server.control.in_force()
        with pytest.raises(BatchingParametersError) as caught:
            await server.replace({"models": models})
        assert words in caught.value.message
        assert server.control.in_force() == before

    serve(scenario, batching(max_batch_size=8))
