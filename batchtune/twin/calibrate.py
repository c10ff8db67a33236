"""Which server would have shown these measurements?

The server's own histograms give the execution times, freed of the contention of several batch threads; what passes
outside the execution (front end, threads, network) is fitted by simulation, together with small corrections of the
times (tuning.md 3.1). A server that tells nothing is fitted from latencies and throughput alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchtune.batching import Configuration
from batchtune.errors import TwinError
from batchtune.measure.measurement import Measurement
from batchtune.scenario.spec import Scenario
from batchtune.twin.fit import Draws, draws_around, laws_to_try
from batchtune.twin.left_out import left_out_error
from batchtune.twin.model import FitError, Twin
from batchtune.twin.observed import Seen, merged, seen_of
from batchtune.twin.simulate import Batcher, batcher_of
from batchtune.twin.traffic import Traffic, traffic_of

FEWEST_REQUESTS = 20
MOST_ERRORS_RATIO = 0.01
SPOILT_BY = frozenset({"client_behind", "client_busy", "growing_backlog", "nothing_measured"})
MOST_OBSERVATIONS = 40
"""Of a longer ledger the latest count: the server that is to be predicted is the one of now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measurement under known parameters; `traffic` None: its closed loop or rate, with Poisson arrivals."""

    batcher: Batcher
    measurement: Measurement
    rows_per_request: int = 1
    traffic: Traffic | None = None


def observation_of(configuration: Configuration, measurement: Measurement, scenario: Scenario) -> Observation:
    """A trial's measurement, under the scenario's kinds of request and pattern of arrivals."""
    clients = measurement.concurrency
    rate_rps = None if clients is not None else measurement.offered_rps
    traffic = traffic_of(scenario, rate_rps=rate_rps, concurrency=clients)
    return Observation(
        batcher=batcher_of(configuration, cpus=scenario.target.cpus),
        measurement=measurement,
        rows_per_request=max(round(traffic.mean_rows), 1),
        traffic=traffic,
    )


def usable(observation: Observation) -> bool:
    """Whether a measurement tells of a server that keeps up, without the client in the way."""
    measured = observation.measurement
    return (
        measured.requests >= FEWEST_REQUESTS
        and measured.throughput_rps.value > 0.0
        and measured.error_ratio <= MOST_ERRORS_RATIO
        and math.isfinite(measured.latency_s["p50"].value)
        and not any(one.code in SPOILT_BY for one in measured.caveats)
        and (measured.concurrency is not None or measured.offered_rps is not None)
    )


def calibrate(
    observations: Sequence[Observation], *, seed: int = 1, draws: int = 30, test: bool = True
) -> Twin:
    """Fit a twin; `draws` readings carry the uncertainty, that between runs included.

    `test` False skips the prediction of trials left out (the costly half); the twin then may only share.

    Raises:
        TwinError: nothing that can be fitted, with a hint.
    """
    seen = _seen(observations)
    fitted = laws_to_try(seen)
    error = left_out_error(seen, fitted[0]) if test else _untested()
    drawn: Draws = draws_around(fitted, error, count=draws, rng=np.random.default_rng(seed))
    return Twin(
        best_fit=drawn.best,
        fits=drawn.fits,
        rows_max=max(max(one.rows_seen) for one in seen),
        threads_max=max(one.threads_seen for one in seen),
        error=error,
        observations=sum(usable(one) for one in observations),
    )


def _seen(observations: Sequence[Observation]) -> list[Seen]:
    found = [one for one in observations if usable(one)][-MOST_OBSERVATIONS:]
    if not found:
        raise TwinError(
            f"none of {len(observations)} measurements can calibrate the twin",
            hint="it needs runs without errors and without a growing backlog: a few short closed loops will do",
        )
    groups: dict[tuple[Batcher, Traffic], list[Seen]] = {}
    for one in found:
        traffic = one.traffic or _plain(one)
        groups.setdefault((one.batcher, traffic), []).append(seen_of(one.batcher, traffic, one.measurement))
    return [merged(runs) for runs in groups.values()]


def _plain(observation: Observation) -> Traffic:
    measured = observation.measurement
    clients = measured.concurrency
    return Traffic(
        clients=clients,
        rate_rps=None if clients is not None else measured.offered_rps,
        rows=(observation.rows_per_request,),
    )


def _untested() -> FitError:
    return FitError(
        p95_ratio=math.nan, throughput_ratio=math.nan, mape=math.nan, spearman=math.nan, left_out=0
    )
