"""Reasons why a figure deserves less trust: the closed list, and what finds them on the client, host and replicas."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import Configuration
from batchtune.load.samples import NEVER_NS, Samples, Status
from batchtune.measure.quantiles import Estimate, latency_quantiles
from batchtune.measure.slo import Window, counted_in
from batchtune.plain_values import Coded
from batchtune.scenario.spec.workload import Protocol
from batchtune.system import control_groups, schedulable_cpus

Touches = Literal["latency", "bound", "throughput", "tokens", "server", "everything"]
"""Figures that a caveat makes less certain; bound: of the latencies those without an upper bound."""

CLIENT_CODES: Final = frozenset(
    {"client_late", "client_behind", "client_throttled", "client_busy", "client_near_limit", "worker_slow"}
)
HOST_CODES: Final = frozenset({"host_steal", "host_busy", "host_canary"})
TOUCHES: Final[Mapping[str, Touches]] = {
    **dict.fromkeys(sorted(CLIENT_CODES | HOST_CODES), "everything"),
    "client_late": "latency",
    "few_connections": "latency",
    "client_paused": "latency",
    "worker_lost": "everything",
    "endpoint_slow": "latency",
    "endpoint_failing": "latency",
    "nothing_measured": "everything",
    "few_requests": "bound",
    "correlated": "latency",
    "errors": "latency",
    "growing_backlog": "everything",
    "not_steady": "everything",
    "warm_up_short": "everything",
    "warm_up_cut": "everything",
    "requests_cut": "everything",
    "thinned": "everything",
    "tokens_untold": "tokens",
    "answers_whole": "latency",
    "streams_textless": "latency",
    "stopped_early": "everything",
    "cut_short": "everything",
    "emulated_device": "everything",
    "batched_twice": "everything",
    "no_server_counters": "server",
    "no_target_metrics": "server",
    "no_metrics_page": "server",
    "missing_metrics": "server",
    "slow_metrics": "server",
    "counters_went_back": "server",
    "host_pressure": "everything",
}
"""The closed list of caveats, each with the figures that it makes less certain; `report/findings.toml` has
its text and advice."""


def touches(caveat: Coded) -> Touches:
    """Return which figures a caveat makes less certain; `everything` for a code that is not on the list."""
    return TOUCHES.get(caveat.code, "everything")


def caveat(code: str, **figures: Any) -> Coded:
    """Make a caveat of the closed list, with its figures.

    Raises:
        KeyError: the code is not on the list.
    """
    if code not in TOUCHES:
        raise KeyError(code)
    return Coded(code, figures)


# What was in force in the server while it was measured?


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The parameters in force in a server while it was measured, and what it may use."""

    # None: batching is off.
    max_batch_size: int | None = None
    batch_timeout_s: float = 0.0
    # Without batching the threads that run one request each.
    batch_threads: int = 1
    # The mean.
    rows_per_request: float = 1.0
    # How many requests the server handles at once; None: no limit, or not known.
    request_threads: int | None = None
    # How many CPU cores the server may use; None: not known.
    server_cores: float | None = None
    protocol: Protocol | None = None
    # False: the server reports none of its parameters; size, timeout and threads above mean nothing then.
    known: bool = True
    # (our name, the server's own) of the batching parameters that it has; None: they have TensorFlow Serving's names.
    own_words: tuple[tuple[str, str], ...] | None = None

    @property
    def has_threads(self) -> bool:
        """Whether the number of batch threads is a parameter of the server."""
        return self.own_words is None or "num_batch_threads" in dict(self.own_words)

    @property
    def batching(self) -> bool | None:
        """Whether the server batches; None: not known."""
        return self.max_batch_size is not None if self.known else None


def settings_of(
    configuration: Configuration,
    *,
    rows_per_request: float = 1.0,
    server_cores: float | None = None,
    flags: Mapping[str, Any] | None = None,
    protocol: Protocol | None = None,
    cpus: Collection[int] | None = None,
    known: bool = True,
) -> ServerSettings:
    """Return the settings that a configuration puts in force; what it leaves out has the server's default.

    `rows_per_request`: mean rows of a request. `server_cores`: CPU cores that the server may use; None: unknown.
    `cpus`: numbers of those CPUs (None: those of this process), from which its default number of threads follows.
    `flags`: the server's own (`target.flags`), which with the load's `protocol` decide `request_threads`. `known`
    False: somebody else started the server, and it does not run with this configuration.
    """
    settings = ServerSettings(
        rows_per_request=rows_per_request, server_cores=server_cores, protocol=protocol, known=known
    )
    if not known:
        return settings
    if configuration.dialect == "http":
        settings = replace(settings, own_words=tuple((ours, own) for ours, own, _ in configuration.words))
    settings = replace(
        settings,
        batch_threads=configuration.threads(cpus),
        request_threads=request_threads_of({**(flags or {}), **dict(configuration.flags)}, protocol=protocol),
    )
    if configuration.batching is None:
        return settings
    return replace(
        settings,
        max_batch_size=configuration.in_force("max_batch_size"),
        batch_timeout_s=configuration.in_force("batch_timeout_micros") / 1e6,
    )


def request_threads_of(flags: Mapping[str, Any], *, protocol: Protocol | None) -> int | None:
    """Return how many requests the server's flags let it handle at once; None: no limit, or not known.

    The bundled server is limited by Cortex's `processes_per_replica` × `threads_per_process`; tensorflow_model_server,
    whose handlers wait for their batch, by `grpc_max_threads` or `rest_api_num_threads`.
    """
    named = {name.lstrip("-"): value for name, value in flags.items()}
    if named.get("processes_per_replica") and named.get("threads_per_process"):
        return int(named["processes_per_replica"]) * int(named["threads_per_process"])
    threads = named.get("rest_api_num_threads" if protocol == "rest" else "grpc_max_threads")
    return int(threads) if threads else None


# What did the load generator do, and did it shape the figures?

BUSY_CPU_RATIO = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientActivity:
    """What the load generator did within the window."""

    # How late the client itself sent, waits for a free connection excluded: 0 in a closed loop, nan when
    # nothing was sent.
    send_lag_p99_s: float
    # Share of the requests that it was ready to send before the window ended; 1 when nothing was sent.
    sent_ratio: float
    # Wait for a free connection or stream; nan when nothing was sent.
    connection_wait_p99_s: float
    # Share used of the cores that it may use, over the whole run, 0 to 1.
    cpu_ratio: float
    cpu_per_request_s: float
    # The longest time that a worker stood still; 0: none of 5 ms or more.
    longest_pause_s: float = 0.0
    # Share of the workers' time that they stood still.
    paused_ratio: float = 0.0


def client_activity(samples: Samples, window: Window) -> ClientActivity:
    """Return what the load generator did within the window."""
    sent = window.holds(samples.due_ns) & (samples.sent_ns != NEVER_NS)
    lag_ns = own_lag_ns(samples)[sent]
    lag_s, wait_s = lag_ns / 1e9, samples.connection_wait_ns[sent] / 1e9
    pauses_s = [
        length / 1e9 for start, length in samples.pauses_ns if window.start_ns <= start < window.end_ns
    ]
    sent_in_all = int(np.count_nonzero(samples.sent_ns != NEVER_NS))
    return ClientActivity(
        send_lag_p99_s=float(np.quantile(lag_s, 0.99)) if len(lag_s) else math.nan,
        sent_ratio=float(np.mean(samples.due_ns[sent] + lag_ns < window.end_ns)) if len(lag_s) else 1.0,
        connection_wait_p99_s=float(np.quantile(wait_s, 0.99)) if len(wait_s) else math.nan,
        cpu_ratio=samples.client_cpu_ratio,
        cpu_per_request_s=samples.client_cpu_s / sent_in_all / samples.one_in if sent_in_all else math.nan,
        longest_pause_s=max(pauses_s, default=0.0),
        paused_ratio=sum(pauses_s) / window.seconds / samples.client_cores if window.seconds else 0.0,
    )


def has_short_client(caveats: Iterable[Coded]) -> bool:
    """Whether a caveat says that the client reached a limit which its send lag does not show in full."""
    untold = ("client_throttled", "client_busy", "client_near_limit", "worker_slow")
    return any(noted.code in untold for noted in caveats)


def slow_workers(samples: Samples, window: Window, *, limit_s: float) -> dict[str, Coded]:
    """Return worker's name -> the caveat that shows that this load worker is slow, such as `client_busy`; {} for a load
    from one worker.

    `limit_s`: the SLO's primary limit, seconds, with which lags and pauses are compared.
    """
    slow = {}
    for number, share in enumerate(samples.workers):
        activity = client_activity(samples.of_worker(number), window)
        caveats = client_caveats(activity, limit_s=limit_s, rate_rps=0.0)
        why = next((caveat for caveat in caveats if caveat.code in CLIENT_CODES), None)
        if why is not None:
            slow[share.name] = why
    return slow


def dispensable_worker(samples: Samples, window: Window, *, limit_s: float) -> tuple[str, Coded] | None:
    """Return (worker's name, caveat that says why it is slow) of a slow load worker whose share the others can send,
    since they are not slow and have CPU left; None: there is none.

    `limit_s`: the SLO's primary limit, seconds, with which lags and pauses are compared.
    """
    slow = slow_workers(samples, window, limit_s=limit_s)
    busy = [
        share.cpu_s / share.wall_s for share in samples.workers if share.name not in slow and share.wall_s
    ]
    if not slow or not busy:
        return None
    count = len(samples.workers)
    return next(iter(slow.items())) if max(busy) * count / (count - 1) <= BUSY_CPU_RATIO else None


def worker_caveats(samples: Samples, window: Window, *, limit_s: float) -> list[Coded]:
    """Return [the caveat `worker_slow`], for the first slow load worker, where some workers are slow and others are
    not; else []: where all are slow, the client's own caveats say so."""
    slow = slow_workers(samples, window, limit_s=limit_s)
    if not 0 < len(slow) < len(samples.workers):
        return []
    worker, why = next(iter(slow.items()))
    return [caveat("worker_slow", worker=worker, why=why, slow=len(slow), workers=len(samples.workers))]


def own_lag_ns(samples: Samples) -> NDArray[np.int64]:
    """Return how late the client itself sent each request, ns, without its wait for a connection, shape (n,); 0: never
    sent."""
    lag = samples.sent_ns - samples.due_ns - samples.connection_wait_ns
    return np.where(samples.sent_ns == NEVER_NS, 0, lag)


def client_caveats(
    client: ClientActivity, *, limit_s: float, rate_rps: float, client_max_rps: float | None = None
) -> list[Coded]:
    """Return a caveat for every sign that the client, not the server, shaped the figures.

    `limit_s`: the SLO's primary limit, seconds, with which lags and pauses are compared. `rate_rps`: requests answered
    per second. `client_max_rps`: requests/s that the client can send to a null server; None: not known.
    """
    caveats = []
    tolerance_s = max(0.0005, 0.05 * limit_s)
    if client.send_lag_p99_s > tolerance_s:
        caveats.append(caveat("client_late", lag_s=client.send_lag_p99_s))
    if client.sent_ratio < 0.99:
        caveats.append(caveat("client_behind", sent_ratio=client.sent_ratio))
    if client.connection_wait_p99_s > tolerance_s:
        caveats.append(caveat("few_connections", wait_s=client.connection_wait_p99_s))
    throttled_ratio = 0.1
    if client.paused_ratio > throttled_ratio:
        caveats.append(caveat("client_throttled", paused_ratio=client.paused_ratio))
    # A pause of a quarter of the limit is reported; it makes a run void only where it made more than 1 % of it
    # late.
    long_pause_ratio = 0.25
    if client.longest_pause_s > long_pause_ratio * limit_s:
        caveats.append(caveat("client_paused", pause_s=client.longest_pause_s))
    if client.cpu_ratio > BUSY_CPU_RATIO:
        caveats.append(caveat("client_busy", cpu_ratio=client.cpu_ratio))
    near_limit_ratio = 0.5
    if client_max_rps and rate_rps > near_limit_ratio * client_max_rps:
        caveats.append(
            caveat(
                "client_near_limit",
                rate_rps=rate_rps,
                used_ratio=rate_rps / client_max_rps,
                client_max_rps=client_max_rps,
            )
        )
    return caveats


def error_counts(samples: Samples, window: Window) -> dict[str, int]:
    """Return class of error in lower case -> number of the window's requests that ended with it, the commonest first;
    multiplied by `one_in` where only one request in so many was recorded."""
    counts = np.bincount(samples.status[counted_in(samples, window)], minlength=len(Status))
    counts_by_class = {
        status.name.lower(): samples.one_in * int(counts[status])
        for status in Status
        if status != Status.OK and counts[status]
    }
    return dict(sorted(counts_by_class.items(), key=lambda item: -item[1]))


def fails_by_itself(errors: Mapping[str, int], requests: int) -> bool:
    """Whether a server answers so many requests with errors of its own that noise of the host does not explain it.
    `errors`: class -> count (`error_counts`), of `requests` in all.

    True for more than 5 % of errors that do not depend on the load, or more than 25 % of these and refusals, which a
    host that takes a part of the CPUs causes near capacity. Timeouts and lost connections do not count: the host may
    cause them.
    """
    own = sum(
        errors.get(name, 0) for name in ("server_error", "invalid_request", "too_large", "wrong_answer")
    )
    refused = errors.get("queue_full", 0) + errors.get("thread_pool_exhausted", 0)
    return own > 0.05 * requests or own + refused > 0.25 * requests


# Were the CPUs of server and client quiet? Steal, other programs, pressure, a fixed loop before and after.
#
# Only CPUs that server and client may run on are looked at: a neighbour that keeps others busy takes nothing from them.
# Pressure is the kernel's "some" of PSI (Documentation/accounting/psi.rst): the share of the time in which at least one
# task that wanted to run waited for a CPU. That of our control group is taken where there is one, server and client
# being what is in it; else the machine's, where its CPUs are ours. A server that uses all of its CPUs waits for itself,
# so pressure is reported and spoils no trial.

MOST_STEAL_RATIO = 0.02
MOST_CANARY_CHANGE = 0.05
MOST_FOREIGN_RATIO = 0.2
"""A program that takes half of one core of two is a quarter of the machine."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

Pressed: TypeAlias = Literal["our control group", "this machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """One reading of the machine's counters; None: its kernel does not report them. Ticks count from boot, over the
    CPUs that were named; `canary_s`: seconds that a fixed computation took."""

    monotonic_s: float
    # Of user programs, nice ones, system calls, idle, iowait, irq, softirq, steal; (): not reported.
    ticks: tuple[int, ...]
    # Total time in which some task of `pressed` waited for a CPU.
    pressure_s: float | None
    # Median time of a fixed loop.
    canary_s: float
    pressed: Pressed | None = None
    # CPU time of this process so far.
    own_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNoise:
    """What disturbed the host between two readings."""

    # Share of our CPUs' time that the hypervisor used for others.
    steal_ratio: float
    # Share of the time in which some task of `pressed` waited for a CPU.
    pressure_ratio: float
    # How much slower the fixed loop ran than is usual in this session, as a ratio; 0: as usual, or not known.
    # Negative is no sign of noise: the processor raised its clock.
    canary_change: float
    # Share of our CPUs' time that programs other than server and client used; 0 where that is not known.
    foreign_ratio: float = 0.0
    pressed: Pressed | None = None
    # The faster of the two canary times.
    canary_s: float | None = None

    @property
    def noisy(self) -> bool:
        """Whether stolen CPU time, other programs or the canary (the time of a fixed computation) is beyond its
        limit."""
        return any(noted.code in HOST_CODES for noted in self.caveats())

    def caveats(self) -> tuple[Coded, ...]:
        """Return a caveat for each sensor beyond its limit, for `notes` of `measure`."""
        caveats = []
        if self.steal_ratio > MOST_STEAL_RATIO:
            caveats.append(caveat("host_steal", steal_ratio=self.steal_ratio))
        if self.foreign_ratio > MOST_FOREIGN_RATIO:
            caveats.append(caveat("host_busy", foreign_ratio=self.foreign_ratio))
        if self.canary_change > MOST_CANARY_CHANGE:
            caveats.append(caveat("host_canary", canary_ratio=self.canary_change))
        much_pressure_ratio = 0.5
        if self.pressure_ratio > much_pressure_ratio:
            caveats.append(
                caveat(
                    "host_pressure",
                    pressure_ratio=self.pressure_ratio,
                    pressed=self.pressed or "this machine",
                )
            )
        return tuple(caveats)


@dataclass(slots=True)
class HostGuard:
    """Watches the host during each trial: `begin()` before it, `end()` after it. `canaries_s`: the seconds that the
    canary, a fixed loop, took in this session."""

    canaries_s: list[float] = field(default_factory=list)
    _before: HostReading | None = None
    _cpus: Collection[int] | None = None

    def begin(self, *, cpus: Collection[int] | None = None) -> None:
        """Take the first reading. `cpus`: numbers of the CPUs of server and client; None: those of this process."""
        self._cpus = cpus
        self._before = read_host(cpus)

    def end(self, *, server_cpu_s: float | None = None, client_cpu_s: float = 0.0) -> HostNoise:
        """Return the noise since `begin()`; without a `begin()` only the canary (the fixed loop) is judged.

        `server_cpu_s`, `client_cpu_s`: CPU seconds that server and client used since then; `server_cpu_s` None: not
        known, and with it the CPU time of other programs.
        """
        loaded_cpu_s = None if server_cpu_s is None else server_cpu_s + client_cpu_s
        after = read_host(self._cpus)
        before = self._before or after
        usual_s = statistics.median(self.canaries_s) if len(self.canaries_s) >= 4 else None
        self.canaries_s += [before.canary_s, after.canary_s]
        self._before = None
        return noise_between(before, after, usual_canary_s=usual_s, loaded_cpu_s=loaded_cpu_s)


def noise_between(
    before: HostReading,
    after: HostReading,
    *,
    usual_canary_s: float | None = None,
    loaded_cpu_s: float | None = None,
) -> HostNoise:
    """Compute the noise between two readings; sensors that the kernel lacks count as quiet.

    `usual_canary_s`: the usual time of the canary, a fixed loop; None: not compared. `loaded_cpu_s`: CPU seconds of
    server and client between the readings; None: not known. Of the two canaries the faster counts: a single slow one
    was perhaps only preempted, two mean that the clock or the neighbours changed.
    """
    spent = [now - then for then, now in zip(before.ticks, after.ticks, strict=False)]
    ticks, steal_ratio, foreign_ratio = sum(spent), 0.0, 0.0
    if ticks > 0:
        steal_ratio = spent[7] / ticks
    if ticks > 0 and loaded_cpu_s is not None:  # interrupts are nobody's
        ours_s = loaded_cpu_s + after.own_cpu_s - before.own_cpu_s
        foreign_ratio = max(0.0, sum(spent[:3]) / TICKS_PER_S - ours_s) / (ticks / TICKS_PER_S)
    pressure_ratio = 0.0
    elapsed_s = after.monotonic_s - before.monotonic_s
    pressed = after.pressed if after.pressed == before.pressed else None
    if pressed and before.pressure_s is not None and after.pressure_s is not None and elapsed_s > 0:
        pressure_ratio = (after.pressure_s - before.pressure_s) / elapsed_s
    canary_s = min(before.canary_s, after.canary_s)
    return HostNoise(
        steal_ratio=steal_ratio,
        pressure_ratio=pressure_ratio,
        canary_change=canary_s / usual_canary_s - 1.0 if usual_canary_s else 0.0,
        pressed=pressed,
        canary_s=canary_s,
        foreign_ratio=foreign_ratio,
    )


def read_host(cpus: Collection[int] | None = None, *, root: Path = Path("/")) -> HostReading:
    """Read /proc and /sys under `root` for these CPUs (None: this process's), and time the canary, a fixed
    computation: about 15 ms."""
    ours = schedulable_cpus() if cpus is None else frozenset(cpus)
    by_cpu = _ticks_by_cpu(root / "proc" / "stat")
    lines = [ticks for cpu, ticks in by_cpu.items() if cpu in ours]
    ticks = tuple(sum(column) for column in zip(*lines, strict=True))
    pressed, pressure_s = _pressure(root, whole=ours >= by_cpu.keys())
    return HostReading(
        monotonic_s=time.monotonic(),
        ticks=ticks,
        pressure_s=pressure_s,
        pressed=pressed,
        own_cpu_s=time.process_time(),
        canary_s=statistics.median(_canary_s() for _ in range(5)),
    )


def _ticks_by_cpu(path: Path) -> dict[int, list[int]]:
    """Read the lines cpuN of /proc/stat: CPU number -> ticks of user nice system idle iowait irq softirq
    steal; empty where the kernel does not report them."""
    by_cpu = {}
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, *words = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and len(words) >= 8:
                by_cpu[int(name[3:])] = [int(word) for word in words[:8]]
    except (OSError, ValueError):
        return {}
    return by_cpu


def _pressure(root: Path, *, whole: bool) -> tuple[Pressed | None, float | None]:
    """Return whose tasks waited for a CPU, and for how many seconds so far; (None, None): not known. `whole`:
    all of the machine's CPUs are ours, so that its own figure counts."""
    group_s = _group_some_s(root)
    if group_s is not None:
        return "our control group", group_s
    machine_s = _some_s(root / "proc" / "pressure" / "cpu") if whole else None
    return (None, None) if machine_s is None else ("this machine", machine_s)


def _group_some_s(root: Path) -> float | None:
    """Return the seconds in which some task of the innermost control group that reports it waited; None: no
    group does."""
    for group in control_groups(root):
        waited_s = _some_s(group / "cpu.pressure")
        if waited_s is not None:
            return waited_s
    return None


def _some_s(path: Path) -> float | None:
    try:
        line = path.read_text(encoding="ascii").split("\n", 1)[0]
        return int(line.rsplit("total=", 1)[1]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


def _canary_s() -> float:
    start = time.perf_counter()
    total = 0
    canary_loops = 60_000
    for number in range(canary_loops):
        total += number & 7
    return time.perf_counter() - start


# Of several replicas, one that is worse than all the others.


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFigures:
    """Figures of one endpoint (replica) over the window; `requests` due, good answers/s, p50 and p95 in seconds, share
    of errors."""

    endpoint: str
    requests: int
    throughput_rps: float
    p50_s: Estimate
    p95_s: Estimate
    error_ratio: float


def endpoint_figures(samples: Samples, window: Window) -> tuple[EndpointFigures, ...]:
    """Return the figures of each endpoint, in the order of `samples.endpoints`; () where all requests went to one."""
    return tuple(_figures_of(samples, window, number) for number in range(len(samples.endpoints)))


def endpoint_caveats(figures: Sequence[EndpointFigures]) -> list[Coded]:
    """Return at most one caveat, which names the replica that is worse than every other: `endpoint_failing`, else
    `endpoint_slow` by p95, else `endpoint_slow` by p50; [] where no replica is, or there is only one.

    A replica is slow when its 95 % interval lies above those of all others and its value is more than 1.1 times the
    next highest: placement alone makes equal replicas differ by some percent. Two intervals that do not overlap are a
    difference of 2.8 standard errors: by chance 1 in 170 pairs of equal replicas.
    """
    if len(figures) < 2:
        return []
    worst, after = sorted(figures, key=lambda replica: replica.error_ratio, reverse=True)[:2]
    others = len(figures) - 1
    failing_more = 0.01
    if worst.error_ratio - after.error_ratio > failing_more:
        ratios = {"error_ratio": worst.error_ratio, "next_ratio": after.error_ratio}
        return [caveat("endpoint_failing", endpoint=worst.endpoint, others=others, **ratios)]
    quantiles: tuple[Literal["p95", "p50"], ...] = ("p95", "p50")
    for quantile in quantiles:
        worst, after = sorted(figures, key=lambda replica: _value(replica, quantile), reverse=True)[:2]
        if _is_slower(worst, [replica for replica in figures if replica is not worst], quantile):
            times = {"endpoint_s": _value(worst, quantile), "next_s": _value(after, quantile)}
            words = {"endpoint": worst.endpoint, "others": others, "quantile": quantile}
            return [caveat("endpoint_slow", **words, **times)]
    return []


def _figures_of(samples: Samples, window: Window, number: int) -> EndpointFigures:
    own = samples.endpoint == number
    due = own & counted_in(samples, window)
    good = samples.status == Status.OK
    latencies_s = np.where(good, samples.latency_ns / 1e9, math.inf)[due]
    quantiles = latency_quantiles(latencies_s, samples.due_ns[due])
    answered = int(np.count_nonzero(own & good & window.holds(samples.done_ns)))
    count = int(np.count_nonzero(due))
    return EndpointFigures(
        endpoint=samples.endpoints[number],
        requests=samples.one_in * count,
        throughput_rps=samples.one_in * answered / window.seconds if window.seconds else math.nan,
        p50_s=quantiles["p50"],
        p95_s=quantiles["p95"],
        error_ratio=int(np.count_nonzero(due & ~good)) / count if count else 0.0,
    )


def _is_slower(
    worst: EndpointFigures, others: Sequence[EndpointFigures], quantile: Literal["p50", "p95"]
) -> bool:
    highest_s = max(_estimate(replica, quantile).high for replica in others)
    next_s = max(_value(replica, quantile) for replica in others)
    own, slower_ratio = _estimate(worst, quantile), 1.1
    return math.isfinite(own.value) and own.low > highest_s and own.value > slower_ratio * next_s


def _estimate(figures: EndpointFigures, quantile: Literal["p50", "p95"]) -> Estimate:
    return figures.p95_s if quantile == "p95" else figures.p50_s


def _value(figures: EndpointFigures, quantile: Literal["p50", "p95"]) -> float:
    """Return the quantile in seconds; 0 where no request was due at the endpoint."""
    value = _estimate(figures, quantile).value
    return 0.0 if math.isnan(value) else value
