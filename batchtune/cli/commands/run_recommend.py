"""`batchtune recommend`: choose from a run, write the parameters down, say why."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from batchtune.archive.run import RECOMMENDATION, SCENARIO, Run, write_server_files, write_whole
from batchtune.archive.server_files import parameters_name, parameters_text, server_files, tritons_file
from batchtune.batching.kubernetes import ParametersFile
from batchtune.batching.parameters import Configuration
from batchtune.batching.tfserving_file import RenderedDialect, rendered, without_counterpart
from batchtune.batching.triton_config import dropped
from batchtune.cli.arguments.options import Dialect, refuse
from batchtune.cli.arguments.overrides import in_place_of, promised
from batchtune.cli.deployment import as_started, build_command, deployed_name, deployment, docker_command
from batchtune.cli.session import asked_run, kept_trials
from batchtune.errors import NO_ANSWER, ArchiveError, BatchtuneError, InconclusiveError, UsageError
from batchtune.report.findings import print_json, worded
from batchtune.report.recommendation_text import print_answer
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import DEFAULT_TIME_BUDGET_S
from batchtune.tune.answer.reason import failure_with_batching, too_short
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.tune.trials.trial import NO_CANDIDATES, REPEATS, Trial, measuring_s
from batchtune.units import format_duration


def run_recommend(
    path: Path | None,
    limits: Mapping[str, str | None],
    *,
    dialect: Dialect | None,
    write: Path | None,
    results: Path,
    json: bool,
    why: bool = False,
) -> int:
    """Run `batchtune recommend`. Returns the exit code: 0 where the answer is confirmed, 5 where it is not.

    Raises:
        NoFeasibleConfigurationError, InconclusiveError, MeasurementInvalidError, TargetError: no answer; see
            `conclude`.
        UsageError: the run is no sweep, or options that do not fit it.
    """
    promise = promised(limits)
    run = asked_run(path, results=results)
    scenario = run.scenario()
    slo = None if promise is None else in_place_of(scenario, promise)
    trials = kept_trials(run)
    if any(trial.source == "variant" for trial in trials):
        raise UsageError(
            f"{run.path} compares variants; there is nothing to choose from",
            hint="name the run of a sweep, or read comparison.json in that folder",
        )
    if any(trial.source == "load" for trial in trials):
        raise UsageError(
            f"{run.path} is a load test; there is nothing to choose from", hint="name the run of a sweep"
        )
    if scenario.target.models:
        hint = "leave it out: the files are TensorFlow Serving's, and each model has its SLO in the scenario"
        refuse({"--format": dialect, "--slo-…": slo}, "not of a sweep of several models", hint=hint)
        if write is not None and write.exists() and not write.is_file():
            raise UsageError(
                f"--write: {write} is not a file; several are written",
                hint="name one: the others go next to it",
            )
    try:
        return conclude(
            run,
            scenario,
            trials,
            slo=slo,
            json=json,
            why=why,
            write=write,
            dialect=dialect,
            named=path is not None and run.path == path,
        )
    except NO_ANSWER as error:
        raise type(error)(f"{run.path}: {error.message}", hint=error.hint) from error


def conclude(
    run: Run,
    scenario: Scenario,
    trials: Sequence[Trial],
    *,
    slo: SloSpec | None = None,
    json: bool = False,
    why: bool = False,
    write: Path | None = None,
    dialect: Dialect | Literal["http"] | None = None,
    named: bool = True,
    swept: bool = False,
) -> int:
    """Recommend from the trials, print the answer, and write the parameters that were asked for. Returns the exit
    code: 0 where the answer is confirmed, 5 where it is not.

    `slo`: in place of the scenario's, None: that. `why`: print the whole argument. `write`: file for the
    parameters. `dialect`: format of the parameters, None: that of the server that was measured. `named`: the
    user named this run, so that the answer need not. `swept`: a sweep has just ended. An answer for the
    scenario's SLO is saved in the run where a sweep has just ended, or where the run has no answer yet.

    Raises:
        NoFeasibleConfigurationError, InconclusiveError, MeasurementInvalidError, TargetError: no
            configuration is known to meet the SLO; with `json` a document says so too. A sweep then deletes
            an earlier answer.
        UsageError: the dialect is not one of this kind of server, or (BatchingParametersError) cannot express the
            parameters; nothing was printed or written.
    """
    try:
        chosen = _recommended(run, scenario, trials, slo)
    except NO_ANSWER as error:
        step = _way_on(error, run, scenario, trials, asked=None if slo == scenario.slo else slo)
        if json:
            ending = {"error": error.message, "hint": error.hint, "to_establish": step}
            print_json({"run": str(run.path), **ending})
        if swept:
            run.remove_recommendation()
        raise
    own_dialect = chosen.configuration.dialect
    dialect = dialect or own_dialect
    if own_dialect == "http" and dialect not in ("http", "json"):
        raise UsageError(
            f"--format {dialect}: the server is of kind http, and has parameters of its own",
            hint="leave it out, or take --format json: each parameter by the server's name, with its value",
        )
    text = ""
    if dialect != "docker" and not (json and write is None):
        text = formatted(chosen, dialect, run.model_config(), scenario=scenario)
    own = slo is None or slo == scenario.slo
    if own and (swept or not (run.path / RECOMMENDATION).is_file()):
        _keep(run, chosen)
    asked = None if own else slo
    again = f"batchtune recommend {shlex.quote(str(run.path))} {_asked(asked, scenario)}"
    if dialect == "docker":
        text = _docker_run(run, chosen, scenario, again)
    if write is not None:
        _write(write, text, beside=server_files(write, chosen, scenario.target.models))
    longer = to_establish(run, scenario, trials, asked=asked)
    step = None if chosen.established else longer
    offer = longer if chosen.established and chosen.may_find_more else None
    if json:
        document = {"run": str(run.path), "to_establish": step, **worded(chosen.to_dict())}
        print_json(document)
    else:
        shown = dialect == own_dialect or write is not None
        command = None
        if dialect == own_dialect:
            command = deploying(run, chosen, scenario, written=write, recommend=again.rstrip())
        of_run = None if named else _run_line(run)
        with redirect_stdout(sys.stderr if dialect == "json" and not shown else sys.stdout):
            print_answer(
                chosen,
                scenario=scenario,
                deployment=command,
                run=of_run,
                next_step=step,
                offer=offer,
                why=None if why else f"{again}--why",
                whole=why,
            )
        if not shown:
            print(text)
    _note_on_flags(chosen.configuration, dialect, again)
    return 0 if chosen.established else InconclusiveError.exit_code


def _note_on_flags(configuration: Configuration, dialect: str, again: str) -> None:
    """Print to stderr, where the dialect is flags that the server refuses, which format it takes."""
    if dialect == "flags" and configuration.dialect == "tfserving" and configuration.batching is not None:
        sys.stdout.flush()
        words = "tensorflow_model_server and batchtune-model-server take batching parameters only from a file"
        print(f"note: {words}, which `{again}--format tfserving` prints", file=sys.stderr)


def _docker_run(run: Run, chosen: Recommendation, scenario: Scenario, again: str) -> str:
    """Return the command that starts a container; how to build its image, where that is batchtune's own, and how to
    write its file of parameters (`again --write FILE`), where there is none yet, go to stderr."""
    if built_by := build_command(chosen.configuration, scenario):
        print(f"note: in a clone of batchtune, `{built_by}` builds the image", file=sys.stderr)
    command = docker_command(chosen.configuration, scenario, parameters_file(run, None, chosen))
    if "source=FILE," in command:
        print(f"note: `{again}--write FILE` writes FILE", file=sys.stderr)
    return command


def deploying(
    run: Run, chosen: Recommendation, scenario: Scenario, *, recommend: str, written: Path | None = None
) -> str | None:
    """Return the command that deploys what was chosen; where no file has its parameters yet, the command `recommend`
    comes first, in a line of its own, and writes one. None where the server ended during the sweep.

    `written`: the file that the parameters were written to, None: none.
    """
    if chosen.lost_server:
        return None
    file = parameters_file(run, written, chosen)
    command = deployment(chosen.configuration, scenario, file, recommend=recommend)
    writes_none = scenario.target.kind != "command" and file == Path("FILE")
    if writes_none and {"FILE", "--batching_parameters_file=FILE"} & {*command.split()}:
        return f"{recommend} --write FILE\n{command}"
    return command


def _recommended(
    run: Run, scenario: Scenario, trials: Sequence[Trial], slo: SloSpec | None
) -> Recommendation:
    """Return the recommendation, with the settings of a Triton model's own configuration that it drops."""
    chosen = recommend(trials, scenario=scenario, slo=slo, search=run.search())
    config = run.model_config() if chosen.configuration.dialect == "triton" else None
    return chosen if config is None else replace(chosen, drops=dropped(config, chosen.configuration))


def to_establish(
    run: Run, scenario: Scenario, trials: Sequence[Trial], *, asked: SloSpec | None = None
) -> str | None:
    """Return the `batchtune sweep` command that would confirm the answer: it resumes the run, with twice the
    budget, at least what a sweep has without one.

    For another SLO than the scenario's, `asked`, it starts a new sweep. None where every batch fails: more
    trials would change nothing.
    """
    if failure_with_batching(trials) is not None:
        return None
    sweep = f"batchtune sweep {shlex.quote(str(run.path / SCENARIO))}"
    if asked is not None:
        more = _longer(scenario, trials) if too_short(trials, scenario) else ""
        return f"{sweep} {_asked(asked, scenario)}{more}".rstrip()
    return f"{sweep} --resume {shlex.quote(str(run.path))} {_longer(scenario, trials)}"


def _way_on(
    error: BatchtuneError, run: Run, scenario: Scenario, trials: Sequence[Trial], *, asked: SloSpec | None
) -> str | None:
    """Return the command of `to_establish` for an answer that is open, and put it into the error's hint; else
    None."""
    if not isinstance(error, InconclusiveError):
        return None
    step = to_establish(run, scenario, trials, asked=asked)
    if step is not None:
        purpose = "give the sweep more time" if too_short(trials, scenario) else "to look further"
        error.hint = f"{purpose}: {step}"
    return step


def _asked(slo: SloSpec | None, scenario: Scenario) -> str:
    """Return the --slo-… options that ask for this SLO, each with a space behind it; "" for None, the
    scenario's own."""
    if slo is None:
        return ""
    limits = {
        name.replace("_", "-"): f"{slo.goodput:g}" if name == "goodput" else format_duration(limit)
        for name, limit in slo.limits().items()
    }
    options = [f"--slo-{name} {text}" for name, text in limits.items()]
    if slo.error_ratio != scenario.slo.error_ratio:
        options.append(f"--slo-errors {slo.error_ratio:g}")
    return " ".join([*options, ""])


def _longer(scenario: Scenario, trials: Sequence[Trial]) -> str:
    """Return the options that give a sweep twice its budget, twice what it really spent, or what it has without a
    budget, whichever is most."""
    search, options = scenario.search, []
    if search.budget.time_s is not None:
        given_s = search.budget.time_s if search.budget_is_given else 0.0
        seconds = math.ceil(max(2.0 * given_s, 2.0 * measuring_s(trials), DEFAULT_TIME_BUDGET_S))
        options.append(f"--budget {seconds // 60}m" if seconds % 60 == 0 else f"--budget {seconds}s")
    if search.budget.trials is not None:
        tried = {trial.configuration for trial in trials if trial.source not in NO_CANDIDATES | REPEATS}
        options.append(f"--set search.budget.trials={2 * max(search.budget.trials, len(tried))}")
    return " ".join(options)


def _run_line(run: Run) -> str:
    """Return the line that names a run and its age: `Run results/quickstart/…, 3 h old`."""
    started = datetime.strptime(run.path.name[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    minutes = max(0, round((datetime.now(UTC) - started).total_seconds() / 60))
    length, unit = (1, "min") if minutes < 120 else (60, "h") if minutes < 2880 else (1440, "days")
    return f"Run {run.path}, {minutes // length} {unit} old"


def parameters_file(run: Run, written: Path | None, chosen: Recommendation) -> Path:
    """Return the path of the recommended parameters: `written`, else the run's own file where its text is
    equal.

    `FILE`, a placeholder, where there is no such file yet.
    """
    if written is not None:
        return written
    kept = run.path / parameters_name(chosen.configuration)
    try:
        is_same = all(
            path.read_text(encoding="utf-8") == text for path, text in run.server_files(chosen).items()
        )
    except (OSError, UnicodeDecodeError):
        is_same = False
    return kept if is_same else Path("FILE")


def _keep(run: Run, chosen: Recommendation) -> None:
    """Save the recommendation in the run; where that fails, as in somebody else's run, print a note: the
    answer holds."""
    try:
        run.write_recommendation(chosen, worded(chosen.to_dict(), read_again=True))
    except ArchiveError as error:
        print(f"note: {error.message}; --write FILE keeps the parameters elsewhere", file=sys.stderr)


def formatted(
    chosen: Recommendation,
    dialect: RenderedDialect,
    model_config: Mapping[str, Any] | None = None,
    *,
    scenario: Scenario | None = None,
) -> str:
    """Return the recommended configuration as text in a dialect; for Triton with the rest of the model's
    configuration.

    `model_config`: that configuration, None where it is not known. With `scenario`, dialects that start a
    server (flags, k8s, kserve) have the model's name and all flags that the server had in the trials.

    Raises:
        BatchingParametersError: the dialect cannot express it.
    """
    configuration = chosen.configuration
    if dialect == "triton":
        alien = () if configuration.dialect == "triton" else configuration.flags
        return without_counterpart(alien, "Triton") + tritons_file(chosen, model_config)
    name, text = parameters_name(configuration), parameters_text(chosen, model_config)
    file = ParametersFile(name=name, text=text)
    model = "model" if scenario is None else deployed_name(configuration, scenario.target)
    starting = ("flags", "k8s", "kserve")  # Dialects in which a server's own flags are written.
    if scenario is not None and dialect in starting:
        configuration = as_started(configuration, scenario)
    return rendered(configuration, dialect, model=model, rows_per_request=chosen.rows_per_request, file=file)


def _write(path: Path, text: str, *, beside: Mapping[Path, str]) -> None:
    """Write the parameters to `path`, whole or not at all; a path that is no plain file, such as /dev/stdout,
    is written to.

    `beside`: every file that several models need, by path; with a single entry it is not used. A file that had another
    text is named on stderr.

    Raises:
        UsageError: it cannot be written.
    """
    texts = beside if len(beside) > 1 else {path: text}
    try:
        replaced = [kept for kept in texts if kept.is_file() and kept.read_bytes() != texts[kept].encode()]
        if len(beside) > 1:
            write_server_files(beside)
        elif path.is_file() or not path.exists():
            write_whole(path.resolve(), text.encode())
        else:
            path.write_text(text, encoding="utf-8")
    except (OSError, ArchiveError) as error:
        why = f"{path} cannot be written: {error.strerror}" if isinstance(error, OSError) else error
        raise UsageError(f"--write: {why}") from error
    for kept in replaced:
        print(f"note: replaced {kept}, which had another text", file=sys.stderr)
