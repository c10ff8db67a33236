"""Calibrates a twin: the server that would have shown these measurements.

The server's own histograms give the execution times, freed of the contention of several batch threads; what passes
outside the execution (front end, threads, network) is fitted by simulation, together with small corrections of the
times. A server that tells nothing is fitted from latencies and throughput alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.errors import TwinError
from batchtune.measure.measurement import Measurement
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import percentage, rounded_duration
from batchtune.twin.calibration.cross_validation import left_out_error
from batchtune.twin.calibration.least_squares import laws_to_try, readings_around
from batchtune.twin.calibration.parameters import with_load
from batchtune.twin.calibration.targets import FitRun, fit_run_of, merged
from batchtune.twin.model.length_cost import fit_length_cost
from batchtune.twin.model.traffic import Traffic, traffic_of
from batchtune.twin.model.twin import Twin
from batchtune.twin.simulator.replica import Batcher, batcher_of

FEWEST_REQUESTS = 3
"""Of a lone client; of a closed loop each client must have been answered once."""

FEWEST_REQUESTS_OPEN = 20
"""Of an open loop, whose few arrivals say as much of chance as of the server."""

ROUNDS = 4
"""So many answers of each client are asked of a run that is too short."""

MOST_ERRORS_RATIO = 0.01

Unusable = Literal["few answers", "errors", "overload", "client", "no load"]

_WORDS: Final[Mapping[Unusable, str]] = {
    "few answers": "ended before every client was answered once",
    "errors": f"had errors in more than {percentage(MOST_ERRORS_RATIO)} of the requests",
    "overload": "were above what the server completes",
    "client": "were limited by the load generator",
    "no load": "tell neither clients nor a rate",
}

READINGS = 30
"""That fit about as well: the ends of a 95 % interval are the second from below and from above."""

MOST_OBSERVATIONS = 40
"""Of a longer ledger the latest count: the server that is to be predicted is the one of now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measurement under known parameters, and the traffic that it was made under."""

    batcher: Batcher
    measurement: Measurement
    traffic: Traffic


def observation_of(configuration: Configuration, measurement: Measurement, scenario: Scenario) -> Observation:
    """A trial's measurement, under the scenario's kinds of request and pattern of arrivals."""
    clients = measurement.concurrency
    rate_rps = None if clients is not None else measurement.offered_rps
    return Observation(
        batcher=batcher_of(configuration, cpus=scenario.target.cpus),
        measurement=measurement,
        traffic=traffic_of(scenario, rate_rps=rate_rps, concurrency=clients),
    )


def usable(observation: Observation) -> bool:
    """Whether a measurement tells of a server that keeps up, without the client in the way."""
    return unusable_for(observation) is None


def unusable_for(observation: Observation) -> Unusable | None:
    """Why a measurement cannot be used; None: it can.

    A closed loop tells the time of a batch as soon as each client was answered once, however slow the model is.
    """
    measured = observation.measurement
    clients = measured.concurrency
    if measured.error_ratio > MOST_ERRORS_RATIO:
        return "errors"
    if any(noted.code == "growing_backlog" for noted in measured.caveats):
        return "overload"
    if any(noted.code in {"client_behind", "client_busy"} for noted in measured.caveats):
        return "client"
    if clients is None and measured.offered_rps is None:
        return "no load"
    fewest = FEWEST_REQUESTS_OPEN if clients is None else max(FEWEST_REQUESTS, clients)
    answered = measured.throughput_rps.value > 0.0 and math.isfinite(measured.latency_s["p50"].value)
    return None if measured.requests >= fewest and answered else "few answers"


def calibrate(observations: Sequence[Observation], *, seed: int = 1) -> Twin:
    """Fit a twin; READINGS carry the uncertainty, that between runs included.

    Raises:
        TwinError: nothing that can be fitted, with a hint.
    """
    runs = _fit_runs(observations)
    fitted = laws_to_try(runs)
    error = left_out_error(runs, fitted[0])
    return Twin(
        best_fit=fitted[0].reading,
        fits=readings_around(fitted, error, count=READINGS, rng=np.random.default_rng(seed)),
        rows_max=max(max(run.rows_seen) for run in runs),
        threads_max=max(run.threads_seen for run in runs),
        error=error,
        observations=sum(usable(observation) for observation in observations),
    )


def _fit_runs(observations: Sequence[Observation]) -> list[FitRun]:
    used = [observation for observation in observations if usable(observation)][-MOST_OBSERVATIONS:]
    if not used:
        raise _nothing_usable(observations)
    traffics = [observation.traffic for observation in used]
    servers = [observation.measurement.server for observation in used]
    length = fit_length_cost([server for server in servers if server is not None], traffics[-1])
    groups: dict[tuple[Batcher, Traffic], list[FitRun]] = {}
    for observation, traffic in zip(used, traffics, strict=True):
        groups.setdefault((observation.batcher, traffic), []).append(
            fit_run_of(observation.batcher, traffic, observation.measurement, length=length)
        )
    return with_load([merged(runs) for runs in groups.values()])


def _nothing_usable(observations: Sequence[Observation]) -> TwinError:
    reasons = Counter(
        reason for observation in observations if (reason := unusable_for(observation)) is not None
    )
    counts = ", ".join(f"{count} {_WORDS[reason]}" for reason, count in reasons.most_common())
    return TwinError(
        f"no measurement of {len(observations)} can calibrate the model of the server: {counts or 'there is none'}",
        hint=_what_would_help(observations, reasons),
    )


def _what_would_help(observations: Sequence[Observation], reasons: Counter[Unusable]) -> str:
    if not reasons:
        return "measure some configurations in closed loops"
    match reasons.most_common(1)[0][0]:
        case "few answers":
            means_s = [observation.measurement.latency_mean_s for observation in observations]
            slowest_s = max((seconds for seconds in means_s if math.isfinite(seconds)), default=math.nan)
            if math.isnan(slowest_s):
                return "no request was answered in time: give a longer load.duration and search.budget.time"
            return (
                f"requests took up to {rounded_duration(slowest_s)}: give a load.duration of "
                f"{rounded_duration(ROUNDS * slowest_s)} or more, and a search.budget.time for a dozen of such runs"
            )
        case "errors":
            return "see why the requests failed; where they only took too long, raise request.timeout"
        case "overload":
            return "measure closed loops, or rates below what the server completes"
        case "client":
            return "give the load generator more CPUs or processes"
        case "no load":
            return "measure closed loops, or at a fixed rate"
