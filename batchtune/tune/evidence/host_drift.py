"""How far does the host's speed drift from one run to another, and which figures drift with it?

The spread between runs of one configuration knows only the minute or two in which they were made, and side by side
they share one speed of a host whose neighbours come and go. The fixed loop (canary) that is timed at every trial sees
that speed over the whole sweep; a run that is made some minutes later is allowed so much more.
`tests/benchmarks/twin/drifting_host.py` states how many such runs fall inside the intervals with and without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from batchtune.measure.bottleneck_figures import BUSY_RATIO
from batchtune.measure.measurement import Measurement
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.endpoint import is_loopback
from batchtune.target.telemetry import ServerActivity
from batchtune.tune import policy
from batchtune.tune.evidence.bottleneck_of import usual_bottleneck
from batchtune.tune.evidence.host_speed import ahead_sd
from batchtune.tune.evidence.pooled import Pooled
from batchtune.tune.trials.trial import Trial

READINGS_MIN = 8
"""Of fewer trials their spread says nothing of how it lasts."""

LATENCY_PER_SPEED = 1.4
"""Change of a log latency quantile per change of log speed: the median ratio of the two spreads between runs of a cell,
minutes apart, over the seven tables of `results/reference/tables` that depend on the CPU (1.1 to 2.5)."""

SLEEPING_GPU_RATIO = 0.05
"""A GPU that is busy for no more than this share of the time does not run the model."""

COMPUTING_RATIO = 0.5
"""CPU seconds of the server per second of execution, from here on the model runs on the CPU; while a device computes
the server sleeps."""

_ON_THE_CPU = frozenset({"front_end", "client"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What the host's drift adds to a fresh run's figures, as standard deviations in logs; 0: nothing."""

    rate_sd: float = 0.0
    latency_sd: float = 0.0
    capacity_sd: float = 0.0


NO_DRIFT = Drift()


def speed_ahead_sd(trials: Sequence[Trial]) -> float:
    """How far the logarithm of the CPUs' speed will be from that of the trials, as a standard deviation.

    0 where fewer than READINGS_MIN of them timed it.
    """
    readings = sorted(
        (datetime.fromisoformat(trial.started_utc).timestamp(), math.log(trial.measurement.canary_s))
        for trial in trials
        if trial.measurement is not None and trial.measurement.canary_s
    )
    if len(readings) < READINGS_MIN:
        return 0.0
    times_s, log_times = zip(*readings, strict=True)
    return ahead_sd(times_s, log_times)


def drift_of(pooled: Pooled, ahead: float, *, scenario: Scenario) -> Drift:
    """What a host whose speed will differ by `ahead` (`speed_ahead_sd`) does to this configuration's figures.

    Nothing where the device sleeps or computes by itself, or the server is on another machine than the canary. An open
    loop's rate is that of its arrivals. Near the capacity a quantile moves as much more than the rate as
    policy.RATE_ELASTICITY says.
    """
    if not ahead > 0.0 or not _is_on_this_machine(scenario) or not _is_cpu_bound(pooled, scenario):
        return NO_DRIFT
    if scenario.objective == "capacity":
        return Drift(latency_sd=ahead / policy.RATE_ELASTICITY, capacity_sd=ahead)
    return Drift(rate_sd=0.0 if scenario.load.open_loop else ahead, latency_sd=LATENCY_PER_SPEED * ahead)


def _is_on_this_machine(scenario: Scenario) -> bool:
    """Whether the server shares the CPUs of the client, whose canary is timed: it was launched, or is on loopback."""
    target = scenario.target
    places = (place for place in (target.rest_url, target.grpc_url, *target.endpoints) if place is not None)
    hosts = (urlsplit(place if "//" in place else f"//{place}").hostname for place in places)
    return all(host is not None and is_loopback(host) for host in hosts)


def _is_cpu_bound(pooled: Pooled, scenario: Scenario) -> bool:
    """Whether the model runs on the CPU, or what passes around it is the limit, or the server uses up its CPUs.

    No where none of these can be told.
    """
    measured = [run.trial.measurement for run in pooled.runs if run.trial.measurement is not None]
    known = [measurement for measurement in measured if measurement.server is not None]
    if not known:
        return False
    if all(map(_computes_on_the_cpu, known)):
        return True
    limit = usual_bottleneck(pooled.configuration, known, scenario=scenario)
    if limit is None:
        return False
    return limit.kind in _ON_THE_CPU or limit.evidence.get("server_cpu_ratio", 0.0) >= BUSY_RATIO


def _computes_on_the_cpu(measured: Measurement) -> bool:
    """By the GPU's own counters; without, by the CPU time that the server takes while a batch executes."""
    server = measured.server
    if server is None or server.emulated:
        return False
    if server.gpu_busy_ratio is not None:
        return server.gpu_busy_ratio <= SLEEPING_GPU_RATIO
    executing_s = _executing_s(server)
    if server.server_cpu_s is None or not executing_s:
        return False
    return server.server_cpu_s >= COMPUTING_RATIO * executing_s


def _executing_s(server: ServerActivity) -> float | None:
    """Seconds with a batch executing; those side by side count once where the server tells; None: it tells nothing."""
    if server.device_busy_ratio is not None:
        return server.device_busy_ratio * server.duration_s
    counts = server.batches_by_rows
    spent_s = sum(mean_s * counts.get(rows, 0) for rows, mean_s in server.execution_s_by_rows.items())
    return min(spent_s, server.duration_s) or None
