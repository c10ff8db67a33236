"""Where does a sweep go as it is made: its trials, what it says of itself, what ended it, and who watches?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.archive.run import SCENARIO, Run, create_run
from batchtune.cli.attached import fitted
from batchtune.errors import (
    ArchiveError,
    BatchtuneError,
    MeasurementInvalidError,
    TargetError,
    UsageError,
)
from batchtune.load.live import LiveAggregate
from batchtune.provenance import collect, comparable
from batchtune.report.live import View, sweep_view
from batchtune.scenario.placement import placed_as
from batchtune.scenario.reader import format_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import Plan
from batchtune.tune.sweep.ray_nodes import RayNodes, ServerNodes
from batchtune.tune.sweep.sweep import Watcher, sweep_nodes

if TYPE_CHECKING:
    from batchtune.tune.trials.search_summary import SearchSummary
    from batchtune.tune.trials.trial import FinishedTrial, Trial


Fault = BatchtuneError | KeyboardInterrupt


@dataclass(slots=True)
class Early:
    """What ended a sweep before its time, None: nothing; its trials are kept all the same."""

    fault: Fault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a sweep ended: the run (None: before there was one), the scenario as it ran, and what ended it early.

    `restored` False: a server that is not ours could not be put back, which was told.
    """

    run: Run | None
    scenario: Scenario
    fault: Fault | None
    restored: bool


@contextmanager
def ended_early(trials: Sequence[Trial]) -> Iterator[Early]:
    """Within it an interrupt, or an error after a trial that worked, ends the sweep and nothing more.

    Raises:
        TargetError, MeasurementInvalidError: none of `trials` worked.
    """
    early = Early()
    try:
        yield early
    except KeyboardInterrupt as interrupt:
        early.fault = interrupt
    except (TargetError, MeasurementInvalidError) as error:
        if not any(trial.state == "complete" for trial in trials):
            raise
        early.fault = error


def exit_code_of(fault: Fault) -> int:
    return fault.exit_code if isinstance(fault, BatchtuneError) else 130


def held(run: Run | None, scenario: Scenario, results: Path) -> Run:
    """The run, a new one unless there is one, measured for by this process alone."""
    run = run or create_run(scenario, format_scenario(scenario), root=results)
    run.hold()
    return run


def watcher_of(run: Run, trials: list[Trial], view: View) -> Watcher:
    """Who is told of a sweep: the view, and at its end the run, beside what it says of a sweep of before."""
    earlier = run.search() if trials else None

    def keep(summary: SearchSummary) -> None:
        keep_account(run, summary if earlier is None else summary.continuing(earlier))

    return Watcher(on_progress=view.progress, on_thinking=view.live, on_plan=view.event, on_summary=keep)


def keep_trials(
    finished_trials: Iterable[FinishedTrial], run: Run, trials: list[Trial], view: View | None = None
) -> None:
    """Each trial goes to the run, to the others and, where there is one, to the view, as it ends."""
    for finished in finished_trials:
        run.append(finished.trial, finished.samples)
        trials.append(finished.trial)
        if view is not None:
            view.trial(finished.trial)


def keep_account(run: Run, summary: SearchSummary) -> None:
    """What the search says of itself; that it cannot be kept costs no recommendation: the trials are what counts."""
    try:
        run.write_search(summary)
    except ArchiveError as error:
        print(f"note: {error.message}", file=sys.stderr)


def require_same(run: Run, scenario: Scenario, before: Scenario) -> None:
    """Only the budget may differ from what the run was asked before, and the machine must be the same.

    Raises:
        UsageError: something else differs.
    """
    asked, earlier = (side.model_dump(exclude={"search": {"budget"}}) for side in (scenario, before))
    differing = sorted(key for key in asked if asked[key] != earlier[key])
    if differing:
        raise UsageError(
            f"{run.path} was run with another scenario; it differs in: {', '.join(differing)}",
            hint=f"resume with {run.path / SCENARIO}, or start a new run without --resume",
        )
    elsewhere = comparable(collect(scenario.load.seed), run.provenance())
    if elsewhere:
        raise UsageError(
            f"{run.path} was run on another machine or system: {'; '.join(elsewhere)}",
            hint="figures of two machines do not mix: start a new run without --resume",
        )


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
