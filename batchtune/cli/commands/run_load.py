"""`batchtune load`: one load test, or one for each point of a range, against a launched or a running server."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from batchtune.archive.table import trial_table
from batchtune.batching.parameters import Configuration
from batchtune.check.load_limits import LimitFinding, judge_limits, parse_limits
from batchtune.cli.arguments.load_request import (
    asked_configuration,
    asked_load,
    asked_plans,
    client_counts,
    is_launched,
)
from batchtune.cli.arguments.options import LoadRequest, refuse
from batchtune.cli.commands.report import report_at_end
from batchtune.cli.session import MeasuringSession, beginning, gravest, session
from batchtune.errors import (
    ArchiveError,
    InconclusiveError,
    MeasurementInvalidError,
    NoFeasibleConfigurationError,
    TargetError,
)
from batchtune.measure.caveats import HostGuard
from batchtune.plain_values import as_text, to_plain
from batchtune.report.check_text import limit_text
from batchtune.report.comparison import speed_text
from batchtune.report.findings import print_json, text_of
from batchtune.report.live_view import live_line, load_text, plan_load, trial_line
from batchtune.report.load_points import points_dict, print_points, spoilt_message
from batchtune.report.run_tables import print_trials
from batchtune.scenario.reader import lines_named, lists_models
from batchtune.scenario.spec.check import limit_words, value_words
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import LaunchedTarget, external_target, target_of
from batchtune.target.claim import foreign_parameters
from batchtune.target.external import ExternalTarget
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.compare.blocks import REPEATS_SHARE, leaves_duration_open, probed_pace
from batchtune.tune.evidence.best_point import best_point, spoilt_by
from batchtune.tune.loader import REPEATS_MAX
from batchtune.tune.trials.pace import times_of
from batchtune.tune.trials.trial import FinishedTrial, TrialRequest, parts_of, was_interrupted
from batchtune.units import counted, rounded_duration

if TYPE_CHECKING:
    from batchtune.measure.measurement import Measurement
    from batchtune.report.live_view import View
    from batchtune.tune.trials.trial import Trial


def run_load(wanted: LoadRequest, *, csv: bool = False, gates: Sequence[str] = ()) -> int:
    """Run `batchtune load`: measure each load point, print them, and save them.

    Returns the exit code: 0; 3 where the SLO or a limit of `gates` is missed, 5 where that is undecided; in a range the
    best point decides. 6 where the load generator or the host spoilt every point, repeats included; 7 where a point
    failed; 130 when interrupted. Several models are loaded together and then each alone; the most serious verdict of
    the load of all together decides. An error after a complete point ends the test: the points so far are printed, and
    the code is the error's.

    Raises:
        UsageError: a limit of `gates` that is none, or one model's option with several models.
        UsageError, ScenarioError, BatchingParametersError: as `asked_load`.
        TargetError, MeasurementInvalidError: before any point was complete.
    """
    limits = parse_limits(gates)
    if lists_models(wanted.scenario):
        _refuse_of_one(wanted, gates)
    scenario, wanted = asked_load(wanted)
    several = bool(scenario.target.models)
    with (
        lines_named(wanted.scenario, wanted.overrides),
        session(scenario, "load", results=wanted.results, quiet=wanted.quiet) as current,
    ):
        for note in wanted.notes:
            current.view.event(note)
        _measure(scenario, wanted, current)
    points = current.trials
    best = best_point(points)
    findings = [] if best is None else judge_limits(limits, best.point)
    if wanted.json:
        run = None if current.run is None else str(current.run.path)
        document = points_dict(points, scenario=scenario)
        print_json({"run": run, **document, "gates": to_plain(findings)})
    elif csv:
        print_trials(trial_table(points), sort=None, output="csv")
    else:
        print_points(points, scenario=scenario)
    if current.run is not None and len(points) > 1 and not several:
        report_at_end(current.run, quiet=wanted.quiet)
    if current.fault is not None:
        return current.exit_code(0)
    codes = {_exit_code(points, scenario), _gate_code(findings)}
    return current.exit_code(gravest(codes))


def _refuse_of_one(wanted: LoadRequest, gates: Sequence[str]) -> None:
    """Raise UsageError where an option is given that makes sense for one model only."""
    why = "not of several models at once"
    options = {"--rate": wanted.rate, "--concurrency": wanted.concurrency, "--gate": gates}
    for key, (option, value) in zip(("rate", "concurrency", "slo"), options.items(), strict=True):
        refuse({option: value}, why, hint=f"write {key}: at each of target.models")
    urls = {"--rest-url": wanted.rest_url, "--grpc-url": wanted.grpc_url}
    refuse(urls, why, hint="several models are served by a server that is launched")


def _code_of(trial: Trial) -> int:
    """Return the exit code of the verdict on one of several models; one other than PASS is printed."""
    measured = trial.measurement
    if measured is None or measured.verdict in (None, "PASS"):
        return 0
    print(f"{trial.model}: {measured.verdict}: {text_of(measured.verdict_reason)}", file=sys.stderr)
    if measured.verdict in ("INVALID", "NOISY"):
        return MeasurementInvalidError.exit_code
    is_missed = measured.verdict == "FAIL"
    return NoFeasibleConfigurationError.exit_code if is_missed else InconclusiveError.exit_code


def _gate_code(findings: Sequence[LimitFinding]) -> int:
    """Print what was found of each limit, and return the exit code: 3 where one is missed, 5 where one is
    open, else 0."""
    for finding in findings:
        print(f"gate: {limit_text(finding)}", file=sys.stderr)
    states = {finding.state for finding in findings}
    if "missed" in states:
        return NoFeasibleConfigurationError.exit_code
    return InconclusiveError.exit_code if states & {"open", "not measured"} else 0


def _exit_code(points: Sequence[Trial], scenario: Scenario) -> int:
    """Return the exit code of a load test, and print why where it is not 0; of several models the most serious
    one of those that were loaded at once."""
    if any(point.failure for point in points):
        return TargetError.exit_code
    if scenario.target.models:
        return gravest({_code_of(part) for part in parts_of(points) if not part.request.models})
    void = spoilt_message(points)
    if void is not None:
        print(f"invalid: {void}", file=sys.stderr)
        return MeasurementInvalidError.exit_code
    best = best_point(points)
    judgement = None if best is None else best.point.measurement
    if judgement is None or judgement.verdict not in ("FAIL", "UNSURE"):
        return 0
    if judgement.verdict == "FAIL":
        why = "; ".join([text_of(judgement.verdict_reason), *_missed_goodput(judgement, scenario)])
        print(f"the SLO is missed: {why}", file=sys.stderr)
        return NoFeasibleConfigurationError.exit_code
    if scenario.load.requests is None:
        longer = f"the measured part was {rounded_duration(judgement.window_s)}: --set load.duration=DURATION"
    else:
        longer = f"{counted(judgement.requests, 'request')} were measured: --set load.requests=N"
    print(f"no verdict on the SLO: {text_of(judgement.verdict_reason)}; {longer}", file=sys.stderr)
    return InconclusiveError.exit_code


def _missed_goodput(measured: Measurement, scenario: Scenario) -> Iterator[str]:
    """Yield the goodput, where it is below its limit: another limit may be missed first."""
    missed, allowed = measured.latency_s.get("goodput"), scenario.slo.limits().get("goodput")
    if missed is not None and allowed is not None and missed.value > allowed:
        limit = limit_words("goodput", allowed)
        yield f"goodput is {value_words('goodput', missed.value)}, and the SLO says {limit}"


def _measure(scenario: Scenario, wanted: LoadRequest, current: MeasuringSession) -> None:
    """Run each load point, save it and show it; what was measured before an interruption stays in the
    session."""
    unknown = Configuration(batching=None, known=False)
    view = current.view
    scenarios = scenario.of_models() or {"": scenario}
    target = _target(scenario, wanted, view)
    current.serve(target)
    scenario = current.found_on(scenario, target)
    configuration = asked_configuration(scenario, wanted) if is_launched(scenario, wanted) else unknown
    fleet, client_limit = current.load_generator(scenario)
    current.launch(scenario, target, configuration)
    if scenario.target.models:
        plans = together_and_alone(scenario, configuration)
    else:
        plans = list(asked_plans(scenario, wanted, target.in_force or unknown))
    place = f"point {{}} of {len(plans)}, " if len(plans) > 1 else ""
    bench = Bench(
        scenario,
        target,
        fleet,
        on_live=lambda plan, live: view.live(
            f"{place.format(plan.number)}{plan_load(plan, scenario)}: {live_line(live)}"
        ),
        guard=HostGuard(),
        client_max_rps=client_limit,
    )
    if leaves_duration_open(scenario) and not scenario.target.models:
        plans = _paced(bench, plans, scenario, view)
    for finished in repeated_points(bench, plans, scenario=scenario, view=view):
        _keep(current, finished)
        for part in parts_of([finished.trial]):
            own = scenarios.get(part.model, scenario)
            view.event(trial_line(part, head=_load_of(part), scenario=own))
        if was_interrupted(finished.trial):
            raise KeyboardInterrupt


def together_and_alone(scenario: Scenario, configuration: Configuration) -> list[Plan]:
    """Return the plans for several models: one trial under the load of all, then one for each model alone."""
    names = [own.name for own in scenario.target.models]
    loads: list[tuple[str, ...]] = [(), *((name,) for name in (names if len(names) > 1 else []))]
    plans: list[Plan] = []
    for models in loads:
        request = TrialRequest(
            configuration=configuration,
            source="load",
            reason="alone" if models else "together",
            models=models,
        )
        number = len(names) + len(plans) if plans else 1
        plans.append(Plan(number=number, seed=scenario.load.seed, request=request))
    return plans


def _paced(bench: Bench, plans: Sequence[Plan], scenario: Scenario, view: View) -> list[Plan]:
    """Return the plans with loads that last as long as a server of this speed needs, which a short load finds
    out first.

    The view shows the time they take where that is longer than usual.
    """
    configuration = plans[0].request.configuration
    clients = max((plan.request.concurrency or 0 for plan in plans), default=0)
    view.event("a short load first, which shows how long the others must last")
    pace = probed_pace(bench, scenario, configuration, clients=clients or None)
    paced = [replace(plan, pace=pace) for plan in plans]
    times = [
        times_of(
            pace, scenario, configuration, clients=plan.request.concurrency, rate_rps=plan.request.rate_rps
        )
        for plan in paced
    ]
    if max(point_times.duration_s for point_times in times) > scenario.load.duration_s:
        speed = speed_text(configuration, pace, batch_s=max(point_times.batch_s for point_times in times))
        all_s = rounded_duration(sum(point_times.run_s for point_times in times))
        view.event(f"{speed}: {counted(len(plans), 'point')} in about {all_s}")
    return paced


def repeated_points(
    bench: Bench, plans: Sequence[Plan], *, scenario: Scenario, view: View
) -> Iterator[FinishedTrial]:
    """Run the plans, and yield the last run of each; a run that the host disturbed is repeated, within
    limits."""
    repeats_left = max(REPEATS_MAX, int(REPEATS_SHARE * len(plans)))
    for plan in plans:
        finished = without_empty_verdict(bench.run(plan), scenario)
        for _ in range(min(REPEATS_MAX, repeats_left)):
            if was_interrupted(finished.trial) or "host" not in map(spoilt_by, parts_of([finished.trial])):
                break
            view.event("the host was noisy: measuring again")
            repeats_left -= 1
            finished = without_empty_verdict(bench.run(plan), scenario)
        yield finished


def without_empty_verdict(finished: FinishedTrial, scenario: Scenario) -> FinishedTrial:
    """Return the trial without its verdict of PASS, FAIL or UNSURE where the scenario has no limits.

    That the load generator or the host spoilt the run stays.
    """
    scenarios, trial = scenario.of_models(), _unjudged(finished.trial, scenario)
    parts = {name: _unjudged(part, scenarios[name]) for name, part in trial.parts.items()}
    return replace(finished, trial=replace(trial, parts=parts))


def _unjudged(trial: Trial, scenario: Scenario) -> Trial:
    measured = trial.measurement
    if measured is None or scenario.slo.promises:
        return trial
    if measured.verdict in ("PASS", "FAIL", "UNSURE"):
        measured = replace(measured, verdict=None, verdict_reason=as_text(""))
    return replace(trial, measurement=replace(measured, decision=None))


def _keep(current: MeasuringSession, finished: FinishedTrial) -> None:
    """Save a point in the run; where that fails, print a note once and go on without saving."""
    try:
        current.keep([finished], shown=False)
    except ArchiveError as error:
        print(f"note: {error.message}; nothing is saved from here on", file=sys.stderr)
        current.run = current.results = None
        current.trials.append(finished.trial)


def _target(scenario: Scenario, wanted: LoadRequest, view: View) -> LaunchedTarget | ExternalTarget:
    """Return the target to load: a server to launch, or the running one that command line or scenario name."""
    if is_launched(scenario, wanted):
        clients = 0 if wanted.concurrency is None else max(client_counts(wanted.concurrency))
        clients += sum(own.load.concurrency or 0 for own in scenario.of_models().values())
        asked = scenario
        is_given = wanted.settings or scenario.fixed or wanted.no_batching
        if scenario.target.kind == "http" and scenario.target.attached and not is_given:
            scenario = scenario.with_target(set=None)  # it keeps the parameters that it has
        target = target_of(scenario, on_event=view.event, clients_most=clients, several_models=True)
        view.event(beginning(asked))
        own = scenario.target
        return _noted(target) if own.kind == "http" and own.launch is None and own.set is None else target
    return _noted(external_target(scenario, rest_url=wanted.rest_url, grpc_url=wanted.grpc_url))


def _noted(target: LaunchedTarget | ExternalTarget) -> LaunchedTarget | ExternalTarget:
    """Return the running server that is to be loaded as it is; prints a note where a sweep changes it, or did and was
    killed."""
    if words := foreign_parameters(target.endpoint.rest_url, target.endpoint.model_name):
        print(f"note: {words}", file=sys.stderr)
    return target


def _load_of(point: Trial) -> str | None:
    """Return how a point's load differs from the scenario's own, such as `8 clients`; None where it does not.

    With several models, the name of the point's model, with ` alone` behind it where only that one was
    loaded.
    """
    if point.model:
        return f"{point.model} alone" if point.request.models else point.model
    is_own = point.rate_rps is None and point.concurrency is None
    return None if is_own else load_text(point.concurrency, point.rate_rps)
