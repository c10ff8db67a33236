"""`batchtune simulate`: what would the server do with other parameters, or under another load?"""

from __future__ import annotations

import json as json_text
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.cli.arguments.points import client_counts, rates_rps, refuse_both
from batchtune.cli.commands.calibrated import Calibrated, asked_configurations, calibrated_run
from batchtune.errors import InconclusiveError, UsageError
from batchtune.plain_values import to_plain
from batchtune.report.twin import Simulated, note_when_slow, print_simulations
from batchtune.scenario.units import counted
from batchtune.twin.model.overload import long_run
from batchtune.twin.model.traffic import Traffic, traffic_of
from batchtune.twin.model.twin import Twin
from batchtune.twin.simulator.replica import batcher_of

MOST_POINTS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """What the command line asked for; without a rate and a concurrency the scenario's own load."""

    run: Path | None
    settings: list[str]
    rate: str | None
    concurrency: str | None


def run_simulate(wanted: SimulateRequest, *, results: Path, json: bool, quiet: bool) -> int:
    """The exit code: 0, 5 when the twin cannot be trusted; errors say otherwise."""
    refuse_both(rate=wanted.rate, concurrency=wanted.concurrency)
    found = calibrated_run(wanted.run, results=results, quiet=quiet)
    configurations = asked_configurations(found.base, wanted.settings)
    traffics, notes = _traffics(found, wanted)
    if len(configurations) * len(traffics) > MOST_POINTS:
        raise UsageError(
            f"{len(configurations)} configurations under {len(traffics)} loads are more than {MOST_POINTS} points",
            hint="give fewer values",
        )
    with note_when_slow(f"simulating {counted(len(configurations) * len(traffics), 'point')}", quiet=quiet):
        points = [_point(found, one, traffic) for one in configurations for traffic in traffics]
    if json:
        print(json_text.dumps(_document(found, points), indent=2, allow_nan=False))
    else:
        print_simulations(points, found.twin, base=found.base_name, run=found.run.path, notes=notes)
    return trusted(found.twin)


def trusted(twin: Twin) -> int:
    """The exit code of an answer of this twin: 0, or 5 with a warning where its figures are not to be relied on."""
    if twin.trust != "off":
        return 0
    print(f"warning: {twin.accuracy()}: too much to rely on it", file=sys.stderr)
    return InconclusiveError.exit_code


def _point(found: Calibrated, configuration: Configuration, traffic: Traffic) -> Simulated:
    batcher = batcher_of(configuration, cpus=found.scenario.target.cpus)
    prediction = found.twin.predict(batcher, traffic, quantiles=("p50", "p95", "p99"))
    return Simulated(
        configuration=configuration,
        traffic=traffic,
        prediction=long_run(prediction, found.twin, batcher, traffic),
    )


def _traffics(found: Calibrated, wanted: SimulateRequest) -> tuple[list[Traffic], list[str]]:
    """The loads to simulate, and what to say of where they come from."""
    if wanted.rate is not None:
        return [traffic_of(found.scenario, rate_rps=rate) for rate in rates_rps(wanted.rate)], []
    if wanted.concurrency is not None:
        return [traffic_of(found.scenario, concurrency=one) for one in client_counts(wanted.concurrency)], []
    traffic = traffic_of(found.scenario)
    if traffic.clients is None and traffic.rate_rps is None and found.scenario.load.rate_is_missing():
        return [traffic.at(_capacity_rps(found))], [
            f"The rate is the capacity that the run found for {found.base_name}; --rate asks for another."
        ]
    return [traffic], []


def _capacity_rps(found: Calibrated) -> float:
    if found.capacity_rps is None or not found.capacity_rps > 0.0:
        raise UsageError(
            "the scenario names no rate, and the run found no capacity to start from",
            hint="give --rate 500, or --rate 100:1k:100",
        )
    return found.capacity_rps


def _document(found: Calibrated, points: list[Simulated]) -> dict[str, Any]:
    return {
        "run": str(found.run.path),
        "twin": twin_document(found),
        "points": [
            {
                "label": one.configuration.label(),
                "configuration": one.configuration.to_dict(),
                "traffic": one.traffic.to_dict(),
                **one.prediction.to_dict(),
            }
            for one in points
        ],
    }


def twin_document(found: Calibrated) -> dict[str, Any]:
    """What a reader of the figures needs to know of the twin."""
    twin = found.twin
    return {
        "trust": twin.trust,
        "trust_reason": twin.accuracy(),
        "error": to_plain(twin.error),
        "observations": twin.observations,
        "rows_max": twin.rows_max,
        "threads_max": twin.threads_max,
        "best": to_plain(twin.best_fit),
    }
