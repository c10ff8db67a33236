"""The loop is woken on time, by timerfd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import uvloop

from batchtune.load.worker_process import Pacer

MILLISECOND_NS = 1_000_000


def in_loop(body: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await body()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_it_never_wakes_before_the_time() -> None:
    async def body() -> None:
        woken = asyncio.Event()
        pacer = Pacer(asyncio.get_running_loop(), woken.set)
        for offset_ns in (3 * MILLISECOND_NS, 100_000, 12_345_678):
            woken.clear()
            when_ns = time.monotonic_ns() + offset_ns
            pacer.wake_at(when_ns)
            await asyncio.wait_for(woken.wait(), 5)
            assert time.monotonic_ns() >= when_ns
        pacer.close()

    in_loop(body)


def test_a_time_in_the_past_wakes_at_once() -> None:
    async def body() -> None:
        woken = asyncio.Event()
        pacer = Pacer(asyncio.get_running_loop(), woken.set)
        for when_ns in (0, -5, time.monotonic_ns() - 1):
            woken.clear()
            pacer.wake_at(when_ns)
            await asyncio.wait_for(woken.wait(), 5)
        pacer.close()

    in_loop(body)


def test_it_wakes_once_for_each_time_and_the_last_time_given_holds() -> None:
    async def body() -> None:
        wakes: list[int] = []
        woken = asyncio.Event()

        def wake() -> None:
            wakes.append(time.monotonic_ns())
            woken.set()

        pacer = Pacer(asyncio.get_running_loop(), wake)
        now_ns = time.monotonic_ns()
        pacer.wake_at(now_ns + 2 * MILLISECOND_NS)
        pacer.wake_at(now_ns + 20 * MILLISECOND_NS)
        await asyncio.wait_for(woken.wait(), 5)
        await asyncio.sleep(0.02)
        assert len(wakes) == 1
        assert wakes[0] >= now_ns + 19 * MILLISECOND_NS
        pacer.close()

    in_loop(body)


def test_a_wake_may_set_the_next() -> None:
    async def body() -> None:
        wakes = 0
        finished = asyncio.Event()

        def wake() -> None:
            nonlocal wakes
            wakes += 1
            if wakes < 20:
                pacer.wake_at(time.monotonic_ns() - 1)
            else:
                finished.set()

        pacer = Pacer(asyncio.get_running_loop(), wake)
        pacer.wake_at(time.monotonic_ns())
        await asyncio.wait_for(finished.wait(), 5)
        await asyncio.sleep(0.005)
        assert wakes == 20
        pacer.close()

    in_loop(body)


def test_a_closed_pacer_stays_silent() -> None:
    async def body() -> None:
        wakes: list[None] = []
        pacer = Pacer(asyncio.get_running_loop(), lambda: wakes.append(None))
        pacer.wake_at(time.monotonic_ns() + MILLISECOND_NS)
        pacer.close()
        pacer.close()
        await asyncio.sleep(0.01)
        assert wakes == []

    in_loop(body)
