"""Runs the trials of a sweep on the nodes of a Ray cluster, each with a server under test and its load generators."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final, cast

from batchtune.errors import BatchtuneError, MeasurementInvalidError, TargetError, UsageError
from batchtune.load.cluster.cluster_fleet import client_max_rps, fleet_of
from batchtune.load.cluster.host import Place, at_usual_priority, this_place
from batchtune.load.cluster.ray_actors import RayActors
from batchtune.load.fleet import LiveAggregate
from batchtune.measure.caveats import HostGuard
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import placed_on_node, target_of, unplaced
from batchtune.target.triton import TritonTarget
from batchtune.tune.bench import Bench, Plan, TrialBench
from batchtune.tune.trials.trial import FinishedTrial
from batchtune.units import counted

WAIT_S: Final = 0.25
"""Seconds between two calls of `on_wait`, and two looks at a trial on a node (tests/tune/sweep/test_nodes.py)."""


class NodeBenches:
    """Runs trials on several nodes at once, each by a bench on a thread of its own; `benches`: node name -> bench.

    A bench that raises MeasurementInvalidError has lost its node: its trial runs again on another node, and `on_event`
    gets a message. `on_wait` is called about four times a second while no trial ends.
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
        """Names of the nodes that still work."""
        return tuple(self._benches)

    def run_all(self, plans: Sequence[Plan]) -> Iterator[FinishedTrial]:
        """Run these trials, each on the next node that is free, and yield each as it ends, with `node` set.

        Raises:
            MeasurementInvalidError: no node is left.
        """
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


# A station: the part of a sweep that runs on a node, with a server, load generators and a bench of its own.
#
# The main thread of its process (a Ray actor's) only answers the sweep; all trials run on one other thread, since the
# kernel ends a server together with the thread that launched it (`target.process.ending_with_us`).


class NodeStation:
    """A server under test and its load on one node. Call `open` first; for each trial `begin`, `look` until it has
    ended, `result`; `close` at the end."""

    def __init__(self) -> None:
        at_usual_priority()
        self._stack = ExitStack()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._bench: Bench | None = None
        self._trial: Future[FinishedTrial] | None = None
        self._live: LiveAggregate | None = None

    def place(self) -> Place:
        """Return where the station runs."""
        return this_place()

    def open(self, scenario: Scenario, cpus: Sequence[int], alone: bool) -> Scenario:
        """Make ready to launch the server. Return the scenario with the CPUs that the server and its load have on this
        node.

        `cpus`: numbers of the CPUs of this station. `alone`: no other station is on this machine; False: the host is
        not watched, since the load of the others would look like noise. A Triton is launched at once, and the returned
        scenario has the batching parameters found in its model's configuration.

        Raises:
            TargetError, UsageError: Triton does not start, or its model cannot be batched.
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
        """Start a trial and return at once.

        Raises:
            MeasurementInvalidError: the station was not opened.
        """
        if self._bench is None:
            raise MeasurementInvalidError("it was not opened")
        self._live = None
        self._trial = self._thread.submit(self._bench.run, plan)

    def look(self) -> tuple[LiveAggregate | None, bool]:
        """Return (live, ended): the last live counts of the trial begun (None: none yet), and whether it has ended.

        Raises:
            MeasurementInvalidError: no trial was begun.
        """
        return self._live, self._begun().done()

    def result(self) -> FinishedTrial:
        """Return the trial that has ended.

        Raises:
            BatchtuneError: the trial raised this error.
            MeasurementInvalidError: the trial raised another exception, or no trial was begun.
        """
        trial = self._begun()
        error = trial.exception(timeout=0.0)
        if error is None or isinstance(error, BatchtuneError):
            return trial.result()
        raise MeasurementInvalidError(f"its trial ended with {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Stop the server and the load generators; a trial that still runs fails, which is awaited for up to 5 s."""
        self._stack.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        ending_s = 5.0  # How long a trial in flight may take to end once its server is gone.
        if self._trial is not None:
            wait([self._trial], ending_s)

    def _note(self, _plan: Plan, live: LiveAggregate) -> None:
        self._live = live

    def _begun(self) -> Future[FinishedTrial]:
        if self._trial is None:
            raise MeasurementInvalidError("it runs no trial")
        return self._trial


@contextmanager
def nodes_on_ray(scenario: Scenario, *, on_event: Callable[[str], None]) -> Iterator[ServerNodes]:
    """Start a Ray actor with a station for each server of `search.parallel`; the end of the `with` block ends them all.

    Raises:
        UsageError: there is no cluster at that address, or no room in it; or Triton's model differs between nodes or
            cannot be batched.
        TargetError: a server does not start; the message names the node.
        MeasurementInvalidError: a node was lost during the block.
    """
    spec = scenario.search.parallel
    on_event(f"starting {spec.servers} servers on the Ray cluster: {spec.ray}")
    cluster = RayActors(spec.ray, key="search.parallel", thing="server", on_event=on_event)
    with cluster as actors, ExitStack() as stack:
        gpus = spec.gpus_per_server
        if gpus is None:
            gpus = 1.0 if actors.total("GPU") >= spec.servers else 0.0
        bundle = {"CPU": spec.cpus_per_server, "GPU": gpus, **spec.resources}
        long_s = 120.0  # of a call that starts processes on a node, or moves a trial's samples (49 bytes a request)
        limits_s = {"place": long_s, "open": long_s + scenario.target.ready_timeout_s, "result": long_s}
        stations = []
        for actor in actors.start(NodeStation, bundle, spec.servers, placement="spread", limits_s=limits_s):
            stations.append(cast("NodeStation", actor))
            stack.callback(actor.close)
        nodes = ServerNodes(scenario, stations, gpus=gpus, on_event=on_event)
        stack.callback(nodes.close)
        yield nodes


class ServerNodes(NodeBenches):
    """`Nodes` with a station on each; stations on one machine get equal shares of its CPUs.

    `scenario`: the given one with the CPUs of the first node, and the batching parameters found there in its Triton's
    model. When a resumed run passes such a scenario, the other nodes still get CPUs of their own.
    `report`: set by the caller; called with the plan and live counts of the trial in flight that has the lowest number.

    Raises:
        TargetError: a server does not start; the message names the node.
        UsageError: Triton's model has other batching parameters on one node than on the first, or cannot be batched.
    """

    def __init__(
        self,
        scenario: Scenario,
        stations: Sequence[NodeStation],
        *,
        gpus: float = 0.0,
        on_event: Callable[[str], None] = lambda _text: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        places = [station.place() for station in stations]
        names = _names(places)
        on_machine = Counter(place.machine for place in places)
        opened: list[Scenario] = []
        self._trials: list[_NodeTrials] = []
        first_alone = on_machine[places[0].machine] == 1
        scenario = unplaced(scenario, cpus=_share(places[0], 0, on_machine), alone=first_alone)
        for at, (station, place) in enumerate(zip(stations, places, strict=True)):
            cpus = _share(place, [other.machine for other in places[:at]].count(place.machine), on_machine)
            try:
                opened.append(station.open(scenario, cpus, on_machine[place.machine] == 1))
            except TargetError as error:
                raise TargetError(f"{names[at]}: {error.message}", hint=error.hint) from error
            if opened[-1].target.found != opened[0].target.found:
                raise UsageError(
                    f"target.model: {names[at]} has another configuration of it than {names[0]}",
                    hint="put the same model repository on every node",
                )
            self._trials.append(_NodeTrials(station, sleep=sleep))
        self.scenario = opened[0]
        self.report: Callable[[Plan, LiveAggregate | None], None] = lambda _plan, _live: None
        super().__init__(dict(zip(names, self._trials, strict=True)), on_event=on_event, on_wait=self._report)
        on_event(_words(names, places, on_machine, gpus=gpus))

    def close(self) -> None:
        """End the threads that wait for trials: each raises MeasurementInvalidError."""
        for trials in self._trials:
            trials.closed = True

    def _report(self) -> None:
        """Call `report` with the load of the trial in flight that has the lowest number, where one has live counts."""
        lives = [trials.live for trials in self._trials if trials.live is not None]
        if lives:
            self.report(*min(lives, key=lambda live: live[0].number))


class _NodeTrials:
    """A TrialBench that runs each trial on a node's station and waits for its end; `live`: plan and latest counts."""

    def __init__(self, station: NodeStation, *, sleep: Callable[[float], None]) -> None:
        self._station = station
        self._sleep = sleep
        self.live: tuple[Plan, LiveAggregate] | None = None
        self.closed = False

    def run(self, plan: Plan) -> FinishedTrial:
        self._station.begin(plan)
        while not self.closed:
            live, ended = self._station.look()
            if ended:
                self.live = None
                return self._station.result()
            if live is not None:
                self.live = plan, live
            self._sleep(WAIT_S)
        raise MeasurementInvalidError("the sweep has ended")


def _names(places: Sequence[Place]) -> list[str]:
    """Names of the nodes, each with " #1", " #2", … where it has several servers."""
    often = Counter(place.node for place in places)
    turns: Counter[str] = Counter()
    names = []
    for place in places:
        turns[place.node] += 1
        names.append(f"{place.node} #{turns[place.node]}" if often[place.node] > 1 else place.node)
    return names


def _share(place: Place, turn: int, on_machine: Counter[str]) -> tuple[int, ...]:
    """CPUs of a station: an equal share of its machine's, as many as every other station there gets.

    `turn`: number of the station on its machine, from 0. All CPUs where there are fewer than stations.
    """
    count = len(place.cpus) // on_machine[place.machine]
    return place.cpus[turn * count : (turn + 1) * count] if count else place.cpus


def _words(names: Sequence[str], places: Sequence[Place], on_machine: Counter[str], *, gpus: float) -> str:
    own = f", {gpus:g} GPU each" if gpus else ""
    text = f"servers under test: {counted(len(names), 'node')} ({', '.join(names)}){own}"
    shared = [place for place in places if on_machine[place.machine] > 1]
    if shared:
        text = f"{text}; {len(shared)} of them share a machine, whose CPUs are dealt out, and may disturb each other"
    nice = max(place.niceness for place in places)
    if nice:
        text = (
            f"{text}; niceness {nice}, behind whatever else runs there: start Ray with RAY_worker_niceness=0"
        )
    return text
