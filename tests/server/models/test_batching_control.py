"""New batching parameters come into force at once, for every model, and no request is lost on the way."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters
from batchtune.errors import BatchingParametersError
from batchtune.server.metrics import loop_lag_sampled
from batchtune.server.models.servable import ConcurrencyLimit
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.server.startup import own_batching_parameters
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import SignatureDefMap
from tests.server.models.model_fakes import Server, batching, serving, until, values

ONE_WAITS = {"max_batch_size": 1, "num_batch_threads": 1, "max_enqueued_batches": 1}
FOURS = {"max_batch_size": 4, "num_batch_threads": 1, "max_enqueued_batches": 9}
PER_MODEL = BatchingSettings(enabled=True, per_model=True)
LIMIT_OF_ONE = ConcurrencyLimit(1)


@serving()
async def test_without_batching_every_request_runs_alone(server: Server) -> None:
    assert await server.answers(5) == [0, 2, 4, 6, 8]
    assert server.model.rows == [1] * 5
    assert 'batch_execution_count{batch_size="1"} 5' in server.metrics.render()


@serving(batching(max_batch_size=2, batch_timeout_micros=10_000_000, num_batch_threads=1))
async def test_two_names_of_one_run_share_a_queue(server: Server) -> None:
    await asyncio.gather(server.request(1), server.request(2, signature="alias"))
    assert server.model.rows == [2]


@serving()
async def test_new_parameters_are_in_force_when_they_are_answered(server: Server) -> None:
    assert server.control.in_force() == {"enable_batching": False}
    wanted = {"enable_batching": True, "max_batch_size": 2, "batch_timeout_micros": 10_000_000}
    in_force = await server.replace(**wanted)
    assert in_force == {**wanted, "batch_scheduler": "shared"}
    assert server.control.in_force() == in_force
    await server.answers(2)
    assert await server.replace(enable_batching=False) == {"enable_batching": False}
    await server.request()
    assert server.model.rows == [2, 1]


@pytest.mark.parametrize("scheduler", ["shared", "streaming"])
@serving(batching())
async def test_every_scheduler_can_be_put_in_force(server: Server, scheduler: str) -> None:
    wanted = {"max_batch_size": 2, "num_batch_threads": 2, "batch_timeout_micros": 1000}
    in_force = await server.replace(batch_scheduler=scheduler, **wanted)
    assert in_force == {"enable_batching": True, "batch_scheduler": scheduler, **wanted}
    assert await server.answers(4) == [0, 2, 4, 6]


@serving(batching(max_batch_size=1, num_batch_threads=1))
async def test_the_number_of_threads_changes_too(server: Server) -> None:
    await server.replace(max_batch_size=1, num_batch_threads=3, max_enqueued_batches=100)
    server.model.gate.clear()
    requests = [server.request() for _ in range(6)]
    await until(lambda: server.metrics.device.in_flight >= 3)
    assert server.metrics.device.in_flight == 3
    server.model.gate.set()
    await asyncio.gather(*requests)


@serving()
async def test_no_request_is_lost_while_parameters_change_under_load(server: Server) -> None:
    answered, stop = [0], threading.Event()

    async def client(value: float) -> None:
        while not stop.is_set():
            assert values([await server.request(value)]) == [2 * value]
            answered[0] += 1

    clients = [asyncio.ensure_future(client(value)) for value in range(32)]
    for size in (1, 8, 3, 32, 2, 16):
        await server.replace(max_batch_size=size, num_batch_threads=1 + size % 3, max_enqueued_batches=100)
        goal = answered[0] + 100
        await until(lambda goal=goal: answered[0] >= goal)
        await server.replace(enable_batching=False)
    stop.set()
    await asyncio.gather(*clients)


@serving(batching(max_batch_size=8, batch_timeout_micros=60_000_000, num_batch_threads=1))
async def test_requests_queued_under_old_parameters_are_answered_under_them(server: Server) -> None:
    waiting = [server.request(value) for value in range(3)]
    assert server.control.queue_depths() == (1, 3)
    await server.replace(max_batch_size=1)
    await asyncio.gather(*waiting)
    assert server.model.rows == [3]
    assert server.control.queue_depths() == (0, 0)


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
        ({"length_buckets": [64, 32]}, "length_buckets entries must be"),
        ({"models": {"n": {}}}, "no model 'n' is served; served are: m"),
        ({"models": {"m": 3}}, "models must be an object of objects"),
        ({"models": {"m": {"num_batch_threads": 2}}}, "models.m.num_batch_threads: all models share it"),
        ({"models": {"m": {"max_batch_size": 0}}}, "input_batch_size_limit must be positive"),
        ({"models": {"m": {"size": 1}}}, "unknown batching parameter 'size'"),
        # A request that no others follow would never be answered.
        ({"batch_scheduler": "streaming"}, "INVALID_ARGUMENT: batch_timeout_micros must be positive"),
        ({"batch_scheduler": "streaming", "batch_timeout_micros": 0}, "batch_timeout_micros must be"),
    ],
)
@serving(replace(batching(max_batch_size=4), length_buckets=(32, 64)))
async def test_what_is_refused_changes_nothing(server: Server, wanted: dict[str, Any], said: str) -> None:
    before = server.control.in_force()
    with pytest.raises((BatchingParametersError, StatusError), match=re.escape(said)):
        await server.replace(**wanted)
    assert server.control.in_force() == before
    await server.request()


@pytest.mark.parametrize("hot", [True, False])
@serving(batching(**FOURS))
async def test_hot_and_cold_application_build_the_same_sessions(server: Server, hot: bool) -> None:
    if hot:
        await server.replace(enable_batching=False)
        await server.replace(**FOURS)
    server.model.gate.clear()
    first = server.request(9)
    await until(lambda: server.metrics.device.in_flight > 0)
    rest = asyncio.ensure_future(server.answers(10))
    await asyncio.sleep(0)
    server.model.gate.set()
    assert values([await first]) == [18]
    assert await rest == [2 * value for value in range(10)]
    assert server.model.rows == [1, 4, 4, 2]


@serving(PER_MODEL, own_parameters=BatchingParameters(max_batch_size=2, batch_timeout_micros=9_000_000))
async def test_a_model_s_own_file_replaces_all_but_the_threads(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "batching_params.pbtxt"
    file.write_text("max_batch_size { value: 2 } batch_timeout_micros { value: 9000000 }")
    assert own_batching_parameters(tmp_path) == server.servable.own_parameters
    await server.answers(2)
    assert server.model.rows == [2]
    file.write_text("max_batch_size: 2")
    with pytest.raises(StatusError, match=r"batching_params\.pbtxt:1: max_batch_size is a wrapper"):
        own_batching_parameters(tmp_path)


@serving(replace(PER_MODEL, parameters=BatchingParameters(max_batch_size=4, batch_timeout_micros=9_000_000)))
async def test_per_model_parameters_without_a_file_mean_no_batching(server: Server, tmp_path: Path) -> None:
    assert own_batching_parameters(tmp_path) is None
    await server.answers(4)
    assert server.model.rows == [1] * 4


@serving(
    batching(max_batch_size=8, num_batch_threads=1, batch_timeout_micros=1000), limit=ConcurrencyLimit(3)
)
async def test_requests_beyond_the_limit_wait_for_their_turn(server: Server) -> None:
    server.model.gate.clear()
    requests = [server.request(value) for value in range(7)]
    await asyncio.sleep(0.02)
    assert server.control.queue_depths()[1] + server.metrics.device.in_flight <= 3
    server.model.gate.set()
    assert values(await asyncio.gather(*requests)) == [2 * value for value in range(7)]
    assert max(server.model.rows) <= 3


@serving(batching(**ONE_WAITS), limit=ConcurrencyLimit(4))
async def test_a_request_that_is_refused_when_its_turn_comes_is_told_so(server: Server) -> None:
    server.model.gate.clear()
    requests = [server.code() for _ in range(6)]
    server.model.gate.set()
    codes = await asyncio.gather(*requests)
    assert set(codes) <= {"OK", "UNAVAILABLE"}
    assert "OK" in codes
    await server.request()


@serving(batching(), limit=ConcurrencyLimit(1))
async def test_a_fault_of_a_session_is_an_internal_error_and_frees_its_place(server: Server) -> None:
    def submit(*_arguments: Any) -> None:
        raise KeyError("a programming error")

    real = dict(server.servable._sessions)
    server.servable._sessions = {"s": SimpleNamespace(submit=submit)}  # type: ignore[dict-item]
    for _ in range(3):
        with pytest.raises(StatusError, match=r"^INTERNAL: .*the server failed to handle the request"):
            await server.request()
    server.servable._sessions = real
    await server.request()  # the limit of one has a place


@serving(batching())
async def test_a_closed_servable_is_not_found_and_an_unknown_signature_is_said(server: Server) -> None:
    with pytest.raises(StatusError, match='Serving signature key "t" not found') as raised:
        server.request(signature="t")
    assert raised.value.code == "FAILED_PRECONDITION"
    await server.end(server.servable)
    with pytest.raises(StatusError, match=r"Servable not found for request: Specific\(m, 1\)"):
        server.request()


@serving(replace(batching(**ONE_WAITS), retry_max_time_micros=50, retry_delay_micros=100))
async def test_a_full_queue_is_refused_at_once_where_no_retry_fits_the_time(server: Server) -> None:
    server.model.gate.clear()
    running = server.request()
    await until(lambda: server.metrics.device.in_flight == 1)
    waiting = server.request()
    with pytest.raises(StatusError, match="is full"):
        server.request()
    server.model.gate.set()
    await asyncio.gather(running, waiting)


@serving(replace(batching(**ONE_WAITS), retry_max_time_micros=500_000))
async def test_a_request_being_retried_survives_a_change_of_parameters(server: Server) -> None:
    server.model.gate.clear()
    requests = [server.request(value) for value in range(4)]  # one runs, one waits, two are tried again
    await server.replace(max_batch_size=8)
    server.model.gate.set()
    assert values(await asyncio.gather(*requests)) == [0, 2, 4, 6]


@serving()
async def test_metadata_is_made_from_the_signatures_where_the_model_has_none(server: Server) -> None:
    definitions = SignatureDefMap.FromString(server.servable.metadata).signature_def
    assert sorted(definitions) == ["alias", "s"]
    assert definitions["s"].inputs["x"].tensor_shape.dim[0].size == -1


@serving()
async def test_the_lag_of_the_loop_is_sampled(server: Server) -> None:
    heard: list[float] = []
    with loop_lag_sampled(asyncio.get_running_loop().call_soon_threadsafe, heard.append):
        await until(lambda: bool(heard))
    assert heard[0] >= 0


@serving(batching(num_batch_threads=1, batch_timeout_micros=0))
async def test_settings_without_room_leave_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise MemoryError("no room for these batches")

    before = threading.active_count()
    monkeypatch.setattr(type(server.servable._model), "prepare", out_of_memory)
    with pytest.raises(MemoryError):
        await server.replace(num_batch_threads=7)
    assert threading.active_count() <= before + 1  # the one that `to_thread` keeps
    assert server.control.in_force()["num_batch_threads"] == 1
    await server.request()


@serving(batching(batch_timeout_micros=0), limit=LIMIT_OF_ONE)
async def test_a_fault_of_an_answer_frees_its_place_once(server: Server) -> None:
    times: list[Any] = []

    def done(*answer: Any) -> None:
        times.append(answer)
        raise KeyError("a programming error")

    server.servable.submit("s", {"x": np.ones((1, 1), np.float32)}, None, None, done)
    await until(lambda: len(times) == 2)  # the second time it is told of the fault
    assert LIMIT_OF_ONE.inside == 0
    await server.request()
    assert LIMIT_OF_ONE.inside == 0


@serving(batching(max_batch_size=2))
async def test_length_buckets_are_replaced_like_parameters_and_stay_until_they_are(server: Server) -> None:
    for wanted, buckets in (
        ({"max_batch_size": 8, "length_buckets": "32,64"}, [32, 64]),
        ({"max_batch_size": 4}, [32, 64]),
        ({"length_buckets": "auto"}, "auto"),
        ({"length_buckets": "none"}, None),
        ({"enable_batching": False, "length_buckets": [32]}, None),
    ):
        assert (await server.replace(**wanted)).get("length_buckets") == buckets


@serving(batching(max_batch_size=8))
async def test_one_model_has_parameters_of_its_own_and_the_others_those_of_all(server: Server) -> None:
    own = {"m": {"max_batch_size": 1}}
    in_force = await server.replace(max_batch_size=3, num_batch_threads=1, models=own)
    assert in_force["models"] == own
    await server.answers(3)
    assert server.model.rows == [1, 1, 1]
    assert "max_batch_size 1," in server.servable.summary()
    assert "models" not in await server.replace(max_batch_size=3, batch_timeout_micros=10_000_000)
    await server.answers(3)
    assert server.model.rows[3:] == [3]
