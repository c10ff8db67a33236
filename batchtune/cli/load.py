"""`batchtune load`: one load test, or one for each point of a range, against a launched or a running server."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from batchtune.batching import Configuration, parse_tfserving_text
from batchtune.cli.points import client_counts, rates_rps, refuse_both
from batchtune.errors import MeasurementInvalidError, TargetError, UsageError
from batchtune.load.calibration import calibrate
from batchtune.load.fleet import LoadFleet
from batchtune.measure.host import HostGuard
from batchtune.report.live import live_line, sweep_view, trial_line
from batchtune.report.load_points import points_dict, print_points, print_points_csv, spoilt_message
from batchtune.scenario.reader import read_scenario
from batchtune.scenario.spec import Scenario, TlsSpec
from batchtune.scenario.units import counted
from batchtune.target.endpoint import TlsOptions
from batchtune.target.external import ExternalTarget, external_endpoint
from batchtune.target.tfserving import TfServingTarget, launched_target, served_name
from batchtune.tune import policy
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.limits import spoilt_by

if TYPE_CHECKING:
    from batchtune.report.live import View
    from batchtune.tune.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What the command line asked for; None: as the scenario says."""

    scenario: Path
    overrides: list[str]
    concurrency: str | None
    rate: str | None
    batching_parameters_file: Path | None
    no_batching: bool
    rest_url: str | None
    grpc_url: str | None


def run_load(wanted: LoadRequest, *, output: Literal["table", "json", "csv"], quiet: bool) -> int:
    """The exit code; what was measured is printed in any case.

    0; 6 when every point that was measured shows the load generator or a noisy host (repeats included): a single such
    point is 6, a range whose end is beyond the client is not; 7 when a point failed; 130 when interrupted.
    """
    refuse_both(rate=wanted.rate, concurrency=wanted.concurrency)
    scenario = read_scenario(wanted.scenario, overrides=[*wanted.overrides, *_mode(wanted)])
    if scenario.load.rate_is_missing():
        raise UsageError(
            "the scenario names no rate: it asks for the highest one",
            hint="give --rate 500, or --rate 100:1k:100",
        )
    points: list[Trial] = []
    interrupted = False
    with sweep_view(quiet=quiet) as view:
        try:
            for point in _measured(scenario, wanted, view):
                points.append(point)
                view.event(trial_line(point, head=_load_of(point)))
        except KeyboardInterrupt:
            interrupted = True
    match output:
        case "json":
            print(json_text.dumps(points_dict(points, scenario=scenario), indent=2))
        case "csv":
            print_points_csv(points, scenario=scenario)
        case "table":
            print_points(points, scenario=scenario)
    if interrupted:
        print("interrupted", file=sys.stderr)
        return 130
    return _exit_code(points)


def _exit_code(points: Sequence[Trial]) -> int:
    if any(point.failure for point in points):
        return TargetError.exit_code
    void = spoilt_message(points)
    if void is None:
        return 0
    print(f"invalid: {void}", file=sys.stderr)
    return MeasurementInvalidError.exit_code


def _measured(scenario: Scenario, wanted: LoadRequest, view: View) -> Iterator[Trial]:
    configuration = _configuration(scenario, wanted)
    target = _target(scenario, wanted, view)
    try:
        with LoadFleet(processes=scenario.load.processes, cpus=scenario.load.cpus) as fleet:
            target.apply(configuration)
            plans = list(_plans(scenario, wanted, configuration))
            bench = Bench(
                scenario,
                target,
                fleet,
                on_live=lambda plan, live: view.live(f"{_place(plan, plans)}{live_line(live)}"),
                guard=HostGuard(),
                client_max_rps=lambda requests: calibrate(fleet, requests).client_max_rps,
            )
            repeats_left = max(policy.REPEATS_MAX, int(policy.COMPARE_REPEATS_SHARE * len(plans)))
            for plan in plans:
                point = bench.run(plan).trial
                for _ in range(min(policy.REPEATS_MAX, repeats_left)):
                    if spoilt_by(point) != "host":
                        break
                    view.event("the host was noisy: once more")
                    repeats_left -= 1
                    point = bench.run(plan).trial
                yield point
    finally:
        target.close()


def _plans(scenario: Scenario, wanted: LoadRequest, configuration: Configuration) -> Iterator[Plan]:
    plan = Plan(number=1, configuration=configuration, source="probe", reason="load", seed=scenario.load.seed)
    if wanted.rate is not None:
        for number, rate in enumerate(rates_rps(wanted.rate), 1):
            yield replace(plan, number=number, rate_rps=rate)
    elif wanted.concurrency is not None:
        for number, clients in enumerate(client_counts(wanted.concurrency), 1):
            yield replace(plan, number=number, concurrency=clients)
    else:
        yield plan


def _mode(wanted: LoadRequest) -> list[str]:
    """Overrides that turn the scenario's loop into the one that the command line asks for."""
    if wanted.rate is not None:
        return [
            "load.arrivals=poisson", "load.concurrency=null", "load.think_time=0s",
            f"load.rate={rates_rps(wanted.rate)[0]}",
            "load.requests=null", "objective=latency",
        ]  # fmt: skip
    if wanted.concurrency is not None:
        return [
            "load.arrivals=closed", "load.rate=null", "load.max_in_flight=null",
            f"load.concurrency={client_counts(wanted.concurrency)[0]}",
            "objective=throughput",
        ]  # fmt: skip
    return []


def _configuration(scenario: Scenario, wanted: LoadRequest) -> Configuration:
    fixed = scenario.configuration({})
    if wanted.no_batching:
        if wanted.batching_parameters_file is not None:
            raise UsageError("--no-batching and --batching-parameters-file exclude each other")
        return Configuration(batching=None, flags=fixed.flags)
    if wanted.batching_parameters_file is None:
        return fixed
    try:
        text = wanted.batching_parameters_file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--batching-parameters-file: {error}") from error
    parameters = parse_tfserving_text(text, source=str(wanted.batching_parameters_file))
    return Configuration(batching=parameters, flags=fixed.flags)


def _target(scenario: Scenario, wanted: LoadRequest, view: View) -> TfServingTarget | ExternalTarget:
    if wanted.rest_url is None and wanted.grpc_url is None:
        view.event(f"launching the server for {scenario.target.model}")
        return launched_target(scenario, on_event=view.event)
    endpoint = external_endpoint(
        model_name=served_name(scenario.target.model),
        rest_url=wanted.rest_url,
        grpc_url=wanted.grpc_url,
        tls=_tls(scenario.target.tls),
    )
    return ExternalTarget(endpoint, kserve=scenario.request.protocol.startswith("kserve_"))


def _tls(spec: TlsSpec | None) -> TlsOptions | None:
    if spec is None:
        return None
    return TlsOptions(
        ca_file=spec.ca_file,
        certificate_file=spec.certificate_file,
        key_file=spec.key_file,
        server_name=spec.server_name,
    )


def _place(plan: Plan, plans: Sequence[Plan]) -> str:
    return f"point {plan.number} of {len(plans)}: " if len(plans) > 1 else ""


def _load_of(point: Trial) -> str | None:
    """The load of one point; None where the scenario's own says it."""
    if point.rate_rps is not None:
        return f"{point.rate_rps:,.6g} requests/s offered"
    return None if point.concurrency is None else counted(point.concurrency, "client")
