"""`batchtune load` of several models that share a server: all at once, then each alone, to see what company costs."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchtune.archive.run import SERVER_LOG, create_run
from batchtune.cli.arguments.load_request import LoadRequest, Question, asked_configuration, question_of
from batchtune.cli.commands.load import without_empty_verdict
from batchtune.cli.session import beginning
from batchtune.errors import (
    InconclusiveError,
    MeasurementInvalidError,
    NoFeasibleConfigurationError,
    TargetError,
    UsageError,
)
from batchtune.load.fleet import LoadFleet
from batchtune.measure.validity.host import HostGuard
from batchtune.plain_values import to_plain
from batchtune.report.live_view import live_line, sweep_view, trial_line
from batchtune.report.several_models import print_models
from batchtune.scenario.reader import format_scenario, unchecked_scenario
from batchtune.target.launch.container import demand_of
from batchtune.target.tfserving import ServedModel, TfServingTarget
from batchtune.tune.evidence.best_point import spoilt_by
from batchtune.tune.loader import REPEATS_MAX
from batchtune.tune.together import LoadedTogether, ModelLoad, load_together

if TYPE_CHECKING:
    from batchtune.archive.run import Run
    from batchtune.report.live_view import View
    from batchtune.target.telemetry import ServerActivity
    from batchtune.tune.trials.trial import Trial

_CODES = {
    "INVALID": MeasurementInvalidError.exit_code,
    "NOISY": MeasurementInvalidError.exit_code,
    "FAIL": NoFeasibleConfigurationError.exit_code,
    "UNSURE": InconclusiveError.exit_code,
}
"""By the gravest verdict first."""


@dataclass(slots=True, kw_only=True)
class _Measured:
    """What there is so far, by model; `run` keeps it, None: nowhere."""

    together: dict[str, Trial] = field(default_factory=dict)
    alone: dict[str, Trial] = field(default_factory=dict)
    server: ServerActivity | None = None
    run: Run | None = None
    guard: HostGuard = field(default_factory=HostGuard)


def asks_for_models(wanted: LoadRequest) -> bool:
    """Whether the scenario lists several models."""
    target = unchecked_scenario(wanted.scenario).get("target")
    return isinstance(target, dict) and bool(target.get("models"))


def run_load_of_models(
    wanted: LoadRequest,
    *,
    output: Literal["table", "json", "csv"],
    results: Path | None,
    quiet: bool,
    gates: Sequence[str] = (),
) -> int:
    """The exit code, by the verdicts of the models beside each other; what was measured is printed in any case.

    0; 3 when one misses its SLO, 5 when that is not sure of one, 6 when the client was the limit, 7 when a load failed,
    130 when interrupted.
    """
    _refuse(wanted, output=output, gates=gates)
    question = question_of(wanted)
    measured, interrupted = _Measured(), False
    with sweep_view(quiet=quiet) as view:
        for note in question.notes:
            view.event(note)
        try:
            _measure(question, wanted, measured, results=results, view=view)
        except KeyboardInterrupt:
            interrupted = True
    if output == "json":
        run = None if measured.run is None else str(measured.run.path)
        print(json_text.dumps({"run": run, **_document(measured)}, indent=2))
    else:
        print_models(measured.together, measured.alone, measured.server)
    if interrupted:
        print("interrupted", file=sys.stderr)
        return 130
    return _exit_code(measured)


def _document(measured: _Measured) -> dict[str, Any]:
    """For --json: `{"models": {NAME: {"together": trial, "alone": trial or null}}, "server": …}`."""
    alone = {name: trial.to_dict() for name, trial in measured.alone.items()}
    models = {
        name: {"together": trial.to_dict(), "alone": alone.get(name)}
        for name, trial in measured.together.items()
    }
    return {"models": models, "server": to_plain(measured.server)}


def _refuse(wanted: LoadRequest, *, output: str, gates: Sequence[str]) -> None:
    idle = {
        "--rate": wanted.rate is not None,
        "--concurrency": wanted.concurrency is not None,
        "--rest-url": wanted.rest_url is not None,
        "--grpc-url": wanted.grpc_url is not None,
        "--gate": bool(gates),
        "--csv": output == "csv",
    }
    hints = {
        "--rate": "write rate: at each of target.models",
        "--concurrency": "write concurrency: at each of target.models",
        "--gate": "write slo: at each of target.models",
        "--csv": "take --json",
    }
    for option, given in idle.items():
        if given:
            hint = hints.get(option, "several models are served by a server that is launched")
            raise UsageError(f"{option}: not of several models at once", hint=hint)


def _measure(
    question: Question, wanted: LoadRequest, measured: _Measured, *, results: Path | None, view: View
) -> None:
    scenario = question.scenario
    scenarios = scenario.of_models()
    view.event(beginning(scenario))
    clients = sum(own.load.concurrency or 0 for own in scenarios.values())
    demand = demand_of(scenario, clients_most=clients)
    with ExitStack() as stack:
        server = stack.enter_context(TfServingTarget(scenario.target, on_event=view.event, demand=demand))
        configuration = asked_configuration(question, wanted)
        server.apply(configuration)
        if results is not None:
            measured.run = create_run(scenario, format_scenario(scenario), root=results, kind="load")
            view.event(f"results go to {measured.run.path}")
            server.keep_log(measured.run.path / SERVER_LOG)
        loads = [
            ModelLoad(
                name=own.name,
                scenario=scenarios[own.name],
                configuration=own.configuration(configuration),
                target=ServedModel(server, own.name, own.configuration(configuration)),
                fleet=stack.enter_context(
                    LoadFleet(processes=scenario.load.processes, cpus=scenario.load.cpus)
                ),
            )
            for own in scenario.target.models
        ]
        every = _loaded(loads, measured, view, reason="{name}")
        measured.together = {trial.reason: trial for trial in every.trials}
        measured.server = every.server
        for load in loads if len(loads) > 1 else ():
            (trial,) = _loaded([load], measured, view, reason="{name} alone").trials
            measured.alone[load.name] = trial


def _loaded(
    loads: Sequence[ModelLoad],
    measured: _Measured,
    view: View,
    *,
    reason: str,
) -> LoadedTogether:
    """Load these models at once, again while a noisy host disturbs them, keep the last trials and say what came of
    them."""

    def load() -> LoadedTogether:
        return load_together(
            loads,
            first_number=1 + len(measured.together) + len(measured.alone),
            reason=reason,
            guard=measured.guard,
            on_live=lambda name, live: view.live(f"{reason.format(name=name)}: {live_line(live)}"),
        )

    done = load()
    for _ in range(REPEATS_MAX):
        if not any(spoilt_by(trial) == "host" for trial in done.trials):
            break
        view.event("the host was noisy: once more")
        done = load()
    judged = [
        without_empty_verdict(finished, load.scenario)
        for load, finished in zip(loads, done.finished, strict=True)
    ]
    for model_load, finished in zip(loads, judged, strict=True):
        if measured.run is not None:
            measured.run.append(finished.trial, finished.samples)
        view.event(trial_line(finished.trial, head=finished.trial.reason, scenario=model_load.scenario))
    return replace(done, finished=tuple(judged))


def _exit_code(measured: _Measured) -> int:
    trials = [*measured.together.values(), *measured.alone.values()]
    if any(trial.failure for trial in trials):
        return TargetError.exit_code
    verdicts = {
        name: measurement
        for name, trial in measured.together.items()
        if (measurement := trial.measurement) is not None and measurement.verdict in _CODES
    }
    for name, measurement in verdicts.items():
        print(f"{name}: {measurement.verdict}: {measurement.verdict_reason}", file=sys.stderr)
    given = {measurement.verdict for measurement in verdicts.values()}
    return next((code for verdict, code in _CODES.items() if verdict in given), 0)
