"""The loop is woken on time, by timerfd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvloop

from batchtune.load.worker_process import Pacer

MILLISECOND_NS = 1_000_000
loop_factory = uvloop.new_event_loop


@contextmanager
def paced(on_wake: Callable[[Pacer], None] = lambda _: None) -> Iterator[tuple[Pacer, list[int]]]:
    """A pacer in this loop, and the instants at which it woke."""
    wakes: list[int] = []

    def wake() -> None:
        wakes.append(time.monotonic_ns())
        on_wake(pacer)

    pacer = Pacer(asyncio.get_running_loop(), wake)
    yield pacer, wakes
    pacer.close()
    pacer.close()


async def woken(wakes: list[int], count: int = 1) -> None:
    async with asyncio.timeout(5):
        while len(wakes) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_it_never_wakes_before_the_time_and_at_once_for_one_in_the_past() -> None:
    with paced() as (pacer, wakes):
        for offset_ns in (3 * MILLISECOND_NS, 100_000, 12_345_678, -1):
            wakes.clear()
            when_ns = time.monotonic_ns() + offset_ns
            pacer.wake_at(when_ns)
            await woken(wakes)
            assert wakes[0] >= when_ns
        for when_ns in (0, -5):
            wakes.clear()
            pacer.wake_at(when_ns)
            await woken(wakes)


async def test_it_wakes_once_for_each_time_and_the_last_time_given_holds() -> None:
    with paced() as (pacer, wakes):
        now_ns = time.monotonic_ns()
        pacer.wake_at(now_ns + 2 * MILLISECOND_NS)
        pacer.wake_at(now_ns + 20 * MILLISECOND_NS)
        await woken(wakes)
        await asyncio.sleep(0.02)
        assert len(wakes) == 1
        assert wakes[0] >= now_ns + 19 * MILLISECOND_NS


async def test_a_wake_may_set_the_next() -> None:
    with paced(lambda pacer: pacer.wake_at(time.monotonic_ns() - 1) if len(wakes) < 20 else None) as (
        pacer,
        wakes,
    ):
        pacer.wake_at(time.monotonic_ns())
        await woken(wakes, 20)
        await asyncio.sleep(0.005)
        assert len(wakes) == 20


async def test_a_closed_pacer_stays_silent() -> None:
    with paced() as (pacer, wakes):
        pacer.wake_at(time.monotonic_ns() + MILLISECOND_NS)
    await asyncio.sleep(0.01)
    assert wakes == []
