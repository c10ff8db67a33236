"""`batchtune plan`: how many replicas does a rate need within its latency limits?"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from batchtune.cli.arguments.slo import in_place_of, promised
from batchtune.cli.commands.calibrated import asked_configurations, asked_values, calibrated_run, notes_on
from batchtune.cli.commands.simulate import trusted, twin_document
from batchtune.errors import UsageError
from batchtune.measure.slo import limits_of
from batchtune.report.twin import note_when_slow, print_plan
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.scenario.units import parse_rate_rps
from batchtune.twin.model.replicas import plan_replicas
from batchtune.twin.model.traffic import traffic_of
from batchtune.twin.simulator.replica import Routing, batcher_of


def run_plan(
    path: Path | None,
    *,
    rate: str,
    limits: Mapping[str, str | None],
    settings: list[str],
    routing: Routing,
    results: Path,
    json: bool,
    quiet: bool,
) -> int:
    """The exit code: 0, 5 when the twin cannot be trusted; errors say otherwise."""
    try:
        rate_rps = parse_rate_rps(rate)
    except UsageError as error:
        raise UsageError(f"--rate: {error.message}", hint="write --rate 10000, or 10k/s") from error
    if rate_rps <= 0.0:
        raise UsageError(f"--rate: {rate!r} is not above 0", hint="write --rate 10000, or 10k/s")
    promises, choices = promised(limits), asked_values(settings)
    calibrated = calibrated_run(path, results=results, quiet=quiet)
    slo = _promise(promises, calibrated.scenario)
    configurations = asked_configurations(calibrated.base, choices)
    if len(configurations) != 1:
        raise UsageError(
            f"--set asks for {len(configurations)} configurations; a plan is for one",
            hint="compare them with `batchtune simulate`, then plan with the best",
        )
    with note_when_slow(f"simulating replicas for {rate_rps:,.0f} requests/s", quiet=quiet):
        plan = plan_replicas(
            calibrated.twin,
            batcher_of(configurations[0], cpus=calibrated.scenario.target.cpus),
            traffic_of(calibrated.scenario, rate_rps=rate_rps),
            rate_rps=rate_rps,
            limits=limits_of(slo),
            error_ratio=slo.error_ratio,
            routing=routing,
        )
    plan = replace(plan, notes=(*plan.notes, *(note.rstrip(".") for note in notes_on(configurations))))
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
    return trusted(calibrated.twin)


def _promise(promises: SloSpec | None, scenario: Scenario) -> SloSpec:
    slo = in_place_of(scenario.slo, promises)
    if not slo.limits():
        raise UsageError("the scenario promises no latency", hint="give --slo-p95 20ms")
    return slo
