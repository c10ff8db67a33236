"""Runs the trials of a sweep on one server, or on several nodes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Final, Protocol

from batchtune.errors import MeasurementInvalidError
from batchtune.tune.bench import Plan
from batchtune.tune.trials.trial import FinishedTrial

WAIT_S: Final = 0.25


class TrialBench(Protocol):
    """Whatever can run a trial: a server under load, a recorded table, a simulator."""

    def run(self, plan: Plan) -> FinishedTrial: ...


class Nodes(Protocol):
    """Whatever can run several trials at once, one on each node."""

    @property
    def names(self) -> Sequence[str]:
        """The nodes that are left; empty: one server, which has no name."""

    def run_all(self, plans: Sequence[Plan]) -> Iterator[FinishedTrial]:
        """Run these, in this order as nodes become free, and yield each as it ends, with its node.

        Raises:
            MeasurementInvalidError: no node is left.
        """


class OneServer:
    """Nodes where there is one server: one trial after another."""

    names: Sequence[str] = ()

    def __init__(self, bench: TrialBench) -> None:
        self._bench = bench

    def run_all(self, plans: Sequence[Plan]) -> Iterator[FinishedTrial]:
        for plan in plans:
            yield self._bench.run(plan)


class NodeBenches:
    """Nodes with a bench each, on a thread each; a bench that raises MeasurementInvalidError has lost its node.

    What a lost node was running is run on another. `on_wait` is called a few times a second.
    """

    def __init__(
        self,
        benches: Mapping[str, TrialBench],
        *,
        on_event: Callable[[str], None] = lambda _text: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._benches = dict(benches)
        self._on_event = on_event
        self._on_wait = on_wait

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._benches)

    def run_all(self, plans: Sequence[Plan]) -> Iterator[FinishedTrial]:
        waiting = list(plans)
        running: dict[Future[FinishedTrial], tuple[str, Plan]] = {}
        threads = ThreadPoolExecutor(max_workers=max(len(self._benches), 1))
        try:
            while waiting or running:
                self._start(waiting, running, threads)
                ended, _ = wait(running, timeout=WAIT_S, return_when=FIRST_COMPLETED)
                if not ended:
                    self._on_wait()
                for future in ended:
                    name, plan = running.pop(future)
                    try:
                        done = future.result()
                    except MeasurementInvalidError as error:
                        self._lose(name, error)
                        waiting.insert(0, plan)
                    else:
                        yield replace(done, trial=replace(done.trial, node=name))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _start(
        self,
        waiting: list[Plan],
        running: dict[Future[FinishedTrial], tuple[str, Plan]],
        threads: ThreadPoolExecutor,
    ) -> None:
        busy = {name for name, _ in running.values()}
        for name, bench in self._benches.items():
            if waiting and name not in busy:
                plan = waiting.pop(0)
                running[threads.submit(bench.run, plan)] = (name, plan)

    def _lose(self, name: str, error: MeasurementInvalidError) -> None:
        self._benches.pop(name, None)
        if not self._benches:
            last = f"{name}, the last node, was lost: {error.message}"
            raise MeasurementInvalidError(last, hint=error.hint) from error
        self._on_event(f"{name} is lost: {error.message}; its trial is run again on another node")
