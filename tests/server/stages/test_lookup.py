"""Lookups of several requests are one call, whoever is asked."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchtune.server.stages.plan import RedisLookup
from batchtune.server.stages.stages import BatchingStage
from batchtune.target.process import free_port
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError
from tests.server.models.model_fakes import X
from tests.server.stages.stage_fakes import StagedServer, staged
from tests.waiting import wait_until

ALONE = {"max_batch_size": 8, "batch_timeout_micros": 0, "num_batch_threads": 1}
STAGES = """
    inputs: {user: {dtype: string}, x: {dtype: float32, shape: [1]}}
    lookup:
      inputs: {user: {dtype: string}}
      outputs: {z: {dtype: float32, shape: [1]}}
      code: stages.py:features
      max_batch_size: 3
      batch_timeout_micros: 60000000
"""
CODE = """
    import numpy as np
    ASKED = []

    def features(tensors):
        ASKED.append(tensors["user"].tolist())
        if b"down" in ASKED[-1]:
            raise ConnectionError("the store is down")
        return {"z": np.array([[float(user)] for user in tensors["user"]], np.float32)}
"""
LookupAt = Callable[..., RedisLookup]
Z = TensorSpec(name="z", dtype="float32", shape=(None, 1))


def ask(server: StagedServer, *users: bytes) -> asyncio.Future[dict[str, Any]]:
    x = np.ones((len(users), 1), np.float32)
    return server.request({"user": np.array(users, object), "x": x})


of_users = partial(staged, files=(STAGES, CODE), inputs=(X, Z), **ALONE)


@of_users("device", "unit")
async def test_keys_of_several_requests_are_one_call(server: StagedServer, stage: BatchingStage) -> None:
    answers = await asyncio.gather(ask(server, b"10"), ask(server, b"20", b"30"))
    assert [answer["y"].tolist() for answer in answers] == [[[22.0]], [[42.0], [62.0]]]
    if stage == "device":  # by a scheduler of its own, whatever the device's does
        assert server.code["ASKED"] == [[b"10", b"20", b"30"]]
        assert 'stage_calls_total{model_name="m",stage="lookup"} 1' in server.metrics.render()


@of_users()
async def test_a_request_that_waits_for_its_lookup_says_so(server: StagedServer) -> None:
    answered = ask(server, b"10")
    queued = server.queued
    assert queued is not None
    assert not queued.taken
    await asyncio.gather(answered, ask(server, b"20", b"30"))
    assert queued.taken


@of_users()
async def test_an_error_of_the_lookup_ends_the_requests_that_asked(server: StagedServer) -> None:
    with pytest.raises(StatusError) as raised:
        await ask(server, b"1", b"2", b"down")
    expected = "lookup.code: stages.py, line 8, in features: ConnectionError: the store is down"
    assert (raised.value.code, raised.value.message) == ("INTERNAL", expected)
    assert (await ask(server, b"1", b"2", b"3"))["y"].shape == (3, 1)


STAND_IN = STAGES.replace("code: stages.py:features", "emulated: {base_ms: 1.0}").replace("60000000", "0")


@of_users(files=(STAND_IN, ""))
async def test_a_stand_in_answers_the_sum_of_a_key_after_its_latency(server: StagedServer) -> None:
    began_ns = time.monotonic_ns()
    assert (await ask(server, b"abc"))["y"].tolist() == [[8.0]]  # 2 * (1 + three letters)
    assert time.monotonic_ns() - began_ns >= 1_000_000


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """The keys that a store is asked for, call by call: one that ends in a number gives that number as float32."""
    redis = pytest.importorskip("redis")
    calls: list[list[bytes]] = []

    held = {b"user:long": b"12345678"} | {b"user:%d" % at: np.float32(at).tobytes() for at in range(10)}

    def mget(_self: Any, given: list[bytes]) -> list[bytes | None]:
        calls.append(given)
        return [held.get(key) for key in given]

    monkeypatch.setattr(redis.Redis, "mget", mget)
    return calls


@pytest.fixture
def lookup_at() -> Iterator[LookupAt]:
    pytest.importorskip("redis")
    opened: list[RedisLookup] = []

    def open_lookup(port: int, value: TensorSpec = Z) -> RedisLookup:
        url = f"redis://:secret@127.0.0.1:{port}/0?protocol=2"
        opened.append(RedisLookup(url, "user:", 1000.0, key_name="user", value=value))
        return opened[-1]

    yield open_lookup
    for lookup in opened:
        lookup.close()


def keys(*users: bytes | int) -> dict[str, Any]:
    return {"user": np.array(users, object if isinstance(users[0], bytes) else np.int64)}


def test_a_store_is_asked_once_for_a_batch(asked: list[list[bytes]], lookup_at: LookupAt) -> None:
    lookup = lookup_at(1)
    assert lookup(keys(b"7", b"nobody", b"9"))["z"].tolist() == [[7.0], [0.0], [9.0]]
    assert lookup(keys(5))["z"].tolist() == [[5.0]]
    assert asked == [[b"user:7", b"user:nobody", b"user:9"], [b"user:5"]]
    text = lookup_at(1, TensorSpec(name="z", dtype="object", shape=(None,)))
    assert text(keys(b"long", b"nobody"))["z"].tolist() == [b"12345678", b""]
    words = r"INTERNAL: lookup: the value of 'user:long' has 8 bytes; float32 \[1\] has 4"
    with pytest.raises(StatusError, match=words):
        lookup(keys(b"long"))


def test_a_store_that_is_not_there_is_unavailable_and_its_password_is_kept(lookup_at: LookupAt) -> None:
    with pytest.raises(StatusError, match=r"^UNAVAILABLE: lookup: redis://127\.0\.0\.1:") as raised:
        lookup_at(free_port())(keys(b"7"))
    assert "secret" not in raised.value.message


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StatusError, match=r"pip install 'batchtune\[redis\]'"):
        RedisLookup("redis://h", "", 1.0, key_name="user", value=Z)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server")
def test_a_real_redis_answers_a_batch(tmp_path: Path, lookup_at: LookupAt) -> None:
    redis, port = pytest.importorskip("redis"), free_port()
    command = f"redis-server --port {port} --bind 127.0.0.1 --requirepass secret"
    process = subprocess.Popen([*command.split(), "--save", "", "--dir", tmp_path], stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port, password="secret")

    def answers() -> bool:
        with suppress(redis.ConnectionError):
            return bool(client.ping())
        return False

    try:
        wait_until(answers)
        client.set("user:7", np.float32(0.5).tobytes())
        assert lookup_at(port)(keys(b"7", b"8"))["z"].tolist() == [[0.5], [0.0]]
    finally:
        client.close()
        process.terminate()
        process.wait(10)
