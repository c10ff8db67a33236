"""How do the processes of this machine simulate a whole fleet? Each plays a range of its pieces at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing import connection
from typing import TYPE_CHECKING, Final

from batchtune.errors import TwinError

if TYPE_CHECKING:
    from batchtune.twin.simulator.whole_fleet import Played

AHEAD: Final = 2
"""Ranges for each process: the one that it plays, and one that waits, so that it is never idle."""


@contextmanager
def process_players(
    play: Callable[[tuple[int, int]], Played], processes: int
) -> Iterator[Callable[[Iterator[tuple[int, int]]], Iterator[Played]]]:
    """What plays ranges on so many processes, in whatever order; they end with it, after what they have begun.

    Raises:
        TwinError: a process was killed.
    """
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=spawn, initializer=_live_with_the_parent)
    try:
        yield partial(_spread, pool, play, AHEAD * processes)
    except BrokenProcessPool as error:
        raise TwinError(
            f"--exact: one of the {processes} processes that simulate the fleet was killed",
            hint="if the machine ran out of memory, leave it fewer CPUs, and so processes: "
            "`taskset -c 0 batchtune plan …`",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _spread(
    pool: ProcessPoolExecutor,
    play: Callable[[tuple[int, int]], Played],
    most: int,
    ranges: Iterator[tuple[int, int]],
) -> Iterator[Played]:
    """At most so many ranges are on their way."""
    under_way: set[Future[Played]] = set()
    while True:
        under_way |= {pool.submit(play, pieces) for pieces in islice(ranges, most - len(under_way))}
        if not under_way:
            return
        ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
        for future in ended:
            yield future.result()


def _live_with_the_parent() -> None:
    """Leave Ctrl-C to the parent, which ends its processes, and end when it ends, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(0)
