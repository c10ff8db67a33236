"""`batchtune sweep` of several models that share a server, and `recommend` on its run."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.archive.joint import deployable, files_beside, write_files, write_joint
from batchtune.archive.run import SERVER_LOG, Run, open_run
from batchtune.cli.arguments.kept_run import asked_run, kept_trials
from batchtune.cli.commands.report import report_at_end
from batchtune.cli.deployment import joint_deployment
from batchtune.cli.session import MeasuringSession, beginning, require_same, session
from batchtune.errors import (
    ArchiveError,
    BatchingParametersError,
    BatchtuneError,
    InconclusiveError,
    UsageError,
)
from batchtune.load.fleet import LoadFleet
from batchtune.report.live_view import live_line
from batchtune.report.several_models import load_line, print_joint
from batchtune.scenario.placement import placed, placed_as
from batchtune.scenario.reader import ScenarioText, read_scenario, unchecked_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.launch.container import demand_of
from batchtune.target.tfserving import TfServingTarget
from batchtune.tune.joint.answer import recommend_joint
from batchtune.tune.joint.bench import JointBench
from batchtune.tune.joint.search import joint_sweep
from batchtune.tune.joint.space import JointSpace, loads_of, next_load
from batchtune.units import percentage

if TYPE_CHECKING:
    from batchtune.tune.joint.space import JointAsk
    from batchtune.tune.trials.trial import Trial


def several_models(source: Path | ScenarioText) -> bool:
    """Whether the scenario lists models that share a server."""
    target = unchecked_scenario(source).get("target")
    return isinstance(target, dict) and bool(target.get("models"))


def swept_together(path: Path | None, *, results: Path) -> bool:
    """Whether a run is a sweep of several models."""
    run = open_run(path, root=results)
    return any(trial.company is not None and trial.source != "variant" for trial in run.ledger())


def run_joint_sweep(
    path: Path | ScenarioText,
    overrides: list[str],
    *,
    results: Path,
    resume: Path | None,
    json: bool,
    quiet: bool,
    idle: Sequence[str] = (),
) -> int:
    """The exit code: 0 established, 5 not, 3 when the models never all kept their SLOs, 130 when interrupted.

    `idle` are options that were given and have no meaning here.
    """
    if idle:
        hints = {"--rate": "write rate at each of target.models"}
        raise UsageError(f"{idle[0]}: not of several models", hint=hints.get(idle[0], "leave it out"))
    scenario = read_scenario(path, overrides=overrides)
    _refuse(scenario)
    run, trials = None, []
    if resume is None:
        scenario, placement = placed(scenario)
    else:
        run, scenario, placement = *_resumed(resume, scenario), ""
        trials = kept_trials(run)
    with session(scenario, results=results, quiet=quiet, run=run, trials=trials) as current:
        for note in filter(None, (placement, beginning(scenario))):
            current.view.event(note)
        run = current.begin(scenario)
        _search(current)
    if run is None:
        return current.exit_code(0)
    try:
        return _concluded(current, run, json=json)
    finally:
        if current.trials:
            report_at_end(run, quiet=quiet)


def run_joint_recommend(
    path: Path | None, *, results: Path, json: bool, write: Path | None = None, idle: Sequence[str] = ()
) -> int:
    """The exit code: 0 established, 5 not; `idle` are options that were given and have no meaning here.

    The server's parameters go to the file `write`, the models' own and their list beside it.
    """
    if idle:
        hint = "leave it out: the files are TensorFlow Serving's, and each model has its SLO in the scenario"
        hint = "leave it out: the statement is the whole of it" if idle[0] == "--why" else hint
        raise UsageError(f"{idle[0]}: not of a sweep of several models", hint=hint)
    if write is not None and write.exists() and not write.is_file():
        raise UsageError(
            f"--write: {write} is no file, and several are written", hint="name one: the others go beside it"
        )
    run = asked_run(path, results=results)
    return _conclude(run, run.scenario(), kept_trials(run), json=json, keep=False, write=write)


def _refuse(scenario: Scenario) -> None:
    """What a joint search cannot do."""
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
    if JointSpace(scenario).size < 2:
        raise UsageError(
            "search.space: no parameter has two values to try", hint="add space: {max_batch_size: [1, 4, 16]}"
        )
    for own in scenario.target.models:
        if not (own.slo or scenario.slo).limits():
            raise UsageError(
                f"target.models: {own.name} has no latency limit, by which several models are compared",
                hint="add slo: {p95: 50ms} to it",
            )
    for own_scenario in scenario.of_models().values():
        own_scenario.require_rows_fit()


def _search(current: MeasuringSession) -> None:
    scenario, view, trials = current.scenario, current.view, current.trials
    with ExitStack() as stack:
        server = stack.enter_context(
            TfServingTarget(scenario.target, on_event=view.event, demand=demand_of(scenario))
        )
        if current.run is not None:
            server.keep_log(current.run.path / SERVER_LOG)
        fleets = {
            own.name: stack.enter_context(
                LoadFleet(processes=scenario.load.processes, cpus=scenario.load.cpus)
            )
            for own in scenario.target.models
        }
        head = ""

        def on_ask(ask: JointAsk, spent: float) -> None:
            nonlocal head
            head = f"{percentage(min(spent, 1.0))} of the budget, {ask.in_words()}"

        bench = JointBench(
            scenario,
            server,
            fleets,
            on_live=lambda name, live: view.live(f"{head}: {name}: {live_line(live)}"),
        )
        space = JointSpace(scenario)
        with suppress(BatchingParametersError):  # then the first load launches it
            server.apply(space.configuration(space.middle()))  # before the budget begins
        finished_loads = joint_sweep(
            scenario,
            lambda ask, number, first_trial: bench.run(ask, number=number, first_trial=first_trial),
            earlier=loads_of(trials, scenario.of_models()),
            first_load=next_load(trials),
            first_trial=1 + max((trial.number for trial in trials), default=0),
            on_ask=on_ask,
        )
        for finished in finished_loads:
            current.keep(finished.trials, shown=False)
            view.event(load_line(finished.load))


def _concluded(current: MeasuringSession, run: Run, *, json: bool) -> int:
    """Recommend from what there is; the exit code."""
    code = 0
    try:
        code = _conclude(run, current.scenario, current.trials, json=json, keep=True)
    except BatchtuneError as error:
        if current.fault is None:
            raise
        print(f"no recommendation: {error.message}", file=sys.stderr)
    return current.exit_code(code)


def _conclude(
    run: Run,
    scenario: Scenario,
    trials: Sequence[Trial],
    *,
    json: bool,
    keep: bool,
    write: Path | None = None,
) -> int:
    try:
        chosen = recommend_joint(loads_of(trials, scenario.of_models()), scenario)
    except BatchtuneError as error:
        if json:
            print(json_text.dumps({"run": str(run.path), "error": error.message, "hint": error.hint}))
        raise
    if keep:
        write_joint(run, chosen, scenario)
    files = deployable(run, chosen.configuration, scenario)
    if write is not None:
        files = files_beside(write, [own.name for own in scenario.target.models])
        try:
            write_files(files, chosen.configuration, scenario)
        except ArchiveError as error:
            raise UsageError(f"--write: {error.message}") from error
    if json:
        print(json_text.dumps({"run": str(run.path), **chosen.to_dict()}, indent=2, allow_nan=False))
    else:
        print_joint(chosen, deployment=joint_deployment(chosen.configuration, scenario, files))
    return 0 if chosen.established else InconclusiveError.exit_code


def _resumed(path: Path, scenario: Scenario) -> tuple[Run, Scenario]:
    """The run to go on with, and the scenario on the CPUs that it had; see require_same."""
    run = open_run(path)
    before = run.scenario()
    scenario = placed_as(scenario, before)
    require_same(run, scenario, before)
    run.hold()
    return run, scenario
