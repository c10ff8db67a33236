"""`batchtune sweep`: launch, load, search, archive each trial as it ends, recommend from what there is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.archive.run import SCENARIO, Run, open_run
from batchtune.cli.arguments.options import LoadRequest, refuse
from batchtune.cli.arguments.overrides import asked_scenario
from batchtune.cli.commands.report import report_at_end
from batchtune.cli.commands.run_recommend import conclude
from batchtune.cli.session import (
    MeasuringSession,
    beginning,
    fitted,
    kept_trials,
    not_put_back,
    require_same,
    session,
)
from batchtune.errors import BatchtuneError, UsageError, WrongAnswerError
from batchtune.load.fleet import LiveAggregate
from batchtune.measure.caveats import HostGuard
from batchtune.report.findings import labels
from batchtune.scenario.reader import ScenarioText, lines_named, lists_models
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.target import can_be_off, unsayable
from batchtune.system import remove_abandoned
from batchtune.target.choice import placed, placed_as, target_of
from batchtune.tune.bench import Plan
from batchtune.tune.search.contenders import first_configuration, last_configuration
from batchtune.tune.sweep.ray_nodes import ServerNodes, nodes_on_ray
from batchtune.tune.sweep.sweep import sweep, sweep_nodes

if TYPE_CHECKING:
    from batchtune.tune.trials.trial import Trial


def run_sweep(
    wanted: LoadRequest, *, resume: Path | None = None, optuna_storage: str | None = None, why: bool = False
) -> int:
    """Run `batchtune sweep`. Returns the exit code: 0 where enough runs confirm the recommendation, 5 where they do not
    yet, 130 when interrupted.

    A sweep that an error ends after some complete trials recommends from these, and returns the error's code.
    `resume`: folder of the run to resume. `optuna_storage`: URL of a storage to which the trials are exported
    at the end.

    Raises:
        UsageError: options that do not fit the scenario, or a storage that cannot be opened; nothing was
            measured.
        TargetError, MeasurementInvalidError: before any trial was complete.
        NoFeasibleConfigurationError, InconclusiveError: nothing meets the SLO, or nothing is known to.
    """
    path = wanted.scenario
    if lists_models(path):
        hint = "write rate at each of target.models"
        refuse({"--rate": wanted.rate}, "not of several models", hint=hint)
        of_one = {"--concurrency": wanted.concurrency, "--optuna-storage": optuna_storage}
        refuse(of_one, "not of several models", hint="leave it out")
    scenario = asked_scenario(path, wanted.overrides, searched=True)
    if scenario.target.models:
        _require_search_of_several(scenario)
    if optuna_storage is not None:
        _check_storage(optuna_storage)
    for own in [*scenario.of_models().values()] or [scenario]:
        own.require_rows_fit()
    run, placement, trials = None, "", []
    on_nodes = scenario.search.parallel.servers > 1
    if resume is not None:
        run, scenario = _resumed(resume, scenario)
        trials = kept_trials(run)
    elif not on_nodes:
        scenario, placement = placed(scenario)
    with (
        lines_named(path, wanted.overrides),
        session(scenario, results=wanted.results, quiet=wanted.quiet, run=run, trials=trials) as current,
    ):
        current.view.event(labels("notes")["trials"])
        if on_nodes:
            _sweep_on_nodes(current)
        else:
            _sweep_here(current, placement)
    if optuna_storage is not None and current.trials:
        _export(current.trials, current.scenario, optuna_storage)
    code = _concluded(current, why=why, json=wanted.json)
    if isinstance(path, ScenarioText) and current.run is not None:
        kept = current.run.path / SCENARIO
        print(f"the scenario that ran: {kept} (copy it to change the sweep)", file=sys.stderr)
    return code


def _sweep_here(current: MeasuringSession, placement: str) -> None:
    """Search on one server, launched or attached to from this machine."""
    scenario, view = current.scenario, current.view
    original = None if current.run is None else not_put_back(current.run)
    target = target_of(scenario, on_event=view.event, original=original, several_models=True)
    current.serve(target)
    off = "" if can_be_off(scenario.target) else f"no batching is left out: {unsayable(scenario.target)}"
    notes = (placement, beginning(scenario), off, _beside_others(), _unset(scenario), *_traps(scenario))
    for note in filter(None, notes):
        view.event(note)
    scenario = current.found_on(scenario, target)
    fleet, client_limit = current.load_generator(scenario)
    current.launch(scenario, target, first_configuration(scenario), last_configuration(scenario))
    finished_trials = sweep(
        scenario,
        target,
        fleet,
        finished=tuple(current.trials),
        on_event=current.listener(),
        guard=HostGuard(),
        client_max_rps=client_limit,
    )
    current.keep(finished_trials)


def _sweep_on_nodes(current: MeasuringSession) -> None:
    """Search on as many servers as `search.parallel` says.

    Raises:
        UsageError: Ray is missing, no cluster, or no room in it.
    """
    view = current.view
    with nodes_on_ray(current.scenario, on_event=view.event) as nodes:
        scenario = placed_as(current.scenario, nodes.scenario)
        if (batching := nodes.scenario.target.found) is not None:
            view.event(f"{scenario.target.model} has {batching.words()}")
            scenario = fitted(scenario, batching)
        current.begin(scenario)

        def with_report(report: Callable[[Plan, LiveAggregate | None], None]) -> ServerNodes:
            nodes.report = report
            return nodes

        finished = tuple(current.trials)
        current.keep(sweep_nodes(scenario, with_report, finished=finished, on_event=current.listener()))


def _require_search_of_several(scenario: Scenario) -> None:
    """Check that a scenario of several models needs nothing that their search cannot do.

    Raises:
        UsageError: it does.
    """
    if scenario.objective == "throughput":
        raise UsageError(
            "objective: throughput: several models are searched in an open loop, each with its own rate",
            hint="set load.arrivals: poisson, a rate for each of target.models, and objective: capacity or latency",
        )
    if "strategy" in scenario.search.model_fields_set and scenario.search.strategy != "guided":
        raise UsageError(
            f"search.strategy: {scenario.search.strategy} searches one model; several have a search of their own",
            hint="leave it out",
        )
    if scenario.search.parallel.servers > 1:
        raise UsageError(
            "search.parallel: several models are searched on one server at a time", hint="leave it out"
        )
    if all(len(axis.values) < 2 for axis in scenario.axes.values()):
        raise UsageError(
            "search.space: no parameter has two values to try", hint="add space: {max_batch_size: [1, 4, 16]}"
        )
    for own in scenario.target.models:
        if not (own.slo or scenario.slo).limits():
            raise UsageError(
                f"target.models: {own.name} has no latency limit, by which several models are compared",
                hint="add slo: {p95: 50ms} to it",
            )


def _beside_others() -> str:
    """Return a sentence on other processes of batchtune that run on the same CPUs; "" without any."""
    others = sorted(remove_abandoned())
    if not others:
        return ""
    named = ", ".join(map(str, others))
    return f"another batchtune (process {named}) runs on these CPUs: each disturbs what the other measures"


def _unset(scenario: Scenario) -> str:
    """Return a sentence on the parameters that the server could be given and is not; "" without any."""
    names = scenario.unset_parameters
    if not names:
        return ""
    are, value = ("is", "value") if len(names) == 1 else ("are", "values")
    return f"target.set: {', '.join(names)} {are} neither searched nor fixed: the server uses its own {value}"


def _traps(scenario: Scenario) -> list[str]:
    """Return a sentence for each value of the scenario that makes its kind of server behave unexpectedly."""
    tried = {name: space.values for name, space in scenario.search.space.items()}
    return scenario.target.traps_of({**{name: (value,) for name, value in scenario.fixed.items()}, **tried})


def _concluded(current: MeasuringSession, *, why: bool, json: bool) -> int:
    """Print the recommendation from the trials so far, and write the page. Returns the command's exit code.

    Raises:
        BatchtuneError: there is no recommendation, though nothing ended the sweep early.
    """
    run, code = current.run, 0
    if run is None:
        return current.exit_code(code)
    try:
        code = conclude(run, current.scenario, current.trials, json=json, why=why, swept=True)
    except BatchtuneError as error:
        if current.fault is None and current.restored:
            raise
        if not isinstance(current.fault, WrongAnswerError):
            print(f"no recommendation: {error.message}", file=sys.stderr)
        if isinstance(current.fault, KeyboardInterrupt):  # else the answer says how to go on
            print(f"next: batchtune sweep {run.path / SCENARIO} --resume {run.path}", file=sys.stderr)
    finally:
        if current.trials:
            report_at_end(run)
    return current.exit_code(code)


def _check_storage(url: str) -> None:
    """Open and close the storage, so that a mistake in its URL is reported before the sweep.

    Raises:
        UsageError: it cannot be opened.
    """
    from batchtune.tune.sweep.optuna_export import opened_storage

    with opened_storage(url):
        pass


def _export(trials: list[Trial], scenario: Scenario, url: str) -> None:
    """Export the trials to an Optuna storage; where that fails, print a note: the recommendation does not
    depend on it."""
    from batchtune.tune.sweep.optuna_export import export_study

    try:
        name = export_study(trials, scenario, url)
    except BatchtuneError as error:
        print(f"no study exported: {error.message}", file=sys.stderr)
    else:
        print(f"study {name!r} is in {url}", file=sys.stderr)


def _resumed(path: Path, scenario: Scenario) -> tuple[Run, Scenario]:
    """Return (run, scenario) to go on with, the scenario with the CPUs and the batching that it had.

    Raises:
        ArchiveError: there is no such run, or a process measures for it.
        UsageError: it is no sweep, or more than the budget or the machine differs.
    """
    run = open_run(path)
    run.hold()
    if any(trial.source in ("load", "variant") for trial in run.ledger()):
        raise UsageError(
            f"{path} is not a sweep, so it cannot be resumed", hint="start a new run without --resume"
        )
    before = run.scenario()
    scenario = placed_as(scenario, before)
    present = before.target.present or scenario.target.present
    scenario = scenario.with_target(found=before.target.found, present=present)
    require_same(run, scenario, before)
    return run, scenario
