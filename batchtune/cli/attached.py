"""How does a command begin and end with a server that takes configurations from us, and is somebody else's?

With `batchtune restore`, for a run that was killed before it could put the server back.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.archive.run import Run, open_run, read_original, write_original
from batchtune.batching.triton_config import FoundBatching
from batchtune.errors import TargetError, UsageError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import LaunchedTarget
from batchtune.target.command import CommandTarget
from batchtune.target.command import restored as restored_by_command
from batchtune.target.tfserving import TfServingTarget
from batchtune.target.triton.repository import ModelRepository, OriginalModel
from batchtune.target.triton.target import TritonTarget, restored
from batchtune.twin.simulator.replica import TRITONS_AHEAD

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchtune.report.live import View

    Keep = Callable[[OriginalModel], None]

DIFFERENCES = (
    f"Triton never splits or pads a request; {TRITONS_AHEAD}, nor does it simulate preferred sizes, ordering or queue "
    "policies: the twin counts only as far as it predicts the trials"
)


def beginning(scenario: Scenario) -> str:
    """What is said while the server is launched or attached to."""
    target = scenario.target
    if target.kind == "http" and target.attached:
        return f"attaching to {target.url}"
    if target.kind == "command":
        return f"running the commands of target for {target.model}"
    if target.attached:
        return f"attaching to {target.model} at {target.rest_url}"
    return f"launching the server for {target.model}"


def as_found(scenario: Scenario, target: TritonTarget, view: View, keep: Keep | None = None) -> Scenario:
    """The scenario with what the model's configuration says of batching, which is told; `keep` as in `reached`.

    Raises:
        UsageError: requests that the model does not take as it is configured.
    """
    return fitted(scenario, reached(target, view, keep))


def with_present(scenario: Scenario, target: CommandTarget, view: View, keep: Keep) -> Scenario:
    """The scenario with what an attached server of kind http has now, which is told; `keep` as in `reached`."""
    present = target.attach(keep)
    if not present:
        return scenario
    view.event(
        f"{scenario.target.model} has {', '.join(f'{name} {value}' for name, value in present.items())}"
    )
    spec = scenario.target.model_copy(update={"present": present})
    return scenario.model_copy(update={"target": spec})


def reached(target: TritonTarget, view: View, keep: Keep | None = None) -> FoundBatching:
    """What the model's configuration says of batching, which is told, with what sets such a server apart.

    `keep` is told before a model that is not served is loaded to learn that.
    """
    batching = target.start(before_load=keep)
    view.event(f"{target.endpoint.model_name} has {batching.words()}")
    view.event(DIFFERENCES)
    for name in ModelRepository(target.endpoint).ensembles():
        view.event(
            f"{name} is an ensemble that asks it: Triton serves that only while max_batch_size is not below its own"
        )
    return batching


def fitted(scenario: Scenario, batching: FoundBatching) -> Scenario:
    """The scenario with what was found, unless it says that already.

    Raises:
        UsageError: requests that the model does not take as it is configured.
    """
    rows = scenario.request.rows_most
    if rows > batching.max_batch_size:
        raise UsageError(
            f"request.rows: the model takes at most {batching.max_batch_size} rows in a request "
            f"(its max_batch_size); the scenario sends {rows}",
            hint="send fewer rows, or raise max_batch_size in the model's configuration first",
        )
    return scenario if scenario.target.found is not None else with_found(scenario, batching)


def with_found(scenario: Scenario, batching: FoundBatching | None) -> Scenario:
    """The scenario, with this as what was found."""
    if batching == scenario.target.found:
        return scenario
    return scenario.model_copy(update={"target": scenario.target.model_copy(update={"found": batching})})


def put_back(target: LaunchedTarget, run: Run) -> bool:
    """Restore an attached server; where that fails, say so with the command that tries again, and return False."""
    if isinstance(target, TfServingTarget):
        return True
    try:
        target.restore()
    except TargetError as error:
        print(f"error: {error.message}", file=sys.stderr)
        print(f"hint: `batchtune restore {run.path}` tries again", file=sys.stderr)
        return False
    return True


def not_put_back(run: Run) -> OriginalModel | None:
    """What the run found on a server that it attached to and could not restore; None: nothing is to be restored."""
    original = read_original(run)
    return None if original is None or original.restored or not original.attached else original


def run_restore(path: Path) -> int:
    """Put back the server of a run that was killed; the exit code, 0.

    Raises:
        ArchiveError: there is no such run, or a process measures for it.
        UsageError: the run attached to no server.
        TargetError: the server is gone, or does not take it.
    """
    run = open_run(path)
    target = run.scenario().target
    if target.kind == "command" and target.restore is not None:
        run.hold()
        restored_by_command(target)
        print("target.restore has put back what was there", file=sys.stderr)
        return 0
    original = read_original(run)
    if original is None or not original.attached:
        raise UsageError(
            f"{run.path} attached to no server: there is nothing to put back",
            hint="only a sweep or comparison of kind triton with target.rest_url, of kind http without launch, or of "
            "kind command with target.restore, changes a server that is not its own",
        )
    run.hold()
    if original.restored:
        print(f"{original.model} was put back already: nothing is to be done", file=sys.stderr)
        return 0
    if target.kind == "http":
        with CommandTarget(target, original=original) as running:
            running.attach(partial(write_original, run.path))
    else:
        write_original(run.path, restored(original, target))
    print(f"{original.model} at {original.rest_url} is as it was: {original.words()}", file=sys.stderr)
    return 0
