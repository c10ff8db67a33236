"""`batchtune simulate`: what the server would do with other parameters, or under another load."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from batchtune.batching.parameters import Configuration
from batchtune.cli.arguments.load_request import client_counts, rates_rps, refuse_both
from batchtune.cli.commands.calibrated import (
    Calibrated,
    asked_configurations,
    asked_values,
    calibrated_run,
    notes_on,
    notes_on_lengths,
)
from batchtune.errors import InconclusiveError, UsageError
from batchtune.measure.slo import limits_of
from batchtune.plain_values import to_plain
from batchtune.report.twin import Simulated, note_when_slow, print_simulations
from batchtune.tune.answer.recommendation import capacity_of
from batchtune.twin.model.capacity import long_run
from batchtune.twin.model.measured_rates import held_to
from batchtune.twin.model.traffic import Traffic, traffic_of
from batchtune.twin.model.twin import Twin
from batchtune.twin.simulator.replica import batcher_of
from batchtune.units import counted

MOST_POINTS = 2_000


class Load(TypedDict, total=False):
    """A rate, or a number of clients."""

    rate_rps: float
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """What the command line asked for; without a rate and a concurrency the scenario's own load."""

    run: Path | None
    settings: list[str]
    rate: str | None
    concurrency: str | None


def run_simulate(wanted: SimulateRequest, *, results: Path, json: bool, quiet: bool) -> int:
    """The exit code: 0, 5 when the twin cannot be trusted; errors say otherwise."""
    loads, choices = _asked_loads(wanted), asked_values(wanted.settings)
    calibrated = calibrated_run(wanted.run, results=results, quiet=quiet)
    by_length = calibrated.scenario.target.runs == "bundled"
    configurations = asked_configurations(calibrated.base, choices, by_length=by_length)
    traffics, notes = _traffics(calibrated, loads)
    notes += [*notes_on(configurations), *notes_on_lengths(calibrated)]
    if len(configurations) * len(traffics) > MOST_POINTS:
        raise UsageError(
            f"{len(configurations)} configurations under {len(traffics)} loads are more than {MOST_POINTS} points",
            hint="give fewer values",
        )
    with note_when_slow(f"simulating {counted(len(configurations) * len(traffics), 'point')}", quiet=quiet):
        points = [
            point
            for configuration in configurations
            for point in _points(calibrated, configuration, traffics)
        ]
    if json:
        document = {**_document(calibrated, points), "notes": notes}
        print(json_text.dumps(document, indent=2, allow_nan=False))
    else:
        print_simulations(
            points, calibrated.twin, base=calibrated.base_name, run=calibrated.run.path, notes=notes
        )
    return trusted(calibrated.twin)


def trusted(twin: Twin) -> int:
    """The exit code of an answer of this twin: 0, or 5 with a warning where its figures are not to be relied on."""
    if twin.reliable:
        return 0
    print(f"warning: {twin.accuracy()}: too much to rely on it", file=sys.stderr)
    return InconclusiveError.exit_code


def _points(
    calibrated: Calibrated, configuration: Configuration, traffics: Sequence[Traffic]
) -> Iterator[Simulated]:
    """One configuration under each load: of one that was measured, open loops by the twin held to its rates."""
    scenario = calibrated.scenario
    batcher = batcher_of(configuration, cpus=scenario.target.cpus)
    steady = [traffic for traffic in traffics if not (traffic.closed or traffic.changes)]
    measured = calibrated.measured(configuration) if steady else None
    twin, twin_rps = calibrated.twin, None
    if measured is not None:
        limits, errors = limits_of(scenario.slo), scenario.slo.error_ratio
        twin, twin_rps = held_to(twin, batcher, steady[0], limits, errors, measured)
    for traffic in traffics:
        asked_twin = twin if traffic in steady else calibrated.twin
        yield Simulated(
            configuration=configuration,
            traffic=traffic,
            prediction=long_run(asked_twin.predict(batcher, traffic), asked_twin, batcher, traffic),
            measured=measured if traffic in steady else None,
            twin_rps=twin_rps if traffic in steady else None,
        )


def _asked_loads(wanted: SimulateRequest) -> list[Load]:
    """The rates or the numbers of clients that were asked for; none: the scenario's own."""
    refuse_both(rate=wanted.rate, concurrency=wanted.concurrency)
    if wanted.rate is not None:
        return [{"rate_rps": rate} for rate in rates_rps(wanted.rate)]
    return (
        []
        if wanted.concurrency is None
        else [{"concurrency": clients} for clients in client_counts(wanted.concurrency)]
    )


def _traffics(calibrated: Calibrated, loads: Sequence[Load]) -> tuple[list[Traffic], list[str]]:
    """The loads to simulate, and what to say of where they come from."""
    if loads:
        return [traffic_of(calibrated.scenario, **load) for load in loads], []
    traffic = traffic_of(calibrated.scenario)
    if traffic.clients is None and traffic.rate_rps is None and calibrated.scenario.load.rate_is_missing():
        return [traffic.at(_capacity_rps(calibrated))], [
            f"The rate is the capacity that the run found for {calibrated.base_name}; --rate asks for another."
        ]
    return [traffic], []


def _capacity_rps(calibrated: Calibrated) -> float:
    capacity = capacity_of(calibrated.base, calibrated.trials, scenario=calibrated.scenario)
    if capacity is None or not capacity.held_rps > 0.0:
        raise UsageError(
            "the scenario names no rate, and the run found no capacity to start from",
            hint="give --rate 500, or --rate 100:1k:100",
        )
    return capacity.held_rps


def _document(calibrated: Calibrated, points: list[Simulated]) -> dict[str, Any]:
    return {
        "run": str(calibrated.run.path),
        "twin": twin_document(calibrated),
        "points": [
            {
                "label": point.configuration.label(),
                "configuration": point.configuration.to_dict(),
                "traffic": point.traffic.to_dict(),
                **point.prediction.to_dict(),
                "measured": to_plain(point.measured),
                "twin_rps": to_plain(point.twin_rps),
            }
            for point in points
        ],
    }


def twin_document(calibrated: Calibrated) -> dict[str, Any]:
    """What a reader of the figures needs to know of the twin."""
    twin = calibrated.twin
    return {
        "reliable": twin.reliable,
        "accuracy": twin.accuracy(),
        "error": to_plain(twin.error),
        "observations": twin.observations,
        "rows_max": twin.rows_max,
        "threads_max": twin.threads_max,
        "best": to_plain(twin.best_fit),
    }
