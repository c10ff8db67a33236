"""`batchtune plan`: the replicas that a rate needs within its latency limits."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from batchtune.cli.arguments.failing import failing_of
from batchtune.cli.arguments.option import of_option
from batchtune.cli.arguments.slo import in_place_of, promised
from batchtune.cli.commands.calibrated import (
    Calibrated,
    asked_configurations,
    asked_values,
    calibrated_run,
    notes_on,
    notes_on_lengths,
)
from batchtune.cli.commands.simulate import trusted, twin_document
from batchtune.errors import InconclusiveError, UsageError
from batchtune.measure.slo import limits_of
from batchtune.report.twin import ProgressLines, note_when_slow, print_day, print_plan
from batchtune.scenario.profiles import Interval, profile_of_load, read_profile
from batchtune.scenario.spec.load import FleetSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.scenario.units import counted, parse_duration_s, parse_rate_rps
from batchtune.twin.model.hours import plan_day
from batchtune.twin.model.replicas import Fleet, ReplicaPlan
from batchtune.twin.model.traffic import Traffic, traffic_of
from batchtune.twin.simulator.replica import Routing, batcher_of

EXACT_S = 60.0
"""Of the whole fleet: enough for the p99 of a single replica of 100 requests/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the command line asked for; without rate and profile the scenario's own steps, ramp or trace."""

    run: Path | None
    rate: str | None
    limits: Mapping[str, str | None]
    settings: list[str]
    routing: Routing
    failing: str | None = None
    detect: str | None = None
    profile: Path | None = None
    exact: bool = False
    exact_time: str | None = None
    fleet: str | None = None


def run_plan(wanted: PlanRequest, *, results: Path, json: bool, quiet: bool) -> int:
    """The exit code: 0, 5 where the twin cannot be trusted or runs contradict it; errors say otherwise."""
    rate_rps = None if wanted.rate is None else _rate_rps(wanted.rate)
    promises, choices = promised(wanted.limits), asked_values(wanted.settings)
    failing = failing_of(wanted.failing, wanted.detect)
    exact_s = _exact_s(wanted)
    profile = () if wanted.profile is None else read_profile(wanted.profile, peak_rps=rate_rps)
    calibrated = calibrated_run(wanted.run, results=results, quiet=quiet)
    scenario = calibrated.scenario
    if rate_rps is None and not profile:
        profile = _own_profile(scenario)
    highest_rps = max((interval.rate_rps for interval in profile), default=rate_rps or 0.0)
    slo = _promise(promises, scenario)
    by_length = calibrated.scenario.target.runs == "bundled"
    configurations = asked_configurations(calibrated.base, choices, by_length=by_length)
    if len(configurations) != 1:
        raise UsageError(
            f"--set asks for {len(configurations)} configurations; a plan is for one",
            hint="compare them with `batchtune simulate`, then plan with the best",
        )
    fleet = Fleet(
        calibrated.twin,
        batcher_of(configurations[0], cpus=scenario.target.cpus),
        _traffic(scenario, highest_rps, profile),
        limits_of(slo),
        slo.error_ratio,
        wanted.routing,
        failing,
        measured=calibrated.measured(configurations[0], slo=slo),
    )
    with note_when_slow(_doing(highest_rps, profile), quiet=quiet):
        day = plan_day(fleet, profile) if profile else None
        plan = fleet.plan(highest_rps) if day is None else day.peak
    if exact_s is not None:
        progress = ProgressLines("simulating the fleet", quiet=quiet)
        cluster = _cluster(wanted.fleet)
        exact = fleet.exactly(plan, duration_s=exact_s, on_progress=progress, cluster=cluster)
        plan = replace(plan, exact=exact)
    notes = [*notes_on(configurations), *notes_on_lengths(calibrated)]
    plan = replace(plan, notes=(*plan.notes, *(note.rstrip(".") for note in notes)))
    day = None if day is None else replace(day, peak=plan)
    if json:
        document = {
            "run": str(calibrated.run.path),
            "label": configurations[0].label(),
            "configuration": configurations[0].to_dict(),
            "twin": twin_document(calibrated),
            **(plan if day is None else day).to_dict(),
        }
        print(json_text.dumps(document, indent=2, allow_nan=False))
    else:
        if day is not None:
            print_day(day, source=_source(wanted, calibrated))
        print_plan(plan, calibrated.twin, configuration=configurations[0], run=calibrated.run.path)
    return max(trusted(calibrated.twin), _held(plan))


def _held(plan: ReplicaPlan) -> int:
    """The exit code: 5, with a warning, where no run held the limits and the twin names a rate that one missed."""
    if plan.measured is None or plan.measured.held_rps or not plan.contradicted:
        return 0
    print("warning: no run of these parameters kept the limits at a rate: sweep with them", file=sys.stderr)
    return InconclusiveError.exit_code


def _rate_rps(rate: str) -> float:
    with of_option("--rate", hint="write --rate 10000, or 10k/s"):
        rate_rps = parse_rate_rps(rate)
    if rate_rps <= 0.0:
        raise UsageError(f"--rate: {rate!r} is not above 0", hint="write --rate 10000, or 10k/s")
    return rate_rps


def _exact_s(wanted: PlanRequest) -> float | None:
    """How long the fleet is simulated whole; None: it is not."""
    if wanted.fleet is not None and not wanted.exact:
        raise UsageError("--fleet is read only with --exact", hint="write --exact --fleet auto")
    if wanted.exact_time is None:
        return EXACT_S if wanted.exact else None
    if not wanted.exact:
        raise UsageError("--exact-time is read only with --exact", hint="write --exact --exact-time 60s")
    with of_option("--exact-time"):
        duration_s = parse_duration_s(wanted.exact_time)
    if duration_s <= 0.0:
        raise UsageError(f"--exact-time: {wanted.exact_time!r} is not above 0", hint="write --exact-time 60s")
    return duration_s


def _cluster(address: str | None) -> str | None:
    """The Ray cluster that --fleet names; None: this machine alone."""
    if address is None:
        return None
    try:
        return FleetSpec.model_validate({"ray": address}).ray
    except ValidationError as error:
        wanted = f"expected auto, HOST:PORT or ray://HOST:PORT; was {address!r}"
        raise UsageError(f"--fleet: {wanted}", hint="write --fleet auto") from error


def _own_profile(scenario: Scenario) -> tuple[Interval, ...]:
    profile = profile_of_load(scenario.load)
    if not profile:
        raise UsageError(
            f"a plan needs a rate; the scenario's load ({scenario.load.arrivals}) does not change by itself",
            hint="give --rate 10000, or --profile day.csv with the columns hour and rate",
        )
    return profile


def _traffic(scenario: Scenario, rate_rps: float, profile: Sequence[Interval]) -> Traffic:
    """Within an interval the rate is steady: Poisson arrivals, where the scenario's own change over time."""
    traffic = traffic_of(scenario, rate_rps=rate_rps)
    return traffic.steady() if profile else traffic


def _doing(rate_rps: float, profile: Sequence[Interval]) -> str:
    rates = f" at most, in {counted(len(profile), 'interval')}" if profile else ""
    return f"simulating replicas for {rate_rps:,.0f} requests/s{rates}"


def _source(wanted: PlanRequest, calibrated: Calibrated) -> str:
    if wanted.profile is not None:
        return str(wanted.profile)
    return f"the {calibrated.scenario.load.arrivals} of the scenario"


def _promise(promises: SloSpec | None, scenario: Scenario) -> SloSpec:
    slo = in_place_of(scenario.slo, promises)
    if not slo.limits():
        raise UsageError("the scenario promises no latency", hint="give --slo-p95 20ms")
    return slo
