"""`batchtune sweep`: launch, load, search, archive each trial as it ends, recommend from what there is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.archive import Run, create_run, open_run
from batchtune.cli.recommend import conclude
from batchtune.errors import BatchtuneError, UsageError
from batchtune.load.calibration import calibrate
from batchtune.load.fleet import LoadFleet
from batchtune.measure.host import HostGuard
from batchtune.report.live import View, sweep_view
from batchtune.scenario.reader import format_scenario, read_scenario
from batchtune.scenario.spec import Scenario
from batchtune.target.tfserving import TfServingTarget, launched_target
from batchtune.tune.sweep import reference_configurations, sweep

if TYPE_CHECKING:
    from batchtune.tune.trial import Trial


def run_sweep(
    path: Path, overrides: list[str], *, results: Path, resume: Path | None, json: bool, quiet: bool
) -> int:
    """The exit code: 0, 3 when nothing meets the SLO, 130 when interrupted; everything measured is kept."""
    scenario = read_scenario(path, overrides=overrides)
    run = _resumed(resume, scenario) if resume else None
    trials = run.trials() if run else []
    interrupted = False
    with sweep_view(quiet=quiet) as view, launched_target(scenario, on_event=view.event) as target:
        try:
            view.event(f"launching the server for {scenario.target.model}")
            target.apply(reference_configurations(scenario)["no_batching"])
            run = run or create_run(scenario, format_scenario(scenario), root=results)
            view.event(f"results go to {run.path}")
            _search(scenario, target, run, trials, view)
        except KeyboardInterrupt:
            interrupted = True
    if run is None:
        return 130
    if interrupted:
        print(f"interrupted; {len(trials)} trials are kept in {run.path}", file=sys.stderr)
    try:
        conclude(run, scenario, trials, json=json)
    except BatchtuneError as error:
        if not interrupted:
            raise
        print(f"no recommendation: {error.message}", file=sys.stderr)
    return 130 if interrupted else 0


def _search(scenario: Scenario, target: TfServingTarget, run: Run, trials: list[Trial], view: View) -> None:
    with LoadFleet(processes=scenario.load.processes) as fleet:
        finished_trials = sweep(
            scenario,
            target,
            fleet,
            finished=tuple(trials),
            on_progress=view.progress,
            guard=HostGuard(),
            client_max_rps=lambda requests: calibrate(fleet, requests).client_max_rps,
        )
        for finished in finished_trials:
            run.append(finished.trial, finished.samples)
            trials.append(finished.trial)
            view.trial(finished.trial)


def _resumed(path: Path, scenario: Scenario) -> Run:
    """The run to go on with; only its budget may differ from what is asked now."""
    run = open_run(path)
    asked, earlier = (one.model_dump(exclude={"search": {"budget"}}) for one in (scenario, run.scenario()))
    differing = sorted(key for key in asked if asked[key] != earlier[key])
    if differing:
        raise UsageError(
            f"{path} was run with another scenario; it differs in: {', '.join(differing)}",
            hint="resume with the scenario of that run, or start a new run without --resume",
        )
    return run
