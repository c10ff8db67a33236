"""How do workers run on the nodes of a Ray cluster? A Ray actor holds a station, which starts the worker beside it.

`ray` is imported here only, when a cluster is entered: the extra `batchtune[ray]`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from batchtune.errors import BatchtuneError, UsageError
from batchtune.interrupts import INTERRUPTS
from batchtune.load.cluster.host import Host, HostLostError, Place, Progress
from batchtune.load.cluster.station import Station
from batchtune.load.record.samples import Samples
from batchtune.load.worker.job import WorkerJob
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.load import FleetSpec
from batchtune.scenario.units import counted

CALL_LIMIT_S: Final = 10.0
"""A call that only hands over a message; an idle actor answers in 1 ms."""
LONG_CALL_LIMIT_S: Final = 60.0
"""Starting a worker, calibrating, and moving 25 MB."""
PLACE_LIMIT_S: Final = 60.0
SOON_S: Final = 1.0
REACH_LIMIT_S: Final = 5.0
NAMESPACE: Final = "batchtune"
_REASON_MAX_CHARS: Final = 300


def require_ray() -> None:
    """Raise UsageError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("load.fleet needs Ray, which is not installed", hint="pip install 'batchtune[ray]'")


class RayCluster:
    """A context manager: connects to a cluster and starts an actor for each worker; all of it ends with it."""

    def __init__(self, spec: FleetSpec, *, on_event: Callable[[str], None] = lambda _text: None) -> None:
        require_ray()
        self._spec = spec
        self._on_event = on_event
        self._ray: Any = None
        self._connected = False
        self._group: Any = None

    def __enter__(self) -> list[Host]:
        """The hosts, one for each worker.

        Raises:
            UsageError: no cluster at that address, or no room in it.
        """
        import ray

        self._ray = ray
        self._on_event(f"starting the load fleet on the Ray cluster: {self._spec.ray}")
        if not ray.is_initialized():
            _connect(ray, self._spec.ray)
            self._connected = True
        try:
            return list(self._actors())
        except BaseException:
            self._end()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _actors(self) -> Iterator[Host]:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spec = self._spec
        bundle = {"CPU": spec.cpus_per_worker, **spec.resources}
        rooms = [_room(node["Resources"], bundle) for node in self._ray.nodes() if node["Alive"]]
        count = spec.workers or sum(room > 0 for room in rooms) or 1
        if count > sum(rooms):
            raise UsageError(
                f"load.fleet: the cluster's {counted(len(rooms), 'node')} can take {counted(sum(rooms), 'worker')} "
                f"with {_listed(bundle)} each, not {count}",
                hint="lower load.fleet.workers, cpus_per_worker or resources",
            )
        self._group = placement_group([bundle] * count, strategy=spec.placement.upper())
        if not self._group.wait(SOON_S):
            self._on_event(f"waiting up to {PLACE_LIMIT_S:g} s until others leave room on the cluster")
            if not self._group.wait(PLACE_LIMIT_S):
                raise UsageError(
                    f"load.fleet: no room for {count} workers with {_listed(bundle)} each; free are "
                    f"{_listed(self._ray.available_resources())}",
                    hint="wait until others are done, or lower load.fleet.workers",
                )
        remote = self._ray.remote(_Actor)
        for number in range(count):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=number
            )
            actor = remote.options(
                num_cpus=spec.cpus_per_worker, resources=spec.resources, scheduling_strategy=strategy
            ).remote()
            yield RayHost(self._ray, actor)

    def _end(self) -> None:
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):
                remove_placement_group(self._group)
            self._group = None
        if self._connected:
            with _signals_kept():
                self._ray.shutdown()
            self._connected = False


class RayHost:
    """A Host by way of an actor's calls."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def place(self) -> Place:
        place: Place = self._ask("place", limit_s=LONG_CALL_LIMIT_S)
        return place

    def open(self, cpu: int) -> None:
        self._ask("open", cpu, limit_s=LONG_CALL_LIMIT_S)

    def clock_ns(self) -> int:
        clock_ns: int = self._ask("clock_ns")
        return clock_ns

    def prepare(self, parts: Sequence[WorkerJob], overdue_after_s: float) -> None:
        self._ask("prepare", parts, overdue_after_s, limit_s=LONG_CALL_LIMIT_S)

    def ready(self) -> bool:
        ready: bool = self._ask("ready")
        return ready

    def start(self, start_ns: int) -> None:
        self._ask("start", start_ns)

    def stop(self) -> None:
        self._ask("stop")

    def look(self) -> Progress:
        progress: Progress = self._ask("look")
        return progress

    def count(self) -> int:
        count: int = self._ask("count")
        return count

    def rows(self, first: int, last: int) -> Samples:
        rows: Samples = self._ask("rows", first, last, limit_s=LONG_CALL_LIMIT_S)
        return rows

    def client_max_rps(self, requests: RequestSet) -> float:
        most_rps: float = self._ask("client_max_rps", requests, limit_s=LONG_CALL_LIMIT_S)
        return most_rps

    def close(self) -> None:
        with contextlib.suppress(BatchtuneError):
            self._ask("close")
        with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):
            self._ray.kill(self._actor)

    def _ask(self, method: str, *arguments: Any, limit_s: float = CALL_LIMIT_S) -> Any:
        try:
            answer = self._ray.get(self._actor.ask.remote(method, *arguments), timeout=limit_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise HostLostError(f"it has not answered for {limit_s:g} s") from error
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise HostLostError(_reason(error)) from error
        if isinstance(answer, BatchtuneError):
            raise answer
        return answer


class _Actor:
    """What runs in the actor's process; expected errors are answers, as they are between a fleet and its processes."""

    def __init__(self) -> None:
        # A spawned process first runs the main file of its parent: Ray's, and so all of Ray.
        vars(sys.modules["__main__"]).pop("__file__", None)
        self._station = Station()

    def ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._station, method)(*arguments)
        except BatchtuneError as error:
            return error


def _connect(ray: Any, address: str) -> None:
    _require_listener(address)
    try:
        with _signals_kept():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if address == "auto":
            raise UsageError(
                "load.fleet: this machine belongs to no running Ray cluster",
                hint="start one (ray start --head), or name one: --fleet ray://HOST:10001",
            ) from error
        raise UsageError(
            f"load.fleet: no connection to the Ray cluster at {address}: {_reason(error)}",
            hint="Ray and Python must be of the same versions here and there",
        ) from error


def _require_listener(address: str) -> None:
    """Ray itself waits for a minute for a cluster that is not there."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_LIMIT_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have this name
        raise UsageError(
            f"load.fleet: nobody answers at {address}: {error}",
            hint="`ray start --head` says its address; ray://HOST:10001 is that of its client server",
        ) from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray sets handlers of its own; ours come back."""
    before = {number: signal.getsignal(number) for number in INTERRUPTS}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # off the main thread neither can be set
            for number, handler in before.items():
                signal.signal(number, handler)


def _room(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many workers a node can take when nothing else runs on it."""
    return min(int(resources.get(name, 0.0) / need + 1e-9) for name, need in bundle.items())


def _reason(error: Exception) -> str:
    """The first line that tells something, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_REASON_MAX_CHARS]


def _listed(resources: dict[str, float]) -> str:
    shown = {name: amount for name, amount in resources.items() if not name.startswith("node:")}
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "none"
