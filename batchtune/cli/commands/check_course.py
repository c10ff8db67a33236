"""Makes the runs of a check: blocks as they are needed, each trial saved as it ends."""

from __future__ import annotations

import json
import math
import os
import os.path
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchtune.batching.parameters import PARAMETER_NAMES
from batchtune.check.account import Conclusion
from batchtune.check.gate import OF_A_LAUNCH, ONE_LAUNCH, RANK_FIRST, gates_of, looks_up_to
from batchtune.check.paired_check import UNTOLD, Phase, judge_interrupted, run_check
from batchtune.cli.arguments.options import CheckRequest, SideWords
from batchtune.cli.arguments.overrides import file_knobs
from batchtune.cli.benches import Benches
from batchtune.errors import BatchtuneError, TargetError, UsageError
from batchtune.plain_values import as_text
from batchtune.report.ci_files import code_quality, comment, github_annotations, junit_xml, markdown
from batchtune.report.comparison import pace_text
from batchtune.scenario.reader import read_scenario, section_of, unchecked_scenario
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.workload import LoadSpec
from batchtune.system import ScratchFolder, absolute
from batchtune.target.model_files import export_model, is_lfs_pointer, readable
from batchtune.tune.compare.blocks import (
    DUET_S,
    Variant,
    compare,
    comparison_seconds,
    leaves_duration_open,
    probed_paces,
)
from batchtune.tune.one_capacity import BURST_S, CLIENTS_MAX
from batchtune.tune.trials.pace import PROBE_WARM_UP_S, clients_to_fill
from batchtune.units import counted, rounded_duration

if TYPE_CHECKING:
    from batchtune.archive.run import Run
    from batchtune.check.gate import BlockFigures, Finding, Gate
    from batchtune.cli.session import MeasuringSession
    from batchtune.report.live_view import View
    from batchtune.scenario.spec.scenario import Scenario
    from batchtune.tune.bench import Plan
    from batchtune.tune.trials.pace import Pace
    from batchtune.tune.trials.trial import Trial


# What the words of one side change in the scenario: its model, a git commit, an image, a command, flags.
#
# Paths are relative to where the command is called, as flags are; those in the scenario to the scenario.


@contextmanager
def with_words_of_sides(wanted: CheckRequest, words: Mapping[str, SideWords]) -> Iterator[CheckRequest]:
    """Return a context manager with the request, in which the options of each side have become overrides of
    that side.

    Models of git commits are exported to a temporary folder, which is removed at the end. Paths are relative
    to the working directory.

    Raises:
        UsageError: a model or a commit that does not exist, or parameters that the scenario fixes and a file
            lacks.
        BatchingParametersError: a file that cannot be read, or holds values that no server would take.
    """
    with ScratchFolder() as scratch:
        changes: dict[str, list[str]] = {}
        commits: dict[str, str] = {}
        notes = []
        for side, said in words.items():
            _require_one_model(wanted, side, said)
            model = _model(wanted.scenario, side, said)
            if said.ref is not None:
                path, commit, text = export_model(_model_path(wanted, said), said.ref, scratch.path / side)
                model = [_override("target.model", str(path))]
                commits[side] = commit
                notes.append(f"{side}: {text}")
            changes[side] = [*model, *_server(said), *_batching(wanted, said), *(said.set or ())]
        yield replace(
            wanted,
            baseline_set=changes.get("baseline", ()),
            candidate_set=changes.get("candidate", ()),
            note="; ".join(notes),
            commit=commits.get("candidate"),
        )


def _require_one_model(wanted: CheckRequest, side: str, said: SideWords) -> None:
    """Raise UsageError where a side names a model and the scenario lists several."""
    option = "model" if said.model is not None else "ref"
    if getattr(said, option) is not None and _section(wanted, "target").get("models"):
        raise UsageError(
            f"--{side}-{option}: {wanted.scenario} lists several models, and this does not say which is meant",
            hint=f"give --{side}-set target.models.0.model=PATH: 0 is the first, PATH is seen from the scenario",
        )


def _model(scenario: Path, side: str, said: SideWords) -> list[str]:
    """Return the override, in a list, that gives a side its model; empty where the side has no such option,
    or a commit.

    Raises:
        UsageError: no such model.
    """
    if said.model is None or said.ref is not None:
        return []
    if not _is_path(said.model) and not Path(said.model).exists():
        beside = scenario.parent / said.model
        if beside.exists():
            raise UsageError(f"{said.model}: no such model here", hint=f"did you mean {beside}?")
        return [_override("target.model", said.model)]
    path = absolute(_at_home(said.model))
    _refuse_pointers(side, path)
    return [_override("target.model", str(path))]


def _refuse_pointers(side: str, model: Path) -> None:
    """Raise UsageError where one of the model's files is a Git LFS pointer: its content was not checked out."""
    versions = [path for path in model.glob("*") if path.name.isdecimal() and path.is_dir()]
    served = max(versions, key=lambda path: int(path.name), default=model)
    files = [served, *(file for depth in ("*", "*/*", "*/*/*") for file in sorted(served.glob(depth)))]
    for file in filter(Path.is_file, files):
        with readable(file):
            is_pointer = is_lfs_pointer(file)
        if is_pointer:
            raise UsageError(
                f"--{side}-model: {file}: a Git LFS pointer; its content is not in this checkout",
                hint="git lfs install && git lfs pull; of a job's checkout: lfs: true",
            )


def _model_path(wanted: CheckRequest, said: SideWords) -> Path:
    """Return the path of the model that a side takes from a git commit: that of the side's option, else the
    scenario's.

    Raises:
        UsageError: the scenario's model is no path, so that git has no version of it.
    """
    if said.model is not None:
        return absolute(_at_home(said.model))
    model = _section(wanted, "target").get("model")
    if not isinstance(model, str) or not model:
        raise UsageError(f"{wanted.scenario}: target.model: missing: a git ref needs a model's folder")
    path = wanted.scenario.parent / _at_home(model)
    if not path.exists() and not _is_path(model):
        raise UsageError(
            f"target.model: {model!r} is not a folder in git, so it has no ref",
            hint="give --baseline-model PATH too",
        )
    return path


def _server(said: SideWords) -> Iterator[str]:
    """Yield the overrides that give a side its container image, server command and flags.

    Raises:
        UsageError: a command line or a flag that cannot be parsed.
    """
    if said.image is not None:
        yield _override("target.server", "docker")
        yield _override("target.docker.image", said.image)
    if said.command is not None:
        try:
            yield _override("target.command", shlex.split(said.command))
        except ValueError as error:
            raise UsageError(f"{said.command!r} is not a command line: {error}") from error
    for flag in said.flag or ():
        name, equals, value = flag.lstrip("-").partition("=")
        if not name or not equals:
            raise UsageError(f"expected NAME=VALUE, such as tensorflow_intra_op_parallelism=2; was {flag!r}")
        yield f"target.flags.{name}={value}"


def _batching(wanted: CheckRequest, said: SideWords) -> Iterator[str]:
    """Yield the overrides that give a side the parameters of a file, in place of those that the scenario
    fixes.

    Raises:
        UsageError: the scenario fixes a parameter that the file lacks.
        BatchingParametersError: the file cannot be read.
    """
    if said.batching is None:
        return
    path = _at_home(said.batching)
    knobs, notes = file_knobs(path, read_scenario(wanted.scenario, overrides=wanted.overrides))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    fixed = _section(wanted, "fixed")
    unnamed = sorted(name for name in fixed if name in PARAMETER_NAMES and name not in knobs)
    if unnamed:
        raise UsageError(
            f"{path}: the scenario fixes {', '.join(unnamed)}, but the file does not set it",
            hint="write it into the file, or take it out of the scenario's fixed",
        )
    yield "fixed.enable_batching=true"
    yield from (_override(f"fixed.{name}", value) for name, value in knobs.items())


def _section(wanted: CheckRequest, name: str) -> Mapping[str, Any]:
    return section_of(unchecked_scenario(wanted.scenario, overrides=wanted.overrides), name)


def _is_path(model: str) -> bool:
    """Whether a model's name can only be a path; any other may be that of a sample model too."""
    return "/" in model or model.endswith((".onnx", ".pt2", ".pt")) or model in (".", "..", "~")


def _at_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{path}: no such user has a home folder here", hint="give the path in full"
        ) from error


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


def without_search(scenarios: Sequence[Scenario], margins: Mapping[str, float]) -> list[Scenario]:
    """Return the scenarios with the load that a check sends.

    Under objective capacity, unless a gate names the capacity, that is a closed loop that fills the batches,
    without an SLO: a search for the capacity takes up to 45 s a run. A closed loop without a stated duration
    becomes a short one: many short blocks show more than few long ones. Its warm-up is short too, unless the
    scenario states one. Scenarios of several models are returned as they are.
    """
    if any(scenario.target.models for scenario in scenarios):
        return list(scenarios)
    if "capacity" not in margins and all(scenario.objective == "capacity" for scenario in scenarios):
        clients = max(clients_to_fill(scenario.configuration({}), scenario) for scenario in scenarios)
        return [_closed_loop(scenario, min(clients, CLIENTS_MAX)) for scenario in scenarios]
    return [
        _closed_loop(scenario, scenario.load.concurrency)
        if scenario.load.arrivals == "closed" and leaves_duration_open(scenario)
        else scenario
        for scenario in scenarios
    ]


def _closed_loop(scenario: Scenario, clients: int | None) -> Scenario:
    """Return the scenario under a short closed loop of so many clients; one that searches a capacity then
    measures throughput."""
    load = scenario.load
    is_stated = scenario.objective != "capacity" and "warm_up_s" in load.model_fields_set
    closed = LoadSpec(
        arrivals="closed",
        concurrency=clients,
        think_time=load.think_time_s,
        warm_up=load.warm_up_s if is_stated else min(load.warm_up_s, PROBE_WARM_UP_S),
        duration=min(load.duration_s, BURST_S),
        seed=load.seed,
        connections=load.connections,
        processes=load.processes,
        cpus=load.cpus,
        fleet=load.fleet,
    )
    if scenario.objective != "capacity":
        return scenario.model_copy(update={"load": closed})
    return scenario.model_copy(update={"load": closed, "objective": "throughput", "slo": SloSpec()})


def gates_for(variant: Variant, margins: Mapping[str, float]) -> tuple[Gate, ...]:
    """Return the gates of these margins for a variant and each of its models.

    Raises:
        UsageError: as `gates_of`.
    """
    arms = variant.arms()
    own, models = arms[0].scenario, [arm.model for arm in arms if arm.model]
    return gates_of(margins, objective=own.objective, models=models, streams=own.streams_tokens)


def require_writable(wanted: CheckRequest) -> None:
    """Check that the report files can be written, before minutes are spent; existing ones are not changed.

    Raises:
        UsageError: one cannot be written.
    """
    for path in (wanted.junit, wanted.markdown, wanted.comment, wanted.code_quality):
        try:
            if path is None or path.is_fifo():
                continue
            is_new = not os.path.lexists(path)  # a link to what is not there yet stays
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
            if is_new:
                path.unlink()
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error


def hand_on(account: Conclusion, wanted: CheckRequest) -> None:
    """Write the report files, append to the CI job's summary, and print annotations where a GitHub runner
    reads them.

    Annotations point to the scenario's file. A file that cannot be written is named in a note on stderr.
    """
    summary, place = wanted.markdown, str(wanted.scenario)
    if summary is None and os.environ.get("GITHUB_STEP_SUMMARY"):
        summary = Path(os.environ["GITHUB_STEP_SUMMARY"])
    texts: tuple[tuple[Path | None, Literal["w", "a"], Callable[[], str]], ...] = (
        (wanted.junit, "w", lambda: junit_xml(account)),
        (wanted.comment, "w", lambda: comment(account)),
        (wanted.code_quality, "w", lambda: code_quality(account, file=place)),
        (summary, "a", lambda: markdown(account)),
    )
    for path, mode, text in texts:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode, encoding="utf-8") as file:
                file.write(text())
        except OSError as error:  # the verdict is valid without it
            print(f"note: cannot write {path}: {error.strerror}", file=sys.stderr)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_annotations(account, file=place):
            print(line, file=sys.stderr)


@dataclass(slots=True, kw_only=True)
class Course:
    """Makes the runs of one check, block by block.

    `figures`: makes blocks of the trials of a phase. `relaunches`: every run has a server of its own and no
    other beside it, so that each block has two start-up times and two peaks of memory. `paces`: how long
    loads must last, by variant. `duets`: block -> CPU seconds per request, (baseline, candidate), measured
    while the load went from one server to the other in short turns; nan where that could not be measured.
    """

    variants: Sequence[Variant]
    benches: Benches
    session: MeasuringSession
    figures: Callable[[Sequence[Trial], Phase], Sequence[BlockFigures]]
    relaunches: bool = False
    paces: dict[str, Pace] = field(default_factory=dict)
    duets: dict[int, tuple[float, float]] = field(default_factory=dict)
    _phases: dict[Phase, list[Trial]] = field(default_factory=dict)
    _blocks: dict[Phase, int] = field(default_factory=dict)
    _began: dict[Phase, float] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        """The run, made on first use; raises what `MeasuringSession.require_run` raises."""
        return self.session.require_run(self.session.scenario)

    @property
    def view(self) -> View:
        """Where progress is shown."""
        return self.session.view

    @property
    def trials(self) -> Sequence[Trial]:
        """Trials of both phases, in the order in which they ran."""
        return self.session.trials

    def measure(self, phase: Phase, blocks: int, guarded: Collection[Gate]) -> Sequence[BlockFigures]:
        """Measure until a phase has `blocks` blocks, and return the figures of all of them; `run_check` calls this.

        Servers are launched anew for the first blocks of a phase, and in each later call that needs more blocks
        than there are once there are ONE_LAUNCH; with `relaunches`, for every run instead. If `guarded` has the gate
        cpu, the CPU time of each new block is measured by loads of its own, after its runs.

        Raises:
            TargetError: a server failed.
        """
        have = self._blocks.get(phase, 0)
        if blocks > have and (not have or (have >= ONE_LAUNCH and not self.relaunches)):
            self._launch(phase, guarded)
        self._began.setdefault(phase, time.monotonic())
        trials = self._phases.setdefault(phase, [])
        for finished in compare(
            self.variants,
            blocks=blocks - have,
            bench_of=self.benches.bench,
            on_turn=self._begin,
            paces=self.paces,
            first_block=sum(self._blocks.values()) + 1,
            first_number=1 + max((trial.last_number for trial in self.trials), default=0),
        ):
            trial = finished.trial
            self.session.keep([finished], shown=False)
            trials.append(trial)
            self.benches.show(trial)
            if trial.state == "failed":
                raise TargetError(f"{trial.reason}: {trial.failure}")
        if _asks_cpu(guarded, self.variants):
            self._compare_cpu(trials)
        self._blocks[phase] = blocks
        return self.figures(trials, phase)

    def conclude(self, gates: Sequence[Gate], blocks_max: int) -> Conclusion:
        """Measure until every gate is decided, and return the conclusion; a server that fails makes it INVALID, and
        Ctrl-C ends it after at least one whole block with what the blocks of the screen show."""
        try:
            return run_check(
                gates,
                self.measure,
                blocks_max=blocks_max,
                on_look=self._tell_look,
            )
        except KeyboardInterrupt:
            blocks = self.figures(self._phases.get("screen", ()), "screen")
            if not blocks:
                raise
            return judge_interrupted(gates, blocks, blocks_max=blocks_max)
        except TargetError as error:
            return Conclusion(
                verdict="INVALID",
                findings=(),
                blocks=self._blocks.get("screen", 0),
                fresh_blocks=self._blocks.get("confirmation", 0),
                blocks_max=blocks_max,
                reason=as_text(error.message),
                target_failed=True,
            )

    def _tell_look(self, phase: Phase, blocks: int, findings: Sequence[Finding]) -> None:
        spent_s = time.monotonic() - self._began[phase]
        self.view.event(look_text(phase, blocks, findings, blocks_max=self.benches.blocks, spent_s=spent_s))

    def _compare_cpu(self, trials: Sequence[Trial]) -> None:
        """Measure the CPU time per request for each block of the trials that has none yet, by loads in short
        turns."""
        fresh = sorted({trial.block for trial in trials if trial.block is not None} - self.duets.keys())
        if self.duets and all(math.isnan(before_s) for before_s, _ in self.duets.values()):
            self.duets |= dict.fromkeys(fresh, UNTOLD)  # nor would these show anything
            return
        if self.relaunches:
            self._stop_each()
            self._warm()
        for block in fresh:
            cost_s = self.benches.duet(self.variants, trials, self.paces, block=block)
            self.duets[block] = cost_s or UNTOLD
            if cost_s is not None:
                self.run.keep_duet(block, cost_s)

    def _warm(self) -> None:
        """Launch each side's server, two where both sides are equal, and find out how long its loads must
        last."""
        self.variants = self.benches.reached(self.variants)
        for variant in self.variants:
            self.benches.bench(variant)  # a missing cluster is reported before a server is launched
            self.benches.launch(variant)
            self.paces |= probed_paces([variant], bench_of=self.benches.bench)

    def _stop_each(self) -> None:
        """Stop the server of each variant."""
        for variant in self.variants:
            self.benches.stop_server(variant)

    def _launch(self, phase: Phase, guarded: Collection[Gate]) -> None:
        """Launch all servers anew, so that they are equally fresh, and show why or, the first time, how long
        the check takes."""
        if self._blocks:
            why = "no verdict yet" if phase in self._blocks else "flagged: confirmation blocks"
            self.view.event(f"{why}; the check restarts the servers that it launched")
            self.benches.stop_servers()
        started_s = time.monotonic()
        self._warm()
        if not self._blocks:
            for variant in self.variants:
                self.view.event(pace_text(variant, self.paces[variant.name]))
            launch_s = time.monotonic() - started_s
            blocks = self.benches.blocks
            takes = counted(blocks, "block")
            if guarded:
                usual_s, most_s = check_seconds(
                    self.variants, self.paces, guarded=guarded, blocks=blocks, launch_s=launch_s
                )
                takes = (
                    f"usually about {rounded_duration(usual_s)} ({RANK_FIRST} blocks of each server), at most about "
                    f"{rounded_duration(most_s)} ({counted(blocks, 'block')}, twice where a change is confirmed)"
                )
            self.view.event(takes)

    def _begin(self, variant: Variant, plan: Plan, attempt: int) -> None:
        """Get the server of the next trial ready: launched alone where every run has its own, else still
        running."""
        if self.relaunches:  # alone: the memory in use of a GPU is that of every process on it
            self._stop_each()
        else:
            self.benches.require_running(variant)
        self.benches.turn(variant, plan, attempt)


def _asks_cpu(guarded: Collection[Gate], variants: Sequence[Variant]) -> bool:
    """Whether CPU time is guarded and there are two sides, so that it is measured by loads in short turns."""
    return len(variants) > 1 and any(gate.metric == "cpu" for gate in guarded)


def check_seconds(
    variants: Sequence[Variant],
    paces: Mapping[str, Pace],
    *,
    guarded: Collection[Gate],
    blocks: int,
    launch_s: float,
) -> tuple[float, float]:
    """Return (usual, most) seconds of a check: where nothing changed on a quiet host, and with all blocks of
    both phases.

    `paces`: how long loads must last, by variant. `guarded`: the gates. `blocks`: most of a phase.
    `launch_s`: seconds in which all servers launch.
    """
    block_s = comparison_seconds(variants, paces, blocks=1)
    launches = sum(look >= ONE_LAUNCH for look in looks_up_to(blocks)[:-1]) + 1
    if needs_relaunches(guarded):
        block_s += launch_s
        launches = 1
    duet_s = DUET_S if _asks_cpu(guarded, variants) else 0.0
    return (
        launch_s + RANK_FIRST * (block_s + duet_s),
        2.0 * (launches * launch_s + blocks * (block_s + duet_s)),
    )


def loop_text(scenario: Scenario) -> str:
    """Return a line that says which load replaces the search for a capacity, and how to search all the same."""
    return (
        f"objective: capacity: each run is a closed loop of {counted(scenario.load.concurrency or 1, 'client')}; "
        "--max-regress capacity=5% searches the capacity instead (up to 45 s a run)"
    )


def needs_relaunches(gates: Iterable[Gate]) -> bool:
    """Whether a gate guards a figure that the launch decides (start-up time, peak memory), so that each run
    needs a launch."""
    return any(gate.metric in OF_A_LAUNCH for gate in gates)


def closed(stack: ExitStack) -> BatchtuneError | None:
    """Close the stack. Returns the error that closing raised, or None, so that the caller can raise it after
    the verdict is printed and saved."""
    try:
        stack.close()
    except BatchtuneError as error:
        return error
    return None


def look_text(
    phase: Phase, blocks: int, findings: Sequence[Finding], *, blocks_max: int, spent_s: float
) -> str:
    """Describe how far a check is: `6 of at most 36 blocks: OK: cpu; no verdict yet on p95, p99; at most about 5 min
    more before a confirmation`.

    In the confirmation: `3 of at most 36 confirmation blocks: …`. `spent_s`: seconds that the blocks took.
    """
    by_state: dict[str, list[str]] = {}
    for finding in findings:
        by_state.setdefault(finding.state, []).append(finding.gate.name)
    heads = {"ok": "OK:", "improved": "improved:", "regressed": "regressed:", "open": "no verdict yet on"}
    states = [f"{heads[state]} {', '.join(names)}" for state, names in by_state.items() if state in heads]
    kind = "blocks" if phase == "screen" else "confirmation blocks"
    if "open" in by_state and "regressed" not in by_state and blocks < blocks_max:
        left = rounded_duration(spent_s * (blocks_max - blocks) / max(blocks, 1))
        states.append(f"at most about {left} more{' before a confirmation' if phase == 'screen' else ''}")
    return f"{blocks} of at most {blocks_max} {kind}: {'; '.join(states)}"
