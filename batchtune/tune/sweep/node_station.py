"""Runs trials on a node for a head elsewhere: a server of its own, its load beside it, and a bench.

The process of the station (a Ray actor's) only waits and answers the head; trials run on one thread. It is the same for
all, since the kernel ends a server with the thread that launched it (`target.process.ending_with_us`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

from batchtune.errors import BatchtuneError
from batchtune.load.cluster.choice import client_max_rps, fleet_of
from batchtune.load.cluster.host import HostLostError, Place, Progress, at_usual_priority, this_place
from batchtune.load.live import LiveAggregate
from batchtune.measure.validity.host import HostGuard
from batchtune.scenario.placement import placed_on_node
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import target_of
from batchtune.target.triton.target import TritonTarget
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.trials.trial import FinishedTrial

ENDING_S = 5.0
"""How long a trial in flight may take to end once its server is gone."""


class NodeStation:
    """A node's server under test; `open` before anything else runs, `close` ends everything."""

    def __init__(self) -> None:
        at_usual_priority()
        self._stack = ExitStack()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._bench: Bench | None = None
        self._running: _RunningTrial | None = None

    def place(self) -> Place:
        return this_place()

    def open(self, scenario: Scenario, cpus: Sequence[int], alone: bool) -> Scenario:
        """Make ready to launch the server on its share of these CPUs; the scenario as it is run here.

        Unless it is `alone` on its machine, the host is not watched: what the others do would look like noise. A Triton
        is launched, and what its model's configuration says of batching is found.

        Raises:
            TargetError, UsageError: a Triton that does not start, or a model that cannot be batched.
        """
        here = placed_on_node(scenario, cpus=cpus, alone=alone)
        target, fleet = target_of(here), fleet_of(here.load)
        self._stack.enter_context(target)
        if isinstance(target, TritonTarget):
            batching = self._thread.submit(target.start).result()
            own = here.target.model_copy(update={"found": batching})
            here = here.model_copy(update={"target": own})
        self._stack.enter_context(fleet)
        self._bench = Bench(
            here,
            target,
            fleet,
            on_live=self._note,
            guard=HostGuard() if alone else None,
            client_max_rps=lambda requests: client_max_rps(fleet, requests, server_cpus=here.target.cpus),
        )
        return here

    def begin(self, plan: Plan) -> None:
        """Start a trial."""
        if self._bench is None:
            raise HostLostError("it was not opened")
        self._running = _RunningTrial(self._thread.submit(self._bench.run, plan))

    def look(self) -> Progress:
        """How far the trial is."""
        running = self._trial()
        return Progress(live=running.live, ended=running.ended)

    def result(self) -> FinishedTrial:
        """The trial that has ended; raises what it raised."""
        return self._trial().result()

    def close(self) -> None:
        """Stop the server and the load; a trial in flight fails by that."""
        self._stack.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._running is not None:
            wait([self._running.trial], ENDING_S)

    def _note(self, _plan: Plan, live: LiveAggregate) -> None:
        if self._running is not None:
            self._running.live = live

    def _trial(self) -> _RunningTrial:
        if self._running is None:
            raise HostLostError("it runs no trial")
        return self._running


class _RunningTrial:
    """A trial on the thread of trials, and how far it is."""

    def __init__(self, trial: Future[FinishedTrial]) -> None:
        self.trial = trial
        self.live: LiveAggregate | None = None

    @property
    def ended(self) -> bool:
        return self.trial.done()

    def result(self) -> FinishedTrial:
        error = self.trial.exception(timeout=0.0)
        if error is None or isinstance(error, BatchtuneError):
            return self.trial.result()
        raise HostLostError(f"its trial ended with {type(error).__name__}: {error}") from error
