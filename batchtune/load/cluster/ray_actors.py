"""Starts actors on the nodes of a Ray cluster, calls their methods, and ends them.

`ray` is imported here only, when a cluster is entered: the extra `batchtune[ray]`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Self

from batchtune.errors import BatchtuneError, MeasurementInvalidError, UsageError
from batchtune.system import INTERRUPTS
from batchtune.units import counted

JOIN_LIMIT_S: Final = 20.0
"""How long to wait for nodes to join: those that are started together with the head join some seconds after it."""
SOON_S: Final = 1.0


def require_ray(key: str) -> None:
    """Raise UsageError if Ray is not installed; `key`: the scenario key that needs it, for the message."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"{key} needs Ray, which is not installed", hint="pip install 'batchtune[ray]'")


class RayActors:
    """A context manager around a connection to a Ray cluster, whose exit also ends its actors.

    `key`: the scenario key that needs Ray, for errors. `thing`: what an actor is called in messages.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str,
        thing: str,
        on_event: Callable[[str], None] = lambda _text: None,
    ) -> None:
        require_ray(key)
        self._address = address
        self._key = key
        self._thing = thing
        self._on_event = on_event
        self._ray: Any = None
        self._connected = False
        self._group: Any = None

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            UsageError: no cluster at that address.
        """
        import ray

        self._ray = ray
        if not ray.is_initialized():
            _connect(ray, self._address, key=self._key)
            _keep_stdout_clean()
            self._connected = True
        return self

    def __exit__(self, *_fault: object) -> None:
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):
                remove_placement_group(self._group)
            self._group = None
        if self._connected:
            with _signals_kept():
                self._ray.shutdown()
            self._connected = False

    def total(self, resource: str) -> float:
        """Return how much of a Ray resource, such as "CPU", the whole cluster has, whether in use or not; 0.0: none."""
        total: float = self._ray.cluster_resources().get(resource, 0.0)
        return total

    def start(
        self,
        make: Callable[[], Any],
        bundle: Mapping[str, float],
        count: int | None,
        *,
        placement: str,
        limits_s: Mapping[str, float],
    ) -> Iterator[RayActor]:
        """Start `count` actors (None: one on each node that has room), and yield each.

        `bundle`: resource -> amount for each actor. `make`: called in each actor; makes the object whose methods the
        RayActor has. `placement`: Ray's strategy, in lower case. `limits_s`: method -> time limit of its calls.

        Raises:
            UsageError: no room in the cluster.
        """
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = {name: amount for name, amount in bundle.items() if amount > 0.0}
        rooms = self._rooms(needs, count)
        count = count or sum(room > 0 for room in rooms) or 1
        if count > sum(rooms):
            raise UsageError(
                f"{self._key}: the cluster's {counted(len(rooms), 'node')} can take "
                f"{counted(sum(rooms), self._thing)} with {listed(needs)} each, not {count}",
                hint=f"lower {self._key}.{self._thing}s, or what each of them needs",
            )
        self._group = placement_group([needs] * count, strategy=placement.upper())
        room_limit_s = 60.0
        if not self._group.wait(SOON_S):
            self._on_event(f"waiting up to {room_limit_s:g} s until others leave room on the cluster")
            if not self._group.wait(room_limit_s):
                raise UsageError(
                    f"{self._key}: no room for {count} {self._thing}s with {listed(needs)} each; free are "
                    f"{listed(self._ray.available_resources())}",
                    hint=f"wait until others are done, or lower {self._key}.{self._thing}s",
                )
        remote = self._ray.remote(_Actor)
        own = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
        for number in range(count):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=number
            )
            actor = remote.options(
                num_cpus=needs.get("CPU", 0.0),
                num_gpus=needs.get("GPU", 0.0),
                resources=own,
                scheduling_strategy=strategy,
            ).remote(make)
            yield RayActor(self._ray, actor, limits_s)

    def _rooms(self, needs: Mapping[str, float], count: int | None) -> list[int]:
        """Return how many actors each node can take; where that is too few in all, wait for further nodes to join."""
        deadline_s = None
        while True:
            rooms = [_room(node["Resources"], needs) for node in self._ray.nodes() if node["Alive"]]
            if sum(rooms) >= (count or 1):
                return rooms
            if deadline_s is None:
                deadline_s = time.monotonic() + JOIN_LIMIT_S
                self._on_event(
                    f"the cluster's {counted(len(rooms), 'node')} can take {counted(sum(rooms), self._thing)}, not "
                    f"{count or 1}: waiting up to {JOIN_LIMIT_S:g} s for nodes to join"
                )
            if time.monotonic() >= deadline_s:
                return rooms
            time.sleep(SOON_S)


class RayActor:
    """The object in an actor, with its methods. A call raises the object's BatchtuneError, and MeasurementInvalidError
    if the actor is gone or does not answer within the call's limit (`limits_s`, else 10 s)."""

    def __init__(self, ray: Any, actor: Any, limits_s: Mapping[str, float]) -> None:
        self._ray = ray
        self._actor = actor
        self._limits_s = limits_s

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._ask, method)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object in the actor and return its result.

        Raises:
            MeasurementInvalidError: the actor is gone, or has not answered for `limit_s`.
            BatchtuneError: as the method raised it.
        """
        # Time limit of a call that only passes a message; an idle actor answers in 1 ms.
        call_limit_s = 10.0
        limit_s = self._limits_s.get(method, call_limit_s)
        try:
            answer = self._ray.get(self._actor.ask.remote(method, *arguments), timeout=limit_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise MeasurementInvalidError(f"it has not answered for {limit_s:g} s") from error
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise MeasurementInvalidError(_reason(error)) from error
        if isinstance(answer, BatchtuneError):
            raise answer
        return answer

    def close(self) -> None:
        """Close the object in the actor, then end the actor; never raises."""
        with contextlib.suppress(BatchtuneError):
            self._ask("close")
        with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):
            self._ray.kill(self._actor)


class _Actor:
    """Runs in the actor's process; a method's BatchtuneError is returned, not raised, and the RayActor raises it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        # A spawned process first runs the main file of its parent: Ray's, and so all of Ray.
        vars(sys.modules["__main__"]).pop("__file__", None)
        self._made = make()

    def ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._made, method)(*arguments)
        except BatchtuneError as error:
            return error


def _connect(ray: Any, address: str, *, key: str) -> None:
    _require_listener(address, key=key)
    try:
        with _signals_kept():
            ray.init(
                address=address,
                namespace="batchtune",
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if address == "auto":
            raise UsageError(
                f"{key}: this machine belongs to no running Ray cluster",
                hint=f"start one (ray start --head), or name one: --set {key}.ray=ray://HOST:10001",
            ) from error
        raise UsageError(
            f"{key}: no connection to the Ray cluster at {address}: {_reason(error)}",
            hint="Ray and Python need the same versions on both sides",
        ) from error


def _keep_stdout_clean() -> None:
    """Send to stderr what Ray prints of lost nodes: stdout is for our own answer."""
    from ray._private import worker

    print_lines = getattr(worker, "print_to_stdstream", None)
    if print_lines is None or hasattr(print_lines, "on_stderr"):
        return

    def on_stderr(lines: Mapping[str, Any], *rest: Any, **more: Any) -> None:
        print_lines({**lines, "is_err": True}, *rest, **more)

    vars(on_stderr)["on_stderr"] = True
    worker.print_to_stdstream = on_stderr


def _require_listener(address: str, *, key: str) -> None:
    """Raise UsageError within 5 s where nobody listens at `address`; Ray itself would wait for a minute."""
    reach_limit_s = 5.0
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=reach_limit_s).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have this name
        raise UsageError(
            f"{key}: nobody answers at {address}: {error}",
            hint="`ray start --head` prints its address; ray://HOST:10001 is that of its client server",
        ) from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore our signal handlers after the block, in which Ray sets its own."""
    before = {number: signal.getsignal(number) for number in INTERRUPTS}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # off the main thread neither can be set
            for number, handler in before.items():
                signal.signal(number, handler)


def _room(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return how many actors with these resources fit on a node when nothing else runs on it."""
    return min(int(resources.get(name, 0.0) / need + 1e-9) for name, need in bundle.items())


def _reason(error: Exception) -> str:
    """Return the first line of an error, with the last where the first only announces a traceback; shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if len(lines) > 1 and reason.endswith(":"):
        reason = f"{reason} {lines[-1]}"
    return reason[:300]


def listed(resources: Mapping[str, float]) -> str:
    """Describe amounts of resources, such as "2 CPU, 1 GPU"."""
    shown = {name: amount for name, amount in resources.items() if not name.startswith("node:")}
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "none"
