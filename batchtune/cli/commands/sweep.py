"""`batchtune sweep`: launch, load, search, archive each trial as it ends, recommend from what there is."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.archive.run import SCENARIO, SERVER_LOG, Run, open_run, write_original, write_whole
from batchtune.cli.arguments.kept_run import kept_trials
from batchtune.cli.attached import as_found, beginning, not_put_back, put_back, with_found, with_present
from batchtune.cli.commands.recommend import conclude, conclude_of_several
from batchtune.cli.commands.report import report_at_end
from batchtune.cli.kept_sweep import (
    Ended,
    ended_early,
    exit_code_of,
    held,
    keep_trials,
    require_same,
    sweep_on_nodes,
    watcher_of,
)
from batchtune.errors import BatchtuneError, TargetError, UsageError
from batchtune.load.cluster.ray_hosts import AnyFleet, client_max_rps, fleet_of
from batchtune.measure.validity.host import HostGuard
from batchtune.report.live import View, sweep_view
from batchtune.scenario.placement import placed, placed_as
from batchtune.scenario.reader import ScenarioText, format_scenario, lists_models, read_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.target import can_be_off, unsayable
from batchtune.scenario.units import counted
from batchtune.target.choice import LaunchedTarget, target_of
from batchtune.target.command import CommandTarget
from batchtune.target.triton.repository import OriginalModel
from batchtune.target.triton.target import TritonTarget
from batchtune.tune.joint.space import JointSpace
from batchtune.tune.search.contenders import one_by_one
from batchtune.tune.sweep.sweep import sweep

if TYPE_CHECKING:
    from batchtune.tune.trials.trial import Trial


def run_sweep(
    path: Path | ScenarioText,
    overrides: list[str],
    *,
    results: Path,
    resume: Path | None,
    optuna_storage: str | None = None,
    why: bool = False,
    json: bool,
    quiet: bool,
    of_one: Sequence[str] = (),
) -> int:
    """The exit code: 0 established, 5 not, 3 when nothing meets the SLO, 130 when interrupted; all trials are kept.

    A sweep that ends by an error after some trials recommends from these and ends with the error's code.

    `optuna_storage`: a storage's URL to which the trials are exported as a study, when the sweep has ended; refused
    with UsageError before anything is measured. `of_one` are options that were given and mean one model.
    """
    if of_one and lists_models(path):
        hints = {"--rate": "write rate at each of target.models"}
        raise UsageError(f"{of_one[0]}: not of several models", hint=hints.get(of_one[0], "leave it out"))
    scenario = read_scenario(path, overrides=overrides)
    if scenario.target.models:
        _require_joint_search(scenario)
    if optuna_storage is not None:
        _check_storage(optuna_storage)
    for own in [*scenario.of_models().values()] or [scenario]:
        own.require_rows_fit()
    run = None
    if resume is not None:
        run, scenario = _resumed(resume, scenario)
    trials = kept_trials(run) if run else []
    on_nodes = scenario.search.parallel.servers > 1
    searched = sweep_on_nodes if on_nodes else _sweep_here
    ended = searched(scenario, run, trials, results=results, quiet=quiet)
    if optuna_storage is not None and trials:
        _export(trials, ended.scenario, optuna_storage)
    code = _concluded(ended, trials, why=why, json=json)
    if isinstance(path, ScenarioText) and ended.run is not None:
        kept = ended.run.path / SCENARIO
        print(f"the scenario that ran: {kept} (copy it, and go on from there)", file=sys.stderr)
    return code


def _sweep_here(
    scenario: Scenario, run: Run | None, trials: list[Trial], *, results: Path, quiet: bool
) -> Ended:
    """Search on one server, launched or attached to from this machine; `trials` are those of before, and grow."""
    placement, original = "", None
    if run is None:
        scenario, placement = placed(scenario)
    else:
        original = not_put_back(run)

    def keep(before: OriginalModel) -> None:
        nonlocal run
        run = held(run, scenario, results)
        write_original(run.path, before)

    with (
        sweep_view(quiet=quiet, scenario=scenario) as view,
        target_of(scenario, on_event=view.event, original=original, several_models=True) as target,
    ):
        try:
            with ended_early(trials) as early:
                names = list(scenario.of_models()) or [""]
                workers = {name: fleet_of(scenario.load, on_event=view.event) for name in names}
                for note in filter(
                    None, (placement, beginning(scenario), _left_out(scenario), *_traps(scenario))
                ):
                    view.event(note)
                if isinstance(target, TritonTarget):
                    scenario = as_found(scenario, target, view, keep)
                    if run is not None and not trials:
                        write_whole(run.path / SCENARIO, format_scenario(scenario).encode())
                    run = held(run, scenario, results)
                    target.keep_original(partial(write_original, run.path))
                elif isinstance(target, CommandTarget) and scenario.target.attached:
                    run = held(run, scenario, results)
                    scenario = with_present(scenario, target, view, partial(write_original, run.path))
                    if not trials:
                        write_whole(run.path / SCENARIO, format_scenario(scenario).encode())
                elif scenario.target.restore is not None:
                    run = held(run, scenario, results)
                target.apply(JointSpace(scenario).first() if scenario.target.models else one_by_one(scenario))
                run = held(run, scenario, results)
                target.keep_log(run.path / SERVER_LOG)
                view.event(f"results go to {run.path}")
                with ExitStack() as stack:
                    for fleet in workers.values():
                        stack.enter_context(fleet)
                    _search(scenario, target, workers, run, trials, view)
        finally:
            is_as_it_was = run is None or put_back(target, run)
    return Ended(run=run, scenario=scenario, fault=early.fault, restored=is_as_it_was)


def _require_joint_search(scenario: Scenario) -> None:
    """What a search for several models cannot do.

    Raises:
        UsageError: it is asked for.
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


def _left_out(scenario: Scenario) -> str:
    return "" if can_be_off(scenario.target) else f"no batching is left out: {unsayable(scenario.target)}"


def _traps(scenario: Scenario) -> list[str]:
    tried = {name: space.values for name, space in scenario.search.space.items()}
    return scenario.target.traps_of({**{name: (value,) for name, value in scenario.fixed.items()}, **tried})


def _concluded(ended: Ended, trials: list[Trial], *, why: bool, json: bool) -> int:
    """Recommend from what there is; the exit code is that of the fault which ended the sweep, if one did.

    That a server which is not ours could not be put back was told, and counts more than the rest.
    """
    run, fault = ended.run, ended.fault
    if run is None:
        print("interrupted before the first trial", file=sys.stderr)
        return 130
    kept = f"{counted(len(trials), 'trial')} saved in {run.path}"
    if isinstance(fault, BatchtuneError):
        print(f"error: {fault.message}", file=sys.stderr)
        print(f"hint: {kept}; `batchtune recommend {run.path}` reads them again", file=sys.stderr)
    elif fault is not None:
        print(f"interrupted; {kept}; --resume {run.path} goes on", file=sys.stderr)
    code = 0
    try:
        if ended.scenario.target.models:
            code = conclude_of_several(run, ended.scenario, trials, json=json, swept=True)
        else:
            code = conclude(run, ended.scenario, trials, json=json, why=why, swept=True)
    except BatchtuneError as error:
        if fault is None and ended.restored:
            raise
        print(f"no recommendation: {error.message}", file=sys.stderr)
    finally:
        if trials:
            report_at_end(run)
    if not ended.restored:
        return TargetError.exit_code
    if fault is None:
        return code
    return exit_code_of(fault)


def _search(
    scenario: Scenario,
    target: LaunchedTarget,
    fleets: Mapping[str, AnyFleet],
    run: Run,
    trials: list[Trial],
    view: View,
) -> None:
    only = fleets.get("")
    finished_trials = sweep(
        scenario,
        target,
        only or fleets,
        finished=tuple(trials),
        watcher=watcher_of(run, trials, view),
        guard=HostGuard(),
        client_max_rps=None
        if only is None
        else lambda requests: client_max_rps(only, requests, server_cpus=scenario.target.cpus),
    )
    keep_trials(finished_trials, run, trials, view)


def _check_storage(url: str) -> None:
    """A mistake is to be told before the sweep, not after it."""
    from batchtune.tune.sweep.optuna_export import opened_storage

    with opened_storage(url):
        pass


def _export(trials: list[Trial], scenario: Scenario, url: str) -> None:
    """A storage that cannot be written to is told, and costs no recommendation."""
    from batchtune.tune.sweep.optuna_export import export_study

    try:
        name = export_study(trials, scenario, url)
    except BatchtuneError as error:
        print(f"no study exported: {error.message}", file=sys.stderr)
    else:
        print(f"study {name!r} is in {url}", file=sys.stderr)


def _resumed(path: Path, scenario: Scenario) -> tuple[Run, Scenario]:
    """The run to go on with, and the scenario on the CPUs that it had.

    Only its budget may differ from what is asked now, and the machine must be the same.
    """
    run = open_run(path)
    run.hold()
    if any(trial.source in ("load", "variant") for trial in run.ledger()):
        raise UsageError(
            f"{path} is no sweep: it cannot be gone on with", hint="start a new run without --resume"
        )
    before = run.scenario()
    scenario = placed_as(scenario, before)
    scenario = with_found(scenario, before.target.found)
    if before.target.present:
        spec = scenario.target.model_copy(update={"present": before.target.present})
        scenario = scenario.model_copy(update={"target": spec})
    require_same(run, scenario, before)
    return run, scenario
