"""`batchtune sweep`: launch, load, search, archive each trial as it ends, recommend from what there is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.archive import Run, create_run, open_run
from batchtune.cli.recommend import conclude
from batchtune.errors import BatchtuneError
from batchtune.load.fleet import LoadFleet
from batchtune.report.live import View, sweep_view
from batchtune.scenario.reader import format_scenario, read_scenario
from batchtune.scenario.spec import Scenario
from batchtune.target.tfserving import TfServingTarget
from batchtune.tune.sweep import reference_configurations, sweep

if TYPE_CHECKING:
    from batchtune.tune.trial import Trial


def run_sweep(
    path: Path, overrides: list[str], *, results: Path, resume: Path | None, json: bool, quiet: bool
) -> int:
    """The exit code: 0, 3 when nothing meets the SLO, 130 when interrupted; everything measured is kept."""
    scenario = read_scenario(path, overrides=overrides)
    run = open_run(resume, root=results) if resume else _new_run(scenario, results)
    trials = run.trials()
    interrupted = False
    with sweep_view(quiet=quiet) as view:
        view.event(f"results go to {run.path}")
        try:
            _search(scenario, run, trials, view)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        print(f"interrupted; {len(trials)} trials are kept in {run.path}", file=sys.stderr)
    try:
        conclude(run, scenario, trials, json=json)
    except BatchtuneError as error:
        if not interrupted:
            raise
        print(f"no recommendation: {error.message}", file=sys.stderr)
    return 130 if interrupted else 0


def _search(scenario: Scenario, run: Run, trials: list[Trial], view: View) -> None:
    target = TfServingTarget(scenario.target, on_event=view.event)
    with target, LoadFleet(processes=scenario.load.processes) as fleet:
        view.event(f"launching the server for {scenario.target.model}")
        target.apply(reference_configurations(scenario)["no_batching"])
        for finished in sweep(scenario, target, fleet, finished=tuple(trials), on_progress=view.progress):
            run.append(finished.trial, finished.samples)
            trials.append(finished.trial)
            view.trial(finished.trial)


def _new_run(scenario: Scenario, results: Path) -> Run:
    return create_run(scenario, format_scenario(scenario), root=results)
