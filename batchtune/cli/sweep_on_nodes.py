"""Runs a sweep on several nodes of a Ray cluster at once, each with a server of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.archive.run import Run
from batchtune.cli.attached import fitted
from batchtune.cli.kept_sweep import Ended, ended_early, held, keep_trials, watcher_of
from batchtune.load.live import LiveAggregate
from batchtune.report.live import sweep_view
from batchtune.scenario.placement import placed_as
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import Plan
from batchtune.tune.sweep.ray_nodes import RayNodes, ServerNodes
from batchtune.tune.sweep.sweep import sweep_nodes

if TYPE_CHECKING:
    from batchtune.tune.trials.trial import Trial


def sweep_on_nodes(
    scenario: Scenario, run: Run | None, trials: list[Trial], *, results: Path, quiet: bool
) -> Ended:
    """Search on as many servers as `search.parallel` says; `trials` are those of an interrupted run, and grow.

    Raises:
        UsageError: Ray is missing, no cluster, or no room in it.
        TargetError, MeasurementInvalidError: no trial worked.
    """
    with (
        sweep_view(quiet=quiet, scenario=scenario) as view,
        RayNodes(scenario, on_event=view.event) as nodes,
        ended_early(trials) as early,
    ):
        scenario = placed_as(scenario, nodes.scenario)
        if (batching := nodes.scenario.target.found) is not None:
            view.event(f"{scenario.target.model} has {batching.words()}")
            scenario = fitted(scenario, batching)
        run = held(run, scenario, results)
        view.event(f"results go to {run.path}")

        def with_report(report: Callable[[Plan, LiveAggregate | None], None]) -> ServerNodes:
            nodes.report = report
            return nodes

        finished_trials = sweep_nodes(
            scenario, with_report, finished=tuple(trials), watcher=watcher_of(run, trials, view)
        )
        keep_trials(finished_trials, run, trials, view)
    return Ended(run=run, scenario=scenario, fault=early.fault, restored=True)
