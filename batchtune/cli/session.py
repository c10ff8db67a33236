"""The session of a command that measures: its view, its run, the trials so far, its server, and what ended it early."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchtune.archive.listing import swept_scenarios
from batchtune.archive.run import (
    SCENARIO,
    SERVER_LOG,
    Run,
    create_run,
    open_run,
    read_original,
    write_original,
    write_whole,
)
from batchtune.batching.triton_config import FoundBatching
from batchtune.errors import (
    INTERRUPTED,
    NO_ANSWER,
    ArchiveError,
    BatchingParametersError,
    BatchtuneError,
    MeasurementInvalidError,
    TargetError,
    UsageError,
    WrongAnswerError,
)
from batchtune.load.answers import ask_once
from batchtune.load.cluster.cluster_fleet import AnyFleet, client_max_rps, fleet_of
from batchtune.plain_values import Coded
from batchtune.provenance import collect, comparable
from batchtune.report.findings import text_of
from batchtune.report.live_view import View, sweep_view
from batchtune.scenario.prompts import check_prompts
from batchtune.scenario.reader import format_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.choice import LaunchedTarget
from batchtune.target.claim import Keep, OriginalModel, discard_record
from batchtune.target.command import CommandTarget
from batchtune.target.command import restored as restored_by_command
from batchtune.target.external import ExternalTarget
from batchtune.target.kserve import TritonRepository
from batchtune.target.process import DYING_S
from batchtune.target.tfserving import TfServingTarget
from batchtune.target.triton import TritonTarget, restored
from batchtune.tune.sweep.sweep import SweepEvent, SweepProgress
from batchtune.tune.trials.trial import SearchSummary, Trial, memory_words, was_interrupted
from batchtune.twin.simulator.simulate import TRITONS_AHEAD
from batchtune.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchtune.batching.parameters import Configuration
    from batchtune.scenario.payloads import RequestSet
    from batchtune.tune.compare.blocks import Variant
    from batchtune.tune.trials.trial import FinishedTrial


Kind = Literal["", "compare", "noise", "load", "check"]
"""Kind of a run, which ends the name of its folder; "" is a sweep."""


@dataclass(slots=True, kw_only=True)
class MeasuringSession:
    """What a command works with while it measures, and how the measuring ended.

    `scenario`: as it runs, with the batching found on a server that it attached to; `variants`: those of a
    comparison, likewise. `results`: folder of all runs; None: nothing is kept. `view`: where progress is
    shown. `stack`: what is entered in it ends with the session. `run`: None until `begin` made it. `trials`:
    all so far. `fault`: the error or Ctrl-C that ended the session early. `restored`: False where an attached
    server could not be put back, which has been reported.
    """

    scenario: Scenario
    kind: Kind
    results: Path | None
    view: View
    stack: ExitStack = field(default_factory=ExitStack)
    run: Run | None = None
    trials: list[Trial] = field(default_factory=list)
    variants: Sequence[Variant] = ()
    fault: BatchtuneError | KeyboardInterrupt | None = None
    restored: bool = True
    _begun: bool = False

    def begin(self, scenario: Scenario, *, provenance: Mapping[str, Any] | None = None) -> Run | None:
        """Make the run's folder, or save the scenario in that of a resumed sweep, and lock it for this process; later
        calls only return the run. None: nothing is to be saved.

        `provenance`: as collected before; None collects it now.

        Raises:
            ArchiveError: the folder cannot be made, or another process measures for this run.
            ScenarioError: a file of prompts cannot be read.
        """
        self.scenario = scenario
        if self.run is None:
            check_prompts(scenario.request)
        if self.results is None or self._begun:
            return self.run
        if self.run is not None:
            write_whole(self.run.path / SCENARIO, format_scenario(scenario).encode())
        self.run = self.run or create_run(
            scenario, format_scenario(scenario), root=self.results, kind=self.kind, provenance=provenance
        )
        self.run.hold()
        self.view.event(f"results go to {self.run.path}")
        self._begun = True
        return self.run

    def serve(self, target: LaunchedTarget | ExternalTarget) -> None:
        """At the session's end, after the load generator, put an attached server back as it was, and stop a launched
        one."""
        self.stack.callback(target.close)
        self.stack.callback(self._put_back, target)
        self.stack.callback(self._learn_present, target)

    def found_on(self, scenario: Scenario, target: LaunchedTarget | ExternalTarget) -> Scenario:
        """Return the scenario with the batching that an attached server has now; the run saves what is to be
        put back.

        For a server that is launched the scenario is returned as it is.

        Raises:
            TargetError: the server does not answer.
            UsageError, ArchiveError, ScenarioError: as `fitted` and `begin`.
        """
        self.scenario = scenario
        if isinstance(target, TritonTarget):
            scenario = fitted(scenario, reached(target, self.view, self._keep_original))
            target.keep_original(self._keep_original)
        elif isinstance(target, CommandTarget) and scenario.target.attached:
            self.begin(scenario)
            scenario = with_present(scenario, target, self.view, self._keep_original)
        elif scenario.target.restore is None:
            return scenario
        run = self.begin(scenario)
        if run is not None and not self.trials:
            write_whole(run.path / SCENARIO, format_scenario(scenario).encode())
        return scenario

    def _put_back(self, target: LaunchedTarget | ExternalTarget) -> None:
        self.restored = self.run is None or put_back(target, self.run)

    def _learn_present(self, target: LaunchedTarget | ExternalTarget) -> None:
        """Where somebody else changed an attached server of kind http during the run, write the parameters that it now
        gets back at the end into the scenario, and into that of the run.

        Raises:
            ArchiveError: the run cannot be written.
        """
        if not isinstance(target, CommandTarget) or target.present in ({}, self.scenario.target.present):
            return
        self.scenario = self.scenario.with_target(present=target.present)
        if self.run is not None:
            write_whole(self.run.path / SCENARIO, format_scenario(self.scenario).encode())

    def launch(
        self,
        scenario: Scenario,
        target: LaunchedTarget | ExternalTarget,
        configuration: Configuration,
        another: Configuration | None = None,
    ) -> None:
        """Start the server, or configure an attached one, with a configuration; the run gets the log of a
        launched one.

        A server of kind http is sent one request: a running one before it is configured; a launched one after its
        start and, where it answers with an error, again with the configuration `another`.

        Raises:
            WrongAnswerError: the server answers with an error, a launched one in both configurations; or as
                `require_metrics_page`.
            TargetError: it does not start, or does not take the configuration.
            ArchiveError, ScenarioError: as `begin`.
        """
        launches = scenario.target.launch is not None
        if not launches and (error := first_error(scenario, target)):
            raise error
        if not launches:
            require_metrics_page(scenario, target)
        target.apply(configuration)
        run = self.begin(scenario)
        if run is not None and not isinstance(target, ExternalTarget):
            target.keep_log(run.path / SERVER_LOG)
        if launches and isinstance(target, CommandTarget):
            require_metrics_page(scenario, target)
            _require_first_answer(scenario, target, another)

    def load_generator(
        self, scenario: Scenario
    ) -> tuple[AnyFleet | dict[str, AnyFleet], Callable[[RequestSet], float] | None]:
        """Start the load generator, which ends with the session; return it, and a function from requests to the
        highest rate, requests/s, at which it can send them. With several models return (generators by the model's
        name, None).

        Raises:
            UsageError, ScenarioError: as `fleet_of`.
        """
        fleets = {
            name: fleet_of(scenario.load, on_event=self.view.event) for name in scenario.of_models() or [""]
        }
        for fleet in fleets.values():
            self.stack.enter_context(fleet)
        if "" not in fleets:
            return fleets, None
        return fleets[""], partial(client_max_rps, fleets[""], server_cpus=scenario.target.cpus)

    def require_run(self, scenario: Scenario, *, provenance: Mapping[str, Any] | None = None) -> Run:
        """Return the run, which the first call makes and locks (`begin`), for a command whose results must be saved.

        Raises:
            UsageError: there is no folder for results.
            ArchiveError, ScenarioError: as `begin`.
        """
        run = self.begin(scenario, provenance=provenance)
        if run is None:
            raise UsageError("the runs have no folder", hint="give --results DIR")
        return run

    def keep(self, finished_trials: Iterable[FinishedTrial], *, shown: bool = True) -> None:
        """Save each finished trial in the run, add it to `trials`, and show it in the view unless `shown` is
        False.

        Returns when `finished_trials` ends: the measuring happens while it is iterated.

        Raises:
            ArchiveError: the run cannot be written.
        """
        for finished in finished_trials:
            if self.run is not None:
                self.run.append(finished.trial, finished.samples)
            self.trials.append(finished.trial)
            if shown:
                self.view.trial(finished.trial)

    def listener(self) -> Callable[[SweepEvent], None]:
        """Return a function that takes what a sweep tells: the view shows its plan and progress, the run saves its
        summary."""
        run, view = self.run, self.view
        earlier = run.search() if run is not None and self.trials else None

        def hear(event: SweepEvent) -> None:
            match event:
                case SweepProgress():
                    view.progress(event)
                case SearchSummary() if run is not None:
                    keep_account(run, event if earlier is None else event.continuing(earlier))
                case Coded():
                    view.event(text_of(event))

        return hear

    def exit_code(self, code: int) -> int:
        """Return the exit code of the command: `code`, unless an error or Ctrl-C ended the session early.

        An attached server that could not be put back comes before either: TargetError's code.
        """
        if not self.restored:
            return TargetError.exit_code
        if self.fault is None:
            return code
        return self.fault.exit_code if isinstance(self.fault, BatchtuneError) else INTERRUPTED

    def _keep_original(self, original: OriginalModel) -> OriginalModel | None:
        run = self.begin(self.scenario)
        return None if run is None else write_original(run.path, original)

    def _tell_fault(self) -> None:
        saved = again = on = ""
        if self.run is not None:
            saved = f"{counted(len(self.trials), 'trial')} saved in {self.run.path}"
        if self.run is not None and self.kind == "":
            again = f"; `batchtune recommend {self.run.path}` reads them again"
            if not isinstance(self.fault, WrongAnswerError):
                on = f"\nnext: batchtune sweep {self.run.path / SCENARIO} --resume {self.run.path}"
        if isinstance(self.fault, BatchtuneError):
            print(f"error: {self.fault.message}", file=sys.stderr)
            for hint in filter(None, (self.fault.hint, f"{saved}{again}{on}")):
                print(f"hint: {hint}", file=sys.stderr)
        elif self.fault is not None:
            first = "" if self.trials else " before the first trial"
            if self.kind == "load" and not any(map(was_interrupted, self.trials)):
                first = f" before enough of the {'next' if self.trials else 'first'} point was measured"
            print(f"interrupted{first}{'; ' if saved else ''}{saved}", file=sys.stderr)


@contextmanager
def session(
    scenario: Scenario,
    kind: Kind = "",
    *,
    results: Path | None,
    quiet: bool,
    run: Run | None = None,
    trials: Sequence[Trial] = (),
) -> Iterator[MeasuringSession]:
    """Return a context manager around a command's measuring, as a session; how it ended early is reported on
    stderr at the end.

    Ctrl-C, or a TargetError or MeasurementInvalidError after at least one complete trial, ends the session without an
    exception: `fault` has it. `run`, `trials`: those of a sweep that is resumed.

    Raises:
        TargetError, MeasurementInvalidError: before any trial was complete.
    """
    with sweep_view(quiet=quiet, scenario=scenario) as view:
        current = MeasuringSession(
            scenario=scenario, kind=kind, results=results, view=view, run=run, trials=list(trials)
        )
        try:
            with current.stack:
                yield current
        except KeyboardInterrupt as interrupt:
            current.fault = interrupt
        except (TargetError, MeasurementInvalidError) as error:
            if not any(trial.state == "complete" for trial in current.trials):
                raise
            current.fault = error
        finally:
            if current.run is not None:
                current.run.release()
    current._tell_fault()


def gravest(codes: Collection[int]) -> int:
    """Return the most serious of several exit codes: of a failed server, an invalid measurement, a missed SLO, no
    verdict, in this order; 0 where none of these is among them."""
    return next((error.exit_code for error in NO_ANSWER if error.exit_code in codes), 0)


def keep_account(run: Run, summary: SearchSummary) -> None:
    """Save the search's summary in the run; where that fails, print a note, since the trials alone are enough
    to recommend."""
    try:
        run.write_search(summary)
    except ArchiveError as error:
        print(f"note: {error.message}", file=sys.stderr)


def require_same(run: Run, scenario: Scenario, before: Scenario) -> None:
    """Check that a resumed sweep has the scenario it had before, apart from the budget, and runs on the same
    machine.

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


def first_error(scenario: Scenario, target: LaunchedTarget | ExternalTarget) -> WrongAnswerError | None:
    """Send one request to a server of kind http, by protocol http or openai; return what is wrong with its answer.

    None: the answer is right, there is no answer yet, or it is a server of another kind or protocol.
    """
    if scenario.target.kind != "http" or scenario.request.protocol not in ("http", "openai"):
        return None
    try:
        ask_once(target.endpoint, scenario.request)
    except WrongAnswerError as error:
        return error
    except TargetError:
        pass
    return None


def require_metrics_page(scenario: Scenario, target: LaunchedTarget | ExternalTarget) -> None:
    """Check that the URL of `target.metrics`, if the server answers yet, has a page of Prometheus metrics. Not checked
    for protocol openai, whose servers may lack the page of their preset: each trial says so.

    Raises:
        WrongAnswerError: there is no page, or it is not one of Prometheus.
    """
    if scenario.target.metrics is None or scenario.request.protocol == "openai":
        return
    try:
        fault = target.counters().page_fault
    except TargetError:
        return
    if fault:
        hint = "correct it, or measure without metrics: --set target.metrics=null"
        raise WrongAnswerError(f"target.metrics.url: {fault}", hint=hint)


def _require_first_answer(scenario: Scenario, target: CommandTarget, another: Configuration | None) -> None:
    """Check that a launched server answers one request.

    An error that only one configuration has, for want of memory or where `another` has none or does not start,
    is left to the trials.

    Raises:
        WrongAnswerError: it does not; the message has the end of its log.
    """
    error = first_error(scenario, target)
    if error is None:
        return
    time.sleep(DYING_S)  # many programs write why they failed after the answer
    log_tail = target.log_tail()
    if memory_words(f"{error.message}\n{log_tail}") is not None:
        return
    if another is not None:
        try:
            target.apply(another)
        except (TargetError, BatchingParametersError):
            return
        if first_error(scenario, target) is None:
            return
    raise WrongAnswerError(f"{error.message}; the server's last words:\n{log_tail}", hint=error.hint)


# A server that takes configurations from us and is somebody else's: what it has, and how it is put back.


def beginning(scenario: Scenario) -> str:
    """Return the line that is shown before a server is launched or attached to."""
    target = scenario.target
    if target.kind == "http" and target.launch is None:
        return f"attaching to {target.url}"
    if target.kind == "command":
        return f"running the commands of target for {target.model}"
    if target.attached:
        return f"attaching to {target.model} at {target.rest_url}"
    return f"launching the server for {target.model}"


def with_present(scenario: Scenario, target: CommandTarget, view: View, keep: Keep) -> Scenario:
    """Return the scenario with the parameters that an attached server of kind http has now, and show them.

    `keep` is called with what has to be put back at the end.

    Raises:
        TargetError, UsageError: as `CommandTarget.attach`.
    """
    present = target.attach(keep)
    if not present:
        return scenario
    view.event(
        f"{scenario.target.model} has {', '.join(f'{name} {value}' for name, value in present.items())}"
    )
    return scenario.with_target(present=present)


def reached(target: TritonTarget, view: View, keep: Keep | None = None) -> FoundBatching:
    """Return the batching in the configuration of Triton's model; show it, and in what Triton differs from the
    simulator.

    `keep` is called with what has to be put back, before a model that is not loaded is loaded to learn its
    configuration.

    Raises:
        TargetError, UsageError: as `TritonTarget.start`.
    """
    batching = target.start(before_load=keep)
    view.event(f"{target.endpoint.model_name} has {batching.words()}")
    view.event(
        f"Triton never splits or pads a request; {TRITONS_AHEAD}, nor does it simulate preferred sizes, ordering or "
        "queue policies: the twin counts only as far as it predicts the trials"
    )
    for name in TritonRepository(target.endpoint).ensembles():
        view.event(
            f"{name} is an ensemble that uses it: Triton serves that only while max_batch_size is not below its own"
        )
    return batching


def fitted(scenario: Scenario, batching: FoundBatching) -> Scenario:
    """Return the scenario with the batching that was found on its server; unchanged where it has that of an earlier
    run already (`target.found`).

    Raises:
        UsageError: its requests have more rows than the model takes.
    """
    rows = scenario.request.rows_most
    if rows > batching.max_batch_size:
        raise UsageError(
            f"request.rows: the model takes at most {batching.max_batch_size} rows in a request "
            f"(its max_batch_size); the scenario sends {rows}",
            hint="send fewer rows, or raise max_batch_size in the model's configuration first",
        )
    return scenario if scenario.target.found is not None else scenario.with_target(found=batching)


def put_back(target: LaunchedTarget | ExternalTarget, run: Run) -> bool:
    """Restore an attached server as it was before the run; True where that works or nothing has to be
    restored.

    False where it fails, which is printed with the command that tries again.
    """
    if isinstance(target, TfServingTarget | ExternalTarget):
        return True
    try:
        target.restore()
    except TargetError as error:
        print(f"error: {error.message}", file=sys.stderr)
        original = read_original(run)
        first = "" if original is None else original.run  # the run that changed the server
        path = run.path if first in ("", str(run.path.resolve())) else first
        print(f"hint: {restore_hint(path)}", file=sys.stderr)
        return False
    return True


def restore_hint(path: Path | str) -> str:
    """Return what a user can do whose server was not restored after the run at `path`."""
    return f"`batchtune restore {path}` tries again; with --discard, the server stays as it is"


def not_put_back(run: Run) -> OriginalModel | None:
    """Return what a killed run still has to restore on the server that it had attached to; None: nothing.

    Raises:
        ArchiveError: the run's model_config.json is corrupt.
    """
    original = read_original(run)
    return None if original is None or original.restored or not original.attached else original


def run_restore(path: Path, *, discard: bool = False) -> int:
    """Run `batchtune restore`: restore the server of a run that was killed as it was before the run. `discard`: leave
    the server as it is, and forget how it was; target.restore is not run. Returns the exit code, 0.

    Raises:
        ArchiveError: there is no such run, or a process measures for it.
        UsageError: the run attached to no server.
        TargetError: the server is gone, or refuses its old configuration.
    """
    run = open_run(path)
    target = run.scenario().target
    if target.kind == "command" and target.restore is not None:
        run.hold()
        if not discard:
            restored_by_command(target)
        done = "did not run: the server stays as it is" if discard else "restored the original state"
        print(f"target.restore {done}", file=sys.stderr)
        return 0
    original = read_original(run)
    if original is None or not original.attached:
        raise UsageError(
            f"{run.path} attached to no server: there is nothing to restore",
            hint="only a sweep or comparison of kind triton with target.rest_url, of kind http without launch, or of "
            "kind command with target.restore, changes a server that is not its own",
        )
    run.hold()
    if original.restored:
        print(f"{original.model} is restored already, or was discarded: nothing to do", file=sys.stderr)
        return 0
    if discard:
        discard_record(original)
        write_original(run.path, replace(original, restored=True))
        print(f"{original.model} at {original.rest_url} stays as it is", file=sys.stderr)
        return 0
    if target.kind == "http":
        on_event = partial(print, file=sys.stderr)
        with CommandTarget(target, original=original, on_event=on_event) as running:
            running.attach(partial(write_original, run.path))
            is_as_set = not running.changed
        if is_as_set:
            write_original(run.path, replace(original, restored=True))
            return 0
    else:
        write_original(run.path, restored(original, target))
    print(f"{original.model} at {original.rest_url} is as it was: {original.words()}", file=sys.stderr)
    return 0


# Opens the run that a command reads, and reads its trials.


def asked_run(path: Path | None, *, results: Path) -> Run:
    """Open the run in `path`, or the newest sweep of a scenario's folder; None: the latest sweep under
    `results`.

    Where `results` has sweeps of other scenarios too, stderr says which scenario the latest is of.

    Raises:
        ArchiveError: there is none.
    """
    run = open_run(path, root=results)
    if path is None:
        here = run.path.parent.name
        others = [name for name in swept_scenarios(results) if name != here]
        if others:
            print(
                f"note: {run.path} is the latest run, of scenario {here}; name another by its folder: "
                f"{', '.join(str(results / name) for name in others)}",
                file=sys.stderr,
            )
    return run


def kept_trials(run: Run) -> list[Trial]:
    """Read the trials of a run, and print on stderr a note about each line that was left out.

    Raises:
        ArchiveError: a line is no trial.
    """
    trials = run.ledger()
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    return trials
