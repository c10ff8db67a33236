"""How do the CPUs of a Ray cluster simulate a whole fleet? An actor for each CPU plays ranges of its pieces."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final

from batchtune.errors import TargetError
from batchtune.load.cluster.host import HostLostError
from batchtune.load.cluster.ray_actors import RayActor, RayActors
from batchtune.twin.simulator.whole_fleet import Played, WholeFleet, play_range

RANGE_LIMIT_S: Final = 300.0
"""A range takes a tenth of a second, the first one also the compilation of the simulator."""


class RangePlayer:
    """In an actor: plays pieces of one fleet."""

    def __init__(self, fleet: WholeFleet) -> None:
        self._fleet = fleet

    def play(self, first: int, last: int) -> Played:
        return play_range(self._fleet, first, last)

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def ray_players(
    fleet: WholeFleet, address: str
) -> Iterator[tuple[int, Callable[[Iterator[tuple[int, int]]], Iterator[Played]]]]:
    """How many actors there are, and what plays ranges on them; they end with it.

    On the CPUs that others leave free, one at least. A range of an actor that is lost is played by another one. Raises
    UsageError where there is no such cluster, or no room in it.
    """
    with RayActors(address, key="--fleet", thing="worker", remedy="leave --fleet out") as actors:
        cpus = max(int(actors.free("CPU")), 1)
        players = list(actors.start(partial(RangePlayer, fleet), {"CPU": 1.0}, cpus, placement="SPREAD"))
        threads = ThreadPoolExecutor(len(players))
        try:
            yield len(players), partial(threads.map, _Turns(players).play)
        finally:
            threads.shutdown(cancel_futures=True)
            for player in players:
                player.close()


class _Turns:
    """Players that are idle; a lost one never becomes so again."""

    def __init__(self, players: list[RayActor]) -> None:
        self._idle: queue.SimpleQueue[RayActor | None] = queue.SimpleQueue()
        self._left = len(players)
        self._lock = threading.Lock()
        for player in players:
            self._idle.put(player)

    def play(self, pieces: tuple[int, int]) -> Played:
        """By whoever is idle.

        Raises:
            TargetError: no player is left.
        """
        while True:
            player = self._idle.get()
            if player is None:
                self._idle.put(None)  # for those that wait too
                raise TargetError(
                    "every worker of the Ray cluster was lost", hint="leave --fleet out, or try again"
                )
            try:
                played: Played = player.ask("play", *pieces, limit_s=RANGE_LIMIT_S)
            except HostLostError:
                with self._lock:
                    self._left -= 1
                    if self._left == 0:
                        self._idle.put(None)
                continue
            self._idle.put(player)
            return played
