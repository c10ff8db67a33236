"""`batchtune plan`: the replicas that a rate needs within its latency limits."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.cli.arguments.options import of_option
from batchtune.cli.arguments.slo import in_place_of, promised
from batchtune.cli.commands.calibrated import (
    asked_configurations,
    asked_values,
    calibrated_run,
    notes_on,
    notes_on_lengths,
)
from batchtune.cli.commands.simulate import trusted, twin_document
from batchtune.errors import InconclusiveError, UsageError
from batchtune.measure.slo import limits_of
from batchtune.report.twin import note_when_slow, print_plan
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.twin.model.replicas import Fleet, ReplicaPlan
from batchtune.twin.model.traffic import traffic_of
from batchtune.twin.simulator.replica import Routing, batcher_of
from batchtune.units import parse_rate_rps, parse_ratio

if TYPE_CHECKING:
    from batchtune.twin.model.replicas import Failing


_HINT = "write --failing 1 for one replica, or --failing 5% of the fleet"


def failing_of(failing: str | None) -> Failing | None:
    """What was asked for; None: nothing may fail.

    Raises:
        UsageError: no number of replicas and no share of them.
    """
    from batchtune.twin.model.replicas import Failing

    if failing is None:
        return None
    count, share = _down(failing.strip())
    return Failing(count=count, share=share)


def _down(text: str) -> tuple[int, float]:
    if text.endswith("%"):
        with of_option("--failing", hint=_HINT):
            share = parse_ratio(text)
        if not 0.0 < share < 1.0:
            raise UsageError(f"--failing {text}: expected more than 0 % and less than 100 %", hint=_HINT)
        return 0, share
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise UsageError(f"--failing {text}: no number of replicas from 1 and no percentage", hint=_HINT)
    return int(text), 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the command line asked for."""

    run: Path | None
    rate: str | None
    limits: Mapping[str, str | None]
    settings: list[str]
    routing: Routing
    failing: str | None = None


def run_plan(wanted: PlanRequest, *, results: Path, json: bool, quiet: bool) -> int:
    """The exit code: 0, 5 where the twin cannot be trusted or runs contradict it; errors say otherwise."""
    rate_rps = _rate_rps(wanted.rate)
    promises, choices = promised(wanted.limits), asked_values(wanted.settings)
    failing = failing_of(wanted.failing)
    calibrated = calibrated_run(wanted.run, results=results, quiet=quiet)
    scenario = calibrated.scenario
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
        traffic_of(scenario, rate_rps=rate_rps),
        limits_of(slo),
        slo.error_ratio,
        wanted.routing,
        failing,
        measured=calibrated.measured(configurations[0], slo=slo),
    )
    with note_when_slow(f"simulating replicas for {rate_rps:,.0f} requests/s", quiet=quiet):
        plan = fleet.plan(rate_rps)
    notes = [*notes_on(configurations), *notes_on_lengths(calibrated)]
    plan = replace(plan, notes=(*plan.notes, *(note.rstrip(".") for note in notes)))
    if json:
        document = {
            "run": str(calibrated.run.path),
            "label": configurations[0].label(),
            "configuration": configurations[0].to_dict(),
            "twin": twin_document(calibrated),
            **plan.to_dict(),
        }
        print(json_text.dumps(document, indent=2, allow_nan=False))
    else:
        print_plan(plan, calibrated.twin, configuration=configurations[0], run=calibrated.run.path)
    return max(trusted(calibrated.twin), _held(plan))


def _held(plan: ReplicaPlan) -> int:
    """The exit code: 5, with a warning, where no run held the limits and the twin names a rate that one missed."""
    if plan.measured is None or plan.measured.held_rps or not plan.contradicted:
        return 0
    print("warning: no run of these parameters met the limits at a rate: sweep with them", file=sys.stderr)
    return InconclusiveError.exit_code


def _rate_rps(rate: str | None) -> float:
    if rate is None:
        raise UsageError("a plan needs a rate", hint="write --rate 10000, or 10k/s")
    with of_option("--rate", hint="write --rate 10000, or 10k/s"):
        rate_rps = parse_rate_rps(rate)
    if rate_rps <= 0.0:
        raise UsageError(f"--rate: {rate!r} is not above 0", hint="write --rate 10000, or 10k/s")
    return rate_rps


def _promise(promises: SloSpec | None, scenario: Scenario) -> SloSpec:
    slo = in_place_of(scenario.slo, promises)
    if not slo.limits():
        raise UsageError("the scenario promises no latency", hint="give --slo-p95 20ms")
    return slo
