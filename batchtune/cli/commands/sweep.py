"""`batchtune sweep`: launch, load, search, archive each trial as it ends, recommend from what there is."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.archive.original import write_original
from batchtune.archive.run import SCENARIO, SERVER_LOG, Run, create_run, open_run
from batchtune.cli.attached import as_found, beginning, not_put_back, put_back, with_found
from batchtune.cli.commands.recommend import conclude, kept_trials
from batchtune.cli.commands.report import report_at_end
from batchtune.errors import ArchiveError, BatchtuneError, MeasurementInvalidError, TargetError, UsageError
from batchtune.load.cluster.choice import AnyFleet, client_max_rps, fleet_of
from batchtune.measure.validity.host import HostGuard
from batchtune.provenance import collect, comparable
from batchtune.report.live import View, sweep_view
from batchtune.scenario.placement import placed, placed_as
from batchtune.scenario.reader import ScenarioText, format_scenario, read_scenario
from batchtune.scenario.spec.batching_off import UNSAYABLE, can_be_off
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import counted
from batchtune.target.choice import LaunchedTarget, target_of
from batchtune.target.triton.target import TritonTarget
from batchtune.tune.strategies.references import one_by_one
from batchtune.tune.sweep.progress import Watcher
from batchtune.tune.sweep.sweep import sweep

if TYPE_CHECKING:
    from batchtune.tune.trials.search_summary import SearchSummary
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
) -> int:
    """The exit code: 0 established, 5 not, 3 when nothing meets the SLO, 130 when interrupted; all trials are kept.

    A sweep that ends by an error after some trials recommends from these and ends with the error's code.

    `optuna_storage`: a storage's URL to which the trials are exported as a study, when the sweep has ended; refused
    with UsageError before anything is measured.
    """
    scenario = read_scenario(path, overrides=overrides)
    if optuna_storage is not None:
        _check_storage(optuna_storage)
    scenario.require_rows_fit()
    run, placement, original = None, "", None
    if resume is None:
        scenario, placement = placed(scenario)
    else:
        run, scenario = _resumed(resume, scenario)
        original = not_put_back(run)
    trials = kept_trials(run) if run else []
    fault: BatchtuneError | KeyboardInterrupt | None = None
    with (
        sweep_view(quiet=quiet, scenario=scenario) as view,
        target_of(scenario, on_event=view.event, original=original) as target,
    ):
        try:
            workers = fleet_of(scenario.load, on_event=view.event)
            for note in filter(None, (placement, beginning(scenario), _left_out(scenario))):
                view.event(note)
            if isinstance(target, TritonTarget):
                scenario = as_found(scenario, target, view)
                run = _held(run, scenario, results)
                target.keep_original(partial(write_original, run.path))
            target.apply(one_by_one(scenario))
            run = _held(run, scenario, results)
            target.keep_log(run.path / SERVER_LOG)
            view.event(f"results go to {run.path}")
            with workers as fleet:
                _search(scenario, target, fleet, run, trials, view)
        except KeyboardInterrupt as interrupt:
            fault = interrupt
        except (TargetError, MeasurementInvalidError) as error:
            if not any(trial.state == "complete" for trial in trials):
                raise
            fault = error
        finally:
            is_as_it_was = run is None or put_back(target, run)
    if run is None:
        print("interrupted before the first trial", file=sys.stderr)
        return 130
    if optuna_storage is not None and trials:
        _export(trials, scenario, optuna_storage)
    code = _concluded(run, scenario, trials, fault=fault, restored=is_as_it_was, why=why, json=json)
    if isinstance(path, ScenarioText):
        print(
            f"the scenario that ran: {run.path / SCENARIO} (copy it, and go on from there)", file=sys.stderr
        )
    return code


def _left_out(scenario: Scenario) -> str:
    return "" if can_be_off(scenario.target) else f"no batching is left out: {UNSAYABLE}"


def _held(run: Run | None, scenario: Scenario, results: Path) -> Run:
    """The run, a new one unless there is one, measured for by this process alone."""
    run = run or create_run(scenario, format_scenario(scenario), root=results)
    run.hold()
    return run


def _concluded(
    run: Run,
    scenario: Scenario,
    trials: list[Trial],
    *,
    fault: BatchtuneError | KeyboardInterrupt | None,
    restored: bool,
    why: bool,
    json: bool,
) -> int:
    """Recommend from what there is; the exit code is that of the `fault` which ended the sweep, if one did.

    `restored` False: a server that is not ours could not be put back, which was told, and counts more than the rest.
    """
    kept = f"{counted(len(trials), 'trial')} kept in {run.path}"
    if isinstance(fault, BatchtuneError):
        print(f"error: {fault.message}", file=sys.stderr)
        print(f"hint: {kept}; `batchtune recommend {run.path}` reads them again", file=sys.stderr)
    elif fault is not None:
        print(f"interrupted; {kept}; --resume {run.path} goes on", file=sys.stderr)
    code = 0
    try:
        code = conclude(run, scenario, trials, json=json, why=why, swept=True)
    except BatchtuneError as error:
        if fault is None and restored:
            raise
        print(f"no recommendation: {error.message}", file=sys.stderr)
    finally:
        if trials:
            report_at_end(run)
    if not restored:
        return TargetError.exit_code
    if fault is None:
        return code
    return fault.exit_code if isinstance(fault, BatchtuneError) else 130


def _search(
    scenario: Scenario,
    target: LaunchedTarget,
    fleet: AnyFleet,
    run: Run,
    trials: list[Trial],
    view: View,
) -> None:
    earlier = run.search() if trials else None

    def keep(summary: SearchSummary) -> None:
        keep_account(run, summary if earlier is None else summary.continuing(earlier))

    finished_trials = sweep(
        scenario,
        target,
        fleet,
        finished=tuple(trials),
        watcher=Watcher(
            on_progress=view.progress, on_thinking=view.live, on_plan=view.event, on_summary=keep
        ),
        guard=HostGuard(),
        client_max_rps=lambda requests: client_max_rps(fleet, requests, server_cpus=scenario.target.cpus),
    )
    for finished in finished_trials:
        run.append(finished.trial, finished.samples)
        trials.append(finished.trial)
        view.trial(finished.trial)


def keep_account(run: Run, summary: SearchSummary) -> None:
    """What the search says of itself; that it cannot be kept costs no recommendation: the trials are what counts."""
    try:
        run.write_search(summary)
    except ArchiveError as error:
        print(f"note: {error.message}", file=sys.stderr)


def _check_storage(url: str) -> None:
    """A mistake is to be told before the sweep, not after it."""
    from batchtune.tune.sweep.optuna_export import opened_storage

    with opened_storage(url):
        pass


def _export(trials: list[Trial], scenario: Scenario, url: str) -> None:
    """A storage that cannot be written to is told, and costs no recommendation."""
    from batchtune.tune.sweep.optuna_export import export_study

    try:
        export = export_study(trials, scenario, url)
    except BatchtuneError as error:
        print(f"no study exported: {error.message}", file=sys.stderr)
    else:
        print(f"study {export.study_name!r} is in {url}", file=sys.stderr)


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
    asked, earlier = (side.model_dump(exclude={"search": {"budget"}}) for side in (scenario, before))
    differing = sorted(key for key in asked if asked[key] != earlier[key])
    if differing:
        raise UsageError(
            f"{path} was run with another scenario; it differs in: {', '.join(differing)}",
            hint=f"resume with {run.path / SCENARIO}, or start a new run without --resume",
        )
    elsewhere = comparable(collect(scenario.load.seed), run.provenance())
    if elsewhere:
        raise UsageError(
            f"{path} was run on another machine or system: {'; '.join(elsewhere)}",
            hint="figures of two machines do not mix: start a new run without --resume",
        )
    return run, scenario
